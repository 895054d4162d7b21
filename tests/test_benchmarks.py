"""The foundations of the benchmarks: a process that dies costs its case and not the run."""

import ast
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncpipe.tests.support.models.finetune_archives import write_stand_in
from asyncpipe.tests.support.processes.quick_python import bin_folder

FOLDER = Path(__file__).parent.parent / "benchmarks"


def imported(module: str, name: str) -> object:
    with suppress(ImportError):
        return importlib.import_module(f"{module}.{name}")
    return getattr(importlib.import_module(module), name, None)


def test_every_name_that_a_benchmark_imports_exists() -> None:
    names = {
        (node.module, alias.name)
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asyncpipe")
        for alias in node.names
    }
    assert [name for name in sorted(names) if imported(*name) is None] == []


def test_the_table_of_throughput_is_made_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    tables = importlib.import_module("tables")
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    assert tables.written(page) == page and page.count("%") > 50


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield pytest.importorskip("workers")


@pytest.mark.parametrize(
    ("function", "cases", "limit_s", "why"),
    [
        (os._exit, [3], 60.0, "exit status 3"),
        (time.sleep, [0, 60], 8.0, "took over 8 s"),
    ],
)
def test_a_case_that_ends_its_process_is_named(
    workers: ModuleType,
    function: Callable[[Any], Any],
    cases: list[int],
    limit_s: float,
    why: str,
) -> None:
    answers = dict(workers.each(function, cases, processes=1, limit_s=limit_s))
    assert why in answers[cases[-1]].why
    assert all(answers[case] is None for case in cases[:-1])


def test_every_case_is_answered_once(workers: ModuleType) -> None:
    cases = [-3, 4, -5]
    answers = workers.each(abs, cases, processes=2, limit_s=60.0, cases_a_process=1)
    assert sorted(answers) == [(-5, 5), (-3, 3), (4, 4)]


@pytest.fixture
def finetuning(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield pytest.importorskip("finetuning")


def tuned(name: str, seed: int, accuracy: float, step_ms: float, others: float) -> dict[str, Any]:
    return {
        "configuration": name,
        "seed": seed,
        "late_steps": 0,
        "accuracy": accuracy,
        "loss": 0.5,
        "step_ms": step_ms,
        "training_s": step_ms / 10,
        "command_s": step_ms / 10 + 9,
        "others_share": others,
    }


def test_accuracies_are_of_all_runs_and_times_of_quiet_ones(finetuning: ModuleType) -> None:
    rows = [
        tuned("1f1b", 1, 0.8, 100.0, 0.01),
        tuned("1f1b", 2, 0.7, 900.0, 0.5),
        tuned("async", 1, 0.6, 900.0, 0.5),
    ]
    first, second = finetuning.table_of(rows)
    assert (first["accuracy"], first["least"], first["most"]) == (pytest.approx(0.75), 0.7, 0.8)
    assert (first["seeds"], first["quiet"], first["step_ms"]) == (2, 1, 100.0)
    assert (second["quiet"], second["step_ms"]) == (0, None)
    text = finetuning.shown({"accuracy": 0.5, "loss": 0.7, "samples": 9}, [first, second])
    assert "75.0% (70.0% - 80.0%)" in text and text.splitlines()[-1].endswith("-")


def test_a_run_that_is_repeated_takes_the_place_of_the_older(finetuning: ModuleType) -> None:
    rows = [tuned("1f1b", 1, 0.8, 100.0, 0.5), tuned("async", 1, 0.6, 90.0, 0.5)]
    again = tuned("1f1b", 1, 0.8, 99.0, 0.01)
    assert finetuning.with_row(rows, again) == [again, rows[1]]
    assert len(finetuning.with_row(rows, tuned("1f1b", 2, 0.8, 99.0, 0.01))) == 3


def test_rows_of_another_setting_are_not_kept(finetuning: ModuleType, tmp_path: Path) -> None:
    setting = finetuning.Setting(steps=2, batch=16, lr=1e-3)
    result = tmp_path / "result.json"
    assert finetuning.known_rows(setting, result) == []
    result.write_text(json.dumps({"setting": vars(setting), "rows": [1]}))
    assert finetuning.known_rows(setting, result) == [1]
    assert finetuning.known_rows(finetuning.Setting(3, 16, 1e-3), result) == []


def test_fine_tuning_is_measured_from_the_archives_to_the_table(
    finetuning: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_stand_in(tmp_path)
    (tmp_path / "examples").symlink_to(FOLDER.parent / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetuning, "SCRIPTS", bin_folder())
    monkeypatch.setattr(finetuning, "RESULT", tmp_path / "none.json")
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(finetuning, "write_result", lambda name, figures: written.append(figures))
    options = ["--stages", "2", "--methods", "none", "--steps", "3", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", ["finetuning.py", *options])
    finetuning.main()
    rows, before = written[-1]["rows"], written[-1]["before"]
    assert [row["configuration"] for row in rows] == [
        "plain model, 1 thread",
        "plain model, 2 threads",
        "1f1b, 2 ranks",
        "async-1f1b none, 2 ranks",
    ]
    assert before["samples"] == 35 and 0 <= before["accuracy"] <= 1
    assert all(row["accuracy"] is not None and row["step_ms"] > 0 for row in rows)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-3)
    assert "before training" in capsys.readouterr().out


def test_the_document_shows_the_table_of_the_result_file(finetuning: ModuleType) -> None:
    known = json.loads((FOLDER / "results" / "finetuning.json").read_text())
    assert known["table"] == finetuning.table_of(known["rows"])
    table = finetuning.shown(known["before"], known["table"])
    assert f"```text\n{table}\n```" in (FOLDER.parent / "docs" / "fine-tuning.md").read_text()


def test_the_document_shows_what_was_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    faults = pytest.importorskip("faults")
    known = json.loads((FOLDER / "results" / "faults.json").read_text())
    assert known["table"] == faults.table_of(known["rows"])
    assert {row["fault"] for row in known["table"]} == {*faults.FAULTS}
    table = faults.shown(known["table"])
    assert f"```text\n{table}\n```" in (FOLDER.parent / "docs" / "failures.md").read_text()


@pytest.mark.parametrize(
    ("task", "model", "fields"),
    [
        ("image", "TextNetForImageClassification", {"image_size": [64, 64]}),
        ("causal", "KimiLinearForCausalLM", {"linear_num_heads": 4, "linear_head_dim": 8}),
    ],
)
def test_the_models_of_the_coverage_are_small(
    task: str, model: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    pytest.importorskip("transformers")
    rows = json.loads((FOLDER / "results/coverage.json").read_text())["rows"]
    (attempt,) = [row["attempt"] for row in rows if (row["task"], row["class"]) == (task, model)]
    config = importlib.import_module("tiny_models").Recipe(task, model, attempt).config()
    assert {name: getattr(config, name) for name in fields} == fields
