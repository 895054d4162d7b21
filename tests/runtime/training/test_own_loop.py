"""`asyncpipe.Pipeline` in a loop of the user's own, against the model that it was made from, and
against the command with the same options."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR

import asyncpipe
from asyncpipe.commands.in_python import TrainKeywords
from asyncpipe.runtime.checkpoint.storage import read_tensors
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.given import split_batch
from asyncpipe.runtime.data.task import SampleOrder, input_dtypes
from asyncpipe.runtime.errors import AsyncPipeError, DataError
from asyncpipe.runtime.executor.criterion import loss_of_stage
from asyncpipe.runtime.options import options_of
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.training import own_state
from asyncpipe.runtime.training.joining import PipelineKeywords
from asyncpipe.tests.support.models.generated import CASES, cut
from asyncpipe.tests.support.processes.gloo_ranks import RankError, run_processes
from asyncpipe.tests.support.processes.quick_python import forked_ranks

Batch = tuple[Tensor, Tensor]
RATE = 3e-3
DATA = """
import torch

def samples():
    made = torch.Generator().manual_seed(5)
    x = torch.randn(40, 16, generator=made)
    return {"x": x, "target": torch.randint(4, (40,), generator=made)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut(CASES["mlp"], 2, tmp_path_factory.mktemp("mlp") / "mlp_2p")


def batches(count: int, samples: int = 12) -> list[Batch]:
    made = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(samples, 16, generator=made),
            torch.randint(4, (samples,), generator=made),
        )
        for _ in range(count)
    ]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.8**step)


def groups_of(named: Any) -> list[dict[str, Any]]:
    """Two groups by name, as people make them."""
    named = list(named)
    heads = [parameter for name, parameter in named if "head" in name]
    others = [parameter for name, parameter in named if "head" not in name]
    return [{"params": each, "lr": lr} for each, lr in ((heads, RATE), (others, RATE / 3)) if each]


def plain(folder: Path) -> asyncpipe.load:  # type: ignore[valid-type]
    """The model that the folder was made from, with its weights."""
    pipe = asyncpipe.load(folder)
    for stage in pipe.stages:
        stage.double()
    return pipe.train()


def parameters_of(pipe: Any) -> dict[str, nn.Parameter]:
    return {name: each for stage in pipe.stages for name, each in stage.named_parameters()}


