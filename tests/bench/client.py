"""Workloads through a client and a worker: a system's own, or those in rivals/."""

import time
from functools import partial
from statistics import median, quantiles
from typing import Any

import psycopg

from bench.pgbench import Drain, depth, pgbench, refill, reset
from bench.server import Sample, Session, Size, measure, number, session
from bench.sql import Samples, adds_many, found_lost
from bench.statements import sized
from bench.systems import System

SLEEPS = (0.002, 0.005)  # seconds of a handler, from and to
DEEP, SHALLOW = "drain a deep queue", "drain a shallow queue"


class Ledger:
    """Which numbered jobs of a system ran, in one worker or another."""

    def __init__(self) -> None:
        self.seen = 0
        self.twice = 0

    def add(self, answers: list[dict[str, Any]]) -> int:
        """Take down what some workers ran; return how many jobs are new."""
        before = self.seen.bit_count()
        for answer in answers:
            ran = int.from_bytes(bytes.fromhex(answer["seen"]), "little")
            self.twice += answer["twice"] + (ran & self.seen).bit_count()
            self.seen |= ran
        return self.seen.bit_count() - before


def drain(
    system: System,
    jobs: int,
    limit: float,
    ledger: Ledger,
    workers: int = 1,
    **how: Any,
) -> Sample:
    """Let worker processes do this many jobs, or what time allows."""

    def run() -> Sample:
        twice = ledger.twice
        started = [
            system.start("drain", jobs=jobs, limit=limit, depth=system.sql.depth, **how)
            for _ in range(workers)
        ]
        answers = [system.answer(process) for process in started]
        sample = Sample(
            ledger.add(answers),
            max(answer["seconds"] for answer in answers) or limit,
            twice=ledger.twice - twice,
            cut=any(answer["cut"] for answer in answers),
        )
        if waits := answers[0]["waits"]:
            sample.more = {"p50": waits[0] * 1000, "p99": waits[1] * 1000}
        return sample

    return measure(run)


def emptied(system: System, jobs: int, size: Size, **how: Any) -> Sample:
    """Drain what there is, and look for what is missing then."""
    sample = drain(system, jobs, size.limit, Ledger(), **how)
    return found_lost(sample, jobs, depth(system))


