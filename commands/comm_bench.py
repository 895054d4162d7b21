"""asyncpipe-comm bench: times every operation between ranks, and shows what a backend supports."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from ..runtime.communication.operation_facts import OPERATIONS
from ..runtime.communication.options import BenchOptions, names_in
from .comm_ranks import NO_FLAGS, Json, RankFlags, Verbose, rank_options
from .console import make_console, print_table, print_text, print_words
from .options import flags_of, unwrapped
from .running import usage

if TYPE_CHECKING:
    BenchFlags = Any
else:
    BenchFlags = Annotated[flags_of(BenchOptions), Parameter(name="*")]

_NO_BENCH_FLAGS: Any = flags_of(BenchOptions)()


@unwrapped
def bench_command(
    *,
    flags: BenchFlags = _NO_BENCH_FLAGS,
    ranks: RankFlags = NO_FLAGS,
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

    given = {name: value for name, value in asdict(flags).items() if value is not None}
    for name in {"trace", "events"} & set(given):
        given[name] = str(given[name].absolute())
    options = BenchOptions(**given)
    if options.events and "ring_all_reduce" not in names_in(options.op, OPERATIONS):
        raise usage(
            f"--events writes the events of ring_all_reduce, and --op is {options.op}. "
            "Add ring_all_reduce to --op."
        )
    answer = run_task("bench", asdict(options), rank_options(ranks))
    if answer is None:
        return 0
    if as_json:
        print_text(json.dumps(answer))
    else:
        _print(make_console(), answer)
        for name in ("trace", "events"):
            if file := getattr(flags, name):
                print_text(f"{name}: {file}")
    check_results(answer.get("rows", ()))
    return 0


def _print(console: Console, answer: dict[str, Any]) -> None:
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
