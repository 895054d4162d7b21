"""The memory of a rank: nothing grows, and no tensor is held longer than it is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.executor.instrumented import Observer, StepOptimizers
from asyncpipe.runtime.schedule.schedule import Schedule
from asyncpipe.runtime.transports import Channel, GlooTransport, LocalHub, run_together
from asyncpipe.runtime.transports.protocol import LocalHandle, LocalTransport
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, tied
from asyncpipe.tests.support.processes.executor import lowered, make_pipeline, with_split_backwards
from asyncpipe.tests.support.processes.gloo_ranks import run_processes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def made(name: str) -> tuple[HandModel, Schedule, list[Mapping[str, int]] | None]:
    """A model, a schedule of two ranks, and the sizes of micro-batches."""
    if name == "tied":
        model = tied(2)
        return model, lowered(model, "1f1b", 4), None
    model = chain(2, norm=True, dropout=0.25)
    if name == "recomputation, W and micro-batches of two sizes":
        stages = tuple(replace(stage, recompute=True) for stage in model.plan.stages)
        plain = model.make_inputs
        model = replace(
            model,
            plan=replace(model.plan, stages=stages),
            make_inputs=lambda i: {
                key: value[: 2 if i % 4 == 3 else 3] for key, value in plain(i).items()
            },
        )
        sizes = [{"batch": 3}, {"batch": 3}, {"batch": 3}, {"batch": 2}]
        return model, with_split_backwards(lowered(model, "1f1b", 4), model, behind=1), sizes
    return model, lowered(model, name, 4), None


def growth(seen: list[tuple[int, int]]) -> tuple[int, int]:
    """The bytes that each stretch of a run added at least, since a heap may grow now and then and
    what leaks grows always; and the tensors that the whole of it added."""
    bytes_added = min(after - before for (before, _), (after, _) in pairwise(seen))
    return bytes_added, seen[-1][1] - seen[0][1]


@pytest.fixture(autouse=True)
def counted_from_here() -> None:
    """What there is before, other tests' things among it, is looked at by no collection."""
    gc.collect()
    gc.freeze()


NAMES = ("gpipe", "1f1b", "tied", "recomputation, W and micro-batches of two sizes")


