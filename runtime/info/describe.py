"""Everything that asyncpipe-info tells, as values for JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import AsyncPipeError
from .machine import cpu, gpus, links
from .software import backends, extras, versions
from .would_use import default_ranks, would_use

Section = dict[str, Any]


def describe(ranks: int | None = None) -> dict[str, Section]:
    """Sections of names and what there is to say of them; for a run of so many ranks, by default as
    many as there are GPUs, or two."""
    found: dict[str, Callable[[], Section]] = {
        "versions": versions,
        "extras": extras,
        "backends": backends,
        "processor": cpu,
        "gpus": gpus,
        "links": links,
        "a run here": lambda: would_use(ranks or default_ranks()),
    }
    return {name: _told(find) for name, find in found.items()}


def _told(find: Callable[[], Section]) -> Section:
    """What is found, or why it is not."""
    try:
        return find()
    except AsyncPipeError as error:
        return {"trouble": error.what, **({"cure": error.cure} if error.cure else {})}
    except Exception as error:
        return {"trouble": f"{type(error).__name__}: {error}"}
