"""A model as its author wrote it -> one `torch.fx.Graph` of named modules and torch functions.

The real forward runs on fake tensors with symbolic sizes, once in training and once in evaluation
mode; what it does is written down and run again on real numbers against the model itself.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher

from ...runtime.errors import CaptureError
from ...runtime.structure import constants_in
from .aliases import colocated
from .arguments import Arguments, read_arguments
from .branch import Calls, branched
from .check import check_capture, is_on_meta
from .explain import explained
from .fakes import Dynamic, FakeWorld, PinnedSizeError
from .graph import Capture, tensor_spec
from .hooks import verify_hooks
from .inputs import dynamic_sizes, enlarged, sizes_in, without_symbol
from .interpret import run
from .leaves import LeafRule, leaf_rule
from .merge import Different, merge
from .patches import patched
from .prune import prune
from .rename import renamed
from .restore import in_mode, without_cache
from .structure import plain_structure
from .tracer import LenNeeded, Tracer
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

__all__ = [
    "Arguments", "CallRecord", "Capture", "IfTraining", "LocalDevice", "ModuleCall", "Recompute",
    "Region", "Size", "capture", "colocated", "read_arguments", "run", "size_text", "tensor_spec",
]  # fmt: skip


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    dynamic: Dynamic | None = None,
    leaves: Collection[str] = (),
    check: bool = True,
) -> Capture:
    """Writes down what the model's forward does for inputs like these.

    `example_inputs` are arguments of forward by name: tensors (on any device, or on meta), tuples,
    lists, dicts and dataclasses of them, and constants. `dynamic` names the sizes that stay free,
    by input (`masks_0` for the first of `masks`) and dimension; by default dimension 0 of every
    tensor is `batch`, and dimension 1 of two-dimensional tensors of integers is `sequence`.
    `leaves` are modules to keep as one node although they are not of torch.nn, by
    class name or path. Parameters may be on meta. With `check`, the graph is run beside the model
    at other sizes in both modes; a model on meta is not checked.

    The model is left as it was: its mode, its buffers, its configuration.

    Raises CaptureError for a forward that is no fixed graph, naming its line.
    """
    verify_hooks(model)
    given = read_arguments(model, example_inputs)
    dims = dynamic_sizes(given.tensors) if dynamic is None else dynamic
    is_leaf = leaf_rule(model, leaves)
    notes: list[str] = []
    while True:
        try:
            captured = _capture(model, given, dims, is_leaf)
            break
        except PinnedSizeError as pinned:
            # The batch has to be free. Another size that nobody asked to be free may be fixed.
            if dynamic is not None or pinned.symbol == "batch":
                raise
            notes.append(f"the {pinned.symbol} size is fixed: {pinned.what}")
            dims = without_symbol(dims, pinned.symbol)
    fixed = [
        f"{where} is fixed at {text}: it is no tensor"
        for where, text in constants_in(given.structure, "")
    ]
    captured = replace(captured, notes=(*fixed, *notes, *captured.notes))
    if check and not is_on_meta(model):
        check_capture(captured, given.tensors)
    return captured


def _capture(model: nn.Module, given: Arguments, dims: Dynamic, is_leaf: LeafRule) -> Capture:
    world = FakeWorld(model)
    inputs = given.tensors
    large = replace(given, tensors=enlarged(inputs, dims))

    def finished(graph: fx.Graph, calls: Calls, *traces: Tracer) -> Capture:
        prune(graph)
        graph, calls = renamed(graph, calls)
        graph.lint()
        return Capture(
            graph=graph,
            model=model,
            inputs=tuple(tensor_spec(node) for node in graph.find_nodes(op="placeholder")),
            arguments=given,
            sizes=sizes_in(inputs, dims),
            calls=calls,
            constants={name: t for trace in traces for name, t in trace.constants.items()},
            notes=tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
        )

    train = _trace(model, world, large, dims, is_leaf, training=True)
    # The sizes of the other mode are compared as numbers, which is five times as fast to trace.
    evaluation = _trace(model, world, large, {}, is_leaf, training=False)
    difference = merge(train.graph, evaluation.graph, sizes_in(large.tensors, dims))
    captured = finished(train.graph, train.calls, train, evaluation)
    if difference is None or _is_model(captured, inputs):
        return captured
    train = _trace(model, world, large, dims, is_leaf, training=True)
    evaluation = _trace(model, world, large, dims, is_leaf, training=False)
    prune(train.graph)
    prune(evaluation.graph)
    try:
        both = branched(train.graph, train.calls, evaluation.graph, evaluation.calls)
    except Different:
        raise difference from None
    captured = finished(*both, train, evaluation)
    if is_on_meta(model) or _is_model(captured, inputs):
        return captured
    raise difference


def _is_model(captured: Capture, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the graph is known to give the model's numbers in both modes."""
    if is_on_meta(captured.model):
        return False
    try:
        check_capture(captured, inputs)
    except CaptureError:
        return False
    return True


def _trace(
    model: nn.Module,
    world: FakeWorld,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
) -> Tracer:
    """One run of forward in one mode, again for every module that turns out to call `len` on a
    symbolic size."""
    scopes: list[dict[str, Any]] = []
    while True:
        tracer = Tracer(model, world, is_leaf)
        try:
            with (
                in_mode(model, training),
                without_cache(model),
                torch.enable_grad(),
                world.inside(sys._getframe()),
                patched(tracer, scopes),
                enable_python_dispatcher(),
                world.mode,
                tracer.random,
            ):
                fakes = {
                    name: world.input(tensor, dims.get(name, {}))
                    for name, tensor in given.tensors.items()
                }
                for name, fake in fakes.items():
                    tracer.placeholder(name, fake)
                with tracer:
                    result = given.call(model, fakes)
                tracer.output(plain_structure(result))
        except LenNeeded as needed:
            scopes.append(needed.scope)
            continue
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error, model) from error
        return tracer
