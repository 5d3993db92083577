"""What a run costs the server: CPU time and WAL; and the plain session that asks for it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg


@dataclass
class Sample:
    """One run: jobs a second, server CPU microseconds and WAL bytes a job."""

    rate: float
    cpu_us: float
    wal_bytes: float
    p99_ms: float = 0.0  # of a claim, where that was asked for


@contextmanager
def session() -> Iterator[psycopg.Connection[tuple]]:
    with psycopg.connect(autocommit=True) as conn:
        yield conn


def number(conn: psycopg.Connection[tuple], query: str) -> int:
    row = conn.execute(query).fetchone()
    assert row
    return int(row[0])


def measure(jobs: int, run: Callable[[], float | None]) -> Sample:
    """Run it; its own idea of the seconds, if it has one, counts."""
    with session() as conn:
        conn.execute("checkpoint")
        lsn = conn.execute("select pg_current_wal_lsn()").fetchone()
        cpu, began = _cpu(conn), time.monotonic()
        seconds = run() or time.monotonic() - began
        cpu = _cpu(conn) - cpu
        wal = conn.execute("select pg_current_wal_lsn() - %s::pg_lsn", lsn).fetchone()
    assert wal
    return Sample(jobs / seconds, cpu / jobs * 1e6, float(wal[0]) / jobs)


def _cpu(conn: psycopg.Connection[tuple]) -> float:
    """Seconds used by the postmaster, its children, and those that have ended."""
    backend = number(conn, "select pg_backend_pid()")
    postmaster = _fields(backend)[1]
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children")
    while True:
        try:
            living = children.read_text().split()
            ticks = sum(_times(postmaster)) + sum(
                sum(_times(pid)[:2]) for pid in living
            )
            return ticks / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:
            continue  # one ended meanwhile, and counts as the postmaster's now


def _fields(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _times(pid: str) -> list[int]:
    """utime, stime, and those of the children that it has waited for, in ticks."""
    return [int(t) for t in _fields(pid)[11:15]]
