"""Producers and workers of the queues with limits and rates, and of the plain ones."""

import itertools
import time
from collections.abc import Callable

from soak import scene
from soak.client import MET, Client

MARKS = itertools.count(1)
QUEUES = [scene.WORK, scene.LIMITED, scene.RATED, scene.FRESH, scene.SIDE]


class Producer(Client):
    pause = 0.02
    # Who waits in a circle with another open transaction.
    may_fail_with = MET | {"40P01"}

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self.enqueue: 6,
            self.enqueue_many: 2,
            self.enqueue_once: 2,
            self.enqueue_window: 0.5,
        }

    def enqueue(self) -> None:
        queue = self.rng.choice(
            [*QUEUES, *[scene.WORK, scene.LIMITED, scene.LINES] * 2]
        )
        mark = next(MARKS)
        self.call(
            "enqueue",
            "select pgqueue.enqueue(%s, jsonb_build_object('mark', %s::int), kind => %s, group_key => %s,"
            " priority => %s, run_at => clock_timestamp() + %s::interval,"
            " expires_at => clock_timestamp() + %s::interval)",
            [
                queue,
                mark,
                self.rng.choice(["k", "l", "async"]),
                self.group(queue),
                self.rng.choice([0, 0, 0, 5]),
                self.rng.choice([None, None, "50 ms", "1 s"]),
                self.rng.choice([None] * 8 + ["30 ms"]),
            ],
            marks=[mark],
        )

    def step(self) -> None:
        if (
            len(
                self.look(
                    "select id from pgqueue.job where queue = any(%s) limit 401",
                    [[*QUEUES, scene.LINES]],
                )
            )
            > 400
        ):
            time.sleep(0.1)
        else:
            super().step()

    def group(self, queue: str) -> str | None:
        if queue in (scene.LIMITED, scene.RATED):
            return self.rng.choice(scene.GROUPS)
        if queue == scene.LINES:
            return self.rng.choice(["one", "two"])
        if queue == scene.FRESH:
            time.sleep(-time.time() % scene.TICK)
            return f"{time.time() // scene.TICK:.0f}"
        return None

    def enqueue_many(self) -> None:
        queue = self.rng.choice([*QUEUES, scene.LIMITED, scene.LINES])
        size = 2 if queue == scene.RATED else self.rng.choice([1, 2, 12])
        marks = [next(MARKS) for _ in range(size)]
        groups = (
            [self.group(queue)] * size
            if queue == scene.FRESH
            else [self.group(queue) for _ in marks]
        )
        self.call(
            "enqueue",
            "select * from pgqueue.enqueue_many(%s,"
            " array(select jsonb_build_object('mark', m) from unnest(%s::int[]) as m), kind => %s, group_keys => %s)",
            [
                queue,
                marks,
                self.rng.choice(["k", "l"]),
                groups if any(groups) else None,
            ],
            marks=marks,
        )

    def enqueue_once(self) -> None:
        mark = next(MARKS)
        self.call(
            "enqueue",
            "select pgqueue.enqueue(%s, jsonb_build_object('mark', %s::int), kind => 'k', unique_key => %s,"
            " on_duplicate => %s, run_at => clock_timestamp() + %s::interval)",
            [
                self.rng.choice([scene.WORK, scene.SIDE]),
                mark,
                self.rng.choice("abc"),
                self.rng.choice(["skip", "replace", "postpone", "error"]),
                self.rng.choice([None, "20 ms"]),
            ],
            marks=[mark],
        )

    def enqueue_window(self) -> None:
        mark, key = next(MARKS), self.rng.choice(["window a", "window b"])
        self.call(
            "enqueue",
            "select pgqueue.enqueue(%s, jsonb_build_object('mark', %s::int), kind => 'k', unique_key => %s,"
            " unique_for => %s * interval '1 second')",
            [scene.WORK, mark, key, scene.WINDOW],
            marks=[mark],
            window=key,
        )


