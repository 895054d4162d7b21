"""Capture and the stage of every node -> one graph per stage."""
