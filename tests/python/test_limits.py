"""Limits of groups hold, and nobody waits for anybody, whatever two sessions do at once."""

import psycopg
import pytest
from conftest import column, one, soon

pytestmark = pytest.mark.loses_hints
CLAIM = "select id, token from pgqueue.claim('q', 'w', 10, kinds => %s)"


@pytest.fixture
def limited(db, connect):
    """Two sessions, and a queue whose groups run one job at a time."""
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    return db, connect()


def enqueue(db: psycopg.Connection, *group_keys: str | None) -> list[int]:
    return column(
        db,
        "select * from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[%s]), group_keys => %s)",
        len(group_keys),
        list(group_keys),
    )


def claim(db: psycopg.Connection) -> dict[int, int]:
    """The ids and tokens of the jobs of a claim that must not wait."""
    db.execute("set lock_timeout = '1 ms'")
    return dict(db.execute(CLAIM, (None,)).fetchall())


def finish(db: psycopg.Connection, job: dict[int, int], end: str) -> None:
    """End the attempt of a job, or what waits in its place."""
    ((id, token),) = job.items()
    db.execute(
        {
            "complete": "select pgqueue.complete(%(id)s, %(token)s)",
            "complete_many": "select pgqueue.complete_many(array[%(id)s], array[%(token)s])",
            "retry": "select pgqueue.fail(%(id)s, %(token)s, 'e', '1 hour')",
            "dead": "select pgqueue.fail(%(id)s, %(token)s, 'e', permanent => true)",
            "snooze": "select pgqueue.release(array[%(id)s], array[%(token)s], now() + interval '1 hour')",
            "finish": "select pgqueue.finish(array[%(id)s], array[%(token)s], '{reject}', '{e}')",
            "expire": "update pgqueue.job set lease_expires_at = now() - interval '1 second', "
            "max_attempts = 1 where id = %(id)s",
            "delete": "delete from pgqueue.job where id = %(id)s",
        }[end],
        {"id": id, "token": token},
    )


ENDS = ["complete", "complete_many", "retry", "dead", "snooze", "finish"]


def test_two_open_claims_take_no_two_jobs_of_a_group(limited):
    db, other = limited
    first, _, third = enqueue(db, "a", "a", "b")
    with db.transaction():
        assert claim(db).keys() == {first, third}
        assert claim(other) == {}
    assert claim(other) == {}


def test_an_open_claim_leaves_the_other_permits_of_its_group(limited):
    db, other = limited
    db.execute("select pgqueue.configure('q', group_limit => 2)")
    first, second, *_ = enqueue(db, "a", "a", "a")
    with db.transaction():
        assert one(db, "select id from pgqueue.claim('q', 'w')") == first
        assert claim(other).keys() == {second}
    assert claim(db) == {}


@pytest.mark.parametrize("end", ENDS)
def test_an_open_end_of_an_attempt_leaves_the_free_permits_of_its_group(limited, end):
    db, other = limited
    db.execute("select pgqueue.configure('q', group_limit => 2)")
    *_, third, fourth = enqueue(db, "a", "a", "a", "a")
    jobs = claim(db)
    assert claim(other) == {}
    (one_of_them, the_other) = jobs.items()
    finish(db, dict([one_of_them]), "complete")
    with db.transaction():
        finish(db, dict([the_other]), end)
        assert claim(other).keys() == {third}
    assert soon(lambda: claim(other)).keys() == {fourth}


def test_a_claim_that_is_rolled_back_gives_its_permit_back(limited):
    db, other = limited
    first, _ = enqueue(db, "a", "a")
    with db.transaction(force_rollback=True):
        assert claim(db).keys() == {first}
        assert claim(other) == {}
    assert claim(other).keys() == {first}


@pytest.mark.parametrize("end", ENDS)
def test_a_claim_beside_an_open_end_of_an_attempt_finds_the_next_job_after_it(
    limited, end
):
    db, other = limited
    _, second = enqueue(db, "a", "a")
    job = claim(db)
    with db.transaction():
        finish(db, job, end)
        assert claim(other) == {}
    assert claim(other).keys() == {second}


