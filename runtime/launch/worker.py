"""The process of a rank, started by the launcher: `python -m ... COMMAND OPTIONS FOLDER REPORTER`.

COMMAND is the id of the process that starts the ranks. Importing torch takes seconds, in which that
process may end; so this one is tied to it before anything else is imported.
"""

from __future__ import annotations

import sys

from ..process import die_with


def main() -> None:
    command, *arguments = sys.argv[1:]
    die_with(int(command))
    from .rank import run

    run(*arguments)


if __name__ == "__main__":
    main()
