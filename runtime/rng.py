"""Reproducible random numbers: of a micro-batch's forward, and of the user's own code.

A micro-batch has its own generator state. It begins as `torch.manual_seed(micro_batch_seed(seed,
i))` makes it, travels from each stage that draws to the next one that does, and replaces the
device's state during one forward. So dropout equals that of the unsplit model, bit for bit, in
every schedule and on any number of ranks; neither data loading nor other micro-batches disturb it.
If a forward draws from the global generators of Python (`random`) or NumPy (`np.random`), their
states travel with it, as a `u8[n]` of fixed length; they begin with the same seed.

The user's own code (data, criterion, trackers) draws from the generators of Python, NumPy and
torch. They are seeded for each purpose, alike on all ranks: earlier imports, reads and logs of a
rank make no difference.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import AsyncPipeError
from .user_code import import_object

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


def seed_torch(seed: int) -> None:
    """Seeds torch's own generators, as `torch.manual_seed`, which without an accelerator notes the
    whole stack each time for one that may be found later."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


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


_MASK = (1 << 64) - 1


def micro_batch_seed(seed: int, micro_batch: int) -> int:
    """A number of 63 bits for `torch.manual_seed`, from the run's seed and a micro-batch.

    The mixer is splitmix64's (Steele et al. 2014): torch's CPU generator keeps only the low 32
    bits of a seed, so all the information must be in them.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + micro_batch + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) >> 1


class GeneratorState:
    """One micro-batch's generator state, a `u8[n]` on the host; `drawing` moves it on. With
    `numbers` the last bytes are the states of Python's and NumPy's generators."""

    def __init__(self, device: torch.device, state: Tensor, numbers: bool = False) -> None:
        self.device = device
        self.numbers = numbers
        self.state = state.cpu()

    @classmethod
    def seeded(cls, device: torch.device, seed: int, numbers: bool = False) -> GeneratorState:
        state = torch.Generator(device).manual_seed(seed).get_state()
        return cls(device, _joined(state, seeded_number_state(seed) if numbers else None), numbers)

    @classmethod
    def of_micro_batch(
        cls,
        device: torch.device,
        seed: int,
        micro_batch: int,
        numbers: bool,
        state: Tensor | None = None,
    ) -> GeneratorState:
        """The state with which a micro-batch's forward begins, or goes on at a later stage from the
        `state` that an earlier one sent."""
        if state is None:
            return cls.seeded(device, micro_batch_seed(seed, micro_batch), numbers)
        return cls(device, state, numbers)

    def copy(self) -> GeneratorState:
        return GeneratorState(self.device, self.state, self.numbers)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the device's own generator continues from this state."""
        outside = generator_state(self.device, self.numbers)
        self._set(self.state)
        try:
            yield
            self.state = generator_state(self.device, self.numbers)
        finally:
            self._set(outside)

    def _set(self, state: Tensor) -> None:
        if self.numbers:
            set_number_state(state[-NUMBER_STATE_BYTES:])
            state = state[:-NUMBER_STATE_BYTES]
        _set_state(self.device, state)


def generator_state(device: torch.device, numbers: bool) -> Tensor:
    """The current state of a device's generator, with `numbers` also of Python's and NumPy's."""
    return _joined(_get_state(device), number_state() if numbers else None)


def _joined(state: Tensor, numbers: Tensor | None) -> Tensor:
    return state if numbers is None else torch.cat([state, numbers])


def _get_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


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
