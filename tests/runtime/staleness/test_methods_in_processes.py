"""Every staleness method trains alike in processes over every transport, to the last bit.

What they are compared with is the same pipeline with all its ranks in one thread, which other tests
hold against the recurrences that the methods' papers write.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from asyncpipe.runtime.staleness import METHODS
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, tied
from asyncpipe.tests.support.oracles.async_equality import OPTIMIZERS, recomputing
from asyncpipe.tests.support.processes.executor import lowered, train_rank, train_together
from asyncpipe.tests.support.processes.transports import PROCESS_KINDS, open_transport, run_ranks

STEPS = 5
# Methods, optimizer, micro-batches of a step, whether stages recompute.
RUNS: tuple[tuple[str, str, int, bool], ...] = (
    ("none", "decay", 1, True),
    ("stash", "adamw", 2, False),
    ("2bw", "adam", 8, False),
    ("pipemare+pipemare-rate", "momentum", 1, False),
    ("stash+msnag+schedule-aware", "adamw", 1, True),
    ("aggmsnag", "decay", 2, False),
    ("stash+partial-gradient+delay-rate", "adam", 4, False),
    ("nag", "momentum", 1, True),
    ("stash+hidden-delay-rate", "adamw", 1, False),
    ("none+delay-momentum", "adam", 1, False),
    ("lwp+stash+spike-compensation", "momentum", 1, False),
    ("lwp-w", "adamw", 2, True),
    ("spectrain", "momentum", 1, False),
    ("xpipe", "adam", 2, False),
    ("pipeoptim", "adamw", 1, True),
    ("stash+nesterov-last", "momentum", 1, False),
    ("stash+gap-aware", "adam", 1, False),
    ("stash+gap-aware-activations", "momentum", 1, False),
    ("gap-aware-loss", "decay", 1, True),
    ("stash+dc-asgd", "momentum", 1, False),
    ("stash+dc-asgd-adaptive", "sgd decay", 2, False),
    ("stash+error-feedback", "adamw", 1, False),
)
KINDS = [kind for kind in PROCESS_KINDS if kind != "nccl"]


def model_of(stages: int, *, is_tied: bool, recompute: bool) -> HandModel:
    model = tied(stages) if is_tied else chain(stages, dropout=0.25)
    return recomputing(model) if recompute else model


def run_methods(rank: int, kind: str, stages: int, is_tied: bool) -> list[dict[str, Any]]:
    results = []
    for staleness, optimizer, step_every, recompute in RUNS:
        model = model_of(stages, is_tied=is_tied, recompute=recompute)
        schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
        run = partial(train_rank, model, schedule, open_transport(kind), seed=3)
        results.append(run(optimize=OPTIMIZERS[optimizer], staleness=staleness))
    return results


def check(kind: str, stages: int, *, is_tied: bool = False) -> None:
    torch.set_num_threads(1)
    results = run_ranks(kind, stages, run_methods, stages, is_tied, limit_s=180.0)
    for number, (staleness, optimizer, step_every, recompute) in enumerate(RUNS):
        model = model_of(stages, is_tied=is_tied, recompute=recompute)
        together = train_together(
            model,
            lowered(model, "async-1f1b", STEPS * step_every, step_every),
            optimize=OPTIMIZERS[optimizer],
            staleness=staleness,
            seed=3,
        )
        for rank, result in enumerate(results):
            assert isinstance(result, list), f"rank {rank}: {result}"
            own = result[number]
            for micro_batch, loss in own["losses"].items():
                assert torch.equal(loss, together.seen.losses[micro_batch]), staleness
            for name, value in together.modules[rank].state_dict().items():
                assert torch.equal(own["states"][rank][name], value), (staleness, rank, name)


def test_every_method_is_among_the_runs() -> None:
    assert {name for staleness, *_ in RUNS for name in staleness.split("+")} == set(METHODS)


@pytest.mark.parametrize("kind", KINDS)
def test_three_processes_train_as_one_thread_does(kind: str) -> None:
    check(kind, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_processes_with_tied_weights_train_as_one_thread_does(kind: str) -> None:
    check(kind, 2, is_tied=True)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_more_and_fewer_processes_train_as_one_thread_does(stages: int) -> None:
    check("shm", stages)
