"""One episode: a server, clients, faults, calm, and the verdict."""

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psycopg

from soak import scene
from soak.client import Client, Phase
from soak.commits import Reader
from soak.court import Court
from soak.flow import Flow
from soak.history import History
from soak.judge import judge
from soak.limits import Impatient, Producer, Steady, Worker
from soak.long import Long
from soak.nemesis import Nemesis
from soak.operator import Operator, Watcher
from soak.servers import Servers, servers
from soak.workers import Processes, Psql

CLIENTS: list[type[Client]] = [
    *[Producer] * 2,
    *[Worker] * 3,
    *[Steady] * 2,
    *[Flow] * 4,
    *[Long] * 3,
    *(Impatient, Operator, Watcher),
]
# After the last fault something must be done in two leases and this, and then the next, until all is: how much in
# that time depends on the machine.
PATIENCE = 2 * 2 + 30
LEFT = """
select json_object_agg(what, n) filter (where n > 0)
from (
    select 'jobs of ' || queue as what, count(*) as n from pgqueue.job group by queue
    union all select 'ties', count(*) from pgqueue.dependency
    union all select 'loose ends', count(*) from pgqueue.loose_end
    union all select 'waits', count(*) from pgqueue.wait
    union all select 'tallies', count(*) from pgqueue.tally
    union all select 'open batches', count(*) from pgqueue.batch where finished_at is null
) as l
"""


@dataclass
class Plan:
    """What to do with which random numbers."""

    folder: Path
    seed: str
    seconds: float
    lost_hints: float = 0  # the part that gets lost
    promotes: bool = False  # a standby, in the middle
    script: Path | None = None  # an extension script other than the built one
    patience: float = PATIENCE


def set_up(dsn: str, plan: Plan) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create extension pgqueue")
        for statement in scene.SETTINGS.strip().split(";\n"):
            conn.execute(statement)
        if plan.lost_hints:
            hints = (
                f"alter database postgres set pgqueue.lose_hints = {plan.lost_hints}"
            )
            conn.execute(hints)


def run(plan: Plan) -> Court:
    plan.folder.mkdir(parents=True)
    facts = {"do": "plan", "start": 0, "end": "ok", "lost_hints": plan.lost_hints}
    History(plan.folder, "plan").write([facts])
    reader = Reader(plan.folder)
    with servers(plan.script, plan.promotes) as found:
        dsn = found.dsn
        set_up(dsn, plan)
        reader.begin(dsn)
        processes = Processes(dsn, plan.folder)
        try:
            act(plan, found, processes, reader)
        finally:
            ends = processes.end()
        History(plan.folder, "workers").write([ends])
        reader.finish(dsn)
    court = judge(plan.folder)
    court.facts["changes"] = reader.changes
    return court


def act(plan: Plan, servers: Servers, processes: Processes, reader: Reader) -> None:
    phase, dsn = Phase(), servers.dsn

    def history(who: str) -> History:
        return History(plan.folder, who)

    clients = [
        kind(dsn, history(f"{kind.__name__}-{n}"), phase, f"{plan.seed} {n}")
        for n, kind in enumerate(CLIENTS)
    ]
    nemesis = Nemesis(servers, processes, reader, history("nemesis"), phase, plan.seed)
    psql = Psql(dsn, history("psql"), phase, servers.current.env)
    with ThreadPoolExecutor(len(clients) + 3) as pool:
        following = pool.submit(reader.follow, dsn, phase.is_over)
        running = [pool.submit(each.run) for each in [*clients, psql]]
        for _ in range(2):
            processes.start()
        try:
            faults = pool.submit(nemesis.run)
            watch([faults, *running], plan.seconds)
            phase.is_calm.set()
            faults.result()
            come_to_rest(dsn, plan.patience, history("calm"), running)
        finally:
            phase.is_calm.set()
            phase.is_over.set()
        for each in [*running, following]:
            each.result()


def watch(running: list[Future], seconds: float) -> None:
    """Wait so long, or until one of them fails, which is a mistake of the soak itself."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not any(
        f.done() and f.exception() for f in running
    ):
        time.sleep(0.1)
    for each in running:
        if each.done():
            each.result()


def connect(dsn: str) -> psycopg.Connection:
    """Perhaps the server still recovers from the last fault."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return psycopg.connect(dsn, autocommit=True)
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def come_to_rest(
    dsn: str, patience: float, history: History, running: list[Future]
) -> None:
    """See all that waits be done, with nobody's help but that of the workers."""
    start = time.time()
    history.write([{"do": "calm", "start": start, "end": "ok"}])
    left, fewest = {"all": sys.maxsize}, sys.maxsize
    until = start + patience
    with connect(dsn) as conn:
        for name in ("tick", "tock"):
            conn.execute("select pgqueue.pause_schedule(%s)", [name])
        conn.execute("select pgqueue.resume(%s)", [scene.SIDE])
        history.write(
            [{"do": "resume", "start": start, "end": "ok", "end_at": time.time()}]
        )
        while left and time.time() < until:
            watch(running, 0.1)
            conn.execute(
                "select pgqueue.close_batch(id) from pgqueue.batch where closed_at is null"
            )
            left = conn.execute(LEFT).fetchone()[0] or {}
            if sum(left.values()) < fewest:
                fewest = sum(left.values())
                until = time.time() + patience
    seconds = time.time() - start
    rest = {"do": "rest", "start": start, "end": "ok", "seconds": seconds, "left": left}
    history.write([rest])
