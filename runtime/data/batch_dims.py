"""A plan -> the dimension of each field that counts samples, and micro-batches laid out so.

A dataset gives samples one after the other in dimension 0. A model may want them in another
dimension; may want an input that all samples have in common; or may have no batch, and then a
micro-batch is one whole sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import DataError
from ..plan import Plan
from ..structure import names_in
from .task import TARGET

BatchDims = Mapping[str, int | None]


def batch_dims(plan: Plan) -> dict[str, int | None]:
    """The dimension of each input and of the target that counts samples; None for an input without
    one. The target has it where the model's first output has it, else where the first input has."""
    dims = {spec.name: spec.batch_dim for spec in plan.inputs}
    outputs = set(names_in(plan.outputs))
    made = [spec.batch_dim for spec in plan.values if spec.name in outputs]
    known = [dim for dim in (*made, *dims.values()) if dim is not None]
    return {**dims, TARGET: known[0] if known else None}


def laid_out(values: Mapping[str, Tensor], dims: BatchDims) -> dict[str, Tensor]:
    """A micro-batch with its samples in the dimensions that the model has them in.

    Raises DataError where an input that all samples have in common differs between them.
    """
    has_batch = any(dim is not None for dim in dims.values()) or not dims
    return {
        name: _laid_out(name, value, dims.get(name, 0), has_batch) for name, value in values.items()
    }


def _laid_out(name: str, value: Tensor, dim: int | None, has_batch: bool) -> Tensor:
    if dim is not None:
        # A target of one number a sample has one dimension only.
        return value.movedim(0, min(dim, value.dim() - 1)).contiguous()
    if not has_batch and len(value) > 1:
        return value.contiguous()  # The plan has one batch size, as a number.
    if not all(torch.equal(value[0], other) for other in value[1:]):
        raise DataError(
            f"{name} has no batch in the model, but differs between samples of a micro-batch.",
            "Give all samples the same one, or train with --micro-batch-size 1.",
        )
    return value[0].contiguous()
