"""A plan and the code of its stages -> report.html, the whole page.

This module makes the five numbers on top of the page, the folded details of every stage, and the
HTML spans of the highlighted code; the page sets their colors for light and dark mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String

from ...runtime import __version__
from ...runtime.formatting import (
    Column,
    Table,
    counted,
    write_bytes,
    write_duration,
    write_gap,
    write_ms,
    write_ratio,
    write_share,
)
from ...runtime.plan.findings import TOPICS, BestLayout, Candidate, Finding
from ...runtime.plan.forecast import forecast_one_step, spec_bytes, step_volumes, traffic
from ...runtime.plan.plan import Plan, StageSpec, TensorSpec
from ...runtime.reports.charts import Card
from ...runtime.reports.model_strip import model_strip, parameter_count
from ...runtime.reports.planned_steps import planned_steps
from ...runtime.reports.rendering import in_script, render
from ..codegen.documentation import shared_sentences, title_of
from .charts import cost_bars, curves, drawn_schedules, memory_bars

_MORE = (1, 2, 4)  # times the plan's micro-batches
_GAINS = 1.005  # from here on a ratio is written as more than 1.00


def cards(plan: Plan) -> tuple[Card, ...]:
    """Gain over the even split, slowest stage, one step, idle share, bytes a boundary."""
    return _gain(plan), _slowest(plan), _step(plan), _idle(plan), _bytes(plan)


def _gain(plan: Plan) -> Card:
    ratio = plan.even_split_ms / plan.bottleneck_ms if plan.bottleneck_ms else 1.0
    if len(plan.stages) == 1:
        return Card("Stages", "1", "nothing to balance")
    if ratio < _GAINS:
        heading = "Even split by blocks"
        return Card(heading, "equally fast", f"bottleneck stage {write_ms(plan.even_split_ms)}")
    detail = f"the same number of blocks per stage: {write_ms(plan.even_split_ms)}"
    return Card("Faster than an even split", write_ratio(ratio), detail)


def _slowest(plan: Plan) -> Card:
    bound = f"no plan can be below {write_ms(plan.lower_bound_ms)}"
    loads_ms = {str(stage.index): stage.load_ms for stage in plan.stages}
    if plan.slowest == "rank":
        loads_ms = {
            str(rank): sum(plan.stages[stage].load_ms for stage in stages)
            for rank, stages in plan.stages_of_rank.items()
        }
    slowest = max(loads_ms, key=loads_ms.__getitem__)
    heading = f"Bottleneck: {plan.slowest} {slowest}"
    return Card(heading, write_ms(plan.bottleneck_ms), bound)


def _step(plan: Plan) -> Card:
    count = plan.setting.micro_batches
    step = forecast_one_step(plan, plan.setting.schedule, count)
    detail = f"{plan.setting.schedule}, {counted(count, 'micro-batch', 'micro-batches')}"
    return Card("One predicted step", write_ms(step.step_ms), detail)


def _idle(plan: Plan) -> Card:
    name = drawn_schedules(plan)[0]
    shares = {
        number: forecast_one_step(plan, name, number).idle_share
        for number in (plan.setting.micro_batches * times for times in _MORE)
    }
    first, *more = (f"{number}: {write_share(share)}" for number, share in shares.items())
    number, share = first.split(": ")
    return Card(
        f"Idle in {name}, {counted(int(number), 'micro-batch', 'micro-batches')}",
        share,
        "with " + ", ".join(more),
    )


def _bytes(plan: Plan) -> Card:
    flows = traffic(plan)
    if not flows:
        return Card("Sent between stages", "nothing", "one stage")
    most = max(flows, key=lambda flow: flow.sent)
    total = sum(flow.sent for flow in flows)
    return Card(
        "Largest boundary, per micro-batch",
        write_bytes(most.sent),
        f"stage {most.source} to {most.target}; all boundaries {write_bytes(total)}, "
        "plus gradients",
    )


_CLASSES: tuple[tuple[Any, str], ...] = (
    (Comment, "c"),
    (Keyword, "k"),
    (String, "s"),
    (Number, "m"),
    (Name.Class, "d"),
    (Name.Function, "d"),
    (Name.Decorator, "d"),
)


def highlighted(code: str) -> Markup:
    """
    >>> highlighted("x = 1  # <one>\\n")
    Markup('x = <i class="m">1</i>  <i class="c"># &lt;one&gt;</i>\\n')
    """
    return Markup("").join(_spans(code))


def _spans(code: str) -> Iterator[Markup]:
    tokens = ((_class_of(kind), text) for kind, text in PythonLexer().get_tokens(code))
    for name, run in groupby(tokens, key=lambda token: token[0]):
        text = escape("".join(text for _, text in run))
        yield Markup('<i class="{}">{}</i>').format(name, text) if name else text


def _class_of(kind: Any) -> str:
    return next((name for parent, name in _CLASSES if kind in parent), "")


@dataclass(frozen=True, slots=True)
class PartRow:
    name: str
    forward: str
    backward: str
    share: str
    percent: float
    slowest: str


@dataclass(frozen=True, slots=True)
class StageDetails:
    index: int
    modules: str
    summary: str
    parts: tuple[PartRow, ...]
    inputs: Table
    outputs: Table
    file: str
    num_lines: int
    code: Markup


def stage_details(plan: Plan, code: Mapping[str, str]) -> tuple[StageDetails, ...]:
    """`code` holds the text of every stage's file by its name; a missing file is left out."""
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
            f"{write_ms(stage.load_ms)} per micro-batch with transfers{replicas}{recompute}; "
            f"{parameter_count(stage)} parameters ({write_bytes(stage.param_bytes)}), "
            f"{write_bytes(stage.peak_bytes)} at its peak with "
            f"{counted(stage.in_flight, 'micro-batch', 'micro-batches')} in flight"
        ),
        parts=tuple(
            PartRow(
                name=part.name,
                forward=f"{part.forward_ms:.2f}",
                backward=f"{part.backward_ms:.2f}",
                share=write_share((part.forward_ms + part.backward_ms) / total_ms),
                percent=100 * (part.forward_ms + part.backward_ms) / total_ms,
                slowest=part.slowest,
            )
            for part in stage.parts
            if total_ms
        ),
        inputs=_tensor_table("from", _inputs(plan, stage)),
        outputs=_tensor_table("to", _outputs(plan, stage)),
        file=stage.file,
        num_lines=text.count("\n"),
        code=highlighted(text),
    )


