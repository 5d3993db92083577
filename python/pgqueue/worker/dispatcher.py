"""Claims jobs for the free slots; when none is due, sleeps until one is, or a NOTIFY."""

import contextlib
import math
import random
import selectors
import socket
import time
from datetime import timedelta

import psycopg

from pgqueue import database
from pgqueue.attempt import NO_TASK, Attempt, Outcome
from pgqueue.database import Connection
from pgqueue.worker import protocol
from pgqueue.worker.connections import Connections
from pgqueue.worker.deadline import Server
from pgqueue.worker.finisher import Finisher
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.seldom import SELDOM, log
from pgqueue.worker.service import Service
from pgqueue.worker.turns import GATHER, HANG, Turns

SAY_AGAIN = 240.0  # seconds; behind a pooler it is believed for ten minutes
HANDOVER = 0.0002  # seconds for handlers' threads to start
# Windows has no poll(), and its select() takes any socket.
Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
Queues = dict[str, int | None]  # and how many of each may be claimed
Kinds = list[str] | None  # None is all
UNKNOWN_KIND = Outcome("release", "no handler for its kind", timedelta(minutes=1))


class Dispatcher(Service):
    """Claims as many jobs as `turns` says, and hands them to the executor."""

    name = "dispatcher"

    def __init__(
        self, server: Server, turns: Turns, finisher: Finisher, heartbeat: Heartbeat
    ) -> None:
        super().__init__(server)
        self.connections = Connections(server)
        self.held = heartbeat.held
        self.asked, self.served_at = 0, 0.0
        self._turns, self._terms, self._executor = turns, turns.terms, turns.executor
        self._finisher = finisher
        self._heartbeat = heartbeat
        turns.members.append(self)
        self._has_news = True  # there may be something to claim
        self._quiet_until = 0.0
        self._is_due = False  # something may be, by then
        self._looked: set[str] = set()  # in these queues for all kinds, the last time
        self._lacks_slots = False
        self._again = False  # after_failover() before each claim
        self._longest_lease = 0.0  # yet
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or closed
            self._waker.send(b".")

    def look_again(self) -> None:
        """Note that there may be something to claim; from any thread."""
        self._has_news = True
        self.wake()

    def slot_freed(self) -> None:
        """Claim for a free slot, if there was none; from any thread."""
        if self._lacks_slots:
            self._lacks_slots = False
            self.wake()

    def is_hungry(self) -> bool:
        """Whether something may be due; from any thread."""
        is_cut_off = self._finisher.is_cut_off or self._heartbeat.is_cut_off
        return not (is_cut_off or self._is_settled())

    @property
    def is_drained(self) -> bool:
        """Whether nothing was due when the last job had ended; from any thread."""
        is_free = self._looked == self._terms.shares.keys() and not self.held
        # In this order: news of what a job has enqueued comes before its end.
        return is_free and self._is_settled()

    def may_wait(self, error: psycopg.Error) -> bool:
        # What is refused at the start is a mistake, and later perhaps a restore.
        is_wrong = self._terms.burst or database.is_refused(error)
        return self.is_ready or not is_wrong

    def work(self, conn: Connection) -> None:
        for service in self._finisher, self._heartbeat:
            service.retry()  # the server answers again
        self._again = protocol.after_failover(conn)
        parks = self._start_listening(conn)
        self._has_news, self._looked, say_at = True, set(), 0.0
        while not self.over.is_set():
            if time.monotonic() >= say_at:  # what it serves: a busy worker never rests
                say_at = math.inf if parks else time.monotonic() + SAY_AGAIN
                protocol.rest(conn, list(self._terms.shares), self._terms.kinds, parks)
            self._lacks_slots = True  # before counting them, or one freed now is missed
            kinds, want = self._kinds(), 0
            are_all = kinds == self._terms.kinds
            # With no session left for the others, jobs would end unreported, and run again.
            is_cut_off = self._finisher.is_cut_off or self._heartbeat.is_cut_off
            self.asked = 0
            if kinds != [] and not self._turns.is_paused and not is_cut_off:
                queues, want = self._turns.take(self)
                # The claim of another database may have closed one, or a blocked loop left out kinds.
                is_new = are_all and queues.keys() - self._looked
                if want > 0 and is_new and not self._has_news:
                    self._has_news = True
                    continue
            self._lacks_slots = want <= 0
            if want > 0 and self.asked:
                # When merely polling, only rest() looks: one scan of the queue is enough.
                may_claim = self._has_news or self._is_due
                if may_claim and self._claim(conn, queues, kinds, want):
                    continue
                self._rest(protocol.rest(conn, list(queues), kinds, parks))
                self._turns.settle(self)
                self._looked = set(queues) if are_all else set()
            self._sleep(conn, want)

    def run(self) -> None:
        with self._woken, self._waker:
            super().run()

    def _kinds(self) -> Kinds:
        """Leave out those of async handlers if a blocked loop cannot run them."""
        tasks = self._terms.app.tasks
        if self._executor.loop.is_blocked:
            return [kind for kind, task in list(tasks.items()) if not task.is_async]
        return self._terms.kinds

    def _claim(self, conn: Connection, queues: Queues, kinds: Kinds, want: int) -> bool:
        """Claim and begin, and return whether there may be more."""
        terms, now = self._terms, time.monotonic()
        weights = [terms.shares[name].weight for name in queues]
        how = terms.lease, kinds, weights, list(queues.values()), self._again
        self._quiet_until, self._has_news = 0.0, False
        attempts = protocol.claim(conn, terms.id, list(queues), want, *how)
        if attempts:
            self.succeeded()
            self._heartbeat.hold(attempts, now)
            if (longest := max(a.lease for a in attempts)) > self._longest_lease:
                self._longest_lease = longest
                terms.on_lease(longest)
            self._begin(conn, attempts)
            if not self._turns.is_quick:
                # A thread can start only when this one releases the interpreter.
                time.sleep(HANDOVER)
        if is_full := len(attempts) == want:
            self._has_news = True
        return is_full

    def _begin(self, conn: Connection, attempts: list[Attempt]) -> None:
        """Run what was claimed; not if it is paused."""
        self._turns.claimed(len(attempts))
        attempts, too_much = self._turns.sort(attempts)
        if too_much:
            self._give_back_at_once(conn, too_much)
        sizes = [len(a.payload) + len(a.headers or "") for a in attempts if a.payload]
        self._turns.weigh(sizes)
        if attempts and self._finisher.conn is None:
            self._finisher.wake()  # it will be needed
        for attempt in attempts:
            attempt.source = self._server
            # Claimed during a pause, or too much at once: leave it to other workers.
            if self._turns.is_paused or not attempt.payload:
                self._turns.claimed(-1)
                self._finisher.put(attempt)
            elif task := self._terms.app.find(attempt.kind):
                attempt.prepare(task, self._terms.timeout)
                attempt.connect = self.connections.connection
                attempt.ask = self.connections.ask
            else:  # leave it to other workers, but not at once
                attempt.outcome = UNKNOWN_KIND
                self._finisher.put(attempt)
                again = {"seldom": attempt.kind}
                log.warning(
                    "no handler for the kind of %s: put off", attempt, extra=again
                )
        self._executor.submit(a for a in attempts if a.task is not NO_TASK)

    def _give_back_at_once(self, conn: Connection, attempts: list[Attempt]) -> None:
        """Release them before anything runs: if the worker were killed, last attempts would be dead."""
        self._turns.claimed(-len(attempts))
        try:
            protocol.finish(conn, attempts)
        except psycopg.Error:  # the finisher tries again, and says what is wrong
            for attempt in attempts:
                self._finisher.put(attempt)
        else:
            self._heartbeat.held.difference_update(attempts)

    def _is_settled(self) -> bool:
        """Whether nothing was due at the last look, and there has been no news since."""
        return not self._has_news and time.monotonic() < self._quiet_until

    def _rest(self, seconds: float | None) -> None:
        """Claim nothing for this long, or until the next poll."""
        pause = self._terms.poll_interval * random.uniform(0.8, 1.2)
        self._is_due = seconds is not None and seconds <= pause
        pause = pause if seconds is None else min(pause, seconds)
        self._quiet_until = time.monotonic() + pause

    def _sleep(self, conn: Connection, want: int) -> None:
        """Sleep until there is news or something to do, at most a second."""
        self.succeeded()  # also if it has just connected, and wants nothing
        if self._turns.is_quick:
            time.sleep(GATHER)
        waits = self._lacks_slots or self._looked != self._terms.shares.keys()
        timeout = HANG if waits and not self._server.is_alone else 1.0
        if want > 0:
            timeout = min(timeout, self._quiet_until - time.monotonic())
        if timeout > 0 and not (self._has_news and want > 0) and not self.over.is_set():
            with Selector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(conn.fileno(), selectors.EVENT_READ)
                ready = {key.fd for key, _ in selector.select(timeout)}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if conn.fileno() in ready:
                conn.pgconn.consume_input()
                while notify := conn.pgconn.notifies():
                    self._hear(notify.extra)

    def _start_listening(self, conn: Connection) -> bool:
        """Listen, and return whether notifications arrive."""
        if self._terms.listen and conn.prepare_threshold is None:
            log.warning(
                "NOTIFY does not arrive through a pooler: polling every %s s",
                self._terms.poll_interval,
                extra=SELDOM,
            )
        elif self._terms.listen:
            conn.add_notify_handler(lambda notify: self._hear(notify.payload.encode()))
            conn.execute("listen pgqueue")
            return True
        return False

    def _hear(self, news: bytes) -> None:
        if news == b"cancel":
            self._heartbeat.look_for_cancelled()
        elif news != b"end":  # which is for those who wait for a job to end
            self._has_news = True
