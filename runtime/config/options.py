"""The declaration of an option: a field of a dataclass with its legal values, help and rules.

    steps: int = option(100, Whole(0, 10**12, 100), "Optimizer steps to train for")

The command line, TOML files, Python, sweeps, comparisons, checkpoints and batch scripts read the
declarations (`options_of`); none keeps a list of names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from ..limits import Limit

Runs = Literal["all", "asynchronous", "some optimizers"]
"""The runs to which an option applies; "some optimizers": those whose facts name the option."""

Scope = Literal["run", "call and job", "call"]
"""How long an option is in force.

run             the whole run: it is written to config.toml, and a sweep may vary it
call and job    this call, and the Slurm job that repeats it
call            this call alone
"""

OnResume = Literal["reported", "ignored"]
"""What happens when a resumed run changes the value: it is printed, or nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of one option."""

    limit: Limit
    """The legal values; reads a value from text."""
    help: str
    """The phrase in --help."""
    default: Any
    """The value of an option that is not given; MISSING for a required one."""
    optional: bool = False
    """The value may be None: chosen for the plan at hand (`resolve.py`)."""
    applies_to: Runs = "all"
    """The runs that have the option; others refuse it."""
    scope: Scope = "run"
    """How long it is in force."""
    on_resume: OnResume = "reported"
    """What happens when a resumed run changes it."""
    changes_losses: bool = True
    """The losses of a run depend on it, so comparisons repeat runs that differ in it."""
    compared: bool = False
    """asyncpipe-compare has it, with one value for all runs."""
    of_method: bool = False
    """A method of asyncpipe-compare may set it for its own runs."""
    names_code: bool = False
    """Its value may name Python code, which runs only if a command line or --trust allows it."""
    short: str = ""
    """A second flag of one letter."""

    @property
    def shown_default(self) -> str:
        """The default as the end of the help; "" where the help states how it is chosen."""
        is_plain = self.default not in (None, False, MISSING)
        return f" [default: {self.default}]" if is_plain else ""


_KEY = "option"


def option(
    default: Any,
    limit: Limit,
    help: str,
    *,
    applies_to: Runs = "all",
    scope: Scope = "run",
    on_resume: OnResume = "reported",
    changes_losses: bool | None = None,
    compared: bool = False,
    of_method: bool = False,
    names_code: bool = False,
    short: str = "",
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
        applies_to=applies_to,
        scope=scope,
        on_resume=on_resume,
        changes_losses=on_resume == "reported" if changes_losses is None else changes_losses,
        compared=compared,
        of_method=of_method,
        names_code=names_code,
        short=short,
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


@cache
def options_of(kind: type[Any]) -> Mapping[str, Option]:
    """The declared option of each field of a dataclass, by name and in order.

    Raises TypeError for a field that declares none.
    """
    declared = {}
    hints = get_type_hints(kind)
    for each in fields(kind):
        if _KEY not in each.metadata:
            raise TypeError(f"{kind.__name__}.{each.name} declares no option (config/options.py)")
        optional = NoneType in get_args(hints[each.name])
        declared[each.name] = replace(each.metadata[_KEY], optional=optional)
    return declared