def own_loop(rank: int, folder: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, dtype="float64", **options)
    optimizer = torch.optim.RMSprop(groups_of(pipe.named_parameters()))
    scheduler = falling(optimizer)
    losses, outputs = [], []
    for x, y in batches(steps):
        result = pipe.step((x, y), optimizer=optimizer, outputs=True)
        scheduler.step()
        losses.append(result.loss)
        outputs.append(result.outputs)
    weights = {name: each.detach() for name, each in pipe.named_parameters()}
    return {"losses": losses, "weights": weights, "outputs": outputs, "steps": pipe.steps}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"micro_batches": 4}),
        (2, {"micro_batches": 5, "clip": 0.4, "schedule": "gpipe"}),
        (2, {"micro_batches": 4, "clip": 0.4, "schedule": "interleaved"}),
        (4, {"micro_batches": 3, "clip": 0.4, "replicas": 2}),
        (4, {"micro_batches": 3, "clip": 0.4, "replicas": 2, "zero": 2}),
        (2, {"micro_batches": 4, "schedule": "ddp"}),
    ],
    ids=["1f1b", "uneven", "two stages per rank", "replicas", "zero", "ddp"],
)
def test_a_loop_with_any_optimizer_groups_and_scheduler_equals_the_plain_loop(
    folder: Path, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    if options.get("schedule") == "interleaved":
        folder = cut(CASES["mlp"], 4, tmp_path / "mlp_4p")
        options = {**options, "ranks": 2}
    found = run_processes(ranks, own_loop, str(folder), 4, options)
    assert not [each for each in found if isinstance(each, RankError)], found
    model = plain(folder)
    own = parameters_of(model)
    optimizer = torch.optim.RMSprop(groups_of(own.items()))
    scheduler = falling(optimizer)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        output = model(x.double())
        loss = loss_of(output, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if "clip" in options:
            torch.nn.utils.clip_grad_norm_(own.values(), options["clip"])
        for rank in found:
            assert rank["losses"][step] == pytest.approx(loss.item(), rel=1e-12)
        if ranks == 2 and "ddp" not in options.values():
            assert found[0]["outputs"][step] is None
            assert torch.allclose(found[1]["outputs"][step], output, rtol=1e-12)
        optimizer.step()
        scheduler.step()
    for rank in found:
        for name, weight in rank["weights"].items():
            assert torch.allclose(weight, own[name], rtol=1e-10, atol=1e-12), name
    assert own.keys() == {name for rank in found for name in rank["weights"]}


def gradients(rank: int, folder: str) -> dict[str, Any]:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, micro_batches=3, dtype="float64")
    for batch in batches(2):
        pipe.step(batch)
    norm = pipe.clip_grad_norm_(0.5)
    return {
        "norm": norm,
        "gradients": {name: each.grad for name, each in pipe.named_parameters()},
    }


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_a_step_without_an_optimizer_adds_gradients_that_clip_together(
    folder: Path, tmp_path: Path, name: str
) -> None:
    if name == "tied":
        folder = tmp_path / "tied"
        asyncpipe.partition(
            Tied(),
            {"x": batches(1)[0][0]},
            stages=2,
            output=folder,
            profile="analytic",
            cut_at=["out"],
        )
    ranks = run_processes(2, gradients, str(folder))
    model = plain(folder)
    own = parameters_of(model)
    for x, y in batches(2):
        loss_of(model(x.double()), y).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_({id(p): p for p in own.values()}.values(), 0.5)
    assert [rank["norm"] for rank in ranks] == pytest.approx([norm.item()] * 2, rel=1e-12)
    for rank in ranks:
        for key, gradient in rank["gradients"].items():
            assert torch.allclose(gradient, own[key].grad, rtol=1e-10, atol=1e-14), key


class Tied(nn.Module):
    """Its first and its last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.middle = nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.middle(self.into(x).relu()).relu())
        return out


def measured(rank: int, folder: str, replicas: int) -> dict[str, Any]:
    pipe = asyncpipe.Pipeline(folder, loss="cross_entropy", micro_batches=4, replicas=replicas)
    small = [*batches(1, samples=3), *batches(1, samples=1)]
    found = pipe.evaluate([*batches(2), *small])
    return {
        "evaluated": (found.loss, found.samples),
        "predicted": list(pipe.predict([*batches(2), *(x for x, _ in small)])),
        "state": pipe.state_dict(full=True),
    }


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluations_and_predictions_are_those_of_the_model_on_every_sample(
    replicas: int, folder: Path
) -> None:
    """Also of a batch that has fewer samples than there are replicas."""
    ranks = run_processes(2 * replicas, measured, str(folder), replicas)
    first, last = ranks[0], ranks[-1]
    model = asyncpipe.load(folder).eval()
    given = [*batches(2), *batches(1, samples=3), *batches(1, samples=1)]
    with torch.no_grad():
        outputs = [model(x) for x, _ in given]
        losses = [
            F.cross_entropy(o, y, reduction="sum") for o, (_, y) in zip(outputs, given, strict=True)
        ]
    assert all(rank["evaluated"] == first["evaluated"] for rank in ranks)
    assert first["evaluated"] == (pytest.approx(float(sum(losses)) / 28, rel=1e-6), 28)
    assert first["predicted"] == [None] * 4
    for own, output in zip(last["predicted"], outputs, strict=True):
        assert torch.allclose(own, output, atol=1e-6)
    whole = model.state_dict()
    assert first["state"].keys() == whole.keys() and not last["state"]
    assert all(torch.equal(first["state"][name], whole[name]) for name in whole)


def trained(rank: int, folder: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """As the command reads the data: in the order of the seed, 8 samples per step."""
    made: dict[str, Any] = {}
    exec(compile(DATA, "data", "exec"), made)
    data = made["samples"]()
    order = SampleOrder(40, options["seed"]).samples(0, 8 * steps)
    pipe = asyncpipe.Pipeline(folder, loss="cross_entropy", steps=steps, **options)
    given = [
        {name: column[order[8 * step : 8 * step + 8]] for name, column in data.items()}
        for step in range(steps)
    ]
    length = options.get("flush_every", steps)
    streams = [given[start : start + length] for start in range(0, steps, length)]
    losses = [result.loss for stream in streams for result in pipe.stream(stream)]
    return {"losses": losses, "weights": pipe.state_dict()}


ASYNC_SGD = {"schedule": "async-1f1b", "staleness": "stash", "momentum": 0.9, "optimizer": "sgd"}


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "clip": 0.3},
        ASYNC_SGD,
        ASYNC_SGD | {"flush_every": 3, "sync_end": "20%", "clip": 0.3, "transport": "gloo"},
        {"schedule": "async-1f1b", "replicas": 2, "micro_batch_size": 2, "clip": 0.3},
    ],
    ids=["1f1b", "async", "synchronous end", "replicas"],
)
def test_a_stream_has_the_numbers_of_the_command_to_the_last_bit(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    usual = {"optimizer": "adamw", "lr": 0.02, "decay": "linear", "micro_batches": 2}
    options = usual | {"micro_batch_size": 4, "seed": 4} | options
    (tmp_path / "data.py").write_text(DATA)
    ranks = run_processes(2 * options.get("replicas", 1), trained, str(folder), options, 6)
    with forked_ranks():
        run = asyncpipe.train(
            folder,
            data=f"{tmp_path / 'data.py'}:samples",
            criterion="cross_entropy",
            steps=6,
            output=str(tmp_path / "run"),
            log_every=1,
            quiet=True,
            **options,
        )
    assert all([*run.losses.values()] == own["losses"] for own in ranks)
    written = asyncpipe.load(folder, weights=run.weights).state_dict()
    found = ranks[0]["weights"] | ranks[1]["weights"]
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], written[name]) for name in written)
    assert run.report.is_file() and run.records.last_step == 6


class TwoHeads(nn.Module):
    """Heads that may be in different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.early, self.late = nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.early(x), self.late(x)


def both(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    early, late = outputs
    return F.mse_loss(late, target) + 0.4 * F.mse_loss(early, target)


def two_heads(rank: int, folder: str, schedule: str, batch: Batch) -> dict[str, Any]:
    with asyncpipe.Pipeline(folder, loss=both, schedule=schedule, micro_batches=2) as pipe:
        loss = pipe.step(batch).loss
        gradients = {name: value.grad for name, value in pipe.named_parameters()}
        return {"loss": loss, "gradients": gradients, "outputs": [*pipe.predict([batch])]}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_criterion_reads_the_outputs_of_all_stages(schedule: str, tmp_path: Path) -> None:
    model, made = TwoHeads(), torch.Generator().manual_seed(1)
    batch = (torch.randn(4, 6, generator=made), torch.randn(4, 2, generator=made))
    plan = asyncpipe.partition(
        model,
        {"x": batch[0]},
        stages=2,
        cut_at=["late"],
        profile="analytic",
        output=tmp_path / "stages",
    )
    assert plan.stages[0].outputs == ("x_1", "early")
    loss = both(model(batch[0]), batch[1])
    loss.backward()
    first, last = run_processes(2, two_heads, str(tmp_path / "stages"), schedule, batch)
    assert first["loss"] == last["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    gradients = first["gradients"] | last["gradients"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    assert first["outputs"] == [None]
    torch.testing.assert_close(last["outputs"][0], [*model(batch[0])])


@pytest.mark.parametrize(
    "read", [lambda out: out.sum(), lambda out: torch.stack([out]).mean(), lambda out: len(out)]
)
def test_a_criterion_may_not_read_an_output_that_is_not_sent(
    read: Callable[[Tensor], Any], tmp_path: Path
) -> None:
    """As in a folder of an older version. Of a None the criterion might take no notice."""
    plan = asyncpipe.partition(
        TwoHeads(),
        {"x": torch.ones(4, 6)},
        stages=2,
        cut_at=["late"],
        profile="analytic",
        output=tmp_path / "stages",
    )
    _, late = plan.outputs
    loss_of = loss_of_stage(
        replace(plan, outputs=["early", late]),
        1,
        lambda outputs, target: outputs[1].sum() + read(outputs[0]),
    )
    assert loss_of is not None
    with pytest.raises(DataError, match="reads early, an output of the model that stage 0 makes"):
        loss_of({late: torch.ones(4, 2)}, {"target": torch.ones(4, 2)})


def left_early(rank: int, folder: str, flushes: bool) -> dict[str, Any]:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, schedule="async-1f1b", micro_batches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    scheduler = falling(optimizer)
    seen = []
    for result in pipe.stream(itertools.cycle(batches(3)), optimizer=optimizer, steps=50):
        seen.append(result.step)
        if result.step == 4:
            break
    if flushes:
        pipe.flush()
    after = pipe.steps
    for result in pipe.stream(batches(3), optimizer=optimizer, scheduler=scheduler):
        seen.append(result.step)
    return {"seen": seen, "after": after, "rate": optimizer.param_groups[0]["lr"]}


@pytest.mark.parametrize("flushes", [False, True])
def test_a_stream_that_is_left_completes_the_same_steps_on_all_ranks_and_another_follows(
    flushes: bool, folder: Path
) -> None:
    first, last = run_processes(2, left_early, str(folder), flushes)
    assert first == last
    assert 4 <= first["after"] < 50
    assert first["seen"] == [1, 2, 3, 4, *range(first["after"] + 1, first["after"] + 4)]
    assert first["rate"] == pytest.approx(RATE * 0.8**3)


def test_a_stream_whose_loop_goes_on_refuses_other_calls_and_a_program_may_end_in_it(
    folder: Path,
) -> None:
    script = f"""
import torch
import asyncpipe
pipe = asyncpipe.Pipeline({str(folder)!r}, loss="cross_entropy", micro_batches=2)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
batches = [(torch.zeros(4, 16), torch.zeros(4, dtype=torch.long))] * 5
stream = pipe.stream(batches, optimizer=optimizer)
next(stream)
try:
    pipe.step(batches[0])
except asyncpipe.AsyncPipeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("the stream from step 1 of this pipeline is under way.")
    assert not done.stderr


def saved(rank: int, folder: str, target: str) -> list[float]:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, micro_batches=2)
    optimizer = Counting(pipe.parameters(), lr=RATE)
    scheduler = ExponentialLR(optimizer, 0.5)
    for batch in batches(3):
        pipe.step(batch, optimizer=optimizer)
        scheduler.step()
    pipe.save(target, extra={"epoch": 7, "scheduler": scheduler.state_dict()})
    return continued(pipe, optimizer, scheduler)


class Counting(torch.optim.SGD):
    """Its rate falls by a number that it keeps for each parameter, as Python's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["steps"] = state.get("steps", 0) + 1
                each.sub_(each.grad, alpha=group["lr"] / state["steps"])


def continued(pipe: asyncpipe.Pipeline, optimizer: Any, scheduler: Any) -> list[float]:
    losses = []
    for batch in batches(3):
        losses.append(pipe.step(batch, optimizer=optimizer).loss)
        scheduler.step()
    return losses


def test_what_is_saved_goes_on_with_the_same_numbers_on_another_number_of_ranks(
    folder: Path, tmp_path: Path
) -> None:
    two, _ = run_processes(2, saved, str(folder), str(tmp_path / "saved"))
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, micro_batches=2)
    optimizer = Counting(pipe.parameters(), lr=RATE)  # made before, with another rate than is saved
    scheduler = ExponentialLR(optimizer, 0.5)
    extra = pipe.load(tmp_path / "saved", optimizer=optimizer)
    scheduler.load_state_dict(extra["scheduler"])
    assert (extra["epoch"], pipe.steps) == (7, 3)
    assert continued(pipe, optimizer, scheduler) == two
    with pytest.raises(AsyncPipeError, match="exists already"):
        pipe.save(tmp_path / "saved")
    with pytest.raises(AsyncPipeError, match="the state of Counting, and the optimizer is SGD"):
        other = torch.optim.SGD(pipe.parameters(), lr=RATE)
        pipe.load(tmp_path / "saved", optimizer=other)


def read_slowly(*arguments: Any) -> dict[str, Tensor]:
    sleep(1.0)
    return read_tensors(*arguments)


def loaded(rank: int, folder: str, target: str) -> int:
    """Rank 0 removes the saved folder once it has loaded it; rank 1 reads it slowly."""
    pipe = asyncpipe.Pipeline(folder, loss=loss_of)
    pipe.save(target)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(own_state, "read_tensors", read_slowly)
        pipe.load(target)
    if rank == 0:
        shutil.rmtree(target)
    return pipe.steps


def test_a_saved_folder_may_be_removed_as_soon_as_one_rank_has_loaded_it(
    folder: Path, tmp_path: Path
) -> None:
    assert run_processes(2, loaded, str(folder), str(tmp_path / "saved")) == [0, 0]


def unlike(rank: int, folder: str) -> str:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of)
    x, y = batches(1)[0]
    try:
        pipe.step((x + rank, y))
    except AsyncPipeError as error:
        return error.what
    return ""


def test_a_rank_with_another_batch_is_named(folder: Path) -> None:
    raised = run_processes(2, unlike, str(folder))
    assert raised[0] == raised[1]
    assert raised[0].startswith("rank 1 has another batch than rank 0 at step 1")


def started(rank: int, folder: str) -> str:
    asyncpipe.Pipeline(folder, loss=loss_of)
    return "started"


def test_another_number_of_ranks_than_stages_is_told_on_every_rank(folder: Path) -> None:
    for raised in run_processes(3, started, str(folder)):
        assert isinstance(raised, RankError) and "3 ranks were started" in raised


def test_a_process_alone_runs_all_stages_and_asks_for_a_launcher_for_more(folder: Path) -> None:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of)
    assert (pipe.rank, pipe.ranks, len(pipe.modules)) == (0, 1, 2)
    with pytest.raises(AsyncPipeError, match="this process is alone") as raised:
        asyncpipe.Pipeline(folder, loss=loss_of, ranks=2)
    assert "torchrun" in raised.value.cure
    with pytest.raises(AsyncPipeError, match="sync_end='10%' depends on the number of steps"):
        asyncpipe.Pipeline(folder, loss=loss_of, schedule="async-1f1b", sync_end="10%")


