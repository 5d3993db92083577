"""pgqueue.testing, as the tests of an application use it."""

import asyncio
import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pgqueue
import psycopg
import pytest
from conftest import column, one, url
from pgqueue.testing import assert_enqueued, drain, enqueued
from psycopg.rows import dict_row

pytest_plugins = ["pgqueue.testing"]

app = pgqueue.App()


@app.job("welcome")
def welcome(to: str) -> str:
    return f"hello {to}"


@app.job("sign up", transaction=True)
def sign_up(job: pgqueue.Job, to: str) -> None:
    job.connection.execute("create temp table signed_up as select 1")
    pgqueue.enqueue(job.connection, "default", {"to": to}, kind="welcome")


@app.job("asign up", transaction=True)
async def asign_up(job: pgqueue.Job, to: str) -> list[object]:
    assert isinstance(job.connection, psycopg.AsyncConnection)
    await welcome.enqueue(job.connection, to)
    async with job.connection.cursor() as cursor:
        await cursor.execute("select 7, pg_backend_pid()")
        return list(await cursor.fetchone())


@app.job("later")
async def later(job: pgqueue.Job) -> int:
    if job.attempt == 1 and not job.payload.get("now"):
        raise pgqueue.Snooze(timedelta(hours=1))
    return job.attempt


@app.job("broken")
def broken() -> None:
    raise ZeroDivisionError("as it must")


@app.job("first of two kinds")
@app.job("second of two kinds")
async def of_two_kinds(job: pgqueue.Job, to: str) -> str:
    return f"{job.kind}: {to}"


@app.job("final", give_up_on=(ZeroDivisionError,))
def final() -> None:
    raise ZeroDivisionError("for good")


@app.job("hopeless")
def hopeless() -> None:
    raise pgqueue.Reject("never")


@app.job("own loop")
def own_loop() -> int:
    return asyncio.run(asyncio.sleep(0, 5))


@app.job("each hour", transaction=True)
def each_hour(job: pgqueue.Job) -> None:
    each_hour.with_options(run_at=timedelta(hours=1)).enqueue(job.connection)


@pytest.fixture
def conn(dsn):
    """A connection in a transaction, as tests of applications have one."""
    with psycopg.connect(dsn) as conn:
        yield conn
        conn.rollback()


def test_one_function_handles_two_kinds(conn) -> None:
    for kind in "first of two kinds", "second of two kinds":
        pgqueue.enqueue(conn, "default", {"to": "ada"}, kind=kind)
    ran = drain(conn, app)
    assert [r.result for r in ran] == [
        "first of two kinds: ada",
        "second of two kinds: ada",
    ]


def test_drain_runs_due_jobs_and_the_jobs_they_enqueue(conn, db) -> None:
    pgqueue.enqueue(conn, "default", {"to": "ada"}, kind="sign up")
    pgqueue.enqueue(conn, "default", {"to": "bob"}, kind="welcome", priority=-1)
    pgqueue.enqueue(conn, "other", {"now": True}, kind="later")
    ran = drain(conn, app, ["default", "other"])
    assert [(r.job.kind, r.job.queue, r.outcome, r.result) for r in ran] == [
        ("sign up", "default", "completed", None),
        ("welcome", "default", "completed", "hello ada"),
        ("welcome", "default", "completed", "hello bob"),
        ("later", "other", "completed", 1),
    ]
    assert enqueued(conn) == []
    conn.rollback()
    assert column(db, "select id from pgqueue.job") == []
    assert one(db, "select count(*) from pgqueue.run") == 0


def test_drain_runs_all_queues_or_those_that_are_named(conn) -> None:
    for queue, priority in (("a", 0), ("b", 1), ("c", 2)):
        welcome.with_options(queue=queue, priority=priority).enqueue(conn, queue)
    assert [r.job.queue for r in drain(conn, app, "a")] == ["a"]
    assert [r.job.queue for r in drain(conn, app)] == ["c", "b"]


