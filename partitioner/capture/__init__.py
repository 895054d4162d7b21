"""A model as its author wrote it -> one `torch.fx.Graph` of named modules and torch functions.

The real forward runs on fake tensors with symbolic sizes, once in training and once in evaluation
mode, and a tracer records its operations. The recorded graph is then compared with the model on
real numbers.

`find_capture` tries these methods until one gives a graph:

tracer     the forward itself runs on fake tensors
leaves     as tracer, but modules that cannot be traced are kept as one operation each
dynamo     the torch-level graph that TorchDynamo makes of the forward runs in its place

If forward reads values out of tensors, leaves come before dynamo, because Dynamo sees no more than
the tracer. If forward does something that torch functions cannot show, dynamo comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ...runtime.errors import CaptureError
from ...runtime.plan.structure import constants_in
from ...runtime.process import with_room_for_frames
from .aliasing import (
    RemadeBufferError,
    colocated,
    draws_in_order,
    in_order,
    make_tables,
    runs,
)
from .arguments import (
    Arguments,
    read_arguments,
    state_of,
    verify_arguments,
    verify_hooks,
    verify_shapes,
)
from .batch_dimension import corrected, find_batch, fixed, with_places
from .check import check_capture
from .fake_inputs import (
    Dynamic,
    PinnedSizeError,
    RandomDecisionError,
    UnseenError,
    ValuesError,
)
from .graph import Capture, run, tensor_spec
from .leaf_modules import AutomaticLeaves, FailedTrace, LeafRule, leaf_rule
from .model_state import in_mode, is_on_meta, unchanged, verify_strided
from .modes import Trace, merged_capture, trace_dynamo, trace_forward
from .size_guards import add_size_guard, at_least_two
from .sizes import (
    BATCH,
    DimensionOption,
    Dimensions,
    batch_of_option,
    check_dimension,
    named_lengths,
    places,
    sizes_in,
    symbols,
    without_symbol,
)
from .source_lines import is_user_file, replacement, verify_names
from .values import (
    CallRecord,
    IfTraining,
    Local,
    LocalDevice,
    ModuleCall,
    Recompute,
    Region,
    Size,
    size_text,
)

__all__ = [
    "Arguments", "CallRecord", "Capture", "IfTraining", "Local", "LocalDevice", "ModuleCall",
    "Recompute", "Region", "DimensionOption", "Size", "capture", "colocated",
    "draws_in_order", "find_dimensions", "in_order",
    "read_arguments", "run", "size_text",
    "state_of", "tensor_spec",
]  # fmt: skip

METHODS = ("auto", "tracer", "dynamo")
MODES = {"both": (True, False), "train": (True,)}
"""The modes to capture, training first, by the name of the option."""


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    dynamic: Dynamic | None = None,
    batch_dim: DimensionOption = "auto",
    sequence_dim: DimensionOption = "auto",
    leaves: Collection[str] = (),
    check: bool = True,
    method: str = "auto",
    mode: str = "both",
) -> Capture:
    """Records the operations of the model's forward for inputs like the examples.

    example_inputs: arguments of forward by name: tensors (on any device, or with the model on
        meta), tuples, lists, dicts and dataclasses of them, and constants
    dynamic: the names of the free sizes by input and dimension, in place of the next two
    batch_dim: the dimension that counts samples, by input (`masks_0` is the first of `masks`), one
        number for all inputs, or None for inputs without a batch; "auto" finds it
    sequence_dim: the dimension that counts tokens, in the same form; by default dimension 1 of
        two-dimensional tensors of integers
    leaves: modules outside torch.nn to keep as one node, by class name or path
    check: compare graph and model at other sizes in both modes; skipped for a model on meta
    method: "tracer", "dynamo", or "auto": the tracer, and Dynamo for a forward that the tracer
        cannot see through; a note says which
    mode: "both", or "train" for a graph of training mode only, for a model whose forward returns
        another structure in evaluation mode

    Parameters may be on meta. The model is restored: parameters, buffers, attributes, modes,
    gradients. Raises CaptureError, with the line, for a forward that cannot be one fixed graph.
    """
    _verify_options(mode, method)
    verify_names(model)
    verify_shapes(model)
    verify_hooks(model)
    for path, module in model.named_modules():
        own = {f"{path}.{name}".strip("."): value for name, value in vars(module).items()}
        verify_strided(own, "attribute")
    given = read_arguments(model, example_inputs)
    verify_strided(given.tensors, "input")
    verify_arguments(model, example_inputs)
    _verify_values(model, given)
    request = CaptureRequest(
        model=model,
        given=given,
        dimensions=_named(dynamic)
        if dynamic is not None
        else find_dimensions(model, given, batch_dim, sequence_dim),
        may_fix=dynamic is None,
        is_leaf=leaf_rule(model, leaves),
        check=check,
        modes=MODES[mode],
    )
    by_hand = tuple(modes_by_hand(model))
    captured = with_room_for_frames(partial(_with_tables, request, method))
    fixed = [
        f"{where} is fixed at {text}: it is not a tensor"
        for where, text in constants_in(given.structure, "")
    ]
    return replace(captured, notes=(*request.dimensions.notes, *fixed, *by_hand, *captured.notes))


def _verify_torchs_own(captured: Capture) -> None:
    """Raises CaptureError for an operation of torch in which this process runs other code."""
    functional = {id(function): name for name, function in vars(nn.functional).items()}
    seen: set[CodeType] = set()
    for node in captured.graph.nodes:
        if node.op == "call_module":
            kind = type(captured.model.get_submodule(str(node.target)))
            name, start, owner = f"nn.{kind.__name__}", kind.forward, kind
            is_torchs = kind.__module__.startswith("torch.")
        elif node.op == "call_function" and isinstance(node.target, FunctionType):
            start, owner = node.target, None
            name = functional.get(id(start), start.__name__)
            is_torchs = id(start) in functional or not is_user_file(start.__code__.co_filename)
        else:
            continue
        if is_torchs and (found := replacement(start, owner, seen)):
            raise CaptureError(
                f"{name} runs {found} in place of torch's own, which the processes of ranks have.",
                "Call your function in a forward of your own, or set module.forward of each such "
                "module.",
            )


def _verify_values(model: nn.Module, given: Arguments) -> None:
    """Raises CaptureError for an input without values of a model that has values."""
    for name, tensor in given.tensors.items():
        if tensor.is_meta and not is_on_meta(model):
            raise CaptureError(
                f"the input {name} is on meta, without values, but the model has values.",
                "Give example inputs with values, or build the model on meta too.",
            )


def _verify_options(mode: str, method: str) -> None:
    if mode not in MODES:
        raise CaptureError(f"mode {mode!r} is not known.", f"Known: {', '.join(MODES)}.")
    if method not in METHODS:
        raise CaptureError(
            f"capture method {method!r} is not known.", f"Known: {', '.join(METHODS)}."
        )


def _with_tables(request: CaptureRequest, method: str) -> Capture:
    """The capture, if need be with the buffers that the first call of the model makes."""
    try:
        return _captured_unchanged(request, method)
    except RemadeBufferError:
        tables = make_tables(request.model, request.given)
        if not tables:
            raise
    return _noted(
        _captured_unchanged(request, method),
        f"one call of the model made {tables} for inputs of the example's size; the model keeps "
        "the result",
    )


def _captured_unchanged(request: CaptureRequest, method: str) -> Capture:
    """The capture; the model is restored, but keeps submodules that forward has added."""
    with unchanged(request.model):
        captured = find_capture(request, method)
        modules = request.model.modules()
        submodules = [(module._modules, dict(module._modules)) for module in modules]
    for own, named in submodules:
        # A forward may replace modules (BigBird does for short sequences); the graph names them.
        own.update(named)
    return captured


def modes_by_hand(model: nn.Module) -> Iterator[str]:
    """A note about modules whose mode was set by hand: `train` would give them another one."""
    modules = dict(model.named_modules())
    unlike = [path for path, module in modules.items() if module.training != model.training]
    with in_mode(model, model.training):
        other = [path for path in unlike if modules[path].training == model.training]
    outer = [path for path in other if path.rpartition(".")[0] not in other]
    if outer:
        shown = ", ".join(f"{path} ({type(modules[path]).__name__})" for path in outer[:3])
        more = f" and {len(outer) - 3} more" if len(outer) > 3 else ""
        modes = ("training", "evaluation")
        own, root = modes[::-1] if model.training else modes
        yield (
            f"{shown}{more} {'is' if len(outer) == 1 else 'are'} in {own} mode and the model in "
            f"{root} mode; the stages follow train() and eval() of the model, which reset it: to "
            "keep it, override train() in the class of the model"
        )


def _named(dynamic: Dynamic) -> Dimensions:
    """The free sizes that the user named."""
    names = (symbol for named in dynamic.values() for symbol in named.values())
    return Dimensions(dynamic, frozenset(names))


def find_dimensions(
    model: nn.Module,
    given: Arguments,
    batch_dim: DimensionOption = "auto",
    sequence_dim: DimensionOption = "auto",
) -> Dimensions:
    """The free sizes of batch and sequence, by the options of `capture`."""
    check_dimension("--batch-dim", batch_dim, given.tensors)
    check_dimension("--sequence-dim", sequence_dim, given.tensors)
    if batch_dim == "auto":
        batch, note = find_batch(model, given)
    else:
        batch, note = batch_of_option(batch_dim, given.tensors), ""
    dims = symbols(given.tensors, batch, sequence_dim)
    named_symbols = named_lengths(dims, sequence_dim)
    return Dimensions(dims, named_symbols, (note,) if note else ())


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """The input of a capture.

    model: the model
    given: the example arguments of forward
    dimensions: the free sizes
    may_fix: forward may fix free sizes, except the batch and those that the user named
    is_leaf: the rule for modules that are kept as one node
    check: compare the graph with the model on real numbers
    modes: the modes to capture, True for training
    """

    model: nn.Module
    given: Arguments
    dimensions: Dimensions
    may_fix: bool
    is_leaf: LeafRule
    check: bool
    modes: tuple[bool, ...]


def find_capture(request: CaptureRequest, method: str) -> Capture:
    """The capture by the first method that gives a graph; `method` is one of METHODS.

    Raises the tracer's CaptureError, which names the user's line, if none does.
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
            if way is _by_dynamo and not isinstance(first, PinnedSizeError):
                first = _both(first, error)
            continue
        if way is _by_dynamo:
            captured = _noted(captured, f"captured with Dynamo: {first.what}")
        return captured
    raise first


