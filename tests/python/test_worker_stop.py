"""A worker ends within a second of --shutdown-timeout, whatever holds it up."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pgqueue
import psycopg
import pytest
from cluster import Cluster
from conftest import one
from worker_harness import QUEUE, RESTING, Workers, wait_until, where, workers_on

pytest_plugins = ["worker_harness"]

LIMIT = 1.0
HANGING = (
    "hang hang_in_query ahang_in_query ahang_in_thread ahang_stubborn ahang_blocking"
).split()
WAITING = (
    "select count(*) from pg_stat_activity"
    " where application_name like 'pgqueue %' and wait_event_type = 'Lock'"
)


def start(workers: Workers, *args: str, **options) -> subprocess.Popen[bytes]:
    return workers.start("--shutdown-timeout", str(LIMIT), *args, **options)


def grace() -> float:
    """A second, and some more on a busy machine: twice what Python takes to start there."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import psycopg"], check=True)
    return 1 + 2 * (time.monotonic() - began)


def time_to_end(workers: Workers, worker: subprocess.Popen[bytes]) -> float:
    """Return how long a worker takes to end after SIGTERM."""
    began = time.monotonic()
    assert workers.finish(worker, 10) == 0
    return time.monotonic() - began


@contextlib.contextmanager
def frozen(server: Cluster) -> Iterator[None]:
    """Stop a server and its sessions: connections stay open, but nothing answers."""
    stopped = [server.pid]
    os.kill(server.pid, signal.SIGSTOP)  # so that no session starts meanwhile
    try:
        tasks = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
        for pid in map(int, tasks.split()):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", HANGING)
def test_the_shutdown_timeout_is_kept_with_handlers_that_do_not_end(
    db, workers, kind
) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind=kind)
    worker = start(workers)
    workers.began()
    assert LIMIT <= time_to_end(workers, worker) <= LIMIT + grace()
    assert list(db.execute("select state, attempt from pgqueue.jobs")) == [("ready", 1)]
    assert f"said by {job}" in workers.log()


@pytest.mark.parametrize("kind", ["hang_in_left_thread", "ahang_in_left_thread"])
def test_the_shutdown_timeout_is_kept_with_threads_that_handlers_left_behind(
    db, workers, kind
) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind=kind)
    worker = start(workers)
    wait_until(lambda: one(db, "select count(*) from pgqueue.run"))
    assert time_to_end(workers, worker) <= LIMIT + grace()
    assert f"said by {job}" in workers.log()


@pytest.mark.parametrize(
    ("seconds", "ends"), [(0, ["atexit 0", "finalized 0"]), (60, ["atexit 0"])]
)
def test_python_does_not_take_itself_apart_under_a_handler_that_runs_on(
    db, workers, seconds, ends
) -> None:
    """It may crash when such a thread starts another one meanwhile."""
    pgqueue.enqueue(db, QUEUE, {"seconds": seconds}, kind="watch_the_end")
    # In the short form forked.py would leave that out.
    worker = start(workers, env={"PGQUEUE_TEST_LONG": "1"})
    workers.began()
    assert workers.finish(worker) == 0
    assert workers.ran.read_text().splitlines()[1:] == ends


@pytest.mark.sample(4)
@pytest.mark.parametrize("table", ["job", "run"])
@pytest.mark.parametrize("kind", ["hold", "ahold"])
@pytest.mark.parametrize("has_ended", [False, True])
def test_the_shutdown_timeout_is_kept_while_another_session_locks_a_table(
    db, workers, connect, table, kind, has_ended
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind=kind)
    worker = start(workers)
    workers.began(3)
    stranger = connect()
    with stranger.transaction():
        stranger.execute(f"lock table pgqueue.{table}")
        if has_ended:
            workers.let_go()
            wait_until(lambda: one(db, WAITING))
        assert LIMIT <= time_to_end(workers, worker) <= LIMIT + grace()
    assert "a hook" not in workers.log()  # because this app has none


def test_the_shutdown_timeout_is_kept_while_a_lock_keeps_the_worker_from_claiming(
    db, workers, connect
) -> None:
    worker = start(workers, "--no-listen", "--poll-interval", "0.1")
    stranger = connect()
    with stranger.transaction():
        stranger.execute("lock table pgqueue.job")
        wait_until(lambda: one(db, WAITING))
        assert time_to_end(workers, worker) <= LIMIT + grace()


@pytest.mark.parametrize("state", ["starting", "idle", "running", "ended"])
def test_the_shutdown_timeout_is_kept_when_the_server_no_longer_answers(
    server, state
) -> None:
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(workers_on(where(server)))
        db = stack.enter_context(psycopg.connect(where(server), autocommit=True))
        db.execute("truncate pgqueue.job")
        if state in ("running", "ended"):
            pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind="hold")
        if state != "starting":
            worker = start(workers)
            wait_until(lambda: one(db, RESTING))
        if state in ("running", "ended"):
            workers.began(3)
        stack.enter_context(frozen(server))
        if state == "starting":
            worker = start(workers)
            wait_until(lambda: "works on" in workers.log())
        if state == "ended":
            workers.let_go()
            wait_until(lambda: workers.notes().total() == 3)
        assert time_to_end(workers, worker) <= LIMIT + grace()


def test_the_shutdown_timeout_is_kept_by_several_processes(db, workers) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 4, kind="ahang_in_thread")
    parent = start(workers, "--processes", "2", "--concurrency", "2")
    workers.began(4)
    assert LIMIT <= time_to_end(workers, parent) <= LIMIT + grace()
    assert set(db.execute("select state, attempt from pgqueue.jobs")) == {("ready", 1)}


def test_the_shutdown_timeout_is_kept_when_nobody_reads_the_output(db, workers) -> None:
    pgqueue.enqueue(db, QUEUE, kind="ahang_in_thread")
    reading, writing = os.pipe()
    worker = start(workers, output=writing)
    os.close(writing)
    workers.began()
    os.close(reading)
    worker.send_signal(signal.SIGTERM)
    began = time.monotonic()
    worker.wait(10)
    assert time.monotonic() - began <= LIMIT + grace()
    assert list(db.execute("select state, attempt from pgqueue.jobs")) == [("ready", 1)]


@pytest.mark.parametrize("kind", HANGING)
def test_a_second_signal_does_not_wait_for_handlers(db, workers, kind) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind=kind)
    worker = workers.start()  # with the default of 30 seconds
    workers.began()
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in workers.log())
    worker.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert worker.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - began <= grace()
    assert list(db.execute("select state, attempt from pgqueue.jobs")) == [("ready", 1)]
    assert f"said by {job}" in workers.log()


def test_an_async_handler_may_clean_up_when_the_shutdown_timeout_is_over(
    db, workers
) -> None:
    job = pgqueue.enqueue(db, QUEUE, {"seconds": 0.1}, kind="cleans_up")
    worker = start(workers)
    workers.began()
    assert workers.finish(worker) == 0
    assert workers.notes("cleaned")[job] == 1
    assert "WorkerStopped" in one(db, "select last_error from pgqueue.jobs")


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("name", ["dbname=no_such_database", "host=/no/such/folder"])
def test_a_burst_that_cannot_connect_ends_with_1(db, workers, processes, name) -> None:
    args = "--burst", "--processes", processes
    worker = workers.start(*args, dsn=f"{workers.dsn} {name}")
    assert worker.wait(30) == 1
    assert name.partition("=")[2] in workers.log()
