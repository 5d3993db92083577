"""Steps that a retry does not repeat, and jobs that wait without a worker, in Python."""

import asyncio
import json
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pgqueue
import psycopg
import pytest
from conftest import column, one
from worker_harness import OF_WORKERS, QUEUE, Workers, all_backends, wait_until

pytest_plugins = ["worker_harness"]

APP = ("--app", "worker_steps_app")
SLEEPS = ("sleeps", "asleeps", "tsleeps", "tasleeps")


@pytest.fixture(autouse=True)
def quick(db) -> None:
    db.execute(
        "select pgqueue.configure(null, lease => '2 s', retry_base => '0', retry_cap => '0')"
    )
    db.execute("create table written (what text)")


def start(workers: Workers, *args: str, **kwargs: str) -> subprocess.Popen[bytes]:
    return workers.start(*APP, *args, **kwargs)


def burst(workers: Workers) -> None:
    assert start(workers, "--burst").wait(30) == 0


def enqueue(db: psycopg.Connection, kind: str, **payload: Any) -> int:
    return pgqueue.enqueue(db, QUEUE, payload, kind=kind)


def state(db: psycopg.Connection, id: int) -> str:
    return one(db, "select state from pgqueue.status(%s)", id)


def result(db: psycopg.Connection, id: int) -> Any:
    """Wait for a job to complete, and return its result."""
    wait_until(lambda: state(db, id) in ("completed", "dead"))
    assert state(db, id) == "completed"
    return one(db, "select pgqueue.result(%s)", id)


def suspended(db: psycopg.Connection, id: int) -> bool:
    query = "select count(*) from pgqueue.wait where job_id = %s"
    return wait_until(lambda: one(db, query, id) == 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["two", "atwo"])
@pytest.mark.parametrize("die", ["start", "between", "end"])
def test_a_worker_killed_between_two_steps_repeats_none_of_them(
    db, workers, kind, die
) -> None:
    id = enqueue(db, kind, die=die)
    assert start(workers, "--burst").wait(30) == -9
    worker = start(workers)
    assert result(db, id) == ["did first", "did second"]
    assert workers.notes("first") == workers.notes("second") == {1: 1}
    assert one(db, "select max(attempt) from pgqueue.run") == 2
    assert column(db, "select * from pgqueue.steps(%s)", id) == []
    assert workers.finish(worker) == 0


@pytest.mark.parametrize("kind", ["two", "atwo"])
def test_a_step_does_not_notice_that_idle_sessions_were_killed(
    db, workers, kind
) -> None:
    start(workers)
    for count in range(3):
        ids = [enqueue(db, kind) for _ in range(3)]
        assert all(result(db, id) == ["did first", "did second"] for id in ids)
        kill = f"select count(pg_terminate_backend(pid)) {OF_WORKERS}"
        assert one(db, kill) > 1, count
    assert one(db, "select max(attempt) from pgqueue.run") == 1


@pytest.mark.parametrize("kind", ["two", "atwo"])
def test_steps_behind_a_pooler_change_no_session_and_need_none(
    db, workers, pooler, kind
) -> None:
    setting = "default_transaction_isolation"

    all_backends(pooler, f"select set_config('{setting}', 'serializable', false)")
    worker = start(workers, "--poll-interval", "0.2", dsn=pooler)
    ids = [enqueue(db, kind) for _ in range(3)]
    assert all(result(db, id) == ["did first", "did second"] for id in ids)
    assert workers.finish(worker) == 0
    assert all_backends(pooler, f"show {setting}") == {("serializable",)}
    assert one(db, "select max(attempt) from pgqueue.run") == 1


def test_a_step_gives_a_retry_what_it_gave_by_its_annotation(db, workers) -> None:
    cases = [(kind, fail) for kind in ("typed", "atyped") for fail in (False, True)]
    ids = [enqueue(db, kind, fail=fail) for kind, fail in cases]
    burst(workers)
    for id, (_, fail) in zip(ids, cases, strict=True):
        assert result(db, id) == "2026-01-03T00:00:00+00:00"
        runs = "select count(*) from pgqueue.run where job_id = %s"
        assert one(db, runs, id) == 1 + fail
    assert workers.notes("thread") == {1: 2}  # in the two that are async


def test_a_job_sleeps_without_a_worker_and_without_an_attempt(db, workers) -> None:
    ids = [enqueue(db, kind, seconds=3) for kind in SLEEPS]
    # Two are in a transaction.
    written = "select what, count(*) from written group by 1 order by 1 desc"
    worker = start(workers)
    for id in ids:
        assert suspended(db, id)
        names = column(db, "select name from pgqueue.steps(%s)", id)
        assert names == ["before", "a while"]
    assert db.execute(written).fetchall() == [("before", 2)]
    for id in ids:
        assert result(db, id) == "attempt 1"
    assert workers.notes("before") == workers.notes("after") == {1: 4}
    # What is no step is done again.
    assert db.execute(written).fetchall() == [("before", 4), ("after", 2)]
    assert column(db, "select attempt from pgqueue.run") == [1] * 4
    assert workers.finish(worker) == 0
    assert workers.log().count("attempt 1: suspended") == 4


