"""How many sessions a worker has, and what jobs find in them.

transaction=True: no job finds in its session what an earlier job left there.
"""

import threading
from contextlib import closing

import pgqueue
import psycopg
import pytest
from conftest import column, one
from pgqueue import database
from pgqueue.drivers import run_without_loop
from pgqueue.worker import finisher, heartbeat
from worker_harness import (
    OF_WORKERS,
    QUEUE,
    RESTING,
    all_backends,
    is_empty,
    outcomes,
    wait_until,
)

pytest_plugins = ["worker_harness"]

NO_RETRY = "select pgqueue.configure(null, retry_base => '1 hour')"


SESSIONS = f"select count(*) {OF_WORKERS}"


def test_an_idle_worker_has_one_session_and_a_busy_one_three(db, workers) -> None:
    worker = workers.start()
    wait_until(lambda: one(db, RESTING))
    assert one(db, SESSIONS) == 1
    pgqueue.enqueue(db, QUEUE, kind="hold")
    workers.began()
    wait_until(lambda: one(db, SESSIONS) == 3)
    workers.let_go()
    wait_until(lambda: outcomes(db) == {"completed": 1})
    assert workers.finish(worker) == 0


def test_sessions_that_are_not_needed_any_more_are_closed(db, dsn, monkeypatch) -> None:
    for module in finisher, heartbeat:
        monkeypatch.setattr(module, "KEEP", 0.5)
    app = pgqueue.App()
    app.job("noop")(lambda: None)
    worker = pgqueue.Worker(app, {QUEUE: 1}, dsn=dsn, lease=1.0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        for count in 1, 2:
            pgqueue.enqueue(db, QUEUE, kind="noop")
            wait_until(lambda: outcomes(db) == {"completed": count})  # noqa: B023
            wait_until(lambda: one(db, SESSIONS) == 1)
            assert worker.sources.services[0].conn is None
    finally:
        worker.stop()
        thread.join(30)


def test_no_session_stays_read_only_longer_than_its_database(db, dsn) -> None:
    app = pgqueue.App()
    app.job("noop")(lambda: None)

    @app.job("step")
    def step(job: pgqueue.Job) -> None:
        job.step("one", int)

    @app.job("transaction", transaction=True)
    def transaction(job: pgqueue.Job) -> None:
        pass

    def have_failed() -> bool:
        ask = "select count(distinct kind) = 2 from pgqueue.run where outcome = 'retry'"
        return one(db, ask)

    db.execute(
        "select pgqueue.configure(null, retry_base => '10 ms', max_attempts => 1e6::int)"
    )
    worker = pgqueue.Worker(app, {QUEUE: 1}, dsn=dsn, concurrency=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        pgqueue.enqueue(db, QUEUE, kind="noop")
        wait_until(lambda: is_empty(db))  # its own sessions are there, and can write
        setting = f'alter database "{db.info.dbname}" set default_transaction_read_only'
        db.execute(f"{setting} = on")
        for kind in "step", "transaction":
            pgqueue.enqueue(db, QUEUE, kind=kind)
        wait_until(have_failed)
        db.execute(f"{setting} = off")
        wait_until(lambda: is_empty(db), 10)
    finally:
        worker.stop()
        thread.join(30)


@pytest.mark.parametrize("kind", ["leaks_into_session", "aleaks_into_session"])
def test_a_session_is_reset_and_used_for_later_jobs(db, workers, kind) -> None:
    workers.start("--concurrency", "12")
    for count in range(1, 15):
        pgqueue.enqueue(db, QUEUE, kind=kind)
        done = "select count(*) from pgqueue.run"
        wait_until(lambda: one(db, done) == count)  # noqa: B023
    assert outcomes(db) == {"completed": 14}
    results = column(db, "select result from pgqueue.run")
    assert {path for path, _ in results} == {one(db, "show search_path")}
    # The last job may still be resetting the session when the next one begins.
    assert len({pid for _, pid in results}) <= 3


@pytest.mark.parametrize("kind", ["soils", "asoils"])
def test_a_session_shows_nothing_of_the_previous_job(db, workers, kind) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 5, kind=kind)
    assert workers.start("--concurrency", "1", "--burst").wait(30) == 0
    assert outcomes(db) == {"completed": 5}
    first, *others = column(db, "select result from pgqueue.run order by job_id")
    assert first["settings"]["search_path"] == one(db, "show search_path")
    assert others == [first] * 4


@pytest.mark.parametrize("kind", ["effect", "aeffect"])
def test_other_peoples_sessions_behind_a_pooler_stay_as_they_are(
    db, workers, pooler, kind
) -> None:
    db.execute("create table effect (job_id bigint)")
    look = (
        "select pg_backend_pid(), current_setting('their.own', true),"
        " current_setting('default_transaction_isolation')"
    )

    serializable = "set_config('default_transaction_isolation', 'serializable', false)"
    all_backends(pooler, f"select set_config('their.own', 'x', false), {serializable}")
    before = all_backends(pooler, look)
    assert {row[1:] for row in before} == {("x", "serializable")}
    worker = workers.start("--poll-interval", "0.5", dsn=pooler)
    for count in range(10, 40, 10):
        pgqueue.enqueue_many(db, QUEUE, [None] * 10, kind=kind)
        wait_until(lambda: outcomes(db) == {"completed": count})  # noqa: B023
    assert workers.finish(worker) == 0
    assert all_backends(pooler, look) == before


@pytest.mark.parametrize("timeout", ["statement_timeout", "transaction_timeout"])
def test_a_timeout_is_not_for_the_calls_of_a_worker(db, dsn, timeout) -> None:
    """Whose plans each new session makes anew: one too short would never let it go on."""
    if timeout == "transaction_timeout" and db.info.server_version < 170000:
        pytest.skip("there is none before Postgres 17")
    db.execute(f"alter database {db.info.dbname} set {timeout} = '2s'")
    with closing(psycopg.connect(dsn, autocommit=True)) as conn:
        run_without_loop(database.set_up(conn))
        assert one(conn, f"show {timeout}") == "0"
    app = pgqueue.App()

    @app.job("shows", transaction=True)
    def shows(job: pgqueue.Job) -> str:
        return one(job.connection, f"show {timeout}")

    pgqueue.enqueue(db, QUEUE, kind="shows")
    pgqueue.Worker(app, {QUEUE: 1}, dsn=dsn, burst=True).run()
    assert column(db, "select result from pgqueue.run") == ["2s"]


HOW = "close copy unread commit rollback terminate abort stream break pipeline".split()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["wrecks", "awrecks"])
@pytest.mark.parametrize("how", HOW)
def test_a_wrecked_session_harms_no_other_job(db, workers, kind, how) -> None:
    db.execute(NO_RETRY)
    db.execute("create table effect (job_id bigint)")
    workers.start("--concurrency", "1")
    for _ in range(2):
        bad = pgqueue.enqueue(db, QUEUE, {"how": how}, kind=kind)
        good = [pgqueue.enqueue(db, QUEUE, kind=k) for k in ("effect", "aeffect")]
        done = "select count(*) from pgqueue.run where job_id = any(%s)"
        wait_until(lambda: one(db, done, good) == 2)  # noqa: B023
        wait_until(lambda: one(db, done, [bad]) == 1)  # noqa: B023
    completed = column(db, "select job_id from pgqueue.run where outcome = 'completed'")
    if how in ("close", "terminate", "abort", "stream", "pipeline"):
        assert outcomes(db) == {"completed": 4, "retry": 2}
    if how == "break":
        assert outcomes(db) == {"completed": 6}
    if how != "rollback":  # which the handler chose itself
        assert sorted(column(db, "select job_id from effect")) == sorted(completed)


def test_a_handler_that_is_cancelled_within_a_stream_holds_no_slot(db, workers) -> None:
    db.execute(NO_RETRY)
    pgqueue.enqueue(db, QUEUE, kind="streams", priority=1)
    pgqueue.enqueue(db, QUEUE, kind="amark")
    workers.start("--concurrency", "1")
    wait_until(lambda: outcomes(db) == {"completed": 1, "retry": 1}, 10)


def test_a_connection_kept_by_a_handler_cannot_write_in_a_later_transaction(
    db, workers
) -> None:
    """A thread that outlives its handler could do that."""
    db.execute("create table effect (job_id bigint)")
    pgqueue.enqueue(db, QUEUE, kind="keeps_connection", priority=1)
    pgqueue.enqueue(db, QUEUE, kind="uses_kept_connection")
    assert workers.start("--concurrency", "1", "--burst").wait(30) == 0
    assert outcomes(db) == {"completed": 2}
    assert column(db, "select job_id from effect") == []
