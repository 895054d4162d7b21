"""asyncpipe-comm bench: results that are compared, backends that are probed, files."""

import json
import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from asyncpipe.runtime.communication import bench, collectives
from asyncpipe.runtime.communication.bench import event_lines
from asyncpipe.runtime.communication.bench_tables import (
    check_results,
    reasons,
    support_table,
    time_table,
)
from asyncpipe.runtime.communication.collectives import Case, Prepared, Wires, wrong_elements
from asyncpipe.runtime.communication.operation_facts import OPERATIONS, applies
from asyncpipe.runtime.communication.options import BenchOptions
from asyncpipe.runtime.communication.ring import PointToPoint, ring_all_reduce
from asyncpipe.runtime.communication.session import Session
from asyncpipe.runtime.communication.support import Prober, cases
from asyncpipe.runtime.distributed.ranks import RankInfo
from asyncpipe.runtime.errors import TransportError
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.processes.in_process import error_of
from asyncpipe.tests.support.processes.rings import run_threads


def session_of(rank: int, transport: str = "shm", timeout_s: float = 30.0) -> Session:
    ranks = dist.get_world_size()
    info = RankInfo(rank, ranks, rank, ranks)
    cpu = torch.device("cpu")
    return Session(info, ("here",) * ranks, transport, cpu, timeout_s, dist.group.WORLD)


SOME_DTYPES = ("f32", "bf16", "i64", "bool")
SOME_REDUCTIONS = ("sum", "bxor", "avg")


def everything(rank: int, folder: str, transport: str) -> dict[str, Any]:
    options = {
        "sizes": "2996",
        "dtype": ",".join(SOME_DTYPES),
        "reduce": ",".join(SOME_REDUCTIONS),
        "iterations": 1,
        "warmup": 0,
        "check": True,
        "trace": f"{folder}/trace.json",
        "events": f"{folder}/events.txt",
    }
    return bench.run_rank(session_of(rank, transport), options)


def combinations() -> int:
    """The number of operations, with some reductions and dtypes."""
    pairs = product(SOME_REDUCTIONS, SOME_DTYPES)
    of_reduction = sum(applies(*pair) for pair in pairs)
    return sum(
        1 if facts.kind == "object" else of_reduction if facts.reduces else len(SOME_DTYPES)
        for facts in OPERATIONS.values()
    )


def test_every_operation_has_the_expected_result_and_moves_the_bytes_of_its_formula(
    tmp_path: Path,
) -> None:
    answer, *_ = run_processes(3, everything, str(tmp_path), "shm")
    products_of_booleans = 2
    assert len(answer["rows"]) == combinations() - products_of_booleans
    assert {row["wrong"] for row in answer["rows"]} == {0}
    undefined = "not defined for this dtype"
    refused = {(one["op"], one["dtype"]) for one in answer["refused"] if one["fault"] != undefined}
    assert refused == {("matmul_row", "bool"), ("matmul_reduction", "bool")}
    for row in (*answer["rings"], *answer["products"]):
        assert row["sent"] == row["formula"]
    assert {row["over"] for row in answer["rows"] if row["op"] == "sendrecv"} == {"shm"}
    lines = (tmp_path / "events.txt").read_text().splitlines()
    assert len(lines) == 3 * (2 * 2 + 1)
    assert all(re.fullmatch(r"\[1,[0-2]\] [-a-z0-9]+ [a-z]+ : \d+\.\d{6}", line) for line in lines)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"send scatter-reduce 1 to rank 2", "wait for all-gather 0 of rank 1"} <= names
    assert "all_reduce bxor i64 2.9 KiB" in names
    sent = [event for event in events if event["ph"] == "s"]
    arrived = [event for event in events if event["ph"] == "f"]
    assert len(sent) == len(arrived) == len(answer["rings"]) * 3 * 4


def test_six_ranks_write_the_66_lines_of_the_study() -> None:
    shares = torch.ones(6, 60)
    rings = run_threads(6, lambda links: ring_all_reduce(links, shares[links.rank]))
    lines = event_lines([ring.events for ring in rings])
    assert len(lines) == 66
    assert sum(line.startswith("[1,5] ") for line in lines) == 11


@dataclass(frozen=True)
class SwappedChunk:
    """Links of which rank 1's first message has another order."""

    links: PointToPoint
    rank: int
    ranks: int

    def exchange(self, target: int, outgoing: Tensor, source: int, incoming: Tensor) -> float:
        swapped = outgoing.flip(0) if self.rank == 1 else outgoing
        return self.links.exchange(target, swapped, source, incoming)


