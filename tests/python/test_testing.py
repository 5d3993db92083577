"""What pgqueue.testing gives to the tests of applications."""

from datetime import timedelta

import pgqueue
import psycopg
import pytest
from conftest import column, one
from pgqueue.testing import assert_enqueued, drain, enqueued

pytest_plugins = ["pgqueue.testing"]

app = pgqueue.App()


@app.job("welcome")
def welcome(to: str) -> str:
    return f"hello {to}"


@app.job("sign up", transaction=True)
def sign_up(job: pgqueue.Job, to: str) -> None:
    job.connection.execute("create temp table signed_up as select 1")
    pgqueue.enqueue(job.connection, "default", {"to": to}, kind="welcome")


@app.job("later")
async def later(job: pgqueue.Job) -> int:
    if job.attempt == 1 and not job.payload.get("now"):
        raise pgqueue.Snooze(timedelta(hours=1))
    return job.attempt


@app.job("broken")
def broken() -> None:
    raise ZeroDivisionError("as it must")


def test_drain_runs_what_is_due_and_what_that_enqueues(dsn, db) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue(conn, "default", {"to": "ada"}, kind="sign up")
        pgqueue.enqueue(conn, "default", {"to": "bob"}, kind="welcome", priority=-1)
        pgqueue.enqueue(conn, "other", {"now": True}, kind="later")
        ran = drain(conn, app, ["default", "other"])
        assert [(r.job.kind, r.outcome, r.result) for r in ran] == [
            ("sign up", "completed", None),
            ("welcome", "completed", "hello ada"),
            ("welcome", "completed", "hello bob"),
            ("later", "completed", 1),
        ]
        assert enqueued(conn) == []
        conn.rollback()
    assert column(db, "select id from pgqueue.job") == []
    assert one(db, "select count(*) from pgqueue.run") == 0


def test_drain_raises_or_fails_as_a_worker_would(dsn) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue(conn, "default", kind="broken")
        with pytest.raises(ZeroDivisionError):
            drain(conn, app)
        conn.rollback()
        pgqueue.enqueue(conn, "default", kind="broken")
        pgqueue.enqueue(conn, "default", kind="later")
        failed, put_off = drain(conn, app, raises=False)
        assert (failed.outcome, put_off.outcome) == ("retry", "released")
        assert "as it must" in failed.error
        assert drain(conn, app) == []
        conn.rollback()


def test_assertions_on_what_was_enqueued(dsn) -> None:
    with psycopg.connect(dsn) as conn:
        ids = pgqueue.enqueue_many(
            conn, "emails", [{"to": "ada", "n": 1}, {"to": "bob"}]
        )
        (job,) = assert_enqueued(conn, "emails", payload={"to": "ada"})
        assert (job.id, job.payload["n"], job.kind) == (ids[0], 1, "emails")
        assert_enqueued(conn, kind="emails", count=2)
        assert_enqueued(conn, "other", count=0)
        for wrong in ({"queue": "other"}, {"count": 3}, {"payload": {"to": "eve"}}):
            with pytest.raises(AssertionError):
                assert_enqueued(conn, **wrong)
        conn.rollback()


@pytest.fixture
def _here(dsn, monkeypatch) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", dsn)


def test_the_fixture_gives_a_connection(_here, pgqueue_conn) -> None:
    pgqueue.enqueue(pgqueue_conn, "emails")
    assert_enqueued(pgqueue_conn, "emails", count=1)
