"""A message that does not come or is not taken -> the error that says who waits for whom."""

from __future__ import annotations

from typing import Protocol

from ..errors import TransportError
from .protocol import Channel


class Blame(Protocol):
    """One of the two below."""

    def __call__(
        self, channel: Channel, index: int, *, timeout_s: float, reason: str = ""
    ) -> TransportError: ...


def not_received(
    channel: Channel, index: int, *, timeout_s: float, reason: str = ""
) -> TransportError:
    """Of the rank that waits for a message; `reason` is why it never comes, "" when it is late."""
    return _error(channel.waiting(index), channel.source_rank, timeout_s, reason)


def not_taken(
    channel: Channel, index: int, *, timeout_s: float, reason: str = ""
) -> TransportError:
    """Of the rank whose message is not taken."""
    what = (
        f"rank {channel.source_rank} waits for rank {channel.target_rank} "
        f"to take {channel.message(index)}"
    )
    return _error(what, channel.target_rank, timeout_s, reason)


def _error(what: str, peer: int, timeout_s: float, reason: str) -> TransportError:
    if reason:
        return TransportError(
            f"{what}, but rank {peer} is gone: {reason.splitlines()[0]}",
            f"The output of rank {peer} says why it ended.",
        )
    return TransportError(
        f"{what} ({timeout_s:g} s).",
        f"See what rank {peer} does, or allow more time with --timeout-s.",
    )
