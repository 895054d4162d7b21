"""What --help shows: every word of the source, the default of each option, and panels."""

import importlib
import re
from io import StringIO
from pathlib import Path

import pytest
from cyclopts import App
from rich.console import Console

from asyncpipe.commands.options import CommandOptions, make_app, unwrapped
from asyncpipe.commands.running import run
from asyncpipe.partitioner.planning.options import PartitionOptions
from asyncpipe.runtime.config.learning_options import PANELS
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.options import options_of
from asyncpipe.tests.support.processes.in_process import command

COMMANDS = (
    ("partition",), ("train",), ("train", "report"), ("train", "predict"), ("train", "export"),
    ("compare",), ("inspect",), ("info",), ("view",), ("comm", "bench"), ("job", "run"),
    ("comm", "measure"),
)  # fmt: skip


def shown(*words: str, width: int = 4000) -> str:
    app: App = importlib.import_module(f"asyncpipe.commands.{words[0]}").app
    console = Console(file=StringIO(), width=width)
    app.help_print([*words[1:]], console=console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def panels(text: str) -> dict[str, list[str]]:
    """The lines of each panel by its heading."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if heading := re.match(r"╭─ (.*?) ─+╮", line):
            lines = found.setdefault(heading[1], [])
        elif line.startswith("│"):
            lines.append(line.strip("│ "))
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [("train", Settings), ("partition", PartitionOptions), ("partition", CommandOptions)],
)
def test_help_shows_every_word_of_the_source(name: str, options: type) -> None:
    text = " ".join(shown(name).split())
    for own, option in options_of(options).items():
        if own != "folder":
            assert " ".join(option.help.split()) in text, own


def test_angle_brackets_and_stars_are_shown_as_they_are() -> None:
    app = make_app("some", "Writes runs/<name>/comparison.html and *.svg, see [docs].")

    @app.default
    @unwrapped
    def main(*, output: str = "", is_quiet: bool = False) -> None:
        """Run.

        Parameters
        ----------
        output
            Writes to runs/<name> by `default`, and to
            _all_ others **twice**.
        is_quiet
            Says nothing.
        """

    console = Console(file=StringIO(), width=200)
    app.help_print([], console=console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "Writes runs/<name>/comparison.html and *.svg, see [docs]." in text
    assert "Writes to runs/<name> by `default`, and to _all_ others **twice**." in text
    assert "Says nothing." in text


@pytest.mark.parametrize("flag", ["--help", "--version"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_answers_help_and_version(
    words: tuple[str, ...],
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [f"asyncpipe-{words[0]}", *words[1:], flag])
    app: App = importlib.import_module(f"asyncpipe.commands.{words[0]}").app
    assert run(app) == 0
    assert re.match(r"Usage: asyncpipe-|\d+\.\d+", capsys.readouterr().out.strip())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_states_its_default_once_and_not_as_python(words: tuple[str, ...]) -> None:
    for heading, lines in panels(shown(*words)).items():
        if heading in ("Commands", "Arguments"):
            continue
        for line in lines:
            takes_value = re.match(r"--\S+( -\w)? (INT|FLOAT|STR|PATH|CHOICE)", line)
            stated = len(re.findall(r"[\[(]default[: ]", line))
            assert stated >= 1 if takes_value else "[default" not in line, line
            assert line.count("[default") <= 1, line
            for default in re.findall(r"\[default: ([^\]]*)\]", line):
                assert not re.search(r"None|False|True|^[\[({'\"]", default), line


def test_the_options_of_a_run_are_grouped_in_panels() -> None:
    found = panels(shown("train"))
    assert tuple(found) == ("Commands", "Arguments", *PANELS, "Several runs")
    assert all(option.group in PANELS for name, option in options_of(Settings).items()
               if name != "folder")  # fmt: skip
    first = {heading: lines[0].split()[0] for heading, lines in found.items()}
    assert first["Schedule and ranks"] == "--schedule"
    assert first["Optimizer and loss"] == "--optimizer"
    assert next(iter(list(panels(shown("compare")))[2:])) == "Methods to compare"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_the_terminal(width: int) -> None:
    for words in COMMANDS:
        assert max(map(len, shown(*words, width=width).splitlines())) <= width


def test_the_usage_of_train_shows_that_the_subcommand_is_optional(tmp_path: Path) -> None:
    outcome = command(tmp_path, "train", "--help")
    assert outcome.code == 0
    assert outcome.out.splitlines()[:4] == [
        "Usage: asyncpipe-train [OPTIONS] FOLDER",
        "       asyncpipe-train report [OPTIONS] RUN...",
        "       asyncpipe-train predict [OPTIONS] RUN",
        "       asyncpipe-train export [OPTIONS] RUN DIR",
    ]
