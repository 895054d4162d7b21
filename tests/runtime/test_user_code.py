"""A user's code is imported from the current folder of the command, with its neighbors."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.user_code import import_object, names_object


@pytest.fixture(autouse=True)
def clean_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_is_found_from_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "nets.py").write_text("def build(): return 3")
    assert import_object("my_package.nets:build", "--model", DataError)() == 3


def test_a_file_may_import_its_neighbour_and_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_blocks.py").write_text("size = 5")
    (tmp_path / "code" / "my_net.py").write_text("from my_blocks import size\ncalls = []")
    assert import_object("code/my_net.py:size", "--model", DataError) == 5
    calls = import_object("code/my_net.py:calls", "--model", DataError)
    assert import_object(str(tmp_path / "code/my_net.py:calls"), "--data", DataError) is calls


def test_a_file_called_like_a_module_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("kind = 'mine'")
    import types

    assert import_object("types.py:kind", "--data", DataError) == "mine"
    assert sys.modules["types"] is types


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("absent.py:build", "--data absent.py: no such file."),
        ("absent_module:build", "--data absent_module: no module named absent_module."),
        ("my_net.py:biuld", "my_net.py has no biuld. Did you mean build?"),
        ("broken.py:build", r"--data broken.py failed at .*broken.py:2: ZeroDivisionError: div"),
    ],
)
def test_what_cannot_be_imported_is_said(spec: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text("def build(): return 3")
    (tmp_path / "broken.py").write_text("def build(): ...\n1 / 0")
    with pytest.raises(DataError, match=message):
        import_object(spec, "--data", DataError)


def test_a_module_that_failed_can_be_imported_again(tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text("1 / 0")
    with pytest.raises(DataError):
        import_object("my_net.py:x", "--data", DataError)
    (tmp_path / "my_net.py").write_text("x = 2  # and now it is longer")
    assert import_object("my_net.py:x", "--data", DataError) == 2


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("a.b:c", True),
        ("dir/a.py:c", True),
        ("shakespeare", False),
        ("bpe:100", False),
        (":c", False),
    ],
)
def test_a_spec_has_a_place_and_a_name(text: str, is_one: bool) -> None:
    assert names_object(text) is is_one
