"""Captures for tests, compared with their models: outputs, gradients, buffers, to the last bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from asyncpipe.partitioner.capture import Capture, capture, run
from asyncpipe.partitioner.capture.arguments import plain_structure, tensors_in
from asyncpipe.partitioner.capture.model_state import without_cache
from asyncpipe.partitioner.capture.sizes import dynamic_of, resized
from asyncpipe.tests.support.models import zoo


def other_sizes(captured: Capture, inputs: dict[str, Any], **sizes: int) -> dict[str, Any]:
    return resized(inputs, dynamic_of(captured.inputs), {**captured.sizes, **sizes})


def observe(
    model: nn.Module, training: bool, forward: Callable[[], Any]
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients of the loss or of a weighted sum of outputs, and buffers after it."""
    model.train(training)
    torch.manual_seed(5)
    with without_cache(model):
        output = plain_structure(forward())
    outputs = list(tensors_in(output))
    model.zero_grad(set_to_none=True)
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else None
    if loss is None:
        loss = sum(
            (o * torch.arange(o.numel()).cos().view(o.shape)).sum()
            for o in outputs
            if o.requires_grad
        )
    if isinstance(loss, Tensor):
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return [o.detach() for o in outputs], gradients, buffers


def assert_graph_is_model(captured: Capture, inputs: dict[str, Any]) -> None:
    """To the last bit: outputs, gradients and buffers, in both modes."""
    mode = captured.model.training
    for training in (True, False):
        plain, traced = copy.deepcopy(captured.model), captured.model
        before = copy.deepcopy(traced.state_dict())
        given = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
            for _ in range(2)
        ]
        expected = observe(plain, training, functools.partial(plain, **given[0]))
        traced_run = functools.partial(run, captured, given[1], training=training)
        found = observe(traced, training, traced_run)
        assert len(expected[0]) == len(found[0])
        for one, other in zip(expected[0], found[0], strict=True):
            assert torch.equal(one, other)
        for one_by_name, other_by_name in zip(expected[1:], found[1:], strict=True):
            assert one_by_name.keys() == other_by_name.keys()
            for name, value in one_by_name.items():
                assert torch.equal(value, other_by_name[name]), name
        traced.load_state_dict(before)
        traced.zero_grad(set_to_none=True)
        traced.train(mode)


def checked(model: nn.Module, **inputs: Any) -> Capture:
    """The capture of a model, compared with the model at its own and at another batch size."""
    captured = capture(model, inputs)
    assert_graph_is_model(captured, inputs)
    assert_graph_is_model(captured, other_sizes(captured, inputs, batch=7))
    return captured


@functools.cache
def of_zoo(name: str) -> Capture:
    """The capture of a zoo model, made once for the tests that only look at it."""
    return capture(*zoo.ZOO[name](), check=False)


def targets(captured: Capture) -> list[Any]:
    return [node.target for node in captured.graph.nodes]


def node_of(captured: Capture, target: Any) -> fx.Node:
    (node,) = [node for node in captured.graph.nodes if node.target == target]
    return node


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
