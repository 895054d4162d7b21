"""Optimizers without what keeps torch's compiler out of them: the same steps, a quicker start."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from asyncpipe.runtime.training.stage_optimizer import uncompiled

KINDS = {
    "sgd": (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adam": (Adam, {"betas": (0.8, 0.9), "fused": True}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
    "adafactor": (Adafactor, {"weight_decay": 0.1}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "nadam": (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
}


def steps(kind: type[Optimizer], **options: object) -> list[Tensor]:
    """The weights after each step, the last ones by an optimizer that took over the state."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]
    seen = []
    optimizer = kind(weights, lr=0.1, **options)
    for number in range(6):
        if number == 3:
            state = optimizer.state_dict()
            optimizer = kind(weights, lr=0.1, **options)
            optimizer.load_state_dict(state)
        if number in (0, 3):
            scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
        optimizer.zero_grad()
        (weights[0] ** 3).sum().backward()
        (weights[1] ** 2).sum().backward()
        optimizer.step()
        scheduler.step()
        seen += [weight.detach().clone() for weight in weights]
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_every_step_has_the_bits_of_torchs_optimizer(name: str) -> None:
    kind, options = KINDS[name]
    expected = steps(kind, **options)
    found = steps(uncompiled(kind), **options)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not torch.equal(expected[0], expected[-2])


def test_it_is_still_an_optimizer_of_its_kind_with_its_hooks() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = uncompiled(AdamW)([weight], lr=0.1)
    assert isinstance(optimizer, AdamW) and type(optimizer).__name__ == "AdamW"
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    weight.sum().backward()
    with torch.enable_grad():
        assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    assert called == ["after"] and not weight.grad_fn


PROGRAM = """
import sys, torch
from torch import nn
from asyncpipe.runtime.executor.stage import backward_from
from asyncpipe.runtime.training.stage_optimizer import StageOptimizer
from asyncpipe.runtime.optimizers.facts import OPTIMIZERS
from asyncpipe.tests.support.run_configs import run_config
for name in OPTIMIZERS:
    stage = nn.Linear(3, 2)
    config = run_config(optimizer=name, lr=0.1, steps=4)
    optimizer = StageOptimizer(stage, config, hidden=[stage.weight])
    stage(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.optimizer.zero_grad()
    optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())
leaf = torch.ones(2, requires_grad=True)
backward_from([3 * leaf], [torch.tensor([1.0, 2.0])])
assert leaf.grad.tolist() == [3.0, 6.0]
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
torch.optim.SGD(stage.parameters(), lr=0.1)
print("torch._dynamo" in sys.modules)
"""


def test_a_rank_that_steps_does_not_load_the_compiler_as_torchs_own_would() -> None:
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
