"""Caps and rates hold, and nobody waits for anybody, whatever sessions do at once."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal

import psycopg
import pytest
from conftest import LONG, column, one, soon
from psycopg import pq

pytestmark = pytest.mark.loses_hints
# What is configured, so that one job may run or begin, of jobs of kind x in group g.
SCOPES = {
    "max_running of the queue": "max_running => 1",
    "max_running of a kind": "kind => 'x', max_running => 1",
    "rate of the queue": "rate_limit => 1, rate_period => '1 hour'",
    "rate of a kind": "kind => 'x', rate_limit => 1, rate_period => '1 hour'",
    "rate of a group": "group_key => 'g', rate_limit => 1, rate_period => '1 hour'",
    "rate of each group": "group_key => '*', rate_limit => 1, rate_period => '1 hour'",
}
scopes = pytest.mark.parametrize("scope", SCOPES)
RUNNING = list(SCOPES)[:2]
LIMITS = {
    **{scope: SCOPES[scope] for scope in RUNNING},
    "limit of a group": "group_key => 'g', group_limit => 1",
    "limit of each group": "group_limit => 1",
    "cap of all queues": None,
}
ENDS = {
    "complete": "select pgqueue.complete(%(id)s, %(token)s)",
    "complete_many": "select pgqueue.complete_many(array[%(id)s], array[%(token)s])",
    "retry": "select pgqueue.fail(%(id)s, %(token)s, 'e', '1 hour')",
    "dead": "select pgqueue.fail(%(id)s, %(token)s, 'e', permanent => true)",
    "release": "select pgqueue.release(array[%(id)s], array[%(token)s], now() + interval '1 hour')",
    "finish": "select pgqueue.finish(array[%(id)s], array[%(token)s], '{reject}', '{e}')",
    "delete": "delete from pgqueue.job where id = %(id)s",
}


def configure(db: psycopg.Connection, scope: str, cap: int = 1) -> None:
    db.execute(
        f"select pgqueue.configure('q', {SCOPES[scope].replace('=> 1,', f'=> {cap},')})"
    )
    if scope in RUNNING:
        db.execute(
            f"select pgqueue.configure('q', {SCOPES[scope].replace('=> 1', f'=> {cap}')})"
        )


def enqueue(db: psycopg.Connection, count: int = 1) -> list[int]:
    return column(
        db,
        "select pgqueue.enqueue('q', kind => 'x', group_key => 'g') from generate_series(1, %s)",
        count,
    )


def claim(db: psycopg.Connection, wanted: int = 10, wait: str = "1 ms") -> dict:
    """The ids and tokens of the jobs of a claim that must not wait."""
    db.execute(f"set lock_timeout = '{wait}'")
    jobs = db.execute("select id, token from pgqueue.claim('q', 'w', %s)", (wanted,))
    db.execute("reset lock_timeout")
    return dict(jobs.fetchall())


@scopes
def test_two_open_claims_take_no_more_than_a_cap_allows(db, connect, scope):
    other = connect()
    configure(db, scope)
    first, *_ = enqueue(db, 3)
    with db.transaction():
        assert claim(db).keys() == {first}
        assert claim(other) == {}
    assert claim(other) == {}


@scopes
def test_an_open_claim_leaves_what_it_does_not_take(db, connect, scope):
    other = connect()
    configure(db, scope, 2)
    first, second, _ = enqueue(db, 3)
    with db.transaction():
        assert claim(db, 1).keys() == {first}
        assert claim(other).keys() == {second}
    assert claim(db) == {}


@scopes
def test_a_claim_that_is_rolled_back_takes_nothing(db, connect, scope):
    other = connect()
    configure(db, scope)
    first, _ = enqueue(db, 2)
    with db.transaction(force_rollback=True):
        assert claim(db).keys() == {first}
        assert claim(other) == {}
    assert len(claim(other)) == 1


PAUSE = "select pgqueue.rest('{q}', park => false) >= interval '40 milliseconds'"


@scopes
def test_nobody_looks_again_and_again_while_a_claim_is_open(db, connect, scope):
    """Its permit is locked, and looks free."""
    other = connect()
    configure(db, scope)
    enqueue(db, 2)
    with db.transaction(force_rollback=True):
        assert len(claim(db)) == 1
        assert claim(other) == {}
        assert [one(other, PAUSE) for _ in range(3)] == [True] * 3
    # Nor did the looks keep the permit.
    assert len(claim(db)) == 1


@pytest.mark.parametrize("scope", RUNNING)
def test_nobody_looks_again_and_again_while_a_job_with_an_expired_lease_is_locked(
    db, connect, scope
):
    """As by the handler that `work` calls, however long that takes."""
    other = connect()
    configure(db, scope)
    enqueue(db, 2)
    ((id, _),) = claim(db).items()
    db.execute("update pgqueue.job set lease_expires_at = now() where id = %s", (id,))
    with db.transaction():
        db.execute("select from pgqueue.job where id = %s for update", (id,))
        assert claim(other) == {}
        assert [one(other, PAUSE) for _ in range(3)] == [True] * 3
    assert len(claim(other)) == 1


def test_a_job_of_a_kind_whose_cap_is_free_is_not_waited_for(db, connect):
    """Beside one of a kind whose last permit an open claim has locked."""
    other = connect()
    configure(db, "max_running of a kind")
    enqueue(db, 2)
    with db.transaction(force_rollback=True):
        assert len(claim(db)) == 1
        assert claim(other) == {}
        other.execute("select pgqueue.enqueue('q', kind => 'y')")
        assert one(other, PAUSE) is False
        assert len(claim(other)) == 1


@pytest.mark.sample(8)
@pytest.mark.parametrize("scope", RUNNING)
@pytest.mark.parametrize("end", ENDS)
def test_an_open_end_of_an_attempt_frees_its_place_when_it_commits(
    db, connect, scope, end
):
    other = connect()
    configure(db, scope)
    _, second = enqueue(db, 2)
    ((id, token),) = claim(db).items()
    with db.transaction(force_rollback=True):
        db.execute(ENDS[end], {"id": id, "token": token})
        assert claim(other) == {}
    assert claim(other) == {}
    with db.transaction():
        db.execute(ENDS[end], {"id": id, "token": token})
        assert claim(other) == {}
    assert claim(other).keys() == {second}


@pytest.mark.parametrize("scope", RUNNING)
@pytest.mark.parametrize("end", [end for end in ENDS if end != "delete"])
@pytest.mark.parametrize("is_set_late", [False, True])
def test_who_rests_before_a_full_cap_is_woken_by_the_end_of_an_attempt(
    db, connect, scope, end, is_set_late
):
    if not is_set_late:
        configure(db, scope)
    enqueue(db, 2)
    ((id, token),) = soon(lambda: claim(db, 1)).items()
    if is_set_late:
        configure(db, scope)
    waiting = connect()
    waiting.execute("listen pgqueue")
    assert claim(waiting) == {}
    assert one(waiting, "select pgqueue.rest(array['q']) > interval '20 s'")
    db.execute(ENDS[end], {"id": id, "token": token})
    assert [n.channel for n in waiting.notifies(timeout=10, stop_after=1)] == [
        "pgqueue"
    ]
    assert len(claim(waiting)) == 1


@pytest.mark.parametrize("scope", RUNNING)
def test_the_place_of_a_dead_worker_is_free_when_its_lease_has_expired(
    db, connect, scope
):
    configure(db, scope)
    first, _ = enqueue(db, 2)
    ((id, token),) = claim(db).items()
    other = connect()
    assert claim(other) == {}
    db.execute("update pgqueue.job set lease_expires_at = now() where id = %s", (id,))
    assert claim(other).keys() == {first}
    with pytest.raises(psycopg.Error) as lost:
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert lost.value.sqlstate == "PQ002"
    assert claim(db) == {}, "a lost worker frees nothing when it comes back"


@scopes
def test_a_cap_that_is_set_beside_an_open_claim_holds_for_later_claims(
    db, connect, scope
):
    other = connect()
    enqueue(db, 4)
    with db.transaction():
        assert len(claim(db, 1)) == 1
        configure(other, scope)
        # To rates an open claim is not known.
        assert len(claim(other)) == (scope not in RUNNING)
    assert claim(other) == {}


@pytest.mark.sample(10)
@pytest.mark.parametrize("ends", ["committed", "rolled back", "killed"])
@scopes
def test_a_claim_finds_nothing_beside_a_cap_that_is_not_committed(
    db, connect, scope, ends
):
    other = connect()
    enqueue(db, 4)
    other.execute("begin")
    configure(other, scope)
    assert claim(db) == {}
    assert one(db, "select extract(epoch from pgqueue.rest('{q}'))") == Decimal("0.02")
    assert claim(other) == {}, "nobody sees its permits yet"
    if ends == "killed":
        db.execute("select pg_terminate_backend(%s)", (other.info.backend_pid,))
        assert soon(lambda: len(claim(db))) == 4
    elif ends == "rolled back":
        other.rollback()
        assert len(claim(db)) == 4
    else:
        other.commit()
        assert len(claim(db)) == 1
        assert claim(db) == {}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_that_is_not_committed_holds_off_no_other_queue_and_not_for_long(
    db, connect, limit
):
    other = connect()
    enqueue(db, 4)
    db.execute("select pgqueue.configure('other', lease => '1 minute')")
    db.execute("select pgqueue.enqueue('other')")
    with other.transaction():
        set_limit(other, limit, 1)
        assert claim(db) == {}
        jobs = db.execute("select from pgqueue.claim('other', 'w')").fetchall()
        assert len(jobs) == bool(LIMITS[limit])
        # As if 5 seconds had gone by.
        db.execute("select setval('pgqueue._cell_held_off', 1)")
        assert len(claim(db)) == 4


@pytest.mark.needs_hints  # permits are made for groups that have tickets
def test_a_limit_for_many_groups_holds_off_claims_until_it_is_applied(db, connect):
    other = connect()
    db.execute(
        "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[2500]),"
        " group_keys => array(select 'g ' || n from generate_series(1, 2500) as n))"
    )
    # As if it took more than 5 seconds to make the permits of the first thousand.
    db.execute("create sequence steps")
    db.execute(
        "create function slow() returns trigger language plpgsql as"
        " $$ begin if nextval('public.steps') = 1 then perform setval('pgqueue._cell_held_off', 1); end if; return null; end $$"
    )
    db.execute(
        "create trigger slow after insert on pgqueue.permit execute function slow()"
    )
    with other.transaction():
        other.execute("select pgqueue.configure('q', group_limit => 1)")
        assert one(db, "select last_value from steps") == 3
        assert claim(db) == {}
    assert soon(lambda: claim(db))


@pytest.fixture
def stopped_claim(db, connect):
    """The jobs of a claim of two that stands still, behind its settings, until it is asked."""
    slow, locker = connect(), connect()
    pid = slow.info.backend_pid
    with ThreadPoolExecutor(1) as pool:

        @contextmanager
        def stopped() -> Iterator[Callable[[], dict]]:
            with locker.transaction():
                locker.execute("lock table pgqueue.ticket in access exclusive mode")
                blocked = "select pg_blocking_pids(%s) <> '{}'"
                while True:
                    slow.execute("begin")
                    claimed = pool.submit(claim, slow, 2, "1 min")
                    assert soon(lambda c=claimed: one(db, blocked, pid) or c.done())
                    if not claimed.done():
                        break
                    # After 100 ms a claim is content with the job that it has.
                    slow.rollback()
                os.kill(pid, signal.SIGSTOP)

            def go_on() -> dict:
                os.kill(pid, signal.SIGCONT)
                jobs = claimed.result()
                slow.commit()
                return jobs

            try:
                yield go_on
            finally:
                os.kill(pid, signal.SIGCONT)

        yield stopped


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_claim_that_stands_still_while_a_limit_is_set_takes_nothing(
    db, stopped_claim, limit, before
):
    if before:
        set_limit(db, limit, before)
    enqueue(db, 6)
    with stopped_claim() as go_on:
        set_limit(db, limit, 1)
        ((id, token),) = claim(db).items()
        assert go_on() == {}
    assert claim(db) == {}
    db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert len(soon(lambda: claim(db))) == 1


@pytest.mark.parametrize(
    "limit", [None, "max_running of the queue", "limit of each group"]
)
def test_a_claim_that_stands_still_while_a_limit_of_another_queue_is_set_goes_on(
    db, stopped_claim, limit
):
    if limit:
        set_limit(db, limit, 3)
    enqueue(db, 6)
    with stopped_claim() as go_on:
        db.execute("select pgqueue.configure('other', max_running => 1)")
        assert len(go_on()) == 2


@pytest.mark.needs_hints  # it is stopped where it looks at the group
def test_a_claim_that_takes_nothing_gives_back_what_it_has_taken(db, stopped_claim):
    db.execute("select pgqueue.configure('q', kind => 'x', max_running => 1)")
    db.execute(
        "select pgqueue.enqueue('q', kind => 'x', priority => 5) from generate_series(1, 3)"
    )
    db.execute("select pgqueue.enqueue('q', kind => 'y', group_key => 'g')")
    # So that it looks at no ticket before it has one job, and no permit for a second.
    soon_us = "pgqueue._since_2020(clock_timestamp() + interval '30 seconds')"
    db.execute(f"select setval('pgqueue._cell_groups_due', {soon_us})")
    with stopped_claim() as go_on:
        db.execute("select pgqueue.configure('q', kind => 'x', max_running => 2)")
        assert go_on() == {}
    assert column(db, "select state from pgqueue.jobs") == ["ready"] * 4
    assert len(claim(db)) == 3


def test_a_stranger_who_holds_the_lock_of_limits_keeps_nobody_from_setting_one(
    db, connect
):
    stranger = connect()
    enqueue(db, 4)
    stranger.execute(
        "select pg_advisory_lock(7366515, n) from generate_series(0, 256) as n"
    )
    configure(db, "max_running of the queue")
    assert len(claim(db)) == 1
    assert claim(db) == {}


def test_a_claim_that_commits_while_another_asks_whether_it_still_runs_is_counted(
    db, connect
):
    """At different moments after the other claim began; it asks of each job by itself."""
    db.execute("select pgqueue.configure('q', lease => '1 h')")
    other = connect()
    for moment in range(60 if LONG else 15):
        enqueue(db, 220)
        first = connect(autocommit=False)
        assert len(claim(first, 200)) == 200
        db.execute("select pgqueue.configure('q', max_running => 5)")
        other.pgconn.send_query(b"select pgqueue.claim('q', 'w', 5)")
        time.sleep((moment % 15) / 2000)
        first.commit()
        while answer := other.pgconn.get_result():
            assert answer.ntuples == 0, "200 jobs run, and at most 5 may"
        first.close()
        db.execute("select pgqueue.configure('q', reset => true)")
        db.execute("delete from pgqueue.job; delete from pgqueue.permit")


def set_limit(db: psycopg.Connection, limit: str, most: int) -> None:
    if LIMITS[limit]:
        text = f"'q', {LIMITS[limit].replace('=> 1', f'=> {most}')}"
    else:
        text = f"null, max_running => {most}"
    db.execute(f"select pgqueue.configure({text})")


@pytest.mark.sample(10)
@pytest.mark.waits_for_sweeps
@pytest.mark.parametrize("ends", ["completed", "failed", "rolled back"])
@pytest.mark.parametrize("before", [None, 3])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_claim_that_does_not_see_a_new_limit_counts(db, connect, limit, before, ends):
    other = connect()
    enqueue(db, 9)
    if before:
        set_limit(db, limit, before)
        # Where hints get lost, only a claim creates permits, and not for itself.
        ids, tokens = zip(*soon(lambda: claim(db, 1)).items(), strict=True)
        db.execute("select pgqueue.release(%s, %s)", (list(ids), list(tokens)))
    db.execute("begin")
    ((id, token),) = soon(lambda: claim(db, 1)).items()
    set_limit(other, limit, 1)
    assert claim(other) == {}, "it may be running"
    if ends == "rolled back":
        db.rollback()
    else:
        db.commit()
        assert claim(other) == {}, "it runs"
        db.execute(
            ENDS["complete" if ends == "completed" else "retry"],
            {"id": id, "token": token},
        )
    assert len(soon(lambda: claim(other))) == 1
    assert claim(db) == {}


@pytest.mark.waits_for_sweeps
@pytest.mark.parametrize("limit", LIMITS)
def test_an_open_claim_has_one_place_of_a_new_limit(db, connect, limit):
    other = connect()
    enqueue(db, 9)
    with db.transaction(force_rollback=True):
        assert len(soon(lambda: claim(db, 1))) == 1
        set_limit(other, limit, 3)
        assert len(soon(lambda: claim(other))) == 2
        assert claim(other) == {}
    assert len(soon(lambda: claim(other))) == 1
    assert claim(other) == {}


@pytest.mark.needs_hints
@pytest.mark.parametrize("end", [end for end in ENDS if end != "delete"])
@pytest.mark.parametrize("limit", LIMITS)
def test_jobs_that_run_before_their_first_limit_make_way_at_once(db, limit, end):
    enqueue(db, 3)
    jobs = claim(db, 1) | claim(db, 1)
    set_limit(db, limit, 1)
    for id, token in jobs.items():
        assert claim(db) == {}
        db.execute(ENDS[end], {"id": id, "token": token})
    assert len(claim(db)) == 1


@pytest.mark.waits_for_sweeps
@pytest.mark.parametrize("limit", LIMITS)
def test_jobs_that_run_can_end_before_their_first_limit_is_committed(
    db, connect, limit
):
    other = connect()
    enqueue(db, 4)
    jobs = soon(lambda: claim(db, 2)) | soon(lambda: claim(db, 1))
    ids, tokens = list(jobs), list(jobs.values())
    db.execute("set lock_timeout = '1 ms'")
    with other.transaction():
        set_limit(other, limit, 1)
        extend = "select extend.status from pgqueue.extend(%s, %s, '1 h')"
        assert column(db, extend, ids, tokens) == ["held"] * len(ids)
        until = "select min(lease_expires_at) > now() + '30 min' from pgqueue.job where id = any (%s)"
        assert one(db, until, ids)
        db.execute("select pgqueue.complete(%s, %s)", (ids[0], tokens[0]))
        assert claim(db) == {}
    for id, token in list(jobs.items())[1:]:
        for _ in range(5):
            assert claim(db) == {}, "others run"
            db.execute("update pgqueue.ticket set at = now() - interval '1 s'")
        # So that nobody relies on their ends, which do not know of the limit.
        assert one(db, "select pgqueue.rest(array['q']) <= interval '1 s'")
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert len(soon(lambda: claim(db))) == 1
    assert claim(db) == {}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_that_is_lowered_while_others_have_locked_its_permits_holds(
    db, connect, limit
):
    other = connect()
    enqueue(db, 9)
    set_limit(db, limit, 3)
    held = claim(db, 3)
    first = one(db, "select job_id from pgqueue.permit where place = 1")
    db.execute("select pgqueue.complete(%s, %s)", (first, held.pop(first)))
    with other.transaction():
        other.execute("select from pgqueue.permit for update")
        set_limit(db, limit, 1)
    for id, token in held.items():
        assert claim(db) == {}, "more run than may"
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert len(soon(lambda: claim(db))) == 1
    permits = one(db, "select count(*) from pgqueue.permit")
    for most in (2, 1, 3) * 5:
        set_limit(db, limit, most)
        claim(db)
    assert one(db, "select count(*) from pgqueue.permit") <= permits + 1


@pytest.mark.parametrize("limit", LIMITS)
def test_a_claim_that_goes_by_an_old_limit_leaves_the_marks_of_a_lower_one(db, limit):
    """It has read the limit before the change, and looks at the permits after that."""
    enqueue(db, 9)
    set_limit(db, limit, 2)
    held = claim(db, 2)
    set_limit(db, limit, 1)
    db.execute(
        "select pgqueue._review_permits('q', p.kind, array[p.group_key], '{2}', clock_timestamp(), null)"
        " from pgqueue.permit as p where p.is_surplus"
    )
    first = one(db, "select job_id from pgqueue.permit where place = 1")
    db.execute("select pgqueue.complete(%s, %s)", (first, held.pop(first)))
    assert claim(db) == {}, "more run than may"
    for id, token in held.items():
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert len(soon(lambda: claim(db))) == 1


def test_a_large_cap_that_is_set_while_its_permits_are_locked_is_open_again_at_once(
    db, connect
):
    other = connect()
    enqueue(db, 100)
    configure(db, "max_running of the queue", 1000)
    with other.transaction():
        other.execute("select from pgqueue.permit for update")
        configure(db, "max_running of the queue", 500)
    assert len(claim(db)) == 10


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_that_is_lowered_and_removed_leaves_nothing_behind(db, connect, limit):
    enqueue(db, 9)
    set_limit(db, limit, 3)
    assert len(claim(db)) == 3
    set_limit(db, limit, 1)
    queue = "null" if limit == "cap of all queues" else "'q'"
    for kind, group in ("null", "null"), ("'x'", "null"), ("null", "'g'"):
        db.execute(
            f"select pgqueue.configure({queue}, kind => {kind}, group_key => {group}, reset => true)"
        )
    configure(db, "rate of a group", 2)
    configure(db, "rate of a kind", 4)
    assert len(claim(db)) == 2


@pytest.mark.needs_hints  # without them each claim comes twice, and what one has made the next uses
@scopes
def test_a_cap_of_all_queues_holds_where_two_sessions_meet_it_first(db, connect, scope):
    """Neither sees the permits that the other creates."""
    other = connect()
    enqueue(db, 6)
    # As if they had been enqueued before, and committed after it was set.
    db.execute(f"select pgqueue.configure(null, {SCOPES[scope]})")
    db.execute("truncate pgqueue.permit")
    with db.transaction():
        claim(db)
        assert claim(other) == {}, "what was just made is not used"
    for _ in range(4):
        claim(db)
        claim(other)
    assert one(db, "select count(*) from pgqueue.job where token is not null") == 1
    assert one(db, "select count(*) from pgqueue.permit") == 1, "the copies are gone"


@pytest.mark.sample(2)
@pytest.mark.waits_for_sweeps
@scopes
def test_caps_are_full_and_never_over_between_eight_sessions(db, connect, scope):
    """A claim that finds nothing has found a full cap, or no job."""
    configure(db, scope, 3)
    if "rate" in scope:
        db.execute(
            "update pgqueue.queue set rate_period = '50 ms'; select pgqueue._resolve('q')"
        )
    enqueue(db, 60 if "rate" in scope else 400 if LONG else 150)
    deadline = time.monotonic() + 60

    def work(seed: int) -> None:
        rng, conn = random.Random(seed), connect()
        while time.monotonic() < deadline:
            with conn.transaction(force_rollback=rng.random() < 0.1) as transaction:
                # They may wait for each other to extend a table.
                jobs = claim(conn, rng.choice([1, 2, 10]), wait="10 s")
            if "rate" not in scope:
                running = one(
                    conn, "select count(*) from pgqueue.job where token is not null"
                )
                assert running <= 3, running
            if jobs and not transaction.force_rollback:
                conn.execute(
                    "insert into begun select claimed_at from pgqueue.job where id = any(%s)",
                    (list(jobs),),
                )
                for id, token in jobs.items():
                    end = rng.choice(
                        ["complete", "complete_many", "complete", "finish"]
                    )
                    conn.execute(ENDS[end], {"id": id, "token": token})
            elif not jobs and not one(conn, "select count(*) from pgqueue.job"):
                return

    db.execute("create table begun (at timestamptz)")
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result()
    assert one(db, "select count(*) from pgqueue.job") == 0
    if "rate" in scope:
        assert (
            one(
                db,
                "select max(n) from (select count(*) over (order by at range between "
                "interval '49.999 ms' preceding and current row) as n from begun) as w",
            )
            == 3
        )


def test_a_claim_waits_for_no_lock_on_permits(db, connect):
    for scope in SCOPES:
        configure(db, scope)
    enqueue(db, 3)
    other = connect()
    with other.transaction():
        other.execute("select from pgqueue.permit for update")
        assert claim(db) == {}
        assert other.info.transaction_status == pq.TransactionStatus.INTRANS
    assert len(soon(lambda: claim(db))) == 1


@pytest.mark.needs_hints  # where a permit was not given back it is known that its job has ended
@pytest.mark.parametrize("ends", [True, False])
def test_a_lower_cap_holds_beside_an_attempt_that_may_be_ending(db, connect, ends):
    other = connect()
    configure(db, "max_running of the queue", 3)
    enqueue(db, 6)
    held = claim(db, 3)
    # The one that has the last place goes on, or ends.
    last = one(
        db,
        "select job_id from pgqueue.permit where place = 3 and free_at = 'infinity' limit 1",
    )
    for id, token in held.items():
        if id != last:
            db.execute("select pgqueue.complete(%s, %s)", (id, token))
    with other.transaction(force_rollback=not ends):
        other.execute("select pgqueue.complete(%s, %s)", (last, held[last]))
        configure(db, "max_running of the queue", 2)
        assert claim(db) == {}, "nobody knows yet"
    assert len(claim(db)) == (2 if ends else 1)


@pytest.mark.needs_hints
def test_a_group_whose_job_a_cap_keeps_back_does_not_count_as_at_its_rate(db):
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    db.execute("select pgqueue.configure('q', kind => 'x', max_running => 1)")
    db.execute(
        "select pgqueue.configure('q', group_key => '*', rate_limit => 1, rate_period => '1 day')"
    )
    db.execute(
        "select pgqueue.enqueue('q', kind => 'x', group_key => g) from unnest('{a,b,c}'::text[]) as g"
    )
    db.execute("select from pgqueue.claim('q', 'w', 5)")
    assert not one(db, "select bool_or(is_blocked) from pgqueue.ticket")


@pytest.mark.parametrize("rate", [5, None])
def test_a_full_group_with_permits_of_a_rate_left_is_soon_looked_at_again(db, rate):
    of_rate = "select pgqueue.configure('q', group_key => '*', rate_limit => {}, rate_period => '1 hour')"
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    db.execute(of_rate.format(5))
    enqueue(db, 2)
    assert len(soon(lambda: claim(db, 1))) == 1
    db.execute(of_rate.format("null" if rate is None else rate))
    for _ in range(3):
        assert claim(db) == {}
    # Not in an hour, when the permit to begin is free again.
    assert one(
        db, "select max(at) <= now() + interval '10 seconds' from pgqueue.ticket"
    )


def test_a_rate_that_is_raised_beside_an_open_claim_is_used_at_once(db, connect):
    other = connect()
    configure(db, "rate of a group")
    enqueue(db, 3)
    assert len(soon(lambda: claim(db, 1))) == 1
    with other.transaction():
        # It has the ticket, and sets it by what it has read.
        assert claim(other) == {}
        configure(db, "rate of a group", 10)
    assert len(claim(db)) == 2


@pytest.mark.parametrize("cap", [None, 3])
def test_a_retry_that_has_kept_its_place_is_taken_once_by_a_claim_of_many(db, cap):
    db.execute(
        "select pgqueue.configure('q', group_limit => 2, group_on_retry => 'block')"
    )
    db.execute("select pgqueue.configure('q', max_running => %s)", (cap,))
    first, second, _ = enqueue(db, 3)
    ((id, token),) = soon(lambda: claim(db, 1)).items()
    db.execute("select pgqueue.fail(%s, %s, 'e', '0')", (id, token))
    assert soon(lambda: claim(db, 100)).keys() == {first, second}
    permits = "select cardinality(permits) from pgqueue.job where token is not null"
    assert column(db, permits) == [2 if cap else 1] * 2


def test_each_job_has_its_own_permit_where_some_groups_have_no_limit(db):
    db.execute("select pgqueue.configure('q', group_key => 'g', group_limit => 2)")
    enqueue = "select pgqueue.enqueue('q', group_key => g) from unnest(%s::text[]) as g"
    db.execute(enqueue, (["a", "g", "b", "g", "c"],))
    assert soon(lambda: len(claim(db)) == 5)
    held = (
        "select count(*) from pgqueue.job as j join pgqueue.permit as p on p.job_id = j.id"
        " where j.group_key = 'g' and j.permits = array[p.ctid]"
    )
    assert one(db, held) == 2
    without = "select count(*) from pgqueue.job where group_key <> 'g' and num_nonnulls(permits) = 0"
    assert one(db, without) == 3
