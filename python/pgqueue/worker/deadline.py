"""A deadline for each call to the server: a connection that hangs is broken.

Keepalives only prove that the other end's kernel answers, not that the server does: a proxy
may have forgotten the connection, and a backend may stand still.
"""

import contextlib
import errno
import math
import os
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any
from weakref import WeakSet

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, timeout_from_conninfo
from psycopg.rows import TupleRow

from pgqueue import database
from pgqueue.install import VERSION, advice
from pgqueue.worker.seldom import Outages, log

NEVER = float("inf")
SHORTEST = 3.0  # seconds to wait for an answer, however short the lease


class NoAnswer(psycopg.OperationalError):
    """The server did not answer in so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer in {seconds:g} s: connection given up")
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return NoAnswer, (self.seconds,), self.__dict__


sessions: WeakSet[pq.abc.PGconn] = WeakSet()


def leave_sessions() -> None:
    """Have a forked process hold none open: it may outlive a killed worker, whose locks the server would keep."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for session in list(sessions):
            with contextlib.suppress(psycopg.Error):  # it is closed
                os.dup2(nothing.fileno(), session.socket, inheritable=False)


if hasattr(os, "fork"):
    os.register_at_fork(after_in_child=leave_sessions)


def notices_silence(version: str = psycopg.__version__) -> bool:
    """Whether psycopg comes back from a call that gets no answer; until 3.2.10 its C module does not."""
    return [int(part) for part in re.findall(r"\d+", version)] >= [3, 2, 11]


class Patient:
    """Gives up a call when nothing has moved for longer than `patience` says; no fork keeps its session."""

    patience: Callable[[], float] = staticmethod(lambda: NEVER)
    waits_since = NEVER

    def __init__(self, session: pq.abc.PGconn, *args: Any, **kwargs: Any) -> None:
        super().__init__(session, *args, **kwargs)  # type: ignore[call-arg]
        sessions.add(session)

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for the server, or return what does; all calls of psycopg pass through here."""
        return super().wait(in_time(self, gen), *args, **kwargs)  # type: ignore[misc]


class Watched(Patient, psycopg.Connection[TupleRow]):
    """For a `def` handler, and for the worker itself."""


class WatchedAsync(Patient, psycopg.AsyncConnection[TupleRow]):
    """For an async handler."""


def in_time(conn: Any, call: Any) -> Generator[Any, Any, Any]:
    """Pass on what a call of psycopg waits for, ten times a second; raise NoAnswer when nothing moves for too long."""
    seconds, ready = conn.patience(), None
    conn.waits_since = time.monotonic()
    try:
        while True:
            waits_for = call.send(ready)
            if ready:  # over a slow link, much data takes its time
                conn.waits_since = time.monotonic()
            elif time.monotonic() > conn.waits_since + seconds:
                conn.pgconn.finish()
                raise NoAnswer(seconds)
            ready = yield waits_for
    except StopIteration as end:
        return end.value
    finally:
        conn.waits_since = NEVER


@contextlib.contextmanager
def lack_of_files() -> Iterator[None]:
    """Treat it as an outage if the process, or the machine, has too many open: it may pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise psycopg.OperationalError(str(error)) from error


def cut(conn: Any) -> None:
    """Break the connection of a handler, if it has one, from another thread.

    Whatever the handler does with it raises. The server ends its transaction, but not before the
    statement that it is executing has ended, unless it has a client_connection_check_interval.
    """
    with contextlib.suppress(psycopg.Error, OSError):  # it is closed
        if conn is not None:
            session = conn.pgconn
            # The descriptor may be another's by now, unless the session is still its own.
            with socket.fromfd(session.socket, -1, -1) as copy:
                if conn.pgconn is session:
                    copy.shutdown(socket.SHUT_RDWR)


class Server:
    """A database: where it is, and how many seconds a call to it may take."""

    lease = 30.0  # the shortest yet

    def __init__(
        self, dsn: str, is_alone: bool = True, call_timeout: float | None = None
    ) -> None:
        self.dsn = database.pinned(dsn)
        self.is_alone = is_alone  # the worker has no other
        self.name = database.name(dsn)
        self.where = "" if is_alone else f" in {self.name}"  # for the log
        self.outages = Outages("" if is_alone else f" {self.name}")
        self._call_timeout = call_timeout
        self._said: dict[str, object] = {}  # of the SQL's version

    def connect(self, times: float = 1.0, make: Any = Watched) -> Any:
        """Connect, in the time that a call may take, but at least two seconds, libpq's minimum."""
        given = timeout_from_conninfo(conninfo_to_dict(self.dsn))
        timeout = math.ceil(min(given, self.patience(times)))
        return make.connect(self.dsn, connect_timeout=timeout, autocommit=True)

    def patience(self, times: float = 1.0) -> float:
        """Return how many seconds a call may go without an answer: a second at least."""
        useful = self._call_timeout or max(self.lease, SHORTEST)
        return max(1.0, useful * times)

    def greet(self, conn: Watched) -> None:
        """Say once what to do if the SQL is older than this package; raise TooOld."""
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            for (installed,) in conn.execute(VERSION):
                what, first = advice(installed), object()
                # Threads connect at the same time.
                if what and self._said.setdefault(what, first) is first:
                    log.warning("update pgqueue: %s", what)
