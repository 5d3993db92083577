"""Enqueueing on the connection of any driver: a rollback undoes the enqueue."""

import asyncio
import contextlib
import copy
import dataclasses
import enum
import functools
import math
import os
import pickle
import re
import subprocess
import sys
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any

import pgqueue
import psycopg
import pydantic
import pytest
from conftest import column, one, url
from pgqueue import database
from pgqueue.results import NotCompleted, Result
from pgqueue.worker.deadline import NoAnswer
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row, scalar_row

JOBS = "select count(*) from pgqueue.job"


def address(db: psycopg.Connection) -> dict[str, object]:
    info = db.info
    return {
        "host": info.host,
        "port": info.port,
        "user": info.user,
        "dbname": info.dbname,
    }


@pytest.mark.parametrize("factory", [None, dict_row, scalar_row])
def test_jobs_are_enqueued_in_the_transaction_of_a_psycopg_connection_or_cursor(
    db, dsn, factory
) -> None:
    options = {"row_factory": factory} if factory else {}
    with psycopg.connect(dsn, **options) as conn:
        for target in (conn, conn.cursor(), conn.cursor("named")):
            job = pgqueue.enqueue(target, "emails", {"to": "ada"})
            assert isinstance(job, int)
            assert pgqueue.enqueue_many(target, "emails", [1, 2]) == [job + 1, job + 2]
        conn.rollback()
        assert one(db, JOBS) == 0
        pgqueue.enqueue(conn, "emails")
        conn.commit()
        assert one(db, JOBS) == 1


@pytest.mark.parametrize("what", ["engine", "dsn", "manager"])
def test_what_is_no_connection_is_named(db, what) -> None:
    import sqlalchemy

    wrong = {
        "engine": sqlalchemy.create_engine(url(db, "psycopg")),
        "dsn": f"dbname={db.info.dbname}",
        "manager": contextlib.closing(db),  # as a pool returns one
    }[what]
    with pytest.raises(TypeError, match="neither a connection nor a cursor"):
        pgqueue.enqueue(wrong, "q")
    with pytest.raises(TypeError, match="not a connection on psycopg 3: "):
        pgqueue.wait(wrong, 1)


def test_a_raw_cursor_names_its_parameters_by_number(db, dsn) -> None:
    with psycopg.connect(dsn, cursor_factory=psycopg.RawCursor) as conn:
        job = pgqueue.enqueue(conn, "emails", {"to": "ada"}, priority=3)
    assert pgqueue.status(db, job).priority == 3


def test_a_cursor_keeps_the_rows_it_was_reading(dsn) -> None:
    with psycopg.connect(dsn) as conn, conn.cursor() as cursor:
        cursor.execute("select generate_series(1, 3)")
        assert cursor.fetchone() == (1,)
        pgqueue.enqueue(cursor, "emails")
        assert cursor.fetchall() == [(2,), (3,)]


def test_jobs_are_enqueued_in_the_transaction_of_an_async_psycopg_connection(
    db, dsn
) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            for target in (conn, conn.cursor()):
                job = await pgqueue.enqueue(target, "emails", {"to": "ada"})
                assert await pgqueue.enqueue_many(target, "emails", [1, 2]) == [
                    job + 1,
                    job + 2,
                ]
            await conn.rollback()
            assert one(db, JOBS) == 0
            await pgqueue.enqueue(conn, "emails")

    asyncio.run(run())
    assert one(db, JOBS) == 1


def test_jobs_are_enqueued_in_the_transaction_of_a_psycopg2_connection(db) -> None:
    import psycopg2
    from psycopg2 import extras

    conn = psycopg2.connect(**address(db))
    try:
        for target in (
            conn,
            conn.cursor(),
            conn.cursor(cursor_factory=extras.RealDictCursor),
            conn.cursor(cursor_factory=extras.NamedTupleCursor),
        ):
            job = pgqueue.enqueue(target, "emails", {"to": "ada"}, headers={"a": 1})
            assert pgqueue.enqueue_many(
                target, "emails", [1, 2], unique_keys=[None, None]
            ) == [
                job + 1,
                job + 2,
            ]
            assert pgqueue.enqueue_many(target, "emails", []) == []
        conn.rollback()
        assert one(db, JOBS) == 0
        pgqueue.enqueue(conn, "emails", run_at=datetime.now(UTC))
        conn.commit()
        assert one(db, JOBS) == 1
    finally:
        conn.close()


