"""What other pipelines get wrong, each held against the plain model's loop over micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.executor.executor import Executor
from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
from asyncpipe.runtime.executor.stage import StageError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.schedule.builders import SYNCHRONOUS, make_schedule
from asyncpipe.runtime.schedule.dependencies import lower
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.tests.runtime.executor.test_executor import assert_same, assert_same_losses
from asyncpipe.tests.support.models.hand_plans import (
    WIDTH,
    Block,
    HandModel,
    HandStage,
    Loss,
    chain,
    hand_model,
    regression,
    skips,
    tied,
)
from asyncpipe.tests.support.oracles.async_simulation import plain_losses_and_gradients
from asyncpipe.tests.support.processes.executor import (
    Seen,
    lowered,
    make_pipeline,
    on_ranks,
    train_together,
    with_split_backwards,
)

SPLITS = ("gpipe", "1f1b", "1f1b with W", "single")


def scheduled(model: HandModel, name: str, micro_batches: int) -> Any:
    base, _, split = name.partition(" with ")
    schedule = lowered(model, base, micro_batches)
    return with_split_backwards(schedule, model, behind=1) if split else schedule


# Accumulation over several calls


@pytest.mark.parametrize("schedule", SPLITS)
def test_gradients_of_two_calls_before_a_step_are_added_and_not_scaled_again(schedule: str) -> None:
    model = tied(3)
    made = scheduled(model, schedule, 4)
    modules, hub = model.build(), LocalHub(len(made.ranks))
    seen = Seen(dict(enumerate(modules)))
    ranks = range(len(made.ranks))
    pipelines = [make_pipeline(model, made, modules, hub.transport(rank)) for rank in ranks]
    for first, step in ((0, False), (4, True)):
        run_together(
            [
                pipeline.steps(
                    made, model.make_inputs, first_micro_batch=first, step=step, observer=seen
                )
                for pipeline in pipelines
            ]
        )
    plain = model.build()
    plain_losses_and_gradients(model, plain, range(4))
    _, expected = plain_losses_and_gradients(model, plain, range(4, 8))
    summed = expected[0, "table.weight"] + expected[2, "out.weight"]
    expected[0, "table.weight"] = expected[2, "out.weight"] = summed
    assert seen.steps and {version for _, version in seen.steps} == {1}
    assert_same(seen.gradients[1], expected)


def test_an_asynchronous_schedule_cannot_be_run_without_its_steps() -> None:
    model = chain(2)
    schedule = lowered(model, "async-1f1b", 4, 2)
    pipeline = make_pipeline(model, schedule, model.build(), LocalHub(2).transport(0))
    with pytest.raises(ScheduleError, match="cannot run without steps"):
        pipeline.run(schedule, regression, step=False)


# Batch norm


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SPLITS)
def test_batch_norm_is_updated_once_a_micro_batch_and_never_before(
    schedule: str, recompute: bool
) -> None:
    model = chain(3, norm=True)
    if recompute:
        model = recomputing(model)
    made = scheduled(model, schedule, 4)
    modules, hub = model.build(), LocalHub(len(made.ranks))
    for rank in range(len(made.ranks)):
        make_pipeline(model, made, modules, hub.transport(rank))
    norms = [module.norm for module in modules[:2]] + [modules[2].block.norm]
    assert [int(norm.num_batches_tracked) for norm in norms] == [0, 0, 0]
    train_together(model, made, modules=modules)
    assert [int(norm.num_batches_tracked) for norm in norms] == [4, 4, 4]
    plain = model.build()
    plain_losses_and_gradients(model, plain, range(4))
    for one, other in zip(modules, plain, strict=True):
        assert_same(buffers_of(one), buffers_of(other))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SPLITS)
def test_on_request_batch_norm_is_updated_once_a_mini_batch_as_if_it_were_one_batch(
    schedule: str, recompute: bool, momentum: float | None
) -> None:
    model = chain(3, norm=True)
    if recompute:
        model = recomputing(model)
    modules, plain = model.build(), model.build()
    for module in (*modules, *plain):
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm1d):
                norm.momentum = momentum
    read: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for j, module in enumerate(plain):
        norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm1d))
        norm.register_forward_pre_hook(lambda _, given, j=j: read[j].append(given[0].detach()))
    trained = train_together(
        model,
        scheduled(model, schedule, 4),
        modules=modules,
        segments=2,
        batch_norm_per_step=True,
    )
    gradients = []
    for step in range(2):
        for module in plain:
            module.zero_grad()
        gradients.append(plain_losses_and_gradients(model, plain, range(4 * step, 4 * step + 4))[1])
    # Each micro-batch is normalised by itself, so gradients are those of the plain loop.
    assert_same(trained.seen.gradients[1], gradients[0])
    assert_same(trained.seen.gradients[2], gradients[1])
    for j, module in enumerate(modules):
        norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm1d))
        whole = nn.BatchNorm1d(WIDTH, momentum=momentum).double()
        for step in range(2):
            whole(torch.cat(read[j][4 * step : 4 * step + 4]))
        assert int(norm.num_batches_tracked) == 2
        torch.testing.assert_close(norm.running_mean, whole.running_mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(norm.running_var, whole.running_var, rtol=1e-12, atol=1e-14)
        assert norm.track_running_stats


# What a stage does to what it receives


class Writing(nn.Module):
    """Its first operations write to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, h: Tensor, order: Tensor) -> Tensor:
        h.mul_(2).relu_()
        order += 1
        return self.block(h) + (order % 2)


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.block(x)
        return h, h.detach().argsort(1)


