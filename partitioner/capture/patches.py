"""Patches for a block: calls that a torch function mode cannot see are reported to the tracer.

`patched`: module calls, autograd functions, autocast and grad regions, and assignments of buffers
are plain Python or C++ to torch. Each is patched on its class, and restored on any exception.

`Recomputes`: calls of `torch.utils.checkpoint.checkpoint`, whose operations run again in backward.

`watched_gradients`: forward may ask whether gradients are recorded, which a pipeline does in
training and not in evaluation. The tracer answers in place of torch. Questions through references
that no module holds by name show in the results (`verdict.py`).
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.autograd import Function
from torch.autograd.function import FunctionMeta
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpointing

from .source_lines import exchanged
from .values import Recompute, Region

_call: Callable[..., Any] = nn.Module.__call__


class PatchRecorder(Protocol):
    """The tracer, as the patches see it."""

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for `module(*args, **kwargs)`."""

    def call_function_class(
        self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Stands in for `function.apply(*args, **kwargs)`."""

    def assign_buffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Called before the assignment `module.name = value`."""

    def recomputing(
        self, function: Any, *, use_reentrant: bool, preserve_rng_state: bool, is_selective: bool
    ) -> AbstractContextManager[None]:
        """A context around the function of a `torch.utils.checkpoint.checkpoint`."""

    def is_known(self, tensor: Any) -> bool:
        """True if the values of a tensor follow from sizes only."""

    @property
    def is_recording(self) -> bool:
        """True while forward's own code runs."""

    regions: list[Region]


def original_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own call of a module, which runs its hooks and its forward."""
    return _call(module, *args, **kwargs)


_apply = Function.__dict__["apply"]


def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """torch's own `function.apply`, as a function of a module, which fx needs for a target."""
    return _apply.__get__(None, function)(*args, **kwargs)


@contextmanager
def patched(
    recorder: PatchRecorder, len_scopes: Iterable[MutableMapping[str, Any]] = ()
) -> Iterator[None]:
    """Reports calls that torch functions cannot show, within the block, to the recorder.

    `len_scopes` are the globals of modules in which `len(tensor)` gives a symbolic size.
    """
    with (
        _patched_functions(recorder, len_scopes),
        _patched_modules(recorder),
        _patched_calls(recorder),
        _patched_autocast(recorder),
        _patched_grad_modes(recorder),
    ):
        yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replaces attributes of a class or module for the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _patched_functions(
    recorder: PatchRecorder, len_scopes: Iterable[MutableMapping[str, Any]]
) -> Iterator[None]:
    """Patches `len`, `all`, `any`, attention, and transformers' test for fake tensors."""
    scopes = [scope for scope in len_scopes if "len" not in scope]
    # transformers asks whether a tensor is fake before it branches on the tensor's values.
    asks = vars(sys.modules.get("transformers.utils.import_utils", builtins))
    is_fake = asks.get("is_fake_tensor")
    try:
        for scope in scopes:
            scope["len"] = _symbolic_len
        if is_fake is not None:
            asks["is_fake_tensor"] = lambda value: is_fake(value) and not recorder.is_known(value)
        with replaced(builtins, all=_all, any=_any), _patched_attention():
            yield
    finally:
        if is_fake is not None:
            asks["is_fake_tensor"] = is_fake
        for scope in scopes:
            del scope["len"]


@contextmanager
def _patched_modules(recorder: PatchRecorder) -> Iterator[None]:
    """Patches calls, assignments and moves of modules."""
    set_attribute, move = nn.Module.__setattr__, nn.Module.to

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, args, kwargs)

    def assign(module: nn.Module, name: str, value: Any) -> None:
        buffers = module.__dict__.get("_buffers", {})
        if isinstance(value, Tensor) and buffers.get(name) is not None:
            recorder.assign_buffer(module, name, value)
        set_attribute(module, name, value)

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        # `self.router.to(self.dtype)` in forward is a way to be sure of a dtype.
        return module if _is_already(module, *args, **kwargs) else move(module, *args, **kwargs)

    with replaced(nn.Module, __call__=call, __setattr__=assign, to=to):
        yield


