"""What the user wants of a profile -> the profile: measured here, or predicted for a device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..runtime.errors import PlanError
from ..runtime.host_memory import keep_freed_memory
from .calibrate import calibrated, this_cpu
from .capture import Capture
from .device_specs import DeviceSpec, device_spec
from .precision import check_dtype
from .profile_cache import ProfileCache
from .profiler import CPU_CORE, TIMED_UP_TO_MS, Profile, is_on, profile, profile_analytic
from .settle import Cut, settled
from .stage_times import time_stages
from .walk import OnProgress, is_on_meta
from .whole import WholeTimes

KINDS = ("measured", "analytic")
_HERE = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How costs are found; each as the option of the same name of `asyncpipe-partition`.

    Without `kind`, costs are measured, but for a model on meta or a `device` that is not here.
    `device` is cpu or cuda, the name of a device, or a TOML file of one. `no_cache` measures
    anew what has been measured before.
    """

    kind: str | None = None
    device: str | None = None
    dtype: str = "float32"
    threads: int | None = None
    calibrate: bool = False
    no_cache: bool = False
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        """Raises PlanError for what is not known, before anything is done."""
        check_dtype(self.dtype)
        if self.device not in (None, *_HERE):
            device_spec(self.device).flops(self.dtype)


def profile_capture(
    captured: Capture, options: ProfileOptions, stages: int, *, whole: bool = True
) -> Profile:
    """The costs of a captured model, for ranks of one stage each; with `whole` they add up to the
    time of the whole model.

    Raises PlanError for options that do not fit each other or the machine.
    """
    inputs = captured.arguments.tensors
    cores = os.cpu_count() or 1
    threads = options.threads or max(1, cores // stages)
    if _kind(captured, options) == "analytic":
        spec = _spec(options, threads)
        return profile_analytic(
            captured, inputs, spec, dtype=options.dtype, on_progress=options.on_progress
        )
    if options.calibrate:
        raise PlanError(
            "--calibrate fits a predicted profile to this machine, and this one is measured.",
            "Add --profile analytic, or leave --calibrate out.",
        )
    device = options.device or "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            "--device cuda: torch finds no CUDA device here to measure on.",
            "Predict for one: --profile analytic --device a100-80g",
        )
    keep_freed_memory()  # as ranks do
    return profile(
        captured,
        inputs,
        threads=threads,
        device=device,
        dtype=options.dtype,
        whole_up_to_ms=TIMED_UP_TO_MS if whole else 0.0,
        cached=not options.no_cache,
        on_progress=options.on_progress,
    )


def cut_and_time(
    captured: Capture,
    cut: Callable[[Profile], Cut],
    measured: Profile,
    options: ProfileOptions,
) -> tuple[Profile, Cut]:
    """The cut for a profile, and the profile that agrees with its stages.

    They are timed as wholes where that can be done: the model is on the device that was measured,
    takes no more than `TIMED_UP_TO_MS` a micro-batch, and its stages can be written as code.
    """
    is_quick = measured.forward_ms + measured.backward_ms <= TIMED_UP_TO_MS
    if measured.kind != "measured" or not is_quick:
        return measured, cut(measured)
    device = torch.device(measured.device)
    if not is_on(captured.model, device):
        return measured, cut(measured)
    cache = ProfileCache.of(
        device,
        measured.threads,
        measured.dtype,
        read=not options.no_cache,
    )

    def time(made: Cut) -> Sequence[WholeTimes]:
        return time_stages(
            made.captured,
            made.stages,
            made.captured.arguments.tensors,
            # A stage that recomputes keeps the activations of one micro-batch.
            in_flight=[1 if load.recomputes else load.in_flight for load in made.solution.loads],
            at_once=_at_once(made, measured),
            threads=measured.threads,
            dtype=measured.dtype,
            content=measured.content,
            cache=cache,
            on_progress=options.on_progress,
        )

    try:
        costs, chosen = settled(cut, measured, time)
    except PlanError:  # What cannot be written is told of when it is to be written.
        return measured, cut(measured)
    cache.save()
    return costs, chosen


def _at_once(made: Cut, measured: Profile) -> int:
    """How many stages compute at a time on this machine. A rank of a GPU has it for itself; and
    with several threads a rank the clock is wall time, in which stages would wait for each other's
    Python."""
    if measured.device != "cpu" or measured.threads > 1:
        return 1
    hosts = Counter(device.host for device in made.solution.problem.setting.devices)
    return min(os.cpu_count() or 1, len(made.stages), max(hosts.values()))


def _kind(captured: Capture, options: ProfileOptions) -> str:
    is_elsewhere = options.device is not None and options.device not in _HERE
    if options.kind == "measured" and is_elsewhere:
        raise PlanError(
            f"{options.device} is not here to be measured.", "Predict it: --profile analytic"
        )
    by_default = "analytic" if is_elsewhere or is_on_meta(captured.model) else "measured"
    return options.kind or by_default


def _spec(options: ProfileOptions, threads: int) -> DeviceSpec:
    """The device that is predicted for."""
    match options.device:
        case None if not options.calibrate:
            return CPU_CORE
        case None | "cpu":
            return calibrated(this_cpu(), torch.device("cpu"), options.dtype, threads)
        case "cuda":
            raise PlanError(
                "--device cuda does not say which device to predict for.",
                "Name it: --device a100-80g",
            )
    spec = device_spec(options.device)
    if not options.calibrate:
        return spec
    if not torch.cuda.is_available():
        raise PlanError(
            f"--calibrate measures {spec.name}, and torch finds no CUDA device here.",
            "Leave --calibrate out.",
        )
    return calibrated(spec, torch.device("cuda"), options.dtype, threads)
