"""Each optimizer is its written-out formula, and one of several parts is one optimizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, NAdam, Optimizer

from asyncpipe.runtime.config.settings import RunConfig, Settings
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.optimizers.facts import OPTIMIZERS
from asyncpipe.runtime.optimizers.param_groups import Joint
from asyncpipe.runtime.optimizers.soap import Soap, refresh_periods
from asyncpipe.runtime.training.stage_optimizer import StageOptimizer, make_optimizer
from asyncpipe.tests.support.models.hand_folders import write_text
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY
from asyncpipe.tests.support.run_configs import run_config

Array = np.ndarray


def settings(name: str, **options: object) -> RunConfig:
    chosen = {"optimizer": name, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.25} | options
    return run_config(**chosen)


def gradients(*shape: int, steps: int = 7, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def stepped(
    make: Callable[[list[nn.Parameter]], Optimizer],
    given: Sequence[Tensor],
    start: Tensor | None = None,
    rates: Sequence[float] | None = None,
) -> Tensor:
    """The parameter after steps with these gradients, at these learning rates if given."""
    first = torch.ones_like(given[0]) if start is None else start
    parameter = nn.Parameter(first.clone())
    optimizer = make([parameter])
    for index, gradient in enumerate(given):
        parameter.grad = gradient.clone()
        for group in optimizer.param_groups if rates else ():
            group["lr"] = rates[index]
        optimizer.step()
    return parameter.detach()


def named(name: str) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda parameters: make_optimizer(parameters, settings(name))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_a_complex_parameter_is_stepped_as_its_parts_are(name: str) -> None:
    parts = gradients(3, 2)
    start = torch.ones(3, 2, dtype=torch.float64)
    make = partial(make_optimizer, config=settings(name, weight_decay=0.0))
    as_complex = [torch.view_as_complex(gradient) for gradient in parts]
    found = stepped(make, as_complex, torch.view_as_complex(start))
    close(torch.view_as_real(found), stepped(make, parts, start))


def test_adafactor_refuses_complex_parameters() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(PlanError, match="--optimizer adafactor does not step complex parameters"):
        make_optimizer([parameter], settings("adafactor"))


def test_sutskevers_velocity_is_the_step() -> None:
    rates = [0.1, 0.2, 0.05, 0.4, 0.1, 0.1, 0.3]
    weight, velocity = torch.ones(2, 3, dtype=torch.float64), 0.0
    for rate, gradient in zip(rates, gradients(2, 3), strict=True):
        velocity = 0.9 * velocity + rate * (gradient + 0.25 * weight)
        weight = weight - velocity
    found = stepped(named("sutskever"), gradients(2, 3), None, rates)
    close(found, weight)


def test_sutskevers_steps_are_torchs_until_the_learning_rate_changes() -> None:
    sgd, own = named("sgd"), named("sutskever")
    close(stepped(own, gradients(3, 2)), stepped(sgd, gradients(3, 2)))
    rates = [0.1, 0.01] * 3 + [0.1]
    found, expected = (stepped(make, gradients(3, 2), None, rates) for make in (own, sgd))
    assert (found - expected).abs().max() > 1e-3


def test_momentum_corrected_by_the_change_of_the_learning_rate_would_be_torchs_again() -> None:
    rates = [0.1, 0.2, 0.05, 0.4, 0.1, 0.1, 0.3]
    weight, velocity, before = torch.ones(2, 3, dtype=torch.float64), 0.0, rates[0]
    for rate, gradient in zip(rates, gradients(2, 3), strict=True):
        velocity = 0.9 * rate / before * velocity + rate * (gradient + 0.25 * weight)
        weight, before = weight - velocity, rate
    close(stepped(named("sgd"), gradients(2, 3), None, rates), weight)


def test_nadam_is_dozats_with_decoupled_decay() -> None:
    weight = torch.ones(2, 3, dtype=torch.float64)
    first, second, product = torch.zeros(2, 3), torch.zeros(2, 3), 1.0
    for t, gradient in enumerate(gradients(2, 3), start=1):
        now, ahead = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * at)) for at in (t, t + 1))
        product *= now
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        mean = (1 - now) * gradient / (1 - product) + ahead * first / (1 - product * ahead)
        weight = weight * (1 - 0.1 * 0.25) - 0.1 * mean / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    found = stepped(named("nadam"), gradients(2, 3))
    # torch keeps its products in float32.
    close(found, weight, 1e-6)
    plain = stepped(
        lambda p: NAdam(p, lr=0.1, weight_decay=0.25, decoupled_weight_decay=True), gradients(2, 3)
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("sgd", {"nesterov": True}, lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
        ("adafactor", {}, lambda p: Adafactor(p, lr=0.1)),
        ("adamw", {"eps": 0.5}, lambda p: AdamW(p, lr=0.1, eps=0.5, weight_decay=0.0)),
        ("adam", {"eps": 0.5}, lambda p: Adam(p, lr=0.1, eps=0.5)),
        ("nadam", {"eps": 0.5}, lambda p: NAdam(p, lr=0.1, eps=0.5)),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3), (5,)])
def test_an_option_reaches_torchs_optimizer(
    name: str,
    options: dict[str, Any],
    plain: Callable[[list[nn.Parameter]], Optimizer],
    shape: tuple[int, ...],
) -> None:
    given = gradients(*shape)
    own = settings(name, weight_decay=0.0, **options)
    found = stepped(lambda p: make_optimizer(p, own), given)
    close(found, stepped(plain, given))
    without = settings(name, weight_decay=0.0)
    if options:
        assert not torch.equal(found, stepped(lambda p: make_optimizer(p, without), given))


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    return make_optimizer(parameters, settings("muon"), hidden=parameters)


def test_muon_is_torchs_with_steps_as_large_as_adamws() -> None:
    plain = stepped(
        lambda p: Muon(p, lr=0.1, momentum=0.9, weight_decay=0.25, adjust_lr_fn="match_rms_adamw"),
        gradients(4, 6),
    )
    assert torch.equal(stepped(muon, gradients(4, 6)), plain)


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8)])
def test_a_step_of_muon_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    start = torch.zeros(shape, dtype=torch.float64)
    step = -stepped(muon, gradients(*shape, steps=1), start) / (0.1 * 0.2 * math.sqrt(max(shape)))
    singular = torch.linalg.svdvals(step)
    assert 0.4 < singular.min() and singular.max() < 1.4
    gradient = torch.linalg.svdvals(gradients(*shape, steps=1)[0])
    assert gradient.max() > 2.5


def soap_by_hand(
    weight: Array, given: Sequence[Array], every: int, sides: tuple[bool, bool] = (True, True)
) -> Array:
    """SOAP as in the paper: numpy, eigh at first, rotations written as sums."""
    rate, beta1, beta2, eps, decay = 0.1, 0.9, 0.99, 1e-8, 0.25
    rows, columns = weight.shape
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    left_basis, right_basis = np.eye(rows), np.eye(columns)
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(given):
        left = beta2 * left + (1 - beta2) * g @ g.T
        right = beta2 * right + (1 - beta2) * g.T @ g
        if t == 0:
            left_basis = np.linalg.eigh(left)[1][:, ::-1] if sides[0] else left_basis
            right_basis = np.linalg.eigh(right)[1][:, ::-1] if sides[1] else right_basis
            continue
        if t % every == 0:
            if sides[0]:
                order = np.argsort(-np.diag(left_basis.T @ left @ left_basis), kind="stable")
                square = square[order]
                left_basis = np.linalg.qr(left @ left_basis[:, order])[0]
            if sides[1]:
                order = np.argsort(-np.diag(right_basis.T @ right @ right_basis), kind="stable")
                square = square[:, order]
                right_basis = np.linalg.qr(right @ right_basis[:, order])[0]
        mean = beta1 * mean + (1 - beta1) * g
        seen = np.einsum("ia,ij,jb->ab", left_basis, g, right_basis)
        square = beta2 * square + (1 - beta2) * seen**2
        average = np.einsum("ia,ij,jb->ab", left_basis, mean, right_basis) / (1 - beta1**t)
        step = average / (np.sqrt(square / (1 - beta2**t)) + eps)
        step = np.einsum("ia,ab,jb->ij", left_basis, step, right_basis)
        weight = weight - rate * decay * weight - rate * step
    return weight


def soap(every: int = 10, largest: int = 100) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda p: Soap(
        p, 0.1, betas=(0.9, 0.99), weight_decay=0.25, refresh_every=every, largest=largest
    )


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize(
    ("shape", "sides"),
    [((5, 5), (True, True)), ((3, 6), (True, False)), ((6, 3), (False, True))],
)
def test_soap_is_the_papers(every: int, shape: tuple[int, int], sides: tuple[bool, bool]) -> None:
    given = gradients(*shape, steps=12)
    expected = soap_by_hand(np.ones(shape), [g.numpy() for g in given], every, sides)
    found = stepped(soap(every, largest=5), given)
    close(found, torch.from_numpy(expected), 1e-9)


def test_soap_without_bases_is_adamw() -> None:
    given = gradients(4, 3, steps=20)
    plain = stepped(lambda p: AdamW(p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.25), given)
    close(stepped(soap(largest=2), given), plain)
    assert (stepped(soap(), given) - plain).abs().max() > 1e-2


@pytest.mark.parametrize("every", [1, 4])
def test_turned_gradients_turn_the_steps_of_soap(every: int) -> None:
    """Adam's depend on the axes; that is what late gradients make harmful."""
    given, start = gradients(4, 4, steps=9), torch.zeros(4, 4, dtype=torch.float64)
    left, right = (torch.linalg.qr(g).Q for g in gradients(4, 4, steps=2, seed=5))
    turned = [left @ g @ right.T for g in given]
    straight = left @ stepped(soap(every), given, start) @ right.T
    close(stepped(soap(every), turned, start), straight, 1e-9)
    of_adamw = left @ stepped(soap(largest=1), given, start) @ right.T
    assert (stepped(soap(largest=1), turned, start) - of_adamw).abs().max() > 1e-2


