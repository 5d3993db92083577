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
from psycopg.conninfo import conninfo_to_dict, timeout_from_conninfo
from psycopg.rows import TupleRow

from pgqueue import database

NEVER = float("inf")


class Watched(psycopg.Connection[TupleRow]):
    """Knows since when it waits for the server; another thread may give it up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits_since = NEVER
        self._gave_up_after = 0.0
        # Of its own: the number of libpq's may belong to another file by then.
        self._socket = socket.socket(fileno=os.dup(self.pgconn.socket))
        self._lock = threading.Lock()

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the server; all calls of psycopg come by here."""
        self.waits_since = time.monotonic()
        try:
            return super().wait(*args, **kwargs)
        except psycopg.OperationalError as error:
            if not self._gave_up_after:
                raise
            text = f"no answer in {self._gave_up_after:g} s: connection given up"
            raise psycopg.OperationalError(text) from error
        finally:
            self.waits_since = NEVER

    def give_up(self, after: float) -> None:
        """Fail the call that waits, which waited for so many seconds; from any thread."""
        with self._lock, suppress(OSError):  # it is closed, or has just broken
            self._gave_up_after = after
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._socket.close()


class Deadline:
    """Makes connections, and gives up those that wait longer than a call may take.

    That is so many times what `patience()` says in seconds, a second at least. Connecting may
    take no longer either, but two seconds at least, as libpq has it.
    """

    def __init__(
        self, dsn: str, patience: Callable[[], float], times: float = 1.0
    ) -> None:
        self._dsn = dsn
        self._patience = patience
        self._times = times
        self._open: set[Watched] = set()

    @contextmanager
    def connect(self) -> Iterator[database.Connection]:
        given = timeout_from_conninfo(conninfo_to_dict(self._dsn))
        conn = Watched.connect(
            self._dsn,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=min(given, math.ceil(self._seconds())),
        )
        self._open.add(conn)
        try:
            database.set_up(conn)
            yield conn
        finally:
            conn.close()
            self._open.discard(conn)

    def _seconds(self) -> float:
        return max(1.0, self._patience() * self._times)

    def check(self) -> bool:
        """Give up what is overdue, and return whether nothing was."""
        now, seconds = time.monotonic(), self._seconds()
        late = [conn for conn in list(self._open) if now > conn.waits_since + seconds]
        for conn in late:
            conn.give_up(seconds)
        return not late
