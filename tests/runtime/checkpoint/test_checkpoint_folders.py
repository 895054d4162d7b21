"""Checkpoints as folders: damage is seen, the newest and best are kept, junk is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncpipe.runtime.checkpoint.contents import first_good
from asyncpipe.runtime.checkpoint.folders import (
    CheckpointError,
    Facts,
    checkpoints_in,
    damage_of,
    files_of,
    manifest_entry,
    name_of,
    prune,
    read_facts,
    remove,
)
from asyncpipe.runtime.checkpoint.resuming import (
    how_to_go_on,
    keep_records_until,
    resumed_run,
    with_options_of_run,
)
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.distributed.process_groups import World
from asyncpipe.runtime.plan.trust import remember

SETTINGS = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}
FACTS = Facts("mlp", step=4, samples=64, length=100, stages=2, ranks=2, replicas=1)


def write_checkpoint(run: Path, step: int, evaluation: float | None = None) -> Path:
    folder = run / "checkpoints" / name_of(step)
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "rank-00000.safetensors").write_bytes(bytes(range(100)))
    facts = json.loads(FACTS.to_json()) | {"step": step, "evaluation": evaluation}
    (folder / "checkpoint.json").write_text(json.dumps(facts))
    entries: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.*")):
        entries |= manifest_entry(folder, file)
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "files": entries}))
    return folder


@settings(max_examples=60, **SETTINGS)  # type: ignore[arg-type]
@given(data=st.data())
def test_no_changed_bit_goes_unseen(tmp_path: Path, data: st.DataObject) -> None:
    checkpoint = tmp_path / "checkpoints" / name_of(4)
    if not checkpoint.exists():
        write_checkpoint(tmp_path, 4)
    assert damage_of(checkpoint) == ""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    content = file.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bytes(changed[: data.draw(st.sampled_from([at, len(content)]))]))
    try:
        found = {damage_of(checkpoint, part=part, parts=3) for part in range(3)}
        # Of the manifest, white space and what nobody reads may change.
        before = json.loads(content) if file.name == "manifest.json" else None
        assert found != {""} or json.loads(file.read_bytes())["files"] == before["files"]
    finally:
        file.write_bytes(content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 4)
    (checkpoint / "state" / "rank-00000.safetensors").unlink()
    assert damage_of(checkpoint) == "state/rank-00000.safetensors is missing"
    (checkpoint / "manifest.json").unlink()
    assert damage_of(checkpoint) == "manifest.json is missing"


def test_a_manifest_names_no_file_outside_its_folder(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 4)
    raw = json.loads((checkpoint / "manifest.json").read_text())
    raw["files"]["../step-000003/x"] = [1, "0"]
    (checkpoint / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint"):
        files_of(checkpoint)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, **SETTINGS)  # type: ignore[arg-type]
@given(name=st.sampled_from([*json.loads(FACTS.to_json()), "files"]), value=JSON)
def test_facts_of_any_kind_are_read_or_refused_in_a_sentence(
    tmp_path: Path, name: str, value: Any
) -> None:
    for file, read in (("checkpoint.json", read_facts), ("manifest.json", files_of)):
        (tmp_path / file).write_text(json.dumps(json.loads(FACTS.to_json()) | {name: value}))
        try:
            read(tmp_path)
        except CheckpointError as error:
            assert str(tmp_path / file) in error.what or str(tmp_path) in error.what


def test_the_first_whole_one_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    newest, middle, oldest = checkpoints_in(tmp_path)
    (newest / "checkpoint.json").unlink()
    (middle / "manifest.json").write_text("[]")
    found, skipped = first_good(checkpoints_in(tmp_path), World(), may_skip=True)
    assert found is not None and (found.path, found.facts.step) == (oldest, 2)
    assert skipped == [
        f"{newest} is damaged: checkpoint.json is missing.",
        f"{middle} is damaged: manifest.json is not a JSON object.",
    ]


@settings(max_examples=30, **SETTINGS)  # type: ignore[arg-type]
@given(
    losses=st.lists(st.none() | st.floats(0, 9), min_size=1, max_size=6),
    last=st.integers(1, 4),
    best=st.integers(0, 4),
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, losses: list[float | None], last: int, best: int
) -> None:
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    for step, loss in enumerate(losses):
        write_checkpoint(tmp_path, step, loss)
    prune(tmp_path, last=last, best=best)
    kept = {int(path.name[5:]) for path in checkpoints_in(tmp_path)}
    newest = set(range(len(losses))[-last:])
    assert newest <= kept and len(kept) <= last + best
    evaluated = sorted((loss, step) for step, loss in enumerate(losses) if loss is not None)
    assert kept == newest | {step for _, step in evaluated[:best]}


def test_records_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    lines = [
        '{"event": "note", "about": "x", "text": "y"}',
        '{"event": "step", "step": 1}',
        '{"event": "step", "step": 2}',
        '{"event": "eval", "step": 2}',
        '{"event": "note", "about": "checkpoint", "text": "z"}',
        '{"event": "step", "step": 3}',
        '{"event": "step", "st',
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(lines))
    keep_records_until(metrics, 2)
    assert metrics.read_text().splitlines() == lines[:5]
    metrics.write_text("\n".join([*lines[:3], '{"event": "end"}']))
    keep_records_until(metrics, 2)
    assert metrics.read_text().splitlines() == lines[:3]
    keep_records_until(metrics, 0)
    assert metrics.read_text().splitlines() == lines[:1]


@given(st.data())
def test_bytes_that_are_no_record_cost_no_other_record(data: st.DataObject) -> None:
    good = [f'{{"event": "step", "step": {step}}}'.encode() for step in range(1, 4)]
    bad = data.draw(st.lists(st.binary(max_size=40).filter(lambda part: b"\n" not in part)))
    lines = [(place, line) for place, line in enumerate(good)]
    for part in bad:
        lines.insert(data.draw(st.integers(0, len(lines))), (-1, part))
    with TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        metrics.write_bytes(b"\n".join(line for _, line in lines))
        keep_records_until(metrics, 2)
        assert metrics.read_bytes().splitlines() == good[:2]
        assert metrics.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("line", ["5", "[]", '{"event": 3}', '{"event": "step", "step": "x"}'])
def test_a_record_of_another_kind_is_not_kept(tmp_path: Path, line: str) -> None:
    (metrics := tmp_path / "metrics.jsonl").write_text(f'{{"event": "note"}}\n{line}\n')
    keep_records_until(metrics, 2)
    assert metrics.read_text() == '{"event": "note"}\n'


def test_a_file_in_the_place_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        (tmp_path / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000006").write_text("")
    assert [path.name[-2:] for path in checkpoints_in(tmp_path)] == ["12", "08", "04"]
    prune(tmp_path, last=1, best=0)
    remove(tmp_path / "checkpoints" / "step-000006")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000012"]


def test_an_asynchronous_run_may_go_on_as_a_synchronous_one(tmp_path: Path) -> None:
    before = Settings(
        folder="made/mlp_2p", schedule="async-1f1b", staleness="stash", clip=1.0, clip_by="stage"
    )
    (tmp_path / "config.toml").write_text(before.to_toml())
    write_checkpoint(tmp_path, 4)
    given = {"folder": "made/mlp_2p", "resume": str(tmp_path)}
    assert Settings(**with_options_of_run(given)).staleness == "stash"
    made = Settings(**with_options_of_run(given | {"schedule": "gpipe"}))
    assert (made.staleness, made.clip, made.clip_by) == (None, 1.0, None)
    made = Settings(**with_options_of_run(given | {"schedule": "2bw", "staleness": "none"}))
    assert (made.staleness, made.clip_by) == ("none", "stage")
    refused = with_options_of_run(given | {"schedule": "gpipe", "clip_by": "global"})
    assert refused["clip_by"] == "global"


def test_a_resumed_run_has_its_own_options_under_those_given(tmp_path: Path) -> None:
    before = Settings(folder="made/mlp_2p", lr=0.5, steps=7)
    (tmp_path / "config.toml").write_text(before.to_toml())
    given = {"folder": "made/mlp_4p", "steps": 9, "resume": str(tmp_path)}
    write_checkpoint(tmp_path, 4)
    for resume in (tmp_path, tmp_path / "checkpoints" / name_of(4)):
        made = Settings(**with_options_of_run(given | {"resume": str(resume)}))
        assert (made.folder, made.lr, made.steps) == ("made/mlp_4p", 0.5, 9)
        assert resumed_run(made) == tmp_path
    assert with_options_of_run({"folder": "made/mlp_4p", "lr": 0.1})["lr"] == 0.1
    told = f" · checkpoint step-000004 · continue: asyncpipe-train made/mlp_2p --resume {tmp_path}"
    assert how_to_go_on(tmp_path) == f"{told} --trust"  # no such folder was made here
    remember("made/mlp_2p")
    assert how_to_go_on(tmp_path) == told


def test_auto_is_the_last_run_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(folder="made/mlp_2p", resume="auto")
    assert resumed_run(settings) is None and how_to_go_on(tmp_path) == ""
    for number in (2, 10, 9):
        (tmp_path / "runs" / "mlp_2p" / str(number)).mkdir(parents=True)
    assert resumed_run(settings) == Path("runs/mlp_2p/10")


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not a run or a checkpoint"):
        resumed_run(Settings(folder="x", resume=str(tmp_path)))
    (tmp_path / "config.toml").touch()
    with pytest.raises(SettingsError, match="checkpoints has no checkpoint"):
        resumed_run(Settings(folder="x", resume=str(tmp_path)))
    with pytest.raises(SettingsError, match="--keep-best 1, but no checkpoint is made"):
        Settings(folder="x", keep_best=1)
