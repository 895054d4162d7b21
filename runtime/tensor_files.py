"""Safetensors files <-> named tensors, one shard a stage, each reader taking only its own names.

A folder holds `model.safetensors`, or shards `model-00001-of-00004.safetensors` with
`model.safetensors.index.json`: the layout that transformers writes and reads. A generated folder
and a run's folder hold such a folder, `weights`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import DataError
from .serialization import Origin, known_fields, parse_json, read_text, shaped

INDEX = "model.safetensors.index.json"


def read_tensors(
    path: str | Path,
    names: Iterable[str],
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    *,
    optional: frozenset[str] = frozenset(),
    parts: Mapping[str, Callable[[Any], Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Reads the tensors called `names` from a safetensors file or folder, and no others; of those
    in `parts`, what that function reads of a slice of the file.

    A name that the file lacks is looked up under its `aliases` (a tied weight is stored once),
    then without its first component (a file of the base model). Names in `optional` may be
    missing. Raises DataError when the path holds no weights or lacks a tensor.
    """
    files = _files_by_name(Path(path))
    key_of: dict[str, str] = {}
    missing = []
    for name in names:
        full = (name, *(aliases or {}).get(name, ()))
        for candidate in (*full, *(other.partition(".")[2] for other in full)):
            if candidate in files:
                key_of[name] = candidate
                break
        else:
            if name not in optional:
                missing.append(name)
    if missing:
        raise DataError(
            f"{path} lacks {len(missing)} of the {len(missing) + len(key_of)} tensors needed here, "
            f"the first is {missing[0]}.",
            "Give a file of the same model, or partition that model again.",
        )
    tensors = {}
    for file in sorted({files[key] for key in key_of.values()}):
        with _opened(file) as archive:
            for name, key in key_of.items():
                if files[key] == file:
                    read_part = (parts or {}).get(name)
                    tensors[name] = (
                        read_part(archive.get_slice(key)) if read_part else archive.get_tensor(key)
                    )
    return tensors


def shard_name(shard: int, shards: int) -> str:
    """The file name of shard number `shard`, counted from 0."""
    return (
        "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
    )


def write_shard(folder: Path, tensors: Mapping[str, Tensor], shard: int, shards: int) -> None:
    """Writes one shard into `folder`; the tensors may live on any device.

    Tensors that share memory, as tied parameters that no stage uses, are written one by one. Raises
    DataError for one whose dtype no safetensors file has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        own = dense(tensor.cpu())
        storage = own.untyped_storage().data_ptr()
        plain[name] = own.clone() if storage in storages else own
        storages.add(storage)
    try:
        save_file(plain, folder / shard_name(shard, shards), metadata={"format": "pt"})
    except KeyError as error:  # of a dtype
        name = next(name for name, tensor in plain.items() if tensor.dtype is error.args[0])
        dtype = str(plain[name].dtype).removeprefix("torch.")
        raise DataError(
            f"{name} has the dtype {dtype}, which a safetensors file cannot hold.",
            "Convert it before the model is partitioned, complex128 to complex64.",
        ) from error


def write_index(folder: Path, names_of_shard: Iterable[Iterable[str]], total_bytes: int) -> None:
    """Writes the index of a folder of shards; one shard needs none."""
    shards = [list(names) for names in names_of_shard]
    if len(shards) == 1:
        return
    weight_map = {
        name: shard_name(shard, len(shards)) for shard, names in enumerate(shards) for name in names
    }
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of all elements of the tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def as_real(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as `[..., 2]`, its real and imaginary parts; another as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def dense(tensor: Tensor) -> Tensor:
    """The tensor's numbers row by row in memory, outside autograd: for a strided view, and where
    torch has put off a conjugation or a change of sign, a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def host_copy(tensor: Tensor) -> Tensor:
    """A copy of the tensor's numbers in host memory (`dense`)."""
    return dense(tensor.to("cpu", copy=True))


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's numbers row by row."""
    return dense(tensor.cpu()).flatten().view(torch.uint8).numpy().data


def dtype_of(name: str) -> torch.dtype:
    """`"float32"` -> `torch.float32`. Raises DataError for another name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"{name!r} is not a dtype of torch.", "Use float32, bfloat16 or float64.")
    return dtype


def check_weights(path: Path) -> None:
    """Raises DataError when the path holds no weights."""
    _files_by_name(path)


def _files_by_name(path: Path) -> dict[str, Path]:
    """Every tensor name stored under `path` -> the file that holds it."""
    if path.is_dir():
        names = (INDEX, "model.safetensors")
        if not any((path / name).is_file() for name in names) and (path / "weights").is_dir():
            path /= "weights"
        index = path / INDEX
        if index.is_file():
            return _indexed(index)
        path = path / "model.safetensors"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist: no weights to read.",
            "Give a .safetensors file, a folder with model.safetensors, a generated folder or a "
            "run's folder.",
        )
    with _opened(path) as archive:
        return {name: path for name in archive.keys()}


@dataclass(frozen=True)
class _Index:
    weight_map: Mapping[str, str]


def _indexed(index: Path) -> dict[str, Path]:
    """The files that an index names, all in its folder."""
    origin = Origin(str(index), DataError, "Download or export the weights again.")
    raw = known_fields(_Index, parse_json(read_text(index, origin), origin))
    weight_map = shaped(_Index, raw, origin).weight_map
    names = {path.name for path in index.parent.iterdir()}
    for name, file in weight_map.items():
        if file not in names:
            raise origin.refused(
                f" says that {name[:60]} is in {file[:60]}, which is not in its folder."
            )
    return {name: index.parent / file for name, file in weight_map.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; DataError for one that is damaged, or is none."""
    try:
        with safe_open(path, framework="pt") as archive:
            yield archive
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} is not a safetensors file, or damaged: {error}.",
            "Download or export the weights again.",
        ) from error
