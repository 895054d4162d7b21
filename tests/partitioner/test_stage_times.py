"""Stages are timed as wholes, and plans are made again with what was found."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, count
from pathlib import Path
from threading import Event
from time import sleep
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner import profiling, stage_timing
from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.graph.build import build_graph, stage_of_nodes
from asyncpipe.partitioner.graph.rematerialize import Prices, Recomputation
from asyncpipe.partitioner.planning.cluster import cluster_of_hosts
from asyncpipe.partitioner.planning.solve import solve
from asyncpipe.partitioner.profile.cache import ProfileCache
from asyncpipe.partitioner.profile.operation_costs import NodeCost
from asyncpipe.partitioner.profile.profiler import Profile, WholeTimes, profile_analytic
from asyncpipe.partitioner.profile.together import together, usual_times
from asyncpipe.partitioner.profiling import Cut, refined
from asyncpipe.partitioner.split.split import split
from asyncpipe.partitioner.split.ssa import separated
from asyncpipe.partitioner.stage_timing import (
    StageTiming,
    _shared_out,
    _timed,
    rescaled,
    time_stages,
)
from asyncpipe.runtime.errors import PlanError
from asyncpipe.tests.support.models.zoo import ZOO
from asyncpipe.tests.support.oracles.captures import of_zoo


def cutter(captured: Capture, stages: int) -> Callable[[Profile], Cut]:
    """Plans as the command does; the groups are those of a predicted profile."""
    inputs = captured.arguments.tensors
    prices = Prices.of(profile_analytic(captured, inputs))
    again = Recomputation(captured, prices)

    def cut(costs: Profile) -> Cut:
        graph = build_graph(captured, costs, again=again)
        solution = solve(graph, stages=stages)
        placed = stage_of_nodes(captured, graph, solution.stage_of, again)
        divided, placed = separated(captured, placed)
        stage_graphs = split(divided, placed, Recomputation(divided, prices))
        return Cut(divided, stage_graphs, placed, graph, solution)

    return cut


def tower(layers: int = 6, width: int = 32) -> tuple[Capture, Profile]:
    """Equal layers that each take 1 ms forward and 2 ms backward by their profile."""
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    captured = capture(net, {"input": torch.randn(4, width)}, check=False)
    found = profile_analytic(captured, captured.arguments.tensors)
    nodes = {name: NodeCost(forward_ms=1.0, backward_ms=2.0) for name in found.nodes}
    return captured, Profile(**{**vars(found), "nodes": MappingProxyType(nodes)})


def sums(costs: Profile, cut: Cut) -> list[tuple[float, float]]:
    return [
        (
            sum(costs.nodes[node.name].forward_ms for node in stage.nodes),
            sum(costs.nodes[node.name].backward_ms for node in stage.nodes),
        )
        for stage in cut.stages
    ]


def test_the_parts_of_each_stage_add_up_to_its_time() -> None:
    captured, costs = tower()
    cut = cutter(captured, 2)(costs)
    times = [WholeTimes(6.0, 3.0), WholeTimes(1.5, 12.0)]
    found = rescaled(costs, cut.stages, times)
    for (forward_ms, backward_ms), time in zip(sums(found, cut), times, strict=True):
        assert forward_ms == pytest.approx(time.forward_ms)
        assert backward_ms == pytest.approx(time.backward_ms)
    assert found.stage_scales == pytest.approx((1.0, 1.5))
    assert sums(costs, cut) == [(3.0, 6.0), (3.0, 6.0)]  # the given one is as it was


@pytest.mark.parametrize("name", ["gpt2", "resnet", "t5", "mlp"])
def test_what_several_stages_compute_counts_in_each(name: str) -> None:
    captured = of_zoo(name)
    costs = profile_analytic(captured, captured.arguments.tensors)
    cut = cutter(captured, 3)(costs)
    times = [WholeTimes(4.0, 5.0)] * 3
    nodes = rescaled(costs, cut.stages, times).nodes
    for stage in cut.stages:
        total = sum(nodes[node.name].forward_ms for node in stage.nodes if node.name in nodes)
        assert total == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    ("name", "at_once"), [("gpt2", 1), ("resnet", 1), ("t5", 3), ("mlp", 3), ("bert", 1)]
)
def test_every_stage_is_timed_and_the_model_left_as_it_was(name: str, at_once: int) -> None:
    captured = of_zoo(name)
    model = captured.model
    cut = cutter(captured, 3)(profile_analytic(captured, captured.arguments.tensors))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    drawn, mode = torch.get_rng_state(), model.training
    given = captured.arguments.tensors
    before = {key: value.clone() for key, value in given.items()}
    done: list[tuple[int, int]] = []
    times = time_stages(
        cut.captured,
        cut.stages,
        (3, 2, 1),
        StageTiming(at_once=at_once, enough_ms=0.0),
        on_progress=lambda number, total: done.append((number, total)),
    )
    assert all(time.forward_ms > 0 and time.backward_ms > 0 for time in times)
    assert done == ([(1, 3), (2, 3), (3, 3)] if at_once == 1 else [(3, 3)])
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn) and model.training == mode
    assert all(torch.equal(before[key], value) for key, value in given.items())


def test_stages_of_a_model_on_the_cpu_are_timed_on_the_device() -> None:
    captured = of_zoo("gpt2")
    cut = cutter(captured, 2)(profile_analytic(captured, captured.arguments.tensors))
    timing = StageTiming(device=torch.device("meta"), enough_ms=0.0)
    times = time_stages(cut.captured, cut.stages, (2, 1), timing)
    assert len(times) == 2 and all(time.forward_ms > 0 for time in times)
    assert not any(parameter.is_meta for parameter in captured.model.parameters())


def test_a_stage_is_timed_again_where_another_number_computes_beside_it(tmp_path: Path) -> None:
    captured = of_zoo("mlp")
    given = captured.arguments.tensors
    cut = cutter(captured, 2)(profile_analytic(captured, given))
    cache = ProfileCache(tmp_path / "costs.json", {})

    def timed(at_once: int) -> Sequence[WholeTimes]:
        timing = StageTiming(at_once=at_once, cache=cache)
        return time_stages(cut.captured, cut.stages, (2, 1), timing)

    alone, at_once = timed(1), timed(2)
    assert timed(1) == alone and timed(2) == at_once
    assert all(one != other for one, other in zip(alone, at_once, strict=True))


def test_a_stage_that_waits_inside_is_told_by_its_time_and_not_by_its_parts() -> None:
    """Two equal halves by FLOPs, one of which sums a large buffer in between."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.second = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            noise = torch.ones(x.shape[0] * 100_000).sum()
            return self.second(y + noise)

    captured = capture(Slow(), {"x": torch.randn(8, 64)}, check=False)
    nodes = {
        node.name: NodeCost(forward_ms=1.0, backward_ms=1.0)
        for node in captured.graph.nodes
        if node.op.startswith("call")
    }
    analytic = profile_analytic(captured, captured.arguments.tensors)
    costs = Profile(**{**vars(analytic), "nodes": nodes})
    cut = cutter(captured, 2)(costs)
    times = time_stages(cut.captured, cut.stages, (2, 1), StageTiming(enough_ms=20.0))
    (slow,) = (
        stage.index
        for stage in cut.stages
        if any(node.target is torch.ones for node in stage.nodes)
    )
    assert times[slow].forward_ms > 2 * times[1 - slow].forward_ms