def test_a_chunk_in_the_wrong_order_is_counted_as_wrong_elements() -> None:
    def wrong(links: PointToPoint) -> int:
        case = Case("ring_all_reduce", "i64", "sum", 60, links.rank, 3)
        faulty = SwappedChunk(links, links.rank, 3)
        ring = ring_all_reduce(faulty, case.values(links.rank), checks_lengths=False)
        return wrong_elements(ring.tensor, case.reduced(case.values))

    assert min(run_threads(3, wrong)) > 0
    nan = torch.tensor([float("nan"), 1.0])
    assert wrong_elements(nan, torch.ones(2)) == 1


def probed(rank: int) -> list[str]:
    """The faults of an operation in which a rank takes no part, of one that raises on one rank, of
    one with a wrong result, and of others after each."""

    def only(those: set[int], then: Any) -> Any:
        def made(case: Case, wires: Wires) -> Prepared:
            right = collectives._all_reduce(replace(case, reduce="sum"), wires)
            call = right.call if rank in those else then
            return Prepared(call, right.result, right.expected, right.reset)

        return made

    def fails() -> None:
        raise ValueError("no such\nthing")

    collectives._PREPARED |= {
        "scatter": only({0}, lambda: None),
        "gather": only({0}, fails),
        "broadcast": only(set(), lambda: None),
    }
    session = session_of(rank, timeout_s=20.0)
    prober = Prober(session, "gloo")
    prober._wait_s = 0.3
    ops = ("all_reduce", "scatter", "all_reduce", "gather", "all_reduce", "broadcast", "all_reduce")
    return [prober.fault(case) for case in cases(session, ops, ["f32"], ["sum"])]


def test_an_attempt_that_hangs_or_fails_on_one_rank_does_not_spoil_the_next() -> None:
    faults, others = run_processes(2, probed)
    assert faults == others
    fine, hangs, fine_again, raises, and_again, wrong, at_last = faults
    assert not fine + fine_again + and_again + at_last
    assert "imed out" in hangs and raises
    assert wrong.endswith("wrong elements")


def test_the_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {name: facts.bus_factor(4) for name, facts in OPERATIONS.items() if facts.bus_factor}
    assert factors["all_reduce"] == factors["ring_all_reduce"] == 1.5
    assert {factors[name] for name in ("reduce_scatter", "all_gather", "all_to_all")} == {0.75}
    assert {factors[name] for name in ("broadcast", "reduce", "sendrecv")} == {1}


def test_tables_have_the_columns_of_nccl_tests_and_a_reason_for_what_is_missing() -> None:
    table = time_table([])
    headings = [column.heading.partition(" ")[0] for column in table.columns]
    expected = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    assert [heading for heading in headings if heading in expected] == expected
    row = {"op": "reduce", "reduce": "max", "dtype": "u8", "over": "gloo", "size_bytes": 8}
    check_results([row | {"wrong": 0}, row | {"wrong": None}])
    with pytest.raises(TransportError, match=r"^3 elements of reduce max of 8 bytes \(u8\) over g"):
        check_results([row | {"wrong": 0}, row | {"wrong": 3}])
    attempts = [
        {"op": "reduce", "reduce": "sum", "dtype": "f32", "fault": ""},
        {"op": "reduce", "reduce": "sum", "dtype": "u8", "fault": "Invalid scalar type"},
    ]
    assert support_table(attempts).rows[0] == (
        "reduce sum", "yes", "-", "-", "-", "-", "no", "-", "-",
    )  # fmt: skip
    assert reasons(attempts) == ["Invalid scalar type (reduce sum u8)"]


def test_the_size_of_a_case_is_whole_elements_parts_and_squares() -> None:
    plain = Case("all_reduce", "f32", "sum", 1, 0, 3)
    parts = Case("all_gather", "f32", "", 1, 0, 3)
    square = Case("matmul_row", "f32", "", 1, 0, 3)
    sizes = [bench.sized(case, 1000).size_bytes for case in (plain, parts, square)]
    assert sizes == [1000, 996, 4 * 15 * 15]
    assert bench.sized(parts, 1).count == 1


def test_events_without_a_ring_and_an_unknown_operation_are_refused(tmp_path: Path) -> None:
    message = error_of(tmp_path, "comm", "bench", "--op", "all_reduce", "--events", "e.txt", code=2)
    assert "--events writes the events of ring_all_reduce, and --op is all_reduce." in message
    message = error_of(tmp_path, "comm", "bench", "--op", "all_reduces", code=2)
    assert "--op all_reduces is not all, or a list with commas of send_recv" in message
    assert BenchOptions().op == "all"
