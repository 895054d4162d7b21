"""PipeDream-2BW: a whole window reads the weights before the newest, at every stage."""

import pytest
import torch

from asyncpipe.runtime.errors import ScheduleError
from asyncpipe.runtime.staleness import Conditions
from asyncpipe.runtime.staleness import check as check_fits
from asyncpipe.runtime.transports import run_together
from asyncpipe.tests.support.models.hand_plans import chain, skips, tied
from asyncpipe.tests.support.oracles.async_equality import (
    OPTIMIZERS,
    assert_equal,
    check,
    recomputing,
    run_both,
)
from asyncpipe.tests.support.oracles.gradient_corrections import TwoBufferedReference
from asyncpipe.tests.support.processes.executor import lowered, train_together


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("optimizer", ["decay", "adam", "adamw"])
@pytest.mark.parametrize(("stages", "step_every"), [(2, 2), (2, 4), (3, 3), (4, 4)])
def test_2bw_equals_the_recurrence(
    stages: int, step_every: int, optimizer: str, recompute: bool
) -> None:
    model = chain(stages, dropout=0.25)
    check(
        model,
        "2bw",
        TwoBufferedReference(),
        optimizer,
        step_every=step_every,
        recompute=recompute,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_2bw_of_eight_stages_equals_the_recurrence(optimizer: str) -> None:
    check(chain(8), "2bw", TwoBufferedReference(), optimizer, step_every=8)


@pytest.mark.parametrize("kind", ["norm", "skips", "tied"])
def test_2bw_with_other_models_equals_the_recurrence(kind: str) -> None:
    model = {"norm": chain(3, norm=True), "skips": skips(), "tied": tied(3)}[kind]
    check(model, "2bw", TwoBufferedReference(), "adam", step_every=4)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_drain_changes_nothing_of_2bw(recompute: bool) -> None:
    check(chain(3), "2bw", TwoBufferedReference(), step_every=4, segments=3, recompute=recompute)


def test_every_stage_is_one_step_late() -> None:
    trained, _ = run_both(chain(4), "2bw", TwoBufferedReference(), step_every=4)
    late = {(stage, backward, backward - forward) for stage, _, forward, backward in trained.ledger}
    assert late == {(j, b, min(b, 1)) for j in range(4) for b in range(6)}


def test_a_stage_keeps_one_version() -> None:
    trained, _ = run_both(chain(3), "2bw", TwoBufferedReference(), step_every=4)
    weights = [pipeline.weights[j] for j, pipeline in enumerate(trained.pipelines)]
    assert [one.ring_size for one in weights] == [1, 1, 1]
    assert [one.copies_held for one in weights] == [1, 1, 1]
    # A version is copied once, before the step that makes the next.
    assert [one.copies_made for one in weights] == [6, 6, 6]


def test_synchronous_steps_read_live_weights_and_begin_2bw_anew() -> None:
    model = chain(2)
    flushed, free = lowered(model, "1f1b", 2), lowered(model, "async-1f1b", 6, 2)
    plain = train_together(model, flushed, segments=2, optimize=OPTIMIZERS["momentum"])
    mixed = train_together(
        model, flushed, segments=2, optimize=OPTIMIZERS["momentum"], staleness="2bw"
    )
    for ours, theirs in zip(mixed.modules, plain.modules, strict=True):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    rows = []
    for schedule, first in ((free, 4), (flushed, 10), (free, 12)):
        reports = run_together(
            [
                pipeline.steps(
                    schedule, model.make_inputs, first_micro_batch=first, observer=mixed.seen
                )
                for pipeline in mixed.pipelines
            ]
        )
        rows.append({(e.backward_version, e.delay) for report in reports for e in report.ledger})
    assert rows == [{(2, 0), (3, 1), (4, 1)}, {(5, 0)}, {(6, 0), (7, 1), (8, 1)}]


def test_a_window_that_is_too_short_is_refused() -> None:
    check_fits("2bw", Conditions(step_every=4, ahead=3))
    with pytest.raises(ScheduleError, match="2bw needs at least 4 micro-batches per step"):
        check_fits("2bw", Conditions(step_every=3, ahead=3))


def test_2bw_decides_alone_which_weights_are_read() -> None:
    with pytest.raises(ScheduleError, match="both decide which weights a backward reads"):
        check_fits("2bw+stash", Conditions(step_every=4, ahead=3))


@pytest.mark.parametrize("fault", ["new weights in one backward", "drop one gradient"])
def test_the_comparison_sees_a_planted_fault(fault: str) -> None:
    trained, oracle = run_both(chain(2), "2bw", TwoBufferedReference(), step_every=2, fault=fault)
    with pytest.raises(AssertionError):
        assert_equal(trained, oracle)


def test_recomputation_is_seen_by_the_plan() -> None:
    assert [stage.recompute for stage in recomputing(chain(3)).plan.stages] == [True, True, False]
