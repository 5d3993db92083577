"""Handlers, and programs around a worker, that do what nobody would: it copes, or says what is wrong."""

import asyncio
import io
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pgqueue
import psycopg
import pytest
from conftest import column, one
from pgqueue import Worker
from pgqueue.worker.deadline import Server
from pgqueue.worker.lines import JsonLines, TextLines
from pgqueue.worker.maintenance import Maintenance
from worker_harness import is_empty, outcomes, wait_until

pytest_plugins = ["worker_harness"]

STATES = "select kind, state from pgqueue.jobs order by kind"


@contextmanager
def running(worker: Worker) -> Iterator[threading.Thread]:
    """Run it in a thread; it has to end by itself once it is told to."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(20)
        worker.stop()
    assert not thread.is_alive()


@contextmanager
def encoded(db: psycopg.Connection, dsn: str, encoding: str) -> Iterator[str]:
    """Make a database of this encoding, with pgqueue in it."""
    name = f"pgqueue_{encoding.lower()}"
    db.execute(f"drop database if exists {name} with (force)")
    db.execute(
        f"create database {name} encoding '{encoding}' locale 'C' template template0"
    )
    there = psycopg.conninfo.make_conninfo(dsn, dbname=name, client_encoding="utf8")
    with psycopg.connect(there, autocommit=True) as other:
        other.execute("create extension pgqueue")
    yield there
    db.execute(f"drop database {name} with (force)")


def test_what_the_encoding_of_the_database_lacks_costs_no_error(db, dsn) -> None:
    """Also if only the worker's own mark for a long line is not in it."""
    app = pgqueue.App()

    @app.job("says", max_attempts=1)
    def says(code: int) -> None:
        raise ValueError(chr(code) * 5000)

    with (
        encoded(db, dsn, "LATIN1") as there,
        psycopg.connect(there, autocommit=True) as latin,
    ):
        for code in ord("x"), 0x9375:
            pgqueue.enqueue(latin, "q", {"code": code}, kind="says")
        Worker(app, {"q": 1}, dsn=there, burst=True).run()
        found = column(latin, "select error from pgqueue.dead_job order by id")
    assert found[0].startswith("ValueError: xxx")
    assert found[1].startswith("ValueError: \\u9375\\u9375")
    assert all("in says" in error for error in found), "with the traceback"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_result_that_the_encoding_of_the_database_lacks_undoes_no_work(
    db, dsn, encoding
) -> None:
    app = pgqueue.App()

    @app.job("returns")
    def returns() -> str:
        return chr(0x9375)

    @app.job("writes", transaction=True)
    def writes(job: pgqueue.Job) -> str:
        job.connection.execute("insert into done values (1)")
        return chr(0x9375)

    @app.job("async", transaction=True)
    async def writes_later(job: pgqueue.Job) -> str:
        await job.connection.execute("insert into done values (2)")
        return chr(0x9375)

    with (
        encoded(db, dsn, encoding) as there,
        psycopg.connect(there, autocommit=True) as other,
    ):
        other.execute("create table done (nth int)")
        for kind in app.tasks:
            pgqueue.enqueue(other, "q", kind=kind, max_attempts=1)
        Worker(app, {"q": 1}, dsn=there, burst=True).run()
        found = column(
            other, "select outcome || ' ' || (result ? 'not_stored') from pgqueue.run"
        )
        assert found == ["completed true"] * 3
        assert sorted(column(other, "select nth from done")) == [1, 2]

        # A worker of another language may not look before.
        pgqueue.enqueue_many(other, "q", [None] * 3, max_attempts=1)
        held = other.execute("select id, token from pgqueue.claim('q', 'w', 3)")
        ids, tokens = map(list, zip(*held, strict=True))
        texts = [r'"\u9375"', r'{"event": "\u9375"}', "1"]
        finish = "select status from pgqueue.finish(%s, %s, '{complete,suspend,complete}', %s)"
        found = column(other, finish, ids, tokens, texts)
        assert found == ["dead", "dead", "completed"]


