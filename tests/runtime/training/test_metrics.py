"""`--metric` and `--early-stop`: means over all samples, however they are divided, and one end of
the run on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.executor.loading import load
from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.reports.measures import metrics_of_evaluations
from asyncpipe.tests.support.models.hand_folders import CLASSES, WIDTH, write_mlp, write_text
from asyncpipe.tests.support.oracles.resumed_runs import as_ended_at, left_by
from asyncpipe.tests.support.processes.in_process import command
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

OWN = f"""
import torch

def rows(count):
    generator = torch.Generator().manual_seed(count)
    points = torch.randn(count, {WIDTH}, generator=generator)
    return {{"x": points, "target": torch.randint({CLASSES}, (count,), generator=generator)}}

def data():
    return rows(24), rows(22)

def margin(outputs, target):
    best = outputs.topk(2).values
    first = (target == 0).double().mean()
    return {{"margin": (best[:, 0] - best[:, 1]).double().mean(), "first": first}}

class Scores:
    def __call__(self, outputs, target):
        said, true = outputs.argmax(-1) == 0, target == 0
        loss = torch.nn.functional.cross_entropy(outputs, target, reduction="sum")
        return {{"loss of all": loss.double(), "right": (said & true).sum(),
                "said": said.sum() + true.sum(), "count": len(target)}}

    def finish(self, sums):
        perplexity = torch.as_tensor(sums["loss of all"] / sums["count"]).exp()
        return {{"perplexity": perplexity, "f1": 2 * sums["right"] / sums["said"]}}

def mean(outputs, target):
    return outputs.mean()

def several(outputs, target):
    return outputs

def taken(outputs, target):
    return {{"loss": 1.0}}

def broken(outputs, target):
    return outputs.nothing

def of_text(outputs, target):
    assert set(outputs) >= {{"logits"}} and outputs["logits"].shape[:2] == target.shape
    return float(outputs["logits"].double().mean())
