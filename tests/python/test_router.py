"""The router: what make router writes, in a database with PL/Proxy, in front of three shards."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import documents
import forked
import pgqueue
import psycopg
import pytest
import scale_demo
from cluster import Cluster
from conftest import column, database, one
from pgqueue.move import move_groups
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from test_worker_stop import frozen
from worker_harness import pooler, wait_until  # noqa: F401 (a fixture)

REPO = Path(__file__).resolve().parents[2]
SHARDS = 3
KEYS = [f"key {n}" for n in range(60)]
KEYS_OF = [
    [key for key in KEYS if pgqueue.shard_of(key, SHARDS) == place]
    for place in range(SHARDS)
]


@pytest.fixture(scope="module")
def script(template: str) -> str:
    """What make router writes, of the database that all tests begin with."""
    made = subprocess.run(
        [sys.executable, REPO / "packaging/router.py"],
        env={**os.environ, "PGDATABASE": template},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return made.stdout


class Routed:
    """Three shards, and the router in front of them."""

    def __init__(self, db: psycopg.Connection, dsns: list[str]) -> None:
        self.db = db
        self.shards = [psycopg.connect(dsn, autocommit=True) for dsn in dsns]

    def where(self, query: str, *args) -> list[int]:
        """Number the shards in which a query counts something."""
        found = [one(shard, query, *args) for shard in self.shards]
        return [n for n, count in enumerate(found, 1) if count]

    def lose(self, number: int, how: str = "allow_connections false") -> None:
        """Have a shard refuse connections, as if it were down."""
        name = self.shards[number - 1].info.dbname
        with psycopg.connect(dbname="postgres", autocommit=True) as admin:
            admin.execute(f"alter database {name} {how}")
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s"
                " and application_name <> 'kept'",
                [name],
            )

    def bring_back(self, number: int) -> None:
        name = self.shards[number - 1].info.dbname
        with psycopg.connect(dbname="postgres", autocommit=True) as admin:
            admin.execute(f"alter database {name} allow_connections true")


@pytest.fixture
def routed(
    template: str, script: str, request: pytest.FixtureRequest
) -> Iterator[Routed]:
    """The parameter: what the first of them has done before it became a shard."""
    before = getattr(request, "param", None)
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        there = one(
            admin, "select count(*) from pg_available_extensions where name = 'plproxy'"
        )
        if not there:
            pytest.skip("PL/Proxy is not installed (Debian: postgresql-NN-plproxy)")
        where = f"host={admin.info.host} port={admin.info.port}"
        name = "pgqueue_router"
        admin.execute(f"drop database if exists {name} with (force)")
        admin.execute(f"create database {name}")
    with database(template) as a, database(template) as b, database(template) as c:
        dsns = [f"{dsn} application_name=kept" for dsn in (a, b, c)]
        with psycopg.connect(dbname=name, autocommit=True) as db:
            db.execute(script)
            options = [
                f"p{n} 'dbname={conninfo_to_dict(dsn)['dbname']} {where}'"
                for n, dsn in enumerate((a, b, c))
            ]
            db.execute(
                "create server pgqueue foreign data wrapper plproxy options "
                f"(modular_mapping '1', {', '.join(options)}); "
                "create user mapping for public server pgqueue"
            )
            routed = Routed(db, dsns)
            if before:
                routed.shards[0].execute(before)
            above = 1_000_000 if before else None
            for number, shard in enumerate(routed.shards, 1):
                shard.execute("select pgqueue.shard(%s, above => %s)", (number, above))
            yield routed
            for shard in routed.shards:
                shard.close()
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"drop database {name} with (force)")


@contextlib.contextmanager
def connected_as(role: str, routed: Routed) -> Iterator[psycopg.Connection]:
    """A session of the router whose role has the rights of the page, and the same name on the shards."""
    db = routed.db
    db.execute(
        f"alter role {role} login; grant usage on schema pgqueue to {role};"
        f" grant execute on all functions in schema pgqueue to {role};"
        f" grant select on all tables in schema pgqueue to {role};"
        f" grant usage on foreign server pgqueue to {role};"
        f" create user mapping for {role} server pgqueue options (user '{role}')"
    )
    try:
        with psycopg.connect(dbname=db.info.dbname, user=role, autocommit=True) as conn:
            yield conn
    finally:
        db.execute(f"drop user mapping for {role} server pgqueue; drop owned by {role}")
        for shard in routed.shards:
            shard.execute(f"drop owned by {role}")


def home(id: int) -> int:
    """The number of the shard that has given out an id."""
    return (id - 1) % 1024 + 1


COUNT = "select count(*) from pgqueue.job"
IDS = "select id from pgqueue.job"


def test_a_job_goes_to_the_shard_of_its_group_else_of_its_unique_key(routed):
    for key in KEYS[:20]:
        place = pgqueue.shard_of(key, SHARDS) + 1
        for option in "group_key", "unique_key":
            id = one(routed.db, f"select pgqueue.enqueue('q', {option} => %s)", key)
            there = f"select count(*) from pgqueue.job where id = %s and {option} = %s"
            assert routed.where(there, id, key) == [place]
            assert (id - 1) % 1024 + 1 == place
    both = "select pgqueue.enqueue('q', group_key => %s, unique_key => %s)"
    id = one(routed.db, both, KEYS[0], "mine")
    assert (id - 1) % 1024 == pgqueue.shard_of(KEYS[0], SHARDS)


def test_a_job_without_a_key_goes_to_any_shard_that_is_up(routed):
    for _ in range(40):
        routed.db.execute("select pgqueue.enqueue('q')")
    assert routed.where(COUNT) == [1, 2, 3]
    routed.lose(2)
    before = one(routed.shards[1], COUNT)
    ids = [one(routed.db, "select pgqueue.enqueue('q')") for _ in range(20)]
    assert {(id - 1) % 1024 + 1 for id in ids} == {1, 3}
    assert one(routed.shards[1], COUNT) == before


def test_many_jobs_are_split_by_key_and_their_ids_come_in_order(routed):
    payloads = [str(n) for n in range(60)]
    ids = column(
        routed.db,
        "select * from pgqueue.enqueue_many('q', %s::jsonb[], group_keys => %s)",
        payloads,
        KEYS,
    )
    assert [(id - 1) % 1024 for id in ids] == [
        pgqueue.shard_of(k, SHARDS) for k in KEYS
    ]
    for shard in routed.shards:
        for id, payload, key in shard.execute(
            "select id, payload, group_key from pgqueue.job"
        ):
            assert (ids[payload], KEYS[payload]) == (id, key)
    # One call for each.
    per_call = "select count(distinct xmin::text) from pgqueue.job"
    assert [one(shard, per_call) for shard in routed.shards] == [1, 1, 1]
    with pytest.raises(errors.InvalidParameterValue):
        routed.db.execute(
            "select * from pgqueue.enqueue_many('q', array['1']::jsonb[], group_keys => array['a', 'b'])"
        )
    mixed = column(
        routed.db,
        "select * from pgqueue.enqueue_many('r', array['1', '2', '3']::jsonb[], unique_keys => array['a', null, 'b'])",
    )
    assert len(mixed) == 3 and None not in mixed


def calls(routed, query: str) -> Counter[str]:
    """Run it, and count the calls of the router's functions in which something is done for each job or shard."""
    db = routed.db
    db.execute("set track_functions = 'all'")
    counted = (
        "select funcname, calls from pg_stat_xact_user_functions where schemaname = 'pgqueue'"
        " and funcname in ('_count', '_list', '_on_above', '_place', '_problem')"
    )
    with db.transaction():
        before = Counter(dict(db.execute(counted).fetchall()))
        db.execute(query)
        return Counter(dict(db.execute(counted).fetchall())) - before


