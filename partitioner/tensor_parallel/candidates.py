"""The ways in which an operation might run on parts: which weights, inputs and sizes are split."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, count
from math import prod
from typing import Any

from torch import Tensor, fx, nn

from ...runtime.tensor_parallel.ranks import Groups, Split, split_of_length
from ..capture.arguments import map_leaves
from ..capture.values import Local, Size
from .decisions import Decision
from .example_run import Samples
from .exchanging import split_version
from .fused_blocks import blocks_behind
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
        module = self._probe.run.module(node)
        if isinstance(module, nn.Embedding) and self._is_vocabulary(node, module):
            yield Decision(state={"weight": self._of_length(0, module.num_embeddings)})
        for dim in range(max((weight.dim() for weight in weights.values()), default=0)):
            if dim == 0 and isinstance(module, nn.Embedding):
                continue
            for groups in self._blocks(node, weights, dim):
                split = Split(dim, groups)
                if opening := self._with_weights(node, weights, split, Split(0, groups)):
                    yield opening
        if type(module) is nn.Linear:
            split = self._of_length(0, module.out_features)
            if split.length is not None and (
                opening := self._with_weights(node, weights, split, split)
            ):
                yield opening

    def _of_length(self, dim: int, length: int) -> Split:
        return split_of_length(dim, length, self._probe.size)

    def _is_vocabulary(self, node: fx.Node, module: nn.Embedding) -> bool:
        """True if the rows of an embedding can be divided, and are more numbers than the sum that
        makes the embeddings of a sample whole."""
        options = (module.max_norm, module.scale_grad_by_freq, module.sparse)
        words = next(iter(node.all_input_nodes), None)
        if type(module) is not nn.Embedding or any(options) or words is None:
            return False
        spec = self._probe.capture.tensor_spec(words)
        sample = spec.resolve({**self._probe.capture.sizes, "batch": 1})
        return module.num_embeddings > prod(sample)

    def _blocks(self, node: fx.Node, weights: Mapping[Any, Tensor], dim: int) -> list[Groups]:
        """The blocks that the output of a product may have: usual ones, then those that its readers
        take apart."""
        lengths = {weight.shape[dim] for weight in weights.values() if dim < weight.dim()}
        read = blocks_behind(node, lengths.pop()) if len(lengths) == 1 else []
        return list(dict.fromkeys((*FUSED, *read)))

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
        """The decision that splits the weights this way, and vectors such as biases like `vectors`;
        None if the sizes make it impossible."""
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
        kinds = kinds_in(places)
        if (exchanging := self._exchanging(node, places)) is not None:
            yield exchanging
        plain = [
            Decision(),
            *self._with_state(node, kinds),
            *self._with_inputs(node, places, kinds),
        ]
        yield from plain
        uneven = {kind.length for kind in kinds}
        sizes = DividedSizes(self._probe.size, self._probe.run.sizes, uneven)
        for arguments in sizes.of((node.args, node.kwargs)):
            for candidate in plain:
                yield replace(candidate, arguments=arguments)

    def _exchanging(self, node: fx.Node, places: dict[fx.Node, Placement]) -> Decision | None:
        """The split version of a loss, whose ranks exchange something."""
        for source, place in places.items():
            if isinstance(place, Split) and place.groups == 1:
                classes = self._probe.run.like(source).shape[place.dim]
                version = split_version(node, self._probe.run.module(node), source, classes)
                if version is not None:
                    return Decision(function=version[0], arguments=version[1:])
        return None

    def _with_state(self, node: fx.Node, kinds: Collection[Split]) -> Iterator[Decision]:
        """The ways to split the weights that a node reads in addition to its parts."""
        weights = self.weights(node)
        dims = range(max((weight.dim() for weight in weights.values()), default=0))
        for kind in kinds:
            if isinstance(kind.groups, Samples):
                continue
            if weights:
                for dim in reversed(dims):
                    for vectors in (Summands(), kind, None):
                        found = self._with_weights(node, weights, replace(kind, dim=dim), vectors)
                        if found is not None:
                            yield found
            elif self._probe.run.module(node) is not None:
                found = self._with_weights(node, {}, kind, kind)
                if found is not None and any(found.state.values()):
                    yield found

    def _with_inputs(
        self, node: fx.Node, places: dict[fx.Node, Placement], kinds: Collection[Split]
    ) -> Iterator[Decision]:
        """The ways to take a part of one whole input in addition to the parts."""
        for source in node.all_input_nodes:
            value = self._probe.run.like(source)
            if source in places or not isinstance(value, Tensor):
                continue
            for dim in reversed(range(value.dim())):
                for split in (replace(kind, dim=dim) for kind in kinds):
                    if source.op == "get_attr" and isinstance(split.groups, Samples):
                        continue
                    if split.fits(value.shape[dim], self._probe.size) and value.shape[dim] > 1:
                        yield Decision(places={source: split})


def kinds_in(places: Mapping[Any, Any]) -> list[Split]:
    """The kinds of splits in placements, whatever their dimension: as splits of dimension 0."""
    found = {replace(split, dim=0) for place in places.values() for split in splits_in(place)}
    return sorted(found, key=lambda split: (str(split.groups), split.length or 0))


@dataclass(frozen=True)
class DividedSizes:
    """The sizes in arguments of which each rank has a share.

    size: the number of ranks
    sizes: the sizes of the example by symbol
    uneven: lengths that the ranks divide unequally
    """

    size: int
    sizes: Mapping[str, int]
    uneven: Collection[int | None] = ()

    def of(self, arguments: Any) -> Iterator[Any]:
        """The arguments with one size or several divided, numbers or those that depend on the
        input's, such as that of heads and samples together."""
        places: list[int] = []

        def find(leaf: Any) -> Any:
            if self._is_divided(leaf):
                places.append(len(places))
            return leaf

        map_leaves(find, arguments)
        for number in range(1, min(len(places), _MOST_SIZES) + 1):
            for chosen in combinations(places, number):
                position = count()
                yield map_leaves(partial(self._replaced, frozenset(chosen), position), arguments)

    def _is_divided(self, leaf: Any) -> bool:
        number = leaf.evaluate(self.sizes) if isinstance(leaf, Size) else leaf
        if type(number) is not int or number <= 1:
            return False
        return number % self.size == 0 or (leaf is number and number in self.uneven)

    def _replaced(self, chosen: Collection[int], position: Iterator[int], leaf: Any) -> Any:
        if not self._is_divided(leaf) or next(position) not in chosen:
            return leaf
        return Local(leaf, uneven=leaf in self.uneven and leaf % self.size > 0)
