"""The five commands, of which each is a module in commands/.

asyncpipe-partition --model gpt2 --stages 4
asyncpipe-train generated_models/gpt2_4p
asyncpipe-inspect generated_models/gpt2_4p
asyncpipe-compare generated_models/gpt2_4p --methods sync stash none
asyncpipe-info
"""

from __future__ import annotations

import sys

from .commands.running import run


def partition() -> None:
    """Entry point of asyncpipe-partition."""
    from .commands.partition import app

    sys.exit(run(app))


def train() -> None:
    """Entry point of asyncpipe-train."""
    from .commands.train import app

    code = run(app)
    if "torch.distributed" in sys.modules:  # else only --help, or a usage error
        from .runtime.launching.failure import end_process

        end_process(code)
    sys.exit(code)


def inspect() -> None:
    """Entry point of asyncpipe-inspect."""
    from .commands.inspect import app

    sys.exit(run(app))


def compare() -> None:
    """Entry point of asyncpipe-compare."""
    from .commands.compare import app

    sys.exit(run(app))


def info() -> None:
    """Entry point of asyncpipe-info."""
    from .commands.info import app

    sys.exit(run(app))
