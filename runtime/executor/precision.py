"""The precision of forwards (torch.autocast), and the dtypes of boundary tensors.

Weights, gradients and the optimizer keep their dtype; under autocast torch computes matrix products
and similar operations in half the bytes. Only forwards run in a region of autocast. The results
equal those of one region around the whole model.

A plan describes the model as it was captured. Under autocast a stage may make in bfloat16 a tensor
that is float32 in the plan, and its receiver must continue with that, as the unsplit model does.
Therefore every rank runs all stages once on fake tensors, which costs no memory and draws no random
numbers, and finds the same dtypes. Between ranks a tensor and its gradient may be cast to a smaller
dtype; at both ends it has the dtype that its stage made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import PlanError
from ..plan.plan import Plan, TensorSpec
from .loading import SkipRandomInit, default_dtype, in_dtype, run_stage, stage_builder


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of forwards on a kind of device; None for the dtype of the weights. `default` is
    torch's default dtype in them."""

    dtype: torch.dtype | None = None
    device_type: str = "cpu"
    default: str = "float32"

    @property
    def name(self) -> str:
        """The name in `--precision`."""
        return "full" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Wraps a forward and its loss."""
        mixed: AbstractContextManager[object] = (
            nullcontext()
            if self.dtype is None
            else torch.autocast(self.device_type, dtype=self.dtype)
        )
        with default_dtype(self.default), mixed:
            yield

    @contextmanager
    def casts_kept(self) -> Iterator[None]:
        """Inside, a weight is cast once for the forwards of all micro-batches that read it.

        In a region of its own each forward would copy all weights, and the copies of every
        micro-batch in flight would be kept for its backward.
        """
        if self.dtype is None:
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def forget_casts(self) -> None:
        """Call this when weights have changed."""
        if self.dtype is not None:
            torch.clear_autocast_cache()

    def argument(self, tensor: Tensor) -> Tensor:
        """The tensor that a stage's forward reads for a boundary tensor."""
        if self.dtype is None or not tensor.requires_grad:
            return tensor
        # Autocast keeps one cast of a leaf for all readers, as of a weight, and would add their
        # gradients in its dtype. In the unsplit model a boundary tensor is not a leaf.
        return tensor.view_as(tensor)


FULL = Precision()
"""Computes in the dtype of the weights."""


@dataclass(frozen=True, slots=True)
class BoundaryDtypes:
    """The dtypes of boundary tensors."""

    weights: torch.dtype | None = None
    """The dtype of the plan's float32 tensors; None for float32."""
    by_name: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Name -> dtype of boundaries whose dtype differs."""
    crossing: torch.dtype | None = None
    """The dtype to which wider floating-point tensors are cast between ranks."""

    def at_stages(self, tensor: TensorSpec) -> torch.dtype:
        planned: torch.dtype = getattr(torch, tensor.dtype)
        converted = self.weights or planned if planned is torch.float32 else planned
        return self.by_name.get(tensor.name, converted)

    def between_ranks(self, tensor: TensorSpec) -> torch.dtype:
        own = self.at_stages(tensor)
        is_wider = self.crossing and own.is_floating_point and own.itemsize > self.crossing.itemsize
        return self.crossing if self.crossing and is_wider else own

    def cast(self, plan: Plan) -> dict[str, torch.dtype]:
        """The boundaries that are cast between ranks, with their dtypes at their stages."""
        tensors = [boundary.tensor for boundary in plan.boundaries]
        return {
            tensor.name: self.at_stages(tensor)
            for tensor in tensors
            if self.between_ranks(tensor) != self.at_stages(tensor)
        }


AS_PLANNED = BoundaryDtypes()
"""The dtypes of the plan."""


def dtypes_of_folder(
    folder: str | Path,
    plan: Plan,
    precision: Precision,
    code: Mapping[str, str] | None = None,
    weights: torch.dtype | None = None,
) -> dict[str, torch.dtype]:
    """`dtypes_under` for a generated folder; empty if the plan's dtypes hold, float32 tensors
    having that of the `weights`. `code` is as for `stage_builder`."""
    if precision.dtype is None and (weights is None or not _has_other_dtypes(plan)):
        return {}
    builds = [stage_builder(folder, spec, code) for spec in plan.stages]
    return dtypes_under(precision, plan, builds, weights)


def _has_other_dtypes(plan: Plan) -> bool:
    tensors = [*plan.inputs, *(boundary.tensor for boundary in plan.boundaries)]
    dtypes = {getattr(torch, tensor.dtype) for tensor in tensors}
    numbers = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return numbers - {torch.float32} != set()


def dtypes_under(
    precision: Precision,
    plan: Plan,
    stages: Sequence[Callable[[], nn.Module]],
    weights: torch.dtype | None = None,
) -> dict[str, torch.dtype]:
    """The dtype of every boundary tensor, found by running all stages on fake tensors, with all
    parameters and inputs of floating point in that of the `weights` if it is given. Raises
    PlanError if a stage cannot run on these."""
    with running_on_fake_tensors(plan, precision.device_type) as values:
        values.update(_converted(values, weights))
        for spec, build in zip(plan.stages, stages, strict=True):
            try:
                with replace(precision, default=plan.default_dtype).computing():
                    values.update(run_stage(spec, _in_dtype(build(), weights), values))
            except Exception as error:
                under = f"--precision {precision.name}" if precision.dtype else f"in {weights}"
                raise PlanError(
                    f"stage {spec.index} cannot run on fake tensors, so the dtypes that it sends "
                    f"{under} are unknown: {type(error).__name__}: {error}",
                    "--precision full, and no --dtype",
                ) from error
    names = {boundary.tensor.name for boundary in plan.boundaries}
    return {name: values[name].dtype for name in sorted(names)}


def _in_dtype(stage: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """`stage.to(dtype)`, which cannot exchange the memory of fake tensors."""
    for module in stage.modules():
        module._buffers.update(_converted(module._buffers, dtype))
        for name, value in _converted(module._parameters, dtype).items():
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
    return stage


def _converted(
    tensors: Mapping[str, Tensor | None], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The tensors in this dtype (`in_dtype`); none without one."""
    if dtype is None:
        return {}
    return {
        name: in_dtype(tensor.detach(), dtype)
        for name, tensor in tensors.items()
        if tensor is not None
    }


@contextmanager
def running_on_fake_tensors(plan: Plan, device_type: str = "cpu") -> Iterator[dict[str, Any]]:
    """Inside, stages are built and run on fake tensors; yields those of the model's inputs by
    name."""
    # The inner mode comes first: reads of values never reach the fake tensors.
    no_values = _NoValues()  # type: ignore[no-untyped-call]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    default = default_dtype(plan.default_dtype)
    eager = torch.compiler.set_stance("force_eager")  # torch.compile fails under these modes
    with fake, torch.device(device_type), no_values, SkipRandomInit(), default, eager:
        yield {
            tensor.name: torch.empty(tensor.resolve(plan.sizes), dtype=getattr(torch, tensor.dtype))
            for tensor in plan.inputs
        }


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every number read from a tensor is 0: so the conditions of guards never refuse."""

    supports_higher_order_operators = True

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
