"""Several replicas of a pipeline: their grid of ranks, sums of gradients, proof of equality."""
