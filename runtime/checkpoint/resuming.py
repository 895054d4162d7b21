"""`--resume` -> the run that continues, its folder, options and records.

    --resume auto                 the newest good checkpoint of --output, or of the last run of this
                                  model; a new run if there is none
    --resume RUN                  the newest good checkpoint of that run
    --resume RUN/checkpoints/..   that checkpoint
    --resume URL                  a new run from the newest there, or from that one (`remote.py`)

The run continues in its own folder, or in a new one with another --output. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ..config.option_files import is_all_known, merged, read_config
from ..config.settings import RunConfig, Settings, SettingsError
from ..errors import AsyncPipeError
from ..locations import is_url
from ..monitoring.run_files import METRICS, read_run
from ..options import options_of
from ..schedule.asynchronous import ASYNCHRONOUS
from ..schedule.builders import spelled
from .folders import CHECKPOINTS, WEIGHTS, checkpoints_in, is_checkpoint
from .remote import AUTO, options_at

E = TypeVar("E", bound=AsyncPipeError)

CONFIGURATION = "config.toml"


def runs_of(folder: str) -> Path:
    """The parent folder of the runs of a generated folder, without `--output`."""
    return Path("runs") / Path(folder).resolve().name


def resumed_run(settings: Settings) -> Path | None:
    """The folder of the run that `--resume` names; None without a run to continue.

    Raises SettingsError for a path that is neither a run with checkpoints nor a checkpoint, and for
    a checkpoint that is older than others in the folder in which the run continues.
    """
    run = _run_of(settings.resume, settings.output, settings.folder)
    if settings.resume is None or settings.resume == AUTO or run is None:
        return run
    resumed, newest = Path(settings.resume), checkpoints_in(run)[:1]
    if not newest:
        raise SettingsError(
            f"--resume {resumed}: {run / CHECKPOINTS} has no checkpoint.",
            "A run writes checkpoints with --save-every 100.",
        )
    is_in_place = settings.output is None or _is_same(Path(settings.output), run)
    if is_checkpoint(resumed) and is_in_place and not _is_same(newest[0], resumed):
        raise SettingsError(
            f"--resume {resumed}: {run} has a later checkpoint, {newest[0].name}.",
            f"--resume {run} continues from that; --output NEW starts another run from this one.",
        )
    return run


def candidates(settings: Settings, folder: Path) -> tuple[list[Path], bool]:
    """The checkpoints to try for the run of that folder, in this order, and True if a damaged one
    may be skipped; no checkpoints for a new run.

    A restarted run continues from its own checkpoints, whatever it first started from.
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
    """The options given over a run's own; a run that becomes synchronous loses the options of
    asynchronous runs."""
    was, now = (
        spelled(str(options.get("schedule"))) in ASYNCHRONOUS for options in (own, {**own, **given})
    )
    declared = options_of(Settings)
    remaining = {
        name: value
        for name, value in own.items()
        if not (was and not now and declared[name].applies_to == "asynchronous")
    }
    return merged(remaining, given)


def differences(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The changed options to report when a run resumes, as phrases."""
    now = json.loads(json.dumps(asdict(config)))
    declared = options_of(Settings)
    return [
        f"{name.replace('_', '-')} {now[name]} instead of {before[name]}"
        for name in sorted(now.keys() & before.keys())
        if declared[name].on_resume == "reported" and now[name] != before[name]
    ]


def how_to_go_on(run: Path) -> str:
    """The newest checkpoint of a run that ended early and the command that continues from it, as
    the end of a sentence; "" without a checkpoint."""
    checkpoints = checkpoints_in(run)
    if not checkpoints or not (run / CONFIGURATION).is_file():
        return ""
    options = read_config(run / CONFIGURATION)
    folder = str(options.get("folder", "FOLDER"))
    command = shlex.join(["asyncpipe-train", folder, "--resume", str(run)])
    trust = "" if is_all_known(options) else " --trust"  # no mark could be left
    return f" · checkpoint {checkpoints[0].name} · continue: {command}{trust}"


def with_way_on(error: E, run: Path) -> E:
    """The error, with a cure that also names the checkpoint to continue from."""
    error.cure = f"{error.cure}{how_to_go_on(run)}".removeprefix(" · ")
    return error


def keep_records_until(metrics: Path, step: int) -> None:
    """Removes the records of a run after a step and that of its end; the run writes them again."""
    if not metrics.is_file():
        return
    new = metrics.with_suffix(".new")
    with metrics.open("rb") as lines, new.open("wb") as target:
        for line in lines:
            record = _record(line)
            event, at = record.get("event"), record.get("step", 0)
            if event in ("step", "eval") and not (isinstance(at, int | float) and at <= step):
                break
            if event not in (None, "end"):
                target.write(line.rstrip(b"\n") + b"\n")
    new.replace(metrics)


def _record(line: bytes) -> Mapping[str, Any]:
    """A line of metrics.jsonl; empty if it was cut off or damaged."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else {}


def nothing_left_to_do(config: RunConfig, folder: Path) -> str:
    """The message when `--resume auto` finds a run that has made all its steps; "" when steps are
    left.

    Raises SettingsError for a finished run without a checkpoint to continue from: starting again
    would overwrite its results.
    """
    if config.resume != AUTO or not (folder / WEIGHTS).is_dir():
        return ""
    end = read_run(folder).end if (folder / METRICS).is_file() else {}
    if not end:
        return ""
    steps = end.get("steps")
    is_whole = steps == config.steps or _has_made(end, config.epochs)
    if is_whole and config.export_hf is None:
        return f"{folder} has made all {steps} steps; nothing is left to do"
    if checkpoints_in(folder):
        return ""
    raise SettingsError(
        f"--resume auto: {folder} holds a run that has finished its {steps} steps, and no "
        "checkpoint to continue from.",
        f"--init-from {folder} --output NEW starts another run with its weights.",
    )


def _has_made(end: Mapping[str, Any], epochs: float | None) -> bool:
    """True if another step would be beyond the epochs."""
    steps, epoch = end.get("steps"), end.get("epoch")
    if epochs is None or not isinstance(steps, int) or not isinstance(epoch, float) or not steps:
        return False
    return epoch * (steps + 1) / steps > epochs >= epoch * (1 - 1e-9)


def _is_same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


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
            f"--resume {resume} is not a run or a checkpoint.",
            "--resume auto, --resume runs/NAME/1, or a folder in its checkpoints/.",
        )
    return path
