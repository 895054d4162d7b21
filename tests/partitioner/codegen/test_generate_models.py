"""Generated stages compute what the model computes, wherever the cuts are, and read well."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncpipe.partitioner.capture import Capture, capture
from asyncpipe.partitioner.codegen import generate
from asyncpipe.partitioner.split.split import stage_tensors, unused_tensors
from asyncpipe.tests.support.models.codegen_cases import HARD
from asyncpipe.tests.support.models.zoo import ZOO, mixtral
from asyncpipe.tests.support.oracles.captures import of_zoo
from asyncpipe.tests.support.oracles.stage_chain import (
    HEADER,
    Chain,
    cut,
    larger,
    stages_at,
)
from asyncpipe.tests.support.oracles.stage_equality import assert_same

CUTS = [(), (0.12, 0.45, 0.81)]
OF_FLAT_CODE = (0.33, 0.6)
MODELS = {**ZOO, **HARD, "mixtral": mixtral}


@cache
def captured(name: str) -> tuple[Capture, dict[str, Tensor]]:
    torch.set_num_threads(1)
    if name in ZOO:
        found = of_zoo(name)
    else:
        found = capture(*MODELS[name](), check=False)
    for module in found.model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return found, found.arguments.tensors


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"{len(cuts) + 1} stages")
@pytest.mark.parametrize("name", MODELS)
def test_stages_equal_the_model(name: str, cuts: tuple[float, ...], tmp_path: Path) -> None:
    assert_stages_equal_the_model(name, cuts, tmp_path, "structured")


@pytest.mark.parametrize("name", MODELS)
def test_flat_stages_equal_the_model(name: str, tmp_path: Path) -> None:
    assert_stages_equal_the_model(name, OF_FLAT_CODE, tmp_path, "flat")


def assert_stages_equal_the_model(
    name: str, cuts: tuple[float, ...], tmp_path: Path, code: str
) -> None:
    capture, inputs = captured(name)
    chain = Chain.build(capture, cuts, tmp_path / "stages", code)
    assert_same(chain, larger(inputs), training=True, tolerance=1e-5)
    assert_same(chain, inputs, training=False, tolerance=1e-5)


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"{len(cuts) + 1} stages")
@pytest.mark.parametrize("name", MODELS)
def test_stages_split_the_state_dict(name: str, cuts: tuple[float, ...], tmp_path: Path) -> None:
    capture, _ = captured(name)
    chain = Chain.build(capture, cuts, tmp_path / "stages")
    saved = capture.model.state_dict(keep_vars=True)
    seen: dict[int, str] = {}
    for stage, graph in zip(chain.stages, chain.graphs, strict=True):
        held = stage_tensors(capture, graph)
        assert set(held.parameters) | set(held.buffers) <= stage.state_dict().keys()
        for key, tensor in stage.state_dict().items():
            assert tensor.shape == saved[key].shape
            assert tensor.dtype == saved[key].dtype
        frozen = {key for key, parameter in stage.named_parameters() if not parameter.requires_grad}
        assert frozen == {key for key in frozen if not saved[key].requires_grad}
        seen |= {id(saved[key]): key for key in stage.state_dict()}
    unused = unused_tensors(capture, chain.graphs)
    assert {id(tensor) for tensor in saved.values()} == seen.keys() | {
        id(saved[key]) for key in unused
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_same_input_gives_the_same_bytes(name: str) -> None:
    capture, _ = captured(name)
    once, again = (cut(capture, stages_at(capture, (0.4,))) for _ in range(2))
    assert generate(*once, HEADER) == generate(*again, HEADER)


def test_no_path_of_this_machine_is_in_a_file() -> None:
    for name in MODELS:
        capture, _ = captured(name)
        for text in generate(*cut(capture, stages_at(capture, (0.4,))), HEADER).values():
            assert str(Path.home()) not in text
            assert str(Path(__file__).parents[3]) not in text
            assert sys.prefix not in text


@pytest.mark.timeout(900)
def test_formatter_linter_and_type_checker_find_nothing_in_any_file(
    tmp_path: Path, shared_folder: Path
) -> None:
    for name in MODELS:
        capture, _ = captured(name)
        for cuts, code in (*((cuts, "structured") for cuts in CUTS), (OF_FLAT_CODE, "flat")):
            separate, graphs = cut(capture, stages_at(capture, cuts))
            for file, text in generate(separate, graphs, HEADER, code=code).items():
                if file != "__init__.py":
                    (tmp_path / f"{name}_{len(cuts) + 1}_{code}_{file}").write_text(text)
    assert_no_findings(tmp_path, shared_folder)


def assert_no_findings(folder: Path, shared_folder: Path) -> None:
    for width in (88, 100, 120):
        found = tool("ruff", "format", "--isolated", "--diff", f"--line-length={width}", folder)
        assert found.returncode == 0, found.stdout
    found = tool("ruff", "check", "--isolated", "--select=E,F,I,UP,B", folder)
    assert found.returncode == 0, found.stdout
    # What it finds out of torch, in most of its time, is the same for all files.
    kept = f"--cache-dir={shared_folder / 'mypy'}"
    found = tool("mypy", "--ignore-missing-imports", kept, folder)
    assert found.returncode == 0, found.stdout


def tool(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        cwd=command[-1],
    )
