"""A model of the user's and its generated files side by side: structure, numbers, gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import asyncpipe
from asyncpipe.partitioner.capture.arguments import plain_structure
from asyncpipe.runtime.executor.loading import Pipe


def cut(model: nn.Module, inputs: Any, folder: Path, stages: int = 2, **options: Any) -> Pipe:
    """The model in stages, through files."""
    asyncpipe.partition(
        model, inputs, stages=stages, output=folder / "cut", profile="analytic", **options
    )
    return asyncpipe.load(folder / "cut")


def assert_same(
    model: nn.Module, inputs: Any, folder: Path, stages: int = 2, *, exact: bool = True
) -> Pipe:
    """Cuts the model and compares it with the pipe in training and in evaluation mode, from equal
    seeds: the structure of the result, its numbers, all gradients and the whole state. Without
    `exact`, sums may be added in another order."""
    pipe = cut(model, inputs, folder, stages)
    args = inputs if isinstance(inputs, tuple) else ()
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    for training in (True, False):
        model.train(training)
        pipe.train(training)
        (expected, gradients), (found, others) = (
            _run(each, args, kwargs) for each in (model, pipe)
        )
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)
        for one, other in zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(other, one, **_allowed(exact))
            else:
                assert one == other
        shared = {name for tied in pipe.plan.shared for name in tied.names}
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            allowed = _allowed(exact and name not in shared)
            torch.testing.assert_close(others[name], gradient, **allowed)
    state = model.state_dict()
    assert list(pipe.state_dict()) == list(state)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    return pipe


def _allowed(exact: bool) -> dict[str, float]:
    return {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(3)
    result = model(*args, **kwargs)
    total = sum(
        (leaf.double() * torch.arange(leaf.numel()).view_as(leaf).cos()).sum()
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    if isinstance(total, Tensor):
        total.backward()
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return plain_structure(result), gradients
