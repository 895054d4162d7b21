"""asyncpipe-comm measure: the links between ranks and the speed of each, as a file of devices."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from ..runtime.communication.options import MeasureOptions, sizes_in
from ..runtime.formatting import counted
from .comm_ranks import NO_FLAGS, Json, RankFlags, Verbose, rank_options
from .console import make_console, print_page, print_table, print_text
from .options import flags_of, unwrapped

if TYPE_CHECKING:
    from ..runtime.communication.measured_links import Measurement

    MeasureFlags = Any
else:
    MeasureFlags = Annotated[flags_of(MeasureOptions), Parameter(name="*")]

_NO_MEASURE_FLAGS: Any = flags_of(MeasureOptions)()


@unwrapped
def measure_command(
    *,
    flags: MeasureFlags = _NO_MEASURE_FLAGS,
    ranks: RankFlags = NO_FLAGS,
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

    given = {name: value for name, value in asdict(flags).items() if value is not None}
    sizes = sizes_in(MeasureOptions(**given).sizes)
    answer = run_task("measure", {"sizes": sizes}, rank_options(ranks))
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
        _print(make_console(), measured, files)
    return 0


def _print(console: Console, measured: Measurement, files: dict[Path, str]) -> None:
    console.print(f"{counted(len(measured.ranks), 'rank')} · {measured.transport}\n")
    for heading, table in measured.tables.items():
        console.print(f"[bold]{escape(heading)}[/]", soft_wrap=True)
        print_table(console, table)
    for file in files:
        print_page(console, file)
