"""A run, a checkpoint, a saved pipeline or a generated folder -> its weights, and their export.

Nothing of the generated folder runs, and no process starts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.option_files import read_config
from ..errors import DataError
from ..executor.loading import shared_names
from ..plan.plan import Plan, read_plan
from ..tensor_files import check_weights, read_tensors, tensor_bytes, write_index, write_shard
from .folders import (
    LOOP_FACTS,
    WEIGHTS,
    CheckpointError,
    checkpoints_in,
    damage_of,
    is_checkpoint,
    read_facts,
)
from .resuming import CONFIGURATION
from .storage import copy_configuration, has_configuration, names_by_stage


@dataclass(frozen=True)
class TrainedWeights:
    """Weights, and the generated folder of their model.

    folder: the generated folder.
    weights: the folder of the weights.
    options: the options of the run that trained them; empty for others.
    """

    folder: Path
    weights: Path
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """An export.

    folder: the written folder.
    weights: the folder of the weights that were read.
    tensors: the number of tensors.
    bytes: their size.
    """

    folder: Path
    weights: Path
    tensors: int
    bytes: int


def find_trained(source: Path, folder: Path | None = None) -> TrainedWeights:
    """The weights of a run (of its end, or of its newest checkpoint if it is in progress), a
    checkpoint, a pipeline that `Pipeline.save` wrote, or a generated folder.

    folder: the generated folder, where it is not the one that the run names.

    Raises CheckpointError where there are none.
    """
    if (source / "plan.json").is_file():
        return _checked(TrainedWeights(folder or source, source / WEIGHTS), source)
    if is_checkpoint(source):
        options = dict(read_facts(source).settings)
        return _of_run(source, source / WEIGHTS, options, folder)
    if (source / CONFIGURATION).is_file():
        options = read_config(source / CONFIGURATION)
        newest = [source, *checkpoints_in(source)]
        holder = next((path for path in newest if (path / WEIGHTS).is_dir()), source)
        return _of_run(source, holder / WEIGHTS, options, folder)
    if (source / LOOP_FACTS).is_file():
        return _of_run(source, source / WEIGHTS, {}, folder)
    problem = "is not a run, a checkpoint, a saved pipeline or a generated folder"
    raise CheckpointError(
        f"{source} {problem if source.exists() else 'does not exist'}.",
        "Give for example runs/gpt2_4p/1, or a folder in its checkpoints/.",
    )


def _of_run(
    source: Path, weights: Path, options: dict[str, Any], folder: Path | None
) -> TrainedWeights:
    named = folder or options.get("folder")
    if named is None:
        raise CheckpointError(
            f"{source} does not name the generated folder of its model.",
            "Name it: --folder generated_models/gpt2_4p.",
        )
    if not (Path(named) / "plan.json").is_file():
        raise CheckpointError(
            f"{named}, the generated folder of {source}, is not here.",
            "Name its place: --folder generated_models/gpt2_4p.",
        )
    return _checked(TrainedWeights(Path(named), weights, options), source)


def _checked(trained: TrainedWeights, source: Path) -> TrainedWeights:
    if not trained.weights.is_dir():
        raise CheckpointError(
            f"{source} has no weights.",
            "A run writes them at its end and with each checkpoint: --save-every 100.",
        )
    holder = trained.weights.parent
    if is_checkpoint(holder) and (damage := damage_of(holder)):
        raise CheckpointError(f"{holder} is damaged: {damage}.", "Give another checkpoint.")
    check_weights(trained.weights)
    return trained


def export(
    source: Path, target: Path, *, folder: Path | None = None, force: bool = False
) -> Exported:
    """Writes weights and configuration as a folder that `from_pretrained` of transformers loads.

    source: a run or another place that `find_trained` accepts.
    target: the folder to write.
    folder: the generated folder, where it is not the one that the run names.
    force: the target may have files; those of its weights are replaced.

    Raises DataError for a model that is not of transformers and for weights of another model,
    CheckpointError for a target with files.
    """
    trained = find_trained(source, folder)
    if not has_configuration(trained.folder):
        raise DataError(
            f"{trained.folder} was not made from a transformers model.",
            f"{trained.weights} has the weights under the original names.",
        )
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file.", "Name a folder.")
    if not force and target.is_dir() and any(target.iterdir()):
        raise CheckpointError(
            f"{target} is not empty.", "Name another folder, or replace its weights with --force."
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as new:
            tensors, size = _write(Path(new), read_plan(trained.folder), trained)
            target.mkdir(exist_ok=True)
            for old in (*target.glob("model*.safetensors"), *target.glob("model*.index.json")):
                old.unlink()
            for file in Path(new).iterdir():
                os.replace(file, target / file.name)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}.") from error
    return Exported(target, trained.weights, tensors, size)


def _write(new: Path, plan: Plan, trained: TrainedWeights) -> tuple[int, int]:
    """Writes one shard a stage; returns the number of tensors and their bytes."""
    buffers = {name for stage in plan.stages for name in stage.buffers}
    optional = frozenset(buffers | {*plan.unused})
    shards, size = [], 0
    for index, names in enumerate(names_by_stage(plan, plan.unused)):
        own = read_tensors(trained.weights, names, shared_names(plan), optional=optional)
        write_shard(new, own, index, len(plan.stages))
        shards.append([name for name in names if name in own])
        size += tensor_bytes(own.values())
    write_index(new, shards, size)
    copy_configuration(new, trained.folder)
    return sum(map(len, shards)), size
