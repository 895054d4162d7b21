"""`--log NAMES` -> reporters that send a run to experiment trackers, and one that combines all.

Each tracker receives the numbers of the records by name:

    mlflow       a run in the experiment named after the generated folder; MLFLOW_TRACKING_URI,
                 MLFLOW_EXPERIMENT_NAME and its other variables apply. The extra installs the
                 client; the whole mlflow package adds a database of its own.
    tensorboard  event files in the run's folder, for `tensorboard --logdir runs`
    trackio      a run on Trackio's local dashboard, `trackio show`, without an account
    wandb        a run in the project named after the generated folder; WANDB_PROJECT, WANDB_NAME,
                 WANDB_MODE=offline and its other variables apply
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..config.execution_options import ExecutionOptions
from ..config.settings import RunConfig, SettingsError
from ..distributed.process_groups import World
from ..errors import why_ended
from ..extras import install
from ..formatting import kind_of
from ..process import STOPPED, Ended
from ..rng import drawing_from, import_seeded
from ..schedule.simulate import Timeline
from ..user_code import names_object, user_errors_as
from .records import HOOKS, EvalRecord, MetricsFile, Reporter, StartRecord, StepRecord, Summary
from .run_files import CONFIG, METRICS

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""The trackers; their packages and the extras that install these have the same names."""


def names_of(options: ExecutionOptions) -> tuple[str, ...]:
    """The names in `--log`."""
    return tuple(name.strip() for name in (options.log or "").split(",") if name.strip())


def check_log(options: ExecutionOptions) -> None:
    """Raises SettingsError for an unknown tracker, or one whose package is missing."""
    for name in names_of(options):
        if name in TRACKERS:
            if find_spec(name) is None:
                raise SettingsError(
                    f"--log {name} needs {name}, which is not installed.",
                    install(name),
                )
        elif not names_object(name):
            near = difflib.get_close_matches(name, TRACKERS, 1)
            own = "or your own package.module:factory or path/file.py:factory"
            raise SettingsError(
                f"--log {name} is not known.",
                f"Did you mean {near[0]}?" if near else f"Choose {', '.join(TRACKERS)}, {own}.",
            )


def open_trackers(config: RunConfig, folder: Path) -> dict[str, Reporter]:
    """The reporters that `--log` lists, by name, for the run in `folder`.

    Raises SettingsError for a user's factory that fails or returns something else.
    """
    with drawing_from(config.seed, "trackers"):
        return {name: _opened(name, config, folder) for name in names_of(config)}


def _opened(name: str, config: RunConfig, folder: Path) -> Reporter:
    with user_errors_as(SettingsError, f"--log {name}"):
        if name in TRACKERS:
            factory = _OPEN[name]
        else:
            factory = import_seeded(name, "--log", SettingsError, config.seed)
        reporter: Reporter = factory(config, folder)
    missing = [hook for hook in HOOKS if not callable(getattr(reporter, hook, None))]
    if missing:
        raise SettingsError(
            f"--log {name} returned {kind_of(reporter)}, which lacks {', '.join(missing)}.",
            "Subclass asyncpipe.Reporter and override what you need.",
        )
    return reporter


Ending = Literal["finished", "stopped", "failed"]
"""After all its steps; after a request to stop, to be resumed later; or because of an error."""
_NO_MEASURE = frozenset({"step", "event"})


class Tracker(Reporter):
    """Passes on the numbers of a run; only logged steps."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Logs numbers after a step, by name."""
        raise NotImplementedError

    def finish(self, ending: Ending) -> None:
        """Ends the run; writes everything that is pending."""
        raise NotImplementedError

    def on_step(self, record: StepRecord) -> None:
        if record.logged:
            self.log(numbers_of("train", record), record.step)

    def on_eval(self, record: EvalRecord) -> None:
        self.log(numbers_of("eval", record), record.step)

    def on_end(self, summary: Summary) -> None:
        self.log(numbers_of("summary", summary), summary.steps)
        self.finish("finished")

    def on_stop(self, text: str) -> None:
        self.finish("stopped")

    def on_failure(self, text: str) -> None:
        self.finish("failed")


