"""The ways in which an operation might run on parts: which weights, inputs and sizes are split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import Tensor, fx

from ...runtime.tensor_parallel.ranks import Split
from ..capture.arguments import map_leaves
from ..capture.values import Local
from .decisions import Decision
from .probe import Placement, Probe, Summands, splits_in

FUSED = (1, 3, 2)
"""The numbers of equal blocks that the output of one product may have: one projection, queries with
keys and values, gates with values."""
_MOST_SIZES = 3
"""The most sizes in one operation that are divided together."""


class Candidates:
    """Decisions to try, without the placement of the result."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def openings(self, node: fx.Node) -> Iterator[Decision]:
        """The ways to give a node a part of its weights, the most usual first."""
        if node.meta["random"] or node.meta["mutates"]:
            return
        weights = self.weights(node)
        for dim in range(max((weight.dim() for weight in weights.values()), default=0)):
            for groups in FUSED:
                split = Split(dim, groups)
                if opening := self._with_weights(node, weights, split, Split(0, groups)):
                    yield opening

    def weights(self, node: fx.Node) -> dict[Any, Tensor]:
        """The parameters of at least two dimensions that a node reads: by their names in the module
        that it calls, or by their nodes."""
        module = self._probe.run.module(node)
        if module is not None:
            return {name: p for name, p in module.named_parameters() if p.dim() > 1}
        return {
            n: value for n in node.all_input_nodes if (value := self._parameter(n, 2)) is not None
        }

    def _parameter(self, node: fx.Node, least: int) -> Tensor | None:
        """The parameter of at least that many dimensions that a node reads."""
        tensors = self._probe.run.tensors
        if not tensors.is_parameter(node):
            return None
        value = tensors.like(node)
        return value if value.dim() >= least else None

    def _with_weights(
        self,
        node: fx.Node,
        weights: Mapping[Any, Tensor],
        split: Split,
        vectors: Split | Summands | None,
    ) -> Decision | None:
        """The decision that splits the weights so, and the vectors beside them, such as biases;
        None if the sizes do not allow it."""
        size = self._probe.size
        if not all(
            split.dim < weight.dim() and split.fits(weight.shape[split.dim], size)
            for weight in weights.values()
        ):
            return None
        module = self._probe.run.module(node)
        if module is None:
            beside = [
                n
                for n in node.all_input_nodes
                if (value := self._parameter(n, 1)) is not None and value.dim() == 1
            ]
            places = dict.fromkeys(weights, split)
            if isinstance(vectors, Summands):
                return Decision(places=places, once=tuple(beside))
            fitting = [n for n in beside if self._fits(n, vectors)]
            return Decision(places=places | dict.fromkeys(fitting, vectors) if vectors else places)
        state: dict[str, Any] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in weights:
                state[name] = split
            elif tensor.dim() == 1 and isinstance(vectors, Split):
                if not vectors.fits(len(tensor), size):
                    return None
                state[name] = vectors
            elif tensor.dim() == 1 and name in dict(module.named_parameters()):
                state[name] = vectors
        return Decision(state=state)

    def _fits(self, node: fx.Node, split: Split | None) -> bool:
        value = self._probe.run.like(node)
        return split is not None and split.fits(value.shape[split.dim], self._probe.size)

    def continuations(self, node: fx.Node, places: dict[fx.Node, Placement]) -> Iterator[Decision]:
        """The ways in which a node might run on parts, the simplest first."""
        groups = sorted({split.groups for place in places.values() for split in splits_in(place)})
        plain = [
            Decision(),
            *self._with_state(node, groups),
            *self._with_inputs(node, places, groups),
        ]
        yield from plain
        for arguments in divided_sizes((node.args, node.kwargs), self._probe.size):
            for candidate in plain:
                yield replace(candidate, arguments=arguments)

    def _with_state(self, node: fx.Node, groups: list[int]) -> Iterator[Decision]:
        """The ways to split the weights that a node reads beside its parts."""
        weights = self.weights(node)
        dims = range(max((weight.dim() for weight in weights.values()), default=0))
        for number in groups:
            if weights:
                for dim in reversed(dims):
                    for vectors in (Summands(), Split(0, number), None):
                        found = self._with_weights(node, weights, Split(dim, number), vectors)
                        if found is not None:
                            yield found
            elif self._probe.run.module(node) is not None:
                found = self._with_weights(node, {}, Split(0, number), Split(0, number))
                if found is not None and any(found.state.values()):
                    yield found

    def _with_inputs(
        self, node: fx.Node, places: dict[fx.Node, Placement], groups: list[int]
    ) -> Iterator[Decision]:
        """The ways to take a part of one whole input beside the parts."""
        for source in node.all_input_nodes:
            value = self._probe.run.like(source)
            if source in places or not isinstance(value, Tensor):
                continue
            for dim in reversed(range(value.dim())):
                for number in groups:
                    split = Split(dim, number)
                    if split.fits(value.shape[dim], self._probe.size) and value.shape[dim] > 1:
                        yield Decision(places={source: split})


def divided_sizes(arguments: Any, size: int) -> Iterator[Any]:
    """The arguments with one size or several as `Local` ones."""
    places: list[int] = []

    def count(leaf: Any) -> Any:
        if type(leaf) is int and leaf > 1 and leaf % size == 0:
            places.append(len(places))
        return leaf

    map_leaves(count, arguments)
    for number in range(1, min(len(places), _MOST_SIZES) + 1):
        for chosen in combinations(places, number):
            yield map_leaves(_divider(frozenset(chosen), size), arguments)


def _divider(chosen: frozenset[int], size: int) -> Callable[[Any], Any]:
    position = -1

    def divide(leaf: Any) -> Any:
        nonlocal position
        if type(leaf) is not int or leaf <= 1 or leaf % size:
            return leaf
        position += 1
        return Local(leaf) if position in chosen else leaf

    return divide
