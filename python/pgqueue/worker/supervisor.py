"""The supervisor of several worker processes: starts, restarts and stops them.

Each child reads a pipe: one byte means drain, a second one end at once, and the end of the
pipe that the supervisor is gone. So a child can tell a signal passed on by the supervisor
from the same signal sent to the child itself.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pgqueue.worker.health import notify_systemd
from pgqueue.worker.seldom import Seldom

log = logging.getLogger("pgqueue")

FATAL = (2, 3)  # wrong usage, no schema: it would fail again
SHORT_LIFE = 5.0  # seconds; what fails sooner is restarted after a pause
LONGEST_PAUSE = 30.0  # seconds
PIPE = "PGQUEUE_SUPERVISOR"  # names the file descriptor
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


@dataclass
class Child:
    process: subprocess.Popen[bytes]
    pipe: int  # to write to
    born: float


class Supervisor:
    """Runs this command line in several processes, and restarts those that die."""

    def __init__(self, count: int, burst: bool) -> None:
        self._burst = burst
        self._children: list[Child] = []
        self._start_at = [time.monotonic()] * count
        self._stops: list[int] = []  # the signals
        self._code = 0
        self._short_lives = 0  # in a row
        self._seldom = Seldom()

    def run(self) -> int:
        """Run until all have ended, and return the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        while self._children or self._start_at:
            next_start = min(self._start_at, default=time.monotonic() + 3600)
            wait = max(0.0, next_start - time.monotonic())
            heard = signal.sigtimedwait(SIGNALS, wait)
            if heard and heard.si_signo != signal.SIGCHLD:
                self._stop(heard.si_signo)
            for child in list(self._children):
                exit_code = child.process.poll()
                if exit_code is not None:
                    self._ended(child, exit_code)
            for moment in [m for m in self._start_at if m <= time.monotonic()]:
                self._start_at.remove(moment)
                try:
                    self._start()
                except OSError as error:
                    level = self._seldom.level("no process")
                    log.log(level, "no new process: %s", error)
                    self._start_at.append(time.monotonic() + 1)
        return self._code or (128 + self._stops[-1] if len(self._stops) > 1 else 0)

    def _start(self) -> None:
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:], "--processes", "1"],
                env={**os.environ, PIPE: str(reading)},
                pass_fds=[reading],
                start_new_session=True,
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        self._children.append(Child(process, writing, time.monotonic()))

    def _stop(self, number: int) -> None:
        notify_systemd("STOPPING=1")
        self._stops.append(number)
        self._start_at.clear()
        for child in self._children:
            with contextlib.suppress(BrokenPipeError):
                os.write(child.pipe, b".")

    def _ended(self, child: Child, exit_code: int) -> None:
        """Restart a child, unless it was to end or would fail again."""
        self._children.remove(child)
        os.close(child.pipe)
        if self._stops or (self._burst and exit_code == 0):
            return
        if exit_code in FATAL:
            self._code = exit_code
            self._stop(signal.SIGTERM)
            return
        pause = 0.0
        if exit_code != 0:
            is_short = time.monotonic() < child.born + SHORT_LIFE
            self._short_lives = self._short_lives + 1 if is_short else 0
            if is_short:
                pause = min(2.0 ** min(self._short_lives - 1, 10), LONGEST_PAUSE)
            pid, how = child.process.pid, signal_or_code(exit_code)
            log.warning("process %s ended with %s: restarting", pid, how)
        self._start_at.append(time.monotonic() + pause)


def signal_or_code(exit_code: int) -> str:
    """Name what ended a process: SIGKILL often means out of memory."""
    names = {-number: number.name for number in signal.Signals}
    return names.get(exit_code, str(exit_code))


def listen_to_supervisor(stop: Callable[[str], None]) -> bool:
    """Call `stop` for each byte from the supervisor, and when it is gone.

    Returns whether there is one.
    """
    reading = os.environ.pop(PIPE, None)
    if reading is None:
        return False

    def listen() -> None:
        while os.read(int(reading), 1):
            stop("told by its supervisor")
        stop("without its supervisor")

    threading.Thread(target=listen, name="supervised", daemon=True).start()
    return True
