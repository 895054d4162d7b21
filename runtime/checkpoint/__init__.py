"""Checkpoints: what a run is at a step, on disk, and how another goes on from there."""
