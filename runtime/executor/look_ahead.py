"""A rank's program -> the inputs of each stage's next forward, shown before it is due.

Inputs are shown when an earlier action of the stage begins, if they are known then: those of a feed
within a step, and messages that have arrived, if the transport can tell. A feed is asked for its
micro-batches in the same order as without.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from ..schedule.schedule import Action
from ..transports.protocol import GENERATOR_STATE
from .run import PipelineRun
from .stage import Stage


class LookAhead:
    """Shows stages the inputs of their next forward."""

    def __init__(self, run: PipelineRun, stages: Mapping[int, Stage]) -> None:
        self._run, self._stages = run, stages
        self._next: list[Action | None] = []
        self._shown: dict[int, Action] = {}
        following: dict[int, Action] = {}
        for action in reversed(run.program):
            self._next.append(following.get(action.stage))
            if action.kind == "F":
                following[action.stage] = action
        self._next.reverse()

    def before(self, position: int) -> None:
        """Shows the next inputs of the stage that is about to compute, if they are known."""
        coming, action = self._next[position], self._run.program[position]
        if coming is None or action.kind not in ("F", "B", "W") or self._run.is_empty(coming):
            return
        stage = self._stages[action.stage]
        if stage.around is None or self._shown.get(action.stage) is coming:
            return
        inputs = self._inputs(stage, coming, action)
        if inputs is not None:
            self._shown[action.stage] = coming
            with nullcontext() if self._run.training else torch.no_grad():
                stage.look_ahead(inputs, coming.index)

    def _inputs(self, stage: Stage, coming: Action, action: Action) -> dict[str, Tensor] | None:
        run, inputs = self._run, dict[str, Tensor]()
        for channel in run.mailbox.incoming("activation", coming.stage):
            if channel.name == GENERATOR_STATE:
                continue
            tensor = run.mailbox.early(channel, coming.index)
            if tensor is None:
                return None
            inputs[channel.name] = tensor
        if inputs.keys() >= set(stage.spec.inputs):
            return inputs
        every = run.schedule.step_every
        if coming.index // every != action.index // every:  # a later step may be left out
            return None
        if action.kind == "F":  # whose own inputs come first in the data
            run.feed.early(run.numbers.number(action.index))
        return inputs | dict(run.feed.early(run.numbers.number(coming.index)))
