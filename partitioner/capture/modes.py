"""A trace of forward in each mode -> one capture for both.

`merged_capture` traces each mode, with all its random decisions, and merges the graphs. Each
decision is taken both ways, and then several at once: see `combined`.

`trace_forward` runs the model's forward once, in one mode, on fake tensors; `trace_dynamo` runs
the torch-level graph that Dynamo makes of it instead. Both return a tracer with its graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher

from ...runtime.errors import CaptureError
from .aliasing import verify_separate
from .arguments import Arguments, plain_structure, verify_result
from .bindings import renamed
from .check import check_capture, ignores_gradients
from .dynamo import pinned, torch_graph
from .dynamo_lowering import replay, traced_transforms
from .fake_inputs import Dynamic, FakeWorld, RandomDecisionError, explained
from .graph import Capture, prune, tensor_spec
from .leaf_modules import FailedTrace, LeafRule
from .mode_branches import TRAINING_CURE, Calls, branched, modes_differ
from .mode_merge import Different, calls_made, merge, write_decision
from .model_state import in_mode, is_on_meta, silent, without_cache
from .patches import CURE as GRADIENTS_CURE
from .patches import LenNeeded, patched, watched_gradients
from .random_numbers import watched_draws, watched_seeds
from .readings import Shadow
from .size_guards import add_size_guards, contracting_in_order_of_example
from .sizes import enlarged, resized, sizes_in, smaller_sizes
from .tracer import Tracer

_MOST = 3
_TRAINING_ALONE = "captured for training alone: the stages cannot run in evaluation mode"


def merged_capture(
    model: nn.Module,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    trace: Trace,
    modes: tuple[bool, ...] = (True, False),
) -> Capture:
    """The capture of both modes, or of training (True) only.

    Raises FailedTrace for a forward that cannot be traced, and CaptureError for modes that cannot
    be merged.
    """
    return _ModeCapture(model, given, dims, is_leaf, trace, modes).capture()


class _ModeCapture:
    """One merged capture: the arguments of `merged_capture`, and the numbers of decisions."""

    def __init__(
        self,
        model: nn.Module,
        given: Arguments,
        dims: Dynamic,
        is_leaf: LeafRule,
        trace: Trace,
        modes: tuple[bool, ...],
    ) -> None:
        self._model, self._given, self._dims = model, given, dims
        self._is_leaf, self._trace, self._modes = is_leaf, trace, modes
        self._large = replace(given, tensors=enlarged(given.tensors, dims))
        # A decision that both modes make has one number.
        self._numbers: dict[tuple[object, ...], int] = {}

    def capture(self) -> Capture:
        train = self._traced(training=True)
        if self._modes == (True,):
            captured = self._finished(train.graph, train.calls, train, train)
            return replace(captured, notes=(*captured.notes, _TRAINING_ALONE))
        try:
            evaluation = _apart(self._traced(training=False), train)
        except FailedTrace as failed:
            error = failed.error.and_also(f"Evaluation alone fails. {TRAINING_CURE}.")
            raise FailedTrace(error, failed.paths) from failed.__cause__
        difference = merge(train.graph, evaluation.graph)
        if difference is None:
            return self._finished(train.graph, train.calls, train, evaluation)
        # Equal numbers on a sample would prove nothing: a gate of zero may hide a difference.
        try:
            both = branched(train.graph, train.calls, evaluation.graph, evaluation.calls)
        except Different as why:
            error = modes_differ(train.graph, evaluation.graph, difference, why, self._model)
            raise error from None
        captured = self._finished(*both, train, evaluation)
        if not is_on_meta(self._model):
            check_capture(captured, self._given.tensors)
        return captured

    def _traced(self, training: bool) -> Tracer:
        """The trace of one mode, with both branches of its random decisions."""

        def run(true: frozenset[int], gradients: bool = training) -> Tracer:
            # A new world: answers about sizes in one trace must not carry over to the next.
            world = FakeWorld(self._model)
            mode = TracedMode(training, true, gradients)
            return self._trace(self._model, world, self._large, self._dims, self._is_leaf, mode)

        ways = both_ways(run)
        location = ways.tracer.asks_gradients
        if (
            location
            and not _same_calls(ways.tracer.graph, run(ways.true, not training).graph)
            and (
                is_on_meta(self._model) or not ignores_gradients(self._model, self._given, training)
            )
        ):
            raise FailedTrace(
                CaptureError(
                    f"{location} computes other results with gradients than under torch.no_grad().",
                    GRADIENTS_CURE,
                ),
                (),
            )
        for other in ways.others.values():
            ways.tracer.sizes.decisions.update(other.sizes.decisions)
        decisions = ways.tracer.decisions
        of_place: dict[int, int] = {}
        for place, condition in enumerate(decisions):
            key = identity(decisions, place)
            of_place[place] = self._numbers.setdefault(key, len(self._numbers))
            try:
                add_decision(ways, place, of_place[place])
            except Different:
                raise undecided(condition) from None
        merged = ways.tracer.graph, ways.tracer.constants
        for places in combined(len(decisions)):
            true = ways.true ^ places
            trace = run(true)
            answers = {number: place in true for place, number in of_place.items()}
            if calls_made(*merged, answers) != calls_made(trace.graph, trace.constants, {}):
                raise undecided(decisions[max(places)])
        return ways.tracer

    def _runs(self, sizes: Mapping[str, int], training: bool) -> bool:
        """True if the model runs on fake inputs of these sizes."""
        sized = replace(self._given, tensors=resized(self._given.tensors, self._dims, sizes))
        world = FakeWorld(self._model)
        try:
            self._trace(self._model, world, sized, {}, self._is_leaf, TracedMode(training))
        except FailedTrace:
            return False
        return True

    def _finished(
        self, graph: fx.Graph, calls: Calls, train: Tracer, evaluation: Tracer
    ) -> Capture:
        """The capture of a merged graph: with guards, pruned and named."""
        inputs, dims = self._given.tensors, self._dims
        traces = (train, evaluation)
        notes = [note for trace in traces for note in trace.notes]
        decisions, others = (list(trace.sizes.decisions.values()) for trace in traces)
        hints = sizes_in(self._large.tensors, dims)
        notes += add_size_guards(graph, decisions, others, hints, self._runs)
        prune(graph)
        graph, calls = renamed(graph, calls)
        graph.lint()
        verify_result(graph, self._model)
        captured = Capture(
            graph=graph,
            model=self._model,
            inputs=tuple(tensor_spec(node) for node in graph.find_nodes(op="placeholder")),
            arguments=self._given,
            sizes=sizes_in(inputs, dims),
            calls=calls,
            constants={name: t for trace in traces for name, t in trace.constants.items()},
            notes=tuple(dict.fromkeys(notes)),
            modes=self._modes,
            flags=_unlike_mode(train.flags, evaluation.flags if False in self._modes else {}),
            changed=tuple(dict.fromkeys(name for trace in traces for name in trace.changed)),
            changed_buffers=frozenset(name for each in traces for name in each.changed_buffers),
        )
        verify_separate(captured)
        return captured


def _unlike_mode(
    train: Mapping[str, bool], evaluation: Mapping[str, bool]
) -> dict[str, tuple[bool, bool]]:
    """The modules whose mode differs from the model's, with their modes in both."""
    flags = {path: (flag, evaluation.get(path, False)) for path, flag in train.items()}
    return {path: both for path, both in flags.items() if both != (True, False)}


