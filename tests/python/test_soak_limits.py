"""Sessions that enqueue, claim, end and die at random: no snapshot shows more jobs running than a limit allows.

PGQUEUE_TEST_LONG=1 goes on for PGQUEUE_TEST_MINUTES, 30 if that is not set.
"""

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from conftest import column, one

LONG = bool(os.environ.get("PGQUEUE_TEST_LONG"))
SECONDS = 60 * float(os.environ.get("PGQUEUE_TEST_MINUTES", 30)) if LONG else 0
STEPS = 120
SESSIONS = 6
GROUPS = [*"abcdefgh", "one", None]
SETTINGS = """
select pgqueue.configure('q', group_limit => 2, max_running => 12, max_attempts => 1000, retry_base => '1 ms');
select pgqueue.configure('q', group_key => 'one', group_limit => 1, group_on_retry => 'block');
select pgqueue.configure('q', kind => 'k', max_running => 3);
create table made (job_id bigint)
"""
# Limits that are lower now and then: no snapshot tells when, so the judge knows the highest.
CHANGES = [
    "select pgqueue.configure('q', group_limit => 1)",
    "select pgqueue.configure('q', group_limit => 2)",
    "select pgqueue.configure('q', kind => 'k', max_running => 1)",
    "select pgqueue.configure('q', kind => 'k', max_running => 3)",
    "select pgqueue.configure('q', max_running => 12)",
]
LIMITS = {"all": 12, "kind k": 3, "one": 1}  # and 2 for each group
FULL = [2, 1, 3]  # a group, the group "one", and the kind k
# A lease that is over holds its place until somebody ends it.
RUNNING = "select kind, group_key from pgqueue.job where token is not null"
# Who dies or is cut off; who waits in a circle with another open transaction; leases that are over.
EXPECTED = {"57P01", "40P01", "PQ001", "PQ002", None}


class Worker:
    def __init__(
        self, connect: Callable[[], psycopg.Connection], seed: str, judge: "Judge"
    ) -> None:
        self.connect = connect
        self.judge = judge
        self.conn = connect()
        self.rng = random.Random(seed)

    def run(self, until: float) -> None:
        for step in itertools.count():
            # Where no limit was ever reached nothing is shown.
            least = STEPS if self.judge.reached() == FULL else 10 * STEPS
            if step >= least and time.monotonic() >= until:
                return
            try:
                self.step()
            except psycopg.Error as error:
                assert error.sqlstate in EXPECTED, error
                if self.conn.closed:
                    self.conn = self.connect()
                else:
                    self.conn.rollback()

    def step(self) -> None:
        acts = {
            self.enqueue: 3,
            self.work: 8,
            self.end: 6,
            self.change: 0.3,
            self.kill: 0.3,
        }
        chosen = self.rng.choices(
            list(acts), list(acts.values()), k=self.rng.choice([1, 1, 2, 3])
        )
        with self.conn.transaction(force_rollback=self.rng.random() < 0.1):
            for act in chosen:
                act()
                if self.rng.random() < 0.1:
                    time.sleep(self.rng.choice([0.001, 0.01, 0.05]))

    def enqueue(self) -> None:
        groups = self.rng.choices(GROUPS, k=self.rng.choice([1, 2, 20]))
        self.conn.execute(
            "insert into made select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[%s]),"
            " kind => %s, group_keys => %s)",
            [len(groups), self.rng.choice("kl"), groups],
        )

    def work(self) -> None:
        """Claim, and complete what the lease is long enough for."""
        lease = self.rng.choice(["20 ms", "10 s"])
        leases = self.conn.execute(
            "select id, token from pgqueue.claim('q', 'w', %s, %s, kinds => %s)",
            [
                self.rng.choice([1, 1, 3, 50]),
                lease,
                self.rng.choice([None, None, ["k"]]),
            ],
        ).fetchall()
        if leases and lease == "10 s" and self.rng.random() < 0.7:
            self.finish(leases)

    def end(self) -> None:
        self.finish(
            self.conn.execute(
                "select id, token from pgqueue.job where token is not null and random() < 0.5"
            ).fetchall()
        )

    def finish(self, leases: list[tuple[int, int]]) -> None:
        how = self.rng.choice(["complete", "complete", "complete", "fail", "release"])
        ids, tokens = [id for id, _ in leases], [token for _, token in leases]
        self.conn.execute(
            "select pgqueue.finish(%s, %s, %s)", [ids, tokens, [how] * len(ids)]
        )

    def change(self) -> None:
        self.conn.execute(self.rng.choice(CHANGES))

    def kill(self) -> None:
        others = "select pid from pg_stat_activity where application_name = 'soak' and datname = current_database()"
        pids = [p for p in column(self.conn, others) if p != self.conn.info.backend_pid]
        if pids:
            self.conn.execute(
                "select pg_terminate_backend(%s)", [self.rng.choice(pids)]
            )


class Judge:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.most: Counter[str | None] = Counter()

    def watch(self, db: psycopg.Connection) -> None:
        """Look how many run, until it is over, and remember the most."""
        while not self.over.wait(0.002):
            running = db.execute(RUNNING).fetchall()
            seen = Counter(group for _, group in running if group is not None)
            seen["kind k"] = sum(kind == "k" for kind, _ in running)
            seen["all"] = len(running)
            assert all(n <= LIMITS.get(scope, 2) for scope, n in seen.items()), seen
            self.most |= seen

    def reached(self) -> list[int]:
        most = self.most
        return [max(most[group] for group in "abcdefgh"), most["one"], most["kind k"]]


@pytest.mark.loses_hints
@pytest.mark.waits_for_sweeps
def test_limits_hold_in_every_snapshot_while_sessions_die(db, connect, lost_hints):
    for statement in SETTINGS.split(";"):
        db.execute(statement)
    seed = random.randrange(1 << 30) if LONG else 0
    judge = Judge()
    watcher = connect()
    with ThreadPoolExecutor(SESSIONS + 1) as pool:
        watching = pool.submit(judge.watch, watcher)
        until = time.monotonic() + SECONDS
        workers = [
            Worker(lambda: connect(application_name="soak"), f"{seed} {n}", judge)
            for n in range(SESSIONS)
        ]
        try:
            for future in [pool.submit(worker.run, until) for worker in workers]:
                future.result()
        finally:
            judge.over.set()
    watching.result()
    assert judge.reached() == FULL, f"seed {seed}"
    for worker in workers:
        worker.conn.close()
    drain(db)
    ends = "select count(*), count(distinct job_id) from pgqueue.run where outcome = 'completed'"
    made = one(db, "select count(*) from made")
    assert db.execute(ends).fetchone() == (made, made)


def drain(db: psycopg.Connection) -> None:
    """Claim and complete until nothing is left: at most two sweeps without a job."""
    vain = 0
    while one(db, "select count(*) from pgqueue.job"):
        ended = one(
            db,
            "select count(pgqueue.complete(c.id, c.token)) from pgqueue.claim('q', 'w', 100) as c",
        )
        vain = 0 if ended else vain + 1
        assert vain < 200, db.execute(
            "select id, state, group_key from pgqueue.jobs"
        ).fetchall()[:20]
        if not ended:
            db.execute("select pg_sleep(0.06)")
