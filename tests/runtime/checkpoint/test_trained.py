"""Exports of trained weights, from all places that have some."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncpipe
from asyncpipe.runtime.checkpoint.folders import checkpoints_in
from asyncpipe.runtime.checkpoint.trained import export, find_trained
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.tensor_files import read_tensors
from asyncpipe.tests.support.models.copies import made_once
from asyncpipe.tests.support.models.hand_folders import PlainMlp, write_mlp
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

GPT2 = "--model gpt2 --stages 2 --seq 8 --micro-batch-size 2 --profile analytic --quiet"
SIZES = ("n_layer=2", "n_embd=16", "n_head=2", "vocab_size=61")
NAMES = [*PlainMlp().state_dict()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a generated folder, and a run of it with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    write_mlp(folder / "mlp")
    given: dict[str, Any] = {"schedule": "single", "micro_batches": 2, "threads": 1}
    output = str(folder / "run")
    run(
        Settings(folder=str(folder / "mlp"), output=output, steps=4, save_every=2, **given), FACTORY
    )
    return folder


def test_a_folder_of_transformers_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    generated = tmp_path / "gpt2_2p"
    options = [*GPT2.split(), *(word for size in SIZES for word in ("--model-arg", size))]
    made_once(
        "gpt2 of 2 layers to export",
        generated,
        lambda: command(tmp_path, "partition", *options, "--output", str(generated)),
    )
    told = command(tmp_path, "train", "export", str(generated), "hf", "--json")
    assert told.code == 0, told
    facts = json.loads(told.out)
    assert facts["folder"] == "hf" and facts["weights"] == str(generated / "weights")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    own = asyncpipe.load(generated).state_dict()
    assert model.state_dict().keys() <= own.keys()
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2_2p", "hf"]


def test_a_run_a_checkpoint_and_a_generated_folder_have_weights(
    trained: Path, tmp_path: Path
) -> None:
    run_folder = trained / "run"
    newest, older = checkpoints_in(run_folder)
    places = {
        "run": (run_folder, run_folder / "weights"),
        "newest": (newest, newest / "weights"),
        "older": (older, older / "weights"),
        "generated": (trained / "mlp", trained / "mlp" / "weights"),
    }
    read = {}
    for name, (source, weights) in places.items():
        made = export(source, tmp_path / name)
        assert made.weights == weights and (tmp_path / name / "config.json").is_file()
        assert made.tensors == len(NAMES)
        read[name] = read_tensors(tmp_path / name, NAMES)
        stored = read_tensors(weights, NAMES)
        assert all(torch.equal(stored[key], read[name][key]) for key in NAMES)
    differing = {tuple(one[NAMES[0]].flatten().tolist()) for one in read.values()}
    assert len(differing) == 3  # the run's are those of its newest checkpoint


def test_a_run_that_has_not_ended_has_the_weights_of_its_newest_checkpoint(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "weights")
    newest, _ = checkpoints_in(tmp_path / "run")
    assert find_trained(tmp_path / "run").weights == newest / "weights"
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(AsyncPipeError, match="run has no weights"):
        find_trained(tmp_path / "run")


def test_a_folder_with_files_is_kept_unless_forced_and_loses_only_old_weights(
    trained: Path, tmp_path: Path
) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    for name in ("model.safetensors", "notes.txt"):
        (target / name).write_text("old")
    arguments = ("train", "export", str(trained / "run"), str(target))
    assert "hf is not empty" in error_of(tmp_path, *arguments)
    assert (target / "model.safetensors").read_text() == "old"
    assert command(tmp_path, *arguments, "--force").code == 0
    assert (target / "notes.txt").read_text() == "old"
    # Stale weights in one file would be read in place of the shards.
    assert not (target / "model.safetensors").exists()
    assert read_tensors(target, NAMES).keys() == {*NAMES}


def test_what_cannot_be_exported_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    def refused(source: Path, **more: Any) -> str:
        with pytest.raises(AsyncPipeError) as told:
            export(source, tmp_path / "hf", **more)
        assert not (tmp_path / "hf").exists()
        return f"{told.value.what} {told.value.cure}"

    assert "does not exist" in refused(tmp_path / "none")
    assert "is not a run, a checkpoint" in refused(tmp_path)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "loop.json").write_text("{}")
    assert "--folder" in refused(saved)
    shutil.copytree(trained / "run", tmp_path / "run")
    (newest, _) = checkpoints_in(tmp_path / "run")
    file = next((newest / "weights").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert "is damaged: weights/" in refused(newest)
    assert "is not here" in refused(tmp_path / "run", folder=tmp_path / "gone")
    shutil.copytree(trained / "mlp", tmp_path / "mlp")
    shutil.rmtree(tmp_path / "mlp" / "hf")
    assert "was not made from a transformers model" in refused(
        tmp_path / "run", folder=tmp_path / "mlp"
    )
