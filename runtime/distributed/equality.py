"""Weights on all ranks -> a check that replicas and tied parameters are still equal.

Replicas and the holders of a tied parameter start from the same bits and take the same steps, so
every bit stays equal; so do tensor ranks in the parameters that each of them has whole. A
difference means faulty hardware, library versions or processors that round differently, code that
is not deterministic, or an error of asyncpipe.

Both are compared completely at the start, then their parameters every `--check-replicas` steps.
Buffers that depend on data, such as batch norm's statistics, differ between replicas.
If the holders of a tied parameter differ, the evaluated model is not the saved one, so the run
reports it. Where single stages have replicas, all ranks of all holders sum the gradient of a tied
parameter together, in the order of the plan, which is the same on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from ..config.settings import RunConfig
from ..errors import AsyncPipeError
from ..plan.plan import Plan
from ..tensor_files import raw_bytes
from ..tensor_parallel.ranks import split_of
from .process_groups import World, gather_alike

_DIGEST_BYTES = 16


class ReplicaError(AsyncPipeError):
    """Replicas are not equal."""


class Equality:
    """Compares this rank's stages with those of its replicas and tensor ranks, and the tied
    parameters it holds.

    The constructor compares everything. It and `check` are collective and raise ReplicaError, the
    same on all replicas.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        config: RunConfig,
        world: World,
        tied_parameters: Iterable[TiedParameter] = (),
    ) -> None:
        self._modules, self._config, self._world = modules, config, world
        self._compare(_named(modules, with_buffers=True), "at the start")
        for tied in tied_parameters:
            digests = gather_alike(_digest(tied.parameter), len(tied.ranks), tied.group)
            names = [f"{tied.name}, a parameter of several stages"]
            _check(tied.ranks, digests, names, "at the start")

    def check(self, step: int, stage: int | None = None) -> None:
        """Compares the parameters, of one stage if it steps alone, if a comparison is due after
        this step."""
        every = self._config.check_replicas
        if every and step % every == 0:
            modules = self._modules if stage is None else {stage: self._modules[stage]}
            self._compare(_named(modules, with_buffers=False), f"after step {step}")

    def _compare(self, tensors: Iterable[tuple[str, Tensor]], when: str) -> None:
        grid, rank = self._world.grid, self._world.rank
        groups = (
            (self._world.data_parallel_group, grid.copies_of(rank), "replicas"),
            (self._world.tensor_group, grid.tensor_group_of(rank), "tensor ranks"),
        )
        if all(group is None for group, _, _ in groups):
            return
        digests = {(name, split_of(tensor) is None): _digest(tensor) for name, tensor in tensors}
        for group, ranks, what in groups:
            is_compared = {key: what == "replicas" or key[1] for key in digests}
            names = [key[0] for key in digests if is_compared[key]]
            if group is not None and names:
                content = b"".join(digests[key] for key in digests if is_compared[key])
                of_ranks = gather_alike(content, len(ranks), group)
                _check(ranks, of_ranks, names, when, what)


def _check(
    ranks: Sequence[int],
    digests: Sequence[bytes],
    names: Sequence[str],
    when: str,
    what: str = "replicas",
) -> None:
    for rank, other in zip(ranks, digests, strict=True):
        for at, name in enumerate(names):
            place = slice(at * _DIGEST_BYTES, (at + 1) * _DIGEST_BYTES)
            if other[place] != digests[0][place]:
                raise ReplicaError(
                    f"ranks {ranks[0]} and {rank} are {what}, but differ in {name} {when}.",
                    "Start all ranks from the same --init-from."
                    if "start" in when
                    else "Look for an operation that is not deterministic, a different library "
                    "version, or a faulty machine; --check-replicas 1 finds the step.",
                )


def _named(modules: Mapping[int, nn.Module], *, with_buffers: bool) -> Iterable[tuple[str, Tensor]]:
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{name} of stage {stage}", parameter
        for name, buffer in module.named_buffers() if with_buffers else ():
            yield f"{name} of stage {stage}", buffer


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True)
class TiedParameter:
    """A parameter of several stages.

    name: its first name.
    ranks: the ranks that hold it.
    group: their process group.
    """

    name: str
    parameter: nn.Parameter
    ranks: tuple[int, ...]
    group: dist.ProcessGroup


def held_parameters(
    plan: Plan, modules: Mapping[int, nn.Module], world: World
) -> list[TiedParameter]:
    """The tied parameters of this rank; none unless single stages have replicas."""
    tied_parameters = []
    for number, group in world.tied_groups.items():
        shared = plan.shared[number]
        (parameter,) = (
            modules[stage].get_parameter(name) for stage, name in shared.holders if stage in modules
        )
        ranks = world.grid.holders_of(shared.stages)
        tied_parameters.append(TiedParameter(shared.names[0], parameter, ranks, group))
    return tied_parameters


class SharedParameterError(AsyncPipeError):
    """The holders of a tied parameter have different values."""


def find_difference(plan: Plan, modules: Mapping[int, nn.Module], world: World) -> str | None:
    """The message about the first tied parameter whose values differ between stages, the same on
    all ranks; None if there is none. Collective: compares checksums."""
    holders = [
        (shared.holders[0], holder)
        for shared in plan.shared
        if len(shared.stages) > 1
        for holder in shared.holders
    ]
    if not holders:
        return None
    own = b"".join(
        _digest(modules[stage].get_parameter(name))
        if stage in modules and world.copy == 0
        else bytes(_DIGEST_BYTES)
        for _, (stage, name) in holders
    )
    gathered = world.gathered(own)

    def of(place: int) -> bytes:
        at = slice(place * _DIGEST_BYTES, (place + 1) * _DIGEST_BYTES)
        return max(content[at] for content in gathered)

    digests = {holder: of(place) for place, (_, holder) in enumerate(holders)}
    for first, other in holders:
        if digests[first] != digests[other]:
            return (
                f"{first[1]} of stage {first[0]} and {other[1]} of stage {other[0]} are one shared "
                f"parameter, but their values differ; those of stage {first[0]} are saved."
            )
    return None
