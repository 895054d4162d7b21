"""The gap that a run tells: the norm of what lies between a forward's weights and the live ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncpipe.runtime.executor.weight_binding import SAMPLED, Gap, gap_to, sampled
from asyncpipe.tests.runtime.training.test_asynchronous_runs import folder, steps_of, train
from asyncpipe.tests.support.models.hand_plans import chain
from asyncpipe.tests.support.oracles.async_equality import recomputing
from asyncpipe.tests.support.processes.executor import Seen, lowered, train_together

__all__ = ["folder"]

STAGES = 3


@dataclass
class Watched(Seen):
    """Keeps the weights of every version, and the gaps reported to it, by stage and version."""

    versions: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    gaps: dict[tuple[int, int], list[Gap]] = field(default_factory=lambda: defaultdict(list))

    def on_step(self, stage: int, version: int) -> None:
        self.versions.setdefault((stage, version - 1), self._weights(stage))
        super().on_step(stage, version)
        self.versions[stage, version] = self._weights(stage)

    def wants_gap(self, version: int) -> bool:
        return version % 2 == 0

    def on_gap(self, stage: int, version: int, gap: Gap) -> None:
        self.gaps[stage, version].append(gap)

    def _weights(self, stage: int) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.modules[stage].parameters()]


@pytest.mark.parametrize("staleness", ["none", "stash"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_gap_is_the_norm_between_two_versions(
    staleness: str, every: int, recomputes: bool
) -> None:
    model = recomputing(chain(STAGES)) if recomputes else chain(STAGES)
    trained = train_together(
        model,
        lowered(model, "async-1f1b", 6 * every, every),
        optimize=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        staleness=staleness,
        observer=Watched,
    )
    seen = trained.seen
    assert isinstance(seen, Watched)
    expected = defaultdict(list)
    for stage, _, read, met in sorted(trained.ledger):
        if met % 2:
            pairs = zip(seen.versions[stage, read], seen.versions[stage, met], strict=True)
            squares = [float((one - other).square().sum()) for one, other in pairs]
            expected[stage, met + 1].append(sum(squares))
    assert max(map(max, expected.values())) > 0
    assert {key: [float(gap.difference) for gap in gaps] for key, gaps in seen.gaps.items()} == {
        key: pytest.approx(squares) for key, squares in expected.items()
    }
    for (stage, version), gaps in seen.gaps.items():
        live = sum(float(w.square().sum()) for w in seen.versions[stage, version - 1])
        assert [float(gap.live) for gap in gaps] == pytest.approx([live] * every)


@given(
    st.lists(st.integers(0, 40 * SAMPLED), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.complex64]),
)
def test_a_part_of_large_tensors_tells_the_norms_of_all(
    sizes: list[int], dtype: torch.dtype
) -> None:
    drawn = partial(torch.randn, dtype=dtype, generator=torch.Generator().manual_seed(len(sizes)))
    live = {str(i): drawn(size) for i, size in enumerate(sizes)}
    read = {name: value + 0.1 for name, value in live.items()}
    parts = sampled(read)
    assert all(part.numel() <= SAMPLED for part in parts)
    gap = gap_to(live, parts)
    assert float(gap.difference) == pytest.approx(0.01 * sum(sizes), rel=1e-3)
    whole = sum(float(value.norm()) ** 2 for value in live.values())
    assert sqrt(float(gap.live)) == pytest.approx(sqrt(whole), rel=0.25)


def test_metrics_have_the_gap_of_the_logged_steps(folder: Path, tmp_path: Path) -> None:
    gaps = steps_of(train(folder, tmp_path / "run", lr=0.1, warmup=0), "gap")
    assert gaps[0] == 0 and all(0 < gap < 1 for gap in gaps[2:])
    slower = steps_of(train(folder, tmp_path / "slower", lr=0.01, warmup=0), "gap")
    assert slower[-1] < gaps[-1] / 4
