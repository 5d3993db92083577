"""What a worker does with jobs, with real processes; the faults are in test_worker_faults."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pgqueue
import pytest
from conftest import column, one, some
from pgqueue.worker import Worker, protocol
from worker_app import BAD, UNSTORABLE
from worker_harness import QUEUE, RESTING, is_empty, outcomes, wait_until

pytest_plugins = ["worker_harness"]


@pytest.mark.parametrize("kind", ["bad", "abad"])
def test_whatever_a_handler_raises_fails_only_its_job(db, workers, kind) -> None:
    db.execute("select pgqueue.configure(null, retry_base => '1 hour')")
    cases = list(BAD)
    ids = pgqueue.enqueue_many(db, QUEUE, [{"case": case} for case in cases], kind=kind)
    good = pgqueue.enqueue(db, QUEUE, kind="mark")
    worker = workers.start("--burst", "--concurrency", "2")
    assert worker.wait(40) == 0
    rows = db.execute(
        "select id, attempt, state, last_error from pgqueue.jobs"
    ).fetchall()
    failed = {row[0]: row[1:] for row in rows}
    for job_id, case in zip(ids, cases, strict=True):
        attempt, state, error = failed[job_id]
        assert (attempt, state) == (1, "scheduled"), case
        assert 0 < len(error) <= 8000, case
    assert list(workers.notes()) == [good]


@pytest.mark.parametrize("kind", ["bad", "abad", "bad_in_transaction"])
def test_a_job_whose_result_cannot_be_stored_completes_and_says_so(
    db, workers, kind
) -> None:
    payloads = [{"case": case} for case in UNSTORABLE]
    ids = pgqueue.enqueue_many(db, QUEUE, payloads, kind=kind)
    assert workers.start("--burst").wait(40) == 0
    assert outcomes(db) == {"completed": len(UNSTORABLE)}
    reasons = dict(db.execute("select job_id, result->>'not_stored' from pgqueue.run"))
    for job_id, case in zip(ids, UNSTORABLE, strict=True):
        said = (
            f"job {job_id} {kind!r} of {QUEUE!r}, attempt 1: its result is not stored"
        )
        assert "Error: " in reasons[job_id], case
        assert said in workers.log(), case


def test_a_result_may_speak_of_what_cannot_be_stored(db, workers) -> None:
    result = {"text": "\\u0000 \\ud800", "smile": "\U0001f600"}
    pgqueue.enqueue(db, QUEUE, {"value": result}, kind="echo")
    assert workers.start("--burst").wait(40) == 0
    assert column(db, "select result from pgqueue.run") == [result]


def test_a_worker_does_not_claim_more_bytes_than_it_can_hold(db, workers) -> None:
    text = "x" * 1_000_000
    ids = pgqueue.enqueue_many(db, QUEUE, [{"value": text}] * 40, kind="echo_length")
    with db.transaction(force_rollback=True):
        attempts = protocol.claim(db, "w", [QUEUE], 40)
        sizes = [len(a.payload) for a in attempts]
        assert len(sizes) == 40
        assert protocol.MOST_BYTES < sum(sizes) < protocol.MOST_BYTES + 1_100_000
        assert sizes == sorted(sizes, reverse=True)
    assert workers.start("--burst", "-c", "30").wait(60) == 0
    done = db.execute("select job_id, attempt, result from pgqueue.run").fetchall()
    assert sorted(done) == [(job_id, 1, len(text)) for job_id in ids]


def test_headers_count_among_the_bytes_that_a_worker_can_hold(db) -> None:
    large = {"value": "x" * 1_000_000}
    for _ in range(40):
        pgqueue.enqueue(db, QUEUE, headers=large)
    with db.transaction(force_rollback=True):
        attempts = protocol.claim(db, "w", [QUEUE], 40)
    sizes = [len(a.headers or "") for a in attempts]
    assert len(sizes) == 40
    assert protocol.MOST_BYTES < sum(sizes) < protocol.MOST_BYTES + 1_100_000
    assert all(bool(a.payload) == bool(a.headers) for a in attempts)


def test_large_jobs_are_not_claimed_ahead_by_the_thousand() -> None:
    turns = Worker(pgqueue.App()).turns
    turns.rate = 20_000.0
    assert turns.want(0, 0) > 600
    turns.weigh([500_000] * 10)
    assert turns.want(0, 0) <= 10 + protocol.MOST_BYTES / 500_000


def test_each_handler_ends_its_job_with_its_own_outcome_and_result(db, workers) -> None:
    db.execute("create table effect (job_id bigint)")
    kinds = (
        "noop mark amark effect aeffect snooze reject retry retry_absurd person headers"
    )
    ids = {
        kind: pgqueue.enqueue(
            db,
            QUEUE,
            {"name": "ada", "age": 36} if kind in ("person", "headers") else None,
            kind=kind,
            headers={"trace": "1"},
        )
        for kind in kinds.split()
    }
    good = {"number": "7", "due": "2026-12-24"}
    ids["order"] = pgqueue.enqueue(db, QUEUE, good, kind="order")
    bad = pgqueue.enqueue(db, QUEUE, {"number": "x"}, kind="order", max_attempts=1)
    db.execute("select pgqueue.configure(null, retry_base => '1 hour')")
    workers.start()
    completed = "select count(*) from pgqueue.run where outcome = 'completed'"
    wait_until(lambda: one(db, completed) == 9)
    results = dict(
        db.execute("select kind, result from pgqueue.run where outcome = 'completed'")
    )
    assert results == {
        "noop": None,
        "mark": None,
        "amark": {"attempt": 1},
        "effect": None,
        "aeffect": ids["aeffect"],
        "retry": None,
        "person": "ada 36",
        "order": "7 by 24.12.2026",
        "headers": {
            "headers": {"trace": "1"},
            "payload": {"name": "ada", "age": 36},
            "attempt": 1,
        },
    }
    assert sorted(column(db, "select job_id from effect")) == [
        ids["effect"],
        ids["aeffect"],
    ]
    # The server refuses an absurd delay, and the job fails as if it had none.
    left = {
        row[0]: row[1:]
        for row in db.execute("select kind, attempt, state from pgqueue.jobs")
    }
    assert left == {"snooze": (0, "scheduled"), "retry_absurd": (1, "scheduled")}
    why = "select error from pgqueue.dead_job where id = %s"
    assert "never will" in one(db, why, ids["reject"])
    assert "validation errors for Order" in one(db, why, bad)


def test_a_job_of_an_unknown_kind_is_postponed_and_with_only_known_never_claimed(
    db, workers
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 20, kind="no such")
    assert workers.start("--burst", "--only-known").wait(30) == 0
    assert set(db.execute("select state, attempt from pgqueue.jobs")) == {("ready", 0)}
    assert workers.start("--burst").wait(30) == 0
    assert set(db.execute("select state, attempt from pgqueue.jobs")) == {
        ("scheduled", 0)
    }
    assert workers.log().count("no handler") == 1
    said = column(db, "select last_error from pgqueue.jobs")
    assert set(said) == {"no handler for its kind"}
    why = one(db, "select pgqueue.why(min(id)) from pgqueue.jobs")
    name = socket.gethostname()
    assert re.search(rf"; put off by {name}:\S+: no handler for its kind$", why)


@pytest.mark.parametrize("kind", ["slow", "aslow"])
def test_a_handler_that_exceeds_its_timeout_fails(db, workers, kind) -> None:
    db.execute("select pgqueue.configure(null, retry_base => '1 hour')")
    late = pgqueue.enqueue(db, QUEUE, kind=kind)
    pgqueue.enqueue(db, QUEUE, kind="amark" if kind == "slow" else "mark")
    pgqueue.enqueue(db, QUEUE, kind="mark" if kind == "slow" else "amark", priority=-1)
    workers.start("--concurrency", "2")
    wait_until(lambda: outcomes(db) == {"retry": 1, "completed": 2})
    assert column(db, "select id from pgqueue.jobs") == [late]
    error = one(db, "select last_error from pgqueue.jobs")
    assert "timed out" in error or "TimeoutError" in error


def test_cancel_reaches_a_running_sync_and_a_running_async_handler(db, workers) -> None:
    ids = [pgqueue.enqueue(db, QUEUE, kind=kind) for kind in ("ahold", "polite")]
    workers.start("--lease", "1")
    workers.began(2)
    assert [one(db, "select pgqueue.cancel(%s)", i) for i in ids] == ["cancelling"] * 2
    wait_until(lambda: is_empty(db), timeout=10)
    assert outcomes(db) == {"cancelled": 2}
    assert list(workers.notes("cancelled")) == [ids[0]]


def test_an_idle_worker_starts_jobs_at_once_and_scheduled_ones_when_due(
    db, workers
) -> None:
    worker = workers.start("--poll-interval", "60", "-q", f"other,{QUEUE}=3")
    wait_until(lambda: one(db, RESTING))
    for count in range(1, 51):
        pgqueue.enqueue(db, QUEUE, kind="mark")
        wait_until(lambda: workers.notes().total() == count, 10)  # noqa: B023
    pgqueue.enqueue(
        db, QUEUE, kind="amark", run_at=one(db, "select now() + interval '1 second'")
    )
    wait_until(lambda: is_empty(db), timeout=10)
    worst = one(db, "select max(waited) from pgqueue.run").total_seconds()
    assert worst < 5, "no job waits for a poll"
    assert workers.finish(worker) == 0


def test_weights_divide_a_worker_between_full_queues(db, workers) -> None:
    for queue in ("heavy", "light"):
        pgqueue.enqueue_many(db, queue, [{"seconds": 0.005}] * 200, kind="nap")
    worker = workers.start(
        "-q", "heavy=4,light", "--concurrency", "1", "--max-jobs", "100"
    )
    assert worker.wait(40) == 0
    runs = dict(db.execute("select queue, count(*) from pgqueue.run group by 1"))
    assert sum(runs.values()) == 100
    assert 70 <= runs["heavy"] <= 90, runs


def test_a_worker_with_slow_handlers_claims_no_more_jobs_than_it_runs(
    db, workers
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 500, kind="noop")
    pgqueue.enqueue_many(db, QUEUE, [None] * 100, kind="hold")
    workers.start("--concurrency", "3")
    workers.began(3)
    running = "select count(*) from pgqueue.jobs where state = 'running'"
    wait_until(lambda: one(db, running) == 3, timeout=10)
    workers.let_go()
    wait_until(lambda: is_empty(db))
    assert outcomes(db) == {"completed": 600}


def test_slow_jobs_that_were_claimed_ahead_as_quick_ones_go_back(db, workers) -> None:
    for _ in range(20):
        pgqueue.enqueue_many(db, QUEUE, [None] * 1000, kind="noop")
    slow = pgqueue.enqueue_many(db, QUEUE, [{"seconds": 0.2}] * 400, kind="nap")
    workers.start("--concurrency", "2")
    held = "select count(*) from pgqueue.job where lease_expires_at is not null"
    left = "select count(*) from pgqueue.job where id = any(%s)"
    wait_until(lambda: one(db, left, slow) < 400)
    wait_until(lambda: one(db, held) <= 4, 60)
    # The two slots alone take forty seconds for them.
    assert one(db, left, slow) > 200


def test_jobs_are_not_claimed_faster_than_they_can_be_finished(
    db, workers, connect
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 30_000, kind="noop")
    workers.start("--batch", "200", "--lease", "1")
    wait_until(lambda: one(db, "select count(*) from pgqueue.run") > 5000)
    other = connect()
    with other.transaction():
        other.execute(
            "lock table pgqueue.run in exclusive mode"
        )  # so that nothing can complete
        held = "select count(*) from pgqueue.job where token is not null"
        second_heartbeat = (
            f"{held} and lease_expires_at > claimed_at + interval '1.5 s'"
        )
        wait_until(lambda: one(db, second_heartbeat) > 0)
        assert one(db, held) < 1000
    wait_until(lambda: is_empty(db))
    assert outcomes(db) == {"completed": 30_000}


def test_sigterm_finishes_running_jobs_and_releases_those_not_begun(
    db, workers
) -> None:
    ids = pgqueue.enqueue_many(db, QUEUE, [None] * 10, kind="hold")
    worker = workers.start("--concurrency", "2")
    began = workers.began(2)
    worker.send_signal(signal.SIGTERM)
    # Until then it claims ahead, and the next would begin.
    wait_until(lambda: "is stopping" in workers.log())
    waiting = "select count(*) from pgqueue.jobs where state = 'ready' and attempt = 0"
    wait_until(lambda: one(db, waiting) == 8)
    workers.let_go()
    assert worker.wait(20) == 0
    assert sorted(workers.notes()) == sorted(began)
    assert outcomes(db) == {"completed": 2}
    assert len(ids) == 10


@pytest.mark.parametrize("kind", ["hold", "ahold", "hold_effect"])
def test_after_the_shutdown_timeout_attempts_are_ended_and_counted(
    db, workers, kind
) -> None:
    db.execute("create table effect (job_id bigint)")
    pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind=kind)
    worker = workers.start("--shutdown-timeout", "1")
    workers.began(3)
    began = time.monotonic()
    assert workers.finish(worker) == 0
    assert 1 <= time.monotonic() - began < 10
    assert set(db.execute("select state, attempt from pgqueue.jobs")) == {("ready", 1)}
    assert one(db, "select count(*) from effect") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_worker_and_its_attempts_at_once(
    db, workers, number
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind="hold")
    worker = workers.start()
    workers.began(3)
    worker.send_signal(number)
    wait_until(lambda: "stopping" in workers.log())  # two signals at once would be one
    worker.send_signal(number)
    assert worker.wait(10) == 128 + number
    assert set(db.execute("select state, attempt from pgqueue.jobs")) == {("ready", 1)}


def test_a_signal_while_the_worker_starts_is_not_lost(db, workers) -> None:
    pgqueue.enqueue(db, QUEUE, kind="hold")
    for delay in (0.15, 0.2, 0.25, 0.3, 0.4):
        worker = workers.start("--shutdown-timeout", "0.1")
        time.sleep(delay)
        worker.send_signal(signal.SIGTERM)
        # -15: Python had not begun to run the worker.
        assert worker.wait(10) in (0, -signal.SIGTERM)
    assert column(db, "select state from pgqueue.jobs") == ["ready"]


def test_several_processes_share_the_work_are_restarted_and_stop_together(
    db, workers
) -> None:
    pgqueue.enqueue(db, QUEUE, kind="suicide", max_attempts=2)
    ids = pgqueue.enqueue_many(db, QUEUE, [{"seconds": 0.02}] * 400, kind="nap")
    parent = workers.start("--processes", "2", "--lease", "1", "--concurrency", "2")
    wait_until(lambda: one(db, "select count(*) from pgqueue.dead_job") == 1)
    wait_until(lambda: is_empty(db))
    names = column(
        db, "select distinct worker from pgqueue.run where outcome = 'completed'"
    )
    assert len(names) >= 2
    assert workers.finish(parent) == 0
    assert set(ids) <= set(workers.notes())


def test_a_signal_to_supervisor_and_children_lets_running_jobs_finish(
    db, workers
) -> None:
    """As systemd stops a service: it signals supervisor and children."""
    pgqueue.enqueue_many(db, QUEUE, [None] * 4, kind="hold")
    parent = workers.start("--processes", "2", "--concurrency", "2")
    workers.began(4)
    children = (
        Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    )
    for pid in [str(parent.pid), *children]:
        os.kill(int(pid), signal.SIGTERM)
    wait_until(lambda: workers.log().count("is stopping") == 2)
    workers.let_go()
    assert parent.wait(20) == 0
    assert outcomes(db) == {"completed": 4}


def test_a_supervisor_ends_at_a_signal_while_it_starts_its_children(
    db, workers
) -> None:
    for delay in some((0.1, 0.15, 0.2, 0.3), 2, "delays"):
        parent = workers.start("--processes", "8")
        time.sleep(delay)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(20) in (0, -signal.SIGTERM)


def test_the_children_of_a_killed_supervisor_close_their_sessions(db, workers) -> None:
    parent = workers.start("--processes", "2")
    sessions = "select count(distinct pid) from pg_stat_activity where application_name like 'pgqueue %'"
    wait_until(lambda: one(db, sessions) >= 2)
    parent.kill()
    parent.wait(20)
    wait_until(lambda: one(db, sessions) == 0)


def test_a_worker_ends_after_max_jobs(db, workers) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 50, kind="noop")
    assert workers.start("--max-jobs", "20").wait(30) == 0
    assert one(db, "select count(*) from pgqueue.run") == 20
    assert one(db, "select count(*) from pgqueue.jobs where state = 'ready'") == 30


def test_memory_does_not_grow_with_the_number_of_jobs(db, workers, say) -> None:
    total = int(os.environ.get("PGQUEUE_TEST_JOBS", "30000"))
    worker = workers.start()

    def run(count: int) -> int:
        pgqueue.enqueue_many(db, QUEUE, [{}] * count, kind="noop")
        wait_until(lambda: is_empty(db), timeout=300)
        with open(f"/proc/{worker.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    before = run(total // 3)
    after = run(total - total // 3)
    say(f"\n{total} jobs: {before} kB resident after a third, {after} kB after all")
    assert after - before < 10_000


def test_a_handler_that_holds_the_gil_is_logged_as_a_late_heartbeat(
    db, workers
) -> None:
    pgqueue.enqueue(db, QUEUE, kind="gil")
    workers.start("--lease", "0.6")
    wait_until(lambda: "heartbeat" in workers.log() and "late" in workers.log())


def test_an_idle_worker_rests_and_does_not_claim(db, workers) -> None:
    """Each of the two walks the dead entries of a lane, so an idle worker calls only one."""
    db.execute(f"alter database {db.info.dbname} set track_functions = 'pl'")
    workers.start("--poll-interval", "0.1", "--no-listen")
    calls = (
        "select coalesce(sum(calls), 0) from pg_stat_user_functions "
        "where schemaname = 'pgqueue' and funcname = '{}'"
    )
    wait_until(lambda: one(db, calls.format("rest")) >= 20)
    assert one(db, calls.format("claim")) <= 5
    job = pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: job in workers.notes())
