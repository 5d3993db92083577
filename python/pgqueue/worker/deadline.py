"""A deadline for each call to the server: one that hangs without breaking is broken.

Keepalives only prove that the other end's kernel answers, not that the server does: a proxy
may have forgotten the connection, and a backend may stand still.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, timeout_from_conninfo
from psycopg.rows import TupleRow

from pgqueue import database

NEVER = float("inf")


class NoAnswer(psycopg.OperationalError):
    """The server did not answer in so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer in {seconds:g} s: connection given up")
        self.seconds = seconds


class Watched(psycopg.Connection[TupleRow]):
    """Gives up a call that takes longer than `patience` says."""

    patience: Callable[[], float] = staticmethod(lambda: NEVER)
    waits_since = NEVER

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for the server; all calls of psycopg come by here."""
        self.waits_since = time.monotonic()
        try:
            return super().wait(in_time(self, gen), *args, **kwargs)
        finally:
            self.waits_since = NEVER


class WatchedAsync(psycopg.AsyncConnection[TupleRow]):
    """The same for an async handler."""

    patience: Callable[[], float] = staticmethod(lambda: NEVER)

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        return await super().wait(in_time(self, gen), *args, **kwargs)


def in_time(conn: Watched | WatchedAsync, call: Any) -> Generator[Any, Any, Any]:
    """Pass on what a call of psycopg waits for; raise NoAnswer when time is up.

    psycopg comes back ten times a second, even if nothing has arrived.
    """
    seconds = conn.patience()
    until, ready = time.monotonic() + seconds, None
    try:
        while True:
            waits_for = call.send(ready)
            if time.monotonic() > until:
                conn.pgconn.finish()
                raise NoAnswer(seconds)
            ready = yield waits_for
    except StopIteration as end:
        return end.value


class Deadline:
    """Makes connections that give up what takes longer than a call may.

    That is so many times what `patience()` says in seconds, a second at least. Connecting may
    take no longer either, but two seconds at least, as libpq has it.
    """

    def __init__(
        self, dsn: str, patience: Callable[[], float], times: float = 1.0
    ) -> None:
        self.dsn = dsn
        self._patience = patience
        self._times = times
        self._open: set[Watched] = set()

    @contextmanager
    def connect(self) -> Iterator[database.Connection]:
        conn = Watched.connect(
            self.dsn,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=self.connect_timeout(),
        )
        conn.patience = self.seconds
        self._open.add(conn)
        try:
            database.set_up(conn)
            yield conn
        finally:
            conn.close()
            self._open.discard(conn)

    def check(self) -> bool:
        """Say whether no call is overdue; from another thread."""
        late = time.monotonic() - self.seconds()
        return all(conn.waits_since >= late for conn in list(self._open))

    def seconds(self) -> float:
        return max(1.0, self._patience() * self._times)

    def connect_timeout(self) -> int:
        given = timeout_from_conninfo(conninfo_to_dict(self.dsn))
        return min(given, math.ceil(self.seconds()))
