"""Gradients of many stages -> the norms and factors for clipping, and checks that numbers are
finite.

Synchronous steps: each stage contributes the sum of its squares; only the owner of a tied parameter
counts it. Tensor ranks contribute the squares of their parts, and the first of them those of the
parameters that each has whole. Every rank gets all contributions and adds them in the order of the
stages, so the number of ranks changes no bit of the result. The same message carries the loss, and
whether a gradient overflowed.

Asynchronous steps, where each stage steps alone, by `--clip-by`:

    stage       its own norm, and the whole bound
    proportion  its own norm, and sqrt(n_j / n) of the bound: n_j of all n weights are its own, so
                that the squares of all bounds add up to the bound's. (FTPipe takes n_j / n.)
    global      the norm of all stages at the same step; each step waits until all stages make it
    known       the same, with the other stages' squares of D steps before: D = ceil((W+1)/k)

W is the most that any stage runs ahead. When a stage makes step v, every other has made step v - D:
the stages before it have sent the last forward of step v, and so made their backwards of up to W +
1 micro-batches before; the stages after it are ahead in backwards. So `known` waits for no stage,
and uses the same norms in every run. The first D asynchronous steps have no earlier norms and are
clipped as by `global`.

A tied parameter is stepped by each of its holders and must stay equal. So it is clipped by a norm
that all its holders know without a wait: under `stage` and `proportion` by its own norm, as if it
were a stage; under `known` by the norm of all stages of D steps before, or by its own if that is
larger. Its gradient has the same bits at all holders, and so has `squared_norm_alike`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config.settings import RunConfig, SettingsError
from ..distributed.process_groups import World
from ..errors import AsyncPipeError
from ..executor.instrumented import Activities, Activity
from ..executor.tied_parameters import shared_weights
from ..formatting import write_loss
from ..plan.plan import Plan
from ..sharding.matrices import NO_MATRICES, WholeMatrices
from ..sharding.shards import WHOLE, Shards
from ..tensor_parallel.ranks import split_of, whole_shape


@dataclass(frozen=True, slots=True)
class NormShare:
    """One stage's parameters.

    own: those whose gradients, if they have any, are complete after its last backward.
    shared_by_name: tied parameters, whose gradients are summed with other stages before the step.
    owned: the tied parameters that this stage counts.
    is_first: False on tensor ranks that count no parameters but those of which they have a part.
    shards: the owners of all of them among the replicas of the stage.
    matrices: the owners, among its tensor ranks, of those that are stepped as wholes.
    """

    own: list[nn.Parameter]
    shared_by_name: dict[str, nn.Parameter]
    owned: list[nn.Parameter]
    is_first: bool = True
    shards: Shards = WHOLE
    matrices: WholeMatrices = NO_MATRICES

    def counts(self, parameter: nn.Parameter) -> bool:
        """True if this rank counts the parameter, and not another tensor rank."""
        return self.is_first or split_of(parameter) is not None

    @property
    def shared(self) -> list[nn.Parameter]:
        return list(self.shared_by_name.values())

    @property
    def counted_own(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.own if self.counts(parameter)]

    @property
    def counted(self) -> list[nn.Parameter]:
        return self.counted_own + self.owned

    def square(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The sum of squares of the complete gradients of some of them, `f64[]`. Collective among
        the replicas where these own different parameters."""
        if not self.shards.is_divided:
            return squared_norm(gradients_of(parameters))
        return self.shards.norms(parameters).square().sum()


def share_of(
    plan: Plan, index: int, stage: nn.Module, tensor_rank: int = 0, shards: Shards = WHOLE
) -> NormShare:
    """The parameters of a stage, so that over all stages and tensor ranks each one is counted
    once."""
    share = NormShare([], {}, [], is_first=tensor_rank == 0, shards=shards)
    holders = shared_weights(plan, index)
    for name, parameter in stage.named_parameters():
        if name not in holders or not parameter.requires_grad:
            share.own.append(parameter)
            continue
        share.shared_by_name[name] = parameter
        if holders[name][0] == index and share.counts(parameter):
            share.owned.append(parameter)
    return share


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of those parameters that have one, in order."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of squares of all gradients, `f64[]` on their device, without a synchronization."""
    given = list(gradients)
    if not given:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(given)).double().square().sum()


