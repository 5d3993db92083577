"""Measure pgqueue beside pgmq and bare SQL, in turn, on the cluster of PGHOST, PGPORT ...

    make bench              all workloads, five rounds
    make bench ARGS='--rounds 3 held deep'

Prints one table for each workload: medians, the smallest and largest round, the ratio to
pgmq, and the server's CPU time and WAL for each job. Every run counts its jobs: one that
is lost or handled twice ends the benchmark.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psycopg

from bench.systems import System, systems

CLIENTS = 8


@dataclass
class Sample:
    rate: float
    cpu_us: float
    wal_bytes: float


@contextmanager
def session() -> Iterator[psycopg.Connection[tuple]]:
    with psycopg.connect(autocommit=True) as conn:
        yield conn


def number(conn: psycopg.Connection[tuple], query: str) -> int:
    row = conn.execute(query).fetchone()
    assert row
    return int(row[0])


def times(pid: str) -> list[int]:
    """utime, stime, and those of the children that it has waited for, in ticks."""
    return [
        int(t)
        for t in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]
    ]


def server_cpu(conn: psycopg.Connection[tuple]) -> float:
    """Seconds of CPU that the server has used: the postmaster, its children, those that ended."""
    backend = number(conn, "select pg_backend_pid()")
    postmaster = Path(f"/proc/{backend}/stat").read_text().rsplit(")", 1)[1].split()[1]
    while True:
        try:
            living = (
                Path(f"/proc/{postmaster}/task/{postmaster}/children")
                .read_text()
                .split()
            )
            ticks = sum(times(postmaster)) + sum(sum(times(pid)[:2]) for pid in living)
            return ticks / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:
            continue  # one ended meanwhile, and counts as the postmaster's now


def measure(jobs: int, run: Callable[[], float | None]) -> Sample:
    """Run it; its own idea of the seconds, if it has one, counts."""
    with session() as conn:
        conn.execute("checkpoint")
        lsn = conn.execute("select pg_current_wal_lsn()").fetchone()
        cpu, began = server_cpu(conn), time.monotonic()
        seconds = run() or time.monotonic() - began
        cpu = server_cpu(conn) - cpu
        wal = conn.execute("select pg_current_wal_lsn() - %s::pg_lsn", lsn).fetchone()
    assert wal
    return Sample(jobs / seconds, cpu / jobs * 1e6, float(wal[0]) / jobs)


def pgbench(script: str, clients: int, transactions: int, mode: str) -> float:
    """Run a script so many times for each client; return the seconds without connecting."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        command = ["pgbench", "-n", "-M", mode, "-f", file.name]
        command += ["-c", str(clients), "-j", "2", "-t", str(transactions)]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout
    done = re.search(r"actually processed: (\d+)/(\d+)", output)
    rate = re.search(r"tps = ([\d.]+)", output)
    assert done and rate and done[1] == done[2], output
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
    system: System, conn: psycopg.Connection[tuple], jobs: int, batch: int
) -> None:
    """Take and finish so many jobs; each id may come once."""
    seen: set[int] = set()
    while len(seen) < jobs:
        rows = conn.execute(system.take(batch)).fetchall()
        before = len(seen)
        seen.update(row[0] for row in rows)
        if not rows or len(seen) != before + len(rows):
            sys.exit(
                f"{system.name}: a batch of {len(rows)} after {before} of {jobs} jobs"
            )
        conn.execute(
            system.finish, [list(column) for column in zip(*rows, strict=True)]
        )


def enqueue(system: System) -> dict[str, Sample]:
    jobs = 20_000
    with session() as conn:
        conn.execute(system.reset)
    sample = measure(
        jobs,
        lambda: pgbench(system.enqueue + ";", CLIENTS, jobs // CLIENTS, "prepared"),
    )
    expect(system, jobs)
    return {f"one a commit, {CLIENTS} clients": sample}


def bulk(system: System) -> dict[str, Sample]:
    jobs = 100_000
    with session() as conn:
        conn.execute(system.reset)
        sample = measure(jobs, lambda: conn.execute(system.bulk(jobs)) and None)
    expect(system, jobs)
    return {"100,000 in one call": sample}


def lifecycle(system: System) -> dict[str, Sample]:
    samples = {}
    for batch, jobs, mode in ((1, 8_000, "prepared"), (50, 80_000, "simple")):
        fill(system, jobs)
        script = system.lifecycle(batch)
        samples[f"take and finish by {batch}, {CLIENTS} clients"] = measure(
            jobs,
            lambda: pgbench(script, CLIENTS, jobs // batch // CLIENTS, mode),  # noqa: B023
        )
        expect(system, 0)
    return samples


def held(system: System) -> dict[str, Sample]:
    """Ten rounds while another session holds a snapshot, so that nothing can be cleaned up."""
    jobs, samples = 20_000, {}
    with session() as conn, psycopg.connect() as holder:
        conn.execute(system.reset)
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("select 1")
        for place in range(1, 11):
            conn.execute(system.bulk(jobs))
            sample = measure(jobs, lambda: drain(system, conn, jobs, 50))
            if place in (1, 5, 10):
                samples[f"round {place} under a held snapshot"] = sample
    return samples


def deep(system: System) -> dict[str, Sample]:
    """The first 20,000 jobs of 20,000, and of 1,000,000."""
    samples = {}
    for backlog in (20_000, 1_000_000):
        fill(system, backlog)
        with session() as conn:
            sample = measure(20_000, lambda: drain(system, conn, 20_000, 50))
        samples[f"20,000 of {backlog:,} ready"] = sample
        expect(system, backlog - 20_000)
    return samples


WORKLOADS = {each.__name__: each for each in (enqueue, bulk, lifecycle, held, deep)}


def report(rounds: list[dict[str, dict[str, Sample]]], names: list[str]) -> None:
    print("| workload | system | jobs/s | min–max | × pgmq | CPU µs/job | WAL B/job |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for title in rounds[0][names[0]]:
        rates = {
            name: [
                samples[name][title].rate
                for samples in rounds
                if title in samples[name]
            ]
            for name in names
        }
        rival = next(
            (median(rates[name]) for name in names if name.startswith("pgmq")), None
        )
        for name in names:
            found = [
                samples[name][title] for samples in rounds if title in samples[name]
            ]
            if not found:
                continue
            rate = median(rates[name])
            print(
                f"| {title} | {name} | {rate:,.0f} | {min(rates[name]):,.0f}–{max(rates[name]):,.0f} "
                f"| {f'{rate / rival:.2f}' if rival else ''} "
                f"| {median(s.cpu_us for s in found):,.0f} | {median(s.wal_bytes for s in found):,.0f} |"
            )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=", ".join(WORKLOADS)
    )
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")

    measured = systems()
    with session() as conn:
        for system in measured:
            conn.execute(system.setup)
    for name in options.workloads or WORKLOADS:
        taking_part = [
            s
            for s in measured
            if s.name != "bare SQL" or name in ("enqueue", "bulk", "lifecycle")
        ]
        rounds = []
        for _ in range(options.rounds):
            # In turn, so that a slow minute of the machine meets all of them.
            rounds.append(
                {system.name: WORKLOADS[name](system) for system in taking_part}
            )
        report(rounds, [system.name for system in taking_part])


if __name__ == "__main__":
    main()
