"""Two servers with two shards each, and a router: one server is killed under load, and comes back.

`make scale-demo` runs it. Everything is on this machine, and is removed at the end.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psycopg
from cluster import Cluster

REPO = Path(__file__).resolve().parents[1]
SHARDS = 4
KEYS = 200
PHASES = ("all up", "server 2 killed", "all up again")
HEAD = (
    "shard",
    "server",
    *(f"{what}, {phase}" for what in ("enqueued", "completed") for phase in PHASES),
)
WITHOUT = "the router needs PL/Proxy (Debian: postgresql-NN-plproxy)"
RUNS = "select count(*) from pgqueue.run where outcome = 'completed'"


class Producer(threading.Thread):
    """Enqueues through the router, and counts by the shard of the id."""

    def __init__(self, router: Cluster, number: int) -> None:
        super().__init__()
        self.router, self.number = router, number
        self.done: Counter[int] = Counter()
        self.refused = 0
        self.is_over = False

    def run(self) -> None:
        query = "select pgqueue.enqueue('quick', kind => 'ping', group_key => %s)"
        with psycopg.connect(dsn(self.router), autocommit=True) as conn:
            while not self.is_over:
                for key in range(self.number, KEYS, 2):
                    try:
                        ((id,),) = conn.execute(query, (f"tenant {key}",)).fetchall()
                        self.done[(id - 1) % 1024] += 1
                    except psycopg.Error:  # its shard is down; the others are not
                        self.refused += 1
                    if self.is_over:
                        return


def dsn(server: Cluster, name: str = "postgres") -> str:
    return f"host={server.home} port={server.port} user=postgres dbname={name}"


def set_up(servers: list[Cluster], router: Cluster) -> list[str]:
    """Make a shard on each of these servers, and the router in front of them."""
    shards = [dsn(server, f"shard_{n}") for n, server in enumerate(servers, 1)]
    for number, shard in enumerate(shards, 1):
        with psycopg.connect(dsn(servers[number - 1]), autocommit=True) as conn:
            conn.execute(f"create database shard_{number}")
        with psycopg.connect(shard, autocommit=True) as conn:
            conn.execute("create extension pgqueue")
            conn.execute("select pgqueue.shard(%s)", (number,))
    made = subprocess.run(
        [sys.executable, str(REPO / "packaging/router.py")],
        env={**servers[0].env, "PGDATABASE": "shard_1"},
        capture_output=True,
        text=True,
        check=True,
    )
    with psycopg.connect(dsn(router), autocommit=True) as conn:
        conn.execute(made.stdout)
    route(router, shards)
    return shards


def route(router: Cluster, shards: list[str]) -> None:
    """Tell the router these shards, and no others."""
    places = ", ".join(f"p{n} '{shard}'" for n, shard in enumerate(shards))
    with psycopg.connect(dsn(router), autocommit=True) as conn:
        conn.execute("drop server if exists pgqueue cascade")
        conn.execute(
            f"create server pgqueue foreign data wrapper plproxy options ({places})"
        )
        conn.execute("create user mapping for public server pgqueue")


def has_router(router: Cluster) -> bool:
    query = "select count(*) from pg_available_extensions where name = 'plproxy'"
    with psycopg.connect(dsn(router)) as conn:
        return bool(conn.execute(query).fetchall()[0][0])


def completed(shards: list[str]) -> list[int]:
    """Count what has completed on each shard; -1 for one that is down."""
    found = []
    for shard in shards:
        count = -1
        with (
            contextlib.suppress(psycopg.OperationalError),
            psycopg.connect(shard) as conn,
        ):
            ((count,),) = conn.execute(RUNS).fetchall()
        found.append(count)
    return found


def run(seconds: float, servers: list[Cluster], router: Cluster) -> int:
    shards = set_up([servers[n // 2] for n in range(SHARDS)], router)
    words = [word for shard in shards for word in ("--dsn", shard)]
    command = [
        sys.executable,
        "-m",
        "pgqueue.worker",
        "--app",
        "demo.app",
        "--queue",
        "quick",
    ]
    env = {**os.environ, "PYTHONPATH": str(REPO / "python")}
    worker = subprocess.Popen([*command, *words, "--log-level", "critical"], env=env)
    producers = [Producer(router, n) for n in range(2)]
    rows: list[list[int]] = []
    ended = [0] * SHARDS
    try:
        for producer in producers:
            producer.start()
        before: Counter[int] = Counter()
        for phase in PHASES:
            print(f"{phase} …", flush=True)
            if phase == PHASES[1]:
                servers[1].kill()
            elif phase == PHASES[2]:
                servers[1].start()
            time.sleep(seconds)
            done = sum((producer.done for producer in producers), Counter())
            rows.append([done[n] - before[n] for n in range(SHARDS)])
            before = done
            # What is counted of a server that is down, is counted when it is back.
            now = [
                max(count, last)
                for count, last in zip(completed(shards), ended, strict=True)
            ]
            rows.append([count - last for count, last in zip(now, ended, strict=True)])
            ended = now
        for producer in producers:
            producer.is_over = True
            producer.join()
        enqueued = sum((producer.done for producer in producers), Counter())
        rows[4] = [rows[4][n] + enqueued[n] - before[n] for n in range(SHARDS)]
        deadline = time.monotonic() + 60
        while sum(completed(shards)) < enqueued.total() and time.monotonic() < deadline:
            time.sleep(0.1)
        now = completed(shards)
        rows[5] = [rows[5][n] + now[n] - ended[n] for n in range(SHARDS)]
    finally:
        for producer in producers:
            producer.is_over = True
        worker.terminate()
        worker.wait(60)
    show([rows[0], rows[2], rows[4], rows[1], rows[3], rows[5]])
    refused = sum(producer.refused for producer in producers)
    print(
        f"{enqueued.total():,} enqueued, {sum(now):,} completed, {refused:,} refused while their server was down"
    )
    # A call whose answer was lost with the server may have been done.
    return 0 if all(now[n] >= enqueued[n] for n in range(SHARDS)) else 1


def show(columns: list[list[int]]) -> None:
    lines = [HEAD]
    for n in range(SHARDS):
        lines.append(
            (str(n + 1), str(n // 2 + 1), *(f"{column[n]:,}" for column in columns))
        )
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEAD))]
    for line in lines:
        print(
            "  ".join(
                cell.rjust(width) for cell, width in zip(line, widths, strict=True)
            )
        )


def main() -> int:
    seconds = float(sys.argv[1]) if sys.argv[1:] else 10.0
    with Cluster() as first, Cluster() as second, Cluster(fast=True) as router:
        if not has_router(router):
            print(WITHOUT, file=sys.stderr)
            return 1
        return run(seconds, [first, second], router)


if __name__ == "__main__":
    sys.exit(main())
