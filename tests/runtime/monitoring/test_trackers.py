"""`--log`: the trackers that log a run in addition to its terminal; none of them can end it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import asyncpipe
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.launch.launch import run
from asyncpipe.runtime.monitoring import trackers
from asyncpipe.runtime.monitoring.records import HOOKS, EvalRecord, Reporter
from asyncpipe.runtime.monitoring.trackers import CompositeReporter, numbers_of
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of
from asyncpipe.tests.support.run_configs import run_config

OWN = """
import asyncpipe

class Own(asyncpipe.Reporter):
    def __init__(self, folder):
        self.file = folder / "own.txt"

    def on_start(self, start):
        self.file.write_text(start.facts[0][0] + "\\n")

    def on_step(self, record):
        with self.file.open("a") as file:
            file.write(f"{record.step} {record.logged}\\n")

    def on_end(self, summary):
        with self.file.open("a") as file:
            file.write(f"end {summary.steps}\\n")

    def on_failure(self, text):
        with self.file.open("a") as file:
            file.write(f"failure {text}\\n")

class Failing(Own):
    def on_step(self, record):
        raise OSError("no network")

def make(settings, folder):
    return Own(folder)

def failing(settings, folder):
    return Failing(folder)

def poor(settings, folder):
    return object()

def broken(settings, folder):
    raise ValueError("not here")
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    write_mlp(tmp_path / "mlp")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def train(folder: Path, log: str, **options: Any) -> Path:
    """A run in this process; its folder."""
    output = folder / "run"
    given = {"steps": 4, "log_every": 2, "micro_batches": 2, "threads": 1, "schedule": "single"}
    settings = Settings(
        folder=str(folder / "mlp"), output=str(output), log=log, **(given | options)
    )
    run(settings, FACTORY)
    return output


def test_the_users_own_reporter_is_told_of_every_step(made: Path) -> None:
    output = train(made, f"{made / 'own.py'}:make")
    lines = (output / "own.txt").read_text().splitlines()
    assert lines == ["plan", "1 True", "2 True", "3 False", "4 True", "end 4"]
    assert asyncpipe.Reporter is Reporter


def test_a_tracker_that_fails_is_told_no_more_and_the_run_goes_on(made: Path) -> None:
    name = f"{made / 'own.py'}:failing"
    output = train(made, f"{name},{made / 'own.py'}:make")
    assert events_of(output, "warning") == [
        f"--log {name} failed (OSError: no network); the run continues without it."
    ]
    assert len(events_of(output, "step")) == 4 and events_of(output, "end")
    assert (output / "own.txt").read_text().endswith("end 4\n")


def test_what_is_no_reporter_is_refused_before_a_step(made: Path) -> None:
    for name, words in (("poor", "lacks on_start, on_step"), ("broken", "ValueError: not here")):
        with pytest.raises(SettingsError, match=words):
            trackers.open_trackers(run_config(log=f"{made / 'own.py'}:{name}"), made)


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_e2_a_tracker_that_is_not_installed_names_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(SettingsError) as refused:
        trackers.check_log(Settings(folder="x", log=f"a.b:c,{name}"))
    assert refused.value.what == f"--log {name} needs {name}, which is not installed."
    package = {"mlflow": "mlflow-skinny"}.get(name, name)
    assert refused.value.cure.startswith(f"pip install '{package}>=")


def test_a_tracker_that_nobody_knows_gets_the_nearest_name() -> None:
    with pytest.raises(SettingsError) as refused:
        trackers.check_log(Settings(folder="x", log="wandbb"))
    assert refused.value.cure == "Did you mean wandb?"
    with pytest.raises(SettingsError) as refused:
        trackers.check_log(Settings(folder="x", log="paper"))
    assert "tensorboard, wandb, mlflow, trackio" in refused.value.cure


def test_all_hooks_reach_every_reporter() -> None:
    called: list[str] = []
    listener = Reporter()
    for hook in HOOKS:
        setattr(listener, hook, lambda *_, hook=hook: called.append(hook))
    both = CompositeReporter([listener], {"again": listener})
    arguments = {"on_note": 2, "on_timelines": 3}
    for hook in HOOKS:
        assert hook in vars(CompositeReporter), f"{hook} is not handed on"
        getattr(both, hook)(*[""] * arguments.get(hook, 1))
    assert called == [hook for hook in HOOKS for _ in range(2)]


def test_the_numbers_of_a_record_have_names_and_only_numbers_are_told() -> None:
    record = EvalRecord(step=3, loss=0.5, accuracy=None, batches=2, samples=4, length=9)
    assert numbers_of("eval", record) == {
        "eval/loss": 0.5,
        "eval/batches": 2.0,
        "eval/samples": 4.0,
        "eval/length": 9.0,
    }


# --- trackers, as stand-ins that have the signatures of the real ones


