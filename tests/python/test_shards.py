"""Several databases, each a pgqueue: their numbers, and where a key belongs."""

import random
import shlex

import documents
import pgqueue
import psycopg
import pytest
from cluster import Cluster
from conftest import column, database, one
from pgqueue.worker.options import parse
from worker_harness import wait_until, where

PAGE = "docs/reference/shard.md"
GUIDE = "docs/shards.md"


def test_python_and_sql_say_the_same_of_any_key(db):
    rng = random.Random(5)
    letters = "abcz09 -_'\"\\äßЖ鍵🐘\t\n"
    keys = ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(3000)]
    keys += ["", "x" * 200_000, "\u0301e", "\uffff"]
    for shards in (1, 2, 3, 7, 8, 1000, 65536, 2**31 - 1):
        query = "select pgqueue.shard_of(k, %s) from unnest(%s::text[]) with ordinality as k (k, n) order by n"
        assert column(db, query, shards, keys) == [
            pgqueue.shard_of(key, shards) for key in keys
        ]


def test_the_reference_has_the_right_examples() -> None:
    rows = documents.table(documents.text(PAGE), "key", "number")
    assert len(rows) == 5
    for cell, *places in rows:
        key = "" if cell == "(empty)" else cell.strip("`")
        shards = (2**32 - 1, 2, 3, 8, 1000)
        assert [pgqueue.shard_of(key, n) for n in shards] == [int(p) for p in places]


# The beginnings of the digests of the standard's own examples (FIPS 180-4, and those of NIST for it).
STANDARD = {
    "": (0xE3, 0xB0, 0xC4, 0x42),
    "abc": (0xBA, 0x78, 0x16, 0xBF),
    "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (0x24, 0x8D, 0x6A, 0x61),
    "a" * 1_000_000: (0xCD, 0xC7, 0x6E, 0x5C),
}  # fmt: skip


@pytest.mark.parametrize("key", STANDARD, ids=lambda key: key[:5] or "empty")
def test_a_key_belongs_to_the_shard_that_arithmetic_on_the_standards_bytes_says(
    db, key
):
    """Nothing is read from memory as a number here, so this is so on machines of both orders of bytes."""
    first, second, third, fourth = STANDARD[key]
    number = first * 16777216 + second * 65536 + third * 256 + fourth
    for shards in (2, 3, 7, 1024, 65536, 2**31 - 1):
        expected = number - number // shards * shards
        assert pgqueue.shard_of(key, shards) == expected
        assert one(db, "select pgqueue.shard_of(%s, %s)", key, shards) == expected


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP", "WIN1252"])
def test_a_key_belongs_to_the_same_shard_in_databases_of_other_encodings(db, encoding):
    name = f"{db.info.dbname}_{encoding.lower()}"
    key = "鍵" if encoding == "EUC_JP" else "zoë"
    db.execute(
        f"create database {name} template template0 encoding {encoding} locale 'C'"
    )
    try:
        with psycopg.connect(dbname=name, autocommit=True) as other:
            other.execute("create extension pgqueue")
            got = one(other, "select pgqueue.shard_of(%s, 1000)", key)
            assert got == pgqueue.shard_of(key, 1000)
    finally:
        db.execute(f"drop database {name} with (force)")


def test_no_two_shards_give_out_the_same_numbers(template):
    seen: set[tuple[str, int]] = set()
    for number in (1, 2, 1024):
        with (
            database(template) as dsn,
            psycopg.connect(dsn, autocommit=True) as conn,
        ):
            conn.execute("select pgqueue.shard(%s)", (number,))
            conn.execute(
                "select pgqueue.enqueue('q'), pgqueue.create_batch('q') from generate_series(1, 100)"
            )
            conn.execute("select pgqueue.claim('q', 'w') from generate_series(1, 50)")
            numbers = conn.execute(
                "select 'id', id from pgqueue.job union all select 'id', id from pgqueue.batch"
                " union all select 'token', token from pgqueue.job where token is not null"
            ).fetchall()
        assert len(numbers) == 250
        assert not seen & set(numbers)
        seen |= set(numbers)


