"""How an operation runs on parts, and the layers and functions that do it in generated code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from ...runtime.tensor_parallel.functions import split_attention, split_dropout
from ...runtime.tensor_parallel.layers import (
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
)
from ...runtime.tensor_parallel.ranks import Split
from ...runtime.tensor_parallel.vocabulary import VocabEmbedding
from ..capture.arguments import map_leaves
from ..capture.leaf_modules import construct
from .example_run import Samples
from .probe import Placement, Summands


@dataclass(frozen=True)
class Decision:
    """How an operation runs on parts.

    result: the placement of its result; None for a whole one
    places: the placements of its inputs that are whole values or parameters and are split for it
    state: those of the parameters and buffers of the module that it calls
    once: inputs, such as a bias, that the sum has once
    sums: the ranks' results are summands
    arguments: its args and kwargs with `Local` sizes; None if they are the captured ones
    function: the one that computes it in place of its own with these arguments, in which ranks
        exchange something
    sequence: the dimension of the positions of which each rank keeps a part of the sum
    """

    result: Placement = None
    places: Mapping[fx.Node, Split] = field(default_factory=dict)
    state: Mapping[str, Split | Summands | None] = field(default_factory=dict)
    once: tuple[fx.Node, ...] = ()
    sums: bool = False
    arguments: tuple[Any, Any] | None = None
    function: Callable[..., Any] | None = None
    sequence: int | None = None

    @property
    def splits(self) -> list[Split]:
        """Those of the inputs and of the parameters and buffers that are divided for it."""
        places = (*self.places.values(), *self.state.values())
        return [split for split in places if isinstance(split, Split)]


@dataclass(frozen=True)
class Positions:
    """The values of which each rank has a part of the positions.

    values: how they are divided
    decisions: the operations that run on parts of the positions
    sums: the value that is the sum in parts, by the operation that makes the summands: itself, or
        a view of it
    inputs: views of whole values that split layers alone read: positions are gathered before them
    notes: the operations before which the positions are gathered, and why
    """

    values: Mapping[fx.Node, Split] = field(default_factory=dict)
    decisions: Mapping[fx.Node, Decision] = field(default_factory=dict)
    sums: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: frozenset[fx.Node] = frozenset()
    notes: tuple[str, ...] = ()


def moved(decision: Decision, first: fx.Node, node: fx.Node) -> Decision:
    """The decision for a node of the same kind as that of another one."""
    return reading(decision, dict(zip(first.all_input_nodes, node.all_input_nodes, strict=True)))


def reading(decision: Decision, others: Mapping[fx.Node, fx.Node]) -> Decision:
    """The decision with other inputs in the place of some."""
    arguments = decision.arguments
    if arguments is not None:
        arguments = map_leaves(
            lambda leaf: others.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf, arguments
        )
    return replace(
        decision,
        places={others.get(n, n): split for n, split in decision.places.items()},
        once=tuple(others.get(n, n) for n in decision.once),
        arguments=arguments,
    )


@dataclass(frozen=True)
class Layer:
    """The replacement of a leaf module.

    module: the module in its place
    split: how its parameters and buffers are divided, unless its class says it
    is_shared: its parameters are whole, and the gradients of the ranks are summed
    """

    module: nn.Module
    split: Split | None = None
    is_shared: bool = False


_COLUMNS: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ColumnLinear,
    nn.Conv1d: ColumnConv1d,
    nn.Conv2d: ColumnConv2d,
}
_ROWS: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowLinear,
    nn.Conv1d: RowConv1d,
    nn.Conv2d: RowConv2d,
    nn.Embedding: VocabEmbedding,
}
_GROUPS: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: GroupConv1d,
    nn.Conv2d: GroupConv2d,
    nn.GroupNorm: SplitGroupNorm,
}
SPLIT_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.nn.functional.dropout: split_dropout,
    torch.nn.functional.scaled_dot_product_attention: split_attention,
}
"""Functions that draw random numbers, and those that draw the same for split tensors."""


def layer_for(module: nn.Module, decision: Decision) -> Layer | None:
    """The layer that runs a module on parts; None if there is none."""
    state = {name: place for name, place in decision.state.items() if place is not None}
    if not state:
        return _unsplit(module, decision)
    split = state.get("weight")
    known = (_ROWS if decision.sums else _COLUMNS).get(type(module))
    if (of_groups := _of_groups(module, split)) is not None:
        return None if decision.sums else Layer(_built(module, of_groups, Split(0)))
    if known is not None and isinstance(split, Split):
        if isinstance(module, nn.Linear | nn.Embedding) or split in (Split(0), Split(1)):
            return Layer(_built(module, known, split, decision.sequence))
        return None
    alike = None if decision.sums else split_alike(module, state)
    if alike is None or alike.length is not None:
        return None
    return Layer(module, split=alike)


def probed_layer(module: nn.Module | None, decision: Decision, size: int) -> nn.Module | None:
    """The layer of `size` ranks for a module that computes something else with its parts: an
    embedding of some rows, groups of channels. None for other modules."""
    split = decision.state.get("weight")
    if type(module) is nn.Embedding and isinstance(split, Split) and split.dim == 0:
        return _built(module, VocabEmbedding, split)
    kind = None if module is None else _of_groups(module, split)
    if module is None or kind is None or _groups_of(module) % size:
        return None
    return _built(module, kind, Split(0))


def _of_groups(module: nn.Module, split: Any) -> type[nn.Module] | None:
    """The layer for a module whose groups of channels are split."""
    return _GROUPS.get(type(module)) if _groups_of(module) > 1 and split == Split(0) else None


def _groups_of(module: nn.Module) -> int:
    return int(getattr(module, "num_groups", getattr(module, "groups", 1)))


def split_alike(module: nn.Module, state: Mapping[str, Split | Summands | None]) -> Split | None:
    """The division of a module of which all parameters and buffers are divided alike: along one
    dimension, or the only one of vectors."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    places = {state.get(name): tensor.dim() for name, tensor in tensors.items() if tensor.dim()}
    main = max(places, key=lambda place: places[place], default=None)
    if not isinstance(main, Split):
        return None
    vector = Split(0, main.groups)
    is_alike = all(
        state.get(name) == (main if tensor.dim() > 1 else vector)
        for name, tensor in tensors.items()
        if tensor.dim()
    )
    return main if is_alike else None


def _unsplit(module: nn.Module, decision: Decision) -> Layer | None:
    """The layer for a module whose parameters stay whole."""
    if decision.sums:
        return None if list(module.parameters()) else Layer(module)
    if type(module) is nn.Dropout and isinstance(decision.result, Split):
        split = decision.result
        if split.length is not None or isinstance(split.groups, Samples):
            return None
        return Layer(SplitDropout(module.p, dim=split.dim, groups=split.groups))
    if "dropout" in type(module).__name__.lower():
        return None
    needs_sum = any(parameter.requires_grad for parameter in module.parameters())
    return Layer(module, is_shared=needs_sum)


def _built(
    module: nn.Module, kind: type[nn.Module], split: Split, sequence: int | None = None
) -> nn.Module:
    """A module of that kind with the arguments, parameters and mode of another one."""
    given = {
        argument.name: argument.value
        for argument in construct(module, "").arguments
        if not argument.is_default
    }
    options: dict[str, Any] = {}
    if isinstance(module, nn.Linear):
        options = {"groups": split.groups, "uneven": split.length is not None}
    if sequence is not None:
        options["sequence"] = sequence
    with torch.device("meta"):
        built = kind(**given, **options)
    built._parameters.update(module._parameters)
    return built.train(module.training)
