"""A job runs whole against a bucket, and a killed one continues on a fresh machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import s3fs

from asyncpipe.runtime.checkpoint.remote import Location
from asyncpipe.runtime.job.sagemaker import METRICS
from asyncpipe.runtime.job.transfers import fetch, fetch_plan, upload_plan
from asyncpipe.runtime.locations import LocationError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.oracles.resumed_runs import assert_same, tensors_in
from asyncpipe.tests.support.processes import fake_slurm
from asyncpipe.tests.support.processes.quick_python import bin_folder
from asyncpipe.tests.support.processes.s3_server import bucket

EXAMPLE = Path(__file__).parents[3] / "examples" / "residual_mlp.py"
JOB = """
[model]
model = "{example}:build"
loss = "cross_entropy"

[plan]
stages = "2"

[train]
data = "{data}:load"
steps = "32"
lr = "1e-2"
micro_batches = 2
save_every = 4
eval_batches = 2
log_every = 10

[data]
uri = "{bucket}/points"

[storage]
checkpoints_uri = "{bucket}/{name}/checkpoints"
output = "{bucket}/{name}/output"
"""
DATA = """
import os
import numpy as np

def load():
    folder = os.environ["ASYNCPIPE_DATA"]
    x = np.fromfile(f"{folder}/x.bin", dtype="f4").reshape(-1, 16)
    y = np.fromfile(f"{folder}/more/y.bin", dtype="i8")
    return (x, y), (x[:8], y[:8])
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket() as url:
        files, numbers = s3fs.S3FileSystem(), np.random.default_rng(0)
        points = numbers.standard_normal((64, 16)).astype("f4")
        files.pipe_file(f"{url}/points/x.bin", points.tobytes())
        files.pipe_file(f"{url}/points/more/y.bin", numbers.integers(4, size=64).tobytes())
        yield url


def written(folder: Path, s3: str) -> Path:
    """A job file, and its data function."""
    file = folder / "points.toml"
    (folder / "points_data.py").write_text(DATA)
    file.write_text(
        JOB.format(example=EXAMPLE, data=folder / "points_data.py", bucket=s3, name=folder.name)
    )
    return file


