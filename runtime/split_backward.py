"""A stage's backward -> B, which makes the gradients of its inputs, and W, those of its weights.

While a forward runs inside `SplitBackward`, the functions that have a rule (`split_rules.py`:
products, convolutions, embeddings) read their weights without a graph, so that B computes nothing
for them; a hook at the result puts aside the gradient that arrives there. W makes the weights'
gradients of that, by the kernels that autograd uses. What a weight gets from several uses is added
latest first, and then to `.grad`, as autograd does. So B and W together equal an ordinary backward
to the last bit, where the micro-batches' W come in the order of their B. Only a weight that is
read by these functions and by others too gets its gradient in two additions.

Everything else has its gradient in B: norms, parameters with hooks, calls under
torch.utils.checkpoint, torch.func or torch.compile. B and W are those of Qi et al., "Zero Bubble
Pipeline Parallelism" (ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .split_rules import RULES, Call


class SplitBackward(TorchFunctionMode):
    """The weights' part of one micro-batch's backward; the stage's forward runs inside.

    `bound` are leaves that stand in for the module's parameters.
    """

    def __init__(self, bound: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._bound = {id(weight) for weight in bound.values()} if bound else set()
        self._is_open = False
        self._put_aside: list[tuple[Call, int, Tensor]] = []

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
        """From now on it is the stage's own backward that brings gradients."""
        self._is_open = True

    def backward(self) -> None:
        """W: adds to the weights' `.grad`, and lets go of what B put aside."""
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        self._put_aside.reverse()
        with torch.no_grad():
            while self._put_aside:
                call, version, gradient = self._put_aside.pop()
                if call.input._version != version:
                    raise RuntimeError(
                        "a tensor that the gradient of a weight is made of was written to in "
                        "place after it was read"
                    )
                for weight, part in call.gradients(gradient):
                    before = totals.get(id(weight))
                    totals[id(weight)] = weight, part if before is None else before[1] + part
            for weight, total in totals.values():
                _accumulate(weight, total)

    def _is_split(self, call: Call) -> bool:
        """Whether something needs a gradient beside the input, and nothing but weights does."""
        weight, bias = call.weight, call.bias
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
        call: Call,
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

    def _put(self, call: Call, version: int, gradient: Tensor) -> None:
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
    """Whether a graph is built, and nobody counts what it saves, as a checkpoint does."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


def _is_own(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """As autograd does at a leaf."""
    if gradient.dtype is not weight.dtype:
        gradient = gradient.to(weight.dtype)
    if weight.grad is not None:
        weight.grad += gradient
    elif gradient.is_sparse or gradient.stride() == weight.stride():
        weight.grad = gradient
    else:
        weight.grad = torch.empty_like(weight).copy_(gradient)
