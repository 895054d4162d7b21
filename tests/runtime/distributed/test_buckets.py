"""Gradients summed over real processes during a backward, and weights compared."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncpipe.runtime.distributed.equality import Equality, TiedParameter
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.sharding.buckets import make_buckets
from asyncpipe.runtime.training.clipping import NormShare
from asyncpipe.runtime.training.replica_gradients import GradientSums, first_buffers
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.run_configs import run_config

WIDTH = 8
LAYER_BYTES = WIDTH * WIDTH * 8


def chain(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    linear = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    return nn.Sequential(*linear).double()


def inputs(replica: int) -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.manual_seed(replica))


def gradients_of(model: nn.Module, replicas: int) -> list[Tensor]:
    for replica in range(replicas):
        model(inputs(replica)).square().sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def sum_chain(rank: int, is_expected: bool) -> dict[str, Any]:
    model = chain()
    begun: list[int] = []
    moments: list[str] = []
    plain = dist.all_reduce

    def noted(tensor: Tensor, **options: Any) -> Any:
        begun.append(tensor.numel())
        moments.append("backward" if under_way else "after")
        return plain(tensor, **options)

    dist.all_reduce = noted
    group = dist.group.WORLD
    assert group is not None
    share = NormShare(list(model.parameters()), {}, [])
    sums = GradientSums({0: share}, group, "ranks", bucket_bytes=2 * LAYER_BYTES)
    (model(inputs(rank)).square().sum() / 2).backward()
    assert not begun  # an earlier micro-batch of the window
    if is_expected:
        sums.expect(0)
    under_way = True
    (model(inputs(rank)).square().sum() / 2).backward()
    under_way = False
    sums.begin(0)
    sums.finish(0)
    grads = [parameter.grad for parameter in model.parameters()]
    return {"moments": moments, "grads": grads, "numbers": begun}


@pytest.mark.parametrize("is_expected", [True, False])
def test_gradients_are_summed_and_their_buckets_begin_as_early_as_they_can(
    is_expected: bool,
) -> None:
    ranks = run_processes(3, sum_chain, is_expected)
    expected = gradients_of(chain(), 3)
    for of_ranks in ranks:
        assert of_ranks["moments"] == ["backward" if is_expected else "after"] * 2
        assert of_ranks["numbers"] == [2 * WIDTH * WIDTH + 2] * 2
        for found, first, grad in zip(of_ranks["grads"], ranks[0]["grads"], expected, strict=True):
            torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-12)
            assert torch.equal(found, first)


def sum_partly(rank: int) -> list[Tensor | None]:
    """The second layer has a gradient on rank 1 alone, the last on none."""
    model = chain(3)
    share = NormShare(list(model.parameters()), {}, [])
    group = dist.group.WORLD
    assert group is not None
    sums = GradientSums({0: share}, group, "ranks")
    sums.expect(0)
    hidden = model[0](inputs(rank))
    (model[1](hidden) if rank else hidden).sum().backward()
    sums.begin(0)
    sums.finish(0)
    return [parameter.grad for parameter in model.parameters()]


def test_a_gradient_that_no_replica_has_stays_none() -> None:
    first, second = run_processes(2, sum_partly)
    assert [grad is None for grad in first] == [False, False, True]
    assert all(torch.equal(one, other) for one, other in zip(first[:2], second[:2], strict=True))
    model = chain(3)
    model[0](inputs(0)).sum().backward()
    model[1](model[0](inputs(1))).sum().backward()
    for found, parameter in zip(first[:2], list(model.parameters())[:2], strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)


def sum_shared(rank: int) -> list[Tensor | None]:
    model = chain(2)
    own, shared = model.parameters()
    group = dist.group.WORLD
    assert group is not None
    sums = GradientSums({0: NormShare([own], {"last": shared}, [shared])}, group, "ranks")
    model(inputs(rank)).square().sum().backward()
    sums.begin(0)
    assert shared.grad is not None  # it is summed with the other stages' first
    shared.grad = 2 * shared.grad
    sums.finish(0)
    return [own.grad, shared.grad]


def test_a_parameter_of_several_stages_is_summed_after_they_have_exchanged_it() -> None:
    expected = gradients_of(chain(2), 2)
    for own, shared in run_processes(2, sum_shared):
        torch.testing.assert_close(own, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(shared, 2 * expected[1], rtol=1e-12, atol=1e-12)


def sum_held(rank: int) -> dict[str, Tensor | None]:
    """Stage 0 is on ranks 0 and 1, stage 1 on rank 2; all hold the last layer."""
    model = chain(2)
    own, held = model.parameters()
    pair, all_ranks = dist.new_group([0, 1]), dist.group.WORLD
    assert all_ranks is not None
    sums = GradientSums(
        {rank // 2: NormShare([own], {"last": held}, [held])},
        pair if rank < 2 else None,
        "ranks",
        tied_parameters=[TiedParameter("last", held, (0, 1, 2), all_ranks)],
    )
    sums.expect(rank // 2)
    model(inputs(rank)).square().sum().backward()
    sums.begin(rank // 2)
    sums.finish(rank // 2)
    return {"own": own.grad, "held": held.grad}


def test_where_stages_have_replicas_all_holders_of_a_parameter_sum_it_together() -> None:
    of_ranks = run_processes(3, sum_held)
    pair, every = gradients_of(chain(2), 2), gradients_of(chain(2), 3)
    alone = chain(2)
    alone(inputs(2)).square().sum().backward()
    for rank, found in enumerate(of_ranks):
        expected = pair[0] if rank < 2 else alone[0].weight.grad
        torch.testing.assert_close(found["own"], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["held"], every[1], rtol=1e-12, atol=1e-12)
        assert torch.equal(found["held"], of_ranks[0]["held"])


class Statistics(nn.Module):
    """Buffers of dtypes whose sizes differ, as batch norm and masks have them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([rank == 0, True, False]))
        self.register_buffer("short", torch.full((), rank + 0.5, dtype=torch.bfloat16))
        self.norm.running_mean.fill_(rank + 1.0)
        self.norm.num_batches_tracked.fill_(10 * rank)


