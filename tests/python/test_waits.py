"""What waits for the ends of jobs, decided between two sessions: each wait ends, and once."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from cluster import Cluster
from conftest import Connect, column, one
from psycopg import IsolationLevel, errors
from test_plans import pages
from worker_harness import wait_until, where

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


# Many of them


def test_ten_thousand_jobs_that_wait_for_one_run_when_it_completes(db):
    lease = claimed(db)
    db.execute(
        "select count(*) from (select pgqueue.enqueue('after', after => array[%s::bigint])"
        " from generate_series(1, 10000)) as e",
        lease[:1],
    )
    claim = "select count(*) from pgqueue.claim('after', 'w', 10000)"
    assert one(db, claim) == 0
    assert pages(db, claim) < 100
    db.execute(ENDS["complete"], lease)
    assert one(db, claim) == 10_000


def test_ten_thousand_jobs_that_wait_for_one_are_cancelled_when_it_dies(db):
    lease = claimed(db)
    db.execute(
        "select count(*) from (select pgqueue.enqueue('after', after => array[%s::bigint])"
        " from generate_series(1, 10000)) as e",
        lease[:1],
    )
    db.execute(ENDS["fail"], lease)
    assert one(db, "select count(*) from pgqueue.job") == 0
    assert (
        one(db, "select count(*) from pgqueue.run where outcome = 'cancelled'")
        == 10_000
    )


def test_a_chain_of_a_thousand_jobs_runs_one_by_one_or_is_cancelled_at_once(db):
    chain = """
        do $$
        declare
            last bigint := pgqueue.enqueue('chain');
        begin
            for n in 2 .. 1000 loop
                last := pgqueue.enqueue('chain', after => array[last]);
            end loop;
        end
        $$
    """
    db.execute(chain)
    ran = []
    while row := db.execute(
        "select id, token from pgqueue.claim('chain', 'w', 10)"
    ).fetchall():
        assert len(row) == 1
        ran.append(row[0][0])
        db.execute(ENDS["complete"], row[0])
    assert len(ran) == 1000
    assert ran == sorted(ran)
    db.execute(chain)
    (first,) = db.execute(
        "select id, token from pgqueue.claim('chain', 'w', 10)"
    ).fetchall()
    db.execute(ENDS["fail"], first)
    assert one(db, "select count(*) from pgqueue.job") == 0


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
        if (id - batches[0]) % 32 == 0:
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
    with psycopg.connect(where(server), autocommit=True) as db:
        batch = one(db, "select pgqueue.create_batch('done')")
        last = [
            one(db, "select pgqueue.enqueue('work', batch_id => %s)", batch)
            for _ in "abc"
        ]
        for _ in range(60):
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
                        for id, token in conn.execute(
                            "select id, token from pgqueue.claim('work', 'w', 2, '1 s')"
                        ).fetchall():
                            conn.execute(ENDS["complete"], [id, token])
                        conn.execute("select pgqueue.rest('{work}', park => false)")
            except psycopg.OperationalError:
                continue
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
        for goal in (30, 90, 150):
            wait_until(lambda: completed() >= goal, 60)  # noqa: B023
            server.restart("immediate")
        wait_until(lambda: completed() == 183, 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    with psycopg.connect(where(server), autocommit=True) as db:
        db.execute(TIE)
        found = column(db, "select payload -> 'batch' ->> 'completed' from pgqueue.job")
        assert found == ["183"]


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
