"""Starts real workers, waits on rows, and counts what was run, twice, or lost.

A plugin that tests import from, too: PYTEST_DONT_REWRITE, or pytest warns.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import forked
import psycopg
import pytest
from cluster import Cluster

QUEUE = "work"
# Workers that rest. (The lock of a parked one is there before rest() has looked.)
RESTING = (
    "select count(*) from pg_stat_activity where datname = current_database()"
    " and state = 'idle' and query like '%pgqueue.rest(%'"
)
# The sessions of workers in the test's database.
OF_WORKERS = (
    "from pg_stat_activity"
    " where application_name like 'pgqueue %' and datname = current_database()"
)


def all_backends(pooler: str, statement: str) -> set[tuple[Any, ...]]:
    """Run it on each of the four sessions of the pooler, by as many transactions at once."""
    with ExitStack() as stack:
        conns = [stack.enter_context(psycopg.connect(pooler)) for _ in range(4)]
        return {conn.execute(statement).fetchone() for conn in conns}


def wait_until(what: Callable[[], Any], timeout: float = 30) -> Any:
    """Wait for something to be true, and return it."""
    began = time.monotonic()
    while not (found := what()):
        waited = time.monotonic() - began
        assert waited < timeout, "waited in vain"
        time.sleep(0.02 if waited < 1 else 0.05)  # each look is a query
    return found


class Workers:
    """The workers of one test, their notes, and their logs."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.ran = folder / "ran"
        self.ran.touch()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *args: str,
        dsn: str | None = None,
        env: dict[str, str] | None = None,
        prefix=(),
        output: int | None = None,
    ) -> subprocess.Popen[bytes]:
        command = [*prefix, sys.executable, "-m", "pgqueue.worker"]
        if "--app" not in args:
            command += ["--app", "worker_app"]
        if not any(arg in ("--queue", "-q") for arg in args):
            command += ["--queue", QUEUE]
        ours = {
            "PGQUEUE_DSN": dsn or self.dsn,
            "RAN": str(self.ran),
            "PYTHONPATH": forked.PATH,
            "PYTHONUNBUFFERED": "",  # so that prints are buffered, and could be lost
        }
        with (self.folder / "log").open("ab") as log:
            process = forked.Popen(
                [*command, *args],
                cwd=self.folder,
                env={**os.environ, **ours, **(env or {})},
                stdout=log if output is None else output,
                stderr=log if output is None else output,
            )
        self.processes.append(process)
        return process

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def notes(self, word: str = "ran") -> Counter[int]:
        lines = (line.split() for line in self.ran.read_text().splitlines())
        return Counter(int(number) for what, number in lines if what == word)

    def began(self, count: int = 1) -> list[int]:
        """Wait until that many handlers have noted that they began."""
        return wait_until(
            lambda: len(found := self.notes("began")) >= count and list(found)
        )

    def let_go(self) -> None:
        Path(f"{self.ran}.go").touch()

    def finish(self, process: subprocess.Popen[bytes], timeout: float = 40) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(20)


@contextmanager
def workers_on(dsn: str) -> Iterator[Workers]:
    with tempfile.TemporaryDirectory(prefix="pgqueue-worker-") as folder:
        workers = Workers(dsn, Path(folder))
        try:
            yield workers
        finally:
            workers.end()
            if workers.processes:
                sys.stderr.write(
                    workers.log()[-6000:]
                )  # pytest shows it when a test fails


@pytest.fixture
def workers(dsn: str) -> Iterator[Workers]:
    with workers_on(dsn) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A server that a test may hurt."""
    with Cluster(settings={"max_connections": "30"}) as cluster:
        with psycopg.connect(where(cluster), autocommit=True) as conn:
            conn.execute("create extension pgqueue")
        yield cluster


@pytest.fixture
def pooler(db: psycopg.Connection) -> Iterator[str]:
    """Start PgBouncer in transaction mode, and say where it is."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH')}:/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(f"/tmp/pgqueue-bouncer-{os.getpid()}-{port}")
    folder.mkdir()
    users = folder / "users"
    users.write_text(f'"{db.info.user}" ""\n')
    ini = folder / "ini"
    ini.write_text(
        f"[databases]\n* = host={db.info.host} port={db.info.port}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = trust\nauth_file = {users}\npool_mode = transaction\n"
        "default_pool_size = 4\n"
    )
    for path in (folder, users, ini):
        os.chmod(path, 0o755)
    user = "nobody" if os.geteuid() == 0 else None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, str(ini)], user=user, stdout=log, stderr=log
        )
    dsn = f"host=127.0.0.1 port={port} user={db.info.user} dbname={db.info.dbname}"

    def is_up() -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn):
            return True
        assert process.poll() is None, (folder / "log").read_text()
        return False

    try:
        wait_until(is_up, 10)
        yield dsn
    finally:
        # At SIGTERM it waits for its clients, from 1.23 on; it has nothing to tidy up.
        process.kill()
        process.wait(20)
        shutil.rmtree(folder)


def where(cluster: Cluster, host: str | None = None) -> str:
    return (
        f"host={host or cluster.home} port={cluster.port} user=postgres dbname=postgres"
    )


def is_empty(db: psycopg.Connection, queue: str = QUEUE) -> bool:
    query = "select not exists (select from pgqueue.job where queue = %s)"
    return db.execute(query, (queue,)).fetchone()[0]


def outcomes(db: psycopg.Connection) -> Counter[str]:
    return Counter(
        {
            name: n
            for name, n in db.execute(
                "select outcome, count(*) from pgqueue.run group by 1"
            )
        }
    )


def tally(
    say: Callable[[str], None],
    name: str,
    db: psycopg.Connection,
    workers: Workers,
    ids: list[int],
) -> int:
    """Say what happened to the jobs; none may be lost. Return how many ran twice."""
    there = {
        row[0]
        for row in db.execute(
            "select job_id from pgqueue.run where outcome = 'completed'"
        )
    }
    there |= {row[0] for row in db.execute("select id from pgqueue.job")}
    there |= {row[0] for row in db.execute("select id from pgqueue.dead_job")}
    ran = workers.notes()
    twice = sum(count > 1 for count in ran.values())
    lost = len(set(ids) - there)
    say(
        f"\n{name}: {len(ids)} enqueued, {len(ran)} run, {twice} run twice, {lost} lost"
    )
    assert lost == 0
    return twice


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, end="")

    return say
