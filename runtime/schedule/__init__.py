"""Schedules as data: what each rank does, in order. Nothing here imports torch."""
