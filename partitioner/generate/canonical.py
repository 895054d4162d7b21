"""A function body -> its structure without numbers, and the numbers.

Two calls are written as one class if their keys are equal: the same operations on the same
values, constants, children and tensors, the same arguments and results. Numbers stand apart, in
the order in which they occur, so that instances which differ only in some of them can share a
class that takes those as arguments.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture import Capture, IfTraining, LocalDevice, Recompute, Size
from ..capture.leaves import is_torch_leaf
from ..constructors import Constructor, construct
from .buffers import rebuild
from .expressions import literals
from .items import Body, Call, Conflict, Item, Loop, Op, Segment, own_name


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number stands in a body: an operation's argument (`node`, `position`), or a
    leaf's argument, a tensor's dimension or a child's argument (`member`, `position`)."""

    position: int | str
    node: fx.Node | None = None
    member: str = ""


@dataclass(frozen=True, slots=True)
class Number:
    place: Place
    value: Any
    name: str


@dataclass(frozen=True, slots=True)
class Leaf:
    path: str
    constructor: Constructor


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter, buffer or constant that a body uses directly."""

    path: str
    tensor: Tensor
    is_parameter: bool
    is_persistent: bool


@dataclass(frozen=True, slots=True, eq=False)
class Canonical:
    """A body's key, its numbers and what it uses of the module it belongs to."""

    body: Body
    key: Hashable
    numbers: tuple[Number, ...]
    leaves: tuple[Leaf, ...]
    tensors: tuple[Held, ...]
    children: tuple[Call, ...]


