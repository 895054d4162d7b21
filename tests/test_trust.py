"""A generated folder from elsewhere is data until its user trusts its code, and says so."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import asyncpipe
from asyncpipe.runtime.config.option_files import check_code, read_config
from asyncpipe.runtime.distributed import process_groups
from asyncpipe.runtime.distributed.cpu_affinity import RankResources, check_alike, find_resources
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.errors import AsyncPipeError
from asyncpipe.runtime.experiments.compare import compare
from asyncpipe.runtime.experiments.sweep import child_of, plan_sweep
from asyncpipe.runtime.experiments.variants import lists_of
from asyncpipe.runtime.launch import launch, local
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.plan.trust import (
    TrustError,
    content_hash,
    is_trusted,
    remember,
    state_folder,
)
from asyncpipe.tests.support.models.hand_folders import WIDTH, exact_settings, write_mlp
from asyncpipe.tests.support.processes.in_process import command, error_of
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY
from asyncpipe.tests.support.run_configs import run_config

ROOT = Path(__file__).parent.parent
THEIRS = """
import torch
from asyncpipe import Reporter

def criterion(outputs, target):
    return torch.nn.functional.cross_entropy(outputs, target)

def data():
    return dict(x=torch.zeros(64, {width}), target=torch.zeros(64, dtype=torch.int64))

other = data

def log(settings, folder):
    return Reporter()