@pytest.mark.parametrize("number", [None, 1, 2, 1024])
def test_what_is_kept_for_many_ids_takes_no_more_rows_on_a_shard(db, number):
    if number:
        db.execute("select pgqueue.shard(%s)", (number,))
    batch = one(db, "select pgqueue.create_batch('done')")
    many = "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[2000]), batch_id => %s)"
    ids = column(db, many, batch)
    assert one(db, "select count(*) from pgqueue.tally") <= 3
    waiting = "select waiting, cancelled from pgqueue.batches"
    assert db.execute(waiting).fetchone() == (2000, 0)
    assert column(db, "select id from pgqueue.batch_jobs order by id") == ids
    others = [id + n for id in ids[:20] for n in (1, 63, 64) if id + n not in ids]
    db.execute("select pgqueue.purge('q')")
    assert one(db, "select count(*) from pgqueue.gone") <= 33
    outcomes = "select id, outcome from pgqueue._outcomes_of(%s) order by id"
    known = dict(db.execute(outcomes, [ids + others]).fetchall())
    assert known == dict.fromkeys(ids, "cancelled") | dict.fromkeys(others, "completed")
    assert db.execute(waiting).fetchone() == (0, 2000)
    db.execute("select pgqueue.close_batch(%s)", [batch])
    assert one(db, "select state from pgqueue.batches") == "finished"


@pytest.mark.parametrize("above", [3000, 3071, 3072, 2**40 + 5])
def test_what_was_kept_before_a_database_became_a_shard_is_found_after(db, above):
    """An open batch has jobs of both times; ids of both were purged, or moved here."""
    batch = one(db, "select pgqueue.create_batch('done')")
    many = "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[2500]), batch_id => %s)"
    ids = column(db, many, batch)
    db.execute("select pgqueue._note_gone(%s)", [ids[::3]])
    db.execute("select pgqueue.shard(2, 3, above => %s)", [above])
    ids += column(db, many, batch)
    assert db.execute("select waiting from pgqueue.batches").fetchone() == (5000,)
    assert column(db, "select id from pgqueue.batch_jobs order by id") == ids
    foreign = [ids[-1] + 1, ids[-1] + 2, ids[-1] + 4]
    gone = {*ids[:2500:3], *ids[2500::7], foreign[0]}
    db.execute("select pgqueue._note_gone(%s)", [[*ids[2500::7], foreign[0]]])
    db.execute("delete from pgqueue.job where id = any (%s)", [ids[::2]])
    last = "select id from pgqueue._last_job(%s, %s)"
    left = ids[1::2]
    assert one(db, last, batch, 2**62) == left[-1]
    for place in (1, 500, 1249, 1250, 1251, 1800, 2499):
        assert one(db, last, batch, left[place]) == left[place - 1]
    db.execute("delete from pgqueue.job where id > %s", [above])
    assert one(db, last, batch, 2**62) == left[1249]
    db.execute("delete from pgqueue.job")
    outcomes = "select id from pgqueue._outcomes_of(%s) where outcome = 'cancelled'"
    assert set(column(db, outcomes, ids + foreign)) == gone


