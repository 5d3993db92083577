"""A database that a worker takes jobs from, and the parts of the worker that talk to it."""

from collections.abc import Callable

from pgqueue import database
from pgqueue.attempt import Attempt
from pgqueue.worker.connections import Connections
from pgqueue.worker.deadline import Server
from pgqueue.worker.finisher import Finisher
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.seldom import Outages
from pgqueue.worker.turns import Turns

SHORTEST = 3.0  # seconds that a call may take, however short the lease


class Source:
    """Has what its dispatcher and the attempts from it need; `where` is for the log."""

    def __init__(
        self,
        dsn: str,
        turns: Turns,
        on_commit: Callable[[list[Attempt], set[str]], None],
        is_alone: bool,
    ) -> None:
        self.name = database.name(dsn)
        self.where = "" if is_alone else f" in {self.name}"
        self.outages = Outages("" if is_alone else f" {self.name}")
        self.server = Server(dsn, self._patience, self.outages, is_alone)
        self.connections = Connections(self.server)
        self.heartbeat = Heartbeat(self.server, turns.executor.cancel)
        self.finisher = Finisher(self.server, turns.prefetch, on_commit)
        self._given = turns.terms.call_timeout

    def _patience(self) -> float:
        """Return for how long a call to the server is of use."""
        return self._given or max(self.heartbeat.lease, SHORTEST)
