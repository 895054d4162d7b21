"""Checkpoints at a location: copied as they are written, and runs that resume from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.checkpoint.folders import checkpoints_in
from asyncpipe.runtime.checkpoint.remote import Location
from asyncpipe.runtime.checkpoint.resuming import with_options_of_run
from asyncpipe.runtime.locations import LocationError
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.oracles.resumed_runs import (
    Trained,
    as_ended_at,
    assert_same,
    tensors_in,
    train,
)
from asyncpipe.tests.support.processes.s3_server import bucket
from asyncpipe.tests.support.processes.silent_reporter import events_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_mlp(folder / "mlp")
    return folder


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket() as url:
        yield url


def trained(folder: Path, output: Path, **given: Any) -> Trained:
    return train(folder / "mlp", output, **({"schedule": "single"} | given))


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of six steps, all of whose checkpoints are at `place` too."""
    output = tmp_path_factory.mktemp("runs") / "straight"
    return trained(folder, output, save_to=f"file://{output.parent}/place")


@pytest.fixture
def place(straight: Trained) -> Location:
    return Location(f"file://{straight.output.parent}/place")


def test_each_checkpoint_is_copied_and_as_many_are_kept_as_here(
    folder: Path, tmp_path: Path, straight: Trained, place: Location
) -> None:
    assert place.names() == ["step-000002", "step-000004", "step-000006"]
    notes = [text for about, text in events_of(straight.output, "note") if about == "checkpoint"]
    assert len(notes) == 3 and all(text.endswith(f" · copied to {place.url}") for text in notes)
    own = Location(f"file://{tmp_path}/own")
    trained(folder, tmp_path / "run", save_to=own.url, keep_last=1)
    assert own.names() == ["step-000006"] == [p.name for p in checkpoints_in(tmp_path / "run")]
    best = Location(f"file://{tmp_path}/best")
    given: dict[str, Any] = {"eval_batches": 1, "keep_last": 1, "keep_best": 1, "save_every": 1}
    trained(folder, tmp_path / "of", save_to=best.url, lr=1.0, **given)
    kept = sorted(path.name for path in checkpoints_in(tmp_path / "of"))
    assert best.names() == kept and len(kept) == 2


@pytest.mark.parametrize("what", ["url", "step", "auto"])
def test_a_run_goes_on_from_a_location_to_the_last_bit(
    folder: Path, tmp_path: Path, straight: Trained, place: Location, what: str
) -> None:
    shutil.copytree(place.url.removeprefix("file://"), tmp_path / "place")
    own = Location(f"file://{tmp_path}/place")
    if what != "step":
        own.remove("step-000006")
    given = {
        "url": {"resume": own.url},
        "step": {"resume": f"{own.url}/step-000004/"},
        "auto": {"resume": "auto", "save_to": own.url},
    }[what]
    again = trained(folder, tmp_path / "run", **given)
    assert_same(again.weights, straight.weights)
    assert_same(again.state, straight.state)
    assert sorted(again.of("loss")) == [5, 6]
    assert ("step-000006" in own.names()) == (what != "url")


def resumed_after(output: Path) -> str:
    notes = events_of(output, "note")
    (told,) = [text for about, text in notes if about == "resumed" and "after step" in text]
    return str(told.partition(" of ")[0])


def test_the_later_of_both_is_taken(folder: Path, tmp_path: Path, straight: Trained) -> None:
    checkpoints = straight.output / "checkpoints"
    for name, here, there in (("there", 2, 4), ("here", 4, 2), ("both", 4, 4)):
        place, output = Location(f"file://{tmp_path}/{name}"), tmp_path / f"run-{name}"
        place.put(checkpoints / f"step-00000{there}")
        as_ended_at(straight, here, output)
        again = trained(folder, output, resume="auto", save_to=place.url)
        assert resumed_after(output) == "after step 4"
        assert_same(again.weights, straight.weights)


