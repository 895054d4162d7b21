"""A prediction is what the optimizer would do, and changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.optimizers.param_groups import Joint
from asyncpipe.runtime.optimizers.soap import Soap, Sutskever
from asyncpipe.runtime.staleness.prediction import extrapolate, step_ahead

Make = Callable[[Any], Optimizer]
EXACT: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "sgd with decay": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd without momentum": partial(SGD, lr=0.1, weight_decay=0.1),
    "sgd with nesterov": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sutskever": partial(Sutskever, lr=0.1),
    "sutskever with decay": partial(Sutskever, lr=0.1, weight_decay=0.1),
    "adam": partial(Adam, lr=0.05),
    "adam with decay": partial(Adam, lr=0.05, weight_decay=0.1),
    "adam, fused": partial(Adam, lr=0.05, weight_decay=0.1, fused=True),
    "adamw": partial(AdamW, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1),
}
ABOUT: dict[str, tuple[Make, float]] = {
    # In its bases a first gradient is diagonal, and rounding is what stands beside the diagonal.
    "soap": (partial(Soap, lr=0.05, weight_decay=0.1, refresh_every=1000), 1e-6),
    # The product of its momentums so far is a float32.
    "nadam": (partial(NAdam, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True), 1e-6),
    "nadam with coupled decay": (partial(NAdam, lr=0.05, weight_decay=0.1), 1e-6),
    # Newton and Schulz's iteration computes in bfloat16, which small singular values show: 0.13 is
    # the most that 7,600 draws had.
    "muon": (partial(Muon, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), 0.25),
    "muon without nesterov": (partial(Muon, lr=0.05, nesterov=False), 0.25),
}
OPTIMIZERS = {**{name: (make, 1e-12) for name, make in EXACT.items()}, **ABOUT}


class Trained:
    """Two matrices after some steps with random gradients; the second has had one step fewer."""

    def __init__(self, make: Make, steps: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.random = partial(torch.randn, dtype=torch.float64, generator=generator)
        self.live = {n: nn.Parameter(self.random(4, 3)) for n in ("first", "second")}
        self.optimizer = make(list(self.live.values()))
        for step in range(steps):
            self.live["first"].grad = self.random(4, 3)
            self.live["second"].grad = self.random(4, 3) if step else None
            self.optimizer.step()

    def leaves(self) -> dict[str, Tensor]:
        return {name: torch.full_like(weight, torch.nan) for name, weight in self.live.items()}

    def gradients(self) -> dict[str, Tensor]:
        return {"first": self.random(4, 3)}

    def stepped(self, factors: list[float], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights after the optimizer's own steps on copies."""
        optimizer = deepcopy(self.optimizer)
        weights = optimizer.param_groups[0]["params"]
        base = optimizer.param_groups[0]["lr"]
        for step, factor in enumerate(factors):
            for name, weight in zip(self.live, weights, strict=True):
                arriving = gradients.get(name) if step == 0 else None
                weight.grad = torch.zeros_like(weight) if arriving is None else arriving.clone()
            optimizer.param_groups[0]["lr"] = base * factor
            optimizer.step()
        return dict(zip(self.live, weights, strict=True))


def assert_moved_alike(
    got: dict[str, Tensor], wanted: dict[str, Tensor], live: dict[str, nn.Parameter], within: float
) -> None:
    """The displacements differ by no more than a part of their largest, and by rounding."""
    for name, weight in live.items():
        size = (wanted[name] - weight).abs().max()
        assert (got[name] - wanted[name]).abs().max() <= within * size + 1e-14, name


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=20)
@given(
    taken=st.integers(0, 5),
    factors=st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.5]), min_size=1, max_size=7),
    has_gradient=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_prediction_is_what_the_optimizer_does_with_zero_gradients(
    name: str, taken: int, factors: list[float], has_gradient: bool, seed: int
) -> None:
    make, within = OPTIMIZERS[name]
    trained = Trained(make, taken, seed)
    gradients = trained.gradients() if has_gradient else {}
    leaves = trained.leaves()
    with torch.no_grad():
        step_ahead(trained.optimizer, trained.live, leaves, factors, gradients or None)
    assert_moved_alike(leaves, trained.stepped(factors, gradients), trained.live, within)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_prediction_changes_neither_the_optimizer_nor_weights_nor_gradients(name: str) -> None:
    trained = Trained(OPTIMIZERS[name][0], 3)
    gradients = trained.gradients()
    before = deepcopy((trained.live, gradients, trained.optimizer.state_dict()))
    with torch.no_grad():
        step_ahead(trained.optimizer, trained.live, trained.leaves(), [1.0, 0.5], gradients)
    after = (trained.live, gradients, trained.optimizer.state_dict())
    for old, new in zip(tensors_in(before), tensors_in(after), strict=True):
        assert torch.equal(old, new)


