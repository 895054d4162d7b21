"""What one rank is between two steps <-> named tensors.

Names are those of the original model's parameters, so that ranks with other stages find what is
theirs. `weights` are what the training has come to, as a run writes them at its end; all else is
`state`:

    optimizer.<weight>.<key>                  what the optimizer keeps: momentum, moments, steps
    staleness.<method>.<part>.<weight>        what a staleness method keeps over a drain
    live.<weight>                             what it computes with, where that is something else
    shared.<weight>.<step>                    gradients of a tied weight that are applied later
    buffer.<copy>.<name>                      buffers that are in no state_dict; of a replica all
    random.<rank>.<generator>

Of a weight of several stages the first one says what there is. Under an asynchronous schedule the
others may keep something else, and say so under `<weight>@<stage>`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..launching.world import World
from ..loading import shared_names
from ..pipeline import Pipeline
from ..plan import Plan
from ..training.export import own_names
from ..training.optimizers import StageOptimizer
from .random_states import random_states, set_random_states

Tensors = Mapping[str, Tensor]
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Rank:
    """What of a rank is kept; the modules are the pipeline's."""

    plan: Plan
    world: World
    modules: Mapping[int, nn.Module]
    pipeline: Pipeline
    optimizers: Mapping[int, StageOptimizer]
    is_async: bool

    @property
    def device(self) -> torch.device:
        return self.pipeline.device

    def key_of(self, stage: int, name: str) -> str | None:
        """What a stage's parameter is kept under; None where another stage keeps it."""
        for shared in self.plan.shared:
            if (stage, name) in shared.holders and stage != shared.stages[0]:
                return f"{shared.names[0]}@{stage}" if self.is_async else None
        return shared_names(self.plan).get(name, (name,))[0]

    def is_first(self, stage: int, name: str) -> bool:
        """Whether no stage before this one holds the parameter."""
        holders = [one.holders for one in self.plan.shared if (stage, name) in one.holders]
        return all(stage == min(holder for holder, _ in each) for each in holders)

    def keys_of(self, stage: int, name: str, *, each_has_own: bool) -> Sequence[str]:
        """Where a stage looks for what is kept of its parameter: under any name that it has, or,
        where each of its holders has kept its own, under that."""
        own = self.key_of(stage, name)
        if each_has_own and own is not None:
            return (own,)
        return shared_names(self.plan).get(name, (name,))


@torch.no_grad()
def weights_of(rank: Rank, unused: Tensors) -> dict[int, dict[str, Tensor]]:
    """The weights and buffers that each stage of this rank writes, under original names, copied;
    none of a replica but the first. `unused` are those that no stage reads."""
    found = {}
    with rank.pipeline.settled():
        for stage, module in rank.modules.items() if rank.world.copy == 0 else ():
            state = {**unused, **module.state_dict()}
            names = own_names(rank.plan, stage)
            found[stage] = {name: _copied(state[name]) for name in names if name in state}
    return found


@torch.no_grad()
def state_of(rank: Rank) -> dict[str, Tensor]:
    """All else that this rank goes on from, copied."""
    found: dict[str, Tensor] = {}
    for name, state in random_states(rank.device).items():
        found[f"random.{rank.world.rank}.{name}"] = state
    copy = rank.world.copy
    for module in rank.modules.values():
        in_weights = module.state_dict().keys() if copy == 0 else ()
        for name, buffer in module.named_buffers():
            if name not in in_weights:
                found[f"buffer.{copy}.{name}"] = buffer
    if rank.world.copy == 0:
        found |= dict(_kept_of_weights(rank))
        for (name, step), summed in rank.pipeline.shared.state().items():
            found[f"shared.{name}.{step}"] = summed
    return {name: _copied(tensor) for name, tensor in found.items()}


