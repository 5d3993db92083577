"""What others can see of a worker: its log, the health file, systemd's watchdog."""

import contextlib
import json
import logging
import os
import pathlib
import socket
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from pgqueue.attempt import FIELDS
from pgqueue.terminal import LINES, LONGEST, printable, trace
from pgqueue.worker.seldom import TRACE, log


class Health:
    """Shows once that the worker is ready, and each second that no part of it has died."""

    def __init__(self, file: str | None, on_ready: Callable[[], None]) -> None:
        self._file = pathlib.Path(file) if file else None
        self._on_ready = on_ready
        self._next_at = 0.0
        self._is_ready = False
        self._has_complained = False

    def __call__(self, is_ready: bool, states: Sequence[str] = ()) -> None:
        state = "WATCHDOG=1"
        if is_ready and not self._is_ready:
            self._is_ready = True
            self._on_ready()
            state = f"READY=1\n{state}"
        elif time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + 1
        if self._file:
            self._touch(self._file, states)
        notify_systemd(state)

    def _touch(self, file: pathlib.Path, states: Sequence[str]) -> None:
        try:
            if states:
                text = "".join(f"{printable(state)}\n" for state in states)
                # Whatever locale a handler has set.
                file.write_text(text, encoding="utf-8", errors="replace")
            else:
                file.touch()
            self._has_complained = False
        except OSError as error:
            if not self._has_complained:
                log.warning("cannot touch the health file: %s", error)
            self._has_complained = True


def notify_systemd(state: str) -> None:
    """Tell systemd (Type=notify); with --processes it needs NotifyAccess=all."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        address = "\0" + address[1:] if address.startswith("@") else address
        with contextlib.suppress(OSError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix:
                unix.sendto(state.encode(), address)


def set_up_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextLines(logging.Formatter):
    """One line each, with traceback and stack indented below; control characters are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(process)d %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        zone = time.strftime("%z", time.localtime(record.created))
        return super().formatTime(record, datefmt) + zone

    def formatMessage(self, record: logging.LogRecord) -> str:
        lines = (line.strip() for line in record.message[:LONGEST].splitlines())
        record.message = printable(" ".join(lines))
        if shown := getattr(record, TRACE, ""):
            record.exc_text = self._indented(shown)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return self._indented(trace(ei[1]))

    def formatStack(self, stack_info: str) -> str:
        return self._indented(stack_info)

    def _indented(self, text: str) -> str:
        return textwrap.indent(printable(text.rstrip("\n"), LINES), "    ")


class JsonLines(logging.Formatter):
    """One JSON object a line, with the fields of the job if it is about one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage()[:LONGEST],
        }
        line |= {n: getattr(record, n) for n in FIELDS if hasattr(record, n)}
        if record.exc_info and record.exc_info[1]:
            line["error"] = getattr(record, TRACE, "") or trace(record.exc_info[1])
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)
