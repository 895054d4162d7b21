"""The tensors of a traced run -> the nodes of its graph, and names for the nodes.

`Bindings` builds the graph, and knows each tensor by its `id`. It keeps every tensor alive, so that
neither an `id` nor memory is reused. A fake tensor that is neither an input, a parameter nor the
result of a recorded call is an error, never a constant.

`NodeHints` proposes the names of the user's variables for nodes; `renamed` gives the nodes these
names, or those of their modules and functions.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.errors import CaptureError
from .arguments import PassedError, map_leaves, named_arguments, plain_structure, tensors_in
from .fake_inputs import FakeWorld, UnseenError, ValuesError
from .model_state import local_device, plain_tensors
from .source_lines import assigned_names, is_good_name, short_path, user_frames, where
from .values import (
    NOWHERE,
    CallRecord,
    CallSite,
    LocalDevice,
    ModuleCall,
    Region,
    follows_from_sizes,
)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A tensor that a node stands for.

    tensor: the tensor
    node: its node
    required_grad: True if it required a gradient when it was made
    """

    tensor: Tensor
    node: fx.Node
    required_grad: bool


class Bindings:
    """The graph under construction.

    graph: the graph
    constants: tensors of the model that are neither parameters nor buffers, by name
    bound: the tensors seen and their nodes, by `id`
    """

    def __init__(self, model: nn.Module, world: FakeWorld, top: FrameType) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.bound: dict[int, Bound] = {}
        self._model, self._world, self._top = model, world, top
        self._device = local_device(model)
        self._storages: dict[int, int] = {}
        self._changed: set[int] = set()
        self._copies: list[fx.Node] = []
        self._held = set(map(id, plain_tensors(model)))
        self.node_of_expression: Callable[[sympy.Expr], fx.Node | None] = lambda _: None

    # Nodes

    def add(
        self,
        call: tuple[Any, ...],
        value: Any,
        site: CallSite = NOWHERE,
        *,
        changed: Collection[Tensor] = (),
        touched: Collection[Tensor] = (),
        random: bool = False,
    ) -> fx.Node:
        """Adds a node for the call (op, target, arguments, keyword arguments) that made `value` at
        `site`.

        `changed` are the tensors that it changed in place, `touched` those that it reaches without
        having them as arguments.
        """
        node = self.graph.create_node(*call)
        frame = site.frames[0] if site.frames else None
        node.meta.update(
            calls=tuple(site.calls),
            source=(short_path(frame), frame.f_lineno) if frame else None,
            regions=tuple(site.regions),
            recomputes=tuple(site.recomputes),
            random=random,
            mutates=frozenset(map(self.storage, changed)),
            touches=frozenset(map(self.storage, touched)),
        )
        self._set_value(node, value)
        self._bind(node, value)
        return node

    def is_made(self, tensors: Sequence[Any]) -> bool:
        """True for a real tensor that no module holds, such as `torch.FloatTensor([0.0])`."""
        real = [t for t in tensors if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
        return any(not t.requires_grad and id(t) not in self._held for t in real)

    def stand_in(self, tensor: Tensor, copy: Tensor) -> None:
        """Reads a copy in the place of a tensor from now on."""
        self._world.fakes[id(tensor)] = tensor, copy
        self._copies.append(self.node(copy))

    def drop_copies(self, calls: dict[ModuleCall, CallRecord]) -> None:
        """Removes the copies that forward leaves as they are, also from the records of calls."""
        same = [node for node in self._copies if not self._changed & node.meta["storages"]]
        kept = {node: node for node in self.graph.nodes}
        kept |= {node: node.all_input_nodes[0] for node in same}
        calls.update({call: _moved(record, kept) for call, record in calls.items()} if same else {})
        for node in same:
            node.replace_all_uses_with(kept[node])
            self.graph.erase_node(node)

    def takes_data(self, tensor: Tensor, value: Tensor) -> bool:
        """True if a copy of a value into a tensor equals an assignment of its data: the last call
        made the value's memory, from no constant, or the tensor has it already."""
        facts = [(each.shape, each.dtype, each.device, each.layout) for each in (tensor, value)]
        places = [(self.storage(t), t.stride(), t.storage_offset()) for t in (tensor, value)]
        node = self.node(value)
        used = node.all_input_nodes
        is_old = any(n in self._copies or n.target in self.constants for n in (node, *used))
        is_view = any(node.meta["storages"] & n.meta["storages"] for n in used)
        is_new = node.op.startswith("call_") and not (is_old or is_view)
        return facts[0] == facts[1] and (is_new or places[0] == places[1])

    def change(self, tensors: Collection[Tensor]) -> None:
        """Records the tensors that a call changed, before the call is added."""
        self._changed.update(map(self.storage, tensors))

    def changed_parameters(self) -> tuple[str, ...]:
        """The first names of the parameters that calls have changed."""
        return tuple(
            self._world.names[id(parameter)]
            for parameter in self._model.parameters()
            if id(parameter) in self._world.names and self.storage(parameter) in self._changed
        )

    def changed_buffers(self) -> tuple[str, ...]:
        """The same of the buffers, but for those of batch norms, which no backward reads."""
        return tuple(
            self._world.names[id(buffer)]
            for module in self._model.modules()
            if not isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False)
            if id(buffer) in self._world.names and self.storage(buffer) in self._changed
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
        """Binds the tensors in `value` to `node`, or to new nodes that take parts of it."""
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
        """The number of the tensor's memory, in the order of first use."""
        key = tensor.untyped_storage()._cdata
        return self._storages.setdefault(key, len(self._storages))

    # Arguments

    def arguments(self, value: Any) -> Any:
        """A structure of values as arguments of a node."""
        return map_leaves(self._argument, value)

    def known(self, value: Any) -> Any:
        """A structure of values as arguments of a node, with None for values outside the graph."""
        return map_leaves(self._known, value)

    def of_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a module's call by name, as `known` gives them."""
        return {
            name: self.known(plain_structure(value))
            for name, value in named_arguments(module, args, kwargs).items()
        }

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
        if callable(leaf) and not isinstance(leaf, type):
            raise PassedError(leaf)
        if isinstance(leaf, np.ndarray):  # an index, such as x[:, order]
            with _disable_current_modes():
                return self.node(torch.tensor(leaf))
        return leaf.value if isinstance(leaf, Enum) and isinstance(leaf, (int, str)) else leaf

    def current_regions(self, entered: Sequence[Region]) -> list[Region]:
        """The regions of a node, given those that forward has entered."""
        regions = [self._local(region) for region in entered if region.kind == "autocast"]
        if not torch.is_grad_enabled():
            regions.append(Region("no_grad"))
        elif any(region.kind == "enable_grad" for region in entered):
            regions.append(Region("enable_grad"))
        return regions

    def _local(self, region: Region) -> Region:
        """The region, independent of the device if it is for the model's own device type."""
        is_own = region.device_type == self._device.type
        return dataclasses.replace(region, device_type=LocalDevice()) if is_own else region

    def _known(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensor = self._world.twin(leaf)
            seen = id(tensor) in self.bound or id(tensor) in self._world.names
            return self.node(tensor) if seen else None
        kinds = (int, float, str, torch.dtype, torch.SymInt, torch.SymFloat, torch.device)
        return self._argument(leaf) if isinstance(leaf, kinds) else None

    def node(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor; a parameter, buffer or constant gets one on first use."""
        tensor = self._world.twin(tensor)
        bound = self.bound.get(id(tensor))
        if bound is not None:
            if tensor.requires_grad and not bound.required_grad:
                # Only a recorded change may have given it a gradient.
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
            "code that the tracer cannot see (torch.jit.script, a stored Function.apply).",
            "Call it as Class.apply(...), or keep the module that calls it as one node: "
            "--leaf Class.",
        )

    def constant(self, tensor: Tensor) -> str:
        """Keeps a tensor that is neither made by forward nor registered; returns its name. Raises
        CaptureError for a parameter that is not registered."""
        if tensor.requires_grad:
            holder = unregistered(self._model, tensor)
            if holder is not None:
                raise CaptureError(
                    f"{where(self._top)} reads a parameter of a module that {holder} holds in a "
                    "plain list, tuple or dict, and that is therefore not registered.",
                    f"Register it: {holder} = torch.nn.ModuleList(...) or ModuleDict(...).",
                )
            raise CaptureError(
                f"{where(self._top)} reads a tensor that requires a gradient but is not a "
                "parameter of the model.",
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
    """The parts of a compound value: function and key to reach the part, and the part."""
    if isinstance(value, Mapping):
        yield from ((operator.getitem, key, item) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((operator.getitem, position, item) for position, item in enumerate(value))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield getattr, field.name, getattr(value, field.name)


def unregistered(model: nn.Module, tensor: Tensor) -> str | None:
    """The attribute that holds this parameter's module in a plain container; None if none does."""
    for path, owner in model.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
                if any(tensor is parameter for parameter in _parameters_inside(value)):
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


def _same_device(given: torch.device, device: torch.device) -> bool:
    return given.type == device.type and given.index in (None, device.index)


# Nobody names the items of a longer sequence one by one.
_PARTS = 16


class NodeHints:
    """Sets `node.meta["hint"]` to the first good variable name of a node's value.

    A name counts only in a frame that was on the stack when the value was made, so that a value
    gets the name of the code that made it, not that of a callee's parameter.
    """

    def __init__(self, top: FrameType, bound: Mapping[int, Bound]) -> None:
        self._top, self._bound = top, bound
        # Frames are kept, so that an id cannot come to mean another frame.
        self._frames: dict[int, FrameType] = {}
        self._made_in: dict[fx.Node, frozenset[int]] = {}

    def assign(self, node: fx.Node, value: Any, frames: Sequence[FrameType]) -> None:
        """Names a new value after the variable of the assignment that makes it."""
        self._frames.update((id(frame), frame) for frame in frames)
        parts = [self._node_of(part) for part in value] if _is_sequence(value) else []
        for new in (node, *parts):
            if new is not None:
                self._made_in[new] = frozenset(map(id, frames))
        names = assigned_names(frames[0]) if frames else ()
        if len(names) == 1 and parts != [node]:
            self._hint(node, names[0])
        elif len(names) == len(parts):
            for new, name in zip(parts, names, strict=True):
                self._hint(new, name)

    def look(self, frames: Sequence[FrameType] | None = None) -> None:
        """Names values after variables that have been assigned since they were made."""
        for frame in user_frames(self._top) if frames is None else frames:
            for name, value in frame.f_locals.items():
                if isinstance(value, Tensor):
                    self._hint_value(frame, name, value)
                elif _is_sequence(value):
                    for position, part in enumerate(value[:_PARTS]):
                        if isinstance(part, Tensor):
                            self._hint_value(frame, f"{name}_{position}", part)

    def _hint_value(self, frame: FrameType, name: str, value: Tensor) -> None:
        node = self._node_of(value)
        if node is not None and id(frame) in self._made_in.get(node, ()):
            self._hint(node, name)

    def _hint(self, node: fx.Node | None, name: str) -> None:
        if node is not None and is_good_name(name):
            node.meta.setdefault("hint", name)

    def _node_of(self, value: Any) -> fx.Node | None:
        if not isinstance(value, Tensor):
            return None
        bound = self._bound.get(id(value))
        return bound.node if bound is not None else None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def readable_name(node: fx.Node) -> str:
    """The first variable that held the value of a node, else its module or its function."""
    hint = node.meta.get("hint")
    if hint:
        return str(hint)
    if node.op == "call_module":
        *parents, last = str(node.target).split(".")
        return f"{parents[-1]}_{last}" if last.isdigit() and parents else last
    if node.op == "get_attr":
        return str(node.target).replace(".", "_")
    if node.target is getattr:
        return str(node.args[1])
    return str(getattr(node.target, "__name__", node.target))


def renamed(
    graph: fx.Graph,
    calls: Mapping[ModuleCall, CallRecord],
    name: Callable[[fx.Node], str] = readable_name,
) -> tuple[fx.Graph, dict[ModuleCall, CallRecord]]:
    """A copy of the graph with other names, and the module calls in terms of it; fx makes the names
    unique, in program order.
    """
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copy = result.create_node(
            node.op,
            node.target,
            fx.node.map_arg(node.args, copies.__getitem__),
            fx.node.map_arg(node.kwargs, copies.__getitem__),
            name=name(node),
        )
        if node.op == "placeholder":
            # fx would rename an input called `input`.
            copy.name = node.target
        copy.meta = dict(node.meta)
        copies[node] = copy
    return result, {call: _moved(record, copies) for call, record in calls.items()}


def _moved(record: CallRecord, copies: Mapping[fx.Node, fx.Node]) -> CallRecord:
    def move(value: Any) -> Any:
        return fx.node.map_arg(value, copies.get)

    arguments = {name: move(value) for name, value in record.arguments.items()}
    return CallRecord(record.type_name, record.module_path, arguments, move(record.result))
