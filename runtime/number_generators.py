"""The global generators of Python (`random`) and of NumPy (`np.random`): seeds and states.

Their states together are a `u8[n]` of fixed length, which can travel with that of torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PYTHON_VERSION = 3
"""Version number in what `random.getstate` returns."""

_STATES = np.dtype(
    [
        ("words", np.uint32, 625), ("has_gauss", np.bool_), ("gauss", np.float64),
        ("key", np.uint32, 624), ("position", np.uint32),
        ("numpy_has_gauss", np.bool_), ("numpy_gauss", np.float64),
    ]
)  # fmt: skip

NUMBER_STATE_BYTES = _STATES.itemsize


def seed_numbers(seed: int) -> None:
    """Seeds both generators; NumPy's takes the low 32 bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seeded_number_state(seed: int) -> Tensor:
    """The states that `seed_numbers` would set."""
    numpy_state: Any = np.random.RandomState(seed % 2**32).get_state()
    return _packed(random.Random(seed).getstate(), numpy_state)


def number_state() -> Tensor:
    """The current states."""
    return _packed(random.getstate(), np.random.get_state())


def set_number_state(state: Tensor) -> None:
    """Continues with states that `number_state` or `seeded_number_state` returned."""
    (record,) = np.frombuffer(state.numpy().tobytes(), _STATES)
    gauss = float(record["gauss"]) if record["has_gauss"] else None
    random.setstate((_PYTHON_VERSION, tuple(record["words"].tolist()), gauss))
    np.random.set_state(
        (
            "MT19937", record["key"], int(record["position"]),
            int(record["numpy_has_gauss"]), float(record["numpy_gauss"]),
        )
    )  # fmt: skip


@contextmanager
def numbers_kept() -> Iterator[None]:
    """After the block both generators have the states that they had before it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _packed(python_state: Any, numpy_state: Any) -> Tensor:
    version, words, gauss = python_state
    assert version == _PYTHON_VERSION
    _, key, position, has_gauss, numpy_gauss = numpy_state
    record = np.zeros(1, _STATES)
    record[0] = (words, gauss is not None, gauss or 0.0, key, position, has_gauss, numpy_gauss)
    return torch.from_numpy(np.frombuffer(record.tobytes(), np.uint8).copy())
