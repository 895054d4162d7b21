"""A generated folder -> the modules of its stages, with their weights.

`load` puts all stages into one process as a `Pipe`: the original model again, in pieces, for
checks, evaluation and export. It runs the same files that the pipeline trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.overrides import TorchFunctionMode

from ..data.task import named_inputs, sizes_of
from ..errors import DataError, PlanError
from ..import_path import add_own_folder
from ..plan.plan import NO_WEIGHTS, Plan, StageSpec, read_plan, verify_evaluates
from ..plan.structure import rebuilt
from ..plan.trust import own_modules
from ..tensor_files import read_tensors, write_shard
from ..tensor_parallel.ranks import (
    ONE_RANK,
    Split,
    TensorRanks,
    bind,
    mark_splits,
    split_of,
    splits_of,
    using,
)
from ..user_code import hashed_name, import_file, source_of


class ChangedCodeError(PlanError):
    """A file of the generated folder that is not the one that was checked when the run began."""

    def __init__(self, path: Path, checked: str, loaded: str) -> None:
        super().__init__(
            f"{path} is not the file that was checked when the run began: its SHA-256 is "
            f"{loaded[:8]}, and was {checked[:8]}.",
            "Start again when nothing writes to the folder, with the same files on all hosts.",
        )


CONSTANTS = "_constants."
"""Prefix, in a generated folder's weights, of values that no state_dict holds."""
CONSTRUCTED_IN = "float32"  # the dtype that constructors of stages do not name


def load_stage(
    folder: str | Path,
    plan: Plan,
    index: int,
    *,
    weights: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    code: Mapping[str, str] | None = None,
    ranks: TensorRanks = ONE_RANK,
) -> nn.Module:
    """Builds stage `index` of a generated folder and loads its tensors.

    `weights` is a safetensors file or folder of the original model; by default the folder's own
    weights. Each stage reads only its own tensors, and one of several tensor `ranks` only its parts
    of them. `dtype` is that of floating-point tensors, by default as generated. `code` is as for
    `stage_builder`. Raises PlanError if the folder lacks the stage or has no weights, DataError
    if the weights belong to another model.
    """
    folder = Path(folder)
    spec = plan.stages[index]
    own = folder / "weights"
    if weights is None and not own.is_dir():
        raise PlanError(
            f"{folder} holds no weights: {_why_none(plan)}.",
            "Give some with --init-from (weights= in Python), or partition the model again"
            f"{_without(plan)}.",
        )
    with SkipRandomInit(), using(ranks):
        module = stage_builder(folder, spec, code)()
    splits = splits_of(module)
    if dtype is not None:
        # Before it is filled: weights of a checkpoint keep all their digits.
        convert = partial(in_dtype, dtype=dtype)
        module._apply(convert)  # type: ignore[no-untyped-call]
    mark_splits(module, splits)
    fill_stage(module, weights or own, plan, ranks)
    _fill_constants(module, own, plan, ranks)
    module.to(device)
    mark_splits(module, splits)
    bind(module, ranks)
    return module


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of floating point in this dtype; another, also a complex one, as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def load_unused(
    folder: str | Path, plan: Plan, *, weights: str | Path | None = None
) -> dict[str, Tensor]:
    """The tensors of the original's state_dict that no stage needs, as far as they are stored."""
    path = Path(weights) if weights is not None else Path(folder) / "weights"
    if not plan.unused:
        return {}
    return read_tensors(path, plan.unused, shared_names(plan), optional=frozenset(plan.unused))


def stage_builder(
    folder: str | Path, spec: StageSpec, code: Mapping[str, str] | None = None
) -> Callable[[], nn.Module]:
    """Makes modules of a generated stage, whose file is imported now.

    Raises ChangedCodeError if `code`, the SHA-256 of each file, differs from the file's.
    """
    module = _import_stage(Path(folder) / spec.file, code)
    stage_class: type[nn.Module] = getattr(module, spec.class_name)
    return default_dtype(CONSTRUCTED_IN)(stage_class)


