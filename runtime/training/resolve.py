"""Settings + Plan -> settings without gaps, or the sentence that says what does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any

from ..data.task import Task, find_task
from ..errors import PlanError
from ..plan import Plan
from .half import check_precision
from .scaler import INITIAL
from .settings import Settings, SettingsError

_TEACHING: Mapping[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.1,
    "decay": "linear",
    "final_lr_ratio": 0.3,
    "warmup": 0,
    "clip": 0.0,
}
_TEXT: Mapping[str, Any] = {
    "optimizer": "adamw",
    "lr": 3e-4,
    "decay": "cosine",
    "final_lr_ratio": 0.1,
    "clip": 1.0,
}
_OTHER: Mapping[str, Any] = {
    "optimizer": "adamw",
    "lr": 1e-3,
    "decay": "none",
    "final_lr_ratio": 0.0,
    "clip": 0.0,
}


def resolve(settings: Settings, plan: Plan, *, architecture: str = "") -> tuple[Settings, Task]:
    """Fills every option that was left open, for this plan; `data` and `output` stay.

    Raises SettingsError (a batch or a length that does not fit, a staleness without an
    asynchronous schedule) and PlanError (a plan without a loss).
    """
    if settings.criterion is not None and plan.loss is not None:
        raise SettingsError(
            f"--criterion {settings.criterion}, but {plan.name} makes its own loss.",
            "Leave it out, or partition the model without its labels input.",
        )
    criterion = None if plan.loss is not None else settings.criterion or plan.criterion
    if plan.loss is None and criterion is None:
        raise PlanError(
            f"{plan.name} returns no loss and names no criterion.",
            "--criterion cross_entropy, or mse, or my_file.py:function",
        )
    task = find_task(plan, criterion=criterion, architecture=architecture)
    batch = _batch(settings, plan)
    step = _optimization(settings, plan, task)
    filled = replace(
        settings,
        criterion=criterion,
        loss_scale=INITIAL
        if settings.is_scaled and not settings.loss_scale
        else settings.loss_scale,
        staleness=_staleness(settings),
        seq=_sequence(settings, plan),
        **batch,
        **step,
    )
    check_precision(filled)
    return filled, task


def sized_plan(plan: Plan, settings: Settings) -> Plan:
    """The plan for the micro-batch and sequence length of resolved settings."""
    sizes = dict(plan.sizes)
    if settings.micro_batch_size is not None:
        sizes["batch"] = settings.micro_batch_size
    if settings.seq is not None:
        sizes["sequence"] = settings.seq
    return replace(plan, sizes=sizes)


def batch_identity(settings: Settings, task: Task) -> str:
    """One optimizer step in words, as a product that can be checked.

    `64 sequences per step = 8 micro-batches × 8 sequences × 1 replica`
    """
    micro_batches, size = settings.micro_batches or 1, settings.micro_batch_size or 1
    return (
        f"{micro_batches * size} {task.unit} per step = {micro_batches} micro-batches × "
        f"{size} {task.unit} × 1 replica"
    )


def check_ranks(plan: Plan, schedule: str, ranks: int) -> None:
    """Raises PlanError unless the number of started ranks is the one that the schedule needs."""
    stages = len(plan.stages)
    wanted = 1 if schedule == "single" else stages
    if ranks == wanted:
        return
    if schedule == "single":
        raise PlanError(
            f"--schedule single runs all {stages} stages in 1 process, {ranks} ranks were started.",
            "Start it without a launcher, or choose --schedule 1f1b.",
        )
    started = "1 rank was" if ranks == 1 else f"{ranks} ranks were"
    again = f", or partition again: asyncpipe-partition --model {plan.model} --stages {ranks}"
    raise PlanError(
        f"the plan has {stages} stages, {started} started.",
        f"Use {stages} ranks{again if ranks > 1 else ', or --schedule single'}.",
    )


def gpu_of_rank(plan: Plan, ranks: int) -> tuple[int, ...]:
    """The GPU of each rank of one machine: stages that the plan has on one rank share one."""
    if ranks != len(plan.stages):
        return tuple(range(ranks))
    planned = sorted(set(plan.device_of_stage))
    return tuple(planned.index(device) for device in plan.device_of_stage)


def check_devices(device: str, ranks: int, gpus: int, visible: str | None = None) -> None:
    """Raises SettingsError when `device` is cuda and there are fewer GPUs than local ranks."""
    if device != "cuda" or ranks <= gpus:
        return
    shown = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    noun = "GPU" if gpus == 1 else "GPUs"
    raise SettingsError(
        f"{ranks} ranks on this machine, but {gpus or 'no'} {noun} visible{shown}.",
        "--device cpu" + (f", or partition again with --stages {gpus}." if gpus > 1 else ""),
    )


def _batch(settings: Settings, plan: Plan) -> dict[str, Any]:
    planned = plan.sizes.get("batch", 1)
    total, size, count = (
        settings.global_batch_size,
        settings.micro_batch_size,
        settings.micro_batches,
    )
    if total is not None:
        if count is None and size is not None and total % size == 0:
            count = total // size
        count = count or 8
        if total % count or (size is not None and size * count != total):
            raise _indivisible(total, count, size)
        size = total // count
    size = size or planned
    if size != planned and not _uses_symbol(plan, "batch"):
        raise SettingsError(
            f"--micro-batch-size {size}, but the plan was made for {planned} and no other size.",
            f"{plan.command} --micro-batch-size {size}",
        )
    return {"micro_batches": count or 8, "micro_batch_size": size, "global_batch_size": None}


def _indivisible(total: int, count: int, size: int | None) -> SettingsError:
    given = f" of {size}" if size is not None else ""
    unit = count * (size or 1)
    near = [str(n) for n in (total // unit * unit, (total // unit + 1) * unit) if n]
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    if size is not None:
        divisors = [n for n in divisors if n * size == total]
    counts = sorted(sorted(divisors, key=lambda n: abs(log(n / count)))[:5])
    other = f", or --micro-batches {', '.join(map(str, counts))}" if counts else ""
    return SettingsError(
        f"global batch {total} = micro-batches × size × replicas has no answer with {count} "
        f"micro-batches{given} and 1 replica ({total} / {unit} = {total / unit:g}).",
        f"Nearest: --global-batch-size {' or '.join(near)}{other}",
    )


def _with_seq(command: str, tokens: int) -> str:
    """The command that made a plan, for another sequence length."""
    return f"{re.sub(r' --seq[ =][0-9]+', '', command)} --seq {tokens}"


def _sequence(settings: Settings, plan: Plan) -> int | None:
    planned = plan.sizes.get("sequence")
    asked = settings.seq
    if asked is None or asked == planned:
        return planned
    if planned is None or not _uses_symbol(plan, "sequence"):
        fixed = "has no sequence length" if planned is None else f"was made for {planned} only"
        raise SettingsError(f"--seq {asked}, but the plan {fixed}.", _with_seq(plan.command, asked))
    if asked > planned:
        raise SettingsError(
            f"--seq {asked}, but the plan was made for {planned} tokens.",
            _with_seq(plan.command, asked),
        )
    return asked


def _staleness(settings: Settings) -> str | None:
    if settings.is_async:
        return settings.staleness or "stash"
    if settings.staleness == "stash":
        raise SettingsError(
            f"--staleness stash, but under {settings.schedule} no weights are stale.",
            "--schedule async-1f1b --staleness stash",
        )
    return None


def _optimization(settings: Settings, plan: Plan, task: Task) -> dict[str, Any]:
    teaching = plan.name == "mlp" and settings.optimizer in (None, "sgd")
    chosen = dict(_TEACHING if teaching else _TEXT if task.kind == "text" else _OTHER)
    optimizer = settings.optimizer or chosen["optimizer"]
    if optimizer == "sgd" and not teaching:
        chosen["lr"] = 0.1
    chosen["momentum"] = 0.9 if optimizer == "sgd" and not teaching else 0.0
    chosen["weight_decay"] = 0.01 if optimizer == "adamw" else 0.0
    chosen.setdefault("warmup", settings.steps // 10)
    given = {name: getattr(settings, name) for name in chosen}
    filled = {
        name: default if (own := given[name]) is None else own for name, default in chosen.items()
    }
    if filled["warmup"] > settings.steps:
        raise SettingsError(
            f"--warmup {filled['warmup']} is longer than --steps {settings.steps}.",
            f"--warmup {settings.steps // 10}",
        )
    return filled


def _uses_symbol(plan: Plan, symbol: str) -> bool:
    return any(
        isinstance(size, str) and symbol in size for spec in plan.inputs for size in spec.shape
    )
