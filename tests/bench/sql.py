"""Workloads in SQL: every system by its functions, from pgbench or from one session."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from bench.pgbench import (
    CLIENTS,
    Drain,
    adds,
    columns,
    counted,
    depth,
    filled_queues,
    of_any,
    pgbench,
    refill,
    reset,
)
from bench.server import Sample, Session, Size, measure, session
from bench.statements import sized
from bench.systems import System

Samples = dict[str, Sample]


def enqueue(system: System, size: Size) -> Samples:
    """One job a commit: nobody waiting, with slow commits, with an idle worker.

    By pgbench; through its own client where a system composes its SQL there.
    """
    seconds = size.seconds(4)
    samples = {"enqueue one a commit, 8 clients": add(system, seconds)}
    if not system.command:
        return samples
    with session(system.database) as conn:
        if system.sql.notify:
            conn.execute(system.sql.notify)
        with slow_commits(conn):
            title = "enqueue with commits of 2 ms, nobody waits"
            samples[title] = add(system, seconds, "latency")
        if system.sql.idle:
            with session(system.database) as worker:
                worker.execute(system.sql.idle)
                samples["enqueue and notify an idle worker"] = add(system, seconds)
        if system.sql.quiet:
            conn.execute(system.sql.quiet)
    return samples


@contextmanager
def slow_commits(conn: Session) -> Iterator[None]:
    """As on a network's disk: a commit that others follow waits for them, too."""
    conn.execute("alter system set commit_delay = 2000")
    conn.execute("alter system set commit_siblings = 0")
    conn.execute("select pg_reload_conf()")
    try:
        yield
    finally:
        conn.execute("alter system reset all")
        conn.execute("select pg_reload_conf()")


def add(system: System, seconds: int, kind: str = "noop") -> Sample:
    """Enqueue; kind "latency" asks a client that does not always notify to do so."""
    reset(system)
    if system.sql.enqueue:
        script = system.sql.enqueue + ";"
        return measure(partial(adds, system, script, seconds))

    def run() -> Sample:
        how = {"kind": kind} if system.kind == "npm" else {}
        answer = system.run("enqueue", limit=seconds, clients=CLIENTS, **how)
        return counted(answer["jobs"], answer["seconds"], depth(system))

    return measure(run)


def bulk(system: System, size: Size) -> Samples:
    """Many at once: by one call in SQL, and by 5,000 a call through the client."""
    samples = {}
    jobs = size.jobs(100_000)

    def in_sql() -> Sample:
        with session(system.database) as conn:
            began = time.monotonic()
            conn.execute(sized(system.sql.bulk, jobs))
            return counted(jobs, time.monotonic() - began, depth(system))

    def by_copy() -> Sample:
        with session(system.database) as conn:
            began = time.monotonic()
            with conn.cursor().copy(system.sql.copy) as copy:
                copy.write('{"user": 4711, "template": "welcome"}\n' * jobs)
            return counted(jobs, time.monotonic() - began, depth(system))

    if system.sql.bulk:
        reset(system)
        samples[f"enqueue {jobs:,} in one call"] = measure(in_sql)
    if system.sql.copy:
        reset(system)
        samples[f"enqueue {jobs:,} by COPY"] = measure(by_copy)
    if system.command:
        jobs = size.jobs(100_000 if system.slow == 1 else 20_000)
        reset(system)
        samples["enqueue by the client, 5,000 a call"] = measure(
            partial(adds_many, system, jobs)
        )
    return samples


def adds_many(system: System, jobs: int, **how: int) -> Sample:
    """Enqueue in bulk through the client."""
    answer = system.run("bulk", jobs=jobs, **how)
    return counted(jobs, answer["seconds"], depth(system))


# Clients, jobs in a batch, and the batches of each client: enough that its first calls, which
# make the plans, are few among them.
LIFECYCLES = (
    (8, 1, 1000),
    (32, 1, 500),
    (96, 1, 300),
    (1, 50, 400),
    (8, 50, 200),
    (32, 50, 100),
    (96, 50, 100),
)


def lifecycle(system: System, size: Size) -> Samples:
    """Claim and complete in SQL, by 1 and by 50, with more and more clients."""
    samples = {}
    for clients, batch, each in LIFECYCLES:
        if batch > 1 and "{n}" not in system.sql.claim:
            continue
        each = max(1, round(each * size.scale))
        jobs = clients * batch * each
        refill(system, jobs)
        title = f"claim and complete by {batch}, {clients} client{'s' * (clients > 1)}"
        samples[title] = measure(partial(completes, system, jobs, batch, clients, each))
    return samples


def completes(system: System, jobs: int, batch: int, clients: int, each: int) -> Sample:
    """Run a lifecycle; what it left behind it did not do."""
    script = system.sql.lifecycle(batch)
    mode = "prepared" if batch == 1 else "simple"
    _, seconds = pgbench(system, script, "-t", str(each), clients=clients, mode=mode)
    return Sample(jobs - depth(system), seconds)


def heartbeats(system: System, size: Size) -> Samples:
    """A drain alone, in front of 5,000 running jobs, and while those are extended."""
    jobs, running = size.jobs(60_000), size.jobs(5_000)
    samples = {}
    for title, beside, is_extended in (
        ("drain by 50 alone", 0, False),
        ("drain by 50 beside running jobs", running, False),
        ("drain by 50 beside jobs extended each second", running, True),
    ):
        refill(system, jobs + beside)
        with session(system.database) as conn, session(system.database) as other:
            claim = sized(system.sql.claim, beside)
            rows = other.execute(claim).fetchall() if beside else []
            extend = partial(other.execute, system.sql.extend, columns(rows))
            drain = Drain(system, conn)
            with each_second(extend) if is_extended else nullcontext():
                sample = measure(partial(drain.run, jobs, min(25, size.limit)))
        samples[title] = found_lost(sample, jobs, depth(system) - len(rows))
    return samples


@contextmanager
def each_second(call: Callable[[], object]) -> Iterator[None]:
    """Call it from another thread, each second."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(1):
            call()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def found_lost(sample: Sample, jobs: int, left: int) -> Sample:
    """Note what of this many jobs was neither done nor is left."""
    sample.lost = max(0, jobs - sample.jobs - left)
    return sample


def queues(system: System, size: Size) -> Samples:
    """One a commit into a random queue, and a drain by 50 of each queue in turn."""
    samples = {}
    for count in (1, max(2, round(1_000 * size.scale))):
        names = [f"q{place}" for place in range(1, count + 1)]
        jobs = size.jobs(100_000) // count * count
        title = f"{count:,} queue{'s' * (count > 1)}"
        reset(system)
        with queues_made(system, names), session(system.database) as conn:
            script = of_any(system.sql.enqueue, count)
            run = partial(adds, system, script, size.seconds(4))
            samples[f"enqueue one a commit, {title}"] = measure(run)
            # pgmq has a table for each.
            for statement in {system.sql.reset.replace("bench", n) for n in names}:
                conn.execute(statement)
            filled_queues(conn, system, count, jobs // count)
            drain = Drain(system, conn)
            sample = measure(partial(drain.run, jobs, size.limit, names))
            left = depth(system)
        samples[f"drain by 50, {title}"] = found_lost(sample, jobs, left)
    return samples


@contextmanager
def queues_made(system: System, names: list[str]) -> Iterator[None]:
    """pgmq has to be told of its queues."""
    is_told = system.name == "pgmq"
    with session(system.database) as conn:
        for name in names if is_told else ():
            conn.execute("select pgmq.create(%s)", (name,))
        yield
        for name in names if is_told else ():
            conn.execute("select pgmq.drop_queue(%s)", (name,))
