"""The cost of every operation of a captured model: measured here, or predicted for a device."""
