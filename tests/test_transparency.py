"""The one promise: the pipeline computes the same numbers as the plain model.

For every model, number of stages and synchronous schedule: compares the losses of 20 steps and all
gradients of the first two, dropout on, with those of the usual loop over micro-batches. The stages
are the generated files, the ranks real processes over gloo, and the local transport as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.instrumented import Observer
from asyncpipe.runtime.executor.loading import load_stage
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.rng import micro_batch_seed
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports.gloo import GlooTransport
from asyncpipe.runtime.transports.protocol import LocalHub, run_together
from asyncpipe.tests.support.models.generated import CASES, Case, cut, loss_of
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

STEPS, MICRO_BATCHES, SEED = 8, 4, 7
SCHEDULES = ("gpipe", "1f1b", "seq")
Gradients = dict[tuple[int, str], Tensor]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@cache
def plain(name: str, *, fault: str = "") -> tuple[list[float], Gradients, dict[str, Tensor]]:
    """Losses by micro-batch, gradients of the first two steps, and the final state."""
    torch.set_num_threads(1)
    case = CASES[name]
    model = case.build().train()
    sgd = optimizer(model.parameters())
    losses, gradients = [], {}
    for step in range(1, STEPS + 1):
        sgd.zero_grad()
        for i in range((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES):
            torch.default_generator.manual_seed(micro_batch_seed(SEED, i))
            loss = loss_of(case, model, case.micro_batch(i ^ 1 if fault == "swap" else i))
            (loss / MICRO_BATCHES).backward()
            losses.append(float(loss.detach()))
        if step <= 2:
            gradients |= {
                (step, name): parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        sgd.step()
    return losses, gradients, {name: value.clone() for name, value in model.state_dict().items()}


class Collect(Observer):
    """Losses and early gradients on the way, and the optimizer's steps."""

    def __init__(self, stages: dict[int, torch.nn.Module]) -> None:
        self.stages = stages
        self.optimizers = {j: optimizer(stage.parameters()) for j, stage in stages.items()}
        self.losses: dict[int, float] = {}
        self.gradients: Gradients = {}

    def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        self.losses[micro_batch] = float(loss)

    def on_step(self, stage: int, version: int) -> None:
        if version <= 2:
            for name, parameter in self.stages[stage].named_parameters():
                if parameter.grad is not None:
                    self.gradients[version, name] = parameter.grad.clone()
        self.optimizers[stage].step()


class Rank:
    """One rank's pipeline over a fresh copy of its stages."""

    def __init__(self, case: Case, folder: Path, schedule: str, rank: int, transport: Any) -> None:
        self.case = case
        plan = read_plan(folder)
        count = len(plan.stages)
        made = make_schedule(schedule, stages=count, micro_batches=MICRO_BATCHES)
        self.schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))
        mine = [j for j, owner in enumerate(made.rank_of_stage) if owner == rank]
        self.stages = {j: load_stage(folder, plan, j).train() for j in mine}
        self.collect = Collect(self.stages)
        self.pipeline = Executor(
            plan,
            self.stages,
            transport,
            rank_of_stage=made.rank_of_stage,
            criterion=F.cross_entropy if case.criterion else None,
            seed=SEED,
        )

    def step(self, number: int) -> dict[str, Any]:
        """Arguments of the pipeline's `run` or `steps` for one step."""
        return {
            "schedule": self.schedule,
            "feed": self.case.micro_batch,
            "first_micro_batch": number * MICRO_BATCHES,
            "observer": self.collect,
        }

    def result(self) -> tuple[dict[int, float], Gradients, dict[str, Tensor]]:
        state = {
            name: value
            for stage in self.stages.values()
            for name, value in stage.state_dict().items()
        }
        return self.collect.losses, self.collect.gradients, state


def merged(ranks: list[Any]) -> tuple[list[float], Gradients, dict[str, Tensor]]:
    losses: dict[int, float] = {}
    gradients: Gradients = {}
    state: dict[str, Tensor] = {}
    for rank in ranks:
        assert isinstance(rank, tuple), rank
        losses |= rank[0]
        gradients |= rank[1]
        state |= rank[2]
    return [losses[i] for i in sorted(losses)], gradients, state


