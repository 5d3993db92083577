"""Django's tasks, with pgqueue as their backend: on Django 6, or before it on django-tasks."""

import importlib.util
import re
import signal
from collections.abc import Iterator

import django
import pgqueue
import psycopg
import pytest
from conftest import column, database, one
from test_django import Site, outcomes
from worker_harness import wait_until

LIBRARY = "django.tasks" if django.VERSION >= (6,) else "django_tasks"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(LIBRARY) is None,
    reason="neither Django 6, which needs Python 3.12, nor django-tasks is there",
)

MORE_SETTINGS = f"""
INSTALLED_APPS += {["django_tasks"] if LIBRARY == "django_tasks" else []}
TASKS["default"]["QUEUES"] = ["default", "other"]
TASKS["short"] = {{
    "BACKEND": "pgqueue.django.PgQueueBackend", "QUEUES": [], "OPTIONS": {{"max_attempts": 1}},
}}
TASKS["dummy"] = {{"BACKEND": "{LIBRARY}.backends.dummy.DummyBackend"}}
LOGGING = {{
    "version": 1,
    "handlers": {{"console": {{"class": "logging.StreamHandler"}}}},
    "loggers": {{"{LIBRARY}": {{"handlers": ["console"], "level": "DEBUG"}}}},
}}
"""
# Not in a module `tasks`: it is found by its path.
TOOLS = f"""
import asyncio, logging, threading
import pgqueue
from {LIBRARY} import task
from shop.models import Order

class Refused(Exception):
    class Why(Exception):
        pass

@task
def add(*args, **kwargs):
    return [sum(args), kwargs]

@task
async def aadd(*args, **kwargs):
    await asyncio.sleep(0)
    return [sum(args), kwargs, await Order.objects.acount()]

@task(takes_context=True)
def tell(context, word):
    result = context.task_result
    return [word, context.attempt, result.id, result.status, len(result.worker_ids), result.args]

@task(takes_context=True)
def look(context):
    result = context.task_result
    result.refresh()
    return [result.backend, result.task.backend, result.task.queue_name, result.status]

@task(backend="dummy", takes_context=True)
def look_elsewhere(context):
    return look.func(context)

@task
def fail(kind="ValueError"):
    raise {{
        "ValueError": ValueError("wrong:\\nValueError and more"),
        "SystemExit": SystemExit("it ends"),
        "Refused": Refused("no"),
        "Why": Refused.Why(),
        "Reject": pgqueue.Reject("not now"),
    }}[kind]

@task
async def afail():
    raise Refused("async")

@task(takes_context=True)
def second(context):
    if context.attempt == 1:
        raise pgqueue.Retry(after=0)
    return context.attempt

@task(takes_context=True)
def snooze(context):
    raise pgqueue.Snooze(3600)

@task
def group(kind):
    raise ExceptionGroup("of one", [pgqueue.Reject("no") if kind == "Reject" else pgqueue.Snooze(100)])

@task
def many(kind):
    return {{"generator": (n for n in [1]), "coroutine": aadd.func()}}[kind]

class Overrun(logging.Handler):
    # A worker says when an attempt goes on after its timeout.
    seen = threading.Event()

    def emit(self, record):
        if "timed out" in record.getMessage():
            self.seen.set()

logging.getLogger("pgqueue").addHandler(Overrun())

@task
def overruns():
    Overrun.seen.wait(60)
    return "late"

@task
async def aoverruns():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "late"

@task(backend="dummy")
def elsewhere():
    return "here"

@task
def odd():
    return object()

def plain():
    pass
"""
LAZY = """
from django.utils.functional import SimpleLazyObject
lazy = SimpleLazyObject(lambda: 1 / 0)
"""
# The behaviour that Django's own tests expect of a backend.
CASES = f"""
import contextlib, dataclasses, pickle, sys
from datetime import datetime, timedelta
from unittest import mock
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase, override_settings
from django.utils import timezone
import pgqueue
from pgqueue.attempt import Outcome
from {LIBRARY} import TaskResultStatus as S, default_task_backend, task, task_backends
from {LIBRARY}.exceptions import TaskException, TaskResultDoesNotExist, TaskResultMismatch
from pgqueue.django import PgQueueBackend
from pgqueue.django.worker import app
from pgqueue.testing import drain, enqueued
from shop import tasks, tools

WITH_OTHER = {{
    "default": {{"BACKEND": "pgqueue.django.PgQueueBackend", "QUEUES": ["elsewhere"]}},
}}

def run(**options):
    return drain(connection, app, raises=False, **options)

def states(logs):
    said = [line.partition("state=")[2] for line in logs.output if "state=" in line]
    return [line.split()[0].rpartition(".")[2] for line in said]

class BackendTest(TestCase):
    def test_it_is_the_backend_that_is_set(self):
        self.assertEqual(default_task_backend, task_backends["default"])
        self.assertIsInstance(task_backends["default"], PgQueueBackend)
        for able in ("defer", "async_task", "get_result", "priority"):
            self.assertTrue(getattr(default_task_backend, "supports_" + able))

    def test_a_task_is_enqueued_run_and_its_result_found(self):
        for one, value in ((tools.add, [3, {{"two": 3}}]), (tools.aadd, [3, {{"two": 3}}, 0])):
            result = one.enqueue(1, 2, two=3)
            self.assertEqual(result.status, S.READY)
            self.assertFalse(result.is_finished)
            self.assertIsNone(result.started_at)
            self.assertEqual(result.attempts, 0)
            with self.assertRaisesMessage(ValueError, "has not finished yet"):
                result.return_value
            self.assertEqual((result.args, result.kwargs), ([1, 2], {{"two": 3}}))
            found = one.get_result(result.id)
            self.assertEqual((found.args, found.kwargs), ([1, 2], {{"two": 3}}))
            self.assertEqual((found.task, found.status), (one, S.READY))
            self.assertEqual(found, result)
            self.assertLess(abs(found.enqueued_at - result.enqueued_at), timedelta(minutes=1))
            self.assertIs(timezone.is_aware(found.enqueued_at), True)
            run()
            enqueued_at = result.enqueued_at
            result.refresh()
            self.assertEqual(result.enqueued_at, enqueued_at)
            self.assertIsNone(one.get_result(result.id).enqueued_at)
            self.assertEqual((result.status, result.return_value), (S.SUCCESSFUL, value))
            self.assertTrue(result.is_finished)
            self.assertLessEqual(result.started_at, result.finished_at)
            self.assertEqual(result.started_at, result.last_attempted_at)
            self.assertEqual((result.attempts, result.errors), (1, []))

    async def test_all_of_it_is_there_for_async_code(self):
        for one in (tools.add, tools.aadd):
            result = await one.aenqueue(1)
            self.assertEqual((await one.aget_result(result.id)).status, S.READY)
            await sync_to_async(run)()
            enqueued_at = result.enqueued_at
            await result.arefresh()
            self.assertEqual(result.enqueued_at, enqueued_at)
            self.assertEqual(result.return_value[:2], [1, {{}}])

    def test_what_is_no_json_is_refused(self):
        for wrong in (timezone.now(), object()):
            with self.assertRaisesMessage(TypeError, "Unsupported type"):
                tools.add.enqueue(wrong)

    def test_a_task_that_fails_goes_on_until_its_attempts_are_used_up(self):
        result = tools.fail.using(max_attempts=2).enqueue()
        run()
        result.refresh()
        self.assertEqual((result.status, result.attempts), (S.READY, 1))
        self.assertEqual(len(result.errors), 1)
        self.assertIsNotNone(result.started_at)
        run(scheduled=True)
        result.refresh()
        self.assertEqual((result.status, result.attempts), (S.FAILED, 2))
        with self.assertRaisesMessage(ValueError, "Task failed"):
            result.return_value
        self.assertEqual([e.exception_class for e in result.errors], [ValueError] * 2)
        self.assertTrue(result.errors[1].traceback.endswith("\\nValueError: wrong:\\nValueError and more\\n"))
        self.assertTrue(result.errors[1].traceback.startswith("Traceback"))
        self.assertLess(result.started_at, result.last_attempted_at)
        self.assertLessEqual(result.last_attempted_at, result.finished_at)

    def test_the_class_of_an_error_is_found(self):
        for kind, found in (
            ("SystemExit", SystemExit), ("Refused", tools.Refused), ("Reject", pgqueue.Reject),
        ):
            result = tools.fail.using(backend="short").enqueue(kind=kind)
            run()
            result.refresh()
            self.assertEqual(result.status, S.FAILED)
            self.assertEqual(result.errors[0].exception_class, found)
        result = tools.fail.using(backend="short").enqueue("Why")
        run()
        result.refresh()
        self.assertEqual(result.errors[0].exception_class_path, "shop.tools.Refused.Why")
        result = tools.afail.using(backend="short").enqueue()
        run()
        result.refresh()
        self.assertEqual(result.errors[0].exception_class, tools.Refused)

    def test_what_is_rejected_has_failed_at_once(self):
        result = tools.fail.enqueue("Reject")
        run()
        result.refresh()
        self.assertEqual((result.status, result.attempts), (S.FAILED, 1))

    def test_a_cancelled_task_has_failed_with_the_reason(self):
        result = tools.add.enqueue()
        with connection.cursor() as cursor:
            cursor.execute("select pgqueue.cancel(%s, 'a typo')", [int(result.id)])
        result.refresh()
        self.assertEqual((result.status, result.attempts), (S.FAILED, 0))
        self.assertEqual([e.traceback for e in result.errors], ["a typo"])
        self.assertEqual(result.errors[0].exception_class, Exception)

    def test_a_task_that_was_put_off_has_neither_begun_nor_failed(self):
        result = tools.add.using(max_attempts=1).enqueue(1)
        job = int(result.id)
        with connection.cursor() as cursor:
            cursor.execute(
                "select f.* from pgqueue.claim('default', 'another') as c, pgqueue.finish("
                "array[c.id], array[c.token], '{{release}}', '{{no handler for its kind}}') as f"
            )
        self.assertEqual(pgqueue.status(connection, job).last_error, "no handler for its kind")
        result.refresh()
        self.assertEqual((result.status, result.attempts, result.errors), (S.READY, 0, []))
        self.assertEqual((result.started_at, result.last_attempted_at), (None, None))
        with connection.cursor() as cursor:
            cursor.execute("select pgqueue.claim('default', 'another')")
        result.refresh()
        self.assertEqual((result.status, result.worker_ids, result.errors), (S.RUNNING, ["another"], []))

    def test_a_result_that_cannot_be_stored_does_not_fail_it(self):
        result = tools.odd.enqueue()
        run()
        result.refresh()
        self.assertEqual((result.status, list(result.return_value)), (S.SUCCESSFUL, ["not_stored"]))

    def test_what_there_is_no_result_of(self):
        job = pgqueue.enqueue(connection, "default", kind="welcome")
        path = pgqueue.enqueue(connection, "default", kind="shop.tools.plain")
        for id in ("123456789", "0", "", "x", "-1", "9" * 30, 123456789, str(job), str(path)):
            with self.assertRaises(TaskResultDoesNotExist):
                default_task_backend.get_result(id)
        tools.add.enqueue()  # the transaction goes on

    def test_a_result_imports_nothing_but_tasks_of_installed_apps(self):
        broken = [f"shop.{{name}}.task" for name in ("broken", "quits", "gives_up")]
        for kind in "this.s", *broken, "shop.lazies.lazy", "nothing", None:
            job = pgqueue.enqueue(connection, "default", kind=kind)
            with self.assertRaises(TaskResultDoesNotExist):
                default_task_backend.get_result(str(job))
        self.assertNotIn("this", sys.modules)

    def test_a_job_of_a_queue_that_the_settings_lack_has_a_result(self):
        payload = {{"args": [1], "kwargs": {{}}}}
        job = pgqueue.enqueue(connection, "foreign", payload, kind="shop.tools.add")
        result = tools.add.get_result(str(job))
        self.assertEqual((result.status, result.args), (S.READY, [1]))
        self.assertEqual(result.task, tools.add)
        run()
        result.refresh()
        self.assertEqual(result.return_value, [1, {{}}])

    def test_a_result_of_another_task_is_refused(self):
        result = tools.aadd.enqueue()
        with self.assertRaisesMessage(TaskResultMismatch, "does not match"):
            tools.add.get_result(result.id)

    def test_the_context(self):
        result = tools.tell.enqueue("hello")
        run()
        result.refresh()
        self.assertEqual(result.return_value, ["hello", 1, result.id, "RUNNING", 1, ["hello"]])
        result = tools.second.enqueue()
        run()
        run(scheduled=True)
        result.refresh()
        self.assertEqual((result.return_value, result.attempts), (2, 2))
        self.assertEqual(len(result.errors), 1)

    def test_priority_queue_and_time_are_those_of_the_job(self):
        later = timezone.now() + timedelta(hours=1)
        result = tools.add.using(priority=-100, queue_name="other", run_after=later).enqueue()
        (job,) = enqueued(connection)
        self.assertEqual((job.priority, job.queue, job.run_at), (-100, "other", later))
        self.assertEqual((job.kind, job.payload), ("shop.tools.add", {{"args": [], "kwargs": {{}}}}))
        self.assertEqual(run(), [])
        found = default_task_backend.get_result(result.id)
        self.assertEqual((found.task.priority, found.task.queue_name), (-100, "other"))
        tools.add.using(priority=100).enqueue()
        tools.add.enqueue()
        self.assertEqual(sorted(j.priority for j in enqueued(connection)), [-100, 0, 100])

    def test_a_task_has_options_of_jobs(self):
        both = tools.add.using(unique_key="k", group_key="g", max_attempts=7)
        self.assertEqual((tools.add.unique_key, both.unique_key), (None, "k"))
        self.assertEqual(both.using(priority=1).group_key, "g")
        result = both.enqueue(1)
        self.assertEqual(both.enqueue(2).id, result.id)
        (job,) = enqueued(connection)
        self.assertEqual((job.unique_key, job.group_key), ("k", "g"))
        self.assertEqual(pgqueue.status(connection, job.id).max_attempts, 7)
        short = tools.add.using(backend="short").enqueue()
        self.assertEqual(pgqueue.status(connection, int(short.id)).max_attempts, 1)
        self.assertEqual(short.backend, "short")
        with self.assertRaises(TypeError):
            tools.add.using(colour="red")

    def test_the_decorator_takes_them_where_django_passes_them_on(self):
        try:
            made = task(max_attempts=3, group_key="g")(tools.plain)
        except TypeError as error:
            self.assertIn("max_attempts", str(error))  # of Django 6.0
        else:
            self.assertEqual((made.max_attempts, made.group_key), (3, "g"))

    def test_a_task_made_for_another_backend_runs_as_well(self):
        result = tools.elsewhere.using(backend="default").enqueue()
        run()
        self.assertEqual(default_task_backend.get_result(result.id).return_value, "here")

    def test_what_is_not_valid_is_refused(self):
        for wrong in (
            {{"priority": 101}}, {{"priority": -101}}, {{"priority": 3.1}}, {{"queue_name": "none"}},
            {{"run_after": datetime.now()}},
        ):
            with self.assertRaises(TaskException):
                tools.add.using(**wrong)
        for wrong in (any, self.test_what_is_not_valid_is_refused, lambda: None):
            with self.assertRaises(TaskException):
                task()(wrong)
        with override_settings(TASKS=WITH_OTHER), self.assertRaises(TaskException):
            tools.add.enqueue()
        self.assertEqual(enqueued(connection), [])

    def test_tasks_and_results_can_be_pickled_and_called(self):
        self.assertEqual(tools.add.call(1, 2), [3, {{}}])
        for one in (tools.add, tools.add.enqueue(1)):
            if hasattr(type(tools.add), "__reduce__") and {django.VERSION >= (6, 1)}:
                self.assertEqual(pickle.loads(pickle.dumps(one)), one)
        self.assertEqual(tools.add.using(), tools.add)

    def test_each_step_is_signalled_and_logged(self):
        with self.assertLogs("{LIBRARY}", level="DEBUG") as logs:
            for one in (tools.add, tools.aadd, tools.fail.using(max_attempts=1)):
                one.enqueue()
            run()
        self.assertEqual(states(logs), ["RUNNING", "SUCCESSFUL", "RUNNING", "SUCCESSFUL", "RUNNING", "FAILED"])
        self.assertEqual(sum("enqueued" in line for line in logs.output), 3)

    def test_nothing_is_signalled_as_finished_that_goes_on(self):
        with self.assertLogs("{LIBRARY}", level="DEBUG") as logs:
            for one in (tools.fail, tools.snooze):
                one.enqueue()
            run()
        self.assertEqual(sum("state=" in line for line in logs.output), 2)

    def test_a_group_of_one_error_is_signalled_as_this_error(self):
        with self.assertLogs("{LIBRARY}", level="DEBUG") as logs:
            for kind in ("Reject", "Snooze"):
                tools.group.using(max_attempts=2 if kind == "Reject" else 1).enqueue(kind)
            ran = run()
        self.assertEqual([one.outcome for one in ran], ["dead", "released"])
        self.assertEqual(states(logs), ["RUNNING", "FAILED", "RUNNING"])

    def test_a_value_that_has_not_run_is_signalled_as_a_failure(self):
        for kind in ("generator", "coroutine"):
            for attempts, ends in ((2, ["RUNNING"]), (1, ["RUNNING", "FAILED"])):
                with self.assertLogs("{LIBRARY}", level="DEBUG") as logs:
                    tools.many.using(max_attempts=attempts).enqueue(kind)
                    run()
                self.assertEqual(states(logs), ends)

    def test_what_has_lost_its_lease_is_not_signalled_as_finished(self):
        def lose(job):
            job._attempt.expires = float("-inf")  # says the server
            return contextlib.nullcontext()

        for one in (tools.add, tools.fail):
            self.assertEqual(self.signalled(one, lose), ["RUNNING"])

    def test_what_was_given_up_at_its_timeout_is_signalled_as_a_failure(self):
        def give_up(job):
            attempt = job._attempt
            attempt.timeout, attempt.started, attempt.has_timed_out = 1, 0, True
            attempt.expires, attempt.outcome = 0, Outcome("fail")
            return contextlib.nullcontext()

        for one in (tools.add, tools.aadd, tools.snooze):
            self.assertEqual(self.signalled(one, give_up), ["RUNNING", "FAILED"])

    def signalled(self, one, middleware):
        with self.assertLogs("{LIBRARY}", level="DEBUG") as logs:
            one.using(max_attempts=1).enqueue()
            with mock.patch.object(app, "middleware", middleware):
                run()
        return states(logs)

    def test_only_modules_of_apps_are_imported_for_a_kind(self):
        import sys
        for kind in ("antigravity.task", "this.task", "nothing", "", ".", "shop.", "shop.none.x"):
            self.assertIsNone(app.find(kind))
        self.assertFalse({{"antigravity", "this"}} & sys.modules.keys())

    def test_the_tasks_of_modules_named_tasks_are_known_at_once(self):
        self.assertIn("shop.tasks.pack", app.tasks)
        self.assertTrue(app.find("shop.tools.aadd").is_async)

class CheckTest(TestCase):
    def said(self, **changed):
        backend = {{"BACKEND": "pgqueue.django.PgQueueBackend", **changed}}
        with override_settings(TASKS={{"default": backend}}):
            return [message.id for message in task_backends["default"].check()]

    def test_the_settings_are_checked(self):
        call_command("check")
        self.assertEqual(self.said(), [])
        self.assertEqual(self.said(OPTIONS={{"database": "none"}}), ["pgqueue.E001"])
        self.assertEqual(self.said(OPTIONS={{"database": "lite"}}), ["pgqueue.E001"])
        self.assertEqual(self.said(OPTIONS={{"attempts": 1}}), ["pgqueue.E002"])
        with self.modify_settings(INSTALLED_APPS={{"remove": "pgqueue.django"}}):
            self.assertEqual(self.said(), ["pgqueue.W001"])

    def test_another_driver_is_refused(self):
        import psycopg2
        with mock.patch.object(connection, "Database", psycopg2):
            self.assertEqual(self.said(), ["pgqueue.E001"])
            with self.assertRaisesMessage(Exception, "is on psycopg2, not on psycopg 3"):
                tools.add.enqueue()

class CommittedTest(TransactionTestCase):
    def test_a_task_is_enqueued_in_the_transaction(self):
        try:
            with transaction.atomic():
                tasks.place()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        self.assertEqual(enqueued(connection), [])
        id = tasks.place()
        run(committed=True)
        order = tasks.Order.objects.get()
        self.assertTrue(order.is_packed)
        self.assertEqual(tasks.pack.get_result(id).return_value, f"parcel {{order.pk}}")

    def test_wait_takes_the_connection_of_django(self):
        id = int(tools.add.enqueue(1).id)
        with self.assertRaises(TimeoutError):
            pgqueue.wait(connection, id, timeout=0)
        run(committed=True)
        self.assertEqual(pgqueue.wait(connection, id, timeout=60).result, [1, {{}}])
        with transaction.atomic(), self.assertRaises(ValueError):
            tools.add.enqueue()
            pgqueue.wait(connection, id)

@override_settings(USE_TZ=False)
class LocalTimeTest(TransactionTestCase):
    def test_moments_are_naive_without_time_zones(self):
        later = datetime.now() + timedelta(hours=1)
        tools.add.using(run_after=later, queue_name="other").enqueue()
        (job,) = enqueued(connection, "other")
        self.assertEqual(timezone.make_naive(job.run_at), later)
        result = tools.fail.using(max_attempts=1).enqueue()
        run(committed=True)
        result.refresh()
        self.assertIs(timezone.is_naive(result.started_at), True)
        self.assertLessEqual(result.started_at, result.finished_at)
        self.assertLess(abs(result.enqueued_at - datetime.now()), timedelta(minutes=1))
"""
LITE = """
DATABASES["lite"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
"""