def test_jobs_are_enqueued_in_the_transaction_of_a_django_connection(db) -> None:
    import django
    from django.conf import settings

    where = {key.upper(): str(value) for key, value in address(db).items()}
    where["NAME"] = where.pop("DBNAME")
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **where}}
    )
    django.setup()
    from django.db import connection, transaction

    try:
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            with connection.cursor() as cursor:
                job = pgqueue.enqueue(cursor, "emails", {"to": "ada"})
                assert pgqueue.enqueue_many(cursor, "emails", [1, 2]) == [
                    job + 1,
                    job + 2,
                ]
            pgqueue.enqueue(connection, "emails")
            raise ZeroDivisionError
        assert one(db, JOBS) == 0
        with transaction.atomic(), connection.cursor() as cursor:
            pgqueue.enqueue(cursor, "emails")
        assert one(db, JOBS) == 1
    finally:
        connection.close()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_jobs_are_enqueued_in_the_transaction_of_sqlalchemy(db, driver) -> None:
    import sqlalchemy as alchemy
    from sqlalchemy import orm

    engine = alchemy.create_engine(url(db, driver))
    try:
        with engine.connect() as conn, orm.Session(engine) as session:
            for target in (conn, session):
                job = pgqueue.enqueue(target, "emails", {"to": "50 % of ada"})
                assert pgqueue.enqueue_many(target, "emails", [1, 2]) == [
                    job + 1,
                    job + 2,
                ]
                target.rollback()
                assert one(db, JOBS) == 0
            pgqueue.enqueue(session, "emails")
            session.commit()
            assert one(db, JOBS) == 1
    finally:
        engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_jobs_are_enqueued_in_the_transaction_of_async_sqlalchemy(db, driver) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def run() -> None:
        engine = create_async_engine(url(db, driver))
        async with engine.connect() as conn, AsyncSession(engine) as session:
            assert await conn.run_sync(pgqueue.enqueue, "emails", {"to": "ada"}) > 0
            for target in (conn, session):
                job = await pgqueue.enqueue(
                    target, "emails", {"a": 1}, headers={"b": 2}
                )
                many = pgqueue.enqueue_many(
                    target, "emails", [1, 2], unique_keys=["a", None]
                )
                assert await many == [job + 1, job + 2]
                await target.rollback()
                assert one(db, JOBS) == 0
        await engine.dispose()

    asyncio.run(run())
    assert one(db, JOBS) == 0


def test_jobs_are_enqueued_on_an_asyncpg_connection(db) -> None:
    import asyncpg

    where = address(db)

    async def run() -> None:
        conn = await asyncpg.connect(
            host=where["host"],
            port=where["port"],
            user=where["user"],
            database=where["dbname"],
        )
        try:
            when = datetime(2030, 1, 2, tzinfo=UTC)
            job = await pgqueue.enqueue(
                conn, "emails", {"to": "50 %s"}, run_at=when, priority=3
            )
            many = pgqueue.enqueue_many(
                conn, "emails", [1, None], group_keys=["a", None]
            )
            assert await many == [job + 1, job + 2]
            hour = timedelta(hours=1)
            once = pgqueue.enqueue(conn, "q", 2, unique_key="w", unique_for=hour)
            assert await once == job + 3
            await pgqueue.enqueue(conn, "q", 3, after=[job, job + 1], if_dead="run")
            batch = await pgqueue.create_batch(conn, "done", {"a": 1}, priority=2)
            await pgqueue.enqueue(conn, "q", 4, batch_id=batch)
            await pgqueue.close_batch(conn, batch)
        finally:
            await conn.close()

    asyncio.run(run())
    assert column(db, "select payload from pgqueue.job order by id") == [
        {"to": "50 %s"},
        1,
        {},
        2,
        3,
        4,
    ]
    assert one(db, "select count(*) from pgqueue.dependency") == 2


