"""Several devices as one: the place of a rank, and the exchange of tensors between ranks."""
