"""An optimizer and a delay -> the staleness methods that are recommended: `--staleness auto`.

    optimizer           with a delay        without
    muon                stash+msnag         stash
    all others          stash               stash

The delay is that of the first stage, ceil(W/k). What the rule rests on, and where that ends, is in
docs/asynchronous-evidence.md. It is about more than methods: muon loses least by being late, and
least of all with k = p.
"""

from __future__ import annotations

AUTO = "auto"


def recommended(optimizer: str, delay: int, *, momentum: float = 0.95) -> str:
    """The names of the methods, joined by +. Without `momentum` nothing is predicted.

    >>> recommended("muon", delay=7), recommended("muon", delay=0), recommended("adamw", delay=7)
    ('stash+msnag', 'stash', 'stash')
    """
    return "stash+msnag" if optimizer == "muon" and delay and momentum else "stash"
