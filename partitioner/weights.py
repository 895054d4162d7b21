"""A model and its plan -> weight files: one shard a stage, as the runtime loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ..runtime.loading import CONSTANTS
from ..runtime.plan import Plan
from ..runtime.tensors import tensor_bytes, write_index, write_shard


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict as it is now, with copies of buffers, which a forward may change."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {
        name: value.clone() if name in buffers else value
        for name, value in model.state_dict().items()
    }


def write_weights_of(
    folder: Path, state: Mapping[str, Tensor], plan: Plan, constants: Mapping[str, Tensor]
) -> None:
    """One shard a stage, each tensor once, under its original name."""
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
