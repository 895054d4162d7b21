"""The transfer times in a plan, and the transfers that a run of its stages really makes."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import networkx as nx
import pytest

from asyncpipe.partitioner.graph.costs import LOCALHOST, Link
from asyncpipe.partitioner.graph.problem import Placement
from asyncpipe.partitioner.planning.transfers import communication_of
from asyncpipe.runtime.executor.mailbox import plan_channels
from asyncpipe.runtime.executor.precision import AS_PLANNED
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.tests.support.models.generated import CASES, LARGER, cut
from asyncpipe.tests.support.models.placements import problem_of


def sent_ms(plan: Plan) -> tuple[list[float], list[float]]:
    """By stage, the time of the channels of a micro-batch at both ends, forward and backward."""
    forward, backward = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    for channel in plan_channels(
        plan,
        plan.device_of_stage,
        sizes=plan.sizes,
        shared_specs={},
        state_bytes=0,
        dtypes=AS_PLANNED,
    ):
        totals = {"activation": forward, "gradient": backward}.get(channel.kind)
        is_tensor = channel.name != "generator state"
        if totals is None or channel.is_local or not is_tensor:
            continue
        num_bytes = math.prod(channel.shape) * channel.dtype.itemsize
        for stage in (channel.source, channel.target):
            totals[stage] += LOCALHOST.transfer_ms(num_bytes)
    return forward, backward


@pytest.mark.parametrize(
    ("name", "stages", "running"),
    [
        ("gpt2", 3, {"schedule": "1f1b"}),  # tied weights, a mask and positions made again
        ("gpt2", 6, {"schedule": "1f1b"}),  # stages of little but an embedding
        ("t5", 4, {"schedule": "async-1f1b"}),  # skips, integer tensors, a table held by several
        ("resnet", 3, {"schedule": "gpipe"}),
        ("mlp", 4, {"schedule": "interleaved", "ranks": 2}),  # a value that two stages read
    ],
)
def test_a_plan_prices_what_is_sent(name: str, stages: int, running: dict, tmp_path: Path) -> None:
    plan = read_plan(cut(CASES[name], stages, tmp_path / "plan", micro_batches=4, **running))
    forward, backward = sent_ms(plan)
    assert [stage.forward_talk_ms for stage in plan.stages] == pytest.approx(forward)
    assert [stage.backward_talk_ms for stage in plan.stages] == pytest.approx(backward)
    assert max(forward) > 0
    exchanged: dict[int, bool] = defaultdict(bool)
    for shared in plan.shared:
        ranks = {plan.device_of_stage[stage] for stage in shared.stages}
        for stage in shared.stages:
            exchanged[stage] |= len(ranks) > 1
    for stage in plan.stages:
        assert (stage.exchange_ms > 0) <= exchanged[stage.index]


def test_the_gradient_of_a_frozen_table_is_not_exchanged(tmp_path: Path) -> None:
    plan = read_plan(cut(LARGER["frozen gpt2"], 2, tmp_path / "plan", schedule="1f1b"))
    assert any(len(shared.stages) > 1 for shared in plan.shared)
    assert [stage.exchange_ms for stage in plan.stages] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("tensors", "grads"),
    [
        ({"hidden": 100.0}, {"hidden": 100.0}),
        ({"mask": 100.0}, {}),
        ({"hidden": 100.0}, {"sum of gradients": 100.0}),
        ({"hidden": 100.0, "mask": 50.0}, {"hidden": 100.0}),
    ],
    ids=["with a gradient", "without", "a gradient of another name", "both kinds"],
)
def test_a_transfer_that_overlaps_takes_the_time_of_its_forward_tensors(
    tensors: dict[str, float], grads: dict[str, float]
) -> None:
    """As generated stages send, and as the simulator takes it for both directions."""
    graph = nx.DiGraph(name="pair")
    for node in range(2):
        graph.add_node(node, forward_ms=1.0, backward_ms=1.0)
    graph.add_edge(0, 1, tensors=tensors, grads=grads)
    link = Link(bytes_per_s=1e6, overlap=True)
    talk = communication_of(problem_of(graph, 2, link), Placement((0, 1)))
    assert talk.overlapped_ms == pytest.approx({(0, 1): link.transfer_ms(sum(tensors.values()))})
