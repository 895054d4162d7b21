"""Collate functions that pad: micro-batches of other lengths, where these are possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncpipe.runtime.distributed.failure import RankError
from asyncpipe.tests.support.models.hand_folders import write_text
from asyncpipe.tests.support.oracles.resumed_runs import train

OWN = """
import random
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

TEXTS = [torch.arange(5 + index % 7) for index in range(24)]

def padded(samples):
    ids = pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "labels": ids}

def to_length(samples):
    ids = torch.stack([torch.nn.functional.pad(ids, (0, 16 - len(ids))) for ids in samples])
    return {"input_ids": ids, "labels": ids}

def varying():
    return DataLoader(TEXTS, batch_size=2, shuffle=True, collate_fn=padded)

def equal():
    return DataLoader(TEXTS, batch_size=2, shuffle=True, collate_fn=to_length, num_workers=1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "text"
    write_text(made)
    (made.parent / "own.py").write_text(OWN)
    return made


def test_one_process_trains_on_micro_batches_of_other_lengths(folder: Path, tmp_path: Path) -> None:
    data = f"{folder.parent / 'own.py'}:varying"
    trained = train(folder, tmp_path / "run", data=data, schedule="single", micro_batch_size=2)
    losses = list(trained.of("loss").values())
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_ranks_refuse_micro_batches_of_other_lengths_with_a_cure(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"has the sequence size \d+, but the ranks") as caught:
        train(folder, tmp_path / "run", data=f"{folder.parent / 'own.py'}:varying", seq=16)
    assert "Pad every micro-batch to 16 in the collate function" in caught.value.cure


def test_ranks_train_on_micro_batches_that_are_padded_to_the_run(
    folder: Path, tmp_path: Path
) -> None:
    data = f"{folder.parent / 'own.py'}:equal"
    runs = [
        train(folder, tmp_path / schedule, data=data, schedule=schedule, seq=16)
        for schedule in ("single", "1f1b")
    ]
    assert runs[0].of("loss") == runs[1].of("loss")
