"""Runs that freeze blocks train as a plain loop that freezes at the same steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncpipe
from asyncpipe.runtime.config.batch_layout import StepBatch
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.task import SampleOrder
from asyncpipe.runtime.freezing.blocks import blocks_of
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.tensor_files import read_tensors
from asyncpipe.runtime.training.batches import Feed, open_data
from asyncpipe.runtime.training.replica_gradients import describe_statistics
from asyncpipe.tests.support.models.blocks import BLOCKS, WIDTH, write_classifier
from asyncpipe.tests.support.models.hand_folders import PlainMlp, exact_settings, write_mlp
from asyncpipe.tests.support.oracles import resumed_runs
from asyncpipe.tests.support.oracles.freezing_loop import PlainLoop
from asyncpipe.tests.support.processes.gloo_ranks import RankError, run_processes
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY

Batch = tuple[torch.Tensor, torch.Tensor]
STEPS = 9
DEPTHS = {2: 1, 4: 3, 6: 4}
OF_MLP = {2: 1, 4: 2, 6: 3}
"""The number of frozen blocks after so many steps."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_classifier(folder / "blocks", stages=3)
    write_mlp(folder / "mlp")
    return folder


def settings(folder: Path, output: Path, **given: Any) -> Settings:
    depths = DEPTHS if folder.name == "blocks" else OF_MLP
    rule = ",".join(f"{step // 2}={depth}" for step, depth in depths.items())
    usual: dict[str, Any] = {"steps": STEPS, "micro_batches": 4, "lr": 0.01, "warmup": 0}
    return exact_settings(folder, output, **(usual | {"freeze": rule, "freeze_every": 2} | given))


def train(folder: Path, output: Path, **given: Any) -> list[dict[str, Any]]:
    """The lines of the run's metrics."""
    run(settings(folder, output, **given), FACTORY)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def frozen_in_blocks(depth: int) -> tuple[set[str], set[str]]:
    """The parameters and modules of `Classifier` at a depth, listed by hand."""
    parts = ["norm", "layer", "dropout"]
    modules = {"inner", "dropout"} | {f"blocks.{i}.{part}" for i in range(depth) for part in parts}
    return {f"{path}.{kind}" for path in modules for kind in ("weight", "bias")}, modules


def frozen_in_mlp(depth: int) -> tuple[set[str], set[str]]:
    return {f"layers.{i}.{kind}" for i in range(depth) for kind in ("weight", "bias")}, set()


def loop(
    folder: Path,
    ahead: tuple[int, ...],
    every: int,
    depths: Mapping[int, int] = DEPTHS,
    replicas: int = 1,
    made: int = STEPS,
    changes: Mapping[str, Any] | None = None,
    **given: Any,
) -> PlainLoop:
    plain = plain_loop(folder, ahead, every, replicas, changes, **given)
    plain.frozen = {step: frozen_in_blocks(depth) for step, depth in depths.items() if depth}
    if folder.name == "mlp":
        plain.frozen = {step: frozen_in_mlp(depth) for step, depth in OF_MLP.items()}
    return plain.run(made)


def plain_loop(
    folder: Path,
    ahead: tuple[int, ...],
    every: int,
    replicas: int = 1,
    changes: Mapping[str, Any] | None = None,
    **given: Any,
) -> PlainLoop:
    job = make_job(settings(folder, folder / "unused", **given))
    data = open_data(job.config, job.task, job.plan, Path())
    order = SampleOrder(len(data.train), job.config.seed)
    batch = StepBatch((4,) * every)
    feed = Feed(data.train, order, batch, job.task.fields)

    def exact(number: int) -> dict[str, torch.Tensor]:
        x, target = (feed(number)[name] for name in ("x", "target"))
        return {"x": x.double(), "target": target}

    return PlainLoop(
        [stage.double() for stage in asyncpipe.load(folder).stages],
        exact,
        every,
        ahead,
        lr=0.01,
        seed=job.config.seed,
        clip=given.get("clip", 0.0),
        replicas=replicas,
        **(changes or {}),
    )


