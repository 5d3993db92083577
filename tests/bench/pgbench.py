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
from bench.statements import Statements
from bench.systems import System

CLIENTS = 8
MOST = 1_000_000  # jobs in one call, whose array must stay below 1 GB


def statements(system: System) -> Statements:
    assert system.sql
    return system.sql


def sized(statement: str, jobs: int) -> str:
    """Fill in the number; other braces are JSON's."""
    return statement.replace("{n}", str(jobs))


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
    if system.sql:
        with session(system.database) as conn:
            return number(conn, system.sql.depth)
    return int(system.run("depth")["jobs"])


def reset(system: System) -> None:
    if system.sql:
        with session(system.database) as conn:
            conn.execute(system.sql.reset)
    else:
        system.run("reset")


def refill(system: System, jobs: int) -> None:
    """Leave so many jobs there, and the planner's statistics of them."""
    reset(system)
    with session(system.database) as conn:
        for place in range(0, jobs, MOST):
            conn.execute(sized(statements(system).bulk, min(MOST, jobs - place)))
        conn.execute("vacuum analyze")


class Drain:
    """One session that takes batches of jobs and finishes them; counts each job."""

    def __init__(self, system: System, conn: Session, batch: int = 50) -> None:
        self.sql = statements(system)
        self.conn = conn
        self.batch = batch
        self.seen: set[Any] = set()

    def run(self, jobs: int, limit: float, queues: Sequence[str] = ()) -> Sample:
        """Do so many jobs, of each queue in turn if there are several, or what time allows.

        Of `more`: p99, of a take in ms.
        """
        done = twice = place = empty = 0
        taken: list[float] = []
        began = time.monotonic()
        cut = False
        while done < jobs and not cut and empty <= len(queues):
            queue = queues[place % len(queues)] if queues else "bench"
            place += 1
            before = time.monotonic()
            rows = self.conn.execute(self._of(self.sql.take, queue)).fetchall()
            taken.append((time.monotonic() - before) * 1000)
            empty = 0 if rows else empty + 1
            if rows:
                columns = [list(column) for column in zip(*rows, strict=True)]
                names = {(queue, id) for id in columns[0]}
                twice += len(rows) - len(names - self.seen)
                self.seen |= names
                self.conn.execute(self._of(self.sql.finish, queue), columns)
            done += len(rows)
            cut = time.monotonic() - began > limit
        seconds = time.monotonic() - began
        p99 = quantiles(taken, n=100)[98] if len(taken) > 1 else taken[0]
        return Sample(done - twice, seconds, twice=twice, cut=cut, more={"p99": p99})

    def _of(self, statement: str, queue: str) -> str:
        return sized(statement.replace("'bench'", f"'{queue}'"), self.batch)
