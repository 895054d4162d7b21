"""The reporters of a run, told as one: its terminal, its metrics, and those of `--log`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import why_ended
from ..launching.world import World
from ..run_report.records import METRICS
from ..seeding import drawing_from
from ..signals import Ended
from ..timeline import Timeline
from ..trackers.choose import open_trackers
from ..training.settings import Settings
from .metrics import EvalRecord, MetricsFile, Reporter, StartRecord, StepRecord, Summary


class Several(Reporter):
    """Tells each of the `own` reporters, and of the `trackers` by their names those that still
    work: one that raises is not told any more, and the others are warned. What trackers draw
    depends on the seed and the number of the call, and leaves the run's own numbers alone."""

    def __init__(
        self, own: Sequence[Reporter], trackers: Mapping[str, Reporter], seed: int = 0
    ) -> None:
        self._own, self._trackers = own, dict(trackers)
        self._seed, self._calls = seed, 0

    def on_start(self, start: StartRecord) -> None:
        self._each(lambda reporter: reporter.on_start(start))

    def on_step(self, record: StepRecord) -> None:
        self._each(lambda reporter: reporter.on_step(record))

    def on_eval(self, record: EvalRecord) -> None:
        self._each(lambda reporter: reporter.on_eval(record))

    def on_note(self, about: str, text: str) -> None:
        self._each(lambda reporter: reporter.on_note(about, text))

    def on_warning(self, text: str) -> None:
        self._each(lambda reporter: reporter.on_warning(text))

    def on_timelines(self, costs: str, simulated: Timeline, measured: Timeline) -> None:
        self._each(lambda reporter: reporter.on_timelines(costs, simulated, measured))

    def on_end(self, summary: Summary) -> None:
        self._each(lambda reporter: reporter.on_end(summary))

    def on_stop(self, text: str) -> None:
        self._each(lambda reporter: reporter.on_stop(text))

    def on_failure(self, text: str) -> None:
        self._each(lambda reporter: reporter.on_failure(text))

    def _each(self, tell: Callable[[Reporter], None]) -> None:
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
                self.on_warning(f"--log {name} failed ({reason}); the run goes on without it.")
            except BaseException:  # it ends the run, which is not told it again
                del self._trackers[name]
                raise


@contextmanager
def reporting(
    settings: Settings, folder: Path, world: World, make_shown: Callable[[Settings], Reporter]
) -> Iterator[Reporter | None]:
    """The reporters of a run on rank 0, None on the others; an error that passes is told them."""
    if world.rank != 0:
        yield None
        return
    own = [MetricsFile(folder / METRICS), make_shown(settings)]
    reporter = Several(own, open_trackers(settings, folder), settings.seed)
    try:
        yield reporter
    except Ended as stopped:
        reporter.on_stop(why_ended(stopped))
        raise
    except BaseException as error:
        reporter.on_failure(why_ended(error))
        raise
