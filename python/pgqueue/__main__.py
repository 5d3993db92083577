"""python -m pgqueue: enqueue jobs and manage queues from a shell.

Each command is a function call or a query or two that psql can run as well. Exit codes: 0 done, 1
failed, 2 wrong usage, 3 no pgqueue in the database or one of another version, 130 Ctrl-C.
Those of health are for monitoring: 0 ok, 1 warning, 2 critical, 3 unknown.
"""

import argparse
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import psycopg

from pgqueue import client, database
from pgqueue.install import install
from pgqueue.terminal import (
    explain,
    printable,
    refuse_other_than_utf8,
    rows,
    say,
    say_json,
    sentences,
    show,
    show_record,
    whole_number,
)

STATUS = (
    "select queue, ready, scheduled, running, expired, blocked, dead, oldest_wait,"
    " paused, finished_last_hour as finished, failed_last_hour as failed"
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
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.M)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Each is the SQL function of that name: its parameters, and what it does.
VERBS = {
    "pause": (
        ["queue?", "--kind", "--group-key"],
        "stop a queue, kind or group from handing out jobs; all if none is named",
    ),
    "resume": (["queue?", "--kind", "--group-key"], "undo pause"),
    "cancel": (["id", "--reason"], "stop a waiting or running job"),
    "why": (["id"], "say why a job is not running, or what happened to it"),
    "discard": (["id"], "delete a dead job for good"),
    "purge": (["queue"], "delete all waiting jobs of a queue; prints how many"),
}
# The others need an operator.
ROLES = {
    "enqueue": "producer",
    "health": "reader",
    "metrics": "reader",
    "install": None,
}
# The others are for people, or print what a shell reads as it is.
JSON = ("enqueue", "install", "metrics", "status", "health", "dashboard")
STATUSES = ("ok", "warning", "critical")  # as exit codes
# With a larger number Postgres would find no function.
# A label's value escapes a quote, a backslash and the end of a line as JSON does.
unescape = json.JSONDecoder(strict=False).decode
integer = whole_number(-(2**31), 2**31 - 1)
bigint = whole_number(-(2**63), 2**63 - 1)
port = whole_number(1, 2**16 - 1)


def main(argv: Sequence[str] | None = None, dsn: str | None = None) -> int:
    """Run the command line; `dsn` is for when neither --dsn nor PGQUEUE_DSN names one."""
    args = parse(sys.argv[1:] if argv is None else argv)
    failed = 3 if args.command == "health" else 1
    # What it warns of when it is interrupted is of no use here.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        dsn = database.conninfo(args.dsn or os.environ.get("PGQUEUE_DSN") or dsn)
        if args.command == "dashboard":
            return serve(dsn, args)
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
            conn.add_notice_handler(say_notice)
            try:
                code = run(conn, args)
            except (*database.INCOMPATIBLE, psycopg.errors.UndefinedTable) as error:
                where = f"{conn.info.dbname} on {conn.info.host}"
                say(f"install or update the extension in {where}: {explain(error)}")
                return 3
        print(end="", flush=True)
    except BrokenPipeError:
        # Nobody reads any more; at exit, Python would try to write again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failed
    except (psycopg.Error, ValueError, TypeError, LookupError, OSError) as error:
        say(explain(error, ROLES.get(args.command, "operator")))
        is_dsn = isinstance(error, psycopg.ProgrammingError) and not error.sqlstate
        return 2 if is_dsn and failed == 1 else failed
    except KeyboardInterrupt:
        return 130
    return code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    refuse_other_than_utf8(parser, argv)
    args = parser.parse_args(argv)
    if getattr(args, "payload", None) is not None:
        try:
            args.payload = json.loads(args.payload)
        except (ValueError, RecursionError) as error:
            parser.error(f"payload must be JSON: {error}")
    return args


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pgqueue", description=__doc__)
    parser.add_argument("--dsn", help="else PGQUEUE_DSN, DATABASE_URL, libpq's own")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("enqueue", help="add a job and print its id")
    command.add_argument("queue")
    command.add_argument("payload", nargs="?", help='JSON, such as \'{"to": "ada"}\'')
    texts = ("kind", "run-at", "unique-key", "unique-for", "on-duplicate", "group-key")
    for name in texts:
        command.add_argument(f"--{name}")
    for name in "priority", "max-attempts":
        command.add_argument(f"--{name}", type=integer)

    command = commands.add_parser("install", help="install pgqueue in the database")
    command.add_argument("--plain", action="store_true", help="not as an extension")
    commands.add_parser("metrics", help="the queues, in the text format of Prometheus")
    commands.add_parser("status", help="the queues, and the progress of long jobs")
    command = commands.add_parser(
        "health",
        help="what is wrong, and what fixes it",
        description="Exit codes: 0 ok, 1 warning, 2 critical, 3 unknown.",
    )
    command.add_argument("--all", action="store_true", help="also what is fine")
    command = commands.add_parser("top", help="queues and running jobs, live")
    command.add_argument("--every", type=float, default=2.0, help="seconds")
    command.add_argument("--times", type=int, help="exit after this many")

    command = commands.add_parser(
        "dashboard", help="serve a page for whoever is on call"
    )
    command.add_argument("--host", default="127.0.0.1", help="else %(default)s")
    command.add_argument("--port", type=port, default=7070, help="else %(default)s")
    command.add_argument("--allow-actions", action="store_true", help="not read-only")
    command.add_argument(
        "--allow-host",
        action="append",
        default=[],
        help="a name that a proxy passes on",
    )

    for name in JSON:
        what = "print a line of JSON"
        commands.choices[name].add_argument("--json", action="store_true", help=what)

    dead = commands.add_parser("dead", help="the latest dead letters")
    command = commands.add_parser(
        "error", help="one failed job: its payload, runs and whole error"
    )
    command.add_argument("id", type=bigint)
    redrive = commands.add_parser(
        "redrive", help="send dead jobs back; prints their ids"
    )
    redrive.add_argument("--kind")
    redrive.add_argument("--error-like", help="ILIKE pattern of the error's first line")
    redrive.add_argument("--dry-run", action="store_true")
    for command, limit in (dead, 20), (redrive, 1000):
        command.add_argument("--queue")
        command.add_argument("--limit", type=integer, default=limit)
    for verb, (parameters, help) in VERBS.items():
        command = commands.add_parser(verb, help=help)
        for name in parameters:
            how: dict[str, Any] = {"nargs": "?"} if name.endswith("?") else {}
            kind = bigint if name == "id" else str
            command.add_argument(name.rstrip("?"), type=kind, **how)
    return parser


