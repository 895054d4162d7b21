"""One run of a model's real forward on fake tensors -> an fx.Graph of modules and torch functions.

The tracer is a `TorchFunctionMode`: it sees every torch function, tensor method and operator at
the level the author wrote it, runs it, and writes it down. Modules of `torch.nn` are written down
as one call; the calls of other modules are kept beside the graph, with their arguments by name.
A tensor that comes from nowhere is an error, never a constant.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from ...runtime.errors import CaptureError
from .fakes import FakeWorld
from .frames import short_path, user_frames
from .known import READERS, follows_from_sizes, known_answer
from .leaves import LeafRule
from .names import Names
from .patches import original_apply, original_call
from .structure import map_leaves, plain_structure, tensors_in
from .targets import FORBIDDEN, Call, as_node, assigned_state
from .values import CallRecord, LocalDevice, ModuleCall, Region


class LenNeeded(BaseException):
    """`len(tensor)` was called on a symbolic size; the call has to be symbolic in these globals.

    No Exception, so that the model's own `except Exception` lets it pass.
    """

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope


class RandomDraws(TorchDispatchMode):
    """Notices operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not self.drawn:
            self.drawn = _draws(func, args, kwargs)
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call really draws: attention with dropout 0 is tagged, but does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else None
            return bool(kwargs.get("dropout_p", given))
    return True


@dataclasses.dataclass
class _Value:
    """A tensor of the trace, kept alive so that its `id` and its storage stay its own."""

    tensor: Tensor
    node: fx.Node


