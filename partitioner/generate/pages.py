"""A plan -> README.md of its folder, and the sentences that it shares with the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.pages.templating import TEMPLATES
from ...runtime.plan import Plan, StageSpec, TensorSpec
from ...runtime.traffic import traffic
from ...runtime.wording import write_bytes


def render_readme(plan: Plan) -> str:
    """README.md: what the folder holds, how it was made, the stages, how to run them."""
    return TEMPLATES.get_template("readme.md.j2").render(
        plan=plan,
        title=title_of(plan),
        facts=facts_of(plan),
        rows=[_row(plan, stage) for stage in plan.stages],
        total=_total(plan),
        edges=_edges(plan),
        traffic=_traffic(plan),
        shared=shared_sentences(plan),
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


def title_of(plan: Plan) -> str:
    count = len(plan.stages)
    return f"{plan.name} in {count} stage{'s' if count != 1 else ''}"


def facts_of(plan: Plan) -> list[str]:
    """Sentences on how good the plan is."""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes.items())
    device = plan.profile.get("device", "")
    facts = [f"Costs are for one micro-batch ({sizes})" + (f" on {device}." if device else ".")]
    if plan.bottleneck_ms:
        bound = (
            f"no split has a faster slowest {plan.slowest}"
            if plan.optimal
            else f"no split can be below {plan.lower_bound_ms:.2f} ms"
        )
        facts.append(
            f"The slowest {plan.slowest} takes {plan.bottleneck_ms:.2f} ms; {bound} "
            f"(method {plan.method}). An even split of the layers would take "
            f"{plan.even_split_ms:.2f} ms."
        )
    if plan.slowest == "rank":
        ranks = (
            f"rank {rank} has {', '.join(map(str, stages))}"
            for rank, stages in plan.stages_of_rank.items()
        )
        facts.append(
            f"Ranks have several stages under {plan.setting.schedule}: {'; '.join(ranks)}."
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


def shared_sentences(plan: Plan) -> list[str]:
    """Sentences on parameters that several stages hold."""
    return [
        f"{' = '.join(shared.names)} is one parameter, held by stages "
        f"{' and '.join(map(str, shared.stages))}; their gradients are summed."
        for shared in plan.shared
        if len(set(shared.stages)) > 1
    ]
