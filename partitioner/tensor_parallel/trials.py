"""Tries how an operation runs on parts: its results say whether that is a way to divide it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from ...runtime.tensor_parallel.ranks import Split
from .candidates import Candidates, kinds_in
from .decisions import SPLIT_FUNCTIONS, Decision, layer_for, moved, probed_layer
from .example_run import cloned
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


class Trials:
    """Tries the operations of a probe's model on parts, each kind of operation once.

    candidates: the ways in which they might run
    """

    def __init__(self, probe: Probe) -> None:
        self._probe, self.candidates = probe, Candidates(probe)
        self._known: dict[Any, Decision | Unplaced] = {}

    def found(
        self, node: fx.Node, places: dict[fx.Node, Placement], opening: Decision | None = None
    ) -> Decision | Unplaced:
        """The decision for a node on parts, or for one of the openings of a product: found with the
        first node of its kind, once."""
        first = self._probe.run.first[node]
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

    def _continued(self, node: fx.Node, places: dict[fx.Node, Placement]) -> Decision:
        last: Unplaced = Unplaced("no dimension of its result is split")
        for candidate in self.candidates.continuations(node, places):
            try:
                return self._tried(node, places, candidate)
            except Unplaced as error:
                last = error
        raise last

    def _tried(
        self, node: fx.Node, places: dict[fx.Node, Placement], candidate: Decision
    ) -> Decision:
        """The candidate with the placement of its result. Raises Unplaced if it cannot run, or if
        its results cannot make the whole value."""
        probe = self._probe
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
        """The results of the ranks under the candidate. Raises Unplaced if it cannot run."""
        captured = (node.op, node.target, node.args, node.kwargs)
        own = {**places, **candidate.places}
        layer = probed_layer(self._probe.run.module(node), candidate, self._probe.size)
        try:
            if candidate.function is not None:
                node.op, node.target = "call_function", candidate.function
            if candidate.arguments is not None:
                node.args, node.kwargs = candidate.arguments
            is_exchanging = candidate.function is not None
            return self._probe.results(
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
        if node.meta["random"] and self._probe.run.training:
            return
        for draw in range(2):
            values = self._probe.other_values(node, draw)
            try:
                whole = self._probe.run.call(
                    node, {n: cloned(value) for n, value in values.items()}
                )
            except Exception:  # The operation has rules for its inputs.
                return
            results = self._results(node, places, candidate, values)
            if not lie_so([value for value, _ in results], whole, result):
                raise Unplaced("its results lie otherwise for other values")

    def _expressible(self, node: fx.Node, decision: Decision) -> Decision:
        """The decision. Raises Unplaced if no split layer or function computes it."""
        module = self._probe.run.module(node)
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
        for source, whole in self._probe.run.after(node).items():
            if not is_split(places.get(source)):
                raise Unplaced("it changes a whole value in place")
            for rank, (_, given) in enumerate(results):
                expected = self._probe.part(whole, own.get(source), rank)
                if not _same(given[source], expected):
                    raise Unplaced("it changes a value in place")


def _same(first: Any, second: Any) -> bool:
    return not isinstance(second, Tensor) or is_close(first, second)


def _needs_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad
