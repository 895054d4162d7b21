"""Ranks that live in one process and thread: the reference transport, and the tests' one.

A message is copied once, as between processes. The ranks' pipelines are generators that stop where
a tensor is not there yet; `run_together` takes turns, and knows at once when no rank can go on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..errors import TransportError
from .protocol import Channel, Handle

Result = TypeVar("Result")
Messages = dict[tuple[Channel, int], Tensor]


class LocalHub:
    """The messages under way between the ranks of one process."""

    def __init__(self, world_size: int = 1, *, depth: int = 4) -> None:
        self.world_size = world_size
        self.depth = depth
        self.messages: Messages = {}

    def transport(self, rank: int) -> LocalTransport:
        return LocalTransport(self, rank)


@dataclass(frozen=True)
class LocalHandle:
    channel: Channel
    index: int
    messages: Messages

    @property
    def ready(self) -> bool:
        return (self.channel, self.index) in self.messages


@dataclass(frozen=True)
class LocalTransport:
    """One rank's end of a hub."""

    hub: LocalHub
    rank: int

    @property
    def depth(self) -> int:
        return self.hub.depth

    def send(self, channel: Channel, tensor: Tensor, index: int) -> None:
        channel.check(tensor, index)
        if (channel, index) in self.hub.messages:
            raise TransportError(f"Rank {self.rank} sent {channel.message(index)} twice.")
        # As it comes out of another process: kernels may round differently for other strides.
        self.hub.messages[channel, index] = tensor.detach().clone(
            memory_format=torch.contiguous_format
        )

    def recv(self, channel: Channel, index: int) -> LocalHandle:
        return LocalHandle(channel, index, self.hub.messages)

    def wait(self, handle: Handle) -> Tensor:
        if not handle.ready:
            raise TransportError(
                f"{_capital(handle)}, which was not sent.",
                "Ranks of one process take turns in run_together.",
            )
        return self.hub.messages.pop((handle.channel, handle.index))

    def wait_sent(self, channel: Channel, index: int) -> None:
        """What was sent are copies."""

    def close(self) -> None:
        left = [key for key in self.hub.messages if key[0].source_rank == self.rank]
        if left:
            channel, index = left[0]
            raise TransportError(
                f"Rank {channel.target_rank} never took {channel.message(index)} "
                f"from rank {self.rank}."
            )


class _Turn(Generic[Result]):
    """One rank's generator, what it waits for and what it returned."""

    def __init__(self, steps: Generator[Handle, None, Result]) -> None:
        self.steps = steps
        self.waits_for: Handle | None = None
        self.result: list[Result] = []

    def go_on(self) -> None:
        try:
            self.waits_for = next(self.steps)
        except StopIteration as end:
            self.result.append(end.value)


def run_together(ranks: Sequence[Generator[Handle, None, Result]]) -> list[Result]:
    """Runs the ranks' generators in turns until all are done; their results in order.

    Raises TransportError when every rank waits for another.
    """
    turns = [_Turn(steps) for steps in ranks]
    while active := [turn for turn in turns if not turn.result]:
        can_go_on = [turn for turn in active if turn.waits_for is None or turn.waits_for.ready]
        if not can_go_on:
            waits = "; ".join(_waiting(turn.waits_for) for turn in active if turn.waits_for)
            raise TransportError(f"No rank can go on: {waits}.")
        for turn in can_go_on:
            turn.go_on()
    return [result for turn in turns for result in turn.result]


def _waiting(handle: Handle) -> str:
    return handle.channel.waiting(handle.index)


def _capital(handle: Handle) -> str:
    text = _waiting(handle)
    return text[0].upper() + text[1:]