# --- planning again --------------------------------------------------------------------------


class Clockwork:
    """Times stages by a rule, and keeps which were timed."""

    def __init__(self, ms_of_node: Callable[[str], float]) -> None:
        self.ms_of_node = ms_of_node
        self.timed: list[list[int]] = []
        self.left_s: list[float] = []

    def __call__(self, cut: Cut, left_s: float = 0.0) -> Sequence[WholeTimes]:
        self.left_s.append(left_s)
        self.timed.append([len(stage.nodes) for stage in cut.stages])
        return [
            WholeTimes(total / 3, total * 2 / 3)
            for total in (
                sum(self.ms_of_node(node.name) for node in stage.nodes) for stage in cut.stages
            )
        ]


def passing(seconds: float) -> Callable[[], float]:
    """A clock that goes on by so many seconds from one question to the next."""
    times = count(step=seconds)
    return lambda: next(times)


def test_a_plan_whose_times_agree_is_timed_once() -> None:
    captured, costs = tower()
    clockwork = Clockwork(lambda name: 3.0)
    found, chosen = refined(cutter(captured, 2), costs, clockwork)
    assert clockwork.timed == [[3, 3]] and [len(s.nodes) for s in chosen.stages] == [3, 3]
    assert found.stage_scales == pytest.approx((1.0, 1.0))


