"""Models whose batch is not dimension 0 trained by the command's loop: equal to the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.task import SampleOrder, laid_out
from asyncpipe.runtime.errors import AsyncPipeError, DataError
from asyncpipe.runtime.experiments.trial import train_alone
from asyncpipe.tests.support.models.batch_dimensions import edges, example

DATA = """
import torch


def samples():
    torch.manual_seed(5)
    made = [{made} for _ in range(12)]
    return made, made[:2]
"""
TIME_FIRST = "{'src': torch.randn(7, 5), 'target': torch.randn(7, 3)}"
GRAPH = (
    "{'x': torch.randn(9, 5), 'edge_index': torch.randint(9, (2, 20)), 'target': torch.randn(9, 3)}"
)


def made_data(folder: Path, made: str) -> str:
    file = folder / "own.py"
    file.write_text(DATA.replace("{made}", made))
    return f"{file}:samples"


def plain(model: nn.Module, samples: list[Any], steps: list[list[int]], stack: int | None) -> float:
    """The evaluation loss after a plain loop; a step is the mean over its micro-batches' losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(indices: list[int]) -> Tensor:
        def field(name: str) -> Tensor:
            tensors = [samples[index][name] for index in indices]
            return tensors[0] if stack is None else torch.stack(tensors, stack)

        inputs = {name: field(name) for name in samples[0] if name != "target"}
        return nn.functional.mse_loss(model(**inputs), field("target"))

    for step in steps:
        size = 1 if stack is None else 2
        parts = [step[first : first + size] for first in range(0, len(step), size)]
        optimizer.zero_grad()
        for part in parts:
            (loss_of(part) / len(parts)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(sum(loss_of([index]) for index in (0, 1)) / 2)


@pytest.mark.parametrize(
    ("name", "made", "stack"), [("time_first", TIME_FIRST, 1), ("graph", GRAPH, None)]
)
def test_training_equals_the_plain_loop(
    name: str, made: str, stack: int | None, tmp_path: Path
) -> None:
    model, inputs = example(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    if name == "graph":
        model = NoDropout(model)
    data = made_data(tmp_path, made)
    asyncpipe.partition(
        model, inputs, stages=2, output=tmp_path / "made", profile="analytic", loss="mse"
    )
    size = 2 if stack is not None else 1
    settings = Settings(
        folder=str(tmp_path / "made"),
        data=data,
        steps=3,
        micro_batches=4 // size,
        micro_batch_size=size,
        optimizer="sgd",
        momentum=0.0,
        lr=0.05,
        decay="none",
        warmup=0,
        weight_decay=0.0,
        schedule="single",
        eval_every=3,
        eval_batches=2 // size,
    )
    curve = train_alone(settings, tmp_path / "run")
    namespace: dict[str, Any] = {}
    exec((tmp_path / "own.py").read_text(), namespace)
    samples, _ = namespace["samples"]()
    order = SampleOrder(len(samples), settings.seed)
    steps = [order.samples(4 * step, 4) for step in range(3)]
    assert curve.evaluated[-1] == pytest.approx(plain(model.train(), samples, steps, stack), 1e-5)


class NoDropout(nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.first, self.last = network.first, network.last

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x, edge_index)), edge_index)


def test_a_micro_batch_of_a_model_without_a_batch_is_one_example(tmp_path: Path) -> None:
    model, inputs = example("graph")
    asyncpipe.partition(
        model, inputs, stages=2, output=tmp_path / "made", profile="analytic", loss="mse"
    )
    settings = Settings(
        folder=str(tmp_path / "made"), data=made_data(tmp_path, GRAPH), steps=1, micro_batch_size=2
    )
    with pytest.raises(AsyncPipeError, match="a micro-batch of 2 samples, but .* has no batch"):
        train_alone(settings, tmp_path / "run")


def test_what_all_samples_have_in_common_has_to_be_equal() -> None:
    graph = edges(4, 6)
    values = {"x": torch.randn(3, 4, 5), "adjacency": torch.stack([graph] * 3)}
    dims = {"x": 1, "adjacency": None}
    made = laid_out(values, dims)
    assert made["x"].shape == (4, 3, 5) and torch.equal(made["adjacency"], graph)
    values["adjacency"][1, 0, 0] += 1
    with pytest.raises(DataError, match="adjacency has no batch in the model, but differs"):
        laid_out(values, dims)
