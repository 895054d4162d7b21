"""`--freeze RULE` -> the number of frozen blocks after each event, and the steps of the events.

    schedule:ALPHA     of the blocks that still train, the share ALPHA freezes at each event:
                       ceil(L (1 - (1 - ALPHA)^T)) of L blocks after event T (PipeTransformer,
                       He et al., ICML 2021)
    gradnorm:ALPHA     that share at most, and at most up to the block whose gradients were the
                       smallest since the last event, with it (the paper's equation 1)
    plasticity:TOLERANCE
                       the blocks from the first one on whose outputs have hardly changed at two
                       events in a row (Egeria, Wang et al., EuroSys 2023; see `plasticity.py`)
    3=4,6=8            a table: from event 3 on 4 blocks, from event 6 on 8; also as a TOML file

Frozen blocks stay frozen: no rule gives fewer than before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from operator import add
from pathlib import Path
from typing import Any

from ..serialization import Origin, parse_toml, read_text
from .blocks import FreezeError
from .plasticity import Evidence, Similarities, in_a_row

EPOCH = "epoch"
"""The value of `--freeze-every` for an event at the end of each epoch."""
TABLE = "table"
SCHEDULE, GRADNORM, PLASTICITY = "schedule", "gradnorm", "plasticity"
_TOLERANCE = Fraction(1, 5)
_NUMBER = "[0-9.]{1,20}(/[0-9]{1,9})?"
FORM = (
    rf"(schedule|gradnorm):{_NUMBER}|plasticity(:{_NUMBER})?"
    r"|[0-9]{1,9}=[0-9]{1,6}(,[0-9]{1,9}=[0-9]{1,6})*|.+\.toml"
)
"""The legal texts of a rule."""
WORDS = (
    "schedule:ALPHA, gradnorm:ALPHA, plasticity:TOLERANCE, a table such as 3=4,6=8, or a .toml file"
)


@dataclass(frozen=True)
class Rule:
    """When blocks freeze.

    kind: the name of the rule
    share: the share of the blocks that still train, ALPHA; of plasticity the tolerance
    table: (event, depth) in ascending order
    """

    kind: str
    share: Fraction = Fraction(0)
    table: tuple[tuple[int, int], ...] = ()

    def depth(
        self,
        event: int,
        blocks: int,
        *,
        before: int = 0,
        squares: Sequence[float] = (),
        calm: Sequence[int] = (),
    ) -> int:
        """The number of frozen blocks after an event, counted from 1, of a model with `blocks`.

        before: the number of blocks that are frozen already.
        squares: the squared norms of each block's gradients since the last event.
        calm: the events in a row at which each block's outputs have hardly changed.

        >>> [parse_rule("schedule:1/3").depth(event, 12) for event in range(8)]
        [0, 4, 7, 9, 10, 11, 11, 12]
        >>> parse_rule("gradnorm:1/3").depth(1, 6, squares=[4, 1, 2, 3, 3, 3])
        2
        """
        if self.kind == TABLE:
            return max((depth for at, depth in self.table if at <= event), default=0)
        if self.kind == SCHEDULE:
            return share_frozen(self.share, event, blocks)
        if self.kind == PLASTICITY:
            return before + in_a_row(calm[before:])
        smallest = min(range(before, blocks), key=lambda block: squares[block], default=before - 1)
        return min(before + share_frozen(self.share, 1, blocks - before), smallest + 1)


def share_frozen(share: Fraction, event: int, blocks: int) -> int:
    """ceil(L (1 - (1 - a)^T)), without rounding errors.

    >>> [share_frozen(Fraction(1, 2), event, 12) for event in range(6)]
    [0, 6, 9, 11, 12, 12]
    """
    active = Fraction(blocks)
    for _ in range(event):
        active *= 1 - share
        if active < 1:
            return blocks
    return blocks - int(active)


@dataclass(frozen=True)
class Progress:
    """How far freezing is.

    event: the number of events so far
    depth: the number of frozen blocks
    squares: the squared norms of each block's gradients since the last event; empty unless the rule
        reads them
    evidence: how much the outputs of blocks have changed; empty unless the rule reads them
    """

    event: int = 0
    depth: int = 0
    squares: tuple[float, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)

    def after(self, rule: Rule, event: int, blocks: int, most: int) -> Progress:
        """The progress after an event; at most `most` of the blocks freeze."""
        depth = rule.depth(
            event, blocks, before=self.depth, squares=self.squares, calm=self.evidence.calm
        )
        return Progress(event, max(self.depth, min(most, depth)), evidence=self.evidence)

    def plus(self, squares: Sequence[float]) -> Progress:
        """The progress with more squares of gradients."""
        before = self.squares or (0.0,) * len(squares)
        return replace(self, squares=tuple(map(add, before, squares)))

    def seeing(self, similarities: Sequence[Similarities], rule: Rule) -> Progress:
        """The progress with the similarities of an event."""
        return replace(self, evidence=self.evidence.after(similarities, rule.share))

    def to_json(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> Progress:
        """The progress that `to_json` wrote; that of a new run if there is none."""
        if not state:
            return cls()
        squares, evidence = tuple(state.get("squares", ())), Evidence.of(state.get("evidence"))
        return cls(state["event"], state["depth"], squares, evidence)


def parse_rule(text: str) -> Rule:
    """The rule that a text of `FORM` stands for. Raises FreezeError."""
    kind, colon, value = text.partition(":")
    if kind == PLASTICITY:
        return Rule(kind, share=_share(text, value) if colon else _TOLERANCE)
    if colon and kind in (SCHEDULE, GRADNORM):
        return Rule(kind, share=_share(text, value))
    entries = [tuple(map(int, entry.split("="))) for entry in text.split(",")]
    table = tuple(sorted((event, depth) for event, depth in entries))
    for (event, depth), (later, less) in zip(table, table[1:], strict=False):
        if later == event or less < depth:
            raise FreezeError(
                f"--freeze {text}: {less} blocks at event {later} after {depth} at event {event}, "
                "but frozen blocks stay frozen.",
                "Give each event once, with at least as many blocks as before.",
            )
    return Rule(TABLE, table=table)


def in_full(text: str) -> str:
    """The text of a rule, with the table of a file in place of its name. Raises FreezeError.

    A file has events as keys and depths as values: `3 = 4`.
    """
    if not text.endswith(".toml"):
        return text
    path = Path(text)
    origin = Origin(f"--freeze {path}", FreezeError, "Write lines such as 3 = 4: event = blocks.")
    if not path.is_file():
        raise origin.refused(" does not exist.")
    table = parse_toml(read_text(path, origin), origin)
    for event, depth in table.items():
        if not event.isdecimal() or isinstance(depth, bool) or not isinstance(depth, int):
            raise origin.refused(f" has {event} = {depth}, which is not an event and a depth.")
        if depth < 0:
            raise origin.refused(f" freezes {depth} blocks at event {event}.")
    if not table:
        raise origin.refused(" is empty.")
    return ",".join(f"{event}={depth}" for event, depth in table.items())


def _share(text: str, value: str) -> Fraction:
    try:
        share = Fraction(value)
    except (ValueError, ZeroDivisionError) as error:
        raise FreezeError(f"--freeze {text}: {value} is not a number.", "schedule:1/3") from error
    if not 0 < share < 1:
        raise FreezeError(
            f"--freeze {text} has the share {value}, which is not between 0 and 1.", "schedule:1/3"
        )
    return share


@dataclass(frozen=True)
class Events:
    """The events of a run, each after a step.

    every: the distance between two events, in units of `position`
    position: the place of a run after so many steps: the steps themselves, or the samples so far
    """

    every: int
    position: Callable[[int], int] = lambda step: step

    def number(self, step: int) -> int:
        """The number of the last event up to a step.

        >>> events = Events(10, lambda step: 4 * step)
        >>> [events.number(step) for step in (2, 3, 4, 5, 8)], events.next(3), events.next(5)
        ([0, 1, 1, 2, 3], 5, 8)
        """
        return self.position(step) // self.every

    def next(self, step: int) -> int:
        """The first step after `step` with an event."""
        missing = (self.number(step) + 1) * self.every - self.position(step)
        return step - (-missing // (self.position(step + 1) - self.position(step)))
