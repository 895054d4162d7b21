"""Messages about the end of a run: memory, disks, numbers, and the choice among several errors."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncpipe.runtime.distributed.failure import (
    CANNOT_WRITE,
    RankFolder,
    failure_of,
    unwritable,
)
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.errors import PlanError, TransportError, disk_error
from asyncpipe.runtime.executor.instrumented import Activities, Activity
from asyncpipe.runtime.executor.stage import StageError
from asyncpipe.runtime.monitoring import diagnostics
from asyncpipe.runtime.monitoring.diagnostics import OutOfMemory, memory_error, memory_watched
from asyncpipe.runtime.schedule.schedule import Action
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.run_configs import run_config

GIB = 1 << 30
SETTINGS = run_config(micro_batches=8, micro_batch_size=4)


@pytest.fixture
def left(tmp_path: Path) -> RankFolder:
    folder = RankFolder(tmp_path)
    folder.path.mkdir()
    return folder


# Memory


def too_much(where: str) -> BaseException:
    """The error for a request that is larger than the available memory."""
    try:
        if where == "torch":
            torch.empty(1 << 50, dtype=torch.uint8)
        elif where == "python":
            bytearray(1 << 62)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    except (RuntimeError, MemoryError, OSError) as error:
        return error


@pytest.mark.parametrize("where", ["torch", "python", "system"])
def test_an_error_for_want_of_memory_is_known_wherever_it_comes_from(where: str) -> None:
    cause = too_much(where)
    around = StageError("stage 0 failed")
    around.__cause__ = cause
    assert memory_error(around) is cause
    assert memory_error(StageError("stage 0 failed")) is None


@pytest.mark.parametrize(
    ("kind", "index", "first", "told"),
    [
        ("F", 3, 3, "step 3, when it was in forward of micro-batch 3 (stage 1)"),
        ("B", 17, 5, "step 7, when it was in backward of micro-batch 17 (stage 1)"),
        ("S", 2, 5, "step 6, when it was in the optimizer step (stage 1)"),
    ],
)
def test_the_sentence_says_who_wanted_how_much_for_what_and_what_there_is(
    kind: str, index: int, first: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_mlp(tmp_path / "mlp")
    stages = (plan.stages[0], replace(plan.stages[1], peak_bytes=22 * GIB))
    monkeypatch.setattr(diagnostics, "free_and_total_bytes", lambda device: (GIB // 2, 24 * GIB))
    activities = Activities()
    activities.step = first
    activities.begin(Activity(kind, Action(1, kind, index), index))  # type: ignore[arg-type]
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has")
    with (
        pytest.raises(OutOfMemory) as raised,
        memory_watched(replace(plan, stages=stages), SETTINGS, World(), activities),
    ):
        raise StageError("stage 1 failed") from error
    assert raised.value.what == (
        f"rank 0 ran out of memory at {told}: wanted 1.2 GiB, 512.0 MiB of 24.0 GiB free. The "
        "plan's peak of stage 1 is 22.0 GiB."
    )
    assert raised.value.cure == (
        "--micro-batch-size 2 --micro-batches 16 (half the activations) · --recompute all · "
        "partition again with --memory-limit 22118MiB"
    )


def test_what_helps_is_not_what_is_done_already(tmp_path: Path) -> None:
    plan = write_mlp(tmp_path / "mlp")
    again = replace(plan, stages=tuple(replace(each, recompute=True) for each in plan.stages))
    settings = replace(SETTINGS, micro_batch_size=1, schedule="gpipe")
    assert list(diagnostics._cures(again, settings, 10 * GIB)) == [
        "--schedule 1f1b (fewer micro-batches in flight)",
        "partition again with --memory-limit 9216MiB",
    ]


def test_this_machine_has_memory() -> None:
    free, whole = diagnostics.free_and_total_bytes("cpu")
    assert 0 < free < whole


# Disks


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space", "{}/metrics.jsonl"), "no space left on device"),
        (OSError(errno.EROFS, "Read-only", "{}/metrics.jsonl"), "read-only file system"),
        (RuntimeError("write failed: No space left on device (os error 28)"), "no space left on"),
    ],
    ids=["full", "read-only", "in other words"],
)
def test_a_write_that_fails_is_told_with_the_disk(
    error: Exception, told: str, tmp_path: Path
) -> None:
    if isinstance(error, OSError):
        error = OSError(error.errno, "", error.filename.format(tmp_path))
    told_of = failure_of(error, 2, " (stage 2)", 11, tmp_path)
    assert told_of.what.startswith(f"rank 2 (stage 2), step 12: {tmp_path}")
    assert f" cannot be written: {told}" in told_of.what and "iB free)." in told_of.what
    assert "--output" in told_of.cure


def test_a_file_that_is_missing_elsewhere_is_no_disk_that_is_full(tmp_path: Path) -> None:
    elsewhere = FileNotFoundError(errno.ENOENT, "No such file", "/data/part-7.bin")
    assert disk_error(elsewhere, tmp_path) is None
    assert "FileNotFoundError" in failure_of(elsewhere, 0, "", 0, tmp_path).what


def test_a_folder_is_tried_by_writing_to_it(tmp_path: Path) -> None:
    assert unwritable(tmp_path) is None and list(tmp_path.iterdir()) == []
    error = unwritable(Path("/proc/self"))
    assert error is not None and "/proc/self cannot be written: " in error.what


def test_a_rank_that_cannot_leave_its_error_is_told_by_its_exit_code(left: RankFolder) -> None:
    left.mark_step(1, 4)
    cause = left.first_cause({0: 1, 1: CANNOT_WRITE}, {1: " (stage 1)"})
    assert cause.what.startswith(
        f"rank 1 (stage 1), step 5: {left.path} cannot be written: no room"
    )
    failure = failure_of(ValueError("x"), 1, "", 4)
    assert left.write(failure) and left.failures() == [failure]
    os.remove(left.path / "1.error.json")
    (left.path / "1.step").unlink()
    left.path.rmdir()
    left.mark_step(1, 5)
    assert not left.write(failure)


# Which comes again


def test_an_error_that_would_come_again_is_not_tried_again(left: RankFolder) -> None:
    for error, comes_again in (
        (PlanError("the plan has no loss"), True),
        (TransportError("rank 1 is gone"), False),
        (StageError("stage 0 failed"), False),
        (ValueError("who knows"), False),
    ):
        left.write(failure_of(error, 0, "", 0))
        assert left.first_cause({0: 1}, {}).comes_again is comes_again
    assert not left.first_cause({0: -9}, {}).comes_again


def test_another_attempt_begins_with_nothing_but_the_reason_for_it(left: RankFolder) -> None:
    left.mark_step(0, 7)
    left.mark_process(0)
    left.put_verdict(TransportError("rank 1 is gone"))
    left.begin_again("rank 1 was killed. Restarted (1 of 2).")
    assert (left.last_step(), left.processes(), left.verdict()) == (0, [], None)
    assert left.why_again == "rank 1 was killed. Restarted (1 of 2)."


def test_a_process_that_left_half_a_number_is_not_known(left: RankFolder) -> None:
    (left.path / "0.pid").touch()
    assert left.processes() == []
