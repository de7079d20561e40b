"""Schemes: the formats in which the numbers of a weight matrix are stored. Those that are alike share a file."""
