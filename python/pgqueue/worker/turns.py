"""How many jobs to claim, and of which queues: for the free slots, and ahead if jobs are quick.

The databases of a worker share its slots, by which of them have something due. Each has a
dispatcher, which asks here before it claims. Nobody waits for one whose server does not answer:
soon, the jobs that it has asked for no longer count. What it claims after all may be too much, and
is given back.

No job is claimed ahead on its last attempt: if the worker were killed, it would die unrun.
"""

import threading
import time
from collections import Counter
from typing import Protocol

from pgqueue.attempt import Attempt
from pgqueue.worker.executor import Executor
from pgqueue.worker.protocol import MOST_BYTES
from pgqueue.worker.terms import Terms

AHEAD = 0.1  # seconds of work to claim beyond what the free slots take
PATIENCE = 1.0  # seconds of work that may wait here: other workers get the rest
LAST_ATTEMPTS = 1.0  # seconds for which one that was seen forbids claiming ahead
QUICK = 1000.0  # jobs a second; from here on large batches matter more than latency
GATHER = 0.003  # seconds in which quick jobs gather for one batch
MAX_CLAIM = 10_000  # jobs in one claim
HANG = 0.25  # seconds that a call may take before the others go on without it


class Member(Protocol):
    """A dispatcher, as the others see it."""

    asked: int  # jobs, in the claim that it is making
    served_at: float  # its last claim
    held: set[Attempt]

    def answers(self, seconds: float) -> bool: ...
    def is_hungry(self) -> bool: ...
    def slot_freed(self) -> None: ...
    def look_again(self) -> None: ...


class Turns:
    """Sizes claims by the rate at which jobs finish, how many are left, and what others need."""

    def __init__(self, terms: Terms, executor: Executor) -> None:
        self.members: list[Member] = []
        self.is_paused = False  # to drain: nothing more is claimed
        self.has_limits = any(share.limit for share in terms.shares.values())
        self.terms = terms
        self.executor = executor
        self.left = terms.max_jobs  # to claim; None is without limit
        self.rate = 0.0  # jobs finished a second
        self._none_ahead_until = 0.0
        self._size = 0.0  # bytes of a job, of late
        self._counted, self._counted_at = 0, time.monotonic()
        self._lock = threading.Lock()

    def take(self, own: Member) -> tuple[dict[str, int | None], int]:
        """Return the open queues, and how many jobs it may claim: these are kept for it."""
        with self._lock:
            others = [m for m in self.members if m is not own and m.answers(HANG)]
            asked = sum(m.asked for m in others)
            queues = self._open_queues(asked)
            want = self.want(len(own.held), asked)
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
        self.slot_freed()

    def slot_freed(self) -> None:
        for member in self.members:
            member.slot_freed()

    def look_again(self) -> None:
        for member in self.members:
            member.look_again()

    @property
    def is_quick(self) -> bool:
        return self.rate > QUICK and time.monotonic() < self._counted_at + 0.2

    def count(self, finished: int) -> None:
        """Note how many more jobs have finished, perhaps none."""
        with self._lock:
            self._counted += finished
            now = time.monotonic()
            if now > self._counted_at + 0.05:
                elapsed = now - self._counted_at
                rate = self._counted / elapsed
                self.rate = rate if elapsed > 0.2 else (self.rate + rate) / 2
                self._counted, self._counted_at = 0, now

    def claimed(self, jobs: int) -> None:
        if self.left is not None:
            with self._lock:
                self.left -= jobs

    def weigh(self, sizes: list[int]) -> None:
        """Note how many bytes some jobs have."""
        if sizes:
            self._size = sum(sizes) / len(sizes)

    def sort(self, attempts: list[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
        """Put last attempts first; set apart those that would have to wait here, and what is too much."""
        beyond = self._beyond(attempts) if len(self.members) > 1 else set()
        if beyond:
            attempts = [a for a in attempts if a not in beyond]
        last = [a for a in attempts if a.number >= a.max_attempts]
        if not last:
            return attempts, list(beyond)
        self._none_ahead_until = time.monotonic() + LAST_ATTEMPTS
        others = [a for a in attempts if a.number < a.max_attempts]
        free = max(0, self.terms.concurrency - self.executor.unfinished)
        return last[:free] + others, [*last[free:], *beyond]

    def is_too_much(self) -> bool:
        """Whether more jobs wait than run in time: they are slower than those before."""
        most = self.terms.concurrency + self.rate * PATIENCE
        return len(self.executor.waiting) > most

    def want(self, held: int, asked: int) -> int:
        """Say how many jobs to claim besides those asked for elsewhere: 0 while the finisher has fallen behind."""
        batch, concurrency = self.terms.batch, self.terms.concurrency
        if held > 2 * (batch + concurrency):
            return 0
        now = time.monotonic()
        is_fresh = self._none_ahead_until <= now < self._counted_at + PATIENCE
        ahead = min(batch, int(self.rate * AHEAD)) if is_fresh else 0
        ahead = min(ahead, int(MOST_BYTES / max(self._size, 1)))
        unfinished = self.executor.unfinished + asked
        want = min(concurrency + ahead - unfinished, MAX_CLAIM)
        # In thirds: one is being claimed, one is ready, one is running.
        third = ahead // 3
        if unfinished >= concurrency and want < third:
            return 0
        want = min(want, max(concurrency, third + 1))
        return want if self.left is None else min(want, self.left - asked)

    def _share(self, own: Member, hungry: list[Member], want: int) -> int:
        """Divide what there is evenly; what remains goes to those that waited longest."""
        held = len(own.held)
        there_is = want + held + sum(len(m.held) + m.asked for m in hungry)
        share, rest = divmod(there_is, len(hungry) + 1)
        before = sum(m.served_at < own.served_at for m in hungry)
        return share + (before < rest) - held

    def _beyond(self, attempts: list[Attempt]) -> set[Attempt]:
        """Find what another database's claim has left no room for, meanwhile: of --max-jobs or a queue's limit."""
        with self._lock:
            held = Counter(a.queue for m in self.members for a in list(m.held))
            excess = max(0, -self.left) if self.left is not None else 0
            beyond = set(attempts[max(0, len(attempts) - excess) :])
            for attempt in reversed(attempts):
                limit = self.terms.shares[attempt.queue].limit
                if limit and held[attempt.queue] > limit:
                    held[attempt.queue] -= 1
                    beyond.add(attempt)
        return beyond

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
