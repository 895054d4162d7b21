"""asyncpipe-view: serves a page on loopback that follows runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..runtime.limits import ListOf, Whole, path
from .console import make_console, print_text
from .options import limited, make_app, unwrapped

app = make_app("asyncpipe-view", "Follow runs in a browser, also after their end.")
_RUNS = ListOf(path("runs/gpt2_4p/1"))


@app.default
@unwrapped
def view_command(
    folders: Annotated[list[Path], Parameter(consume_multiple=True), limited(_RUNS, "folders")],
    /,
    *,
    port: Annotated[int | None, limited(Whole(1, 2**16 - 1, 8000), "port")] = None,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Follow a run in a browser, or compare several, also after their end.

    Prints the address of a page on the loopback interface of this machine and serves it until
    Ctrl-C. The page only reads the folders of the runs.

    Parameters
    ----------
    folders
        Folders of runs, such as runs/gpt2_4p/1.
    port
        Port of the page. [default: a free one]
    verbose
        Show the traceback of an error.
    """
    from ..runtime.watch.server import Viewer, address_of, check_runs, make_token, open_socket

    check_runs(folders)
    token = make_token()
    listening = open_socket(port or 0)
    print_text(address_of(listening, token))
    make_console().print("[dim]Press Ctrl-C to stop serving; runs continue.[/]")
    try:
        Viewer(folders, listening, token).serve()
    except KeyboardInterrupt:
        return 0
    return 0
