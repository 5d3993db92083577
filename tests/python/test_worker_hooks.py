"""Hooks: middleware around every attempt, start-up, shutdown, and what the log says."""

import json
import time

import pgqueue
import pytest
from conftest import column, one
from worker_harness import QUEUE, Workers, outcomes, wait_until

pytest_plugins = ["worker_harness"]

NO_RETRY = "select pgqueue.configure(null, retry_base => '1 hour')"
KINDS = ["sync", "async", "sync_transaction", "async_transaction"]
APP = ("--app", "worker_hooks_app")
LEFT = "select id, state, attempt from pgqueue.jobs"


@pytest.fixture(autouse=True)
def effect(db) -> None:
    db.execute(NO_RETRY)
    db.execute("create table effect (job_id bigint)")


def burst(workers: Workers) -> None:
    assert workers.start(*APP, "--burst", "-c", "2").wait(30) == 0


def words(workers: Workers, job: int) -> list[str]:
    lines = [line.split() for line in workers.ran.read_text().splitlines()]
    return [word for word, number in lines if number == str(job)]


def enqueue(db, kind: str, raises: str | None = None, middleware: str | None = None):
    return pgqueue.enqueue(
        db,
        QUEUE,
        None if raises is None else {"raises": raises},
        kind=kind,
        headers={"middleware": middleware},
    )


def test_middleware_sees_every_attempt_and_what_it_raised(db, workers) -> None:
    raised = "ValueError Retry Snooze Reject SystemExit ExceptionGroup".split()
    good = [enqueue(db, kind) for kind in KINDS]
    jobs = [(name, enqueue(db, kind, name)) for kind in KINDS for name in raised]
    burst(workers)
    for job in good:
        assert words(workers, job) == ["entered", "ran", "passed"]
    for name, job in jobs:
        assert words(workers, job) == ["entered", "ran", name]
    each = "select kind, outcome, count(*) from pgqueue.run group by 1, 2"
    assert set(db.execute(each)) == {
        (kind, *ended)
        for kind in KINDS
        for ended in (("completed", 1), ("retry", 4), ("dead", 1))
    }
    results = "select result from pgqueue.run where job_id = any(%s)"
    assert column(db, results, good) == ["done"] * 4


def test_middleware_sees_the_cancellation_of_a_late_async_handler(db, workers) -> None:
    job = enqueue(db, "late")
    burst(workers)
    assert words(workers, job) == ["entered", "CancelledError"]
    assert one(db, "select last_error from pgqueue.jobs") == (
        "TimeoutError: timed out after 0.5 seconds"
    )


def test_an_attempt_whose_exception_middleware_swallows_completes(db, workers) -> None:
    """As with a context manager: the attempt completes, without a result."""
    jobs = [enqueue(db, kind, "ValueError", "swallow") for kind in KINDS]
    burst(workers)
    for job in jobs:
        assert words(workers, job) == ["entered", "ran", "ValueError"]
    assert outcomes(db) == {"completed": 4}
    assert column(db, "select result from pgqueue.run") == [None] * 4


def test_middleware_may_raise_another_exception(db, workers) -> None:
    replaced = [enqueue(db, kind, "ValueError", "replace") for kind in KINDS]
    kept = [enqueue(db, kind, "Reject", "retry later") for kind in KINDS]
    burst(workers)
    assert set(db.execute(LEFT)) == {(job, "scheduled", 1) for job in replaced + kept}
    error = "select last_error from pgqueue.jobs where id = %s"
    for job in replaced:
        assert one(db, error, job).startswith("Replaced: instead\n")
        assert "ValueError: plain" in one(db, error, job)
    assert one(db, "select count(*) from effect") == 0


def test_middleware_that_raises_fails_its_attempt_only(db, workers) -> None:
    whens = ("before", "after")
    cases = [(kind, when) for kind in KINDS for when in whens]
    bad = [enqueue(db, kind, middleware=f"raise {when}") for kind, when in cases]
    good = [enqueue(db, kind) for kind, _ in cases]
    burst(workers)
    assert set(db.execute(LEFT)) == {(job, "scheduled", 1) for job in bad}
    assert outcomes(db) == {"completed": 8, "retry": 8}
    for job, other, (_, when) in zip(bad, good, cases, strict=True):
        error = "select last_error from pgqueue.jobs where id = %s"
        assert one(db, error, job).startswith(f"Replaced: {when}\n")
        assert words(workers, other) == ["entered", "ran", "passed"]
        ran = ["ran", "passed"] if when == "after" else []
        assert words(workers, job) == ["entered", *ran]
    assert column(db, "select job_id from effect order by 1") == [
        job for job, (kind, _) in zip(good, cases, strict=True) if "transaction" in kind
    ]


def test_startup_hooks_run_before_the_first_job_and_shutdown_hooks_after_the_last(
    db, workers
) -> None:
    job = enqueue(db, "async")
    burst(workers)
    lines = workers.ran.read_text().splitlines()
    assert lines == [
        "start -1",
        "start -2",
        f"entered {job}",
        f"ran {job}",
        f"passed {job}",
        "end -1",
        "end -2",
    ]


@pytest.mark.parametrize(
    "how", ["raise at start", "raise at async start", "exit at start"]
)
def test_a_startup_hook_that_raises_ends_the_worker_before_it_claims(
    db, workers, how
) -> None:
    job = enqueue(db, "sync")
    worker = workers.start(*APP, env={"IN_HOOKS": how})
    assert worker.wait(20) == 1
    raised = "has failed: 0" if "exit" in how else "ValueError: cannot start"
    assert raised in workers.log()
    assert list(db.execute(LEFT)) == [(job, "ready", 0)]
    assert "ran" not in workers.ran.read_text()


