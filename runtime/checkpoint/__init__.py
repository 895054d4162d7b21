"""Checkpoints: the state of a run after a step, written to disk, and how a run resumes from it."""
