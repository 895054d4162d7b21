"""Names joined by + -> the methods of a stage, or the sentence that says why they do not fit.

What fits is told by what methods declare, not by their names: each part of training on stale
weights is decided by one of them at most, and what one needs must be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ScheduleError
from ..wording import did_you_mean
from .dc_asgd import AdaptivelyCompensated, DelayCompensated
from .error_feedback import ErrorFeedback
from .gap_aware import GapAware, GapAwareLoss
from .lwp import LinearByVelocity, LinearByWeights
from .msnag import AggregatedMsnag, Msnag
from .nesterov import LastStageNesterov, Nag
from .none import LiveWeights
from .partial_gradient import PartialGradient
from .pipemare import PipeMare
from .pipeoptim import PipeOptim
from .protocol import Need, Part, Staleness
from .rates import DelayRate, PipeMareRate
from .schedule_aware import ScheduleAware
from .spectrain import SpecTrain
from .spike_compensation import SpikeCompensation
from .stash import Stash
from .two_buffered import TwoBuffered
from .xpipe import XPipe

METHODS: dict[str, type[Staleness]] = {
    "none": LiveWeights,
    "stash": Stash,
    "msnag": Msnag,
    "aggmsnag": AggregatedMsnag,
    "partial-gradient": PartialGradient,
    "nag": Nag,
    "lwp": LinearByVelocity,
    "lwp-w": LinearByWeights,
    "spectrain": SpecTrain,
    "xpipe": XPipe,
    "pipeoptim": PipeOptim,
    "nesterov-last": LastStageNesterov,
    "schedule-aware": ScheduleAware,
    "2bw": TwoBuffered,
    "pipemare": PipeMare,
    "pipemare-rate": PipeMareRate,
    "delay-rate": DelayRate,
    "gap-aware": GapAware,
    "gap-aware-loss": GapAwareLoss,
    "dc-asgd": DelayCompensated,
    "dc-asgd-adaptive": AdaptivelyCompensated,
    "error-feedback": ErrorFeedback,
    "spike-compensation": SpikeCompensation,
}
"""Name of a staleness method -> its class."""

_DECISIONS: Mapping[Part, str] = {
    "forward": "which weights a forward reads",
    "backward": "which weights a backward reads",
    "horizon": "how far ahead weights look",
    "gradient": "how gradients are corrected",
    "rate": "the learning rate",
    "step": "the step",
}
_OTHER_NAMES: Mapping[str, str] = {
    "pipedream": "stash",
    "weight-stashing": "stash",
    "stashing": "stash",
    "ws": "stash",
    "stale": "none",
    "live": "none",
    "wp": "msnag",
    "predict": "msnag",
    "ga": "gap-aware",
    "jfl": "gap-aware-loss",
    "ga-jfl": "gap-aware-loss",
    "ga_jfl": "gap-aware-loss",
    "pipedream-2bw": "2bw",
    "ef": "error-feedback",
    "sc": "spike-compensation",
    "t1": "pipemare-rate",
    "t2": "pipemare",
}
"""What papers and FTPipe's options call a method -> its name here."""
MOMENTUM = frozenset({"sgd", "sutskever", "muon"})
ADAM = frozenset({"adam", "adamw", "nadam"})
VELOCITY = frozenset({"sgd", "sutskever"})
KNOWN_STEP_SIZES = ("sgd", "sutskever", "adam", "adamw")


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a run has for methods to need: its optimizer's name and momentum, whether every stage
    that is late recomputes and which do not, the micro-batches of a step and the most that a stage
    runs ahead."""

    optimizer: str = "sgd"
    momentum: float = 0.0
    recomputes: bool = False
    without_recompute: tuple[int, ...] = ()
    step_every: int = 1
    ahead: int = 0


def parse(names: str) -> tuple[str, ...]:
    """The names of methods joined by +. Raises ScheduleError for an unknown one.

    >>> parse("stash"), parse("stash+msnag")
    (('stash',), ('stash', 'msnag'))
    """
    parsed = tuple(name.strip() for name in names.split("+"))
    for name in parsed:
        if name not in METHODS:
            raise ScheduleError(
                f"{name!r} is not a staleness method."
                if name
                else f"--staleness {names!r} has no method in one place.",
                _known_as(name)
                or "For example stash, or stash+msnag; docs/asynchronous-methods.md and "
                "docs/weight-prediction.md have all.",
            )
    return parsed


def make_staleness(names: str) -> tuple[Staleness, ...]:
    """New objects of the methods, for one stage. Raises ScheduleError for an unknown name, and for
    two methods that decide the same."""
    parsed = parse(names)
    _check_parts(parsed)
    methods = tuple(METHODS[name]() for name in parsed)
    for name, method in zip(parsed, methods, strict=True):
        method.name = name
    return methods


def check(names: str, conditions: Conditions) -> None:
    """Raises ScheduleError unless the methods fit each other and the run."""
    parsed = parse(names)
    _check_parts(parsed)
    for name in parsed:
        for need in sorted(METHODS[name].needs):
            if lack := _lack(need, parsed, conditions):
                raise ScheduleError(f"--staleness {names}: {name} {lack[0]}.", lack[1])


def has_other_backward(names: str) -> bool:
    """Whether a backward reads other weights than those that its forward saved.

    >>> [has_other_backward(names) for names in ("none", "stash", "msnag", "pipeoptim")]
    [True, False, False, True]
    """
    methods = [METHODS[name] for name in parse(names)]
    if any(method.keeps_forward for method in methods):
        return False
    decided = frozenset[Part]().union(*(method.decides for method in methods))
    return "backward" in decided or "forward" not in decided


def _known_as(name: str) -> str:
    near = _OTHER_NAMES.get(name.lower())
    return f"Did you mean {near}?" if near else did_you_mean(name.lower(), METHODS)


def _check_parts(names: Sequence[str]) -> None:
    deciders: dict[Part, str] = {}
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ScheduleError(f"{name} is there twice.", "Leave one of them out.")
        for part in sorted(METHODS[name].decides | METHODS[name].leaves):
            if part in deciders:
                raise ScheduleError(
                    f"{deciders[part]} and {name} both decide {_DECISIONS[part]}.",
                    "Leave one of them out.",
                )
            deciders[part] = name


def _lack(need: Need, names: Iterable[str], run: Conditions) -> tuple[str, str] | None:
    """What is missing of a need, and the cure."""
    match need:
        case "forward weights":
            if not any(METHODS[name].keeps_forward for name in names):
                kept = "+".join(["stash", *(n for n in names if not _reads_otherwise(n))])
                return (
                    "compares with the weights of the forward, which are not kept",
                    f"--staleness {kept}",
                )
        case "recomputation":
            if not run.recomputes:
                lacking = run.without_recompute
                who = f"stage{'s' if lacking[1:] else ''} {', '.join(map(str, lacking))}"
                return (
                    "needs a second forward in every stage but the last, and "
                    + (f"{who} recompute nothing" if lacking[1:] else f"{who} recomputes nothing"),
                    "--recompute all",
                )
        case "momentum":
            if run.optimizer not in MOMENTUM or not run.momentum:
                return (
                    f"goes by the momentum of sgd, and the optimizer is {run.optimizer}"
                    + ("" if run.momentum else " without momentum"),
                    "--optimizer sgd --momentum 0.9",
                )
        case "adam":
            if run.optimizer not in ADAM:
                return f"goes by Adam's moments, and the optimizer is {run.optimizer}", (
                    "--optimizer adamw"
                )
        case "sgd's momentum":
            if run.optimizer != "sgd" or not run.momentum:
                return (
                    f"changes the step of sgd with momentum, and the optimizer is {run.optimizer}"
                    + ("" if run.momentum else " without momentum"),
                    "--optimizer sgd --momentum 0.9",
                )
        case "known step sizes":
            if run.optimizer not in KNOWN_STEP_SIZES:
                return (
                    f"measures gaps in steps of {', '.join(KNOWN_STEP_SIZES)}, and the optimizer "
                    f"is {run.optimizer}",
                    "--optimizer adamw",
                )
        case "whole windows":
            if run.step_every <= run.ahead:
                return (
                    f"needs at least {run.ahead + 1} micro-batches a step, one more than the first "
                    f"stage runs ahead, and there are {run.step_every}",
                    f"--micro-batches {run.ahead + 1}",
                )
        case "velocity":
            if run.optimizer not in VELOCITY or not run.momentum:
                return (
                    f"goes by the velocity of sgd, and the optimizer is {_in_words(run)}",
                    "--optimizer sgd --momentum 0.9, or --staleness lwp-w.",
                )
        case "direction":
            if run.optimizer not in VELOCITY | ADAM or _is_without_momentum(run):
                return (
                    "goes by the momentum of sgd or Adam's moments, and the optimizer is "
                    f"{_in_words(run)}",
                    "--optimizer adamw, or --staleness msnag.",
                )
        case "inertia":
            if _is_without_momentum(run):
                return (
                    f"predicts by momentum, and the optimizer is {_in_words(run)}",
                    "--momentum 0.9, or --staleness partial-gradient.",
                )
        case "nesterov":
            if run.optimizer != "sgd" or not run.momentum:
                return (
                    f"is an option of sgd with momentum, and the optimizer is {_in_words(run)}",
                    "--optimizer sgd --momentum 0.9",
                )
        case "rates":
            if not any(METHODS[name].expects_rates for name in names):
                return "says which learning rates a prediction expects, and nothing predicts", (
                    "Add +msnag."
                )
    return None


def _reads_otherwise(name: str) -> bool:
    """Whether a method says which weights a backward reads, so that a stash cannot."""
    return "backward" in METHODS[name].decides | METHODS[name].leaves


def _is_without_momentum(run: Conditions) -> bool:
    return run.optimizer in MOMENTUM and not run.momentum


def _in_words(run: Conditions) -> str:
    return run.optimizer + (" without momentum" if _is_without_momentum(run) else "")
