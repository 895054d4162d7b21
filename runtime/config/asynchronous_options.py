"""The options of asynchronous runs -> staleness methods, segments, delays and weight copies."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import ceil
from typing import Any

from ..formatting import counted, write_bytes, write_count
from ..limits import flag_of
from ..options import options_of
from ..plan.plan import Plan
from ..schedule.asynchronous import DEFAULT_CAP, Delays, depths, weight_copies
from ..schedule.schedule import Schedule
from ..staleness import Conditions, parse
from ..staleness import check as check_staleness
from ..staleness.compose import AUTO as AUTO_METHODS
from ..staleness.compose import recommended
from .batch_layout import StepBatch
from .learning_options import STEPS
from .mixed_precision import with_recompute
from .settings import RunConfig, Settings, SettingsError, left_over

MICRO_BATCHES_PER_SEGMENT = 4096
"""The most in an asynchronous segment, whose actions are listed in advance."""


def resolve_asynchronous(settings: Settings) -> dict[str, Any]:
    """The resolved options of asynchronous runs. Raises SettingsError if they do not fit the
    schedule."""
    if not settings.is_async:
        if settings.staleness not in (None, "none", AUTO_METHODS):
            raise SettingsError(
                f"--staleness {settings.staleness}, but under {settings.schedule} no weights are "
                "stale.",
                f"--schedule async-1f1b --staleness {settings.staleness}",
            )
        for name, option in options_of(Settings).items():
            value = getattr(settings, name)
            if option.applies_to == "asynchronous" and name != "staleness" and value:
                raise SettingsError(
                    f"{flag_of(name)} {value}, but under {settings.schedule} all stages wait for "
                    "each other at every step.",
                    "--schedule async-1f1b, or leave it out.",
                )
        return {"staleness": None}
    cap = settings.staleness_cap
    if settings.schedule == "virtual-stages-1f1b" and cap is None:
        cap = DEFAULT_CAP
    synchronous_steps(settings)
    if settings.schedule != "2bw":
        methods = "stash" if settings.staleness is None else settings.staleness
        return {"staleness": methods, "staleness_cap": cap}
    if settings.staleness == AUTO_METHODS:
        return {"staleness": "2bw", "staleness_cap": cap}
    methods = "2bw" if settings.staleness is None else settings.staleness
    if "2bw" not in parse(methods):
        raise SettingsError(
            f"--schedule 2bw has its own versions of the weights, and --staleness "
            f"{settings.staleness} has others.",
            f"--schedule async-1f1b --staleness {settings.staleness}, or leave --staleness out.",
        )
    return {"staleness": methods, "staleness_cap": cap}


def with_methods(config: RunConfig, plan: Plan) -> RunConfig:
    """The options with the recommended staleness methods in place of `auto`."""
    if config.staleness != AUTO_METHODS:
        return config
    ahead = max(depths(len(plan.stages), config.ahead))
    delay = -(-ahead // config.micro_batches)
    if config.staleness_cap is not None:
        delay = min(delay, config.staleness_cap)
    methods = recommended(
        config.optimizer,
        delay,
        micro_batches=config.micro_batches,
        momentum=config.momentum,
        replicas=config.pipelines,
        tensor_ranks=config.tensor_ranks,
    )
    return replace(config, staleness=methods)


def check_methods(config: RunConfig, plan: Plan) -> None:
    """Raises ScheduleError unless the staleness methods fit each other, the optimizer, the steps
    and the recomputation."""
    if config.staleness is None:
        return
    chosen = with_recompute(plan, config.recompute).stages
    lacking = tuple(stage.index for stage in chosen[:-1] if not stage.recompute)
    ahead = max(depths(len(chosen), config.ahead))
    conditions = Conditions(
        optimizer=config.optimizer,
        momentum=config.momentum,
        nesterov=config.nesterov,
        recomputes=not lacking,
        without_recompute=lacking,
        step_every=config.micro_batches,
        replicas=config.pipelines,
        zero=config.zero,
        ahead=ahead,
        ema=config.ema is not None,
    )
    check_staleness(config.staleness, conditions)
    for stage in plan.stages:
        for name in stage.changes_trained:
            raise SettingsError(
                f"--schedule {config.schedule}, but the forward of stage {stage.index} writes to "
                f"{name}, which is trained: micro-batches in flight would read several versions of "
                "it, and only one could be written to.",
                "--schedule 1f1b",
            )
    if config.staleness_cap == 0 and "2bw" in parse(config.methods):
        raise SettingsError(
            "--staleness-cap 0, but under 2bw the weights of all stages are one step old.",
            "--staleness-cap 1, or --schedule async-1f1b --staleness stash",
        )
    longest = longest_segment(config) * config.micro_batches
    if ahead > longest:
        raise SettingsError(
            f"--ahead {config.ahead} lets a stage run {ahead} forwards ahead, but the pipeline "
            f"drains after {longest} micro-batches at the latest.",
            "--ahead 2x",
        )


def longest_segment(config: RunConfig) -> int:
    """The most steps of one segment."""
    if not config.is_async:
        return 1
    return max(1, MICRO_BATCHES_PER_SEGMENT // config.micro_batches)


def synchronous_steps(settings: Settings) -> tuple[int, int]:
    """The numbers of steps that `sync_start` and `sync_end`, each a number or a share of all, make
    synchronous. Raises SettingsError for another text, and if they are more than there are."""
    start, end = (_number_of_steps(settings, name) for name in ("sync_start", "sync_end"))
    if start + end > settings.steps:
        raise SettingsError(
            f"--sync-start {settings.sync_start} and --sync-end {settings.sync_end} are "
            f"{start + end} steps, but there are {settings.steps}.",
            f"--sync-end {settings.steps - start}",
        )
    return start, end


def asynchronous_steps(config: RunConfig, stop: int) -> range:
    """The steps, counted from 0, that are made asynchronously before step `stop`."""
    if not config.is_async:
        return range(0)
    start, end = synchronous_steps(config)
    return range(start, min(stop, config.steps - end) if end else stop)


def _number_of_steps(settings: Settings, name: str) -> int:
    text = getattr(settings, name) or "0"
    match = re.fullmatch(r"(\d{1,15})|(\d{1,9}(?:\.\d{1,9})?)%", text)
    steps = -1
    if match:
        share = match[2] and ceil(settings.steps * float(match[2]) / 100 - 1e-9)
        steps = int(match[1] or share)
    if not 0 <= steps <= settings.steps:
        raise SettingsError(
            f"{flag_of(name)} {text} is not a number or a share of the {settings.steps} steps.",
            f"{flag_of(name)} 20, or {flag_of(name)} 5%",
        )
    return steps


def resolve_steps(settings: Settings, batch: StepBatch) -> int:
    """The number of steps: as given, or as many as `samples` make of this batch. The steps of
    epochs are known when the data are open (`with_epochs`), and until then the most that there are.

    Raises SettingsError if they make no step.
    """
    if settings.epochs is not None:
        _check_epochs(settings)
        return STEPS.most
    if settings.samples is None:
        if settings.remainder == "proportional":
            raise SettingsError(
                f"--remainder {settings.remainder}, but --steps leaves none.", "--samples 10000"
            )
        return settings.steps
    steps = settings.samples // batch.samples + (left_over(settings, batch.samples) > 0)
    if settings.steps not in (Settings.steps, steps):
        raise SettingsError(
            f"--samples {settings.samples} are {steps} steps, but --steps is {settings.steps}.",
            "Leave one of them out.",
        )
    if not steps:
        raise SettingsError(
            f"--samples {settings.samples} are fewer than the {batch.samples} of one step.",
            f"--samples {batch.samples}",
        )
    return steps


def with_epochs(settings: Settings, length: int) -> Settings:
    """The options with the samples of `epochs` passes over data of `length` samples."""
    assert settings.epochs is not None
    return replace(
        settings,
        samples=max(1, round(settings.epochs * length)),
        epochs=None,
        remainder=settings.remainder or "proportional",
    )


def _check_epochs(settings: Settings) -> None:
    for name in ("steps", "samples"):
        value = getattr(settings, name)
        if value != getattr(Settings, name):
            raise SettingsError(
                f"--epochs {settings.epochs:g}, but --{name} is {value}.",
                "Leave one of them out.",
            )


def delays_of(
    schedule: Schedule,
    config: RunConfig | None = None,
    first_micro_batch: int = 0,
    first_version: int = 0,
) -> Delays:
    """The closed form of the delays of a segment that begins at this micro-batch and version."""
    ahead = tuple(most - 1 for most in schedule.in_flight)
    if schedule.synchronous:
        ahead = (0,) * schedule.stages
    two_from = None
    if config and not schedule.synchronous and "2bw" in parse(config.methods):
        two_from, _ = synchronous_steps(config)
    return Delays(ahead, schedule.step_every, first_micro_batch, first_version, two_from)


def describe_delays(schedule: Schedule, config: RunConfig | None = None) -> str:
    """The staleness of the weights of each stage, as a phrase.

    >>> from asyncpipe.runtime.schedule.asynchronous import async_1f1b
    >>> describe_delays(async_1f1b(4, 12, step_every=2))
    'stage 0: 1.5 steps (max 2), stage 1: 1 step, stage 2: 0.5 steps (max 1), stage 3: none'
    >>> describe_delays(async_1f1b(4, 4, step_every=1, warmup=(1, 1, 1, 0)))
    'stages 0-2: 1 step, stage 3: none'
    """
    delays = delays_of(schedule, config)
    runs: list[tuple[str, int, int]] = []
    for stage in range(schedule.stages):
        mean, most = delays.mean(stage), delays.most(stage)
        delay = f"{write_count(float(mean))} step{'' if mean == 1 else 's'}" if most else "none"
        delay += f" (max {most:,})" if most != mean else ""
        first = runs.pop()[1] if runs and runs[-1][0] == delay else stage
        runs.append((delay, first, stage))
    return ", ".join(
        f"stage{'' if first == last else 's'} {first}{'' if first == last else f'-{last}'}: {delay}"
        for delay, first, last in runs
    )


def describe_copies(plan: Plan, schedule: Schedule, config: RunConfig) -> str:
    """The copies of weights that each rank keeps for its staleness methods, as a phrase with
    bytes; "" if there are none."""
    copies, kept_bytes = Counter[int](), Counter[int]()
    for stage, rank in zip(plan.stages, schedule.rank_of_stage, strict=True):
        count = weight_copies(
            config.methods,
            schedule.in_flight[stage.index] - 1,
            schedule.step_every,
            recomputes=stage.recompute,
        )
        copies[rank] += count
        kept_bytes[rank] += count * stage.gradient_bytes
    return ", ".join(
        f"rank {rank}: {counted(count, 'copy', 'copies')}, {write_bytes(kept_bytes[rank])}"
        for rank, count in sorted(copies.items())
        if count
    )