def test_what_is_known_once_is_not_looked_up_for_each_job_or_shard(routed):
    db = routed.db
    keys = ", ".join(f"'{key}'" for key in KEYS)
    many = f"pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[{len(KEYS)}]), group_keys => array[{keys}])"
    # The planner may ask for a number as well.
    assert sum(calls(routed, f"select {many}").values()) < 6
    found = calls(routed, "select pgqueue.claim('q', 'w')")
    assert found.pop("_problem") == 1
    assert sum(found.values()) < 3
    held = db.execute("select id, token from pgqueue.claim('q', 'w', 30)").fetchall()
    assert len(held) > 5
    ids, tokens = ([lease[n] for lease in held] for n in (0, 1))
    query = f"select pgqueue.complete_many(array{ids}, array{tokens})"
    assert sum(calls(routed, query).values()) < 3


def test_what_takes_an_id_finds_its_shard(routed):
    db = routed.db
    ids = [
        one(db, "select pgqueue.enqueue('q', group_key => %s)", key) for key in KEYS[:9]
    ]
    for id in ids:
        assert one(db, "select state from pgqueue.status(%s)", id) == "ready"
        assert one(db, "select pgqueue.why(%s)", id)
        db.execute("select pgqueue.reprioritize(%s, 3)", (id,))
        assert routed.where(
            "select count(*) from pgqueue.job where id = %s and priority = 3", id
        ) == [(id - 1) % 1024 + 1]
    assert one(db, "select pgqueue.cancel(%s)", ids[0]) == "cancelled"
    with pytest.raises(psycopg.DatabaseError, match=r"^job 5 not found") as refused:
        db.execute("select pgqueue.cancel(5)")
    assert refused.value.sqlstate == "PQ001"
    claimed = db.execute(
        "select id, token from pgqueue.claim('q', 'w', 100)"
    ).fetchall()
    assert len({(id - 1) % 1024 for id, _ in claimed}) == 1
    while found := db.execute(
        "select id, token from pgqueue.claim('q', 'w', 100)"
    ).fetchall():
        claimed += found
    assert len(claimed) == 8
    held = [list(each) for each in zip(*claimed, strict=True)]
    assert {s for _, s in db.execute("select * from pgqueue.extend(%s, %s)", held)} == {
        "held"
    }
    first, *others = claimed
    db.execute("select pgqueue.complete(%s, %s)", first)
    with pytest.raises(psycopg.DatabaseError) as refused:
        db.execute("select pgqueue.complete(%s, %s)", first)
    assert refused.value.sqlstate == "PQ002"
    held = [list(each) for each in zip(*others, strict=True)]
    ended = db.execute(
        "select * from pgqueue.finish(%s, %s, %s)", (*held, ["complete"] * len(others))
    ).fetchall()
    assert dict(ended) == {id: "completed" for id, _ in others}


def test_a_job_that_was_moved_is_found_where_it_is(routed):
    job = one(routed.db, "select pgqueue.enqueue('q', group_key => %s)", KEYS[0])
    home = (job - 1) % 1024
    other = (home + 1) % SHARDS
    row = one(routed.shards[home], "select to_jsonb(j) from pgqueue.job as j")
    routed.shards[other].execute(
        "insert into pgqueue.job overriding system value"
        " select * from jsonb_populate_record(null::pgqueue.job, %s)",
        (psycopg.types.json.Jsonb(row),),
    )
    routed.shards[home].execute("delete from pgqueue.job")
    assert one(routed.db, "select state from pgqueue.status(%s)", job) == "ready"
    routed.db.execute("select pgqueue.run_now(%s)", (job,))
    assert one(routed.db, "select pgqueue.cancel(%s)", job) == "cancelled"


def moved(routed: Routed, *statements: str) -> int:
    """Enqueue a job on shard 1, do this to it there, and move it to shard 2, where it belongs."""
    old = routed.shards[0]
    id = one(old, "select pgqueue.enqueue('q', group_key => %s)", KEYS_OF[1][0])
    for statement in statements:
        old.execute(statement)
    assert move_groups([shard.info.dsn for shard in routed.shards], 1, False) == 0
    assert home(id) == 1
    return id


CLAIM = "select id, token from pgqueue.claim('q', 'w')"
STEP = "select pgqueue.save_step(id, token, 's', '1') from pgqueue.job"
FAIL = "select pgqueue.fail(id, token, 'e', '1 hour') from pgqueue.job"
DIE = "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.job"


def test_a_job_that_has_failed_before_it_was_moved_is_not_gone(routed):
    """Its old shard still has the attempt in its log."""
    db = routed.db
    id = moved(routed, CLAIM, FAIL)
    state = "select state from pgqueue.status(%s)"
    assert one(db, state, id) == "scheduled"
    assert not one(db, "select pgqueue.why(%s)", id).startswith("gone")
    assert one(db, "select pgqueue.await(%s) > '0'", id) is True
    assert one(db, "select pgqueue.result(%s)", id) is None
    db.execute("select pgqueue.run_now(%s)", (id,))
    there = routed.shards[1]
    there.execute(
        "select pgqueue.complete(id, token, '5') from pgqueue.claim('q', 'w')"
    )
    assert one(db, state, id) == "completed"
    assert one(db, "select pgqueue.why(%s)", id).startswith("completed")
    assert one(db, "select pgqueue.await(%s) = '0'", id) is True
    assert one(db, "select pgqueue.result(%s)", id) == 5
    assert pgqueue.wait(db, id, timeout=5).result == 5


