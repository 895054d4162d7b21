"""asyncpipe-partition: a model or a cost graph -> stages, or what is known on the way to them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from .. import __version__
from ..runtime.plan import portable
from ..terminal import (
    Ticks,
    make_console,
    print_candidates,
    print_facts,
    print_findings,
    print_graph_plan,
    print_next,
    print_outline,
    print_plan,
)
from .partition_options import PartitionOptions
from .running import usage

app = App(
    name="asyncpipe-partition",
    version=__version__,
    help="Cut a model into balanced pipeline stages and write them as readable Python.",
)
_NO_OPTIONS = PartitionOptions()


@app.default
def partition_command(
    *, options: Annotated[PartitionOptions, Parameter(name="*")] = _NO_OPTIONS
) -> int:
    """Cut a model into balanced pipeline stages and write them as readable Python."""
    if (options.model is None) == (options.graph is None):
        raise usage("Either --model or --graph is needed: what to cut into stages.")
    if options.graph is not None:
        return _plan_graph(options.graph, options)
    if options.stop_after in ("capture", "profile"):
        return _outline(options)
    from ..partitioner.compile import partition_spec

    assert options.model is not None
    devices = _devices(options)
    if options.stages is None and devices is None and options.ranks is None:
        raise usage("--stages is needed: the number of stages to cut the model into.")
    console = make_console()
    with Ticks(console, silent=options.json or options.quiet) as ticks:
        plan = partition_spec(
            options.model,
            stages=options.stages,
            devices=devices,
            output=options.output,
            loss=options.loss,
            cut_at=options.cut_at or (),
            keep_together=options.keep_together or (),
            code=options.code,
            explain=options.explain,
            stop_after=options.stop_after,
            save_weights=not options.no_weights,
            force=options.force,
            command=_command_line("asyncpipe-partition"),
            **options.placing,
            **_of_model(options, ticks),
        )
    folder = options.output or Path("generated_models") / (
        f"{plan.name}_{options.stages or len(plan.stages)}p"
    )
    if options.json:
        print(plan.to_json(), end="")
    elif options.quiet and options.stop_after is None:
        print(folder)
    else:
        print_plan(console, plan)
        if options.explain or options.method == "all" or devices is not None:
            print_candidates(console, plan.candidates, plan.method)
        if options.explain:
            print_findings(console, plan.findings)
        if options.stop_after == "plan":
            print_facts(console, plan)
        else:
            print_next(console, plan, folder)
    return 0


def _of_model(options: PartitionOptions, ticks: Ticks) -> dict[str, Any]:
    """What loading, capturing and profiling a model take."""
    from ..partitioner.capture.dimensions import read_said

    return {
        "model_args": {
            key: _value(text) for key, text in _by_key("--model-arg", options.model_arg).items()
        },
        "inputs": _by_key("--input", options.input) or None,
        "micro_batch_size": options.micro_batch_size,
        "seq": options.seq,
        "seed": options.seed,
        "meta": options.meta,
        "profile": options.profile,
        "threads": options.threads,
        "device": options.device,
        "dtype": options.dtype,
        "calibrate": options.calibrate,
        "no_cache": options.no_cache,
        "leaves": options.leaf or (),
        "batch_dim": read_said("--batch-dim", options.batch_dim or ()),
        "sequence_dim": read_said("--sequence-dim", options.sequence_dim or ()),
        "capture": options.capture,
        "mode": options.mode,
        "on_tick": ticks.tick,
        "on_progress": ticks.progress,
    }


def _outline(options: PartitionOptions) -> int:
    """The graph by module, with costs where it was profiled; nothing is written."""
    from ..partitioner.outline import outline_spec

    assert options.model is not None
    console = make_console()
    with Ticks(console, silent=options.json or options.quiet) as ticks:
        with_profile = options.stop_after == "profile"
        outline = outline_spec(
            options.model, with_profile=with_profile, **_of_model(options, ticks)
        )
    if options.json:
        print(outline.to_json(), end="")
    else:
        print_outline(console, outline)
    return 0


def _devices(options: PartitionOptions) -> Any:
    """The devices to plan for, as --devices or --hosts gives them; None for equal ranks."""
    from ..partitioner.cluster import cluster_of_hosts
    from ..partitioner.cluster_file import read_cluster

    if options.devices is not None and options.hosts is not None:
        raise usage("--devices and --hosts both say what there is: leave one out.")
    if options.hosts is not None:
        return cluster_of_hosts(options.hosts)
    return read_cluster(options.devices) if options.devices is not None else None


def _plan_graph(path: Path, options: PartitionOptions) -> int:
    """Plans a cost graph alone; nothing is written."""
    from ..partitioner.graph_files import read_graph
    from ..partitioner.graph_plan import plan_graph

    for flag in options.of_models_alone:
        raise usage(f"{flag} is of a model; with --graph nothing is captured or written.")
    devices = _devices(options)
    if options.stages is None and devices is None and options.ranks is None:
        raise usage("--stages is needed: the number of stages to cut the graph into.")
    plan = plan_graph(
        read_graph(path),
        options.stages,
        devices=devices,
        cut_before=options.cut_at or (),
        explain=options.explain,
        **options.placing,
    )
    if options.json:
        print(plan.to_json(), end="")
    else:
        console = make_console()
        print_graph_plan(console, plan)
        print_findings(console, plan.findings)
    return 0


def _command_line(name: str) -> str:
    """The command that made a plan, without what does not change it."""
    dropped = {"--force", "--json", "--no-cache", "--quiet", "-q", "--verbose", "-v"}
    tokens = [portable(token) for token in sys.argv[1:] if token not in dropped]
    return shlex.join([name, *tokens])


def _by_key(flag: str, given: list[str] | None) -> dict[str, str]:
    """`["n_layer=4"]` -> {"n_layer": "4"}."""
    found: dict[str, str] = {}
    for text in given or ():
        key, _, value = text.partition("=")
        key = key.replace("-", "_")
        if key in found:
            raise usage(f"{flag} {text}: {key} is given twice. Leave one out.")
        found[key] = value
    return found


def _value(text: str) -> Any:
    """`4` -> 4; what is not JSON is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