def test_checkpoints_of_another_run_are_not_mixed_with_its_own(
    folder: Path, tmp_path: Path, straight: Trained
) -> None:
    place = Location(f"file://{tmp_path}/place")
    place.put(straight.output / "checkpoints" / "step-000006")
    with pytest.raises(LocationError, match="of another run: step-000006.\nGive --resume auto"):
        trained(folder, tmp_path / "new", save_to=place.url)
    earlier = str(straight.output / "checkpoints" / "step-000004")
    with pytest.raises(LocationError, match="of another run: step-000006"):
        trained(folder, tmp_path / "branch", resume=earlier, save_to=place.url)
    assert place.names() == ["step-000006"]


def test_a_new_run_begins_with_the_weights_of_a_location(
    folder: Path, tmp_path: Path, straight: Trained, place: Location
) -> None:
    local = str(straight.output / "checkpoints" / "step-000004")
    given: dict[str, Any] = {"steps": 2, "seed": 5}
    expected = trained(folder, tmp_path / "local", init_from=local, **given)
    found = trained(folder, tmp_path / "url", init_from=f"{place.url}/step-000004", **given)
    assert_same(found.weights, expected.weights)
    newest = trained(folder, tmp_path / "newest", init_from=place.url, **given)
    assert newest.of("loss") != expected.of("loss")


def test_the_options_of_a_run_come_with_its_checkpoints(place: Location) -> None:
    options = with_options_of_run({"resume": place.url, "steps": 9})
    assert (options["steps"], options["save_every"], options["schedule"]) == (9, 2, "single")
    assert options["betas"] == (0.9, 0.999) and "output" not in options
    assert options["folder"].endswith("mlp")


def test_what_cannot_be_had_is_told_before_the_run_has_a_folder_of_its_own(
    folder: Path, tmp_path: Path, place: Location
) -> None:
    wrong: list[dict[str, Any]] = [
        {"save_to": "nothing://x/y"},
        {"resume": f"{place.url}/step-000099"},
        {"resume": f"file://{tmp_path}/empty"},
        {"init_from": f"file://{tmp_path}/empty"},
    ]
    for given in wrong:
        with pytest.raises(LocationError):
            trained(folder, tmp_path / "run", **given)
    trained(folder, tmp_path / "run", steps=1)


def test_a_copy_that_fails_ends_no_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Location, checkpoint: Path) -> None:
        if checkpoint.name == "step-000004":
            raise LocationError("the network is away.")
        put(self, checkpoint)

    put = Location.put
    monkeypatch.setattr(Location, "put", refused)
    trained(folder, tmp_path / "run", save_to=f"file://{tmp_path}/place")
    notes = [text for about, text in events_of(tmp_path / "run", "note") if about == "checkpoint"]
    assert [text.rpartition(" · ")[2].split(":")[0] for text in notes] == [
        "copied to file", "not copied", "copied to file",
    ]  # fmt: skip
    assert Location(f"file://{tmp_path}/place").names() == ["step-000002", "step-000006"]


def test_ranks_go_on_from_a_bucket_in_another_number_of_them(
    folder: Path, tmp_path: Path, s3: str, straight: Trained
) -> None:
    url = f"{s3}/two"
    two = trained(folder, tmp_path / "two", schedule="1f1b", save_to=url)
    assert Location(url).names() == ["step-000002", "step-000004", "step-000006"]
    Location(url).remove("step-000006")
    shutil.rmtree(two.output)
    again = trained(folder, tmp_path / "again", schedule="1f1b", resume=url)
    config = (tmp_path / "again" / "config.toml").read_text()
    assert "save_to" not in config and "resume" not in config
    for name, tensor in tensors_in(straight.output / "weights").items():
        assert again.weights[name].allclose(tensor, atol=1e-5), name
    facts = json.loads((tmp_path / "again/checkpoints/step-000006/checkpoint.json").read_text())
    assert facts["ranks"] == 2
