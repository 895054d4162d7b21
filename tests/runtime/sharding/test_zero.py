"""`--zero` divides optimizer state and gradients among replicas, and changes no number."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import asyncpipe
from asyncpipe.partitioner.models.load import load_model
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.sharding.owned_steps import OwnedSteps
from asyncpipe.runtime.sharding.owners import owners_of
from asyncpipe.runtime.sharding.shards import MESSAGE_BYTES, UNDER_WAY, Shards
from asyncpipe.runtime.training.clipping import NormShare
from asyncpipe.runtime.training.replica_gradients import GradientSums
from asyncpipe.tests.support.models.copies import made_once
from asyncpipe.tests.support.models.split_folders import write_split_mlp
from asyncpipe.tests.support.oracles.resumed_runs import as_ended_at, train
from asyncpipe.tests.support.processes.gloo_ranks import RankError, run_processes

WORDS, LENGTH, WIDTH = 256, 12, 16
STEPS = 3
IN_TWO: dict[str, Any] = {"schedule": "1f1b", "replicas": 2, "micro_batches": 2, "clip": 0.5}
WHOLE: dict[str, Any] = {"schedule": "ddp", "micro_batches": 8, "clip": 0.5}
LATE: dict[str, Any] = IN_TWO | {"schedule": "async-1f1b", "clip_by": "known"}
PREDICTED: dict[str, Any] = LATE | {"staleness": "stash+msnag"}


class Case(NamedTuple):
    """A run in all levels; `exact` are those that add in the order of level 0."""

    optimizer: str
    options: dict[str, Any]
    exact: tuple[int, ...] = ()


CASES = {
    "adamw": Case("adamw", IN_TWO, (1,)),
    "sgd": Case("sgd", IN_TWO | {"momentum": 0.9}, (1,)),
    "muon": Case("muon", IN_TWO, (1,)),
    # SOAP's bases of directions without gradients are those of rounding errors.
    "soap": Case("soap", IN_TWO | {"micro_batches": 1}, (1, 2)),
    "adamw, whole models": Case("adamw", WHOLE),
    "muon, whole models": Case("muon", WHOLE),
    "adamw, asynchronous": Case("adamw", LATE, (1,)),
    "muon, predicted": Case("muon", PREDICTED, (1,)),
    "sgd, predicted": Case("sgd", PREDICTED | {"micro_batches": 1, "momentum": 0.9}, (1, 2)),
}


def write_gpt2(folder: Path, stages: int) -> Path:
    """A gpt2 of two small layers, with its dropout."""

    def partition() -> None:
        fields = {
            "n_layer": 2,
            "n_embd": WIDTH,
            "n_head": 2,
            "n_positions": 24,
            "vocab_size": WORDS,
        }
        source = load_model("gpt2", model_args=fields, seed=0)
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        asyncpipe.partition(
            source.model,
            {"input_ids": ids, "labels": ids},
            stages=stages,
            output=folder,
            name="gpt2",
            profile="analytic",
        )

    made_once(f"gpt2 of two layers in {stages} stages", folder, partition)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("generated") / "gpt2_2p", 2)


def batches() -> Iterator[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        ids = torch.randint(WORDS, (8, LENGTH), generator=made)
        yield {"input_ids": ids, "labels": ids}


def train_case(folder: str, case: Case, zero: int) -> dict[str, Any]:
    pipe = asyncpipe.Pipeline(
        folder, optimizer=case.optimizer, lr=1e-2, dtype="float64", zero=zero, **case.options
    )
    if "async" in case.options["schedule"]:
        losses = [result.loss for result in pipe.stream(list(batches()))]
    else:
        losses = [pipe.step(batch).loss for batch in batches()]
    optimizers = pipe.stepper.optimizers
    return {
        "losses": losses,
        "weights": {name: each.detach() for name, each in pipe.named_parameters()},
        "state": {
            f"{name}.{key}": value
            for stage, module in pipe.modules.items()
            for name, parameter in module.named_parameters()
            for key, value in optimizers[stage].state_of(parameter).items()
        },
    }


def train_cases(rank: int, folder: str) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    return {
        name: [train_case(folder, case, zero) for zero in (0, 1, 2)] for name, case in CASES.items()
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, is_exact: bool) -> None:
    tolerance = 0.0 if is_exact else 1e-12
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=0)
    for kind in ("weights", "state"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(found[kind][name], value, rtol=0, atol=tolerance, msg=name)


def test_every_level_trains_as_replicas_that_have_everything(folder: Path) -> None:
    ranks = run_processes(4, train_cases, str(folder), limit_s=240)
    assert not [rank for rank in ranks if isinstance(rank, RankError)], ranks
    for name, case in CASES.items():
        groups = [(0, 2), (1, 3)] if "replicas" in case.options else [(0, 1, 2, 3)]
        for group in groups:
            for zero in (1, 2):
                whole, parts = ([ranks[rank][name][level] for rank in group] for level in (0, zero))
                states = [part["state"] for part in parts]
                merged = {key: value for state in states for key, value in state.items()}
                assert len(merged) == sum(map(len, states))  # each state has one owner
                for part in parts:
                    found = part | {"state": merged}
                    assert_equal(found, whole[0], is_exact=zero in case.exact)
                numbers = [sum(value.numel() for value in state.values()) for state in states]
                # The words of a stage have one owner.
                assert max(numbers) < max(1.1 * sum(numbers) / len(group), 2.01 * WORDS * WIDTH)


def test_a_run_resumes_at_any_level_and_number_of_replicas(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    given = {"data": str(text), "dtype": "float64", "optimizer": "muon", "clip": 0.5}
    two = {"replicas": 2, "micro_batches": 2, "check_replicas": 1}
    whole = train(folder, tmp_path / "whole", replicas=1, **given)
    shared = train(folder, tmp_path / "shared", zero=2, **given, **two)
    for name, start, options in (
        ("gathered", shared, {"replicas": 1, "zero": 0}),
        ("shared again", whole, {"zero": 1, **two}),
    ):
        output = as_ended_at(start, 2, tmp_path / name)
        resumed = train(folder, output, resume="auto", **{**given, **options})
        for kind in ("loss", "grad_norm"):
            expected = list(whole.of(kind).values())
            assert list(resumed.of(kind).values()) == pytest.approx(expected, rel=1e-12)
        for key, value in whole.weights.items():
            torch.testing.assert_close(resumed.weights[key], value, rtol=0, atol=1e-12, msg=key)
        for key, value in whole.state.items():
            if key.startswith("optimizer."):
                torch.testing.assert_close(resumed.state[key], value, rtol=0, atol=1e-12, msg=key)


def test_tensor_ranks_have_owners_among_the_replicas_of_their_parts(tmp_path: Path) -> None:
    write_split_mlp(tmp_path / "split", stages=1, batch_norm=False)
    given = {"replicas": 2, "micro_batches": 2, "clip": 0.5, "dtype": "float64"}
    plain, split = (
        train(tmp_path / "split", tmp_path / name, optimizer="adamw", **given, **options)
        for name, options in (("plain", {}), ("shared", {"tensor_parallel": 2, "zero": 1}))
    )
    assert list(split.of("loss").values()) == pytest.approx(list(plain.of("loss").values()))
    kept, own = (
        {name for name in each.state if name.startswith("optimizer.")} for each in (plain, split)
    )
    assert kept == own
    for found, expected in ((split.weights, plain.weights), (split.state, plain.state)):
        for name in expected.keys() & found.keys() & {*plain.weights, *kept}:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12, msg=name)


OWN = """
import torch
from asyncpipe.runtime.sharding.shards import Shards

