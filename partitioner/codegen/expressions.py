"""Arguments of graph nodes -> Python expressions.

`write` writes one argument and `write_operation` a whole node: operators as operators,
`torch.nn.functional` as `F`, methods as methods. A `Names` supplies the parts that depend on the
function: the names of values, sizes and devices.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol

import sympy
import torch
from torch import fx
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket

from ...runtime.errors import PlanError
from ...runtime.tensor_parallel.functions import local
from ..capture import IfTraining, Local, LocalDevice, Size
from ..capture.graph import must_fail, must_fit, other_way, unfit
from ..capture.mode_merge import is_of_training, unless
from ..capture.values import AUGMENTED
from . import layout
from .constants import name_callable, write_constant, write_size
from .layout import Code, bracket, call, infix, is_name, named, prefixed


class Names(Protocol):
    """The names in the function that is being written."""

    def value(self, node: fx.Node) -> Code: ...
    def size(self, symbol: str) -> Code: ...
    def device(self) -> Code: ...
    def module(self, path: str) -> str: ...
    def literal(self, node: fx.Node, position: int, value: Any) -> Code | None: ...
    def require(self, module: str, name: str) -> None: ...


_INFIX: Mapping[Callable[..., Any], tuple[str, int]] = {
    operator.or_: ("|", layout.BIT_OR),
    operator.xor: ("^", layout.BIT_XOR),
    operator.and_: ("&", layout.BIT_AND),
    operator.lshift: ("<<", layout.SHIFT),
    operator.rshift: (">>", layout.SHIFT),
    operator.add: ("+", layout.ADD),
    operator.sub: ("-", layout.ADD),
    operator.mul: ("*", layout.MULTIPLY),
    operator.truediv: ("/", layout.MULTIPLY),
    operator.floordiv: ("//", layout.MULTIPLY),
    operator.mod: ("%", layout.MULTIPLY),
    operator.matmul: ("@", layout.MULTIPLY),
    operator.pow: ("**", layout.POWER),
    operator.eq: ("==", layout.COMPARE),
    operator.ne: ("!=", layout.COMPARE),
    operator.lt: ("<", layout.COMPARE),
    operator.le: ("<=", layout.COMPARE),
    operator.gt: (">", layout.COMPARE),
    operator.ge: (">=", layout.COMPARE),
}
# A graph may have `x.__pow__(2)` for `x**2` and `x.__rsub__(1)` for `1 - x`.
_SPECIAL_METHODS = {
    f"__{prefix}{function.__name__.strip('_')}__": (written, prefix == "r")
    for function, written in _INFIX.items()
    for prefix in ("", "r")
}
_PREFIX = {operator.neg: "-", operator.invert: "~", operator.pos: "+"}
# Methods that take sizes either as one tuple or as separate arguments.
_SPREAD = frozenset({"view", "reshape", "expand", "permute", "repeat", "tile"})


def literals(node: fx.Node) -> Iterator[Any]:
    """The numbers among a node's arguments, in the order in which they are written."""

    def walk(argument: Any) -> Iterator[Any]:
        match argument:
            case bool():
                pass
            case int() | float():
                yield argument
            case Local(number):
                yield from walk(number)
            case tuple() | list():
                for item in argument:
                    yield from walk(item)
            case dict():
                for item in argument.values():
                    yield from walk(item)
            case slice():
                yield from walk((argument.start, argument.stop, argument.step))

    yield from walk((node.args, node.kwargs))


class ArgumentWriter:
    """Writes the arguments of one node; counts numbers in the order of `literals`."""

    def __init__(self, names: Names, node: fx.Node) -> None:
        self._names = names
        self._node = node
        self._position = 0

    def write(self, argument: Any) -> Code:
        match argument:
            case bool() | None:
                return Code(repr(argument))
            case int() | float():
                position, self._position = self._position, self._position + 1
                own = self._names.literal(self._node, position, argument)
                return own or write_constant(argument)
            case fx.Node():
                return self._names.value(argument)
            case Size():
                return write_size(argument.expr, self._names.size)
            case IfTraining():
                return _write_if_training(argument)
            case LocalDevice():
                return self._names.device()
            case Local(number, uneven):
                self._names.require(local.__module__, local.__name__)
                options = (Code("uneven=True"),) if uneven else ()
                return call(local.__name__, (self.write(number), *options))
            case slice():
                return self._slice(argument)
            case list():
                return bracket("[", tuple(map(self.write, argument)), "]")
            case tuple():
                items = tuple(map(self.write, argument))
                return bracket("(", items, ")", lone_comma=True)
            case dict():
                pairs = [
                    prefixed(f"{write_constant(key)}: ", self.write(value))
                    for key, value in argument.items()
                ]
                return bracket("{", tuple(pairs), "}")
        return write_constant(argument)

    def index(self, argument: Any) -> str:
        """The text between the brackets of `x[...]`."""
        if isinstance(argument, tuple) and argument:
            items = ", ".join(self.write(item).flat for item in argument)
            return items + ("," if len(argument) == 1 else "")
        return self.write(argument).flat

    def _slice(self, argument: slice) -> Code:
        ends = [
            None if end is None else self.write(end)
            for end in (argument.start, argument.stop, argument.step)
        ]
        simple = all(end is None or _is_simple_bound(end) for end in ends)
        start, stop, step = ends
        space = "" if simple else " "
        text = (start.flat + space if start else "") + ":"
        text += space + stop.flat if stop else ""
        if step is not None:
            text += f"{space if stop else ''}:{space}{step.flat}"
        return Code(text)


