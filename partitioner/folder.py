"""Texts and weights -> a generated folder, written aside and moved in whole.

A folder that this tool did not write, or whose stages were edited by hand, is never overwritten
without being told to.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..runtime.errors import PlanError
from ..runtime.plan import Plan, file_hash, read_plan

FILES = frozenset({"plan.json", "README.md", "report.html", "__init__.py"})
FOLDERS = frozenset({"weights", "hf", "__pycache__"})
"""What a generated folder may hold beside its stages."""


def check_target(folder: Path, new: Mapping[str, object], *, force: bool) -> None:
    """Whether `folder` may be replaced: absent, empty, or generated from the same model.

    `new` says of the model about to be written its `model`, `model_args` and hash of the `graph`.
    Raises PlanError for foreign files (always), and unless `force` for a plan of another model,
    one that cannot be read, and stages edited by hand.
    """
    if folder.is_symlink():
        raise PlanError(
            f"{folder} is a link to {folder.readlink()}. Nothing was changed.",
            f"--output {shlex.quote(str(folder.resolve()))}, or remove the link.",
        )
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "plan.json").is_file():
        raise foreign_files(folder, sorted(path.name for path in folder.iterdir()))
    foreign = sorted(path.name for path in folder.iterdir() if not _is_ours(path.name))
    if foreign:
        raise foreign_files(folder, foreign)
    if force:
        return
    plan = read_plan(folder)
    changes = _changes(plan, new)
    if changes:
        raise PlanError(
            f"{folder} was made from another model: {changes}.", f"{plan.command} --force"
        )
    for stage in plan.stages:
        path = folder / stage.file
        if path.is_file() and file_hash(path) != stage.sha256:
            raise PlanError(
                f"{path} was edited by hand. Nothing was changed.",
                "Choose another --output, or give --force to write over it.",
            )


def _is_ours(name: str) -> bool:
    """Whether a generated folder may hold a file or folder of that name, whatever its plan says:
    that may be damaged, or another version's."""
    return name in FILES | FOLDERS or bool(re.fullmatch(r"stage_\d+\.py", name))


def foreign_files(folder: Path, names: list[str]) -> PlanError:
    """E7: the folder holds files of somebody else."""
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return PlanError(
        f"{folder} has files that this tool did not write ({listed}). Nothing was changed.",
        "Choose another --output, or remove them.",
    )


def write_folder(
    folder: Path,
    files: Mapping[str, str],
    write_weights: Callable[[Path], None] | None,
    check: Callable[[Path], None],
) -> None:
    """Writes `files` and weights into a temporary folder, has it checked, and moves it in whole.

    The weights are written by another thread while `check` looks at the files. When either or
    anything else raises, nothing is left behind and `folder` is as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, text in files.items():
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        with ThreadPoolExecutor(1) as beside:
            writing = beside.submit(write_weights, aside / "weights") if write_weights else None
            check(aside)
            if writing:
                writing.result()
        shutil.rmtree(aside / "__pycache__", ignore_errors=True)
        aside.chmod(0o755)
        if folder.exists():
            old = aside.with_name(aside.name + "-old")
            folder.rename(old)
            aside.rename(folder)
            shutil.rmtree(old)
        else:
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _changes(plan: Plan, new: Mapping[str, object]) -> str:
    """What distinguishes the model of `plan` from the new one, in words; "" if nothing."""
    if plan.model != new["model"]:
        return f"--model was {plan.model}, is now {new['model']}"
    before, after = dict(plan.model_args), json.loads(json.dumps(new["model_args"]))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return (
                f"{key} was {before.get(key, 'the default')}, is now "
                f"{after.get(key, 'the default')}"
            )
    if plan.hashes.get("graph") != new["graph"]:
        return f"{plan.model} or its sizes changed since"
    return ""
