"""Measured costs are kept by what was measured, and a cache never fails a command."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.partitioner.capture import capture
from asyncpipe.partitioner.profile import measure as measuring
from asyncpipe.partitioner.profile import profiler
from asyncpipe.partitioner.profile.cache import (
    ProfileCache,
    cache_folder,
    content_key,
    describe_function,
    describe_module,
    is_lasting,
)
from asyncpipe.partitioner.profile.measure import OperationCost, Repeats
from asyncpipe.partitioner.profile.profiler import Profile, profile
from asyncpipe.tests.support.processes.quick_python import bin_folder

QUICK = Repeats(enough_ms=0.1, most=2)
X = {"x": torch.randn(4, 8)}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The arguments of every real measurement from here on."""
    done: list[object] = []

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        done.append(arguments)
        return measuring.measure(*arguments, **options)

    monkeypatch.setattr(profiler, "measure", counted)
    return done


def profiled(net: nn.Module, *, cached: bool | None = True, **options: object) -> Profile:
    names = {"input": X["x"]} if isinstance(net, nn.Sequential) else X
    captured = capture(net, names, check=False)
    inputs = captured.arguments.tensors
    return profile(captured, inputs, threads=1, repeats=QUICK, cached=cached, **options)  # type: ignore[arg-type]


def test_what_was_measured_is_not_measured_again_and_costs_the_same(measured: list[object]) -> None:
    first = profiled(model())
    count = len(measured)
    second = profiled(model())
    assert count > 0 and len(measured) == count
    assert second.nodes == first.nodes
    assert (second.forward_scale, second.backward_scale) == (
        first.forward_scale,
        first.backward_scale,
    )
    assert second.facts == first.facts


def test_only_what_is_new_is_measured(measured: list[object]) -> None:
    profiled(model())
    count = len(measured)
    profiled(nn.Sequential(*model(), nn.Linear(3, 5)))
    assert len(measured) == count + 1


def test_another_dtype_and_another_configuration_are_other_content(measured: list[object]) -> None:
    profiled(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
    count = len(measured)
    profiled(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    assert len(measured) == count + 1
    profiled(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), dtype="bfloat16")
    assert len(measured) == count + 3


def test_no_cache_measures_anew_and_keeps_what_it_finds(measured: list[object]) -> None:
    profiled(model())
    count = len(measured)
    anew = profiled(model(), cached=False)
    assert len(measured) == 2 * count
    assert profiled(model()).nodes == anew.nodes and len(measured) == 2 * count


def test_a_profile_from_python_leaves_the_cache_alone(own_cache: Path) -> None:
    profiled(model(), cached=None)
    assert not own_cache.exists()


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"environment": 1}', '{"costs": 7}', "\x00\xff"]
)
def test_a_damaged_file_is_ignored_and_written_again(
    own_cache: Path, measured: list[object], damage: str
) -> None:
    profiled(model())
    count = len(measured)
    (file,) = (own_cache / "profiles").iterdir()
    good = json.loads(file.read_text())
    file.write_text(damage)
    profiled(model())
    assert len(measured) == 2 * count
    assert json.loads(file.read_text())["costs"].keys() == good["costs"].keys()


def test_a_damaged_entry_is_measured_again(own_cache: Path, measured: list[object]) -> None:
    profiled(model())
    count = len(measured)
    (file,) = (own_cache / "profiles").iterdir()
    found = json.loads(file.read_text())
    keys = [key for key, cost in found["costs"].items() if isinstance(cost, dict)]
    found["costs"][keys[0]] = {"forward_ms": 1.0}
    found["costs"][keys[1]] = "soon"
    file.write_text(json.dumps(found))
    profiled(model())
    assert len(measured) == count + 2


def test_a_file_of_another_environment_is_not_read(own_cache: Path) -> None:
    cpu = torch.device("cpu")
    one = ProfileCache.of(cpu, 1, "float32")
    one.put("key", 1)
    one.save()
    other = ProfileCache.of(cpu, 2, "float32")
    assert other.path != one.path and other.get("key") is None
    other.path.write_text(one.path.read_text())
    assert ProfileCache.of(cpu, 2, "float32").get("key") is None
    assert ProfileCache.of(cpu, 1, "float32").get("key") == 1


def test_two_commands_at_a_time_lose_nothing_of_what_was_there_before() -> None:
    cpu = torch.device("cpu")
    first, second = ProfileCache.of(cpu, 1, "float32"), ProfileCache.of(cpu, 1, "float32")
    first.put("a", 1)
    second.put("b", 2)
    first.save()
    second.save()
    found = ProfileCache.of(cpu, 1, "float32")
    assert (found.get("a"), found.get("b")) == (1, 2)
    assert [path.suffix for path in found.path.parent.iterdir()] == [".json"]


def test_a_cache_that_cannot_be_written_fails_nothing(
    own_cache: Path, measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.write_text("a file where the folder should be")
    assert profiled(model()).forward_ms > 0
    assert own_cache.read_text().startswith("a file")


def test_the_folder_is_the_platforms_unless_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASYNCPIPE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("ASYNCPIPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "asyncpipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "home" / ".cache" / "asyncpipe"


def test_the_tests_have_a_cache_of_their_own() -> None:
    own = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ['ASYNCPIPE_CACHE'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path.home() not in Path(own.stdout).parents


def test_a_plan_from_the_cache_is_the_plan_that_filled_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = model()
    plans = [
        asyncpipe.partition(
            net, {"input": X["x"]}, stages=2, output=tmp_path / str(number), threads=1
        )
        for number in range(2)
    ]
    told = [asdict(plan) for plan in plans]
    for plan in told:
        for candidate in plan["candidates"]:
            candidate.pop("seconds", None)  # that planning took, not the plan
    assert told[0] == told[1]
    assert plans[0].profile["stage_scales"] != [1.0, 1.0]


def test_functions_are_named_alike_in_every_process() -> None:
    for function in (torch.add, nn.functional.linear, nn.functional.dropout, len):
        assert is_lasting(describe_function(function))
    assert not is_lasting(describe_function(eval("lambda x: x")))


def test_an_edit_of_the_file_is_another_content(tmp_path: Path) -> None:
    code = (
        "import torch\nclass Own(torch.nn.Module):\n    def forward(self, x):\n        return x{}\n"
    )
    told = []
    for number, change in enumerate(("", " + 1")):
        file = tmp_path / f"v{number}" / "own.py"
        file.parent.mkdir()
        file.write_text(code.format(change))
        script = (
            "import sys; sys.path.insert(0, sys.argv[1]); import own; "
            "from asyncpipe.partitioner.profile.cache import describe_module; "
            "print(describe_module(own.Own()))"
        )
        told.append(
            subprocess.run(
                [bin_folder() / "python", "-c", script, str(file.parent)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert told[0] != told[1] and is_lasting(told[0])


def test_a_module_is_described_by_what_decides_its_cost() -> None:
    norm = describe_module(nn.LayerNorm(8))
    assert norm == describe_module(nn.LayerNorm(8))
    assert norm != describe_module(nn.LayerNorm(8, eps=1e-3))
    assert norm != describe_module(nn.LayerNorm(8).double())
    assert content_key(norm) != content_key(describe_module(nn.LayerNorm(9)))


def test_costs_are_read_back_as_they_were_stored() -> None:
    cost = OperationCost(forward_ms=0.1 + 0.2, saved_arguments=(0, 2), is_view=True)
    stored = json.loads(json.dumps({**{f: getattr(cost, f) for f in cost.__slots__}}))
    assert OperationCost.read(stored) == cost
    assert OperationCost.read(None) is None and OperationCost.read({"odd": 1}) is None
