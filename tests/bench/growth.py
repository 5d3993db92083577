"""What pgqueue's claim and enqueue cost as the queue grows: buffers and CPU for each job."""

from bench.pgbench import filled_queues, of_any, pgbench, refill, reset
from bench.server import Sample, Size, measure, number, session
from bench.statements import PGQUEUE, sized
from bench.systems import System

BATCH = 50
CLAIM = f"select count(*) from ({sized(PGQUEUE.claim, BATCH)}) as c"
ENQUEUE = PGQUEUE.enqueue
BUFFERS = "select blks_hit + blks_read from pg_stat_database where datname = current_database()"


def lines(system: System, size: Size, largest: bool) -> list[str]:
    """Three small tables: by jobs ready, by queues, by workers at once."""
    return [
        "In the last table nothing is completed, so every claim finds the leases of all the "
        "others ahead of it. One round.",
        "",
        *heading("jobs ready"),
        *(
            row(f"{n:,}", *by_jobs(system, n, size))
            for n in steps(size, 3, 6 + largest)
        ),
        "",
        *heading("queues, 100 jobs in each"),
        *(row(f"{n:,}", *by_queues(system, n, size)) for n in steps(size, 1, 4)),
        "",
        *heading("workers at once"),
        *(row(str(n), *by_workers(system, n, size)) for n in (1, 2, 4, 8, 16, 32, 64)),
    ]


def steps(size: Size, first: int, last: int) -> list[int]:
    """Powers of ten; the largest only at full scale."""
    return [10**n for n in range(first, last + 1 - 2 * (size.scale < 1))]


def heading(what: str) -> list[str]:
    return [
        f"| {what} | claim of {BATCH}, buffers/job | CPU µs/job | enqueue, buffers/job | CPU µs/job |",
        "|--:|--:|--:|--:|--:|",
    ]


def row(what: str, *costs: tuple[float, float]) -> str:
    cells = [what, *(f"{b:.1f} | {cpu:,.0f}" for b, cpu in costs)]
    return f"| {' | '.join(cells)} |"


Cost = tuple[float, float]  # buffers and CPU µs for each job


def cost(system: System, script: str, jobs: int, runs: int, clients: int = 1) -> Cost:
    """Run a script this many times; each does this many jobs."""
    with session(system.database) as conn:
        before = number(conn, BUFFERS)

        def run() -> Sample:
            limit = str(max(1, runs // clients))
            done, seconds = pgbench(
                system, script, "-t", limit, clients=clients, mode="prepared"
            )
            return Sample(done * jobs, seconds)

        sample = measure(run)
        buffers = number(conn, BUFFERS) - before
    return buffers / sample.jobs, sample.cpu_us


def by_jobs(system: System, jobs: int, size: Size) -> tuple[Cost, Cost]:
    refill(system, jobs)
    claims = min(jobs // BATCH, size.jobs(10_000) // BATCH)
    claimed = cost(system, CLAIM, BATCH, claims)
    return claimed, cost(system, ENQUEUE, 1, size.jobs(4_000))


def by_queues(system: System, count: int, size: Size) -> tuple[Cost, Cost]:
    reset(system)
    with session(system.database) as conn:
        filled_queues(conn, system, count, 2 * BATCH)
    # Half of what there is, so that no claim is likely to find a queue empty.
    claims = min(count, size.jobs(10_000) // BATCH)
    claimed = cost(system, of_any(CLAIM, count), BATCH, claims)
    return claimed, cost(system, of_any(ENQUEUE, count), 1, size.jobs(4_000))


def by_workers(system: System, workers: int, size: Size) -> tuple[Cost, Cost]:
    jobs = size.jobs(50_000)
    refill(system, jobs)
    claimed = cost(system, CLAIM, BATCH, jobs // BATCH, workers)
    reset(system)
    return claimed, cost(system, ENQUEUE, 1, size.jobs(8_000), workers)
