"""asyncpipe-compare: runs that differ in what is done about stale weights, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from .. import __version__
from ..runtime.limits import Choice, Several, Text, limits_of, path
from ..runtime.training.settings import OPTIMIZERS, Settings
from ..terminal import make_console
from .parameters import limited, with_limits
from .training_options import ComparedOptions, given

app = App(
    name="asyncpipe-compare",
    version=__version__,
    help="Compare ways to train on stale weights: losses, and simulated times.",
)
_COMPARE = Group.create_ordered("What to compare")


def _several(help: str) -> Parameter:
    return Parameter(help=help, group=_COMPARE, negative=(), consume_multiple=1)


@with_limits(
    {
        "methods": Several(Text("a method", "stash")),
        "optimizers": Several(Choice(OPTIMIZERS)),
        "lr": Several(limits_of(Settings)["lr"].limit),
        "seeds": Several(limits_of(Settings)["seed"].limit),
    }
)
@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is varied from run to run of asyncpipe-compare."""

    methods: Annotated[
        list[str],
        _several(
            "sync, or a --staleness such as none or stash; with an optimizer of its own "
            "(stash:muon) and options (stash:adamw,lr=0.001,sync-start=0.1)."
        ),
    ] = field(default_factory=lambda: ["sync", "stash", "none"])
    optimizers: Annotated[
        list[str] | None, _several("For the methods that name none; by default asyncpipe-train's.")
    ] = None
    lr: Annotated[list[float] | None, _several("Learning rates to try each method with.")] = None
    seeds: Annotated[list[int], _several("Of the data order and of dropout.")] = field(
        default_factory=lambda: [1]
    )


_NO_VARIED, _NO_OPTIONS = CompareOptions(), ComparedOptions()


@app.default
def compare_command(
    folder: Annotated[Path, limited(path("generated_models/gpt2_4p"), "folder")],
    /,
    *,
    varied: Annotated[CompareOptions, Parameter(name="*")] = _NO_VARIED,
    options: Annotated[ComparedOptions, Parameter(name="*")] = _NO_OPTIONS,
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False,
) -> int:
    """Compare ways to train on stale weights: losses, and simulated times.

    All stages are trained in this process, with the weight versions that asynchronous 1f1b gives
    them; the time that a rank a stage would take is simulated. Runs that were made before are not
    repeated.

    Parameters
    ----------
    folder
        A generated folder, such as generated_models/gpt2_4p.
    verbose
        Show the traceback of an error.
    """
    from ..runtime.comparison.compare import compare
    from ..terminal_compare import print_comparison, print_run

    settings = Settings(**given(options), folder=str(folder))
    console = make_console(quiet=settings.quiet)
    comparison = compare(
        settings,
        varied.methods,
        optimizers=varied.optimizers or (),
        lrs=varied.lr or (),
        seeds=varied.seeds,
        on_run=lambda run, number, of: print_run(
            console, run, number, of, as_json=bool(settings.json)
        ),
    )
    if not settings.json:
        print_comparison(console, comparison)
    return 0
