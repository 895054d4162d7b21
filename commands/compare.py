"""asyncpipe-compare: trains with several staleness methods and compares the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..runtime.config.learning_options import LOGGING
from ..runtime.config.settings import Settings
from ..runtime.limits import Choice, ListOf, Text, path
from ..runtime.optimizers.facts import OPTIMIZERS
from ..runtime.options import options_of
from ..runtime.process import first_imports
from .console import make_console
from .options import COMPARED, PANEL, limited, make_app, option, with_limits
from .training_options import ComparedOptions

app = make_app(
    "asyncpipe-compare", "Compare losses and predicted times of training with stale weights."
)


def _several(help: str) -> Parameter:
    return option(PANEL[COMPARED], help, consume_multiple=1)


@with_limits(
    {
        "methods": ListOf(Text("a method", "stash")),
        "optimizers": ListOf(Choice(tuple(OPTIMIZERS))),
        "lr": ListOf(options_of(Settings)["lr"].limit),
        "seeds": ListOf(options_of(Settings)["seed"].limit),
    }
)
@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options that differ between the runs of a comparison."""

    methods: Annotated[
        list[str],
        _several(
            "Methods to compare: sync, or a --staleness such as none or stash, optionally with its "
            "own optimizer (stash:muon) and options (stash:adamw,lr=0.001,sync-start=10%)."
        ),
    ] = field(default_factory=lambda: ["sync", "stash", "none"])
    optimizers: Annotated[
        list[str] | None,
        _several("Optimizers for methods that name none. [default: that of asyncpipe-train]"),
    ] = None
    lr: Annotated[
        list[float] | None,
        _several("Learning rates to sweep for each method. [default: that of asyncpipe-train]"),
    ] = None
    seeds: Annotated[list[int], _several("Random seeds for data order and dropout.")] = field(
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
    verbose: Annotated[
        bool, Parameter(name=("--verbose", "-v"), negative=(), group=PANEL[LOGGING])
    ] = False,
) -> int:
    """Compare losses and predicted times of training with stale weights.

    Trains all stages in this process with the weight versions of asynchronous 1f1b, and simulates
    the time with one rank for each stage. Finished runs are not repeated.

    Parameters
    ----------
    folder
        Generated folder, such as generated_models/gpt2_4p.
    verbose
        Show the traceback of an error.
    """
    with first_imports():
        from ..runtime.experiments.compare import compare
    from .console import print_comparison, print_run

    settings = Settings(**options.given(), folder=str(folder))
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
