"""Waiting for a job, its progress, and cancelling it while it runs: what takes two sessions."""

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pgqueue
import psycopg
import psycopg2
import pytest
from cluster import Cluster
from conftest import column, one
from worker_harness import wait_until, where

CLAIM = "select id, token from pgqueue.claim('q', 'w', lease => %s)"
ENDS = {
    "complete": "select pgqueue.complete(%(id)s, %(token)s)",
    "complete_many": "select pgqueue.complete_many(array[%(id)s], array[%(token)s])",
    "finish": "select pgqueue.finish(array[%(id)s], array[%(token)s], '{fail}', array['e'], '{0}')",
    "reject": "select pgqueue.fail(%(id)s, %(token)s, 'e', permanent => true)",
    "release": "select pgqueue.release(array[%(id)s], array[%(token)s])",
    "cancel": "select pgqueue.cancel(%(id)s)",
    "purge": "select pgqueue.purge('q')",
}
pytest_plugins = ["worker_harness"]

AWAITED = (
    "select count(*) from pg_locks where locktype = 'advisory' and classid = 7366516"
)
SOON = timedelta(milliseconds=50)
LATER = timedelta(seconds=2)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def waiter(connect):
    """A session that listens."""
    conn = connect()
    conn.execute("listen pgqueue")
    return conn


def claimed(db: psycopg.Connection, lease: str = "1 hour") -> dict[str, int]:
    one(db, "select pgqueue.enqueue('q')")
    id, token = db.execute(CLAIM, (lease,)).fetchone()
    return {"id": id, "token": token}


def news(listener: psycopg.Connection) -> list[str]:
    """What came before a notification that this session sends to itself."""
    listener.execute("notify pgqueue, 'so far'")
    heard: list[str] = []
    for notify in listener.notifies(timeout=20):
        if notify.payload == "so far":
            return heard
        heard.append(notify.payload)
    raise AssertionError("the notification never came")


def rest(conn: psycopg.Connection, id: int) -> timedelta:
    return one(conn, "select pgqueue.await(%s)", id)


# No end is missed, wherever the waiter begins.


@pytest.mark.parametrize(
    "verb", ["complete", "complete_many", "reject", "cancel", "purge"]
)
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_whoever_waits_before_an_end_begins_is_notified_and_later_looks_again_soon(
    db, connect, waiter, verb, moment
):
    lease = claimed(db)
    if verb in ("cancel", "purge"):
        db.execute(ENDS["release"], lease)
    ender = connect(autocommit=False)
    if moment == "before":
        assert rest(waiter, lease["id"]) == LATER
    ender.execute(ENDS[verb], lease)
    if moment == "between":
        assert rest(waiter, lease["id"]) == SOON, "its end may be in flight"
    ender.commit()
    assert news(waiter) == (["end"] if moment == "before" else [])
    if verb == "purge":  # which leaves no trace
        with pytest.raises(pgqueue.JobNotFound):
            rest(waiter, lease["id"])
    else:
        assert rest(waiter, lease["id"]) == timedelta(0)


def test_an_end_behind_an_update_in_one_transaction_is_seen_as_in_flight(
    db, connect, waiter
):
    lease = claimed(db)
    ender = connect(autocommit=False)
    ender.execute("savepoint a")
    ender.execute("select pgqueue.progress(%(id)s, %(token)s, 1)", lease)
    ender.execute("release a")
    ender.execute(ENDS["complete"], lease)
    assert rest(waiter, lease["id"]) == SOON
    ender.rollback()
    assert rest(waiter, lease["id"]) == LATER, "it has not ended, and nobody is at it"


@pytest.mark.parametrize("verb", ["finish", "release"])
def test_an_attempt_that_ends_without_its_job_wakes_nobody(db, waiter, verb):
    lease = claimed(db)
    assert rest(waiter, lease["id"]) == LATER
    db.execute(ENDS[verb], lease)
    assert news(waiter) == []
    assert rest(waiter, lease["id"]) > timedelta(0)


