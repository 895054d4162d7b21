"""A model and its stages -> the same numbers, or an AssertionError."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.runtime.rng import seed_torch
from asyncpipe.tests.support.oracles.stage_chain import Chain, tensors_in


def assert_same(
    chain: Chain,
    inputs: Mapping[str, Tensor],
    *,
    training: bool,
    by_value: bool = False,
    tolerance: float = 1e-6,
) -> None:
    """Runs the model and the stages under one seed: outputs, gradients, buffers, and the inputs
    as they are afterwards."""
    chain.capture.model.train(training)
    chain.fill()
    original = copy.deepcopy(chain.capture.model)
    close: Callable[..., Any] = torch.testing.assert_close
    given, again = ({name: value.clone() for name, value in inputs.items()} for _ in range(2))
    seed_torch(3)
    expected = tensors_in(original(**given))
    seed_torch(3)
    actual = chain.run(again, by_value=by_value)
    for one, other in zip(expected, actual, strict=True):
        close(other, one, atol=tolerance, rtol=tolerance)
    close(again, given)
    wanted = [tensor for tensor in expected if tensor.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.full_like(tensor, 0.7) for tensor in wanted])
        chain.backward(0.7)
    assert_same_gradients(original, chain, atol=tolerance)
    assert_same_buffers(original, chain)
    chain.capture.model.train()


def assert_same_gradients(original: nn.Module, chain: Chain, *, atol: float = 1e-5) -> None:
    """A parameter's gradient is the sum over the stages that hold it under any of its names."""
    named = list(original.named_parameters(remove_duplicate=False))
    for parameter in original.parameters():
        names = {name for name, other in named if other is parameter}
        copies = {
            id(copy): copy
            for stage in chain.stages
            for name, copy in stage.named_parameters(remove_duplicate=False)
            if name in names
        }
        gradients = [copy.grad for copy in copies.values() if copy.grad is not None]
        if parameter.grad is None:
            assert not any(gradient.any() for gradient in gradients), names
        else:
            total = torch.stack(gradients).sum(0)
            torch.testing.assert_close(
                total, parameter.grad, atol=atol, rtol=100 * atol, msg=str(names)
            )


def assert_same_buffers(original: nn.Module, chain: Chain) -> None:
    buffers = dict(original.named_buffers(remove_duplicate=False))
    for stage in chain.stages:
        for name, buffer in stage.named_buffers():
            if name in buffers:
                torch.testing.assert_close(buffer, buffers[name], msg=name)
