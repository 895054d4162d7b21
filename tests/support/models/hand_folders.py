"""Generated folders written by hand: small models for the training loop, without the compiler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.plan.plan import (
    Plan,
    SharedParameter,
    TensorSpec,
)
from asyncpipe.runtime.plan.trust import remember
from asyncpipe.runtime.tensor_files import write_shard
from asyncpipe.tests.support.models.plans import connected, plan_by_hand, stage_by_hand

WIDTH = 16
CLASSES = 4
VOCABULARY = 256
POSITIONS = 64

NORM = tuple(nn.BatchNorm1d(WIDTH).state_dict().items())

FAILING = """
from torch.nn.functional import cross_entropy
calls = 0
def criterion(outputs, target):
    global calls
    calls += 1
    if calls == 10:
        raise ValueError("the tenth call fails")
    return cross_entropy(outputs, target)
"""


class PlainMlp(nn.Module):
    """Four layers with tanh; the loss is a criterion's."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        sizes = [WIDTH] * layers + [CLASSES]
        self.layers = nn.ModuleList(
            nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index + 1 < len(self.layers):
                x = torch.tanh(x)
        return x


class PlainText(nn.Module):
    """A language model with a tied head, that makes its own loss as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(input_ids.shape[1])
        hidden = self.wte(input_ids) + self.wpe(positions)
        logits = self.head(self.norm(torch.relu(self.inner(hidden))))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits


def write_mlp(
    folder: Path,
    *,
    stages: int = 2,
    name: str = "tiny_mlp",
    slow_s: float = 0,
    noisy: bool = False,
) -> Plan:
    """A `PlainMlp` cut into 1, 2 or 4 stages; with `slow_s` every forward sleeps so long. A `noisy`
    one has batch norm and dropout before its second and fourth layer."""
    torch.manual_seed(7)
    model = PlainMlp()
    norms = (
        {f"norms.{index}.{key}": value.clone() for index in (1, 3) for key, value in NORM}
        if noisy
        else {}
    )
    per_stage = 4 // stages
    files, specs = {}, []
    for j in range(stages):
        own = range(j * per_stage, (j + 1) * per_stage)
        lines = [
            "import time",
            "import torch",
            "from torch import nn",
            "",
            "",
            "class Stage(nn.Module):",
        ]
        lines += ["    def __init__(self):", "        super().__init__()"]
        lines += ["        self.layers = nn.Module()"]
        for index in own:
            out = CLASSES if index == 3 else WIDTH
            lines += [f"        self.layers.add_module('{index}', nn.Linear({WIDTH}, {out}))"]
        lines += ["        self.norms = nn.Module()"]
        noises = [index for index in own if noisy and index % 2]
        for index in noises:
            lines += [f"        self.norms.add_module('{index}', nn.BatchNorm1d({WIDTH}))"]
        lines += ["", "    def forward(self, h):", f"        time.sleep({slow_s})"]
        for index in own:
            if index in noises:
                lines += [
                    f"        h = getattr(self.norms, '{index}')(h)",
                    "        h = nn.functional.dropout(h, 0.25, self.training)",
                ]
            call = f"getattr(self.layers, '{index}')(h)"
            lines += [f"        h = {call}" if index == 3 else f"        h = torch.tanh({call})"]
        lines += ["        return h", ""]
        files[f"stage_{j}.py"] = "\n".join(lines)
        names = [f"layers.{index}.{kind}" for index in own for kind in ("weight", "bias")]
        kept = [name for name in norms if int(name.split(".")[1]) in noises]
        running = tuple(name for name in kept if "running" in name or "num" in name)
        names += [name for name in kept if name not in running]
        specs.append(
            stage_by_hand(
                j,
                inputs=("x" if j == 0 else f"h_{j - 1}",),
                outputs=("logits" if j == stages - 1 else f"h_{j}",),
                parameters=tuple(names),
                buffers=running,
                draws_random=bool(noises),
            )
        )
    hidden = [TensorSpec(f"h_{j}", "float32", ("batch", WIDTH), True) for j in range(stages - 1)]
    logits = TensorSpec("logits", "float32", ("batch", CLASSES))
    plan = plan_by_hand(
        name,
        sizes={"batch": 4},
        inputs=(TensorSpec("x", "float32", ("batch", WIDTH)),),
        values=(*hidden, logits),
        outputs="logits",
        loss=None,
        criterion="cross_entropy",
        stages=connected(specs, {spec.name: spec for spec in hidden}),
        state_keys=(*model.state_dict(), *norms),
    )
    write_folder(folder, plan, files, model.state_dict() | norms)
    return plan


_WHOLE_TEXT = f"""
import torch
from torch import nn
from torch.nn import functional as F


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding({VOCABULARY}, {WIDTH})
        self.wpe = nn.Embedding({POSITIONS}, {WIDTH})
        self.inner = nn.Linear({WIDTH}, {WIDTH})
        self.norm = nn.LayerNorm({WIDTH})

    def forward(self, input_ids, labels):
        positions = torch.arange(input_ids.shape[1])
        hidden = torch.relu(self.inner(self.wte(input_ids) + self.wpe(positions)))
        logits = self.norm(hidden) @ self.wte.weight.T
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits
"""


def write_text(folder: Path, *, name: str = "tiny_text", whole: bool = False) -> Plan:
    """A `PlainText` cut into two stages that share the embedding, or the `whole` as one."""
    torch.manual_seed(7)
    model = PlainText()
    first = f"""
import torch
from torch import nn


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding({VOCABULARY}, {WIDTH})
        self.wpe = nn.Embedding({POSITIONS}, {WIDTH})
        self.inner = nn.Linear({WIDTH}, {WIDTH})

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1])
        hidden = self.wte(input_ids) + self.wpe(positions)
        return torch.relu(self.inner(hidden))
