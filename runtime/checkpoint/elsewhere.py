"""Checkpoints at a location too: copied there when they are written, fetched to go on from.

    --save-to s3://bucket/run                 each is copied there, and as many are kept there
    --resume auto --save-to s3://bucket/run   the newest there, if the run's folder has none later
    --resume s3://bucket/run[/step-000500]    the newest there, or that one
    --init-from s3://bucket/run[/step-..]     its weights

What is to be fetched is brought into the run's folder before the ranks begin. From then on it is as
if it had been there. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..training.settings import OF_THIS_CALL, Settings, checked
from .folders import CHECKPOINTS, checkpoints_in, is_name
from .location import Location, LocationError, is_url

AUTO = "auto"
INITIAL = "initial"
"""The folder of a run that has the checkpoint whose weights it begins with."""


def bring(settings: Settings, run: Path) -> None:
    """Fetches into a run's folder what it is to begin from; one process of the run calls it.

    Raises LocationError where that is not to be had, or checkpoints cannot be copied to `save_to`.
    """
    copies = Location(settings.save_to) if settings.save_to is not None else None
    if copies is not None:
        copies.check()
    if settings.init_from is not None and is_url(settings.init_from):
        location, name = _newest(settings.init_from)
        if not (run / INITIAL / name).exists():
            location.get(name, run / INITIAL / name)
    if settings.resume is not None:
        _bring_newest(settings.resume, run, copies)
    if copies is not None:
        own = checkpoints_in(run)
        later = [name for name in copies.names() if not own or _step(name) > _step(own[0].name)]
        if later:
            raise LocationError(
                f"{copies.url} has a checkpoint that is not of this run: {later[-1]}.",
                "--resume auto goes on from it; --save-to another place keeps it.",
            )


def _bring_newest(resume: str, run: Path, copies: Location | None) -> None:
    """What `--resume` means, if that is elsewhere. A run that is begun again goes on from its
    own."""
    own = checkpoints_in(run)
    if is_url(resume):
        if not own:
            location, name = _newest(resume)
            location.get(name, run / CHECKPOINTS / name)
    elif resume == AUTO and copies is not None:
        newest = max(copies.names(), key=_step, default=None)
        if newest is not None and (not own or _step(newest) > _step(own[0].name)):
            copies.get(newest, run / CHECKPOINTS / newest)


def options_at(url: str) -> dict[str, Any]:
    """The options of the run whose checkpoint a URL names, but for those of one call.

    Raises LocationError where there is none, SettingsError where it has options that are none.
    """
    location, name = _newest(url)
    with TemporaryDirectory() as aside:
        found: Mapping[str, Any] = location.facts(name, Path(aside)).settings
    return {
        option: checked(option, value, url)
        for option, value in found.items()
        if value is not None and option not in OF_THIS_CALL
    }


def initial_weights(settings: Settings, run: Path) -> str | None:
    """Where the weights are that a run begins with, if not in its generated folder."""
    if settings.init_from is None or not is_url(settings.init_from):
        return settings.init_from
    (checkpoint,) = (path for path in (run / INITIAL).iterdir() if is_name(path.name))
    return str(checkpoint)


def copy(checkpoint: Path, url: str, *, last: int, best: int) -> str:
    """Copies a checkpoint of a run's folder, and removes all there but the `last` ones and the
    `best`; in words, how that went."""
    location = Location(url)
    try:
        location.put(checkpoint)
        location.keep(_kept(location, last, best))
    except LocationError as error:
        return f"not copied: {error.what}"
    return f"copied to {url}"


def _kept(location: Location, last: int, best: int) -> set[str]:
    """As `folders.prune`, of what is there: the run's folder may have been lost."""
    names = sorted(location.names(), key=_step, reverse=True)
    if not best:
        return set(names[:last])
    with TemporaryDirectory() as aside:
        losses = {name: location.facts(name, Path(aside)).evaluation for name in names}
    evaluated = [(loss, name) for name, loss in losses.items() if loss is not None]
    return {*names[:last], *(name for _, name in sorted(evaluated)[:best])}


def _newest(url: str) -> tuple[Location, str]:
    """The location of a URL, and the checkpoint there that it names, or else the newest."""
    parent, _, last = url.rstrip("/").rpartition("/")
    if is_name(last):
        return Location(parent), last
    location = Location(url)
    newest = max(location.names(), key=_step, default=None)
    if newest is None:
        raise LocationError(f"{url} has no checkpoint.", "--save-to copies those of a run there.")
    return location, newest


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])
