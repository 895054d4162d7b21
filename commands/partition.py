"""asyncpipe-partition: a model or a cost graph -> stages, or what is known on the way to them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..partitioner.planning.options import OPTIONS, PartitionOptions
from ..runtime.limits import flag_of
from ..runtime.process import first_imports
from ..runtime.user_code import command_line
from .console import (
    PhaseDisplay,
    make_console,
    print_candidates,
    print_facts,
    print_findings,
    print_graph_plan,
    print_layouts,
    print_next,
    print_outline,
    print_plan,
    print_text,
)
from .options import CommandOptions, PartitionFlags, make_app
from .running import usage

app = make_app(
    "asyncpipe-partition",
    "Cut a model into balanced pipeline stages and write them as readable Python.",
)
_NO_OPTIONS, _NO_FLAGS = CommandOptions(), PartitionFlags()


@app.default
def partition_command(
    *,
    options: Annotated[CommandOptions, Parameter(name="*")] = _NO_OPTIONS,
    flags: Annotated[PartitionFlags, Parameter(name="*")] = _NO_FLAGS,
) -> int:
    """Cut a model into balanced pipeline stages and write them as readable Python."""
    if (options.model is None) == (options.graph is None):
        raise usage("Give either --model or --graph.")
    given = _given(flags)
    if options.graph is not None:
        return _plan_graph(options.graph, options, given)
    assert options.model is not None
    is_outline = given.get("stop_after") in ("capture", "profile")
    if not is_outline:
        given |= _devices(options, given)
        if not given.keys() & {"stages", "devices", "ranks"}:
            raise usage("--stages is needed: the number of stages to cut the model into.")
    chosen = PartitionOptions(**given)
    if is_outline:
        return _outline(options.model, options, chosen)
    return _partition(options.model, options, chosen)


def _partition(model: str, options: CommandOptions, chosen: PartitionOptions) -> int:
    """Writes a generated folder, or stops after the plan."""
    with first_imports():
        from ..partitioner.compile import partition_or_reuse, partition_spec
        from ..partitioner.loaded_code import runs_only
    partition = partition_or_reuse if runs_only("asyncpipe-partition") else partition_spec
    console = make_console()
    with PhaseDisplay(console, silent=options.json or options.quiet) as display:
        plan = partition(
            model,
            chosen,
            command=command_line("asyncpipe-partition", sys.argv[1:]),
            on_phase=display.end_phase,
            on_progress=display.progress,
        )
    folder = Path(
        chosen.output
        or Path("generated_models") / f"{plan.name}_{chosen.stages or len(plan.stages)}p"
    )
    if options.json:
        print_text(plan.to_json())
    elif options.quiet and chosen.stop_after is None:
        print_text(str(folder))
    else:
        print_plan(console, plan)
        print_layouts(console, plan.layouts)
        compares = chosen.method == "all" or chosen.devices is not None or plan.layouts
        if chosen.explain or compares:
            print_candidates(console, plan.candidates, plan.method)
        if chosen.explain:
            print_findings(console, plan.findings)
        if chosen.stop_after == "plan":
            print_facts(console, plan)
        else:
            print_next(console, plan, folder)
    return 0


def _outline(model: str, options: CommandOptions, chosen: PartitionOptions) -> int:
    """Prints the graph by module, with costs if it is profiled; writes nothing."""
    with first_imports():
        from ..partitioner.outline import outline_spec
    console = make_console()
    with PhaseDisplay(console, silent=options.json or options.quiet) as display:
        outline = outline_spec(
            model,
            chosen,
            with_profile=chosen.stop_after == "profile",
            on_phase=display.end_phase,
            on_progress=display.progress,
        )
    if options.json:
        print_text(outline.to_json())
    else:
        print_outline(console, outline)
    return 0


def _plan_graph(path: Path, options: CommandOptions, given: dict[str, Any]) -> int:
    """Plans a cost graph alone; writes nothing."""
    from ..partitioner.graph.formats import read_graph
    from ..partitioner.planning.planner import plan_graph

    for name in given:
        if "graph" not in OPTIONS[name].read_by:
            flag = flag_of(OPTIONS[name].flag or name)
            raise usage(f"{flag} requires --model: --graph captures and writes nothing.")
    given |= _devices(options, given)
    if not given.keys() & {"stages", "devices", "ranks"}:
        raise usage("--stages is needed: the number of stages to cut the graph into.")
    cut_before = given.pop("cut_at", ())
    plan = plan_graph(read_graph(path), cut_before=cut_before, **given)
    if options.json:
        print_text(plan.to_json())
    else:
        console = make_console()
        print_graph_plan(console, plan)
        print_findings(console, plan.findings)
    return 0


def _given(flags: Any) -> dict[str, Any]:
    """The options of a partition that were given, as `PartitionOptions` takes them."""
    given: dict[str, Any] = {}
    for name, declared in OPTIONS.items():
        value = getattr(flags, declared.flag or name)
        if value is None:
            continue
        flag = flag_of(declared.flag or name)
        if name == "model_args":
            value = {key: _value(text) for key, text in _by_key(flag, value).items()}
        elif name == "inputs":
            value = _by_key(flag, value)
        elif name in ("batch_dim", "sequence_dim"):
            from ..partitioner.capture.sizes import parse_dimension

            value = parse_dimension(flag, value)
        elif name == "save_weights":
            value = not value
        given[name] = value
    return given


def _devices(options: CommandOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """The devices of --devices or --hosts as an option; {} for equal ranks."""
    with first_imports():
        from ..partitioner.planning.cluster import cluster_of_hosts
        from ..partitioner.planning.cluster_file import read_cluster

    devices = given.get("devices")
    if devices is not None and options.hosts is not None:
        raise usage("--devices and --hosts exclude each other: leave one out.")
    if options.hosts is not None:
        return {"devices": cluster_of_hosts(options.hosts)}
    return {} if devices is None else {"devices": read_cluster(devices)}


def _by_key(flag: str, given: list[str] | None) -> dict[str, str]:
    """`["n_layer=4"]` -> {"n_layer": "4"}."""
    values: dict[str, str] = {}
    for text in given or ():
        key, _, value = text.partition("=")
        key = key.replace("-", "_")
        if key in values:
            raise usage(f"{flag} {text}: {key} is given twice. Leave one out.")
        values[key] = value
    return values


def _value(text: str) -> Any:
    """`4` -> 4; a value that is not JSON is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
