"""Fine-tuning from end to end, on stand-ins of the two archives that the example reads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load

from asyncpipe.runtime.user_code import import_file
from asyncpipe.tests.support.models.finetune_archives import (
    encoder,
    rated_lines,
    ratings,
    write_stand_in,
)
from asyncpipe.tests.support.processes.quick_python import bin_folder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user would be: the examples, and what they had downloaded."""
    made = tmp_path_factory.mktemp("user")
    write_stand_in(made)
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.fixture
def example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(folder)
    return import_file(ROOT / "examples" / "finetune.py", "finetune_example")


def command(folder: Path, name: str, *arguments: str) -> str:
    result = subprocess.run(
        [bin_folder() / f"asyncpipe-{name}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_model_has_the_pretrained_weights_and_a_new_classifier(example: ModuleType) -> None:
    model, inputs = example.build()
    pretrained = load(encoder()["model.safetensors"])
    own = model.state_dict()
    assert {name.removeprefix("bert.") for name in own} == {
        *(pretrained.keys() - {"embeddings.position_ids"}),
        "classifier.weight",
        "classifier.bias",
    }
    for name, tensor in pretrained.items():
        if name != "embeddings.position_ids":
            assert torch.equal(own["bert." + name], tensor), name
    assert model(**inputs).logits.shape == (8, 2)


def test_nearly_neutral_sentences_are_left_out_and_labels_are_signs(example: ModuleType) -> None:
    train, held_out = example.data()
    kept = ratings(rated_lines(400))
    assert held_out["labels"].tolist() == [int(rating > 0) for rating in kept[::10]]
    assert len(train["labels"]) + len(held_out["labels"]) == len(kept) == 350
    assert 0.3 < train["labels"].float().mean() < 0.7


def test_sentences_are_padded_under_a_mask(example: ModuleType) -> None:
    train, _ = example.data()
    assert train["input_ids"].shape == train["attention_mask"].shape == (315, 32)
    length = train["attention_mask"].sum(1)
    assert set(length.tolist()) == {8}  # six words between [CLS] and [SEP]
    assert not train["input_ids"][:, 8:].any() and train["input_ids"][:, :8].all()
    assert (train["input_ids"] != 1).all()  # no word is unknown


@pytest.fixture(scope="module")
def generated(folder: Path) -> Path:
    made = "asyncpipe-partition --model examples/finetune.py:build --stages 2 --profile analytic"
    command(folder, "partition", *made.split()[1:], "--micro-batch-size", "4", "--quiet")
    return folder / "generated_models" / "finetune_2p"


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_tuned_classifier_answers_sentences_that_it_has_not_seen(
    folder: Path, generated: Path, schedule: str
) -> None:
    run = f"runs/{schedule}"
    options = f"--schedule {schedule} --micro-batches 4 --steps 60 --lr 3e-3 --eval-batches 9"
    source = "--data examples/finetune.py:data --log-every 60"
    command(folder, "train", str(generated), *source.split(), *options.split(), "--output", run)
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    end = json.loads(lines[-1])
    assert end["event"] == "end" and end["accuracy"] > 0.9
    written = json.loads((folder / run / "weights" / "model.safetensors.index.json").read_text())
    assert "bert.encoder.layer.1.output.dense.weight" in written["weight_map"]
