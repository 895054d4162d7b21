"""Methods that correct a late gradient, or the step that uses it.

Gap-aware divides a gradient by the distance of the weights, DC-ASGD adds a Taylor step, spike
compensation and error feedback change the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Adam, Muon
from torch.optim._muon import _adjust_lr

from ..tensor_files import as_real
from .prediction import orthogonal
from .protocol import BackwardReads, StageContext, Staleness, State, VersionPair
from .step_sizes import StepSizes, UpdateRule, at_step, rules, step_sizes
from .weight_versions import Weights, WeightVersions


class GapAware(Staleness):
    """`gap-aware`: late gradients count less, the more the weights have moved.

    Gap-aware (ICLR 2020, section 4; applied to stages as in FTPipe, ATC 2021):

        gap = |w_f - w|                      between the forward's and the live weights, elementwise
        penalty = 1 + gap / C                C: the usual size of a step (`step_sizes.py`)
        g <- g / penalty

    A gap of one usual step halves a gradient. Each micro-batch whose forward read an older version
    than the live one has its own gap; others have penalty 1. The weight decay of a step is
    multiplied by the mean of 1/penalty over the micro-batches of its window: the difference is
    added to the gradient, or given back to the weight before a decoupled decay. A weight that
    several stages hold decays in full, because its gaps differ from stage to stage.

    The gap is measured from the weights that the forward read. Where no method keeps them and no
    gradient is later than one step, it is the last step, known from the optimizer's state: the
    backward reads the live weights, and decoupled decay is not reduced.
    """

    decides = frozenset({"gradient"})
    needs = frozenset({"gap", "known step sizes"})

    def __init__(self) -> None:
        self._sizes: StepSizes | None = None
        self._lost: dict[str, Tensor] = {}
        """Mean of 1/penalty over the window, less one, for weights that decay."""

    def begin(self, context: StageContext) -> None:
        super().begin(context)
        if self._sizes is None and self.optimizer is not None and context.delay:
            assert self.steps is not None
            self._sizes = step_sizes(self.optimizer, self.steps, context.step_every)

    @property
    def corrects_live(self) -> bool:
        return self._sizes is not None and not self.context.keeps_forward

    def state(self, weights: WeightVersions) -> State:
        return {} if self._sizes is None else self._sizes.state(weights.live)

    def load(self, weights: WeightVersions, state: State) -> None:
        if self._sizes is not None:
            self._sizes.load(weights.live, state)

    def kept(self) -> Iterator[Tensor]:
        yield from super().kept()
        if self._sizes is not None:
            yield from self._sizes.squares.values()

    @torch.no_grad()
    def after_backward(
        self, weights: WeightVersions, pair: VersionPair, gradients: Weights
    ) -> None:
        if self._sizes is None or self.optimizer is None:
            return
        rule, is_kept = rules(self.optimizer, weights.live), self.context.keeps_forward
        for name, gradient, penalty in self._penalties(weights, pair, gradients, rule):
            gradient.div_(penalty)
            is_reduced = is_kept or not rule[name].decoupled
            if is_reduced and rule[name].decay and name not in self.context.shared:
                lost = (1 - penalty).div_(penalty).div_(self.context.step_every)
                before = self._lost.get(name)
                self._lost[name] = lost if before is None else before.add_(lost)

    def _penalties(
        self,
        weights: WeightVersions,
        pair: VersionPair,
        gradients: Weights,
        rule: Mapping[str, UpdateRule],
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The gradient and the penalty of each weight that has both, complex ones as real."""
        assert self._sizes is not None
        read = weights.read_by(pair.micro_batch)
        for name, leaf in gradients.items():
            if leaf.grad is None:
                continue
            live = weights.live[name]
            gap = (
                as_real(read[name].sub(live)).abs_()
                if self.context.keeps_forward
                else self._sizes.last_step(live, rule[name])
            )
            if gap is None:
                continue
            # Without any step yet, both are zero.
            gradient = as_real(leaf.grad)
            size = self._sizes.of(live, rule[name], gradient)
            size = size.clamp_(min=torch.finfo(size.dtype).tiny)
            yield name, gradient, gap.div_(size).add_(1)

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        if self._sizes is None or self.optimizer is None:
            yield
            return
        rule = rules(self.optimizer, weights.live)

        @torch.no_grad()
        def act() -> None:
            for name, lost in self._lost.items():
                weight, own = weights.live[name], rule[name]
                if weight.grad is None:
                    continue
                live = as_real(weight)
                if own.decoupled:
                    # The step multiplies by 1 - rate, and all in all 1 - rate (1 + lost) is due.
                    rate = own.lr * own.decay
                    live.sub_(live * lost, alpha=rate / (1 - rate))
                else:
                    as_real(weight.grad).add_(live * lost, alpha=own.decay)
            self._lost.clear()
            sizes.begin(weights.live, rule)

        sizes = self._sizes
        with at_step(self.optimizer, act):
            yield
        with torch.no_grad():
            sizes.end(weights.live, rule)


