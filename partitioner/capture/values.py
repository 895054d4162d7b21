"""The values in a captured graph other than tensors, and properties of nodes.

A captured graph is a plain `torch.fx.Graph`. Concepts that fx lacks are objects inside the
arguments (`Size`, `IfTraining`, `Local`, `LocalDevice`) or in `node.meta` (`Region`, `Recompute`,
`ModuleCall`), so that the graph has no nodes for sizes, devices, enter and exit, and any part of it
can be written as Python.

`viewed` finds the tensor that a node views, `view_again` the call that takes the same view of a
copy; `is_mutating` finds changes in place.

`known_answer` evaluates tensors whose values follow from sizes only (`torch.arange(length)`),
so that forward may branch on them: a question such as "are the positions consecutive?" has one
answer for all sizes (transformers asks it). The nodes that made the tensor run with real numbers at
several sizes, and only a common answer counts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from .arguments import map_leaves


@dataclass(frozen=True)
class Size:
    """A size of a tensor, arithmetic on sizes, or a condition on them, in the symbols of the
    capture.

    >>> batch = sympy.Symbol("batch", integer=True, positive=True)
    >>> Size(2 * batch - 1)
    2*batch - 1
    >>> Size(2 * batch - 1).evaluate({"batch": 4})
    7
    """

    expr: sympy.Expr

    def evaluate(self, sizes: Mapping[str, int]) -> int | float:
        """The number, for these numbers of the symbols."""
        names = {"math": math, "max": max, "min": min, "int": int, "float": float, "abs": abs}
        number: int | float = eval(_compiled(str(self)), names, dict(sizes))  # noqa: S307
        return number

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(symbol.name for symbol in self.expr.free_symbols)

    def __str__(self) -> str:
        return size_text(self.expr)

    __repr__ = __str__


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<size>", "eval")


# Precedence of Python's operators, loosest first.
_LOGIC, _COMPARE, _ADD, _DIVIDE, _MUL, _POWER, _ATOM = range(7)
_RELATIONS = {"Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=",
    "StrictGreaterThan": ">", "GreaterThan": ">=",
}  # fmt: skip
_OPERATORS = {
    "FloorDiv": ("//", _DIVIDE), "CleanDiv": ("//", _DIVIDE), "Mod": ("%", _DIVIDE),
    "PythonMod": ("%", _DIVIDE), "IntTrueDiv": ("/", _DIVIDE), "FloatTrueDiv": ("/", _DIVIDE),
    "Pow": ("**", _POWER), "PowByNatural": ("**", _POWER), "FloatPow": ("**", _POWER),
}  # fmt: skip
_FUNCTIONS = {
    "Max": "max",
    "Min": "min",
    "Abs": "abs",
    "ToFloat": "float",
    "TruncToInt": "int",
    "FloorToInt": "math.floor",
    "CeilToInt": "math.ceil",
    "RoundToInt": "round",
}
_OPAQUE = "OpaqueUnaryFn_"


@lru_cache(maxsize=4096)
def size_text(expr: sympy.Expr) -> str:
    """A size expression as Python, such as `batch*(sequence + 1)//2`.

    Raises ValueError for an operation that has no Python text here.
    """
    return _text(expr)[0]


def _text(expr: sympy.Expr) -> tuple[str, int]:
    """The text, and the precedence of its outermost operator."""
    kind = type(expr).__name__
    if isinstance(expr, sympy.Symbol):
        return expr.name, _ATOM
    if isinstance(expr, sympy.Integer):
        return str(int(expr)), _ATOM if expr >= 0 else _ADD
    if isinstance(expr, sympy.Float):
        return repr(float(expr)), _ATOM if expr >= 0 else _ADD
    if isinstance(expr, sympy.Rational):
        return f"{expr.p}/{expr.q}", _DIVIDE
    if isinstance(expr, sympy.Add):
        return _sum_text(expr), _ADD
    if isinstance(expr, sympy.Mul):
        return "*".join(_wrapped(factor, _POWER) for factor in expr.as_ordered_factors()), _MUL
    if kind in _OPERATORS:
        operator, level = _OPERATORS[kind]
        # A quotient binds looser than a product here: a//b*c is correct but misleading.
        left, right = expr.args
        return f"{_wrapped(left, level + 1)}{operator}{_wrapped(right, _ATOM)}", level
    if kind in _RELATIONS:
        # The number is on the right, as usual.
        relation = expr.reversed if expr.args[0].is_number else expr
        left, right = (_wrapped(part, _ADD) for part in relation.args)
        return f"{left} {_RELATIONS[type(relation).__name__]} {right}", _COMPARE
    if isinstance(expr, (sympy.And, sympy.Or)):
        parts = sorted(_wrapped(part, _COMPARE) for part in expr.args)
        return (" and " if isinstance(expr, sympy.And) else " or ").join(parts), _LOGIC
    if isinstance(expr, sympy.Not):
        return f"not {_wrapped(expr.args[0], _ATOM)}", _LOGIC
    if isinstance(expr, sympy.floor):
        over, under = expr.args[0].as_numer_denom()
        return f"{_wrapped(over, _MUL)}//{_wrapped(under, _ATOM)}", _DIVIDE
    if kind in _FUNCTIONS or kind.startswith(_OPAQUE):
        function = _FUNCTIONS.get(kind) or f"math.{kind.removeprefix(_OPAQUE)}"
        inside = sorted(expr.args, key=lambda part: (part.is_number, str(part)))
        return f"{function}({', '.join(_text(part)[0] for part in inside)})", _ATOM
    raise ValueError(f"{expr} ({kind}) is not a size that can be written as Python")


def _sum_text(expr: sympy.Add) -> str:
    text = ""
    for term in expr.as_ordered_terms():
        sign = "-" if term.could_extract_minus_sign() else "+"
        part = _wrapped(-term if sign == "-" else term, _DIVIDE)
        text += f" {sign} {part}" if text else f"-{part}" if sign == "-" else part
    return text


def _wrapped(expr: sympy.Expr, level: int) -> str:
    text, binds = _text(expr)
    return text if binds >= level else f"({text})"


@dataclass(frozen=True)
class IfTraining:
    """An argument that is `train` in training mode and `eval` in evaluation mode."""

    train: Any
    eval: Any

    def __repr__(self) -> str:
        return f"({self.train!r} if self.training else {self.eval!r})"


@dataclass(frozen=True)
class Local:
    """A size in a model whose layers are split over ranks, of which each rank has a share. The
    shares are uneven if the size is not a multiple of the number of ranks."""

    number: int | Size
    uneven: bool = False

    def __repr__(self) -> str:
        return f"local({self.number}{', uneven=True' * self.uneven})"


@dataclass(frozen=True)
class LocalDevice:
    """The device of the model, whichever it is."""

    def __repr__(self) -> str:
        return "<local device>"


@dataclass(frozen=True)
class Region:
    """A block around a node.

    kind: `no_grad`, `enable_grad` or `autocast` for a `with`; `training` or `evaluation` for nodes
        of one mode; `if` or `unless` for nodes that depend on a random decision
    device_type, dtype, enabled, cache_enabled: the arguments of `autocast`
    decision: the number of the random decision; -1 for other kinds
    """

    kind: str
    device_type: str | LocalDevice | None = None
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache_enabled: bool = True
    decision: int = -1

    @property
    def is_decided(self) -> bool:
        """True if the nodes in it are not always run."""
        return self.kind in ("training", "evaluation", "unless", "if")

    def is_left_out(self, training: bool, decided: Mapping[int, bool]) -> bool:
        """True if its nodes are skipped in a mode, with these random decisions (default False)."""
        if self.decision >= 0:
            return decided.get(self.decision, False) is (self.kind == "unless")
        return self.kind == ("evaluation" if training else "training")


@dataclass(frozen=True)
class Recompute:
    """A call of `torch.utils.checkpoint.checkpoint`, whose operations run again in backward.

    number: a different number for each call in one forward
    depth: the number of module calls around it
    function: the name of its function
    use_reentrant, preserve_rng_state: its arguments
    """

    number: int
    depth: int
    function: str
    use_reentrant: bool
    preserve_rng_state: bool

    @property
    def options(self) -> tuple[tuple[str, bool], ...]:
        """The keyword arguments of the call."""
        reentrant = ("use_reentrant", self.use_reentrant)
        return (
            (reentrant,) if self.preserve_rng_state else (reentrant, ("preserve_rng_state", False))
        )


@dataclass(frozen=True)
class ModuleCall:
    """The `index`-th call (from 0) of the module named `path` in one forward."""

    path: str
    index: int


@dataclass(frozen=True)
class CallSite:
    """The place in the author's code from which a node is computed.

    frames: the frames of the author's code, the innermost first
    calls: the module calls around it
    regions: the regions around it
    recomputes: the recomputed parts around it
    """

    frames: Sequence[FrameType] = ()
    calls: Sequence[ModuleCall] = ()
    regions: Sequence[Region] = ()
    recomputes: Sequence[Recompute] = ()


NOWHERE = CallSite()
"""The place of inputs, constants and the output."""


@dataclass(frozen=True)
class CallRecord:
    """A call of a module that is not a leaf.

    type_name, module_path: the name of the module's class, and of the Python module that defines it
    arguments: the arguments by the names of forward's parameters, in order: nodes, sizes,
        constants, and tuples, lists and dicts of them; None for values outside the graph
    result: the result, in the same form
    """

    type_name: str
    module_path: str
    arguments: Mapping[str, Any]
    result: Any


_OF_SHAPE = frozenset({"view", "reshape", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"})
_OF_ORDER = frozenset(
    {"transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint"}
)
_OF_PARTS = frozenset(
    {"narrow", "select", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit"}
    | {"dsplit", "unbind", "diagonal", "unfold", "expand", "broadcast_to"}
)
_OF_ALL = frozenset({"detach", "alias", "contiguous", "to", "type", "float", "double", "long"})
_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# As another tensor -> to sizes.
_AS_ANOTHER = {"view_as": "view", "expand_as": "expand", "reshape_as": "reshape"}
_VIEWS = _OF_SHAPE | _OF_ORDER | _OF_PARTS | _OF_ALL | _AS_ANOTHER.keys()
# Copies if the layout in memory allows no view.
_BY_LAYOUT = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})


def _name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument that a node's value views, if the same call on a copy makes the same view."""
    source = _source(node)
    if source is None or node.meta["random"] or node.meta["mutates"]:
        return None
    if not node.meta["storages"] or node.meta["storages"] != source.meta["storages"]:
        return None
    if _name(node) == "detach" and node.meta["val"].requires_grad:
        return None  # A change gave it a gradient that its source lacks.
    if len(node.all_input_nodes) > 1:
        again = _name(node) in _AS_ANOTHER
    elif node.target is getattr:
        again = node.args[1] in _PROPERTIES
    else:
        again = node.target is operator.getitem or _name(node) in _VIEWS
    return source if again else None


