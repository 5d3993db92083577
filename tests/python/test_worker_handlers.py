"""Whatever a handler does, it harms neither other jobs nor the worker."""

import os
import signal
from collections.abc import Callable

import pgqueue
import pytest
from conftest import column, one
from worker_harness import QUEUE, is_empty, outcomes, wait_until

pytest_plugins = ["worker_harness"]

NO_RETRY = "select pgqueue.configure(null, retry_base => '1 hour')"
RETRY_SOON = "select pgqueue.configure(null, retry_base => '0.1 s')"
HELD = "select count(*) from pgqueue.job where token is not null"
MAINTAINS = (
    "select count(*) from pg_stat_activity"
    " where query like '%pgqueue.maintain()%' and wait_event_type = 'Lock'"
)
SLOT = "select (floor(extract(epoch from now()) / 86400)::int + 8) % 16"
HURRIED = """
from pgqueue.worker import maintenance
from worker_app import app

maintenance.EVERY = 0.1
"""
IN_TRANSACTION = (
    "select count(*) from pg_stat_activity where datname = current_database()"
    " and state = 'idle in transaction'"
)
RUNNING = "select count(*) from pgqueue.jobs where state = 'running'"


HOSTILE = [
    *[
        (kind, None)
        for kind in (
            "exit_in_child exit_in_callback exit_in_left_task stops_loop cancels_itself"
            " cancels_all recurses careless careless_snooze forks_and_returns"
            " aforks_and_returns"
        ).split()
    ],
    *[
        (kind, {"what": what})
        for kind in ("careless_with", "acareless_with")
        for what in ("until", "soon", "object", "class")
    ],
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("kind", "payload"), HOSTILE)
def test_a_worker_runs_sync_and_async_jobs_after_a_hostile_handler(
    db, workers, kind, payload
) -> None:
    db.execute(NO_RETRY)
    worker = workers.start("--concurrency", "1")
    for _ in range(3):
        pgqueue.enqueue(db, QUEUE, payload, kind=kind, max_attempts=1)
        after = [
            pgqueue.enqueue(db, QUEUE, kind=k, priority=-1) for k in ("mark", "amark")
        ]
        wait_until(lambda: set(after) <= set(workers.notes()))  # noqa: B023
    wait_until(lambda: one(db, HELD) == 0)
    assert workers.finish(worker) == 0


def test_a_handler_that_changes_variables_of_libpq_does_not_move_the_worker(
    db, workers
) -> None:
    ours = {"PGQUEUE_DSN": "", "DATABASE_URL": "", "PGDATABASE": db.info.dbname}
    worker = workers.start(env=ours)
    theirs = {"PGDATABASE": "template1", "PGHOST": "nowhere.invalid", "PGPORT": "1"}
    pgqueue.enqueue(db, QUEUE, {"variables": theirs}, kind="sets_variables")
    wait_until(lambda: is_empty(db))  # reported by a session that was made later
    assert workers.finish(worker) == 0


PARTS = ("dispatcher", "finisher", "heartbeat", "loop", "handler")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("closes_output", None),
        *[("kills_thread", {"name": name}) for name in PARTS],
        *[("interrupts_itself", {"after": seconds}) for seconds in (0.001, 0.05, 0.2)],
    ],
)
def test_a_handler_that_damages_the_worker_ends_it_or_does_no_harm(
    db, workers, kind, payload
) -> None:
    """It must never stay alive with leased jobs and do nothing.

    An exception that arrives late may also fail one attempt of another job.
    """
    db.execute(RETRY_SOON)
    worker = workers.start("--concurrency", "2", "--lease", "1")
    naps = [{"seconds": 0.3}] * 2  # so that two threads exist
    pgqueue.enqueue_many(db, QUEUE, naps, kind="nap")
    pgqueue.enqueue(db, QUEUE, kind="amark")
    wait_until(lambda: workers.notes().total() == 3)

    def unless_ended(what: Callable[[], bool]) -> None:
        wait_until(lambda: worker.poll() is not None or what())

    pgqueue.enqueue(db, QUEUE, payload, kind=kind, priority=1, max_attempts=1)
    unless_ended(lambda: one(db, "select count(*) from pgqueue.run") == 4)
    jobs: list[int] = []
    for _ in range(4):
        jobs += [pgqueue.enqueue(db, QUEUE, kind=k) for k in ("mark", "amark")]
        unless_ended(lambda: set(jobs) <= set(workers.notes()))  # noqa: B023
    unless_ended(lambda: one(db, HELD) == 0)
    if worker.poll() is not None:
        assert worker.returncode == 1
        assert kind == "closes_output" or "has failed" in workers.log()
        workers.start("--lease", "1")
        wait_until(lambda: set(jobs) <= set(workers.notes()))


def test_a_cancelled_async_handler_can_clean_up_and_leaves_no_trace(
    db, workers
) -> None:
    job = pgqueue.enqueue(db, QUEUE, {"seconds": 3}, kind="cleans_up")
    worker = workers.start("--lease", "0.9", "--concurrency", "1")
    workers.began()
    assert one(db, "select pgqueue.cancel(%s)", job) == "cancelling"
    wait_until(lambda: workers.notes("cleaned")[job])
    # A task with a cancellation left over would fail in task groups and timeouts.
    after = pgqueue.enqueue(db, QUEUE, kind="groups")
    wait_until(lambda: after in workers.notes())
    assert workers.finish(worker) == 0
    assert outcomes(db) == {"cancelled": 1, "completed": 1}