def _tensor_table(beyond: str, rows: Iterable[tuple[str, ...]]) -> Table:
    """Inputs or outputs of a stage; `beyond` says what the stages of a tensor are to it."""
    columns = (
        Column("name", "code"),
        Column("shape", "code"),
        Column("dtype", "text"),
        Column(beyond, "text"),
        Column("per micro-batch"),
    )
    return Table(columns, tuple(rows))


def _inputs(plan: Plan, stage: StageSpec) -> Iterable[tuple[str, ...]]:
    specs = {spec.name: spec for spec in (*plan.inputs, *plan.values)}
    sources = {boundary.tensor.name: boundary.source for boundary in stage.receives}
    for name in stage.inputs:
        beyond = f"stage {sources[name]}" if name in sources else "input of the model"
        yield _row(plan, specs[name], beyond)


def _outputs(plan: Plan, stage: StageSpec) -> Iterable[tuple[str, ...]]:
    specs = {spec.name: spec for spec in plan.values}
    targets = {boundary.tensor.name: boundary.targets for boundary in stage.sends}
    for name in stage.outputs:
        stages = " and ".join(map(str, targets.get(name, ())))
        yield _row(plan, specs[name], f"stage {stages}" if stages else "output of the model")


def _row(plan: Plan, spec: TensorSpec, beyond: str) -> tuple[str, ...]:
    shape = ", ".join(map(str, spec.shape))
    size = write_bytes(spec_bytes(spec, plan.sizes))
    return spec.name, f"[{shape}]", spec.dtype, beyond, size


def render_report(plan: Plan, code: Mapping[str, str]) -> str:
    """The page; `code` holds the text of every stage's file by its name.

    The same arguments give the same bytes. The page refers to nothing outside itself, needs no
    script, and holds its own data in two JSON blocks, `plan` (all of plan.json) and `simulated`.
    """
    steps, by_count = planned_steps(plan), curves(plan)
    simulated = {
        "steps": [
            {"schedule": step.schedule, "step_ms": step.step_ms, "idle_share": step.idle_share}
            for step in steps
        ],
        "by_micro_batches": [asdict(sample) for sample in by_count.samples],
    }
    return render(
        "report.html.j2",
        plan=plan,
        title=title_of(plan),
        status=_status(plan),
        is_good=plan.optimal,
        why="",
        command=plan.command,
        facts=_facts(plan),
        cards=cards(plan),
        strip=model_strip(plan),
        volumes=_volumes(plan),
        boundaries=_boundaries(plan),
        computed_again=_computed_again(plan),
        costs=cost_bars(plan),
        memory=memory_bars(plan),
        steps=steps,
        curves=by_count,
        topics=_topics(plan.findings),
        candidates=candidate_table(plan.candidates, timed=False),
        layouts=layout_table(plan.layouts),
        stages=stage_details(plan, code),
        notes=(*shared_sentences(plan), *plan.notes, *plan.explanation),
        plan_json=in_script(plan.to_json()),
        simulated_json=in_script(json.dumps(simulated, indent=1)),
    )


