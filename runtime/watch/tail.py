"""metrics.jsonl of a run that may be growing -> its records so far, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..monitoring.run_files import METRICS, Record, RunRecords, gathered, record_of

_KEPT = 4096
"""The number of records of one kind from which every second one is dropped."""
_LONGEST = 16 << 20
"""Bytes of a line from which it counts as damaged."""
_READ = 1 << 20
_CHECKED = 256
"""The bytes before the position that are compared, because a resumed run rewrites the file."""


@dataclass(slots=True)
class _Thinned:
    """Records of one kind with their places in the file, evenly spaced, and the newest of them."""

    kept: list[tuple[int, Record]] = field(default_factory=list)
    newest: tuple[int, Record] | None = None
    count: int = 0
    apart: int = 1

    def add(self, place: int, record: Record) -> None:
        self.newest = place, record
        if self.count % self.apart == 0:
            self.kept.append(self.newest)
        self.count += 1
        if len(self.kept) > _KEPT:
            del self.kept[1::2]
            self.apart *= 2

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        yield from self.kept
        if self.newest is not None and self.newest is not self.kept[-1]:
            yield self.newest


class Tail:
    """Follows metrics.jsonl of one run's folder.

    A line that is not complete yet is read again. Lines that are not records are counted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin()

    def _begin(self) -> None:
        self._position, self._places, self._damaged = 0, 0, 0
        self._before, self._rest = b"", b""
        self._file_number = -1
        self._kinds: dict[str, _Thinned] = {}

    def read(self) -> bool:
        """Reads the lines that were added; False if there were none."""
        try:
            with (self._folder / METRICS).open("rb") as file:
                return self._read(file)
        except OSError:  # not begun, or removed: what is known stays
            return False

    def run(self) -> RunRecords:
        """The run as far as it was read."""
        records = sorted((each for kind in self._kinds.values() for each in kind), key=_place)
        return gathered(self._folder, [record for _, record in records], self._damaged)

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
                self._rest = b"-"  # the end of this line is no record either
        return has_more

    def _continues(self, file: BinaryIO) -> bool:
        """True if the file begins with what was read of it."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._file_number or status.st_size < self._position:
            return False
        file.seek(self._position - len(self._before))
        return file.read(len(self._before)) == self._before

    def _add(self, line: bytes) -> None:
        self._places += 1
        record = record_of(line.decode(errors="replace"))
        if record is None:
            self._damaged += bool(line.strip())
            return
        self._kinds.setdefault(record["event"], _Thinned()).add(self._places, record)


def _place(placed: tuple[int, Record]) -> int:
    return placed[0]
