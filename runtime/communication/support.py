"""Which operations the ranks' backend supports, found by trying them.

A backend refuses some combinations with an error, computes others wrongly, and may leave ranks
waiting for each other. So attempts are made in a process group of their own, in which all waits end
after a few seconds; after a failure on any rank, the next attempt has a new group.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from .collectives import Case, Wires, prepare, wrong_in
from .endpoints import GroupLinks
from .operation_facts import NEED_TWO, NOT_DEFINED, OBJECT, OPERATIONS, applies
from .session import Session

_WAIT_S = 5.0
_COUNT = 4


def cases(
    session: Session, ops: Iterable[str], dtypes: Iterable[str], reductions: Iterable[str]
) -> Iterator[Case]:
    """The combinations, with a small size."""
    for op in ops:
        facts = OPERATIONS[op]
        for reduce in reductions if facts.reduces else ("",):
            for dtype in (OBJECT,) if facts.kind == OBJECT else dtypes:
                place = session.rank, session.ranks, session.device
                yield Case(op, dtype, reduce, _COUNT, *place)


class Prober:
    """Tries operations over a backend on all ranks. Each attempt is collective."""

    def __init__(self, session: Session, backend: str) -> None:
        self._session = session
        self._backend = backend
        self._wait_s = min(_WAIT_S, session.timeout_s / 2)
        self._group: dist.ProcessGroup | None = None

    def fault(self, case: Case) -> str:
        """Why this case does not work here; "" if it does."""
        if case.dtype != OBJECT and not applies(case.reduce, case.dtype):
            return NOT_DEFINED
        if case.ranks < 2 and case.op in NEED_TWO:
            return "it needs 2 ranks"
        if self._group is None:
            timeout = datetime.timedelta(seconds=self._wait_s)
            self._group = dist.new_group(timeout=timeout, backend=self._backend)
        faults = self._session.gathered(self._own_fault(case, self._group))
        if any(faults):
            dist.destroy_process_group(self._group)
            self._group = None
        return str(next(filter(None, faults), ""))

    def _own_fault(self, case: Case, group: dist.ProcessGroup) -> str:
        try:
            prepared = prepare(case, Wires(group, GroupLinks(group, timeout_s=self._wait_s)))
            prepared.reset()
            prepared.call()
            wrong = wrong_in(prepared)
        except Exception as error:  # of any kind: backends have no class for it
            return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return f"{wrong} wrong elements" if wrong else ""
