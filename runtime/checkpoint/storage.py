"""Named tensors <-> safetensors files.

The files have the layout of Hugging Face, so `torch.distributed.checkpoint.load` opens a folder
written here with its `HuggingFaceStorageReader`, as does anything that reads safetensors. Its own
storage keeps the metadata as a pickle, which can run code when it is read, and its planner gathers
the plans of all ranks to divide sharded tensors. A stage's tensors are whole and belong to it
alone: every rank writes its own files without communication, in a thread while it trains.

`write_weights` writes trained stages under the original names, in a folder that transformers
loads.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..distributed.process_groups import World
from ..errors import DataError
from ..plan.plan import Plan
from ..tensor_files import dense, tensor_bytes, write_index, write_shard
from .folders import CheckpointError


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], file_of: Callable[[str], str]
) -> list[Path]:
    """Writes each of this rank's tensors to the file of `folder` that `file_of` names; returns the
    files. Raises OSError."""
    by_file: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        by_file[file_of(name)][name] = dense(tensor)
    try:
        for file, own in by_file.items():
            folder.mkdir(parents=True, exist_ok=True)
            save_file(own, folder / file, metadata={"format": "pt"})
    except SafetensorError as error:
        # The message is the only place that has the system's error number.
        number = re.search(r"os error (\d+)", str(error))
        arguments = (int(number[1]), os.strerror(int(number[1]))) if number else (str(error),)
        raise OSError(*arguments) from error
    return sorted(folder / file for file in by_file)


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a folder, by name. Raises CheckpointError for a damaged file."""
    shapes: dict[str, tuple[int, ...]] = {}
    with _archives(folder) as archives:
        for archive in archives:
            shapes |= {name: tuple(archive.get_slice(name).get_shape()) for name in archive.keys()}
    return shapes


def read_tensors(
    folder: Path,
    is_wanted: Callable[[str], bool],
    read: Callable[[str, Any], Tensor | None] = lambda name, stored: None,
) -> dict[str, Tensor]:
    """The tensors of a folder whose names are wanted. `read` may return a part of a tensor from its
    slice in the file, or None to read the whole tensor.

    Raises CheckpointError for a damaged file.
    """
    tensors: dict[str, Tensor] = {}
    with _archives(folder) as archives:
        for archive in archives:
            for name in filter(is_wanted, archive.keys()):
                part = read(name, archive.get_slice(name))
                tensors[name] = archive.get_tensor(name) if part is None else part
    return tensors


@contextmanager
def _archives(folder: Path) -> Iterator[Iterator[Any]]:
    """The opened files of a folder; within it, errors in them become a CheckpointError."""
    try:
        yield _opened(folder)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error


def _opened(folder: Path) -> Iterator[Any]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as archive:
            yield archive


HF_FILES = "hf"
"""The subfolder of a generated folder with the configuration of its transformers model."""


def has_configuration(folder: Path) -> bool:
    """True if a generated folder has a Hugging Face configuration."""
    return (folder / HF_FILES / "config.json").is_file()


def check_exportable(folder: Path, target: str) -> None:
    """Raises DataError unless the generated folder holds a Hugging Face configuration."""
    if not has_configuration(folder):
        raise DataError(
            f"--export-hf {target}: {folder} was not made from a transformers model.",
            "Omit the option: the run's weights/ has the weights under the original names.",
        )


def write_weights(
    folder: Path,
    plan: Plan,
    states: Mapping[int, Mapping[str, Tensor]],
    unused: Mapping[str, Tensor],
    world: World,
) -> None:
    """Writes every stage's tensors as one shard, tied ones once, and the index.

    All ranks call it, each with the states of the stages that it writes; `folder` is the same on
    all. `unused` are the tensors of the original model that no stage reads; stage 0 writes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stages = len(plan.stages)
    written = 0
    for index, own_state in states.items():
        state = {**unused, **own_state}
        own = {name: state[name] for name in own_names(plan, index) if name in state}
        write_shard(folder, own, index, stages)
        written += tensor_bytes(own.values())
    (total,) = world.sums([float(written)])
    if world.rank == 0:
        write_index(folder, names_by_stage(plan, unused), int(total))


def copy_configuration(target: Path, source: Path) -> None:
    """Copies the configuration files of the generated folder `source` to `target`.

    Raises CheckpointError for anything but a file: a link may lead to a private file.
    """
    for file in sorted((source / HF_FILES).iterdir()):
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(
                f"{file} is not a file, and only files are copied.",
                "Remove it, or partition the model again with --force.",
            )
        shutil.copy(file, target / file.name)


def names_by_stage(plan: Plan, unused: Collection[str]) -> list[list[str]]:
    """The names that each stage writes; `unused` are the tensors that no stage reads, if known."""
    names = [own_names(plan, index) for index in range(len(plan.stages))]
    names[0] = [name for name in names[0] if name not in plan.unused or name in unused]
    return names


def own_names(plan: Plan, index: int) -> list[str]:
    """The names in the original model's state_dict that a stage writes."""
    borrowed = {
        name
        for shared in plan.shared
        for name in (shared.names if shared.stages[0] != index else shared.names[1:])
    }
    keys = set(plan.state_keys) - borrowed
    stage = plan.stages[index]
    unused = plan.unused if index == 0 else ()
    return [name for name in (*stage.parameters, *stage.buffers, *unused) if name in keys]
