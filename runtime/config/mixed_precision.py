"""RunConfig + Plan -> dtypes of computation and boundaries, and recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ..executor.precision import FULL, BoundaryDtypes, Precision, dtypes_of_folder
from ..formatting import write_bytes, write_share
from ..optimizers.facts import OWN, facts_of
from ..plan.plan import Plan, StageSpec, TensorSpec
from ..plan.validate import with_option
from ..staleness import has_other_backward
from ..tensor_files import dtype_of
from .execution_options import ExecutionOptions
from .settings import RunConfig, Settings, SettingsError


def check_precision(config: RunConfig) -> None:
    """Raises SettingsError for a precision that does not fit the weights or the schedule."""
    precision = f"--precision {config.precision}"
    if config.precision == "full":
        if config.loss_scale is not None:
            raise SettingsError(
                f"--loss-scale {config.loss_scale:g}, but nothing overflows under {precision}.",
                "--precision float16, or leave it out.",
            )
    elif config.dtype not in (None, "float32"):
        raise SettingsError(
            f"{precision} casts float32 weights as it computes, --dtype {config.dtype} are left "
            "alone by autocast.",
            "--dtype float32, or --precision full.",
        )
    elif config.is_scaled and config.is_async:
        raise SettingsError(
            f"{precision} needs all stages to leave out the same steps and to change the loss "
            f"scale together, and under {config.schedule} they never meet.",
            "--precision bfloat16, which needs no loss scale, or --schedule 1f1b.",
        )
    elif config.loss_scale is not None and not config.is_scaled:
        raise SettingsError(
            f"--loss-scale {config.loss_scale:g}, but under {precision} losses are not scaled.",
            "Leave it out.",
        )
    elif config.is_async and has_other_backward(config.methods):
        raise SettingsError(
            f"--staleness {config.staleness} is a backward on other weights than its forward's, "
            f"but under {precision} it reads what its forward cast.",
            "--staleness stash, or --precision full.",
        )
    if config.boundary_dtype is not None and config.schedule == "single":
        raise SettingsError(
            f"--boundary-dtype {config.boundary_dtype}, but under single nothing is sent.",
            "Leave it out.",
        )


def precision_of(options: ExecutionOptions) -> Precision:
    """The dtype in which a run computes."""
    if options.precision == "full":
        return FULL
    return Precision(dtype_of(options.precision), options.device)


def weights_dtype(options: ExecutionOptions) -> torch.dtype | None:
    """The dtype of all parameters of floating point; None for those of the model."""
    return dtype_of(options.dtype) if options.dtype else None


def find_boundary_dtypes(config: RunConfig, plan: Plan, code: Mapping[str, str]) -> BoundaryDtypes:
    """The dtypes of boundaries at their stages and between ranks; `code` has the SHA-256 of the
    stages' files. Raises PlanError."""
    crossing, weights = config.boundary_dtype, weights_dtype(config)
    return BoundaryDtypes(
        weights,
        dtypes_of_folder(config.folder, plan, precision_of(config), code, weights),
        dtype_of(crossing) if crossing else None,
    )


def describe_precision(config: RunConfig, plan: Plan, dtypes: BoundaryDtypes) -> str:
    """The dtypes of a run and the size of its boundaries, as a phrase; "" for float32."""
    parts = []
    if config.dtype not in (None, "float32"):
        parts.append(f"{config.dtype} throughout")
    if config.precision != "full":
        parts.append(f"autocast to {config.precision}; weights and optimizer keep their dtypes")
    if config.is_scaled:
        parts.append(f"loss scale {config.loss_scale:g} at first")
    planned = _crossing_bytes(plan, lambda tensor: getattr(torch, tensor.dtype))
    crossing = _crossing_bytes(plan, dtypes.between_ranks)
    if crossing < planned and config.schedule != "single":
        parts.append(f"boundaries have {write_share(crossing / planned)} of the bytes as planned")
    return " · ".join(parts)


