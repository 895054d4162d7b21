"""A model and example inputs -> the dimension of each input that counts samples, if there is one.

`find_batch` uses that samples are independent of each other. The model itself runs on all samples
of the example and on two parts of them: if its results on the parts are those on the whole, the
divided dimension counts samples. The loss of a part of the positions may be almost that of all
positions; so, for a model that returns only a loss, the last results of its modules count too.

`corrected` replaces a guess of the free sizes, which forward contradicted, by sizes that forward
leaves free. Forward runs once more with a free symbol for each dimension in question; torch's
ShapeEnv then knows which symbols became a number, and which became equal.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...runtime.rng import seed_torch
from .arguments import Arguments, plain_structure, tensors_in
from .check import MAX_PARAMETERS_WITH_GRADIENTS, finite_magnitude
from .fake_inputs import Dynamic, FakeWorld, PinnedSizeError
from .leaf_modules import FailedTrace, LeafRule
from .model_state import (
    Noise,
    in_mode,
    is_on_meta,
    silent,
    unchanged,
    without_cache,
    working_copies,
)
from .modes import TracedMode, trace_forward
from .sizes import (
    BATCH,
    SEQUENCE,
    Batch,
    enlarged,
    places,
    resized,
    sizes_in,
    usual_batch,
    without_symbol,
)

_DIMENSIONS_TRIED = 3
_WAYS_TRIED = 12
_LEAST_SAMPLES = 4  # Parts of one sample are special where forward squeezes.
_TOLERANCE = 1e-3
_HIDING = 1e-3  # Smaller parameters hide the layers before them.
_RESULTS_SEEN = 4
_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def find_batch(model: nn.Module, given: Arguments) -> tuple[Batch, str]:
    """The batch dimension of each input, and a note if it is not the usual one.

    If the model cannot be run, the answer is dimension 0 of every input, and the note says so.
    """
    usual = usual_batch(given.tensors)
    none: Batch = dict.fromkeys(given.tensors)
    if not any(tensor.dim() for tensor in given.tensors.values()):
        return none, ""
    # Every model of transformers has its batch first.
    is_known = getattr(model, "main_input_name", None) in given.tensors
    if is_known:
        return usual, ""
    if is_on_meta(model) or (runs := on_a_copy(model, given)) is None:
        return usual, _note(usual, "assumed, because the model cannot be run")
    inputs = _varied(given.tensors)
    if (whole := runs(inputs)) is None:
        inputs = given.tensors
        whole = runs(inputs)
    if whole is None:
        return usual, _note(usual, "assumed, because the model cannot be run in evaluation mode")
    ways = list(islice(_ways(inputs), _WAYS_TRIED))
    for way in (usual, *(way for way in ways if way != usual)):
        if _is_independent(runs, inputs, way, whole):
            return way, "" if way == usual else _note(way, _ALONE)
    if _covers(usual, inputs) and runs(_part(inputs, usual, 0)) is not None:
        # Losses may compare the samples of a batch, and random numbers differ between runs.
        return usual, ""
    return none, (
        "the model has no batch, and a micro-batch is one whole example: its results change if an "
        "input is divided; if a dimension counts samples, name it: --batch-dim INPUT=DIMENSION"
    )


_ALONE = "the model gives each part of it the same results as the whole"


def _note(batch: Batch, why: str) -> str:
    places = [f"dimension {dim} of {name}" for name, dim in batch.items() if dim is not None]
    without = [name for name, dim in batch.items() if dim is None]
    lacking = f" ({' and '.join(without)} without one)" if without else ""
    return (
        f"the batch is {' and '.join(places)}{lacking}: {why}; if it is another, name it: "
        "--batch-dim INPUT=DIMENSION"
    )


def _varied(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Inputs in which numbers that are all equal, such as zeros, are random: from equal samples one
    does not see that they influence each other."""
    generator = torch.Generator().manual_seed(0)
    varied = dict(inputs)
    for name, tensor in inputs.items():
        if tensor.numel() < 2 or tensor.is_meta or not (tensor == tensor.flatten()[0]).all():
            continue
        if tensor.dtype in _NUMBERS:
            varied[name] = torch.rand(tensor.shape, generator=generator).to(tensor)
        elif tensor.dtype in _WHOLE and tensor.dim() > 1:
            varied[name] = torch.randint(2, tensor.shape, generator=generator).to(tensor)
    return varied


