"""An operation of a graph -> the part of its backward that makes gradients of weights.

It is measured with the operation (`measure.py`), by the code that parts a backward in a run. Where
nothing is measured there is a rule: a product of an input and a weight, a convolution or an
embedding has a backward of two halves, one for the input, which the stage before waits for, and one
for the weight, of as many FLOPs, which a schedule may put off. Where the input needs no gradient
all of it is the weight's. Of other operations nothing is put off: their weights are small, or not
read by a rule of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .walk import NodeCost

_PRODUCTS: frozenset[Callable[..., Any] | str] = frozenset(
    {
        F.linear, F.embedding, F.conv1d, F.conv2d, F.conv3d,
        F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.addmm, torch.mm, torch.matmul, "addmm", "mm", "matmul",
    }
)  # fmt: skip
_OTHERS = (nn.RNNBase, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def weight_ms(node: fx.Node, model: nn.Module, cost: NodeCost) -> float:
    """Milliseconds that a schedule may put off."""
    share = cost.weight_share
    return cost.backward_ms * (weight_share(node, model) if share is None else share)


def weight_share(node: fx.Node, model: nn.Module) -> float:
    """The rule: nothing, half or all of the backward."""
    if not _multiplies_a_weight(node, model):
        return 0.0
    read = [source for source in node.all_input_nodes if source.op != "get_attr"]
    return 0.5 if any(map(_needs_gradient, read)) else 1.0


def _multiplies_a_weight(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        leaf = model.get_submodule(str(node.target))
        is_other = isinstance(leaf, _OTHERS)
        return not is_other and any(weight.dim() > 1 for weight in leaf.parameters())
    if node.target not in _PRODUCTS:
        return False
    read = {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
    names = (name for name, _ in model.named_parameters(remove_duplicate=False)) if read else ()
    return not read.isdisjoint(names)


def _needs_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad
