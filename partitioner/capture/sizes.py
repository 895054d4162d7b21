"""The free sizes of the inputs: their symbols, and inputs of other sizes.

`symbols` names the free dimensions. Those that the user names come first, then the batch that
`batch_dimension.py` finds; the others are a guess that forward may correct: a size that it fixes
becomes a number, two sizes that it requires to be equal become one symbol.

`first_accepted` finds inputs of other sizes that a model accepts, made of the example's own values.
A model may need an end of sentence, sorted offsets, or matching lengths. Therefore a dimension is
shortened or stretched in order, with its first and last entry in place, and inputs that the model
itself refuses are not used to test its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ...runtime.errors import CaptureError, GpuStoppedError
from ...runtime.formatting import did_you_mean
from ...runtime.plan.plan import TensorSpec
from .fake_inputs import Dynamic

Attempted = TypeVar("Attempted")
Tensors = dict[str, Tensor]

BATCH = "batch"
"""The symbol of the dimension that counts samples."""


class Sample(NamedTuple, Generic[Attempted]):
    """Inputs of other sizes, and the model's result.

    sizes: the sizes by symbol
    inputs: the inputs by name
    result: the result of the attempt
    """

    sizes: dict[str, int]
    inputs: Tensors
    result: Attempted


def resized(
    inputs: Mapping[str, Tensor], dims: Dynamic, sizes: Mapping[str, int], *, shuffled: bool = False
) -> Tensors:
    """Inputs of other sizes, with the values of the given ones.

    `shuffled` moves the last sample of the batch to the front.

    >>> resized({"x": torch.tensor([1, 5, 5, 9])}, {"x": {0: "n"}}, {"n": 3})["x"].tolist()
    [1, 5, 9]
    """
    result = dict(inputs)
    for name, named in dims.items():
        if name not in inputs:
            continue
        tensor = inputs[name]
        for dim, symbol in named.items():
            length, wanted = tensor.shape[dim], sizes[symbol]
            if length != wanted:
                positions = torch.arange(wanted, device=tensor.device)
                index = positions * (length - 1) // max(wanted - 1, 1)
                tensor = tensor.index_select(dim, index)
            if shuffled and symbol == BATCH:
                tensor = tensor.roll(1, dim)
        result[name] = tensor
    return result


def smaller_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Small sizes that differ from the given ones and from each other.

    >>> smaller_sizes({"batch": 4, "sequence": 128})
    {'batch': 3, 'sequence': 17}
    """
    others: dict[str, int] = {}
    for number, (name, size) in enumerate(sizes.items()):
        others[name] = min(size - 1, 3 + 14 * number) if size > 2 else 3
    return others


