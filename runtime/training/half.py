"""Resolved settings + Plan -> in what the stages compute, and what crosses between them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from ..boundary_dtypes import BoundaryDtypes, dtypes_of_folder
from ..plan import Plan, TensorSpec
from ..precision import FULL, Precision
from ..tensors import dtype_of
from .settings import Settings, SettingsError

_READS_OTHERS = {"none", "pipemare"}
"""Staleness methods whose backward reads other weights than its forward, without a second one."""


def check_precision(settings: Settings) -> None:
    """Raises SettingsError for a precision that the weights or the schedule do not go with."""
    precision = f"--precision {settings.precision}"
    if settings.precision == "full":
        if settings.loss_scale is not None:
            raise SettingsError(
                f"--loss-scale {settings.loss_scale:g}, but nothing overflows under {precision}.",
                "--precision float16, or leave it out.",
            )
    elif settings.dtype != "float32":
        raise SettingsError(
            f"{precision} casts float32 weights as it computes, --dtype {settings.dtype} are left "
            "alone by autocast.",
            "--dtype float32, or --precision full.",
        )
    elif settings.is_scaled and settings.is_async:
        raise SettingsError(
            f"{precision} needs all stages to leave out the same steps and to change the loss "
            f"scale together, and under {settings.schedule} they never meet.",
            "--precision bfloat16, which needs no loss scale, or --schedule 1f1b.",
        )
    elif settings.loss_scale is not None and not settings.is_scaled:
        raise SettingsError(
            f"--loss-scale {settings.loss_scale:g}, but under {precision} losses are not scaled.",
            "Leave it out.",
        )
    elif other := _READS_OTHERS & {*(settings.staleness or "").split("+")}:
        raise SettingsError(
            f"--staleness {min(other)} is a backward on other weights than the forward's, but "
            f"under {precision} it reads what its forward cast.",
            "--staleness stash, or --precision full.",
        )
    if settings.boundary_dtype is not None and settings.schedule == "single":
        raise SettingsError(
            f"--boundary-dtype {settings.boundary_dtype}, but under single nothing is sent.",
            "Leave it out.",
        )


def precision_of(settings: Settings) -> Precision:
    if settings.precision == "full":
        return FULL
    return Precision(dtype_of(settings.precision), settings.device)


def find_boundary_dtypes(settings: Settings, plan: Plan) -> BoundaryDtypes:
    """What the boundaries are at their stages and between ranks. Raises PlanError."""
    crossing = settings.boundary_dtype
    return BoundaryDtypes(
        dtype_of(settings.dtype),
        dtypes_of_folder(settings.folder, plan, precision_of(settings)),
        dtype_of(crossing) if crossing else None,
    )


def describe_precision(settings: Settings, plan: Plan, dtypes: BoundaryDtypes) -> str:
    """What is computed in which dtype, and how much crosses between stages; "" for float32."""
    parts = []
    if settings.dtype != "float32":
        parts.append(f"{settings.dtype} throughout")
    if settings.precision != "full":
        parts.append(f"autocast to {settings.precision}; weights, gradients, optimizer in float32")
    if settings.is_scaled:
        parts.append(f"loss scale {settings.loss_scale:g} at first")
    planned = _crossing_bytes(plan, lambda tensor: getattr(torch, tensor.dtype))
    crossing = _crossing_bytes(plan, dtypes.between_ranks)
    if crossing < planned and settings.schedule != "single":
        parts.append(f"boundaries have {crossing / planned:.0%} of the bytes as planned")
    return " · ".join(parts)


def describe_memory(settings: Settings, plan: Plan) -> str:
    """The planned memory, and what the precision of the run makes of it; "" where it is unknown."""
    needed = sum(stage.peak_bytes for stage in plan.stages)
    if not needed:
        return ""
    if not _is_other_precision(settings, plan) or settings.precision == "full":
        return f"{format_bytes(needed)} over all stages, as planned"
    activations = sum(stage.memory.activations for stage in plan.stages)
    return (
        f"{format_bytes(needed)} over all stages, as planned in float32, of it activations "
        f"{format_bytes(activations)}, which take about half under {settings.precision}"
    )


def precision_warning(settings: Settings, plan: Plan) -> str:
    """Of a plan whose costs are those of another precision; "" if they are not."""
    if not _is_other_precision(settings, plan):
        return ""
    planned = plan.profile["dtype"]
    computed = "bfloat16" if settings.precision != "full" else "float32"
    command = re.sub(r" --dtype[ =]\S+", "", plan.command)
    again = f"{command} --dtype {computed}" if computed != "float32" else command
    running = settings.precision if settings.precision != "full" else settings.dtype
    return (
        f"the plan was profiled in {planned}, this run computes in {running}: cuts and predictions "
        f"are those of {planned}. {again}"
    )


def format_bytes(number: int) -> str:
    gib, mib = number / (1 << 30), number / (1 << 20)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{mib:.0f} MiB"


def _is_other_precision(settings: Settings, plan: Plan) -> bool:
    """Half precisions have one size, and are profiled alike."""
    planned = plan.profile.get("dtype")
    return planned is not None and (planned == "float32") != (settings.precision == "full")


def _crossing_bytes(plan: Plan, dtype: Callable[[TensorSpec], torch.dtype]) -> int:
    """Of one micro-batch, forward."""
    return sum(
        math.prod(boundary.tensor.resolve(plan.sizes)) * dtype(boundary.tensor).itemsize
        for boundary in plan.boundaries
        for _ in boundary.targets
    )