@pytest.fixture
def site(db, tmp_path) -> Iterator[Site]:
    site = Site(tmp_path, db.info.dbname)
    settings = (site.folder / "settings.py").read_text()
    site.write("settings.py", settings, MORE_SETTINGS)
    site.write("shop/tools.py", TOOLS)
    site.write("shop/broken.py", "1 / 0")
    site.write("shop/quits.py", "raise SystemExit(3)")
    site.write("shop/gives_up.py", "raise BaseException('no')")
    site.write("shop/lazies.py", LAZY)
    yield site
    site.end()


def test_tasks_and_results_are_as_django_expects_of_a_backend(site) -> None:
    settings = (site.folder / "settings.py").read_text()
    site.write("settings.py", settings, LITE)
    site.write("shop/tests.py", CASES)
    done = site.try_to("test", "-v", "2")
    assert done.returncode == 0, done.stderr[-8000:]
    assert (
        f"Ran {CASES.count('    def test_') + CASES.count('async def test_')} tests"
        in done.stderr
    )


def test_the_worker_runs_tasks_without_an_app(db, site) -> None:
    db.execute("drop extension pgqueue")
    site.manage("migrate")
    code = """
from shop import tasks, tools
tasks.place()
tools.aadd.enqueue(1)
tools.fail.using(max_attempts=1).enqueue()
tools.tell.using(queue_name="other").enqueue("x")
"""
    site.manage("shell", "-c", code)
    said = site.manage("pgqueue_worker", "--queue", "default,other", "--burst")
    runs = "select kind, outcome from pgqueue.run order by kind"
    assert db.execute(runs).fetchall() == [
        ("shop.tasks.pack", "completed"),
        ("shop.tools.aadd", "completed"),
        ("shop.tools.fail", "dead"),
        ("shop.tools.tell", "completed"),
    ]
    assert column(db, "select is_packed from shop_order") == [True]
    for word in ("RUNNING", "SUCCESSFUL", "FAILED"):
        assert f"state={word}" in said