def nearby_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that are smaller by one, or larger by one if that would be 1.

    >>> nearby_sizes({"batch": 2, "sequence": 128})
    {'batch': 3, 'sequence': 127}
    """
    return {name: size - 1 if size > 2 else size + 1 for name, size in sizes.items()}


def larger_sizes(sizes: Mapping[str, int], *, all_of_them: bool) -> list[dict[str, int]]:
    """Sizes well above the given ones: of all symbols, then of the batch only.

    >>> larger_sizes({"batch": 4, "sequence": 128}, all_of_them=True)
    [{'batch': 9, 'sequence': 257}, {'batch': 9, 'sequence': 17}]
    """
    larger = {name: 2 * size + 1 for name, size in sizes.items()}
    small = smaller_sizes(sizes)
    of_batch = [{**small, BATCH: larger[BATCH]}] if BATCH in sizes else []
    return [*([larger] if all_of_them and sizes else []), *of_batch]


def dynamic_of(inputs: Sequence[TensorSpec]) -> Dynamic:
    """The symbol of each free dimension of a plan's or a capture's inputs."""
    return {
        spec.name: {dim: size for dim, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in inputs
    }


def refused_by_model(
    model: nn.Module, sizes: Mapping[str, int], error: Exception
) -> tuple[str, str]:
    """Error and cure for a model that fails on its own example."""
    if isinstance(error, GpuStoppedError):
        return error.what, error.cure
    message = str(error).strip().split("\n")[0]
    return (
        f"{type(model).__name__} itself raises {type(error).__name__} on its example inputs"
        f"{sizes_text(sizes, ' at ')}: {message}",
        "Give example inputs on which forward and backward run, in training and in evaluation.",
    )


def sizes_text(sizes: Mapping[str, int], before: str = "") -> str:
    """Sizes in words, such as ` at batch 3, sequence 17`; empty if no size is free."""
    words = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return before + words if words else ""


def first_accepted(
    attempt: Callable[[Tensors], Attempted],
    inputs: Mapping[str, Tensor],
    dims: Dynamic,
    captured: Mapping[str, int],
    choices: Sequence[Mapping[str, int]],
) -> Sample[Attempted]:
    """Inputs of other sizes than `captured` that `attempt` accepts without an exception.

    They have the first of `choices` that is accepted. If none is, the sizes are changed one at a
    time, the batch first, as far as accepted; if no change is, they have the captured sizes.
    Raises the exception of `attempt` on the captured sizes.
    """
    for sizes in choices:
        if (sample := accepted(attempt, inputs, dims, sizes)) is not None:
            return sample
    current: Sample[Attempted] | None = None
    sizes = dict(captured)
    for symbol in sorted(captured, key=lambda name: name != BATCH):
        for choice in choices if len(captured) > 1 else ():
            changed = {**sizes, symbol: choice[symbol]}
            if (sample := accepted(attempt, inputs, dims, changed)) is not None:
                current, sizes = sample, changed
                break
    if current is None:
        own = resized(inputs, dims, captured)
        current = Sample(dict(captured), own, attempt(own))
    return current


def accepted(
    attempt: Callable[[Tensors], Attempted],
    inputs: Mapping[str, Tensor],
    dims: Dynamic,
    sizes: Mapping[str, int],
) -> Sample[Attempted] | None:
    """The inputs of these sizes, if `attempt` accepts them without an exception.

    On a GPU only the batch may be larger than that of `inputs`: an index beyond a table, such as
    that of a position, stops all later work of the process there. Raises GpuStoppedError if one
    does.
    """
    if any(
        inputs[name].is_cuda and symbol != BATCH and sizes[symbol] > inputs[name].shape[dim]
        for name, named in dims.items()
        if name in inputs
        for dim, symbol in named.items()
    ):
        return None
    for tensors in _orders(inputs, dims, sizes):
        try:
            return Sample(dict(sizes), tensors, attempt(tensors))
        except torch.AcceleratorError as error:
            raise GpuStoppedError(error, sizes_text(sizes, " at ")) from error
        except Exception:  # The model has rules for its inputs: try others.
            continue
    return None


def _orders(
    inputs: Mapping[str, Tensor], dims: Dynamic, sizes: Mapping[str, int]
) -> Iterator[Tensors]:
    """The samples in another order, then in their own: lengths may have to be sorted."""
    if any(BATCH in named.values() for named in dims.values()):
        yield resized(inputs, dims, sizes, shuffled=True)
    yield resized(inputs, dims, sizes)


DimensionOption: TypeAlias = Literal["auto"] | int | None | Mapping[str, int | None]
"""An option: a dimension of all inputs, of the named ones, of none (None), or "auto"."""
Batch: TypeAlias = Mapping[str, int | None]
"""The dimension of each input that counts samples; None for an input without one."""
SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The free dimensions of the inputs.

    dims: the symbols of the free dimensions by input and dimension
    named: the symbols that the user named, and that forward must not fix
    notes: remarks for the user
    """

    dims: Dynamic
    named: frozenset[str]
    notes: tuple[str, ...] = ()


def check_dimension(flag: str, choice: DimensionOption, inputs: Mapping[str, Tensor]) -> None:
    """Raises CaptureError for an unknown input or dimension."""
    if choice is None or choice == "auto":
        return
    given = dict.fromkeys(inputs, choice) if isinstance(choice, int) else choice
    if not isinstance(given, Mapping):
        raise CaptureError(
            f"{flag} {given!r} is not a dimension.",
            f"Give a number, none, or a number by input, such as {flag} {next(iter(inputs))}=1.",
        )
    for name, dim in given.items():
        if name not in inputs:
            raise CaptureError(
                f"{flag} {name}={_text(dim)}, but the inputs are {', '.join(inputs)}.",
                did_you_mean(name, inputs, f"Name one of them: {flag} {next(iter(inputs))}=0"),
            )
    if isinstance(choice, int) and all(_has(tensor, choice) is False for tensor in inputs.values()):
        raise CaptureError(
            f"{flag} {choice}, but no input has a dimension {choice}: "
            f"{', '.join(f'{name} {list(each.shape)}' for name, each in inputs.items())}.",
            "Count dimensions from 0.",
        )
    for name, dim in {} if isinstance(choice, int) else given.items():
        if dim is not None and not _has(inputs[name], dim):
            raise CaptureError(
                f"{flag} {name}={dim}, but {name} has {inputs[name].dim()} dimensions "
                f"({list(inputs[name].shape)}).",
                f"Count from 0, or write {flag} {name}=none.",
            )


