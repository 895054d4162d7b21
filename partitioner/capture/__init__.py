"""A model as its author wrote it -> one `torch.fx.Graph` of named modules and torch functions.

The real forward runs on fake tensors with symbolic sizes, once in training and once in evaluation
mode; what it does is written down and run again on real numbers against the model itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher

from ...runtime.errors import CaptureError
from ...runtime.structure import constants_in
from .aliases import colocated, in_order
from .arguments import Arguments, read_arguments
from .branch import Calls, branched
from .check import check_capture, is_on_meta
from .dynamo import torch_graph
from .explain import both, explained, may_be_unseen
from .fakes import Dynamic, FakeWorld, PinnedSizeError
from .graph import Capture, tensor_spec
from .inputs import dynamic_sizes, enlarged, other_sizes, resized, sizes_in, without_symbol
from .interpret import run
from .leaves import LeafRule, leaf_rule
from .merge import Different, merge
from .patches import patched
from .prune import prune
from .rename import renamed
from .replay import replay
from .restore import in_mode, silent, without_cache
from .shadow import Shadow
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
    "Region", "Size", "capture", "colocated", "in_order", "read_arguments", "run", "size_text",
    "tensor_spec",
]  # fmt: skip


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    dynamic: Dynamic | None = None,
    leaves: Collection[str] = (),
    check: bool = True,
    method: str = "auto",
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
    torch's own graph made by Dynamo. A note says so.

    The model is left as it was: its mode, its buffers, its configuration.

    Raises CaptureError for a forward that is no fixed graph, naming its line.
    """
    given = read_arguments(model, example_inputs)
    dims = dynamic_sizes(given.tensors) if dynamic is None else dynamic
    is_leaf = leaf_rule(model, leaves)
    fixed = [
        f"{where} is fixed at {text}: it is no tensor"
        for where, text in constants_in(given.structure, "")
    ]
    notes: list[str] = []
    trace = _TRACES[method]
    unseen: CaptureError | None = None
    while True:
        try:
            captured = _capture(model, given, dims, is_leaf, trace)
            if (check or trace is not _trace) and not is_on_meta(model):
                check_capture(captured, given.tensors)
            return replace(captured, notes=(*fixed, *notes, *captured.notes))
        except CaptureError as error:
            if isinstance(error, PinnedSizeError) and dynamic is None and error.symbol != "batch":
                # The batch has to be free. Another size that nobody asked for may be fixed.
                notes.append(f"the {error.symbol} size is fixed: {error.what}")
                dims = without_symbol(dims, error.symbol)
            elif unseen is not None:
                raise both(unseen, error) from unseen
            elif method == "auto" and may_be_unseen(error, model, given):
                unseen, trace = error, _TRACES["dynamo"]
                notes.append(f"captured with Dynamo: {error.what}")
            else:
                raise


def _capture(
    model: nn.Module, given: Arguments, dims: Dynamic, is_leaf: LeafRule, trace: Trace
) -> Capture:
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

    def traced(dims: Dynamic, training: bool) -> Tracer:
        return trace(model, world, large, dims, is_leaf, training=training)

    train = traced(dims, training=True)
    # The sizes of the other mode are compared as numbers, which is five times as fast to trace.
    evaluation = traced({}, training=False)
    difference = merge(train.graph, evaluation.graph, sizes_in(large.tensors, dims))
    captured = finished(train.graph, train.calls, train, evaluation)
    if difference is None or _is_model(captured, inputs):
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


def _is_model(captured: Capture, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the graph is known to give the model's numbers in both modes."""
    if is_on_meta(captured.model):
        return False
    try:
        check_capture(captured, inputs)
    except CaptureError:
        return False
    return True


def _others(inputs: Mapping[str, Tensor], dims: Dynamic) -> list[dict[str, Tensor]]:
    """Inputs of other sizes, if any size is free."""
    sizes = sizes_in(inputs, dims)
    larger = {name: size + 3 for name, size in sizes.items()}
    return [resized(inputs, dims, each) for each in (other_sizes(sizes), larger) if each]


class Trace(Protocol):
    """One run of a model's forward in one mode, written down."""

    def __call__(
        self,
        model: nn.Module,
        world: FakeWorld,
        given: Arguments,
        dims: Dynamic,
        is_leaf: LeafRule,
        *,
        training: bool,
    ) -> Tracer: ...


def _trace_dynamo(
    model: nn.Module,
    world: FakeWorld,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
) -> Tracer:
    """Dynamo's graph of forward, run in its place."""

    def call(tensors: dict[str, Tensor]) -> Any:
        return given.call(model, tensors)

    try:
        found = torch_graph(model, call, given.tensors, dims, is_leaf, training=training)
    except Exception as error:
        raise explained(error, model) from error

    def forward(tracer: Tracer, fakes: Mapping[str, Any]) -> Any:
        return replay(found, model, world, tracer, [fakes[name] for name in given.tensors])

    return _trace(model, world, given, dims, is_leaf, training=training, forward=forward)


def _trace(
    model: nn.Module,
    world: FakeWorld,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
    forward: Callable[[Tracer, Mapping[str, Any]], Any] | None = None,
) -> Tracer:
    """One run of forward in one mode, again for every module that turns out to call `len` on a
    symbolic size. `forward` stands in for the model's."""
    scopes: list[dict[str, Any]] = []
    while True:
        shadow = Shadow(world, given, _others(given.tensors, dims), training)
        tracer = Tracer(model, world, is_leaf, shadow)
        try:
            with (
                in_mode(model, training),
                without_cache(model),
                silent(),
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
                    result = forward(tracer, fakes) if forward else given.call(model, fakes)
                tracer.output(plain_structure(result))
        except LenNeeded as needed:
            scopes.append(needed.scope)
            continue
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error, model) from error
        return tracer


_TRACES: Mapping[str, Trace] = {"auto": _trace, "tracer": _trace, "dynamo": _trace_dynamo}
