"""Options of a run: as the user gave them, and resolved against a plan."""
