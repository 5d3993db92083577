"""A thread of the worker, with a connection that it makes when it is needed, and again after each outage."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg

from pgqueue import database
from pgqueue.database import Connection
from pgqueue.drivers import run_without_loop
from pgqueue.worker.deadline import Server, Watched, lack_of_files

KEEP = 60.0  # seconds for which a session that is not used is kept


class Service(ABC):
    """Runs `work` until it is closed, or fails with what no reconnect can fix."""

    name: str
    times = 1.0  # how long its calls may take, compared with others

    def __init__(self, server: Server) -> None:
        self._server = server
        self.over = threading.Event()  # it has to end
        self.error: BaseException | None = None  # what ended it
        self.is_ready = False  # the server has answered it
        self.refusal: psycopg.Error | None = None  # what waiting may not fix
        self.conn: Watched | None = None
        self._failures = 0
        self._retried = threading.Event()
        name = f"pgqueue-{self.name}"
        self.thread = threading.Thread(target=self.run, name=name, daemon=True)

    @abstractmethod
    def work(self, conn: Connection) -> None:
        """Do its work until `over`; raises psycopg.Error when the connection breaks."""

    def wake(self) -> None:  # noqa: B027, not all of them sleep
        """Interrupt the sleep of `work`, which then looks at `over`."""

    def is_needed(self) -> bool:
        """Wait until it needs a connection or has to end; return whether it needs one."""
        return True

    def may_wait(self, error: psycopg.Error) -> bool:
        """Whether to wait for the end of an outage."""
        return True

    def pause(self, seconds: float) -> None:
        """Wait for the end of an outage, at most so long, before it connects again."""
        self._retried.wait(seconds)
        self._retried.clear()

    def retry(self) -> None:
        """Connect again now, if it waits for the end of an outage; from any thread."""
        self._retried.set()

    def goes_on(self) -> bool:
        """Whether there is something to do, or may be later."""
        return not self.over.is_set()

    @contextmanager
    def connect(self) -> Iterator[Watched]:
        with closing(self._server.connect(self.times)) as conn:
            conn.patience = self.patience
            run_without_loop(database.set_up(conn))
            self._server.greet(conn)
            yield conn

    def patience(self) -> float:
        return self._server.patience(self.times)

    def is_late(self) -> bool:
        """Whether a call takes longer than it may; from any thread."""
        conn, late = self.conn, time.monotonic() - self.patience()
        return conn is not None and conn.waits_since < late

    @property
    def is_cut_off(self) -> bool:
        """Whether it waits for the end of an outage; from any thread."""
        return self._failures > 0

    def answers(self, seconds: float) -> bool:
        """Whether it is connected, and no call has taken this long yet; from any thread."""
        conn, late = self.conn, time.monotonic() - seconds
        return conn is not None and conn.waits_since > late

    def close(self) -> None:
        """Make it end, without waiting for that."""
        self.over.set()
        self._retried.set()
        self.wake()

    def join(self, until: float) -> None:
        """Wait for its end, but not past a moment of the monotonic clock."""
        if self.thread.ident:  # it was started
            self.thread.join(max(0.0, until - time.monotonic()))

    def check(self) -> None:
        """Raise what ended it, if it has ended."""
        if isinstance(self.error, psycopg.Error):
            raise self.error
        if self.error is not None or not self.thread.is_alive():
            raise RuntimeError(f"the {self.name} has ended") from self.error

    def succeeded(self) -> None:
        """Note that the server answers: the next outage starts with short waits."""
        self.is_ready, self.refusal = True, None
        if self._failures:
            self._failures = 0
            self._server.outages.is_over(self.name)

    def run(self) -> None:
        try:
            while self.goes_on():
                if self._failures or self.is_needed():
                    self._connect_and_work()
        except BaseException as error:
            self.error = error

    def _connect_and_work(self) -> None:
        try:
            with lack_of_files(), self.connect() as self.conn:
                try:
                    self.work(self.conn)
                finally:
                    self.conn = None
                self.succeeded()
        except psycopg.Error as error:
            # An upgrade may explain it: only once, and not before anything worked.
            is_first = self.is_ready and not self._failures
            is_replaced = is_first and isinstance(error, database.REPLACED)
            is_passing = is_replaced or database.is_outage(error)
            if not is_passing or not self.may_wait(error):
                if self._server.is_alone:
                    raise
                self.refusal = error  # the worker goes on with its other databases
            self._failures += 1
            self._server.outages.failed(self.name, error)
            self.pause(database.backoff(self._failures))
