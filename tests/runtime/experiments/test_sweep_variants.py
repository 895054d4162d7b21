"""Lists of values: each combination once, under a name of its own; what runs at once have."""

from __future__ import annotations

import string
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.distributed.cpu_affinity import Core, Topology
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.experiments.swept_runs import (
    Figures,
    SweptRun,
    read_record,
    sweep_table,
    write_record,
)
from asyncpipe.runtime.experiments.variants import (
    lists_from_texts,
    lists_of,
    lists_of_file,
    name_of,
    share_machine,
    variants,
)

VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=150)
)
LISTS = st.dictionaries(
    st.sampled_from(["lr", "seed", "data", "schedule"]),
    st.lists(VALUES, min_size=1, max_size=3, unique_by=repr),
    min_size=1,
)


@given(LISTS)
def test_every_combination_is_there_once_and_has_a_name_of_its_own(
    lists: dict[str, list[object]],
) -> None:
    made = variants(lists)
    assert len({tuple(map(repr, values.values())) for values in made}) == len(made)
    assert len(made) == prod(map(len, lists.values()))
    names = {name_of(values) for values in made}
    assert len(names) == len(made)
    for name in names:
        assert len(name) < 120 and set(name) & set("/\0\n ") == set() and name[0] not in ".-"


def test_values_are_of_the_type_of_their_option() -> None:
    texts = ["lr=1e-3,3e-3", "seed=1,2", "schedule=1f1b,gpipe", "eval-every=5", "betas=0.9/0.99"]
    assert lists_from_texts(texts) == {
        "lr": (0.001, 0.003), "seed": (1, 2), "schedule": ("1f1b", "gpipe"), "eval_every": (5,),
        "betas": ((0.9, 0.99),),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["lr"], "--sweep lr has no values"),
        (["lrr=1"], "Did you mean lr"),
        (["lr=1,x"], 'lr = "x" is not a number from 0'),
        (["seed=1,"], 'seed = "" is not a whole number'),
        (["seed=1.5"], 'seed = "1.5" is not a whole number'),
        (["seed=1", "seed=2"], "given already"),
        (["seed=1,2,1"], "1 is there twice"),
        (["output=a,b"], "output cannot differ between runs"),
        (["betas=0.9,0.99"], r"betas = \[0.9\] is not 2 values"),
        (["betas=0.9/x"], r"betas = \[0.9, 'x'\] is not 2 values"),
    ],
)
def test_a_wrong_list_is_named(texts: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        lists_from_texts(texts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sweep = 3", "sweep is not a table"),
        ("[sweep]\nlr = 0.1", "lr = 0.1 is not a list of values"),
        ("[sweep]\nlr = []", "is not a list of values"),
        ("[sweep]\nlr = ['x']", 'lr = "x" is not a number'),
        ("[sweep]\nlearning = [1]", "learning is not an option"),
    ],
)
def test_a_wrong_table_of_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(SettingsError, match=words):
        lists_of_file(tmp_path / "job.toml")


def test_a_flag_wins_over_the_lists_of_the_file(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[sweep]\nlr = [0.1, 1]\nseed = [1, 2]\nbetas = [[0.9, 0.99], [0.8, 0.9]]")
    betas = ((0.9, 0.99), (0.8, 0.9))
    assert lists_of((), config, ()) == {"lr": (0.1, 1.0), "seed": (1, 2), "betas": betas}
    assert lists_of(["lr=3"], config, {"seed"}) == {"lr": (3.0,), "betas": betas}
    with pytest.raises(SettingsError, match="by --sweep and by its own flag"):
        lists_of(["lr=3"], None, {"lr"})
    assert lists_of((), None, {"lr"}) == {}
    assert name_of({"betas": (0.9, 0.99)}).startswith("betas=0.9_0.99-")


def cores(count: int, quota: float = float("inf")) -> Topology:
    return Topology(tuple(Core(0, (cpu,)) for cpu in range(count)), quota)


def test_runs_at_once_have_cores_of_their_own() -> None:
    assert [sorted(share.cpus) for share in share_machine(2, cores(5))] == [[0, 1], [2, 3, 4]]
    (alone,) = share_machine(1, cores(4), gpus=["0", "1"])
    assert (alone.cpus, alone.environment) == (frozenset(), {})


def test_runs_that_cannot_have_cores_of_their_own_have_fewer_threads() -> None:
    shares = share_machine(2, cores(16, quota=8), ranks=2)
    assert [(share.cpus, share.environment) for share in shares] == [
        (frozenset(), {"OMP_NUM_THREADS": "2"})
    ] * 2
    assert share_machine(3, cores(2))[2].environment == {"OMP_NUM_THREADS": "1"}


def test_runs_at_once_have_gpus_of_their_own() -> None:
    shares = share_machine(2, cores(2), gpus=["0", "2", "GPU-3"])
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0", "2,GPU-3"]
    with pytest.raises(SettingsError, match="--jobs 4, but 3 GPUs visible"):
        share_machine(4, cores(2), gpus=["0", "2", "GPU-3"])


SIZED = Figures(8, 326.0, "samples/s", 3 << 20)
RUNS = (
    SweptRun("lr=0.1", {"lr": 0.1}, "a", "finished", 2.5, 2.25, None, 10.0),
    SweptRun("lr=0.2", {"lr": 0.2}, "b", "failed", error="loss is nan | at step 3"),
    SweptRun("lr=0.3", {"lr": 0.3}, "c", "finished", 1.5, 1.25, None, 11.0, figures=SIZED),
)


def test_the_table_has_the_best_first_and_what_failed_last() -> None:
    table = sweep_table(RUNS)
    measured = ["memory of a rank", "throughput"]
    headings = ["lr", *measured, "loss", "train loss", "time", ""]
    assert [column.heading for column in table.columns] == headings
    assert table.rows == (
        ("0.3", "3.0 MiB", "326 samples/s", "1.5000", "1.2500", "11.0 s", ""),
        ("0.1", "", "", "2.5000", "2.2500", "10.0 s", ""),
        ("0.2", "", "", "", "", "", "failed: loss is nan | at step 3"),
    )
    lines = table.to_markdown().splitlines()
    assert {line.replace("\\|", "").count("|") for line in lines} == {8}
    assert lines[1] == "|" + " ---: |" * 6 + " --- |"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_record(tmp_path) == {}
    write_record(tmp_path, {run.name: run for run in RUNS})
    assert read_record(tmp_path) == {run.name: run for run in RUNS}
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


@given(st.text(alphabet=string.printable, max_size=40))
def test_a_damaged_record_is_named(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("record")
    (folder / "sweep.json").write_text('{"runs": [{' + text)
    with pytest.raises(DataError, match="is not a record of a sweep"):
        read_record(folder)
