"""A stage that runs its forward again: the same last bit, buffers updated once, less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.runtime.executor.instrumented import Observer
from asyncpipe.runtime.executor.stage import Stage
from asyncpipe.runtime.rng import GeneratorState
from asyncpipe.runtime.schedule.schedule import Action
from asyncpipe.runtime.staleness.weight_versions import WeightVersions
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.tests.runtime.executor.test_stage import spec
from asyncpipe.tests.support.models.hand_plans import HandModel, chain
from asyncpipe.tests.support.oracles.measured_memory import peak_of_allocations
from asyncpipe.tests.support.processes.executor import lowered, make_pipeline, train_together


class Mixed(nn.Module):
    """Dropout, running statistics, and a buffer that forward reads before it writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.4), nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, a: Tensor) -> Tensor:
        out = self.last(self.drop(torch.relu(self.norm(self.first(a))))) - self.mean + self.table
        with torch.no_grad():
            self.mean.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return out


def train(recompute: Sequence[bool], *, rounds: int = 3) -> dict[str, Any]:
    """Runs a few micro-batches in flight at a time; returns all values seen outside the stage."""
    module = Mixed()
    stage = Stage(module, spec(("a",), ("c",)))
    seen: dict[str, Any] = {"outputs": [], "inputs": []}
    for number in range(rounds):
        batch = range(3 * number, 3 * number + 3)
        for i in batch:
            generator = GeneratorState.seeded(torch.device("cpu"), i)
            a = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
            outputs, _ = stage.forward(
                i, {"a": a}, {}, generator=generator, recompute=recompute[i % len(recompute)]
            )
            seen["outputs"].append(outputs["c"])
            seen["after", i] = generator.state
        for i in batch:
            back = stage.backward(i, {"c": [torch.full((5, 4), 0.1 * (i + 1))]}, loss_divisor=1)
            seen["inputs"].append(back["a"])
    seen["gradients"] = [parameter.grad for parameter in module.parameters()]
    seen["buffers"] = list(module.buffers())
    return seen


@pytest.mark.parametrize("recompute", [[True], [True, False], [False, False, True]])
def test_outputs_gradients_buffers_and_random_numbers_are_those_without(
    recompute: list[bool],
) -> None:
    plain, again = train([False]), train(recompute)
    for what in plain:
        for one, other in zip(plain[what], again[what], strict=True):
            assert torch.equal(one, other), what