def test_a_handler_that_cancels_tasks_that_have_not_begun_holds_no_slot_and_no_job(
    db, dsn
) -> None:
    app, hit, may_end = pgqueue.App(), [], threading.Event()

    @app.job("cancels")
    async def cancels() -> None:
        while not may_end.is_set():
            await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                hit.append(task)

    @app.job("late")
    async def late() -> None:
        pass

    worker = Worker(app, {"q": 1}, dsn=dsn, concurrency=3)
    pgqueue.enqueue(db, "q", kind="cancels")
    with running(worker):
        wait_until(lambda: worker.executor.running)
        pgqueue.enqueue_many(db, "q", [None] * 2, kind="late")
        wait_until(lambda: len(hit) >= 10)  # they come back
        may_end.set()
        wait_until(lambda: is_empty(db, "q"))
    assert outcomes(db)["completed"] == 3


def test_what_a_blocked_event_loop_left_out_runs_once_it_goes_on(db, dsn) -> None:
    app, may_end = pgqueue.App(), threading.Event()

    @app.job("blocks")
    async def blocks() -> None:
        may_end.wait()

    @app.job("async")
    async def runs_on_the_loop() -> None:
        pass

    @app.job("sync")
    def runs_in_a_thread() -> None:
        pass

    worker = Worker(app, {"q": 1}, dsn=dsn, poll_interval=60)
    (dispatcher,) = worker.sources.dispatchers
    with running(worker):
        wait_until(lambda: worker.sources.is_drained)
        pgqueue.enqueue(db, "q", kind="blocks")
        wait_until(lambda: worker.executor.loop.is_blocked)
        pgqueue.enqueue(db, "q", kind="async")
        pgqueue.enqueue(db, "q", kind="sync")
        wait_until(lambda: outcomes(db) == {"completed": 1})
        wait_until(lambda: not dispatcher.is_hungry())  # it has passed over the other
        may_end.set()
        wait_until(lambda: is_empty(db, "q"))


def test_a_task_factory_that_takes_no_context_fails_attempts_and_holds_no_slot(
    db, dsn
) -> None:
    app = pgqueue.App()

    @app.on_startup
    async def set_factory() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, running: asyncio.Task(running, loop=loop))

    @app.job("on loop")
    async def on_loop() -> None:
        pass

    @app.job("in thread")
    def in_thread() -> None:
        pass

    db.execute("select pgqueue.configure(null, retry_base => '1 hour')")
    pgqueue.enqueue_many(db, "q", [None] * 20, kind="on loop")
    pgqueue.enqueue(db, "q", kind="in thread", priority=-1)
    with running(Worker(app, {"q": 1}, dsn=dsn, concurrency=2)):
        wait_until(lambda: outcomes(db) == {"retry": 20, "completed": 1})
    assert "'context'" in one(db, "select min(last_error) from pgqueue.jobs")


def test_a_lack_of_threads_puts_jobs_off_and_ends_nothing(db, dsn, monkeypatch) -> None:
    """As with RLIMIT_NPROC, a limit of a container, or of memory for one more stack."""
    app, may_end, start = pgqueue.App(), threading.Event(), threading.Thread.start
    are_none_left = False

    def start_or_not(self: threading.Thread) -> None:
        if are_none_left and self.name in ("pgqueue-handler", "pgqueue-loop"):
            raise RuntimeError("can't start new thread")
        start(self)

    @app.job("waits")
    def waits() -> bool:
        return may_end.wait(30)

    @app.job("on loop")
    async def on_loop() -> None:
        pass

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    worker = Worker(app, {"q": 1}, dsn=dsn)
    pgqueue.enqueue(db, "q", kind="waits")
    with running(worker):
        wait_until(lambda: worker.executor.running)
        are_none_left = True
        pgqueue.enqueue_many(db, "q", [None] * 3, kind="waits")
        pgqueue.enqueue_many(db, "q", [None] * 3, kind="on loop")
        wait_until(lambda: worker.sources.statuses["released"] >= 6)
        are_none_left = False
        wait_until(lambda: column(db, STATES) == ["waits"] * 4)
        may_end.set()
        wait_until(lambda: is_empty(db, "q"))
    assert outcomes(db) == {"completed": 7}


