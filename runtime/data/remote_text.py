"""The text at a URL -> a stream of windows, read piece by piece while a run trains on them.

The files are read in the order of their names: tokenized ones (`.bin`), or else every file as bytes
of text. The files are listed again at the end of each, so a file that was uploaded meanwhile is
read too, if its name comes later. A window is within one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ..errors import DataError
from ..locations import RemoteFile, RemoteFolder
from ..plan.plan import Plan
from .task import Task
from .text import WindowFields
from .tokens import SUFFIX, Header, read_header

_PIECE = 4 << 20
"""Bytes of one request."""


@dataclass(frozen=True)
class _Place:
    """The next window: of which file, at which of its bytes, and how many came before."""

    file: str = ""
    byte: int = 0
    windows: int = 0


class RemoteText(IterableDataset[dict[str, Tensor]]):
    """The windows of the text at a URL, as samples of a model. Its state is the place of the next
    window."""

    def __init__(self, url: str, task: Task, plan: Plan, *, seed: int) -> None:
        if task.kind != "text" or task.objective == "classify":
            raise DataError(
                f"--data {url}: a stream of text does not fit {plan.name}.",
                "Give my_file.py:function, which may return a stream of its own.",
            )
        self._url, self._task, self._plan, self._seed = url, task, plan, seed
        self._location = RemoteFolder(url)
        self._place = self._begin = _Place()

    def again(self) -> RemoteText:
        """The same text from its beginning."""
        return RemoteText(self._url, self._task, self._plan, seed=self._seed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._place, self._begin = self._begin, _Place()
        while (file := self._next_file()) is not None:
            header = self._header(file)
            made = WindowFields(self._task, self._plan, seed=self._seed, mask=header.mask)
            for window in self._windows(file, np.dtype(header.dtype), made.stride):
                number = [self._place.windows]
                rows = {name: made.field(name, number, window) for name in self._task.fields}
                self._place = _Place(
                    file.name,
                    self._place.byte + made.stride * np.dtype(header.dtype).itemsize,
                    self._place.windows + 1,
                )
                yield {name: row[0] for name, row in rows.items()}
            self._place = _Place(f"{file.name}\0", 0, self._place.windows)

    def state_dict(self) -> dict[str, Any]:
        place = self._place
        return {"file": place.file, "byte": place.byte, "windows": place.windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin = _Place(str(state["file"]), int(state["byte"]), int(state["windows"]))

    def _next_file(self) -> RemoteFile | None:
        """The file of the place, or the first one after it."""
        files = self._location.list()
        tokens = [file for file in files if file.name.endswith(SUFFIX)]
        later = (file for file in tokens or files if file.name >= self._place.file)
        return next(later, None)

    def _header(self, file: RemoteFile) -> Header:
        """How the tokens of a file are written; a text has a token for each byte."""
        if not file.name.endswith(SUFFIX):
            return Header(dtype="uint8")
        with TemporaryDirectory() as aside:
            path = Path(aside) / Path(file.name).name
            name = f"{file.name}.json"
            for other in self._location.list():
                if other.name == name:
                    self._location.fetch(other, path.with_name(f"{path.name}.json"))
            return read_header(path)

    def _windows(self, file: RemoteFile, dtype: np.dtype[Any], stride: int) -> Iterator[Tensor]:
        """The whole windows of a file from the place on, each in a batch of one."""
        size = stride * dtype.itemsize
        piece = max(1, _PIECE // size) * size
        start = self._place.byte
        while file.bytes - start >= size:
            content = self._location.read(file, start, start + piece)
            whole = len(content) // size
            ids = np.frombuffer(content, dtype.newbyteorder("<"), whole * stride)
            for row in ids.astype("int64").reshape(whole, 1, stride):
                yield torch.from_numpy(row)
            start += whole * size