def _is_simple_bound(code: Code) -> bool:
    """Returns whether formatters write no spaces around a colon next to the expression."""
    return code.flat.removeprefix("-").replace("_", "").isalnum()


def _write_if_training(argument: IfTraining) -> Code:
    match argument.train, argument.eval:
        case True, False:
            return Code("self.training")
        case False, True:
            return Code("not self.training", layout.NOT)
    train, evaluation = write_constant(argument.train), write_constant(argument.eval)
    return Code(f"{train} if self.training else {evaluation}", layout.CONDITIONAL)


# --- operations -----------------------------------------------------------------------------


def write_operation(node: fx.Node, names: Names) -> Code:
    """The expression that computes a node; `write_mutation` writes nodes that mutate."""
    writer = ArgumentWriter(names, node)
    if node.op == "call_module":
        return call(names.module(str(node.target)), _arguments(writer, node.args, node.kwargs))
    if node.op == "call_method":
        return _method(writer, str(node.target), node.args, node.kwargs)
    assert callable(node.target), node
    return _function(writer, names, node.target, node.args, node.kwargs)


def write_arguments(node: fx.Node, names: Names) -> tuple[Code, ...]:
    """The arguments of a node's call."""
    return _arguments(ArgumentWriter(names, node), node.args, node.kwargs)


def write_mutation(node: fx.Node, names: Names) -> tuple[str, Code] | None:
    """`(target and operator, value)` of a node that Python writes as a statement, such as
    `x += y` or `x[i] = y`; None for all others."""
    writer = ArgumentWriter(names, node)
    if node.op != "call_function" or not callable(node.target):
        return None
    if node.target in AUGMENTED:
        changed, value = node.args
        target = writer.write(changed).within(layout.ATOM)
        return f"{target} {AUGMENTED[node.target]} ", writer.write(value)
    if node.target in (operator.setitem, setattr):
        changed, place, value = node.args
        target = writer.write(changed).within(layout.ATOM)
        if node.target is setattr and not is_name(str(place)):
            return None  # a call of setattr
        where = f".{place}" if node.target is setattr else f"[{writer.index(place)}]"
        return f"{target}{where} = ", writer.write(value)
    return None


def write_guard(node: fx.Node, names: Names) -> Code:
    """The condition under which a guard raises."""
    if isinstance(node.args[0], Size):
        return write_size(sympy.Not(node.args[0].expr), names.size)
    condition = ArgumentWriter(names, node).write(node.args[0])
    if node.target is must_fail:
        return condition
    return Code(f"not {condition.within(layout.NOT)}", layout.NOT)


def write_refusal(node: fx.Node, names: Names) -> Code:
    """The message of a guard that raises, as the expression of a string."""
    if node.target is not must_fit:
        return write_constant(other_way(str(node.args[1])))
    _, condition, sizes = node.args
    assert isinstance(sizes, dict)
    text = unfit(str(condition), {name: f"\1{name}\1" for name in sizes})
    quoted = write_constant(text.replace("{", "{{").replace("}", "}}")).flat
    for name in sizes:
        quoted = quoted.replace(f"\\x01{name}\\x01", f"{{{names.size(name)}}}")
    return Code(f"f{quoted}")


def _arguments(writer: ArgumentWriter, args: Any, kwargs: Mapping[str, Any]) -> tuple[Code, ...]:
    positional = [writer.write(argument) for argument in args]
    by_name = [named(name, writer.write(value)) for name, value in kwargs.items()]
    return (*positional, *by_name)


def _method(writer: ArgumentWriter, name: str, args: Any, kwargs: Mapping[str, Any]) -> Code:
    receiver, *rest = args
    if name in _SPECIAL_METHODS and len(rest) == 1 and not kwargs:
        (symbol, binds), is_reversed = _SPECIAL_METHODS[name]
        left, right = writer.write(receiver), writer.write(rest[0])
        return infix(symbol, binds, *((right, left) if is_reversed else (left, right)))
    target = writer.write(receiver).within(layout.ATOM)
    if name in _SPREAD and len(rest) == 1 and isinstance(rest[0], (tuple, list)) and rest[0]:
        rest = list(rest[0])
    return call(f"{target}.{name}", _arguments(writer, rest, kwargs))


