"""The task `measure`: the speed of every rank, and the links between any two.

One pair of ranks communicates at a time, so that no other message shares its link. Half of the
round trip of one byte is the latency. The round trip of a larger message is divided between the two
directions as the times of messages of that size are that a single byte answers. For both directions
at once, both ranks send when a byte has met both; the time in which their processors are free
meanwhile is what a run can hide by computing. Times are medians of as many repetitions as a tenth
of a second has, without the first ones; on slow links the largest sizes are left out.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations, count
from statistics import mean, median
from typing import Any

import torch

from ..distributed.cpu_affinity import read_topology
from ..errors import TransportError
from ..formatting import write_bytes
from ..monitoring.diagnostics import free_and_total_bytes
from ..transports.protocol import Channel, Transport
from .measured_links import MeasuredLink, MeasuredPair, MeasuredRank, Measurement
from .session import Session

_TIME_S = 0.1  # of one measurement
_PROBES = 10  # messages that estimate the number of repetitions
_FEWEST, _MOST = 5, 1000  # repetitions
_LONGEST_S, _LITTLE_S = 4.0, 0.3  # of one message
_MATRIX = {"cpu": 512, "cuda": 4096}


def run_rank(session: Session, options: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the ranks and their links; the answer is that of `Measurement` as JSON, the same on
    all ranks. `options` has the `sizes` of the messages in bytes."""
    ranks = session.gathered(_own_rank(session))
    probe = _Probe(session, sorted(options["sizes"]))
    links: list[MeasuredLink] = []
    pairs: list[MeasuredPair] = []
    for first, second in combinations(range(session.ranks), 2):
        both = probe.links(first, second)
        links += both
        pairs.append(probe.pair(*both))
    probe.close()
    measured = Measurement(
        session.transport, tuple(MeasuredRank(**own) for own in ranks), tuple(links), tuple(pairs)
    )
    answer: dict[str, Any] = json.loads(json.dumps(asdict(measured)))
    return answer


