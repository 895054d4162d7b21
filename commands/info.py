"""asyncpipe-info: what is here, and what a run would use of it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from .. import __version__
from ..runtime.limits import Whole
from ..terminal import make_console
from .parameters import limited

app = App(
    name="asyncpipe-info",
    version=__version__,
    help="Show versions, backends, devices and links, and what a run here would use of them.",
)


@app.default
def info_command(
    *,
    ranks: Annotated[int | None, limited(Whole(1, 2**16, 4), "ranks")] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Show versions, backends, devices and links, and what a run here would use of them.

    Parameters
    ----------
    ranks
        Of the run; by default one a GPU, or two.
    json
        Print it as JSON.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.info.describe import describe
    from ..terminal_report import print_info

    print_info(make_console(), describe(ranks), as_json=json)
    return 0
