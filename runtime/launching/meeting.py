"""The address of rank 0 -> a store that all ranks have found, or the ranks that are missing.

Every rank says in the store that it is there, and waits until all have: so each can say who has
not come.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..errors import TransportError
from .interfaces import VARIABLES, unreachable
from .launchers import Place

_HEAD = "head"
_LOOK_S = 0.02


def open_store(place: Place, seconds: float) -> Store:
    """The store at rank 0's address, where torch's agent or rank 0 itself has it.

    Raises what torch raises when it cannot be opened or reached.
    """
    return TCPStore(
        place.head,
        place.port,
        place.ranks,
        place.rank == 0 and not place.shares_store,
        datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=not place.shares_store,
    )


def call_roll(store: Store, place: Place, seconds: float) -> Store:
    """Waits until every rank has called it; the part of the store that is for these ranks alone.

    torch's agent has one store for all attempts, and the agents of several hosts count attempts
    each for itself. So rank 0 opens a list of a name of its own, others enter there a name of
    theirs, and go on with the list that rank 0 has closed and that has it.

    Raises TransportError that names the ranks that did not come in time.
    """
    own, entered = secrets.token_hex(8), ""
    if place.rank == 0:
        store.set(_HEAD, own)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        head = _read(store, _HEAD)
        if head != entered:
            store.set(f"{head}/{place.rank}", f"{own} {socket.gethostname()}")
            entered = head
        if place.rank == 0 and len(here := _here(store, head, place.ranks)) == place.ranks:
            store.set(f"{head}/closed", " ".join(here.values()))
        if own in _read(store, f"{head}/closed").split():
            return PrefixStore(head, store)
        time.sleep(_LOOK_S)
    raise _missing(place, _here(store, entered, place.ranks), seconds)


def _here(store: Store, head: str, ranks: int) -> dict[int, str]:
    """What the ranks have entered in a list: their name there and their host."""
    entries = {rank: _read(store, f"{head}/{rank}") for rank in range(ranks)}
    return {rank: entry for rank, entry in entries.items() if entry}


def _read(store: Store, key: str) -> str:
    """What is there by now; "" for nothing."""
    if not store.check([key]):
        return ""
    content: bytes = store.get(key)
    return content.decode()


def joining_error(place: Place, seconds: float, text: str) -> TransportError:
    """What to tell of an exception of torch.distributed while ranks meet."""
    at = f"{place.head}:{place.port}"
    if "EADDRINUSE" in text:
        return TransportError(
            f"rank 0 cannot open {at}: another program has this port.",
            f"--master-port {place.port + 1}, the same on all hosts.",
        )
    if "full mesh" in text.lower() or "gloo" in text.lower():
        interface = os.environ.get(VARIABLES[0], "the interface that gloo chose")
        return TransportError(
            f"rank {place.rank} found the others at {at}, and cannot connect to them over "
            f"{interface}: {text.splitlines()[0]}",
            "--interface NAME, of a network that all hosts share.",
        )
    return unreachable(place, seconds)


def _missing(place: Place, here: Mapping[int, str], seconds: float) -> TransportError:
    # Without rank 0 there is no list of the others.
    missing = [rank for rank in range(place.ranks) if rank not in here] if here else [0]
    at = f" at {place.head}:{place.port}" if place.head and place.port else ""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, entry in here.items():
        by_host[entry.split()[1]].append(rank)
    there = ", ".join(f"{_ranks(ranks)} on {host}" for host, ranks in by_host.items())
    return TransportError(
        f"rank {place.rank} waits{at} for {_ranks(missing)}, which "
        f"{'has' if len(missing) == 1 else 'have'} not come in {seconds:g} s"
        f"{'; there is ' if there else ''}{there}.",
        f"See what became of {_ranks(missing)}, or allow more time with --timeout-s.",
    )


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3`, `ranks 0, 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"ranks {first}-{last}"
    return f"ranks {', '.join(map(str, ranks))}"
