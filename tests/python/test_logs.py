"""What a worker logs: each line at WARNING and above is in the table of docs/reference/worker.md,
can be seen, and comes once; and nothing that a job brings with it can forge one."""

import ast
import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import documents
import pgqueue
import psycopg
import pytest
from pgqueue.worker import finisher, lines, seldom, supervisor
from worker_harness import QUEUE, outcomes, wait_until

pytest_plugins = ["worker_harness", "command_line"]

PACKAGE = Path(pgqueue.__file__).parent
SECTION = documents.text("docs/reference/worker.md")
LEVELS = {"warning", "error", "critical", "exception"}
ENDED = "%s: %s%s"  # how an attempt ended, at a level that depends on it
NO_RETRY = "select pgqueue.configure(null, retry_base => '1 hour')"
# At the beginning of a line of text; what is below it is indented.
STAMP = r"\d{4}-\d\d-\d\d [\d:,]+[+-]\d{4} \d+ (DEBUG|INFO|WARNING|ERROR) "


def logged() -> list[tuple[str, str]]:
    """Find levels and texts of all lines in the code that may be at WARNING or above.

    Those whose level is computed are at WARNING, unless they have just been said.
    """
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    ast.Attribute(ast.Name("log" | "logger" | "logging"), how), args
                ) if how in LEVELS | {"log"}:
                    text = args[how == "log"]
                    assert isinstance(text, ast.Constant), ast.unparse(node)
                    level = "WARNING" if how == "log" else how.upper()
                    found.append((level, text.value))
    found.remove(("WARNING", ENDED))
    for status, number in finisher.LEVELS.items():
        found.append((logging.getLevelName(number), f"%s: {status}"))
    return found


def test_the_table_has_every_line_at_warning_and_above_and_no_other() -> None:
    rows = documents.table(SECTION, "level", "line")
    told = [(level, documents.quoted(line)[0]) for level, line, _ in rows]
    assert len(told) == len(set(told)) >= 20
    assert set(told) == set(logged())
    assert all(len(meaning) > 20 for *_, meaning in rows)


def messages(log: str, level: str) -> list[str]:
    """List the messages of a level, of a log in the format text."""
    lines = (line.partition(f" {level} ") for line in log.splitlines())
    return [message for _, found, message in lines if found]


# How attempts end

ENDS = """
import pgqueue
app = pgqueue.App()

@app.job("lost")
def lost():
    raise pgqueue.LeaseLost("another one has it")

@app.job("dead")
def dead():
    raise pgqueue.Reject("never")

@app.job("retry")
def retry():
    raise ValueError("not now")

@app.job("planned")
def planned():
    raise pgqueue.Retry(after=60)

@app.job("completed")
def completed():
    pass
"""