def test_drain_raises_the_error_of_a_handler_or_fails_its_job_as_a_worker_would(
    conn,
) -> None:
    for kind in ("broken", "final"):
        pgqueue.enqueue(conn, "default", kind=kind)
        with pytest.raises(ZeroDivisionError):
            drain(conn, app)
        conn.rollback()
    for kind in ("broken", "final", "hopeless", "later"):
        pgqueue.enqueue(conn, "default", kind=kind)
    failed, *dead, put_off = drain(conn, app, raises=False)
    assert (failed.outcome, put_off.outcome) == ("retry", "released")
    assert [d.outcome for d in dead] == ["dead", "dead"]
    assert "as it must" in failed.error
    assert drain(conn, app) == []


def test_drain_refuses_a_kind_without_a_handler(conn) -> None:
    pgqueue.enqueue(conn, "default", kind="unheard of")
    with pytest.raises(LookupError, match="unheard of"):
        drain(conn, app)


def test_drain_neither_runs_nor_locks_the_jobs_of_other_sessions(conn, db) -> None:
    pgqueue.enqueue(db, "default", kind="broken", priority=100)
    pgqueue.enqueue(db, "default", kind="broken", run_at=timedelta(days=1))
    pgqueue.enqueue(conn, "default", {"to": "first"}, kind="welcome")
    # A job that another session commits during this transaction is not run either.
    strange = pgqueue.enqueue(db, "default", kind="broken", priority=100)
    with conn.transaction(), conn.transaction():
        welcome.enqueue(conn, "second")
    with contextlib.suppress(ZeroDivisionError), conn.transaction():
        welcome.enqueue(conn, "undone")
        raise ZeroDivisionError
    with conn.transaction():
        conn.execute("create table t ()")
        welcome.enqueue(conn, "third")
        found = drain(conn, app, scheduled=True)
    assert [r.result for r in found] == ["hello first", "hello second", "hello third"]
    claimed = column(db, "select id from pgqueue.claim('default', 'w', 10)")
    assert (strange in claimed, len(claimed)) == (True, 2)
    assert one(db, "select count(*) from pgqueue.jobs where state = 'scheduled'") == 1


def test_drain_outside_a_transaction_needs_committed_true(conn, db) -> None:
    welcome.enqueue(db, "committed")
    with db.transaction():
        assert drain(db, app) == []
        welcome.enqueue(db, "own")
        assert [r.result for r in drain(db, app)] == ["hello own"]
    assert [r.result for r in drain(db, app, committed=True)] == ["hello committed"]
    assert one(db, "select count(*) from pgqueue.run where outcome = 'completed'") == 2
    welcome.enqueue(db, "once more")
    for refused in (db, conn):  # neither is in a transaction yet
        with pytest.raises(ValueError, match="committed=True"):
            drain(refused, app)
    assert [r.result for r in drain(conn, app, committed=True)] == ["hello once more"]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_drain_refuses_a_transaction_that_is_not_read_committed(dsn, level) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"begin isolation level {level}")
        welcome.enqueue(conn, to="ada")
        with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="READ COMMITTED"):
            drain(conn, app)


def test_a_job_whose_error_drain_raises_has_failed(db) -> None:
    for kind in ("broken", "final"):
        pgqueue.enqueue(db, "default", kind=kind)
        with pytest.raises(ZeroDivisionError):
            drain(db, app, committed=True)
    assert db.execute(
        "select kind, state from pgqueue.jobs union all select kind, 'dead' from pgqueue.dead_job"
    ).fetchall() == [("broken", "scheduled"), ("final", "dead")]