def test_only_the_end_of_an_awaited_job_notifies_and_no_longer_than_it_is_awaited(
    db, connect, waiter
):
    first, other, last = (claimed(db) for _ in range(3))
    assert rest(waiter, first["id"]) == LATER
    db.execute(ENDS["complete"], other)
    assert news(waiter) == []
    listener = connect()
    listener.execute("listen pgqueue")
    waiter.execute("select pgqueue.await(null)")
    db.execute(ENDS["complete"], first)
    assert rest(waiter, last["id"]) == LATER
    db.execute("select pg_terminate_backend(%s, 20000)", (waiter.info.backend_pid,))
    db.execute(ENDS["complete"], last)
    assert news(listener) == []


@pytest.mark.parametrize(
    "off",
    ["set pgqueue.notify = off", "select pgqueue.configure('q', notify => false)"],
)
@pytest.mark.parametrize("verb", ["complete", "complete_many", "reject", "cancel"])
def test_with_notifications_off_nothing_is_sent(db, waiter, off, verb):
    lease = claimed(db)
    assert rest(waiter, lease["id"]) == LATER
    db.execute(off)
    db.execute(ENDS[verb], lease)
    assert news(waiter) == []


def test_a_wait_that_was_begun_or_ended_in_a_rolled_back_transaction_misses_no_end(
    db, waiter
):
    lease = claimed(db)
    with waiter.transaction(force_rollback=True):
        assert rest(waiter, lease["id"]) == LATER
    assert rest(waiter, lease["id"]) == LATER
    with waiter.transaction(force_rollback=True):
        waiter.execute("select pgqueue.await(null)")
    db.execute(ENDS["complete"], lease)
    assert rest(waiter, lease["id"]) == timedelta(0)
    waiter.execute("select pgqueue.await(null)")
    assert one(db, AWAITED) == 0


def test_who_enqueues_behind_a_job_and_ends_its_waiting_is_warned_of_nothing(
    db, connect
):
    said: list[str | None] = []
    conn, lease = connect(), claimed(db)
    conn.add_notice_handler(lambda notice: said.append(notice.message_primary))
    with conn.transaction():
        conn.execute("select pgqueue.enqueue('q', after => array[%(id)s::bigint])", lease)  # fmt: skip
        conn.execute("select pgqueue.await(%(id)s), pgqueue.await(null)", lease)
    assert said == []


def test_a_stranger_who_holds_the_locks_makes_a_waiter_look_more_often(
    db, connect, role
):
    lease = claimed(db)
    stranger, waiter = connect(user=role), connect()
    stranger.execute(
        "select pg_advisory_lock(7366516, n) from generate_series(0, 256) as n"
    )
    assert rest(waiter, lease["id"]) == SOON
    db.execute("set lock_timeout = '5 s'")
    db.execute(ENDS["complete"], lease)
    assert rest(waiter, lease["id"]) == timedelta(0)


# wait, of the Python package


def test_wait_returns_the_status_of_each_of_many_jobs_soon_after_its_end(
    db, connect, pool
):
    """Ten waiters and two workers, without a pause: none may need the poll of two seconds."""
    over = threading.Event()

    def work() -> None:
        conn = connect()
        while not over.is_set():
            for id, token in conn.execute(CLAIM, ("1 hour",)).fetchall():
                conn.execute(
                    "select pgqueue.complete(%s, %s, %s)", (id, token, str(id))
                )

    def ask(_) -> float:
        conn, slowest = connect(), timedelta(0)
        for _ in range(30):
            id = pgqueue.enqueue(conn, "q")
            status = pgqueue.wait(conn, id, timeout=20)
            assert (status.id, status.state, status.result) == (id, "completed", id)
            slowest = max(
                slowest, one(conn, "select clock_timestamp()") - status.finished_at
            )
        assert one(conn, "select count(*) from pg_listening_channels()") == 0
        return slowest

    workers = [pool.submit(work) for _ in range(2)]
    try:
        assert max(pool.map(ask, range(5))) < timedelta(seconds=1)
    finally:
        over.set()
    assert [worker.result(20) for worker in workers] == [None, None]
    assert one(db, AWAITED) == 0


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("listen", [True, False])
def test_wait_works_on_an_async_connection_beside_other_tasks(
    db, dsn, autocommit, listen
):
    leases = [claimed(db), claimed(db)]

    async def wait(id: int) -> pgqueue.Status:
        connecting = psycopg.AsyncConnection.connect(dsn, autocommit=autocommit)
        async with await connecting as conn:
            status = await pgqueue.wait(conn, id, listen=listen)
            assert status == await pgqueue.status(conn, id)
            return status

    async def main() -> list[pgqueue.Status]:
        waiting = [asyncio.create_task(wait(lease["id"])) for lease in leases]
        for verb, lease in zip(("complete", "reject"), leases, strict=True):
            await asyncio.to_thread(db.execute, ENDS[verb], lease)
        return await asyncio.gather(*waiting)

    found = [(s.state, s.last_error) for s in asyncio.run(main())]
    assert found == [("completed", None), ("dead", "e")]


