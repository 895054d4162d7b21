"""`--ema`: torch's AveragedModel of a plain loop, evaluated, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.task import SampleOrder
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.training.batches import Feed, open_data
from asyncpipe.runtime.training.stage_optimizer import make_optimizer
from asyncpipe.tests.support.models.hand_folders import PlainMlp, write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import (
    as_ended_at,
    assert_goes_on_as,
    tensors_in,
    train,
)

ASYNC: dict[str, Any] = {"schedule": "async-1f1b", "ranks": 1, "micro_batches": 2}
EMA: dict[str, Any] = {"ema": 0.75, "lr": 0.05, "dtype": "float64"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "noisy", noisy=True)
    return folder


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_the_weights_are_torchs_average_of_a_plain_loop(
    folder: Path, tmp_path: Path, clip: float
) -> None:
    """With a clip by the norm of all stages, the last one of a rank steps all of them."""
    options: dict[str, Any] = {**EMA, "schedule": "auto", "ranks": 1, "clip": clip}
    options |= {"micro_batches": 1, "steps": 5, "decay": "none", "warmup": 0}
    found = train(folder / "mlp", tmp_path / "run", **options)
    job = make_job(Settings(folder=str(folder / "mlp"), **options))
    config, data = job.config, open_data(job.config, job.task, job.plan, Path())
    order = SampleOrder(len(data.train), config.seed)
    feed = Feed(data.train, order, StepBatch.of(config), job.task.fields)
    torch.manual_seed(7)
    model = PlainMlp().double()
    optimizer = make_optimizer(model.parameters(), config)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for step in range(5):
        fields = feed(step)
        F.cross_entropy(model(fields["x"]), fields["target"]).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    for name, tensor in average.module.state_dict().items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(found.weights["layers.0.weight"], model.layers[0].weight)


def test_the_average_of_a_run_is_torchs_of_its_live_weights_to_the_last_bit(
    folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**EMA, "schedule": "single", "save_every": 1, "steps": 4}
    train(folder / "mlp", tmp_path / "plain", **(options | {"ema": None}))
    found = train(folder / "mlp", tmp_path / "run", **options)
    plain = sorted((tmp_path / "plain" / "checkpoints").iterdir())
    average = AveragedModel(PlainMlp().double(), multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for checkpoint in plain:
        model = PlainMlp().double()
        model.load_state_dict(tensors_in(checkpoint / "weights"))
        average.update_parameters(model)
    for name, tensor in average.module.state_dict().items():
        assert torch.equal(found.weights[name], tensor)
        live = found.state[f"live.{name}"]
        assert torch.equal(live, model.state_dict()[name]) and not torch.equal(live, tensor)


@pytest.mark.parametrize(
    "given", [{"schedule": "single"}, ASYNC, ASYNC | {"staleness": "stash+pipemare-rate"}]
)
def test_a_resumed_run_continues_to_the_last_bit(
    folder: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    options = {"ema": 0.75, "lr": 0.05, **given}
    whole = train(folder / "noisy", tmp_path / "whole", **options)
    assert any(name.startswith("staleness.ema.average.") for name in whole.state)
    assert_goes_on_as(whole, folder / "noisy", 2, **options)


def test_evaluations_use_the_average_also_of_a_run_that_resumes_at_its_end(
    folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**EMA, "schedule": "single", "eval_batches": None, "eval_every": 2}
    whole = train(folder / "mlp", tmp_path / "whole", **options)
    plain = train(folder / "mlp", tmp_path / "plain", **(options | {"ema": None}))

    def last(records: list[dict[str, Any]]) -> float:
        return [each["loss"] for each in records if each["event"] == "eval"][-1]

    assert whole.of("loss") == plain.of("loss")
    assert last(whole.records) != last(plain.records)
    left = as_ended_at(whole, 6, tmp_path / "again")
    again = train(folder / "mlp", left, **options, resume=str(left))
    assert last(again.records) == last(whole.records)
    for name, tensor in whole.weights.items():
        assert torch.equal(again.weights[name], tensor)


def test_a_method_that_evaluates_other_weights_does_not_fit(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = ASYNC | {"ema": 0.9, "staleness": "stash+error-feedback"}
    with pytest.raises(AsyncPipeError, match="error-feedback evaluates other weights"):
        train(folder / "mlp", tmp_path / "run", **options)