def _other_ways(error: CaptureError, method: str) -> list[Callable[[CaptureRequest], Capture]]:
    if not isinstance(error, (UnseenError, PinnedSizeError)):
        return []  # The tracer saw it, and no graph can hold it.
    if method == "tracer" or isinstance(error, RandomDecisionError):
        return [_by_leaves]
    if isinstance(error, (PinnedSizeError, ValuesError)):
        return [_by_leaves, _by_dynamo]  # to Dynamo, int() of a size is a size
    return [_by_dynamo, _by_leaves]


def _both(unseen: CaptureError, error: CaptureError) -> CaptureError:
    """The tracer's error, which has the user's line, followed by Dynamo's."""
    first_line = str(error).strip().split("\n")[0]
    return CaptureError(
        unseen.what, f"{unseen.cure}\nTorchDynamo cannot capture it either: {first_line}"
    )


def _by_leaves(request: CaptureRequest) -> Capture:
    return _captured(request, trace_forward, AutomaticLeaves(request.model, request.is_leaf))


def _by_dynamo(request: CaptureRequest) -> Capture:
    return _captured(replace(request, check=True), trace_dynamo, None)


def _captured(request: CaptureRequest, trace: Trace, automatic: AutomaticLeaves | None) -> Capture:
    """A capture by one method, with as many free sizes as possible."""
    model, given, dims = request.model, request.given, request.dimensions.dims
    is_leaf = automatic.is_leaf if automatic else request.is_leaf
    has_to_be_free = request.dimensions.named | {BATCH}
    notes: list[str] = []
    is_corrected = not request.may_fix
    while True:
        try:
            captured = merged_capture(model, given, dims, is_leaf, trace, request.modes)
            break
        except FailedTrace as failed:
            error = failed.error
            if ones := _free_ones(request, dims):
                # A dimension of one may be squeezed away, as that of a single category.
                for symbol in ones:
                    notes.append(f"{places(dims, symbol)} is fixed at 1, as in the example")
                    dims = without_symbol(dims, symbol)
                continue
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
                    # A size that the user did not name may be fixed.
                    notes.append(fixed(error, dims, error.symbol))
                    dims = without_symbol(dims, error.symbol)
                    continue
            if automatic is None or not automatic.keep(failed.paths, error):
                raise error from failed.__cause__
    if automatic:
        called = {str(node.target) for node in captured.graph.find_nodes(op="call_module")}
        notes += automatic.notes(called)
    _verify_torchs_own(captured)
    if request.check and not is_on_meta(model):
        notes += _refuse_one(captured, check_capture(captured, given.tensors))
    return _noted(captured, *notes)


