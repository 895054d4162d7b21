"""What may happen to a run: it ends in bounded time with one clear cause, leaves nothing behind,
and begins again where it may."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncpipe.tests.faults import FaultyRun, losses, notes, plant
from asyncpipe.tests.runtime.handmade import write_mlp

REAL = Path(sys.executable).parent
SOON_S = 10.0
"""All is over within this, after a fault that the system tells of at once."""

DATA = """
import torch

class Samples:
    read = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.read += 1
        first = float("nan") if self.read == 40 else 0.5
        return {"x": torch.full((16,), first), "target": torch.tensor(index % 4)}

def samples():
    return Samples()
"""
"""The fortieth sample that is read has no numbers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "slow", slow_s=0.02)
    write_mlp(folder / "slow4", stages=4, slow_s=0.01)
    return folder


def scripts_of(transport: str) -> Path | None:
    """Ranks that end with MPI_Finalize take the real interpreter."""
    return REAL if transport == "mpi" else None


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
    assert ended.told == f"error: rank {stage} (stage {stage}) was killed by SIGKILL at step 3."
    assert "Traceback" not in ended.error


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo", "mpi"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_killed_at_a_random_moment_ends_all(
    rank: int, transport: str, folders: Path, tmp_path: Path
) -> None:
    chance = random.Random(f"{rank} {transport}")
    given = {"steps": 100_000, "transport": transport}
    with FaultyRun(
        folders / "slow4", tmp_path / "run", given, scripts=scripts_of(transport)
    ) as started:
        ranks = started.wait_for_step(1 + chance.randrange(3), ranks=4)
        time.sleep(chance.random())
        os.kill(ranks[rank], signal.SIGKILL)
        started.now()
        ended = started.finish()
    assert ended.code == 1 and ended.after_s < SOON_S
    assert ended.told.startswith(f"error: rank {rank} (stage {rank}) was killed by SIGKILL at step")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo", "mpi"])
def test_a_rank_that_is_stopped_is_named_and_ended(
    transport: str, folders: Path, tmp_path: Path
) -> None:
    given = {"steps": 100_000, "transport": transport, "stall_s": 2, "timeout_s": 8}
    with FaultyRun(
        folders / "slow", tmp_path / "run", given, scripts=scripts_of(transport)
    ) as started:
        ranks = started.wait_for_step()
        os.kill(ranks[1], signal.SIGSTOP)
        started.now()
        ended = started.finish()
    assert ended.code == 1 and ended.after_s < 25
    assert "rank 1 is stopped for " in ended.told
    assert f"kill -CONT {ranks[1]}" in ended.error


@pytest.mark.slow
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
    assert "DataLoader worker" in ended.error and "killed by signal" in ended.error


# Numbers, memory and disks


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_loss_that_is_no_number_ends_all_and_is_not_tried_again(
    schedule: str, folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(DATA)
    given = {"data": f"{tmp_path / 'own.py'}:samples", "steps": 50, "restarts": 3}
    with FaultyRun(folders / "mlp", tmp_path / "run", given | {"schedule": schedule}) as started:
        ended = started.finish()
        assert started.left.why_again == ""
    first, second = ended.error.splitlines()
    assert ended.code == 1
    assert first.startswith("error: the loss is nan at step 2 (it was 1.")
    assert " at step 1, the gradient norm of this rank's stages " in first
    assert second.startswith("--lr 0.0003 instead of 0.001, or a longer --warmup, or --clip 1")


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
        pytest.skip("this machine does not let one mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_told(folders: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        output = disk / "run"
        with FaultyRun(folders / "slow", output, {"steps": 100_000}) as started:
            started.wait_for_step()
            filler = (disk / "filler").open("wb", buffering=0)
            started.now()
            with pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
            ended = started.finish()
        assert ended.code == 1 and ended.after_s < SOON_S
        assert ended.told.startswith("error: rank 0 (stage 0), step ")
        assert "cannot be written: no space left on device (0.0 of 2.0 MiB free)." in ended.told
        assert "--output" in ended.error


@pytest.mark.parametrize("where", ["/proc/nowhere/run", "file/run"])
def test_a_folder_that_cannot_be_made_is_told(where: str, folders: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = {"output": tmp_path / where}
    with FaultyRun(folders / "mlp", tmp_path / "run", given) as started:
        ended = started.finish()
    assert ended.code == 1
    assert ended.told.startswith("error: /") and " cannot be written: no" in ended.told
    assert "--output" in ended.error


# Beginning again


def test_a_run_whose_rank_dies_begins_again_and_makes_the_same_losses(
    folders: Path, tmp_path: Path
) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 1, "backward", 20)
    for folder, output in ((folders / "mlp", "whole"), (tmp_path / "mlp", "again")):
        with FaultyRun(folder, tmp_path / output, {"steps": 5, "restarts": 1}) as started:
            ended = started.finish()
        assert ended.code == 0, ended.error
        assert not (tmp_path / output / "ranks").exists()
    assert notes(tmp_path / "whole", "restart") == []
    assert notes(tmp_path / "again", "restart") == [
        "rank 1 (stage 1) was killed by SIGKILL at step 3. Begun again (1 of 1)."
    ]
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")


def test_a_run_that_dies_each_time_ends_after_so_many_restarts(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 0, "step", 2, once=False)
    with FaultyRun(tmp_path / "mlp", tmp_path / "run", {"steps": 5, "restarts": 2}) as started:
        ended = started.finish()
    assert ended.code == 1
    assert ended.told == "error: rank 0 (stage 0) was killed by SIGKILL at step 2."
    told = [note.rpartition(" (")[2] for note in notes(tmp_path / "run", "restart")]
    assert told == ["1 of 2).", "2 of 2)."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "transport"), [("single", "auto"), ("async-1f1b", "gloo"), ("1f1b", "mpi")]
)
def test_other_runs_begin_again_too(schedule: str, transport: str, tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    plant(tmp_path / "mlp", 1, "forward", 20)
    given = {"steps": 5, "restarts": 1, "schedule": schedule, "transport": transport}
    with FaultyRun(
        tmp_path / "mlp", tmp_path / "run", given, scripts=scripts_of(transport)
    ) as started:
        ended = started.finish()
    assert ended.code == 0, ended.error
    assert "was killed by SIGKILL" in notes(tmp_path / "run", "restart")[0]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("restarts", "given", "told"),
    [
        ("0", {"restarts": 2}, "--restarts 2 is for ranks that asyncpipe-train starts itself"),
        ("2", {"output": None}, "torchrun --max-restarts 2 begins this run again, and nothing"),
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
