"""Which layers of a captured model can be split over t ranks: found by trying.

A product with weights is opened: it gets a part of its weights along one dimension, such that its
result is a part of the whole one. The operations that follow run on parts, as long as their results
are parts of the whole value too, until one of them gives summands: there the split ends with one
sum (Shoeybi et al. 2019, section 3: column- and row-parallel products). Where an operation gives
neither, the products that its parts come from try their next dimension, and are closed at last:
each rank computes them whole.

No table of operations or models is needed: matrix products, attention by heads, gated and grouped
variants, convolutions by channels and fused projections follow from their own kernels, and so do
the sizes in the code (`view(batch, -1, 12, 64)`) that are those of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf, prod
from typing import Any

import networkx as nx
from torch import Tensor, fx, nn

from ...runtime.tensor_parallel.ranks import Split
from ..capture import Capture
from ..capture.graph import tensor_spec
from .decisions import Decision, Positions
from .exchanging import has_loss
from .probe import Placement, Probe, Unplaced, is_split
from .trials import Trials

_NUMBERS = "cannot share out"
_LONGEST = 0.75
"""The longest way of values in parts, as a share of the operations of a stage."""


@dataclass(frozen=True)
class Closed:
    """A product that each rank computes whole.

    reason: why
    node: the operation that could not run on parts
    """

    reason: str
    node: fx.Node


@dataclass(frozen=True)
class Derivation:
    """The split operations of a model.

    size: the number of tensor ranks
    decisions: the operations that run on parts
    closed: the products that stay whole, by node
    returned: the lengths of results of the model that are in parts, along the dimension of these
    positions: the values of which each rank has a part of the positions
    """

    size: int
    decisions: Mapping[fx.Node, Decision]
    closed: Mapping[fx.Node, Closed]
    returned: Mapping[fx.Node, int] = field(default_factory=dict)
    positions: Positions = field(default_factory=Positions)


class _Failed(Exception):
    """An operation that cannot run on parts.

    sources: the products whose parts it reads
    is_final: no other dimension of these products would help
    """

    def __init__(
        self, node: fx.Node, reason: str, sources: frozenset[fx.Node], *, is_final: bool = False
    ) -> None:
        super().__init__(reason)
        self.node, self.reason, self.sources, self.is_final = node, reason, sources, is_final


def derive(capture: Capture, inputs: Mapping[str, Any], size: int, stages: int = 1) -> Derivation:
    """The layers of `capture` that `size` ranks can share out, found on the example `inputs`. No
    value in parts crosses a boundary, so those of several `stages` are within few blocks.

    The model is unchanged afterwards. Runs every operation that reads parts a few times on parts of
    the example's values.
    """
    probe = Probe(capture, inputs, size)
    with probe.ready():
        search = _Search(probe, stages)
        while True:
            try:
                decisions = search.propagated()
                return Derivation(size, decisions, search.closed, search.returned)
            except _Failed as failure:
                search.learn(failure)


class _Search:
    """Propagates placements through the graph, and learns from failures which products to close."""

    def __init__(self, probe: Probe, stages: int) -> None:
        self.probe = probe
        calls = sum(node.op.startswith("call") for node in probe.capture.graph.nodes)
        self._longest = _LONGEST * calls / stages if stages > 1 else inf
        self._start = 0
        self._trials = Trials(probe)
        self.closed: dict[fx.Node, Closed] = {}
        self.returned: dict[fx.Node, int] = {}
        self._choice: dict[fx.Node, int] = {}
        self._tried_before: dict[fx.Node, Closed] = {}
        self._order = {node: place for place, node in enumerate(probe.capture.graph.nodes)}
        self._decisions: dict[fx.Node, Decision] = {}
        self._places: dict[fx.Node, Placement] = {}
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}

    def propagated(self) -> dict[fx.Node, Decision]:
        """The decisions for all nodes that run on parts. Raises _Failed for one that cannot."""
        decisions, places, sources = self._decisions, self._places, self._sources
        for node in list(self._order)[self._start :]:
            split_inputs = [n for n in node.all_input_nodes if is_split(places.get(n))]
            from_ = frozenset().union(*(sources[n] for n in split_inputs))
            if node.op == "output":
                self._verify_returned(node, {n: places[n] for n in split_inputs}, sources)
            if node.op in ("output", "placeholder", "get_attr"):
                continue
            own = {n: places[n] for n in split_inputs}
            decision = self._decision(node, own, from_)
            if decision is None:
                continue
            decisions[node] = decision
            sources[node] = from_ or frozenset([node])
            if is_split(decision.result):
                places[node] = decision.result
        self._verify_weights(decisions, sources)
        self._verify_lengths(places, sources)
        return decisions

    def _verify_returned(
        self,
        output: fx.Node,
        places: Mapping[fx.Node, Placement],
        sources: Mapping[fx.Node, frozenset[fx.Node]],
    ) -> None:
        """Raises _Failed for results of the model in parts that would have to be gathered in each
        step, and save little: narrower than the input of their product, or larger than its weights.
        """
        self.returned, capture = {}, self.probe.capture
        for node, place in places.items():
            weights = [self._trials.candidates.weights(source).values() for source in sources[node]]
            numbers = sum(weight.numel() for weight in chain(*weights))
            length = node.meta["shape"][place.dim] if isinstance(place, Split) else None
            if not isinstance(length, int) or not (
                has_loss(capture)
                or prod(tensor_spec(node).resolve(capture.sizes)) <= numbers < length**2
            ):
                raise _Failed(output, "the model returns its result", sources[node])
            self.returned[node] = length

    def _verify_lengths(
        self,
        places: Mapping[fx.Node, Placement],
        sources: Mapping[fx.Node, frozenset[fx.Node]],
    ) -> None:
        """Raises _Failed if values in parts follow each other over more of the graph than can be in
        one stage."""
        order, graph = self._order, nx.Graph()
        last: dict[fx.Node, fx.Node] = {}
        for node in places:
            graph.add_edges_from((source, node) for source in sources[node])
            last.update(dict.fromkeys(sources[node], node))
        for nodes in nx.connected_components(graph):
            places_in = [order[node] for node in nodes]
            if max(places_in) - min(places_in) <= self._longest:
                continue
            widest = max(nodes & last.keys(), key=lambda node: order[last[node]] - order[node])
            why = f"its parts are read up to {operation_name(last[widest])}, over several stages"
            raise _Failed(widest, why, frozenset([widest]), is_final=True)

    def _verify_weights(
        self,
        decisions: Mapping[fx.Node, Decision],
        sources: Mapping[fx.Node, frozenset[fx.Node]],
    ) -> None:
        """Raises _Failed if a layer's weights are also read otherwise: by another call of the
        layer, by a tied one, or as a tensor; or if a dropout is called for other parts too."""
        places: dict[int, set[Any]] = {}
        readers: dict[int, frozenset[fx.Node]] = {}
        tensors = {**dict(self.probe.capture.model.named_parameters(remove_duplicate=False))}
        dropouts: set[int] = set()
        for node in self.probe.capture.graph.nodes:
            decision = decisions.get(node, Decision())
            read: dict[int, Any] = {}
            if (module := self.probe.run.module(node)) is not None:
                read = {id(p): decision.state.get(name) for name, p in module.named_parameters()}
                if isinstance(module, nn.Dropout):
                    dropouts.add(id(module))
                    read = {id(module): decision.result}
            elif node.op == "get_attr" and str(node.target) in tensors:
                read = {id(tensors[str(node.target)]): "tensor"}
            for tensor, place in read.items():
                places.setdefault(tensor, set()).add(place)
                if isinstance(place, Split):
                    readers[tensor] = readers.get(tensor, frozenset()) | sources[node]
        for tensor, found in places.items():
            if len(found) > 1 and tensor in readers:
                first, is_dropout = min(readers[tensor]), tensor in dropouts
                why = "its weights are also read whole"
                if is_dropout:
                    why = "its dropout is also applied to other values"
                raise _Failed(first, why, readers[tensor], is_final=True)

    def learn(self, failure: _Failed) -> None:
        """Gives the products before a failure another dimension, or closes them."""
        sources = failure.sources
        views = [node for node in sources if all(n.op == "get_attr" for n in node.all_input_nodes)]
        if views and not failure.is_final:
            # Weights read by themselves can follow the parts of the products that they meet.
            sources = frozenset([max(views)])
        alone = len(sources) == 1 and not failure.is_final
        for node in sources:
            choice = self._choice.get(node, 0) + 1
            before = self._tried_before.get(node)
            closed = Closed(self._reason(failure), failure.node)
            if before is not None and _NUMBERS in before.reason:
                closed = before
            if alone and choice < len(list(self._trials.candidates.openings(node))):
                self._choice[node] = choice
                self._tried_before[node] = closed
            else:
                self.closed[node] = closed
        self._continue_at(self._order[min(sources)])

    def _continue_at(self, start: int) -> None:
        """Forgets what was decided from a place in the graph on."""
        self._start = start
        for found in (self._decisions, self._places, self._sources):
            while found and self._order[next(reversed(found))] >= start:
                found.popitem()

    def _reason(self, failure: _Failed) -> str:
        """Why an operation cannot run on parts, in the words of the model."""
        node, size = failure.node, self.probe.size
        if node.op == "output" or failure.is_final:
            return failure.reason
        if node not in self.probe.run.first:
            return failure.reason
        whole = self.probe.run.whole(node)
        inputs = [self.probe.run.like(source) for source in node.all_input_nodes]
        if isinstance(whole, Tensor):
            lengths = {n for value in inputs if isinstance(value, Tensor) for n in value.shape}
            for number, each in pairwise(whole.shape):
                if number * each in lengths and number % size and number > 1 < each:
                    return f"{size} ranks {_NUMBERS} {number} (of {number} x {each})"
        return f"{operation_name(node)} reads all of it"

    def _decision(
        self, node: fx.Node, places: dict[fx.Node, Placement], sources: frozenset[fx.Node]
    ) -> Decision | None:
        if node not in self.probe.run.first:
            if places:
                raise _Failed(node, "it runs in one mode only", sources)
            return None
        if not places:
            return self._opened(node)
        found = self._trials.found(node, places)
        if isinstance(found, Unplaced):
            raise _Failed(node, str(found), sources)
        return found

    # --- opening a product ------------------------------------------------------------------

    def _opened(self, node: fx.Node) -> Decision | None:
        if node in self.closed:
            return None
        openings = list(self._trials.candidates.openings(node))
        if not openings:
            return None
        for choice in range(self._choice.get(node, 0), len(openings)):
            self._choice[node] = choice
            known = self._trials.found(node, {}, openings[choice])
            if isinstance(known, Decision) and (known.sums or isinstance(known.result, Split)):
                return known
        shapes = [
            str(tuple(weight.shape)) for weight in self._trials.candidates.weights(node).values()
        ]
        why = f"{self.probe.size} ranks {_NUMBERS} its weights of {' and '.join(shapes)}"
        self.closed[node] = self._tried_before.get(node) or Closed(why, node)
        return None


def operation_name(node: fx.Node) -> str:
    """The operation of a node with the line that it comes from: `layer_norm (model.py:12)`."""
    target = node.target
    name = str(target if isinstance(target, str) else getattr(target, "__name__", target))
    file, line = node.meta.get("source") or ("", 0)
    where = f" ({file.rpartition('/')[2]}:{line})" if file else ""
    return f"{name.rpartition('.')[2]}{where}"
