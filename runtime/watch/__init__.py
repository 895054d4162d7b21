"""A page that follows runs: their folders are read, and nothing of them is run or changed."""
