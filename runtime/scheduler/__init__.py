"""A schedule computed from costs: `auto` on the command line."""
