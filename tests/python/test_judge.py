"""What comes of a handler, whatever it raises or returns, as `drain` runs it."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import pgqueue
import pydantic
import pytest
from conftest import one
from pgqueue.testing import Ran, drain

KEY = UUID(int=7)


@dataclass
class Filter:
    limit: int = 10


class Whole(pydantic.BaseModel, extra="forbid"):
    half: int

    @pydantic.computed_field
    @property
    def twice(self) -> int:
        return self.half * 4


@pytest.fixture
def app() -> pgqueue.App:
    return pgqueue.App()


@pytest.fixture
def ran(db, app):
    def ran(task: pgqueue.Task, *args) -> Ran:
        with db.transaction(force_rollback=True):
            task.enqueue(db, *args)
            (ran,) = drain(db, app, raises=False, max_jobs=1)
        return ran

    return ran


def summary(ran: Ran) -> str:
    return (ran.error or "").partition("\n")[0]


def grouped(*errors: Exception) -> ExceptionGroup:
    return ExceptionGroup("outer", [ExceptionGroup("of tasks", errors)])


def test_a_group_with_one_error_in_it_counts_as_that_error(ran, app) -> None:
    @app.job("group", retry_for=(ConnectionError,))
    async def group(what: str) -> None:
        errors = {
            "reject": pgqueue.Reject("never"),
            "snooze": pgqueue.Snooze(60),
            "retry": pgqueue.Retry(60, "busy"),
            "down": ConnectionError("down"),
            "bad": ValueError("bad"),
        }

        async def fail() -> None:
            raise errors[what]

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    outcomes = {
        what: ran(group, what) for what in "reject snooze retry down bad".split()
    }
    assert {what: (each.outcome, summary(each)) for what, each in outcomes.items()} == {
        "reject": ("dead", "Reject: never"),
        "snooze": ("released", ""),
        "retry": ("retry", "Retry: busy"),
        "down": ("retry", "ConnectionError: down"),
        "bad": ("dead", "ValueError: bad"),
    }


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        ([ConnectionError(), TimeoutError()], "retry"),
        ([ConnectionError(), ValueError()], "dead"),
        ([ConnectionError(), pgqueue.Reject()], "dead"),
        ([ConnectionError(), ConnectionAbortedError()], "dead"),
        ([pgqueue.Retry(), pgqueue.Retry()], "retry"),
        ([pgqueue.Retry(), ValueError()], "dead"),
    ],
)
def test_a_group_is_retried_if_each_error_in_it_is(ran, app, errors, outcome) -> None:
    @app.job("group", retry_for=(OSError,), give_up_on=(ConnectionAbortedError,))
    def group() -> None:
        raise grouped(*errors)

    assert ran(group).outcome == outcome


def test_a_policy_may_name_groups(ran, app) -> None:
    def fail() -> None:
        raise grouped(ValueError(), KeyError())

    finals = app.job("final", give_up_on=(ExceptionGroup,))(fail)
    tried = app.job("tried", retry_for=(ExceptionGroup,))(fail)
    assert (ran(finals).outcome, ran(tried).outcome) == ("dead", "retry")


def test_a_stop_iteration_is_judged_as_what_it_is(ran, app) -> None:
    @app.job("stop", give_up_on=(StopIteration,))
    def stop() -> None:
        next(iter([]))

    stopped = ran(stop)
    assert (stopped.outcome, summary(stopped)) == ("dead", "StopIteration")


def test_a_retry_that_should_have_been_already_is_at_once(ran, app) -> None:
    @app.job("negative")
    def negative() -> None:
        raise pgqueue.Retry(after=-60, reason="reset a moment ago")

    @app.job("last", max_attempts=1)
    def last() -> None:
        raise pgqueue.Retry(after=-60, reason="too late")

    first, only = ran(negative), ran(last)
    assert (first.outcome, summary(first)) == ("retry", "Retry: reset a moment ago")
    assert (only.outcome, summary(only)) == ("dead", "Retry: too late")


def test_an_async_handler_that_returns_after_its_timeout_has_failed(db, app) -> None:
    @app.job("late", timeout=0.2, transaction=True)
    async def late(job: pgqueue.Job) -> str:
        await job.connection.execute("insert into written values (1)")
        time.sleep(0.3)
        return "late"

    db.execute("create table written (n int)")
    with db.transaction():
        late.enqueue(db)
        (attempt,) = drain(db, app, raises=False)
    assert summary(attempt) == "TimeoutError: timed out after 0.2 seconds"
    assert one(db, "select count(*) from written") == 0


def test_a_generator_is_refused_before_it_runs(ran, app) -> None:
    has_run = []

    @app.job("generator")
    def generator() -> Iterator[str]:
        has_run.append(True)
        yield "a"

    text = "TypeError: the handler returned a generator, which has not run"
    assert summary(ran(generator)) == text
    assert not has_run


def test_drain_completes_a_job_whose_result_cannot_be_stored(db, app) -> None:
    @app.job("unstorable")
    def unstorable() -> object:
        return object()

    with db.transaction():
        unstorable.enqueue(db)
        (attempt,) = drain(db, app)
    assert attempt.outcome == "completed"
    assert "cannot be stored as JSON" in attempt.result["not_stored"]


def test_a_model_gets_none_and_its_default_as_any_parameter_does(ran, app) -> None:
    @app.job("maybe")
    def maybe(job: pgqueue.Job, filter: Filter | None = None) -> str:
        return repr(filter)

    @app.job("default")
    def default(filter: Filter = Filter(500)) -> int:  # noqa: B008
        return filter.limit

    assert ran(maybe).result == ran(maybe, None).result == "None"
    assert ran(maybe, Filter()).result == "Filter(limit=10)"
    assert (ran(default).result, ran(default, Filter(7)).result) == (500, 7)


def test_keys_and_models_are_read_back_as_they_were(ran, app) -> None:
    @app.job("keys")
    def keys(counts: dict[UUID, int]) -> dict[date, int]:
        return {date(2026, 1, day): counts[KEY] for day in (1, 2)}

    @app.job("whole")
    def whole(whole: Whole) -> int:
        return whole.twice

    assert ran(keys, {KEY: 3}).result == {"2026-01-01": 3, "2026-01-02": 3}
    assert ran(whole, Whole(half=2)).result == 8


def test_keys_that_json_cannot_have_are_refused(db) -> None:
    with pytest.raises(ValueError, match="payload cannot be stored as JSON"):
        pgqueue.enqueue(db, "q", {object(): 1})


@pytest.mark.parametrize(
    "option",
    [
        {"unique_key": 7},
        {"group_key": KEY},
        {"kind": 1},
        {"unique_key": "k", "unique_for": 60},
    ],
)
def test_an_option_of_another_type_is_refused_before_it_is_sent(db, option) -> None:
    with db.transaction():
        with pytest.raises(TypeError, match="must be a"):
            pgqueue.enqueue(db, "q", **option)
        assert pgqueue.enqueue(db, "q", run_at=datetime.now(UTC) + timedelta(1)) > 0


@pytest.mark.parametrize("size", [172, 180, 191, 192, 200])
@pytest.mark.parametrize("timeout", [None, 60])
def test_an_event_may_have_any_name_that_emit_takes(db, app, size, timeout) -> None:
    event = ("é" * 100)[: size // 2]

    @app.job("waits")
    def waits(job: pgqueue.Job) -> list[object]:
        return [job.wait_for(event, timeout), job.wait_for(event, timeout)]

    with db.transaction():
        waits.enqueue(db)
        (first,) = drain(db, app)
        assert first.outcome == "suspended"
        pgqueue.emit(db, event, 7)
        (second,) = drain(db, app)
    assert second.result == [7, 7]