def squared_norm_alike(gradient: Tensor) -> Tensor:
    """The squared norm of one gradient, with the same bits wherever its elements are the same: a
    norm, unlike a sum, is added in one order by any number of threads and for any strides."""
    row = gradient.detach().reshape(-1)
    if row.is_complex():
        row = torch.view_as_real(row.resolve_conj()).reshape(-1)
    norm: Tensor = torch.linalg.vector_norm(row, dtype=torch.float64)
    return norm.square()


@dataclass(frozen=True, slots=True)
class Agreed:
    """The numbers of a step that all ranks know.

    squares: the sum of squares of each stage.
    overflowed: True if a scaled gradient is not finite.
    loss: the mean loss.
    """

    squares: tuple[float, ...]
    overflowed: bool
    loss: float

    @property
    def norm(self) -> float:
        return math.sqrt(sum(self.squares, 0.0))


class StepMessage:
    """One all-reduce per step, which runs while others still compute.

    Every rank creates it as soon as it knows its part: the squares of its `own` stages, and the
    loss if it computes the loss. Replicas have the same gradients; the first one contributes their
    squares, and each contributes its part of the loss; tensor ranks contribute the squares that
    they count, and the first one the loss. `agreed` waits for the other ranks.
    """

    def __init__(
        self,
        own: Mapping[int, Tensor | float],
        stages: int,
        world: World,
        *,
        overflowed: bool = False,
        loss: float = math.nan,
    ) -> None:
        self._parts = world.tensor_ranks
        self._places = places = stages * self._parts
        self._content = torch.zeros(places + 1 + world.grid.most_copies, dtype=torch.float64)
        for stage, square in own.items() if world.copy == 0 else ():
            self._content[stage * self._parts + world.tensor_rank] = square
        self._content[places] = float(overflowed)
        if world.tensor_rank == 0:
            self._content[places + 1 + world.copy] = loss
        # Every place has one contributor: adding zeros is exact in any order.
        self._work = None
        if world.control is not None:
            self._work = dist.all_reduce(self._content, group=world.control, async_op=True)

    def agreed(self) -> Agreed:
        if self._work is not None:
            self._work.wait()
        content = self._content.tolist()
        squares, (overflowed, *losses) = content[: self._places], content[self._places :]
        by_stage = zip(*(squares[part :: self._parts] for part in range(self._parts)), strict=True)
        return Agreed(tuple(map(sum, by_stage)), overflowed > 0, sum(losses))


def mean_loss(losses: Sequence[tuple[Tensor, int]]) -> float:
    """The mean over the samples of a step, whose micro-batches may differ in size."""
    values = torch.stack([loss for loss, _ in losses]).double().cpu()
    shares = torch.tensor([samples / losses[0][1] for _, samples in losses], dtype=values.dtype)
    return float((values * shares).sum() / shares.sum())


def clip_factor(norm: float, limit: float) -> float:
    """The factor for gradients of this norm; `limit` 0 means no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies the gradients by `factor` in place."""
    # Fused optimizers could divide by 1 / factor in a quarter of the time of this pass, but the
    # result differs from the product in the last bits.
    gradients = gradients_of(parameters)
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def clip_all(plan: Plan, modules: Mapping[int, nn.Module], world: World, limit: float) -> float:
    """Scales the gradients of all stages so that their common norm is at most `limit`; returns the
    norm before. Collective."""
    shares = [share_of(plan, stage, module, world.tensor_rank) for stage, module in modules.items()]
    squares = [float(squared_norm(gradients_of(share.counted))) for share in shares]
    (square,) = world.sums([sum(squares) if world.copy == 0 else 0.0])
    factor = clip_factor(square**0.5, limit)
    for module in modules.values():
        scale_gradients(module.parameters(), factor)
    return float(square**0.5)


_LAST = "last"
"""The key of the squares of the last step, next to version numbers."""


class Norm(NamedTuple):
    """A norm by which gradients are clipped.

    norm: the norm.
    bound: its bound.
    """

    norm: float
    bound: float

    @property
    def factor(self) -> float:
        return clip_factor(self.norm, self.bound)


