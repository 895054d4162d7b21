"""A call of a torch function that reads a weight -> how to make the weight's gradient afterwards.

A rule has the arguments of its function. The gradients are autograd's: the same kernels on
operands of the same strides, so that they agree with it to the last bit. A rule gives None for
arguments that it does not cover; autograd then does as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Parts = tuple[Tensor | None, Tensor | None]
"""The gradients of the weight and of the bias, None for one that needs none."""


@dataclass(slots=True)
class Call:
    """What a call reads, and how `parts(call, gradient)` makes the gradients of its weights.

    With `casts` the function casts its arguments under torch.autocast.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    parts: Callable[[Call, Tensor], Parts]
    casts: bool = True

    def gradients(self, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Weight and bias with their gradients, those that need one."""
        weight_part, bias_part = self.parts(self, gradient)
        if weight_part is not None:
            yield self.weight, weight_part
        if bias_part is not None and self.bias is not None:
            yield self.bias, bias_part

    @property
    def bias_needs_grad(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def cast_input(self) -> Tensor:
        """The input as the function itself would cast it: the product reads it, and the weight's
        gradient is made of it."""
        device = self.input.device.type
        if (
            self.casts
            and torch.is_autocast_enabled(device)
            and self.input.is_floating_point()
            and self.input.dtype is not torch.float64
        ):
            return self.input.to(torch.get_autocast_dtype(device))
        return self.input


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call(input, weight, bias, _parts_of_linear) if _is_folded(input) else None


def _is_folded(input: Tensor) -> bool:
    """Whether torch multiplies rows of one matrix, whatever needs a gradient; of a batch of
    matrices that are no view of one it makes one only for a weight that needs a gradient."""
    return input.dim() <= 2 or input.is_contiguous()


def _parts_of_linear(call: Call, gradient: Tensor) -> Parts:
    rows = _rows(gradient)
    weight = rows.t().mm(_rows(call.input)) if call.weight.requires_grad else None
    return weight, _bias_part(call, rows)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **others: Any
) -> Call | None:
    if beta != 1 or alpha != 1 or others:
        return None
    return Call(mat1, mat2, input, _parts_of_product)


def _matmul(input: Tensor, other: Tensor, **others: Any) -> Call | None:
    if others or not isinstance(other, Tensor) or other.dim() != 2:
        return None
    is_split = input.dim() >= 2 and _is_folded(input)
    return Call(input, other, None, _parts_of_product) if is_split else None


def _mm(input: Tensor, mat2: Tensor, **others: Any) -> Call | None:
    return _matmul(input, mat2, **others)


def _parts_of_product(call: Call, gradient: Tensor) -> Parts:
    rows = _rows(gradient)
    weight = None
    if call.weight.requires_grad:
        read, (height, width) = _rows(call.input), call.weight.shape
        if call.weight.stride() == (1, height) != (width, 1):
            weight = rows.t().mm(read).t()
        else:
            weight = read.t().mm(rows)
    return weight, _bias_part(call, rows)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _bias_part(call: Call, rows: Tensor) -> Tensor | None:
    if call.bias is None or not call.bias.requires_grad:
        return None
    return rows.sum_to_size(call.bias.shape)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | None:
    if max_norm is not None:
        return None
    padding = -1 if padding_idx is None else padding_idx % len(weight)

    def parts(call: Call, gradient: Tensor) -> Parts:
        made = torch.ops.aten.embedding_backward(
            gradient, call.input, len(weight), padding, scale_grad_by_freq, sparse
        )
        return made, None

    return Call(input, weight, None, parts, casts=False)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Call | None:
    if input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    spread = _each(dilation, dims)
    if isinstance(padding, str):
        around = [d * (n - 1) for d, n in zip(spread, weight.shape[2:], strict=True)]
        if padding == "same" and any(total % 2 for total in around):
            return None
        padding = [total // 2 if padding == "same" else 0 for total in around]
    return _convolved(
        input, weight, bias, _each(stride, dims), _each(padding, dims), spread, None, groups
    )


def _transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Call | None:
    if input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    return _convolved(
        input,
        weight,
        bias,
        _each(stride, dims),
        _each(padding, dims),
        _each(dilation, dims),
        _each(output_padding, dims),
        groups,
    )


def _convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int] | None,
    groups: int,
) -> Call:
    """`output_padding` is None unless the convolution is a transposed one."""

    def parts(call: Call, gradient: Tensor) -> Parts:
        _, *made = torch.ops.aten.convolution_backward(
            gradient,
            call.input,
            call.weight.detach().to(gradient.dtype),
            None if call.bias is None else call.bias.shape,
            stride,
            padding,
            dilation,
            output_padding is not None,
            output_padding or [0] * len(stride),
            groups,
            [False, call.weight.requires_grad, call.bias_needs_grad],
        )
        return made[0], made[1]

    return Call(input, weight, bias, parts)


def _each(value: int | Sequence[int], dims: int) -> Sequence[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


RULES: Mapping[Callable[..., Any], Callable[..., Call | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.conv_transpose1d: _transposed_convolution,
    F.conv_transpose2d: _transposed_convolution,
    F.conv_transpose3d: _transposed_convolution,
}
"""Function -> its rule: those most of whose work for a weight is a product."""
