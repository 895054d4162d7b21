"""Random modules, cut and compared with themselves until the time is up: none may be wrong.

A seed makes a Python file with a module whose forward is a random sequence of what authors write:
layers, views, in-place changes, decisions by sizes, by modes and by values, random numbers of
torch, Python and NumPy, loops over containers, changed state, tied parameters, custom autograd
functions, checkpoints. Every operation leaves only valid tensors, so most modules run; modules that
cannot train by themselves, or whose results differ for equal seeds, are not counted. The others are
cut into two and into four stages, and judged by `trials.judge` at four sizes in both modes.

    python benchmarks/random_modules.py --minutes 60
    python benchmarks/random_modules.py --show 17         the module of seed 17
    python benchmarks/random_modules.py --seeds 17 18     these, with the whole traceback
"""

import argparse
import functools
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from machine import write_result
from torch import nn
from trials import OUTCOMES, Case, Inputs, judge, outcome, quiet, sentence, trains
from workers import Died, each

CAPTURED = 4
BATCH = 20  # seeds between two writings of the result
SIZES = (4, 2, 7, 17)  # the first is the captured one
TOKENS = 6
WIDTH = 8
HEADER = '''\
import collections
import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Doubled(torch.autograd.Function):
    """A function whose backward differs from the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x.cos()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        if self.training:
            return x + self.scale * torch.randn_like(x)
        return x * (1 + self.scale)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


Pair = collections.namedtuple("Pair", "left right")
'''


@dataclass
class Author:
    """Writes one module: `made` are lines of __init__, `body` those of forward.

    Every live value is a float tensor (batch, TOKENS, WIDTH) under a name in `live`.
    """

    random: random.Random
    made: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=lambda: ["x"])
    count: int = 0

    def name(self, stem: str = "h") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def pick(self) -> str:
        return self.random.choice(self.live[-4:])

    def module(self, constructor: str, stem: str = "m") -> str:
        name = self.name(stem)
        self.made.append(f"self.{name} = {constructor}")
        return f"self.{name}"

    def say(self, *lines: str) -> None:
        self.body += lines

    def new(self, expression: str) -> str:
        """A new live value, sometimes under the name of an old one."""
        again = len(self.live) > 1 and self.random.random() < 0.3
        name = self.random.choice(self.live[1:]) if again else self.name()
        self.say(f"{name} = {expression}")
        self.live = [other for other in self.live if other != name] + [name]
        return name

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)


OPERATIONS: list[Callable[[Author], None]] = []
# What is often refused, so that most modules get further than that.
RARE = {"by_value": 0.2, "at_random": 0.5, "by_size": 0.5}


def operation(write: Callable[[Author], None]) -> Callable[[Author], None]:
    OPERATIONS.append(write)
    return write


@operation
def layer(author: Author) -> None:
    kind = author.one(
        f"nn.Linear({WIDTH}, {WIDTH})",
        f"nn.LayerNorm({WIDTH})",
        f"nn.BatchNorm1d({TOKENS})",
        "nn.Dropout(0.3)",
        f"Block({WIDTH})",
        "Gate()",
        f"Attention({WIDTH}, 2)",
        f"nn.Sequential(nn.Linear({WIDTH}, 5), nn.ReLU(inplace=True), nn.Linear(5, {WIDTH}))",
        f"nn.Conv1d({TOKENS}, {TOKENS}, 3, padding=1)",
        f"nn.GRU({WIDTH}, {WIDTH}, batch_first=True)",
        f"nn.Embedding(11, {WIDTH})",
    )
    module, value = author.module(kind), author.pick()
    if "GRU" in kind:
        author.new(f"{module}({value})[0]")
    elif "Embedding" in kind:
        author.new(f"{value} + {module}(tokens)")
    else:
        author.new(f"{module}({value})")


@operation
def arithmetic(author: Author) -> None:
    a, b = author.pick(), author.pick()
    author.new(
        author.one(
            f"{a} + {b}",
            f"{a} * torch.sigmoid({b})",
            f"torch.where({a} > 0, {a}, 0.1 * {b})",
            f"F.gelu({a})",
            f"{a}.softmax(-1) @ {b}.mT @ {b}",
            f"torch.einsum('btc,bsc->bts', {a}, {b}).softmax(-1) @ {b}",
            f"{a}.cumsum(1) / 4",
            f"{a}.sort(-1).values",
            f"{a}.gather(2, {b}.argsort(-1))",
            f"({a} - {a}.mean(0, keepdim=True)) * 0.5",
            f"{a}.to(torch.float64).tanh().to({b}.dtype)",
            f"torch.stack([{a}, {b}]).mean(0)",
            f"torch.lerp({a}, {b}, 0.3)",
            f"Doubled.apply({a})",
            f"({a}.clone().requires_grad_(True) if not {a}.requires_grad else {a}) * 1.5",
        )
    )


