"""A generated folder -> the modules of its stages, with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import DataError, PlanError
from .import_path import add_own_folder
from .own_modules import own_modules
from .plan import Plan, StageSpec, file_hash
from .stage_source import source_of
from .tensors import read_tensors
from .user_code import hashed_name, import_file

CONSTANTS = "_constants."
"""Prefix, in a generated folder's weights, of values that no state_dict holds."""


def load_stage(
    folder: str | Path,
    plan: Plan,
    index: int,
    *,
    weights: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Builds stage `index` of a generated folder and fills in its tensors.

    `weights` is a safetensors file or folder of the original model; without it the folder's own
    weights are read. Each stage reads only its own tensors. Raises PlanError when the folder
    lacks the stage or has no weights, DataError when the weights are of another model.
    """
    folder = Path(folder)
    spec = plan.stages[index]
    own = folder / "weights"
    if weights is None and not own.is_dir():
        raise PlanError(
            f"{folder} holds no weights: its plan was made with --meta.",
            "Give some with --init-from, or partition again without --meta.",
        )
    with SkipRandomInit():
        module = load_stage_class(folder, spec)()
    aliases = shared_names(plan)
    _fill(module, weights or own, aliases, plan)
    _fill_constants(module, own, plan)
    return module.to(device)


def load_unused(
    folder: str | Path, plan: Plan, *, weights: str | Path | None = None
) -> dict[str, Tensor]:
    """The tensors of the original's state_dict that no stage needs, as far as they are stored."""
    path = Path(weights) if weights is not None else Path(folder) / "weights"
    if not plan.unused:
        return {}
    return read_tensors(path, plan.unused, shared_names(plan), optional=frozenset(plan.unused))


def load_stage_class(folder: str | Path, spec: StageSpec) -> type[nn.Module]:
    """The class of a generated stage, imported from its file."""
    stage_class: type[nn.Module] = getattr(_import_stage(Path(folder) / spec.file), spec.class_name)
    return stage_class


def is_edited(folder: str | Path, spec: StageSpec) -> bool:
    """Whether the stage's file is not the one that was generated."""
    return file_hash(Path(folder) / spec.file) != spec.sha256


def shared_names(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Each name of a shared parameter -> all names of that parameter."""
    return {name: shared.names for shared in plan.shared for name in shared.names}


def _import_stage(path: Path) -> ModuleType:
    source = source_of(path)
    for module in own_modules(path.parent, path.name).values():
        add_own_folder(module.parent)
    try:
        return import_file(path, hashed_name("asyncpipe_generated", path), source)
    except Exception as error:
        raise PlanError(
            f"{path} cannot be imported: {type(error).__name__}: {error}.",
            "Undo the edit, or partition the model again with --force.",
        ) from error


class SkipRandomInit(TorchFunctionMode):
    """Leaves fresh parameters uninitialised: every one of them is about to be read from a file."""

    # Those of torch.nn.init are seen here in place of the methods that they call.
    _SKIPPED = frozenset(
        {
            *("uniform_", "normal_", "trunc_normal_"),
            *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
        }
    )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in self._SKIPPED:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _fill(
    module: nn.Module, path: str | Path, aliases: Mapping[str, tuple[str, ...]], plan: Plan
) -> None:
    own = module.state_dict(keep_vars=True)
    buffers = frozenset(name for name, _ in module.named_buffers())
    read = read_tensors(path, own, aliases, optional=buffers)
    wrong = [name for name, tensor in read.items() if tensor.shape != own[name].shape]
    if wrong:
        name = wrong[0]
        raise DataError(
            f"{path} is not of {plan.name} as planned: {len(wrong)} of {len(read)} tensors differ "
            f"in shape, the first is {name}: {tuple(read[name].shape)} in the file, "
            f"{tuple(own[name].shape)} in the plan.",
            "Give weights of the planned model, or partition the model that these belong to.",
        )
    for name, tensor in read.items():
        own[name].copy_(tensor)


@torch.no_grad()
def _fill_constants(module: nn.Module, path: Path, plan: Plan) -> None:
    """Buffers outside the state_dict whose values their constructor cannot make."""
    held = dict(module.named_buffers()).keys() & set(plan.constants)
    if not held:
        return
    if not path.is_dir():
        raise PlanError(
            f"{path.parent} lacks the values of {', '.join(sorted(held)[:3])}, which are in no "
            "weights: its plan was made with --meta or --no-weights.",
            "Partition the model again without.",
        )
    for name, tensor in read_tensors(path, [CONSTANTS + name for name in sorted(held)]).items():
        module.get_buffer(name.removeprefix(CONSTANTS)).copy_(tensor)
