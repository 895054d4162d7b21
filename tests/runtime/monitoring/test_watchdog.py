"""A run without progress: it reports which rank waits for which, leaves stacks, and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from asyncpipe.runtime.executor.instrumented import Activity, StageMessage
from asyncpipe.runtime.monitoring.watchdog import RankState, Sighting, describe_stall, usual_cause
from asyncpipe.runtime.schedule.schedule import Action
from asyncpipe.tests.runtime.launch.test_training_launch import (
    assert_gone,
    finish,
    options,
    ranks_of,
    start,
)
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.silent_reporter import events_of

SLEEPY_DATA = """
import os
import time
import torch

class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40 and os.environ["RANK"] == "0":
            time.sleep(600)
        return {"x": torch.randn(16), "target": torch.tensor(index % 4)}

def samples():
    return Samples()
"""
LIMITS = {"stall_s": 1.5, "timeout_s": 4.0, "steps": 10_000, "eval_batches": 0}


def write_stuck(folder: Path, code: str, stages: int = 2) -> Path:
    """A generated folder whose last stage runs `code` in its 21st forward."""
    write_mlp(folder, stages=stages)
    file = folder / f"stage_{stages - 1}.py"
    text = file.read_text().replace("import time\n", "import re\nimport time\nCALLS = []\n")
    body = f"        CALLS.append(1)\n        if len(CALLS) == 21:\n            {code}\n"
    file.write_text(text.replace("        time.sleep(0)\n", body))
    return folder


def start_stuck(folder: Path, output: Path, **given: object) -> subprocess.Popen[str]:
    return start(options(folder, output, **(LIMITS | {"data": "clusters"} | given)))


def error_lines(process: subprocess.Popen[str]) -> list[str]:
    """The error's lines of a run that gets stuck."""
    code, _, error = finish(process, limit_s=60)
    assert code == 1, error
    assert "Traceback" not in error
    return error.strip().splitlines()


def stacks_of(output: Path, rank: int) -> str:
    return (output / f"stacks-rank{rank}.txt").read_text()


