"""The samples of a stage with frozen blocks: their keys, and the cached tensors in the arena."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..tensor_files import dense
from .arena import KEY_BYTES, Arena, Entry
from .marks import Leaf
from .reads import Rows

Bytes = npt.NDArray[np.uint8]
"""The bytes of each sample, as rows."""


@dataclass(frozen=True)
class Form:
    """The layout of a tensor, and the rows of a sample in it; None for a tensor without samples."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rows: Rows | None

    @classmethod
    def of(cls, tensor: Tensor, rows: Rows | None) -> Form:
        """The layout of a tensor, or of a dense copy if elements of the tensor share memory."""
        return cls(tuple(tensor.shape), torch.empty_like(tensor).stride(), tensor.dtype, rows)

    @property
    def samples(self) -> int:
        """The number of samples."""
        assert self.rows is not None
        return self.shape[self.rows.dim] // self.rows.each

    @cached_property
    def sample_bytes(self) -> int:
        """The bytes of a sample; 0 for a tensor without samples."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return 0 if self.rows is None else size // self.samples

    def bytes_of(self, tensor: Tensor) -> Bytes:
        """The bytes of a tensor of this form."""
        assert self.rows is not None
        return bytes_by_sample(tensor, self.rows.dim, self.samples)

    def filled(self, fill: Callable[[Bytes], None]) -> Tensor:
        """A tensor of this form on the host, whose bytes `fill` writes."""
        assert self.rows is not None
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        by_sample = made.movedim(self.rows.dim, 0)
        whole = by_sample if by_sample.is_contiguous() else by_sample.contiguous()
        fill(whole.view(-1).view(torch.uint8).view(self.samples, -1).numpy())
        if whole is not by_sample:
            by_sample.copy_(whole)
        return made

    def stand_in(self, device: torch.device) -> Tensor:
        """A tensor of this form without meaning: whoever reads it by mistake makes NaN of it."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return made.fill_(math.nan)
        return made.fill_(True if self.dtype is torch.bool else torch.iinfo(self.dtype).max)


def bytes_by_sample(tensor: Tensor, dim: int, samples: int) -> Bytes:
    """The bytes of each sample of a tensor, whose dimension `dim` counts them."""
    flat = dense(tensor.movedim(dim, 0).cpu()).view(-1)
    return flat.view(torch.uint8).view(samples, -1).numpy()


@dataclass(frozen=True)
class Site:
    """The cached tensors with which the frozen blocks up to one of them are left out.

    number: its number in the arena, greater for more blocks
    last: the last of these blocks
    forms: these tensors
    """

    number: int
    last: int
    forms: Mapping[Leaf, Form]

    @cached_property
    def sample_bytes(self) -> int:
        """The bytes of a sample."""
        return sum(form.sample_bytes for form in self.forms.values())

    @cached_property
    def offsets(self) -> Mapping[Leaf, int]:
        """The offset of each tensor with samples in the bytes of a sample."""
        offsets, end = {}, 0
        for leaf, form in self.forms.items():
            if form.rows is not None:
                offsets[leaf] = end
                end += form.sample_bytes
        return offsets

    def load(self, arena: Arena, places: Sequence[int], device: torch.device) -> dict[Leaf, Tensor]:
        """The tensors of samples that the arena has."""
        values = {}
        for leaf, offset in self.offsets.items():
            size = self.forms[leaf].sample_bytes

            def fill(rows: Bytes, offset: int = offset, size: int = size) -> None:
                for row, place in zip(rows, places, strict=True):
                    row[:] = arena.at(place + offset, size)

            values[leaf] = self.forms[leaf].filled(fill).to(device)
        return values