def _same_calls(graph: fx.Graph, other: fx.Graph) -> bool:
    """True if two traces of one mode hold the same calls."""
    calls, others = (
        [(node.op, node.target, str(node.args), str(node.kwargs)) for node in mode_graph.nodes]
        for mode_graph in (graph, other)
    )
    return calls == others


def _apart(evaluation: Tracer, train: Tracer) -> Tracer:
    """Renames constants of evaluation mode whose name has another value in training: tensors made
    of data are only numbered."""
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


@dataclass(frozen=True)
class Ways:
    """Traces of both answers of each random decision.

    tracer: the main trace
    true: the numbers of the decisions that are true in it
    others: for each decision, the trace with the other answer
    """

    tracer: Tracer
    true: frozenset[int]
    others: Mapping[int, Tracer]


def both_ways(run: Callable[[frozenset[int]], Tracer]) -> Ways:
    """The traces of both answers; the main trace has the answers with most nodes.

    `run` traces forward, given the decisions that are true. In a trace that runs a layer, its input
    and output are two values, so that the graph shows which one later nodes read; in a trace that
    skips it, they are one.
    """
    true: frozenset[int] = frozenset()
    tracer = run(true)
    others: dict[int, Tracer] = {}
    for place, condition in enumerate(tracer.decisions):
        others[place] = run(true ^ {place})
        if len(others[place].decisions) != len(tracer.decisions):  # A decision within another.
            raise undecided(condition)
        if len(others[place].graph.nodes) > len(tracer.graph.nodes):
            tracer, true, others = others[place], true | {place}, {}
    for place in range(len(tracer.decisions)):
        if place not in others:
            others[place] = run(true ^ {place})
    return Ways(tracer, true, others)


def identity(decisions: Sequence[fx.Node], place: int) -> tuple[object, ...]:
    """Equal for a decision in all traces of a model: its place, and its number at this place."""
    where = [
        (decision.meta["source"], decision.meta["calls"]) for decision in decisions[: place + 1]
    ]
    return (*where[-1], where.count(where[-1]))


def add_decision(ways: Ways, place: int, decision: int) -> None:
    """Writes both branches of the decision at `place` into the graph, with the number `decision`.
    Raises Different if this is not possible."""
    condition, other = ways.tracer.decisions[place], ways.others[place].graph
    write_decision(ways.tracer.graph, condition, other, decision, is_true=place in ways.true)


