"""What limits cost in SQL: one session that claims by 50 and completes, beside a queue without them.

Each run has a database of its own, so that no other pays for what was once configured.
"""

from dataclasses import dataclass, replace

from bench.pgbench import Drain, depth
from bench.server import Sample, Session, Size, measure, session
from bench.sql import Samples, found_lost
from bench.statements import PAYLOADS, sized
from bench.systems import System

PLAIN = "drain by 50, no groups"
# A claim that meets many full groups leaves the rest to the next: so many may come back empty.
TURNS = ["bench"] * 100
FEW = "drain by 50, 100 groups, one job of each at a time"


@dataclass(frozen=True)
class Case:
    """a queue with these settings, this many groups (0: none), and groups that are full in front of them."""

    title: str
    beside: str
    settings: str = ""
    groups: int = 0
    full: int = 0


CASES = (
    Case(PLAIN, beside=PLAIN),
    Case("drain by 50, 2,000 groups", PLAIN, groups=2000),
    Case(
        "drain by 50, 2,000 groups, one job of each at a time",
        PLAIN,
        "group_limit => 1",
        groups=2000,
    ),
    Case(
        "drain by 50, 400 groups, five jobs of each at a time",
        PLAIN,
        "group_limit => 5",
        groups=400,
    ),
    Case("drain by 50, a cap of the queue", PLAIN, "max_running => 1000"),
    Case("drain by 50, a cap of a kind", PLAIN, "kind => 'bench', max_running => 1000"),
    Case(FEW, PLAIN, "group_limit => 1", groups=100),
    Case(
        "drain by 50, 100 groups behind 10,000 that are full",
        FEW,
        "group_limit => 1",
        groups=100,
        full=10_000,
    ),
)


def limits(system: System, size: Size) -> Samples:
    """20,000 jobs of each case. Of `more`: share, of the rate of the case beside it, in %."""
    samples: Samples = {}
    for case in CASES:
        sample = samples[case.title] = drained(system, size, case)
        sample.more["share"] = 100 * sample.rate / samples[case.beside].rate
    return samples


def drained(system: System, size: Size, case: Case) -> Sample:
    system = replace(system, purpose="_limits")
    with session() as conn:
        conn.execute(f"drop database if exists {system.database} with (force)")
        conn.execute(f"create database {system.database}")
    system.run("install")
    jobs, full = size.jobs(20_000), size.jobs(case.full) if case.full else 0
    with session(system.database) as conn:
        if case.settings:
            conn.execute(f"select pgqueue.configure('bench', {case.settings})")
        if full:
            fill_up(conn, full)
        enqueue(conn, jobs, "free", case.groups)
        conn.execute("vacuum analyze")
        drain = Drain(system, conn)
        sample = measure(lambda: drain.run(jobs, size.limit, TURNS))
    return found_lost(sample, jobs, depth(system) - 2 * full)


def fill_up(conn: Session, groups: int) -> None:
    """In each of this many groups one job runs, and one waits."""
    enqueue(conn, 2 * groups, "full", groups)
    conn.execute(
        "select count(*) from pgqueue.claim('bench', 'bench', %s, lease => '1 hour')",
        (groups,),
    )


def enqueue(conn: Session, jobs: int, name: str, groups: int) -> None:
    """Add a job of each group in turn, or of none."""
    keys = (
        f"group_keys => array(select '{name} ' || n % {groups} from generate_series(1, {{n}}) as n)"
        if groups
        else "group_keys => null"
    )
    bulk = f"select count(*) from pgqueue.enqueue_many('bench', {PAYLOADS}, {keys})"
    conn.execute(sized(bulk, jobs))
