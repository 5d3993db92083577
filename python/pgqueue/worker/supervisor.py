"""The supervisor of several worker processes: starts, restarts and stops them.

Each child has a socket to it. There one byte means drain, a second one end at once, and the end of
the stream that the supervisor is gone. So a child can tell a signal that the supervisor passes on
from the same one sent to the child as well.

By the same socket a child says what its exit code means, which any handler, library or script
can produce: READY, then DONE; or CANNOT, which counts as long as no child was ready. Until it says
LISTENS, as while its app is imported, it is ended by signals; so is any by a third one, or if it
does not end in time.

It says once a second that it is ALIVE, and before it begins jobs how long their leases are. From
then on, or when it is READY, it is watched. One that says nothing for longer than those hangs, and
its jobs are already run again by others: it is killed and replaced.
"""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pgqueue.worker.health import notify_systemd
from pgqueue.worker.seldom import SELDOM, log

# It hears the supervisor; it works; it has done its work; it cannot; no part of it hangs.
LISTENS, READY, DONE, CANNOT, ALIVE = b"l", b"r", b"d", b"f", b"."
HANG = 60.0  # seconds without a word, at least
LOOK = 5.0  # seconds between two looks for such
SHORT_LIFE = 5.0  # seconds; what fails sooner is restarted after a pause
LONGEST_PAUSE = 30.0  # seconds
SOCKET = "PGQUEUE_SUPERVISOR"  # names the file descriptor
AT_ONCE = 0.05  # seconds in which SIGTERM and SIGINT are one
GRACE = 3.0  # seconds to end, after the shutdown timeout or a second signal
BOTH = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Child:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    born: float
    said: bytes = b""
    silent_for: float = -math.inf  # seconds, since it is at work
    longest_lease: float = 0.0

    def hear(self) -> bytes:
        """Return all that it has said, except how often it was alive."""
        with contextlib.suppress(OSError):  # nothing more
            if heard := self.socket.recv(10_000, socket.MSG_DONTWAIT):
                self.said += re.sub(rb"[^a-z]", b"", heard)
                leases = map(float, re.findall(rb"\d+", heard))
                self.longest_lease = max([self.longest_lease, *leases])
                # It may begin jobs before it says that it is ready.
                is_at_work = READY in self.said or self.longest_lease > 0
                self.silent_for = 0.0 if is_at_work else -math.inf
        return self.said


