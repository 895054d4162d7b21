"""SIGTERM and SIGUSR1: all ranks stop after one step, leave a checkpoint, and end with 143."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpipe.runtime.checkpoint.folders import checkpoints_in, read_facts
from asyncpipe.runtime.distributed.process_groups import SharedStore, World
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.training.checkpointing import Stopping
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import assert_same, train
from asyncpipe.tests.support.processes.silent_reporter import events_of

SIGNALLED = """
import os, signal
from torch.nn.functional import cross_entropy
calls = 0
def criterion(outputs, target):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.{name})
    return cross_entropy(outputs, target)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "mlp"
    write_mlp(folder, stages=4, noisy=True)
    return folder


def stopped_after(folder: Path, output: Path, name: str, **given: Any) -> int:
    """The step after which a run stops whose last stage is signalled in the 31st forward."""
    criterion = output.with_name("signalled.py")
    criterion.write_text(SIGNALLED.format(call=31, name=name))
    with pytest.raises(SystemExit) as end:
        train(folder, output, criterion=f"{criterion}:criterion", **given)
    assert end.value.code == 143
    (checkpoint,) = checkpoints_in(output)
    assert not list((output / "checkpoints").glob(".*"))
    return read_facts(checkpoint).step


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SIGTERM", {"schedule": "single"}),
        ("SIGUSR1", {"schedule": "async-1f1b", "ranks": 1}),
        ("SIGUSR1", {"schedule": "2bw", "ranks": 1}),
        ("SIGTERM", {"schedule": "1f1b"}),
        ("SIGTERM", {"schedule": "async-1f1b", "micro_batches": 1}),
        ("SIGUSR1", {"schedule": "async-1f1b", "micro_batches": 1, "ranks": 2, "replicas": 2}),
    ],
)
def test_a_run_that_was_told_to_stop_goes_on_from_there(
    folder: Path, tmp_path: Path, name: str, given: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"decay": "none", "warmup": 0, "lr": 0.01} | given
    step = stopped_after(
        folder, tmp_path / "run", name, steps=9000, save_every=0, log_every=500, **options
    )
    assert 31 // options.get("micro_batches", 4) < step < 9000
    (told,) = (text for about, text in events_of(tmp_path / "run", "note") if about == "stopped")
    assert told == (
        f"by {name} after step {step} of 9000 · checkpoint step-{step:06} · continue: "
        f"asyncpipe-train {folder} --resume {tmp_path / 'run'}"
    )
    options |= {"steps": step + 3, "log_every": 1}
    resumed = train(folder, tmp_path / "run", resume="auto", save_every=0, **options)
    assert resumed.of("loss").keys() >= {step + 1, step + 2, step + 3}
    # The same drain, without an end.
    whole = train(folder, tmp_path / "whole", save_every=step, **options)
    assert_same(resumed.weights, whole.weights)
    assert whole.of("loss")[step + 3] == resumed.of("loss")[step + 3]


class SharedBoard(SharedStore):
    """What ranks that are threads leave for each other."""

    def __init__(self, rank: int, ranks: int, texts: dict[str, str]) -> None:
        super().__init__(World(RankInfo(rank, ranks, rank, ranks)))
        self._own = texts


@settings(max_examples=8)
@given(
    ranks=st.integers(2, 4),
    told=st.integers(0, 3),
    at=st.integers(1, 30),
    ahead=st.integers(0, 5),
)
def test_ranks_of_any_skew_stop_after_the_same_step(
    ranks: int, told: int, at: int, ahead: int
) -> None:
    """Rank 0 is `ahead` steps ahead of those that wait for it; rank `told` gets the signal."""
    texts: dict[str, str] = {}
    made = [0] * ranks
    moved = threading.Condition()

    def run(rank: int) -> int | None:
        stopping = Stopping(SharedBoard(rank, ranks, texts), patience_s=20, beat_s=0.01)
        with stopping:
            for step in range(1, 61):
                if not stopping.may(step):
                    break
                with moved:
                    # A step needs the one before of all others, but for those `ahead` of them.
                    while min(made) < step - 1 - ahead:
                        moved.wait(20)
                    made[rank] = step
                    moved.notify_all()
                if rank == told % ranks and step == at:
                    stopping._hear(signal.SIGTERM, None)
            else:
                with moved:  # as ranks do at the end of a run
                    assert moved.wait_for(lambda: min(made) == 60, 30)
                assert stopping.last is None or stopping.last >= 60
            return stopping.last

    with ThreadPoolExecutor(ranks) as pool:
        lasts = list(pool.map(run, range(ranks)))
    assert len(set(made)) == 1 and at <= made[0] <= 60
    known = {last for last in lasts if last is not None}
    assert len(known) <= 1 and all(made[0] == min(last, 60) for last in known)


def test_a_rank_that_does_not_say_how_far_it_is_is_waited_for_in_vain() -> None:
    texts: dict[str, str] = {}
    with Stopping(SharedBoard(0, 2, texts), patience_s=0.3) as stopping:
        assert stopping.may(1)
        stopping._hear(signal.SIGUSR1, None)
        while "begun/0" not in texts:
            time.sleep(0.01)
        with pytest.raises(TransportError, match=r"asked to stop \(SIGUSR1\), but some ranks"):
            stopping.may(2)


def test_a_run_leaves_signals_as_it_found_them(folder: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    train(folder, tmp_path / "run", schedule="single", steps=1)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    assert after == before
