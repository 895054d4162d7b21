"""The facts of each optimizer: its memory, options, defaults and what staleness methods may use.

The command line, the planner, the runtime and the staleness methods read this table. A new
optimizer needs an entry here and, unless torch has it, a class that the entry names. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The facts of one optimizer."""

    code: str
    """The class that implements it, as module:Class; `.soap` is soap.py of this package."""
    copies: int
    """Tensors as large as the parameters in its state, for the memory model."""
    takes: tuple[str, ...] = ()
    """The options of a run that its class takes: momentum, nesterov, betas, eps, refresh_every."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Fixed arguments of the class."""
    fused: bool = False
    """It has torch's fused implementation."""
    state: tuple[str, ...] = ()
    """The names of its state of each parameter after a step."""
    state_of_vectors: tuple[str, ...] = ()
    """The same for parameters that are not matrices, where it differs."""
    lr: float | None = None
    """The default learning rate; None for the default of the data."""
    momentum: float = 0.0
    """The default momentum."""
    refresh_every: int | None = None
    """The default number of steps between refreshes of its bases."""
    weight_decay: float = 0.0
    """The default weight decay: 0 where decay is added to the gradient."""
    elementwise: bool = True
    """It steps each number by itself; otherwise a step depends on the whole matrix."""
    hidden_matrices_only: bool = False
    """It steps hidden matrices alone; AdamW steps the other parameters."""
    velocity: bool = False
    """Its momentum buffer, for sgd times the learning rate, is its next step without a gradient."""
    adam_moments: bool = False
    """Its state has Adam's two moments of every parameter, in the axes of the weights."""
    real_only: bool = False
    """Its class refuses complex parameters."""
    plain_sgd: bool = False
    """It is torch's SGD, whose step some staleness methods replace."""
    rotates: bool = False
    """It keeps covariances and bases of matrices (`rotation_bytes` of the cost graph)."""
    predicted: bool = False
    """`staleness/prediction.py` has the formula of its steps without gradients."""
    recommended_to_predict: bool = False
    """`partial-gradient` lowered losses (docs/asynchronous-evidence.md)."""
    recommended_to_slow: bool = False
    """`delay-rate` and `hidden-delay-rate` lowered losses as well."""
    known_step_sizes: bool = False
    """The size of its steps follows from its state (`staleness/step_sizes.py`)."""
    known_response: bool = False
    """Its momentum can give late gradients more weight (`spike-compensation`)."""
    timed_as: str | None = None
    """The optimizer whose step is timed in its place when a plan is made."""
    smaller: tuple[str, ...] = ()
    """Optimizers with less memory, proposed where a plan does not fit."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a run that it has, and those of the AdamW for other parameters."""
        others = OPTIMIZERS["adamw"].takes if self.hidden_matrices_only else ()
        return tuple(dict.fromkeys((*self.takes, *others)))

    @property
    def title(self) -> str:
        """The name of its class; "" for the user's own."""
        return self.code.rpartition(":")[2]

    @property
    def has_direction(self) -> bool:
        """True if its state has the direction of its last step in the axes of the weights."""
        return self.velocity or self.adam_moments

    @property
    def has_momentum(self) -> bool:
        """True for an optimizer with a momentum buffer."""
        return "momentum_buffer" in self.state

    def load(self) -> Any:
        """Imports the class that implements it."""
        module, _, name = self.code.partition(":")
        return getattr(import_module(module, __package__), name)


_SMALLER_THAN_ADAM = ("momentum", "sgd")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)

