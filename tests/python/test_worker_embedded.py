"""A Worker inside the process of another program: it leaves nothing behind."""

import asyncio
import gc
import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pgqueue
import psycopg
import pytest
from conftest import LONG, column, one
from pgqueue import Share, Worker
from pgqueue.attempt import LARGEST_RESULT, Attempt, Outcome
from pgqueue.worker import protocol
from worker_harness import RESTING, is_empty, wait_until


def make_app() -> pgqueue.App:
    app = pgqueue.App()

    @app.job("sync")
    def sync() -> None:
        pass

    @app.job("async")
    async def async_() -> None:
        await asyncio.sleep(0)

    @app.job("in_thread")
    async def in_thread() -> None:
        await asyncio.to_thread(time.sleep, 0)

    @app.job("sync_transaction", transaction=True)
    def sync_transaction(job: pgqueue.Job) -> None:
        job.connection.execute("select 1")

    @app.job("async_transaction", transaction=True)
    async def async_transaction(job: pgqueue.Job) -> None:
        await job.connection.execute("select 1")

    @app.job("sync_step")
    def sync_step(job: pgqueue.Job) -> None:
        job.step("one", int)

    @app.job("async_step")
    async def async_step(job: pgqueue.Job) -> None:
        await job.step("one", asyncio.sleep, 0)

    return app


