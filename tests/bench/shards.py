"""What a job costs with 1 to 8 shards, directly and through the router, and what the router itself costs.

All shards are on one server, so rates say nothing: what is measured is CPU and WAL. Each shard gets as many
calls however many there are, some hundred in a row: on a machine of its own it would not find the caches
full of what another needs. The router is a second server, so that its CPU is counted apart. And all of it
runs on one core: one session waits while another works, and to wake an idle core of a virtual machine may
cost more CPU than the call.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import psycopg
import scale_demo
from cluster import Cluster
from pgqueue import shard_of

from bench import summary
from bench.pgbench import Drain
from bench.server import Session, Size, cpu_of, number
from bench.statements import PAYLOAD, PAYLOADS, sized
from bench.systems import System

GUIDE = summary.HERE.parents[1] / "docs/shards.md"
HEADING = "Shards"
COUNTS = (1, 2, 4, 8)
# What the guide reckons with: machines of so many cores, of which the queue gets a part.
CORES, SHARE = 8, 0.5
CPU, WAL = "CPU µs/job", "WAL B/job"
ROUTED, OWN = "routed, CPU µs/job", "router's own CPU µs/job"
# How many calls go to one shard in a row, jobs to a call of many, and jobs to each shard's first claims, which
# are not measured.
ROW, BULK, WARM = 100, 100, 1000
KEYS = f"array(select 'tenant ' || (%(k)s::int + n) %% 1000 from generate_series(1, {BULK}) as n)"
BULK_CALL = (
    f"select count(*) from pgqueue.enqueue_many('bench', {sized(PAYLOADS, BULK)}"
)
# Of each: the statement, how often it is called for each shard, and how many jobs each call adds.
CALLS = {
    "enqueue with a key": (
        f"select pgqueue.enqueue('bench', '{PAYLOAD}', group_key => 'tenant ' || %(k)s::int)",
        3000,
        1,
    ),
    "enqueue without a key": (f"select pgqueue.enqueue('bench', '{PAYLOAD}')", 3000, 1),
    f"enqueue_many of {BULK} with keys": (
        f"{BULK_CALL}, group_keys => {KEYS})",
        100,
        BULK,
    ),
}
DRAIN = "claim and complete 50"
# A claim of many groups may come back with none before all are done.
TURNS = ["bench"] * 50
KEYED, KEYLESS, MANY = CALLS
Costs = dict[tuple[str, int, bool], list["Cost"]]  # by call, shards, whether routed


@dataclass
class Cost:
    """Of a job: CPU of the shards and of the router in µs, WAL of the shards in bytes."""

    shards: float
    router: float
    wal: float


def lines(system: System, size: Size, rounds: int) -> list[str]:
    found: Costs = {}
    with one_core(), Cluster(fast=True) as server, Cluster(fast=True) as router:
        if not scale_demo.has_router(router):
            return [scale_demo.WITHOUT]
        dsns = scale_demo.set_up([server] * max(COUNTS), router)
        for count, is_routed in product(COUNTS * rounds, (False, True)):
            scale_demo.route(router, dsns[:count])
            with ExitStack() as stack:

                def connected(dsn: str, stack: ExitStack = stack) -> Session:
                    return stack.enter_context(psycopg.connect(dsn, autocommit=True))

                shards = [connected(dsn) for dsn in dsns[:count]]
                entry = connected(scale_demo.dsn(router))
                meter = Meter(connected(scale_demo.dsn(server)), entry)
                callers = [entry] if is_routed else shards
                for call, cost in costs(system, size, meter, callers, shards):
                    found.setdefault((call, count, is_routed), []).append(cost)
    return table(found, rounds)


@contextmanager
def one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@dataclass
class Meter:
    """What both servers have used."""

    server: Session
    router: Session

    def measure(self, run: Callable[[], int], each: int = 1) -> tuple[int, Cost]:
        """Run what returns how often it has done so many jobs, after a checkpoint."""
        self.server.execute("checkpoint")
        before = self._used()
        done = run()
        cpu, router, wal = (
            after - was for after, was in zip(self._used(), before, strict=True)
        )
        jobs = done * each
        return done, Cost(cpu / jobs * 1e6, router / jobs * 1e6, wal / jobs)

    def _used(self) -> tuple[float, float, int]:
        wal = number(self.server, "select pg_current_wal_lsn() - '0/0'")
        return cpu_of(self.server), cpu_of(self.router), wal


def costs(
    system: System,
    size: Size,
    meter: Meter,
    conns: list[Session],
    shards: list[Session],
) -> Iterator[tuple[str, Cost]]:
    """Each call, and claims and completions of what has a key; all jobs are counted."""
    for call, (statement, calls, each) in CALLS.items():
        # Sessions are open, statements planned and functions compiled before.
        there = added(conns, len(shards), statement, 1) * each
        rows = max(1, round(calls * size.scale) // ROW)
        run = partial(added, conns, len(shards), statement, rows)
        done, cost = meter.measure(run, each)
        there += done * each
        yield call, cost
        if call == MANY:
            drains = [Drain(system, conn) for conn in conns]
            there -= drained(drains, WARM * len(shards))
            # Not to the end, where claims find less than they ask for.
            run = partial(drained, drains, there // 2)
            done, cost = meter.measure(run)
            there -= done
            yield DRAIN, cost
        if (found := sum(number(shard, system.sql.depth) for shard in shards)) != there:
            raise RuntimeError(f"{call}: {found} jobs are left of {there}")
        for shard in shards:
            shard.execute(f"{system.sql.reset}, pgqueue.ticket")


def added(conns: list[Session], shards: int, statement: str, rows: int) -> int:
    """Call so many rows of calls for each shard, in its own session if there is one, with keys that belong there."""
    keys = [
        [k for k in range(1000) if shard_of(f"tenant {k}", shards) == shard]
        for shard in range(shards)
    ]
    for row, (place, own) in product(range(rows), enumerate(keys)):
        for call in range(row * ROW, (row + 1) * ROW):
            k = own[call * 7919 % len(own)]
            conns[place % len(conns)].execute(statement, {"k": k})
    return rows * shards * ROW


def drained(drains: list[Drain], jobs: int) -> int:
    each = jobs // len(drains)
    return sum(drain.run(each, 600, TURNS).jobs for drain in drains)


def table(found: Costs, rounds: int) -> list[str]:
    lines = [
        f"Medians of {rounds} round{'s' * (rounds > 1)}, each compared with one shard that was called directly in the same round. The sessions call one after the other, on one core: "
        "rates would mean nothing, since all shards are on one server, with fsync off.",
        "",
        "| shards | call | CPU µs/job | WAL B/job | routed, CPU µs/job | routed, WAL B/job | router's own CPU µs/job |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for count in COUNTS:
        for call in (*CALLS, DRAIN):
            direct, routed = (
                middle(found[call, count, way], found[call, 1, False])
                for way in (False, True)
            )
            cells = [str(count), call, f"{direct.shards:,.0f}", f"{direct.wal:,.0f}"]
            cells += [
                f"{routed.shards:,.0f}",
                f"{routed.wal:,.0f}",
                f"{routed.router:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def middle(costs: list[Cost], bases: list[Cost]) -> Cost:
    """Compare each round with its own base: what else the machine does is the same for both."""
    rounds = list(zip(costs, bases, strict=True))
    return Cost(
        typical([(cost.shards, base.shards) for cost, base in rounds]),
        typical([(cost.router, base.shards) for cost, base in rounds]),
        typical([(cost.wal, base.wal) for cost, base in rounds]),
    )


def typical(rounds: list[tuple[float, float]]) -> float:
    """The median ratio to the base, times the median base; too few jobs take no measurable time."""
    if not all(base for _, base in rounds):
        return median(cost for cost, _ in rounds)
    ratio = median(cost / base for cost, base in rounds)
    return ratio * median(base for _, base in rounds)


def page(text: str, results: str) -> str:
    """The guide with what follows from these results."""
    rows = summary.tables(results).get(HEADING)
    if not rows or "shards" not in rows[0]:
        return text
    cost = {(int(row["shards"]), row["call"]): row for row in rows}
    return summary.replaced(
        text, "costs", "\n".join([*prices(cost), "", *sums(cost), ""])
    )


def of(row: summary.Row, *titles: str) -> float:
    return sum(summary.number(row[title]) for title in titles)


def prices(cost: dict[tuple[int, str], summary.Row]) -> list[str]:
    calls = (KEYED, KEYLESS, MANY, DRAIN)
    lines = [
        "| CPU µs/job: directly / routed + the router | " + " | ".join(calls) + " |",
        "|---|" + "--:|" * len(calls),
    ]
    for count in COUNTS:
        cells = [f"{count} shard{'s' * (count > 1)}"]
        for call in calls:
            row = cost[count, call]
            cells.append(f"{row[CPU]} / {row[ROUTED]} + {row[OWN]}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sums(cost: dict[tuple[int, str], summary.Row]) -> list[str]:
    """What machines carry, from their CPU, if producers enqueue one by one and workers are with the shards."""
    lines = [
        f"| machines, of {CORES} cores | jobs/s, directly | jobs/s, through a router | cores that this keeps busy there | WAL on each, MB/s |",
        "|--:|--:|--:|--:|--:|",
    ]
    for count in COUNTS:
        added, done = cost[count, KEYED], cost[count, DRAIN]
        direct = count * CORES * SHARE * 1e6 / (of(added, CPU) + of(done, CPU))
        routed = count * CORES * SHARE * 1e6 / (of(added, ROUTED) + of(done, CPU))
        wal = direct / count * (of(added, WAL) + of(done, WAL)) / 1e6
        busy = routed * of(added, OWN) / 1e6
        cells = [str(count), *(f"{round(rate, -2):,.0f}" for rate in (direct, routed))]
        cells += [f"{busy:.1f}", f"{wal:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