def test_a_dead_job_that_was_moved_is_not_gone_until_it_is_discarded(routed):
    db = routed.db
    id = moved(routed, CLAIM, STEP, DIE)
    state = "select state from pgqueue.status(%s)"
    assert one(db, state, id) == "dead"
    assert one(db, "select pgqueue.why(%s)", id).startswith("dead")
    assert column(db, "select name from pgqueue.steps(%s)", id) == ["s"]
    db.execute("select pgqueue.discard(%s)", (id,))
    assert one(db, state, id) == "gone"
    assert one(db, "select pgqueue.why(%s)", id).startswith("gone")
    assert one(db, "select pgqueue.await(%s) = '0'", id) is True
    assert one(db, "select pgqueue.result(%s)", id) is None
    assert column(db, "select name from pgqueue.steps(%s)", id) == []


@pytest.mark.parametrize("before", [[], [CLAIM, FAIL]], ids=["new", "tried"])
def test_a_job_that_was_moved_to_a_shard_that_is_down_is_not_unknown(routed, before):
    db = routed.db
    id = moved(routed, *before)
    lease = routed.shards[1].execute(CLAIM).fetchone()
    routed.lose(2)
    for call in "status", "why", "await", "result", "cancel", "run_now", "discard":
        with pytest.raises(errors.InternalError_, match="not currently accepting"):
            db.execute(f"select pgqueue.{call}(%s)", (id,))
    with pytest.raises(errors.InternalError_):
        db.execute("select pgqueue.unschedule('no such')")
    if lease:
        with pytest.raises(errors.InternalError_):
            db.execute("select pgqueue.complete(%s, %s)", lease)
    with pytest.raises(errors.DatabaseError) as lost:
        db.execute("select pgqueue.complete(%s, 1)", (id,))
    assert lost.value.sqlstate == "PQ002"
    assert column(db, "select name from pgqueue.steps(%s)", id) == []
    routed.bring_back(2)
    assert one(db, "select state from pgqueue.status(%s)", id) not in ("gone", None)


OLD = "select pgqueue.enqueue('old'), pgqueue.create_batch('old'), pgqueue.enqueue('old'), pgqueue.enqueue('old')"


@pytest.mark.parametrize("routed", [OLD], indirect=True)
def test_an_id_that_is_older_than_the_shards_is_of_the_first(routed, role):
    """Whatever shard it would be of if it were not; also for a role that may only enqueue."""
    for shard in routed.shards:
        shard.execute("select pgqueue.grant_access(%s, 'producer')", (role,))
    after = "select pgqueue.enqueue('q', after => %s)"
    with connected_as(role, routed) as db:
        waiting = one(db, after, [3])
        assert home(waiting) == 1
        assert one(db, "select state from pgqueue.status(%s)", waiting) == "blocked"
        assert home(one(db, "select pgqueue.enqueue('q', batch_id => 2)")) == 1
        many = "select * from pgqueue.enqueue_many('q', array['1', '2']::jsonb[], batch_id => 2)"
        assert {home(id) for id in column(db, many)} == {1}
        first, second = (
            one(db, "select pgqueue.enqueue('q', group_key => %s)", key)
            for key in KEYS_OF[1][:2]
        )
        assert home(first) == home(one(db, after, [second, first])) == 2
        with pytest.raises(errors.InvalidParameterValue, match="one shard"):
            db.execute(after, ([3, first],))
        routed.lose(2)
        assert home(one(db, "select pgqueue.enqueue('q', batch_id => 2)")) == 1
        db.execute("select pgqueue.close_batch(2)")
        routed.lose(3)
        assert one(db, "select state from pgqueue.status(3)") == "ready"


def test_the_age_of_ids_is_asked_for_once(routed):
    id = one(routed.db, "select pgqueue.enqueue('q', group_key => %s)", KEYS_OF[2][0])
    after = f"select pgqueue.enqueue('q', after => array[{id}])"
    routed.db.execute("set pgqueue.above = 'of another time'")
    assert calls(routed, after)["_on_above"] == 1
    assert calls(routed, after)["_on_above"] == 0
    routed.lose(1)
    with psycopg.connect(dbname=routed.db.info.dbname, autocommit=True) as db:
        assert home(one(db, after)) == 3


@pytest.mark.parametrize(
    "routed",
    [OLD + "; select" + ", ".join([" pgqueue.claim('old', 'w')"] * 3)],
    indirect=True,
)
def test_a_token_that_is_older_than_the_shards_is_of_the_first(routed, role):
    """Also for a role that may only work."""
    for shard in routed.shards:
        shard.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
    held = "select id, token from pgqueue.job where token = any (%s) order by token"
    leases = routed.shards[0].execute(held, ([2, 3],)).fetchall()
    ids, tokens = (list(each) for each in zip(*leases, strict=True))
    extend = "select status from pgqueue.extend(%s, %s)"
    complete = "select pgqueue.complete(%s, %s)"
    with connected_as(role, routed) as db:
        routed.lose(2)
        assert column(db, extend, ids, tokens) == ["held", "held"]
        db.execute(complete, leases[0])
        with pytest.raises(errors.DatabaseError) as lost:
            db.execute(complete, leases[0])
        assert lost.value.sqlstate == "PQ002"
        routed.bring_back(2)
        routed.lose(1)
        for _ in range(2):
            with pytest.raises(errors.InternalError_):
                db.execute(complete, leases[1])
            with pytest.raises(errors.InternalError_):
                db.execute(extend, (ids[1:], tokens[1:]))
        new = 1_000_000 // 1024 * 1024 + 1024 + 2
        assert column(db, extend, [new], [new]) == ["lost"]
        with pytest.raises(errors.DatabaseError) as lost:
            db.execute(complete, (new, new))
        assert lost.value.sqlstate == "PQ002"
        routed.bring_back(1)
        db.execute(complete, leases[1])


