"""Real ranks: started by us or by torchrun, the same numbers, and one clear end when one fails.

Tests that look at the tree of processes use the real interpreter, all others the quick one.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.distributed.failure import Failure, RankError, RankFolder, failure_of
from asyncpipe.runtime.errors import AsyncPipeError, TransportError
from asyncpipe.runtime.launch.local import RankAgent
from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.tests.support.models.hand_folders import FAILING, write_mlp, write_text
from asyncpipe.tests.support.processes.quick_python import bin_folder, run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

REAL = Path(sys.executable)
PROGRAM = """
import json, sys
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.distributed.failure import end_process
from asyncpipe.runtime.launch.launch import run
from asyncpipe.runtime.config.settings import Settings
code = 0
try:
    run(Settings(**json.loads(sys.argv[1])), sys.argv[2])
except AsyncPipeError as error:
    sys.stderr.write(f"error: {error}\\n")
    code = 1
except KeyboardInterrupt as interruption:
    print(interruption)
    code = 130
end_process(code)  # as the command does: threads of gloo live on
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "mlp4", stages=4)
    write_mlp(folder / "slow", slow_s=0.02)
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def options(folder: Path, output: Path, **given: Any) -> dict[str, Any]:
    short = {"log_every": 1, "threads": 1, "eval_batches": 4}
    return {"folder": str(folder), "output": str(output)} | short | given


def start(
    given: dict[str, Any], *launcher: str, python: Path | None = None
) -> subprocess.Popen[str]:
    program = Path(given["output"]).with_suffix(".program.py")
    program.write_text(PROGRAM)
    command = [python or bin_folder() / "python", *launcher, program, json.dumps(given), FACTORY]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], limit_s: float = 60) -> tuple[int, str, str]:
    try:
        out, error = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, error


def ranks_of(process: subprocess.Popen[str], count: int, output: Path) -> dict[int, int]:
    """The process of each rank, when all have made their first step."""
    marks = [output / "ranks" / f"{rank}.step" for rank in range(count)]
    end_s = time.monotonic() + 60
    while not all(mark.exists() for mark in marks):
        assert process.poll() is None and time.monotonic() < end_s, finish(process)
        time.sleep(0.05)
    states = [output / "ranks" / f"{rank}.state" for rank in range(count)]
    return {rank: json.loads(state.read_text())["pid"] for rank, state in enumerate(states)}


def assert_gone(pids: dict[int, int]) -> None:
    """No process is left; who started a fork may reap it a moment after its end."""
    end_s = time.monotonic() + 10
    for pid in pids.values():
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end_s, f"process {pid} is left"
            time.sleep(0.01)


def losses(output: Path) -> list[float]:
    return [step["loss"] for step in events_of(output, "step")]


def test_ranks_of_a_pipeline_make_the_losses_of_one_process(folders: Path, tmp_path: Path) -> None:
    given = {"data": str(folders / "text.txt"), "steps": 6, "dtype": "float64", "clip": 0.5}
    for schedule in ("single", "1f1b"):
        output = tmp_path / schedule
        run(Settings(**options(folders / "text", output, schedule=schedule, **given)), FACTORY)
    assert losses(tmp_path / "1f1b") == losses(tmp_path / "single")
    for event in ("eval", "step"):
        one, two = (events_of(tmp_path / name, event) for name in ("single", "1f1b"))
        for name in ("loss", "grad_norm"):
            assert [line.get(name) for line in one] == [line.get(name) for line in two]
    (facts,) = events_of(tmp_path / "1f1b", "start")
    assert "rank 0 reads inputs, rank 1 reads labels" in facts["data"]
    for file in sorted((tmp_path / "single" / "weights").iterdir()):
        assert file.read_bytes() == (tmp_path / "1f1b" / "weights" / file.name).read_bytes()
    assert not (tmp_path / "1f1b" / "ranks").exists()