def test_a_batch_of_jobs_has_its_callback(db) -> None:
    batch = pgqueue.create_batch(
        db, "done", {"a": 1}, kind="k", headers={"t": 1}, group_key="g"
    )
    pgqueue.enqueue_many(db, "q", [1, 2], batch_id=batch)
    pgqueue.enqueue(db, "q", 3, batch_id=batch)
    pgqueue.close_batch(db, batch)
    db.execute("select pgqueue.complete(id, token) from pgqueue.claim('q', 'w', 9)")
    payload = one(db, "select payload from pgqueue.job where kind = 'k'")
    assert payload["batch"] == {"id": batch, "completed": 3, "dead": 0, "cancelled": 0}
    assert one(db, "select group_key from pgqueue.job where kind = 'k'") == "g"
    with pytest.raises(pgqueue.JobNotFound):
        pgqueue.close_batch(db, 0)
    with pytest.raises(TypeError):
        pgqueue.create_batch(db, "done", unique_key="u")


def test_every_option_of_enqueue_reaches_the_job(db) -> None:
    when = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    options = {
        "kind": "welcome",
        "priority": 7,
        "run_at": when,
        "max_attempts": 3,
        "group_key": "g",
        "headers": {"trace": "x"},
    }
    names = "kind, priority, run_at, max_attempts, group_key, headers"
    first = pgqueue.enqueue(db, "emails", {"a": 1}, unique_key="u", **options)
    query = f"select {names}, unique_key, payload from pgqueue.job where id = %s"
    row = db.execute(query, (first,)).fetchone()
    assert row == (*options.values(), "u", {"a": 1})
    again = pgqueue.enqueue(
        db, "emails", {"a": 2}, unique_key="u", on_duplicate="replace"
    )
    assert again == first
    assert one(db, "select payload from pgqueue.job where id = %s", first) == {"a": 2}
    hour = timedelta(hours=1)
    brief = pgqueue.enqueue(db, "emails", expires_at=when)
    (briefer,) = pgqueue.enqueue_many(db, "emails", [1], expires_at=hour)
    end = "select expires_at, expires_at - enqueued_at from pgqueue.jobs where id = %s"
    assert db.execute(end, (brief,)).fetchone()[0] == when
    assert abs(db.execute(end, (briefer,)).fetchone()[1] - hour) < hour / 60
    once = pgqueue.enqueue(db, "emails", unique_key="w", unique_for=hour)
    window = (
        "select expires_at - enqueued_at from pgqueue.job"
        " join pgqueue.recent_key on job_id = id where id = %s"
    )
    assert one(db, window, once) == hour
    del options["group_key"]
    ids = pgqueue.enqueue_many(
        db,
        "emails",
        [1, None],
        unique_keys=["v", None],
        group_keys=["g", None],
        **options,
    )
    rows = db.execute(
        "select payload, group_key from pgqueue.job where id = any(%s)", (ids,)
    )
    assert set(map(str, rows)) == {"(1, 'g')", "({}, None)"}
    with pytest.raises(psycopg.errors.UniqueViolation):
        pgqueue.enqueue(db, "emails", unique_key="v", on_duplicate="error")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        pgqueue.enqueue(db, "")


@dataclass
class Person:
    name: str


class Model(pydantic.BaseModel):
    mode: str = "json"


def test_any_json_payload_is_stored_unchanged(db) -> None:
    deep: list = []
    for _ in range(500):
        deep = [deep]
    for value in (
        {"ü": "\U0001f600 \\u0000 \\ud800 %s"},
        [1.5, True, None, 2**70, -1e-300],
        "text",
        0,
        deep,
        OrderedDict(a=1),
        {"a": (1, 2)},
    ):
        job = pgqueue.enqueue(db, "emails", value)
        found = one(db, "select payload from pgqueue.job where id = %s", job)
        assert found == ({"a": [1, 2]} if value == {"a": (1, 2)} else value)
        [job] = pgqueue.enqueue_many(db, "emails", [value])
        assert one(db, "select payload from pgqueue.job where id = %s", job) == found
    job = pgqueue.enqueue(db, "emails", {"who": Person("ada"), "model": Model()})
    found = one(db, "select payload from pgqueue.job where id = %s", job)
    assert found == {"who": {"name": "ada"}, "model": {"mode": "json"}}


