"""A forward with a memory of its own is refused with the cause; weights given for a call are
exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from asyncpipe.partitioner.verdict import gradients_asked
from asyncpipe.runtime.errors import CaptureError, PlanError
from asyncpipe.tests.support.oracles.generated_equality import assert_same, cut

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))


class Remembers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
        self.how = how
        self.last: Any = None
        self.kept: list[Any] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.how == "tensor":
            if self.last is not None:
                h = h + self.last
            self.last = h.detach()
        if self.how == "list":
            h = h + sum(self.kept)
            self.kept.append(h.detach())
        if self.how == "number":
            self.calls += 1
            h = h / self.calls
        if self.how == "shown":  # for inspection only
            self.last = h
            self.kept.append(h)
            self.calls += 1
        return self.b(h)


@pytest.mark.parametrize(
    ("how", "name", "line"),
    [("tensor", "last", "self.last = h.d"), ("list", "kept", "self.kept.app"),
     ("number", "calls", "self.calls += 1\n            h")],
)  # fmt: skip
def test_what_the_next_call_reads_is_named(how: str, name: str, line: str, tmp_path: Path) -> None:
    model = Remembers(how)
    with pytest.raises(PlanError, match=rf"Remembers stores .* in self\.{name} ") as caught:
        cut(model, {"x": X}, tmp_path)
    assert "test_memory_of_forward.py:" in caught.value.what
    assert model.last is None and model.kept == [] and model.calls == 0


@pytest.mark.parametrize("how", ["tensor", "list", "number"])
def test_training_alone_is_called_twice_as_well(how: str, tmp_path: Path) -> None:
    """No evaluation comes before, so the stages equal the first call."""
    with pytest.raises(PlanError, match="reads it in the next call"):
        cut(Remembers(how), {"x": X}, tmp_path, mode="train")


def test_what_nobody_reads_is_no_memory(tmp_path: Path) -> None:
    assert_same(Remembers("shown"), {"x": X}, tmp_path)


class Prefix(nn.Module):
    """Computes a tuple from a weight and stores it: at every call, or at the first one alone, as
    the adapter of litgpt does."""

    def __init__(self, once: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.ones(16))
        self.once, self.pair = once, ()

    def forward(self, x: Tensor) -> Tensor:
        if not (self.once and self.pair):
            self.pair = (self.weight * 2, {"shift": [self.weight + 1]})
        scale, more = self.pair
        return self.b(torch.tanh(self.a(x)) * scale + more["shift"][0])


def test_a_structure_that_every_call_stores_anew_is_no_memory(tmp_path: Path) -> None:
    assert_same(Prefix(once=False), {"x": X}, tmp_path)


def test_a_result_that_keeps_the_first_call_from_training_again_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Prefix stores a result of one call in self\.pair "):
        cut(Prefix(once=True), {"x": X}, tmp_path)


class Keeps(nn.Module):
    """Stores what the first call computes, and reads it at the same or a smaller length later."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
        self.what, self.length, self.scale = what, 0, nn.Parameter(torch.ones(16))
        self.kept: Any = None
        self.register_buffer("table", torch.zeros(64, 16), persistent=False)

    def positions(self, length: int) -> Tensor:
        """In a buffer, with its length in an attribute, as rotary-embedding-torch has it."""
        if length > self.length:
            made = torch.arange(length)[:, None] * torch.linspace(0.1, 1.0, 16)
            self.table[:length] = made
            self.length = length
            return made
        return self.table[:length].detach()

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "mean of the first inputs":
            if not self.length:
                self.table[0, :12].copy_(x.mean((0, 1)))
                self.length = 1
            x = x - self.table[0, :12]
        h = torch.tanh(self.a(x))
        if self.what == "table":
            h = h + self.positions(x.shape[1]).sin() + self.positions(x.shape[1]).cos()
        if self.what == "mask":
            if self.kept is None or self.kept.shape[0] < x.shape[1]:
                self.kept = torch.ones(x.shape[1], x.shape[1]).tril()
            h = self.kept[: x.shape[1], : x.shape[1]] @ h
        if self.what == "norm of a weight":
            if self.kept is None:
                self.kept = self.scale.detach().norm()
            h = h * self.scale / self.kept
        if self.what == "scale by the first data":
            if not self.length:
                self.scale.data.copy_(1 / h.detach().std((0, 1)))
                self.length = 1
            h = h * self.scale
        if self.what == "mean of the first data":
            if not self.length:
                self.table[0].copy_(h.detach().mean((0, 1)))
                self.length = 1
            h = h - self.table[0]
        return self.b(h)


