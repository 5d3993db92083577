"""Measure pgqueue beside its rivals, in turn, on the cluster of PGHOST, PGPORT ...

    make bench                                  everything, three rounds
    make bench ARGS='--rounds 5 enqueue drains' some of it
    make bench ARGS='--scale 0.02 --rounds 1'   all of it, just to see that it works
    make bench ARGS=--write                     and put the tables into tests/bench/README.md

Prints one table for each workload: medians, the smallest and largest round, the ratio to
the best rival, and the server's CPU time and WAL for each job. Every run counts its jobs: a
job of pgqueue that is lost or handled twice ends the benchmark.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from bench import client, sql
from bench.plot import svg
from bench.rivals import Rival, install
from bench.server import Sample, number, session
from bench.systems import System, systems

FOLDER = Path(".venv/bench").resolve()
PAGE = Path(__file__).with_name("README.md")
SQL = {
    each.__name__: each
    for each in (sql.enqueue, sql.bulk, sql.lifecycle, sql.held, sql.deep)
}
CLIENT = {each.__name__: each for each in (client.clients, client.drains, client.naps)}
REFERENCE = "bare SQL"
Rounds = list[dict[str, dict[str, Sample]]]


def table(rounds: Rounds) -> list[str]:
    """Medians of all rounds, by title and system, beside the best rival."""
    lines = [
        "| workload | system | jobs/s | min–max | × best rival | CPU µs/job | WAL B/job |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    titles = dict.fromkeys(
        t for one in rounds for samples in one.values() for t in samples
    )
    for title in titles:
        found = {
            name: [one[name][title] for one in rounds if title in one.get(name, {})]
            for name in rounds[0]
        }
        rates = {
            name: median(s.rate for s in samples)
            for name, samples in found.items()
            if samples
        }
        rivals = [
            rate for name, rate in rates.items() if name not in ("pgqueue", REFERENCE)
        ]
        for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
            samples = found[name]
            span = f"{min(s.rate for s in samples):,.0f}–{max(s.rate for s in samples):,.0f}"
            ratio = (
                f"**{rate / max(rivals):.2f}**" if name == "pgqueue" and rivals else ""
            )
            lines.append(
                f"| {title} | {name} | {rate:,.0f} | {span} | {ratio} "
                f"| {median(s.cpu_us for s in samples):,.0f} "
                f"| {median(s.wal_bytes for s in samples):,.0f} |"
            )
    return lines


def latency_table(rounds: list[dict[str, tuple[float, float, float]]]) -> list[str]:
    """Medians of the percentiles of all rounds, the quickest first."""
    lines = ["| pickup, ms after the commit | p50 | p95 | p99 |", "|---|--:|--:|--:|"]
    found = {
        name: [
            median(column)
            for column in zip(*(one[name] for one in rounds), strict=True)
        ]
        for name in rounds[0]
    }
    for name, values in sorted(found.items(), key=lambda item: item[1]):
        lines.append(f"| {name} | " + " | ".join(f"{ms:.2f}" for ms in values) + " |")
    return lines


def held_table(rounds: Rounds) -> list[str]:
    """Jobs a second and the p99 of a claim by the age of the snapshot; and the plot."""
    places = list(next(iter(rounds[0].values())))
    lines = [
        f"| jobs/s (p99 of a claim, ms) in round | {' | '.join(places)} |",
        "|---|" + "--:|" * len(places),
    ]
    rates: dict[str, list[float]] = {}
    for name in rounds[0]:
        cells = []
        for place in places:
            samples = [one[name][place] for one in rounds]
            rates.setdefault(name, []).append(median(s.rate for s in samples))
            p99 = median(s.p99_ms for s in samples)
            cells.append(f"{rates[name][-1]:,.0f} ({p99:.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    title = (
        "Jobs a second, batches of 50, while a snapshot is held: 20,000 jobs a round"
    )
    PAGE.with_name("held.svg").write_text(svg(title, rates))
    return lines


def round_trip() -> tuple[float, float, float]:
    """The same percentiles of `select 1`, from Python: what one round trip takes here."""
    taken = []
    with session() as conn:
        for _ in range(1000):
            began = time.perf_counter()
            conn.execute("select 1", prepare=True).fetchone()
            taken.append((time.perf_counter() - began) * 1000)
    taken.sort()
    return taken[500], taken[950], taken[990]


def prepare(names: list[str]) -> tuple[list[System], list[Rival]]:
    """Install everything, and give each driver a database of its own."""
    rivals = []
    with session() as conn:
        for rival in install(FOLDER):
            if names and rival.name not in names:
                continue
            database = "bench_" + rival.name.replace("-", "_")
            conn.execute(f"create database {database}")
            environment = {**rival.environment, "PGDATABASE": database}
            rivals.append(replace(rival, environment=environment))
        measured = [
            s for s in systems(FOLDER) if not names or s.name in [*names, REFERENCE]
        ]
        for system in measured:
            conn.execute(system.setup)
    for rival in rivals:
        rival.run("install")
        print(f"{rival.name} {rival.version}: {rival.configuration}", flush=True)
    return measured, rivals


def run(
    name: str, rounds: int, scale: float, measured: list[System], rivals: list[Rival]
) -> list[str]:
    """One workload, in turn: a slow minute of the machine meets all systems."""
    if name == "latency":
        return latency_table(
            [
                {r.name: client.latency(r) for r in rivals}
                | {"(one round trip)": round_trip()}
                for _ in range(rounds)
            ]
        )
    workload: Callable = SQL.get(name) or CLIENT[name]
    if scale != 1:
        # What 8 clients, or batches of 50, can share out evenly.
        jobs = max(3200, int(workload.__defaults__[0] * scale) // 3200 * 3200)
        workload = partial(workload, jobs=jobs)
    if name in CLIENT:
        return table([{r.name: workload(r) for r in rivals} for _ in range(rounds)])
    without_reference = name in ("held", "deep")
    taking_part = [
        s for s in measured if not (without_reference and s.name == REFERENCE)
    ]
    found = [{s.name: workload(s) for s in taking_part} for _ in range(rounds)]
    return held_table(found) if name == "held" else table(found)


def machine() -> str:
    with session() as conn:
        version = number(conn, "show server_version_num")
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} × {model}; Postgres {version // 10000}.{version % 10000}, fsync on, on the same machine as the clients"


def write(lines: list[str]) -> None:
    """Put the results between the two marks of the page."""
    before, begin, rest = PAGE.read_text().partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    assert begin and end, "README.md has lost its marks"
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [*SQL, *CLIENT, "latency"]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1, help="of the numbers of jobs")
    parser.add_argument("--systems", default="", help="by commas; else all")
    parser.add_argument(
        "--write", action="store_true", help="into tests/bench/README.md"
    )
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=", ".join(names)
    )
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(names):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")

    measured, rivals = prepare([name for name in options.systems.split(",") if name])
    lines = [f"{machine()}; medians of {options.rounds} rounds.", ""]
    for name in options.workloads or names:
        print(f"\n{name}", file=sys.stderr, flush=True)
        lines += [*run(name, options.rounds, options.scale, measured, rivals), ""]
        print("\n".join(lines), flush=True)
        if options.write:
            write(lines)


if __name__ == "__main__":
    main()
