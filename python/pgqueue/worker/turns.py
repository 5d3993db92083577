"""Divides the slots of a worker between its databases, by which of them have something due.

Each database has a dispatcher, which asks here before it claims. Nobody waits for one whose server
does not answer: soon, the jobs that it has asked for no longer count.
"""

import threading
import time
from collections import Counter
from collections.abc import Set
from typing import Protocol

from pgqueue.attempt import Attempt
from pgqueue.worker.executor import Executor
from pgqueue.worker.prefetch import Prefetch
from pgqueue.worker.terms import Terms

HANG = 0.25  # seconds that a call may take before the others go on without it


class Member(Protocol):
    """A dispatcher, as the others see it."""

    asked: int  # jobs, in the claim that it is making
    served_at: float  # its last claim

    @property
    def held(self) -> Set[Attempt]: ...
    def answers(self, seconds: float) -> bool: ...
    def is_hungry(self) -> bool: ...
    def slot_freed(self) -> None: ...


class Turns:
    """Says to each dispatcher how many jobs it may claim, and of which queues."""

    def __init__(self, terms: Terms, prefetch: Prefetch, executor: Executor) -> None:
        self.members: list[Member] = []
        self.is_paused = False  # to drain: nothing more is claimed
        self.has_limits = any(share.limit for share in terms.shares.values())
        self.terms = terms
        self.prefetch = prefetch
        self.executor = executor
        self._lock = threading.Lock()

    def take(self, own: Member) -> tuple[dict[str, int | None], int]:
        """Return the open queues, and how many jobs it may claim: these are kept for it."""
        with self._lock:
            own.asked = 0
            others = [m for m in self.members if m is not own and m.answers(HANG)]
            asked = sum(m.asked for m in others)
            queues = self._open_queues(asked)
            want = self.prefetch.want(self.executor.unfinished, load(own), asked)
            if self.has_limits and None not in queues.values():
                want = min(want, sum(n or 0 for n in queues.values()))
            if hungry := [m for m in others if m.is_hungry()]:
                want = min(want, self._share(own, hungry, want))
            if want > 0 and own.is_hungry():
                own.asked, own.served_at = want, time.monotonic()
            return queues, want

    def settle(self, own: Member) -> None:
        """Leave what it did not need of its share to the others."""
        own.asked = 0
        for member in self.members:
            if member is not own:
                member.slot_freed()

    def _share(self, own: Member, hungry: list[Member], want: int) -> int:
        """Divide what there is evenly; what remains goes to those that waited longest."""
        there_is = want + load(own) + sum(load(m) + m.asked for m in hungry)
        share, rest = divmod(there_is, len(hungry) + 1)
        before = sum(m.served_at < own.served_at for m in hungry)
        return share + (before < rest) - load(own)

    def _open_queues(self, asked: int) -> dict[str, int | None]:
        """Return the queues that are not at their limit, and what is left of it."""
        if not self.has_limits:
            return dict.fromkeys(self.terms.shares)
        held = Counter(a.queue for m in self.members for a in list(m.held))
        left = {
            name: share.limit and share.limit - held[name] - asked
            for name, share in self.terms.shares.items()
        }
        return {name: n for name, n in left.items() if n is None or n > 0}


def load(member: Member) -> int:
    return len(member.held)