def test_a_cut_moves_to_where_the_times_are_and_agrees_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured, costs = tower()
    slow = {node.name for node in list(captured.graph.nodes)[1:3]}  # the first two layers
    clockwork = Clockwork(lambda name: 9.0 if name in slow else 3.0)
    with monkeypatch.context() as patched:
        patched.setattr(profiling, "monotonic", passing(2.5))
        found, chosen = refined(cutter(captured, 2), costs, clockwork)
    assert clockwork.timed == [[3, 3]]  # that took long: the new cut is not timed
    assert [len(stage.nodes) for stage in chosen.stages] == [2, 4]
    clockwork.timed.clear()
    clockwork.left_s.clear()
    with monkeypatch.context() as patched:
        patched.setattr(profiling, "monotonic", passing(1.5))
        found, chosen = refined(cutter(captured, 2), costs, clockwork)
    assert clockwork.timed == [[3, 3], [2, 4]] and clockwork.left_s == [4.0, 2.5]
    assert [len(stage.nodes) for stage in chosen.stages] == [2, 4]
    assert [sum(pair) for pair in sums(found, chosen)] == pytest.approx([18.0, 12.0])
    assert chosen.solution.loads_ms == pytest.approx((18.0, 12.0))
    assert chosen.solution.lower_bound_ms <= 18.0


def test_the_better_of_two_timed_plans_is_kept_with_its_own_times() -> None:
    """Each cut looks bad once it is timed: whatever stage has the third layer is slow."""
    captured, costs = tower()
    third = list(captured.graph.nodes)[3].name

    def time(cut: Cut, left_s: float) -> Sequence[WholeTimes]:
        timed.append([len(stage.nodes) for stage in cut.stages])
        return [
            WholeTimes(
                len(stage.nodes) + 8.0 * any(node.name == third for node in stage.nodes),
                2.0 * len(stage.nodes),
            )
            for stage in cut.stages
        ]

    timed: list[list[int]] = []
    found, chosen = refined(cutter(captured, 2), costs, time)
    assert timed == [[3, 3], [2, 4]]
    # 17 ms; with the third layer in the other stage that takes 20 ms.
    assert [len(stage.nodes) for stage in chosen.stages] == [3, 3]
    assert [sum(pair) for pair in sums(found, chosen)] == pytest.approx([17.0, 9.0])
    assert chosen.solution.loads_ms == pytest.approx((17.0, 9.0))
    assert chosen.solution.lower_bound_ms <= chosen.solution.bottleneck_ms
    # What is said of the plan is said with the costs that it was timed with.
    assert chosen.solution.problem.costs.work_ms.sum() == pytest.approx(26.0)
    assert "bottleneck with 17.00 ms" in chosen.solution.explanation[0]
    assert chosen.solution.step_ms == pytest.approx(8 * 17.0)


@pytest.mark.parametrize("seed", range(4))
def test_how_fast_the_machine_is_while_a_plan_is_timed_decides_nothing(seed: int) -> None:
    captured, costs = tower(10)
    rng = random.Random(seed)
    ms = {name: rng.uniform(1, 9) for name in costs.nodes}
    cut = cutter(captured, 3)

    def run(speeds: Sequence[float]) -> tuple[Profile, Cut]:
        clockwork, left = Clockwork(ms.__getitem__), iter(speeds)

        def time(made: Cut, left_s: float) -> Sequence[WholeTimes]:
            factor = next(left)
            return [times.scaled(factor) for times in clockwork(made)]

        return refined(cut, costs, time)

    _, chosen = run([1.0, 1.0, 1.0])
    found, other = run([1.0, 1.4, 0.8])
    assert other.solution.placement.stage_of == chosen.solution.placement.stage_of
    # No cut is better for the costs that the plan has, but by what is given up for tidy ones.
    layers = [sum(times_of(found, name)) for name in costs.nodes]
    least_ms = min(
        max(sum(layers[:first]), sum(layers[first:last]), sum(layers[last:]))
        for first, last in combinations(range(1, 10), 2)
    )
    assert other.solution.bottleneck_ms <= 1.02 * least_ms + 1.0  # and transfers


def times_of(costs: Profile, name: str) -> tuple[float, float]:
    return costs.nodes[name].forward_ms, costs.nodes[name].backward_ms


