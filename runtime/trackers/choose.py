"""`--log NAMES` -> the reporters that are told of a run beside its terminal and metrics.jsonl."""

from __future__ import annotations

import difflib
import importlib
from importlib.util import find_spec
from pathlib import Path

from ..seeding import drawing_from, import_seeded
from ..training.settings import Settings, SettingsError
from ..user_code import names_object, told_as
from ..watching.metrics import HOOKS, Reporter

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Names of modules here, of the packages that they need, and of the extras that install these."""


def names_of(settings: Settings) -> tuple[str, ...]:
    """What `--log` lists."""
    return tuple(name.strip() for name in (settings.log or "").split(",") if name.strip())


def check_log(settings: Settings) -> None:
    """Raises SettingsError for a name that is no tracker, or one whose package is missing."""
    for name in names_of(settings):
        if name in TRACKERS:
            if find_spec(name) is None:
                raise SettingsError(
                    f"--log {name} needs {name}, which is not installed.",
                    f'pip install "asyncpipe[{name}]"',
                )
        elif not names_object(name):
            near = difflib.get_close_matches(name, TRACKERS, 1)
            own = "or your own package.module:factory or path/file.py:factory"
            raise SettingsError(
                f"--log {name} is not known.",
                f"Did you mean {near[0]}?" if near else f"Choose {', '.join(TRACKERS)}, {own}.",
            )


def open_trackers(settings: Settings, folder: Path) -> dict[str, Reporter]:
    """The reporters that `--log` lists, by name, for the run in `folder`.

    Raises SettingsError for the user's own that does not work or is no reporter.
    """
    with drawing_from(settings.seed, "trackers"):
        return {name: _opened(name, settings, folder) for name in names_of(settings)}


def _opened(name: str, settings: Settings, folder: Path) -> Reporter:
    with told_as(SettingsError, f"--log {name}"):
        if name in TRACKERS:
            factory = importlib.import_module(f".{name}", __package__).open_tracker
        else:
            factory = import_seeded(name, "--log", SettingsError, settings.seed)
        made: Reporter = factory(settings, folder)
    missing = [hook for hook in HOOKS if not callable(getattr(made, hook, None))]
    if missing:
        raise SettingsError(
            f"--log {name} made a {type(made).__name__}, which has no {', '.join(missing)}.",
            "Subclass asyncpipe.Reporter and override what you need.",
        )
    return made