Runs = Callable[[Mapping[str, Tensor]], list[Tensor] | None]


def on_a_copy(model: nn.Module, given: Arguments) -> Runs | None:
    """A function that runs a copy of the model in evaluation mode, and returns None if it raises.

    None for a model that cannot be copied. Copies keep forward's side effects away from the model.
    The copies of a large model share its parameters: they have other memory while forward runs, or
    get their values back if there are too many of them to copy.
    """
    parameters = list(model.parameters())
    is_small = sum(each.numel() for each in parameters) < MAX_PARAMETERS_WITH_GRADIENTS
    shared = {} if is_small else {id(parameter): parameter for parameter in parameters}
    device = next((tensor.device for tensor in (*parameters, *model.buffers())), None)
    try:
        base = copy.deepcopy(model, dict(shared))
    except Exception:
        return None
    if is_small:
        _fill_zeros(base)

    def runs(tensors: Mapping[str, Tensor]) -> list[Tensor] | None:
        own = {name: tensor.detach().clone().to(device) for name, tensor in tensors.items()}
        twin = copy.deepcopy(base, dict(shared))
        try:
            with ExitStack() as aside, in_mode(twin, False), without_cache(twin), silent():
                # Forward may warn of sizes that do not fit: here that is an answer.
                aside.enter_context(warnings.catch_warnings(action="ignore"))
                aside.enter_context(torch.compiler.set_stance("force_eager"))
                if shared:
                    aside.enter_context(working_copies(twin, Noise.NONE))
                    aside.enter_context(_Restored(twin.parameters()))
                aside.enter_context(unchanged(twin))
                seed_torch(0)
                inner = _record_results(twin)
                with torch.no_grad():
                    results = list(tensors_in(plain_structure(given.call(twin, own))))
                is_loss = all(result.numel() == 1 for result in results)
                return [*results, *inner] if is_loss else results
        except Exception:
            return None

    return runs


def _record_results(model: nn.Module) -> deque[Tensor]:
    """The last results of modules without submodules, once the model has run."""
    recorded: deque[Tensor] = deque(maxlen=_RESULTS_SEEN)
    for module in model.modules():
        if not list(module.children()) and not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_hook(
                lambda _, __, result: recorded.extend(tensors_in(plain_structure(result)))
            )
    return recorded


class _Restored(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the tensors whose memory operations change their values back at its end; copies only
    these, just before the first change."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        storages = (tensor.untyped_storage() for tensor in tensors)
        self._own = {storage._cdata: storage for storage in storages}
        self._before: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes_nothing = isinstance(func, HigherOrderOperator)
        arguments = () if changes_nothing else func._schema.arguments
        given = {each.name: value for each, value in zip(arguments, args, strict=False)}
        given |= kwargs or {}
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given.get(argument.name)):
                    self._keep(tensor.untyped_storage()._cdata if tensor is not None else 0)
        return func(*args, **(kwargs or {}))

    def _keep(self, number: int) -> None:
        if number in self._own and number not in self._before:
            self._before[number] = self._own[number].clone()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for number, before in self._before.items():
            self._own[number].copy_(before)


