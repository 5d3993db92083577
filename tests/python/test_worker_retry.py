"""The retry policy of a handler, and what happens to a job that fails under it."""

import pgqueue
import pytest
from conftest import column, one
from worker_harness import QUEUE, Workers, outcomes, wait_until

pytest_plugins = ["worker_harness"]

APP = ("--app", "worker_retry_app")
DELAY = (
    "select extract(epoch from j.run_at - r.finished_at)::float8 from pgqueue.job as j"
    " join pgqueue.run as r on r.job_id = j.id and r.attempt = j.attempt where j.id = %s"
)


@pytest.fixture(autouse=True)
def queue_policy(db) -> None:
    db.execute("select pgqueue.configure(null, retry_base => '1 hour')")


def burst(workers: Workers) -> None:
    assert workers.start(*APP, "--burst").wait(30) == 0


def raising(db, kind: str, error: str, **options) -> int:
    return pgqueue.enqueue(db, QUEUE, {"error": error}, kind=kind, **options)


def settle(db) -> None:
    """Wait until all jobs that are left are to be retried later, and none has to be run."""
    wait_until(
        lambda: (
            not one(db, "select count(*) from pgqueue.jobs where state <> 'scheduled'")
        )
    )


def test_the_fewest_attempts_of_handler_and_job_count_and_what_a_task_is_given_wins(
    db, workers
) -> None:
    from worker_retry_app import app

    def given(most: int) -> int:
        few = app.tasks["few"].with_options(queue=QUEUE, max_attempts=most)
        return few.enqueue(db, error="ValueError")

    kinds, errors = ("few", "afew"), ("ValueError", "Retry")
    ends = {raising(db, kind, error): 3 for kind in kinds for error in errors}
    assert one(db, "select min(max_attempts) from pgqueue.jobs") > 3
    ends |= {raising(db, "few", "ValueError", max_attempts=2): 2}
    ends |= {given(2): 2, given(5): 5}
    worker = workers.start(*APP)
    for _ in range(6):
        settle(db)
        db.execute("select pgqueue.run_now(id) from pgqueue.jobs")
    assert (
        dict(db.execute("select id, attempt from pgqueue.dead_job").fetchall()) == ends
    )
    assert workers.finish(worker) == 0


def test_a_task_enqueues_with_the_max_attempts_of_its_handler(db) -> None:
    from worker_retry_app import app

    job = app.tasks["few"].with_options(queue=QUEUE).enqueue(db, error="ValueError")
    assert one(db, "select max_attempts from pgqueue.jobs where id = %s", job) == 3


def test_retry_base_doubles_up_to_retry_cap(db, workers) -> None:
    jobs = [raising(db, kind, "ValueError") for kind in ("slowly", "aslowly")]
    worker = workers.start(*APP)
    # Half to all of the delay, and a second for the time between two clocks.
    for attempt, most in enumerate((40, 80, 100, 100), 1):
        settle(db)
        assert column(db, "select attempt from pgqueue.jobs") == [attempt] * 2
        for job in jobs:
            assert most / 2 - 1 <= one(db, DELAY, job) <= most + 1
        db.execute("select pgqueue.run_now(id) from pgqueue.jobs")
    assert workers.finish(worker) == 0


def test_the_delay_of_a_retry_overrides_the_policy_of_its_handler(db, workers) -> None:
    own = raising(db, "slowly", "Retry")
    queue = raising(db, "plain", "ValueError")
    burst(workers)
    assert 76 <= one(db, DELAY, own) <= 78
    assert one(db, DELAY, queue) >= 1799


def test_a_retry_without_a_delay_takes_the_backoff_of_the_policy(db, workers) -> None:
    job = raising(db, "slowly", "Backoff")
    burst(workers)
    assert 19 <= one(db, DELAY, job) <= 41


FINAL = {
    ("only", "ValueError"): True,
    ("only", "LookupError"): False,
    ("only", "KeyError"): False,  # a LookupError
    ("only", "TimeoutError"): False,  # an OSError
    ("only", "Retry"): False,  # the handler asks for it
    ("only", "Reject"): True,
    ("not", "ValueError"): False,
    ("not", "LookupError"): True,
    ("not", "KeyError"): True,
    ("not", "Retry"): False,
    ("bare", "KeyError"): True,
    ("bare", "ValueError"): False,
    ("both", "KeyError"): True,
    ("both", "LookupError"): False,
    ("both", "ValueError"): True,
    ("plain", "KeyError"): False,
    ("plain", "Reject"): True,
}


@pytest.mark.parametrize("prefix", ["", "a"])
def test_the_policy_says_which_exceptions_are_retried(db, workers, prefix) -> None:
    jobs = {raising(db, prefix + kind, error): (kind, error) for kind, error in FINAL}
    burst(workers)

    def cases(query: str) -> dict[tuple[str, str], tuple]:
        return {jobs[job]: tuple(said) for job, *said in db.execute(query)}

    assert cases("select job_id, outcome from pgqueue.run") == {
        case: ("dead" if is_final else "retry",) for case, is_final in FINAL.items()
    }
    assert cases("select id, state, attempt from pgqueue.jobs") == {
        case: ("scheduled", 1) for case, is_final in FINAL.items() if not is_final
    }
    assert cases("select id, attempt from pgqueue.dead_job") == {
        case: (1,) for case, is_final in FINAL.items() if is_final
    }


def test_a_timeout_is_a_timeout_error_to_the_policy(db, workers) -> None:
    ends = {
        "late_few": "retry",
        "late_one": "dead",
        "late_only": "retry",
        "late_not": "dead",
        "late_slowly": "retry",
    }
    jobs = {kind: pgqueue.enqueue(db, QUEUE, kind=kind) for kind in ends}
    worker = workers.start(*APP, "--shutdown-timeout", "0.2")
    wait_until(lambda: outcomes(db).total() == len(ends))
    assert dict(db.execute("select kind, outcome from pgqueue.run").fetchall()) == ends
    assert set(column(db, "select state from pgqueue.jobs")) == {"scheduled"}
    # By the backoff of the policy.
    assert 19 <= one(db, DELAY, jobs["late_slowly"]) <= 41
    assert workers.finish(worker) == 0