def test_statistics_are_updated_once() -> None:
    module = Mixed()
    stage = Stage(module, spec(("a",), ("c",)))
    stage.forward(0, {"a": torch.randn(5, 4)}, {}, recompute=True)
    after = [buffer.clone() for buffer in module.buffers()]
    assert int(module.norm.num_batches_tracked) == 1
    stage.backward(0, {"c": [torch.ones(5, 4)]}, loss_divisor=1)
    for one, other in zip(after, module.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_second_forward_reads_the_version_that_the_first_one_read() -> None:
    seen = []
    for recompute in (False, True):
        module = Mixed()
        stage, versions = Stage(module, spec(("a",), ("c",))), WeightVersions(0, module)
        versions.went_forward(0)
        state = GeneratorState.seeded(torch.device("cpu"), 3)
        inputs = {"a": torch.randn(5, 4, generator=torch.Generator().manual_seed(1))}
        leaves = versions.bind(0, versions.live_view)
        stage.forward(0, inputs, {}, weights=leaves, generator=state, recompute=recompute)
        versions.begin_step()
        with torch.no_grad(), versions.unseen_by_autograd():
            for weight in versions.live.values():
                weight.mul_(3.0)
        ones = {"c": [torch.ones(5, 4)]}
        gradients = stage.backward(0, ones, loss_divisor=1, weights=leaves)
        versions.went_backward(0)
        seen.append([gradients["a"], *(weight.grad for weight in module.parameters())])
    for plain, again in zip(*seen, strict=True):
        assert torch.equal(plain, again)


def test_the_loss_is_made_again_with_what_the_feed_gave() -> None:
    class Head(nn.Linear):
        pass

    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = Head(4, 3)
        stage = Stage(
            module,
            spec(("a",), ("c",)),
            loss_of=lambda outputs, fed: nn.functional.cross_entropy(outputs["c"], fed["target"]),
        )
        a = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        fed = {"target": torch.tensor([0, 1, 2, 0, 1])}
        _, loss = stage.forward(0, {"a": a}, fed, recompute=recompute)
        back = stage.backward(0, {"c": [torch.zeros(5, 3)]}, loss_divisor=4)
        grads.append((loss, back["a"], module.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(10)))


@pytest.mark.parametrize("recompute", [False, True])
def test_only_the_input_is_kept_between_forward_and_backward(recompute: bool) -> None:
    stage = Stage(Deep(), spec(("a",), ("c",)))
    given = [torch.randn(256, 64) for _ in range(4)]
    size = given[0].numel() * 4
    with peak_of_allocations() as peak:
        for i, a in enumerate(given):
            stage.forward(i, {"a": a}, {}, recompute=recompute)
    if recompute:
        assert peak.left < 0.1 * size and peak.num_bytes <= 4 * size
    else:
        assert peak.left >= 4 * 10 * size
    assert stage.in_flight == 4


class Moody(nn.Module):
    """Writes to its buffer from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))
        self.forwards = 0

    def forward(self, a: Tensor) -> Tensor:
        self.forwards += 1
        out = a * self.weight * (self.shift + 1)
        if self.forwards >= 3:
            with torch.no_grad():
                self.shift += 1
        return out


def test_a_buffer_that_begins_to_change_late_is_read_as_it_was() -> None:
    seen = []
    for recompute in (False, True):
        module = Moody()
        stage = Stage(module, spec(("a",), ("c",)))
        for i in range(5):
            stage.forward(i, {"a": torch.ones(2)}, {}, recompute=recompute)
        module.forwards = -100  # so that a second forward is like the first
        for i in range(5):
            stage.backward(i, {"c": [torch.ones(2)]}, loss_divisor=1)
        seen.append((module.shift, module.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_without_the_generators_state_dropout_would_be_another() -> None:
    """Negative control of the comparison above."""
    module = nn.Dropout(0.5)
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        stage = Stage(module, spec(("a",), ("c",)))
        stage.forward(0, {"a": torch.ones(50)}, {}, recompute=recompute)
        found.append(stage.backward(0, {"c": [torch.ones(50)]}, loss_divisor=1)["a"])
    assert not torch.equal(*found)


def test_the_second_forward_begins_before_the_gradient_has_come() -> None:
    model = recomputing(chain(2))
    schedule = lowered(model, "1f1b", 3)
    modules, hub = model.build(), LocalHub(2)
    calls: list[str] = []
    modules[0].register_forward_hook(lambda *_: calls.append("forward"))
    first, last = (make_pipeline(model, schedule, modules, hub.transport(r)) for r in range(2))
    actions: list[str] = []

    class Noting(Observer):
        def on_action(self, action: Action, start_s: float, end_s: float) -> None:
            actions.append(str(action.unversioned))

    steps = first.steps(schedule, model.make_inputs, observer=Noting())
    waiting = next(steps)
    assert waiting.channel.kind == "gradient" and not waiting.ready
    assert actions == ["0F0", "0F1", "0B0"] and len(calls) == 3
    run_together([steps, last.steps(schedule, model.make_inputs)])
    # The last stage goes backward at once, and has nothing to run again.
    assert actions == ["0F0", "0F1", "0B0", "0B0", "0F2", "0B1", "0B1", "0B2", "0B2", "0S1"]
    assert len(calls) == 6


def test_a_stage_that_goes_backward_at_once_runs_its_forward_once() -> None:
    model = recomputing(chain(3))
    for schedule, again in (("1f1b", [4, 4, 0]), ("gpipe", [4, 4, 4]), ("seq", [0, 0, 0])):
        modules = model.build()
        calls: Counter[int] = Counter()
        for j, module in enumerate(modules):
            module.register_forward_hook(lambda *_, j=j, calls=calls: calls.update([j]))
        train_together(model, lowered(model, schedule, 4), modules=modules)
        assert [calls[j] - 4 for j in range(3)] == again


def recomputing(model: HandModel) -> HandModel:
    stages = tuple(replace(stage, recompute=True) for stage in model.plan.stages)
    return replace(model, plan=replace(model.plan, stages=stages))
