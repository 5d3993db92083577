"""python -m pgqueue, as an operator's shell sees it."""

import json
import os
import re
import subprocess
import sys

import pgqueue
import pytest
from conftest import column, one
from forked import PATH

pytest_plugins = ["command_line"]

# Text that would set the terminal's title or colour, start a line, or run from right to left.
NASTY = "a\x1b]0;x\x07\x1b[31m\r\nb\x9b\u202e"


def kill(db, queue: str, error: str = "ValueError: bad\n\nTraceback ...") -> None:
    """Make every job of a queue a dead job."""
    db.execute(
        "select pgqueue.fail(id, token, %s, permanent => true)"
        " from pgqueue.claim(%s, 'me', 5000)",
        (error, queue),
    )


def test_enqueue_adds_a_job_and_prints_its_id(run, db) -> None:
    options = "--kind k --priority 3 --max-attempts 2 --unique-key u --group-key g"
    options += " --unique-for 1h"
    done = run("pgqueue", "enqueue", "emails", '{"to": "ada"}', *options.split())
    query = (
        "select id, queue, kind, priority, max_attempts, unique_key, group_key, payload"
        " from pgqueue.job"
    )
    assert db.execute(query).fetchall() == [
        (int(done.stdout), "emails", "k", 3, 2, "u", "g", {"to": "ada"})
    ]
    assert column(db, "select unique_key from pgqueue.recent_key") == ["u"]


@pytest.mark.parametrize("style", ["sql_standard", "iso_8601", "postgres_verbose"])
def test_the_settings_of_the_session_change_no_command(run, db, style) -> None:
    """As of a role or a database: psycopg would read no interval in these styles."""
    job = pgqueue.enqueue(db, "q")
    db.execute("select pgqueue.complete(id, token) from pgqueue.claim('q', 'me')")
    pgqueue.enqueue(db, "q")
    db.execute("select pgqueue.claim('q', 'me')")
    pgqueue.enqueue(db, "q")
    dead = pgqueue.enqueue(db, "dead")
    kill(db, "dead")
    options = f"-c intervalstyle={style} -c datestyle=German -c search_path=public"
    commands = [
        ["status"],
        ["status", "--json"],
        ["top", "--times", "1"],
        ["error", str(dead)],
        ["dead"],
        ["why", str(job)],
        ["health", "--all"],
    ]
    for args in commands:
        done = run("pgqueue", *args, PGOPTIONS=options)
        assert (done.returncode, done.stderr) == (0, ""), args


