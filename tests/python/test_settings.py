"""What is in force follows from what was set, whatever two sessions do at once."""

import threading

import psycopg
import pytest
from conftest import column, one
from psycopg import IsolationLevel, errors

IN_FORCE = "select max_attempts, lease = '7 s' from pgqueue._in_force(%s)"


def in_force(db: psycopg.Connection, queue: str) -> tuple | None:
    return db.execute(IN_FORCE, (queue,)).fetchone()


@pytest.mark.parametrize("first", ["all", "one"])
def test_two_that_change_settings_at_once_derive_the_same(db, connect, blocked, first):
    calls = {
        "all": "select pgqueue.configure(null, lease => '7 s')",
        "one": "select pgqueue.configure('q', max_attempts => 3)",
    }
    other = connect()
    with db.transaction():
        db.execute(calls.pop(first))
        (second,) = calls.values()
        waiting = threading.Thread(target=other.execute, args=(second,))
        waiting.start()
        blocked(other)
        assert in_force(connect(), "q") == (20, False)
    waiting.join()
    assert in_force(db, "q") == (3, True)
    assert in_force(db, "else") == (20, True)


@pytest.mark.parametrize(
    "level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
)
@pytest.mark.parametrize(
    "first",
    [
        "pause()",
        "configure('p', max_running => 1)",
        "grant_access('{}', 'producer', 'q')",
    ],
)
@pytest.mark.parametrize(
    "second",
    [
        "configure('q', lease => '7 s')",
        "configure(null, lease => '7 s')",
        "resume('q')",
    ],
)
def test_an_older_snapshot_changes_nothing_that_it_does_not_see(
    db, connect, role, level, first, second
):
    late = connect()
    late.isolation_level = level
    with pytest.raises(errors.SerializationFailure) as refused, late.transaction():
        late.execute("select 1")
        db.execute(f"select pgqueue.{first}".format(role))
        late.execute(f"select pgqueue.{second}")
    assert refused.value.diag.message_hint == "Run it again."
    with late.transaction():
        late.execute(f"select pgqueue.{second}")
        late.execute(f"select pgqueue.{second}")
    assert (
        db.execute(
            "select * from pgqueue.queue_in_force where queue_in_force is distinct from"
            " pgqueue._resolved(queue)"
        ).fetchall()
        == []
    )


def test_who_enqueues_and_claims_does_not_wait_for_who_changes_settings(db, connect):
    other = connect()
    other.execute("set lock_timeout = '1 ms'")
    with db.transaction():
        db.execute("select pgqueue.configure('q', max_attempts => 3)")
        db.execute("select pgqueue.pause('p')")
        assert one(other, "select pgqueue.enqueue('q')") == one(
            other, "select id from pgqueue.claim('q', 'w')"
        )


def test_a_first_use_does_not_wait_for_a_table_that_is_reindexed(db, connect):
    """REINDEX CONCURRENTLY keeps its lock for as long as any old snapshot lives."""
    names = "select string_agg(format('pgqueue.%I', relname), ', ') from pg_class"
    tables = one(
        db,
        f"{names} where relkind = 'r' and relnamespace = 'pgqueue'::regnamespace and relname <> 'queue'",
    )
    with connect().transaction() as block:
        block.connection.execute(f"lock table {tables} in share update exclusive mode")
        db.execute("set lock_timeout = '1 s'")
        db.execute("select pgqueue.enqueue('q', priority => 5, group_key => 'g')")
        db.execute("select pgqueue.enqueue('q', after => array[1])")
        db.execute("select pgqueue.emit('e'), pgqueue.create_batch('q')")
        db.execute("select pgqueue.configure('q', lease => '1 min')")


def test_a_change_that_is_rolled_back_leaves_no_setting(db):
    with db.transaction(force_rollback=True):
        db.execute("select pgqueue.configure('q', max_attempts => 3)")
        assert in_force(db, "q") == (3, False)
    assert in_force(db, "q") == (20, False)
    assert one(db, "select count(*) from pgqueue.queue_in_force") == 0


def test_changes_in_one_transaction_hold_within_it(db):
    with db.transaction():
        db.execute("select pgqueue.configure(null, max_attempts => 2)")
        db.execute("select pgqueue.configure('q', max_attempts => 3)")
        db.execute("select pgqueue.configure(null, reset => true)")
        assert in_force(db, "q") == (3, False)
        db.execute("select pgqueue.configure('q', reset => true)")
        assert in_force(db, "q") == (20, False)


def test_two_first_uses_at_once_are_both_remembered(db, connect):
    """The bits are set at once, not at the commits."""
    other = connect()
    with db.transaction(), other.transaction():
        db.execute("select pgqueue.configure('q', max_attempts => 3)")
        other.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
    used = one(db, "select last_value from pgqueue.used_seq")
    assert used < 0
    assert one(db, "select %s >> (hashtext('q') & 255) %% 63 & 1", used) == 1


def test_a_copy_of_the_rows_alone_is_repaired_by_maintain(db):
    """As on a replica that logical replication has made, which copies no sequences."""
    db.execute("select pgqueue.configure('q', max_attempts => 3)")
    db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
    db.execute("select setval('pgqueue.used_seq', 0)")
    db.execute("delete from pgqueue.queue_in_force")
    assert in_force(db, "q") == (20, False)
    db.execute("select pgqueue.maintain()")
    assert in_force(db, "q") == (3, False)
    assert one(db, "select last_value from pgqueue.used_seq") < 0


def test_what_is_set_for_all_is_repaired_for_each_queue(db):
    """One bit, that of the empty name, does not say it of the others."""
    db.execute("select pgqueue.configure(null, max_attempts => 3)")
    db.execute(
        "select setval('pgqueue.used_seq', 1::bigint << (hashtext('') & 255) % 63)"
    )
    assert in_force(db, "of another bit") == (20, False)
    db.execute("select pgqueue.maintain()")
    assert in_force(db, "of another bit") == (3, False)


def test_ten_thousand_pauses_of_groups_are_no_work_for_those_that_come_after(db):
    """The row of the queue stays as it is while its meaning does."""
    db.execute("select pgqueue.pause('q', group_key => 'first')")
    before = column(db, "select ctid::text from pgqueue.queue_in_force")
    db.execute(
        "select pgqueue.pause('q', group_key => n::text) from generate_series(1, 1000) as n"
    )
    assert column(db, "select ctid::text from pgqueue.queue_in_force") == before
