"""Resolved options of a run for tests that have no plan to resolve them for."""

from __future__ import annotations

from typing import Any

from asyncpipe.runtime.config.settings import RunConfig
from asyncpipe.runtime.optimizers.facts import OPTIMIZERS


def run_config(**given: Any) -> RunConfig:
    """The options given; in the rest, one micro-batch of one sample, and an optimizer that changes
    nothing."""
    resolved: dict[str, Any] = {
        "folder": "x",
        "micro_batches": 1,
        "micro_batch_size": 1,
        "data": "clusters",
        "optimizer": "sgd",
        "lr": 0.0,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "warmup": 0,
        "decay": "none",
        "final_lr_ratio": 0.0,
        "clip": 0.0,
    }
    facts = OPTIMIZERS[given.get("optimizer", "sgd")]
    resolved["refresh_every"] = facts.refresh_every
    return RunConfig(**(resolved | given))