def test_the_plan_has_the_times_of_its_stages_and_says_what_was_corrected(tmp_path) -> None:
    model, inputs = ZOO["gpt2"]()
    plan = asyncpipe.partition(model, inputs, stages=3, output=tmp_path / "made", threads=1)
    assert len(plan.profile["stage_scales"]) == 3
    again = asyncpipe.load(tmp_path / "made")
    assert len(again.stages) == 3
    total = sum(stage.forward_ms + stage.backward_ms for stage in plan.stages)
    whole = plan.profile["forward_ms"] + plan.profile["backward_ms"]
    assert total == pytest.approx(whole, rel=0.05)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of stages in each group that is timed."""
    sizes: list[int] = []

    def watched(runs: Sequence[Iterator[WholeTimes]], *options: Any, **more: Any) -> Any:
        sizes.append(len(runs))
        return together(runs, *options, **more)

    monkeypatch.setattr("asyncpipe.partitioner.stage_timing.together", watched)
    return sizes


@pytest.mark.parametrize(
    ("hosts", "threads", "cores", "at_once"),
    [
        (None, 1, 8, 4),
        ("a:3,b:1", 1, 8, 3),
        ("a:1,b:1,c:1,d:1", 1, 8, 1),
        (None, 2, 8, 1),
        (None, 1, 2, 4),
        (None, 1, 1, 2),
    ],
)
def test_as_many_stages_are_timed_at_once_as_share_a_host(
    monkeypatch: pytest.MonkeyPatch,
    groups: list[int],
    hosts: str | None,
    threads: int,
    cores: int,
    at_once: int,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    devices = {"devices": cluster_of_hosts(hosts)} if hosts else {}
    model, inputs = ZOO["mlp"]()
    asyncpipe.partition(
        model,
        inputs,
        stages=4,
        threads=threads,
        profile="measured",
        no_cache=True,
        stop_after="plan",
        **devices,
    )
    assert set(groups) == {at_once}


class NotThreadSafe(torch.autograd.Function):
    """Fails where two threads are in its forward."""

    inside = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        NotThreadSafe.inside += 1
        sleep(0.002)
        alone = NotThreadSafe.inside == 1
        NotThreadSafe.inside -= 1
        assert alone
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return NotThreadSafe.apply(super().forward(x))


def test_stages_whose_code_is_not_thread_safe_are_timed_one_at_a_time(groups: list[int]) -> None:
    plan = asyncpipe.partition(
        nn.Sequential(Doubled(8, 8), Doubled(8, 8)),
        {"input": torch.randn(4, 8)},
        stages=2,
        threads=1,
        profile="measured",
        no_cache=True,
        stop_after="plan",
    )
    assert groups[0] == 2 and set(groups[1:]) == {1}
    assert len(plan.profile["stage_scales"]) == 2


def passages(ms: float, taken: list[int]) -> Iterator[WholeTimes]:
    """A stage that says of each passage that it took so long, and keeps on which cores it ran."""
    while True:
        taken.extend(os.sched_getaffinity(0))
        sleep(0.001)
        yield WholeTimes(ms, 0.0)


def test_a_stage_that_is_done_goes_on_until_all_are() -> None:
    """The slow one ends only after the quick one, done after three passages, has begun a fourth."""
    goes_on = Event()

    def quick() -> Iterator[WholeTimes]:
        for number in count():
            if number == 3:
                goes_on.set()
            yield WholeTimes(50.0, 0.0)

    def slow() -> Iterator[WholeTimes]:
        for number in count():
            assert number < 5 or goes_on.wait(20.0)
            yield WholeTimes(20.0, 0.0)

    times = together([quick(), slow()], 100.0, threads=1)
    assert [len(of_one) for of_one in times] == [3, 6]


@pytest.mark.parametrize(("first_ms", "counts"), [(300.0, True), (314.0, True), (316.0, False)])
def test_the_first_time_counts_where_it_is_hardly_longer_than_the_second(
    first_ms: float, counts: bool
) -> None:
    run = iter([WholeTimes(first_ms, 0.0)] + [WholeTimes(300.0, 0.0)] * 4)
    ((first, *_),) = together([run], 500.0, threads=1)
    assert (first.forward_ms == first_ms) is counts
    assert len(list(run)) == (3 if counts else 2)  # are left


def test_each_core_has_about_as_much_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    # Stages 3 and 0 on one core, 1 and 2 on the other.
    assert _shared_out([0, 1, 2, 3], [300.0, 450.0, 360.0, 580.0]) == [3, 1, 0, 2]
    assert _shared_out([2, 0, 1], [0.0, 0.0, 0.0]) == [2, 0, 1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_stages_that_are_timed_at_once_have_each_core_in_turn() -> None:
    cores = sorted(os.sched_getaffinity(0))
    seen: list[list[set[int]]] = []
    for turn in range(2):
        taken: list[list[int]] = [[], []]
        together([passages(50.0, each) for each in taken], 100.0, threads=1, turn=turn)
        seen.append([set(each) for each in taken])
    assert seen[0] == [{cores[0]}, {cores[1]}]
    assert seen[1] == [{cores[1]}, {cores[2 % len(cores)]}]
    assert sorted(os.sched_getaffinity(0)) == cores  # of this thread


@pytest.mark.parametrize(
    ("ms", "varies", "laps"),
    [(600.0, True, 2), (600.0, False, 2), (300.0, True, 4), (1.0, True, 4)],
)
def test_a_stage_is_timed_again_until_it_hardly_varies_or_was_timed_for_long_enough(
    ms: float, varies: bool, laps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2,000 ms as enough, a lap of a stage has 500 ms of it, but at least two passages."""
    begun = [0, 0]

    def begin(stage: int, varies: bool) -> Callable[[], Iterator[WholeTimes]]:
        def runs() -> Iterator[WholeTimes]:
            begun[stage] += 1
            while True:
                yield WholeTimes(ms / (4 if varies else 2), ms / 2)
                yield WholeTimes(ms / 2 * (1.5 if varies else 1), ms / 2)

        return runs

    runs = [begin(0, varies), begin(1, False)]
    _timed(runs, [None, None], [0.0, 0.0], StageTiming(), None)
    assert begun == [laps, 2]
    monkeypatch.setattr(stage_timing, "monotonic", passing(1.9))
    _timed(runs, [None, None], [0.0, 0.0], StageTiming(), None)
    assert begun == [laps + 2, 4]  # a third would end after 4 s