def borrow(rank: int) -> list[dict[str, Tensor]]:
    world = World(
        RankInfo(rank, 2, rank, 2), dist.group.WORLD, data_parallel_group=dist.group.WORLD
    )
    world = replace(world, ranks_of_stage=((0, 1),))
    module = Statistics(rank)
    seen = [{name: buffer.clone() for name, buffer in module.named_buffers()}]
    with first_buffers({0: module}, world):
        seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return [*seen, dict(module.named_buffers())]


def test_an_evaluation_reads_the_first_replica_s_buffers_and_training_goes_on_with_its_own() -> (
    None
):
    first, second = run_processes(2, borrow)
    for name, buffer in first[0].items():
        assert torch.equal(second[1][name], buffer) and torch.equal(first[1][name], buffer)
        for of_ranks in (first, second):
            assert torch.equal(of_ranks[2][name], of_ranks[0][name])
    assert not torch.equal(first[0]["mask"], second[0]["mask"])


def compare_held(rank: int) -> str:
    held = nn.Parameter(torch.full((2,), float(rank == 2)))
    group = dist.group.WORLD
    assert group is not None
    world = World(RankInfo(rank, 3, rank, 3), group)
    Equality({}, run_config(), world, [TiedParameter("wte", held, (0, 1, 2), group)])
    return "equal"


def test_holders_of_a_parameter_that_differ_at_the_start_are_named() -> None:
    for error in run_processes(3, compare_held):
        assert "ranks 0 and 2 are replicas, but differ in wte, a parameter of several" in error


def compare(rank: int, what: str) -> str:
    """Rank 1 of two replicas changes a weight, or what batch norm has seen of its data."""
    world = World(
        RankInfo(rank, 2, rank, 2),
        dist.group.WORLD,
        replicas=2,
        data_parallel_group=dist.group.WORLD,
    )
    module = nn.Sequential(*chain(2), nn.BatchNorm1d(WIDTH))
    if rank == 1 and what == "start":
        module[2].running_mean.add_(1)
    equality = Equality({3: module}, run_config(check_replicas=5), world)
    module[2].running_mean.add_(rank)
    if rank == 1 and what == "weight":
        with torch.no_grad():
            module[1].weight[0, 0] += 1e-15
    equality.check(4)
    if what == "stage":
        with torch.no_grad():
            module[0].weight[0, 0] += 1e-15 * rank
        equality.check(5, stage=3)
    equality.check(5)
    return "equal"


def test_replicas_that_differ_are_named_with_the_parameter() -> None:
    assert run_processes(2, compare, "nothing") == ["equal", "equal"]
    for error in run_processes(2, compare, "weight"):
        assert "ranks 0 and 1 are replicas, but differ in 1.weight of stage 3 after step 5" in error
    for error in run_processes(2, compare, "stage"):
        assert "differ in 0.weight of stage 3 after step 5" in error
    for error in run_processes(2, compare, "start"):
        assert "differ in 2.running_mean of stage 3 at the start" in error


def test_buckets_hold_one_dtype_from_the_last_parameter_to_the_first() -> None:
    model = chain(5)
    model[2].float()
    model[0].weight.requires_grad_(False)
    buckets = make_buckets(list(model.parameters()), 2 * LAYER_BYTES)
    layers = {id(layer.weight): index for index, layer in enumerate(model)}
    found = [[layers[id(parameter)] for parameter in bucket.parameters] for bucket in buckets]
    assert found == [[4, 3], [2], [1]]


def test_sums_that_nobody_needs_are_freed_with_their_stage() -> None:
    stage = chain()
    share = NormShare(list(stage.parameters()), {}, [])
    sums = GradientSums({0: share}, cast(dist.ProcessGroup, object()), "ranks")
    seen = weakref.ref(sums), weakref.ref(stage[0].weight)
    del stage, share, sums
    gc.collect()
    assert [each() for each in seen] == [None, None]
