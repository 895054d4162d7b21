"""The tensors of a run and the nodes of its graph: which node a tensor is, and what a node holds.

A tensor is known by its `id`; every tensor seen is kept, so that neither its `id` nor its memory
can come to be another's. A tensor that is no input, no parameter and no result of a recorded call
is an error, never a constant.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...runtime.errors import CaptureError
from .explain import UnseenError, ValuesError
from .fakes import FakeWorld
from .frames import short_path, where
from .known import follows_from_sizes
from .structure import map_leaves, tensors_in
from .values import LocalDevice, ModuleCall, Recompute, Region


@dataclasses.dataclass(frozen=True)
class Bound:
    """A tensor, the node it is, and whether it required a gradient when it was made."""

    tensor: Tensor
    node: fx.Node
    required_grad: bool


class Bindings:
    """A graph in the making. `constants` are the tensors that forward found on the model."""

    def __init__(self, model: nn.Module, world: FakeWorld, top: FrameType) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.bound: dict[int, Bound] = {}
        self._model, self._world, self._top = model, world, top
        self._device = _device_of(model)
        self._storages: dict[int, int] = {}
        self._changed: set[int] = set()
        self.node_of_expression: Callable[[sympy.Expr], fx.Node | None] = lambda _: None

    # Nodes

    def add(
        self,
        call: tuple[Any, ...],
        value: Any,
        *,
        frames: Sequence[FrameType] = (),
        calls: Sequence[ModuleCall] = (),
        regions: Sequence[Region] = (),
        recomputes: Sequence[Recompute] = (),
        changed: Collection[Tensor] = (),
        touched: Collection[Tensor] = (),
        random: bool = False,
    ) -> fx.Node:
        """Adds a node (op, target, arguments, keyword arguments) that has made `value`.

        `changed` are the tensors that it changed, `touched` those that it reaches without having
        them as arguments.
        """
        node = self.graph.create_node(*call)
        frame = frames[0] if frames else None
        node.meta.update(
            calls=tuple(calls),
            source=(short_path(frame), frame.f_lineno) if frame else None,
            regions=tuple(regions),
            recomputes=tuple(recomputes),
            random=random,
            mutates=frozenset(map(self.storage, changed)),
            touches=frozenset(map(self.storage, touched)),
        )
        self._set_value(node, value)
        self._bind(node, value)
        return node

    def change(self, tensors: Collection[Tensor]) -> None:
        """Is told of tensors that a call has changed, before the call is added."""
        self._changed.update(map(self.storage, tensors))

    def changed_parameters(self) -> tuple[str, ...]:
        """The parameters that calls have changed, by their first names."""
        return tuple(
            self._world.names[id(parameter)]
            for parameter in self._model.parameters()
            if id(parameter) in self._world.names and self.storage(parameter) in self._changed
        )

    def _set_value(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        node.meta["storages"] = frozenset(map(self.storage, tensors_in(value)))
        node.meta["from_sizes"] = follows_from_sizes(node)
        node.meta["data_dependent"] = False
        if isinstance(value, Tensor):
            node.meta["shape"] = self._world.shape(value)
            node.meta["data_dependent"] = self._world.is_data_dependent(node.meta["shape"])

    def _bind(self, node: fx.Node, value: Any) -> None:
        """Makes `node`, or parts taken from it, the nodes of the tensors in `value`."""
        if isinstance(value, Tensor):
            self.bound[id(value)] = Bound(value, node, value.requires_grad)
            return
        for function, key, item in _items(value):
            if next(tensors_in(item), None) is not None:
                part = self.graph.create_node("call_function", function, (node, key))
                part.meta.update(node.meta)
                part.meta.update(mutates=frozenset(), touches=frozenset(), random=False)
                self._set_value(part, item)
                self._bind(part, item)

    def storage(self, tensor: Tensor) -> int:
        """A number for the tensor's memory, in the order of first use."""
        key = tensor.untyped_storage()._cdata
        return self._storages.setdefault(key, len(self._storages))

    # Arguments

    def arguments(self, value: Any) -> Any:
        """What stands for a structure of values in the arguments of a node."""
        return map_leaves(self._argument, value)

    def known(self, value: Any) -> Any:
        """The same for a value that need not be in the graph: None for what the graph has not."""
        return map_leaves(self._known, value)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.node(leaf)
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            size = self._world.size(leaf)
            if self._world.is_data_dependent((size,)):
                if (node := self.node_of_expression(leaf.node.expr)) is not None:
                    return node
                raise ValuesError(
                    f"cannot trace {where(self._top)}: a size depends on tensor values.",
                    "Keep it inside one module and name that module with --leaf.",
                )
            return size
        if isinstance(leaf, torch.device):
            return LocalDevice() if _same_device(leaf, self._device) else leaf
        return leaf

    def local(self, region: Region) -> Region:
        """A region for the model's device as one for whatever device it will be on."""
        if region.device_type != self._device.type:
            return region
        return dataclasses.replace(region, device_type=LocalDevice())

    def _known(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            seen = id(leaf) in self.bound or id(leaf) in self._world.names
            return self.node(leaf) if seen else None
        kinds = (int, float, str, torch.dtype, torch.SymInt, torch.SymFloat, torch.device)
        return self._argument(leaf) if isinstance(leaf, kinds) else None

    def node(self, tensor: Tensor) -> fx.Node:
        """The node that a tensor is; a parameter, buffer or constant gets one on first use."""
        bound = self.bound.get(id(tensor))
        if bound is not None:
            if tensor.requires_grad and not bound.required_grad:
                # A recorded change may have given it a gradient; unseen code must not.
                if self.storage(tensor) not in self._changed:
                    raise self._unseen(tensor)
            return bound.node
        name = self._world.names.get(id(tensor))
        if name is None and isinstance(tensor, FakeTensor):
            raise self._unseen(tensor)
        return self.add(("get_attr", name or self.constant(tensor)), tensor)

    def _unseen(self, tensor: Tensor) -> CaptureError:
        return UnseenError(
            f"cannot trace {where(self._top)}: a tensor of {tensor.dim()} dimensions was made by "
            "code that torch functions do not show (torch.jit.script, a stored Function.apply).",
            "Call it as Class.apply(...), or keep the module that does it as one node: "
            "--leaf Class.",
        )

    def constant(self, tensor: Tensor) -> str:
        """Keeps a tensor that is neither made by forward nor registered on the model."""
        if tensor.requires_grad:
            holder = unregistered(self._model, tensor)
            if holder is not None:
                raise CaptureError(
                    f"{where(self._top)} reads a parameter of a module that {holder} holds in a "
                    "plain list, tuple or dict: the model does not know the module.",
                    f"Register it: {holder} = torch.nn.ModuleList(...) or ModuleDict(...).",
                )
            raise CaptureError(
                f"{where(self._top)} reads a tensor that requires a gradient and is no parameter "
                "of the model.",
                "Register it: self.name = torch.nn.Parameter(...), or its module as a submodule.",
            )
        name = f"constant_{len(self.constants)}"
        for path, module in self._model.named_modules():
            for attribute, value in vars(module).items():
                if value is tensor:
                    name = f"{path}.{attribute}" if path else attribute
        self.constants[name] = tensor
        return name


def _items(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """How to reach each part of a compound value: function, key, part."""
    if isinstance(value, Mapping):
        yield from ((operator.getitem, key, item) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((operator.getitem, position, item) for position, item in enumerate(value))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield getattr, field.name, getattr(value, field.name)


def unregistered(model: nn.Module, tensor: Tensor) -> str | None:
    """The attribute whose containers lead to a module with this parameter; None if none does."""
    for path, owner in model.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
                if any(tensor is each for each in _parameters_inside(value)):
                    return f"{path}.{name}" if path else f"self.{name}"
    return None


def _parameters_inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        for inner in value.modules():
            for name, item in vars(inner).items():
                if isinstance(item, (list, tuple)) and not name.startswith("_"):
                    yield from _parameters_inside(item)
    elif isinstance(value, dict):
        yield from _parameters_inside(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parameters_inside(item)


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _same_device(given: torch.device, device: torch.device) -> bool:
    return given.type == device.type and given.index in (None, device.index)
