"""The command line and the environment of a worker."""

import argparse
import contextlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from itertools import dropwhile
from types import ModuleType
from typing import Any

from pgqueue import database
from pgqueue.app import App
from pgqueue.terminal import refuse_non_utf8, version, whole_number
from pgqueue.worker import Share

LEVELS = ["debug", "info", "warning", "error", "critical"]
SWITCHES = {"1": True, "true": True, "yes": True, "on": True}
SWITCHES |= {"0": False, "false": False, "no": False, "off": False}


def parse(argv: Sequence[str], needs_app: bool = True) -> argparse.Namespace:
    """Read the command line; what it leaves out comes from PGQUEUE_* variables."""
    parser = make_parser()
    refuse_non_utf8(parser, argv)
    args = parser.parse_args(argv)
    if args.queue == {}:
        parser.error("--queue names no queue")
    if needs_app and not args.app and not args.check:
        parser.error("--app is required")
    return args


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; what a variable says, unless it is empty, is the default."""
    parser = argparse.ArgumentParser(
        prog="python -m pgqueue.worker", description="Run the jobs of some queues."
    )
    for names, about, default, read in options():
        flags = names.split()
        env = "PGQUEUE_" + flags[-1].lstrip("-").replace("-", "_").upper()
        shown = f"default {default}, " if default else ""
        choices: Collection[str] = ()
        how: dict[str, Any] = {"type": read}
        if read is bool:
            choices, how = SWITCHES, {"action": "store_true"}
        elif isinstance(read, list):
            choices, how = read, {"type": str.lower, "choices": read}
        elif read in (shares, listed, database.several):
            how["action"] = Several
        if given := os.environ.get(env):
            if choices and given.lower() not in choices:
                parser.error(f"{env} must be one of {', '.join(choices)}")
            default = SWITCHES[given.lower()] if read is bool else given
        help = f"{about} ({shown}{env})"
        parser.add_argument(*flags, default=default, help=help, **how)
    debug: Any = {"dest": "log_level", "action": "store_const", "const": "debug"}
    parser.add_argument("-v", help="as --log-level debug", **debug)
    about = "test the database and exit"
    parser.add_argument("--check", help=about, action="store_true")
    parser.add_argument("--version", action="version", version=version())
    return parser


def options() -> list[tuple[str, str, Any, Any]]:
    """List the options that have a variable: names, help, default, and a reader, choices, or bool for a switch."""
    forms = "NAME, NAME=WEIGHT, NAME:LIMIT or NAME=WEIGHT:LIMIT"
    several, own = "comma-separated or repeated", "those of the handlers"
    dsn = "the database, or several, by semicolons or repeated; else DATABASE_URL, else libpq's variables"
    lease = "seconds for which a claim holds a job, unless extended; else the queue's"
    call = "seconds that a call to the server may go without an answer; else the shortest lease, 3 to 30"
    stop = "seconds from SIGTERM until what is still running is failed"
    positive = whole_number(1)
    return [
        ("--app", f"MODULE[:NAME] of a pgqueue.App, {several}", None, listed),
        ("-q --queue", f"queues: {forms}, {several}; else {own}", None, shares),
        ("--dsn", dsn, None, database.several),
        ("-c --concurrency", "maximum handlers at once", 10, positive),
        ("--processes", "worker processes", 1, positive),
        ("--batch", "maximum prefetch, for quick handlers", 5000, whole_number(0)),
        ("--lease", lease, None, seconds),
        ("--timeout", "seconds, if neither handler nor app has one", None, seconds),
        ("--poll-interval", "longest sleep between claims, in seconds", 5.0, seconds),
        ("--call-timeout", call, None, seconds),
        ("--no-listen", "poll only", False, bool),
        ("--shutdown-timeout", stop, 30.0, seconds),
        ("--burst", "exit when nothing is due", False, bool),
        ("--max-jobs", "exit after this many jobs", None, positive),
        ("--only-known", "claim only kinds with a handler", False, bool),
        ("--name", "the worker's name, for display; else the host's", None, str),
        ("--health-file", "file to touch every second", None, file),
        ("--log-format", "of the log's lines", "text", ["text", "json"]),
        ("--log-level", "lowest level to log", "info", LEVELS),
    ]


class Several(argparse.Action):
    """Add what each use of an option names."""

    def __call__(self, parser: Any, namespace: Any, values: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest)
        # A str is the default, from a variable.
        given = type(values)() if before is None or isinstance(before, str) else before
        both = given | values if isinstance(values, dict) else given + values
        setattr(namespace, self.dest, both)


def listed(text: str) -> dict[str, None]:
    return dict.fromkeys(filter(None, (part.strip() for part in text.split(","))))


def shares(text: str) -> dict[str, Share]:
    """Read queues, weights and limits, such as emails=3,reports:2.

    A weight follows the last "=", and a limit is a number after the last ":"; other colons
    belong to the name. So `tenant:42=1` is the queue tenant:42.
    """
    found, small = {}, whole_number(1, 999_999)
    for item in listed(text):
        limit = re.search(r":([-+]?\d+)$", item)
        name, has_weight, weight = item[: limit and limit.start()].rpartition("=")
        try:
            found[name if has_weight else weight] = Share(
                small(weight) if has_weight else 1, small(limit[1]) if limit else None
            )
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"{item!r}: weights and limits are whole numbers from 1 to 999999"
            ) from None
    if "" in found:
        raise argparse.ArgumentTypeError(f"{text!r}: a queue needs a name")
    return found


def file(text: str) -> str:
    """Make a path absolute: a handler may change the directory."""
    with contextlib.suppress(FileNotFoundError):  # a deployment has deleted it
        return text and os.path.abspath(text)
    return text


def seconds(text: str) -> float:
    if not 0 < (number := float(text)) < 86400 * 30:
        raise ValueError
    return number


def merge(apps: Iterable[App]) -> App:
    """Return an app with the handlers of all; a single one as it is."""
    first, *others = dict.fromkeys(apps)
    if not others:
        return first
    app = App()
    app.include(first, *others)
    return app


def load(path: str) -> App:
    """Import an app by MODULE or MODULE:NAME; the name defaults to `app`.

    Raises ValueError if it does not exist, or for an error in the module, with its place.
    """
    with contextlib.suppress(FileNotFoundError):  # a deployment has deleted it
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
    module, _, name = path.partition(":")
    if not module or module.startswith("."):
        raise ValueError(f"--app needs MODULE or MODULE:NAME, not {path!r}")
    found = import_module(module)
    app = getattr(found, name or "app", None)
    if not isinstance(app, App):
        where = f"{name or 'app'!r} in {getattr(found, '__file__', module)}"
        if app is None:
            raise ValueError(f"there is no {where}")
        raise ValueError(f"{where} is not a pgqueue.App but a {type(app).__name__}")
    return app


def import_module(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise ValueError(f"there is no module {missing!r}") from error
        raise ValueError(f"importing {module} failed\n{_traceback(error)}") from error


def _traceback(error: BaseException) -> str:
    """Show where it happened, without the frames before the application's module."""
    shown = traceback.TracebackException.from_exception(error)
    ours = ("<frozen importlib", __file__, importlib.__file__)
    shown.stack[:] = dropwhile(lambda f: f.filename.startswith(ours), shown.stack)
    return "".join(shown.format()).rstrip()
