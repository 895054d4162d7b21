"""Options -> the factor of the learning rate at each step: a built-in or the user's schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ..config.batch_layout import StepBatch
from ..config.learning_options import SCALES
from ..config.settings import RunConfig, SettingsError
from ..rng import import_seeded
from ..user_code import user_errors_as

WSD_SHARE = 0.2
"""The share of the steps in which the learning rate of `--decay wsd` falls."""


def lr_factor(
    step: int, *, steps: int, warmup: int = 0, decay: str = "none", final_ratio: float = 0.0
) -> float:
    """The factor of the learning rate at `step`, counted from 0.

    It rises linearly over `warmup` steps, then falls to `final_ratio` at `steps`, linearly or as
    half a cosine, or stays constant; with `wsd` it falls linearly over the last fifth of the steps.

    >>> [round(lr_factor(s, steps=10, warmup=2, decay="linear"), 3) for s in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    >>> [round(lr_factor(s, steps=10, warmup=2, decay="wsd"), 3) for s in (0, 1, 8, 9, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    first = max(warmup, steps - round(WSD_SHARE * steps)) if decay == "wsd" else warmup
    done = min(1.0, max(0, step - first) / max(1, steps - first))
    if decay in ("linear", "wsd"):
        return 1 + (final_ratio - 1) * done
    if decay == "cosine":
        return final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * done)) / 2
    return 1.0


def learning_rate_of(config: RunConfig, batch: StepBatch | None = None) -> Callable[[int], float]:
    """The factor of `--lr` at a step, counted from 0.

    Where the steps of a run grow, the schedule follows its samples, and `batch` has those of the
    steps in question: their rate is that of their first sample, scaled as `--scale-lr` says.

    Raises SettingsError for a function of the user that is not there; its factor does so where it
    fails or is not a number from 0 on.
    """
    scheduled = _scheduled(config)
    if batch is None or not batch.unit:
        return scheduled
    scale = batch.growth ** SCALES[config.scale_lr]
    return lambda step: scale * scheduled(batch.counted(step))


def _scheduled(config: RunConfig) -> Callable[[int], float]:
    if config.lr_schedule is not None:
        return partial(_own_factor, config.lr_schedule, config)
    return partial(
        lr_factor,
        steps=config.steps,
        warmup=config.warmup,
        decay=config.decay,
        final_ratio=config.final_lr_ratio,
    )


def _own_factor(spec: str, config: RunConfig, step: int) -> float:
    schedule = import_seeded(spec, "--lr-schedule", SettingsError, config.seed)
    with user_errors_as(SettingsError, f"--lr-schedule {spec}"):
        factor = float(schedule(step, config.steps))
    if not 0 <= factor < math.inf:
        raise SettingsError(
            f"--lr-schedule {spec} returned {factor} for step {step} of {config.steps}.",
            "Return the factor of --lr: a finite number, 0 or more.",
        )
    return factor