def test_a_worker_that_runs_is_not_harmed_by_running_it_again(db, dsn) -> None:
    app, may_end = pgqueue.App(), threading.Event()

    @app.job("waits")
    def waits() -> bool:
        return may_end.wait(30)

    worker = Worker(app, {"q": 1}, dsn=dsn)
    pgqueue.enqueue(db, "q", kind="waits")
    with running(worker) as thread:
        wait_until(lambda: worker.executor.running)
        with pytest.raises(RuntimeError, match="a worker runs once"):
            worker.run()
        assert thread.is_alive()
        may_end.set()
        wait_until(lambda: is_empty(db, "q"))
    with pytest.raises(RuntimeError, match="a worker runs once"):
        worker.run()
    assert column(db, "select result from pgqueue.run") == [True]


def test_a_worker_made_before_a_fork_is_refused_after_it(monkeypatch) -> None:
    """As by a web server that loads the application first: its threads would not run."""
    worker = Worker(pgqueue.App(), {"q": 1})
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="in the process that made it"):
        worker.run()


@pytest.mark.parametrize(
    ("name", "asks", "what"),
    [
        ("gevent.monkey", "is_module_patched", "threading"),
        ("eventlet.patcher", "is_monkey_patched", "thread"),
    ],
)
def test_a_worker_is_refused_where_threads_have_been_replaced(
    monkeypatch, name, asks, what
) -> None:
    """There, the first part of it that waits would stop all others, without a word."""
    monkey = SimpleNamespace(**{asks: lambda asked: asked == what})
    monkeypatch.setitem(sys.modules, name, monkey)
    with pytest.raises(ValueError, match=name):
        Worker(pgqueue.App(), {"q": 1})


def test_an_end_that_is_refused_ends_the_last_attempt_that_the_handler_allows(
    db, dsn
) -> None:
    app = pgqueue.App()

    @app.job("late", max_attempts=2)
    def late() -> None:
        raise pgqueue.Snooze(datetime.max.replace(tzinfo=UTC))

    pgqueue.enqueue(db, "q", kind="late")
    for _ in range(3):
        db.execute("update pgqueue.job set run_at = now()")
        Worker(app, {"q": 1}, dsn=dsn, burst=True).run()
    assert column(db, "select outcome from pgqueue.run order by attempt") == [
        "retry",
        "dead",
    ]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there is none before 3.12")
def test_tasks_that_begin_eagerly_do_not_nest(db, dsn) -> None:
    """Each would begin the next, a thousand deep."""
    app = pgqueue.App()

    @app.on_startup
    async def be_eager() -> None:
        eager = asyncio.eager_task_factory  # type: ignore[attr-defined]
        asyncio.get_running_loop().set_task_factory(eager)

    @app.job("quick")
    async def quick() -> None: ...

    fill = "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[5000]), 'quick')"
    db.execute(fill)
    Worker(app, {"q": 1}, dsn=dsn, burst=True).run()
    assert outcomes(db) == {"completed": 5000}


def test_progress_that_is_no_text_that_can_be_sent_is_refused_like_any_other(
    db, dsn, caplog
) -> None:
    app, may_end = pgqueue.App(), threading.Event()

    @app.job("tells")
    def tells(job: pgqueue.Job) -> bool:
        job.progress("\ud800", "\0")  # type: ignore[arg-type]
        return may_end.wait(30)

    pgqueue.enqueue(db, "q", kind="tells")
    with running(Worker(app, {"q": 1}, dsn=dsn)):
        wait_until(lambda: "progress was refused" in caplog.text)
        may_end.set()
        wait_until(lambda: is_empty(db, "q"))
    assert outcomes(db) == {"completed": 1}


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it does not say")


class Unfinished(Exception):
    def __len__(self) -> int:
        raise RuntimeError("it has not been counted")


