"""References of the staleness methods that correct or delay instead of predicting.

Each is written from its paper's formula over a stage's snapshots, in the order of operations of
that formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from asyncpipe.tests.support.oracles.async_simulation import (
    LiveReference,
    Reference,
    StageHistory,
    Values,
    tau_of,
)

State = Mapping[str, Any]


class Together(Reference):
    """Several methods at once: the first says which weights are read."""

    def __init__(self, *parts: Reference) -> None:
        self.parts = parts

    def version(self, history: StageHistory, t: int) -> int:
        return self.parts[0].version(history, t)

    def forward(self, history: StageHistory, t: int, at: int, now: int) -> Values:
        return self.parts[0].forward(history, t, at, now)

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        return self.parts[0].backward(history, t, at, now, repeats)

    def gradient(
        self, history: StageHistory, gradient: Values, read: Values, at: int, now: int
    ) -> Values:
        for part in self.parts:
            gradient = part.gradient(history, gradient, read, at, now)
        return gradient

    def sent(self, history: StageHistory, gradient: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            gradient = part.sent(history, gradient)
        return gradient

    def rate(self, history: StageHistory, version: int, name: str) -> float:
        factor = 1.0
        for part in self.parts:
            factor *= part.rate(history, version, name)
        return factor

    def before_step(self, history: StageHistory, module: nn.Module) -> None:
        for part in self.parts:
            part.before_step(history, module)

    def after_step(
        self, history: StageHistory, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        for part in self.parts:
            part.after_step(history, module, optimizer)


class TwoBufferedReference(Reference):
    """`2bw`: window b reads version b - 1, window 0 version 0."""

    def version(self, history: StageHistory, t: int) -> int:
        return max(0, t // history.step_every - 1)


class PipeMareReference(LiveReference):
    """`pipemare`: the backward reads w - horizon delta, delta an average of the last steps."""

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        weights, delta = history.weights[now], history.notes.get("delta")
        if now == at or delta is None:
            return weights
        return {n: w - (now - at) * delta[n] for n, w in weights.items()}

    def after_step(
        self, history: StageHistory, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        if not history.ahead:
            return
        gamma = 0.135 ** (1 / (history.ahead / history.step_every))
        old = history.weights[-1]
        delta = history.notes.setdefault("delta", {n: torch.zeros_like(w) for n, w in old.items()})
        for name, weight in module.named_parameters():
            moved = weight.detach() - old[name]
            delta[name] = gamma * delta[name] + (1 - gamma) * moved


class PipeMareRateReference(Reference):
    """`pipemare-rate`: lr / tau^(1 - min(step / K, 1))."""

    def __init__(self, annealing_steps: int) -> None:
        self.annealing_steps = annealing_steps

    def rate(self, history: StageHistory, version: int, name: str) -> float:
        delay, step = tau_of(history, version, name), version - 1
        return 1 / delay ** (1 - min(step / self.annealing_steps, 1)) if delay > 1 else 1.0


class DelayRateReference(Reference):
    """`delay-rate`: lr / (1 + tau)."""

    def rate(self, history: StageHistory, version: int, name: str) -> float:
        return 1 / (1 + tau_of(history, version, name))


class DelayCompensatedReference(Reference):
    """`dc-asgd`: G + lambda G G (w - w_f) of a micro-batch's own gradient G."""

    adaptive = False

    def gradient(
        self, history: StageHistory, gradient: Values, read: Values, at: int, now: int
    ) -> Values:
        if at == now:
            return gradient
        live, k = history.weights[now], history.of_step
        corrected = {}
        for name, share in gradient.items():
            own, strength = share * k, torch.tensor(0.04, dtype=share.dtype)
            if self.adaptive:
                mean = history.notes.get(name, torch.zeros_like(own))
                history.notes[name] = mean = 0.95 * mean + 0.05 * own**2
                strength = 2 / torch.sqrt(mean + 1e-7)
            corrected[name] = (own + strength * own * own * (live[name] - read[name])) / k
        return corrected