def describe_memory(options: Settings, plan: Plan) -> str:
    """The planned memory and the effect of the run's precision on it; "" if it is unknown."""
    needed = sum(stage.peak_bytes for stage in plan.stages)
    if not needed:
        return ""
    if not _is_other_precision(options, plan) or options.precision == "full":
        text = f"{write_bytes(needed)} predicted (sum over all stages)"
        facts = facts_of(options.optimizer or "adamw")
        if facts is OWN:
            return f"{text}, without the state of {options.optimizer}"
        is_counted = not facts.rotates or plan.setting.optimizer == options.optimizer
        return text if is_counted else f"{text}, without the bases of {options.optimizer}"
    activations = sum(stage.memory.activations for stage in plan.stages)
    return (
        f"{write_bytes(needed)} predicted for float32 (sum over all stages), including "
        f"{write_bytes(activations)} of activations, about half of that under {options.precision}"
    )


def describe_average(config: RunConfig, plan: Plan) -> str:
    """The average of the weights and its memory, as a phrase."""
    size = sum(stage.gradient_bytes for stage in plan.stages)
    copy = f" ({write_bytes(size)} over all stages)" if size else ""
    return f"EMA of the weights (--ema {config.ema:g}) is evaluated and saved; one more copy{copy}"


def precision_warning(options: ExecutionOptions, plan: Plan) -> str:
    """The warning for a plan with costs of another precision; "" if they match."""
    if not _is_other_precision(options, plan):
        return ""
    planned = plan.profile["dtype"]
    computed = "bfloat16" if options.precision != "full" else "float32"
    again = with_option(plan.command, "--dtype", None if computed == "float32" else computed)
    running = options.precision if options.precision != "full" else options.dtype or "float32"
    return (
        f"the plan was profiled in {planned}, this run computes in {running}: cuts and predictions "
        f"are those of {planned}. {again}"
    )


def _is_other_precision(options: ExecutionOptions, plan: Plan) -> bool:
    """True if run and profile differ in element size; both half precisions have the same one."""
    planned = plan.profile.get("dtype")
    return planned is not None and (planned == "float32") != (options.precision == "full")


def _crossing_bytes(plan: Plan, dtype: Callable[[TensorSpec], torch.dtype]) -> int:
    """The bytes of the boundaries of one micro-batch, forward."""
    return sum(
        math.prod(boundary.tensor.resolve(plan.sizes)) * dtype(boundary.tensor).itemsize
        for boundary in plan.boundaries
        for _ in boundary.targets
    )


def with_recompute(plan: Plan, chosen: str) -> Plan:
    """The plan with recomputation in the chosen stages: `auto` (as planned), `all`, `none` or
    numbers such as `0,2`.

    A second forward costs the time of the first if more than one micro-batch is in flight. A stage
    that runs its backward immediately, or saves nothing for it, recomputes nothing.
    Raises SettingsError for unknown stages.
    """
    if chosen == "auto":
        return plan
    again = _stages(plan, chosen)
    return replace(plan, stages=tuple(_with(stage, stage.index in again) for stage in plan.stages))


def _stages(plan: Plan, chosen: str) -> frozenset[int]:
    count = len(plan.stages)
    if chosen in ("all", "none"):
        return frozenset(range(count) if chosen == "all" else ())
    words = [word.strip() for word in chosen.split(",")]
    for word in words:
        if int(word) >= count:
            raise SettingsError(
                f"--recompute {chosen}: stage {int(word)} does not exist, the plan has stages 0 to "
                f"{count - 1}.",
                "Leave it out, or choose auto, all or none.",
            )
    return frozenset(map(int, words))


def _with(stage: StageSpec, recompute: bool) -> StageSpec:
    if stage.recompute == recompute:
        return stage
    second_ms = stage.forward_ms if stage.in_flight > 1 and stage.activation_bytes else 0.0
    backward_ms = stage.backward_ms + (second_ms if recompute else -second_ms)
    return replace(stage, recompute=recompute, backward_ms=backward_ms)
