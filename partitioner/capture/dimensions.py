"""Which dimensions of the inputs count samples and tokens -> the symbols of their sizes.

What the user says comes first, then what `batch.py` finds out; the rest is a guess that forward
may correct: a size that it holds at one value becomes a number, two that it asks to be equal
become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from ...runtime.errors import CaptureError
from ...runtime.wording import did_you_mean
from .fakes import Dynamic
from .samples import BATCH

Said: TypeAlias = Literal["auto"] | int | None | Mapping[str, int | None]
"""A dimension of all inputs, of those named, or of none; "auto" where nothing is said."""
Batch: TypeAlias = Mapping[str, int | None]
"""The dimension of each input that counts samples; None for an input that has none."""
SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The symbols of the free dimensions by input; forward has to leave those in `asked` free."""

    dims: Dynamic
    asked: frozenset[str]
    notes: tuple[str, ...] = ()


def check_said(flag: str, said: Said, inputs: Mapping[str, Tensor]) -> None:
    """Raises CaptureError for an input or a dimension that is not there."""
    if said is None or said == "auto":
        return
    given = dict.fromkeys(inputs, said) if isinstance(said, int) else said
    if not isinstance(given, Mapping):
        raise CaptureError(
            f"{flag} {given!r} is not a dimension.",
            f"Give a number, none, or a number by input, such as {flag} {next(iter(inputs))}=1.",
        )
    for name, dim in given.items():
        if name not in inputs:
            raise CaptureError(
                f"{flag} {name}={_text(dim)}, but the model was given {', '.join(inputs)}.",
                did_you_mean(name, inputs, f"Name one of them: {flag} {next(iter(inputs))}=0"),
            )
    if isinstance(said, int) and all(_has(tensor, said) is False for tensor in inputs.values()):
        raise CaptureError(
            f"{flag} {said}, but no input has a dimension {said}: "
            f"{', '.join(f'{name} {list(each.shape)}' for name, each in inputs.items())}.",
            "Count dimensions from 0.",
        )
    for name, dim in {} if isinstance(said, int) else given.items():
        if dim is not None and not _has(inputs[name], dim):
            raise CaptureError(
                f"{flag} {name}={dim}, but {name} has {inputs[name].dim()} dimensions "
                f"({list(inputs[name].shape)}).",
                f"Count from 0, or write {flag} {name}=none.",
            )


def _text(dim: int | None) -> str:
    return "none" if dim is None else str(dim)


def write_said(said: Said) -> list[str]:
    """The values of an option of the command line.

    >>> write_said("auto"), write_said(None), write_said({"x": 1, "edges": None})
    ([], ['none'], ['x=1', 'edges=none'])
    """
    if said == "auto":
        return []
    if isinstance(said, Mapping):
        return [f"{name}={_text(dim)}" for name, dim in said.items()]
    return [_text(said)]


def read_said(flag: str, texts: Sequence[str]) -> Said:
    """What an option says; raises CaptureError for anything but a number, none or INPUT=DIMENSION.

    >>> read_said("--batch-dim", []), read_said("--batch-dim", ["x=1", "edges=none"])
    ('auto', {'x': 1, 'edges': None})
    """
    if not texts:
        return "auto"
    found: dict[str, int | None] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if value != "none" and not (value.isascii() and value.isdecimal()):
            raise CaptureError(
                f"{flag} {text} is not a dimension.",
                f"Give a number, none, or either by input: {flag} {name or 'INPUT'}=1.",
            )
        found[name] = None if value == "none" else int(value)
    if "" in found and len(texts) > 1:
        raise CaptureError(
            f"{flag} is said of all inputs and of single ones ({', '.join(texts)}).",
            f"Give it once, or by input: {flag} INPUT={_text(found[''])}.",
        )
    return found[""] if "" in found else found


def _has(tensor: Tensor, dim: object) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < tensor.dim()


