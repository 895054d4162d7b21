"""Example inputs -> inputs of other sizes, made of the example's own values, that a model takes.

A model may ask for an end of sentence, for sorted offsets, for lengths that fit. So a dimension is
shortened or stretched in order, its first and last entry staying where they are, and what the model
itself does not take is no test of its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...runtime.plan import TensorSpec
from .fakes import Dynamic

Attempted = TypeVar("Attempted")
Tensors = dict[str, Tensor]

BATCH = "batch"
"""The symbol of the dimension that counts samples."""


class Sample(NamedTuple, Generic[Attempted]):
    """Inputs at `sizes`, and what the model made of them."""

    sizes: dict[str, int]
    inputs: Tensors
    result: Attempted


def resized(
    inputs: Mapping[str, Tensor], dims: Dynamic, sizes: Mapping[str, int], *, shuffled: bool = False
) -> Tensors:
    """Inputs of other sizes whose values are those of the given ones; `shuffled` moves the last
    sample of the batch to its front.

    >>> resized({"x": torch.tensor([1, 5, 5, 9])}, {"x": {0: "n"}}, {"n": 3})["x"].tolist()
    [1, 5, 9]
    """
    result = dict(inputs)
    for name, named in dims.items():
        if name not in inputs:
            continue
        tensor = inputs[name]
        for dim, symbol in named.items():
            length, wanted = tensor.shape[dim], sizes[symbol]
            if length != wanted:
                positions = torch.arange(wanted, device=tensor.device)
                index = positions * (length - 1) // max(wanted - 1, 1)
                tensor = tensor.index_select(dim, index)
            if shuffled and symbol == BATCH:
                tensor = tensor.roll(1, dim)
        result[name] = tensor
    return result


def smaller_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Small sizes that differ from the given ones and from each other.

    >>> smaller_sizes({"batch": 4, "sequence": 128})
    {'batch': 3, 'sequence': 17}
    """
    others: dict[str, int] = {}
    for number, (name, size) in enumerate(sizes.items()):
        others[name] = min(size - 1, 3 + 14 * number) if size > 2 else 3
    return others


def nearby_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that are one less, or one more where that would be 1.

    >>> nearby_sizes({"batch": 2, "sequence": 128})
    {'batch': 3, 'sequence': 127}
    """
    return {name: size - 1 if size > 2 else size + 1 for name, size in sizes.items()}


def larger_sizes(sizes: Mapping[str, int], *, all_of_them: bool) -> list[dict[str, int]]:
    """Sizes well above the given ones: of all symbols, and of the batch alone.

    >>> larger_sizes({"batch": 4, "sequence": 128}, all_of_them=True)
    [{'batch': 9, 'sequence': 257}, {'batch': 9, 'sequence': 17}]
    """
    larger = {name: 2 * size + 1 for name, size in sizes.items()}
    small = smaller_sizes(sizes)
    of_batch = [{**small, BATCH: larger[BATCH]}] if BATCH in sizes else []
    return [*([larger] if all_of_them and sizes else []), *of_batch]


def dynamic_of(inputs: Sequence[TensorSpec]) -> Dynamic:
    """The symbol of each free dimension of a plan's or a capture's inputs."""
    return {
        spec.name: {dim: size for dim, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in inputs
    }


def refused_by_model(
    model: nn.Module, sizes: Mapping[str, int], error: Exception
) -> tuple[str, str]:
    """What happened and the cure, where a model does not take its own example."""
    told = str(error).strip().split("\n")[0]
    return (
        f"{type(model).__name__} itself raises {type(error).__name__} on its example inputs"
        f"{sizes_text(sizes, ' at ')}: {told}",
        "Give example inputs on which forward and backward run, in training and in evaluation.",
    )


def sizes_text(sizes: Mapping[str, int], before: str = "") -> str:
    """Sizes in words, ` at 3 batch × 17 sequence`; nothing where no size is free."""
    words = " × ".join(f"{size} {name}" for name, size in sizes.items())
    return before + words if words else ""


def first_taken(
    attempt: Callable[[Tensors], Attempted],
    inputs: Mapping[str, Tensor],
    dims: Dynamic,
    captured: Mapping[str, int],
    choices: Sequence[Mapping[str, int]],
) -> Sample[Attempted]:
    """The inputs of other sizes than `captured` that `attempt` takes without an exception.

    They have the first of `choices` that is taken whole. Where none is, each size that is taken by
    itself is changed, the batch first; and where none is either, they have the captured sizes.
    Raises what `attempt` raises on the captured sizes.
    """
    for sizes in choices:
        if (sample := taken(attempt, inputs, dims, sizes)) is not None:
            return sample
    current: Sample[Attempted] | None = None
    sizes = dict(captured)
    for symbol in sorted(captured, key=lambda name: name != BATCH):
        for choice in choices if len(captured) > 1 else ():
            changed = {**sizes, symbol: choice[symbol]}
            if (sample := taken(attempt, inputs, dims, changed)) is not None:
                current, sizes = sample, changed
                break
    if current is None:
        own = resized(inputs, dims, captured)
        current = Sample(dict(captured), own, attempt(own))
    return current


def taken(
    attempt: Callable[[Tensors], Attempted],
    inputs: Mapping[str, Tensor],
    dims: Dynamic,
    sizes: Mapping[str, int],
) -> Sample[Attempted] | None:
    """The inputs of these sizes, if `attempt` takes them without an exception."""
    for tensors in _orders(inputs, dims, sizes):
        try:
            return Sample(dict(sizes), tensors, attempt(tensors))
        except Exception:  # The model has a rule about its inputs: try others.
            continue
    return None


def _orders(
    inputs: Mapping[str, Tensor], dims: Dynamic, sizes: Mapping[str, int]
) -> Iterator[Tensors]:
    """The samples in another order, and in their own: lengths may have to be sorted."""
    if any(BATCH in named.values() for named in dims.values()):
        yield resized(inputs, dims, sizes, shuffled=True)
    yield resized(inputs, dims, sizes)