def _free_ones(request: CaptureRequest, dims: Dynamic) -> list[str]:
    """The free sizes that may be fixed and are 1 in the example."""
    sizes = sizes_in(request.given.tensors, dims) if request.may_fix else {}
    has_to_be_free = request.dimensions.named | {BATCH}
    return [symbol for symbol, size in sizes.items() if size == 1 and symbol not in has_to_be_free]


def _refuse_one(captured: Capture, symbols: Sequence[str]) -> list[str]:
    """Adds guards against the size 1 of some symbols, and returns notes about them.

    A size of 1 broadcasts, and forwards compare with it where the result is the same either way:
    only real numbers show that a size of 1 takes another branch.
    """
    for symbol in symbols:
        if captured.sizes[symbol] == 1:
            raise CaptureError(
                f"forward takes another branch for a {symbol} size of 1, as in the example, than "
                "for larger sizes.",
                f"Give an example with a {symbol} size of 2 or more.",
            )
        add_size_guard(captured.graph, at_least_two(symbol))
    return [
        f"a {symbol} size of 1 takes another branch in forward; inputs of that size are refused "
        "at run time"
        for symbol in symbols
    ]


def _noted(captured: Capture, *notes: str) -> Capture:
    return replace(captured, notes=(*notes, *captured.notes))
