"""The time of a rank: its activities, reports of its runs, and hooks for every event.

Activities nest: a step that waits for the gradient norm of all ranks is a `meet` within an `S`.
Every moment belongs to the innermost activity, or to none, which is the executor's own time; so the
seconds of all kinds add up to the time that passed. Another thread may read `now` and `finished` at
any time.

An `Observer` receives the events of a run; `RunRecorder` makes its `RunReport`. `observed_feed`,
`ActionObserver` and `ObservedTransport` (`observed_transport.py`) record a rank's activities.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ..schedule.schedule import Action, Numbering
from ..staleness.weight_versions import IsFinal, LedgerEntry
from ..transports.protocol import GENERATOR_STATE
from .weight_binding import Gap

_Computing = Literal["F", "B", "W", "S", "norm", "cache"]
Kind = Literal[
    _Computing, "data", "receive", "send", "taken", "meet", "exchange", "writing", "other"
]

COMPUTING: tuple[Kind, ...] = ("F", "B", "W", "S", "norm", "cache")

TENSOR_RANKS = "tensor ranks"
PURPOSES = ("activation", "gradient", "generator state", "tied", "replicas", TENSOR_RANKS)
"""The purposes of the bytes that a rank sends in its steps: tensors between stages and their
gradients, the state of random generators that travels with them, gradients of tied parameters and
of replicas, and the summands of split layers."""

CACHE_ASKED, CACHE_HITS, CACHE_BYTES = CACHE_FIGURES = ("asked", "hits", "taken_bytes")
"""The micro-batches that a cache was asked for, those of them that it had, and the bytes that it
has taken on this host since."""

_PURPOSE_OF = {"activation": "activation", "gradient": "gradient", "shared gradient": "tied"}
"""Kind of a channel -> the purpose of its bytes; checksums are sent once, before the first step."""
_WORDS = {"F": "forward", "B": "backward", "W": "backward (weights)"}


@dataclass(frozen=True, slots=True)
class StageMessage:
    """A repeated message between two stages on different ranks; `kind` is that of its channel.

    A message outside of a pipeline has the kind `message`, and ranks as its source and target.
    """

    kind: str
    name: str
    source: int
    target: int
    source_rank: int
    target_rank: int
    size_bytes: int

    @property
    def purpose(self) -> str:
        """The purpose of its bytes, one of PURPOSES; "" for one that no step sends."""
        return self.name if self.name == GENERATOR_STATE else _PURPOSE_OF.get(self.kind, "")

    def describe(self, index: int) -> str:
        """`the activation "hidden" of micro-batch 5`."""
        unit = "micro-batch" if self.kind in ("activation", "gradient") else "step"
        return f'the {self.kind} "{self.name}" of {unit} {index}'

    @property
    def unit_of_ends(self) -> str:
        """The kind of `source` and `target`: ranks or stages."""
        return "rank" if self.kind == "message" else "stage"


class Activity(NamedTuple):
    """An activity of a rank.

    - F, B, W, S: the action `subject`
    - norm: the norm of a stage's gradients before the optimizer steps
    - cache: loading and keeping what a stage's frozen blocks have computed
    - data: reading micro-batch `index`, or the samples that `subject` names
    - receive: waiting for a message
    - send: handing a message to the transport
    - taken: waiting until a message was taken
    - meet: waiting for all ranks
    - exchange: summing gradients over replicas, or summands of split layers over tensor ranks
    - writing: writing checkpoints or records
    - other: something else, in words
    """

    kind: Kind
    subject: Action | StageMessage | str = ""
    index: int = 0  # type: ignore[assignment]  # no need of the tuple's method of that name

    @property
    def stage(self) -> int:
        """The stage that computes; -1 if none does."""
        return self.subject.stage if isinstance(self.subject, Action) else -1

    @property
    def peer(self) -> int | None:
        """The rank that this activity waits for, if it is a single one."""
        if not isinstance(self.subject, StageMessage):
            return None
        is_receive = self.kind == "receive"
        return self.subject.source_rank if is_receive else self.subject.target_rank

    def __str__(self) -> str:
        """The words that follow a rank's name.

        >>> print(Activity("B", Action(1, "B", 3), 3))
        is in backward of micro-batch 3 (stage 1)
        """
        if isinstance(self.subject, Action):
            stage = f"(stage {self.subject.stage})"
            if self.kind == "norm":
                return f"takes the norm of gradients {stage}"
            if self.kind == "S":
                return f"is in the optimizer step {stage}"
            if self.kind == "cache":
                return f"uses the cache for micro-batch {self.index} {stage}"
            return f"is in {_WORDS[self.kind]} of micro-batch {self.index} {stage}"
        if isinstance(self.subject, StageMessage):
            message = self.subject.describe(self.index)
            if self.kind == "receive":
                return f"waits for {message} from rank {self.peer}"
            return f"waits for rank {self.peer} to take {message}"
        if self.kind == "data":
            return f"reads the data of {self.subject or f'micro-batch {self.index}'}"
        return f"waits for all ranks: {self.subject}" if self.kind == "meet" else f"{self.subject}"


NOTHING = Activity("other", "is between two actions")


class Span(NamedTuple):
    """An activity with its start and end, in seconds of `time.perf_counter`."""

    activity: Activity
    start_s: float
    end_s: float
    numbers: Numbering = Numbering()
    """The numbers of the segment's micro-batches."""
    step: int = 1
    """The first step of the segment."""


