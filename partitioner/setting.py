"""How a plan will run + sums of a stage -> the time and memory it takes on its rank.

Position j of k is the j-th rank of the pipeline. For one micro-batch

    load(S)   = work(S) + talk(S), or max(work(S), talk(S)) on a link that overlaps with computing
    work(S)   = forward(S) + backward(S), and forward(S) once more with recomputation; without
                flushes also update(S) / m: the optimizer's step after m micro-batches
    talk(S)   = send(S) + receive(S): a rank that sends and receives pays for both in turn
    memory(S) = params x (1 + gradient + optimizer copies + staleness copies) + buffers
              + params that need no gradient
              + W_j x saved, or W_j x received + saved with recomputation
              + boundary tensors on their way + the most that one operation needs beside

with W_j micro-batches in flight. On their way are tensors and gradients whose receive is posted as
far as their sender may be ahead (`runtime/mailbox.py`), at most `DEPTH` of each edge and direction;
those sent and not yet known to have arrived, as many; and what was sent of every micro-batch in
flight, where the backward begins, unless it is recomputed. Where it is more,
the exchange of tied gradients at a step counts instead of an operation (`_transient_bytes`).

What a stage does not fit into is no plan: its load is infinite. An asynchronous pipeline without
flushes gives one micro-batch every max over j of load(S_j); of synchronous ones the makespan
counts that the simulator finds (`runtime/simulate.py`). A search that minimises the largest of
something over the stages minimises the score of a stage: its load, or what a synchronous step
takes at least because of it (`Setting.score_ms`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np

from ..runtime.plan import StageMemory
from ..runtime.schedules import ASYNCHRONOUS
from ..runtime.weight_copies import weight_copies
from .actions import scheduled
from .cost import Bools, Costs, Floats, Link, StageSums, seen_over, times_as_long

Recompute = Literal["none", "auto", "all"]

# What an optimizer keeps of each parameter: moments, momentum. Muon has one of hidden matrices, and
# of the rest as AdamW two, which is counted of all. What SOAP has beside is in the costs.
OPTIMIZER_COPIES: Mapping[str, int] = MappingProxyType(
    {
        "adamw": 2,
        "adam": 2,
        "sgd": 0,
        "momentum": 1,
        "sutskever": 1,
        "nadam": 2,
        "muon": 2,
        "soap": 2,
    }
)


# Synchronous schedules of one stage a rank whose backward is whole: what waits for what, and so
# how many micro-batches are in flight, follows from how many stages come after.
_BY_DEPTH = ("gpipe", "1f1b", "seq", "single")

# Messages of an edge that a transport has posted ahead, and that it keeps after sending.
DEPTH = 4


@dataclass(frozen=True, slots=True)
class Device:
    """What carries out the stages of one rank.

    `kind` names the times of the graph (`times_on`) that hold for it; without a kind it takes
    1 / `speed` of the graph's own times. `pays_transfers` is False for a host that moves its data
    in the time of the others, as the CPU of Tarnawski et al. (NeurIPS 2020).
    """

    name: str = "device"
    speed: float = 1.0
    memory_bytes: float = math.inf
    host: str = ""
    kind: str | None = None
    pays_transfers: bool = True


@dataclass(frozen=True)
class Setting:
    """The ranks in their order, what joins them, the schedule, and what each rank keeps.

    `links[j]` joins ranks j and j + 1; None means the link of the costs everywhere.
    With `by_load` the score of a stage is its load under a synchronous schedule too.
    `optimizer` says how many further copies of the parameters there are, `staleness` how many more
    an asynchronous run keeps. With `overlap` the transfers of one micro-batch go on while another
    one is computed. Where rank j stands for `replicas[j]` equal ones, they share its micro-batches
    and sum their gradients over `exchange[j]` once a step. Where several stages are on a rank there
    is a position for each, and `rank_of_stage` has their ranks; `held` are the micro-batches in
    flight by position, where a schedule was made of costs that only a placement has.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] | None = None
    schedule: str = "async-1f1b"
    micro_batches: int = 8
    recompute: Recompute = "none"
    optimizer: str = "adamw"
    staleness: str = "none"
    overlap: bool = False
    by_load: bool = False
    replicas: tuple[int, ...] = ()
    exchange: tuple[Link, ...] | None = None
    rank_of_stage: tuple[int, ...] = ()
    held: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.devices)

    @property
    def is_asynchronous(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    @cached_property
    def is_limited(self) -> bool:
        """Whether some device's memory has an end, so that memory can decide."""
        return any(device.memory_bytes < math.inf for device in self.devices)

    def at(self, positions: Iterable[int]) -> Setting:
        """The same where stages are on the ranks at those positions, which may repeat."""
        chosen = tuple(positions)
        ranks = tuple(self.rank_of_stage[one] for one in chosen) if self.rank_of_stage else chosen
        return replace(
            self,
            rank_of_stage=ranks if len(set(ranks)) < len(ranks) else (),
            devices=tuple(self.devices[position] for position in chosen),
            replicas=tuple(self.replicas[position] for position in chosen if self.replicas),
            exchange=self.exchange and tuple(self.exchange[position] for position in chosen),
        )

    @cached_property
    def is_of_profile(self) -> bool:
        """Whether every device takes the graph's own times."""
        return all(device.kind is None and device.speed == 1 for device in self.devices)

    def replicas_at(self, position: int) -> int:
        """How many ranks the one at `position` stands for."""
        return self.replicas[position] if position < len(self.replicas) else 1

    def shares_at(self, position: int) -> int:
        """By what the times of a micro-batch are divided there. A synchronous pipeline has a
        part of the micro-batches instead, each at its full time."""
        return self.replicas_at(position) if self.is_asynchronous else 1

    def in_flight(self, position: int) -> int:
        """The most micro-batches whose forward is done and backward is not, at that position; of
        replicas on each of them."""
        return self._in_flight[position]

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        if self.held:
            return self.held
        if self.schedule not in (*_BY_DEPTH, *ASYNCHRONOUS):
            return scheduled(
                self.schedule, self.stages, self.shared_micro_batches, self.rank_of_stage
            ).in_flight
        return tuple(map(self._depth, range(self.stages)))

    def _depth(self, position: int) -> int:
        """The same of the schedules that run a stage ahead by how many come after it."""
        replicas = self.replicas_at(position)
        if self.schedule in ("seq", "single"):
            return 1
        if self.schedule == "gpipe":
            return self.shared_micro_batches
        ranks_from_here = sum(map(self.replicas_at, range(position, self.stages)))
        depth = max(1, -(-ranks_from_here // replicas))
        return depth if self.is_asynchronous else min(depth, self.shared_micro_batches)

    def versions(self, position: int, *, recompute: bool = False) -> int:
        """Copies of the weights that staleness methods keep beside the live ones."""
        if not self.is_asynchronous:
            return 0
        ahead = self.in_flight(position) - 1
        return weight_copies(self.staleness, ahead, self.micro_batches, recomputes=recompute)

    def memory_bytes(self, position: int, sums: StageSums, *, recompute: bool) -> Floats:
        """Peak bytes of the rank at `position`: the formula above."""
        copies = 1 + 1 + OPTIMIZER_COPIES[self.optimizer]
        copies += self.versions(position, recompute=recompute)
        activations = self._activation_bytes(position, sums, recompute=recompute)
        transport = self._transport_bytes(position, sums, recompute=recompute)
        fixed = copies * sums.param_bytes + sums.frozen_bytes + sums.buffer_bytes
        beside = self._transient_bytes(position, sums, activations + transport)
        return fixed + activations + transport + beside

    def memory(self, position: int, sums: StageSums, *, recompute: bool) -> StageMemory:
        """The same of one stage, by what it is for."""
        param_bytes = int(sums.param_bytes)
        activations = self._activation_bytes(position, sums, recompute=recompute)
        transport = self._transport_bytes(position, sums, recompute=recompute)
        return StageMemory(
            parameters=param_bytes + int(sums.frozen_bytes),
            gradients=param_bytes,
            optimizer=OPTIMIZER_COPIES[self.optimizer] * param_bytes,
            versions=self.versions(position, recompute=recompute) * param_bytes,
            buffers=int(sums.buffer_bytes),
            activations=int(activations),
            transport=int(transport),
            transient=int(self._transient_bytes(position, sums, activations + transport)),
        )

    def _activation_bytes(self, position: int, sums: StageSums, *, recompute: bool) -> Floats:
        in_flight = self.in_flight(position)
        if recompute:
            return in_flight * sums.received_bytes + sums.saved_bytes
        return in_flight * sums.saved_bytes

    def _transient_bytes(self, position: int, sums: StageSums, in_flight_bytes: Floats) -> Floats:
        """What is needed beside while one operation runs, or while tied gradients are exchanged:
        those that are received. A flush leaves nothing in flight by then, an asynchronous pipeline
        all but the micro-batch that was done, and the gradients of steps that are not complete
        everywhere: its own and those received, of three holders and more at most as much."""
        in_flight = self.in_flight(position)
        left = (in_flight - 1) / in_flight if self.is_asynchronous else 0.0
        exchanged = np.asarray(sums.tied_bytes)
        exchanging = np.where(exchanged, exchanged + (left - 1) * in_flight_bytes, 0.0)
        late = 2 * self._shared_delay * exchanged
        return late + np.maximum(sums.transient_bytes, exchanging)

    @property
    def _shared_delay(self) -> int:
        """Steps by which a tied gradient may be late, as `schedule.shared_delay` has them."""
        ahead = self.in_flight(0) - 1 if self.is_asynchronous else 0
        return -(-ahead // self.micro_batches)

    def _transport_bytes(self, position: int, sums: StageSums, *, recompute: bool) -> Floats:
        in_flight = self.in_flight(position)
        before = self.in_flight(position - 1) if position else in_flight
        ahead = max(0, min(DEPTH, before - in_flight))
        held = min(DEPTH, in_flight)
        # Activations to come, gradients not yet known to have arrived, and the one being made;
        # gradients to come, and what was sent, unless it is kept for backward anyway.
        on_the_way: Floats = (2 * ahead + 1) * sums.received_bytes + (
            2 * held if recompute else held
        ) * np.asarray(sums.sent_bytes)
        return on_the_way if recompute else on_the_way + in_flight * np.asarray(sums.root_bytes)

    def recomputes(self, position: int, sums: StageSums) -> Bools:
        """Whether each stage runs its forward again: only where it has to, and never where a
        single micro-batch is in flight, which recomputation does not help."""
        never = self.recompute == "none" or (self.recompute == "auto" and not self.is_limited)
        if never or self.in_flight(position) == 1:
            return np.zeros(np.shape(sums.forward_ms), dtype=bool)
        if self.recompute == "all":
            return np.ones(np.shape(sums.forward_ms), dtype=bool)
        room = self.devices[position].memory_bytes
        return np.asarray(self.memory_bytes(position, sums, recompute=False) > room)

    def time_ms(self, position: int, sums: StageSums, *, again: Bools | bool) -> Floats:
        """Milliseconds of one micro-batch on the rank at `position`, whether it fits or not;
        `again`: with recomputation."""
        busy_ms = self._busy_ms(position, sums, again=again)
        overlaps = self.overlap and self.devices[position].pays_transfers
        return np.maximum(busy_ms, sums.talk_ms) if overlaps else busy_ms

    def _busy_ms(self, position: int, sums: StageSums, *, again: Bools | bool) -> Floats:
        """Milliseconds of the rank itself: its work, and transfers that do not overlap with it."""
        work_ms = sums.work_ms + np.where(again, sums.forward_ms, 0.0)
        busy_ms = work_ms + sums.talk_ms if self.talks_in_turn(position) else work_ms
        shared_by = self.micro_batches if self.is_asynchronous else self.shared_micro_batches
        return busy_ms + self.sum_gradients_ms(position, sums.param_bytes) / shared_by

    def talks_in_turn(self, position: int) -> bool:
        """Whether the rank is busy with its transfers, so that they add to its work."""
        return self.devices[position].pays_transfers and not self.overlap

    def load_ms(self, position: int, sums: StageSums) -> Floats:
        """The same, and inf where the stage does not fit."""
        again = self.recomputes(position, sums)
        load_ms = self.time_ms(position, sums, again=again)
        if not self.is_limited:
            return load_ms
        peak_bytes = np.where(
            again,
            self.memory_bytes(position, sums, recompute=True),
            self.memory_bytes(position, sums, recompute=False),
        )
        return np.where(peak_bytes <= self.devices[position].memory_bytes, load_ms, np.inf)

    @property
    def score_is_load(self) -> bool:
        """Whether a stage's score is its load in all rounds, wherever the stage is."""
        is_load = self.is_asynchronous or self.by_load
        return is_load or bool(self.rank_of_stage) or self.schedule not in _BY_DEPTH

    @property
    def rounds(self) -> int:
        """A score is at least so many times the stage's work."""
        return 1 if self.is_asynchronous or self.by_load else self.shared_micro_batches

    @property
    def shared_micro_batches(self) -> int:
        """Micro-batches of a step that one pipeline takes, if several share them."""
        return -(-self.micro_batches // max(self.replicas or (1,)))

    def score_ms(
        self,
        position: int,
        sums: StageSums,
        before_ms: Floats | float = 0.0,
        after_ms: Floats | float = 0.0,
    ) -> Floats:
        """What a search has to make small: the largest over the stages is the objective of a plan,
        or for a synchronous schedule a bound below the step that the simulator finds.

        `before_ms` and `after_ms` are the least forward and backward times of all groups in
        earlier and in later stages. With m micro-batches and W = in flight, the rank at `position`

        - begins when the first one has passed the stages before, and the step ends when the last
          one has gone back through them: before + m load + what it waits in between
        - has done no more than the W forwards when the first backward can begin, a round trip
          through the stages after it from the first forward on; likewise from the last forward on
          to the last backward. These waits are one if all forwards come before all backwards
        - has at most W micro-batches in flight: ceil(m / W) round trips follow one another

        Of schedules that put gradients of weights off, or have several stages on a rank, only m
        load is counted.
        """
        load_ms = self.load_ms(position, sums)
        if self.score_is_load:
            return self.rounds * load_ms
        again = self.recomputes(position, sums)
        # Either direction's transfers are at most all of them.
        talk_ms = sums.talk_ms if self.talks_in_turn(position) else 0.0
        ahead = self.in_flight(position) - 1
        waits_first = np.maximum(0.0, after_ms - ahead * (sums.forward_ms + talk_ms))
        backward_ms = sums.backward_ms + np.where(again, sums.forward_ms, 0.0)
        waits_last = np.maximum(0.0, after_ms - ahead * (backward_ms + talk_ms))
        if self.schedule == "gpipe":
            waits = np.asarray(after_ms)
        elif ahead + 1 < self.shared_micro_batches:
            waits = waits_first + waits_last
        else:
            waits = np.maximum(waits_first, waits_last)
        work_ms = np.where(np.isinf(load_ms), np.inf, self._busy_ms(position, sums, again=again))
        trips = -(-self.shared_micro_batches // (ahead + 1))
        score_ms: Floats = before_ms + np.maximum(
            self.shared_micro_batches * work_ms + waits, trips * (work_ms + after_ms)
        )
        return score_ms

    def exchange_ms(self, link: Link, param_bytes: Floats, replicas: int) -> Floats:
        """What summing the gradients of a replicated stage takes of every micro-batch: one ring
        all-reduce a step (Patarasuk, Yuan: "Bandwidth optimal all-reduce", 2009)."""
        once_ms = link.latency_ms + 1e3 * (param_bytes / replicas) / link.bytes_per_s
        return np.where(param_bytes, 2 * (replicas - 1) * once_ms / self.micro_batches, 0.0)

    def sum_gradients_ms(self, position: int, param_bytes: Floats | float) -> Floats | float:
        """The same once a step, of the ranks that the one at `position` stands for."""
        replicas = self.replicas_at(position)
        if replicas == 1 or not self.exchange:
            return 0.0
        each_ms = self.exchange_ms(self.exchange[position], np.asarray(param_bytes), replicas)
        return self.micro_batches * each_ms

    def seen_at(self, costs: Costs, position: int) -> Costs:
        """The costs as the rank at `position` sees them: its device's times, its links, and
        without a synchronous schedule of every micro-batch the share of one replica."""
        device = self.devices[position]
        if device.kind is not None and device.kind in costs.times_on:
            forward_ms, backward_ms = costs.times_on[device.kind]
            costs = replace(
                costs,
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                weight_ms=backward_ms * costs.weight_share,
                update_ms=costs.update_ms * times_as_long(forward_ms + backward_ms, costs.work_ms),
            )
        elif device.speed != 1.0:
            costs = replace(
                costs,
                forward_ms=costs.forward_ms / device.speed,
                backward_ms=costs.backward_ms / device.speed,
                weight_ms=costs.weight_ms / device.speed,
                update_ms=costs.update_ms / device.speed,
            )
        if self.links:
            left, right = max(position - 1, 0), min(position, len(self.links) - 1)
            costs = seen_over(costs, self.links[left], self.links[right])
        replicas = self.shares_at(position)
        if replicas == 1:
            return costs
        times = ("forward_ms", "backward_ms", "weight_ms", "send_ms", "receive_ms")
        shared = {name: getattr(costs, name) / replicas for name in times}
        shared["backward_ms"] += (1 - 1 / replicas) * costs.update_ms  # each makes all of it
        return replace(costs, **shared)