def test_a_task_that_nobody_has_is_put_off(db, site) -> None:
    db.execute("select pgqueue.enqueue('default', kind => 'shop.tools.nothing')")
    db.execute("select pgqueue.enqueue('default', kind => 'antigravity.task')")
    said = site.manage("pgqueue_worker", "--burst")
    assert said.count("no handler for the kind") == 2
    assert one(db, "select count(*) from pgqueue.job where attempt = 0") == 2


def test_a_kind_that_names_no_task_ends_no_worker(db, site) -> None:
    wrong = {
        "shop.quits.task": "SystemExit: 3",
        "shop.gives_up.task": "BaseException: no",
        "shop.lazies.lazy": "type SimpleLazyObject",
        "shop.tools.plain": "type function",
        "shop.tools.nothing": 'does not define a "nothing"',
    }
    for kind in (*wrong, "shop.tools.add"):
        db.execute("select pgqueue.enqueue('default', kind => %s)", (kind,))
    said = site.manage("pgqueue_worker", "--burst")
    assert outcomes(db) == ["completed"]
    left = "select kind from pgqueue.job where attempt = 0 order by id"
    assert column(db, left) == list(wrong)
    assert all(re.search(f"'{kind}'.*{why}", said) for kind, why in wrong.items())


def test_a_lazy_object_beside_tasks_and_apps_stops_no_worker(db, site) -> None:
    for name in "tasks", "jobs":
        site.write(
            f"shop/{name}.py", (site.folder / f"shop/{name}.py").read_text(), LAZY
        )
    db.execute("select pgqueue.enqueue('default', kind => 'shop.tools.add')")
    site.manage("pgqueue_worker", "--burst")
    assert outcomes(db) == ["completed"]


