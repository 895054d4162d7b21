"""The phases of an elastic run: the pipeline that trains what is left at each number of frozen
blocks.

    generated_models/vit_4p/elastic.json        the phases
    generated_models/vit_4p/phases/f04_2p/      the plan and the stages of one, without weights

In all phases the same processes run. The ones that a shorter pipeline frees are replicas, which
share out the samples of a step or have as many each as before, or they are idle. The first phase is
the folder itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import PlanError
from ..formatting import counted
from ..limits import Choice, Text, bytes_of
from ..serialization import Origin, parse_json, read_text, shaped
from .rules import SCHEDULE, TABLE, Rule

REPLICAS, BATCH, OFF = "replicas", "batch", "off"
GROWS = Choice((REPLICAS, BATCH, OFF))
"""The values of `--grow`: what grows where a shorter pipeline frees processes."""
AUTO_CACHE, NO_CACHE = "auto", "off"


def _is_cache(text: str) -> bool:
    return text in (AUTO_CACHE, NO_CACHE) or bool(bytes_of(text))


CACHES = Text("auto, off or a memory size such as 2GiB", "2GiB", _is_cache)
"""The values of `--cache`."""

FILE, FOLDER = "elastic.json", "phases"
SCHEDULES = ("1f1b", "gpipe")
"""The schedules whose pipelines may become shorter."""
_NAME = re.compile(rf"{FOLDER}/f\d{{2,6}}_\d{{1,4}}p")


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run.

    depth: the number of frozen blocks from which on it applies.
    folder: its folder within the generated one; "" for that itself.
    stages: the length of the pipeline.
    step_ms: the predicted time of a step on all processes that train.
    peak_bytes: the predicted memory of the fullest rank.
    """

    depth: int
    folder: str
    stages: int
    step_ms: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Elastic:
    """The phases of a generated folder in ascending depth.

    processes: those of every phase.
    micro_batches: those of a first step, for which the phases were planned.
    phases: the phases, the first of which has depth 0.
    grow: the value of `--grow` for which they were planned.
    cached: they were planned for runs with a cache, in which frozen blocks take no time.
    """

    processes: int
    micro_batches: int
    phases: tuple[Phase, ...]
    grow: str = REPLICAS
    cached: bool = False

    def at(self, depth: int) -> Phase:
        """The phase with so many frozen blocks."""
        return [phase for phase in self.phases if phase.depth <= depth][-1]

    def replicas(self, stages: int) -> int:
        """The pipelines of that length."""
        return 1 if self.grow == OFF else self.processes // stages

    def own_micro_batches(self, stages: int) -> int:
        """The micro-batches of a step in each pipeline of that length."""
        shared = self.replicas(stages) if self.grow == REPLICAS else 1
        return self.micro_batches // shared

    def growth(self, stages: int) -> int:
        """How many times the samples of a first step a step has with pipelines of that length."""
        return self.replicas(stages) if self.grow == BATCH else 1

    def sample_ms(self, phase: Phase) -> float:
        """The predicted time of a phase for as many samples as a first step has."""
        return phase.step_ms / self.growth(phase.stages)

    def difference(self, grow: str, cache: str) -> str:
        """A sentence about a run with these options; "" if it is the one that was planned for."""
        planned = _in_words(self.grow, self.cached)
        given = _in_words(grow, cache != NO_CACHE)
        if planned == given:
            return ""
        return (
            f"planned for {planned}, but this run has {given}: its results are right, and its "
            "lengths and predictions are those of the plan"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def _in_words(grow: str, cached: bool) -> str:
    return f"--grow {grow} {'with' if cached else 'without'} --cache"


def check_lengths(lengths: Sequence[int], stages: int | None, schedule: str | None) -> None:
    """Raises PlanError for lengths that no pipeline can have one after the other."""
    given = ",".join(map(str, lengths))
    if lengths[0] != stages:
        raise PlanError(
            f"--elastic {given} begins with {lengths[0]}, but --stages is {stages}.",
            f"--stages {lengths[0]}",
        )
    for longer, shorter in zip(lengths, lengths[1:], strict=False):
        if shorter >= longer or lengths[0] % shorter:
            raise PlanError(
                f"--elastic {given}: {shorter} after {longer}, but each length must be smaller "
                f"than the one before and divide {lengths[0]}.",
                "--elastic 4,2,1, for example.",
            )
    if schedule not in SCHEDULES:
        name = "not given" if schedule is None else schedule
        raise PlanError(
            f"--elastic plans for a synchronous schedule, but --schedule is {name}.",
            f"--schedule {' or '.join(SCHEDULES)}",
        )


def pipelines(stages: int, replicas: int, processes: int) -> str:
    """
    >>> pipelines(2, 2, 4), pipelines(1, 1, 2)
    ('2 stages x 2 replicas', '1 stage x 1 replica, 1 of 2 processes idle')
    """
    idle = processes - stages * replicas
    beside = f", {idle} of {counted(processes, 'process', 'processes')} idle" if idle else ""
    return f"{counted(stages, 'stage')} x {counted(replicas, 'replica')}{beside}"


def phase_folder(depth: int, stages: int) -> str:
    """
    >>> phase_folder(4, 2)
    'phases/f04_2p'
    """
    return f"{FOLDER}/f{depth:02}_{stages}p"


def read_elastic(folder: Path) -> Elastic:
    """The phases of a generated folder. Raises PlanError for one without phases, and for a damaged
    file."""
    path = folder / FILE
    if not path.is_file():
        raise PlanError(
            f"{folder} has no phases for --elastic.",
            "asyncpipe-partition --elastic 4,2,1, for example, plans them.",
        )
    origin = Origin(f"{path} is not a list of phases: it", PlanError, "Partition the model again.")
    elastic = shaped(Elastic, parse_json(read_text(path, origin), origin), origin)
    depths = [phase.depth for phase in elastic.phases]
    lengths = [phase.stages for phase in elastic.phases]
    names = [phase.folder for phase in elastic.phases]
    is_whole = (
        depths[:1] == [0]
        and depths == sorted(set(depths))
        and lengths == sorted(lengths, reverse=True)
        and all(length > 0 and elastic.processes % length == 0 for length in lengths)
        and GROWS.has(elastic.grow)
        and names[:1] == [""]
        and all(_NAME.fullmatch(name) for name in names[1:])
    )
    if not is_whole:
        raise origin.refused(" has phases that cannot follow each other.")
    return elastic


def reachable_depths(rule: Rule | None, blocks: int, most: int) -> Sequence[int]:
    """The numbers of frozen blocks that a rule can reach, in ascending order: all without a rule,
    and for one that follows gradients.

    >>> from .rules import parse_rule
    >>> reachable_depths(parse_rule("schedule:1/3"), 12, 10), reachable_depths(None, 4, 3)
    ([0, 4, 7, 9, 10], [0, 1, 2, 3])
    """
    if rule is None or rule.kind not in (TABLE, SCHEDULE):
        return [*range(most + 1)]
    last = rule.table[-1][0] if rule.kind == TABLE else None
    depths, event = [0], 0
    while depths[-1] < most and (last is None or event < last):
        event += 1
        depths.append(min(most, max(depths[-1], rule.depth(event, blocks))))
    return sorted(set(depths))