def test_a_wait_that_is_cancelled_leaves_the_connection_as_it_was(db, dsn):
    lease = claimed(db)

    async def main() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            waiting = asyncio.create_task(pgqueue.wait(conn, lease["id"]))
            while not await asyncio.to_thread(one, db, AWAITED):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert one(db, AWAITED) == 0
            rows = await conn.execute("select pg_listening_channels()")
            assert await rows.fetchall() == []

    asyncio.run(main())


def test_wait_raises_when_time_is_up_in_a_transaction_and_for_an_unknown_job(
    db, connect
):
    lease = claimed(db)
    with pytest.raises(TimeoutError, match="has not ended"):
        pgqueue.wait(db, lease["id"], timeout=0.05)
    with pytest.raises(pgqueue.JobNotFound):
        pgqueue.wait(db, 0)
    with db.transaction(), pytest.raises(ValueError, match="transaction"):
        pgqueue.wait(db, lease["id"])
    other = connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pgqueue.wait, other, lease["id"])
        wait_until(lambda: one(db, AWAITED))
        db.execute(
            "select pg_terminate_backend(pid) from pg_locks where classid = 7366516"
            " and locktype = 'advisory' and pid <> pg_backend_pid() limit 1"
        )
        with pytest.raises(psycopg.OperationalError):
            waiting.result(20)
    with pytest.raises(psycopg.OperationalError, match="closed"):
        pgqueue.wait(other, lease["id"])


def test_the_ends_of_other_jobs_make_a_waiter_look_now_and_then_only(db, dsn):
    id = one(db, "select pgqueue.enqueue('q')")

    def wait() -> None:
        with psycopg.connect(
            dsn, autocommit=True, options="-c track_functions=all"
        ) as conn:
            pgqueue.wait(conn, id, timeout=20)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        wait_until(lambda: one(db, AWAITED))
        for _ in range(500):
            db.execute("notify pgqueue, 'end'")
        db.execute(ENDS["cancel"], {"id": id})
        waiting.result(20)
    calls = "select pg_stat_get_function_calls('pgqueue.await(bigint)'::regprocedure)"
    assert wait_until(lambda: one(db, calls)) < 200


def test_wait_passes_other_notifications_on_and_stays_listening_if_it_was(db, connect):
    conn, lease = connect(), claimed(db)
    heard: list[str] = []
    conn.add_notify_handler(lambda notify: heard.append(notify.payload))
    conn.execute("listen pgqueue")
    conn.execute("listen mine")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pgqueue.wait, conn, lease["id"])
        wait_until(lambda: one(db, AWAITED))
        db.execute("notify mine, 'x'")
        db.execute(ENDS["complete"], lease)
        assert waiting.result(20).state == "completed"
    assert heard == ["x", "end"]
    assert column(conn, "select pg_listening_channels()") == ["pgqueue", "mine"]


def listens(conn: psycopg.Connection) -> bool:
    return one(conn, "select count(*) from pg_listening_channels()") > 0


def test_a_wait_that_is_not_allowed_leaves_nothing_behind(db, connect, role):
    lease, stranger = claimed(db), connect(user=role)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        pgqueue.wait(stranger, lease["id"])
    assert not listens(stranger)


def test_an_interrupted_wait_leaves_nothing_behind(db, connect):
    lease, conn = claimed(db), connect()
    main = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: one(db, AWAITED))
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pgqueue.wait(conn, lease["id"], timeout=20)
        interrupting.result()
    assert not listens(conn)
    assert one(db, AWAITED) == 0