def test_a_data_loader_that_sleeps_while_ranks_compare_samples_is_named(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp", stages=2)
    (tmp_path / "own.py").write_text(SLEEPY_DATA)
    data = f"{tmp_path / 'own.py'}:samples"
    process = start_stuck(tmp_path / "mlp", tmp_path / "run", data=data, seed=1)
    first, second = error_lines(process)
    assert "reads the data of the first samples, which ranks compare" in first
    assert "usual cause: the data loader, or the disk" in second


def test_a_sleeping_data_loader_is_named_and_its_line_shown(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp", stages=4)
    (tmp_path / "own.py").write_text(SLEEPY_DATA)
    output = tmp_path / "run"
    data = f"{tmp_path / 'own.py'}:samples"
    first, second = error_lines(start_stuck(tmp_path / "mlp", output, data=data, seed=3))
    assert first.startswith("error: no progress for 4 s at step ")
    assert "rank 0 reads the data of micro-batch " in first
    assert 'rank 1 waits for the activation "h_0" of micro-batch ' in first
    assert " from rank 0;" in first
    assert second.startswith(f"stacks: {output}/stacks-rank0.txt")
    assert "usual cause: the data loader, or the disk" in second
    assert second.endswith("longer limit: --timeout-s 8")
    assert "own.py" in stacks_of(output, 0) and "time.sleep(600)" in stacks_of(output, 0)
    assert "transports" in stacks_of(output, 1) and "in wait" in stacks_of(output, 1)
    warning = events_of(output, "warning")[-1]
    assert warning.startswith("no progress for ") and "reads the data" in warning
    assert warning.endswith("The run ends after 4 s (--timeout-s).")


def test_a_stage_that_never_ends_is_named_in_python_and_with_the_interpreters_lock(
    tmp_path: Path,
) -> None:
    endless = write_stuck(tmp_path / "endless", "while True: pass")
    locked = write_stuck(tmp_path / "locked", "re.match('(a+)+b', 'a' * 60)")
    cases = [
        (endless, {}, "rank 1 is in forward of micro-batch ", "while True: pass"),
        (locked, {"timeout_s": 6.5}, "rank 1 says nothing for ", "stage_1.py"),
    ]
    started = [
        start_stuck(folder, folder.with_suffix(".run"), **limits) for folder, limits, *_ in cases
    ]
    for process, (folder, _, expected, in_stack) in zip(started, cases, strict=True):
        lines = error_lines(process)
        assert expected in lines[0] and "rank 0 waits for the gradient" in lines[0]
        assert in_stack in stacks_of(folder.with_suffix(".run"), 1)


def test_a_stopped_rank_is_named_and_all_are_gone(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp", slow_s=0.01)
    outputs = [tmp_path / f"run{stopped}" for stopped in (0, 1)]
    started = [start_stuck(tmp_path / "mlp", output, timeout_s=6.5) for output in outputs]
    ranks_of_run = [
        ranks_of(process, 2, output) for process, output in zip(started, outputs, strict=True)
    ]
    for stopped, ranks in enumerate(ranks_of_run):
        os.kill(ranks[stopped], signal.SIGSTOP)
    for stopped, (process, ranks) in enumerate(zip(started, ranks_of_run, strict=True)):
        first, second = error_lines(process)
        assert f"rank {stopped} is stopped for " in first
        assert f"rank {1 - stopped} waits for " in first
        assert f"kill -CONT {ranks[stopped]}" in second
        assert_gone(ranks)


def test_a_run_of_one_process_ends_too(tmp_path: Path) -> None:
    folder = write_stuck(tmp_path / "mlp", "time.sleep(600)")
    lines = error_lines(start_stuck(folder, tmp_path / "run", schedule="single"))
    assert "rank 0 is in forward of micro-batch " in lines[0] and "(stage 1)" in lines[0]
    assert "time.sleep(600)" in stacks_of(tmp_path / "run", 0)


SLOW_TO_TELL = """
import time
from asyncpipe.runtime.distributed.failure import RankFolder

put_verdict = RankFolder.put_verdict

def slowly(*arguments):
    is_first = put_verdict(*arguments)
    time.sleep(1)
    return is_first

RankFolder.put_verdict = slowly
"""


def test_ranks_of_torchrun_end_too_and_not_before_one_has_told_why(tmp_path: Path) -> None:
    folder = write_stuck(tmp_path / "mlp", "time.sleep(600)")
    with (folder / "stage_0.py").open("a") as file:
        file.write(SLOW_TO_TELL)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    process = start(options(folder, tmp_path / "run", data="clusters", **LIMITS), *launcher)
    code, _, error = finish(process, limit_s=60)
    assert code == 1
    told = [line for line in error.splitlines() if line.startswith("error: no progress for ")]
    assert len(told) == 1, error
    assert "rank 1 is in forward of micro-batch " in told[0]


def test_a_run_that_goes_on_after_a_stall_ends_well(tmp_path: Path) -> None:
    folder = write_stuck(tmp_path / "mlp", "time.sleep(3)")
    given = LIMITS | {"steps": 4, "timeout_s": 60.0, "stall_s": 1.0}
    process = start(options(folder, tmp_path / "run", data="clusters", **given))
    code, _, error = finish(process)
    assert code == 0, error
    warning = events_of(tmp_path / "run", "warning")[-1]
    assert "rank 1 is in forward of micro-batch " in warning
    assert "time.sleep(3)" in stacks_of(tmp_path / "run", 1)
    assert not (tmp_path / "run" / "ranks").exists()


# The sentence


def state(rank: int, activity: Activity, for_s: float = 58.0) -> Sighting:
    told = (activity.kind, str(activity), activity.peer, for_s, 100, 60.0)
    return Sighting(RankState(rank, 1000 + rank, "gpu-a01", *told))


def message(kind: str, source: int, target: int) -> StageMessage:
    return StageMessage(kind, "h", source, target, source, target, 4)


def test_the_sentence_of_a_rank_that_computes_for_ever() -> None:
    seen = {
        0: state(0, Activity("receive", message("gradient", 1, 0), 2)),
        1: state(1, Activity("B", Action(1, "B", 3), 3)),
        2: state(2, Activity("receive", message("activation", 1, 2), 5)),
        3: state(3, Activity("receive", message("activation", 2, 3), 5)),
    }
    assert describe_stall(seen, 60, 12) == (
        'no progress for 60 s at step 12. rank 0 waits for the gradient "h" of micro-batch 2 from '
        "rank 1; rank 1 is in backward of micro-batch 3 (stage 1) for 58 s; rank 2 waits for "
        'rank 1; rank 3 waits for the activation "h" of micro-batch 5 from rank 2.'
    )
    assert usual_cause(seen[1]) == "usual cause: the code of the stage, or too little memory"


def test_the_sentence_of_ranks_that_all_wait() -> None:
    seen = {
        0: state(0, Activity("receive", message("gradient", 1, 0), 2)),
        1: state(1, Activity("send", message("gradient", 1, 0), 2)),
        2: state(2, Activity("meet", "the norm of all gradients")),
        3: state(3, Activity("meet", "the norm of all gradients")),
    }
    assert describe_stall(seen, 300, 1) == (
        'no progress for 300 s at step 1. rank 1 waits for rank 0 to take the gradient "h" of '
        'micro-batch 2; rank 0 waits for the gradient "h" of micro-batch 2 from rank 1; rank 2 '
        "waits for all ranks: the norm of all gradients; rank 3 waits for all ranks."
    )


def test_the_sentence_of_ranks_that_wait_for_a_replica() -> None:
    seen = {
        0: state(0, Activity("exchange", "waits for the gradients of stage 0 from rank 2")),
        1: state(1, Activity("exchange", "waits for the gradients of stage 1 from rank 3")),
        2: state(2, Activity("receive", message("gradient", 3, 2), 2)),
        3: state(3, Activity("F", Action(1, "F", 3), 3)),
    }
    assert describe_stall(seen, 60, 2) == (
        "no progress for 60 s at step 2. rank 0 waits for the gradients of stage 0 from rank 2; "
        "rank 1 waits for the gradients of stage 1 from rank 3; rank 2 waits for the gradient "
        '"h" of micro-batch 2 from rank 3; rank 3 is in forward of micro-batch 3 (stage 1) for '
        "58 s."
    )


def test_the_sentence_of_a_rank_that_the_system_holds() -> None:
    reading = state(0, Activity("data", index=7)).state
    seen = {0: Sighting(reading, 57.0, "hangs in the system, on a disk or a network,")}
    assert describe_stall(seen, 60, 3) == (
        "no progress for 60 s at step 3. rank 0 hangs in the system, on a disk or a network, "
        "for 57 s, when it read the data of micro-batch 7."
    )
    assert usual_cause(seen[0]) == "see: py-spy dump --pid 1000 (on gpu-a01)"
    assert json.dumps(seen[0].state.text)
