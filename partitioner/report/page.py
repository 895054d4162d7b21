"""A plan and the code of its stages -> report.html, the whole page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from ... import __version__
from ...runtime.pages.templating import in_script, render
from ...runtime.plan import TOPICS, Candidate, Finding, Plan
from ...runtime.traffic import spec_bytes, traffic
from ...runtime.wording import write_bytes, write_gap, write_ms, write_share
from ..generate.pages import shared_sentences, title_of
from .bars import cost_bars, memory_bars
from .cards import cards
from .curves import curves
from .gantt import gantts
from .stage_details import stage_details
from .stage_graph import stage_graph


def render_report(plan: Plan, code: Mapping[str, str]) -> str:
    """The page; `code` holds the text of every stage's file by its name.

    The same arguments give the same bytes. It refers to nothing outside itself, needs no script,
    and has its own data in two JSON blocks, `plan` (all of plan.json) and `simulated`.
    """
    drawings, by_count = gantts(plan), curves(plan)
    simulated = {
        "steps": [
            {"schedule": one.schedule, "step_ms": one.step_ms, "idle_share": one.idle_share}
            for one in drawings
        ],
        "by_micro_batches": [asdict(sample) for sample in by_count.samples],
    }
    return render(
        "report.html.j2",
        plan=plan,
        title=title_of(plan),
        status=_status(plan),
        is_good=plan.optimal,
        command=plan.command,
        facts=_facts(plan),
        cards=cards(plan),
        graph=stage_graph(plan),
        boundaries=_boundaries(plan),
        computed_again=_computed_again(plan),
        costs=cost_bars(plan),
        memory=memory_bars(plan),
        gantts=drawings,
        curves=by_count,
        topics=_topics(plan.findings),
        candidates=[_candidate_row(candidate) for candidate in plan.candidates],
        stages=stage_details(plan, code),
        notes=(*shared_sentences(plan), *plan.notes, *plan.explanation),
        plan_json=in_script(plan.to_json()),
        simulated_json=in_script(json.dumps(simulated, indent=1)),
    )


def _status(plan: Plan) -> str:
    if plan.optimal:
        return "✓ proved optimal"
    return f"{write_gap(plan.gap)} above the optimum"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """What the plan rests on, as names and values."""
    setting, profile = plan.setting, plan.profile
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes.items())
    costs = f"{profile['kind']} on {profile['device']}" if profile else "not profiled"
    return [
        ("model", plan.model),
        ("micro-batch", sizes),
        ("costs", costs),
        ("method", plan.method),
        ("schedule", f"{setting.schedule}, {setting.micro_batches} micro-batches a step"),
        ("weights", plan.weights),
        ("graph", plan.hashes.get("graph", "")[:12]),
        ("asyncpipe", f"{__version__}, plan schema {plan.schema}"),
    ]


@dataclass(frozen=True, slots=True)
class BoundaryRow:
    name: str
    shape: str
    source: int
    targets: str
    size: str
    gradient: str


def _boundaries(plan: Plan) -> list[BoundaryRow]:
    return [
        BoundaryRow(
            name=boundary.tensor.name,
            shape=str(boundary.tensor),
            source=boundary.source,
            targets=" and ".join(map(str, boundary.targets)),
            size=write_bytes(spec_bytes(boundary.tensor, plan.sizes)),
            gradient="comes back" if boundary.tensor.requires_grad else "none",
        )
        for boundary in plan.boundaries
    ]


def _computed_again(plan: Plan) -> list[tuple[int, int, str, str]]:
    """From, to, bytes sent, bytes if nothing were computed again; empty where nothing is."""
    flows = traffic(plan) if plan.if_sent else ()
    return [
        (flow.source, flow.target, write_bytes(flow.sent), write_bytes(flow.if_sent))
        for flow in flows
    ]


@dataclass(frozen=True, slots=True)
class Topic:
    """A heading, below it what the findings are about with their sentences. Where something has
    several sentences, all but the first are folded away."""

    heading: str
    abouts: tuple[tuple[str, tuple[str, ...]], ...]
    is_folded: bool


def _topics(findings: tuple[Finding, ...]) -> list[Topic]:
    found = []
    for topic, heading in TOPICS.items():
        of_topic = [finding for finding in findings if finding.topic == topic]
        abouts = tuple(
            (about, tuple(finding.text for finding in same))
            for about, same in groupby(of_topic, key=lambda finding: finding.about)
        )
        if abouts:
            found.append(Topic(heading, abouts, any(len(texts) > 1 for _, texts in abouts)))
    return found


@dataclass(frozen=True, slots=True)
class CandidateRow:
    name: str
    stages: str
    slowest: str
    step: str
    memory: str
    sent: str
    gap: str
    note: str


def _candidate_row(candidate: Candidate) -> CandidateRow:
    """Without stages there is no such plan, and the note says why."""
    if not candidate.stages:
        return CandidateRow(candidate.name, *("none", "", "", "", "", ""), candidate.note)
    return CandidateRow(
        name=candidate.name,
        stages=str(candidate.stages),
        slowest=write_ms(candidate.bottleneck_ms),
        step=write_ms(candidate.step_ms),
        memory=write_bytes(candidate.peak_bytes),
        sent=write_bytes(candidate.crossing_bytes),
        gap=write_share(candidate.gap),
        note=candidate.note,
    )
