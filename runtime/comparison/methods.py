"""A text such as `stash:muon,lr=0.003` -> how one run differs from the others.

sync                        synchronous, the optimizer and learning rates of the command
none, stash, ..             asynchronous, with that --staleness (several joined by +)
stash:muon                  with an optimizer of its own
stash:adamw,lr=0.001        and with options of asyncpipe-train of its own
stash,sync-start=0.1        the first tenth of the steps synchronous
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ..staleness.compose import parse
from ..training.settings import CHOICES, SettingsError

SYNC = "sync"
_NUMBERS = ("lr", "momentum", "weight_decay", "clip", "final_lr_ratio", "sync_start")
_COUNTS = ("warmup", "refresh_every")


@dataclass(frozen=True, slots=True)
class Method:
    """What is done about staleness: `sync` or names of methods; the optimizer, None for those of
    the command; and `own` options of the run. The share `sync_start` of the steps, the first ones,
    is synchronous."""

    staleness: str
    optimizer: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    sync_start: float = 0.0

    @property
    def is_sync(self) -> bool:
        return self.staleness == SYNC

    def __str__(self) -> str:
        """As it is written."""
        options = dict(self.own)
        if self.sync_start:
            options["sync_start"] = self.sync_start
        written = (f",{name.replace('_', '-')}={_written(own)}" for name, own in options.items())
        optimizer = f":{self.optimizer}" if self.optimizer else ""
        return "".join([self.staleness, optimizer, *written])


def read_method(text: str) -> Method:
    """The method that is written so. Raises SettingsError, ScheduleError for what is not known.

    >>> read_method("stash:muon,lr=0.003,sync-start=0.1")
    Method(staleness='stash', optimizer='muon', own={'lr': 0.003}, sync_start=0.1)
    >>> str(read_method("stash:nadam, betas=0.99/0.999"))
    'stash:nadam,betas=0.99/0.999'
    """
    head, *options = (part.strip() for part in text.split(","))
    staleness, colon, optimizer = head.partition(":")
    if staleness != SYNC:
        parse(staleness)
    if colon and optimizer not in CHOICES["optimizer"]:
        raise SettingsError(
            f"{text}: {optimizer!r} is no optimizer.", _one_of(optimizer, CHOICES["optimizer"])
        )
    own = dict(_option(text, option) for option in options)
    start = own.pop("sync_start", 0.0)
    if not 0 <= start <= 1:
        raise SettingsError(f"{text}: sync-start is a share of the steps, from 0 to 1.")
    return Method(staleness, optimizer or None, own, start)


def _option(text: str, option: str) -> tuple[str, Any]:
    key, _, value = option.partition("=")
    name = key.strip().replace("-", "_")
    try:
        if name in _COUNTS:
            return name, int(value)
        if name in _NUMBERS:
            return name, float(value)
        if name == "betas":
            first, second = value.split("/")
            return name, (float(first), float(second))
    except ValueError:
        raise SettingsError(f"{text}: {option!r} has no value that can be read.") from None
    names = [known.replace("_", "-") for known in (*_NUMBERS, *_COUNTS, "betas")]
    raise SettingsError(f"{text}: {key!r} is no option of a method.", _one_of(key, names))


def _one_of(word: str, legal: Any) -> str:
    near = get_close_matches(word, legal, n=1)
    return f"Did you mean {near[0]}?" if near else f"Choose {', '.join(legal)}."


def _written(value: Any) -> str:
    return "/".join(f"{part:g}" for part in (value if isinstance(value, tuple) else (value,)))