def test_drain_runs_scheduled_jobs_by_run_at_and_each_once(conn) -> None:
    for name, hours in (("second", 2), ("third", 3), ("first", 1)):
        in_hours = timedelta(hours=hours)
        welcome.with_options(run_at=in_hours).enqueue(conn, name)
    welcome.with_options(run_at=datetime.now(UTC)).enqueue(conn, "now")
    each_hour.with_options(run_at=timedelta(days=1)).enqueue(conn)
    later.with_options(run_at=timedelta(days=2)).enqueue(conn)
    assert [r.result for r in drain(conn, app)] == ["hello now"]
    ran = drain(conn, app, scheduled=True)
    assert [r.result for r in ran[:3]] == ["hello first", "hello second", "hello third"]
    assert [r.job.kind for r in ran[3:]] == ["each hour", "later"]
    assert drain(conn, app) == []
    assert [j.kind for j in enqueued(conn)] == ["later", "each hour"]
    assert len(drain(conn, app, scheduled=True)) == 2


def test_a_retry_runs_in_the_next_drain_of_scheduled_jobs(conn) -> None:
    broken.with_options(max_attempts=2).enqueue(conn)
    ends = [drain(conn, app, raises=False, scheduled=True) for _ in range(3)]
    assert [[r.outcome for r in ran] for ran in ends] == [["retry"], ["dead"], []]


CAPS = [
    "max_running => 1",
    "kind => 'welcome', max_running => 1",
    "rate_limit => 1, rate_period => '1 hour'",
]
GROUP_LIMITS = [
    "group_limit => 1",
    "group_key => 'g', group_limit => 1",
    "group_key => '*', rate_limit => 1, rate_period => '1 hour'",
]


def enqueue_group(conn: psycopg.Connection) -> None:
    for n in range(3):
        welcome.with_options(group_key="g").enqueue(conn, to=str(n))


@pytest.mark.parametrize(
    "queue, limit",
    [("'default'", limit) for limit in ["lease => '1 hour'", *CAPS, *GROUP_LIMITS]]
    + [("null", limit) for limit in GROUP_LIMITS],
)
def test_drain_runs_all_jobs_of_a_group_whatever_the_limits(conn, queue, limit) -> None:
    conn.execute(f"select pgqueue.configure({queue}, {limit})")
    enqueue_group(conn)
    before = [job.group_key for job in enqueued(conn)]
    ran = drain(conn, app)
    assert [job.result for job in ran] == ["hello 0", "hello 1", "hello 2"]
    assert before == ["g"] * 3
    assert enqueued(conn) == []


@pytest.mark.parametrize("limit", CAPS)
def test_drain_says_that_a_cap_of_all_queues_keeps_it_from_a_job(conn, limit) -> None:
    conn.execute(f"select pgqueue.configure(null, {limit})")
    enqueue_group(conn)
    with pytest.raises(RuntimeError, match="max_running, rate or pause of all queues"):
        drain(conn, app)
    assert {(job.queue, job.group_key) for job in enqueued(conn)} == {("default", "g")}


def test_drain_goes_on_behind_a_job_that_has_expired(conn) -> None:
    welcome.with_options(
        expires_at=datetime.now(UTC) + timedelta(microseconds=1)
    ).enqueue(conn, to="nobody")
    welcome.enqueue(conn, to="ada")
    assert [job.result for job in drain(conn, app)] == ["hello ada"]


def test_a_job_of_a_group_that_fails_in_a_drain_goes_back_to_it(conn) -> None:
    conn.execute("select pgqueue.enqueue('default', '{}', 'welcome', group_key => 'g')")
    assert [job.outcome for job in drain(conn, app, raises=False)] == ["retry"]
    (job,) = enqueued(conn)
    assert (job.queue, job.group_key) == ("default", "g")


def test_drain_of_a_job_that_enqueues_itself_stops_at_max_jobs(conn) -> None:
    again = pgqueue.App()

    @again.job("again", transaction=True)
    def handler(job: pgqueue.Job) -> None:
        handler.enqueue(job.connection)

    handler.enqueue(conn)
    assert len(drain(conn, again, max_jobs=30)) == 30


