"""An exception of a forward on fake tensors -> a CaptureError at the user's line."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...runtime.errors import CaptureError
from .arguments import described
from .frames import place, source_text, user_frame_of

_DATA_DEPENDENT = (
    DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode,
)  # fmt: skip


def explained(error: Exception, model: nn.Module, inputs: Mapping[str, Any]) -> CaptureError:
    """What a user can do about an exception that the model's forward raised."""
    found = user_frame_of(error.__traceback__)
    if found is None:
        return CaptureError(
            f"cannot trace {type(model).__name__}: {type(error).__name__}: {_first_line(error)}",
            f"Does it run on inputs like these? {described(inputs)}",
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
        f"If the model runs on inputs like these outside asyncpipe ({described(inputs)}), keep "
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


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
