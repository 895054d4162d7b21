"""Parameters that stop training during a run: which, when, and what the stages are then."""
