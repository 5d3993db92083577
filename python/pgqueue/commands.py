"""What the commands of python -m pgqueue do on a connection."""

import argparse
import json
import re
import sys
import time
from typing import Any

import psycopg

from pgqueue import database
from pgqueue.database import Connection
from pgqueue.install import install, upgrade_beside_others
from pgqueue.terminal import printable, rows, say, say_json, sentences, show, show_row

STATUS = (
    "select queue, ready, scheduled, running, expired, blocked, dead, oldest_wait,"
    " paused, finished_last_hour as finished, failed_last_hour as failed, is_estimate as estimate"
    " from pgqueue.queues order by queue"
)
RUNNING = (
    "select id, queue, kind, worker, running_for, lease_left, attempt"
    " from pgqueue.running order by running_for desc limit 10"
)
RUNNING_JSON = (
    "select id, queue, kind, worker, running_for, lease_left, attempt, done, total, rate,"
    " time_left, message from pgqueue.running order by running_for desc"
)
# Without a total, the number done is shown alone.
PROGRESS = (
    "select id, kind, coalesce(rpad(repeat('#', least(20, floor(20 * done / total))::int), 20, '.')"
    " || ' ' || floor(100 * done / total) || ' %', done::text) as progress,"
    " round(rate, 1)::text as rate, time_left, message"
    " from pgqueue.running where done is not null order by running_for desc limit 10"
)
DEAD = (
    "select id, died_at::timestamp(0), queue, kind, attempt,"
    " split_part(error, E'\\n', 1) as error"
    " from pgqueue.dead_job where %(queue)s::text is null or queue = %(queue)s"
    " order by died_at desc limit %(limit)s"
)
RUNS = (
    "select attempt, finished_at::timestamp(0), taken, outcome, worker, error"
    " from pgqueue.run where job_id = %(id)s order by finished_at, attempt"
)
JOB = (
    "select id, 'dead' as state, queue, kind, attempt, max_attempts, unique_key,"
    " headers::text, payload::text, error from pgqueue.dead_job where id = %(id)s"
    " union all select id, state, queue, kind, s.attempt, s.max_attempts, s.unique_key,"
    " headers::text, payload::text, last_error"
    " from pgqueue.job join pgqueue.jobs as s using (id, queue, kind) where id = %(id)s"
)
HEALTH = "select h.status, h.check, h.detail, h.hint from pgqueue.health() as h"
REDRIVE = (
    "select pgqueue.redrive(%(queue)s, %(kind)s, %(error_like)s,"
    " max_jobs => %(limit)s, dry_run => %(dry_run)s)"
)
METRICS = "select pgqueue.metrics(%(by_queue)s)"
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.M)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Their arguments, ? for those that may be left out, and what they do.
COMMANDS = {
    "enqueue": (
        "queue payload? --kind --run-at --unique-key --unique-for --on-duplicate"
        " --group-key --priority --max-attempts --json",
        "add a job and print its id",
    ),
    "install": ("--plain --json", "install pgqueue in the database"),
    "upgrade": ("--json", "upgrade pgqueue in the database"),
    "metrics": ("--by-queue --json", "the queues, in the text format of Prometheus"),
    "status": ("--json", "the queues, and the progress of long jobs"),
    "health": ("--all --json", "what is wrong, and what fixes it"),
    "top": ("--every --times", "queues and running jobs, live"),
    "dashboard": (
        "--host --port --allow-actions --no-secret --allow-host --json",
        "serve a page for whoever is on call",
    ),
    "move-groups": (
        "--wait --resume",
        "after adding shards, move groups and other jobs with a key",
    ),
    "dead": ("--queue --limit", "the latest dead jobs"),
    "error": ("id", "one failed job: its payload, runs and whole error"),
    "redrive": (
        "--kind --error-like --dry-run --queue --limit",
        "redrive dead jobs; prints their ids",
    ),
    # The SQL functions of these names.
    "pause": (
        "queue? --kind --group-key",
        "stop a queue, kind or group from handing out jobs; all if none is named",
    ),
    "resume": ("queue? --kind --group-key", "undo pause"),
    "cancel": ("id --reason", "stop a waiting or running job"),
    "why": ("id", "say why a job is not running, or what happened to it"),
    "discard": ("id", "delete a dead job for good"),
    "purge": ("queue", "delete all waiting jobs of a queue; prints how many"),
}
STATUSES = ("ok", "warning", "critical")  # as exit codes
# A label's value escapes a quote, a backslash and the end of a line as JSON does.
unescape = json.JSONDecoder(strict=False).decode