def test_enqueue_many_stores_any_key_unchanged(db) -> None:
    keys = [
        "a b",
        " ",
        '"',
        "\\",
        '\\"',
        "{",
        "}",
        ",",
        "NULL",
        "null",
        "%s",
        "ü\n\t",
        None,
    ]
    pgqueue.enqueue_many(
        db, "emails", [None] * len(keys), unique_keys=keys, group_keys=keys
    )
    query = "select {} from pgqueue.job order by id"
    assert column(db, query.format("unique_key")) == keys
    assert column(db, query.format("group_key")) == keys
    with pytest.raises(TypeError, match="a key must be a str or None, not int"):
        pgqueue.enqueue_many(db, "emails", [None], unique_keys=[5])
    with pytest.raises(psycopg.DataError):
        pgqueue.enqueue_many(db, "emails", [None], unique_keys=["\0"])
    with pytest.raises(ValueError, match="a key is None or not empty: group_keys"):
        pgqueue.enqueue_many(db, "emails", [None], group_keys=[""])
    with pytest.raises(TypeError, match="payloads must be a list, not str"):
        pgqueue.enqueue_many(db, "q", "hello")
    with pytest.raises(TypeError, match="unique_keys takes a key for each payload"):
        pgqueue.enqueue_many(db, "emails", [None] * 2, unique_keys="ab")
    with pytest.raises(TypeError, match="after takes the ids of jobs"):
        pgqueue.enqueue(db, "emails", after="12")  # not the jobs 1 and 2


def test_a_key_is_null_also_where_arrays_have_no_null(db) -> None:
    db.execute("set array_nulls = off")
    keys = [None, "a", None, "NULL"]
    options = {"unique_keys": keys, "group_keys": iter(keys)}
    assert len(set(pgqueue.enqueue_many(db, "emails", [None] * 4, **options))) == 4
    query = "select unique_key, group_key from pgqueue.job order by id"
    assert db.execute(query).fetchall() == list(zip(keys, keys, strict=True))


CIRCLE: list = []
CIRCLE.append(CIRCLE)
BOTTOMLESS: list = []
for _ in range(100_000):
    BOTTOMLESS = [BOTTOMLESS]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": [1, {"b": math.nan}]}, "not JSON compliant"),
        ([math.inf], "not JSON compliant"),
        ({(1, 2): 3}, "keys must be str"),
        (CIRCLE, "Circular"),
        (BOTTOMLESS, "too deep"),
        ({"a": object()}, "serialize unknown type"),
        ({"a": "x\0"}, "Unicode"),
        ({"\0": 1}, "Unicode"),
        (["\ud83d"], "surrogate"),
    ],
)
def test_a_payload_that_is_no_json_is_refused_and_nothing_is_enqueued(
    db, value, why
) -> None:
    for enqueue in (pgqueue.enqueue, pgqueue.enqueue_many):
        with pytest.raises((ValueError, TypeError, psycopg.DataError), match=why):
            enqueue(db, "emails", value if enqueue is pgqueue.enqueue else [1, value])
    assert one(db, JOBS) == 0


class Colour(enum.Enum):
    RED = "red"


def test_values_that_json_does_not_have_are_encoded_by_pydantic(db) -> None:
    key = uuid.UUID(int=7)
    payload = {
        "when": datetime(2026, 12, 24, tzinfo=UTC),
        "key": key,
        "price": Decimal("1.10"),
        "colour": Colour.RED,
        "path": Path("x"),
    }
    job = pgqueue.enqueue(db, "emails", payload)
    assert one(db, "select payload from pgqueue.job where id = %s", job) == {
        "when": "2026-12-24T00:00:00Z",
        "key": str(key),
        "price": "1.10",
        "colour": "red",
        "path": "x",
    }


