"""Workloads in SQL alone: every system by its functions, from pgbench or one session."""

import re
import subprocess
import sys
import tempfile
from statistics import quantiles
from time import monotonic

import psycopg

from bench.server import Sample, measure, number, session
from bench.systems import System

CLIENTS = 8


def pgbench(script: str, clients: int, transactions: int, mode: str) -> float:
    """Run a script so many times for each client; return the seconds without connecting."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        command = ["pgbench", "-n", "-M", mode, "-f", file.name]
        command += ["-c", str(clients), "-j", "2", "-t", str(transactions)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
    done = re.search(r"actually processed: (\d+)/(\d+)", ran.stdout)
    rate = re.search(r"tps = ([\d.]+)", ran.stdout)
    assert done and rate and done[1] == done[2], ran.stdout
    return int(done[1]) / float(rate[1])


def expect(system: System, jobs: int) -> None:
    with session() as conn:
        found = number(conn, system.depth)
    if found != jobs:
        sys.exit(f"{system.name}: {found} jobs are there, {jobs} should be")


def fill(system: System, jobs: int) -> None:
    with session() as conn:
        conn.execute(system.reset)
        conn.execute(system.bulk(jobs))
        conn.execute("vacuum analyze")


def drain(
    system: System, conn: psycopg.Connection[tuple], jobs: int, batch: int = 50
) -> list[float]:
    """Take and finish so many jobs; each id may come once. Return the ms of each take."""
    seen: set[int] = set()
    taken = []
    while len(seen) < jobs:
        began = monotonic()
        rows = conn.execute(system.take(batch)).fetchall()
        taken.append((monotonic() - began) * 1000)
        before = len(seen)
        seen.update(row[0] for row in rows)
        if not rows or len(seen) != before + len(rows):
            sys.exit(f"{system.name}: {len(rows)} jobs after {before} of {jobs}")
        ids = [list(column) for column in zip(*rows, strict=True)]
        conn.execute(system.finish, ids)
    return taken


def enqueue(system: System, jobs: int = 20_000) -> dict[str, Sample]:
    """One job a commit: nobody waiting, with slow commits, with an idle worker."""
    samples = {"one a commit, 8 clients": _enqueue(system, jobs)}
    if system.name == "bare SQL":
        return samples
    with session() as conn:
        if system.notify:
            conn.execute(system.notify)
        # As on a network's disk. A commit that others follow waits for them, too.
        conn.execute("alter system set commit_delay = 2000")
        conn.execute("alter system set commit_siblings = 0")
        conn.execute("select pg_reload_conf()")
        title = "commits of 2 ms, can notify, nobody waits"
        samples[title] = _enqueue(system, jobs // 4)
        conn.execute("alter system reset all")
        conn.execute("select pg_reload_conf()")
        with session() as worker:
            worker.execute(system.idle)
            samples["an idle worker is notified"] = _enqueue(system, jobs // 4)
        if system.quiet:
            conn.execute(system.quiet)
    return samples


def _enqueue(system: System, jobs: int) -> Sample:
    with session() as conn:
        conn.execute(system.reset)
    script = system.enqueue + ";"
    sample = measure(
        jobs, lambda: pgbench(script, CLIENTS, jobs // CLIENTS, "prepared")
    )
    expect(system, jobs)
    return sample


def bulk(system: System, jobs: int = 100_000) -> dict[str, Sample]:
    with session() as conn:
        conn.execute(system.reset)
        sample = measure(jobs, lambda: conn.execute(system.bulk(jobs)) and None)
    expect(system, jobs)
    return {f"{jobs:,} in one call": sample}


def lifecycle(system: System, jobs: int = 80_000) -> dict[str, Sample]:
    samples = {}
    for batch, size, mode in ((1, jobs // 10, "prepared"), (50, jobs, "simple")):
        fill(system, size)
        script = system.lifecycle(batch)
        samples[f"take and finish by {batch}, {CLIENTS} clients"] = measure(
            size,
            lambda: pgbench(script, CLIENTS, size // batch // CLIENTS, mode),  # noqa: B023
        )
        expect(system, 0)
    return samples


def held(system: System, jobs: int = 20_000) -> dict[str, Sample]:
    """Ten rounds while another session holds a snapshot, so that nothing is cleaned up."""
    samples = {}
    with session() as conn, psycopg.connect() as holder:
        conn.execute(system.reset)
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("select 1")
        for place in range(1, 11):
            conn.execute(system.bulk(jobs))
            taken: list[float] = []
            sample = measure(jobs, lambda: taken.extend(drain(system, conn, jobs)))  # noqa: B023
            sample.p99_ms = quantiles(taken, n=100)[98]
            samples[str(place)] = sample
    return samples


def deep(system: System, jobs: int = 20_000) -> dict[str, Sample]:
    """The first of few jobs, and of a million beside a million for tomorrow."""
    samples = {}
    for backlog in (jobs, 50 * jobs):
        fill(system, backlog)
        with session() as conn:
            if backlog > jobs and system.tomorrow:
                conn.execute(system.tomorrow(backlog))
                conn.execute("vacuum analyze")
            sample = measure(jobs, lambda: drain(system, conn, jobs) and None)
        samples[f"{jobs:,} of {backlog:,} ready"] = sample
    return samples
