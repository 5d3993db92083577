"""Sessions that work on a few jobs which save steps and wait for events, and that emit these.

An event is emitted before its job is suspended, after that, or at once with it, in transactions that stay open:
whichever commits last, the job goes on. In the calm each event is emitted, once at the latest, and all jobs end.
"""

import json
import time
from collections.abc import Callable

from psycopg.types.json import Jsonb

from soak import scene
from soak.client import MET, Client

FEW = 20  # jobs, of which more are added only now and then
STEPS = ["first", "second", "third", "last"]  # the last once its event has happened
LIVING = f"select id from pgqueue.job where queue = '{scene.LONG}'"


class Long(Client):
    # Who has lost the lease may be saving the same step.
    may_fail_with = MET | {"40P01"}
    pause = 0.003

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.known: list[tuple] = []  # leases, of which some are over

    def acts(self) -> dict[Callable[[], None], float]:
        if self.phase.is_calm.is_set():
            return {self.work: 3, self.emit: 2}
        return {
            self.enqueue: 3 if len(self.look(LIVING)) < FEW else 0.3,
            self.work: 8,
            self.emit: 2,
            self.run_now: 0.2,
            self.cancel: 0.2,
            self.maintain: 0.5,
        }

    def is_done(self) -> bool:
        return self.phase.is_over.is_set()

    def step(self) -> None:
        """One act in a transaction of its own, so that only a stale save waits in a circle."""
        acts = self.acts()
        self.transact(self.rng.choices(list(acts), list(acts.values())))

    def enqueue(self) -> None:
        query = "select pgqueue.enqueue(%s, group_key => %s, expires_at => now() + %s)"
        given = [
            self.rng.choice([None, None, "g"]),
            self.rng.choice([None, "1 minute"]),
        ]
        rows = self.call("enqueue", query, [scene.LONG, *given])
        if self.rng.random() < 0.2:
            self.say(rows[0][0])

    def emit(self) -> None:
        for id in self.some(LIVING):
            self.say(id)

    def say(self, id: int) -> None:
        self.call("emit", "select pgqueue.emit(%s)", [f"event of {id}"])

    def run_now(self) -> None:
        for id in self.some(LIVING):
            self.call("run_now", "select pgqueue.run_now(%s)", [id])

    def cancel(self) -> None:
        for id in self.some(LIVING):
            self.call("cancel", "select pgqueue.cancel(%s)", [id])

    def maintain(self) -> None:
        self.call("maintain", "select count(*) from pgqueue.maintain()")

    def work(self) -> None:
        """Go on with a job of a new lease, or of an older one, which may be lost."""
        calm = self.phase.is_calm.is_set()
        if self.rng.random() < 0.6:
            query = "select id, token, queue from pgqueue.claim(%s, %s, lease => %s)"
            lease = "2 s" if calm else self.rng.choice(["5 ms", "30 ms", "2 s"])
            given = [scene.LONG, self.history.who, lease]
            leases = self.call("claim", query, given, queues=[scene.LONG])
            self.known = [*leases, *self.known[:5]]
        else:
            leases = self.known and [self.rng.choice(self.known)]
        self.dawdle()
        for lease in leases:
            self.go_on(*lease)

    def go_on(self, id: int, token: int, queue: str) -> None:
        done = self.look("select name from pgqueue.steps(%s)", [id])
        event = f"event of {id}"
        has_happened = self.look(
            "select name from pgqueue.events where name = %s", [event]
        )
        for name in STEPS if has_happened else STEPS[:-1]:
            if name not in done:
                if self.leaves():
                    return  # its lease goes on
                self.do(id, token, name)
                time.sleep(self.rng.choice([0, 0, 0.01, 0.04]))
        lease = {"leases": [[id, token, queue]]}
        if has_happened:
            query = "select %s::bigint from pgqueue.complete(%s, %s)"
            self.call("complete", query, [id, id, token], **lease)
            return
        how = self.rng.choice(["event", "event", "both", "finish", "fail"])
        if how == "fail":
            query = "select %s::bigint from pgqueue.fail(%s, %s, 'e', retry_in => '0')"
            self.call("fail", query, [id, id, token], **lease)
        elif how == "finish":
            query = "select * from pgqueue.finish(%s, %s, '{suspend}', %s)"
            terms = json.dumps({"event": event})
            self.call("finish", query, [[id], [token], [terms]], **lease)
        else:
            query = "select %s::bigint from pgqueue.suspend(%s, %s, %s, now() + %s)"
            late = "30 ms" if how == "both" else None
            self.call("release", query, [id, id, token, event, late], **lease)
        self.dawdle()

    def leaves(self) -> bool:
        """Whether to leave the rest to whoever gets here next, perhaps to itself, with a lease that is lost by then."""
        return not self.phase.is_calm.is_set() and self.rng.random() < 0.3

    def do(self, id: int, token: int, name: str) -> None:
        """Do a step, and undo it if another has saved it."""
        self.conn.execute("savepoint step")
        self.conn.execute("insert into step_effect values (%s, %s)", [id, name])
        self.dawdle()
        mine = {"token": token, "who": self.history.who, "nth": self.rng.random()}
        query = "select pgqueue.save_step(%s, %s, %s, %s)"
        if self.look(query, [id, token, name, Jsonb(mine)]) != [mine]:
            self.conn.execute("rollback to step")
