"""The state of one rank after a step <-> named tensors.

Names are those of the original model's parameters, so that ranks with other stages can find theirs.
`weights` are the trained weights, as a run writes them at its end; the rest is `state`:

    optimizer.<weight>.<key>                  optimizer state: momentum, moments, steps
    staleness.<method>.<part>.<weight>        state that a staleness method keeps over a drain
    live.<weight>                             the weights in use, where these differ from `weights`
    shared.<weight>.<step>                    gradients of a tied weight that are applied later,
                                              summed over replicas
    probe.<input>                             the micro-batch of a loop of the user's own for which
                                              `--freeze plasticity` compares the outputs of blocks
    buffer.<copy>.<name>                      buffers that are in no state_dict; of a replica all
    random.<rank>.<generator>                 random number generators, by the number that the rank
                                              would have without tensor ranks

The first stage that holds a tied weight writes its state. Under an asynchronous schedule, the other
holders may have different state and write it under `<weight>@<stage>`.

Where tensor ranks have parts of a weight, the first of them gathers and writes whole tensors, and a
rank reads its parts of these; one that steps a weight as a whole writes and reads its state.

Dropout needs no generator state: its numbers follow from the seed and the number of the
micro-batch. The generators of torch, Python, NumPy and CUDA serve user code in data and criteria.

To find a checkpoint to resume from, every rank verifies its part of the files, and all ranks gather
the results, so that they choose the same checkpoint.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..distributed.process_groups import World
from ..distributed.tensor_group import whole, whole_state
from ..executor.executor import Executor
from ..executor.loading import shared_names
from ..plan.plan import Plan
from ..tensor_files import host_copy
from ..tensor_parallel.ranks import Split, TensorRanks, split_of
from .folders import CheckpointError, Facts, damage_of, read_facts
from .storage import own_names

if TYPE_CHECKING:
    from ..training.stage_optimizer import StageSteps
    from .hand_over import HandOver

PROBE = "probe"
_PYTHON_VERSION = 3
"""The version of the state that `random.getstate` returns."""


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators of torch, Python and NumPy, and of CUDA if `device` is a GPU."""
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    own = np.random.get_state(legacy=False)
    assert isinstance(own, dict)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(own["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([own["state"]["pos"], own["has_gauss"]]),
        "numpy_gauss": torch.tensor(own["gauss"], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    gauss = next(iter(states["python_gauss"].tolist()), None)
    random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), gauss))
    position, has_gauss = states["numpy_position"].tolist()
    key = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(states["numpy_gauss"])))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


Tensors = Mapping[str, Tensor]
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Rank:
    """The parts of a rank whose state is written; `modules` are those of the executor, and `probe`
    has the tensors of that name, the same on all ranks."""

    plan: Plan
    world: World
    modules: Mapping[int, nn.Module]
    executor: Executor
    optimizers: Mapping[int, StageSteps]
    is_async: bool
    probe: Tensors = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.executor.device

    @property
    def tensor_ranks(self) -> TensorRanks:
        """This rank among those that have parts of the same weights."""
        return TensorRanks(self.world.tensor_rank, self.world.tensor_ranks)

    @property
    def number(self) -> int:
        """The number of this rank without tensor ranks."""
        return self.world.rank // self.world.tensor_ranks

    @contextmanager
    def written_states(self) -> Iterator[dict[int, dict[str, Tensor]]]:
        """Inside, the weights and buffers of the stages that this rank writes, as they are
        evaluated. Collective among tensor ranks."""
        modules = self.modules if self.world.copy == 0 else {}
        with torch.no_grad(), self.executor.eval_weights():
            states = {stage: whole_state(each, self.world) for stage, each in modules.items()}
            yield states if self.world.is_writer else {}

    def key_of(self, stage: int, name: str) -> str | None:
        """The key of a stage's parameter; None where another stage writes it."""
        for shared in self.plan.shared:
            if (stage, name) in shared.holders and stage != shared.stages[0]:
                return f"{shared.names[0]}@{stage}" if self.is_async else None
        return shared_names(self.plan).get(name, (name,))[0]

    def is_first(self, stage: int, name: str) -> bool:
        """True if no earlier stage holds the parameter."""
        holders = [shared.holders for shared in self.plan.shared if (stage, name) in shared.holders]
        return all(stage == min(holder for holder, _ in of_parameter) for of_parameter in holders)

    def keys_of(self, stage: int, name: str, *, each_has_own: bool) -> Sequence[str]:
        """The keys under which a stage looks up the state of its parameter: all names of the
        parameter, or the stage's own key if each holder has written its own state."""
        own = self.key_of(stage, name)
        if each_has_own and own is not None:
            return (own,)
        return shared_names(self.plan).get(name, (name,))


