"""An exception of a forward on fake tensors -> a CaptureError at the user's line."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from types import FrameType

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...runtime.errors import CaptureError
from .arguments import Arguments
from .check import is_on_meta
from .fakes import Dynamic, PinnedSizeError
from .fitting import described
from .frames import place, source_text, user_frame_of, user_lines
from .restore import unchanged, without_cache


class UnseenError(CaptureError):
    """A forward that runs, for all we know, but not in sight of the tracer."""


class ValuesError(UnseenError):
    """A forward that takes values out of tensors."""


_DATA_DEPENDENT = (
    DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode,
)  # fmt: skip


def explained(
    error: Exception, model: nn.Module, given: Arguments, drawn: Collection[sympy.Basic] = ()
) -> CaptureError:
    """What a user can do about an exception that the model's forward raised. `drawn` are the
    symbols of numbers that Python or NumPy draws."""
    found = user_frame_of(error.__traceback__)
    if found is None:
        return UnseenError(
            f"cannot trace {type(model).__name__}: {type(error).__name__}: {_first_line(error)}",
            f"Does it run on inputs like these? {described(given.tensors)}",
        )
    frame, line = found
    where, text = place(frame, line), source_text(frame, line)
    leaf = _leaf(frame, model)
    if isinstance(error, GuardOnDataDependentSymNode):
        if not error.cond.free_symbols.isdisjoint(drawn):
            return ValuesError(
                f'cannot trace {where}: "{text}" depends on a number drawn at random, by more than '
                "an if that compares it.",
                f"Keep it inside one stage: {leaf} · or draw with torch and compute with tensors, "
                "as torch.rand([]).sqrt()",
            )
    if isinstance(error, _DATA_DEPENDENT):
        return ValuesError(
            f'cannot trace {where}: "{text}" depends on tensor values.',
            f"Keep it inside one stage: {leaf} · or use torch.where · details: -v",
        )
    return UnseenError(
        f'cannot trace {where}: "{text}" raised {type(error).__name__}: {_first_line(error)}',
        f"If the model runs on inputs like these outside asyncpipe ({described(given.tensors)}), "
        f"keep what does it as one node: {leaf}.",
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


_PINNED = re.compile(
    r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((\d+)\)"
)


def pinned(error: Exception, given: Arguments, dims: Dynamic) -> PinnedSizeError | None:
    """Dynamo's word for a size that forward holds at one value; None for any other error."""
    found = _PINNED.search(str(error))
    if found is None:
        return None
    position, dim, value = map(int, found.groups())
    symbol = dims[list(given.tensors)[position]][dim]
    lines = user_lines(str(error)[found.end() :].partition("\n\n  - ")[0])
    where = f"{Path(lines[-1].file).name}:{lines[-1].line}" if lines else "forward"
    return PinnedSizeError(
        symbol, where, value, f"Leave {symbol} out of dynamic=... to fix it at {value}."
    )


def runs(model: nn.Module, given: Arguments) -> bool:
    """Whether the model itself takes the example; a model on meta is believed to."""
    if is_on_meta(model):
        return True
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    tensors = {name: tensor.to(device) for name, tensor in given.tensors.items()}
    with unchanged(model, dict(model.named_parameters())), without_cache(model), torch.no_grad():
        try:
            given.call(model, tensors)
        except Exception:
            return False
    return True


def both(unseen: CaptureError, error: CaptureError) -> CaptureError:
    """The tracer's error, which has the user's line, with what Dynamo's was."""
    return CaptureError(
        unseen.what, f"{unseen.cure}\nTorchDynamo cannot capture it either: {_first_line(error)}"
    )