def _status(plan: Plan) -> str:
    if plan.optimal:
        return "✓ proven optimal"
    return f"{write_gap(plan.gap)} above the optimum"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """The basis of the plan, as names and values."""
    setting, profile = plan.setting, plan.profile
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes.items())
    costs = f"{profile['kind']} on {profile['device']}" if profile else "not profiled"
    return [
        ("model", plan.model),
        ("micro-batch", sizes),
        ("costs", costs),
        ("method", plan.method),
        ("schedule", f"{setting.schedule}, {setting.micro_batches} micro-batches per step"),
        ("weights", plan.weights),
        ("graph hash", plan.hashes.get("graph", "")[:12]),
        ("asyncpipe", f"{__version__}, plan schema {plan.schema}"),
    ]


def _boundaries(plan: Plan) -> Table:
    columns = (
        Column("tensor", "code"),
        Column("shape", "code"),
        Column("from", "text"),
        Column("to", "text"),
        Column("per micro-batch"),
        Column("gradient", "text"),
    )
    rows = (
        (
            boundary.tensor.name,
            str(boundary.tensor),
            str(boundary.source),
            " and ".join(map(str, boundary.targets)),
            write_bytes(spec_bytes(boundary.tensor, plan.sizes)),
            "comes back" if boundary.tensor.requires_grad else "none",
        )
        for boundary in plan.boundaries
    )
    return Table(columns, tuple(rows))


def _volumes(plan: Plan) -> Table:
    """The bytes of a step from each stage to each other: tensors, and gradients on the way back."""
    volumes = step_volumes(plan)
    stages = range(len(plan.stages))
    rows = (
        (
            f"from stage {source}",
            *(write_bytes(size) if (size := volumes.get((source, to))) else "-" for to in stages),
        )
        for source in stages
    )
    headings = (Column(f"to stage {to}") for to in stages)
    return Table((Column("", "text"), *headings), tuple(rows))


def _computed_again(plan: Plan) -> Table:
    """The bytes sent, and those without recomputation; empty where no stage recomputes."""
    columns = (
        Column("from", "text"),
        Column("to", "text"),
        Column("bytes per micro-batch"),
        Column("with everything sent"),
    )
    rows = (
        (str(flow.source), str(flow.target), write_bytes(flow.sent), write_bytes(flow.if_sent))
        for flow in (traffic(plan) if plan.if_sent else ())
    )
    return Table(columns, tuple(rows))


@dataclass(frozen=True, slots=True)
class Topic:
    """A heading with the findings below it.

    heading: the text of the heading
    abouts: the subjects of the findings, each with its sentences
    is_folded: whether a subject has several sentences; all but its first are folded away
    """

    heading: str
    abouts: tuple[tuple[str, tuple[str, ...]], ...]
    is_folded: bool


def _topics(findings: tuple[Finding, ...]) -> list[Topic]:
    topics = []
    for topic, heading in TOPICS.items():
        of_topic = [finding for finding in findings if finding.topic == topic]
        abouts = tuple(
            (about, tuple(finding.text for finding in same))
            for about, same in groupby(of_topic, key=lambda finding: finding.about)
        )
        if abouts:
            topics.append(Topic(heading, abouts, any(len(texts) > 1 for _, texts in abouts)))
    return topics


def candidate_table(candidates: Sequence[Candidate], *, timed: bool) -> Table:
    """The plans that were compared; if `timed`, with the time of planning each.

    A candidate without stages stands for a plan that could not be made; its note says why.
    """
    columns = (
        Column("stages", leave_out=2),
        Column("bottleneck rank"),
        Column("step"),
        Column("peak memory", leave_out=1),
        Column("sent per micro-batch", leave_out=3),
        Column("gap to bound"),
        *((Column("planned in", leave_out=4),) if timed else ()),
    )
    return Table(
        (Column("plan", "text"), *columns, Column("note", "note")),
        tuple(
            (
                candidate.name,
                *(_cells(candidate, timed=timed) if candidate.stages else ("-",) * len(columns)),
                candidate.note,
            )
            for candidate in candidates
        ),
    )


def layout_table(layouts: Sequence[BestLayout]) -> Table:
    """The fastest layout of each number of devices."""
    columns = (
        Column("devices"),
        Column("layout", "text"),
        Column("step"),
        Column("gap to bound", leave_out=2),
        Column("peak memory", leave_out=1),
        Column("why", "note"),
    )
    return Table(
        columns,
        tuple(
            (
                str(layout.devices),
                layout.layout,
                write_ms(layout.step_ms),
                write_share(max(0.0, layout.step_ms / layout.step_bound_ms - 1)),
                write_bytes(layout.peak_bytes),
                layout.why,
            )
            for layout in layouts
        ),
    )


def _cells(candidate: Candidate, *, timed: bool) -> tuple[str, ...]:
    return (
        str(candidate.stages),
        write_ms(candidate.bottleneck_ms),
        write_ms(candidate.step_ms),
        write_bytes(candidate.peak_bytes),
        write_bytes(candidate.crossing_bytes),
        write_share(max(0.0, candidate.gap)),
        *((write_duration(candidate.seconds),) if timed else ()),
    )
