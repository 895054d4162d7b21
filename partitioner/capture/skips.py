"""Layers that training leaves out at random -> nodes that are run unless a number says so.

`if torch.rand([]) < self.layerdrop: continue` has no one answer. The graph is that of the answers
that do most; for each such decision forward runs once more with the other answer. What is missing
from that graph is what the decision leaves out, and what only that graph has is what it does in its
place. Those nodes are in regions of the decision, and what follows reads a choice:
`unless(dropped, made, former)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, fx

from ...runtime.errors import CaptureError
from .automatic_leaves import FailedTrace
from .graph import is_external
from .merge import (
    STORAGES,
    Different,
    Pair,
    call_key,
    common_calls,
    common_externals,
    merged_arguments,
)
from .random_numbers import Draw
from .values import Region


def unless(condition: Any, made: Any, former: Any) -> Any:
    """`former` where the condition holds, else `made`."""
    return former if condition else made


# What draws a number from 0 (included) to 1 (excluded).
_UNIT_DRAWS = (
    "random.random", "np.random.rand", "np.random.random", "np.random.random_sample",
)  # fmt: skip
_RELATIONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def is_drawn(condition: fx.Node) -> bool:
    """Whether a condition compares a number that is drawn anew in every forward with a fixed one:
    a number between 0 and 1 of torch, or any of Python's and NumPy's."""
    if condition.target not in _RELATIONS:
        return False
    left, right = condition.args
    if isinstance(left, fx.Node) and left.target is torch.rand:
        return condition.target is operator.lt and isinstance(right, (int, float))
    return all(map(_is_drawn_number, condition.all_input_nodes))


def _is_drawn_number(node: fx.Node) -> bool:
    if node.meta.get("draws_numbers"):
        return True
    inputs = node.all_input_nodes
    return (
        not isinstance(node.meta["val"], Tensor)
        and bool(inputs)
        and all(map(_is_drawn_number, inputs))
    )


def is_never_true(condition: fx.Node) -> bool:
    """Whether it asks if a number of at least 0 is below 0."""
    if condition.target is not operator.lt or condition.args[1] != 0:
        return False
    drawn = condition.args[0]
    return isinstance(drawn, fx.Node) and (
        drawn.target is torch.rand
        or (isinstance(drawn.target, Draw) and drawn.target.text in _UNIT_DRAWS)
    )


class Traced(Protocol):
    graph: fx.Graph
    decisions: list[fx.Node]


Trace = TypeVar("Trace", bound=Traced)


@dataclass(frozen=True)
class Ways(Generic[Trace]):
    """A trace, the decisions that are true in it, and the traces where one of them is not so."""

    tracer: Trace
    true: frozenset[int]
    others: Mapping[int, Trace]


def both_ways(run: Callable[[frozenset[int]], Trace]) -> Ways[Trace]:
    """The trace with the answers that do most, given a function of the decisions that are true.

    Where a layer is run, its input and its output are two values, and what follows tells which it
    reads; where it is left out, they are one.
    """
    true: frozenset[int] = frozenset()
    tracer = run(true)
    others: dict[int, Trace] = {}
    for place, condition in enumerate(tracer.decisions):
        others[place] = run(true ^ {place})
        if len(others[place].decisions) != len(tracer.decisions):  # A decision within another.
            raise FailedTrace(undecided(condition), ())
        if len(others[place].graph.nodes) > len(tracer.graph.nodes):
            tracer, true, others = others[place], true | {place}, {}
    for place in range(len(tracer.decisions)):
        if place not in others:
            others[place] = run(true ^ {place})
    return Ways(tracer, true, others)


def identity(decisions: Sequence[fx.Node], place: int) -> tuple[object, ...]:
    """The same for a decision in every trace of a model: where it is, and how often it came."""
    where = [(each.meta["source"], each.meta["calls"]) for each in decisions[: place + 1]]
    return (*where[-1], where.count(where[-1]))


def add_decision(ways: Ways[Trace], place: int, decision: int) -> None:
    """Writes both ways of the decision at `place` into the graph, under the number `decision`.

    What the graph does alone is in a region of the decision; what the other way does alone is
    copied into the opposite region. Raises Different where the two cannot be one graph.
    """
    condition, other = ways.tracer.decisions[place], ways.others[place].graph
    _Decision(ways.tracer.graph, condition, other, decision, place in ways.true).write()


class _Decision:
    def __init__(
        self, graph: fx.Graph, condition: fx.Node, other: fx.Graph, decision: int, is_true: bool
    ) -> None:
        self.graph, self.condition, self.decision = graph, condition, decision
        self.is_true = is_true
        self.others = list(other.nodes)
        # Former decisions stand in this graph alone: what they choose, and what they copied.
        chosen = [node for node in graph.nodes if node.target is unless]
        self.now: dict[fx.Node, fx.Node] = {node.meta["made"]: node for node in chosen}
        copied = (node for node in graph.nodes if node.meta.get("copied"))
        self.former = {*chosen, *copied}
        self.pairs = [*common_externals(graph, other), *self._same_calls()]
        self.partner = {there: here for here, there in self.pairs}
        self.here: dict[fx.Node, fx.Node] = {}  # Nodes of the other graph in this one.
        self.storages: dict[int, int] = {}
        self.choices: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.last = condition

    def write(self) -> None:
        if any(region.decision >= 0 for region in self.condition.meta["regions"]):
            raise Different  # A decision within another.
        kept = {*self.partner.values(), *self.former}
        alone = [node for node in self.graph.nodes if node not in kept and not is_external(node)]
        if alone and alone[0] < self.condition:
            raise Different
        for node in alone:
            self._place(node, self.is_true, node.meta["regions"])
        self.condition.meta["decision"] = self.decision
        for node, there in self.pairs:
            self.storages.update(zip(_storages(there), _storages(node), strict=False))
        self._copy_others()
        hint = "kept" if self.is_true else "dropped"
        self.condition.meta["hint"] = "drawn" if self.here else hint
        self.last = max([self.condition, *alone])
        for node, there in self.pairs:
            if not is_external(node):
                node.args = merged_arguments(node.args, there.args, self._chosen)
                node.kwargs = merged_arguments(node.kwargs, there.kwargs, self._chosen)

    def _same_calls(self) -> list[Pair]:
        """Up to the decision the two graphs are the same, and after it they end the same."""
        nodes = [
            node for node in self.graph.nodes if node not in self.former and not is_external(node)
        ]
        others = [node for node in self.others if not is_external(node)]
        start = nodes.index(self.condition) + 1
        rest = min(len(nodes), len(others)) - start
        end = 0
        while end < rest and call_key(nodes[-1 - end]) == call_key(others[-1 - end]):
            end += 1
        between = (each[start : len(each) - end] for each in (nodes, others))
        outside = (each[:start] + each[len(each) - end :] for each in (nodes, others))
        return [*zip(*outside, strict=True), *common_calls(*between)]

    def _place(self, node: fx.Node, is_true: bool, regions: tuple[Region, ...]) -> None:
        region = Region("if" if is_true else "unless", decision=self.decision)
        node.meta["regions"] = (region, *regions)

    def _copy_others(self) -> None:
        """Copies what the other graph does alone in front of what follows it in both."""
        waiting: list[fx.Node] = []
        for there in self.others:
            here = self.partner.get(there)
            if here is not None and not is_external(here):
                for node in waiting:
                    self._copy(node, here)
                waiting = []
            elif here is None:
                waiting.append(there)

    def _copy(self, there: fx.Node, before: fx.Node) -> None:
        if before < self.condition or before is self.condition:
            raise Different
        with self.graph.inserting_before(before):
            node = self.graph.node_copy(there, self._standing_for)
        node.meta = dict(there.meta)
        for key in STORAGES:
            node.meta[key] = frozenset(map(self._storage, there.meta[key]))
        if not is_external(there):
            self._place(node, not self.is_true, there.meta["regions"])
        node.meta["copied"] = True
        self.here[there] = node

    def _storage(self, there: int) -> int:
        """The number here of memory in the other graph."""
        taken = {number for node in self.graph.nodes for number in node.meta["storages"]}
        return self.storages.setdefault(there, max(taken | {*self.storages.values(), -1}) + 1)

    def _standing_for(self, there: fx.Node) -> fx.Node:
        """The node here of a value in the other graph, as former decisions have it."""
        here = self.here.get(there) or self.partner[there]
        choice = self.now.get(here)
        if choice is None:
            return here
        if all(region.decision < 0 for region in here.meta["regions"]):
            raise Different  # Made before the decision: it may stand for itself or for the choice.
        return choice

    def _chosen(self, made: fx.Node, there: fx.Node) -> fx.Node:
        if self.partner.get(there) is made:
            return made
        former = self._standing_for(there)
        if former is made:
            return made
        if (made, former) not in self.choices:
            last = max(made, former, self.last)
            self.choices[made, former] = self._choice(made, former, last)
        return self.choices[made, former]

    def _choice(self, made: fx.Node, former: fx.Node, last: fx.Node) -> fx.Node:
        values = made.meta["val"], former.meta["val"]
        if not all(isinstance(value, Tensor) for value in values):
            raise Different
        if values[0].dtype != values[1].dtype or made.meta["shape"] != former.meta["shape"]:
            raise Different
        sides = (former, made) if self.is_true else (made, former)
        with self.graph.inserting_after(last):
            node = self.graph.call_function(unless, (self.condition, *sides))
        regions = tuple(region for region in made.meta["regions"] if region.decision < 0)
        node.meta.update(
            made.meta, calls=self.condition.meta["calls"], regions=regions, made=made,
            source=self.condition.meta["source"], random=False, draws_numbers=False,
            mutates=frozenset(), touches=frozenset(), from_sizes=False,
            storages=made.meta["storages"] | former.meta["storages"],
        )  # fmt: skip
        return node


def _storages(node: fx.Node) -> list[int]:
    return sorted(node.meta["storages"])


def is_of_training(condition: fx.Node) -> bool:
    """Whether a decision is made in training alone; in evaluation it is then false."""
    return Region("training") in condition.meta["regions"]


def undecided(condition: fx.Node) -> CaptureError:
    """What to say of a decision that does more than leave something out."""
    file, line = condition.meta["source"]
    return CaptureError(
        f"{file}:{line} decides at random in a way that is no if with an else: within another such "
        "decision, or between values of other shapes.",
        "Set the probability to 0, or keep the module as one node: --leaf Class.",
    )
