"""Where the ranks of one machine meet: a store that no other machine can reach.

torch's own store listens on all interfaces, whatever host it is given, and whoever reaches it can
tell ranks anything about each other. Handed a socket that is bound already, it keeps to that.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

_ADDRESS = "127.0.0.1"


class Loopback(RendezvousHandler):
    """The rendezvous of one agent with itself: each round has a new store, on a port of its own."""

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        return "asyncpipe-loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._server = listen()
        return RendezvousInfo(
            PrefixStore("agent", self._server),
            0,
            1,
            RendezvousStoreInfo(_ADDRESS, self._server.port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nobody else to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._server = None
        return True


def listen() -> TCPStore:
    """A store that listens on loopback alone, on a port that was free."""
    with socket.socket() as listener:
        listener.bind((_ADDRESS, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(
            _ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
