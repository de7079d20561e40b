"""How the numbers of a weight matrix are stored: schemes, one file each. Kernels that compute with them are in `ops/`."""