class Late(nn.Module):
    """Reads what `Writing` was given too."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss()

    def forward(self, g: Tensor, h: Tensor, order: Tensor, y: Tensor) -> Tensor:
        return self.loss(g + h.gather(1, order), y)


class NotWriting(Writing):
    def forward(self, h: Tensor, order: Tensor) -> Tensor:
        return self.block((h * 2).relu()) + ((order + 1) % 2)


def writing(middle: type[nn.Module]) -> HandModel:
    return hand_model(
        [
            HandStage(Twofold, ("x",), ("h", "order")),
            HandStage(middle, ("h", "order"), ("g",)),
            HandStage(Late, ("g", "h", "order", "y"), ("loss",)),
        ],
        regression,
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("place", [(0, 1, 2), (0, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_stage_may_write_to_what_it_receives_and_nobody_else_sees_it(
    place: tuple[int, ...], recompute: bool
) -> None:
    reference = writing(NotWriting)
    model = replace(reference, stages=writing_stages())
    if recompute:
        model = recomputing(model)
    schedule = on_ranks(lowered(model, "single", 4), model, place)
    trained = train_together(model, schedule)
    losses, gradients = plain_losses_and_gradients(reference, reference.build(), range(4))
    assert_same_losses(trained.seen.losses, losses)
    assert_same(trained.seen.gradients[1], gradients)


def writing_stages() -> tuple[HandStage, ...]:
    stages = writing(NotWriting).stages
    return stages[0], replace(stages[1], build=Writing), stages[2]


def test_an_argument_that_is_written_to_later_on_only_is_named() -> None:
    class Moody(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Moody.calls += 1
            if Moody.calls == 2:
                x.detach().add_(1)
            return super().forward(x)

    model = chain(2)
    modules = [model.build()[0], nn.Sequential(Moody().double())]
    model = without_target(model)
    with pytest.raises(StageError, match="h1 is written to in place, which it was not in the fir"):
        train_together(model, lowered(model, "1f1b", 3), modules=modules)


def without_target(model: HandModel) -> HandModel:
    """The last stage reads nothing but the boundary."""
    last = replace(model.plan.stages[-1], inputs=("h1",))
    return replace(model, plan=replace(model.plan, stages=(model.plan.stages[0], last)))


# Skips, structures, and few micro-batches


def test_weights_before_a_skip_are_trained_through_it() -> None:
    model = skips()
    trained = train_together(model, lowered(model, "1f1b", 4))
    _, gradients = plain_losses_and_gradients(model, model.build(), range(4))
    assert_same(trained.seen.gradients[1], gradients)
    plain = model.build()
    values = model.forward(plain, regression(0))
    # What goes past the stages between, and what goes through them, both count.
    through, past = torch.autograd.grad(values["j"].sum(), values["h"]), values["h"]
    assert through[0].abs().sum() > 0 and past.requires_grad


class Parts(nn.Module):
    """Hands a dict with tensors, ids, a mask, a number and None from one block to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Step() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        state: dict[str, Any] = {"h": x, "ids": ids, "mask": ids > 2, "cache": None, "scale": 2}
        for block in self.blocks:
            state = block(state)
        return self.head(state["h"])


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(8, 8), nn.Embedding(10, 8)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        h = torch.tanh(self.inner(state["h"])) * state["scale"] + self.table(state["ids"])
        if state["cache"] is not None:
            h = h + state["cache"]
        h = torch.where(state["mask"][:, None], h, state["h"])
        ids = (state["ids"] + 1) % 10
        return {**state, "h": h, "ids": ids, "mask": ~state["mask"], "cache": h.mean(0)}


@pytest.mark.parametrize("stages", [2, 3])
def test_dicts_none_numbers_ids_and_masks_between_blocks_train_as_in_the_plain_model(
    stages: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Parts()
    example = {"x": torch.randn(6, 8), "ids": torch.randint(0, 10, (6,))}
    folder = tmp_path / "parts"
    asyncpipe.partition(model, example, stages=stages, output=folder, profile="analytic")
    plan = read_plan(folder)
    made = make_schedule("1f1b", stages=stages, micro_batches=3)
    schedule = lower(made, forward_edges(plan), grad_edges=gradient_edges(plan))

    def feed(i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 10, (6,), generator=generator)
        return {"x": torch.randn(6, 8, generator=generator), "ids": ids, "target": ids % 4}

    hub, gradients = LocalHub(stages), {}
    from asyncpipe.runtime.executor.loading import load_stage

    modules = {j: load_stage(folder, plan, j).train() for j in range(stages)}
    seen = Seen(modules)
    pipelines = [
        Executor(plan, {j: modules[j]}, hub.transport(j), criterion=nn.functional.cross_entropy)
        for j in range(stages)
    ]
    run_together([pipeline.steps(schedule, feed, observer=seen) for pipeline in pipelines])
    for i in range(3):
        given = feed(i)
        target = given.pop("target")
        (nn.functional.cross_entropy(model(**given), target) / 3).backward()
    for (_, name), gradient in seen.gradients[1].items():
        gradients[name] = gradient
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("schedule", [name for name in SYNCHRONOUS if name != "single"])
def test_fewer_micro_batches_than_stages_train_as_the_plain_loop(
    schedule: str, micro_batches: int
) -> None:
    model = chain(4, norm=True, dropout=0.25)
    trained = train_together(model, lowered(model, schedule, micro_batches), seed=3)
    losses, gradients = plain_losses_and_gradients(
        model, model.build(), range(micro_batches), seed=3
    )
    assert_same_losses(trained.seen.losses, losses)
    assert_same(trained.seen.gradients[1], gradients)


def recomputing(model: HandModel) -> HandModel:
    stages = tuple(replace(stage, recompute=True) for stage in model.plan.stages)
    return replace(model, plan=replace(model.plan, stages=stages))


def buffers_of(module: nn.Module) -> dict[tuple[int, str], Tensor]:
    return {(0, name): value for name, value in module.named_buffers()}
