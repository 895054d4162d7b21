"""Optimizer state, and gradients, that the replicas of a stage share out among them (`--zero`)."""