def numbers_of(prefix: str, record: StepRecord | EvalRecord | Summary) -> dict[str, float]:
    """All numbers of a record, as `train/loss` and `train/busy_shares/0`."""
    return {
        f"{prefix}/{name}": value
        for name, value in _flat(json.loads(record.to_json()))
        if name not in _NO_MEASURE
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _flat(part, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, float(value)


def project_of(config: RunConfig) -> str:
    """The name under which the runs of a model are grouped: that of the generated folder."""
    return Path(config.folder).resolve().name


def facts_of(start: StartRecord) -> str:
    """The facts of the run as lines of Markdown."""
    return "\n".join(f"- **{name}**: {text}" for name, text in start.facts)


_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlFlow(Tracker):
    """Logs metrics by step, the options as parameters, and the file that repeats the run."""

    def __init__(self, mlflow: Any, config: RunConfig, folder: Path) -> None:
        self._mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or project_of(config))
        mlflow.start_run(run_name=folder.name)
        given = {name: value for name, value in asdict(config).items() if value is not None}
        mlflow.log_params(given)
        mlflow.log_artifact(str(folder / CONFIG))

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def finish(self, ending: Ending) -> None:
        self._mlflow.end_run(_STATES[ending])

    def on_start(self, start: StartRecord) -> None:
        self._mlflow.set_tag("mlflow.note.content", facts_of(start))


def open_mlflow(config: RunConfig, folder: Path) -> MlFlow:
    """Opens the tracker of a run."""
    import mlflow

    return MlFlow(mlflow, config, folder)


FOLDER = "tensorboard"
_FLUSH_S = 10
"""The seconds of metrics that a killed run loses at most."""


class TensorBoard(Tracker):
    """Logs scalars by step; facts, notes and warnings as text."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._step = 0

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._step = step
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, ending: Ending) -> None:
        self._writer.close()

    def on_start(self, start: StartRecord) -> None:
        self._writer.add_text("run", facts_of(start), 0)

    def on_note(self, about: str, text: str) -> None:
        self._writer.add_text(about, text, self._step)

    def on_warning(self, text: str) -> None:
        self._writer.add_text("warning", text, self._step)


def open_tensorboard(config: RunConfig, folder: Path) -> TensorBoard:
    """Opens the tracker of a run."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter
    return TensorBoard(writer(str(folder / FOLDER), flush_secs=_FLUSH_S))


class Trackio(Tracker):
    """Logs numbers by step; the options and facts as configuration, once the run begins. Its own
    output goes to standard error, as standard output belongs to the run."""

    def __init__(self, trackio: Any, config: RunConfig, folder: Path) -> None:
        self._trackio, self._config, self._folder = trackio, config, folder
        self._run: Any = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def finish(self, ending: Ending) -> None:
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()

    def on_start(self, start: StartRecord) -> None:
        with redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=os.environ.get("TRACKIO_PROJECT") or project_of(self._config),
                name=self._folder.name,
                config=asdict(self._config) | {"facts": dict(start.facts)},
            )


def open_trackio(config: RunConfig, folder: Path) -> Trackio:
    """Opens the tracker of a run."""
    import trackio

    return Trackio(trackio, config, folder)


_CODES = {"finished": 0, "stopped": STOPPED, "failed": 1}


class WeightsAndBiases(Tracker):
    """Logs numbers by step, the options as configuration, the facts as notes of the run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def finish(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()  # otherwise an exit code other than 0 counts as a failure
        self._run.finish(exit_code=_CODES[ending])

    def on_start(self, start: StartRecord) -> None:
        self._run.notes = facts_of(start)
        self._run.config.update({"environment": dict(start.environment)})


def open_wandb(config: RunConfig, folder: Path) -> WeightsAndBiases:
    """Opens the tracker of a run."""
    import wandb

    return WeightsAndBiases(
        wandb.init(
            project=os.environ.get("WANDB_PROJECT") or project_of(config),
            name=os.environ.get("WANDB_NAME") or folder.name,
            dir=str(folder),
            config=asdict(config),
            settings=wandb.Settings(silent=config.quiet or config.json),
        )
    )


class CompositeReporter(Reporter):
    """Passes events to several reporters; a tracker that raises is dropped with a warning.

    Random numbers that trackers draw depend on the seed and the number of the call, and leave the
    run's own random state unchanged.

    Arguments:
    own: the reporters of the run itself.
    trackers: the trackers by name.
    """

    def __init__(
        self, own: Sequence[Reporter], trackers: Mapping[str, Reporter], seed: int = 0
    ) -> None:
        self._own, self._trackers = own, dict(trackers)
        self._seed, self._calls = seed, 0

    def on_start(self, start: StartRecord) -> None:
        self._notify(lambda reporter: reporter.on_start(start))

    def on_step(self, record: StepRecord) -> None:
        self._notify(lambda reporter: reporter.on_step(record))

    def on_eval(self, record: EvalRecord) -> None:
        self._notify(lambda reporter: reporter.on_eval(record))

    def on_note(self, about: str, text: str) -> None:
        self._notify(lambda reporter: reporter.on_note(about, text))

    def on_warning(self, text: str) -> None:
        self._notify(lambda reporter: reporter.on_warning(text))

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        self._notify(lambda reporter: reporter.on_timelines(costs, simulated, measured))

    def on_end(self, summary: Summary) -> None:
        self._notify(lambda reporter: reporter.on_end(summary))

    def on_stop(self, text: str) -> None:
        self._notify(lambda reporter: reporter.on_stop(text))

    def on_failure(self, text: str) -> None:
        self._notify(lambda reporter: reporter.on_failure(text))

    def _notify(self, tell: Callable[[Reporter], None]) -> None:
        for reporter in self._own:
            tell(reporter)
        self._calls += 1
        for name, tracker in list(self._trackers.items()):
            try:
                with drawing_from(self._seed, "tracker", name, self._calls):
                    tell(tracker)
            except Exception as error:
                self._trackers.pop(name, None)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self.on_warning(f"--log {name} failed ({reason}); the run continues without it.")
            except BaseException:  # it ends the run; do not report that to it again
                del self._trackers[name]
                raise


@contextmanager
def reporting(
    config: RunConfig, folder: Path, world: World, make_shown: Callable[[RunConfig], Reporter]
) -> Iterator[Reporter | None]:
    """The reporters of a run on rank 0, None on the others; errors are reported and raised
    again."""
    if world.rank != 0:
        yield None
        return
    own = [MetricsFile(folder / METRICS), make_shown(config)]
    reporter = CompositeReporter(own, open_trackers(config, folder), config.seed)
    try:
        yield reporter
    except Ended as stopped:
        reporter.on_stop(why_ended(stopped))
        raise
    except BaseException as error:
        reporter.on_failure(why_ended(error))
        raise


_OPEN: Mapping[str, Callable[[RunConfig, Path], Reporter]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
    "trackio": open_trackio,
}