@pytest.mark.waits_for_sweeps
@pytest.mark.parametrize("end", ["complete", "complete_many", "finish"])
def test_nobody_sleeps_long_beside_an_open_end_of_which_nobody_will_be_told(
    limited, end
):
    db, other = limited
    enqueue(db, "a", "a")
    # One job, so that this claim does not find the group full.
    job = dict(db.execute("select id, token from pgqueue.claim('q', 'w')").fetchall())
    with db.transaction():
        finish(db, job, end)
        while one(other, "select min(t.served) > -3 from pgqueue.ticket as t"):
            assert claim(other) == {}
        assert one(other, "select pgqueue.rest('{q}') <= interval '5 seconds'")
    other.execute("select pgqueue.rest('{q}')")
    assert soon(lambda: claim(other))


@pytest.mark.parametrize("end", ENDS)
def test_an_end_of_an_attempt_that_is_rolled_back_frees_nothing(limited, end):
    db, other = limited
    enqueue(db, "a", "a")
    job = claim(db)
    with db.transaction(force_rollback=True):
        finish(db, job, end)
    assert claim(other) == {}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_beside_an_open_claim_does_not_wait_and_the_next_job_is_found(
    limited, end
):
    db, other = limited
    _, second = enqueue(db, "a", "a")
    job = dict([db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()])
    with other.transaction():
        # It notes that the group is full.
        assert claim(other) == {}
        finish(db, job, end)
        found = claim(db)
    assert (found or soon(lambda: claim(db))).keys() == {second}
    assert claim(other) == {}


@pytest.mark.parametrize("commits", [True, False])
def test_a_job_enqueued_while_its_group_is_full_is_found_when_it_is_free(
    limited, commits
):
    db, other = limited
    enqueue(db, "a")
    job = claim(db)
    with other.transaction(force_rollback=not commits):
        (late,) = enqueue(other, "a")
        finish(db, job, "complete")
        assert claim(db) == {}
    assert claim(db).keys() == ({late} if commits else set())


def test_two_first_jobs_of_a_group_in_open_transactions_run_one_after_the_other(
    limited,
):
    db, other = limited
    with db.transaction():
        (first,) = enqueue(db, "a")
        with other.transaction():
            enqueue(other, "a")
    assert claim(db).keys() == {first}
    assert claim(other) == {}


@pytest.mark.parametrize("end", ["expire", "delete"])
def test_a_dead_worker_holds_up_its_group_until_its_lease_expires(limited, end):
    db, other = limited
    _, second = enqueue(db, "a", "a")
    job = claim(db)
    assert claim(other) == {}
    finish(db, job, end)
    assert soon(lambda: claim(other)).keys() == {second}


def test_a_lost_worker_frees_nothing_when_it_comes_back(limited):
    db, other = limited
    first, _ = enqueue(db, "a", "a")
    job = claim(db)
    db.execute("update pgqueue.job set lease_expires_at = now() - interval '1 second'")
    assert soon(lambda: claim(other)).keys() == {first}
    with pytest.raises(psycopg.Error, match="is lost"):
        finish(db, job, "complete")
    assert claim(db) == {}


def test_when_the_first_job_of_a_group_is_cancelled_the_next_one_is_found(limited):
    db, other = limited
    _, second, third = enqueue(db, "a", "a", "a")
    job = claim(db)
    assert claim(other) == {}
    finish(db, job, "complete")
    with db.transaction():
        db.execute("select pgqueue.cancel(%s)", (second,))
        assert claim(other) == {}
    assert soon(lambda: claim(other)).keys() == {third}


def test_a_retry_whose_permit_another_claim_has_locked_waits_for_that_one(
    limited, connect
):
    db, other = limited
    db.execute(
        "select pgqueue.configure('q', group_limit => 2, group_on_retry => 'block', max_running => 40)"
    )
    enqueue(db, "a", "a", "a")
    assert one(db, "select count(*) from pgqueue.rest('{q}', park => false)") == 1
    jobs = soon(lambda: claim(db))
    retry = min(jobs)
    finish(db, {retry: jobs[retry]}, "retry")
    with other.transaction():
        # The group is full, so it asks whether all who hold a permit still run.
        assert claim(other) == {}
        db.execute("select pgqueue.configure('q', group_limit => 4)")
        db.execute("select pgqueue.run_now(%s)", [retry])
        assert claim(db).keys() == {max(jobs) + 1}
        assert claim(db) == {}
    assert soon(lambda: claim(db)).keys() == {retry}
    held = "select count(*) from pgqueue.permit where group_key = 'a' and job_id = %s and free_at = 'infinity'"
    assert one(db, held, retry) == 1


