"""Stand-ins for Slurm's `srun` and `scontrol` that set for each task what Slurm sets.

`install` puts both on a path. They play a job on the hosts of `SLURM_JOB_NODELIST` (plain names).
Where `FAKE_SLURM_ENTER` is a JSON object, its entries are the commands that enter each host;
without it all run here. When the file
`FAKE_SLURM_USR1_WHEN` is there, all tasks of a job that was not queued again are sent SIGUSR1;
`scontrol requeue` leaves a file `requeued`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path


def install(folder: Path) -> Path:
    """Two commands in a new folder `bin`, to be put first on PATH."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("srun", "scontrol"):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        (tools / name).chmod(0o755)
    return tools


def job(hosts: Sequence[str], *, tasks_per_node: int, cpus_per_task: int = 1) -> dict[str, str]:
    """What sbatch sets in a batch script."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": ",".join(hosts),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_CPUS_PER_TASK": str(cpus_per_task),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(len(hosts) * tasks_per_node),
    }


def tasks(hosts_by_rank: Sequence[str]) -> list[dict[str, str]]:
    """What srun sets for each task of a step."""
    hosts = list(dict.fromkeys(hosts_by_rank))
    counts = [hosts_by_rank.count(host) for host in hosts]
    short = [(count, len(list(group))) for count, group in groupby(counts)]
    per_node = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in short)
    return [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(hosts_by_rank[:rank].count(host)),
            "SLURM_NODEID": str(hosts.index(host)),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(len(hosts_by_rank)),
            "SLURM_STEP_NODELIST": ",".join(hosts),
            "SLURM_STEP_TASKS_PER_NODE": per_node,
        }
        for rank, host in enumerate(hosts_by_rank)
    ]


def _srun(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    options = [argument for argument in arguments if argument.startswith("--")]
    options = options[: next(i for i, a in enumerate(arguments) if not a.startswith("--"))]
    command = arguments[len(options) :]
    given = dict(option.removeprefix("--").split("=", 1) for option in options)
    assert given.keys() <= {"ntasks", "cpus-per-task", "kill-on-bad-exit", "distribution"}, given
    hosts = environment["SLURM_JOB_NODELIST"].split(",")
    if given["distribution"] == "arbitrary":
        by_rank = Path(environment["SLURM_HOSTFILE"]).read_text().split()
    else:
        per_node = int(environment["SLURM_NTASKS_PER_NODE"])
        by_rank = [host for host in hosts for _ in range(per_node)]
    assert len(by_rank) == int(given["ntasks"])
    enter = json.loads(environment.get("FAKE_SLURM_ENTER", "{}"))
    running = [
        subprocess.Popen([*enter.get(host, []), *command], env={**environment, **task})
        for host, task in zip(by_rank, tasks(by_rank), strict=True)
    ]
    codes: list[int | None] = [None]
    told = "SLURM_RESTART_COUNT" in environment
    while None in codes:
        time.sleep(0.05)
        if not told and Path(environment.get("FAKE_SLURM_USR1_WHEN", "/nowhere/")).exists():
            told = True
            for process in running:
                process.send_signal(signal.SIGUSR1)
        codes = [process.poll() for process in running]
        if any(codes) and given.get("kill-on-bad-exit") == "1":
            for process in running:
                process.terminate()
                process.wait()
    return max(abs(process.returncode) for process in running)


def _scontrol(arguments: Sequence[str]) -> int:
    if arguments[0] == "requeue":
        Path("requeued").write_text(arguments[1])
        return 0
    assert list(arguments[:2]) == ["show", "hostnames"], arguments
    sys.stdout.write("\n".join(arguments[2].split(",")) + "\n")
    return 0


if __name__ == "__main__":
    tool, *rest = sys.argv[1:]
    sys.exit(_srun(rest, os.environ) if tool == "srun" else _scontrol(rest))
