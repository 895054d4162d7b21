"""A model as its author wrote it -> one `torch.fx.Graph` of named modules and torch functions.

The real forward runs on fake tensors with symbolic sizes, once in training and once in evaluation
mode; what it does is written down and run again on real numbers against the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from ...runtime.errors import CaptureError
from ...runtime.structure import constants_in
from .aliases import colocated, in_order
from .arguments import Arguments, read_arguments
from .branch import Calls, branched
from .check import check_capture, is_on_meta
from .explain import both, may_be_unseen
from .fakes import Dynamic, FakeWorld, PinnedSizeError
from .fitting import verify_arguments, verify_result
from .graph import Capture, tensor_spec
from .hooks import verify_hooks
from .inputs import dynamic_sizes, enlarged, sizes_in, without_symbol
from .interpret import run
from .leaves import LeafRule, leaf_rule
from .merge import Different, merge
from .prune import prune
from .rename import renamed
from .retry import AutomaticLeaves, FailedTrace, read_failure
from .tracer import Tracer
from .traces import Trace, trace_dynamo, trace_forward
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
    verify_hooks(model)
    given = read_arguments(model, example_inputs)
    verify_arguments(model, example_inputs)
    dims = dynamic_sizes(given.tensors) if dynamic is None else dynamic
    is_leaf = leaf_rule(model, leaves)
    fixed = [
        f"{where} is fixed at {text}: it is no tensor"
        for where, text in constants_in(given.structure, "")
    ]
    notes: list[str] = []
    kept = AutomaticLeaves(model, is_leaf)
    trace: Trace = trace_dynamo if method == "dynamo" else trace_forward
    first: CaptureError | None = None
    unseen: CaptureError | None = None
    while True:
        try:
            captured = _capture(model, given, dims, kept.is_leaf, trace)
            if (check or trace is trace_dynamo) and not is_on_meta(model):
                check_capture(captured, given.tensors)
            called = {str(node.target) for node in captured.graph.find_nodes(op="call_module")}
            notes += kept.notes(called)
            return replace(captured, notes=(*fixed, *notes, *captured.notes))
        except (FailedTrace, CaptureError) as failure:
            error, paths = read_failure(failure)
            if isinstance(error, PinnedSizeError) and dynamic is None and error.symbol != "batch":
                # The batch has to be free. Another size that nobody asked for may be fixed.
                notes.append(f"the {error.symbol} size is fixed: {error.what}")
                dims = without_symbol(dims, error.symbol)
                continue
            if unseen is not None:
                raise both(unseen, error) from unseen
            first = first or error
            if trace is trace_forward and kept.keep(paths, error):
                continue
            if method != "auto" or not may_be_unseen(first, model, given):
                raise first from failure.__cause__
            unseen, trace = first, trace_dynamo
            kept = AutomaticLeaves(model, is_leaf)
            notes.append(f"captured with Dynamo: {first.what}")


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
        verify_result(graph, model)
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
