"""Starting the ranks of a run, and handling their end."""
