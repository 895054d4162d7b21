"""Named tensors <-> safetensors files, by torch.distributed.checkpoint (DCP).

DCP's own storage keeps its metadata as a pickle, which runs code when it is read. Here there is
nothing but safetensors files: their headers have names, shapes and dtypes, and DCP's reader of
Hugging Face's format makes the metadata of them. So `torch.distributed.checkpoint.load` opens a
folder that was written here, and so does everything that reads safetensors.

DCP gathers all ranks' plans, to see who writes what of a tensor that is on several. A stage's
tensors are its own and whole, so every rank is its own coordinator: nothing is agreed on, and a
thread can write while the ranks train.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .folders import CheckpointError


class SafetensorsWriter(StorageWriter):
    """Writes each tensor to the file of `folder` that `file_of` names."""

    def __init__(self, folder: Path, file_of: Callable[[str], str]) -> None:
        self._folder, self._file_of = folder, file_of

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """It writes where it was made for."""

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
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
            file = self._file_of(item.index.fqn)
            by_file[file][item.index.fqn] = tensor.detach().contiguous()
            results.append(WriteResult(item.index, tensor.nbytes, file))
        for file, tensors in by_file.items():
            save_file(tensors, self._folder / file, metadata={"format": "pt"})
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The headers of the files are the metadata."""


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], file_of: Callable[[str], str]
) -> list[Path]:
    """Writes what this rank has; the files that there are then. Raises OSError."""
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
        # It has the system's number in its words alone.
        number = re.search(r"os error (\d+)", str(error))
        what = (int(number[1]), os.strerror(int(number[1]))) if number else (str(error),)
        raise OSError(*what) from error
    writer.finish(metadata, [results])
    return sorted({folder / file_of(name) for name in tensors})


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a folder, by name. Raises CheckpointError as `read_tensors`."""
    with _telling(folder):
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: tuple(one.size)
        for name, one in stored.items()
        if isinstance(one, TensorStorageMetadata)
    }


def read_tensors(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a folder whose names are wanted, each read by itself.

    Raises CheckpointError where a file is damaged.
    """
    reader = HuggingFaceStorageReader(str(folder))
    with _telling(folder):
        metadata = reader.read_metadata()
        found: dict[str, Any] = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and is_wanted(name)
        }
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(found, metadata, is_coordinator=True)
        plan = planner.create_global_plan([planner.create_local_plan()])[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()
    return found


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """Within, what is wrong with a folder's files is told as a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
