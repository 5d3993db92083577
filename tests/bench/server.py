"""What a run did and what it cost the server: rate, CPU time, WAL; and plain sessions."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

Session = psycopg.Connection[tuple[Any, ...]]


@dataclass
class Sample:
    """One run: how many different jobs it did, in what time, at what cost, and what went wrong.

    lost jobs were neither handled nor are they still there; twice counts handlings after
    a job's first. A run that was cut short did what `jobs` says. Of `more`, each workload
    knows the meaning.
    """

    jobs: int
    seconds: float
    lost: int = 0
    twice: int = 0
    cut: bool = False
    more: dict[str, float] = field(default_factory=dict)
    cpu_us: float = 0.0  # of the server, for each job
    wal_bytes: float = 0.0

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds


@dataclass(frozen=True)
class Size:
    """How large a run is to be."""

    scale: float = 1.0
    limit: float = 40.0  # seconds for one drain

    def jobs(self, full: int) -> int:
        """So many, scaled, such that 8 clients can share them out in batches of 50."""
        return max(1, round(full * self.scale / 400)) * 400

    def seconds(self, full: float) -> int:
        return max(1, round(full * self.scale))

    def rounds(self, full: int) -> int:
        return full if self.scale >= 1 else max(3, round(full * self.scale))


@contextmanager
def session(database: str = "postgres") -> Iterator[Session]:
    with psycopg.connect(dbname=database, autocommit=True) as conn:
        yield conn


def number(conn: Session, query: str) -> int:
    row = conn.execute(query).fetchone()
    assert row
    return int(row[0])


def measure(run: Callable[[], Sample]) -> Sample:
    """Run it, after a checkpoint, and add what it cost."""
    with session() as conn:
        conn.execute("checkpoint")
        lsn = conn.execute("select pg_current_wal_lsn()").fetchone()
        cpu = cpu_of(conn)
        sample = run()
        cpu = cpu_of(conn) - cpu
        wal = conn.execute("select pg_current_wal_lsn() - %s::pg_lsn", lsn).fetchone()
    assert wal
    if sample.jobs:
        sample.cpu_us = cpu / sample.jobs * 1e6
        sample.wal_bytes = float(wal[0]) / sample.jobs
    return sample


def cpu_of(conn: Session) -> float:
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
        except (FileNotFoundError, ProcessLookupError):
            continue  # one ended meanwhile, and counts as the postmaster's now


def _fields(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _times(pid: str) -> list[int]:
    """utime, stime, and those of the children that it has waited for, in ticks."""
    return [int(t) for t in _fields(pid)[11:15]]