@pytest.mark.parametrize("version", ["none", "1"])
def test_without_pydantic_2_a_type_that_needs_it_raises_a_type_error(version) -> None:
    code = """
import sys, types
is_old = sys.argv[1] == "1"
sys.modules["pydantic"] = types.ModuleType("pydantic") if is_old else None
sys.modules["pydantic_core"] = None
import dataclasses, datetime, pgqueue
app = pgqueue.App()

@dataclasses.dataclass
class Plain:
    to: str
    n: int | None = None

@dataclasses.dataclass
class Nested:
    inner: Plain

@app.job("plain")
def plain(it: Plain): ...

@app.job("parts")
def parts(many: list[dict[str, int | None]], rest: dict | list | None = None): ...

assert plain.arguments.read({"to": "ada"}) == {"it": Plain("ada")}
for bad in (
    Nested, datetime.datetime, Plain | None, list[Plain], dict[str, datetime.date] | None
):
    def handler(value): ...
    handler.__annotations__["value"] = bad
    try:
        app.job(str(bad))(handler)
    except TypeError as error:
        assert "needs pydantic" in str(error), error
    else:
        raise AssertionError(bad)
from pgqueue.payload import to_json
assert to_json(Plain("ada"), "payload") == '{"to": "ada", "n": null}'
try:
    to_json({"at": datetime.datetime.now()}, "payload")
except TypeError as error:
    assert "pydantic" in str(error)
"""
    path = str(Path(__file__).resolve().parents[2] / "python")
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, version], env=env, check=True)


@dataclasses.dataclass
class Parcel:
    to: Person
    weight: Decimal


def test_group_and_headers_of_a_handler_are_those_of_its_jobs_and_its_schedule(db):
    app = pgqueue.App()

    @app.job("sync", every=3600, group_key="acme", headers={"team": "blue"})
    def sync() -> None: ...

    sync.declare(db)
    schedule = db.execute("select group_key, headers from pgqueue.schedules").fetchone()
    sync.enqueue(db)
    sync.with_options(group_key="other", headers={}).enqueue(db)
    assert [
        schedule,
        *db.execute("select group_key, headers from pgqueue.job order by id"),
    ] == [
        ("acme", {"team": "blue"}),
        ("acme", {"team": "blue"}),
        ("other", {}),
    ]


def test_a_task_enqueues_only_the_arguments_its_handler_takes(db) -> None:
    app = pgqueue.App()

    @app.job("welcome", queue="emails", max_attempts=5)
    def welcome(to: str, at: datetime | None = None, job: object = None) -> str:
        return f"{to} {at:%Y}"

    @app.job("ship", queue="parcels")
    def ship(parcel: Parcel) -> str:
        return parcel.to.name

    when = datetime(2026, 12, 24, tzinfo=UTC)
    first = welcome.enqueue(db, to="ada", at=when)
    options = welcome.with_options(priority=7, unique_key="u", queue="other")
    second = options.enqueue(db, "bob")
    third = ship.enqueue(db, Parcel(Person("eve"), Decimal("1.5")))
    rows = db.execute(
        "select id, queue, kind, priority, max_attempts, unique_key, payload from pgqueue.job"
        " order by id"
    ).fetchall()
    assert rows == [
        (
            first,
            "emails",
            "welcome",
            0,
            5,
            None,
            {"to": "ada", "at": "2026-12-24T00:00:00Z"},
        ),
        (second, "other", "welcome", 7, 5, "u", {"to": "bob"}),
        (
            third,
            "parcels",
            "ship",
            0,
            20,
            None,
            {"to": {"name": "eve"}, "weight": "1.5"},
        ),
    ]
    assert welcome.arguments.read(rows[0][6])["at"] == when
    assert ship.arguments.read(rows[2][6]) == {
        "parcel": Parcel(Person("eve"), Decimal("1.5"))
    }
    assert welcome("ada", when) == "ada 2026"
    for args, kwargs in (((), {}), ((), {"too": 1}), (("a", None, "b"), {})):
        with pytest.raises(TypeError):
            welcome.enqueue(db, *args, **kwargs)
    assert one(db, JOBS) == 3


