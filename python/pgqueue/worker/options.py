"""The command line and the environment of a worker."""

import argparse
import importlib
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from pgqueue.app import App
from pgqueue.terminal import refuse_other_than_utf8
from pgqueue.worker import Share

LEVELS = ["debug", "info", "warning", "error", "critical"]
SWITCHES = {"1": True, "true": True, "yes": True, "on": True}
SWITCHES |= {"0": False, "false": False, "no": False, "off": False}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what it leaves out comes from PGQUEUE_* variables."""
    parser = make_parser()
    refuse_other_than_utf8(parser, argv)
    args = parser.parse_args(argv)
    if not args.queue:
        parser.error("--queue names no queue")
    if not args.app and not args.check:
        parser.error("--app is required")
    return args


def make_parser() -> argparse.ArgumentParser:
    """Make the parser, with the defaults that the environment gives just now."""
    parser = argparse.ArgumentParser(
        prog="python -m pgqueue.worker", description="Run the jobs of some queues."
    )
    for names, help, how in options():
        add(parser, names.split(), help, **how)
    parser.add_argument(
        "-v",
        help="as --log-level debug",
        dest="log_level",
        action="store_const",
        const="debug",
    )
    parser.add_argument(
        "--check", help="test the database and end", action="store_true"
    )
    parser.add_argument("--version", action="version", version=version())
    return parser


def add(
    parser: argparse.ArgumentParser,
    names: list[str],
    help: str,
    default: Any = None,
    **how: Any,
) -> None:
    """Add an option that a variable may stand in for; an empty one is as not set."""
    env = "PGQUEUE_" + names[-1].lstrip("-").replace("-", "_").upper()
    shown = "" if default is None else f"default {default}, "
    given = os.environ.get(env)
    choices = how.get("choices", [])
    if choices:
        how["type"] = str.lower
    if how.get("action") == "store_true":
        choices, default = SWITCHES, SWITCHES.get(str(given).lower(), False)
    elif given:
        default = given
    if given and choices and given.lower() not in choices:
        parser.error(f"{env} must be one of {', '.join(choices)}")
    parser.add_argument(*names, default=default, help=f"{help} ({shown}{env})", **how)


def options() -> list[tuple[str, str, dict[str, Any]]]:
    """List those that have a variable: names, what they do, and how they are read."""
    queue = {"default": "default", "type": shares, "action": Queues, "metavar": "NAME"}
    forms = "NAME, NAME=WEIGHT, NAME:LIMIT or NAME=WEIGHT:LIMIT"
    switch = {"action": "store_true"}
    return [
        ("--app", "MODULE[:NAME] of the pgqueue.App", {"metavar": "MODULE"}),
        ("-q --queue", f"queues to work on: {forms}, by commas", queue),
        ("--dsn", "where Postgres is; else DATABASE_URL, else libpq's variables", {}),
        ("-c --concurrency", "handlers at once", {"default": 10, "type": positive}),
        ("--processes", "worker processes", {"default": 1, "type": positive}),
        (
            "--batch",
            "most jobs to hold ahead of quick handlers",
            {"default": 5000, "type": count},
        ),
        (
            "--lease",
            "seconds a dead worker's job waits; else the queue's",
            {"type": seconds},
        ),
        (
            "--timeout",
            "seconds for handlers without one of their own",
            {"type": seconds},
        ),
        ("--poll-interval", "seconds between looks", {"default": 5.0, "type": seconds}),
        ("--no-listen", "poll only", switch),
        (
            "--shutdown-timeout",
            "seconds from SIGTERM until what still runs is failed",
            {"default": 30.0, "type": seconds},
        ),
        ("--burst", "end when nothing is due", switch),
        ("--max-jobs", "end after so many jobs", {"type": positive}),
        ("--only-known", "claim only kinds with a handler", switch),
        ("--name", "the worker's name, for others to read; else the host's", {}),
        ("--health-file", "file to touch every second", {"metavar": "PATH"}),
        (
            "--log-format",
            "of the log's lines",
            {"default": "text", "choices": ["text", "json"]},
        ),
        (
            "--log-level",
            "what to log, and above",
            {"default": "info", "choices": LEVELS},
        ),
    ]


class Queues(argparse.Action):
    """Add what each --queue names."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option: Any = None
    ) -> None:
        before = namespace.queue if isinstance(namespace.queue, dict) else {}
        namespace.queue = {**before, **values}


def shares(text: str) -> dict[str, Share]:
    """Read queues, weights and limits, such as emails=3,reports:2.

    A weight follows the last "=", and a limit is a number behind the last ":"; other colons
    belong to the name. So `tenant:42=1` is the queue tenant:42.
    """
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        limit = re.search(r":([-+]?\d+)$", item)
        name, has_weight, weight = item[: limit and limit.start()].rpartition("=")
        try:
            found[name if has_weight else weight] = Share(
                small(weight) if has_weight else 1, small(limit[1]) if limit else None
            )
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{item!r}: weights and limits are whole numbers from 1 to 999999"
            ) from None
    if "" in found:
        raise argparse.ArgumentTypeError(f"{text!r}: a queue has a name")
    return found


def small(text: str) -> int:
    if not 1 <= (number := int(text)) <= 999_999:
        raise ValueError
    return number


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
    """Import an app by MODULE or MODULE:NAME; the name defaults to app.

    Raises ValueError; says where, for an error of the module itself.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, name = path.partition(":")
    if not module or module.startswith("."):
        raise ValueError(f"--app needs MODULE or MODULE:NAME, not {path!r}")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
            f"{error.name}."
        ):
            raise ValueError(f"there is no module {error.name!r}") from error
        raise ValueError(f"importing {module} failed\n{_traceback(error)}") from error
    app = getattr(found, name or "app", None)
    if not isinstance(app, App):
        where = f"{name or 'app'!r} in {getattr(found, '__file__', module)}"
        if app is None:
            raise ValueError(f"there is no {where}")
        raise ValueError(f"{where} is no pgqueue.App but a {type(app).__name__}")
    return app


def _traceback(error: BaseException) -> str:
    """Show where it happened, without the way from here to the application's module."""
    shown = traceback.TracebackException.from_exception(error)
    ours = ("<frozen importlib", __file__, importlib.__file__)
    for frame in list(shown.stack):
        if not frame.filename.startswith(ours):
            break
        shown.stack.remove(frame)
    return "".join(shown.format()).rstrip()


def version() -> str:
    try:
        return importlib.metadata.version("pgqueue-postgres")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its source"
