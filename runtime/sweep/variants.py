"""`lr=1e-3,3e-3` and `[sweep]` in TOML -> every combination of values, each with a name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..limits import limits_of
from ..training.settings import (
    OF_THIS_CALL,
    SWEEP,
    Settings,
    SettingsError,
    checked,
    read_toml,
)
from ..wording import did_you_mean

Values = Mapping[str, Any]
"""What one run has of its own, by option."""

_NAME_AT_MOST = 100


def lists_of(
    texts: Iterable[str], config: Path | None, given: Container[str]
) -> dict[str, tuple[Any, ...]]:
    """The values of each option that is to be varied: those of `--sweep` win over those of the
    file, and so do the options that were `given` one value.

    Raises SettingsError as `lists_from_texts`, and for an option that was given both ways.
    """
    of_texts = lists_from_texts(texts)
    for name in of_texts:
        if name in given:
            raise SettingsError(
                f"{name} is given by --sweep and by its own flag.", "Leave one out."
            )
    of_file = lists_of_file(config) if config else {}
    return {name: values for name, values in of_file.items() if name not in given} | of_texts


def lists_from_texts(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """The values of each option, of texts as `--sweep` takes them.

    >>> lists_from_texts(["lr=1e-3,3e-3", "seed=1,2"])
    {'lr': (0.001, 0.003), 'seed': (1, 2)}

    Raises SettingsError for an unknown option, one that cannot be varied, or a wrong value.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        flag = f"--sweep {text}"
        name, equals, values = text.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise SettingsError(f"{flag} has no values.", "--sweep lr=1e-3,3e-3")
        if name in found:
            raise SettingsError(
                f"{flag}: the values of {name} were given already.", "Give them in one list."
            )
        _check_name(name, flag)
        found[name] = _distinct([_value(name, each, flag) for each in values.split(",")], flag)
    return found


def lists_of_file(path: Path) -> dict[str, tuple[Any, ...]]:
    """The values of each option in `[sweep]` of a TOML file; none without that table.

    Raises SettingsError as `lists_from_texts` does.
    """
    table = read_toml(path).get(SWEEP, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: sweep is no table.", "[sweep] and below it lr = [1e-3, 3e-3]")
    found = {}
    for name, values in table.items():
        place = f"{path}: [sweep]"
        _check_name(name, place)
        if not isinstance(values, list) or not values:
            raise SettingsError(
                f"{place} {name} = {values!r} is no list of values.", f"{name} = [.., ..]"
            )
        found[name] = _distinct([checked(name, value, place) for value in values], place)
    return found


def variants(lists: Mapping[str, Sequence[Any]]) -> list[Values]:
    """All combinations, the first option outermost.

    >>> [name_of(values) for values in variants({"lr": (0.1, 0.2), "seed": (1, 2)})]
    ['lr=0.1,seed=1', 'lr=0.1,seed=2', 'lr=0.2,seed=1', 'lr=0.2,seed=2']
    """
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def name_of(values: Values) -> str:
    """What a run's folder is called: its values. Those that are no name of a file are cut short and
    told apart by their hash."""
    told = ",".join(f"{name}={in_words(value)}" for name, value in values.items())
    plain = re.sub(r"[^\w=,.+-]", "_", told)
    if plain == told and len(told) <= _NAME_AT_MOST:
        return told
    return f"{plain[:_NAME_AT_MOST]}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def in_words(value: Any) -> str:
    """A value as a person would write it."""
    if isinstance(value, tuple):
        return "/".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _check_name(name: str, place: str) -> None:
    legal = tuple(option for option in limits_of(Settings) if option not in OF_THIS_CALL)
    if name in legal:
        return
    if name in OF_THIS_CALL:
        raise SettingsError(f"{place}: {name} cannot differ from run to run.", "Leave it out.")
    raise SettingsError(
        f"{place}: {name} is not an option of asyncpipe-train.",
        did_you_mean(name, legal, f"Options: {', '.join(legal)}."),
    )


def _value(name: str, text: str, flag: str) -> Any:
    return checked(name, limits_of(Settings)[name].limit.read(text), flag)


def _distinct(values: Sequence[Any], place: str) -> tuple[Any, ...]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise SettingsError(f"{place}: {in_words(value)} is there twice.", "Leave one out.")
    return tuple(values)
