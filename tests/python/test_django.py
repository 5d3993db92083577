"""Django: the project of docs/django.md, with manage.py and the ORM, as real processes."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import django
import documents
import pgqueue
import psycopg
import pytest
from conftest import column, one
from projects import PACKAGE, Project
from test_apps import INCLUDES
from worker_harness import wait_until

PAGE = documents.text("docs/django.md")
BLOCKS = [block.text for block in documents.blocks(PAGE, "python")]
MANAGE = """
import os, sys
from django.core.management import execute_from_command_line
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
execute_from_command_line(sys.argv)
"""
SETTINGS = """
import json, os
DATABASES = {"default": {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ["NAME"],
    "HOST": os.environ["PGHOST"],
    **json.loads(os.environ.get("MORE", "{}")),
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
"""
MODELS = """
from django.db import models

class Order(models.Model):
    is_confirmed = models.BooleanField(default=False)
    is_shipped = models.BooleanField(default=False)
    is_packed = models.BooleanField(default=False)
"""
ORDERS = """
from django.db import migrations, models

class Migration(migrations.Migration):
    initial = True
    operations = [migrations.CreateModel("Order", [
        ("id", models.BigAutoField(primary_key=True, serialize=False)),
        ("is_confirmed", models.BooleanField(default=False)),
        ("is_shipped", models.BooleanField(default=False)),
        ("is_packed", models.BooleanField(default=False)),
    ])]
"""


class Site(Project):
    """A Django project, on the test's database."""

    program = ("-m", "manage")

    def __init__(self, folder: Path, dbname: str) -> None:
        # Only Django's settings name the database of the test.
        env = {"PGDATABASE": "template1", "NAME": dbname, "PYTHONPATH": str(PACKAGE)}
        super().__init__(folder, **env)
        installed, migration, tasks, jobs, tests = BLOCKS
        if django.VERSION < (6,):  # there it is a package of its own
            tasks = tasks.replace("django.tasks", "django_tasks")
        for name, *texts in (
            ("manage.py", MANAGE),
            ("settings.py", SETTINGS, installed),
            ("shop/__init__.py",),
            ("shop/models.py", MODELS),
            ("shop/migrations/__init__.py",),
            ("shop/migrations/0001_initial.py", ORDERS),
            ("shop/migrations/0002_pgqueue.py", migration),
            ("shop/tasks.py", tasks),
            ("shop/jobs.py", jobs),
            ("shop/tests.py", tests),
        ):
            self.write(name, *texts)

    def manage(self, *args: str, **env: str) -> str:
        done = self.run(*args, **env)
        return done.stdout + done.stderr


@pytest.fixture
def site(db, tmp_path) -> Iterator[Site]:
    site = Site(tmp_path, db.info.dbname)
    yield site
    site.end()


@pytest.fixture
def migrated(db, site) -> Site:
    db.execute("drop extension pgqueue")
    site.manage("migrate")
    return site


def outcomes(db) -> list[str]:
    return column(db, "select outcome from pgqueue.run order by finished_at")


def test_a_migration_installs_the_sql_once(db, migrated) -> None:
    assert one(db, "select pgqueue.version()") is not None
    migrated.manage("migrate", "shop", "0001")
    migrated.manage("migrate")
    pgqueue.enqueue(db, "q")


def test_the_worker_runs_handlers_that_use_the_orm(db, migrated) -> None:
    migrated.manage("shell", "-c", "from shop import jobs; jobs.place()")
    assert column(db, "select kind from pgqueue.job order by id") == ["confirm", "ship"]
    args = ("--app", "shop.jobs", "--queue", "orders")
    migrated.manage("pgqueue_worker", *args, "--burst")
    order = db.execute("select is_confirmed, is_shipped from shop_order").fetchall()
    assert order == [(True, True)]
    assert outcomes(db) == ["completed", "completed"]


def test_a_job_is_rolled_back_with_the_transaction_of_django(db, migrated) -> None:
    code = """
from django.db import connection, transaction
from shop import jobs
try:
    with transaction.atomic():
        jobs.place()
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
with transaction.atomic():
    try:
        with transaction.atomic():
            jobs.confirm.enqueue(connection, order=1)
            raise ZeroDivisionError
    except ZeroDivisionError:
        jobs.confirm.enqueue(connection, order=2)
"""
    migrated.manage("shell", "-c", code)
    assert column(db, "select payload from pgqueue.job") == [{"order": 2}]
    assert one(db, "select count(*) from shop_order") == 0


def test_a_django_test_case_runs_jobs_in_its_transaction(site) -> None:
    site.write("shop/tests.py", BLOCKS[4], MORE_TESTS)
    said = site.manage("test", "-v", "2")
    assert "Ran 6 tests" in said
    assert "Applying shop.0002_pgqueue" in said


MORE_TESTS = """
from asgiref.sync import sync_to_async
from django.db import IntegrityError
from django.test import TransactionTestCase
from pgqueue.testing import enqueued

class MoreTest(TestCase):
    def test_jobs_of_another_test_are_rolled_back(self):
        self.assertEqual(enqueued(connection), [])

    def test_a_handler_that_breaks_the_transaction_fails_only_its_job(self):
        app = jobs.pgqueue.App()

        @app.job("twice")
        def twice() -> None:
            jobs.Order.objects.create(pk=1)
            jobs.Order.objects.create(pk=1)

        twice.enqueue(connection)
        (ran,) = drain(connection, app, raises=False)
        self.assertEqual(ran.outcome, "retry")
        self.assertEqual(jobs.Order.objects.count(), 0)
        twice.enqueue(connection)
        with self.assertRaises(IntegrityError):
            drain(connection, app)
        self.assertEqual(jobs.Order.objects.count(), 0)

    def test_enqueued_returns_payloads_and_times_as_python_values(self):
        soon = jobs.confirm.with_options(run_at=jobs.timedelta(hours=1))
        soon.enqueue(connection, order=7)
        (job,) = enqueued(connection, "orders")
        self.assertEqual(job.payload, {"order": 7})
        self.assertIsNotNone(job.run_at.tzinfo)

    async def test_drain_works_in_an_async_test(self):
        order = await sync_to_async(jobs.place)()
        ran = await sync_to_async(drain)(connection, jobs.app)
        assert [r.outcome for r in ran] == ["completed"] * 2
        await order.arefresh_from_db()
        self.assertTrue(order.is_confirmed and order.is_shipped)

class CommittedTest(TransactionTestCase):
    def test_drain_runs_committed_jobs_only_when_told_to(self):
        jobs.place()
        with self.assertRaises(ValueError):
            drain(connection, jobs.app)
        self.assertEqual(len(drain(connection, jobs.app, committed=True)), 2)

jobs.timedelta = __import__("datetime").timedelta
"""


# Killed sessions

HUNTED = """
import asyncio
import pgqueue
from asgiref.sync import sync_to_async
from django.db import connection

app = pgqueue.App()

def query(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]

def work(number):
    query("insert into session values (pg_backend_pid()) returning pid")
    if number == 1:
        query("select 1 from pg_sleep(600)")
    return query("select pg_backend_pid()")

@app.job("sync", retry_base=0.01)
def sync(job: pgqueue.Job) -> int:
    return work(job.payload["number"] if job.attempt == 1 else 0)

@app.job("async", retry_base=0.01)
async def asynchronous(job: pgqueue.Job) -> int:
    return await sync_to_async(work)(job.payload["number"] if job.attempt == 1 else 0)

@app.job("pair")
async def pair() -> None:
    await sync_to_async(query)("insert into session values (pg_backend_pid()) returning pid")
    async with asyncio.timeout(60):
        while await sync_to_async(query)("select count(*) from session") < 2:
            await asyncio.sleep(0.01)
"""
PERSISTENT = '{"CONN_MAX_AGE": null}'
CHECKED = '{"CONN_MAX_AGE": null, "CONN_HEALTH_CHECKS": true}'
SESSIONS = (
    "select count(*) from pg_stat_activity where pid in (select pid from session)"
)


@pytest.fixture
def hunted(db, site) -> Site:
    db.execute("create table session (pid int)")
    site.write("hunted.py", HUNTED)
    return site


def kill_sessions(db) -> int:
    """Terminate the sessions of handlers, and return how many there were."""
    query = (
        "select count(*) filter (where pg_terminate_backend(pid, 10000)) from session"
    )
    return one(db, query)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("more", ["{}", PERSISTENT])
def test_a_killed_session_fails_only_its_own_attempt(db, hunted, kind, more) -> None:
    ids = [pgqueue.enqueue(db, "q", {"number": n}, kind=kind) for n in range(1, 11)]
    args = ("--app", "hunted", "--queue", "q", "--concurrency", "1")
    hunted.start("pgqueue_worker", *args, MORE=more)
    wait_until(lambda: one(db, "select count(*) from session") == 1)
    assert kill_sessions(db) == 1
    wait_until(lambda: one(db, "select not exists (select from pgqueue.job)"))
    failed = column(db, "select job_id from pgqueue.run where outcome = 'retry'")
    assert failed == ids[:1]
    assert outcomes(db).count("completed") == 10


@pytest.mark.parametrize(("more", "burnt"), [("{}", 0), (PERSISTENT, 1), (CHECKED, 0)])
def test_a_session_killed_between_jobs_fails_one_attempt_at_most(
    db, hunted, more, burnt
) -> None:
    args = ("--app", "hunted", "--queue", "q", "--concurrency", "1")
    hunted.start("pgqueue_worker", *args, MORE=more)
    for count in (1, 10):
        pgqueue.enqueue_many(db, "q", [{"number": 0}] * count, kind="sync")
        wait_until(lambda: one(db, "select not exists (select from pgqueue.job)"))
        kill_sessions(db)
    assert outcomes(db).count("retry") == burnt
    assert outcomes(db).count("completed") == 11


def test_async_attempts_share_no_connection_and_leave_none_open(db, hunted) -> None:
    pgqueue.enqueue_many(db, "q", [None] * 2, kind="pair")
    args = ("--app", "hunted", "--queue", "q")
    hunted.start("pgqueue_worker", *args, MORE=PERSISTENT)
    wait_until(lambda: outcomes(db) == ["completed"] * 2)
    assert len(set(column(db, "select pid from session"))) == 2
    wait_until(lambda: one(db, SESSIONS) == 0)


# The command


def test_the_worker_command_connects_as_the_django_settings_say(
    db, site, tmp_path
) -> None:
    name = db.info.dbname
    assert site.manage("pgqueue_worker", "--check").startswith("ok: ")
    (tmp_path / "services").write_text(f"[shop]\ndbname={name}\n")
    service = {"PGSERVICEFILE": str(tmp_path / "services"), "NAME": ""}
    more = '{"OPTIONS": {"service": "shop"}}'
    assert "ok: " in site.manage("pgqueue_worker", "--check", MORE=more, **service)
    more = '{"OPTIONS": {"sslmode": "require"}, "HOST": "127.0.0.1"}'
    refused = site.try_to("pgqueue_worker", "--check", MORE=more)
    assert refused.returncode == 1
    assert "SSL" in refused.stdout
    more = '{"USER": "nobody here"}'
    refused = site.try_to("pgqueue_worker", "--check", MORE=more)
    assert '"nobody here"' in refused.stdout
    refused = site.try_to("pgqueue_worker", "--check", "--dsn", "dbname=template1")
    assert refused.returncode == 3


def test_the_worker_command_assumes_the_role_of_the_django_settings(
    db, site, role
) -> None:
    db.execute('create role "pgqueue\\ role"')
    try:
        db.execute("select pgqueue.grant_access('pgqueue\\ role', 'worker')")
        # In this order: since Postgres 16 it counts when the role is granted.
        db.execute(f'alter role {role} noinherit; grant "pgqueue\\ role" to {role}')
        options = {"assume_role": "pgqueue\\ role", "options": "-c jit=off"}
        settings = {"USER": role, "OPTIONS": options}
        check = ("pgqueue_worker", "--check")
        assert "ok: " in site.manage(*check, MORE=json.dumps(settings))
        assert site.try_to(*check, MORE=f'{{"USER": "{role}"}}').returncode == 1
    finally:
        db.execute('drop owned by "pgqueue\\ role"; drop role "pgqueue\\ role"')


def test_the_worker_command_can_use_another_database_of_the_settings(db, site) -> None:
    site.write("others.py", "from settings import *", OTHERS)
    say = ("pgqueue_worker", "--check", "--settings", "others", "--database")
    assert site.try_to(*say[:-1]).returncode == 3
    assert "ok: " in site.manage(*say, "queue")
    for wrong, why in (("none", "no database"), ("lite", "not PostgreSQL")):
        refused = site.try_to(*say, wrong)
        assert (refused.returncode, why in refused.stderr) == (2, True)


OTHERS = """
DATABASES["queue"] = DATABASES["default"]
DATABASES["default"] = {**DATABASES["queue"], "NAME": "template1"}
DATABASES["lite"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
"""


def test_the_worker_command_takes_options_of_django_and_of_the_worker(db, site) -> None:
    elsewhere = site.folder / "elsewhere"
    site.write("elsewhere/others.py", "from settings import *")
    more = ("--settings=others", f"--pythonpath={elsewhere}", "--check")
    assert "ok: " in site.manage("pgqueue_worker", *more)
    shown = site.manage("pgqueue_worker", "--help")
    assert "--concurrency" in shown
    assert "--database" in shown
    assert "--concurrency" in site.manage("help", "pgqueue_worker")
    assert site.manage("pgqueue_worker", "--version").strip()
    refused = site.try_to("pgqueue_worker", "--app", "shop.jobs", "--no-such-option")
    assert refused.returncode == 2
    assert "pgqueue_worker" in site.manage("help")


BILLING = """
import pgqueue
from shop.jobs import app as shop

app = pgqueue.App()

@app.job("bill", queue="bills")
def bill() -> None: ...
"""


def test_an_app_that_is_found_with_those_that_it_includes_has_its_middleware(
    db, site
) -> None:
    site.manage("migrate")
    # The module of the outer one begins with the inner one.
    site.write("outer/__init__.py")
    site.write("outer/jobs.py", INCLUDES.replace("shop", "shop.jobs", 1))
    site.write("more.py", "from settings import *", 'INSTALLED_APPS += ["outer"]')
    pgqueue.enqueue(db, "orders", {"order": 1}, kind="confirm")
    said = site.manage("pgqueue_worker", "--burst", "--settings", "more")
    assert outcomes(db) == ["completed"]
    assert "around confirm" in said


NOTHING = """
INSTALLED_APPS.remove("shop")
del TASKS
"""


def test_without_app_the_worker_command_finds_the_jobs_of_installed_apps(
    db, site
) -> None:
    site.manage("migrate")
    site.write("billing/__init__.py")
    site.write("billing/jobs.py", BILLING)
    site.write("more.py", "from settings import *", 'INSTALLED_APPS += ["billing"]')
    pgqueue.enqueue(db, "orders", {"order": 1}, kind="confirm")
    pgqueue.enqueue(db, "bills", kind="bill")
    said = site.manage("pgqueue_worker", "--burst", "--settings", "more")
    assert " works on default, orders, bills (those of its handlers), " in said
    assert outcomes(db) == ["completed"] * 2
    site.write("billing/jobs.py", BILLING, "1 / 0")
    broken = site.try_to("pgqueue_worker", "--burst", "--settings", "more")
    assert broken.returncode == 2
    assert 'billing/jobs.py"' in broken.stderr
    if django.VERSION < (6,):  # which always has tasks
        site.write("none.py", "from settings import *", NOTHING)
        none = site.try_to("pgqueue_worker", "--burst", "--settings", "none")
        assert (none.returncode, "use --app" in none.stderr) == (2, True)


def test_the_commands_of_pgqueue_connect_as_the_django_settings_say(db, site) -> None:
    (job,) = site.manage("pgqueue", "enqueue", "orders", '{"order": 1}').split()
    assert "orders" in site.manage("pgqueue", "status")
    assert "ready: next" in site.manage("pgqueue", "why", job)
    assert "redrive" in site.manage("pgqueue", "--help")
    assert site.try_to("pgqueue", "--dsn", "dbname=template1", "status").returncode == 3
    password = json.dumps({"PASSWORD": "Xk3!w9;", "PORT": db.info.port})
    assert site.manage("pgqueue", "why", job, MORE=password).startswith("ready: next")


def test_the_worker_command_starts_and_stops_several_processes(db, hunted) -> None:
    args = ("--app", "hunted", "--queue", "q", "--processes", "2")
    worker = hunted.start("pgqueue_worker", *args)
    pgqueue.enqueue_many(db, "q", [{"number": 0}] * 10, kind="sync")
    wait_until(lambda: outcomes(db) == ["completed"] * 10)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(40) == 0


WAITS = """
from django.db import connection, transaction
import pgqueue
from shop.jobs import confirm

job = confirm.enqueue(connection, order=1)
status = pgqueue.wait(connection, job, timeout=30)
print(status.state, pgqueue.status(connection, job).state, connection.in_atomic_block)
with transaction.atomic():
    job = confirm.enqueue(connection, order=1)
    try:
        pgqueue.wait(connection, job)
    except ValueError as error:
        print(error)
"""


def test_one_can_wait_on_the_connection_of_django(db, site) -> None:
    site.manage("migrate")
    site.start("pgqueue_worker")
    said = site.manage("shell", "-c", WAITS)
    assert "completed completed False" in said
    assert "transaction: end it first" in said


def test_django_uses_psycopg_3(db, site) -> None:
    code = "from django.db import connection as c; c.ensure_connection(); print(type(c.connection))"
    assert f"{psycopg.__name__}.Connection" in site.manage("shell", "-c", code)
