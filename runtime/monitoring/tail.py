"""metrics.jsonl of a run, finished or growing -> its records so far, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

Record = Mapping[str, Any]

KINDS = frozenset(
    ("start", "step", "loss", "eval", "note", "warning", "timelines", "end", "failure")
)
"""The events that are kept; others are records of another version."""
_KEPT, _KEPT_BYTES = 8192, 16 << 20
"""The number of records of one kind, and of bytes of their lines, from which every second one is
dropped."""
_LONGEST = 16 << 20
"""Bytes of a line from which it counts as damaged."""
_READ = 1 << 20
_CHECKED = 256
"""The bytes before the position that are compared, because a resumed run rewrites the file."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A record with the number and the bytes of its line."""

    place: int
    size: int
    record: Record


@dataclass(slots=True)
class _Thinned:
    """Records of one kind, evenly spaced, and the newest of them."""

    kept: list[_Placed] = field(default_factory=list)
    newest: _Placed | None = None
    count: int = 0
    apart: int = 1
    size: int = 0

    def add(self, placed: _Placed) -> None:
        self.newest = placed
        if self.count % self.apart == 0:
            self.kept.append(placed)
            self.size += placed.size
        self.count += 1
        while len(self.kept) > 1 and (len(self.kept) > _KEPT or self.size > _KEPT_BYTES):
            del self.kept[1::2]
            self.apart *= 2
            self.size = sum(each.size for each in self.kept)

    def __iter__(self) -> Iterator[_Placed]:
        yield from self.kept
        if self.newest is not None and self.newest is not self.kept[-1]:
            yield self.newest


class Tail:
    """Follows metrics.jsonl of one run.

    A last line that is not complete yet is read again. `damaged` counts the lines that are not
    records.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._position, self._lines, self.damaged = 0, 0, 0
        self._before, self._rest = b"", b""
        self._file_number = -1
        self._kinds: dict[str, _Thinned] = {}

    def read(self) -> bool:
        """Reads the lines that were added; False if there were none."""
        if not self._path.is_file():  # such as a pipe, which would never end
            return False
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except OSError:  # not begun, or removed: what is known stays
            return False

    def finish(self) -> None:
        """Reads the file, and its last line even without a line break."""
        self.read()
        self._add(self._rest)
        self._rest = b""

    def records(self) -> list[Record]:
        """The records that were read, in their order."""
        placed = sorted(
            (line for kind in self._kinds.values() for line in kind), key=lambda line: line.place
        )
        return [line.record for line in placed]

    def _read(self, file: BinaryIO) -> bool:
        if not self._continues(file):
            self._begin()
            self._file_number = os.fstat(file.fileno()).st_ino
        file.seek(self._position)
        has_more = False
        while content := file.read(_READ):
            has_more = True
            self._position += len(content)
            self._before = (self._before + content)[-_CHECKED:]
            *lines, self._rest = (self._rest + content).split(b"\n")
            for line in lines:
                self._add(line)
            if len(self._rest) > _LONGEST:
                self._rest = b"-"  # the end of this line is not a record either
        return has_more

    def _continues(self, file: BinaryIO) -> bool:
        """True if the file begins with what was read of it."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._file_number or status.st_size < self._position:
            return False
        file.seek(self._position - len(self._before))
        return file.read(len(self._before)) == self._before

    def _add(self, line: bytes) -> None:
        self._lines += 1
        record = _record_of(line.decode(errors="replace"))
        if record is None:
            self.damaged += bool(line.strip())
        elif record["event"] in KINDS:
            kind = self._kinds.setdefault(record["event"], _Thinned())
            kind.add(_Placed(self._lines, len(line), record))


def _record_of(line: str) -> Record | None:
    """The record in a line of metrics.jsonl; None for other content."""
    try:
        value = json.loads(line)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None
