"""Sessions that do anything at random to a few batches and chains: at the end all has come to rest.

Each round is small, so that the ends, the enqueues and the looks of all sessions fall together, and
ends with a check of every job. PGQUEUE_TEST_LONG=1 runs some thousand rounds, with other seeds.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from conftest import column

LONG = bool(os.environ.get("PGQUEUE_TEST_LONG"))
ROUNDS = 2000 if LONG else 25
SEED = random.randrange(1 << 30) if LONG else 0
SESSIONS = 4
STEPS = 25
MAINTAIN = "select count(*) from pgqueue.maintain()"
# What another session has just done to the same job or batch; 40001 in a REPEATABLE READ one.
EXPECTED = {"PQ001", "PQ002", "55000", "40001"}
CLAIMS = ["claim_from('{q,p,callback}'", "claim('q'", "claim('p'", "claim('callback'"]
Ids = list[int]


class Session:
    """One session. What it enqueues it writes down in the same transaction."""

    def __init__(self, conn: psycopg.Connection, seed: str) -> None:
        self.conn = conn
        self.rng = random.Random(seed)

    def run(self) -> None:
        verbs = {
            self.enqueue: 8,
            self.enqueue_many: 1,
            self.work: 10,
            self.redrive: 1,
            self.cancel: 1.5,
            self.purge: 0.5,
            self.discard: 0.3,
            self.maintain: 2,
            self.close_batch: 0.5,
            self.meddle: 1,
            self.lose_hints: 1,
        }
        for _ in range(STEPS):
            (verb,) = self.rng.choices(list(verbs), list(verbs.values()))
            rolls_back = self.rng.random() < 0.15
            try:
                with self.conn.transaction(force_rollback=rolls_back):
                    if verb not in (self.work, self.maintain):
                        self.grow_old()
                    if self.rng.random() < 0.1:
                        with self.conn.transaction(force_rollback=True):
                            verb()
                            self.pause()
                    verb()
                    self.pause()
            except psycopg.Error as error:
                assert error.sqlstate in EXPECTED, error

    def pause(self) -> None:
        """Keep the transaction open, often enough."""
        if self.rng.random() < 0.4:
            time.sleep(self.rng.choice([0, 0.001, 0.005, 0.02]))

    def some(self, query: str, most: int = 1) -> Ids:
        ids = column(self.conn, query)
        return self.rng.sample(ids, min(most, len(ids)))

    def grow_old(self) -> None:
        """Now and then, have a snapshot that is older than the work to do."""
        if self.rng.random() < 0.15:
            self.conn.execute("set transaction isolation level repeatable read")
            self.conn.execute("select 1")
            time.sleep(0.005)

    # Producers

    def batch(self) -> int | None:
        open = "select id from pgqueue.batch where finished_at is null"
        return (self.some(open) or [None])[0] if self.rng.random() < 0.6 else None

    def after(self) -> Ids | None:
        if self.rng.random() < 0.4:
            return None
        # Of jobs that wait or run, and of some that have ended.
        known = (
            "select job_id from made"
            if self.rng.random() < 0.2
            else "select id from pgqueue.job where queue <> 'callback'"
        )
        return self.some(known, self.rng.choice([1, 1, 2, 3]))

    def enqueue(self) -> None:
        queue, batch, after = self.rng.choice("qqp"), self.batch(), self.after()
        self.pause()
        self.conn.execute(
            "insert into made select pgqueue.enqueue(%(queue)s, batch_id => %(batch)s, after => %(after)s,"
            " if_dead => %(if_dead)s, max_attempts => 2, expires_at => now() + %(expires)s::interval,"
            " group_key => %(group)s, priority => %(priority)s),"
            " %(batch)s, %(after)s, %(if_dead)s",
            {
                "queue": queue,
                "batch": batch,
                "after": after,
                "if_dead": self.rng.choice(["cancel", "run"]),
                "expires": self.rng.choice([None, None, None, "5 ms"]),
                "group": self.rng.choice([None, None, "a", "b"]),
                "priority": self.rng.choice([None, None, 1]),
            },
        )

    def enqueue_many(self) -> None:
        self.conn.execute(
            "insert into made"
            " select pgqueue.enqueue_many('q', '{1,2,3}', group_keys => '{a,a,null}', batch_id => %(b)s), %(b)s",
            {"b": self.batch()},
        )

    def close_batch(self) -> None:
        for id in self.some("select id from pgqueue.batch"):
            self.conn.execute("select pgqueue.close_batch(%s)", [id])

    # Workers

    def work(self) -> None:
        """Claim, and end what was claimed in one way or another, here or in a while."""
        # Either, because who holds new leases and ends older ones of another may wait in a circle.
        if self.rng.random() < 0.7:
            query = f"select id, token, queue from pgqueue.{self.rng.choice(CLAIMS)}, 'w', %s, lease => %s)"
            given = [self.rng.choice([1, 1, 2, 5]), self.rng.choice(["5 ms", "10 s"])]
        else:
            query = "select id, token, queue from pgqueue.job where token is not null and random() < 0.4"
            given = []
        leases = self.conn.execute(query, given).fetchall()
        self.pause()
        if not leases:
            return
        ids, tokens, queues = (list(each) for each in zip(*leases, strict=True))
        if self.rng.random() < 0.4:
            ends = [
                self.rng.choice(["complete", "fail", "release"])
                if queue != "q"
                else self.rng.choice(["complete", "complete", "fail", "reject"])
                for queue in queues
            ]
            self.conn.execute(
                "select pgqueue.finish(%s, %s, %s, delays => array_fill('0 s'::interval, array[%s]))",
                [ids, tokens, ends, len(ids)],
            )
        elif self.rng.random() < 0.3:
            self.conn.execute("select pgqueue.complete_many(%s, %s)", [ids, tokens])
        else:
            for id, token, queue in sorted(leases)[:2]:
                verb = self.rng.choice(
                    ["complete(%s, %s)"] * 3
                    + ["fail(%s, %s, 'e', retry_in => '0')"]
                    + ["release(array[%s], array[%s])"]
                    + ["fail(%s, %s, 'e', permanent => true)"] * (queue == "q")
                )
                self.conn.execute(f"select pgqueue.{verb}", [id, token])

    # Operators

    def cancel(self) -> None:
        for id in self.some("select id from pgqueue.job where queue <> 'callback'"):
            self.conn.execute("select pgqueue.cancel(%s)", [id])

    def purge(self) -> None:
        self.conn.execute("select pgqueue.purge('p')")

    def redrive(self) -> None:
        self.conn.execute("select pgqueue.redrive('q', max_jobs => 2)")

    def discard(self) -> None:
        for id in self.some("select id from pgqueue.dead_job"):
            self.conn.execute("select pgqueue.discard(%s)", [id])

    def maintain(self) -> None:
        self.conn.execute(self.rng.choice([MAINTAIN, "select pgqueue.reap()"]))

    def meddle(self) -> None:
        """Lock what waits or runs, for no reason that the others could know of."""
        for id in self.some("select id from pgqueue.job"):
            self.conn.execute("select pgqueue.reprioritize(%s, 1)", [id])

    def lose_hints(self) -> None:
        """The sweep finds whatever no loose end points to."""
        self.conn.execute(
            "delete from pgqueue.loose_end where ctid = any (array("
            "select ctid from pgqueue.loose_end where random() < 0.5 for update skip locked))"
        )


def drain(db: psycopg.Connection) -> None:
    """Complete all that can still run; nothing may stay behind."""
    db.execute("select pgqueue.close_batch(id) from pgqueue.batch")
    db.execute(
        "select count(*) from (select array_agg(id) as ids, array_agg(token) as tokens from pgqueue.job"
        " where token is not null) as j, pgqueue.complete_many(j.ids, j.tokens)"
    )
    deadline = time.monotonic() + 5
    while True:
        db.execute(MAINTAIN)
        db.execute(
            "select count(pgqueue.complete(c.id, c.token))"
            " from pgqueue.claim_from('{q,p,callback}', 'w', 100) as c"
        )
        left = db.execute(
            "select (select count(*) from pgqueue.job), (select count(*) from pgqueue.dependency),"
            " (select count(*) from pgqueue.loose_end), (select count(*) from pgqueue.tally)"
        ).fetchone()
        if left == (0, 0, 0, 0):
            return
        if time.monotonic() > deadline:
            tables = {
                table: db.execute(f"table pgqueue.{table}").fetchall()
                for table in ("dependency", "loose_end", "tally", "batch")
            }
            jobs = db.execute("select id, state from pgqueue.jobs").fetchall()
            raise AssertionError(f"left behind: {jobs}, {tables}")


# Each batch, what it counted, and how its jobs had ended by then. A job without any end was purged.
COUNTS = """
select b.id, b.callback_id, b.completed, b.dead, b.cancelled, w.*
from pgqueue.batch as b
cross join lateral (
    select
        count(*) filter (where e.outcome = 'completed') as completed,
        count(*) filter (where e.outcome = 'dead') as dead,
        count(*) filter (where e.outcome is null or e.outcome = 'cancelled') as cancelled
    from made as m
    left join lateral (
        select r.outcome
        from pgqueue.run as r
        where r.job_id = m.job_id and r.outcome in ('completed', 'dead', 'cancelled')
            and r.finished_at <= b.finished_at
        order by r.finished_at desc
        limit 1
    ) as e on true
    where m.batch_id = b.id
) as w
"""
CALLBACKS = """
select job_id from pgqueue.run where queue = 'callback' and outcome = 'completed' order by 1
"""
# Jobs that began before one that they waited for had ended as it must.
TOO_EARLY = """
select m.job_id, a.id, m.if_dead
from made as m
cross join lateral (
    select min(r.finished_at - r.taken) as at from pgqueue.run as r where r.job_id = m.job_id and r.attempt > 0
) as began
cross join lateral unnest(m.after) as a (id)
where began.at is not null
    and not exists (
        select from pgqueue.run as r
        where r.job_id = a.id and r.finished_at <= began.at
            and (r.outcome = 'completed' or m.if_dead = 'run' and r.outcome in ('dead', 'cancelled'))
    )
    -- When one was purged or discarded is not known.
    and (m.if_dead = 'cancel' or exists (select from pgqueue.run as r where r.job_id = a.id and r.outcome in ('completed', 'cancelled')))
