"""Graphs and function bodies in a normal form: simplified, and with numbers apart from structure.

The simplifier leaves out operations that change nothing, such as a move to the device where the
tensor already is, `positions + 0`, `x * 1.0` and `x[:, 0:]`. Modules and tensors with several names
get the name that the code around them uses.

The canonicalizer separates a body into a key and its numbers. Two calls become one class if their
keys are equal: the same operations on the same values, constants, children and tensors, the same
arguments and results. The numbers are listed in the order in which they occur, so that instances
that differ only in some numbers can share a class that takes these as arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...runtime.tensor_parallel.ranks import Split
from ..capture import Capture, IfTraining, Local, LocalDevice, ModuleCall, Recompute, Size
from ..capture.arguments import state_of
from ..capture.graph import LocalNames
from ..capture.leaf_modules import Constructor, construct
from ..capture.values import is_mutating
from ..models.torch_modules import is_torch_leaf
from ..split.split import StageGraph
from .constants import rebuild
from .expressions import literals
from .items import Body, Conflict, Item, Loop, Op, RecomputedSegment, SubmoduleCall, own_name


@dataclass(frozen=True, slots=True)
class NumberPlace:
    """The place of a number in a body.

    position: the position or name of the argument, or the dimension of the tensor
    node: the operation that takes the number as an argument, if there is one
    member: otherwise the leaf, tensor or child that the number belongs to
    """

    position: int | str
    node: fx.Node | None = None
    member: str = ""


@dataclass(frozen=True, slots=True)
class BodyNumber:
    place: NumberPlace
    value: Any
    name: str


@dataclass(frozen=True, slots=True)
class Leaf:
    path: str
    constructor: Constructor


@dataclass(frozen=True, slots=True)
class MemberTensor:
    """A parameter, buffer or constant that a body uses directly."""

    path: str
    value: Tensor
    is_parameter: bool
    is_persistent: bool
    split: Split | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Canonical:
    """The normal form of a body.

    body: the body itself
    key: its structure; bodies with equal keys can share a class
    numbers: its numbers in the order in which they occur
    leaves: the leaf modules that it uses
    tensors: the tensors that it uses directly
    children: the calls of modules in it
    """

    body: Body
    key: Hashable
    numbers: tuple[BodyNumber, ...]
    leaves: tuple[Leaf, ...]
    tensors: tuple[MemberTensor, ...]
    children: tuple[SubmoduleCall, ...]


class Canonicalizer:
    """Brings bodies into normal form; describes every module and tensor once."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._leaf_targets = {
            str(node.target) for node in capture.graph.nodes if node.op == "call_module"
        }
        self._constructors: dict[str, Constructor] = {}
        self._done: dict[Body, Canonical] = {}
        self._persistent = set(state_of(capture.model))

    @property
    def imported_classes(self) -> frozenset[str]:
        """The names of the leaf classes that generated code imports."""
        kinds = {type(self._capture.model.get_submodule(path)) for path in self._leaf_targets}
        return frozenset(k.__qualname__ for k in kinds if getattr(nn, k.__name__, None) is not k)

    def canonical(self, body: Body) -> Canonical:
        if body not in self._done:
            self._done[body] = _Walk(self, self._capture, body).canonical()
        return self._done[body]

    def leaf_of(self, name: str) -> str | None:
        """The path of the leaf module that holds a tensor."""
        parts = name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path in self._leaf_targets or is_torch_leaf(self._capture.model.get_submodule(path)):
                return path
        return None

    def constructor(self, path: str) -> Constructor:
        if path not in self._constructors:
            module = self._capture.model.get_submodule(path)
            self._constructors[path] = replace(
                construct(module, path, self._capture.model),
                split=self._capture.splits.get(path),
                is_shared=path in self._capture.shared,
            )
        return self._constructors[path]

    def tensor(self, name: str) -> MemberTensor:
        if name in self._capture.constants:
            return MemberTensor(name, self._capture.constants[name], False, False)
        path, _, last = name.rpartition(".")
        tensor = getattr(self._capture.model.get_submodule(path), last)
        assert isinstance(tensor, Tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        split = self._capture.splits.get(name)
        return MemberTensor(name, tensor, is_parameter, name in self._persistent, split)


class _Walk:
    def __init__(self, owner: Canonicalizer, capture: Capture, body: Body) -> None:
        self._owner = owner
        self._capture = capture
        self._body = body
        self._index: dict[fx.Node, int] = {}
        self._numbers: list[BodyNumber] = []
        self._leaves: dict[str, Leaf] = {}
        self._tensors: dict[str, MemberTensor] = {}
        self._children: dict[str, SubmoduleCall] = {}

    def canonical(self) -> Canonical:
        body = self._body
        for node in body.inputs:
            self._number(node)
        steps = tuple(self._item(item, body) for item in body.items)
        results = tuple(self._value(node) for node in body.results)
        members = [self._leaf_key(leaf) for leaf in self._leaves.values()]
        members += [self._tensor_key(member) for member in self._tensors.values()]
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
            case RecomputedSegment(recompute, body):
                given = tuple(self._value(node) for node in body.inputs)
                inside = tuple(self._item(inner, body) for inner in body.items)
                outputs = tuple(map(self._number, body.results))
                regions = body.regions[len(around.regions) :]
                return ("segment", _options(recompute), given, inside, outputs, regions)
            case Loop(calls):
                return tuple(self._item(call, around) for call in calls)
            case SubmoduleCall(call, body, chain):
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
            self._numbers.append(BodyNumber(NumberPlace(position, node), value, ""))
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
            case Local(number, uneven):
                return ("local", self._argument(number), uneven)
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
                place = NumberPlace(argument.name, member=path)
                self._numbers.append(BodyNumber(place, argument.value, argument.name))

    def _use_tensor(self, name: str) -> None:
        if name in self._tensors:
            return
        member = self._tensors[name] = self._owner.tensor(name)
        for dimension, length in enumerate(member.value.shape):
            self._numbers.append(BodyNumber(NumberPlace(dimension, member=name), length, "size"))

    def _leaf_key(self, leaf: Leaf) -> Hashable:
        constructor = leaf.constructor
        arguments = tuple(
            (item.name, None if is_number(item.value) else repr(item.value))
            for item in constructor.arguments
        )
        frozen = (constructor.frozen, constructor.frozen_names)
        kind = (constructor.type, constructor.split, constructor.is_shared)
        return (self._relative(leaf.path), kind, arguments, frozen)

    def _tensor_key(self, member: MemberTensor) -> Hashable:
        tensor = member.value
        kind = (member.is_parameter, member.is_persistent, tensor.requires_grad, member.split)
        expression = None if member.is_parameter or member.is_persistent else str(rebuild(tensor))
        return (self._relative(member.path), tensor.dtype, tensor.dim(), kind, expression)


def _options(recompute: Recompute | None) -> Hashable:
    return recompute and recompute.options


def is_number(value: Any) -> bool:
    """Returns whether a constructor's argument may differ between the instances of one class."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, (bool, torch.SymInt))


def calls_in(items: tuple[Item, ...]) -> Iterator[SubmoduleCall]:
    """The calls in a body outside the bodies of other calls; includes the calls of a chain."""
    for item in items:
        match item:
            case SubmoduleCall(_, body, chain):
                if chain:
                    yield from calls_in(body.items)
                else:
                    yield item
            case RecomputedSegment(_, body):
                yield from calls_in(body.items)
            case Loop(calls):
                yield from calls


def simplify(
    capture: Capture, stages: Sequence[StageGraph]
) -> tuple[Capture, tuple[StageGraph, ...]]:
    """A capture and stage graphs of new nodes with the old names, without operations that change
    nothing. Values that cross a boundary and results stay as they are."""
    return _Simplifier(capture, stages).result()


class _Simplifier:
    def __init__(self, capture: Capture, stages: Sequence[StageGraph]) -> None:
        self._capture = capture
        self._stages = stages
        self._names = LocalNames(capture)
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}
        nodes = capture.graph.nodes
        self._kept = {node for stage in stages for node in (*stage.inputs, *stage.outputs)}
        self._changed = {
            source for node in nodes if is_mutating(node) for source in node.all_input_nodes
        }
        self._changed_storages = {
            storage for node in nodes for storage in node.meta.get("mutates", ())
        }

    def result(self) -> tuple[Capture, tuple[StageGraph, ...]]:
        left_out = set()
        calls: dict[ModuleCall, ModuleCall] = {}
        for node in self._capture.graph.nodes:
            if node.op == "get_attr":
                continue
            source = self._same_as(node)
            if source is not None:
                new = self._new[node] = self._of(node, source)
                left_out.add(node)
                if new.op.startswith("call") and not new.meta.get("hint"):
                    new.meta["hint"] = node.meta.get("hint")  # it is now what the user named
                continue
            calls |= zip(node.meta.get("calls", ()), self._names.calls(node), strict=True)
            self._copy(node)
        records = {}
        for call, renamed in calls.items():
            if (record := self._capture.calls.get(call)) is not None:
                arguments, result = map(self._renewed, (record.arguments, record.result))
                records[renamed] = replace(record, arguments=arguments, result=result)
        stages = tuple(
            StageGraph(
                index=stage.index,
                nodes=tuple(self._new[node] for node in stage.nodes if node not in left_out),
                inputs=tuple(self._new[node] for node in stage.inputs),
                outputs=tuple(self._of(None, node) for node in stage.outputs),
            )
            for stage in self._stages
        )
        return replace(self._capture, graph=self._graph, calls=records), stages

    def _copy(self, node: fx.Node) -> None:
        copied = self._graph.node_copy(node, lambda source: self._of(node, source))
        copied.meta["calls"] = self._names.calls(node)
        if node.op == "call_module":
            copied.target = self._names.module(node)
        elif node.op == "call_method" and node.target == "to":
            copied.args, copied.kwargs = _without_device(copied)
        self._new[node] = copied

    def _of(self, reader: fx.Node | None, source: fx.Node) -> fx.Node:
        """The new node for a value that `reader` reads."""
        if source.op != "get_attr":
            return self._new[source]
        is_known = reader is not None and reader.op != "output"
        name = self._names.tensor(reader, source) if reader and is_known else str(source.target)
        if name not in self._attributes:
            node = self._attributes[name] = self._graph.get_attr(name)
            node.meta = dict(source.meta)
        return self._attributes[name]

    def _renewed(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            known = value.op == "get_attr" or value in self._new
            return self._of(None, value) if known else None
        if isinstance(value, (tuple, list)):
            return tuple(map(self._renewed, value))
        if isinstance(value, dict):
            return {key: self._renewed(item) for key, item in value.items()}
        return value

    def _same_as(self, node: fx.Node) -> fx.Node | None:
        """The argument that a node returns unchanged, if nothing distinguishes the two."""
        source = _unchanged(node)
        if source is None or source.op == "get_attr" or node in self._kept | self._changed:
            return None
        storages = {*node.meta.get("storages", ()), *source.meta.get("storages", ())}
        return None if storages & self._changed_storages else source


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument that has the same elements as the node's result."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
        return None
    is_floating = source.meta["val"].is_floating_point()
    other = node.args[1] if len(node.args) == 2 else None
    match node.op, node.target:
        case "call_method", "to":
            args, kwargs = _without_device(node)
            return source if len(args) == 1 and not kwargs else None
        case "call_function", operator.add:
            return source if not is_floating and type(other) is int and other == 0 else None
        case "call_function", operator.mul:
            return source if is_floating and type(other) is float and other == 1.0 else None
        case "call_function", operator.getitem:
            index = other if isinstance(other, tuple) else (other,)
            return source if all(map(_is_everything, index)) else None
    return None


def _is_everything(index: Any) -> bool:
    is_slice = isinstance(index, slice)
    return is_slice and index.start in (None, 0) and index.stop is None and index.step is None


def _without_device(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `x.to(...)` without the device, unless `x` is on another one."""
    devices = {each.meta["val"].device for each in (*node.all_input_nodes, node)}
    if len(devices) > 1 or any(isinstance(argument, LocalDevice) for argument in node.args[2:]):
        return node.args, dict(node.kwargs)
    args = tuple(argument for argument in node.args if not isinstance(argument, LocalDevice))
    kwargs = {
        name: value
        for name, value in node.kwargs.items()
        if not isinstance(value, LocalDevice) and name != "non_blocking"
    }
    return args, kwargs