def test_each_attempt_has_one_line_at_its_level_and_one_traceback_if_it_failed(
    run, db, tmp_path
) -> None:
    db.execute("select pgqueue.configure(null, retry_base => '1 hour', lease => '1 s')")
    (tmp_path / "ends.py").write_text(ENDS)
    kinds = "lost", "dead", "retry", "planned", "completed"
    jobs = {pgqueue.enqueue(db, "default", kind=kind): kind for kind in kinds}
    done = run(
        "pgqueue.worker", "--app", "ends", "--max-jobs", "5", "--log-format=json"
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    of = {jobs[line["job_id"]]: line for line in lines if "job_id" in line}
    assert len(of) == len([line for line in lines if "job_id" in line]) == 5
    assert {kind: line["level"] for kind, line in of.items()} == {
        "lost": "warning",
        "dead": "error",
        "retry": "warning",
        "planned": "info",
        "completed": "info",
    }
    assert {kind for kind, line in of.items() if "error" in line} == {"dead", "retry"}
    assert of["retry"]["error"].count("Traceback") == 1
    assert of["retry"]["error"].endswith("ValueError: not now\n")
    assert of["lost"]["message"].endswith("attempt 1: lost: its lease had expired")
    for line in of.values():
        for field in "job_id", "kind", "queue", "attempt", "token", "ms":
            assert f"`{field}`" in SECTION
            assert field in line


LONG_ERRORS = """
import logging.config
import pgqueue
logging.config.dictConfig({"version": 1})  # and so disables all loggers that there are
app = pgqueue.App()

def deep_down():
    raise ValueError("x" * 100_000_000)

@app.job("long")
def long():
    deep_down()
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_error_of_any_length_shows_its_stack_in_a_log_of_some_kilobytes(
    run, db, tmp_path, form
) -> None:
    (tmp_path / "long_errors.py").write_text(LONG_ERRORS)
    pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind="long", max_attempts=1)
    args = "--app", "long_errors", "-q", QUEUE, "--burst", "--log-format", form
    log = run("pgqueue.worker", *args).stderr
    assert len(log) < 30_000 and " works on " in log
    assert log.count("in deep_down") == log.count("100000013 characters") == 3
    for error in db.execute("select error from pgqueue.dead_job"):
        assert "in deep_down" in error[0]


def test_a_job_that_has_not_begun_and_is_given_back_has_no_line(db, workers) -> None:
    jobs = pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind="no such")
    assert workers.start("--burst").wait(30) == 0
    first, *others = [line for line in workers.log().splitlines() if "job " in line]
    assert f"WARNING no handler for the kind of job {jobs[0]} 'no such'" in first
    assert others == []


def test_jobs_too_quick_for_a_line_each_are_counted(db, workers) -> None:
    """None of them is left out: it has its line, or is in a count."""
    pgqueue.enqueue_many(db, QUEUE, [None] * 20_000, kind="noop")
    assert workers.start("--burst").wait(60) == 0
    said = messages(workers.log(), "INFO")
    counts = [int(n) for n in re.findall(r"(\d+) jobs completed in", "\n".join(said))]
    assert counts
    alone = sum(line.endswith(": completed") for line in said)
    assert sum(counts) + alone == 20_000
    assert "ends: 20000 completed" in said[-1]


# Outages, and what is said again and again


def test_an_outage_is_said_once_and_its_end_once(db, dsn, workers) -> None:
    with psycopg.connect(dbname="postgres", autocommit=True) as other:
        name = db.info.dbname
        other.execute(f"alter database {name} allow_connections false")
        worker = workers.start("-v")
        wait_until(lambda: workers.log().count(" waits for the server") > 6)
        other.execute(f"alter database {name} allow_connections true")
    wait_until(lambda: "the server answers again" in workers.log())
    assert workers.finish(worker) == 0
    (said,) = messages(workers.log(), "WARNING")
    assert re.search("waits for the server: .*not currently accepting", said)
    (over,) = [m for m in messages(workers.log(), "INFO") if "answers again" in m]
    assert re.fullmatch(r"the server answers again, after \d+\.\d s", over)


def test_an_outage_is_over_when_the_last_part_has_the_server_again(caplog) -> None:
    caplog.set_level(logging.DEBUG, "pgqueue")
    outages, refused = seldom.Outages(), psycopg.OperationalError("refused")
    outages.is_over("dispatcher")
    for part in "dispatcher", "heartbeat", "dispatcher":
        outages.failed(part, refused)
    outages.failed("dispatcher", psycopg.OperationalError("starting\n up \x1b"))
    outages.is_over("heartbeat")
    outages.failed("dispatcher", refused)
    outages.is_over("dispatcher")
    outages.failed("finisher", refused)  # said within the last minute
    outages.is_over("finisher")
    levels = "WARNING DEBUG DEBUG WARNING DEBUG INFO DEBUG".split()
    assert [record.levelname for record in caplog.records] == levels
    assert caplog.messages[0] == "dispatcher waits for the server: refused"
    assert caplog.messages[3].endswith(r"server: starting up \x1b")


def test_what_lasts_is_said_again_and_what_is_remembered_is_bounded(
    monkeypatch,
) -> None:
    said: dict[object, float] = {}
    monkeypatch.setattr(seldom, "_said", said)
    first, again, other = map(seldom.level_of, ("a", "a", "b"))
    assert (first, again, other) == (logging.WARNING, logging.DEBUG, logging.WARNING)
    said["a"] -= seldom.AGAIN
    assert seldom.level_of("a") == logging.WARNING
    for number in range(3000):
        assert seldom.level_of(number) == logging.WARNING
    assert len(said) <= seldom.MOST


def test_a_child_that_cannot_live_is_restarted_less_and_less_often() -> None:
    parent = supervisor.Supervisor(1, burst=False, shutdown_timeout=30.0)
    for _ in range(8):
        process = subprocess.Popen(["false"])
        end, _ = socket.socketpair()
        child = supervisor.Child(process, end, time.monotonic())
        parent._children.append(child)
        parent._ended(child, process.wait(20))
    began, *later = parent._start_at
    waits = [moment - began for moment in later]
    assert waits == sorted(waits)
    assert 25 < waits[-1] < 40
    assert waits[1] < 5


# A log that nobody reads, or that fails


def test_a_log_that_nobody_reads_holds_up_no_job_and_no_end(db, workers) -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 1000)
        os.set_blocking(writer, True)
        worker = workers.start("--log-level", "debug", output=writer)
        for _ in range(30):
            pgqueue.enqueue(db, QUEUE, kind="mark")
        wait_until(lambda: outcomes(db) == {"completed": 30})
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        os.close(reader)
        os.close(writer)


def test_lines_beyond_what_may_wait_are_dropped_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(lines, "MOST", 10_000)
    reader, writer = os.pipe()
    with os.fdopen(reader) as read, os.fdopen(writer, "w") as stream:
        handler = lines.handler_of(stream)
        handler.setFormatter(lines.TextLines())
        log = logging.getLogger("pgqueue")
        monkeypatch.setattr(log, "handlers", [handler])
        for number in range(3000):
            log.error("%s %s", number, "x" * 100)
        found, dropped = [], 0
        while len(found) + dropped < 3000:
            line = read.readline()
            number = int(line.split()[4])
            if "were dropped" in line:
                dropped += number
            else:
                found.append(number)
    assert found == sorted(found)
    assert dropped > 1000


def test_a_child_of_a_handler_that_forks_can_log(monkeypatch, tmp_path) -> None:
    with (tmp_path / "log").open("w") as stream:
        handler = lines.handler_of(stream)
        monkeypatch.setattr(logging.getLogger("pgqueue"), "handlers", [handler])
        if not (pid := os.fork()):
            logging.getLogger("pgqueue").error("from the child")
            os._exit(0)
        os.waitpid(pid, 0)
    assert (tmp_path / "log").read_text() == "from the child\n"


def test_a_handler_of_the_log_that_raises_costs_no_job(db, workers) -> None:
    (workers.folder / "slack.py").write_text(
        "import logging\n"
        "from worker_app import app\n"
        "class Slack(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        raise ConnectionError('slack is down')\n"
        "logging.getLogger().addHandler(Slack())\n"
    )
    worker = workers.start("--app", "slack")
    pgqueue.enqueue(db, QUEUE, kind="nobody's")
    pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: outcomes(db).get("completed") == 1)
    wait_until(lambda: "the log has failed: ConnectionError" in workers.log())
    assert workers.finish(worker) == 0


# Lines that no other test causes


def test_a_connection_that_a_handler_does_not_get_is_said_and_its_job_put_off(
    db, dsn, role, workers
) -> None:
    db.execute("create table effect (job_id bigint)")
    db.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
    db.execute(f"grant all on effect to {role}")
    db.execute(f"alter role {role} connection limit 3")  # those of a busy worker
    worker = workers.start(dsn=f"{dsn} user={role}")
    parts = "select count(*) from pg_stat_activity where usename = %s"
    pgqueue.enqueue(db, QUEUE, kind="hold")
    wait_until(lambda: db.execute(parts, (role,)).fetchone() == (3,))
    pgqueue.enqueue(db, QUEUE, kind="effect")
    wait_until(lambda: "no connection for a handler, put off: " in workers.log())
    db.execute(f"alter role {role} connection limit 9")
    workers.let_go()
    wait_until(lambda: outcomes(db) == {"completed": 2})
    assert workers.finish(worker) == 0
    said = Counter(m.partition(":")[0] for m in messages(workers.log(), "WARNING"))
    assert said == {"no connection for a handler, put off": 1}


def test_an_exception_that_ends_a_task_of_a_handler_is_said_with_its_traceback(
    db, workers
) -> None:
    pgqueue.enqueue(db, QUEUE, kind="exit_in_left_task")
    worker = workers.start()
    wait_until(lambda: "WARNING SystemExit in a task of a handler" in workers.log())
    wait_until(lambda: "in exiting\n" in workers.log())
    assert workers.finish(worker) == 0


def test_the_slot_of_a_handler_that_returns_after_its_timeout_is_said_to_be_free(
    db, workers
) -> None:
    db.execute(NO_RETRY)
    (workers.folder / "late.py").write_text(
        "import time, pgqueue\napp = pgqueue.App()\n"
        "@app.job('late', timeout=0.1)\ndef late():\n    time.sleep(1)\n"
    )
    job = pgqueue.enqueue(db, QUEUE, kind="late")
    workers.start("--app", "late")
    free = f"job {job} 'late' of {QUEUE!r}, attempt 1 has returned: its slot is free"
    wait_until(lambda: free in messages(workers.log(), "INFO"))
    said = messages(workers.log(), "WARNING")
    assert [text for text in said if text.endswith("runs in its slot")] == said[:1]


def test_attempts_that_are_given_up_and_why_the_worker_stops_are_said(
    db, workers
) -> None:
    db.execute(NO_RETRY)
    pgqueue.enqueue(db, QUEUE, kind="hang")
    share = f"{QUEUE}=2:3"
    worker = workers.start("--shutdown-timeout=0.2", "--lease=20", "-q", share)
    workers.began()
    assert workers.finish(worker) == 0
    started, stops, *_ = messages(workers.log(), "INFO")
    assert f" works on {share}, 10 at once, lease 20 s, pgqueue " in started
    assert stops.endswith(" is stopping, told by SIGTERM; unfinished jobs: 1")
    gives_up, failed = messages(workers.log(), "WARNING")
    assert gives_up == "giving up 1 unfinished attempts, for lack of time"
    assert "attempt 1: retry: WorkerStopped" in failed


def test_an_error_that_ends_a_worker_is_one_object_with_its_traceback(
    db, workers
) -> None:
    (workers.folder / "broken.py").write_text(
        "import pgqueue\napp = pgqueue.App()\n"
        "@app.on_startup\ndef start():\n    raise ValueError('cannot start')\n"
    )
    worker = workers.start("--app", "broken", "--log-format", "json")
    assert worker.wait(30) == 1
    lines = [json.loads(line) for line in workers.log().splitlines()]
    (failed,) = [line for line in lines if line["level"] == "error"]
    assert failed["message"].endswith(" has failed: cannot start")
    assert "in start\n" in failed["error"]


def test_a_database_without_pgqueue_is_said_as_an_error(run) -> None:
    args = "--app worker_app --dsn dbname=template1".split()
    done = run("pgqueue.worker", *args)
    assert done.returncode == 3
    (said,) = messages(done.stderr, "ERROR")
    assert " has failed: install or update pgqueue: " in said


def test_an_embedded_worker_that_fails_says_so_at_once(dsn, role, caplog) -> None:
    async def serve() -> None:
        worker = pgqueue.Worker(pgqueue.App(), {"q": 1}, dsn=f"{dsn} user={role}")
        async with worker.running():
            await asyncio.to_thread(wait_until, lambda: "has failed" in caplog.text)

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        asyncio.run(serve())
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "grant_access(role, 'worker')" in record.message
    assert not record.exc_info


def test_a_worker_that_may_not_schedule_says_which_access_it_lacks(
    db, dsn, role, caplog
) -> None:
    db.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
    app = pgqueue.App()
    app.job("tick", queue="q", cron="@daily")(lambda: None)

    async def serve() -> None:
        async with pgqueue.Worker(app, {"q": 1}, dsn=f"{dsn} user={role}").running():
            await asyncio.to_thread(wait_until, lambda: "has failed" in caplog.text)

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        asyncio.run(serve())
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "grant_access(role, 'scheduler')" in record.message
    db.execute("select pgqueue.schedule('tick', 'q', cron => '@daily')")
    db.execute("select pgqueue.grant_access(%s, 'scheduler')", (role,))
    caplog.clear()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        asyncio.run(serve())
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "belongs to role postgres" in record.message
    assert "grant_access" not in record.message


# Hostile text

NASTY = (
    'a\x1b[31m\r\n{"level": "error"}\n2026-01-01 00:00:00,000 1 ERROR b\x85\u2028\x00'
)


# Postgres stores no NUL, and a comma ends the name of a queue on the command line.
NAME = NASTY.replace("\0", "").replace(",", "")


SAYS = f"""
import logging
import pgqueue
app = pgqueue.App()
log = logging.getLogger("shop")

@app.job("says")
def says():
    exec(compile("log.warning('here', stack_info=True)", {NAME!r}, "exec"))
    for trace in 7, "mine":
        try:
            raise ValueError("theirs")
        except ValueError:
            log.exception("traced", extra={{"trace": trace}})
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_an_application_logs_beside_a_message_is_shown_and_forges_no_line(
    run, db, tmp_path, form
) -> None:
    (tmp_path / "saying.py").write_text(SAYS)
    pgqueue.enqueue(db, QUEUE, kind="says", max_attempts=1)
    args = "--app", "saying", "-q", QUEUE, "--burst", "--log-format", form
    log = run("pgqueue.worker", *args).stderr
    assert " 1 completed" in log
    assert not [c for c in log if not c.isprintable() and c != "\n"]
    lines = log.splitlines()
    if form == "json":
        said = [json.loads(line) for line in lines]
        (here,) = [line for line in said if line["message"] == "here"]
        assert "in says\n" in here["stack"]
        errors = [line["error"] for line in said if line["message"] == "traced"]
        assert len(errors) == 2
        assert all(error.endswith("ValueError: theirs\n") for error in errors)
    else:
        assert [i for i in lines if not re.match(f"{STAMP}|    ", i)] == []
        assert log.count("in says\n") == log.count("ValueError: theirs\n") + 1 == 3


def enqueue_nasty(db) -> pgqueue.App:
    """Enqueue jobs whose kind, queue and error are hostile; return their app."""
    app = pgqueue.App()

    @app.job(NAME)
    def handler() -> None:
        raise ValueError(NASTY)

    pgqueue.enqueue(db, NAME, kind=NAME, max_attempts=1)
    pgqueue.enqueue(db, NAME, kind=f"{NAME} unknown")
    return app


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_text_of_a_job_forges_a_line(run, db, tmp_path, form) -> None:
    (tmp_path / "nasty.py").write_text(
        "import pgqueue\n"
        "app = pgqueue.App()\n"
        f"@app.job({NAME!r})\n"
        "def handler():\n"
        f"    raise ValueError({NASTY!r})\n"
    )
    enqueue_nasty(db)
    args = ["--queue", f"{NAME}=1", "--name", NAME, "--log-format", form]
    done = run("pgqueue.worker", "--app", "nasty", "--burst", *args)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.split("\n")[:-1]
    assert not [c for line in lines for c in line if not c.isprintable()]
    if form == "json":
        levels = [json.loads(line)["level"] for line in lines]
    else:
        assert [i for i in lines if not re.match(f"{STAMP}|    ", i)] == []
        levels = [m[1].lower() for line in lines if (m := re.match(STAMP, line))]
    assert levels == ["info", "warning", "error", "info"]


def test_no_message_of_an_embedded_worker_has_a_control_character(
    db, dsn, caplog
) -> None:
    """The formatter is that of the application, and may escape nothing."""
    caplog.set_level(logging.INFO, "pgqueue")
    app = enqueue_nasty(db)
    worker = pgqueue.Worker(app, {NAME: 1}, dsn=dsn, burst=True)
    thread = threading.Thread(target=worker.run)
    thread.start()
    thread.join(30)
    of_jobs = [r.getMessage() for r in caplog.records if hasattr(r, "job_id")]
    assert len(of_jobs) == 2
    assert all(message.isprintable() for message in of_jobs)
