"""The three workers of docs/own-worker.md: nothing but pg, nothing but psycopg, nothing but psql."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import documents
import pgqueue
import pytest
from conftest import column, one
from worker_harness import wait_until

NODE, PSYCOPG, PSQL, LOOP = documents.blocks(documents.text("docs/own-worker.md"))

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def here(db, tmp_path, monkeypatch) -> Path:
    """A folder with the workers, in the environment."""
    (tmp_path / "worker.mjs").write_text(NODE.text)
    (tmp_path / "worker.py").write_text(PSYCOPG.text)
    (tmp_path / "worker.sql").write_text(PSQL.text)
    monkeypatch.setenv("PGDATABASE", db.info.dbname)
    return tmp_path


@pytest.fixture
def start(here: Path) -> Iterator[Start]:
    """Start commands, each in a session of its own, and kill what is left of them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, cwd=here, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


@pytest.fixture
def work(start: Start) -> Start:
    """Start the worker of psycopg on some queues."""
    return lambda *queues: start(sys.executable, "worker.py", *queues)


def has_ended(db, count: int) -> Callable[[], bool]:
    """Nothing waits or runs, and so many attempts have ended."""
    state = (
        "select count(*) from pgqueue.run having not exists (select from pgqueue.job)"
    )
    return lambda: one(db, state) == count


def outcomes(db, queue: str) -> list[tuple]:
    """What happened to each attempt, in the order of the jobs."""
    query = """
        select outcome, result, error from pgqueue.run
        where queue = %s order by job_id, attempt
    """
    return db.execute(query, [queue]).fetchall()


def is_running(db, count: int) -> Callable[[], bool]:
    return lambda: one(db, "select count(*) from pgqueue.running") == count


def is_resting(db) -> bool:
    """Whether any worker of this database has parked."""
    parked = """
        select count(*) from pg_locks
        where classid = 7366514 and mode = 'ShareLock'
            and database = (
                select oid from pg_database where datname = current_database()
            )
    """
    return one(db, parked) > 0


def test_the_worker_of_psycopg_ends_each_attempt_by_its_own_outcome(db, work):
    db.execute("select pgqueue.configure(null, retry_base => '0', max_attempts => 2)")
    for payload in ("1.5", "x", "nan", [1]):
        pgqueue.enqueue(db, "a", payload, kind="number")
    pgqueue.enqueue(db, "b", 0, kind="sleep")
    theirs = pgqueue.enqueue(db, "b", kind="of another worker")
    worker = work("a", "b")
    wait_until(
        lambda: column(db, "select id from pgqueue.job") == [theirs] and is_resting(db)
    )
    bad = "ValueError(\"could not convert string to float: 'x'\")"
    unfit = "the result cannot be stored: invalid input syntax for type json"
    *first, (rejected, _, error) = outcomes(db, "a")
    assert first == [
        ("completed", 1.5, None),
        ("retry", None, bad),
        ("dead", None, bad),
        ("retry", None, unfit),
        ("dead", None, unfit),
    ]
    assert (rejected, error.partition("(")[0]) == ("dead", "TypeError")
    assert outcomes(db, "b") == [("completed", None, None)]
    errors = column(db, "select error from pgqueue.dead_job order by id")
    assert "worker.py" in errors[0], "the traceback is kept with the dead job"

    worker.terminate()
    assert worker.wait(20) == 0
    assert column(db, "select state from pgqueue.jobs") == ["ready"]


def test_the_worker_of_psycopg_is_woken_by_an_enqueue(db, work):
    work("a", "b")
    for queue in ("a", "b"):
        wait_until(lambda: is_resting(db))
        id = pgqueue.enqueue(db, queue, "1", kind="number")
        ran = "select waited < interval '10 s' from pgqueue.run where job_id = %s"
        # Unwoken it would have slept for half a minute.
        assert wait_until(lambda: column(db, ran, id)) == [True]  # noqa: B023


def test_the_view_workers_shows_the_sessions_of_the_worker_of_psycopg(db, work):
    work("q")
    shown = "select sessions, parked from pgqueue.workers where worker like 'pid %'"
    wait_until(lambda: db.execute(shown).fetchall() == [(2, True)])


