"""Questions of forward about sizes -> guards that refuse inputs of sizes with other answers.

`if x.shape[0] > 8`, `min(batch, 4)` and `int(0.7 * batch)` are answered with the example's sizes.
`SizeDecisions` records each answer as a condition, which inputs of other sizes may violate. A
question of a torch function matters only if the shape of its result depends on the answer: the
graph calls the function again, at any sizes.

`add_size_guards` adds a guard to the graph for each condition that matters, and a note.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, ModuleType
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ...runtime.errors import CaptureError
from .arguments import map_leaves, plain_structure, tensors_in
from .fake_inputs import FakeWorld
from .graph import call_node, is_external, must_fit
from .source_lines import is_user_file, place, short_path, source_text, user_frames
from .values import LocalDevice, Region, Size

Sizes = Mapping[str, int]

# Sizes at which conditions are tried, besides small ones and those near numbers in the condition.
_FURTHER = (100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 4097, 100_003)
_SMALL, _FAR, _LARGEST = 66, 300, 1 << 20
# How many sizes of each symbol are tried, by the number of symbols in a condition.
_TRIED = {1: 1000, 2: 48, 3: 12}


@dataclass(frozen=True)
class Decision:
    """A condition on sizes that the example satisfies.

    condition: the condition
    where: file and line of the question
    text: the source text of the line
    is_shape: the condition only decides the shape of a torch function's result
    """

    condition: sympy.Basic
    where: str
    text: str
    is_shape: bool = False

    @property
    def described(self) -> str:
        """The condition with its line."""
        return f"{Size(self.condition)} ({self.where})" if self.where else str(Size(self.condition))


def at_least_two(symbol: str) -> Decision:
    """The decision that a size is not 1."""
    return Decision(sympy.Symbol(symbol, integer=True, positive=True) >= 2, "", "")


@contextmanager
def contracting_in_order_of_example() -> Iterator[None]:
    """Lets opt_einsum choose the order of contractions by the example's sizes, in the block: it
    needs sizes as numbers, and every order gives the same result. torch.einsum does without it.

    torch's `flags` is not enough: an assignment to `torch.backends.opt_einsum.enabled`, as torch
    documents it, hides the flag that `flags` sets.
    """
    switch = torch.backends.opt_einsum
    assigned = vars(switch).pop("enabled", None)
    chooser = vars(sys.modules.get("opt_einsum.contract", ModuleType("absent")))
    chooser["int"] = _number_of_example
    try:
        with switch.flags(enabled=False):
            yield
    finally:
        del chooser["int"]
        if assigned is not None:
            switch.enabled = assigned


def _number_of_example(size: Any) -> int:
    """The number that a size has in the example; torch's error for a size that values decide."""
    is_known = isinstance(size, torch.SymInt) and size.node.has_hint()
    return int(size.node.hint if is_known else size)


