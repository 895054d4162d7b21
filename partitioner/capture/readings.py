"""Values that forward reads from tensors -> answers, guards, and numbers that are nodes.

`Readings` answers forward. `if mask.any():` gets the answer of the example, and a guard.
`lengths.max().item()` and the sizes of `mask.nonzero()` are symbols to torch; in the graph they
are nodes, and so is arithmetic on them. A tensor such as `torch.arange(length)` has an answer
without a guard, if it is the same at all sizes.

`Shadow` computes the answers: it runs the recorded nodes with the model's real numbers, each node
once. It also runs them at other sizes, to detect an answer that is only right for the example's.

`run_opaque` gives fake results for what cannot run on fake tensors: a module kept as one node may
branch on values or loop over them, and an operator may have no rule for its shapes. It runs on
invented inputs of several sizes, and each size of its results is fitted by an expression in the
free sizes: `a*m + b`, where m is a free size or a product of two.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import FloorDiv, PythonMod

from ...runtime.errors import CaptureError
from ...runtime.rng import number_state, set_number_state
from .arguments import Arguments, map_leaves, tensors_in
from .bindings import Bindings
from .fake_inputs import FakeWorld
from .graph import Capture, must_fail, must_hold, run, tensor_spec
from .model_state import seed_all, unchanged, verify_strided
from .random_numbers import RandomDraws, ancestors, is_drawn, same_answer
from .source_lines import short_path, source_text, where
from .values import CallSite, Size, known_answer

Sizes = dict[str, int]

_RELATIONS: Mapping[type, Callable[..., Any]] = {
    sympy.Eq: operator.eq, sympy.Ne: operator.ne, sympy.Lt: operator.lt, sympy.Le: operator.le,
    sympy.Gt: operator.gt, sympy.Ge: operator.ge,
}  # fmt: skip
_ARITHMETIC: Mapping[type, Callable[..., Any]] = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv,
    PythonMod: operator.mod, sympy.Mod: operator.mod,
}  # fmt: skip


class Readings:
    """Answers questions of forward about values.

    decisions: the conditions on random numbers, in order
    notes: remarks for the user
    state_asked: the parameter or buffer on which the last condition without an answer depends

    `site` gives the frames, module calls and regions of the current line; `true` are the numbers
    of the decisions that are true.
    """

    def __init__(
        self,
        bindings: Bindings,
        world: FakeWorld,
        shadow: Shadow,
        site: Callable[[], CallSite],
        true: Collection[int],
    ) -> None:
        self.decisions: list[fx.Node] = []
        self.state_asked = ""
        self._true = true
        self.notes: list[str] = []
        self._bindings, self._world, self._shadow, self._site = bindings, world, shadow, site
        self._made: dict[sympy.Expr, fx.Node] = {}
        self._decided: dict[fx.Node, bool] = {}

    def truth(self, tensor: Tensor) -> bool | None:
        """The truth value of a tensor, with a guard; None if it is not reliable."""
        return self._decide(self._bindings.node(tensor))

    def number(self, tensor: Tensor) -> tuple[Any, fx.Node]:
        """The number in a tensor of one element, as a symbol and as a node."""
        kind = float if tensor.is_floating_point() else int
        return self._number(kind, ("call_method", "item", (self._bindings.node(tensor),)))

    def drawn(self, kind: type, call: tuple[Any, ...]) -> tuple[Any, fx.Node]:
        """The number drawn by Python's or NumPy's generator, as a symbol and as a node."""
        value, node = self._number(kind, call)
        node.meta.update(random=True, draws_numbers=True)
        return value, node

    def is_known(self, tensor: Any) -> bool:
        """True if the values of a fake tensor follow from sizes only."""
        bound = self._bindings.bound.get(id(tensor))
        return bound is not None and bool(bound.node.meta["from_sizes"])

    def known(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        """The result of `read`, if it is the same for all sizes; None if it is not."""
        if not self.is_known(tensor):
            return None
        hints = self._world.hints
        samples = [{name: size + more for name, size in hints.items()} for more in (0, 1, 5)]
        return known_answer(self._bindings.bound[id(tensor)].node, samples, read)

    @property
    def drawn_symbols(self) -> set[sympy.Basic]:
        return {symbol for symbol, node in self._made.items() if node.meta.get("draws_numbers")}

    def _number(self, kind: type, call: tuple[Any, ...]) -> tuple[Any, fx.Node]:
        env = self._world.env
        is_float = kind is float
        value: Any = env.create_unbacked_symfloat() if is_float else env.create_unbacked_symint()
        node = self._bindings.add(call, value, self._site())
        self._made[value.node.expr] = node
        return value, node

    def relation(self, expression: sympy.Basic) -> bool | None:
        """The truth value of a relation between such symbols and sizes, with a guard."""
        if type(expression) not in _RELATIONS:
            return None
        node = self.node(expression)
        return None if node is None else self._decide(node)

    def is_read(self, value: torch.SymInt | torch.SymFloat) -> bool:
        """True if a number depends on the values of tensors, or is random."""
        size = self._world.size(value)
        return self._world.is_data_dependent((size,))

    def node(self, expression: sympy.Basic) -> fx.Node | None:
        """The node for an expression of such numbers; None if it has none."""
        if expression in self._made:
            return self._made[expression]
        if isinstance(expression, sympy.Symbol):
            node = self._size_of_a_tensor(expression)
        else:
            node = self._operation(expression)
        if node is not None:
            self._made[expression] = node
        return node

    def examples(self) -> None:
        """Sets `meta["example"]` of each node with a data-dependent size or number."""
        for node in list(self._bindings.graph.nodes):
            is_number = isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat))
            if is_number or node.meta["data_dependent"]:
                read = (lambda x: x) if is_number else (lambda x: tuple(x.shape))
                if results := self._read(node, read):
                    node.meta["example"] = results[0]

    def _decide(self, condition: fx.Node) -> bool | None:
        if condition in self._decided:
            return self._decided[condition]
        if (answer := same_answer(condition)) is not None:
            return answer
        if is_drawn(condition):
            self.decisions.append(condition)
            self._decided[condition] = len(self.decisions) - 1 in self._true
            return self._decided[condition]
        nodes = ancestors(condition)
        is_given = any(node.op == "placeholder" for node in nodes)
        if not is_given and any(
            node.op in ("get_attr", "call_module") or node.meta["random"] for node in nodes
        ):
            # State and random numbers change until the next call.
            self.state_asked = next((str(n.target) for n in nodes if n.op == "get_attr"), "")
            return None
        answers: set[bool] = set(self._read(condition, bool))
        if len(answers) != 1:
            return None
        (answer,) = answers
        self._decided[condition] = answer
        if is_given:
            self._guard(condition, answer)
        return answer

    def _guard(self, condition: fx.Node, answer: bool) -> None:
        site = self._site()
        frame = site.frames[0]
        where = f"{short_path(frame).rpartition('/')[2]}:{frame.f_lineno}"
        guard = must_hold if answer else must_fail
        self._bindings.add(("call_function", guard, (condition, where)), None, site)
        self.notes.append(
            f'"{source_text(frame, frame.f_lineno)}" ({where}) takes the branch of the example '
            "inputs; inputs that take another branch are refused at run time"
        )

    def _read(self, node: fx.Node, read: Callable[[Any], Any]) -> list[Any]:
        changed = self._bindings.changed_parameters()
        return self._shadow.read(node, self._bindings.constants, changed, read)

    def _size_of_a_tensor(self, symbol: sympy.Symbol) -> fx.Node | None:
        for bound in self._bindings.bound.values():
            for dimension, size in enumerate(bound.tensor.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    call = ("call_method", "size", (bound.node, dimension))
                    return self._bindings.add(call, size, self._site())
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
            return self._bindings.add(call, 0, self._site())

        result: fx.Node = reduce(apply, arguments)
        return result

    def _argument(self, part: sympy.Basic) -> Any:
        if part.is_number:
            return int(part) if part.is_integer else float(part)
        named = part.xreplace(self._world.env.named)
        size = self._world.as_size(named)
        return self.node(part) if self._world.is_data_dependent((size,)) else size


class Shadow:
    """Real runs of one trace: the first on the example itself, others at other sizes."""

    def __init__(
        self,
        world: FakeWorld,
        given: Arguments,
        others: Sequence[Mapping[str, Tensor]],
        training: bool,
    ) -> None:
        self._world, self._given, self._training = world, given, training
        samples = [given.tensors, *others]
        runs = [_Run(sample, seed) for seed, sample in enumerate(samples)]
        self._runs = [] if world.is_on_meta else runs

    def read(
        self,
        node: fx.Node,
        constants: Mapping[str, Tensor],
        changed: tuple[str, ...],
        read: Callable[[Any], Any],
    ) -> list[Any]:
        """The result of `read` for the node's value, in each run.

        Empty for a model on meta, or if the example itself fails. `changed` are the parameters
        that forward has changed so far.
        """
        capture = Capture(
            graph=node.graph,
            model=self._world.model,
            inputs=tuple(tensor_spec(given) for given in node.graph.find_nodes(op="placeholder")),
            arguments=self._given,
            sizes=dict(self._world.hints),
            calls={},
            constants=constants,
            changed=changed,
        )
        results = []
        with _disable_current_modes(), self._world.outside(), torch.no_grad():
            for sample in self._runs:
                try:
                    results.append(read(sample.value(capture, node, self._training)))
                except Exception:  # The model refuses these sizes.
                    self._runs = self._runs[: self._runs.index(sample)]
                    break
        return results


class _Run:
    def __init__(self, inputs: Mapping[str, Tensor], seed: int) -> None:
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        self._seed = seed
        self._values: dict[fx.Node, Any] = {}
        self._state: dict[str, Tensor] = {}
        self._random: tuple[Tensor, Tensor] | None = None

    def value(self, capture: Capture, node: fx.Node, training: bool) -> Any:
        """The node's value; first runs the nodes recorded since the last call."""
        pending = [operand for operand in capture.graph.nodes if operand not in self._values]
        model = capture.model
        with unchanged(model, capture.changed):
            parameters = {name: model.get_parameter(name) for name in capture.changed}
            state = dict(model.named_buffers()) | parameters
            for name, value in self._state.items():
                state[name].copy_(value)
            if self._random is None:
                seed_all(self._seed)
            else:
                torch.set_rng_state(self._random[0])
                set_number_state(self._random[1])
            run(capture, self._inputs, training=training, nodes=pending, env=self._values)
            self._values.update(
                (operand, None) for operand in pending if operand not in self._values
            )
            self._random = torch.get_rng_state(), number_state()
            self._state = {name: value.clone() for name, value in state.items()}
        return self._values[node]


