"""Strategies: runs of one folder side by side, the batch that fits, and which one to take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.experiments.batch_search import Trial, largest, search_batches
from asyncpipe.runtime.experiments.strategies import read_strategies
from asyncpipe.runtime.experiments.sweep import check_finished, plan_sweep, run_sweep
from asyncpipe.runtime.experiments.swept_runs import OUT_OF_MEMORY, advice, tables_of
from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.reports.time_parts import parts_of
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.quick_python import bin_folder

COMMAND = (str(bin_folder() / "python"), str(bin_folder() / "asyncpipe-train"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "mlp"
    write_mlp(folder)
    return folder


def options(folder: Path, output: Path, **given: Any) -> dict[str, Any]:
    return {
        "folder": str(folder), "output": str(output), "steps": 3, "threads": 1, "eval_batches": 1,
        **given,
    }  # fmt: skip


def test_a_strategy_is_a_schedule_and_options() -> None:
    text = "gpipe, 1f1b+replicas=2,async-1f1b+staleness=stash+msnag+lr=0.1,recompute=all"
    assert {each.name: dict(each.options) for each in read_strategies(text)} == {
        "gpipe": {"schedule": "gpipe"},
        "1f1b+replicas=2": {"schedule": "1f1b", "replicas": 2},
        "async-1f1b+staleness=stash+msnag+lr=0.1": {
            "schedule": "async-1f1b",
            "staleness": "stash+msnag",
            "lr": 0.1,
        },
        "recompute=all": {"recompute": "all"},
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1f1b,1f1b", "it is there twice"),
        ("1f1b+lrr=1", "lrr is not an option"),
        ("", "schedule"),
        ("1f1b+replicas", "'replicas' has no value"),
        ("1f1b+lr=0.1", "lr is given by its own flag too"),
        ("1f1b+replicas=2+replicas=3", "replicas is given twice"),
        ("1f1b+output=there", "output cannot differ between runs"),
        ("1f1b+steps=many", "many"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(text: str, error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        read_strategies(text, given={"lr"})


@given(st.integers(0, 3000), st.integers(1, 2000), st.integers(1, 2000))
def test_the_search_ends_within_an_eighth_of_the_largest_that_fits(
    limit: int, start: int, most: int
) -> None:
    tried: list[int] = []

    def trial(size: int) -> Trial:
        tried.append(size)
        return Trial(size <= limit, float(size))

    searched = largest(trial, start, most)
    assert len(tried) == len(set(tried)) <= 25 and all(1 <= size <= most for size in tried)
    assert searched.fits <= min(limit, most)
    if searched.too_large is None:
        assert searched.fits == most
    else:
        assert limit < searched.too_large == searched.needed
        assert searched.too_large - searched.fits <= max(1, searched.fits // 8)


def test_strategies_run_side_by_side_and_one_without_memory_is_a_row(
    folder: Path, tmp_path: Path
) -> None:
    """The last of them needs an exabyte."""
    (tmp_path / "own.py").write_text(
        "import torch\ndef criterion(outputs, target):\n    return torch.empty(2**58).sum()\n"
    )
    ways = f"single,1f1b,gpipe+criterion={tmp_path}/own.py:criterion"
    sweep = plan_sweep(options(folder, tmp_path / "sweep"), {}, read_strategies(ways))
    swept = run_sweep(sweep, COMMAND)
    check_finished(swept)
    single, pipeline, large = swept.ranked
    assert single.loss == pipeline.loss is not None
    assert large.state == OUT_OF_MEMORY and "ran out of memory at step 1" in large.error
    assert swept.waiting == []
    results, parts = tables_of(swept.ranked)
    assert [column.heading for column in results.columns][:4] == [
        "strategy", "batch", "memory of a rank", "throughput",
    ]  # fmt: skip
    assert [row[0] for row in results.rows] == ways.split(",")
    assert [row[0] for row in parts.rows] == ["single", "1f1b"]
    sentence = advice(swept.ranked)
    assert sentence.startswith("Take ") and "samples/s are" in sentence
    assert sentence in (tmp_path / "sweep" / "sweep.md").read_text()
    for run in (single, pipeline):
        assert sum(parts_of(read_run(tmp_path / "sweep" / run.name)).values()) == pytest.approx(1)
    # A run without memory is not repeated.
    again = plan_sweep(options(folder, tmp_path / "sweep"), {}, read_strategies(ways))
    assert again.waiting == []


STUB = """
import json, pathlib, sys, tomllib
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
size = tomllib.load(open(given["--config"], "rb"))["micro_batch_size"]
if size > 200:
    sys.exit("error: rank 1 ran out of memory at step 1, when it computed")
folder = pathlib.Path(given["--output"])
folder.mkdir()
step = {"event": "step", "step": 5, "mem_bytes_by_rank": [size, 4.0], "base_bytes_by_rank": [0, 0]}
end = {"event": "end", "epoch": size / 100}
(folder / "metrics.jsonl").write_text(json.dumps(step) + "\\n" + json.dumps(end) + "\\n")
(folder / "config.toml").write_text("")
with open("tried", "a") as file:
    print(size, file=file)
"""


@pytest.mark.parametrize(
    ("limit", "size", "row"),
    [
        (77, 72, "needs 80 bytes of 77 bytes"),
        (10**6, 200, ""),
    ],
)
def test_each_strategy_gets_the_largest_micro_batch_that_fits(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    size: int,
    row: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stub.py").write_text(STUB)
    given = options(folder, tmp_path / "sweep")
    strategies = read_strategies("1f1b")
    sweep = plan_sweep(given, {}, strategies)
    command = (sys.executable, str(tmp_path / "stub.py"))
    (found,), rows = search_batches(sweep, given, strategies, command, limit=limit)
    assert found.options["micro_batch_size"] <= size <= found.options["micro_batch_size"] * 1.125
    assert [(each.state, each.error) for each in rows] == [(OUT_OF_MEMORY, row)]
    tried = Path("tried").read_text()
    search_batches(sweep, given, strategies, command, limit=limit)
    assert Path("tried").read_text() == tried  # Nothing is tried twice.
    planned = plan_sweep(given, {}, (found,), rows)
    (row_of_table,) = tables_of(planned.ranked)[0].rows[1:]
    assert row_of_table[0] == "1f1b" and OUT_OF_MEMORY in row_of_table[-1]


def test_a_search_of_what_does_not_fit_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stub.py").write_text(STUB)
    given = options(folder, tmp_path / "sweep")
    sweep = plan_sweep(given, {}, read_strategies("1f1b"))
    command = (sys.executable, str(tmp_path / "stub.py"))
    with pytest.raises(SettingsError, match="one sample fits under none"):
        search_batches(sweep, given, read_strategies("1f1b"), command, limit=1)
    records = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("batches/*.json")]
    assert min(record["needed"] for record in records) == 4.0