class Calls:
    """Records calls; every function of it is made by `of`."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    def note(self, name: str, /, **given: Any) -> None:
        self.made.append((name, given))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [given for call, given in self.made if call == name]


MLFLOW_STATES = {"FINISHED": 0, "FAILED": 1, "KILLED": 143}


class StandInRun:
    """The run of wandb and of trackio."""

    notes = ""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.config = self

    def update(self, values: dict[str, Any]) -> None:
        self._calls.note("config", **values)


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls, module = Calls(), ModuleType(name)

    class WandbRun(StandInRun):
        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            calls.note("log", data=data, step=step)

        def finish(self, exit_code: int | None = None) -> None:
            calls.note("finish", exit_code=exit_code)

        def mark_preempting(self) -> None:
            calls.note("preempting")

    class TrackioRun(StandInRun):
        def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
            calls.note("log", data=metrics, step=step)

        def finish(self) -> None:
            calls.note("finish", exit_code=0)

    def init(project: str, name: str, config: dict[str, Any], **more: Any) -> StandInRun:
        calls.note("init", project=project, name=name, config=config, **more)
        return (WandbRun if module.__name__ == "wandb" else TrackioRun)(calls)

    made: dict[str, Any] = {"init": init, "Settings": dict}
    if name == "mlflow":
        made = {
            "set_experiment": lambda experiment_name: calls.note("init", project=experiment_name),
            "start_run": lambda run_name: calls.note("start", name=run_name),
            "log_params": lambda params: calls.note("config", **params),
            "log_artifact": lambda local_path: calls.note("artifact", path=local_path),
            "log_metrics": lambda metrics, step: calls.note("log", data=metrics, step=step),
            "end_run": lambda status: calls.note("finish", exit_code=MLFLOW_STATES[status]),
            "set_tag": lambda key, value: calls.note("tag", **{key: value}),
        }
    for key, value in made.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"asyncpipe.runtime.trackers.{name}", raising=False)
    monkeypatch.setattr(trackers, "find_spec", lambda name: module)
    return calls


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_is_given_the_options_the_logged_steps_and_the_end(
    made: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = stand_in(name, monkeypatch)
    train(made, name)
    (begun,) = calls.named("init")
    assert begun["project"] == "mlp"
    (options,) = [
        given for given in (*calls.named("config"), begun.get("config", {})) if "steps" in given
    ]
    assert options["steps"] == 4
    logged = calls.named("log")
    assert [given["step"] for given in logged] == [1, 2, 4, 4, 4]  # steps, evaluation, summary
    assert {"train/loss", "train/idle_share", "train/busy_shares/0"} <= logged[0]["data"].keys()
    assert "eval/loss" in logged[3]["data"] and "summary/idle_parts/bubble" in logged[4]["data"]
    assert all(isinstance(value, float) for given in logged for value in given["data"].values())
    assert calls.named("finish") == [{"exit_code": 0}]
    assert calls.made[-1][0] == "finish"


def test_a_tracker_is_told_that_the_run_failed(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in("wandb", monkeypatch)
    (made / "failing.py").write_text("def data():\n    raise ValueError('absent')\n")
    with pytest.raises(Exception, match="absent"):
        train(made, "wandb", data=str(made / "failing.py") + ":data")
    assert calls.named("finish") == [{"exit_code": 1}]


STOPPING = """
import os, signal
from torch.nn.functional import cross_entropy

def criterion(outputs, target):
    os.kill(os.getpid(), signal.SIGTERM)
    return cross_entropy(outputs, target)
"""


@pytest.mark.parametrize(("name", "code"), [("wandb", 143), ("mlflow", 143), ("trackio", 0)])
def test_a_tracker_is_told_that_the_run_was_stopped(
    made: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    calls = stand_in(name, monkeypatch)
    (made / "stopping.py").write_text(STOPPING)
    with pytest.raises(SystemExit):
        train(
            made,
            f"{name},{made / 'own.py'}:make",
            steps=5000,
            criterion=f"{made}/stopping.py:criterion",
        )
    assert calls.named("finish") == [{"exit_code": code}]
    assert len(calls.named("preempting")) == (name == "wandb")
    assert (
        (made / "run" / "own.txt")
        .read_text()
        .endswith("failure it was asked to stop (exit code 143)\n")
    )


def test_tensorboard_files_have_the_numbers_of_the_run(made: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = train(made, "tensorboard")
    found = EventAccumulator(str(output / "tensorboard"))
    found.Reload()
    losses = {event.step: event.value for event in found.Scalars("train/loss")}
    told = {record["step"]: record["loss"] for record in events_of(output, "step")}
    assert losses == pytest.approx({step: told[step] for step in (1, 2, 4)})
    assert "summary/idle" in found.Tags()["scalars"]
