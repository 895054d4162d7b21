"""Checkpoints that a run may go on from -> the first whose files are as they were written.

Every rank reads its part of the files and all hear what each found, so that they go on from the
same one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..launching.world import World
from .folders import CheckpointError, Facts, damage_of, read_facts

_LONGEST = 256


@dataclass(frozen=True)
class Found:
    """A good checkpoint, and what it says of itself."""

    path: Path
    facts: Facts


def first_good(
    candidates: Sequence[Path], world: World, *, may_skip: bool
) -> tuple[Found | None, list[str]]:
    """The first of the candidates that is whole, and a sentence about each that was not; rank 0's
    candidates are those of all. Collective.

    Raises CheckpointError, on all ranks, where none is whole, or where none may be skipped.
    """
    told = world.text_of_first(json.dumps([str(path) for path in candidates]))
    skipped: list[str] = []
    for path in map(Path, json.loads(told)):
        damage = damage_of(path, part=world.rank, parts=world.ranks)
        answers = world.gathered(damage.encode()[:_LONGEST].ljust(_LONGEST))
        found = [answer.decode(errors="replace").strip() for answer in answers]
        if not any(found):
            return Found(path, read_facts(path)), skipped
        skipped.append(f"{path} is damaged: {next(filter(None, found))}.")
        if not may_skip:
            raise CheckpointError(skipped[0], f"--resume {path.parent.parent} takes the newest.")
    if skipped:
        raise CheckpointError(
            f"no checkpoint is whole. {' '.join(skipped)}",
            "Take another --output to begin anew.",
        )
    return None, []
