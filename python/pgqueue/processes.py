"""Several worker processes under one that only looks after them."""

import logging
import os
import signal
import subprocess
import sys
import time
from types import FrameType

log = logging.getLogger("pgqueue")

FATAL = (2, 3)  # wrong usage, no schema: it would fail again
SHORT_LIFE = 5.0  # seconds; who dies sooner is restarted a second later


def supervise(count: int, burst: bool) -> int:
    """Run this command line in so many processes until they end; restart who dies."""
    signals: list[int] = []
    born: dict[int, float] = {}
    code = 0

    def forward(number: int) -> None:
        for pid in born:
            os.kill(pid, number)

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        forward(number)

    def spawn() -> None:
        command = [sys.executable, "-m", "pgqueue.worker", *sys.argv[1:]]
        # Not of our group: Ctrl-C would reach it twice, and twice means at once.
        child = subprocess.Popen(
            [*command, "--processes", "1"],
            env={**os.environ, "PGQUEUE_PARENT": str(os.getpid())},
            start_new_session=True,
        )
        children[child.pid] = child
        born[child.pid] = time.monotonic()

    children: dict[int, subprocess.Popen[bytes]] = {}
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, on_signal)
    for _ in range(count):
        spawn()
    while born:
        pid, status = os.wait()
        if pid not in born:
            continue
        age = time.monotonic() - born.pop(pid)
        del children[pid]
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code in FATAL and not signals:
            on_signal(signal.SIGTERM, None)
            code = exit_code
        elif not signals and not (burst and exit_code == 0):
            if exit_code != 0:
                log.warning("process %s ended with %s: restarting", pid, exit_code)
            if age < SHORT_LIFE and exit_code != 0:
                time.sleep(1)
            if not signals:
                spawn()
    return code or (128 + signals[-1] if len(signals) > 1 else 0)
