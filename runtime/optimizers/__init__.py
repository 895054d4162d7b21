"""Optimizers that torch has not, and which parameters are for which; torch's own are used as is."""