class Worker(Client):
    """Claims, and ends what was claimed in one way or another, here or in a while."""

    pause = 0.005
    may_fail_with = MET | {"40P01"}
    queues = QUEUES

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.held: list[list] = []  # leases, with their queues

    def acts(self) -> dict[Callable[[], None], float]:
        return {
            self.work: 8,
            self.finish_held: 4,
            self.be_late: 1,
            self.extend: 1,
            self.meddle: 0.3,
        }

    def is_done(self) -> bool:
        return self.phase.is_over.is_set()

    def step(self) -> None:
        if self.phase.is_calm.is_set():
            self.work_off()
        else:
            super().step()

    def work_off(self) -> None:
        """Claim and complete, until nothing is left."""
        self.pause = 0.02
        self.held = []
        for queues in ([self.rng.choice(scene.ALL)], scene.ALL):
            if leases := self.claim(queues, 20, "2 s", None):
                self.complete(leases)

    def claim(self, queues: list[str], size: int, lease: str, kinds) -> list[list]:
        rows = self.call(
            "claim",
            "select id, token, queue from pgqueue.claim_from(%s, %s, %s, %s, %s)"
            if len(queues) > 1
            else "select id, token, queue from pgqueue.claim(%s, %s, %s, %s, %s)",
            [
                queues if len(queues) > 1 else queues[0],
                self.history.who,
                size,
                lease,
                kinds,
            ],
            queues=queues,
            kinds=kinds,
        )
        return [list(row) for row in rows]

    def work(self) -> None:
        queues = [self.rng.choice(QUEUES)] if self.rng.random() < 0.7 else list(QUEUES)
        lease = self.rng.choice(["20 ms", "2 s", "2 s"])
        kinds = self.rng.choice([None, None, None, ["k"]])
        leases = self.claim(queues, self.rng.choice([1, 1, 3, 30]), lease, kinds)
        if lease == "2 s" and self.rng.random() < 0.6:
            self.finish(leases)
        elif not self.is_open:
            self.held = (self.held + leases)[-60:]

    def finish_held(self) -> None:
        held, self.held = self.held, []
        self.finish(held)

    def finish(self, leases: list[list]) -> None:
        # In the order of their ids, also over several calls: see the locks of module lease.
        leases = sorted(leases)
        how = self.rng.choice(
            [*["complete"] * 5, "fail", "release", "reject", *["each"] * 3]
        )
        if not leases:
            return
        if how == "complete":
            self.complete(leases)
        elif how == "each":
            self.finish_each(leases)
        else:
            self.end_all(leases, how)

    def complete(self, leases: list[list]) -> None:
        """Each with its effect, in one transaction."""
        if self.rng.random() < 0.5 and not self.is_open:
            for lease in leases:
                self.in_one_transaction(lambda lease=lease: self.complete_one(lease))
            return
        ids, tokens = [id for id, *_ in leases], [token for _, token, *_ in leases]
        self.call(
            "complete",
            "with c as (select * from pgqueue.complete_many(%s, %s) as id), e as ("
            " insert into effect select c.id from c)"
            " select id from c",
            [ids, tokens],
            leases=leases,
        )

    def complete_one(self, lease: list) -> None:
        self.call(
            "effect", "insert into effect values (%s) returning job_id", [lease[0]]
        )
        self.call(
            "complete",
            "select %s::bigint from pgqueue.complete(%s, %s)",
            [lease[0], *lease[:2]],
            leases=[lease],
        )

    def in_one_transaction(self, act: Callable[[], None]) -> None:
        self.conn.execute("begin")
        self.is_open = True
        act()
        self.conn.execute("commit")
        self.settle("ok")
        self.is_open = False

    def end_all(self, leases: list[list], how: str) -> None:
        # What is dead does not come back by itself: some only.
        leases = leases[:2] if how == "reject" else leases
        self.call(
            how,
            "select * from pgqueue.finish(%s, %s, array_fill(%s::text, array[%s]), array_fill(%s::text, array[%s]),"
            " array_fill('1 ms'::interval, array[%s]))",
            [
                [id for id, *_ in leases],
                [token for _, token, *_ in leases],
                *(how, len(leases)),
                *("rejected" if how == "reject" else "failed", len(leases)),
                len(leases),
            ],
            leases=leases,
        )

    def finish_each(self, leases: list[list]) -> None:
        for lease in leases[:5]:
            how = self.rng.choice(["fail", "fail", "release", "reject"])
            query = {
                "fail": "select %s::bigint from pgqueue.fail(%s, %s, 'failed', '1 ms')",
                "reject": "select %s::bigint from pgqueue.fail(%s, %s, 'rejected', permanent => true)",
                "release": "select %s::bigint from pgqueue.release(array[%s], array[%s])",
            }[how]
            self.call(how, query, [lease[0], *lease[:2]], leases=[lease])

    def extend(self) -> None:
        if self.held:
            held = sorted(self.held)
            self.call(
                "extend",
                "select * from pgqueue.extend(%s, %s, '2 s')",
                [[id for id, *_ in held], [token for _, token, *_ in held]],
            )

    def be_late(self) -> None:
        """End what another holds by now, like a worker that has slept past its lease."""
        running = "select id, token - 1, queue from pgqueue.job where queue = any(%s) and token > 1 limit 20"
        rows = self.conn.execute(running, [self.queues]).fetchall()
        if rows:
            lease = list(self.rng.choice(rows))
            verb, query = self.rng.choice(
                [
                    ("complete", "select %s::bigint from pgqueue.complete(%s, %s)"),
                    (
                        "fail",
                        "select %s::bigint from pgqueue.fail(%s, %s, 'late', '1 ms')",
                    ),
                    (
                        "release",
                        "select %s::bigint from pgqueue.release(array[%s], array[%s])",
                    ),
                ]
            )
            self.call(verb, query, [lease[0], *lease[:2]], leases=[lease])

    def meddle(self) -> None:
        """End what others hold."""
        given = "select id, token, queue from pgqueue.job where queue = any(%s) and token is not null and random() < 0.3 limit 5"
        rows = [list(row) for row in self.conn.execute(given, [self.queues])]
        if rows:
            self.complete(sorted(rows))


class Steady(Worker):
    """Ends what it has claimed from LINES before it claims more, so that the next job's turn comes soon."""

    pause = 0.15

    def acts(self) -> dict[Callable[[], None], float]:
        return {self.work_one: 1}

    def work_one(self) -> None:
        self.finish(self.claim([scene.LINES], 1, "2 s", None))


class Impatient(Worker):
    """Gives up if anything waits: a claim never does."""

    may_fail_with = MET | {"40P01", "55P03"}
    options = "-c lock_timeout=250ms"

    def acts(self) -> dict[Callable[[], None], float]:
        return {self.try_one: 1}

    def try_one(self) -> None:
        queues = [self.rng.choice(scene.ALL)]
        self.claim(queues, self.rng.choice([1, 10]), "20 ms", None)
