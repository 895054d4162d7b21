"""asyncpipe-comm locality: times the same ranks in several splits over hosts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..runtime.communication.options import LocalityOptions
from .comm_ranks import NO_FLAGS, Json, RankFlags, Verbose, rank_options
from .console import make_console, print_table, print_text, print_words
from .options import flags_of, unwrapped

if TYPE_CHECKING:
    LocalityFlags = Any
else:
    LocalityFlags = Annotated[flags_of(LocalityOptions), Parameter(name="*")]

_NO_LOCALITY_FLAGS: Any = flags_of(LocalityOptions)()


@unwrapped
def locality_command(
    *,
    flags: LocalityFlags = _NO_LOCALITY_FLAGS,
    ranks: RankFlags = NO_FLAGS,
    as_json: Annotated[Json, Parameter(name="--json")] = False,
    verbose: Verbose = False,
) -> int:
    """Time the same ranks in several splits over hosts, such as 4-2-2 and 4-3-1.

    The ranks run ring all-reduces, or train a generated model. The result compares each split with
    the prediction of a model of the endpoints, and names the rank that slows a split down.
    """
    from ..runtime.communication.locality import compare_splits

    given = {name: value for name, value in asdict(flags).items() if value is not None}
    for name in {"svg", "model"} & set(given):
        given[name] = str(given[name].absolute())
    options = LocalityOptions(**given)
    result = compare_splits(options, rank_options(ranks))
    if result is None:
        return 0
    if options.svg is not None:
        from pathlib import Path

        from ..runtime.communication.strip_plot import strip_plot
        from ..runtime.reports.rendering import write_page

        write_page(Path(options.svg), strip_plot(result), "Choose another file with --svg.")
    if as_json:
        print_text(json.dumps(result))
        return 0
    _print(result)
    if flags.svg:
        print_text(f"svg: {flags.svg}")
    return 0


def _print(result: dict[str, Any]) -> None:
    from ..runtime.communication.locality_result import STUDY, result_table
    from ..runtime.communication.strip_plot import title_of

    console = make_console()
    print_words(console, title_of(result))
    console.print()
    print_table(console, result_table(result))
    print_words(console, result["verdict"])
    if any(row["published"] for row in result["rows"]):
        print_words(console, f"published: {STUDY}")
