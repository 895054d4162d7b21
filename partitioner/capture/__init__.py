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
from .aliases import colocated
from .branch import Calls, branched
from .check import check_capture, is_on_meta
from .dynamo import torch_graph
from .explain import both, explained, may_be_unseen, pinned
from .fakes import Dynamic, FakeWorld, PinnedSizeError
from .graph import Capture, tensor_spec
from .inputs import dynamic_sizes, enlarged, sizes_in, verify_inputs, without_symbol
from .interpret import run
from .leaves import LeafRule, leaf_rule
from .merge import Different, merge
from .patches import patched
from .prune import prune
from .rename import renamed
from .replay import replay
from .restore import in_mode, silent, without_cache
from .structure import plain_structure
from .tracer import LenNeeded, Tracer
from .values import CallRecord, IfTraining, LocalDevice, ModuleCall, Region, Size, size_text

_METHODS = ("auto", "tracer", "dynamo")

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
    method: str = "auto",
) -> Capture:
    """Writes down what the model's forward does for inputs like these.

    `example_inputs` are keyword arguments of forward: tensors (on any device, or on meta), None
    and numbers. `dynamic` names the sizes that stay free, by input and dimension; by default
    dimension 0 of every tensor is `batch`, and dimension 1 of two-dimensional tensors of integers
    is `sequence`. `leaves` are modules to keep as one node although they are not of torch.nn, by
    class name or path. Parameters may be on meta. With `check`, the graph is run beside the model
    at other sizes in both modes; a model on meta is not checked.

    `method` is `tracer`, `dynamo` or `auto`: the tracer, and where it cannot see what forward does,
    torch's own graph made by Dynamo. A note says so.

    The model is left as it was: its mode, its buffers, its configuration.

    Raises CaptureError for a forward that is no fixed graph, naming its line.
    """
    model_inputs = {name: value for name, value in example_inputs.items() if value is not None}
    verify_inputs(model_inputs)
    if method not in _METHODS:
        raise CaptureError(f"the way to capture is {method!r}.", f"Known: {', '.join(_METHODS)}.")
    dims = dynamic_sizes(model_inputs) if dynamic is None else dynamic
    is_leaf = leaf_rule(model, leaves)

    def captured_by(trace: Trace) -> Capture:
        return _with_free_sizes(model, model_inputs, dims, dynamic is None, is_leaf, trace, check)

    if method == "dynamo":
        return captured_by(_trace_dynamo)
    try:
        return captured_by(_trace)
    except CaptureError as error:
        if method == "tracer" or not may_be_unseen(error, model, model_inputs):
            raise
        unseen = error
    try:
        captured = captured_by(_trace_dynamo)
    except CaptureError as error:
        raise both(unseen, error) from unseen
    return replace(captured, notes=(f"captured with Dynamo: {unseen.what}", *captured.notes))


def _with_free_sizes(
    model: nn.Module,
    model_inputs: Mapping[str, Any],
    dims: Dynamic,
    may_fix: bool,
    is_leaf: LeafRule,
    trace: Trace,
    check: bool,
) -> Capture:
    """One way to capture, with as many of the sizes free as can be."""
    notes: list[str] = []
    while True:
        try:
            captured = _capture(model, model_inputs, dims, is_leaf, trace)
            break
        except PinnedSizeError as pinned:
            # The batch has to be free. Another size that nobody asked to be free may be fixed.
            if not may_fix or pinned.symbol == "batch":
                raise
            notes.append(f"the {pinned.symbol} size is fixed: {pinned.what}")
            dims = without_symbol(dims, pinned.symbol)
    captured = replace(captured, notes=(*notes, *captured.notes))
    if (check or trace is not _trace) and not is_on_meta(model):
        check_capture(captured, model_inputs)
    return captured


def _capture(
    model: nn.Module,
    inputs: Mapping[str, Any],
    dims: Dynamic,
    is_leaf: LeafRule,
    trace: Trace,
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

    train = trace(model, world, large, dims, is_leaf, training=True)
    # The sizes of the other mode are compared as numbers, which is five times as fast to trace.
    evaluation = trace(model, world, large, {}, is_leaf, training=False)
    difference = merge(train.graph, evaluation.graph, sizes_in(large, dims))
    captured = finished(train.graph, train.calls, train, evaluation)
    if difference is None or _is_model(captured, inputs):
        return captured
    train = trace(model, world, large, dims, is_leaf, training=True)
    evaluation = trace(model, world, large, dims, is_leaf, training=False)
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


class Trace(Protocol):
    """One run of a model's forward in one mode, written down."""

    def __call__(
        self,
        model: nn.Module,
        world: FakeWorld,
        inputs: Mapping[str, Any],
        dims: Dynamic,
        is_leaf: LeafRule,
        *,
        training: bool,
    ) -> Tracer: ...


def _trace_dynamo(
    model: nn.Module,
    world: FakeWorld,
    inputs: Mapping[str, Any],
    dims: Dynamic,
    is_leaf: LeafRule,
    *,
    training: bool,
) -> Tracer:
    """Dynamo's graph of forward, run in its place."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in inputs.items() if name not in tensors}

    def call(given: dict[str, Tensor]) -> Any:
        return model(**given, **others)

    try:
        found = torch_graph(model, call, tensors, dims, is_leaf, training=training)
    except Exception as error:
        raise pinned(error, tensors, dims) or explained(error, model) from error

    def forward(tracer: Tracer, fakes: Mapping[str, Any]) -> Any:
        return replay(found, model, world, tracer, [fakes[name] for name in tensors])

    return _trace(model, world, inputs, dims, is_leaf, training=training, forward=forward)


def _trace(
    model: nn.Module,
    world: FakeWorld,
    inputs: Mapping[str, Any],
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
        tracer = Tracer(model, world, is_leaf)
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
                    name: world.input(value, dims.get(name, {}))
                    if isinstance(value, Tensor)
                    else value
                    for name, value in inputs.items()
                }
                for name, value in fakes.items():
                    if isinstance(value, Tensor):
                        tracer.placeholder(name, value)
                with tracer:
                    result = forward(tracer, fakes) if forward else model(**fakes)
                tracer.output(plain_structure(result))
        except LenNeeded as needed:
            scopes.append(needed.scope)
            continue
        except CaptureError:
            raise
        except Exception as error:
            raise explained(error, model) from error
        return tracer
