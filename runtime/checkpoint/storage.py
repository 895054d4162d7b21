"""Named tensors <-> safetensors files, by torch.distributed.checkpoint (DCP).

DCP's own storage keeps its metadata as a pickle, which can run code when it is read. These files
are safetensors only: their headers have names, shapes and dtypes, from which DCP's reader for the
Hugging Face format builds the metadata. So `torch.distributed.checkpoint.load`, and anything
that reads safetensors, can open a folder written here.

DCP gathers all ranks' plans to decide who writes which part of a sharded tensor. A stage's tensors
are whole and belong to it alone, so every rank is its own coordinator: no communication is
needed, and a thread can write while the ranks train.

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
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..distributed.process_groups import World
from ..errors import DataError
from ..plan.plan import Plan
from ..tensor_files import tensor_bytes, write_index, write_shard
from .folders import CheckpointError


class SafetensorsWriter(StorageWriter):
    """Writes each tensor to the file of `folder` that `file_of` names."""

    def __init__(self, folder: Path, file_of: Callable[[str], str]) -> None:
        self._folder, self._file_of = folder, file_of

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Does nothing: the folder is fixed."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_file: dict[str, dict[str, Tensor]] = defaultdict(dict)
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is not a tensor"
            file = self._file_of(item.index.fqn)
            by_file[file][item.index.fqn] = tensor.detach().contiguous()
            results.append(WriteResult(item.index, tensor.nbytes, file))
        for file, tensors in by_file.items():
            save_file(tensors, self._folder / file, metadata={"format": "pt"})
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the files' headers are the metadata."""


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], file_of: Callable[[str], str]
) -> list[Path]:
    """Writes this rank's tensors; returns the files. Raises OSError."""
    if not tensors:
        return []
    writer = SafetensorsWriter(folder, file_of)
    writer.set_up_storage_writer(is_coordinator=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    try:
        results = writer.write_data(planner.finish_plan(plans[0]), planner).wait()
    except SafetensorError as error:
        # The message is the only place that has the system's error number.
        number = re.search(r"os error (\d+)", str(error))
        arguments = (int(number[1]), os.strerror(int(number[1]))) if number else (str(error),)
        raise OSError(*arguments) from error
    writer.finish(metadata, [results])
    return sorted({folder / file_of(name) for name in tensors})


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a folder, by name. Raises CheckpointError for a damaged file."""
    with _reading(folder):
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: tuple(tensor.size)
        for name, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


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
    with _reading(folder):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as archive:
                for name in filter(is_wanted, archive.keys()):
                    part = read(name, archive.get_slice(name))
                    tensors[name] = archive.get_tensor(name) if part is None else part
    return tensors


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Within it, errors in a folder's files become a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error


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