@pytest.mark.parametrize(
    "payload",
    ["null", '"a"', "0", "[null]", '{"a": null}', "[12345678901234567.10]"],
)
def test_a_payload_is_stored_as_it_is_typed(db, run, payload) -> None:
    done = run("pgqueue", "enqueue", "q", payload)
    assert (done.returncode, done.stderr) == (0, "")
    assert one(db, "select payload::text from pgqueue.job") == payload


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["enqueue", "q", "hello"], 2, "payload must be JSON"),
        (["enqueue", "q", "[" * 100_000], 2, "payload must be JSON"),
        (["enqueue", "q", "NaN"], 2, "payload must be JSON: it has no NaN"),
        (["enqueue", ""], 1, "queue"),
        (["enqueue", b"\xff"], 2, "not UTF-8"),
        (["enqueue", "q", "--priority", "99999999999"], 2, "out of range"),
        (["enqueue", "q", "--priority", "101"], 1, "priority must be -100 to 100"),
        (["enqueue", "q", "--run-at", "soon"], 1, '"soon"'),
        (["enqueue", "q", "--unique-for", "1 hour"], 1, "needs a unique_key"),
        (["dead", "--limit", "99999999999"], 2, "out of range"),
        (["cancel", "9" * 20], 2, "out of range"),
        (["cancel", "one"], 2, "not a whole number"),
        (["top", "--every", "inf"], 2, "not a number of seconds"),
        (["top", "--every", "-1"], 2, "not a number of seconds"),
        (["move-groups", "--wait", "nan"], 2, "not a number of seconds"),
        (["cancel", "1"], 1, "job 1 not found"),
        (["discard", "1"], 1, "dead job 1 not found"),
        (["why", "1"], 1, "job 1 not found"),
        (["error", "1"], 1, "no such job"),
        (["--dsn", "nonsense", "status"], 2, "connection info string"),
        (["--dsn", "nonsense", "health"], 3, "connection info string"),
        (["--dsn", "host=/nowhere", "health"], 3, "/nowhere"),
        (["--dsn", "dbname=template1", "health"], 3, "install"),
        (["--dsn", "host=/nowhere", "status"], 1, "/nowhere"),
        (["--dsn", "dbname=template1", "status"], 3, "install"),
        (["--dsn", "dbname=template1", "enqueue", "q"], 3, "install"),
    ],
)
def test_an_error_is_explained_without_a_traceback(run, args, code, said) -> None:
    done = run("pgqueue", *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    for noise in "Traceback", "CONTEXT", "LINE 1":
        assert noise not in done.stderr


def test_dead_and_redrive_find_a_dead_job_and_send_it_back(run, db) -> None:
    job = pgqueue.enqueue(db, "emails", kind="k")
    status = run("pgqueue", "status").stdout.splitlines()
    assert status[0].split()[:2] == ["queue", "ready"]
    assert status[2].split()[:2] == ["emails", "1"]
    kill(db, "emails", "ValueError: bad thing\n\nat the end")
    dead = run("pgqueue", "dead", "--queue", "emails").stdout
    assert dead.splitlines()[2].split()[0] == str(job)
    assert "ValueError: bad thing" in dead
    assert "at the end" not in dead
    assert len(run("pgqueue", "dead", "--queue", "other").stdout.splitlines()) == 2

    dry = run("pgqueue", "redrive", "--dry-run")
    assert dry.stdout == f"{job}\n"
    assert "1 of the dead jobs to redrive: ValueError: bad thing" in dry.stderr
    for other in (
        ["--kind", "other"],
        ["--queue", "other"],
        ["--error-like", "%the end%"],
    ):
        assert run("pgqueue", "redrive", *other).stdout == ""
    done = run("pgqueue", "redrive", "--error-like", "%Bad%")
    assert (done.stdout, done.stderr) == (f"{job}\n", "")
    assert one(db, "select state from pgqueue.jobs") == "ready"


def test_status_draws_how_far_the_jobs_are_that_tell(run, db) -> None:
    pgqueue.enqueue_many(db, "q", [None] * 3)
    claim = "select id, token from pgqueue.claim('q', 'w', 3) order by id"
    first, second, _ = db.execute(claim).fetchall()
    assert "#" not in run("pgqueue", "status").stdout
    db.execute("select pgqueue.progress(%s, %s, 299, 1000, 'reads')", first)
    db.execute("select pgqueue.progress(%s, %s, 31)", second)
    shown = run("pgqueue", "status").stdout
    assert f"{'#' * 5 + '.' * 15} 29 %" in shown
    assert "reads" in shown
    assert " 31 " in shown


def test_health_says_what_is_wrong_as_a_plugin_of_a_monitoring_system_does(
    run, db, role
) -> None:
    done = run("pgqueue", "health")
    said = "ok: 28 checks have found nothing wrong\n"
    assert (done.returncode, done.stdout) == (0, said)
    assert "ok: waits: " in run("pgqueue", "health", "--all").stdout
    assert "3 unknown" in run("pgqueue", "health", "--help").stdout
    pgqueue.enqueue(db, NASTY)
    for minutes, code, status in (6, 1, "warning"), (21, 2, "critical"):
        past = f"update pgqueue.job set run_at = now() - interval '{minutes} min'"
        db.execute(past)
        done = run("pgqueue", "health")
        assert done.returncode == code
        waits, hint, workers, _ = done.stdout.splitlines()
        assert waits.startswith(f"{status}: waits: queue a\\x1b]0;x")
        assert hint == "    select pgqueue.why(1)"
        assert workers.startswith(f"{status}: workers: queue a\\x1b]0;x")
    done = run("pgqueue", "health", PGUSER=role)
    assert (done.returncode, done.stdout) == (3, "")
    assert "grant_access(role, 'reader')" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["--dsn", "{0};{1}", "status"],
        ["status", "--dsn", "{0};{1}"],
        ["--dsn", "{0}", "status", "--dsn", "{1}"],
    ],
)
def test_databases_are_named_before_or_after_the_command(run, db, args) -> None:
    dsns = (f"dbname={db.info.dbname}", "dbname=template1")
    done = run("pgqueue", *(arg.format(*dsns) for arg in args))
    assert f"-- {db.info.dbname}" in done.stdout
    assert "-- template1" in done.stdout


