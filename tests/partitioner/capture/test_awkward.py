"""Models that change tensors in place are exact wherever they are cut."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import asyncpipe
from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.tests.support.models.inplace import AWKWARD, build, example
from asyncpipe.tests.support.oracles.captures import assert_graph_is_model
from asyncpipe.tests.support.oracles.stage_chain import (
    Chain,
    computed,
    stages_cut_before,
)
from asyncpipe.tests.support.oracles.stage_equality import assert_same

# Positions that cannot be cut. The parts of a tuple stay with it; state, with what read it before,
# stays where it is changed; and together stays what no copy would do for: a change of shape, one
# behind autograd's back, a gradient that only one of two names has, a copy made only for how its
# source lies in memory, a tensor that is another one in one of the two modes.
NOT_CUT = {
    "Chunks": [2, 3],
    "Splits": [2, 3, 4],
    "Unbound": [2, 3, 4, 5, 6, 7, 8, 9],
    "CopiedByReshape": [1, 2, 3, 4, 5],
    "Masked": [5, 6],
    "Running": [2, 3, 4],
    "Reassigned": [1, 2, 3, 4],
    "Memory": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "NormTwice": [1, 2],
    "DetachedWithGradient": [2, 3, 4],
    "Data": [2, 3],
    "InMetadata": [1, 2, 3],
    "DropoutThenChange": [2],
    "InTraining": [3, 4],
}


@cache
def captured(name: str) -> Capture:
    torch.set_num_threads(1)
    return capture(build(name), example(), check=False)


def larger() -> dict[str, Tensor]:
    x = example()["x"]
    return {"x": torch.cat([x, 2 * x[:2]])}


def assert_exact(chain: Chain) -> None:
    assert_same(chain, larger(), training=True)
    assert_same(chain, example(), training=False, by_value=True)


@pytest.mark.parametrize("name", AWKWARD)
def test_every_cut_is_exact_or_known_to_be_impossible(name: str, tmp_path: Path) -> None:
    found = captured(name)
    assert_graph_is_model(found, example())
    refused = []
    for place in range(1, len(computed(found))):
        stage_of = stages_cut_before(found, [place])
        if stage_of is None:
            refused.append(place)
        else:
            assert_exact(Chain.of(found, stage_of, tmp_path / f"cut_{place}"))
    assert refused == NOT_CUT.get(name, [])


@pytest.mark.parametrize("name", ["Masked", "InputAsSkip", "Running", "Counter"])
def test_stages_are_planned_by_measured_costs_with_micro_batches_in_flight(
    name: str, tmp_path: Path
) -> None:
    plan = asyncpipe.partition(
        build(name), example(), stages=2, output=tmp_path / "2p",
        schedule="gpipe", micro_batches=4, prefer_modules=0.0, no_cache=True,
    )  # fmt: skip
    assert all(stage.forward_ms > 0 for stage in plan.stages)


@pytest.mark.parametrize("name", AWKWARD)
def test_two_cuts_are_exact(name: str, tmp_path: Path) -> None:
    found = captured(name)
    places = range(1, len(computed(found)))
    pairs = [(first, second) for first in places for second in places if first < second]
    random.Random(name).shuffle(pairs)
    for number, pair in enumerate(pairs[:3]):
        stage_of = stages_cut_before(found, pair)
        if stage_of is None:
            continue
        assert_exact(Chain.of(found, stage_of, tmp_path / f"cuts_{number}"))
