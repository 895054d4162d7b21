"""What may happen to a run: it ends in bounded time with one clear cause, leaves nothing behind,
and begins again where it may."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncpipe.tests.support.faults.run_faults import FaultyRun, losses, notes, plant
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.in_process import error_of

REAL = Path(sys.executable).parent
SOON_S = 10.0
"""All processes end within this time after a fault that the system reports immediately."""

DATA = """
import torch
from asyncpipe.runtime.data.task import SampleOrder

COUNT = 2048
WRONG = SampleOrder(COUNT, 1).samples(POSITION, 1)

class Samples:
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        first = float("nan") if index in WRONG else 0.5
        return {"x": torch.full((16,), first), "target": torch.tensor(index % 4)}

def samples():
    return Samples()
"""
"""The sample at a position of the training with seed 1 has no numbers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "slow", slow_s=0.02)
    write_mlp(folder / "slow4", stages=4, slow_s=0.01)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folders: Path) -> dict[int, float]:
    """The losses of eight steps."""
    with FaultyRun(folders / "mlp", folders / "whole", {"steps": 8}) as started:
        assert started.finish().code == 0
    return losses(folders / "whole")


# A rank that dies, or hangs


@pytest.mark.parametrize(("stage", "moment"), [(0, "forward"), (1, "backward"), (0, "step")])
def test_a_rank_that_is_killed_is_named_whatever_it_does(
    stage: int, moment: str, tmp_path: Path
) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", stage, moment, 3 if moment == "step" else 20)
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", {"steps": 1000}) as started:
        ended = started.finish()
    assert ended.code == 1
    assert (
        ended.first_line == f"error: rank {stage} (stage {stage}) was killed by SIGKILL at step 3."
    )
    assert "Traceback" not in ended.error


def test_ranks_that_are_ended_for_another_do_not_take_it_for_a_wish_to_stop(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 0, "step", 3, code="time.sleep(1)", once=False)
    plant(tmp_path / "mlp", 1, "step", 3, once=False)
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", {"steps": 1000}) as started:
        started.wait_for_step(2)
        started.now()
        ended = started.finish()
    assert ended.first_line == "error: rank 1 (stage 1) was killed by SIGKILL at step 3."
    assert ended.after_s < SOON_S


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_a_rank_that_is_stopped_is_named_and_ended(
    transport: str, folders: Path, tmp_path: Path
) -> None:
    given = {"steps": 100_000, "transport": transport, "stall_s": 1.5, "timeout_s": 6.5}
    with FaultyRun(folders / "slow", tmp_path / "run", given) as started:
        ranks = started.wait_for_step()
        os.kill(ranks[1], signal.SIGSTOP)
        started.now()
        ended = started.finish()
    assert ended.code == 1 and ended.after_s < 25
    assert "rank 1 is stopped for " in ended.first_line
    assert f"kill -CONT {ranks[1]}" in ended.error