def test_a_sleep_goes_on_where_it_was_when_its_worker_is_gone(db, workers) -> None:
    id = enqueue(db, "sleeps", seconds=3600)
    burst(workers)
    until = one(db, "select run_at from pgqueue.job")
    db.execute("update pgqueue.job set run_at = now() where id = %s", (id,))
    burst(workers)
    assert one(db, "select run_at from pgqueue.job") == until
    assert workers.notes("before") == {1: 1}


def test_run_now_ends_a_sleep(db, workers) -> None:
    ids = [enqueue(db, kind, seconds=3600) for kind in SLEEPS]
    burst(workers)
    for id in ids:
        db.execute("select pgqueue.run_now(%s)", (id,))
    burst(workers)
    for id in ids:
        assert result(db, id) is not None
    assert workers.notes("after") == {1: 4}


def test_run_now_ends_a_wait_that_has_a_timeout_and_no_other(db, workers) -> None:
    kinds = ("waits", "awaits")
    timed = [enqueue(db, kind, event="paid", timeout=3600) for kind in kinds]
    patient = [enqueue(db, kind, event="paid", timeout=None) for kind in kinds]
    burst(workers)
    for id in (*timed, *patient):
        db.execute("select pgqueue.run_now(%s)", (id,))
    burst(workers)
    assert workers.notes("waited") == {1: 2}
    # What was decided stays: the event comes too late for one, and in time for the other.
    pgqueue.emit(db, "paid", {"amount": 7})
    pgqueue.emit(db, "go")
    burst(workers)
    assert [result(db, id) for id in timed] == ["too late"] * 2
    assert [result(db, id) for id in patient] == [{"amount": 7}] * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("end", ["time", "run_now", "before", "jobs"])
@pytest.mark.parametrize("kind", ["parent_for", "aparent_for"])
def test_a_job_waits_for_jobs_no_longer_than_its_timeout(
    db, workers, kind, end
) -> None:
    child = pgqueue.enqueue(db, QUEUE, {"n": 2}, kind="child", run_at=timedelta(days=1))
    timeout = {"time": 0.2, "before": 0}.get(end, 3600)
    if end == "before":
        db.execute("select pgqueue.run_now(%s)", (child,))
        burst(workers)
    id = enqueue(db, kind, ids=[child], timeout=timeout)
    worker = start(workers)
    if end in ("run_now", "jobs"):
        assert suspended(db, id)
        db.execute("select pgqueue.run_now(%s)", (id if end == "run_now" else child,))
    wait_until(lambda: workers.notes("waited"))
    # A later attempt decides the same, though all have ended since.
    assert suspended(db, id)
    if end in ("time", "run_now"):
        db.execute("select pgqueue.run_now(%s)", (child,))
        assert result(db, child) == 4
    pgqueue.emit(db, "go")
    assert result(db, id) == ("too late" if end in ("time", "run_now") else [4])
    assert workers.notes("waited") == {1: 1}
    assert workers.finish(worker) == 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["waits", "awaits"])
@pytest.mark.parametrize("when", ["before", "after", "never", "late"])
def test_a_job_waits_for_an_event_or_its_time_and_decides_once(
    db, workers, kind, when
) -> None:
    if when == "before":
        assert pgqueue.emit(db, "paid", {"amount": 7})
    timeout = {"before": None, "after": 30, "never": 0.2, "late": 0.2}[when]
    id = enqueue(db, kind, event="paid", timeout=timeout)
    worker = start(workers)
    if when == "after":
        assert suspended(db, id)
        pgqueue.emit(db, "paid", {"amount": 7})
    wait_until(lambda: workers.notes("waited"))
    assert suspended(db, id)
    if when == "late":
        pgqueue.emit(db, "paid", {"amount": 7})
    pgqueue.emit(db, "go")
    expected = "too late" if when in ("never", "late") else {"amount": 7}
    if kind == "waits" and when in ("never", "late"):
        expected = "too late"
    assert result(db, id) == expected
    assert workers.notes("waited") == {1: 1}
    assert workers.finish(worker) == 0


def test_the_first_emit_of_an_event_wins_in_any_driver(db) -> None:
    assert pgqueue.emit(db, "once", 1) is True
    assert pgqueue.emit(db, "once", 2) is False
    assert column(db, "select payload from pgqueue.events") == [1]
    with pytest.raises(ValueError, match="JSON"):
        pgqueue.emit(db, "nan", float("nan"))
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        pgqueue.emit(db, "")