class Tracer(TorchFunctionMode):
    """Writes down what runs while the mode is on."""

    def __init__(
        self, model: nn.Module, world: FakeWorld, is_leaf: LeafRule
    ) -> None:
        super().__init__()
        self.model, self.world, self.is_leaf = model, world, is_leaf
        self.graph = fx.Graph()
        self.calls: dict[ModuleCall, CallRecord] = {}
        self.constants: dict[str, Tensor] = {}
        self.notes: list[str] = []
        self.regions: list[Region] = []
        self.random = RandomDraws()
        self._top = sys._getframe(1)
        self._names = Names(self._top)
        self._recording = True
        self._values: dict[int, _Value] = {}
        self._storages: dict[int, int] = {}
        self._stack: list[ModuleCall] = []
        self._call_counts: Counter[str] = Counter()
        self._signatures: dict[type, inspect.Signature | None] = {}
        self._assigned: dict[tuple[int, str], tuple[Tensor, Tensor, fx.Node]] = {}
        self._device = _device_of(model)
        self._paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), path)

    # Inputs and outputs

    def placeholder(self, name: str, tensor: Tensor) -> None:
        node = self.graph.create_node("placeholder", name)
        node.meta["hint"] = name
        self._describe(node, tensor, frames=[])
        self._bind(node, tensor)

    def output(self, value: Any) -> None:
        self._names.look(self._values)
        self._write_assigned_buffers()
        node = self.graph.output(map_leaves(self.argument, value))
        node.meta.update(
            val=value, calls=(), regions=(), random=False, storages=frozenset(),
            mutates=frozenset(), source=None,
        )  # fmt: skip

    # Torch functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._recording:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in FORBIDDEN:
            raise CaptureError(*FORBIDDEN[name](self._where()))
        if name == "__len__" and func is Tensor.__len__:
            return self._len(args[0])
        if name in READERS:
            known = self._known(args[0], lambda real: func(real, *args[1:], **kwargs))
            if known is not None:
                return known
        if name == "__set__" and func.__self__.__name__ in ("data", "grad"):
            raise CaptureError(*assigned_state(self._where(), func.__self__.__name__))
        return self._recorded(
            lambda: func(*args, **kwargs),
            lambda arguments, named: as_node(func, arguments, named, self._frame()),
            args,
            kwargs,
            sets_grad=name in ("requires_grad_", "__set__"),
        )

    def _len(self, tensor: Tensor) -> int:
        size = tensor.shape[0] if tensor.dim() else len(tensor)
        if isinstance(size, torch.SymInt) and not self.world.env.replace(size.node.expr).is_number:
            frame = self._frame()
            if frame is not None and "len" not in frame.f_globals:
                raise LenNeeded(frame.f_globals)
        return int(size)

    def is_known(self, tensor: Any) -> bool:
        """Whether the values of a fake tensor follow from sizes alone."""
        entry = self._values.get(id(tensor))
        return entry is not None and bool(entry.node.meta["from_sizes"])

    def _known(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        if not self.is_known(tensor):
            return None
        hints = self.world.hints
        samples = [{name: size + more for name, size in hints.items()} for more in (0, 1, 5)]
        return known_answer(self._values[id(tensor)].node, samples, read)

    def _recorded(
        self,
        run: Callable[[], Any],
        make: Callable[[tuple[Any, ...], dict[str, Any]], Call],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        own: tuple[Tensor, ...] = (),
        sets_grad: bool = False,
    ) -> Any:
        """Runs one call and writes it down if it makes or changes tensors.

        `own` are tensors that the call reaches without being given them: a leaf module's
        parameters and buffers. `sets_grad` says that it changes whether its argument requires a
        gradient.
        """
        with self._quiet():
            given = [*tensors_in(args), *tensors_in(kwargs)]
            reached = (*given, *own)
            versions = [tensor._version for tensor in reached]
            self.random.drawn = False
            value = run()
            changed = given if sets_grad else [
                tensor
                for tensor, version in zip(reached, versions, strict=True)
                if tensor._version != version
            ]
            if not changed and next(tensors_in(value), None) is None:
                return value
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not given:
                # Made from outside data, such as a NumPy array: a constant of the model.
                self._constant(value)
                return value
            frames = self._frames()
            self._names.look(self._values, frames)
            node = self.graph.create_node(*make(self.arguments(args), self.arguments(kwargs)))
            value = self._fresh(value, {id(t) for t in given} - {id(t) for t in changed})
            self._describe(node, value, frames)
            node.meta["mutates"] = frozenset(self._storage(tensor) for tensor in changed)
            node.meta["touches"] = frozenset(self._storage(tensor) for tensor in own)
            node.meta["random"] = self.random.drawn
            node.meta["from_sizes"] = follows_from_sizes(node)
            self._bind(node, value)
            self._names.assign(node, value, frames, self._values)
        return value

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Within, nothing is recorded: what a leaf does inside, and our own look at tensors."""
        recording, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = recording

    def _fresh(self, value: Any, given: set[int]) -> Any:
        """`value` with every tensor that is an unchanged argument replaced by an alias of it.

        Dropout in evaluation mode returns its very argument; the alias tells the two apart, so
        that later readers name the same node as in training mode.
        """
        if isinstance(value, Tensor):
            return torch.ops.aten.alias.default(value) if id(value) in given else value
        if type(value) in (tuple, list):
            return type(value)(self._fresh(item, given) for item in value)
        return value

    # Modules and autograd functions

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths.get(id(module))
        if not self._recording or not path:
            return original_call(module, args, kwargs)
        if self.is_leaf(module, path):
            return self._recorded(
                lambda: original_call(module, args, kwargs),
                lambda arguments, named: ("call_module", path, arguments, named),
                args,
                kwargs,
                own=(*module.parameters(), *module.buffers()),
            )
        call = ModuleCall(path, self._call_counts[path])
        self._call_counts[path] += 1
        with self._quiet():
            self._names.look(self._values)
            arguments = self._named_arguments(module, args, kwargs)
        self._stack.append(call)
        try:
            result = original_call(module, args, kwargs)
        finally:
            self._stack.pop()
        kind = type(module)
        with self._quiet():
            self.calls[call] = CallRecord(
                kind.__qualname__, kind.__module__, arguments, self._structure(result)
            )
        return result

    def call_function_class(
        self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._recording:
            return original_apply(function, args, kwargs)
        if function is CheckpointFunction:
            self._note("recomputation by torch.utils.checkpoint", "its operations are recorded")
            return args[0](*args[2:])
        return self._recorded(
            lambda: original_apply(function, args, kwargs),
            lambda arguments, named: ("call_function", function.apply, arguments, named),
            args,
            kwargs,
        )

    def _named_arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        kind = type(module)
        if kind not in self._signatures:
            try:
                self._signatures[kind] = inspect.signature(module.forward)
            except (TypeError, ValueError):
                self._signatures[kind] = None
        signature = self._signatures[kind]
        named: dict[str, Any] = {}
        try:
            bound = signature.bind(*args, **kwargs).arguments if signature else None
        except TypeError:
            bound = None
        if bound is None or signature is None:
            named = {f"arg{position}": value for position, value in enumerate(args)} | kwargs
        else:
            for name, value in bound.items():
                if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                    named.update(value)
                else:
                    named[name] = value
        return {name: self._structure(value) for name, value in named.items()}

    def _structure(self, value: Any) -> Any:
        """Nodes, sizes and constants of a module call's argument or result; None for the rest."""
        return map_leaves(lambda leaf: self.argument(leaf, known_only=True), plain_structure(value))

    # Buffers that forward assigns anew

    def assign_buffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        if not self._recording or id(module) not in self._paths:
            return
        current = module._buffers[name]
        assert current is not None
        entry = self._values.get(id(value))
        if value is current or entry is None:
            return
        first = self._assigned.get((id(module), name))
        original = first[0] if first else current
        self._assigned[id(module), name] = (original, value, self._last_node())

    def _write_assigned_buffers(self) -> None:
        """Adds `buffer.copy_(value)` for every buffer that forward bound to a new tensor.

        It goes as early as no later reader of the old contents, and no later change of the new
        ones, is behind it.
        """
        for original, value, place in self._assigned.values():
            target, source = self._node(original), self._node(value)
            kept = {self._storage(original)}
            reads = kept | {self._storage(value)}
            for node in self.graph.nodes:
                late = any(
                    used.meta["storages"] & kept for used in node.all_input_nodes
                ) or bool(node.meta.get("mutates", frozenset()) & reads)
                if late and place < node:
                    place = node
            if place < source:
                place = source
            with self.graph.inserting_after(place):
                node = self.graph.call_method("copy_", (target, source))
            node.meta.update(source.meta)
            node.meta.pop("hint", None)
            node.meta.update(
                val=original, shape=self.world.shape(original), random=False,
                storages=frozenset(kept), mutates=frozenset(kept), touches=frozenset(),
            )  # fmt: skip

    def _last_node(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    # Values and nodes

    def arguments(self, value: Any) -> Any:
        return map_leaves(self.argument, value)

    def argument(self, leaf: Any, known_only: bool = False) -> Any:
        """What stands for a value in the graph's arguments."""
        if isinstance(leaf, Tensor):
            if known_only and id(leaf) not in self._values and id(leaf) not in self.world.names:
                return None
            return self._node(leaf)
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(leaf)
        if isinstance(leaf, torch.device):
            return LocalDevice() if _same_device(leaf, self._device) else leaf
        if known_only and not isinstance(leaf, (int, float, str, torch.dtype, type(None))):
            return None
        return leaf

    def _size(self, value: Any) -> Any:
        size = self.world.size(value)
        if self.world.is_data_dependent((size,)):
            raise CaptureError(
                f"cannot trace {self._where()}: the size of a tensor depends on tensor values.",
                "Keep it inside one module and name that module with --leaf.",
            )
        return size

    def _node(self, tensor: Tensor) -> fx.Node:
        entry = self._values.get(id(tensor))
        if entry is not None:
            return entry.node
        name = self.world.names.get(id(tensor))
        if name is not None:
            node = self.graph.create_node("get_attr", name)
            self._describe(node, tensor, frames=[])
            self._bind(node, tensor)
            return node
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"cannot trace {self._where()}: a tensor of shape {tuple(tensor.shape)} was made "
                "by code that torch functions do not show (torch.jit.script, vmap, a stored "
                "Function.apply).",
                "Keep the module that does it as one node: --leaf Class.",
            )
        return self._constant(tensor)

    def _constant(self, tensor: Tensor) -> fx.Node:
        if tensor.requires_grad:
            raise CaptureError(
                f"{self._where()} reads a tensor that requires a gradient and is no parameter of "
                "the model.",
                "Register it: self.name = torch.nn.Parameter(...), or its module as a submodule.",
            )
        name = self._constant_name(tensor)
        self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        self._describe(node, tensor, frames=[])
        self._bind(node, tensor)
        return node

    def _constant_name(self, tensor: Tensor) -> str:
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if value is tensor:
                    return f"{path}.{name}" if path else name
        return f"constant_{len(self.constants)}"

    def _bind(self, node: fx.Node, value: Any) -> None:
        """Makes `node` the name of every tensor inside `value`."""
        if isinstance(value, Tensor):
            self._values[id(value)] = _Value(value, node)
            return
        for function, key, item in _items(value):
            if any(True for _ in tensors_in(item)):
                part = self.graph.create_node("call_function", function, (node, key))
                part.meta = dict(node.meta)
                part.meta.pop("hint", None)
                part.meta.update(mutates=frozenset(), touches=frozenset(), random=False)
                self._set_value(part, item)
                self._bind(part, item)

    def _describe(self, node: fx.Node, value: Any, frames: list[FrameType]) -> None:
        frame = frames[0] if frames else None
        regions = [region for region in self.regions if region.kind == "autocast"]
        if not torch.is_grad_enabled():
            regions.append(Region("no_grad"))
        elif any(region.kind == "enable_grad" for region in self.regions):
            regions.append(Region("enable_grad"))
        node.meta.update(
            calls=tuple(self._stack),
            source=(short_path(frame.f_code.co_filename), frame.f_lineno) if frame else None,
            regions=tuple(regions),
            random=False,
            from_sizes=False,
            mutates=frozenset(),
            touches=frozenset(),
        )
        self._set_value(node, value)

    def _set_value(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        node.meta["storages"] = frozenset(self._storage(tensor) for tensor in tensors_in(value))
        node.meta["data_dependent"] = False
        if isinstance(value, Tensor):
            node.meta["shape"] = self.world.shape(value)
            node.meta["data_dependent"] = self.world.is_data_dependent(node.meta["shape"])

    def _storage(self, tensor: Tensor) -> int:
        """A number for the tensor's memory, in the order of first use."""
        key = tensor.untyped_storage()._cdata
        return self._storages.setdefault(key, len(self._storages))

    # Where we are

    def _frames(self) -> list[FrameType]:
        return user_frames(self._top, sys._getframe(1))

    def _frame(self) -> FrameType | None:
        return next(iter(self._frames()), None)

    def _where(self) -> str:
        frame = self._frame()
        if frame is None:
            return "forward"
        code = frame.f_code
        return f"{code.co_qualname} at {short_path(code.co_filename)}:{frame.f_lineno}"

    def _note(self, what: str, effect: str) -> None:
        note = f"{what} at {self._where().rpartition(' at ')[2]} is dropped: {effect}"
        if note not in self.notes:
            self.notes.append(note)


def _items(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """How to reach each part of a compound value: function, key, part."""
    if isinstance(value, Mapping):
        yield from ((operator.getitem, key, item) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((operator.getitem, position, item) for position, item in enumerate(value))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield getattr, field.name, getattr(value, field.name)


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _same_device(given: torch.device, device: torch.device) -> bool:
    return given.type == device.type and given.index in (None, device.index)