def grown(rank: int, names: tuple[str, ...], warm: int, steps: int) -> dict[str, tuple[int, int]]:
    """The `growth` of four stretches of together `steps` steps."""
    found = {}
    for name in names:
        model, schedule, sizes = made(name)
        modules = model.build()
        optimizer = torch.optim.AdamW(modules[rank].parameters(), lr=1e-4)
        observer = StepOptimizers({rank: optimizer})
        pipeline = make_pipeline(
            model, schedule, modules, GlooTransport(), batch_norm_per_step=True
        )
        seen: list[tuple[int, int]] = []
        for step in range(warm + steps + 1):
            if step >= warm and (step - warm) % (steps // 4) == 0:
                seen.append((resident_bytes(), live_tensors()))
            pipeline.run(
                schedule,
                model.make_inputs,
                first_micro_batch=4 * step,
                observer=observer,
                sizes=sizes,
            )
        pipeline.close()
        found[name] = growth(seen)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_nothing_grows_over_some_hundred_steps(name: str) -> None:
    model, schedule, sizes = made(name)
    modules, hub = model.build(), LocalHub(2)
    pipelines = [make_pipeline(model, schedule, modules, hub.transport(rank)) for rank in range(2)]
    optimizers = {j: torch.optim.AdamW(m.parameters(), lr=1e-4) for j, m in enumerate(modules)}
    seen: list[tuple[int, int]] = []
    for step in range(351):
        if step and step % 50 == 0:
            seen.append((resident_bytes(), live_tensors()))
        run_together(
            [
                pipeline.steps(
                    schedule,
                    model.make_inputs,
                    first_micro_batch=4 * step,
                    observer=StepOptimizers(optimizers),
                    sizes=sizes,
                )
                for pipeline in pipelines
            ]
        )
    num_bytes, tensors = growth(seen)
    assert num_bytes < 2**18
    assert tensors <= 0


def test_nothing_grows_over_some_hundred_steps_of_processes() -> None:
    results = run_processes(2, grown, NAMES[2:], 50, 240, limit_s=280)
    for result in results:
        assert isinstance(result, dict), result
        for name, (num_bytes, tensors) in result.items():
            assert num_bytes < 2**17, (name, num_bytes)
            assert tensors <= 0, (name, tensors)


def test_the_outputs_of_the_last_stage_are_gone_when_they_have_been_seen() -> None:
    model = tied(2)
    schedule = lowered(model, "gpipe", 3)
    modules, hub = model.build(), LocalHub(2)
    logits: dict[int, weakref.ref[Tensor]] = {}
    alive: list[int] = []

    class Looking(Observer):
        def on_outputs(self, micro_batch: int, outputs: Mapping[str, Tensor]) -> None:
            alive.append(sum(reference() is not None for reference in logits.values()))
            logits[micro_batch] = weakref.ref(outputs["logits"])

    run_together(
        [
            make_pipeline(model, schedule, modules, hub.transport(rank)).steps(
                schedule, model.make_inputs, observer=Looking()
            )
            for rank in range(2)
        ]
    )
    assert alive == [0, 0, 0]


class Counting(LocalTransport):
    """Counts receives that are posted and not taken, and notes what is let go of."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        super().__init__(hub, rank)
        object.__setattr__(self, "open", {"activation": 0, "gradient": 0})
        object.__setattr__(self, "most", {"activation": 0, "gradient": 0})
        object.__setattr__(self, "held", {"activation": 0, "gradient": 0})
        object.__setattr__(self, "sent", {"activation": -1, "gradient": -1})
        object.__setattr__(self, "let_go", {"activation": -1, "gradient": -1})

    def recv(self, channel: Channel, index: int) -> LocalHandle:
        self.open[channel.kind] += 1
        self.most[channel.kind] = max(self.most[channel.kind], self.open[channel.kind])
        return super().recv(channel, index)

    def wait(self, handle: LocalHandle) -> Tensor:
        self.open[handle.channel.kind] -= 1
        return super().wait(handle)

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        kind = channel.kind
        self.sent[kind] = index
        self.held[kind] = max(self.held[kind], index - self.let_go[kind])
        super().send(channel, tensor, index)

    def wait_sent(self, channel: Channel, index: int) -> None:
        self.let_go[channel.kind] = max(self.let_go[channel.kind], index)


@pytest.mark.parametrize(
    ("schedule", "stages", "receives", "held"),
    [
        # Receives posted at most by each rank, of activations and gradients; sends held likewise.
        ("1f1b", 2, [(0, 2), (2, 0)], [(2, 0), (0, 2)]),
        ("1f1b", 3, [(0, 3), (3, 2), (2, 0)], [(3, 0), (2, 3), (0, 2)]),
        ("seq", 2, [(0, 1), (1, 0)], [(1, 0), (0, 1)]),
    ],
)
def test_receives_and_sends_are_no_more_than_the_schedule_has_in_flight(
    schedule: str, stages: int, receives: list[tuple[int, int]], held: list[tuple[int, int]]
) -> None:
    model = chain(stages)
    lowered_schedule = lowered(model, schedule, 8)
    modules, hub = model.build(), LocalHub(stages)
    transports = [Counting(hub, rank) for rank in range(stages)]
    run_together(
        [
            make_pipeline(model, lowered_schedule, modules, transport).steps(
                lowered_schedule, model.make_inputs
            )
            for transport in transports
        ]
    )
    found = [(t.most["activation"], t.most["gradient"]) for t in transports]
    assert found == receives
    assert [(t.held["activation"], t.held["gradient"]) for t in transports] == held
    assert all(t.open == {"activation": 0, "gradient": 0} for t in transports)
    for transport in transports:
        assert transport.let_go == transport.sent  # at the end of a run, everything
