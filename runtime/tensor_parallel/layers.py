"""The modules and parameters of generated stages that are split over the tensor ranks.

Each is written with the sizes of the whole model and holds this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .functions import local, on_one_rank, parallel_input, split_dropout, sum_over_ranks
from .ranks import Groups, Split, current_ranks, mark_split, split_of_length

Module = TypeVar("Module", bound=nn.Module)


class _SplitLinear(nn.Linear):
    """An `nn.Linear` whose weight is split along `split_dim`: 0 for outputs, 1 for inputs."""

    split_dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        groups: Groups = 1,
        uneven: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes, ranks = [out_features, in_features], current_ranks()
        split = Split(self.split_dim, groups)
        if uneven:
            split = split_of_length(self.split_dim, sizes[self.split_dim], ranks.size)
        rows, columns = split.part_shape(sizes, ranks.rank, ranks.size)
        super().__init__(columns, rows, bias, dtype=dtype)
        self.groups, self.uneven = groups, uneven
        mark_split(self.weight, split)
        if self.bias is not None and self.split_dim == 0:
            mark_split(self.bias, split)


class ColumnLinear(_SplitLinear):
    """An `nn.Linear(in_features, out_features)` whose output features are split over the ranks.

    groups: the blocks of the output that are each split: how many equal ones, three for fused
        queries, keys and values, or the widths of all, such as (768, 256, 256)
    uneven: the ranks need not divide the output equally, as for a vocabulary: the first have one
        more
    """

    split_dim = 0


class RowLinear(_SplitLinear):
    """An `nn.Linear(in_features, out_features)` whose input features are split over the ranks: each
    has a summand of the product, and the sum, by one all-reduce, is whole on all of them.

    groups: the blocks of the input that are each split: how many equal ones, or the widths of all
    sequence: the dimension of the positions of which each rank keeps a part of the sum
    """

    split_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        groups: Groups = 1,
        uneven: bool = False,
        sequence: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: dict[str, Any] = {"groups": groups, "uneven": uneven, "dtype": dtype}
        super().__init__(in_features, out_features, bias, **options)
        self.sequence = sequence

    def forward(self, input: Tensor) -> Tensor:
        """The product of the whole input, `[..., out_features]`, or this rank's part of it."""
        if current_ranks().size == 1:
            return super().forward(input)
        summand = nn.functional.linear(input, self.weight)
        product = sum_over_ranks(summand, sequence=self.sequence)
        if self.bias is None:
            return product
        return product + (self.bias if self.sequence is None else parallel_input(self.bias))


