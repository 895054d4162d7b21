"""Several traces of one forward -> one graph: training and evaluation, and random decisions.

`merge` writes the graph of evaluation mode into that of training mode. As a rule the two are equal
node by node; arguments that differ (a dropout probability, a `training` flag) become `IfTraining`.
Memory that is shared in one mode only (in evaluation mode dropout returns its argument) counts as
shared.

`write_decision` handles layers that training drops at random, as in `if torch.rand([]) <
self.layerdrop: continue`, with a trace of each answer. Nodes that only one of the two traces has go
into a region of the decision, and later nodes read a choice: `unless(dropped, made, former)`. The
merged graph equals the forward only if decisions are independent, unlike in `if not kept: kept =
[layers[0]]`. To check this, `calls_made` gives the calls of the merged graph for any answers, for a
comparison with a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from torch import Tensor, fx

from ...runtime.plan.structure import is_named_tuple
from .graph import is_external, prune
from .values import IfTraining, Region, Size

Pair = tuple[fx.Node, fx.Node]
STORAGES = ("storages", "mutates", "touches")


class Different(Exception):
    """Two nodes of different traces cannot be merged into one."""


def merge(train: fx.Graph, evaluation: fx.Graph) -> Pair | None:
    """Merges `evaluation` into `train` if their calls are equal one by one.

    Otherwise returns the first pair of nodes that differ; the graphs are then pruned, but otherwise
    unchanged.
    """
    difference = _merge_in_step(train, evaluation)
    if difference is not None:
        # Perhaps only unneeded nodes differ.
        prune(train)
        prune(evaluation)
        difference = _merge_in_step(train, evaluation)
    return difference


def _merge_in_step(train: fx.Graph, evaluation: fx.Graph) -> Pair | None:
    """Merges graphs whose calls are equal one by one, whatever the order of first reads of
    parameters; otherwise changes nothing and returns the first pair that differs."""
    pairs = common_externals(train, evaluation)
    nodes, others = calls_of(train), calls_of(evaluation)
    pairs += zip(nodes, others, strict=False)
    merged, difference = _mergeable(pairs)
    if difference is None and len(nodes) != len(others):
        difference = pairs[-1]
    if difference is None:
        _apply(merged)
    return difference


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something, and the output."""
    return [node for node in graph.nodes if not is_external(node)]


def common_externals(train: fx.Graph, evaluation: fx.Graph) -> list[Pair]:
    """The inputs, parameters, buffers and constants that both graphs have, by name."""
    named = {(node.op, node.target): node for node in train.nodes if is_external(node)}
    return [
        (named[node.op, node.target], node)
        for node in evaluation.nodes
        if (node.op, node.target) in named
    ]


_Merged = tuple[fx.Node, fx.Node, Any, Any]


def _mergeable(pairs: Iterable[Pair]) -> tuple[list[_Merged], Pair | None]:
    """The pairs that can be merged, with the merged arguments, and the first pair that cannot."""
    partner: dict[fx.Node, fx.Node] = {}
    merged: list[_Merged] = []
    first = None

    def same(train: fx.Node, other: fx.Node) -> fx.Node:
        if partner.get(other) is not train:
            raise Different
        return train

    for node, other in pairs:
        try:
            if (node.op, node.target) != (other.op, other.target):
                raise Different
            args = merged_arguments(node.args, other.args, same)
            kwargs = merged_arguments(node.kwargs, other.kwargs, same)
        except Different:
            first = first or (node, other)
            continue
        partner[other] = node
        merged.append((node, other, args, kwargs))
    return merged, first


def _apply(merged: Iterable[_Merged]) -> None:
    for node, other, args, kwargs in merged:
        if args != node.args or kwargs != node.kwargs:
            node.args, node.kwargs = args, kwargs
        add_meta(node, other)


