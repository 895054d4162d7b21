"""One rank's run -> its checkpoints when they are due, its resumption, and a stop on request.

A stop by SIGTERM or SIGUSR1 on any rank: before it begins a step, a rank checks a gate, at the cost
of a comparison. Once a rank was asked to stop, a thread of each rank closes its gate, so that it
begins no further step until all ranks have posted the latest step that they have begun. The
maximum of these is the last step of the run. No rank has begun a later one, and every rank can
complete it, as no rank withholds data that others wait for. So it is the next step of a
synchronous run, or the one after it. An asynchronous run, which continues for many steps without
a pause, drops the remaining actions of its segment.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor

from ..checkpoint.contents import FoundCheckpoint, Rank, Wanted, put, state_of, weights_of
from ..checkpoint.folders import STATE, WEIGHTS, CheckpointError, Facts
from ..checkpoint.hand_over import HandOver
from ..checkpoint.resuming import differences
from ..checkpoint.saving import CheckpointPart, Saver
from ..checkpoint.storage import copy_configuration, read_tensors, shapes_in, write_weights
from ..config.settings import RunConfig
from ..distributed.process_groups import SharedStore, World
from ..errors import PlanError, TransportError
from ..executor.instrumented import Activities, Activity
from ..plan.plan import Plan
from ..process import STOPPED, STOPPING, Ended, handled
from ..schedule.asynchronous import ASYNCHRONOUS
from .optimizer_step import OptimizerStepper


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: the fields of `Facts` of these names."""

    step: int
    samples: int
    schedule: str
    trainer: Mapping[str, Any]
    evaluation: float | None
    seconds: float


class Checkpoints:
    """The checkpoints of one rank's run; all ranks call the same methods.

    saved: the step of the last checkpoint that exists; -1 for a new run.
    """

    def __init__(
        self,
        config: RunConfig,
        saver: Saver,
        activities: Activities,
        *,
        unused: Mapping[str, Tensor],
        length: int,
        saved: int,
    ) -> None:
        self._config, self._saver = config, saver
        self._activities, self._unused, self._length = activities, unused, length
        self.saved = saved

    def is_due(self, step: int, steps: int) -> bool:
        """True if a checkpoint is due after a step of a run of so many: every `--save-every` steps,
        and after the last."""
        every = self._config.save_every
        return every > 0 and (step % every == 0 or step == steps)

    def save(self, rank: Rank, progress: Progress) -> None:
        """Copies the state after a step and starts writing it. Raises CheckpointError when the
        previous checkpoint could not be written."""
        if progress.step == self.saved:
            return
        self.saved = progress.step
        self._saver.finish()
        with self._activities.during(Activity("writing", "copies its state for a checkpoint")):
            part = CheckpointPart(weights_of(rank, self._unused), state_of(rank))
        self._saver.save(part, self._facts(rank, progress))

    def hand_over(self, rank: Rank, progress: Progress) -> FoundCheckpoint:
        """The state after a step in memory, for ranks with other stages. Collective among
        replicas."""
        with self._activities.during(Activity("other", "copies its state for other stages")):
            held = HandOver(rank, self._unused)
        return FoundCheckpoint(Path(), self._facts(rank, replace(progress, schedule="")), held)

    def _facts(self, rank: Rank, progress: Progress) -> Facts:
        return Facts(
            plan=rank.plan.name,
            stages=len(rank.plan.stages),
            ranks=rank.world.ranks,
            replicas=rank.world.replicas,
            length=self._length,
            settings=asdict(self._config),
            **{entry.name: getattr(progress, entry.name) for entry in fields(progress)},
        )

    def poll(self) -> None:
        """Reports the checkpoints that were completed meanwhile."""
        self._saver.poll()

    def finish(self) -> None:
        """Waits until the last checkpoint is on disk. Raises CheckpointError."""
        self._saver.finish()


def resume(
    rank: Rank, checkpoint: FoundCheckpoint, config: RunConfig, trainer: OptimizerStepper
) -> None:
    """Restores the state of a checkpoint on a rank whose stages already have its weights.

    Raises CheckpointError when its files cannot be read or do not fit this run.
    """
    facts = checkpoint.facts
    was_async = facts.settings.get("schedule") in ASYNCHRONOUS
    has_optimizer = _is_same(str(facts.settings.get("optimizer")), config.optimizer)
    each_has_own = rank.is_async and was_async and facts.stages == len(rank.plan.stages)
    wanted = Wanted(rank)
    if checkpoint.held is not None:
        state = checkpoint.held.take(rank)
    else:
        state = read_tensors(
            checkpoint.path / STATE,
            lambda key: wanted(key) and (has_optimizer or not key.startswith("optimizer.")),
            wanted.read,
        )
    try:
        put(rank, state, facts.step, each_has_own=each_has_own)
        trainer.load(facts.trainer)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this run: {type(error).__name__}: {error}",
            f"--init-from {checkpoint.path} uses only its weights.",
        ) from error


def _is_same(before: str, now: str) -> bool:
    """True for one optimizer; the file of the user's own may have moved."""
    return before == now or (":" in now and Path(before).name == Path(now).name)


