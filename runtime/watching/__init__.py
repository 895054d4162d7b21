"""What a run shows while it goes on: records, traces, idle shares, stalls and their causes."""
