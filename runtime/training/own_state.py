"""The state of a pipeline in a user's loop <-> a folder: weights, optimizer, generators, counts.

weights/       safetensors under the original model's names, as a run writes them
state/         what `checkpoint.contents` names
loop.json      the number of steps, and what the loop has added
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.contents import PROBE, Rank, Wanted, put, state_of
from ..checkpoint.folders import LOOP_FACTS, STATE, WEIGHTS, CheckpointError, unfinished
from ..checkpoint.storage import read_tensors, write_tensors, write_weights
from ..distributed.process_groups import World, gather_alike
from ..executor.loading import fill_stage
from ..serialization import Origin, parse_json, read_text
from ..tensor_files import dtype_of, host_copy

_LONGEST = 128
"""The bytes of the name of an optimizer."""


def full_state(rank: Rank, unused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the weights and buffers of all ranks on rank 0, in the order of the original's
    state_dict; tied ones under every name. `unused` are those that no stage reads. Collective."""
    plan, world = rank.plan, rank.world
    with rank.written_states() as states:
        tensors = {
            name: host_copy(tensor)
            for own in (unused, *states.values())
            for name, tensor in own.items()
        }
    if world.control is not None:
        tensors = _gathered(tensors, world)
    if world.rank != 0:
        return {}
    for shared in plan.shared:
        first = next((tensors[name] for name in shared.names if name in tensors), None)
        if first is not None:
            tensors |= dict.fromkeys(shared.names, first)
    return {name: tensors[name] for name in plan.state_keys if name in tensors}


def _gathered(own: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    heads = [[name, str(value.dtype), list(value.shape)] for name, value in own.items()]
    content = json.dumps(heads).encode()
    lengths = world.gathered(len(content).to_bytes(8, "big"))
    longest = max(int.from_bytes(length, "big") for length in lengths)
    texts = gather_alike(content.ljust(longest), world.ranks, world.control)
    tensors = dict(own) if world.rank == 0 else {}
    for rank in range(1, world.ranks):
        if world.rank == rank:
            for tensor in own.values():
                dist.send(_raw(tensor), 0, group=world.control)
        elif world.rank == 0:
            for name, dtype, shape in json.loads(texts[rank]):
                tensor = torch.empty(shape, dtype=dtype_of(dtype.removeprefix("torch.")))
                dist.recv(_raw(tensor), rank, group=world.control)
                tensors[name] = tensor
    return tensors


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def save_own(
    folder: Path, rank: Rank, unused: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Writes the state of all ranks to a new folder, whole or not at all. Collective.

    Raises CheckpointError, on all ranks, where the folder exists already.
    """
    world = rank.world
    if any(answer == b"1" for answer in world.gathered(b"1" if folder.exists() else b"0")):
        raise CheckpointError(f"{folder} exists already.", "Give the name of a new folder.")
    target = unfinished(folder)
    if world.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        (target / STATE).mkdir(parents=True)
        (target / LOOP_FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    world.meet()
    with rank.written_states() as states:
        write_weights(target / WEIGHTS, rank.plan, states, unused, world)
    write_tensors(target / STATE, state_of(rank), lambda name: f"rank-{world.rank:05}.safetensors")
    world.meet()
    if world.rank == 0:
        target.rename(folder)
    world.meet()


def load_own(folder: Path, rank: Rank) -> dict[str, Any]:
    """Restores what `save_own` wrote; returns its facts. Collective.

    Raises CheckpointError for a folder that is not whole or does not fit this model and optimizer.
    """
    origin = Origin(str(folder / LOOP_FACTS), CheckpointError, "Give a folder that save() wrote.")
    facts = parse_json(read_text(folder / LOOP_FACTS, origin), origin, finite=False)
    now = loop_facts(rank, 0, 0, None)
    if not isinstance(facts, dict) or not now.keys() <= facts.keys():
        raise CheckpointError(f"{folder} is not a saved pipeline.", "Give one that save() wrote.")
    if now["optimizer"] not in (None, facts["optimizer"]):
        raise CheckpointError(
            f"{folder} has the state of {facts['optimizer']}, and the optimizer is "
            f"{now['optimizer']}.",
            "Load it with an optimizer of that class, or without one for the weights alone.",
        )
    wanted = Wanted(rank)
    has_optimizer = now["optimizer"] is not None
    state = read_tensors(
        folder / STATE,
        lambda key: wanted(key) and (has_optimizer or not key.startswith("optimizer.")),
        wanted.read,
    )
    for module in rank.modules.values():
        fill_stage(module, folder / WEIGHTS, rank.plan, rank.tensor_ranks)
    is_alike = all(facts[name] == now[name] for name in ("stages", "asynchronous"))
    try:
        put(rank, state, facts["steps"], each_has_own=is_alike and rank.is_async)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} does not fit this pipeline: {type(error).__name__}: {error}",
            "Load it without an optimizer for the weights alone.",
        ) from error
    kept = {key.partition("."): tensor for key, tensor in state.items()}
    probe = {name: tensor for (kind, _, name), tensor in kept.items() if kind == PROBE}
    rank.world.meet()  # The folder may be removed as soon as `load` has returned anywhere.
    return facts | {PROBE: probe}


def loop_facts(rank: Rank, steps: int, micro_batches: int, extra: Any) -> dict[str, Any]:
    """The facts of a saved pipeline, in addition to its tensors. Collective: a rank on which
    nothing trains has no optimizer."""
    own = {type(each.optimizer).__name__ for each in rank.optimizers.values() if each.optimizer}
    names = rank.world.gathered("".join(own).encode()[:_LONGEST].ljust(_LONGEST))
    optimizers = [text for name in names if (text := name.decode(errors="replace").strip())]
    return {
        "steps": steps,
        "micro_batches": micro_batches,
        "stages": len(rank.plan.stages),
        "asynchronous": rank.is_async,
        "optimizer": optimizers[0] if optimizers else None,
        "extra": extra,
    }
