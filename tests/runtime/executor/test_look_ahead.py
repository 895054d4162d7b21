"""A stage sees the inputs of its next forward before it is due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from asyncpipe.runtime.executor.stage import Call
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.processes.executor import lowered, make_pipeline


class Watching:
    """Records the memory of the first input that a stage is shown or called with, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._kept: list[Tensor] = []  # so that no other tensor has its memory

    def __call__(self, arguments: tuple[Tensor, ...], call: Call) -> Any:
        self._add("called", arguments[0])
        return call(arguments)

    def look_ahead(self, arguments: tuple[Tensor, ...], index: int) -> None:
        self._add("shown", arguments[0])

    def _add(self, event: str, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self.events.append((event, tensor.data_ptr()))

    def of(self, event: str) -> list[int]:
        """The memory of the inputs of all events of a kind."""
        return [memory for kind, memory in self.events if kind == event]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async-1f1b"])
def test_each_stage_is_shown_the_next_micro_batch_that_it_is_called_with(
    name: str, training: bool
) -> None:
    model, asked = chain(2), list[tuple[int, int]]()
    count = 8 if name == "async-1f1b" else 4
    schedule = lowered(model, name, count, step_every=4)
    hub, modules = LocalHub(2), model.build()
    pipelines = [make_pipeline(model, schedule, modules, hub.transport(rank)) for rank in (0, 1)]
    watching = [Watching(), Watching()]
    for rank, pipeline in enumerate(pipelines):
        pipeline.stages[rank].around = watching[rank]

    def feed(rank: int, number: int) -> Mapping[str, Tensor]:
        asked.append((rank, number))
        return model.make_inputs(number)

    run_together(
        [
            pipeline.steps(
                schedule, lambda number, rank=rank: feed(rank, number), training=training
            )
            for rank, pipeline in enumerate(pipelines)
        ]
    )
    for rank in (0, 1):
        assert [number for of_rank, number in asked if of_rank == rank] == [*range(count)]
    # The data of a step are not read before it begins.
    called = watching[0].of("called")
    expected = []
    for first in range(0, count, 4):
        for number in range(first, first + 4):
            if number + 1 < first + 4:
                expected.append(("shown", called[number + 1]))
            expected.append(("called", called[number]))
    assert watching[0].events == expected
    # Messages are shown if they arrive before their forward is due, in this step or the next.
    shown, called = (watching[1].of(event) for event in ("shown", "called"))
    assert shown == [memory for memory in called if memory in shown] and shown
