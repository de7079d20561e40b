"""Replicas on a virtual clock: the scheduler, the cache and the balancer themselves, and a device that takes as long as a model
of step time says."""
