"""A forward, what it is given and what it returns -> whether they fit, or an error that says so."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from ...runtime.errors import CaptureError
from ...runtime.plan import TensorSpec
from .arguments import as_called


def verify_arguments(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises CaptureError when forward does not take exactly such arguments."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        args, kwargs = as_called(model, inputs)
        signature.bind(*args, **kwargs)
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


def described(tensors: Mapping[str, Tensor]) -> str:
    """`x f32[4, 8], mask bool[4]`."""
    parts = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.append(f"{name} {TensorSpec(name, dtype, tuple(tensor.shape), False)}")
    return ", ".join(parts)