@pytest.mark.parametrize("age", [6, 21])
def test_a_database_that_cannot_be_asked_hides_nothing_critical(run, db, age) -> None:
    pgqueue.enqueue(db, "q")
    db.execute(f"update pgqueue.job set run_at = now() - interval '{age} min'")
    these = ("--dsn", f"dbname={db.info.dbname}", "--dsn", "host=/nowhere")
    done = run("pgqueue", *these, "health")
    assert done.returncode == (2 if age > 20 else 3)
    assert "waits: queue q" in done.stdout and "/nowhere" in done.stderr


def test_what_is_scripted_answers_in_json(run, db) -> None:
    def ask(*args: str, code: int = 0):
        done = run("pgqueue", *args, "--json")
        assert done.returncode == code, done.stderr
        (line,) = done.stdout.splitlines()
        assert line.isprintable() and line.isascii()
        return json.loads(line)

    assert "already installed" in ask("install")["did"]
    assert ask("health") == {"status": "ok", "checks": []}
    assert {c["status"] for c in ask("health", "--all")["checks"]} == {"ok"}
    assert ask("status") == {"queues": [], "running": []}
    job = ask("enqueue", NASTY, '{"to": "ada"}')
    assert job == {"id": one(db, "select id from pgqueue.job")}
    pgqueue.enqueue(db, "q")
    claim = "select id, token from pgqueue.claim('q', 'w')"
    (lease,) = db.execute(claim).fetchall()
    db.execute("select pgqueue.progress(%s, %s, 299, 1000, 'reads')", lease)
    db.execute(
        "update pgqueue.job set run_at = now() - interval '1 h' where queue = %s",
        (NASTY,),
    )
    found = ask("status")
    first, second = found["queues"]
    assert (first["queue"], first["ready"], first["paused"]) == (NASTY, 1, False)
    assert 3600 <= first["oldest_wait"] < 4000
    assert (second["queue"], second["running"]) == ("q", 1)
    assert first["estimate"] is False
    (running,) = found["running"]
    assert running["id"] == lease[0]
    assert (running["done"], running["total"], running["message"]) == (
        299,
        1000,
        "reads",
    )
    health = ask("health", code=2)
    assert health["status"] == "critical"
    assert {"status", "check", "detail", "hint"} == health["checks"][0].keys()
    samples = ask("metrics", "--by-queue")
    ready = {"queue": NASTY, "state": "ready"}
    (value,) = [s["value"] for s in samples if s["labels"] == ready]
    assert value == 1
    assert len(samples) == len(
        re.findall(r"(?m)^\w", run("pgqueue", "metrics", "--by-queue").stdout)
    )


@pytest.mark.parametrize("args", [["cancel", "1"], ["enqueue", "", "{}"]])
def test_an_error_is_the_same_with_json(run, args) -> None:
    done = run("pgqueue", *args, *(["--json"] if args[0] == "enqueue" else []))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pgqueue: ")


def test_a_database_without_pgqueue_is_named_with_its_host(run) -> None:
    done = run("pgqueue", "--dsn", "dbname=template1", "status")
    where = f"template1 on {os.environ['PGHOST']}"
    assert f"install or update the extension in {where}: " in done.stderr


