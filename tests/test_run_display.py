"""A run on a terminal and in a log: the same lines, and on a terminal a bar below them."""

import importlib
import re
import signal
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncpipe import cli
from asyncpipe.commands import run_display
from asyncpipe.commands.console import print_words
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.monitoring.records import PredictedStep, StartRecord, StepRecord

RECORD = StepRecord(
    step=0, steps=40, loss=5.2204, lr=2.7e-4, grad_norm=4.18, rate=93.0, unit="tok",
    idle=(0.65,), time={}, mem_bytes=1, step_ms=2747.0, elapsed_s=1.0, logged=False,
)  # fmt: skip


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def shown(*, terminal: bool, width: int = 80, log_every: int = 10, first: int = 1) -> str:
    """The output of the reporter for a run of 40 steps, from the step `first`."""
    console = Console(file=StringIO(), force_terminal=terminal, width=width, highlight=False)
    look = run_display._BarReporter if terminal else run_display._LineReporter
    reporter = look(console, draws=False)
    facts = (("schedule", "1f1b, synchronous: " + "the gradients of the plain model, " * 4),)
    predicted: Any = object.__new__(PredictedStep)
    reporter.on_start(StartRecord(facts, predicted, 4, 1, ((0,), (1,)), {}))
    for step in range(first, 41):
        reporter.on_step(replace(RECORD, step=step, logged=step % log_every == 0 or step == 1))
        if terminal:
            reporter._progress.refresh()  # type: ignore[attr-defined]
    reporter.on_failure("the end of the test")
    assert isinstance(console.file, StringIO)
    return plain(console.file.getvalue())


def lines_of_steps(text: str) -> list[str]:
    return re.findall(r"^\s*(step +\d+/40  loss .*  idle 65%|step +\d+/40  loss .*tok/s)\s*$",
                      text.replace("\r", "\n"), re.MULTILINE)  # fmt: skip


@pytest.mark.parametrize("every", [5, 10, 40])
def test_a_terminal_keeps_the_lines_that_a_log_has(every: int) -> None:
    on_terminal = lines_of_steps(shown(terminal=True, width=200, log_every=every))
    in_log = lines_of_steps(shown(terminal=False, width=200, log_every=every))
    assert on_terminal == in_log
    assert len(in_log) == 40 // every + 1
    assert in_log[0] == (
        "step  1/40  loss 5.2204  grad 4.18  lr 2.7e-04  93 tok/s  2,747 ms  idle 65%"
    )


def test_the_bar_shows_the_step_the_loss_and_the_time_left() -> None:
    text = shown(terminal=True).replace("\r", "\n")
    assert "waiting for the first step" in text
    bars = [line for line in text.splitlines() if "━" in line and "step" in line]
    assert any(re.match(r"step 20/40  loss 5\.2204 ━+[╸╺]?━+ \d\d:\d\d left$", bar) for bar in bars)
    assert max(map(len, bars)) <= 80
    assert "left" not in shown(terminal=False)


def test_the_time_left_of_a_resumed_run_counts_the_steps_since() -> None:
    text = shown(terminal=True, first=39).replace("\r", "\n")
    bars = [line for line in text.splitlines() if line.startswith("step 39/40")]
    assert bars and not any("left" in bar for bar in bars)  # the pace is not known yet


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_cuts_no_word_and_leaves_out_the_least_important(width: int) -> None:
    lines = [line.rstrip() for line in shown(terminal=True, width=width).splitlines()]
    lines = [line.rpartition("\r")[2] for line in lines]
    assert max(map(len, lines)) <= width
    facts = " ".join(
        " ".join(lines[: next(i for i, line in enumerate(lines) if "━" in line)]).split()
    )
    assert "the gradients of the plain model, the gradients" in facts
    assert any(line.startswith("step 10/40  loss 5.2204") for line in lines)
    wide = any("2,747 ms" in line for line in lines)
    assert wide == (width == 80)


def test_a_sentence_is_one_line_in_a_log_and_indented_on_a_terminal() -> None:
    for terminal, expected in (
        (True, ["note    one two", "        three four"]),
        (False, ["note    one two three four"]),
    ):
        console = Console(file=StringIO(), force_terminal=terminal, width=24, color_system=None)
        print_words(console, "note    one two three four", indent=8)
        assert isinstance(console.file, StringIO)
        assert [line.rstrip() for line in console.file.getvalue().splitlines()] == expected


@pytest.mark.parametrize(
    ("options", "terminal", "expected"),
    [
        ({}, True, "starting    4 ranks ..\n"),
        ({}, False, ""),
        ({"quiet": True}, True, ""),
        ({"json": True}, True, ""),
    ],
)
def test_a_terminal_shows_that_ranks_are_being_started(
    options: dict[str, bool], terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StringIO()

    def console(*, quiet: bool) -> Console:
        return Console(file=file, force_terminal=terminal, quiet=quiet, color_system=None)

    monkeypatch.setattr(run_display, "make_console", console)
    run_display.print_starting(Settings(folder="x", **options), 4)
    assert plain(file.getvalue()) == expected


def test_ctrl_c_while_modules_are_imported_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    monkeypatch.setattr(cli, "isolate", lambda: None)
    assert cli._run("view") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_ends_below_the_line_that_has_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from asyncpipe.commands import running
    from asyncpipe.commands.options import make_app

    app = make_app("some", "A command.")

    @app.default
    def main() -> None:
        signal.raise_signal(signal.SIGINT)

    file = StringIO()
    monkeypatch.setattr(sys, "argv", ["some"])
    monkeypatch.setattr(
        running,
        "SafeConsole",
        lambda **options: Console(file=file, force_terminal=True, color_system=None),
    )
    assert running.run(app) == 130, file.getvalue()
    assert plain(file.getvalue()) == "\ninterrupted\n"
