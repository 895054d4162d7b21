"""Resumed runs equal uninterrupted ones to the last bit: every optimizer, schedule and staleness
method, at any step. All stages are on one rank, in the order in which several would step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import DistError

from asyncpipe.runtime.checkpoint.contents import Wanted
from asyncpipe.runtime.checkpoint.folders import CheckpointError, checkpoints_in, read_facts
from asyncpipe.runtime.checkpoint.saving import _failure_of
from asyncpipe.runtime.checkpoint.storage import read_tensors
from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.errors import AsyncPipeError, TransportError
from asyncpipe.runtime.optimizers.facts import OPTIMIZERS
from asyncpipe.runtime.staleness.compose import METHODS
from asyncpipe.runtime.tensor_files import write_shard
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.oracles.resumed_runs import (
    as_ended_at,
    assert_goes_on_as,
    assert_same,
    tensors_in,
    train,
)
from asyncpipe.tests.support.processes.silent_reporter import events_of

ASYNC: dict[str, Any] = {"schedule": "async-1f1b", "ranks": 1, "micro_batches": 2}
NEEDS: dict[str, dict[str, Any]] = {
    "gap-aware": {"staleness": "stash+gap-aware"},
    "gap-aware-activations": {"staleness": "stash+gap-aware-activations"},
    "gap-aware-loss": {"recompute": "all"},
    "hidden-delay-rate": {"optimizer": "muon"},
    "delay-momentum": {"optimizer": "nadam", "momentum": 0.0},
    "dc-asgd": {"staleness": "stash+dc-asgd"},
    "dc-asgd-adaptive": {"staleness": "stash+dc-asgd-adaptive"},
    "schedule-aware": {"staleness": "lwp+schedule-aware"},
    "2bw": {"schedule": "2bw", "micro_batches": 4},
    "partial-gradient": {"micro_batches": 4},
}
"""The options that a method needs in addition to those of sgd with momentum."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    for stages in (1, 2, 4):
        write_mlp(folder / f"mlp{stages}", stages=stages)
        write_mlp(folder / f"noisy{stages}", stages=stages, noisy=True)
    write_text(folder / "text")
    write_text(folder / "text1", whole=True)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(
    folders: Path, tmp_path: Path, optimizer: str
) -> None:
    options: dict[str, Any] = {"schedule": "single", "optimizer": optimizer, "warmup": 3}
    options |= {"clip": 0.5, "refresh_every": 2} if optimizer == "soap" else {"clip": 0.5}
    whole = train(folders / "noisy2", tmp_path / "whole", **options)
    assert any(name.startswith("optimizer.layers.1.weight.") for name in whole.state)
    assert_goes_on_as(whole, folders / "noisy2", 2, **options)


@pytest.mark.parametrize("method", METHODS)
def test_every_staleness_method_goes_on_as_if_nothing_had_happened(
    folders: Path, tmp_path: Path, method: str
) -> None:
    options = ASYNC | {"staleness": method, "optimizer": "sgd", "momentum": 0.9, "lr": 0.05}
    options |= {"steps": 9, "save_every": 3, "warmup": 2, "decay": "linear"}
    options |= NEEDS.get(method, {})
    whole = train(folders / "noisy4", tmp_path / "whole", **options)
    assert_goes_on_as(whole, folders / "noisy4", 3, **options)


@pytest.mark.parametrize(
    ("optimizer", "methods"),
    [
        ("adamw", "stash+gap-aware"),
        ("sutskever", "stash+gap-aware"),
        ("nadam", "stash+msnag"),
        ("adafactor", "stash"),
        ("muon", "stash+msnag"),
        ("soap", "stash+aggmsnag"),
        ("adamw", "stash+error-feedback"),
        ("adam", "stash+lwp-w+pipemare-rate"),
    ],
)
def test_methods_go_on_with_the_optimizers_that_they_go_by(
    folders: Path, tmp_path: Path, optimizer: str, methods: str
) -> None:
    options = ASYNC | {"staleness": methods, "optimizer": optimizer, "lr": 0.01}
    whole = train(folders / "mlp4", tmp_path / "whole", **options)
    assert_goes_on_as(whole, folders / "mlp4", 2, **options)


@pytest.mark.parametrize(
    "methods", ["stash", "stash+error-feedback", "pipemare", "stash+gap-aware", "2bw"]
)
def test_gradients_of_tied_weights_that_are_still_to_be_applied_are_kept(
    folders: Path, tmp_path: Path, methods: str
) -> None:
    options = ASYNC | {"staleness": methods, "data": str(folders / "text.txt"), "lr": 0.01}
    options |= {"ahead": "3,0", "micro_batches": 4, "optimizer": "sgd"}
    if methods == "2bw":
        options |= {"schedule": "2bw", "ahead": "1,0"}
    whole = train(folders / "text", tmp_path / "whole", **options)
    assert any(name.startswith("shared.wte.weight.") for name in whole.state)
    assert_goes_on_as(whole, folders / "text", 4, **options)


