"""The parts that models are composed of. Layers see tensors and a Step; they know nothing of requests."""