@pytest.mark.parametrize(
    ("ms", "sums_ms", "laps"),
    [
        ((104.0, 208.0), (100.0, 200.0), 1),  # all are slower than their parts alike
        ((112.0, 224.0), (100.0, 200.0), 2),  # the machine was another
        ((100.0, 220.0), (100.0, 200.0), 1),  # 4.8% on either side of the usual scale
        ((100.0, 230.0), (100.0, 200.0), 2),  # one of the stages was disturbed, or differs
        ((100.0, 200.0), (100.0, 0.0), 2),  # nothing is known of one
    ],
)
def test_stages_that_take_as_long_as_their_parts_are_timed_once(
    ms: tuple[float, float], sums_ms: tuple[float, float], laps: int
) -> None:
    begun = [0, 0]

    def begin(stage: int) -> Callable[[], Iterator[WholeTimes]]:
        def runs() -> Iterator[WholeTimes]:
            begun[stage] += 1
            while True:
                yield WholeTimes(ms[stage] / 2, ms[stage] / 2)

        return runs

    times = _timed([begin(0), begin(1)], [None, None], sums_ms, StageTiming(), None)
    assert begun == [laps, laps]
    assert [time.forward_ms + time.backward_ms for time in times] == list(ms)
    known = WholeTimes(ms[0] / 2, ms[0] / 2)
    assert _timed([begin(0), begin(1)], [known, None], sums_ms, StageTiming(), None) == times


def test_of_forwards_and_of_backwards_the_median_counts() -> None:
    times = [WholeTimes(forward, 20 - forward) for forward in (10.2, 9.8, 10.1, 9.9, 10.0)]
    found = usual_times(times)
    assert (found.forward_ms, found.backward_ms) == (10.0, 10.0)
    # Quartiles of a normal distribution are 1.349 standard deviations apart.
    assert found.spread == pytest.approx(0.02 / 1.349)
    assert found.scaled(3.0) == WholeTimes(30.0, 30.0, found.spread)


def test_times_of_a_disturbed_machine_count_little_more_than_the_first_quartile() -> None:
    times = [WholeTimes(forward, forward) for forward in (10.0, 10.0, 18.0, 19.0, 25.0)]
    assert usual_times(times).forward_ms == pytest.approx(10.0 * (1 + 0.05 * 1.349 / 2))


def test_what_fails_in_a_stage_beside_is_raised() -> None:
    def failing() -> Iterator[WholeTimes]:
        yield WholeTimes(1.0, 1.0)
        raise ValueError("the other stage")

    with pytest.raises(ValueError, match="the other stage"):
        together([passages(1.0, []), failing()], 1e9, threads=1)


def test_stages_of_a_model_on_meta_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpipe.partitioner.profiling.time_stages", None)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("meta")
    plan = asyncpipe.partition(
        model, {"input": torch.randn(2, 8)}, stages=2, profile="measured", stop_after="plan"
    )
    assert plan.profile["kind"] == "measured" and plan.profile["stage_scales"] == []


def test_stages_that_cannot_be_written_are_planned_by_their_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise PlanError("no constructor can be written.")

    monkeypatch.setattr("asyncpipe.partitioner.profiling.time_stages", refused)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = asyncpipe.partition(model, {"input": torch.randn(2, 8)}, stages=2, stop_after="plan")
    assert plan.profile["stage_scales"] == [] and len(plan.stages) == 2
