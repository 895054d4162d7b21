"""Files that are not regular, too large or too deep: one sentence, no traceback, and no wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncpipe.runtime.checkpoint.resuming import keep_records_until
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.errors import AsyncPipeError, PlanError
from asyncpipe.runtime.monitoring.run_files import read_run
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.runtime.plan.trust import is_trusted
from asyncpipe.runtime.serialization import Origin, parse_json, parse_toml, read_text
from asyncpipe.runtime.user_code import source_of
from asyncpipe.runtime.watch.pages import RunPage
from asyncpipe.runtime.watch.ranks_seen import see_ranks
from asyncpipe.tests.support.models.hand_folders import write_mlp
from asyncpipe.tests.support.processes.in_process import command, error_of

SHORT = ("--steps", "2", "--micro-batches", "2", "--eval-batches", "0", "--schedule", "single")


@pytest.fixture(autouse=True)
def no_wait() -> Iterator[None]:
    """What waits for ever fails: a pipe without a writer, a device without an end."""

    def too_long(*_: object) -> None:
        raise TimeoutError("this waits")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


NO_FILE = "is neither a file nor a folder."
ODD = {
    pipe: NO_FILE,
    device: NO_FILE,
    sparse: "has 3072 MiB, more than",
    folder: "irectory",
    loop: "ymbolic links",
}


@pytest.mark.parametrize("make", ODD)
def test_a_stage_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write_mlp(tmp_path / "made")
    (stage := tmp_path / "made" / "stage_0.py").unlink()
    make(stage)
    for name, *options in (("inspect", "--stage", "0"), ("train", *SHORT)):
        if make is not sparse or name == "inspect":
            told = error_of(tmp_path, name, "made", *options)
            assert told.startswith("error: made/stage_0.py") and ODD[make] in told
    if make is sparse:
        with pytest.raises(PlanError, match="3072 MiB, more than a stage can have"):
            source_of(stage)


@pytest.mark.parametrize("make", ODD)
def test_a_plan_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write_mlp(tmp_path / "made")
    (plan := tmp_path / "made" / "plan.json").unlink()
    make(plan)
    with pytest.raises(PlanError) as refused:
        read_plan(tmp_path / "made")
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("make", ODD)
def test_a_text_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "text")
    with pytest.raises(AsyncPipeError) as refused:
        read_text(tmp_path / "text", Origin("text", AsyncPipeError))
    assert str(refused.value).startswith("text ") and ODD[make] in str(refused.value)


@pytest.mark.parametrize("make", [pipe, device])
def test_devices_that_are_no_file_are_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "devices.toml")
    model = ("--model", "mlp", "--stages", "2", "--profile", "analytic")
    told = error_of(tmp_path, "partition", *model, "--devices", "devices.toml")
    assert NO_FILE in told


@pytest.mark.parametrize("make", [pipe, device])
def test_other_files_of_a_folder_are_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    write_mlp(tmp_path / "made")
    make(tmp_path / "made" / "helper.py")
    assert command(tmp_path, "inspect", "made").code == 0
    assert is_trusted(tmp_path / "made")


def test_a_stage_that_is_too_deep_for_python_is_refused(tmp_path: Path) -> None:
    """Python's parser has no memory for this one, which is not that of the machine."""
    write_mlp(tmp_path / "made")
    stage = tmp_path / "made" / "stage_0.py"
    stage.write_text(f"x = {'-' * 100_000}1\n{stage.read_text()}")
    assert command(tmp_path, "inspect", "made").code == 0
    told = error_of(tmp_path, "train", "made", *SHORT)
    assert told.startswith(
        "error: made/stage_0.py cannot be imported: SyntaxError: nested too deeply."
    )


def test_a_number_of_very_many_digits_is_refused_without_advice_for_programs() -> None:
    for parse in (parse_json, parse_toml):
        with pytest.raises(AsyncPipeError, match="it has a number of more than 4300 digits.$"):
            parse(f"a = {'9' * 5000}"[4 * (parse is parse_json) :], Origin("it", AsyncPipeError))