@pytest.mark.parametrize("driver", [psycopg, psycopg2], ids=["3", "2"])
@pytest.mark.parametrize("style", ["iso_8601", "sql_standard", "postgres_verbose"])
def test_the_time_left_is_read_in_any_interval_style(db, dsn, driver, style):
    db.execute("select pgqueue.enqueue('q')")
    db.execute("select pgqueue.progress(id, token, 1, 4) from pgqueue.claim('q', 'w')")
    # A minute for a quarter.
    db.execute("""
        update pgqueue.job
        set claimed_at = now() - interval '1 minute', progress = row(now(), 1, 4, null)
    """)
    with closing(driver.connect(dsn, options=f"-c intervalstyle={style}")) as conn:
        left = pgqueue.status(conn, one(db, "select id from pgqueue.job")).time_left
    assert timedelta(minutes=2) < left <= timedelta(minutes=3)


def test_wait_returns_where_texts_are_not_decoded(db, connect):
    """As in a database whose encoding is SQL_ASCII."""
    lease = claimed(db)
    db.execute(ENDS["complete"], lease)
    conn = connect(options="-c client_encoding=sql_ascii")
    done = pgqueue.wait(conn, lease["id"], timeout=20)
    assert (done.state, done.queue) == ("completed", "q")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_outside_read_committed_wait_polls(db, connect, level):
    conn = connect(
        options=f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
    )
    lease = claimed(db)
    db.execute(ENDS["complete"], lease)
    assert pgqueue.wait(conn, lease["id"], timeout=20).state == "completed"


def test_two_waits_on_one_async_connection_both_end(db, dsn):
    leases = [claimed(db), claimed(db)]

    async def main() -> list[str]:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            waits = [pgqueue.wait(conn, lease["id"], 20) for lease in leases]
            waiting = asyncio.gather(*waits)
            for lease in leases:
                await asyncio.to_thread(db.execute, ENDS["complete"], lease)
            states = [status.state for status in await waiting]
            rows = await conn.execute("select pg_listening_channels()")
            assert await rows.fetchall() == []
            return states

    assert asyncio.run(main()) == ["completed", "completed"]
    assert one(db, AWAITED) == 0


def test_a_pipeline_is_refused(db):
    lease = claimed(db)
    with db.pipeline(), pytest.raises(ValueError, match="pipeline"):
        pgqueue.wait(db, lease["id"])


def test_wait_polls_behind_a_pooler_that_changes_the_backend(db, pooler, pool):
    """So often that psycopg would prepare the statement, which another backend does not know."""
    leases = [claimed(db) for _ in range(3)]
    conns = [psycopg.connect(pooler, autocommit=True) for _ in leases]

    def wait(place: int, timeout: float) -> str:
        return pgqueue.wait(conns[place], leases[place]["id"], timeout).state

    try:
        for waiting in [pool.submit(wait, place, 1) for place in range(3)]:
            with pytest.raises(TimeoutError):
                waiting.result(20)
        waits = [pool.submit(wait, place, 20) for place in range(3)]
        for lease in leases:
            db.execute(ENDS["complete"], lease)
        assert [waiting.result(20) for waiting in waits] == ["completed"] * 3
        assert one(db, AWAITED) == 0
    finally:
        for conn in conns:
            conn.close()


def test_on_a_standby_one_can_ask_and_wait():
    with Cluster(fast=True) as cluster:
        with psycopg.connect(where(cluster), autocommit=True) as db:
            db.execute("create extension pgqueue")
            ended, waits = claimed(db), claimed(db)
            db.execute(ENDS["complete"], ended)
        cluster.stop()
        (cluster.data / "standby.signal").touch()
        cluster.start()
        with psycopg.connect(where(cluster), autocommit=True) as db:
            assert one(db, "select pg_is_in_recovery()")
            assert pgqueue.wait(db, ended["id"], 20).state == "completed"
            with pytest.raises(TimeoutError):
                pgqueue.wait(db, waits["id"], 0.1)
            assert one(db, "select pgqueue.result(%s)", ended["id"]) is None
            assert column(db, "select id from pgqueue.running") == [waits["id"]]
            assert one(db, "select pgqueue.next_slots('@daily', 'Europe/Berlin')")
            assert one(db, "select count(*) from pgqueue.schedules") == 0
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                db.execute("select pgqueue.claim('q', 'w')")


# Progress


