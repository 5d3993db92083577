"""Groups whose jobs must run one after the other, tenants that must not wait for a large one, and rates.

Each run has a database of its own, so that what groups leave behind, or need, changes no
other workload.
"""

import json
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.pgbench import depth
from bench.rivals.driver import RATE
from bench.server import Sample, Size, measure, session
from bench.sql import Samples, found_lost
from bench.systems import System

EACH = 10  # jobs of a small group
HOLD = 0.001  # seconds
PROCESSES = 2

Run = tuple[int, float, float]  # a job's number, when it began and when it ended


@dataclass(frozen=True)
class Load:
    """One group of `busy` jobs, enqueued first, and this many small ones, a job of each in turn."""

    busy: int
    groups: int

    @property
    def few(self) -> int:
        return self.groups * EACH

    @property
    def jobs(self) -> int:
        return self.busy + self.few

    def group(self, n: int) -> int:
        return -1 if n < self.busy else (n - self.busy) % self.groups


def groups(system: System, size: Size) -> Samples:
    """Many groups of 10, one job of each at a time: alone, and behind a group as large as all.

    Two worker processes with 32 handlers each, which hold a job for 1 ms; until all jobs of
    the small groups are done.
    """
    few = size.jobs(20_000 // system.slow)
    alone, behind = Load(0, few // EACH), Load(few, few // EACH)
    return {
        "drain groups of 10, one job of each at a time": drained(system, size, alone),
        "drain groups of 10 behind a large one": drained(system, size, behind),
    }


def loose(system: System, size: Size) -> Samples:
    """The same by pg-boss's other way, which does not promise it."""
    few = size.jobs(20_000)
    alone, behind = Load(0, few // EACH), Load(few, few // EACH)
    return {
        "drain groups of 10 by groupConcurrency": drained(system, size, alone, "loose"),
        "drain groups of 10 behind a large one by groupConcurrency": drained(
            system, size, behind, "loose"
        ),
    }


def fairness(system: System, size: Size) -> Samples:
    """1,000 tenants of 10 jobs, enqueued after one of 100,000; no limits."""
    load = Load(size.jobs(100_000), size.jobs(10_000) // EACH)
    return {
        "drain 1,000 tenants of 10 behind one of 100,000": drained(
            system, size, load, "free"
        )
    }


def rates(system: System, size: Size) -> Samples:
    """Ten seconds of a queue in which 200 jobs may begin each second."""
    load = Load(0, size.jobs(10 * RATE) // EACH)
    return {"200 jobs a second": drained(system, size, load, "rates")}


def drained(system: System, size: Size, load: Load, kind: str = "groups") -> Sample:
    """Let two worker processes do them, and count what went wrong.

    The kind is "groups", "loose" (see driver.mjs), "free", without a limit, or "rates".
    """
    how = {"kind": kind} if system.kind == "npm" or kind == "rates" else {}
    system = replace(system, purpose="_groups")
    with session() as conn:
        conn.execute(f"drop database if exists {system.database} with (force)")
        conn.execute(f"create database {system.database}")
    system.run("install", limited=kind in ("groups", "loose"))
    parted = {} if kind == "rates" else {"busy": load.busy, "groups": load.groups}
    system.run(
        "bulk", jobs=load.jobs, **parted, **(how if system.kind == "npm" else {})
    )
    with session(system.database) as conn:
        conn.execute("vacuum analyze")
    sample = measure(lambda: work(system, size.limit, load, **how))
    return found_lost(sample, load.jobs, depth(system))


def work(system: System, limit: float, load: Load, **how: str) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        started = [
            system.start(
                "groups",
                few=load.few,
                busy=load.busy,
                limit=limit,
                hold=HOLD,
                folder=folder,
                **how,
            )
            for _ in range(PROCESSES)
        ]
        return judged([system.answer(process) for process in started], load, limit)


def judged(answers: list[dict[str, Any]], load: Load, limit: float) -> Sample:
    """A sample of what some workers ran.

    Of `more`: the jobs of small groups per second, those that began while another of their
    group ran, those that began before an earlier one of their group, how many had begun when
    the last of the small groups began, and the most that began in 0.9 seconds.
    """
    runs: list[Run] = [
        (n, begin, end)
        for each in answers
        for n, begin, end in json.loads(Path(each["runs"]).read_text())
    ]
    began: dict[int, float] = {}
    for n, begin, _ in runs:
        began[n] = min(begin, began.get(n, begin))
    start = min(each["start"] for each in answers)
    last = max(each["last"] for each in answers)
    cut = any(each["cut"] for each in answers)
    # One that comes to a halt takes all its time.
    seconds = max(last - start, limit if cut else 0)
    few = [begin for n, begin in began.items() if n >= load.busy]
    busiest = most(sorted(began.values()), 0.9)
    return Sample(
        len(began),
        seconds,
        twice=len(runs) - len(began),
        cut=cut,
        more={
            "small": len(few) / seconds,
            "together": sum(map(together, by_group(runs, load))),
            "overtook": overtook(began, load),
            "begun": sum(begin <= max(few, default=0) for begin in began.values()),
            "most": busiest,
            "over": max(0, busiest - RATE),
        },
    )


def by_group(runs: Iterable[Run], load: Load) -> Iterable[list[Run]]:
    found: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        found[load.group(run[0])].append(run)
    return found.values()


def together(runs: list[Run]) -> int:
    """How many of a group's jobs began while another of them ran."""
    count, end = 0, 0.0
    for _, begin, over in sorted(runs, key=lambda run: run[1]):
        count += begin < end
        end = max(end, over)
    return count


def overtook(began: dict[int, float], load: Load) -> int:
    """How many jobs began before one that was enqueued earlier in their group, if that ever did."""
    latest: dict[int, float] = defaultdict(float)
    count = 0
    for n in range(load.jobs):
        begin = began.get(n, float("inf"))
        group = load.group(n)
        count += begin < latest[group]
        latest[group] = max(begin, latest[group])
    return count


def most(begins: Sequence[float], seconds: float) -> int:
    """The most that began in any stretch of this many seconds, of times in order."""
    return max(
        (
            place + 1 - bisect_left(begins, begin - seconds)
            for place, begin in enumerate(begins)
        ),
        default=0,
    )