def test_a_job_whose_worker_of_psycopg_is_killed_is_run_by_another(db, work):
    db.execute("select pgqueue.configure('a', lease => '3 s')")
    pgqueue.enqueue(db, "a", 4, kind="sleep")
    first = work("a")
    wait_until(is_running(db, 1))
    first.kill()
    first.wait(20)
    # The lease is shorter than the job: the other two do not take it from each other.
    second = work("a")
    wait_until(lambda: one(db, "select attempt from pgqueue.running") == 2)
    work("a")
    wait_until(has_ended(db, 2))
    who = column(db, "select worker from pgqueue.run order by attempt")
    assert who[0] == f"pid {first.pid}"
    why = f"the lease expired: worker {who[0]} stopped extending it (its only expired lease)"
    assert [(outcome, error) for outcome, _, error in outcomes(db, "a")] == [
        ("expired", why),
        ("completed", None),
    ]
    assert second.poll() is None


def test_a_worker_of_psycopg_that_is_killed_has_reported_what_has_ended(db, work):
    for seconds in (0, 0, 1000):
        last = pgqueue.enqueue(db, "a", seconds, kind="sleep")
    worker = work("a")
    wait_until(lambda: column(db, "select id from pgqueue.running") == [last])
    worker.kill()
    assert outcomes(db, "a") == [("completed", None, None)] * 2


def test_a_worker_of_psycopg_that_is_stopped_finishes_one_job_and_gives_back_the_rest(
    db, work
):
    db.execute(
        "select pgqueue.enqueue_many('a', array['5', '5', '5']::jsonb[], 'sleep')"
    )
    worker = work("a")
    # By its first heartbeat it has begun the first.
    beat = "select count(*) from pgqueue.job where lease_expires_at > claimed_at + interval '30.5 s'"
    wait_until(lambda: one(db, beat) == 3)
    worker.terminate()
    assert worker.wait(30) == 0
    assert outcomes(db, "a") == [("completed", None, None)]
    assert column(db, "select (state, attempt)::text from pgqueue.jobs") == [
        "(ready,0)",
        "(ready,0)",
    ]


def test_a_worker_of_psycopg_without_its_heartbeat_ends_with_an_error(db, work):
    for _ in range(2):
        pgqueue.enqueue(db, "a", 3, kind="sleep")
    worker = work("a")
    wait_until(is_running(db, 2))
    end = """
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and query like '%pgqueue.extend%' and pid <> pg_backend_pid()
    """
    wait_until(lambda: column(db, end) == [True])
    assert worker.wait(20) == 1
    assert outcomes(db, "a") == [("completed", None, None)]
    assert column(db, "select state from pgqueue.jobs") == ["ready"]


def test_a_worker_of_psycopg_does_not_begin_what_was_cancelled(db, work):
    for seconds in (3, 1000):
        last = pgqueue.enqueue(db, "a", seconds, kind="sleep")
    work("a")
    wait_until(is_running(db, 2))
    assert one(db, "select pgqueue.cancel(%s)", last) == "cancelling"
    wait_until(has_ended(db, 2))
    assert [outcome for outcome, *_ in outcomes(db, "a")] == ["completed", "cancelled"]


def test_the_worker_of_psql_completes_what_works_and_undoes_what_fails(db, start):
    db.execute("""
        create table done (payload jsonb);
        create table once (n int unique deferrable initially deferred);
        create schema handlers;
        create function handlers.tally(payload jsonb) returns bigint language sql as
            'insert into done values (payload); select count(*) from done';
        create function handlers.say(payload jsonb) returns void language sql as
            'insert into done values (payload)';
        create function handlers.fail(payload jsonb) returns int language sql as
            'insert into done values (payload); select 1 / 0';
        create function handlers.late(payload jsonb) returns void language sql as
            'insert into done values (payload); insert into once values (1), (1)';
        select pgqueue.configure('reports', retry_base => '0', max_attempts => 2);
    """)
    quoted = 'it\'s a "test" of \\ and :id'
    for kind in ("tally", "say", "fail", "late", "no such function"):
        pgqueue.enqueue(db, "reports", {"text": quoted}, kind=kind)
    start("sh", "-c", LOOP.text)
    wait_until(has_ended(db, 8))
    pgqueue.enqueue(db, "reports", kind="tally")
    wait_until(has_ended(db, 9))

    late = 'duplicate key value violates unique constraint "once_n_key"'
    missing = "function handlers.no such function(jsonb) does not exist"
    assert outcomes(db, "reports") == [
        ("completed", 1, None),
        ("completed", None, None),
        ("retry", None, "division by zero"),
        ("dead", None, "division by zero"),
        ("retry", None, late),
        ("dead", None, late),
        ("retry", None, missing),
        ("dead", None, missing),
        ("completed", 3, None),
    ]
    assert column(db, "select payload ->> 'text' from done") == [quoted, quoted, None]


