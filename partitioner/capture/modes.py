"""A trace of forward in each mode -> one capture for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, fx, nn

from ...runtime.errors import CaptureError
from .arguments import Arguments
from .automatic_leaves import FailedTrace
from .branch import Calls, branched
from .check import check_capture, is_on_meta
from .fakes import Dynamic, FakeWorld
from .fitting import verify_result
from .graph import Capture, tensor_spec
from .inputs import enlarged, sizes_in
from .leaves import LeafRule
from .merge import Different, merge
from .prune import prune
from .rename import renamed
from .skips import add_skip, undecided
from .tracer import Tracer
from .traces import Trace


def merged_capture(
    model: nn.Module, given: Arguments, dims: Dynamic, is_leaf: LeafRule, trace: Trace
) -> Capture:
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

    def traced(training: bool, skip: int | None = None) -> Tracer:
        # What one trace has asked of the sizes is not to be taken for granted in the next.
        world = FakeWorld(model)
        return trace(model, world, large, dims, is_leaf, training=training, skip=skip)

    def with_skips(training: bool) -> Tracer:
        tracer = traced(training)
        for number, condition in enumerate(tracer.decisions):
            other = traced(training, skip=number)
            try:
                add_skip(tracer.graph, condition, other.graph, number)
            except Different:
                raise FailedTrace(undecided(condition), ()) from None
        return tracer

    train, evaluation = with_skips(training=True), with_skips(training=False)
    difference = merge(train.graph, evaluation.graph)
    captured = finished(train.graph, train.calls, train, evaluation)
    if difference is None or (not train.decisions and _is_model(captured, inputs)):
        return captured
    train, evaluation = with_skips(training=True), with_skips(training=False)
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