class Supervisor:
    """Runs this command line in several processes, and restarts those that die."""

    def __init__(self, count: int, burst: bool, shutdown_timeout: float) -> None:
        if not hasattr(os, "fork"):
            raise ValueError("--processes needs Unix: start several workers instead")
        self._signals: set[int] = {*BOTH, signal.SIGCHLD}
        self._heard, self._wakeup = socket.socketpair()  # a byte for each
        self._wakeup.setblocking(False)
        self._burst = burst
        self._shutdown_timeout = shutdown_timeout
        self._kill_at = math.inf  # in monotonic seconds
        self._looked_at = time.monotonic()  # for those that hang
        self._children: list[Child] = []
        self._start_at = [time.monotonic()] * count
        self._stops: list[int] = []  # the signals
        self._code = 0
        self._short_lives = 0  # in a row
        self._was_ready = False  # some child

    def run(self) -> int:
        """Run until all have ended, and return the exit code."""
        signal.set_wakeup_fd(self._wakeup.fileno())
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        for number in self._signals:
            signal.signal(number, lambda *_: None)
        while self._children or self._start_at:
            until = min(self._kill_at, *self._start_at, time.monotonic() + LOOK)
            numbers = self._wait(max(0.0, until - time.monotonic()))
            if time.monotonic() >= self._kill_at:
                self._kill_all()
            self._kill_hung()
            if told := [number for number in numbers if number in BOTH]:
                time.sleep(AT_ONCE)
                for number in numbers + self._wait(0.0):
                    if number == told[0]:
                        self._stop(number)
            for child in list(self._children):
                exit_code = child.process.poll()
                if exit_code is not None:
                    self._ended(child, exit_code)
            for moment in [m for m in self._start_at if m <= time.monotonic()]:
                self._start_at.remove(moment)
                try:
                    self._start()
                except OSError as error:
                    log.warning("no new process: %s", error, extra=SELDOM)
                    self._start_at.append(time.monotonic() + 1)
        return self._code or (128 + self._stops[-1] if len(self._stops) > 1 else 0)

    def _wait(self, seconds: float) -> bytes:
        """Return the numbers of the signals that come; macOS has no sigtimedwait()."""
        self._heard.settimeout(seconds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        try:
            return self._heard.recv(100)
        except (TimeoutError, BlockingIOError):
            return b""
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env={**os.environ, SOCKET: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            on_failure.pop_all()
        self._children.append(Child(process, ours, time.monotonic()))

    def _stop(self, number: int) -> None:
        notify_systemd("STOPPING=1")
        self._stops.append(number)
        self._start_at.clear()
        count = len(self._stops)
        patience = GRACE + (self._shutdown_timeout if count == 1 else 0.0)
        self._kill_at = min(self._kill_at, time.monotonic() + patience)
        for child in self._children:
            with contextlib.suppress(BrokenPipeError):
                child.socket.send(b".")
            # It may hear nothing yet or, if it hangs, no more.
            if count > 2 or LISTENS not in child.hear():
                how = signal.SIGTERM if count == 1 else signal.SIGKILL
                child.process.send_signal(how)

    def _kill_all(self) -> None:
        """End those that do not end by themselves, such as one whose handler holds the interpreter."""
        self._kill_at = math.inf
        for child in self._children:
            log.warning("process %s does not end: killed", child.process.pid)
            child.process.kill()

    def _kill_hung(self) -> None:
        now = time.monotonic()
        # At most twice the usual, or after a pause of all processes it would kill them.
        passed = min(now - self._looked_at, 2 * LOOK)
        self._looked_at = now
        for child in self._children:
            child.silent_for += passed
            child.hear()
            if child.silent_for > max(
                HANG, child.longest_lease, self._shutdown_timeout
            ):
                pid, seconds = child.process.pid, child.silent_for
                log.warning("process %s hangs, for %.0f s: killed", pid, seconds)
                child.process.kill()
                child.silent_for = -math.inf

    def _ended(self, child: Child, exit_code: int) -> None:
        """Restart a child, unless it was to end or would fail again."""
        # A list, so that all are heard: or DONE is missed.
        self._was_ready |= any([READY in each.hear() for each in self._children])
        self._children.remove(child)
        child.socket.close()
        is_done = DONE in child.said
        if self._stops or (self._burst and is_done):
            return
        if CANNOT in child.said and not self._was_ready:
            self._code = exit_code
            self._stop(signal.SIGTERM)
            return
        pid, pause = child.process.pid, 0.0
        if is_done:
            log.info("process %s has done its work: restarting", pid)
        else:
            is_short = time.monotonic() < child.born + SHORT_LIFE
            self._short_lives = self._short_lives + 1 if is_short else 0
            if is_short:
                pause = min(2.0 ** min(self._short_lives - 1, 10), LONGEST_PAUSE)
            names = {-number: number.name for number in signal.Signals}
            how = names.get(exit_code, exit_code)  # SIGKILL: often out of memory
            log.warning("process %s ended with %s: restarting", pid, how)
        self._start_at.append(time.monotonic() + pause)


class Link:
    """A child's way to its supervisor, if there is one."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        if number := os.environ.pop(SOCKET, None):
            os.set_inheritable(int(number), False)  # by what handlers start
            self._socket = socket.socket(fileno=int(number))
            self._socket.settimeout(None)  # whatever Django's settings have as default

    def __bool__(self) -> bool:
        return self._socket is not None

    def say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone
            if self._socket:
                # A supervisor that stands still must not hold it up.
                how = socket.MSG_DONTWAIT if word == ALIVE else 0
                self._socket.send(word, how)

    def may_be_silent(self, seconds: float) -> None:
        """Say for how long this process need not say that it is alive."""
        self.say(b"%d " % seconds)

    def listen(self, stop: Callable[[str], None]) -> None:
        """Call `stop` for each byte from the supervisor, and when it is gone."""
        if not self._socket:
            return
        reading = self._socket
        self.say(LISTENS)

        def listen() -> None:
            with contextlib.suppress(OSError):  # it was killed
                while reading.recv(1):
                    stop("told by its supervisor")
            stop("without its supervisor")

        threading.Thread(target=listen, name="supervised", daemon=True).start()
