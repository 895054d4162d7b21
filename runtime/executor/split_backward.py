"""A backward in two parts: B makes the gradients of a stage's inputs, W those of its weights.

While a forward runs inside `SplitBackward`, the functions that have a rule (`RULES`: products,
convolutions, embeddings) read their weights without a graph, so that B computes nothing for them; a
hook at the result saves the gradient that arrives there. W makes the weights' gradients from it,
with the kernels of autograd. Gradients from several uses of a weight are added latest first, and
with the last one to `.grad`, as autograd does. So B and W together equal an ordinary backward to
the last bit, if the micro-batches' W run in the order of their B. Only a weight that is read by
other functions as well gets its gradient in two additions.

All other weights get their gradient in B: complex ones, norms, parameters with hooks, calls under
torch.utils.checkpoint, torch.func or torch.compile. B and W are those of Qi et al., "Zero Bubble
Pipeline Parallelism" (ICLR 2024).

A rule takes the arguments of its function. The gradients are autograd's: the same kernels on
operands of the same strides, so they agree with it to the last bit. A rule returns None for
arguments outside its scope; autograd then handles the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Parts = tuple[Tensor | None, Tensor | None]
"""The gradients of the weight and of the bias; None for one that needs none."""


@dataclass(slots=True)
class WeightUse:
    """A call that reads a weight; `parts(call, gradient)` makes the gradients of weight and
    bias."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    parts: Callable[[WeightUse, Tensor], Parts]
    casts: bool = True
    """The function casts its arguments under torch.autocast."""

    def gradients(self, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Weight and bias with their gradients, if they need one."""
        weight_part, bias_part = self.parts(self, gradient)
        if weight_part is not None:
            yield self.weight, weight_part
        if bias_part is not None and self.bias is not None:
            yield self.bias, bias_part

    @property
    def trained(self) -> Iterator[Tensor]:
        """The weight and the bias, as far as they need a gradient."""
        both = (self.weight, self.bias)
        return (each for each in both if each is not None and each.requires_grad)

    @property
    def bias_needs_grad(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def cast_input(self) -> Tensor:
        """The input as the function itself would cast it; the product and the weight's gradient
        read it."""
        device = self.input.device.type
        if (
            self.casts
            and torch.is_autocast_enabled(device)
            and self.input.is_floating_point()
            and self.input.dtype is not torch.float64
        ):
            return self.input.to(torch.get_autocast_dtype(device))
        return self.input


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightUse | None:
    return WeightUse(input, weight, bias, _parts_of_linear) if _is_folded(input) else None


def _is_folded(input: Tensor) -> bool:
    """True if torch multiplies the rows of one matrix, whatever needs a gradient. A batch of
    matrices that is not a view of one matrix becomes one only for a weight that needs a gradient.
    """
    return input.dim() <= 2 or input.is_contiguous()


def _parts_of_linear(call: WeightUse, gradient: Tensor) -> Parts:
    rows = _rows(gradient)
    weight = rows.t().mm(_rows(call.input)) if call.weight.requires_grad else None
    return weight, _bias_part(call, rows)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **others: Any
) -> WeightUse | None:
    if beta != 1 or alpha != 1 or others:
        return None
    return WeightUse(mat1, mat2, input, _parts_of_product)


def _matmul(input: Tensor, other: Tensor, **others: Any) -> WeightUse | None:
    if others or not isinstance(other, Tensor) or other.dim() != 2:
        return None
    is_split = input.dim() >= 2 and _is_folded(input)
    return WeightUse(input, other, None, _parts_of_product) if is_split else None


def _mm(input: Tensor, mat2: Tensor, **others: Any) -> WeightUse | None:
    return _matmul(input, mat2, **others)


def _parts_of_product(call: WeightUse, gradient: Tensor) -> Parts:
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


def _bias_part(call: WeightUse, rows: Tensor) -> Tensor | None:
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
) -> WeightUse | None:
    if max_norm is not None:
        return None
    padding = -1 if padding_idx is None else padding_idx % len(weight)

    def parts(call: WeightUse, gradient: Tensor) -> Parts:
        weight_gradient = torch.ops.aten.embedding_backward(
            gradient, call.input, len(weight), padding, scale_grad_by_freq, sparse
        )
        return weight_gradient, None

    return WeightUse(input, weight, None, parts, casts=False)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> WeightUse | None:
    if input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    spread = _per_dimension(dilation, dims)
    if isinstance(padding, str):
        around = [d * (n - 1) for d, n in zip(spread, weight.shape[2:], strict=True)]
        if padding == "same" and any(total % 2 for total in around):
            return None
        padding = [total // 2 if padding == "same" else 0 for total in around]
    return _convolved(
        input,
        weight,
        bias,
        _per_dimension(stride, dims),
        _per_dimension(padding, dims),
        spread,
        None,
        groups,
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
) -> WeightUse | None:
    if input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    return _convolved(
        input,
        weight,
        bias,
        _per_dimension(stride, dims),
        _per_dimension(padding, dims),
        _per_dimension(dilation, dims),
        _per_dimension(output_padding, dims),
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
) -> WeightUse:
    """`output_padding` is None unless the convolution is a transposed one."""

    def parts(call: WeightUse, gradient: Tensor) -> Parts:
        _, *gradients = torch.ops.aten.convolution_backward(
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
        return gradients[0], gradients[1]

    return WeightUse(input, weight, bias, parts)


def _per_dimension(value: int | Sequence[int], dims: int) -> Sequence[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


RULES: Mapping[Callable[..., Any], Callable[..., WeightUse | None]] = {
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
"""Function -> its rule, for functions whose work for a weight is mainly a product."""


class SplitBackward(TorchFunctionMode):
    """The delayed weight gradients of one micro-batch; the stage's forward runs inside.

    `bound` are leaves in place of the module's parameters.
    """

    def __init__(self, bound: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._bound = {id(weight) for weight in bound.values()} if bound else set()
        self._is_open = False
        self._put_aside: list[tuple[WeightUse, int, Tensor]] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        rule = RULES.get(function)
        if rule is not None and _is_plain_autograd():
            call = rule(*args, **named)
            if call is not None and self._is_split(call):
                return self._without_weights(call, function, args, named)
        return function(*args, **named)

    def open(self) -> None:
        """From now on, arriving gradients are those of the stage's own backward."""
        self._is_open = True

    def backward(self) -> None:
        """W: adds to the weights' `.grad`, and releases what B saved."""
        left = Counter(id(weight) for call, *_ in self._put_aside for weight in call.trained)
        totals: dict[int, Tensor] = {}
        self._put_aside.reverse()
        with torch.no_grad():
            while self._put_aside:
                call, version, gradient = self._put_aside.pop()
                if call.input._version != version:
                    raise RuntimeError(
                        "a tensor that the gradient of a weight is made of was written to in "
                        "place after it was read"
                    )
                _add_gradients(call, gradient, totals, left)

    def _is_split(self, call: WeightUse) -> bool:
        """True if a weight or bias needs a gradient, which must be real weights, of a plain
        input."""
        weight, bias = call.weight, call.bias
        if weight.is_complex():
            return False
        if weight.requires_grad and not self._is_weight(weight):
            return False
        if bias is not None and bias.requires_grad:
            return self._is_weight(bias) and _is_own(call.input)
        return weight.requires_grad and _is_own(call.input)

    def _is_weight(self, tensor: Tensor) -> bool:
        return (
            (type(tensor) is nn.Parameter or id(tensor) in self._bound)
            and tensor.is_leaf
            and not tensor._backward_hooks
            and not tensor._post_accumulate_grad_hooks
        )

    def _without_weights(
        self,
        call: WeightUse,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Tensor:
        read = call.cast_input()
        instead = {id(call.input): read, id(call.weight): call.weight.detach()}
        if call.bias is not None:
            instead[id(call.bias)] = call.bias.detach()
        result: Tensor = function(
            *[instead.get(id(value), value) for value in args],
            **{name: instead.get(id(value), value) for name, value in named.items()},
        )
        call.input = read.detach()
        put_aside = partial(self._put, call, read._version)
        # Writing to a view in place cuts its own node out of the graph, but not that of its base.
        source = result if result._base is None else result._base
        if source.requires_grad:
            source.register_hook(put_aside)  # type: ignore[no-untyped-call]
            return result
        weights = [w for w in (call.weight, call.bias) if w is not None and w.requires_grad]
        rooted: Tensor = _Root.apply([source], put_aside, *weights)  # type: ignore[no-untyped-call]
        return rooted if source is result else rooted.view(result.shape)

    def _put(self, call: WeightUse, version: int, gradient: Tensor) -> None:
        if not self._is_open:
            raise RuntimeError(
                "gradients are taken inside the forward, so the backward cannot be split: "
                "choose a schedule without W, such as 1f1b"
            )
        self._put_aside.append((call, version, gradient))


class _Root(torch.autograd.Function):
    """Where nothing but weights needs a gradient: a node for the result of a call."""

    @staticmethod
    def forward(
        ctx: Any, result: list[Tensor], put_aside: Callable[[Tensor], None], *weights: Tensor
    ) -> Tensor:
        ctx.put_aside, ctx.weights = put_aside, len(weights)
        return result.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.put_aside(gradient)
        nothing: tuple[None, ...] = (None,) * (2 + ctx.weights)
        return nothing


def _is_plain_autograd() -> bool:
    """True if autograd builds a graph, and no hook counts its saved tensors, as a checkpoint
    does."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def _is_own(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _add_gradients(
    call: WeightUse, gradient: Tensor, totals: dict[int, Tensor], left: Counter[int]
) -> None:
    """Adds the call's gradients to the sums of their weights, and the sum of a weight of which no
    call is left to its `.grad`."""
    for weight, part in call.gradients(gradient):
        before = totals.pop(id(weight), None)
        total = part if before is None else before + part
        left[id(weight)] -= 1
        if left[id(weight)]:
            totals[id(weight)] = total
        else:
            _accumulate(weight, total)


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Accumulates into `.grad` as autograd does."""
    if gradient.dtype is not weight.dtype:
        gradient = gradient.to(weight.dtype)
    if weight.grad is not None:
        weight.grad += gradient
    elif gradient.is_sparse or gradient.stride() == weight.stride():
        weight.grad = gradient
    else:
        weight.grad = torch.empty_like(weight).copy_(gradient)
