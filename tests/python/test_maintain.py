"""Old runs are forgotten, and nobody who reads run waits for a transaction of others."""

import contextlib
import threading
from collections.abc import Callable

import psycopg
import pytest
from cluster import Cluster
from conftest import Connect, column, one
from psycopg import errors
from test_health import standby_of
from worker_harness import wait_until, where

pytest_plugins = ["worker_harness"]

FORGET = "select done from pgqueue.maintain() where task = 'forget runs'"
# Of two days that are over, and of one that is not.
OLD_RUNS = """
insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
select floor(extract(epoch from at) / 86400 + 7)::int % 16, 1, n, at, '0', '0', 'q', 'k', 'completed'
from generate_series(1, 10) as n
cross join lateral (values (now() - (n % 3 * 5 + 3) * interval '1 day')) as v (at)
"""
LEFT = "select count(*) from pgqueue.run"
PAGES = """
select count(*) filter (where pg_relation_size(inhrelid) > 0) from pg_inherits
where inhparent = 'pgqueue.run'::regclass
"""
READS = [
    LEFT,
    "select state from pgqueue.status(1)",
    "select count(*) from pgqueue.queues",
    "select length(pgqueue.metrics())",
    "select pgqueue.enqueue('q', after => '{1}')",
    "select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')",
]


@pytest.fixture
def old_runs(db: psycopg.Connection) -> None:
    db.execute("select pgqueue.enqueue('q')")
    db.execute(OLD_RUNS)


@pytest.fixture
def reads(connect: Connect) -> Callable[[], None]:
    """Read run in each way, without waiting for anybody."""
    reader = connect()
    reader.execute("set lock_timeout = '1 s'")

    def read() -> None:
        for query in READS:
            reader.execute(query)

    return read


# Transactions that go on


def begun(conn: psycopg.Connection) -> None:
    conn.execute("begin")
    conn.execute(FORGET)


def begun_at_once(conn: psycopg.Connection) -> None:
    conn.pgconn.exec_(f"begin; {FORGET}".encode())


def begun_by_the_driver(conn: psycopg.Connection) -> None:
    conn.autocommit = False
    conn.execute(FORGET)


def begun_by_a_prepared_statement(conn: psycopg.Connection) -> None:
    for _ in range(3):
        conn.execute("begin", prepare=True)
        conn.execute(FORGET, prepare=True)
        conn.execute("rollback", prepare=True)
    conn.execute("begin", prepare=True)
    conn.execute(FORGET, prepare=True)


def begun_in_a_pipeline(conn: psycopg.Connection) -> None:
    with conn.pipeline():
        conn.execute("begin", prepare=True)
        conn.execute(FORGET, prepare=True)


def in_a_savepoint(conn: psycopg.Connection) -> None:
    conn.execute("begin")
    conn.execute("savepoint s")
    conn.execute(FORGET)
    conn.execute("release savepoint s")


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        begun,
        begun_at_once,
        begun_by_the_driver,
        begun_by_a_prepared_statement,
        begun_in_a_pipeline,
        in_a_savepoint,
    ],
)
def test_a_transaction_left_open_after_maintain_holds_up_no_reader_of_run(
    db, connect, old_runs, reads, call, commits
):
    other = connect()
    call(other)
    assert one(other, LEFT) == 3
    reads()
    other.execute("commit" if commits else "rollback")
    assert one(
        db, "select count(*) from pgqueue.run where job_id <= 10 and kind = 'k'"
    ) == (3 if commits else 10)


@pytest.mark.parametrize(
    "statement",
    [
        "do $$ begin perform pgqueue.maintain(); perform pg_advisory_xact_lock(7); end $$",
        "select pgqueue.maintain(); select pg_advisory_xact_lock(7)",
        "select * from nightly()",
        "call nightly_too()",
    ],
)
def test_a_statement_that_goes_on_after_maintain_holds_up_no_reader_of_run(
    db, connect, blocked, old_runs, reads, statement
):
    db.execute(
        "create function nightly() returns void language sql as"
        " 'select pgqueue.maintain(); select pg_advisory_xact_lock(7)'"
    )
    db.execute(
        "create procedure nightly_too() language plpgsql as"
        " 'begin commit; perform pgqueue.maintain(); perform pg_advisory_xact_lock(7); end'"
    )
    db.execute("select pg_advisory_lock(7)")
    other = connect()
    caller = threading.Thread(target=other.execute, args=(statement,))
    caller.start()
    blocked(other)
    reads()
    db.execute("select pg_advisory_unlock(7)")
    caller.join()
    assert one(db, "select count(*) from pgqueue.run where kind = 'k'") == 3


def test_calls_of_maintain_do_not_wait_for_one_that_deletes_runs(db, connect, old_runs):
    other = connect()
    with db.transaction():
        assert one(db, FORGET) == 7
        with other.transaction():
            assert one(other, FORGET) == 0
        assert one(other, FORGET) == 0
    assert one(other, LEFT) == 3


# Calls that are alone


