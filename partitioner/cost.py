"""The groups of a cost graph as arrays, and sums of them over stages.

A value is what a cut may have to carry: made by one group and read by others. What is held is
counted once in a stage however many of its groups name it: parameters, and what forward saves for
backward. For a stage with the set S of groups, value t made by group o_t and read by groups M_t,
one micro-batch,

    c_t         = latency + bytes_t / bandwidth              forward, and the same for its gradient
    forward(S)  = sum of f_v over v in S                     and backward(S) likewise
    send(S)     = sum over t of c_t where o_t is in S and M_t is not within S
    receive(S)  = sum over t of c_t where o_t is not in S and M_t meets S

This is the cost model of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN
Graph Operators" (NeurIPS 2020): a value is paid for once by the stage that makes it and once by
each stage that reads it. What these sums mean for the time and memory of a rank is said in
`setting.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Link:
    """What carries boundary tensors between two ranks, the same in both directions.

    `bytes_per_s` is the bandwidth of one direction. With `overlap` the transfers of one
    micro-batch go on while another one is computed.
    """

    latency_ms: float = 0.0
    bytes_per_s: float = math.inf
    overlap: bool = False

    def transfer_ms(self, num_bytes: float) -> float:
        """Time of one message of `num_bytes`; nothing is sent for no bytes."""
        return self.latency_ms + 1e3 * num_bytes / self.bytes_per_s if num_bytes else 0.0


# Gloo between two processes of one host, as measured on loopback with 0.1 to 4 MB.
LOCALHOST = Link(latency_ms=0.1, bytes_per_s=2e9)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a cut may have to carry, in positions of `Costs.groups`.

    `owner` stands before all `readers` for an activation and after them for a gradient that is
    a value of its own. `readers` is sorted and has neither doubles nor the owner. `known_ms` is
    what a transfer takes where the graph gives times instead of bytes. An exchange is what stages
    that hold one parameter give each other of its gradient; it orders nothing. `is_saved`: the
    owner keeps it for its own backward.
    """

    name: str
    owner: int
    readers: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float
    known_ms: float | None = None
    is_exchange: bool = False
    tied_bytes: float = 0.0
    is_saved: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """First and last position that the value joins."""
        return min(self.owner, self.readers[0]), max(self.owner, self.readers[-1])

    def exchanged_bytes(self, holders: int) -> float:
        """Held by a stage that exchanges, beside its own gradient: those of the other holders."""
        return (holders - 1) * self.tied_bytes

    def transfer_ms(self, link: Link) -> float:
        """Once over `link`, and its gradient back."""
        if self.known_ms is not None:
            return self.known_ms
        return link.transfer_ms(self.forward_bytes) + link.transfer_ms(self.backward_bytes)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a stage has once if any of `groups`, rising positions, is in it."""

    groups: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True)
class HeldIndex:
    """What groups hold as arrays: group `groups[i]` names item `items[i]` of `num_bytes`."""

    groups: Ints
    items: Ints
    num_bytes: Floats

    @classmethod
    def of(cls, held: Sequence[Held]) -> HeldIndex:
        pairs = [(group, item) for item, one in enumerate(held) for group in one.groups]
        groups, items = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cls(groups, items, np.array([one.num_bytes for one in held], dtype=np.float64))

    def sums(self, at: Ints, count: int) -> Floats:
        """The bytes of each of `count` stages, an item once in each, with groups at stages `at`."""
        pairs = np.unique(self.items * count + at[self.groups])
        return np.bincount(
            pairs % count, weights=self.num_bytes[pairs // count], minlength=count
        ).astype(np.float64)


@dataclass(frozen=True)
class Costs:
    """A cost graph as arrays over its groups in topological order, as one rank sees it.

    `send_ms` and `receive_ms` are what each of `values` takes at its owner's and its readers' end.
    `weight_ms` is what of `backward_ms` makes gradients of weights and can be put off.
    `edges` are pairs of positions, the first before the second, that no cut may turn round.
    `times_on` are forward and backward times of all groups on devices of other kinds.
    `update_ms` is what of `backward_ms` is the optimizer's (`with_updates`). `frozen` are the
    parameters that need no gradient, `parameters` all others.
    """

    name: str
    groups: tuple[str, ...]
    labels: tuple[str, ...]
    forward_ms: Floats
    backward_ms: Floats
    weight_ms: Floats
    edges: tuple[tuple[int, int], ...]
    values: tuple[Value, ...]
    send_ms: Floats
    receive_ms: Floats
    parameters: tuple[Held, ...]
    saved: tuple[Held, ...]
    buffer_bytes: Floats
    transient_bytes: Floats
    modules: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]
    has_params: Bools
    link: Link
    times_on: Mapping[str, tuple[Floats, Floats]]
    update_ms: Floats
    micro_batch_size: int | None = None
    frozen: tuple[Held, ...] = ()

    @cached_property
    def work_ms(self) -> Floats:
        return self.forward_ms + self.backward_ms

    @cached_property
    def weight_share(self) -> Floats:
        """What `weight_ms` is of the backward, on devices of other kinds too."""
        share: Floats = np.divide(
            self.weight_ms,
            self.backward_ms,
            out=np.zeros_like(self.weight_ms),
            where=self.backward_ms > 0,
        )
        return share

    @cached_property
    def cut_bytes(self) -> Floats:
        """Bytes that cross a cut before each position (0..n), both directions together."""
        crossing = np.zeros(len(self.groups) + 1)
        for value in self.values:
            first, last = value.span
            crossing[first + 1 : last + 1] += value.forward_bytes + value.backward_bytes
        return crossing

    @cached_property
    def parameter_index(self) -> HeldIndex:
        return HeldIndex.of(self.parameters)

    @cached_property
    def frozen_index(self) -> HeldIndex:
        return HeldIndex.of(self.frozen)

    @cached_property
    def saved_index(self) -> HeldIndex:
        return HeldIndex.of(self.saved)

    def leaving(self, stage_of: Sequence[int]) -> list[int]:
        """The values whose owner and readers are not all in one stage."""
        at = np.asarray(stage_of)
        owners, readers, values = self._ends
        leaving: list[int] = np.unique(values[at[owners] != at[readers]]).tolist()
        return leaving

    @cached_property
    def _ends(self) -> tuple[Ints, Ints, Ints]:
        """Owner, reader and value, a row for every reader."""
        rows = [
            (value.owner, reader, index)
            for index, value in enumerate(self.values)
            for reader in value.readers
        ]
        owners, readers, values = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return owners, readers, values

    @cached_property
    def cut_depth(self) -> Ints:
        """How many nested modules a cut before each position (0..n) tears, from the block down.

        0 stands between blocks. A module is torn where groups of it lie on both sides.
        """
        spans: dict[tuple[str, ...], list[int]] = {}
        for position, path in enumerate(self.modules):
            for level in range(1, len(path) + 1):
                spans.setdefault(path[:level], [position, position])[1] = position
        depth = np.zeros(len(self.groups) + 1, dtype=np.int64)
        for path, (first, last) in spans.items():
            torn = depth[first + 1 : last + 1]
            np.maximum(torn, len(path), out=torn)
        return depth

    @cached_property
    def value_bytes(self) -> Floats:
        """Bytes of each value, which its owner sends and a reader holds once it has arrived."""
        return np.array([value.forward_bytes for value in self.values], dtype=np.float64)

    @cached_property
    def root_bytes(self) -> Floats:
        """The same of those that the owner does not save anyway."""
        saved = np.array([value.is_saved for value in self.values], dtype=bool)
        return np.where(saved, 0.0, self.value_bytes)

    @cached_property
    def tied_bytes(self) -> Floats:
        """What each value's exchange holds at once between two stages, 0 for all others. A search
        that sees one stage at a time does not know whether there are more; `stage_sums` does."""
        return np.array([value.exchanged_bytes(2) for value in self.values], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class StageSums:
    """What the groups of stages add up to, for one micro-batch: arrays, one entry a stage.

    `param_bytes` are of one copy, without the `frozen_bytes` of those that need no gradient;
    `saved_bytes` what forward keeps for backward, with what it received; `received_bytes` what
    arrives from other stages and `sent_bytes` what goes to them, `root_bytes` that part of it
    which is not saved; `transient_bytes` the most that one operation needs beside. `tied_bytes`
    is held while gradients of parameters are exchanged that other stages have too. Of
    `backward_ms`, `weight_ms` may be put off by a schedule and `update_ms` is the optimizer's; no
    score depends on either, so searches leave them out.
    """

    forward_ms: Floats
    backward_ms: Floats
    send_ms: Floats
    receive_ms: Floats
    param_bytes: Floats
    buffer_bytes: Floats
    saved_bytes: Floats
    received_bytes: Floats
    transient_bytes: Floats
    sent_bytes: Floats | float = 0.0
    root_bytes: Floats | float = 0.0
    tied_bytes: Floats | float = 0.0
    weight_ms: Floats | float = 0.0
    update_ms: Floats | float = 0.0
    frozen_bytes: Floats | float = 0.0

    @property
    def work_ms(self) -> Floats:
        return self.forward_ms + self.backward_ms

    @property
    def talk_ms(self) -> Floats:
        return self.send_ms + self.receive_ms

    def __getitem__(self, which: Any) -> StageSums:
        found = (np.asarray(getattr(self, field.name)) for field in fields(self))
        return StageSums(*(amounts[which] if amounts.ndim else amounts for amounts in found))


def stage_sums(
    costs: Costs, stage_of: Sequence[int], stages: int, ranks: Sequence[int] | None = None
) -> StageSums:
    """What each stage adds up to when group i is on `stage_of[i]`.

    With `ranks`, a rank for every stage, what passes within a rank is not sent, and what several
    stages of a rank read is received by the first.
    """
    at = np.asarray(stage_of)
    rank_of = range(stages) if ranks is None else ranks
    send, receive, sent, roots, received, tied = ([0.0] * stages for _ in range(6))
    for index in costs.leaving(stage_of):
        value = costs.values[index]
        owner = int(at[value.owner])
        reading = sorted({int(at[reader]) for reader in value.readers}, reverse=True)
        first_on = {rank_of[stage]: stage for stage in reading}
        first_on.pop(rank_of[owner], None)
        if first_on:
            readers = list(first_on.values())
            send[owner] += float(costs.send_ms[index])
            sent[owner] += float(costs.value_bytes[index])
            roots[owner] += float(costs.root_bytes[index])
            exchanged_bytes = value.exchanged_bytes(1 + len(readers))
            tied[owner] += exchanged_bytes
            for reader in readers:
                receive[reader] += float(costs.receive_ms[index])
                received[reader] += value.forward_bytes
                tied[reader] += exchanged_bytes
    transient = np.zeros(stages)
    np.maximum.at(transient, at, costs.transient_bytes)
    return StageSums(
        forward_ms=_sums(costs.forward_ms, at, stages),
        backward_ms=_sums(costs.backward_ms, at, stages),
        send_ms=np.array(send),
        receive_ms=np.array(receive),
        param_bytes=costs.parameter_index.sums(at, stages),
        buffer_bytes=_sums(costs.buffer_bytes, at, stages),
        saved_bytes=costs.saved_index.sums(at, stages),
        received_bytes=np.array(received),
        transient_bytes=transient,
        sent_bytes=np.array(sent),
        root_bytes=np.array(roots),
        tied_bytes=np.array(tied),
        weight_ms=_sums(costs.weight_ms, at, stages),
        update_ms=_sums(costs.update_ms, at, stages),
        frozen_bytes=costs.frozen_index.sums(at, stages),
    )


def seen_over(costs: Costs, left: Link, right: Link) -> Costs:
    """The costs as a rank sees them that has these links to the ranks before and after it."""
    over_left, over_right = (
        np.array([value.transfer_ms(link) for value in costs.values], dtype=np.float64)
        for link in (left, right)
    )
    # What goes forward leaves to the right and comes from the left; gradients the other way.
    forwards = np.array([value.owner < value.readers[0] for value in costs.values], dtype=bool)
    return replace(
        costs,
        send_ms=np.where(forwards, over_right, over_left),
        receive_ms=np.where(forwards, over_left, over_right),
    )


def with_updates(costs: Costs, ms_per_byte: float, micro_batches: int) -> Costs:
    """The costs with the optimizer's step, which takes `ms_per_byte` of parameters once in
    `micro_batches`: an m-th of it is in the backwards of the groups that name a parameter, in equal
    parts. What stages that hold it together take more is in their exchange (`with_exchanges`)."""
    update_ms = np.zeros(len(costs.groups))
    for held in costs.parameters:
        whole_ms = held.num_bytes * ms_per_byte / micro_batches
        update_ms[list(held.groups)] += whole_ms / len(held.groups)
    times_on = {
        kind: (
            forward_ms,
            backward_ms + update_ms * times_as_long(forward_ms + backward_ms, costs.work_ms),
        )
        for kind, (forward_ms, backward_ms) in costs.times_on.items()
    }
    backward_ms = costs.backward_ms + update_ms
    return replace(costs, backward_ms=backward_ms, times_on=times_on, update_ms=update_ms)


def times_as_long(work_ms: Floats, other_ms: Floats) -> float:
    """What all of the one takes, as a multiple of the other."""
    return float(work_ms.sum()) / (float(other_ms.sum()) or 1.0)


def with_exchanges(
    costs: Costs, micro_batches: int, link: Link, update_ms_per_byte: float = 0.0
) -> Costs:
    """The costs with an exchange over `link` for every parameter that several groups name.

    Once a step each holder sends its gradient and receives the other's: as much for every
    micro-batch as an m-th of two transfers. Where the optimizer counts, each of two stages has half
    a step in its group and takes the other half for its own copy. Of three holders and more each
    pays as for two.
    """
    exchanges = tuple(
        Value(
            name=f"gradient of a parameter of {costs.groups[shared.groups[0]]}",
            owner=shared.groups[0],
            readers=shared.groups[1:],
            forward_bytes=0,
            backward_bytes=0,
            known_ms=(
                2 * link.transfer_ms(shared.num_bytes) + update_ms_per_byte * shared.num_bytes / 2
            )
            / micro_batches,
            is_exchange=True,
            tied_bytes=shared.num_bytes,
        )
        for shared in costs.parameters
        if len(shared.groups) > 1
    )
    times_ms = np.array([value.known_ms for value in exchanges], dtype=np.float64)
    return replace(
        costs,
        values=costs.values + exchanges,
        send_ms=np.concatenate([costs.send_ms, times_ms]),
        receive_ms=np.concatenate([costs.receive_ms, times_ms]),
    )


def _sums(of_groups: Floats, at: Ints, count: int) -> Floats:
    return np.bincount(at, weights=of_groups, minlength=count).astype(np.float64)
