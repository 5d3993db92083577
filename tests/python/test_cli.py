"""The two command lines, as a shell sees them."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pgqueue
import psycopg
import pytest
from conftest import column, one
from pgqueue.install import install
from worker_harness import QUEUE, is_empty, wait_until

pytest_plugins = ["worker_harness", "command_line"]

HERE = Path(__file__).resolve().parent


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


def test_environment_variables_replace_flags(run, db) -> None:
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


def test_a_json_log_line_names_the_job_it_is_about(run, db) -> None:
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


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "--app is required"),
        (["--app", "no_such_module"], "there is no module 'no_such_module'"),
        (["--app", ":x"], "MODULE or MODULE:NAME"),
        (["--app", ".x"], "MODULE or MODULE:NAME"),
        (["--app", b"\xff"], "not UTF-8"),
        (["--app", "worker_app", "--name", b"caf\xe9"], "not UTF-8: caf\\udce9"),
        (["--app", "worker_app", "--concurrency", "0"], "--concurrency"),
        (["--app", "worker_app", "--batch", "-1"], "--batch"),
        (["--app", "worker_app", "--lease", "nan"], "--lease"),
        (["--app", "worker_app", "--log-level", "loud"], "--log-level"),
        (["--app", "worker_app", "--log-format", "xml"], "--log-format"),
        (["--app", "worker_app", "--dsn", "nonsense"], "connection info string"),
        (["--app", "worker_app:empty", "--only-known"], "the app has no handler"),
        (["--app", "worker_app", "--queue", ","], "--queue names no queue"),
        (["--app", "worker_app", "--queue", "=3"], "a queue needs a name"),
        *(
            (["--app", "worker_app", "--queue", f"b,{bad}"], f"{bad!r}: weights")
            for bad in ("a=0", "a=x", "a=", "a=1000000", "a=1:0", "a:0", "a:-1")
        ),
    ],
)
def test_a_wrong_command_line_is_explained_and_exits_with_2(run, args, said) -> None:
    done = run("pgqueue.worker", *args)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_queue_name_may_contain_a_colon_or_an_equals_sign(run, db) -> None:
    for queue in "tenant:eu", "tenant:42", "a=b", "plain":
        pgqueue.enqueue(db, queue, kind="noop")
    queues = "tenant:eu,tenant:42=1,a=b=2:3,plain:9"
    worker = ("pgqueue.worker", "--app", "worker_app", "--burst", "--queue", queues)
    done = run(*worker)
    assert done.returncode == 0, done.stderr
    assert one(db, "select count(*) from pgqueue.job") == 0
    assert "ends: 4 completed" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("BURST", "maybe", "PGQUEUE_BURST must be one of"),
        ("LOG_FORMAT", "xml", "PGQUEUE_LOG_FORMAT must be one of text, json"),
        ("LOG_LEVEL", "loud", "PGQUEUE_LOG_LEVEL must be one of"),
        ("QUEUE", "a=0", "weights and limits"),
        ("CONCURRENCY", "many", "--concurrency"),
        ("NAME", "\udcff", "not UTF-8"),
    ],
)
def test_a_variable_is_checked_like_its_flag(run, variable, value, said) -> None:
    done = run("pgqueue.worker", "--check", **{f"PGQUEUE_{variable}": value})
    assert done.returncode == 2
    assert said in done.stderr


def test_a_switch_variable_that_says_off_or_is_empty_is_off(run, db) -> None:
    worker = ("pgqueue.worker", "--app", "worker_app", "--max-jobs", "1")
    for value in "off", "":
        pgqueue.enqueue(db, "default", kind="noop")
        pgqueue.enqueue(db, "default", kind="no such kind", priority=1)
        done = run(*worker, PGQUEUE_ONLY_KNOWN=value, PGQUEUE_LOG_LEVEL="")
        assert done.returncode == 0, done.stderr
        assert "no handler for the kind" in done.stderr
        db.execute("truncate pgqueue.job")
    pgqueue.enqueue(db, "default", kind="noop")
    pgqueue.enqueue(db, "default", kind="no such kind", priority=1)
    done = run(*worker, PGQUEUE_ONLY_KNOWN="on", PGQUEUE_LOG_LEVEL="INFO")
    assert "ends: 1 completed" in done.stderr


BROKEN = {
    "x = 1\nraise ValueError('no config')\n": ("line 2", "ValueError: no config"),
    "x = 1\n\ndef f(:\n    pass\n": ("line 3", "SyntaxError"),
    "import json\nimport no_such_thing\n": ("line 2", "No module named"),
    "\nfrom json import no_such_name\n": ("line 2", "ImportError"),
    "import pgqueue\npgqueue.App().jobs\n": ("line 2", "AttributeError"),
}


@pytest.mark.parametrize("source", BROKEN)
def test_an_error_in_the_app_module_is_shown_with_file_and_line(
    run, tmp_path, source
) -> None:
    (tmp_path / "broken.py").write_text(source)
    done = run("pgqueue.worker", "--app", "broken")
    assert done.returncode == 2
    line, said = BROKEN[source]
    assert f'File "{tmp_path}/broken.py", {line}' in done.stderr
    assert said in done.stderr
    for ours in ("importlib", "options.py"):
        assert ours not in done.stderr


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("worker_app:nothing", "there is no 'nothing' in "),
        ("command_line", "there is no 'app' in "),
        ("worker_app:note", "'note' in {} is not a pgqueue.App but a function"),
    ],
)
def test_an_app_name_that_is_no_app_is_reported_with_its_file(run, app, said) -> None:
    done = run("pgqueue.worker", "--app", app)
    file = HERE / f"{app.partition(':')[0]}.py"
    assert done.returncode == 2
    assert said.format(file) in done.stderr
    assert str(file) in done.stderr


def test_burst_ends_with_a_count_of_each_outcome(run, db) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind="noop")
    pgqueue.enqueue(db, QUEUE, kind="reject")
    worker = ("pgqueue.worker", "--app", "worker_app", "-q", QUEUE, "--burst")
    (said,) = re.findall(r"ends: (.*)", run(*worker).stderr)
    assert set(said.split(", ")) == {"3 completed", "1 dead"}
    assert "ends: no jobs" in run(*worker).stderr


def test_check_names_the_grant_that_is_missing(run, db, dsn, role) -> None:
    check = ("pgqueue.worker", "--check", "--dsn", f"{dsn} user={role}")
    done = run(*check)  # it cannot even use the schema
    assert (done.returncode, "grant_access(role, 'worker')" in done.stdout) == (1, True)
    db.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    done = run(*check)
    assert (done.returncode, "grant_access(role, 'worker')" in done.stdout) == (1, True)
    db.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
    done = run(*check)
    assert (done.returncode, done.stdout[:3]) == (0, "ok:")
    assert "notified" in done.stdout


def test_check_fails_while_the_database_is_read_only(run, db) -> None:
    limit = f"alter database {db.info.dbname} %s default_transaction_read_only"
    db.execute(limit % "set" + " = on")
    done = run("pgqueue.worker", "--check")
    assert (done.returncode, "failed: the database is read-only" in done.stdout) == (
        1,
        True,
    )
    db.execute(limit % "reset")
    assert run("pgqueue.worker", "--check").returncode == 0


def test_a_command_names_the_grant_that_is_missing(run, dsn, role) -> None:
    commands = {
        "producer": ("enqueue q",),
        "reader": ("status", "top --times 1", "why 1", "metrics"),
        "operator": ("pause q", "dead"),
    }
    for kind, args in ((k, c.split()) for k, each in commands.items() for c in each):
        done = run("pgqueue", "--dsn", f"{dsn} user={role}", *args)
        assert done.returncode == 1
        assert f"grant_access(role, '{kind}')" in done.stderr


def test_no_control_character_of_a_job_reaches_the_log(run, db, tmp_path) -> None:
    nasty = "a\x1b]0;x\x07\x1b[31m\r\nb\x9b\u202e"
    (tmp_path / "nasty.py").write_text(
        "import pgqueue\n"
        "app = pgqueue.App()\n"
        f"@app.job({nasty!r})\n"
        "def handler():\n"
        f"    raise ValueError({nasty!r})\n"
    )
    pgqueue.enqueue(db, nasty, kind=nasty, max_attempts=1)
    pgqueue.enqueue(db, nasty, kind=f"{nasty} unknown")
    worker = ("pgqueue.worker", "--app", "nasty", "--burst", "--queue", nasty)
    done = run(*worker, "--name", nasty)
    assert done.returncode == 0
    assert " 1 dead" in done.stderr
    assert not [c for c in done.stderr if not c.isprintable() and c != "\n"]
    assert "ValueError: a" + r"\x1b]0;x\x07\x1b[31m" in done.stderr
    # Text of a job must not look like a line of the log.
    stamp = r"\d{4}-\d\d-\d\d .* (INFO|WARNING|ERROR) "
    for line in done.stderr.splitlines():
        assert re.match(stamp, line) or line.startswith("    "), line


def test_a_worker_waits_for_a_server_that_is_not_up_yet(db, dsn, workers) -> None:
    job = pgqueue.enqueue(db, QUEUE, kind="mark")
    name = db.info.dbname
    with psycopg.connect(dbname="postgres", autocommit=True) as other:
        other.execute(f"alter database {name} allow_connections false")
        worker = workers.start()
        wait_until(lambda: "waits for the server" in workers.log())
        other.execute(f"alter database {name} allow_connections true")
    wait_until(lambda: is_empty(db))
    assert list(workers.notes()) == [job]
    assert workers.finish(worker) == 0


def test_importing_the_package_has_no_side_effects() -> None:
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


@pytest.mark.parametrize("how", ["extension", "plain"])
def test_install_called_twice_installs_once(run, db, how) -> None:
    db.execute("drop extension pgqueue")
    args = ("pgqueue", "install", *(["--plain"] if how == "plain" else []))
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert how in done.stdout
    found = one(db, "select count(*) from pg_extension where extname = 'pgqueue'")
    assert found == (how == "extension")
    assert "already installed" in run(*args).stdout
    job = pgqueue.enqueue(db, "q")
    assert column(db, "select id from pgqueue.claim('q', 'w')") == [job]


@pytest.mark.parametrize("how", ["extension", "plain"])
def test_of_two_concurrent_installs_the_second_waits_and_installs_nothing(
    run, db, connect, how
) -> None:
    db.execute("drop extension pgqueue")
    other = connect()
    waits = "select count(*) from pg_stat_activity where wait_event = 'advisory'"
    with ThreadPoolExecutor() as pool:
        with other.transaction():
            install(other, plain=how == "plain")
            second = pool.submit(run, "pgqueue", "install", "--plain")
            wait_until(lambda: one(db, waits) == 1 or second.done())
        done = second.result()
    assert (done.returncode, "already installed" in done.stdout) == (0, True), (
        done.stderr
    )
