"""Several runs: sweeps over options, and comparisons of methods."""
