"""Several worker processes under one that only looks after them.

Each child reads a pipe: a byte means drain, a second one end at once, and its end, that the
supervisor is gone. So a child that systemd has told, too, still hears of one stop only once.
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

from pgqueue.worker.health import notify_systemd

log = logging.getLogger("pgqueue")

FATAL = (2, 3)  # wrong usage, no schema: it would fail again
SHORT_LIFE = 5.0  # seconds; who dies sooner is restarted a second later
PIPE = "PGQUEUE_SUPERVISOR"  # names the file descriptor
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def supervise(count: int, burst: bool) -> int:
    """Run this command line in so many processes until they end; restart who dies."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    children: dict[int, tuple[subprocess.Popen[bytes], int, float]] = {}
    stops: list[int] = []
    restart_at = [time.monotonic()] * count
    code = 0

    def spawn() -> None:
        reading, writing = os.pipe()
        try:
            child = subprocess.Popen(
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
        children[child.pid] = child, writing, time.monotonic()

    def stop(number: int) -> None:
        notify_systemd("STOPPING=1")
        stops.append(number)
        restart_at.clear()
        for _, writing, _ in children.values():
            with contextlib.suppress(BrokenPipeError):
                os.write(writing, b".")

    while children or restart_at:
        wait = min(restart_at, default=time.monotonic() + 3600) - time.monotonic()
        heard = signal.sigtimedwait(SIGNALS, max(0.0, wait))
        if heard and heard.si_signo != signal.SIGCHLD:
            stop(heard.si_signo)
        for pid, (child, writing, born) in list(children.items()):
            exit_code = child.poll()
            if exit_code is None:
                continue
            del children[pid]
            os.close(writing)
            if stops or (burst and exit_code == 0):
                continue
            if exit_code in FATAL:
                code = exit_code
                stop(signal.SIGTERM)
                continue
            if exit_code != 0:
                log.warning("process %s ended with %s: restarting", pid, exit_code)
            is_young = exit_code != 0 and time.monotonic() < born + SHORT_LIFE
            restart_at.append(time.monotonic() + is_young)
        for moment in [m for m in restart_at if m <= time.monotonic()]:
            restart_at.remove(moment)
            try:
                spawn()
            except OSError as error:
                log.warning("no new process: %s", error)
                restart_at.append(time.monotonic() + 1)
    return code or (128 + stops[-1] if len(stops) > 1 else 0)


def listen_to_supervisor(stop: Callable[[], None]) -> bool:
    """Call `stop` for each byte from the supervisor, and when it is gone; if there is one."""
    reading = os.environ.pop(PIPE, None)
    if reading is None:
        return False

    def listen() -> None:
        while os.read(int(reading), 1):
            stop()
        stop()

    threading.Thread(target=listen, name="pgqueue-supervised", daemon=True).start()
    return True
