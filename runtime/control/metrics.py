"""`--metric file.py:f` -> means over the samples of an evaluation.

`f(outputs, target)` gets the outputs of a micro-batch in the structure that the model returns, with
None in place of tensors of other ranks, and its target: the labels that the model reads, or else
the target of the criterion; None if there is neither on this rank. It returns a number, a tensor of
one number, or a dict of these by name: means over the samples of the micro-batch.

For a metric that is not a mean over samples, such as F1 or perplexity, `f` is a class or an object
with a method `finish`. The values that its call returns are summed over all micro-batches, and
`finish(sums)` computes the metrics from these sums (a dict by name).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..config.settings import RunConfig, SettingsError
from ..distributed.process_groups import World, gather_alike
from ..executor.run import loss_stage, output_names
from ..monitoring.records import EvalRecord
from ..plan.plan import Plan
from ..plan.structure import rebuilt
from ..rng import drawing_from, import_seeded
from ..user_code import user_errors_as

Sums = dict[str, tuple[float, float]]
"""The name of a metric -> the sum of its values times their samples, and the number of samples; of
values that are sums already, as they are."""


class Metric:
    """The user's metric of a run."""

    def __init__(self, plan: Plan, config: RunConfig) -> None:
        self._plan, self._seed, self._spec = plan, config.seed, str(config.metric)
        self._what = f"--metric {self._spec}"
        own = import_seeded(self._spec, "--metric", SettingsError, self._seed)
        with user_errors_as(SettingsError, self._what):
            self._call = own() if isinstance(own, type) else own
        self._finish = getattr(self._call, "finish", None)
        self._absent = dict.fromkeys(output_names(plan))
        self._last = frozenset(plan.stages[loss_stage(plan)].outputs) & output_names(plan)

    def is_made_by(self, outputs: Mapping[str, Tensor]) -> bool:
        """True for the outputs of the last stage that makes some of the model's."""
        return not self._last.isdisjoint(outputs)

    @torch.no_grad()
    def of(
        self, micro_batch: int, outputs: Mapping[str, Tensor], target: Tensor | None
    ) -> dict[str, float]:
        """The metrics of a micro-batch by name. Raises SettingsError where the user's code fails or
        returns something else."""
        result = rebuilt(self._plan.outputs, {**self._absent, **outputs}, self._plan.sizes)
        with (
            drawing_from(self._seed, "metric", micro_batch),
            user_errors_as(SettingsError, self._what),
        ):
            returned = self._call(result, target)
        values = self._named(returned)
        return values if self._finish is not None else _free(values, self._what)

    def add(self, sums: Sums, values: Mapping[str, float], samples: int) -> None:
        """Adds what `of` returned for a micro-batch of so many samples."""
        weight = samples if self._finish is None else 1
        for name, value in values.items():
            total, count = sums.get(name, (0.0, 0.0))
            sums[name] = (total + value * weight, count + samples)

    def result(self, of_ranks: Iterable[Sums]) -> dict[str, float]:
        """The metrics of the samples of all ranks."""
        whole = joined(of_ranks)
        if self._finish is None:
            return {name: total / count for name, (total, count) in whole.items()}
        with user_errors_as(SettingsError, self._what):
            returned = self._finish({name: total for name, (total, _) in whole.items()})
        return _free(self._named(returned), self._what)

    def _named(self, returned: Any) -> dict[str, float]:
        name = self._spec.rpartition(":")[2]
        named = returned if isinstance(returned, Mapping) else {name: returned}
        return {str(key): self._number(str(key), value) for key, value in named.items()}

    def _number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) or (
            isinstance(value, Tensor) and value.numel() == 1
        )
        if not is_number:
            shape = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise SettingsError(
                f"{self._what} returned {shape} as {name}, which is not one number.",
                "Return the mean over the samples, or a sum for a method finish.",
            )
        return float(value)


_TAKEN = {"event", *(field.name for field in fields(EvalRecord))}


def _free(metrics: dict[str, float], subject: str) -> dict[str, float]:
    """The metrics; raises SettingsError for a name that an evaluation has already."""
    for name in metrics.keys() & _TAKEN:
        raise SettingsError(
            f"{subject} returned a metric named {name}, as a figure of the evaluation is.",
            "Choose another name.",
        )
    return metrics


def joined(of_ranks: Iterable[Sums]) -> Sums:
    """The sums of all ranks.

    >>> joined([{"f1": (3.0, 4.0)}, {}, {"f1": (1.0, 4.0), "recall": (2.0, 4.0)}])
    {'f1': (4.0, 8.0), 'recall': (2.0, 4.0)}
    """
    whole: Sums = {}
    for sums in of_ranks:
        for name, (total, count) in sums.items():
            before, samples = whole.get(name, (0.0, 0.0))
            whole[name] = (before + total, samples + count)
    return whole


def of_all_ranks(world: World, sums: Sums) -> list[Sums]:
    """The sums of each rank, on every rank. Collective."""
    own = json.dumps(sums).encode()
    lengths = world.gathered(len(own).to_bytes(8, "big"))
    longest = max(int.from_bytes(length, "big") for length in lengths)
    if world.control is None:
        return [sums]
    texts = gather_alike(own.ljust(longest), world.ranks, world.control)
    return [json.loads(text) for text in texts]
