"""A call that is interrupted at any moment changes nothing and leaves nothing; no role can delay one."""

import random
import statistics
import time
from collections.abc import Iterator

import psycopg
import pytest
from conftest import LONG, Connect, column, one
from psycopg import errors
from psycopg.conninfo import make_conninfo

# For each function, until either limit is reached.
ATTEMPTS = 1000 if LONG else 40
SECONDS = 6 if LONG else 1
PATIENCE = 200  # seconds, until enough were

TABLES = (
    "job", "dead_job", "run", "queue", "queue_in_force", "recent_key", "schedule", "step", "wait", "event"
)  # fmt: skip
# A few hundred jobs: ready in three lanes and three queues, leased, expired, scheduled, dead.
FILL = [
    """
    insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, unique_key, payload)
    select now() - interval '1 hour' + n * interval '1 us', now(), n % 3, n % 2 + 1,
        'q' || case when n <= 200 then '' else ' ' || n % 4 end, 'k',
        case when n % 2 = 0 then 'key ' || n end, '{}'
    from generate_series(1, 400) as n
    """,
    "select from pgqueue.claim('q', 'late', 30)",
    "update pgqueue.job set lease_expires_at = now() - interval '1 hour' where token is not null",
    "update pgqueue.job set cancelled_at = now() where token is not null and id % 5 = 0",
    "select from pgqueue.enqueue_many('late', array_fill('{}'::jsonb, array[200]), "
    "unique_keys => array(select 'late ' || n from generate_series(1, 200) as n), expires_at => '2020-01-01')",
    "select from pgqueue.enqueue_many('held', array_fill('{}'::jsonb, array[200]))",
    "select from pgqueue.claim('held', 'w', 200, '2 days')",
    "select from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[50]), run_at => '2999-01-01')",
    "select from pgqueue.enqueue_many('grave', array_fill('{}'::jsonb, array[200]))",
    "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('grave', 'w', 200)",
    "select pgqueue.pause('paused ' || n) from generate_series(1, 20) as n",
    # Of every second key the window has ended.
    """
    insert into pgqueue.recent_key (job_id, expires_at, queue, unique_key)
    select 0, now() + (n % 2 * 2 - 1) * interval '1 day', 'q', 'once ' || n
    from generate_series(1, 40) as n
    """,
    # Schedules that are due, fewer than a claim fires at most, some that are not, and some that are paused.
    """
    insert into pgqueue.schedule (due_at, next_slot, is_paused, every, name, queue, timezone, catch_up, payload)
    select case when n < 10 then now() - interval '1 day' when n < 40 then now() + interval '1 day' else 'infinity' end,
        now() - interval '1 day', n >= 40,
        '1 hour', 's ' || n, 'q', 'UTC', 'one', '{}'
    from generate_series(1, 60) as n
    """,
    # Runs that have been kept long enough.
    """
    update pgqueue.run set finished_at = finished_at - interval '10 days',
        slot = (extract(epoch from finished_at)::int / 86400 - 3) % 16
    """,
    """
    create function strike(pid int, seconds float8, how text) returns void language plpgsql as $$
    declare
        moment timestamptz := clock_timestamp() + interval '5 ms';
    begin
        -- From the beginning of its call. pg_sleep knows only milliseconds.
        loop
            perform pg_stat_clear_snapshot();
            exit when clock_timestamp() > moment
                or (select a.state = 'active' from pg_stat_get_activity(strike.pid) as a);
        end loop;
        moment := clock_timestamp() + make_interval(secs => seconds);
        while clock_timestamp() < moment loop null; end loop;
        if how = 'cancel' then
            perform pg_cancel_backend(pid);
        else
            perform pg_terminate_backend(pid);
        end if;
    end;
    $$
    """,
    *(f"create table saved_{table} as table pgqueue.{table}" for table in TABLES),
]
# An interrupted claim has moved the position nevertheless: for a moment the next claim may
# start after the jobs that it gave back.
FORGET = """
select setval(c.oid::regclass, 0) from pg_class as c
where starts_with(c.relname, '_cell_') and pg_sequence_last_value(c.oid::regclass) > 0
"""
RESTORE = FORGET + "".join(
    f"; delete from pgqueue.{table}; "
    f"insert into pgqueue.{table} overriding system value table saved_{table}"
    for table in TABLES
)
# Everything that is stored, except what is random, newly numbered, or depends on the clock.
STATE = """
select md5(string_agg(row_text, ' ' order by row_text)) from (
    select concat_ws('|',
        'job', least(j.id, (select max(s.id) + 1 from saved_job as s)), j.queue, j.kind, j.priority, j.attempt, j.max_attempts, j.worker,
        j.unique_key, j.payload, j.run_at > clock_timestamp(), j.token is null, j.claimed_at is null,
        j.lease_expires_at > clock_timestamp(), j.lease_expires_at > clock_timestamp() + interval '3 days',
        j.cancelled_at is null, j.cancel_reason, jsonb_array_length(j.errors), j.progress is null
    ) as row_text
    from pgqueue.job as j
    union all
    select concat_ws('|', 'dead', d.id, d.attempt, d.payload, d.error, jsonb_array_length(d.errors))
    from pgqueue.dead_job as d
    union all
    select concat_ws('|', 'run', r.job_id, r.attempt, r.outcome, r.result, r.error, r.worker)
    from pgqueue.run as r
    union all
    select concat_ws('|', 'queue', q) from pgqueue.queue as q
    union all
    select concat_ws('|', 'recent', k.unique_key, k.job_id > 0, k.expires_at > clock_timestamp())
    from pgqueue.recent_key as k
    union all
    select concat_ws('|', 'schedule', s.name, s.queue, s.is_paused, s.due_at > clock_timestamp(), s.last_slot is null)
    from pgqueue.schedule as s
    union all
    select concat_ws('|', 'step', s.job_id, s.name, s.value) from pgqueue.step as s
    union all
    select concat_ws('|', 'wait', w.job_id, w.event) from pgqueue.wait as w
    union all
    select concat_ws('|', 'event', e.name, e.payload) from pgqueue.event as e
) as r
"""
LOCKS = """
select classid::int, mode, count(*)::int from pg_locks
where locktype = 'advisory' and pid = %s group by 1, 2 order by 1, 2
"""
# A setting that was never set counts as empty.
SETTINGS = """
select name, setting from pg_settings
union all
select n.name, coalesce(current_setting(n.name, true), '')
from unnest(array['pgqueue.parked', 'pgqueue.notify']) as n (name)
order by 1
"""
HELD = "%(ids)s::bigint[], %(tokens)s::bigint[]"
TWENTY = "from generate_series(1, 20) as n"
SIXTY = "from generate_series(1, 60) as n"
HUNDRED = "from generate_series(1, 100) as n"
# Short calls are repeated in a statement, or most interrupts would come too late.
CALLS = {
    "enqueue": f"pgqueue.enqueue('q') {HUNDRED}",
    "enqueue with options": f"pgqueue.enqueue('q', '1', 'k', n, unique_key => 'new ' || n) {HUNDRED}",
    "enqueue with windows": f"pgqueue.enqueue('q', '1', unique_key => 'once ' || n, unique_for => '1 hour') {SIXTY}",
    "enqueue a duplicate": "pgqueue.enqueue('q', '1', unique_key => 'key ' || n * 2, on_duplicate => 'replace') "
    "from generate_series(41, 60) as n",
    "enqueue in place of late jobs": f"pgqueue.enqueue('late', unique_key => 'late ' || n) {SIXTY}",
    "enqueue_many": "pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[500]))",
    "enqueue_many with keys": "pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[200]), "
    "unique_keys => %(keys)s, on_duplicate => 'replace')",
    "claim": f"c.* {TWENTY} cross join pgqueue.claim('q ' || mod(n, 4), 'z') as c",
    "claim that recovers": "* from pgqueue.claim('q', 'z', 50)",
    "claim that cancels": "* from pgqueue.claim('late', 'z', 50)",
    "claim_from": "* from pgqueue.claim_from(array['q', 'q 1', 'q 2', 'q 3'], 'z', 120)",
    "extend": f"* from pgqueue.extend({HELD}, '30 days')",
    "progress": f"pgqueue.progress(id, token, 1, 2, 'm') from unnest({HELD}) as h (id, token)",
    "complete": f"pgqueue.complete(id, token, '1') from unnest({HELD}) as h (id, token) limit 100",
    "complete_many": f"pgqueue.complete_many({HELD})",
    "fail": f"pgqueue.fail(id, token, 'e') from unnest({HELD}) as h (id, token) limit 100",
    "finish": f"* from pgqueue.finish({HELD}, %(outcomes)s, %(texts)s)",
    "release": f"pgqueue.release({HELD})",
    "save_step": f"pgqueue.save_step(id, token, 's ' || n, '1') from unnest({HELD}) as h (id, token), generate_series(1, 3) as n limit 60",
    "suspend": f"pgqueue.suspend(id, token, 'e', now() + interval '1 hour') from unnest({HELD}) as h (id, token) limit 20",
    "emit": f"pgqueue.emit('e ' || n) {SIXTY}",
    "reap": "pgqueue.reap()",
    "maintain": "* from pgqueue.maintain()",
    "cancel": "pgqueue.cancel(id, 'r') from unnest(%(ready)s::bigint[]) as id",
    "cancel_many": "pgqueue.cancel_many('q')",
    "redrive": "pgqueue.redrive('grave')",
    "redrive_job": "pgqueue.redrive_job(id, '[]') from unnest(%(dead)s::bigint[]) as id limit 20",
    "discard": "pgqueue.discard(id) from unnest(%(dead)s::bigint[]) as id",
    "discard_many": f"pgqueue.discard_many('grave', max_jobs => 5) {SIXTY}",
    "purge": f"pgqueue.purge('q' || coalesce(' ' || nullif(n, 20), '')) {TWENTY}",
    "pause": f"pgqueue.pause('q ' || n) {SIXTY}",
    "resume": f"pgqueue.resume('paused ' || n) {TWENTY}",
    "run_now": "pgqueue.run_now(id) from unnest(%(scheduled)s::bigint[]) as id",
    "reprioritize": "pgqueue.reprioritize(id, 50) from unnest(%(ready)s::bigint[]) as id",
    "schedule": f"pgqueue.schedule('s ' || n + 50, 'q', '@daily', timezone => 'Europe/Berlin') {TWENTY}",
    "unschedule": f"pgqueue.unschedule('s ' || n) {SIXTY}",
    "pause_schedule": f"pgqueue.pause_schedule('s ' || n) {SIXTY}",
    "resume_schedule": f"pgqueue.resume_schedule('s ' || n) {SIXTY}",
    "run_schedule": f"pgqueue.run_schedule('s ' || n) {SIXTY}",
    "configure": f"pgqueue.configure('q ' || n, '1 minute') {SIXTY}",
}
REST = "pgqueue.rest(%(queues)s)"
PARKED = (7366514, "ShareLock")


