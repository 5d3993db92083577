"""The recipes of the pages about Python, run as written; Django's are in test_django."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import documents
import pgqueue
import psycopg
import pytest
from conftest import column, one
from projects import PACKAGE, Project
from recipes import blocks, sections
from worker_harness import wait_until

ENDS = "select kind, outcome, result from pgqueue.run order by finished_at"


class Recipe(Project):
    """A folder with the modules of a recipe, on the test's database."""

    def __init__(self, folder: Path, dbname: str) -> None:
        env = {"PGDATABASE": dbname, "PYTHONPATH": f"{folder}:{PACKAGE}"}
        super().__init__(folder, **env)
        self.write("jobs.py", blocks("Reference: Python")[0])

    def say(self, *args: str, **env: str) -> str:
        """Run Python, and return what it says."""
        return self.run(*args, **env).stdout

    def work(self, app: str, queue: str = "default") -> str:
        """Run what is due with a worker, and return what the handlers say."""
        worker = ("-m", "pgqueue.worker", "--burst", "--app", app)
        return self.say(*worker, "--queue", queue)


@pytest.fixture
def project(db, tmp_path) -> Iterator[Recipe]:
    project = Recipe(tmp_path, db.info.dbname)
    yield project
    project.end()


def ends(db) -> list[tuple[str, str]]:
    return [row[:2] for row in db.execute(ENDS)]


def test_every_section_with_python_is_tested() -> None:
    with_python = [title for title in sections() if blocks(title)]
    assert with_python == [
        "Reference: Python",
        "Enqueue on your connection",
        "Arguments",
        "Several modules",
        "Wait for a job",
        "FastAPI",
        "Alembic",
        "Coming from Celery",
        "A batch with a callback",
        "Around every attempt",
        "Tracing",
        "The dashboard",  # in test_dashboard
        "In Python",
        "Testing your jobs",
    ]


def test_the_package_page_installs_the_sql_and_runs_the_worker(db, project) -> None:
    db.execute("drop extension pgqueue")
    page = documents.text("python/README.md")
    install, worker = (block.text for block in documents.blocks(page, "sh"))
    _, command = (shlex.split(line, comments=True) for line in install.splitlines())
    assert "created the extension" in project.say(*command[1:])
    assert "already installed" in project.say(*command[1:])
    jobs, enqueue = (block.text for block in documents.blocks(page, "python"))
    project.write("jobs.py", jobs)
    project.write("main.py", enqueue)
    project.say("main.py")
    assert "hello ada" in project.say(*shlex.split(worker)[1:], "--burst")
    assert ends(db) == [("greet", "completed")]


def test_the_worker_of_the_reference_takes_the_queues_of_its_handlers(
    db, project
) -> None:
    (command,) = re.findall(r"`python (.*?)`", sections()["Reference: Python"])
    pgqueue.enqueue(db, "emails", {"to": "ada"}, kind="welcome")
    assert "hello ada" in project.say(*shlex.split(command), "--burst")
    assert ends(db) == [("welcome", "completed")]


def test_jobs_are_enqueued_in_the_transaction_of_any_connection(db, project) -> None:
    db.execute("create table person (name text unique)")
    own, others = blocks("Enqueue on your connection")
    project.write("own.py", own)
    project.write("others.py", others)
    project.write("main.py", CALLS)
    project.say("main.py")
    waiting = "select payload ->> 'to' from pgqueue.job order by id"
    assert column(db, waiting) == [
        "ada",
        "bob",
        "SQLAlchemy",
        "psycopg",
        "async SQLAlchemy",
        "asyncpg",
    ]
    assert (
        one(db, "select state from pgqueue.jobs where unique_key = 'bob'")
        == "scheduled"
    )
    assert column(db, "select name from person") == ["ada"]
    assert "hello async SQLAlchemy" in project.work("jobs", "emails")


