"""Kills and crashes in the middle of everything: nothing is lost, nothing completes twice.

Producers note each id whose commit was acknowledged; consumers write an effect in the
transaction that completes the job. At the end every acknowledged job has one effect.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from cluster import Cluster
from conftest import LONG, column, one
from worker_harness import wait_until, where

JOBS = 1500 if LONG else 500


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A server of its own, which the tests crash."""
    with Cluster(settings={"restart_after_crash": "on"}) as cluster:
        with psycopg.connect(where(cluster), autocommit=True) as conn:
            conn.execute("create extension pgqueue")
            conn.execute("create table effect (job_id bigint primary key)")
        yield cluster


class Load:
    """Producers and consumers that reconnect whenever their session dies."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.acknowledged: set[int] = set()
        self.failures = 0
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.threads = [
            threading.Thread(target=self.persist, args=(work,))
            for work in [self.produce] * 3 + [self.consume] * 3
        ]

    def persist(self, work: Callable[[psycopg.Connection], bool]) -> None:
        while not self.stop.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True) as conn:
                    while not self.stop.is_set():
                        if not work(conn):
                            return
            except psycopg.OperationalError:
                with self.lock:
                    self.failures += 1
                self.stop.wait(0.02)

    def produce(self, conn: psycopg.Connection) -> bool:
        id = one(conn, "select pgqueue.enqueue('q')")
        with self.lock:
            self.acknowledged.add(id)
            return len(self.acknowledged) < JOBS

    def consume(self, conn: psycopg.Connection) -> bool:
        claim = "select id, token from pgqueue.claim('q', 'w', 5, '1 second')"
        jobs = conn.execute(claim).fetchall()
        if not jobs:
            self.stop.wait(0.02)
        for id, token in jobs:
            try:
                with conn.transaction():
                    conn.execute("insert into effect values (%s)", (id,))
                    conn.execute("select pgqueue.complete(%s, %s)", (id, token))
            except psycopg.errors.UniqueViolation as twice:
                raise AssertionError(f"job {id} completed twice") from twice
            except psycopg.DatabaseError as error:
                if error.sqlstate != "PQ002":
                    raise
        return True


def hurt_sessions(server: Cluster, conn: Callable[[], psycopg.Connection]) -> None:
    """SIGKILL one backend: the server restarts all sessions and recovers."""
    with conn() as admin:
        pids = column(
            admin,
            "select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()",
        )
    if pids:
        os.kill(random.choice(pids), signal.SIGKILL)


def terminate(server: Cluster, conn: Callable[[], psycopg.Connection]) -> None:
    with conn() as admin:
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
        )


def crash(server: Cluster, conn: Callable[[], psycopg.Connection]) -> None:
    server.restart("immediate")


@pytest.mark.parametrize(
    "hurt, times",
    [(terminate, 15), (hurt_sessions, 6), (crash, 4)]
    if LONG
    else [(terminate, 6), (hurt_sessions, 3), (crash, 2)],
)
def test_no_kill_loses_a_job_or_completes_it_twice(server: Cluster, hurt, times):
    dsn = where(server)

    def connect() -> psycopg.Connection:
        deadline = time.monotonic() + 30
        while True:
            try:
                return psycopg.connect(dsn, autocommit=True)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise

    with connect() as conn:
        conn.execute("truncate pgqueue.job, pgqueue.run, effect")
    load = Load(dsn)
    for thread in load.threads:
        thread.start()
    try:
        for n in range(times):
            # Spread over the jobs, so that each fault meets work in progress.
            goal = (n + 1) * JOBS // (times + 1)
            wait_until(lambda: len(load.acknowledged) >= goal, 90)  # noqa: B023
            hurt(server, connect)
        wait_until(lambda: len(load.acknowledged) >= JOBS, 90)
        with connect() as conn:
            wait_until(lambda: not one(conn, "select count(*) from pgqueue.job"), 90)
    finally:
        load.stop.set()
        for thread in load.threads:
            thread.join(60)
    with connect() as conn:
        effects = set(column(conn, "select job_id from effect"))
        completed = one(
            conn, "select count(*) from pgqueue.run where outcome = 'completed'"
        )
        expired = one(
            conn, "select count(*) from pgqueue.run where outcome = 'expired'"
        )
    print(
        f"{len(load.acknowledged)} acknowledged, {len(effects)} done, {completed} completions, "
        f"{expired} recovered, {load.failures} broken sessions"
    )
    assert load.failures > 0, "the faults were felt"
    assert load.acknowledged <= effects, "nothing acknowledged is lost"
    assert completed == len(effects), "each was completed once"


def test_a_claim_cut_off_by_a_crash_never_happened(server):
    """Its token may be drawn again: nobody knew that the claim had committed."""
    with psycopg.connect(where(server), autocommit=True) as db:
        id = one(db, "select pgqueue.enqueue('cut')")
        db.execute("select pgqueue.enqueue('other')")
        committed = one(db, "select token from pgqueue.claim('other', 'w')")
    claimer = psycopg.connect(where(server))
    assert one(claimer, "select id from pgqueue.claim('cut', 'w')") == id
    server.restart("immediate")
    claimer.close()
    with psycopg.connect(where(server), autocommit=True) as db:
        state = "select state, attempt from pgqueue.jobs where id = %s"
        assert db.execute(state, (id,)).fetchone() == ("ready", 0)
        token = one(db, "select token from pgqueue.claim('cut', 'w')")
        assert token > committed, "no token of a committed claim comes again"
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
        db.execute("delete from pgqueue.job")
