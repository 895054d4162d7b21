"""Stages that hold one (tied) parameter -> the same gradient at each, hence the same values.

Clip factors, learning rates and delays are the same at all holders too (`schedule/asynchronous.py`,
`training/clipping.py`), so every bit stays equal.

When a stage has done its last backward of a window (the micro-batches of one step), it gives the
parameter's gradient to the other holders. At the step that makes version v every holder takes the
gradients of window v - D of all holders, including its own, and adds them in stage order: the sums,
and the values after the step, are equal to the last bit. D is 0 in a synchronous schedule; in an
asynchronous one it is the delay after which the window is complete everywhere without a stall, so
the first D steps have no gradient (None: optimizers leave the parameter alone). Remaining windows
of a segment are kept for the next one.

The holders sum on each tensor rank, so all of them must divide the parameter the same way over the
tensor ranks.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from functools import reduce
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..plan.plan import Plan, SharedParameter
from ..tensor_files import raw_bytes
from ..tensor_parallel.ranks import Split, TensorRanks, in_blocks, splits_of, using
from ..transports.protocol import Channel, ChannelKind, Handle, Transport
from .loading import SkipRandomInit, stage_builder
from .mailbox import CHECKSUM_BYTES, Waiting, take

_Key = tuple[str, int, int, int]
"""A gradient in transit: first name of the parameter, source and target stage, window."""


class SharedGradients:
    """The shared parameters of one rank's stages, and their gradients in transit."""

    def __init__(self, plan: Plan, modules: Mapping[int, nn.Module], transport: Transport) -> None:
        self.transport = transport
        self._tied: dict[int, list[tuple[SharedParameter, nn.Parameter]]] = {
            stage: [
                (shared, module.get_parameter(name))
                for shared in plan.shared
                for holder, name in shared.holders
                if holder == stage and len(shared.stages) > 1
            ]
            for stage, module in modules.items()
        }
        self._windows: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._arrived: dict[_Key, Tensor] = {}
        self._posted: dict[_Key, Handle] = {}
        self._channels: dict[tuple[ChannelKind, str, int, int], Channel] = {}
        self._summed: dict[tuple[str, int, int], Tensor] = {}
        self._is_verified = False
        _check_separate(self._tied)

    @property
    def specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each shared parameter held here, by its first name."""
        return {
            shared.names[0]: (parameter.dtype, tuple(parameter.shape))
            for shared, parameter in self._parameters()
        }

    def open(self, channels: Iterable[Channel]) -> None:
        """Sets the channels for gradients and checksums."""
        self._channels = {
            (channel.kind, channel.name, channel.source, channel.target): channel
            for channel in channels
            if channel.kind in ("shared gradient", "checksum")
        }

    def verify_equal(self) -> Generator[Handle, None, None]:
        """Compares checksums with the other holders on the first call. Raises PlanError naming two
        that differ."""
        if self._is_verified:
            return
        self._is_verified = True
        checksums = {
            (shared.names[0], stage): _checksum(parameter)
            for stage, tied in self._tied.items()
            for shared, parameter in tied
        }
        for (name, stage), checksum in checksums.items():
            for channel in self._remote("checksum", name, source=stage):
                self.transport.send(channel, checksum, 0)
        for stage, tied in self._tied.items():
            for shared, _ in tied:
                name = shared.names[0]
                for holder, holder_name in shared.holders:
                    other = checksums.get((name, holder))
                    if other is None:
                        channel = self._channels["checksum", name, holder, stage]
                        other = yield from take(self.transport, self.transport.recv(channel, 0))
                    if not torch.equal(other.cpu(), checksums[name, stage]):
                        own_name = dict(shared.holders)[stage]
                        raise PlanError(
                            f"{own_name} of stage {stage} and {holder_name} of stage {holder} are "
                            "one shared parameter, but differ in value at the start.",
                            "Load all stages from the same weights.",
                        )

    def publish(self, stage: int, window: int) -> None:
        """Sends the gradients of a finished window to the other holders; `.grad` becomes None."""
        for shared, parameter in self._trained(stage):
            name = shared.names[0]
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            parameter.grad = None
            self._windows[name, stage].append(window)
            for holder in shared.stages:
                if holder in self._tied:
                    self._arrived[name, stage, holder, window] = gradient
            for channel in self._remote("shared gradient", name, source=stage):
                self.transport.send(channel, gradient, window)
            for channel in self._remote("shared gradient", name, target=stage):
                key = name, channel.source, stage, window
                self._posted[key] = self.transport.recv(channel, window)

    def collect(
        self, stage: int, window: int, delay_of: Callable[[tuple[int, ...]], int]
    ) -> Generator[Handle, None, None]:
        """Sets `.grad` to the sum over all holders of what is due at the step of `window`.

        `delay_of` gives D for the stages that hold a parameter.
        """
        for shared, parameter in self._trained(stage):
            delay = delay_of(shared.stages)
            windows = self._windows[shared.names[0], stage]
            total: Tensor | None = None
            # More than one window is due where a run has a shorter delay than the one before.
            while windows and windows[0] <= window - delay:
                summed = yield from self._sum(shared, stage, windows.pop(0))
                total = summed if total is None else total + summed
            parameter.grad = total

    def _trained(self, stage: int) -> Iterator[tuple[SharedParameter, nn.Parameter]]:
        """The shared parameters of a stage that need a gradient: nothing is exchanged of others."""
        return (
            (shared, parameter)
            for shared, parameter in self._tied[stage]
            if parameter.requires_grad
        )

    def drain(self) -> Generator[Handle, None, None]:
        """Takes everything that others have sent, to be kept for the next segment."""
        for key in list(self._posted):
            self._arrived[key] = yield from take(self.transport, self._posted.pop(key))

    def forget_frozen(self) -> None:
        """Drops what is left over for parameters that no longer need a gradient."""
        for stage, tied in self._tied.items():
            for shared, parameter in tied:
                name = shared.names[0]
                if parameter.requires_grad or not self._windows.pop((name, stage), None):
                    continue
                for arrived in [key for key in self._arrived if key[0] == name]:
                    del self._arrived[arrived]
                for summed in [key for key in self._summed if key[0] == name]:
                    del self._summed[summed]

    def state(self) -> dict[tuple[str, int], Tensor]:
        """The sums, by first name and window, that are left over for the next segment; those of
        parameters of which this rank has the first holder. After a drain."""
        sums = {}
        for stage, tied in self._tied.items():
            for shared, _ in tied:
                name = shared.names[0]
                for window in self._windows[name, stage] if stage == shared.stages[0] else ():
                    sums[name, window] = self._left_over(shared, stage, window)
        return sums

    def load(self, sums: Mapping[tuple[str, int], Tensor]) -> None:
        """Takes up what all ranks' `state` gave."""
        for stage, tied in self._tied.items():
            for shared, parameter in tied:
                own = shared.names[0]
                for name, window in sorted(key for key in sums if key[0] in shared.names):
                    self._windows[own, stage].append(window)
                    summed = sums[name, window].to(parameter.device, copy=True)
                    self._summed[own, stage, window] = summed

    def _left_over(self, shared: SharedParameter, stage: int, window: int) -> Tensor:
        """The future result of `_sum`; changes nothing."""
        name = shared.names[0]
        if (name, stage, window) in self._summed:
            return self._summed[name, stage, window]
        parts = [self._arrived[name, holder, stage, window] for holder in sorted(shared.stages)]
        return reduce(torch.add, parts)

    def _sum(self, shared: SharedParameter, stage: int, window: int) -> Waiting:
        """The sum in stage order, made in memory of what was received: a shared parameter is often
        the largest of a model."""
        if (summed := self._summed.pop((shared.names[0], stage, window), None)) is not None:
            return summed
        total: Tensor | None = None
        may_write = False
        for holder in sorted(shared.stages):
            key = shared.names[0], holder, stage, window
            is_received = key in self._posted
            if is_received:
                gradient = yield from take(self.transport, self._posted.pop(key))
            else:
                gradient = self._arrived.pop(key)
            if total is None:
                total, may_write = gradient, is_received
            elif may_write:
                total.add_(gradient)
            elif is_received:
                total, may_write = gradient.add_(total), True
            else:
                total, may_write = total + gradient, True
        for channel in self._remote("shared gradient", shared.names[0], source=stage):
            self.transport.wait_sent(channel, window)
        assert total is not None
        return total

    def _parameters(self) -> Iterator[tuple[SharedParameter, nn.Parameter]]:
        return (pair for tied in self._tied.values() for pair in tied)

    def _remote(
        self, kind: ChannelKind, name: str, *, source: int | None = None, target: int | None = None
    ) -> list[Channel]:
        return [
            channel
            for (of_kind, of_name, from_stage, to_stage), channel in self._channels.items()
            if (of_kind, of_name) == (kind, name) and not channel.is_local
            if source in (None, from_stage) and target in (None, to_stage)
        ]


