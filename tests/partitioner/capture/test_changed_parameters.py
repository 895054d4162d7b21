"""Parameters that a forward changes are changed by the stage that holds them, and the caller's
model comes out of everything with the bits that it had."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.partitioner.capture import capture, model_state
from asyncpipe.partitioner.capture.check import check_capture
from asyncpipe.partitioner.capture.model_state import (
    Noise,
    UnfitNoise,
    moved,
    verify_finite,
    working_copies,
)
from asyncpipe.partitioner.profile.cache import threads_set
from asyncpipe.partitioner.verify import verify
from asyncpipe.runtime.errors import CaptureError, PlanError
from asyncpipe.runtime.plan.plan import read_plan

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))


class Momentum(nn.Module):
    """An encoder that follows another one."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        nn.init.normal_(self.k[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for now, average in zip(self.q.parameters(), self.k.parameters(), strict=True):
                average.mul_(0.9).add_(now, alpha=0.1)
        return self.q(x) * self.k(x)


class Codebook(nn.Module):
    """A codebook that is a parameter and follows what is looked up in it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(8, 4)
        self.codes = nn.Parameter(torch.randn(6, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        nearest = torch.cdist(h, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            chosen = F.one_hot(nearest, 6).float()
            with torch.no_grad():
                mean = chosen.T @ h / chosen.sum(0).clamp(min=1).unsqueeze(1)
                self.codes.data.mul_(0.9).add_(mean, alpha=0.1)
        return self.decode(h + (found - h).detach())


class Normed(nn.Module):
    """EDM2: training normalises the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            if self.training:
                with torch.no_grad():
                    layer.weight.copy_(F.normalize(layer.weight, dim=1))
            x = torch.relu(layer(x))
        return x


class Untidy(nn.Module):
    """Leaves attributes, lists, numbers and random states behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.seen: list[int] = []
        self.last: Any = None
        self.table = torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(self.a(x) * self.table, 0.1, self.training)
        self.seen.append(1)
        self.last = h
        return self.c(torch.relu(self.b(h)))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a caller can see of a model, and the numbers that would be drawn next."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "memory": [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())],
        "objects": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "attributes": {
            path: {name: copy.copy(value) for name, value in vars(module).items()}
            for path, module in model.named_modules()
        },
        "random": (torch.get_rng_state().clone(), random.getstate(), np.random.get_state()[1]),
    }


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other)
    else:
        assert one is other or one == other


def prepared(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    first, *others = model.parameters()
    first.grad = torch.full_like(first, 0.5)
    others[-1].requires_grad_(False)
    list(model.modules())[-1].eval()
    return model


MODELS = [Momentum, Codebook, Normed, Untidy]


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("stages", [2, 4])
def test_the_caller_keeps_what_it_had(
    build: Callable[[], nn.Module], stages: int, tmp_path: Path
) -> None:
    model = prepared(build)
    before = snapshot(model)
    asyncpipe.partition(model, {"x": X}, stages=stages, output=tmp_path / "cut", profile="analytic")
    assert_equal(snapshot(model), before)
    pipe = asyncpipe.load(tmp_path / "cut")
    assert_equal(dict(pipe.state_dict()), before["state"])


def test_the_caller_of_a_large_model_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the parameters of a large model that forward changes are copied."""
    monkeypatch.setattr(model_state, "MOST_BYTES", 0)
    monkeypatch.setattr(model_state, "SMALL", 0)
    model = prepared(Momentum)
    before = snapshot(model)
    asyncpipe.partition(model, {"x": X}, stages=2, output=tmp_path / "cut", profile="analytic")
    assert_equal(snapshot(model), before)


def test_profiles_captures_and_outlines_leave_the_caller_what_it_had(tmp_path: Path) -> None:
    model = prepared(Codebook)
    before = snapshot(model)
    capture(model, {"x": X})
    assert_equal(snapshot(model), before)
    asyncpipe.outline(model, {"x": X})
    assert_equal(snapshot(model), before)
    asyncpipe.partition(
        model, {"x": X}, stages=2, output=tmp_path / "cut", profile="measured", no_cache=True
    )
    assert_equal(snapshot(model), before)


