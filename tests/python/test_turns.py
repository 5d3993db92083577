"""A group has its share, however many sessions enqueue for it at once."""

import psycopg
import pytest
from conftest import column


@pytest.fixture(autouse=True)
def round_began(db):
    """From now on two groups begin at the same turn, whichever is enqueued first."""
    enqueue(db, "other", 1)
    assert claimed(db, 1) == {"other": 1}


def enqueue(
    session: psycopg.Connection, group_key: str, jobs: int, *, bulk: bool = True
) -> None:
    if bulk:
        session.execute(
            "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[%(jobs)s]),"
            " group_keys => array_fill(%(group)s::text, array[%(jobs)s]))",
            {"jobs": jobs, "group": group_key},
        )
    else:
        for _ in range(jobs):
            session.execute(
                "select pgqueue.enqueue('q', group_key => %s)", (group_key,)
            )


def claimed(db: psycopg.Connection, jobs: int) -> dict[str, int]:
    groups = column(db, "select group_key from pgqueue.claim('q', 'w', %s)", jobs)
    return {group: groups.count(group) for group in sorted(set(groups))}


def test_sessions_that_do_not_see_each_other_give_their_group_no_more_turns(
    db, connect
):
    first, second, third = connect(), connect(), connect()
    with first.transaction(), second.transaction():
        enqueue(first, "big", 20)
        enqueue(second, "big", 20, bulk=False)
        with third.transaction():
            enqueue(third, "big", 10, bulk=False)
            enqueue(third, "big", 10)
    enqueue(db, "small", 60)
    assert claimed(db, 60) == {"big": 30, "small": 30}


def test_who_comes_after_the_commit_of_the_first_goes_on_behind_the_open_one(
    db, connect
):
    first, second = connect(), connect()
    with second.transaction():
        with first.transaction():
            enqueue(first, "big", 20)
            enqueue(second, "big", 20)
        enqueue(first, "big", 20, bulk=False)
    enqueue(db, "small", 60)
    assert claimed(db, 60) == {"big": 30, "small": 30}


def test_what_was_rolled_back_costs_its_group_no_turns(db):
    with db.transaction(force_rollback=True):
        enqueue(db, "big", 1000)
    enqueue(db, "big", 5)
    enqueue(db, "small", 5)
    assert claimed(db, 4) == {"big": 2, "small": 2}


def test_a_stranger_who_holds_the_locks_of_groups_stops_no_enqueue(db, connect):
    stranger = connect()
    stranger.execute(
        "select pg_advisory_lock(7366515, fold) from generate_series(0, 63) as fold"
    )
    db.execute("set lock_timeout = '1 ms'")
    enqueue(db, "big", 5)
    enqueue(db, "small", 5, bulk=False)
    assert claimed(db, 4) == {"big": 2, "small": 2}


def test_a_turn_that_was_given_long_ago_is_not_believed(db, connect):
    with db.transaction(force_rollback=True):
        enqueue(db, "big", 1000)
    column(
        db,
        "select setval(('pgqueue._cell_' || n)::regclass,"
        " pgqueue._since_2020(now() - interval '61 seconds'))"
        " from generate_series(769, 1023, 2) as n",
    )
    other = connect()
    other.execute(
        "select pg_advisory_lock_shared(7366515, fold) from generate_series(0, 63) as fold"
    )
    enqueue(db, "big", 5)
    enqueue(db, "small", 5)
    assert claimed(db, 4) == {"big": 2, "small": 2}