def test_drain_gives_a_handler_its_session_as_a_worker_does(dsn) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        heard: list[str] = []
        conn.add_notice_handler(lambda notice: heard.append(notice.message_primary))
        asign_up.enqueue(conn, to="ada")
        pid = conn.info.backend_pid
        assert [r.result for r in drain(conn, app)] == [[7, pid], "hello ada"]
        conn.execute("do $$ begin raise notice 'still heard'; end $$")
        assert heard == ["still heard"]
        assert conn.execute("select 1 as n").fetchone() == {"n": 1}
        conn.rollback()


def test_a_failed_statement_rolls_back_its_attempt_and_not_the_test(conn) -> None:
    own = pgqueue.App()

    @own.job("fails")
    def fails() -> None:
        conn.execute("create table left_behind ()")
        conn.execute("select 1 / 0")

    @own.job("fails whole", transaction=True)
    async def fails_whole(job: pgqueue.Job) -> None:
        await job.connection.execute("create table left_behind ()")
        await job.connection.execute("select 1 / 0")

    for task in (fails, fails_whole):
        task.enqueue(conn)
        with pytest.raises(psycopg.errors.DivisionByZero):
            drain(conn, own)
        assert one(conn, "select to_regclass('left_behind')") is None
        task.enqueue(conn)
        assert [r.outcome for r in drain(conn, own, raises=False)] == ["retry"]


@pytest.mark.timeout(60)
def test_drain_cancels_an_async_handler_at_its_timeout(conn) -> None:
    own = pgqueue.App(timeout=0.05)
    is_cleaned_up = []

    @own.job("waits", max_attempts=1)
    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cleaned_up.append(True)

    @own.job("queries", max_attempts=1, transaction=True)
    async def queries(job: pgqueue.Job) -> None:
        await job.connection.execute("create table left_behind ()")
        await job.connection.execute("select pg_sleep(600)")

    @own.job("in time", timeout=3600)
    async def in_time() -> str:
        return "done"

    for task in (waits, queries, in_time):
        task.enqueue(conn)
    ran = drain(conn, own, raises=False)
    assert [r.outcome for r in ran] == ["dead", "dead", "completed"]
    said = [r.error.partition("\n")[0] for r in ran[:2]]
    assert said == ["TimeoutError: timed out after 0.05 seconds"] * 2
    assert is_cleaned_up
    assert one(conn, "select to_regclass('left_behind')") is None


def test_drain_raises_what_a_handler_raises_within_a_stream(dsn) -> None:
    own = pgqueue.App()

    @own.job("streams", transaction=True)
    def streams(job: pgqueue.Job) -> None:
        rows = job.connection.cursor().stream("select generate_series(1, 1000)")
        raise ValueError(next(rows))  # whose traceback keeps the rows

    with psycopg.connect(dsn) as conn:
        streams.enqueue(conn)
        with pytest.raises(ValueError):
            drain(conn, own, raises=False)  # its session is closed


def test_drain_leaves_no_thread_or_resource_open(conn) -> None:
    gc.collect()  # what earlier tests have left
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for task in (sign_up, asign_up):
            task.enqueue(conn, to="ada")
        before = threading.active_count()
        assert len(drain(conn, app)) == 4
        assert threading.active_count() == before
        gc.collect()
    assert [str(warning.message) for warning in told] == []


def test_drain_works_inside_an_event_loop_and_on_an_async_connection(dsn, db) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            pgqueue.enqueue(db, "default", kind="broken")
            await own_loop.enqueue(conn)
            await asign_up.enqueue(conn, to="ada")
            assert_enqueued(conn, kind="own loop", count=1)
            first, second, third = drain(conn, app)
            assert (first.result, second.result[0]) == (5, 7)
            assert third.result == "hello ada"
            await conn.rollback()

    asyncio.run(run())


