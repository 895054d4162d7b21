"""The text of a stage's file: what is hashed, shown and run is the same."""

from __future__ import annotations

from pathlib import Path

from .errors import PlanError


def source_of(path: Path) -> str:
    """The file as UTF-8, whatever encoding it declares: another could make code of a comment.

    Raises PlanError when it is missing or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise PlanError(f"{path} is missing.", "Partition the model again with --force.") from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.",
            "Undo the edit, or partition the model again with --force.",
        ) from None
