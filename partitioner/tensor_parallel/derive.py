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
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import inf, prod
from typing import Any

import networkx as nx
from torch import Tensor, fx

from ...runtime.tensor_parallel.ranks import Split
from ..capture import Capture
from ..capture.graph import tensor_spec
from .candidates import Candidates, kinds_in
from .decisions import SPLIT_FUNCTIONS, Decision, layer_for, moved, probed_layer
from .example_run import cloned
from .exchanging import has_loss
from .probe import (
    Placement,
    Probe,
    Summands,
    Unplaced,
    is_close,
    is_split,
    items_of,
    lie_so,
    splits_in,
)

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
    closed: the products that do not, by node
    returned: the lengths of results of the model that are in parts, along the dimension of these
    """

    size: int
    decisions: Mapping[fx.Node, Decision]
    closed: Mapping[fx.Node, Closed]
    returned: Mapping[fx.Node, int] = field(default_factory=dict)


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
        self._candidates = Candidates(probe)
        self.closed: dict[fx.Node, Closed] = {}
        self.returned: dict[fx.Node, int] = {}
        self._choice: dict[fx.Node, int] = {}
        self._tried_before: dict[fx.Node, Closed] = {}
        self._known: dict[Any, Decision | Unplaced] = {}
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
            weights = [self._candidates.weights(source).values() for source in sources[node]]
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
        layer, by a tied one, or as a tensor."""
        places: dict[int, set[Any]] = {}
        readers: dict[int, frozenset[fx.Node]] = {}
        tensors = {**dict(self.probe.capture.model.named_parameters(remove_duplicate=False))}
        for node in self.probe.capture.graph.nodes:
            decision = decisions.get(node, Decision())
            read: dict[int, Any] = {}
            if (module := self.probe.run.module(node)) is not None:
                read = {id(p): decision.state.get(name) for name, p in module.named_parameters()}
            elif node.op == "get_attr" and str(node.target) in tensors:
                read = {id(tensors[str(node.target)]): "tensor"}
            for tensor, place in read.items():
                places.setdefault(tensor, set()).add(place)
                if isinstance(place, Split):
                    readers[tensor] = readers.get(tensor, frozenset()) | sources[node]
        for tensor, found in places.items():
            if len(found) > 1 and tensor in readers:
                first = min(readers[tensor])
                raise _Failed(
                    first, "its weights are also read whole", readers[tensor], is_final=True
                )

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
            if alone and choice < len(list(self._candidates.openings(node))):
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
        found = self._found(node, places)
        if isinstance(found, Unplaced):
            raise _Failed(node, str(found), sources)
        return found

    def _found(
        self, node: fx.Node, places: dict[fx.Node, Placement], opening: Decision | None = None
    ) -> Decision | Unplaced:
        """The decision for a node on parts, or for one of the openings of a product: found with the
        first node of its kind, once."""
        first = self.probe.run.first[node]
        inputs = tuple(places.get(source) for source in node.all_input_nodes)
        opened = None if opening is None else moved(opening, node, first)
        key = (first, inputs, opened and (*opened.places.items(), *opened.state.items()))
        if key not in self._known:
            own: dict[fx.Node, Placement] = {
                n: place for n, place in zip(first.all_input_nodes, inputs, strict=True) if place
            }
            try:
                if opened is None:
                    self._known[key] = self._continued(first, own)
                else:
                    self._known[key] = self._tried(first, {}, opened)
            except Unplaced as error:
                # Its traceback would keep the tensors of all frames.
                self._known[key] = Unplaced(str(error))
        found = self._known[key]
        return found if isinstance(found, Unplaced) or first is node else moved(found, first, node)

    # --- opening a product ------------------------------------------------------------------

    def _opened(self, node: fx.Node) -> Decision | None:
        if node in self.closed:
            return None
        openings = list(self._candidates.openings(node))
        if not openings:
            return None
        for choice in range(self._choice.get(node, 0), len(openings)):
            self._choice[node] = choice
            known = self._found(node, {}, openings[choice])
            if isinstance(known, Decision) and (known.sums or isinstance(known.result, Split)):
                return known
        shapes = [str(tuple(weight.shape)) for weight in self._candidates.weights(node).values()]
        why = f"{self.probe.size} ranks {_NUMBERS} its weights of {' and '.join(shapes)}"
        self.closed[node] = self._tried_before.get(node) or Closed(why, node)
        return None

    # --- continuing with parts --------------------------------------------------------------

    def _continued(self, node: fx.Node, places: dict[fx.Node, Placement]) -> Decision:
        last: Unplaced = Unplaced("no dimension of its result is split")
        for candidate in self._candidates.continuations(node, places):
            try:
                return self._tried(node, places, candidate)
            except Unplaced as error:
                last = error
        raise last

    def _tried(
        self, node: fx.Node, places: dict[fx.Node, Placement], candidate: Decision
    ) -> Decision:
        """The candidate with the placement of its result. Raises Unplaced if it does not run, or
        its results do not make the whole value."""
        probe = self.probe
        results = self._results(node, places, candidate)
        whole = probe.run.whole(node)
        kinds = kinds_in({**places, **dict(enumerate((Split(0), *candidate.splits)))})
        result = probe.placement([value for value, _ in results], whole, kinds)
        self._verify_changes(node, places, candidate, results)
        self._verify_others(node, places, candidate, result)
        if isinstance(result, Summands):
            if isinstance(whole, Tensor) and not whole.is_floating_point():
                raise Unplaced("summands of whole numbers")
            decision = replace(candidate, result=None, sums=True)
            return self._expressible(node, decision)
        if any(isinstance(place, Summands) for place in items_of(result)):
            raise Unplaced("summands among several results")
        if candidate.once or Summands() in candidate.state.values():
            raise Unplaced("a bias that one rank alone has")
        if result is None and _needs_gradient(node) and candidate.function is None:
            raise Unplaced("each rank has the whole result, but parts of its gradient")
        return self._expressible(node, replace(candidate, result=result))

    def _results(
        self,
        node: fx.Node,
        places: Mapping[fx.Node, Placement],
        candidate: Decision,
        values: Mapping[fx.Node, Any] | None = None,
    ) -> list[tuple[Any, dict[fx.Node, Any]]]:
        """What the ranks compute under the candidate. Raises Unplaced if it does not run."""
        captured = (node.op, node.target, node.args, node.kwargs)
        own = {**places, **candidate.places}
        layer = probed_layer(self.probe.run.module(node), candidate, self.probe.size)
        try:
            if candidate.function is not None:
                node.op, node.target = "call_function", candidate.function
            if candidate.arguments is not None:
                node.args, node.kwargs = candidate.arguments
            is_exchanging = candidate.function is not None
            return self.probe.results(
                *(node, own, candidate.state, candidate.once, values, layer),
                exchanging=is_exchanging,
            )
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            raise Unplaced(str(error).partition("\n")[0]) from error
        finally:
            node.op, node.target, node.args, node.kwargs = captured

    def _verify_others(
        self,
        node: fx.Node,
        places: Mapping[fx.Node, Placement],
        candidate: Decision,
        result: Placement | Summands,
    ) -> None:
        """Raises Unplaced if the results lie otherwise for other values, because the example has a
        bias of zeros, or a condition that is true on all ranks."""
        if node.meta["random"]:
            return
        for draw in range(2):
            values = self.probe.other_values(node, draw)
            try:
                whole = self.probe.run.call(node, {n: cloned(value) for n, value in values.items()})
            except Exception:  # The operation has rules for its inputs.
                return
            results = self._results(node, places, candidate, values)
            if not lie_so([value for value, _ in results], whole, result):
                raise Unplaced("its results lie otherwise for other values")

    def _expressible(self, node: fx.Node, decision: Decision) -> Decision:
        """The decision. Raises Unplaced if no split layer or function computes it."""
        module = self.probe.run.module(node)
        if decision.function is not None:
            return decision
        if module is not None and layer_for(module, decision) is None:
            raise Unplaced(f"there is no {type(module).__name__} with such parts")
        if module is None and node.meta["random"]:
            is_uneven = any(split.length is not None for split in splits_in(decision.result))
            if node.target not in SPLIT_FUNCTIONS or is_uneven:
                raise Unplaced("it draws random numbers")
        return decision

    def _verify_changes(
        self,
        node: fx.Node,
        places: Mapping[fx.Node, Placement],
        candidate: Decision,
        results: list[tuple[Any, Any]],
    ) -> None:
        """Raises Unplaced where a node changes the memory of its inputs in another way than it does
        in the whole model, or that of a whole value of which it has a copy."""
        own = {**places, **candidate.places}
        for source, whole in self.probe.run.after(node).items():
            if not is_split(places.get(source)):
                raise Unplaced("it changes a whole value in place")
            for rank, (_, given) in enumerate(results):
                expected = self.probe.part(whole, own.get(source), rank)
                if not _same(given[source], expected):
                    raise Unplaced("it changes a value in place")


def _same(first: Any, second: Any) -> bool:
    return not isinstance(second, Tensor) or is_close(first, second)


def _needs_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad


def operation_name(node: fx.Node) -> str:
    """The operation of a node with the line that it comes from: `layer_norm (model.py:12)`."""
    target = node.target
    name = str(target if isinstance(target, str) else getattr(target, "__name__", target))
    file, line = node.meta.get("source") or ("", 0)
    where = f" ({file.rpartition('/')[2]}:{line})" if file else ""
    return f"{name.rpartition('.')[2]}{where}"
