"""The collective calls of a user's loop: all ranks make the same ones in the same order.

A rank that makes another call than the others would exchange tensors of different steps with them,
so each call has a number, and what the ranks exchange anyway carries it. A rank that waits for
others in vain says in which call it is, and in which they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import AsyncPipeError, TransportError
from .failure import is_consequence
from .process_groups import SharedStore, World

_LOOK_S = 0.05
_PATIENCE_S = 2.0
"""The longest time that a failing rank waits to learn in which calls the others are."""
CLOSED = "has closed its pipeline"


class CallError(AsyncPipeError):
    """Ranks make different calls, or a call follows the end of a pipeline."""


@dataclass(frozen=True)
class Call:
    """One call of one rank."""

    name: str
    number: int
    calls: Calls

    def check_sum(self, total: float) -> None:
        """Raises CallError unless the numbers of all ranks' calls, whose sum is given, are this
        one."""
        if total != self.number * self.calls.ranks:
            raise CallError(
                f"{self.name} is call {self.number} of rank {self.calls.rank}, and other ranks "
                "have made more or fewer calls of the pipeline.",
                "Make the same calls in the same order on every rank.",
            )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """An error inside that another rank has caused says in which calls the ranks are."""
        try:
            yield
        except (RuntimeError, TransportError) as error:
            if not is_consequence(error):
                raise
            is_reported = isinstance(error, TransportError)
            raise self.calls.waited(error) from (error.__cause__ if is_reported else error)


class Calls:
    """The collective calls of one rank.

    number: that of the last call that has begun.
    """

    def __init__(self, world: World, board: SharedStore, patience_s: float) -> None:
        self.number = 0
        self._name = self._inside = self._end = ""
        self._board, self._patience_s = board, patience_s
        self.rank, self.ranks = world.rank, world.ranks

    @contextmanager
    def during(self, name: str, *, breaks: bool) -> Iterator[None]:
        """One call, inside which no other may begin.

        breaks: an error in it leaves ranks in the middle of an exchange, or gradients incomplete,
            so that all later calls are refused; a lost or silent rank always does.
        """
        self.check()
        self.number += 1
        self._name = self._inside = name
        try:
            yield
        except GeneratorExit:  # a stream that has completed its steps
            raise
        except BaseException as error:
            if breaks or is_consequence(error):
                self._end = f"{name} has failed ({type(error).__name__})"
            with self.present.waiting():
                raise
        finally:
            self._inside = ""

    def check(self) -> None:
        """Raises CallError inside a call, and after the end."""
        if self._inside:
            raise CallError(
                f"{self._inside} of this pipeline is under way.",
                "Leave its loop or call flush() first.",
            )
        if self._end:
            raise CallError(
                f"this pipeline cannot be used any more: {self._end}.",
                "Make a new Pipeline, and load what was saved.",
            )

    def close(self) -> None:
        """Ends the calls; the others may read it."""
        self._end = self._end or "it was closed"
        self._post(CLOSED)

    @property
    def present(self) -> Call:
        """The last call that has begun."""
        return Call(self._name, self.number, self)

    def check_alike(self, numbers: Sequence[float]) -> None:
        """Raises CallError where other ranks are in calls of other numbers."""
        for number in numbers:
            self.present.check_sum(number * self.ranks)

    def waited(self, error: BaseException) -> TransportError:
        """The error of a rank that waited in vain, with the calls that the others are in."""
        if isinstance(error, TransportError):
            message, cure = error.what.removesuffix("."), error.cure
        else:
            how = (
                f"waited {self._patience_s:g} s for the other ranks"
                if "timed out" in str(error).lower()
                else "lost the connection to another rank"
            )
            message = f"rank {self.rank} {how}"
            cure = "See what the other ranks do, or allow more time with timeout_s."
        own = f"is in {self._name}"
        others = {rank: of for rank, of in self._others(own).items() if of != own}
        if others:
            calls = ", ".join(f"rank {rank} {of}" for rank, of in others.items())
            cure = "Make the same calls of the pipeline in the same order on every rank."
            return TransportError(f"{message}, in {self._name}; {calls}.", cure)
        return TransportError(f"{message}, in {self._name}.", cure)

    def _others(self, own: str) -> dict[int, str]:
        """The calls that the other ranks report to be in, by rank."""
        self._post(own)
        call_of: dict[int, str] = {}
        end_s = time.monotonic() + _PATIENCE_S
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        while len(call_of) < len(others) and time.monotonic() < end_s:
            with contextlib.suppress(RuntimeError, dist.DistError):  # the store ends with rank 0
                for rank in others:
                    text = self._board.read(f"call/{rank}")
                    call_of |= {} if text is None else {rank: text}
            time.sleep(_LOOK_S)
        return call_of

    def _post(self, text: str) -> None:
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._board.post_own("call", text)
