"""asyncpipe-comm diagnose: why ranks, or a run, are slow, in one sentence."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from ..runtime.communication.options import DiagnoseOptions
from ..runtime.formatting import counted
from ..runtime.limits import flag_of
from .comm_ranks import NO_FLAGS, Json, RankFlags, Verbose, rank_options
from .console import make_console, print_table, print_text, print_words
from .options import flags_of, unwrapped
from .running import usage

if TYPE_CHECKING:
    from ..runtime.reports.causes import Check

    DiagnoseFlags = Any
else:
    DiagnoseFlags = Annotated[flags_of(DiagnoseOptions), Parameter(name="*")]

_NO_DIAGNOSE_FLAGS: Any = flags_of(DiagnoseOptions)()


@unwrapped
def diagnose_command(
    run: Annotated[
        Path | None, Parameter(help="Folder of a run to diagnose from its records.")
    ] = None,
    /,
    *,
    flags: DiagnoseFlags = _NO_DIAGNOSE_FLAGS,
    ranks: RankFlags = NO_FLAGS,
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

    given = {name: value for name, value in asdict(flags).items() if value is not None}
    if run is not None:
        _refuse_others(run, {**given, **asdict(ranks)})
        answer = diagnose_run(run)
        title = str(run)
    else:
        if "output" in given:
            given["output"] = str(given["output"])
        answer = run_task("diagnose", asdict(DiagnoseOptions(**given)), rank_options(ranks))
        if answer is None:
            return 0
        hosts = ", ".join(dict.fromkeys(answer["hosts"]))
        title = f"{counted(answer['ranks'], 'rank')} on {hosts}; {answer['transport']}"
    if as_json:
        print_text(json.dumps(answer))
    else:
        _print(title, checks_of(answer), answer["sentence"])
    return 0


def _refuse_others(run: Path, given: dict[str, Any]) -> None:
    """Raises a usage error for an option of ranks next to a run, whose records are read alone."""
    if names := [name for name, value in given.items() if value is not None]:
        raise usage(
            f"{flag_of(names[0])} applies to ranks that are measured, and {run} is read only. "
            "Give one of them."
        )


def _print(title: str, checks: list[Check], sentence: str) -> None:
    from ..runtime.reports.causes import check_table

    console = make_console()
    print_words(console, escape(title))
    console.print()
    print_table(console, check_table(checks))
    print_words(console, escape(sentence))
