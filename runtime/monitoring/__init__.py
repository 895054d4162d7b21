"""Observing a run: records, trackers, traces, idle shares, stalls and their causes."""
