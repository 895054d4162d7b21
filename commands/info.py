"""asyncpipe-info: shows versions, hardware and backends, and what a run uses of them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..runtime.limits import Whole
from .console import make_console
from .options import limited, make_app, unwrapped

app = make_app(
    "asyncpipe-info",
    "Show versions, backends, devices and links, and which of them a run here would use.",
)


@app.default
@unwrapped
def info_command(
    *,
    ranks: Annotated[int | None, limited(Whole(1, 2**16, 4), "ranks")] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Show versions, backends, devices and links, and which of them a run here would use.

    Parameters
    ----------
    ranks
        Number of ranks to describe. [default: one per GPU, otherwise 2]
    json
        Print the result as JSON.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.launch.info import describe
    from .console import print_info

    print_info(make_console(), describe(ranks), as_json=json)
    return 0