def test_bases_are_orthogonal_and_go_towards_the_eigenvectors() -> None:
    parameter = nn.Parameter(torch.zeros(4, 7, dtype=torch.float64))
    optimizer = soap(every=2)([parameter])
    scales = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)
    for gradient in gradients(4, 7, steps=60):
        parameter.grad = scales[:, None] * gradient
        optimizer.step()
    state = optimizer.state[parameter]
    for side, size in (("left", 4), ("right", 7)):
        basis = state[f"{side}_basis"]
        close(basis.T @ basis, torch.eye(size, dtype=torch.float64))
    seen = state["left_basis"].T @ state["left"] @ state["left_basis"]
    assert (seen - seen.diag().diag()).norm() < 0.05 * seen.norm()
    assert seen.diag().tolist() == sorted(seen.diag().tolist(), reverse=True)


def test_a_gradient_that_is_no_number_ends_in_the_weights_and_not_in_an_error() -> None:
    given = [torch.full((3, 3), math.nan), *(g.float() for g in gradients(3, 3, steps=3))]
    assert stepped(soap(every=2), given).isnan().all()


delays = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(delays, st.integers(1, 200))
def test_stages_share_the_refreshes_by_their_delays(delays: list[int], every: int) -> None:
    periods = refresh_periods(delays, every)
    assert min(periods) >= 1
    # No more refreshes than if every stage had the same, unless rounded up from less than a step.
    assert sum(Fraction(1, period) for period in periods) <= Fraction(len(delays), every)
    for (delay, period), (later, often) in pairwise(sorted(zip(delays, periods, strict=True))):
        assert often <= period if later > delay else often == period
    assert set(refresh_periods([delays[0]] * 3, every)) == {every}