def test_redrive_says_when_its_limit_left_matching_jobs(run, db) -> None:
    pgqueue.enqueue_many(db, "q", [None] * 1005)
    kill(db, "q")
    said = "stopped at the --limit of 1000; more match"
    dry = run("pgqueue", "redrive", "--dry-run")
    assert (len(dry.stdout.split()), said in dry.stderr) == (1000, True)
    done = run("pgqueue", "redrive")
    assert len(done.stdout.split()) == 1000
    assert done.stderr == f"pgqueue: {said}: call it again\n"
    # When exactly the limit matched, there is no reason to call it again.
    for args in ["--limit", "5", "--dry-run"], ["--limit", "5"]:
        done = run("pgqueue", "redrive", *args)
        assert (len(done.stdout.split()), "stopped" in done.stderr) == (5, False)
    assert one(db, "select count(*) from pgqueue.dead_job") == 0


def test_pause_and_resume_work_on_one_queue_or_on_all(run, db) -> None:
    for queue in "a", "b":
        pgqueue.enqueue(db, queue)
    paused = "select queue from pgqueue.queues where paused order by 1"
    assert run("pgqueue", "pause", "a").returncode == 0
    assert column(db, paused) == ["a"]
    assert run("pgqueue", "pause").returncode == 0
    assert column(db, paused) == ["a", "b"]
    assert run("pgqueue", "resume", "a").returncode == 0
    assert column(db, paused) == ["b"]
    done = run("pgqueue", "resume")
    assert (done.stdout, done.stderr, column(db, paused)) == ("", "", [])
    # Or on one kind or group.
    assert run("pgqueue", "pause", "a", "--kind", "k").returncode == 0
    assert run("pgqueue", "pause", "--group-key", "g").returncode == 0
    said = "select queue, kind, group_key from pgqueue.settings where value = 'true'"
    said += " and setting = 'paused'"
    assert db.execute(said).fetchall() == [(None, None, "g"), ("a", "k", None)]
    assert run("pgqueue", "resume", "a", "--kind", "k").returncode == 0
    assert run("pgqueue", "resume", "--group-key", "g").returncode == 0
    assert db.execute(said).fetchall() == []
    # A notice of the server is passed on: the name may be a typing error.
    assert 'queue "emial" has neither jobs' in run("pgqueue", "pause", "emial").stderr


def test_cancel_discard_and_purge_do_what_the_sql_functions_do(run, db) -> None:
    first, second = pgqueue.enqueue_many(db, "q", [None] * 2)
    pgqueue.enqueue_many(db, "other", [None] * 3)
    assert run("pgqueue", "cancel", str(first), "--reason", "why").stdout == (
        "cancelled\n"
    )
    assert column(db, "select result from pgqueue.run") == ["why"]
    kill(db, "q")
    assert run("pgqueue", "discard", str(second)).returncode == 0
    assert column(db, "select id from pgqueue.dead_job") == []
    assert run("pgqueue", "purge", "other").stdout == "3\n"
    assert run("pgqueue", "purge", "other").stdout == "0\n"
    assert column(db, "select id from pgqueue.job") == []


def test_error_shows_payload_headers_and_every_attempt_of_a_job(run, db) -> None:
    job = pgqueue.enqueue(db, "q", {"to": "ada"}, kind="k", headers={"trace": 7})
    error = "ValueError: {}\n\nTraceback (most recent call last):\n" + "x" * 5000
    for text in "first", "second":
        db.execute(
            "select pgqueue.fail(id, token, %s, retry_in => '0')"
            " from pgqueue.claim('q', 'me')",
            (error.format(text),),
        )
    shown = run("pgqueue", "error", str(job)).stdout
    assert "state: ready" in shown
    for part in '"to": "ada"', '"trace": 7', "ValueError: first", "x" * 5000:
        assert part in shown
    assert shown.endswith(f"error: {error.format('second')}\n")
    kill(db, "q", "LastError: third")
    shown = run("pgqueue", "error", str(job)).stdout
    assert "state: dead" in shown
    assert "attempt: 3" in shown
    assert shown.endswith("error: LastError: third\n")
    for line, outcome in zip(
        shown.splitlines()[2:5], ("retry", "retry", "dead"), strict=True
    ):
        assert outcome in line


