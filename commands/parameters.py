"""How an option is declared to cyclopts: its group, its help, and the limit that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from cyclopts import Group, Parameter, Token

from ..runtime.limits import Flag, Limit, Several, refusal
from .running import usage

T = TypeVar("T")


def option(group: Group, help: str, *names: str) -> Parameter:
    return Parameter(name=names or None, help=help, group=group, negative=())


def flag(group: Group, help: str, *names: str) -> Parameter:
    return Parameter(name=names or None, help=help, group=group, negative=(), show_default=False)


@dataclass(frozen=True)
class Reader:
    """Reads the option `name` by its limit: what cyclopts calls with the words that were given."""

    limit: Limit
    name: str

    def __call__(self, kind: Any, tokens: Sequence[Token]) -> Any:
        is_list = isinstance(self.limit, Several)
        item = self.limit.item if isinstance(self.limit, Several) else self.limit
        values: list[Any] = [item.read(token.value) for token in tokens]
        name = self.name if tokens[0].keyword else self.name.upper()
        if fault := refusal(self.limit, name, values if is_list else values[0]):
            raise usage(" ".join(fault))
        if Path in (kind, *get_args(kind)):
            values = list(map(Path, values))
        return values if is_list else values[0]


def limited(limit: Limit, name: str) -> Parameter:
    """The parameter that is read by a limit. cyclopts alone would take `2.5` for 2, and `none` for
    an option that was not given. It reads flags, which have no value."""
    reader = None if isinstance(limit, Flag) else Reader(limit, name)
    return Parameter(converter=reader, negative=(), json_list=False)


def with_limits(limits: Mapping[str, Limit]) -> Callable[[type[T]], type[T]]:
    """Lets each option of a class be read by the limit of its name. Raises KeyError where an option
    has none."""

    def declare(options: type[T]) -> type[T]:
        hints = get_type_hints(options, include_extras=True)
        options.__annotations__ = {
            name: Annotated[hint, limited(limits[name], name)] for name, hint in hints.items()
        }
        return options

    return declare
