"""Replicas on a virtual clock: the scheduler, cache and balancer themselves, and a device that takes the predicted times."""