def said_batch(said: Said, inputs: Mapping[str, Tensor]) -> Batch:
    """The batch dimension of every input, where the user names some: the others have it where
    their size is equal, the first dimension first.

    Raises CaptureError where the dimensions that are named differ in size.
    """
    if said is None or said == "auto":
        return dict.fromkeys(inputs)
    if isinstance(said, int):
        given = {name: said for name, tensor in inputs.items() if _has(tensor, said)}
        size = inputs[next(iter(given))].shape[said]
        named: Batch = {name: dim for name, dim in given.items() if inputs[name].shape[dim] == size}
    else:
        named = said
    places = [(name, dim) for name, dim in named.items() if dim is not None]
    sizes = {inputs[name].shape[dim] for name, dim in places}
    if len(sizes) > 1:
        told = " and ".join(f"{inputs[name].shape[dim]} of {name}={dim}" for name, dim in places)
        raise CaptureError(
            f"--batch-dim names dimensions of different sizes: {told}.",
            "All inputs have one batch size: give inputs that do, or name other dimensions.",
        )
    if not sizes:
        return {**usual_batch({n: t for n, t in inputs.items() if n not in named}), **named}
    found: dict[str, int | None] = {}
    for name, tensor in inputs.items():
        equal = [dim for dim, size in enumerate(tensor.shape) if size in sizes]
        found[name] = named[name] if name in named else equal[0] if equal else None
    return found


def usual_batch(inputs: Mapping[str, Tensor]) -> Batch:
    """Dimension 0 of every input of the first one's size; a size of 1 beside others broadcasts.

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
    inputs: Mapping[str, Tensor], batch: Batch, sequence: Said
) -> dict[str, dict[int, str]]:
    """The free dimensions with the names of their sizes.

    `batch` is the dimension that counts samples. `sequence` is, by default, the other dimension of
    two-dimensional tensors of integers, and dimension 0 where the samples are counted by another;
    a tensor of another length has a symbol of its own. An input without samples has free rows, and
    if it has integers in two dimensions free columns; one row beside samples broadcasts.

    >>> import torch
    >>> inputs = {"ids": torch.ones(4, 11, dtype=torch.long), "edges": torch.ones(3, 8).long()}
    >>> symbols(inputs, {"ids": 0, "edges": None}, "auto")
    {'ids': {0: 'batch', 1: 'sequence'}, 'edges': {0: 'edges_rows', 1: 'edges_columns'}}
    """
    found: dict[str, dict[int, str]] = {}
    lengths: dict[int, str] = {}
    has_batch = any(dim is not None for dim in batch.values())
    for name, tensor in inputs.items():
        own = batch.get(name)
        found[name] = {} if own is None else {own: BATCH}
        broadcasts = own is None and has_batch and tensor.dim() > 0 and tensor.shape[0] == 1
        for dim in _sequence_dims(name, tensor, 0 if broadcasts else own, sequence):
            symbol = f"{name}_{SEQUENCE}" if lengths else SEQUENCE
            found[name][dim] = lengths.setdefault(tensor.shape[dim], symbol)
        if own is None and not broadcasts:
            for dim, kind in enumerate(("rows", "columns")[: 1 + _is_ids(tensor)]):
                # A size of 1 broadcasts.
                if dim < tensor.dim() and tensor.shape[dim] > 1:
                    found[name].setdefault(dim, f"{name}_{kind}")
    return found


def _is_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex()


def _sequence_dims(name: str, tensor: Tensor, batch: int | None, said: Said) -> Iterator[int]:
    if said is None:
        return
    given = dict.fromkeys((name,), said) if isinstance(said, int) else said
    if isinstance(given, Mapping) and name in given:
        dim = given[name]
        if dim is not None and _has(tensor, dim) and dim != batch:
            yield dim
    elif isinstance(said, int) or batch is None:
        return
    elif _is_ids(tensor):
        yield 1 - batch
    elif batch > 0 and tensor.shape[0] > 1:
        yield 0


def asked_lengths(dims: Dynamic, said: Said) -> frozenset[str]:
    """The symbols of the dimensions that the user has named as those of sequences."""
    given = dict.fromkeys(dims, said) if isinstance(said, int) else said
    if not isinstance(given, Mapping):
        return frozenset()
    named = ((dims[name], dim) for name, dim in given.items() if dim is not None)
    return frozenset(own[dim] for own, dim in named if dim in own) - {BATCH}


def without_symbol(dims: Dynamic, symbol: str) -> dict[str, dict[int, str]]:
    return {
        name: {dim: other for dim, other in named.items() if other != symbol}
        for name, named in dims.items()
    }


def places(dims: Dynamic, symbol: str) -> str:
    """Where a size is, in words: `dimension 0 of x and of y`."""
    by_dim: dict[int, list[str]] = {}
    for name, named in dims.items():
        for dim, each in named.items():
            if each == symbol:
                by_dim.setdefault(dim, []).append(f"of {name}")
    return ", ".join(f"dimension {dim} {' and '.join(names)}" for dim, names in by_dim.items())