@operation
def view(author: Author) -> None:
    a = author.pick()
    half = WIDTH // 2
    author.new(
        author.one(
            f"{a}.view({a}.size(0), -1).view({a}.size(0), {TOKENS}, {WIDTH})"
            if author.random.random() < 0.3
            else f"{a}.reshape(-1, {WIDTH}).reshape({a}.shape)",
            f"{a}.transpose(1, 2).contiguous().transpose(1, 2)",
            f"torch.cat([{a}[..., {half}:], {a}[..., :{half}]], dim=-1)",
            f"torch.cat({a}.chunk(2, dim=1)[::-1], dim=1)",
            f"{a}.flip(1)",
            f"{a}.roll(1, dims=0)",
            f"{a}[:, :1].expand(-1, {TOKENS}, -1)",
            f"{a}.unsqueeze(1).repeat(1, 2, 1, 1).mean(1)",
            f"{a}.unflatten(2, (2, {half})).flatten(2)",
            f"torch.stack({a}.unbind(1), dim=1)",
            f"{a}[{a}.new_zeros({a}.shape[0], dtype=torch.long)]",
            f"{a}.permute(2, 0, 1).movedim(0, 2)",
        )
    )


@operation
def in_place(author: Author) -> None:
    a = author.new(f"{author.pick()}.clone()")
    part = author.name("part")
    author.say(
        *author.one(
            [f"{a} += 1"],
            [f"{a}.mul_(0.5)"],
            [f"{part} = {a}[:, :2]", f"{part} *= 2"],
            [f"{a}[:, 0] = 0"],
            [f"{part} = {a}.view(-1)", f"{part}.add_(0.1)"],
            [f"{a}[{a} > 1] = 1.0"],
            [f"{a}.masked_fill_({a} < -1, -1.0)"],
            [f"{part} = {a}.transpose(1, 2)", f"{part}[:, 1] = {part}[:, 0] * 2"],
            [f"{a}[:, 1:] += {a}[:, :-1].clone()"],
            [f"F.relu({a}, inplace=True)"],
            [f"{a}.copy_({a} * {author.pick()})"],
            [f"{a}.index_add_(1, torch.tensor([0, 1]), {a}[:, 2:4].clone())"],
            [f"for {part} in {a}.unbind(1)[:2]:", f"    {part}.mul_(0.9)"],
            [f"{part} = {a}[..., ::2]", f"{a} = {a} + 1", f"{part} += 1"],
        )
    )


@operation
def by_size(author: Author) -> None:
    a, number = author.pick(), author.one(2, 3, 5, 8, 12)
    size = author.one("x.shape[0]", "len(x)", "tokens.size(0)", "batch")
    name = author.name("n")
    author.say(
        *author.one(
            [f"if {size} > {number}:", f"    {a} = {a} * 2"],
            [f"{name} = min({size}, {number})", f"{a} = {a} * {name}"],
            [f"{name} = int(0.7 * {size}) + 1", f"{a} = {a} + {a}[:{name}].mean(0)"],
            [f"{a} = {a} / {size}"],
            [f"{a} = {a} / math.sqrt({size})"],
            [f"{a} = {a} * float({size})"],
            [f"{name} = math.ceil({size} / {number})", f"{a} = torch.cat({a}.chunk({name}))"],
            [f"{name} = max(1, {size} // {number})", f"{a} = torch.cat({a}.split({name}))"],
            [f"{a} = {a} * torch.arange({size}).view(-1, 1, 1)"],
            [f"{a} = {a} * (1 if {size} % 2 == 0 else 3)"],
            [f"{name} = range({size})", f"{a} = torch.stack([{a}[i] for i in {name}])"],
            [f"{a} = {a} + ({size} if {size} < {number} else {number})"],
            [f"{a} = {a} * torch.tensor({size}, dtype={a}.dtype)"],
            [f"{a} = {a}[:{number}].mean(0) + {a}"],
            [f"{name} = {size} - {number}", f"{a} = {a} + {name}"],
            [f"{name} = round({size} * 0.4)", f"{a} = {a} + {name}"],
            [f"{a} = F.pad({a}, (0, 0, 0, 0, 0, (-{size}) % {number}))[:{size}]"],
            [f"while {size} > {number}:", f"    {a} = {a} + 1", "    break"],
        )
    )


