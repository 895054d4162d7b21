"""A generated folder -> all its stages in one process: the original model again, in pieces.

For checking, evaluation and export. It runs the very files that the pipeline trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import named_inputs, sizes_of
from .errors import DataError
from .loading import load_stage, load_unused
from .plan import Plan, StageSpec, read_plan, verify_evaluates
from .structure import rebuilt
from .tensors import write_shard


class Pipe:
    """The stages of a plan, chained; tied weights are one parameter again.

    Called as the original is, it returns the original's output structure: a dict of its named
    outputs, a tensor or a tuple.
    """

    def __init__(
        self, plan: Plan, stages: list[nn.Module], unused: Mapping[str, Tensor] | None = None
    ) -> None:
        self.plan = plan
        self.stages = stages
        self.unused = dict(unused or {})
        _tie(plan, stages)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        values = named_inputs(self.plan, args, inputs)
        sizes = sizes_of(self.plan, values)
        for spec, stage in zip(self.plan.stages, self.stages, strict=True):
            values.update(run_stage(spec, stage, values))
        return rebuilt(self.plan.outputs, values, sizes)

    def train(self, mode: bool = True) -> Pipe:
        """Raises PlanError for evaluation mode where the plan is for training alone."""
        if not mode:
            verify_evaluates(self.plan)
        for stage in self.stages:
            stage.train(mode)
        return self

    def eval(self) -> Pipe:
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        for stage in self.stages:
            stage.to(*args, **kwargs)
        _tie(self.plan, self.stages)
        return self

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under the name that the original has for it."""
        place = {key: position for position, key in enumerate(self.plan.state_keys)}
        first = {
            name: min(tied.names, key=lambda key: place.get(key, len(place)))
            for tied in self.plan.shared
            for name in tied.names
        }
        seen: set[int] = set()
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield first.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Exactly the keys and values of the original model's state_dict, tied names included."""
        state = dict(self.unused)
        for stage in self.stages:
            state |= stage.state_dict()
        for shared in self.plan.shared:
            for name in shared.names:
                state.setdefault(name, state[shared.holders[0][1]])
        return {key: state[key] for key in self.plan.state_keys}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Reads the original model's state_dict, or that of a plan with other stages.

        Raises DataError when a key is missing or not the model's, or a shape differs.
        """
        own = self.state_dict()
        absent = [key for key in own if key not in state]
        if absent:
            raise DataError(
                f"the state_dict lacks {len(absent)} of {len(own)} tensors of "
                f"{self.plan.name}, the first is {absent[0]}."
            )
        foreign = [key for key in state if key not in own]
        if foreign:
            raise DataError(
                f"the state_dict has {len(foreign)} tensors that {self.plan.name} has not, the "
                f"first is {foreign[0]}."
            )
        for key, value in own.items():
            if state[key].shape != value.shape:
                raise DataError(
                    f"{key} is {tuple(state[key].shape)} in the state_dict, "
                    f"{tuple(value.shape)} in {self.plan.name}."
                )
        for stage in self.stages:
            stage.load_state_dict({key: state[key] for key in stage.state_dict()})
        self.unused = {key: state[key] for key in self.unused}

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
    """Loads a generated folder with all its stages in this process.

    Raises PlanError when the folder is not a generated model, DataError when `weights` are of
    another model.
    """
    plan = read_plan(folder)
    stages = [
        load_stage(folder, plan, spec.index, weights=weights, device=device) for spec in plan.stages
    ]
    return Pipe(plan, stages, load_unused(folder, plan, weights=weights))


def run_stage(spec: StageSpec, stage: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """One stage's forward: named values in, named values out."""
    return spec.named_outputs(stage(*(values[name] for name in spec.inputs)))


def _tie(plan: Plan, stages: list[nn.Module]) -> None:
    """Makes each shared parameter one object, under all names that it has in any stage."""
    for shared in plan.shared:
        owner_stage, owner_name = shared.holders[0]
        owner = dict(stages[owner_stage].named_parameters(remove_duplicate=False)).get(owner_name)
        if owner is None:  # a buffer, which its stage alone has
            continue
        for stage in shared.stages:
            # A stage may hold the parameter under several of its names.
            held = {name for name, _ in stages[stage].named_parameters(remove_duplicate=False)}
            for name in held & set(shared.names):
                path, _, leaf = name.rpartition(".")
                setattr(stages[stage].get_submodule(path), leaf, owner)