def make(named_parameters, lr):
    return torch.optim.RMSprop([each for _, each in named_parameters], lr=lr)

def faulty(named_parameters, lr):
    Shards.spread = lambda self, tensors: None
    return make(named_parameters, lr)
"""


def test_weights_that_are_not_exchanged_are_found_by_check_replicas(
    folder: Path, tmp_path: Path
) -> None:
    own, text = tmp_path / "own.py", tmp_path / "text.txt"
    own.write_text(OWN)
    text.write_text("abc " * 200)
    given = {"data": str(text), "replicas": 2, "micro_batches": 1, "check_replicas": 1, "steps": 2}
    zero0, zero1 = (
        train(folder, tmp_path / str(zero), optimizer=f"{own}:make", zero=zero, **given)
        for zero in (0, 1)
    )
    assert zero1.weights.keys() == zero0.weights.keys()
    assert all(torch.equal(value, zero0.weights[key]) for key, value in zero1.weights.items())
    assert zero1.state.keys() == zero0.state.keys()
    with pytest.raises(AsyncPipeError, match="are replicas, but differ in .* after step 1"):
        train(folder, tmp_path / "faulty", optimizer=f"{own}:faulty", zero=1, **given)


def test_what_cannot_be_shared_out_is_refused(folder: Path, tmp_path: Path) -> None:
    def refusal(**given: Any) -> str:
        with pytest.raises(AsyncPipeError) as error:
            train(folder, tmp_path / "refused", **given)
        return str(error.value)

    assert "--zero 1 shares optimizer state out over replicas, but there is 1" in refusal(zero=1)
    late = {"schedule": "async-1f1b", "staleness": "stash+gap-aware", "replicas": 2}
    assert "gap-aware reads the optimizer's state of every weight" in refusal(zero=2, **late)


def test_owners_are_balanced() -> None:
    sizes = [7, 7, 7, 40, 3, 3, 3, 9, 1]
    owners = owners_of(sizes, 2)
    loads = [sum(s for s, own in zip(sizes, owners, strict=True) if own == copy) for copy in (0, 1)]
    assert sorted(loads) == [40, 40]
    assert owners_of([5], 4) == (0,)


def step_both(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Parameters after three steps of their owners, and of torch's optimizer."""
    torch.manual_seed(0)
    shapes = [(9, 4), (4,), (7, 7), (3, 5), (11,)]
    both = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2)]
    own, torchs = both
    owners = owners_of([each.numel() for each in own], 2)
    steps = OwnedSteps(Shards(dict(zip(own, owners, strict=True)), rank, dist.group.WORLD))
    mine = torch.optim.AdamW([each for each in own if steps.shards.owns(each)], lr=0.1)
    theirs = ZeroRedundancyOptimizer(torchs, torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        for one, other in zip(own, torchs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        mine.step()
        steps.finish_step()
        theirs.step()
    return [(one.detach(), other.detach()) for one, other in zip(own, torchs, strict=True)]


def test_owners_step_as_torch_s_zero_redundancy_optimizer() -> None:
    for rank in run_processes(2, step_both):
        assert not isinstance(rank, RankError), rank
        assert all(torch.equal(one, other) for one, other in rank)


def large_tensors() -> dict[int, int]:
    """The bytes of every tensor in memory but small ones and parameters, by storage."""
    tensors = [each for each in gc.get_objects() if type(each) is Tensor and each.numel() > 512]
    return {each.untyped_storage()._cdata: each.nbytes for each in tensors}


def sum_each(rank: int) -> list[tuple[int, int]]:
    """The bytes of gradients after the backward of each micro-batch, and at the end."""
    torch.manual_seed(0)
    of_modules = large_tensors().keys()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24))).double()
    parameters = list(model.parameters())
    owners = dict(zip(parameters, owners_of([each.nbytes for each in parameters], 2), strict=True))
    shards = Shards(owners, rank, dist.group.WORLD, each_backward=True)
    share = NormShare(parameters, {}, [], shards=shards)
    sums = GradientSums({0: share}, dist.group.WORLD, "ranks")
    found = []
    for _ in range(2):
        sums.expect(0)
        model(torch.randn(2, 512, dtype=torch.float64)).sum().backward()
        sums.begin(0)
        assert all(each.grad is None for each in parameters)
        own = [size for name, size in large_tensors().items() if name not in of_modules]
        found.append((sum(own), sum(each.nbytes for each in parameters)))
    sums.finish(0)
    owned = [each.grad is not None for each in parameters]
    assert owned == [shards.owns(each) for each in parameters]
    return found


def test_each_replica_keeps_its_part_of_the_gradients_between_micro_batches() -> None:
    for rank in run_processes(2, sum_each):
        assert not isinstance(rank, RankError), rank
        for kept, whole in rank:
            assert kept <= whole / 2 + (UNDER_WAY + 1) * MESSAGE_BYTES