@operation
def by_mode(author: Author) -> None:
    a = author.pick()
    zero = author.module("nn.Parameter(torch.zeros(1))", "gate")
    other = author.module(f"nn.Linear({WIDTH}, {WIDTH})")
    author.say(
        *author.one(
            ["if self.training:", f"    {a} = {a} + {zero} * torch.randn_like({a})"],
            ["if self.training:", f"    {a} = {a} * 2", "else:", f"    {a} = {other}({a})"],
            [f"{a} = F.dropout({a}, 0.2, self.training)"],
            [f"{a} = F.dropout({a}, 0.2 if self.training else 0.0)"],
            [f"{a} = {a} * (0.5 if self.training else 1.0)"],
            ["if not self.training:", f"    {a} = {a} + {zero} * {other}({a})"],
            [f"{a} = F.dropout({a}, training=self.training and {a}.requires_grad)"],
            ["if torch.is_grad_enabled():", f"    {a} = {a} + {zero}"],
        )
    )


@operation
def by_value(author: Author) -> None:
    a = author.pick()
    author.say(
        *author.one(
            [f"if {a}.sum() > 0:", f"    {a} = {a} * 2"],
            [f"if bool(({a} > 3).any()):", f"    {a} = {a}.clamp(max=3)"],
            [f"{a} = {a} * {a}.detach().abs().max().item()"],
            [f"{a} = {a} + int(tokens.max())"],
            ["if tokens.min().item() >= 0:", f"    {a} = {a} + 1"],
            [f"assert {a}.isfinite().all()"],
        )
    )


@operation
def at_random(author: Author) -> None:
    a = author.pick()
    other = author.module(f"nn.Linear({WIDTH}, {WIDTH})")
    blocks = author.module(f"nn.ModuleList([Block({WIDTH}) for _ in range(2)])")
    name = author.name("left")
    author.say(
        *author.one(
            [f"{a} = {a} + 0.1 * torch.rand_like({a})"],
            [f"{a} = {a} * torch.bernoulli(torch.full_like({a}, 0.8))"],
            [f"{a} = {a}[torch.randperm({a}.size(0))]"],
            [f"{a} = {a} + torch.randn({a}.shape[0], 1, 1)"],
            ["if random.random() < 0.5:", f"    {a} = {other}({a})"],
            ["if self.training and random.random() < 0.3:", f"    {a} = {a} * 2"],
            [f"{a} = {a} * random.choice([0.5, 1.0, 2.0])"],
            [f"{a} = {a} * np.random.rand()"],
            [f"{a} = {a} * float(np.random.beta(1.0, 1.0))"],
            [f"{a} = {a} * random.uniform(0.5, 1.5)"],
            [f"{a} = {a} * torch.empty(1).uniform_(0.5, 1.5)"],
            [f"{a} = {a} * torch.rand(())"],
            [f"{a} = {a} + {a}[:, random.randrange({TOKENS})].unsqueeze(1)"],
            [f"{a} = {a}.clone()", f"{a}[:, np.random.randint({TOKENS})] *= 2"],
            [f"{a} = {a} * 1", "if random.random() < 0.5:", f"    {a}[..., :2].mul_(2)"],
            [f"{name} = torch.rand(2) < 0.5", f"if all({name}):",
             f"    {name}[random.randrange(2)] = False",
             f"for block, skipped in zip({blocks}, {name}):", "    if not skipped:",
             f"        {a} = block({a})"],
        )
    )  # fmt: skip