CALLS = """
import asyncio, asyncpg, others, own, psycopg
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

with psycopg.connect() as conn:
    assert own.sign_up(conn, "ada") > 0
    try:
        own.sign_up(conn, "ada")
    except psycopg.errors.UniqueViolation:
        pass  # and no second job
    own.remind(conn, "bob")
with Session(create_engine("postgresql+psycopg://")) as session:
    others.with_sqlalchemy(session)

async def main():
    async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
        await others.with_psycopg(conn)
    engine = create_async_engine("postgresql+psycopg://")
    async with AsyncSession(engine) as session:
        await others.with_async_sqlalchemy(session)
    await engine.dispose()
    conn = await asyncpg.connect()
    await others.with_asyncpg(conn)
    await conn.close()

asyncio.run(main())
"""


def test_the_handlers_of_several_modules_run_in_one_worker(db, project) -> None:
    (block,) = blocks("Several modules")
    project.write("several.py", block)
    for queue, kind in ("orders", "ship"), ("bills", "bill"):
        pgqueue.enqueue(db, queue, {"order": 1}, kind=kind)
    worker = ("-m", "pgqueue.worker", "--burst", "--app")
    project.say(*worker, "several:shop,several:billing")
    assert sorted(ends(db)) == [("bill", "completed"), ("ship", "completed")]
    pgqueue.enqueue(db, "orders", {"order": 2}, kind="ship")
    project.say(*worker, "several")
    assert len(ends(db)) == 3


def test_the_end_of_a_job_is_waited_for(db, project) -> None:
    (block,) = blocks("Wait for a job")
    project.write("asks.py", block)
    main = (
        "import asks, psycopg\nwith psycopg.connect() as conn: print(asks.greet(conn))"
    )
    project.write("main.py", main)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(project.say, "main.py")
        wait_until(lambda: one(db, "select count(*) from pgqueue.job"))
        project.work("jobs", "emails")
        assert asking.result(20) == "True\n"


def test_a_handler_gets_arguments_of_the_types_it_is_annotated_with(
    db, project
) -> None:
    (block,) = blocks("Arguments")
    project.write("shop.py", block)
    project.write("main.py", ORDERS)
    project.say("main.py")
    project.work("shop")
    assert db.execute(
        "select kind, outcome from pgqueue.run order by job_id"
    ).fetchall() == [
        ("invoice", "completed"),
        ("refund", "completed"),
        ("invoice", "retry"),
    ]
    results = "select result from pgqueue.run order by job_id limit 2"
    assert column(db, results) == [
        "3.50",
        "00000000-0000-0000-0000-000000000007 on 24.12.2026 in KRONA: tea",
    ]
    assert "validation error" in one(db, "select errors::text from pgqueue.job")


ORDERS = """
import psycopg, pgqueue, shop
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

number, when = UUID(int=7), datetime(2026, 12, 24, tzinfo=UTC)
items = [shop.Item(name="tea", price="1.50"), shop.Item(name="milk", price=2)]
with psycopg.connect() as conn:
    shop.invoice.enqueue(conn, shop.Order(number=number, placed_at=when, items=items))
    shop.refund.enqueue(conn, number, when, how=shop.Currency.KRONA, items=items)
    pgqueue.enqueue(conn, "default", {"number": "seven"}, kind="invoice")
"""


def test_without_pydantic_a_worker_runs_plain_handlers_and_refuses_others(
    db, project
) -> None:
    hide = "import sys; sys.modules['pydantic'] = sys.modules['pydantic_core'] = None"
    project.write("sitecustomize.py", hide)
    pgqueue.enqueue(db, "emails", {"to": "ada"}, kind="welcome")
    assert project.work("jobs", "emails") == "hello ada\n"
    project.write("dated.py", DATED)
    with pytest.raises(AssertionError, match=r"TypeError: .*needs pydantic"):
        project.work("dated")


DATED = """
from datetime import datetime
import pgqueue

app = pgqueue.App()

@app.job("dated")
def dated(when: datetime) -> None: ...
"""


def test_a_worker_runs_in_the_lifespan_of_a_fastapi_app(db, project) -> None:
    (block,) = blocks("FastAPI")
    project.write("web.py", block)
    project.write("main.py", REQUEST)
    assert project.say("main.py").split() == ["hello", "ada", "200"]
    assert ends(db) == [("welcome", "completed")]


