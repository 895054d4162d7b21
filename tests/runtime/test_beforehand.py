"""A dry run refuses what a run refuses, in the same words, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.in_process import command

ASYNC = ("--schedule", "async-1f1b", "--ranks", "1")
ALONE = ("--schedule", "single")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_mlp(home / "mlp", stages=2)
    write_text(home / "text")
    (home / "text" / "hf" / "config.json").unlink()
    (home / "short.txt").write_text("short")
    (home / "file").write_text("")
    (home / "old").mkdir()
    (home / "old" / "config.toml").write_text("")
    return home


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        ("mlp", (*ASYNC, "--clip", "1", "--clip-by", "known"), "needs a rank for each of the 2"),
        ("mlp", (*ASYNC, "--clip", "1", "--clip-by", "global"), "needs a rank for each of the 2"),
        ("mlp", (*ASYNC, "--ahead", "99999x"), "99999 forwards ahead"),
        ("mlp", (*ALONE, "--criterion", "nosuch"), "--criterion nosuch is not known"),
        ("mlp", (*ALONE, "--criterion", "nosuch.py:loss"), "--criterion nosuch.py: no such file"),
        ("mlp", (*ALONE, "--data", "nosuch.py:made"), "--data nosuch.py: no such file"),
        ("mlp", (*ALONE, "--data", "shakespeare"), "--data shakespeare does not fit"),
        ("text", (*ALONE, "--data", "nosuch.txt"), "no such file, folder or built-in corpus"),
        ("text", (*ALONE, "--data", "short.txt"), "the text has 5 tokens, too few"),
        ("mlp", (*ALONE, "--output", "old"), "--output old already contains a run"),
        ("mlp", (*ALONE, "--output", "file"), "already exists and is not a run"),
        ("mlp", (*ALONE, "--init-from", "nosuch"), "nosuch does not exist: no weights to read"),
        ("mlp", (*ALONE, "--save-to", "nosuch://x/y"), "is not a place that fsspec can open"),
        ("text", (*ALONE, "--export-hf", "new"), "was not made from a transformers model"),
        ("mlp", (*ALONE, "--interface", "nosuch0"), "--interface nosuch0"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(
    home: Path, folder: str, options: tuple[str, ...], words: str
) -> None:
    arguments = (folder, *options, "--steps", "1")
    before = sorted(home.rglob("*"))
    dry = command(home, "train", *arguments, "--dry-run")
    assert sorted(home.rglob("*")) == before
    run = command(home, "train", *arguments)
    assert dry.code == run.code == 1
    assert words in dry.err and dry.err == run.err


def test_a_dry_run_of_what_runs_is_a_success(home: Path) -> None:
    for folder in ("mlp", "text"):
        shown = command(home, "train", folder, *ALONE, "--dry-run")
        assert shown.code == 0 and "optimizer" in shown.out + shown.err