@pytest.mark.parametrize("how", ["raise at end", "raise at async end"])
def test_a_shutdown_hook_that_raises_ends_the_worker_with_1_and_costs_no_job(
    db, workers, how
) -> None:
    enqueue(db, "sync")
    worker = workers.start(*APP, "--burst", env={"IN_HOOKS": how})
    assert worker.wait(20) == 1
    assert "ValueError: cannot end" in workers.log()
    assert outcomes(db) == {"completed": 1}


@pytest.mark.parametrize(
    "how",
    ["hang at start", "hang at async start", "hang at end", "hang at async end"],
)
def test_a_hook_that_hangs_ends_with_the_shutdown_timeout(db, workers, how) -> None:
    worker = workers.start(*APP, "--shutdown-timeout", "1", env={"IN_HOOKS": how})
    if "start" in how:
        wait_until(lambda: workers.notes("start")[-2 if "async" in how else -1])
    else:
        job = enqueue(db, "sync")
        wait_until(lambda: workers.notes()[job])
    began = time.monotonic()
    workers.finish(worker, 10)
    assert time.monotonic() - began <= 1 + 1.5
    assert "WARNING a hook does not end: given up" in workers.log()


@pytest.mark.parametrize("how", ["hang at end", "hang at async end"])
def test_a_shutdown_hook_that_hangs_beside_a_handler_ends_in_time(
    db, workers, how
) -> None:
    enqueue(db, "hang")
    worker = workers.start(*APP, "--shutdown-timeout", "1", env={"IN_HOOKS": how})
    workers.began()
    began = time.monotonic()
    workers.finish(worker, 10)
    assert time.monotonic() - began <= 1 + 1.5


@pytest.mark.parametrize("how", ["hang at end", "hang at async end"])
def test_a_shutdown_hook_that_hangs_ends_in_time_without_a_signal(
    db, workers, how
) -> None:
    worker = workers.start(
        *APP, "--burst", "--shutdown-timeout", "1", env={"IN_HOOKS": how}
    )
    assert worker.wait(20) == 0
    assert "WARNING a hook does not end: given up" in workers.log()


LEAVES = """
import asyncio
import os
import sys
import pgqueue
from worker_app import note

app = pgqueue.App()
how = os.environ["HOW"]
tasks = []

async def background(number):
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0)
        note("cleaned", number)
        if how == "exits":
            sys.exit(3)
        if how == "interrupts":
            raise KeyboardInterrupt
        while how == "goes on" and number == 1:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

@app.on_startup
async def start():
    tasks.extend(asyncio.create_task(background(number)) for number in (1, 2))

@app.job("leaves")
async def leaves():
    tasks.append(asyncio.create_task(background(3)))
    await asyncio.sleep(0)

@app.on_shutdown
async def end():
    assert not any(task.done() for task in tasks)
    note("end", 1)
"""


@pytest.mark.parametrize("how", ["ends", "exits", "interrupts", "goes on"])
def test_tasks_that_hooks_and_handlers_left_on_the_loop_clean_up_at_the_end(
    db, workers, how
) -> None:
    (workers.folder / "leaves.py").write_text(LEAVES)
    enqueue(db, "leaves")
    worker = workers.start("--app", "leaves", "--burst", env={"HOW": how})
    assert worker.wait(20) == 0
    assert outcomes(db) == {"completed": 1}
    assert workers.notes("end") == {1: 1}
    assert workers.notes("cleaned") == {1: 1, 2: 1, 3: 1}
    assert "destroyed" not in workers.log()


def test_a_worker_that_has_failed_says_so_before_its_hooks_and_is_not_healthy(
    db, workers
) -> None:
    enqueue(db, "late_thread")
    file = workers.folder / "health"
    options = ("-c", "1", "--shutdown-timeout", "3", "--health-file", str(file))
    worker = workers.start(*APP, *options, env={"IN_HOOKS": "hang at end"})
    wait_until(lambda: workers.notes("end")[-1])
    assert "has failed: handlers that do not end" in workers.log()
    last = file.stat().st_mtime
    assert worker.wait(20) == 1
    assert file.stat().st_mtime == last
    assert workers.log().count("has failed") == 1


def test_the_log_has_the_exception_of_a_failed_attempt(db, workers) -> None:
    failed, dead = enqueue(db, "sync", "ValueError"), enqueue(db, "async", "Reject")
    late = enqueue(db, "late")
    worker = workers.start(*APP, "--burst", "--log-format", "json")
    assert worker.wait(30) == 0
    lines = [json.loads(line) for line in workers.log().splitlines()]
    of = {line["job_id"]: line for line in lines if "job_id" in line}
    for job, level, kind, error in (
        (failed, "warning", "sync", "ValueError: plain"),
        (dead, "error", "async", "pgqueue.policy.Reject: never"),
    ):
        line = of[job]
        assert (line["level"], line["kind"], line["queue"]) == (level, kind, QUEUE)
        assert line["attempt"] == 1 and line["token"] and line["ms"] >= 0
        assert line["error"].startswith("Traceback (most recent call last):\n")
        assert line["error"].endswith(f"{error}\n")
        assert "in act" in line["error"]
    assert "TimeoutError: timed out after 0.5 seconds" in of[late]["message"]
    assert "ms" in of[late]
