"""Phases of elastic runs: what they are planned for, and that each is the best for it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.graph.costs import LOCALHOST
from asyncpipe.partitioner.phases import frozen, frozen_nodes
from asyncpipe.partitioner.profile.profiler import CPU_CORE, profile_analytic
from asyncpipe.runtime.freezing.elastic import Elastic, read_elastic
from asyncpipe.runtime.plan.forecast import forecast_step
from asyncpipe.runtime.plan.plan import Plan, read_plan
from asyncpipe.runtime.schedule.builders import make_schedule
from asyncpipe.runtime.schedule.simulate import ActionCosts, simulate

WIDTHS = (96, 128, 512, 256, 384, 128, 256, 512, 192)
BLOCKS, MICRO_BATCHES = len(WIDTHS) - 1, 3


class Chain(nn.Module):
    """Blocks of different sizes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, following), nn.Tanh())
            for width, following in pairwise(WIDTHS)
        )
        self.head = nn.Linear(WIDTHS[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


INPUTS = {"x": torch.randn(256, WIDTHS[0])}


def phases(folder: Path, lengths: str, **given: Any) -> tuple[Elastic, list[Plan]]:
    """The phases of a chain, and their plans."""
    asyncpipe.partition(
        Chain(),
        INPUTS,
        name="chain",
        stages=int(lengths[0]),
        schedule="1f1b",
        loss="cross_entropy",
        profile="analytic",
        prefer_modules=0.0,
        elastic=lengths,
        output=str(folder),
        **{"micro_batches": MICRO_BATCHES} | given,
    )
    elastic = read_elastic(folder)
    return elastic, [read_plan(folder / phase.folder) for phase in elastic.phases]


def names_before(depth: int) -> set[str]:
    return {f"blocks.{block}.0.{tensor}" for block in range(depth) for tensor in ("weight", "bias")}


def steps_of_cuts(depth: int, cached: bool) -> dict[int, float]:
    """The step of two stages for each number of layers in the first one, by its definition."""
    model = Chain()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names_before(depth))
    captured = capture(model, INPUTS)
    costs = profile_analytic(captured, captured.arguments.tensors, CPU_CORE).nodes
    layers = [node for node in captured.graph.nodes if node.op == "call_module"]
    steps = {}
    for cut in range(1, len(layers)):
        sent: Tensor = layers[cut - 1].meta["val"]
        talk_ms = LOCALHOST.transfer_ms(256 * sent.shape[1] * 4)
        back_ms = talk_ms * sent.requires_grad
        parts = layers[:cut], layers[cut:]
        skipped = 2 * depth if cached else 0  # layers
        forward, backward = (
            tuple(sum(getattr(costs[layer.name], name) for layer in part) for part in chosen)
            for name, chosen in (
                ("forward_ms", (parts[0][skipped:], layers[max(cut, skipped) :])),
                ("backward_ms", parts),
            )
        )
        of_step = ActionCosts(
            forward_ms=tuple(ms + talk_ms for ms in forward),
            backward_ms=tuple(ms + back_ms for ms in backward),
            step_ms=(0.0, 0.0),
        )
        schedule = make_schedule("1f1b", stages=2, micro_batches=MICRO_BATCHES)
        edges = {(0, 1)}
        timeline = simulate(
            schedule, of_step, edges, grad_edges=edges if sent.requires_grad else set()
        )
        steps[cut] = timeline.makespan_ms
    return steps


def test_a_phase_has_the_best_of_all_cuts(tmp_path: Path) -> None:
    """Three micro-batches cannot be shared out, so that the pipeline keeps its length."""
    best = {}
    for cache in ("off", "auto"):
        elastic, plans = phases(tmp_path / cache, "2,1", freeze="1=6", cache=cache)
        assert elastic.cached == (cache != "off")
        for phase, plan in zip(elastic.phases[1:], plans[1:], strict=True):
            steps = steps_of_cuts(phase.depth, elastic.cached)
            best[cache, phase.depth] = min(steps, key=lambda cut: steps[cut])
            assert len(plan.stages[0].parameters) // 2 == best[cache, phase.depth] // 2
            assert phase.step_ms == pytest.approx(min(steps.values()), rel=1e-5)
    assert best["off", 6] < best["auto", 6]


def test_what_grows_decides_on_lengths_and_steps(tmp_path: Path) -> None:
    for grow, stages, own in (("replicas", 1, 2), ("batch", 1, 4), ("off", 2, 4)):
        elastic, (_, plan) = phases(
            tmp_path / grow, "2,1", freeze="1=8", grow=grow, micro_batches=4
        )
        phase = elastic.phases[1]
        assert (elastic.grow, phase.stages, plan.setting.micro_batches) == (grow, stages, own)
        step_ms = forecast_step(plan, "1f1b", own).step_ms
        gradients = plan.stages[-1].memory.gradients if grow != "off" else 0
        assert phase.step_ms == pytest.approx(step_ms + LOCALHOST.transfer_ms(gradients), rel=1e-4)


def test_phases_stay_long_while_a_longer_pipeline_is_faster(tmp_path: Path) -> None:
    """The fastest cut of three stages needs more memory than a rank at first, another one not."""
    given: dict[str, Any] = {"grow": "off", "cache": "auto", "micro_batches": 8}
    elastic, _ = phases(tmp_path / "chain", "3,1", freeze="1=5", **given)
    first, second = elastic.phases
    assert second.stages == 3 and second.peak_bytes <= first.peak_bytes


class Masked(nn.Module):
    """A mask that no parameter makes, a frozen part, a part that trains, and what it is without."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        frozen_part = torch.tanh(self.inner(x))
        trained = self.head(frozen_part * mask)
        return trained * trained.detach().abs()


def test_a_cache_has_what_only_frozen_parameters_make() -> None:
    model = Masked()
    assert not frozen_nodes(capture(model, {"x": torch.randn(3, 4)}))
    with frozen(model, frozenset({"inner.weight", "inner.bias"})):
        found = frozen_nodes(capture(model, {"x": torch.randn(3, 4)}))
    assert found == {"inner", "frozen_part", "mul"}