def _text(dim: int | None) -> str:
    return "none" if dim is None else str(dim)


def format_dimension(choice: DimensionOption) -> list[str]:
    """The values of an option of the command line.

    >>> format_dimension("auto"), format_dimension(None), format_dimension({"x": 1, "edges": None})
    ([], ['none'], ['x=1', 'edges=none'])
    """
    if choice == "auto":
        return []
    if isinstance(choice, Mapping):
        return [f"{name}={_text(dim)}" for name, dim in choice.items()]
    return [_text(choice)]


def parse_dimension(flag: str, texts: Sequence[str]) -> DimensionOption:
    """Parses an option; raises CaptureError unless it is a number, none or INPUT=DIMENSION.

    >>> parse_dimension("--batch-dim", []), parse_dimension("--batch-dim", ["x=1", "edges=none"])
    ('auto', {'x': 1, 'edges': None})
    """
    if not texts:
        return "auto"
    by_input: dict[str, int | None] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if value != "none" and not (value.isascii() and value.isdecimal()):
            raise CaptureError(
                f"{flag} {text} is not a dimension.",
                f"Give a number, none, or either by input: {flag} {name or 'INPUT'}=1.",
            )
        by_input[name] = None if value == "none" else int(value)
    if "" in by_input and len(texts) > 1:
        raise CaptureError(
            f"{flag} is given both for all inputs and for single ones ({', '.join(texts)}).",
            f"Give it once, or by input: {flag} INPUT={_text(by_input[''])}.",
        )
    return by_input[""] if "" in by_input else by_input


def _has(tensor: Tensor, dim: object) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < tensor.dim()


def batch_of_option(choice: DimensionOption, inputs: Mapping[str, Tensor]) -> Batch:
    """The batch dimension of every input, given those that the user names.

    Other inputs have it at their first dimension of equal size. Raises CaptureError if the named
    dimensions differ in size.
    """
    if choice is None or choice == "auto":
        return dict.fromkeys(inputs)
    if isinstance(choice, int):
        given = {name: choice for name, tensor in inputs.items() if _has(tensor, choice)}
        size = inputs[next(iter(given))].shape[choice]
        named: Batch = {name: dim for name, dim in given.items() if inputs[name].shape[dim] == size}
    else:
        named = choice
    places = [(name, dim) for name, dim in named.items() if dim is not None]
    sizes = {inputs[name].shape[dim] for name, dim in places}
    if len(sizes) > 1:
        named_sizes = (f"{inputs[name].shape[dim]} of {name}={dim}" for name, dim in places)
        raise CaptureError(
            f"--batch-dim names dimensions of different sizes: {' and '.join(named_sizes)}.",
            "All inputs need the same batch size: give such inputs, or name other dimensions.",
        )
    if not sizes:
        return {**usual_batch({n: t for n, t in inputs.items() if n not in named}), **named}
    batch: dict[str, int | None] = {}
    for name, tensor in inputs.items():
        equal = [dim for dim, size in enumerate(tensor.shape) if size in sizes]
        batch[name] = named[name] if name in named else equal[0] if equal else None
    return batch


def usual_batch(inputs: Mapping[str, Tensor]) -> Batch:
    """Dimension 0 of every input with the first input's size there; size 1 broadcasts to others.

    >>> import torch
    >>> usual_batch({"x": torch.ones(4, 7), "place": torch.ones(1, 7), "edges": torch.ones(2, 9)})
    {'x': 0, 'place': None, 'edges': None}
    """
    first = [value.shape[0] for value in inputs.values() if value.dim()]
    size = next((size for size in first if size > 1), 1)
    return {
        name: 0 if value.dim() and value.shape[0] == size else None
        for name, value in inputs.items()
    }