@pytest.mark.parametrize("what", ["table", "mask"])
@pytest.mark.parametrize("mode", ["both", "train"])
def test_what_each_call_would_compute_again_is_no_memory(
    what: str, mode: str, tmp_path: Path
) -> None:
    model = Keeps(what)
    pipe = cut(model, {"x": torch.randn(4, 10, 12)}, tmp_path, sequence_dim=1, mode=mode)
    for length in (10, 7, 16, 12):
        x = torch.randn(3, length, 12)
        torch.testing.assert_close(pipe.train()(x), model.train()(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "what",
    [
        "norm of a weight", "scale by the first data", "mean of the first data",
        "mean of the first inputs",
    ],
)  # fmt: skip
def test_a_result_that_other_weights_or_data_change_is_memory(what: str, tmp_path: Path) -> None:
    """The first call computes it for all; a stage would compute it in every call."""
    with pytest.raises(PlanError, match=r"Keeps stores a result of one call in self\.\w+ "):
        cut(Keeps(what), {"x": torch.randn(4, 10, 12)}, tmp_path)


class Positions(nn.Module):
    """A table in a buffer, with its length in an attribute, as rotary-embedding-torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 12), persistent=False)
        self.rates, self.length = nn.Parameter(torch.rand(12), requires_grad=False), 0

    def forward(self, length: int) -> Tensor:
        if self.length >= length:
            return self.table[:length]
        made = torch.arange(length)[:, None] * self.rates
        self.table[:length] = made
        self.length = length
        return made


class Averages(nn.BatchNorm1d):
    """Keeps running averages by operations of its own, and normalizes by them."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        if self.training:
            with torch.no_grad():
                self.running_mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x - self.running_mean


class Turns(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.lin = shared, nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        given = x.shape[1] if isinstance(self.shared, Positions) else x
        return self.lin(x) * self.shared(given).cos() + self.shared(given).sin()


class Holders(nn.Module):
    """Blocks that all hold one module, both on their own and in their layer."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"shared": shared, "turns": Turns(shared)}) for _ in range(3)
        )
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["turns"](x)
        return self.head(x)


@pytest.mark.parametrize("kind", [Positions, partial(Averages, 12)])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_buffer_that_several_modules_hold_and_change_is_one(
    kind: Callable[[], nn.Module], stages: int, tmp_path: Path
) -> None:
    assert_same(Holders(kind()), {"x": torch.randn(4, 10, 12)}, tmp_path, stages)


def test_a_table_with_its_length_asks_for_no_gradients() -> None:
    """Each of the two calls that are compared starts with the buffer and the attribute as new."""
    table = Positions()

    def call(gradients: bool) -> dict[str, Tensor]:
        with torch.set_grad_enabled(gradients):
            table.table.zero_()
            return {"made": table(10).clone()}

    assert gradients_asked(table, call) is None
    assert table.length == 0


class Seeds(nn.Module):
    def __init__(self, how: Callable[[], Any]) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(12, 16), nn.Linear(16, 4), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.how()
        return self.b(h + torch.rand_like(h))


def _forked() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.rand(2)


@pytest.mark.parametrize(
    "how",
    [
        lambda: torch.manual_seed(0),
        lambda: torch.random.manual_seed(0),
        torch.seed,
        _forked,
        lambda: torch.set_rng_state(torch.get_rng_state()),
    ],
)
def test_seeds_inside_forward_are_refused_with_the_line(
    how: Callable[[], Any], tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match="test_memory_of_forward.py:.* generator inside forward"):
        cut(Seeds(how), {"x": X}, tmp_path)
    assert isinstance(torch.random.default_generator, torch.Generator)


class Adapter(nn.Module):
    """A torch.nn module that is called with other weights than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.Linear(12, 16), nn.Linear(16, 4)
        self.delta = nn.Parameter(torch.zeros(16, 12))

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.net.weight + self.delta, "bias": self.net.bias}
        return self.out(torch.relu(functional_call(self.net, weights, (x,))))


class Averaged(nn.Module):
    """Buffers that follow the weights, and are used in their place in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        for name, value in self.net.named_parameters():
            self.register_buffer("ema_" + name.replace(".", "_"), value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        names = [name for name, _ in self.net.named_parameters()]
        if self.training:
            with torch.no_grad():
                for name, value in self.net.named_parameters():
                    self.get_buffer("ema_" + name.replace(".", "_")).lerp_(value, 0.1)
            return self.net(x)
        average = {name: self.get_buffer("ema_" + name.replace(".", "_")) for name in names}
        return functional_call(self.net, average, (x,))


@pytest.mark.parametrize("build", [Adapter, Averaged])
@pytest.mark.parametrize("stages", [1, 2])
def test_weights_given_for_a_call_are_those_that_count(
    build: type[nn.Module], stages: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build()
    pipe = cut(model, {"x": X}, tmp_path, stages)
    trained = {name: v + 0.3 * torch.randn_like(v) for name, v in model.state_dict().items()}
    model.load_state_dict(trained)
    pipe.load_state_dict(trained)
    for training in (False, True, False):
        model.train(training)
        pipe.train(training)
        torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=0)
