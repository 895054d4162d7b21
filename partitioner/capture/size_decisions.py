"""What forward asks of the sizes -> the conditions under which its graph holds.

`if x.shape[0] > 8`, `min(batch, 4)` and `int(0.7 * batch)` are answered with the example's sizes.
Each answer is a condition, which inputs of other sizes may not meet. What a torch function asks
while it runs matters only where the shape of its result depends on the answer: the graph calls the
function again, whatever the sizes are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ...runtime.errors import CaptureError
from .fakes import FakeWorld
from .frames import place, short_path, source_text, user_frames
from .interpret import call_node
from .structure import map_leaves, plain_structure, tensors_in
from .values import LocalDevice, Size

Sizes = Mapping[str, int]

# Sizes at which conditions are tried: small ones, those near the numbers in the condition, these.
_FURTHER = (100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 4097, 100_003)
_SMALL, _FAR, _LARGEST = 66, 300, 1 << 20
# How many sizes of each symbol are tried, by the number of symbols in a condition.
_TRIED = {1: 1000, 2: 48, 3: 12}


@dataclass(frozen=True)
class Decision:
    """A condition on sizes that the example meets.

    `where` is the file and line that asks for it, `text` the line, `is_shape` whether it decides
    no more than the shape of what a torch function makes.
    """

    condition: sympy.Basic
    where: str
    text: str
    is_shape: bool = False

    @property
    def told(self) -> str:
        """The condition with its line."""
        return f"{Size(self.condition)} ({self.where})" if self.where else str(Size(self.condition))


def at_least_two(symbol: str) -> Decision:
    """The decision that a size is not 1."""
    return Decision(sympy.Symbol(symbol, integer=True, positive=True) >= 2, "", "")


class SizeDecisions:
    """The decisions of one trace. `is_recording` says whether forward itself runs, and not code of
    a function that the graph calls."""

    def __init__(self, world: FakeWorld, top: FrameType, is_recording: Callable[[], bool]) -> None:
        self.found: dict[sympy.Basic, Decision] = {}
        self._world, self._top, self._is_recording = world, top, is_recording
        self._in_call: dict[sympy.Basic, None] | None = None

    def told(self, expression: sympy.Basic, answer: sympy.Basic) -> None:
        """Is told of every question about sizes and its answer."""
        if self._in_call is None and not self._is_recording():
            return  # Our own look at tensors.
        condition = _condition(expression, answer).xreplace(self._world.env.named)
        if self._in_call is not None:
            self._in_call[condition] = None
        else:
            self._add(condition)

    @contextmanager
    def call(self) -> Iterator[dict[sympy.Basic, None]]:
        """Within, questions are those of a function that the graph may come to call."""
        before, self._in_call = self._in_call, {}
        try:
            yield self._in_call
        finally:
            self._in_call = before

    def of_forward(self, asked: Iterable[sympy.Basic]) -> None:
        """Is told what a function asked that the graph does not call."""
        for condition in asked:
            self._add(condition)

    def of_node(self, asked: Iterable[sympy.Basic], node: fx.Node) -> None:
        """Is told what the function of a node asked."""
        for condition in asked:
            if condition in self.found or not _is_written(condition):
                continue
            hints = self._world.hints
            others = counterexamples(condition, hints, least=2)
            if any(self._has_another_shape(node, sizes) for sizes in some_of(others, hints)):
                self._add(condition, is_shape=True)

    def _add(self, condition: sympy.Basic, *, is_shape: bool = False) -> None:
        if condition in self.found:
            return
        frames = user_frames(self._top)
        frame = frames[0] if frames else None
        if not _is_written(condition):
            there = place(frame, frame.f_lineno) if frame else "forward"
            raise CaptureError(
                f"{there} decides by {condition}, which cannot be checked in generated code.",
                "Write it with +, -, *, //, %, min, max, comparisons, math.ceil or math.floor.",
            )
        others = counterexamples(condition, self._world.hints, least=1)
        if others:
            self._refuse_one_size(condition, len(others))
            where = f"{short_path(frame).rpartition('/')[2]}:{frame.f_lineno}" if frame else ""
            text = source_text(frame, frame.f_lineno) if frame else ""
            self.found[condition] = Decision(condition, where or "forward", text, is_shape)

    def _refuse_one_size(self, condition: sympy.Basic, others: int) -> None:
        """Raises PinnedSizeError if a size meets a condition at the example's number alone."""
        if len(condition.free_symbols) == 1:
            hints = self._world.hints
            if others == sum(1 for _ in _tried(condition, hints, 1)) - 1:
                (symbol,) = condition.free_symbols
                raise self._world.env.pinned(symbol.name, sympy.Integer(hints[symbol.name]))

    def _has_another_shape(self, node: fx.Node, sizes: Sizes) -> bool:
        """Whether a node's function makes a shape for some sizes that is not the node's there."""
        hints = self._world.hints
        if self._made(node, hints) != self._expected(node, hints):
            return True  # It cannot be run like this.
        made = self._made(node, sizes)
        return made is not None and made != self._expected(node, sizes)

    def _expected(self, node: fx.Node, sizes: Sizes) -> list[tuple[int, ...]]:
        tensors = tensors_in(plain_structure(node.meta["val"]))
        return [self._numbers(tensor.shape, sizes) for tensor in tensors]

    def _made(self, node: fx.Node, sizes: Sizes) -> list[tuple[int, ...]] | None:
        """The shapes that a node's function makes of arguments of these sizes; None where it
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
            shape, strides = (self._numbers(each, sizes) for each in (leaf.shape, leaf.stride()))
            return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)

        try:
            with torch.no_grad():
                args, kwargs = map_leaves(argument, node.args), map_leaves(argument, node.kwargs)
                made = call_node(self._world.model, node, args, kwargs)
                return [tuple(tensor.shape) for tensor in tensors_in(plain_structure(made))]
        except Exception:
            return None

    def _numbers(self, sizes: Iterable[Any], numbers: Sizes) -> tuple[int, ...]:
        def number(size: Any) -> int:
            known = self._world.size(size) if isinstance(size, torch.SymInt) else size
            return int(known.evaluate(numbers) if isinstance(known, Size) else known)

        return tuple(map(number, sizes))


def _condition(expression: sympy.Basic, answer: sympy.Basic) -> sympy.Basic:
    """What is so about the sizes if the question had this answer."""
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
    """Sizes to try for one of the symbols of a condition, the nearest to the example's first."""
    found = {*range(1, _SMALL), *_FURTHER, 2 * hint, 2 * hint + 1, 4 * hint}
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
    legal = [size for size in found | special | {hint - 1, hint + 1} if least <= size <= _LARGEST]
    legal.sort(key=lambda size: (size not in special, abs(math.log(size / hint)), size))
    return tuple(sorted(legal[:count], key=lambda size: (abs(math.log(size / hint)), size)))


