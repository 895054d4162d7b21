"""Whole runs in one process: the plain model's numbers, files that repeat and continue a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asyncpipe
from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.option_files import read_config
from asyncpipe.runtime.config.segments import segments
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.control.learning_rate import lr_factor
from asyncpipe.runtime.data.task import SampleOrder
from asyncpipe.runtime.data.tokens import write_bin
from asyncpipe.runtime.errors import AsyncPipeError, DataError
from asyncpipe.runtime.executor.loading import load
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.tensor_files import read_tensors
from asyncpipe.runtime.training.batches import Feed, open_data
from asyncpipe.runtime.training.stage_optimizer import make_optimizer
from asyncpipe.tests.support.models.hand_folders import PlainMlp, PlainText, write_mlp, write_text
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of
from asyncpipe.tests.support.run_configs import run_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_text(folder / "text")
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


def train(folder: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    """Runs alone; the lines of its metrics."""
    given: dict[str, Any] = {
        "schedule": "single",
        "micro_batches": 4,
        "steps": 5,
        "log_every": 1,
        "threads": 1,
    }
    run(Settings(folder=str(folder), output=str(output), **(given | options)), FACTORY)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def values(lines: list[dict[str, Any]], event: str, name: str) -> list[Any]:
    return [line[name] for line in lines if line["event"] == event]


def plain_losses(
    folder: Path, model: nn.Module, loss_of: Callable[[dict[str, Tensor]], Tensor], **options: Any
) -> tuple[list[float], list[float]]:
    """The loop that a person would write: losses and gradient norms before clipping."""
    job = make_job(Settings(folder=str(folder), schedule="single", **options))
    settings, plan = job.config, job.plan
    data = open_data(settings, job.task, plan, Path())
    order = SampleOrder(len(data.train), settings.seed)
    feed = Feed(data.train, order, StepBatch.of(settings), job.task.fields)
    optimizer = make_optimizer(model.parameters(), settings)
    losses, norms = [], []
    for step in range(settings.steps):
        total = 0.0
        for i in range(4):
            loss = loss_of(feed(step * 4 + i))
            (loss / 4).backward()
            total += loss.item() / 4
        limit = settings.clip or math.inf
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        for group in optimizer.param_groups:
            group["lr"] = (settings.lr or 0) * lr_factor(
                step,
                steps=settings.steps,
                warmup=settings.warmup or 0,
                decay=settings.decay or "none",
                final_ratio=settings.final_lr_ratio or 0,
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def test_a_run_keeps_the_memory_that_it_frees(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, bool]] = []
    place = "asyncpipe.runtime.training.setup.keep_freed_memory"
    monkeypatch.setattr(place, lambda **options: asked.append(options))
    train(folders / "mlp", tmp_path / "run", steps=1)
    assert asked == [{"few": False}]


def test_one_process_trains_the_plain_model(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float64", "steps": 5, "micro_batches": 4}
    torch.manual_seed(7)
    model = PlainMlp().double()

    def loss_of(fields: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(fields["x"]), fields["target"])

    lines = train(folders / "mlp", tmp_path / "run", **options)
    losses, norms = plain_losses(folders / "mlp", model, loss_of, **options)
    assert values(lines, "step", "loss") == pytest.approx(losses, rel=1e-12)
    assert values(lines, "step", "grad_norm") == pytest.approx(norms, rel=1e-6)
    written = read_tensors(tmp_path / "run" / "weights", model.state_dict())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_smaller_last_micro_batch_weighs_less(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "dtype": "float64",
        "global_batch_size": 14,
        "micro_batch_size": 4,
        "micro_batches": None,
        "clip": 0.0,
        "decay": "none",
    }
    lines = train(folders / "mlp", tmp_path / "run", recompute="all", **options)
    torch.manual_seed(7)
    model = PlainMlp().double()
    # The plain model on all 14 samples of a step at once.
    job = make_job(Settings(folder=str(folders / "mlp"), schedule="single", **options))
    data = open_data(job.config, job.task, job.plan, Path())
    order = SampleOrder(len(data.train), job.config.seed)
    feed = Feed(data.train, order, StepBatch((14,)), job.task.fields)
    optimizer = make_optimizer(model.parameters(), job.config)
    losses = []
    for step in range(5):
        fields = feed(step)
        loss = F.cross_entropy(model(fields["x"]), fields["target"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert values(lines, "step", "loss") == pytest.approx(losses, rel=1e-12)
    assert "global_batch_size = 14" in (tmp_path / "run" / "config.toml").read_text()


def test_clipping_and_tied_weights_are_those_of_the_plain_model(
    folders: Path, tmp_path: Path, text_file: Path
) -> None:
    options: dict[str, Any] = {
        "dtype": "float64",
        "steps": 5,
        "micro_batches": 4,
        "clip": 0.5,
        "lr": 0.01,
        "data": str(text_file),
    }
    torch.manual_seed(7)
    model = PlainText().double()
    lines = train(folders / "text", tmp_path / "run", **options)
    losses, norms = plain_losses(
        folders / "text", model, lambda fields: model(**fields)[0], **options
    )
    assert min(norms) > 0.5
    assert values(lines, "step", "loss") == pytest.approx(losses, rel=1e-9)
    assert values(lines, "step", "grad_norm") == pytest.approx(norms, rel=1e-6)
    written = read_tensors(tmp_path / "run" / "weights", ["wte.weight", "norm.bias"])
    torch.testing.assert_close(written["wte.weight"], model.wte.weight.detach(), rtol=1e-6, atol=0)


def test_a_run_is_repeated_by_its_config(folders: Path, tmp_path: Path, text_file: Path) -> None:
    first = train(folders / "text", tmp_path / "1", data=str(text_file), eval_every=2, lr=0.01)
    options = read_config(tmp_path / "1" / "config.toml")
    run(Settings(**options, output=str(tmp_path / "2")), FACTORY)
    second = [json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").open()]
    for event, name in (("step", "loss"), ("step", "lr"), ("eval", "loss"), ("eval", "step")):
        assert values(first, event, name) == values(second, event, name)
    assert values(first, "eval", "step") == [2, 4, 5]


def test_what_will_be_done_is_said_first(folders: Path, tmp_path: Path, text_file: Path) -> None:
    train(folders / "text", tmp_path / "run", data=str(text_file), clip=1.0)
    (facts,) = events_of(tmp_path / "run", "start")
    assert facts["batch"] == "8 sequences per step = 4 micro-batches × 2 sequences × 1 replica"
    assert "grad clip 1 (global norm)" in facts["optimizer"]
    assert f"{text_file} (4,500 tokens, byte tokenizer)" in facts["data"]
    steps = events_of(tmp_path / "run", "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    (end,) = events_of(tmp_path / "run", "end")
    assert end["first_loss"] == steps[0]["loss"] and end["last_loss"] == steps[-1]["loss"]
    assert facts["predicted"].startswith("24.00 ms per step without the optimizer")
    assert 24.0 < end["simulated_step_ms"] < 48.0


def test_only_due_steps_become_lines(folders: Path, tmp_path: Path) -> None:
    lines = train(folders / "mlp", tmp_path / "run", steps=7, log_every=3)
    assert values(lines, "step", "step") == [1, 3, 6, 7]
    assert len(events_of(tmp_path / "run", "step")) == 7


def test_a_classifier_gets_an_accuracy(folders: Path, tmp_path: Path) -> None:
    lines = train(folders / "mlp", tmp_path / "run", eval_batches=3)
    (accuracy,) = values(lines, "eval", "accuracy")
    assert accuracy * 12 == pytest.approx(round(accuracy * 12))
    assert values(lines, "eval", "batches") == [3]


def test_evaluation_is_the_mean_loss_of_the_trained_model(
    folders: Path, tmp_path: Path, text_file: Path
) -> None:
    lines = train(folders / "text", tmp_path / "run", data=str(text_file), eval_batches=2)
    job = make_job(Settings(folder=str(folders / "text"), data=str(text_file)))
    data = open_data(job.config, job.task, job.plan, Path())
    assert data.evaluation is not None
    pipe = load(folders / "text", weights=tmp_path / "run" / "weights").eval()
    feed = Feed(data.evaluation, None, StepBatch((2,)), job.task.fields)
    losses = [pipe(**feed(i))["loss"].item() for i in range(2)]
    assert values(lines, "eval", "loss") == pytest.approx([sum(losses) / 2], rel=1e-6)


def test_a_run_starts_from_the_weights_of_another(
    folders: Path, tmp_path: Path, text_file: Path
) -> None:
    options: dict[str, Any] = {"data": str(text_file), "lr": 0.01, "eval_batches": 2}
    first = train(folders / "text", tmp_path / "1", **options)
    weights = str(tmp_path / "1" / "weights")
    second = train(folders / "text", tmp_path / "2", init_from=weights, **options | {"lr": 0.0})
    assert values(second, "eval", "loss") == values(first, "eval", "loss")


def test_weights_of_another_model_are_refused(folders: Path, tmp_path: Path) -> None:
    wide = PlainMlp().state_dict() | {"layers.1.weight": torch.zeros(32, 16)}
    from safetensors.torch import save_file

    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(DataError, match=r"1 of 4 tensors differ in shape.*\(32, 16\) in the file"):
        train(folders / "mlp", tmp_path / "run", init_from=str(tmp_path / "wide.safetensors"))


def test_exported_folders_hold_weights_and_configuration(
    folders: Path, tmp_path: Path, text_file: Path
) -> None:
    target = tmp_path / "hf"
    train(folders / "text", tmp_path / "run", data=str(text_file), export_hf=str(target))
    assert json.loads((target / "config.json").read_text()) == {"architectures": ["Handmade"]}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert "head.weight" not in index["weight_map"]
    names = set(PlainText().state_dict()) - {"head.weight"}
    assert set(index["weight_map"]) == names
    sizes = [tensor.numel() * 4 for tensor in read_tensors(target, names).values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_a_model_of_ones_own_cannot_be_exported_to_transformers(
    tmp_path: Path, folders: Path
) -> None:
    write_mlp(tmp_path / "mlp")
    (tmp_path / "mlp" / "hf" / "config.json").unlink()
    with pytest.raises(DataError, match="was not made from a transformers model"):
        train(tmp_path / "mlp", tmp_path / "run", export_hf=str(tmp_path / "hf"))


def test_a_token_without_a_row_is_named(folders: Path, tmp_path: Path) -> None:
    ids = np.arange(5000, dtype="uint16") % 200
    ids[4000] = 300
    header = {"dtype": "uint16", "vocab_size": 301, "tokenizer": "llama3"}
    write_bin(tmp_path / "data.bin", ids, header)
    with pytest.raises(DataError) as error:
        train(folders / "text", tmp_path / "run", data=str(tmp_path / "data.bin"))
    assert error.value.what == (
        f"token id 300 in {tmp_path / 'data.bin'}, but the model has 256 rows in wte. "
        "The data was made with another tokenizer (its header says: llama3)."
    )


def test_positions_are_not_taken_for_tokens(folders: Path, tmp_path: Path) -> None:
    ids = np.arange(5000, dtype="uint16") % 200  # more than the 64 rows of wpe
    write_bin(tmp_path / "data.bin", ids, {"dtype": "uint16", "tokenizer": "own"})
    train(folders / "text", tmp_path / "run", data=str(tmp_path / "data.bin"))


def test_a_dry_run_says_all_and_writes_nothing(folders: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    settings = Settings(
        folder=str(folders / "mlp"), output=str(output), micro_batches=1, dry_run=True
    )
    run(settings, FACTORY)
    (facts,) = events_of(output, "start")
    assert facts["ranks"].startswith("2 processes")
    (warning,) = events_of(output, "warning")
    assert "1 micro-batch" in warning and "idle" in warning
    assert not output.exists()


def test_a_folder_that_holds_a_run_is_not_written_over(folders: Path, tmp_path: Path) -> None:
    train(folders / "mlp", tmp_path / "run", steps=1)
    with pytest.raises(SettingsError, match="already contains a run"):
        train(folders / "mlp", tmp_path / "run", steps=1)


def test_a_run_that_failed_before_its_first_step_is_in_nobodys_way(
    folders: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "run" / "logs" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (tmp_path / "data.py").write_text("def broken(): raise ValueError('no file')")
    with pytest.raises(AsyncPipeError, match="no file"):
        train(folders / "mlp", tmp_path / "run", data=f"{tmp_path}/data.py:broken")
    assert "no file" in (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = train(folders / "mlp", tmp_path / "run", steps=2)
    assert values(lines, "step", "step") == [1, 2] and not values(lines, "failure", "text")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("has_reported", [True, False])
def test_a_run_that_was_killed_before_its_first_step_is_in_nobodys_way(
    folders: Path, tmp_path: Path, has_reported: bool
) -> None:
    (tmp_path / "data.py").write_text("def broken(): raise ValueError('no file')")
    with pytest.raises(AsyncPipeError, match="no file"):
        train(folders / "mlp", tmp_path / "run", data=f"{tmp_path}/data.py:broken")
    (tmp_path / "run" / "metrics.jsonl").unlink()  # it could not report its failure
    if has_reported:
        (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "start"}\n')
    lines = train(folders / "mlp", tmp_path / "run", steps=2)
    assert values(lines, "step", "step") == [1, 2]


def test_a_folder_ranks_of_the_user_is_no_run(folders: Path, tmp_path: Path) -> None:
    mine = tmp_path / "ranks" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(SettingsError, match="is not a run's folder"):
        train(folders / "mlp", tmp_path, steps=1)
    assert mine.read_text() == "mine"


def test_a_run_that_failed_after_a_step_is_kept(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "rate.py").write_text("def rate(step, steps): return [1.0, 1.0][step]")
    with pytest.raises(AsyncPipeError, match="index out of range"):
        train(folders / "mlp", tmp_path / "run", lr_schedule=f"{tmp_path}/rate.py:rate")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    without_losses = [line for line in lines if json.loads(line)["event"] != "step"]
    for kept in ("".join(lines), "".join(without_losses)):  # which are reported later
        metrics.write_text(kept)
        with pytest.raises(SettingsError, match="already contains a run"):
            train(folders / "mlp", tmp_path / "run")
        assert metrics.read_text() == kept


def test_a_loss_in_a_tensor_of_one_number_is_that_number(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def loss(outputs, target): return cross_entropy(outputs, target)[None, None]\n"
    )
    own = f"{tmp_path}/own.py:loss"
    first, second = (
        values(train(folders / "mlp", tmp_path / name, criterion=criterion), "step", "loss")
        for name, criterion in (("one", "cross_entropy"), ("two", own))
    )
    assert first == second


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.relu(self.head(self.rows(ids)))


@pytest.mark.parametrize("sequence_dim", ["auto", None])
def test_tokens_per_second_count_those_of_a_sample(
    sequence_dim: Literal["auto"] | None, tmp_path: Path
) -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    asyncpipe.partition(
        Tagger(),
        {"ids": ids},
        stages=2,
        loss="cross_entropy",
        output=tmp_path / "cut",
        profile="analytic",
        sequence_dim=sequence_dim,
    )
    (tmp_path / "own.py").write_text(
        "import torch\ndef data():\n    ids = torch.zeros(40, 6, dtype=torch.int64)\n"
        "    return {'ids': ids, 'target': ids}\n"
    )
    train(tmp_path / "cut", tmp_path / "run", data=f"{tmp_path}/own.py:data")
    (end,) = events_of(tmp_path / "run", "end")
    assert end["unit"] == "tok"
    tokens = 6 * 2 * 4  # of two samples in each of four micro-batches
    assert end["rate"] * end["step_ms"] / 1000 == pytest.approx(tokens)


def test_runs_are_numbered(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run(Settings(folder=str(folders / "mlp"), schedule="single", steps=1), FACTORY)
    assert sorted(path.name for path in (tmp_path / "runs" / "mlp").iterdir()) == ["1", "2"]
    assert not (tmp_path / "runs" / "mlp" / "1" / "ranks").exists()


def test_a_folder_that_is_not_generated_is_named(tmp_path: Path) -> None:
    with pytest.raises(AsyncPipeError, match="has no plan.json"):
        run(Settings(folder=str(tmp_path)), FACTORY)


def test_asynchronous_segments_end_at_evaluations_and_before_they_grow_long() -> None:
    def ends(**options: Any) -> list[int]:
        settings = run_config(schedule="async-1f1b", **options)
        return [segment.steps.stop for segment in segments(settings)]

    assert ends(steps=10, eval_every=4, micro_batches=1) == [4, 8, 10]
    assert ends(steps=5000, micro_batches=2) == [2048, 4096, 5000]
    assert ends(steps=2, micro_batches=8192) == [1, 2]
    assert ends(steps=10, flush_every=3, eval_every=5, micro_batches=1) == [3, 5, 6, 9, 10]
    assert ends(steps=20, sync_start="10%", micro_batches=1) == [1, 2, 20]
    assert ends(steps=20, sync_end="15%", eval_every=8, micro_batches=1) == [8, 16, 17, 18, 19, 20]
    synchronous = [segment.steps for segment in segments(run_config(steps=3))]
    assert synchronous == [range(0, 1), range(1, 2), range(2, 3)]
