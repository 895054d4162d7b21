"""A trace of forward in each mode -> one capture for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
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
from .modes_differ import modes_differ
from .prune import prune
from .rename import renamed
from .samples import resized
from .size_guards import add_size_guards
from .skips import add_decision, both_ways, identity, undecided
from .tracer import Tracer
from .traces import Trace

_TRAINING_ALONE = "captured for training alone: the stages cannot run in evaluation mode"


def merged_capture(
    model: nn.Module,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    trace: Trace,
    modes: tuple[bool, ...] = (True, False),
) -> Capture:
    """`modes` are both, or training (True) alone."""
    inputs = given.tensors
    large = replace(given, tensors=enlarged(inputs, dims))

    def finished(graph: fx.Graph, calls: Calls, train: Tracer, evaluation: Tracer) -> Capture:
        traces = (train, evaluation)
        notes = [note for trace in traces for note in trace.notes]
        asked, others = (list(trace.size_decisions.values()) for trace in traces)
        notes += add_size_guards(graph, asked, others, sizes_in(large.tensors, dims), runs)
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
            notes=tuple(dict.fromkeys(notes)),
            modes=modes,
            flags=_unlike_mode(train.flags, evaluation.flags if False in modes else {}),
            changed=tuple(dict.fromkeys(name for trace in traces for name in trace.changed)),
        )

    # A decision that both modes make has one number.
    numbers: dict[tuple[object, ...], int] = {}

    def runs(sizes: Mapping[str, int], training: bool) -> bool:
        sized = replace(given, tensors=resized(inputs, dims, sizes))
        try:
            trace(model, FakeWorld(model), sized, {}, is_leaf, training=training)
        except FailedTrace:
            return False
        return True

    def with_decisions(training: bool) -> Tracer:
        def run(true: frozenset[int], gradients: bool = training) -> Tracer:
            # What one trace has asked of the sizes is not to be taken for granted in the next.
            world = FakeWorld(model)
            return trace(
                model, world, large, dims, is_leaf,
                training=training, true=true, gradients=gradients,
            )  # fmt: skip

        ways = both_ways(run)
        asked = ways.tracer.asks_gradients
        if asked and not _same_calls(ways.tracer.graph, run(ways.true, not training).graph):
            raise FailedTrace(
                CaptureError(
                    f"{asked} does other work with gradients than under torch.no_grad().",
                    "Ask self.training instead: gradients are recorded in training alone.",
                ),
                (),
            )
        for other in ways.others.values():
            ways.tracer.size_decisions.update(other.size_decisions)
        for place, condition in enumerate(ways.tracer.decisions):
            number = numbers.setdefault(identity(ways.tracer.decisions, place), len(numbers))
            try:
                add_decision(ways, place, number)
            except Different:
                raise FailedTrace(undecided(condition), ()) from None
        return ways.tracer

    if modes == (True,):
        train = with_decisions(training=True)
        captured = finished(train.graph, train.calls, train, train)
        return replace(captured, notes=(*captured.notes, _TRAINING_ALONE))

    def both_modes() -> tuple[Tracer, Tracer]:
        train = with_decisions(training=True)
        return train, _apart(with_decisions(training=False), train)

    train, evaluation = both_modes()
    difference = merge(train.graph, evaluation.graph)
    if difference is None:
        return finished(train.graph, train.calls, train, evaluation)
    # Numbers that agree on a sample prove nothing: what a gate of zero hides differs later.
    try:
        both = branched(train.graph, train.calls, evaluation.graph, evaluation.calls)
    except Different as why:
        error = modes_differ(train.graph, evaluation.graph, difference, why, model)
        raise error from None
    captured = finished(*both, train, evaluation)
    if not is_on_meta(model):
        check_capture(captured, inputs)
    return captured


def _unlike_mode(
    train: Mapping[str, bool], evaluation: Mapping[str, bool]
) -> dict[str, tuple[bool, bool]]:
    """The modules whose own mode is not that of the model."""
    flags = {path: (flag, evaluation.get(path, False)) for path, flag in train.items()}
    return {path: both for path, both in flags.items() if both != (True, False)}


def _same_calls(graph: fx.Graph, other: fx.Graph) -> bool:
    """Whether two traces of one mode hold the same calls."""
    calls, others = (
        [(node.op, node.target, str(node.args), str(node.kwargs)) for node in each.nodes]
        for each in (graph, other)
    )
    return calls == others


def _apart(evaluation: Tracer, train: Tracer) -> Tracer:
    """Gives a constant of evaluation mode a name of its own where training has another by that
    name: a tensor made of data is called after its number."""
    for name, value in list(evaluation.constants.items()):
        other = train.constants.get(name, value)
        if value is not other and not _same_bits(value, other):
            evaluation.constants[f"{name}_evaluation"] = evaluation.constants.pop(name)
            for node in evaluation.graph.find_nodes(op="get_attr", target=name):
                node.target = f"{name}_evaluation"
    return evaluation


def _same_bits(value: Tensor, other: Tensor) -> bool:
    alike = value.dtype == other.dtype and value.device == other.device
    return alike and not value.is_meta and torch.equal(value, other)
