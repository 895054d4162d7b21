"""A model as its author wrote it -> one `torch.fx.Graph` of named modules and torch functions.

The real forward runs on fake tensors with symbolic sizes, once in training and once in evaluation
mode; what it does is written down and run again on real numbers against the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ...runtime.errors import CaptureError
from ...runtime.structure import constants_in
from .aliases import colocated, draws_in_order, in_order
from .arguments import Arguments, read_arguments
from .attribute_names import verify_names
from .fakes import Dynamic
from .fitting import verify_arguments
from .graph import Capture, tensor_spec
from .hooks import verify_hooks
from .inputs import dynamic_sizes
from .interpret import run
from .leaves import leaf_rule
from .restore import unchanged
from .values import (
    CallRecord,
    IfTraining,
    LocalDevice,
    ModuleCall,
    Recompute,
    Region,
    Size,
    size_text,
)
from .ways import METHODS, Request, find_capture

__all__ = [
    "Arguments", "CallRecord", "Capture", "IfTraining", "LocalDevice", "ModuleCall", "Recompute",
    "Region", "Size", "capture", "colocated", "draws_in_order", "in_order",
    "read_arguments", "run", "size_text",
    "tensor_spec",
]  # fmt: skip


MODES = {"both": (True, False), "train": (True,)}
"""The modes to capture, training first, by the name of the option."""


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    dynamic: Dynamic | None = None,
    leaves: Collection[str] = (),
    check: bool = True,
    method: str = "auto",
    mode: str = "both",
) -> Capture:
    """Writes down what the model's forward does for inputs like these.

    `example_inputs` are arguments of forward by name: tensors (on any device, or on meta), tuples,
    lists, dicts and dataclasses of them, and constants. `dynamic` names the sizes that stay free,
    by input (`masks_0` for the first of `masks`) and dimension; by default dimension 0 of every
    tensor is `batch`, and dimension 1 of two-dimensional tensors of integers is `sequence`.
    `leaves` are modules to keep as one node although they are not of torch.nn, by
    class name or path. Parameters may be on meta. With `check`, the graph is run beside the model
    at other sizes in both modes; a model on meta is not checked.

    `method` is `tracer`, `dynamo` or `auto`: the tracer, and where it cannot see what forward does,
    torch's own graph made by Dynamo. A note says so. `mode` is `both`, or `train` for a graph of
    training alone, which a model needs whose forward returns another structure in evaluation.

    The model is left as it was: parameters, buffers, attributes, modes, gradients.

    Raises CaptureError for a forward that is no fixed graph, naming its line.
    """
    if mode not in MODES:
        raise CaptureError(f"the mode is {mode!r}.", f"Known: {', '.join(MODES)}.")
    if method not in METHODS:
        raise CaptureError(f"the way to capture is {method!r}.", f"Known: {', '.join(METHODS)}.")
    verify_names(model)
    verify_hooks(model)
    given = read_arguments(model, example_inputs)
    verify_arguments(model, example_inputs)
    request = Request(
        model=model,
        given=given,
        dims=dynamic_sizes(given.tensors) if dynamic is None else dynamic,
        may_fix=dynamic is None,
        is_leaf=leaf_rule(model, leaves),
        check=check,
        modes=MODES[mode],
    )
    with unchanged(model):
        captured = find_capture(request, method)
    fixed = [
        f"{where} is fixed at {text}: it is no tensor"
        for where, text in constants_in(given.structure, "")
    ]
    return replace(captured, notes=(*fixed, *captured.notes))