# Node

NODE_MODULES = documents.REPO / ".venv/node/node_modules"
needs_node = pytest.mark.skipif(
    not (NODE_MODULES / "pg").is_dir() or shutil.which("node") is None,
    reason="make .venv/node needs npm",
)


@pytest.fixture
def node(start: Start, here: Path) -> Start:
    """Start the worker of Node on some queues."""
    (here / "node_modules").symlink_to(NODE_MODULES)
    return lambda *queues: start("node", "worker.mjs", *queues)


@needs_node
def test_the_worker_of_node_runs_jobs_side_by_side_and_ends_each_by_its_outcome(
    db, node
):
    db.execute("select pgqueue.configure(null, retry_base => '0', max_attempts => 2)")
    long = [pgqueue.enqueue(db, "b", 1000, kind="sleep") for _ in range(2)]
    for payload in ("three", 7):
        pgqueue.enqueue(db, "a", payload, kind="length")
    theirs = pgqueue.enqueue(db, "b", kind="of another worker")
    worker = node("a", "b")
    wait_until(lambda: len(outcomes(db, "a")) == 3 and is_resting(db))
    first, *failed = outcomes(db, "a")
    assert first == ("completed", 5, None)
    assert [outcome for outcome, *_ in failed] == ["retry", "dead"]
    assert failed[0][2].startswith("TypeError: text.trim is not a function")
    assert "worker.mjs" in one(db, "select error from pgqueue.dead_job")
    assert one(db, "select count(*) from pgqueue.running") == 2, "slots stay free"

    # A cancelled job is stopped, and a worker that is told to stop waits for its jobs.
    for job in long:
        assert one(db, "select pgqueue.cancel(%s)", job) == "cancelling"
        if job == long[0]:
            wait_until(lambda: len(outcomes(db, "b")) == 1)
            worker.terminate()
    assert worker.wait(20) == 0
    assert [outcome for outcome, *_ in outcomes(db, "b")] == ["cancelled", "cancelled"]
    assert column(db, "select id from pgqueue.job") == [theirs]


@needs_node
def test_the_worker_of_node_survives_whatever_a_handler_throws(db, node, here):
    thrown = (
        "null",
        "undefined",
        "Symbol('odd')",
        r"new Error('zero \0 byte')",
        "({ message: 'plain' })",
        "Object.create(null)",
    )
    throws = "".join(f"k{n}: () => {{ throw {t}; }}," for n, t in enumerate(thrown))
    with_them = NODE.text.replace("const HANDLERS = {", "const HANDLERS = {" + throws)
    (here / "worker.mjs").write_text(with_them)
    db.execute("select pgqueue.configure(null, max_attempts => 1)")
    for n in range(len(thrown)):
        pgqueue.enqueue(db, "a", kind=f"k{n}")
    worker = node("a")
    wait_until(lambda: has_ended(db, len(thrown))() or worker.poll() is not None)
    errors = [
        "null",
        "undefined",
        "Symbol(odd)",
        "Error: zero  byte",
        "{ message: 'plain' }",
        "[Object: null prototype] {}",
    ]
    assert outcomes(db, "a") == [("dead", None, error) for error in errors]


