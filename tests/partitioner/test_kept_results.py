"""Results of earlier partitions: used where nothing has changed, and nowhere else."""

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from asyncpipe.partitioner import loaded_code
from asyncpipe.partitioner.compile import partition_spec
from asyncpipe.partitioner.kept_results import KeptResults
from asyncpipe.partitioner.loaded_code import data_files
from asyncpipe.partitioner.models.load import ModelSource, load_model
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.runtime.plan.trust import STATE_VARIABLE

ROOT = Path(__file__).parents[2]
COMMAND = "asyncpipe-partition --model mlp --stages 2"
OPTIONS = PartitionOptions(stages=2)


class Product:
    """A copy of the product's code, with a command that runs it and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, folder / "code" / "asyncpipe"
        for name in ("commands", "partitioner", "runtime", "templates"):
            shutil.copytree(ROOT / name, self.code / name, ignore=_PYCACHE)
        for name in ("__init__.py", "cli.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.code)
        self.script = folder / "asyncpipe-partition"
        self.script.write_text("from asyncpipe.cli import partition\n\npartition()\n")
        self.unchanged_since_start()

    @staticmethod
    def unchanged_since_start() -> None:
        """Waits until a process that starts now has read all files as they are."""
        time.sleep(loaded_code._EARLIER_S + 0.1)

    def edit(self, name: str, before: str, after: str) -> None:
        path = self.code / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    def partition(self, *words: str) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": str(self.code.parent), "ASYNCPIPE_CACHE": str(self.folder / "cache")}
        line = [sys.executable, self.script, *COMMAND.split()[1:], *words]
        return subprocess.run(
            line, env=os.environ | own, cwd=self.folder, capture_output=True, text=True
        )


_PYCACHE = shutil.ignore_patterns("__pycache__")


def test_a_result_is_used_again_until_the_code_of_the_model_or_of_the_check_changes(
    tmp_path: Path,
) -> None:
    product = Product(tmp_path)
    first = product.partition()
    assert first.returncode == 0 and "✓ verify" in first.stdout, first.stderr
    folder = tmp_path / "generated_models" / "mlp_2p"
    before = _bytes_in(folder)
    again = product.partition()
    assert "✓ reuse" in again.stdout and "✓ verify" not in again.stdout, again.stderr
    assert _bytes_in(folder) == before
    assert "✓ verify" in product.partition("--no-cache").stdout

    product.edit("partitioner/models/builtin.py", "torch.tanh(", "torch.sigmoid(")
    other = product.partition("--force")
    assert "✓ verify" in other.stdout, other.stderr
    assert any(b"sigmoid" in text for text in _bytes_in(folder).values())

    product.edit("partitioner/models/builtin.py", "torch.sigmoid(", "torch.tanh(")
    product.edit("partitioner/verify.py", "verify_names(model, plan, stages)\n", "1 / 0\n")
    refused = product.partition("--force")
    assert refused.returncode == 1 and "ZeroDivisionError" in refused.stderr


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "mlp_2p"
    partition_spec("mlp", replace(OPTIONS, output=folder, profile="analytic"))
    return folder


@pytest.fixture
def kept(generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptResults:
    """A place that has a result; files that the test has written count as old."""
    monkeypatch.setattr(loaded_code, "STARTED", time.time() + 60)
    place = KeptResults(tmp_path / "results", "key")
    place.keep(generated, "all equal")
    result = place.find()
    assert result is not None and "all equal" in result.summary
    return place


def test_a_result_is_refused_after_any_loaded_file_has_changed(
    generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_code, "STARTED", time.time() + 60)
    written = tmp_path / "imported_by_the_model.py"
    written.write_text("SCALE = 1\n")
    module = ModuleType("imported_by_the_model")
    module.__file__ = str(written)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    place = KeptResults(tmp_path / "results", "key")
    place.keep(generated, "all equal")
    assert place.find() is not None
    monkeypatch.delitem(sys.modules, module.__name__)
    assert place.find() is not None  # not imported yet
    status = written.stat()
    written.write_text("SCALE = 2\n")
    os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))  # as some tools restore it
    assert place.find() is None


def test_a_result_is_refused_where_other_code_is_loaded(
    kept: KeptResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = tmp_path / "patches_torch.py"
    patch.write_text("")
    module = ModuleType("patches_torch")
    module.__file__ = str(patch)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert kept.find() is None


def test_nothing_is_kept_if_code_has_changed_since_the_process_began(
    generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_code, "STARTED", 0.0)
    place = KeptResults(tmp_path / "results", "key")
    place.keep(generated, "all equal")
    assert place.find() is None


def test_texts_from_elsewhere_are_refused(
    kept: KeptResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state of another user"))
    assert kept.find() is None


@pytest.mark.parametrize("name", ["stage_1.py", "report.html", "plan.json", "../facts.json"])
def test_a_damaged_result_counts_as_absent(name: str, kept: KeptResults, tmp_path: Path) -> None:
    path = tmp_path / "results" / "key" / "generated" / name
    path.write_text(path.read_text()[:-20])
    assert kept.find() is None


def test_the_data_files_of_the_package_count_as_code() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = data_files()
    for package, patterns in declared["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        shipped = {str(path) for pattern in patterns for path in folder.glob(pattern)}
        assert shipped - found <= {str(ROOT / "py.typed")}
    assert len(found) > 40


def _source() -> ModelSource:
    return load_model("mlp")


def test_equal_facts_have_one_place() -> None:
    assert _place(_source(), OPTIONS) == _place(_source(), OPTIONS)
    assert _place(_source(), replace(OPTIONS, no_cache=True)) == _place(_source(), OPTIONS)


def _place(source: ModelSource, options: PartitionOptions, command: str = COMMAND) -> Path:
    kept = KeptResults.of(source, options, command)
    assert kept is not None
    return kept._place


def test_every_fact_changes_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [_place(_source(), OPTIONS)]
    source = _source()
    with torch.no_grad():
        weight = next(source.model.parameters())
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    places.append(_place(source, OPTIONS))
    source = _source()
    source.example_inputs["x"][-1, -1] += 1
    places.append(_place(source, OPTIONS))
    source = _source()
    next(source.model.parameters()).requires_grad_(False)
    places.append(_place(source, OPTIONS))
    source = _source()
    source.model.table = torch.zeros(3)  # neither a parameter nor a buffer
    places.append(_place(source, OPTIONS))
    for changed in ({"threads": 1}, {"micro_batches": 9}, {"loss": "mse"}, {"code": "flat"}):
        places.append(_place(_source(), replace(OPTIONS, **changed)))
    places.append(_place(_source(), OPTIONS, f"{COMMAND} --output other"))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    places.append(_place(_source(), OPTIONS))
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "docs")])
    places.append(_place(_source(), OPTIONS))
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": "mine.py:loss"},
        {"elastic": "2,1", "schedule": "1f1b"},
        {"stop_after": "plan"},
        {"device": "card.toml"},
    ],
)
def test_what_a_users_code_or_file_may_change_has_no_place(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "card.toml").write_text("")
    assert KeptResults.of(_source(), replace(OPTIONS, **changed), COMMAND) is None
    of_user = replace(_source(), spec="mine.py:build")
    assert KeptResults.of(of_user, OPTIONS, COMMAND) is None


def test_few_results_are_kept(kept: KeptResults, generated: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    for number in range(40):
        KeptResults(results, f"{number}").keep(generated, "all equal")
    names = {path.name for path in results.iterdir()}
    assert len(names) == 32 and "39" in names and "key" not in names
    facts = json.loads((results / "39" / "facts.json").read_text())
    assert str(Path(loaded_code.__file__)) in facts["files"]


def test_a_configuration_that_the_printed_model_does_not_show_is_part_of_the_key(
    tmp_path: Path,
) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64}
    config |= {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16}
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    folder, sources = tmp_path / "gpt", []
    folder.mkdir()
    for scales in (False, True):
        changed = config | {"scale_attn_by_inverse_layer_idx": scales}
        (folder / "config.json").write_text(json.dumps(changed))
        sources.append(load_model(str(folder), seq=8))
    assert repr(sources[0].model) == repr(sources[1].model)
    places = [KeptResults.of(source, OPTIONS, COMMAND) for source in sources]
    assert all(places) and len({place._place for place in places if place}) == 2