@pytest.fixture(scope="module")
def dsn(template: str) -> Iterator[str]:
    """Name one database for all; each test begins with its first state."""
    name = "pgqueue_interrupts"
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"drop database if exists {name} with (force)")
        admin.execute(f"create database {name} template {template}")
        with psycopg.connect(dbname=name, autocommit=True) as db:
            for step in FILL:
                db.execute(step)
        yield make_conninfo(dbname=name)
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture
def given(db: psycopg.Connection) -> dict:
    """The arguments of the calls."""
    db.execute(RESTORE)
    db.execute("vacuum")
    leases = db.execute(
        "select id, token from pgqueue.job where worker = 'w'"
    ).fetchall()

    def some(of: str, where: str, most: int = 20) -> list[int]:
        query = f"select id from pgqueue.{of} where {where} order by id limit {most}"
        return column(db, query)

    return {
        "ids": [id for id, _ in leases],
        "tokens": [token for _, token in leases],
        "outcomes": ["complete", "fail", "reject", "release"] * 50,
        "texts": ["1", "e", "e", None, "{", "e", "e", None] * 25,
        "keys": [f"key {n}" for n in range(100, 300)],
        "ready": some("job", "queue = 'q' and token is null"),
        "scheduled": some("job", "run_at > now()"),
        "dead": some("dead_job", "queue = 'grave'", 200),
    }