def test_what_belongs_together_must_be_on_one_shard(routed):
    db = routed.db
    batch = one(db, "select pgqueue.create_batch('done', group_key => %s)", KEYS[0])
    assert (batch - 1) % 1024 == pgqueue.shard_of(KEYS[0], SHARDS)
    job = one(db, "select pgqueue.enqueue('q', batch_id => %s)", batch)
    after = one(db, "select pgqueue.enqueue('q', after => %s)", [job])
    assert (job - 1) % 1024 == (after - 1) % 1024 == (batch - 1) % 1024
    elsewhere = next(
        k for k in KEYS if pgqueue.shard_of(k, SHARDS) != (batch - 1) % 1024
    )
    for call in ("batch_id => %s", "after => array[%s]"):
        with pytest.raises(errors.InvalidParameterValue, match="one shard"):
            db.execute(
                f"select pgqueue.enqueue('q', group_key => %s, {call})",
                (elsewhere, batch),
            )
    many = "select * from pgqueue.enqueue_many('q', array['1']::jsonb[], group_keys => %s, batch_id => %s)"
    with pytest.raises(errors.InvalidParameterValue, match="one shard"):
        db.execute(many, ([elsewhere], batch))
    db.execute("select pgqueue.close_batch(%s)", (batch,))


def test_operators_reach_all_shards(routed):
    db = routed.db
    db.execute(
        "select pgqueue.configure('q', max_running => 2), pgqueue.pause('halted')"
    )
    paused = "select count(*) from pgqueue.queue where name in ('q', 'halted')"
    assert [one(shard, paused) for shard in routed.shards] == [2, 2, 2]
    for key in KEYS[:12]:
        db.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
    for shard in routed.shards:
        shard.execute(
            "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('q', 'w', 2)"
        )
    dead = sum(
        one(shard, "select count(*) from pgqueue.dead_job") for shard in routed.shards
    )
    assert dead > 3
    assert len(column(db, "select pgqueue.redrive('q', max_jobs => 3)")) == 3
    assert len(column(db, "select pgqueue.redrive('q')")) == dead - 3
    assert one(db, "select pgqueue.purge('q')") == 12
    tasks = db.execute("select task, done from pgqueue.maintain()").fetchall()
    assert len(tasks) == len({task for task, _ in tasks}) > 3
    assert one(db, "select pgqueue.after_failover(true)") is True


def test_a_cap_holds_on_each_shard_and_a_limit_of_a_group_for_all(routed):
    db = routed.db
    db.execute(
        "select pgqueue.configure('q', max_running => 1), pgqueue.configure('g', group_limit => 1)"
    )
    for key in KEYS[:30]:
        db.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
        db.execute("select pgqueue.enqueue('g', group_key => 'one')")

    def claimed(queue: str) -> int:
        return sum(
            len(column(db, f"select id from pgqueue.claim('{queue}', 'w', 100)"))
            for _ in range(20)
        )

    assert claimed("q") == SHARDS
    assert claimed("g") == 1


def test_a_schedule_lives_on_the_shard_of_its_group_else_of_its_name(routed):
    db = routed.db
    at = "select count(*) from pgqueue.schedule where name = %s"
    group = KEYS_OF[0][0]
    for name in KEYS[:6]:
        db.execute("select pgqueue.schedule(%s, 'q', '@daily')", (name,))
        assert routed.where(at, name) == [pgqueue.shard_of(name, SHARDS) + 1]
        db.execute(
            "select pgqueue.schedule(%s, 'g', '@daily', group_key => %s)",
            (f"{name} too", group),
        )
        assert routed.where(at, f"{name} too") == [1]
        for call in "pause_schedule", "resume_schedule", "run_schedule":
            for each in name, f"{name} too":
                db.execute(f"select pgqueue.{call}(%s)", (each,))
    one(db, "select pgqueue.enqueue('g', group_key => %s)", group)
    assert routed.where("select count(*) from pgqueue.job where queue = 'g'") == [1]
    assert one(db, "select count(*) from pgqueue.schedules") == 12
    db.execute("select pgqueue.unschedule(%s)", (KEYS[0],))
    db.execute("select pgqueue.unschedule(%s)", (f"{KEYS[0]} too",))
    assert one(db, "select count(*) from pgqueue.schedules") == 10


SCHEDULE = "select pgqueue.schedule('s', 'q', '@daily', group_key => %s)"


def test_a_schedule_whose_group_changes_goes_along_paused_or_not(routed):
    db = routed.db
    at = "select count(*) from pgqueue.schedule where name = 's'"
    is_paused = "select paused from pgqueue.schedules"
    for group in KEYS_OF:
        db.execute(SCHEDULE, (group[0],))
        assert routed.where(at) == [pgqueue.shard_of(group[0], SHARDS) + 1]
    assert column(db, is_paused) == [False]
    db.execute("select pgqueue.pause_schedule('s')")
    db.execute(SCHEDULE, (KEYS_OF[0][0],))
    assert (routed.where(at), column(db, is_paused)) == ([1], [True])
    # What is refused changes nothing.
    with pytest.raises(errors.InvalidParameterValue):
        db.execute("select pgqueue.schedule('s', 'q', 'never', group_key => %s)", (KEYS_OF[1][0],))  # fmt: skip
    assert routed.where(at) == [1]


@pytest.mark.parametrize(
    "how", ["allow_connections false", "set default_transaction_read_only = on"]
)
def test_a_schedule_is_not_made_twice_while_a_shard_is_down(routed, how):
    db = routed.db
    at = "select count(*) from pgqueue.schedule where name = 's'"
    db.execute(SCHEDULE, (KEYS_OF[1][0],))
    are_up = "select bool_and(is_up) from pgqueue.shards()"
    routed.lose(2, how)
    assert one(db, are_up) is False
    with pytest.raises((errors.InternalError_, errors.ConnectionFailure)):
        db.execute(SCHEDULE, (KEYS_OF[0][0],))
    assert routed.where(at) == [2]
    routed.lose(2, "reset default_transaction_read_only")
    routed.bring_back(2)
    assert one(db, are_up) is True
    db.execute(SCHEDULE, (KEYS_OF[0][0],))
    assert routed.where(at) == [1]
    # It has its place: an application that starts need not wait.
    routed.lose(2)
    db.execute(SCHEDULE, (KEYS_OF[0][0],))


def test_who_may_only_schedule_still_may(routed, role):
    for shard in routed.shards:
        shard.execute("select pgqueue.grant_access(%s, 'scheduler')", (role,))
    with connected_as(role, routed) as db:
        db.execute(SCHEDULE, (KEYS_OF[0][0],))
    at = "select count(*) from pgqueue.schedule where name = 's'"
    assert routed.where(at) == [1]


