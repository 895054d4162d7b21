"""Stray files never run: bytecode next to stages, and modules in the current folder.

Commands are real processes here: a fork that has its imports done would import nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
import marshal
import os
import py_compile
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import asyncpipe
from asyncpipe.runtime import import_path
from asyncpipe.runtime.plan.trust import is_trusted, remember
from asyncpipe.runtime.user_code import import_file, import_object
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.support.processes.quick_python import bin_folder
from asyncpipe.tests.test_trust import own_state, train

__all__ = ["own_state"]
SHORT = ("--steps", "2", "--micro-batches", "2", "--eval-batches", "0", "-q")
BIN = Path(sys.executable).parent
SHADOWING = (
    "random",
    "json",
    "torch",
    "numpy",
    "multiprocessing",
    "accelerate",
    "wandb",
    "asyncpipe",
)


def plant(folder: Path, canary: Path) -> None:
    """Modules that leave a mark when they are imported, called as ones that a command imports."""
    folder.mkdir(exist_ok=True)
    for name in SHADOWING:
        code = f"open({str(canary)!r}, 'a').write('{name} in {folder.name}\\n')\n"
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
        (folder / f"{name}.py").write_text(code)
    (folder / "sitecustomize.py").write_text(code)


def start(folder: Path, name: str, *arguments: str, scripts: Path = BIN) -> str:
    """Runs a command in a process of its own; returns its output."""
    ran = subprocess.run(
        [scripts / f"asyncpipe-{name}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran
    return ran.stdout + ran.stderr


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(import_path, "_own", set())


# --- bytecode


def test_the_code_that_runs_is_what_the_file_says(tmp_path: Path) -> None:
    """An unchecked .pyc is never compared with its source, so Python's own import would run it."""
    folder, canary = tmp_path / "made", tmp_path / "ran"
    write_mlp(folder)
    for stage in folder.glob("stage_*.py"):
        cached = Path(importlib.util.cache_from_source(str(stage)))
        cached.parent.mkdir(exist_ok=True)
        evil = compile(f"open({str(canary)!r}, 'w').close()\n{stage.read_text()}", stage, "exec")
        flags = (1).to_bytes(4, "little")  # by hash, and not to be checked
        cached.write_bytes(importlib.util.MAGIC_NUMBER + flags + bytes(8) + marshal.dumps(evil))
        # Python itself would run it: this is what makes the test one that can fail.
        spec = importlib.util.spec_from_file_location("victim", stage)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        assert canary.exists()
        canary.unlink()
    assert is_trusted(folder)
    planted = {path: path.read_bytes() for path in folder.rglob("*.pyc")}
    asyncpipe.load(folder)
    for stage in ("0", "1"):
        command(tmp_path, "inspect", str(folder), "--stage", stage)
    assert command(tmp_path, "train", *train(folder, "-q")).code == 0
    methods = ("--methods", "stash", "--steps", "2", "--micro-batches", "2", "--output", "c")
    assert command(tmp_path, "compare", str(folder), *methods).code == 0
    assert not canary.exists()
    assert planted == {path: path.read_bytes() for path in folder.rglob("*.pyc")}


def test_no_bytecode_is_left_beside_stages(tmp_path: Path) -> None:
    write_mlp(tmp_path / "made")
    asyncpipe.load(tmp_path / "made")
    assert not list(tmp_path.rglob("__pycache__"))


