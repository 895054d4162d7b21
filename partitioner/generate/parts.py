"""Containers of which a stage holds only some members -> classes without a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .quoting import class_name


@dataclass(frozen=True, slots=True)
class Part:
    """A class without a forward: a container of which the stage holds only some members."""

    name: str
    path: str
    annotations: tuple[str, ...]
    lines: tuple[str, ...]


class Parts:
    """The classes without a forward of one file; equal ones are one class."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken
        self._found: dict[tuple[object, ...], Part] = {}

    def add(self, type_name: str, path: str, annotations: Sequence[str], lines: list[str]) -> str:
        key = (type_name, *annotations, *lines)
        if key not in self._found:
            stem = name = f"{class_name(type_name)}Part"
            count = 1
            while name in self._taken:
                count += 1
                name = f"{stem}{count}"
            self._taken.add(name)
            self._found[key] = Part(name, path, tuple(annotations), tuple(lines))
        return self._found[key].name

    @property
    def ordered(self) -> tuple[Part, ...]:
        return tuple(self._found.values())
