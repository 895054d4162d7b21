"""What no code of ours expects, and what the user's own code raises: one sentence, code 1."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from unittest import mock

import pytest

from asyncpipe.commands.running import DEFECT, run
from asyncpipe.runtime.checkpoint.folders import CheckpointError, Facts, read_facts
from asyncpipe.runtime.checkpoint.remote import Location
from asyncpipe.runtime.errors import PlanError
from asyncpipe.runtime.locations import LocationError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.in_process import error_of

OWN = """
import torch

X = {"x": torch.randn(40, 16), "target": torch.zeros(40, dtype=torch.long)}


class Rows:
    def __init__(self, count, row=lambda i: {"x": torch.ones(16), "target": torch.tensor(0)}):
        self.count, self.row = count, row

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.row(index)


def fails(index=0):
    raise ValueError("my own mistake")  # the line to name


def empty():
    return []


def empty_evaluation():
    return X, []


def endless():
    return Rows(2**62)


def negative():
    return Rows(-1)


def half():
    return Rows(2.5)


def bad_row():
    return Rows(40, fails)


def ragged():
    return Rows(40, lambda i: {"x": torch.ones(16 + i % 2), "target": torch.tensor(0)})


def data():
    return X


def no_scalar(outputs, target):
    return outputs


def number(outputs, target):
    return 3.0


def broken(outputs, target):
    fails()


def worker(outputs, target):
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")


def detached(outputs, target):
    return outputs.detach().sum()


def imaginary(outputs, target):
    return outputs.sum() * 1j


def several(outputs, target):
    return outputs.sum(), outputs


learned = torch.nn.BCELoss(torch.ones(3))
learned.weight = torch.nn.Parameter(torch.ones(3))
kind = torch.nn.CrossEntropyLoss


def closure(named, lr):
    return torch.optim.LBFGS([parameter for _, parameter in named], lr)
"""
LINE = OWN.splitlines().index('    raise ValueError("my own mistake")  # the line to name') + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own")
    write_mlp(made / "mlp")
    (made / "own.py").write_text(OWN)
    return made


def trained(folder: Path, data: str, criterion: str = "cross_entropy") -> str:
    return error_of(
        folder, "train", "mlp", "--trust", "--steps", "1", "--schedule", "single",
        "--data", f"own.py:{data}", "--criterion", criterion,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("fails", f"failed at own.py:{LINE}: ValueError: my own mistake"),
        ("bad_row", f"could not be read: ValueError: my own mistake (own.py:{LINE})"),
        ("empty", "own.py:empty has 0 samples for training"),
        ("empty_evaluation", "own.py:empty_evaluation has 0 samples for evaluation"),
        ("endless", "has 4611686018427387904 samples"),
        ("negative", "the length of --data own.py:negative"),
        ("half", "the length of --data own.py:half"),
        ("ragged", "of own.py:ragged"),
    ],
)
def test_what_is_wrong_with_own_data_is_one_sentence(folder: Path, data: str, words: str) -> None:
    assert words in trained(folder, data)


def test_an_optimizer_that_needs_a_closure_is_refused(folder: Path) -> None:
    options = ("--steps", "1", "--schedule", "single", "--optimizer", "own.py:closure")
    assert "returned a LBFGS, whose step computes the loss again by a closure" in error_of(
        folder, "train", "mlp", "--trust", *options
    )


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        ("no_scalar", "the criterion returned a tensor ["),
        ("number", "the criterion returned 3.0, but a loss is a tensor of one real number"),
        ("detached", "the criterion returned a loss without a gradient"),
        ("imaginary", "returned a tensor [] of complex numbers, but a loss is"),
        ("several", "the criterion returned a tuple, but a loss is"),
        ("learned", "--criterion own.py:learned has parameters, which the run would not train"),
        ("kind", "--criterion own.py:kind is a class"),
        ("broken", f"forward of micro-batch 0: ValueError: my own mistake (own.py:{LINE})"),
        ("worker", "A data-loading process has ended"),
    ],
)
def test_a_criterion_whose_loss_cannot_be_trained_is_named(
    folder: Path, criterion: str, words: str
) -> None:
    assert words in trained(folder, "data", f"own.py:{criterion}")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (ValueError("odd\n  thing"), "ValueError: odd thing"),
        (KeyError("x"), "KeyError: 'x'"),
        (OSError("no name"), "OSError: no name"),
        (PermissionError(13, "Permission denied", "there.txt"), "there.txt: permission denied."),
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
        (RecursionError("too deep"), "RecursionError: too deep"),
    ],
)
def test_an_exception_that_nothing_expects_is_one_sentence(
    raised: Exception,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asyncpipe.commands.inspect import app

    is_known = words.startswith(("not enough", "there.txt"))
    for arguments in (["x"], ["x", "-v"]):
        monkeypatch.setattr("sys.argv", ["asyncpipe-inspect", *arguments])
        with mock.patch("asyncpipe.commands.inspect.read_plan", side_effect=raised):
            assert run(app) == 1
        told = capsys.readouterr().err
        assert "error: " in told and words in told and (DEFECT not in told) == is_known
        assert ("Traceback" in told) == ("-v" in arguments)


@pytest.mark.parametrize("name", ["x", "", "wte", "a.b.c", "head.bias"])
def test_a_shared_parameter_that_its_stage_has_not_contradicts_the_plan(
    name: str, tmp_path: Path
) -> None:
    write_text(tmp_path / "text")
    plan = json.loads((tmp_path / "text" / "plan.json").read_text())
    plan["shared"][0]["holders"][0][1] = name
    (tmp_path / "text" / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=f"stage 0 shares {name}, which does not exist"):
        read_plan(tmp_path / "text")


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1.0"])
def test_seconds_of_a_checkpoint_are_a_time(seconds: str, tmp_path: Path) -> None:
    facts = Facts("x", 1, 8, 40, 2, 2, 1, seconds=7.0).to_json()
    (tmp_path / "checkpoint.json").write_text(facts.replace("7.0", seconds))
    with pytest.raises(CheckpointError, match="seconds is"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    "url", ["reference://x", "reference://", "dir://x", "generic://x", "zip://x", "s3://", "no://x"]
)
def test_a_place_that_cannot_be_opened_is_told(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LocationError):
        Location(url, patience_s=0).names()


def test_a_data_function_with_arguments_is_named_without_a_line_of_ours(folder: Path) -> None:
    said = trained(folder, "number")
    assert "--data own.py:number failed: TypeError: number() missing 2 required" in said
