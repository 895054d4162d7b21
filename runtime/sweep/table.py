"""Runs -> rows of text, the best first: by evaluation loss, those without one last."""

from __future__ import annotations

from collections.abc import Sequence

from ..hidden_text import in_markdown
from .record import FINISHED, SweptRun
from .variants import in_words


def columns(runs: Sequence[SweptRun]) -> tuple[str, ...]:
    """The heads of the columns: the options that differ, then what came of them."""
    accuracy = ("accuracy",) if any(run.accuracy is not None for run in runs) else ()
    return (*runs[0].values, "loss", *accuracy, "train loss", "time", "")


def rows(runs: Sequence[SweptRun]) -> list[tuple[str, ...]]:
    """A row of cells for each run, the lowest loss first."""
    names = columns(runs)
    return [tuple(_cell(run, name) for name in names) for run in ranked(runs)]


def ranked(runs: Sequence[SweptRun]) -> list[SweptRun]:
    """The lowest loss first; runs without one after them, as they are."""
    return sorted(runs, key=lambda run: (run.loss is None, run.loss or 0.0))


def markdown(runs: Sequence[SweptRun]) -> str:
    """The table in Markdown."""
    names = columns(runs)
    cells = [list(map(in_markdown, line)) for line in (names, *rows(runs))]
    lines = [cells[0], ["---"] * len(names), *cells[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(run: SweptRun, column: str) -> str:
    match column:
        case "loss" | "train loss":
            number = run.loss if column == "loss" else run.train_loss
            return "" if number is None else f"{number:.4f}"
        case "accuracy":
            return "" if run.accuracy is None else f"{run.accuracy:.1%}"
        case "time":
            return "" if run.seconds is None else f"{run.seconds:.1f} s"
        case "":
            return "" if run.state == FINISHED else f"{run.state} {run.error}".strip()
    return in_words(_hashable(run.values[column]))


def _hashable(value: object) -> object:
    """JSON has lists where options have tuples."""
    return tuple(value) if isinstance(value, list) else value