@torch.no_grad()
def weights_of(rank: Rank, unused: Tensors) -> dict[int, dict[str, Tensor]]:
    """Copies of the weights and buffers that each stage of this rank writes, under original names.
    `unused` are those that no stage reads. Collective among tensor ranks."""
    weights = {}
    with rank.written_states() as states:
        for stage, own in states.items():
            state, names = {**unused, **own}, own_names(rank.plan, stage)
            weights[stage] = {name: host_copy(state[name]) for name in names if name in state}
    return weights


@torch.no_grad()
def state_of(rank: Rank) -> dict[str, Tensor]:
    """Copies of all other state that this rank writes. Collective among replicas and tensor
    ranks."""
    tensors: dict[str, Tensor] = {}
    for name, state in random_states(rank.device).items():
        tensors[f"random.{rank.number}.{name}"] = state
    copy = rank.world.copy
    parts: list[tuple[str, Tensor, Split | None]] = []
    for module in rank.modules.values():
        in_weights = module.state_dict().keys() if copy == 0 else ()
        for name, buffer in module.named_buffers():
            if name not in in_weights:
                parts.append((f"buffer.{copy}.{name}", buffer, split_of(buffer)))
    known = _parts(rank)
    pending = [
        (
            f"shared.{name}.{step}",
            rank.world.sum_of_copies(summed),
            split_of(known[name]) if name in known else None,
        )
        for (name, step), summed in rank.executor.shared.state().items()
    ]
    parts += _kept_of_weights(rank)
    if copy == 0:
        parts += pending
    for key, part, split in parts:
        if (value := whole(part, split, rank.world)) is not None:
            tensors[key] = value
    if rank.world.rank == 0:
        tensors |= {f"{PROBE}.{name}": value for name, value in rank.probe.items()}
    if rank.world.tensor_rank > 0:
        tensors = {}
    tensors |= {key: tensor for key, _, tensor in _of_optimizers(rank, as_wholes=True)}
    return {name: host_copy(tensor) for name, tensor in tensors.items()}


def _parts(rank: Rank) -> dict[str, Tensor]:
    """The parameters and buffers that are split, by all their names."""
    names = shared_names(rank.plan)
    tensors = chain.from_iterable(
        (*module.named_parameters(), *module.named_buffers()) for module in rank.modules.values()
    )
    return {
        other: tensor
        for name, tensor in tensors
        if split_of(tensor) is not None
        for other in names.get(name, (name,))
    }


def _kept_of_weights(rank: Rank) -> Iterator[tuple[str, Tensor, Split | None]]:
    """Key, tensor and split of what is kept of each weight: tensors in its shape are parts as it
    is, and others are the same on all tensor ranks."""
    kept = _kept_by_weight(rank) if rank.world.copy == 0 else ()
    for key, parameter, tensor in chain(_of_optimizers(rank, as_wholes=False), kept):
        yield key, tensor, split_of(parameter) if tensor.shape == parameter.shape else None


