"""An error in a stage says with -v where in the stage, and of which line of the author's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from asyncpipe.runtime.executor.run import where_in_stage
from asyncpipe.runtime.plan.trust import remember
from asyncpipe.runtime.user_code import import_file
from asyncpipe.tests.support.processes.quick_python import bin_folder

ROOT = Path(__file__).parents[3]
STAGE = """
from torch import nn


class Block(nn.Module):
    def forward(self, x):
        return x @ x


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        # model.py:10-12
        y = x + 1
        y = y.flatten(3)  # f32[4] model.py:21
        return self.block(y)

    def by_block(self, x):
        # model.py:30
        for _ in range(2):
            x = self.block(x)
        return x

    def unmarked(self, x):
        return x.view(7)
"""


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("forward", "stage.py:18 in forward (model.py:21): y = y.flatten(3)"),
        ("by_block", "stage.py:7 in forward (model.py:30): return x @ x"),
        ("unmarked", "stage.py:28 in unmarked: return x.view(7)"),
    ],
)
def test_the_line_of_the_stage_and_the_authors_are_found(
    tmp_path: Path, method: str, expected: str
) -> None:
    (tmp_path / "stage.py").write_text(STAGE)
    stage = import_file(tmp_path / "stage.py", f"authors_line_{method}").Stage()
    with pytest.raises((RuntimeError, IndexError)) as failed:
        getattr(stage, method)(torch.ones(2, 3))
    assert where_in_stage(failed.value, stage) == expected


def test_an_error_from_elsewhere_has_no_line_of_a_stage() -> None:
    assert where_in_stage(ValueError("never raised"), torch.nn.Linear(2, 2)) == ""


@pytest.mark.parametrize("schedule", ["1f1b", "single"])
def test_a_failing_stage_is_told_in_a_sentence_and_with_v_by_its_line(
    tmp_path: Path, schedule: str
) -> None:
    folder = tmp_path / "mlp"
    shutil.copytree(ROOT / "generated_models" / "residual_mlp_2p", folder)
    stage = folder / "stage_1.py"
    text = stage.read_text()
    assert text.count("self.head(hidden + embedded)") == 1
    stage.write_text(text.replace("self.head(hidden + embedded)", "self.head(hidden.flatten())"))
    remember(folder)
    command = [bin_folder() / "asyncpipe-train", folder, "--schedule", schedule]
    for verbose in ((), ("-v",)):
        output = tmp_path / f"run{len(verbose)}"
        result = subprocess.run(
            [*command, *verbose, "--steps", "2", "--output", output], capture_output=True, text=True
        )
        assert result.returncode == 1
        *detail, last = result.stderr.strip().splitlines()
        sentence = "error: stage 1 failed in the forward of micro-batch 0: RuntimeError: "
        assert last.startswith(sentence)
        wanted = "stage_1.py:45 in forward (residual_mlp.py:34): return self.head(hidden.flatten())"
        assert (wanted in map(str.strip, detail)) == bool(verbose)
        assert verbose or not detail
