"""Which positions run now, in which order requests are served, who enters and who is preempted. Pure Python, no tensors."""
