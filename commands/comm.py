"""asyncpipe-comm: measures the links between ranks and explains what they cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from ..runtime.communication.operation_facts import OPERATIONS
from ..runtime.communication.options import (
    BenchOptions,
    DiagnoseOptions,
    LocalityOptions,
    MeasureOptions,
    RankOptions,
    names_in,
    sizes_in,
)
from ..runtime.formatting import counted
from ..runtime.limits import flag_of
from .console import make_console, print_page, print_table, print_text, print_words
from .options import flags_of, make_app, unwrapped
from .running import usage

if TYPE_CHECKING:
    from ..runtime.communication.measured_links import Measurement
    from ..runtime.reports.causes import Check

    BenchFlags = Any
    DiagnoseFlags = Any
    LocalityFlags = Any
    MeasureFlags = Any
    RankFlags = Any
    Json = bool
    Verbose = bool
else:
    BenchFlags = Annotated[flags_of(BenchOptions), Parameter(name="*")]
    DiagnoseFlags = Annotated[flags_of(DiagnoseOptions), Parameter(name="*")]
    LocalityFlags = Annotated[flags_of(LocalityOptions), Parameter(name="*")]
    MeasureFlags = Annotated[flags_of(MeasureOptions), Parameter(name="*")]
    RankFlags = Annotated[flags_of(RankOptions), Parameter(name="*")]
    Json = Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")]
    Verbose = Annotated[
        bool,
        Parameter(name=("--verbose", "-v"), negative=(), help="Show the traceback of an error."),
    ]

_NO_BENCH_FLAGS: Any = flags_of(BenchOptions)()
_NO_DIAGNOSE_FLAGS: Any = flags_of(DiagnoseOptions)()
_NO_LOCALITY_FLAGS: Any = flags_of(LocalityOptions)()
_NO_MEASURE_FLAGS: Any = flags_of(MeasureOptions)()
_NO_RANK_FLAGS: Any = flags_of(RankOptions)()

app = make_app("asyncpipe-comm", "Measure the links between ranks, and explain what they cost.")


@app.command(name="bench")
@unwrapped
def bench_command(
    *,
    flags: BenchFlags = _NO_BENCH_FLAGS,
    ranks: RankFlags = _NO_RANK_FLAGS,
    as_json: Annotated[Json, Parameter(name="--json")] = False,
    verbose: Verbose = False,
) -> int:
    """Time the operations between ranks, with the columns of nccl-tests.

    These are the point-to-point and collective operations of torch.distributed, with tensors and
    with objects, and three of asyncpipe: a ring all-reduce that shows its two phases, and two
    matrix products that the ranks divide.
    """
    from ..runtime.communication.bench_tables import check_results
    from ..runtime.communication.session import run_task

    given = _given(flags)
    for name in {"trace", "events"} & set(given):
        given[name] = str(given[name].absolute())
    options = BenchOptions(**given)
    if options.events and "ring_all_reduce" not in names_in(options.op, OPERATIONS):
        raise usage(
            f"--events writes the events of ring_all_reduce, and --op is {options.op}. "
            "Add ring_all_reduce to --op."
        )
    answer = run_task("bench", asdict(options), RankOptions(**_given(ranks)))
    if answer is None:
        return 0
    if as_json:
        print_text(json.dumps(answer))
    else:
        _print_bench(make_console(), answer)
        for name in ("trace", "events"):
            if file := getattr(flags, name):
                print_text(f"{name}: {file}")
    check_results(answer.get("rows", ()))
    return 0


def _print_bench(console: Console, answer: dict[str, Any]) -> None:
    from ..runtime.communication import bench_tables as tables

    hosts = ", ".join(dict.fromkeys(answer["hosts"]))
    words = f"{answer['ranks']} ranks on {hosts}; torch.distributed over {answer['backend']}, "
    print_words(console, f"{words}messages over {answer['transport']}, on {answer['device']}")
    console.print()
    if "support" in answer:
        print_table(console, tables.support_table(answer["support"]))
        for line in tables.reasons(answer["support"]):
            print_words(console, escape(line))
        return
    print_table(console, tables.time_table(answer["rows"]))
    print_table(console, tables.ring_table(answer["rings"]))
    print_table(console, tables.product_table(answer["products"]))
    for line in tables.reasons(answer["refused"]):
        print_words(console, escape(f"left out: {line}"))
    print_words(console, tables.average_busbw(answer["rows"]))


@app.command(name="diagnose")
@unwrapped
def diagnose_command(
    run: Annotated[
        Path | None, Parameter(help="Folder of a run to diagnose from its records.")
    ] = None,
    /,
    *,
    flags: DiagnoseFlags = _NO_DIAGNOSE_FLAGS,
    ranks: RankFlags = _NO_RANK_FLAGS,
    as_json: Annotated[Json, Parameter(name="--json")] = False,
    verbose: Verbose = False,
) -> int:
    """Say in one sentence why ranks, or a run, are slow, with the cure.

    Without RUN, ranks are started or joined, and each of seven causes is measured on them, in this
    order: a rank alone on a host, threads that share a communicator, MPI without progress, cores
    and memory, the network interface, the folder of the output, other processes. With RUN, its
    records say which part of a step each reason for idle time has.
    """
    from ..runtime.communication.diagnose import checks_of, diagnose_run
    from ..runtime.communication.session import run_task

    given = _given(flags)
    if run is not None:
        _refuse_others(run, {**given, **asdict(ranks)})
        answer = diagnose_run(run)
        title = str(run)
    else:
        if "output" in given:
            given["output"] = str(given["output"])
        answer = run_task(
            "diagnose", asdict(DiagnoseOptions(**given)), RankOptions(**_given(ranks))
        )
        if answer is None:
            return 0
        hosts = ", ".join(dict.fromkeys(answer["hosts"]))
        title = f"{counted(answer['ranks'], 'rank')} on {hosts}; {answer['transport']}"
    if as_json:
        print_text(json.dumps(answer))
    else:
        _print_diagnose(title, checks_of(answer), answer["sentence"])
    return 0


def _refuse_others(run: Path, given: dict[str, Any]) -> None:
    """Raises a usage error for an option of ranks next to a run, whose records are read alone."""
    if names := [name for name, value in given.items() if value is not None]:
        raise usage(
            f"{flag_of(names[0])} applies to ranks that are measured, and {run} is read only. "
            "Give one of them."
        )


def _print_diagnose(title: str, checks: list[Check], sentence: str) -> None:
    from ..runtime.reports.causes import check_table

    console = make_console()
    print_words(console, escape(title))
    console.print()
    print_table(console, check_table(checks))
    print_words(console, escape(sentence))


@app.command(name="locality")
@unwrapped
def locality_command(
    *,
    flags: LocalityFlags = _NO_LOCALITY_FLAGS,
    ranks: RankFlags = _NO_RANK_FLAGS,
    as_json: Annotated[Json, Parameter(name="--json")] = False,
    verbose: Verbose = False,
) -> int:
    """Time the same ranks in several splits over hosts, such as 4-2-2 and 4-3-1.

    The ranks run ring all-reduces, or train a generated model. The result compares each split with
    the prediction of a model of the endpoints, and names the rank that slows a split down.
    """
    from ..runtime.communication.locality import compare_splits

    given = _given(flags)
    for name in {"svg", "model"} & set(given):
        given[name] = str(given[name].absolute())
    options = LocalityOptions(**given)
    result = compare_splits(options, RankOptions(**_given(ranks)))
    if result is None:
        return 0
    if options.svg is not None:
        from ..runtime.communication.locality_result import strip_plot
        from ..runtime.reports.rendering import write_page

        write_page(Path(options.svg), strip_plot(result), "Choose another file with --svg.")
    if as_json:
        print_text(json.dumps(result))
        return 0
    _print_locality(result)
    if flags.svg:
        print_text(f"svg: {flags.svg}")
    return 0


def _print_locality(result: dict[str, Any]) -> None:
    from ..runtime.communication.locality_result import STUDY, result_table, title_of

    console = make_console()
    print_words(console, title_of(result))
    console.print()
    print_table(console, result_table(result))
    print_words(console, result["verdict"])
    if any(row["published"] for row in result["rows"]):
        print_words(console, f"published: {STUDY}")


@app.command(name="measure")
@unwrapped
def measure_command(
    *,
    flags: MeasureFlags = _NO_MEASURE_FLAGS,
    ranks: RankFlags = _NO_RANK_FLAGS,
    as_json: Annotated[Json, Parameter(name="--json")] = False,
    verbose: Verbose = False,
) -> int:
    """Measure the latency and bandwidth between any two ranks, and the speed of each rank.

    One pair of ranks communicates at a time, in each direction and in both at once. With --output,
    the result is a file of devices and links to plan for: asyncpipe-partition --devices FILE.
    """
    from ..runtime.communication.measured_links import link_map, measurement_of
    from ..runtime.communication.session import run_task
    from ..runtime.reports.rendering import write_page

    given = _given(flags)
    sizes = sizes_in(MeasureOptions(**given).sizes)
    answer = run_task("measure", {"sizes": sizes}, RankOptions(**_given(ranks)))
    if answer is None:
        return 0
    measured = measurement_of(answer)
    files = {}
    if "output" in given:
        files[Path(given["output"])] = measured.to_toml()
    if "svg" in given:
        files[Path(given["svg"])] = link_map(measured)
    for file, content in files.items():
        write_page(file, content)
    if as_json:
        print_text(json.dumps(answer))
    else:
        _print_measure(make_console(), measured, files)
    return 0


def _print_measure(console: Console, measured: Measurement, files: dict[Path, str]) -> None:
    console.print(f"{counted(len(measured.ranks), 'rank')} · {measured.transport}\n")
    for heading, table in measured.tables.items():
        console.print(f"[bold]{escape(heading)}[/]", soft_wrap=True)
        print_table(console, table)
    for file in files:
        print_page(console, file)


def _given(flags: Any) -> dict[str, Any]:
    """The options that the command line has."""
    return {name: value for name, value in asdict(flags).items() if value is not None}