@pytest.mark.parametrize("formatter", [TextLines, JsonLines])
def test_an_error_that_is_neither_true_nor_false_only_fails_its_job(
    db, dsn, monkeypatch, formatter
) -> None:
    """logging asks an exception for its truth, which calls its __len__."""
    app, said = pgqueue.App(), io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(formatter())
    # pytest's own handlers show it by traceback, which does the same.
    monkeypatch.setattr(logging.getLogger("pgqueue"), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("pgqueue"), "propagate", False)

    @app.job("unfinished")
    def unfinished() -> None:
        raise Unfinished

    pgqueue.enqueue(db, "q", kind="unfinished")
    Worker(app, {"q": 1}, dsn=dsn, burst=True).run()
    assert outcomes(db) == {"retry": 1}
    assert "attempt 1: retry: Unfinished" in said.getvalue()
    assert "Unfinished, which raised RuntimeError when shown" in said.getvalue()


class Closed(dict[str, int]):
    def items(self) -> Any:
        raise Mute


def test_a_result_whose_error_cannot_be_shown_does_not_end_the_worker(db, dsn) -> None:
    app = pgqueue.App()

    @app.job("closed")
    def closed() -> Any:
        return Closed(a=1)

    pgqueue.enqueue(db, "q", kind="closed")
    Worker(app, {"q": 1}, dsn=dsn, burst=True).run()
    (why,) = column(db, "select result->>'not_stored' from pgqueue.run")
    assert why.startswith("Mute")


@pytest.mark.parametrize("kind", ["coroutine", "generator", "task"])
def test_a_handler_that_returns_what_has_still_to_run_fails(db, dsn, kind) -> None:
    """As a decorator does that is not made for async functions: nothing has been done."""
    app, ran = pgqueue.App(), []

    async def work() -> None:
        ran.append(1)

    made = work()

    @app.job("coroutine")
    def coroutine() -> Any:
        return made

    @app.job("generator")
    def generator() -> Any:
        async def generate() -> Any:
            ran.append(1)
            yield 1

        return generate()

    @app.job("task")
    async def task() -> Any:
        return asyncio.get_running_loop().create_future()

    db.execute("select pgqueue.configure(null, retry_base => '1 hour')")
    pgqueue.enqueue(db, "q", kind=kind)
    Worker(app, {"q": 1}, dsn=dsn, burst=True).run()
    made.close()
    assert ran == []
    assert list(db.execute(STATES)) == [(kind, "scheduled")]
    assert "has not run" in one(db, "select last_error from pgqueue.jobs")


def test_a_second_stop_ends_a_worker_at_once_that_would_wait_for_ever(db, dsn) -> None:
    app, may_end = pgqueue.App(), threading.Event()

    @app.job("waits")
    def waits() -> None:
        may_end.wait(30)

    worker = Worker(app, {"q": 1}, dsn=dsn, shutdown_timeout=math.inf)
    pgqueue.enqueue(db, "q", kind="waits")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_until(lambda: worker.executor.running)
        worker.stop()
        worker.stop()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        may_end.set()
        thread.join(20)
    assert "WorkerStopped" in one(db, "select last_error from pgqueue.jobs")


def test_a_call_may_have_no_deadline(db, dsn) -> None:
    app = pgqueue.App()
    app.job("any")(lambda: None)
    pgqueue.enqueue(db, "q", kind="any")
    Worker(app, {"q": 1}, dsn=dsn, burst=True, call_timeout=math.inf).run()
    assert outcomes(db) == {"completed": 1}


@pytest.mark.parametrize("seconds", [1e12, 1e20])
def test_a_timeout_beyond_the_last_year_is_a_timeout(db, dsn, seconds) -> None:
    app = pgqueue.App()

    @app.job("any")
    def any_(job: pgqueue.Job) -> bool:
        return job.deadline is None

    pgqueue.enqueue(db, "q", kind="any")
    Worker(app, {"q": 1}, dsn=dsn, burst=True, timeout=seconds).run()
    assert column(db, "select result from pgqueue.run") == [True]


def test_schedules_are_declared_while_handlers_are_found(db, dsn) -> None:
    """As Django's tasks are, when a job comes."""
    app = pgqueue.App()
    for kind in ("first", "second"):
        app.job(kind, every=60)(lambda: None)

    class Finding(psycopg.Connection[Any]):
        def execute(self, *args: Any, **options: Any) -> Any:
            app.job(f"found {len(app.tasks)}")(lambda: None)
            return super().execute(*args, **options)

    with Finding.connect(dsn, autocommit=True) as conn:
        Maintenance(Server(dsn), app, 0, 1).work(conn)
    assert column(db, "select kind from pgqueue.schedules order by 1") == [
        "first",
        "second",
    ]