class AdaptivelyCompensatedReference(DelayCompensatedReference):
    """`dc-asgd-adaptive`: lambda = 2 / sqrt(MS + 1e-7)."""

    adaptive = True


class GapAwareReference(Reference):
    """`gap-aware` as FTPipe has it, of a constant learning rate.

    A weight that several stages hold decays whole.
    `notes` of a weight: "r", its running square, and "n", how often that was updated; "kept" is
    the sum of (1 - penalty) / penalty over the window's micro-batches.
    """

    def gradient(
        self, history: StageHistory, gradient: Values, read: Values, at: int, now: int
    ) -> Values:
        if at == now:
            return gradient
        corrected = {}
        for name, share in gradient.items():
            penalty = self.penalty(history, name, share, read, now)
            kept = history.notes.setdefault(("kept", name), torch.zeros_like(share))
            kept += (1 - penalty) / penalty
            corrected[name] = share / penalty
        return corrected

    def penalty(
        self, history: StageHistory, name: str, share: torch.Tensor, read: Values, now: int
    ) -> torch.Tensor:
        gap = (read[name] - history.weights[now][name]).abs()
        return 1 + gap / self.size(history, name, share)

    def size(self, history: StageHistory, name: str, share: torch.Tensor) -> torch.Tensor:
        options, notes = history.options[name], history.notes
        has_stepped = ("r", name) in notes
        if not has_stepped and ("betas" in options or options["momentum"]):
            return torch.full_like(share, torch.inf)
        if "betas" in options:
            bias = 1 - options["betas"][1] ** notes["n", name]
            return torch.sqrt(notes["r", name] / bias) + 1e-8
        if options["momentum"]:
            return options["lr"] * (
                torch.sqrt(notes["r", name] / (1 - 0.999 ** notes["n", name])) + 1e-8
            )
        memory = 0.999 ** (1 / history.step_every)
        self._update(history, name, share * history.step_every, memory)
        bias = 1 - memory ** notes["n", name]
        return options["lr"] * (torch.sqrt(notes["r", name] / bias) + 1e-8)

    def before_step(self, history: StageHistory, module: nn.Module) -> None:
        for name, weight in module.named_parameters():
            kept = history.notes.pop(("kept", name), None)
            options = history.options[name]
            if kept is None or weight.grad is None or not options["weight_decay"]:
                continue
            if name in history.shared:
                continue
            mean = kept / history.of_step
            if options.get("decoupled_weight_decay"):
                # The optimizer will decay the weight whole.
                decay = options["weight_decay"] * options["lr"]
                weight.data.mul_((1 - decay * (1 + mean)) / (1 - decay))
            else:
                weight.grad += options["weight_decay"] * weight.detach() * mean

    def after_step(
        self, history: StageHistory, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        for name, weight in module.named_parameters():
            options, state = history.options[name], optimizer.state.get(weight)
            if weight.grad is None or state is None:
                continue
            if "betas" in options:
                beta1, beta2 = options["betas"]
                t = float(state["step"])
                denominator = torch.sqrt(state["exp_avg_sq"] / (1 - beta2**t)) + options["eps"]
                step = options["lr"] / (1 - beta1**t) * state["exp_avg"] / denominator
                self._update(history, name, step, beta2)
            elif options["momentum"]:
                self._update(history, name, state["momentum_buffer"], 0.999)

    def _update(self, history: StageHistory, name: str, value: torch.Tensor, memory: float) -> None:
        notes = history.notes
        before = notes.get(("r", name), torch.zeros_like(value))
        notes["r", name] = memory * before + (1 - memory) * value**2
        notes["n", name] = notes.get(("n", name), 0) + 1


class GapAwareActivationsReference(GapAwareReference):
    """`gap-aware-activations`: the mean penalty of the stage divides what it sends."""

    def gradient(
        self, history: StageHistory, gradient: Values, read: Values, at: int, now: int
    ) -> Values:
        penalties = [torch.ones(1)]
        if at != now and gradient:
            penalties = [
                self.penalty(history, name, share, read, now).flatten()
                for name, share in gradient.items()
            ]
        history.notes["mean penalty"] = torch.cat(penalties).mean()
        return gradient

    def sent(self, history: StageHistory, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / history.notes["mean penalty"]


class WholeDecayReference(GapAwareReference):
    """`gap-aware` without a stash: decoupled decay is whole."""

    def before_step(self, history: StageHistory, module: nn.Module) -> None:
        if any(options.get("decoupled_weight_decay") for options in history.options.values()):
            return
        super().before_step(history, module)


class GapAwareLossReference(GapAwareReference):
    """`gap-aware-loss`: the backward's second forward reads live weights."""

    def backward(
        self, history: StageHistory, t: int, at: int, now: int, repeats: bool
    ) -> Values | None:
        return history.weights[now] if repeats else None


class LookAheadReference(Reference):
    """Error feedback's other form: base weights y, and passes at y - tau u of the last step u.

    The module holds x = y - tau u, and y is `notes["y"]`; the optimizer's step from x tells u.
    """

    def __init__(self, *, two_buffered: bool = False) -> None:
        self.two_buffered = two_buffered

    def after_step(
        self, history: StageHistory, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        version = len(history.weights)
        base = history.notes.setdefault("y", dict(history.weights[0]))
        for name, weight in module.named_parameters():
            options, looked = history.options[name], history.weights[-1][name]
            decay = options["weight_decay"] if options.get("decoupled_weight_decay") else 0.0
            lost = options["lr"] * decay * looked
            update = looked - lost - weight.detach()
            delay = tau_of(history, version, name)
            if self.two_buffered:
                delay = float(version > 1)
            base[name] = base[name] - lost - update
            weight.data.copy_(base[name] - delay * update)


class SpikeCompensationReference(Reference):
    """`spike-compensation`: a late gradient makes the moves that it has missed at once."""

    def after_step(
        self, history: StageHistory, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        for name, weight in module.named_parameters():
            delay = tau_of(history, len(history.weights), name)
            if weight.grad is None or not delay:
                continue
            old, options = history.weights[-1][name], history.options[name]
            state, decay = optimizer.state[weight], options["weight_decay"]
            is_muon = "ns_steps" in options
            if is_muon or options.get("decoupled_weight_decay"):
                old, gradient = old * (1 - options["lr"] * decay), weight.grad
            else:
                gradient = weight.grad + decay * old
            if is_muon:
                weight.data.copy_(old - self.of_muon(gradient, state, options, delay))
            elif "betas" in options:
                weight.data.copy_(old - self.of_adam(gradient, state, options, delay))
            else:
                m, v = options["momentum"], state["momentum_buffer"]
                a, b = m**delay, (1 - m**delay) / (1 - m)
                weight.data.copy_(old - options["lr"] * (a * v + b * gradient))

    def of_adam(self, gradient: Tensor, state: State, options: State, delay: float) -> Tensor:
        """lr (b1^D m + (1 - b1^D) g) / (sqrt(s) + eps), with m and s without bias."""
        (beta1, beta2), steps = options["betas"], state["step"].item()
        mean = state["exp_avg"] / (1 - beta1**steps)
        spread = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt() + options["eps"]
        mixed = beta1**delay * mean + (1 - beta1**delay) * gradient
        return options["lr"] * mixed / spread

    def of_muon(self, gradient: Tensor, state: State, options: State, delay: float) -> Tensor:
        """Muon's own step, with the (D + 1)-th power of its momentum where Nesterov has the
        first."""
        kept = options["momentum"] ** (delay + 1)
        mixed = torch.lerp(gradient, state["momentum_buffer"], kept)
        ways = options["ns_coefficients"], options["ns_steps"], options["eps"]
        rows, columns = gradient.shape
        size = max(1, rows / columns) ** 0.5
        direction = _zeropower_via_newtonschulz(mixed, *ways)  # in bfloat16
        return options["lr"] * size * direction.to(gradient.dtype)
