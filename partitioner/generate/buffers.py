"""A tensor that is in no state_dict -> an expression that makes it again, if a simple one does.

Values that no expression here makes are carried beside the weights, under their names in the
original (`extra_tensors`), and the code holds an empty buffer of their shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..capture import Capture
from ..split import StageGraph, used_names
from .layout import Code, call, prefixed

_SMALL = 16
_LONGEST = 64


def rebuild(tensor: Tensor) -> Code | None:
    """An expression whose value is bit for bit that of the tensor, or None.

    >>> print(rebuild(torch.arange(4)[None]))
    torch.arange(4).unsqueeze(0)
    """
    if tensor.device.type == "meta":
        return None
    value = tensor.detach().cpu()
    for code, made in _guesses(value):
        if len(code.flat) > _LONGEST:
            continue
        if made.dtype == value.dtype and made.shape == value.shape and torch.equal(made, value):
            return code
    return None


def empty(shape: tuple[Code, ...], dtype: torch.dtype) -> Code:
    """`torch.empty(...)` of a shape."""
    sizes = shape or (Code("()"),)
    return call("torch.empty", (*sizes, *_dtype(dtype)))


def _dtype(dtype: torch.dtype) -> tuple[Code, ...]:
    return () if dtype == torch.float32 else (Code(f"dtype={dtype}"),)


def _guesses(value: Tensor) -> Iterator[tuple[Code, Tensor]]:
    sizes = tuple(Code(str(size)) for size in value.shape) or (Code("()"),)
    if value.numel() == 0:
        return
    first = value.flatten()[0]
    if bool((value == first).all()):
        number = first.item()
        if number in (0, 1):
            name = "ones" if number else "zeros"
            yield call(f"torch.{name}", (*sizes, *_dtype(value.dtype))), value
        elif value.dim() == 0:
            made = torch.tensor(number, dtype=value.dtype)
            yield call("torch.tensor", (_literal(value), *_dtype_of_literal(value))), made
    width = value.shape[-1] if value.dim() else 0
    if value.dim() == 1:
        yield call("torch.arange", (sizes[0], *_arange_dtype(value))), _arange(width, value)
        yield from _frequencies(value)
    if value.dim() == 2 and value.shape[0] == 1:
        made = _arange(width, value).unsqueeze(0)
        inner = call("torch.arange", (sizes[1], *_arange_dtype(value)))
        yield Code(f"{inner}.unsqueeze(0)"), made
    if value.dim() >= 2 and value.shape[-2] == width and value.numel() == width * width:
        square = torch.ones(width, width, dtype=value.dtype).tril().view(value.shape)
        inner = call("torch.ones", (sizes[-1], sizes[-1], *_dtype(value.dtype)))
        text = f"{inner}.tril()"
        if value.dim() > 2:
            text += f".view({', '.join(map(str, sizes))})"
        yield Code(text), square
    if 0 < value.numel() <= _SMALL:
        yield call("torch.tensor", (_literal(value), *_dtype_of_literal(value))), value


def _arange(length: int, like: Tensor) -> Tensor:
    return torch.arange(length).to(like.dtype)


def _arange_dtype(value: Tensor) -> tuple[Code, ...]:
    return () if value.dtype == torch.int64 else (Code(f"dtype={value.dtype}"),)


_BASES = (10000.0, 500000.0, 1000000.0)


def _frequencies(value: Tensor) -> Iterator[tuple[Code, Tensor]]:
    """The inverse frequencies of rotary positions."""
    if value.dtype != torch.float32:
        return
    dim = 2 * value.shape[0]
    for base in _BASES:
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
        text = f"1.0 / ({base} ** (torch.arange(0, {dim}, 2).float() / {dim}))"
        yield Code(text), 1.0 / (base**exponent)


def _literal(value: Tensor) -> Code:
    def write(item: object) -> Code:
        if isinstance(item, list):
            inside = tuple(map(write, item))
            return Code(f"[{', '.join(map(str, inside))}]", head="[", items=inside, tail="]")
        return Code(repr(item) if repr(item) not in ("inf", "-inf", "nan") else f'float("{item}")')

    return write(value.tolist())


def _dtype_of_literal(value: Tensor) -> tuple[Code, ...]:
    natural = (torch.float32, torch.int64, torch.bool)
    return () if value.dtype in natural else (prefixed("dtype=", Code(str(value.dtype))),)


def extra_tensors(capture: Capture, stages: Iterable[StageGraph]) -> dict[str, Tensor]:
    """The tensors outside the state_dict that the generated code needs and cannot make, by their
    names in the original; those of a model on meta have no values."""
    saved = set(capture.model.state_dict(keep_vars=True))
    names = (name for stage in stages for name in used_names(capture, stage)[1])
    tensors = {name: _tensor(capture, name) for name in names if name not in saved}
    return {name: tensor.detach() for name, tensor in tensors.items() if rebuild(tensor) is None}


def _tensor(capture: Capture, name: str) -> Tensor:
    if name in capture.constants:
        return capture.constants[name]
    path, _, last = name.rpartition(".")
    tensor = getattr(capture.model.get_submodule(path), last)
    assert isinstance(tensor, Tensor)
    return tensor
