"""Names joined by + -> the methods of a stage, or an error that says why they do not fit together.

The check uses the declarations of the methods, not their names: at most one method decides each
part of training on stale weights, and every requirement must be met.

`recommended` implements `--staleness auto`:

    optimizer       no delay    late, k > 1                          late, k = 1
    muon            stash       stash+partial-gradient+delay-rate    stash+hidden-delay-rate
    with replicas   stash       stash+msnag+delay-rate               stash+hidden-delay-rate
    tensor ranks    stash       stash+delay-rate                     stash+delay-rate
    adamw           stash       stash+partial-gradient               stash
    with either     stash       stash                                stash
    all others      stash       stash                                stash

k is the number of micro-batches of a step; with more than one, a part of the next gradient is known
when a forward begins. docs/asynchronous-evidence.md has the measurements behind this rule and their
limits. The optimizer matters more than the method: muon loses least by delay, and least of all with
k = p and less momentum than its default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ScheduleError
from ..formatting import did_you_mean
from ..optimizers.facts import OPTIMIZERS, facts_of, in_words
from .average import MovingAverage
from .gradient_corrections import (
    AdaptivelyCompensated,
    DelayCompensated,
    ErrorFeedback,
    GapAware,
    GapAwareActivations,
    GapAwareLoss,
    SpikeCompensation,
)
from .predicted_weights import (
    AggregatedMsnag,
    LastStageNesterov,
    LinearByVelocity,
    LinearByWeights,
    Msnag,
    Nag,
    PartialGradient,
    PipeOptim,
    ScheduleAware,
    SpecTrain,
    XPipe,
)
from .protocol import Need, Part, Staleness
from .stash import (
    DelayMomentum,
    DelayRate,
    HiddenDelayRate,
    LiveWeights,
    PipeMare,
    PipeMareRate,
    Stash,
    TwoBuffered,
)

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
    "hidden-delay-rate": HiddenDelayRate,
    "delay-momentum": DelayMomentum,
    "gap-aware": GapAware,
    "gap-aware-activations": GapAwareActivations,
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
    "momentum": "how long gradients are averaged",
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
"""The name of a method in its paper or in FTPipe -> its name here."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The properties of a run that methods may require."""

    optimizer: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    """True if sgd steps with Nesterov momentum."""
    recomputes: bool = False
    """True if every stage with late gradients recomputes."""
    without_recompute: tuple[int, ...] = ()
    """The stages with late gradients and without recomputation."""
    step_every: int = 1
    """The number of micro-batches in a step of one pipeline."""
    replicas: int = 1
    """The number of pipelines that share the micro-batches of a step."""
    zero: int = 0
    """Not 0 if each replica has a part of the optimizer's state."""
    ahead: int = 0
    """The largest number of forwards that a stage runs ahead."""
    ema: bool = False
    """True if an average of the weights is evaluated."""

    @property
    def delay(self) -> int:
        """The largest number of steps by which a gradient is late."""
        return -(-self.ahead // self.step_every)


_OF_WHOLE_STATE = frozenset[Need]({"response to gradients", "known step sizes", "update rule"})
"""The requirements of methods that read the optimizer's state of all weights within a step."""
_KNOWN_STEP_SIZES = [name for name, facts in OPTIMIZERS.items() if facts.known_step_sizes]
_KNOWN_RESPONSES = [name for name, facts in OPTIMIZERS.items() if facts.known_response]
_OF_OPTIMIZERS: Mapping[Need, tuple[Callable[[Conditions], bool], str, str]] = {
    "response to gradients": (
        lambda run: (
            facts_of(run.optimizer).known_response
            and not _is_without_momentum(run)
            and not run.nesterov
        ),
        f"changes the momentum of {in_words(_KNOWN_RESPONSES)}",
        "--optimizer adamw, or --momentum 0.9 with sgd.",
    ),
    "known step sizes": (
        lambda run: facts_of(run.optimizer).known_step_sizes and not run.nesterov,
        f"measures gaps in steps of {', '.join(_KNOWN_STEP_SIZES)}",
        "--optimizer adamw",
    ),
    "velocity": (
        lambda run: facts_of(run.optimizer).velocity and _has_plain_momentum(run),
        "needs the velocity of sgd",
        "--optimizer sgd --momentum 0.9, or --staleness lwp-w.",
    ),
    "direction": (
        lambda run: (
            facts_of(run.optimizer).has_direction
            and not _is_without_momentum(run)
            and not run.nesterov
        ),
        "needs the momentum of sgd or Adam's moments",
        "--optimizer adamw, or --staleness msnag.",
    ),
    "moments": (
        lambda run: facts_of(run.optimizer).adam_moments,
        "averages late gradients for longer with Adam's first beta",
        "--optimizer nadam, or --staleness delay-rate.",
    ),
    "inertia": (
        lambda run: facts_of(run.optimizer).predicted and not _is_without_momentum(run),
        "predicts by momentum",
        "--optimizer adamw, --momentum 0.9 with sgd, or --staleness partial-gradient.",
    ),
    "formula": (
        lambda run: facts_of(run.optimizer).predicted,
        "predicts the steps of an optimizer by its formula",
        "--optimizer adamw, or --staleness stash.",
    ),
    "update rule": (
        lambda run: run.optimizer in OPTIMIZERS,
        "separates the weight decay from the step of a known optimizer",
        "--optimizer adamw, or --staleness stash.",
    ),
    "nesterov": (
        lambda run: facts_of(run.optimizer).plain_sgd and _has_plain_momentum(run),
        "is an option of sgd with momentum",
        "--optimizer sgd --momentum 0.9",
    ),
    "hidden matrices": (
        lambda run: facts_of(run.optimizer).hidden_matrices_only,
        "divides the learning rate of the matrices that Muon or SOAP steps",
        "--optimizer muon, or --staleness delay-rate.",
    ),
}
"""Requirement of an optimizer -> its condition, the words of its error and the cure."""


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
                else f"--staleness {names!r} has an empty method name.",
                _known_as(name)
                or "For example stash, or stash+msnag; docs/asynchronous-methods.md and "
                "docs/weight-prediction.md list all methods.",
            )
    return parsed


