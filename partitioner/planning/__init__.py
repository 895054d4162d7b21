"""A cost graph and a cluster -> a plan: stages, their devices, and a proven bound."""
