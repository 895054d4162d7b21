"""An exception of a forward on fake tensors -> a CaptureError at the user's line."""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...runtime.errors import CaptureError
from .frames import short_path, source_text, user_frame_of

_DATA_DEPENDENT = (
    DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode,
)  # fmt: skip


def explained(error: Exception, model: nn.Module) -> CaptureError:
    """What a user can do about an exception that the model's forward raised."""
    found = user_frame_of(error.__traceback__)
    if found is None:
        return CaptureError(
            f"cannot trace {type(model).__name__}: {type(error).__name__}: {_first_line(error)}"
        )
    code, line = found
    where = f"{code.co_qualname} at {short_path(code.co_filename)}:{line}"
    text = source_text(code.co_filename, line)
    owner = code.co_qualname.split(".")[0]
    if isinstance(error, _DATA_DEPENDENT):
        inside = any(type(module).__name__ == owner for module in list(model.modules())[1:])
        leaf = (
            f"Keep it inside one stage: --leaf {owner}"
            if inside
            else "Keep it inside one stage: move it into a module of its own and use --leaf"
        )
        return CaptureError(
            f'cannot trace {where}: "{text}" depends on tensor values.',
            f"{leaf} · or use torch.where · details: -v",
        )
    return CaptureError(
        f'cannot trace {where}: "{text}" raised {type(error).__name__}: {_first_line(error)}',
        "If the model runs on these inputs outside asyncpipe, keep the module as one node: "
        f"--leaf {owner}.",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
