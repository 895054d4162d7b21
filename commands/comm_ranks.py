"""The options that all subcommands of asyncpipe-comm share, as the command line gives them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..runtime.communication.options import RankOptions
from .options import flags_of

if TYPE_CHECKING:
    RankFlags = Any
    Json = bool
    Verbose = bool
else:
    RankFlags = Annotated[flags_of(RankOptions), Parameter(name="*")]
    """The flags of `RankOptions`."""
    Json = Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")]
    Verbose = Annotated[
        bool,
        Parameter(name=("--verbose", "-v"), negative=(), help="Show the traceback of an error."),
    ]

NO_FLAGS: Any = flags_of(RankOptions)()
"""The flags of a command line without any."""


def rank_options(flags: Any) -> RankOptions:
    """The ranks that the command line describes."""
    given = {name: value for name, value in asdict(flags).items() if value is not None}
    return RankOptions(**given)
