"""The depths of a freezing rule, and the blocks of a model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.runtime.freezing.blocks import FreezeError, blocks_of
from asyncpipe.runtime.freezing.plasticity import Evidence
from asyncpipe.runtime.freezing.rules import Progress, in_full, parse_rule, share_frozen
from asyncpipe.runtime.plan.plan import Plan, SharedParameter
from asyncpipe.tests.support.models.plans import plan_by_hand, stage_by_hand

PUBLISHED = {
    (12, "1/5"): [0, 3, 5, 6, 8, 9, 9, 10, 10, 11],
    (12, "1/4"): [0, 3, 6, 7, 9, 10, 10, 11, 11, 12],
    (12, "1/3"): [0, 4, 7, 9, 10, 11, 11, 12, 12, 12],
    (12, "2/5"): [0, 5, 8, 10, 11, 12],
    (12, "0.5"): [0, 6, 9, 11, 12, 12],
    (24, "1/3"): [0, 8, 14, 17, 20, 21, 22, 23, 24, 24],
}


@pytest.mark.parametrize(("blocks", "share"), PUBLISHED)
def test_the_schedule_is_that_of_the_published_code(blocks: int, share: str) -> None:
    depths = PUBLISHED[blocks, share]
    rule = parse_rule(f"schedule:{share}")
    assert [rule.depth(event, blocks) for event in range(len(depths))] == depths


@given(
    st.fractions(Fraction(1, 50), Fraction(49, 50), max_denominator=50),
    st.integers(1, 48),
    st.integers(0, 30),
)
def test_a_schedule_is_monotone_and_is_its_formula(
    share: Fraction, blocks: int, event: int
) -> None:
    depth = share_frozen(share, event, blocks)
    assert depth == math.ceil(blocks * (1 - (1 - share) ** event))
    assert depth <= share_frozen(share, event + 1, blocks) <= blocks
    assert share_frozen(share, 10**9, blocks) == blocks


@given(
    st.fractions(Fraction(1, 20), Fraction(19, 20), max_denominator=20),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=24),
    st.integers(0, 24),
)
def test_gradients_freeze_up_to_the_smallest_of_those_that_train(
    share: Fraction, squares: list[float], before: int
) -> None:
    before, blocks = min(before, len(squares)), len(squares)
    depth = parse_rule(f"gradnorm:{share}").depth(1, blocks, before=before, squares=squares)
    assert before <= depth <= before + math.ceil(share * (blocks - before))
    if depth > before:
        assert min(squares[before:]) in squares[depth - 1 :]
        assert all(square > min(squares[before:]) for square in squares[before : depth - 1])


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(0, 12),
)
def test_progress_never_goes_back_and_keeps_what_must_train(
    depths: list[int], events: list[int], most: int
) -> None:
    table = ",".join(f"{at}={depth}" for at, depth in enumerate(sorted(depths), 1))
    progress = Progress()
    for event in sorted(events):
        following = progress.after(parse_rule(table), event, 12, most)
        assert progress.depth <= following.depth <= most and following.event == event
        progress = following


Similar = st.lists(st.floats(-1, 1), min_size=4, max_size=4).map(tuple)


@given(
    st.fractions(Fraction(1, 20), Fraction(19, 20), max_denominator=20),
    st.lists(st.lists(Similar, min_size=5, max_size=5), min_size=1, max_size=8),
    st.integers(0, 5),
)
def test_plasticity_freezes_the_first_blocks_that_were_calm_twice(
    tolerance: Fraction, events: list[list[tuple[float, ...]]], most: int
) -> None:
    rule, progress = parse_rule(f"plasticity:{tolerance}"), Progress()
    small: list[list[bool]] = []
    for event, similarities in enumerate(events, 1):
        frozen = progress.depth
        seen = [() if block < frozen else own for block, own in enumerate(similarities)]
        progress = progress.seeing(seen, rule)
        evidence = progress.evidence
        if distances := evidence.distances:
            pairs = zip(distances, evidence.largest, strict=True)
            small.append([own <= tolerance * most_so_far for own, most_so_far in pairs])
            assert not any(distances[:frozen])
        following = progress.after(rule, event, 5, most)
        assert frozen <= following.depth <= most or frozen == following.depth
        for block in range(frozen, following.depth):
            assert small[-2][block] and small[-1][block]
        if len(small) > 1 and following.depth < most:
            assert not (small[-2][following.depth] and small[-1][following.depth])
        progress = Progress.of(json.loads(json.dumps(following.to_json())))
        assert progress == following


def test_similarities_of_other_samples_are_not_compared() -> None:
    first = Evidence().after([(1.0,) * 4], Fraction(1, 2)).after([(0.0,) * 4], Fraction(1, 2))
    assert first.distances == first.largest == (1.0,) and first.calm == (0,)
    other = first.after([(1.0,) * 9], Fraction(1, 2))
    assert (other.distances, other.largest, other.calm) == ((), (1.0,), ())
    assert other.after([(1.0,) * 9], Fraction(1, 2)).calm == (1,)


def test_a_file_is_a_table(tmp_path: Path) -> None:
    file = tmp_path / "rule.toml"
    file.write_text("2 = 4\n5 = 8\n")
    assert in_full(str(file)) == "2=4,5=8"
    assert [parse_rule(in_full(str(file))).depth(event, 12) for event in range(7)] == [
        *(0, 0, 4, 4, 4, 8, 8)
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("schedule:1.5", "is not between 0 and 1"),
        ("schedule:1/0", "is not a number"),
        ("plasticity:1", "is not between 0 and 1"),
        ("1=4,2=3", "frozen blocks stay frozen"),
        ("1=4,1=5", "frozen blocks stay frozen"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(text: str, fault: str) -> None:
    with pytest.raises(FreezeError, match=fault):
        parse_rule(text)


@pytest.mark.parametrize("content", ["", "a = 1", "1 = 2.5", "1 = true", "1 = -1", "[frozen]\n"])
def test_a_file_that_is_no_table_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "rule.toml"
    file.write_text(content)
    with pytest.raises(FreezeError, match="rule.toml"):
        in_full(str(file))


def plan_of(*names: str, cut: int = 1) -> Plan:
    """A plan of two stages with these parameters."""
    stages = [
        stage_by_hand(j, inputs=("x",), outputs=("y",), parameters=own)
        for j, own in enumerate((names[:cut], names[cut:]))
    ]
    return plan_by_hand(
        "model",
        sizes={"batch": 1},
        inputs=(),
        values=(),
        outputs="y",
        loss=None,
        stages=tuple(stages),
        state_keys=names,
    )


def test_embeddings_freeze_with_the_first_block_and_the_head_trains() -> None:
    names = ("wte", "wpe", "h.0.a.weight", "h.0.a.bias", "h.1.a.weight", "ln_f", "head.weight")
    blocks = blocks_of(plan_of(*names))
    assert blocks.paths == ("h.0", "h.1") and blocks.most == 2
    assert [blocks.frozen(depth) for depth in range(3)] == [
        frozenset(),
        frozenset(names[:4]),
        frozenset(names[:5]),
    ]
    assert all(blocks_of(plan_of(*names, cut=cut)) == blocks for cut in range(len(names)))


def test_a_tied_head_is_the_embedding_and_freezes_with_it() -> None:
    plan = plan_of("wte", "h.0.a", "h.1.a", "h.0.b", "norm", "head")
    tied = SharedParameter(("head", "wte"), ((0, "wte"), (1, "head")))
    blocks = blocks_of(replace(plan, shared=(tied,)))
    assert blocks.frozen(1) == {"wte", "head", "h.0.a", "h.0.b"} and blocks.head == ("norm",)


def test_lists_of_one_name_follow_one_another() -> None:
    of_t5 = ("shared", "encoder.block.0.layer.0.w", "encoder.block.1.layer.0.w", "encoder.norm")
    of_t5 += ("decoder.block.0.layer.0.w", "decoder.block.0.layer.1.w", "decoder.norm")
    blocks = blocks_of(plan_of(*of_t5))
    assert blocks.paths == ("encoder.block.0", "encoder.block.1", "decoder.block.0")
    assert blocks.frozen(3) - blocks.frozen(2) == {"encoder.norm", *of_t5[4:6]}
    resnet = ("conv1", "layer1.0.conv", "layer1.1.conv", "layer2.0.conv", "fc.0.weight")
    assert blocks_of(plan_of(*resnet)).paths == ("layer1.0", "layer1.1", "layer2.0")


def test_a_model_whose_blocks_are_all_of_it_keeps_the_last_one() -> None:
    assert blocks_of(plan_of("layers.0.w", "layers.2.w", "layers.4.w")).most == 2


@pytest.mark.parametrize("names", [("a.weight", "b.weight"), ("a.0.weight", "b.weight")])
def test_a_model_without_repeated_blocks_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(FreezeError, match="model has no list of repeated blocks"):
        blocks_of(plan_of(*names))