class Victim:
    """A session that is interrupted again and again."""

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.other = connect()
        self.striker = connect()
        self.attempts = self.interrupted = 0
        self.begin()

    def begin(self) -> None:
        self.conn = self.connect()
        self.pid = self.conn.info.backend_pid
        self.conn.execute("load 'plpgsql'")  # which defines settings
        self.settings = self.conn.execute(SETTINGS).fetchall()

    def locks(self) -> list[tuple]:
        """The advisory locks that it holds: class, mode and number."""
        return self.other.execute(LOCKS, (self.pid,)).fetchall()

    def attempt(self, call: str, given: dict, reach: float) -> str | None:
        """Call, and interrupt it at a random moment; return where that was, or None if it was too late."""
        self.attempts += 1
        how = random.choices(["cancel", "terminate", "timeout"], [90, 3, 7])[0]
        moment = random.uniform(0, reach)
        if how == "timeout":
            # In a new session, which has no plans yet.
            self.conn.close()
            self.begin()
            self.conn.execute(f"set statement_timeout = {1 + int(moment * 3000)}")
        else:
            strike = f"select strike({self.pid}, {moment}, '{how}')"
            self.striker.pgconn.send_query(strike.encode())
            self.striker.pgconn.flush()
        where = None
        try:
            self.conn.execute(f"select {call}", given)
        except psycopg.OperationalError as error:
            assert error.sqlstate in ("57014", "57P01", None), error
            self.interrupted += 1
            where = error.diag.context or "outside"
        self.is_new = how == "terminate"
        if how == "timeout":
            self.reset_timeout()
            return where
        while self.striker.pgconn.get_result():
            pass
        if how == "terminate":
            alive = "select count(*) from pg_stat_activity where pid = %s"
            while one(self.other, alive, self.pid) or self.locks():
                time.sleep(0.001)  # for ever, if it left any
            self.conn.close()
            self.begin()
        return where

    def reset_timeout(self) -> None:
        try:
            self.conn.execute("reset statement_timeout")
        except errors.QueryCanceled:
            self.reset_timeout()

    def changed_settings(self) -> set[tuple[str, str]]:
        return set(self.conn.execute(SETTINGS).fetchall()) ^ set(self.settings)


