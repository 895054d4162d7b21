"""`asyncpipe-comm measure` and `benchmarks/transports.py`: microseconds of a message one way.

Both time half of a round trip between two ranks of this machine, over the same transports. They
alternate, a round of each; a cell has the figures of every round, and the median of `measure` as a
multiple of the other benchmark's. The limit is 15%.

    python benchmarks/measured_transports.py --rounds 7
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

from machine import write_result
from transports import SIZES, measure_all

TRANSPORTS = ("shm", "gloo", "mpi")
COMPARED = tuple(size for size in SIZES if size != "256 B")


def measured_us(transport: str) -> dict[str, float]:
    """The mean of both directions, by size."""
    command = shutil.which("asyncpipe-comm", path=str(sys.prefix) + "/bin")
    assert command is not None
    sizes = ",".join(str(SIZES[size]) for size in COMPARED if SIZES[size] > 1)
    words = [command, "measure", "--transport", transport, "--sizes", sizes, "--json"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    links: list[dict[str, Any]] = json.loads(text.splitlines()[-1])["links"]
    times = {"1 B": statistics.mean(link["latency_us"] for link in links)}
    for size in COMPARED[1:]:
        times[size] = statistics.mean(dict(link["one_way_us"])[SIZES[size]] for link in links)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    measured, rows = [], []
    for number in range(rounds):
        measured.append({name: measured_us(name) for name in TRANSPORTS})
        rows += measure_all(range(number, number + 1))
    others = round(statistics.median(row["others_share"] for row in rows), 3)
    cells = []
    for name in TRANSPORTS:
        for size in COMPARED:
            wanted = name, "one way", size
            theirs = [row["us"] for row in rows if (row["way"], row["what"], row["size"]) == wanted]
            ours = [of_round[name][size] for of_round in measured]
            middle, other = statistics.median(ours), statistics.median(theirs)
            cells.append(
                {
                    "transport": name,
                    "size": size,
                    "measure_us": [round(us, 2) for us in ours],
                    "transports_us": [round(us, 2) for us in theirs],
                    "ratio": round(middle / other, 3),
                }
            )
            print(f"{name:5} {size:8} {middle:9.1f} {other:9.1f} {middle / other:6.2f}")
    write_result("measured_transports", {"rounds": rounds, "others_share": others, "cells": cells})


if __name__ == "__main__":
    main()
