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
        self._groups: list[dist.ProcessGroup] = []

    def fault(self, case: Case) -> str:
        """The reason why this case fails here; "" if it works."""
        if case.dtype != OBJECT and not applies(case.reduce, case.dtype):
            return NOT_DEFINED
        if case.ranks < 2 and case.op in NEED_TWO:
            return "it needs 2 ranks"
        timeout = datetime.timedelta(seconds=self._wait_s)
        while len(self._groups) < (3 if OPERATIONS[case.op].kind == "threads" else 1):
            self._groups.append(dist.new_group(timeout=timeout, backend=self._backend))
        faults = self._session.gathered(self._own_fault(case))
        if any(faults):
            for group in self._groups:
                dist.destroy_process_group(group)
            self._groups.clear()
        return str(next(filter(None, faults), ""))

    def _own_fault(self, case: Case) -> str:
        try:
            links, *lanes = (GroupLinks(group, timeout_s=self._wait_s) for group in self._groups)
            prepared = prepare(case, Wires(self._groups[0], links, lanes))
            prepared.reset()
            prepared.call()
            wrong = wrong_in(prepared)
        except Exception as error:  # of any kind: backends have no class for it
            return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return f"{wrong} wrong elements" if wrong else ""
