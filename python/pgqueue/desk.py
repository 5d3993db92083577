"""Between lanes and loop: what runs, what is done, and how it went."""

import asyncio
import contextlib
import os
import select
import traceback
from collections import deque
from datetime import timedelta

from pgqueue.app import Job, Reject, Report, Retry, Snooze
from pgqueue.client import LeaseLost

COMPLETED = Report("complete")
DONE = Report("done")
LOST = Report("lost")
NO_CONNECTION = Report("release", until=timedelta(seconds=1))


class Bell:
    """Wakes the loop from other threads and from signal handlers."""

    def __init__(self) -> None:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe[1], b".")

    def wait(self, timeout: float, *files: int) -> list[int]:
        """Wait for the bell or for files to read; name those of them that have news."""
        poll = select.poll()
        for file in (self._pipe[0], *files):
            poll.register(file, select.POLLIN)
        ready = [file for file, _ in poll.poll(timeout * 1000)]
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        return [file for file in files if file in ready]


class Desk:
    """What runs, what is done and not yet reported, and whom to tell."""

    def __init__(self, bell: Bell) -> None:
        self.running: set[Job] = set()
        self.done: deque[Job] = deque()
        self.is_waiting = False
        self.bell = bell

    def start(self, job: Job, now: float) -> bool:
        """Note that a handler begins now, unless the lease is over already."""
        if now >= job.expires:
            self._put(job, LOST)
            return False
        job.started = now  # before watch sees it running
        self.running.add(job)
        return True

    def finish(self, job: Job, report: Report) -> bool:
        """Take the report of a job; false if it has been given up meanwhile."""
        try:
            self.running.remove(job)
        except KeyError:
            return False
        self._put(job, report)
        return True

    def _put(self, job: Job, report: Report) -> None:
        job.report = report
        self.done.append(job)
        if self.is_waiting:
            self.bell.ring()


def judge(job: Job, error: BaseException) -> Report:
    """Turn what a handler raised into what to tell the server."""
    if isinstance(error, Snooze):
        return Report("release", until=error.until)
    if isinstance(error, LeaseLost):
        return LOST
    if isinstance(error, asyncio.CancelledError) and job.lost and not job.cancelled:
        return LOST
    # A summary in the first line, by which errors are found; of the rest the end says most,
    # for it may be huge. It may hold what Postgres cannot store, too.
    try:
        said = " ".join(str(error).split())
        text = f"{type(error).__name__}: {said[:500]}" if said else type(error).__name__
        text += "\n\n" + "".join(traceback.format_exception(error))[-6000:]
    except BaseException as worse:
        text = f"{type(error).__name__}, which raised {type(worse).__name__} when shown"
    text = text.replace("\0", "\\0").encode(errors="backslashreplace").decode()
    after = error.after if isinstance(error, Retry) else None
    return Report("fail", text, after=after, permanent=isinstance(error, Reject))
