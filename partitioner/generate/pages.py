"""A plan -> the two pages of its folder for people: README.md and report.html."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.plan import Boundary, Plan, StageSpec, TensorSpec, spec_bytes, traffic
from .header import write_bytes
from .templating import TEMPLATES


def render_readme(plan: Plan) -> str:
    """README.md: what the folder holds, how it was made, the stages, how to run them."""
    return TEMPLATES.get_template("readme.md.j2").render(
        plan=plan,
        title=_title(plan),
        facts=_facts(plan),
        rows=[_row(plan, stage) for stage in plan.stages],
        total=_total(plan),
        edges=_edges(plan),
        traffic=_traffic(plan),
        shared=_shared(plan),
        notes=(*plan.notes, *plan.explanation),
    )


def render_report(plan: Plan) -> str:
    """report.html: the same as a page that needs no other file and no script."""
    slowest = max((_time_ms(stage) for stage in plan.stages), default=0.0) or 1.0
    heaviest = max((stage.peak_bytes for stage in plan.stages), default=0) or 1
    bars = [
        Bars(
            forward=stage.forward_ms / slowest * 100,
            backward=stage.backward_ms / slowest * 100,
            memory=stage.peak_bytes / heaviest * 100,
        )
        for stage in plan.stages
    ]
    return TEMPLATES.get_template("report.html.j2").render(
        plan=plan,
        title=_title(plan),
        facts=_facts(plan),
        rows=list(zip((_row(plan, stage) for stage in plan.stages), bars, strict=True)),
        bound=plan.lower_bound_ms / slowest * 100,
        boundaries=[_boundary(plan, boundary) for boundary in plan.boundaries],
        traffic=_traffic(plan),
        drawing=_drawing(plan),
        shared=_shared(plan),
        notes=(*plan.notes, *plan.explanation),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One stage of the table, as text."""

    index: int
    file: str
    modules: str
    forward: str
    backward: str
    share: str
    parameters: str
    activations: str
    peak: str
    receives: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Lengths in percent of the longest."""

    forward: float
    backward: float
    memory: float


@dataclass(frozen=True, slots=True)
class Edge:
    """What goes from one stage to another."""

    source: int
    target: int
    label: str


@dataclass(frozen=True, slots=True)
class Flow:
    """What goes from one stage to another, and what would if nothing were made again."""

    source: int
    target: int
    sent: str
    if_sent: str


@dataclass(frozen=True, slots=True)
class Box:
    x: int
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class Arrow:
    path: str
    x: float
    y: float
    label: str
    is_skip: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """The pipeline in SVG: boxes in a row, skips as arcs above."""

    width: int
    height: int
    top: int
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def _title(plan: Plan) -> str:
    count = len(plan.stages)
    return f"{plan.name} in {count} stage{'s' if count != 1 else ''}"


def _facts(plan: Plan) -> list[str]:
    """Sentences on how good the plan is."""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes.items())
    device = plan.profile.get("device", "")
    facts = [f"Costs are for one micro-batch ({sizes})" + (f" on {device}." if device else ".")]
    if plan.bottleneck_ms:
        bound = (
            "no split has a faster slowest stage"
            if plan.optimal
            else f"no split can be below {plan.lower_bound_ms:.2f} ms"
        )
        facts.append(
            f"The slowest stage takes {plan.bottleneck_ms:.2f} ms; {bound} "
            f"(method {plan.method}). An even split of the layers would take "
            f"{plan.even_split_ms:.2f} ms."
        )
    facts.append(f"Weights: {plan.weights}.")
    return facts


def _row(plan: Plan, stage: StageSpec) -> Row:
    total = sum(map(_time_ms, plan.stages)) or math.inf
    receives = [
        f"{boundary.tensor.name} {boundary.tensor} from {boundary.source}"
        for boundary in stage.receives
    ]
    given = [spec for spec in plan.inputs if spec.name in stage.inputs]
    return Row(
        index=stage.index,
        file=stage.file,
        modules=", ".join(stage.modules) or "none",
        forward=f"{stage.forward_ms:.2f}",
        backward=f"{stage.backward_ms:.2f}",
        share=f"{_time_ms(stage) / total:.0%}",
        parameters=write_bytes(stage.param_bytes),
        activations=write_bytes(stage.activation_bytes),
        peak=write_bytes(stage.peak_bytes),
        receives=", ".join([*(spec.name for spec in given), *receives]),
    )


def _time_ms(stage: StageSpec) -> float:
    return stage.forward_ms + stage.backward_ms


def _total(plan: Plan) -> Row:
    stages = plan.stages
    return Row(
        index=len(stages),
        file="",
        modules="",
        forward=f"{sum(stage.forward_ms for stage in stages):.2f}",
        backward=f"{sum(stage.backward_ms for stage in stages):.2f}",
        share="",
        parameters=write_bytes(sum(stage.param_bytes for stage in stages)),
        activations=write_bytes(sum(stage.activation_bytes for stage in stages)),
        peak="",
        receives="",
    )


def _edges(plan: Plan) -> list[Edge]:
    pairs: dict[tuple[int, int], list[TensorSpec]] = {}
    for boundary in plan.boundaries:
        for target in boundary.targets:
            pairs.setdefault((boundary.source, target), []).append(boundary.tensor)
    return [
        Edge(source, target, _tensors(specs)) for (source, target), specs in sorted(pairs.items())
    ]


def _traffic(plan: Plan) -> list[Flow]:
    """Bytes between the stages, where something is made again instead of being sent."""
    if not plan.if_sent:
        return []
    return [
        Flow(flow.source, flow.target, write_bytes(flow.sent), write_bytes(flow.if_sent))
        for flow in traffic(plan)
    ]


def _tensors(specs: Sequence[TensorSpec]) -> str:
    return str(specs[0]) if len(specs) == 1 else f"{len(specs)} tensors"


def _boundary(plan: Plan, boundary: Boundary) -> tuple[str, str, str, str, str]:
    size = spec_bytes(boundary.tensor, plan.sizes)
    targets = " and ".join(map(str, boundary.targets))
    source = str(boundary.source)
    return boundary.tensor.name, str(boundary.tensor), source, targets, write_bytes(size)


def _shared(plan: Plan) -> list[str]:
    """Sentences on parameters that several stages hold."""
    return [
        f"{' = '.join(shared.names)} is one parameter, held by stages "
        f"{' and '.join(map(str, shared.stages))}; their gradients are summed."
        for shared in plan.shared
        if len(set(shared.stages)) > 1
    ]


_BOX_WIDTH, _BOX_HEIGHT, _GAP, _ARC = 150, 54, 130, 26


def _drawing(plan: Plan) -> Drawing:
    edges = _edges(plan)
    longest = max((edge.target - edge.source for edge in edges), default=1)
    top = 12 + _ARC * (longest - 1) + (14 if longest > 1 else 0)
    step = _BOX_WIDTH + _GAP
    boxes = tuple(
        Box(1 + stage.index * step, f"stage {stage.index}", write_bytes(stage.param_bytes))
        for stage in plan.stages
    )
    arrows = []
    middle = top + _BOX_HEIGHT / 2
    for edge in edges:
        start, end = edge.source * step + _BOX_WIDTH + 1, edge.target * step + 1
        is_skip = edge.target - edge.source > 1
        if is_skip:
            start, end = start - _BOX_WIDTH // 3, end + _BOX_WIDTH // 3
            height = top - _ARC * (edge.target - edge.source - 1)
            path = f"M{start} {top}V{height}H{end}V{top - 3}"
            arrows.append(Arrow(path, (start + end) / 2, height - 4, edge.label, True))
        else:
            path = f"M{start} {middle}H{end - 3}"
            arrows.append(Arrow(path, (start + end) / 2, middle - 7, edge.label, False))
    width = len(plan.stages) * step - _GAP + 2
    return Drawing(width, top + _BOX_HEIGHT + 4, top, boxes, tuple(arrows))