def unlike_calls(rank: int, folder: str, kind: str, target: str) -> str:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, timeout_s=4)
    optimizer = sgd(pipe)
    first, second = batches(2)
    for _ in range(3):
        pipe.step(first, optimizer=optimizer)
    try:
        if kind == "order":  # all tensors find a taker: only the numbers of the calls differ
            calls = [lambda: list(pipe.predict([second])), lambda: pipe.step(first)]
            results = [call() for call in (calls[::-1] if rank else calls)]
            _ = results[0 if rank else 1].loss
        elif kind == "save" and rank == 0:
            pipe.save(target)
        elif kind == "optimizer":
            for _ in range(3):
                pipe.step(first, optimizer=None if rank == 0 else optimizer)
        else:
            pipe.evaluate([first])
    except AsyncPipeError as error:
        return f"{error.what} {error.cure}"
    return ""


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("order", "step 4 is call . of rank ., and other ranks have made more or fewer calls"),
        ("save", "in save; rank 1 is in evaluate.*the same calls .* on every rank"),
        ("optimizer", "the optimizer is given at step 5 on some ranks, but not on rank 0"),
    ],
)
def test_ranks_that_make_other_calls_are_told_which(
    folder: Path, tmp_path: Path, kind: str, what: str
) -> None:
    raised = run_processes(2, unlike_calls, str(folder), kind, str(tmp_path / "saved"))
    assert re.search(what, raised[0]), raised


