"""asyncpipe-comm: measures the links between ranks and explains what they cost."""

from __future__ import annotations

from .comm_bench import bench_command
from .comm_diagnose import diagnose_command
from .comm_locality import locality_command
from .comm_measure import measure_command
from .options import make_app

app = make_app("asyncpipe-comm", "Measure the links between ranks, and explain what they cost.")

app.command(bench_command, name="bench")
app.command(diagnose_command, name="diagnose")
app.command(locality_command, name="locality")
app.command(measure_command, name="measure")
