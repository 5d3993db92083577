"""A few sessions do whatever the public functions allow, in transactions that overlap.

Only public functions, views and tables are used. After each step, limits hold in what is committed
and no lease was given twice; at the end all sessions stop, and plain claims find everything that is
due. Which call does what when is drawn by Hypothesis; a failure prints all calls in their order.
The long form draws hundreds of examples, PGQUEUE_TEST_EXAMPLES=… so many, and
PGQUEUE_TEST_SHRINK=1 looks for a shorter one that fails, which may take minutes.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
import pytest
from conftest import LONG, Connect, column, lose_hints, one
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

SHRINK = bool(os.environ.get("PGQUEUE_TEST_SHRINK"))
EXAMPLES = int(os.environ.get("PGQUEUE_TEST_EXAMPLES", 150 if LONG else 8))
STEPS = 50
SESSIONS = 4
CROWD = 800  # groups that come at once
CHAIN = 500  # jobs that wait for each other
PATIENCE = 3  # seconds: thirty sweeps
COLUMNS = "id, token, claimed_at, queue, kind, group_key, run_at"
NUMBERS = itertools.count()
OPTIONS = "-c statement_timeout=3s -c deadlock_timeout=5ms"

WHO = st.integers(0, SESSIONS - 1)
PICK = st.integers(0, 1000)
PLACE = st.sampled_from([0, 0, 0, 1])  # of a queue
EVENT = st.integers(0, 1)  # the place of an event
GROUPS = st.sampled_from([None, "g", "g", "g", "h"])
KEYS = st.sampled_from([None, None, None, "k", "l"])
KINDS = st.sampled_from(["x", "x", "y"])
ASKED = st.sampled_from([None, None, None, ["x"], ["y"]])
PRIORITIES = st.sampled_from([0, 0, 0, 3, -1])
DELAYS = st.sampled_from([None, None, None, None, "10 ms", "1 hour"])
LEASES = st.sampled_from(["1 hour", "1 hour", "1 hour", "1 ms"])
SIZES = st.sampled_from([1, 1, 2, 10])
LIMITS = st.sampled_from([1, 1, 2, 3])
Scope = tuple[str, str | None, str | None]  # queue, kind, group
Claim = tuple[int, datetime]  # a job, and when it was claimed
Rows = list[tuple]
Done = Callable[[list[Rows]], None]


@dataclass
class Lease:
    """What a claim gave; a short one may be lost at any time."""

    id: int
    token: int
    claim: Claim
    queue: str
    kind: str
    group: str | None
    is_long: bool


@dataclass
class Call:
    """Statements that a session runs in the background, and what follows."""

    statements: list[tuple[str, tuple]]
    done: Done
    may: tuple[str, ...]
    never_waits: bool
    is_claim: bool
    future: Future | None = None
    waited: bool = False

    def __str__(self) -> str:
        return "; ".join(
            text
            % tuple(
                f"'{value}'" if isinstance(value, str) else value for value in values
            )
            for text, values in self.statements
        )


@dataclass
class Session:
    """A connection, and what its open transaction has done and others do not see."""

    name: int
    conn: psycopg.Connection
    call: Call | None = None
    is_open: bool = False
    effects: list[tuple] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)

    def run(self, call: Call) -> list[Rows]:
        answers = []
        for text, values in call.statements:
            cursor = self.conn.execute(text, values or None)
            answers.append(cursor.fetchall() if cursor.description else [])
        return answers


def show(row: tuple) -> Any:
    """The row without its times, as a value if it is one."""
    values = tuple(value for value in row if not isinstance(value, datetime))
    return values if len(values) > 1 else values[0]


class Machine(RuleBasedStateMachine):
    def __init__(self, connect: Connect, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.connect, self.pool = connect, pool
        number = next(NUMBERS)
        self.queues = [f"m{number} a", f"m{number} b"]
        self.side = f"m{number} side"  # whose jobs may be purged
        self.all = [*self.queues, self.side]
        self.events = [f"m{number} e", f"m{number} f"]
        self.watcher = connect()
        self.sessions = [Session(n, connect(options=OPTIONS)) for n in range(SESSIONS)]
        self.sleeper = connect(options=OPTIONS)
        self.sleeper.execute("listen pgqueue")
        self.awake_at: float | None = 0
        self.sleeper_kinds: list[str] | None = None
        self.queued: list[Session] = []
        self.together = 1
        self.steps: list[str] = []
        self.has_failed = False
        self.is_crowded = False
        # What is committed.
        self.known: dict[int, str] = {}
        self.leases: dict[int, Lease] = {}
        self.ended: list[Lease] = []
        self.completed: set[int] = set()
        self.batches: set[int] = set()
        self.settings: dict[Scope, dict[str, int]] = {}
        self.begun: Counter[Scope] = Counter()
        self.began: set[Claim] = set()  # since the last check
        # Claims that a change of a limit could not see.
        self.excused: set[Claim] = set()
        self.earlier: set[Claim] = set()  # were open when a limit was set
        self.excuses_all = False

    @initialize(
        limit=st.sampled_from([None, 1, 1, 2]),
        block=st.booleans(),
        crowd=st.sampled_from([False, False, False, True]),
        keep=st.booleans(),
        groups=st.lists(GROUPS, min_size=1, max_size=6),
        ends=st.lists(
            st.sampled_from(["commit", "rollback"]),
            min_size=SESSIONS,
            max_size=SESSIONS,
        ),
    )
    def begin_all(self, limit, block, crowd, keep, ends, groups) -> None:
        self.may_crowd, self.keeps_limits, self.ends = crowd, keep, ends
        if limit:
            self.configure(0, (self.queues[0], None, None), "group_limit", limit)
        if block:
            self.act(
                0,
                "select pgqueue.configure(%s, group_on_retry => 'block')",
                self.queues[0],
            )
        self.enqueue_some(0, 0, groups, "x", 0)

    # Calls

    def fault(self, what: str) -> None:
        self.has_failed = True
        raise AssertionError("\n".join([what, *self.steps, what]))

    def act(
        self,
        who: int,
        text: str,
        *values: Any,
        then: Iterable[tuple[str, tuple]] = (),
        done: Callable[[Session, list[Rows]], None] = lambda session, answers: None,
        may: tuple[str, ...] = (),
        never_waits: bool = False,
        is_claim: bool = False,
        on: Callable[[Session], bool] = lambda session: True,
    ) -> None:
        """Let a session that is not busy make a call; not yet, if others are to begin with it."""
        idle = [
            session
            for session in self.sessions[who:] + self.sessions[:who]
            if session.call is None and on(session)
        ]
        if idle:
            session = idle[0]
            session.call = Call(
                [(text, values), *then],
                lambda answers: done(session, answers),
                may,
                never_waits or is_claim,
                is_claim,
            )
            self.queued.append(session)
        if not idle or len(self.queued) >= self.together:
            self.flush()

    def flush(self) -> None:
        """Let what is queued begin."""
        if self.queued:
            began, self.queued = self.queued, []
            self.together = 1
            self.is_alone = len(began) == 1
            for session in began:
                assert session.call
                session.call.future = self.pool.submit(session.run, session.call)
            self.settle()
            if self.excuses_all:
                self.read_settings()

    def settle(self) -> None:
        """Go on until each call has ended or waits for a session that does nothing."""
        looks = 0
        while busy := [s for s in self.sessions if s.call and s.call.future]:
            wait([s.call.future for s in busy], timeout=0.002)
            ended = [s for s in busy if s.call.future.done()]
            running = [s for s in busy if s not in ended]
            waiting = (
                column(
                    self.watcher,
                    "select pid from unnest(%s::int[]) as pid where cardinality(pg_blocking_pids(pid)) > 0",
                    [s.conn.info.backend_pid for s in running],
                )
                if running
                else []
            )
            if len(waiting) < len(running):
                looks = 0
            elif ended:
                # Claims last: they may have found what the others left.
                order = sorted(ended, key=lambda s: (s.call.is_claim, s.call.waited))
                for session in order:
                    self.end_call(session)
                looks = 0
            elif looks < 3:
                # Perhaps it is a deadlock, which is found meanwhile.
                looks += 1
                time.sleep(0.003)
            else:
                for session in running:
                    self.note_wait(session)
                return

    def note_wait(self, session: Session) -> None:
        call = session.call
        if not call.waited:
            self.steps.append(f"{session.name}: {call} waits")
            call.waited = True
            if call.never_waits:
                self.fault(f"a call waited that never may: {call}")

    def end_call(self, session: Session) -> None:
        call, session.call = session.call, None
        # Nobody can have come before it.
        self.is_first = self.is_alone and not call.waited
        error = call.future.exception()
        if error is None:
            answers = call.future.result()
            shown = [show(row) for answer in answers for row in answer[:12]]
            self.steps.append(f"{session.name}: {call} -> {shown}")
            call.done(answers)
            if not session.is_open:
                self.commit_effects(session)
            return
        assert isinstance(error, psycopg.Error), repr(error)
        self.steps.append(
            f"{session.name}: {call} -> {error.sqlstate} {error.diag.message_primary}"
        )
        if session.conn.broken:
            return
        # Of sessions with one statement each, none may meet another's locks in another order.
        may_meet = error.sqlstate == "40P01" and (
            session.is_open or any(s.is_open for s in self.sessions)
        )
        may_wait = error.sqlstate == "57014" and call.waited
        may_lose = error.sqlstate == "PQ002" and not self.is_first
        if not (error.sqlstate in call.may or may_meet or may_wait or may_lose):
            self.fault(f"{call}: {error.sqlstate} {error.diag.message_primary}")
        if not session.is_open:
            session.effects.clear()
        elif session.savepoints:
            session.conn.execute(f"rollback to s{len(session.savepoints)}")
            del session.effects[session.savepoints[-1] :]
        else:
            session.conn.execute("rollback")
            self.close(session)
        self.steps.append(f"{session.name}: rollback")

    def close(self, session: Session) -> None:
        session.is_open = False
        session.effects.clear()
        session.savepoints.clear()

    def commit_effects(self, session: Session) -> None:
        effects = list(session.effects)
        own = {lease.claim for what, lease in effects if what == "lease"}
        self.close(session)
        for what, value in effects:
            getattr(self, f"commit_{what}")(value, own)

    # What is known, once it is committed

    def commit_job(self, value: tuple[int, str], own: set[Claim]) -> None:
        self.known.setdefault(*value)

    def commit_batch(self, id: int, own: set[Claim]) -> None:
        self.batches.add(id)

    def commit_lease(self, lease: Lease, own: set[Claim]) -> None:
        self.leases[lease.id] = lease
        if self.excuses_all:
            self.excused.add(lease.claim)
        if lease.claim not in self.excused:
            if lease.claim not in self.earlier:
                self.began.add(lease.claim)
            for scope in self.scopes(lease.queue, lease.kind, lease.group):
                if "rate_limit" in self.settings.get(scope, {}):
                    self.begun[scope] += 1
                    if self.begun[scope] > self.settings[scope]["rate_limit"]:
                        self.fault(f"{self.begun[scope]} of {scope} have begun")

    def commit_end(self, value: tuple[Lease, str], own: set[Claim]) -> None:
        lease, how = value
        if self.leases.get(lease.id) == lease:
            del self.leases[lease.id]
        self.ended.append(lease)
        if how == "completed":
            if lease.id in self.completed:
                self.fault(f"{lease.id} was completed twice")
            self.completed.add(lease.id)

    def commit_set(self, value: tuple, own: set[Claim]) -> None:
        scope, name, most, seen, hidden, called_at = value
        claimed = {lease.claim for lease in self.open_leases()}
        self.earlier |= claimed
        self.excused |= hidden - own
        # To rates an open claim is not known; and a change that is not committed holds off others for 5 s.
        if name == "rate_limit" or time.monotonic() > called_at + 4:
            unseen = {lease.claim for lease in self.leases.values()} | claimed
            self.excused |= unseen - seen - own
        self.began -= own  # what this transaction has claimed before it set the limit
        self.excuses_all |= not self.is_alone or any(s.call for s in self.sessions)
        current = self.settings.setdefault(scope, {})
        if name is None:
            current.clear()
        else:
            current[name] = most
        if "rate_limit" not in current:
            self.begun[scope] = 0

    def open_leases(self) -> list[Lease]:
        return [
            lease
            for session in self.sessions
            for what, lease in session.effects
            if what == "lease"
        ]

    def hidden_claims(self) -> set[Claim]:
        """Claims of jobs that nobody else sees: their open transactions have enqueued them, too."""
        leases = self.open_leases()
        text = "select id from pgqueue.job where id = any(%s)"
        seen = column(self.watcher, text, [lease.id for lease in leases])
        return {lease.claim for lease in leases if lease.id not in seen}

    def read_settings(self) -> None:
        """Of changes that met, learn which was the last."""
        self.excuses_all = False
        for scope, current in self.settings.items():
            current.clear()
            for name, value in self.watcher.execute(
                "select setting, value::int from pgqueue.settings where queue = %s"
                " and kind is not distinct from %s and group_key is not distinct from %s"
                " and setting in ('group_limit', 'max_running', 'rate_limit') and set_for = %s",
                (*scope, "kind" if scope[1] else "group" if scope[2] else "queue"),
            ):
                current[name] = value

    @staticmethod
    def scopes(queue: str, kind: str | None, group: str | None) -> set[Scope]:
        return {(queue, None, None), (queue, kind, None), (queue, None, group)}

    # What must hold

    @invariant()
    def limits_hold(self) -> None:
        """No job has begun beside more than its limits allow."""
        if self.queued or self.has_failed:
            return
        began, self.began = self.began, set()
        if not began:
            return
        counts: Counter[tuple[str, Scope]] = Counter()
        new = set()
        for id, claimed_at, queue, kind, group in self.watcher.execute(
            "select id, claimed_at, queue, kind, group_key from pgqueue.jobs"
            " where queue = any(%s) and state = 'running'",
            [self.all],
        ):
            if (id, claimed_at) in self.excused:
                continue
            keys = [("max_running", scope) for scope in self.scopes(queue, kind, None)]
            if group:
                keys.append(("group_limit", (queue, None, group)))
            for key in keys:
                counts[key] += 1
                if (id, claimed_at) in began:
                    new.add(key)
        for key in new:
            name, scope = key
            most = self.settings.get(scope, {}).get(name)
            if name == "group_limit" and most is None:
                most = self.settings.get((scope[0], None, None), {}).get(name)
            if most is not None and counts[key] > most:
                self.fault(f"{counts[key]} of {scope} run, and {name} is {most}")

    def claimed(self, session: Session, rows: Rows, asked: dict) -> None:
        for id, token, claimed_at, queue, kind, group, run_at in rows:
            lease = Lease(
                id, token, (id, claimed_at), queue, kind, group, asked["is_long"]
            )
            if queue not in asked["queues"] or kind not in (asked["kinds"] or [kind]):
                self.fault(f"{id} was not asked for")
            if run_at > claimed_at:
                self.fault(f"{id} was not due")
            if id in self.completed:
                self.fault(f"{id} was claimed after it had been completed")
            held = self.visible(session).get(id)
            if held and held.is_long:
                self.fault(f"{id} was claimed while {held} holds it")
            for other in self.sessions:
                if other is not session and any(
                    what == "lease" and value.id == id for what, value in other.effects
                ):
                    self.fault(f"{id} was claimed in two transactions")
            session.effects.append(("lease", lease))

    def visible(self, session: Session) -> dict[int, Lease]:
        """The leases that a session can know of."""
        leases = dict(self.leases)
        for what, value in session.effects:
            if what == "lease":
                leases[value.id] = value
            elif what == "end":
                leases.pop(value[0].id, None)
        return leases

    def is_safe(self, lease: Lease) -> bool:
        """It is held, and nobody is about to end it."""
        return (
            lease.is_long
            and self.leases.get(lease.id) == lease
            and not any(s.call for s in self.sessions)
            and not any(
                what == "end" and value[0].id == lease.id
                for s in self.sessions
                for what, value in s.effects
            )
        )

    # Transactions

    @rule(who=WHO)
    def begin(self, who) -> None:
        def done(session: Session, answers: list[Rows]) -> None:
            session.is_open = True

        self.act(who, "begin", done=done, on=lambda s: not s.is_open)

    @rule(who=WHO)
    def commit(self, who) -> None:
        if not any(s.is_open for s in self.sessions):
            return
        self.act(who, "commit", done=self.committed, on=lambda s: s.is_open)

    def committed(self, session: Session, answers: list[Rows]) -> None:
        session.is_open = False

    @rule(who=WHO)
    def roll_back(self, who) -> None:
        if not any(s.is_open for s in self.sessions):
            return
        self.act(
            who, "rollback", done=lambda s, _: self.close(s), on=lambda s: s.is_open
        )

    @rule(who=WHO)
    def savepoint(self, who) -> None:
        if not any(s.is_open for s in self.sessions):
            return
        self.flush()
        for session in self.sessions[who:]:
            if session.is_open and not session.call:
                session.savepoints.append(len(session.effects))
                session.conn.execute(f"savepoint s{len(session.savepoints)}")
                self.steps.append(f"{session.name}: savepoint")
                return

    @rule(who=WHO)
    def roll_back_to_savepoint(self, who) -> None:
        if not any(s.savepoints for s in self.sessions):
            return
        self.flush()
        for session in self.sessions[who:]:
            if session.savepoints and not session.call:
                session.conn.execute(f"rollback to s{len(session.savepoints)}")
                del session.effects[session.savepoints.pop() :]
                self.steps.append(f"{session.name}: rollback to savepoint")
                self.settle()
                return

    @rule(who=WHO)
    def kill(self, who) -> None:
        if not any(s.is_open for s in self.sessions):
            return
        self.flush()
        session = self.sessions[who]
        if not session.is_open:
            return
        self.steps.append(f"{who}: killed")
        self.watcher.execute(
            "select pg_terminate_backend(%s, 5000)", [session.conn.info.backend_pid]
        )
        if session.call and session.call.future:
            session.call.future.exception()
        session.conn.close()
        session.call = None
        self.close(session)
        session.conn = self.connect(options=OPTIONS)
        self.settle()

    @rule(calls=st.integers(2, 3))
    def at_once(self, calls) -> None:
        """Let the next calls begin at the same moment."""
        self.flush()
        self.together = calls

    # Producers

    def enqueued(self, queue: str) -> Callable[[Session, list[Rows]], None]:
        def done(session: Session, answers: list[Rows]) -> None:
            session.effects += [("job", (id, queue)) for (id,) in answers[0]]

        return done

    @rule(
        who=WHO,
        place=PLACE,
        group=GROUPS,
        kind=KINDS,
        priority=PRIORITIES,
        delay=DELAYS,
    )
    def enqueue(self, who, place, group, kind, priority, delay) -> None:
        self.act(
            who,
            "select pgqueue.enqueue(%s, kind => %s, priority => %s, group_key => %s,"
            " run_at => clock_timestamp() + %s::interval, max_attempts => 3)",
            *(self.queues[place], kind, priority, group, delay),
            done=self.enqueued(self.queues[place]),
        )

    @rule(
        who=WHO,
        key=st.sampled_from(["k", "l"]),
        how=st.sampled_from(["skip", "replace", "postpone"]),
        group=GROUPS,
        delay=DELAYS,
        expires=st.sampled_from([None, None, "5 ms"]),
    )
    def enqueue_once(self, who, key, how, group, delay, expires) -> None:
        self.act(
            who,
            "select pgqueue.enqueue(%s, kind => 'x', unique_key => %s, on_duplicate => %s, group_key => %s,"
            " run_at => clock_timestamp() + %s::interval, expires_at => clock_timestamp() + %s::interval)",
            *(self.queues[0], key, how, group, delay, expires),
            done=self.enqueued(self.queues[0]),
        )

    @rule(who=WHO, pick=PICK, group=GROUPS, if_dead=st.sampled_from(["cancel", "run"]))
    def enqueue_after(self, who, pick, group, if_dead) -> None:
        if ids := self.some(pick):
            self.act(
                who,
                "select pgqueue.enqueue(%s, kind => 'x', group_key => %s, after => %s, if_dead => %s)",
                *(self.queues[0], group, ids, if_dead),
                done=self.enqueued(self.queues[0]),
                may=("PQ001",),
            )

    @rule(
        who=WHO,
        place=PLACE,
        groups=st.lists(GROUPS, min_size=1, max_size=6),
        kind=KINDS,
        priority=PRIORITIES,
    )
    def enqueue_many(self, who, place, groups, kind, priority) -> None:
        self.enqueue_some(who, place, groups, kind, priority)

    def enqueue_some(self, who, place, groups, kind, priority) -> None:
        self.act(
            who,
            "select * from pgqueue.enqueue_many(%s, array_fill('1'::jsonb, array[%s::int]), kind => %s,"
            " priority => %s, group_keys => %s::text[])",
            *(self.queues[place], len(groups), kind, priority, groups),
            done=self.enqueued(self.queues[place]),
        )

    @rule(who=WHO, group=GROUPS, size=SIZES)
    def enqueue_and_claim(self, who, group, size) -> None:
        self.work(who, self.queues[0], [group], size)

    def work(self, who: int, queue: str, groups: list, size: int) -> None:
        """Enqueue two jobs of a group, and claim; then the next group."""

        def done(session: Session, answers: list[Rows]) -> None:
            for ids, leases in zip(answers[::2], answers[1::2], strict=True):
                self.enqueued(queue)(session, [ids])
                self.claimed(session, leases, asked)

        asked = {"queues": [queue], "kinds": None, "is_long": True}
        enqueue = "select * from pgqueue.enqueue_many(%s, '{1,2}', kind => 'x', group_keys => %s::text[])"
        claim = self.claim_text([queue], size, None, "1 hour")
        first, *then = [
            statement
            for group in groups
            for statement in ((enqueue, (queue, [group, group])), claim)
        ]
        self.act(who, first[0], *first[1], then=then, done=done, is_claim=True)

    @rule(who=WHO)
    def create_batch(self, who) -> None:
        self.act(
            who,
            "select pgqueue.create_batch(%s, kind => 'x')",
            self.queues[0],
            done=lambda s, answers: s.effects.append(("batch", answers[0][0][0])),
        )

    @rule(who=WHO, pick=PICK, closes=st.sampled_from([False, False, True]))
    def add_to_batch(self, who, pick, closes) -> None:
        if not self.batches:
            return
        batch = sorted(self.batches)[pick % len(self.batches)]
        if closes:
            self.act(who, "select pgqueue.close_batch(%s)", batch)
        else:
            self.act(
                who,
                "select pgqueue.enqueue(%s, kind => 'x', batch_id => %s)",
                *(self.queues[0], batch),
                done=self.enqueued(self.queues[0]),
                may=("55000",),
            )

    # Many

    def crowd(self) -> None:
        self.flush()
        self.is_crowded = True

    @rule(who=WHO)
    def crowd_whose_first_job_is_of_another_kind(self, who) -> None:
        if not (self.may_crowd and not self.is_crowded):
            return
        self.crowd()
        queue = self.queues[1]
        self.configure(who, (queue, None, None), "group_limit", 1)
        keys = [f"crowd {n}" for n in range(CROWD)]
        for kind in ("y", "x"):
            self.act(
                who,
                "select * from pgqueue.enqueue_many(%s, array_fill('1'::jsonb, array[%s::int]), kind => %s,"
                " group_keys => array(select 'crowd ' || n from generate_series(1, %s) as n))",
                *(queue, len(keys), kind, len(keys)),
                done=self.enqueued(queue),
            )
        self.claim(who, [queue], 1, ["x"], "1 hour")

    @rule(who=WHO, delay=st.sampled_from([None, 0.005, 0.01, 0.015, 0.02]))
    def maintain_after_a_crowd(self, who, delay) -> None:
        """Many groups come and go, and some go on while maintain looks at all of them."""
        if not (self.may_crowd and not self.is_crowded):
            return
        self.crowd()
        free = [s for s in self.sessions if not s.call and not s.is_open]
        if len(free) < 2:
            return
        groups = 5 * CROWD
        self.configure(free[0].name, (self.side, None, None), "group_limit", 1)
        self.act(
            free[0].name,
            "select count(*), pgqueue.purge(%s) from pgqueue.enqueue_many(%s,"
            " array_fill('1'::jsonb, array[%s::int]),"
            " group_keys => array(select 'crowd ' || n from generate_series(1, %s) as n))",
            *(self.side, self.side, groups, groups),
        )
        again = [f"crowd {n}" for n in range(groups, 0, -groups // 12)]
        if delay:
            self.begin(free[1].name)
            self.work(free[1].name, self.side, again, 2)
            self.together = 2
            self.act(
                free[1].name,
                "select pg_sleep(%s)",
                delay,
                then=[("commit", ())],
                done=self.committed,
            )
        else:
            self.together = 2
            self.work(free[1].name, self.side, again, 2)
        self.maintain(free[0].name)

    @rule(who=WHO, dies=st.booleans())
    def chain_whose_first_job_goes(self, who, dies) -> None:
        if not (self.may_crowd and not self.is_crowded):
            return
        self.chain(who, dies, CHAIN)
        self.claim(who, [self.side], 1, None, "1 hour")

    def chain(self, who: int, dies: bool, length: int) -> None:
        """Each waits for the one before, and the first is cancelled or expires."""
        self.crowd()
        self.act(
            who,
            "with recursive chain (id, place) as ("
            " select pgqueue.enqueue(%s, kind => 'x', expires_at => clock_timestamp() + %s), 1 union all"
            " select pgqueue.enqueue(%s, kind => 'x', after => array[id]), place + 1 from chain where place < %s)"
            " select min(id) from chain",
            *(self.side, "10 ms" if dies else "1 hour", self.side, length),
        )
        if not dies:
            cancel = "select * from pgqueue.cancel_many(%s, max_jobs => 1)"
            self.act(who, cancel, self.side)

    # Workers

    def claim_text(
        self, queues: list[str], size: int, kinds, lease: str
    ) -> tuple[str, tuple]:
        verb, of = ("claim", queues[0]) if len(queues) == 1 else ("claim_from", queues)
        return (
            f"select {COLUMNS} from pgqueue.{verb}(%s, 'w', %s, lease => %s::interval, kinds => %s::text[])",
            (of, size, lease, kinds),
        )

    def claim(self, who: int, queues: list[str], size: int, kinds, lease: str) -> None:
        asked = {"queues": queues, "kinds": kinds, "is_long": lease == "1 hour"}
        text, values = self.claim_text(queues, size, kinds, lease)
        self.act(
            who,
            text,
            *values,
            done=lambda s, answers: self.claimed(s, answers[0], asked),
            is_claim=True,
        )

    @rule(
        who=WHO,
        size=SIZES,
        kinds=ASKED,
        lease=LEASES,
        where=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def claim_some(self, who, size, kinds, lease, where) -> None:
        self.claim(
            who, [self.queues[:1], self.queues[1:], self.all][where], size, kinds, lease
        )

    @rule(who=WHO, size=SIZES)
    def claim_more(self, who, size) -> None:
        self.claim(who, self.queues[:1], size, None, "1 hour")

    def held(self, who: int, picks: list[int]) -> list[Lease]:
        leases = sorted(
            self.visible(self.sessions[who]).values(), key=lambda lease: lease.id
        )
        return (
            list(
                {
                    pick % len(leases): leases[pick % len(leases)] for pick in picks
                }.values()
            )
            if leases
            else []
        )

    def end(
        self, who: int, text: str, lease: Lease, *values: Any, how: str = "ended"
    ) -> None:
        """End an attempt by its id and token; one that is surely held must not be lost."""
        is_safe = self.is_safe(lease)

        def done(session: Session, answers: list[Rows]) -> None:
            if answers[0]:
                session.effects.append(("end", (lease, how)))
            elif is_safe and self.is_first:
                self.fault(f"{lease} was lost")

        self.act(
            who,
            f"select pgqueue.{text}",
            *(lease.id, lease.token, *values),
            done=done,
            may=() if is_safe else ("PQ002",),
        )

    @rule(who=WHO, pick=PICK)
    def complete(self, who, pick) -> None:
        for lease in self.held(who, [pick]):
            self.end(who, "complete(%s, %s)", lease, how="completed")

    @rule(
        who=WHO,
        pick=PICK,
        retry_in=st.sampled_from(["0", "10 ms", "1 hour", None]),
        permanent=st.sampled_from([False, False, False, True]),
    )
    def fail(self, who, pick, retry_in, permanent) -> None:
        for lease in self.held(who, [pick]):
            self.end(
                who, "fail(%s, %s, 'e', %s::interval, %s)", lease, retry_in, permanent
            )

    @rule(who=WHO, pick=PICK, delay=DELAYS)
    def release(self, who, pick, delay) -> None:
        for lease in self.held(who, [pick]):
            self.end(
                who,
                "release(array[%s::bigint], array[%s::bigint], clock_timestamp() + %s::interval)",
                lease,
                delay,
            )

    @rule(who=WHO, pick=PICK, event=EVENT, delay=DELAYS)
    def suspend(self, who, pick, event, delay) -> None:
        for lease in self.held(who, [pick]):
            self.end(
                who,
                "suspend(%s, %s, %s, clock_timestamp() + %s::interval)",
                lease,
                *(self.events[event], delay),
            )

    @rule(who=WHO, pick=PICK, other=PICK)
    def suspend_after(self, who, pick, other) -> None:
        """For an older one, so that none waits for itself."""
        for lease in self.held(who, [pick]):
            if older := [id for id in sorted(self.known) if id < lease.id]:
                text = "suspend(%s, %s, after => array[%s::bigint])"
                self.end(who, text, lease, older[other % len(older)])

    @rule(who=WHO, event=EVENT)
    def emit(self, who, event) -> None:
        self.act(who, "select pgqueue.emit(%s)", self.events[event])

    @rule(who=WHO, pick=PICK)
    def save_step(self, who, pick) -> None:
        for lease in self.held(who, [pick]):
            may = () if self.is_safe(lease) else ("PQ002",)
            text = "select pgqueue.save_step(%s, %s, 'step', '1')"
            self.act(who, text, lease.id, lease.token, may=may)

    @rule(
        who=WHO,
        picks=st.lists(PICK, min_size=1, max_size=4),
        how=st.sampled_from(["complete", "complete", "fail", "release", "reject"]),
        many=st.booleans(),
    )
    def finish(self, who, picks, how, many) -> None:
        leases = self.held(who, picks)
        ids, tokens = [lease.id for lease in leases], [lease.token for lease in leases]

        def done(session: Session, answers: list[Rows]) -> None:
            ends = {row[0]: row[1] for row in answers[0]}
            session.effects += [
                ("end", (lease, ends[lease.id]))
                for lease in leases
                if ends.get(lease.id, "lost") != "lost"
            ]

        if many:
            self.act(
                who,
                "select id, 'completed' from pgqueue.complete_many(%s::bigint[], %s::bigint[]) as id",
                *(ids, tokens),
                done=done,
            )
        else:
            self.act(
                who,
                "select * from pgqueue.finish(%s::bigint[], %s::bigint[], %s::text[],"
                " delays => array_fill(interval '0', array[%s::int]))",
                *(ids, tokens, [how] * len(ids), len(ids)),
                done=done,
            )

    @rule(who=WHO, pick=PICK)
    def complete_what_has_ended(self, who, pick) -> None:
        if not self.ended:
            return
        lease = self.ended[pick % len(self.ended)]
        self.act(
            who,
            "select * from pgqueue.complete_many(array[%s::bigint], array[%s::bigint])",
            *(lease.id, lease.token),
            done=lambda s, answers: answers[0] and self.fault(f"{lease} ended twice"),
        )

    @rule(who=WHO, pick=PICK)
    def extend(self, who, pick) -> None:
        for lease in self.held(who, [pick]):
            is_safe = self.is_safe(lease)

            def done(
                session: Session, answers: list[Rows], lease=lease, is_safe=is_safe
            ) -> None:
                if is_safe and self.is_first and answers[0][0][1] == "lost":
                    self.fault(f"{lease} was lost")

            self.act(
                who,
                "select * from pgqueue.extend(array[%s::bigint], array[%s::bigint], '1 hour')",
                *(lease.id, lease.token),
                done=done,
                never_waits=True,
            )

    @rule(kinds=ASKED)
    def sleep(self, kinds) -> None:
        """Claim as a worker does that is notified, and lie down."""
        self.flush()
        self.awake_at = 0
        self.sleeper_kinds = kinds
        if self.watch():
            return
        self.lie_down()

    def loses_hints(self) -> bool:
        text = "select coalesce(nullif(current_setting('pgqueue.lose_hints', true), ''), '0')::float8 > 0"
        return one(self.watcher, text)

    def lie_down(self) -> None:
        list(self.sleeper.notifies(timeout=0))
        text = "select pgqueue.rest(%s, %s::text[])"
        pause = one(self.sleeper, text, self.queues, self.sleeper_kinds)
        self.awake_at = (
            None if pause is None else time.monotonic() + pause.total_seconds()
        )
        self.steps.append(f"sleeper: rest({self.sleeper_kinds}) -> {pause}")

    def watch(self) -> bool:
        """Let the sleeper claim; say whether there was something."""
        kinds = self.sleeper_kinds
        text, values = self.claim_text(self.queues, 10, kinds, "1 hour")
        session = Session(SESSIONS, self.sleeper)
        rows = self.sleeper.execute(text, values).fetchall()
        self.steps.append(f"sleeper: claim -> {[show(row) for row in rows]}")
        asked = {"queues": self.queues, "kinds": kinds, "is_long": True}
        self.is_alone = True
        self.claimed(session, rows, asked)
        self.commit_effects(session)
        return bool(rows)

    # Operators

    def some(self, pick: int) -> list[int]:
        """One or two jobs that are known, mostly of those that came last."""
        ids = sorted(id for id, queue in self.known.items() if queue != self.side)[-8:]
        return [ids[pick % len(ids)]] if ids else []

    @rule(
        who=WHO,
        pick=PICK,
        verb=st.sampled_from(
            [
                "cancel(%s)",
                "run_now(%s)",
                "reprioritize(%s, 2)",
                "redrive_job(%s)",
                "discard(%s)",
            ]
        ),
    )
    def meddle(self, who, pick, verb) -> None:
        for id in self.some(pick):
            self.act(who, f"select pgqueue.{verb}", id, may=("PQ001",))

    @rule(who=WHO, pick=PICK)
    def rerun(self, who, pick) -> None:
        for id in self.some(pick):
            self.act(
                who,
                "select pgqueue.rerun(%s)",
                id,
                done=self.enqueued(self.known[id]),
                may=("PQ001", "22023"),
            )

    @rule(who=WHO, kind=KINDS, sure=st.sampled_from([False, False, True]))
    def cancel_many(self, who, kind, sure) -> None:
        if sure:
            self.act(
                who,
                "select * from pgqueue.cancel_many(%s, %s, max_jobs => 5)",
                self.queues[0],
                kind,
            )

    @rule(who=WHO)
    def redrive(self, who) -> None:
        self.act(who, "select * from pgqueue.redrive(%s)", self.queues[0])

    @rule(who=WHO)
    def purge(self, who) -> None:
        if not self.is_crowded:
            return
        self.act(who, "select pgqueue.purge(%s)", self.side)

    @rule(who=WHO)
    def maintain(self, who) -> None:
        self.act(who, "select * from pgqueue.maintain()", never_waits=True)

    @rule(who=WHO)
    def reap(self, who) -> None:
        self.act(who, "select pgqueue.reap()", never_waits=True)

    def configure(
        self, who: int, scope: Scope, name: str | None, most: int | None
    ) -> None:
        seen = {lease.claim for lease in self.leases.values()}
        hidden = self.hidden_claims()
        called_at = time.monotonic()
        text = "reset => true" if name is None else f"{name} => %s"
        if name == "rate_limit":
            text += ", rate_period => '1 hour'"
        self.act(
            who,
            f"select pgqueue.configure(%s, kind => %s, group_key => %s, {text})",
            *(*scope, *([most] if name else [])),
            done=lambda s, _: s.effects.append(
                ("set", (scope, name, most, seen, hidden, called_at))
            ),
        )

    @rule(who=WHO, group=st.sampled_from([None, None, "g"]), limit=LIMITS)
    def limit_groups(self, who, group, limit) -> None:
        self.configure(who, (self.queues[0], None, group), "group_limit", limit)

    @rule(who=WHO, kind=st.sampled_from([None, "x"]), limit=LIMITS)
    def limit_running(self, who, kind, limit) -> None:
        self.configure(who, (self.queues[0], kind, None), "max_running", limit)

    @rule(
        who=WHO,
        scope=st.sampled_from([(None, None), ("x", None), (None, "g")]),
        limit=st.integers(2, 6),
    )
    def limit_rate(self, who, scope, limit) -> None:
        self.configure(who, (self.queues[0], *scope), "rate_limit", limit)

    @rule(
        who=WHO,
        scope=st.sampled_from([(None, None), (None, None), ("x", None), (None, "g")]),
    )
    def lift_limits(self, who, scope) -> None:
        self.configure(who, (self.queues[0], *scope), None, None)

    @rule(
        who=WHO,
        group=st.sampled_from([None, "g"]),
        what=st.sampled_from(
            ["weight => 3", "group_on_retry => 'block'", "group_on_retry => 'skip'"]
        ),
    )
    def configure_groups(self, who, group, what) -> None:
        self.act(
            who,
            f"select pgqueue.configure(%s, group_key => %s, {what})",
            self.queues[0],
            group,
        )

    @rule(
        who=WHO,
        verb=st.sampled_from(["pause", "resume", "resume"]),
        scope=st.sampled_from([(None, None), ("x", None), (None, "g")]),
    )
    def pause(self, who, verb, scope) -> None:
        self.act(who, f"select pgqueue.{verb}(%s, %s, %s)", self.queues[0], *scope)

    # The end

    def teardown(self) -> None:
        try:
            if not self.has_failed:
                self.end_all()
        finally:
            for session in self.sessions:
                if (
                    session.call
                    and session.call.future
                    and not session.call.future.done()
                ):
                    self.watcher.execute(
                        "select pg_terminate_backend(%s, 5000)",
                        [session.conn.info.backend_pid],
                    )
                    session.call.future.exception()
                session.conn.close()
            self.sleeper.close()
            self.watcher.close()

    def end_all(self) -> None:
        """Come to rest, and let plain claims find all that is left."""
        self.flush()
        while any(s.is_open or s.call for s in self.sessions):
            for session in self.sessions:
                if session.is_open and not session.call:
                    self.act(
                        session.name,
                        self.ends[session.name],
                        done=lambda s, _: self.ended_by(s),
                    )
            self.flush()
            self.settle()
        self.limits_hold()
        self.nobody_sleeps_on()
        self.complete_all()
        for scope in [(None, None), ("x", None), (None, "g")]:
            self.act(0, "select pgqueue.resume(%s, %s, %s)", self.queues[0], *scope)
        for batch in sorted(self.batches):
            self.act(0, "select pgqueue.close_batch(%s)", batch)
        for event in self.events:
            self.act(0, "select pgqueue.emit(%s)", event)
        self.drain(has_limits=True)
        for scope, current in self.settings.items():
            if not self.keeps_limits or "rate_limit" in current:
                self.configure(0, scope, None, None)
        self.drain(has_limits=False)
        self.check_counts()

    def ended_by(self, session: Session) -> None:
        session.is_open = False
        if self.ends[session.name] == "rollback":
            self.close(session)

    def nobody_sleeps_on(self) -> None:
        """Who was told to sleep for long is told when there is something to claim.

        It is for at most 5 seconds while an enqueue is open. Where a hint is lost nobody
        tells: a worker looks every few seconds all the same, so it is asked again.
        """
        if self.loses_hints():
            self.lie_down()
        if self.awake_at is not None and self.awake_at < time.monotonic() + 10:
            return
        if list(self.sleeper.notifies(timeout=0.02, stop_after=1)):
            return
        if self.watch() and not list(self.sleeper.notifies(timeout=1, stop_after=1)):
            self.fault(
                "a worker sleeps, and nobody has told it that there is something to claim"
            )

    def complete_all(self) -> None:
        leases = list(self.leases.values())

        def done(session: Session, answers: list[Rows]) -> None:
            ends = {id for (id,) in answers[0]}
            for lease in leases:
                if lease.id in ends:
                    session.effects.append(("end", (lease, "completed")))
                elif lease.is_long:
                    self.fault(f"{lease} was lost")

        self.leases.clear()
        self.act(
            0,
            "select * from pgqueue.complete_many(%s::bigint[], %s::bigint[])",
            *([lease.id for lease in leases], [lease.token for lease in leases]),
            done=done,
        )

    def left(self) -> list[tuple]:
        """What waits, but for jobs that may not begin any more: a claim need not meet them, and
        what waits for them waits for reap."""
        return self.watcher.execute(
            "select j.id, j.queue, j.kind, j.group_key, j.state from pgqueue.jobs as j"
            " where j.queue = any(%s) and not (j.state = 'expired' and j.worker is null)"
            " and j.id not in ("
            "with recursive behind as ("
            "select e.id from pgqueue.jobs as e where e.state = 'expired' and e.worker is null"
            " union select d.waiter_id from behind as b join pgqueue.dependencies as d on d.job_id = b.id"
            ") select b.id from behind as b) order by j.id",
            [self.all],
        ).fetchall()

    def reason(self, id: int) -> tuple | None:
        """Why a job waits, and the tickets and permits of its group."""
        return self.watcher.execute(
            "select j.id, j.queue, j.kind, j.group_key, j.state, pgqueue.why(j.id),"
            " (select array_agg(t) from pgqueue.ticket as t where t.queue = j.queue and t.group_key = j.group_key),"
            " (select array_agg(p) from pgqueue.permit as p where p.queue = j.queue and p.group_key = j.group_key)"
            " from pgqueue.jobs as j where j.id = %s",
            [id],
        ).fetchone()

    def open_batches(self) -> list[tuple]:
        return self.watcher.execute(
            "select id, state, waiting, running from pgqueue.batches where id = any(%s)"
            " and (state <> 'finished' or waiting + running > 0 or callback_id is null)",
            [sorted(self.batches)],
        ).fetchall()

    def drain(self, has_limits: bool) -> None:
        """Claim and complete until nothing is left, or nothing but what a rate holds."""
        for id, *_ in self.watcher.execute(
            "select id from pgqueue.jobs where queue = any(%s) and state = 'scheduled'",
            [self.all],
        ).fetchall():
            self.act(0, "select pgqueue.run_now(%s)", id, may=("PQ001",))
        has_rates = any("rate_limit" in current for current in self.settings.values())
        is_final = not (has_limits and has_rates)
        deadline = time.monotonic() + PATIENCE
        claims, before = 0, 0
        # A batch whose last job tells nobody is found by the sweep.
        while (left := self.left()) or self.open_batches():
            if len(left) < before:
                deadline = time.monotonic() + PATIENCE
            before = len(left)
            begin, is_idle = len(self.steps), True
            for queue in self.all:
                claims += 1
                size = 100 if claims % 2 else 1
                self.claim(claims % SESSIONS, [queue], size, None, "1 hour")
                if self.leases:
                    is_idle = False
                    self.limits_hold()
                    self.complete_all()
            if is_idle and not is_final:
                return
            if is_idle and time.monotonic() > deadline:
                reasons = [self.reason(id) for id, *_ in left[:5]]
                self.fault(
                    f"{len(left)} are stuck: {reasons}, and batches: {self.open_batches()}"
                )
            if is_idle:
                del self.steps[begin:]
                time.sleep(0.01)

    def check_counts(self) -> None:
        """Nothing is lost, and the views count nothing that is not there."""
        self.act(0, "select pgqueue.reap()")
        ends = self.watcher.execute(
            "select job_id, outcome from pgqueue.run where job_id = any(%s) and outcome in ('completed', 'cancelled', 'dead')",
            [list(self.known)],
        ).fetchall()
        known = {id for id, _ in ends}
        if (
            lost := {id for id, queue in self.known.items() if queue != self.side}
            - known
        ):
            self.fault(f"{lost} are lost")
        often = [
            id
            for id, n in Counter(id for id, how in ends if how == "completed").items()
            if n > 1
        ]
        if often:
            self.fault(f"{often} were completed more than once")
        counts = self.watcher.execute(
            "select queue, ready, scheduled, running, expired, blocked from pgqueue.queues where queue = any(%s)",
            [self.all],
        ).fetchall()
        if any(any(row[1:]) for row in counts):
            self.fault(f"the view queues counts {counts}")
        if open := self.open_batches():
            self.fault(f"batches never end: {open}")


@pytest.mark.parametrize("lost", [0, 0.5, 1] if LONG else [0, 1])
def test_whatever_sessions_do_limits_hold_and_nothing_is_stuck(connect, dsn, lost):
    """Also where all hints get lost, or every other one."""
    lose_hints(dsn, lost)
    with ThreadPoolExecutor(SESSIONS) as pool:
        run_state_machine_as_test(
            lambda: Machine(connect, pool),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                derandomize=not LONG,
                phases=[Phase.generate] + [Phase.shrink] * SHRINK,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


# What once went wrong, as steps of the machine

BEGIN = {"block": False, "keep": True, "crowd": True, "ends": ["commit"] * SESSIONS}


@pytest.fixture
def machine(connect) -> Iterator[Machine]:
    with ThreadPoolExecutor(SESSIONS) as pool:
        yield Machine(connect, pool)


def test_jobs_of_limited_groups_are_found_that_began_while_maintain_looked(machine):
    machine.begin_all(limit=None, groups=[None], **BEGIN)
    for delay in (0.005, 0.01, 0.015, 0.02):
        machine.maintain_after_a_crowd(0, delay)
        machine.complete_all()
        machine.drain(has_limits=True)
    machine.teardown()


def test_a_claim_passes_many_groups_whose_first_job_it_may_not_take(machine):
    machine.begin_all(limit=None, groups=[None], **BEGIN)
    machine.crowd_whose_first_job_is_of_another_kind(0)
    machine.teardown()


def test_a_claim_ends_beside_a_long_chain_whose_first_job_has_expired(machine):
    machine.begin_all(limit=None, groups=[None], **BEGIN)
    conn = machine.sessions[0].conn
    conn.execute("set statement_timeout = 0")
    machine.chain(0, True, 20 * CHAIN)
    conn.execute("set statement_timeout = '1 s'")
    machine.claim(0, [machine.side], 1, None, "1 hour")
    conn.execute("reset statement_timeout")
    for _ in range(12):
        machine.maintain(0)
    machine.teardown()


def test_an_end_that_met_a_lock_and_commits_late_wakes_who_sleeps(machine):
    machine.begin_all(limit=1, groups=["g", "g"], **BEGIN)
    machine.claim_some(1, 1, None, "1 hour", 0)
    machine.begin(2)
    machine.claim_some(2, 1, None, "1 hour", 0)
    machine.begin(3)
    machine.complete(3, 0)
    machine.commit(2)
    machine.sleep(None)
    machine.teardown()


def test_a_limit_holds_between_two_open_claims_after_it_was_lowered(machine):
    machine.begin_all(limit=None, groups=["g"] * 8, **BEGIN)
    machine.limit_groups(0, "g", 5)
    machine.claim_some(0, 10, None, "1 hour", 0)
    for _ in range(4):
        machine.complete(0, 0)
    machine.limit_groups(0, "g", 2)
    for session in (1, 2):
        machine.begin(session)
        machine.claim_some(session, 1, None, "1 hour", 0)
    for session in (1, 2):
        machine.commit(session)
        machine.limits_hold()
    machine.teardown()


@pytest.mark.parametrize("name", ["group_limit", "max_running"])
def test_a_limit_holds_between_two_that_enqueue_and_claim(machine, name):
    machine.begin_all(limit=None, groups=[None], **BEGIN)
    machine.claim_some(0, 1, None, "1 hour", 0)
    machine.complete(0, 0)
    machine.configure(0, (machine.queues[0], None, None), name, 1)
    for session in (1, 2):
        machine.begin(session)
        machine.enqueue_and_claim(session, "new", 1)
    for session in (1, 2):
        machine.commit(session)
        machine.limits_hold()
    machine.teardown()


def test_claims_that_were_open_when_a_limit_was_set_break_none(machine):
    machine.begin_all(limit=None, groups=["g"] * 4, **BEGIN)
    for session in (1, 2):
        machine.begin(session)
        machine.claim_some(session, 1, None, "1 hour", 0)
    machine.limit_groups(0, "g", 1)
    for session in (1, 2):
        machine.commit(session)
        machine.limits_hold()
    machine.teardown()
