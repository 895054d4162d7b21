"""Models written by hand as stages, with their plans: the compiler's output, without the compiler.

Chained in one graph, the stages of a hand model are the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.runtime.plan.plan import (
    Plan,
    SharedParameter,
    TensorSpec,
)
from asyncpipe.tests.support.models.plans import connected, plan_by_hand, stage_by_hand

BATCH, WIDTH = 3, 4


@dataclass(frozen=True)
class HandStage:
    """A module with its argument names, its result names, and whether it draws."""

    build: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    draws_random: bool = False


@dataclass(frozen=True)
class HandModel:
    plan: Plan
    stages: tuple[HandStage, ...]
    make_inputs: Callable[[int], dict[str, Tensor]]

    def build(self) -> list[nn.Module]:
        """Fresh stages, always with the same weights; shared parameters equal, not one tensor."""
        torch.manual_seed(7)
        modules = [stage.build().double() for stage in self.stages]
        for shared in self.plan.shared:
            owner_stage, owner_name = shared.holders[0]
            for stage, name in shared.holders[1:]:
                with torch.no_grad():
                    owner = modules[owner_stage].get_parameter(owner_name)
                    modules[stage].get_parameter(name).copy_(owner)
        return modules

    def forward(self, modules: list[nn.Module], inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """The plain model: one graph through all stages; all values by name."""
        values: dict[str, Any] = dict(inputs)
        for stage, module in zip(self.stages, modules, strict=True):
            result = module(*(values[name] for name in stage.inputs))
            results = result if len(stage.outputs) > 1 else (result,)
            values.update(zip(stage.outputs, results, strict=True))
        return values


def hand_model(
    stages: list[HandStage],
    make_inputs: Callable[[int], dict[str, Tensor]],
    *,
    shared: tuple[SharedParameter, ...] = (),
    outputs: Any = "loss",
    loss: str | None = "loss",
) -> HandModel:
    """Makes the plan of hand-written stages; shapes are seen in one forward."""
    model = HandModel(None, tuple(stages), make_inputs)  # type: ignore[arg-type]
    torch.manual_seed(7)
    values = model.forward([stage.build().double() for stage in stages], make_inputs(0))
    specs = {name: _spec(name, value) for name, value in values.items() if name != "target"}
    model_inputs = [name for name in make_inputs(0) if name != "target"]
    made = [
        stage_by_hand(j, stage.inputs, stage.outputs, draws_random=stage.draws_random)
        for j, stage in enumerate(stages)
    ]
    plan = plan_by_hand(
        "hand",
        sizes={"batch": BATCH},
        inputs=tuple(specs[name] for name in model_inputs),
        values=tuple(specs.values()),
        outputs=outputs,
        loss=loss,
        stages=connected(made, specs),
        shared=shared,
    )
    return replace(model, plan=plan)


def _spec(name: str, value: Tensor) -> TensorSpec:
    shape = tuple("batch" if d == 0 and n == BATCH else n for d, n in enumerate(value.shape))
    return TensorSpec(name, str(value.dtype).removeprefix("torch."), shape, value.requires_grad)


class Block(nn.Module):
    """Linear, tanh; optionally BatchNorm before and dropout after."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # x @ matrix: its backward reads the weight itself, as nn.Linear's does not.
        return self.dropout(torch.tanh(self.linear(self.norm(x)) @ self.matrix))


