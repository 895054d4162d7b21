"""The groups of a cost graph as arrays, and their sums over stages.

A value is a tensor that one group computes and others read, so that a cut may have to carry it.
Parameters and tensors saved for the backward count once in a stage, however many of its groups name
them. For a stage with the set S of groups, value t computed by group o_t and read by groups M_t,
and one micro-batch,

    c_t         = latency + bytes_t / bandwidth    forward (`Link`), and the same for its gradient
    forward(S)  = sum of f_v over v in S                     and backward(S) likewise
    send(S)     = sum over t of c_t where o_t is in S and M_t is not within S
    receive(S)  = sum over t of c_t where o_t is not in S and M_t meets S

This is the cost model of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN
Graph Operators" (NeurIPS 2020): the stage that computes a value pays for it once, and so does each
stage that reads it. `rank_model.py` computes the time and memory of a rank from these sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """The connection of two ranks, with the same speed in both directions: only here bytes that
    are sent become milliseconds.

    latency_ms: the time of a message without bytes
    bytes_per_s: bandwidth of one direction
    overlap: transfers of a micro-batch overlap with the computation of another one
    duplex: bandwidth of both directions at once as a multiple of `bytes_per_s`, 1 to 2
    """

    latency_ms: float = 0.0
    bytes_per_s: float = math.inf
    overlap: bool = False
    duplex: float = 1.0

    def transfer_ms(self, num_bytes: float) -> float:
        """Milliseconds of one message; 0 without bytes, because nothing is sent."""
        return self.latency_ms + 1e3 * num_bytes / self.bytes_per_s if num_bytes else 0.0

    @property
    def megabyte_ms(self) -> float:
        """The measure by which links are compared."""
        return self.transfer_ms(1e6)

    def exchange_ms(self, num_bytes: float) -> float:
        """Milliseconds in which two holders of a parameter send each other its gradient."""
        once_ms = self.transfer_ms(num_bytes)
        return float(both_ways_ms(once_ms, once_ms, self.duplex))

    def all_reduce_ms(self, num_bytes: Floats, ranks: int) -> Floats:
        """Milliseconds of a ring over `ranks` that sums tensors of these bytes (Patarasuk, Yuan:
        "Bandwidth optimal all-reduce", 2009)."""
        once_ms = self.latency_ms + 1e3 * (num_bytes / ranks) / self.bytes_per_s
        return np.where(num_bytes, 2 * (ranks - 1) * once_ms, 0.0)


def both_ways_ms(
    sending_ms: Floats | float, receiving_ms: Floats | float, duplex: float
) -> Floats | float:
    """Milliseconds in which a rank sends and receives: one after the other with a `duplex` of 1, at
    the same time with 2.

    >>> [float(both_ways_ms(3.0, 2.0, duplex)) for duplex in (1.0, 1.25, 2.0)]
    [5.0, 4.0, 3.0]
    """
    in_turn_ms = sending_ms + receiving_ms
    if duplex == 1:
        return in_turn_ms
    return np.maximum(np.maximum(sending_ms, receiving_ms), in_turn_ms / duplex)


def slowest_link(links: Iterable[Link]) -> Link:
    """The link on which a megabyte takes longest."""
    return max(links, key=lambda link: link.megabyte_ms)


# Gloo between two processes of one host, as measured on loopback with 0.1 to 4 MB.
LOCALHOST = Link(latency_ms=0.1, bytes_per_s=2e9)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a cut may have to carry, in positions of `Costs.groups`.

    owner: before all readers for an activation, after them for a gradient that is its own value
    readers: sorted, without duplicates and without the owner
    known_ms: time of a transfer, if the graph gives times instead of bytes
    is_exchange: the gradient of a tied parameter, which its stages exchange; it orders nothing
    tied_bytes: size of that parameter
    is_saved: the owner keeps the value for its own backward
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
        """Bytes of the other holders' gradients, which a stage holds during the exchange."""
        return (holders - 1) * self.tied_bytes

    def transfer_ms(self, link: Link) -> float:
        """Milliseconds over `link`, with its gradient back."""
        if self.known_ms is not None:
            return self.known_ms
        return link.transfer_ms(self.forward_bytes) + link.transfer_ms(self.backward_bytes)


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes that a stage has once if any of `groups`, rising positions, is in it."""

    groups: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True)
class HeldIndex:
    """Shared items as arrays: group `groups[i]` names item `items[i]` of `num_bytes`."""

    groups: Ints
    items: Ints
    num_bytes: Floats

    @classmethod
    def of(cls, shared_bytes: Sequence[SharedBytes]) -> HeldIndex:
        pairs = [
            (group, item) for item, shared in enumerate(shared_bytes) for group in shared.groups
        ]
        groups, items = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cls(
            groups, items, np.array([shared.num_bytes for shared in shared_bytes], dtype=np.float64)
        )

    def sums(self, at: Ints, count: int) -> Floats:
        """The bytes of each of `count` stages, an item once in each, with groups at stages `at`."""
        pairs = np.unique(self.items * count + at[self.groups])
        return np.bincount(
            pairs % count, weights=self.num_bytes[pairs // count], minlength=count
        ).astype(np.float64)


@dataclass(frozen=True)
class Costs:
    """A cost graph as arrays over its groups in topological order, for one rank.

    weight_ms: the part of `backward_ms` that computes weight gradients and can be postponed
    edges: pairs of positions, the first before the second, whose order a cut has to preserve
    send_ms, receive_ms: time of each value at its owner's and at its readers' end
    duplex: that of the rank's links
    parameters: those that require a gradient
    frozen: the parameters that require none
    times_on: forward and backward times of all groups on devices of other kinds
    update_ms: the part of `backward_ms` that is the optimizer's step (`with_updates`)
    sums_ms: sums over tensor ranks in `forward_ms` and `backward_ms`: rows that no device speeds up
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
    parameters: tuple[SharedBytes, ...]
    saved: tuple[SharedBytes, ...]
    buffer_bytes: Floats
    transient_bytes: Floats
    live_bytes: Floats
    modules: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]
    has_params: Bools
    link: Link
    times_on: Mapping[str, tuple[Floats, Floats]]
    update_ms: Floats
    sums_ms: Floats
    micro_batch_size: int | None = None
    frozen: tuple[SharedBytes, ...] = ()
    duplex: float = 1.0

    @cached_property
    def work_ms(self) -> Floats:
        return self.forward_ms + self.backward_ms

    @cached_property
    def weight_share(self) -> Floats:
        """The share of `weight_ms` in the backward, the same on devices of other kinds."""
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
    def largest_param_bytes(self) -> Floats:
        """Bytes of the largest parameter of each group that requires a gradient."""
        index, largest = self.parameter_index, np.zeros(len(self.groups))
        np.maximum.at(largest, index.groups, index.num_bytes[index.items])
        return largest

    @cached_property
    def value_bytes(self) -> Floats:
        """Bytes of each value, which its owner sends and a reader holds once it has arrived."""
        return np.array([value.forward_bytes for value in self.values], dtype=np.float64)

    @cached_property
    def is_exchange(self) -> Bools:
        """Which values are gradients of tied parameters."""
        return np.array([value.is_exchange for value in self.values], dtype=bool)

    @cached_property
    def root_bytes(self) -> Floats:
        """Bytes of the values that the owner keeps for their gradient and would not save
        otherwise."""
        free = [value.is_saved or not value.backward_bytes for value in self.values]
        return np.where(np.array(free, dtype=bool), 0.0, self.value_bytes)

    @cached_property
    def tied_bytes(self) -> Floats:
        """Bytes that the exchange of each value holds between two stages, 0 for other values. A
        search over single stages cannot tell whether there are more; `stage_sums` can."""
        return np.array([value.exchanged_bytes(2) for value in self.values], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class StageSums:
    """The sums over the groups of stages, for one micro-batch: arrays with one entry per stage.

    param_bytes: one copy of the parameters that require a gradient
    frozen_bytes: the other parameters
    saved_bytes: tensors that forward keeps for backward, received ones included
    received_bytes, sent_bytes: boundary tensors from and to other stages
    root_bytes: the sent tensors that are not saved
    transient_bytes: largest additional need of one operation
    live_bytes: largest sum of values without gradient that forward holds at once
    largest_param_bytes: the largest parameter that requires a gradient
    tied_bytes: held while gradients of tied parameters are exchanged
    weight_ms: the part of `backward_ms` that a schedule may postpone
    update_ms: the part of `backward_ms` that is the optimizer's step
    duplex: that of the rank's links

    No score depends on `weight_ms` and `update_ms`, so searches omit them.
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
    live_bytes: Floats | float = 0.0
    duplex: float = 1.0
    largest_param_bytes: Floats | float = 0.0

    @property
    def beside_bytes(self) -> Floats:
        """The largest need in addition to the saved tensors. While forward computes values without
        gradient, it has not yet saved the later tensors of this micro-batch."""
        return np.maximum(self.transient_bytes, np.asarray(self.live_bytes) - self.saved_bytes)

    @property
    def work_ms(self) -> Floats:
        return self.forward_ms + self.backward_ms

    @property
    def talk_ms(self) -> Floats:
        return np.asarray(both_ways_ms(self.send_ms, self.receive_ms, self.duplex))

    def __getitem__(self, which: Any) -> StageSums:
        chosen: dict[str, Any] = {"duplex": self.duplex}
        for name in (field.name for field in fields(self) if field.name != "duplex"):
            amounts = np.asarray(getattr(self, name))
            chosen[name] = amounts[which] if amounts.ndim else amounts
        return StageSums(**chosen)


def stage_sums(
    costs: Costs, stage_of: Sequence[int], stages: int, ranks: Sequence[int] | None = None
) -> StageSums:
    """The sums of each stage when group i is on `stage_of[i]`.

    `ranks` is the rank of every stage: values within a rank are not sent, and of several stages of
    a rank that read a value the first one receives it.
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
            # An exchange has no direction: both ends count as receiving.
            (receive if value.is_exchange else send)[owner] += float(costs.send_ms[index])
            sent[owner] += float(costs.value_bytes[index])
            roots[owner] += float(costs.root_bytes[index])
            exchanged_bytes = value.exchanged_bytes(1 + len(readers))
            tied[owner] += exchanged_bytes
            for reader in readers:
                receive[reader] += float(costs.receive_ms[index])
                received[reader] += value.forward_bytes
                tied[reader] += exchanged_bytes
    return StageSums(
        forward_ms=_sums(costs.forward_ms, at, stages),
        backward_ms=_sums(costs.backward_ms, at, stages),
        send_ms=np.array(send),
        receive_ms=np.array(receive),
        param_bytes=costs.parameter_index.sums(at, stages),
        buffer_bytes=_sums(costs.buffer_bytes, at, stages),
        saved_bytes=costs.saved_index.sums(at, stages),
        received_bytes=np.array(received),
        transient_bytes=_largest(costs.transient_bytes, at, stages),
        sent_bytes=np.array(sent),
        root_bytes=np.array(roots),
        tied_bytes=np.array(tied),
        weight_ms=_sums(costs.weight_ms, at, stages),
        update_ms=_sums(costs.update_ms, at, stages),
        frozen_bytes=costs.frozen_index.sums(at, stages),
        live_bytes=_largest(costs.live_bytes, at, stages),
        duplex=costs.duplex,
        largest_param_bytes=_largest(costs.largest_param_bytes, at, stages),
    )


def seen_over(costs: Costs, left: Link, right: Link) -> Costs:
    """The costs for a rank with these links to the ranks before and after it."""
    over_left, over_right = (
        np.array([value.transfer_ms(link) for value in costs.values], dtype=np.float64)
        for link in (left, right)
    )
    # Activations are sent to the right and received from the left; gradients the other way.
    forwards = np.array([value.owner < value.readers[0] for value in costs.values], dtype=bool)
    return replace(
        costs,
        send_ms=np.where(forwards, over_right, over_left),
        receive_ms=np.where(forwards, over_left, over_right),
        duplex=min(left.duplex, right.duplex),
    )


def times_as_long(work_ms: Floats, other_ms: Floats) -> float:
    """The sum of the first as a multiple of the sum of the second."""
    return float(work_ms.sum()) / (float(other_ms.sum()) or 1.0)


def _sums(of_groups: Floats, at: Ints, count: int) -> Floats:
    return np.bincount(at, weights=of_groups, minlength=count).astype(np.float64)


def _largest(of_groups: Floats, at: Ints, count: int) -> Floats:
    maxima = np.zeros(count)
    np.maximum.at(maxima, at, of_groups)
    return maxima
