"""The seconds of the phase `plan` of large plans, with predicted costs and without weights.

With `--former` each command also runs with the code in another folder, the parent of a checkout
that is named asyncpipe, one after the other.

    python benchmarks/plan_times.py --rounds 1        results/plan_times.json
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from machine import write_result
from start_times import partitioned

EIGHT_ON_FOUR = ("--model", "gpt2", "--stages", "8", "--ranks", "4", "--schedule")
EIGHT_ON_HOSTS = ("--model", "gpt2", "--stages", "8", "--hosts", "a:4,b:4")
CASES = {
    "gpt2, 8 stages on 4 ranks, auto": (*EIGHT_ON_FOUR, "auto"),
    "gpt2, 8 stages on 4 ranks, interleaved": (*EIGHT_ON_FOUR, "interleaved"),
    "gpt2, 8 stages on 4 ranks, zb-v": (*EIGHT_ON_FOUR, "zb-v"),
    "gpt2, 8 stages on two hosts, 1f1b": (*EIGHT_ON_HOSTS, "--schedule", "1f1b"),
    "t5-small, 8 stages, 1f1b": ("--model", "t5-small", "--stages", "8", "--schedule", "1f1b"),
}


def plan_s(words: tuple[str, ...], code: str) -> float:
    """The seconds of the phase; `code` is the folder of the code, or "" for what is installed."""
    os.environ["PYTHONPATH"] = code
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        plan_only = ("--meta", "--profile", "analytic", "--stop-after", "plan")
        return partitioned((*words, *plan_only), place / "plan", place / "cache")["plan"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--former", default="")
    given = parser.parse_args()
    codes = {"now": ""} | ({"former": given.former} if given.former else {})
    rounds = [
        {
            name: {code: plan_s(words, at) for code, at in codes.items()}
            for name, words in CASES.items()
        }
        for _ in range(given.rounds)
    ]
    for name in CASES:
        for code in codes:
            print(f"{name:40} {code:7} {statistics.median(r[name][code] for r in rounds):6.1f} s")
    write_result("plan_times", {"plan_seconds": rounds})


if __name__ == "__main__":
    main()
