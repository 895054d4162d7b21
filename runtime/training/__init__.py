"""Training on one rank: setup, the loop over segments, optimizer steps, evaluation and
checkpoints."""