def test_drain_works_on_connections_and_sessions_of_sqlalchemy(db) -> None:
    import sqlalchemy as alchemy
    from sqlalchemy import orm

    engine = alchemy.create_engine(url(db, "psycopg"))
    with engine.connect() as conn, orm.Session(engine) as session:
        for target in (conn, session):
            welcome.enqueue(target, to="ada")
            assert_enqueued(target, "default", payload={"to": "ada"}, count=1)
            assert [r.result for r in drain(target, app)] == ["hello ada"]
            target.rollback()
    engine.dispose()


def test_drain_works_on_async_sqlalchemy_and_refuses_asyncpg(db) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def run() -> None:
        engine = create_async_engine(url(db, "psycopg"))
        async with engine.connect() as conn, AsyncSession(engine) as session:
            for target in (conn, session):
                await welcome.enqueue(target, to="ada")
                assert [r.result for r in drain(target, app)] == ["hello ada"]
                await target.rollback()
        await engine.dispose()
        engine = create_async_engine(url(db, "asyncpg"))
        async with engine.connect() as conn:
            with pytest.raises(TypeError, match="psycopg 3"):
                drain(conn, app)
        await engine.dispose()

    asyncio.run(run())


def test_assert_enqueued_finds_jobs_by_queue_kind_payload_and_count(conn) -> None:
    ids = pgqueue.enqueue_many(conn, "emails", [{"to": "ada", "n": 1}, {"to": "bob"}])
    (job,) = assert_enqueued(conn, "emails", payload={"to": "ada"})
    assert (job.id, job.payload["n"], job.kind) == (ids[0], 1, "emails")
    assert_enqueued(conn, kind="emails", count=2)
    assert_enqueued(conn, "other", count=0)
    for wrong in ({"queue": "other"}, {"count": 3}, {"payload": {"to": "eve"}}):
        with pytest.raises(AssertionError):
            assert_enqueued(conn, **wrong)


def test_assert_enqueued_asserts_under_python_o_as_well(dsn) -> None:
    code = (
        "import psycopg, sys; from pgqueue.testing import assert_enqueued\n"
        "assert_enqueued(psycopg.connect(sys.argv[1]), 'emails')"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code, dsn], capture_output=True, text=True
    )
    assert "AssertionError: 0 such jobs among []" in done.stderr


@pytest.fixture
def _here(dsn, monkeypatch) -> None:
    monkeypatch.setenv("PGQUEUE_TEST_DSN", dsn)
    monkeypatch.setenv("PGQUEUE_DSN", "host=/nowhere")
    monkeypatch.setenv("DATABASE_URL", "host=/nowhere")


def test_nothing_done_on_pgqueue_conn_is_committed(_here, db, pgqueue_conn) -> None:
    with pgqueue_conn.transaction():  # as an application does
        pgqueue.enqueue(pgqueue_conn, "emails", {"to": "ada"}, kind="welcome")
    assert_enqueued(pgqueue_conn, "emails", count=1)
    assert len(drain(pgqueue_conn, app)) == 1
    with pytest.raises(psycopg.ProgrammingError):
        pgqueue_conn.commit()
    assert one(db, "select count(*) from pgqueue.run") == 0


def test_pgqueue_conn_connects_only_to_pgqueue_test_dsn(dsn, db, tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pgqueue\n"
        "pytest_plugins = ['pgqueue.testing']\n"
        "def test_it(pgqueue_conn):\n"
        "    pgqueue.enqueue(pgqueue_conn, 'emails')\n"
    )

    def run(**env: str) -> str:
        path = str(Path(pgqueue.__file__).parents[1])
        inherited = {k: v for k, v in os.environ.items() if "PGQUEUE" not in k}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=100,
        )
        return done.stdout

    refused = run(PGQUEUE_DSN=dsn, DATABASE_URL=dsn)
    assert "pgqueue_conn needs PGQUEUE_TEST_DSN" in refused
    assert "1 error" in refused
    assert "1 passed" in run(PGQUEUE_TEST_DSN=dsn)
    assert one(db, "select count(*) from pgqueue.job") == 0