def symbols(
    inputs: Mapping[str, Tensor], batch: Batch, sequence: DimensionOption
) -> dict[str, dict[int, str]]:
    """The free dimensions with the symbols of their sizes.

    `batch` is the dimension that counts samples. `sequence` is, by default, the other dimension of
    two-dimensional tensors of integers, and dimension 0 if another one counts samples;
    a tensor of another length gets its own symbol. An input without samples has free rows, and
    free columns if it is a two-dimensional tensor of integers; a single row broadcasts.

    >>> import torch
    >>> inputs = {"ids": torch.ones(4, 11, dtype=torch.long), "edges": torch.ones(3, 8).long()}
    >>> symbols(inputs, {"ids": 0, "edges": None}, "auto")
    {'ids': {0: 'batch', 1: 'sequence'}, 'edges': {0: 'edges_rows', 1: 'edges_columns'}}
    """
    of_inputs: dict[str, dict[int, str]] = {}
    lengths: dict[int, str] = {}
    has_batch = any(dim is not None for dim in batch.values())
    for name, tensor in inputs.items():
        own = batch.get(name)
        of_inputs[name] = {} if own is None else {own: BATCH}
        broadcasts = own is None and has_batch and tensor.dim() > 0 and tensor.shape[0] == 1
        for dim in _sequence_dims(name, tensor, 0 if broadcasts else own, sequence):
            symbol = f"{name}_{SEQUENCE}" if lengths else SEQUENCE
            of_inputs[name][dim] = lengths.setdefault(tensor.shape[dim], symbol)
        if own is None and not broadcasts:
            for dim, kind in enumerate(("rows", "columns")[: 1 + _is_ids(tensor)]):
                # A size of 1 broadcasts.
                if dim < tensor.dim() and tensor.shape[dim] > 1:
                    of_inputs[name].setdefault(dim, f"{name}_{kind}")
    return of_inputs


def _is_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex()


def _sequence_dims(
    name: str, tensor: Tensor, batch: int | None, choice: DimensionOption
) -> Iterator[int]:
    if choice is None:
        return
    given = dict.fromkeys((name,), choice) if isinstance(choice, int) else choice
    if isinstance(given, Mapping) and name in given:
        dim = given[name]
        if dim is not None and _has(tensor, dim) and dim != batch:
            yield dim
    elif isinstance(choice, int) or batch is None:
        return
    elif _is_ids(tensor):
        yield 1 - batch
    elif batch > 0 and tensor.shape[0] > 1:
        yield 0


def named_lengths(dims: Dynamic, choice: DimensionOption) -> frozenset[str]:
    """The symbols of the dimensions that the user named with `--sequence-dim`."""
    given = dict.fromkeys(dims, choice) if isinstance(choice, int) else choice
    if not isinstance(given, Mapping):
        return frozenset()
    named = ((dims[name], dim) for name, dim in given.items() if dim is not None)
    return frozenset(own[dim] for own, dim in named if dim in own) - {BATCH}


def without_symbol(dims: Dynamic, symbol: str) -> dict[str, dict[int, str]]:
    """The free dimensions without those of one symbol, which become fixed."""
    return {
        name: {dim: other for dim, other in named.items() if other != symbol}
        for name, named in dims.items()
    }


def places(dims: Dynamic, symbol: str) -> str:
    """The dimensions of a size in words, such as `dimension 0 of x and of y`."""
    by_dim: dict[int, list[str]] = {}
    for name, named in dims.items():
        for dim, own in named.items():
            if own == symbol:
                by_dim.setdefault(dim, []).append(f"of {name}")
    return ", ".join(f"dimension {dim} {' and '.join(names)}" for dim, names in by_dim.items())


def sizes_in(inputs: Mapping[str, Tensor], dims: Dynamic) -> dict[str, int]:
    """The numbers that the symbols stand for in these inputs."""
    return {
        symbol: inputs[name].shape[dim]
        for name, named in dims.items()
        if name in inputs
        for dim, symbol in named.items()
    }


def enlarged(inputs: Mapping[str, Tensor], dims: Dynamic) -> dict[str, Tensor]:
    """The inputs with free sizes of 1 enlarged to 2, because a size of 1 broadcasts."""
    sizes = {symbol: max(size, 2) for symbol, size in sizes_in(inputs, dims).items()}
    return resized(inputs, dims, sizes)
