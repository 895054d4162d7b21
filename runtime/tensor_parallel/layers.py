"""The modules and parameters of generated stages that are split over the tensor ranks.

Each is written with the sizes of the whole model and holds this rank's part.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from .functions import local, split_dropout, sum_over_ranks
from .ranks import Split, current_ranks, mark_split

Module = TypeVar("Module", bound=nn.Module)


class ColumnLinear(nn.Linear):
    """An `nn.Linear(in_features, out_features)` whose output features are split over the ranks.

    groups: the equal blocks of the output that are each split, three for fused queries, keys and
        values
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, groups: int = 1
    ) -> None:
        super().__init__(in_features, local(out_features), bias)
        self.groups = groups
        mark_split(self.weight, Split(0, groups))
        if self.bias is not None:
            mark_split(self.bias, Split(0, groups))


class RowLinear(nn.Linear):
    """An `nn.Linear(in_features, out_features)` whose input features are split over the ranks: each
    has a summand of the product, and the sum, by one all-reduce, is whole on all of them."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, groups: int = 1
    ) -> None:
        super().__init__(local(in_features), out_features, bias)
        self.groups = groups
        mark_split(self.weight, Split(1, groups))

    def forward(self, input: Tensor) -> Tensor:
        """The product of the whole input, `[..., out_features]`."""
        if current_ranks().size == 1:
            return super().forward(input)
        product = sum_over_ranks(nn.functional.linear(input, self.weight))
        return product if self.bias is None else product + self.bias


class SplitDropout(nn.Dropout):
    """An `nn.Dropout` of a tensor that is split along `dim`: the numbers of the unsplit model."""

    def __init__(self, p: float = 0.5, *, dim: int, groups: int = 1) -> None:
        super().__init__(p)
        self.dim, self.groups = dim, groups

    def forward(self, input: Tensor) -> Tensor:
        """The split tensor with this rank's part of the mask."""
        return split_dropout(input, self.p, self.training, self.dim, self.groups)


def split_parameter(
    whole: Tensor, *, dim: int, groups: int = 1, requires_grad: bool = True
) -> nn.Parameter:
    """A parameter of the whole shape, split along `dim`: this rank's part of it."""
    split, ranks = Split(dim, groups), current_ranks()
    part = split.part(whole, ranks.rank, ranks.size) if ranks.size > 1 else whole
    parameter = nn.Parameter(part.contiguous(), requires_grad)
    mark_split(parameter, split)
    return parameter


def split_module(module: Module, *, groups: int = 1) -> Module:
    """A module of a layer by channels or features, such as a batch norm, with this rank's part of
    each parameter and buffer, split along their first dimension."""
    ranks = current_ranks()
    split = Split(0, groups)
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.dim():
                    continue
                part = split.part(tensor.detach(), ranks.rank, ranks.size).clone()
                if isinstance(tensor, nn.Parameter):
                    part = nn.Parameter(part, tensor.requires_grad)
                mark_split(part, split)
                tensors[name] = part
    return module
