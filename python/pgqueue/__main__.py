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
import sys
from collections.abc import Sequence
from typing import Any

import psycopg

from pgqueue import database
from pgqueue.commands import COMMANDS, run, say_notice
from pgqueue.install import say_what_is_missing
from pgqueue.terminal import explain, refuse_non_utf8, say, seconds, whole_number

# Who may run a command; the others need an operator.
ROLES = {
    "enqueue": "producer",
    **dict.fromkeys(("health", "metrics", "status", "top", "why"), "reader"),
    "install": None,
    "upgrade": None,
}
# With several databases, these ask each; the others take only one.
OF_EACH = ("status", "health")
DESCRIBED = {"health": "Exit codes: 0 ok, 1 warning, 2 critical, 3 unknown."}
# With a larger number Postgres would find no function.
integer = whole_number(-(2**31), 2**31 - 1)
bigint = whole_number(-(2**63), 2**63 - 1)
port = whole_number(1, 2**16 - 1)
SWITCH = {"action": "store_true"}
SEVERAL = {"action": "append", "default": []}
# How an argument is read, if it is not just any text, and its help.
ARGUMENTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "payload": ({}, 'JSON, such as \'{"to": "ada"}\''),
    "id": ({"type": bigint}, None),
    "--priority": ({"type": integer}, None),
    "--max-attempts": ({"type": integer}, None),
    "--limit": ({"type": integer}, None),
    "--plain": (SWITCH, "run the script, even if the server has the extension"),
    "--by-queue": (SWITCH, "all numbers for each queue"),
    "--all": (SWITCH, "also the checks that found nothing"),
    "--every": ({"type": seconds, "default": 2.0}, "seconds"),
    "--times": ({"type": int}, "refresh this many times, then exit"),
    "--host": ({"default": "127.0.0.1"}, "default: %(default)s"),
    "--port": ({"type": port, "default": 7070}, "default: %(default)s"),
    "--allow-actions": (SWITCH, "allow actions; otherwise it is read-only"),
    "--no-secret": (SWITCH, "let in whoever reaches the port"),
    "--allow-host": (SEVERAL, "a name that a proxy passes on"),
    "--wait": (
        {"type": seconds, "default": 60.0},
        "seconds to wait for busy groups, and for another move-groups",
    ),
    "--resume": (SWITCH, "at the end, resume the shards that are paused"),
    "--error-like": ({}, "ILIKE pattern of the error's first line"),
    "--dry-run": (SWITCH, None),
    "--json": (SWITCH, "print a line of JSON"),
}


def main(argv: Sequence[str] | None = None, dsn: str | None = None) -> int:
    """Run the command line; `dsn`, a single one, is used if neither --dsn nor PGQUEUE_DSN names one."""
    args = parse(sys.argv[1:] if argv is None else argv)
    failed = 3 if args.command == "health" else 1
    # Its warnings when it is interrupted are of no use here.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        named = args.dsn or [os.environ.get("PGQUEUE_DSN") or ""]
        # Not also `dsn`, in which a password may have a semicolon.
        dsns = [each for one in named for each in database.several(one)]
        dsns = [dsn or ""] if dsns == [""] else dsns
        if args.command == "move-groups":
            from pgqueue.move import move_groups

            return move_groups(dsns, args.wait, args.resume)
        if len(dsns) > 1 and args.command not in OF_EACH:
            said = f"{len(dsns)} databases are named: pass one with --dsn"
            raise psycopg.ProgrammingError(said)
        if args.command == "dashboard":
            return serve(dsns[0], args)
        codes = (ask(each, args, failed, len(dsns) > 1) for each in dsns)
        # What is unknown must not hide what is critical.
        code = max(codes, key=(0, 1, 3, 2).index)
        print(end="", flush=True)
    except BrokenPipeError:
        # Nobody reads any more; at exit, Python would try to write again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failed
    except (psycopg.Error, ValueError, TypeError, LookupError, OSError) as error:
        return say_why(error, args, failed)
    except KeyboardInterrupt:
        return 130
    return code


def ask(dsn: str, args: argparse.Namespace, failed: int, is_one: bool) -> int:
    """Run the command in a database; if it is one of several, name it, and go on if it fails."""
    conninfo = database.conninfo(dsn)
    args.of = {"database": database.name(conninfo)} if is_one else {}
    if is_one and not args.json:
        print(f"-- {args.of['database']}", flush=True)
    try:
        with database.connect(conninfo) as conn:
            conn.add_notice_handler(say_notice)
            try:
                return run(conn, args)
            except (*database.INCOMPATIBLE, psycopg.errors.UndefinedTable) as error:
                return say_what_is_missing(conn, error)
    except psycopg.Error as error:
        if not is_one:
            raise
        return say_why(error, args, failed)


def say_why(error: Exception, args: argparse.Namespace, failed: int) -> int:
    if args.command == "move-groups":
        error.add_note("move-groups connects as the owner of pgqueue, on all shards")
    say(explain(error, ROLES.get(args.command, "operator")))
    is_dsn = isinstance(error, psycopg.ProgrammingError) and not error.sqlstate
    return 2 if is_dsn and failed == 1 else failed


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    refuse_non_utf8(parser, argv)
    args = parser.parse_args(argv)
    args.dsn = args.dsn + args.dsn_too
    if getattr(args, "payload", None) is not None:
        try:
            json.loads(args.payload, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            parser.error(f"payload must be JSON: {error}")
    return args


def refuse(constant: str) -> None:
    """Refuse the numbers that Python reads and JSON does not have."""
    raise ValueError(f"it has no {constant}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pgqueue", description=__doc__)
    about: str | None = (
        "the database; else PGQUEUE_DSN, DATABASE_URL, libpq's variables"
    )
    parser.add_argument("--dsn", action="append", default=[], help=about)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (arguments, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=DESCRIBED.get(name))
        command.add_argument(
            "--dsn", action="append", dest="dsn_too", default=[], help=argparse.SUPPRESS
        )
        for argument in arguments.split():
            bare = argument.rstrip("?")
            how, about = ARGUMENTS.get(bare, ({}, None))
            optional: dict[str, Any] = {"nargs": "?"} if argument != bare else {}
            command.add_argument(bare, help=about, **how, **optional)
    commands.choices["dead"].set_defaults(limit=20)
    commands.choices["redrive"].set_defaults(limit=1000)
    return parser


def serve(dsn: str, args: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C; it opens its own connection for each page."""
    try:
        from pgqueue.dashboard import serve
    except ImportError as error:
        clone = "in a clone: pip install './python[dashboard]'"
        say(f"the dashboard needs pgqueue-postgres[dashboard]; {clone}: {error}")
        return 1
    return serve.serve(dsn, args)


if __name__ == "__main__":
    sys.exit(main())