def files() -> Counter[str]:
    """The files that this process has open, by the kernel's names."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
        except FileNotFoundError:  # the one that lists them
            continue
    return found


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def run_all(db, worker: Worker, queue: str = "default") -> None:
    for kind in worker.app.tasks:
        pgqueue.enqueue_many(db, queue, [None] * 3, kind=kind)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: is_empty(db, queue))
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()


@contextmanager
def nothing_left(db) -> Iterator[None]:
    gc.collect()
    before = threads(), files()
    yield
    # The last of its threads may still be ending.
    wait_until(lambda: gc.collect() >= 0 and threads() <= before[0], 10)
    wait_until(lambda: not files() - before[1], 10)
    sessions = (
        "select count(*) from pg_stat_activity where application_name like 'pgqueue %'"
    )
    wait_until(lambda: one(db, sessions) == 0, 10)


def test_a_worker_leaves_no_file_thread_or_session_behind(db, dsn) -> None:
    run_all(db, Worker(make_app(), {"default": 1}, dsn=dsn))
    with nothing_left(db), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(3):
            run_all(db, Worker(make_app(), {"default": 1}, dsn=dsn))
        gc.collect()
    assert [str(warning.message) for warning in told] == []


def test_a_busy_worker_that_cannot_listen_says_again_what_it_serves(
    db, dsn, monkeypatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.dispatcher.SAY_AGAIN", 0.1)
    said: list[list[str]] = []

    def rest(conn, queues, kinds, parks, rest=protocol.rest) -> float | None:
        said.append(queues)
        return rest(conn, queues, kinds, parks)

    monkeypatch.setattr("pgqueue.worker.protocol.rest", rest)
    app, may_end = pgqueue.App(), threading.Event()

    @app.job("holds")
    def holds() -> None:
        may_end.wait(30)

    pgqueue.enqueue(db, "a", kind="holds")
    worker = Worker(app, {"a": 1, "b": 1}, dsn=dsn, concurrency=1, listen=False)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: one(db, "select count(*) from pgqueue.running"))
    before = len(said)
    wait_until(lambda: len(said) > before + 1)
    assert said[-1] == ["a", "b"]
    if LONG:  # a session looks once a minute whether it holds what it has said
        # As if nine minutes had passed, and the session were another one of a pooler.
        db.execute(
            "update pgqueue.service set until = until - interval '9 minutes', pid = 0"
        )
        served = (
            "select array_agg(queue order by queue) from pgqueue.service where pid <> 0"
        )
        wait_until(lambda: one(db, served) == ["a", "b"], 90)
    may_end.set()
    worker.stop()
    thread.join(20)


def test_a_session_that_does_not_park_says_once_a_minute_what_it_serves(db) -> None:
    rest = "select pgqueue.rest('{a,b}', park => false)"
    holds = "select count(*) from pgqueue.service where until > now() + '5 minutes'"
    db.execute(rest)
    db.execute("update pgqueue.service set until = until - interval '9 minutes'")
    # As if that had been in another minute, which is the last word of what it remembers.
    db.execute(
        "select set_config('pgqueue.serves', regexp_replace("
        "current_setting('pgqueue.serves'), '[0-9]+$', '0'), false)"
    )
    assert one(db, holds) == 0
    db.execute(rest)
    assert one(db, holds) == 2


def test_run_returns_after_its_threads_have_ended(db, dsn) -> None:
    """A thread that starts or ends while Python shuts down would crash it."""
    before = threads()
    for _ in range(10):
        run_all(db, Worker(make_app(), {"default": 1}, dsn=dsn))
        assert threads() <= before


def test_a_worker_beside_an_event_loop_leaves_nothing_behind(db, dsn) -> None:
    async def serve() -> None:
        worker = Worker(make_app(), {"default": Share(1)}, dsn=dsn)
        async with worker.running() as same:
            assert same is worker
            for kind in ("sync", "async"):
                pgqueue.enqueue(db, "default", kind=kind)
            await asyncio.to_thread(wait_until, lambda: is_empty(db, "default"))

    asyncio.run(serve())
    with nothing_left(db):
        asyncio.run(serve())


def test_a_worker_that_was_never_run_leaves_nothing_behind(db, dsn) -> None:
    with nothing_left(db):
        for _ in range(3):
            Worker(make_app(), {"default": 1}, dsn=dsn)


def test_results_that_wait_out_an_outage_are_sent_in_messages_of_bounded_size(
    dsn,
) -> None:
    """Each new connection adds the attempts that have ended since."""
    finisher = Worker(make_app(), {"default": 1}, dsn=dsn).sources.services[0]
    result = Outcome("complete", "x" * (LARGEST_RESULT // 2))
    for number in range(10):
        row = (number, 1, "sync", "default", 1, 1, "null", None, 30.0)
        finisher.put(Attempt(*row, outcome=result))
    for _ in range(4):
        finisher._gather()
    assert 0 < len(finisher._batch) <= 3


def test_two_workers_in_one_process_work_side_by_side(db, dsn) -> None:
    first = Worker(make_app(), {"first": 1}, dsn=dsn, name="first")
    second = Worker(make_app(), {"second": 1}, dsn=dsn, name="second")

    async def serve() -> None:
        async with first.running(), second.running():
            for queue in ("first", "second"):
                for kind in first.app.tasks:
                    pgqueue.enqueue_many(db, queue, [None] * 20, kind=kind)
            for queue in ("first", "second"):
                await asyncio.to_thread(wait_until, lambda: is_empty(db, queue))  # noqa: B023

    asyncio.run(serve())
    runs = "select distinct queue || ' ' || split_part(worker, ':', 1) from pgqueue.run"
    assert sorted(column(db, runs)) == ["first first", "second second"]
    assert one(db, "select count(*) from pgqueue.run") == 2 * len(make_app().tasks) * 20


def test_one_worker_ends_while_another_in_the_process_works_on(db, dsn) -> None:
    async def serve() -> None:
        async with Worker(make_app(), {"first": 1}, dsn=dsn).running():
            async with Worker(make_app(), {"second": 1}, dsn=dsn).running():
                pass
            for kind in ("sync", "async", "async_transaction"):
                pgqueue.enqueue(db, "first", kind=kind)
            await asyncio.to_thread(wait_until, lambda: is_empty(db, "first"))

    asyncio.run(serve())


def test_run_raises_an_error_that_waiting_cannot_fix(dsn, role) -> None:
    worker = Worker(make_app(), {"default": 1}, dsn=f"{dsn} user={role}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        worker.run()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ctrl_c_lets_running_jobs_finish_before_run_raises_it(db, dsn) -> None:
    app, began, may_end = pgqueue.App(), threading.Event(), threading.Event()

    @app.job("waits")
    def waits() -> bool:
        began.set()
        return may_end.wait(30)

    worker = Worker(app, {"q": 1}, dsn=dsn)
    pgqueue.enqueue(db, "q", kind="waits")

    def interrupt() -> None:
        assert began.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: worker._stops)
        may_end.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    thread.join(30)
    assert column(db, "select result from pgqueue.run") == [True]


def test_running_raises_the_error_that_ended_the_worker(dsn, role) -> None:
    async def serve() -> None:
        before = threads()
        async with Worker(
            make_app(), {"default": 1}, dsn=f"{dsn} user={role}"
        ).running():
            began = threads() - before
            wait_until(lambda: not any(thread.is_alive() for thread in began))

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        asyncio.run(serve())


def test_an_exception_in_the_body_of_running_stops_the_worker_and_is_raised(
    db, dsn
) -> None:
    before = threads()

    async def serve() -> None:
        async with Worker(make_app(), {"default": 1}, dsn=dsn).running():
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        asyncio.run(serve())
    wait_until(lambda: threads() <= before)


@pytest.mark.parametrize("share", [Share(), Share(limit=1)])
def test_a_burst_runs_what_its_last_handlers_enqueue(db, dsn, share) -> None:
    app, left = pgqueue.App(), [3]

    @app.job("again")
    def again() -> None:
        left[0] -= 1
        # The worker has looked: without news it would not do so again.
        wait_until(lambda: one(db, RESTING))
        if left[0]:
            pgqueue.enqueue(db, "a", kind="again")

    pgqueue.enqueue(db, "a", kind="again")
    queues = {"a": share, "b": Share()}
    Worker(app, queues, dsn=dsn, burst=True, poll_interval=60).run()
    assert left == [0] and is_empty(db, "a")


def test_a_burst_ends_however_often_it_looks(db, dsn) -> None:
    app, ran = pgqueue.App(), []
    app.job("once", queue="a")(lambda: ran.append(1))
    pgqueue.enqueue(db, "a", kind="once")
    Worker(app, dsn=dsn, burst=True, poll_interval=1e-6).run()
    assert ran == [1] and is_empty(db, "a")


def test_waits_grow_while_claims_find_nothing_and_rest_fails(db, dsn) -> None:
    db.execute(
        "create or replace function pgqueue.rest(queues text[], kinds text[] default null, park boolean default true)"
        " returns interval language plpgsql as $$ begin raise serialization_failure; end $$"
    )
    worker = Worker(pgqueue.App(), {"a": 1}, dsn=dsn)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_until(lambda: worker.sources.dispatchers[0]._failures > 3)
    finally:
        worker.stop()
        thread.join(20)
    assert not thread.is_alive()