def run_opaque(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world: FakeWorld,
    random: RandomDraws,
) -> Any:
    """Fake results of a call, whose draws are noted in `random`.

    Raises CaptureError if the shapes of the results depend on more than the sizes of the arguments.
    """
    module = func if isinstance(func, nn.Module) else nn.Module()
    name = getattr(func, "__name__", type(func).__name__)
    if world.is_on_meta:
        raise CaptureError(
            f"{name} depends on tensor values, and the model has none: it is on meta.",
            "Give the model weights; random ones are enough.",
        )
    samples = _samples(world.hints)
    results, changes = [], []
    with _disable_current_modes(), world.outside(), torch.no_grad():
        for sizes in samples:
            given = map_leaves(lambda leaf: _real(leaf, world, sizes), (args, kwargs))  # noqa: B023
            with unchanged(module, dict(module.named_parameters())):
                reached = [*tensors_in(given), *module.parameters(), *module.buffers()]
                versions = [tensor._version for tensor in reached]
                states = torch.get_rng_state(), number_state()
                results.append(func(*given[0], **given[1]))
                random.drawn |= not torch.equal(states[0], torch.get_rng_state())
                random.drew_numbers |= not torch.equal(states[1], number_state())
                pairs = zip(reached, versions, strict=True)
                changes = [tensor._version != version for tensor, version in pairs]
            for leaf in tensors_in(results[-1]):
                verify_strided({f"{name} ({where(world.env.top)})": leaf}, "result of")
    resolved = iter(_fitted(name, results, samples))
    needs_grad = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (*tensors_in((args, kwargs)), *module.parameters())
    )

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [_symbolic(world, *size) for size in next(resolved)]
        empty = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        return empty.requires_grad_(needs_grad and (leaf.is_floating_point() or leaf.is_complex()))

    for tensor, changed in zip(
        (*tensors_in((args, kwargs)), *module.parameters(), *module.buffers()),
        changes,
        strict=True,
    ):
        if changed:
            with torch.no_grad():
                tensor.copy_(tensor)  # so that the change is seen
    return pytree.tree_map(fake, results[0])