def run(conn: database.Connection, args: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    options: dict[str, Any] = vars(args)
    if args.command == "enqueue":
        skipped = ("command", "dsn", "queue", "payload", "json")
        given = {k: v for k, v in options.items() if k not in skipped}
        job_id = client.enqueue(conn, args.queue, args.payload, **given)
        say_json({"id": job_id}) if args.json else print(job_id)
    elif args.command == "install":
        with conn.transaction():
            did = install(conn, args.plain)
        say_json({"did": did}) if args.json else print(did)
    elif args.command == "metrics":
        row = database.execute(conn, "select pgqueue.metrics()").fetchone()
        (text,) = row or ("",)
        if args.json:
            say_json(samples(text))
        else:
            sys.stdout.buffer.write(text.encode())  # UTF-8, whatever the terminal has
    elif args.command == "status":
        status(conn, args.json)
    elif args.command == "health":
        return health(conn, args.all, args.json)
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
        show_record(job)
    elif args.command == "redrive":
        redrive(conn, options)
    else:
        parameters, _ = VERBS[args.command]
        names = (name.strip("-?").replace("-", "_") for name in parameters)
        places = ", ".join(f"%({name})s" for name in names)
        query = f"select pgqueue.{args.command}({places})"
        for value in database.execute(conn, query, options).fetchone() or ():
            if value != "":  # of void
                print(printable(str(value)))
    return 0


def status(conn: database.Connection, as_json: bool) -> None:
    queues = database.execute(conn, STATUS)
    if as_json:
        running = database.execute(conn, RUNNING_JSON)
        say_json({"queues": rows(queues), "running": rows(running)})
        return
    show(queues)
    progress = database.execute(conn, PROGRESS)
    if progress.rowcount:
        print()
        show(progress)


def health(conn: database.Connection, is_all: bool, as_json: bool) -> int:
    """Print what is wrong, the worst first, each with its hint; return the exit code."""
    checks = rows(database.execute(conn, HEALTH))
    worst = max(STATUSES.index(check["status"]) for check in checks)
    shown = [check for check in checks if is_all or check["status"] != "ok"]
    if as_json:
        say_json({"status": STATUSES[worst], "checks": shown})
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
    return [
        {
            "name": name,
            "labels": {k: unescape(f'"{v}"') for k, v in LABEL.findall(labels)},
            "value": float(value),
        }
        for name, labels, value in SAMPLE.findall(text)
    ]


def serve(dsn: str, args: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C; it opens its own connection for each page."""
    try:
        from pgqueue.dashboard import serve
    except ImportError as error:
        extra = (
            "pgqueue-postgres[dashboard]; in a clone: pip install './python[dashboard]'"
        )
        say(f"the dashboard needs {extra}: {error}")
        return 1
    hosts = args.allow_host
    serve.serve(dsn, args.host, args.port, args.allow_actions, hosts, args.json)
    return 0


def redrive(conn: database.Connection, options: dict[str, Any]) -> None:
    """Send dead jobs back, and say so if the limit left some behind."""
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


def top(conn: database.Connection, every: float, times: int | None) -> None:
    """Show queues and running jobs, refreshed; on a terminal in place."""
    while times is None or times > 0:
        if sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        show(database.execute(conn, STATUS))
        print()
        show(database.execute(conn, RUNNING))
        times = None if times is None else times - 1
        if times != 0:
            sys.stdout.flush()
            time.sleep(every)


def say_notice(notice: psycopg.errors.Diagnostic) -> None:
    """Print a notice from the server: the counts of a dry run, an unknown queue."""
    say(sentences(notice))


if __name__ == "__main__":
    sys.exit(main())
