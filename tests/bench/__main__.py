"""Measure pgqueue and its rivals, in turn, on the cluster of PGHOST, PGPORT ...

    make bench                                  everything, three rounds
    make bench ARGS='--rounds 5 enqueue drains' some of it
    make bench ARGS='--systems pgqueue,pgmq'    with some of the systems
    make bench ARGS=--smoke                     all of it in a few minutes, to see it work
    make bench ARGS=--write                     and write it down: results.md, README.md, plots

Prints one table for each workload: medians, the smallest and largest round, the ratio to
the best rival, and the server's CPU time and WAL for each job. Every run counts its jobs: a
job of pgqueue that is lost, handled twice, or run beside or before one of its group that it
should have waited for, ends the benchmark.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psycopg

from bench import client, groups, growth, limits, page, shards, sql, summary
from bench.pgbench import reset
from bench.report import Rounds, Workload, by_age, latencies, table
from bench.server import Size, session
from bench.sql import Samples
from bench.systems import SYSTEMS, DriverError, System, installed

FOLDER = Path(".venv/bench").resolve()


def anyone(system: System) -> bool:
    return True


def has_worker(system: System) -> bool:
    return bool(system.command)


def has_functions(system: System) -> bool:
    return bool(system.sql.extend)


def has_groups(system: System) -> bool:
    return bool(system.groups)


VIOLATIONS = {"together": "at the same time", "overtook": "out of order"}

WORKLOADS = (
    Workload("enqueue", "1. Enqueue, one job a commit", sql.enqueue, anyone),
    Workload("bulk", "2. Enqueue in bulk", sql.bulk, anyone),
    Workload("drains", "3. Drain no-op jobs with workers", client.drains, has_worker),
    Workload(
        "ceiling",
        "3b. pgqueue's worker beside its functions",
        client.ceiling,
        lambda system: system.name == "pgqueue",
        columns={"share": "% of SQL"},
    ),
    Workload("latency", "4. Pickup", client.latency, anyone, table=latencies),
    Workload(
        "sleeps",
        "5. Priorities and handlers that take their time",
        client.sleeps,
        has_worker,
        columns={
            "share": "% of 32 sleepers",
            "p99": "p99 wait, ms",
            "expired": "leases expired, %",
        },
    ),
    Workload(
        "held",
        "6. While a snapshot is held",
        client.held,
        has_worker,
        every=3,
        table=by_age,
    ),
    Workload(
        "deep",
        "7. A million ready, a million for tomorrow",
        client.deep,
        has_worker,
        every=3,
        columns={"p99": "p99 of a claim, ms"},
    ),
    Workload(
        "lifecycle",
        "8. Claim and complete in SQL",
        sql.lifecycle,
        lambda system: bool(system.sql.claim),
    ),
    Workload("heartbeats", "9. Heartbeats", sql.heartbeats, has_functions),
    Workload("queues", "10. A thousand queues", sql.queues, has_functions),
    Workload("payloads", "11. Payloads", client.payloads, has_worker),
    Workload(
        "groups",
        "12. Groups, one job of each at a time",
        groups.groups,
        has_groups,
        columns={"small": "small groups' jobs/s"},
        violations=VIOLATIONS,
    ),
    Workload(
        "loose",
        "12a. The same by pg-boss's groupConcurrency",
        groups.loose,
        lambda system: system.name == "pg-boss",
        columns={"small": "small groups' jobs/s"},
        violations=VIOLATIONS,
    ),
    Workload(
        "fairness",
        "12b. Small tenants behind a large one",
        groups.fairness,
        lambda system: system.name == "pgqueue",
        columns={"begun": "begun before the last small tenant was"},
    ),
    Workload(
        "rates",
        "12c. At most 200 jobs a second",
        groups.rates,
        lambda system: system.name in ("pgqueue", "chancy"),
        columns={"most": "the most in 0.9 s"},
        violations={"over": "over the rate"},
    ),
    Workload(
        "steps",
        "13. Jobs that remember steps, and wait for events",
        client.steps,
        lambda system: system.name in ("pgqueue", "absurd", "dbos"),
    ),
    Workload(
        "limits",
        "12d. What limits cost, in SQL",
        limits.limits,
        lambda system: system.name == "pgqueue",
        columns={"share": "% of what it is beside", "p99": "p99 of a claim, ms"},
    ),
)


def prepare(names: list[str]) -> list[System]:
    """Install everything, and give each system a database of its own."""
    found = []
    for system in installed(FOLDER, names):
        with session() as conn:
            conn.execute(f"create database {system.database}")
        if system.command:
            system.run("install")
        else:
            reset(system)
        if system.besides:
            with session(system.database) as conn:
                conn.execute(system.besides)
        told = f"{system.name} {system.version}".strip()
        print(f"{told}: {system.settings}", flush=True)
        found.append(system)
    return found


def run(
    workload: Workload, measured: list[System], count: int, size: Size
) -> tuple[Rounds, list[str]]:
    """All rounds of one workload, in turn: a slow minute meets every system.

    Who fails is left out, and the lines returned say so.
    """
    rounds: Rounds = []
    failed: dict[str, str] = {}
    for place in range(-(-count // workload.every)):
        one: dict[str, Samples] = {}
        for system in measured:
            if not workload.takes(system) or system.name in failed:
                continue
            if system.only and workload.name not in system.only:
                continue
            began = time.monotonic()
            try:
                one[system.name] = workload.run(system, size)
            except (DriverError, RuntimeError, OSError, psycopg.Error) as error:
                if system.is_ours:
                    raise
                failed[system.name] = str(error).strip().partition("\n")[0]
            except subprocess.TimeoutExpired:
                failed[system.name] = "it did not end"
            else:
                check(system, one[system.name], workload.violations)
            told = f"{workload.name}, round {place + 1}: {system.name}"
            print(f"{told}, {time.monotonic() - began:.0f} s", file=sys.stderr)
        rounds.append(one)
    rounds = [
        {name: s for name, s in one.items() if name not in failed} for one in rounds
    ]
    return rounds, [f"Without {name}: {why}." for name, why in failed.items()]


def check(system: System, samples: Samples, violations: Mapping[str, str]) -> None:
    """Say what went wrong; pgqueue must not lose a job, do it twice, or break a group."""
    for title, sample in samples.items():
        wrong = {"lost": sample.lost, "twice": sample.twice}
        wrong |= {text: int(sample.more[key]) for key, text in violations.items()}
        if any(wrong.values()):
            text = ", ".join(f"{count} {what}" for what, count in wrong.items())
            print(f"{system.name}, {title}: {text}", file=sys.stderr)
            if system.is_ours:
                sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = [workload.name for workload in WORKLOADS] + ["growth", "shards"]
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--scale", type=float, default=1, help="scale of the job counts")
    add("--limit", type=float, default=40, help="seconds until a drain is cut off")
    add("--systems", default="", help="comma-separated; or all", metavar="NAME,...")
    add("--smoke", action="store_true", help="one round at a fiftieth of the size")
    add("--largest", action="store_true", help="growth up to 10,000,000 jobs")
    add("--write", action="store_true", help="write results.md, README.md and plots")
    add("workloads", nargs="*", metavar="workload", help=", ".join(known))
    options = parser.parse_args()
    options.systems = [name for name in options.systems.split(",") if name]
    options.workloads = options.workloads or known
    if unknown := set(options.workloads) - set(known):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    if unknown := set(options.systems) - {system.name for system in SYSTEMS}:
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    if options.smoke:
        options.rounds, options.scale = 1, 0.02
    return options


def main() -> None:
    options = parse()
    size = Size(options.scale, options.limit)
    measured = prepare(options.systems)
    rivals = {system.name for system in measured if system.is_rival}
    results = page.Results(measured)
    for workload in WORKLOADS:
        if workload.name in options.workloads and any(map(workload.takes, measured)):
            rounds, notes = run(workload, measured, options.rounds, size)
            lines = (workload.table or table)(workload, rounds, rivals)
            how_often = f"{len(rounds)} round{'s' * (len(rounds) > 1)}."
            results.add(workload.heading, [" ".join([how_often, *notes]), "", *lines])
            if options.write:
                results.write()
    for system in measured:
        if "growth" in options.workloads and system.name == "pgqueue":
            results.add("Growth", growth.lines(system, size, options.largest))
            if options.write:
                results.write()
        if "shards" in options.workloads and system.name == "pgqueue":
            results.add(shards.HEADING, shards.lines(system, size, options.rounds))
            if options.write:
                results.write()
                guide = shards.page(
                    shards.GUIDE.read_text(), summary.RESULTS.read_text()
                )
                shards.GUIDE.write_text(guide)


if __name__ == "__main__":
    main()
