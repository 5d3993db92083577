"""python -m pgqueue.worker --app MODULE[:NAME]: run the jobs of its queues.

Exit codes: 0 done or drained, 1 failed, 2 wrong usage, 3 no pgqueue in the database or
one of another version, 130 or 143 ended by a second signal. See docs/reference/worker.md.
"""

import argparse
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from types import FrameType

import psycopg

from pgqueue import database
from pgqueue.app import App
from pgqueue.drivers import run_without_loop
from pgqueue.install import VERSION, advice
from pgqueue.policy import Middleware
from pgqueue.terminal import explain, say
from pgqueue.worker import Worker, lines
from pgqueue.worker.health import Health, notify_systemd
from pgqueue.worker.options import load, merge, parse
from pgqueue.worker.supervisor import (
    ALIVE,
    BOTH,
    CANNOT,
    DONE,
    READY,
    Link,
    Supervisor,
)

DENIED = (
    "select p.proname from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace"
    " and p.proname = any('{after_failover,claim,claim_from,complete,extend,finish,maintain,rest}')"
    " and not has_function_privilege(p.oid, 'execute')"
)
TOGETHER = 1.0  # seconds within which the two count as one
signals: list[int] = []  # that have arrived
codes: list[int] = []  # to exit with, if threads of ours still run then


def stop_early(number: int, frame: FrameType | None) -> None:
    """End at once: nothing is claimed yet. If Python swallows the exception, `signals` remembers."""
    signals.append(number)
    raise SystemExit(0)


def main(
    argv: Sequence[str] | None = None,
    dsn: str | None = None,
    wrap: Callable[[Middleware | None], Middleware] | None = None,
    discover: Callable[[], Iterable[App]] | None = None,
) -> int:
    """Run the command line.

    `wrap` makes the middleware around that of the app, `discover` finds apps without --app.
    """
    # What is registered later is called before.
    atexit.register(lambda: leave(codes[-1]) if codes else None)
    for number in BOTH:
        signal.signal(number, stop_early)
    supervisor = Link()
    if hasattr(os, "fork"):  # where a supervisor blocks them
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*BOTH, signal.SIGCHLD})
    args = parse(sys.argv[1:] if argv is None else argv, needs_app=not discover)
    lines.set_up_logging(args.log_level, args.log_format)
    try:
        given = args.dsn or dsn
        dsns = database.conninfos(given)
        if args.check:
            return max(check(each, len(dsns) > 1) for each in dsns)
        if args.processes > 1 and not supervisor:
            timeout = args.shutdown_timeout
            return Supervisor(args.processes, args.burst, timeout).run()
        app = import_apps(args.app, discover)
        if wrap:
            app.middleware = wrap(app.middleware)
        same = {f.name for f in fields(Worker) if f.kw_only} & set(vars(args))
        options = {name: getattr(args, name) for name in same} | {"dsn": given}
        worker = Worker(app, args.queue, listen=not args.no_listen, **options)
    except (ValueError, TypeError, psycopg.ProgrammingError) as error:
        say(str(error))
        supervisor.say(CANNOT)
        return 2
    return run(worker, args, supervisor)


def import_apps(
    paths: Iterable[str], discover: Callable[[], Iterable[App]] | None
) -> App:
    try:
        return merge(map(load, paths) if paths or not discover else discover())
    except SystemExit as error:
        if signals:
            raise
        what = f"importing {', '.join(paths or ['the apps'])}"
        raise ValueError(f"{what} ended Python: exit({error.code})") from None


def run(worker: Worker, args: argparse.Namespace, supervisor: Link) -> int:
    stop_by_signal(worker, supervisor)
    says = partial(supervisor.say, READY), partial(supervisor.say, ALIVE)
    health = Health(args.health_file, *says)
    worker.on_lease = supervisor.may_be_silent
    worker.on_tick = lambda: health(worker.sources.is_ready, worker.sources.states)
    code = 0
    try:
        worker.run()
        supervisor.say(DONE)
    except database.INCOMPATIBLE:
        supervisor.say(CANNOT)
        code = 3
    except (Exception, SystemExit) as error:  # a hook may end Python
        if worker.burst and isinstance(error, psycopg.Error):
            supervisor.say(CANNOT)
        code = 1
    if not supervisor:
        notify_systemd("STOPPING=1")
    if len(signals) > 1:
        code = 128 + signals[-1]
    if any(thread.name.startswith("pgqueue-") for thread in threading.enumerate()):
        codes.append(code)  # Python's exit crashes when such a thread starts another
    # And threads that handlers have started may keep Python from ending.
    seconds = min(worker.stop_by - time.monotonic(), worker.shutdown_timeout)
    timer = threading.Timer(max(seconds, 0.1), leave, (code,))
    timer.daemon = True
    timer.start()
    return code


def leave(code: int) -> None:
    """End the process, whatever is running in it."""
    lines.finish()
    for file in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError, ValueError):  # no reader, or closed
            file.flush()
    os._exit(code)


def stop_by_signal(worker: Worker, supervisor: Link) -> None:
    """Stop at signals, also at those that came before, and when the supervisor says so.

    A signal that comes both ways counts once. So do SIGTERM and SIGINT at the same time, that is
    before the worker has started to stop.
    """
    came_at = 0.0
    relayed = 0  # signals that came from the supervisor

    def on_relay(why: str) -> None:
        nonlocal relayed
        relayed += 1
        if relayed > len(signals):
            worker.stop(why)

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal came_at
        is_other = bool(signals) and signals[-1] != number
        now = time.monotonic()
        if is_other and now < came_at + TOGETHER and not worker.turns.is_paused:
            return
        came_at = now
        signals.append(number)
        if len(signals) > relayed:
            worker.stop(f"told by {signal.Signals(number).name}")
        if len(signals) > 2:
            os._exit(128 + number)

    def default_in_child() -> None:
        for number in BOTH:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BOTH)

    before = list(signals)
    for number in BOTH:
        signal.signal(number, on_signal)
    # A child that a handler forks must end at SIGTERM like any other, however early.
    if hasattr(os, "fork"):
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, BOTH),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, BOTH),
            after_in_child=default_in_child,
        )
    for early in before:
        worker.stop(f"told by {signal.Signals(early).name}")
    supervisor.listen(on_relay)


def check(conninfo: str, is_one_of_several: bool) -> int:
    """Say in one line whether a worker can use this database."""
    where = f"{database.name(conninfo)}: " if is_one_of_several else ""
    # stop_early would exit with 0: ok.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        with database.connect(conninfo) as conn:
            ((installed,),) = database.execute(conn, VERSION)
            told = advice(installed)
            denied = database.execute(conn, DENIED).fetchall()
            ((is_read_only,),) = database.execute(conn, "show transaction_read_only")
            is_pooled = run_without_loop(database.is_pooled(conn))
    except database.INCOMPATIBLE as error:
        print(f"{where}no pgqueue: {explain(error)}")
        return 3
    except psycopg.Error as error:
        print(f"{where}failed: {explain(error, 'worker')}")
        return 1
    if denied:
        names = ", ".join(name for (name,) in denied)
        print(f"{where}not allowed: {names}: pgqueue.grant_access(role, 'worker')")
        return 1
    if is_read_only == "on":
        print(f"{where}failed: the database is read-only, as on a standby")
        return 1
    how = "polling: NOTIFY does not arrive" if is_pooled else "notified"
    print(f"{where}ok: pgqueue {installed}, {how}{f'; {told}' if told else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