OPTIMIZERS: Mapping[str, OptimizerFacts] = MappingProxyType(
    {
        "adamw": OptimizerFacts(
            code="torch.optim:AdamW",
            copies=2,
            takes=("betas", "eps"),
            fused=True,
            weight_decay=0.01,
            state=_MOMENTS,
            adam_moments=True,
            predicted=True,
            recommended_to_predict=True,
            known_step_sizes=True,
            known_response=True,
            smaller=_SMALLER_THAN_ADAM,
        ),
        "adam": OptimizerFacts(
            code="torch.optim:Adam",
            copies=2,
            takes=("betas", "eps"),
            fused=True,
            state=_MOMENTS,
            adam_moments=True,
            predicted=True,
            known_step_sizes=True,
            known_response=True,
            smaller=_SMALLER_THAN_ADAM,
        ),
        "nadam": OptimizerFacts(
            code="torch.optim:NAdam",
            copies=2,
            takes=("betas", "eps"),
            arguments={"decoupled_weight_decay": True},
            weight_decay=0.01,
            state=(*_MOMENTS, "mu_product"),
            adam_moments=True,
            predicted=True,
            smaller=_SMALLER_THAN_ADAM,
        ),
        # torch's fused SGD fails when a parameter has its first gradient later than others, as a
        # tied one has in an asynchronous run.
        "sgd": OptimizerFacts(
            code="torch.optim:SGD",
            copies=0,
            takes=("momentum", "nesterov"),
            lr=0.1,
            momentum=0.9,
            state=_MOMENTUM,
            velocity=True,
            plain_sgd=True,
            predicted=True,
            known_step_sizes=True,
            known_response=True,
        ),
        "sutskever": OptimizerFacts(
            code=".soap:Sutskever",
            copies=1,
            takes=("momentum",),
            lr=0.1,
            momentum=0.9,
            state=_MOMENTUM,
            velocity=True,
            predicted=True,
            known_step_sizes=True,
            timed_as="momentum",
            smaller=("sgd",),
        ),
        # One copy of hidden matrices, and of the rest the two of AdamW, which are counted of all.
        "muon": OptimizerFacts(
            code="torch.optim:Muon",
            copies=2,
            takes=("momentum",),
            state=_MOMENTUM,
            predicted=True,
            recommended_to_predict=True,
            recommended_to_slow=True,
            known_response=True,
            # Steps as large as AdamW's, so that one learning rate is right for both.
            arguments={"adjust_lr_fn": "match_rms_adamw"},
            momentum=0.95,
            weight_decay=0.01,
            hidden_matrices_only=True,
            elementwise=False,
            timed_as="adamw",
            smaller=_SMALLER_THAN_ADAM,
        ),
        # Its covariances and bases are in the costs of the graph (`graph/cost_graph.py`).
        "soap": OptimizerFacts(
            code=".soap:Soap",
            copies=2,
            takes=("betas", "eps", "refresh_every"),
            state=_MOMENTS,
            rotates=True,
            predicted=True,
            refresh_every=10,
            weight_decay=0.01,
            hidden_matrices_only=True,
            elementwise=False,
            timed_as="adamw",
        ),
        # A mean for each row and each column of a matrix: less than a percent of a wide one.
        "adafactor": OptimizerFacts(
            code="torch.optim:Adafactor",
            copies=0,
            state=("step", "row_var", "col_var"),
            state_of_vectors=("step", "variance"),
            elementwise=False,
            real_only=True,
            lr=0.01,
        ),
    }
)
"""The optimizers of a run."""

OWN = OptimizerFacts(code="", copies=0)
"""An optimizer of the user's own, of which nothing is known."""


def facts_of(name: str) -> OptimizerFacts:
    """The facts of an optimizer of a run: one of the table, or the user's own."""
    return OPTIMIZERS.get(name, OWN)


PLANNED: Mapping[str, OptimizerFacts] = MappingProxyType(
    {
        **OPTIMIZERS,
        "momentum": OptimizerFacts(
            code="torch.optim:SGD",
            copies=1,
            arguments={"momentum": 0.9},
            state=_MOMENTUM,
            smaller=("sgd",),
        ),
    }
)
"""The optimizers that a plan counts: those of a run, and `momentum`, which is sgd with momentum."""


def that_take(option: str) -> tuple[str, ...]:
    """The optimizers of a run that have an option.

    >>> that_take("momentum")
    ('sgd', 'sutskever', 'muon')
    """
    return tuple(name for name, facts in OPTIMIZERS.items() if option in facts.options)


def in_words(names: Iterable[str]) -> str:
    """Names as a phrase.

    >>> in_words(["adamw", "muon", "soap"])
    'adamw, muon and soap'
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def defaults_in_words(fact: str, form: str) -> str:
    """The defaults of the optimizers for which a fact is not zero or None, as a phrase.

    >>> defaults_in_words("momentum", "{names} (default {value:g})")
    'sgd and sutskever (default 0.9), muon (default 0.95)'
    """
    by_value: dict[Any, list[str]] = {}
    for name, facts in OPTIMIZERS.items():
        if value := getattr(facts, fact):
            by_value.setdefault(value, []).append(name)
    return ", ".join(
        form.format(names=in_words(names), value=value) for value, names in by_value.items()
    )
