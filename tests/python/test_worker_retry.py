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


def attempts(db, workers: Workers, job: int, most: int) -> int:
    """Run a job until it is dead, and return how many attempts that took."""
    for _ in range(most):
        burst(workers)
        if one(db, "select count(*) from pgqueue.dead_job"):
            break
        one(db, "select pgqueue.run_now(%s)", job)
    return one(db, "select attempt from pgqueue.dead_job where id = %s", job)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["few", "afew"])
@pytest.mark.parametrize("error", ["ValueError", "Retry"])
def test_the_max_attempts_of_a_handler_limits_a_job_that_has_more(
    db, workers, kind, error
) -> None:
    job = raising(db, kind, error)
    assert one(db, "select max_attempts from pgqueue.jobs") > 3
    assert attempts(db, workers, job, 5) == 3


def test_the_max_attempts_of_a_job_limits_a_handler_that_has_more(db, workers) -> None:
    assert (
        attempts(db, workers, raising(db, "few", "ValueError", max_attempts=2), 5) == 2
    )


@pytest.mark.parametrize(("given", "ends_at"), [(2, 2), (5, 5)])
def test_the_max_attempts_that_a_job_is_given_win(db, workers, given, ends_at) -> None:
    from worker_retry_app import app

    few = app.tasks["few"].with_options(queue=QUEUE, max_attempts=given)
    job = few.enqueue(db, error="ValueError")
    assert attempts(db, workers, job, 6) == ends_at


def test_a_task_enqueues_with_the_max_attempts_of_its_handler(db) -> None:
    from worker_retry_app import app

    job = app.tasks["few"].with_options(queue=QUEUE).enqueue(db, error="ValueError")
    assert one(db, "select max_attempts from pgqueue.jobs where id = %s", job) == 3


@pytest.mark.parametrize("kind", ["slowly", "aslowly"])
def test_retry_base_doubles_up_to_retry_cap(db, workers, kind) -> None:
    job = raising(db, kind, "ValueError")
    delays = []
    for _ in range(4):
        burst(workers)
        delays.append(one(db, DELAY, job))
        one(db, "select pgqueue.run_now(%s)", job)
    assert one(db, "select attempt from pgqueue.jobs") == 4
    # Half to all of the delay, and a second for the time between two clocks.
    for delay, most in zip(delays, (40, 80, 100, 100), strict=True):
        assert most / 2 - 1 <= delay <= most + 1


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


@pytest.mark.sample(8)
@pytest.mark.parametrize("prefix", ["", "a"])
@pytest.mark.parametrize(
    ("kind", "error", "is_final"),
    [
        ("only", "ValueError", True),
        ("only", "LookupError", False),
        ("only", "KeyError", False),  # a LookupError
        ("only", "TimeoutError", False),  # an OSError
        ("only", "Retry", False),  # the handler asks for it
        ("only", "Reject", True),
        ("not", "ValueError", False),
        ("not", "LookupError", True),
        ("not", "KeyError", True),
        ("not", "Retry", False),
        ("bare", "KeyError", True),
        ("bare", "ValueError", False),
        ("both", "KeyError", True),
        ("both", "LookupError", False),
        ("both", "ValueError", True),
        ("plain", "KeyError", False),
        ("plain", "Reject", True),
    ],
)
def test_the_policy_says_which_exceptions_are_retried(
    db, workers, prefix, kind, error, is_final
) -> None:
    job = raising(db, prefix + kind, error)
    burst(workers)
    assert outcomes(db) == {"dead" if is_final else "retry": 1}
    left = list(db.execute("select id, state, attempt from pgqueue.jobs"))
    dead = list(db.execute("select id, attempt from pgqueue.dead_job"))
    assert (left, dead) == (
        ([], [(job, 1)]) if is_final else ([(job, "scheduled", 1)], [])
    )


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("late_few", "retry"),
        ("late_one", "dead"),
        ("late_only", "retry"),
        ("late_not", "dead"),
    ],
)
def test_a_timeout_is_a_timeout_error_to_the_policy(db, workers, kind, outcome) -> None:
    pgqueue.enqueue(db, QUEUE, kind=kind)
    worker = workers.start(*APP, "--shutdown-timeout", "0.2")
    wait_until(lambda: outcomes(db).total())
    assert outcomes(db) == {outcome: 1}
    assert workers.finish(worker) == 0


def test_a_timeout_is_retried_by_the_backoff_of_the_policy(db, workers) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind="late_slowly")
    worker = workers.start(*APP, "--shutdown-timeout", "0.2")
    wait_until(lambda: outcomes(db).total())
    assert column(db, "select state from pgqueue.jobs") == ["scheduled"]
    assert 19 <= one(db, DELAY, job) <= 41
    assert workers.finish(worker) == 0