REQUEST = """
import asyncio, psycopg, web

async def request(path):
    sent = []
    async def receive():
        return {"type": "http.request", "body": b""}
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    await web.api(scope, receive, send)
    return sent[0]["status"]

async def main():
    async with web.api.router.lifespan_context(web.api):
        status = await request("/people/ada")
        async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
            while not await (await conn.execute("select 1 from pgqueue.run")).fetchone():
                await asyncio.sleep(0.05)
    print(status)

asyncio.run(asyncio.wait_for(main(), 60))
"""


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_an_alembic_migration_installs_the_sql(db, project, engine) -> None:
    db.execute("drop extension pgqueue")
    (block,) = blocks("Alembic")
    project.write("alembic.ini", "[alembic]", "script_location = migrations")
    project.write("migrations/env.py", ALEMBIC, ENGINES[engine])
    project.write("migrations/script.py.mako")
    project.write("migrations/versions/1_install.py", block)
    for command in ("upgrade", "head"), ("downgrade", "base"), ("upgrade", "head"):
        project.say("-m", "alembic", *command)
        job = pgqueue.enqueue(db, "q")
        assert column(db, "select id from pgqueue.claim('q', 'w')") == [job]
    assert column(db, "select version_num from alembic_version") == ["1"]


ALEMBIC = """
import asyncio
from alembic import context
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

def run(conn):
    context.configure(connection=conn)
    with context.begin_transaction():
        context.run_migrations()

async def run_async():
    async with create_async_engine("postgresql+psycopg://").connect() as conn:
        await conn.run_sync(run)
"""
ENGINES = {  # as in Alembic's templates `generic` and `async`
    "sync": 'with create_engine("postgresql+psycopg://").connect() as conn: run(conn)',
    "async": "asyncio.run(run_async())",
}


def test_the_celery_recipe_ends_each_job_as_it_says(db, project) -> None:
    (block,) = blocks("Coming from Celery")
    project.write("bank.py", block)
    project.say("-c", "import bank, psycopg; bank.delay(psycopg.connect(autocommit=1))")
    worker = project.start("-m", "pgqueue.worker", "--app", "bank")
    wait_until(lambda: len(ends(db)) == 5)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(40) == 0
    assert sorted(ends(db)) == [
        ("charge", "completed"),
        ("charge", "dead"),
        ("charge", "retry"),
        ("charge", "retry"),
        ("receipt", "completed"),
    ]
    error = one(db, "select error from pgqueue.dead_job")
    assert error.startswith("ValueError: no such account")


def test_a_callback_finds_what_its_batch_has_done_and_sees_what_is_missing(
    db, project
) -> None:
    db.execute("create table rendered (batch_id bigint, page int)")
    project.write("book.py", blocks("A batch with a callback")[0])
    main = """
        import book, psycopg
        with psycopg.connect() as conn:
            book.publish(conn, "ada", [1, 2, 3])
            book.publish(conn, "bob", [1, 0])
    """
    project.write("main.py", textwrap.dedent(main))
    project.say("main.py")
    project.say("-m", "pgqueue.worker", "--burst", "--app", "book")
    sent = "select outcome, result, error from pgqueue.run where kind = 'send' order by job_id"
    assert sorted(db.execute(sent)) == [
        ("completed", "pages [1, 2, 3] to ada", None),
        ("dead", None, "Reject: some pages are missing"),
    ]


def test_errors_go_to_sentry_and_planned_retries_do_not(db, project) -> None:
    project.write("watched.py", blocks("Around every attempt")[0], WATCHED)
    for kind in ("fails", "again"):
        pgqueue.enqueue(db, "default", kind=kind)
    said = project.work("watched").splitlines()
    (job,) = column(db, "select job_id from pgqueue.run where kind = 'fails'")
    assert said == [f"ZeroDivisionError fails {job}"]
    assert sorted(ends(db)) == [("again", "retry"), ("fails", "retry")]