# Two threads look for its task at the same time.
MET = f"""
import threading
from {LIBRARY} import task

barrier = threading.Barrier(2)

def plain():
    return "met"

def __getattr__(name):
    if name != "work":
        raise AttributeError(name)
    barrier.wait(60)
    return task(plain)
"""


def test_two_databases_may_have_a_task_that_is_found_at_the_same_time(
    db, site, template
) -> None:
    site.write("shop/met.py", MET)
    with database(template) as other, psycopg.connect(other, autocommit=True) as second:
        for conn in db, second:
            conn.execute("select pgqueue.enqueue('default', kind => 'shop.met.work')")
        dsns = ("--dsn", f"dbname={db.info.dbname}", "--dsn", other)
        site.manage("pgqueue_worker", "--burst", *dsns)
        assert outcomes(db) == outcomes(second) == ["completed"]


def test_a_worker_that_runs_tasks_of_known_kinds_only(db, site) -> None:
    for kind in ("shop.tasks.pack", "shop.tools.add"):
        db.execute("select pgqueue.enqueue('default', kind => %s)", (kind,))
    site.manage("pgqueue_worker", "--burst", "--only-known")
    assert column(db, "select kind from pgqueue.job where attempt = 0") == [
        "shop.tools.add"
    ]


def test_tasks_run_in_several_processes(db, site) -> None:
    worker = site.start("pgqueue_worker", "--processes", "2")
    for _ in range(10):
        db.execute("select pgqueue.enqueue('default', kind => 'shop.tools.add')")
    wait_until(lambda: outcomes(db) == ["completed"] * 10)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(40) == 0


