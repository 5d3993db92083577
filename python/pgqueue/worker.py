"""python -m pgqueue.worker --app MODULE[:NAME]: run the jobs of some queues.

Exit codes: 0 done or drained, 1 failed, 2 wrong usage, 3 no pgqueue in the database or
one of another version, 130 or 143 ended by a second signal.
"""

import argparse
import importlib
import importlib.metadata
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import psycopg

from pgqueue import database
from pgqueue.app import App
from pgqueue.loop import Worker
from pgqueue.processes import supervise
from pgqueue.signs import Pulse, notify_systemd, set_up_logging

log = logging.getLogger("pgqueue")

VERBS = (
    "claim, complete, complete_many, extend, fail, finish, maintain, release, rest"
).split(", ")
PRIVILEGES = (
    "select p.proname, has_function_privilege(p.oid, 'execute') from pg_proc as p"
    " where p.pronamespace = 'pgqueue'::regnamespace and p.proname = any(%s)"
)


def main() -> int:
    args = parse(sys.argv[1:])
    set_up_logging(args.log_level, args.log_format)
    signals: list[int] = []
    worker: Worker | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if worker:
            worker.stop()
        if len(signals) > 1:
            # A server out of reach must not keep us.
            force = threading.Timer(5, os._exit, (128 + number,))
            force.daemon = True
            force.start()

    try:
        dsn = database.conninfo(args.dsn)
        if args.check:
            return check(dsn)
        if args.processes > 1:
            return supervise(args.processes, args.burst)
        for number in signal.SIGTERM, signal.SIGINT:
            signal.signal(number, on_signal)
        app = load(args.app)
        worker = Worker(
            app,
            args.queue,
            dsn=dsn,
            name=args.name,
            concurrency=args.concurrency,
            batch=args.batch,
            lease=args.lease,
            poll_interval=args.poll_interval,
            shutdown_timeout=args.shutdown_timeout,
            listen=not args.no_listen,
            burst=args.burst,
            only_known=args.only_known,
            max_jobs=args.max_jobs,
        )
    except (ImportError, AttributeError, TypeError, psycopg.ProgrammingError) as error:
        log.debug("cannot start", exc_info=error)
        print(f"pgqueue: {error}", file=sys.stderr)
        return 2
    worker.on_tick = Pulse(worker, args.health_file)
    for _ in signals:
        worker.stop()  # it came during start-up

    names = ", ".join(args.queue)
    log.info("%s works on %s, %s at once", worker.name, names, args.concurrency)
    try:
        worker.run()
    except database.INCOMPATIBLE as error:
        print(f"pgqueue: install or update the extension: {error}", file=sys.stderr)
        return 3
    notify_systemd("STOPPING=1")
    log.info("%s ends", worker.name)
    code = 128 + signals[-1] if len(signals) > 1 else 0
    if worker.gave_up:
        # Python would wait for handlers that have nothing to report any more.
        logging.shutdown()
        os._exit(code)
    return code


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; what it leaves out comes from PGQUEUE_* variables."""
    parser = argparse.ArgumentParser(
        prog="python -m pgqueue.worker", description="Run the jobs of some queues."
    )

    def add(*names: str, help: str, default: Any = None, **how: Any) -> None:
        env = "PGQUEUE_" + names[-1].lstrip("-").replace("-", "_").upper()
        shown = "" if default is None else f"default {default}, "
        if how.get("action") == "store_true":
            default = os.environ.get(env, "").lower() not in ("", "0", "false", "no")
        else:
            default = os.environ.get(env, default)
        parser.add_argument(
            *names, default=default, help=f"{help} ({shown}{env})", **how
        )

    add("--app", help="MODULE[:NAME] of the pgqueue.App", metavar="MODULE")
    add(
        "-q",
        "--queue",
        help="queues to work on: NAME or NAME=WEIGHT, by commas or one by one",
        default="default",
        action=Queues,
        metavar="NAME",
    )
    add("--dsn", help="where Postgres is; else DATABASE_URL, else libpq's variables")
    add("-c", "--concurrency", help="handlers at once", default=10, type=positive)
    add("--processes", help="worker processes", default=1, type=positive)
    add(
        "--batch",
        help="most jobs to hold ahead of quick handlers",
        default=1000,
        type=count,
    )
    add(
        "--lease",
        help="seconds a dead worker's job waits; else the queue's",
        type=seconds,
    )
    add("--poll-interval", help="seconds between looks", default=5.0, type=seconds)
    add("--no-listen", help="poll only", action="store_true")
    add(
        "--shutdown-timeout",
        help="seconds from SIGTERM until jobs are given back",
        default=30.0,
        type=seconds,
    )
    add("--burst", help="end when nothing is due", action="store_true")
    add("--max-jobs", help="end after so many jobs", type=positive)
    add("--only-known", help="claim only kinds with a handler", action="store_true")
    add("--name", help="the worker's name, for others to read; else the host's")
    add("--health-file", help="file to touch every second", metavar="PATH")
    add("--log-format", help="text or json", default="text", choices=["text", "json"])
    add("--log-level", help="debug, info, warning, error", default="info")
    parser.add_argument("-v", dest="log_level", action="store_const", const="debug")
    parser.add_argument(
        "--check", action="store_true", help="test the database and end"
    )
    parser.add_argument("--version", action="version", version=version())

    args = parser.parse_args(argv)
    if isinstance(args.queue, str):
        args.queue = weights(args.queue)
    if not args.app and not args.check:
        parser.error("--app is required")
    if not isinstance(logging.getLevelName(args.log_level.upper()), int):
        parser.error(f"no such log level: {args.log_level}")
    return args


class Queues(argparse.Action):
    def __call__(
        self, parser: Any, namespace: Any, values: Any, option: Any = None
    ) -> None:
        before = namespace.queue if isinstance(namespace.queue, dict) else {}
        namespace.queue = {**before, **weights(values)}


def weights(text: str) -> dict[str, int]:
    """Read queues and weights, such as emails=3,reports."""
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = item.rpartition("=")
        is_weighted = name and weight.isdecimal() and int(weight) > 0
        found.update({name: int(weight)} if is_weighted else {item: 1})
    return found


def count(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError
    return number


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def seconds(text: str) -> float:
    if not 0 < (number := float(text)) < 86400 * 30:
        raise ValueError
    return number


def load(path: str) -> App:
    """Import an app by MODULE or MODULE:NAME; the name defaults to app."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, name = path.partition(":")
    app = getattr(importlib.import_module(module), name or "app")
    if not isinstance(app, App):
        raise TypeError(f"{path} is no pgqueue.App")
    return app


def version() -> str:
    try:
        return importlib.metadata.version("pgqueue-postgres")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its source"


def check(dsn: str) -> int:
    """Say in one line whether a worker could work with this database."""
    try:
        with database.connect(dsn) as conn:
            row = conn.execute("select pgqueue.version()").fetchone()
            granted = {v: ok for v, ok in conn.execute(PRIVILEGES, (VERBS,))}
            hears = conn.prepare_threshold is not None and database.hears(conn, dsn)
    except database.INCOMPATIBLE as error:
        print(f"no pgqueue: {error}")
        return 3
    except psycopg.Error as error:
        print(f"failed: {error}")
        return 1
    if missing := [name for name in VERBS if name not in granted]:
        print(f"pgqueue lacks {', '.join(missing)}")
        return 3
    if denied := [name for name in VERBS if not granted[name]]:
        print(f"not allowed: {', '.join(denied)}: pgqueue.grant_access(role, 'worker')")
        return 1
    how = "notified" if hears else "polling: NOTIFY does not arrive"
    print(f"ok: pgqueue {row[0] if row else '?'}, {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