def _function(
    writer: ArgumentWriter,
    names: Names,
    target: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
) -> Code:
    if target in _INFIX and len(args) == 2 and not kwargs:
        symbol, binds = _INFIX[target]
        left, right = map(writer.write, args)
        return infix(symbol, binds, left, right)
    if target in _PREFIX and len(args) == 1 and not kwargs:
        operand = writer.write(args[0])
        return Code(f"{_PREFIX[target]}{operand.within(layout.UNARY)}", layout.UNARY)
    if target is operator.getitem and args[1] == IfTraining(0, 1) and isinstance(args[0], tuple):
        train, evaluation = map(writer.write, args[0])
        inside = train.within(layout.CONDITIONAL + 1)
        text = f"{inside} if self.training else {evaluation.within(layout.CONDITIONAL)}"
        return Code(text, layout.CONDITIONAL)
    if target is unless:
        condition, computed, former = map(writer.write, args)
        inside = former.within(layout.CONDITIONAL + 1)
        mode = "self.training and " if is_of_training(args[0]) else ""
        text = f"{inside} if {mode}{condition.within(layout.COMPARE)} else {computed}"
        return Code(text, layout.CONDITIONAL)
    if target is operator.getitem:
        receiver = writer.write(args[0]).within(layout.ATOM)
        return Code(f"{receiver}[{writer.index(args[1])}]")
    if target is getattr and is_name(str(args[1])):
        return Code(f"{writer.write(args[0]).within(layout.ATOM)}.{args[1]}")
    if isinstance(target, OpOverload | OpOverloadPacket):
        name = _name_operator(target, names.require)
    else:
        name = name_callable(target, names.require)
    if name.startswith("Tensor.") and args:
        return _method(writer, name.removeprefix("Tensor."), args, kwargs)
    positional = tuple(map(writer.write, args))
    return call(name, (*positional, *_options(writer, target, kwargs)))


def _name_operator(
    target: OpOverload[..., Any] | OpOverloadPacket[..., Any], require: Callable[[str, str], None]
) -> str:
    """The name of an operator, where the module that registers it is imported.

    torch names the file of that module. Of the C++ library of a package there is only the
    namespace, which bears the package's name as a rule.
    """
    qualified = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
    namespace = qualified.partition("::")[0]
    registered = _REGISTERED.search(torch._C._dispatch_dump(qualified))
    file = registered[1] if registered else ""
    if definition := OPDEFS.get(qualified):
        module = definition._init_fn.__module__
    else:
        files = {getattr(each, "__file__", ""): name for name, each in [*sys.modules.items()]}
        module = files.get(file, namespace)
    if namespace != "aten" and not _OF_TORCH.search(file):
        if module == "__main__" or module not in sys.modules:
            raise PlanError(
                f"cannot write a call of torch.ops.{target}: no module is known that registers it.",
                "Keep the module that calls it as one node: --leaf CLASS.",
            )
        require(module, "")
    return f"torch.ops.{target}"


_REGISTERED = re.compile(r"registered at (.+):\d+")
_OF_TORCH = re.compile(r"aten/src/ATen|torch/csrc")

# The defaults of functions without a signature.
_BUILTIN_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "scaled_dot_product_attention": {
        "dropout_p": 0.0, "is_causal": False, "enable_gqa": False,
    },
    "gelu": {"approximate": "none"},
}  # fmt: skip


def _options(
    writer: ArgumentWriter, target: Callable[..., Any], kwargs: Mapping[str, Any]
) -> Iterator[Code]:
    """Keyword arguments without those that equal their default."""
    defaults = _defaults(target)
    for name, value in kwargs.items():
        if name == "p" and _drops_in_training(kwargs):
            value = value.train
        code = writer.write(value)
        if name not in defaults or not _is_written(code, defaults[name]):
            yield named(name, code)


def _drops_in_training(kwargs: Mapping[str, Any]) -> bool:
    """Returns whether `training=self.training` makes a choice of `p` by mode unnecessary."""
    switch = kwargs.get("training")
    return switch == IfTraining(True, False) and isinstance(kwargs["p"], IfTraining)


def _is_written(code: Code, default: Any) -> bool:
    plain = default is None or isinstance(default, (bool, int, float, str))
    return plain and write_constant(default).flat == code.flat


@cache
def _defaults(target: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        own = _BUILTIN_DEFAULTS.get(getattr(target, "__name__", ""), {})
        return _NoneByDefault(own)
    return {item.name: item.default for item in parameters if item.default is not item.empty}


class _NoneByDefault(dict[str, Any]):
    """Every optional argument of torch's built-in functions is None unless this dict has it."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> None:
        return None