def make_staleness(names: str, ema: float | None = None) -> tuple[Staleness, ...]:
    """Creates the methods for one stage; with `ema`, the decay of an average of the weights, that
    average too. Raises ScheduleError for an unknown name, or if two methods decide the same
    part."""
    parsed = parse(names)
    _check_parts(parsed)
    methods = tuple(METHODS[name]() for name in parsed)
    for name, method in zip(parsed, methods, strict=True):
        method.name = name
    return methods if ema is None else (*methods, MovingAverage(ema))


def check(names: str, conditions: Conditions) -> None:
    """Raises ScheduleError unless the methods fit together and fit the run."""
    parsed = parse(names)
    _check_parts(parsed)
    for name in parsed:
        if conditions.ema and name in that_evaluate_others(names):
            raise ScheduleError(
                f"--staleness {names}: {name} evaluates other weights than it trains, and --ema "
                "averages those that are trained.",
                "Leave one of them out.",
            )
        for need in sorted(METHODS[name].needs):
            if lack := _lack(need, parsed, conditions):
                raise ScheduleError(f"--staleness {names}: {name} {lack[0]}.", lack[1])


def that_evaluate_others(names: str) -> list[str]:
    """Those of the methods that evaluate and save other weights than they train."""
    return [n for n in parse(names) if METHODS[n].eval_weights is not Staleness.eval_weights]