"""
MARGIN = ("margin", "first")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    (folder / "own_metrics.py").write_text(OWN)
    return folder


def train(
    folder: Path, output: Path, model: Path | None = None, **options: Any
) -> list[dict[str, Any]]:
    own = folder / "own_metrics.py"
    given: dict[str, Any] = {
        "folder": str(model or folder / "mlp"),
        "output": str(output),
        "threads": 1,
    }
    given |= {"schedule": "single", "steps": 2, "micro_batches": 2, "micro_batch_size": 4}
    given |= {"data": f"{own}:data", "log_every": 1, "pin": "none", **options}
    if "metric" in options:
        given["metric"] = f"{own}:{options['metric']}"
    run(Settings(**given), FACTORY)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def expected(folder: Path, output: Path, metric: str = "margin") -> dict[str, float]:
    """The metric of all 22 samples at once, of the weights of the run."""
    space: dict[str, Any] = {}
    exec(OWN, space)
    rows = space["rows"](22)
    pipe = load(folder / "mlp", weights=output).eval()
    with torch.no_grad():
        outputs = pipe(rows["x"])
        if metric == "Scores":
            scores = space["Scores"]()
            found = scores.finish(scores(outputs, rows["target"]))
        else:
            found = space["margin"](outputs, rows["target"])
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "replicas": 2},
        {"schedule": "async-1f1b", "micro_batch_size": 2},
    ],
)
def test_a_metric_is_the_mean_over_all_samples(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """22 samples in micro-batches of 4, the last one smaller."""
    lines = train(folder, tmp_path / "run", metric="margin", **options)
    (evaluated,) = [line for line in lines if line["event"] == "eval"]
    for name, value in expected(folder, tmp_path / "run").items():
        assert evaluated[name] == pytest.approx(value, rel=1e-6)
    assert evaluated["samples"] == 22 and "metrics" not in evaluated
    (end,) = [line for line in lines if line["event"] == "end"]
    assert end["metrics"] == {name: evaluated[name] for name in MARGIN}
    series = metrics_of_evaluations(read_run(tmp_path / "run"))
    assert series["margin"] == ((2.0, evaluated["margin"]),) and "accuracy" in series


def test_a_metric_that_is_no_mean_is_made_of_sums_over_all_replicas(
    folder: Path, tmp_path: Path
) -> None:
    lines = train(
        folder, tmp_path / "run", metric="Scores", schedule="1f1b", replicas=2, eval_every=1
    )
    evaluated = [line for line in lines if line["event"] == "eval"][-1]
    for name, value in expected(folder, tmp_path / "run", "Scores").items():
        assert evaluated[name] == pytest.approx(value, rel=1e-6)


def test_a_metric_of_a_model_with_labels_gets_its_logits_and_labels(
    folder: Path, tmp_path: Path
) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    options: dict[str, Any] = {"data": str(tmp_path / "words.txt"), "metric": "of_text"}
    options |= {"eval_batches": 3, "micro_batch_size": None, "steps": 1}
    lines = train(folder, tmp_path / "run", model=tmp_path / "text", **options)
    assert [line["of_text"] for line in lines if line["event"] == "eval"] != []


def test_the_line_of_an_evaluation_shows_it(folder: Path, tmp_path: Path) -> None:
    own = folder / "own_metrics.py"
    words = ("--schedule", "single", "--steps", "1", "--micro-batch-size", "4", "--threads", "1")
    words += ("--data", f"{own}:data", "--metric", f"{own}:mean", "--output", "run")
    outcome = command(tmp_path, "train", str(folder / "mlp"), *words)
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("eval at step 1")]
    assert "  mean " in line and "22 of 22 samples" in line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"metric": "several"},
            r"returned a tensor \[4, \d+\] as several, which is not",
        ),
        ({"metric": "taken"}, "returned a metric named loss"),
        (
            {"metric": "broken"},
            r"--metric .*broken failed at .*metrics\.py:\d+: AttributeError",
        ),
        ({"metric": "mean", "eval_batches": 0}, r"--metric .*, but no evaluation is made"),
        ({"early_stop": 2, "eval_batches": 0}, "--early-stop 2, but no evaluation is made"),
        ({"early_stop": 2}, "--early-stop 2, but there is one evaluation, at the end"),
    ],
)
def test_what_does_not_fit_is_told_in_a_sentence(
    folder: Path, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(AsyncPipeError, match=told):
        train(folder, tmp_path / "run", **options)


GROWING: dict[str, Any] = {"lr": 3.0, "optimizer": "sgd", "momentum": 0.0, "steps": 40}
GROWING |= {"eval_every": 2, "clip": 0.0, "warmup": 0, "decay": "none"}


@pytest.mark.parametrize("schedule", ["single", "1f1b", "async-1f1b"])
def test_a_run_ends_after_so_many_evaluations_without_a_lower_loss(
    folder: Path, tmp_path: Path, schedule: str
) -> None:
    lines = train(folder, tmp_path / "run", **GROWING, early_stop=3, schedule=schedule)
    losses = [line["loss"] for line in lines if line["event"] == "eval"]
    assert len(losses) < 20, losses
    assert losses.index(min(losses)) == len(losses) - 4
    (end,) = [line for line in lines if line["event"] == "end"]
    assert end["steps"] == 2 * len(losses) and end["eval_loss"] == losses[-1]
    assert (tmp_path / "run" / "weights").is_dir()
    about = [text for label, text in events_of(tmp_path / "run", "note") if label == "ended"]
    assert len(about) == 1 and "3 evaluations without a loss below" in about[0]


def test_a_resumed_run_counts_on_and_one_that_has_ended_stays_ended(
    folder: Path, tmp_path: Path
) -> None:
    options = GROWING | {"early_stop": 3, "save_every": 1, "keep_last": 99}
    lines = train(folder, tmp_path / "whole", **options)
    steps = [line["steps"] for line in lines if line["event"] == "end"]
    whole = left_by(tmp_path / "whole")
    for step in (steps[0] - 3, steps[0]):
        left = as_ended_at(whole, step, tmp_path / f"at-{step}")
        again = train(folder, left, **options, resume=str(left))
        assert [line["steps"] for line in again if line["event"] == "end"] in (steps, [])
        assert max(line["step"] for line in again if line["event"] == "step") == steps[0]