def _kept_of_weights(rank: Rank) -> Iterator[tuple[str, Tensor]]:
    for stage, module in rank.modules.items():
        binder, optimizer = rank.pipeline.binders[stage], rank.optimizers[stage]
        of_methods = binder.state()
        for name, parameter in module.named_parameters():
            if (key := rank.key_of(stage, name)) is None:
                continue
            for part, tensor in optimizer.state_of(parameter).items():
                yield f"optimizer.{key}.{part}", tensor
            if binder.has_settled or "@" in key:
                yield f"live.{key}", parameter
            for part, tensors in of_methods.items():
                if name in tensors:
                    yield f"staleness.{part}.{key}", tensors[name]


class Wanted:
    """Which names of a checkpoint's `state` a rank reads."""

    def __init__(self, rank: Rank) -> None:
        known = {name for m in rank.modules.values() for name, _ in m.named_parameters()}
        names = known | {first for name in known for first in shared_names(rank.plan).get(name, ())}
        self._names = names
        self._random = f"random.{rank.world.rank}."
        self._buffers = {name for m in rank.modules.values() for name, _ in m.named_buffers()}
        self._copies = {"0", str(rank.world.copy)}

    def __call__(self, key: str) -> bool:
        kind, _, rest = key.partition(".")
        match kind:
            case "optimizer" | "shared":
                return rest.rpartition(".")[0].partition("@")[0] in self._names
            case "live":
                return rest.partition("@")[0] in self._names
            case "staleness":
                return _weight_of(rest).partition("@")[0] in self._names
            case "buffer":
                copy, _, name = rest.partition(".")
                return copy in self._copies and name in self._buffers
        return key.startswith(self._random)


@torch.no_grad()
def put(rank: Rank, state: Tensors, step: int, *, each_has_own: bool) -> None:
    """Lets a rank, whose weights are those of the checkpoint already, go on after a step.

    What is not in `state` stays as it is in a new run. `each_has_own` says that the checkpoint is
    of an asynchronous run of the same stages.
    """
    world = rank.world
    for stage, module in rank.modules.items():
        rank.pipeline.set_version(stage, step)
        for name, buffer in module.named_buffers():
            for copy in (world.copy, 0):
                if (kept := state.get(f"buffer.{copy}.{name}")) is not None:
                    buffer.copy_(kept)
                    break
    _put_of_weights(rank, state, step, each_has_own)
    _put_pending(rank, state)
    own = f"random.{world.rank}."
    states = {key.removeprefix(own): state[key] for key in state if key.startswith(own)}
    if states:
        set_random_states(states, rank.device)


def _put_pending(rank: Rank, state: Tensors) -> None:
    """Gradients of tied weights that were still to be applied. Where the weight is not exchanged
    any more, the first step adds its own to them: of all its holders and copies the first one's."""
    sums = {
        (name, int(text)): tensor
        for key, tensor in state.items()
        if key.startswith("shared.")
        for name, _, text in [key.removeprefix("shared.").rpartition(".")]
    }
    rank.pipeline.shared.load(sums)
    for stage, module in rank.modules.items() if rank.world.copy == 0 else ():
        for name, parameter in module.named_parameters():
            names = shared_names(rank.plan).get(name, (name,))
            if names[0] in rank.pipeline.shared.specs or not rank.is_first(stage, name):
                continue
            for _, summed in sorted(each for each in sums.items() if each[0][0] in names):
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
        kept: dict[Tensor, Tensors] = {
            own[name]: states[0] for name in own if (states := _first(of_optimizer, keys[name]))
        }
        rank.optimizers[stage].load(kept, step)
        parts = {
            part: {
                name: found[0].to(own[name].device, copy=True)
                for name in own
                if (found := _first(tensors, keys[name]))
            }
            for part, tensors in of_methods.items()
        }
        rank.pipeline.binders[stage].load({part: of for part, of in parts.items() if of})


def _first(kept: Mapping[str, Kept], keys: Sequence[str]) -> list[Kept]:
    """What is kept under the first of the keys that there is; nothing if there is none."""
    return [kept[key] for key in keys if key in kept][:1]


def _weight_of(rest: str) -> str:
    """`<method>.<part>.<weight>` -> the weight, whose name has dots too."""
    return rest.split(".", 2)[-1]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