@pytest.mark.parametrize("name", ["overruns", "aoverruns"])
def test_a_task_that_returns_after_its_timeout_is_signalled_as_a_failure(
    db, site, name
) -> None:
    query = "select pgqueue.enqueue('default', kind => %s, max_attempts => 1)"
    db.execute(query, (f"shop.tools.{name}",))
    said = site.manage("pgqueue_worker", "--burst", "--timeout", "0.1")
    assert outcomes(db) == ["dead"]
    states = re.findall(r"state=(?:\w+\.)?(\w+)", said)
    assert set(states) == {"RUNNING", "FAILED"}


# Two databases

TWO = """
from settings import *
DATABASES["second"] = {**DATABASES["default"], "NAME": os.environ["SECOND"]}
TASKS["second"] = {**TASKS["default"], "OPTIONS": {"database": "second"}}
"""


@pytest.fixture
def second(site, template) -> Iterator[psycopg.Connection]:
    site.write("two.py", TWO)
    with database(template) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        site.env |= {"SECOND": conn.info.dbname, "DJANGO_SETTINGS_MODULE": "two"}
        yield conn


def test_a_result_is_asked_for_in_its_own_database(db, site, second) -> None:
    code = """
import subprocess, sys
from shop import tools
from django.db import connections
import pgqueue

tools.add.enqueue(1)
id = tools.fail.using(backend="second").enqueue().id
found = backend.get_result(id)
print(found.backend, found.task.backend)
job = pgqueue.enqueue(connections["second"], "foreign", kind="shop.tools.add")
foreign = backend.get_result(str(job))
print(foreign.task.backend, foreign.task.queue_name)
subprocess.run([sys.executable, "manage.py", "pgqueue_worker", "--burst"], check=True)
found.refresh()
print(found.status.value, foreign.status.value)
"""
    ours = f"from {LIBRARY} import task_backends\nbackend = task_backends['second']"
    said = site.manage("shell", "-c", ours + code)
    assert "second second\nsecond default\n" in said
    assert "READY READY\n" in said
    assert outcomes(db) == ["completed"]


