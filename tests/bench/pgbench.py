"""The two ways to drive a system by SQL: pgbench for many clients, one session for a drain."""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from bench.server import Sample, Session, number, session
from bench.statements import sized
from bench.systems import System

CLIENTS = 8
MOST = 1_000_000  # jobs in one call, whose array must stay below 1 GB


def pgbench(
    system: System, script: str, *limit: str, clients: int = CLIENTS, mode: str
) -> tuple[int, float]:
    """Run a script until -t or -T; return the transactions, and seconds without connecting."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        command = ["pgbench", "-n", "-M", mode, "-f", file.name, *limit]
        command += ["-c", str(clients), "-j", "2"]
        ran = subprocess.run(
            command,
            check=False,
            env={**os.environ, "PGDATABASE": system.database},
            capture_output=True,
            text=True,
        )
    done = re.search(r"actually processed: (\d+)", ran.stdout)
    rate = re.search(r"tps = ([\d.]+)", ran.stdout)
    if ran.returncode or not done or not rate:
        raise RuntimeError(f"{system.name}: {script}\n{ran.stderr}")
    return int(done[1]), int(done[1]) / float(rate[1])


def adds(system: System, script: str, seconds: int) -> Sample:
    """Enqueue one a commit for so long, and count what is there."""
    before = depth(system)
    done, taken = pgbench(system, script, "-T", str(seconds), mode="prepared")
    return counted(done, taken, depth(system) - before)


def counted(jobs: int, seconds: float, found: int) -> Sample:
    """A sample of an enqueue, with its losses."""
    return Sample(jobs, seconds, lost=max(0, jobs - found), twice=max(0, found - jobs))


def depth(system: System) -> int:
    """Count the unfinished jobs."""
    with session(system.database) as conn:
        return number(conn, system.sql.depth)


def reset(system: System) -> None:
    with session(system.database) as conn:
        conn.execute(system.sql.reset)


def refill(system: System, jobs: int) -> None:
    """Leave this many jobs there, and the planner's statistics of them."""
    reset(system)
    with session(system.database) as conn:
        for place in range(0, jobs, MOST):
            conn.execute(sized(system.sql.bulk, min(MOST, jobs - place)))
        conn.execute("vacuum analyze")


def filled_queues(conn: Session, system: System, count: int, each: int) -> None:
    """Leave this many jobs in each of the queues q1, q2 ..., and statistics of them."""
    bulk = of(sized(system.sql.bulk, each), "'q' || g.q")
    conn.execute(f"select ({bulk}) from generate_series(1, {count}) as g (q)")
    conn.execute("vacuum analyze")


def of(statement: str, queue: str) -> str:
    """The statement for another queue, whose name is this expression of SQL."""
    return statement.replace("'bench'", queue)


def of_any(statement: str, count: int) -> str:
    """A pgbench script of the statement for one of the queues q1, q2 ..., at random."""
    return f"\\set q random(1, {count})\n" + of(statement, "'q' || :q") + ";"


def columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Turn rows into the arrays that functions take."""
    return [list(column) for column in zip(*rows, strict=True)]


class Drain:
    """One session that claims batches of jobs and completes them; counts each job."""

    def __init__(self, system: System, conn: Session, batch: int = 50) -> None:
        self.sql = system.sql
        self.conn = conn
        self.batch = batch
        self.seen: set[Any] = set()

    def run(self, jobs: int, limit: float, queues: Sequence[str] = ()) -> Sample:
        """Do this many jobs, of each queue in turn if there are several, or what time allows.

        Of `more`: p99, of a claim in ms.
        """
        done = twice = place = empty = 0
        claims: list[float] = []  # in ms
        began = time.monotonic()
        cut = False
        while done < jobs and not cut and empty <= len(queues):
            queue = queues[place % len(queues)] if queues else "bench"
            place += 1
            before = time.monotonic()
            rows = self.conn.execute(self._of(self.sql.claim, queue)).fetchall()
            claims.append((time.monotonic() - before) * 1000)
            empty = 0 if rows else empty + 1
            if rows:
                arrays = columns(rows)
                names = {(queue, id) for id in arrays[0]}
                twice += len(rows) - len(names - self.seen)
                self.seen |= names
                self.conn.execute(self._of(self.sql.complete, queue), arrays)
            done += len(rows)
            cut = time.monotonic() - began > limit
        seconds = time.monotonic() - began
        p99 = quantiles(claims, n=100)[98] if len(claims) > 1 else claims[0]
        return Sample(done - twice, seconds, twice=twice, cut=cut, more={"p99": p99})

    def _of(self, statement: str, queue: str) -> str:
        return sized(of(statement, f"'{queue}'"), self.batch)
