"""Waiting for another process that cannot wake this one.

Ranks share cores, so a wait must not spin: at first it only yields its core, then it naps. A nap is
a tenth of the time waited so far, which bounds the delay of a message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SHORTEST_NAP_S = 50e-6
LONGEST_NAP_S = 1e-3

EAGER_S = 200e-6
"""How long a rank that begins to wait only yields its core before it naps."""


def nap_s(quiet_s: float) -> float:
    """The length of the next nap, after nothing happened for so long."""
    return min(max(quiet_s / 10, SHORTEST_NAP_S), LONGEST_NAP_S)


def wait_until(is_done: Callable[[], bool], timeout_s: float, eager_s: float = EAGER_S) -> None:
    """Returns when `is_done` is true, which is asked repeatedly, without naps for `eager_s`. Raises
    TimeoutError."""
    start_s = time.monotonic()
    while not is_done():
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            raise TimeoutError
        if waited_s < eager_s:
            os.sched_yield()
        else:
            time.sleep(nap_s(waited_s))
