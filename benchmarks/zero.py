"""Memory and time of a step with `zero` 0, 1 and 2, on the same model and replicas.

For each layout and optimizer the levels run one after the other, in several rounds. The table has
the fullest rank, measured as in `rank_memory.py` in tight processes, as planned, and in ordinary
ones. Times are those of ordinary ones: medians over the steps of all rounds but the first of each
run.

python benchmarks/zero.py --rounds 3
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from gpt import GPT, tokens_of
from machine import write_result
from rank_memory import of_ranks

import asyncpipe

LEVELS = (0, 1, 2)
TOKENS = 128


class Layout(NamedTuple):
    """The stages, replicas and micro-batches of each replica of a run."""

    stages: int
    replicas: int
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.stages} stage{'s' * (self.stages > 1)} x {self.replicas} replicas"


LAYOUTS = (Layout(1, 2, 4), Layout(2, 2, 4))


def run(folder: Path, layout: Layout, optimizer: str, zero: int, steps: int) -> dict[str, Any]:
    """The fullest rank of a run, in tight and in ordinary processes."""
    tight, ordinary = (_fullest(folder, layout, optimizer, zero, steps, t) for t in (True, False))
    return {
        "layout": layout.name,
        "optimizer": optimizer,
        "zero": zero,
        **tight,
        "ordinary_mib": ordinary["measured_mib"],
        "step_ms": ordinary["step_ms"],
    }


def _fullest(
    folder: Path, layout: Layout, optimizer: str, zero: int, steps: int, is_tight: bool
) -> dict[str, Any]:
    options = {
        "schedule": "1f1b",
        "replicas": layout.replicas,
        "micro_batches": layout.micro_batches,
        "optimizer": optimizer,
        "zero": zero,
    }
    batch = tokens_of(layout.replicas * layout.micro_batches, TOKENS)
    ranks = layout.stages * layout.replicas
    measured = of_ranks(folder, ranks, options, batch, steps=steps, is_tight=is_tight)
    return max(measured, key=lambda rank: rank["measured_mib"])


def table_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each layout, optimizer and level, over all rounds."""
    table = []
    for key in dict.fromkeys((row["layout"], row["optimizer"], row["zero"]) for row in rows):
        own = [row for row in rows if (row["layout"], row["optimizer"], row["zero"]) == key]
        measured = statistics.median(row["measured_mib"] for row in own)
        table.append(
            {
                **dict(zip(("layout", "optimizer", "zero"), key, strict=True)),
                "planned_mib": own[0]["planned_mib"],
                "measured_mib": measured,
                "ordinary_mib": statistics.median(row["ordinary_mib"] for row in own),
                "difference": round(measured / own[0]["planned_mib"] - 1, 3),
                "step_ms": round(statistics.median(ms for row in own for ms in row["step_ms"]), 1),
                "loss": own[0]["loss"],
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for layout in LAYOUTS:
            for optimizer in arguments.optimizers:
                folder = Path(place) / f"gpt_{layout.stages}p_{optimizer}"
                asyncpipe.partition(
                    GPT(8, arguments.width, 8, TOKENS, 8192),
                    tokens_of(1, TOKENS),
                    stages=layout.stages,
                    output=folder,
                    schedule="1f1b",
                    micro_batches=layout.micro_batches,
                    optimizer=optimizer,
                    profile="analytic",
                )
                for _ in range(arguments.rounds):
                    rows += [
                        run(folder, layout, optimizer, zero, arguments.steps) for zero in LEVELS
                    ]
                for row in table_of(rows)[-len(LEVELS) :]:
                    print(
                        f"{row['layout']}  {row['optimizer']:6}  zero {row['zero']}  "
                        f"{row['planned_mib']:8.1f} MiB planned  {row['measured_mib']:8.1f} "
                        f"measured ({row['difference']:+.1%})  {row['ordinary_mib']:8.1f} "
                        f"ordinary  {row['step_ms']:8.1f} ms",
                        flush=True,
                    )
    print(write_result("zero", {"table": table_of(rows), "runs": rows}))


if __name__ == "__main__":
    main()
