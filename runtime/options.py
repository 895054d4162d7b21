"""The declaration of an option: a field of a dataclass with its legal values, help and rules.

    steps: int = option(100, Whole(0, 10**12, 100), "Optimizer steps to train for")

The command line, TOML files, Python, sweeps, comparisons, checkpoints and batch scripts read the
declarations (`options_of`) of a run (`runtime/config`) and of a partition
(`partitioner/planning/options.py`); none keeps a list of names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from .limits import Limit

Runs = Literal["all", "asynchronous", "some optimizers"]
"""The runs to which an option applies; "some optimizers": those whose facts name the option."""

Scope = Literal["run", "call and job", "call"]
"""How long an option is in force.

run             the whole run: it is written to config.toml, and a sweep may vary it
call and job    this call, and the Slurm job that repeats it
call            this call alone
"""

OnResume = Literal["reported", "ignored"]
"""The reaction to a resumed run that changes the value: a printed line, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of one option."""

    limit: Limit
    """The legal values; reads a value from text."""
    help: str
    """The phrase in --help."""
    default: Any
    """The value of an option that is not given; MISSING for a required one."""
    flag: str = ""
    """The flag without its dashes, if it differs from the name."""
    short: str = ""
    """A second flag of one letter."""
    group: str = ""
    """The heading in --help."""
    is_words: bool = False
    """The command line accepts words that are parsed further; `limit` applies to these."""
    read_by: frozenset[str] = frozenset()
    """The calls that read an option of a partition."""
    applies_to: Runs = "all"
    """The runs that have an option of a run; others refuse it."""
    scope: Scope = "run"
    """How long it is in force."""
    on_resume: OnResume = "reported"
    """The reaction to a resumed run that changes it."""
    changes_losses: bool = True
    """The losses of a run depend on it, so comparisons repeat runs that differ in it."""
    compared: bool = False
    """asyncpipe-compare has it, with one value for all runs."""
    of_method: bool = False
    """A method of asyncpipe-compare may set it for its own runs."""
    names_code: bool = False
    """Its value may name Python code, which runs only if a command line or --trust allows it."""

    @property
    def optional(self) -> bool:
        """True if the value may be None: chosen for the plan or the model at hand."""
        return self.default is None

    @property
    def shown_default(self) -> str:
        """The default as the end of the help; "" for a flag, and where the help states how it is
        chosen."""
        is_stated = "[default" in self.help or "(default" in self.help
        if isinstance(self.default, bool) or is_stated or self.default is MISSING:
            return ""
        return f" [default: {default_in_words(self.default)}]"


def default_in_words(value: Any) -> str:
    """A default as one types it.

    >>> [default_in_words(value) for value in (None, 300.0, (0.9, 0.999), ["sync", "stash"], ())]
    ['none', '300', '0.9 0.999', 'sync stash', 'none']
    """
    values = value if isinstance(value, list | tuple) else () if value is None else (value,)
    words = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return " ".join(words) or "none"


_KEY = "option"


def option(
    default: Any,
    limit: Limit,
    help: str,
    *,
    scope: Scope = "run",
    on_resume: OnResume = "reported",
    changes_losses: bool | None = None,
    **more: Any,
) -> Any:
    """A field of a dataclass that declares an option; see `Option` for the arguments.

    An option of one call is ignored on resume. An option that is ignored on resume leaves losses
    unchanged unless `changes_losses` is True.
    """
    if scope != "run":
        on_resume = "ignored"
    declared = Option(
        limit=limit,
        help=help,
        default=default,
        scope=scope,
        on_resume=on_resume,
        changes_losses=on_resume == "reported" if changes_losses is None else changes_losses,
        **more,
    )
    return field(default=default, metadata={_KEY: declared})


def required(limit: Limit, help: str, *, on_resume: OnResume = "reported") -> dict[str, Option]:
    """The metadata of a field without a default: `field(metadata=required(...))`."""
    declared = Option(
        limit=limit,
        help=help,
        default=MISSING,
        on_resume=on_resume,
        changes_losses=on_resume == "reported",
    )
    return {_KEY: declared}


def same_option(kind: type[Any], name: str) -> Any:
    """A field with the declaration of an option of another dataclass."""
    declared = options_of(kind)[name]
    return field(default=declared.default, metadata={_KEY: declared})


def options_of(kind: type[Any]) -> Mapping[str, Option]:
    """The declared option of each field of a dataclass, by name and in order.

    Raises TypeError for a field that declares none.
    """
    for entry in fields(kind):
        if _KEY not in entry.metadata:
            raise TypeError(f"{kind.__name__}.{entry.name} declares no option (runtime/options.py)")
    return MappingProxyType({entry.name: entry.metadata[_KEY] for entry in fields(kind)})
