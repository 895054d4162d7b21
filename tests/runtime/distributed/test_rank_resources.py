"""The cores and devices of a rank, from the resources of all, and their description."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from asyncpipe.runtime.config.settings import RunConfig, SettingsError
from asyncpipe.runtime.distributed import cpu_affinity
from asyncpipe.runtime.distributed.cpu_affinity import (
    Core,
    Gpu,
    Machine,
    RankResources,
    Topology,
    check_alike,
    find_machine,
    find_resources,
    resources_from,
)
from asyncpipe.runtime.distributed.grid import Grid
from asyncpipe.runtime.distributed.placement import (
    describe_placement,
    describe_ranks,
    placement_warning,
    tensor_ranks_warning,
)
from asyncpipe.runtime.plan.plan import Plan
from asyncpipe.runtime.plan.setting import RankSpec
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.transports.choose import TransportChoice
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.run_configs import run_config

GPUS = (Gpu("a", 0), Gpu("b", 1))


@pytest.fixture(scope="module")
def mlp4(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return write_mlp(tmp_path_factory.mktemp("plans") / "mlp4", stages=4)


@pytest.fixture(autouse=True)
def eight_cores_on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def topology(allowed: tuple[int, ...]) -> Topology:
        return Topology(tuple(Core(cpu // 4, (cpu,)) for cpu in allowed), inf)

    monkeypatch.setattr(cpu_affinity, "read_topology", topology)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def settings(**given: object) -> RunConfig:
    return run_config(**given)


def machine_of(
    plan: Plan, rank: int, *where: RankResources, given: RunConfig | None = None
) -> Machine:
    return find_machine(given or settings(), plan, where, rank)


ON_A = RankResources("a", "0-7", 8)
ON_B = RankResources("b", "0-7", 8)


def test_ranks_of_one_host_share_its_cores(mlp4: Plan) -> None:
    found = machine_of(mlp4, 2, *[ON_A] * 4)
    assert (found.cores, found.threads, found.own) == (8, 2, {4, 5})
    assert found.pins == ("0-1", "2-3", "4-5", "6-7")


def test_ranks_of_two_hosts_share_the_cores_of_their_own(mlp4: Plan) -> None:
    found = machine_of(mlp4, 2, ON_A, ON_A, ON_B, ON_B)
    assert (found.cores, found.threads, found.own) == (16, 4, {0, 1, 2, 3})
    assert found.host_of_rank == ("a", "a", "b", "b")
    cyclic = machine_of(mlp4, 2, ON_A, ON_B, ON_A, ON_B)
    assert cyclic.own == {4, 5, 6, 7}


def test_ranks_that_their_launcher_bound_stay_where_they_are(mlp4: Plan) -> None:
    bound = [RankResources("a", f"{2 * rank}-{2 * rank + 1}", 2) for rank in range(4)]
    found = machine_of(mlp4, 1, *bound)
    assert (found.cores, found.threads, found.pins) == (8, 2, ())
    by_twos = [
        RankResources("a", "0-3", 4),
        RankResources("a", "0-3", 4),
        RankResources("a", "4-7", 4),
        RankResources("a", "4-7", 4),
    ]
    found = machine_of(mlp4, 3, *by_twos)
    assert (found.threads, found.pins, found.own) == (2, ("4-5", "6-7"), {6, 7})


def test_threads_are_those_that_were_asked_for(mlp4: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine_of(mlp4, 0, *[ON_A] * 4, given=settings(threads=1))
    assert (one.threads, one.threads_from, one.own) == (1, "--threads", {0, 1})
    many = machine_of(mlp4, 0, *[ON_A] * 4, given=settings(threads=8))
    assert (many.threads, many.pins) == (8, ())  # more than its cores: not on these alone
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = machine_of(mlp4, 0, *[ON_A] * 4)
    assert (found.threads, found.threads_from) == (1, "OMP_NUM_THREADS")


def test_pinning_to_nodes_leaves_their_cores_to_all_ranks_on_them(mlp4: Plan) -> None:
    found = machine_of(mlp4, 3, *[ON_A] * 4, given=settings(pin="numa"))
    assert (found.pins, found.own) == (("0-3", "0-3", "4-7", "4-7"), {4, 5, 6, 7})
    small = RankResources("a", "0-3", 4)
    assert machine_of(mlp4, 0, *[small] * 4, given=settings(pin="numa")).pins == ()
    assert machine_of(mlp4, 0, *[ON_A] * 4, given=settings(pin="none")).pins == ()


def test_a_rank_takes_its_gpu_and_the_cores_near_it(mlp4: Plan) -> None:
    on_gpus = replace(ON_A, gpus=GPUS)
    two = settings(device="cuda", ranks_per_gpu=2)
    found = [machine_of(mlp4, rank, *[on_gpus] * 4, given=two) for rank in range(4)]
    assert [each.device for each in found] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert [sorted(each.own) for each in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    swapped = replace(ON_A, gpus=GPUS[::-1])
    assert machine_of(mlp4, 0, *[swapped] * 4, given=two).own == {4, 5}
    with pytest.raises(SettingsError, match="4 ranks on this machine, but 2 GPUs visible"):
        machine_of(mlp4, 0, *[on_gpus] * 4, given=settings(device="cuda"))


def test_a_rank_takes_the_gpu_that_the_plan_has_for_it(mlp4: Plan) -> None:
    numbers = {"a": (3, 0, 2, 1), "b": (1, 0)}
    specs = tuple(
        RankSpec(f"gpu{number}", host=host, number=number)
        for host, of_host in numbers.items()
        for number in of_host
    )
    on_a = replace(ON_A, gpus=tuple(Gpu(f"a{n}") for n in range(4)))
    on_b = replace(ON_B, gpus=tuple(Gpu(f"b{n}") for n in range(2)))
    one_host = replace(mlp4, setting=replace(mlp4.setting, ranks=specs[:4]))
    found = [machine_of(one_host, n, *[on_a] * 4, given=settings(device="cuda")) for n in range(4)]
    assert [each.device for each in found] == ["cuda:3", "cuda:0", "cuda:2", "cuda:1"]
    both = replace(mlp4, setting=replace(mlp4.setting, ranks=specs))
    every = [on_a] * 4 + [on_b] * 2
    found = [machine_of(both, n, *every, given=settings(device="cuda")) for n in (0, 3, 4, 5)]
    assert [each.device for each in found] == ["cuda:3", "cuda:1", "cuda:1", "cuda:0"]
    two = settings(device="cuda", ranks_per_gpu=2)
    found = [machine_of(one_host, n, *[on_a] * 4, given=two) for n in range(4)]
    assert [each.device for each in found] == ["cuda:1", "cuda:0", "cuda:1", "cuda:0"]


def test_a_rank_that_sees_one_gpu_of_its_own_takes_it(mlp4: Plan) -> None:
    each = [replace(ON_A, gpus=(Gpu(name),)) for name in "abcd"]
    found = [machine_of(mlp4, rank, *each, given=settings(device="cuda")) for rank in range(4)]
    assert [one.device for one in found] == ["cuda:0"] * 4


def test_a_seat_is_told_as_it_is(mlp4: Plan) -> None:
    own = replace(ON_A, gpus=GPUS, versions=(("torch", "2.13"), ("the plan", "ab")))
    assert resources_from(own.to_bytes() + b"   ") == own


def test_ranks_with_another_plan_or_torch_are_refused(mlp4: Plan) -> None:
    one = replace(ON_A, versions=(("torch", "2.13"), ("the plan", "ab")))
    check_alike([one, one])
    with pytest.raises(SettingsError) as error:
        check_alike([one, replace(ON_B, versions=(("torch", "2.13"), ("the plan", "cd")))])
    assert error.value.what == "rank 1 on b has the plan cd, rank 0 on a has ab."


def test_the_odd_one_of_several_hosts_is_named_even_if_it_is_the_first() -> None:
    new, old = (("asyncpipe", "0.2"), ("torch", "2.13")), (("torch", "2.13"),)
    with pytest.raises(SettingsError) as error:
        check_alike([replace(ON_A, versions=old), *[replace(ON_B, versions=new)] * 3])
    assert error.value.what == (
        "rank 0 on a has asyncpipe none, 3 ranks have 0.2, such as rank 1 on b."
    )


def test_a_seat_of_a_later_version_can_be_read() -> None:
    own = resources_from(b'{"host": "c", "versions": [["asyncpipe", "0.9"]], "moons": 2}')
    assert (own.host, dict(own.versions)) == ("c", {"asyncpipe": "0.9"})


def test_a_plan_with_other_cuts_is_another_plan(
    mlp4: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    other = replace(mlp4, bottleneck_ms=9.0)
    resources = [find_resources(settings(), plan, {}) for plan in (mlp4, mlp4, other)]
    assert resources[0] == resources[1] != resources[2]


# What is said


def test_the_ranks_are_described_with_their_cores() -> None:
    shm = TransportChoice("shm", "one host")
    pinned = Machine(4, 2, host_of_rank=("a", "a"), pins=("0-1", "2-3"))
    assert describe_ranks(Grid(2), shm, pinned) == (
        "2 processes · shm (one host) · 2 threads each, pinned to cores 0-1, 2-3"
    )
    loose = Machine(2, 1, "OMP_NUM_THREADS", host_of_rank=("a",) * 4, launcher="srun")
    assert describe_ranks(Grid(4), shm, loose) == (
        "4 processes by srun · shm (one host) · 1 thread each (OMP_NUM_THREADS), "
        "2 cores on this machine"
    )
    far = Machine(
        4, 1, host_of_rank=("a", "a", "b", "b"), pins=("0", "1"), launcher="torchrun",
        interface="eth0",
    )  # fmt: skip
    assert describe_ranks(Grid(4), TransportChoice("gloo"), far) == (
        "4 processes on 2 hosts by torchrun · gloo over eth0 · 1 thread each, "
        "pinned to cores 0, 1 of a"
    )


def test_tensor_ranks_are_described_and_warned_of_where_they_are_on_several_hosts() -> None:
    shm, one = TransportChoice("shm", "one host"), Machine(2, 1, host_of_rank=("a",) * 8)
    assert describe_ranks(Grid(2, 2, 2), shm, one).startswith(
        "8 processes, 2 replicas of 2 × 2 tensor ranks · shm"
    )
    assert describe_ranks(Grid(1, tensor_ranks=8), shm, one).startswith(
        "8 processes, all stages in each, split over 8 tensor ranks · shm"
    )
    hosts = Machine(host_of_rank=("a", "a", "b", "b"))
    assert tensor_ranks_warning(Grid(2, tensor_ranks=2), hosts) == ""
    assert "ranks 0 and 3, which share out one stage, are on a and b" in tensor_ranks_warning(
        Grid(1, tensor_ranks=4), hosts
    )


def test_what_crosses_hosts_is_counted(mlp4: Plan) -> None:
    schedule = make_schedule("1f1b", stages=4, micro_batches=4)
    blocks, cyclic = ("a", "a", "b", "b"), ("a", "b", "a", "b")
    assert describe_placement(mlp4, schedule, Machine(host_of_rank=("a",) * 4)) == ""
    assert describe_placement(mlp4, schedule, Machine(host_of_rank=blocks)) == (
        "ranks 0-1 on a, 2-3 on b · 1 of 3 boundaries crosses hosts"
    )
    assert describe_placement(mlp4, schedule, Machine(host_of_rank=cyclic)) == (
        "ranks 0 on a, 1 on b, 2 on a, 3 on b · 3 of 3 boundaries cross hosts"
    )
    split = Machine(host_of_rank=("a",) * 4 + ("b",) * 4)
    assert "1 of 3 boundaries" in describe_placement(mlp4, schedule, split, tensor_ranks=2)


def test_hosts_in_another_order_than_planned_are_warned_of(mlp4: Plan) -> None:
    ranks = tuple(RankSpec("cpu", host=host) for host in ("h1", "h1", "h2", "h2"))
    planned = replace(mlp4, setting=replace(mlp4.setting, ranks=ranks))
    assert placement_warning(mlp4, Machine(host_of_rank=("a", "b", "a", "b"))) == ""
    assert placement_warning(planned, Machine(host_of_rank=("x", "x", "y", "y"))) == ""
    warning = placement_warning(planned, Machine(host_of_rank=("a", "b", "a", "b")))
    assert "made for ranks 0-1 on h1, 2-3 on h2, but there are ranks 0 on a, 1 on b" in warning
    assert placement_warning(planned, Machine(host_of_rank=("a",) * 4)) != ""