def test_an_imported_file_has_its_source(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f():\n    return 1 / 0  # here\n")
    py_compile.compile(str(path))
    module = import_file(path, "has_its_source")
    assert inspect.getsource(module.f).endswith("# here\n") and module.__file__ == str(path)
    with pytest.raises(ZeroDivisionError) as raised:
        module.f()
    assert "return 1 / 0  # here" in "".join(traceback.format_exception(raised.value))


# --- the path


def test_modules_in_the_current_folder_and_beside_stages_are_not_run(tmp_path: Path) -> None:
    """In the folder itself, as its README says: one process, and ranks with what they start."""
    folder, canary = tmp_path / "made", tmp_path / "ran"
    write_mlp(folder)
    plant(folder, canary)
    remember(folder)
    (tmp_path / "data.py").write_text(
        "import subprocess, sys, torch\n"
        "subprocess.run([sys.executable, '-c', 'import random'], check=True)\n"
        "def load(): return dict(x=torch.zeros(64, 16), target=torch.zeros(64).long())\n"
    )
    for schedule in ("single", "1f1b"):
        data = ("--data", "../data.py:load", "--schedule", schedule)
        start(folder, "train", ".", *SHORT, *data, "--output", f"../{schedule}")
        assert not canary.exists(), canary.read_text()


def test_an_empty_entry_of_pythonpath_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_path: None
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, kept in ((f":{tmp_path}/lib", []), (f"{tmp_path}/lib:{tmp_path}:", [str(tmp_path)])):
        monkeypatch.setenv("PYTHONPATH", given)
        monkeypatch.setenv("PYTHONSAFEPATH", "")
        own = [entry for entry in given.split(":") if entry]
        monkeypatch.setattr(
            sys, "path", ["script", *(entry or str(tmp_path) for entry in given.split(":"))]
        )
        import_path.isolate()
        assert [entry for entry in sys.path if entry == str(tmp_path)][:1] == kept
        assert os.environ["PYTHONPATH"] == ":".join(own) and os.environ["PYTHONSAFEPATH"] == "1"
        assert "script" not in sys.path


def test_a_file_that_the_user_names_imports_its_neighbours_but_never_in_place_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_path: None
) -> None:
    canary = tmp_path / "ran"
    plant(tmp_path / "code", canary)
    (tmp_path / "code" / "my_blocks_here.py").write_text("size = 5")
    (tmp_path / "code" / "wave.py").write_text("size = 6")  # is Python's, and not yet imported
    (tmp_path / "code" / "my_net_here.py").write_text(
        "import random, json, wave\nfrom my_blocks_here import size\n"
        "def build(): return random.Random, wave.Wave_read\n"
    )
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    named = tmp_path / "code" / "my_net_here.py"
    assert import_object(f"{named}:size", "--model", ValueError) == 5
    assert import_object(f"{named}:build", "--model", ValueError)()
    assert sys.path[-1] == str(tmp_path / "code")
    assert not canary.exists()
    for name in ("wave", "random"):  # may be named, and replaces nothing
        (tmp_path / "code" / f"{name}.py").write_text("size = 7")
        assert import_object(f"{tmp_path}/code/{name}.py:size", "--model", ValueError) == 7
    import random
    import wave

    assert hasattr(wave, "Wave_read") and hasattr(random, "Random")


# --- modules of the user's own that stages import

LEAF = """
import torch
from torch import nn
from leaf_helper import scale

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x) * scale

def build():
    return nn.Sequential(nn.Linear(4, 4), Odd(), nn.Linear(4, 4)), {"input": torch.ones(2, 4)}
"""


def test_a_class_of_ones_own_is_found_by_all_ranks_and_a_strangers_is_not_run(
    tmp_path: Path, own_path: None
) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "leaf_net.py").write_text(LEAF)
    (tmp_path / "nets" / "leaf_helper.py").write_text("scale = 2")
    (tmp_path / "own_loss.py").write_text(
        "def loss(outputs, target): return (outputs - target).square().mean()"
    )
    options = ("--leaf", "Odd", "--loss", "own_loss.py:loss", "--profile", "analytic")
    model = ("--model", "nets/leaf_net.py:build", "--stages", "2", *options, "--output", "made")
    quick = bin_folder()
    start(tmp_path, "partition", *model, scripts=quick)
    (tmp_path / "data.py").write_text(
        "import torch\ndef load(): return dict(input=torch.ones(64, 4), target=torch.ones(64, 4))\n"
    )
    start(tmp_path, "train", "made", *SHORT, "--data", "data.py:load", scripts=quick)

    theirs = tmp_path / "theirs"  # a copy of what is known, with code beside it that is not
    theirs.mkdir()
    shutil.copytree(tmp_path / "made", theirs / "made")
    (theirs / "leaf_net.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{LEAF}")
    (theirs / "leaf_helper.py").write_text("scale = 2")
    (theirs / "own_loss.py").write_text((tmp_path / "own_loss.py").read_text())
    told = error_of(theirs, "train", "made", *SHORT, "--data", f"{tmp_path}/data.py:load")
    assert told == (
        f"error: training made would also run {theirs}/leaf_net.py and own_loss.py:loss, which no "
        "command here has named.\n"
        "Read it. Trust it from then on: asyncpipe-train made --trust\n"
    )
    assert not (tmp_path / "ran").exists()
