"""From n shards to 2n, while producers and workers are busy: nothing is lost, and nothing runs twice."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import forked
import pgqueue
import psycopg
import pytest
from conftest import LONG, column, database, one
from pgqueue.move import LOCK, move_groups
from test_worker_databases import command, counts, named, sessions, wait_for_counts
from worker_harness import wait_until, workers_on

pytest_plugins = ["worker_harness"]

COUNT = "select count(*) from pgqueue.job"
MOVERS = f"select count(*) from pg_locks where locktype = 'advisory' and objid = {LOCK}"
JOBS = 50_000 if LONG else 1_000
KEYS = 800 if LONG else 400


@pytest.fixture
def two(template: str) -> Iterator[list[str]]:
    """The database that there is, and a new one."""
    with database(template) as first, database(template) as second:
        yield [first, second]


def grow(first: str, second: str, above: int) -> None:
    """As docs/shards.md has it."""
    for number, dsn in enumerate((first, second), 1):
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select pgqueue.shard(%s, above => %s)", (number, above))
            if dsn == second:
                conn.execute("select pgqueue.pause()")


def move(dsns: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    return command("pgqueue", *named(dsns), "move-groups", *args)


def place(key: str) -> int:
    return pgqueue.shard_of(key, 2)


MOVING = [k for k in (f"key {n}" for n in range(99)) if place(k)]  # to the second


def test_all_that_belongs_to_a_key_moves_as_it_is(two):
    keys = [f"key {n}" for n in range(40)]
    with psycopg.connect(two[0], autocommit=True) as old:
        old.execute(
            "select pgqueue.enqueue('q', jsonb_build_object('n', n), group_key => k, priority => n,"
            " headers => '{\"h\": 1}') from unnest(%s::text[]) as k, generate_series(1, 3) as n",
            (keys,),
        )
        old.execute(
            "select pgqueue.enqueue('u', unique_key => k) from unnest(%s::text[]) as k",
            (keys,),
        )
        old.execute("select pgqueue.enqueue('any')")
        # The null of JSON is not that of SQL.
        old.execute(
            "select pgqueue.enqueue('n', 'null', group_key => k),"
            " pgqueue.enqueue('n', 'null', unique_key => k) from unnest(%s::text[]) as k",
            (keys,),
        )
        old.execute(
            "select pgqueue.schedule(k, 'q', '@daily') from unnest(%s::text[]) as k",
            (keys[:9],),
        )
        old.execute("update pgqueue.schedule set payload = 'null' where name < 'key 5'")
        old.execute(
            "select pgqueue.enqueue('dead', 'null', group_key => k) from unnest(%s::text[]) as k",
            (keys,),
        )
        old.execute(
            "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('dead', 'w', 99)"
        )
        rows = "select to_jsonb(j) from pgqueue.job as j order by id"
        before = column(old, rows)
        grow(*two, above=1_000_000)
        done = move(two, "--resume")
        assert (done.returncode, done.stderr) == (0, "")
        with psycopg.connect(two[1], autocommit=True) as new:
            after = [column(old, rows), column(new, rows)]
            assert sorted(after[0] + after[1], key=lambda job: job["id"]) == before
            for number, jobs in enumerate(after):
                found = {job["group_key"] or job["unique_key"] for job in jobs} - {None}
                assert found == {key for key in keys if place(key) == number}
            for query in (
                "select group_key from pgqueue.dead_job",
                "select name from pgqueue.schedule",
            ):
                assert {place(key) for key in column(old, query)} == {0}
                assert {place(key) for key in column(new, query)} == {1}
            assert column(new, "select id from pgqueue.claim('q', 'w', 99)")
            assert (
                one(new, "select pgqueue.enqueue('q')") == 1_000_450
            )  # the first above that is 2 modulo 1024
        assert one(old, "select pgqueue.enqueue('q')") > 1_000_000
        assert move(two).stdout == "moved 0 jobs and schedules\n"


def test_a_group_that_runs_moves_when_it_is_done_and_one_that_is_tied_stays(two):
    key, tied = (
        next(k for k in (f"{w} {n}" for n in range(99)) if place(k))
        for w in ("busy", "tied")
    )
    with (
        psycopg.connect(two[0], autocommit=True) as old,
        psycopg.connect(two[1]) as new,
    ):
        old.execute(
            "select pgqueue.enqueue('q', group_key => %s) from generate_series(1, 3)",
            (key,),
        )
        held = old.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()
        grow(*two, above=1000)
        refused = move(two, "--wait", "0.1")
        assert refused.returncode == 1
        assert "1 are busy, and 0 wait" in refused.stderr
        # It was given no job meanwhile, and now is again.
        assert one(old, "select count(*) from pgqueue.queue") == 0
        moving = threading.Thread(target=move, args=(two, "--wait", "20"))
        moving.start()
        wait_until(lambda: one(old, "select count(*) from pgqueue.queue where paused"))
        assert column(old, "select pgqueue.claim('q', 'w', 9)") == []
        old.execute("select pgqueue.complete(%s, %s)", held)
        moving.join()
        assert one(old, COUNT) == 0
        assert one(new, COUNT) == 2
        old.execute(
            "select pgqueue.enqueue('q', group_key => %s, after => array[pgqueue.enqueue('other')])",
            (tied,),
        )
        refused = move(two, "--wait", "0")
        assert refused.returncode == 1
        assert "0 are busy, and 1 wait" in refused.stderr


def test_a_retry_that_keeps_its_place_runs_and_then_its_group_moves(two):
    key = next(k for k in (f"kept {n}" for n in range(99)) if place(k))
    with sessions(two) as (old, new):
        old.execute(
            "select pgqueue.configure('q', group_limit => 1, group_on_retry => 'block')"
        )
        old.execute(
            "select pgqueue.enqueue('q', group_key => %s) from generate_series(1, 3)",
            (key,),
        )
        claim = "select id, token from pgqueue.claim('q', 'w')"
        held = old.execute(claim).fetchone()
        grow(*two, above=1000)
        moving = threading.Thread(target=move, args=(two, "--wait", "20"))
        moving.start()
        wait_until(lambda: one(old, "select count(*) from pgqueue.queue where paused"))
        old.execute("select pgqueue.fail(%s, %s, 'e', retry_in => '0')", held)
        again = wait_until(lambda: old.execute(claim).fetchone())
        old.execute("select pgqueue.complete(%s, %s)", again)
        moving.join()
        assert (one(old, COUNT), one(new, COUNT)) == (0, 2)


@pytest.mark.parametrize("after", ["expect", "departed", "arrive"])
def test_what_is_cut_off_between_two_transactions_is_finished_by_the_next_call(
    two, after
):
    """The three of a part: written down there, gone from here, arrived."""
    key = MOVING[0]
    with sessions(two) as (old, new):
        grow(*two, above=1000)
        id = one(old, "select pgqueue.enqueue('q', group_key => %s)", key)
        parts = one(
            old, "select d.parts from pgqueue._depart('group', 'q', %s) as d", key
        )
        new.execute("select pgqueue._expect(%s)", (psycopg.types.json.Jsonb(parts),))
        given = [part["what"] for part in parts], [part["key"] for part in parts]
        if after == "expect":  # and the old shard runs the job after all
            with pytest.raises(psycopg.errors.DivisionByZero), old.transaction():
                old.execute("select pgqueue._departed(%s, %s)", given)
                old.execute("select 1 / 0")
            old.execute(
                "select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')"
            )
        else:
            old.execute("select pgqueue._departed(%s, %s)", given)
        if after == "arrive":
            new.execute("select pgqueue._arrive(array['job'], array[%s])", (str(id),))
        for conn in old, new:
            conn.execute("insert into pgqueue.moving (what, key) values ('shards', 2)")
        # With one alone, what is on its way would seem to have arrived, or not to have left.
        for dsn in two:
            refused = move([dsn])
            assert refused.returncode == 1
            assert "among 2 shards was cut off: name these" in refused.stderr
        assert move(two).returncode == 0
        assert (one(old, COUNT), one(new, COUNT)) == (0, 0 if after == "expect" else 1)
        assert move(two).returncode == 0
        for conn in old, new:
            assert one(conn, "select count(*) from pgqueue.moving") == 0
        new.execute("select pgqueue.resume()")
        ran = column(new, "select id from pgqueue.claim('q', 'w', 9)")
        assert ran == ([] if after == "expect" else [id])


def test_there_is_one_at_a_time(two):
    grow(*two, above=1000)
    with psycopg.connect(two[1], autocommit=True) as other:
        other.execute("select pg_advisory_lock(7366517)")
        refused = move(two, "--wait", "0.5")
        waits = workers_command(two)
        with psycopg.connect(two[0], autocommit=True) as first:
            held = "select count(*) from pg_locks where objid = 7366517 and granted"
            wait_until(lambda: one(first, held) == 2)
    assert refused.returncode == 1
    assert "another move-groups is running" in refused.stderr
    assert waits.wait(30) == 0


class Shop(threading.Thread):
    """Enqueues for random keys, wherever its list of shards says; notes what it was told."""

    def __init__(self, dsns: list[str]) -> None:
        super().__init__()
        self.dsns = dsns
        self.acknowledged: list[int] = []
        self.is_over = False

    def run(self) -> None:
        rng = random.Random(3)
        with contextlib.ExitStack() as stack:
            conns: dict[str, psycopg.Connection] = {}
            while not self.is_over:
                key = f"key {rng.randrange(KEYS)}"
                dsn = self.dsns[pgqueue.shard_of(key, len(self.dsns))]
                if dsn not in conns:
                    conns[dsn] = stack.enter_context(
                        psycopg.connect(dsn, autocommit=True)
                    )
                add = (
                    "select pgqueue.enqueue('work', kind => 'effect', group_key => %s)"
                )
                self.acknowledged.append(one(conns[dsn], add, key))
                time.sleep(0.002)


def test_jobs_move_under_load_and_kills_and_run_once(two):
    with (
        psycopg.connect(two[0], autocommit=True) as conn,
        psycopg.connect(two[1], autocommit=True) as new,
    ):
        for each in conn, new:
            each.execute("create table effect (job_id bigint)")
            each.execute("select pgqueue.configure('work', group_limit => 1)")
        conn.execute(
            "select count(*) from pgqueue.enqueue_many('work', array_fill('{}'::jsonb, array[%(n)s]), kind => 'effect',"
            " group_keys => array(select 'key ' || n %% %(k)s from generate_series(1, %(n)s) as n))",
            {"n": JOBS, "k": KEYS},
        )
    shop = Shop(two[:1])
    shop.start()
    try:
        with workers_on(two[0]) as workers:
            # Half of them are to move, however quick it is.
            most = "--max-jobs", str(JOBS // 2)
            workers.start(*named(two), "-c", "4", *most)
            wait_until(lambda: counts(two[:1], "select count(*) from effect")[0] > 200)
            grow(*two, above=10_000_000)
            shop.dsns = two
            for pause in (0.25, 0.3, 0.35, 0.45, 0.6):
                moving = workers_command(two)
                time.sleep(pause)
                moving.kill()
                moving.wait()
            assert move(two, "--wait", "120", "--resume").returncode == 0
            assert JOBS / 4 < sum(counts(two, COUNT))
            shop.is_over = True
            shop.join()
            workers.start(*named(two), "-c", "4")
            wait_for_counts(two, COUNT, [0, 0], 200)
        effects = [id for dsn in two for id in ids(dsn)]
        assert len(effects) == len(set(effects)) == JOBS + len(shop.acknowledged)
        assert set(shop.acknowledged) <= set(effects)
        assert min(counts(two, "select count(*) from effect")) > JOBS / 5
        assert counts(two, "select count(*) from pgqueue.dead_job") == [0, 0]
    finally:
        shop.is_over = True


def workers_command(dsns: list[str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "pgqueue", *named(dsns), "move-groups"]
    env = {**os.environ, "PYTHONPATH": forked.PATH}
    return forked.Popen(words, env=env, stdout=subprocess.DEVNULL)


def ids(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return column(conn, "select job_id from effect")


def test_what_has_been_done_or_read_moves_with_a_dead_job_or_stays_with_it(two):
    key, waited = (
        next(k for k in (f"{w} {n}" for n in range(99)) if place(k))
        for w in ("steps", "after")
    )
    with sessions(two) as (old, new):
        dead = one(old, "select pgqueue.enqueue('q', group_key => %s)", key)
        old.execute("create temp table c as select * from pgqueue.claim('q', 'w')")
        for step in (("s1", "7"), ("s2", "null")):
            old.execute("select pgqueue.save_step(id, token, %s, %s) from c", step)
        old.execute("select pgqueue.fail(id, token, 'e', permanent => true) from c")
        # One that has waited, and reads the results of those where they are.
        first = one(old, "select pgqueue.enqueue('first')")
        enqueue = "select pgqueue.enqueue('q', group_key => %s, after => array[%s])"
        later = one(old, enqueue, waited, first)
        old.execute(
            "select pgqueue.complete(id, token, '5') from pgqueue.claim('first', 'w')"
        )
        grow(*two, above=1000)
        assert move(two, "--wait", "0").returncode == 1
        assert column(old, "select id from pgqueue.job") == [later]
        assert column(new, "select id from pgqueue.dead_job") == [dead]
        assert one(old, "select count(*) from pgqueue.step") == 0
        done = [("s1", 7), ("s2", None)]
        steps = "select name, value from pgqueue.steps(%s)"
        assert new.execute(steps, (dead,)).fetchall() == done
        new.execute("select pgqueue.redrive_job(%s), pgqueue.resume()", (dead,))
        new.execute("select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')")
        assert one(new, "select count(*) from pgqueue.step") == 0


def test_a_dead_job_or_schedule_that_somebody_has_locked_is_not_left_behind(two):
    key = next(f"key {n}" for n in range(99) if place(f"key {n}") == 1)
    with (
        psycopg.connect(two[0], autocommit=True) as old,
        psycopg.connect(two[0]) as redriving,
        psycopg.connect(two[0]) as pausing,
    ):
        grow(*two, above=1000)
        enqueue = "select pgqueue.enqueue('q', group_key => %s)"
        dead = one(old, enqueue, key)
        old.execute(
            "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('q', 'w')"
        )
        waiting = one(old, enqueue, key)
        old.execute("select pgqueue.schedule(%s, 'q', '@daily')", (key,))
        redriving.execute("select pgqueue.redrive_job(%s)", (dead,))
        pausing.execute("select pgqueue.pause_schedule(%s)", (key,))
        first = move(two, "--resume", "--wait", "0.5")
        assert (first.returncode, first.stdout) == (1, "moved 0 jobs and schedules\n")
        redriving.commit()
        pausing.commit()
        second = move(two, "--resume")
        assert (second.returncode, second.stdout) == (0, "moved 3 jobs and schedules\n")
        assert one(old, COUNT) == 0
    with psycopg.connect(two[1], autocommit=True) as new:
        ids = column(new, "select id from pgqueue.job order by id")
        assert ids == [dead, waiting]
        assert column(new, "select is_paused from pgqueue.schedule") == [True]


def test_what_is_paused_stays_so_when_the_new_shards_begin(two):
    with sessions(two) as (old, new):
        for call in ("pause('q')", "resume('q', group_key => 'g')", "pause('r', 'k')"):
            old.execute(f"select pgqueue.{call}")
        paused = (
            "select name, kind, group_key, paused from pgqueue.queue order by 1, 2, 3"
        )
        before = old.execute(paused).fetchall()
        grow(*two, above=1000)
        assert move(two, "--resume").returncode == 0
        assert old.execute(paused).fetchall() == before
        assert new.execute(paused).fetchall() == before
        # None is paused as a whole: nothing is resumed.
        assert move(two, "--resume").returncode == 0
        assert new.execute(paused).fetchall() == before


def test_what_is_paused_on_one_of_two_shards_stays_so_on_the_one_that_it_moves_to(
    template,
):
    key = next(k for k in map(str, range(99)) if pgqueue.shard_of(k, 4) == 3)
    with contextlib.ExitStack() as stack:
        dsns = [stack.enter_context(database(template)) for _ in range(4)]
        conns = [
            stack.enter_context(psycopg.connect(dsn, autocommit=True)) for dsn in dsns
        ]
        for number, conn in enumerate(conns, 1):
            conn.execute("select pgqueue.shard(%s)", (number,))
            if number > 2:
                conn.execute("select pgqueue.pause()")
        conns[1].execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
        conns[1].execute("select pgqueue.pause('q', group_key => %s)", (key,))
        assert move(dsns, "--resume").returncode == 0
        why = column(conns[3], "select pgqueue.why(id) from pgqueue.job")
        assert why == ["its group is paused"]
        paused = "select count(*) from pgqueue.queue where paused"
        assert [one(conn, paused) for conn in conns] == [0, 1, 0, 1]


def test_databases_that_are_no_shards_or_in_another_order_keep_what_they_have(two):
    for dsn in two:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(
                "select pgqueue.enqueue('q', group_key => n::text) from generate_series(1, 9) as n"
            )
    refused = move(two)
    assert refused.returncode == 1
    assert "is named as shard 1, and it is none: name all" in refused.stderr
    grow(*two, above=1000)
    wrong = (two[::-1], "1, and it is shard 2"), (two[:1] * 2, "2, and it is shard 1")
    for dsns, said in wrong:
        refused = move(dsns, "--wait", "0")
        assert refused.returncode == 1
        assert f"is named as shard {said}: name all shards, in their order" in (
            refused.stderr
        )
    for dsn in two:
        with psycopg.connect(dsn) as conn:
            assert one(conn, COUNT) == 9
            assert one(conn, "select count(*) from pgqueue.moving") == 0


def test_who_may_not_call_it_and_where_something_is_missing_is_said(two):
    grow(*two, above=1000)
    with psycopg.connect(two[0], autocommit=True) as conn:
        conn.execute("create role moves_nothing login")
        conn.execute("select pgqueue.grant_access('moves_nothing', 'operator')")
        refused = move([f"{dsn} user=moves_nothing" for dsn in two[:1]])
        conn.execute("drop extension pgqueue")
        conn.execute("drop role moves_nothing")
    assert refused.returncode == 1
    assert "connects as the owner of pgqueue, on all shards" in refused.stderr
    missing = move(two)
    assert missing.returncode == 3
    assert "install or update the extension in " in missing.stderr


def test_cut_off_before_any_statement_it_has_lost_and_doubled_nothing(two, monkeypatch):
    """Also what is paused, what is busy, dead jobs with steps, and schedules."""
    moving = [k for k in (f"key {n}" for n in range(999)) if place(k)]
    with sessions(two) as (old, new):
        grow(*two, above=1000)
        old.execute("select pgqueue.pause('q', group_key => %s)", (moving[0],))
        left = 0
        real = psycopg.Connection.execute

        def cut_off(conn: psycopg.Connection, *args, **more):
            nonlocal left
            if conn not in (old, new):
                left -= 1
                if left < 0:
                    raise ConnectionError("cut off")
            return real(conn, *args, **more)

        monkeypatch.setattr(psycopg.Connection, "execute", cut_off)
        there = "select id from pgqueue.job union all select id from pgqueue.dead_job"
        on_the_way = "select key::bigint from pgqueue.moving as m where what in ('job', 'dead_job')"
        for statements in range(200):
            keys = [moving[0], *moving[1 + 3 * statements :][:3]]
            for key in keys:
                old.execute(
                    "select pgqueue.enqueue('q', group_key => %(k)s),"
                    " pgqueue.enqueue('u', unique_key => %(k)s),"
                    " pgqueue.enqueue('dead', group_key => %(k)s),"
                    " pgqueue.schedule(%(k)s, 'q', '@daily')",
                    {"k": key},
                )
            old.execute(
                "create temp table c as select * from pgqueue.claim('dead', 'w', 9)"
            )
            old.execute("select pgqueue.save_step(id, token, 's') from c")
            old.execute(
                "select pgqueue.fail(id, token, 'e', permanent => true) from c; drop table c"
            )
            held = old.execute(
                "select id, token from pgqueue.claim('q', 'w')"
            ).fetchone()
            before = sorted(column(old, there) + column(new, there))
            # Here and below: the sessions of the one before it may be just ending.
            wait_until(lambda: not one(old, MOVERS))
            left = statements
            with contextlib.suppress(ConnectionError):
                move_groups(two, 0, False)
            is_over = left >= 0
            left = 10**9
            here, arrived = column(old, there), column(new, there)
            gone = column(old, f"{on_the_way} and content is null")
            written = column(new, f"{on_the_way} and content is not null")
            assert not set(here) & set(arrived)
            assert not set(here) & set(gone)
            assert sorted({*here, *arrived} | {*gone} & {*written}) == before
            old.execute("select pgqueue.complete(%s, %s)", held)
            wait_until(lambda: not one(old, MOVERS))
            assert move_groups(two, 0, False) == 0
            assert column(old, there) == []
            assert sorted(column(new, there)) == [id for id in before if id != held[0]]
            assert one(old, "select count(*) from pgqueue.moving") == 0
            assert one(new, "select count(*) from pgqueue.moving") == 0
            assert column(old, "select group_key from pgqueue.queue where paused") == [moving[0]]  # fmt: skip
            if is_over:
                break
        assert is_over
        assert statements > 20
        assert (
            one(new, "select count(*) from pgqueue.step")
            == 4 + 3 * statements + statements
        )


@pytest.mark.parametrize(
    "payload",
    [
        '{"amount": 12345678901234567890.123456789, "price": 1.10}',
        "7" * 5000,
        "[" * 1500 + "]" * 1500,
        '"\\u0007 \\"鍵\\""',
    ],
    ids=["decimals", "digits", "depth", "text"],
)
def test_payloads_arrive_as_they_were_even_if_python_could_not_read_them(two, payload):
    with sessions(two) as (old, new):
        grow(*two, above=1000)
        key = MOVING[0]
        enqueue = "select pgqueue.enqueue('q', %s::jsonb, group_key => %s)"
        old.execute(enqueue, (payload, key))
        there = "select payload::text from pgqueue.job"
        before = one(old, there)
        assert move(two).returncode == 0
        assert column(new, there) == [before]


def test_what_is_too_much_for_one_transaction_moves_in_several(two, monkeypatch):
    with sessions(two) as (old, new):
        grow(*two, above=1000)
        for key in MOVING:
            old.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
        # That of one job is longer than a third of this.
        monkeypatch.setattr("pgqueue.move.SIZE", 1000)
        assert move_groups(two, 0, False) == 0
        assert (one(old, COUNT), one(new, COUNT)) == (0, len(MOVING))
        transactions = "select count(distinct xmin::text) from pgqueue.job"
        assert len(MOVING) / 3 < one(new, transactions) <= len(MOVING)


def test_a_group_that_is_too_large_stays_and_all_others_move(two):
    """Postgres holds no 256 MB in one jsonb."""
    with sessions(two) as (old, new):
        grow(*two, above=1000)
        for key in MOVING:
            old.execute("select pgqueue.enqueue('q', group_key => %s)", (key,))
        old.execute(
            "select pgqueue.enqueue('q', jsonb_build_object('t', repeat('x', 27000000)), group_key => %s)"
            " from generate_series(1, 10)",
            (MOVING[3],),
        )
        moved = move(two, "--wait", "0", "--resume")
        assert moved.returncode == 1
        assert f"group '{MOVING[3]}' of queue 'q' is too large: " in moved.stderr
        assert "and 1 are too large; call it again" in moved.stderr
        assert column(old, "select distinct group_key from pgqueue.job") == [MOVING[3]]
        assert one(new, COUNT) == len(MOVING) - 1


def test_a_move_that_fails_leaves_no_group_paused(two, monkeypatch):
    """Here the same id is on both shards, as if both had been told a different above."""
    first, second = MOVING[:2]
    with sessions(two) as (old, new):
        for conn in old, new:
            conn.execute("select pgqueue.enqueue('busy', group_key => %s)", (first,))
            conn.execute("select pgqueue.enqueue('same', group_key => %s)", (second,))
        held = old.execute(
            "select id, token from pgqueue.claim('busy', 'w')"
        ).fetchone()
        grow(*two, above=1000)
        monkeypatch.setattr("pgqueue.move.CHUNK", 1)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="both"):
            move_groups(two, 0, False)
        assert (
            column(old, "select key from pgqueue.moving where what <> 'shards'") == []
        )
        old.execute("select pgqueue.complete(%s, %s)", held)
        assert column(old, "select paused from pgqueue.queue where paused") == []
        assert one(old, COUNT) == 1
        assert one(new, COUNT) == 2


def test_the_shards_must_agree_on_which_ids_they_hand_out(two):
    for number, dsn in enumerate(two, 1):
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(
                "select pgqueue.shard(%s, above => %s)", (number, number * 1000)
            )
    refused = move(two)
    assert refused.returncode == 1
    assert "of and above are (1024,2000), and (1024,1000) in the first" in (
        refused.stderr
    )


def test_behind_a_pooler_it_is_refused(two, pooler):
    """There its lock would be that of a session that others use as well."""
    grow(*two, above=1000)
    pool = pooler[: pooler.rindex("dbname=")]
    refused = move([f"{pool} {dsn}" for dsn in two])
    assert refused.returncode == 1
    assert "is behind a pooler: name the server itself" in refused.stderr
    with psycopg.connect(two[0]) as conn:
        assert one(conn, MOVERS) == 0


def test_an_old_shard_that_is_paused_stays_so(two):
    with sessions(two) as (old, new):
        grow(*two, above=1000)
        old.execute("select pgqueue.pause('broken')")
        old.execute("select pgqueue.pause()")
        moved = move(two, "--resume")
        assert moved.returncode == 0
        assert "shard 1 is paused, and stays so" in moved.stderr
        # The new one is not, except for what is paused on the old one, which is all.
        paused = "select name from pgqueue.queue where paused order by 1"
        assert column(old, paused) == column(new, paused)


def test_a_schedule_moves_to_the_shard_of_its_group(two):
    key = MOVING[0]
    name = next(k for k in (f"name {n}" for n in range(99)) if not place(k))
    with sessions(two) as (old, new):
        grow(*two, above=1000)
        old.execute(
            "select pgqueue.schedule(%s, 'q', '@daily', group_key => %s),"
            " pgqueue.schedule('own', 'q', '@daily', group_key => %s)",
            (name, key, name),
        )
        assert move(two).returncode == 0
        there = "select name, group_key from pgqueue.schedule"
        assert new.execute(there).fetchall() == [(name, key)]
        assert old.execute(there).fetchall() == [("own", name)]
