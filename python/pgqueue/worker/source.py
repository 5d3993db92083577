"""A database that a worker takes jobs from, and the parts of the worker that talk to it."""

from pgqueue.worker.connections import Connections
from pgqueue.worker.deadline import Server
from pgqueue.worker.finisher import Finisher, OnCommit
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.turns import Turns


class Source(Server):
    """Has what its dispatcher and the attempts from it need."""

    def __init__(
        self, dsn: str, turns: Turns, on_commit: OnCommit, is_alone: bool
    ) -> None:
        super().__init__(dsn, is_alone, turns.terms.call_timeout)
        self.connections = Connections(self)
        self.heartbeat = Heartbeat(self, turns.executor.cancel)
        self.finisher = Finisher(self, turns.prefetch, on_commit)
