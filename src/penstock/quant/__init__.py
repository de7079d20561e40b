"""Schemes: the formats in which the numbers of a weight matrix are stored. One file has all that are alike."""
