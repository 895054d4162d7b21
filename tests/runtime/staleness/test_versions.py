"""Weight versions: copied at a step that overtakes them, bound exactly, and let go."""

import gc
import math
import weakref
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.staleness import METHODS, make_staleness
from asyncpipe.runtime.staleness.weight_versions import WeightVersions
from asyncpipe.tests.support.models.hand_plans import (
    HandModel,
    HandStage,
    chain,
    hand_model,
    regression,
)
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS
from asyncpipe.tests.support.processes.executor import Trained, lowered, train_together


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(model: HandModel, schedule: str, staleness: str, steps: int, step_every: int) -> Trained:
    needs_adam = any("moments" in METHODS[name].needs for name in staleness.split("+"))
    train_by = partial(
        train_together,
        model,
        optimize=OPTIMIZERS["adam"] if needs_adam else sgd,
        staleness=staleness,
    )
    if schedule == "async-1f1b":
        return train_by(lowered(model, schedule, steps * step_every, step_every))
    return train_by(lowered(model, schedule, step_every), segments=steps)


def copies(trained: Trained) -> list[int]:
    return [w.copies_made for pipeline in trained.pipelines for w in pipeline.weights.values()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "seq", "single"])
@pytest.mark.parametrize("staleness", METHODS)
def test_synchronous_schedules_copy_no_weights(schedule: str, staleness: str) -> None:
    assert copies(train(chain(3), schedule, staleness, 3, 4)) == [0, 0, 0]


def test_live_weights_are_never_copied() -> None:
    assert copies(train(chain(3), "async-1f1b", "none", 6, 1)) == [0, 0, 0]


@pytest.mark.parametrize("step_every", [1, 2, 4])
def test_stash_copies_a_version_once_and_only_if_a_step_lies_in_between(step_every: int) -> None:
    trained = train(chain(4), "async-1f1b", "stash", 9, step_every)
    for stage, made in enumerate(copies(trained)):
        straddled = {f for j, _, f, b in trained.ledger if j == stage and b > f}
        assert made == len(straddled)
        weights = trained.pipelines[stage].weights[stage]
        assert weights.copies_held == 0 and not weights.in_flight
        assert weights.ring_size == math.ceil((3 - stage) / step_every)


def test_the_ledger_is_the_closed_form() -> None:
    stages, step_every, steps = 4, 2, 5
    trained = train(chain(stages), "async-1f1b", "stash", steps, step_every)
    assert trained.ledger == {
        (j, i, max(0, i - (stages - 1 - j)) // step_every, i // step_every)
        for j in range(stages)
        for i in range(steps * step_every)
    }


class Layers(nn.Module):
    """The layers whose backward reads the weight through the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(4)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(2)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x @ self.matrix)
        h = self.batch_norm(self.convolution(h[:, None]))
        return self.frozen(self.recurrent(h)[0].sum(1))


def test_a_bound_micro_batch_gets_the_gradients_of_its_own_version() -> None:
    torch.manual_seed(0)
    module, x = Layers().double(), torch.randn(3, 4, dtype=torch.float64)
    module(x).square().sum().backward()
    expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()

    weights = WeightVersions(0, module)
    leaves = weights.bind(0, weights.live_view)
    assert "frozen.weight" not in leaves and "matrix" in leaves
    weights.went_forward(0)
    loss = torch.func.functional_call(module, dict(leaves), (x,)).square().sum()
    weights.begin_step()
    with torch.no_grad():
        for parameter in weights.live.values():
            parameter.mul_(3.0)
    weights.stepped()
    loss.backward()
    entry = weights.went_backward(0)
    assert (entry.forward_version, entry.backward_version, entry.delay) == (0, 1, 1)
    for name, gradient in expected.items():
        assert torch.equal(module.get_parameter(name).grad, gradient), name


def places(tensors: Mapping[str, Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors.values()]


def step(weights: WeightVersions) -> None:
    weights.begin_step()
    weights.stepped()


def test_only_a_step_that_overtakes_a_version_copies_it() -> None:
    weights = WeightVersions(0, nn.Linear(2, 2))
    at_first = places(weights.live)
    first = weights.bind(0, weights.live_view)
    assert weights.bind(1, weights.live_view) is first and places(first) == at_first
    weights.went_forward(0)
    weights.went_forward(1)
    assert (weights.copies_made, weights.copies_held, weights.ring_size) == (0, 0, 0)
    step(weights)
    assert places(first) == at_first and not set(at_first) & set(places(weights.live))
    assert (weights.copies_made, weights.copies_held, weights.ring_size) == (1, 1, 1)
    weights.went_backward(0)
    assert weights.copies_held == 1
    weights.went_backward(1)
    assert weights.copies_held == 0
    second = weights.bind(2, weights.live_view)
    weights.went_forward(2)
    weights.went_backward(2)
    step(weights)  # nothing reads the live weights any more
    assert places(weights.live) == places(second) and weights.copies_made == 1
    weights.bind(3, weights.live_view)
    weights.went_forward(3)
    step(weights)
    assert places(weights.live) == at_first and weights.ring_size == 1


def test_weights_in_one_buffer_of_an_optimizer_stay_there() -> None:
    module = nn.Linear(2, 2)
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    with torch.no_grad():
        module.weight.set_(flat[:4].view(2, 2))
        module.bias.set_(flat[4:])
    weights = WeightVersions(0, module)
    read = weights.bind(0, weights.live_view)
    weights.went_forward(0)
    weights.begin_step()
    flat.zero_()
    weights.stepped()
    assert not any(map(torch.count_nonzero, weights.live.values()))
    assert all(map(torch.count_nonzero, read.values()))


def test_batchnorm_statistics_are_live_and_updated_once_a_micro_batch() -> None:
    for staleness in ("none", "stash", "msnag"):
        trained = train(chain(3, norm=True), "async-1f1b", staleness, 3, 2)
        assert [int(m.norm.num_batches_tracked) for m in trained.modules[:2]] == [6, 6]


class Keeper(nn.Module):
    """Remembers, weakly, what its forwards made."""

    made: list[weakref.ref] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x))
        self.made.append(weakref.ref(hidden))
        return hidden * 2


class Sum(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.sum()


def test_nothing_of_a_micro_batch_is_kept_after_its_backward() -> None:
    model = hand_model(
        [HandStage(Keeper, ("x",), ("h",)), HandStage(lambda: Sum(), ("h",), ("loss",))],
        lambda i: {"x": regression(i)["x"]},
    )
    Keeper.made.clear()
    modules = model.build()
    trained = train_together(
        model, lowered(model, "async-1f1b", 4, 1), staleness="stash", modules=modules
    )
    gc.collect()
    assert len(Keeper.made) == 4 and all(ref() is None for ref in Keeper.made)
    assert trained.pipelines[0].stages[0].in_flight == 0


def test_an_unknown_method_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"'stahs' is not a staleness method.\nDid you mean st"):
        make_staleness("stahs")
    with pytest.raises(ScheduleError, match="For example stash"):
        make_staleness("x")
