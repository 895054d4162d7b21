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
from .aliases import colocated
from .branch import Calls, branched
from .check import check_capture, is_on_meta
from .explain import explained
from .fakes import Dynamic, FakeWorld, PinnedSizeError
from .graph import Capture, tensor_spec
from .inputs import (
    dynamic_sizes,
    enlarged,
    other_sizes,
    resized,
    sizes_in,
    verify_inputs,
    without_symbol,
)
from .interpret import run
from .leaves import LeafRule, leaf_rule
from .merge import Different, merge
from .patches import patched
from .prune import prune
from .rename import renamed
from .restore import in_mode, without_cache
from .retry import AutomaticLeaves, FailedTrace
from .shadow import Shadow
from .skips import add_skip, undecided
from .structure import plain_structure
from .tracer import LenNeeded, Tracer
from .values import CallRecord, IfTraining, LocalDevice, ModuleCall, Region, Size, size_text

__all__ = [
    "CallRecord", "Capture", "IfTraining", "LocalDevice", "ModuleCall", "Region", "Size",
    "capture", "colocated", "run", "size_text", "tensor_spec",
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

    `example_inputs` are keyword arguments of forward: tensors (on any device, or on meta), None
    and numbers. `dynamic` names the sizes that stay free, by input and dimension; by default
    dimension 0 of every tensor is `batch`, and dimension 1 of two-dimensional tensors of integers
    is `sequence`. `leaves` are modules to keep as one node although they are not of torch.nn, by
    class name or path. Parameters may be on meta. With `check`, the graph is run beside the model
    at other sizes in both modes; a model on meta is not checked.

    The model is left as it was: its mode, its buffers, its configuration.

    Raises CaptureError for a forward that is no fixed graph, naming its line.
    """
    model_inputs = {name: value for name, value in example_inputs.items() if value is not None}
    verify_inputs(model_inputs)
    dims = dynamic_sizes(model_inputs) if dynamic is None else dynamic
    kept = AutomaticLeaves(model, leaf_rule(model, leaves))
    notes: list[str] = []
    first: CaptureError | None = None
    while True:
        try:
            captured = _capture(model, model_inputs, dims, kept.is_leaf)
            break
        except FailedTrace as failed:
            pinned = failed.error
            # The batch has to be free. Another size that nobody asked to be free may be fixed.
            if isinstance(pinned, PinnedSizeError) and not (dynamic or pinned.symbol == "batch"):
                notes.append(f"the {pinned.symbol} size is fixed: {pinned.what}")
                dims = without_symbol(dims, pinned.symbol)
                continue
            first = first or failed.error
            if not kept.keep(failed.paths, failed.error):
                raise first from failed.__cause__
    called = {str(node.target) for node in captured.graph.find_nodes(op="call_module")}
    captured = replace(captured, notes=(*notes, *kept.notes(called), *captured.notes))
    if check and not is_on_meta(model):
        check_capture(captured, model_inputs)
    return captured


def _capture(
    model: nn.Module, inputs: Mapping[str, Any], dims: Dynamic, is_leaf: LeafRule
) -> Capture:
    world = FakeWorld(model)
    large = enlarged(inputs, dims)

    def finished(graph: fx.Graph, calls: Calls, *traces: Tracer) -> Capture:
        prune(graph)
        graph, calls = renamed(graph, calls)
        graph.lint()
        return Capture(
            graph=graph,
            model=model,
            inputs=tuple(tensor_spec(node) for node in graph.find_nodes(op="placeholder")),
            sizes=sizes_in(inputs, dims),
            calls=calls,
            constants={name: t for trace in traces for name, t in trace.constants.items()},
            notes=tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
        )

    def traced(dims: Dynamic, training: bool) -> Tracer:
        tracer = _trace(model, world, large, dims, is_leaf, training=training)
        for number, condition in enumerate(tracer.decisions):
            other = _trace(model, world, large, dims, is_leaf, training=training, skip=number)
            try:
                add_skip(tracer.graph, condition, other.graph, number)
            except Different:
                raise FailedTrace(undecided(condition), ()) from None
        return tracer

    train = traced(dims, training=True)
    # The sizes of the other mode are compared as numbers, which is five times as fast to trace.
    evaluation = traced({}, training=False)
    difference = merge(train.graph, evaluation.graph, sizes_in(large, dims))
    captured = finished(train.graph, train.calls, train, evaluation)
    if difference is None or (not train.decisions and _is_model(captured, inputs)):
        return captured
    train = traced(dims, training=True)
    evaluation = traced(dims, training=False)
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


def _is_model(captured: Capture, inputs: Mapping[str, Any]) -> bool:
    """Whether the graph is known to give the model's numbers in both modes."""
    if is_on_meta(captured.model):
        return False
    try:
        check_capture(captured, inputs)
    except CaptureError:
        return False
    return True


def _others(inputs: Mapping[str, Any], dims: Dynamic) -> list[dict[str, Any]]:
    """Inputs of other sizes, if any size is free."""
    sizes = sizes_in(inputs, dims)
    larger = {name: size + 3 for name, size in sizes.items()}
    return [resized(inputs, dims, each) for each in (other_sizes(sizes), larger) if each]


def _trace(
    model: nn.Module,
    world: FakeWorld,
    inputs: Mapping[str, Any],
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
    skip: int | None = None,
) -> Tracer:
    """One run of forward in one mode, again for every module that turns out to call `len` on a
    symbolic size."""
    scopes: list[dict[str, Any]] = []
    while True:
        shadow = Shadow(world, [inputs, *_others(inputs, dims)], training)
        tracer = Tracer(model, world, is_leaf, shadow, skip)
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
                    name: world.input(value, dims.get(name, {}))
                    if isinstance(value, Tensor)
                    else value
                    for name, value in inputs.items()
                }
                for name, value in fakes.items():
                    if isinstance(value, Tensor):
                        tracer.placeholder(name, value)
                with tracer:
                    result = model(**fakes)
                tracer.output(plain_structure(result))
        except LenNeeded as needed:
            scopes.append(needed.scope)
            continue
        except CaptureError as error:
            raise FailedTrace(error, tracer.failed_in(error)) from error.__cause__
        except Exception as error:
            raise FailedTrace(explained(error, model), tracer.failed_in(error)) from error
        return tracer