def test_an_asynchronous_run_tells_every_step_and_is_drained_at_evaluations(
    folders: Path, tmp_path: Path
) -> None:
    given = {
        "schedule": "async-1f1b",
        "micro_batches": 1,
        "steps": 10,
        "eval_every": 4,
        "clip": 1.0,
    }
    run(Settings(**options(folders / "mlp4", tmp_path / "run", **given)), FACTORY)
    (facts,) = events_of(tmp_path / "run", "start")
    assert "at most 3 steps stale at stage 0" in facts["schedule"]
    assert "grad clip 1 (per stage)" in facts["optimizer"]
    steps = events_of(tmp_path / "run", "step")
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert all(step["grad_norm"] > 0 and len(step["idle"]) == 4 for step in steps)
    for step in steps:
        assert math.hypot(*step["grad_norm_by_stage"]) == pytest.approx(step["grad_norm"])
        assert min(step["grad_norm_by_stage"]) > 0
        *late, last = step["gap_by_stage"]
        assert last == 0 <= step["gap"] <= max(late)
    assert min(steps[-1]["gap_by_stage"][:3]) > 0
    evaluations = events_of(tmp_path / "run", "eval")
    assert [evaluation["step"] for evaluation in evaluations] == [4, 8, 10]
    assert all(evaluation["accuracy"] is not None for evaluation in evaluations)


def test_the_same_run_joins_under_torchrun(folders: Path, tmp_path: Path) -> None:
    run(Settings(**options(folders / "mlp", tmp_path / "own", steps=3)), FACTORY)
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", "--rdzv-endpoint", "127.0.0.1:0")
    given = options(folders / "mlp", tmp_path / "torchrun", steps=3)
    process = start(given, "-m", *launcher, "--rdzv-backend", "c10d")
    code, _, error = finish(process)
    assert code == 0, error
    assert losses(tmp_path / "torchrun") == losses(tmp_path / "own")
    assert not (tmp_path / "torchrun" / "ranks").exists()


def test_a_wrong_number_of_ranks_is_refused_under_torchrun(folders: Path, tmp_path: Path) -> None:
    given = options(folders / "mlp4", tmp_path / "run")
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(AsyncPipeError, match="the plan has 4 stages, 2 ranks were started"):
            run(Settings(**given), FACTORY)


