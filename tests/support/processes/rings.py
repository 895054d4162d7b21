"""Ranks of one process, each a thread, with point-to-point links between them."""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from time import perf_counter
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")
LIMIT_S = 20.0


@dataclass(frozen=True)
class Message:
    content: Tensor
    was_taken: threading.Event = field(default_factory=threading.Event)


@dataclass
class Mail:
    """The messages of all ranks, by sender and receiver."""

    queues: dict[tuple[int, int], Queue[Message]] = field(
        default_factory=lambda: defaultdict(Queue)
    )


@dataclass(frozen=True)
class ThreadLinks:
    """Links without buffers: a send ends when its message was received."""

    mail: Mail
    rank: int
    ranks: int

    def send(self, peer: int, tensor: Tensor) -> None:
        wait(self.post(peer, tensor))

    def recv(self, peer: int, tensor: Tensor) -> None:
        message = self.mail.queues[peer, self.rank].get(timeout=LIMIT_S)
        tensor.copy_(message.content)
        message.was_taken.set()

    def exchange(self, target: int, outgoing: Tensor, source: int, incoming: Tensor) -> float:
        sent = self.post(target, outgoing)
        self.recv(source, incoming)
        wait(sent)
        return perf_counter()

    def post(self, peer: int, tensor: Tensor) -> Message:
        message = Message(tensor.clone())
        self.mail.queues[self.rank, peer].put(message)
        return message


def wait(message: Message) -> None:
    assert message.was_taken.wait(LIMIT_S), "nobody receives"


def run_threads(ranks: int, function: Callable[[ThreadLinks], Result]) -> list[Result]:
    """`function(links)` on each of the ranks; the results in rank order."""
    mail = Mail()
    for source in range(ranks):
        for target in range(ranks):
            mail.queues[source, target] = Queue()
    with ThreadPoolExecutor(ranks) as pool:
        ends = [pool.submit(function, ThreadLinks(mail, rank, ranks)) for rank in range(ranks)]
        return [end.result() for end in ends]
