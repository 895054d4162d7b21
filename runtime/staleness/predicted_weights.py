"""Methods whose forwards read predicted weights: linear, by momentum, and with a part of the
gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..optimizers.param_groups import NOT_HIDDEN
from .prediction import extrapolate, step_ahead
from .protocol import BackwardReads, Staleness, State, VersionPair, filled
from .weight_versions import View, Weights, WeightVersions


class PredictedForward(Staleness):
    """A forward reads the weights that are expected at its backward."""

    decides = frozenset({"forward", "horizon"})
    expects_rates = True
    reads_optimizer = True
    """Predictions read the optimizer's state, of which each replica may have a part."""

    def forward_view(self, weights: WeightVersions, pair: VersionPair) -> View | None:
        return self.look_ahead(weights, pair.delay)

    def look_ahead(self, weights: WeightVersions, steps: int) -> View | None:
        """The weights predicted for `steps` steps from now; None for 0 steps, or for a stage
        without weights."""
        if steps == 0 or self.steps is None or not weights.live:
            return None
        fill = partial(self._fill, weights, steps)
        return View(self.view_name(weights), weights.version, steps, fill)

    def _fill(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        assert self.steps is not None
        if self.reads_optimizer and self.steps.optimizer is None:
            torch._foreach_copy_(list(leaves.values()), list(weights.live.values()))
        else:
            self.predict(weights, steps, leaves)
        if self.reads_optimizer:
            self.steps.spread(leaves)

    def other_factors(self, steps: int) -> dict[str, tuple[float, ...]]:
        """The expected learning rates of the weights that several stages hold, by name, and of
        those that are not hidden matrices."""
        assert self.steps is not None
        names = (*self.context.shared, NOT_HIDDEN)
        return {name: self.steps.expected_lr(steps, name) for name in names}

    def view_name(self, weights: WeightVersions) -> str:
        """The inputs of a prediction besides a version and the number of steps."""
        return type(self).__name__

    @abstractmethod
    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        """Writes the prediction into the leaves."""


class LinearByVelocity(PredictedForward):
    """`lwp`: a forward reads the weights moved along SGD's momentum buffer v.

    Linear weight prediction, LWP-v (Kosson et al., "Pipelined backpropagation at scale", MLSys
    2021): p - (lr_1 + .. + lr_n) v for a delay of n steps.
    """

    needs = frozenset({"velocity"})

    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        assert self.steps is not None and self.steps.optimizer is not None
        extrapolate(
            self.steps.optimizer,
            weights.live,
            leaves,
            self.steps.expected_lr(steps),
            others=self.other_factors(steps),
        )


class LinearByWeights(PredictedForward):
    """`lwp-w`: a forward reads the weights moved by n times their last step; before the second step
    the live ones.

    LWP-w of the same paper: p + n (p - the weights before the last step). It works with every
    optimizer; for Muon it repeats the last orthogonalized update, which is the prediction of
    marin-community/marin #6431 (2026). It stores the last step: memory of the weights once.
    """

    expects_rates = reads_optimizer = False

    def __init__(self) -> None:
        self._last_step: list[Tensor] = []

    def state(self, weights: WeightVersions) -> State:
        if not self._last_step:
            return {}
        return {"last_step": dict(zip(weights.live, self._last_step, strict=True))}

    def load(self, weights: WeightVersions, state: State) -> None:
        self._last_step = list(filled(weights, state["last_step"]).values())

    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        moved = list(leaves.values())
        torch._foreach_copy_(moved, list(weights.live.values()))
        if self._last_step:
            torch._foreach_add_(moved, self._last_step, alpha=steps)

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        live: list[Tensor] = list(weights.live.values())
        if not (live and self.context.ahead):
            yield
            return
        with torch.no_grad():
            if self._last_step:
                torch._foreach_copy_(self._last_step, live)
            else:
                self._last_step = [weight.clone() for weight in live]
            yield
            torch._foreach_neg_(self._last_step)
            torch._foreach_add_(self._last_step, live)


class ScheduleAware(Staleness):
    """`schedule-aware`: each predicted step has the learning rate that the scheduler will set
    (FTPipe, USENIX ATC 2021).

    Without it a prediction takes all its steps at the learning rate of the next one. That is too
    far while the rate falls, and too near in a warm-up.
    """

    needs = frozenset({"rates"})
    follows_schedule = True


class SpecTrain(LinearByVelocity):
    """`spectrain`: both passes of a micro-batch read weights predicted for the same time.

    Chen, Yang and Cheng, "Efficient and robust parallel DNN training through model parallelism on
    multi-GPU platform", 2018: stage i of p stages reads weights s versions ahead by SGD's velocity,

        forward  s = floor(i / 2) + p - i - 1        backward  s = floor(i / 2)

    The backward comes p - i - 1 steps after the forward, so both mean the same time; where it comes
    sooner (after a start) the forward looks less far ahead. The paper steps after each micro-batch.
    With k micro-batches a step, that time remains floor(i / 2) micro-batches after the backward, in
    whole steps.
    """

    decides = frozenset({"forward", "backward", "horizon"})

    def forward_view(self, weights: WeightVersions, pair: VersionPair) -> View | None:
        return self.look_ahead(weights, pair.delay + self._beyond(pair))

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> View | BackwardReads:
        return self.look_ahead(weights, self._beyond(pair)) or BackwardReads.LIVE

    def _beyond(self, pair: VersionPair) -> int:
        """The steps between the backward and the predicted time."""
        context, of_step = self.context, self.context.step_every
        if context.synchronous:
            return 0
        return (pair.micro_batch % of_step + context.stage // 2) // of_step


class XPipe(LinearByVelocity):
    """`xpipe`: the micro-batches of a step share one prediction a pass.

    Guan et al., "XPipe: efficient pipeline model parallelism for multi-GPU DNN training", 2019:
    with T micro-batches per step, stage i of p stages, and Adam's direction m' / (sqrt(s') + eps),

        forward   round((p + T - floor(i / 2) - 2) / T) steps ahead of the weights that are live
                  at the forward of the step's first micro-batch
        backward  round((T + floor(i / 2) - 1) / T) steps ahead of those live at its backward

    where halves are rounded to even numbers. All micro-batches of the step read these weights, so a
    later forward reads an older prediction, not a shorter one. At delay 0 it looks a step ahead
    too.
    """

    decides = frozenset({"forward", "backward", "horizon"})
    needs = frozenset({"direction"})

    def __init__(self) -> None:
        self._shared: View | None = None
        self._step: int | None = None

    def forward_view(self, weights: WeightVersions, pair: VersionPair) -> View | None:
        if self.context.synchronous:
            return None
        if pair.backward_version != self._step:
            self._step = pair.backward_version
            self._share(weights, self.look_ahead(weights, self.steps_of_forward))
        return self._shared

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> View | BackwardReads:
        # All backwards of a step meet the same version.
        steps = 0 if self.context.synchronous else self.steps_of_backward
        return self.look_ahead(weights, steps) or BackwardReads.LIVE

    @property
    def steps_of_forward(self) -> int:
        of_step, stage = self.context.step_every, self.context.stage
        return round((self.context.stages + of_step - stage // 2 - 2) / of_step)

    @property
    def steps_of_backward(self) -> int:
        of_step, stage = self.context.step_every, self.context.stage
        return round((of_step + stage // 2 - 1) / of_step)

    def _share(self, weights: WeightVersions, view: View | None) -> None:
        """Holds a prediction; a micro-batch that reads it after its version is gone copies the held
        values."""
        if self._shared is not None:
            weights.released(self._shared)
        self._shared = view
        if view is not None:
            copied = partial(_copy, weights.hold(view))
            self._shared = View(view.of, view.version, view.horizon, copied)


def _copy(source: Weights, leaves: Weights) -> None:
    torch._foreach_copy_(list(leaves.values()), list(source.values()))


class PipeOptim(LinearByVelocity):
    """`pipeoptim`: a forward reads the weights predicted for its backward, which reads the live
    ones.

    Guan et al., "PipeOptim: ensuring effective 1F1B schedule with optimizer-dependent weight
    prediction", 2023: a forward reads p - s lr u, where u is the direction of the optimizer's last
    step (SGD's velocity, Adam's m' / (sqrt(s') + eps)) and s the p - i - 1 steps until the backward
    of stage i. With more micro-batches a step, and after a start, s is the actual number of steps.
    """

    decides = frozenset({"forward", "backward", "horizon"})
    needs = frozenset({"direction"})

    def backward_reads(self, weights: WeightVersions, pair: VersionPair) -> BackwardReads:
        return BackwardReads.LIVE


class Msnag(PredictedForward):
    """`msnag`: a forward reads the weights after the optimizer's next steps without gradients.

    Multi-step Nesterov accelerated gradient (FTPipe, USENIX ATC 2021; Hakimi et al., "DANA", 2019):
    a forward whose backward is n steps later reads the weights that n steps of the optimizer would
    make if no gradients came. Gradients do come, but the current momentum is known. `prediction.py`
    has the formulas.
    """

    needs = frozenset({"inertia"})

    def predict(self, weights: WeightVersions, steps: int, leaves: Weights) -> None:
        assert self.steps is not None and self.steps.optimizer is not None
        step_ahead(
            self.steps.optimizer,
            weights.live,
            leaves,
            self.steps.expected_lr(steps),
            self.known_gradients(weights),
            others=self.other_factors(steps),
        )

    def known_gradients(self, weights: WeightVersions) -> Weights | None:
        """The known gradients of the next step; None if there are none."""
        return None


class AggregatedMsnag(Msnag):
    """`aggmsnag`: the first predicted step has the gradients gathered for it so far.

    They are read in place and stay unchanged: weight decay is added to a copy. They are clipped as
    if they were all gradients of the step. Weights that several stages hold have none, because
    their step uses the gradients of an earlier window.
    """

    needs = frozenset({"formula", "all gradients"})

    def view_name(self, weights: WeightVersions) -> str:
        return f"{super().view_name(weights)} of {weights.gathered}"

    def known_gradients(self, weights: WeightVersions) -> Weights | None:
        if not weights.gathered:
            return None
        known = {
            name: weight.grad
            for name, weight in weights.live.items()
            if weight.grad is not None and name not in self.context.shared
        }
        if not known or self.steps is None:
            return None
        scale = self.scale_of_known(weights)
        scale *= self.steps.clip_factor(list(known.values()), scale)
        if scale == 1.0:
            return known
        return dict(zip(known, torch._foreach_mul(list(known.values()), scale), strict=True))

    def scale_of_known(self, weights: WeightVersions) -> float:
        """The factor that scales the gathered gradients to those of the whole step."""
        return 1.0


class Nag(Msnag):
    """`nag`: as `msnag`, and one step ahead in both passes where no step lies between them.

    At delay 0 it is therefore Nesterov's optimizer, not the plain one. At delay n it looks n steps
    ahead like its origin, not n + 1. A stage without delay otherwise looks no step ahead: this and
    `nesterov-last` are FTPipe's (USENIX ATC 2021) two ways to treat all stages alike.
    """

    def forward_view(self, weights: WeightVersions, pair: VersionPair) -> View | None:
        steps = 0 if self.context.synchronous else max(1, pair.delay)
        return self.look_ahead(weights, steps)


class LastStageNesterov(Staleness):
    """`nesterov-last`: the last stage steps its own weights with the Nesterov momentum of torch's
    SGD."""

    decides = frozenset({"step"})
    needs = frozenset({"nesterov"})

    @contextmanager
    def stepping(self, weights: WeightVersions) -> Iterator[None]:
        is_last = self.context.stage == self.context.stages - 1
        optimizer = self.steps.optimizer if self.steps else None
        # Weights that other stages hold too are stepped as there.
        shared = {id(weights.live[name]) for name in self.context.shared if name in weights.live}
        groups = [
            group
            for group in (optimizer.param_groups if optimizer and is_last else ())
            if not any(id(weight) in shared for weight in group["params"])
        ]
        plain = [group["nesterov"] for group in groups]
        for group in groups:
            group["nesterov"] = not self.context.synchronous
        yield
        for group, nesterov in zip(groups, plain, strict=True):
            group["nesterov"] = nesterov


class PartialGradient(AggregatedMsnag):
    """`partial-gradient`: a forward reads the weights after a step with the mean of the gradients
    so far.

    With k micro-batches a step, more than a stage runs ahead, the stage has c of the k gradients of
    a step when the forwards begin that the step will overtake. These forwards read the weights that
    the optimizer makes with the mean of those c in place of the mean of all k, clipped the same
    way; the error is that of the k - c others, not of the whole step as in a prediction by
    momentum. It is `aggmsnag` with the gathered sum times k / c, for any optimizer; with Muon that
    is the next orthogonalized update. Own proposal. For c = 0 it is `msnag`.
    """

    def scale_of_known(self, weights: WeightVersions) -> float:
        return self.context.step_every / weights.gathered