def test_a_blocked_event_loop_holds_no_other_jobs_and_its_handler_times_out(
    db, workers
) -> None:
    db.execute(NO_RETRY)
    blocking = pgqueue.enqueue(db, QUEUE, kind="blocks", priority=1)
    blocked = workers.start("--concurrency", "5", "--name", "blocked")
    workers.began()
    ids = pgqueue.enqueue_many(db, QUEUE, [None] * 4, kind="amark")
    ids += pgqueue.enqueue_many(db, QUEUE, [None] * 4, kind="mark")
    workers.start("--name", "other")
    wait_until(lambda: set(ids) <= set(workers.notes()))
    wait_until(lambda: outcomes(db)["retry"] == 1)  # by its timeout, while it blocks
    wait_until(lambda: column(db, "select id from pgqueue.jobs") == [blocking])
    # Async handlers hold all its slots and the event loop is blocked: it ends, to be restarted.
    assert blocked.wait(20) == 1
    assert "blocks the event loop" in workers.log()
    assert "occupy all slots" in workers.log()


def test_jobs_claimed_behind_a_blocked_event_loop_go_to_other_workers(
    db, workers
) -> None:
    blocking = pgqueue.enqueue(db, QUEUE, kind="blocks_until_told", priority=1)
    ids = pgqueue.enqueue_many(db, QUEUE, [None] * 4, kind="amark")
    workers.start("--concurrency", "5", "--name", "blocked")
    workers.began()
    other = workers.start("--concurrency", "5", "--name", "other")
    wait_until(lambda: set(ids) <= set(workers.notes()))
    wait_until(lambda: column(db, "select id from pgqueue.jobs") == [blocking])
    assert workers.finish(other) == 0
    # When its event loop runs again, the worker takes async jobs again.
    pgqueue.enqueue(db, QUEUE, kind="amark")
    workers.let_go()
    wait_until(lambda: is_empty(db))
    assert outcomes(db) == {"completed": 6}


def test_a_process_forked_by_a_handler_can_be_terminated(db, workers) -> None:
    pgqueue.enqueue(db, QUEUE, kind="forks")
    workers.start()
    wait_until(lambda: is_empty(db))
    assert column(db, "select result from pgqueue.run") == [-signal.SIGTERM]


@pytest.mark.parametrize(("ends", "code"), [("return", 0), ("exit", 7), ("raise", 1)])
def test_a_process_forked_by_a_handler_leaves_its_transaction_alone(
    db, workers, ends, code
) -> None:
    db.execute("create table effect (n int)")
    job = pgqueue.enqueue(db, QUEUE, {"ends": ends}, kind="forks_in_transaction")
    assert workers.start("--burst").wait(30) == 0
    assert one(db, "select pgqueue.result(%s)", job) == code
    assert column(db, "select n from effect order by n") == [1, 2]


def test_a_process_forked_by_a_handler_keeps_no_transaction_of_a_killed_worker(
    db, workers
) -> None:
    db.execute("create table effect (n int primary key)")
    pgqueue.enqueue(db, QUEUE, kind="leaves_a_child")
    worker = workers.start()
    workers.began()
    (child,) = workers.notes("child")
    try:
        worker.kill()
        worker.wait(20)
        wait_until(lambda: one(db, IN_TRANSACTION) == 0)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["leaks", "aleaks"])
def test_context_variables_do_not_leak_from_job_to_job(db, workers, kind) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 5, kind=kind)
    assert workers.start("--concurrency", "1", "--burst").wait(30) == 0
    assert column(db, "select result from pgqueue.run") == [0] * 5


@pytest.mark.parametrize("bytes", [70_000_000, 270_000_000])
@pytest.mark.parametrize("kind", ["mega", "mega_transaction"])
def test_a_job_with_a_huge_result_completes_without_it(
    db, workers, kind, bytes
) -> None:
    db.execute("create table effect (job_id bigint)")
    pgqueue.enqueue(db, QUEUE, {"bytes": bytes}, kind=kind, priority=1)
    pgqueue.enqueue_many(db, QUEUE, [None] * 5, kind="mark")
    assert workers.start("--burst").wait(60) == 0
    assert outcomes(db) == {"completed": 6}
    query = "select result ->> 'not_stored' from pgqueue.run where kind = %s"
    assert "of at most 64000000 bytes" in one(db, query, kind)
    effects = one(db, "select count(*) from effect")
    assert effects == (kind == "mega_transaction")


@pytest.mark.long
def test_large_results_that_end_together_are_all_stored(db, workers) -> None:
    payloads = [{"bytes": 50_000_000}] * 24  # beyond what one message may hold
    pgqueue.enqueue_many(db, QUEUE, payloads, kind="mega_together")
    workers.start("--concurrency", "24")
    workers.began(24)
    workers.let_go()
    wait_until(lambda: is_empty(db), 400)
    assert outcomes(db) == {"completed": 24}