@operation
def container(author: Author) -> None:
    a, b = author.pick(), author.pick()
    name = author.name("c")
    blocks = author.module(f"nn.ModuleList([Block({WIDTH}) for _ in range({author.one(2, 3)})])")
    parts = author.module(
        f"nn.ModuleDict({{'one': nn.Linear({WIDTH}, {WIDTH}), 'two': nn.LayerNorm({WIDTH})}})"
    )
    weights = author.module("nn.ParameterList([nn.Parameter(torch.randn(1)) for _ in range(3)])")
    author.say(
        *author.one(
            [f"for {name} in {blocks}:", f"    {a} = {name}({a})"],
            [f"for i, {name} in enumerate({blocks}):", f"    {a} = {name}({a}) * (i + 1)"],
            [f"for {name} in {parts}.values():", f"    {a} = {name}({a}) + {b}"],
            [f"{name} = {{'a': {a}, 'b': {b}}}", f"{a} = {name}['a'] + {name}.get('b')"],
            [f"{name} = Pair({a}, {b})", f"{a} = {name}.left * {name}.right.tanh()"],
            [f"{name} = [{a}]", f"{name}.append({name}[-1] + 1)", f"{a} = sum({name})"],
            [f"{name} = []", f"for block in {blocks}:", f"    {a} = block({a})",
             f"    {name}.append({a})", f"{a} = torch.stack({name}).amax(0)"],
            [f"for {name} in {weights}:", f"    {a} = {a} * {name}"],
            [f"{a}, {name} = (lambda u, v: (u + v, u - v))({a}, {b})", f"{a} = {a} + {name}"],
            [f"for {name} in range(2):", f"    if {name} == 1:", "        continue",
             f"    {a} = {a} + {name} + 1"],
            [f"for {name} in reversed({blocks}):",
             f"    {a} = checkpoint({name}, {a}, use_reentrant=False)"],
        )
    )  # fmt: skip


@operation
def state(author: Author) -> None:
    a = author.pick()
    name = author.name("s")
    author.made.append(f"self.register_buffer('{name}', torch.zeros({WIDTH}))")
    count = author.name("count")
    author.made.append(f"self.register_buffer('{count}', torch.zeros((), dtype=torch.long))")
    weight = author.name("w")
    author.made.append(f"self.{weight} = nn.Parameter(torch.ones({WIDTH}))")
    mean = f"{a}.detach().mean((0, 1))"
    author.say(
        *author.one(
            [f"self.{name}.mul_(0.9).add_({mean}, alpha=0.1)", f"{a} = {a} - self.{name}"],
            ["if self.training:", f"    self.{name}.copy_({mean})", f"{a} = {a} + self.{name}"],
            [f"self.{count} += 1", f"{a} = {a} / self.{count}"],
            [f"self.{name} = self.{name} * 0.5 + {mean}", f"{a} = {a} + self.{name}"],
            ["with torch.no_grad():", f"    self.{weight}.mul_(0.99)",
             f"{a} = {a} * self.{weight}"],
            [f"{a} = {a} * self.{weight}", f"self.{name}.zero_()"],
            ["with torch.no_grad():", f"    {name} = {a} * 2", f"{a} = {a} + {name}"],
            [f"{a} = {a}.detach() + {a} * self.{weight}"],
            [f"self.last = {a}.detach()", f"{a} = {a} + self.last"],
            [f"{a} = {a} + self.{name}.sum()"],
        )
    )  # fmt: skip


@operation
def tied(author: Author) -> None:
    a = author.pick()
    first = author.module(f"nn.Linear({WIDTH}, {WIDTH})", "t")
    second = author.module(f"nn.Linear({WIDTH}, {WIDTH})", "t")
    choice = author.one("tie", "twice", "module", "transposed")
    if choice == "tie":
        author.made.append(f"{second}.weight = {first}.weight")
        author.new(f"{second}({first}({a}))")
    elif choice == "twice":
        author.new(f"{first}({first}({a}))")
    elif choice == "module":
        author.made.append(f"{second} = {first}")
        author.new(f"{second}({first}({a}).relu())")
    else:
        author.new(f"{first}({a}) @ {first}.weight + {second}({a})")


@operation
def region(author: Author) -> None:
    a = author.pick()
    inner = author.module(f"nn.Linear({WIDTH}, {WIDTH})")
    name = author.name("r")
    author.say(
        *author.one(
            ["with torch.no_grad():", f"    {name} = {inner}({a})", f"{a} = {a} + {name}"],
            ["with torch.autocast('cpu', dtype=torch.bfloat16):", f"    {name} = {inner}({a})",
             f"{a} = {a} + {name}.float()"],
            [f"{a} = checkpoint(lambda t: {inner}(t).tanh(), {a}, use_reentrant=False)"],
            [f"def {name}(t):", f"    return {inner}(t) * 2", f"{a} = {name}({a})"],
            ["try:", f"    {a} = {inner}({a})", "except ValueError:", "    pass"],
            [f"{a} = {inner}.forward({a})"],
            [f"{a} = F.linear({a}, {inner}.weight.t(), {inner}.bias)"],
            [f"{a} = {a} + torch.tensor([0.5] * {WIDTH})"],
            [f"{a} = {a} + torch.zeros_like({a}).fill_(0.2)"],
            [f"{a} = {a} * torch.full(({a}.shape[0], 1, 1), 0.5)"],
        )
    )  # fmt: skip