def check_model(plan: Plan, folder: Path, checkpoint: FoundCheckpoint) -> None:
    """Raises CheckpointError for a checkpoint of another model than that of the generated folder,
    if that folder has weights to compare with."""
    if not (folder / WEIGHTS).is_dir():
        return
    planned, stored = shapes_in(folder / WEIGHTS), shapes_in(checkpoint.path / WEIGHTS)
    names = [name for name in plan.state_keys if name in planned and name not in plan.unused]
    lacking = [name for name in names if name not in stored]
    other = [name for name in names if name in stored and stored[name] != planned[name]]
    if not lacking and not other:
        return
    message = (
        f"{checkpoint.path} is a checkpoint of {checkpoint.facts.plan} and does not fit {plan.name}"
    )
    if lacking:
        message += f": it lacks {len(lacking)} of {len(names)} tensors, the first is {lacking[0]}."
    else:
        name = other[0]
        message += (
            f": {len(other)} of {len(names)} tensors differ in shape, the first is {name}: "
            f"{stored[name]} in the checkpoint, {planned[name]} in the plan."
        )
    raise CheckpointError(
        message,
        f"Resume it with {checkpoint.facts.settings.get('folder')}, or with another partition of "
        "that model.",
    )


def check_steps(config: RunConfig, checkpoint: FoundCheckpoint) -> None:
    """Raises PlanError for a checkpoint that is beyond the run's last step."""
    path, step = checkpoint.path, checkpoint.facts.step
    if step > config.steps:
        raise PlanError(
            f"{path} is of step {step}, but the run has {config.steps} steps.",
            f"--steps {step} or more, or --init-from {path} for a new run.",
        )


def describe_resumption(
    checkpoint: FoundCheckpoint, config: RunConfig, length: int, steps: int
) -> list[str]:
    """The step from which a run of so many steps resumes, in data of `length` samples, and the
    changes since."""
    facts = checkpoint.facts
    lines = [
        f"after step {facts.step} of {steps}, {facts.samples:,} samples "
        f"({facts.samples / length:.2f} epochs) · {checkpoint.path}"
    ]
    if changed := differences(facts.settings, config):
        lines.append(f"with {', '.join(changed)}")
    if facts.length != length:
        lines.append(
            f"the data have {length:,} samples instead of {facts.length:,} and so another order: "
            "some samples come twice in this epoch, others not at all"
        )
    return lines


class Stopped(Ended):
    """The run was asked to stop and has written its checkpoint."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class Stopping:
    """One rank's handling of a stop, as a context manager.

    last: the last step of the run; None until a stop is agreed on.
    reason: the name of the signal.

    Arguments:
    board: the store through which the ranks agree.
    patience_s: how long to wait for other ranks.
    beat_s: how often its thread looks for a stop on other ranks.
    signals: those that ask for a stop.
    """

    def __init__(
        self,
        board: SharedStore,
        *,
        patience_s: float,
        beat_s: float = 0.2,
        signals: Sequence[signal.Signals] = STOPPING,
    ) -> None:
        self.last: int | None = None
        self.reason = ""
        self._board, self._patience_s, self._beat_s = board, patience_s, beat_s
        self._begun = 0
        self._is_open, self._lock = True, threading.Lock()
        self._signal = ""
        self._requested, self._ended, self._agreed = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._watch, name="stopping", daemon=True)
        self._handled = handled(signals, self._hear)

    def __enter__(self) -> Stopping:
        self._handled.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._requested.set()
        # The thread may wait for an unreachable store, which must not delay the error.
        self._thread.join(None if error is None else 2 * self._beat_s)
        self._handled.__exit__(None, None, None)

    def may(self, step: int) -> bool:
        """True if this rank may run a step, counted from 1; the step then counts as begun.

        Raises TransportError if reports of other ranks are missing.
        """
        if step <= self._begun:
            return True
        with self._lock:
            if self._is_open:
                self._begun = step
                return True
        if not self._agreed.wait(self._patience_s):
            raise TransportError(
                f"the run was asked to stop ({self.reason}), but some ranks did not report their "
                "step."
            )
        assert self.last is not None
        self._begun = self.last
        return step <= self.last

    def request(self, reason: str) -> None:
        """Asks all ranks to stop; returns at once."""
        self._signal = reason
        self._requested.set()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def _watch(self) -> None:
        # The main thread reports a rank that is gone.
        with contextlib.suppress(RuntimeError, TransportError):
            while not self._ended.is_set():
                if self._signal:
                    self._board.post("stop", self._signal)
                if (reason := self._board.read("stop")) is not None:
                    self._agree(reason)
                    return
                self._requested.wait(self._beat_s)

    def _agree(self, reason: str) -> None:
        self.reason = reason
        with self._lock:
            self._is_open = False
        self._board.post_own("begun", str(self._begun))
        steps = self._board.gathered("begun", wait_s=self._patience_s, is_over=self._ended.is_set)
        if steps:
            self.last = max(map(int, steps))
            self._agreed.set()


def save_weights(
    plan: Plan,
    config: RunConfig,
    folder: Path,
    states: Mapping[int, Mapping[str, Tensor]],
    unused: Mapping[str, Tensor],
    world: World,
    activities: Activities,
) -> None:
    """Writes the weights, and exports them if requested; every rank calls it. `states` and `unused`
    are as for `write_weights`."""
    targets = [folder / "weights", *([Path(config.export_hf)] if config.export_hf else [])]
    for target in targets:
        with activities.during(Activity("writing", "writes the weights")):
            write_weights(target, plan, states, unused, world)
    if config.export_hf and world.rank == 0:
        copy_configuration(Path(config.export_hf), Path(config.folder))
    with activities.during(Activity("meet", "the weights are written")):
        world.meet()
