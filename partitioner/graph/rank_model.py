"""How a plan will run + sums of a stage -> time and memory of the stage on its rank.

Position j of k is the j-th rank of the pipeline. For one micro-batch

    load(S)   = work(S) + talk(S), or max(work(S), talk(S)) on a link that overlaps with computing
    work(S)   = forward(S) + backward(S), and forward(S) once more with recomputation; without
                flushes also update(S) / m: the optimizer's step after m micro-batches
    talk(S)   = max(send(S), receive(S), (send(S) + receive(S)) / duplex), `both_ways_ms`: with a
                duplex of 1, a rank sends and receives one after the other
    memory(S) = params x (1 + gradient + optimizer copies + staleness copies) + buffers, with
                replicas that share out state less of it (`shares.py`)
              + params that need no gradient
              + W_j x saved, or W_j x received + saved with recomputation
              + boundary tensors in transit + the largest additional need of one operation, which
                for the first operations of a model is beside one micro-batch less (`cost_graph.py`)

with W_j micro-batches in flight. Boundary tensors in transit are

- tensors and gradients whose receive is posted, as far as their sender may be ahead
  (`runtime/executor/mailbox.py`), at most `DEPTH` for each edge and direction
- as many that are sent and not yet acknowledged
- the sent tensors of every micro-batch in flight, from which its backward starts, unless they are
  recomputed

If the exchange of tied gradients at a step needs more than an operation, it counts instead
(`_transient_bytes`).

The load of a stage that does not fit its rank is infinite. An asynchronous pipeline without flushes
completes one micro-batch every max over j of load(S_j). For synchronous schedules the simulated
makespan counts (`runtime/schedule/simulate.py`). A search that minimizes a maximum over the stages
minimizes their score: the load, or a lower bound of the synchronous step that follows from the
stage (`RankConfig.score_ms`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from ...runtime.optimizers.facts import PLANNED
from ...runtime.plan.plan import StageMemory
from ...runtime.plan.sharing import OPTIMIZER_STATE, passes_over_gradients
from ...runtime.schedule.asynchronous import ASYNCHRONOUS, weight_copies
from ...runtime.schedule.builders import AUTO, computed, make_schedule
from ...runtime.schedule.schedule import Schedule
from ...runtime.schedule.simulate import ActionCosts
from ...runtime.schedule.tasks import Tasks
from .costs import Bools, Costs, Floats, Link, StageSums, seen_over, times_as_long
from .shares import gradient_bytes, owned_bytes


@lru_cache
def scheduled(
    name: str, stages: int, micro_batches: int, rank_of_stage: tuple[int, ...] = ()
) -> Schedule:
    """A synchronous schedule over one step, with the rank of every stage if ranks have several.

    For `auto`, the schedule that is best for equal costs, until the costs are known.
    """
    if name == AUTO:
        at = rank_of_stage or tuple(range(stages))
        tasks = Tasks(ActionCosts.equal(stages), at, micro_batches, may_split=False)
        return computed(tasks, effort=0).schedule
    ranks = len(set(rank_of_stage)) or stages
    return make_schedule(name, stages=stages, micro_batches=micro_batches, ranks=ranks)


Recompute = Literal["none", "auto", "all"]


# Synchronous schedules with one stage per rank and no split backward: the number of micro-batches
# in flight follows from the number of later stages.
_BY_DEPTH = ("gpipe", "1f1b", "seq", "single")

# Messages of an edge that a transport posts ahead, and that it keeps after sending.
DEPTH = 4


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank.

    name: a name for people
    speed: without a `kind`, times are 1 / `speed` of the graph's own
    memory_bytes: its memory limit
    host: the name of its host
    kind: which of the graph's `times_on` apply to it
    pays_transfers: False for a host whose transfers cost it no time of its own, as the CPU of
        Tarnawski et al. (NeurIPS 2020)
    """

    name: str = "device"
    speed: float = 1.0
    memory_bytes: float = math.inf
    host: str = ""
    kind: str | None = None
    pays_transfers: bool = True


