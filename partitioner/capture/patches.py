"""What a torch function mode cannot see -> calls of the tracer, for as long as a block lasts.

Module calls, autograd functions, autocast and grad regions, and buffers that are assigned anew are
plain Python to torch; each is patched on its class, and put back on any exception.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.autograd import Function
from torch.utils import checkpoint as checkpointing

from .values import Region

# `Function.apply` ends in `super().apply`; what is patched is this class between it and C++, so
# that an `apply` which somebody has stored goes the same way.
_Super: Any = Function.__mro__[1]
_call: Callable[..., Any] = nn.Module.__call__


class Recorder(Protocol):
    """What the patches report to."""

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for `module(*args, **kwargs)`."""

    def call_function_class(
        self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Stands in for `function.apply(*args, **kwargs)`."""

    def assign_buffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Is told of `module.name = value` before it is done."""

    def recomputing(
        self, function: Any, *, use_reentrant: bool, preserve_rng_state: bool, is_selective: bool
    ) -> AbstractContextManager[None]:
        """Is entered around the function of a `torch.utils.checkpoint.checkpoint`."""

    def is_known(self, tensor: Any) -> bool:
        """Whether the values of a tensor follow from sizes alone."""

    def grad_enabled(self, enabled: bool, frame: FrameType) -> bool:
        """Stands in for `torch.is_grad_enabled()` in a frame, where it would answer `enabled`."""

    regions: list[Region]


def original_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call(module, *args, **kwargs)


original_apply: Callable[..., Any] = Function.__dict__["apply"].__func__
"""`Function.apply` as torch has it: called with the class first."""


def plain_apply(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `Function.apply` calls in the end."""
    return super(_Super, function).apply(*args, **kwargs)


@contextmanager
def patched(
    recorder: Recorder, len_scopes: Iterable[MutableMapping[str, Any]] = ()
) -> Iterator[None]:
    """Within, what torch functions do not show goes through the recorder.

    `len_scopes` are the globals of modules in which `len(tensor)` gives a symbolic size.
    """
    scopes = [scope for scope in len_scopes if "len" not in scope]
    enter_autocast, exit_autocast = autocast.__enter__, autocast.__exit__
    enter_inference, exit_inference = (
        torch.inference_mode.__enter__,
        torch.inference_mode.__exit__,
    )
    enter_grad, exit_grad = torch.enable_grad.__enter__, torch.enable_grad.__exit__
    enabled = torch.is_grad_enabled
    set_attribute, move = nn.Module.__setattr__, nn.Module.to
    grad_before: list[bool] = []
    checkpointed = checkpointing._checkpoint_without_reentrant_generator
    # transformers asks whether a tensor is fake before it branches on the tensor's values.
    asks = vars(sys.modules.get("transformers.utils.import_utils", builtins))
    is_fake = asks.get("is_fake_tensor")

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, args, kwargs)

    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        return recorder.call_function_class(function, args, kwargs)

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

    def enter_enable_grad(region: torch.enable_grad) -> None:
        enter_grad(region)
        recorder.regions.append(Region("enable_grad"))

    def leave_enable_grad(region: torch.enable_grad, *exception: Any) -> None:
        recorder.regions.pop()
        exit_grad(region, *exception)

    def enter_inference_mode(region: torch.inference_mode) -> None:
        # For what is computed, no_grad does the same; its tensors can be looked at.
        grad_before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not region.mode)
        recorder.regions.append(Region("no_grad" if region.mode else "enable_grad"))

    def leave_inference_mode(region: torch.inference_mode, *exception: Any) -> None:
        recorder.regions.pop()
        torch.set_grad_enabled(grad_before.pop())

    def is_grad_enabled() -> bool:
        return recorder.grad_enabled(enabled(), sys._getframe(1))

    def assign(module: nn.Module, name: str, value: Any) -> None:
        buffers = module.__dict__.get("_buffers", {})
        if isinstance(value, Tensor) and buffers.get(name) is not None:
            recorder.assign_buffer(module, name, value)
        set_attribute(module, name, value)

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        # `self.router.to(self.dtype)` in forward is a way to be sure of a dtype.
        return module if _is_already(module, *args, **kwargs) else move(module, *args, **kwargs)

    def checkpoint(
        function: Any, preserve: bool = True, context: Any = None, *_: Any, **__: Any
    ) -> Iterator[None]:
        with recorder.recomputing(
            function,
            use_reentrant=False,
            preserve_rng_state=preserve,
            is_selective=context not in (None, checkpointing.noop_context_fn),
        ):
            yield

    try:
        for scope in scopes:
            scope["len"] = _symbolic_len
        if is_fake is not None:
            asks["is_fake_tensor"] = lambda value: is_fake(value) and not recorder.is_known(value)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__setattr__ = assign  # type: ignore[method-assign,assignment]
        nn.Module.to = to  # type: ignore[method-assign,assignment]
        _Super.apply = classmethod(apply)
        checkpointing._checkpoint_without_reentrant_generator = checkpoint  # type: ignore[assignment]
        autocast.__enter__, autocast.__exit__ = enter, leave  # type: ignore[method-assign]
        torch.enable_grad.__enter__ = enter_enable_grad  # type: ignore[method-assign]
        torch.enable_grad.__exit__ = leave_enable_grad  # type: ignore[method-assign]
        torch.inference_mode.__enter__ = enter_inference_mode  # type: ignore[method-assign]
        torch.inference_mode.__exit__ = leave_inference_mode  # type: ignore[method-assign]
        torch.is_grad_enabled = is_grad_enabled
        yield
    finally:
        torch.is_grad_enabled = enabled
        torch.inference_mode.__enter__ = enter_inference  # type: ignore[method-assign]
        torch.inference_mode.__exit__ = exit_inference  # type: ignore[method-assign]
        torch.enable_grad.__enter__ = enter_grad  # type: ignore[method-assign]
        torch.enable_grad.__exit__ = exit_grad  # type: ignore[method-assign]
        autocast.__enter__ = enter_autocast  # type: ignore[method-assign]
        autocast.__exit__ = exit_autocast  # type: ignore[method-assign]
        checkpointing._checkpoint_without_reentrant_generator = checkpointed
        del _Super.apply
        nn.Module.to = move  # type: ignore[method-assign]
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
        nn.Module.__call__ = _call  # type: ignore[method-assign]
        if is_fake is not None:
            asks["is_fake_tensor"] = is_fake
        for scope in scopes:
            del scope["len"]


def _is_already(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether `module.to(...)` would change no tensor of the module."""
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    return layout is None and all(
        (device is None or tensor.device == device)
        and (dtype is None or tensor.dtype == dtype or not tensor.is_floating_point())
        for tensor in (*module.parameters(), *module.buffers())
    )


def _symbolic_len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else builtins.len(value)
