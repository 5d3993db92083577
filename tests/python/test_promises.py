"""Sentences of the documents that no other test proves."""

import time

import psycopg
import pytest
from conftest import column, one
from psycopg import errors

ERRORS = (
    "TimeoutError: no answer\n  File 'smtp.py', line 7\n    connect(host)",
    "timeouterror: no answer\nby another program",
    "ValueError: no such host\n  File 'smtp.py', line 5\n    connect(timeout=5)",
)


def told(db: psycopg.Connection) -> list[str]:
    """Every NOTICE from now on."""
    notices: list[str] = []
    db.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    return notices


def failed(db: psycopg.Connection, *, for_good: bool) -> list[int]:
    """One job for each of ERRORS."""
    db.execute("select pgqueue.enqueue_many('q', array['1', '2', '3']::jsonb[])")
    ids = []
    for error in ERRORS:
        id, token = db.execute(
            "select id, token from pgqueue.claim('q', 'w')"
        ).fetchone()
        db.execute(
            "select pgqueue.fail(%s, %s, %s, '1 day', %s)", (id, token, error, for_good)
        )
        ids.append(id)
    return ids


@pytest.mark.parametrize("verb", ["redrive", "discard_many", "cancel_many"])
def test_filters_match_the_first_line_of_the_error_ignoring_case(db, verb):
    ids = failed(db, for_good=verb != "cancel_many")
    found = f"select * from pgqueue.{verb}(error_like => %s, dry_run => %s)"
    assert column(db, found, "%TIMEOUT%", True) == ids[:2]
    assert column(db, found, "%connect%", True) == []
    assert column(db, found, "%TIMEOUT%", False) == ids[:2]
    assert column(db, found, "%", True) == ids[2:] or verb == "redrive"


@pytest.mark.parametrize("verb", ["redrive", "discard_many", "cancel_many"])
def test_a_dry_run_counts_jobs_by_the_first_line_of_the_error_and_changes_nothing(
    db, verb
):
    ids = failed(db, for_good=verb != "cancel_many")
    ids += failed(db, for_good=verb != "cancel_many")[2:]
    notices = told(db)
    state = "select array_agg(d.*)::text from (table pgqueue.{}) as d"
    before = [one(db, state.format(table)) for table in ("job", "dead_job", "run")]
    what = "error_like => '%host%', dry_run => true"
    assert column(db, f"select pgqueue.{verb}({what})") == [ids[2], ids[3]]
    (notice,) = notices
    assert notice.startswith("2 of ") and notice.endswith(": ValueError: no such host")
    assert before == [
        one(db, state.format(table)) for table in ("job", "dead_job", "run")
    ]


@pytest.mark.parametrize("outcome", ["fail", "reject"])
def test_a_run_keeps_the_first_line_of_the_error(db, outcome):
    db.execute("select pgqueue.enqueue('q')")
    db.execute(
        "select pgqueue.finish(array[id], array[token], array[%s], array[%s])"
        " from pgqueue.claim('q', 'w')",
        (outcome, f"\n{ERRORS[0]}"),
    )
    assert column(db, "select error from pgqueue.run") == ["TimeoutError: no answer"]


def test_a_result_above_64_mb_fails_only_its_attempt(db):
    db.execute("select pgqueue.enqueue_many('q', array['1', '2']::jsonb[])")
    statuses = column(
        db,
        """
        select (
            select array_agg(f.status) from pgqueue.finish(
                array_agg(c.id), array_agg(c.token), array['complete', 'complete'],
                array['"' || repeat('x', 64000000) || '"', '"small"']
            ) as f
        )
        from pgqueue.claim('q', 'w', 2) as c
        """,
    )
    assert statuses == [["retry", "completed"]]
    assert "64000002 bytes" in one(db, "select last_error from pgqueue.jobs")


@pytest.mark.parametrize("number", [0, 1])
def test_a_claim_in_a_read_only_transaction_is_refused(db, number):
    db.execute(
        "select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[%s]))", [number]
    )
    db.execute("set default_transaction_read_only = on")
    with pytest.raises(errors.ReadOnlySqlTransaction):
        db.execute("select pgqueue.claim('q', 'w')")