def written(seed: int) -> str:
    """The Python file of a seed."""
    author = Author(random.Random(seed))
    weights = [RARE.get(write.__name__, 1.0) for write in OPERATIONS]
    for write in author.random.choices(OPERATIONS, weights, k=author.random.randint(3, 12)):
        write(author)
    head = author.module(f"nn.Linear({WIDTH}, 3)", "head")
    last = author.live[-1]
    author.say(
        *author.one(
            [f"return {head}({last})"],
            [f"return {{'loss': {head}({last}).square().mean(), 'last': {last}}}"],
            [f"return {head}({last}), {author.pick()}"],
            [f"out = {head}({last})", "return out, out.detach()"],
            [f"return {head}({last})[:, -1]"],
            [f"return Pair({head}({last}), {author.pick()})"],
            [f"out = {head}({last})", "return {'a': out, 'again': out, 'best': out.argmax(-1)}"],
        )
    )  # fmt: skip
    lines = [
        "class Module(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in author.made),
        "",
        "    def forward(self, x, tokens):",
        "        batch, length, width = x.shape",
        *(f"        {line}" for line in author.body),
    ]
    return HEADER + "\n\n" + "\n".join(lines) + "\n"


def case_of(seed: int, folder: Path) -> Case:
    path = folder / f"module_{seed}.py"
    path.write_text(written(seed))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    kind: type[nn.Module] = module.Module
    return Case("random", str(seed), kind, tuple(functools.partial(sample, size) for size in SIZES))


def sample(batch: int) -> Inputs:
    source = torch.Generator().manual_seed(batch)
    return {
        "x": torch.randn(batch, TOKENS, WIDTH, generator=source),
        "tokens": torch.randint(0, 11, (batch, TOKENS), generator=source),
    }


def examine(seed: int) -> dict[str, str]:
    """The outcome of a module at each number of stages; `reason` if it is not counted."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        try:
            case = case_of(seed, Path(folder))
            trains(case)
        except Exception as error:
            return {"reason": sentence(error)}
        row = {"2 stages": outcome(judge, case, 2)}
        if not row["2 stages"].startswith(("refused", "unclear")):
            row["4 stages"] = outcome(judge, case, 4)
        return row


def shown(seeds: list[int]) -> None:
    """Judges these modules, with the traceback of each that is not exact."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            case = case_of(seed, Path(folder))
            for stages in (2, 4):
                try:
                    trains(case)
                    judge(case, stages)
                    print(seed, stages, "exact")
                except Exception:
                    traceback.print_exc()


def counted(rows: dict[int, dict[str, str]]) -> dict[str, Any]:
    counts: dict[str, Any] = {"tried": len(rows)}
    counts["train"] = sum("reason" not in row for row in rows.values())
    for stages in ("2 stages", "4 stages"):
        kinds = Counter(row[stages].partition(":")[0] for row in rows.values() if stages in row)
        counts[stages] = {kind: kinds[kind] for kind in OUTCOMES}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--show", type=int)
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(written(arguments.show))
        return
    if arguments.seeds:
        shown(arguments.seeds)
        return
    rows: dict[int, dict[str, str]] = {}
    started = time.monotonic()
    for first in range(arguments.first, 10**9, BATCH):
        minutes = round((time.monotonic() - started) / 60, 1)
        if minutes > arguments.minutes:
            break
        seeds = range(first, first + BATCH)
        for seed, answer in each(examine, seeds, processes=arguments.processes, limit_s=900):
            row = {"2 stages": f"traceback: {answer.why}"} if isinstance(answer, Died) else answer
            rows[seed] = row
            others = {key: value for key, value in row.items() if value != "exact"}
            if others and "reason" not in row:
                print(seed, json.dumps(others), flush=True)
        minutes = round((time.monotonic() - started) / 60, 1)
        counts = counted(rows)
        print(f"{minutes} minutes {json.dumps(counts)}", flush=True)
        write_result(
            "random_modules",
            {
                "minutes": minutes,
                "processes": arguments.processes,
                "seeds": [arguments.first, max(rows)],
                "counts": counts,
                "not exact": {
                    seed: row
                    for seed, row in sorted(rows.items())
                    if "reason" not in row and set(row.values()) != {"exact"}
                },
            },
        )


if __name__ == "__main__":
    main()
