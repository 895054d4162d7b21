"""The cost graph of a captured model, and the planning problem on it."""