@needs_node
def test_the_worker_of_node_is_woken_by_an_enqueue_and_seen_in_the_view(db, node):
    node("a")
    shown = "select sessions > 1, parked from pgqueue.workers"
    for _ in range(2):
        wait_until(lambda: is_resting(db))
        id = pgqueue.enqueue(db, "a", "x", kind="length")
        ran = "select waited < interval '10 s' from pgqueue.run where job_id = %s"
        # Unwoken it would have slept for half a minute.
        assert wait_until(lambda: column(db, ran, id)) == [True]  # noqa: B023
    wait_until(lambda: db.execute(shown).fetchall() == [(True, True)])


@needs_node
def test_the_worker_of_node_ends_with_an_error_when_it_loses_the_server(db, node):
    worker = node("a")
    wait_until(lambda: is_resting(db))
    db.execute("""
        select pg_terminate_backend(pid) from pg_stat_activity
        where application_name like 'pgqueue %' and datname = current_database()
    """)
    assert worker.wait(20) == 1


@needs_node
@pytest.mark.parametrize("is_busy", [True, False])
def test_the_worker_of_node_ends_when_the_server_stops_answering(
    db, node, here, is_busy
):
    impatient = NODE.text.replace("TIMEOUT = 30_000;", "TIMEOUT = 1_000;")
    (here / "worker.mjs").write_text(impatient)
    worker = node("a")
    wait_until(lambda: is_resting(db))
    # Idle, it claims when the job is due; busy, it has a heartbeat.
    due = None if is_busy else datetime.now(UTC) + timedelta(seconds=3)
    pgqueue.enqueue(db, "a", 1000, kind="sleep", run_at=due)
    theirs = """
        select pid from pg_stat_activity
        where application_name like 'pgqueue %' and datname = current_database()
    """
    if is_busy:
        # A session that opened later would still be answered.
        wait_until(lambda: column(db, theirs + "and query ~ 'pgqueue.extend'"))
    sessions = column(db, theirs)
    try:
        for pid in sessions:
            os.kill(pid, signal.SIGSTOP)
        # If it was stopped before it heard of the job, it rests for half a minute.
        assert worker.wait(45) == 1
    finally:
        for pid in sessions:
            os.kill(pid, signal.SIGCONT)


@needs_node
def test_the_worker_of_node_fills_its_slots_and_takes_more_when_one_is_free(db, node):
    for _ in range(12):
        pgqueue.enqueue(db, "a", 2, kind="sleep")
    worker = node("a")
    wait_until(is_running(db, 10))
    worker.terminate()
    assert worker.wait(20) == 0
    ended = outcomes(db, "a")
    assert ended == [("completed", None, None)] * 10
    node("a")
    wait_until(has_ended(db, 12))


@needs_node
def test_the_worker_of_node_keeps_its_leases_and_maintains_other_queues(db, node):
    db.execute("select pgqueue.configure(null, lease => '2 s')")
    pgqueue.enqueue(db, "other")
    assert column(db, "select id from pgqueue.claim('other', 'dead', lease => '1 ms')")
    pgqueue.enqueue(db, "a", 4, kind="sleep")
    node("a")
    wait_until(lambda: outcomes(db, "other"))
    assert [outcome for outcome, *_ in outcomes(db, "other")] == ["expired"]
    wait_until(lambda: outcomes(db, "a"))
    assert outcomes(db, "a") == [("completed", None, None)]


# All three


@pytest.fixture
def psql(start: Start, db) -> Start:
    """Start the worker of psql, with a function for the kind sleep."""
    db.execute("""
        create schema handlers;
        create function handlers.sleep(jsonb) returns void language sql as ''
    """)
    return lambda queue: start("sh", "-c", LOOP.text)


@pytest.mark.parametrize(
    "worker", ["work", "psql", pytest.param("node", marks=needs_node)]
)
def test_no_worker_claims_with_a_token_of_before_a_failover(db, worker, request):
    pgqueue.enqueue(db, "reports", 0, kind="sleep")
    claim = "select token from pgqueue.claim('reports', 'old', lease => '1 ms')"
    old = one(db, claim)
    db.execute("select setval('pgqueue._cell_timeline', 7)")  # of another primary
    request.getfixturevalue(worker)("reports")
    wait_until(has_ended(db, 2))
    assert one(db, "select nextval('pgqueue.token_seq')") > old + 1_000_000
