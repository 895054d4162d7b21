"""Strategies: ways to train one folder that differ in several options, to be compared side by side.

    single                  one process has all stages
    ddp                     every process has all stages and a part of the batch
    1f1b                    a pipeline
    1f1b+replicas=2         two pipelines side by side

A strategy is the name of a schedule, options of asyncpipe-train, or both, joined by `+`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.settings import SettingsError
from .variants import value_of

STRATEGY = "strategy"
"""The column and the part of a run's values that name its strategy."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to train: its name and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_micro_batch(self, size: int) -> Strategy:
        """The same with micro-batches of this size."""
        return replace(self, options={**self.options, "micro_batch_size": size})


def read_strategies(text: str, given: Container[str] = ()) -> tuple[Strategy, ...]:
    """The strategies of a text as --strategies takes it.

    given: the options that all runs have, which no strategy may set.

    >>> [(each.name, dict(each.options)) for each in read_strategies("ddp,1f1b+replicas=2")]
    [('ddp', {'schedule': 'ddp'}), ('1f1b+replicas=2', {'schedule': '1f1b', 'replicas': 2})]

    Raises SettingsError for an option that is unknown, cannot differ or is in `given`, a wrong
    value, and a strategy that is there twice.
    """
    strategies: dict[str, Strategy] = {}
    for name in (part.strip() for part in text.split(",")):
        flag = f"--strategies {name}"
        if name in strategies:
            raise SettingsError(f"{flag}: it is there twice.", "Leave one out.")
        options: dict[str, Any] = {}
        for option, value in _pairs(name, flag):
            if option in given or option in options:
                where = "by its own flag too" if option in given else "twice"
                raise SettingsError(f"{flag}: {option} is given {where}.", "Leave one out.")
            options[option] = value_of(option, value, flag)
        strategies[name] = Strategy(name, options)
    return tuple(strategies.values())


def _pairs(name: str, flag: str) -> Iterable[tuple[str, str]]:
    """The options of a strategy and their texts, whose own `+` stay: staleness=stash+msnag."""
    pairs: list[tuple[str, str]] = []
    for number, part in enumerate(name.split("+")):
        option, equals, value = part.partition("=")
        if equals:
            pairs.append((option.strip().replace("-", "_"), value.strip()))
        elif number == 0:
            pairs.append(("schedule", part.strip()))
        elif pairs[-1][0] == "schedule":
            raise SettingsError(f"{flag}: {part!r} has no value.", "1f1b+replicas=2, for example.")
        else:
            pairs[-1] = pairs[-1][0], f"{pairs[-1][1]}+{part.strip()}"
    return pairs