def has_other_backward(names: str) -> bool:
    """True if a backward reads other weights than those that its forward saved.

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
            raise ScheduleError(f"--staleness names {name} twice.", "Leave one of them out.")
        for part in sorted(METHODS[name].decides | METHODS[name].leaves):
            if part in deciders:
                raise ScheduleError(
                    f"{deciders[part]} and {name} both decide {_DECISIONS[part]}.",
                    "Leave one of them out.",
                )
            deciders[part] = name


def reads_optimizer(name: str) -> bool:
    """True for a method that depends on the optimizer or its state."""
    return not METHODS[name].needs.isdisjoint(_OF_OPTIMIZERS)


def _lack(need: Need, names: Iterable[str], run: Conditions) -> tuple[str, str] | None:
    """An unmet requirement in words and its cure, or None."""
    if need in _OF_OPTIMIZERS:
        is_met, text, cure = _OF_OPTIMIZERS[need]
        if not is_met(run):
            return f"{text}, but the optimizer is {_in_words(run)}", cure
    # Without momentum the sizes of steps are those of the gradients of micro-batches.
    by_gradients = need == "known step sizes" and _is_without_momentum(run)
    if run.replicas > 1 and (need == "all gradients" or by_gradients):
        of = f" where {run.optimizer} has no momentum" if by_gradients else ""
        others = [name for name in names if need not in METHODS[name].needs]
        cure = "--momentum 0.9" if by_gradients else f"--staleness {'+'.join(others) or 'stash'}"
        return (
            f"uses the gradient of every micro-batch of a step{of}, and each of the "
            f"{run.replicas} replicas has only its own",
            f"{cure}, or --replicas 1",
        )
    if run.zero and need in _OF_WHOLE_STATE:
        others = [name for name in names if not METHODS[name].needs & _OF_WHOLE_STATE]
        return (
            "reads the optimizer's state of every weight of its stage, and under --zero "
            f"{run.zero} each replica has a part of it",
            f"--staleness {'+'.join(others) or 'stash'}, or --zero 0",
        )
    is_kept = any(METHODS[name].keeps_forward for name in names)
    if not is_kept and need in ("forward weights", "gap"):
        why = _no_last_step(names, run) if need == "gap" else "which are not kept"
        with_stash = "+".join(["stash", *(name for name in names if not _reads_otherwise(name))])
        if why:
            return f"compares with the weights of the forward, {why}", f"--staleness {with_stash}"
    if need == "recomputation" and not run.recomputes:
        stages = run.without_recompute
        who = f"stage{'s' if stages[1:] else ''} {', '.join(map(str, stages))}"
        return (
            "needs a second forward in every stage but the last, and "
            f"{who} {'recompute' if stages[1:] else 'recomputes'} nothing",
            "--recompute all",
        )
    if need == "whole windows" and run.step_every <= run.ahead:
        return (
            f"needs at least {run.ahead + 1} micro-batches per step, one more than the first "
            f"stage runs ahead, but there are {run.step_every}",
            f"--micro-batches {run.ahead + 1}",
        )
    if need == "rates" and not any(METHODS[name].expects_rates for name in names):
        return "sets the learning rates that predictions expect, but no method predicts", (
            "Add +msnag."
        )
    return None


def _no_last_step(names: Iterable[str], run: Conditions) -> str:
    """Why the last step cannot give the weights of the forward; "" if it can."""
    if run.delay > 1:
        return f"which are not kept, and gradients are up to {run.delay} steps late"
    if _is_without_momentum(run):
        return f"which are not kept, and {_in_words(run)} has no record of its last step"
    for name in names:
        if METHODS[name].decides & {"forward", "backward", "step"}:
            return f"which are not kept, and differ by more than a step under {name}"
    return ""


def _reads_otherwise(name: str) -> bool:
    """True if a method decides which weights a backward reads, so that it excludes a stash."""
    return "backward" in METHODS[name].decides | METHODS[name].leaves


def _is_without_momentum(run: Conditions) -> bool:
    return facts_of(run.optimizer).has_momentum and not run.momentum


def _has_plain_momentum(run: Conditions) -> bool:
    return bool(run.momentum) and not run.nesterov


def _in_words(run: Conditions) -> str:
    if _is_without_momentum(run):
        return f"{run.optimizer} without momentum"
    return f"{run.optimizer} with --nesterov" if run.nesterov else run.optimizer


AUTO = "auto"


def recommended(
    optimizer: str,
    delay: int,
    *,
    micro_batches: int,
    momentum: float = 0.95,
    replicas: int = 1,
    tensor_ranks: int = 1,
) -> str:
    """The recommended methods, joined by +, for the longest delay in steps. Without its `momentum`
    Muon does not predict. Replicas predict without the gradients of a step, of which each has some;
    tensor ranks do not predict: each has parts of the gradients and the state of some matrices.

    >>> recommended("muon", 1, micro_batches=8), recommended("muon", 7, micro_batches=1)
    ('stash+partial-gradient+delay-rate', 'stash+hidden-delay-rate')
    >>> recommended("adamw", 1, micro_batches=8), recommended("adamw", 7, micro_batches=1)
    ('stash+partial-gradient', 'stash')
    >>> recommended("adamw", 1, micro_batches=8, tensor_ranks=2)
    'stash'
    >>> recommended("muon", 1, micro_batches=8, tensor_ranks=2)
    'stash+delay-rate'
    """
    facts, is_whole = facts_of(optimizer), replicas == tensor_ranks == 1
    if not delay or not facts.recommended_to_predict:
        return "stash"
    if not facts.recommended_to_slow:
        return "stash+partial-gradient" if micro_batches > 1 and is_whole else "stash"
    if tensor_ranks > 1:
        return "stash+delay-rate"
    if micro_batches == 1:
        return "stash+hidden-delay-rate"
    if not momentum:
        return "stash+delay-rate"
    return f"stash+{'partial-gradient' if replicas == 1 else 'msnag'}+delay-rate"