@pytest.mark.parametrize("option", ["folder", "output", "data", "init_from", "config"])
def test_names_of_bytes_that_are_no_text_are_refused(tmp_path: Path, option: str) -> None:
    """Linux allows them; no record that names them could be written."""
    write_mlp(tmp_path / "made")
    odd = os.fsdecode(b"na\xffme.py") + (":load" if option == "data" else "")
    flag = () if option == "folder" else (f"--{option.replace('_', '-')}",)
    model = () if option == "folder" else ("made",)
    told = error_of(tmp_path, "train", *model, *SHORT, *flag, odd, code=2)
    assert r"na\udcffme.py" in told and "defect" not in told
    assert r"has a control or hidden character ('\udcff')." in told
    if option != "config":
        with pytest.raises(AsyncPipeError, match="hidden character"):
            Settings(**({"folder": "made"} | {option: odd}))  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [*"\n\t\x1b\u202e\u2066\u200b\U000e0041"])
def test_options_have_no_characters_that_do_not_show(hidden: str) -> None:
    """A file that repeats the run could not be read again."""
    with pytest.raises(AsyncPipeError) as refused:
        Settings(folder="made", output=f"runs/a{hidden}b")
    assert f"('{hidden.encode('unicode_escape').decode()}')" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "it is not JSON: 'c' is there twice."),
        ('{"a": NaN}', "it is not JSON: NaN is not a finite number."),
        ('{"a": -1e999}', "it is not JSON: -1e999 is not a finite number."),
        (f"{'[' * 41}{']' * 41}", "it is nested too deeply."),
        (f"{'[' * 100_000}{']' * 100_000}", "it is nested too deeply."),
        ('{"a\\u202e": 1}', r"it has control or hidden characters in 'a\u202e'."),
        ('{"a": "\\ud800"}', r"it has control or hidden characters in '\ud800'."),
    ],
)
def test_json_that_could_mislead_is_refused(text: str, told: str) -> None:
    origin = Origin("it", AsyncPipeError)
    with pytest.raises(AsyncPipeError) as refused:
        parse_json(text, origin)
    assert str(refused.value) == told
    assert parse_json(f"{'[' * 39}{']' * 39}", origin)


@pytest.mark.parametrize("hidden", ["\x1b[2J", "\u202e", "\u200b", "\x9b"])
def test_a_text_is_refused_for_what_hides_outside_of_its_values(
    tmp_path: Path, hidden: str
) -> None:
    (path := tmp_path / "job.toml").write_text(f"# {hidden}\nsteps = 2\n")
    with pytest.raises(AsyncPipeError, match="it has a control or hidden character"):
        read_text(path, Origin("it", AsyncPipeError))


@pytest.mark.parametrize("make", [pipe, device])
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "ranks/0.state"])
def test_a_run_is_shown_although_some_of_its_files_are_none(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    """Such a run may be a stranger's, and pages and reports only read it."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "time_s": 1.0}\n')
    (tmp_path / "config.toml").write_text("steps = 4\n")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    page = RunPage(tmp_path)
    page.look()
    assert page.refresh()
    if name != "metrics.jsonl":
        assert read_run(tmp_path).start


@pytest.mark.parametrize(
    "state", [b"\xff", b"[]", b'{"rank": 0}', b'{"rank": 0, "pid": "../../tmp/mine", "host": 1}']
)
def test_a_state_of_a_rank_that_is_none_is_left_out(tmp_path: Path, state: bytes) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "time_s": 1.0}\n')
    (tmp_path / "ranks" / "0.state").write_bytes(state)
    assert not see_ranks(read_run(tmp_path)).ranks


def test_records_that_are_torn_are_dropped_wherever_they_are(tmp_path: Path) -> None:
    whole = b'{"event": "step", "step": 1}\n'
    deep = b"[" * 100_000
    (metrics := tmp_path / "metrics.jsonl").write_bytes(
        b"\xff\x00\n" + whole + deep + b'\n[1]\n{"event": "step", "st'
    )
    keep_records_until(metrics, 5)
    assert metrics.read_bytes() == whole
