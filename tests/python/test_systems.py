"""The worker where Python lacks what Linux has: names that macOS and Windows do not have are taken away."""

import os
import signal
import subprocess
import sys

import pgqueue
import pytest
from conftest import one
from test_supervisor import children
from worker_harness import QUEUE, outcomes, wait_until

pytest_plugins = ["worker_harness"]

MACOS = """
import select, signal
for name in "sigtimedwait", "sigwaitinfo":
    delattr(signal, name)
del select.epoll
"""
# Its event loop waits for the ends of operations, and not for sockets.
WINDOWS = """
import asyncio, os, random, select, signal, socket
for module, names in {
    os: "fork forkpty register_at_fork getuid geteuid getppid killpg setsid waitpid",
    select: "poll epoll",
    signal: "pthread_sigmask sigtimedwait sigwait sigwaitinfo sigpending SIGCHLD SIGHUP SIGKILL SIGQUIT",
    socket: "MSG_DONTWAIT",
}.items():
    for name in names.split():
        delattr(module, name)

class ProactorEventLoop(asyncio.SelectorEventLoop):
    def add_reader(self, *args):
        raise NotImplementedError
    add_writer = add_reader

asyncio.ProactorEventLoop = ProactorEventLoop
asyncio.new_event_loop = asyncio.events.new_event_loop = ProactorEventLoop
"""


@pytest.fixture
def lacking(db, workers):
    """Return the environment for a Python that lacks what a system does not have."""
    db.execute("create table effect (job_id bigint primary key)")

    def lacking(what: str) -> dict[str, str]:
        (workers.folder / "sitecustomize.py").write_text(what)
        here = os.path.dirname(__file__)
        path = (str(workers.folder), here, os.path.join(here, "../../python"))
        return {"PYTHONPATH": os.pathsep.join(path)}

    return lacking


def test_several_processes_work_where_there_is_no_sigtimedwait(db, workers, lacking):
    parent = workers.start("--processes", "2", "--lease", "1", env=lacking(MACOS))
    wait_until(lambda: workers.log().count("works on") == 2)
    os.kill(children(parent.pid)[0], signal.SIGKILL)
    wait_until(lambda: workers.log().count("works on") == 3)
    pgqueue.enqueue_many(db, QUEUE, [None] * 10, kind="mark")
    wait_until(lambda: outcomes(db) == {"completed": 10})
    assert workers.finish(parent) == 0


def test_a_worker_runs_and_stops_where_there_are_no_forks_and_few_signals(
    db, workers, lacking
):
    env = lacking(WINDOWS)
    worker = workers.start(env=env)
    for kind in "mark", "amark", "effect", "aeffect":
        pgqueue.enqueue(db, QUEUE, kind=kind)
    wait_until(lambda: outcomes(db) == {"completed": 4})
    assert one(db, "select count(*) from effect") == 2
    held = pgqueue.enqueue(db, QUEUE, kind="ahold")
    workers.began()
    worker.send_signal(signal.SIGINT)
    wait_until(lambda: "is stopping, told by SIGINT" in workers.log())
    workers.let_go()
    assert worker.wait(30) == 0
    assert (
        one(db, "select outcome from pgqueue.run where job_id = %s", held)
        == "completed"
    )
    assert workers.start("--processes", "2", env=env).wait(30) == 2
    assert "--processes needs Unix: start several workers instead" in workers.log()


def test_commands_and_tests_of_apps_run_there_too(db, workers, lacking):
    pgqueue.enqueue(db, QUEUE, kind="aeffect")
    drains = """
import psycopg
from pgqueue.testing import drain
from worker_app import app
with psycopg.connect() as conn:
    print([ran.outcome for ran in drain(conn, app, committed=True)])
"""
    env = {
        **os.environ,
        **lacking(WINDOWS),
        "PGDATABASE": db.info.dbname,
        "RAN": str(workers.ran),
    }
    for args, said in (
        (["-m", "pgqueue", "status"], QUEUE),
        (["-m", "pgqueue.worker", "--check"], "ok: "),
        (["-c", drains], "['completed']\n"),
    ):
        ran = subprocess.run(
            [sys.executable, *args], env=env, capture_output=True, text=True
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert said in ran.stdout