def test_no_control_character_of_a_job_reaches_the_terminal(run, db) -> None:
    job = pgqueue.enqueue(db, NASTY, {"x": NASTY}, kind=NASTY)
    db.execute("select id from pgqueue.claim(%s, %s)", (NASTY, NASTY))
    shown = [run("pgqueue", "top", "--times", "1", COLUMNS="200").stdout]
    assert " leased to a" in run("pgqueue", "why", str(job)).stdout
    db.execute(
        "select pgqueue.fail(id, token, %s, permanent => true) from pgqueue.job",
        (NASTY,),
    )
    for args in (
        ["status"], ["dead"], ["error", str(job)], ["redrive", "--dry-run"],
        ["pause", f"{NASTY}?"], ["why", str(job)],
    ):  # fmt: skip
        done = run("pgqueue", *args, COLUMNS="200")
        assert done.returncode == 0, done.stderr
        shown += [done.stdout, done.stderr]
    text = "".join(shown)
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert text.count(r"a\x1b]0;x\x07\x1b[31m") >= 8
    assert "\nb" not in shown[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("columns", ["", "80", "40", "200"])
def test_a_table_fits_the_terminal(run, db, columns) -> None:
    for number, queue in enumerate(("short", "q" * 150)):
        tomorrow = one(db, "select now() + interval '1 day'")
        pgqueue.enqueue(db, queue, run_at=tomorrow)
        pgqueue.enqueue_many(db, queue, [None] * 3, kind="k" * 150)
        db.execute("select from pgqueue.claim(%s, %s)", (queue, "w" * 150))
        if number:
            kill(db, queue, "E" * 500)
        pgqueue.enqueue(db, queue)
    room = int(columns or 80)
    for args in ["status"], ["dead"], ["top", "--times", "1"]:
        lines = run("pgqueue", *args, COLUMNS=columns).stdout.splitlines()
        assert max(map(len, lines)) <= room
        # The head of the table is still there.
        assert "queue" in lines[0]
    status = run("pgqueue", "status", COLUMNS=columns).stdout
    assert status.splitlines()[3].split()[0] == "short"


def test_a_table_that_is_too_wide_cuts_no_number_and_names_the_columns_left_out(
    run, db
) -> None:
    for run_at in "now", "tomorrow":
        db.execute(
            "select count(*) from pgqueue.enqueue_many("
            "'queue', array_fill('{}'::jsonb, array[54321]), run_at => %s::timestamptz)",
            (run_at,),
        )
    claim = "select id, token from pgqueue.claim('queue', 'w', 4321)"
    db.execute(
        f"select count(pgqueue.complete(c.id, c.token)) from ({claim} offset 0) as c"
    )
    db.execute(f"select count(*) from ({claim}) as c")
    shown = [run("pgqueue", "status", COLUMNS=n).stdout for n in ("200", "40")]
    wide, narrow = (set(re.findall(r"(?<![\d:])\d+(?![\d:])", text)) for text in shown)
    assert narrow and narrow <= wide
    assert "no room for " in shown[1]
    assert max(map(len, shown[1].splitlines())) <= 40


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_a_command_without_a_traceback(db, dsn, unbuffered) -> None:
    pgqueue.enqueue(db, "q")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pgqueue", "status"],
            env={
                **os.environ,
                "PYTHONPATH": PATH,
                "PYTHONUNBUFFERED": unbuffered,
                "PGQUEUE_DSN": dsn,
            },
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("command", ["metrics", "status", "health"])
def test_a_command_runs_though_its_output_was_closed(db, dsn, command) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "pgqueue", command],
        env={**os.environ, "PYTHONPATH": PATH, "PGQUEUE_DSN": dsn},
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_said_does_not_mix_with_the_answer_where_errors_are_closed(
    db, dsn
) -> None:
    command = [sys.executable, "-m", "pgqueue", "pause", "unknown"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command],
        env={**os.environ, "PYTHONPATH": PATH, "PGQUEUE_DSN": dsn},
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"")


def test_top_shows_the_running_jobs_as_often_as_asked(run, db) -> None:
    pgqueue.enqueue(db, "emails", kind="welcome")
    db.execute("select from pgqueue.claim('emails', 'me')")
    shown = run("pgqueue", "top", "--times", "2", "--every", "0.1").stdout
    assert shown.count("welcome") == 2
    assert "\x1b" not in shown  # the output is not a terminal
