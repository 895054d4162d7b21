"""Tensors of the original and of the stages, by name -> how far they are apart, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..runtime.errors import PlanError
from .capture.structure import plain_structure

_REPORT = (
    "No rule of asyncpipe explains this: please report the model. Keeping the module that makes it "
    "as one node (--leaf Class) may help until then."
)


def leaves_of(outputs: Any) -> dict[str, Tensor]:
    """Every tensor and number in an output structure by its path; None entries are left out."""
    paths, _ = pytree.tree_flatten_with_path(plain_structure(outputs))
    return {
        pytree.keystr(path) or "output": leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
        for path, leaf in paths
        if isinstance(leaf, (Tensor, int, float))
    }


def total_of(outputs: Mapping[str, Tensor]) -> Tensor:
    """The loss, or a weighted sum of all outputs when there is none."""
    for path, value in outputs.items():
        if "loss" in path and value.dim() == 0 and value.requires_grad:
            return value
    return torch.stack(
        [
            (value.double() * torch.linspace(0.5, 1.5, value.numel()).view_as(value)).mean()
            for value in outputs.values()
            if value.requires_grad
        ]
    ).sum()


def detached(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {path: value.detach().clone() for path, value in outputs.items()}


def compare(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float, what: str
) -> float:
    """The largest relative difference; raises PlanError naming the first value beyond tolerance."""
    if expected.keys() != actual.keys():
        name = sorted(expected.keys() ^ actual.keys())[0]
        where = "the original" if name in expected else "the stages"
        raise PlanError(f"only {where} has the {what} {name}.")
    largest, floor = 0.0, 1e-6
    if what.startswith("gradient"):
        # One that is zero but for rounding, as a key's bias before a softmax, has no scale itself.
        floor = max([floor, *(1e-4 * _magnitude(wanted) for wanted in expected.values())])
    for name, wanted in expected.items():
        got = actual[name]
        if wanted.shape != got.shape or wanted.dtype != got.dtype:
            raise PlanError(
                f"the {what} {name} is {wanted.dtype} {tuple(wanted.shape)} in the original, "
                f"{got.dtype} {tuple(got.shape)} in the stages."
            )
        if wanted.numel() == 0:
            continue
        if not wanted.is_floating_point() and not wanted.is_complex():
            wanted, got = wanted.double(), got.double()
        # In front of a batch norm the gradient of a bias is zero but for rounding, which is that of
        # the terms of its weight's gradient.
        weight = expected.get(f"{name.removesuffix('bias')}weight", wanted)
        of_terms = _magnitude(weight) if what.startswith("gradient") else 0.0
        scale = max(_magnitude(wanted), floor, of_terms)
        difference = _magnitude(wanted - got) / scale
        if not difference <= tolerance:
            raise PlanError(
                f"the {what} {name} of the generated stages differs from the original's by "
                f"{difference:.1e} of its largest magnitude; {tolerance:.0e} is allowed.",
                _REPORT,
            )
        largest = max(largest, difference)
    return largest


def _magnitude(value: Tensor) -> float:
    """The largest absolute value, nan if there is one; in one pass, where torch can."""
    if not value.numel():
        return 0.0
    if value.is_sparse:
        return _magnitude(value.coalesce().values())
    if value.is_complex():
        return float(value.abs().max())
    least, most = torch.aminmax(value.detach())
    return float(torch.maximum(-least, most))
