"""Trained stages -> safetensors under the original names, and a folder that transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from ..errors import DataError
from ..launching.world import World
from ..plan import Plan
from ..tensors import tensor_bytes, write_index, write_shard

HF_FILES = "hf"
"""In a generated folder: the configuration of the transformers model that it was made from."""


def check_exportable(folder: Path, target: str) -> None:
    """Raises DataError unless the generated folder holds a Hugging Face configuration."""
    if not (folder / HF_FILES / "config.json").is_file():
        raise DataError(
            f"--export-hf {target}: {folder} was not made from a transformers model.",
            "Leave it out: the run's weights/ folder holds the weights under the original names.",
        )


def write_weights(
    folder: Path,
    plan: Plan,
    modules: Mapping[int, nn.Module],
    unused: Mapping[str, Tensor],
    world: World,
) -> None:
    """Writes every stage's tensors as one shard, tied ones once, and the index.

    All ranks call it, each with its own stages; `folder` is the same on all. `unused` are the
    tensors of the original that no stage reads: they go with stage 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stages = len(plan.stages)
    written = 0
    for index, module in modules.items():
        state = {**unused, **module.state_dict()}
        own = {name: state[name] for name in own_names(plan, index) if name in state}
        write_shard(folder, own, index, stages)
        written += tensor_bytes(own.values())
    (total,) = world.sums([float(written)])
    if world.rank == 0:
        write_index(folder, names_by_stage(plan, unused), int(total))


def copy_configuration(target: Path, source: Path) -> None:
    """Copies the configuration files of the generated folder `source` to `target`."""
    for file in sorted((source / HF_FILES).iterdir()):
        shutil.copy(file, target / file.name)


def names_by_stage(plan: Plan, unused: Collection[str]) -> list[list[str]]:
    """What each stage writes; `unused` are the tensors that no stage reads, as far as they are
    known."""
    names = [own_names(plan, index) for index in range(len(plan.stages))]
    names[0] = [name for name in names[0] if name not in plan.unused or name in unused]
    return names


def own_names(plan: Plan, index: int) -> list[str]:
    """The names in the original's state_dict that this stage writes."""
    borrowed = {
        name
        for shared in plan.shared
        for name in (shared.names if shared.stages[0] != index else shared.names[1:])
    }
    keys = set(plan.state_keys) - borrowed
    stage = plan.stages[index]
    unused = plan.unused if index == 0 else ()
    return [name for name in (*stage.parameters, *stage.buffers, *unused) if name in keys]
