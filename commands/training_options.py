"""The declared options of `Settings` -> options of asyncpipe-train and asyncpipe-compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from ..runtime.config.settings import Settings
from ..runtime.limits import Choice
from ..runtime.options import Option, options_of
from .options import flag_type


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """Options of `Settings` as a command line gives them; None means not given."""

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def _given_options(name: str, is_chosen: Callable[[Option], bool]) -> type[GivenOptions]:
    """A class of the chosen options, as cyclopts reads them."""
    hints = get_type_hints(Settings)
    options = []
    for own, option in options_of(Settings).items():
        if own == "folder" or not is_chosen(option):  # the folder is no flag
            continue
        limit = option.limit
        kind: Any = Literal[limit.names] if isinstance(limit, Choice) else hints[own]
        options.append((own, flag_type(own, option, kind), field(default=None)))
    flags = make_dataclass(name, options, bases=(GivenOptions,), frozen=True, kw_only=True)
    flags.__module__ = __name__  # cyclopts resolves the annotations there
    return flags


if TYPE_CHECKING:
    TrainOptions = GivenOptions
    ComparedOptions = GivenOptions
else:
    TrainOptions = _given_options("TrainOptions", lambda option: True)
    ComparedOptions = _given_options("ComparedOptions", lambda option: option.compared)
