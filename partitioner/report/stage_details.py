"""A plan and the code of its stages -> what is folded away under every stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from ...runtime.plan import Plan, StageSpec, TensorSpec
from ...runtime.traffic import spec_bytes
from ...runtime.wording import counted, write_bytes, write_ms, write_share
from .code import highlighted


@dataclass(frozen=True, slots=True)
class PartRow:
    name: str
    forward: str
    backward: str
    share: str
    percent: float


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One input or output: what it is, and the stages or the border of the model beyond."""

    name: str
    shape: str
    dtype: str
    beyond: str
    size: str


@dataclass(frozen=True, slots=True)
class StageDetails:
    index: int
    modules: str
    summary: str
    parts: tuple[PartRow, ...]
    inputs: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]
    file: str
    num_lines: int
    code: Markup


def stage_details(plan: Plan, code: Mapping[str, str]) -> tuple[StageDetails, ...]:
    """`code` holds the text of every stage's file by its name; a missing one is left out."""
    return tuple(_details(plan, stage, code.get(stage.file, "")) for stage in plan.stages)


def _details(plan: Plan, stage: StageSpec, text: str) -> StageDetails:
    total_ms = stage.forward_ms + stage.backward_ms
    recompute = ", runs its forward again before backward" if stage.recompute else ""
    replicas = f", shared by {len(stage.ranks)} replicas" if len(stage.ranks) > 1 else ""
    return StageDetails(
        index=stage.index,
        modules=", ".join(stage.modules) or "operations only",
        summary=(
            f"forward {write_ms(stage.forward_ms)}, backward {write_ms(stage.backward_ms)}, "
            f"{write_ms(stage.load_ms)} a micro-batch with transfers{replicas}{recompute}; "
            f"{write_bytes(stage.param_bytes)} of parameters, {write_bytes(stage.peak_bytes)} at "
            f"its peak with {counted(stage.in_flight, 'micro-batch', 'micro-batches')} in flight"
        ),
        parts=tuple(
            PartRow(
                name=part.name,
                forward=f"{part.forward_ms:.2f}",
                backward=f"{part.backward_ms:.2f}",
                share=write_share((part.forward_ms + part.backward_ms) / total_ms),
                percent=100 * (part.forward_ms + part.backward_ms) / total_ms,
            )
            for part in stage.parts
            if total_ms
        ),
        inputs=tuple(_inputs(plan, stage)),
        outputs=tuple(_outputs(plan, stage)),
        file=stage.file,
        num_lines=text.count("\n"),
        code=highlighted(text),
    )


def _inputs(plan: Plan, stage: StageSpec) -> Iterable[TensorRow]:
    specs = {spec.name: spec for spec in (*plan.inputs, *plan.values)}
    sources = {boundary.tensor.name: boundary.source for boundary in stage.receives}
    for name in stage.inputs:
        beyond = f"stage {sources[name]}" if name in sources else "input of the model"
        yield _row(plan, specs[name], beyond)


def _outputs(plan: Plan, stage: StageSpec) -> Iterable[TensorRow]:
    specs = {spec.name: spec for spec in plan.values}
    targets = {boundary.tensor.name: boundary.targets for boundary in stage.sends}
    for name in stage.outputs:
        stages = " and ".join(map(str, targets.get(name, ())))
        yield _row(plan, specs[name], f"stage {stages}" if stages else "output of the model")


def _row(plan: Plan, spec: TensorSpec, beyond: str) -> TensorRow:
    shape = ", ".join(map(str, spec.shape))
    size = write_bytes(spec_bytes(spec, plan.sizes))
    return TensorRow(spec.name, f"[{shape}]", spec.dtype, beyond, size)
