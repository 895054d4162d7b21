"""Traces of both answers of forward's random decisions, one by one and together.

The main trace takes the branches with most nodes; for each decision forward runs once more with the
other answer, and `mode_merge` writes each decision as an if of its own. That is forward only if
decisions do not work together, as in `if not kept: kept = [layers[0]]`. So forward runs again with
several decisions taken the other way, and the merged graph has to make the same calls. Three
decisions and fewer are tried in all combinations. Of more, the combinations are tried in which all,
all but one, and about half of them are taken the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, fx

from .fake_inputs import RandomDecisionError
from .graph import is_external
from .leaf_modules import FailedTrace
from .mode_merge import unless, write_decision

_ALL_OF = 3


class Traced(Protocol):
    graph: fx.Graph
    decisions: list[fx.Node]


Trace = TypeVar("Trace", bound=Traced)


@dataclass(frozen=True)
class Ways(Generic[Trace]):
    """Traces of both answers of each random decision.

    tracer: the main trace
    true: the numbers of the decisions that are true in it
    others: for each decision, the trace with the other answer
    """

    tracer: Trace
    true: frozenset[int]
    others: Mapping[int, Trace]


def both_ways(run: Callable[[frozenset[int]], Trace]) -> Ways[Trace]:
    """The traces of both answers; the main trace has the answers with most nodes.

    `run` traces forward, given the decisions that are true. In a trace that runs a layer, its input
    and output are two values, so that the graph shows which one later nodes read; in a trace that
    skips it, they are one.
    """
    true: frozenset[int] = frozenset()
    tracer = run(true)
    others: dict[int, Trace] = {}
    for place, condition in enumerate(tracer.decisions):
        others[place] = run(true ^ {place})
        if len(others[place].decisions) != len(tracer.decisions):  # A decision within another.
            raise undecided(condition)
        if len(others[place].graph.nodes) > len(tracer.graph.nodes):
            tracer, true, others = others[place], true | {place}, {}
    for place in range(len(tracer.decisions)):
        if place not in others:
            others[place] = run(true ^ {place})
    return Ways(tracer, true, others)


def identity(decisions: Sequence[fx.Node], place: int) -> tuple[object, ...]:
    """Equal for a decision in all traces of a model: its place, and its number at this place."""
    where = [
        (decision.meta["source"], decision.meta["calls"]) for decision in decisions[: place + 1]
    ]
    return (*where[-1], where.count(where[-1]))


def add_decision(ways: Ways[Trace], place: int, decision: int) -> None:
    """Writes both branches of the decision at `place` into the graph, with the number `decision`.
    Raises Different if this is not possible."""
    condition, other = ways.tracer.decisions[place], ways.others[place].graph
    write_decision(ways.tracer.graph, condition, other, decision, is_true=place in ways.true)


def undecided(condition: fx.Node) -> FailedTrace:
    """The failure at a random decision that cannot be an if with an else in the graph."""
    file, line = condition.meta["source"]
    error = RandomDecisionError(
        f"{file}:{line} decides at random in a way that cannot be an if with an else: within "
        "another such decision, together with another one, about a value that another one makes, "
        "or between values of different shapes.",
        "Set the probability to 0, or keep the module as one node: --leaf Class.",
    )
    return FailedTrace(error, [call.path for call in condition.meta["calls"]])


def combined(count: int) -> list[frozenset[int]]:
    """The decisions to take the other way at once.

    >>> [sorted(places) for places in combined(3)]
    [[0, 1], [0, 2], [1, 2], [0, 1, 2]]
    >>> [sorted(places) for places in combined(5)]
    [[0, 1, 2, 3, 4], [1, 2, 3, 4], [1, 3], [2, 3]]
    """
    if count <= _ALL_OF:
        sizes = range(2, count + 1)
        return [frozenset(few) for size in sizes for few in combinations(range(count), size)]
    every = frozenset(range(count))
    halves = [
        frozenset(place for place in every if place >> bit & 1)
        for bit in range((count - 1).bit_length())
    ]
    return [each for each in dict.fromkeys([every, every - {0}, *halves]) if len(each) > 1]


def calls_made(
    graph: fx.Graph, constants: Mapping[str, Tensor], decided: Mapping[int, bool]
) -> list[tuple[Any, ...]]:
    """The calls that a graph makes with these answers to its decisions, with their arguments as
    text."""
    value: dict[fx.Node, str] = {}
    calls: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        regions = node.meta["regions"]
        if any(each.decision >= 0 and each.is_left_out(True, decided) for each in regions):
            continue
        if is_external(node):
            value[node] = _external(node, constants)
        elif node.target is unless:
            condition, computed, former = node.args
            is_former = decided[condition.meta["decision"]]
            value[node] = value[former if is_former else computed]
        else:
            others = [each for each in regions if each.decision < 0]
            arguments = _text((node.args, node.kwargs), value)
            value[node] = f"call {len(calls)}"
            calls.append((node.op, node.target, arguments, str(others)))
    return calls


def _external(node: fx.Node, constants: Mapping[str, Tensor]) -> str:
    constant = constants.get(str(node.target))
    if node.op != "get_attr" or constant is None or constant.is_meta:
        return f"{node.op} {node.target}"
    # Each trace numbers its own constants.
    return f"{constant.dtype} {constant.tolist()}"


def _text(arguments: Any, value: Mapping[fx.Node, str]) -> str:
    return str(fx.node.map_aggregate(arguments, lambda leaf: value.get(leaf, leaf)))  # type: ignore[arg-type]