def test_a_shard_is_not_made_behind_the_back_of_an_open_enqueue(connect):
    owner, producer = connect(), connect(autocommit=False)
    producer.execute("select pgqueue.enqueue('q')")
    owner.execute("set lock_timeout = '50 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        owner.execute("select pgqueue.shard(2)")
    producer.commit()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        owner.execute("select pgqueue.shard(2)")
    assert column(owner, "select number from pgqueue.shard") == []


@pytest.mark.parametrize("dead", ["dead_job", "run"])
def test_neither_dead_jobs_nor_the_log_let_a_database_become_a_shard(db, dead):
    """Whatever the sequences say, as after a restore that left them out."""
    db.execute("select pgqueue.enqueue('q')")
    end = (
        "fail(id, token, 'e', permanent => true)"
        if dead == "dead_job"
        else "complete(id, token)"
    )
    db.execute(f"select pgqueue.{end} from pgqueue.claim('q', 'w')")
    other = "run" if dead == "dead_job" else "dead_job"
    db.execute(f"delete from pgqueue.{other}")
    db.execute(
        "alter sequence pgqueue.job_id_seq restart; alter sequence pgqueue.token_seq restart"
    )
    assert one(db, f"select count(*) from pgqueue.{dead}") == 1
    with pytest.raises(
        psycopg.errors.ObjectNotInPrerequisiteState, match="only an empty"
    ):
        db.execute("select pgqueue.shard(2)")


def test_two_sessions_that_see_a_failover_skip_numbers_one_after_the_other(connect):
    """Else the second sets back what the first has set, after others have gone on."""
    first, second = connect(autocommit=False), connect()
    first.execute("select setval('pgqueue._cell_timeline', 7)")
    assert one(first, "select pgqueue.after_failover()") is True
    second.execute("set lock_timeout = '50 ms'")
    assert one(second, "select pgqueue.after_failover()") is False
    second.execute("select setval('pgqueue._cell_timeline', 7)")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        second.execute("select pgqueue.after_failover()")
    first.commit()
    second.execute("reset lock_timeout")
    assert one(second, "select pgqueue.after_failover()") is True


def test_the_page_finds_the_shard_of_a_tenant(template) -> None:
    (block,) = documents.blocks(documents.text(GUIDE), "python")
    assert GUIDE == "docs/shards.md"
    with database(template) as first, database(template) as second:
        page: dict = {}
        exec(block.text, page)
        page["DSNS"] = [first, second]
        for tenant in ("ada", "42", "zoë"):
            page["order"](tenant, 1)
        for dsn, tenants in (first, ["42", "zoë"]), (second, ["ada"]):
            with psycopg.connect(dsn) as conn:
                groups = "select group_key from pgqueue.job order by id"
                assert column(conn, groups) == tenants


def test_the_page_starts_a_worker_for_all_shards():
    (block,) = documents.blocks(documents.text(GUIDE), "sh")
    command, *words = shlex.split(block.text)
    assert (command, *words[:2]) == ("python", "-m", "pgqueue.worker")
    args = parse(words[2:])
    assert list(args.app) == ["jobs"]
    assert args.dsn == ["dbname=first", "dbname=second"]


def test_a_shard_lives_on_in_the_database_that_subscribes_to_it():
    """Copied while it is used, then in its place: both sequences step, and their rows are there."""
    with Cluster(fast=True, settings={"wal_level": "logical"}) as server:
        with psycopg.connect(where(server), autocommit=True) as admin:
            for name in "source", "copy":
                admin.execute(f"create database {name}")
        with (
            psycopg.connect(where(server), dbname="source", autocommit=True) as source,
            psycopg.connect(where(server), dbname="copy", autocommit=True) as copy,
        ):
            for conn in source, copy:
                conn.execute("create extension pgqueue")
            source.execute("select pgqueue.shard(3, 8)")
            source.execute("select pgqueue.enqueue('q') from generate_series(1, 3)")
            source.execute("create publication moved for all tables")
            source.execute(
                "select pg_create_logical_replication_slot('moved', 'pgoutput')"
            )
            copy.execute(
                f"create subscription moved connection '{where(server)} dbname=source'"
                " publication moved with (create_slot = false, slot_name = 'moved')"
            )
            there = "select count(*) from pgqueue.job"
            copying = "select count(*) from pg_subscription_rel where srsubstate <> 'r'"
            wait_until(lambda: one(copy, there) == 3 and not one(copy, copying))
            source.execute("select pgqueue.enqueue('q') from generate_series(1, 2)")
            source.execute("select pgqueue.claim('q', 'w')")
            claimed = f"{there} where token = 3"
            wait_until(lambda: one(copy, there) == 5 and one(copy, claimed) == 1)
            copy.execute("alter subscription moved disable")
            for sequence in "job_id_seq", "token_seq":
                last = one(source, f"select last_value from pgqueue.{sequence}")
                copy.execute(f"select setval('pgqueue.{sequence}', %s)", (last,))
            assert one(copy, "select pgqueue.enqueue('q')") == 3 + 5 * 8
            assert one(copy, "select token from pgqueue.claim('q', 'w')") == 11
            assert one(copy, "select distinct shard from pgqueue.jobs") == 3
            assert (
                one(
                    copy,
                    "select status from pgqueue.health() as h where h.check = 'sequences'",
                )
                == "ok"
            )
            copy.execute("alter subscription moved set (slot_name = none)")
            copy.execute("drop subscription moved")
            source.execute("select pg_drop_replication_slot('moved')")