class GapAwareActivations(GapAware):
    """`gap-aware-activations`: the gradients that a stage sends to the stages before it count less,
    the more its weights have moved; those of its own weights stay as they are.

        g_x <- g_x / mean(penalty)         over all weights of the stage that have gradients

    The gradient of an activation is made with the weights of the forward too. What arrives at a
    stage has the factors of all later stages. The penalty is that of `gap-aware`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._factors: dict[int, Tensor] = {}

    @torch.no_grad()
    def after_backward(
        self, weights: WeightVersions, pair: VersionPair, gradients: Weights
    ) -> None:
        if self._sizes is None or self.optimizer is None:
            return
        rule = rules(self.optimizer, weights.live)
        sums = [
            (penalty.sum(), penalty.numel())
            for *_, penalty in self._penalties(weights, pair, gradients, rule)
        ]
        if numbers := sum(number for _, number in sums):
            total = torch.stack([one for one, _ in sums]).sum()
            self._factors[pair.micro_batch] = numbers / total

    def factor_on_sent(self, pair: VersionPair) -> Tensor | None:
        return self._factors.pop(pair.micro_batch, None)


class GapAwareLoss(GapAware):
    """`gap-aware-loss`: the backward recomputes at live weights; the forward's are kept for the gap
    alone."""

    decides = frozenset({"gradient", "backward"})
    needs = frozenset({"recomputation", "known step sizes"})
    keeps_forward = True

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> BackwardReads:
        return BackwardReads.LIVE


CONSTANT = 0.04
ADAPTIVE, MEMORY, EPSILON = 2.0, 0.95, 1e-7


class DelayCompensated(Staleness):
    """`dc-asgd`: moves a gradient to the live weights by a Taylor step, with one lambda for all
    weights.

    DC-ASGD (ICML 2017, equations 10 and 15):

        g <- g + lambda g g (w - w_f)                     w live, w_f the forward's, all elementwise
        constant    lambda = 0.04
        adaptive    lambda = 2 / sqrt(MS + 1e-7),  MS <- 0.95 MS + 0.05 g g

    g g stands for the Hessian's diagonal, so g is a micro-batch's own gradient, not its share of
    the window's mean. MS averages the gradients of late micro-batches, the current one included.
    """

    decides = frozenset({"gradient"})
    needs = frozenset({"forward weights"})

    @torch.no_grad()
    def after_backward(
        self, weights: WeightVersions, pair: VersionPair, gradients: Weights
    ) -> None:
        read, count = weights.read_by(pair.micro_batch), self.context.micro_batches
        for name, leaf in gradients.items():
            if leaf.grad is None:
                continue
            own = as_real(leaf.grad) * count
            moved = as_real(weights.live[name] - read[name])
            change = self._strength(name, own) * own * own * moved
            as_real(leaf.grad).add_(change.div_(count))

    def _strength(self, name: str, gradient: Tensor) -> Tensor | float:
        return CONSTANT


class AdaptivelyCompensated(DelayCompensated):
    """`dc-asgd-adaptive`: as `dc-asgd`, with a smaller lambda where gradients are large."""

    needs = frozenset({"forward weights", "all gradients"})

    def __init__(self) -> None:
        self._squares: dict[str, Tensor] = {}

    def state(self, weights: WeightVersions) -> State:
        return {"squares": self._squares} if self._squares else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._squares = dict(state["squares"])

    def _strength(self, name: str, gradient: Tensor) -> Tensor:
        mean = self._squares.setdefault(name, torch.zeros_like(gradient))
        mean.mul_(MEMORY).addcmul_(gradient, gradient, value=1 - MEMORY)
        return ADAPTIVE / (mean + EPSILON).sqrt_()


class SpikeCompensation(Staleness):
    """`spike-compensation`: momentum with more weight on the newest gradient.

    Spike compensation (Kosson et al., "Pipelined Backpropagation at Scale", MLSys 2021, section
    3.1), there for SGD:

        sgd        w <- w - lr (a v + b g)                          a = u^D, b = (1 - u^D) / (1 - u)
        adam(w)    w <- w - lr (a m + (1 - a) g) / (sqrt(s) + eps)   a = b1^D, m and s without bias
        muon       w <- w - lr size O(a v + (1 - a) g)               a = u^(D + 1), O orthogonalizes

    With momentum u, a gradient moves the weights by 1, u, u^2, .. of itself in the steps after it.
    A gradient that is D steps late has missed the first D of these moves: their sum is made at its
    first step, and the momentum continues with a of its moves. Nesterov momentum, which Muon has,
    makes one more. D is the mean delay of the gradients of a step (`StageContext.tau`); at 0 the
    step is the optimizer's.
    """

    decides = frozenset({"step"})
    needs = frozenset({"response to gradients"})

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        optimizer, version = self.optimizer, weights.version + 1
        taus = {name: self.context.tau(version, name) for name in weights.live}
        if optimizer is None or not any(taus.values()):
            yield
            return
        rule = rules(optimizer, weights.live)
        before: dict[str, tuple[Tensor, Tensor]] = {}
        rates: dict[str, float] = {}

        @torch.no_grad()
        def remember() -> None:
            for name, weight in weights.live.items():
                if weight.grad is not None and taus[name]:
                    coupled = 0.0 if rule[name].decoupled else rule[name].decay
                    gradient = torch.add(weight.grad, weight, alpha=coupled)
                    before[name] = rule[name].decayed(weight), gradient
                    rates[name] = rule[name].lr

        with at_step(optimizer, remember):
            yield
        with torch.no_grad():
            for name, (start, gradient) in before.items():
                live = weights.live[name]
                move, rate = _late_move(live, gradient, rule[name], taus[name], rates[name])
                live.copy_(start.sub_(move, alpha=rate))


def _late_move(
    weight: Tensor, gradient: Tensor, rule: UpdateRule, delay: float, lr: float
) -> tuple[Tensor, float]:
    """The move of a weight after a step whose gradient is late, as spike compensation makes it, and
    its rate."""
    options, state = rule.options, rule.optimizer.state[weight]
    if isinstance(rule.optimizer, Muon):
        kept = options["momentum"] ** (delay + options["nesterov"])
        direction = gradient.lerp(state["momentum_buffer"], kept)
        return orthogonal(direction, options), _adjust_lr(lr, options["adjust_lr_fn"], weight.shape)
    if isinstance(rule.optimizer, Adam):
        (beta1, beta2), steps = options["betas"], float(state["step"])
        kept, spread = beta1**delay, as_real(state["exp_avg_sq"]) / (1 - beta2**steps)
        move = state["exp_avg"] * (kept / (1 - beta1**steps)) + (1 - kept) * gradient
        as_real(move).div_(spread.sqrt_().add_(options["eps"]))
        return move, lr
    momentum = float(options["momentum"])
    kept = momentum**delay
    velocity: Tensor = state["momentum_buffer"]
    return velocity.mul(kept).add_(gradient, alpha=(1 - kept) / (1 - momentum)), lr


class ErrorFeedback(Staleness):
    """`error-feedback`: makes every step 1 + tau times, and takes back the excess of the last one.

    Error feedback (arXiv 2606.30634, section 4):

        x <- x - (1 + tau) u_t + tau u_(t-1)        u_t: the optimizer's update, without decay

    This is a look-ahead that stores the look-ahead weights: with y <- y - u_t, x is always y - tau
    u_t, the weights after making the last step tau more times. A run is therefore evaluated and
    saved at y = x + tau u_t (`eval_weights`). Weight decay acts on x and is not a part of u. tau is
    the mean delay of the gradients of a step (`StageContext.tau`); where it changes, in a ramp,
    each step takes back exactly the excess of the last one. Synchronous steps begin with y.
    """

    decides = frozenset({"step", "horizon"})
    needs = frozenset({"update rule"})

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        self._looks_ahead: dict[str, float] = {}
        """Tau of the last step, for each weight whose step was extended."""
        self._is_synchronous = False

    def begin(self, context: StageContext) -> None:
        super().begin(context)
        self._is_synchronous = context.synchronous
        if self.steps is not None and self._is_synchronous:
            self._return(self.steps.weights)

    @torch.no_grad()
    def _return(self, weights: WeightVersions) -> None:
        """Gives the live weights the values to evaluate."""
        for name, last in self._last.items():
            weights.live[name].add_(last, alpha=self._looks_ahead[name])
        self._last, self._looks_ahead = {}, {}

    def state(self, weights: WeightVersions) -> State:
        ahead = {
            name: torch.tensor(steps, dtype=torch.float64)
            for name, steps in self._looks_ahead.items()
        }
        return {"last": self._last, "ahead": ahead} if self._last else {}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._take(state)
        if self._is_synchronous:
            self._return(weights)

    def leave(self, weights: WeightVersions, state: State) -> None:
        self._take(state)
        self._return(weights)

    def _take(self, state: State) -> None:
        self._last = dict(state["last"])
        self._looks_ahead = {name: float(steps) for name, steps in state["ahead"].items()}

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        optimizer, version = self.optimizer, weights.version + 1
        delays = {name: self.context.tau(version, name) for name in weights.live}
        changed = {name for name, delay in delays.items() if delay or name in self._last}
        if optimizer is None or not changed:
            yield
            return
        rule = rules(optimizer, weights.live)
        before: dict[str, Tensor] = {}

        @torch.no_grad()
        def remember() -> None:
            for name in changed:
                weight = weights.live[name]
                # Without a gradient a weight is not stepped at all.
                is_stepped = weight.grad is not None
                before[name] = rule[name].decayed(weight) if is_stepped else weight.clone()

        with at_step(optimizer, remember):
            yield
        with torch.no_grad():
            for name, start in before.items():
                live = weights.live[name]
                update = start.sub_(live)
                if (last := self._last.get(name)) is not None:
                    live.add_(last, alpha=self._looks_ahead[name])
                live.sub_(update, alpha=delays[name])
                self._last[name], self._looks_ahead[name] = update, delays[name]

    @contextmanager
    def eval_weights(self, weights: WeightVersions) -> Iterator[None]:
        with weights.restored():
            with torch.no_grad():
                for name, last in self._last.items():
                    weights.live[name].add_(last, alpha=self._looks_ahead[name])
            yield