def copied_for_its_layout(node: fx.Node) -> fx.Node | None:
    """The argument that a node copies only because of its layout in memory."""
    source = _source(node)
    if source is None or _name(node) not in _BY_LAYOUT:
        return None
    return None if node.meta["storages"] & source.meta["storages"] else source


def _source(node: fx.Node) -> fx.Node | None:
    source = node.args[0] if node.args else None
    is_call = node.op in ("call_function", "call_method")
    return source if is_call and isinstance(source, fx.Node) else None


def view_again(node: fx.Node, source: fx.Node) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """The fx call that views `source` as the node views its argument, without other nodes."""
    name = _AS_ANOTHER.get(_name(node))
    if name is not None:
        return "call_method", name, (source, tuple(node.meta["shape"])), {}
    return node.op, node.target, (source, *node.args[1:]), dict(node.kwargs)


READERS = frozenset({"__bool__", "__int__", "__float__", "__index__", "item", "tolist"})


def follows_from_sizes(node: fx.Node) -> bool:
    """True if a new node's value depends on no input, parameter, buffer or random number."""
    return (
        node.op in ("call_function", "call_method")
        and not node.meta["random"]
        and not node.meta["touches"]
        and not node.meta["mutates"]
        and all(used.meta["from_sizes"] for used in node.all_input_nodes)
    )


