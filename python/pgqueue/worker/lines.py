"""How a worker writes its log: to stderr, as lines for people or as JSON."""

import contextlib
import json
import logging
import os
import signal
import sys
import textwrap
import threading
import time
from typing import Any

from pgqueue.attempt import FIELDS
from pgqueue.terminal import LINES, LONGEST, printable, trace
from pgqueue.worker.seldom import TRACE, log

MOST = 16_000_000  # bytes that may wait for a reader
PATIENCE = 1.0  # seconds for the last lines


def set_up_logging(level: str, form: str) -> None:
    handler = handler_of(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def finish() -> None:
    """Write the last lines, when Python does not do so at its end."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Writer):  # what others flush may take long
            handler.flush()


def handler_of(stream: Any) -> logging.Handler:
    """Write to the file of a stream; if it is closed, or has none, as in a test, to itself."""
    try:
        return Writer(os.dup(stream.fileno()))
    except (AttributeError, OSError, ValueError):
        return logging.StreamHandler(stream)


class Writer(logging.Handler):
    """Writes in a thread of its own: who stops reading the log must not stop the jobs.

    Beyond `MOST` bytes lines are dropped, and counted. It has a file descriptor of its own,
    because a handler may close stderr. A fork has no such thread, and writes by itself.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._lines: list[bytes] = []
        self._size = 0  # bytes that are not written yet
        self._dropped = 0
        self._changed = threading.Condition()
        self._is_fork = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # of the application's arguments
            self.handleError(record)
            return
        if self._is_fork:
            self._write(line)
            return
        with self._changed:
            if self._size > MOST and threading.current_thread() is not self._thread:
                self._dropped += 1
            else:
                self._lines.append(line)
                self._size += len(line)
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, for a moment at most."""
        if not self._is_fork:
            with self._changed:
                self._changed.wait_for(lambda: self._size == 0, PATIENCE)

    def _forked(self) -> None:
        self._is_fork = True

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # they are for the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                text = b"".join(self._lines)
                self._lines.clear()
                dropped, self._dropped = self._dropped, 0
            self._write(text)
            with self._changed:
                self._size -= len(text)
                self._changed.notify_all()
            if dropped:
                log.warning("%s lines of the log were dropped: nobody read it", dropped)

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # it has no reader, or the disk is full
            while text:
                try:
                    text = text[os.write(self._file, text) :]
                except BlockingIOError:  # somebody has made it non-blocking
                    time.sleep(0.01)


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
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = getattr(record, TRACE, "") or trace(record.exc_info[1])
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)