def check_clipping_ranks(config: RunConfig, stages: int, ranks: int) -> None:
    """Raises SettingsError where ranks with several stages would wait for themselves."""
    if config.clip_by in ("global", "known") and ranks != stages:
        raise SettingsError(
            f"--clip-by {config.clip_by} needs a rank for each of the {stages} stages, and there "
            f"are {ranks}.",
            "--clip-by proportion",
        )


class StageNorms:
    """The norms of one rank's stages, by the `clip_by` of the run. All ranks construct it
    together.

    `shares` are the parameters of its stages. Raises SettingsError as `check_clipping_ranks` does.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        stages: int,
        shares: Mapping[int, NormShare],
        activities: Activities,
    ) -> None:
        check_clipping_ranks(config, stages, world.grid.ranks)
        self._by, self._limit = config.clip_by, config.clip
        self._world, self._stages, self._shares = world, stages, shares
        self._activities = activities
        self._messages: dict[int, StepMessage | Agreed] = {}
        self._last: list[float] = [0.0] * stages
        """The squares of all stages by which the last step was clipped."""
        self._weights = 0.0
        if self._by == "proportion":
            counted = float(sum(_numbers(share.counted) for share in shares.values()))
            (self._weights,) = world.sums([counted if world.copy == 0 else 0.0])

    def state(self) -> dict[str, list[float]]:
        """The squares of all stages, by version, by which later steps will be clipped, and those of
        the last step. The same on every rank, without a wait after a drain."""
        squares = {
            str(version): list(_agreed(message).squares)
            for version, message in self._messages.items()
        }
        return squares | {_LAST: self._last}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores the state that `state` returned, if it has as many stages."""
        fitting = {key: squares for key, squares in state.items() if len(squares) == self._stages}
        self._last = list(fitting.pop(_LAST, self._last))
        self._messages = {
            int(version): Agreed(tuple(squares), overflowed=False, loss=0.0)
            for version, squares in fitting.items()
        }

    def of(self, stage: int, version: int, late: int) -> tuple[Norm, dict[str, Norm]]:
        """The norm for the stage's own gradients in the step to `version`, and for each of its tied
        parameters, by name; `late` is D of `known`."""
        share = self._shares[stage]
        shared_squares = {
            name: float(squared_norm_alike(parameter.grad)) if share.counts(parameter) else 0.0
            for name, parameter in share.shared_by_name.items()
            if parameter.grad is not None
        }
        is_alone = self._by in ("stage", "proportion")
        counted = share.counted_own if is_alone else share.counted
        squares = [float(share.square(counted)), *shared_squares.values()]
        own, *of_shared = self._world.tensor_sums(squares)
        shared = dict(zip(shared_squares, map(math.sqrt, of_shared), strict=True))
        if is_alone:
            return Norm(math.sqrt(own), self._bound(share.own)), {
                name: Norm(norm, self._bound([share.shared_by_name[name]]))
                for name, norm in shared.items()
            }
        contributed = {stage: own} if self._world.tensor_rank == 0 else {}
        message: StepMessage | Agreed = StepMessage(
            contributed, self._stages, self._world, loss=0.0
        )
        if self._by == "known":
            self._messages[version] = message
            message = self._messages.get(version - late, message)
            self._messages.pop(version - late, None)
        with self._activities.during(Activity("meet", "the norms of all stages")):
            self._last = list(_agreed(message).squares)
        norm_of_shared = math.sqrt(sum(self._last))
        return Norm(self._with_own(stage, own), self._limit), {
            name: Norm(
                max(norm_of_shared, norm) if self._by == "known" else norm_of_shared, self._limit
            )
            for name, norm in shared.items()
        }

    def expected_factor(self, stage: int, gradients: Sequence[Tensor], scale: float) -> float:
        """The factor by which the coming step would clip the stage's own gradients if they were
        `scale` times these; for `global` and `known` if the others' squares were those of the last
        step."""
        own = float(squared_norm(gradients)) * scale**2
        if self._by in ("stage", "proportion"):
            return clip_factor(math.sqrt(own), self._bound(self._shares[stage].own))
        return clip_factor(self._with_own(stage, own), self._limit)

    def _with_own(self, stage: int, own: float) -> float:
        """The norm of all stages, where this stage's square is newer than the others'."""
        return math.sqrt(sum([*self._last[:stage], own, *self._last[stage + 1 :]]))

    def _bound(self, weights: Iterable[nn.Parameter]) -> float:
        if self._by == "stage":
            return self._limit
        ranks = self._world.tensor_ranks
        whole = sum(whole_shape(each, ranks).numel() for each in weights if each.requires_grad)
        return self._limit * math.sqrt(whole / self._weights)


