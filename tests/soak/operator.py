"""Who changes settings, pauses and resumes, cancels, redrives, and puts things right."""

import time
from collections.abc import Callable

from soak import scene
from soak.client import MET, Client


class Operator(Client):
    pause = 0.05
    may_fail_with = MET | {"40P01"}

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self.change: 1,
            self.pause_side: 1,
            self.cancel: 2,
            self.redrive: 2,
            self.reprioritize: 1,
            self.run_now: 1,
            self.purge: 0.3,
            self.discard: 0.1,
            self.maintain: 2,
        }

    def step(self) -> None:
        # Each alone: a change of settings counts from its commit.
        acts = self.acts()
        (act,) = self.rng.choices(list(acts), list(acts.values()))
        act()

    def change(self) -> None:
        scope, lower, usual, query = self.rng.choice(scene.CHANGES)
        for most in (lower, usual):
            self.call("configure", query, [most], scope=scope, most=most)
            time.sleep(self.rng.choice([0, 0.1, 0.4]))

    def pause_side(self) -> None:
        self.call("pause", "select pgqueue.pause(%s)", [scene.SIDE], queue=scene.SIDE)
        time.sleep(self.rng.choice([0.05, 0.2]))
        self.call("resume", "select pgqueue.resume(%s)", [scene.SIDE], queue=scene.SIDE)

    def job(self) -> list[int]:
        return self.some(
            "select id from pgqueue.job where queue in ('work', 'limited', 'rated', 'side') limit 200"
        )

    def cancel(self) -> None:
        for id in self.job():
            self.call("cancel", "select pgqueue.cancel(%s, 'enough')", [id])

    def redrive(self) -> None:
        self.call("redrive", "select * from pgqueue.redrive(max_jobs => 20)")

    def reprioritize(self) -> None:
        for id in self.job():
            self.call(
                "reprioritize",
                "select pgqueue.reprioritize(%s, %s)",
                [id, self.rng.choice([0, 5])],
                id=id,
            )

    def run_now(self) -> None:
        for id in self.job():
            self.call("run_now", "select pgqueue.run_now(%s)", [id], id=id)

    def purge(self) -> None:
        self.call("purge", "select pgqueue.purge(%s)", [scene.SIDE])

    def discard(self) -> None:
        for id in self.some("select id from pgqueue.dead_job where queue = 'work'"):
            self.call("discard", "select pgqueue.discard(%s)", [id])

    def maintain(self) -> None:
        self.call("maintain", "select count(*) from pgqueue.maintain()")


class Watcher(Client):
    """Looks at snapshots: what the views count, beside what there is. It waits for nobody, so it also ends what
    sessions that were cut off have left prepared."""

    pause = 0.3
    LOOK = """
    select
        q.queue, q.is_estimate,
        array[q.ready + q.scheduled + q.blocked + q.running + q.expired, q.dead],
        array[
            (select count(*) from pgqueue.job as j where j.queue = q.queue),
            (select count(*) from pgqueue.dead_job as d where d.queue = q.queue)
        ],
        q.running + q.expired,
        (select count(*) from pgqueue.job as j where j.queue = q.queue and j.token is not null),
        -- Those that have expired in their place count as expired, too.
        (select count(*) from pgqueue.job as j where j.queue = q.queue and num_nonnulls(j.token, (j.terms).expires_at) > 0)
    from pgqueue.queues as q
    """

    LEFT = "select gid from pg_prepared_xacts where prepared < clock_timestamp() - interval '0.5 s'"

    def is_done(self) -> bool:
        return self.phase.is_over.is_set()

    def step(self) -> None:
        for name in self.look(self.LEFT):
            self.note("end prepared")
            how = self.rng.choice(["commit", "rollback"])
            self.conn.execute(f"{how} prepared '{name}'")
        # The view is made of functions, and all are to see the same.
        self.conn.execute("begin isolation level repeatable read")
        self.is_open = True
        self.call("look", self.LOOK)
        self.conn.execute("commit")
        self.is_open = False