@contextmanager
def _patched_calls(recorder: PatchRecorder) -> Iterator[None]:
    """Patches calls of autograd functions and of `torch.utils.checkpoint.checkpoint`."""

    def report(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return apply(function, *args, **kwargs)
        return recorder.call_function_class(function, args, kwargs)

    def checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        with recorder.recomputing(
            given.arguments["fn"],
            use_reentrant=False,
            preserve_rng_state=given.arguments["preserve_rng_state"],
            is_selective=given.arguments["context_fn"] is not checkpointing.noop_context_fn,
        ):
            yield

    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(checkpointing, f"{name}_impl") else ""  # from torch 2.14 on
    signature = inspect.signature(getattr(checkpointing, name))
    functions: Any = Function
    their_class: Any = FunctionMeta
    try:
        functions.apply = classmethod(report)
        their_class.__getattribute__ = _through_stored(recorder)
        with replaced(checkpointing, **{name: checkpoint}):
            yield
    finally:
        functions.apply = _apply
        del their_class.__getattribute__


def _through_stored(recorder: PatchRecorder) -> Callable[[type[Function], str], Any]:
    """How an `apply` that somebody has stored, which no patch replaces, reads the attributes of its
    class: it gets a `forward` that is the recorder's call.

    The C++ of `apply` reads `_backward_cls`, then `forward`, which it calls without gradients, then
    `setup_context`, if the class has its own. Its own part is to pass the results on.
    """
    begun: list[tuple[type[Function], bool]] = []  # the class, and if gradients were recorded
    ended: list[type[Function]] = []

    def attribute(function: type[Function], name: str) -> Any:
        value = type.__getattribute__(function, name)
        if not recorder.is_recording:
            return value
        if name == "_backward_cls":
            begun[:] = [(function, torch.is_grad_enabled())]
        elif name == "forward" and begun and begun[0][0] is function:
            return functools.partial(called, *begun.pop())
        elif name == "setup_context" and function in ended:
            ended.remove(function)
            return _pass_on
        return value

    def called(function: type[Function], has_gradient: bool, *args: Any, **kwargs: Any) -> Any:
        has_own = type.__getattribute__(function, "setup_context") is not Function.setup_context
        context, given = (None, args) if has_own else (args[0], args[1:])
        with torch.set_grad_enabled(has_gradient):
            results = recorder.call_function_class(function, given, kwargs)
        if has_own:
            ended.append(function)
        else:
            _pass_on(context, given, results)
        return results

    return attribute


def _pass_on(context: Any, inputs: tuple[Any, ...], results: Any) -> None:
    """Tells an outer autograd function what an inner one has made of its inputs."""
    values = results if isinstance(results, tuple) else (results,)
    tensors = [value for value in values if isinstance(value, Tensor)]
    context.mark_dirty(*(value for value in tensors if any(value is given for given in inputs)))
    context.mark_non_differentiable(*(value for value in tensors if not value.requires_grad))


@contextmanager
def _patched_autocast(recorder: PatchRecorder) -> Iterator[None]:
    """Patches the begin and end of autocast regions."""
    enter_autocast, exit_autocast = autocast.__enter__, autocast.__exit__

    def enter(region: autocast) -> Any:
        result = enter_autocast(region)  # type: ignore[no-untyped-call]
        recorder.regions.append(
            Region(
                "autocast",
                region.device,
                region.fast_dtype,
                region._enabled,
                region._cache_enabled,
            )
        )
        return result

    def leave(region: autocast, *exception: Any) -> Any:
        recorder.regions.pop()
        return exit_autocast(region, *exception)

    with replaced(autocast, __enter__=enter, __exit__=leave):
        yield


@contextmanager
def _patched_grad_modes(recorder: PatchRecorder) -> Iterator[None]:
    """Patches the begin and end of `enable_grad` and `inference_mode` regions."""
    enter_grad, exit_grad = torch.enable_grad.__enter__, torch.enable_grad.__exit__
    grad_before: list[bool] = []

    def enter_enable_grad(region: torch.enable_grad) -> None:
        enter_grad(region)
        recorder.regions.append(Region("enable_grad"))

    def leave_enable_grad(region: torch.enable_grad, *exception: Any) -> None:
        recorder.regions.pop()
        exit_grad(region, *exception)

    def enter_inference_mode(region: torch.inference_mode) -> None:
        # no_grad computes the same, and its tensors can be inspected.
        grad_before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not region.mode)
        recorder.regions.append(Region("no_grad" if region.mode else "enable_grad"))

    def leave_inference_mode(region: torch.inference_mode, *exception: Any) -> None:
        recorder.regions.pop()
        torch.set_grad_enabled(grad_before.pop())

    with (
        replaced(torch.enable_grad, __enter__=enter_enable_grad, __exit__=leave_enable_grad),
        replaced(
            torch.inference_mode, __enter__=enter_inference_mode, __exit__=leave_inference_mode
        ),
    ):
        yield


