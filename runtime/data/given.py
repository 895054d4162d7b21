"""A batch of a training loop -> micro-batches by input name.

A batch is what the model is called with: a mapping of arguments, a tuple in the order of forward's
arguments, or one tensor; with a loss outside the model the target comes last, or under `target`. It
has all samples of an optimizer step, in the dimension in which the model has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..formatting import counted
from ..plan.plan import Plan
from ..tensor_files import raw_bytes
from .samples import OTHER_NAMES
from .task import TARGET, InputDtypes, arguments_of, batch_dims, named_inputs, sizes_of


@dataclass(frozen=True)
class GivenBatch:
    """The micro-batches of a batch.

    parts: the values of each micro-batch by input name.
    sizes: the numbers that the plan's symbols stand for in each micro-batch.
    """

    parts: tuple[Mapping[str, Tensor], ...]
    sizes: tuple[Mapping[str, int], ...]

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of each micro-batch."""
        return tuple(sizes.get("batch", 1) for sizes in self.sizes)

    def digest(self) -> bytes:
        """32 bytes that differ when a value does."""
        sha256 = hashlib.sha256()
        for part in self.parts:
            for name in sorted(part):
                value = part[name].detach().cpu().contiguous()
                sha256.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                sha256.update(raw_bytes(value))
        return sha256.digest()


def split_batch(
    plan: Plan, batch: Any, count: int, *, replicas: int, target: bool, dtypes: InputDtypes
) -> GivenBatch:
    """A batch in `count` micro-batches, of sizes as equal as possible, larger ones first; in fewer
    where it has fewer samples.

    replicas: each gets as many micro-batches as the others.
    target: a loss outside the model reads a target.
    dtypes: those of the values.

    Raises DataError for a batch that does not fit the plan.
    """
    values = {
        name: dtypes.cast(name, value)
        for name, value in named_values(plan, batch, target=target).items()
    }
    dims = batch_dims(plan)
    if TARGET in values and (dim := dims[TARGET]) is not None:
        dims[TARGET] = min(dim, max(0, values[TARGET].dim() - 1))
    lengths = {
        name: value.shape[dim]
        for name, value in values.items()
        if (dim := dims.get(name)) is not None and value.dim() > dim
    }
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"the inputs of a batch differ in their number of samples: {counts}.")
    samples = next(iter(lengths.values()), 1)
    parts = min(count, samples) // replicas * replicas
    if samples == 0:
        raise DataError("the batch has no samples.")
    if parts == 0:
        raise DataError(
            f"the batch has {counted(samples, 'sample')}, but {replicas} replicas need one each.",
            "Leave small last batches out: DataLoader(..., drop_last=True).",
        )
    whole, more = divmod(samples, parts)
    sizes = [whole + (index < more) for index in range(parts)]
    cut = {
        name: torch.split(value, sizes, dims[name] or 0) if name in lengths else [value] * parts
        for name, value in values.items()
    }
    pieces = [{name: of[index].contiguous() for name, of in cut.items()} for index in range(parts)]
    known = [
        {**sizes_of(plan, {k: v for k, v in piece.items() if k != TARGET}), "batch": size}
        for piece, size in zip(pieces, sizes, strict=True)
    ]
    return GivenBatch(tuple(pieces), tuple(known))


def named_values(plan: Plan, batch: Any, *, target: bool) -> dict[str, Tensor]:
    """The tensors of a batch by input name, with its target if that is wanted. Raises DataError
    where one is missing."""
    if isinstance(batch, Mapping):
        args: Sequence[Any] = ()
        kwargs = dict(batch)
    else:
        args, kwargs = _positional(batch), {}
        if target:
            *args, kwargs[TARGET] = args
            if not args and arguments_of(plan):
                raise DataError(
                    "the batch is a single value, but the loss needs a target, too.",
                    "Give a tuple of the inputs and the target.",
                )
    own = kwargs.pop(TARGET, None)
    if own is None and target:
        free = [name for name in OTHER_NAMES[TARGET] if name not in arguments_of(plan)]
        own = next((kwargs.pop(name) for name in free if name in kwargs), None)
    if not target and len(args) == 1 + len(arguments_of(plan)):
        args = args[:-1]  # a loader's pairs, for a prediction
    values = {
        name: torch.as_tensor(value) for name, value in named_inputs(plan, args, kwargs).items()
    }
    if not target:
        return values
    if own is None:
        raise DataError(
            f"the batch has {', '.join(values)} and no target for the loss.",
            "Give it under the name target, or as the last value of a tuple.",
        )
    return {**values, TARGET: torch.as_tensor(own)}


def _positional(batch: Any) -> Sequence[Any]:
    """The arguments of a batch that has no names."""
    if isinstance(batch, tuple | list):
        return tuple(batch)
    if isinstance(batch, Tensor) or hasattr(batch, "__array__"):
        return (batch,)
    raise DataError(
        "a batch is a dict of the model's arguments, a tuple of them or a tensor, not an object "
        f"of class {type(batch).__name__}.",
        "Give what a DataLoader yields, batch by batch.",
    )