def interrupted(
    victim: Victim, call: str, given: dict, usual: float
) -> Iterator[str | None]:
    """Try the call again and again, until many were interrupted."""
    began, reach = time.monotonic(), usual
    while victim.attempts < ATTEMPTS or victim.interrupted <= 30:
        # A busy machine needs longer.
        limit = SECONDS if victim.interrupted > 30 else PATIENCE
        if time.monotonic() > began + limit:
            break
        where = victim.attempt(call, given, reach)
        # Its calls take longer, too: aim later while all are interrupted, earlier when not.
        reach = max(reach * (1.03 if where else 0.95), usual / 2)
        yield where
    assert victim.interrupted > 30


def seconds(conn: psycopg.Connection, call: str, given: dict) -> float:
    began = time.monotonic()
    conn.execute(f"select {call}", given)
    return time.monotonic() - began


def works_on(connect: Connect, name: str = "q") -> None:
    """Check that another session can enqueue, claim, rest and maintain without waiting."""
    db = connect()
    db.execute("set statement_timeout = '5s'")
    id = one(db, "select pgqueue.enqueue(%s, priority => 100)", name)
    keys = ["key 100", "new", "key 102"]
    db.execute(
        "select pgqueue.enqueue_many(%s, array_fill('1'::jsonb, array[3]), "
        "unique_keys => %s, on_duplicate => 'replace')",
        (name, keys),
    )
    job = db.execute("select id, token from pgqueue.claim(%s, 'z')", (name,)).fetchone()
    assert job is not None and job[0] == id
    db.execute("select pgqueue.extend(array[%s], array[%s])", job)
    db.execute("select pgqueue.release(array[%s], array[%s])", job)
    assert one(db, "select pgqueue.rest(array[%s])", name).total_seconds() == 0
    db.execute("select pgqueue.maintain()")
    db.close()


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_changes_nothing_and_leaves_no_lock_or_setting(
    connect, db, given, name
):
    call, victim = CALLS[name], Victim(connect)
    sleeper = connect()
    before = one(db, STATE)
    times = []
    for _ in range(5):
        times.append(seconds(victim.conn, call, given))
        done = one(db, STATE)
        db.execute(RESTORE)
    assert done != before == one(db, STATE)
    for where in interrupted(victim, call, given, statistics.median(times)):
        assert victim.locks() == []
        assert victim.changed_settings() == set()
        assert one(db, STATE) == (before if where else done), where
        db.execute(FORGET if where else RESTORE)
        if victim.attempts % 20 == 0:
            # Half of the time a session is parked, half of the time none is.
            sleeper.execute(
                "select pgqueue.rest(array['q', 'q 1', 'held', 'paused'])"
                if victim.attempts % 40
                else "select pg_advisory_unlock_all()"
            )
            db.execute(RESTORE)  # a rest fires schedules
    works_on(connect)


