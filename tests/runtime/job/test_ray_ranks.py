"""The ranks of a job on Ray: their environment, their signals, and the end of all after a failure.

The cluster is a stand-in; benchmarks/results/ray_job.txt has a job on a real one.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.job import ray_ranks
from asyncpipe.runtime.job.job_file import JobError
from asyncpipe.runtime.job.ray_ranks import RankActor, RayRanks, Seat
from asyncpipe.tests.support.processes.fake_ray import fake_ray
from asyncpipe.tests.support.processes.in_process import error_of


class SeatedActor(RankActor):
    """An actor that knows its node, as with Ray."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def seat(self) -> Seat:
        return Seat(self._node, f"address of {self._node}", 4000, (f"gpu of {self._node}",))


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(["b", "a", "b"]))
    monkeypatch.setattr(ray_ranks, "RankActor", SeatedActor)
    monkeypatch.setattr(ray_ranks, "_BEAT_S", 0.02)
    monkeypatch.chdir(tmp_path)


def ranks(script: str, count: int = 3) -> RayRanks:
    words: Sequence[str] = ["sh", "-c", script]
    return RayRanks(words, Settings(folder="x"), count, {"PATH": "/usr/bin:/bin", "OWN": "1"})


def test_every_rank_has_the_environment_that_torchrun_gives(tmp_path: Path) -> None:
    names = "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $OWN"
    assert ranks(f'echo "{names}" > "$RANK"').wait() == 0
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(3)] == [
        "0/3 0/1 address of a:4000 1",
        "1/3 0/2 address of a:4000 1",
        "2/3 1/2 address of a:4000 1",
    ]


def test_all_end_after_the_first_that_fails() -> None:
    start_s = time.monotonic()
    assert ranks('test "$RANK" = 1 && exit 7; exec sleep 60').wait() == 7
    assert time.monotonic() - start_s < 30


def test_a_signal_reaches_every_rank(tmp_path: Path) -> None:
    script = 'trap "exit 143" TERM; touch "on-$RANK"; while true; do sleep 0.05; done'
    running = ranks(script)

    def stop() -> None:
        while len([*tmp_path.glob("on-*")]) < 3:
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert running.wait() == 143
    thread.join()


def test_a_cluster_without_room_or_no_cluster_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(["a"], has_room=False))
    with pytest.raises(JobError, match="did not provide 2 × .*CPU.* within 120 s.\nray status"):
        ranks("true", 2)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "mine.toml").write_text('[model]\nmodel = "mlp"\n')
    told = error_of(tmp_path, "job", "run", "mine.toml", "--on", "ray")
    assert "--on ray needs ray, which is not installed.\npip install" in told