def test_views_are_those_of_all_shards(routed):
    for key in KEYS[:12]:
        routed.db.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
    shown = routed.db.execute(
        "select shard, id, group_key from pgqueue.jobs"
    ).fetchall()
    assert len(shown) == 12
    for number, id, key in shown:
        assert number == pgqueue.shard_of(key, SHARDS) + 1 == (id - 1) % 1024 + 1
    assert (
        one(routed.db, "select sum(ready) from pgqueue.queues where queue = 'q'") == 12
    )
    views = column(
        routed.shards[0],
        "select relname from pg_class where relnamespace = 'pgqueue'::regnamespace and relkind = 'v' and relname !~ '^_'",
    )
    for view in views:
        routed.db.execute(f"select * from pgqueue.{view}")
    text = one(routed.db, "select pgqueue.metrics()")
    families: list[str] = []
    for line in filter(None, text.splitlines()):
        family = line.split()[2] if line.startswith("#") else line.partition("{")[0]
        if not families or families[-1] != family:
            families.append(family)
    assert len(families) == len(set(families))
    assert all(
        '{shard="' in line for line in text.splitlines() if line and line[0] != "#"
    )


@pytest.mark.parametrize("claim", ["claim('q', 'w')", "claim_from(array['q'], 'w')"])
def test_a_claim_after_a_failover_of_a_shard_skips_tokens(routed, role, claim):
    """Also in a session of the router that was open before, and as a worker; once, and before the token is taken."""
    db = routed.db
    for shard in routed.shards:
        shard.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
    with connected_as(role, routed) as conn:
        lease = f"select id, token from pgqueue.{claim}"
        for _ in range(2):
            one(db, "select pgqueue.enqueue('q', group_key => 'a')")
        (before,) = conn.execute(lease).fetchall()
        shard = routed.shards[home(before[0]) - 1]
        # As on the standby that the list of the shards now leads to.
        shard.execute("select setval('pgqueue._cell_timeline', 7)")
        (after,) = conn.execute(lease).fetchall()
        assert after[1] - before[1] > 1_000_000 * 1024
        one(db, "select pgqueue.enqueue('q', group_key => 'a')")
        (last,) = conn.execute(lease).fetchall()
        assert last[1] - after[1] == 1024


@pytest.mark.parametrize("of_shards", [False, True], ids=["of router", "of shards"])
@pytest.mark.parametrize(
    "style",
    [
        {"datestyle": "SQL, DMY", "intervalstyle": "sql_standard"},
        {"datestyle": "SQL, MDY", "timezone": "Asia/Kolkata"},
        {"datestyle": "Postgres, DMY", "timezone": "Asia/Shanghai"},
        {"datestyle": "German", "intervalstyle": "iso_8601"},
    ],
    ids=lambda style: style["datestyle"],
)
def test_times_are_the_same_in_any_style(routed, style, of_shards):
    """PL/Proxy passes them as text."""
    changed = routed.shards if of_shards else [routed.db]
    for name in [conn.info.dbname for conn in changed]:
        for setting, value in style.items():
            routed.db.execute(f"alter database {name} set {setting} = '{value}'")
    at = "2027-02-01 10:00:00.123456+00"
    lease = "-1 days +27:00:00.5"
    epoch = "select array_agg(distinct extract(epoch from {})::numeric) from {}".format
    with psycopg.connect(dbname=routed.db.info.dbname, autocommit=True) as db:
        if not of_shards:
            assert one(db, "show datestyle") != one(routed.db, "show datestyle")
        moment = one(db, "select extract(epoch from %s::timestamptz)", at)
        id = one(db, "select pgqueue.enqueue('q', run_at => %s, group_key => 'a')", at)
        there = routed.shards[home(id) - 1]
        assert one(there, epoch("run_at", "pgqueue.job")) == [moment]
        for where in f"pgqueue.status({id})", "pgqueue.jobs":
            assert one(db, epoch("run_at", where)) == [moment]
        slot = "timestamptz '2027-02-01 11:00+00'"
        slots = f"pgqueue.next_slots('@hourly', after => '{at}', slots => 1) as slot"
        assert one(db, f"select slot = {slot} from {slots}") is True
        rest = one(db, "select extract(epoch from pgqueue.rest(array['q']))")
        assert 0 < rest <= 5
        one(db, "select pgqueue.run_now(%s)", id)
        claim = "select lease_expires_at - claimed_at = %s, (terms).expires_at is null from pgqueue.claim('q', 'w', lease => %s)"
        assert db.execute(claim, (lease, lease)).fetchall() == [(True, True)]
        left = "select lease_left between '2 hours' and '3 hours 1 second' from pgqueue.running"
        assert one(db, left) is True


def test_one_shard_that_is_down_leaves_the_others_to_work_with(routed):
    db = routed.db
    for key in KEYS[:20]:
        db.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
    up = [key for key in KEYS if pgqueue.shard_of(key, SHARDS) != 1]
    down = next(key for key in KEYS[:20] if pgqueue.shard_of(key, SHARDS) == 1)
    lost = one(routed.shards[1], COUNT)
    routed.lose(2)
    assert column(db, "select is_up from pgqueue.shards() order by shard") == [
        True,
        False,
        True,
    ]
    found = db.execute(
        "select shard, status, detail from pgqueue.health() order by shard"
    ).fetchall()
    assert {number for number, *_ in found} == {1, 2, 3}
    assert [(s, d[:25]) for n, s, d in found if n == 2] == [
        ("critical", "shard 2 does not answer: ")
    ]
    assert one(db, "select count(*) from pgqueue.jobs") == 20 - lost
    db.execute("select pgqueue.enqueue('q', group_key => %s)", (up[0],))
    with pytest.raises(errors.InternalError_):  # its group is there and nowhere else
        db.execute("select pgqueue.enqueue('q', group_key => %s)", (down,))
    assert len(column(db, "select id from pgqueue.claim('q', 'w', 100)")) > 0
    with pytest.raises(
        errors.ConnectionFailure, match="not done on shards that are down: 2"
    ):
        db.execute("select pgqueue.pause('q')")
    paused = "select count(*) from pgqueue.queue where name = 'q' and paused"
    assert one(routed.shards[0], paused) == one(routed.shards[2], paused) == 1
    routed.bring_back(2)
    db.execute("select pgqueue.pause('q')")
    assert one(routed.shards[1], paused) == 1
    assert one(db, "select count(*) from pgqueue.jobs") == 21
    db.execute("select pgqueue.enqueue('q', group_key => %s)", (down,))


def test_an_event_that_a_shard_did_not_hear_of_is_not_taken_for_told(routed):
    db = routed.db
    routed.lose(2)
    with pytest.raises(errors.ConnectionFailure, match="that are down: 2"):
        db.execute("select pgqueue.emit('paid')")
    heard = "select count(*) from pgqueue.event"
    assert routed.where(heard) == [1, 3]
    routed.bring_back(2)
    assert one(db, "select pgqueue.emit('paid')") is True
    assert routed.where(heard) == [1, 2, 3]
    assert one(db, "select pgqueue.emit('paid')") is False


