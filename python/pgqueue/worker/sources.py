"""The databases of a worker: most have one."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import psycopg

from pgqueue.attempt import Attempt
from pgqueue.worker.dispatcher import Dispatcher
from pgqueue.worker.executor import Executor
from pgqueue.worker.maintenance import Maintenance
from pgqueue.worker.prefetch import Prefetch
from pgqueue.worker.service import Service
from pgqueue.worker.source import Source
from pgqueue.worker.terms import Terms
from pgqueue.worker.turns import Turns


class Sources:
    """Has a dispatcher and the other services for each, and tells them what concerns all."""

    def __init__(
        self,
        dsns: Sequence[str],
        terms: Terms,
        prefetch: Prefetch,
        executor: Executor,
        on_commit: Callable[[list[Attempt], set[str]], None],
    ) -> None:
        turns = Turns(terms, prefetch, executor)
        self.has_limits = turns.has_limits
        self._all: list[Source] = []
        self.dispatchers: list[Dispatcher] = []
        self.services: list[Service] = []
        for dsn in dsns:
            is_alone, is_first = len(dsns) == 1, not self._all
            source = Source(dsn, terms, prefetch, executor, on_commit, is_alone)
            dispatcher = Dispatcher(source, terms, turns)
            # Schedules are declared in the first: in each, all would run as often.
            maintenance = Maintenance(source.server, terms.app, is_first)
            self._all.append(source)
            self.dispatchers.append(dispatcher)
            self.services += [source.finisher, source.heartbeat]
            self.services += [maintenance, dispatcher]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._all)

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
        return all(d.is_drained or d.refusal for d in self.dispatchers)

    @property
    def states(self) -> list[str]:
        """What there is to say of each, if there are several."""
        lines = [f"{source.name}: {source.outages.state()}" for source in self._all]
        return lines if len(lines) > 1 else []

    @property
    def statuses(self) -> Counter[str]:
        """How many attempts ended in which way."""
        total: Counter[str] = Counter()
        for source in self._all:
            total += source.finisher.statuses
        return total

    def refusals(self) -> list[psycopg.Error]:
        """List the errors of those on which waiting may have no effect."""
        return [d.refusal for d in self.dispatchers if d.refusal]

    def slot_freed(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.slot_freed()

    def look_again(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.look_again()

    def pause(self) -> bool:
        """Have no more jobs claimed; return whether that is new."""
        is_new = not self.dispatchers[0].is_paused
        for dispatcher in self.dispatchers:
            dispatcher.is_paused = True
        return is_new

    def tidy(self, is_last: bool = False) -> None:
        """Say how many quick jobs there were, and close sessions that idle."""
        for source in self._all:
            source.finisher.count_quick(is_last)
            if is_last:
                source.connections.close_idle(after=0)
            else:
                source.connections.close_idle()

    def end_claims(self, until: float) -> None:
        """End the dispatchers, but wait no longer than until a monotonic moment."""
        self.pause()
        for dispatcher in self.dispatchers:
            dispatcher.close()
        for dispatcher in self.dispatchers:
            dispatcher.join(until)
