"""Operations on tensors. Each has a plain PyTorch reference, which is the oracle of its tests and the fallback anywhere."""
