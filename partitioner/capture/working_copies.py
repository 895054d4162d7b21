"""A model works on copies of its parameters and buffers for a while, moved by a little noise.

With its own numbers, a gate or a head of zeros, or a copy that is still equal to its source, hides
what comes after it. And what a forward does to the copies does not reach the caller's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor, nn

MOST_BYTES, SMALL = 2**31, 2**20
_PERIOD = 65_537
_SHARE, _OF_ZERO, _LARGEST = 0.1, 0.05, 1e6


class Noise(Enum):
    """What is moved: `ALL` parameters and saved buffers of floating point, the `PARAMETERS`, or
    `NONE`.

    A model may refuse some: a buffer may hold indices, or what was made of the weights. A buffer
    that no state_dict has follows from the configuration, perhaps from another such buffer.
    """

    ALL = "all"
    PARAMETERS = "parameters"
    NONE = "none"


class UnfitNoise(Exception):
    """The model does not compute with what the noise has made of its numbers."""


class WorkingCopies:
    """The copies that a model has now; `reset` makes them what they were at first."""

    def __init__(self, model: nn.Module, noise: Noise, changing: Collection[str] | None) -> None:
        self._noise = noise
        self._parameters = dict(model.named_parameters())
        self._unsaved = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        named = [*self._parameters.items(), *model.named_buffers()]
        strided = [(name, tensor) for name, tensor in named if _is_plain(tensor)]
        self._users = Counter(tensor.untyped_storage()._cdata for _, tensor in strided)
        total = sum(tensor.numel() * tensor.element_size() for _, tensor in strided)
        self._places = [
            (place, name, tensor, tensor.data)
            for place, (name, tensor) in enumerate(strided)
            if self._users[tensor.untyped_storage()._cdata] == 1
            and (
                total <= MOST_BYTES
                or tensor.numel() <= SMALL
                or name in (changing or ())
                or _is_constant(tensor)
            )
        ]

    def reset(self) -> None:
        for place, name, tensor, own in self._places:
            first = self._first(place, name, own)
            if tensor.data_ptr() == own.data_ptr() or not torch.equal(tensor, first):
                tensor.data = first

    def changed(self) -> dict[str, Tensor]:
        """The values of the parameters that are not what they were at first."""
        return {
            name: tensor.detach().clone()
            for place, name, tensor, own in self._places
            if name in self._parameters and not torch.equal(tensor, self._first(place, name, own))
        }

    def give_back(self) -> None:
        for _, _, tensor, own in self._places:
            tensor.data = own

    def _first(self, place: int, name: str, own: Tensor) -> Tensor:
        is_parameter = name in self._parameters
        is_kept = name in self._unsaved or (self._noise is Noise.PARAMETERS and not is_parameter)
        if self._noise is Noise.NONE or is_kept:
            return own.clone()
        return moved(own, place, any_sign=is_parameter)


@contextmanager
def working_copies(
    model: nn.Module, noise: Noise, changing: Collection[str] | None = None
) -> Iterator[WorkingCopies]:
    """Within, the model has copies; after, it has its own memory again, whatever was done.

    Of a model of more than 2 GiB only small tensors, those of one value, and the parameters that
    `changing` names are copied and moved.
    """
    copies = WorkingCopies(model, noise, changing)
    try:
        copies.reset()
        yield copies
    finally:
        copies.give_back()


def moved(value: Tensor, place: int, *, any_sign: bool = True) -> Tensor:
    """A copy of `value` moved by noise that follows from `place`.

    Numbers of one sign keep it, zeros among others too; where all are zero they become positive, or
    of any sign. What is not finite, or as large as what masks are made of, stays.
    """
    made = value.clone()
    if not value.is_floating_point() or not value.numel():
        return made
    exact = value.detach() if value.dtype == torch.float64 else value.detach().float()
    noise = _noise(value.numel(), place).to(exact).view(value.shape)
    low, high = (float(bound) for bound in torch.aminmax(exact.nan_to_num()))
    if low == high == 0:
        other = _OF_ZERO * (noise if any_sign else noise.abs())
    elif low >= 0 or high <= 0:
        other = exact * (_SHARE * noise).exp()
    else:
        usual = torch.where(exact.abs() <= _LARGEST, exact, 0)
        other = exact + _SHARE * usual.square().mean().sqrt() * noise
    return made.copy_(torch.where(exact.abs() <= _LARGEST, other, exact))


@lru_cache(maxsize=1)
def _tile() -> Tensor:
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(17)).clamp(-3, 3)


def _noise(count: int, place: int) -> Tensor:
    """Numbers around zero, repeated: as many random numbers as large weights have take long."""
    tile = _tile().roll(7_919 * place % _PERIOD)
    return tile.repeat(-(-count // _PERIOD))[:count]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_inference()
    )


def _is_constant(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    low, high = torch.aminmax(tensor.detach())
    return bool(low == high)


def verify_finite(tensors: Iterable[Tensor]) -> None:
    """Raises UnfitNoise when one has a number that is not finite."""
    for tensor in tensors:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UnfitNoise