def assert_equal(lines: list[dict[str, Any]], output: Path, plain: PlainLoop) -> None:
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    assert losses == pytest.approx(plain.losses, rel=1e-12)
    expected = plain.state()
    found = read_tensors(output / "weights", expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "1f1b", "clip": 0.5},
        {"schedule": "gpipe", "recompute": "all"},
        {"schedule": "zb-h1"},
        {"schedule": "async-1f1b", "micro_batches": 1},
        {"schedule": "async-1f1b"},
    ],
    ids=lambda given: f"{given['schedule']}-{given.get('micro_batches', 4)}",
)
def test_a_run_that_freezes_is_the_plain_loop(
    folders: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    lines = train(folders / "blocks", tmp_path / "run", **given)
    ahead = (2, 1, 0) if given["schedule"] == "async-1f1b" else (0, 0, 0)
    plain = loop(folders / "blocks", ahead, given.get("micro_batches", 4), **given)
    assert_equal(lines, tmp_path / "run", plain)
    depths = [line["frozen_blocks"] for line in lines if line["event"] == "step"]
    assert depths == [0, 0, 1, 1, 3, 3, 4, 4, 4]
    if given["schedule"] != "async-1f1b":  # whose stages are at several steps at a time
        sent = [line["sent_bytes"].get("gradient") for line in lines if line["event"] == "step"]
        of_edge = 4 * 4 * WIDTH * 8
        assert sent == [of_edge * edges or None for edges in (2, 2, 1, 1, 0, 0, 0, 0, 0)]
    notes = [line["text"] for line in lines if line.get("about") == "frozen"]
    assert notes[1] == "3 of 4 blocks (blocks.0 to blocks.2), after step 4"


def elements(depth: int) -> int:
    """The elements of the parameters of a `PlainMlp` that train at a depth."""
    sizes = [value.numel() for value in PlainMlp().parameters()]
    return sum(sizes[2 * depth :])


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "ddp"},
        {"replicas": 2, "micro_batches": 2},
        {"replicas": 2, "micro_batches": 2, "schedule": "async-1f1b"},
    ],
    ids=["ddp", "1f1b", "async-1f1b"],
)
def test_replicas_sum_no_gradient_of_a_frozen_block(
    folders: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    given |= {"global_batch_size": 16, "check_replicas": 1}
    lines = train(folders / "mlp", tmp_path / "run", **given)
    is_async = given.get("schedule") == "async-1f1b"
    plain = loop(folders / "mlp", (1, 0) if is_async else (0, 0), 4, replicas=2)
    assert_equal(lines, tmp_path / "run", plain)
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["summed_elements"] for line in steps] == [
        elements(line["frozen_blocks"]) for line in steps
    ]


def test_replicas_that_train_batch_norms_say_whose_statistics_remain(
    folders: Path, tmp_path: Path
) -> None:
    lines = train(folders / "blocks", tmp_path / "run", schedule="ddp", replicas=2, steps=1)
    (note,) = [line["text"] for line in lines if line.get("about") == "batch norm"]
    assert note.startswith("the running statistics of 4 batch norms will be those of the first")
    plan = read_plan(folders / "blocks")
    frozen = [blocks_of(plan).first_names(depth) for depth in (3, 4)]
    assert [" 1 batch norm " in describe_statistics(plan, names) for names in frozen] == [
        True,
        False,
    ]
    assert describe_statistics(plan, frozen[1]) == ""


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b", "single"])
def test_a_run_resumed_across_an_event_is_the_run(
    folders: Path, tmp_path: Path, schedule: str
) -> None:
    given: dict[str, Any] = {"freeze": "1=1,2=3,3=4", "freeze_every": 2}
    given |= {"schedule": "async-1f1b", "ranks": 1} if schedule == "async-1f1b" else {}
    if schedule == "single":  # an event after step 3, whose gradients are those of steps 1 to 3
        given = {"freeze": "gradnorm:1/2", "freeze_every": 3, "schedule": schedule}
    trained = resumed_runs.train(folders / "blocks", tmp_path / "run", **given)
    for step in (2, 4):
        resumed_runs.assert_goes_on_as(trained, folders / "blocks", step, **given)
    kept = {name.split(".")[1] for name in trained.state if name.startswith("optimizer.")}
    assert kept == {"head"} or schedule == "single"


def batches(count: int) -> list[Batch]:
    made = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 16, generator=made), torch.randint(4, (16,), generator=made))
        for _ in range(count)
    ]


def adamw(pipe: asyncpipe.Pipeline) -> torch.optim.Optimizer:
    matrices = [each for each in pipe.parameters() if each.ndim >= 2]
    vectors = [each for each in pipe.parameters() if each.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01)


