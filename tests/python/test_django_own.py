"""Django's own tests of its backends for tasks, with pgqueue in the place of these.

They are in Django's source archive, from which pip takes them once for each virtual environment.
Before Django 6 they run on django-tasks, with its names for the same.
"""

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import django
import pytest
from test_django import Site
from test_django_tasks import LIBRARY, pytestmark  # noqa: F401

VERSION = django.__version__ if LIBRARY == "django.tasks" else "6.0"
KEPT = Path(sys.prefix) / f"django-{VERSION}-tests"
FILES = ["tasks", "test_dummy_backend", "test_immediate_backend", "test_tasks"]
# Where django-tasks has another word.
WORDS = {
    r"django\.tasks": "django_tasks",
    r"\bInvalidTask(Backend)?\b": r"InvalidTask\1Error",
    "async Tasks": "async tasks",
}
COUNT = 70  # cases; of a newer Django at least as many
IMMEDIATE = "tasks.test_immediate_backend.ImmediateBackend"
DUMMY = "tasks.test_dummy_backend.DummyBackend"
# The cases of what only Django's backends do or lack, with how they have to fail here.
DIFFERENT = {
    # It defers tasks, and has their results.
    f"{IMMEDIATE}TestCase.test_cannot_pass_run_after": "not raised",
    f"{IMMEDIATE}TestCase.test_cannot_get_result": "TaskResultDoesNotExist: 123",
    f"{IMMEDIATE}TestCase.test_cannot_refresh_result": "NotImplementedError not raised",
    # A task runs in a worker: after the commit, and an interrupt fails its attempt.
    f"{IMMEDIATE}TransactionTestCase.test_doesnt_wait_until_transaction_commit_by_default": (
        "TaskResultStatus.READY != TaskResultStatus.SUCCESSFUL"
    ),
    f"{IMMEDIATE}TestCase.test_throws_keyboard_interrupt": "state=FAILED",
    # The work is done: the task does not fail for its result, see docs/django.md.
    f"{IMMEDIATE}TestCase.test_complex_return_value": "no logs of level ERROR",
    # They change a result in the memory of the dummy.
    f"{DUMMY}TestCase.test_refresh_result": "READY != TaskResultStatus.SUCCESSFUL",
    f"{DUMMY}TestCase.test_refresh_result_async": "READY != TaskResultStatus.SUCCESSFUL",
}
SETTINGS = f"""
INSTALLED_APPS += {["tasks"] if LIBRARY == "django.tasks" else ["tasks", "django_tasks"]}
TEST_RUNNER = "instead.Runner"
# Some cases call in coroutines what is not async.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
"""
INSTEAD = f"""
from {LIBRARY}.backends import dummy, immediate
from django.db import connection
from django.test import SimpleTestCase
from django.test.runner import DiscoverRunner
from django.test.utils import iter_test_cases
from pgqueue.django import PgQueueBackend
from pgqueue.django.management.commands.pgqueue_worker import conninfo
from pgqueue.django.worker import app
from pgqueue.worker import Worker

DIFFERENT = {DIFFERENT}

def purge():
    with connection.cursor() as cursor:
        cursor.execute("select pgqueue.purge('default')")

class Waiting(PgQueueBackend):
    # With what the dummy has for tests: here the results come from the database.
    def __init__(self, alias, params):
        super().__init__(alias, params)
        self.ids = []

    def enqueue(self, task, args, kwargs):
        result = super().enqueue(task, args, kwargs)
        self.ids.append(result.id)
        return result

    @property
    def results(self):
        return [self.get_result(id) for id in self.ids]

    def clear(self):
        self.ids.clear()
        purge()

class Immediate(PgQueueBackend):
    # A worker runs the task at once.
    def enqueue(self, task, args, kwargs):
        purge()  # else it would run what other cases have left
        result = super().enqueue(task, args, kwargs)
        Worker(app, {{task.queue_name: 1}}, dsn=conninfo("default"), burst=True).run()
        result.refresh()
        return result

dummy.DummyBackend, immediate.ImmediateBackend = Waiting, Immediate
SimpleTestCase.databases = {{"default"}}

class Runner(DiscoverRunner):
    def setup_databases(self, **kwargs):
        return []  # it is there

    def build_suite(self, *args, **kwargs):
        suite = super().build_suite(*args, **kwargs)
        cases = {{case.id(): case for case in iter_test_cases(suite)}}
        for name in DIFFERENT:
            cases[name].__unittest_expecting_failure__ = True
        return suite

    def suite_result(self, suite, result, **kwargs):
        for case, text in result.expectedFailures:
            assert DIFFERENT[case.id()] in text, text
        return super().suite_result(suite, result, **kwargs)
"""


def cases_of_django(folder: Path) -> dict[str, str]:
    """Return the texts of its tests, by their names, from the archive."""
    if not KEPT.exists():
        command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        command += ["download", f"django=={VERSION}", "-d", str(folder), "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--retries", "1"]
        # Django 6 refuses Python 3.11, on which its tests run all the same.
        command += ["--python-version", "3.13"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.splitlines() or ["pip failed"])[-1]
            pytest.skip(f"the archive of Django {VERSION} cannot be had: {why}")
        unpack(folder)
    return {name: (KEPT / f"{name}.py").read_text() for name in FILES}


def unpack(folder: Path) -> None:
    (found,) = folder.glob("*.tar.gz")
    part = KEPT.with_name(f"{KEPT.name}.part")
    part.mkdir(exist_ok=True)
    with tarfile.open(found) as archive:
        for name in FILES:
            path = f"{found.name.removesuffix('.tar.gz')}/tests/tasks/{name}.py"
            (part / f"{name}.py").write_bytes(archive.extractfile(path).read())
    part.rename(KEPT)


@pytest.fixture
def site(db, tmp_path) -> Iterator[Site]:
    # Django's backends try a task once.
    db.execute("select pgqueue.configure(null, max_attempts => 1)")
    site = Site(tmp_path, db.info.dbname)
    settings = (site.folder / "settings.py").read_text()
    site.write("settings.py", settings, SETTINGS)
    site.write("instead.py", INSTEAD)
    for name, text in cases_of_django(tmp_path).items():
        if LIBRARY == "django_tasks":
            for word, other in WORDS.items():
                text = re.sub(word, other, text)
        site.write(f"tasks/{name}.py", text)
    site.write("tasks/__init__.py")
    yield site
    site.end()


def test_the_cases_that_django_has_for_its_backends_pass(site) -> None:
    done = site.try_to("test", "tasks", "-v", "2")
    assert done.returncode == 0, done.stderr[-8000:]
    ran = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert ran and int(ran[1]) >= COUNT
    assert f"OK (expected failures={len(DIFFERENT)})" in done.stderr
