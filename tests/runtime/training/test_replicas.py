"""Replicas of a pipeline train as one pipeline with all their micro-batches would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.executor.instrumented import Activities
from asyncpipe.runtime.executor.observed_transport import ObservedTransport
from asyncpipe.runtime.tensor_files import read_tensors
from asyncpipe.runtime.transports import LocalHub, run_together
from asyncpipe.runtime.transports.protocol import Channel, peer_is_gone
from asyncpipe.tests.support.models.hand_folders import (
    PlainMlp,
    PlainText,
    exact_settings,
    write_mlp,
    write_text,
)
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.processes.executor import Seen, lowered, make_pipeline, train_together
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    write_mlp(folder / "mlp4", stages=4)
    write_text(folder / "text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def train(folder: Path, output: Path, **given: Any) -> Path:
    run(exact_settings(folder, output, **({"micro_batches": 2} | given)), FACTORY)
    return output


def assert_same_training(one: Path, other: Path, model: torch.nn.Module) -> None:
    for event, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss")):
        expected = [line[name] for line in events_of(one, event)]
        found = [line[name] for line in events_of(other, event)]
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=False), (event, name)
    names = dict(model.named_parameters())
    weights = read_tensors(one / "weights", names)
    for name, tensor in read_tensors(other / "weights", names).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-12, atol=1e-12, msg=name)


def test_two_pipelines_train_as_one_with_twice_the_micro_batches(
    folders: Path, tmp_path: Path
) -> None:
    given = {"data": str(folders / "text.txt"), "clip": 0.5}
    one = train(folders / "text", tmp_path / "one", schedule="single", micro_batches=4, **given)
    two = train(
        folders / "text", tmp_path / "two", replicas=2, check_replicas=1, trace="1", **given
    )
    assert_same_training(one, two, PlainText())
    assert (two / "schedule.txt").is_file() and not (two / "ranks").exists()
    (facts,) = events_of(two, "start")
    assert facts["ranks"].startswith("4 processes, 2 replicas of 2 · shm (one host)")
    assert facts["batch"] == "8 sequences per step = 2 micro-batches × 2 sequences × 2 replicas"
    assert "averaged over 2 replicas" in facts["schedule"]
    (end,) = events_of(two, "end")
    assert len(end["idle_parts_by_rank"]) == 4
    trace = json.loads((two / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}


def test_a_replica_draws_the_random_numbers_of_its_micro_batches_among_all() -> None:
    model = chain(3, dropout=0.5)
    whole = train_together(model, lowered(model, "1f1b", 4), seed=5)
    schedule, samples = lowered(model, "1f1b", 2), model.plan.sizes["batch"]
    total: dict[Any, torch.Tensor] = {}
    for replica in range(2):
        modules, hub = model.build(), LocalHub(3)
        pipelines = [
            make_pipeline(model, schedule, modules, hub.transport(rank), seed=5)
            for rank in range(3)
        ]
        seen = Seen(modules=dict(enumerate(modules)))
        options: dict[str, Any] = {
            "first_micro_batch": 2 * replica,
            "step_samples": 4 * samples,
            "observer": seen,
        }
        run_together([each.steps(schedule, model.make_inputs, **options) for each in pipelines])
        (gradients,) = seen.gradients.values()
        for name, gradient in gradients.items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
        for micro_batch, loss in seen.losses.items():
            assert torch.equal(loss, whole.seen.losses[micro_batch])
    (expected,) = whole.seen.gradients.values()
    assert total.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(total[name], gradient)


class Lost:
    """A transport whose other ranks are gone."""

    rank, depth = 0, 1

    def send(self, channel: Channel, tensor: torch.Tensor, index: int) -> None:
        raise peer_is_gone(channel.sending(index), channel.target_rank)

    def recv(self, channel: Channel, index: int) -> Any:
        raise NotImplementedError

    wait = wait_sent = close = recv


def test_ranks_are_counted_over_all_replicas_where_a_rank_is_told_of() -> None:
    channel = Channel("activation", "h", 0, 1, 0, 1, 0, torch.float32, (2,))
    activities = Activities()
    with pytest.raises(TransportError) as error:
        ObservedTransport(Lost(), activities, first_rank=4).send(channel, torch.zeros(2), 3)
    assert error.value.what == (
        'rank 0 waits for rank 1 to take the activation "h" of micro-batch 3, but rank 1 is gone '
        "(ranks of one replica, counted from rank 4)"
    )
    assert activities.now[0].peer == 5  # by which the watchdog finds who is waited for
    with pytest.raises(TransportError) as error:
        ObservedTransport(Lost(), activities).send(channel, torch.zeros(2), 3)
    assert error.value.what.endswith("but rank 1 is gone")


def test_ddp_deals_out_the_micro_batches_of_a_step_and_the_last_may_be_smaller(
    folders: Path, tmp_path: Path
) -> None:
    given = {"micro_batches": None, "global_batch_size": 14, "micro_batch_size": 4, "clip": 0.0}
    one = train(folders / "mlp", tmp_path / "one", schedule="single", **given)
    two = train(folders / "mlp", tmp_path / "two", schedule="ddp", **given)
    assert_same_training(one, two, PlainMlp())
    (facts,) = events_of(two, "start")
    assert facts["ranks"].startswith("2 processes, all stages in each · local (one process)")
    assert facts["batch"] == (
        "14 samples per step = 2 micro-batches × 4 samples × 2 replicas - 2 in the last "
        "micro-batch of the last"
    )


def test_several_stages_a_rank_and_backwards_in_two_parts_do_the_same(
    folders: Path, tmp_path: Path
) -> None:
    given = {"clip": 0.1, "recompute": "all"}
    one = train(folders / "mlp4", tmp_path / "one", schedule="single", micro_batches=8, **given)
    two = train(
        folders / "mlp4",
        tmp_path / "two",
        schedule="zb-v",
        ranks=2,
        replicas=2,
        micro_batches=4,
        transport="gloo",
        **given,
    )
    assert_same_training(one, two, PlainMlp())


def test_each_replica_has_its_own_part_of_an_mpi_world(folders: Path, tmp_path: Path) -> None:
    one = train(folders / "mlp", tmp_path / "one", schedule="single", micro_batches=6)
    three = train(folders / "mlp", tmp_path / "three", replicas=3, transport="mpi")
    assert_same_training(one, three, PlainMlp())
    (facts,) = events_of(three, "start")
    assert facts["ranks"].startswith("6 processes, 3 replicas of 2 · mpi")


def test_a_schedule_computed_from_measured_costs_is_the_same_in_all_replicas(
    folders: Path, tmp_path: Path
) -> None:
    given = {"steps": 14, "micro_batches": 4}
    two = train(folders / "mlp4", tmp_path / "two", schedule="auto", ranks=2, replicas=2, **given)
    one = train(folders / "mlp4", tmp_path / "one", schedule="single", steps=14, micro_batches=8)
    assert_same_training(one, two, PlainMlp())
    assert any("recomputed from the times" in note for _, note in events_of(two, "note"))


def test_replicas_leave_out_a_step_that_overflows_together(folders: Path, tmp_path: Path) -> None:
    given = {"precision": "float16", "dtype": "float32", "loss_scale": 2.0**40, "steps": 26}
    two = train(folders / "mlp", tmp_path / "two", replicas=2, check_replicas=5, **given)
    one = train(folders / "mlp", tmp_path / "one", schedule="single", micro_batches=4, **given)
    for name in ("skipped", "loss_scale"):
        expected = [line[name] for line in events_of(one, "step")]
        assert [line[name] for line in events_of(two, "step")] == expected
    losses = [[line["loss"] for line in events_of(run, "step")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert 0 < events_of(two, "step")[-1]["skipped"] < 26