def test_leases_of_shards_that_are_up_are_extended_and_ended_beside_one_that_is_down(
    routed,
):
    db = routed.db
    for key in KEYS[:20]:
        db.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
    held: dict[int, tuple[int, int]] = {}
    while len(held) < 3:
        (lease,) = db.execute("select id, token from pgqueue.claim('q', 'w')")
        held[home(lease[0])] = lease
    ids, tokens = zip(*(held[number] for number in (1, 2, 3)), strict=True)
    params = (list(ids), list(tokens))
    routed.lose(2)
    assert column(db, "select shard from pgqueue.shards() where is_up") == [1, 3]
    with pytest.raises(errors.InternalError_):
        db.execute("select pgqueue.extend(%s, %s, '1 hour')", params)
    long = f"{COUNT} where lease_expires_at > clock_timestamp() + interval '50 minutes'"
    assert routed.where(long) == [1, 3]
    with pytest.raises(errors.InternalError_):
        db.execute("select pgqueue.complete_many(%s, %s)", params)
    assert routed.where(f"{COUNT} where id = any (%s)", params[0]) == [2]
    routed.bring_back(2)
    assert column(db, "select pgqueue.complete_many(%s, %s)", *params) == [ids[1]]


def test_a_shard_that_is_read_only_counts_as_down_and_is_still_shown(routed):
    """As during a failover, or where a provider makes it read-only because its disk is full."""
    db = routed.db
    for key in KEYS[:20]:
        db.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
    held = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchall()
    while home(held[0][0]) == 2:
        held = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchall()
    routed.lose(2, "set default_transaction_read_only = on")
    there = "select shard, problem from pgqueue.shards() where not is_up"
    assert db.execute(there).fetchall() == [(2, "is read-only")]
    found = db.execute("select shard, h.check from pgqueue.health() as h").fetchall()
    assert {(2, "shard"), (2, "writes")} <= set(found)
    assert one(db, "select count(*) from pgqueue.jobs") == 20
    assert set(column(db, "select shard from pgqueue.queues")) == {1, 2, 3}
    assert '{shard="2"' in one(db, "select pgqueue.metrics()")

    for _ in range(10):
        assert home(one(db, "select pgqueue.enqueue('q')")) != 2
        db.execute("select pgqueue.claim('nothing here', 'w')")
    (id, token) = held[0]
    extend = "select status from pgqueue.extend(%s, %s)"
    lost = [id, id + 1024], [token, token + 1024]
    assert column(db, extend, *lost) == ["held", "lost"]
    with pytest.raises(errors.DatabaseError) as gone:
        db.execute("select pgqueue.complete(%s, %s)", (id, token + 1024))
    assert gone.value.sqlstate == "PQ002"
    with pytest.raises(errors.ReadOnlySqlTransaction):
        db.execute("select pgqueue.cancel(id) from pgqueue.jobs where shard = 2")
    with pytest.raises(errors.ConnectionFailure, match="that are down: 2"):
        db.execute("select pgqueue.pause('q')")
    paused = "select count(*) from pgqueue.queue where name = 'q' and paused"
    assert routed.where(paused) == [1, 3]
    assert one(db, "select count(*) from pgqueue.maintain()") > 0


def test_a_call_is_a_transaction_on_its_shard_and_two_calls_are_two(routed):
    with routed.db.transaction(force_rollback=True):
        id = one(routed.db, "select pgqueue.enqueue('q', group_key => 'a')")
    assert routed.where("select count(*) from pgqueue.job where id = %s", id) == [
        (id - 1) % 1024 + 1
    ]
    many = "select * from pgqueue.enqueue_many('q', %s::jsonb[], unique_keys => %s, on_duplicate => 'error')"
    keys = sorted(KEYS[:12], key=lambda key: pgqueue.shard_of(key, SHARDS))
    routed.db.execute("select pgqueue.enqueue('q', unique_key => %s)", (keys[-1],))
    before = [one(shard, COUNT) for shard in routed.shards]
    with pytest.raises(errors.UniqueViolation):
        routed.db.execute(many, (["1"] * 12, keys))
    after = [one(shard, COUNT) for shard in routed.shards]
    assert after[2] == before[2]  # all or nothing on each shard
    assert after[0] > before[0]  # and those before it have been done
    # With your own writes, enqueue on the shard.
    shard = routed.shards[pgqueue.shard_of("a", SHARDS)]
    with shard.transaction(force_rollback=True):
        mine = one(shard, "select pgqueue.enqueue('q', group_key => 'a')")
    assert routed.where("select count(*) from pgqueue.job where id = %s", mine) == []


@pytest.mark.parametrize("is_pooled", [False, True], ids=["router", "pooled router"])
def test_many_sessions_share_few_of_a_shard_behind_poolers(
    routed,
    pooler,  # noqa: F811
    is_pooled,
):
    names = [shard.info.dbname for shard in routed.shards]
    pool = pooler[: pooler.rindex("dbname=")]
    places = [f"set p{n} '{pool}dbname={name}'" for n, name in enumerate(names)]
    routed.db.execute(f"alter server pgqueue options ({', '.join(places)})")
    router = f"{pool if is_pooled else ''}dbname={routed.db.info.dbname}"
    enqueue = "select pgqueue.enqueue('q', group_key => %s)"
    with contextlib.ExitStack() as stack:
        open_ones = [
            stack.enter_context(
                psycopg.connect(router, autocommit=True, prepare_threshold=None)
            )
            for _ in range(12)
        ]
        ids = {one(conn, enqueue, key) for conn in open_ones for key in KEYS[:6]}
        assert {id for shard in routed.shards for id in column(shard, IDS)} == ids
        many = (
            "select count(*) from pg_stat_activity where datname = any (%s)"
            " and application_name <> 'kept'"
        )
        # The pooler of the tests has four a database.
        assert one(routed.db, many, names) <= 4 * SHARDS
        if is_pooled:
            assert one(routed.db, many, [routed.db.info.dbname]) <= 4 + 1
        claimed = open_ones[0].execute("select id, token from pgqueue.claim('q', 'w')")
        assert all(
            one(open_ones[1], "select pgqueue.complete(%s, %s) is not null", *lease)
            for lease in claimed.fetchall()
        )


