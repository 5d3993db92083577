"""python -m pgqueue: enqueue, and look after queues, from a shell.

Each command is one call or one SELECT that psql can do as well.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from pgqueue import client, database

STATUS = (
    "select queue, ready, scheduled, running, expired, blocked, dead, oldest_wait,"
    " paused, finished_last_hour as finished, failed_last_hour as failed"
    " from pgqueue.queues order by queue"
)
RUNNING = (
    "select id, queue, kind, worker, running_for, lease_left, attempt"
    " from pgqueue.running order by running_for desc limit 10"
)
DEAD = (
    "select id, died_at::timestamptz(0), queue, kind, attempt,"
    " left(split_part(error, E'\\n', 1), 80) as error"
    " from pgqueue.dead_job where %(queue)s::text is null or queue = %(queue)s"
    " order by died_at desc limit %(limit)s"
)
REDRIVE = (
    "select pgqueue.redrive(%(queue)s, %(kind)s, %(error_like)s,"
    " max_jobs => %(limit)s, dry_run => %(dry_run)s)"
)


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        dsn = database.conninfo(args.dsn)
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
            run(conn, args)
    except database.INCOMPATIBLE as error:
        print(f"pgqueue: install or update the extension: {error}", file=sys.stderr)
        return 3
    except psycopg.ProgrammingError as error:
        print(f"pgqueue: {error}", file=sys.stderr)
        return 2
    except (psycopg.Error, ValueError) as error:
        # The context would be a tour of the SQL functions.
        text, _, _ = str(error).partition("\nCONTEXT:")
        print(f"pgqueue: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pgqueue", description=__doc__)
    parser.add_argument("--dsn", help="else PGQUEUE_DSN, DATABASE_URL, libpq's own")
    commands = parser.add_subparsers(dest="command", required=True)

    enqueue = commands.add_parser("enqueue", help="add a job and print its id")
    enqueue.add_argument("queue")
    enqueue.add_argument("payload", nargs="?", type=json.loads, help="JSON")
    for option in (
        "--kind",
        "--run-at",
        "--unique-key",
        "--on-duplicate",
        "--group-key",
    ):
        enqueue.add_argument(option)
    for option in ("--priority", "--max-attempts"):
        enqueue.add_argument(option, type=int)

    commands.add_parser("status", help="the queues")
    top = commands.add_parser("top", help="queues and running jobs, live")
    top.add_argument("--every", type=float, default=2.0, help="seconds")
    top.add_argument("--times", type=int, help="end after so many")

    dead = commands.add_parser("dead", help="the latest dead letters")
    redrive = commands.add_parser(
        "redrive", help="send dead jobs back; prints their ids"
    )
    redrive.add_argument("--kind")
    redrive.add_argument("--error-like", help="LIKE pattern of the last error")
    redrive.add_argument("--dry-run", action="store_true")
    for command, limit in (dead, 20), (redrive, 1000):
        command.add_argument("--queue")
        command.add_argument("--limit", type=int, default=limit)
    return parser.parse_args(argv)


def run(conn: database.Connection, args: argparse.Namespace) -> None:
    options: dict[str, Any] = vars(args)
    if args.command == "enqueue":
        skipped = ("command", "dsn", "queue", "payload")
        given = {k: v for k, v in options.items() if k not in skipped}
        print(client.enqueue(conn, args.queue, args.payload, **given))
    elif args.command == "status":
        show(conn.execute(STATUS))
    elif args.command == "top":
        top(conn, args.every, args.times)
    elif args.command == "dead":
        show(conn.execute(DEAD, options))
    elif args.command == "redrive":
        for (job_id,) in conn.execute(REDRIVE, options):
            print(job_id)


def top(conn: database.Connection, every: float, times: int | None) -> None:
    """Show queues and running jobs again and again; on a terminal in one place."""
    while times is None or times > 0:
        if sys.stdout.isatty():
            print("\033[2J\033[H", end="")
        show(conn.execute(STATUS))
        print()
        show(conn.execute(RUNNING))
        times = None if times is None else times - 1
        if times != 0:
            sys.stdout.flush()
            time.sleep(every)


def show(cursor: psycopg.Cursor[TupleRow]) -> None:
    """Print rows as a table: numbers to the right, text to the left."""
    heads = [column.name for column in cursor.description or ()]
    rows = cursor.fetchall()
    texts = [heads, *([_text(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for i, line in enumerate(texts):
        cells = []
        for place, (text, width) in enumerate(zip(line, widths, strict=True)):
            is_number = bool(rows) and isinstance(rows[0][place], int | timedelta)
            cells.append(text.rjust(width) if is_number else text.ljust(width))
        print("  ".join(cells).rstrip())
        if i == 0:
            print("  ".join("-" * width for width in widths))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, timedelta):
        return str(timedelta(seconds=round(value.total_seconds())))
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
