"""Sessions that do anything at random to a few batches and chains.

There are never many, so that the ends, the enqueues and the looks of all sessions fall together on the
same jobs, and each batch soon has its end.
"""

import time
from collections.abc import Callable

from soak.client import MET, Client

CLAIMS = [
    "claim_from('{q,p,callback}'",
    "claim('q'",
    "claim('p'",
    "claim('callback'",
]
FEW = 30  # jobs, of which more are added only now and then


class Flow(Client):
    pause = 0.002
    # None of them waits in a circle: each verb is alone, and locks in the order of ids.
    may_fail_with = MET - {"23505"}

    def acts(self) -> dict[Callable[[], None], float]:
        crowded = len(
            self.look("select id from pgqueue.job where queue in ('q', 'p') limit 60")
        )
        return {
            self.enqueue: 8 if crowded < FEW else 1,
            self.enqueue_many: 1 if crowded < FEW else 0,
            self.work: 10,
            self.redrive: 1,
            self.cancel: 1.5,
            self.purge: 0.3,
            self.discard: 0.3,
            self.maintain: 1,
            self.create_batch: 1,
            self.close_batch: 2,
            self.meddle: 1,
            self.lose_hints: 0.5,
        }

    def step(self) -> None:
        """One act in a transaction of its own; sometimes it is done, undone and done again."""
        acts = self.acts()
        (act,) = self.rng.choices(list(acts), list(acts.values()))
        self.begin()
        if act not in (self.work, self.maintain):
            self.grow_old()
        if self.rng.random() < 0.1:
            self.undo(act)
        act()
        self.dawdle()
        self.conclude()

    def grow_old(self) -> None:
        """Now and then, have a snapshot that is older than the work to do."""
        if self.rng.random() < 0.15:
            self.conn.execute("set transaction isolation level repeatable read")
            self.conn.execute("select 1")
            self.dawdle()

    # Producers

    def batch(self) -> int | None:
        # Only a young one, so that each has an end.
        open = "select id from pgqueue.batch where finished_at is null and created_at > clock_timestamp() - interval '1 second'"
        return (self.some(open) or [None])[0] if self.rng.random() < 0.6 else None

    def after(self) -> list[int] | None:
        if self.rng.random() < 0.4:
            return None
        # Of jobs that wait or run, and of some that have ended.
        known = (
            "select job_id from pgqueue.run where queue in ('q', 'p') order by finished_at desc limit 40"
            if self.rng.random() < 0.2
            else "select id from pgqueue.job where queue in ('q', 'p')"
        )
        return sorted({*self.some(known, self.rng.choice([1, 1, 2, 3]))}) or None

    def enqueue(self) -> None:
        batch, after = self.batch(), self.after()
        if_dead = self.rng.choice(["cancel", "run"])
        self.dawdle()
        self.call(
            "enqueue",
            "select pgqueue.enqueue(%(queue)s, batch_id => %(batch)s, after => %(after)s, if_dead => %(if_dead)s,"
            " max_attempts => 2, expires_at => now() + %(expires)s::interval, group_key => %(group)s,"
            " priority => %(priority)s)",
            {
                "queue": self.rng.choice("qqp"),
                "batch": batch,
                "after": after,
                "if_dead": if_dead,
                "expires": self.rng.choice([None, None, None, "5 ms"]),
                "group": self.rng.choice([None, None, "a", "b"]),
                "priority": self.rng.choice([None, None, 1]),
            },
            batch=batch,
            after=after,
            if_dead=if_dead,
        )
        if batch:
            # Meanwhile another may close the batch.
            time.sleep(self.rng.choice([0, 0, 0.02, 0.05]))

    def enqueue_many(self) -> None:
        batch = self.batch()
        self.call(
            "enqueue",
            "select * from pgqueue.enqueue_many('q', '{1,2,3}', group_keys => '{a,a,null}', batch_id => %s)",
            [batch],
            batch=batch,
        )

    def create_batch(self) -> None:
        if len(self.look("select id from pgqueue.batch where finished_at is null")) < 4:
            self.call("create_batch", "select pgqueue.create_batch('callback')")

    def close_batch(self) -> None:
        for id in self.some("select id from pgqueue.batch where finished_at is null"):
            self.call("close_batch", "select pgqueue.close_batch(%s)", [id])

    # Workers

    def work(self) -> None:
        """Claim, and end what was claimed in one way or another, here or in a while."""
        # Either, because who holds new leases and ends older ones of another may wait in a circle.
        if self.rng.random() < 0.7:
            claim = self.rng.choice(CLAIMS)
            leases = self.call(
                "claim",
                f"select id, token, queue from pgqueue.{claim}, %s, %s, lease => %s)",
                [
                    self.history.who,
                    self.rng.choice([1, 1, 2, 5]),
                    self.rng.choice(["5 ms", "2 s"]),
                ],
                queues=[],
            )
        else:
            leases = self.conn.execute(
                "select id, token, queue from pgqueue.job"
                " where queue in ('q', 'p', 'callback') and token is not null and random() < 0.4"
            ).fetchall()
        self.dawdle()
        if not leases:
            return
        leases = [list(lease) for lease in leases]
        if self.rng.random() < 0.4:
            self.finish(leases)
        elif self.rng.random() < 0.3:
            self.call(
                "complete",
                "select * from pgqueue.complete_many(%s, %s)",
                [[id for id, *_ in leases], [token for _, token, _ in leases]],
                leases=leases,
            )
        else:
            for id, token, queue in sorted(leases)[:2]:
                self.end_one(id, token, queue)

    def finish(self, leases: list[list]) -> None:
        ids, tokens, queues = (list(each) for each in zip(*leases, strict=True))
        ends = [
            self.rng.choice(["complete", "fail", "release"])
            if queue != "q"
            else self.rng.choice(["complete", "complete", "fail", "reject"])
            for queue in queues
        ]
        texts = ["rejected" if end == "reject" else None for end in ends]
        self.call(
            "finish",
            "select * from pgqueue.finish(%s, %s, %s, %s, array_fill('0 s'::interval, array[%s]))",
            [ids, tokens, ends, texts, len(ids)],
            leases=leases,
        )

    def end_one(self, id: int, token: int, queue: str) -> None:
        verb = self.rng.choice(
            ["complete"] * 3 + ["fail", "release"] + ["reject"] * (queue == "q")
        )
        query = {
            "complete": "select %s::bigint from pgqueue.complete(%s, %s)",
            "fail": "select %s::bigint from pgqueue.fail(%s, %s, 'e', retry_in => '0')",
            "reject": "select %s::bigint from pgqueue.fail(%s, %s, 'rejected', permanent => true)",
            "release": "select %s::bigint from pgqueue.release(array[%s], array[%s])",
        }[verb]
        self.call(verb, query, [id, id, token], leases=[[id, token, queue]])

    # Operators

    def cancel(self) -> None:
        for id in self.some("select id from pgqueue.job where queue in ('q', 'p')"):
            self.call("cancel", "select pgqueue.cancel(%s)", [id])

    def purge(self) -> None:
        self.call("purge", "select pgqueue.purge('p')")

    def redrive(self) -> None:
        self.call("redrive", "select * from pgqueue.redrive('q', max_jobs => 2)")

    def discard(self) -> None:
        for id in self.some("select id from pgqueue.dead_job where queue = 'q'"):
            self.call("discard", "select pgqueue.discard(%s)", [id])

    def maintain(self) -> None:
        query = self.rng.choice(
            [
                "select count(*) from pgqueue.maintain()",
                "select pgqueue.reap()",
                "select pgqueue.rest('{q,p,callback}', park => false)::text",
            ]
        )
        self.call("maintain", query)

    def meddle(self) -> None:
        """Lock what waits or runs, for no reason that the others could know of."""
        for id in self.some("select id from pgqueue.job where queue in ('q', 'p')"):
            self.call("reprioritize", "select pgqueue.reprioritize(%s, 1)", [id])

    def lose_hints(self) -> None:
        """The sweep finds whatever no loose end points to, but for events."""
        self.conn.execute(
            "delete from pgqueue.loose_end where ctid = any (array("
            "select ctid from pgqueue.loose_end"
            " where random() < 0.5 and what not in ('event', 'wait') for update skip locked))"
        )