def known_answer(
    node: fx.Node, samples: Iterable[Mapping[str, int]], read: Callable[[Tensor], Any]
) -> Any:
    """The result of `read` for a node that follows from sizes; None if it differs between sizes."""
    nodes = _ancestors_of_known(node)
    memory = {storage for used in nodes for storage in used.meta["storages"]}
    if any(memory & other.meta["mutates"] for other in node.graph.nodes):
        return None
    with _disable_current_modes(), torch.no_grad():
        first, *others = [read(_evaluate(nodes, sizes)) for sizes in samples]
    return first if all(first == other for other in others) else None


def known_numbers(value: Any, bound: Mapping[int, Any]) -> Any:
    """The structure with numbers in place of the integer tensors of one element that depend on no
    size; `bound` has their nodes by `id`."""

    def number(leaf: Any) -> Any:
        is_number = isinstance(leaf, Tensor) and not (leaf.dim() or leaf.is_floating_point())
        if is_number and id(leaf) in bound and bound[id(leaf)].node.meta["from_sizes"]:
            with suppress(NameError):  # of a size
                found = known_answer(bound[id(leaf)].node, [{}], Tensor.item)
                return leaf if found is None else found
        return leaf

    return map_leaves(number, value)


def _ancestors_of_known(node: fx.Node) -> list[fx.Node]:
    ancestors: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in ancestors:
            ancestors.add(current)
            waiting += current.all_input_nodes
    return sorted(ancestors)


def _evaluate(nodes: list[fx.Node], sizes: Mapping[str, int]) -> Tensor:
    values: dict[fx.Node, Any] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, Size):
            return value.evaluate(sizes)
        return torch.device("cpu") if isinstance(value, LocalDevice) else value

    for node in nodes:
        args, kwargs = map_leaves(leaf, node.args), map_leaves(leaf, node.kwargs)
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    result = values[nodes[-1]]
    assert isinstance(result, Tensor)
    return result


def is_mutating(node: fx.Node) -> bool:
    """True if a node changes one of its arguments or a buffer in place."""
    if node.meta.get("mutates"):
        return True
    if node.op == "call_method":
        return _ends_in_place(str(node.target))
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":
        return name == "setitem" or node.target in AUGMENTED
    in_place = _ends_in_place(name) or name == "setattr"
    return in_place or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _ends_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


AUGMENTED: Mapping[Any, str] = {
    getattr(operator, f"i{name}"): f"{sign}="
    for name, sign in {
        "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%",
        "matmul": "@", "pow": "**", "and": "&", "or": "|", "xor": "^", "lshift": "<<",
        "rshift": ">>",
    }.items()
}  # fmt: skip
"""The functions of augmented assignments such as `x += y`, with their signs."""
