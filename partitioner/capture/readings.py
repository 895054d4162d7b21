"""What forward reads off the values of tensors -> answers, guards, and numbers that are nodes.

`if mask.any():` gets the answer of the example, and a guard. `lengths.max().item()` and the sizes
of `mask.nonzero()` are symbols to torch; in the graph they are nodes, and so is arithmetic on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv, PythonMod

from .bindings import Bindings
from .fakes import FakeWorld
from .frames import short_path, source_text
from .guards import must_fail, must_hold
from .shadow import Shadow
from .skips import is_drawn, is_never_true

_RELATIONS: Mapping[type, Callable[..., Any]] = {
    sympy.Eq: operator.eq, sympy.Ne: operator.ne, sympy.Lt: operator.lt, sympy.Le: operator.le,
    sympy.Gt: operator.gt, sympy.Ge: operator.ge,
}  # fmt: skip
_ARITHMETIC: Mapping[type, Callable[..., Any]] = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv,
    PythonMod: operator.mod, sympy.Mod: operator.mod,
}  # fmt: skip


class Readings:
    """`place` gives the frames, module calls and regions of what runs now; of the
    decisions that random numbers make, those of the numbers in `true` are true."""

    def __init__(
        self,
        bindings: Bindings,
        world: FakeWorld,
        shadow: Shadow,
        place: Callable[[], dict[str, Any]],
        true: Collection[int],
    ) -> None:
        self.decisions: list[fx.Node] = []
        self._true = true
        self.notes: list[str] = []
        self._bindings, self._world, self._shadow, self._place = bindings, world, shadow, place
        self._made: dict[sympy.Expr, fx.Node] = {}
        self._decided: dict[fx.Node, bool] = {}

    def truth(self, tensor: Tensor) -> bool | None:
        """The truth value of a tensor, from now on guarded; None if there is none to rely on."""
        return self._decide(self._bindings.node(tensor))

    def number(self, tensor: Tensor) -> tuple[Any, fx.Node]:
        """The number in a tensor of one element, as a symbol and as a node."""
        kind = float if tensor.is_floating_point() else int
        return self._number(kind, ("call_method", "item", (self._bindings.node(tensor),)))

    def drawn(self, kind: type, call: tuple[Any, ...]) -> tuple[Any, fx.Node]:
        """The number that a call of Python's or NumPy's generator draws, in the same two forms."""
        value, node = self._number(kind, call)
        node.meta.update(random=True, draws_numbers=True)
        return value, node

    @property
    def drawn_symbols(self) -> set[sympy.Basic]:
        return {symbol for symbol, node in self._made.items() if node.meta.get("draws_numbers")}

    def _number(self, kind: type, call: tuple[Any, ...]) -> tuple[Any, fx.Node]:
        env = self._world.env
        is_float = kind is float
        value: Any = env.create_unbacked_symfloat() if is_float else env.create_unbacked_symint()
        node = self._bindings.add(call, value, **self._place())
        self._made[value.node.expr] = node
        return value, node

    def relation(self, expression: sympy.Basic) -> bool | None:
        """The truth value of a relation between such symbols and sizes, from now on guarded."""
        if type(expression) not in _RELATIONS:
            return None
        node = self.node(expression)
        return None if node is None else self._decide(node)

    def is_read(self, value: torch.SymInt | torch.SymFloat) -> bool:
        """Whether a number is known only when the values of tensors are, or is drawn."""
        size = self._world.size(value)
        return self._world.is_data_dependent((size,))

    def node(self, expression: sympy.Basic) -> fx.Node | None:
        """The node for an expression of numbers that values tell; None if it has none."""
        if expression in self._made:
            return self._made[expression]
        if isinstance(expression, sympy.Symbol):
            made = self._size_of_a_tensor(expression)
        else:
            made = self._operation(expression)
        if made is not None:
            self._made[expression] = made
        return made

    def examples(self) -> None:
        """Notes at each node whose size or number is known by its value only what it is for the
        example."""
        for node in list(self._bindings.graph.nodes):
            is_number = isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat))
            if is_number or node.meta["data_dependent"]:
                found = self._read(node, (lambda x: x) if is_number else (lambda x: tuple(x.shape)))
                if found:
                    node.meta["example"] = found[0]

    def _decide(self, condition: fx.Node) -> bool | None:
        if condition in self._decided:
            return self._decided[condition]
        if is_never_true(condition):
            return False
        if is_drawn(condition):
            self.decisions.append(condition)
            self._decided[condition] = len(self.decisions) - 1 in self._true
            return self._decided[condition]
        nodes = _ancestors(condition)
        is_given = any(node.op == "placeholder" for node in nodes)
        if not is_given and any(
            node.op in ("get_attr", "call_module") or node.meta["random"] for node in nodes
        ):
            return None  # State and random numbers will be others the next time.
        answers: set[bool] = set(self._read(condition, bool))
        if len(answers) != 1:
            return None
        (answer,) = answers
        self._decided[condition] = answer
        if is_given:
            self._guard(condition, answer)
        return answer

    def _guard(self, condition: fx.Node, answer: bool) -> None:
        place = self._place()
        frame = place["frames"][0]
        where = f"{short_path(frame).rpartition('/')[2]}:{frame.f_lineno}"
        guard = must_hold if answer else must_fail
        self._bindings.add(("call_function", guard, (condition, where)), None, **place)
        self.notes.append(
            f'"{source_text(frame, frame.f_lineno)}" ({where}) goes the way of the example inputs; '
            "inputs that go another way are refused when they come"
        )

    def _read(self, node: fx.Node, read: Callable[[Any], Any]) -> list[Any]:
        changed = self._bindings.changed_parameters()
        return self._shadow.read(node, self._bindings.constants, changed, read)

    def _size_of_a_tensor(self, symbol: sympy.Symbol) -> fx.Node | None:
        for bound in self._bindings.bound.values():
            for dimension, size in enumerate(bound.tensor.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    call = ("call_method", "size", (bound.node, dimension))
                    return self._bindings.add(call, size, **self._place())
        return None

    def _operation(self, expression: sympy.Basic) -> fx.Node | None:
        function = _RELATIONS.get(type(expression)) or _ARITHMETIC.get(type(expression))
        if function is None:
            return None
        arguments = [self._argument(part) for part in expression.args]
        if any(argument is None for argument in arguments):
            return None

        def apply(left: Any, right: Any) -> fx.Node:
            call = ("call_function", function, (left, right))
            return self._bindings.add(call, 0, **self._place())

        made: fx.Node = reduce(apply, arguments)
        return made

    def _argument(self, part: sympy.Basic) -> Any:
        if part.is_number:
            return int(part) if part.is_integer else float(part)
        named = part.xreplace(self._world.env.named)
        size = self._world.as_size(named)
        return self.node(part) if self._world.is_data_dependent((size,)) else size


def _ancestors(node: fx.Node) -> set[fx.Node]:
    waiting, seen = [node], {node}
    while waiting:
        fresh = [used for used in waiting.pop().all_input_nodes if used not in seen]
        seen.update(fresh)
        waiting += fresh
    return seen
