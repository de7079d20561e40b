"""CPU kernels register here."""
