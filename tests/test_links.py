"""Files written into a folder stay in it, wherever links in that folder lead."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncpipe.runtime.checkpoint.folders import FolderLock
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.plan.trust import verify_no_links, write_here
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.test_trust import train

WRITTEN = (
    *(".lock", "config.toml.new", "metrics.new", "metrics.jsonl", "report.html", "schedule.txt"),
    *("weights", "logs", "ranks", "traces", "checkpoints/.step-000004-any.part", "held", "probe"),
    *("weights/model.safetensors.index.json", "checkpoints/step-000002/weights"),
)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a generated model and a run of it, which may be continued."""
    home = tmp_path_factory.mktemp("home")
    write_mlp(home / "made")
    options = ("--save-every", "2", "--output", "run", "-q")
    assert command(home, "train", *train(home / "made", *options)).code == 0
    return home


def outside(folder: Path) -> Path:
    """A folder and files that nobody may change."""
    folder.mkdir()
    (folder / "file").write_text("mine")
    return folder


def put_link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_a_run_writes_through_no_link_that_leads_out_of_its_folder(
    run_of: Path, tmp_path: Path, name: str, kind: str
) -> None:
    away = outside(tmp_path / "outside")
    run = tmp_path / "theirs"
    shutil.copytree(run_of / "run", run)
    target = {"file": away / "file", "folder": away, "nothing": away / "new"}[kind]
    put_link(run / name, target)
    options = ("made", "--resume", str(run), "--steps", "4", "-q")
    message = error_of(run_of, "train", *options)
    refused = (
        f"error: {run}/{name} is a link to {target}, outside of the folder, and nothing is written "
        "through such links.\nRemove the link, or name another folder with --output.\n"
    )
    assert message == refused or "checkpoint" in message  # of which a part is not there
    command(run_of, "train", "report", str(run))
    assert [path.name for path in away.iterdir()] == ["file"]
    assert (away / "file").read_text() == "mine"


def test_a_report_replaces_links_of_its_name(run_of: Path, tmp_path: Path) -> None:
    away = outside(tmp_path / "outside")
    shutil.copytree(run_of / "run", tmp_path / "theirs")
    for name in ("report.html", ".report.html.made"):
        put_link(tmp_path / "theirs" / name, away / "file")
    assert command(run_of, "train", "report", str(tmp_path / "theirs")).code == 0
    assert (away / "file").read_text() == "mine"
    assert not (tmp_path / "theirs" / "report.html").is_symlink()


def test_comparisons_and_sweeps_write_through_no_link_either(run_of: Path, tmp_path: Path) -> None:
    away = outside(tmp_path / "outside")
    short = ("--steps", "2", "--micro-batches", "2")
    put_link(tmp_path / "compared" / "runs.jsonl", away / "file")
    compared = ("--methods", "stash", *short, "--output", str(tmp_path / "compared"))
    assert "is a link to" in error_of(run_of, "compare", "made", *compared)
    put_link(tmp_path / "swept" / "sweep.md", away / "file")
    swept = ("--sweep", "lr=0.1,0.2", *short, "--output", str(tmp_path / "swept"))
    assert "is a link to" in error_of(run_of, "train", "made", *swept)
    assert (away / "file").read_text() == "mine"


@pytest.mark.parametrize("make", [os.symlink, lambda _, path: os.mkfifo(path)])
def test_an_export_copies_no_file_that_a_generated_folder_only_leads_to(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    """An export is made to be given away."""
    away = outside(tmp_path / "outside")
    write_text(tmp_path / "theirs")
    make(away / "file", tmp_path / "theirs" / "hf" / "tokens.json")
    message = error_of(tmp_path, "train", "export", "theirs", "exported")
    assert message.startswith(
        "error: theirs/hf/tokens.json is not a file, and only files are copied."
    )
    assert not (tmp_path / "exported").exists()


def test_a_generated_folder_that_is_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "made").symlink_to(tmp_path / "away")
    model = ("--model", "mlp", "--stages", "2", "--profile", "analytic", "--output", "made")
    message = error_of(tmp_path, "partition", *model, "--force")
    assert message.startswith(f"error: made is a link to {tmp_path}/away. Nothing was changed.\n")
    assert not any((tmp_path / "away").iterdir())


def test_links_within_a_folder_are_fine_and_pipes_are_not(tmp_path: Path) -> None:
    """Trackers make such links: wandb's `latest-run`."""
    folder = tmp_path / "run"
    (folder / "wandb" / "run-1").mkdir(parents=True)
    (folder / "wandb" / "latest-run").symlink_to("run-1")
    (folder / "wandb" / "again").symlink_to(folder / "wandb")
    verify_no_links(folder, DataError)
    verify_no_links(tmp_path / "absent", DataError)
    (folder / "wandb" / "up").symlink_to("../../run/../..")
    with pytest.raises(DataError, match="up is a link to"):
        verify_no_links(folder, DataError)
    (folder / "wandb" / "up").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(DataError, match="pipe is neither a file nor a folder"):
        verify_no_links(folder, DataError)


def test_a_file_is_written_in_place_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("file")
    write_here(tmp_path / "link", "new")
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").read_text() == "new"


def test_a_lock_that_is_a_link_to_another_file_of_the_run_writes_nothing_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine")
    (tmp_path / ".lock").symlink_to("metrics.jsonl")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock("run").take(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"
