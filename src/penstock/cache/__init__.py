"""Bookkeeping of the KV cache: who owns which page. Holds no bytes and knows no tensors."""