"""
LEAVES_A_MARK = "open({!r}, 'w').close()\n"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])  # a command adds the folders of what it is given
    monkeypatch.setenv("ASYNCPIPE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def strange(tmp_path: Path, own_state: Path) -> Path:
    """A folder that somebody else has made; its code leaves a mark when it is run."""
    write_mlp(tmp_path / "strange")
    for file in sorted((tmp_path / "strange").glob("stage_*.py")):
        file.write_text(LEAVES_A_MARK.format(str(tmp_path / "ran")) + file.read_text())
    shutil.rmtree(own_state)
    return tmp_path / "strange"


def train(folder: Path, *options: str) -> tuple[str, ...]:
    short = ("--steps", "2", "--micro-batches", "2", "--eval-batches", "0", "--schedule", "single")
    return (str(folder), *short, *options)


def test_a_strangers_folder_is_not_trained_before_it_is_trusted(
    strange: Path, tmp_path: Path
) -> None:
    refused = error_of(tmp_path, "train", *train(strange))
    assert refused == (
        f"error: {strange} was not made on this machine, and training it would run its "
        f"stage_*.py.\nRead them: asyncpipe-inspect {strange} --stage 0. Trust them from then on: "
        f"asyncpipe-train {strange} --trust\n"
    )
    assert not (tmp_path / "ran").exists() and not (tmp_path / "runs").exists()
    assert command(tmp_path, "train", *train(strange, "--trust", "-q")).code == 0
    assert (tmp_path / "ran").exists()
    assert command(tmp_path, "train", *train(strange, "-q")).code == 0  # from then on


def test_neither_inspect_nor_a_dry_run_runs_a_strangers_code(strange: Path, tmp_path: Path) -> None:
    for options in ((), ("--stage", "1"), ("--json",), ("--explain",)):
        outcome = command(tmp_path, "inspect", str(strange), *options)
        assert outcome.code == 0
        if not options:
            assert "untrusted: generated on another machine" in outcome.out
    for options in (("--dry-run",), ("--print-schedule",), ("--print-sbatch",)):
        assert command(tmp_path, "train", *train(strange, *options)).code == 0
    error_of(tmp_path, "train", *train(strange, "--dry-run", "--precision", "bfloat16"))
    error_of(tmp_path, "compare", str(strange), "--steps", "2", "--output", str(tmp_path / "c"))
    assert not (tmp_path / "ran").exists()


def test_no_file_can_say_that_code_is_trusted(strange: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("trust = true\n")
    told = error_of(tmp_path, "train", *train(strange, "--config", str(tmp_path / "run.toml")))
    assert "must be given on the command line, not in a file" in told


def names_code(tmp_path: Path, option: str) -> Path:
    """A file of options that somebody else has written; the code that it names leaves a mark."""
    code = LEAVES_A_MARK.format(str(tmp_path / "ran")) + THEIRS.format(width=WIDTH)
    for module in ("theirs", "their_tracker"):
        (tmp_path / f"{module}.py").write_text(code)
    named = {
        "log": "their_tracker:log",
        "criterion": "theirs.py:criterion",
        "data": "theirs.py:data",
    }
    write_mlp(tmp_path / "made")
    options = f'{option} = "{named[option]}"\nsteps = 2\nmicro_batches = 2\nschedule = "single"\n'
    path = tmp_path / "their.toml"
    path.write_text(f'{options}folder = "{tmp_path / "made"}"\n')
    return path


@pytest.mark.parametrize("option", ["criterion", "data", "log"])
def test_code_that_only_a_file_names_is_run_when_it_is_trusted(tmp_path: Path, option: str) -> None:
    config = names_code(tmp_path, option)
    for checked in ("--dry-run", "--print-schedule"):  # these run nothing
        assert command(tmp_path, "train", "--config", str(config), checked).code == 0
    script = error_of(tmp_path, "train", "--config", str(config), "--print-sbatch")
    refused = error_of(tmp_path, "train", "--config", str(config))
    place = "their_tracker" if option == "log" else "theirs.py"
    assert (
        script
        == refused
        == (
            f"error: --config {config} would run code that no command line here has named: "
            f"--{option} {place}:{option}.\n"
            f"Read it. Trust it from then on: --trust, or --{option} {place}:{option}.\n"
        )
    )
    assert not (tmp_path / "ran").exists() and not (tmp_path / "runs").exists()
    assert command(tmp_path, "train", "--config", str(config), "--trust", "-q").code == 0
    assert (tmp_path / "ran").exists()
    assert command(tmp_path, "train", "--config", str(config), "-q").code == 0


def test_what_a_command_line_has_named_a_file_may_name_from_then_on(tmp_path: Path) -> None:
    config = names_code(tmp_path, "data")
    named = ("--data", "theirs.py:data", "-q", "--save-every", "1")
    assert command(tmp_path, "train", "--config", str(config), *named).code == 0
    run = tmp_path / "runs" / "made" / "1"
    repeated = ("--config", str(run / "config.toml"), "--output", "again", "-q")
    assert command(tmp_path, "train", *repeated).code == 0
    (tmp_path / "theirs.py").write_text((tmp_path / "theirs.py").read_text() + "\n# mine now\n")
    assert command(tmp_path, "train", "--resume", str(run), "--steps", "3", "-q").code == 0
    other = config.read_text().replace("theirs.py:data", "theirs.py:other")
    config.write_text(other)
    assert "--data theirs.py:other" in error_of(tmp_path, "train", "--config", str(config))


def test_a_strangers_run_and_location_name_code_as_a_file_does(
    tmp_path: Path, own_state: Path
) -> None:
    names_code(tmp_path, "criterion")
    theirs = ("--save-every", "2", "--criterion", "theirs.py:criterion", "-q")
    assert command(tmp_path, "train", "--config", "their.toml", *theirs).code == 0
    (tmp_path / "ran").unlink()
    shutil.rmtree(own_state)
    remember(tmp_path / "made")
    url = f"file://{tmp_path}/runs/made/1/checkpoints"
    for resume in ("auto", "runs/made/1", "runs/made/1/checkpoints/step-000002", url):
        told = error_of(tmp_path, "train", "made", "--resume", resume, "--output", "runs/made/1")
        assert told.startswith(f"error: --resume {resume} would run code that no command line")
    shutil.rmtree(own_state)
    told = error_of(tmp_path, "train", "--resume", url)
    assert told.endswith(
        f"--trust is also for the stages of {tmp_path}/made, which were not made here.\n"
    )
    assert not (tmp_path / "ran").exists()


def test_a_sweep_runs_what_was_typed_and_not_what_its_file_names(tmp_path: Path) -> None:
    config = names_code(tmp_path, "data")
    sweep = ("--config", str(config), "-q", "--sweep")
    refused = error_of(tmp_path, "train", *sweep, "lr=0.1,0.2")
    assert "--data theirs.py:data" in refused and not (tmp_path / "ran").exists()
    config.write_text(config.read_text() + '[sweep]\ndata = ["theirs.py:data", "clusters"]\n')
    error_of(tmp_path, "train", *sweep, "lr=0.1,0.2")
    lists = lists_of(["data=theirs.py:data,clusters"], None, ())
    options = read_config(config)
    check_code({**options, **lists}, {"data"}, "--config")
    (tmp_path / "sweep").mkdir()
    (child, _) = plan_sweep({**options, "output": str(tmp_path / "sweep")}, lists).jobs.values()
    assert "--data theirs.py:data" in " ".join(child_of(child, ("train",)).command)


def test_own_ranks_are_told_that_the_folder_is_trusted(
    strange: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASYNCPIPE_STATE", str(tmp_path / "file"))  # where no rank finds a mark
    settings = exact_settings(strange, tmp_path / "run")
    with pytest.raises(TrustError):
        run(settings, FACTORY)
    assert not (tmp_path / "ran").exists()
    assert run(replace(settings, trust=True), FACTORY) == tmp_path / "run"
    assert (tmp_path / "ran").exists()


def test_what_is_made_here_is_trusted_even_when_it_is_edited_and_copies_of_it_are(
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"
    write_mlp(made)
    assert is_trusted(made)
    shutil.copytree(made, tmp_path / "copy")
    assert is_trusted(tmp_path / "copy")
    for folder in (made, tmp_path / "copy"):
        stage = folder / "stage_0.py"
        stage.write_text(stage.read_text() + "\n# mine\n")
    assert is_trusted(made)
    assert not is_trusted(tmp_path / "copy")  # an edited copy: whose edit that is nobody knows


def test_another_plan_in_the_place_of_a_trusted_one_is_a_strangers(tmp_path: Path) -> None:
    write_mlp(tmp_path / "made")
    shutil.rmtree(tmp_path / "made")
    state = state_folder()
    assert state is not None
    shutil.move(state, tmp_path / "kept")
    write_mlp(tmp_path / "made", name="another")
    shutil.rmtree(state)
    shutil.move(tmp_path / "kept", state)
    assert not is_trusted(tmp_path / "made")


def test_partitioning_remembers_what_it_writes(tmp_path: Path) -> None:
    model = ["--model", "mlp", "--stages", "2", "--profile", "analytic", "--output", "made"]
    outcome = command(tmp_path, "partition", *model)
    assert outcome.code == 0, outcome.err
    assert "next    asyncpipe-train made\n" in outcome.out
    assert is_trusted(tmp_path / "made")


def test_where_nothing_can_be_remembered_the_next_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASYNCPIPE_STATE", str(tmp_path / "file"))
    write_mlp(tmp_path / "made")
    assert not remember(tmp_path / "made") and not is_trusted(tmp_path / "made")
    model = ["--model", "mlp", "--stages", "2", "--profile", "analytic", "--output", "own"]
    assert "next    asyncpipe-train own --trust\n" in command(tmp_path, "partition", *model).out


def test_the_examples_of_the_repository_are_trusted() -> None:
    for plan in (ROOT / "generated_models").glob("*/plan.json"):
        if plan.parent.name == "residual_mlp_2p":
            assert is_trusted(plan.parent), f"_SHIPPED lacks {content_hash(plan.parent)}"


def test_python_that_names_a_folder_runs_it(strange: Path, tmp_path: Path) -> None:
    asyncpipe.load(strange)
    assert (tmp_path / "ran").exists()


def test_ranks_on_other_hosts_trust_what_one_of_them_does(
    strange: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is compared when ranks meet, so that one answer is enough for all."""
    plan, info = read_plan(strange), RankInfo(0, 2, 0, 2)
    monkeypatch.setattr(process_groups, "connect", lambda info, **_: (info, None))

    def met(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(process_groups, "find_machine", met)
    for trusted in ((True, False), (False, True)):
        resources = [
            RankResources(host, trusted=each) for host, each in zip("ab", trusted, strict=True)
        ]
        monkeypatch.setattr(
            process_groups, "_gather_resources", lambda own, ranks, group, found=resources: found
        )
        with pytest.raises(InterruptedError):
            process_groups.join(info, run_config(folder=str(strange)), plan, {})
    monkeypatch.setattr(
        process_groups,
        "_gather_resources",
        lambda own, ranks, group: [RankResources("a"), RankResources("b")],
    )
    with pytest.raises(TrustError):
        process_groups.join(info, run_config(folder=str(strange)), plan, {})


# What is run is what was checked


def edit_when(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, folder: Path, stage: int
) -> None:
    """Writes to a stage when a function is called, which is after its code was checked."""
    real = getattr(place, name)

    def called(*arguments: Any) -> Any:
        with (folder / f"stage_{stage}.py").open("a") as file:
            file.write(LEAVES_A_MARK.format(str(folder / "ran")))
        return real(*arguments)

    monkeypatch.setattr(place, name, called)


CHANGED = "is not the file that was checked when the run began: its SHA-256 is "


@pytest.mark.parametrize("precision", ["full", "bfloat16"])
def test_a_rank_loads_no_stage_that_was_changed_after_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """With a lower precision every rank runs all stages on fake tensors before it loads its own."""
    write_mlp(tmp_path / "made")
    edit_when(monkeypatch, local, "make_folder", tmp_path / "made", 1)
    settings = exact_settings(
        tmp_path / "made", tmp_path / "run", precision=precision, dtype="float32"
    )
    with pytest.raises(AsyncPipeError) as refused:
        run(settings, FACTORY)
    ranks = {"full": ("rank 1 (stage 1)",), "bfloat16": ("rank 0 (stage 0)", "rank 1 (stage 1)")}
    told = str(refused.value)
    who, _, what = told.partition(": ")
    assert who in ranks[precision]
    assert what.startswith(f"{tmp_path}/made/stage_1.py {CHANGED}")
    assert what.endswith("nothing writes to the folder, with the same files on all hosts.")
    assert not (tmp_path / "made" / "ran").exists()


def test_a_rank_follows_no_plan_that_was_changed_after_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan names the criterion, which is code."""
    write_mlp(made := tmp_path / "made")
    (tmp_path / "loss.py").write_text(LEAVES_A_MARK.format(str(made / "ran")) + "loss = None\n")
    real = local.make_folder

    def edited(job: Any) -> Any:
        plan = json.loads((made / "plan.json").read_text())
        (made / "plan.json").write_text(
            json.dumps(plan | {"criterion": f"{tmp_path}/loss.py:loss"})
        )
        return real(job)

    monkeypatch.setattr(local, "make_folder", edited)
    with pytest.raises(AsyncPipeError, match=f"plan.json {CHANGED}"):
        run(exact_settings(made, tmp_path / "run"), FACTORY)
    assert not (made / "ran").exists()


def test_a_run_of_one_process_loads_no_stage_that_was_changed_after_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mlp(tmp_path / "made")
    edit_when(monkeypatch, launch, "make_folder", tmp_path / "made", 0)
    told = error_of(tmp_path, "train", *train(tmp_path / "made", "-q"))
    assert told.startswith(f"error: {tmp_path}/made/stage_0.py {CHANGED}")


def test_the_runs_of_a_comparison_have_the_stages_that_were_checked(
    tmp_path: Path,
) -> None:
    """Edited stages are another model: earlier results for the original are not used for them."""
    write_mlp(made := tmp_path / "made")
    settings = exact_settings(made, tmp_path / "compared", steps=1, data="clusters")
    compare(settings, ["none"])
    stage = made / "stage_1.py"
    stage.write_text(stage.read_text().replace("return h\n", "return 2 * h\n"))
    assert compare(settings, ["none"]).made == 1

    def edit(*_: object) -> None:
        stage.write_text(stage.read_text() + "# edited\n")

    with pytest.raises(AsyncPipeError, match=CHANGED):
        compare(settings, ["none"], seeds=[3, 4], on_run=edit)


def test_ranks_whose_files_of_data_differ_are_refused(tmp_path: Path) -> None:
    plan = write_mlp(tmp_path / "made")
    (data := tmp_path / "own.py").write_text("one = 1")
    settings = run_config(folder="made", data=f"{data}:load", criterion=f"{tmp_path}/there.py:loss")
    own = find_resources(settings, plan, {})
    data.write_text("one = 2")
    other = replace(find_resources(settings, plan, {}), host="b")
    check_alike([own, own])
    with pytest.raises(AsyncPipeError) as refused:
        check_alike([own, own, other])
    assert f"rank 2 on b has --data {data}:load, a file" in str(refused.value)
    data.unlink()
    check_alike([own, find_resources(settings, plan, {})])  # a rank that reads none needs none