@pytest.mark.parametrize("commits", [True, False])
def test_progress_never_waits_for_the_end_of_an_attempt(db, connect, commits):
    lease = claimed(db)
    ender = connect(autocommit=False)
    ender.execute(ENDS["complete"], lease)
    progress = "select pgqueue.progress(%(id)s, %(token)s, 1)"
    db.execute("set lock_timeout = '5 s'")
    db.execute(progress, lease)
    if commits:
        ender.commit()
        with pytest.raises(pgqueue.LeaseLost):
            db.execute(progress, lease)
    else:
        ender.rollback()
        db.execute(progress, lease)
        assert one(db, "select done from pgqueue.running") == 1


# What is cancelled never runs again.

CANCELLED_AND = {
    **{verb: ENDS[verb] for verb in ("finish", "reject", "release")},
    "reap": "select pgqueue.reap()",
    "recover": "select pgqueue.claim('q', 'other')",
    "maintain": "select pgqueue.maintain()",
    "nothing": "select",
}


def expire(db: psycopg.Connection) -> None:
    db.execute(
        "update pgqueue.job set lease_expires_at = now() - interval '1 s'"
        " where lease_expires_at is not null"
    )


def runs_again(db: psycopg.Connection, id: int) -> bool:
    """Whether anybody ever gets the job again, whatever happens to its lease."""
    for _ in range(2):
        expire(db)
        db.execute("select pgqueue.maintain()")
        db.execute("update pgqueue.job set run_at = now() where run_at > now()")
        db.execute("select pgqueue.redrive()")
        if id in column(db, "select id from pgqueue.claim('q', 'again', 10)"):
            return True
    return False


@pytest.mark.parametrize("verb", CANCELLED_AND)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_job_cancelled_while_it_runs_never_runs_again(db, verb, is_late):
    lease = claimed(db)
    assert one(db, "select pgqueue.cancel(%(id)s, 'why')", lease) == "cancelling"
    if is_late:
        expire(db)
    db.execute(CANCELLED_AND[verb], lease)
    assert not runs_again(db, lease["id"])
    assert pgqueue.status(db, lease["id"]).state == "cancelled"


RACERS = {
    **ENDS,
    "claim": "select pgqueue.claim('q', 'other')",
    "reap": "select pgqueue.reap()",
}
RACERS.pop("cancel")


@pytest.mark.sample(24)
@pytest.mark.parametrize("state", ["ready", "running", "expired"])
@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("verb", RACERS)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_cancel_that_was_answered_holds_whoever_comes_between(
    db, connect, pool, verb, is_first, commits, state
):
    """Each function begins before the cancel or after it, and commits or rolls back."""
    lease = claimed(db)
    if state == "ready":
        db.execute(ENDS["release"], lease)
    elif state == "expired":
        expire(db)
    a, b = connect(autocommit=False), connect()
    b.execute("set lock_timeout = '20 s'")
    statements = [ENDS["cancel"], RACERS[verb]]
    first, second = statements if is_first else statements[::-1]

    def call(conn: psycopg.Connection, statement: str) -> str | None:
        try:
            return one(conn, statement, lease)
        except psycopg.DatabaseError as error:
            assert error.sqlstate in ("PQ001", "PQ002"), error
            return None

    said = [call(a, first)]
    later = pool.submit(call, b, second)
    blocks = "select cardinality(pg_blocking_pids(%s)) > 0"
    wait_until(lambda: later.done() or one(db, blocks, b.info.backend_pid))
    a.commit() if commits else a.rollback()
    said.append(later.result(20))
    answer = said[0 if is_first else 1]
    if answer is None or (is_first and not commits):
        return  # it had ended, or the cancel never happened
    assert answer in ("cancelled", "cancelling")
    assert not runs_again(db, lease["id"])


def test_a_job_cancelled_while_it_waits_for_its_retry_is_gone(db):
    lease = claimed(db)
    db.execute(ENDS["finish"], lease)
    assert one(db, ENDS["cancel"], lease) == "cancelled"
    assert not runs_again(db, lease["id"])


def test_only_the_cancel_of_a_running_job_notifies_once_and_with_a_word(db, waiter):
    running, waiting = claimed(db), one(db, "select pgqueue.enqueue('q')")
    with db.transaction():
        db.execute(ENDS["cancel"], running)
        db.execute("select pgqueue.cancel(%s)", (waiting,))
        db.execute(ENDS["cancel"], running)
    assert news(waiter) == ["cancel"]
    db.execute("set pgqueue.notify = off")
    db.execute(ENDS["cancel"], running)
    assert news(waiter) == []
