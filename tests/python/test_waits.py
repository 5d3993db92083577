"""Waiting for jobs to end, decided between two sessions: each wait ends, exactly once."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pgqueue
import psycopg
import pytest
from cluster import Cluster
from conftest import LONG, Connect, column, one
from pgqueue import waiting
from psycopg import IsolationLevel, errors
from test_plans import pages
from worker_harness import wait_until, where

pytestmark = pytest.mark.loses_hints
TIE = "select done from pgqueue.maintain() where task = 'tie loose ends'"
pytest_plugins = ["worker_harness"]

AFTER = "select pgqueue.enqueue('after', after => array[%s::bigint])"

ENDS = {
    "complete": "select pgqueue.complete(%s, %s)",
    "complete_many": "select pgqueue.complete_many(array[%s], array[%s])",
    "fail": "select pgqueue.fail(%s, %s, 'e', permanent => true)",
    "finish": "select pgqueue.finish(array[%s], array[%s], '{reject}')",
}


def claimed(db: psycopg.Connection, **options) -> tuple[int, int]:
    db.execute("select pgqueue.enqueue('q', batch_id => %s)", [options.get("batch_id")])
    return db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()


def two_that_hold_up(db: psycopg.Connection, what: str) -> list[tuple[int, int]]:
    """The leases of two jobs for which a job waits, or which are a batch."""
    batch = None
    if what == "batch":
        batch = one(db, "select pgqueue.create_batch('done')")
    leases = [claimed(db, batch_id=batch) for _ in range(2)]
    if what == "batch":
        db.execute("select pgqueue.close_batch(%s)", [batch])
    else:
        ids = [id for id, _ in leases]
        db.execute("select pgqueue.enqueue('after', after => %s)", [ids])
    return leases


def with_old_snapshot(connect: Connect) -> psycopg.Connection:
    """A session in REPEATABLE READ that sees nothing that comes from now on."""
    old = connect(autocommit=False)
    old.isolation_level = IsolationLevel.REPEATABLE_READ
    old.execute("select 1")
    return old


def at_rest(db: psycopg.Connection) -> bool:
    """Whether there is nothing to look at, and no tie of a job that has ended."""
    ties = "select count(*) from pgqueue.dependency where job_id not in (select id from pgqueue.job)"
    ends = "select count(*) from pgqueue.loose_end"
    return one(db, ends) == one(db, TIE) == one(db, ties) == 0


def complete_some(db: psycopg.Connection, most: int) -> None:
    db.execute(
        "select count(*) from ("
        " select array_agg(c.id) as ids, array_agg(c.token) as tokens from pgqueue.claim('q', 'w', %s) as c"
        ") as c, lateral pgqueue.complete_many(c.ids, c.tokens)",
        [most],
    )


def state(db: psycopg.Connection, id: int) -> str:
    return one(db, "select state from pgqueue.status(%s)", id)


# The last two


@pytest.mark.parametrize("verb", ENDS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_job_runs_when_the_last_two_that_it_waits_for_end_at_once(
    db, connect, verb, order
):
    leases = [claimed(db) for _ in range(2)]
    waiter = one(
        db,
        "select pgqueue.enqueue('after', after => %s, if_dead => 'run')",
        [id for id, _ in leases],
    )
    sessions = [connect(autocommit=False) for _ in range(2)]
    for session, lease in zip(sessions, leases, strict=True):
        session.execute(ENDS[verb], lease)
    for place in order:
        assert state(db, waiter) == "blocked"
        sessions[place].commit()
    assert one(db, TIE) > 0
    assert state(db, waiter) == "ready"
    assert one(db, TIE) == 0


def test_a_job_whose_last_two_ends_meet_is_found_by_the_next_claim_or_rest(db, connect):
    for look in ("select from pgqueue.claim('z', 'w')", "select pgqueue.rest('{z}')"):
        leases = [claimed(db) for _ in range(2)]
        waiter = one(
            db, "select pgqueue.enqueue('after', after => %s)", [id for id, _ in leases]
        )
        sessions = [connect(autocommit=False) for _ in range(2)]
        for session, lease in zip(sessions, leases, strict=True):
            session.execute(ENDS["complete"], lease)
        for session in sessions:
            session.commit()
        wait_until(lambda: db.execute(look) and state(db, waiter) == "ready", 5)  # noqa: B023


@pytest.mark.needs_hints
@pytest.mark.parametrize("waits", ["a job", "a callback"])
def test_who_sleeps_is_told_of_two_last_ends_that_meet(db, connect, waits):
    """Neither of those who end them claims anything afterwards."""
    if waits == "a job":
        leases = [claimed(db) for _ in range(2)]
        ids = [id for id, _ in leases]
        db.execute("select pgqueue.enqueue('after', after => %s)", (ids,))
    else:
        batch = one(db, "select pgqueue.create_batch('after')")
        leases = [claimed(db, batch_id=batch) for _ in range(2)]
        db.execute("select pgqueue.close_batch(%s)", [batch])
    sleeper = connect()
    sleeper.execute("listen pgqueue")
    wait_until(
        lambda: not one(sleeper, "select pgqueue.rest('{after}') < interval '9 s'")
    )
    sessions = [connect(autocommit=False) for _ in range(2)]
    for session, lease in zip(sessions, leases, strict=True):
        session.execute(ENDS["complete"], lease)
    for session in sessions:
        session.commit()
    assert list(sleeper.notifies(timeout=9, stop_after=1))
    wait_until(
        lambda: (
            one(sleeper, "select pgqueue.rest('{after}') < interval '1 s'")
            and column(sleeper, "select id from pgqueue.claim('after', 'w')")
        )
    )


@pytest.mark.needs_hints
@pytest.mark.parametrize(
    "limit", ["group_limit => 1", "group_key => '*', rate_limit => 9"]
)
@pytest.mark.parametrize("is_late", [False, True])
def test_the_first_job_of_a_group_with_a_limit_can_be_claimed_as_soon_as_it_is_freed(
    db, limit, is_late
):
    lease = claimed(db)
    if not is_late:
        db.execute(f"select pgqueue.configure('after', {limit})")
    enqueue = "select pgqueue.enqueue('after', group_key => 'new', after => %s)"
    waiter = one(db, enqueue, [lease[0]])
    if is_late:
        db.execute(f"select pgqueue.configure('after', {limit})")
    db.execute(ENDS["complete"], lease)
    assert one(db, "select id from pgqueue.claim('after', 'w')") == waiter


@pytest.mark.parametrize("verb", ENDS)
@pytest.mark.parametrize("rolls_back", [False, True])
def test_a_batch_whose_last_two_jobs_end_at_once_has_one_callback(
    db, connect, verb, rolls_back
):
    batch = one(db, "select pgqueue.create_batch('done')")
    leases = [claimed(db, batch_id=batch) for _ in range(2)]
    db.execute("select pgqueue.close_batch(%s)", [batch])
    first, second = (connect(autocommit=False) for _ in range(2))
    first.execute(ENDS[verb], leases[0])
    second.execute(ENDS[verb], leases[1])
    first.rollback() if rolls_back else first.commit()
    second.commit()
    if rolls_back:
        db.execute(TIE)
        assert one(db, "select count(*) from pgqueue.job where queue = 'done'") == 0
        db.execute(ENDS[verb], leases[0])
    db.execute(TIE)
    assert one(db, "select count(*) from pgqueue.job where queue = 'done'") == 1
    counts = one(db, "select payload -> 'batch' from pgqueue.job where queue = 'done'")
    assert counts["completed"] + counts["dead"] == 2


@pytest.mark.parametrize("closes_first", [False, True])
def test_a_batch_that_is_closed_while_its_last_job_ends_has_one_callback(
    db, connect, closes_first
):
    batch = one(db, "select pgqueue.create_batch('done')")
    lease = claimed(db, batch_id=batch)
    closer, ender = (connect(autocommit=False) for _ in range(2))
    steps = [
        (closer, "select pgqueue.close_batch(%s)", [batch]),
        (ender, ENDS["complete"], lease),
    ]
    for session, query, args in steps if closes_first else reversed(steps):
        session.execute(query, args)
    for session in (closer, ender):
        assert one(db, "select count(*) from pgqueue.job where queue = 'done'") == 0
        session.commit()
    db.execute(TIE)
    assert one(db, "select count(*) from pgqueue.job where queue = 'done'") == 1


def test_a_job_that_joins_a_batch_while_the_last_one_ends_holds_it_up(db, connect):
    batch = one(db, "select pgqueue.create_batch('done')")
    lease = claimed(db, batch_id=batch)
    db.execute("select pgqueue.close_batch(%s)", [batch])
    joiner = connect(autocommit=False)
    joiner.execute("select pgqueue.enqueue('q', batch_id => %s)", [batch])
    db.execute(ENDS["complete"], lease)
    joiner.commit()
    db.execute(TIE)
    assert one(db, "select count(*) from pgqueue.job where queue = 'done'") == 0
    lease = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()
    db.execute(ENDS["complete"], lease)
    assert one(db, "select completed from pgqueue.batches") == 2


@pytest.mark.needs_hints  # the end finishes the batch
def test_a_job_that_joins_while_its_batch_finishes_waits_and_is_refused(
    db, connect, blocked
):
    batch = one(db, "select pgqueue.create_batch('done')")
    lease = claimed(db, batch_id=batch)
    db.execute("select pgqueue.close_batch(%s)", [batch])
    joiner = connect()
    with ThreadPoolExecutor(1) as pool:
        with db.transaction():
            db.execute(ENDS["complete"], lease)
            joined = pool.submit(
                joiner.execute, "select pgqueue.enqueue('q', batch_id => %s)", [batch]
            )
            blocked(joiner)
        with pytest.raises(errors.ObjectNotInPrerequisiteState):
            joined.result()


@pytest.mark.needs_hints  # the end finishes the batch
def test_a_job_that_joins_while_its_batch_is_closed_and_finishes_is_refused(
    db, connect, blocked
):
    """Who shares the lock for keys is given an old version of the row, unless a key changes."""
    batch = one(db, "select pgqueue.create_batch('done')")
    first = one(db, "select pgqueue.enqueue('q', batch_id => %s)", batch)
    joiner = connect()
    join = "select pgqueue.enqueue('q', batch_id => %s)"
    with ThreadPoolExecutor(1) as pool:
        with db.transaction():
            db.execute("select pgqueue.close_batch(%s)", [batch])
            second = one(db, join, batch)
            db.execute("select pgqueue.cancel(unnest(%s))", [[first, second]])
            joined = pool.submit(joiner.execute, join, [batch])
            blocked(joiner)
        with pytest.raises(errors.ObjectNotInPrerequisiteState):
            joined.result()


def test_a_job_that_joins_while_its_batch_is_closed_again_is_refused_or_holds_it_up(
    db, connect, blocked
):
    """Who waits for the version of a savepoint that is rolled back must wait for the next one as well."""
    joiner, closer = connect(), connect(autocommit=False)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(10):
            batch = one(db, "select pgqueue.create_batch('done')")
            close = f"select pgqueue.close_batch({batch})"
            closer.execute(f"savepoint before; {close}")
            join = "select pgqueue.enqueue('q', batch_id => %s)"
            joined = pool.submit(joiner.execute, join, [batch])
            blocked(joiner)
            closer.execute(f"rollback to before; {close}")
            closer.commit()
            with contextlib.suppress(errors.ObjectNotInPrerequisiteState):
                joined.result()
                db.execute(TIE)
                state = "select state from pgqueue.batches where id = %s"
                assert one(db, state, batch) == "closed"


# Enqueued while what it waits for ends


@pytest.mark.sample(10)
@pytest.mark.parametrize("verb", ENDS)
@pytest.mark.parametrize("commits_first", ["enqueue", "end"])
@pytest.mark.parametrize("begins", ["enqueue", "end"])
def test_a_job_that_is_enqueued_while_what_it_waits_for_ends_is_not_forgotten(
    db, connect, verb, begins, commits_first
):
    lease = claimed(db)
    sessions = {name: connect(autocommit=False) for name in ("enqueue", "end")}
    calls = {
        "enqueue": (AFTER, lease[:1]),
        "end": (ENDS[verb], lease),
    }
    for name in sorted(calls, key=lambda name: name != begins):
        cursor = sessions[name].execute(*calls[name])
        if name == "enqueue":
            waiter = cursor.fetchone()[0]
    for name in sorted(sessions, key=lambda name: name != commits_first):
        sessions[name].commit()
    db.execute(TIE)
    assert state(db, waiter) == (
        "ready" if verb.startswith("complete") else "cancelled"
    )
    db.execute(TIE)
    assert one(db, "select count(*) from pgqueue.loose_end") == 0


def test_a_job_that_is_enqueued_while_an_end_is_rolled_back_waits_on(db, connect):
    lease = claimed(db)
    ender = connect(autocommit=False)
    ender.execute(ENDS["complete"], lease)
    waiter = one(db, AFTER, lease[0])
    ender.rollback()
    db.execute(TIE)
    assert state(db, waiter) == "blocked"
    db.execute(ENDS["complete"], lease)
    assert state(db, waiter) == "ready"


@pytest.mark.parametrize("opens", ["enqueue", "end"])
def test_a_look_while_the_other_is_open_is_not_the_last(db, connect, opens):
    lease = claimed(db)
    other = connect(autocommit=False)
    enqueue, end = (other, db) if opens == "enqueue" else (db, other)
    if opens == "end":
        end.execute(ENDS["complete"], lease)
    waiter = one(enqueue, AFTER, lease[0])
    if opens == "enqueue":
        end.execute(ENDS["complete"], lease)
    db.execute(TIE)
    other.commit()
    db.execute(TIE)
    assert state(db, waiter) == "ready"
    assert at_rest(db)


def test_a_job_that_waits_for_one_that_is_cancelled_with_another_is_not_forgotten(
    db, connect
):
    lease = claimed(db)
    second = one(db, AFTER, lease[0])
    producer = connect(autocommit=False)
    third = one(producer, AFTER, second)
    db.execute(ENDS["fail"], lease)
    producer.commit()
    db.execute(TIE)
    assert [state(db, id) for id in (second, third)] == ["cancelled", "cancelled"]
    assert at_rest(db)


@pytest.mark.parametrize("verb", ["complete", "fail"])
@pytest.mark.parametrize("last", ["complete", "fail", "cancel"])
def test_a_look_goes_on_until_no_end_is_open_that_may_not_have_seen_who_waits(
    db, connect, verb, last
):
    first = claimed(db)
    second = one(db, "select pgqueue.enqueue('q')")
    ender = connect(autocommit=False)
    ender.execute(ENDS[verb], first)
    waiter = one(db, "select pgqueue.enqueue('after', after => %s)", [first[0], second])
    db.execute(TIE)
    ender.commit()
    db.execute(TIE)
    assert state(db, waiter) == ("cancelled" if verb == "fail" else "blocked")
    if last == "cancel" and verb == "complete":
        db.execute("select pgqueue.cancel(%s)", [waiter])
    lease = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()
    db.execute(ENDS["fail" if last == "fail" else "complete"], lease)
    db.execute(TIE)
    assert at_rest(db)


@pytest.mark.parametrize("looks_first", [False, True])
@pytest.mark.parametrize("end", ["purge('q')", "fail(%s, %s, 'e', permanent => true)"])
def test_a_job_that_is_locked_when_one_dies_that_it_waits_for_never_runs(
    db, connect, end, looks_first
):
    """With keep_runs 0 nobody else remembers what was cancelled."""
    db.execute("select pgqueue.configure('q', keep_runs => 0)")
    last = claimed(db)
    if "%s" in end:
        dies = claimed(db)
    else:
        dies = (one(db, "select pgqueue.enqueue('q')"),)
    waiter = one(db, "select pgqueue.enqueue('after', after => %s)", [dies[0], last[0]])
    holder = connect(autocommit=False)
    holder.execute("select pgqueue.reprioritize(%s, 7)", [waiter])
    db.execute(f"select pgqueue.{end}", dies if "%s" in end else [])
    holder.commit()
    if looks_first:
        db.execute(TIE)
    db.execute(ENDS["complete"], last)
    db.execute(TIE)
    assert state(db, waiter) == "cancelled"
    assert at_rest(db)


@pytest.mark.parametrize("end", ["cancel(%s)", "purge('q')", "cancel_many('q')"])
def test_an_end_with_an_old_snapshot_ends_waits_as_well(db, connect, end):
    first = one(db, "select pgqueue.enqueue('q')")
    old = with_old_snapshot(connect)
    waiter = one(db, AFTER, first)
    old.execute(f"select pgqueue.{end}", [first] if "%s" in end else [])
    old.commit()
    db.execute(TIE)
    assert state(db, waiter) == "cancelled"
    assert at_rest(db)


def test_a_batch_that_is_closed_finishes_when_an_old_snapshot_ends_its_last_job(
    db, connect
):
    batch = one(db, "select pgqueue.create_batch('done')")
    member = one(db, "select pgqueue.enqueue('q', batch_id => %s)", batch)
    old = with_old_snapshot(connect)
    db.execute("select pgqueue.close_batch(%s)", [batch])
    db.execute(TIE)
    old.execute("select pgqueue.cancel(%s)", [member])
    old.commit()
    db.execute(TIE)
    assert (
        one(db, "select cancelled from pgqueue.batches where state = 'finished'") == 1
    )
    assert at_rest(db)


def test_who_enqueues_with_an_old_snapshot_waits_for_what_it_does_not_see(db, connect):
    old = with_old_snapshot(connect)
    lease = claimed(db)
    waiter = one(old, AFTER, lease[0])
    old.commit()
    db.execute(TIE)
    assert state(db, waiter) == "blocked"
    db.execute(ENDS["complete"], lease)
    assert state(db, waiter) == "ready"


@pytest.mark.parametrize("waits", ["job", "batch"])
def test_an_end_does_not_wait_for_who_has_written_and_ended_another_job(
    db, connect, waits
):
    """The row has two versions: who locks the first for key share waits for the second."""
    leases = two_that_hold_up(db, waits)
    writer = connect(autocommit=False)
    writer.execute("update pgqueue.job set priority = 1 where id = %s", leases[0][:1])
    writer.execute(ENDS["complete"], leases[0])
    db.execute("set lock_timeout = '2 s'")
    db.execute(ENDS["complete"], leases[1])
    writer.rollback()
    db.execute(TIE)
    assert at_rest(db)
    db.execute(ENDS["complete"], leases[0])
    assert one(db, "select count(*) from pgqueue.job") == 1


def test_a_look_waits_for_no_other_look(db, connect):
    lease = claimed(db)
    ender = connect(autocommit=False)
    ender.execute(ENDS["complete"], lease)
    waiter = one(db, AFTER, lease[0])
    ender.commit()
    looks = connect(autocommit=False)
    looks.execute(TIE)
    db.execute("set lock_timeout = '1 s'")
    db.execute(TIE)
    db.execute("select pgqueue.cancel(%s)", [claimed(db)[0]])
    looks.rollback()
    db.execute(TIE)
    assert state(db, waiter) == "ready"
    assert at_rest(db)


@pytest.mark.parametrize("waits", ["job", "batch"])
def test_an_end_that_was_rolled_back_leaves_nothing_to_look_at(db, connect, waits):
    leases = two_that_hold_up(db, waits)
    ender = connect(autocommit=False)
    ender.execute(ENDS["complete"], leases[0])
    ender.rollback()
    db.execute(ENDS["complete"], leases[1])
    db.execute(TIE)
    assert at_rest(db)
    db.execute(ENDS["complete"], leases[0])
    assert (
        one(db, "select count(*) from pgqueue.job where queue in ('done', 'after')")
        == 1
    )


def test_an_open_batch_whose_jobs_have_ended_leaves_nothing_to_look_at(db):
    batch = one(db, "select pgqueue.create_batch('done')")
    db.execute(ENDS["complete"], claimed(db, batch_id=batch))
    assert at_rest(db)


def test_a_job_that_is_discarded_has_died(db):
    lease = claimed(db)
    db.execute(ENDS["fail"], lease)
    db.execute("select pgqueue.discard(%s)", lease[:1])
    assert state(db, one(db, AFTER, lease[0])) == "cancelled"


def test_the_end_of_a_job_does_not_wait_for_who_has_locked_what_waits_for_it(
    db, connect
):
    for how in ("complete", "fail"):
        lease = claimed(db)
        waiter = one(db, AFTER, lease[0])
        holder = connect(autocommit=False)
        holder.execute("select pgqueue.reprioritize(%s, 7)", [waiter])
        db.execute("set lock_timeout = '2 s'")
        db.execute(ENDS[how], lease)
        assert state(db, waiter) == "blocked"
        holder.commit()
        db.execute(TIE)
        assert state(db, waiter) == ("ready" if how == "complete" else "cancelled")


# Those that did not complete


GONE = {
    "purge": "select pgqueue.purge('q')",
    "cancel": "select pgqueue.cancel(%(id)s)",
    "cancel_many": "select pgqueue.cancel_many('q')",
    "expire": "select pgqueue.reap()",
    "discard": "select pgqueue.discard(%(id)s)",
    "discard_many": "select pgqueue.discard_many('q')",
    "keep_dead": "select pgqueue.maintain()",
}


def to_be_gone(db: psycopg.Connection, how: str) -> int:
    """A job that one of these calls will drop, of a queue whose log keeps nothing."""
    db.execute("select pgqueue.configure('q', keep_runs => 0, keep_dead => '1 second')")
    if how not in ("discard", "discard_many", "keep_dead"):
        expires = "now() + interval '1 microsecond'" if how == "expire" else "null"
        return one(db, f"select pgqueue.enqueue('q', expires_at => {expires})")
    lease = claimed(db)
    db.execute(ENDS["fail"], lease)
    db.execute("update pgqueue.dead_job set died_at = died_at - interval '1 minute'")
    return lease[0]


@pytest.mark.parametrize("how", GONE)
def test_what_is_enqueued_after_a_job_that_is_gone_never_runs(db, how):
    gone = to_be_gone(db, how)
    db.execute(GONE[how], {"id": gone})
    assert state(db, one(db, AFTER, gone)) == "cancelled"
    runs = (
        "select pgqueue.enqueue('after', after => array[%s::bigint], if_dead => 'run')"
    )
    assert state(db, one(db, runs, gone)) == "ready"


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("is_lost", [False, True])
def test_what_is_being_enqueued_after_a_job_that_goes_meanwhile_never_runs(
    db, connect, how, is_lost
):
    gone = to_be_gone(db, how)
    producer = connect(autocommit=False)
    waiter = one(producer, AFTER, gone)
    db.execute(GONE[how], {"id": gone})
    producer.commit()
    if is_lost:
        db.execute("delete from pgqueue.loose_end")
    db.execute(TIE)
    assert state(db, waiter) == "cancelled"
    assert at_rest(db)


def test_ids_of_jobs_that_are_gone_are_kept_for_14_days_in_few_rows(db):
    purged = column(
        db, "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[1000]))"
    )
    other = one(db, "select pgqueue.enqueue('other')")
    purged.append(one(db, "select pgqueue.enqueue('q')"))
    db.execute("select pgqueue.purge('q')")
    rows = "select count(*) from pgqueue.gone"
    assert one(db, rows) <= 17
    outcomes = "select outcome, array_agg(id order by id) from pgqueue._outcomes_of(%s) group by 1 order by 1"
    known = db.execute(outcomes, [[*purged, other, other + 100]]).fetchall()
    assert known == [
        ("cancelled", purged),
        ("completed", [other + 100]),
        (None, [other]),
    ]
    db.execute("update pgqueue.gone set ended_at = now() - interval '15 days'")
    db.execute("select pgqueue.maintain()")
    assert one(db, rows) == 0


def test_ten_thousand_jobs_that_have_ended_are_looked_up_within_a_second(db):
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)"
        " select n % 7, 1, n, now(), '0', '0', 'q', 'q', 'completed' from generate_series(1, 200000) as n"
    )
    db.execute("select setval('pgqueue.job_id_seq', 200000)")
    db.execute("set statement_timeout = '1 s'")
    ids = list(range(1, 200_000, 20))
    after = "select pgqueue.enqueue('after', after => %s)"
    assert state(db, one(db, after, ids)) == "ready"
    db.execute("reset statement_timeout")


# Many of them


def enqueue_after(db: psycopg.Connection, id: int, jobs: int) -> None:
    db.execute(
        "select count(*) from (select pgqueue.enqueue('after', after => array[%s::bigint])"
        " from generate_series(1, %s)) as e",
        [id, jobs],
    )


def chain(db: psycopg.Connection, jobs: int) -> int:
    """Enqueue jobs that wait each for the one before, and return the first."""
    db.execute(
        f"""
        do $$
        declare
            last bigint := pgqueue.enqueue('chain');
        begin
            for n in 2 .. {jobs} loop
                last := pgqueue.enqueue('chain', after => array[last]);
            end loop;
        end
        $$
        """
    )
    return one(db, "select min(id) from pgqueue.job where queue = 'chain'")


def come_to_rest(db: psycopg.Connection, most: int) -> int:
    """Claim and rest as an idle worker does; the most pages that a call reads."""
    reads = []
    ties = "select count(*) from pgqueue.dependency"
    while one(db, ties) > 0:
        for call in ("claim('none', 'w')", "rest('{none}', park => false)"):
            reads.append(pages(db, f"select pgqueue.{call}"))
        assert len(reads) < most
    return max(reads)


@pytest.mark.needs_hints  # counts
def test_very_many_jobs_that_wait_for_one_are_cancelled_in_bounded_steps(db):
    lease, jobs = claimed(db), 50_000 if LONG else 10_000
    enqueue_after(db, lease[0], jobs)
    assert pages(db, ENDS["fail"] % lease) < 15_000
    assert one(db, "select count(*) from pgqueue.job") == jobs - 200
    assert come_to_rest(db, 300) < 70_000
    assert one(db, "select count(*) from pgqueue.job") == 0
    cancelled = "select count(*) from pgqueue.run where outcome = 'cancelled'"
    assert one(db, cancelled) == jobs


@pytest.mark.needs_hints  # counts
def test_ten_thousand_jobs_that_wait_for_one_run_when_it_completes(db):
    lease = claimed(db)
    enqueue_after(db, lease[0], 10_000)
    claim = "select count(*) from pgqueue.claim('after', 'w', 10000)"
    assert one(db, claim) == 0
    assert pages(db, claim) < 100
    assert pages(db, ENDS["complete"] % lease) < 15_000
    assert one(db, claim) >= 200
    assert come_to_rest(db, 100) < 70_000
    one(db, claim)
    assert one(db, "select count(*) from pgqueue.job where token is null") == 0


@pytest.mark.needs_hints  # ten claims go over a thousand ties once
def test_a_chain_of_a_thousand_jobs_runs_one_by_one(db):
    chain(db, 1000)
    ran = []
    claim = "select id, token from pgqueue.claim('chain', 'w', 10)"
    while row := db.execute(claim).fetchall():
        assert len(row) == 1
        ran.append(row[0][0])
        db.execute(ENDS["complete"], row[0])
    assert len(ran) == 1000
    assert ran == sorted(ran)


@pytest.mark.needs_hints  # counts
def test_a_chain_of_ten_thousand_jobs_whose_first_expires_ends_in_bounded_steps(db):
    first = chain(db, 10_000)
    db.execute(
        "update pgqueue.job set terms = row(now(), null, null, null)::pgqueue._terms where id = %s",
        [first],
    )
    assert pages(db, "select pgqueue.claim('chain', 'w')") < 15_000
    assert 9000 < one(db, "select count(*) from pgqueue.job") < 10_000
    assert come_to_rest(db, 100) < 70_000
    assert one(db, "select count(*) from pgqueue.job") == 0


@pytest.mark.needs_hints  # counts
def test_a_claim_over_ten_thousand_expired_chains_reads_little_more_than_over_jobs(db):
    reads = []
    for is_chained in (False, True):
        enqueue = "select pgqueue.enqueue(%s, after => array[id]) from pgqueue.job where queue = %s"
        db.execute("truncate pgqueue.job, pgqueue.dependency, pgqueue.loose_end")
        db.execute(
            "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[10000]))"
        )
        for queue, before in (("b", "q"), ("c", "b")) if is_chained else ():
            db.execute(f"select count(*) from ({enqueue}) as e", [queue, before])
        db.execute(
            "update pgqueue.job set terms = row(now(), null, null, null)::pgqueue._terms where queue = 'q'"
        )
        reads.append([pages(db, "select pgqueue.claim('q', 'w')") for _ in range(3)])
    plain, chained = reads
    assert max(chained) < 4 * max(plain) and max(chained) < 90_000, reads
    while one(db, "select count(*) from pgqueue.job where queue = 'q'") > 0:
        db.execute("select pgqueue.claim('q', 'w')")
    assert come_to_rest(db, 300) < 80_000
    assert one(db, "select count(*) from pgqueue.job") == 0


def test_a_rest_sleeps_while_another_session_looks(db, connect):
    lease = claimed(db)
    enqueue_after(db, lease[0], 1)
    db.execute("update pgqueue.loose_end set look_at = now()")
    holder = connect(autocommit=False)
    holder.execute("select from pgqueue.loose_end for update")
    rest = "select extract(epoch from pgqueue.rest('{q}', park => false))"
    assert one(db, rest) > 0.1
    holder.rollback()
    db.execute(rest)
    assert one(db, "select count(*) from pgqueue.loose_end") == 0


@pytest.mark.needs_hints  # counts
def test_the_last_two_ends_that_meet_are_found_before_ten_thousand_others(db, connect):
    """Before ANALYZE, and with nobody but claims to look."""
    first = one(db, "select pgqueue.enqueue('first')")
    enqueue_after(db, first, 10_000)
    new = "select count(*) from pgqueue.loose_end where what = 'new'"
    assert one(db, new) == 10_000
    db.execute("update pgqueue.loose_end set look_at = look_at - interval '1 minute'")
    leases = [claimed(db) for _ in range(2)]
    waiter = one(
        db, "select pgqueue.enqueue('last', after => %s)", [id for id, _ in leases]
    )
    sessions = [connect(autocommit=False) for _ in range(2)]
    for session, lease in zip(sessions, leases, strict=True):
        session.execute(ENDS["complete"], lease)
    for session in sessions:
        session.commit()
    reads = []

    def is_found() -> bool:
        reads.append(pages(db, "select pgqueue.claim('none', 'w')"))
        return state(db, waiter) == "ready"

    wait_until(is_found, 1)
    assert max(reads) < 3000
    assert one(db, new) > 0


def test_jobs_that_somebody_has_locked_do_not_hold_up_others_that_wait_for_the_same(
    db, connect
):
    lease = claimed(db)
    enqueue_after(db, lease[0], 3000)
    holder = connect(autocommit=False)
    lock = "select id from pgqueue.job where queue = 'after' order by id limit 2000 for update"
    holder.execute(lock)
    db.execute(ENDS["fail"], lease)
    for _ in range(3):
        db.execute(TIE)
    assert one(db, "select count(*) from pgqueue.job") == 2000
    holder.rollback()
    for _ in range(3):
        db.execute(TIE)
    assert at_rest(db)
    assert one(db, "select count(*) from pgqueue.job") == 0


def test_many_ends_that_did_not_see_each_other_are_found_by_few_claims(db, connect):
    """A job waits for 3000 others, which end in two transactions that overlap."""
    with db.transaction():
        many = "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[3000]))"
        waiter = one(
            db, "select pgqueue.enqueue('after', after => %s)", [column(db, many)]
        )
    sessions = [connect(autocommit=False) for _ in range(2)]
    for session in sessions:
        complete_some(session, 1500)
    for session in sessions:
        session.commit()
    wait_until(
        lambda: (
            not one(db, "select count(*) from pgqueue.loose_end where look_at > now()")
        )
    )
    cost = pages(db, "select pgqueue._tie_loose_ends(100, clock_timestamp())")
    assert cost < 8000
    claims = 0
    while state(db, waiter) == "blocked":
        db.execute("select from pgqueue.claim('z', 'w')")
        claims += 1
    assert claims < 40


# The sweep, where every hint is lost


@pytest.mark.parametrize("waits", ["job", "batch"])
def test_the_last_two_ends_that_meet_are_found_without_a_loose_end(db, connect, waits):
    leases = two_that_hold_up(db, waits)
    sessions = [connect(autocommit=False) for _ in range(2)]
    for session, lease in zip(sessions, leases, strict=True):
        session.execute(ENDS["complete"], lease)
    for session in sessions:
        session.commit()
    db.execute("delete from pgqueue.loose_end")
    due = "select count(*) from pgqueue.job where queue in ('after', 'done') and run_at <= now()"
    look = "select from pgqueue.claim('z', 'w')"
    wait_until(lambda: db.execute(look) and one(db, due) == 1, 2)
    assert at_rest(db)


def test_the_sweep_goes_on_where_it_stopped_and_comes_round(db, connect):
    """A job waits for 400 jobs. The last has ended, and nobody knows."""
    with db.transaction():
        ids = [one(db, "select pgqueue.enqueue('first')") for _ in range(400)]
        waiters = [one(db, AFTER, id) for id in ids]
    for place in (399, 0):
        with connect(autocommit=False) as old:
            old.isolation_level = IsolationLevel.REPEATABLE_READ
            old.execute("select pgqueue.cancel(%s)", [ids[place]])
        db.execute("delete from pgqueue.loose_end")
        for _ in range(5):
            db.execute("select pgqueue._tie_loose_ends(100, clock_timestamp())")
        assert state(db, waiters[place]) == "cancelled"


@pytest.mark.parametrize("priority", [-1, 1])
def test_a_look_at_a_batch_of_which_much_has_ended_does_not_read_it_all(
    db, held_snapshot, priority
):
    """Under a held snapshot, where the entries of what has ended stay in the index."""
    batch = one(db, "select pgqueue.create_batch('done')")
    for lane in (0, priority):
        db.execute(
            "select count(*) from pgqueue.enqueue_many("
            "'q', array_fill('{}'::jsonb, array[10000]), priority => %s, batch_id => %s)",
            [lane, batch],
        )
    db.execute("select pgqueue.close_batch(%s)", [batch])
    few = []
    for _ in range(20):
        complete_some(db, 900)
        few += [pages(db, f"select pgqueue._look_at_batches(array[{batch}])")]
    assert sorted(few)[10] < 15
    complete_some(db, 2000)
    assert one(db, "select completed from pgqueue.batches") == 20_000


def test_a_look_at_a_batch_whose_jobs_all_run_does_not_read_them_all(db, connect):
    """A claim leaves its mark in each row, and one in a savepoint another, of several transactions."""
    batch = one(db, "select pgqueue.create_batch('done')")
    db.execute(
        "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[2000]), batch_id => %s)",
        [batch],
    )
    db.execute("select pgqueue.close_batch(%s)", [batch])
    leases = db.execute(
        "select id, token from pgqueue.claim('q', 'w', 1000)"
    ).fetchall()
    with db.transaction():
        with db.transaction():
            leases += db.execute(
                "select id, token from pgqueue.claim('q', 'w', 1000)"
            ).fetchall()
        with db.transaction():
            db.execute(
                "select count(*) from pgqueue.extend(%s, %s)",
                [list(column) for column in zip(*leases, strict=True)],
            )
    few = []
    for lease in (*leases[:9], *leases[-9:]):
        db.execute(ENDS["complete"], lease)
        few += [pages(db, f"select pgqueue._look_at_batches(array[{batch}])")]
    assert sorted(few)[9] < 30


def test_batches_that_share_a_cell_finish_each_by_itself(db):
    batches = [one(db, "select pgqueue.create_batch('done')")]
    while len(batches) < 3:
        id = one(db, "select pgqueue.create_batch('done')")
        if (id - batches[0]) % 5 == 0:
            batches.append(id)
    for _ in range(4):
        for batch in batches:
            db.execute("select pgqueue.enqueue('q', batch_id => %s)", [batch])
    db.execute("select pgqueue.close_batch(b) from unnest(%s::bigint[]) b", [batches])
    for done in range(1, 13):
        complete_some(db, 1)
        assert one(
            db, "select count(*) from pgqueue.batches where state = 'finished'"
        ) == max(0, done - 9)


# Crashes


@pytest.fixture(scope="module")
def server():
    with Cluster() as cluster:
        with psycopg.connect(where(cluster), autocommit=True) as conn:
            conn.execute("create extension pgqueue")
        yield cluster


def test_chains_and_batches_survive_crashes_in_their_midst(server):
    links = 60 if LONG else 20
    jobs = 3 * (links + 1)
    with psycopg.connect(where(server), autocommit=True) as db:
        batch = one(db, "select pgqueue.create_batch('done')")
        last = [
            one(db, "select pgqueue.enqueue('work', batch_id => %s)", batch)
            for _ in "abc"
        ]
        for _ in range(links):
            last = [
                one(
                    db,
                    "select pgqueue.enqueue('work', batch_id => %s, after => %s)",
                    batch,
                    last,
                )
                for _ in "abc"
            ]
        db.execute("select pgqueue.close_batch(%s)", [batch])
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                with psycopg.connect(where(server), autocommit=True) as conn:
                    while not stop.is_set():
                        claim = (
                            "select id, token from pgqueue.claim('work', 'w', 2, '1 s')"
                        )
                        jobs = conn.execute(claim).fetchall()
                        for job in jobs:
                            conn.execute(ENDS["complete"], job)
                        conn.execute("select pgqueue.rest('{work}', park => false)")
                        stop.wait(0 if jobs else 0.02)
            except psycopg.OperationalError:
                stop.wait(0.02)
            except psycopg.DatabaseError as error:
                if error.sqlstate != "PQ002":
                    raise

    def completed() -> int:
        try:
            with psycopg.connect(where(server), autocommit=True) as db:
                return one(
                    db, "select count(*) from pgqueue.run where outcome = 'completed'"
                )
        except psycopg.OperationalError:
            return -1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for goal in (links // 2, links * 3 // 2, links * 5 // 2):
            wait_until(lambda: completed() >= goal, 60)  # noqa: B023
            server.restart("immediate")
        wait_until(lambda: completed() == jobs, 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    with psycopg.connect(where(server), autocommit=True) as db:
        db.execute(TIE)
        found = column(db, "select payload -> 'batch' ->> 'completed' from pgqueue.job")
        assert found == [str(jobs)]


def test_a_dump_keeps_what_waits(db, connect: Connect):
    """All of it is in marked tables, which test_package dumps; here a reader sees the same."""
    lease = claimed(db)
    waiter = one(db, AFTER, lease[0])
    marked = column(
        db,
        "select unnest(extconfig)::regclass::text from pg_extension where extname = 'pgqueue'",
    )
    assert {
        "pgqueue.dependency",
        "pgqueue.batch",
        "pgqueue.tally",
        "pgqueue.loose_end",
    } <= set(marked)
    assert state(connect(), waiter) == "blocked"


def test_workers_run_a_batch_whose_jobs_add_jobs_to_it(db, workers):
    batch = one(db, "select pgqueue.create_batch('work', kind => 'amark')")
    db.execute(
        "select pgqueue.enqueue('work', '{\"more\": 4}', 'adds', batch_id => %s)",
        [batch],
    )
    db.execute("select pgqueue.close_batch(%s)", [batch])
    for _ in range(2):
        workers.start()
    done = "select count(*) from pgqueue.run where kind = 'amark' and outcome = 'completed'"
    wait_until(lambda: one(db, done) == 1)
    completed = one(db, "select completed from pgqueue.batches")
    assert completed == 65  # 1 + 4 * (1 + 3 * (1 + 2 * (1 + 1)))


def test_wait_goes_on_for_a_job_that_is_sent_back_to_work_as_it_ends(
    db, connect, monkeypatch
) -> None:
    """It hears of the end, and before it has looked the job waits again."""
    other, fetch, redriven = connect(), waiting._Session.fetch, []

    async def and_then_redrive(self, query, *params):
        rows = await fetch(self, query, *params)
        if query == waiting.AWAIT and rows == [(0.0,)] and not redriven:
            redriven.append(one(other, "select pgqueue.redrive()"))
        return rows

    monkeypatch.setattr(waiting._Session, "fetch", and_then_redrive)
    job = one(db, "select pgqueue.enqueue('q', max_attempts => 1)")
    reject = "select pgqueue.fail(id, token, 'no', permanent => true) from pgqueue.claim('q', 'w')"
    one(db, reject)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(pgqueue.wait, db, job, 20)
        wait_until(lambda: redriven)
        one(other, "select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')")
        assert found.result(20).state == "completed"
