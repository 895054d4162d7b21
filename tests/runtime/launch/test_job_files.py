"""A file of options: it repeats a run to the last bit, flags win over it, gaps are named."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from asyncpipe.runtime.config.execution_options import seconds_of
from asyncpipe.runtime.config.option_files import read_config, settings_from
from asyncpipe.runtime.config.settings import Settings, SettingsError
from asyncpipe.runtime.launch.local import ended_after
from asyncpipe.tests.support.models.hand_folders import write_mlp, write_text
from asyncpipe.tests.support.processes.quick_python import bin_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_text(folder / "text")
    write_mlp(folder / "slow", slow_s=0.01)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder


def train(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [bin_folder() / "asyncpipe-train", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1 and result.stderr.startswith("error: "), result.stderr
    return result.stderr


def records(run: Path) -> list[tuple[Any, ...]]:
    names = ("event", "step", "loss", "lr", "grad_norm", "delay_mean", "accuracy")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        tuple(line.get(name) for name in names)
        for line in lines
        if line["event"] in ("step", "eval")
    ]


def weights(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "weights").iterdir())}


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_run_is_repeated_by_its_file_to_the_last_bit(
    folder: Path, tmp_path: Path, schedule: str
) -> None:
    first = train(
        tmp_path, folder / "text", "--data", folder / "text.txt", "--schedule", schedule,
        "--steps", 6, "--micro-batches", 2, "--lr", 1 / 300, "--seed", 7, "--eval-every", 3,
        "--log-every", 1, "--warmup", 2, "--betas", 0.85, 0.97, "--eval-batches", 2,
        "--output", "first",
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    again = train(tmp_path, "--config", "first/config.toml", "--output", "again")
    assert again.returncode == 0, again.stderr
    assert len(records(tmp_path / "first")) == 8
    assert records(tmp_path / "again") == records(tmp_path / "first")
    assert weights(tmp_path / "again") == weights(tmp_path / "first")
    told = (tmp_path / "first" / "config.toml").read_text()
    assert (tmp_path / "again" / "config.toml").read_text() == told
    other = train(tmp_path, "--config", "first/config.toml", "--seed", 8, "--output", "other")
    assert other.returncode == 0, other.stderr
    assert weights(tmp_path / "other") != weights(tmp_path / "first")
    changed = (tmp_path / "other" / "config.toml").read_text()
    assert changed == told.replace("seed = 7", "seed = 8")


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('folder = "x"\nsteps = 7\nlr = 0.5\n')
    settings = settings_from({**read_config(tmp_path / "job.toml"), "lr": 0.25})
    assert (settings.folder, settings.steps, settings.lr) == ("x", 7, 0.25)
    assert settings.log_every == Settings(folder="x").log_every


def test_a_value_that_is_to_be_given_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('folder = "x"\nseed = "???"\neval_every = "???"\n')
    read = read_config(tmp_path / "job.toml")
    with pytest.raises(SettingsError, match=r"eval_every is \?\?\? in .*\n--eval-every VALUE"):
        settings_from({**read, "seed": 3})
    assert settings_from({**read, "seed": 3, "eval_every": 2}).seed == 3


def test_the_command_says_what_a_file_lacks_or_misspells(tmp_path: Path) -> None:
    (tmp_path / "near.toml").write_text('folder = "x"\nmicro_batchs = 8\n')
    told = error(train(tmp_path, "--config", "near.toml"))
    assert "near.toml: micro_batchs is not an option" in told
    assert "Did you mean micro_batches?" in told
    (tmp_path / "none.toml").write_text("steps = 3\n")
    assert "no generated folder was named" in error(train(tmp_path, "--config", "none.toml"))
    assert "no generated folder was named" in error(train(tmp_path))
    assert "absent.toml: there is no such file" in error(train(tmp_path, "--config", "absent.toml"))


# --------------------------------------------------------------------- --max-run


def test_a_limit_of_time_is_read_or_refused() -> None:
    assert Settings(folder="x", max_run="1h30m").max_run_s == 5400
    assert Settings(folder="x").max_run_s is None
    for text in ("90", "1.5h", "m", "30m1h", "-5s", "0m", ""):
        with pytest.raises(SettingsError, match=f"--max-run .*{text}.* is not a time of days"):
            Settings(folder="x", max_run=text)
    assert seconds_of("2d12h") == 216_000


def test_the_limit_sends_sigterm_once_and_only_when_it_is_reached() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with ended_after(0.05):
            pass
        with ended_after(None):
            time.sleep(0.1)
        assert heard == []
        with ended_after(0.01):
            time.sleep(0.1)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("schedule", ["1f1b", "single"])
def test_a_run_whose_time_is_over_leaves_a_checkpoint_and_goes_on(
    folder: Path, tmp_path: Path, schedule: str
) -> None:
    command = [
        folder / "slow", "--schedule", schedule, "--threads", 1, "--resume", "auto", "--output",
        "run", "--warmup", 0, "--eval-batches", 0, "--steps",
    ]  # fmt: skip
    result = train(tmp_path, *command, 1000, "--max-run", "5s")
    assert result.returncode == 143, result.stderr
    assert "by SIGTERM after step" in result.stdout
    for state in (tmp_path / "run" / "ranks").glob("*.state"):
        assert not Path(f"/proc/{json.loads(state.read_text())['pid']}").exists()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step > 0 and "max_run" not in (tmp_path / "run" / "config.toml").read_text()
    again = train(tmp_path, *command, step + 1)
    assert again.returncode == 0, again.stderr
    assert f"after step {step} of {step + 1}" in again.stdout
