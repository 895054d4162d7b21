"""A plan and a precision -> the dtype that each boundary tensor has at its stages, and on its way.

A plan is of the model as it was captured. Under autocast a stage may make in bfloat16 what the plan
has as float32, and whoever receives it has to go on from that, as the uncut model does. So every
rank runs all stages once on fake tensors, which costs no memory and draws no random numbers, and
finds the same dtypes.

Between ranks a tensor may be cast to a smaller dtype, and its gradient too; at both ends it has the
dtype that its stage made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import PlanError
from .loading import SkipRandomInit, load_stage_class
from .pipe import run_stage
from .plan import Plan, TensorSpec
from .precision import Precision


@dataclass(frozen=True, slots=True)
class BoundaryDtypes:
    """`weights` is what the plan's float32 tensors are, `made` what some boundaries are instead,
    by name. Wider floating-point tensors are cast to `crossing` between ranks."""

    weights: torch.dtype = torch.float32
    made: Mapping[str, torch.dtype] = field(default_factory=dict)
    crossing: torch.dtype | None = None

    def at_stages(self, tensor: TensorSpec) -> torch.dtype:
        planned: torch.dtype = getattr(torch, tensor.dtype)
        converted = self.weights if planned is torch.float32 else planned
        return self.made.get(tensor.name, converted)

    def between_ranks(self, tensor: TensorSpec) -> torch.dtype:
        own = self.at_stages(tensor)
        is_wider = self.crossing and own.is_floating_point and own.itemsize > self.crossing.itemsize
        return self.crossing if self.crossing and is_wider else own

    def cast(self, plan: Plan) -> dict[str, torch.dtype]:
        """The boundaries that are cast between ranks, with what they are at their stages."""
        tensors = [boundary.tensor for boundary in plan.boundaries]
        return {
            tensor.name: self.at_stages(tensor)
            for tensor in tensors
            if self.between_ranks(tensor) != self.at_stages(tensor)
        }


AS_PLANNED = BoundaryDtypes()
"""What the plan says."""


def dtypes_of_folder(
    folder: str | Path, plan: Plan, precision: Precision
) -> dict[str, torch.dtype]:
    """`dtypes_under` for a generated folder; empty where what the plan says holds."""
    if precision.dtype is None:
        return {}
    classes = [load_stage_class(folder, spec) for spec in plan.stages]
    return dtypes_under(precision, plan, classes)


def dtypes_under(
    precision: Precision, plan: Plan, stages: Sequence[Callable[[], nn.Module]]
) -> dict[str, torch.dtype]:
    """The dtype of every boundary tensor, found by running all stages on fake tensors. Raises
    PlanError when a stage cannot be run so."""
    device = torch.device(precision.device_type)
    values: dict[str, Any] = {}
    # The inner mode comes first: what asks for a value never gets to the fake tensors.
    no_values = _NoValues()  # type: ignore[no-untyped-call]
    with FakeTensorMode(allow_non_fake_inputs=True), device, no_values, SkipRandomInit():
        for tensor in plan.inputs:
            dtype = getattr(torch, tensor.dtype)
            values[tensor.name] = torch.empty(tensor.resolve(plan.sizes), dtype=dtype)
        for spec, build in zip(plan.stages, stages, strict=True):
            try:
                with precision.computing():
                    values.update(run_stage(spec, build(), values))
            except Exception as error:
                raise PlanError(
                    f"stage {spec.index} does not run on fake tensors, so what it sends under "
                    f"{precision.name} is not known: {type(error).__name__}: {error}",
                    "--precision full",
                ) from error
    names = {boundary.tensor.name for boundary in plan.boundaries}
    return {name: values[name].dtype for name in sorted(names)}


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every number read out of a tensor is 0: a guard's condition for refusing does not hold."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))
