"""`make gpu-report`: it survives what fails on a machine with GPUs, and names it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
PRETENDED = Path(__file__).parent / "support" / "pretended_gpu"


@pytest.fixture
def gpu_report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield pytest.importorskip("gpu_report")


Report = Callable[..., dict[str, Any]]


@pytest.fixture
def reported(gpu_report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    def report(*options: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["gpu_report.py", *options, "--output", str(tmp_path)])
        gpu_report.main()
        written: dict[str, Any] = json.loads((tmp_path / "gpu_report.json").read_text())
        return written

    return report


def test_every_failure_on_a_pretended_gpu_is_named(gpu_report: ModuleType, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu_report.py"), "--output", str(tmp_path)],
        env=os.environ | {"PRETENDED_GPUS": "2", "PYTHONPATH": str(PRETENDED)},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    page = (tmp_path / "gpu_report.md").read_text()
    setting, failures = report["setting"], report["failures"]
    assert (setting["gpus"], setting["gib"], report["machine"]["gpu"]) == (2, 8, "Pretended GPU")
    assert [failure["part"] for failure in failures] == list(gpu_report.PARTS)
    for failure in failures:
        assert "Torch not compiled with CUDA enabled" in failure["cause"]
        again = (
            f"python benchmarks/gpu_report.py --parts {failure['part']} --output {tmp_path} --gib 0"
        )
        assert failure["command"] == again
        assert f"**{failure['part']}, {failure['row']}**: {failure['cause']}" in page
        assert again in page and again in done.stdout


def test_a_machine_without_a_gpu_is_refused_with_the_cure(gpu_report: ModuleType) -> None:
    dry = gpu_report.dry_setting()
    with pytest.raises(SystemExit, match="torch finds no GPU here(.|\\n)*--device cpu"):
        gpu_report.check(replace(dry, device="cuda"))


def test_a_dry_run_computes_its_parts_on_the_cpu(reported: Report) -> None:
    reported("--device", "cpu", "--parts", "machine")
    report = reported("--device", "cpu", "--parts", "resume")
    assert report["failures"] == []
    assert list(report["parts"]) == ["machine", "resume"]
    assert report["parts"]["machine"]["rows"][1]["tflop_per_s"] > 0
    assert report["parts"]["resume"]["rows"] == [{"row": "1f1b", "difference": 0.0}]


@pytest.mark.parametrize(
    ("call", "argument", "limit_s", "why"),
    [
        (os._exit, 3, 60.0, "its process ended with exit status 3"),
        (os.abort, None, 60.0, "its process ended with SIGABRT"),
        (time.sleep, 60, 1.0, "it took over 1 s and was stopped"),
        (time.sleep, 0, 60.0, ""),
    ],
)
def test_a_part_that_ends_its_process_is_named(
    gpu_report: ModuleType,
    tmp_path: Path,
    call: Callable[..., Any],
    argument: Any,
    limit_s: float,
    why: str,
) -> None:
    arguments = [] if argument is None else [argument]
    cause = gpu_report.apart(call, arguments, tmp_path / "log", limit_s)
    assert cause.startswith(why) and bool(cause) == bool(why)


def test_a_row_that_fails_or_hangs_costs_itself_alone(
    gpu_report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_work.LEAST_ROW_S", 0.05)
    setting = gpu_report.dry_setting()
    work = gpu_report.Work(setting, tmp_path, tmp_path / "answer", time.monotonic())
    with work.row("fails"):
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
    with work.row("hangs"):
        time.sleep(30)
    with work.row("is good") as row:
        row["step_ms"] = 1.0
    assert json.loads((tmp_path / "answer").read_text()) == [
        {"row": "fails", "cause": "RuntimeError: CUDA error: out of memory."},
        {"row": "hangs", "cause": "it took over 0 s and was stopped."},
        {"row": "is good", "step_ms": 1.0},
    ]


def test_the_parts_share_the_time_and_leave_the_rest_to_later_ones(
    gpu_report: ModuleType,
) -> None:
    names = list(gpu_report.PARTS)
    left_s, limits = 1800.0, []
    for name in names:
        limits.append(gpu_report.limit_of(name, names, left_s))
        left_s -= limits[-1]
    assert sum(limits) == pytest.approx(1800.0) and min(limits) > 30
    assert gpu_report.limit_of(names[-1], names, 1000.0) == 1000.0


def test_the_document_names_every_part(gpu_report: ModuleType) -> None:
    text = (FOLDER.parent / "docs" / "gpu-report.md").read_text()
    assert [name for name in gpu_report.PARTS if f"| `{name}` |" not in text] == []
