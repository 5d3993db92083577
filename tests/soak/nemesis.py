"""Breaks what can break, in an order drawn from a seed, and writes down when it did."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psycopg

from soak.client import Phase
from soak.commits import Reader
from soak.history import History
from soak.servers import Servers
from soak.workers import Processes

SESSIONS = """
select pid from pg_stat_activity
where backend_type = 'client backend' and application_name <> 'log' and pid <> pg_backend_pid()
"""


class Nemesis:
    def __init__(
        self,
        servers: Servers,
        processes: Processes,
        reader: Reader,
        history: History,
        phase: Phase,
        seed: str,
    ) -> None:
        self.servers, self.processes, self.reader = servers, processes, reader
        self.history, self.phase = history, phase
        self.rng = random.Random(seed)
        self.holders: list[threading.Thread] = []

    def run(self) -> None:
        """All faults in random order, again and again; the usual ones first."""
        usual = [
            *(self.terminate, self.cancel, self.lock_rows, self.lock_rows),
            *(self.lock_hints, self.crash, self.hold_snapshot),
        ]
        others = [
            *(self.terminate, self.cancel, self.lock_rows, self.lock_table),
            *(self.lock_hints, self.lock_hints, self.stop_worker, self.kill_worker),
            *(self.vacuum, self.analyze, self.kill_backend),
        ]
        while not self.phase.is_calm.is_set():
            more = [*others, *[self.promote] * bool(self.servers.standby)]
            faults = [
                *self.rng.sample(usual, len(usual)),
                *self.rng.sample(more, len(more)),
            ]
            for fault in faults:
                if self.phase.is_calm.wait(self.rng.uniform(0.1, 0.9)):
                    break
                self.do(fault)
        for holder in self.holders:
            holder.join()

    def do(self, fault: Callable[[], object]) -> None:
        entry = {"do": "fault", "what": fault.__name__, "start": time.time()}
        try:
            entry["facts"] = fault()
            entry["end"] = "ok"
        except (psycopg.Error, subprocess.SubprocessError) as error:
            entry["end"] = "unknown"
            entry["facts"] = str(error)
        entry["end_at"] = time.time()
        self.history.write([entry])

    def session(self) -> psycopg.Connection:
        return psycopg.connect(
            self.servers.dsn, autocommit=True, application_name="nemesis"
        )

    def victims(self, conn: psycopg.Connection, most: int) -> list[int]:
        pids = [row[0] for row in conn.execute(SESSIONS)]
        return self.rng.sample(pids, min(most, len(pids)))

    def terminate(self) -> int:
        with self.session() as conn:
            for pid in (found := self.victims(conn, self.rng.choice([1, 2, 50]))):
                conn.execute("select pg_terminate_backend(%s)", [pid])
            return len(found)

    def cancel(self) -> None:
        with self.session() as conn:
            for _ in range(20):
                for pid in self.victims(conn, 3):
                    conn.execute("select pg_cancel_backend(%s)", [pid])
                time.sleep(0.01)

    def kill_backend(self) -> None:
        """The server ends all sessions, this one too, and recovers."""
        with self.session() as conn, suppress(psycopg.OperationalError):
            for pid in self.victims(conn, 1):
                os.kill(pid, signal.SIGKILL)
                # Until it has noticed, whoever connects is ended as well.
                conn.execute("select pg_sleep(30)")

    def crash(self) -> None:
        self.servers.current.restart("immediate")

    def promote(self) -> None:
        self.servers.promote(self.reader)

    def hold(self, *statements: str, seconds: float) -> None:
        """Keep a transaction open beside the next faults."""

        def run() -> None:
            try:
                with psycopg.connect(
                    self.servers.dsn, application_name="nemesis"
                ) as conn:
                    for statement in statements:
                        conn.execute(statement)
                    time.sleep(seconds)
                    conn.rollback()
            except psycopg.Error:
                pass

        self.holders.append(threading.Thread(target=run))
        self.holders[-1].start()

    def lock_rows(self) -> None:
        pick = "select from pgqueue.job where random() < 0.3 for update skip locked"
        self.hold(pick, seconds=self.rng.choice([0.05, 0.5, 0.5]))

    def lock_hints(self) -> None:
        """Those who enqueue and those who claim look for others, and create them."""
        tickets = (
            "select from pgqueue.ticket where random() < 0.5 for update skip locked"
        )
        permits = (
            "select from pgqueue.permit where random() < 0.2 for update skip locked"
        )
        self.hold(tickets, permits, seconds=self.rng.choice([0.05, 0.5, 0.5]))

    def lock_table(self) -> None:
        # Behind whoever waits for it, all others wait.
        soon = "set local lock_timeout = '500ms'"
        self.hold(soon, "lock table pgqueue.job in share mode", seconds=0.1)

    def hold_snapshot(self) -> None:
        begin = "set transaction isolation level repeatable read"
        self.hold(begin, "select 1", seconds=5)

    def stop_worker(self) -> None:
        """For longer than its leases."""
        for process in self.processes.living()[:1]:
            self.processes.signal(process, signal.SIGSTOP)
            self.phase.is_calm.wait(2.5)
            self.processes.signal(process, signal.SIGCONT)

    def kill_worker(self) -> None:
        for process in self.processes.living()[-1:]:
            self.processes.signal(process, signal.SIGKILL)
        self.processes.start()

    def vacuum(self) -> None:
        full = self.rng.choice(["", "full"])
        with self.session() as conn:
            conn.execute("set lock_timeout = '1 s'")
            conn.execute(f"vacuum {full} pgqueue.job")

    def analyze(self) -> None:
        with self.session() as conn:
            conn.execute("analyze")
