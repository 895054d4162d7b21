"""A seed and a purpose -> the random numbers that the user's own code draws for it.

Such code (data, criterion, trackers) draws from the generators of Python, NumPy and torch as it
likes. They are seeded for each purpose, alike on all ranks: what a rank imported, read or logged
before makes no difference. The forward of a micro-batch has a generator of its own
(`random_state.py`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .errors import AsyncPipeError
from .user_code import import_object


def seed_of(seed: int, *key: object) -> int:
    """A number of 63 bits for one purpose: equal seed and key, equal number, on every machine."""
    text = ":".join(map(str, (seed, *key)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def drawing_from(seed: int, *key: object) -> Iterator[None]:
    """Inside, Python, NumPy and torch (on the CPU) draw numbers that depend on the seed and the key
    alone; afterwards they continue where they were."""
    outside = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed_of(seed, *key, "python"))
    np.random.seed(seed_of(seed, *key, "numpy") & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed_of(seed, *key, "torch"))
    try:
        yield
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])
        torch.set_rng_state(outside[2])


def import_seeded(spec: str, option: str, error: type[AsyncPipeError], seed: int) -> Any:
    """Imports what `spec` names (`import_object`); what its code draws then depends on the seed and
    the module alone."""
    with drawing_from(seed, "import", spec.rpartition(":")[0]):
        return import_object(spec, option, error)