def add_meta(node: fx.Node, other: fx.Node) -> None:
    """Adds the metadata of a node in evaluation mode to that of its node in training mode."""
    node.meta["random"] = node.meta["random"] or other.meta["random"]
    for key in STORAGES:
        # Negative numbers are memory of evaluation mode.
        node.meta[key] |= frozenset(-1 - storage for storage in other.meta[key])


def aligned(train: fx.Graph, evaluation: fx.Graph) -> list[Pair]:
    """The nodes that the two graphs have in common: inputs, parameters and buffers by name, then
    calls in order."""

    calls = calls_of(train), calls_of(evaluation)
    return [*common_externals(train, evaluation), *common_calls(*calls, _key_in_mode)]


def common_calls(
    nodes: Sequence[fx.Node], others: Sequence[fx.Node], key: Callable[[fx.Node], Any]
) -> list[Pair]:
    """The pairs of an approximately longest common subsequence of equal keys."""
    keys, other_keys = [*map(key, nodes)], [*map(key, others)]
    pairs: list[Pair] = []
    for block in SequenceMatcher(None, keys, other_keys, autojunk=False).get_matching_blocks():
        pairs += zip(nodes[block.a :][: block.size], others[block.b :][: block.size], strict=True)
    return pairs


def call_key(node: fx.Node) -> tuple[Any, ...]:
    """A key that is equal for nodes that may be the same call."""
    return node.op, node.target, node.meta["source"], node.meta["calls"]


def _key_in_mode(node: fx.Node) -> tuple[Any, ...]:
    """`call_key` for graphs with the regions of their decisions: a call that a decision adds is
    never a call of a mode without the decision."""
    added = tuple(region.decision for region in node.meta["regions"] if region.kind == "if")
    return *call_key(node), added


def merged_arguments(
    train: Any,
    other: Any,
    same: Callable[[fx.Node, fx.Node], fx.Node | None],
    choose: Callable[[Any, Any], Any] = IfTraining,
) -> Any:
    """Arguments for both traces; `same` gives the node that stands for two, and `choose` the value
    that stands for two constants.

    Raises Different if there are none.
    """

    def merge(a: Any, b: Any) -> Any:
        return merged_arguments(a, b, same, choose)

    if isinstance(train, fx.Node) and isinstance(other, fx.Node):
        return same(train, other)
    if isinstance(train, (tuple, list)) and isinstance(other, (tuple, list)):
        if len(train) == len(other):
            items = [merge(a, b) for a, b in zip(train, other, strict=True)]
            if is_named_tuple(train):
                return type(train)(*items)
            return tuple(items) if isinstance(train, tuple) else items
    if isinstance(train, Mapping) and isinstance(other, Mapping) and list(train) == list(other):
        return {key: merge(train[key], other[key]) for key in train}
    if isinstance(train, slice) and isinstance(other, slice):
        return slice(
            merge(train.start, other.start),
            merge(train.stop, other.stop),
            merge(train.step, other.step),
        )
    if _has_node(train) or _has_node(other):
        raise Different
    if type(train) is type(other) and bool(train == other):
        return train
    if isinstance(train, Size) or isinstance(other, Size):
        raise Different
    return choose(train, other)


def _has_node(value: Any) -> bool:
    nodes: list[fx.Node] = []
    fx.node.map_arg(value, nodes.append)
    return bool(nodes)


def unless(condition: Any, computed: Any, former: Any) -> Any:
    """`former` where the condition holds, else `computed`."""
    return former if condition else computed


def write_decision(
    graph: fx.Graph, condition: fx.Node, other: fx.Graph, decision: int, *, is_true: bool
) -> None:
    """Writes both branches of a decision into the graph of a trace, with the number `decision`.

    `other` is the trace with the other answer. Nodes that only the graph has go into a region of
    the decision; nodes that only `other` has are copied into the opposite region. Raises Different
    if this is not possible.
    """
    _Decision(graph, condition, other, decision, is_true).write()


