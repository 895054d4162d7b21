"""Decisions by sizes -> nodes that refuse inputs of sizes that decide otherwise, and notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from .graph import is_external
from .guards import must_fit
from .size_decisions import Decision, counterexamples, some_of, without_implied
from .values import Region, Size

Runs = Callable[[Mapping[str, int], bool], bool]
"""Whether the model runs on inputs of these sizes, in training or not, for all that fake tensors
tell."""


def add_size_guards(
    graph: fx.Graph,
    train: Sequence[Decision],
    evaluation: Sequence[Decision],
    hints: Mapping[str, int],
    runs: Runs,
) -> list[str]:
    """Adds a guard for each decision that matters, before what first reads the sizes in it; the
    notes that tell of them.

    The size 1 is left to `check_capture`: forwards ask for it where nothing depends on it.
    """
    notes = []
    modes = [_deciding(decisions, hints) for decisions in (train, evaluation)]
    known = [{decision.condition for decision in mode} for mode in modes]
    for decision in dict.fromkeys([*modes[0], *modes[1]]):
        in_mode = [decision.condition in conditions for conditions in known]
        if all(in_mode) and decision not in modes[0]:
            continue  # It is there for training.
        others = some_of(counterexamples(decision.condition, hints, least=2), hints)[:2]
        is_taken = any(runs(sizes, in_mode[0]) for sizes in others)
        if decision.is_shape and not is_taken:
            continue  # The graph does not run there either.
        regions = () if all(in_mode) else (Region("training" if in_mode[0] else "evaluation"),)
        add_size_guard(graph, decision, regions)
        if is_taken:  # Else the model itself refuses the other sizes.
            notes.append(
                f'"{decision.text}" ({decision.where}) goes the way of the example inputs; inputs '
                f"of other sizes than {Size(decision.condition)} are refused when they come"
            )
    return notes


def add_size_guard(graph: fx.Graph, decision: Decision, regions: tuple[Region, ...] = ()) -> None:
    """Adds a guard before the call that first reads all sizes in a condition."""
    sizes: Any = {name: Size(symbol) for name, symbol in _symbols(decision.condition)}
    condition: Any = Size(decision.condition)
    file, _, line = decision.where.rpartition(":")
    with graph.inserting_before(_place(graph, set(sizes))):
        node = graph.call_function(must_fit, (condition, decision.told, sizes))
    node.meta.update(
        val=None, calls=(), source=(file, int(line)) if file else None, regions=regions,
        recomputes=(), random=False, mutates=frozenset(), touches=frozenset(),
        storages=frozenset(), from_sizes=False, data_dependent=False,
    )  # fmt: skip


def _deciding(decisions: Sequence[Decision], hints: Mapping[str, int]) -> list[Decision]:
    some = [each for each in decisions if counterexamples(each.condition, hints, least=2)]
    return without_implied(some, hints)


def _symbols(condition: sympy.Basic) -> list[tuple[str, sympy.Basic]]:
    return sorted((symbol.name, symbol) for symbol in condition.free_symbols)


def _place(graph: fx.Graph, symbols: set[str]) -> fx.Node:
    """The first node of the module, called by the model's own forward, in which the last of some
    symbols is first read."""
    calls: list[fx.Node] = [node for node in graph.nodes if not is_external(node)]
    reader = calls[0]
    for node in calls:
        if not symbols:
            break
        shapes = [used.meta.get("shape") or () for used in node.all_input_nodes]
        read = {
            name
            for shape in shapes
            for size in shape
            if isinstance(size, Size)
            for name in size.symbols
        }
        if symbols & read:
            symbols, reader = symbols - read, node
    outermost = reader.meta["calls"][:1]
    if not outermost:
        return reader
    return next(node for node in calls if node.meta["calls"][:1] == outermost)
