"""Schemes: the formats in which the numbers of a weight matrix are stored, one file each. `ops/` has their kernels."""