class _Decision:
    def __init__(
        self, graph: fx.Graph, condition: fx.Node, other: fx.Graph, decision: int, is_true: bool
    ) -> None:
        self.graph, self.condition, self.decision = graph, condition, decision
        self.is_true = is_true
        self.others = list(other.nodes)
        # Nodes of former decisions are in this graph only: their choices and their copies.
        chosen = [node for node in graph.nodes if node.target is unless]
        self.now: dict[fx.Node, fx.Node] = {node.meta["made"]: node for node in chosen}
        copied = (node for node in graph.nodes if node.meta.get("copied"))
        self.former = {*chosen, *copied}
        self.pairs = [*common_externals(graph, other), *filter(_alike, self._same_calls())]
        self.pairs.sort()
        self.partner = {theirs: ours for ours, theirs in self.pairs}
        self.copies: dict[fx.Node, fx.Node] = {}  # Nodes of the other graph in this one.
        self.storages: dict[int, int] = {}
        self.choices: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def write(self) -> None:
        if any(region.decision >= 0 for region in self.condition.meta["regions"]):
            raise Different  # A decision within another.
        shared = {*self.partner.values(), *self.former}
        alone = [node for node in self.graph.nodes if node not in shared and not is_external(node)]
        if alone and alone[0] < self.condition:
            raise Different
        for node in alone:
            self._place(node, self.is_true, node.meta["regions"])
        self.condition.meta["decision"] = self.decision
        for node, theirs in self.pairs:
            self.storages.update(zip(_storages(theirs), _storages(node), strict=False))
        self._copy_others()
        hint = "kept" if self.is_true else "dropped"
        self.condition.meta["hint"] = "drawn" if self.copies else hint
        ends = [self.condition, *alone]
        for node, theirs in self.pairs:
            if not is_external(node):
                last = max((end for end in ends if end < node), default=self.condition)
                chosen = partial(self._chosen, last)
                node.args = merged_arguments(node.args, theirs.args, chosen)
                node.kwargs = merged_arguments(node.kwargs, theirs.kwargs, chosen)
        readers = {user for node in alone for user in node.users}
        if readers & self.former:
            raise Different  # Another decision's branch reads a value that this one decides.

    def _same_calls(self) -> list[Pair]:
        """The calls of both graphs: all before the decision, and the common ones after it."""
        nodes = [
            node for node in self.graph.nodes if node not in self.former and not is_external(node)
        ]
        others = [node for node in self.others if not is_external(node)]
        known = nodes.index(self.condition) + 1
        ways = [_by_ends(nodes, others, start) for start in (known, _common(nodes, others, known))]
        # Equal lines of two layers look alike. A former decision tells which layer they are of.
        return next(
            (pairs for pairs in ways if not self._alone(nodes, pairs) & self._read), ways[0]
        )

    @property
    def _read(self) -> set[fx.Node]:
        """The values that the choices of former decisions read."""
        return {used for node in self.former for used in node.all_input_nodes}

    def _alone(self, nodes: Iterable[fx.Node], pairs: Iterable[Pair]) -> set[fx.Node]:
        return {*nodes} - {ours for ours, _ in pairs}

    def _place(self, node: fx.Node, is_true: bool, regions: tuple[Region, ...]) -> None:
        region = Region("if" if is_true else "unless", decision=self.decision)
        node.meta["regions"] = (region, *regions)

    def _copy_others(self) -> None:
        """Copies nodes that only the other graph has before the next node that both have."""
        waiting: list[fx.Node] = []
        for theirs in self.others:
            ours = self.partner.get(theirs)
            if ours is not None and not is_external(ours):
                for node in waiting:
                    self._copy(node, ours)
                waiting = []
            elif ours is None:
                waiting.append(theirs)

    def _copy(self, theirs: fx.Node, before: fx.Node) -> None:
        if before < self.condition or before is self.condition:
            raise Different
        with self.graph.inserting_before(before):
            node = self.graph.node_copy(theirs, self._standing_for)
        node.meta = dict(theirs.meta)
        for key in STORAGES:
            node.meta[key] = frozenset(map(self._storage, theirs.meta[key]))
        if not is_external(theirs):
            self._place(node, not self.is_true, theirs.meta["regions"])
        node.meta["copied"] = True
        self.copies[theirs] = node

    def _storage(self, theirs: int) -> int:
        """The number in this graph of memory in the other."""
        used = {number for node in self.graph.nodes for number in node.meta["storages"]}
        return self.storages.setdefault(theirs, max(used | {*self.storages.values(), -1}) + 1)

    def _standing_for(self, theirs: fx.Node) -> fx.Node:
        """The node of this graph for a value in the other, after choices of former decisions."""
        ours = self.copies.get(theirs) or self.partner[theirs]
        choice = self.now.get(ours)
        if choice is None:
            return ours
        if all(region.decision < 0 for region in ours.meta["regions"]):
            raise Different  # Made before the decision: it may stand for itself or for the choice.
        return choice

    def _chosen(self, last: fx.Node, computed: fx.Node, theirs: fx.Node) -> fx.Node:
        if self.partner.get(theirs) is computed:
            return computed
        former = self._standing_for(theirs)
        if former is computed:
            return computed
        if (computed, former) not in self.choices:
            self.choices[computed, former] = self._choice(
                computed, former, max(computed, former, last)
            )
        return self.choices[computed, former]

    def _choice(self, computed: fx.Node, former: fx.Node, last: fx.Node) -> fx.Node:
        values = computed.meta["val"], former.meta["val"]
        if not all(isinstance(value, Tensor) for value in values):
            raise Different
        if values[0].dtype != values[1].dtype or computed.meta["shape"] != former.meta["shape"]:
            raise Different
        sides = (former, computed) if self.is_true else (computed, former)
        with self.graph.inserting_after(last):
            node = self.graph.call_function(unless, (self.condition, *sides))
        regions = tuple(region for region in computed.meta["regions"] if region.decision < 0)
        node.meta.update(
            computed.meta, calls=self.condition.meta["calls"], regions=regions, made=computed,
            source=self.condition.meta["source"], random=False, draws_numbers=False,
            mutates=frozenset(), touches=frozenset(), from_sizes=False,
            storages=computed.meta["storages"] | former.meta["storages"],
        )  # fmt: skip
        return node


