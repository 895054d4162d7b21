"""The keywords of `partition`, `outline` and `plan_graph` for type checkers and editors.

`PartitionOptions` declares the options; the names and types here repeat it, and a test compares
both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from ..capture import DimensionOption
    from .cluster import Cluster


class PlanConfig(TypedDict, total=False):
    """How a plan will be run: options of `PartitionOptions`, for the functions of the planner."""

    schedule: str | None
    ranks: int | None
    micro_batches: int
    recompute: str
    memory_limit: int | str | None
    optimizer: str
    staleness: str
    zero: int


class OutlineKeywords(TypedDict, total=False):
    """The options of `PartitionOptions` that `outline` reads."""

    batch_dim: DimensionOption
    sequence_dim: DimensionOption
    capture: str
    mode: str
    leaves: Collection[str]
    profile: str | None
    device: str | None
    dtype: str
    threads: int | None
    calibrate: bool
    no_cache: bool


class PartitionKeywords(PlanConfig, OutlineKeywords, total=False):
    """The options of `PartitionOptions` that `partition` reads."""

    model_args: Mapping[str, Any] | None
    tensor_parallel: int | str
    sequence_parallel: bool
    elastic: str | None
    freeze: str | None
    grow: str
    cache: str
    loss: str | Callable[..., Any] | None
    stages: int | None
    method: str
    granularity: str
    prefer_modules: float
    cut_at: Sequence[str]
    keep_together: Sequence[str]
    explain: bool
    devices: Cluster | str | Path | None
    output: str | Path | None
    code: str
    save_weights: bool
    force: bool
    stop_after: str | None