class Canonicalizer:
    """Makes bodies canonical; every module and tensor is described once."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._leaf_targets = {
            str(node.target) for node in capture.graph.nodes if node.op == "call_module"
        }
        self._constructors: dict[str, Constructor] = {}
        self._done: dict[Body, Canonical] = {}
        saved = set(capture.model.state_dict(keep_vars=True))
        self._persistent = saved

    @property
    def imported_classes(self) -> frozenset[str]:
        """Names of the classes of leaves that generated code imports."""
        kinds = {type(self._capture.model.get_submodule(path)) for path in self._leaf_targets}
        return frozenset(
            kind.__qualname__ for kind in kinds if getattr(nn, kind.__name__, None) is not kind
        )

    def canonical(self, body: Body) -> Canonical:
        if body not in self._done:
            self._done[body] = _Walk(self, self._capture, body).canonical()
        return self._done[body]

    def leaf_of(self, name: str) -> str | None:
        """The path of the leaf module that a tensor belongs to."""
        parts = name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path in self._leaf_targets or is_torch_leaf(self._capture.model.get_submodule(path)):
                return path
        return None

    def constructor(self, path: str) -> Constructor:
        if path not in self._constructors:
            module = self._capture.model.get_submodule(path)
            self._constructors[path] = construct(module, path, self._capture.model)
        return self._constructors[path]

    def held(self, name: str) -> Held:
        if name in self._capture.constants:
            return Held(name, self._capture.constants[name], False, False)
        path, _, last = name.rpartition(".")
        tensor = getattr(self._capture.model.get_submodule(path), last)
        assert isinstance(tensor, Tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        return Held(name, tensor, is_parameter, name in self._persistent)


class _Walk:
    def __init__(self, owner: Canonicalizer, capture: Capture, body: Body) -> None:
        self._owner = owner
        self._capture = capture
        self._body = body
        self._index: dict[fx.Node, int] = {}
        self._numbers: list[Number] = []
        self._leaves: dict[str, Leaf] = {}
        self._tensors: dict[str, Held] = {}
        self._children: dict[str, Call] = {}

    def canonical(self) -> Canonical:
        body = self._body
        for node in body.inputs:
            self._number(node)
        steps = tuple(self._item(item, body) for item in body.items)
        results = tuple(self._value(node) for node in body.results)
        members = [self._leaf_key(leaf) for leaf in self._leaves.values()]
        members += [self._tensor_key(held) for held in self._tensors.values()]
        key = (body.type_name, len(body.inputs), body.symbols, steps, results, tuple(members))
        return Canonical(
            body,
            key,
            tuple(self._numbers),
            tuple(self._leaves.values()),
            tuple(self._tensors.values()),
            tuple(self._children.values()),
        )

    def _number(self, node: fx.Node) -> int:
        return self._index.setdefault(node, len(self._index))

    def _relative(self, path: str) -> str:
        base = self._body.path
        if base and not path.startswith(f"{base}."):
            raise Conflict([base])  # it calls a module that is not below it
        return path[len(base) + 1 :] if base else path

    def _item(self, item: Item, around: Body) -> Hashable:
        match item:
            case Op():
                return (self._op(item, around), _options(item.recompute))
            case Segment(recompute, body):
                given = tuple(self._value(node) for node in body.inputs)
                inside = tuple(self._item(inner, body) for inner in body.items)
                made = tuple(map(self._number, body.results))
                regions = body.regions[len(around.regions) :]
                return ("segment", _options(recompute), given, inside, made, regions)
            case Loop(calls):
                return tuple(self._item(call, around) for call in calls)
            case Call(call, body, chain):
                inputs = tuple(self._value(node) for node in body.inputs)
                regions = body.regions[len(around.regions) :]
                if chain:
                    steps: Hashable = tuple(self._item(inner, body) for inner in body.items)
                    key: Hashable = ("chain", steps)
                else:
                    self._children.setdefault(call.path, item)
                    key = self._owner.canonical(body).key
                results = tuple(map(self._number, item.results))
                options = _options(item.recompute)
                return ("call", self._relative(call.path), key, inputs, results, regions, options)

    def _op(self, op: Op, around: Body) -> Hashable:
        node = op.node
        arguments = (self._argument(node.args), self._argument(dict(node.kwargs)))
        target: Hashable = node.target
        if node.op == "call_module":
            self._use_leaf(str(node.target))
            target = self._relative(str(node.target))
        for position, value in enumerate(literals(node)):
            self._numbers.append(Number(Place(position, node), value, ""))
        regions = node.meta.get("regions", ())[len(around.regions) :]
        items = tuple(item and self._number(item) for item in op.items) or self._number(node)
        return (node.op, target, arguments, items, regions)

    def _argument(self, argument: Any) -> Hashable:
        match argument:
            case fx.Node():
                return self._value(argument)
            case bool() | None | str():
                return argument
            case int() | float():
                return type(argument).__name__
            case Size():
                return str(argument)
            case IfTraining():
                return ("training", argument.train, argument.eval)
            case LocalDevice():
                return LocalDevice
            case tuple() | list():
                return (type(argument).__name__, *map(self._argument, argument))
            case dict():
                return tuple((key, self._argument(value)) for key, value in argument.items())
            case slice():
                ends = (argument.start, argument.stop, argument.step)
                return ("slice", *map(self._argument, ends))
        return repr(argument)

    def _value(self, node: fx.Node) -> Hashable:
        if node.op == "get_attr" and node not in self._index:
            name = own_name(node, self._body.path)
            assert name is not None, node
            if leaf := self._owner.leaf_of(name):
                self._use_leaf(leaf)
            else:
                self._use_tensor(name)
            return ("own", self._relative(name))
        return ("value", self._index[node])

    def _use_leaf(self, path: str) -> None:
        if path in self._leaves:
            return
        leaf = self._leaves[path] = Leaf(path, self._owner.constructor(path))
        for argument in leaf.constructor.arguments:
            if is_number(argument.value):
                place = Place(argument.name, member=path)
                self._numbers.append(Number(place, argument.value, argument.name))

    def _use_tensor(self, name: str) -> None:
        if name in self._tensors:
            return
        held = self._tensors[name] = self._owner.held(name)
        for dimension, length in enumerate(held.tensor.shape):
            self._numbers.append(Number(Place(dimension, member=name), length, "size"))

    def _leaf_key(self, leaf: Leaf) -> Hashable:
        constructor = leaf.constructor
        arguments = tuple(
            (item.name, None if is_number(item.value) else repr(item.value))
            for item in constructor.arguments
        )
        frozen = (constructor.frozen, constructor.frozen_names)
        return (self._relative(leaf.path), constructor.type, arguments, frozen)

    def _tensor_key(self, held: Held) -> Hashable:
        tensor = held.tensor
        kind = (held.is_parameter, held.is_persistent, tensor.requires_grad)
        made = None if held.is_parameter or held.is_persistent else str(rebuild(tensor))
        return (self._relative(held.path), tensor.dtype, tensor.dim(), kind, made)


def _options(recompute: Recompute | None) -> Hashable:
    return recompute and recompute.options


def is_number(value: Any) -> bool:
    """Whether a constructor's argument may differ between the instances of one class."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, (bool, torch.SymInt))


def calls_in(items: tuple[Item, ...]) -> Iterator[Call]:
    """The calls in a body that are not in another call's body; those in a chain are."""
    for item in items:
        match item:
            case Call(_, body, chain):
                if chain:
                    yield from calls_in(body.items)
                else:
                    yield item
            case Segment(_, body):
                yield from calls_in(body.items)
            case Loop(calls):
                yield from calls
