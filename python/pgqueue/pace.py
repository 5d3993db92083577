"""How fast jobs are done here, and how many to claim for that."""

import time

AHEAD = 0.1  # seconds of work to claim beyond what the free slots take
QUICK = 1000.0  # jobs a second, from which on batches matter more than moments
MOST = 10_000  # jobs in one claim


class Pace:
    """Counts finished jobs, and limits claims: by that, and by `left` in all."""

    def __init__(self, concurrency: int, batch: int, left: int | None) -> None:
        self.concurrency = concurrency
        self.batch = batch
        self.left = left  # to claim; None is without limit
        self.rate = 0.0  # jobs finished in a second
        self._counted, self._counted_at = 0, time.monotonic()

    @property
    def is_quick(self) -> bool:
        return self.rate > QUICK

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
        """Note so many claimed jobs."""
        if self.left is not None:
            self.left -= jobs

    def want(self, held: int) -> int:
        """Say how many jobs to claim: for the free slots, and a little ahead."""
        ahead = min(self.batch, int(self.rate * AHEAD))
        want = min(self.concurrency + ahead - held, MOST)
        if held >= self.concurrency and want < ahead // 2:
            return 0  # in larger bites
        # Half of it is claimed while the other half runs.
        want = min(want, max(self.concurrency, ahead // 2 + 1))
        return want if self.left is None else min(want, self.left)
