"""Settings + Plan -> the RunConfig of a run, or the error that names a conflict."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import log
from typing import Any

from ..data.datasets import default_data
from ..data.task import Task, find_task
from ..data.tokens import is_plain_text
from ..errors import PlanError
from ..formatting import counted
from ..limits import typed
from ..optimizers.facts import OPTIMIZERS, facts_of, that_take
from ..optimizers.loss_scale import INITIAL
from ..options import options_of
from ..plan.plan import Plan, verify_evaluates
from ..plan.validate import with_option
from .asynchronous_options import (
    check_methods,
    resolve_asynchronous,
    resolve_steps,
    with_methods,
)
from .batch_layout import StepBatch, in_words, uses_symbol, with_replicas, with_zero
from .freezing_options import check_evaluated_weights, resolve_freezing
from .mixed_precision import check_precision, with_recompute
from .run_ahead import with_ahead
from .run_memory import relative_size
from .settings import RunConfig, Settings, SettingsError, left_over
from .tensor_options import check_tensor_ranks, with_tensor_ranks

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


def resolve(
    settings: Settings, plan: Plan, *, architecture: str = "", tokenizer: str | None = None
) -> tuple[RunConfig, Task]:
    """Fills every option that was left open, for this plan; `output` stays. `tokenizer` is that of
    the generated folder, if it has one.

    Raises SettingsError (a batch or a length that does not fit, a staleness without an
    asynchronous schedule), ScheduleError (staleness methods that do not fit), PlanError (a plan
    without a loss) and DataError (no built-in data fits).
    """
    if settings.criterion is not None and plan.loss is not None:
        raise SettingsError(
            f"--criterion {settings.criterion}, but {plan.name} makes its own loss.",
            "Leave it out, or partition the model without its labels input.",
        )
    criterion = None if plan.loss is not None else settings.criterion or plan.criterion
    if plan.loss is None and criterion is None:
        has_loss = isinstance(plan.outputs, Mapping) and plan.outputs.get("loss") is not None
        lacking = "a loss that is not one number" if has_loss else "no loss"
        raise PlanError(
            f"{plan.name} returns {lacking} and names no criterion.",
            "--criterion cross_entropy, or mse, or my_file.py:function; or return {'loss': loss} "
            "from forward",
        )
    settings = _evaluations(_without_network(settings), plan)
    with_recompute(plan, settings.recompute)
    _check_batch_norm(settings, plan)
    task = find_task(plan, criterion=criterion, architecture=architecture)
    settings = with_replicas(with_tensor_ranks(settings, plan), plan)
    settings = with_zero(settings, plan)
    sizes = _batch(settings, plan)
    batch = StepBatch.divided(**sizes, replicas=settings.replicas or 1)
    settings = replace(settings, **sizes)
    settings = _of_whole_micro_batches(settings, plan, batch)
    settings = replace(settings, steps=resolve_steps(settings, batch))
    step = _optimization(settings, plan, task)
    data = settings.data or default_data(task, plan)
    is_tokenized = task.kind == "text" and is_plain_text(data)
    chosen = {
        "data": data,
        "tokenizer": settings.tokenizer or (tokenizer if is_tokenized else None),
        "criterion": criterion,
        "loss_scale": settings.loss_scale or (INITIAL if settings.is_scaled else None),
        "annealing_steps": _annealing_steps(settings, step["warmup"]),
        "clip_by": _clip_by(settings, step["clip"]),
        "seq": _sequence(settings, plan),
        **resolve_asynchronous(settings),
        **resolve_freezing(settings, plan, data),
        **step,
    }
    config = with_methods(RunConfig(**(asdict(settings) | chosen)), plan)
    config = with_ahead(config, sized_plan(plan, config), plan)
    check_precision(config)
    check_methods(config, plan)
    check_tensor_ranks(config)
    check_evaluated_weights(config)
    return config, task


_OF_TRAINED_WEIGHTS = (
    *("resume", "save_every", "save_to", "export_hf", "eval_every", "metric", "callbacks"),
    "check_replicas",
)
"""The options that keep, judge or compare what training made of the weights."""


def _without_network(settings: Settings) -> Settings:
    """Without a network nothing is evaluated, and no option may ask for weights."""
    if settings.has_network:
        return settings
    for name in _OF_TRAINED_WEIGHTS:
        if value := getattr(settings, name):
            raise SettingsError(
                f"{typed(name, value)}, but under --transport {settings.transport} weights are "
                "meaningless, and none are kept.",
                "Leave one of them out.",
            )
    return replace(settings, eval_batches=0)


def _evaluations(settings: Settings, plan: Plan) -> Settings:
    """Without evaluations where the stages are for training alone; they may not be asked for."""
    if plan.mode == "both":
        return settings
    if settings.eval_every or settings.keep_best:
        verify_evaluates(plan)
    return replace(settings, eval_batches=0)


def sized_plan(plan: Plan, config: RunConfig) -> Plan:
    """The plan for the micro-batch, sequence length and recomputation of a run."""
    sizes = {**plan.sizes, "batch": config.micro_batch_size}
    if config.seq is not None:
        sizes["sequence"] = config.seq
    return with_recompute(replace(plan, sizes=sizes), config.recompute)


def costs_at_sizes(plan: Plan, planned: Plan) -> Plan:
    """The plan with its stages' times in proportion to its sizes, which are others than planned."""
    scale = relative_size(plan, planned)
    stages = tuple(
        replace(stage, forward_ms=stage.forward_ms * scale, backward_ms=stage.backward_ms * scale)
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def batch_identity(config: RunConfig, task: Task) -> str:
    """One optimizer step in words, as a product that can be checked.

    `64 sequences per step = 8 micro-batches × 8 sequences × 1 replica`
    """
    batch = StepBatch.of(config)
    count, size, replicas = batch.in_replica, batch.sizes[0], in_words(batch.replicas)
    counts = counted(count, "micro-batch", "micro-batches")
    product = f"{counts} × {counted(size, task.unit[:-1])} × {replicas}"
    if not batch.is_even and batch.replicas == 1:
        product = (
            f"({counted(count - 1, 'micro-batch', 'micro-batches')} × {size} + "
            f"{batch.sizes[-1]}) {task.unit} × {replicas}"
        )
    elif not batch.is_even:
        product += f" - {size - batch.sizes[-1]} in the last micro-batch of the last"
    left = config.left_over
    last = f"; {left} in the last step, which counts in proportion" if left else ""
    return f"{batch.samples} {task.unit} per step = {product}{last}"


def gpu_of_rank(
    plan: Plan,
    ranks: Sequence[int],
    ranks_per_gpu: int = 1,
    gpus: int = 0,
    tensor_ranks: int = 1,
) -> tuple[int, ...]:
    """The GPU of each of the ranks of one machine, which sees `gpus` of them.

    A plan for a file of devices names the GPU of each rank by its number in that file; if fewer are
    visible, those that the plan uses count from 0. Otherwise stages that the plan has on one rank
    share one, and whole replicas have one set of GPUs after the other; the tensor ranks of a stage
    have one after the other. Every `ranks_per_gpu` GPUs of this count in a row become one.
    """
    numbers = _device_numbers(plan, ranks)
    if numbers:
        if ranks_per_gpu == 1 and max(numbers) < gpus:
            return numbers
        return tuple(sorted(numbers).index(number) // ranks_per_gpu for number in numbers)
    of_rank = tuple(range(len(ranks)))
    in_replica = len(plan.stages) * tensor_ranks
    if len(ranks) % in_replica == 0:
        planned = sorted(set(plan.device_of_stage))
        of_stage = [planned.index(device) for device in plan.device_of_stage]
        of_rank = tuple(
            (replica * len(planned) + gpu) * tensor_ranks + tensor_rank
            for replica in range(len(ranks) // in_replica)
            for gpu in of_stage
            for tensor_rank in range(tensor_ranks)
        )
    return tuple(gpu // ranks_per_gpu for gpu in of_rank)


def _device_numbers(plan: Plan, ranks: Sequence[int]) -> tuple[int, ...]:
    """The planned device of each rank among those of its host; () unless these are all ranks that
    the plan has on one host.
    """
    specs = plan.setting.ranks
    hosts = [specs[rank].host for rank in ranks if rank < len(specs)]
    on_host = [rank for rank, spec in enumerate(specs) if spec.host in hosts[:1]]
    numbers = [specs[rank].number for rank in on_host]
    if [*ranks] != on_host:
        return ()
    return tuple(number for number in numbers if number is not None) if None not in numbers else ()


def check_devices(options: Settings, plan: Plan, ranks: Sequence[int], gpus: int) -> None:
    """Raises SettingsError when the ranks of this machine need more GPUs than there are."""
    if options.device == "cpu":
        return
    tensor_ranks = options.tensor_ranks
    unshared = len(set(gpu_of_rank(plan, ranks, tensor_ranks=tensor_ranks)))
    used = gpu_of_rank(plan, ranks, options.ranks_per_gpu, tensor_ranks=tensor_ranks)
    if len(set(used)) <= gpus:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    noun = "GPU" if gpus == 1 else "GPUs"
    ways = ["--device cpu"]
    if gpus:
        ways.insert(0, f"Share them: --ranks-per-gpu {-(-unshared // gpus)} (slower)")
    if gpus > 1:
        ways.append(f"partition again with --stages {gpus}")
    raise SettingsError(
        f"{len(ranks)} ranks on this machine, but {gpus or 'no'} {noun} visible{shown}.",
        f"{', or '.join(ways)}.",
    )


def _batch(settings: Settings, plan: Plan) -> dict[str, Any]:
    planned = plan.sizes.get("batch", 1)
    total, size, count, replicas = (
        settings.global_batch_size,
        settings.micro_batch_size,
        settings.micro_batches,
        settings.replicas or 1,
    )
    if total is not None and size is not None:
        needed = -(-total // size)
        if needed % replicas or count not in (None, needed // replicas):
            raise _indivisible(total, count or max(1, needed // replicas), size, replicas)
        count = needed // replicas
    elif total is not None:
        count = count or 8
        if total % (count * replicas):
            raise _indivisible(total, count, size, replicas)
        size = total // (count * replicas)
    size = size or planned
    if size > 1 and "batch" not in plan.sizes and not uses_symbol(plan, "batch"):
        raise SettingsError(
            f"a micro-batch of {size} samples, but {plan.name} has no batch: a micro-batch is one "
            "whole example.",
            "--micro-batch-size 1, and as many --micro-batches as a step has examples",
        )
    if size != planned and not uses_symbol(plan, "batch"):
        raise SettingsError(
            f"--micro-batch-size {size}, but the plan was made for {planned} and no other size.",
            with_option(plan.command, "--micro-batch-size", size),
        )
    count = count or 8
    uneven = total if total not in (None, count * size * replicas) else None
    if uneven and not uses_symbol(plan, "batch"):
        raise _indivisible(uneven, count, size, replicas)
    return {"micro_batches": count, "micro_batch_size": size, "global_batch_size": uneven}


def _of_whole_micro_batches(settings: Settings, plan: Plan, batch: StepBatch) -> Settings:
    """The settings without the samples that are left over for a micro-batch of another size, where
    the plan has none."""
    left = left_over(settings, batch.samples) % batch.sizes[0]
    if settings.samples is None or uses_symbol(plan, "batch") or not 0 < left < settings.samples:
        return settings
    return replace(settings, samples=settings.samples - left)


def _check_batch_norm(settings: Settings, plan: Plan) -> None:
    statistics = any(
        name.endswith("running_mean") for stage in plan.stages for name in stage.buffers
    )
    if settings.batch_norm == "mini-batch" and not statistics:
        raise SettingsError(
            f"--batch-norm mini-batch, but {plan.name} has no batch norm.", "Leave it out."
        )


def _indivisible(total: int, count: int, size: int | None, replicas: int) -> SettingsError:
    given = f" of {size}" if size is not None else ""
    unit = count * (size or 1) * replicas
    near = [str(n) for n in (total // unit * unit, (total // unit + 1) * unit) if n]
    divisors = [n for n in range(1, total + 1) if total % (n * replicas) == 0]
    if size is not None:
        divisors = [n for n in divisors if n * size * replicas == total]
    counts = sorted(sorted(divisors, key=lambda n: abs(log(n / count)))[:5])
    other = f", or --micro-batches {', '.join(map(str, counts))}" if counts else ""
    return SettingsError(
        f"global batch {total} = micro-batches × size × replicas has no answer with {count} "
        f"micro-batches{given} and {in_words(replicas)} ({total} / {unit} = {total / unit:g}).",
        f"Nearest: --global-batch-size {' or '.join(near)}{other}",
    )


def _sequence(settings: Settings, plan: Plan) -> int | None:
    planned = plan.sizes.get("sequence")
    length = settings.seq
    if length is None or length == planned:
        return planned
    again = with_option(plan.command, "--seq", length)
    if planned is None or not uses_symbol(plan, "sequence"):
        raise SettingsError(
            f"--seq {length}, but no input of {plan.name} has a free sequence length.",
            f"Leave --seq out, or partition the model for this length: {again}",
        )
    if length > planned:
        raise SettingsError(f"--seq {length}, but the plan was made for {planned} tokens.", again)
    return length


def _annealing_steps(settings: Settings, warmup: int) -> int | None:
    """Five warm-ups or a quarter of the run, as PipeMare's authors for Transformers and others."""
    if "pipemare-rate" in (settings.staleness or "").split("+"):
        return settings.annealing_steps or 5 * warmup or max(1, settings.steps // 4)
    if settings.annealing_steps is not None:
        raise SettingsError(
            f"--annealing-steps {settings.annealing_steps}, but no method lowers the learning rate "
            "for some steps.",
            "--staleness stash+pipemare-rate",
        )
    return None


def _clip_by(settings: Settings, clip: float) -> str | None:
    if settings.is_async and clip:
        return settings.clip_by or "stage"
    if settings.clip_by is not None and settings.is_async:
        raise SettingsError(f"--clip-by {settings.clip_by}, but nothing is clipped.", "--clip 1")
    if settings.clip_by is not None:
        raise SettingsError(
            f"--clip-by {settings.clip_by}, but under {settings.schedule} all stages step by the "
            "norm of all.",
            "Leave it out.",
        )
    return None


def _optimization(settings: Settings, plan: Plan, task: Task) -> dict[str, Any]:
    teaching = plan.name == "mlp" and settings.optimizer in (None, "sgd")
    chosen = dict(_TEACHING if teaching else _TEXT if task.kind == "text" else _OTHER)
    optimizer = settings.optimizer or chosen["optimizer"]
    _check_optimizer(settings, optimizer)
    facts = facts_of(optimizer)
    if facts.lr is not None and not teaching:
        chosen["lr"] = facts.lr
    chosen["momentum"] = 0.0 if teaching else facts.momentum
    _check_nesterov(settings, chosen["momentum"])
    chosen["weight_decay"] = facts.weight_decay
    chosen["refresh_every"] = facts.refresh_every
    chosen.setdefault("warmup", settings.steps // 10)
    if settings.lr_schedule is not None:
        _check_schedule_alone(settings)
        chosen |= {"warmup": 0, "decay": "none", "final_lr_ratio": 0.0}
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


def _check_schedule_alone(settings: Settings) -> None:
    for name in ("warmup", "decay", "final_lr_ratio"):
        # A resumed run has the values that follow from its schedule.
        if getattr(settings, name) not in (None, 0, "none"):
            raise SettingsError(
                f"{typed(name, getattr(settings, name))}, but --lr-schedule "
                f"{settings.lr_schedule} sets the learning rate of all steps.",
                "Leave one of them out.",
            )


def _check_nesterov(settings: Settings, default: float) -> None:
    momentum = default if settings.momentum is None else settings.momentum
    if settings.nesterov and not momentum:
        raise SettingsError("--nesterov, but the momentum is 0.", "--nesterov --momentum 0.9")


def _check_optimizer(settings: Settings, optimizer: str) -> None:
    """Raises SettingsError for an option that this optimizer does not have."""
    own = facts_of(optimizer).options
    if settings.weight_decay and optimizer not in OPTIMIZERS:  # 0 is what a resumed run has
        raise SettingsError(
            f"--weight-decay {settings.weight_decay:g}, but {optimizer} sets its own.",
            "Leave it out.",
        )
    for name, option in options_of(Settings).items():
        value = getattr(settings, name)
        is_changed = bool(value) and value != option.default
        if option.applies_to == "some optimizers" and is_changed and name not in own:
            near = "; the first of --betas is similar" if name == "momentum" else ""
            raise SettingsError(
                f"{typed(name, value)}, but {optimizer} has no option {name}.",
                f"Leave it out, or choose --optimizer {' or '.join(that_take(name))}"
                f"{near if 'betas' in own else ''}.",
            )