def _fill_zeros(model: nn.Module) -> None:
    """Gives parameters of zeros, or of almost zeros, random values: they hide all that they
    multiply, such as the blocks of a model with LayerScale."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            hides = parameter.dtype in _NUMBERS and finite_magnitude(parameter) < _HIDING
            if hides or not parameter.any():
                noise = torch.rand(parameter.shape, generator=generator) / 4
                parameter.copy_(noise)


def _ways(inputs: Mapping[str, Tensor]) -> Iterator[Batch]:
    """Candidates for the batch: dimensions of equal size in all inputs that have that size, those
    of size 1 last."""
    base = max(inputs, key=lambda name: min(inputs[name].dim(), 2))
    shape = inputs[base].shape[:_DIMENSIONS_TRIED]
    if inputs[base].dim() == 2 and inputs[base].is_floating_point():
        shape = shape[:1]  # Dimension 1 counts features.
    for dim, size in sorted(enumerate(shape), key=lambda item: item[1] == 1):
        options: list[list[int | None]] = []
        for name, tensor in inputs.items():
            equal = [at for at, other in enumerate(tensor.shape) if other == size]
            equal.sort(key=lambda at: at != dim)
            options.append([dim] if name == base else [*equal, None])
        for chosen in product(*options):
            yield dict(zip(inputs, chosen, strict=True))


def _covers(batch: Batch, inputs: Mapping[str, Tensor]) -> bool:
    """True if every input with a dimension has a batch, or broadcasts with one."""
    return all(
        batch[name] is not None or not tensor.dim() or tensor.shape[0] == 1
        for name, tensor in inputs.items()
    )


def _size(inputs: Mapping[str, Tensor], batch: Batch) -> int:
    return next((inputs[name].shape[dim] for name, dim in batch.items() if dim is not None), 0)


def _part(inputs: Mapping[str, Tensor], batch: Batch, number: int) -> dict[str, Tensor]:
    """The first or the last part of the samples."""
    size = _size(inputs, batch)
    start, end = (0, size // 2) if number == 0 else (size // 2, size)
    return {
        name: tensor if (dim := batch[name]) is None else tensor.narrow(dim, start, end - start)
        for name, tensor in inputs.items()
    }


def _unlike(inputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Inputs with samples that differ from each other: scaled numbers of floating point, and other
    values moved along the largest dimension."""
    unlike = dict(inputs)
    for name, dim in batch.items():
        if dim is None:
            continue
        samples = list(inputs[name].unbind(dim))
        for number, sample in enumerate(samples):
            if sample.dtype in _NUMBERS:
                samples[number] = sample * (1 + number / len(samples))
            elif sample.dtype in (*_WHOLE, torch.bool) and sample.dim():
                along = max(range(sample.dim()), key=lambda dim: sample.shape[dim])
                samples[number] = sample.roll(number, along)
        unlike[name] = torch.stack(samples, dim)
    return unlike


def _is_independent(
    runs: Runs, inputs: Mapping[str, Tensor], batch: Batch, whole: list[Tensor]
) -> bool:
    """True if the results on two parts of the samples are those on the whole."""
    if not (size := _size(inputs, batch)):
        return False
    if size < _LEAST_SAMPLES:
        dims = {name: {} if dim is None else {dim: BATCH} for name, dim in batch.items()}
        repeated = resized(inputs, dims, {BATCH: _LEAST_SAMPLES})
        inputs, size = _unlike(repeated, batch), _LEAST_SAMPLES
        if (enlarged := runs(inputs)) is None:
            inputs, enlarged = repeated, runs(repeated)
        if enlarged is None:
            return False
        whole = enlarged
    firsts, seconds = (runs(_part(inputs, batch, number)) for number in (0, 1))
    if firsts is None or seconds is None or not len(whole) == len(firsts) == len(seconds):
        return False
    first = size // 2
    by_sample: list[bool] = []
    others: list[bool] = []
    for all_, first_part, second_part in zip(whole, firsts, seconds, strict=True):
        if first_part.dim() != all_.dim() or second_part.dim() != all_.dim():
            return False
        longer = [dim for dim in range(all_.dim()) if all_.shape[dim] != second_part.shape[dim]]
        if longer:
            by_sample.append(
                any(_close(all_, join) for join in _joined(all_, first_part, second_part, longer))
            )
        elif first_part.shape == all_.shape:
            one, other = _exact(first_part), _exact(second_part)
            mean = (one * first + other * (size - first)) / size
            # Only a loss is a mean over samples: a mean over positions is not.
            is_loss = all_.numel() == 1 and (_close(all_, mean) or _close(all_, one + other))
            if is_loss or not (_close(all_, one) and _close(all_, other)):
                others.append(is_loss)
        else:
            return False
    # With ignored labels a loss is not a mean over samples: results by sample are decisive.
    return all(by_sample) if by_sample else bool(others) and all(others)


def _joined(all_: Tensor, first: Tensor, second: Tensor, dims: list[int]) -> Iterator[Tensor]:
    """Possible joins of the results of two parts: concatenated along a dimension, or interleaved,
    as if several dimensions were flattened with the batch last."""
    if len(dims) > 1:
        return
    (dim,) = dims
    if first.shape[dim] + second.shape[dim] != all_.shape[dim]:
        return
    yield torch.cat([first, second], dim)
    for often in range(2, min(first.shape[dim], second.shape[dim]) + 1):
        if first.shape[dim] % often == 0 and second.shape[dim] % often == 0:
            apart = [_apart(part, dim, often) for part in (first, second)]
            yield torch.cat(apart, dim + 1).flatten(dim, dim + 1)


