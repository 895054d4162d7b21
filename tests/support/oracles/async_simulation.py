"""Exact single-process references, written without the runtime's executor.

`plain_losses_and_gradients` is the loop over micro-batches that everybody knows. `async_run` is
asynchronous 1F1B as a recurrence over weight snapshots: micro-batch t goes forward at stage j
with version floor(max(0, t - W_j) / k), W_j = p - 1 - j unless `ahead` says otherwise, and backward
when the stage has version floor(t / k); the micro-batches between two multiples of k make one step.
With R replicas, R micro-batches take the place of each, and a step is that of R k micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asyncpipe.runtime.rng import micro_batch_seed
from asyncpipe.tests.support.models.hand_plans import HandModel

Values = dict[str, Tensor]
Optimize = Callable[[Any], torch.optim.Optimizer]
Gradients = dict[tuple[int, str], Tensor]


@dataclass
class StageHistory:
    """The weights and the optimizer's state of a stage, by version; lists begin at version 0.

    `states` has the optimizer's state by parameter name, `options` its options by parameter name.
    """

    stage: int
    stages: int
    ahead: int
    step_every: int
    weights: list[Values]
    states: list[dict[str, dict[str, Any]]]
    options: dict[str, dict[str, Any]]
    shared: dict[str, list[int]] = field(default_factory=dict)
    """How far ahead each holder of a weight that several stages hold runs."""
    segment: int = 0
    """The micro-batches after which the pipeline drains; 0 for never."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Values that a method remembers for this stage."""
    replicas: int = 1
    """The pipelines that share the micro-batches of a step."""

    @property
    def of_step(self) -> int:
        """The micro-batches of a step in all replicas."""
        return self.step_every * self.replicas


