"""Groups, limits, caps and rates: which jobs run, and in what order, against a model of the rules."""

import itertools
import random
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

import psycopg
import pytest
from conftest import LONG, column, one, persist, soon
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

pytestmark = pytest.mark.loses_hints
QUEUES = (f"groups {n}" for n in itertools.count())
MAX_ATTEMPTS = 2
GROUPS = st.sampled_from([None, "a", "a", "b", "c"])
LIMITED = st.sampled_from([None, "a", "b"])
KINDS = st.sampled_from(["x", "y"])
ASKED = st.sampled_from([None, None, None, ["x"], ["y"]])
PRIORITIES = st.sampled_from([-1, 0, 0, 2])
WHEN = st.sampled_from(
    ["null", "null", "now() - interval '1 hour'", "now() + interval '1 hour'"]
)
SIZES = st.integers(1, 5)
LIMITS = st.integers(1, 3)
PICK = st.integers(0, 1000)
# What may have a cap: the queue, a kind, or for rates, a group, or (*) each group.
SCOPES = st.sampled_from([(None, None), ("x", None), (None, "a"), (None, "*")])
Scope = tuple[str | None, str | None]


@dataclass
class Job:
    """What the model knows of a job; run_at alone is learnt from the database."""

    id: int
    group: str | None
    kind: str
    priority: int
    key: str | None = None
    run_at: datetime | None = None
    is_due: bool = True
    attempt: int = 0
    token: int | None = None
    is_expired: bool = False
    is_cancelled: bool = False
    has_permit: bool = False

    @property
    def waits(self) -> bool:
        return self.token is None

    @property
    def keeps_permit(self) -> bool:
        """It waits for its retry, and no other job of its group runs in its place."""
        return self.waits and self.has_permit

    @property
    def place(self) -> tuple:
        return -self.priority, self.run_at, self.id


