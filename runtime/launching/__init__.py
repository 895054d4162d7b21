"""Ranks: how they are started and found, where each sits, and how their first failure is named."""
