"""A thread of the worker with a connection of its own, which outlives the server."""

import contextlib
import logging
import random
import threading
import time
from abc import ABC, abstractmethod

import psycopg

from pgqueue import database

log = logging.getLogger("pgqueue")

MAINTAIN = 60.0  # seconds, more or less, between two calls


class Service(ABC):
    """Works with one connection after another until told to end, or failed for good."""

    name: str

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.over = threading.Event()  # it is to end
        self.error: BaseException | None = None  # what no waiting mends
        self.has_connected = False
        self._failures = 0
        self.thread = threading.Thread(
            target=self._run, name=f"pgqueue-{self.name}", daemon=True
        )

    @abstractmethod
    def work(self, conn: database.Connection) -> None:
        """Do its work until it is over; raises psycopg.Error when the connection breaks."""

    def wake(self) -> None:  # noqa: B027, for not all of them sleep
        """Make `work` look whether it is over."""

    def ended(self) -> None:  # noqa: B027, for not all of them have something to close
        """Clean up; the last thing its thread does."""

    def pause(self) -> float:
        """Say for how many seconds it needs no connection."""
        return 0.0

    def close(self) -> None:
        """Tell it to end."""
        self.over.set()
        self.wake()

    def join(self, until: float) -> None:
        """Wait for its end until a moment of the monotonic clock."""
        if self.thread.ident:  # it began
            self.thread.join(max(0.0, until - time.monotonic()))

    def check(self) -> None:
        """Raise what ended it, if it ought to be alive."""
        if isinstance(self.error, psycopg.Error):
            raise self.error
        if self.error is not None or not self.thread.is_alive():
            raise RuntimeError(f"the {self.name} has ended") from self.error

    def succeeded(self) -> None:
        """Note that the server answers: the next outage begins with short waits."""
        self._failures = 0

    def _run(self) -> None:
        try:
            while not self.over.wait(self.pause()):
                self._connect_and_work()
        except BaseException as error:
            self.error = error
        finally:
            self.ended()

    def _connect_and_work(self) -> None:
        try:
            with contextlib.closing(database.connect(self.dsn)) as conn:
                self.has_connected = True
                self.work(conn)
                self.succeeded()
        except psycopg.Error as error:
            if not database.is_outage(error):
                raise
            self._failures += 1
            log.warning("%s: no server: %s", self.name, str(error).strip())
            self.over.wait(database.backoff(self._failures))


class Maintenance(Service):
    """Calls pgqueue.maintain(), which may take a while, apart from all else.

    It connects each time: a session for a second of work a minute would be a waste.
    """

    name = "maintenance"

    def pause(self) -> float:
        return MAINTAIN * random.uniform(0.5, 1.5)

    def work(self, conn: database.Connection) -> None:
        with database.transaction(conn):
            rows = conn.execute("select task, done from pgqueue.maintain()").fetchall()
        log.debug("maintained: %s", ", ".join(f"{task} {n}" for task, n in rows if n))
