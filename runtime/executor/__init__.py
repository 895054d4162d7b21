"""Runs the schedule of one rank: forwards, backwards and messages of its stages."""