def steps_until_known(ahead: Sequence[int], step_every: int) -> int:
    """D: the steps by which others' norms are late, where stages run `ahead` by this much.

    >>> steps_until_known((3, 2, 1, 0), 1), steps_until_known((3, 2, 1, 0), 4)
    (4, 1)
    """
    return -(-(max(ahead) + 1) // step_every)


def _agreed(message: StepMessage | Agreed) -> Agreed:
    return message if isinstance(message, Agreed) else message.agreed()


def _numbers(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights if weight.requires_grad)


class LossError(AsyncPipeError):
    """A loss or a gradient is NaN or infinite."""


_UNTRAINED = (
    "The weights are still the initial ones: look in them and in the data for numbers that are not "
    "finite, or too large."
)


class Finite:
    """Checks the numbers of each step, and remembers the last good ones.

    loss: the last finite loss.

    has_own: a loop of the user's makes the steps, whose learning rate is not that of the options.

    Every check raises LossError.
    """

    def __init__(self, config: RunConfig, *, has_own: bool = False) -> None:
        self._config, self._has_own = config, has_own
        # Without a network, numbers mean nothing and may be infinite.
        self._is_finite = math.isfinite if config.has_network else lambda number: True
        self._norm = ""
        self._step = 0
        self.loss = math.nan

    def check_loss(self, step: int, loss: float) -> None:
        if not self._is_finite(loss):
            last = f" (it was {write_loss(self.loss)} at step {self._step}{self._norm})"
            raise LossError(
                f"the loss is {loss} at step {step}{last if self._step else ''}. Stopped.",
                self._cure if step > 1 else _UNTRAINED,
            )
        self.loss, self._step = loss, step

    def check_norm(self, step: int, norm: float, by_stage: Mapping[int, float]) -> None:
        """Checks the norm of all gradients in question; `by_stage` identifies the stages at fault.
        Raises LossError for one that is not finite."""
        if not self._is_finite(norm):
            wrong = [str(stage) for stage, own in by_stage.items() if not math.isfinite(own)]
            stages = f"stage{'s' if len(wrong) > 1 else ''} {', '.join(wrong)}"
            raise LossError(
                f"the gradient norm of {stages} is {norm} at step {step}, where the loss is "
                f"{write_loss(self.loss)}. Stopped before the weights changed.",
                self._cure,
            )
        self._norm = f", the gradient norm {norm:.2g} before"

    def note_norm(self, step: int, norm: float) -> None:
        """Remembers the norm of the gradients of this rank's stages, where nothing is clipped by
        it."""
        self._norm = f", the gradient norm of this rank's stages {norm:.2g} at step {step}"

    def check_scale(self, step: int, scale: float) -> None:
        if scale < 1 and self._config.has_network:
            raise LossError(
                f"gradients overflow in float16 at step {step}, although the loss scale is "
                "down to 1. Stopped.",
                "--precision bfloat16",
            )

    @property
    def _cure(self) -> str:
        if self._has_own:
            return (
                "Give the optimizer a lower learning rate or a longer warm-up, or clip the "
                "gradients with Pipeline(..., clip=1.0)."
            )
        lr = self._config.lr
        other = "--precision bfloat16, or " if self._config.is_scaled else ""
        clip = "" if self._config.clip else ", or --clip 1"
        start = ", or --sync-start 5%" if self._config.is_async else ""
        return f"{other}--lr {lr / 3:.1g} instead of {lr:.1g}, or a longer --warmup{clip}{start}."
