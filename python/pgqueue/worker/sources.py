"""The databases of a worker: most have one."""

from collections import Counter
from collections.abc import Sequence

import psycopg

from pgqueue.worker.connections import KEEP
from pgqueue.worker.dispatcher import Dispatcher
from pgqueue.worker.finisher import OnCommit
from pgqueue.worker.maintenance import Maintenance
from pgqueue.worker.service import Service
from pgqueue.worker.source import Source
from pgqueue.worker.turns import Turns


class Sources:
    """Has a dispatcher and the other services for each, and tells them what concerns all."""

    def __init__(self, dsns: Sequence[str], turns: Turns, on_commit: OnCommit) -> None:
        self._all = [Source(dsn, turns, on_commit, len(dsns) == 1) for dsn in dsns]
        self.dispatchers = [Dispatcher(source, turns) for source in self._all]
        self.services: list[Service] = []
        self._maintenance: list[Maintenance] = []
        for source, dispatcher in zip(self._all, self.dispatchers, strict=True):
            # Schedules are declared in the first: in each, all would run as often.
            is_first = source is self._all[0]
            maintenance = Maintenance(source, turns.terms.app, is_first)
            self._maintenance.append(maintenance)
            parts = source.finisher, source.heartbeat, maintenance, dispatcher
            self.services += parts

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
        has_declared = all(m.has_declared for m in self._maintenance)
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

    def slot_freed(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.slot_freed()

    def look_again(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.look_again()

    @property
    def is_paused(self) -> bool:
        """Whether no more jobs are claimed."""
        return self.dispatchers[0].is_paused

    def pause(self) -> bool:
        """Have no more jobs claimed; return whether that is new."""
        is_new = not self.is_paused
        for dispatcher in self.dispatchers:
            dispatcher.is_paused = True
        return is_new

    def tidy(self, is_last: bool = False) -> None:
        """Say how many quick jobs there were, and close sessions that idle."""
        for source in self._all:
            source.finisher.count_quick(is_last)
            source.connections.close_idle(after=0 if is_last else KEEP)

    def end_claims(self, until: float) -> None:
        """End the dispatchers, but wait no longer than until a monotonic moment."""
        self.pause()
        for dispatcher in self.dispatchers:
            dispatcher.close()
        for dispatcher in self.dispatchers:
            dispatcher.join(until)
