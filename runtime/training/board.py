"""Short texts that ranks leave for each other, in the store through which they met.

A rank puts one down, or looks for one, at any moment and from any thread, and waits for nobody:
what is agreed on so needs no collective, and stands behind none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from ..errors import TransportError
from ..launching.world import World

_LOOK_S = 0.02


class Board:
    """The texts of one run, by key; each is put down once."""

    def __init__(self, world: World) -> None:
        self._rank, self._ranks = world.rank, world.ranks
        self._store: Store | None = None
        if world.control is not None:
            self._store = PrefixStore("asyncpipe", _get_default_store())
        self._own: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Leaves a text for all ranks."""
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """What is there by now."""
        if self._store is None:
            return self._own.get(key)
        if not self._store.check([key]):
            return None
        content: bytes = self._store.get(key)
        return content.decode()

    def post_own(self, key: str, text: str) -> None:
        """Leaves this rank's text of those that all ranks leave."""
        self.post(f"{key}/{self._rank}", text)

    def gathered(
        self, key: str, *, wait_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> Sequence[str]:
        """Waits for the texts that all ranks leave; by rank, or nothing when meanwhile it
        `is_over`. Raises TransportError when one does not come in time."""
        found: list[str] = []
        for rank in range(self._ranks):
            told = self.awaited(f"{key}/{rank}", rank, wait_s=wait_s, is_over=is_over)
            if told is None:
                return ()
            found.append(told)
        return found

    def awaited(
        self, key: str, of: int, *, wait_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Waits for a text that the rank `of` leaves; None when meanwhile it `is_over`. Raises
        TransportError when it does not come in time."""
        end_s = time.monotonic() + wait_s
        while (told := self.read(key)) is None:
            if is_over():
                return None
            if time.monotonic() > end_s:
                raise TransportError(
                    f"rank {self._rank} waits for rank {of} to say {key} ({wait_s:g} s)."
                )
            time.sleep(_LOOK_S)
        return told