def _is_already(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """True if `module.to(...)` would change no tensor of the module."""
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    return layout is None and all(
        (device is None or tensor.device == device)
        and (dtype is None or tensor.dtype == dtype or not tensor.is_floating_point())
        for tensor in (*module.parameters(), *module.buffers())
    )


# The built-in `all` and `any` would read each element of the example's tensor.
_builtin_all, _builtin_any = builtins.all, builtins.any


def _all(values: Iterable[Any]) -> bool:
    is_row = isinstance(values, Tensor) and values.dim() == 1
    return bool(values.all()) if is_row else _builtin_all(values)  # type: ignore[attr-defined]


def _any(values: Iterable[Any]) -> bool:
    is_row = isinstance(values, Tensor) and values.dim() == 1
    return bool(values.any()) if is_row else _builtin_any(values)  # type: ignore[attr-defined]


_builtin_attention = F.scaled_dot_product_attention


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Attention with `is_causal=length > 1`: the operator takes no relation of free sizes."""
    args, kwargs = pytree.tree_map_only(torch.SymBool, bool, (args, kwargs))
    return _builtin_attention(*args, **kwargs)


@contextmanager
def _patched_attention() -> Iterator[None]:
    """Patches attention in torch.nn.functional and in the modules that import it from there."""
    name = _builtin_attention.__name__
    outside = (held for key, held in sys.modules.copy().items() if not key.startswith("torch."))
    plain = [held for held in outside if type(held) is ModuleType]  # others may load on a look
    with ExitStack() as stack:
        for module in (F, *plain):
            if vars(module).get(name) is _builtin_attention:
                stack.enter_context(replaced(module, scaled_dot_product_attention=_attention))
        yield


class LenNeeded(BaseException):
    """`len(tensor)` was called on a symbolic size, and must be replaced in the globals `scope`.

    Not an Exception, so that the model's own `except Exception` cannot catch it.
    """

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope


def _symbolic_len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else builtins.len(value)


class Recomputes:
    """The checkpoints around the current call of forward (`open`, the outermost first)."""

    def __init__(self, model: nn.Module) -> None:
        self.open: list[Recompute] = []
        self._model = model
        self._count = 0

    @contextmanager
    def within(
        self, function: Any, depth: int, use_reentrant: bool, preserve_rng_state: bool
    ) -> Iterator[None]:
        """A context around a checkpointed function, which `depth` modules surround."""
        while isinstance(function, functools.partial):
            function = function.func
        self._count += 1
        # The sign keeps the calls of the two modes apart.
        sign = 1 if self._model.training else -1
        self.open.append(
            Recompute(
                number=sign * self._count,
                depth=depth,
                function=getattr(function, "__name__", ""),
                use_reentrant=use_reentrant,
                preserve_rng_state=preserve_rng_state,
            )
        )
        try:
            yield
        finally:
            self.open.pop()


def reentrant(
    recomputing: Callable[..., AbstractContextManager[None]],
    function: Any,
    preserve_rng_state: bool,
    *args: Any,
) -> Any:
    """The older `checkpoint`, which gives no gradient if none of its arguments needs one."""
    has_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    with (
        torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient),
        recomputing(function, use_reentrant=True, preserve_rng_state=preserve_rng_state),
    ):
        return function(*args)


CURE = "Use self.training instead: gradients are recorded in training only."

WITHOUT_HISTORY: dict[Any, Any] = {
    Tensor.requires_grad.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: True,  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__: None,  # type: ignore[union-attr]
}
"""Getters of an attribute, with its value for a tensor that was made without gradients."""


class GradientRecorder(Protocol):
    """The tracer, as forward's questions about gradients see it."""

    def grad_enabled(self, enabled: bool, frame: FrameType) -> bool:
        """Stands in for `torch.is_grad_enabled()` in a frame, where it would answer `enabled`."""


@contextmanager
def watched_gradients(recorder: GradientRecorder, model: nn.Module) -> Iterator[None]:
    """Replaces `torch.is_grad_enabled`, and imported references to it, by the recorder's."""
    enabled = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        return recorder.grad_enabled(enabled(), sys._getframe(1))

    def other(_: str, __: str, value: Any) -> Any:
        return is_grad_enabled if value is enabled else value

    with exchanged(model, other, {id(enabled)}):
        torch.is_grad_enabled = torch._C.is_grad_enabled = is_grad_enabled
        try:
            yield
        finally:
            torch.is_grad_enabled = torch._C.is_grad_enabled = enabled