def test_emit_may_be_awaited(db, dsn) -> None:
    async def emit() -> bool:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            return await pgqueue.emit(conn, "once", {"a": 1})

    assert asyncio.run(emit()) is True
    assert column(db, "select payload from pgqueue.events") == [{"a": 1}]


def test_two_tasks_of_a_handler_may_wait_at_once(db, workers) -> None:
    id = enqueue(db, "both")
    worker = start(workers)
    for event in "one", "two":
        assert suspended(db, id)
        wait_until(lambda: state(db, id) != "running")
        pgqueue.emit(db, event, event)
    assert result(db, id) == ["one", "two"]
    assert workers.finish(worker) == 0


def test_a_job_waits_for_jobs_and_gets_their_results_in_order(db, workers) -> None:
    ids = [enqueue(db, "child", n=n) for n in (3, 1, 2)]
    kinds = ("parent", "aparent")
    some = [enqueue(db, kind, ids=[ids[1], ids[0], ids[2]]) for kind in kinds]
    none = [enqueue(db, kind, ids=[]) for kind in kinds]
    worker = start(workers)
    assert [result(db, id) for id in some] == [[1, 9, 4]] * 2
    assert [result(db, id) for id in none] == [[]] * 2
    assert workers.finish(worker) == 0


def test_a_wait_for_jobs_never_takes_the_results_of_another(db, workers) -> None:
    """As after a deployment of a version that waits for others first."""
    later = db.execute("select now() + interval '1 hour'").fetchone()[0]
    old = pgqueue.enqueue(db, QUEUE, {"n": 2}, kind="child", run_at=later)
    new = enqueue(db, "child", n=3)
    id = enqueue(db, "parent", ids=[old])
    worker = start(workers)
    wait_until(lambda: suspended(db, id))
    ids = "jsonb_build_object('ids', array[%s])"
    db.execute(f"update pgqueue.job set payload = {ids} where id = %s", (new, id))
    db.execute("select pgqueue.run_now(%s)", (old,))
    wait_until(lambda: one(db, "select last_error from pgqueue.status(%s)", id))
    error = one(db, "select last_error from pgqueue.status(%s)", id)
    assert "an earlier attempt waited here for other jobs" in error
    assert workers.finish(worker) == 0


def test_a_job_that_waits_for_one_that_dies_is_told(db, workers) -> None:
    ids = [enqueue(db, "child", n=n) for n in (3, -1)]
    id = enqueue(db, "parent", ids=ids)
    worker = start(workers)
    said = f"jobs that did not complete: {ids[1]} (dead)"
    assert result(db, id) == [said, ["completed", "dead"]]
    assert workers.finish(worker) == 0


@pytest.mark.parametrize("kind", ["aparent", "wants"])
def test_after_a_wait_that_failed_a_redrive_looks_again(db, workers, kind) -> None:
    child = enqueue(db, "child", n=-1)
    payload = {"event": "late"} if kind == "wants" else {"ids": [child]}
    id = pgqueue.enqueue(db, QUEUE, payload, kind=kind, max_attempts=1)
    burst(workers)
    db.execute("select pgqueue.redrive_job(%s, '{\"n\": 2}')", (child,))
    burst(workers)
    assert state(db, id) == "dead"
    pgqueue.emit(db, "late", [4])
    db.execute("select pgqueue.redrive_job(%s)", (id,))
    burst(workers)
    assert result(db, id) == [4]


def test_jobs_that_nothing_is_known_of_are_gone_and_waited_for_once(
    db, workers
) -> None:
    db.execute("select pgqueue.configure(null, keep_runs => 0)")
    child = enqueue(db, "child", n=3)
    burst(workers)
    db.execute("select pgqueue.configure(null, keep_runs => 7)")
    id = enqueue(db, "parent", ids=[child])
    worker = start(workers)
    assert result(db, id) in ([None], [f"jobs that did not complete: {child} (gone)"])
    assert workers.finish(worker) == 0


def test_a_job_may_wait_for_an_event_and_for_jobs_at_once(db, workers) -> None:
    child = pgqueue.enqueue(
        db, QUEUE, {"n": 3}, kind="child", run_at=timedelta(hours=1)
    )
    id = enqueue(db, "both_kinds", ids=[child])
    worker = start(workers)
    assert suspended(db, id)
    # Which of the two it is suspended for first is chance.
    event = one(db, "select event from pgqueue.wait where job_id = %s", id)
    ends = [
        lambda: pgqueue.emit(db, "one", 1),
        lambda: db.execute("select pgqueue.run_now(%s)", (child,)),
    ]
    first, second = ends if event == "one" else reversed(ends)
    first()
    other = "select count(*) from pgqueue.wait where job_id = %s and event is distinct from %s"
    wait_until(lambda: one(db, other, id, event) == 1)
    second()
    assert result(db, id) == [1, [9]]
    assert workers.finish(worker) == 0