class Model:
    """The rules."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.dead: dict[int, Job] = {}
        self.limits: dict[str | None, int] = {}
        self.on_retry: dict[str | None, str] = {}
        self.caps: dict[Scope, int] = {}
        self.rates: dict[Scope, int] = {}
        # How many began today, since there was a rate.
        self.begun: Counter[Scope] = Counter()

    def rate(self, scope: Scope) -> int | None:
        """A group has its own rate, or else that of each group."""
        kind, group = scope
        each = self.rates.get((None, "*")) if group else None
        return self.rates.get((kind, group), each)

    @staticmethod
    def scopes(job: Job) -> list[Scope]:
        """Whose caps and rates hold for a job, all of them."""
        return [(None, None), (job.kind, None)] + [(None, job.group)] * bool(job.group)

    def is_within(self, job: Job) -> bool:
        """One more may run, and begin, as far as caps and rates say."""
        return all(
            (cap := self.caps.get(scope)) is None
            or sum(not j.waits and scope in self.scopes(j) for j in self.jobs.values())
            < cap
            for scope in self.scopes(job)
        ) and all(
            (rate := self.rate(scope)) is None or self.begun[scope] < rate
            for scope in self.scopes(job)
        )

    def begin(self, job: Job, token: int) -> None:
        """Check that a job may begin, and let it."""
        assert job.waits and job.is_due, f"{job} was claimed"
        assert self.is_within(job), f"{job} was claimed beyond a cap"
        job.token, job.attempt = token, job.attempt + 1
        for scope in self.scopes(job):
            self.begun[scope] += self.rate(scope) is not None

    def limit(self, group: str | None) -> int | None:
        """A group has its own limit, or else that of the queue; no group has none."""
        return self.limits.get(group, self.limits.get(None)) if group else None

    def of(self, group: str | None) -> list[Job]:
        return [job for job in self.jobs.values() if job.group == group]

    def end(self, job: Job, to: str) -> None:
        """End an attempt. Cancelled jobs are gone in any case; dead ones are kept elsewhere."""
        to = "gone" if job.is_cancelled else to
        job.token, job.is_expired = None, False
        if to in ("gone", "dead"):
            del self.jobs[job.id]
        if to == "dead":
            self.dead[job.id] = job
        job.has_permit = (
            job.has_permit
            and to == "retry"
            and self.on_retry.get(job.group, self.on_retry.get(None)) == "block"
        )

    def fail(self, job: Job) -> None:
        """An attempt failed, or its lease expired."""
        self.end(job, "dead" if job.attempt >= MAX_ATTEMPTS else "retry")

    def running(self, group: str) -> int:
        """Whatever is leased runs, also from before there was a limit, or after its lease expired."""
        return sum(not job.waits for job in self.of(group))

    def claimable(self, kinds: list[str] | None) -> list[Job]:
        """Which jobs a claim may not leave when it comes back short."""
        due = [job for job in self.jobs.values() if job.waits and job.is_due]
        free = [job for job in due if self.limit(job.group) is None]
        for group in {job.group for job in due} - {job.group for job in free}:
            waiting = sorted(
                (job for job in due if job.group == group), key=lambda job: job.place
            )
            keepers = [job for job in waiting if job.keeps_permit]
            later = [
                job for job in self.of(group) if job.keeps_permit and not job.is_due
            ]
            held = self.running(group) + len(later)
            limit = self.limit(group)
            if keepers and held < limit:
                # One that waited for its retry comes first: it has its permit.
                free.append(keepers[0])
            elif not keepers and held < limit:
                free.append(waiting[0])
            elif keepers and held + len(keepers) < limit:
                free += [job for job in waiting if not job.keeps_permit][:1]
        return [
            job
            for job in free
            if (kinds is None or job.kind in kinds) and self.is_within(job)
        ]


class Groups(RuleBasedStateMachine):
    def __init__(self, db: psycopg.Connection, loses_hints: bool) -> None:
        super().__init__()
        self.db = db
        self.loses_hints = loses_hints
        self.queue = next(QUEUES)
        self.model = Model()
        self.meddled = False
        db.execute("select setseed(0.5)")

    @initialize(
        limit=LIMITS, how=st.sampled_from(["skip", "block"]), is_set=st.booleans()
    )
    def begin(self, limit, how, is_set) -> None:
        if is_set:
            self.limit(None, limit)
            self.on_retry(None, how)

    # What is there

    def read(self) -> dict[int, tuple]:
        rows = self.db.execute(
            "select id, run_at, group_key, kind, priority, run_at <= clock_timestamp(), attempt, "
            "token, lease_expires_at <= clock_timestamp(), cancelled_at is not null "
            "from pgqueue.job where queue = %s",
            (self.queue,),
        )
        return {row[0]: row[1:] for row in rows}

    @invariant()
    def nothing_is_lost_and_nothing_is_there_twice(self) -> None:
        there = self.read()
        for id, job in self.model.jobs.items():
            assert id in there, f"{job} is lost"
            job.run_at = there[id][0]
        assert {
            job.id: (
                job.run_at,
                job.group,
                job.kind,
                job.priority,
                job.is_due,
                job.attempt,
                job.token,
                None if job.waits else job.is_expired,
                job.is_cancelled,
            )
            for job in self.model.jobs.values()
        } == there
        dead = column(
            self.db, "select id from pgqueue.dead_job where queue = %s", self.queue
        )
        assert set(dead) == set(self.model.dead)

    def some(self, pick: int, running: bool | None = None) -> Job | None:
        """Choose a job that runs, that waits, or any."""
        jobs = [
            job
            for _, job in sorted(self.model.jobs.items())
            if running in (None, not job.waits)
        ]
        return jobs[pick % len(jobs)] if jobs else None

    # Producers

    def add(self, id: int, group, kind, priority, when, key=None) -> None:
        assert id not in self.model.jobs
        self.model.jobs[id] = Job(
            id, group, kind, priority, key, is_due="+" not in when
        )

    @rule(group=GROUPS, kind=KINDS, priority=PRIORITIES, when=WHEN)
    def enqueue(self, group, kind, priority, when) -> None:
        id = one(
            self.db,
            "select pgqueue.enqueue(%s, kind => %s, priority => %s, group_key => %s, "
            f"max_attempts => {MAX_ATTEMPTS}, run_at => {when})",
            self.queue,
            kind,
            priority,
            group,
        )
        self.add(id, group, kind, priority, when)

    @rule(
        groups=st.lists(GROUPS, min_size=1, max_size=6),
        kind=KINDS,
        priority=PRIORITIES,
        when=WHEN,
    )
    def enqueue_many(self, groups, kind, priority, when) -> None:
        ids = column(
            self.db,
            "select pgqueue.enqueue_many(%s, array_fill('1'::jsonb, array[%s::int]), kind => %s, "
            f"priority => %s, group_keys => %s::text[], max_attempts => {MAX_ATTEMPTS}, run_at => {when})",
            self.queue,
            len(groups),
            kind,
            priority,
            groups,
        )
        for id, group in zip(ids, groups, strict=True):
            self.add(id, group, kind, priority, when)

    @rule(
        key=st.sampled_from(["k", "l"]),
        what=st.sampled_from(["skip", "replace", "postpone"]),
        group=GROUPS,
        priority=PRIORITIES,
        when=WHEN,
    )
    def enqueue_once(self, key, what, group, priority, when) -> None:
        id = one(
            self.db,
            "select pgqueue.enqueue(%s, kind => 'x', priority => %s, group_key => %s, unique_key => %s, "
            f"on_duplicate => %s, max_attempts => {MAX_ATTEMPTS}, run_at => {when})",
            self.queue,
            priority,
            group,
            key,
            what,
        )
        taken = next((job for job in self.model.jobs.values() if job.key == key), None)
        if taken and taken.is_expired:
            self.model.fail(taken)
            taken = self.model.jobs.get(taken.id)
        if not taken:
            self.add(id, group, "x", priority, when, key)
            return
        assert id == taken.id
        if taken.waits and what == "replace":
            taken.priority, taken.is_due = priority, "+" not in when
        elif taken.waits and what == "postpone":
            taken.is_due = taken.is_due and "+" not in when

    # Workers

    def ask(self, size: int, kinds: list[str] | None) -> list[tuple[int, int]]:
        of = self.queue if size % 2 else [self.queue]
        claim = (
            f"select id, token from pgqueue.claim{'' if size % 2 else '_from'}("
            "%s, 'w', %s, lease => '1 hour', kinds => %s::text[])"
        )
        jobs = self.db.execute(claim, (of, size, kinds)).fetchall()
        for _ in range(3 * self.loses_hints):
            # It may have made permits, for the next, or given a ticket to what it had passed.
            jobs = jobs or self.db.execute(claim, (of, size, kinds)).fetchall()
        return jobs

    @rule(size=SIZES, kinds=ASKED)
    def claim(self, size, kinds) -> None:
        self.serve(size, kinds)

    def serve(self, size: int, kinds: list[str] | None = None) -> int:
        """Claim, and check what came and what stayed."""
        model = self.model
        claimed = self.ask(size, kinds)
        there = self.read()
        recovered = [
            job
            for job in model.jobs.values()
            if job.is_expired and (job.id not in there or there[job.id][6] != job.token)
        ]
        for job in recovered:
            model.fail(job)
        waited = [
            job for job in model.jobs.values() if job.waits and job not in recovered
        ]
        jobs = []
        for id, token in claimed:
            job = model.jobs[id]
            assert kinds is None or job.kind in kinds
            model.begin(job, token)
            jobs.append((job, job.has_permit))
            job.has_permit = job.has_permit or model.limit(job.group) is not None
        for job, is_retry in jobs:
            limit = model.limit(job.group)
            if limit is None:
                continue
            running = model.running(job.group)
            assert running <= limit, f"{running} of {job.group} run"
            if is_retry:
                continue
            kept = sum(j.waits and j.keeps_permit for j in model.of(job.group))
            assert running + kept <= limit, f"{job} has the permit of another"
            for other in waited:
                if (
                    other.group == job.group
                    and other.waits
                    and other.is_due
                    and not other.keeps_permit
                    # A ticket is of one priority; that of a higher one may be lost.
                    and (not self.loses_hints or other.priority == job.priority)
                ):
                    assert job.place < other.place, f"{job} overtook {other}"
        if not claimed:
            self.meddled = False
        # What a claim recovers on its way may stand where it has been.
        # A permit that was not given back is found when there is no other.
        is_all = not claimed if self.loses_hints else len(claimed) < size
        if is_all and not recovered and not self.meddled:
            left = model.claimable(kinds)
            assert not left, f"{left} stayed"
        return len(claimed)

    @rule(size=SIZES, kinds=ASKED)
    def claim_and_roll_back(self, size, kinds) -> None:
        with self.db.transaction(force_rollback=True):
            self.ask(size, kinds)

    @rule(pick=PICK)
    def complete(self, pick) -> None:
        if job := self.some(pick, running=True):
            self.db.execute("select pgqueue.complete(%s, %s)", (job.id, job.token))
            self.model.jobs.pop(job.id)

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def complete_many(self, picks) -> None:
        jobs = {job.id: job for pick in picks if (job := self.some(pick, running=True))}
        done = column(
            self.db,
            "select pgqueue.complete_many(%s::bigint[], %s::bigint[])",
            list(jobs),
            [job.token for job in jobs.values()],
        )
        assert set(done) == set(jobs)
        for id in jobs:
            del self.model.jobs[id]

    @rule(
        pick=PICK,
        retry_in=st.sampled_from(["0", "1 hour"]),
        permanent=st.sampled_from([False, False, True]),
    )
    def fail(self, pick, retry_in, permanent) -> None:
        if job := self.some(pick, running=True):
            self.db.execute(
                "select pgqueue.fail(%s, %s, 'e', %s, %s)",
                (job.id, job.token, retry_in, permanent),
            )
            if permanent:
                self.model.end(job, "dead")
            else:
                self.model.fail(job)
            job.is_due = retry_in == "0"

    @rule(
        picks=st.dictionaries(
            PICK,
            st.sampled_from(["complete", "fail", "reject"]),
            min_size=1,
            max_size=4,
        )
    )
    def finish(self, picks) -> None:
        ends = {
            job.id: (job, end)
            for pick, end in picks.items()
            if (job := self.some(pick, running=True))
        }
        self.db.execute(
            "select pgqueue.finish(%s::bigint[], %s::bigint[], %s::text[], "
            "delays => array_fill(interval '0', array[%s]))",
            (
                list(ends),
                [job.token for job, _ in ends.values()],
                [end for _, end in ends.values()],
                len(ends),
            ),
        )
        for job, end in ends.values():
            if end == "fail":
                self.model.fail(job)
                job.is_due = True
            else:
                self.model.end(job, "gone" if end == "complete" else "dead")

    @rule(pick=PICK, later=st.booleans())
    def release(self, pick, later) -> None:
        if job := self.some(pick, running=True):
            self.db.execute(
                "select pgqueue.release(array[%s::bigint], array[%s::bigint], "
                "case when %s then now() + interval '1 hour' end)",
                (job.id, job.token, later),
            )
            self.model.end(job, "release")
            job.attempt -= 1
            job.is_due = job.is_due and not later

    @rule(pick=PICK)
    def expire(self, pick) -> None:
        if job := self.some(pick, running=True):
            self.db.execute(
                "update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = %s",
                (job.id,),
            )
            job.is_expired = True

    # Operators

    @rule(pick=PICK)
    def cancel(self, pick) -> None:
        if job := self.some(pick):
            self.db.execute("select pgqueue.cancel(%s)", (job.id,))
            job.is_cancelled = True
            if job.waits or job.is_expired:
                self.model.end(job, "gone")

    @rule(kind=KINDS, sure=st.sampled_from([False, False, True]))
    def cancel_many(self, kind, sure) -> None:
        jobs = [
            job
            for _, job in sorted(self.model.jobs.items())
            if job.kind == kind and not job.is_cancelled
        ]
        if sure:
            cancelled = column(
                self.db, "select pgqueue.cancel_many(%s, %s)", self.queue, kind
            )
            assert cancelled == [job.id for job in jobs]
            for job in jobs:
                job.is_cancelled = True
                if job.waits or job.is_expired:
                    self.model.end(job, "gone")
            self.meddled = True

    @rule(pick=PICK)
    def run_now(self, pick) -> None:
        if job := self.some(pick):
            self.db.execute("select pgqueue.run_now(%s)", (job.id,))
            job.is_due = True if job.waits else job.is_due

    @rule(pick=PICK, priority=PRIORITIES)
    def reprioritize(self, pick, priority) -> None:
        if job := self.some(pick):
            self.db.execute("select pgqueue.reprioritize(%s, %s)", (job.id, priority))
            job.priority = priority

    @rule()
    def redrive(self) -> None:
        ids = column(self.db, "select pgqueue.redrive(%s)", self.queue)
        expected = []
        for id, job in sorted(self.model.dead.items()):
            if job.key is None or job.key not in {
                j.key for j in self.model.jobs.values()
            }:
                del self.model.dead[id]
                self.model.jobs[id] = job
                job.attempt, job.is_due = 0, True
                expected.append(id)
        assert ids == expected

    @rule(sure=st.sampled_from([False, False, False, True]))
    def purge(self, sure) -> None:
        if sure:
            self.db.execute("select pgqueue.purge(%s)", (self.queue,))
            self.model.jobs = {
                id: job for id, job in self.model.jobs.items() if not job.waits
            }

    @rule()
    def maintain(self) -> None:
        """Recover what expired, and drop the permits of groups without jobs."""
        self.db.execute("select pgqueue.maintain()")
        for job in [job for job in self.model.jobs.values() if job.is_expired]:
            self.model.fail(job)

    @rule(pick=PICK)
    def delete_by_hand(self, pick) -> None:
        if job := self.some(pick):
            self.db.execute("delete from pgqueue.job where id = %s", (job.id,))
            del self.model.jobs[job.id]
            # Only a claim that finds nothing looks what it led to.
            self.meddled = True

    @rule(group=LIMITED, limit=LIMITS)
    def limit(self, group, limit) -> None:
        self.db.execute(
            "select pgqueue.configure(%s, group_key => %s, group_limit => %s)",
            (self.queue, group, limit),
        )
        self.model.limits[group] = limit
        for job in self.model.jobs.values():
            if not job.waits and self.model.limit(job.group) is not None:
                job.has_permit = True

    @rule(group=LIMITED, how=st.sampled_from(["skip", "block", "block"]))
    def on_retry(self, group, how) -> None:
        self.db.execute(
            "select pgqueue.configure(%s, group_key => %s, group_on_retry => %s)",
            (self.queue, group, how),
        )
        self.model.on_retry[group] = how

    @rule(group=LIMITED)
    def reset(self, group) -> None:
        self.db.execute(
            "select pgqueue.configure(%s, group_key => %s, reset => true)",
            (self.queue, group),
        )
        self.model.limits.pop(group, None)
        self.model.on_retry.pop(group, None)
        self.model.rates.pop((None, group), None)
        if group is None:
            self.model.caps.pop((None, None), None)

    @rule(scope=SCOPES, cap=LIMITS)
    def cap(self, scope, cap) -> None:
        if scope[1] is None:
            self.db.execute(
                "select pgqueue.configure(%s, kind => %s, max_running => %s)",
                (self.queue, scope[0], cap),
            )
            self.model.caps[scope] = cap

    @rule(scope=SCOPES, rate=LIMITS)
    def rate(self, scope, rate) -> None:
        self.db.execute(
            "select pgqueue.configure(%s, kind => %s, group_key => %s, rate_limit => %s, "
            "rate_period => '1 day')",
            (self.queue, *scope, rate),
        )
        self.model.rates[scope] = rate
        # The claim that meets the group makes its permits, and may not use them.
        self.meddled = self.meddled or scope[1] is not None

    @rule(scope=SCOPES)
    def lift(self, scope) -> None:
        """Forget caps and rates; of the queue, all that was set."""
        self.db.execute(
            "select pgqueue.configure(%s, kind => %s, group_key => %s, reset => true)",
            (self.queue, *scope),
        )
        self.model.caps.pop(scope, None)
        self.model.rates.pop(scope, None)
        if scope == (None, None) or scope[1] == "a":
            self.model.limits.pop(scope[1], None)
            self.model.on_retry.pop(scope[1], None)

    @rule()
    def let_a_day_pass(self) -> None:
        self.db.execute(
            "update pgqueue.permit set taken_at = taken_at - interval '1 day', "
            "free_at = case when is_rate then free_at - interval '1 day' else free_at end where queue = %s",
            (self.queue,),
        )
        self.db.execute(
            "update pgqueue.ticket set at = at - interval '1 day' where queue = %s",
            (self.queue,),
        )
        self.model.begun.clear()
        self.meddled = True

    # The end

    def teardown(self) -> None:
        """Everything that is due is served, sooner or later."""
        try:
            while True:
                running = [job for job in self.model.jobs.values() if not job.waits]
                for job in running:
                    self.db.execute(
                        "select pgqueue.complete(%s, %s)", (job.id, job.token)
                    )
                    del self.model.jobs[job.id]
                self.nothing_is_lost_and_nothing_is_there_twice()
                if not self.serve(5):
                    if not self.model.rates:
                        break
                    for scope in list(self.model.rates):
                        self.lift(scope)
            assert not self.model.claimable(None)
            rest = self.db.execute(
                "select pgqueue.rest(array[%s])", (self.queue,)
            ).fetchone()[0]
            assert rest is None or rest.total_seconds() > 0
        finally:
            for table, queue in [
                ("job", "queue"),
                ("dead_job", "queue"),
                ("ticket", "queue"),
                ("permit", "queue"),
                ("queue", "name"),
            ]:
                self.db.execute(
                    f"delete from pgqueue.{table} where {queue} = %s", (self.queue,)
                )


def test_groups_are_served_as_the_model_says(db, lost_hints):
    run_state_machine_as_test(
        lambda: Groups(db, lost_hints > 0),
        settings=settings(
            max_examples=(50 if lost_hints else 200) // (1 if LONG else 6),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            # What claims remember lasts for 100 ms, so a smaller example may well pass.
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


# Shares, however many sessions enqueue at once


def enqueue(
    session: psycopg.Connection, group_key: str, jobs: int, *, bulk: bool = True
) -> None:
    if bulk:
        session.execute(
            "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[%(jobs)s]),"
            " group_keys => array_fill(%(group)s::text, array[%(jobs)s]))",
            {"jobs": jobs, "group": group_key},
        )
    else:
        for _ in range(jobs):
            session.execute(
                "select pgqueue.enqueue('q', group_key => %s)", (group_key,)
            )


def claimed(db: psycopg.Connection, jobs: int) -> Counter[str]:
    """Whose jobs claims of ten return."""
    return Counter(
        key
        for _ in range(jobs // 10)
        for key in column(db, "select group_key from pgqueue.claim('q', 'w', 10)")
    )


@pytest.mark.needs_hints
def test_sessions_that_do_not_see_each_other_give_their_group_no_larger_share(
    db, connect
):
    first, second, third = connect(), connect(), connect()
    # Not long before a claim has looked for tickets that are there twice.
    assert column(db, "select id from pgqueue.claim('q', 'w')") == []
    with first.transaction(), second.transaction():
        enqueue(first, "big", 20)
        enqueue(second, "big", 20, bulk=False)
        with third.transaction():
            enqueue(third, "big", 10, bulk=False)
            enqueue(third, "big", 10)
    enqueue(db, "small", 60)
    # Until copies are dropped, each ticket gives once.
    sizes = [
        one(db, "select count(*) from pgqueue.claim('q', 'w', 10)") for _ in range(2)
    ]
    assert sizes == [10, 10]
    time.sleep(0.15)
    claimed(db, 10)
    assert claimed(db, 40) == {"big": 20, "small": 20}


@pytest.mark.needs_hints  # a group without a ticket has its share when the sweep has found it
def test_what_was_rolled_back_costs_its_group_nothing(db):
    with db.transaction(force_rollback=True):
        enqueue(db, "big", 1000)
    enqueue(db, "big", 15)
    enqueue(db, "small", 15)
    assert claimed(db, 20) == {"big": 10, "small": 10}


def test_a_claim_is_full_while_other_sessions_make_tickets_twice(db, connect):
    """Two tickets of one group do no harm."""
    others = [connect() for _ in range(3)]
    for size in (1, 2, 10, 60):
        with ExitStack() as stack:
            for other in others:
                stack.enter_context(other.transaction())
                enqueue(other, "a", 40)
                enqueue(other, "b", 40)
        ids = column(db, "select id from pgqueue.claim('q', 'w', %s)", size)
        assert len(set(ids)) == size


# A claim and a rest agree

ENQUEUE = "select pgqueue.enqueue('q', group_key => 'a', kind => %s{})"
LATER = ENQUEUE.format(", run_at => now() + interval '1 hour'")
NOW = ENQUEUE.format("")
CLAIM = "select pgqueue.claim('q', 'w', 5)"
# What was done; the kinds that are asked for; whether there is something to wait for.
BLOCKED = {
    "only another is due": (
        [
            "select pgqueue.cancel(pgqueue.enqueue('q', group_key => 'b'))",
            LATER.replace("%s", "'y'"),
        ],
        None,
        True,
    ),
    "due, but of another kind": (
        [NOW.replace("%s", "'x'"), LATER.replace("%s", "'y'")],
        ["y"],
        True,
    ),
    "behind one of another kind": (
        [
            "select pgqueue.configure('q', group_limit => 1)",
            NOW.replace("%s", "'x'"),
            NOW.replace("%s", "'y'"),
        ],
        ["y"],
        False,
    ),
    "of a kind that is full": (
        [
            "select pgqueue.configure('q', kind => 'x', max_running => 1)",
            NOW.replace("%s", "'x'"),
            NOW.replace("%s", "'x'"),
            CLAIM,
        ],
        None,
        True,
    ),
    "of a kind that is full, and one for later": (
        [
            "select pgqueue.configure('q', kind => 'x', max_running => 1)",
            NOW.replace("%s", "'x'"),
            NOW.replace("%s", "'x'"),
            LATER.replace("%s", "'y'"),
            CLAIM,
        ],
        None,
        True,
    ),
    "of a kind that is paused, and one for later": (
        [
            "select pgqueue.pause('q', kind => 'x')",
            NOW.replace("%s", "'x'"),
            LATER.replace("%s", "'y'"),
        ],
        None,
        True,
    ),
    "of a group that is paused": (
        ["select pgqueue.pause('q', group_key => 'a')", NOW.replace("%s", "'x'")],
        None,
        False,
    ),
    "behind one that runs": (
        [
            "select pgqueue.configure('q', group_limit => 1)",
            NOW.replace("%s", "'x'"),
            NOW.replace("%s", "'y'"),
            CLAIM,
        ],
        None,
        True,
    ),
    "behind one that waits for its retry": (
        [
            "select pgqueue.configure('q', group_limit => 1, group_on_retry => 'block')",
            NOW.replace("%s", "'x'"),
            NOW.replace("%s", "'y'"),
            "select pgqueue.fail(id, token, 'e', '1 hour') from pgqueue.claim('q', 'w')",
        ],
        None,
        True,
    ),
    "behind a due retry of another kind": (
        [
            "select pgqueue.configure('q', group_limit => 1, group_on_retry => 'block')",
            NOW.replace("%s", "'x'"),
            NOW.replace("%s", "'y'"),
            "select pgqueue.fail(id, token, 'e', '0') from pgqueue.claim('q', 'w')",
        ],
        ["y"],
        True,
    ),
    "beyond a rate": (
        [
            "select pgqueue.configure('q', group_key => '*', rate_limit => 1, rate_period => '1 hour')",
            NOW.replace("%s", "'x'"),
            NOW.replace("%s", "'x'"),
            CLAIM,
        ],
        None,
        True,
    ),
}


@pytest.mark.waits_for_sweeps
@pytest.mark.parametrize("case", BLOCKED)
def test_who_finds_nothing_in_groups_may_rest_until_there_is_something(db, case):
    """Not for zero time, which would be a busy loop, and not for ever."""
    steps, kinds, is_awaited = BLOCKED[case]
    # Nobody is told when the one of another kind begins or expires.
    least = 0.9 if "of another kind" in case else 20
    for step in steps:
        db.execute(step)
    rests = []
    # At first it looks again soon: an end may not have been committed yet.
    for _ in range(30):
        assert (
            column(
                db,
                "select id from pgqueue.claim('q', 'w', 5, kinds => %s::text[])",
                kinds,
            )
            == []
        )
        rest = "select extract(epoch from pgqueue.rest('{q}', %s::text[], park => false))::float"
        rests.append(one(db, rest, kinds))
        if len(rests) > 1 and (rests[-1] is None or rests[-1] > least):
            break
        time.sleep(0.15)
    assert rests[-1] is None or rests[-1] > least, rests
    assert rests[-1] is not None or not is_awaited, rests


@pytest.mark.needs_hints  # a sweep over so many groups takes twenty seconds
@pytest.mark.parametrize("way", ["kinds", "full", "paused"])
def test_a_job_is_found_behind_many_groups_that_have_only_what_is_left_out(db, way):
    """As a worker of a rare kind, or where a cap of a kind is full."""
    if way == "full":
        db.execute("select pgqueue.configure('q', kind => 'x', max_running => 1)")
    elif way == "paused":
        db.execute("select pgqueue.pause('q', kind => 'x')")
    db.execute(
        "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[20000]), kind => 'x', "
        "group_keys => array(select 'group ' || n from generate_series(1, 20000) as n))"
    )
    if way == "full":
        assert len(column(db, "select id from pgqueue.claim('q', 'w')")) == 1
    rare = one(db, "select pgqueue.enqueue('q', kind => 'y', group_key => 'last')")
    ask = "select id from pgqueue.claim('q', 'w', 1, kinds => %s::text[])"
    found = soon(lambda: column(db, ask, ["y"] if way == "kinds" else None))
    assert found == [rare]


@pytest.mark.needs_hints  # a sweep over so many groups takes seconds
@pytest.mark.parametrize("part", [0.6, 0.35])
def test_claims_that_are_cancelled_get_past_many_groups_that_have_only_what_is_left_out(
    db, part
):
    for queue in ("p", "q"):
        for _ in range(2):
            db.execute(
                "select count(*) from pgqueue.enqueue_many(%s, array_fill('{}'::jsonb, array[50000]), kind => 'x', "
                "group_keys => array(select 'group ' || n %% 4000 from generate_series(1, 50000) as n))",
                (queue,),
            )
        db.execute(
            "select pgqueue.enqueue(%s, kind => 'y', group_key => 'last')", (queue,)
        )
    db.execute("select pgqueue.pause(kind => 'x')")
    began = time.monotonic()
    assert column(db, "select kind from pgqueue.claim('p', 'w')") == ["y"]
    took = time.monotonic() - began
    db.execute(f"set statement_timeout = '{part * took} s'")
    assert persist(db, "select kind from pgqueue.claim('q', 'w')") == ["y"], took


@pytest.mark.parametrize("what", ["paused", "of another kind"])
def test_what_comes_due_in_a_group_is_found_at_once_though_another_may_not_begin(
    db, what
):
    if what == "paused":
        db.execute("select pgqueue.pause('q', kind => 'x')")
    db.execute(NOW, ("x",))
    db.execute(ENQUEUE.format(", run_at => now() + interval '2.5 s'"), ("y",))
    late = (
        "select extract(epoch from clock_timestamp() - run_at)::float "
        "from pgqueue.claim('q', 'w', 1, kinds => %s::text[])"
    )
    kinds = None if what == "paused" else ["y"]
    (waited,) = soon(lambda: column(db, late, kinds))
    assert waited < 1


@pytest.mark.needs_hints  # it loses those that it means to lose
def test_a_group_gets_its_permits_beside_one_whose_permit_was_not_given_back(db):
    """A claim that finds a permit free after all looks no less for groups that have none."""
    enqueue = "select pgqueue.enqueue('q', group_key => %s)"
    claim = "select id, token from pgqueue.claim('q', 'w', %s)"
    db.execute("set pgqueue.lose_hints = 1")
    unknown = one(db, enqueue, "unknown")
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    db.execute("set pgqueue.lose_hints = 0")
    # No sweep comes between.
    db.execute(
        "select setval('pgqueue._cell_groups_due', pgqueue._since_2020(clock_timestamp() + interval '50 s'))"
    )
    first, second = [one(db, enqueue, "known") for _ in range(2)]
    ((id, token),) = db.execute(claim, [1]).fetchall()
    assert id == first
    db.execute("set pgqueue.lose_hints = 1")
    db.execute("select pgqueue.complete(%s, %s)", [id, token])
    db.execute("set pgqueue.lose_hints = 0")
    db.execute(
        "select pgqueue._insert_ticket('q', 'unknown', 0, clock_timestamp(), true)"
    )
    assert [id for id, _ in db.execute(claim, [10])] == [second]
    assert [id for id, _ in db.execute(claim, [10])] == [unknown]


def test_jobs_of_limited_groups_have_the_token_of_their_permits(db):
    """Or the sweep would take the permits for lost, and free them."""
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    for n in range(12):
        db.execute("select pgqueue.enqueue('q', group_key => %s)", [f"g{n % 4}"])
    for _ in range(4):  # each notes the lanes, so that the next goes the short way
        assert len(column(db, "select id from pgqueue.claim('q', 'w')")) == 1
    tokens = """
        select j.token = p.token from pgqueue.job as j
        join pgqueue.permit as p on p.job_id = j.id
    """
    assert column(db, tokens) == [True] * 4
    assert one(db, "select pgqueue._sweep_permits()") == 0


# Many sessions

OVER = """
    select group_key, count(*) from pgqueue.job
    where group_key is not null and lease_expires_at is not null
    group by 1 having count(*) > case group_key when 'one' then 1 else 2 end