@pytest.mark.parametrize("args", [["dead"], ["error", "1"]])
def test_a_command_that_reads_a_table_says_that_it_needs_a_shard(routed, args):
    done = forked.run(
        [sys.executable, "-m", "pgqueue", *args],
        env={**os.environ, "PGQUEUE_DSN": f"dbname={routed.db.info.dbname}", "PYTHONPATH": forked.PATH},
    )  # fmt: skip
    assert done.returncode == 3
    assert "is a router, ask a shard: " in done.stderr
    assert "install" not in done.stderr


def test_every_public_function_is_in_the_router_or_said_not_to_be(routed, db):
    functions = "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace and proname !~ '^_'"
    here, there = set(column(routed.db, functions)), set(column(db, functions))
    assert here - there == {"shards"}
    assert there - here == {"enqueue_row", "shard", "work"}
    arguments = "select proname, pg_get_function_arguments(oid) from pg_proc where pronamespace = 'pgqueue'::regnamespace and proname !~ '^_'"
    ours = dict(routed.db.execute(arguments).fetchall())
    assert {n: a for n, a in db.execute(arguments) if n in ours and ours[n] != a} == {}


def test_nobody_may_use_the_router_until_granted(routed, role):
    routed.db.execute(f"set role {role}")
    with pytest.raises(errors.InsufficientPrivilege):
        routed.db.execute("select pgqueue.enqueue('q')")


def test_the_page_makes_a_router_from_what_make_writes(template, tmp_path):
    """With the shards of the page, which here have other names."""
    (block,) = documents.blocks(documents.text("docs/shards.md"), "router")
    subprocess.run(["make", "-s", "router"], cwd=REPO, check=True)
    with database(template) as first, database(template) as second:
        name = "pgqueue_router_of_page"
        with psycopg.connect(dbname="postgres", autocommit=True) as admin:
            if not one(
                admin,
                "select count(*) from pg_available_extensions where name = 'plproxy'",
            ):
                pytest.skip("PL/Proxy is not installed (Debian: postgresql-NN-plproxy)")
            where = f"host={admin.info.host} port={admin.info.port}"
            admin.execute(f"drop database if exists {name} with (force)")
            admin.execute(f"create database {name}")
        text = block.text.replace("dbname=first", f"{first} {where}")
        text = text.replace("dbname=second", f"{second} {where}")
        ran = subprocess.run(
            ["psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", name],
            input=text, cwd=REPO, capture_output=True, text=True,
        )  # fmt: skip
        assert (ran.stdout, ran.stderr) == ("1|t\n2|t\n", "")
        with psycopg.connect(dbname="postgres", autocommit=True) as admin:
            admin.execute(f"drop database {name} with (force)")


def test_the_page_says_where_each_function_goes(routed):
    rows = documents.table(documents.text("docs/shards.md"), "call", "goes to")
    named = {name for call, _ in rows for name in documents.quoted(call)}
    functions = "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace and proname !~ '^_'"
    assert named <= set(column(routed.shards[0], functions))
    assert {"enqueue", "health", "schedule", "claim", "pause", "redrive"} <= named


def test_arrays_that_do_not_begin_at_1_are_not_mixed_up(routed):
    """Nor those of two dimensions, which a shard refuses."""
    db = routed.db
    key = "'[2:3]={1,2}'::jsonb[], group_keys => '[0:1]={a,b}'::text[]"
    db.execute(f"select pgqueue.enqueue_many('q', {key})")
    kept = "select payload, group_key from pgqueue.job"
    found = [row for shard in routed.shards for row in shard.execute(kept)]
    assert sorted(found) == [(1, "a"), (2, "b")]
    with pytest.raises(errors.InvalidParameterValue, match="one dimension"):
        db.execute(
            "select pgqueue.enqueue_many('q', array[['1', '2'], ['3', '4']]::jsonb[])"
        )
    assert sum(one(shard, COUNT) for shard in routed.shards) == 2
    leases = [
        row
        for shard in routed.shards
        for row in shard.execute("select id, token from pgqueue.claim('q', 'w', 9)")
    ]
    ids, tokens = (
        f"[5:6]={{{','.join(map(str, each))}}}" for each in zip(*leases, strict=True)
    )
    done = "select * from pgqueue.complete_many(%s, %s, '[0:1]={1,2}'::jsonb[])"
    assert set(column(db, done, ids, tokens)) == {id for id, _ in leases}
    for (id, _), result in zip(leases, (1, 2), strict=True):
        assert one(db, "select pgqueue.result(%s)", id) == result


@pytest.mark.parametrize(
    "call",
    [
        "extend('{1,2}', '{1}')",
        "extend(null, '{1}')",
        "finish('{1}', '{1,2}', '{complete}')",
        "finish('{1,2}', '{1,2}', '{complete}')",
        "release('{1,2,3}', '{1,2}')",
        "complete_many('{1,2}', '{1,2}', array['1']::jsonb[])",
        "enqueue_many('q', array['1', '2']::jsonb[], unique_keys => array['a'])",
        "enqueue_many('q', null)",
    ],
)
def test_what_a_shard_refuses_the_router_does_not_make_fit(routed, call):
    with pytest.raises(errors.InvalidParameterValue):
        routed.shards[0].execute(f"select pgqueue.{call}")
    with pytest.raises(errors.InvalidParameterValue):
        routed.db.execute(f"select pgqueue.{call}")


def test_leases_of_many_jobs_are_found_where_they_are_held_and_come_in_order(routed):
    """By their tokens: jobs may have moved before, and old ones are of a time before the shards."""
    db = routed.db
    for shard in routed.shards:
        shard.execute("select pgqueue.enqueue('q') from generate_series(1, 4)")
    # The third shard has got one of the first instead of one of its own; and a lease is older than the shards.
    routed.shards[2].execute(
        "with own as (delete from pgqueue.job where id = 3 returning *)"
        " insert into pgqueue.job overriding system value"
        " select (jsonb_populate_record(null::pgqueue.job, to_jsonb(own) || '{\"id\": 10241}')).* from own"
    )
    claim = "select id, token from pgqueue.claim('q', 'w', 9)"
    leases = [row for shard in routed.shards for row in shard.execute(claim)]
    old = leases[-1]
    routed.shards[2].execute(
        "update pgqueue.job set token = 2 where id = %s", (old[0],)
    )
    leases[-1] = (old[0], 2)
    assert len(leases) == 12
    leases = [leases[place * 5 % 12] for place in range(12)]
    leases.insert(3, (leases[5][0], 7))  # lost
    ids, tokens = (list(each) for each in zip(*leases, strict=True))
    expected = [(id, "lost" if token == 7 else "held") for id, token in leases]
    assert db.execute("select * from pgqueue.extend(%s, %s)", (ids, tokens)).fetchall() == expected  # fmt: skip
    back = column(db, "select * from pgqueue.release(%s, %s)", ids[:3], tokens[:3])
    assert sorted(back) == sorted(ids[:3])
    kinds = ["complete", "release"] * 5
    ended = db.execute(
        "select * from pgqueue.finish(%s, %s, %s)", (ids[3:], tokens[3:], kinds)
    ).fetchall()
    said = {"complete": "completed", "release": "released"}
    assert ended == [
        (id, "lost" if token == 7 else said[kind])
        for (id, token), kind in zip(leases[3:], kinds, strict=True)
    ]


