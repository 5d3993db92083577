"""How many jobs to claim: for the free slots, and ahead where jobs are quick."""

import time

AHEAD = 0.1  # seconds of work to claim beyond what the free slots take
QUICK = 1000.0  # jobs a second, from which on batches matter more than moments
GATHER = 0.003  # seconds in which a busy worker lets quick jobs gather
MOST = 10_000  # jobs in one claim


class Prefetch:
    """Counts finished jobs, and limits claims: by that, and by `left` in all."""

    def __init__(self, concurrency: int, batch: int, left: int | None) -> None:
        self.concurrency = concurrency
        self.batch = batch
        self.left = left  # to claim; None is without limit
        self.rate = 0.0  # jobs finished in a second
        self._counted, self._counted_at = 0, time.monotonic()

    @property
    def is_quick(self) -> bool:
        return self.rate > QUICK and time.monotonic() < self._counted_at + 0.2

    def count(self, finished: int) -> None:
        """Note so many more finished jobs, perhaps none."""
        self._counted += finished
        now = time.monotonic()
        if now > self._counted_at + 0.05:
            elapsed = now - self._counted_at
            rate = self._counted / elapsed
            self.rate = rate if elapsed > 0.2 else (self.rate + rate) / 2
            self._counted, self._counted_at = 0, now

    def claimed(self, jobs: int) -> None:
        if self.left is not None:
            self.left -= jobs

    def want(self, unfinished: int) -> int:
        """Say how many jobs to claim."""
        ahead = min(self.batch, int(self.rate * AHEAD))
        want = min(self.concurrency + ahead - unfinished, MOST)
        # In bites of a third: one is claimed while another runs and a third is there.
        bite = ahead // 3
        if unfinished >= self.concurrency and want < bite:
            return 0
        want = min(want, max(self.concurrency, bite + 1))
        return want if self.left is None else min(want, self.left)
