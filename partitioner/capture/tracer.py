"""One run of a model's real forward on fake tensors -> an fx.Graph of modules and torch functions.

The tracer is a `TorchFunctionMode`: it sees every torch function, tensor method and operator at
the level at which the author wrote it, runs it, and records it as a node. A leaf module is one
node; calls of other modules are recorded next to the graph, with their arguments by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, MethodType
from typing import Any, cast

import numpy as np
import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from ...runtime.errors import CaptureError
from ...runtime.rng import number_state, numbers_kept
from ..models.torch_modules import is_torch_leaf
from .aliasing import AssignedBuffers
from .arguments import fresh, is_plain, leaves, map_result, plain, plain_structure, tensors_in
from .bindings import Bindings, NodeHints
from .fake_inputs import DATA_DEPENDENT, FakeWorld
from .leaf_modules import LeafRule, modes_in_call
from .operations import Call, as_node, on_fakes, refusal, traced
from .patches import (
    WITHOUT_HISTORY,
    LenNeeded,
    Recomputes,
    apply,
    original_call,
    reentrant,
)
from .random_numbers import Draw, RandomDraws, has_hidden_draws, number_kind
from .readings import Readings, Shadow, run_opaque
from .size_guards import SizeDecisions
from .source_lines import is_user_file, place, user_frames, where
from .values import READERS, CallRecord, CallSite, ModuleCall, Region, known_numbers

_DATA, _HOOKS = cast(Any, Tensor.data), cast(Any, Tensor._backward_hooks)


class Tracer(TorchFunctionMode):
    """Records the calls that run while the mode is on, below the frame that made the tracer.

    asks_gradients: the line where forward asks whether gradients are recorded, or ""
    calls: the calls of modules that are not leaves
    notes: remarks for the user
    changed, changed_buffers: the parameters and buffers that forward changes in place
    flags: the `training` flag of each module at the start, or of a leaf when forward calls it
    regions: the open `with` blocks around the current call
    random: detects operators that draw random numbers
    graph, constants: the graph, and the constants that it reads
    decisions, sizes: forward's decisions by random numbers and by sizes
    readings: the numbers that forward reads from tensors
    """

    def __init__(
        self,
        model: nn.Module,
        world: FakeWorld,
        is_leaf: LeafRule,
        shadow: Shadow,
        true: Collection[int] = (),
        gradients: bool = True,
    ) -> None:
        super().__init__()
        self.asks_gradients = ""
        self._gradients = gradients
        self.calls: dict[ModuleCall, CallRecord] = {}
        self.notes: list[str] = []
        self.changed: tuple[str, ...] = ()
        self.flags: dict[str, bool] = {}
        self.regions: list[Region] = []
        self.random = RandomDraws()
        self._top = sys._getframe(1)
        self._model, self._world, self._is_leaf = model, world, is_leaf
        self._bindings = Bindings(model, world, self._top)
        self._names = NodeHints(self._top, self._bindings.bound)
        self._assigned = AssignedBuffers(self._bindings)
        self.readings = Readings(self._bindings, world, shadow, self._site, true)
        self._bindings.node_of_expression = self.readings.node
        self.is_known = self.readings.is_known
        world.env.decide = self._relation
        self.sizes = SizeDecisions(world, self._top, lambda: self._recording)
        self._recording = True
        self._stack: list[ModuleCall] = []
        self._recomputes = Recomputes(model)
        self._failure: Exception | None = None
        self._failed_in: tuple[str, ...] = ()
        self._call_counts: Counter[str] = Counter()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self.graph, self.constants = self._bindings.graph, self._bindings.constants
        self.decisions = self.readings.decisions

    def __enter__(self) -> Tracer:
        self._world.env.on_answer = self.sizes.note
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._world.env.on_answer = None

    def placeholder(self, name: str, tensor: Tensor) -> None:
        node = self._bindings.add(("placeholder", name), tensor)
        node.meta["hint"] = name

    def output(self, value: Any) -> None:
        """Ends the graph with the model's result, a structure of tensors and constants."""
        self._names.look()
        self._assigned.write()
        for leaf in leaves(value):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat)) and self.readings.is_read(leaf):
                raise CaptureError(
                    f"forward of {type(self._model).__name__} returns a Python number that it "
                    "reads from a tensor or draws at random, but a stage only returns tensors.",
                    "Return the tensor: loss instead of loss.item().",
                )
        dropped = [type(leaf).__name__ for leaf in leaves(value) if not is_plain(leaf)]
        if dropped:
            self.notes.append(f"forward also returns {', '.join(dropped)}, which is left out")
        result = map_result(self._bindings.arguments, plain(value))
        self._bindings.add(("output", "output", (result,)), None)
        self._bindings.drop_copies(self.calls)
        with self.quiet():
            self.readings.examples()
        self.notes += self.readings.notes
        self.changed = self._bindings.changed_parameters()
        self.changed_buffers = self._bindings.changed_buffers()

    def failed_in(self, error: Exception) -> tuple[str, ...]:
        """The paths of the modules in which forward raised an exception, the outermost first."""
        return self._failed_in if error is self._failure else ()

    # Python's and NumPy's random numbers

    @property
    def is_recording(self) -> bool:
        return self._recording

    def draw(self, draw: Draw, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The symbol of a random number, with a node that draws it in every forward."""
        with self.quiet():
            kind = number_kind(draw, args, kwargs, where(self._top))
            given, named = self._bindings.arguments(args), self._bindings.arguments(dict(kwargs))
            value, node = self.readings.drawn(kind, ("call_function", draw, given, named))
            self._names.assign(node, value, user_frames(self._top))
        return value

    # Torch functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new and len(args) == 2 and isinstance(args[1], torch.Size):
            func = Tensor.new_empty  # a tuple in place of the Size would be data
        run = traced(func, None if self._recording else (args, kwargs))
        if not self._recording:
            return run(*args, **kwargs)
        args, kwargs = self._world.twins((args, kwargs))
        if func == _DATA.__set__ and self._bindings.takes_data(*args):
            if args[0].untyped_storage()._cdata != args[1].untyped_storage()._cdata:
                data = self.__torch_function__(_DATA.__get__, types, args[:1])
                self.__torch_function__(Tensor.copy_, types, (data, args[1]))
            return None
        if func == _HOOKS.__set__:  # by torch, for an input that an autograd function has changed
            return run(*args)
        if refused := refusal(func, (*args, *kwargs.values())):
            what, cure = refused
            raise CaptureError(f"{where(self._top)} {what}", cure)
        name = getattr(func, "__name__", "")
        if func is torch.ops.aten.lift_fresh.default:
            return args[0]  # torch calls this on a tensor made from an array
        if args and isinstance(args[0], np.ndarray):
            # Made from other data: a real tensor, which is a constant.
            with _disable_current_modes():
                array = func(*args, **kwargs)
            return self._recorded(lambda *_: array, _no_call, (), {})
        if func is Tensor.__len__:
            return self._len(args[0])
        if name not in READERS and func is not Tensor.clone and self._bindings.is_made(args[:1]):
            # Forward may change it, or a view of it: each call has one of its own.
            self._bindings.stand_in(args[0], self.__torch_function__(Tensor.clone, types, args[:1]))
            args, kwargs = self._world.twins((args, kwargs))
        if func in WITHOUT_HISTORY and not args[0].is_leaf:
            is_recorded = self.grad_enabled(True, sys._getframe(1))
            return run(*args) if is_recorded else WITHOUT_HISTORY[func]
        if name in READERS:
            value = self.readings.known(args[0], lambda real: func(real, *args[1:], **kwargs))
            value = self._read(args[0], name) if value is None else value
            if value is not None:
                return value
        return self._recorded(
            lambda *given: self._run(run, *given),
            lambda given, named: as_node(func, given, named, self._frame()),
            args,
            kwargs,
            sets_grad=name in ("requires_grad_", "__set__"),
        )

    def _len(self, tensor: Tensor) -> int:
        size: Any = tensor.shape[0] if tensor.dim() else len(tensor)
        if isinstance(size, torch.SymInt) and not self._world.is_number(size):
            if (frame := self._frame()) is not None and "len" not in frame.f_globals:
                raise LenNeeded(frame.f_globals)
        return int(size)

    def grad_enabled(self, enabled: bool, frame: FrameType) -> bool:
        """The answer to forward's question whether gradients are recorded.

        A pipeline records them in training and not in evaluation: outside of forward's own regions
        the answer is the tracer's argument `gradients`, and `asks_gradients` keeps the line.
        """
        is_users = is_user_file(frame.f_code.co_filename)
        own = any(region.kind == "enable_grad" for region in self.regions)
        if not (enabled and self._recording and is_users) or own:
            return enabled
        self.asks_gradients = self.asks_gradients or place(frame, frame.f_lineno)
        return self._gradients

    def _read(self, tensor: Tensor, name: str) -> Any:
        """The value that forward reads from a tensor; None if it is unknown."""
        with self.quiet():
            if name == "__bool__" or (name == "item" and tensor.dtype is torch.bool):
                return self.readings.truth(tensor)
            if name != "item" or tensor.is_complex():
                return None
            value, node = self.readings.number(tensor)
            self._names.assign(node, value, user_frames(self._top))
            return value

    def _relation(self, expression: sympy.Basic) -> bool | None:
        with self.quiet():
            return self.readings.relation(expression)

    def _site(self) -> CallSite:
        """The current place in forward, for nodes without a call in it."""
        regions = self._bindings.current_regions(self.regions)
        return CallSite(user_frames(self._top), self._stack, regions)

    # Modules and autograd functions

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths.get(id(module))
        if self._recording and isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or type(module).__name__} is a module of torch.jit, which the tracer "
                "cannot read.",
                "Use the original module in its place.",
            )
        if not self._recording or not path:
            return original_call(module, args, kwargs)
        if self._is_leaf(module, path):
            if not self._world.is_itself(module):
                return original_call(module, args, kwargs)
            args, kwargs = self._world.twins((args, kwargs))
            self.flags |= modes_in_call(module, path)
            return self._recorded(
                lambda *given: self._run_leaf(module, *given),
                lambda given, named: ("call_module", path, given, named),
                args,
                kwargs,
                own=(*module.parameters(), *module.buffers()),
            )
        if isinstance(module, nn.DataParallel):
            self.notes.append(f"{path} (DataParallel) is its module: --replicas runs several")
            return self.within(module, args, kwargs, lambda: module.module(*args, **kwargs))
        return self.within(module, args, kwargs, lambda: original_call(module, args, kwargs))

    def within(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Runs a module that is not a leaf, and records the call."""
        path = self._paths[id(module)]
        call = ModuleCall(path, self._call_counts[path])
        self._call_counts[path] += 1
        with self.quiet():
            self._names.look()
            arguments = self._bindings.of_call(module, args, kwargs)
        self._stack.append(call)
        try:
            result = run()
        except Exception as error:
            if self._failure is not error:
                self._failure = error
                self._failed_in = tuple(call.path for call in self._stack)
            raise
        finally:
            self._stack.pop()
        kind = type(module)
        with self.quiet():
            record = CallRecord(
                kind.__qualname__,
                kind.__module__,
                arguments,
                self._bindings.known(plain_structure(result)),
            )
        self.calls[call] = record
        return result

    def _run_leaf(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_torch_leaf(module):
            with on_fakes(module):
                value = original_call(module, args, kwargs)
            self.random.drawn |= has_hidden_draws(module)
            return value
        before = number_state()
        try:
            with numbers_kept():
                value = original_call(module, args, kwargs)
                self.random.drew_numbers = not torch.equal(before, number_state())
        except Exception:
            value = run_opaque(module, args, kwargs, self._world, self.random)
        return value

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except UnsupportedOperatorException:  # torch knows no shapes of its results
            return run_opaque(func, args, kwargs, self._world, self.random)

    def call_function_class(
        self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._recording:
            return apply(function, *args, **kwargs)
        if function is CheckpointFunction:
            return reentrant(self.recomputing, *args)
        bound = MethodType(apply, function)
        args, kwargs = self._world.twins((args, kwargs))
        return self._recorded(
            lambda *given: self._run(bound, *given),
            lambda given, named: ("call_function", bound, given, named),
            args,
            kwargs,
        )

    def recomputing(
        self,
        function: Any,
        *,
        use_reentrant: bool,
        preserve_rng_state: bool,
        is_selective: bool = False,
    ) -> AbstractContextManager[None]:
        if is_selective:
            self.notes.append(
                f"the checkpoint at {where(self._top)} recomputes everything: its selection of "
                "saved tensors (context_fn) is ignored"
            )
        return self._recomputes.within(
            function, len(self._stack), use_reentrant, preserve_rng_state
        )

    def assign_buffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        if self.sizes.is_in_transform and id(module) in self._paths:
            raise CaptureError(
                f"{where(self._top)} assigns the buffer {name} inside a transform of torch.func.",
                f"Assign it outside of the transform, or change it in place: self.{name}.copy_().",
            )
        if self._recording and id(module) in self._paths:
            with self.quiet():
                self._assigned.note(module, name, value, where(self._top))

    # Recording

    def _recorded(
        self,
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        make: Callable[[tuple[Any, ...], dict[str, Any]], Call],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        own: tuple[Tensor, ...] = (),
        sets_grad: bool = False,
    ) -> Any:
        """Runs one call, and records it if it makes or changes tensors.

        Where it needs numbers, it gets those of tensors that depend on nothing. `own` are tensors
        that the call reaches without having them as arguments: a leaf module's parameters and
        buffers. With `sets_grad` it changes whether its argument requires a gradient.
        """
        with self.quiet():
            given = [*tensors_in(args), *tensors_in(kwargs)]
            reached = [(tensor, tensor._version) for tensor in (*given, *own)]
            self.random.drawn = self.random.drew_numbers = False
            with self.sizes.call() as conditions:
                try:
                    value = run(args, kwargs)
                except DATA_DEPENDENT:
                    args, kwargs = known_numbers((args, kwargs), self._bindings.bound)
                    value = run(args, kwargs)
            changed = given if sets_grad else [t for t, was in reached if t._version != was]
            if not changed and next(tensors_in(value), None) is None:
                self.sizes.of_forward(conditions)
                return value
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not given:
                # Made from other data, such as a NumPy array: a constant of the model.
                self._bindings.add(("get_attr", self._bindings.constant(value)), value)
                return value
            self._bindings.change(changed)
            frames = user_frames(self._top)
            self._names.look(frames)
            call = make(self._bindings.arguments(args), self._bindings.arguments(kwargs))
            value = fresh(value, {id(t) for t in given} - {id(t) for t in changed})
            regions = self._bindings.current_regions(self.regions)
            node = self._bindings.add(
                call,
                value,
                CallSite(frames, self._stack, regions, self._recomputes.open),
                changed=changed,
                touched=own,
                random=self.random.drawn or self.random.drew_numbers,
            )
            node.meta["draws_numbers"] = self.random.drew_numbers
            self._names.assign(node, value, frames)
            self.sizes.of_node(conditions, node)
        return value

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Stops recording for the block: inside of a leaf, and for the tracer's own work."""
        recording, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = recording

    def _frame(self) -> FrameType | None:
        return next(iter(user_frames(self._top)), None)


def _no_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    raise AssertionError("a constant is made by no call")