class SizeDecisions:
    """The decisions of one trace, in `decisions` by condition.

    `is_recording` returns True while forward itself runs, and not a function that the graph calls.
    """

    def __init__(self, world: FakeWorld, top: FrameType, is_recording: Callable[[], bool]) -> None:
        self.decisions: dict[sympy.Basic, Decision] = {}
        self._world, self._top, self._is_recording = world, top, is_recording
        self._in_call: dict[sympy.Basic, None] | None = None
        self.is_in_transform = False
        self._conditions: dict[tuple[sympy.Basic, sympy.Basic], sympy.Basic] = {}

    def note(self, expression: sympy.Basic, answer: sympy.Basic) -> None:
        """Records a question about sizes and its answer."""
        if self._in_call is None and not self._is_recording():
            if not (self.is_in_transform and _is_asked_by_forward(self._top)):
                return  # A question of the tracer itself.
        condition = self._conditions.get((expression, answer))
        if condition is None:
            condition = _condition(expression, answer).xreplace(self._world.env.named)
            self._conditions[expression, answer] = condition
        if self._in_call is not None:
            self._in_call[condition] = None
        else:
            self._add(condition)

    @contextmanager
    def call(self) -> Iterator[dict[sympy.Basic, None]]:
        """Collects the questions of a function, which may become a node of the graph."""
        before, self._in_call = self._in_call, {}
        try:
            yield self._in_call
        finally:
            self._in_call = before

    @contextmanager
    def in_transform(self) -> Iterator[None]:
        """Keeps forward's own questions in a block that the tracer does not record."""
        before, self.is_in_transform = self.is_in_transform, True
        try:
            yield
        finally:
            self.is_in_transform = before

    def of_forward(self, conditions: Iterable[sympy.Basic]) -> None:
        """Records the questions of a function that is not a node of the graph."""
        for condition in conditions:
            self._add(condition)

    def of_node(self, conditions: Iterable[sympy.Basic], node: fx.Node) -> None:
        """Records the questions of a node's function that decide the shape of its result."""
        hints, runs_alone = self._world.hints, None
        for condition in conditions:
            if condition in self.decisions or not _is_written(condition):
                continue
            if others := counterexamples(condition, hints, least=2):
                runs_alone = self._runs_alone(node) if runs_alone is None else runs_alone
                few = some_of(others, hints)
                if not runs_alone or any(self._has_another_shape(node, sizes) for sizes in few):
                    self._add(condition, is_shape=True)

    def _add(self, condition: sympy.Basic, *, is_shape: bool = False) -> None:
        if condition in self.decisions:
            return
        frames = user_frames(self._top)
        frame = frames[0] if frames else None
        if not _is_written(condition):
            location = place(frame, frame.f_lineno) if frame else "forward"
            raise CaptureError(
                f"{location} depends on {condition}, which generated code cannot check.",
                "Write it with +, -, *, //, %, min, max, comparisons, math.ceil or math.floor.",
            )
        others = counterexamples(condition, self._world.hints, least=1)
        if others:
            self._refuse_one_size(condition, len(others))
            where = f"{short_path(frame).rpartition('/')[2]}:{frame.f_lineno}" if frame else ""
            text = source_text(frame, frame.f_lineno) if frame else ""
            self.decisions[condition] = Decision(condition, where or "forward", text, is_shape)

    def _refuse_one_size(self, condition: sympy.Basic, others: int) -> None:
        """Raises PinnedSizeError if a size satisfies a condition at the example's number only."""
        if len(condition.free_symbols) == 1:
            hints = self._world.hints
            if others == sum(1 for _ in _tried(condition, hints, 1)) - 1:
                (symbol,) = condition.free_symbols
                raise self._world.env.pinned(symbol.name, sympy.Integer(hints[symbol.name]))

    def _has_another_shape(self, node: fx.Node, sizes: Sizes) -> bool:
        """True if a node's function, at these sizes, makes another shape than the node has."""
        shapes = self._shapes_of(node, sizes)
        return shapes is not None and shapes != self._expected(node, sizes)

    def _runs_alone(self, node: fx.Node) -> bool:
        """True if a node's function, called on its own at the example's sizes, makes the shapes
        that the node has."""
        hints = self._world.hints
        return self._shapes_of(node, hints) == self._expected(node, hints)

    def _expected(self, node: fx.Node, sizes: Sizes) -> list[tuple[int, ...]]:
        tensors = tensors_in(plain_structure(node.meta["val"]))
        return [self._numbers(tensor.shape, sizes) for tensor in tensors]

    def _shapes_of(self, node: fx.Node, sizes: Sizes) -> list[tuple[int, ...]] | None:
        """The shapes that a node's function makes from arguments of these sizes; None if it
        raises."""

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return map_leaves(tensor, leaf.meta["val"])
            if isinstance(leaf, Size):
                return leaf.evaluate(sizes)
            return torch.device("cpu") if isinstance(leaf, LocalDevice) else leaf

        def tensor(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            shape, strides = (
                self._numbers(symbolic, sizes) for symbolic in (leaf.shape, leaf.stride())
            )
            return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)

        try:
            with torch.no_grad():
                args, kwargs = map_leaves(argument, node.args), map_leaves(argument, node.kwargs)
                result = call_node(self._world.model, node, args, kwargs)
                return [tuple(tensor.shape) for tensor in tensors_in(plain_structure(result))]
        except Exception:
            return None

    def _numbers(self, sizes: Iterable[Any], numbers: Sizes) -> tuple[int, ...]:
        def number(size: Any) -> int:
            known = self._world.size(size) if isinstance(size, torch.SymInt) else size
            return int(known.evaluate(numbers) if isinstance(known, Size) else known)

        return tuple(map(number, sizes))


def _is_asked_by_forward(top: FrameType) -> bool:
    """True if forward itself asks the current question, and no function of torch for it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not top:
        if is_user_file(frame.f_code.co_filename):
            return True
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("torch.") and not name.startswith("torch.fx.experimental."):
            return False
        frame = frame.f_back
    return False


def _condition(expression: sympy.Basic, answer: sympy.Basic) -> sympy.Basic:
    """The condition that holds if the question has this answer."""
    if answer is sympy.true or answer is True:  # 1 is equal to True
        return expression
    if answer is sympy.false or answer is False:
        return sympy.Not(expression)
    return sympy.Eq(expression, answer, evaluate=False)


def _is_written(condition: sympy.Basic) -> bool:
    try:
        return bool(str(Size(condition)))
    except ValueError:
        return False


@lru_cache(maxsize=4096)
def _candidates(condition: sympy.Basic, hint: int, least: int, count: int) -> tuple[int, ...]:
    """Sizes to try for one symbol of a condition, the nearest to the example's first."""
    sizes = {*range(1, _SMALL), *_FURTHER, 2 * hint, 2 * hint + 1, 4 * hint}
    numbers = {abs(float(number)) for number in condition.atoms(sympy.Number) if number.is_finite}
    known = {0.0, *numbers}
    known |= {a / b for a, b in itertools.permutations(numbers, 2) if b}
    known |= {a * b for a, b in itertools.combinations(numbers, 2)}
    special = {
        base + shift
        for number in known
        if number < _LARGEST
        for base in (math.floor(number),)
        for shift in (-1, 0, 1, 2)
    }
    legal = [size for size in sizes | special | {hint - 1, hint + 1} if least <= size <= _LARGEST]
    legal.sort(key=lambda size: (size not in special, abs(math.log(size / hint)), size))
    return tuple(sorted(legal[:count], key=lambda size: (abs(math.log(size / hint)), size)))