@pytest.mark.parametrize("how", ["--database", "--dsn"])
def test_a_running_task_asks_for_its_result_in_its_own_database(
    db, site, second, how
) -> None:
    kinds = ["shop.tools.look", "shop.tools.look_elsewhere"]
    for kind in kinds:
        for conn in db, second:
            conn.execute("select pgqueue.enqueue('q', kind => %s)", (kind,))
    where = "second" if how == "--database" else f"dbname={second.info.dbname}"
    site.manage("pgqueue_worker", "--queue", "q", "--burst", how, where)
    for job in 1, 2:
        found = pgqueue.status(second, job)
        assert found.result == ["second", "second", "default", "RUNNING"]


def test_a_producer_gets_results_but_no_arguments_and_no_traceback(
    db, site, role
) -> None:
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    code = """
from django.db import connection
from shop import tools
result = tools.fail.using(max_attempts=2).enqueue(kind="Refused")
print(f"<{result.id}>")
"""
    user = f'{{"USER": "{role}"}}'
    said = site.manage("shell", "-c", code, MORE=user)
    id = said.partition("<")[2].partition(">")[0]
    site.manage("pgqueue_worker", "--burst")
    code = f"""
from shop import tools
found = tools.fail.get_result("{id}")
print(found.status.value, found.kwargs, [e.exception_class.__name__ for e in found.errors])
print([e.traceback for e in found.errors])
"""
    said = site.manage("shell", "-c", code, MORE=user)
    # Only the traceback says of which module the class is.
    assert "READY {} ['Exception']" in said and "Refused" in said
    assert "Traceback" not in said
    said = site.manage("shell", "-c", code)
    assert "READY {'kind': 'Refused'} ['Refused']" in said and "Traceback" in said


def test_without_a_library_of_tasks_the_rest_of_it_works(db, site) -> None:
    """As on Django 5 without django-tasks."""
    blocked = (
        "import sys; sys.modules.update({'django.tasks': None, 'django_tasks': None})"
    )
    code = f"{blocked}\nimport pgqueue.django, pgqueue.django.middleware\npgqueue.django.PgQueueBackend"
    refused = site.try_to("shell", "-c", code)
    assert "ImportError" in refused.stderr or "ModuleNotFoundError" in refused.stderr
