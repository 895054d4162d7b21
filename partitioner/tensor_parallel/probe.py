"""Runs single operations of a captured graph on parts of their operands.

In a split layer, each rank runs an operation on its parts. The placement of the result says how the
ranks' values make the whole value: they are equal to it, parts along a dimension, or summands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...runtime.tensor_parallel.ranks import Split, TensorRanks, using
from ...runtime.tensor_parallel.threads import in_threads
from ..capture import Capture
from ..capture.model_state import Noise, in_mode, working_copies
from .example_run import ExampleRun, cloned

Placement = Split | tuple[Any, ...] | None
"""How a value lies on the ranks: whole on each (None), in parts, or a tuple of placements."""


class Unplaced(Exception):
    """The results of the ranks are not parts of the value of the whole model."""


@dataclass(frozen=True, slots=True)
class Summands:
    """The placement of results whose sum is the whole value."""


class Probe:
    """Runs the nodes of one captured graph on the parts of `size` ranks."""

    def __init__(
        self, capture: Capture, inputs: Mapping[str, Any], size: int, *, divides: bool = False
    ) -> None:
        self.capture, self.size = capture, size
        self.run = ExampleRun(capture, inputs, size, divides=divides)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, parameters have noise, and the values of the whole model are known."""
        model = self.capture.model
        with working_copies(model, Noise.ALL, self.capture.changed), torch.no_grad():
            self.run.start()
            with in_mode(model, self.run.training):
                yield

    def results(
        self,
        node: fx.Node,
        places: Mapping[fx.Node, Placement],
        state: Mapping[str, Split | Summands | None],
        once: Collection[fx.Node] = (),
        values: Mapping[fx.Node, Any] | None = None,
        layer: nn.Module | None = None,
        *,
        exchanging: bool = False,
    ) -> list[tuple[Any, dict[fx.Node, Any]]]:
        """The result of each rank, with the values of the node's inputs afterwards if it changes
        them.

        `places` are those of the inputs, `state` those of the parameters and buffers of the module
        that the node calls, or of a split `layer` in its place; `once` are inputs, and `Summands`
        marks parameters, that are whole on the first rank and zero on the others. `values` are
        those of the inputs in the whole model, if they are not those of its run. The ranks run
        together if they are `exchanging` something, and else each by itself.
        """
        run = self.run
        tensors = run.tensors.of_module(str(node.target)) if any(state.values()) else {}
        values = values or {source: run.at(node, source) for source in node.all_input_nodes}

        def result(ranks: TensorRanks) -> tuple[Any, dict[fx.Node, Any]]:
            given: dict[fx.Node, Any] = {}
            for source, value in values.items():
                part = self.part(value, places.get(source), ranks.rank)
                if source.op != "get_attr":
                    part = laid_out(part, value)
                part = part * (ranks.rank == 0) if source in once else part
                given[source] = cloned(part) if node.meta["mutates"] else part
            own = {
                name: tensors[name] * (ranks.rank == 0)
                if isinstance(place, Summands)
                else self.part(tensors[name], place, ranks.rank)
                for name, place in state.items()
                if place is not None
            }
            with torch.no_grad(), using(ranks):
                result = run.call(node, given, own, layer)
            return result, given if node.meta["mutates"] else {}

        if exchanging:
            return in_threads(self.size, result)
        return [result(TensorRanks(rank, self.size)) for rank in range(self.size)]

    def part(self, value: Any, place: Placement, rank: int) -> Any:
        """The part of a value on a rank, under a placement."""
        if place is None:
            return value
        if isinstance(place, Split):
            return place.part(value, rank, self.size)
        kind = type(value)
        parts = [self.part(item, own, rank) for item, own in zip(value, place, strict=True)]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)

    def other_values(self, node: fx.Node, draw: int) -> dict[fx.Node, Any]:
        """Other values for the inputs of a node that are computed: of floating point, and
        conditions of which one alone is true or false."""
        return {
            source: value if source.op == "get_attr" else _other(value, draw)
            for source in node.all_input_nodes
            for value in [self.run.at(node, source)]
        }

    def placement(self, results: Sequence[Any], whole: Any, kinds: Collection[Split]) -> Any:
        """How the results of the ranks lie: in parts of one of the `kinds`, whatever their
        dimension. Raises Unplaced if they cannot make the whole value."""
        if isinstance(whole, (tuple, list)):
            if any(len(result) != len(whole) for result in results):
                raise Unplaced("another number of results")
            return tuple(
                self.placement([result[i] for result in results], item, kinds)
                for i, item in enumerate(whole)
            )
        if not isinstance(whole, Tensor):
            if all(result == whole for result in results):
                return None
            raise Unplaced("a number that depends on the part")
        if all(is_close(result, whole) for result in results):
            return None
        return self._split(results, whole, kinds)

    def _split(self, results: Sequence[Tensor], whole: Tensor, kinds: Collection[Split]) -> Any:
        shapes = [tuple(result.shape) for result in results]
        if set(shapes) == {tuple(whole.shape)}:
            if whole.is_floating_point() and is_close(torch.stack(list(results)).sum(0), whole):
                return Summands()
            raise Unplaced("neither equal nor summands")
        of_samples = [Split(0, self.run.samples)] if self.run.samples else []
        for dim, length in enumerate(whole.shape):
            for split in (replace(kind, dim=dim) for kind in (*kinds, *of_samples)):
                if not split.fits(length, self.size):
                    continue
                of_ranks = (split.part_shape(whole.shape, r, self.size) for r in range(self.size))
                if shapes == list(of_ranks) and _are_parts(results, whole, split):
                    return split
        raise Unplaced("no parts of the whole")


