"""The rig of the convergence benchmark: the runs that it starts, and its summary of the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.optim import _muon

from asyncpipe.runtime.experiments.compare import read_runs
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.plan import read_plan

FOLDER = Path(__file__).parent.parent / "benchmarks"
pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that are generated, each once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    made = pytest.importorskip("convergence")
    short = {"steps": 4, "warmup": 1, "eval_every": 2}
    monkeypatch.setitem(made.COMMON, "digits", made.COMMON["digits"] | short)
    yield made


def test_a_case_is_run_tabled_and_drawn_and_goes_on_where_it_was(
    rig: ModuleType, tmp_path: Path
) -> None:
    output, models = tmp_path / "convergence.jsonl", tmp_path / "models"
    methods = ("sync:adamw", "stash:adamw", "stash+msnag:muon")
    cases = [rig.Case("digits", 4, 2), rig.Case("digits", 4, 1)]
    found = [(case, arm) for case in cases for arm in rig.arms_of(case, methods, models)]
    rig.run_until(found, output, end_s=-math.inf)
    assert not output.exists()
    rig.run_until(found, output, end_s=math.inf)
    runs = read_runs(output)
    assert len(runs) == 5  # one synchronous run for both cases
    written = output.read_bytes()
    rig.run_until(found, output, end_s=math.inf)
    assert output.read_bytes() == written  # nothing runs again
    table = rig.rows_of(rig.by_case(found, models), runs)
    assert list(table) == cases[::-1]
    for case, (rows, ends) in table.items():
        assert [row.method for row in rows] == ["sync", "stash", "stash+msnag"]
        # 1f1b with a flush takes (k + p - 1) / k times as long; the run has a fill too.
        assert rows[1].speed_up == pytest.approx(4 * (case.every + 3) / (4 * case.every + 3))
        assert len(ends(rows[0].runs[0])) == 4
        assert rows[1].runs[0].micro_batches == case.every
    rig.write(table, tmp_path)
    text = (tmp_path / "convergence.md").read_text()
    for case in cases:
        assert f"## {case}\n" in text and (tmp_path / case.file).read_text().startswith("<svg")


def test_every_method_of_the_benchmark_is_known_and_fits(
    rig: ModuleType, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sixteen stages take seconds to generate, and allow what eight do.
    folder_of = rig.folder_of
    monkeypatch.setattr(rig, "folder_of", lambda task, stages, to: folder_of(task, 8, to))
    methods = {str(arm.method): (case, arm) for case, arm in rig.wanted(models)}
    assert len(methods) > 20
    for _, arm in methods.values():
        make_job(arm.settings, tmp_path)


def test_the_page_of_evidence_shows_lines_of_the_results() -> None:
    results = (FOLDER / "results" / "convergence.md").read_text().splitlines()
    page = (FOLDER.parent / "docs" / "asynchronous-evidence.md").read_text()
    blocks = page.split("<!-- benchmarks/results/convergence.md -->\n```text\n")[1:]
    shown = [line for block in blocks for line in block.partition("\n```\n")[0].splitlines()]
    shown += [line for line in page.splitlines() if line.startswith("- ") and " seeds)" in line]
    assert len(shown) > 40 and not set(shown) - set(results)


def test_half_blocks_are_stages_after_the_embeddings(rig: ModuleType, models: Path) -> None:
    plan = read_plan(rig.folder_of("text", 8, models))
    halves = [
        sorted({int(name.split(".")[1]) for name in stage.parameters if "halves" in name})
        for stage in plan.stages
    ]
    assert halves == [[], [0], [1], [2], [3], [4], [5], [6, 7]]


def test_newton_schulz_is_torchs_in_another_precision(rig: ModuleType) -> None:
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for given in (gradient, gradient.T):
        mine = rig.newton_schulz(given, (3.4445, -4.775, 2.0315), 5, 1e-7)
        theirs = _muon._zeropower_via_newtonschulz(given, (3.4445, -4.775, 2.0315), 5, 1e-7)
        assert torch.allclose(mine, theirs.float(), atol=0.05)
        assert not torch.equal(mine, theirs.float())
