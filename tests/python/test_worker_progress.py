"""What a worker reports and learns about a running job: its progress, and a cancel."""

import pgqueue
import pytest
from conftest import one
from worker_harness import QUEUE, RESTING, outcomes, wait_until

pytest_plugins = ["worker_harness"]

PROGRESS = "select done, total, message from pgqueue.running where id = %s"
NOW_AND_THEN = "3000"  # seconds of a lease: its heartbeat comes after this test


def test_others_see_the_progress_of_a_handler_while_it_runs(db, workers) -> None:
    sync = {"numbers": [*range(10_000), 2.5], "total": 10}
    sync = pgqueue.enqueue(db, QUEUE, sync, kind="tells")
    asynchronous = pgqueue.enqueue(db, QUEUE, kind="atells")
    workers.start("--lease", NOW_AND_THEN)
    told = {sync: (2.5, 10, "now \\0 2.5"), asynchronous: (7, 10, None)}
    for job, progress in told.items():
        wait_until(lambda: db.execute(PROGRESS, (job,)).fetchone() == progress)  # noqa: B023
    workers.let_go()
    wait_until(lambda: outcomes(db) == {"completed": 2})


def test_progress_is_told_again_if_its_session_ends_before_it_has_arrived(
    db, workers
) -> None:
    db.execute(
        "create function wait() returns trigger language plpgsql as"
        " 'begin perform pg_advisory_xact_lock_shared(1); return new; end';"
        "create trigger wait before update of progress on pgqueue.job for each row"
        " when (new.progress is not null) execute function wait();"
        "select pg_advisory_lock(1)"
    )
    job = pgqueue.enqueue(db, QUEUE, {"numbers": [1.5], "total": 2}, kind="tells")
    workers.start("--lease", NOW_AND_THEN)
    ended = (
        "select count(pg_terminate_backend(pid)) from pg_locks"
        " where locktype = 'advisory' and not granted and database ="
        " (select oid from pg_database where datname = current_database())"
    )
    wait_until(lambda: one(db, ended) > 0)
    db.execute("select pg_advisory_unlock(1)")
    told = (1.5, 2, "now \\0 1.5")
    wait_until(lambda: db.execute(PROGRESS, (job,)).fetchone() == told)
    workers.let_go()
    wait_until(lambda: outcomes(db) == {"completed": 1})


def test_progress_that_is_refused_is_logged_and_that_of_a_lost_job_spoils_nothing(
    db, workers
) -> None:
    bad = [{"numbers": ["nan"], "total": None}, {"numbers": [1], "total": -1}]
    pgqueue.enqueue_many(db, QUEUE, bad, kind="tells")
    good = pgqueue.enqueue(db, QUEUE, kind="atells")
    lost = pgqueue.enqueue(db, QUEUE, kind="atells")
    workers.start("--lease", NOW_AND_THEN)
    wait_until(lambda: workers.log().count("progress was refused") == 2)
    db.execute("update pgqueue.job set token = 0 where id = %s", (lost,))
    for _ in range(2):
        db.execute("update pgqueue.job set progress = null")
        wait_until(lambda: db.execute(PROGRESS, (good,)).fetchone()[0] == 7)
    assert workers.log().count("progress was refused") == 2
    workers.let_go()
    wait_until(lambda: outcomes(db) == {"completed": 3})


def test_a_busy_worker_learns_of_a_cancel_at_once(db, workers) -> None:
    kinds = ("ahold", "attentive")
    ids = [pgqueue.enqueue(db, QUEUE, kind=kind) for kind in kinds]
    workers.start("--lease", NOW_AND_THEN, "--concurrency", "2")
    workers.began(2)
    assert [one(db, "select pgqueue.cancel(%s)", i) for i in ids] == ["cancelling"] * 2
    wait_until(lambda: outcomes(db) == {"cancelled": 2})


def test_a_worker_that_cannot_listen_learns_of_a_cancel_at_its_next_heartbeat(
    db, workers
) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind="attentive")
    workers.start("--lease", "1", "--no-listen")
    workers.began()
    assert one(db, "select pgqueue.cancel(%s)", job) == "cancelling"
    wait_until(lambda: outcomes(db) == {"cancelled": 1})


def test_an_idle_worker_that_learns_of_a_cancel_does_not_look_for_jobs(
    db, workers
) -> None:
    held = pgqueue.enqueue(db, QUEUE, kind="ahold")
    workers.start("--lease", NOW_AND_THEN, "--poll-interval", "3000")
    workers.began()
    wait_until(lambda: one(db, RESTING))
    db.execute("set pgqueue.notify = off")
    silent = pgqueue.enqueue(db, QUEUE, kind="mark")
    db.execute("set pgqueue.notify = on")
    db.execute("select pgqueue.cancel(%s)", (held,))
    wait_until(lambda: outcomes(db) == {"cancelled": 1})
    assert one(db, "select state from pgqueue.jobs where id = %s", silent) == "ready"
    db.execute("notify pgqueue")
    wait_until(lambda: workers.notes()[silent])


@pytest.mark.parametrize("kind", ["ahold", "attentive"])
def test_a_job_cancelled_while_its_worker_is_dead_never_runs_again(
    db, workers, kind
) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind=kind)
    worker = workers.start("--lease", "1")
    workers.began()
    worker.kill()
    worker.wait(20)
    db.execute("select pgqueue.cancel(%s)", (job,))
    other = workers.start("--lease", "1")
    wait_until(lambda: outcomes(db) == {"cancelled": 1})
    assert workers.notes("began") == {job: 1}
    assert workers.finish(other) == 0
