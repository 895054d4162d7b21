"""Optimizers and learning rate schedules of the user's own: a plain loop's numbers, checkpoints
to the last bit, and one sentence for what does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncpipe.runtime.checkpoint.resuming import with_options_of_run
from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.option_files import settings_from
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.task import SampleOrder
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.training.batches import Feed, open_data
from asyncpipe.runtime.user_code import import_file
from asyncpipe.tests.support.models.hand_folders import PlainMlp, write_mlp, write_text
from asyncpipe.tests.support.oracles.resumed_runs import assert_goes_on_as, assert_same, train
from asyncpipe.tests.support.processes.silent_reporter import events_of

OWN = '''
import torch
from torch.optim import Optimizer


class Counting(Optimizer):
    """Signed momentum, whose counts are Python's numbers, of a parameter and of a group."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "made": 0, "betas": (0.5, 0.25)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["made"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "count" not in state:
                    state.update(count=0, mean=torch.zeros_like(parameter))
                state["count"] += 1
                state["mean"].lerp_(parameter.grad, group["betas"][0])
                size = group["lr"] / (state["count"] + group["made"])
                parameter.sub_(state["mean"].sign(), alpha=size)


class Clipping(torch.optim.SGD):
    """Clips the gradients of all its parameters together."""

    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        super().step()


def clipping(named, lr):
    return Clipping([parameter for _, parameter in named], lr)


class Averaging(Optimizer):
    """Trains at a point between fast weights and their mean, which `eval` moves to."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "made": 0, "trains": False})

    @torch.no_grad()
    def _move(self, trains, share):
        for group in self.param_groups:
            if group["trains"] != trains:
                for parameter in (each for each in group["params"] if each in self.state):
                    parameter.lerp_(self.state[parameter]["fast"], share)
            group["trains"] = trains

    def train(self):
        self._move(True, 0.1)

    def eval(self):
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["trains"]
            group["made"] += 1
            for parameter in group["params"]:
                fast = self.state[parameter].setdefault("fast", parameter.clone())
                parameter.lerp_(fast, 1 - 1 / 0.9)
                fast.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(fast, 1 / group["made"])
                parameter.lerp_(fast, 0.1)


class Inexact(Averaging):
    """Does not move quite back."""

    @torch.no_grad()
    def train(self):
        super().train()
        for parameter in (each for each in self.param_groups[0]["params"] if each in self.state):
            parameter.add_(1e-3)


def inexact(named, lr):
    return Inexact([parameter for _, parameter in named], lr)


def averaging(named, lr):
    return Averaging([parameter for _, parameter in named], lr)


def counting(named, lr):
    return Counting([parameter for _, parameter in named], lr)


def groups(named, lr):
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    weights = [parameter for name, parameter in named if not name.endswith("bias")]
    return torch.optim.RMSprop([{"params": weights}, {"params": biases, "lr": 2 * lr}], lr=lr)


def nothing(named, lr):
    return None


def others(named, lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr)


def broken(named, lr):
    raise ValueError("no optimizer")


def lists(named, lr):
    made = counting(named, lr)
    for parameter in made.param_groups[0]["params"]:
        made.state[parameter]["seen"] = {1}
    return made


def falling(step, steps):
    return 1 - step / (2 * steps)


def negative(step, steps):
    return 1 - step
'''
ASYNC: dict[str, Any] = {"schedule": "async-1f1b", "ranks": 1, "micro_batches": 2}
USUAL: dict[str, Any] = {"schedule": "single", "lr": 0.01, "clip": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    (folder / "own_optimizers.py").write_text(OWN)
    return folder


def plain_weights(folder: Path, made: str, **options: Any) -> dict[str, Tensor]:
    """The weights after the loop that a person would write, with torch's scheduler."""
    own = import_file(folder / "own_optimizers.py", "own_optimizers_of_a_loop")
    job = make_job(Settings(folder=str(folder / "mlp"), **USUAL, **options))
    config = job.config
    data = open_data(config, job.task, job.plan, Path())
    feed = Feed(
        data.train,
        SampleOrder(len(data.train), config.seed),
        StepBatch.of(config),
        job.task.fields,
    )
    torch.manual_seed(7)
    model = PlainMlp()
    optimizer = getattr(own, made)(list(model.named_parameters()), config.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: own.falling(step, 6))
    if made == "averaging":
        optimizer.train()
    for step in range(6):
        for index in range(4):
            fields = feed(step * 4 + index)
            (F.cross_entropy(model(fields["x"]), fields["target"]) / 4).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if made == "averaging":
        optimizer.eval()
    return model.state_dict()


@pytest.mark.parametrize("made", ["counting", "groups", "averaging"])
def test_an_optimizer_and_a_schedule_take_the_steps_of_a_plain_loop(
    folder: Path, tmp_path: Path, made: str
) -> None:
    own = f"{folder / 'own_optimizers.py'}"
    options: dict[str, Any] = {"optimizer": f"{own}:{made}", "micro_batches": 4, "steps": 6}
    options["lr_schedule"] = f"{own}:falling"
    found = train(folder / "mlp", tmp_path / "run", **USUAL, **options)
    expected = plain_weights(folder, made, **options)
    for name, tensor in expected.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-5, atol=1e-6)
    rates = list(found.of("lr").values())
    assert rates == pytest.approx([0.01 * (1 - step / 12) for step in range(6)])
    (facts,) = events_of(tmp_path / "run", "start")
    assert f"lr schedule {own}:falling" in facts["optimizer"]


