"""The modules of torch.nn that a graph keeps as one node, and a stage holds as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS: dict[Any, str] = {F.relu: "relu", F.gelu: "gelu"}
"""The functions that a layer of attention is given by their names."""

# Modules of torch.nn that only call other modules, which are recorded.
_TRANSPARENT = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
    nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.DataParallel,
)  # fmt: skip

_SIZES = {
    nn.Linear: ("out_features", "in_features"), nn.Embedding: ("num_embeddings", "embedding_dim"),
}  # fmt: skip
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _names_of_tensors(module: nn.Module) -> list[str]:
    return [*module._parameters, *module._buffers]


with torch.device("meta"):
    _USUAL_PARTS: dict[type, dict[str, type]] = {
        kind: {path: type(part) for path, part in kind(1, 1).named_modules() if path}
        for kind in _ATTENTION
    }
    _USUAL_TENSORS: dict[type, list[str]] = {
        type(module): _names_of_tensors(module)
        for module in (
            nn.Linear(1, 1), nn.Embedding(1, 1), nn.LayerNorm(1), nn.GroupNorm(1, 1),
            nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.BatchNorm1d(1), nn.BatchNorm2d(1),
        )
    }  # fmt: skip


def is_torch_leaf(module: nn.Module) -> bool:
    """True for a module of torch.nn without hooks, parametrizations or a forward of its own, but
    for a loss with the weights of classes, and a module with other parts or tensors than those that
    its constructor makes: code cannot give it them."""
    home = type(module).__module__
    has_weights = isinstance(module, nn.modules.loss._Loss) and bool(list(module.buffers()))
    return (
        home.startswith("torch.nn.")
        and not home.startswith("torch.nn.utils.")
        and not isinstance(module, _TRANSPARENT)
        and not has_weights
        and not (module._forward_hooks or module._forward_pre_hooks)
        and "forward" not in vars(module)
        and (not isinstance(module, _ATTENTION) or _has_usual_parts(module))
        and (type(module) not in _USUAL_TENSORS or _has_usual_tensors(module))
    )


def _has_usual_tensors(module: Any) -> bool:
    sizes = [getattr(module, name) for name in _SIZES.get(type(module), ())]
    has_sizes = not sizes or list(module.weight.shape) == sizes
    return has_sizes and _names_of_tensors(module) == _USUAL_TENSORS[type(module)]


def _has_usual_parts(layer: nn.Module) -> bool:
    parts = {path: type(part) for path, part in layer.named_modules() if path}
    usual = parts == _USUAL_PARTS[type(layer)] and all(map(is_torch_leaf, layer.children()))
    return usual and getattr(layer, "activation", F.relu) in ACTIVATIONS
