"""Recurrent layers of torch are captured for every length, and as quickly for long sequences."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncpipe
from asyncpipe.partitioner.capture.operations import runnable

OPTIONS: tuple[dict[str, Any], ...] = (
    {"batch_first": True},
    {},
    {"num_layers": 2, "dropout": 0.1, "bidirectional": True, "batch_first": True},
    {"bias": False, "bidirectional": True},
)


class Tagger(nn.Module):
    """Scores for each word; the layer may have its sequence in dimension 0."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.layer = kind(6, 5, **options)  # type: ignore[arg-type]
        self.head = nn.LazyLinear(3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        every, last = self.layer(x)
        last = last[0] if isinstance(last, tuple) else last
        if not self.layer.batch_first:
            every = every.transpose(0, 1)
        scores: Tensor = self.head(every) + last.mean()
        return scores


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_plan_holds_for_every_length(
    kind: type[nn.RNNBase], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Tagger(kind, options)
    words = torch.randint(20, (3, 7))
    model(words)
    with warnings.catch_warnings(record=True) as shown:
        plan = asyncpipe.partition(
            model, (words,), stages=2, output=tmp_path / "cut", profile="analytic"
        )
    assert not [warning for warning in shown if "dropout" in str(warning.message)]
    assert plan.inputs[0].shape == ("batch", "sequence")
    stages = asyncpipe.load(tmp_path / "cut")
    for shape in ((3, 7), (2, 23), (4, 2)):
        other = torch.randint(20, shape)
        results = []
        for module in (model, stages):
            torch.manual_seed(1)
            output = module(other)
            output.square().sum().backward()
            gradients = {name: p.grad for name, p in module.named_parameters()}
            results.append((output, gradients))
            module.zero_grad(set_to_none=True)
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "function", "options"),
    [
        *((nn.LSTM, torch.lstm, options) for options in OPTIONS),
        (nn.LSTM, torch.lstm, {"proj_size": 3}),
        *((nn.GRU, torch.gru, options) for options in OPTIONS),
        *((nn.RNN, torch.rnn_tanh, options) for options in OPTIONS),
        (nn.RNN, torch.rnn_relu, {"nonlinearity": "relu"}),
    ],
)
def test_results_without_data_are_laid_out_as_those_with_data(
    kind: type[nn.RNNBase], function: Any, options: dict[str, Any]
) -> None:
    layer = kind(6, 5, **options)  # type: ignore[arg-type]
    batch = 7 if layer.batch_first else 4
    states = torch.zeros(layer.num_layers * (1 + layer.bidirectional), batch, 5)
    hidden = (states[..., : layer.proj_size or 5], states) if kind is nn.LSTM else states
    with FakeTensorMode(allow_non_fake_inputs=True):
        without_data = (
            torch.empty(7, 4, 6, requires_grad=True),
            hidden,
            layer._flat_weights,
            layer.bias,
            layer.num_layers,
            layer.dropout,
            True,
            layer.bidirectional,
            layer.batch_first,
        )
        found = runnable(function, without_data)(*without_data)
    every, last = layer(torch.randn(7, 4, 6, requires_grad=True))
    assert _layout(found) == _layout((every, *(last if isinstance(last, tuple) else (last,))))


def _layout(results: tuple[Tensor, ...]) -> list[Any]:
    return [(each.shape, each.stride(), each.dtype, each.requires_grad) for each in results]
