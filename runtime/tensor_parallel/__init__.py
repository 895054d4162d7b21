"""Layers whose weights are split over the tensor ranks of a stage: what generated stages import.

A stage runs on t ranks that hold a part of its wide layers each and the whole of everything else.
Activations between stages are whole on all of them.

    y = x W_1, split by columns        each rank has some columns of W_1, and of y
    z = f(y)                           elementwise or by heads: on each rank's part
    u = z W_2, split by rows           each rank has a summand of u: one all-reduce

(Shoeybi et al. 2019, "Megatron-LM", section 3.) Backward needs the dual: the gradient of x is a
sum over the ranks. With one rank all functions here are the identity, and the layers those of
torch, to the last bit.
"""

from .functions import (
    local,
    on_one_rank,
    parallel_input,
    part_of,
    split_attention,
    split_dropout,
    sum_over_ranks,
    whole_of,
    whole_output,
)
from .layers import (
    ColumnConv1d,
    ColumnConv2d,
    ColumnLinear,
    GroupConv1d,
    GroupConv2d,
    RowConv1d,
    RowConv2d,
    RowLinear,
    SplitDropout,
    SplitGroupNorm,
    shared_module,
    split_module,
    split_parameter,
)
from .ranks import ONE_RANK, Split, TensorRanks, splits_of, using
from .vocabulary import VocabEmbedding, split_cross_entropy, split_log_softmax, split_nll_loss

__all__ = [
    "ONE_RANK",
    "ColumnConv1d",
    "ColumnConv2d",
    "ColumnLinear",
    "GroupConv1d",
    "GroupConv2d",
    "RowConv1d",
    "RowConv2d",
    "RowLinear",
    "Split",
    "SplitDropout",
    "SplitGroupNorm",
    "TensorRanks",
    "VocabEmbedding",
    "local",
    "on_one_rank",
    "parallel_input",
    "part_of",
    "shared_module",
    "split_attention",
    "split_cross_entropy",
    "split_dropout",
    "split_log_softmax",
    "split_module",
    "split_nll_loss",
    "split_parameter",
    "splits_of",
    "sum_over_ranks",
    "using",
    "whole_of",
    "whole_output",
]
