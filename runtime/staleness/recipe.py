"""An optimizer and a delay -> the staleness methods that are recommended: `--staleness auto`.

    optimizer       no delay    one step                  up to 7 steps    more
    muon            stash       stash+partial-gradient    stash+msnag      stash
    all others      stash       stash                     stash            stash

The delay is that of the first stage, ceil(W/k): one step where a step has as many micro-batches as
the pipeline has stages, so that a part of the coming gradient is there when a forward begins. What
the rule rests on, and where that ends, is in docs/asynchronous-evidence.md. It is about more than
methods: muon loses least by being late, and least of all with k = p.
"""

from __future__ import annotations

AUTO = "auto"
FARTHEST = 7
"""The longest delay for which prediction by momentum was seen to help; with 15 steps it harms."""


def recommended(optimizer: str, delay: int, *, momentum: float = 0.95) -> str:
    """The names of the methods, joined by +. Without `momentum` nothing is predicted.

    >>> recommended("muon", delay=7), recommended("muon", delay=1), recommended("muon", delay=15)
    ('stash+msnag', 'stash+partial-gradient', 'stash')
    """
    if optimizer != "muon" or not delay or not momentum:
        return "stash"
    if delay == 1:
        return "stash+partial-gradient"
    return "stash+msnag" if delay <= FARTHEST else "stash"
