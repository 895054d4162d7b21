"""Records of a run -> the parts of its ranks' time, as shares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import mean

from ..monitoring.records import PARTS_OF_TIME
from ..monitoring.run_files import RunRecords, number, numbers, part
from ..monitoring.tail import Record
from .measures import (
    CAUSES,
    rank_idle,
    stage_times,
    step_times,
    times_of_records,
    usual_of_stages,
)


def parts_of(run: RunRecords) -> dict[str, float]:
    """The shares of the ranks' time in forwards, backwards and the optimizer, in a cache if there
    is one, in exchanges between replicas and tensor ranks, in waiting (bubble, imbalance,
    communication), for data, and in the rest."""
    if run.config.get("elastic"):
        return _parts_over_phases(run)
    step, times, idle = step_times(run).measured, stage_times(run), rank_idle(run)
    micro_batches, replicas = number(run.start, "micro_batches"), number(run.start, "replicas")
    if not (step > 0 and times and idle):
        return {}
    of_rank = replicas * run.start.get("tensor_ranks", 1) / (step * len(idle))
    parts = {
        "forward": micro_batches * of_rank * sum(each.forward.measured for each in times),
        "backward": micro_batches * of_rank * sum(each.backward.measured for each in times),
        "optimizer": of_rank * sum(each.optimizer_ms for each in times),
    }
    causes = {name: mean(rank.parts.get(name, 0.0) for rank in idle) for name in CAUSES}
    if cache_ms := sum(usual_of_stages(run, "cache")):
        parts["cache"] = micro_batches * of_rank * cache_ms
    parts["exchange"] = causes["exchange"]
    parts["waiting"] = sum(causes[name] for name in ("bubble", "imbalance", "communication"))
    parts["data"] = causes["data"]
    if any(map(math.isnan, parts.values())):
        return {}
    # Medians of forwards and of steps need not add up.
    whole = max(1.0, sum(parts.values()))
    parts["other"] = whole - sum(parts.values())
    return {name: share / whole for name, share in parts.items()}


def _parts_over_phases(run: RunRecords) -> dict[str, float]:
    """`parts_of` a run whose stages change: the mean over its recorded steps but the first, each by
    the time that it stands for. Waits for the data of another rank count as waiting here."""
    sums: Counter[str] = Counter()
    for record, time_ms in times_of_records(run):
        sums.update({name: share * time_ms for name, share in _parts_of_step(record).items()})
    whole = sum(sums.values())
    return {name: share / whole for name, share in sums.items()} if whole else {}


def _parts_of_step(record: Record) -> Mapping[str, float]:
    actions, busy = part(record, "action_ms"), numbers(record, "busy_shares")
    of_kind = {kind: sum(numbers(actions, kind)) for kind in (*"FBW", "cache")}
    computing_ms, stages = sum(of_kind.values()), len(numbers(actions, "F"))
    if not (busy and computing_ms):
        return {}
    share = {name: mean(numbers(record, f"{name}_shares") or (0.0,)) for name in PARTS_OF_TIME}
    copies = sum(each > 0 for each in busy) / stages  # of each stage
    step_ms = number(record, "step_ms") * len(busy)
    optimizer = min(share["busy"], copies * sum(numbers(actions, "S")) / step_ms)
    computing = (share["busy"] - optimizer) / computing_ms
    return {
        "forward": computing * of_kind["F"],
        "backward": computing * (of_kind["B"] + of_kind["W"]),
        "optimizer": optimizer,
        **({"cache": computing * of_kind["cache"]} if of_kind["cache"] else {}),
        "exchange": share["exchange"],
        "waiting": share["waiting"] + share["sending"],
        "data": share["data"],
        "other": share["overhead"] + share["writing"],
    }
