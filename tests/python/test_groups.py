"""Groups: how many of their jobs run at once, and in what order, against a model of the rules."""

import itertools
from dataclasses import dataclass
from datetime import datetime

import psycopg
from conftest import column, one
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

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
    has_slot: bool = False

    @property
    def waits(self) -> bool:
        return self.token is None

    @property
    def keeps_slot(self) -> bool:
        """It waits for its retry, and no other job of its group runs in its place."""
        return self.waits and self.has_slot

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

    def limit(self, group: str | None) -> int | None:
        """A group has its own limit, or else that of the queue; no group has none."""
        return self.limits.get(group, self.limits.get(None)) if group else None

    def of(self, group: str | None) -> list[Job]:
        return [job for job in self.jobs.values() if job.group == group]

    def end(self, job: Job, to: str) -> None:
        """End an attempt. Cancelled jobs go, whatever was said; dead ones are kept elsewhere."""
        to = "gone" if job.is_cancelled else to
        job.token, job.is_expired = None, False
        if to in ("gone", "dead"):
            del self.jobs[job.id]
        if to == "dead":
            self.dead[job.id] = job
        job.has_slot = (
            job.has_slot
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
            keepers = [job for job in waiting if job.keeps_slot]
            later = [job for job in self.of(group) if job.keeps_slot and not job.is_due]
            held = self.running(group) + len(later)
            limit = self.limit(group)
            if keepers and held < limit:
                # One that waited for its retry comes first: it has its slot.
                free.append(keepers[0])
            elif not keepers and held < limit:
                free.append(waiting[0])
            elif keepers and held + len(keepers) < limit:
                free += [job for job in waiting if not job.keeps_slot][:1]
        return [job for job in free if kinds is None or job.kind in kinds]


class Groups(RuleBasedStateMachine):
    def __init__(self, db: psycopg.Connection) -> None:
        super().__init__()
        self.db = db
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
        return self.db.execute(
            "select id, token from pgqueue.claim(%s, 'w', %s, lease => '1 hour', kinds => %s::text[])",
            (self.queue, size, kinds),
        ).fetchall()

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
            assert job.waits and job.is_due, f"{job} was claimed"
            assert kinds is None or job.kind in kinds
            job.token, job.attempt = token, job.attempt + 1
            jobs.append((job, job.has_slot))
            job.has_slot = job.has_slot or model.limit(job.group) is not None
        for job, is_retry in jobs:
            limit = model.limit(job.group)
            if limit is None:
                continue
            running = model.running(job.group)
            assert running <= limit, f"{running} of {job.group} run"
            if is_retry:
                continue
            kept = sum(j.waits and j.keeps_slot for j in model.of(job.group))
            assert running + kept <= limit, f"{job} has the slot of another"
            for other in waited:
                if (
                    other.group == job.group
                    and other.waits
                    and other.is_due
                    and not other.keeps_slot
                ):
                    assert job.place < other.place, f"{job} overtook {other}"
        if not claimed:
            self.meddled = False
        if len(claimed) < size and not recovered and not self.meddled:
            left = model.claimable(kinds)
            assert not left, (left, claimed, size, dump(self))
        return len(claimed)

    @rule(size=SIZES, kinds=ASKED)
    def claim_and_roll_back(self, size, kinds) -> None:
        with self.db.transaction(force_rollback=True):
            self.ask(size, kinds)

    @rule(pick=PICK, is_expired=st.booleans())
    def complete(self, pick, is_expired) -> None:
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
                job.has_slot = True

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
                    break
            assert not self.model.claimable(None)
            rest = self.db.execute(
                "select pgqueue.rest(array[%s])", (self.queue,)
            ).fetchone()[0]
            assert rest is None or rest.total_seconds() > 0
        finally:
            for table, queue in [
                ("job", "queue"),
                ("dead_job", "queue"),
                ("slot", "queue"),
                ("recall", "queue"),
                ("queue", "name"),
            ]:
                self.db.execute(
                    f"delete from pgqueue.{table} where {queue} = %s", (self.queue,)
                )


def dump(self):
    def q(t):
        return list(self.db.execute(t, {"q": self.queue}))

    rows = q(
        "select id, kind, priority, group_key, turn::text, run_at::text, slot, token from pgqueue.job where queue = %(q)s order by priority desc, coalesce(turn, run_at)"
    )
    rows += q("select 'noted', pgqueue._noted_lanes(%(q)s, clock_timestamp())")
    rows += q("""select 'position', l, r, v - pgqueue._since_2020(clock_timestamp()) as us, pg_sequence_last_value(pgqueue._cell(r, 1)) >> 12
        from (select l, r, pg_sequence_last_value(pgqueue._cell(r, 0)) # ((k >> 20 & 4095) << 51) as v from unnest(array[2, 0, -1, 1002, 1000, 999]) as l, lateral (select hashtextextended(%(q)s, l)) as h (k),
        lateral unnest(array[k & 127, k >> 7 & 127]::int[]) as r) as x where v >> 51 = 0""")
    rows += q("select 'slot', * from pgqueue.slot where queue = %(q)s")
    print("DUMP", *rows, sep="\n")
    return ""


def test_groups_are_served_as_the_model_says(db):
    run_state_machine_as_test(
        lambda: Groups(db),
        settings=settings(
            max_examples=int(__import__("os").environ.get("EX", 60)),
            stateful_step_count=int(__import__("os").environ.get("ST", 40)),
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
        ),
    )