def lie_so(results: Sequence[Any], whole: Any, place: Placement | Summands) -> bool:
    """True if the results of the ranks make the whole value in the way that `place` says."""
    if isinstance(place, tuple):
        return all(
            lie_so([result[i] for result in results], whole[i], own) for i, own in enumerate(place)
        )
    if not isinstance(whole, Tensor):
        return all(result == whole for result in results)
    if isinstance(place, Split):
        return _are_parts(results, whole, place)
    if isinstance(place, Summands):
        return is_close(torch.stack(list(results)).sum(0), whole)
    return all(is_close(result, whole) for result in results)


def _are_parts(results: Sequence[Tensor], whole: Tensor, place: Split) -> bool:
    """True if the results of the ranks are the parts of the whole value up to rounding."""
    parts = [place.part(whole, rank, len(results)) for rank in range(len(results))]
    pairs = list(zip(results, parts, strict=True))
    is_alike = all(isinstance(a, Tensor) and a.dtype == b.dtype for a, b in pairs)
    if is_alike and all(torch.equal(*pair) for pair in pairs):
        return True
    return is_close(place.whole(results), whole)


def _other(value: Any, draw: int) -> Any:
    if isinstance(value, (tuple, list)):
        items = [_other(item, draw) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, Tensor) or not value.numel():
        return value
    if value.dtype == torch.bool:
        other = torch.full_like(value, bool(draw), memory_format=torch.contiguous_format)
        other.view(-1)[-1] = not draw
        return other
    return torch.randn_like(value) if value.is_floating_point() or value.is_complex() else value


def laid_out(part: Any, whole: Any) -> Any:
    """A part in the layout in which a rank computes it, if the whole value fills its memory."""
    if not isinstance(part, Tensor) or part is whole or not part.numel():
        return part
    last = sum(
        (length - 1) * stride for length, stride in zip(whole.shape, whole.stride(), strict=True)
    )
    if last + 1 != whole.numel():
        return part
    order = sorted(range(whole.dim()), key=lambda dim: -whole.stride(dim))
    return torch.empty_permuted(part.shape, order, dtype=part.dtype).copy_(part)


def is_close(value: Any, whole: Tensor) -> bool:
    """True if a value equals that of the whole model up to rounding."""
    if not isinstance(value, Tensor) or value.shape != whole.shape or value.dtype != whole.dtype:
        return False
    if torch.equal(value, whole):
        return True
    if not whole.is_floating_point():
        return False
    tolerance = torch.finfo(whole.dtype).eps ** 0.5
    if whole.element_size() < 4:
        value, whole = value.float(), whole.float()
    size = whole.abs()
    is_usual = size < _LARGE
    scale = float(size.where(is_usual, 0).sum(dtype=torch.float64) / is_usual.sum().clamp(min=1))
    # Most values that are tried differ everywhere: a part of them tells so at once.
    rows = slice(None, None, max(1, len(whole) // 8)) if whole.dim() else ...
    return all(
        torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        for first, second in ((value[rows], whole[rows]), (value, whole))
    )


_LARGE = 1e30
"""Larger numbers mask positions."""


def items_of(place: Any) -> list[Any]:
    """The placements of the items of a value."""
    if isinstance(place, tuple):
        return [leaf for item in place for leaf in items_of(item)]
    return [place]


def splits_in(place: Any) -> list[Split]:
    """The splits of the items of a value that are in parts."""
    return [leaf for leaf in items_of(place) if isinstance(leaf, Split)]


def is_split(place: Placement) -> bool:
    """True if a value, or a part of it, is in parts."""
    return bool(splits_in(place))