"""
    second = f"""
from torch import nn
from torch.nn import functional as F


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm({WIDTH})
        self.head = nn.Linear({WIDTH}, {VOCABULARY}, bias=False)

    def forward(self, hidden, labels):
        logits = self.head(self.norm(hidden))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss, logits
"""
    hidden = TensorSpec("hidden", "float32", ("batch", "sequence", WIDTH), True)
    specs = [
        stage_by_hand(
            0,
            inputs=("input_ids",),
            outputs=("hidden",),
            parameters=("wte.weight", "wpe.weight", "inner.weight", "inner.bias"),
        ),
        stage_by_hand(
            1,
            inputs=("hidden", "labels"),
            outputs=("loss", "logits"),
            parameters=("norm.weight", "norm.bias", "head.weight"),
        ),
    ]
    ids = [TensorSpec(key, "int64", ("batch", "sequence")) for key in ("input_ids", "labels")]
    plan = plan_by_hand(
        name,
        sizes={"batch": 2, "sequence": 32},
        inputs=tuple(ids),
        values=(
            hidden,
            TensorSpec("loss", "float32", ()),
            TensorSpec("logits", "float32", ("batch", "sequence", VOCABULARY)),
        ),
        outputs={"loss": "loss", "logits": "logits"},
        loss="loss",
        stages=connected(specs, {"hidden": hidden}),
        state_keys=tuple(model.state_dict()),
    )
    tied = SharedParameter(("wte.weight", "head.weight"), ((0, "wte.weight"), (1, "head.weight")))
    plan = replace(plan, shared=(tied,))
    state = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    if whole:
        names = (*specs[0].parameters, "norm.weight", "norm.bias")
        spec = stage_by_hand(
            0, inputs=("input_ids", "labels"), outputs=("loss", "logits"), parameters=names
        )
        plan = replace(
            plan,
            stages=connected([spec], {}),
            values=plan.values[1:],
            shared=(replace(tied, holders=((0, "wte.weight"),)),),
        )
        write_folder(folder, plan, {"stage_0.py": _WHOLE_TEXT}, state)
        return plan
    write_folder(folder, plan, {"stage_0.py": first, "stage_1.py": second}, state)
    return plan


def write_folder(
    folder: Path, plan: Plan, files: Mapping[str, str], state: Mapping[str, Tensor]
) -> None:
    """Writes plan, files and weights of a folder, and trusts it."""
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    (folder / "plan.json").write_text(plan.to_json())
    write_shard(folder / "weights", state, 0, 1)
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps({"architectures": ["Handmade"]}))
    remember(folder)


def exact_settings(folder: Path, output: Path, **given: Any) -> Settings:
    """A short run in float64, each step of which is logged."""
    options: dict[str, Any] = {
        "steps": 3,
        "log_every": 1,
        "threads": 1,
        "pin": "none",
        "dtype": "float64",
    }
    return Settings(folder=str(folder), output=str(output), **(options | given))
