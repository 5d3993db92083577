"""The two command lines, as a shell sees them."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pgqueue
import psycopg
import pytest
from conftest import one
from worker_harness import QUEUE, is_empty, wait_until

pytest_plugins = ["worker_harness"]

HERE = Path(__file__).resolve().parent


@pytest.fixture
def run(dsn, tmp_path):
    def run(module: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join((str(HERE), str(HERE.parents[1] / "python")))
        return subprocess.run(
            [sys.executable, "-m", module, *args],
            env={**os.environ, "PYTHONPATH": path, "PGQUEUE_DSN": dsn, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_help_shows_every_flag_with_its_variable_and_default(run) -> None:
    shown = run("pgqueue.worker", "--help").stdout
    flags = set(re.findall(r"--[a-z][a-z-]+", shown)) - {
        "--help",
        "--check",
        "--version",
    }
    variables = set(re.findall(r"PGQUEUE_[A-Z_]+", shown))
    assert {
        "PGQUEUE_" + flag[2:].upper().replace("-", "_") for flag in flags
    } == variables
    assert {"--app", "--queue", "--burst", "--health-file", "--max-jobs"} <= flags
    assert "default 30.0" in shown


def test_variables_stand_in_for_flags(run, db) -> None:
    pgqueue.enqueue_many(db, "q", [None] * 3, kind="noop")
    env = {
        "PGQUEUE_APP": "worker_app:app",
        "PGQUEUE_QUEUE": "p,q=2",
        "PGQUEUE_BURST": "1",
    }
    done = run("pgqueue.worker", PGQUEUE_MAX_JOBS="2", PGQUEUE_LOG_FORMAT="json", **env)
    assert done.returncode == 0
    assert one(db, "select count(*) from pgqueue.run") == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"at", "level", "message", "pid"} <= lines[0].keys()


def test_json_lines_name_the_job(run, db) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind="reject")
    worker = ("pgqueue.worker", "--app", "worker_app", "-q", QUEUE, "--burst")
    done = run(*worker, "--log-format", "json")
    found = [json.loads(line) for line in done.stderr.splitlines()]
    (line,) = [line for line in found if line.get("job_id") == job]
    assert {
        "kind": "reject",
        "queue": QUEUE,
        "attempt": 1,
        "level": "error",
    }.items() <= line.items()
    assert {"token", "ms"} <= line.keys()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--app", "no_such_module"], 2),
        (["--app", "worker_app:nothing"], 2),
        (["--app", "worker_app:note"], 2),
        (["--app", "worker_app", "--concurrency", "0"], 2),
        (["--app", "worker_app", "--batch", "-1"], 2),
        (["--app", "worker_app", "--lease", "nan"], 2),
        (["--app", "worker_app", "--log-level", "loud"], 2),
        (["--app", "worker_app", "--dsn", "nonsense"], 2),
        ([], 2),
        (["--app", "worker_app", "--dsn", "dbname=template1"], 3),
        (["--app", "worker_app", "--dsn", "dbname=template1", "--processes", "2"], 3),
        (["--check", "--dsn", "dbname=template1"], 3),
        (["--check", "--dsn", "host=/nowhere"], 1),
        (["--check"], 0),
        (["--version"], 0),
    ],
)
def test_exit_codes(run, args, code) -> None:
    done = run("pgqueue.worker", *args)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout or done.stderr


def test_check_tells_a_missing_privilege(run, db, dsn) -> None:
    role = f"nobody_{db.info.dbname}"
    db.execute(f"create role {role} login")
    try:
        assert (
            run("pgqueue.worker", "--check", "--dsn", f"{dsn} user={role}").returncode
            == 1
        )
        db.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
        done = run("pgqueue.worker", "--check", "--dsn", f"{dsn} user={role}")
        assert (done.returncode, done.stdout[:3]) == (0, "ok:")
        assert "notified" in done.stdout
    finally:
        db.execute(f"drop owned by {role}; drop role {role}")


def test_signs_of_life(db, workers, tmp_path) -> None:
    file = tmp_path / "alive"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        address = str(tmp_path / "notify")
        systemd.bind(address)
        systemd.settimeout(20)
        worker = workers.start(
            "--health-file", str(file), env={"NOTIFY_SOCKET": address}
        )
        assert systemd.recv(100) == b"READY=1\nWATCHDOG=1"
        assert systemd.recv(100) == b"WATCHDOG=1"
        first = file.stat().st_mtime_ns
        wait_until(lambda: file.stat().st_mtime_ns > first)
        assert workers.finish(worker) == 0
        while (message := systemd.recv(100)) == b"WATCHDOG=1":
            pass
        assert message == b"STOPPING=1"


def test_a_server_that_comes_late_is_waited_for(db, dsn, workers) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind="mark")
    name = db.info.dbname
    with psycopg.connect(dbname="postgres", autocommit=True) as other:
        other.execute(f"alter database {name} allow_connections false")
        worker = workers.start()
        wait_until(lambda: "no server" in workers.log())
        other.execute(f"alter database {name} allow_connections true")
    wait_until(lambda: is_empty(db))
    assert list(workers.notes()) == [job]
    assert workers.finish(worker) == 0


def test_operator_commands(run, db) -> None:
    added = run(
        "pgqueue",
        "enqueue",
        "emails",
        '{"to": "ada"}',
        "--kind",
        "k",
        "--priority",
        "3",
    )
    job = int(added.stdout)
    row = db.execute(
        "select queue, kind, priority, payload from pgqueue.job"
    ).fetchone()
    assert row == ("emails", "k", 3, {"to": "ada"})
    status = run("pgqueue", "status").stdout.splitlines()
    assert status[0].split()[:2] == ["queue", "ready"]
    assert status[2].split()[:2] == ["emails", "1"]

    db.execute(
        "select pgqueue.fail(id, token, E'last line\\nline', permanent => true)"
        " from pgqueue.claim('emails', 'me')"
    )
    dead = run("pgqueue", "dead", "--queue", "emails").stdout
    assert str(job) in dead
    assert "last line" in dead
    assert str(job) not in run("pgqueue", "dead", "--queue", "other").stdout
    assert run("pgqueue", "redrive", "--dry-run").stdout == f"{job}\n"
    assert run("pgqueue", "redrive", "--kind", "other").stdout == ""
    assert run("pgqueue", "redrive", "--error-like", "%last%").stdout == f"{job}\n"
    assert one(db, "select state from pgqueue.jobs") == "ready"
    top = run("pgqueue", "top", "--times", "2", "--every", "0.1").stdout
    assert top.count("emails") == 2

    refused = run("pgqueue", "enqueue", "")
    assert (refused.returncode, "CONTEXT" in refused.stderr) == (1, False)
    assert run("pgqueue", "enqueue", "q", "{bad json").returncode == 2
    assert run("pgqueue", "status", "--dsn", "x").returncode == 2
    assert run("pgqueue", "--dsn", "dbname=template1", "status").returncode in (2, 3)


def test_importing_it_has_no_side_effects() -> None:
    code = (
        "import logging, threading, signal; before = signal.getsignal(signal.SIGTERM);"
        "import pgqueue; assert not logging.getLogger('pgqueue').handlers;"
        "assert threading.active_count() == 1; assert signal.getsignal(signal.SIGTERM) is before"
    )
    path = str(HERE.parents[1] / "python")
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True
    )
    assert time.monotonic() - began < 10
