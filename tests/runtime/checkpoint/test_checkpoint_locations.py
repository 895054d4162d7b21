"""Checkpoints at a place that fsspec reaches: whole or not there, whatever goes wrong."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from asyncpipe.runtime import locations
from asyncpipe.runtime.checkpoint.folders import FACTS, MANIFEST, Facts, manifest_entry, name_of
from asyncpipe.runtime.checkpoint.remote import Location
from asyncpipe.runtime.locations import LocationError
from asyncpipe.tests.support.processes.s3_server import bucket

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket() as url:
        yield url


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty place of each kind."""
    if request.param == "s3":
        return Location(f"{request.getfixturevalue('s3')}/{next(NUMBERS)}", patience_s=1)
    if request.param == "memory":
        return Location(f"memory://runs/{next(NUMBERS)}", patience_s=1)
    return Location(f"file://{tmp_path}/place", patience_s=1)


def checkpoint(folder: Path, step: int, **files: bytes) -> Path:
    """A checkpoint with files of its own besides what each has."""
    path = folder / name_of(step)
    path.mkdir(parents=True)
    facts = Facts("tiny", step, 8 * step, 100, 2, 2, 1, settings={"folder": "x", "lr": 0.5})
    content = {FACTS: facts.to_json().encode()}
    content |= {name.replace("__", "/"): value for name, value in files.items()}
    entries: dict[str, object] = {}
    for name, value in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(value)
        entries |= manifest_entry(path, path / name)
    (path / MANIFEST).write_text(json.dumps({"files": entries}))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_is_put_is_there_and_comes_back_as_it_was(place: Location, tmp_path: Path) -> None:
    place.check()
    assert place.names() == [] and not place.has("step-000002")
    two = checkpoint(tmp_path, 2, a=b"\0" * 70_000, state__b=b"", state__c=b"c")
    place.put(two)
    place.put(checkpoint(tmp_path, 1, a=b"1"))
    assert place.names() == ["step-000001", "step-000002"] and place.has("step-000002")
    place.get("step-000002", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(two)
    assert place.facts("step-000001", tmp_path / "aside").samples == 8
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_that_name_is_replaced_whole(place: Location, tmp_path: Path) -> None:
    place.put(checkpoint(tmp_path / "1", 1, a=b"1", b=b"1"))
    new = checkpoint(tmp_path / "2", 1, a=b"2")
    place.put(new)
    place.get("step-000001", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(new)


def test_what_is_removed_is_gone(place: Location, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        place.put(checkpoint(tmp_path, step, a=b"1"))
    place.remove("step-000001")
    place.remove("step-000007")
    assert place.names() == ["step-000002", "step-000003"]
    place.keep({"step-000003", "step-000009"})
    assert place.names() == ["step-000003"]
    with pytest.raises(LocationError, match="has no step-000001.\nCheckpoints there: step-000003"):
        place.get("step-000001", tmp_path / "back")


class Cut(MemoryFileSystem):
    """A file system that fails, for good or for a while, after so many writes."""

    protocol = "cut"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    writes = 0
    failing: range = range(0)
    error: Exception = KeyboardInterrupt()  # type: ignore[assignment]

    def _fail(self) -> None:
        Cut.writes += 1
        if Cut.writes - 1 in Cut.failing:
            raise Cut.error

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._fail()
        super().put_file(lpath, rpath, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._fail()
        super().pipe_file(path, value, **options)

    def rm_file(self, path: str) -> None:
        self._fail()
        super().rm_file(path)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    import fsspec

    fsspec.register_implementation("cut", Cut, clobber=True)
    Cut.store.clear()
    Cut.writes, Cut.failing, Cut.error = 0, range(0), OSError(errno.EIO, "a cable")
    monkeypatch.setattr(locations, "_FIRST_PAUSE_S", 0.001)
    yield Location("cut://runs/x", patience_s=0.05)


@pytest.mark.parametrize("after", range(5))
def test_a_transfer_that_is_cut_leaves_nothing_that_seems_whole(
    cut: Location, tmp_path: Path, after: int
) -> None:
    Cut.failing, Cut.error = range(after, 99), KeyboardInterrupt()  # type: ignore[assignment]
    one = checkpoint(tmp_path, 1, a=b"1", b=b"1", c=b"1")
    with pytest.raises(KeyboardInterrupt):
        cut.put(one)
    assert cut.names() == [] and not cut.has(one.name)
    Cut.failing = range(0)
    cut.put(checkpoint(tmp_path, 2))
    cut.keep({one.name, "step-000002"})
    assert cut.names() == ["step-000002"] and not [name for name in Cut.store if one.name in name]
    cut.put(one)
    assert cut.names() == [one.name, "step-000002"]


def test_a_removal_that_is_cut_leaves_nothing_that_seems_whole(
    cut: Location, tmp_path: Path
) -> None:
    cut.put(checkpoint(tmp_path, 1, a=b"1"))
    Cut.writes, Cut.failing = 0, range(1, 99)
    with pytest.raises(LocationError):
        cut.remove("step-000001")
    assert cut.names() == [] and Cut.store


def test_what_passes_is_waited_for_and_what_does_not_is_told(cut: Location, tmp_path: Path) -> None:
    one, two = (checkpoint(tmp_path, step, a=b"1") for step in (1, 2))
    Cut.failing = range(1, 3)
    cut.put(one)
    assert cut.names() == [one.name]
    Cut.writes, Cut.failing = 0, range(1, 10_000)
    with pytest.raises(LocationError, match=r"could not be written for 0.05 s: .*a cable"):
        cut.put(two)
    Cut.writes, Cut.error = 0, PermissionError("not yours")
    with pytest.raises(LocationError, match=r"could not be written: not yours"):
        cut.put(two)
    assert Cut.writes == 2


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("a", b"13", "a does not match its SHA-256"),
        ("a", b"1", "a has 1 bytes instead of 2"),
        (MANIFEST, b"[", "manifest.json is damaged"),
        (MANIFEST, b'{"files": {"../x": [1, ""]}}', "manifest.json is not the manifest"),
    ],
)
def test_a_checkpoint_that_is_not_as_it_was_put_is_refused(
    cut: Location, tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    cut.put(checkpoint(tmp_path, 1, a=b"12"))
    files, base = cut._opened()
    files.pipe_file(f"{base}/step-000001/{file}", content)
    with pytest.raises(LocationError, match=rf"^cut://runs/x/step-000001 is damaged: {words}"):
        cut.get("step-000001", tmp_path / "back")
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nothing://x/y", "is not a place that fsspec can open"),
        ("memory://", "does not name a folder"),
        ("file:///", "does not name a folder"),
    ],
)
def test_a_url_of_no_place_is_named(url: str, words: str) -> None:
    with pytest.raises(LocationError, match=words):
        Location(url).check()


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    monkeypatch.setitem(registry.known_implementations, "s3", {"class": "not_there.S3", "err": ""})
    with pytest.raises(LocationError, match=r"needs s3fs.*\npip install 's3fs>="):
        Location("s3://bucket/x").check()
    entry = {"class": "not_there.Gs", "err": "Please install gcsfs"}
    monkeypatch.setitem(registry.known_implementations, "gs", entry)
    with pytest.raises(LocationError, match="needs a package: Please install gcsfs"):
        Location("gs://bucket/x").check()


def test_a_bucket_that_is_not_there_is_named(s3: str) -> None:
    with pytest.raises(LocationError, match="no such bucket"):
        Location("s3://absent/x").check()


def test_credentials_that_are_not_there_are_named(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(LocationError, match="no credentials were found.\nSet AWS_ACCESS_KEY_ID"):
        Location(f"{s3}/x").check()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_server_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(LocationError, match="could not be written for 0 s"):
        Location("s3://runs/x", patience_s=0).check()
    s3fs.S3FileSystem.clear_instance_cache()


def test_nothing_is_written_where_nothing_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: LocalFileSystem, path: str, value: bytes, **options: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", refused)
    with pytest.raises(LocationError, match="could not be written: .*read-only"):
        Location("file:///tmp/x").check()
