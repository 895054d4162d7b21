"""A depth -> the plan at that depth, and the stages of a rank at it.

A stage with frozen blocks is as if its author had called `requires_grad_(False)` and `eval()` on
them: autograd makes no graph below the first parameter that trains, and a boundary tensor that
depends on none that trains needs no gradient. Which tensors these are is found by running all
stages once on fake tensors.

A module outside the blocks is in evaluation mode when all of its parameters are frozen, and one
without parameters, such as the dropout of embeddings, when a frozen block depends on what it
returns. The latter is found by running all stages too, so it is the same for every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import PlanError
from ..executor.loading import run_stage
from ..executor.precision import running_on_fake_tensors
from ..plan.plan import Boundary, Plan, StageSpec
from .blocks import Blocks, FreezeError
from .marks import INPUT, Leaf, Marks

Builds = Sequence[Callable[[], nn.Module]]
"""The constructors of all stages of a plan, in order."""


def plan_at(plan: Plan, blocks: Blocks, depth: int, builds: Builds) -> Plan:
    """The plan in which only the boundary tensors that depend on something that trains need a
    gradient, when so many blocks are frozen. Raises PlanError if a stage cannot run on fake
    tensors."""
    trained = _trained_tensors(plan, blocks.frozen(depth), builds)

    def at_depth(boundary: Boundary) -> Boundary:
        tensor = boundary.tensor
        requires_grad = tensor.requires_grad and tensor.name in trained
        return replace(boundary, tensor=replace(tensor, requires_grad=requires_grad))

    stages = [
        replace(
            stage,
            sends=tuple(map(at_depth, stage.sends)),
            receives=tuple(map(at_depth, stage.receives)),
        )
        for stage in plan.stages
    ]
    shared = tuple(
        replace(each, trains=each.trains and not blocks.frozen(depth).intersection(each.names))
        for each in plan.shared
    )
    return replace(plan, stages=tuple(stages), shared=shared)


def _trained_tensors(plan: Plan, frozen: frozenset[str], builds: Builds) -> set[str]:
    """The values that depend on a parameter that trains."""
    trained: set[str] = set()
    with running_on_fake_tensors(plan) as values:
        for spec, build in zip(plan.stages, builds, strict=True):
            module = build()
            freeze_parameters(module, frozen)
            given = {
                name: values[name].detach().requires_grad_(name in trained) for name in spec.inputs
            }
            unknown = f"the gradients that it needs at {len(frozen)} frozen parameters"
            made = fake_forward(spec, module, given, unknown)
            values.update(made)
            trained |= {name for name, value in made.items() if value.requires_grad}
    return trained


def fake_forward(
    spec: StageSpec, module: nn.Module, given: Mapping[str, Any], unknown: str
) -> dict[str, Any]:
    """The values that a stage makes on fake tensors. Raises PlanError if it cannot."""
    try:
        return run_stage(spec, module, given)
    except Exception as error:
        raise PlanError(
            f"stage {spec.index} cannot run on fake tensors, so {unknown} are unknown: "
            f"{type(error).__name__}: {error}",
            "Leave --freeze out.",
        ) from error


def freeze_parameters(module: nn.Module, frozen: frozenset[str]) -> None:
    """Lets parameters of a stage train no longer."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in frozen and parameter.requires_grad:
            parameter.requires_grad_(False)
            parameter.grad = None


def freeze_stage(module: nn.Module, spec: StageSpec, blocks: Blocks, depth: int) -> None:
    """Freezes the parameters of a stage, and sets its frozen modules to evaluation mode; `spec` is
    that of the plan at this depth."""
    frozen = blocks.frozen(depth)
    freeze_parameters(module, frozen)
    feeding = blocks.feeding or {}
    for path, part in module.named_modules():
        own = [name for name, _ in part.named_parameters(path, remove_duplicate=False)]
        is_frozen = frozen.issuperset(own) if own else feeding.get(path, depth) < depth
        if is_frozen or _is_within(path, blocks.paths[:depth]):
            part.training = False
    if is_whole(module, spec):  # whose own code may be that of a block, without parameters
        module.training = False


def feeding_of(plan: Plan, blocks: Blocks, builds: Builds) -> dict[str, int]:
    """The modules without parameters outside the blocks that a block depends on, each with the
    number of the first such block. Raises PlanError if a stage cannot run on fake tensors."""
    marks, paths = Marks(), list[str]()
    feeding: dict[str, int] = {}

    def give(block: int, values: Any) -> None:
        for value in _tensors(values):
            for mark in marks.of(value):
                if mark.number >= 0:
                    path = paths[mark.number]
                    feeding[path] = min(block, feeding.get(path, block))

    def take(path: str, values: Any) -> None:
        for value in _tensors(values):
            marks.add(value, {Leaf(INPUT, len(paths))})
        paths.append(path)

    with running_on_fake_tensors(plan) as values:
        for spec, build in zip(plan.stages, builds, strict=True):
            module = build()
            for path, part in module.named_modules():
                block = _block_with(path, blocks.paths)
                if block is not None:
                    part.register_forward_pre_hook(
                        lambda part, args, kwargs, block=block: give(block, (args, kwargs)),
                        with_kwargs=True,
                    )
                elif path and not any(True for _ in part.parameters()):
                    part.register_forward_hook(
                        lambda part, args, output, path=path: take(path, output)
                    )
            given = {name: values[name] for name in spec.inputs}
            with marks:
                values |= fake_forward(spec, module, given, "the modules that its blocks read")
    return feeding


def is_whole(module: nn.Module, spec: StageSpec) -> bool:
    """True for a stage without anything that trains, neither in it nor before it."""
    returning = [boundary.tensor.requires_grad for boundary in (*spec.sends, *spec.receives)]
    trains = any(parameter.requires_grad for parameter in module.parameters())
    return not trains and not any(returning) and len(spec.sends) > 0


def check_modes(modules: Mapping[int, nn.Module], blocks: Blocks, most: int) -> None:
    """Raises FreezeError for a stage whose own code has parts of blocks and asks for the mode of
    the stage, if some of its blocks freeze before others: their modes would be one."""
    for stage, module in modules.items():
        if "training" not in type(module).forward.__code__.co_names:
            continue
        groups = [*zip(blocks.paths, blocks.parameters, blocks.before, strict=True)]
        own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        here = [path for path, names, before in groups if own & {*names, *before}]
        written_out = [path for path in here if not is_called(module, path)]
        rest = own & {*blocks.head, *_names_after(blocks, most)}
        if written_out and (len(here) > 1 or rest):
            raise FreezeError(
                f"stage {stage} has the code of {written_out[0]} in its own forward, which has one "
                f"mode, so {written_out[0]} cannot freeze while the rest of the stage trains.",
                "Partition the model again with cuts between blocks only (--granularity module), "
                "and without --code flat.",
            )


def _names_after(blocks: Blocks, depth: int) -> set[str]:
    groups = (*blocks.parameters[depth:], *blocks.before[depth:])
    return {name for group in groups for name in group}


def is_called(module: nn.Module, path: str) -> bool:
    """True if a block is a module with code of its own."""
    try:
        block = module.get_submodule(path)
    except AttributeError:
        return False
    return type(block).forward is not nn.Module.forward


def _is_within(path: str, blocks: Sequence[str]) -> bool:
    return _block_with(path, blocks) is not None


def _block_with(path: str, blocks: Sequence[str]) -> int | None:
    """The number of the block that has a module."""
    return next(
        (n for n, block in enumerate(blocks) if path == block or path.startswith(f"{block}.")), None
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))