@pytest.mark.parametrize("commits", [True, False])
def test_while_the_first_job_is_just_being_postponed_none_of_the_others_overtakes_it(
    limited, commits
):
    db, other = limited
    first = one(db, "select pgqueue.enqueue('q', group_key => 'a', unique_key => 'k')")
    (second,) = enqueue(db, "a")
    with other.transaction(force_rollback=not commits):
        other.execute(
            "select pgqueue.enqueue('q', group_key => 'a', unique_key => 'k', "
            "on_duplicate => 'postpone', run_at => now() + interval '1 hour')"
        )
        assert claim(db) == {}
    assert soon(lambda: claim(db)).keys() == {second if commits else first}


def test_two_permits_are_taken_beside_an_open_postponement(limited):
    db, other = limited
    db.execute("select pgqueue.configure('q', group_limit => 2)")
    db.execute("select pgqueue.enqueue('q', group_key => 'a', unique_key => 'k')")
    (second,) = enqueue(db, "a")
    with other.transaction():
        other.execute(
            "select pgqueue.enqueue('q', group_key => 'a', unique_key => 'k', "
            "on_duplicate => 'postpone', run_at => now() + interval '1 hour')"
        )
        assert claim(db).keys() == {second}


def test_a_limit_that_is_set_beside_an_open_claim_holds_when_both_have_committed(
    db, connect
):
    other = connect()
    enqueue(db, "a", "a", "a", "a")
    assert one(db, "select count(*) from pgqueue.claim('q', 'w', 2)") == 2
    other.execute("select pgqueue.configure('q', group_limit => 2)")
    assert claim(db) == {}


def test_a_limit_that_is_raised_or_taken_away_lets_blocked_jobs_go(limited):
    db, other = limited
    _, second, third, fourth = enqueue(db, "a", "a", "a", "a")
    claim(db)
    assert claim(other) == {}
    other.execute("select pgqueue.configure('q', group_limit => 2)")
    assert claim(db).keys() == {second}
    other.execute("select pgqueue.configure('q', reset => true)")
    assert claim(db).keys() == {third, fourth}


def test_the_jobs_of_a_group_of_one_run_in_their_order_whatever_their_kinds(limited):
    db, other = limited
    first = one(db, "select pgqueue.enqueue('q', kind => 'draft', group_key => 'a')")
    second = one(db, "select pgqueue.enqueue('q', kind => 'send', group_key => 'a')")
    assert other.execute(CLAIM, (["send"],)).fetchall() == []
    job = claim(db)
    assert job.keys() == {first}
    assert other.execute(CLAIM, (["send"],)).fetchall() == []
    finish(db, job, "complete")
    ((id, _),) = other.execute(CLAIM, (["send"],)).fetchall()
    assert id == second


@pytest.mark.needs_hints  # it is told of the end that it waits for
def test_a_worker_rests_while_the_only_due_jobs_wait_for_their_group(limited):
    db, other = limited
    enqueue(db, "a", "a")
    job = claim(db)
    looks = 0
    # The end of an attempt that is not committed yet cannot tell, so it looks again, twice.
    while not one(other, "select pgqueue.rest('{q}') > interval '20 seconds'"):
        assert claim(other) == {}
        looks += 1
        soon(
            lambda: one(other, "select min(at) < clock_timestamp() from pgqueue.ticket")
        )
    assert looks <= 4
    other.execute("listen pgqueue")
    finish(db, job, "complete")
    assert list(other.notifies(timeout=5, stop_after=1))


@pytest.mark.needs_hints  # counts
def test_a_hundred_thousand_jobs_behind_a_busy_key_are_not_walked_by_claims(db):
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    fill = (
        "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[%s]), "
        "group_keys => array(select %s || n %% %s from generate_series(1, %s) as n))"
    )
    one(db, fill, 100_000, "busy", 1, 100_000)
    one(db, "select id from pgqueue.claim('q', 'w')")
    one(db, fill, 3000, "free", 1000, 3000)
    db.execute("analyze pgqueue.job")
    costs = []
    for _ in range(20):
        (plan,) = one(
            db,
            "explain (analyze, buffers, format json) "
            "select pgqueue.complete(c.id, c.token) from pgqueue.claim('q', 'w', 50) as c",
        )
        assert plan["Plan"]["Actual Rows"] == 50
        costs.append(plan["Plan"]["Shared Hit Blocks"])
    # Jobs that a claim has met are out of its way.
    assert max(costs[1:]) < 8000
