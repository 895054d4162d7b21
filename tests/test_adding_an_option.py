"""The diffs in ARCHITECTURE.md that add an option and an optimizer work as written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTION = "## Adding an option or an optimizer"
USE = """
import contextlib, io, os, sys
sys.path.insert(0, os.getcwd())
from asyncpipe.commands.train import app
from asyncpipe.commands.training_options import ComparedOptions
from asyncpipe.partitioner.planning.options import OPTIONS
from asyncpipe.runtime.checkpoint.resuming import differences
from asyncpipe.runtime.config.option_files import read_config
from asyncpipe.runtime.config.resolve import resolve
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.experiments.variants import lists_from_texts
from asyncpipe.runtime.plan.plan import read_plan
import asyncpipe

assert asyncpipe.__file__.startswith(os.getcwd()), asyncpipe.__file__
help = io.StringIO()
with contextlib.redirect_stdout(help):
    app("--help", result_action="return_value")
assert "Label of the run" in help.getvalue() and "adagrad" in help.getvalue()
assert "label" in ComparedOptions.__dataclass_fields__
assert "adagrad" in OPTIONS["optimizer"].limit.words

arguments = ["asyncpipe/generated_models/residual_mlp_2p", "--optimizer", "adagrad", "--dry-run"]
arguments += ["--data", "asyncpipe/examples/residual_mlp.py:data", "--label", "baseline", "--json"]
assert app(arguments, exit_on_error=False, result_action="return_value") in (0, None)

folder = "asyncpipe/generated_models/residual_mlp_2p"
given = {"optimizer": "adagrad", "lr": 0.01, "label": "baseline", "data": "x.py:data"}
settings = Settings(folder=folder, **given)
open("run.toml", "w").write(settings.to_toml())
assert read_config("run.toml")["label"] == "baseline"
assert lists_from_texts(["label=a,b"]) == {"label": ("a", "b")}
config, _ = resolve(settings, read_plan(folder))
assert not differences({"label": "other"}, config)

import torch
from asyncpipe.runtime.training.stage_optimizer import make_optimizer
weight = torch.ones(2, 2, requires_grad=True)
weight.grad = torch.ones(2, 2)
make_optimizer([weight], config).step()
assert weight.max() < 1
print("works")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product with both diffs applied."""
    folder = tmp_path_factory.mktemp("changed")
    product = folder / "asyncpipe"
    for name in ("commands", "partitioner", "runtime", "templates", "examples"):
        shutil.copytree(ROOT / name, product / name, ignore=shutil.ignore_patterns("__pycache__"))
    model = "generated_models/residual_mlp_2p"
    shutil.copytree(ROOT / model, product / model)
    for file in ROOT.glob("*.py"):
        shutil.copy(file, product)
    section = (ROOT / "ARCHITECTURE.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    diffs = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    assert len(diffs) == 2
    for diff in diffs:
        command = ["git", "apply", "--recount", "-"]
        subprocess.run(command, input=diff, text=True, cwd=product, check=True)
    return folder


def test_the_diffs_of_the_page_add_an_option_and_an_optimizer(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", USE], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0 and result.stdout.endswith("works\n"), result.stderr
