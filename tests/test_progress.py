"""A step that reports its progress has a bar on a terminal, and nothing in a log."""

import io
import re

from rich.console import Console

from asyncpipe.commands.console import PhaseDisplay


def shown(*, terminal: bool, silent: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, highlight=False)
    with PhaseDisplay(console, silent=silent) as display:
        display.end_phase("capture", "7 operations", 0.5, "profile")
        for done in range(1, 4):
            display.progress(done, 4)
        if display._bar:
            display._bar.refresh()
        display.end_phase("profile", "7 operators", 1.5, "plan")
        if display._bar:
            display._bar.refresh()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_on_a_terminal_the_step_that_runs_has_a_bar() -> None:
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown(terminal=True))]
    bars = [line for line in lines if "profile ━" in line]
    assert any("╸" in bar or "╺" in bar for bar in bars)  # three quarters
    # The next step does not say how far it is: a spinner only.
    assert [line for line in lines if line.endswith("plan")]
    assert not [line for line in lines if "plan ━" in line]


def test_in_a_log_there_are_ticks_and_no_bar() -> None:
    assert shown(terminal=False) == (
        "✓ capture  7 operations [0.50 s]\n✓ profile  7 operators [1.5 s]\n"
    )


def test_quiet_and_json_show_neither() -> None:
    assert shown(terminal=True, silent=True) == shown(terminal=False, silent=True) == ""
