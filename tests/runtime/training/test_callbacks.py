"""`--callbacks`: all ranks act on the requests of an object on rank 0 after the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import asyncpipe
from asyncpipe.runtime.checkpoint.folders import checkpoints_in
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import as_ended_at, left_by
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

OWN = """
import json
from asyncpipe import Request


class Seen:
    def __init__(self, folder):
        self.path = folder / "seen.jsonl"

    def _see(self, *values):
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\\n")

    def on_step(self, record):
        self._see("step", record.step, record.lr)

    def on_evaluation(self, record):
        self._see("evaluation", record.step, record.loss)

    def on_checkpoint(self, step):
        self._see("checkpoint", step)

    def on_end(self, summary):
        self._see("end", summary.steps)


def seen(config, folder):
    return Seen(folder)


class Acting(Seen):
    def on_step(self, record):
        super().on_step(record)
        if record.step == 2:
            return Request(save=True)
        if record.step == 3:
            return Request(evaluate=True)
        if record.step == 5:
            return Request(stop=True)

    def on_evaluation(self, record):
        super().on_evaluation(record)
        return Request(lr_factor=0.5)


def acting(config, folder):
    return Acting(folder)


class Halving:
    def on_step(self, record):
        return Request(lr_factor=0.5) if record.step == 2 else None


def halving(config, folder):
    return Halving()


class Broken:
    def on_step(self, record):
        raise ValueError("no step")


def broken(config, folder):
    return Broken()


class Wrong:
    def __init__(self, answer):
        self.answer = answer

    def on_step(self, record):
        return self.answer


def word(config, folder):
    return Wrong("stop")


def endless(config, folder):
    return Wrong(Request(lr_factor=float("inf")))


def nothing(config, folder):
    return None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    (folder / "own_callbacks.py").write_text(OWN)
    return folder


def train(folder: Path, output: Path, own: str | None, **options: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"folder": str(folder / "mlp"), "output": str(output), "threads": 1}
    given |= {"schedule": "single", "steps": 8, "micro_batches": 2, "log_every": 1, "pin": "none"}
    given |= {"decay": "none", "warmup": 0, "lr": 0.1, "eval_batches": 2, **options}
    named = None if own is None else f"{folder / 'own_callbacks.py'}:{own}"
    run(Settings(**given, callbacks=named), FACTORY)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def seen(output: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (output / "seen.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("schedule", ["single", "1f1b"])
def test_requests_are_done_after_the_step_that_made_them(
    folder: Path, tmp_path: Path, schedule: str
) -> None:
    lines = train(folder, tmp_path / "run", "acting", schedule=schedule)
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if line["event"] == "eval"] == [3, 5]
    (found,) = checkpoints_in(tmp_path / "run")
    assert found.name.endswith("2")
    rates = [line["lr"] for line in lines if line["event"] == "step"]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.05])
    told = seen(tmp_path / "run")
    assert [each[:2] for each in told] == [
        ["step", 1],
        ["step", 2],
        ["checkpoint", 2],
        ["step", 3],
        ["evaluation", 3],
        ["step", 4],
        ["step", 5],
        ["evaluation", 5],
        ["end", 5],
    ]
    assert ["ended", "by --callbacks after step 5 of 8"] in events_of(tmp_path / "run", "note")
    assert (tmp_path / "run" / "weights").is_dir()


def test_an_asynchronous_run_does_it_when_the_pipeline_drains(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "async-1f1b", "flush_every": 4, "steps": 12}
    lines = train(folder, tmp_path / "run", "acting", **options)
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == list(range(1, 9))  # asked at 5, between the drains at 4 and 8
    assert [line["step"] for line in lines if line["event"] == "eval"] == [4, 8]
    (found,) = checkpoints_in(tmp_path / "run")
    assert found.name.endswith("4")


def test_callbacks_that_ask_for_nothing_change_no_number(folder: Path, tmp_path: Path) -> None:
    def figures(lines: list[dict[str, Any]]) -> list[Any]:
        return [line["loss"] for line in lines if line["event"] in ("step", "eval")]

    with_them = train(folder, tmp_path / "with", "seen", eval_every=3)
    assert figures(with_them) == figures(train(folder, tmp_path / "without", None, eval_every=3))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_learning_rate_factor_is_that_of_a_schedule(
    folder: Path, tmp_path: Path, optimizer: str
) -> None:
    (tmp_path / "halves.py").write_text(
        "def f(step, steps):\n    return 1.0 if step < 2 else 0.5\n"
    )
    changed = train(folder, tmp_path / "changed", "halving", optimizer=optimizer)
    options = {"lr_schedule": f"{tmp_path / 'halves.py'}:f", "optimizer": optimizer}
    options |= {"decay": None, "warmup": None}
    planned = train(folder, tmp_path / "planned", None, **options)
    for name in ("loss", "lr"):
        found, expected = (
            [line[name] for line in lines if line["event"] == "step"]
            for lines in (changed, planned)
        )
        assert found == expected


def test_a_resumed_run_keeps_the_factor(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_every": 2, "keep_last": 9}
    train(folder, tmp_path / "whole", "halving", **options)
    whole = left_by(tmp_path / "whole")
    left = as_ended_at(whole, 4, tmp_path / "again")
    train(folder, left, "halving", **options, resume=str(left))
    again = left_by(left)
    assert again.of("lr")[5] == 0.05 and again.of("loss")[8] == whole.of("loss")[8]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("broken", r"on_step failed at .*own_callbacks\.py:\d+: ValueError: no step"),
        ("word", r"on_step returned a str"),
        ("endless", r"on_step asked for the learning rate factor inf"),
        ("nothing", r"returned a NoneType without callbacks"),
        ("missing", r"own_callbacks\.py has no missing"),
    ],
)
def test_what_is_wrong_in_them_is_told_with_its_place(
    folder: Path, tmp_path: Path, own: str, told: str
) -> None:
    with pytest.raises(AsyncPipeError, match=told):
        train(folder, tmp_path / "run", own)


def test_the_document_shows_the_example() -> None:
    root = Path(asyncpipe.__file__).parent
    shown = f"```python\n{(root / 'examples' / 'control.py').read_text()}```"
    assert shown in (root / "docs" / "callbacks.md").read_text()


def test_all_ranks_end_with_the_first_cause(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AsyncPipeError, match=r"on_step failed at .*own_callbacks\.py:\d+"):
        train(folder, tmp_path / "run", "broken", schedule="1f1b")
