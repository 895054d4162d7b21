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
from typing import Any

from ..limits import limits_of
from ..staleness.compose import parse
from ..staleness.recipe import AUTO
from ..training.settings import OPTIMIZERS, Settings, SettingsError, checked
from ..wording import did_you_mean

SYNC = "sync"
_OWN = (
    *("lr", "momentum", "weight_decay", "clip", "final_lr_ratio", "betas"),
    *("warmup", "refresh_every", "annealing_steps", "staleness_cap", "flush_every"),
    *("sync_start", "ahead", "clip_by"),
)
"""The options that a method may have of its own."""


@dataclass(frozen=True, slots=True)
class Method:
    """What is done about staleness: `sync` or names of methods; the optimizer, None for those of
    the command; and `own` options of the run."""

    staleness: str
    optimizer: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_sync(self) -> bool:
        return self.staleness == SYNC

    def __str__(self) -> str:
        """As it is written."""
        written = (f",{name.replace('_', '-')}={_written(own)}" for name, own in self.own.items())
        optimizer = f":{self.optimizer}" if self.optimizer else ""
        return "".join([self.staleness, optimizer, *written])


def read_method(text: str) -> Method:
    """The method that is written so. Raises SettingsError, ScheduleError for what is not known.

    >>> read_method("stash:muon,lr=0.003,sync-start=10%")
    Method(staleness='stash', optimizer='muon', own={'lr': 0.003, 'sync_start': '10%'})
    >>> str(read_method("stash:nadam, betas=0.99/0.999"))
    'stash:nadam,betas=0.99/0.999'
    """
    head, *options = (part.strip() for part in text.split(","))
    staleness, colon, optimizer = head.partition(":")
    if staleness not in (SYNC, AUTO):
        parse(staleness)
    if colon and optimizer not in OPTIMIZERS:
        raise SettingsError(
            f"{text}: {optimizer!r} is no optimizer.", _one_of(optimizer, OPTIMIZERS)
        )
    return Method(staleness, optimizer or None, dict(_option(text, option) for option in options))


def _option(text: str, option: str) -> tuple[str, Any]:
    key, _, value = option.partition("=")
    name = key.strip().replace("-", "_")
    if name not in _OWN:
        names = [known.replace("_", "-") for known in _OWN]
        raise SettingsError(f"{text}: {key!r} is no option of a method.", _one_of(key, names))
    return name, checked(name, limits_of(Settings)[name].limit.read(value.strip()), text)


def _one_of(word: str, legal: Any) -> str:
    return did_you_mean(word, legal, f"Choose {', '.join(legal)}.")


def _written(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return "/".join(part if isinstance(part, str) else f"{part:g}" for part in parts)
