"""The inputs of a stage -> the key of each sample of a micro-batch."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .arena import KEY_BYTES
from .sites import bytes_by_sample

OF_SAMPLE, OF_PLACE, OF_BATCH = "sample", "place", "batch"
"""Which facts decide the last bits of a sample's values: the sample alone, also its place in the
micro-batch, or also the other samples."""


Inputs = Sequence[tuple[Tensor, int | None]]
"""Tensors, each with the dimension that counts samples; None for one that has the same values for
all samples."""


class ShownInputs:
    """The keys of inputs that are shown before they are used; the last two are known."""

    def __init__(self) -> None:
        self._shown: deque[_Shown] = deque(maxlen=2)

    def add(self, facts: object, inputs: Inputs, keys: Sequence[bytes]) -> None:
        self._shown.append(_Shown(facts, [(each, _version(each)) for each, _ in inputs], keys))

    def take(self, facts: object, inputs: Inputs) -> Sequence[bytes] | None:
        """The keys of these inputs, once; None if they were not shown or have changed since."""
        shown = next((each for each in self._shown if each.is_of(facts, inputs)), None)
        if shown is None:
            return None
        self._shown.remove(shown)
        return shown.keys


@dataclass(frozen=True, eq=False)
class _Shown:
    """Inputs with their versions when they were shown. As long as they are kept, no other tensor
    has their memory."""

    facts: object
    tensors: Sequence[tuple[Tensor, int]]
    keys: Sequence[bytes]

    def is_of(self, facts: object, inputs: Inputs) -> bool:
        return self.facts == facts and all(
            own.data_ptr() == other.data_ptr()
            and own.stride() == other.stride()
            and _version(other) == version
            for (own, version), (other, _) in zip(self.tensors, inputs, strict=True)
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def sample_keys(facts: object, inputs: Inputs, samples: int, scope: str) -> list[bytes]:
    """A key for each sample, made of everything on which its values depend.

    facts: the facts that all micro-batches have in common
    """
    start = hashlib.blake2b(repr(facts).encode(), digest_size=KEY_BYTES)
    of_samples = []
    for tensor, dim in inputs:
        if dim is None:
            start.update(bytes_by_sample(tensor[None], 0, 1).data)
        else:
            of_samples.append(bytes_by_sample(tensor, dim, samples))
    if scope == OF_BATCH:
        for rows in of_samples:
            start.update(rows.data)
    keys = []
    for sample in range(samples):
        key = start.copy()
        if scope != OF_SAMPLE:
            key.update(sample.to_bytes(8, "big"))
        for rows in of_samples:
            key.update(rows[sample].data)
        keys.append(key.digest())
    return keys


def orders(samples: int) -> dict[str, list[int]]:
    """What values may depend on -> samples of a micro-batch in another order that shows whether it
    is nothing else.

    >>> orders(4)
    {'sample': [1, 1, 0, 0], 'place': [0, 0, 2, 2]}
    """
    return {
        OF_SAMPLE: [(samples - 1 - place) // 2 for place in range(samples)],
        OF_PLACE: [place - place % 2 for place in range(samples)],
    }


def reordered(argument: Tensor, dim: int | None, order: Sequence[int]) -> Tensor:
    """An argument with its samples in another order."""
    if dim is None:
        return argument
    return argument.index_select(dim, torch.tensor(order, device=argument.device))
