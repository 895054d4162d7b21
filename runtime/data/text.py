"""Token ids -> samples of a language model: windows, and the labels of its objective.

`TextWindows` reads a text that the ranks hold. `RemoteText` reads the text at a URL piece by piece
while a run trains on it. The embedding of a stage is checked to have a row for every token in its
first forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ..errors import DataError
from ..locations import RemoteFile, RemoteFolder
from ..plan.plan import Plan, StageSpec
from .task import TARGET, Task, seeded_generator
from .tokens import SUFFIX, Header, Tokens, read_header

EVALUATION_SHARE = 0.05
IGNORED = -100
_MASKED_SHARE = 0.15
_PIECE = 4 << 20
"""Bytes of one request of `RemoteText`."""


class WindowFields:
    """Windows of token ids -> the inputs of a plan.

    stride: the tokens of a window.

    causal    `input_ids` and equal `labels` (the model shifts them), or a shifted `target`, which
              may be an input of the model (`Plan.next_labels`)
    masked    15% of the tokens hidden, `labels` -100 but there
    seq2seq   a window twice as long: `input_ids` its first half, `labels` its second
    classify  `labels` says which of the model's classes the window's document falls into
    """

    def __init__(self, task: Task, plan: Plan, *, seed: int, mask: int) -> None:
        self._task, self._seed, self._mask = task, seed, mask
        self._label_is_next = task.label is not None and task.label in (TARGET, plan.next_labels)
        self._shapes = {spec.name: spec.sample_sizes(plan.sizes) for spec in plan.inputs}
        self._input = self._shapes[task.sample][0]
        self.stride = self._input + self._answer_length()

    def field(
        self, name: str, indices: Sequence[int], windows: Tensor, classes: Sequence[int] = ()
    ) -> Tensor:
        """One field of these windows; `indices` are their numbers, `classes` those of their
        documents."""
        if name == self._task.sample:
            return self._sample(indices, windows)
        if name == self._task.label:
            return self._label(indices, windows, classes)
        size = (len(indices), *self._shapes[name])
        if name.endswith("attention_mask"):
            return torch.ones(size, dtype=torch.int64)
        if name == "token_type_ids":
            return torch.zeros(size, dtype=torch.int64)
        if name == "position_ids":
            return torch.arange(size[-1]).expand(size)
        if name == "decoder_input_ids":
            answer = windows[:, self._input :]
            return torch.cat([torch.zeros_like(answer[:, :1]), answer[:, :-1]], dim=1)
        raise DataError(
            f"no text gives the model's input {name}.", "--data my_file.py:function with that field"
        )

    def _answer_length(self) -> int:
        """Tokens of a window after the input's own."""
        if self._task.objective == "seq2seq":
            answer = "labels" if "labels" in self._shapes else "decoder_input_ids"
            return self._shapes[answer][0] if answer in self._shapes else self._input
        return 1 if self._label_is_next and self._task.objective == "causal" else 0

    def _sample(self, indices: Sequence[int], windows: Tensor) -> Tensor:
        sample = windows[:, : self._input]
        if self._task.objective == "masked":
            return sample.masked_fill(self._hidden(indices), self._mask)
        return sample

    def _label(self, indices: Sequence[int], windows: Tensor, classes: Sequence[int]) -> Tensor:
        match self._task.objective:
            case "seq2seq":
                return windows[:, self._input :]
            case "masked":
                return windows.masked_fill(~self._hidden(indices), IGNORED)
            case "classify":
                return torch.tensor(classes)
        return windows[:, 1:] if self._label_is_next else windows

    def _hidden(self, indices: Sequence[int]) -> Tensor:
        """Which tokens are masked: a function of the seed and the window alone."""
        rows = [
            torch.rand(self._input, generator=seeded_generator(self._seed, "mask", index))
            for index in indices
        ]
        return torch.stack(rows) < _MASKED_SHARE


class TextWindows:
    """Windows of a text, one after the other, as the inputs of a plan.

    The last 5% of the text is for evaluation; where documents are classes, every 20th window.
    """

    def __init__(
        self, tokens: Tokens, task: Task, plan: Plan, *, evaluation: bool, seed: int
    ) -> None:
        self._tokens = tokens
        self._task = task
        self._made = WindowFields(task, plan, seed=seed, mask=tokens.mask)
        self._stride = self._made.stride
        whole = len(tokens.ids)
        if task.objective == "classify":
            every = round(1 / EVALUATION_SHARE)
            starts = range(0, whole - self._stride + 1, self._stride)
            self._starts = [
                start for index, start in enumerate(starts) if (index % every == 1) == evaluation
            ]
        else:
            border = whole - max(int(whole * EVALUATION_SHARE), self._stride)
            first, last = (border, whole) if evaluation else (0, border)
            self._starts = list(range(first, last - self._stride + 1, self._stride))
        if not self._starts:
            raise DataError(
                f"the text has {whole} tokens, too few for windows of {self._stride} to train on "
                "and to evaluate.",
                "Give a longer text, or a smaller --seq.",
            )

    @property
    def fields(self) -> tuple[str, ...]:
        return self._task.fields

    def __len__(self) -> int:
        return len(self._starts)

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]:
        ids = self._tokens.ids
        starts = [self._starts[index] for index in indices]
        rows = [ids[start : start + self._stride].astype("int64") for start in starts]
        windows = torch.stack([torch.from_numpy(row) for row in rows])
        is_classified = self._task.objective == "classify"
        classes = [self._class_of(start) for start in starts] if is_classified else []
        return {name: self._made.field(name, indices, windows, classes) for name in fields}

    def _class_of(self, start: int) -> int:
        documents = self._tokens.starts
        document = bisect_right(documents, start) - 1
        return document * min(self._task.classes or 2, len(documents)) // len(documents)


def check_vocabulary(
    module: nn.Module,
    spec: StageSpec,
    ids_input: str,
    largest_token: int,
    *,
    source: str,
    tokenizer: str,
) -> None:
    """Watches the stage's next forward for embeddings that read the token ids.

    Which do is only seen there: tables of positions are embeddings too, but read other numbers.
    That forward raises DataError when such an embedding has too few rows.
    """
    place = spec.inputs.index(ids_input)
    ids: list[Tensor] = []

    def begin(stage: nn.Module, arguments: tuple[Any, ...]) -> None:
        ids.append(arguments[place])

    def look(name: str, embedding: nn.Embedding, read: Tensor) -> None:
        rows = embedding.num_embeddings
        if rows <= largest_token and read.shape == ids[-1].shape and torch.equal(read, ids[-1]):
            raise DataError(
                f"token id {largest_token} in {source}, but the model has {rows} rows in {name}. "
                f"The data was made with another tokenizer ({tokenizer}).",
                "Tokenize it with the model's own, or partition a model with more rows.",
            )

    def end(stage: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        for hook in hooks:
            hook.remove()

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    for name, embedding in module.named_modules():
        if isinstance(embedding, nn.Embedding):
            hooks.append(
                embedding.register_forward_pre_hook(
                    lambda child, arguments, name=name: look(name, child, arguments[0])
                )
            )


@dataclass(frozen=True)
class _Place:
    """The next window: of which file, at which of its bytes, and how many came before."""

    file: str = ""
    byte: int = 0
    windows: int = 0


class RemoteText(IterableDataset[dict[str, Tensor]]):
    """The windows of the text at a URL, as a stream of samples. Its state is the place of the next
    window.

    The files are read in the order of their names: tokenized ones (`.bin`), or else every file as
    bytes of text. The files are listed again at the end of each, so a file that was uploaded
    meanwhile is read too, if its name comes later. A window is within one file.
    """

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
