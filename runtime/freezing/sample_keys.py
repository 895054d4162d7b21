"""The inputs of a stage -> the key of each sample of a micro-batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .arena import KEY_BYTES
from .sites import bytes_by_sample

OF_SAMPLE, OF_PLACE, OF_BATCH = "sample", "place", "batch"
"""What the last bits of a sample's values depend on: on itself alone, also on its place in the
micro-batch, or also on the other samples."""


def sample_keys(
    facts: object, inputs: Sequence[tuple[Tensor, int | None]], samples: int, scope: str
) -> list[bytes]:
    """A key for each sample, which has all that its values depend on.

    facts: what does not differ between micro-batches
    inputs: tensors, each with the dimension that counts samples
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