"""
LEFT = "select id, token, run_at, lease_expires_at, permits from pgqueue.job"


def produce(conn: psycopg.Connection, seed: int) -> None:
    """Enqueue jobs, and write down which in the same transaction."""
    rng = random.Random(seed)
    groups = [None, "one", "two", "three", *(f"group {n}" for n in range(20))]
    for _ in range(120 if LONG else 30):
        with conn.transaction(force_rollback=rng.random() < 0.1):
            size = rng.choice([1, 1, 5, 20])
            conn.execute(
                "insert into sent select * from pgqueue.enqueue_many('q', array_fill('1'::jsonb, "
                "array[%s::int]), priority => %s, group_keys => %s::text[], run_at => now() + %s)",
                (
                    size,
                    rng.choice([0, 0, 5]),
                    rng.choices(groups, k=size),
                    rng.choice([None, "-1 hour", "50 ms"]),
                ),
            )


def work(conn: psycopg.Connection, rng: random.Random) -> None:
    """Claim once, and do one of the things that happen to each job."""
    with conn.transaction(force_rollback=rng.random() < 0.1) as transaction:
        jobs = conn.execute(
            "select id, token from pgqueue.claim('q', 'w', %s, lease => %s)",
            (rng.choice([1, 1, 5, 30]), rng.choice(["100 ms", "1 second"])),
        ).fetchall()
    over = conn.execute(OVER).fetchall()
    assert not over, over
    if not jobs:
        time.sleep(0.05)
    if transaction.force_rollback:
        return
    with conn.transaction(force_rollback=rng.random() < 0.05):
        for job in jobs:
            conn.execute(
                rng.choices(
                    [
                        "with done as (select pgqueue.complete(%(id)s, %(token)s)) "
                        "insert into effect select %(id)s from done",
                        "select pgqueue.fail(%(id)s, %(token)s, 'e', '0')",
                        "select pgqueue.fail(%(id)s, %(token)s, 'e', '50 ms')",
                        "select pgqueue.fail(%(id)s, %(token)s, 'e', permanent => true)",
                        "select pgqueue.release(array[%(id)s], array[%(token)s])",
                    ],
                    [80, 5, 5, 2, 8],
                )[0],
                dict(zip(["id", "token"], job, strict=True)),
            )


@pytest.mark.waits_for_sweeps
def test_limits_hold_and_nothing_is_lost_between_many_sessions(db, connect, lost_hints):
    db.execute("create table sent (job_id bigint primary key)")
    db.execute("create table effect (job_id bigint primary key)")
    db.execute(
        "select pgqueue.configure('q', group_limit => 2, group_on_retry => 'block', max_attempts => 1000)"
    )
    db.execute("select pgqueue.configure('q', group_key => 'one', group_limit => 1)")
    deadline = time.monotonic() + (240 if lost_hints else 60)
    pids: dict[int, int] = {}
    killed = itertools.count()

    def run(seed: int, produced: list[Future]) -> None:
        rng = random.Random(seed)
        conn = None
        while time.monotonic() < deadline:
            try:
                if conn is None or conn.broken:
                    conn = connect()
                    pids[seed] = conn.info.backend_pid
                if rng.random() < 0.01:
                    next(killed)
                    conn.execute(
                        "select pg_terminate_backend(%s)",
                        (rng.choice(list(pids.values())),),
                    )
                done = all(future.done() for future in produced)
                if done and not one(conn, "select count(*) from pgqueue.job"):
                    return
                work(conn, rng)
            except psycopg.OperationalError:
                assert conn.broken
            except psycopg.Error as error:
                assert error.sqlstate == "PQ002", error  # its lease had expired

    with ThreadPoolExecutor(7) as pool:
        produced = [pool.submit(produce, connect(), seed) for seed in range(3)]
        workers = [pool.submit(run, seed, produced) for seed in range(3, 7)]
        for future in produced + workers:
            future.result()
    assert db.execute(LEFT).fetchall() == [], "everything was served"
    assert next(killed) > 0
    completed = column(db, "select job_id from effect")
    dead = column(db, "select id from pgqueue.dead_job")
    assert sorted(completed + dead) == column(db, "select job_id from sent order by 1")


@pytest.mark.waits_for_sweeps
@pytest.mark.parametrize("limit", ["null", "1"])
def test_workers_of_one_kind_each_leave_nothing_in_many_groups(db, connect, limit):
    """What one has passed over, and others then believe to give nothing, is served when it may be."""
    groups = 3000 if LONG else 200
    db.execute(f"select pgqueue.configure('q', group_limit => {limit})")
    rng = random.Random(0)
    for _ in range(3):
        db.execute(
            "select count(pgqueue.enqueue('q', kind => k, group_key => 'g' || n, run_at => 'yesterday')) "
            "from unnest(%s::text[]) with ordinality as u (k, n)",
            (rng.choices("abc", [20, 4, 1], k=groups),),
        )
    deadline = time.monotonic() + 45

    def run(kind: str, size: int) -> None:
        conn = connect()
        claim = "select id, token from pgqueue.claim('q', 'w', %s, kinds => array[%s])"
        left = "select exists (select from pgqueue.job where kind = %s)"
        while one(conn, left, kind) and time.monotonic() < deadline:
            with conn.transaction(force_rollback=rng.random() < 0.05) as transaction:
                jobs = conn.execute(claim, (size, kind)).fetchall()
            if not jobs or transaction.force_rollback:
                time.sleep(0.02)
                continue
            for id, token in jobs:
                end = rng.choices(
                    [
                        "complete(%s, %s)",
                        "fail(%s, %s, 'e', '50 ms')",
                        "release(array[%s], array[%s])",
                    ],
                    [80, 5, 5],
                )
                conn.execute(f"select pgqueue.{end[0]}", (id, token))

    with ThreadPoolExecutor(5) as pool:
        for future in [
            pool.submit(run, *worker)
            for worker in [("a", 10), ("a", 3), ("b", 10), ("b", 1), ("c", 5)]
        ]:
            future.result()
    assert db.execute(LEFT).fetchall() == []


@pytest.mark.parametrize(
    "enqueue",
    [
        "enqueue('q', group_key => 'g')",
        "enqueue_many('q', '{1}', group_keys => '{g}')",
    ],
)
def test_no_job_overtakes_while_a_claim_has_the_ticket_of_its_group(
    db, connect, enqueue
):
    """Not where walks over groups are long, which this cell remembers, either."""
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    first, second = (
        one(db, "select pgqueue.enqueue('q', group_key => 'g')") for _ in range(2)
    )
    until = "pgqueue._since_2020(clock_timestamp() + '1 minute')"
    db.execute(f"select setval('pgqueue._cell_groups_slow', {until})")
    claimer = connect(autocommit=False)
    claim = "select id, token from pgqueue.claim('q', 'w')"
    id, token = claimer.execute(claim).fetchone()
    assert id == first
    db.execute(f"select pgqueue.{enqueue}")
    claimer.commit()
    db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert one(db, "select id from pgqueue.claim('q', 'w')") == second


@pytest.mark.needs_hints
@pytest.mark.parametrize("due_for", ["0", "1 second"])
def test_who_finds_a_ticket_locked_leaves_a_group_with_a_limit_of_one_for_a_moment(
    db, connect, due_for
):
    """Whoever has locked it is about to take its job, and many sessions may have been woken for that job."""
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    for _ in range(2):
        db.execute("select pgqueue.enqueue('q', group_key => 'g')")
    claimer, other = connect(autocommit=False), connect(autocommit=False)
    claim = "select id from pgqueue.claim('q', 'w')"
    for _ in range(100):
        due_at = one(
            db,
            "update pgqueue.ticket set at = clock_timestamp() - %s::interval returning at",
            due_for,
        )
        assert claimer.execute(claim).fetchone()
        other.execute("set local track_functions = 'pl'")
        assert other.execute(claim).fetchone() is None
        looks, is_late = other.execute(
            "select coalesce(pg_stat_get_xact_function_calls('pgqueue._serve_groups'::regproc), 0),"
            " clock_timestamp() > %s + interval '100 milliseconds'",
            (due_at,),
        ).fetchone()
        claimer.rollback(), other.rollback()
        if is_late == (due_for != "0"):
            break
    assert is_late == (due_for != "0")
    assert looks == is_late


@pytest.mark.needs_hints
def test_no_job_overtakes_when_one_of_higher_priority_ends_while_a_claim_looks(
    db, connect
):
    """Whether there is one is a look of its own: were it taken for each job, the last could be first."""
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    db.execute("select pgqueue.enqueue('q', group_key => 'g', priority => 5)")
    many = "enqueue_many('q', array_fill('1'::jsonb, array[%s]), group_keys => array_fill('g'::text, array[%s]))"
    first = one(db, f"select min(id) from pgqueue.{many} as id", 20000, 20000)
    worker, claimer = connect(autocommit=False), connect()
    worker.execute("select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')")
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(column, claimer, "select id from pgqueue.claim('q', 'w')")
        state = "select state from pg_stat_activity where pid = %s"
        # Or it was too quick to be seen.
        assert soon(
            lambda: claim.done() or one(db, state, claimer.info.backend_pid) == "active"
        )
        worker.commit()
        assert claim.result() in ([], [first])
    assert first == one(db, "select min(id) from pgqueue.job")
