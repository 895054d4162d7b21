"""The parameters of a stage, each owned by one of its replicas: their owners, and what the replicas
exchange of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ..plan.sharing import MESSAGE_BYTES, UNDER_WAY

BUCKET_BYTES = 25 << 20
"""The most bytes of a message that has the gradients of a step of several parameters (PyTorch's
DDP)."""
_NO_GRADIENT = -1.0

Parameter = TypeVar("Parameter", bound=Tensor)


class _Message(NamedTuple):
    """A broadcast under way: the tensors that receive its content, none where it began."""

    work: dist.Work
    flat: Tensor
    targets: list[Tensor]


@dataclass(frozen=True, eq=False)
class Shards:
    """The owners of a stage's parameters among its replicas.

    An owner has the optimizer state of its parameters, steps them, and gives the others the new
    values. Without owners every replica has everything.

    owners: the owner of each parameter that trains, by its index among the replicas.
    copy: the index of this replica.
    group: the process group of the replicas.
    peers: the other ranks, for errors.
    each_backward: the gradient of each micro-batch is summed at its owner alone; otherwise those of
        a step are summed there.
    """

    owners: Mapping[Tensor, int] = field(default_factory=dict)
    copy: int = 0
    group: dist.ProcessGroup | None = None
    peers: str = ""
    each_backward: bool = False

    @property
    def is_divided(self) -> bool:
        """True if the replicas own different parameters."""
        return bool(self.owners)

    def owner(self, parameter: Tensor) -> int:
        """The replica that has the state of a parameter; the first one where all have it."""
        return self.owners.get(parameter, 0)

    def owns(self, parameter: Tensor) -> bool:
        """True if this replica steps a parameter."""
        return not self.owners or self.owner(parameter) == self.copy

    @torch.no_grad()
    def spread(self, tensors: Mapping[Tensor, Tensor]) -> None:
        """Gives the tensors, by their parameter, the values that they have at its owner. Collective
        among the replicas. Raises TransportError."""
        if not self.is_divided:
            return
        pending: deque[_Message] = deque()
        given = [parameter for parameter in tensors if parameter in self.owners]
        with naming_peers("the weights cannot be exchanged", self.peers):
            for bucket in bucketed(given, self.kind, MESSAGE_BYTES):
                pending.append(self._broadcast([tensors[each] for each in bucket], bucket[0]))
                if len(pending) == UNDER_WAY:
                    _receive(pending.popleft())
            while pending:
                _receive(pending.popleft())

    def norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norms `f64[]` of the gradients of those parameters that have one, in order, each from
        its owner: the same bits on all replicas. Collective among them."""
        own = [place for place, each in enumerate(parameters) if self.owns(each)]
        given = {
            place: gradient for place in own if (gradient := parameters[place].grad) is not None
        }
        device = parameters[0].device if parameters else None
        content = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        content[own] = _NO_GRADIENT
        if given:
            norms = torch.stack(torch._foreach_norm(list(given.values())))
            content[list(given)] = norms.double()
        with naming_peers("the norms of gradients cannot be exchanged", self.peers):
            dist.all_reduce(content, group=self.group)
        return content[content != _NO_GRADIENT]

    def kind(self, parameter: Tensor) -> tuple[int, torch.dtype, torch.device]:
        """The owner, dtype and device of a parameter, which all parameters of a message share."""
        return self.owner(parameter), parameter.dtype, parameter.device

    def _broadcast(self, tensors: list[Tensor], parameter: Tensor) -> _Message:
        owner = self.owner(parameter)
        is_own = owner == self.copy
        targets: list[Tensor] = []
        if len(tensors) == 1 and tensors[0].is_contiguous():
            flat = tensors[0].detach().view(-1)  # no copy of the largest parameters
        elif is_own:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        else:
            numbers = sum(tensor.numel() for tensor in tensors)
            flat, targets = tensors[0].new_empty(numbers), tensors
        work = dist.broadcast(flat, group_src=owner, group=self.group, async_op=True)
        assert work is not None
        return _Message(work, flat, targets)


WHOLE = Shards()
"""A stage that is not shared out."""


def _receive(message: _Message) -> None:
    message.work.wait()
    if message.targets:
        parts = torch.split(message.flat, [tensor.numel() for tensor in message.targets])
        values = [part.view_as(to) for part, to in zip(parts, message.targets, strict=True)]
        torch._foreach_copy_(message.targets, values)


def bucketed(
    parameters: Iterable[Parameter], kind: Callable[[Parameter], Hashable], most_bytes: int
) -> list[list[Parameter]]:
    """Lists of parameters of one kind and, if they are several, at most so many bytes; a list comes
    before those whose last parameter comes later."""
    lists: list[list[Parameter]] = []
    last: list[int] = []
    open_lists: dict[Hashable, tuple[int, int]] = {}  # the place in `lists`, and the bytes so far
    for place, parameter in enumerate(parameters):
        of_kind = kind(parameter)
        number, size = open_lists.get(of_kind, (-1, most_bytes))
        if size + parameter.nbytes > most_bytes:
            number, size = len(lists), 0
            lists.append([])
            last.append(place)
        lists[number].append(parameter)
        last[number] = place
        open_lists[of_kind] = number, size + parameter.nbytes
    return [lists[number] for number in sorted(range(len(lists)), key=last.__getitem__)]


@contextmanager
def naming_peers(what: str, peers: str) -> Iterator[None]:
    """Within it, an error of torch.distributed becomes one that names the peers."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            f"{what} with {peers}: {str(error).splitlines()[0]}",
            "See the output of the other ranks for the cause; --timeout-s allows more time.",
        ) from error