def _tried(condition: sympy.Basic, hints: Sizes, least: int) -> Iterator[dict[str, int]]:
    symbols = sorted(symbol.name for symbol in condition.free_symbols)
    count = _TRIED.get(len(symbols), 5)
    choices = [_candidates(condition, hints[symbol], least, count) for symbol in symbols]
    for sizes in itertools.product(*choices):
        yield dict(zip(symbols, sizes, strict=True))


def meets(condition: sympy.Basic, sizes: Sizes) -> bool:
    """True if the sizes satisfy a condition."""
    return bool(Size(condition).evaluate(sizes))


def counterexamples(condition: sympy.Basic, hints: Sizes, *, least: int) -> list[Sizes]:
    """Sizes of at least `least` that violate a condition, the nearest to the example's first."""
    return list(_counterexamples(condition, tuple(sorted(hints.items())), least))


@lru_cache(maxsize=4096)
def _counterexamples(
    condition: sympy.Basic, hints: tuple[tuple[str, int], ...], least: int
) -> tuple[Sizes, ...]:
    known = dict(hints)
    return tuple(
        {**known, **sizes} for sizes in _tried(condition, known, least) if _fails(condition, sizes)
    )


def _fails(condition: sympy.Basic, sizes: Sizes) -> bool:
    try:
        return not meets(condition, sizes)
    except (ArithmeticError, ValueError):
        return False


def some_of(others: Sequence[Sizes], hints: Sizes) -> list[Sizes]:
    """The sizes next to the example's, below and above, and one further away."""
    below = (sizes for sizes in others if any(sizes[name] < hints[name] for name in hints))
    above = (sizes for sizes in others if any(sizes[name] > hints[name] for name in hints))
    further = (sizes for sizes in reversed(others) if max(sizes.values()) <= _FAR)
    chosen = [next(candidates, None) for candidates in (below, above, further)]
    return [sizes for sizes in chosen if sizes is not None]


def without_implied(decisions: Sequence[Decision], hints: Sizes) -> list[Decision]:
    """The decisions without those whose conditions follow from others."""
    needed = list(dict.fromkeys(decisions))
    for decision in decisions[::-1]:
        others = [
            other.condition
            for other in needed
            if other is not decision
            and other.condition.free_symbols <= decision.condition.free_symbols
        ]
        alone = counterexamples(decision.condition, hints, least=1)
        if all(any(_fails(other, sizes) for other in others) for sizes in alone):
            needed.remove(decision)
    return needed


Runs = Callable[[Mapping[str, int], bool], bool]
"""A function of sizes and mode: True if the model runs on fake inputs of these sizes."""


def add_size_guards(
    graph: fx.Graph,
    train: Sequence[Decision],
    evaluation: Sequence[Decision],
    hints: Mapping[str, int],
    runs: Runs,
) -> list[str]:
    """Adds a guard for each decision that matters, before the first reader of its sizes.

    Returns notes about them. The size 1 is left to `check_capture`: forwards often compare with
    it although the result is the same either way.
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
            continue  # The graph raises an error there as well.
        regions = () if all(in_mode) else (Region("training" if in_mode[0] else "evaluation"),)
        add_size_guard(graph, decision, regions)
        if is_taken:  # Else the model itself refuses the other sizes.
            notes.append(
                f'"{decision.text}" ({decision.where}) takes the branch of the example inputs; '
                f"inputs of other sizes than {Size(decision.condition)} are refused at run time"
            )
    return notes


def add_size_guard(graph: fx.Graph, decision: Decision, regions: tuple[Region, ...] = ()) -> None:
    """Adds a guard before the call that first reads all sizes in a condition."""
    sizes: Any = {name: Size(symbol) for name, symbol in _symbols(decision.condition)}
    condition: Any = Size(decision.condition)
    file, _, line = decision.where.rpartition(":")
    with graph.inserting_before(_place(graph, set(sizes))):
        node = graph.call_function(must_fit, (condition, decision.described, sizes))
    node.meta.update(
        val=None, calls=(), source=(file, int(line)) if file else None, regions=regions,
        recomputes=(), random=False, mutates=frozenset(), touches=frozenset(),
        storages=frozenset(), from_sizes=False, data_dependent=False,
    )  # fmt: skip


def _deciding(decisions: Sequence[Decision], hints: Mapping[str, int]) -> list[Decision]:
    some = [
        decision for decision in decisions if counterexamples(decision.condition, hints, least=2)
    ]
    return without_implied(some, hints)


def _symbols(condition: sympy.Basic) -> list[tuple[str, sympy.Basic]]:
    return sorted((symbol.name, symbol) for symbol in condition.free_symbols)


def _place(graph: fx.Graph, symbols: set[str]) -> fx.Node:
    """The place of a guard: the node where the last of the symbols is first read, or the first
    node of the outermost module call around it."""
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