@pytest.mark.sample(2)
@pytest.mark.parametrize("queues", [20, 500])
@pytest.mark.parametrize("parks", ["for the first time", "again"])
def test_an_interrupted_rest_does_not_park_the_session(
    connect, db, given, queues, parks
):
    given["queues"] = ["q 1", *(f"queue {n}" for n in range(1, queues))]
    victim = Victim(connect)
    usual = statistics.median(seconds(victim.conn, REST, given) for _ in range(5))
    whole = victim.locks()
    assert whole and {lock[:2] for lock in whole} == {PARKED}
    for where in interrupted(victim, REST, given, usual):
        if victim.is_new:
            assert victim.locks() == []
        elif where is None:
            assert victim.locks() == whole
        elif "pgqueue.rest" in where:
            # It had not parked yet, or had undone it.
            assert victim.locks() in ([], whole if parks == "again" else []), where
        else:
            # Before the function began, or after it ended and could no longer know.
            assert victim.locks() in ([], whole)
        if parks == "again":
            victim.conn.execute(f"select {REST}", given)
        else:
            victim.conn.execute("select pg_advisory_unlock_all()")
            victim.conn.execute("reset pgqueue.parked")
    victim.conn.execute("reset pgqueue.parked")
    assert victim.changed_settings() == set()
    works_on(connect, "q 1")


def test_a_rest_that_fails_does_not_park_the_session(connect, db, given):
    owner = connect()
    db.execute("set lock_timeout = '50ms'")
    with owner.transaction(), pytest.raises(errors.LockNotAvailable):
        owner.execute("lock table pgqueue.job")
        db.execute("select pgqueue.rest(array['q'])")
    assert db.execute(LOCKS, (db.info.backend_pid,)).fetchall() == []


def test_an_await_that_fails_leaves_no_lock_behind(connect, db, given):
    owner = connect()
    (id, *_) = given["ready"]
    db.execute("select pgqueue.await(%s)", (id,))
    held = [(7366516, "ShareLock", 2)]
    assert db.execute(LOCKS, (db.info.backend_pid,)).fetchall() == held
    db.execute("set lock_timeout = '50ms'")
    with owner.transaction(), pytest.raises(errors.LockNotAvailable):
        owner.execute("lock table pgqueue.job")
        db.execute("select pgqueue.await(%s)", (id,))
    assert db.execute(LOCKS, (db.info.backend_pid,)).fetchall() == []


def test_a_role_without_grants_that_holds_every_advisory_lock_delays_no_call(
    connect, db, given, role
):
    with connect(user=role) as stranger:
        for family in (7366513, 7366514, 7366516):
            stranger.execute(
                "select pg_advisory_lock(%s, f) from generate_series(0, 256) as f",
                (family,),
            )
        db.execute("set statement_timeout = '5s'")
        for call in CALLS.values():
            db.execute(f"select {call}", given)
            db.execute(RESTORE)
        listener = connect()
        listener.execute("listen pgqueue")
        # Not null, which would mean that every enqueue notifies.
        assert (
            0
            <= one(listener, "select pgqueue.rest(array['empty'])").total_seconds()
            <= 5
        )
        listener.execute("set statement_timeout = '5s'")
        db.execute("select pgqueue.enqueue('empty')")
        assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1
        works_on(connect)
