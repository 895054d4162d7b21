"""The phases of an elastic run: the pipeline that trains what is left at each number of frozen
blocks.

    generated_models/vit_4p/elastic.json        the phases
    generated_models/vit_4p/phases/f04_2p/      the plan and the stages of one, without weights

In all phases the same processes run: stages x replicas is their number, and a step has the same
samples. The first phase is the folder itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import PlanError
from ..formatting import counted
from ..serialization import Origin, parse_json, read_text, shaped
from .rules import SCHEDULE, TABLE, Rule

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
    step_ms: the predicted time of a step on all processes.
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

    processes: stages x replicas in every phase.
    micro_batches: those of a step in all replicas, for which the phases were planned.
    phases: the phases, the first of which has depth 0.
    """

    processes: int
    micro_batches: int
    phases: tuple[Phase, ...]

    def at(self, depth: int) -> Phase:
        """The phase with so many frozen blocks."""
        return [phase for phase in self.phases if phase.depth <= depth][-1]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


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


def pipelines(stages: int, processes: int) -> str:
    """
    >>> pipelines(2, 4), pipelines(1, 4)
    ('2 stages x 2 replicas', '1 stage x 4 replicas')
    """
    return f"{counted(stages, 'stage')} x {counted(processes // stages, 'replica')}"


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
        and names[:1] == [""]
        and all(_NAME.fullmatch(name) for name in names[1:])
    )
    if not is_whole:
        raise origin.refused(" has phases that do not follow each other.")
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
