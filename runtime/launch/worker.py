"""The process of a rank, started by the launcher: `python -m ... STARTER MODULE ARGUMENTS`.

STARTER is the id of the process that starts the ranks. Importing torch takes seconds, in which that
process may end; so this one is tied to it before the module, whose `run` it calls, is imported.
"""

from __future__ import annotations

import sys
from importlib import import_module

from ..process import die_with, first_imports


def main() -> None:
    starter, module, *arguments = sys.argv[1:]
    die_with(int(starter))
    with first_imports():
        run = import_module(module).run
    run(*arguments)


if __name__ == "__main__":
    main()
