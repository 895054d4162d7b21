"""Text at a URL: windows come piece by piece, and a run begins before the last file is there."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncpipe.runtime.data import text as text_module
from asyncpipe.runtime.data.task import find_task
from asyncpipe.runtime.data.text import RemoteText
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.locations import RemoteFolder
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.oracles.resumed_runs import assert_goes_on_as, assert_same, train

TEXT = bytes(range(97, 123))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "text"
    write_text(folder)
    return folder


def texts(folder: Path, place: Path) -> RemoteText:
    plan = read_plan(folder)
    return RemoteText(f"file://{place}", find_task(plan, criterion=None), plan, seed=0)


def shard(place: Path, name: str, windows: int, length: int) -> bytes:
    """A file of as many windows, and a rest that fills none."""
    text = (TEXT * length)[windows : windows + windows * length] + b"rest"
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(text)
    return text


def test_windows_come_piece_by_piece_also_of_files_that_come_later(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = read_plan(folder).sizes["sequence"]
    first = shard(tmp_path / "place", "a.txt", 5, length)
    reads: list[tuple[str, int, int]] = []
    read = RemoteFolder.read

    def counted(self: RemoteFolder, file: Any, start: int, stop: int) -> bytes:
        reads.append((file.name, start, stop))
        return read(self, file, start, stop)

    monkeypatch.setattr(RemoteFolder, "read", counted)
    monkeypatch.setattr(text_module, "_PIECE", 2 * length)
    stream = texts(folder, tmp_path / "place")
    windows = iter(stream)
    found = [next(windows)]
    assert reads == [("a.txt", 0, 2 * length)]
    second = shard(tmp_path / "place", "b.txt", 3, length)
    found += islice(windows, 4)
    state = stream.state_dict()
    found += windows
    expected = [
        torch.tensor(list(text[start : start + length]))
        for text, count in ((first, 5), (second, 3))
        for start in range(0, count * length, length)
    ]
    assert len(found) == 8
    for sample, window in zip(found, expected, strict=True):
        assert sample["input_ids"].equal(window) and sample["labels"].equal(window)
    resumed = texts(folder, tmp_path / "place")
    resumed.load_state_dict(state)
    assert [sample["input_ids"].tolist() for sample in resumed] == [
        window.tolist() for window in expected[5:]
    ]
    assert len(list(resumed)) == 8  # the next pass


def test_tokenized_files_are_read_as_their_headers_say(folder: Path, tmp_path: Path) -> None:
    length = read_plan(folder).sizes["sequence"]
    ids = np.arange(2 * length, dtype="uint32") % 50
    ids.tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text('{"dtype": "uint32", "vocab_size": 50}')
    found = [sample["input_ids"].tolist() for sample in texts(folder, tmp_path)]
    assert found == ids.reshape(2, length).tolist()


LATE = """
from pathlib import Path

class Late:
    def on_step(self, *given):
        place = Path("place") / "b.txt"
        if not place.exists():
            place.write_bytes(Path("b.txt").read_bytes())

def make(config, folder):
    return Late()
"""


def test_a_run_begins_before_the_last_file_is_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    length = read_plan(folder).sizes["sequence"]
    given: dict[str, Any] = {"data": f"file://{tmp_path}/place", "micro_batch_size": 2}
    shard(tmp_path / "place", "a.txt", 24, length)  # of three steps
    (tmp_path / "b.txt").write_bytes(shard(tmp_path / "place", "b.txt", 40, length))
    whole = train(folder, tmp_path / "whole", schedule="1f1b", **given)
    (tmp_path / "place" / "b.txt").unlink()
    (tmp_path / "late.py").write_text(LATE)
    late = train(folder, tmp_path / "late", schedule="single", callbacks="late.py:make", **given)
    assert late.of("loss") == whole.of("loss")
    assert_same(late.weights, whole.weights)
    assert_goes_on_as(whole, folder, 4, schedule="1f1b", **given)


def test_a_model_of_no_text_is_refused(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp")
    with pytest.raises(DataError, match="a stream of text does not fit tiny_mlp"):
        train(tmp_path / "mlp", tmp_path / "run", data="file:///data", schedule="single")
