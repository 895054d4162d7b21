"""The two modes are one graph only where their structure says so, never because of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncpipe.partitioner.capture import capture, modes
from asyncpipe.runtime.errors import CaptureError
from asyncpipe.tests.support.oracles.generated_equality import cut

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))


class MeanTeacher(nn.Module):
    """An average of a copy that is still equal to what it copies."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            if self.training:
                for average, now in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    average.mul_(0.99).add_(now, alpha=0.01)
            z = self.teacher(x)
        return torch.stack([y, z])


class Noise(nn.Module):
    """StyleGAN's noise, with a weight that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            hidden = hidden + self.weight * torch.randn_like(hidden)
        return self.last(torch.relu(hidden))


class Depth(nn.Module):
    """Stochastic depth of a branch before a head that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        branch = self.branch(hidden)
        if self.training:
            branch = branch / 0.5 * torch.floor(torch.rand(x.shape[0], 1) + 0.5)
        return self.last(hidden + branch)


def test_a_graph_with_branches_is_compared_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    branched = modes.branched

    def faulty(*given: Any) -> Any:
        graph, calls = branched(*given)
        for node in graph.find_nodes(op="call_function", target=torch.relu):
            node.target = torch.tanh
        return graph, calls

    monkeypatch.setattr(modes, "branched", faulty)
    with pytest.raises(CaptureError, match="is not the model"):
        capture(Noise(), {"x": X}, check=False)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("build", [MeanTeacher, Noise, Depth])
def test_what_changes_no_number_yet_stays_in_its_mode(
    build: Callable[[], nn.Module], stages: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build()
    pipe = cut(copy.deepcopy(model), {"x": X}, tmp_path, stages)
    trained = {
        name: value + 0.3 * torch.randn_like(value) for name, value in model.state_dict().items()
    }
    model.load_state_dict(trained)
    pipe.load_state_dict(trained)
    for training in (False, True, False):
        model.train(training)
        pipe.train(training)
        torch.manual_seed(1)
        expected = model(X)
        torch.manual_seed(1)
        torch.testing.assert_close(pipe(X), expected, rtol=0, atol=0)
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


class Reads(nn.Module):
    """Which parameter is read first differs by mode, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.b.float()
        return x * self.a + self.b


def test_the_order_of_first_reads_is_no_difference() -> None:
    captured = capture(Reads(), {"x": X})
    assert not any(node.meta["regions"] for node in captured.graph.nodes)


class Tables(nn.Module):
    """Data from outside, another in each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        data = [1.0, 2.0] if self.training else [3.0, 4.0]
        return self.linear(x) + torch.from_numpy(np.array(data, dtype=np.float32))


def test_other_data_in_each_mode_is_a_difference(tmp_path: Path) -> None:
    model = Tables()
    pipe = cut(model, {"x": X}, tmp_path, 1)
    for training in (True, False):
        pipe.train(training)
        assert torch.equal(pipe(X), model.train(training)(X))