class Raises(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ValueError("after all")


def test_an_error_leaves_the_caller_what_it_had(tmp_path: Path) -> None:
    model = prepared(Raises)
    before = snapshot(model)
    with pytest.raises(Exception, match="after all"):
        asyncpipe.partition(model, {"x": X}, stages=2, output=tmp_path / "cut")
    assert_equal(snapshot(model), before)


@pytest.mark.parametrize("build", [Momentum, Codebook, Normed])
@pytest.mark.parametrize("stages", [2, 4])
def test_changed_parameters_are_those_of_the_model(
    build: Callable[[], nn.Module], stages: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build()
    asyncpipe.partition(model, {"x": X}, stages=stages, output=tmp_path / "cut", profile="analytic")
    pipe = asyncpipe.load(tmp_path / "cut")
    for training in (True, False, True):
        model.train(training)
        pipe.train(training)
        expected, found = model(X), pipe(X)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        expected.square().sum().backward()
        found.square().sum().backward()
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0, msg=name)
    gradients = {name: p.grad for name, p in pipe.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)


class Gated(nn.Module):
    """No number and no gradient of it shows what the gate hides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
        self.gate = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] + self.gate * self.b(torch.relu(self.a(x)))


def test_a_fault_behind_a_gate_of_zero_is_seen(tmp_path: Path) -> None:
    model = Gated()
    asyncpipe.partition(model, {"x": X}, stages=2, output=tmp_path / "cut", profile="analytic")
    stage = next(
        path for path in sorted((tmp_path / "cut").glob("stage_*.py")) if "relu" in path.read_text()
    )
    stage.write_text(stage.read_text().replace("torch.relu(", "torch.tanh("))
    with pytest.raises(PlanError, match="differs from the original's"):
        verify(model, read_plan(tmp_path / "cut"), tmp_path / "cut", {"x": X})


def test_a_fault_of_a_graph_behind_a_gate_of_zero_is_seen() -> None:
    captured = capture(Gated(), {"x": X})
    (relu,) = captured.graph.find_nodes(op="call_function", target=torch.relu)
    relu.target = torch.tanh
    with pytest.raises(CaptureError, match="output 0 differs"):
        check_capture(captured, {"x": X})


def test_a_change_that_only_the_next_call_would_read_is_compared(tmp_path: Path) -> None:
    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
            self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            out = self.b(self.a(x)) + self.scale
            with torch.no_grad():
                self.scale.mul_(0.9)
            return out

    model = Follows()
    asyncpipe.partition(model, {"x": X}, stages=2, output=tmp_path / "cut", profile="analytic")
    stage = tmp_path / "cut" / "stage_1.py"
    assert "mul_(0.9)" in stage.read_text()
    stage.write_text(stage.read_text().replace("mul_(0.9)", "mul_(0.8)"))
    with pytest.raises(PlanError, match="the parameter scale of the generated stages differs"):
        verify(model, read_plan(tmp_path / "cut"), tmp_path / "cut", {"x": X})


def test_a_model_that_does_not_run_with_other_numbers_is_compared_with_its_own(
    tmp_path: Path,
) -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
            self.register_buffer("places", torch.full((16,), 15.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)[:, self.places.mul(1).long()])

    model = Strict()
    asyncpipe.partition(model, {"x": X}, stages=2, output=tmp_path / "cut", profile="analytic")
    verified = verify(model, read_plan(tmp_path / "cut"), tmp_path / "cut", {"x": X})
    assert verified.noise is Noise.PARAMETERS and "with the original buffers" in verified.summary
    assert torch.equal(model.get_buffer("places"), torch.full((16,), 15.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_seen(number: float, dtype: torch.dtype) -> None:
    usual = torch.linspace(-1, 1, 1000).to(dtype)
    whole = [
        usual,
        torch.zeros(0, 3),
        torch.arange(3),
        torch.tensor(torch.finfo(dtype).max, dtype=dtype),
    ]
    verify_finite(whole)
    usual[17] = number
    with pytest.raises(UnfitNoise):
        verify_finite(whole)


def test_noise_keeps_what_must_stay() -> None:
    spread = torch.tensor([1.0, -2.0, float("-inf"), torch.finfo(torch.float32).min])
    found = moved(spread, 0)
    assert torch.equal(found[2:], spread[2:]) and not torch.equal(found[:2], spread[:2])
    unknown = torch.tensor([float("nan"), 0.0])
    assert bool(moved(unknown, 0)[0].isnan()) and moved(unknown, 0)[1] != 0
    positive = torch.tensor([0.0, 1e-6, 3.0, 40.0])
    found = moved(positive, 1)
    assert found[0] == 0 and bool((found[1:] > 0).all()) and bool((found[1:] != positive[1:]).all())
    assert bool((moved(torch.zeros(9), 2) != 0).all())
    assert bool((moved(torch.zeros(9), 2, any_sign=False) > 0).all())
    whole = torch.arange(3)
    assert torch.equal(moved(whole, 3), whole)
    assert torch.equal(moved(positive, 1), moved(positive, 1))
    turned = torch.tensor([1 - 2j, 3j]).conj()
    parts = torch.view_as_real(moved(turned, 4)), torch.view_as_real(turned.resolve_conj())
    assert bool(((parts[0] != parts[1]) | (parts[1] == 0)).all())
    half = torch.zeros(5, dtype=torch.bfloat16)
    assert moved(half, 4).dtype == torch.bfloat16 and bool((moved(half, 4) != 0).all())


def test_copies_are_given_back_with_the_memory_of_the_caller() -> None:
    model = prepared(Momentum)
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), working_copies(model, Noise.ALL) as copies:
        assert model.q[0].weight.data_ptr() not in before["memory"]
        with torch.no_grad():
            model.q[0].weight.zero_()
        assert copies.changed().keys() == {"q.0.weight"}
        copies.reset()
        assert not copies.changed()
        raise ZeroDivisionError
    assert_equal(snapshot(model), before)


def test_tensors_shared_out_over_threads_get_the_same_noise_and_show_the_same_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Momentum()
    with working_copies(model, Noise.ALL) as copies:
        noisy = snapshot(model)["state"]
        model(X)
        changed = copies.changed()
    monkeypatch.setattr(model_state, "_WORTH_THREADS", 0)
    with threads_set(3), working_copies(model, Noise.ALL) as copies:
        assert_equal(snapshot(model)["state"], noisy)
        model(X)
        assert (
            copies.changed().keys()
            == changed.keys()
            == {f"k.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")}
        )
        assert_equal(copies.changed(), changed)
        copies.reset()
        assert_equal(snapshot(model)["state"], noisy)
        assert torch.get_num_threads() == 3
