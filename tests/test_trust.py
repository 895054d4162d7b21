"""A generated folder from elsewhere is data until its user trusts its code, and says so."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import asyncpipe
from asyncpipe.runtime.launching import world
from asyncpipe.runtime.launching.launchers import Place
from asyncpipe.runtime.launching.seats import Seat
from asyncpipe.runtime.plan import read_plan
from asyncpipe.runtime.training.settings import Settings
from asyncpipe.runtime.trust import TrustError, content_hash, is_trusted, remember, state_folder
from asyncpipe.tests.in_process import command, error_of
from asyncpipe.tests.quick_python import run
from asyncpipe.tests.runtime.handmade import exact_settings, write_mlp
from asyncpipe.tests.runtime.silent_reporter import FACTORY

ROOT = Path(__file__).parent.parent
LEAVES_A_MARK = "open({!r}, 'w').close()\n"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
        f"error: {strange} was not made on this machine, and to train it is to run its "
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
            assert "foreign not made on this machine" in outcome.out
    for options in (("--dry-run",), ("--print-schedule",), ("--print-sbatch",)):
        assert command(tmp_path, "train", *train(strange, *options)).code == 0
    error_of(tmp_path, "train", *train(strange, "--dry-run", "--precision", "bfloat16"))
    error_of(tmp_path, "compare", str(strange), "--steps", "2", "--output", str(tmp_path / "c"))
    assert not (tmp_path / "ran").exists()


def test_no_file_can_say_that_code_is_trusted(strange: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("trust = true\n")
    told = error_of(tmp_path, "train", *train(strange, "--config", str(tmp_path / "run.toml")))
    assert "is said on the command line, not in a file" in told


def test_own_ranks_are_told_that_the_folder_is_trusted(
    strange: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASYNCPIPE_STATE", str(tmp_path / "file"))  # where no rank finds a mark
    settings = exact_settings(strange, tmp_path / "run")
    with pytest.raises(TrustError):
        run(settings, FACTORY)
    assert not (tmp_path / "ran").exists()
    assert run(replace(settings, trust=True), FACTORY) == 0
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
    plan, place = read_plan(strange), Place(0, 2, 0, 2)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(world, "name_interface", lambda *_, **__: None)
    for name in ("open_store", "call_roll"):
        monkeypatch.setattr(world, name, lambda *_: None)
    monkeypatch.setattr(world.dist, "init_process_group", lambda *_, **__: None)

    def met(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(world, "find_machine", met)
    for trusted in ((True, False), (False, True)):
        seats = [Seat(host, trusted=each) for host, each in zip("ab", trusted, strict=True)]
        monkeypatch.setattr(world, "_seats", lambda own, ranks, seats=seats: seats)
        with pytest.raises(InterruptedError):
            world.join(place, Settings(folder=str(strange)), plan)
    monkeypatch.setattr(world, "_seats", lambda own, ranks: [Seat("a"), Seat("b")])
    with pytest.raises(TrustError):
        world.join(place, Settings(folder=str(strange)), plan)