def test_after_a_failed_step_nothing_goes_on(folder: Path) -> None:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of)
    x, y = batches(1)[0]
    with pytest.raises(AsyncPipeError, match=r"failed in the forward .* out of bounds"):
        pipe.step((x, y + 9))
    with pytest.raises(AsyncPipeError, match=r"step 1 has failed \(StageError\)"):
        pipe.step((x, y))


class Clipping(torch.optim.SGD):
    """Clips the gradients of all its parameters together."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step()


def test_an_optimizer_that_looks_at_several_parameters_is_noticed(folder: Path) -> None:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of)
    with pytest.warns(UserWarning, match="Clipping steps a parameter by the gradients of others"):
        pipe.step(batches(1)[0], optimizer=Clipping(pipe.parameters(), lr=0.1))


def test_gradients_that_nobody_uses_are_noticed(folder: Path) -> None:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, micro_batches=1)
    with pytest.warns(UserWarning, match="gradients of 100 steps have been added up"):
        for _ in range(101):
            pipe.step(batches(1, samples=1)[0])


Break = Callable[[asyncpipe.Pipeline], Any]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda pipe: pipe.step((batches(1)[0][0],)), "the loss needs a target, too"),
        (lambda pipe: pipe.step({"x": batches(1)[0][0]}), "no target for the loss"),
        (lambda pipe: pipe.step((torch.zeros(3, 16), torch.zeros(2).long())), "x 3, target 2"),
        (lambda pipe: pipe.step((torch.zeros(0, 16), torch.zeros(0).long())), "has no samples"),
        (lambda pipe: pipe.step((torch.zeros(4, 5), torch.zeros(4).long())), "captured for 16"),
        (lambda pipe: pipe.step(None), "not an object of class NoneType"),
        (lambda pipe: pipe.evaluate([]), "evaluate got no batches"),
        (lambda pipe: step(pipe, torch.optim.LBFGS(pipe.parameters())), "needs a closure"),
        (lambda pipe: step(pipe, torch.optim.SGD), "optimizer is the class SGD"),
        (lambda pipe: step(pipe, copy.deepcopy(sgd(pipe))), "are not of this pipeline's stages"),
        (lambda pipe: stream(pipe, ReduceLROnPlateau), "step.. needs metrics"),
        (lambda pipe: stream(pipe, lambda _: StepLR(sgd(pipe), 1)), "schedules another optimizer"),
        (lambda pipe: pipe.stream(batches(2)), "the optimizer is missing"),
        (
            lambda pipe: pipe.stream(iter(batches(2)), optimizer=sgd(pipe)),
            "the number of batches of a .* is unknown",
        ),
        (lambda pipe: list(pipe.stream(batches(2), steps=3, optimizer=sgd(pipe))), "ended after 2"),
        (
            lambda pipe: list(pipe.stream([*batches(1), *batches(1, 5)], optimizer=sgd(pipe))),
            "batch 2 has micro-batches of 2, 1, 1, 1 samples",
        ),
    ],
)
def test_a_batch_or_a_call_that_does_not_fit_is_one_sentence(
    folder: Path, make: Break, what: str
) -> None:
    pipe = asyncpipe.Pipeline(folder, loss=loss_of, micro_batches=4)
    with pytest.raises(AsyncPipeError, match=what):
        make(pipe)


def test_a_step_with_fewer_samples_than_replicas_is_refused(folder: Path) -> None:
    plan = read_plan(folder)
    given = {"replicas": 2, "target": True, "dtypes": input_dtypes(plan, None)}
    assert split_batch(plan, batches(1, samples=5)[0], 4, **given).samples == (2, 1, 1, 1)
    with pytest.raises(AsyncPipeError, match="has 1 sample, but 2 replicas need one each"):
        split_batch(plan, batches(1, samples=1)[0], 4, **given)


def step(pipe: asyncpipe.Pipeline, optimizer: Any) -> None:
    pipe.step(batches(1)[0], optimizer=optimizer)


def stream(pipe: asyncpipe.Pipeline, schedule: Callable[[Any], Any]) -> None:
    optimizer = sgd(pipe)
    pipe.stream(batches(2), optimizer=optimizer, scheduler=schedule(optimizer))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss"),
        ({"loss": "crossentropy"}, "the loss 'crossentropy' is not known"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "object of class SGD"),
    ],
)
def test_an_object_of_another_kind_is_named(
    folder: Path, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(AsyncPipeError, match=what):
        asyncpipe.Pipeline(folder, **{"loss": loss_of, **options})


def sgd(pipe: asyncpipe.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=RATE)


def test_the_keywords_are_options_of_the_command_and_a_wrong_one_is_named(folder: Path) -> None:
    own, whole, options = map(get_type_hints, (PipelineKeywords, TrainKeywords, Settings))
    of_one_call = {"print_sbatch", "nodes", "time_limit", "print_schedule", "dry_run", "debug"}
    assert own.items() < whole.items() <= options.items()
    assert whole.keys() == options_of(Settings).keys() - {"folder"} - of_one_call
    with pytest.raises(AsyncPipeError, match="Pipeline has no option micro_batch") as raised:
        asyncpipe.Pipeline(folder, micro_batch=4)  # type: ignore[call-arg]
    assert "micro_batches" in raised.value.cure
    with pytest.raises(AsyncPipeError, match="train has no option step"):
        asyncpipe.train(folder, step=4)  # type: ignore[call-arg]