def test_what_an_annotation_demands_is_checked(db) -> None:
    app = pgqueue.App()

    @app.job("positive")
    def positive(n: Annotated[int, pydantic.Field(gt=0)], when: datetime) -> None: ...

    @app.job("parcel")
    def parcel(parcel: Annotated[Parcel, "to ship"]) -> None: ...

    when = "2026-12-24T00:00:00Z"
    assert positive.arguments.read({"n": 5, "when": when})["when"].year == 2026
    with pytest.raises(ValueError, match="greater than 0"):
        positive.arguments.read({"n": -5, "when": when})
    read = parcel.arguments.read({"to": {"name": "eve"}, "weight": "1.5"})
    assert read == {"parcel": Parcel(Person("eve"), Decimal("1.5"))}


def test_any_beside_other_annotations_takes_what_comes() -> None:
    app = pgqueue.App()

    @app.job("any")
    def handler(it: Any, when: datetime, *, text: "Any" = 1, **rest: Any) -> None: ...

    when = "2026-12-24T00:00:00Z"
    read = handler.arguments.read({"it": [1, "2"], "when": when, "more": None})
    assert read == {
        "it": [1, "2"],
        "when": datetime(2026, 12, 24, tzinfo=UTC),
        "text": 1,
        "more": None,
    }


def test_an_annotation_that_is_only_for_type_checkers_is_refused_where_it_counts(
    db, dsn
) -> None:
    app, namespace = pgqueue.App(), {"pgqueue": pgqueue}
    exec(
        "def fine(job: 'Missing', when: 'datetime') -> 'Missing': ...\n"
        "def later(what: 'Later') -> None: ...\n"
        "from datetime import datetime\n",
        namespace,
    )
    fine, later = (
        app.job("fine")(namespace["fine"]),
        app.job("later")(namespace["later"]),
    )
    read = fine.arguments.read({"when": "2026-12-24T00:00:00Z"})
    assert read["when"] == datetime(2026, 12, 24, tzinfo=UTC)
    for use in (
        lambda: later.enqueue(db, what=1),
        lambda: later.arguments.read({"what": 1}),
        lambda: pgqueue.Worker(app, {"q": 1}, dsn=dsn),
    ):
        with pytest.raises(TypeError, match="'Later' is not defined"):
            use()
    namespace["Later"] = int
    assert later.arguments.read({"what": "1"}) == {"what": 1}


class Callable:
    def __call__(self, to: str) -> None: ...


def named(to: str) -> None: ...


def gets_positional(to: str, /) -> None: ...


def gets_any(*to: str) -> None: ...


@pytest.mark.parametrize(
    "function",
    [Callable(), Callable, functools.partial(named), gets_positional, gets_any],
)
def test_what_cannot_be_a_handler_is_refused_where_it_is_defined(function) -> None:
    with pytest.raises(TypeError, match=r"a handler is a function|has no name for"):
        pgqueue.App().job("x")(function)


@pytest.mark.parametrize(
    "policy", [{"timeout": -1}, {"timeout": 0}, {"max_attempts": 0}]
)
def test_limits_that_are_not_positive_are_refused(policy) -> None:
    with pytest.raises(ValueError, match="must be"):
        pgqueue.App().job("x", **policy)
    if "timeout" in policy:
        with pytest.raises(ValueError, match="must be"):
            pgqueue.App(**policy)


@pytest.mark.parametrize("option", ["run_at", "expires_at"])
def test_a_moment_without_a_time_zone_is_refused(db, option) -> None:
    with pytest.raises(ValueError, match=f"{option} must have a time zone"):
        pgqueue.enqueue(db, "q", **{option: datetime(2026, 12, 24)})


def test_pq001_and_pq002_have_exception_classes(db) -> None:
    with pytest.raises(pgqueue.JobNotFound) as caught:
        db.execute("select pgqueue.cancel(0)")
    assert caught.value.sqlstate == "PQ001"
    with pytest.raises(pgqueue.LeaseLost) as caught:
        db.execute("select pgqueue.complete(0, 0)")
    assert isinstance(caught.value, psycopg.DatabaseError)
    assert column(db, "select id from pgqueue.job") == []


