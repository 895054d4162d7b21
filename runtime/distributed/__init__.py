"""The ranks of a run: their resources, process groups and failures."""
