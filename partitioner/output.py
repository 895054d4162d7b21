"""Texts and weights -> a generated folder, written to a temporary folder and moved as a whole.

A folder that this tool did not write, or whose stages were edited by hand, is never overwritten
without `force`. The weights are written as one shard a stage, as the runtime loads them.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from ..runtime.errors import PlanError, disk_error
from ..runtime.executor.loading import CONSTANTS
from ..runtime.freezing import elastic
from ..runtime.limits import ListOf, flag_of
from ..runtime.plan.plan import Plan, read_plan
from ..runtime.tensor_files import tensor_bytes, write_index, write_shard
from ..runtime.user_code import file_hash, portable
from .capture import Capture, state_of
from .capture.sizes import format_dimension, sizes_text
from .planning.keywords import PlanConfig
from .planning.options import DEFAULTS, OPTIONS, PartitionOptions

FILES = frozenset({"plan.json", "README.md", "report.html", "__init__.py", elastic.FILE})
FOLDERS = frozenset({"weights", "hf", "__pycache__", elastic.FOLDER})
"""The files and folders that a generated folder may hold besides its stages."""


_RECORDED = (
    *("method", "mode", "prefer_modules", "batch_dim", "sequence_dim", "cut_at", "keep_together"),
    *PlanConfig.__annotations__,
    "code",
)


def command_of(spec: str, options: PartitionOptions, stages: int) -> str:
    """The command that makes the same plan, for a plan that was made from Python."""
    tokens = ["asyncpipe-partition", "--model", portable(spec), "--stages", str(stages)]
    for name in _RECORDED:
        value = getattr(options, name)
        if value == DEFAULTS[name]:
            continue
        if name in ("batch_dim", "sequence_dim"):
            values = format_dimension(value)
        elif isinstance(OPTIONS[name].limit, ListOf):
            values = list(value)
        else:
            values = [f"{value:g}" if isinstance(value, float) else str(value)]
        tokens += [token for text in values for token in (flag_of(name), text)]
    return shlex.join(tokens)


def check_target(folder: Path, new: Mapping[str, object], *, force: bool) -> None:
    """Checks that `folder` may be replaced: absent, empty, or generated from the same model.

    `new` holds the `model`, the `model_args` and the hash of the `graph` of the new model. Raises
    PlanError for foreign files (always), and unless `force` for a plan of another model, for a
    plan that cannot be read, and for stages edited by hand.
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
    """Returns whether a generated folder may hold a file or folder with this name. Does not use
    the plan, which may be damaged or from another version."""
    return name in FILES | FOLDERS or bool(re.fullmatch(r"stage_\d+\.py", name))


def foreign_files(folder: Path, names: list[str]) -> PlanError:
    """E7: the folder holds files that this tool did not write."""
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
    """Writes `files` and weights to a temporary folder, calls `check`, and moves the folder.

    Another thread writes the weights while `check` reads the files. After any exception no
    temporary files and no new folders are left, and `folder` is unchanged. Raises DiskError where
    the disk is full.
    """
    new = [parent for parent in folder.parents if not parent.exists()]
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
    except Exception as error:
        if disk := disk_error(error, folder):
            raise disk from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # those that are not empty stay
            for parent in new:
                parent.rmdir()


def _changes(plan: Plan, new: Mapping[str, object]) -> str:
    """The differences between the model of `plan` and the new one, in words; "" without any."""
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


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """The current state_dict, with copies of buffers, because a forward may change them."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state = {name: value.detach() for name, value in state_of(model).items()}
    return {name: value.clone() if name in buffers else value for name, value in state.items()}


def write_weights_of(
    folder: Path, state: Mapping[str, Tensor], plan: Plan, constants: Mapping[str, Tensor]
) -> None:
    """Writes one shard a stage, each tensor once, under its original name."""
    shards: list[dict[str, Tensor]] = []
    written: set[str] = set()
    for stage in plan.stages:
        tied = {
            name
            for shared in plan.shared
            for name in shared.names
            if shared.holders[0][0] != stage.index or name != shared.names[0]
        }
        names = [name for name in (*stage.parameters, *stage.buffers) if name in state]
        shard = {name: state[name] for name in names if name not in tied | written}
        written |= shard.keys()
        shards.append(shard)
    shards[0] |= {name: state[name] for name in plan.unused}
    shards[0] |= {CONSTANTS + name: tensor for name, tensor in constants.items()}
    for index, shard in enumerate(shards):
        write_shard(folder, shard, index, len(shards))
    total = sum(tensor_bytes(shard.values()) for shard in shards)
    write_index(folder, shards, total)


class OnPhase(Protocol):
    """Called at the end of each phase with its name, a summary, its seconds and the next phase."""

    def __call__(self, name: str, detail: str, seconds: float, following: str, /) -> None: ...


class PhaseTimer:
    """Reports each finished phase with the seconds since the one before."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self._on_phase = on_phase
        self._last = time.perf_counter()

    def __call__(self, name: str, detail: str, following: str) -> None:
        now = time.perf_counter()
        if self._on_phase:
            self._on_phase(name, detail, now - self._last, following)
        self._last = now


def describe_capture(captured: Capture) -> str:
    nodes = sum(1 for node in captured.graph.nodes if node.op.startswith("call"))
    where = sizes_text(captured.sizes, " at ")
    return f"{nodes} operations{where}, {'sizes are symbolic' if where else 'all sizes fixed'}"


def lines_of_python(files: Mapping[str, str]) -> int:
    return sum(text.count("\n") for name, text in files.items() if name.endswith(".py"))
