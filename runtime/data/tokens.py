"""Documents -> one array of token ids: bytes, a BPE trained here, or a tokenizer file.

A tokenised file is a `.bin` of little-endian uint16 or uint32, with `NAME.bin.json` beside it
(`dtype`, `vocab_size`, `tokenizer`); without that header it is uint16, as nanoGPT writes it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..reading import Origin, known_fields, parse_json, read_text, shaped
from .corpora import iterate_text, read_corpus

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
    """Tokenises a corpus with `bpe:SIZE` or a tokenizer file; writes `tokens.bin` into `folder`.

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
    """Writes a tokenised file, whole or not at all, and its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _header_path(path).write_text(json.dumps(header) + "\n", encoding="utf-8")
    unfinished = path.with_suffix(".part")
    ids.tofile(unfinished)
    unfinished.replace(path)


def read_bin(path: Path) -> Tokens:
    """Maps a tokenised file into memory. Raises DataError when it or its header is damaged."""
    if not path.is_file():
        raise DataError(f"--data {path}: no such file.")
    header = _read_header(path)
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
            "Tokenise the text again.",
        )
    vocab_size = header.vocab_size or 1 << (8 * dtype.itemsize)
    return Tokens(ids, header.tokenizer, vocab_size, header.starts, header.mask)


@dataclass(frozen=True)
class _Header:
    """What stands beside a tokenised file."""

    dtype: str = "uint16"
    vocab_size: int | None = None
    tokenizer: str = "unknown"
    mask: int = 0
    starts: tuple[int, ...] = (0,)


def _read_header(path: Path) -> _Header:
    """The header of a tokenised file; what it says beside these fields is not ours."""
    file = _header_path(path)
    if not file.is_file():
        return _Header()
    origin = Origin(str(file), DataError, "Tokenise the text again.")
    raw = known_fields(_Header, parse_json(read_text(file, origin), origin))
    header = shaped(_Header, raw, origin)
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
            'pip install "asyncpipe[data]", or --tokenizer bytes',
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
