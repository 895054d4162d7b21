"""Asynchronous 1F1B equals the exact single-process recurrence, in float64 to the last bit."""

import itertools
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from asyncpipe.runtime.schedule.asynchronous import depths
from asyncpipe.runtime.staleness import METHODS, BackwardReads, Staleness, VersionPair
from asyncpipe.runtime.transports import GlooTransport, run_together
from asyncpipe.tests.support.models.hand_plans import HandModel, chain, skips, tied
from asyncpipe.tests.support.oracles.async_simulation import REFERENCES, Oracle, async_run
from asyncpipe.tests.support.processes.executor import (
    Seen,
    Trained,
    lowered,
    train_rank,
    train_together,
)
from asyncpipe.tests.support.processes.gloo_ranks import run_processes

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.05),
}
STEPS = 6


def states(modules: list[nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    return {(j, n): v for j, module in enumerate(modules) for n, v in module.state_dict().items()}


def assert_equal(
    modules: list[nn.Module], losses: dict[int, torch.Tensor], ledger: set, oracle: Oracle
) -> None:
    assert {i: float(loss) for i, loss in losses.items()} == {
        i: float(loss) for i, loss in oracle.losses.items()
    }
    assert ledger == oracle.ledger
    expected = states(oracle.modules)
    for key, value in states(modules).items():
        assert torch.equal(value, expected[key]), key


def both(
    model: HandModel,
    step_every: int,
    optimizer: str,
    staleness: str,
    *,
    ahead: str | None = None,
    fault: str = "",
    **options: Any,
) -> tuple[Trained, Oracle]:
    optimize = OPTIMIZERS[optimizer]
    schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every, ahead=ahead, **options)
    trained = train_together(model, schedule, optimize=optimize, staleness=staleness, seed=5)
    oracle = async_run(
        model,
        model.build(),
        STEPS,
        step_every,
        optimize,
        method=REFERENCES[staleness](),
        seed=5,
        ahead=depths(len(model.stages), ahead),
        fault=fault,
    )
    return trained, oracle


def check(
    model: HandModel, step_every: int, optimizer: str, staleness: str, **options: Any
) -> None:
    trained, oracle = both(model, step_every, optimizer, staleness, **options)
    assert_equal(trained.modules, trained.seen.losses, trained.ledger, oracle)


@pytest.mark.parametrize("staleness", REFERENCES)
@pytest.mark.parametrize("step_every", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_async_1f1b_equals_the_oracle(stages: int, step_every: int, staleness: str) -> None:
    check(chain(stages), step_every, "sgd", staleness)


@pytest.mark.parametrize("staleness", ["none", "stash"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_several_stages_a_rank_equal_the_oracle(ranks: int, staleness: str) -> None:
    check(chain(4, norm=True, dropout=0.25), 2, "adam", staleness, ranks=ranks)
    check(tied(4), 1, "sgd", staleness, ranks=ranks)
    check(skips(), 1, "sgd", staleness, ranks=ranks)


@pytest.mark.parametrize("staleness", ["none", "stash"])
def test_other_depths_equal_the_oracle(staleness: str) -> None:
    check(chain(3), 2, "sgd", staleness, ahead="2x")
    check(tied(3), 1, "sgd", staleness, ahead="2x", ranks=2)
    check(chain(4), 1, "sgd", staleness, ahead="4,1,1,1")


@pytest.mark.parametrize("staleness", REFERENCES)
def test_async_with_batchnorm_and_dropout_equals_the_oracle(staleness: str) -> None:
    check(chain(4, norm=True, dropout=0.25), 2, "adam", staleness)


@pytest.mark.parametrize("staleness", REFERENCES)
def test_async_with_skips_equals_the_oracle(staleness: str) -> None:
    check(skips(), 1, "adam", staleness)


@pytest.mark.parametrize("step_every", [1, 2, 4])
@pytest.mark.parametrize("staleness", REFERENCES)
def test_async_with_tied_weights_equals_the_oracle(staleness: str, step_every: int) -> None:
    trained, oracle = both(tied(4), step_every, "adam", staleness)
    assert_equal(trained.modules, trained.seen.losses, trained.ledger, oracle)
    assert torch.equal(trained.modules[0].table.weight, trained.modules[3].out.weight)


@pytest.mark.parametrize(
    ("name", "optimizer", "step_every", "staleness"),
    [
        *itertools.product(
            ["noisy 3", "noisy 5", "skips", "tied 2", "tied 5"],
            OPTIMIZERS,
            [1, 3, 8],
            REFERENCES,
        )
    ],
)
def test_every_async_configuration_equals_the_oracle(
    name: str, optimizer: str, step_every: int, staleness: str
) -> None:
    kind, _, stages = name.partition(" ")
    makers = {
        "noisy": partial(chain, norm=True, dropout=0.25),
        "skips": skips,
        "tied": tied,
    }
    check(makers[kind](*map(int, stages.split())), step_every, optimizer, staleness)


def run_async(rank: int, configurations: list[tuple[str, int, str, str]]) -> list[dict]:
    transport = GlooTransport()
    makers = {"chain": chain, "tied": tied}
    results = []
    for name, step_every, optimizer, staleness in configurations:
        model = makers[name](torch.distributed.get_world_size())
        schedule = lowered(model, "async-1f1b", STEPS * step_every, step_every)
        results.append(
            train_rank(
                model,
                schedule,
                transport,
                optimize=OPTIMIZERS[optimizer],
                staleness=staleness,
                seed=5,
            )
        )
    return results


def check_processes(stages: int, configurations: list[tuple[str, int, str, str]]) -> None:
    results = run_processes(stages, run_async, configurations)
    for number, (name, step_every, optimizer, staleness) in enumerate(configurations):
        model = {"chain": chain, "tied": tied}[name](stages)
        oracle = async_run(
            model,
            model.build(),
            STEPS,
            step_every,
            OPTIMIZERS[optimizer],
            method=REFERENCES[staleness](),
            seed=5,
        )
        of_ranks = [result[number] for result in results]
        modules = model.build()
        for j, module in enumerate(modules):
            module.load_state_dict(of_ranks[j]["states"][j])
        ledger = {tuple(row) for result in of_ranks for row in result["ledger"]}
        assert_equal(modules, of_ranks[-1]["losses"], ledger, oracle)


def test_real_processes_equal_the_oracle() -> None:
    check_processes(3, [("chain", 2, "adam", "stash"), ("tied", 1, "sgd", "none")])


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_configuration_in_real_processes_equals_the_oracle(stages: int) -> None:
    names = ["chain", "tied"]
    check_processes(stages, [*itertools.product(names, [1, 2, 4], OPTIMIZERS, REFERENCES)])


def test_one_stage_is_plain_training() -> None:
    model = chain(1)
    trained, oracle = both(model, 2, "sgd", "none")
    assert_equal(trained.modules, trained.seen.losses, trained.ledger, oracle)
    assert {f == b for _, _, f, b in trained.ledger} == {True}


def test_delay_is_at_most_the_warm_up_over_the_step_length() -> None:
    for stages, step_every in itertools.product((2, 4), (1, 2, 4)):
        ledger = both(chain(stages), step_every, "sgd", "none")[0].ledger
        worst = {j: max(b - f for s, _, f, b in ledger if s == j) for j in range(stages)}
        assert worst == {j: -(-(stages - 1 - j) // step_every) for j in range(stages)}


def test_segments_continue_versions_and_micro_batches() -> None:
    model = chain(2)
    schedule = lowered(model, "async-1f1b", 6, 2)
    trained = train_together(model, schedule, segments=2, optimize=OPTIMIZERS["adam"])
    assert [pipeline.versions for pipeline in trained.pipelines] == [{0: 6}, {1: 6}]
    assert sorted(trained.seen.losses) == list(range(12))
    second = {row for row in trained.ledger if row[1] >= 6}
    # Drained in between: the first micro-batches of a segment see the newest version.
    assert min(f for _, _, f, _ in second) == 3
    assert {b for _, i, _, b in second if i in (6, 7)} == {3}


def test_a_tied_gradient_that_a_segment_leaves_over_is_used_in_the_next() -> None:
    model = tied(3)
    schedule = lowered(model, "async-1f1b", 4, 2)
    trained = train_together(model, schedule, segments=2, optimize=OPTIMIZERS["sgd"])
    table = (0, "table.weight")
    assert [table in trained.seen.gradients[version] for version in (1, 2, 3, 4)] == [
        False,
        True,
        True,
        True,
    ]
    assert torch.equal(trained.modules[0].table.weight, trained.modules[2].out.weight)


def test_a_synchronous_segment_after_an_asynchronous_one_loses_no_tied_gradient() -> None:
    model = tied(3)
    first = lowered(model, "async-1f1b", 4, 2)
    flushed = lowered(model, "1f1b", 2)
    trained = train_together(model, first, optimize=OPTIMIZERS["sgd"])
    alone = train_together(model, flushed, modules=[deepcopy(m) for m in trained.modules])
    run_together(
        [
            pipeline.steps(flushed, model.make_inputs, observer=trained.seen)
            for pipeline in trained.pipelines
        ]
    )
    both_windows = trained.seen.gradients[3][0, "table.weight"]
    left_over = both_windows - alone.seen.gradients[1][0, "table.weight"]
    assert left_over.abs().max() > 1e-3
    assert torch.equal(trained.modules[0].table.weight, trained.modules[2].out.weight)


@pytest.mark.parametrize(
    "fault", ["new weights in one backward", "drop one gradient", "swap two micro-batches"]
)
def test_the_comparison_sees_a_planted_fault(fault: str) -> None:
    trained, oracle = both(chain(3), 2, "sgd", "stash", fault=fault)
    with pytest.raises(AssertionError):
        assert_equal(trained.modules, trained.seen.losses, trained.ledger, oracle)


def test_stash_and_none_differ_where_a_step_lies_between_forward_and_backward() -> None:
    stash, _ = both(chain(2), 1, "sgd", "stash")
    none, _ = both(chain(2), 1, "sgd", "none")
    first = {t.seen.losses[0].item() for t in (stash, none)}
    assert len(first) == 1
    assert not torch.equal(stash.modules[0].matrix, none.modules[0].matrix)


class Probe(Staleness):
    """Writes down which hooks were called, and changes the gradient and the rate."""

    calls: list[str] = []

    decides = frozenset({"forward", "backward", "gradient", "rate"})

    def begin(self, context) -> None:
        self.calls.append(f"{context.stage}: {context.ahead} ahead of {context.step_every}")

    def forward_view(self, weights, pair: VersionPair) -> None:
        self.calls.append(f"{weights.stage}F{pair.micro_batch}@{pair.forward_version}")

    def backward_reads(self, weights, pair: VersionPair) -> BackwardReads:
        self.calls.append(f"{weights.stage}B{pair.micro_batch}@{pair.backward_version}")
        return BackwardReads.LIVE

    def transform_gradient(self, weights) -> None:
        for weight in weights.live.values():
            weight.grad.zero_()

    def lr_scale(self, version: int, name: str | None = None) -> float:
        return 1 / version

    def after_step(self, weights) -> None:
        self.calls.append(f"{weights.stage}S{weights.version}")


def test_a_staleness_method_is_called_at_every_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "probe", Probe)
    Probe.calls.clear()
    model = chain(2)
    schedule = lowered(model, "async-1f1b", 3, 3)
    before = states(model.build())
    trained = train_together(
        model, schedule, optimize=partial(torch.optim.SGD, lr=1.0), staleness="probe"
    )
    own = [call for call in Probe.calls if call.startswith("0")]
    assert own == ["0: 1 ahead of 3", "0F0@0", "0F1@0", "0B0@0", "0F2@0", "0B1@0", "0B2@0", "0S1"]
    for key, value in states(trained.modules).items():
        assert torch.equal(value, before[key])
    assert trained.pipelines[0].lr_scale(0, 4) == 0.25


@dataclass
class Final(Seen):
    """Notes each gradient that is said to be final during the last backward of a window."""

    final: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    complete: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)

    def on_backward(self, stage: int, version: int, *, is_last: bool) -> Any:
        if not is_last:
            return None
        found = self.final[stage, version] = {}
        names = {weight: name for name, weight in self.modules[stage].named_parameters()}

        def note(weight: torch.Tensor) -> None:
            assert (stage, version) not in self.complete
            found[names[weight]] = weight.grad.clone()

        return note

    def on_gradients(self, stage: int, version: int) -> None:
        self.complete[stage, version] = {
            name: weight.grad.clone() for name, weight in self.modules[stage].named_parameters()
        }


@pytest.mark.parametrize(
    ("staleness", "every"),
    [("stash", 1), ("2bw", 3), ("spectrain", 1), ("xpipe", 2), ("stash+dc-asgd", 1)],
)
def test_gradients_of_copies_are_final_in_the_last_backward_unless_they_are_corrected(
    staleness: str, every: int
) -> None:
    model = chain(3)
    trained = train_together(
        model,
        lowered(model, "async-1f1b", 4 * every, every),
        optimize=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        staleness=staleness,
        observer=Final,
    )
    seen = trained.seen
    assert isinstance(seen, Final) and seen.final.keys() == seen.complete.keys()
    for (stage, version), found in seen.final.items():
        complete = seen.complete[stage, version]
        for name, gradient in found.items():
            assert torch.equal(gradient, complete[name])
        if stage == 0 and version > 1:
            assert found.keys() == (set() if "dc-asgd" in staleness else complete.keys())
