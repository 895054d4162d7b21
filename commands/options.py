"""Declared options -> cyclopts: how each is shown in --help and read from the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from inspect import cleandoc
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    get_type_hints,
)

from cyclopts import App, Group, Parameter, Token

from ..partitioner.planning.options import (
    DEVICES,
    GROUPS,
    MODEL,
    PartitionOptions,
)
from ..runtime import __version__
from ..runtime.config.learning_options import PANELS
from ..runtime.limits import (
    Choice,
    Flag,
    Limit,
    ListOf,
    Number,
    Text,
    Whole,
    flag_of,
    path,
    refusal,
)
from ..runtime.options import Option, default_in_words, options_of
from ..runtime.options import option as declare
from .running import usage

P = ParamSpec("P")
T = TypeVar("T")


def make_app(name: str, help: str, *, usage: str | None = None) -> App:
    """A command. Its help is plain text, so that `<name>` and `*` are shown as they are written."""
    return App(
        name=name,
        version=__version__,
        help=help,
        usage=usage,
        help_format="plaintext",
        default_parameter=Parameter(negative=(), show_default=False),
    )


def option(group: Group, help: str, *names: str, **more: Any) -> Parameter:
    """An option of one command alone, with its default in the help."""
    default = False if "[default" in help else default_in_words
    return Parameter(
        name=names or None, help=help, group=group, show_default=default, negative=(), **more
    )


def unwrapped(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose docstring has each paragraph in one line, as plain-text help shows it."""
    lines: list[str] = []
    for line in cleandoc(command.__doc__ or "").splitlines():
        indent = len(line) - len(line.lstrip())
        before = lines[-1] if lines else ""
        is_next = before.strip() and line.strip() and indent == len(before) - len(before.lstrip())
        if is_next and not before.startswith("--") and not line.startswith("--"):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    command.__doc__ = "\n".join(lines)
    return command


@dataclass(frozen=True)
class Reader:
    """Reads the option `name` by its limit: what cyclopts calls with the words that were given."""

    limit: Limit
    name: str

    def __call__(self, kind: Any, tokens: Sequence[Token]) -> Any:
        is_list = isinstance(self.limit, ListOf)
        item = self.limit.item if isinstance(self.limit, ListOf) else self.limit
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


PRINTING = "Printing"
COMPARED, SEVERAL = "Methods to compare", "Several runs"
PANEL = {
    name: Group.create_ordered(name) for name in (COMPARED, *GROUPS, PRINTING, *PANELS, SEVERAL)
}
"""The headings in --help, in their order."""


def flag_type(name: str, declared: Option, kind: Any) -> Any:
    """The type of a flag with how cyclopts shows and reads it. None means not given."""
    group: dict[str, Any] = {"group": PANEL[declared.group]} if declared.group else {}
    shown = Parameter(
        name=(flag_of(name), *filter(None, [declared.short])),
        help=declared.help + declared.shown_default,
        show_default=False,
        **group,
    )
    return Annotated[kind, shown, limited(declared.limit, name)]


def _kind(limit: Limit) -> Any:
    """The type of the words that a limit reads."""
    match limit:
        case Choice(names):
            return Literal[names]
        case Flag():
            return bool
        case Whole():
            return int
        case Number():
            return float
        case ListOf():
            return list[str]
    return Path if limit.words == path("").words else str


def flags_of(kind: type[Any]) -> type[Any]:
    """A dataclass of the flags of `kind`, whose fields are declared by `declare`, for cyclopts."""
    entries = []
    for own, declared in options_of(kind).items():
        name = declared.flag or own
        shown = flag_type(name, declared, _kind(declared.limit))
        entries.append((name, shown, field(default=None)))
    flags = make_dataclass(f"{kind.__name__}Flags", entries, frozen=True, kw_only=True)
    flags.__module__ = __name__  # cyclopts resolves the annotations there
    return flags


def _on_command_line(kind: type[T]) -> type[T]:
    """Makes a class whose fields are declared by `declare` one that cyclopts reads."""
    for name, declared in options_of(kind).items():
        kind.__annotations__[name] = flag_type(name, declared, _kind(declared.limit))
    return kind


if TYPE_CHECKING:
    PartitionFlags = Any
else:
    PartitionFlags = flags_of(PartitionOptions)
    """The flags of `PartitionOptions`."""


@_on_command_line
@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of asyncpipe-partition itself, which the Python functions lack."""

    model: str | None = declare(
        None,
        Text("the name of a model, a folder or MODULE:FACTORY", "gpt2"),
        "Model to partition: a Transformers configuration by name (gpt2, bert-base-uncased, "
        "t5-small, vit-base, llama-7b, ..), a built-in model (mlp, resnet50, ..), a local "
        "Transformers folder or Hub id, or a factory given as package.module:function or "
        "file.py:function.",
        group=MODEL,
    )
    graph: Path | None = declare(
        None,
        path("graph.json"),
        "Cost graph to partition instead of a model. Formats: asyncpipe JSON, dnn-partitioning "
        "JSON, PipeDream graph.txt.",
        group=MODEL,
    )
    hosts: str | None = declare(
        None,
        Text("a list of hosts and numbers of ranks", "h1:4,h2:2"),
        "Homogeneous cluster in short form, in place of --devices: h1:4,h2:2 means 4 ranks on h1 "
        "and 2 on h2.",
        group=DEVICES,
    )
    json: bool = declare(
        False, Flag(), "Print the plan (or the graph, with --stop-after) as JSON.", group=PRINTING
    )
    quiet: bool = declare(
        False, Flag(), "Print only the path of the output folder.", group=PRINTING, short="-q"
    )
    verbose: bool = declare(
        False, Flag(), "Show the traceback of an error.", group=PRINTING, short="-v"
    )
