"""The options of asyncpipe-comm measure."""

from __future__ import annotations

from dataclasses import dataclass

from ..limits import Text, path
from ..options import option
from .bench_options import sizes_in


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """The messages to measure links with, and the files to write."""

    sizes: str = option(
        "4KiB,64KiB,1MiB,16MiB",
        Text("a list with commas of sizes", "4KiB,1MiB", sizes_in),
        "Sizes of the messages, with commas; the bandwidth is that of the largest.",
    )
    output: str | None = option(
        None,
        path("devices.toml"),
        "Write the ranks and links to this file, which asyncpipe-partition reads with --devices.",
    )
    svg: str | None = option(
        None, path("links.svg"), "Draw the bandwidths of all links into this file."
    )