def _of_optimizers(rank: Rank, *, as_wholes: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The optimizer's state of the parameters that this replica owns; without owners, the first
    replica's. Of those that a tensor rank steps as wholes, or of the others."""
    for stage, module in rank.modules.items():
        optimizer = rank.optimizers[stage]
        for name, parameter in module.named_parameters():
            is_own = optimizer.shards.owner(parameter) == rank.world.copy
            is_own &= (parameter in optimizer.matrices.owners) == as_wholes
            if is_own and (key := rank.key_of(stage, name)) is not None:
                for part, tensor in optimizer.state_of(parameter).items():
                    yield f"optimizer.{key}.{part}", parameter, tensor


def _kept_by_weight(rank: Rank) -> Iterator[tuple[str, Tensor, Tensor]]:
    for stage, module in rank.modules.items():
        binder = rank.executor.binders[stage]
        of_methods = binder.state()
        for name, parameter in module.named_parameters():
            if (key := rank.key_of(stage, name)) is None:
                continue
            if binder.has_eval_weights or "@" in key:
                yield f"live.{key}", parameter, parameter
            for part, tensors in of_methods.items():
                if name in tensors:
                    yield f"staleness.{part}.{key}", parameter, tensors[name]


class Wanted:
    """Selects the names of a checkpoint's `state` that a rank reads, and the parts of them."""

    def __init__(self, rank: Rank) -> None:
        weights = [
            (name, parameter, rank.optimizers[stage])
            for stage, module in rank.modules.items()
            for name, parameter in module.named_parameters()
        ]
        of_replica = (weight for weight in weights if weight[2].shards.owns(weight[1]))
        own = (name for name, each, steps in of_replica if steps.matrices.steps(each))
        wholes = (name for name, each, steps in weights if each in steps.matrices.owners)
        names = (name for name, *_ in weights), own, wholes
        self._names, self._own, self._wholes = (_with_other_names(n, rank.plan) for n in names)
        self._random = f"random.{rank.number}."
        self._ranks, self._parts = rank.tensor_ranks, _parts(rank)
        self._buffers = {name for m in rank.modules.values() for name, _ in m.named_buffers()}
        self._copies = {"0", str(rank.world.copy)}

    def __call__(self, key: str) -> bool:
        kind, _, rest = key.partition(".")
        if kind == "buffer":
            return rest.partition(".")[0] in self._copies and _name_in(key) in self._buffers
        if kind == "optimizer":
            return _name_in(key) in self._own
        if kind in ("shared", "live", "staleness"):
            return _name_in(key) in self._names
        return kind == PROBE or key.startswith(self._random)

    def read(self, key: str, stored: Any) -> Tensor | None:
        """This rank's part of a tensor in a file (a slice of `safetensors`) that is kept of a split
        weight; None for others, which it reads whole."""
        if key.startswith("optimizer.") and _name_in(key) in self._wholes:
            return None
        ranks, part = self._ranks, self._parts.get(_name_in(key))
        split = None if part is None or ranks.size == 1 else split_of(part)
        if part is None or split is None:
            return None
        is_of_shape = tuple(stored.get_shape()) == split.whole_shape(part.shape, ranks.size)
        return split.read(stored, ranks.rank, ranks.size) if is_of_shape else None


def _with_other_names(names: Iterable[str], plan: Plan) -> set[str]:
    known, shared = set(names), shared_names(plan)
    return known | {first for name in known for first in shared.get(name, ())}


@torch.no_grad()
def put(rank: Rank, state: Tensors, step: int, *, each_has_own: bool) -> None:
    """Restores the state after a step on a rank that already has the checkpoint's weights.

    Anything that is missing in `state` stays as in a new run. `each_has_own` says that the
    checkpoint comes from an asynchronous run of the same stages.
    """
    world = rank.world
    for stage, module in rank.modules.items():
        rank.executor.set_version(stage, step)
        for name, buffer in module.named_buffers():
            for copy in (world.copy, 0):
                if (saved := state.get(f"buffer.{copy}.{name}")) is not None:
                    buffer.copy_(saved)
                    break
    _put_of_weights(rank, state, step, each_has_own)
    _put_pending(rank, state)
    own = f"random.{rank.number}."
    states = {key.removeprefix(own): state[key] for key in state if key.startswith(own)}
    if states:
        set_random_states(states, rank.device)


def _put_pending(rank: Rank, state: Tensors) -> None:
    """Restores gradients of tied weights that were still to be applied, on the first replica. If
    the weight is no longer exchanged, the first step adds its own gradients to them, on the first
    of all its holders."""
    if rank.world.copy > 0:
        return
    sums = {
        (name, int(text)): tensor
        for key, tensor in state.items()
        if key.startswith("shared.")
        for name, _, text in [key.removeprefix("shared.").rpartition(".")]
    }
    rank.executor.shared.load(sums)
    for stage, module in rank.modules.items():
        for name, parameter in module.named_parameters():
            names = shared_names(rank.plan).get(name, (name,))
            if names[0] in rank.executor.shared.specs or not rank.is_first(stage, name):
                continue
            for _, summed in sorted(item for item in sums.items() if item[0][0] in names):
                own = parameter.grad
                new = summed.to(parameter.device, copy=True)
                parameter.grad = new if own is None else own + new


def _put_of_weights(rank: Rank, state: Tensors, step: int, each_has_own: bool) -> None:
    of_optimizer: dict[str, dict[str, Tensor]] = defaultdict(dict)
    of_methods: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in state.items():
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            weight, _, part = rest.rpartition(".")
            of_optimizer[weight][part] = tensor
        elif kind == "staleness":
            weight = _weight_of(rest)
            of_methods[rest.removesuffix(f".{weight}")][weight] = tensor
    for stage, module in rank.modules.items():
        own = dict(module.named_parameters())
        keys = {name: rank.keys_of(stage, name, each_has_own=each_has_own) for name in own}
        for name, parameter in own.items():
            if live := _first(state, [f"live.{key}" for key in keys[name]]):
                parameter.copy_(live[0])
        saved: dict[Tensor, Tensors] = {
            own[name]: states[0] for name in own if (states := _first(of_optimizer, keys[name]))
        }
        rank.optimizers[stage].load(saved, step)
        parts = {
            part: {
                name: copies[0].to(own[name].device, copy=True)
                for name in own
                if (copies := _first(tensors, keys[name]))
            }
            for part, tensors in of_methods.items()
        }
        rank.executor.binders[stage].load({part: of for part, of in parts.items() if of})


def _first(candidates: Mapping[str, Kept], keys: Sequence[str]) -> list[Kept]:
    """The state under the first key that exists, as a list; empty if there is none."""
    return [candidates[key] for key in keys if key in candidates][:1]


def _name_in(key: str) -> str:
    """The name of the weight or buffer in a key of `state`; "" if it has none."""
    kind, _, rest = key.partition(".")
    match kind:
        case "optimizer" | "shared":
            return rest.rpartition(".")[0].partition("@")[0]
        case "live":
            return rest.partition("@")[0]
        case "staleness":
            return _weight_of(rest).partition("@")[0]
        case "buffer":
            return rest.partition(".")[2]
    return ""


def _weight_of(rest: str) -> str:
    """`<method>.<part>.<weight>` -> the weight, whose name may contain dots."""
    return rest.split(".", 2)[-1]


_LONGEST = 256


@dataclass(frozen=True)
class FoundCheckpoint:
    """An intact checkpoint and its metadata.

    path: its folder.
    held: the state in memory; None if it is in the folder.
    """

    path: Path
    facts: Facts
    held: HandOver | None = None


def first_good(
    candidates: Sequence[Path], world: World, *, may_skip: bool
) -> tuple[FoundCheckpoint | None, list[str]]:
    """The first intact checkpoint among the candidates of rank 0, and a message about each damaged
    one. Collective.

    Raises CheckpointError, on all ranks, when all are damaged, or when one is and none may be
    skipped.
    """
    text = world.text_of_first(json.dumps([str(path) for path in candidates]))
    skipped: list[str] = []
    for path in map(Path, json.loads(text)):
        damage = damage_of(path, part=world.rank, parts=world.ranks)
        answers = world.gathered(damage.encode()[:_LONGEST].ljust(_LONGEST))
        damages = [answer.decode(errors="replace").strip() for answer in answers]
        if not any(damages):
            return FoundCheckpoint(path, read_facts(path)), skipped
        skipped.append(f"{path} is damaged: {next(filter(None, damages))}.")
        if not may_skip:
            raise CheckpointError(skipped[0], f"--resume {path.parent.parent} takes the newest.")
    if skipped:
        raise CheckpointError(
            f"all checkpoints are damaged. {' '.join(skipped)}",
            "Choose another --output to start a new run.",
        )
    return None, []
