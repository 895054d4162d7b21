"""The transport over NCCL, with gloo in its place: messages without tags find their receives.

gloo is given no tags here either, so a message that is received in another order than it was sent
has another's bytes.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncpipe.runtime.channels import plan_channels
from asyncpipe.runtime.errors import TransportError
from asyncpipe.runtime.plan import Plan
from asyncpipe.runtime.transports import Channel
from asyncpipe.runtime.transports.nccl import Lane, NcclTransport, lanes_of
from asyncpipe.tests.executor import lowered, train_rank, train_together
from asyncpipe.tests.hand_plans import chain, skips, tied
from asyncpipe.tests.processes import run_processes

HIDDEN = Channel("activation", "hidden", 0, 1, 0, 1, 0, torch.float32, (2, 3))
SKIP = replace(HIDDEN, name="skip", source=2, target=3, tag=1, dtype=torch.int64, shape=(5,))
MASK = replace(HIDDEN, name="mask", tag=2, dtype=torch.bool, shape=(7,))
SCALAR = replace(HIDDEN, name="scalar", tag=3, dtype=torch.bfloat16, shape=())
EMPTY = replace(HIDDEN, name="empty", tag=4, shape=(2, 0, 3))
BACK = replace(HIDDEN, kind="gradient", source=1, target=0, source_rank=1, target_rank=0, tag=5)
CHANNELS = (HIDDEN, SKIP, MASK, SCALAR, EMPTY, BACK)
MODELS = {"a chain": lambda: chain(4, dropout=0.25), "skips": skips, "tied": lambda: tied(4)}
SCHEDULES = ("gpipe", "1f1b")


def ordered(lanes: frozenset[Lane], timeout_s: float = 30.0, depth: int = 4) -> NcclTransport:
    return NcclTransport(lanes, timeout_s=timeout_s, depth=depth, device="cpu", backend="gloo")


def content(channel: Channel, index: int) -> Tensor:
    return torch.full(channel.shape, index + channel.tag, dtype=channel.dtype)


def ask_in_another_order(rank: int) -> str:
    transport = ordered(lanes_of(CHANNELS))
    forward = CHANNELS[:-1]
    if rank == 0:
        for i in range(6):
            for channel in forward if i % 2 else reversed(forward):
                transport.send(channel, content(channel, i), i)
        for i in range(6):
            assert torch.equal(transport.wait(transport.recv(BACK, i)), content(BACK, i))
        transport.wait_sent(HIDDEN, 5)
    else:
        # Channel by channel, the last message first: nothing in the order of sending.
        for channel in sorted(forward, key=lambda channel: -channel.tag):
            handles = [transport.recv(channel, i) for i in range(6)]
            for i in reversed(range(6)):
                assert torch.equal(transport.wait(handles[i]), content(channel, i)), channel
        for i in range(6):
            transport.send(BACK, content(BACK, i), i)
    transport.close()
    return "kept"


def test_messages_find_their_receives_whatever_the_order_of_asking() -> None:
    assert run_processes(2, ask_in_another_order) == ["kept", "kept"]


def mismatch(rank: int) -> str:
    """Negative control: the same messages, received in the order of asking."""
    import torch.distributed as dist

    tensors = [content(channel, 1) for channel in (HIDDEN, BACK)]
    if rank == 0:
        for tensor in tensors:
            dist.send(tensor, 1)
        return ""
    found = [torch.empty(2, 3) for _ in tensors]
    for buffer in reversed(found):
        dist.recv(buffer, 0)
    return "same" if torch.equal(found[0], tensors[0]) else "mixed up"


def test_without_headers_they_would_be_mixed_up() -> None:
    assert run_processes(2, mismatch)[1] == "mixed up"


def channels_of(plan: Plan) -> tuple[Channel, ...]:
    ranks = range(len(plan.stages))
    return plan_channels(plan, ranks, sizes=plan.sizes, shared_specs={}, state_bytes=0)


def run_schedules(rank: int, name: str) -> dict:
    model = MODELS[name]()
    found = {}
    for schedule in SCHEDULES:
        transport = ordered(lanes_of(channels_of(model.plan)), depth=1 if rank % 2 else 4)
        found[schedule] = train_rank(model, lowered(model, schedule, 5), transport, seed=3)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_computes_what_ranks_of_one_process_do_to_the_last_bit(name: str) -> None:
    model = MODELS[name]()
    results = run_processes(4, run_schedules, name)
    for schedule in SCHEDULES:
        trained = train_together(model, lowered(model, schedule, 5), seed=3)
        of_ranks = [result[schedule] for result in results]
        assert of_ranks[-1]["losses"] == trained.seen.losses
        found = {key: g for rank in of_ranks for key, g in rank["gradients"][1].items()}
        expected = trained.seen.gradients[1]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())


def test_each_direction_of_each_traffic_between_two_ranks_has_a_lane() -> None:
    assert lanes_of(channels_of(chain(3).plan)) == {
        ("activations", 0, 1), ("activations", 1, 2), ("gradients", 1, 0), ("gradients", 2, 1),
    }  # fmt: skip
    assert {("control", 0, 3), ("control", 3, 0)} <= lanes_of(channels_of(tied(4).plan))
    assert lanes_of([replace(HIDDEN, target_rank=0)]) == frozenset()


def wait_in_vain(rank: int) -> tuple[str, float]:
    transport = ordered(lanes_of(CHANNELS), timeout_s=2.0)
    if rank == 0:
        time.sleep(4.0)
        return "", 0.0
    start_s = time.monotonic()
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(HIDDEN, 5))
    return str(raised.value), time.monotonic() - start_s


def test_a_wait_has_a_time_out_that_says_who_waits_for_whom() -> None:
    text, waited_s = run_processes(2, wait_in_vain, limit_s=40)[1]
    assert 'rank 1 waits for the activation "hidden" of micro-batch 5 from rank 0 (2 s)' in text
    assert 1.9 < waited_s < 3.9


def lose_peer(rank: int) -> str:
    transport = ordered(lanes_of(CHANNELS), timeout_s=50.0)
    if rank == 0:
        raise SystemExit(9)
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(HIDDEN, 5))
    return str(raised.value)


def test_a_lost_peer_is_named_long_before_the_time_out() -> None:
    gone, text = run_processes(2, lose_peer, limit_s=40)
    assert gone is None
    assert 'for the activation "hidden" of micro-batch 5 from rank 0, but rank 0 is gone' in text


def send_more_bytes(rank: int) -> str:
    transport = ordered(lanes_of(CHANNELS))
    if rank == 0:
        transport.send(HIDDEN, content(HIDDEN, 0), 0)
        transport.close()
        return ""
    with pytest.raises(TransportError) as raised:
        transport.wait(transport.recv(replace(HIDDEN, shape=(2, 2)), 0))
    transport.close()
    return str(raised.value)


def test_a_message_of_another_size_is_refused() -> None:
    assert run_processes(2, send_more_bytes)[1] == (
        'Rank 0 sent the activation "hidden" of micro-batch 0 with 24 bytes, and rank 1 expects 16.'
    )
