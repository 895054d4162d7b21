"""The legal values of the options that have a few, and the bounds of those that are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..wording import did_you_mean

CHOICES: Mapping[str, tuple[str, ...]] = {
    "remainder": ("drop", "proportional"),
    "optimizer": ("sgd", "sutskever", "adam", "adamw", "nadam", "muon", "soap"),
    "decay": ("none", "linear", "cosine"),
    "device": ("cpu", "cuda"),
    "dtype": ("float32", "float64"),
    "precision": ("full", "bfloat16", "float16"),
    "boundary_dtype": ("bfloat16",),
    "transport": ("auto", "local", "shm", "gloo", "nccl", "mpi"),
    "pin": ("cores", "numa", "none"),
    "batch_norm": ("micro-batch", "mini-batch"),
    "clip_by": ("stage", "proportion", "global", "known"),
}
"""The legal values of the options that have a few."""

_AT_LEAST: Mapping[str, float] = {
    "ranks": 1,
    "replicas": 1,
    "check_replicas": 0,
    "micro_batches": 1,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "seq": 1,
    "staleness_cap": 0,
    "flush_every": 0,
    "steps": 0,
    "samples": 1,
    "save_every": 0,
    "keep_last": 1,
    "keep_best": 0,
    "lr": 0,
    "momentum": 0,
    "refresh_every": 1,
    "annealing_steps": 1,
    "weight_decay": 0,
    "warmup": 0,
    "final_lr_ratio": 0,
    "clip": 0,
    "loss_scale": 1,
    "seed": 0,
    "eval_every": 0,
    "eval_batches": 0,
    "log_every": 1,
    "threads": 1,
    "timeout_s": 1,
    "stall_s": 0,
    "ranks_per_gpu": 1,
    "master_port": 1,
    "nodes": 1,
    "restarts": 0,
}
_AT_MOST: Mapping[str, float] = {
    "ranks": 2**16,
    "replicas": 2**16,
    "micro_batches": 2**16,
    "micro_batch_size": 2**31,
    "seq": 2**31,
    "threads": 2**12,
    "timeout_s": 10**8,
    "stall_s": 10**8,
    "ranks_per_gpu": 2**16,
    "master_port": 2**16 - 1,
    "nodes": 2**16,
}
"""Beyond these no machine goes; other counts end at 2**53."""


def fault_of(option: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with a value that was given, and the cure; None where it is legal."""
    legal = CHOICES.get(option, ())
    if legal and value not in legal:
        cure = did_you_mean(str(value), legal, f"Choose {', '.join(legal)}.")
        return f"{flag_of(option)} {value} is not known.", cure
    if option in _AT_LEAST:
        least = _AT_LEAST[option]
        most = _AT_MOST.get(option, 2**53 if isinstance(value, int) else 1e300)
        if not least <= value <= most:
            upto = f"to {most}" if value > most else "up"
            return f"{flag_of(option)} {value} is not a number from {least:g} {upto}.", ""
    return None


def flag_of(option: str) -> str:
    return "--" + option.replace("_", "-")
