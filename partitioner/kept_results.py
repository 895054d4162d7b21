"""Results of earlier partitions, which a command with the same outcome uses instead of its work.

A result is the texts of a generated folder: its plan, its verified stages, its pages. It is used
only if everything that it depends on is known and the same: the model with all of its values, the
example inputs, the options, the command, every file of code that the earlier process had loaded,
the installed packages, the machine and the environment variables. For a model in a user's own file
this cannot be known, because its code may read other files: such results are never kept. Results
are kept by the commands alone, in whose processes no other program has replaced functions.

The texts are code, so a result is used only if the user's state folder says that it was made here
(`runtime/plan/trust.py`). Weights are not kept: they are those of the model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..runtime.plan.plan import Plan, read_plan
from ..runtime.plan.trust import is_known_code, remember_code
from .loaded_code import (
    changed_since_start,
    joined_hash,
    loaded_files,
    model_digest,
    state_of_file,
    surroundings,
)
from .models.load import ModelSource
from .planning.options import PartitionOptions
from .profile.cache import cache_folder

_FACTS, _GENERATED = "facts.json", "generated"
_MOST = 32  # results; the oldest are removed first
_WITHOUT_EFFECT = {"no_cache", "force", "output"}  # the command names the output


@dataclass(frozen=True)
class Result:
    """A result of an earlier partition.

    plan: its plan
    files: the texts of its folder by name
    made: the time at which it was made, in words
    verified: the outcome of its verification
    """

    plan: Plan
    files: Mapping[str, str]
    made: str
    verified: str

    @property
    def summary(self) -> str:
        return (
            f"capture, profile, plan and code of {self.made}: same model, options, code and "
            f"machine · verified then: {self.verified}"
        )


class KeptResults:
    """The place for the result of one command; `of` returns None where none may be kept."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._place = folder / key

    @classmethod
    def of(cls, source: ModelSource, options: PartitionOptions, command: str) -> KeptResults | None:
        key = _key(source, options, command)
        return cls(cache_folder().absolute() / "results", key) if key else None

    def find(self) -> Result | None:
        """The result, if there is one that was made here, and no code has changed since."""
        try:
            texts = _texts_in(self._place)
            if not is_known_code(self._mark(texts)):
                return None
            facts = json.loads(texts[_FACTS])
            known = {path: tuple(state) for path, state in facts["files"].items()}
            if any(known.get(path) != state for path, state in loaded_files().items()):
                return None
            if any(state_of_file(path) != state for path, state in known.items()):
                return None
            plan = read_plan(self._place / _GENERATED)
        except (OSError, ValueError):
            return None
        start = len(_GENERATED) + 1
        files = {name[start:]: text for name, text in texts.items() if name != _FACTS}
        return Result(plan, files, facts["made"], facts["verified"])

    def _mark(self, texts: Mapping[str, str]) -> str:
        """The name under which the texts of a result are known to have been made here."""
        return f"{self._place}:{joined_hash(text for item in texts.items() for text in item)}"

    def keep(self, generated: Path, verified: str) -> None:
        """Keeps the texts of a folder that was just written; `verified` is the outcome of its
        verification. Skipped if its constants are in its weights, or if code has changed since this
        process began. A cache never fails a command."""
        files = loaded_files()
        try:
            if changed_since_start(files) or read_plan(generated).constants:
                return
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            aside = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
            try:
                self._write(aside, generated, verified, files)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            self._remove_old()
        except (OSError, ValueError):
            return

    def _write(self, aside: Path, generated: Path, verified: str, files: Mapping[str, Any]) -> None:
        names = shutil.ignore_patterns("weights", "__pycache__")
        shutil.copytree(generated, aside / _GENERATED, ignore=names)
        facts = {
            "made": time.strftime("%Y-%m-%d %H:%M"),
            "verified": verified,
            "files": files,
        }
        (aside / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(self._place, ignore_errors=True)
        aside.rename(self._place)
        remember_code(self._mark(_texts_in(self._place)))

    def _remove_old(self) -> None:
        places = sorted(self._folder.glob("[!.]*"), key=lambda place: place.stat().st_mtime)
        for place in places[:-_MOST]:
            shutil.rmtree(place, ignore_errors=True)


def _key(source: ModelSource, options: PartitionOptions, command: str) -> str | None:
    """A hash of what a result depends on besides code; None if some of it is unknown: what the code
    of a user reads, the file of a device, the plans of other lengths."""
    is_named = isinstance(options.loss, str | None) and ":" not in f"{options.loss} {source.spec}"
    is_whole = options.elastic is None and options.stop_after is None
    if not (is_named and is_whole) or Path(options.device or "").is_file():
        return None
    if (digest := model_digest(source.model, source.example_inputs)) is None:
        return None
    chosen = {
        entry.name: repr(getattr(options, entry.name))
        for entry in fields(options)
        if entry.name not in _WITHOUT_EFFECT
    }
    made = (source.name, source.spec, source.weights, source.criterion, dict(source.files))
    facts = {"command": command, "options": chosen, "made": repr(made), "model": digest}
    return joined_hash([json.dumps(facts | surroundings(), sort_keys=True, default=str)])


def _texts_in(folder: Path) -> dict[str, str]:
    """The texts of a folder by name, in a fixed order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}