def trained(
    pipe: asyncpipe.Pipeline, optimizer: torch.optim.Optimizer, own: list[Batch]
) -> list[float]:
    """The losses of a loop, which in a synchronous run steps the optimizer itself."""
    if pipe.config.is_async:
        return [result.loss for result in pipe.stream(own, optimizer=optimizer)]
    losses = []
    for batch in own:
        losses.append(pipe.step(batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def micro_batches(steps: int) -> list[dict[str, Any]]:
    """The micro-batches of so many steps of `own_loop` in float64."""
    return [
        {"x": x.double(), "target": target}
        for batch in batches(steps)
        for x, target in zip(*(each.split(4) for each in batch), strict=True)
    ]


def own_loop(rank: int, folder: str, saved: str, options: dict[str, Any]) -> dict[str, Any]:
    """A loop that freezes, and the same from what it has saved where an event is due."""
    options = {"loss": "cross_entropy", "dtype": "float64", "micro_batches": 4} | options
    pipe = asyncpipe.Pipeline(folder, freeze="1=1,2=3,3=4", freeze_every=2, **options)
    optimizer = adamw(pipe)
    losses = trained(pipe, optimizer, batches(STEPS)[:4])
    pipe.save(saved, optimizer=optimizer)
    losses += trained(pipe, optimizer, batches(STEPS)[4:])
    again = asyncpipe.Pipeline(folder, freeze="1=1,2=3,3=4", freeze_every=2, **options)
    own = adamw(again)
    again.load(saved, optimizer=own)
    repeated = trained(again, own, batches(STEPS)[4:])
    return {
        "losses": losses,
        "repeated": repeated,
        "weights": pipe.state_dict(),
        "again": again.state_dict(),
        "stepped": len(optimizer.state),
        "frozen": (pipe.frozen, again.frozen),
    }


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_loop_of_ones_own_freezes_as_the_plain_loop(
    folders: Path, tmp_path: Path, schedule: str
) -> None:
    options = {"schedule": schedule}
    found = run_processes(3, own_loop, str(folders / "blocks"), str(tmp_path / "saved"), options)
    assert not [each for each in found if isinstance(each, RankError)], found
    stages = [stage.double() for stage in asyncpipe.load(folders / "blocks").stages]
    ahead = (2, 1, 0) if schedule == "async-1f1b" else (0, 0, 0)
    frozen = {step: frozen_in_blocks(depth) for step, depth in DEPTHS.items()}
    feed = micro_batches(STEPS).__getitem__
    plain = PlainLoop(stages, feed, 4, ahead, lr=0.01, seed=1, frozen=frozen).run(STEPS)
    weights = {name: value for each in found for name, value in each["weights"].items()}
    for name, value in plain.state().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)
    for each in found:
        assert each["losses"] == pytest.approx(plain.losses, rel=1e-12)
        assert each["repeated"] == each["losses"][4:] and each["frozen"] == (4, 4)
        for name, value in each["weights"].items():
            assert torch.equal(each["again"][name], value), name
    # A loop that steps the optimizer itself has its own state of all that was ever trained.
    expected = [0, 0, 2] if schedule == "async-1f1b" else [2, 8, 10]
    assert [each["stepped"] for each in found] == expected


def test_gradient_norms_are_those_of_the_blocks_and_decide(folders: Path, tmp_path: Path) -> None:
    given = {"freeze": "gradnorm:1/2", "freeze_every": 2, "clip": 0.5, "schedule": "1f1b"}
    lines = train(folders / "blocks", tmp_path / "run", **given)
    steps = [line for line in lines if line["event"] == "step"]
    depths = [line["frozen_blocks"] for line in steps]
    changes = {at: depths[at] for at in range(2, STEPS, 2)}
    plain = loop(folders / "blocks", (0, 0, 0), 4, depths=changes, **given)
    assert_equal(lines, tmp_path / "run", plain)
    depth = 0
    for at in range(2, STEPS, 2):
        norms = [
            math.sqrt(
                sum(
                    square
                    for step in plain.squares[at - 2 : at]
                    for name, square in step.items()
                    if name.startswith(f"blocks.{block}.")
                )
            )
            for block in range(BLOCKS)
        ]
        assert steps[at]["block_norms"] == pytest.approx(norms, rel=1e-9)
        smallest = norms.index(min(norms[depth:], default=0.0)) if depth < BLOCKS else depth
        depth = min(depth + math.ceil((BLOCKS - depth) / 2), smallest + 1)
        assert depths[at] == max(depth, depths[at - 1])
    assert depths[-1] > 0