def in_one_process(case: Case, folder: Path, schedule: str) -> Any:
    torch.set_num_threads(1)
    world = len(read_plan(folder).stages) if schedule != "single" else 1
    hub = LocalHub(world)
    ranks = [Rank(case, folder, schedule, rank, hub.transport(rank)) for rank in range(world)]
    for number in range(STEPS):
        run_together([rank.pipeline.steps(**rank.step(number)) for rank in ranks])
    return merged([rank.result() for rank in ranks])


def on_a_rank(rank: int, name: str, folder: Path) -> dict[str, Any]:
    """All schedules, one after the other, in one set of processes."""
    results = {}
    for schedule in SCHEDULES:
        mine = Rank(CASES[name], folder, schedule, rank, GlooTransport())
        for number in range(STEPS):
            mine.pipeline.run(**mine.step(number))
        mine.pipeline.close()
        results[schedule] = mine.result()
    return results


def assert_equal(plan: Plan, expected: Any, actual: Any) -> None:
    losses, gradients, state = expected
    got_losses, got_gradients, got_state = actual
    assert got_losses[:MICRO_BATCHES] == losses[:MICRO_BATCHES]  # the forward, to the last bit
    assert got_losses == pytest.approx(losses, rel=2e-4)
    # A tied parameter is told under one name by the plain model, under each holder's by stages.
    owner = {name: shared.names[0] for shared in plan.shared for name in shared.names}
    names = {owner.get(name, name) for _, name in got_gradients}
    assert names == {owner.get(name, name) for _, name in gradients}
    by_owner = {(step, owner.get(name, name)): value for (step, name), value in gradients.items()}
    for (step, name), value in got_gradients.items():
        wanted = by_owner[step, owner.get(name, name)]
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6)
    for name, value in got_state.items():
        torch.testing.assert_close(value, state[name], rtol=2e-3, atol=2e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Path]]:
    made: dict[tuple[str, int], Path] = {}

    def folder(name: str, stages: int) -> Path:
        if (name, stages) not in made:
            place = tmp_path_factory.mktemp(name) / f"{stages}p"
            made[name, stages] = cut(CASES[name], stages, place)
        return made[name, stages]

    yield folder


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [(1, "1f1b"), *product((2, 3, 4), SCHEDULES), (1, "single"), (3, "single")],
)
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_in_one_process_equals_the_plain_model(
    name: str, stages: int, schedule: str, folders: Callable[[str, int], Path]
) -> None:
    folder = folders(name, stages)
    actual = in_one_process(CASES[name], folder, schedule)
    assert_equal(read_plan(folder), plain(name), actual)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_of_processes_equals_the_plain_model(
    name: str, stages: int, folders: Callable[[str, int], Path]
) -> None:
    folder = folders(name, stages)
    ranks = run_processes(stages, on_a_rank, name, folder, limit_s=200)
    for rank in ranks:
        assert isinstance(rank, dict), rank
    expected = plain(name)
    for schedule in SCHEDULES:
        assert_equal(read_plan(folder), expected, merged([rank[schedule] for rank in ranks]))


def test_tied_weights_are_equal_on_both_stages_after_every_step(
    folders: Callable[[str, int], Path],
) -> None:
    folder = folders("gpt2", 3)
    (shared,) = read_plan(folder).shared
    assert shared.stages == (0, 2)
    _, _, state = in_one_process(CASES["gpt2"], folder, "1f1b")
    assert torch.equal(*(state[name] for _, name in shared.holders))


def test_two_swapped_micro_batches_are_seen(folders: Callable[[str, int], Path]) -> None:
    folder = folders("gpt2", 2)
    actual = in_one_process(CASES["gpt2"], folder, "1f1b")
    with pytest.raises(AssertionError):
        assert_equal(read_plan(folder), plain("gpt2", fault="swap"), actual)


def test_gradients_of_the_wrong_scale_are_seen(folders: Callable[[str, int], Path]) -> None:
    folder = folders("mlp", 2)
    losses, gradients, state = in_one_process(CASES["mlp"], folder, "gpipe")
    doubled = {key: 2 * value for key, value in gradients.items()}
    with pytest.raises(AssertionError):
        assert_equal(read_plan(folder), plain("mlp"), (losses, doubled, state))
