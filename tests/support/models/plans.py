"""Plans made by hand: of stages that take 1 ms forward and 2 ms backward, and hold no bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncpipe.runtime.plan.plan import (
    Boundary,
    Plan,
    StageMemory,
    StageSpec,
    TensorSpec,
)
from asyncpipe.runtime.plan.setting import PlanSetting


def stage_by_hand(
    index: int,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    parameters: tuple[str, ...] = (),
    buffers: tuple[str, ...] = (),
    draws_random: bool = False,
) -> StageSpec:
    """A stage on the rank of its number; `connected` gives it sends and receives."""
    return StageSpec(
        index=index,
        file=f"stage_{index}.py",
        class_name="Stage",
        modules=(),
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
        buffers=buffers,
        draws_random=draws_random,
        forward_ms=1.0,
        backward_ms=2.0,
        param_bytes=0,
        activation_bytes=0,
        peak_bytes=0,
        sends=(),
        receives=(),
        memory=StageMemory(),
        in_flight=1,
        load_ms=3.0,
        ranks=(index,),
    )


def connected(
    specs: Sequence[StageSpec], tensors: Mapping[str, TensorSpec]
) -> tuple[StageSpec, ...]:
    """The stages, with a boundary for each tensor that one makes and another reads."""
    boundaries = [
        Boundary(tensors[name], source.index, targets)
        for source in specs
        for name in source.outputs
        if (targets := tuple(target.index for target in specs if name in target.inputs))
    ]
    return tuple(
        replace(
            spec,
            sends=tuple(b for b in boundaries if b.source == spec.index),
            receives=tuple(b for b in boundaries if spec.index in b.targets),
        )
        for spec in specs
    )


def plan_by_hand(name: str, **fields: Any) -> Plan:
    given: dict[str, Any] = {
        "model": name,
        "model_args": {},
        "command": f"asyncpipe-partition --model {name} --stages 2",
        "criterion": None,
        "shared": (),
        "method": "by hand",
        "bottleneck_ms": 3.0,
        "lower_bound_ms": 3.0,
        "even_split_ms": 3.0,
        "optimal": True,
        "setting": PlanSetting(),
        "profile": {},
        "hashes": {},
        "weights": "random",
    }
    return Plan(name=name, **(given | fields))
