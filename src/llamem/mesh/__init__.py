"""A device's part of a step: who holds what, split weights, tensor and context parallelism."""
