"""A plan + the sizes and dtypes of a run -> the plan with the transfers of that run.

A plan's transfers are of the tensors that it was made for. A run may have other sizes, compute in
another dtype, or cast what goes between ranks: what a transfer takes beyond its latency changes
with its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ..boundary_dtypes import BoundaryDtypes
from ..plan import Boundary, Plan, StageSpec, TensorSpec
from ..traffic import spec_bytes


def with_transfers_of_run(plan: Plan, planned: Plan, dtypes: BoundaryDtypes) -> Plan:
    """`plan` has the sizes of the run, `planned` those that the transfers are known for."""
    latency_ms = plan.setting.latency_ms

    def before(tensor: TensorSpec) -> float:
        return spec_bytes(tensor, planned.sizes)

    def now(tensor: TensorSpec) -> float:
        return math.prod(tensor.resolve(plan.sizes)) * dtypes.between_ranks(tensor).itemsize

    def scaled(time_ms: float, crossing: Collection[Boundary]) -> float:
        fixed_ms = min(time_ms, latency_ms * len(crossing))
        planned_bytes = _total(before, crossing)
        share = _total(now, crossing) / planned_bytes if planned_bytes else 1.0
        return fixed_ms + (time_ms - fixed_ms) * share

    def talking(stage: StageSpec) -> StageSpec:
        rank_of = plan.device_of_stage
        crossing = [*_leaving(stage.sends, rank_of), *_leaving(stage.receives, rank_of)]
        returning = [boundary for boundary in crossing if boundary.tensor.requires_grad]
        return replace(
            stage,
            forward_talk_ms=scaled(stage.forward_talk_ms, crossing),
            backward_talk_ms=scaled(stage.backward_talk_ms, returning),
        )

    def over(source: int, target: int) -> list[Boundary]:
        return [each for each in plan.stages[source].sends if target in each.targets]

    transfer_ms = tuple(
        (source, target, scaled(time_ms, over(source, target)))
        for source, target, time_ms in plan.setting.transfer_ms
    )
    return replace(
        plan,
        stages=tuple(map(talking, plan.stages)),
        setting=replace(plan.setting, transfer_ms=transfer_ms),
    )


def _total(size: Callable[[TensorSpec], float], crossing: Iterable[Boundary]) -> float:
    return sum(size(boundary.tensor) for boundary in crossing)


def _leaving(boundaries: Iterable[Boundary], rank_of: tuple[int, ...]) -> Iterable[Boundary]:
    """Those that go to another rank."""
    for boundary in boundaries:
        if {rank_of[target] for target in boundary.targets} != {rank_of[boundary.source]}:
            yield boundary
