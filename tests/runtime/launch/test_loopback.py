"""Ranks of one machine meet where no other machine can come."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from asyncpipe.runtime.distributed.rendezvous import Loopback, listen
from asyncpipe.tests.support.models.hand_folders import exact_settings, write_mlp
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening(process: int | str = "self") -> set[str]:
    """The addresses and ports, as hexadecimal digits, where a process waits for connections."""
    own = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            own.add(str(link.readlink()))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and f"socket:[{words[9]}]" in own:
                found.add(words[1])
    return found


def addresses(places: Iterable[str]) -> set[str]:
    return {place.partition(":")[0] for place in places}


def test_the_store_of_own_ranks_listens_on_loopback_alone() -> None:
    before = listening()
    store = listen()
    assert addresses(listening() - before) <= LOOPBACK and listening() - before
    client = TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10))
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_of_torch_does_not() -> None:
    """Else there were no need of ours, and the test above could not fail."""
    before = listening()
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert not addresses(listening() - before) <= LOOPBACK
    assert store.port


def test_every_round_has_a_store_of_its_own() -> None:
    handler = Loopback()
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert (first.rank, first.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    ports = {each.bootstrap_store_info.master_port for each in (first, second)}
    assert len(ports) == 2
    assert handler.shutdown()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_nothing_of_a_run_listens_beyond_loopback(tmp_path: Path, transport: str) -> None:
    """Seen from its ranks, in the criterion of the last, and from the process that starts them."""
    write_mlp(tmp_path / "mlp")
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n\n"
        "from asyncpipe.tests.runtime.launch.test_loopback import listening\n"
        "from torch.nn.functional import cross_entropy\n\n\n"
        "def criterion(outputs, target):\n"
        f"    Path({str(tmp_path / 'told')!r}).write_text(' '.join(listening()))\n"
        "    return cross_entropy(outputs, target)\n"
    )
    settings = exact_settings(
        tmp_path / "mlp",
        tmp_path / "run",
        criterion=f"{tmp_path / 'own.py'}:criterion",
        transport=transport,
    )
    before, during = listening(), set()

    def look() -> None:
        while not over.wait(0.02):
            during.update(listening() - before)

    over = threading.Event()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert run(settings, FACTORY) == Path(str(settings.output))
    finally:
        over.set()
        looking.join()
    assert during and addresses(during) <= LOOPBACK
    assert addresses((tmp_path / "told").read_text().split()) <= LOOPBACK