def _common(nodes: Sequence[fx.Node], others: Sequence[fx.Node], start: int) -> int:
    """The number of calls at the beginning that may be the same, at least `start`."""
    while start < min(len(nodes), len(others)) and call_key(nodes[start]) == call_key(
        others[start]
    ):
        start += 1
    return start


def _by_ends(nodes: list[fx.Node], others: list[fx.Node], start: int) -> list[Pair]:
    """The first calls up to `start`, as many of the last as may be the same, and the common ones
    between."""
    ours, theirs = nodes[start:], others[start:]
    end = _common(ours[::-1], theirs[::-1], 0)
    ours, theirs = ours[: len(ours) - end], theirs[: len(theirs) - end]
    outside = (side[:start] + side[len(side) - end :] for side in (nodes, others))
    return [*zip(*outside, strict=True), *common_calls(ours, theirs, call_key)]


def _alike(pair: Pair) -> bool:
    """False for calls with different constants: a decision chooses between their results."""

    def refuse(constant: Any, other: Any) -> None:
        raise Different

    node, twin = pair
    try:
        for ours, theirs in ((node.args, twin.args), (node.kwargs, twin.kwargs)):
            merged_arguments(ours, theirs, lambda value, other: value, refuse)
    except Different:
        if node.op == "output":
            raise
        return False
    return True


def _storages(node: fx.Node) -> list[int]:
    return sorted(node.meta["storages"])


def is_of_training(condition: fx.Node) -> bool:
    """True if a decision is made in training only; in evaluation it counts as false."""
    return Region("training") in condition.meta["regions"]


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
