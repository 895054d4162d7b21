"""The cached tensors of a sample: their layout, and their bytes in the arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .arena import Arena, Entry
from .marks import Leaf
from .reads import Rows

Bytes = npt.NDArray[np.uint8]
"""The bytes of each sample, as rows."""


@dataclass(frozen=True)
class Form:
    """The layout of a tensor, and where it has the values of a sample; None for none."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rows: Rows | None

    @classmethod
    def of(cls, tensor: Tensor, rows: Rows | None) -> Form:
        """That of a tensor; overlapping memory has none of its own."""
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
    flat = tensor.detach().movedim(dim, 0).contiguous().cpu().view(-1)
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
        """Where the bytes of each tensor begin in those of a sample, for all that have samples."""
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
