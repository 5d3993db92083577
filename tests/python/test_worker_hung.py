"""A handler that hangs is noticed, logged and failed; when no slot is left, the worker ends."""

import pgqueue
import pytest
from conftest import column, one
from worker_harness import QUEUE, outcomes, wait_until

pytest_plugins = ["worker_harness"]

NO_RETRY = "select pgqueue.configure(null, retry_base => '1 hour')"


def test_a_hung_thread_keeps_its_slot_and_the_worker_ends_when_no_slot_is_left(
    db, workers
) -> None:
    db.execute(NO_RETRY)
    jobs = pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="hangs")
    worker = workers.start("--concurrency", "3")
    workers.began(2)
    wait_until(lambda: outcomes(db)["retry"] == 2)
    after = pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: after in workers.notes())
    assert worker.poll() is None
    jobs += [pgqueue.enqueue(db, QUEUE, kind="hangs")]
    assert worker.wait(20) == 1
    rows = db.execute(
        "select id, attempt, state from pgqueue.jobs order by id"
    ).fetchall()
    assert rows == [(job, 1, "scheduled") for job in jobs]
    assert "still runs in its slot" in workers.log()


@pytest.mark.parametrize("kind", ["late_in_group", "late_in_transaction"])
def test_a_thread_that_timed_out_keeps_its_place_in_the_group_until_it_returns(
    db, workers, kind
) -> None:
    db.execute(NO_RETRY)
    db.execute("select pgqueue.configure(null, group_limit => 1)")
    db.execute("create table effect (job_id bigint)")
    jobs = [pgqueue.enqueue(db, QUEUE, kind=kind, group_key="a") for _ in range(3)]
    workers.start("--lease", "1")
    wait_until(lambda: outcomes(db) == {"retry": 3})
    words = [line.split()[0] for line in workers.ran.read_text().splitlines()]
    assert words == ["began", "ran"] * 3
    assert sorted(workers.notes()) == jobs
    assert set(column(db, "select last_error from pgqueue.jobs")) == {
        "TimeoutError: timed out after 0.3 seconds"
    }
    assert one(db, "select count(*) from effect") == 0


def test_a_hung_transaction_delays_no_report_and_is_not_committed(db, workers) -> None:
    db.execute(NO_RETRY)
    hung = pgqueue.enqueue(db, QUEUE, kind="hangs_with_lock")
    workers.start()
    wait_until(lambda: outcomes(db)["retry"] == 1)
    after = pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: outcomes(db)["completed"] == 1)
    workers.let_go()
    wait_until(lambda: "has returned: its slot is free" in workers.log())
    query = "select job_id from pgqueue.run where outcome = 'completed'"
    assert column(db, query) == [after]
    assert column(db, "select id from pgqueue.jobs where attempt = 1") == [hung]
    assert one(db, "select count(*) from pgqueue.steps(%s)", hung) == 0


@pytest.mark.parametrize("kind", ["hangs_with_lock", "ahangs_with_lock"])
def test_a_worker_that_ends_reports_a_hung_transaction(db, workers, kind) -> None:
    pgqueue.enqueue(db, QUEUE, kind=kind)
    worker = workers.start("--shutdown-timeout", "0.2")
    workers.began()
    assert workers.finish(worker) == 0
    assert "WorkerStopped" in one(db, "select last_error from pgqueue.jobs")


def test_a_timeout_for_all_handlers_can_be_set_on_the_command_line(db, workers) -> None:
    db.execute(NO_RETRY)
    pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="ahold")
    workers.start("--timeout", "0.5")
    wait_until(lambda: outcomes(db)["retry"] == 2)
    assert set(column(db, "select last_error from pgqueue.jobs")) == {
        "TimeoutError: timed out after 0.5 seconds"
    }


def test_an_app_can_set_a_timeout_for_its_handlers(db, workers) -> None:
    db.execute(NO_RETRY)
    for kind in ("hang", "ahold"):
        pgqueue.enqueue(db, QUEUE, kind=kind)
    longer = pgqueue.enqueue(db, QUEUE, {"seconds": 1}, kind="nap")
    workers.start("--app", "worker_app:hurried", "--timeout", "60")
    wait_until(lambda: outcomes(db) == {"retry": 2, "completed": 1})
    assert set(column(db, "select last_error from pgqueue.jobs")) == {
        "TimeoutError: timed out after 0.5 seconds"
    }
    assert list(workers.notes()) == [longer]


def test_a_handler_can_be_exempt_from_the_timeout_of_all_others(db, workers) -> None:
    db.execute(NO_RETRY)
    _limited, free = (
        pgqueue.enqueue(db, QUEUE, {"seconds": 1}, kind=kind)
        for kind in ("nap", "nap_without_timeout")
    )
    workers.start("--timeout", "0.3")
    wait_until(lambda: outcomes(db) == {"retry": 1, "completed": 1})
    query = "select job_id from pgqueue.run where outcome = 'completed'"
    assert column(db, query) == [free]


def test_a_cancelled_handler_that_does_not_stop_is_logged(db, workers) -> None:
    jobs = [pgqueue.enqueue(db, QUEUE, kind=k) for k in ("hang", "ahang_stubborn")]
    worker = workers.start("--lease", "1", "--shutdown-timeout", "0.5")
    workers.began(2)
    for job in jobs:
        assert one(db, "select pgqueue.cancel(%s)", job) == "cancelling"
    told = "attempt 1 was told to stop and does not react"
    wait_until(lambda: workers.log().count(told) >= 2)
    wait_until(lambda: outcomes(db) == {"cancelled": 2})
    assert workers.finish(worker) == 0
    assert outcomes(db) == {"cancelled": 2}


def test_a_worker_whose_slots_are_all_hung_stops_touching_its_health_file(
    db, workers
) -> None:
    db.execute(NO_RETRY)
    file = workers.folder / "health"
    worker = workers.start("--concurrency", "1", "--health-file", str(file))
    wait_until(file.exists)
    pgqueue.enqueue(db, QUEUE, kind="hangs")
    assert worker.wait(20) == 1
    last = file.stat().st_mtime
    ended = one(
        db, "select extract(epoch from max(finished_at))::float8 from pgqueue.run"
    )
    assert last <= ended + 1
    assert "handlers that do not end occupy all slots" in workers.log()


def test_every_child_is_replaced_when_all_its_slots_are_hung(db, workers) -> None:
    db.execute(NO_RETRY)
    pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="hangs")
    parent = workers.start("--processes", "2", "--concurrency", "1")
    wait_until(lambda: workers.log().count("ended with 1: restarting") == 2)
    after = pgqueue.enqueue_many(db, QUEUE, [None] * 4, kind="mark")
    wait_until(lambda: set(after) <= set(workers.notes()))
    assert outcomes(db)["retry"] == 2
    assert workers.finish(parent) == 0


def test_each_stop_of_a_worker_uses_up_an_attempt_of_a_hung_job(db, workers) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind="hang", max_attempts=2)
    for attempt in (1, 2):
        worker = workers.start("--shutdown-timeout", "0.2")
        wait_until(lambda: workers.notes("began")[job] == attempt)  # noqa: B023
        assert workers.finish(worker) == 0
    assert column(db, "select id from pgqueue.dead_job") == [job]
    assert "WorkerStopped" in one(db, "select error from pgqueue.dead_job")


def test_a_dead_event_loop_ends_the_worker_even_without_a_job_on_it(
    db, workers
) -> None:
    pgqueue.enqueue(db, QUEUE, kind="leaves_loop_blocked")
    worker = workers.start()
    assert worker.wait(60) == 1
    assert "occupy all slots or the loop" in workers.log()