def _tried(condition: sympy.Basic, hints: Sizes, least: int) -> Iterator[dict[str, int]]:
    symbols = sorted(symbol.name for symbol in condition.free_symbols)
    count = _TRIED.get(len(symbols), 5)
    choices = [_candidates(condition, hints[symbol], least, count) for symbol in symbols]
    for sizes in itertools.product(*choices):
        yield dict(zip(symbols, sizes, strict=True))


def meets(condition: sympy.Basic, sizes: Sizes) -> bool:
    """Whether sizes meet a condition."""
    return bool(Size(condition).evaluate(sizes))


def counterexamples(condition: sympy.Basic, hints: Sizes, *, least: int) -> list[Sizes]:
    """Sizes from `least` on that do not meet a condition, the nearest to the example's first."""
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
    """Of sizes those next to the example's, below and above, and one further off."""
    below = (sizes for sizes in others if any(sizes[name] < hints[name] for name in hints))
    above = (sizes for sizes in others if any(sizes[name] > hints[name] for name in hints))
    further = (sizes for sizes in reversed(others) if max(sizes.values()) <= _FAR)
    chosen = [next(each, None) for each in (below, above, further)]
    return [sizes for sizes in chosen if sizes is not None]


def without_implied(decisions: Sequence[Decision], hints: Sizes) -> list[Decision]:
    """The decisions whose conditions do not follow from those of the others."""
    kept = list(dict.fromkeys(decisions))
    for decision in decisions[::-1]:
        others = [
            other.condition
            for other in kept
            if other is not decision
            and other.condition.free_symbols <= decision.condition.free_symbols
        ]
        alone = counterexamples(decision.condition, hints, least=1)
        if all(any(_fails(other, sizes) for other in others) for sizes in alone):
            kept.remove(decision)
    return kept