def _fitted(
    name: str, results: Sequence[Any], samples: Sequence[Sizes]
) -> list[list[tuple[tuple[str, ...], int, int]]]:
    """The sizes of each tensor among the results, as `_fit` gives them."""
    shapes = [
        [leaf.shape for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for result in results
    ]
    if len({len(values) for values in shapes}) != 1 or not _are_alike(results):
        raise _unsure(name)
    return [_fit(name, values, samples) for values in zip(*shapes, strict=True)]


def _are_alike(results: Sequence[Any]) -> bool:
    """True if the leaves other than tensors are equal in all results."""
    plain = [
        [None if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(result)]
        for result in results
    ]
    return all(item == plain[0] for item in plain)


def _samples(hints: Sizes) -> list[Sizes]:
    """The sizes of the example, then each size changed by two amounts, then all changed."""
    alone = [{**hints, name: hints[name] + more} for name in hints for more in (1, 3)]
    return [hints, *alone, {name: size + 2 for name, size in hints.items()}]


def _real(leaf: Any, world: FakeWorld, sizes: Sizes) -> Any:
    if isinstance(leaf, Tensor):
        shape = [
            int(size.evaluate(sizes)) if isinstance(size, Size) else size
            for size in world.shape(leaf)
        ]
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.randn(shape, device=leaf.device).to(leaf.dtype)
        return torch.ones(shape, dtype=leaf.dtype, device=leaf.device)
    if isinstance(leaf, torch.SymInt):
        size = world.size(leaf)
        return size.evaluate(sizes) if isinstance(size, Size) else size
    return leaf


def _fit(
    name: str, shapes: Sequence[torch.Size], samples: Sequence[Sizes]
) -> list[tuple[tuple[str, ...], int, int]]:
    """For each dimension the free sizes to multiply, the factor a and the rest b."""
    if len({len(shape) for shape in shapes}) != 1:
        raise _unsure(name)
    return [_fit_one(name, sizes, samples) for sizes in zip(*shapes, strict=True)]


def _fit_one(
    name: str, values: Sequence[int], samples: Sequence[Sizes]
) -> tuple[tuple[str, ...], int, int]:
    symbols = list(samples[0])
    pairs = itertools.combinations_with_replacement(symbols, 2)
    for factors in [(), *((symbol,) for symbol in symbols), *pairs]:
        terms = [_product(factors, sizes) for sizes in samples]
        slope, rest = 0, values[0]
        if terms[-1] != terms[0]:
            slope = (values[-1] - values[0]) // (terms[-1] - terms[0])
            rest = values[0] - slope * terms[0]
        if all(slope * term + rest == value for term, value in zip(terms, values, strict=True)):
            return factors, slope, rest
    raise _unsure(name)


def _product(factors: Sequence[str], sizes: Any) -> Any:
    product = 1
    for factor in factors:
        product = product * sizes[factor]
    return product


def _symbolic(world: FakeWorld, factors: tuple[str, ...], slope: int, rest: int) -> Any:
    return slope * _product(factors, world.symbols) + rest if slope else rest


def _unsure(name: str) -> CaptureError:
    return CaptureError(
        f"the shapes of the results of {name} depend on tensor values.",
        "Keep the module around it as one node, so that these results stay inside.",
    )
