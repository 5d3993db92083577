"""The databases of a worker: most have one."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg

from pgqueue.worker.deadline import Server
from pgqueue.worker.dispatcher import Dispatcher
from pgqueue.worker.finisher import Finisher, OnCommit
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.maintenance import Maintenance
from pgqueue.worker.service import KEEP, Service
from pgqueue.worker.turns import Turns


class Source(Server):
    """A database that a worker takes jobs from, and the parts of the worker that talk to it."""

    def __init__(
        self,
        dsn: str,
        dsns: Sequence[str],
        known: dict[int, Any],
        turns: Turns,
        on_commit: OnCommit,
    ) -> None:
        super().__init__(dsn, len(dsns) == 1, turns.terms.call_timeout)
        self.finisher = Finisher(self, turns, on_commit)
        self.heartbeat = Heartbeat(self, turns.executor.cancel)
        where = dsns.index(dsn), len(dsns), known
        self.maintenance = Maintenance(self, turns.terms.app, *where)
        self.dispatcher = Dispatcher(self, turns, self.finisher, self.heartbeat)


class Sources:
    """Tells the parts for each database what concerns all."""

    def __init__(self, dsns: Sequence[str], turns: Turns, on_commit: OnCommit) -> None:
        known: dict[int, Any] = {}  # to their maintenance
        self._all = [Source(dsn, dsns, known, turns, on_commit) for dsn in dsns]
        self.dispatchers = [source.dispatcher for source in self._all]
        self.services: list[Service] = []
        for s in self._all:
            self.services += s.finisher, s.heartbeat, s.maintenance, s.dispatcher

    def __len__(self) -> int:
        return len(self._all)

    @property
    def held(self) -> int:
        """How many jobs the worker holds."""
        return sum(len(source.heartbeat.held) for source in self._all)

    @property
    def is_ready(self) -> bool:
        """Whether a server has answered."""
        return any(dispatcher.is_ready for dispatcher in self.dispatchers)

    @property
    def is_drained(self) -> bool:
        has_declared = all(source.maintenance.has_declared for source in self._all)
        return has_declared and all(d.is_drained or d.refusal for d in self.dispatchers)

    @property
    def states(self) -> list[str]:
        """What there is to say of each, if there are several."""
        lines = [f"{source.name}: {source.outages.state()}" for source in self._all]
        return lines if len(lines) > 1 else []

    @property
    def statuses(self) -> Counter[str]:
        """How many attempts ended in which way."""
        return sum((s.finisher.statuses for s in self._all), Counter())

    def refusals(self) -> list[psycopg.Error]:
        """List the errors of those on which waiting may have no effect."""
        return [d.refusal for d in self.dispatchers if d.refusal]

    def tidy(self, is_last: bool = False) -> None:
        """Say how many quick jobs there were, and close sessions that idle."""
        for source in self._all:
            source.finisher.count_quick(is_last)
            source.dispatcher.connections.close_idle(after=0 if is_last else KEEP)
