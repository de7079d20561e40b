"""The scheduler: plans each step's segments, and decides service order, admission and preemption. Pure Python, no tensors."""