@pytest.mark.parametrize(
    ("cut", "given"),
    [
        ("text1", {"schedule": "single"}),
        ("text1", {}),
        ("text", {"schedule": "auto"}),
        ("text", {"ahead": "1,0"}),
    ],
)
def test_gradients_that_are_still_to_be_applied_are_so_in_another_cut_or_schedule(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut: str,
    given: dict[str, Any],
) -> None:
    options = ASYNC | {"data": str(folders / "text.txt"), "lr": 0.5, "optimizer": "sgd"}
    options |= {"momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "decay": "none", "warmup": 0}
    left = train(folders / "text", tmp_path / "left", **options, ahead="3,0", steps=4)
    sums = [value for name, value in left.state.items() if name.startswith("shared.wte.weight.")]
    assert len(sums) == 2
    options |= {"steps": 5} | given
    read = Wanted.__call__

    def goes_on(name: str) -> torch.Tensor:
        resumed = as_ended_at(left, 4, tmp_path / name)
        return train(folders / cut, resumed, resume="auto", **options).weights["wte.weight"]

    kept = goes_on("kept")
    monkeypatch.setattr(
        Wanted, "__call__", lambda self, key: "shared." not in key and read(self, key)
    )
    torch.testing.assert_close(kept, goes_on("dropped") - 0.5 * sum(sums))


def test_stages_of_one_rank_that_share_a_weight_go_on_with_an_optimizer_each(
    folders: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"schedule": "single", "optimizer": "adamw", "clip": 0.5}
    options |= {"data": str(folders / "text.txt")}
    whole = train(folders / "text", tmp_path / "whole", **options)
    assert_goes_on_as(whole, folders / "text", 2, **options)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    every=st.integers(1, 4),
    at=st.integers(1, 3),
    schedule=st.sampled_from(["single", "auto", "async-1f1b", "2bw"]),
    eval_every=st.integers(0, 3),
    flush_every=st.integers(0, 3),
)
def test_a_run_goes_on_from_any_step_under_any_schedule(
    folders: Path,
    tmp_path_factory: pytest.TempPathFactory,
    every: int,
    at: int,
    schedule: str,
    eval_every: int,
    flush_every: int,
) -> None:
    is_async = schedule in ("async-1f1b", "2bw")
    options: dict[str, Any] = {"schedule": schedule, "save_every": every, "steps": 8}
    options |= {"eval_every": eval_every, "eval_batches": 2}
    options |= {"ranks": 1} if schedule != "single" else {}
    if is_async:
        options |= {"flush_every": flush_every, "sync_start": "2", "sync_end": "2"}
    whole = train(folders / "noisy4", tmp_path_factory.mktemp("any") / "whole", **options)
    assert_goes_on_as(whole, folders / "noisy4", min(every * at, 7 // every * every), **options)


def test_a_schedule_that_was_computed_from_measured_steps_is_kept(
    folders: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"schedule": "auto", "ranks": 1, "steps": 16, "save_every": 10}
    whole = train(folders / "noisy4", tmp_path / "whole", **options)
    (text,) = (text for about, text in events_of(whole.output, "note") if about == "schedule")
    assert text.startswith("recomputed from the times of steps 2 to 7")
    resumed = assert_goes_on_as(whole, folders / "noisy4", 10, **options)
    assert "schedule" not in [about for about, _ in events_of(resumed.output, "note")]


def test_norms_that_later_steps_are_clipped_by_are_kept(folders: Path, tmp_path: Path) -> None:
    options = ASYNC | {"clip": 0.1, "clip_by": "known", "optimizer": "sgd"}
    whole = train(folders / "mlp1", tmp_path / "whole", **options)
    kept = read_facts(checkpoints_in(whole.output)[1]).trainer["norms"]
    assert kept.keys() == {"4", "last"} and len(kept["4"]) == len(kept["last"]) == 1
    assert_goes_on_as(whole, folders / "mlp1", 4, **options)


def test_the_loss_scale_goes_on(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "single", "precision": "float16", "loss_scale": 2.0**30}
    whole = train(folders / "mlp2", tmp_path / "whole", steps=40, save_every=20, **options)
    scales = whole.of("loss_scale")
    assert scales[1] < 2.0**30 and whole.of("skipped")[20] > 0
    resumed = assert_goes_on_as(whole, folders / "mlp2", 20, steps=40, save_every=20, **options)
    assert resumed.of("loss_scale") == scales and resumed.of("skipped") == whole.of("skipped")


def test_what_a_users_code_draws_goes_on(folders: Path, tmp_path: Path) -> None:
    drawing = tmp_path / "drawing.py"
    drawing.write_text(
        "import random, numpy, torch\n"
        "def criterion(outputs, target):\n"
        "    scale = 1 + random.gauss(0, 1) + numpy.random.normal() + torch.rand(())\n"
        "    return torch.nn.functional.cross_entropy(outputs, target) * scale\n"
    )
    options: dict[str, Any] = {"schedule": "single", "criterion": f"{drawing}:criterion"}
    whole = train(folders / "mlp2", tmp_path / "whole", **options)
    assert_goes_on_as(whole, folders / "mlp2", 4, **options)


def test_a_run_goes_on_in_the_middle_of_an_epoch(folders: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.py"
    made.write_text(
        "import torch\n"
        "def samples():\n"
        "    points = torch.randn(37, 16, generator=torch.Generator().manual_seed(0))\n"
        "    return {'x': points, 'target': points[:, :4].argmax(1)}\n"
    )
    options: dict[str, Any] = {"schedule": "single", "data": f"{made}:samples", "steps": 10}
    whole = train(folders / "mlp2", tmp_path / "whole", **options)
    assert whole.of("epoch")[10] == pytest.approx(160 / 37, abs=1e-6)
    facts = read_facts(checkpoints_in(whole.output)[-1])
    assert (facts.samples, facts.length) == (32, 37)
    assert_goes_on_as(whole, folders / "mlp2", 2, **options)


@pytest.mark.parametrize(("stages", "schedule"), [(1, "single"), (4, "single"), (4, "auto")])
def test_a_run_goes_on_in_other_stages(
    folders: Path, tmp_path: Path, stages: int, schedule: str
) -> None:
    options: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01}
    whole = train(folders / "noisy2", tmp_path / "whole", schedule="single", **options)
    ended = as_ended_at(whole, 4, tmp_path / "ended")
    options |= {"schedule": schedule} | ({"ranks": 1} if schedule != "single" else {})
    moved = train(folders / f"noisy{stages}", ended, resume="auto", **options)
    assert moved.of("loss") == pytest.approx(whole.of("loss"), rel=1e-6)
    assert moved.of("epoch") == whole.of("epoch")
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(moved.weights[name], tensor, rtol=1e-5, atol=1e-7)


def test_another_batch_goes_on_with_the_samples_that_are_next(
    folders: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"schedule": "single", "micro_batches": 4}
    whole = train(folders / "mlp2", tmp_path / "whole", steps=4, **options)
    ended = as_ended_at(whole, 2, tmp_path / "ended")
    resumed = train(
        folders / "mlp2", ended, resume="auto", steps=4, **options | {"micro_batches": 2}
    )
    facts = read_facts(checkpoints_in(resumed.output)[0])
    assert facts.samples == 2 * 16 + 2 * 8


def test_a_checkpoint_is_a_place_to_begin_from(folders: Path, tmp_path: Path) -> None:
    first = train(folders / "mlp2", tmp_path / "first", schedule="single")
    checkpoint = checkpoints_in(first.output)[1]
    settings: dict[str, Any] = {"schedule": "single", "steps": 0, "save_every": 0}
    exported = tmp_path / "hf"
    second = train(
        folders / "mlp4",
        tmp_path / "second",
        init_from=str(checkpoint),
        export_hf=str(exported),
        **settings,
    )
    assert_same(second.weights, tensors_in(checkpoint / "weights"))
    assert_same(tensors_in(exported), second.weights)
    assert (exported / "config.json").is_file()


def test_the_weights_of_a_checkpoint_are_those_that_training_has_come_to(
    folders: Path, tmp_path: Path
) -> None:
    options = ASYNC | {"staleness": "stash+error-feedback", "optimizer": "sgd", "lr": 0.05}
    whole = train(folders / "mlp4", tmp_path / "whole", **options)
    newest = checkpoints_in(whole.output)[0]
    assert_same(tensors_in(newest / "weights"), whole.weights)
    live = tensors_in(newest / "state")["live.layers.0.weight"]
    assert not torch.equal(live, whole.weights["layers.0.weight"])


def test_torchs_own_loader_opens_a_checkpoint(folders: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single", optimizer="adamw")
    for part, name in (("weights", "layers.3.bias"), ("state", "optimizer.layers.3.bias.exp_avg")):
        folder = checkpoints_in(whole.output)[0] / part
        expected = tensors_in(folder)[name]
        found = {name: torch.zeros_like(expected)}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
        assert torch.equal(found[name], expected)


def test_only_what_is_wanted_is_read(folders: Path, tmp_path: Path) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single", optimizer="adamw")
    state = checkpoints_in(whole.output)[0] / "state"
    assert not [path for path in state.parent.rglob("*") if path.suffix in (".pt", ".metadata")]
    found = read_tensors(state, lambda name: name == "optimizer.layers.0.bias.step")
    assert {name: float(value) for name, value in found.items()} == {
        "optimizer.layers.0.bias.step": 6.0
    }


def test_a_damaged_checkpoint_is_passed_over_and_named(folders: Path, tmp_path: Path) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single")
    ended = as_ended_at(whole, 4, tmp_path / "ended")
    damaged = ended / "checkpoints" / "step-000004"
    file = damaged / "state" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    resumed = train(folders / "mlp2", ended, schedule="single", resume="auto")
    (warning,) = events_of(ended, "warning")
    assert warning == (
        f"{damaged} is damaged: state/rank-00000.safetensors does not match its SHA-256."
    )
    assert_same(resumed.weights, whole.weights)
    assert_same(resumed.state, whole.state)
    assert [path.name[-1] for path in checkpoints_in(ended)] == ["6", "4", "2"]
    with pytest.raises(
        AsyncPipeError, match="is damaged: weights/model-00002-of-00002.safetensors"
    ):
        _truncate(damaged / "weights" / "model-00002-of-00002.safetensors")
        shutil.rmtree(ended / "checkpoints" / "step-000006")
        train(folders / "mlp2", ended, schedule="single", resume=str(damaged))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    folders: Path, tmp_path: Path
) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single", steps=4)
    for checkpoint in checkpoints_in(whole.output):
        (checkpoint / "manifest.json").write_text("{")
    with pytest.raises(AsyncPipeError, match="all checkpoints are damaged.*step-000004 is damaged"):
        train(folders / "mlp2", whole.output, schedule="single", steps=6, resume="auto")


def test_a_checkpoint_of_another_model_is_refused(folders: Path, tmp_path: Path) -> None:
    whole = train(
        folders / "text", tmp_path / "whole", data=str(folders / "text.txt"), schedule="single"
    )
    with pytest.raises(CheckpointError) as error:
        train(folders / "mlp2", tmp_path / "new", schedule="single", resume=str(whole.output))
    checkpoint = whole.output / "checkpoints" / "step-000006"
    assert error.value.what == (
        f"{checkpoint} is a checkpoint of tiny_text and does not fit tiny_mlp: it lacks 8 of 8 "
        "tensors, the first is layers.0.weight."
    )
    assert str(folders / "text") in error.value.cure


def test_a_checkpoint_of_other_shapes_is_refused(folders: Path, tmp_path: Path) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single")
    write_mlp(tmp_path / "wide")
    tensors = tensors_in(tmp_path / "wide" / "weights") | {"layers.1.weight": torch.zeros(32, 16)}
    write_shard(tmp_path / "wide" / "weights", tensors, 0, 1)
    message = r"of tiny_mlp .*1 of 8 tensors differ in shape, .* \(16, 16\) in the checkpoint, "
    with pytest.raises(CheckpointError, match=message):
        train(tmp_path / "wide", tmp_path / "new", schedule="single", resume=str(whole.output))


@pytest.mark.parametrize(("before", "after"), [("sgd", "adamw"), ("adamw", "soap")])
def test_another_optimizer_begins_with_nothing(
    folders: Path, tmp_path: Path, before: str, after: str
) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single", optimizer=before)
    ended = as_ended_at(whole, 4, tmp_path / "ended")
    options: dict[str, Any] = {"schedule": "single", "optimizer": after, "lr": 0.01}
    resumed = train(folders / "mlp2", ended, resume="auto", **options)
    assert float(resumed.state["optimizer.layers.3.weight.step"]) == 2


def test_a_run_that_ended_goes_on_with_more_steps(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "single", "decay": "none"}
    whole = train(folders / "mlp2", tmp_path / "whole", **options)
    short = train(folders / "mlp2", tmp_path / "short", steps=4, **options)
    longer = train(folders / "mlp2", short.output, steps=6, resume="auto", **options)
    assert_same(longer.weights, whole.weights)
    assert [each["event"] for each in longer.records].count("end") == 1
    again = train(folders / "mlp2", short.output, steps=6, resume="auto", **options)
    assert_same(again.weights, whole.weights)
    assert again.of("loss") == whole.of("loss")
    with pytest.raises(AsyncPipeError, match="is of step 6, but the run has 5 steps"):
        train(folders / "mlp2", short.output, steps=5, resume="auto", **options)


def test_what_is_other_than_it_was_is_told(folders: Path, tmp_path: Path) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single", steps=4)
    ended = as_ended_at(whole, 2, tmp_path / "ended")
    train(folders / "mlp2", ended, schedule="single", steps=4, resume="auto", seed=5)
    notes = [text for about, text in events_of(ended, "note") if about == "resumed"]
    assert notes[0].startswith("after step 2 of 4, 32 samples (0.00 epochs) · ")
    assert notes[1] == "with seed 5 instead of 1"


def test_a_checkpoint_that_cannot_be_written_ends_the_run(folders: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError) as error:
        train(folders / "mlp2", output, schedule="single")
    assert error.value.what == (
        f"rank 0 cannot write {output}/checkpoints/step-000002: Not a directory."
    )
    assert "earlier checkpoints are complete" in error.value.cure


def test_auto_begins_a_new_run_where_there_is_none(folders: Path, tmp_path: Path) -> None:
    plain = train(folders / "mlp2", tmp_path / "plain", schedule="single")
    new = train(folders / "mlp2", tmp_path / "new", schedule="single", resume="auto")
    assert_same(new.weights, plain.weights)
    shutil.rmtree(new.output / "weights")  # as if it had been killed before its first checkpoint
    for checkpoint in checkpoints_in(new.output):
        shutil.rmtree(checkpoint)
    again = train(folders / "mlp2", new.output, schedule="single", resume="auto")
    assert again.of("loss") == plain.of("loss")


@pytest.mark.parametrize("save_every", [0, 2])
@pytest.mark.parametrize("schedule", ["single", "1f1b"])
def test_auto_leaves_a_finished_run_as_it_is(
    folders: Path, tmp_path: Path, schedule: str, save_every: int
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "save_every": save_every, "steps": 2}
    done = train(folders / "mlp2", tmp_path / "run", **options).output

    def content() -> dict[Path, tuple[int, bytes]]:
        files = (path for path in done.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = content()
    train(folders / "mlp2", done, resume="auto", **options)
    train(folders / "mlp2", done, resume="auto", **options | {"lr": 0.5})
    assert content() == before
    if save_every:
        longer = train(folders / "mlp2", done, resume="auto", **options | {"steps": 4})
        assert max(longer.of("loss")) == 4
        return
    with pytest.raises(SettingsError, match="has finished its 2 steps, and no checkpoint"):
        train(folders / "mlp2", done, resume="auto", **options | {"steps": 4})
    assert content() == before


def test_a_run_goes_on_after_bytes_that_are_no_text(folders: Path, tmp_path: Path) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single")
    ended = as_ended_at(whole, 4, tmp_path / "ended")
    with (ended / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "st\xff\xfe\x00')
    resumed = train(folders / "mlp2", ended, schedule="single", resume="auto")
    assert resumed.of("loss") == whole.of("loss")
    assert_same(resumed.weights, whole.weights)


def test_the_store_of_the_ranks_that_is_gone_is_no_full_disk() -> None:
    told = _failure_of(DistError("Connection reset by peer"), 1, Path("step-000004"))
    assert isinstance(told, TransportError)
    assert "the process that serves the store is gone" in told.what
    assert "Free disk space" not in told.cure


def test_an_earlier_checkpoint_begins_another_run(folders: Path, tmp_path: Path) -> None:
    whole = train(folders / "mlp2", tmp_path / "whole", schedule="single")
    earlier = str(checkpoints_in(whole.output)[1])
    with pytest.raises(SettingsError, match="has a later checkpoint, step-000006"):
        train(folders / "mlp2", whole.output, schedule="single", resume=earlier)
    other = train(folders / "mlp2", tmp_path / "other", schedule="single", resume=earlier)
    assert_same(other.weights, whole.weights)
    assert set(other.of("loss")) == {5, 6}


def test_the_newest_and_the_best_are_kept(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "single", "steps": 8, "save_every": 1}
    options |= {"keep_last": 2, "keep_best": 1, "eval_batches": 2, "lr": 3.0}
    whole = train(folders / "mlp2", tmp_path / "whole", **options)
    losses = {each["step"]: each["loss"] for each in whole.records if each["event"] == "eval"}
    assert set(losses) == set(range(1, 9))
    best = min(losses, key=lambda step: losses[step])
    kept = {int(path.name[5:]) for path in checkpoints_in(whole.output)}
    assert kept == {7, 8, best}
    assert not list((whole.output / "checkpoints").glob(".*"))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
