"""The weights of all replicas -> the proof that they are equal, or the first that differs.

Replicas start from the same weights and take the same steps, so every bit stays equal; a
difference means faulty memory, a library that differs between hosts, or code that is not
deterministic. Everything is compared once at the start; then parameters, every so many steps. What
a model keeps of its data in buffers, such as batch norm's statistics, each replica has for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from ..errors import AsyncPipeError
from ..launching.world import World, gather_alike
from ..tensors import raw_bytes
from ..training.settings import Settings
from .holders import Held

_DIGEST_BYTES = 16


class ReplicaError(AsyncPipeError):
    """Replicas that are not equal."""


class Equality:
    """Compares the stages of this rank with those of its copies, and parameters of several stages
    that are `held` by more. Making one compares everything;
    raises ReplicaError, the same on all copies, as `check` does. Collective."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        settings: Settings,
        world: World,
        held: Iterable[Held] = (),
    ) -> None:
        self._modules, self._settings, self._world = modules, settings, world
        self._compare(_named(modules, with_buffers=True), "at the start")
        for one in held:
            told = gather_alike(_digest(one.parameter), len(one.ranks), one.group)
            _check(one.ranks, told, [f"{one.name}, a parameter of several stages"], "at the start")

    def check(self, step: int) -> None:
        """Compares the parameters if that is due after this step."""
        every = self._settings.check_replicas
        if every and step % every == 0:
            self._compare(_named(self._modules, with_buffers=False), f"after step {step}")

    def _compare(self, tensors: Iterable[tuple[str, Tensor]], when: str) -> None:
        if self._world.copies is None:
            return
        names, digests = [], []
        for name, tensor in tensors:
            names.append(name)
            digests.append(_digest(tensor))
        if names:
            copies = self._world.grid.copies_of(self._world.rank)
            _check(copies, self._world.gathered_from_copies(b"".join(digests)), names, when)


def _check(ranks: Sequence[int], told: Sequence[bytes], names: Sequence[str], when: str) -> None:
    for rank, other in zip(ranks, told, strict=True):
        for at, name in enumerate(names):
            place = slice(at * _DIGEST_BYTES, (at + 1) * _DIGEST_BYTES)
            if other[place] != told[0][place]:
                raise ReplicaError(
                    f"ranks {ranks[0]} and {rank} are replicas, but differ in {name} {when}.",
                    "Start all from the same --init-from."
                    if "start" in when
                    else "Look for an operation that is not deterministic, for other versions "
                    "of a library, or for a faulty machine: --check-replicas 1 finds the step.",
                )


def _named(modules: Mapping[int, nn.Module], *, with_buffers: bool) -> Iterable[tuple[str, Tensor]]:
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{name} of stage {stage}", parameter
        for name, buffer in module.named_buffers() if with_buffers else ():
            yield f"{name} of stage {stage}", buffer


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=_DIGEST_BYTES).digest()
