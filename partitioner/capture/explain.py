"""An exception of a forward on fake tensors -> a CaptureError at the user's line."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...runtime.errors import CaptureError
from ...runtime.plan import TensorSpec
from .frames import place, source_text, user_frame_of

_DATA_DEPENDENT = (
    DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode,
)  # fmt: skip
_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextmanager
def untold() -> Iterator[None]:
    """Within, torch logs nothing of what fails on fake tensors: the error says it."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def verify_arguments(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises CaptureError when forward does not take exactly such arguments."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**inputs)
    except TypeError as error:
        raise CaptureError(
            f"the example inputs do not fit {type(model).__name__}.forward: {error}.",
            f"It takes {', '.join(map(str, signature.parameters.values())) or 'nothing'}; "
            f"given: {', '.join(inputs) or 'nothing'}.",
        ) from error


def verify_result(graph: fx.Graph, model: nn.Module) -> None:
    """Raises CaptureError for a forward that returns nothing computed."""
    (output,) = graph.find_nodes(op="output")
    if not output.all_input_nodes:
        raise CaptureError(
            f"{type(model).__name__}.forward returns no tensor.",
            "Return the loss or what the loss is computed from.",
        )


def explained(error: Exception, model: nn.Module, inputs: Mapping[str, Any]) -> CaptureError:
    """What a user can do about an exception that the model's forward raised."""
    found = user_frame_of(error.__traceback__)
    if found is None:
        return CaptureError(
            f"cannot trace {type(model).__name__}: {type(error).__name__}: {_first_line(error)}",
            f"Does it run on inputs like these? {_described(inputs)}",
        )
    frame, line = found
    where, text = place(frame, line), source_text(frame, line)
    leaf = _leaf(frame, model)
    if isinstance(error, _DATA_DEPENDENT):
        return CaptureError(
            f'cannot trace {where}: "{text}" depends on tensor values.',
            f"Keep it inside one stage: {leaf} · or use torch.where · details: -v",
        )
    return CaptureError(
        f'cannot trace {where}: "{text}" raised {type(error).__name__}: {_first_line(error)}',
        f"If the model runs on inputs like these outside asyncpipe ({_described(inputs)}), keep "
        f"what does it as one node: {leaf}.",
    )


def _leaf(frame: FrameType, model: nn.Module) -> str:
    """How to keep the module whose code a frame runs as one node; the model itself cannot be."""
    while frame.f_back is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    owner = frame.f_locals.get("self")
    if isinstance(owner, nn.Module) and any(owner is inner for inner in list(model.modules())[1:]):
        return f"--leaf {type(owner).__name__}"
    return "move it into a module of its own and use --leaf"


def _described(inputs: Mapping[str, Any]) -> str:
    """`x f32[4, 8], scale 2.0`."""
    parts = []
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{name} {TensorSpec(name, dtype, tuple(value.shape), False)}")
        else:
            parts.append(f"{name} {value!r}")
    return ", ".join(parts)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
