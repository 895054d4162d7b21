"""Exact single-process references, written without the runtime's executor.

`plain_losses_and_gradients` is the loop over micro-batches that everybody knows. `async_run` is
asynchronous 1F1B as a recurrence over weight snapshots: micro-batch t goes forward at stage j
with version floor(max(0, t - W_j) / k), W_j = p - 1 - j unless `ahead` says otherwise, and backward
when the stage has version floor(t / k); the micro-batches between two multiples of k make one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asyncpipe.runtime.random_state import micro_batch_seed
from asyncpipe.tests.hand_plans import HandModel

Optimize = Callable[[Any], torch.optim.Optimizer]
Gradients = dict[tuple[int, str], Tensor]


@dataclass
class Oracle:
    """What an oracle saw and made: losses by micro-batch, versions, and the final stages."""

    modules: list[nn.Module]
    losses: dict[int, Tensor] = field(default_factory=dict)
    ledger: set[tuple[int, int, int, int]] = field(default_factory=set)


def plain_losses_and_gradients(
    model: HandModel,
    modules: list[nn.Module],
    micro_batches: range,
    *,
    seed: int = 0,
    criterion: Callable[[Any, Tensor], Tensor] | None = None,
) -> tuple[dict[int, Tensor], Gradients]:
    """Losses, and the gradients of their mean, by the plain loop; gradients are left in `.grad`."""
    losses = {}
    for i in micro_batches:
        inputs = model.make_inputs(i)
        with _generator_of(seed, i):
            values = model.forward(modules, inputs)
        if criterion is None:
            loss = values[model.plan.loss]
        else:
            loss = criterion(values[model.plan.outputs], inputs["target"])
        (loss / len(micro_batches)).backward()
        losses[i] = loss.detach()
    return losses, gradients_of(modules)


def gradients_of(modules: list[nn.Module]) -> Gradients:
    return {
        (j, name): parameter.grad.clone()
        for j, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def async_run(
    model: HandModel,
    modules: list[nn.Module],
    steps: int,
    step_every: int,
    optimize: Optimize,
    *,
    stash: bool,
    seed: int = 0,
    ahead: Sequence[int] | None = None,
    fault: str = "",
) -> Oracle:
    """Asynchronous 1F1B of `steps` steps of `step_every` micro-batches, drained at the end.

    `fault` plants an error, for the tests that must then fail.
    """
    p, k, plan = len(modules), step_every, model.plan
    ahead = ahead or [p - 1 - j for j in range(p)]
    optimizers = [optimize(module.parameters()) for module in modules]
    history = [[_snapshot(module)] for module in modules]
    window_sum: list[dict[str, Tensor]] = [{} for _ in modules]
    tied_sums: dict[tuple[str, int], list[Tensor]] = {}
    oracle = Oracle(modules)
    for t in range(steps * k):
        number = t ^ 1 if fault == "swap two micro-batches" and t in (2, 3) else t
        values: dict[str, Any] = dict(model.make_inputs(number))
        kept = []
        with _generator_of(seed, number):
            for j, stage in enumerate(model.stages):
                at = max(0, t - ahead[j]) // k
                leaves = {n: w.clone().requires_grad_() for n, w in history[j][at].items()}
                inputs = {n: _cut(values[n]) for n in stage.inputs}
                result = functional_call(modules[j], leaves, tuple(inputs.values()))
                results = result if isinstance(result, tuple) else (result,)
                outputs = dict(zip(stage.outputs, results, strict=True))
                values.update(outputs)
                kept.append((at, leaves, inputs, outputs))
        oracle.losses[number] = values[plan.loss].detach()
        arriving: dict[str, list[Tensor]] = {plan.loss: [torch.ones_like(values[plan.loss]) / k]}
        for j in reversed(range(p)):
            at, leaves, inputs, outputs = kept[j]
            now = t // k
            if not stash or (fault == "new weights in one backward" and (t, j) == (k + 1, 0)):
                for name, leaf in leaves.items():
                    leaf.data.copy_(history[j][now][name])
            read = [n for n, o in outputs.items() if n in arriving and o.requires_grad]
            cut = {n: x for n, x in inputs.items() if x.requires_grad}
            sources = [*cut.values(), *leaves.values()]
            found = torch.autograd.grad(
                [outputs[n] for n in read],
                sources,
                [_add(arriving[n]) for n in read],
                allow_unused=True,
            )
            for name, gradient in zip(cut, found, strict=False):
                zeros = torch.zeros_like(inputs[name])
                arriving.setdefault(name, []).append(zeros if gradient is None else gradient)
            for name, gradient in zip(leaves, found[len(cut) :], strict=True):
                if fault == "drop one gradient" and (t, j) == (1, 0):
                    continue
                if gradient is not None:
                    before = window_sum[j].get(name)
                    window_sum[j][name] = gradient if before is None else before + gradient
            oracle.ledger.add((j, t, at, now))
        if (t + 1) % k == 0:
            version = (t + 1) // k
            for shared in plan.shared:
                tied_sums[shared.names[0], version] = [
                    window_sum[j].pop(name) for j, name in shared.holders
                ]
            for j, module in enumerate(modules):
                for name, parameter in module.named_parameters():
                    parameter.grad = window_sum[j].pop(name, None)
            for shared in plan.shared:
                late = math.ceil(max(ahead[j] for j, _ in shared.holders) / k)
                due = tied_sums.get((shared.names[0], version - late))
                for j, name in shared.holders:
                    parameter = modules[j].get_parameter(name)
                    parameter.grad = None if due is None else _left_sum(due)
            for j, optimizer in enumerate(optimizers):
                optimizer.step()
                history[j].append(_snapshot(modules[j]))
    return oracle


def _snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _cut(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.requires_grad else value


def _add(gradients: list[Tensor]) -> Tensor:
    """The later stages' gradients first: they arrived in that order."""
    return _left_sum(gradients)


def _left_sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


class _generator_of:
    """The default generator as `torch.manual_seed` of the micro-batch's key makes it."""

    def __init__(self, seed: int, micro_batch: int) -> None:
        self.key = micro_batch_seed(seed, micro_batch)

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.manual_seed(self.key)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.outside)