"""
# Jobs that were cancelled for the sake of another that did complete, or that they did not wait for.
WRONGLY_CANCELLED = """
select m.job_id, r.result
from made as m
join pgqueue.run as r on r.job_id = m.job_id and r.outcome = 'cancelled'
cross join lateral (select substring(r.result #>> '{}' from 'job (\\d+), which')::bigint as id) as blamed
where blamed.id is not null and (
    m.if_dead = 'run' or blamed.id <> all (m.after)
    or exists (select from pgqueue.run as e where e.job_id = blamed.id and e.outcome = 'completed')
        and not exists (select from pgqueue.run as e where e.job_id = blamed.id and e.outcome = 'dead')
)
"""


def check(db: psycopg.Connection) -> None:
    batches = db.execute(COUNTS).fetchall()
    for id, _, *counts in batches:
        assert counts[:3] == counts[3:], f"batch {id}"
    assert column(db, CALLBACKS) == sorted(row[1] for row in batches)
    assert db.execute(TOO_EARLY).fetchall() == []
    assert db.execute(WRONGLY_CANCELLED).fetchall() == []


@pytest.mark.loses_hints
@pytest.mark.waits_for_sweeps
def test_whatever_sessions_do_all_that_waits_comes_to_rest(db, connect, lost_hints):
    db.execute(
        "create table made (job_id bigint, batch_id bigint, after bigint[], if_dead text)"
    )
    db.execute("select pgqueue.configure('q', group_limit => 2)")
    sessions = [connect() for _ in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as pool:
        for number in range(ROUNDS // 2 if lost_hints else ROUNDS):
            seed = f"{SEED} {number}"
            db.execute("truncate made, pgqueue.run, pgqueue.dead_job, pgqueue.batch")
            for _ in range(2):
                db.execute("select pgqueue.create_batch('callback')")
            futures = [
                pool.submit(Session(conn, f"{seed} {n}").run)
                for n, conn in enumerate(sessions)
            ]
            for future in futures:
                future.result()
            try:
                drain(db)
                check(db)
            except AssertionError as error:
                raise AssertionError(f"round {seed}: {error}") from error