def test_a_data_loader_whose_worker_dies_is_told(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    (tmp_path / "own.py").write_text(
        "import os, signal, torch\n"
        "from torch.utils.data import DataLoader, Dataset\n\n"
        "class Samples(Dataset):\n"
        "    def __len__(self):\n"
        "        return 64\n\n"
        "    def __getitem__(self, index):\n"
        "        if index == 40:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return {'x': torch.randn(16), 'target': torch.tensor(index % 4)}\n\n"
        "class Loaded:\n"
        "    def __init__(self):\n"
        "        self.loader = DataLoader(Samples(), batch_size=None, num_workers=1)\n"
        "        self.found = None\n\n"
        "    def __len__(self):\n"
        "        return 64\n\n"
        "    def __getitem__(self, index):\n"
        "        self.found = self.found or iter(self.loader)\n"
        "        return next(self.found)\n\n"
        "def samples():\n"
        "    return Loaded()\n"
    )
    given = {"steps": 1000, "data": f"{tmp_path / 'own.py'}:samples"}
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", given) as started:
        ended = started.finish()
    assert ended.code == 1
    first, second = ended.error.splitlines()
    # The signal of the worker's end meets the rank while it reads, or while it computes.
    is_reading = (
        first.startswith("error: the data of micro-batch ") and "could not be read: " in first
    )
    assert is_reading or "RuntimeError: DataLoader worker" in first
    assert second.startswith("A data-loading process has ended: out of memory")


# Numbers, memory and disks


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_loss_that_is_no_number_ends_all_and_is_not_tried_again(
    schedule: str, folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(DATA.replace("POSITION", "40"))
    given = {"data": f"{tmp_path / 'own.py'}:samples", "steps": 50, "restarts": 3}
    with FaultyRun(folders / "mlp", tmp_path / "run", given | {"schedule": schedule}) as started:
        ended = started.finish()
        assert started.left.why_again == ""
    first, second = ended.error.splitlines()
    assert ended.code == 1
    assert first.startswith("error: the loss is nan at step 2 (it was 1.")
    assert " at step 1, the gradient norm of this rank's stages " in first
    assert second.startswith("--lr 0.0003 instead of 0.001, or a longer --warmup, or --clip 1")


def test_a_first_loss_that_is_no_number_is_no_fault_of_the_learning_rate(
    folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(DATA.replace("POSITION", "0"))
    given = {"data": f"{tmp_path / 'own.py'}:samples", "steps": 2}
    with FaultyRun(folders / "mlp", tmp_path / "run", given) as started:
        first, second = started.finish().error.splitlines()
    assert first == "error: the loss is nan at step 1. Stopped."
    assert second.startswith("The weights are still the initial ones: look in them and in the data")


def test_a_loss_that_is_no_number_names_the_checkpoint_to_go_on_from(
    folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(DATA.replace("POSITION", str(19 * 32)))
    given = ("--schedule", "single", "--save-every", "1", "--steps", "50", "--output", "run")
    own = ("--data", "own.py:samples", "--eval-batches", "0", "--log-every", "1")
    told = error_of(tmp_path, "train", str(folders / "mlp"), *given, *own)
    first, second = told.splitlines()
    assert first.startswith("error: the loss is nan at step 20 ")
    way_on = f" · continue: asyncpipe-train {folders / 'mlp'} --resume run"
    assert second.startswith("--lr 0.0003 instead of 0.001") and second.endswith(way_on)
    assert re.search(r" · checkpoint step-0000(18|19) · ", second)


def test_a_rank_without_memory_says_how_much_it_wanted_and_for_what(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 1, "forward", 20, code="torch.empty(1 << 50, dtype=torch.uint8)")
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", {"steps": 1000}) as started:
        ended = started.finish()
    first, second = ended.error.splitlines()
    assert ended.code == 1
    assert first.startswith(
        "error: rank 1 ran out of memory at step 3, when it was in forward of micro-batch 3 "
        "(stage 1): wanted 1048576.0 GiB, "
    )
    assert " GiB free." in first
    assert second.startswith(
        "--micro-batch-size 2 --micro-batches 16 (half the activations) · --recompute all · "
        "partition again with --memory-limit "
    )


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of two MiB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted on this machine")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_told(folders: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        output = disk / "run"
        with FaultyRun(folders / "slow", output, {"steps": 100_000}) as started:
            started.wait_for_step(2)
            filler = (disk / "filler").open("wb", buffering=0)
            started.now()
            with pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
            ended = started.finish()
        assert ended.code == 1 and ended.after_s < SOON_S
        told = re.match(r"error: rank 0 \(stage 0\), step (\d+): ", ended.first_line)
        assert told and int(told[1]) > 2
        assert (
            "cannot be written: no space left on device (0 bytes of 2.0 MiB free)."
            in ended.first_line
        )
        assert "--output" in ended.error


@pytest.mark.parametrize("where", ["/proc/nowhere/run", "file/run"])
def test_a_folder_that_cannot_be_made_is_told(where: str, folders: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = {"output": tmp_path / where}
    with FaultyRun(folders / "mlp", tmp_path / "run", given) as started:
        ended = started.finish()
    assert ended.code == 1
    assert ended.first_line.startswith("error: /") and " cannot be written: no" in ended.first_line
    assert "--output" in ended.error


# Beginning again


@pytest.mark.parametrize("save_every", [0, 2], ids=["from the beginning", "from a checkpoint"])
def test_a_run_whose_rank_dies_begins_again_and_makes_the_same_losses(
    save_every: int, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 1, "backward", 44)
    given = {"steps": 8, "restarts": 1, "save_every": save_every}
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", given) as started:
        ended = started.finish()
    assert ended.code == 0, ended.error
    assert not (tmp_path / "run" / "ranks").exists()
    assert notes(tmp_path / "run", "restart") == [
        "rank 1 (stage 1) was killed by SIGKILL at step 6. Restarted (1 of 1)."
    ]
    assert ("step-000004" in ended.out) is (save_every > 0)
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.parametrize(
    ("transport", "rank"),
    [("shm", 0), ("gloo", 1), ("mpi", 2), ("shm", 3)],
)
def test_a_run_goes_on_after_a_rank_was_killed_at_a_random_moment(
    transport: str, rank: int, folders: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    chance = random.Random(f"{rank} {transport}")
    given = {"steps": 8, "restarts": 1, "save_every": 1, "transport": transport}
    with FaultyRun(folders / "slow4", tmp_path / "run", given) as started:
        ranks = started.wait_for_step(1 + chance.randrange(3), ranks=4)
        if rank == 1:
            started.wait_for_checkpoint()
        else:
            time.sleep(0.3 * chance.random())
        os.kill(ranks[rank], signal.SIGKILL)
        ended = started.finish()
    assert ended.code == 0, ended.error
    (note,) = notes(tmp_path / "run", "restart")
    assert note.startswith(f"rank {rank} (stage {rank}) was killed by SIGKILL at step ")
    assert losses(tmp_path / "run") == undisturbed


def test_a_run_that_dies_each_time_ends_after_so_many_restarts(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 0, "step", 2, once=False)
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", {"steps": 5, "restarts": 2}) as started:
        ended = started.finish()
    assert ended.code == 1
    assert ended.first_line == "error: rank 0 (stage 0) was killed by SIGKILL at step 2."
    told = [note.rpartition(" (")[2] for note in notes(tmp_path / "run", "restart")]
    assert told == ["1 of 2).", "2 of 2)."]


@pytest.mark.parametrize(
    ("schedule", "transport"), [("single", "auto"), ("async-1f1b", "gloo"), ("1f1b", "mpi")]
)
def test_other_runs_begin_again_too(schedule: str, transport: str, tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 1, "forward", 20)
    given = {"steps": 5, "restarts": 1, "schedule": schedule, "transport": transport}
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", given) as started:
        ended = started.finish()
    assert ended.code == 0, ended.error
    assert "was killed by SIGKILL" in notes(tmp_path / "run", "restart")[0]


def test_ranks_of_torchrun_begin_again_where_it_is_told_to(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 1, "forward", 20)
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    with FaultyRun(
        tmp_path / "mlp", tmp_path / "run", {"steps": 5}, command=(*torchrun, "--no-python")
    ) as started:
        ended = started.finish()
    assert ended.code == 0, ended.error
    assert notes(tmp_path / "run", "restart")
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("restarts", "given", "told"),
    [
        ("0", {"restarts": 2}, "--restarts 2 applies only to ranks that asyncpipe-train starts"),
        ("2", {"output": None}, "torchrun --max-restarts 2 restarts this run, which needs"),
    ],
)
def test_restarts_of_torchrun_are_torchruns(
    restarts: str, given: dict[str, object], told: str, folders: Path, tmp_path: Path
) -> None:
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", restarts)
    with FaultyRun(
        folders / "mlp", tmp_path / "run", given, command=(*torchrun, "--no-python")
    ) as started:
        ended = started.finish()
    assert ended.code == 1 and told in ended.error


# Asked to stop


def assert_goes_on(folder: Path, output: Path, undisturbed: dict[int, float]) -> None:
    (note,) = notes(output, "stopped")
    assert " after step " in note and "checkpoint step-00000" in note
    given = {"steps": 8, "resume": "auto", "transport": "shm"}
    with FaultyRun(folder, output, given) as started:
        ended = started.finish()
    assert ended.code == 0, ended.error
    assert losses(output) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_command_stops_all_ranks_after_one_step(
    number: signal.Signals, folders: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    given = {"steps": 8, "restarts": 1}
    with FaultyRun(folders / "slow", tmp_path / "run", given) as started:
        started.wait_for_step(2)
        started.process.send_signal(number)
        started.now()
        ended = started.finish()
    assert ended.code == 143 and ended.error == "" and ended.after_s < SOON_S
    assert not (tmp_path / "run" / "ranks").exists()
    assert_goes_on(folders / "slow", tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    ("command", "given", "number", "code"),
    [
        ((), {"transport": "mpi"}, signal.SIGTERM, 143),
        (("mpiexec", "-n", "2"), {"transport": "mpi"}, signal.SIGUSR1, 143),
        (("torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"), {}, 15, 1),
    ],
    ids=["mpi", "mpiexec", "torchrun"],
)
def test_other_launchers_hand_it_on_too(
    command: tuple[str, ...],
    given: dict[str, object],
    number: int,
    code: int,
    folders: Path,
    undisturbed: dict[int, float],
    tmp_path: Path,
) -> None:
    with FaultyRun(
        folders / "slow", tmp_path / "run", {"steps": 8} | given, command=command
    ) as started:
        started.wait_for(lambda: started.left.last_step() >= 2)
        started.process.send_signal(number)
        started.now()
        ended = started.finish()
    assert ended.code == code and ended.after_s < 2 * SOON_S
    assert_goes_on(folders / "slow", tmp_path / "run", undisturbed)


def test_a_signal_before_the_first_step_ends_the_run_at_once(folders: Path, tmp_path: Path) -> None:
    with FaultyRun(folders / "slow", tmp_path / "run", {"steps": 8}, scripts=REAL) as started:
        started.wait_for(lambda: (tmp_path / "run" / "logs").is_dir())
        started.process.send_signal(signal.SIGTERM)
        ended = started.finish()
    assert ended.code == 143
    assert ended.error == "stopped by SIGTERM before the first step\n"
