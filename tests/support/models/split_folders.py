"""A generated folder written by hand whose layers tensor ranks share out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from asyncpipe.runtime.plan.plan import Plan, TensorSpec
from asyncpipe.tests.support.models.hand_folders import CLASSES, WIDTH, write_folder
from asyncpipe.tests.support.models.plans import connected, plan_by_hand, stage_by_hand

HIDDEN = 24

_BLOCK = f"""
import torch
from torch import Tensor, nn

from asyncpipe.runtime.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    SplitDropout,
    parallel_input,
    split_module,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm({WIDTH})
        self.up = ColumnLinear({WIDTH}, {HIDDEN}, groups=3)
        self.channels = split_module(nn.BatchNorm1d({HIDDEN}), groups=3)
        self.inner = SplitDropout(0.25, dim=1, groups=3)
        self.down = RowLinear({HIDDEN}, {WIDTH}, groups=3)
        self.outer = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(parallel_input(self.norm(x)))
        return x + self.outer(self.down(self.inner(torch.tanh(self.channels(y)))))
"""


_WITHOUT_NORM = _BLOCK.replace("split_module(nn.BatchNorm1d(", "nn.Identity((")

_POSITIONS, _FEATURES = 4, WIDTH // 4

_BLOCK_OF_POSITIONS = f"""
import torch
from torch import Tensor, nn

from asyncpipe.runtime.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    SplitDropout,
    parallel_input,
    part_of,
    shared_module,
    whole_of,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = shared_module(nn.LayerNorm({_FEATURES}))
        self.up = ColumnLinear({_FEATURES}, {HIDDEN})
        self.inner = SplitDropout(0.25, dim=2)
        self.down = RowLinear({HIDDEN}, {_FEATURES}, sequence=1)
        self.outer = SplitDropout(0.1, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = part_of(x.view(-1, {_POSITIONS}, {_FEATURES}), 1)
        y = self.up(parallel_input(self.norm(x), sequence=1))
        x = x + self.outer(self.down(self.inner(torch.tanh(y))))
        return whole_of(x, dim=1).flatten(1)
"""


def write_split_mlp(
    folder: Path, *, stages: int = 2, batch_norm: bool = True, positions: bool = False
) -> Plan:
    """A residual block with split products and dropout in each of 2 or 4 stages, with a head at the
    end; two blocks in one stage. Replicas have statistics of their own for batch norms, which can
    be left out. With `positions`, a block takes a sample as a sequence, of which each rank has a
    part of the positions between its products."""
    torch.manual_seed(7)
    state, files, specs = {}, {}, []
    width = _FEATURES if positions else WIDTH
    batch_norm = batch_norm and not positions
    block = _BLOCK if batch_norm else _WITHOUT_NORM
    block = _BLOCK_OF_POSITIONS if positions else block
    for j in range(stages):
        own, is_last = range(2) if stages == 1 else range(j, j + 1), j == stages - 1
        lines = ["", "", "class Stage(nn.Module):", "    def __init__(self) -> None:"]
        lines += ["        super().__init__()", "        self.blocks = nn.ModuleDict()"]
        lines += [f"        self.blocks['{index}'] = Block()" for index in own]
        lines += [f"        self.head = nn.Linear({WIDTH}, {CLASSES})"] * is_last
        lines += ["", "    def forward(self, x: Tensor) -> Tensor:"]
        lines += ["        for block in self.blocks.values():", "            x = block(x)"]
        lines += [f"        return {'self.head(x)' if is_last else 'x'}", ""]
        files[f"stage_{j}.py"] = block.lstrip() + "\n".join(lines)
        tensors = _tensors(own, width, head=is_last, batch_norm=batch_norm)
        state |= tensors
        running = tuple(name for name in tensors if "running" in name or "num_" in name)
        specs.append(
            stage_by_hand(
                j,
                inputs=("x" if j == 0 else f"h_{j - 1}",),
                outputs=("logits" if is_last else f"h_{j}",),
                parameters=tuple(name for name in tensors if name not in running),
                buffers=running,
                draws_random=True,
            )
        )
    between = {
        name: TensorSpec(name, "float32", ("batch", WIDTH), True)
        for name in (f"h_{j}" for j in range(stages - 1))
    }
    plan = plan_by_hand(
        "split_mlp",
        sizes={"batch": 4},
        inputs=(TensorSpec("x", "float32", ("batch", WIDTH)),),
        values=(*between.values(), TensorSpec("logits", "float32", ("batch", CLASSES))),
        outputs="logits",
        loss=None,
        criterion="cross_entropy",
        stages=connected(specs, between),
        state_keys=tuple(state),
        tensor_parallel=2,
    )
    write_folder(folder, plan, files, state)
    return plan


def _tensors(blocks: range, width: int, *, head: bool, batch_norm: bool) -> dict[str, torch.Tensor]:
    """The state of the model's modules in some blocks."""
    parts: dict[str, nn.Module] = {}
    for index in blocks:
        parts[f"blocks.{index}.norm"] = nn.LayerNorm(width)
        parts[f"blocks.{index}.up"] = nn.Linear(width, HIDDEN)
        if batch_norm:
            parts[f"blocks.{index}.channels"] = nn.BatchNorm1d(HIDDEN)
        parts[f"blocks.{index}.down"] = nn.Linear(HIDDEN, width)
    if head:
        parts["head"] = nn.Linear(WIDTH, CLASSES)
    return {
        f"{path}.{name}": tensor
        for path, part in parts.items()
        for name, tensor in part.state_dict().items()
    }