@dataclass(frozen=True)
class RankConfig:
    """The ranks of a pipeline in order, their links and schedule, and what each rank stores.

    devices: one for each position
    links: `links[j]` joins ranks j and j + 1; None is the link of the costs everywhere
    recompute: which stages recompute their forward
    optimizer: decides how many copies of the parameters its state has
    staleness: decides how many weight versions an asynchronous run keeps
    overlap: transfers of a micro-batch overlap with the computation of another one
    by_load: the score of a stage is its load under synchronous schedules too
    replicas: rank j stands for `replicas[j]` equal ranks that share its micro-batches
    exchange: the link over which the replicas of rank j sum their gradients once per step
    rank_of_stage: the rank of each position, if ranks have several stages
    in_flight_at: micro-batches in flight by position, if they depend on the placement
    zero: what replicas share out: 1 the optimizer's state, 2 gradients too
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
    in_flight_at: tuple[int, ...] = ()
    zero: int = 0

    @property
    def stages(self) -> int:
        return len(self.devices)

    @property
    def is_asynchronous(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    @cached_property
    def is_limited(self) -> bool:
        """Some device has a memory limit."""
        return any(device.memory_bytes < math.inf for device in self.devices)

    def at(self, positions: Iterable[int]) -> RankConfig:
        """The configuration for stages on the ranks at these positions, which may repeat."""
        chosen = tuple(positions)
        ranks = tuple(self.rank_of_stage[at] for at in chosen) if self.rank_of_stage else chosen
        return replace(
            self,
            rank_of_stage=ranks if len(set(ranks)) < len(ranks) else (),
            devices=tuple(self.devices[position] for position in chosen),
            replicas=tuple(self.replicas[position] for position in chosen if self.replicas),
            exchange=self.exchange and tuple(self.exchange[position] for position in chosen),
        )

    @cached_property
    def is_of_profile(self) -> bool:
        """Every device computes in the graph's own times."""
        return all(device.kind is None and device.speed == 1 for device in self.devices)

    def replicas_at(self, position: int) -> int:
        """The number of ranks that share the stage at `position`."""
        return self.replicas[position] if position < len(self.replicas) else 1

    def shares_at(self, position: int) -> int:
        """The divisor of the times of a micro-batch at `position`. Replicas of a synchronous
        pipeline compute fewer micro-batches instead, each at its full time."""
        return self.replicas_at(position) if self.is_asynchronous else 1

    def in_flight(self, position: int) -> int:
        """The largest number of micro-batches between forward and backward at `position`, on each
        of its replicas."""
        return self._in_flight[position]

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        if self.in_flight_at:
            return self.in_flight_at
        if self.schedule not in (*_BY_DEPTH, *ASYNCHRONOUS):
            return scheduled(
                self.schedule, self.stages, self.shared_micro_batches, self.rank_of_stage
            ).in_flight
        return tuple(map(self._depth, range(self.stages)))

    def _depth(self, position: int) -> int:
        """`in_flight` of the schedules in which it follows from the number of later stages."""
        replicas = self.replicas_at(position)
        if self.schedule in ("seq", "single"):
            return 1
        if self.schedule == "gpipe":
            return self.shared_micro_batches
        ranks_from_here = sum(map(self.replicas_at, range(position, self.stages)))
        depth = max(1, -(-ranks_from_here // replicas))
        return depth if self.is_asynchronous else min(depth, self.shared_micro_batches)

    def versions(self, position: int, *, recompute: bool = False) -> int:
        """Weight copies that staleness methods keep in addition to the current weights."""
        if not self.is_asynchronous:
            return 0
        ahead = self.in_flight(position) - 1
        return weight_copies(self.staleness, ahead, self.micro_batches, recomputes=recompute)

    def memory_bytes(self, position: int, sums: StageSums, *, recompute: bool) -> Floats:
        """Peak bytes of the rank at `position`: the formula above."""
        copies = 1 + self.versions(position, recompute=recompute)
        gradients, state = self._gradients_and_state(sums, self.replicas_at(position))
        activations = self._activation_bytes(position, sums, recompute=recompute)
        transport = self._transport_bytes(position, sums, recompute=recompute)
        fixed = copies * sums.param_bytes + gradients + state
        fixed = fixed + sums.frozen_bytes + sums.buffer_bytes
        beside = self._transient_bytes(position, sums, activations + transport)
        return fixed + activations + transport + beside

    def _gradients_and_state(self, sums: StageSums, replicas: int) -> tuple[Floats, Floats]:
        """Bytes of gradients and of the optimizer's state on the fullest of the replicas."""
        owners = replicas if self.zero >= OPTIMIZER_STATE else 1
        state = PLANNED[self.optimizer].copies * owned_bytes(sums, owners)
        return gradient_bytes(sums, replicas, self.zero), state

    def memory(
        self, position: int, sums: StageSums, *, recompute: bool, replicas: int = 1
    ) -> StageMemory:
        """`memory_bytes` of one stage by purpose, on one of so many replicas."""
        param_bytes = int(sums.param_bytes)
        gradients, state = self._gradients_and_state(
            sums, max(replicas, self.replicas_at(position))
        )
        activations = self._activation_bytes(position, sums, recompute=recompute)
        transport = self._transport_bytes(position, sums, recompute=recompute)
        return StageMemory(
            parameters=param_bytes + int(sums.frozen_bytes),
            gradients=int(gradients),
            optimizer=int(state),
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
        """Additional memory while one operation runs, or while tied gradients are exchanged.

        The exchange holds the received gradients. After a flush no micro-batch is in flight; an
        asynchronous pipeline has all of them in flight but one, and holds the gradients of steps
        that are not complete on all stages: its own and the received ones, at most as much with
        three or more holders.
        """
        in_flight = self.in_flight(position)
        left = (in_flight - 1) / in_flight if self.is_asynchronous else 0.0
        exchanged = np.asarray(sums.tied_bytes)
        exchanging = np.where(exchanged, exchanged + (left - 1) * in_flight_bytes, 0.0)
        late = 2 * self._shared_delay * exchanged
        return late + np.maximum(sums.beside_bytes, exchanging)

    @property
    def _shared_delay(self) -> int:
        """Steps by which a tied gradient may be late, see `schedule.shared_delay`."""
        ahead = self.in_flight(0) - 1 if self.is_asynchronous else 0
        return -(-ahead // self.micro_batches)

    def _transport_bytes(self, position: int, sums: StageSums, *, recompute: bool) -> Floats:
        in_flight = self.in_flight(position)
        before = self.in_flight(position - 1) if position else in_flight
        ahead = max(0, min(DEPTH, before - in_flight))
        buffers = min(DEPTH, in_flight)
        # Activations posted, gradients not yet acknowledged, and the one being computed; gradients
        # posted, and the sent tensors, unless they are kept for the backward anyway.
        on_the_way: Floats = (2 * ahead + 1) * sums.received_bytes + (
            2 * buffers if recompute else buffers
        ) * np.asarray(sums.sent_bytes)
        return on_the_way if recompute else on_the_way + in_flight * np.asarray(sums.root_bytes)

    def recomputes(self, position: int, sums: StageSums) -> Bools:
        """Which stages recompute their forward: only those that have to, and never where one
        micro-batch is in flight or where forward saves nothing for a backward."""
        never = self.recompute == "none" or (self.recompute == "auto" and not self.is_limited)
        if never or self.in_flight(position) == 1:
            return np.zeros(np.shape(sums.forward_ms), dtype=bool)
        saves = np.asarray(sums.saved_bytes > 0)
        if self.recompute == "all":
            return saves
        room = self.devices[position].memory_bytes
        return saves & np.asarray(self.memory_bytes(position, sums, recompute=False) > room)

    def time_ms(self, position: int, sums: StageSums, *, again: Bools | bool) -> Floats:
        """Milliseconds of one micro-batch on the rank at `position`, even if it does not fit;
        `again`: with recomputation."""
        busy_ms = self._busy_ms(position, sums, again=again)
        shared_by = self.micro_batches if self.is_asynchronous else self.shared_micro_batches
        busy_ms = busy_ms + self.sum_gradients_ms(position, sums.param_bytes) / shared_by
        overlaps = self.overlap and self.devices[position].pays_transfers
        return np.maximum(busy_ms, sums.talk_ms) if overlaps else busy_ms

    def _busy_ms(self, position: int, sums: StageSums, *, again: Bools | bool) -> Floats:
        """Milliseconds of work and of the transfers that cannot overlap with it."""
        work_ms = sums.work_ms + np.where(again, sums.forward_ms, 0.0)
        return work_ms + sums.talk_ms if self.waits_for_transfers(position) else work_ms

    def waits_for_transfers(self, position: int) -> bool:
        """Transfers keep the rank busy, so they add to its work."""
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
        """The score of a stage is its load in all rounds, at every position."""
        is_load = self.is_asynchronous or self.by_load
        return is_load or bool(self.rank_of_stage) or self.schedule not in _BY_DEPTH

    @property
    def rounds(self) -> int:
        """A lower bound of the score as a multiple of the stage's work."""
        return 1 if self.is_asynchronous or self.by_load else self.shared_micro_batches

    @property
    def shared_micro_batches(self) -> int:
        """Micro-batches of a step in one pipeline, if replicas share them."""
        return -(-self.micro_batches // max(self.replicas or (1,)))

    def score_ms(
        self,
        position: int,
        sums: StageSums,
        before_ms: Floats | float = 0.0,
        after_ms: Floats | float = 0.0,
    ) -> Floats:
        """The objective of a search is the largest score over the stages: the objective of the
        plan, or for a synchronous schedule a lower bound of the simulated step.

        `before_ms` and `after_ms` are the least forward and backward times of all groups in
        earlier and in later stages. With m micro-batches and W = in flight, the rank at `position`

        - begins when the first one has passed the stages before, and the step ends when the last
          one has gone back through them: before + m load + what it waits in between
        - has done no more than the W forwards when the first backward can begin, a round trip
          through the stages after it from the first forward on; likewise from the last forward on
          to the last backward. These waits are one if all forwards come before all backwards
        - has at most W micro-batches in flight: ceil(m / W) round trips follow one another
        - sums its gradients over the replicas after its last backward, while the last one may still
          go back through the stages before: the longer of the two counts

        For schedules that postpone weight gradients or have several stages on a rank, only m load
        counts.
        """
        load_ms = self.load_ms(position, sums)
        if self.score_is_load:
            return self.rounds * load_ms
        again = self.recomputes(position, sums)
        # Either direction's transfers are at most all of them.
        talk_ms = sums.talk_ms if self.waits_for_transfers(position) else 0.0
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
        ends_ms = np.maximum(before_ms, self.sum_gradients_ms(position, sums.param_bytes))
        score_ms: Floats = ends_ms + np.maximum(
            self.shared_micro_batches * work_ms + waits, trips * (work_ms + after_ms)
        )
        return score_ms

    def exchange_ms(self, link: Link, param_bytes: Floats, replicas: int) -> Floats:
        """Milliseconds per micro-batch in which the replicas of a stage sum their gradients, once a
        step, or as often as `zero` says."""
        passes = passes_over_gradients(self.zero, -(-self.micro_batches // replicas))
        return passes * link.all_reduce_ms(param_bytes, replicas) / self.micro_batches

    def links_at(self, position: int, default: Link) -> tuple[Link, Link]:
        """The links to the ranks before and after `position`; a rank at an end has one link."""
        if not self.links:
            return default, default
        return self.links[max(position - 1, 0)], self.links[min(position, len(self.links) - 1)]

    def sum_gradients_ms(self, position: int, param_bytes: Floats | float) -> Floats | float:
        """Milliseconds per step in which the replicas at `position` sum their gradients."""
        replicas = self.replicas_at(position)
        if replicas == 1 or not self.exchange:
            return 0.0
        each_ms = self.exchange_ms(self.exchange[position], np.asarray(param_bytes), replicas)
        return self.micro_batches * each_ms

    def seen_at(self, costs: Costs, position: int) -> Costs:
        """The costs for the rank at `position`: times of its device, its links and, under an
        asynchronous schedule, the share of one replica in every micro-batch."""
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
            forward, backward = costs.sums_ms
            costs = replace(
                costs,
                forward_ms=(costs.forward_ms - forward) / device.speed + forward,
                backward_ms=(costs.backward_ms - backward) / device.speed + backward,
                weight_ms=costs.weight_ms / device.speed,
                update_ms=costs.update_ms / device.speed,
            )
        if self.links:
            costs = seen_over(costs, *self.links_at(position, costs.link))
        replicas = self.shares_at(position)
        if replicas == 1:
            return costs
        times = ("forward_ms", "backward_ms", "weight_ms", "send_ms", "receive_ms")
        shared = {name: getattr(costs, name) / replicas for name in times}
        shared["backward_ms"] += (1 - 1 / replicas) * costs.update_ms  # each makes all of it
        return replace(costs, **shared)
