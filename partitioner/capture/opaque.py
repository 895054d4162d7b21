"""A module that fake tensors cannot run -> fake results, whose shapes real runs have shown.

A module that the user keeps as one node may branch on values or loop over them. It is run on
made-up inputs at several sizes, and each size of its results is matched with an expression in the
free sizes: `a*m + b`, where m is a free size or a product of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.errors import CaptureError
from ...runtime.number_generators import number_state
from .fakes import FakeWorld
from .restore import unchanged
from .structure import map_leaves, tensors_in
from .values import Size

Sizes = dict[str, int]


def run_opaque(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], world: FakeWorld
) -> tuple[Any, bool, bool]:
    """Fake results of a call, whether it drew random numbers of torch, and whether of Python or
    NumPy.

    Raises CaptureError when the shapes of the results follow from no sizes of the arguments.
    """
    name = type(module).__name__
    if world.is_on_meta:
        raise CaptureError(
            f"{name} depends on tensor values, and the model has none: it is on meta.",
            "Give the model weights, random ones do.",
        )
    samples = _samples(world.hints)
    results, changes, drew, drew_numbers = [], [], False, False
    with _disable_current_modes(), world.outside(), torch.no_grad():
        for sizes in samples:
            given = map_leaves(lambda leaf: _real(leaf, world, sizes), (args, kwargs))  # noqa: B023
            with unchanged(module, dict(module.named_parameters())):
                reached = [*tensors_in(given), *module.parameters(), *module.buffers()]
                versions = [tensor._version for tensor in reached]
                states = torch.get_rng_state(), number_state()
                results.append(module(*given[0], **given[1]))
                drew |= not torch.equal(states[0], torch.get_rng_state())
                drew_numbers |= not torch.equal(states[1], number_state())
                pairs = zip(reached, versions, strict=True)
                changes = [tensor._version != version for tensor, version in pairs]
    shapes = [
        [leaf.shape for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for result in results
    ]
    if len({len(each) for each in shapes}) != 1 or not _are_alike(results):
        raise _unsure(name)
    found = iter([_fit(name, each, samples) for each in zip(*shapes, strict=True)])
    needs_grad = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (*tensors_in((args, kwargs)), *module.parameters())
    )

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [_symbolic(world, *size) for size in next(found)]
        made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        return made.requires_grad_(needs_grad and leaf.is_floating_point())

    for tensor, changed in zip(
        (*tensors_in((args, kwargs)), *module.parameters(), *module.buffers()),
        changes,
        strict=True,
    ):
        if changed:
            with torch.no_grad():
                tensor.copy_(tensor)  # so that the change is seen
    return pytree.tree_map(fake, results[0]), drew, drew_numbers


def _are_alike(results: Sequence[Any]) -> bool:
    """Whether what is no tensor is the same in all results."""
    plain = [
        [None if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(result)]
        for result in results
    ]
    return all(each == plain[0] for each in plain)


def _samples(hints: Sizes) -> list[Sizes]:
    """The sizes of the example, each size changed alone and by two amounts, and all together."""
    alone = [{**hints, name: hints[name] + more} for name in hints for more in (1, 3)]
    return [hints, *alone, {name: size + 2 for name, size in hints.items()}]


def _real(leaf: Any, world: FakeWorld, sizes: Sizes) -> Any:
    if isinstance(leaf, Tensor):
        shape = [
            int(size.evaluate(sizes)) if isinstance(size, Size) else size
            for size in world.shape(leaf)
        ]
        if leaf.is_floating_point():
            return torch.randn(shape, device=leaf.device).to(leaf.dtype)
        return torch.ones(shape, dtype=leaf.dtype, device=leaf.device)
    if isinstance(leaf, torch.SymInt):
        size = world.size(leaf)
        return size.evaluate(sizes) if isinstance(size, Size) else size
    return leaf


def _fit(
    name: str, shapes: Sequence[torch.Size], samples: Sequence[Sizes]
) -> list[tuple[tuple[str, ...], int, int]]:
    """For each dimension the free sizes to multiply, a factor and a rest."""
    if len({len(shape) for shape in shapes}) != 1:
        raise _unsure(name)
    return [_fit_one(name, sizes, samples) for sizes in zip(*shapes, strict=True)]


def _fit_one(
    name: str, values: Sequence[int], samples: Sequence[Sizes]
) -> tuple[tuple[str, ...], int, int]:
    symbols = list(samples[0])
    pairs = itertools.combinations_with_replacement(symbols, 2)
    for factors in [(), *((symbol,) for symbol in symbols), *pairs]:
        terms = [_product(factors, sizes) for sizes in samples]
        slope, rest = 0, values[0]
        if terms[-1] != terms[0]:
            slope = (values[-1] - values[0]) // (terms[-1] - terms[0])
            rest = values[0] - slope * terms[0]
        if all(slope * term + rest == value for term, value in zip(terms, values, strict=True)):
            return factors, slope, rest
    raise _unsure(name)


def _product(factors: Sequence[str], sizes: Any) -> Any:
    product = 1
    for factor in factors:
        product = product * sizes[factor]
    return product


def _symbolic(world: FakeWorld, factors: tuple[str, ...], slope: int, rest: int) -> Any:
    return slope * _product(factors, world.symbols) + rest if slope else rest


def _unsure(name: str) -> CaptureError:
    return CaptureError(
        f"the shapes of what {name} returns depend on tensor values.",
        "Keep the module around it as one node, so that they stay inside.",
    )
