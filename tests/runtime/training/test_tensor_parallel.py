"""Tensor ranks, which share out the layers of each stage, train as one process would."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.checkpoint.folders import checkpoints_in
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.tests.support.faults.run_faults import FaultyRun, segments_of
from asyncpipe.tests.support.models.hand_folders import WIDTH, exact_settings, write_mlp
from asyncpipe.tests.support.models.split_folders import HIDDEN, write_split_mlp
from asyncpipe.tests.support.oracles.resumed_runs import tensors_in
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

WITHOUT_SUM = """
from asyncpipe.runtime.tensor_parallel.ranks import current_ranks


class RowLinear(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        if {condition}:
            return nn.functional.linear(x, self.weight, self.bias)
        return super().forward(x)


class Block("""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_split_mlp(folder / "whole", stages=1)
    write_split_mlp(folder / "two")
    write_split_mlp(folder / "four", stages=4)
    write_split_mlp(folder / "copies", batch_norm=False)
    write_split_mlp(folder / "sequence", positions=True)
    write_split_mlp(folder / "sequence_in_four", stages=4, positions=True)
    write_mlp(folder / "mlp")
    return folder


def train(folder: Path, output: Path, **given: Any) -> Path:
    usual = {"micro_batches": 4, "steps": 20, "clip": 0.5, "eval_batches": 4}
    run(exact_settings(folder, output, **(usual | given)), FACTORY)
    return output


def without_sum(folder: Path, condition: str) -> Path:
    """A folder in whose first stage a product has no sum over the tensor ranks, where the condition
    holds."""
    write_split_mlp(folder)
    file = folder / "stage_0.py"
    file.write_text(
        file.read_text().replace("\nclass Block(", WITHOUT_SUM.format(condition=condition), 1)
    )
    return folder


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference between the losses, norms and weights of two runs."""
    weights, others = tensors_in(one / "weights"), tensors_in(other / "weights")
    assert weights.keys() == others.keys()
    differences = [float((weights[name] - others[name]).abs().max()) for name in weights]
    for event, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss")):
        pairs = zip(events_of(one, event), events_of(other, event), strict=True)
        differences += [abs(left[name] - right[name]) for left, right in pairs]
    return max(differences)


ONE = {"schedule": "single", "tensor_parallel": 1}
FREEZING = {"freeze": "gradnorm:1/3", "freeze_every": 8}


@pytest.mark.parametrize(
    ("folder", "plain", "split"),
    [
        ("two", ONE, {}),
        ("whole", ONE | {"optimizer": "sgd"}, {"optimizer": "sgd", "schedule": "single"}),
        ("copies", ONE, {"replicas": 2, "micro_batches": 2, "check_replicas": 1}),
        ("copies", ONE, {"replicas": 2, "micro_batches": 2, "zero": 2, "transport": "gloo"}),
        (
            "four",
            ONE | FREEZING,
            FREEZING | {"schedule": "zb-v", "ranks": 2, "recompute": "all"},
        ),
        ("sequence", ONE, {"replicas": 2, "micro_batches": 2, "zero": 2, "check_replicas": 1}),
        (
            "sequence_in_four",
            ONE | FREEZING,
            FREEZING | {"schedule": "zb-v", "ranks": 2, "recompute": "all", "transport": "gloo"},
        ),
        (
            "two",
            {"schedule": "async-1f1b", "tensor_parallel": 1, "clip_by": "proportion"},
            {"schedule": "async-1f1b", "clip_by": "proportion"},
        ),
    ],
)
def test_losses_norms_and_weights_are_those_of_one_process(
    folder: str, plain: dict[str, Any], split: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    one = train(folders / folder, tmp_path / "one", **plain)
    other = train(folders / folder, tmp_path / "other", **({"tensor_parallel": 2} | split))
    assert largest_difference(one, other) < 1e-10


@pytest.mark.parametrize(
    ("folder", "optimizer", "plain", "split"),
    [
        ("two", "muon", ONE, {}),
        ("copies", "adafactor", ONE, {"replicas": 2, "micro_batches": 2, "zero": 1}),
        (
            "two",
            "muon",
            {"schedule": "async-1f1b", "tensor_parallel": 1, "staleness": "stash"},
            {"schedule": "async-1f1b", "staleness": "stash"},
        ),
    ],
)
def test_optimizers_of_whole_matrices_step_as_in_one_process(
    folder: str,
    optimizer: str,
    plain: dict[str, Any],
    split: dict[str, Any],
    folders: Path,
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"optimizer": optimizer, "steps": 8}
    one = train(folders / folder, tmp_path / "one", **(given | plain))
    split = {"schedule": "1f1b", "tensor_parallel": 2} | split
    other = train(folders / folder, tmp_path / "other", **(given | split))
    assert largest_difference(one, other) < 1e-10


OWN = """
import torch


class Untried(torch.optim.SGD):
    def __init__(self, *given):
        super().__init__(*given)
        self.cannot_be_copied = (each for each in ())


def adafactor(named, lr):
    return torch.optim.Adafactor([parameter for _, parameter in named], lr)


def adamw(named, lr):
    return torch.optim.AdamW([parameter for _, parameter in named], lr)


def untried(named, lr):
    return Untried([parameter for _, parameter in named], lr)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("adafactor", "Adafactor steps the numbers of a parameter by one another, and with "),
        ("untried", "Untried could not be tried on other tensors than its parameters. With "),
        ("adamw", ""),
    ],
)
def test_a_run_warns_of_an_own_optimizer_that_looks_at_whole_parameters(
    name: str, told: str, folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    given = {"optimizer": f"{tmp_path / 'own.py'}:{name}", "steps": 1, "tensor_parallel": 2}
    train(folders / "two", tmp_path / "run", **given)
    warned = events_of(tmp_path / "run", "warning")
    assert [text[: len(told)] for text in warned] == ([told] if told else [])


def test_each_block_sums_one_activation_forward_and_one_backward(
    folders: Path, tmp_path: Path
) -> None:
    two = train(folders / "two", tmp_path / "two", steps=3, trace="1")
    (facts,) = events_of(two, "start")
    assert facts["ranks"].startswith("4 processes, 2 × 2 tensor ranks · shm (one host)")
    blocks, ranks, micro_batches, samples, float64 = 2, 2, 4, 4, 8
    activation = samples * WIDTH * float64
    sent = events_of(two, "step")[-1]["sent_bytes"]
    assert sent["tensor ranks"] == blocks * 2 * activation * micro_batches * ranks
    assert sent["activation"] == activation * micro_batches * ranks
    (end,) = events_of(two, "end")
    assert len(end["idle_parts_by_rank"]) == 4


@pytest.mark.parametrize(
    ("optimizer", "state"), [("adamw", "exp_avg"), ("muon", "momentum_buffer")]
)
def test_a_checkpoint_has_whole_tensors_and_continues_with_other_tensor_ranks(
    optimizer: str, state: str, folders: Path, tmp_path: Path
) -> None:
    given = {"decay": "none", "warmup": 0, "save_every": 4, "keep_last": 9, "ema": 0.9}
    given |= {"optimizer": optimizer}
    whole = train(folders / "two", tmp_path / "whole", steps=12, **given)
    parts = train(folders / "two", tmp_path / "parts", steps=4, **given)
    again = given | {"resume": "auto"}
    train(folders / "two", parts, steps=8, **(again | ONE))
    train(folders / "whole", parts, steps=12, **again, schedule="single", tensor_parallel=2)
    for folder in ("weights", "state"):
        one, other = (tensors_in(checkpoints_in(each)[0] / folder) for each in (whole, parts))
        names = [name for name in other if not name.startswith("random")]
        assert all((one[name] - other[name]).abs().max() < 1e-10 for name in names)
    assert one[f"optimizer.blocks.0.up.weight.{state}"].shape == (HIDDEN, WIDTH)


def test_a_product_without_its_sum_is_seen(folders: Path, tmp_path: Path) -> None:
    edited = without_sum(tmp_path / "edited", "True")
    one = train(folders / "two", tmp_path / "one", steps=2, **ONE)
    other = train(edited, tmp_path / "other", steps=2)
    assert largest_difference(one, other) > 1e-3


def test_a_norm_on_parts_of_positions_without_the_sum_of_its_gradients_is_seen(
    tmp_path: Path,
) -> None:
    write_split_mlp(tmp_path / "edited", positions=True)
    file = tmp_path / "edited" / "stage_0.py"
    file.write_text(re.sub(r"shared_module\((.*)\)\n", r"\1\n", file.read_text()))
    message = r"tensor ranks, but differ in blocks\.0\.norm\.\w+ of stage 0 after step 1"
    with pytest.raises(AsyncPipeError, match=message):
        train(tmp_path / "edited", tmp_path / "run", check_replicas=1)


def test_whole_parameters_that_come_apart_over_tensor_ranks_are_named(tmp_path: Path) -> None:
    write_split_mlp(tmp_path / "edited")
    file = tmp_path / "edited" / "stage_0.py"
    file.write_text(file.read_text().replace("parallel_input(self.norm(x))", "self.norm(x)"))
    message = r"ranks 0 and 1 are tensor ranks, but differ in \S+ of stage 0 after step 1"
    with pytest.raises(AsyncPipeError, match=message):
        train(tmp_path / "edited", tmp_path / "run", check_replicas=1)


def test_a_rank_that_waits_for_a_sum_in_vain_says_for_whom(tmp_path: Path) -> None:
    edited = without_sum(tmp_path / "edited", "current_ranks().rank == 0")
    with FaultyRun(edited, tmp_path / "run", {"timeout_s": 3}) as started:
        ended = started.finish()
    assert ended.code == 1
    waits = "rank 1 waits for rank 0 to sum a tensor of 4x16 over the tensor ranks"
    assert waits in ended.first_line


def test_a_tensor_rank_that_dies_ends_all(folders: Path, tmp_path: Path) -> None:
    with FaultyRun(folders / "two", tmp_path / "run", {"steps": 100_000}) as started:
        processes = started.wait_for_step(ranks=4)
        left = set().union(*map(segments_of, processes))
        os.kill(processes[1], signal.SIGKILL)
        started.now()
        ended = started.finish()
    named = "error: rank 1 (stage 0, tensor rank 1) was killed by SIGKILL at step "
    assert ended.first_line.startswith(named) and ended.after_s < 10
    assert not left, "memory with a name would stay"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "mlp"}, "generated for 1 tensor rank.*--tensor-parallel 2 --force"),
        ({"schedule": "ddp"}, "under ddp each process has the whole model"),
        (
            {"freeze": "schedule:1/3", "cache": "auto"},
            "--cache is not possible with --tensor-parallel 2",
        ),
        ({"compile": True}, "--compile is not possible with --tensor-parallel 2"),
        (
            {"schedule": "async-1f1b", "optimizer": "muon", "staleness": "msnag"},
            "msnag reads the state of the optimizer, but with --tensor-parallel 2 a rank has that",
        ),
        (
            {"schedule": "async-1f1b", "staleness": "partial-gradient", "clip": 1.0},
            "partial-gradient with --clip 1 expects the norm",
        ),
    ],
)
def test_what_tensor_ranks_cannot_do_is_refused(
    options: dict[str, Any], message: str, folders: Path
) -> None:
    given = {"folder": "two", "tensor_parallel": 2} | options
    folder = str(folders / given.pop("folder"))
    with pytest.raises(SettingsError, match=f"(?s){message}"):
        make_job(Settings(folder=folder, **given))


def test_a_size_that_the_tensor_ranks_do_not_divide_is_refused(
    folders: Path, tmp_path: Path
) -> None:
    with pytest.raises(AsyncPipeError, match="24 in 3 equal blocks cannot be divided over 5"):
        train(folders / "whole", tmp_path / "run", schedule="single", tensor_parallel=5)
