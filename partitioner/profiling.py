"""What the user wants of a profile -> the profile: measured here, or predicted for a device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..runtime.errors import PlanError
from .calibrate import calibrated, this_cpu
from .capture import Capture
from .device_specs import DeviceSpec, device_spec
from .precision import check_dtype
from .profiler import CPU_CORE, Profile, profile, profile_analytic
from .walk import OnProgress, is_on_meta

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


def profile_capture(captured: Capture, options: ProfileOptions, stages: int) -> Profile:
    """The costs of a captured model, for ranks of one stage each.

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
    return profile(
        captured,
        inputs,
        threads=threads,
        device=device,
        dtype=options.dtype,
        cached=not options.no_cache,
        on_progress=options.on_progress,
    )


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
