"""A deadline for each call to the server: one that hangs without breaking is broken.

Keepalives only prove that the other end's kernel answers, not that the server does: a proxy
may have forgotten the connection, and a backend may stand still.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, timeout_from_conninfo
from psycopg.rows import TupleRow

from pgqueue import database

NEVER = float("inf")


class Watched(psycopg.Connection[TupleRow]):
    """Knows since when it waits for the server."""

    waits_since = NEVER
    gave_up_after = 0.0

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the server; all calls of psycopg come by here."""
        self.waits_since = time.monotonic()
        try:
            return super().wait(*args, **kwargs)
        except psycopg.OperationalError as error:
            if not self.gave_up_after:
                raise
            text = f"no answer in {self.gave_up_after:g} s: connection given up"
            raise psycopg.OperationalError(text) from error
        finally:
            self.waits_since = NEVER


class Deadline:
    """Makes connections, and gives up those that wait longer than a call may take.

    That is so many times what `patience()` says in seconds, a second at least. Connecting may
    take no longer either, but two seconds at least, as libpq has it.
    """

    def __init__(
        self, dsn: str, patience: Callable[[], float], times: float = 1.0
    ) -> None:
        self.dsn = dsn
        self._patience = patience
        self._times = times
        self._sockets: dict[Any, socket.socket] = {}  # by what has a `waits_since`
        self._lock = threading.Lock()

    @contextmanager
    def connect(self) -> Iterator[database.Connection]:
        conn = Watched.connect(
            self.dsn,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=self.connect_timeout(),
        )
        self.watch(conn, conn.pgconn)
        try:
            database.set_up(conn)
            yield conn
        finally:
            conn.close()
            self.forget(conn)

    def watch(self, owner: Any, session: pq.abc.PGconn) -> None:
        """Give up a session when `owner.waits_since` is too long ago."""
        # Of its own: the number of libpq's may belong to another file by then.
        way = socket.socket(fileno=os.dup(session.socket))
        with self._lock:
            self._sockets[owner] = way

    def forget(self, owner: Any) -> None:
        with self._lock:
            if way := self._sockets.pop(owner, None):
                way.close()

    def check(self) -> bool:
        """Give up what is overdue, and return whether nothing was; from another thread."""
        seconds = self._seconds()
        late = time.monotonic() - seconds
        with self._lock:
            overdue = [x for x in self._sockets.items() if x[0].waits_since < late]
            for owner, way in overdue:
                self.give_up(owner, seconds)
                with suppress(OSError):  # it has just broken
                    way.shutdown(socket.SHUT_RDWR)
        return not overdue

    def give_up(self, owner: Any, after: float) -> None:
        """Note that its call fails after so many seconds."""
        owner.gave_up_after = after

    def _seconds(self) -> float:
        return max(1.0, self._patience() * self._times)

    def connect_timeout(self) -> int:
        given = timeout_from_conninfo(conninfo_to_dict(self.dsn))
        return min(given, math.ceil(self._seconds()))