def test_a_shard_that_hangs_holds_up_what_needs_it_until_the_list_names_another():
    """One that neither answers nor refuses, as no server that is down does for long."""
    with Cluster(fast=True) as fine, Cluster(fast=True) as hung, Cluster(fast=True) as router:  # fmt: skip
        if not scale_demo.has_router(router):
            pytest.skip(scale_demo.WITHOUT)
        scale_demo.set_up([fine, hung], router)
        here, there = (
            next(key for key in KEYS if pgqueue.shard_of(key, 2) == place)
            for place in (0, 1)
        )
        enqueue = "select pgqueue.enqueue('q', group_key => %s)"
        dsn = scale_demo.dsn(router)
        with (
            psycopg.connect(dsn, autocommit=True) as db,
            psycopg.connect(dsn, autocommit=True) as held_up,
        ):
            one(held_up, enqueue, there)
            with frozen(hung):
                waiting = threading.Thread(
                    target=held_up.execute, args=(enqueue, (there,))
                )
                waiting.start()
                since = time.monotonic()
                for _ in range(20):
                    one(db, enqueue, here)
                assert time.monotonic() - since < 5
                assert waiting.is_alive()
                option = one(
                    db,
                    "select o from pg_foreign_server, unnest(srvoptions) as o where o ~ '^p1='",
                )
                db.execute("alter server pgqueue options (set p1 'host=/nowhere')")
                assert column(db, "select is_up from pgqueue.shards()") == [True, False]
                one(db, "select pgqueue.enqueue('q')")
                assert one(db, "select count(*) from pgqueue.jobs") == 21
            waiting.join(30)
            place = option.removeprefix("p1=")
            db.execute(f"alter server pgqueue options (set p1 '{place}')")
            assert one(db, "select count(*) from pgqueue.jobs") == 23


def test_a_role_may_do_through_the_router_what_it_may_on_the_shards(routed, role):
    """As the page has it: the shards decide, by the role with which the router connects."""
    db = routed.db

    def allowed(call: str) -> bool:
        try:
            conn.execute(f"select {call}")
        except errors.InsufficientPrivilege:
            return False
        except psycopg.DatabaseError as error:
            assert error.sqlstate in ("PQ001", "PQ002"), error
        return True

    calls = {
        "producer": ["pgqueue.enqueue('q', group_key => 'a')", "pgqueue.emit('e')"],
        "worker": ["pgqueue.claim('q', 'w')", "pgqueue.extend('{1}', '{1}')"],
        "scheduler": ["pgqueue.schedule('s', 'q', '@daily')"],
        "operator": ["pgqueue.pause('r')", "pgqueue.cancel(1)", "pgqueue.redrive('r')"],
        "reader": ["count(*) from pgqueue.queues", "pgqueue.metrics()"],
    }
    both = {
        ("operator", "scheduler"),
        ("operator", "reader"),
        ("worker", "producer"),
        ("operator", "producer"),
    }
    with connected_as(role, routed) as conn:
        for kind in calls:
            db.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
            for other, of_other in calls.items():
                first, *more = (allowed(call) for call in of_other)
                if kind == other:
                    assert all([first, *more]), (kind, other)
                elif (kind, other) not in both:
                    assert not any([first, *more]), (kind, other)
            db.execute("select pgqueue.revoke_access(%s, %s)", (role, kind))
        assert not allowed(calls["producer"][0])


@pytest.mark.parametrize(
    "made",
    [
        "function pgqueue.tomorrow(id bigint) returns int language sql as 'select 1'",
        "view pgqueue.tomorrow as select 1 as n; comment on view pgqueue.tomorrow is 'Soon.'",
    ],
)
def test_what_is_added_tomorrow_is_in_the_router_or_stops_its_build(db, made):
    db.execute(f"create {made}")
    built = subprocess.run(
        [sys.executable, REPO / "packaging/router.py"],
        env={**os.environ, "PGDATABASE": db.info.dbname},
        capture_output=True, text=True,
    )  # fmt: skip
    if made.startswith("view"):
        assert "create view pgqueue.tomorrow as\nselect u.place + 1 as shard, v.n" in built.stdout  # fmt: skip
    else:
        assert built.returncode == 1
        assert "['tomorrow']" in built.stderr


@pytest.mark.parametrize("how", ["cancelled", "timed out", "shard's session killed"])
def test_a_call_that_is_cut_off_is_undone_on_its_shard(routed, how):
    """And the session of the router goes on."""
    db, key = routed.db, KEYS[0]
    place = pgqueue.shard_of(key, SHARDS)
    shard = routed.shards[place]
    enqueue = "select pgqueue.enqueue('q', unique_key => %s)"
    raised: list[psycopg.Error] = []

    def call() -> None:
        try:
            db.execute(enqueue, (key,))
        except psycopg.Error as error:
            raised.append(error)

    waits = "select pid from pg_stat_activity where datname = %s and wait_event_type = 'Lock'"
    one(db, enqueue, KEYS[1])
    with shard.transaction(force_rollback=True):
        one(shard, enqueue, key)
        if how == "timed out":
            db.execute("set statement_timeout = '1s'")
        calling = threading.Thread(target=call)
        calling.start()
        with psycopg.connect(dbname="postgres", autocommit=True) as admin:
            pid = wait_until(
                lambda: [row[0] for row in admin.execute(waits, (shard.info.dbname,))]
            )[0]
            if how == "cancelled":
                admin.execute("select pg_cancel_backend(%s)", (db.info.backend_pid,))
            elif how == "shard's session killed":
                admin.execute("select pg_terminate_backend(%s)", (pid,))
            calling.join(10)
            assert not calling.is_alive()
            assert admin.execute(waits, (shard.info.dbname,)).fetchall() == []
    db.execute("reset statement_timeout")
    assert [error.sqlstate for error in raised] in (["57014"], ["57P01"])
    assert one(shard, f"{COUNT} where unique_key = %s", key) == 0
    assert routed.where(COUNT + " where id = %s", one(db, enqueue, key)) == [place + 1]