@pytest.mark.parametrize(
    "call",
    [
        lambda conn: conn.execute(FORGET).fetchone(),
        lambda conn: conn.execute(f"\n{FORGET};\n").fetchone(),
        lambda conn: conn.execute(FORGET, prepare=True).fetchone(),
    ],
    ids=["simple", "with a semicolon", "prepared"],
)
def test_a_call_of_maintain_that_is_a_transaction_empties_the_tables(
    db, connect, old_runs, reads, call
):
    assert one(db, PAGES) == 3
    assert call(connect()) == (2,)
    assert (one(db, LEFT), one(db, PAGES)) == (3, 1)
    reads()


def test_a_call_of_which_one_cannot_know_whether_it_is_alone_deletes_runs(db, old_runs):
    assert one(db, f"{FORGET} and %s", True) == 7
    assert (one(db, LEFT), one(db, PAGES)) == (3, 3)


def test_runs_from_before_the_clock_was_set_back_keep_no_others(db, old_runs):
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)"
        " select distinct slot, 1, 11, now() + interval '1 year', waited, taken, queue, kind, outcome"
        " from pgqueue.run"
    )
    assert one(db, FORGET) == 2
    assert one(db, LEFT) == 4


def test_maintain_goes_on_beside_a_publication_of_all_tables(db, old_runs):
    """As for logical replication: no row may be deleted then from a table without a key."""
    # For want of wal_level = logical.
    db.execute("set client_min_messages = error")
    db.execute("create publication everything for all tables")
    with db.transaction():
        assert one(db, FORGET) == 0
    assert one(db, LEFT) == 10
    assert one(db, FORGET) == 2
    assert one(db, LEFT) == 3


@pytest.fixture
def old_size(db: psycopg.Connection, old_runs: None) -> Callable[[], int]:
    """Measure the tables that hold runs to be forgotten."""
    old = "select distinct tableoid from pgqueue.run where finished_at < now() - interval '8 days'"
    tables = column(db, old)
    # Without a lock: pg_relation_size takes one, and a table that is in use is left for a minute.
    size = "select sum((pg_stat_file(pg_relation_filepath(t), true)).size) from unnest(%s::oid[]) as t"
    return lambda: one(db, size, tables)


# A worker whose app has schedules declares them when it starts, and then maintains.


def test_a_worker_empties_the_tables(workers, old_size):
    workers.start("--app", "worker_schedule_app")
    wait_until(lambda: old_size() == 0)


def test_a_worker_behind_a_pooler_empties_the_tables(workers, pooler, old_size):
    worker = workers.start("--app", "worker_schedule_app", dsn=pooler)
    wait_until(lambda: old_size() == 0)
    assert workers.finish(worker) == 0


def test_a_worker_behind_a_pooler_forgets_runs_in_a_serializable_database(
    db, workers, old_size, request
):
    """There it can call maintain() only in a transaction."""
    db.execute(
        f"alter database {db.info.dbname} set default_transaction_isolation = 'serializable'"
    )
    pooler = request.getfixturevalue("pooler")
    worker = workers.start("--app", "worker_schedule_app", dsn=pooler)
    left = "select count(*) from pgqueue.run where kind = 'k'"
    wait_until(lambda: one(db, left) == 3)
    assert old_size() > 0
    assert workers.finish(worker) == 0


# Standbys


def test_reads_on_a_standby_that_pauses_survive_and_others_are_cancelled():
    """As the reference says: hot_standby_feedback is on here."""
    with Cluster() as primary:
        with psycopg.connect(where(primary), autocommit=True) as db:
            db.execute("create extension pgqueue")
            db.execute(OLD_RUNS)
        with standby_of(primary) as standby, contextlib.ExitStack() as stack:

            def session(cluster: Cluster) -> psycopg.Connection:
                conn = psycopg.connect(where(cluster), autocommit=True)
                return stack.enter_context(conn)

            db, admin, far = session(primary), session(standby), session(standby)
            admin.execute("alter system set max_standby_streaming_delay = 0")
            admin.execute("select pg_reload_conf()")
            wait_until(
                lambda: (
                    one(admin, "show max_standby_streaming_delay") == "0"
                    and one(far, LEFT) == 10
                )
            )
            replayed = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            with far.transaction():
                assert one(far, LEFT) == 10
                admin.execute("select pg_wal_replay_pause()")
                wait_until(
                    lambda: (
                        one(admin, "select pg_get_wal_replay_pause_state()") == "paused"
                    )
                )
                assert one(db, FORGET) == 2
                end = one(db, "select pg_current_wal_insert_lsn()")
                assert one(far, LEFT) == 10
            admin.execute("select pg_wal_replay_resume()")
            wait_until(lambda: one(admin, replayed, end))
            assert one(far, LEFT) == 3

            db.execute(OLD_RUNS)
            end = one(db, "select pg_current_wal_insert_lsn()")
            wait_until(lambda: one(admin, replayed, end))
            reading = threading.Thread(target=one, args=(db, FORGET))
            with pytest.raises(errors.SerializationFailure) as cancelled:
                with far.transaction():
                    far.execute("declare c cursor for select from pgqueue.run")
                    reading.start()
                    far.execute("select pg_sleep(60)")
            reading.join()
            assert "conflict with recovery" in str(cancelled.value)
            end = one(db, "select pg_current_wal_insert_lsn()")
            wait_until(lambda: one(admin, replayed, end))
            assert one(far, LEFT) == 6  # and goes on