@pytest.mark.parametrize("is_shared", [False, True])
def test_no_function_waits_for_the_advisory_locks_of_another_session(
    db, connect, is_shared
):
    stranger = connect()
    stranger.execute(
        f"select pg_advisory_lock{'_shared' if is_shared else ''}(class, key)"
        " from unnest(array[7366513, 7366514]) as class, generate_series(0, 255) as key"
    )
    db.execute("set statement_timeout = '10 s'")
    db.execute("select pgqueue.enqueue('q')")
    db.execute("select pgqueue.enqueue_many('q', array['2', '3', '4']::jsonb[])")
    assert one(db, "select pgqueue.rest(array['q'])").total_seconds() == 0
    claim = "select id, token from pgqueue.claim('q', 'w')"
    db.execute("select pgqueue.complete(%s, %s)", db.execute(claim).fetchone())
    db.execute("select pgqueue.fail(%s, %s, 'e')", db.execute(claim).fetchone())
    lease = [[each] for each in db.execute(claim).fetchone()]
    db.execute("select pgqueue.release(%s, %s)", lease)
    assert one(db, "select count(*) from pgqueue.claim('q', 'w', 9)") == 2
    rest = one(db, "select pgqueue.rest(array['q'])")
    assert 0 < rest.total_seconds() <= 30, "it sleeps, if less long"


def test_nobody_sleeps_beside_an_open_end_though_the_lock_of_another_queue_is_taken(
    db, connect
):
    jobs = []
    for queue in "first", "second":
        db.execute("select pgqueue.configure(%s, group_limit => 1)", [queue])
        for _ in range(2):
            db.execute("select pgqueue.enqueue(%s, group_key => 'g')", [queue])
        claim = "select id, token from pgqueue.claim(%s, 'w', lease => '10 min')"
        jobs += db.execute(claim, [queue]).fetchall()
    stranger, ender = connect(), connect(autocommit=False)
    lock = "select pg_advisory_lock(7366513, hashtext('first') & 255)"
    stranger.execute(lock)
    end = "select count(*) from pgqueue.complete_many(%s, %s)"
    assert one(ender, end, *map(list, zip(*jobs, strict=True))) == 2
    stranger.close()
    # As claims leave a group that has been full for a while: they rely on the end of an attempt.
    db.execute(
        "update pgqueue.ticket set is_blocked = true, is_full = true, served = -3"
    )
    assert column(db, "select id from pgqueue.claim('second', 'w')") == []
    rest = one(db, "select pgqueue.rest(array['second'])")
    assert rest.total_seconds() <= 5, "until the end commits"


def test_a_job_that_commits_late_in_a_busy_lane_is_claimed_soon(db, connect):
    fill = "select count(*) from pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[%s]))"
    db.execute(fill, [1000])
    late = connect(autocommit=False)
    # An hour ago, because enqueue_many spreads its jobs over the microseconds before the call.
    enqueue = "select pgqueue.enqueue('q', run_at => now() - interval '1 hour')"
    id = one(late, enqueue)
    db.execute(fill, [30000])
    claim = "select id from pgqueue.claim('q', 'w', 5)"
    for _ in range(300):  # so many run that a walk over them leaves a position
        assert len(column(db, claim)) == 5
    late.commit()
    began = time.monotonic()
    while id not in (found := column(db, claim)):
        assert len(found) == 5, "the lane is busy all the time"
    # 100 ms, and some more on a busy machine.
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("wanted", [1, 2, 4, 7])
def test_claims_smaller_than_a_share_follow_the_weights_on_average(db, wanted):
    """Shares of less than a job must not all be rounded up."""
    for queue in ("heavy", "light"):
        db.execute(
            "select count(*) from pgqueue.enqueue_many(%s, array_fill('1'::jsonb, array[3000]))",
            (queue,),
        )
    calls = 300
    taken = (
        "select count(*) filter (where c.queue = 'heavy'), count(*) from generate_series(1, %s) as n,"
        " pgqueue.claim_from(array['heavy', 'light'], 'w', %s + 0 * n, weights => array[4, 1]) as c"
    )
    heavy, jobs = db.execute(taken, (calls, wanted)).fetchone()
    assert jobs == calls * wanted
    # Six standard deviations of shares that are rounded up or down.
    assert abs(heavy / jobs - 0.8) < 3 / calls**0.5 / wanted