class Writing:
    """Writes what is kept of the samples of a micro-batch that the arena lacks.

    is_whole: no sample of the micro-batch was there
    seconds: the time that it took
    """

    def __init__(
        self, arena: Arena, site: Site, keys: Sequence[bytes], entries: Sequence[Entry | None]
    ) -> None:
        self.seconds = 0.0
        self._arena, self._site, self._keys = arena, site, keys
        self._places: list[tuple[int, int]] = []
        missing = [
            sample
            for sample, entry in enumerate(entries)
            if entry is None or entry.site < site.number
        ]
        self.is_whole = len(missing) == len(entries)
        for sample in missing:
            if (place := arena.take(site.sample_bytes)) is None:
                break
            self._places.append((sample, place))

    def write(self, leaf: Leaf, tensor: Tensor) -> None:
        """Writes the bytes of one tensor, if it is kept."""
        if leaf not in self._site.offsets or not self._places:
            return
        begin_s = perf_counter()
        form, offset = self._site.forms[leaf], self._site.offsets[leaf]
        if form.shape != tuple(tensor.shape) or form.dtype != tensor.dtype:
            self._cancel()
            return
        rows = form.bytes_of(tensor)
        for sample, place in self._places:
            self._arena.at(place + offset, form.sample_bytes)[:] = rows[sample]
        self.seconds += perf_counter() - begin_s

    def finish(self) -> None:
        """Writes the entries, once all values are written."""
        begin_s = perf_counter()
        for sample, place in self._places:
            self._arena.put(self._keys[sample], Entry(self._site.number, place))
        self.seconds += perf_counter() - begin_s

    def _cancel(self) -> None:
        for _, place in self._places:
            self._arena.give_back(place)
        self._places = []


OF_SAMPLE, OF_PLACE, OF_BATCH = "sample", "place", "batch"
"""Which facts decide the last bits of a sample's values: the sample alone, also its place in the
micro-batch, or also the other samples."""


Inputs = Sequence[tuple[Tensor, int | None]]
"""Tensors, each with the dimension that counts samples; None for one that has the same values for
all samples."""


class ShownInputs:
    """The keys of inputs that are shown before they are used; the last two are known."""

    def __init__(self) -> None:
        self._shown: deque[_Shown] = deque(maxlen=2)

    def add(self, facts: object, inputs: Inputs, keys: Sequence[bytes]) -> None:
        self._shown.append(_Shown(facts, [(each, _version(each)) for each, _ in inputs], keys))

    def take(self, facts: object, inputs: Inputs) -> Sequence[bytes] | None:
        """The keys of these inputs, once; None if they were not shown or have changed since."""
        shown = next((each for each in self._shown if each.is_of(facts, inputs)), None)
        if shown is None:
            return None
        self._shown.remove(shown)
        return shown.keys


@dataclass(frozen=True, eq=False)
class _Shown:
    """Inputs with their versions when they were shown. As long as they are kept, no other tensor
    has their memory."""

    facts: object
    tensors: Sequence[tuple[Tensor, int]]
    keys: Sequence[bytes]

    def is_of(self, facts: object, inputs: Inputs) -> bool:
        return self.facts == facts and all(
            own.data_ptr() == other.data_ptr()
            and own.stride() == other.stride()
            and _version(other) == version
            for (own, version), (other, _) in zip(self.tensors, inputs, strict=True)
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def sample_keys(facts: object, inputs: Inputs, samples: int, scope: str) -> list[bytes]:
    """A key for each sample, made of everything on which its values depend.

    facts: the facts that all micro-batches have in common
    """
    start = hashlib.blake2b(repr(facts).encode(), digest_size=KEY_BYTES)
    of_samples = []
    for tensor, dim in inputs:
        if dim is None:
            start.update(bytes_by_sample(tensor[None], 0, 1).data)
        else:
            of_samples.append(bytes_by_sample(tensor, dim, samples))
    if scope == OF_BATCH:
        for rows in of_samples:
            start.update(rows.data)
    keys = []
    for sample in range(samples):
        key = start.copy()
        if scope != OF_SAMPLE:
            key.update(sample.to_bytes(8, "big"))
        for rows in of_samples:
            key.update(rows[sample].data)
        keys.append(key.digest())
    return keys


def orders(samples: int) -> dict[str, list[int]]:
    """The facts that may decide values -> the samples of a micro-batch in an order that shows
    whether other facts do, too.

    >>> orders(4)
    {'sample': [1, 1, 0, 0], 'place': [0, 0, 2, 2]}
    """
    return {
        OF_SAMPLE: [(samples - 1 - place) // 2 for place in range(samples)],
        OF_PLACE: [place - place % 2 for place in range(samples)],
    }


def reordered(argument: Tensor, dim: int | None, order: Sequence[int]) -> Tensor:
    """An argument with its samples in another order."""
    if dim is None:
        return argument
    return argument.index_select(dim, torch.tensor(order, device=argument.device))
