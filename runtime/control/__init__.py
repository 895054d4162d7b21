"""Learning rates of a run, and the user's own optimizers, metrics and callbacks."""
