"""A model as its author wrote it -> one `torch.fx.Graph` of named modules and torch functions.

The real forward runs on fake tensors with symbolic sizes, once in training and once in evaluation
mode; what it does is written down and run again on real numbers against the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ...runtime.errors import CaptureError
from ...runtime.structure import constants_in
from .aliases import colocated, draws_in_order, in_order
from .arguments import Arguments, read_arguments
from .attribute_names import verify_names
from .batch import find_batch
from .dimensions import Dimensions, Said, asked_lengths, check_said, said_batch, symbols
from .fakes import Dynamic
from .fitting import verify_arguments
from .graph import Capture, tensor_spec
from .hooks import verify_hooks
from .interpret import run
from .leaves import leaf_rule
from .restore import in_mode, unchanged
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
    "Region", "Said", "Size", "capture", "colocated", "draws_in_order", "in_order",
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
    batch_dim: Said = "auto",
    sequence_dim: Said = "auto",
    leaves: Collection[str] = (),
    check: bool = True,
    method: str = "auto",
    mode: str = "both",
) -> Capture:
    """Writes down what the model's forward does for inputs like these.

    `example_inputs` are arguments of forward by name: tensors (on any device, or on meta), tuples,
    lists, dicts and dataclasses of them, and constants.

    `batch_dim` says which dimension counts samples, by input (`masks_0` for the first of `masks`),
    one number for all, or None where there is no batch; "auto" finds it out. `sequence_dim` says so
    of tokens; by default it is dimension 1 of two-dimensional tensors of integers. In place of both
    `dynamic` names the sizes that stay free, by input and dimension.
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
        dimensions=_dimensions(model, given, dynamic, batch_dim, sequence_dim),
        may_fix=dynamic is None,
        is_leaf=leaf_rule(model, leaves),
        check=check,
        modes=MODES[mode],
    )
    by_hand = tuple(modes_by_hand(model))
    with unchanged(model):
        captured = find_capture(request, method)
        submodules = [(module._modules, dict(module._modules)) for module in model.modules()]
    for own, named in submodules:
        # A forward may exchange them (BigBird does for short sequences), and the graph names them.
        own.update(named)
    fixed = [
        f"{where} is fixed at {text}: it is no tensor"
        for where, text in constants_in(given.structure, "")
    ]
    return replace(captured, notes=(*request.dimensions.notes, *fixed, *by_hand, *captured.notes))


def modes_by_hand(model: nn.Module) -> Iterator[str]:
    """A note on modules whose mode is not what `train` makes of the model's: it was set by hand."""
    modules = dict(model.named_modules())
    unlike = [path for path, module in modules.items() if module.training != model.training]
    with in_mode(model, model.training):
        other = [path for path in unlike if modules[path].training == model.training]
    outer = [path for path in other if path.rpartition(".")[0] not in other]
    if outer:
        shown = ", ".join(f"{path} ({type(modules[path]).__name__})" for path in outer[:3])
        more = f" and {len(outer) - 3} more" if len(outer) > 3 else ""
        kept, root = ("evaluation", "training") if model.training else ("training", "evaluation")
        yield (
            f"{shown}{more} {'is' if len(outer) == 1 else 'are'} in {kept} mode and the model in "
            f"{root} mode; the stages follow train() and eval() of the model, which do not keep "
            "that: to keep it, override train() in the class of the model"
        )


def _dimensions(
    model: nn.Module, given: Arguments, dynamic: Dynamic | None, batch_dim: Said, sequence_dim: Said
) -> Dimensions:
    """The free sizes as the user has named them, or by the dimensions that count samples."""
    if dynamic is not None:
        names = (symbol for named in dynamic.values() for symbol in named.values())
        return Dimensions(dynamic, frozenset(names))
    check_said("--batch-dim", batch_dim, given.tensors)
    check_said("--sequence-dim", sequence_dim, given.tensors)
    if batch_dim == "auto":
        batch, note = find_batch(model, given)
    else:
        batch, note = said_batch(batch_dim, given.tensors), ""
    dims = symbols(given.tensors, batch, sequence_dim)
    asked = asked_lengths(dims, sequence_dim)
    return Dimensions(dims, asked, (note,) if note else ())