Spent = dict[tuple[Kind, int], float]
"""Kind of activity and stage (-1 for none) -> seconds."""


class _During:
    """Begins and ends an activity; an exception leaves it open."""

    __slots__ = ("_activities", "_activity")

    def __init__(self, activities: Activities, activity: Activity) -> None:
        self._activities, self._activity = activities, activity

    def __enter__(self) -> None:
        self._activities.begin(self._activity)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._activities.end()


class Activities:
    """The current activity of a rank, its finished ones, and the bytes that it sends.

    An exception leaves its activity open, so that it can be reported.

    finished: the number of finished activities.
    numbers, step: the numbers of the segment's micro-batches, and its first step.
    spans: the finished activities, if recorded.
    sent: the bytes sent since the last `take_sent`, by purpose.
    cached: the figures of a cache since the last `take_cached`, as in CACHE_FIGURES.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.finished = 0
        self.numbers, self.step = Numbering(), 1
        self.spans: list[Span] | None = None
        self.sent: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()
        self._clock = clock
        self._open: list[tuple[Activity, float]] = []
        self._spent: Spent = {}
        self._since_s = self._free_since_s = clock()

    @property
    def now(self) -> tuple[Activity, float]:
        """The current activity and its seconds so far; may be read from any thread."""
        try:
            activity, start_s = self._open[-1]
        except IndexError:
            activity, start_s = NOTHING, self._free_since_s
        return activity, self._clock() - start_s

    def begin(self, activity: Activity) -> None:
        now_s = self._charge()
        self._open.append((activity, now_s))

    def end(self) -> None:
        """Ends the innermost activity."""
        now_s = self._charge()
        activity, start_s = self._open.pop()
        self._free_since_s = now_s
        self.finished += 1
        if self.spans is not None:
            self.spans.append(Span(activity, start_s, now_s, self.numbers, self.step))

    def during(self, activity: Activity) -> _During:
        """Inside, the rank has this activity."""
        return _During(self, activity)

    def take(self) -> Spent:
        """The seconds since the last call, by kind and stage; time without an activity is
        `other`."""
        self._charge()
        spent, self._spent = self._spent, {}
        return spent

    def take_sent(self) -> Counter[str]:
        """The bytes sent since the last call, by purpose."""
        sent, self.sent = self.sent, Counter()
        return sent

    def take_cached(self) -> Counter[str]:
        """The figures of a cache since the last call."""
        cached, self.cached = self.cached, Counter()
        return cached

    def _charge(self) -> float:
        """Adds the time since the last call to the innermost activity."""
        now_s = self._clock()
        if self._open:
            activity = self._open[-1][0]
            key = activity.kind, activity.stage
        else:
            key = "other", -1
        self._spent[key] = self._spent.get(key, 0.0) + now_s - self._since_s
        self._since_s = now_s
        return now_s


Event = tuple[Action, float, float]
"""An action with its start and end in seconds of `time.perf_counter`."""


class Observer:
    """Receives the events of this rank; the training loop steps its optimizers in `on_step`."""

    @property
    def reads_outputs(self) -> bool:
        """Whether `on_outputs` reads other outputs than the loss; alike on all tensor ranks, which
        gather outputs that are in parts."""
        return True

    def on_begin(self, action: Action) -> None:
        """An F, B, W or S begins; everything that it waited for has arrived."""

    def on_action(self, action: Action, start_s: float, end_s: float) -> None:
        """An F, B, W or S has ended; its waits lie before `start_s`."""

    def on_loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        """The loss of a micro-batch, not divided, detached; on the rank that makes it. In training
        it is weighted so that the mean over samples is the loss of the step. In an evaluation it is
        the mean over `targets`, or over the samples if that is None."""

    def on_outputs(self, micro_batch: int, outputs: Mapping[str, Tensor]) -> None:
        """The model outputs that a stage of this rank made, detached."""

    def on_backward(self, stage: int, version: int, *, is_last: bool) -> IsFinal | None:
        """A backward of the stage before the step to `version` is about to begin; the last one
        completes the gradients: each `.grad` is final when it is accumulated. Not called if that
        backward is split. Returns what to call with a weight whose gradient is accumulated where no
        hook of the weight is called, because the forward has read copies."""
        return None

    def on_micro_batch(self, stage: int, version: int) -> None:
        """The stage has ended the backward of a micro-batch before the step to `version`, or left
        it out because the micro-batch has no samples."""

    def on_gradients(self, stage: int, version: int) -> None:
        """The stage has ended its last backward before the step to `version`: its `.grad` are
        complete, except those of parameters that other stages hold too, which are None until
        `on_sums`."""

    def on_sums(self, stage: int, version: int) -> None:
        """All of the stage's `.grad` for the step to `version` are complete on this rank: wait for
        the sums over its replicas, before methods change the gradients."""

    def on_ledger_entry(self, entry: LedgerEntry) -> None:
        """The backward of a micro-batch has ended, at the versions of the entry."""

    def wants_gap(self, version: int) -> bool:
        """True to receive `on_gap` for the micro-batches of the step to `version`."""
        return False

    def on_gap(self, stage: int, version: int, gap: Gap) -> None:
        """The distance between the weights that a micro-batch's forward read and the live ones,
        which the step to `version` will change with its gradient."""

    def on_step(self, stage: int, version: int) -> None:
        """The stage's `.grad` are complete: step its optimizer to `version` (from 1 on)."""