class ColumnConv(nn.modules.conv._ConvNd):
    """A convolution whose output channels are split over the ranks."""

    def __init__(self, in_channels: int, out_channels: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(in_channels, local(out_channels), *args, **kwargs)
        mark_split(self.weight, Split(0))
        if self.bias is not None:
            mark_split(self.bias, Split(0))


class RowConv(nn.modules.conv._ConvNd):
    """A convolution whose input channels are split over the ranks: each has a summand of the
    result, and the sum, by one all-reduce, is whole on all of them."""

    def __init__(self, in_channels: int, out_channels: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(local(in_channels), out_channels, *args, **kwargs)
        mark_split(self.weight, Split(1))

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of the whole input."""
        if current_ranks().size == 1:
            return self._conv_forward(input, self.weight, self.bias)
        return sum_over_ranks(
            self._conv_forward(
                input, self.weight, None if self.bias is None else on_one_rank(self.bias)
            )
        )


class GroupConv(nn.modules.conv._ConvNd):
    """A convolution of groups of channels, which are split over the ranks with their inputs."""

    def __init__(
        self, in_channels: int, out_channels: int, *args: Any, groups: int, **kwargs: Any
    ) -> None:
        options: dict[str, Any] = {**kwargs, "groups": local(groups)}
        super().__init__(local(in_channels), local(out_channels), *args, **options)
        self.groups = groups
        mark_split(self.weight, Split(0))
        if self.bias is not None:
            mark_split(self.bias, Split(0))

    def _convolved(self, function: Callable[..., Tensor], input: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            around = self._reversed_padding_repeated_twice
            input, padding = nn.functional.pad(input, around, mode=self.padding_mode), 0
        sizes = (self.stride, padding, self.dilation, local(self.groups))
        return function(input, self.weight, self.bias, *sizes)


class GroupConv1d(GroupConv, nn.Conv1d):
    """An `nn.Conv1d` of groups of channels, such as a depthwise one, which are split over the
    ranks."""

    __signature__ = signature(nn.Conv1d)

    def forward(self, input: Tensor) -> Tensor:
        """The channels of this rank."""
        return self._convolved(nn.functional.conv1d, input)


class GroupConv2d(GroupConv, nn.Conv2d):
    """An `nn.Conv2d` of groups of channels, such as a depthwise one, which are split over the
    ranks."""

    __signature__ = signature(nn.Conv2d)

    def forward(self, input: Tensor) -> Tensor:
        """The channels of this rank."""
        return self._convolved(nn.functional.conv2d, input)


class SplitGroupNorm(nn.GroupNorm):
    """An `nn.GroupNorm` whose groups of channels are split over the ranks."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(local(num_groups), local(num_channels), eps, dtype=dtype)
        self.num_groups = num_groups
        mark_split(self.weight, Split(0))
        mark_split(self.bias, Split(0))

    def forward(self, input: Tensor) -> Tensor:
        """The channels of this rank."""
        groups = local(self.num_groups)
        return nn.functional.group_norm(input, groups, self.weight, self.bias, self.eps)


class ColumnConv1d(ColumnConv, nn.Conv1d):
    """An `nn.Conv1d` whose output channels are split over the ranks."""

    __signature__ = signature(nn.Conv1d)


class RowConv1d(RowConv, nn.Conv1d):
    """An `nn.Conv1d` whose input channels are split over the ranks."""

    __signature__ = signature(nn.Conv1d)


class ColumnConv2d(ColumnConv, nn.Conv2d):
    """An `nn.Conv2d` whose output channels are split over the ranks."""

    __signature__ = signature(nn.Conv2d)


class RowConv2d(RowConv, nn.Conv2d):
    """An `nn.Conv2d` whose input channels are split over the ranks."""

    __signature__ = signature(nn.Conv2d)


class SplitDropout(nn.Dropout):
    """An `nn.Dropout` of a tensor that is split along `dim`: the numbers of the unsplit model."""

    def __init__(self, p: float, dim: int, groups: Groups = 1) -> None:
        super().__init__(p)
        self.dim, self.groups = dim, groups

    def forward(self, input: Tensor) -> Tensor:
        """The split tensor with this rank's part of the mask."""
        return split_dropout(input, self.p, self.training, self.dim, self.groups)


def split_parameter(
    whole: Tensor,
    *,
    dim: int,
    groups: Groups = 1,
    uneven: bool = False,
    requires_grad: bool = True,
) -> nn.Parameter:
    """A parameter of the whole shape, split along `dim`: this rank's part of it."""
    split, ranks = Split(dim, groups), current_ranks()
    if uneven:
        split = split_of_length(dim, whole.shape[dim], ranks.size)
    part = split.part(whole, ranks.rank, ranks.size) if ranks.size > 1 else whole
    parameter = nn.Parameter(part.contiguous(), requires_grad)
    mark_split(parameter, split)
    return parameter


def split_module(module: Module, *, dim: int = 0, groups: Groups = 1) -> Module:
    """A module, such as a batch norm of split channels, with this rank's part of its parameters and
    buffers: of each along `dim`, and of vectors along their only dimension."""
    ranks = current_ranks()

    def part(tensor: Tensor) -> Tensor:
        split = Split(dim if tensor.dim() > 1 else 0, groups)
        own = split.part(tensor.detach(), ranks.rank, ranks.size).clone()
        if isinstance(tensor, nn.Parameter):
            own = nn.Parameter(own, tensor.requires_grad)
        mark_split(own, split)
        return own

    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            setattr(owner, name, part(parameter))
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.dim():
                setattr(owner, name, part(buffer))
    return module


def shared_module(module: Module) -> Module:
    """A module, such as a norm over each head, that runs on split tensors with whole parameters:
    their gradients are summed over the ranks."""
    if current_ranks().size == 1:
        return module
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(module.named_parameters(recurse=False))
        shared: dict[str, Any] = {name: parallel_input(tensor) for name, tensor in own.items()}
        try:
            module._parameters.update(shared)
            return plain(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = forward
    return module
