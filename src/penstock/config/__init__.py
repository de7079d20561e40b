"""Options: their schema, their resolution against a model and a device, and the command line flags made from them."""
