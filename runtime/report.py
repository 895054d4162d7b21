"""What a run tells: while it goes on, through an observer; at its end, in a report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from .schedule import Action
from .versions import LedgerEntry
from .weight_gap import Gap

Event = tuple[Action, float, float]
"""An action with its start and end in seconds of `time.perf_counter`."""


class Observer:
    """Told what happens on this rank; the training loop steps its optimizers in `on_step`."""

    def on_begin(self, action: Action) -> None:
        """An F, B, W or S begins; all that it waited for is there."""

    def on_action(self, action: Action, start_s: float, end_s: float) -> None:
        """An F, B, W or S was carried out; what it waited for lies before `start_s`."""

    def on_loss(self, micro_batch: int, loss: Tensor) -> None:
        """The loss of a micro-batch, not divided, detached; on the rank that makes it."""

    def on_outputs(self, micro_batch: int, outputs: Mapping[str, Tensor]) -> None:
        """The model outputs that a stage of this rank made, detached."""

    def on_last_backward(self, stage: int, version: int) -> None:
        """The backward that completes the stage's gradients before the step to `version` is about
        to begin: each `.grad` is final when it is accumulated. Not told of where that backward is
        in two parts."""

    def on_gradients(self, stage: int, version: int) -> None:
        """The stage made its last backward before the step to `version`: its `.grad` are complete,
        but for parameters that other stages hold too, whose `.grad` are None until `on_step`."""

    def on_passage(self, entry: LedgerEntry) -> None:
        """The backward of a micro-batch is over, at the versions of the entry."""

    def wants_gap(self, version: int) -> bool:
        """Whether `on_gap` is to be told of the micro-batches of the step to `version`."""
        return False

    def on_gap(self, stage: int, version: int, gap: Gap) -> None:
        """How far the weights that a micro-batch's forward read are from the live ones that the
        step to `version` will change by its gradient."""

    def on_step(self, stage: int, version: int) -> None:
        """The stage's `.grad` are complete: step its optimizer to `version` (from 1 on)."""


class StepOptimizers(Observer):
    """Steps a stage's optimizer, and that is all."""

    def __init__(self, optimizers: Mapping[int, Optimizer]) -> None:
        self.optimizers = optimizers

    def on_step(self, stage: int, version: int) -> None:
        self.optimizers[stage].step()


@dataclass(frozen=True, slots=True)
class RunReport:
    """One rank's run: its losses by micro-batch, its ledger, and where its time went.

    `busy_s` is wall time inside F, B and S, `cpu_s` the thread's CPU time in the same; `events`
    are kept if asked for.
    """

    losses: Mapping[int, Tensor]
    ledger: tuple[LedgerEntry, ...]
    wall_s: float
    busy_s: float
    cpu_s: float
    events: tuple[Event, ...]

    @property
    def idle_share(self) -> float:
        """The share of wall time in which the rank waited or moved tensors."""
        return 1 - self.busy_s / self.wall_s if self.wall_s else 0.0


class Recorder:
    """Gathers a RunReport and passes everything on to the observer."""

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

    def passage(self, entry: LedgerEntry) -> None:
        self.ledger.append(entry)
        self.observer.on_passage(entry)

    def loss(self, micro_batch: int, loss: Tensor) -> None:
        self.losses[micro_batch] = loss
        self.observer.on_loss(micro_batch, loss)

    def report(self) -> RunReport:
        wall_s = time.perf_counter() - self._began_s
        return RunReport(
            self.losses, tuple(self.ledger), wall_s, self._busy_s, self._cpu_s, tuple(self._events)
        )