class Reference:
    """A staleness method as its paper writes it, over a stage's history; this one is stashing.

    `read` is the version that a forward reads the weights of when nothing is predicted: the live
    one, of the schedule.
    """

    def version(self, history: StageHistory, t: int) -> int:
        return read_version(t, history.ahead, history.step_every, history.segment)

    def forward(self, history: StageHistory, t: int, at: int, now: int) -> Values:
        """The values that the forward of micro-batch t reads, at live version `at`, whose backward
        comes at version `now`."""
        return history.weights[at]

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        """The values that its backward reads, None for those of its forward."""
        return None

    def gradient(
        self, history: StageHistory, gradient: Values, read: Values, at: int, now: int
    ) -> Values:
        """A micro-batch's gradient as it joins those of its window."""
        return gradient

    def sent(self, history: StageHistory, gradient: Tensor) -> Tensor:
        """A micro-batch's gradient of an input, as it goes to the stage that made the input; called
        after `gradient`."""
        return gradient

    def accumulated(self, history: StageHistory, gradients: Values) -> None:
        """Receives the sum of the window's gradients so far, which a prediction may use."""

    def rate(self, history: StageHistory, version: int, name: str) -> float:
        """The factor on the learning rate of a weight in the step that makes `version`."""
        return 1.0

    def before_step(self, history: StageHistory, module: nn.Module) -> None:
        """The window's gradients are in `.grad`."""

    def after_step(
        self, history: StageHistory, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """The optimizer has stepped the module; the window's gradients are still in `.grad`."""


def read_version(t: int, ahead: int, step_every: int, segment: int = 0) -> int:
    """The version that the forward of micro-batch t finds where a stage runs so far ahead."""
    drained = t - t % segment if segment else 0
    return max(drained, t - ahead) // step_every


def tau_of(history: StageHistory, version: int, name: str) -> float:
    """The mean delay of the gradients in the step to `version`, counted one by one; of a weight
    that several stages hold the mean over them, and the steps that their exchange takes."""
    k = history.step_every

    def mean(ahead: int) -> float:
        window = range((version - 1) * k, version * k)
        return sum(t // k - read_version(t, ahead, k, history.segment) for t in window) / k

    if holders := history.shared.get(name):
        return math.ceil(max(holders) / k) + sum(map(mean, holders)) / len(holders)
    return mean(history.ahead)


class LiveReference(Reference):
    """`none`: forwards and backwards read what is live."""

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        return history.weights[now]


REFERENCES: dict[str, type[Reference]] = {"none": LiveReference, "stash": Reference}


@dataclass
class Oracle:
    """The results of an oracle: losses by micro-batch, versions, and the final stages."""

    modules: list[nn.Module]
    losses: dict[int, Tensor] = field(default_factory=dict)
    ledger: set[tuple[int, int, int, int]] = field(default_factory=set)
    histories: list[StageHistory] = field(default_factory=list)
    left_over: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of each tied weight that no step has used, by its first name."""


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
    method: Reference,
    recompute: bool = False,
    seed: int = 0,
    ahead: Sequence[int] | None = None,
    flush_every: int = 0,
    replicas: int = 1,
    fault: str = "",
) -> Oracle:
    """Asynchronous 1F1B of `steps` steps of `step_every` micro-batches, drained at the end, and
    every `flush_every` steps.

    With `replicas`, t counts the micro-batches of each; a step has `step_every` of each, those of
    the first one first. `ahead` are the forwards that each stage runs ahead. With `recompute` every
    stage but the last runs its forward again for the backward. `fault` plants an error, for the
    tests that must then fail.
    """
    p, k, plan = len(modules), step_every, model.plan
    ahead = [p - 1 - j for j in range(p)] if ahead is None else ahead
    optimizers = [one_group_each(optimize(module.parameters())) for module in modules]
    histories = [
        StageHistory(
            j,
            p,
            ahead[j],
            k,
            [_snapshot(module)],
            [{}],
            _options(module, optimizers[j]),
            {
                name: [ahead[each] for each, _ in shared.holders]
                for shared in plan.shared
                for holder, name in shared.holders
                if holder == j
            },
            flush_every * k,
            replicas=replicas,
        )
        for j, module in enumerate(modules)
    ]
    window_sum: list[Values] = [{} for _ in modules]
    tied_sums: dict[tuple[str, int], list[Tensor]] = {}
    oracle = Oracle(modules, histories=histories)
    for turn in range(steps * k * replicas):
        t, replica = divmod(turn, replicas)
        place = t // k * k * replicas + replica * k + t % k
        number = place ^ 1 if fault == "swap two micro-batches" and t in (2, 3) else place
        values: dict[str, Any] = dict(model.make_inputs(number))
        kept = []
        with _generator_of(seed, number):
            for j, stage in enumerate(model.stages):
                at, history = method.version(histories[j], t), histories[j]
                began = torch.get_rng_state(), _untrained(modules[j])
                leaves = _leaves(method.forward(history, t, at, t // k))
                inputs = {n: _cut(values[n]) for n in stage.inputs}
                read = {n: leaf.detach().clone() for n, leaf in leaves.items()}
                outputs = _call(modules[j], stage.outputs, leaves, inputs)
                values.update(outputs)
                kept.append((at, leaves, inputs, outputs, read, began))
        oracle.losses[number] = values[plan.loss].detach()
        arriving: dict[str, list[Tensor]] = {
            plan.loss: [torch.ones_like(values[plan.loss]) / (k * replicas)]
        }
        for j in reversed(range(p)):
            at, leaves, inputs, outputs, read, began = kept[j]
            now, history = t // k, histories[j]
            repeats = recompute and j < p - 1
            reads = method.backward(history, t, at, now, repeats)
            if fault == "new weights in one backward" and (t, j) == (k + 1, 0):
                reads = history.weights[now]
            if repeats:
                leaves = _leaves(read if reads is None else reads)
                with _state_of(began[0]):
                    spare = began[1]
                    outputs = _call(
                        modules[j], model.stages[j].outputs, {**leaves, **spare}, inputs
                    )
            elif reads is not None:
                for name, leaf in leaves.items():
                    leaf.data.copy_(reads[name])
            wanted = [n for n, o in outputs.items() if n in arriving and o.requires_grad]
            cut = {n: x for n, x in inputs.items() if x.requires_grad}
            found = torch.autograd.grad(
                [outputs[n] for n in wanted],
                [*cut.values(), *leaves.values()],
                [_add(arriving[n]) for n in wanted],
                allow_unused=True,
            )
            own = {n: g for n, g in zip(leaves, found[len(cut) :], strict=True) if g is not None}
            if fault == "drop one gradient" and (t, j) == (1, 0):
                own = {}
            for name, gradient in method.gradient(history, own, read, at, now).items():
                before = window_sum[j].get(name)
                window_sum[j][name] = gradient if before is None else before + gradient
            method.accumulated(history, window_sum[j])
            for name, gradient in zip(cut, found, strict=False):
                gradient = torch.zeros_like(inputs[name]) if gradient is None else gradient
                arriving.setdefault(name, []).append(method.sent(history, gradient))
            oracle.ledger.add((j, place, at, now))
        if (turn + 1) % (k * replicas) == 0:
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
                due = tied_sums.pop((shared.names[0], version - late), None)
                for j, name in shared.holders:
                    parameter = modules[j].get_parameter(name)
                    parameter.grad = None if due is None else _left_sum(due)
            for history, module, optimizer in zip(histories, modules, optimizers, strict=True):
                method.before_step(history, module)
                rates = {id(p): method.rate(history, version, n) for n, p in _weights(module)}
                scaled_step(optimizer, rates)
                method.after_step(history, module, optimizer)
                history.weights.append(_snapshot(module))
                history.states.append(_state(module, optimizer))
                method.accumulated(history, {})
    for (name, _), parts in sorted(tied_sums.items()):
        before = oracle.left_over.get(name)
        oracle.left_over[name] = _left_sum(parts if before is None else [before, _left_sum(parts)])
    return oracle


def _call(
    module: nn.Module, names: tuple[str, ...], leaves: Values, inputs: dict[str, Any]
) -> dict[str, Tensor]:
    result = functional_call(module, leaves, tuple(inputs.values()))
    results = result if isinstance(result, tuple) else (result,)
    return dict(zip(names, results, strict=True))


def _leaves(values: Values) -> Values:
    return {name: value.clone().requires_grad_() for name, value in values.items()}


def one_group_each(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with a group of its own for each of its parameters, stepped as before."""
    for part in getattr(optimizer, "parts", (optimizer,)):
        part.param_groups[:] = [
            {**group, "params": [p]} for group in part.param_groups for p in group["params"]
        ]
    if hasattr(optimizer, "parts"):
        optimizer.param_groups[:] = [g for part in optimizer.parts for g in part.param_groups]
    return optimizer


def scaled_step(optimizer: torch.optim.Optimizer, factors: dict[int, float]) -> None:
    """A step at the learning rate times a factor of each weight, by its identity."""
    scheduled = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        (factor,) = {factors[id(weight)] for weight in group["params"]}
        group["lr"] = lr * factor
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = lr


def _options(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in module.named_parameters() if id(p) in of}


def _weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {
        name: {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in optimizer.state[p].items()
        }
        for name, p in module.named_parameters()
        if p in optimizer.state
    }


def _snapshot(module: nn.Module) -> dict[str, Tensor]:
    """The trained parameters; everything else, such as buffers, has only one version."""
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}


def _untrained(module: nn.Module) -> dict[str, Tensor]:
    frozen = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    return frozen | {name: buffer.clone() for name, buffer in module.named_buffers()}


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
    """The default generator as `torch.manual_seed` of the micro-batch's key makes it; that function
    notes the whole stack for devices that are not there, which took a fifth of these tests."""

    def __init__(self, seed: int, micro_batch: int) -> None:
        self.key = micro_batch_seed(seed, micro_batch)

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.default_generator.manual_seed(self.key)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.outside)


class _state_of:
    """The default generator in a state that it had before."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.outside)
