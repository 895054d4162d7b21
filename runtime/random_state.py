"""A seed and a micro-batch -> the random numbers that its forward draws, wherever it runs.

A micro-batch has its own generator state. It begins as `torch.manual_seed(micro_batch_seed(seed,
i))` makes it, travels from each stage that draws to the next one that does, and is put in place
of the device's state for the time of one forward. So dropout is that of the uncut model, bit for
bit, in every schedule and on any number of ranks; and neither data loading nor other
micro-batches disturb it. Where a forward draws from Python's or NumPy's global generator
(`numbers`), the states of these two travel with it; they begin with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .number_generators import (
    NUMBER_STATE_BYTES,
    number_state,
    seeded_number_state,
    set_number_state,
)

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

    def copy(self) -> GeneratorState:
        return GeneratorState(self.device, self.state, self.numbers)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the device's own generator continues from this state."""
        outside = self._current()
        self._set(self.state)
        try:
            yield
            self.state = self._current()
        finally:
            self._set(outside)

    def _current(self) -> Tensor:
        return _joined(_get_state(self.device), number_state() if self.numbers else None)

    def _set(self, state: Tensor) -> None:
        if self.numbers:
            set_number_state(state[-NUMBER_STATE_BYTES:])
            state = state[:-NUMBER_STATE_BYTES]
        _set_state(self.device, state)


def _joined(state: Tensor, numbers: Tensor | None) -> Tensor:
    return state if numbers is None else torch.cat([state, numbers])


def _get_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