def shared_weights(plan: Plan, stage: int) -> dict[str, tuple[int, ...]]:
    """The names of a stage's parameters that other stages hold too -> all stages that do."""
    return {
        name: shared.stages
        for shared in plan.shared
        for holder, name in shared.holders
        if holder == stage and len(shared.stages) > 1
    }


def _check_separate(
    tied_of_stage: Mapping[int, list[tuple[SharedParameter, nn.Parameter]]],
) -> None:
    for (stage, mine), (other, theirs) in combinations(tied_of_stage.items(), 2):
        for shared, parameter in mine:
            if any(parameter is another for _, another in theirs):
                raise PlanError(
                    f"stages {stage} and {other} hold {shared.names[0]} as one tensor; in a "
                    "pipeline each has its own, kept equal.",
                    "Load each stage by itself with load_stage.",
                )


def _checksum(parameter: nn.Parameter) -> Tensor:
    digest = hashlib.sha256(raw_bytes(parameter)).digest()
    assert len(digest) == CHECKSUM_BYTES
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def verify_tied_alike(
    folder: str | Path,
    plan: Plan,
    stages: Collection[int],
    ranks: TensorRanks,
    code: Mapping[str, str] | None = None,
) -> None:
    """Raises PlanError if a parameter of some `stages` is divided otherwise in another stage. Reads
    the code of all stages that hold it, without weights."""
    tied = [shared.stages for shared in plan.shared if len(shared.stages) > 1]
    holders = {stage for each in tied if set(stages) & set(each) for stage in each}
    if ranks.size == 1 or not holders:
        return
    splits = {}
    for stage in sorted(holders):
        with SkipRandomInit(), using(ranks):
            splits[stage] = splits_of(stage_builder(folder, plan.stages[stage], code)())
    verify_splits_alike(plan, splits)


def verify_splits_alike(plan: Plan, splits: Mapping[int, Mapping[str, Split]]) -> None:
    """Raises PlanError if a tied parameter is divided in two ways. `splits` are those of the
    stages, by the names of their parameters."""
    for shared in plan.shared:
        holders = [(stage, name) for stage, name in shared.holders if stage in splits]
        ways = [splits[stage].get(name) for stage, name in holders]
        for (stage, name), way in zip(holders[1:], ways[1:], strict=True):
            if way != ways[0]:
                first, own = holders[0]
                raise PlanError(
                    f"{own} of stage {first} and {name} of stage {stage} are one tied parameter, "
                    f"but over the tensor ranks the first is {_described(ways[0])} and the second "
                    f"{_described(way)}.",
                    "Divide it alike in the code of both stages, or partition the model again.",
                )


def _described(split: Split | None) -> str:
    if split is None:
        return "whole"
    uneven = " in unequal parts" if split.length is not None else ""
    return f"divided along dimension {split.dim}{in_blocks(split.groups)}{uneven}"
