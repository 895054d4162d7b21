"""Data that can only be read one after the other -> micro-batches by number.

A stream is an iterable of samples, or a DataLoader around one, whose batches are divided again.
Every rank that reads data iterates over the whole stream with the same random numbers, and takes
its micro-batches. A position in the stream is kept by its own `state_dict`, as those of torchdata's
StatefulDataLoader and of Hugging Face have one; without it, a resumed run reads and skips what was
read before.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import DataError
from ..formatting import kind_of
from ..rng import drawing_from
from ..user_code import user_errors_as
from .samples import Naming, batch_of

UNKNOWN_LENGTH = 2**48
"""The length of a stream without `__len__`: its first epoch never ends."""

Rows = dict[str, Tensor]
"""Fields with the samples in dimension 0."""


@dataclass(frozen=True)
class Stream:
    """An iterable of samples.

    source: the value of --data.
    items: the iterable.
    again: makes the iterable again: an iterator can be read once only, and others may keep a place.
    """

    source: str
    items: Any
    again: Callable[[], Any] | None = None

    @property
    def has_batches(self) -> bool:
        """True if an item is a batch."""
        return isinstance(self.items, DataLoader) and self.items.batch_size is not None

    @property
    def length(self) -> int:
        """The samples of an epoch, as far as the stream says it."""
        of_samples: Any = self.items.dataset if isinstance(self.items, DataLoader) else self.items
        try:
            return max(1, len(of_samples))
        except (TypeError, NotImplementedError):
            return UNKNOWN_LENGTH

    def opened(self) -> Iterable[Any]:
        """The iterable, for another pass. Raises DataError for an iterator that has no other."""
        items = self.items
        if not isinstance(items, Iterator):
            return items  # type: ignore[no-any-return]
        if self.again is None:
            raise DataError(
                f"--data {self.source} gives {kind_of(items)}, which can be read once only.",
                "Return an IterableDataset, or name the generator function itself.",
            )
        return self.again()  # type: ignore[no-any-return]

    def fresh(self) -> Iterable[Any]:
        """The iterable as it was made, if it can be made again."""
        return self.opened() if self.again is None else self.again()


class StreamReader:
    """Reads samples of a stream one after the other, pass after pass.

    position: the samples that were read.

    Random numbers of the user's code depend on the seed and on the position at which a read begins,
    or on the number of the batch. `state` is a place that `state()` gave; the stream is opened, and
    goes there, with the first read.
    """

    def __init__(
        self,
        stream: Stream,
        naming: Naming,
        fields: Collection[str],
        seed: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._stream, self._naming, self._fields, self._seed = stream, naming, fields, seed
        self._items: Iterator[Any] | None = None
        self._source: Any = None
        self._left: list[Rows] = []  # of batches that were divided
        self.position = self._epoch = self._read_in_epoch = 0
        self._batches = 0
        # Before the last batch: epoch, batches and state; and the samples used of this batch.
        self._before: tuple[int, int, Any] = (0, 0, None)
        self._used = 0
        self._place, self._has_gone = state, False
        if state is not None:
            self.position = int(state["position"])

    def take(self, count: int) -> Rows:
        """The next samples. Raises DataError when the stream has none."""
        self._go_to_place()
        if self._stream.has_batches:
            rows = self._divided(count)
        else:
            with drawing_from(self._seed, "stream", self.position):
                samples = [self._next() for _ in range(count)]
            rows = batch_of(samples, self._fields, self._naming, None)
        self.position += count
        return rows

    def state(self) -> dict[str, Any] | None:
        """The place in the stream as JSON; None if the stream cannot say it."""
        (epoch, batches, inner), used = self._before, self._used
        if not self._left:
            epoch, batches, inner, used = self._epoch, self._batches, self._inner_state(), 0
        if inner is None:
            return None
        try:
            packed = packed_state(inner)
        except TypeError:
            return None
        places = {"position": self.position, "epoch": epoch, "batches": batches, "used": used}
        return {**places, "inner": packed}

    def _go_to_place(self) -> None:
        place, self._place = self._place, None
        if place is None:
            return
        self._batches = int(place["batches"])
        with user_errors_as(
            DataError, f"the position in the stream of --data {self._stream.source}"
        ):
            self._open(int(place["epoch"]), unpacked_state(place["inner"]))
        self._divided(int(place["used"]))

    def _divided(self, count: int) -> Rows:
        """Rows of as many batches as it takes."""
        parts: list[Rows] = []
        while count:
            if not self._left:
                self._before, self._used = (self._epoch, self._batches, self._inner_state()), 0
                with drawing_from(self._seed, "batch of stream", self._batches):
                    item = self._next()
                self._batches += 1
                self._left = [_tensors(item, self._naming, self._fields)]
            batch = self._left.pop()
            rows = len(next(iter(batch.values())))
            own = min(rows, count)
            parts.append({name: value[:own] for name, value in batch.items()})
            self._used += own
            count -= own
            if own < rows:
                self._left = [{name: value[own:] for name, value in batch.items()}]
        if len(parts) == 1:
            return parts[0]
        return {
            name: self._joined(name, [part[name] for part in parts])
            for name in (self._fields if parts else ())
        }

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        shapes = list({tuple(part.shape[1:]): None for part in parts})
        if len(shapes) > 1:
            raise DataError(
                f"{name} has samples of the shape {shapes[0]} in one batch of "
                f"{self._stream.source} and {shapes[1]} in the next, and a micro-batch has samples "
                "of both.",
                "Give the DataLoader a batch_size that is a multiple of --micro-batch-size.",
            )
        return torch.cat(parts)

    def _next(self) -> Any:
        if self._items is None:
            self._open(self._epoch)
        for _ in range(2):
            assert self._items is not None
            for item in self._items:
                self._read_in_epoch += 1
                return item
            if not self._read_in_epoch:
                break
            self._open(self._epoch + 1)
        raise DataError(f"the stream of {self._stream.source} has no samples.")

    def _open(self, epoch: int, state: Any = None) -> None:
        """Begins a pass, or resumes one from a state."""
        # A stream may start every later pass at a place that it was once given.
        self._source = self._stream.fresh() if self._has_gone else self._stream.opened()
        self._has_gone = self._has_gone or state is not None
        self._epoch, self._read_in_epoch = epoch, 0 if state is None else 1
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        if state is not None:
            _holder(self._source).load_state_dict(state)
        with drawing_from(self._seed, "pass of stream", epoch):
            self._items = iter(self._source)

    def _inner_state(self) -> Any:
        """The state of the stream itself; None if it has none."""
        if self._items is None:
            self._open(self._epoch)
        holder = _holder(self._source)
        try:
            return None if holder is None else holder.state_dict()
        except NotImplementedError:
            return None


def _holder(source: Any) -> Any:
    """The object whose `state_dict` has the position of a stream. (A loader with worker processes
    cannot know their positions.)"""
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        return source
    if isinstance(source, DataLoader) and source.num_workers == 0:
        return _holder(source.dataset)
    return None


class StreamSamples:
    """The samples of a stream in place of a data set: only the first ones can be read by number."""

    def __init__(self, stream: Stream, naming: Naming) -> None:
        self.stream, self.naming = stream, naming

    @property
    def fields(self) -> tuple[str, ...]:
        return self.naming.fields

    def __len__(self) -> int:
        return self.stream.length

    def get(self, indices: Sequence[int], fields: Collection[str]) -> Rows:
        """Samples of the start of a new pass, for the comparison between ranks; of a stream of
        batches those of the first batch. Raises DataError for an empty stream."""
        rows: list[Any] = []
        for item in self.stream.fresh():  # a stream that keeps its place stays where it is
            rows += rows_of(item, self.naming) if self.stream.has_batches else [item]
            if self.stream.has_batches or len(rows) > max(indices):
                break
        if not rows:
            raise DataError(f"the stream of {self.stream.source} has no samples.")
        return batch_of([rows[index % len(rows)] for index in indices], fields, self.naming, None)


def first_rows(stream: Stream, naming: Naming, count: int, seed: int) -> list[Any]:
    """The first samples of evaluation data, or all of them if there are fewer; those of batches as
    dicts. Their random numbers depend on the seed alone."""
    rows: list[Any] = []
    with drawing_from(seed, "evaluation stream"):
        for item in stream.opened():
            rows += rows_of(item, naming) if stream.has_batches else [item]
            if len(rows) >= count:
                break
    return rows[:count]


def rows_of(batch: Any, naming: Naming) -> list[Rows]:
    """The samples of a batch, one by one."""
    tensors = _tensors(batch, naming, naming.fields)
    count = len(next(iter(tensors.values())))
    return [{name: value[row] for name, value in tensors.items()} for row in range(count)]


def _tensors(batch: Any, naming: Naming, fields: Collection[str]) -> Rows:
    named = naming.named(batch)
    naming.check(named, fields)
    return {name: naming.tensor(name, named[name]) for name in fields}


_TAG = "__kind__"


def packed_state(value: Any) -> Any:
    """A state as JSON: numbers, texts, bytes, tensors and arrays in lists, tuples and dicts. Raises
    TypeError for anything else.

    >>> state = {"seen": 3, 7: (b"x", torch.tensor([1, 2]))}
    >>> unpacked_state(packed_state(state))
    {'seen': 3, 7: (b'x', tensor([1, 2]))}
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [packed_state(inner) for inner in value]
        case tuple():
            return {_TAG: "tuple", "items": [packed_state(inner) for inner in value]}
        case Mapping():
            pairs = [[packed_state(key), packed_state(inner)] for key, inner in value.items()]
            return {_TAG: "dict", "items": pairs}
        case bytes():
            return {_TAG: "bytes", "items": base64.b64encode(value).decode()}
        case Tensor():
            array = packed_state(value.detach().cpu().numpy())
            return array | {_TAG: "tensor"}
        case np.ndarray() if value.dtype.kind in "biuf":
            content = packed_state(value.tobytes())["items"]
            shape = list(value.shape)
            return {_TAG: "array", "items": content, "dtype": value.dtype.str, "shape": shape}
    raise TypeError(f"a state cannot hold {kind_of(value)}")


def unpacked_state(packed: Any) -> Any:
    """The state that `packed_state` made."""
    if isinstance(packed, list):
        return [unpacked_state(inner) for inner in packed]
    if not isinstance(packed, dict):
        return packed
    items = packed["items"]
    match packed[_TAG]:
        case "tuple":
            return tuple(unpacked_state(inner) for inner in items)
        case "dict":
            return {unpacked_state(key): unpacked_state(inner) for key, inner in items}
        case "bytes":
            return base64.b64decode(items)
        case kind:
            content = np.frombuffer(base64.b64decode(items), np.dtype(packed["dtype"]))
            array = content.reshape(packed["shape"]).copy()
            return torch.from_numpy(array) if kind == "tensor" else array
