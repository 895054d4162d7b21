"""The ways to capture a model, one after the other until one gives its graph.

tracer     the forward itself runs on fake tensors
leaves     the same, modules that cannot be traced being kept as one operation each
dynamo     the torch-level graph that Dynamo makes of the forward runs in its place

Where forward takes values out of tensors Dynamo sees no more than the tracer does, and leaves come
first; where it does what torch functions do not show, Dynamo does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ...runtime.errors import CaptureError
from .arguments import Arguments
from .automatic_leaves import AutomaticLeaves, FailedTrace
from .check import check_capture, is_on_meta
from .dimensions import Dimensions, without_symbol
from .explain import UnseenError, ValuesError, both, runs
from .fakes import PinnedSizeError
from .graph import Capture
from .leaves import LeafRule
from .modes import merged_capture
from .relations import corrected, fixed, with_places
from .samples import BATCH
from .size_decisions import at_least_two
from .size_guards import add_size_guard
from .traces import Trace, trace_dynamo, trace_forward

METHODS = ("auto", "tracer", "dynamo")


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be captured: a model called so, with these sizes free and these leaves.

    `modes` are those to capture. `dimensions` are the free sizes; forward may correct them if
    `may_fix`, but for the batch and those that were asked for. `check` asks for a run beside the
    model.
    """

    model: nn.Module
    given: Arguments
    dimensions: Dimensions
    may_fix: bool
    is_leaf: LeafRule
    check: bool
    modes: tuple[bool, ...]


def find_capture(request: Request, method: str) -> Capture:
    """The first way that gives a graph; `method` is one of METHODS.

    Raises CaptureError: what the tracer has to say, which names the user's line.
    """
    if method == "dynamo":
        return _by_dynamo(request)
    try:
        return _captured(request, trace_forward, None)
    except CaptureError as error:
        first = error
    if not runs(request.model, request.given):
        raise first
    for way in _other_ways(first, method):
        try:
            captured = way(request)
        except CaptureError as error:
            if way is _by_dynamo:
                first = both(first, error)
            continue
        if way is _by_dynamo:
            captured = _noted(captured, f"captured with Dynamo: {first.what}")
        return captured
    raise first


def _other_ways(error: CaptureError, method: str) -> list[Callable[[Request], Capture]]:
    if not isinstance(error, (UnseenError, PinnedSizeError)):
        return []  # It is seen, and no graph can hold it.
    if method == "tracer" or isinstance(error, PinnedSizeError):
        return [_by_leaves]
    if isinstance(error, ValuesError):
        return [_by_leaves, _by_dynamo]
    return [_by_dynamo, _by_leaves]


def _by_leaves(request: Request) -> Capture:
    return _captured(request, trace_forward, AutomaticLeaves(request.model, request.is_leaf))


def _by_dynamo(request: Request) -> Capture:
    return _captured(replace(request, check=True), trace_dynamo, None)


def _captured(request: Request, trace: Trace, kept: AutomaticLeaves | None) -> Capture:
    """One way to capture, with as many of the sizes free as can be."""
    model, given, dims = request.model, request.given, request.dimensions.dims
    is_leaf = kept.is_leaf if kept else request.is_leaf
    has_to_be_free = request.dimensions.asked | {BATCH}
    notes: list[str] = []
    is_corrected = not request.may_fix
    while True:
        try:
            captured = merged_capture(model, given, dims, is_leaf, trace, request.modes)
            break
        except FailedTrace as failed:
            error = failed.error
            if isinstance(error, PinnedSizeError):
                error = with_places(error, dims)
                if not is_corrected:
                    is_corrected = True
                    before = dims
                    dims, more = corrected(model, given, dims, is_leaf, has_to_be_free)
                    notes += more
                    if dims != before:
                        continue
                if request.may_fix and error.symbol not in has_to_be_free:
                    # Another size that nobody asked for may be fixed.
                    notes.append(fixed(error, dims, error.symbol))
                    dims = without_symbol(dims, error.symbol)
                    continue
            if kept is None or not kept.keep(failed.paths, error):
                raise error from failed.__cause__
    if kept:
        called = {str(node.target) for node in captured.graph.find_nodes(op="call_module")}
        notes += kept.notes(called)
    if request.check and not is_on_meta(model):
        notes += _refuse_one(captured, check_capture(captured, given.tensors))
    return _noted(captured, *notes)


def _refuse_one(captured: Capture, symbols: Sequence[str]) -> list[str]:
    """Adds guards against the size 1 of some symbols, and gives the notes that tell of them.

    A size of 1 broadcasts, and forwards ask for it where nothing depends on it: whether it goes
    another way is known by its numbers only.
    """
    for symbol in symbols:
        if captured.sizes[symbol] == 1:
            raise CaptureError(
                f"forward goes another way for a {symbol} size of 1, as in the example, than for "
                "larger ones.",
                f"Give an example with a {symbol} size of 2 or more.",
            )
        add_size_guard(captured.graph, at_least_two(symbol))
    return [
        f"a {symbol} size of 1 goes another way through forward; inputs of that size are refused "
        "when they come"
        for symbol in symbols
    ]


def _noted(captured: Capture, *notes: str) -> Capture:
    return replace(captured, notes=(*notes, *captured.notes))