def shared_names(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Each name of a shared parameter -> all names of that parameter."""
    return {name: shared.names for shared in plan.shared for name in shared.names}


def _import_stage(path: Path, code: Mapping[str, str] | None) -> ModuleType:
    source = source_of(path)
    loaded = hashlib.sha256(source.encode()).hexdigest()
    if code is not None and (checked := code.get(path.name, "none")) != loaded:
        raise ChangedCodeError(path, checked, loaded)
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
def fill_stage(
    module: nn.Module, path: str | Path, plan: Plan, ranks: TensorRanks = ONE_RANK
) -> None:
    """Reads a stage's tensors from weights of the original model, or the parts of one of several
    tensor ranks. Raises DataError if these belong to another model."""
    own = module.state_dict(keep_vars=True)
    buffers = frozenset(name for name, _ in module.named_buffers())
    parts = _parts_of(own, ranks)
    read = read_tensors(path, own, shared_names(plan), optional=buffers, parts=parts)
    wrong = [
        name
        for name, tensor in read.items()
        if tensor.shape != own[name].shape or tensor.is_meta  # a whole one of another size
    ]
    if wrong:
        name = wrong[0]
        split, planned = split_of(own[name]), tuple(own[name].shape)
        if split is not None:
            planned = split.whole_shape(planned, ranks.size)
        raise DataError(
            f"{path} is not of {plan.name} as planned: {len(wrong)} of {len(read)} tensors differ "
            f"in shape, the first is {name}: {tuple(read[name].shape)} in the file, "
            f"{planned} in the plan.",
            "Give weights of the planned model, or partition the model that these belong to.",
        )
    for name, tensor in read.items():
        own[name].copy_(tensor)


def _parts_of(
    own: Mapping[str, Tensor], ranks: TensorRanks, prefix: str = ""
) -> dict[str, Callable[[Any], Tensor]]:
    """Functions by name that read a tensor rank's part of a split tensor from a file. For a tensor
    of another shape, which belongs to another model, they return a tensor on meta."""

    def reader(split: Split, shape: tuple[int, ...]) -> Callable[[Any], Tensor]:
        def read(stored: Any) -> Tensor:
            if tuple(stored.get_shape()) != shape:
                return torch.empty(stored.get_shape(), device="meta")
            return split.read(stored, ranks.rank, ranks.size)

        return read

    splits = {name: split_of(tensor) for name, tensor in own.items()} if ranks.size > 1 else {}
    return {
        prefix + name: reader(split, split.whole_shape(own[name].shape, ranks.size))
        for name, split in splits.items()
        if split is not None
    }


def _why_none(plan: Plan) -> str:
    """Why a folder has no weights."""
    option = NO_WEIGHTS.get(plan.weights)
    return f"its plan was made with {option}" if option else "its folder weights is missing"


def _without(plan: Plan) -> str:
    option = NO_WEIGHTS.get(plan.weights)
    return f" without {option}" if option else ""


@torch.no_grad()
def _fill_constants(module: nn.Module, path: Path, plan: Plan, ranks: TensorRanks) -> None:
    """Buffers outside the state_dict whose values their constructor cannot make."""
    own = {name: each for name, each in module.named_buffers() if name in plan.constants}
    if not own:
        return
    if not path.is_dir():
        raise PlanError(
            f"{path.parent} lacks the values of {', '.join(sorted(own)[:3])}, which are in no "
            f"weights: {_why_none(plan)}.",
            f"Partition the model again{_without(plan)}.",
        )
    names, parts = [CONSTANTS + name for name in sorted(own)], _parts_of(own, ranks, CONSTANTS)
    for name, tensor in read_tensors(path, names, parts=parts).items():
        module.get_buffer(name.removeprefix(CONSTANTS)).copy_(tensor)


class Pipe(nn.Module):
    """The stages of a plan, chained; tied weights are one parameter again.

    Called as the original is, it returns the original's output structure: a dict of its named
    outputs, a tensor or a tuple. Inputs have the shapes of `Plan.inputs`, for any batch. A call
    raises DataError for inputs of other names or sizes. Parameters, buffers and the state_dict have
    the names of the original.

    plan: the plan of the folder
    stages: the modules of the stages, in order
    unused: the tensors of the original's state_dict that no stage needs
    """

    def __init__(
        self,
        plan: Plan,
        stages: Iterable[nn.Module],
        unused: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.stages = nn.ModuleList(stages)
        self.unused = dict(unused or {})
        _tie(plan, self.stages)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """The original's outputs for its arguments."""
        values = named_inputs(self.plan, args, inputs)
        sizes = sizes_of(self.plan, values)
        with default_dtype(self.plan.default_dtype):
            for spec, stage in zip(self.plan.stages, self.stages, strict=True):
                values.update(run_stage(spec, stage, values))
        return rebuilt(self.plan.outputs, values, sizes)

    def extra_repr(self) -> str:
        """The name of the plan."""
        return self.plan.name

    def train(self, mode: bool = True) -> Self:
        """Raises PlanError for evaluation mode where the plan is for training alone."""
        if not mode:
            verify_evaluates(self.plan)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _tie(self.plan, self.stages)  # as a parameter of another type is a new object in each stage
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under the name that the original has for it; with
        `remove_duplicate=False` under all its names."""
        place = {key: position for position, key in enumerate(self.plan.state_keys)}
        tied = {name: shared.names for shared in self.plan.shared for name in shared.names}
        seen: set[str | nn.Parameter] = set()
        for stage in self.stages if recurse else ():
            for own, parameter in stage.named_parameters(remove_duplicate=False):
                names = sorted(tied.get(own, (own,)), key=lambda key: place.get(key, len(place)))
                for name in names[:1] if remove_duplicate else names:
                    # A compiled stage has other names for its parameters, which are the same.
                    key = parameter if remove_duplicate else name
                    if key not in seen:
                        seen.add(key)
                        yield _below(prefix, name), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Every buffer of the stages, under the name that the original has for it; a buffer that
        several stages hold is that of the first."""
        seen: set[str] = set()
        for stage in self.stages if recurse else ():
            for name, buffer in stage.named_buffers(remove_duplicate=remove_duplicate):
                if name not in seen:
                    seen.add(name)
                    yield _below(prefix, name), buffer

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Exactly the keys and values of the original model's state_dict, tied names included."""
        state: dict[str, Any] = dict(self.unused)
        for stage in self.stages:
            state |= stage.state_dict(keep_vars=keep_vars)
        for shared in self.plan.shared:
            for name in shared.names:
                state.setdefault(name, state[shared.holders[0][1]])
        destination = {} if destination is None else destination
        destination.update({prefix + key: state[key] for key in self.plan.state_keys})
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Reads the original model's state_dict, or that of a plan with other stages.

        Raises DataError when a shape differs or, if `strict`, when a key is missing or not the
        model's. Returns the missing and the unexpected keys, as torch does.
        """
        own = self.state_dict()
        absent = [key for key in own if key not in state_dict]
        if absent and strict:
            raise DataError(
                f"the state_dict lacks {len(absent)} of {len(own)} tensors of "
                f"{self.plan.name}, the first is {absent[0]}."
            )
        foreign = [k for k, v in state_dict.items() if isinstance(v, Tensor) and k not in own]
        if foreign and strict:
            raise DataError(
                f"the state_dict has {len(foreign)} tensors that {self.plan.name} lacks, the "
                f"first is {foreign[0]}."
            )
        for key in own.keys() & state_dict.keys():
            if state_dict[key].shape != own[key].shape:
                raise DataError(
                    f"{key} is {tuple(state_dict[key].shape)} in the state_dict, "
                    f"{tuple(own[key].shape)} in {self.plan.name}."
                )
        state = {**own, **state_dict}
        for stage in self.stages:
            stage.load_state_dict({key: state[key] for key in stage.state_dict()}, assign=assign)
        _tie(self.plan, self.stages)
        self.unused = {key: state[key] for key in self.unused}
        return _IncompatibleKeys(absent, foreign)

    def save_weights(self, folder: str | Path) -> None:
        """Writes `model.safetensors`, a tied weight once, for `--init-from` and from_pretrained."""
        borrowed = {name for shared in self.plan.shared for name in shared.names[1:]}
        state = self.state_dict()
        own = {name: value for name, value in state.items() if name not in borrowed}
        write_shard(Path(folder), own, 0, 1)


def load(
    folder: str | Path,
    *,
    weights: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> Pipe:
    """Loads a generated folder with all its stages in this process, and runs its code.

    - `folder`: a folder that `partition` made.
    - `weights`: a safetensors file or folder of the original model, in place of the folder's own.
    - `device`: where the stages are put.

    Raises PlanError when the folder is not a generated model or has no weights, DataError when
    `weights` belong to another model.
    """
    plan = read_plan(folder)
    stages = [
        load_stage(folder, plan, spec.index, weights=weights, device=device) for spec in plan.stages
    ]
    return Pipe(plan, stages, load_unused(folder, plan, weights=weights))


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Inside, torch's default dtype is this one: a stage is captured under one, and code of the
    user's that its process imports, such as that of the data, may set another."""
    before, wanted = torch.get_default_dtype(), getattr(torch, name)
    if before is wanted:
        yield
        return
    torch.set_default_dtype(wanted)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run_stage(spec: StageSpec, stage: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """One stage's forward: named values in, named values out."""
    return spec.named_outputs(stage(*(values[name] for name in spec.inputs)))


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _tie(plan: Plan, stages: nn.ModuleList) -> None:
    """Makes each shared parameter one object, under all names that it has in any stage."""
    for shared in plan.shared:
        owner_stage, owner_name = shared.holders[0]
        owner = dict(stages[owner_stage].named_parameters(remove_duplicate=False)).get(owner_name)
        if owner is None:  # a buffer, which its stage alone has
            continue
        for stage in shared.stages:
            # A stage may hold the parameter under several of its names.
            names = {name for name, _ in stages[stage].named_parameters(remove_duplicate=False)}
            for name in names & set(shared.names):
                path, _, leaf = name.rpartition(".")
                setattr(stages[stage].get_submodule(path), leaf, owner)
