"""A seed and a micro-batch -> the random numbers that its forward draws, wherever it runs.

A micro-batch has its own generator state. It begins as `torch.manual_seed(micro_batch_seed(seed,
i))` makes it, travels from each stage that draws to the next one that does, and is put in place
of the device's state for the time of one forward. So dropout is that of the uncut model, bit for
bit, in every schedule and on any number of ranks; and neither data loading nor other
micro-batches disturb it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
    """One micro-batch's generator state, a `u8[n]` on the host; `drawing` moves it on."""

    def __init__(self, device: torch.device, state: Tensor) -> None:
        self.device = device
        self.state = state.cpu()

    @classmethod
    def seeded(cls, device: torch.device, seed: int) -> GeneratorState:
        return cls(device, torch.Generator(device).manual_seed(seed).get_state())

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the device's own generator continues from this state."""
        outside = _get_state(self.device)
        _set_state(self.device, self.state)
        try:
            yield
            self.state = _get_state(self.device)
        finally:
            _set_state(self.device, outside)


def _get_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
