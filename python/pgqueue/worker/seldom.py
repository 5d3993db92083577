"""What a worker logs, and how often it says the same: a night's outage must not fill a disk.

ERROR: somebody has to act. WARNING: pgqueue coped, but look into it. INFO: what happened to
each job and to the worker. DEBUG: the rest. docs/reference/worker.md explains each line at WARNING
and above.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Hashable

import psycopg

from pgqueue import database
from pgqueue.attempt import Attempt, Unready
from pgqueue.terminal import explain, printable, say

log = logging.getLogger("pgqueue")

AGAIN = 60.0  # seconds until the same is said again
MOST = 1000  # things to remember
TRACE = "pgqueue_trace"  # in `extra`: how an error is shown; others use `trace`
SELDOM = {"seldom": None}  # as `extra`: all lines with this text say the same


_said: dict[Hashable, float] = {}  # when it may be said again


def level_of(what: Hashable) -> int:
    """Return WARNING for what has not been said in the last minute, else DEBUG."""
    now = time.monotonic()
    if now < _said.get(what, 0.0):
        return logging.DEBUG
    if len(_said) >= MOST:
        _said.clear()
    _said[what] = now + AGAIN
    return logging.WARNING


def fill_in(record: logging.LogRecord) -> bool:
    """Lower to DEBUG what was said in the last minute, and add the fields of an attempt.

    Of lines with a field `seldom`, those with the same text and the same field say the same. The
    attempt is the one among the arguments of the line.
    """
    if hasattr(record, "seldom"):
        record.levelno = level_of((record.msg, record.seldom))
        record.levelname = logging.getLevelName(record.levelno)
        if not log.isEnabledFor(record.levelno):
            return False
    for argument in record.args or ():
        if isinstance(argument, Attempt):
            record.__dict__.update(argument.fields)
    return True


def handle(record: logging.LogRecord) -> None:
    """Let no handler or filter of the application end what has logged a line."""
    try:
        logging.Logger.handle(log, record)
    except Exception as error:
        if level_of("log") > logging.DEBUG:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                say(f"the log has failed: {error!r}")


log.addFilter(fill_in)
log.handle = handle  # type: ignore[method-assign]


class Outages:
    """Says once for all parts of a worker that a server (which, if there are several) fails, and that it is back."""

    def __init__(self, where: str = "") -> None:
        self._where = where
        self._lock = threading.Lock()
        self._waiting: dict[str, float] = {}  # parts of the worker, and since when
        self._began = 0.0
        self._is_told = False
        self._reason = ""

    def failed(self, part: str, error: psycopg.Error) -> None:
        now, reason = time.monotonic(), one_line(error)
        with self._lock:
            if not self._waiting:
                self._began = now
            waited = now - self._waiting.setdefault(part, now)
            # Its details may differ each time.
            level = level_of((self, error.diag.message_primary or reason))
            self._is_told |= level > logging.DEBUG
        still = f"{self._where}, {waited:.0f} s now" if waited >= 1 else self._where
        log.log(level, "%s waits for the server%s: %s", part, still, reason)
        self._reason = reason

    def is_over(self, part: str) -> None:
        with self._lock:
            self._waiting.pop(part, None)
            if self._waiting or not self._is_told:
                return
            self._is_told = False
            lasted = time.monotonic() - self._began
        log.info("the server%s answers again, after %.1f s", self._where, lasted)

    def state(self) -> str:
        """Say in a line whether the server answers."""
        with self._lock:
            if not self._waiting:
                return "ok"
            lasted = time.monotonic() - self._began
            return f"waits for the server, {lasted:.0f} s now: {self._reason}"


def one_line(error: BaseException) -> str:
    return printable(" ".join(explain(error, "worker").split()))


def unready(what: str, error: BaseException) -> Unready:
    """Say that a handler does not get what it needs, and put its job off."""
    reason = one_line(error)
    again = {"seldom": (what, reason)}
    log.warning("no %s for a handler, put off: %s", what, reason, extra=again)
    return Unready(f"no {what} for its handler: {reason}")


def failed(worker: str, error: BaseException) -> None:
    """Log what ended a worker; if the server refused something, a traceback says nothing."""
    reason = one_line(error)
    if isinstance(error, database.INCOMPATIBLE):
        log.error("%s has failed: install or update pgqueue: %s", worker, reason)
        return
    trace = None if isinstance(error, psycopg.Error) else error
    log.error("%s has failed: %s", worker, reason, exc_info=trace)