WATCHED = """
def say(event, hint):
    tags = event["tags"]
    error = event["exception"]["values"][-1]["type"]
    print(error, tags["pgqueue.kind"], tags["pgqueue.job"])

sentry_sdk.init(before_send=say, dsn="http://key@localhost/1")

@app.job("fails")
def fails() -> None:
    raise ZeroDivisionError

@app.job("again")
async def again() -> None:
    raise pgqueue.Retry(after=60)
"""


def test_a_trace_continues_in_the_handler(db, project) -> None:
    (python,) = blocks("Tracing")
    project.write("shop.py", python)
    main = "import psycopg, shop\nwith psycopg.connect() as c: shop.check_out(c, 7)"
    project.write("main.py", main)
    (request,) = spans(project.say("main.py"))
    label, attempt = spans(project.work("shop"))
    names = [span["name"] for span in (request, attempt, label)]
    assert names == ["check out", "process default", "print the label"]
    above = [span["parent_id"] for span in (attempt, label)]
    assert above == [span["context"]["span_id"] for span in (request, attempt)]

    told = documents.table(sections()["Tracing"], "of the span `process QUEUE`")
    named = {name for row in told for name in documents.quoted(row[0])}
    assert named - {"error.type", "exception", "ERROR"} == set(attempt["attributes"])


def test_a_job_of_sql_is_in_the_trace_that_its_headers_name(db, project) -> None:
    text = sections()["Tracing"]
    project.write("shop.py", *blocks("Tracing"))
    (sql,) = documents.blocks(text, "sql")
    documents.run_sql(sql, db.info.dbname)
    _, attempt = spans(project.work("shop"))
    assert attempt["parent_id"] == "0x00f067aa0ba902b7"
    assert attempt["context"]["trace_id"][2:] in sql.text


def spans(said: str) -> list[dict[str, Any]]:
    """Read the spans that a program says, one JSON object after the other."""
    found = []
    while said := said.strip():
        span, end = json.JSONDecoder().raw_decode(said)
        found.append(span)
        said = said[end:]
    return found


def test_the_metrics_come_into_the_folder_and_stay_when_nobody_answers(
    db, project
) -> None:
    (block,) = blocks("Monitoring", "sh")
    python = Path(sys.executable).parent
    env = project.env | {"PATH": f"{python}:{os.environ['PATH']}"}
    recipe = block.replace("/var/lib/node_exporter", str(project.folder))
    pgqueue.enqueue(db, "emails")
    for more, code in ({}, 0), ({"PGHOST": "/nowhere"}, 1):
        ran = subprocess.run(["sh", "-c", recipe], env=env | more)
        assert ran.returncode == code
        text = (project.folder / "pgqueue.prom").read_text()
        assert 'pgqueue_jobs{queue="emails",state="ready"} 1\n' in text


def test_handlers_recur_by_their_schedules(db, project) -> None:
    (block,) = blocks("In Python")
    assert 'cron="30 2 * * mon-fri"' in block
    project.write("recurring.py", block.replace("30 2 * * mon-fri", "* * * * * *"))
    worker = project.start("-m", "pgqueue.worker", "--app", "recurring")
    wait_until(lambda: len(ends(db)) >= 2, timeout=60)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(40) == 0
    assert set(ends(db)) == {("report", "completed")}
    assert db.execute(
        "select name, cron, every, timezone, catch_up, jitter from pgqueue.schedules"
    ).fetchall() == [
        ("report", "* * * * * *", None, "Europe/Berlin", "one", None),
        ("sweep", None, timedelta(minutes=10), "UTC", "skip", timedelta(minutes=1)),
    ]


def test_the_tests_of_the_page_pass_beside_jobs_of_others(db, dsn, project) -> None:
    (block,) = blocks("Testing your jobs")
    project.write("test_jobs.py", block)
    with psycopg.connect(dsn) as stranger:  # the tests must not run its job
        pgqueue.enqueue(stranger, "emails", kind="unheard of")
    tests = ("-m", "pytest", "-p", "no:cacheprovider", "test_jobs.py")
    assert "2 passed" in project.say(*tests, PGQUEUE_TEST_DSN=dsn)
    assert column(db, "select kind from pgqueue.job") == ["unheard of"]
