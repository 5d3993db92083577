"""Whatever is limited, and however: each job that runs holds a permit of each of its limits, and no other.

Settings and calls are drawn at random, PGQUEUE_SEED chooses others; the long form does so by itself.
"""

import os
import random

import psycopg
import pytest
from conftest import LONG, one, soon

SEED = int(os.environ.get("PGQUEUE_SEED") or (random.randrange(1 << 30) if LONG else 1))
QUEUES = 400 if LONG else 20  # each with its own settings
ALWAYS = "rate_limit => 1000, rate_period => '1 hour'"  # a rate that is never used up
SETTINGS = {
    "": [
        "group_limit => 1",
        "group_limit => 2",
        "group_limit => 3",
        "group_on_retry => 'block'",
        "max_running => 1",
        "max_running => 3",
        "max_running => 400",
        "age_after => '1 second'",
        ALWAYS,
    ],
    "kind => 'x', ": ["max_running => 1", "max_running => 2", ALWAYS],
    "kind => 'y', ": [ALWAYS],
    "group_key => 'a', ": ["group_limit => 1", "group_limit => 2", ALWAYS],
    "group_key => 'b', ": ["weight => 3"],
    "group_key => '*', ": [ALWAYS],
}
ENDS = [
    "select pgqueue.complete(%s, %s)",
    "select pgqueue.fail(%s, %s, 'e', '0')",
    "select pgqueue.fail(%s, %s, 'e', '2 ms')",
    "select pgqueue.release(array[%s], array[%s])",
]
# Scope, setting.
Settings = list[tuple[str, str]]
HELD = """
    select
        j.id, j.kind, j.group_key,
        array(
            select (p.kind, p.group_key, p.is_rate)::text
            from pgqueue.permit as p
            where p.job_id = j.id and p.ctid = any (j.permits) and p.taken_at = j.claimed_at
        )
    from pgqueue.job as j
    where j.token is not null
"""


def configure(db: psycopg.Connection, rng: random.Random) -> Settings:
    chosen = [
        (scope, setting)
        for scope, settings in SETTINGS.items()
        for setting in settings
        if rng.random() < 0.25
    ]
    for scope, setting in chosen:
        db.execute(f"select pgqueue.configure('q', {scope}{setting})")
    return chosen


def limits(chosen: Settings, kind: str, group: str | None) -> set[str]:
    """What a job needs a permit of: a kind, a group, and whether it is a rate."""
    found = set()
    for scope, setting in chosen:
        is_rate = "t" if setting == ALWAYS else "f"
        if f"kind => '{kind}'" in scope and setting.startswith(("max_", "rate_")):
            found.add(f'({kind},"",{is_rate})')
        elif not scope and setting.startswith(("max_", "rate_")):
            found.add(f'("","",{is_rate})')
        elif group and (
            (not scope and setting.startswith("group_limit"))
            or (
                scope in (f"group_key => '{group}', ", "group_key => '*', ")
                and setting.startswith(("group_limit", "rate_"))
            )
        ):
            found.add(f'("",{group},{is_rate})')
    return found


def enqueue(db: psycopg.Connection, rng: random.Random) -> None:
    groups = [rng.choice([None, "a", "b", "c"]) for _ in range(rng.randint(1, 6))]
    db.execute(
        "select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[%s]), kind => %s,"
        " priority => %s, group_keys => %s::text[], max_attempts => 1000)",
        (len(groups), rng.choice("xyz"), rng.choice([0, 0, 5, -3]), groups),
    )


def claim(db: psycopg.Connection, rng: random.Random) -> list[tuple[int, int]]:
    kinds = rng.choice([None, None, None, ["x"], ["y", "x"]])
    wanted = rng.choice([1, 1, 2, 5, 100, 400])
    found = db.execute(
        "select id, token from pgqueue.claim('q', 'w', %s, %s, %s)",
        (wanted, rng.choice(["1 hour", "1 hour", "1 ms"]), kinds),
    ).fetchall()
    assert len(dict(found)) == len(found) <= wanted
    return found


@pytest.mark.parametrize("number", range(QUEUES))
def test_each_job_that_runs_holds_a_permit_of_each_of_its_limits(db, number):
    rng = random.Random(f"{SEED} {number}")
    chosen = configure(db, rng)
    leases: list[tuple[int, int]] = []
    for _ in range(rng.randint(8, 40)):
        what = rng.random()
        if what < 0.3:
            enqueue(db, rng)
        elif what < 0.65:
            leases += claim(db, rng)
            for id, kind, group, held in db.execute(HELD):
                needed = sorted(limits(chosen, kind, group))
                assert (id, sorted(held)) == (id, needed), (SEED, chosen)
        elif leases:
            lease = leases.pop(rng.randrange(len(leases)))
            try:
                db.execute(rng.choice(ENDS), lease)
            except psycopg.errors.Error as error:
                assert error.sqlstate == "PQ002", "its lease has expired"
    one(
        db,
        "select count(pgqueue.complete(id, token)) from pgqueue.job where token is not null",
    )

    def is_drained() -> bool:
        for lease in db.execute("select id, token from pgqueue.claim('q', 'w', 100)"):
            db.execute(ENDS[0], lease)
        return one(db, "select count(*) from pgqueue.job") == 0

    assert soon(is_drained), (SEED, chosen)
    assert (
        one(db, "select count(*) from pgqueue.permit where free_at = 'infinity'") == 0
    )