class StepOptimizers(Observer):
    """Only steps the optimizers of stages."""

    def __init__(self, optimizers: Mapping[int, Optimizer]) -> None:
        self.optimizers = optimizers

    def on_step(self, stage: int, version: int) -> None:
        self.optimizers[stage].step()


@dataclass(frozen=True, slots=True)
class RunReport:
    """One rank's run."""

    losses: Mapping[int, Tensor]
    """The losses by micro-batch."""
    ledger: tuple[LedgerEntry, ...]
    """The versions of each micro-batch."""
    wall_s: float
    busy_s: float
    """Wall time inside F, B and S."""
    cpu_s: float
    """CPU time of the thread inside F, B and S."""
    events: tuple[Event, ...]
    """The actions with their times, if recorded."""

    @property
    def idle_share(self) -> float:
        """The share of wall time in which the rank waited or moved tensors."""
        return 1 - self.busy_s / self.wall_s if self.wall_s else 0.0


class RunRecorder:
    """Collects a RunReport and forwards all events to the observer."""

    def __init__(self, observer: Observer, *, keep_events: bool) -> None:
        self.observer = observer
        self.losses: dict[int, Tensor] = {}
        self.ledger: list[LedgerEntry] = []
        self._keep_events = keep_events
        self._events: list[Event] = []
        self._busy_s = 0.0
        self._cpu_s = 0.0
        self._began_s = time.perf_counter()

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        self.observer.on_begin(action)
        cpu_s, start_s = time.thread_time(), time.perf_counter()
        yield
        end_s = time.perf_counter()
        self._busy_s += end_s - start_s
        self._cpu_s += time.thread_time() - cpu_s
        if self._keep_events:
            self._events.append((action, start_s, end_s))
        self.observer.on_action(action, start_s, end_s)

    def ledger_entry(self, entry: LedgerEntry) -> None:
        self.ledger.append(entry)
        self.observer.on_ledger_entry(entry)

    def loss(self, micro_batch: int, loss: Tensor, targets: float | None) -> None:
        self.losses[micro_batch] = loss
        self.observer.on_loss(micro_batch, loss, targets)

    def report(self) -> RunReport:
        wall_s = time.perf_counter() - self._began_s
        return RunReport(
            self.losses, tuple(self.ledger), wall_s, self._busy_s, self._cpu_s, tuple(self._events)
        )


Made = TypeVar("Made")


def observed_feed(feed: Callable[[int], Made], activities: Activities) -> Callable[[int], Made]:
    """The feed, with its time recorded as `data`; micro-batches are counted within the segment."""

    def fed(micro_batch: int) -> Made:
        index = activities.numbers.index(micro_batch)
        with activities.during(Activity("data", index=index)):
            return feed(micro_batch)

    return fed


class ActionObserver(Observer):
    """Records every action as an activity; subclasses handle the other events."""

    def __init__(self, activities: Activities) -> None:
        self.activities = activities

    def on_begin(self, action: Action) -> None:
        self.activities.begin(Activity(_kind(action), action, action.index))

    def on_action(self, action: Action, start_s: float, end_s: float) -> None:
        self.activities.end()


def _kind(action: Action) -> Kind:
    kind = action.kind
    assert kind in ("F", "B", "W", "S")
    return kind
