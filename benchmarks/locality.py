"""The lone rank of a split over hosts: ring all-reduces on emulated hosts, measured and predicted.

    python benchmarks/locality.py --repeat 20

The splits are those of the study whose figures `asyncpipe-comm locality` prints: 8 ranks on three
hosts and 6 on two, with serial endpoints, where a lone rank is slow, and with concurrent ones,
where none is. The hosts are namespaces of this machine and share its cores, so the links are slow
enough to be the bottleneck. Requires root.
"""

from __future__ import annotations

import argparse
from typing import Any

from machine import write_result

from asyncpipe.commands.console import make_console, print_table
from asyncpipe.runtime.communication.locality import compare_splits
from asyncpipe.runtime.communication.locality_result import STUDY, result_table
from asyncpipe.runtime.communication.options import LocalityOptions, RankOptions

SPLITS = "4-2-2,4-3-1,3-3,5-1"
LEAST_SERIAL, MOST_CONCURRENT = 1.4, 1.1
"""What this reproduction has to show: the shares of 4-3-1 and 5-1, compared with 4-2-2 and 3-3."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--emulate", default="100mbit", help="the rate of each link")
    parser.add_argument("--size", default="4MiB", help="the size of an all-reduce")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for endpoint in ("serial", "concurrent"):
        options = LocalityOptions(splits=SPLITS, endpoint=endpoint, **vars(given))
        result = compare_splits(options, RankOptions())
        assert result is not None
        print(f"{endpoint} endpoints", flush=True)
        print_table(make_console(), result_table(result))
        print(f"{result['verdict']}\n", flush=True)
        results[endpoint] = result
    write_result("locality", {"study": STUDY, **results})
    print(f"written; as expected: {'yes' if shows_the_effect(results) else 'no'}")


def shows_the_effect(results: dict[str, dict[str, Any]]) -> bool:
    """True if lone ranks are slow with serial endpoints alone."""
    share = {
        endpoint: {row["split"]: row["share"] for row in result["rows"]}
        for endpoint, result in results.items()
    }
    lone = ("4-3-1", "5-1")
    return all(share["serial"][split] >= LEAST_SERIAL for split in lone) and all(
        value <= MOST_CONCURRENT for value in share["concurrent"].values()
    )


if __name__ == "__main__":
    main()
