"""The docstrings of the public names -> docs/api.md.

python docs/api_reference.py

Reads the sources with griffe, and the declarations of options. A new name goes into `SECTIONS`.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import griffe

from asyncpipe.partitioner.planning.options import DEFAULTS, OPTIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100

HEAD = """\
# API reference

`python docs/api_reference.py` makes this page from the docstrings; a test checks that it is
current. Times are in milliseconds and sizes in bytes, as the names say (`forward_ms`,
`peak_bytes`), and words are those of the [glossary](glossary.md).

A name such as `asyncpipe.partition` is an attribute of the package, which imports torch only when
the name is first used. Every other name is imported from the module that is given with it.
"""

OPTIONS_MODULE = "partitioner.planning.options"

SECTIONS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Partition a model",
        "",
        (
            ("partitioner.compile", "partition"),
            (OPTIONS_MODULE, "PartitionOptions"),
            ("partitioner.outline", "outline"),
            ("partitioner.outline", "Outline"),
            ("partitioner.outline", "OutlineModule"),
            ("partitioner.outline", "OutlineOperation"),
        ),
    ),
    (
        "Plan a cost graph",
        "",
        (
            ("partitioner.planning.planner", "plan_graph"),
            ("partitioner.graph.formats", "read_graph"),
            ("partitioner.graph.cost_graph", "costs_of"),
            ("partitioner.planning.planner", "GraphPlan"),
            ("partitioner.planning.planner", "GraphStage"),
            ("partitioner.planning.planner", "Crossing"),
            ("partitioner.planning.cluster", "Cluster"),
            ("partitioner.graph.rank_model", "Device"),
            ("partitioner.graph.costs", "Link"),
        ),
    ),
    (
        "The plan of a model",
        "",
        (
            ("runtime.plan.plan", "Plan"),
            ("runtime.plan.plan", "StageSpec"),
            ("runtime.plan.plan", "TensorSpec"),
            ("runtime.plan.plan", "Boundary"),
            ("runtime.plan.plan", "StageMemory"),
            ("runtime.plan.plan", "StagePart"),
            ("runtime.plan.plan", "SharedParameter"),
            ("runtime.plan.setting", "PlanSetting"),
            ("runtime.plan.setting", "RankSpec"),
            ("runtime.plan.findings", "Candidate"),
            ("runtime.plan.findings", "Finding"),
            ("runtime.plan.plan", "read_plan"),
        ),
    ),
    (
        "Use and observe stages",
        "",
        (
            ("runtime.executor.loading", "load"),
            ("runtime.executor.loading", "Pipe"),
            ("runtime.monitoring.records", "Reporter"),
            ("runtime.control.callbacks", "Request"),
            ("runtime.monitoring.records", "StartRecord"),
            ("runtime.monitoring.records", "PredictedStep"),
            ("runtime.monitoring.records", "StepRecord"),
            ("runtime.monitoring.records", "EvalRecord"),
            ("runtime.monitoring.records", "Summary"),
            ("runtime.monitoring.records", "Pace"),
            ("runtime.monitoring.records", "StalenessSummary"),
            ("runtime.monitoring.idle", "RankTime"),
            ("runtime.monitoring.idle", "IdleSplit"),
            ("runtime.monitoring.idle", "split_idle"),
        ),
    ),
    (
        "Train",
        "",
        (
            ("runtime.training.pipeline", "Pipeline"),
            ("runtime.training.given_batches", "StepResult"),
            ("runtime.training.given_batches", "EvalResult"),
            ("runtime.launch.functions", "launch"),
            ("commands.in_python", "train"),
            ("commands.in_python", "RunResult"),
        ),
    ),
    (
        "Schedules",
        "",
        (
            ("runtime.schedule.schedule", "Schedule"),
            ("runtime.schedule.schedule", "Action"),
            ("runtime.schedule.builders", "make_schedule"),
            ("runtime.schedule.builders", "fit_auto"),
            ("runtime.schedule.interleaved", "replicated"),
            ("runtime.schedule.dependencies", "lower"),
            ("runtime.schedule.validation", "validate"),
            ("runtime.schedule.simulate", "simulate"),
            ("runtime.schedule.simulate", "ActionCosts"),
            ("runtime.schedule.text", "draw_grid"),
            ("runtime.schedule.text", "draw_timeline"),
            ("runtime.schedule.text", "from_text"),
            ("runtime.schedule.schedule", "shared_delay"),
            ("runtime.schedule.schedule", "alternating"),
            ("runtime.schedule.asynchronous", "async_1f1b"),
            ("runtime.schedule.run_ahead", "times_ahead"),
            ("runtime.schedule.asynchronous", "Delays"),
            ("runtime.schedule.tasks", "Tasks"),
            ("runtime.freezing.rules", "parse_rule"),
            ("runtime.freezing.rules", "Rule"),
        ),
    ),
    (
        "Communication between ranks",
        "",
        (
            ("runtime.communication.ring", "ring_all_reduce"),
            ("runtime.communication.ring", "RingResult"),
            ("runtime.communication.ring", "RingEvent"),
            ("runtime.communication.ring", "PointToPoint"),
            ("runtime.communication.ring", "chunk_lengths"),
            ("runtime.communication.ring", "ring_elements"),
            ("runtime.communication.products", "matmul_row"),
            ("runtime.communication.products", "matmul_reduction"),
            ("runtime.communication.products", "Factors"),
            ("runtime.communication.products", "Product"),
            ("runtime.communication.endpoints", "TransportLinks"),
            ("runtime.transports.protocol", "LocalHub"),
        ),
    ),
    (
        "Parts of the compiler and the runtime",
        "The other names that the pages use.",
        (
            ("partitioner.models.load", "load_model"),
            ("partitioner.capture", "capture"),
            ("partitioner.split.split", "split"),
            ("partitioner.split.ssa", "separated"),
            ("partitioner.codegen.documentation", "Header"),
            ("partitioner.codegen", "generate"),
            ("partitioner.profile.roofline", "device_spec"),
            ("partitioner.profile.roofline", "known_devices"),
            ("runtime.optimizers.soap", "refresh_periods"),
            ("runtime.staleness.prediction", "step_ahead"),
            ("runtime.config.asynchronous_options", "describe_delays"),
        ),
    ),
    (
        "Errors",
        "Each error that a user can cause is an `AsyncPipeError`.",
        (
            ("runtime.errors", "AsyncPipeError"),
            ("runtime.errors", "ModelError"),
            ("runtime.errors", "CaptureError"),
            ("runtime.errors", "GpuStoppedError"),
            ("runtime.errors", "PlanError"),
            ("runtime.errors", "ScheduleError"),
            ("runtime.errors", "TransportError"),
            ("runtime.errors", "DataError"),
            ("runtime.errors", "DiskError"),
        ),
    ),
)

_FIELD = re.compile(r"(?:- )?((?:`?\w+`?(?:, | or ))*`?[a-z_]\w*`?): (.*)", re.DOTALL)


def source_file(module: str) -> Path:
    """The file of a module of asyncpipe."""
    path = ROOT / Path(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def parsed(module: str) -> griffe.Module:
    """The module as griffe reads it."""
    path = source_file(module)
    return griffe.visit(f"asyncpipe.{module}", filepath=path, code=path.read_text())


def exported() -> frozenset[str]:
    """The names of `asyncpipe.__all__`."""
    names = parsed("__init__")["__all__"].value
    return frozenset(str(name).strip("'\"") for name in names.elements)


def named_lines(paragraph: str) -> list[tuple[list[str], str]]:
    """The names and text of each line of a list `name, name: text`; empty for other paragraphs."""
    found = [_FIELD.fullmatch(item) for item in re.split(r"\n(?!\s)", paragraph)]
    return [
        (re.findall(r"\b(?!or\b)\w+", match[1]), " ".join(match[2].split()))
        for match in found
        if match and all(found)
    ]


def paragraphs_of(thing: griffe.Object) -> list[str]:
    """The paragraphs of a docstring."""
    text = thing.docstring.value if thing.docstring else ""
    return re.split(r"\n\s*\n", text)


def markdown(paragraphs: list[str]) -> Iterator[str]:
    """Paragraphs of a docstring, with examples in code blocks and names in lists."""
    for paragraph in paragraphs:
        if paragraph.lstrip().startswith(">>>"):
            yield f"```text\n{paragraph}\n```"
        elif named := named_lines(paragraph):
            yield "\n".join(f"- `{'`, `'.join(names)}`: {text}" for names, text in named)
        else:
            yield paragraph


def signature(function: griffe.Function, name: str) -> str:
    """The signature, with a line for each parameter if it is long."""
    parameters = [p for p in function.parameters if p.name not in ("self", "cls")]
    parts, star = [], False
    for parameter in parameters:
        kind = parameter.kind or griffe.ParameterKind.positional_or_keyword
        star = star or kind is griffe.ParameterKind.var_positional
        if kind is griffe.ParameterKind.keyword_only and not star:
            parts.append("*")
            star = True
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind.value, "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not stars:
            text += f" = {parameter.default}"
        parts.append(text)
    returns = f" -> {function.returns}" if function.returns else ""
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def members(thing: griffe.Class) -> Iterator[griffe.Object]:
    """The public members of a class, in the order of the source; those that its constructor sets
    count if its docstring lists them.
    """
    listed = {
        name for text in paragraphs_of(thing) for names, _ in named_lines(text) for name in names
    }
    for name, member in thing.members.items():
        is_internal = member.is_attribute and member.annotation is None and not member.docstring
        if not name.startswith("_") and not (is_internal and name not in listed):
            yield member  # type: ignore[misc]


def head_of(member: griffe.Object) -> str:
    """A member of a class with its type, or its signature."""
    if isinstance(member, griffe.Function):
        parameters = signature(member, member.name)
        return " ".join(parameters.split()).replace("( ", "(").replace(", )", ")")
    assert isinstance(member, griffe.Attribute)
    head = f"{member.name}: {member.annotation}" if member.annotation else member.name
    is_default = "property" not in member.labels and "field(" not in str(member.value)
    is_shown = member.annotation and member.value is not None and is_default
    return f"{head} = {member.value}" if is_shown else head


def items(thing: griffe.Class) -> Iterator[str]:
    """The members of a class as items of a list; neighbors that share a line share an item."""
    lines = [line for text in paragraphs_of(thing) for line in named_lines(text)]
    line_of = {name: line for line in lines for name in line[0]}
    for _, group in groupby(members(thing), lambda it: line_of.get(it.name, ([it.name], ""))[0]):
        together = list(group)
        heads = ", ".join(f"`{head_of(member)}`" for member in together)
        first = together[0]
        told = [line_of[first.name][1]] if first.name in line_of else paragraphs_of(first)
        body = "\n\n".join(markdown(told))
        yield f"- {heads}: {body}".replace("\n", "\n  ").replace("\n  \n", "\n\n")


def options_table() -> Iterator[str]:
    """The options of a partition, as they are declared."""
    calls = {"model": "`partition`", "outline": "`outline`", "graph": "`--graph`"}
    yield "| option | default | read by | meaning |"
    yield "|---|---|---|---|"
    for name, option in OPTIONS.items():
        readers = [text for call, text in calls.items() if call in option.read_by]
        flag = option.flag.replace("_", "-") or name.replace("_", "-")
        meaning = f"{option.help} (`--{flag}`)".replace("|", "\\|")
        default = f"`{DEFAULTS[name]!r}`"
        yield f"| `{name}` | {default} | {', '.join(readers) or 'a model by name'} | {meaning} |"


def described(thing: griffe.Object) -> Iterator[str]:
    """The body of a name: its signature, docstring and members."""
    paragraphs = paragraphs_of(thing)
    if isinstance(thing, griffe.Function):
        yield f"```text\n{signature(thing, thing.name)}\n```"
        yield from markdown(paragraphs)
        return
    assert isinstance(thing, griffe.Class)
    constructor = thing.members.get("__init__")
    if isinstance(constructor, griffe.Function):
        yield f"```text\n{signature(constructor, thing.name)}\n```"
    yield from markdown([text for text in paragraphs if not named_lines(text)])
    if thing.name == "PartitionOptions":
        yield "\n".join(options_table())
        return
    if text := "\n".join(items(thing)):
        yield text


def page() -> str:
    """The text of docs/api.md."""
    public = exported()
    blocks = [HEAD.strip()]
    for title, intro, names in SECTIONS:
        blocks.append(f"## {title}")
        if intro:
            blocks.append(intro)
        for module, name in names:
            thing = parsed(module)[name]
            where = f"asyncpipe.{name}" if name in public else f"{name}"
            link = source_file(module).relative_to(ROOT)
            blocks.append(f"### {where}")
            blocks.append(f"From [`asyncpipe.{module}`](../{link}).")
            blocks.extend(described(thing))
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
