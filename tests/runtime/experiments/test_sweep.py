"""A sweep: a process a run; failures end no other, Ctrl-C ends all, nothing is done twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.experiments.sweep import Sweep, plan_sweep, run_sweep
from asyncpipe.runtime.experiments.variants import Child, Share, run_children
from asyncpipe.runtime.plan.trust import TrustError
from asyncpipe.tests.support.models.hand_folders import FAILING, write_mlp
from asyncpipe.tests.support.processes.quick_python import bin_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "slow", slow_s=0.02)
    return folder


# ------------------------------------------------------------------ processes


def child(tmp_path: Path, name: str, script: str) -> Child:
    return Child(name, ("/bin/sh", "-c", script), tmp_path / f"{name}.log")


def test_as_many_run_at_once_as_there_are_shares(tmp_path: Path) -> None:
    # Each waits, for ten seconds at most, until a second one has begun.
    script = """
    echo +1 >> running
    for turn in $(seq 500); do [ $(wc -l < running) -ge 2 ] && break; sleep 0.02; done
    echo -1 >> running
    """
    script = script.replace("running", str(tmp_path / "running"))
    children = [child(tmp_path, str(number), script) for number in range(4)]
    ended = list(run_children(children, [Share(), Share()]))
    assert [code for _, code in ended] == [0] * 4
    running = list(accumulate(map(int, (tmp_path / "running").read_text().split())))
    assert max(running) == 2 and len(running) == 8


def test_a_child_has_the_cpus_and_the_environment_of_its_share(tmp_path: Path) -> None:
    own = os.sched_getaffinity(0)
    cpu = min(own)
    told = child(tmp_path, "x", "grep Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS")
    share = Share(frozenset({cpu}), {"OMP_NUM_THREADS": "7"})
    assert [code for _, code in run_children([told], [share])] == [0]
    assert told.log.read_text().split() == ["Cpus_allowed_list:", str(cpu), "7"]
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize(
    ("error", "word"), [(KeyboardInterrupt, "INT"), (SystemExit, "TERM"), (ValueError, "TERM")]
)
def test_those_that_run_are_ended_when_the_reader_ends(
    tmp_path: Path, error: type[BaseException], word: str
) -> None:
    script = f"trap 'echo {{0}}; exit 5' {word}; echo ready; while :; do sleep 0.02; done"
    children = [
        child(tmp_path, "short", f"while ! grep -q ready {tmp_path}/long.log; do sleep 0.01; done"),
        child(tmp_path, "long", script.format(word)),
        child(tmp_path, "never", "true"),
    ]
    ended = run_children(children, [Share(), Share()])
    assert next(ended)[0].name == "short"
    with pytest.raises(error):
        ended.throw(error())
    assert (tmp_path / "long.log").read_text().split() == ["ready", word]
    assert not (tmp_path / "never.log").exists()


def test_a_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.02; done"
    short = f"while ! [ -s {tmp_path}/pid ]; do sleep 0.01; done"
    children = [child(tmp_path, "long", script), child(tmp_path, "short", short)]
    ended = run_children(children, [Share(), Share()], grace_s=0.2)
    next(ended)
    ended.close()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


KILLED = """
import sys
from pathlib import Path
from asyncpipe.runtime.experiments.variants import Child, run_children
from asyncpipe.runtime.experiments.variants import Share
script = "echo $$ > pid; while :; do sleep 0.02; done"
list(run_children([Child("x", ("/bin/sh", "-c", script), Path("log"))], [Share()]))
"""


def test_no_child_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    python = bin_folder() / "python"
    parent = subprocess.Popen([python, "-c", KILLED], cwd=tmp_path)
    end_s = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert parent.poll() is None and time.monotonic() < end_s
        time.sleep(0.02)
    child = Path("/proc") / (tmp_path / "pid").read_text().strip()
    parent.kill()
    parent.wait()
    while child.exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)


# ---------------------------------------------------------------------- sweeps


COMMAND = (str(bin_folder() / "python"), str(bin_folder() / "asyncpipe-train"))


def options(folder: Path, output: Path, **given: Any) -> dict[str, Any]:
    return {
        "folder": str(folder), "output": str(output), "steps": 2, "schedule": "single",
        "threads": 1, "eval_batches": 1, **given,
    }  # fmt: skip


def make(sweep: Sweep, **given: Any) -> tuple[Sweep, list[str]]:
    """The sweep, run, and the names of the runs that were made."""
    made: list[str] = []
    return run_sweep(sweep, COMMAND, on_run=lambda run: made.append(run.name), **given), made


def test_a_sweep_makes_every_run_once_and_ranks_them(folder: Path, tmp_path: Path) -> None:
    given = options(folder / "mlp", tmp_path / "sweep")
    lists = {"lr": (0.5, 1e-6), "seed": (1, 2)}
    planned = plan_sweep(given, lists)
    assert not (tmp_path / "sweep").exists() and len(planned.waiting) == 4
    swept, made = make(planned, at_once=2)
    assert sorted(made) == ["lr=0.5,seed=1", "lr=0.5,seed=2", "lr=1e-06,seed=1", "lr=1e-06,seed=2"]
    for name in made:
        end = json.loads((tmp_path / "sweep" / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert swept.runs[name].loss == end["eval_loss"]
    losses = [run.loss for run in swept.ranked]
    assert None not in losses and losses == sorted(losses) and len(set(losses)) == 4
    table = (tmp_path / "sweep" / "sweep.md").read_text().splitlines()
    assert len(table) == 6 and table[2].startswith(f"| {swept.ranked[0].values['lr']:g} |")
    recorded = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["runs"]
    assert {run["name"]: run["loss"] for run in recorded} == {
        name: run.loss for name, run in swept.runs.items()
    }
    # Once more with one value more: only what is new is made, and the others are still known.
    again = plan_sweep(given, {"lr": (0.5, 0.25), "seed": (1, 2)})
    assert again.waiting == ["lr=0.25,seed=1", "lr=0.25,seed=2"]
    again, made = make(again)
    assert made == ["lr=0.25,seed=1", "lr=0.25,seed=2"] and len(again.runs) == 4
    assert plan_sweep(given, lists).waiting == []


def test_a_run_that_fails_ends_no_other_and_is_made_anew(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILING)
    output = tmp_path / "sweep"
    lists = {"criterion": (f"{tmp_path}/own.py:criterion", "cross_entropy")}
    swept, made = make(plan_sweep(options(folder / "mlp", output), lists))
    assert len(made) == 2
    (good, bad) = swept.ranked
    assert (good.state, bad.state) == ("finished", "failed")
    assert "the tenth call fails" in bad.error and bad.name.startswith("criterion=")
    assert "failed" in (output / "sweep.md").read_text()
    assert plan_sweep(options(folder / "mlp", output), lists).waiting == [bad.name]


def test_a_folder_of_other_options_or_stages_is_left_alone(folder: Path, tmp_path: Path) -> None:
    given = options(folder / "mlp", tmp_path / "sweep")
    make(plan_sweep(given, {"seed": (1,)}))
    with pytest.raises(AsyncPipeError, match="seed=1 holds a run of other options"):
        plan_sweep({**given, "steps": 3}, {"seed": (1,)})
    assert plan_sweep({**given, "quiet": True}, {"seed": (1,)}).waiting == []


def test_a_sweep_may_be_of_epochs(folder: Path, tmp_path: Path) -> None:
    given = options(folder / "mlp", tmp_path / "sweep")
    del given["steps"]
    swept, _ = make(plan_sweep({**given, "epochs": 0.01}, {"seed": (1,)}))
    assert swept.runs["seed=1"].state == "finished"
    assert "warmup" not in (tmp_path / "sweep" / "seed=1.toml").read_text()


def test_what_does_not_fit_is_told_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    given = options(folder / "mlp", tmp_path / "sweep")
    with pytest.raises(AsyncPipeError, match="schedule=1f1b: .*staleness"):
        plan_sweep({**given, "staleness": "stash"}, {"schedule": ("async-1f1b", "1f1b")})
    with pytest.raises(AsyncPipeError, match="would export to there"):
        plan_sweep({**given, "export_hf": "there"}, {"seed": (1, 2)})
    assert not (tmp_path / "sweep").exists()


def test_a_strangers_folder_is_swept_when_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mlp", tmp_path / "strange")
    stage = tmp_path / "strange" / "stage_0.py"
    stage.write_text(stage.read_text() + f"# {tmp_path}\n")
    given = options(tmp_path / "strange", tmp_path / "sweep")
    with pytest.raises(TrustError, match="--trust"):
        make(plan_sweep(given, {"seed": (1,)}))
    assert not (tmp_path / "sweep").exists()
    swept, _ = make(plan_sweep({**given, "trust": True}, {"seed": (1,)}))
    assert swept.runs["seed=1"].state == "finished"


def start(folder: Path, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*COMMAND, str(folder), "--output", "sweep", "--threads", "1", *arguments]
    return subprocess.Popen(
        command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_steps(*runs: Path) -> None:
    end_s = time.monotonic() + 60
    marks = [run / "ranks" / "0.step" for run in runs]
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_sweep_that_is_ended_ends_its_runs(
    folder: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    sweep = ["--sweep", "seed=1,2,3", "--jobs", "2", "--steps", "1000"]
    process = start(folder / "slow", tmp_path, *sweep)
    runs = [tmp_path / "sweep" / f"seed={seed}" for seed in (1, 2)]
    wait_for_steps(*runs)
    pids = [
        json.loads(state.read_text())["pid"]
        for run in runs
        for state in (run / "ranks").glob("*.state")
    ]
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == code, out + error
    assert len(pids) == 4 and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not (tmp_path / "sweep" / "seed=3").exists()
    states = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["runs"]
    assert [run["state"] for run in states] == ["waiting"] * 3
    kept = [list((run / "checkpoints").glob("step-*")) for run in runs]
    assert [len(each) for each in kept] == ([0, 0] if number is signal.SIGINT else [1, 1])


def test_a_run_that_was_ended_goes_on_from_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    given = options(folder / "mlp", tmp_path / "sweep", save_every=1, steps=3)
    whole, _ = make(plan_sweep(given, {"seed": (1, 2)}))
    run = tmp_path / "sweep" / "seed=1"
    shutil.rmtree(run / "checkpoints" / "step-000003")
    shutil.rmtree(run / "weights")
    record = tmp_path / "sweep" / "sweep.json"
    record.write_text(record.read_text().replace('"finished"', '"waiting"', 1))
    again, made = make(plan_sweep(given, {"seed": (1, 2)}))
    assert made == ["seed=1"] and "after step 2 of 3" in (run.parent / "seed=1.log").read_text()
    assert again.runs["seed=1"].loss == whole.runs["seed=1"].loss


def test_the_command_prints_a_line_a_run_and_the_table(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    (tmp_path / "own.py").write_text(FAILING)
    config.write_text(
        f'folder = "{folder / "mlp"}"\nsteps = 2\nschedule = "single"\n'
        '[sweep]\ncriterion = ["cross_entropy", "./own.py:criterion"]\nseed = [1, 2]\n'
    )
    good, bad = "criterion=cross_entropy", "criterion=._own.py_criterion-"
    command = [*COMMAND, "--config", "job.toml", "--seed", "5", "--output", "sweep"]

    def called(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=tmp_path, text=True, capture_output=True)

    planned = called("--dry-run")
    assert planned.returncode == 0 and planned.stdout.count("waiting") == 2, planned.stderr
    assert not (tmp_path / "sweep").exists()
    result = called("--trust")
    first, second = result.stdout.splitlines()[:2]
    assert first.startswith(f"1/2  {good}  loss ") and second.startswith(f"2/2  {bad}")
    assert "failed: " in second and f"best       sweep/{good}\n" in result.stdout
    assert result.returncode == 1 and f"error: 1 of 2 runs failed: {bad}" in result.stderr
    assert "seed = 5" in (tmp_path / "sweep" / good / "config.toml").read_text()
    ranked = [json.loads(line) for line in called("--json", "--trust").stdout.splitlines()]
    assert [run["state"] for run in ranked] == ["finished", "failed"]
