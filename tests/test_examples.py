"""The examples of a loop of one's own run, on tiny sizes, and do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file

import asyncpipe
from asyncpipe.tests.support.models.copies import made_once
from asyncpipe.tests.support.processes.in_process import command
from asyncpipe.tests.support.processes.quick_python import AS_NOTEBOOK, bin_folder

EXAMPLES = Path(__file__).parent.parent / "examples"
RESIDUAL_MLP = f"--model {EXAMPLES / 'residual_mlp.py'}:build --stages 2 --profile analytic --quiet"


def printed(folder: Path, *words: str | Path) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(folder: Path, name: str, *options: str) -> str:
    return printed(folder, bin_folder() / "python", "-c", AS_NOTEBOOK, EXAMPLES / name, *options)


@pytest.fixture
def residual_mlp(tmp_path: Path) -> Path:
    def make() -> None:
        command(tmp_path, "partition", *RESIDUAL_MLP.split(), "--output", "residual_mlp_2p")

    return made_once("residual_mlp of the examples", tmp_path / "residual_mlp_2p", make)


def evaluated(text: str) -> float:
    found = re.search(r"evaluation  loss ([\d.]+)  200 samples", text)
    assert found, text
    return float(found[1])


def test_the_own_loop_has_forty_lines_and_learns_under_torchrun(
    residual_mlp: Path, tmp_path: Path
) -> None:
    file = EXAMPLES / "own_loop.py"
    assert len(file.read_text().splitlines()) <= 40
    torchrun = (bin_folder() / "torchrun", "--standalone", "--nproc-per-node", "2")
    assert evaluated(printed(tmp_path, *torchrun, file, residual_mlp, "40")) < 0.7


def test_the_own_loop_runs_under_accelerate_launch(residual_mlp: Path, tmp_path: Path) -> None:
    accelerate = Path(sys.executable).parent / "accelerate"
    options = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    file = EXAMPLES / "own_loop.py"
    text = printed(tmp_path, accelerate, "launch", *options.split(), file, residual_mlp, "40")
    assert text.count("evaluation") == 1  # of rank 0 alone: there is another one
    assert evaluated(text) < 0.7


def test_a_gpt_learns_tokens_without_flushes(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 40)
    sizes = "--steps 20 --samples 8 --length 16 --width 16 --layers 2 --lr 1e-2"
    text = example(tmp_path, "pretrain_tokens.py", "text", *sizes.split())
    found = re.search(r"loss ([\d.]+) -> ([\d.]+); weights in trained_tokens/weights", text)
    assert found and float(found[2]) < 0.8 * float(found[1]), text
    generated = tmp_path / "generated_models" / "tokens"
    trained = asyncpipe.load(generated, weights=tmp_path / "trained_tokens" / "weights")
    before = asyncpipe.load(generated).state_dict()
    assert all(not torch.equal(before[n], t) for n, t in trained.state_dict().items())


def test_a_causal_model_is_tuned_exported_and_generates(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 120)
    sizes = "--make --epochs 2 --length 16 --batch 4 --lr 3e-3"
    text = example(tmp_path, "finetune_causal.py", "tiny", "text", *sizes.split())
    losses = [float(loss) for loss in re.findall(r"epoch \d  loss ([\d.]+)", text)]
    assert losses[1] < losses[0] < 6
    assert text.splitlines()[-1].startswith("the ") and "fox" in text.splitlines()[-1], text
    exported = load_file(tmp_path / "finetuned" / "hf" / "model.safetensors")
    saved = asyncpipe.load(
        tmp_path / "generated_models" / "causal",
        weights=tmp_path / "finetuned" / "checkpoint" / "weights",
    ).state_dict()
    assert exported.keys() <= saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in exported.items())


def test_a_vision_transformer_learns_from_a_data_loader_with_workers(tmp_path: Path) -> None:
    sizes = "--epochs 2 --depth 2 --width 16 --lr 1e-2 --workers 1"
    text = example(tmp_path, "vit_dataloader.py", *sizes.split())
    accuracy = re.search(r"accuracy ([\d.]+)%", text)
    assert accuracy and float(accuracy[1]) > 25, text


def test_the_notebook_runs_and_draws(tmp_path: Path) -> None:
    for name in ("quickstart.ipynb", "residual_mlp.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    notebook = nbformat.read(tmp_path / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbformat.validate(notebook)
    made = NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
    kinds = [kind for output in outputs for kind in output.get("data", ())]
    assert "text/html" in kinds and kinds.count("image/svg+xml") == 2
    text = "".join(output.get("text", "") for output in outputs)
    first, last, evaluation = map(float, re.findall(r"\d\.\d{3}", text)[:3])
    assert last < first / 2 and evaluation < first / 2
    assert float(text.rpartition("accuracy ")[2].split("%")[0]) > 80