class Loss(nn.Module):
    """A block and the mean squared error against a target that is a model input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.block = Block(**options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.block(x) - y).square().mean()


def regression(index: int) -> dict[str, Tensor]:
    """Inputs x and y of micro-batch `index`."""
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)}


def chain(stages: int, *, norm: bool = False, dropout: float = 0.0) -> HandModel:
    """Blocks in a row; with BatchNorm in each and dropout in each but the second, if wanted."""

    def options(j: int) -> dict[str, Any]:
        return {"norm": norm, "dropout": 0.0 if j == 1 else dropout}

    def names(j: int) -> tuple[str, ...]:
        return ("x",) if j == 0 else (f"h{j}",)

    blocks = [
        HandStage(
            lambda j=j: Block(**options(j)),
            names(j),
            (f"h{j + 1}",),
            draws_random=options(j)["dropout"] > 0,
        )
        for j in range(stages - 1)
    ]
    last = HandStage(
        lambda: Loss(**options(stages - 1)),
        (*names(stages - 1), "y"),
        ("loss",),
        draws_random=options(stages - 1)["dropout"] > 0,
    )
    return hand_model([*blocks, last], regression)


class Fork(nn.Module):
    """One block, four results: a skip, an integer tensor, a mask, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = self.block(x)
        return h, h.detach().argsort(1), h.detach() > 0, (h * 2).sum()


class Gather(nn.Module):
    """A block over reordered columns."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.25)

    def forward(self, h: Tensor, order: Tensor) -> Tensor:
        return self.block(h.gather(1, order))


class Join(nn.Module):
    """Masks and adds what came by a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, g: Tensor, h: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, self.block(g), h)


class SkipLoss(nn.Module):
    """A loss that reads a skip over all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.25)

    def forward(self, j: Tensor, h: Tensor, y: Tensor) -> Tensor:
        return (self.block(j) + h - y).square().mean()


def skips() -> HandModel:
    """Four stages with skips to non-neighbours, integer and bool boundaries, a tensor for three
    readers, an unused output, and random numbers drawn at stages 1 and 3."""
    return hand_model(
        [
            HandStage(Fork, ("x",), ("h", "order", "mask", "unread")),
            HandStage(Gather, ("h", "order"), ("g",), draws_random=True),
            HandStage(Join, ("g", "h", "mask"), ("j",)),
            HandStage(SkipLoss, ("j", "h", "y"), ("loss",), draws_random=True),
        ],
        regression,
    )


class Pass(nn.Module):
    """A block; its second result is its input, passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(h), h


class PassLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, g: Tensor, passed: Tensor, y: Tensor) -> Tensor:
        return (self.block(g) * passed - y).square().mean()


def passing() -> HandModel:
    """A stage that returns its own input in addition to its result."""
    return hand_model(
        [
            HandStage(Block, ("x",), ("h",)),
            HandStage(Pass, ("h",), ("g", "passed")),
            HandStage(PassLoss, ("g", "passed", "y"), ("loss",)),
        ],
        regression,
    )


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Head(nn.Module):
    """Logits by the embedding's own table, and their cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = nn.Linear(WIDTH, 6, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(self.block(x))
        return nn.functional.cross_entropy(logits, labels), logits


def tokens(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2000 + index)
    ids = torch.randint(0, 6, (2, BATCH), generator=generator)
    return {"tokens": ids[0], "labels": ids[1]}


def tied(stages: int = 3) -> HandModel:
    """An embedding at the first stage whose table is also the head's at the last."""
    middle = [HandStage(Block, (f"h{j}",), (f"h{j + 1}",)) for j in range(1, stages - 1)]
    return hand_model(
        [
            HandStage(Embed, ("tokens",), ("h1",)),
            *middle,
            HandStage(Head, (f"h{stages - 1}", "labels"), ("loss", "logits")),
        ],
        tokens,
        shared=(
            SharedParameter(
                ("table.weight", "out.weight"), ((0, "table.weight"), (stages - 1, "out.weight"))
            ),
        ),
        outputs={"loss": "loss", "logits": "logits"},
    )


def without_loss(stages: int = 2) -> HandModel:
    """Blocks in a row whose model output is a prediction; the loss is a criterion's."""

    def inputs(index: int) -> dict[str, Tensor]:
        values = regression(index)
        return {"x": values["x"], "target": values["y"]}

    return hand_model(
        [HandStage(Block, ("x",) if j == 0 else (f"h{j}",), (f"h{j + 1}",)) for j in range(stages)],
        inputs,
        outputs=f"h{stages}",
        loss=None,
    )
