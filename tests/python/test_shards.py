"""Several databases, each a pgqueue: their numbers, and where a key belongs."""

import random
import shlex

import documents
import pgqueue
import psycopg
import pytest
from conftest import column, database, one
from pgqueue.worker.options import parse

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
