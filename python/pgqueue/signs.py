"""Signs of life: the log, a file to look at, systemd's watchdog."""

import contextlib
import json
import logging
import os
import pathlib
import socket
import time
import traceback

from pgqueue.loop import Worker


class Pulse:
    """Shows others, once a second, that the loop lives; and sees whether they do."""

    def __init__(self, worker: Worker, health_file: str | None) -> None:
        self.worker = worker
        self.file = pathlib.Path(health_file) if health_file else None
        self.parent = int(os.environ.get("PGQUEUE_PARENT", 0))
        self.next_at = 0.0
        self.state = "READY=1\nWATCHDOG=1"

    def __call__(self) -> None:
        if time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + 1
        if self.file:
            with contextlib.suppress(OSError):
                self.file.touch()
        notify_systemd(self.state)
        self.state = "WATCHDOG=1"
        if self.parent and os.getppid() != self.parent and not self.worker.stops:
            self.worker.stop()


def notify_systemd(state: str) -> None:
    """Tell systemd (Type=notify); with --processes it needs NotifyAccess=all."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        address = "\0" + address[1:] if address.startswith("@") else address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s,
        ):
            s.sendto(state.encode(), address)


def set_up_logging(level: str, form: str) -> None:
    text = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonLines(logging.Formatter):
    """One object a line: when, level, logger, what, and the job's fields if any."""

    fields = ("job_id", "kind", "queue", "attempt", "token", "ms")

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= {n: getattr(record, n) for n in self.fields if hasattr(record, n)}
        if record.exc_info:
            line["error"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)
