"""`--resume` -> the run that goes on, its folder, options and records.

    --resume auto                 the newest good checkpoint of --output, or of the last run of this
                                  model; a new run where there is none
    --resume RUN                  the newest good checkpoint of that run
    --resume RUN/checkpoints/..   that checkpoint
    --resume URL                  a new run from the newest there, or from that one (`elsewhere.py`)

The run goes on in its own folder, or, with another --output, in a new one. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..run_report.records import METRICS
from ..schedules import ASYNCHRONOUS, spelled
from ..training.named_code import is_all_known
from ..training.settings import OF_THIS_CALL, Settings, SettingsError, read_config
from .elsewhere import AUTO, options_at
from .folders import CHECKPOINTS, WEIGHTS, checkpoints_in, is_checkpoint
from .location import is_url

CONFIGURATION = "config.toml"
_OF_WATCHING = frozenset(
    {
        *("folder", "log_every", "trace", "eval_every", "eval_batches", "export_hf", "init_from"),
        *("save_every", "keep_last", "keep_best", "timeout_s", "stall_s", "threads", "pin"),
        *("save_to", "interface", "master_addr", "master_port", "transport", "check_replicas"),
    }
)
"""Options that a run may have otherwise when it goes on, and nothing is said of it."""
_OF_ASYNCHRONOUS_RUNS = frozenset(
    {
        *("staleness", "annealing_steps", "ahead", "staleness_cap", "flush_every", "sync_start"),
        "clip_by",
    }
)


def runs_of(folder: str) -> Path:
    """Where the runs of a generated folder are, unless `--output` says otherwise."""
    return Path("runs") / Path(folder).resolve().name


def resumed_run(settings: Settings) -> Path | None:
    """The folder of the run that `--resume` means; None if there is none to go on with.

    Raises SettingsError for what is neither a run with checkpoints nor a checkpoint, and for a
    checkpoint that later ones of the folder in which the run is to go on follow.
    """
    run = _run_of(settings.resume, settings.output, settings.folder)
    if settings.resume is None or settings.resume == AUTO or run is None:
        return run
    asked, newest = Path(settings.resume), checkpoints_in(run)[:1]
    if not newest:
        raise SettingsError(
            f"--resume {asked}: there is no checkpoint in {run / CHECKPOINTS}.",
            "--save-every 100 has a run write them.",
        )
    goes_on_there = settings.output is None or _is_same(Path(settings.output), run)
    if is_checkpoint(asked) and goes_on_there and not _is_same(newest[0], asked):
        raise SettingsError(
            f"--resume {asked}: {run} has a later checkpoint, {newest[0].name}.",
            f"--resume {run} goes on from that; --output NEW begins another run from this one.",
        )
    return run


def candidates(settings: Settings, folder: Path) -> tuple[list[Path], bool]:
    """The checkpoints to be tried by the run of that folder, in this order, and whether a damaged
    one may be passed over; none of a new run.

    A run that is begun again goes on from its own, whatever it first began from.
    """
    own, resume = checkpoints_in(folder), settings.resume
    if resume is None or resume == AUTO:
        others = resumed_run(settings) if resume and not own else None
        return own or (checkpoints_in(others) if others else []), True
    if not is_checkpoint(Path(resume)):
        return own or checkpoints_in(Path(resume)), True
    if own and not _is_same(own[0], Path(resume)):
        return own, True
    return [Path(resume)], False


def with_options_of_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given, over those of the run that they resume."""
    resume, output = given.get("resume"), given.get("output")
    if resume is not None and is_url(resume):
        return _over(options_at(resume), given)
    run = _run_of(resume, output, str(given.get("folder", "")))
    if run is None or not (run / CONFIGURATION).is_file():
        return dict(given)
    return _over(read_config(run / CONFIGURATION), given)


def _over(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given over a run's own, without those that a synchronous run has not if it is to
    go on as one."""
    was, now = (
        spelled(str(each.get("schedule"))) in ASYNCHRONOUS for each in (own, {**own, **given})
    )
    kept = own.keys() - _OF_ASYNCHRONOUS_RUNS if was and not now else own.keys()
    return {**{name: value for name, value in own.items() if name in kept}, **given}


def differences(before: Mapping[str, Any], settings: Settings) -> list[str]:
    """What of the options that numbers depend on is other than it was, in words."""
    now = json.loads(json.dumps(asdict(settings)))
    return [
        f"{name.replace('_', '-')} {now[name]} instead of {before[name]}"
        for name in sorted(now.keys() & before.keys())
        if name not in OF_THIS_CALL | _OF_WATCHING and now[name] != before[name]
    ]


def how_to_go_on(run: Path) -> str:
    """The newest checkpoint of a run that ended early and the command that goes on from it, to be
    put behind a sentence; "" if there is none."""
    checkpoints = checkpoints_in(run)
    if not checkpoints or not (run / CONFIGURATION).is_file():
        return ""
    options = read_config(run / CONFIGURATION)
    folder = str(options.get("folder", "FOLDER"))
    command = shlex.join(["asyncpipe-train", folder, "--resume", str(run)])
    trust = "" if is_all_known(options) else " --trust"  # no mark could be left
    return f" · checkpoint {checkpoints[0].name} · continue: {command}{trust}"


def keep_records_until(metrics: Path, step: int) -> None:
    """Drops the records of a run after a step, and that of its end: they will be written again."""
    if not metrics.is_file():
        return
    kept = []
    for line in metrics.read_bytes().splitlines():
        record = _record(line)
        event, at = record.get("event"), record.get("step", 0)
        if event in ("step", "eval") and not (isinstance(at, int | float) and at <= step):
            break
        if event not in (None, "end"):
            kept.append(line + b"\n")
    new = metrics.with_suffix(".new")
    new.write_bytes(b"".join(kept))
    new.replace(metrics)


def _record(line: bytes) -> Mapping[str, Any]:
    """A line of metrics.jsonl; empty where it was cut off, or where the disk has lost it."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else {}


def nothing_left_to_do(settings: Settings, folder: Path) -> str:
    """What to say where `--resume auto` finds a run that has made all its steps; "" where there is
    something to do.

    Raises SettingsError for a run that is finished and left no checkpoint to go on from: it would
    be begun again, in place of what it came to.
    """
    if settings.resume != AUTO or not (folder / WEIGHTS).is_dir():
        return ""
    metrics = folder / METRICS
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    ends = [record for line in lines if (record := _record(line)).get("event") == "end"]
    if not ends:
        return ""
    steps = ends[-1].get("steps")
    if steps == settings.steps and settings.export_hf is None:
        return f"{folder} has made all {steps} steps; nothing is left to do"
    if checkpoints_in(folder):
        return ""
    raise SettingsError(
        f"--resume auto: {folder} holds a run that has finished its {steps} steps, and no "
        "checkpoint to go on from.",
        f"--init-from {folder} --output NEW begins another run with its weights.",
    )


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _run_of(resume: str | None, output: str | None, folder: str) -> Path | None:
    if resume is None or is_url(resume):
        return None
    if resume == AUTO:
        if output is not None:
            return Path(output) if Path(output).is_dir() else None
        numbered = [path for path in runs_of(folder).glob("*") if path.name.isdigit()]
        return max(numbered, key=lambda path: int(path.name), default=None)
    path = Path(resume)
    if is_checkpoint(path):
        return path.parent.parent
    if not (path / CONFIGURATION).is_file() and not (path / CHECKPOINTS).is_dir():
        raise SettingsError(
            f"--resume {resume}: there is no run and no checkpoint.",
            "--resume auto, --resume runs/NAME/1, or a folder in its checkpoints/.",
        )
    return path