def _own_rank(session: Session) -> dict[str, Any]:
    sharing = Counter(session.hosts)[session.hosts[session.rank]]
    free_bytes, _ = free_and_total_bytes(session.device)
    if session.device.type == "cpu":
        torch.set_num_threads(max(1, read_topology().usable // sharing))
        free_bytes //= sharing
    session.barrier()
    gflop_s = _matrix_products(session.device)
    session.barrier()
    own = MeasuredRank(
        session.hosts[session.rank], _device_name(session.device), gflop_s, free_bytes
    )
    return asdict(own)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _matrix_products(device: torch.device) -> float:
    """The rate of products of square matrices in float32, in 10^9 operations a second."""
    size = _MATRIX[device.type]
    matrix = torch.rand(size, size, device=device)
    return 2e-9 * size**3 / _product_s(matrix)


def _product_s(matrix: torch.Tensor) -> float:
    """The time of the product of a matrix with itself, when other processes slow it least."""

    def once() -> float:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        _settle(matrix.device)
        return time.perf_counter() - start

    return min(_repeated(once, once()))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repeated(once: Callable[[], float], probed_s: float) -> list[float]:
    """The times of as many repetitions as `_TIME_S` has, if one takes `probed_s`, without the first
    ones.
    """
    fewest = _FEWEST if probed_s < _LITTLE_S else 2
    repetitions = max(fewest, min(_MOST, int(_TIME_S / max(probed_s, 1e-9))))
    return [once() for _ in range(repetitions + repetitions // 4)][repetitions // 4 :]


def _link_of(
    source: int, target: int, latency_s: float, one_way_s: Mapping[int, float]
) -> MeasuredLink:
    size, last_s = max(one_way_s.items())
    return MeasuredLink(
        source,
        target,
        round(1e6 * latency_s, 2),
        size / max(last_s - latency_s, last_s / 2) / 1e9,
        tuple((size, round(1e6 * seconds, 2)) for size, seconds in one_way_s.items()),
    )


class _Probe:
    """Messages between pairs of ranks; all ranks call its methods together."""

    def __init__(self, session: Session, sizes: Sequence[int]) -> None:
        self._session, self._sizes = session, sizes
        self._transport: Transport = session.open_transport()
        self._buffers = {
            size: torch.zeros(size, dtype=torch.uint8, device=session.device)
            for size in (1, *sizes)
        }
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._index: Counter[Channel] = Counter()
        tags = count()
        for source in range(session.ranks):
            for target in range(session.ranks):
                for size in self._buffers:
                    self._channels[source, target, size] = Channel(
                        "message", f"of {write_bytes(size)}", source, target, source, target,
                        next(tags), torch.uint8, (size,),
                    )  # fmt: skip

    def close(self) -> None:
        self._transport.close()

    def links(self, first: int, second: int) -> tuple[MeasuredLink, MeasuredLink]:
        """Messages of each size in both directions.

        The time of a message there and one of the same size back is divided as two messages of
        this size are that a single byte answers.
        """
        ends = (first, second), (second, first)
        latency_s = self._median(first, second, partial(self._there, first, second, 1, 1)) / 2
        times_s: tuple[dict[int, float], dict[int, float]] = {}, {}
        longest_s = 0.0
        for size, larger in zip(self._sizes, (*self._sizes[1:], 0), strict=True):
            if longest_s > _LONGEST_S:
                break
            answered_s = [self._median(*of, partial(self._there, *of, size, 1)) for of in ends]
            # Where noise hides the latency: the way of the larger message is the longer one.
            alone_s = [max(time_s - latency_s, time_s / 2) for time_s in answered_s]
            both_s = self._median(first, second, partial(self._there, first, second, size, size))
            for of_way, own_s in zip(times_s, alone_s, strict=True):
                of_way[size] = both_s * own_s / sum(alone_s)
            longest_s = max(alone_s) * larger / size
        there, back = (
            _link_of(*of, latency_s, of_way) for of, of_way in zip(ends, times_s, strict=True)
        )
        return there, back

    def pair(self, there: MeasuredLink, back: MeasuredLink) -> MeasuredPair:
        """Both ranks of two links send at once, the largest size that takes little time."""
        first, second = there.source, there.target
        slower_us = {
            size: max(us, other_us)
            for (size, us), (_, other_us) in zip(there.one_way_us, back.one_way_us, strict=True)
        }
        size = max((size for size, us in slower_us.items() if us < 1e6 * _LITTLE_S), default=0)
        size = size or min(slower_us)
        at_once_s = self._median(first, second, lambda: self._at_once(first, second, size))
        share = self._agreed(
            first,
            second,
            lambda: median(_repeated(lambda: self._busy_share(first, second, size), at_once_s)),
        )
        return MeasuredPair(
            first,
            second,
            2e-9 * size / at_once_s,
            round(2e-6 * slower_us[size] / at_once_s, 3),
            round(max(0.0, 1 - share), 3),
        )

    def _median(self, first: int, second: int, once: Callable[[], float]) -> float:
        """The median time of one of two ranks, and the larger one if both have one."""
        probed_s = self._agreed(first, second, once)
        if probed_s < _TIME_S / _PROBES:
            probed_s = self._agreed(first, second, lambda: mean(once() for _ in range(_PROBES)))
        return self._agreed(first, second, lambda: median(_repeated(once, probed_s)))

    def _agreed(self, first: int, second: int, measure: Callable[[], float]) -> float:
        """The larger number of two ranks, on all ranks."""
        own = self._session.rank
        number = measure() if own in (first, second) else 0.0
        try:
            return float(max(self._session.gathered(number)))
        except TransportError as error:
            raise TransportError(
                f"rank {own} waits for another rank ({self._session.timeout_s:g} s), after ranks "
                f"{first} and {second} have measured their link.",
                "See what the other ranks do, or allow more time with --timeout-s.",
            ) from error

    def _there(self, source: int, target: int, size: int, back: int) -> float:
        """The time of a message and of one of `back` bytes back at its source; 0 at its target."""
        sent = self._channels[source, target, size]
        answer = self._channels[target, source, back]
        if self._session.rank == target:
            self._receive(sent)()
            self._send(answer)
            return 0.0
        receive = self._receive(answer)
        start = time.perf_counter()
        self._send(sent, receive)
        return time.perf_counter() - start

    def _at_once(self, first: int, second: int, size: int) -> float:
        """The time in which a rank sends a message and receives one."""
        own = self._session.rank
        other = second if own == first else first
        receive = self._receive(self._channels[other, own, size])
        self._there(first, second, 1, 1)
        start = time.perf_counter()
        self._send(self._channels[own, other, size], receive)
        return time.perf_counter() - start

    def _busy_share(self, first: int, second: int, size: int) -> float:
        """The share of that time in which threads of this process run."""
        start = time.process_time()
        at_once_s = self._at_once(first, second, size)
        return (time.process_time() - start) / at_once_s

    def _receive(self, channel: Channel) -> Callable[[], None]:
        """Posts the receive of the next message; the result waits for it."""
        self._index[channel] += 1
        posted = self._transport.recv(channel, self._index[channel])

        def wait() -> None:
            self._transport.wait(posted)
            _settle(self._session.device)

        return wait

    def _send(self, channel: Channel, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Sends the next message, and returns when its buffer is free again."""
        self._index[channel] += 1
        self._transport.send(channel, self._buffers[channel.nbytes], self._index[channel])
        meanwhile()
        self._transport.wait_sent(channel, self._index[channel])