def _apart(tensor: Tensor, dim: int, often: int) -> Tensor:
    """The tensor with a dimension split in two; the first has `often` entries."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], often, shape[dim] // often, *shape[dim + 1 :])


def _close(expected: Tensor, actual: Tensor) -> bool:
    if expected.shape != actual.shape:
        return False
    if expected.dtype == torch.bool:
        return torch.equal(expected, actual.to(torch.bool))
    expected, actual = _exact(expected), _exact(actual)
    atol = _TOLERANCE * finite_magnitude(expected)
    return torch.allclose(expected, actual, rtol=_TOLERANCE, atol=atol, equal_nan=True)


def _exact(value: Tensor) -> Tensor:
    value = value.dequantize() if value.is_quantized else value.to_dense()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def corrected(
    model: nn.Module,
    given: Arguments,
    dims: Dynamic,
    is_leaf: LeafRule,
    has_to_be_free: Collection[str],
) -> tuple[Dynamic, list[str]]:
    """The free sizes that forward allows, with a note for each that differs from the guess.

    A dimension of the same size as a free one becomes free too if forward requires the two to be
    equal. A size in `has_to_be_free` that forward fixes is left to the caller.
    """
    apart = _with_more(given, dims)
    world = FakeWorld(model)
    pins = world.env.pins = {}
    large = replace(given, tensors=enlarged(given.tensors, apart))
    try:
        trace_forward(model, world, large, apart, is_leaf, TracedMode(training=True))
    except FailedTrace:
        pass  # The part before the failure is enough.
    known = {name: world.env.replace(size.node.expr) for name, size in world.symbols.items()}
    result: dict[str, dict[int, str]] = {name: dict(named) for name, named in dims.items()}
    notes: list[str] = []
    for symbol in dict.fromkeys(symbol for named in dims.values() for symbol in named.values()):
        where = places(result, symbol)
        if not where or symbol not in known:
            continue  # It was replaced by an equal symbol, or the trace failed before its inputs.
        equal = {other for other, size in known.items() if size == known[symbol]}
        if known[symbol].is_Symbol:
            for name, named in apart.items():
                for dim, other in named.items():
                    if other in equal and result[name].get(dim) != symbol:
                        result[name][dim] = symbol
                        notes.append(f"dimension {dim} of {name} equals {where}{_why(pins, equal)}")
        elif symbol not in has_to_be_free:
            error = next((pins[other] for other in (symbol, *sorted(equal)) if other in pins), None)
            notes += [fixed(error, result, symbol)] if error else []
            result = without_symbol(result, symbol)
    return result, notes


def fixed(error: PinnedSizeError, dims: Dynamic, symbol: str) -> str:
    """The note for a size that forward allows at one value only, and that is fixed there."""
    size = f"the {symbol} size" if symbol.endswith(SEQUENCE) else places(dims, symbol)
    return f"{size} is fixed: {error.where.rstrip(',')} works for {error.value} only"


def with_places(error: PinnedSizeError, dims: Dynamic) -> PinnedSizeError:
    """The error with the dimensions that it is about, and the options that choose others."""
    where = places(dims, error.symbol)
    if not where:
        return error
    name = next(name for name, named in dims.items() if error.symbol in named.values())
    flag = "--batch-dim" if error.symbol == BATCH else "--sequence-dim"
    return PinnedSizeError(
        error.symbol,
        error.where,
        error.value,
        f"If it is another dimension, name it: {flag} {name}=DIMENSION, or {flag} {name}=none. "
        f"Otherwise: {error.cure}",
        f" It is {where}.",
    )


def _with_more(given: Arguments, dims: Dynamic) -> dict[str, dict[int, str]]:
    """The free dimensions, and all others of the same sizes with symbols of their own."""
    sizes = set(sizes_in(given.tensors, dims).values()) - {1}
    return {
        name: {
            dim: dims.get(name, {}).get(dim) or f"{name}_{dim}"
            for dim, size in enumerate(tensor.shape)
            if dim in dims.get(name, {}) or size in sizes
        }
        for name, tensor in given.tensors.items()
    }


def _why(pins: Mapping[str, PinnedSizeError], symbols: Collection[str]) -> str:
    """The line that made these sizes equal, or a number."""
    pin = next((pins[symbol] for symbol in sorted(symbols) if symbol in pins), None)
    return f": {pin.where.rstrip(',')} needs that" if pin else ""
