"""Schedules with W, and stages that share a rank: still the plain model to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncpipe.runtime.schedule.asynchronous import async_1f1b
from asyncpipe.runtime.schedule.text import from_text
from asyncpipe.tests.runtime.executor.test_executor import assert_same, assert_same_losses
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, passing, skips, tied
from asyncpipe.tests.support.oracles.async_simulation import plain_losses_and_gradients
from asyncpipe.tests.support.processes.executor import (
    lowered,
    on_ranks,
    train_rank,
    train_together,
    with_split_backwards,
)
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

MODELS = {
    "three blocks with BatchNorm and dropout": lambda: chain(3, norm=True, dropout=0.25),
    "skips": skips,
    "passing": passing,
}


def recomputing(model: HandModel) -> HandModel:
    stages = tuple(replace(stage, recompute=True) for stage in model.plan.stages)
    return replace(model, plan=replace(model.plan, stages=stages))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("behind", [0, 2, 9])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "single"])
@pytest.mark.parametrize("name", MODELS)
def test_split_backwards_give_the_plain_loop_to_the_last_bit(
    name: str, schedule: str, behind: int, recompute: bool
) -> None:
    model = MODELS[name]()
    if recompute:
        model = recomputing(model)
    split = with_split_backwards(lowered(model, schedule, 5), model, behind=behind)
    trained = train_together(model, split, seed=3)
    modules = model.build()
    losses, gradients = plain_losses_and_gradients(model, modules, range(5), seed=3)
    assert_same_losses(trained.seen.losses, losses)
    assert_same(trained.seen.gradients[1], gradients)
    assert all(stage.in_flight == 0 for p in trained.pipelines for stage in p.stages.values())
    for module, plain in zip(trained.modules, modules, strict=True):
        for (key, value), expected in zip(
            module.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            assert torch.equal(value, expected), key


def split_in_processes(rank: int) -> dict:
    from asyncpipe.runtime.transports import GlooTransport

    model = chain(3, norm=True, dropout=0.25)
    split = with_split_backwards(lowered(model, "1f1b", 5), model, behind=2)
    return train_rank(model, split, GlooTransport(), seed=3)


def test_real_processes_with_split_backwards_give_the_plain_loop_to_the_last_bit() -> None:
    results = run_processes(3, split_in_processes)
    model = chain(3, norm=True, dropout=0.25)
    losses, gradients = plain_losses_and_gradients(model, model.build(), range(5), seed=3)
    assert_same_losses(results[-1]["losses"], losses)
    assert_same({k: g for r in results for k, g in r["gradients"][1].items()}, gradients)


def test_some_backwards_of_a_schedule_may_be_split_and_others_not() -> None:
    model = chain(2)
    text = (
        "rank 0: 0F0 0F1 0B0 0F2 0B1 0W0 0W1 0B2 0S1\n"
        "rank 1: 1F0 1B0 1F1 1B1 1W1 1F2 1B2 1W0 1W2 1S1\n"
    )
    schedule = from_text(text)
    from asyncpipe.runtime.schedule.dependencies import lower

    trained = train_together(model, lower(schedule))
    losses, gradients = plain_losses_and_gradients(model, model.build(), range(3))
    assert_same_losses(trained.seen.losses, losses)
    for key, gradient in trained.seen.gradients[1].items():
        if key[0] == 0:  # where W come in the order of B
            assert torch.equal(gradient, gradients[key]), key
        torch.testing.assert_close(gradient, gradients[key], rtol=1e-14, atol=1e-16)


def test_tied_weights_with_split_backwards_get_the_sum_of_all_holders() -> None:
    model = tied(3)
    plain = lowered(model, "1f1b", 4)
    found = [
        train_together(model, schedule, segments=3, optimize=lambda p: torch.optim.Adam(p))
        for schedule in (plain, with_split_backwards(plain, model, behind=1))
    ]
    for version in (1, 2, 3):
        assert_same(found[1].seen.gradients[version], found[0].seen.gradients[version])
    assert torch.equal(found[1].modules[0].table.weight, found[1].modules[2].out.weight)


@pytest.mark.parametrize("staleness", ["none", "stash"])
@pytest.mark.parametrize("behind", [0, 1])
def test_an_asynchronous_run_with_split_backwards_is_the_same_run(
    staleness: str, behind: int
) -> None:
    model = chain(3, norm=True, dropout=0.25)
    from asyncpipe.runtime.executor.mailbox import forward_edges, gradient_edges
    from asyncpipe.runtime.schedule.dependencies import lower

    edges = forward_edges(model.plan), gradient_edges(model.plan)
    whole = lower(async_1f1b(3, 12, 2), edges[0], grad_edges=edges[1])
    split = with_split_backwards(whole, model, behind=behind)
    found = [
        train_together(
            model,
            schedule,
            staleness=staleness,
            optimize=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        )
        for schedule in (whole, split)
    ]
    assert found[0].ledger == found[1].ledger
    assert_same_losses(found[1].seen.losses, found[0].seen.losses)
    for one, other in zip(found[0].modules, found[1].modules, strict=True):
        for key, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key


PLACES = {
    "neighbours together": (0, 0, 1, 1),
    "a loop": (0, 1, 0, 1),
    "a V": (0, 1, 1, 0),
    "one of three apart": (0, 0, 1, 0),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["skips", "four blocks"])
def test_several_stages_of_a_rank_give_the_plain_loop_to_the_last_bit(
    name: str, place: str, recompute: bool
) -> None:
    model = skips() if name == "skips" else chain(4, norm=True, dropout=0.25)
    if recompute:
        model = recomputing(model)
    schedule = on_ranks(lowered(model, "single", 5), model, PLACES[place])
    for made in (schedule, with_split_backwards(schedule, model, behind=1)):
        trained = train_together(model, made, seed=3)
        losses, gradients = plain_losses_and_gradients(model, model.build(), range(5), seed=3)
        assert_same_losses(trained.seen.losses, losses)
        assert_same(trained.seen.gradients[1], gradients)


@pytest.mark.parametrize("place", [(0, 1, 0), (0, 0, 1), (0, 0, 0), (0, 1, 1)])
def test_tied_weights_of_stages_of_one_rank_are_summed_too(place: tuple[int, ...]) -> None:
    model = tied(3)
    schedule = on_ranks(lowered(model, "single", 4), model, place)
    trained = train_together(
        model, schedule, segments=2, optimize=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    _, gradients = plain_losses_and_gradients(model, model.build(), range(4))
    summed = gradients[0, "table.weight"] + gradients[2, "out.weight"]
    assert torch.equal(trained.seen.gradients[1][0, "table.weight"], summed)
    assert torch.equal(trained.seen.gradients[1][2, "out.weight"], summed)
    assert torch.equal(trained.modules[0].table.weight, trained.modules[2].out.weight)