def undecided(condition: fx.Node) -> FailedTrace:
    """The failure at a random decision that cannot be an if with an else in the graph."""
    file, line = condition.meta["source"]
    error = RandomDecisionError(
        f"{file}:{line} decides at random in a way that cannot be an if with an else: within "
        "another such decision, together with another one, about a value that another one makes, "
        "or between values of different shapes.",
        "Set the probability to 0, or keep the module as one node: --leaf Class.",
    )
    return FailedTrace(error, [call.path for call in condition.meta["calls"]])


def combined(count: int) -> list[frozenset[int]]:
    """The decisions to take the other way at once: of up to three decisions all combinations, of
    more those of all, of all but one, and of about half of them.

    >>> [sorted(places) for places in combined(3)]
    [[0, 1], [0, 2], [1, 2], [0, 1, 2]]
    >>> [sorted(places) for places in combined(5)]
    [[0, 1, 2, 3, 4], [1, 2, 3, 4], [1, 3], [2, 3]]
    """
    if count <= _MOST:
        sizes = range(2, count + 1)
        return [frozenset(few) for size in sizes for few in combinations(range(count), size)]
    every = frozenset(range(count))
    halves = [
        frozenset(place for place in every if place >> bit & 1)
        for bit in range((count - 1).bit_length())
    ]
    return [each for each in dict.fromkeys([every, every - {0}, *halves]) if len(each) > 1]


@dataclass(frozen=True, slots=True)
class TracedMode:
    """The mode of one traced run, and the answers to the questions of its forward.

    training: training mode
    true: the numbers of the random decisions that are true
    gradients: whether gradients are recorded
    """

    training: bool
    true: Collection[int] = ()
    gradients: bool = True


class Trace(Protocol):
    """A function that records one run of a model's forward in one mode."""

    def __call__(
        self,
        model: nn.Module,
        world: FakeWorld,
        given: Arguments,
        dims: Dynamic,
        is_leaf: LeafRule,
        mode: TracedMode,
    ) -> Tracer:
        """The tracer of one run."""


def trace_forward(
    model: nn.Module,
    world: FakeWorld,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    mode: TracedMode,
    *,
    forward: Callable[[Tracer, Mapping[str, Any]], Any] | None = None,
) -> Tracer:
    """One run of forward, or of `forward` in its place, in one mode. It is repeated for every
    Python module that calls `len` on a symbolic size, and after a run that replaced modules."""
    scopes: list[dict[str, Any]] = []
    modules = list(model.modules())
    while True:
        shadow = Shadow(world, given, _others(given.tensors, dims), mode.training)
        tracer = Tracer(model, world, is_leaf, shadow, mode.true, mode.gradients)
        try:
            with (
                in_mode(model, mode.training),
                without_cache(model),
                silent(),
                torch.compiler.set_stance(
                    "force_eager"
                ),  # compiled modules run as they are written
                torch.enable_grad(),
                world.inside(sys._getframe()),
                patched(tracer, scopes),
                watched_draws(tracer, model),
                watched_gradients(tracer, model),
                watched_seeds(tracer),
                traced_transforms(tracer),
                contracting_in_order_of_example(),
                enable_python_dispatcher(),
                world.mode,
                tracer.random,
            ):
                tracer.flags = {path: module.training for path, module in model.named_modules()}
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
        except CaptureError as error:
            raise FailedTrace(error, tracer.failed_in(error)) from error.__cause__
        except Exception as error:
            readings = tracer.readings
            reason = explained(error, model, given, readings.drawn_symbols, readings.state_asked)
            raise FailedTrace(reason, tracer.failed_in(error)) from error
        if (now := list(model.modules())) != modules:
            modules = now  # New modules draw random numbers, but only in the first run.
            continue
        return tracer


def trace_dynamo(
    model: nn.Module,
    world: FakeWorld,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    mode: TracedMode,
) -> Tracer:
    """One run of Dynamo's graph in place of forward."""

    def call(tensors: dict[str, Tensor]) -> Any:
        return given.call(model, tensors)

    try:
        exported = torch_graph(model, call, given.tensors, dims, is_leaf, training=mode.training)
    except Exception as error:
        explanation = pinned(error, given, dims) or explained(error, model, given)
        raise FailedTrace(explanation, ()) from error

    def forward(tracer: Tracer, fakes: Mapping[str, Any]) -> Any:
        return replay(exported, model, world, tracer, [fakes[name] for name in given.tensors])

    return trace_forward(model, world, given, dims, is_leaf, mode, forward=forward)


def _others(inputs: Mapping[str, Tensor], dims: Dynamic) -> list[dict[str, Tensor]]:
    """Inputs of other sizes, if there are free sizes."""
    sizes = sizes_in(inputs, dims)
    larger = {name: size + 3 for name, size in sizes.items()}
    return [resized(inputs, dims, other) for other in (smaller_sizes(sizes), larger) if other]