def test_a_statement_timeout_does_not_end_the_maintenance(db, dsn, connect) -> None:
    """In a huge install it takes seconds; ended each time, it would never delete old runs."""
    db.execute(f"alter database {db.info.dbname} set statement_timeout = '200 ms'")
    holder = connect(autocommit=False)
    holder.execute("lock table pgqueue.recent_key")
    maintenance = Maintenance(Server(dsn), pgqueue.App(), 0, 1)

    def work() -> None:
        with maintenance.connect() as conn:
            maintenance.work(conn)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        waits = (
            "select exists (select from pg_stat_activity where wait_event_type = 'Lock'"
            " and query ~ 'maintain' and query_start < clock_timestamp() - interval '500 ms')"
        )
        wait_until(lambda: one(db, waits) or done.done())
        holder.rollback()
        done.result(20)


@pytest.mark.parametrize("encoding", ["latin1", "sql_ascii"])
def test_a_dsn_with_an_encoding_keeps_no_job_from_a_worker(db, dsn, encoding) -> None:
    app = pgqueue.App()
    app.job("repeats")(lambda said: said)
    pgqueue.enqueue(db, "q", {"said": "\u9375"}, kind="repeats")
    theirs = f"{dsn} client_encoding={encoding}"
    Worker(app, {"q": 1}, dsn=theirs, burst=True).run()
    assert column(db, "select result from pgqueue.run") == ["\u9375"]


@pytest.mark.parametrize("way", ["dsn", "pooler"])
def test_a_worker_works_where_arrays_have_no_null(db, request, way) -> None:
    """With `array_nulls = off` the word NULL in an array is a text."""
    db.execute(f"alter database {db.info.dbname} set array_nulls = off")
    app, hour = pgqueue.App(), timedelta(hours=1)

    @app.job("tells")
    def tells(job: pgqueue.Job) -> str:
        job.progress(1)
        done = "select done, total, message from pgqueue.running where done is not null"
        wait_until(lambda: db.execute(done).fetchall() == [(1, None, None)])
        return "told"

    @app.job("raises")
    def raises(n: int) -> None:
        hours = n * hour
        raise [ValueError, pgqueue.Retry(after=hours), pgqueue.Snooze(hours),
               pgqueue.Snooze(datetime.now(UTC) + hours)][n]  # fmt: skip

    app.job("returns")(lambda: None)
    for n in range(4):
        pgqueue.enqueue(db, "q", {"n": n}, kind="raises")
    for queue, kind in ("q", "returns"), ("limited", "returns"), ("q", "tells"):
        pgqueue.enqueue(db, queue, kind=kind)
    db.execute(
        "select pgqueue.configure(null, retry_base => '1 day', retry_cap => '1 day')"
    )
    shares = {"q": 1, "limited": pgqueue.Share(limit=2)}
    Worker(app, shares, dsn=request.getfixturevalue(way), burst=True).run()
    ended = db.execute(
        "select kind, result from pgqueue.run where outcome = 'completed' order by 1"
    )
    assert ended.fetchall() == [("returns", None), ("returns", None), ("tells", "told")]
    later = "select round(extract(epoch from run_at - now()) / 3600) from pgqueue.jobs order by id"
    assert column(db, later)[1:] == [1, 2, 3]
    assert 12 <= column(db, later)[0] <= 24


def test_what_only_type_checkers_import_may_annotate_the_job_and_the_result() -> None:
    """From Python 3.14 on without quotes, since annotations are evaluated when asked for."""
    app, lazily = pgqueue.App(), sys.version_info >= (3, 14)
    given = {"app": app, "__builtins__": __builtins__}
    job, result = ("Job", "Thing") if lazily else ("'Job'", "'Thing'")
    exec(f"@app.job('k')\ndef k(job: {job}, n: int) -> {result}: ...", given)
    assert list(app.tasks) == ["k"]
