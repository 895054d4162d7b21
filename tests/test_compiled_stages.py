"""`torch.compile` takes every generated stage as one graph, with the numbers of the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import asyncpipe
from asyncpipe.runtime.executor.loading import Pipe
from asyncpipe.tests.support.models.zoo import ZOO


def one_step(pipe: Pipe, inputs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and the gradients of their sum."""
    for parameter in pipe.parameters():
        parameter.grad = None
    found = [leaf for leaf in pytree.tree_leaves(pipe(**inputs)) if isinstance(leaf, Tensor)]
    sum(leaf.sum() for leaf in found if leaf.requires_grad).backward()
    gradients = [each.grad for each in pipe.parameters() if each.grad is not None]
    return [leaf.detach() for leaf in found], gradients


@pytest.mark.parametrize("name", [name for name in ZOO if name != "gpt2_eager"])
def test_a_stage_compiles_without_a_graph_break(name: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name]()
    made = tmp_path / "made"
    asyncpipe.partition(model, inputs, stages=2, output=made, profile="analytic")
    # In eval mode, since a compiled dropout draws other numbers.
    plain, compiled = asyncpipe.load(made).eval(), asyncpipe.load(made).eval()
    torch._dynamo.reset()
    compiled.stages = nn.ModuleList(
        torch.compile(stage, fullgraph=True, backend="aot_eager") for stage in compiled.stages
    )
    outputs, gradients = one_step(plain, inputs)
    again, its_gradients = one_step(compiled, inputs)
    for expected, actual in zip(outputs, again, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for gradient, its_gradient in zip(gradients, its_gradients, strict=True):
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-3, atol=1e-4)
