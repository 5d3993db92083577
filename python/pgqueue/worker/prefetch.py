"""How many jobs to claim: for the free slots, and ahead of them if jobs are quick.

None is claimed ahead on its last attempt: if the worker were killed, it would die unrun.
"""

import threading
import time

from pgqueue.attempt import Attempt
from pgqueue.worker.protocol import MOST_BYTES

AHEAD = 0.1  # seconds of work to claim beyond what the free slots take
PATIENCE = 1.0  # seconds of work that may wait here: other workers get the rest
LAST_ATTEMPTS = 1.0  # seconds for which one that was seen forbids claiming ahead
QUICK = 1000.0  # jobs a second; from here on large batches matter more than latency
GATHER = 0.003  # seconds in which quick jobs gather for one batch
MAX_CLAIM = 10_000  # jobs in one claim


class Prefetch:
    """Sizes claims by the rate at which jobs finish, and by how many are left to claim."""

    def __init__(self, concurrency: int, batch: int, left: int | None) -> None:
        self.concurrency = concurrency
        self.batch = batch
        self.left = left  # jobs; None is without limit
        self.rate = 0.0  # jobs finished a second
        self._none_ahead_until = 0.0
        self._size = 0.0  # bytes of a job, of late
        self._counted, self._counted_at = 0, time.monotonic()
        self._lock = threading.Lock()  # several databases count at once

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

    def sort(
        self, attempts: list[Attempt], unfinished: int
    ) -> tuple[list[Attempt], list[Attempt]]:
        """Put last attempts first, and set apart those that would have to wait here."""
        last = [a for a in attempts if a.number >= a.max_attempts]
        if not last:
            return attempts, []
        self._none_ahead_until = time.monotonic() + LAST_ATTEMPTS
        others = [a for a in attempts if a.number < a.max_attempts]
        free = max(0, self.concurrency - unfinished)
        return last[:free] + others, last[free:]

    def is_too_much(self, waiting: int) -> bool:
        """Whether this many jobs wait too long: they are slower than those before."""
        return waiting > self.concurrency + self.rate * PATIENCE

    def want(self, unfinished: int, held: int = 0, asked: int = 0) -> int:
        """Say how many jobs to claim: 0 while the finisher has fallen behind.

        `asked` are those that are just being claimed elsewhere.
        """
        if held > 2 * (self.batch + self.concurrency):
            return 0
        now = time.monotonic()
        is_fresh = self._none_ahead_until <= now < self._counted_at + PATIENCE
        ahead = min(self.batch, int(self.rate * AHEAD)) if is_fresh else 0
        ahead = min(ahead, int(MOST_BYTES / max(self._size, 1)))
        unfinished += asked
        want = min(self.concurrency + ahead - unfinished, MAX_CLAIM)
        # In thirds: one is being claimed, one is ready, one is running.
        third = ahead // 3
        if unfinished >= self.concurrency and want < third:
            return 0
        want = min(want, max(self.concurrency, third + 1))
        return want if self.left is None else min(want, self.left - asked)
