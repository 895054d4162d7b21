"""What acts on a run: learning rates, and optimizers, metrics and callbacks of the user's own."""