def test_sync_and_async_handlers_together_do_not_exceed_concurrency(
    db, workers
) -> None:
    for kind in ("hold", "ahold"):
        pgqueue.enqueue_many(db, QUEUE, [None] * 6, kind=kind)
    workers.start("--concurrency", "4", "--poll-interval", "0.1", "--lease", "0.9")
    workers.began(4)
    second_heartbeat = "select count(*) from pgqueue.job where lease_expires_at > claimed_at + interval '1.5 s'"
    wait_until(lambda: one(db, second_heartbeat) == 4)
    assert workers.notes("began").total() == 4
    assert one(db, RUNNING) == 4
    workers.let_go()
    wait_until(lambda: is_empty(db))


def test_running_and_hung_handlers_together_do_not_exceed_concurrency(
    db, workers
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="peak_hangs", priority=1)
    for _ in range(10):
        for kind in ("peak", "apeak"):
            pgqueue.enqueue_many(db, QUEUE, [None] * 20, kind=kind)
    workers.start("--concurrency", "5")
    wait_until(lambda: outcomes(db)["completed"] == 400)
    # The two hung handlers have timed out and still hold their slots.
    assert one(db, "select max(result::text::int) from pgqueue.run") == 5


def test_a_queue_at_its_limit_leaves_slots_to_jobs_enqueued_later(db, workers) -> None:
    pgqueue.enqueue_many(db, "slow", [None] * 20, kind="hold")
    workers.start("-q", "slow=9:2,quick", "--concurrency", "4")
    workers.began(2)
    for _ in range(3):
        job = pgqueue.enqueue(db, "quick", kind="mark")
        wait_until(lambda: job in workers.notes())  # noqa: B023
    wait_until(lambda: one(db, RUNNING) == 2)  # and every quick job has been finished
    assert workers.notes("began").total() == 2
    workers.let_go()
    wait_until(lambda: is_empty(db, "slow"))


def test_a_queue_at_its_limit_leaves_the_other_slots_to_another_queue(
    db, workers
) -> None:
    pgqueue.enqueue_many(db, "slow", [None] * 20, kind="hold")
    ids = pgqueue.enqueue_many(db, "quick", [None] * 500, kind="mark")
    workers.start("-q", "slow:2,quick")
    wait_until(lambda: set(ids) <= set(workers.notes()))
    assert workers.notes("began").total() == 2


def test_a_higher_weight_drains_a_quick_queue_beside_a_slow_one(db, workers) -> None:
    """Of the slots that become free, five go to quick jobs for each one that goes to a slow job."""
    pgqueue.enqueue_many(db, "slow", [{"seconds": 0.3}] * 200, kind="nap")
    quick = pgqueue.enqueue_many(db, "quick", [None] * 100, kind="mark")
    workers.start("-q", "quick=5,slow", "--concurrency", "4")
    wait_until(lambda: set(quick) <= set(workers.notes()), 60)
    assert workers.notes("began").total() <= 50


def test_two_signals_while_jobs_are_quick_release_no_finished_job(db, workers) -> None:
    # Else the first signal may come when no job is held, and end the worker.
    ids = [pgqueue.enqueue(db, QUEUE, kind="hold", priority=1)]
    ids += pgqueue.enqueue_many(db, QUEUE, [None] * 20_000, kind="mark")
    worker = workers.start("--concurrency", "4", "--lease", "5")
    wait_until(lambda: workers.notes().total() > 3000)
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in workers.log())
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 143
    workers.let_go()
    workers.start()
    wait_until(lambda: is_empty(db), 60)
    assert set(workers.notes()) == set(ids)
    twice = [job for job, count in workers.notes().items() if count > 1]
    assert len(twice) <= 4


def test_a_blocked_maintain_does_not_delay_a_heartbeat(db, workers, connect) -> None:
    (workers.folder / "hurried.py").write_text(HURRIED)
    job = pgqueue.enqueue(db, QUEUE, kind="ahold")
    stranger = connect()
    with stranger.transaction():
        # Not the table of today, which completions need.
        slot = one(db, SLOT)
        stranger.execute(f"lock table pgqueue.run_{slot}")
        worker = workers.start("--app", "hurried", "--lease", "3")
        workers.began()
        wait_until(lambda: one(db, MAINTAINS))
        kept = "select lease_expires_at > claimed_at + interval '8 s' from pgqueue.job"
        wait_until(lambda: one(db, kept))
        assert one(db, MAINTAINS)
        workers.let_go()
        wait_until(lambda: is_empty(db))
        assert workers.finish(worker) == 0
    assert outcomes(db) == {"completed": 1}
    assert list(workers.notes()) == [job]


def test_an_error_that_waiting_cannot_fix_ends_the_worker_with_1(
    dsn, role, workers
) -> None:
    assert workers.start("-q", "x" * 201).wait(20) == 1
    assert "201" in workers.log() or "queue" in workers.log()
    assert workers.start(dsn=f"{dsn} user={role}").wait(20) == 1
    assert "grant_access" in workers.log()
