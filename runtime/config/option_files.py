"""Options from TOML files and mappings -> Settings, and the code that such options name.

A command line is meant to be run, but a file of options may be anyone's: that of `--config`, or of
the run, folder or URL that `--resume` names. So code that a file names is refused until a command
line has named it too, or `--trust` was given. A run that begins leaves a mark for each name, and
the file that repeats the run works from then on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..known_names import TRAIN
from ..limits import ListOf, Number, flag_of, refusal
from ..options import options_of
from ..plan.trust import TrustError, is_known_code, is_trusted, remember_code
from ..serialization import Origin, parse_toml, read_text
from ..user_code import names_object
from .settings import Settings, SettingsError

TO_BE_GIVEN = "???"
"""A TOML value that a flag must replace."""

SWEEP = "sweep"
"""The table of a TOML file with lists of values (`runtime/experiments/variants.py`)."""


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads options from a TOML file and checks the name and type of each.

    The file's own options replace those of the files that it names as its `base`. A value of
    `"???"` is required from a flag. Raises SettingsError for a missing or damaged file, an unknown
    option or a wrong type.
    """
    options: dict[str, Any] = {}
    for file, content in read_layers(path):
        own = {
            name: checked(name, value, str(file)) if value != TO_BE_GIVEN else value
            for name, value in content.items()
            if name != SWEEP
        }
        options = merged(options, own)
    return options


def read_layers(path: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file of `--config` after the files that it extends, each with its content without `base`.

    Raises SettingsError if one is missing, damaged or extends itself.
    """
    return _layers(Path(path), ())


def _layers(path: Path, below: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """The layers of a file that the files `below` extend."""
    said = f"base of {below[-1]}" if below else "--config"
    if not path.is_file():
        raise SettingsError(f"{said} {path}: there is no such file.")
    if any(path.samefile(other) for other in below):
        raise SettingsError(
            f"{said} {path}: the file extends itself.", f"Leave {path.name} out of one base."
        )
    origin = Origin(str(path), SettingsError)
    content = parse_toml(read_text(path, origin), origin)
    bases = content.pop(BASE, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise SettingsError(f"{path}: base is not a list of files.", 'base = ["common.toml"]')
    layers = [layer for base in bases for layer in _layers(path.parent / base, (*below, path))]
    return [*layers, (path, content)]


BASE = "base"
"""The key of a TOML file with the files that it extends, relative to its folder; later ones win."""

_LENGTHS = ("steps", "samples", "epochs")
"""The options that give the length of a run, each in place of the others."""


def merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given over those of a file or a run.

    >>> merged({"steps": 100, "lr": 0.1}, {"epochs": 2.0})
    {'lr': 0.1, 'epochs': 2.0}
    """
    is_longer = not given.keys().isdisjoint(_LENGTHS)
    base = {name: value for name, value in own.items() if not (is_longer and name in _LENGTHS)}
    return {**base, **given}


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Settings from named options.

    Raises SettingsError when `folder` is missing, or a value that a flag has to replace.
    """
    for name, value in options.items():
        if value == TO_BE_GIVEN:
            raise SettingsError(
                f"{name} is {TO_BE_GIVEN} in the file of --config: it is required.",
                f"{flag_of(name)} VALUE",
            )
    if "folder" not in options:
        raise SettingsError(
            "no generated folder was named.", "asyncpipe-train generated_models/gpt2_4p"
        )
    return Settings(**options)


def checked(name: str, value: Any, place: str) -> Any:
    """The value of an option that is written in `place`, converted to the option's type.

    Raises SettingsError for an unknown option or a value that is not legal.
    """
    options = options_of(Settings)
    if name not in options:
        raise SettingsError(
            f"{place}: {name} is not an option of asyncpipe-train.",
            TRAIN.meant(name, options, f"Options: {', '.join(options)}."),
        )
    if name == "trust":
        raise SettingsError(
            f"{place}: --trust must be given on the command line, not in a file.", "--trust"
        )
    limit = options[name].limit
    if fault := refusal(limit, name, value, place):
        raise SettingsError(*fault)
    if isinstance(limit, ListOf):
        return tuple(map(float, value))
    return float(value) if isinstance(limit, Number) else value


def check_code(options: Mapping[str, Any], typed: Container[str], files: str) -> None:
    """Raises TrustError when an option that was not `typed` names code which is not known here.

    `files` are the flags that the options came from. An option of a sweep has all its values.
    """
    if options.get("trust"):
        return
    unknown = [
        (option, spec)
        for option, spec in code_of(options)
        if option not in typed and not is_known_code(spec)
    ]
    if not unknown:
        return
    flags = ", ".join(f"{flag_of(option)} {spec}" for option, spec in unknown)
    of_stages = ""
    if not is_trusted(folder := str(options.get("folder", ""))):
        of_stages = f" --trust is also for the stages of {folder}, which were not made here."
    raise TrustError(
        f"{files} would run code that no command line here has named: {flags}.",
        f"Read it. Trust it from then on: --trust, or {flags}.{of_stages}",
    )


def remember_code_of(settings: Settings) -> None:
    """Marks the code that a run names as known, if the mark can be written."""
    for _, spec in code_of(asdict(settings)):
        remember_code(spec)


def is_all_known(options: Mapping[str, Any]) -> bool:
    """True when the options may come from a file without `--trust`."""
    return is_trusted(str(options.get("folder", ""))) and all(
        is_known_code(spec) for _, spec in code_of(options)
    )


def code_of(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each option that names code, with the name."""
    for option in (name for name, declared in options_of(Settings).items() if declared.names_code):
        value = options.get(option)
        for text in value if isinstance(value, tuple) else (value,):
            specs = map(str.strip, str(text).split(",")) if option == "log" else [str(text)]
            yield from ((option, spec) for spec in specs if names_object(spec))


def own_files(options: Mapping[str, Any]) -> Iterator[tuple[str, bytes | None]]:
    """The user's files with data and criterion: the option that names each, and its content; None
    for a file that is not on this host, as not every rank needs each."""
    for option, spec in code_of(options):
        path = Path(spec.rpartition(":")[0])
        if option != "log" and path.suffix == ".py":
            yield f"{flag_of(option)} {spec}, a file", path.read_bytes() if path.is_file() else None