def test_a_killed_rank_ends_all_and_is_named(folders: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start(options(folders / "slow", output, steps=10_000, data="clusters"))
    ranks = ranks_of(process, 2, output)
    os.kill(ranks[1], signal.SIGKILL)
    killed_s = time.monotonic()
    code, _, error = finish(process, limit_s=20)
    assert time.monotonic() - killed_s < 60
    assert code == 1
    first, second = error.strip().splitlines()
    assert first.startswith("error: rank 1 (stage 1) was killed by SIGKILL at step ")
    assert "memory" in second
    assert read_run(output).failure == first.removeprefix("error: ")
    assert (output / "report.html").is_file()
    assert_gone(ranks)


def test_a_killed_rank_is_named_with_its_replica(folders: Path, tmp_path: Path) -> None:
    given = options(folders / "slow", tmp_path / "run", steps=1000, replicas=2)
    process = start(given)
    ranks = ranks_of(process, 4, tmp_path / "run")
    os.kill(ranks[3], signal.SIGKILL)
    code, _, error = finish(process)
    assert code == 1
    assert "rank 3 (stage 1 of replica 1) was killed by SIGKILL at step" in error
    assert_gone(ranks)


def test_a_failing_rank_ends_all_and_its_sentence_is_shown(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILING)
    given = options(
        folders / "mlp", tmp_path / "run", criterion=f"{tmp_path / 'own.py'}:criterion", steps=50
    )
    with pytest.raises(AsyncPipeError) as failed:
        run(Settings(**given), FACTORY)
    assert "ValueError: the tenth call fails" in failed.value.what
    assert "micro-batch 9" in failed.value.what
    trace = json.loads((tmp_path / "run" / "ranks" / "1.error.json").read_text())["trace"]
    assert "own.py" in trace


def test_an_error_of_ours_keeps_its_words(folders: Path, tmp_path: Path) -> None:
    given = options(folders / "text", tmp_path / "run", data=str(tmp_path / "absent.txt"))
    with pytest.raises(AsyncPipeError, match="absent.txt: no such file") as failed:
        run(Settings(**given), FACTORY)
    assert "Built in: shakespeare" in failed.value.cure


def test_an_interrupted_run_ends_with_one_line(folders: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start(options(folders / "slow", output, steps=10_000, data="clusters"), python=REAL)
    ranks = ranks_of(process, 2, output)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, out, error = finish(process, limit_s=20)
    assert (code, error) == (130, "")
    assert out.startswith("interrupted at step ") and out.count("\n") == 1
    assert read_run(output).failure == out.strip()
    assert (output / "report.html").is_file()
    assert_gone(ranks)


def test_ranks_do_not_outlive_a_killed_parent(folders: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start(options(folders / "slow", output, steps=10_000, data="clusters"), python=REAL)
    ranks = ranks_of(process, 2, output)
    process.kill()
    finish(process)
    end_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
        assert time.monotonic() < end_s
        time.sleep(0.05)


# Which failure is the first cause


def left(tmp_path: Path, *failures: Failure) -> RankFolder:
    folder = RankFolder(tmp_path)
    folder.path.mkdir()
    for failure in failures:
        folder.write(failure)
    return folder


def failure(rank: int, time_s: float, *, consequence: bool) -> Failure:
    return Failure(rank, f"rank {rank} failed", "", consequence, time_s, "")


def test_a_failure_of_its_own_comes_before_a_consequence(tmp_path: Path) -> None:
    folder = left(tmp_path, failure(0, 1.0, consequence=True), failure(2, 2.0, consequence=False))
    assert folder.first_cause({0: 1, 2: 1}, {}).what == "rank 2 failed"


def test_a_killed_rank_comes_before_all(tmp_path: Path) -> None:
    folder = left(tmp_path, failure(0, 1.0, consequence=True))
    folder.mark_step(3, 11)
    cause = folder.first_cause({0: 1, 3: -9}, {3: " (stage 3)"})
    assert cause.what == "rank 3 (stage 3) was killed by SIGKILL at step 12."


def test_a_killed_rank_that_ends_after_the_rank_that_misses_it_is_seen(tmp_path: Path) -> None:
    """Linux closes the connections of a process first; then it may take long to free its memory."""
    seen: list[dict[int, int]] = []

    def on_failure(failed: Mapping[int, int]) -> None:
        seen.append(dict(failed))
        raise RankError("over")

    code = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    sys.exit(1)\n"
        "time.sleep(0.15)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    agent = RankAgent(
        ("-S", "-c", code), 2, tmp_path, restarts=0, on_failure=on_failure, unfinished=dict
    )
    with pytest.raises(RankError, match="over"):
        agent.finish()
    assert seen == [{0: 1, 1: -signal.SIGKILL}]


def test_the_earliest_consequence_stands_when_there_is_no_other_cause(tmp_path: Path) -> None:
    folder = left(tmp_path, failure(1, 2.0, consequence=True), failure(2, 1.0, consequence=True))
    assert folder.first_cause({1: 1, 2: 1}, {}).what == "rank 2 failed"


def test_a_rank_that_left_nothing_is_named_by_its_exit_code(tmp_path: Path) -> None:
    cause = left(tmp_path).first_cause({1: 3}, {1: " (stage 1)"})
    assert cause.what == "rank 1 (stage 1) ended with exit code 3 before it could begin."


def test_an_error_around_one_of_ours_is_told_by_the_inner_one() -> None:
    try:
        try:
            raise AsyncPipeError("the inner", "its cure")
        except AsyncPipeError as inner:
            raise AsyncPipeError("the outer") from inner
    except AsyncPipeError as error:
        told = failure_of(error, 0, "", 0)
    assert (told.what, told.cure, told.consequence) == ("the inner", "its cure", False)
    assert failure_of(TransportError("x"), 0, "", 0).consequence
    assert failure_of(KeyError("k"), 1, " (stage 1)", 4).what == (
        "rank 1 (stage 1) failed at step 5: KeyError: 'k'"
    )


def test_a_store_that_is_gone_is_told_and_is_not_the_first_cause() -> None:
    told = failure_of(DistNetworkError("Broken pipe"), 0, " (stage 0)", 5)
    assert told.what == (
        "rank 0 (stage 0) failed at step 6: the process that serves the store is gone (Broken "
        "pipe)."
    )
    assert told.consequence and told.cure.startswith("That is torchrun's agent, or rank 0")


@pytest.mark.parametrize("around", [AsyncPipeError("a stage", "another"), TransportError("x")])
def test_the_end_of_a_data_loading_process_is_named_wherever_its_signal_came(
    around: AsyncPipeError,
) -> None:
    around.__cause__ = RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")
    told = failure_of(around, 0, "", 0)
    assert (told.what, told.comes_again, told.consequence) == (around.what, False, False)
    assert told.cure.startswith("A data-loading process has ended: out of memory")


def test_an_error_in_a_data_loading_process_that_goes_on_is_not_its_end() -> None:
    error = RuntimeError("Caught RuntimeError in DataLoader worker process 0.")
    assert failure_of(error, 0, "", 0).cure == ""
