"""`--recompute` + a plan -> the plan with other stages running their forward a second time."""

from __future__ import annotations

from dataclasses import replace

from ..plan import Plan, StageSpec
from .settings import SettingsError


def with_recompute(plan: Plan, chosen: str) -> Plan:
    """The plan as `auto` (as planned), `all`, `none` or stages such as `0,2` say.

    A second forward takes the time of the first, where more than one micro-batch is in flight; a
    stage that goes backward at once has nothing to run again. Raises SettingsError for
    stages that do not exist.
    """
    if chosen == "auto":
        return plan
    again = _stages(plan, chosen)
    return replace(plan, stages=tuple(_with(stage, stage.index in again) for stage in plan.stages))


def _stages(plan: Plan, chosen: str) -> frozenset[int]:
    count = len(plan.stages)
    if chosen in ("all", "none"):
        return frozenset(range(count) if chosen == "all" else ())
    words = [word.strip() for word in chosen.split(",")]
    for word in words:
        if int(word) >= count:
            raise SettingsError(
                f"--recompute {chosen}: there is no stage {int(word)}, the plan has stages 0 to "
                f"{count - 1}.",
                "Leave it out, or choose auto, all or none.",
            )
    return frozenset(map(int, words))


def _with(stage: StageSpec, recompute: bool) -> StageSpec:
    if stage.recompute == recompute:
        return stage
    second_ms = stage.forward_ms if stage.in_flight > 1 else 0.0
    backward_ms = stage.backward_ms + (second_ms if recompute else -second_ms)
    return replace(stage, recompute=recompute, backward_ms=backward_ms)