def test_the_next_step_with_all_its_gradient_is_the_next_step_of_muon_to_the_last_bit() -> None:
    make = OPTIMIZERS["muon"][0]
    for nesterov in (True, False):
        trained = Trained(partial(make, nesterov=nesterov), 3)
        gradients, leaves = {n: trained.random(4, 3) for n in trained.live}, trained.leaves()
        with torch.no_grad():
            step_ahead(trained.optimizer, trained.live, leaves, [1.0], gradients)
        assert_moved_alike(leaves, trained.stepped([1.0], gradients), trained.live, 1e-12)


def test_the_parts_of_a_joint_optimizer_are_predicted_each_by_its_own_formula() -> None:
    joint = Trained(lambda p: Joint([Muon(p[:1], lr=0.1), AdamW(p[1:], lr=0.1)]), 3)
    kinds = {"first": Muon, "second": AdamW}
    alone = {name: Trained(partial(kind, lr=0.1), 3) for name, kind in kinds.items()}
    leaves = joint.leaves()
    with torch.no_grad():
        step_ahead(joint.optimizer, joint.live, leaves, [1.0, 1.0])
        for name, trained in alone.items():
            wanted = trained.leaves()
            step_ahead(trained.optimizer, trained.live, wanted, [1.0, 1.0])
            assert torch.equal(leaves[name], wanted[name])


def test_a_weight_that_nobody_steps_is_predicted_to_stay() -> None:
    trained = Trained(lambda parameters: SGD(parameters[:1], lr=0.1, momentum=0.9), 2)
    leaves = trained.leaves()
    with torch.no_grad():
        step_ahead(trained.optimizer, trained.live, leaves, [1.0])
    assert torch.equal(leaves["second"], trained.live["second"])
    assert not torch.equal(leaves["first"], trained.live["first"])


def test_second_moments_that_stay_as_in_ftpipe_make_a_prediction_shorter() -> None:
    def shortening(beta2: float) -> float:
        trained = Trained(partial(Adam, lr=1e-3, betas=(0.9, beta2)), 60)
        exact, leaves = trained.stepped([1.0] * 7, {}), {}
        state = trained.optimizer.state[trained.live["first"]]
        moved = torch.zeros(4, 3, dtype=torch.float64)
        for t in range(61, 68):
            first = 0.9 ** (t - 60) * state["exp_avg"] / (1 - 0.9**t)
            moved += 1e-3 * first / ((state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + 1e-8)
        with torch.no_grad():
            leaves = trained.leaves()
            step_ahead(trained.optimizer, trained.live, leaves, [1.0] * 7)
            assert torch.allclose(leaves["first"], exact["first"], rtol=0, atol=1e-15)
            return float((1 - moved / (trained.live["first"] - leaves["first"])).abs().max())

    assert 0.0005 < shortening(0.999) < 0.0035
    assert 0.05 < shortening(0.95) < 0.16


@pytest.mark.parametrize("kind", ["sgd", "sutskever", "adam", "adamw", "nadam"])
def test_a_line_goes_on_by_the_last_direction_once_for_each_rate(kind: str) -> None:
    trained = Trained(OPTIMIZERS[kind][0], 4)
    near, far = trained.leaves(), trained.leaves()
    with torch.no_grad():
        extrapolate(trained.optimizer, trained.live, near, [1.0])
        extrapolate(trained.optimizer, trained.live, far, [1.0, 1.0, 1.0])
    for name, weight in trained.live.items():
        assert torch.allclose(far[name] - weight, 3 * (near[name] - weight), rtol=1e-12)
    # Without decay the first step without momentum lost is the last step's direction.
    state, options = trained.optimizer.state[trained.live["first"]], trained.optimizer.defaults
    if kind in ("sgd", "sutskever"):
        rate = options["lr"] if kind == "sgd" else 1.0
        wanted = rate * state["momentum_buffer"]
    else:
        beta1, beta2 = options["betas"]
        second = state["exp_avg_sq"] / (1 - beta2**4)
        wanted = options["lr"] * state["exp_avg"] / (1 - beta1**4) / (second.sqrt() + 1e-8)
    moved = trained.live["first"].detach() - near["first"]
    assert torch.allclose(moved, wanted, rtol=1e-10, atol=1e-15)


def test_an_optimizer_without_a_formula_is_refused_with_a_way_out() -> None:
    trained = Trained(partial(Adagrad, lr=0.1), 2)
    with pytest.raises(ScheduleError, match="the steps of Adagrad cannot be predicted"):
        step_ahead(trained.optimizer, trained.live, trained.leaves(), [1.0])
    trained = Trained(OPTIMIZERS["muon"][0], 2)
    with (
        pytest.raises(ScheduleError, match=r"of Muon cannot be predicted.*\n?.*lwp-w"),
        torch.no_grad(),
    ):
        extrapolate(trained.optimizer, trained.live, trained.leaves(), [1.0])


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [t for part in value for t in tensors_in(part)] if isinstance(value, list | tuple) else []
    )