class Limited(pgqueue.Retry):
    def __init__(self, header: dict[str, int]) -> None:
        super().__init__(header["retry-after"], reason="too many requests")


@pytest.mark.parametrize(
    "error",
    [
        pgqueue.Retry(after=5, reason="busy"),
        Limited({"retry-after": 5}),
        pgqueue.Snooze(timedelta(hours=1)),
        pgqueue.Snooze(datetime(2026, 12, 24, tzinfo=UTC)),
        pgqueue.Reject("never"),
        NotCompleted([Result(7, "ship", "dead", None)]),
        NoAnswer(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_out_of_another_process_as_it_was_raised(error) -> None:
    error.add_note("of a child")
    copies = [pickle.loads(pickle.dumps(error, n)) for n in range(6)]
    for again in *copies, copy.copy(error), copy.deepcopy(error):
        assert type(again) is type(error)
        assert (again.args, vars(again)) == (error.args, vars(error))


def test_the_dsn_comes_from_the_argument_then_pgqueue_dsn_then_database_url(
    monkeypatch,
) -> None:
    from pgqueue.database import PATIENCE, conninfo

    for name in (
        "PGQUEUE_DSN",
        "DATABASE_URL",
        "PGHOST",
        "PGCONNECT_TIMEOUT",
        "PGAPPNAME",
    ):
        monkeypatch.delenv(name, raising=False)

    def host(dsn: str | None, **environ: str) -> object:
        return conninfo_to_dict(conninfo(dsn, environ)).get("host")

    both = {"PGQUEUE_DSN": "host=b", "DATABASE_URL": "postgres://c/d"}
    assert host("host=a", **both) == "a"
    assert host(None, **both) == "b"
    assert host(None, DATABASE_URL="postgres://c/d") == "c"
    assert host("postgresql+psycopg://e/f") == "e"
    assert host(None) is None
    plain = conninfo_to_dict(conninfo("host=a", {}))
    assert {k: str(v) for k, v in PATIENCE.items()}.items() <= plain.items()
    mine = conninfo_to_dict(
        conninfo("host=a,b tcp_user_timeout=7", {"PGCONNECT_TIMEOUT": "3"})
    )
    assert mine["tcp_user_timeout"] == "7"
    assert "connect_timeout" not in mine
    assert mine["target_session_attrs"] == "read-write"
    addresses = conninfo_to_dict(conninfo("hostaddr=10.0.0.1,10.0.0.2", {}))
    assert addresses["target_session_attrs"] == "read-write"
    theirs = conninfo(None, {"PGHOST": "a,b", "PGTARGETSESSIONATTRS": "any"})
    assert "target_session_attrs" not in conninfo_to_dict(theirs)
    with pytest.raises(psycopg.ProgrammingError):
        conninfo("no such thing", {})
    for scheme in "mysql", "postgis", "sqlite+aiosqlite":
        with pytest.raises(
            psycopg.ProgrammingError, match=f"not {re.escape(scheme)}://"
        ) as refused:
            conninfo(f"{scheme}://me:secret@host/db", {})
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("postgres//u:s3cret@h/db", "in connection info string"),
        ("host=h password=my s3cret", "in connection info string"),
        ("postgresql://u:s3cret%@h/db", "invalid percent-encoded token"),
        ("postgresql://u:s3cret@[h/db", "looking for matching"),
        ("postgresql://u:p@h/db?password=a&s3cret", "missing key/value separator ="),
        ("host=h password=s3cret sslmod=x", 'connection option "sslmod"'),
        ("postgresql://u:s3cret@h/db?sslmod=x", 'query parameter: "sslmod"'),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_password(dsn, said):
    with pytest.raises(psycopg.ProgrammingError) as refused:
        database.conninfo(dsn, {})
    assert said in str(refused.value)
    assert "s3cret" not in "".join(format_exception(refused.value))
