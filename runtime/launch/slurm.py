"""Settings and plan -> a batch script for Slurm: one task per rank, no other launcher.

Before the job's time is over, or when it is preempted, Slurm sends SIGUSR1 or SIGTERM: the run
writes a checkpoint and exits with 143, and the script requeues the job, which resumes.

The n-th host of the job takes the ranks of the plan's n-th host. If hosts have different numbers of
ranks, or ranks of one host are not contiguous, Slurm gets a list of hosts by rank
(`--distribution=arbitrary`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ..config.segments import make_segment
from ..config.settings import Settings, SettingsError
from ..distributed.grid import grid_of
from ..formatting import one_line
from ..limits import flag_of
from ..options import options_of
from ..plan.plan import Plan
from .job import make_job

CPUS_PER_TASK = 4
"""CPUs per rank without --threads."""

NOTICE_S = 120
"""The seconds before the end of its time at which Slurm signals the run."""

_TIMES = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}", re.ASCII)


def batch_script(settings: Settings) -> str:
    """The text of the script, with the same checks of settings and plan as for a run.

    Raises AsyncPipeError when settings, plan and hosts do not fit together.
    """
    job = make_job(settings)
    schedule = make_segment(job.plan, job.config, steps=1)
    ranks = grid_of(schedule, job.config.pipelines, job.config.tensor_ranks).processes
    return sbatch_script(settings, job.plan, ranks)


def sbatch_script(
    settings: Settings,
    plan: Plan,
    ranks: int,
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> str:
    """The script for this number of ranks; `settings` are as the user gave them.

    before: commands that run on the first host before the ranks start.
    after: commands that run there when the ranks have made all their steps.

    Raises SettingsError when the ranks cannot be distributed over the hosts.
    """
    if not _TIMES.fullmatch(settings.time_limit):
        raise SettingsError(
            f"--time-limit {settings.time_limit} is not a valid time for Slurm.",
            "Give hours, minutes and seconds such as 12:00:00, or days in front: 2-00:00:00.",
        )
    host_of_rank = _hosts(settings, plan, ranks)
    counts = [host_of_rank.count(host) for host in range(max(host_of_rank) + 1)]
    lines = _directives(settings, plan, host_of_rank, counts)
    options = ['--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--kill-on-bad-exit=1"]
    if len(set(counts)) == 1 and host_of_rank == sorted(host_of_rank):
        options.append("--distribution=block")
    else:
        by_rank = " ".join(f'"${{hosts[{host}]}}"' for host in host_of_rank)
        lines += [
            "export SLURM_HOSTFILE=$PWD/hosts-$SLURM_JOB_ID",
            f"""printf '%s\\n' {by_rank} > "$SLURM_HOSTFILE\"""",
        ]
        options.append("--distribution=arbitrary")
    resume = "--resume auto"
    if settings.output is None:
        runs = Path("runs") / Path(settings.folder).resolve().name
        resume += f' --output {shlex.quote(str(runs / "slurm-"))}"$SLURM_JOB_ID"'
    then = [f'if [ "${{code:-0}}" -eq 0 ]; then {command}; fi' for command in after]
    lines += [
        "",
        *before,
        f"srun --ntasks={ranks} {' '.join(options)} \\",
        f"    {shlex.join(train_command(settings))} \\",
        f"    {resume} || code=$?",
        "",
        "# There is a checkpoint: the time was nearly over, or the job is to make room.",
        'if [ "${code:-0}" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        *then,
        'exit "${code:-0}"',
    ]
    return "\n".join(lines) + "\n"


def _directives(
    settings: Settings, plan: Plan, host_of_rank: Sequence[int], counts: Sequence[int]
) -> list[str]:
    """The options of the job, and the address of rank 0; `counts` are the ranks of each host."""
    most, ranks = max(counts), len(host_of_rank)
    lines = [
        "#!/bin/bash",
        f"# {one_line(plan.name)}, {len(plan.stages)} stages: {_in_words(host_of_rank)}.",
        "# Options given to sbatch win over these: sbatch --partition NAME --account NAME FILE",
        f"#SBATCH --job-name={_job_name(plan.name)}",
        f"#SBATCH --nodes={len(counts)}",
        f"#SBATCH --ntasks={ranks}",
        f"#SBATCH --ntasks-per-node={most}",
        f"#SBATCH --cpus-per-task={settings.threads or CPUS_PER_TASK}",
    ]
    if settings.device == "cuda":
        lines.append(f"#SBATCH --gpus-per-node={-(-most // settings.ranks_per_gpu)}")
    return [
        *lines,
        f"#SBATCH --time={settings.time_limit}",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=USR1@{NOTICE_S}",
        "set -euo pipefail",
        "",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${hosts[0]}",
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
    ]


def train_command(settings: Settings) -> list[str]:
    """The equivalent asyncpipe-train command: all options that differ from their defaults."""
    command = ["asyncpipe-train", settings.folder]
    for name, option in options_of(Settings).items():
        value = getattr(settings, name)
        if option.scope == "call" or name == "folder":
            continue
        if value == option.default or value is None:
            continue
        command.append(flag_of(name))
        if isinstance(value, tuple):
            command += map(str, value)
        elif value is not True:
            command.append(f"{value:g}" if isinstance(value, float) else str(value))
    return command


def _job_name(name: str) -> str:
    """The name as a single word: Slurm splits such a line like a shell and reads further options
    from it."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip("-.") or "asyncpipe"


def _hosts(settings: Settings, plan: Plan, ranks: int) -> list[int]:
    """The host of each rank, numbered from 0: from the plan, or equally many contiguous ranks on
    each."""
    names = [spec.host for spec in plan.setting.ranks]
    planned = list(dict.fromkeys(names))
    if names and ranks % len(names) == 0 and settings.nodes in (None, len(planned)):
        # Replicas of a plan for one host share that host; for several hosts, each has its own.
        more = len(planned) if len(planned) > 1 and settings.nodes is None else 0
        return [
            planned.index(name) + more * replica
            for replica in range(ranks // len(names))
            for name in names
        ]
    nodes = settings.nodes or 1
    if ranks % nodes:
        raise SettingsError(
            f"{ranks} ranks cannot be divided evenly among --nodes {nodes}.",
            f"Partition with --hosts a:{-(-ranks // nodes)},b:.. to set the ranks of each host.",
        )
    return [rank * nodes // ranks for rank in range(ranks)]


def _in_words(host_of_rank: Sequence[int]) -> str:
    parts = []
    for host, group in groupby(range(len(host_of_rank)), key=lambda rank: host_of_rank[rank]):
        own = list(group)
        span = f"ranks {own[0]}-{own[-1]}" if len(own) > 1 else f"rank {own[0]}"
        parts.append(f"{span} on host {host + 1}")
    return ", ".join(parts)
