"""Runs generated stages: plans, schedules, weight versions, transports and the training loop.

Generated code and this package are enough to train; the compiler (`asyncpipe.partitioner`)
is never imported from here.
"""

__version__ = "0.1.0"
