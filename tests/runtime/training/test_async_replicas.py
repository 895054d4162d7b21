"""Replicas of an asynchronous pipeline train as the recurrence with the micro-batches of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.launch.job import make_job
from asyncpipe.runtime.staleness import METHODS
from asyncpipe.runtime.transports import ShmTransport
from asyncpipe.tests.runtime.training.test_replicas import assert_same_training, train
from asyncpipe.tests.support.models.hand_folders import (
    PlainMlp,
    PlainText,
    exact_settings,
    write_mlp,
    write_text,
)
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, tied
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS
from asyncpipe.tests.support.oracles.async_simulation import (
    LiveReference,
    Reference,
    async_run,
)
from asyncpipe.tests.support.oracles.gradient_corrections import (
    DelayCompensatedReference,
    DelayRateReference,
    GapAwareActivationsReference,
    GapAwareReference,
    LookAheadReference,
    PipeMareRateReference,
    PipeMareReference,
    SpikeCompensationReference,
    Together,
    TwoBufferedReference,
)
from asyncpipe.tests.support.oracles.weight_predictions import (
    LwpReference,
    LwpWReference,
    MsnagReference,
    NagReference,
    PipeOptimReference,
    SpecTrainReference,
    XPipeReference,
)
from asyncpipe.tests.support.processes.executor import lowered, train_rank
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.processes.silent_reporter import events_of

STEPS, SEGMENTS = 6, 2
REFERENCES: dict[str, Reference] = {
    "none": LiveReference(),
    "stash": Reference(),
    "2bw": TwoBufferedReference(),
    "pipemare": PipeMareReference(),
    "stash+delay-rate": Together(Reference(), DelayRateReference()),
    "stash+gap-aware": Together(Reference(), GapAwareReference()),
    "stash+gap-aware-activations": Together(Reference(), GapAwareActivationsReference()),
    "stash+dc-asgd": Together(Reference(), DelayCompensatedReference()),
    "stash+error-feedback": Together(Reference(), LookAheadReference()),
    "stash+msnag": MsnagReference("sgd"),
    "none+pipemare-rate": Together(LiveReference(), PipeMareRateReference(4)),
    "stash+spike-compensation": Together(Reference(), SpikeCompensationReference()),
    "stash+nag": NagReference("sgd"),
    "stash+lwp": LwpReference("sgd"),
    "stash+lwp-w": LwpWReference("sgd"),
    "pipeoptim": PipeOptimReference("sgd"),
    "spectrain": SpecTrainReference("sgd"),
    "xpipe": XPipeReference("sgd"),
}


REFUSED = {"aggmsnag", "partial-gradient", "dc-asgd-adaptive"}
"""The methods that need all gradients of a step, which replicas divide."""
OTHERS = {
    "delay-momentum",
    "gap-aware-loss",
    "hidden-delay-rate",
    "nesterov-last",
    "schedule-aware",
}
"""Those that differ from a method above in what replicas have no part in."""


def test_every_method_is_compared_or_refused() -> None:
    compared = {name for names in REFERENCES for name in names.split("+")}
    assert compared | REFUSED | OTHERS == set(METHODS) and not compared & (REFUSED | OTHERS)
    needs = {name for name, method in METHODS.items() if "all gradients" in method.needs}
    assert needs == REFUSED


class Case(NamedTuple):
    staleness: str
    every: int
    model: str = "chain"
    segments: int = 1


CASES = (
    *(Case(staleness, every) for staleness in ("stash", "spectrain") for every in (1, 2, 4)),
    *(Case(staleness, 1) for staleness in REFERENCES if staleness != "2bw"),
    *(Case("2bw", every) for every in (3, 4)),
    Case("stash+msnag", 2),
    Case("stash", 1, "tied"),
    Case("stash", 2, "tied", segments=SEGMENTS),
    Case("2bw", 3, "tied", segments=SEGMENTS),
)


def make_model(kind: str, stages: int) -> HandModel:
    return tied(stages) if kind == "tied" else chain(stages, dropout=0.25)


def train_replicas(
    rank: int, stages: int, in_pipeline: int, replicas: int, cases: list[Any], slow_s: float
) -> list[dict[str, Any]]:
    own, replica = rank % in_pipeline, rank // in_pipeline
    pipelines = [
        dist.new_group(list(range(r * in_pipeline, (r + 1) * in_pipeline))) for r in range(replicas)
    ]
    copies = [
        dist.new_group([r * in_pipeline + j for r in range(replicas)]) for j in range(in_pipeline)
    ]
    results = []
    for case in map(Case._make, cases):
        model = make_model(case.model, stages)
        micro_batches = STEPS // case.segments * case.every
        schedule = lowered(model, "async-1f1b", micro_batches, case.every, ranks=in_pipeline)
        results.append(
            train_rank(
                model,
                schedule,
                ShmTransport(pipelines[replica]),
                segments=case.segments,
                optimize=OPTIMIZERS["decay"],
                staleness=case.staleness,
                seed=5,
                replica=replica,
                copies=copies[own],
                slow_s=slow_s if rank == 1 else 0.0,
            )
        )
    return results


def check(
    stages: int, replicas: int, cases: list[Case], *, ranks: int, slow_s: float = 0.0
) -> None:
    torch.set_num_threads(1)
    arguments = stages, ranks, replicas, [tuple(case) for case in cases], slow_s
    results = run_processes(ranks * replicas, train_replicas, *arguments, limit_s=180.0)
    for rank, result in enumerate(results):
        assert isinstance(result, list), f"rank {rank}: {result}"
    for number, case in enumerate(cases):
        model = make_model(case.model, stages)
        oracle = async_run(
            model,
            model.build(),
            STEPS,
            case.every,
            OPTIMIZERS["decay"],
            method=REFERENCES[case.staleness],
            seed=5,
            flush_every=STEPS // case.segments
            if case.segments > 1 and case.staleness != "2bw"
            else 0,
            replicas=replicas,
        )
        of_ranks = [result[number] for result in results]
        assert {tuple(row) for own in of_ranks for row in own["ledger"]} == oracle.ledger, case
        losses = {t: loss for own in of_ranks for t, loss in own["losses"].items()}
        assert losses.keys() == oracle.losses.keys()
        for t, loss in losses.items():
            torch.testing.assert_close(
                loss, oracle.losses[t], rtol=1e-12, atol=1e-12, msg=str(case)
            )
        for rank, own in enumerate(of_ranks):
            first = of_ranks[rank % ranks]["states"]
            for stage, state in own["states"].items():
                expected = oracle.modules[stage].state_dict()
                for name, value in state.items():
                    where = f"{case} rank {rank} {name}"
                    assert torch.equal(value, first[stage][name]), where
                    torch.testing.assert_close(
                        value, expected[name], rtol=1e-12, atol=1e-12, msg=where
                    )


@pytest.mark.parametrize(("stages", "replicas", "ranks"), [(2, 2, 2), (2, 3, 2), (3, 3, 1)])
def test_replicas_train_as_the_recurrence_of_all_micro_batches(
    stages: int, replicas: int, ranks: int
) -> None:
    check(stages, replicas, list(CASES), ranks=ranks)


def test_a_slow_rank_changes_nothing() -> None:
    cases = [Case("stash", 1), Case("stash+msnag", 2), Case("2bw", 3, "tied"), Case("none", 2)]
    check(3, 2, cases, ranks=2, slow_s=0.005)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


@pytest.mark.parametrize("clip_by", ["proportion", "known"])
def test_a_run_equals_one_pipeline_with_all_micro_batches(
    folders: Path, tmp_path: Path, clip_by: str
) -> None:
    # Under 2bw all micro-batches of a step read one version, however many each replica has.
    given = {"schedule": "2bw", "steps": 5, "optimizer": "adamw", "lr": 0.01, "clip": 0.3}
    given |= {"data": str(folders / "text.txt"), "clip_by": clip_by}
    one = train(folders / "text", tmp_path / "one", micro_batches=4, **given)
    two = train(
        folders / "text", tmp_path / "two", replicas=2, trace="2-4", check_replicas=1, **given
    )
    assert_same_training(one, two, PlainText())
    (facts,) = events_of(two, "start")
    assert facts["ranks"].startswith("4 processes, 2 replicas of 2 · shm (one host)")
    assert facts["batch"] == "8 sequences per step = 2 micro-batches × 2 sequences × 2 replicas"
    assert "2bw (asynchronous, gradients averaged over 2 replicas; two" in facts["schedule"]
    (end,) = events_of(two, "end")
    assert end["staleness"] == {"passages": 40, "delay_mean": 0.8, "delay_max": 1, "unexpected": 0}
    # A tied parameter is summed at each of its holders.
    elements = sum(weight.numel() for weight in PlainText().parameters())
    tied_elements = PlainText().wte.weight.numel()
    for line in events_of(two, "step"):
        assert line["summed_elements"] == elements + tied_elements
        assert line["sent_bytes"]["replicas"] >= 2 * 8 * line["summed_elements"]
    slices = json.loads((two / "trace.json").read_text())["traceEvents"]
    forwards = {
        (e["pid"], e["args"]["micro_batch"]) for e in slices if e.get("name", "")[:1] == "F"
    }
    second = {number for rank, number in forwards if rank in (2, 3)}
    assert second and all(number % 4 in (2, 3) for number in second)


def test_flushes_synchronous_steps_and_a_short_last_step_are_those_of_one_pipeline(
    folders: Path, tmp_path: Path
) -> None:
    # One micro-batch of a step in each replica, or one of as many samples.
    given = {"schedule": "async-1f1b", "sync_start": "1", "flush_every": 3, "eval_every": 4}
    given |= {"sync_end": "2"}
    given |= {"samples": 6 * 12 + 7, "remainder": "proportional", "steps": Settings.steps}
    given |= {"micro_batches": 1, "optimizer": "adamw", "clip": 0.5}
    one = train(folders / "mlp", tmp_path / "one", micro_batch_size=12, **given)
    given |= {"micro_batch_size": 4, "replicas": 3, "ranks": 1}
    three = train(folders / "mlp", tmp_path / "three", **given)
    assert_same_training(one, three, PlainMlp())
    # Also where one stage of a rank is a step ahead of the other.
    elements = sum(weight.numel() for weight in PlainMlp().parameters())
    assert [line["summed_elements"] for line in events_of(three, "step")] == [elements] * 7


SLOW = """
import os, time
from torch.nn.functional import cross_entropy
calls = 0
def criterion(outputs, target):
    global calls
    calls += 1
    if calls == 4 and os.environ.get("RANK") == "3":
        time.sleep(60)
    return cross_entropy(outputs, target)
"""


def test_a_replica_that_hangs_is_named_by_those_that_wait_for_it(
    folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    criterion = f"{tmp_path / 'slow.py'}:criterion"
    given = {"schedule": "async-1f1b", "replicas": 2, "criterion": criterion, "timeout_s": 4}
    with pytest.raises(AsyncPipeError) as error:
        train(folders / "mlp", tmp_path / "run", steps=9, **given)
    assert "rank 1 waits for the gradients of stage 1 from rank 3" in error.value.what
    assert "rank 3 is in forward of micro-batch " in error.value.what


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"staleness": "stash+partial-gradient"}, "each of the 2 replicas has only its own"),
        (
            {"staleness": "stash+gap-aware", "optimizer": "sgd", "momentum": 0.0},
            "where sgd has no momentum",
        ),
    ],
)
def test_methods_that_need_all_gradients_of_a_step_are_refused(
    folders: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(AsyncPipeError) as error:
        make_job(
            exact_settings(
                folders / "mlp", Path("unused"), schedule="async-1f1b", replicas=2, **options
            )
        )
    assert words in error.value.what and "--replicas 1" in error.value.cure