@app.job("order")
def order(job: pgqueue.Job, number: int) -> object:
    job.step("hello", welcome, "ada")
    return job.wait_for(f"order {number} paid", timeout=60)


@app.job("aorder", transaction=True)
async def aorder(job: pgqueue.Job, number: int) -> object:
    await job.step("hello", asyncio.sleep, 0, "ada")
    return await job.wait_for(f"order {number} paid", timeout=60)


@pytest.mark.parametrize("task", [order, aorder])
def test_a_job_that_waits_goes_on_in_the_drain_after_its_event(conn, task) -> None:
    task.enqueue(conn, number=7)
    (ran,) = drain(conn, app)
    assert (ran.outcome, ran.result, ran.job.attempt) == ("suspended", None, 1)
    assert [ran.outcome for ran in drain(conn, app, scheduled=True)] == ["suspended"]
    assert drain(conn, app) == []
    pgqueue.emit(conn, "order 7 paid", {"by": "card"})
    (ran,) = drain(conn, app)
    assert (ran.outcome, ran.result) == ("completed", {"by": "card"})


@app.job("threads")
def in_threads(job: pgqueue.Job) -> list[int]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda n: job.step(f"{n}", int, n), range(8)))


@app.job("threads in a transaction", transaction=True)
def in_threads_of_a_transaction(job: pgqueue.Job) -> list[int]:
    return in_threads(job)


@app.job("tasks")
async def in_tasks(job: pgqueue.Job) -> list[int]:
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(job.step(f"{n}", asyncio.sleep, 0, n)) for n in range(8)
        ]
    return [task.result() for task in running]


@app.job("tasks in a transaction", transaction=True)
async def in_tasks_of_a_transaction(job: pgqueue.Job) -> list[int]:
    return await in_tasks(job)


@pytest.mark.parametrize(
    "task",
    [in_threads, in_threads_of_a_transaction, in_tasks, in_tasks_of_a_transaction],
)
def test_steps_side_by_side_are_drained_as_by_a_worker(conn, task) -> None:
    task.enqueue(conn)
    (ran,) = drain(conn, app)
    assert (ran.outcome, ran.result) == ("completed", list(range(8)))


@app.job("long names", transaction=True)
def long_names(job: pgqueue.Job) -> list[int]:
    return [job.step("é" * 100, int, n) for n in range(12)]


def test_a_long_name_of_a_step_counts_up_as_a_short_one_does(conn) -> None:
    long_names.enqueue(conn)
    (ran,) = drain(conn, app)
    assert (ran.outcome, ran.result) == ("completed", list(range(12)))


NAMES = ["", "x" * 201, "é" * 101, "a\0b", "half a \ud83d"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_cannot_be_saved_is_refused_before_the_step_is_done(
    conn, name
) -> None:
    done, app = [], pgqueue.App()

    @app.job("names")
    async def names(job: pgqueue.Job) -> None:
        with pytest.raises(ValueError, match="name of a step"):
            await job.step(name, done.append, 1)
        with pytest.raises(ValueError, match="name of a step"):
            await job.sleep(name, 60)

    names.enqueue(conn)
    (ran,) = drain(conn, app)
    assert (ran.outcome, done) == ("completed", [])


@dataclass
class Receipt:
    number: int


def test_a_step_reads_what_a_task_or_a_partial_returns_by_its_annotation(conn) -> None:
    app = pgqueue.App()

    @app.job("charge")
    def charge(number: int) -> Receipt:
        return Receipt(number)

    @app.job("order")
    def order(job: pgqueue.Job) -> list[int]:
        receipts = [
            job.step("task", charge, 1),
            job.step("partial", functools.partial(charge.function, 2)),
            job.step("both", functools.partial(charge, 3)),
        ]
        return [receipt.number for receipt in receipts]

    order.enqueue(conn)
    (ran,) = drain(conn, app)
    assert (ran.outcome, ran.result) == ("completed", [1, 2, 3])
