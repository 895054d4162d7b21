"""The facts of each optimizer, and those that torch does not have; torch's own are used as is."""