def run(conn: Connection, args: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    options: dict[str, Any] = vars(args)
    if args.command in ("install", "upgrade"):
        if args.command == "upgrade":
            did = upgrade_beside_others(conn)
        else:
            with conn.transaction():
                did = install(conn, args.plain)
        say_json({"did": did}) if args.json else print(did)
    elif args.command == "metrics":
        ((text,),) = database.execute(conn, METRICS, options)
        if args.json:
            say_json(samples(text))
        elif sys.stdout:  # None if it is closed
            sys.stdout.buffer.write(text.encode())  # UTF-8, whatever the terminal has
    elif args.command == "status":
        status(conn, args)
    elif args.command == "health":
        return health(conn, args)
    elif args.command == "top":
        top(conn, args.every, args.times)
    elif args.command == "dead":
        show(database.execute(conn, DEAD, options))
    elif args.command == "error":
        job = database.execute(conn, JOB, options)
        runs = database.execute(conn, RUNS, options)
        if runs.rowcount:
            show(runs)
            print()
        show_row(job)
    elif args.command == "redrive":
        redrive(conn, options)
    else:
        call(conn, options)
    return 0


def call(conn: Connection, options: dict[str, Any]) -> None:
    """Call the SQL function of this name. A payload goes as it was written: Python would round its numbers."""
    command, arguments = options["command"], []
    for argument in COMMANDS[command][0].removesuffix(" --json").split():
        name = argument.strip("-?").replace("-", "_")
        if options[name] is not None:
            is_option = argument.startswith("-")
            arguments.append(f"{name} => %({name})s" if is_option else f"%({name})s")
    query = f"select pgqueue.{command}({', '.join(arguments)})"
    for (value,) in database.execute(conn, query, options):
        if options.get("json"):
            say_json({"id": value})
        elif value != "":  # of void
            print(printable(str(value)))


def status(conn: Connection, args: argparse.Namespace) -> None:
    queues = database.execute(conn, STATUS)
    if args.json:
        running = database.execute(conn, RUNNING_JSON)
        say_json(args.of | {"queues": rows(queues), "running": rows(running)})
        return
    show(queues)
    progress = database.execute(conn, PROGRESS)
    if progress.rowcount:
        print()
        show(progress)


def health(conn: Connection, args: argparse.Namespace) -> int:
    """Print what is wrong, the worst first, each with its hint; return the exit code."""
    checks = rows(database.execute(conn, HEALTH))
    worst = max(STATUSES.index(check["status"]) for check in checks)
    shown = [check for check in checks if args.all or check["status"] != "ok"]
    if args.json:
        say_json(args.of | {"status": STATUSES[worst], "checks": shown})
        return worst
    if not worst:
        print(f"ok: {len(checks)} checks have found nothing wrong")
    for check in shown:
        print(f"{check['status']}: {check['check']}: {printable(check['detail'])}")
        if check["hint"]:
            print(f"    {printable(check['hint'])}")
    return worst


def samples(text: str) -> list[dict[str, Any]]:
    """Read the samples of metrics()."""
    found = []
    for name, labels, value in SAMPLE.findall(text):
        read = {k: unescape(f'"{v}"') for k, v in LABEL.findall(labels)}
        found.append({"name": name, "labels": read, "value": float(value)})
    return found


def redrive(conn: Connection, options: dict[str, Any]) -> None:
    """Redrive dead jobs, and say so if the limit left some behind."""
    done = database.execute(conn, REDRIVE, options).fetchall()
    for (job_id,) in done:
        print(job_id)
    if len(done) < options["limit"]:
        return
    conn.remove_notice_handler(say_notice)
    dry = {**options, "dry_run": True, "limit": 1}
    if options["dry_run"]:
        dry["limit"] += len(done)
    if database.execute(conn, REDRIVE, dry).rowcount == dry["limit"]:
        say(f"stopped at the --limit of {len(done)}; more match: call it again")


def top(conn: Connection, every: float, times: int | None) -> None:
    """Show queues and running jobs, refreshed; on a terminal in place."""
    while times is None or times > 0:
        if sys.stdout and sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        show(database.execute(conn, STATUS))
        print()
        show(database.execute(conn, RUNNING))
        times = None if times is None else times - 1
        if times != 0:
            print(end="", flush=True)
            time.sleep(every)


def say_notice(notice: psycopg.errors.Diagnostic) -> None:
    """Print a notice from the server: the counts of a dry run, an unknown queue."""
    say(sentences(notice))