def test_a_worker_killed_as_it_suspends_a_job_has_not_made_it_wait(
    db, workers, dsn
) -> None:
    child = pgqueue.enqueue(
        db, QUEUE, {"n": 3}, kind="child", run_at=timedelta(hours=1)
    )
    id = enqueue(db, "locked_parent", ids=[child])
    worker = start(workers)
    wait_until(lambda: workers.notes("begun"))
    with psycopg.connect(dsn) as stranger:
        # Lets steps be saved, and no attempt end.
        stranger.execute(
            "select from pgqueue.job where id = %s for no key update", (id,)
        )
        Path(f"{workers.ran}.locked").touch()
        query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        wait_until(lambda: one(db, query) > 0)
        worker.kill()
        worker.wait()
        db.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where wait_event_type = 'Lock'"
        )
    worker = start(workers)
    assert suspended(db, id)
    db.execute("select pgqueue.run_now(%s)", (child,))
    assert result(db, id) == [9]
    assert workers.finish(worker) == 0


def test_a_job_reads_the_results_of_those_it_is_after(db, workers) -> None:
    children = [enqueue(db, "child", n=n) for n in (3, -1)]
    ids = [
        pgqueue.enqueue(db, QUEUE, {}, kind=kind, after=children, if_dead="run")
        for kind in ("follower", "afollower")
    ]
    worker = start(workers)
    for id in ids:
        assert result(db, id) == [
            [children[0], "child", "completed", 9],
            [children[1], "child", "dead", None],
        ]
    assert workers.finish(worker) == 0


def test_the_callback_of_a_large_batch_reads_all_results(db, workers) -> None:
    batch = pgqueue.create_batch(db, QUEUE, kind="follower")
    ids = pgqueue.enqueue_many(
        db, QUEUE, [{"n": n} for n in range(2345)], kind="child", batch_id=batch
    )
    pgqueue.close_batch(db, batch)
    burst(workers)
    callback = one(db, "select callback_id from pgqueue.batches")
    found = result(db, callback)
    assert [row[0] for row in found] == ids
    assert [row[3] for row in found] == [n * n for n in range(2345)]


def test_a_handler_that_swallows_its_suspension_fails_and_is_told_why(
    db, workers
) -> None:
    for kind in ("swallows", "tswallows"):
        pgqueue.enqueue(db, QUEUE, {}, kind=kind, max_attempts=1)
    burst(workers)
    errors = column(db, "select error from pgqueue.dead_job")
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("RuntimeError: the handler caught pgqueue.Suspend")
    assert workers.notes("more") == {}


def test_an_async_handler_that_forgets_to_await_fails(db, workers) -> None:
    id = pgqueue.enqueue(db, QUEUE, {}, kind="forgets", max_attempts=1)
    burst(workers)
    error = one(db, "select error from pgqueue.dead_job where id = %s", id)
    assert error.startswith("RuntimeError: the handler did not await what its job")


def test_an_async_handler_may_cancel_what_it_has_yet_to_await(db, workers) -> None:
    id = pgqueue.enqueue(db, QUEUE, {}, kind="cancels", max_attempts=1)
    burst(workers)
    assert one(db, "select result from pgqueue.run where job_id = %s", id) == "done"


def test_a_job_that_is_run_now_waits_on_for_jobs_that_have_not_ended(
    db, workers
) -> None:
    child = pgqueue.enqueue(
        db, QUEUE, {"n": 2}, kind="child", run_at=timedelta(hours=1)
    )
    id = enqueue(db, "parent", ids=[child])
    worker = start(workers)
    assert suspended(db, id)
    for _ in range(2):
        db.execute("select pgqueue.run_now(%s)", (id,))
        assert suspended(db, id)
    db.execute("select pgqueue.run_now(%s)", (child,))
    assert result(db, id) == [4]
    assert workers.finish(worker) == 0


def test_what_catches_only_exceptions_lets_a_suspension_pass(db, workers) -> None:
    id = enqueue(db, "forgiving")
    worker = start(workers)
    assert result(db, id) == "done"
    assert workers.finish(worker) == 0


def test_steps_of_a_dead_job_are_there_when_it_is_redriven(db, workers) -> None:
    id = pgqueue.enqueue(db, QUEUE, {"fail": True}, kind="typed", max_attempts=1)
    burst(workers)
    assert state(db, id) == "dead"
    names = column(db, "select name from pgqueue.steps(%s)", id)
    assert names == ["moment", "moment 2", "moment 3", "moment 2 2", "nothing"]
    db.execute("update pgqueue.dead_job set payload = %s", (json.dumps({"fail": 0}),))
    db.execute("select pgqueue.redrive_job(%s)", (id,))
    burst(workers)
    assert result(db, id) == "2026-01-03T00:00:00+00:00"