def drains(system: System, size: Size) -> Samples:
    """No-op jobs, enqueued in bulk: one worker process, and two."""
    jobs = size.jobs(100_000 // system.slow)
    how = noop(system, size)
    samples = {}
    for workers in (1, 2):
        reset(system)
        system.run("bulk", jobs=jobs)
        title = f"drain, {workers} worker process{'es' * (workers - 1)}"
        samples[title] = emptied(system, jobs, size, workers=workers, **how)
    return samples


def noop(system: System, size: Size) -> dict[str, str]:
    """For pgqueue, whose worker runs async and sync handlers: the quicker, found out once."""
    if system.name == "pgqueue" and not system.noop:
        rates = {}
        for kind in ("noop", "sync"):
            jobs = size.jobs(40_000)
            reset(system)
            system.run("bulk", jobs=jobs)
            rates[kind] = emptied(system, jobs, size, kind=kind).rate
        system.noop = max(rates, key=rates.__getitem__)
        told = f"async {rates['noop']:,.0f} jobs/s, sync {rates['sync']:,.0f}"
        print(f"pgqueue's handlers: {told}; the quicker from here on", flush=True)
    return {"kind": system.noop} if system.noop else {}


def ceiling(system: System, size: Size) -> Samples:
    """pgqueue's worker beside what its functions do: two pgbench clients, by 500."""
    how = noop(system, size)
    jobs = max(1, size.jobs(100_000) // 1000) * 1000
    script = system.sql.lifecycle(500)
    refill(system, jobs)

    def run() -> Sample:
        limit = str(jobs // 1000)
        _, seconds = pgbench(system, script, "-t", limit, clients=2, mode="simple")
        return Sample(jobs - depth(system), seconds)

    in_sql = measure(run)
    reset(system)
    system.run("bulk", jobs=jobs)
    worker = emptied(system, jobs, size, **how)
    worker.more = {"share": 100 * worker.rate / in_sql.rate}
    return {
        "claim and complete by 500, 2 clients": in_sql,
        "drain, the worker beside it": worker,
    }


def sleeps(system: System, size: Size) -> Samples:
    """Priorities 0 to 10, handlers that sleep 2 to 5 ms, at most 32 at a time.

    No more than 9,100 a second, therefore, and in fact what 32 tasks do that only sleep: `share`
    is in % of those, on the same loop just before. Of `more`, too: p99 of the wait, in ms from
    the worker's start, and the leases that expired, in %: where there is no log of them, the
    jobs that ran again.
    """
    jobs = size.jobs(20_000 // min(10, system.slow))
    reset(system)
    system.run("bulk", jobs=jobs, priorities=11)
    alone = None
    if system.kind == "pip":
        alone = system.run("sleepers", jobs=jobs, sleeps=SLEEPS)["rate"]
    sample = emptied(system, jobs, size, sleeps=SLEEPS)
    if alone:
        sample.more["share"] = 100 * sample.rate / alone
    expired = sample.twice
    if system.sql.expired:
        with session(system.database) as conn:
            expired = number(conn, system.sql.expired)
    sample.more["expired"] = 100 * expired / jobs
    return {"drain, handlers that sleep 2–5 ms, 32 at once": sample}


def latency(system: System, size: Size) -> Samples:
    """One job each 20 ms to an idle worker: percentiles in ms from its commit."""
    title = "pickup, from commit to handler"
    if not system.command:
        return {title: round_trip(system)}
    jobs = size.jobs(400)
    reset(system)
    began = time.monotonic()
    answer = system.run("latency", jobs=jobs)
    if system.sql.quiet:
        with session(system.database) as conn:
            conn.execute(system.sql.quiet)
    found = answer["ms"]
    sample = Sample(len(found), time.monotonic() - began, twice=answer["twice"])
    sample.more = percentiles(found)
    return {title: found_lost(sample, jobs, depth(system))}


def round_trip(system: System) -> Sample:
    """The same of `select 1`, from Python: what one round trip takes here."""
    taken = []
    with session(system.database) as conn:
        for _ in range(1000):
            began = time.monotonic()
            conn.execute("select 1", prepare=True).fetchone()
            taken.append((time.monotonic() - began) * 1000)
    return Sample(len(taken), sum(taken) / 1000, more=percentiles(taken))


def percentiles(values: list[float]) -> dict[str, float]:
    parts = quantiles(values, n=100)
    return {"p50": median(values), "p95": parts[94], "p99": parts[98]}


def payloads(system: System, size: Size) -> Samples:
    """Payloads of 100 bytes, 2 kB and 100 kB, in bulk and through one worker."""
    samples = {}
    for length, count in ((100, 10_000), (2_000, 10_000), (100_000, 800)):
        jobs = size.jobs(count // min(10, system.slow))
        reset(system)

        samples[f"enqueue payloads of {length:,} B in bulk"] = measure(
            partial(adds_many, system, jobs, size=length)
        )
        samples[f"drain payloads of {length:,} B"] = emptied(system, jobs, size)
    return samples


def held(system: System, size: Size) -> Samples:
    """Ten rounds while another session holds a snapshot, so that nothing is cleaned up.

    By claims of 50 in SQL, where there are such; else by a worker.
    """
    in_sql = bool(system.sql.complete)
    jobs = size.jobs(50_000 if in_sql else 20_000 // system.slow)
    samples: Samples = {}
    ledger = Ledger()
    reset(system)
    with (
        session(system.database) as conn,
        psycopg.connect(dbname=system.database) as holder,
    ):
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("select 1")
        by_claims = Drain(system, conn)
        for place in range(size.rounds(10)):
            if in_sql:
                conn.execute(sized(system.sql.bulk, jobs))
                sample = measure(partial(by_claims.run, jobs, size.limit / 5))
            else:
                system.run("bulk", jobs=jobs, first=place * jobs)
                sample = drain(system, jobs, size.limit / 5, ledger)
                sample.more = {}  # its waits are not those of claims
            samples[str(place + 1)] = sample
    done = sum(s.jobs for s in samples.values())
    sample.lost = max(0, len(samples) * jobs - done - depth(system))
    return samples


def deep(system: System, size: Size) -> Samples:
    """The first of few jobs, and of a million beside a million for tomorrow, more urgent.

    As in held: by claims of 50 in SQL, or by a worker.
    """
    samples = {}
    jobs = size.jobs(20_000 // min(20, system.slow))
    for title, backlog in (SHALLOW, jobs), (DEEP, size.jobs(1_000_000)):
        in_all = backlog * (1 + (title == DEEP))
        with session(system.database) as conn:
            if system.sql.complete:
                refill(system, backlog)
                if in_all > backlog:
                    conn.execute(sized(system.sql.tomorrow, backlog))
                    conn.execute("vacuum analyze")
                by_claims = Drain(system, conn)
                sample = measure(partial(by_claims.run, jobs, size.limit))
            else:
                filled(system, conn, backlog, in_all > backlog)
                sample = drain(system, jobs, size.limit, Ledger())
                sample.more = {}
        samples[title] = found_lost(sample, in_all, depth(system))
    reset(system)
    return samples


def steps(system: System, size: Size) -> Samples:
    """Jobs of ten steps, one a commit; and jobs that wait for an event each, until it is emitted.

    What a job costs includes its enqueue, but the time does not.
    """
    samples = {}
    jobs = size.jobs(400)
    for title, waits in (
        ("jobs of 10 steps", False),
        ("jobs that wait for an event, which is emitted once all do", True),
    ):
        reset(system)

        def run(waits: bool = waits) -> Sample:
            system.run("bulk", jobs=jobs)
            ledger, depth_ = Ledger(), system.sql.depth
            answer = system.run(
                "steps", jobs=jobs, limit=size.limit, depth=depth_, waits=waits
            )
            done = ledger.add([answer])
            return Sample(
                done, answer["seconds"], twice=answer["twice"], cut=answer["cut"]
            )

        samples[title] = found_lost(measure(run), jobs, depth(system))
    reset(system)
    return samples


def filled(system: System, conn: Session, jobs: int, tomorrow: bool) -> None:
    """Leave this many jobs in its tables, and perhaps as many for tomorrow."""
    reset(system)
    system.run("bulk", jobs=1)  # for what else a first job makes
    reset(system)
    for later in (False, True)[: 1 + tomorrow]:
        if system.sql.insert:
            conn.execute(system.sql.fill(jobs, later))
        else:
            system.run("bulk", jobs=jobs, **({"tomorrow": True} if later else {}))
    conn.execute("vacuum analyze")