class Layers(nn.Module):
    """Two hidden matrices, one that is not, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    @property
    def hidden(self) -> list[Tensor]:
        return [self.first.weight, self.second.weight]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(self.table(x)))).square().sum()
        return result


def train(layers: Layers, stage: StageOptimizer, steps: int) -> None:
    for _ in range(steps):
        layers(torch.arange(5)).backward()
        stage.step()
        layers.zero_grad()


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_hidden_matrices_and_the_rest_have_each_their_optimizer(name: str) -> None:
    layers = Layers()
    joint = make_optimizer(layers.parameters(), settings(name), hidden=layers.hidden)
    assert isinstance(joint, Joint)
    own, rest = joint.parts
    assert isinstance(own, {"muon": Muon, "soap": Soap}[name]) and isinstance(rest, AdamW)
    found = [group["params"] for group in joint.param_groups]
    vectors = [layers.first.bias, layers.second.bias]
    for group, expected in zip(found, [layers.hidden, [layers.table.weight], vectors], strict=True):
        assert [id(parameter) for parameter in group] == [id(parameter) for parameter in expected]
    assert [group["weight_decay"] for group in joint.param_groups] == [0.25, 0.25, 0.0]


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_each_part_steps_as_it_would_alone(name: str) -> None:
    layers, apart = Layers(), Layers()
    chosen = settings(name, steps=10)
    train(layers, StageOptimizer(layers, chosen, hidden=layers.hidden), 4)
    rest = [one for one in apart.parameters() if all(one is not matrix for matrix in apart.hidden)]
    alone = [
        make_optimizer(apart.hidden, chosen, hidden=apart.hidden),
        make_optimizer(rest, settings("adamw")),
    ]
    for _ in range(4):
        apart(torch.arange(5)).backward()
        for optimizer in alone:
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(layers.parameters(), apart.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_the_learning_rate_of_all_parts_follows_the_schedule() -> None:
    layers = Layers()
    chosen = settings("muon", steps=10, decay="linear")
    stage = StageOptimizer(layers, chosen, hidden=layers.hidden)
    assert isinstance(stage.optimizer, Joint)
    train(layers, stage, 5)
    groups = [group for part in stage.optimizer.parts for group in part.param_groups]
    assert [group["lr"] for group in groups] == pytest.approx([0.05] * 3)
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    layers(torch.arange(5)).backward()
    stage.step(lr_scale=0.0)
    assert all(map(torch.equal, before, layers.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dict_continues_a_run_exactly(name: str) -> None:
    layers, chosen = Layers(), settings(name, steps=10)
    stage = StageOptimizer(layers, chosen, hidden=layers.hidden)
    train(layers, stage, 12)
    assert stage.optimizer is not None
    state, weights = deepcopy((stage.optimizer.state_dict(), layers.state_dict()))
    train(layers, stage, 9)
    again = Layers()
    again.load_state_dict(weights)
    resumed = StageOptimizer(again, chosen, hidden=again.hidden)
    assert resumed.optimizer is not None
    resumed.optimizer.load_state_dict(state)
    train(again, resumed, 9)
    for found, expected in zip(again.parameters(), layers.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_copy_of_a_joint_optimizer_is_whole_and_apart() -> None:
    layers = Layers()
    stage = StageOptimizer(layers, settings("soap", steps=10), hidden=layers.hidden)
    train(layers, stage, 2)
    assert isinstance(stage.optimizer, Joint)
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    copy = deepcopy(stage.optimizer)
    for group in copy.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    copy.step()
    assert all(map(torch.equal, before, layers.parameters()))
    assert copy.parts[0].state is copy.state is copy.parts[1].state
    counts = [int(state["step"]) for state in copy.state.values()]
    assert sorted(counts) == [2, 2, 3, 3, 3] and len(copy.state) == 5


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_a_stage_without_hidden_matrices_is_adamws(name: str) -> None:
    norm = nn.LayerNorm(4)
    optimizer = make_optimizer(norm.parameters(), settings(name))
    assert isinstance(optimizer, AdamW)
    only = nn.Linear(4, 4, bias=False)
    optimizer = make_optimizer(only.parameters(), settings(name), hidden=[only.weight])
    assert isinstance(optimizer, Muon | Soap)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_may_have_its_first_gradient_later(name: str) -> None:
    layers = Layers()
    optimizer = make_optimizer(layers.parameters(), settings(name), hidden=layers.hidden)
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    layers.table(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert sum(map(torch.equal, before, layers.parameters())) == 4
    for _ in range(2):  # the first gradient only gives SOAP its bases
        layers(torch.arange(5)).backward()
        optimizer.step()
    assert not any(map(torch.equal, before, layers.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_lowers_the_loss(name: str, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    given = Settings(
        folder=str(tmp_path / "text"),
        output=str(tmp_path / "run"),
        data=str(tmp_path / "words.txt"),
        schedule="single",
        optimizer=name,
        lr=None if name in ("sgd", "sutskever") else 0.01,
        steps=30,
        micro_batches=1,
        log_every=1,
        threads=1,
    )
    run(given, FACTORY)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    assert losses[-1] < 0.9 * losses[0]
