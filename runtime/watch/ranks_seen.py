"""The files that the ranks of a run leave -> whether it runs, stalls, was killed or is over."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config.execution_options import ExecutionOptions
from ..distributed.failure import RankFolder
from ..errors import DataError
from ..formatting import counted
from ..monitoring.run_files import RunRecords, number
from ..monitoring.watchdog import (
    SILENT_S,
    RankState,
    Sighting,
    culprits,
    describe_stall,
    trouble_of,
    usual_cause,
)
from ..process import PROC, is_alive
from ..serialization import Origin, parse_json, read_text, shaped

Standing = Literal["starting", "running", "stalled", "killed", "ended", "failed", "stopped"]

OVER: frozenset[Standing] = frozenset(("killed", "ended", "failed", "stopped"))
"""The states of a run that is over."""

_LOST_S = 600.0
"""Seconds after which ranks of another machine that write nothing count as killed."""


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """A run and its ranks at one moment.

    standing: the state of the run.
    why: a sentence about it; "" if there is nothing to say.
    ranks: the states of the ranks that have left one, by rank.
    """

    standing: Standing
    why: str
    ranks: Mapping[int, Sighting]

    @property
    def is_over(self) -> bool:
        return self.standing in OVER


def see_ranks(run: RunRecords) -> RanksSeen:
    """The ranks of a run as their files and the system show them now."""
    left = RankFolder(run.folder)
    if run.failure:
        is_stopped = any(event.kind == "stopped" for event in run.events)
        return RanksSeen("stopped" if is_stopped else "failed", "", {})
    if run.end:
        return RanksSeen("ended", "", {})
    if not left.path.is_dir():
        # The launcher removes it at the end of a run, of which there is always a record.
        is_new = not run.start
        return RanksSeen("starting" if is_new else "killed", "" if is_new else _killed(run, 0), {})
    ranks = {rank: seen for rank in _ranks_in(left.path) if (seen := _sighting(left.path, rank))}
    numbers = [rank for rank in _ranks_in(left.path) if left.process_of(rank) > 0]
    if _are_gone(left, ranks, numbers):
        return RanksSeen("killed", _killed(run, len(ranks) or len(numbers)), ranks)
    limit_s = number(run.config, "stall_s")
    if not limit_s >= 0:
        limit_s = ExecutionOptions().stall_s
    idle_s = min((seen.idle_s for seen in ranks.values()), default=0.0)
    if ranks and limit_s and idle_s >= limit_s:
        cause = usual_cause(ranks[culprits(ranks)[0]])
        why = describe_stall(ranks, idle_s, left.last_step() + 1)
        return RanksSeen("stalled", f"{_capital(why)} {_capital(cause)}.", ranks)
    return RanksSeen("running" if run.start else "starting", "", ranks)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ranks_in(folder: Path) -> list[int]:
    names = {path.stem for kind in ("state", "pid") for path in folder.glob(f"*.{kind}")}
    return sorted(int(name) for name in names if name.isdecimal())


def _sighting(folder: Path, rank: int) -> Sighting | None:
    """The state that a rank has left; None if there is none that can be read."""
    path = folder / f"{rank}.state"
    origin = Origin(str(path), DataError)
    try:
        written_s = path.stat().st_mtime
        state = shaped(RankState, parse_json(read_text(path, origin), origin), origin)
        silent_s = max(0.0, time.time() - written_s)
        trouble = ""
        if silent_s > SILENT_S:
            trouble = "has ended" if _is_reused(state.pid, written_s) else trouble_of(state)
    except (OSError, DataError):
        return None
    return Sighting(state, silent_s if trouble else 0.0, trouble)


def _is_reused(process: int, since_s: float) -> bool:
    """True if a process began after a moment: another one that got the number."""
    try:
        ticks = int((PROC / f"{process}/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float((PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return False
    began_s = time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
    return began_s > since_s + 1


def _are_gone(left: RankFolder, ranks: Mapping[int, Sighting], numbers: list[int]) -> bool:
    """True if no process of the run is left."""
    if ranks:
        return all(
            seen.trouble == "has ended" or (seen.trouble and seen.silent_s > _LOST_S)
            for seen in ranks.values()
        )
    # Under a debugger ranks leave their process ids alone.
    return bool(numbers) and not any(is_alive(left.process_of(rank)) for rank in numbers)


def _killed(run: RunRecords, ranks: int) -> str:
    whose = f"the {counted(ranks, 'process', 'processes')} of its ranks" if ranks else "its ranks"
    return (
        f"The run was killed after step {run.last_step}: {whose} exited without reporting a result "
        "or an error. Linux kills processes when memory runs out; see dmesg | tail."
    )
