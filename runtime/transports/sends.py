"""The sends of each channel that are under way, the oldest first."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from .protocol import Channel

Sent = TypeVar("Sent")


class Sends(Generic[Sent]):
    """What must live until it has arrived; `finish(channel, index, sent)` waits for one."""

    def __init__(self, finish: Callable[[Channel, int, Sent], None]) -> None:
        self._finish = finish
        self._under_way: dict[Channel, deque[tuple[int, Sent]]] = defaultdict(deque)

    def add(self, channel: Channel, index: int, sent: Sent) -> None:
        self._under_way[channel].append((index, sent))

    def make_room(self, channel: Channel, depth: int) -> None:
        """Waits for the oldest where `depth` of a channel are under way."""
        while len(self._under_way[channel]) >= depth:
            self._finish_oldest(channel)

    def finish_until(self, channel: Channel, index: int) -> None:
        """Waits for the messages of a channel up to `index`."""
        under_way = self._under_way[channel]
        while under_way and under_way[0][0] <= index:
            self._finish_oldest(channel)

    def forget(self, channel: Channel, is_over: Callable[[Sent], bool]) -> None:
        """Lets go of the oldest of a channel that are over."""
        under_way = self._under_way[channel]
        while under_way and is_over(under_way[0][1]):
            under_way.popleft()

    def finish_all(self) -> None:
        for channel, under_way in self._under_way.items():
            while under_way:
                self._finish_oldest(channel)

    def _finish_oldest(self, channel: Channel) -> None:
        self._finish(channel, *self._under_way[channel].popleft())
