"""Options of a run that name code, and whether the user has said so or only a file.

What stands on a command line is meant to be run. A file of options may be anyone's: that of
`--config`, or of the run, folder or URL that `--resume` names. So code that it names is data until
a command line has named it too, or `--trust` was given. A run that begins leaves a mark for each,
and the file that repeats it can be used from then on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..trust import TrustError, is_known_code, is_trusted, remember_code
from ..user_code import names_object
from .settings import Settings

_NAMING = ("criterion", "data", "log")


def check_code(options: Mapping[str, Any], typed: Container[str], files: str) -> None:
    """Raises TrustError where an option that was not `typed` names code which is not known here;
    `files` are the flags that brought such options. An option of a sweep has all its values."""
    if options.get("trust"):
        return
    strange = [
        (option, spec)
        for option, spec in code_of(options)
        if option not in typed and not is_known_code(spec)
    ]
    if not strange:
        return
    flags = ", ".join(f"--{option} {spec}" for option, spec in strange)
    of_stages = ""
    if not is_trusted(folder := str(options.get("folder", ""))):
        of_stages = f" --trust is also for the stages of {folder}, which were not made here."
    raise TrustError(
        f"{files} would run code that no command line here has named: {flags}.",
        f"Read it. Trust it from then on: --trust, or {flags}.{of_stages}",
    )


def remember_code_of(settings: Settings) -> None:
    """What a run that begins names is known from now on, as far as that can be noted."""
    for _, spec in code_of(asdict(settings)):
        remember_code(spec)


def is_all_known(options: Mapping[str, Any]) -> bool:
    """Whether options may come from a file without `--trust`."""
    return is_trusted(str(options.get("folder", ""))) and all(
        is_known_code(spec) for _, spec in code_of(options)
    )


def code_of(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each option that names code, and what it names."""
    for option in _NAMING:
        value = options.get(option)
        for text in value if isinstance(value, tuple) else (value,):
            specs = map(str.strip, str(text).split(",")) if option == "log" else [str(text)]
            yield from ((option, spec) for spec in specs if names_object(spec))