@pytest.mark.parametrize("made", ["counting", "groups", "averaging"])
@pytest.mark.parametrize(
    "given",
    [{}, {"schedule": "async-1f1b", "ranks": 1, "micro_batches": 2, "staleness": "pipemare"}],
)
def test_a_resumed_run_continues_to_the_last_bit(
    folder: Path, tmp_path: Path, made: str, given: dict[str, Any]
) -> None:
    own = f"{folder / 'own_optimizers.py'}"
    options = {**USUAL, "optimizer": f"{own}:{made}", "lr_schedule": f"{own}:falling", **given}
    whole = train(folder / "mlp", tmp_path / "whole", **options)
    assert any(name.startswith("optimizer.layers.1.weight.") for name in whole.state)
    assert_goes_on_as(whole, folder / "mlp", 2, **options)
    alone = with_options_of_run({"resume": str(tmp_path / "whole")})  # as --resume RUN
    assert make_job(settings_from(alone)).config.optimizer == options["optimizer"]


def test_what_is_evaluated_and_saved_changes_no_later_step(folder: Path, tmp_path: Path) -> None:
    own = f"{folder / 'own_optimizers.py'}"
    found = [
        train(
            folder / "mlp",
            tmp_path / f"every {every}",
            save_every=every,
            optimizer=f"{own}:inexact",
            **USUAL,
        )
        for every in (1, 6)
    ]
    assert_same(found[0].weights, found[1].weights)
    assert_same(found[0].state, found[1].state)


def test_a_tied_weight_has_a_group_of_its_own_with_the_options_of_its_old_one(
    folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "schedule": "async-1f1b",
        "ranks": 1,
        "micro_batches": 2,
        "clip": 0.0,
    }
    options |= {"data": str(folder / "text.txt"), "staleness": "stash+pipemare-rate", "lr": 0.01}
    options["optimizer"] = f"{folder / 'own_optimizers.py'}:groups"
    whole = train(folder / "text", tmp_path / "whole", **options)
    assert_goes_on_as(whole, folder / "text", 2, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimizer": "nothing"}, r"--optimizer .*:nothing returned a NoneType"),
        ({"optimizer": "others"}, r"returned an optimizer of other tensors than it was given"),
        ({"optimizer": "broken"}, r"--optimizer .*:broken failed at .*py:[0-9]+: ValueError"),
        ({"optimizer": "missing"}, r"own_optimizers\.py has no missing"),
        ({"optimizer": "averaging", "ema": 0.9}, r"other weights than it trains, .* --ema 0\.9"),
        (
            {"optimizer": "averaging", "schedule": "1f1b", "replicas": 2, "zero": 1},
            r"Averaging evaluates other weights than it trains, .* with --zero 1",
        ),
        ({"optimizer": "lists"}, r"cannot be written to a checkpoint: .*set"),
        ({"lr_schedule": "negative"}, r"negative returned -1\.0 for step 2 of 6"),
        ({"lr_schedule": "falling", "warmup": 3}, r"--warmup 3, but --lr-schedule"),
        ({"lr_schedule": "falling", "decay": "wsd"}, r"--decay wsd, but --lr-schedule"),
        ({"optimizer": "counting", "weight_decay": 0.1}, r"--weight-decay 0\.1, but .*counting"),
        ({"optimizer": "counting", "momentum": 0.5}, r"--momentum 0\.5, but .*counting has no"),
        (
            {"optimizer": "counting", "schedule": "async-1f1b", "staleness": "stash+msnag"},
            r"decide|predicts by momentum, but the optimizer is .*counting",
        ),
        (
            {"optimizer": "counting", "schedule": "async-1f1b", "staleness": "msnag"},
            r"msnag predicts by momentum, but the optimizer is .*counting",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_a_sentence(
    folder: Path, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    own = {
        name: f"{folder / 'own_optimizers.py'}:{options[name]}"
        for name in ("optimizer", "lr_schedule")
        if name in options
    }
    with pytest.raises(AsyncPipeError) as error:
        train(folder / "mlp", tmp_path / "run", **(USUAL | options | own))
    assert re.search(told, error.value.what), error.value.what
    assert "\n" not in error.value.what


@pytest.mark.parametrize("schedule", ["single", "1f1b"])
def test_a_run_warns_of_an_optimizer_that_looks_at_several_parameters(
    folder: Path, tmp_path: Path, schedule: str
) -> None:
    own = f"{folder / 'own_optimizers.py'}"
    for made in ("clipping", "counting"):
        given = USUAL | {"schedule": schedule, "optimizer": f"{own}:{made}", "steps": 2}
        train(folder / "mlp", tmp_path / made, **given)
    assert not events_of(tmp_path / "counting", "warning")
    (told,) = events_of(tmp_path / "clipping", "warning")
    assert told.startswith("Clipping steps a parameter by the gradients of others too, and here by")


def test_a_file_that_is_missing_is_told_before_the_run(folder: Path, tmp_path: Path) -> None:
    for name in ("optimizer", "lr_schedule"):
        with pytest.raises(AsyncPipeError, match=r"nowhere\.py: no such file"):
            train(folder / "mlp", tmp_path / "run", **{name: "nowhere.py:make"})
    assert not (tmp_path / "run").exists()