def start(folder: Path, job: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [bin_folder() / "asyncpipe-job", "run", str(job), "--trust", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(place: Location, after: str, process: subprocess.Popen[str]) -> None:
    while not [name for name in place.names() if name > after]:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def test_a_killed_job_continues_on_a_fresh_machine_to_the_last_bit(tmp_path: Path, s3: str) -> None:
    job, place = written(tmp_path, s3), Location(f"{s3}/{tmp_path.name}/checkpoints")
    first = start(tmp_path / "first", job)
    wait_for(place, "", first)
    first.kill()
    first.communicate()

    newest = place.names()[-1]
    second = start(tmp_path / "second", job)
    wait_for(place, newest, second)
    second.send_signal(signal.SIGTERM)
    printed, _ = second.communicate(timeout=120)
    assert second.returncode == 143, printed
    assert f"plan    jobs/points/plan from {place.url}/plan" in printed
    assert "asyncpipe-partition" not in printed

    third = start(tmp_path / "third", job)
    printed, _ = third.communicate(timeout=120)
    assert third.returncode == 0, printed
    for pattern in METRICS.values():
        assert re.search(pattern, printed, re.MULTILINE), pattern
    files = s3fs.S3FileSystem()
    files.get(f"{place.url}/plan", str(tmp_path / "copies" / "plan"), recursive=True)
    own = (f"storage.checkpoints_uri=file://{tmp_path}/copies",)
    own += (f"storage.output=file://{tmp_path}/straight",)
    straight = start(tmp_path / "fourth", job, *own)
    printed, _ = straight.communicate(timeout=120)
    assert straight.returncode == 0, printed
    files.get(f"{s3}/{tmp_path.name}/output", str(tmp_path / "output"), recursive=True)
    for name in ("report.html", "metrics.jsonl", "config.toml", "plan.json"):
        assert (tmp_path / "output" / name).is_file(), name
    assert_same(tensors_in(tmp_path / "output/weights"), tensors_in(tmp_path / "straight/weights"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job whose plan is made."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "mine.toml").write_text(
        '[model]\nmodel = "mlp"\n[plan]\nstages = 2\n[train]\nsteps = 3\nthreads = 1\n'
    )
    assert ran(folder, "--only", "prepare").startswith("$ asyncpipe-partition --model mlp")
    return folder


def ran(folder: Path, *arguments: str) -> str:
    running = start(folder, folder / "mine.toml", *arguments)
    printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    return printed


def test_a_plan_is_made_again_when_its_options_change(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    assert ran(tmp_path, "--only", "prepare") == "plan    jobs/mine/plan is here\n"
    printed = ran(tmp_path, "--only", "prepare", "plan.stages=3")
    assert printed.startswith("$ asyncpipe-partition --model mlp --stages 3 ")
    assert len(read_plan(tmp_path / "jobs" / "mine" / "plan").stages) == 3


def test_the_batch_script_of_a_job_runs_all_its_steps(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    printed = ran(tmp_path, f"storage.output=file://{tmp_path}/output", "--on", "slurm")
    assert printed == "written jobs/mine/job.sbatch\n$ sbatch jobs/mine/job.sbatch\n"
    environment = os.environ | fake_slurm.job(["localhost"], tasks_per_node=2)
    tools = fake_slurm.install(tmp_path)
    environment |= {"PATH": f"{tools}:{bin_folder()}:{os.environ['PATH']}"}
    batch = subprocess.run(
        ["bash", "jobs/mine/job.sbatch"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert batch.returncode == 0, batch.stdout + batch.stderr
    assert "2 processes by srun" in batch.stdout and "step 3/3" in batch.stdout
    assert (tmp_path / "output" / "report.html").is_file()


def test_files_are_fetched_once_a_version_and_stay_in_their_folder(tmp_path: Path) -> None:
    place, target = tmp_path / "place", tmp_path / "data"
    (place / "more").mkdir(parents=True)
    (place / "a.txt").write_text("one")
    (place / "more" / "b.txt").write_text("two")
    url = f"file://{place}"
    assert fetch(url, target) == "2 files, 6 bytes"
    assert (target / "more" / "b.txt").read_text() == "two"
    (place / "a.txt").write_text("three")
    (place / "more" / "b.txt").unlink()
    assert fetch(url, target) == "1 file, 5 bytes"
    assert (target / "a.txt").read_text() == "three" and not (target / "more" / "b.txt").exists()
    assert fetch(url, target) == "0 files, 0 bytes; 1 were here"
    assert fetch(f"{url}/a.txt", tmp_path / "single") == "1 file, 5 bytes"
    assert (tmp_path / "single" / "a.txt").read_text() == "three"
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (target / ".fetched.json").write_text('{"../mine.txt": "1", "/etc/none": "1"}')
    fetch(url, target)
    assert mine.exists()
    with pytest.raises(LocationError, match="has no files"):
        fetch(f"{url}/none", target)


def test_a_plan_at_a_url_is_replaced_whole_and_counts_only_when_complete(tmp_path: Path) -> None:
    url, plan, noted = f"file://{tmp_path}/copies", tmp_path / "plan", tmp_path / "made-from.json"
    plan.mkdir()
    noted.write_text("{}")
    for names in (("plan.json", "stage_0.py", "stage_1.py"), ("plan.json", "stage_0.py")):
        shutil.rmtree(plan)
        plan.mkdir()
        for name in names:
            (plan / name).write_text(name)
        upload_plan(plan, noted, url)
    assert fetch_plan(url, tmp_path / "back", tmp_path / "noted.json")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"plan.json", "stage_0.py"}
    (tmp_path / "copies" / "plan.json").unlink()
    assert not fetch_plan(url, tmp_path / "again", tmp_path / "noted.json")
    assert not fetch_plan(f"{url}/none", tmp_path / "again", tmp_path / "noted.json")
