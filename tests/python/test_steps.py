"""Steps, suspended jobs and events, decided between sessions: nothing is done twice, nobody waits for ever."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from conftest import LONG, Connect, column, one, soon
from psycopg import IsolationLevel, errors
from test_plans import pages

pytestmark = pytest.mark.loses_hints
LOOK = "select done from pgqueue.maintain() where task = 'tie loose ends'"
SAVE = "select pgqueue.save_step(%s, %s, %s, %s)"
SUSPEND = "select pgqueue.suspend(%s, %s, %s)"
EMIT = "select pgqueue.emit(%s)"


def claimed(
    db: psycopg.Connection, queue: str = "q", group: str | None = None
) -> tuple[int, int]:
    db.execute("select pgqueue.enqueue(%s, group_key => %s)", [queue, group])
    return again(db, queue)


def again(db: psycopg.Connection, queue: str = "q") -> tuple[int, int]:
    return db.execute(
        "select id, token from pgqueue.claim(%s, 'w')", [queue]
    ).fetchone()


def state(db: psycopg.Connection, id: int) -> str:
    return one(db, "select state from pgqueue.status(%s)", id)


def is_over(db: psycopg.Connection) -> bool:
    """Whether no job waits for an event or job any more, and nothing is left to look at."""
    left = "select count(*) from pgqueue.{}"
    return not any(
        one(db, left.format(table)) for table in ("wait", "dependency", "loose_end")
    )


# emit and suspend at once

ORDERS = sorted(set(itertools.permutations("eeesss")))


def emitter(connect: Connect, level: str) -> psycopg.Connection:
    session = connect(autocommit=False)
    session.isolation_level = getattr(IsolationLevel, level)
    session.execute("set lock_timeout = '5 s'")
    session.commit()
    return session


@pytest.mark.sample(4)
@pytest.mark.parametrize("looks", [False, True], ids=["", "looks"])
@pytest.mark.parametrize("suspends", ["commit", "rollback", "savepoint"])
@pytest.mark.parametrize("emits", ["commit", "rollback", "savepoint"])
@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_an_emit_and_a_suspend_meet_in_any_order(
    db, connect, level, emits, suspends, looks
):
    """Each begins (which takes the old snapshots), calls, and ends; savepoint: what was done first is undone."""
    sessions = {"e": emitter(connect, level), "s": emitter(connect, "READ_COMMITTED")}
    db.execute("set lock_timeout = '5 s'")
    ends = {"e": emits, "s": suspends}
    wrong = []
    # A job of a group takes the longer way.
    for n, (order, group) in enumerate(itertools.product(ORDERS, (None, "g"))):
        event, lease = f"event {n}", claimed(db, group=group)
        calls = {"e": (EMIT, [event]), "s": (SUSPEND, [*lease, event])}
        done = dict.fromkeys("es", 0)
        for who in order:
            session, done[who] = sessions[who], done[who] + 1
            if done[who] == 1:
                session.execute("select count(*) from pgqueue.job")
            elif done[who] == 2:
                if ends[who] == "savepoint":
                    session.execute("savepoint s")
                    session.execute(*calls[who])
                    session.execute("rollback to s")
                session.execute(*calls[who])
            elif ends[who] == "rollback":
                session.rollback()
            else:
                session.commit()
            if looks:
                db.execute(LOOK)
        db.execute(LOOK)
        expected = (
            "running"
            if suspends == "rollback"
            else "blocked"
            if emits == "rollback"
            else "ready"
        )
        found = state(db, lease[0])
        db.execute(LOOK)
        is_left = one(
            db, "select count(*) from pgqueue.wait where job_id = %s", lease[0]
        )
        ends_left = one(db, "select count(*) from pgqueue.loose_end")
        if (found, is_left, ends_left) != (expected, int(expected == "blocked"), 0):
            wrong.append((order, group, found, is_left, ends_left))
        db.execute("delete from pgqueue.job")
        db.execute("delete from pgqueue.wait")
    assert wrong == []


def test_whoever_claims_next_finds_a_job_whose_emit_and_suspend_did_not_meet(
    db, connect
):
    lease = claimed(db)
    emit, suspend = (connect(autocommit=False) for _ in range(2))
    emit.execute(EMIT, ["e"])
    suspend.execute(SUSPEND, [*lease, "e"])
    suspend.commit()
    assert again(db) is None
    emit.commit()
    assert soon(lambda: again(db), 2)[0] == lease[0]
    assert is_over(db)


@pytest.mark.parametrize("begins", ["begin", "savepoint"])
@pytest.mark.parametrize("look", ["rest('{q}', park => false)", "claim('q', 'w')", ""])
def test_an_emit_and_a_suspend_that_both_look_before_they_commit_meet(
    db, connect, look, begins
):
    db.execute(EMIT, ["other"])
    lease = claimed(db)
    emit, suspend = (connect(autocommit=False) for _ in range(2))
    if begins == "savepoint":
        for session in (emit, suspend):
            # What a subtransaction writes has an xid of its own.
            session.execute("create temporary table t (); savepoint s")
    suspend.execute(SUSPEND, [*lease, "e"])
    emit.execute(EMIT, ["e"])
    for session in (suspend, emit):
        session.execute("select setval('pgqueue._cell_due', 1)")
        session.execute(f"select pgqueue.{look}" if look else LOOK)
    for session in (suspend, emit):
        session.commit()
    assert soon(lambda: again(db), 5)[0] == lease[0]
    assert soon(lambda: one(db, LOOK) == 0 and is_over(db), 5)


def test_a_worker_that_rests_while_an_emit_is_open_asks_again_soon(db, connect):
    lease = claimed(db)
    emit = connect(autocommit=False)
    emit.execute(EMIT, ["e"])
    db.execute(SUSPEND, [*lease, "e"])
    seconds = "select extract(epoch from pgqueue.rest('{q}'))::float8"
    assert one(db, seconds) <= 5
    emit.commit()
    db.execute(LOOK)
    assert one(db, seconds) == 0
    assert again(db)[0] == lease[0]


def test_an_emit_wakes_the_workers_of_those_that_wait(db, connect):
    lease = claimed(db)
    db.execute(SUSPEND, [*lease, "e"])
    db.execute("listen pgqueue")
    while one(db, "select pgqueue.rest('{q}')") is not None:
        db.execute(LOOK)
    producer = connect()
    producer.execute(EMIT, ["other"])
    assert list(db.notifies(timeout=0.2)) == []
    producer.execute(EMIT, ["e"])
    assert len(list(db.notifies(timeout=5, stop_after=1))) == 1
    assert soon(lambda: again(db), 2)[0] == lease[0]


def test_an_open_emit_holds_up_nobody_but_who_emits_the_same(db, connect, blocked):
    db.execute("set lock_timeout = '2 s'")
    leases = [claimed(db) for _ in range(5)]
    for lease in leases:
        db.execute(
            "select pgqueue.suspend(%s, %s, 'e', now() + interval '1 day')", lease
        )
    ids = [id for id, _ in leases]
    emit = connect(autocommit=False)
    emit.execute(EMIT, ["e"])
    assert one(db, EMIT, "f") is True
    assert one(db, "select pgqueue.cancel(%s)", ids[0]) == "cancelled"
    db.execute("select pgqueue.reprioritize(%s, 5)", ids[1:2])
    db.execute("select pgqueue.run_now(%s)", ids[1:2])
    assert again(db)[0] == ids[1]
    # Its time has come.
    db.execute("update pgqueue.job set run_at = now() where id = %s", ids[2:3])
    assert again(db)[0] == ids[2]
    with ThreadPoolExecutor(1) as pool:
        other = connect()
        told = pool.submit(one, other, EMIT, "e")
        blocked(other)
        emit.commit()
        assert told.result() is False
    db.execute(LOOK)
    assert [state(db, id) for id in ids[3:]] == ["ready", "ready"]


def test_the_next_emits_when_the_first_is_rolled_back(db, connect, blocked):
    emit, other = connect(autocommit=False), connect()
    emit.execute(EMIT, ["e"])
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(one, other, EMIT, "e")
        blocked(other)
        emit.rollback()
        assert told.result() is True


def test_a_wait_whose_job_is_locked_is_looked_at_again(db, connect):
    lease = claimed(db)
    db.execute(SUSPEND, [*lease, "e"])
    other = connect(autocommit=False)
    other.execute("select pgqueue.reprioritize(%s, 5)", lease[:1])
    db.execute(EMIT, ["e"])
    db.execute(LOOK)
    assert one(db, "select run_at from pgqueue.jobs where id = %s", lease[0]) is None
    other.commit()
    db.execute(LOOK)
    assert again(db)[0] == lease[0]
    assert is_over(db)


def test_waits_whose_jobs_are_locked_hold_up_no_others_of_the_event(db, connect):
    leases = [claimed(db) for _ in range(130)]
    for lease in leases:
        db.execute(SUSPEND, [*lease, "e"])
    ids = [id for id, _ in leases]
    other = connect(autocommit=False)
    other.execute("select pgqueue.reprioritize(unnest(%s), 5)", [ids[:120]])
    db.execute(EMIT, ["e"])
    got = soon(lambda: column(db, "select id from pgqueue.claim('q', 'w', 100)"), 2)
    assert sorted(got) == ids[120:]
    other.commit()
    while len(got) < len(ids):
        db.execute(LOOK)
        got += column(db, "select id from pgqueue.claim('q', 'w', 100)")
    assert is_over(db)


def test_nothing_stays_behind_of_a_thousand_emits_and_suspends_at_once(db, connect):
    """Four sessions emit what four others suspend for, in transactions of any length."""
    each = 60
    leases = {n: claimed(db, f"q {n % 4}") for n in range(4 * each)}
    begin = threading.Barrier(8)

    def emits(part: int) -> None:
        session = connect(autocommit=False)
        begin.wait()
        for n in range(part, 4 * each, 4):
            session.execute(EMIT, [f"e {n}"])
            if n % 3 != 1:
                session.commit()
        session.commit()

    def suspends(part: int) -> None:
        session = connect(autocommit=False)
        begin.wait()
        for n in range(part, 4 * each, 4):
            session.execute(SUSPEND, [*leases[n], f"e {n}"])
            if n % 5 != 1:
                session.commit()
        session.commit()

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(do, part) for part in range(4) for do in (emits, suspends)]
        for each_one in done:
            each_one.result(60)
    got: set[int] = set()

    def drained() -> bool:
        queues = [f"q {n}" for n in range(4)]
        got.update(
            column(db, "select id from pgqueue.claim_from(%s, 'w', 300)", queues)
        )
        return len(got) == len(leases)

    assert soon(drained, 20)
    assert one(db, "select count(*) from pgqueue.wait") == 0


# Waits for jobs


@pytest.mark.sample(2)
@pytest.mark.parametrize("run_at", [None, "2999-01-01 00:00 UTC"])
@pytest.mark.parametrize("looks", [False, True])
def test_a_suspend_and_the_end_of_what_it_waits_for_meet_in_any_order(
    db, connect, run_at, looks
):
    suspend = "select pgqueue.suspend(%s, %s, run_at => %s, after => array[%s::bigint])"
    ends = {
        "complete": "select pgqueue.complete(%s, %s)",
        "die": "select pgqueue.fail(%s, %s, 'e', permanent => true)",
    }
    for order, how in itertools.product(
        sorted(set(itertools.permutations("eess"))), ends
    ):
        first, lease = claimed(db, "first"), claimed(db)
        sessions = {who: connect(autocommit=False) for who in "es"}
        calls = {
            "e": (ends[how], first),
            "s": (suspend, [*lease, run_at, first[0]]),
        }
        for who in order:
            if sessions[who].info.transaction_status == 0:
                sessions[who].execute(*calls[who])
            else:
                sessions[who].commit()
            if looks:
                db.execute(LOOK)
        soon(lambda: db.execute(LOOK) and state(db, lease[0]) == "ready")  # noqa: B023
        assert state(db, lease[0]) == "ready", (order, how)
        assert one(db, "select count(*) from pgqueue.wait") == 0
        assert again(db)[0] == lease[0]
        for session in sessions.values():
            session.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("run_at", [None, "2999-01-01 00:00 UTC"])
def test_a_job_is_due_when_the_last_two_that_it_was_suspended_for_end_at_once(
    db, connect, run_at, order
):
    leases = [claimed(db, "first") for _ in range(2)]
    lease = claimed(db)
    db.execute(
        "select pgqueue.suspend(%s, %s, 'e', %s, %s)",
        [*lease, run_at, [id for id, _ in leases]],
    )
    sessions = [connect(autocommit=False) for _ in range(2)]
    for session, first in zip(sessions, leases, strict=True):
        session.execute("select pgqueue.complete(%s, %s)", first)
    for place in order:
        assert state(db, lease[0]) == ("scheduled" if run_at else "blocked")
        sessions[place].commit()
    assert soon(lambda: db.execute(LOOK) and state(db, lease[0]) == "ready")
    assert one(db, "select count(*) from pgqueue.wait") == 0


def test_a_second_wait_is_not_ended_by_what_the_first_was_for(db):
    first, lease = claimed(db, "first"), claimed(db)
    db.execute(
        "select pgqueue.suspend(%s, %s, 'e', after => array[%s::bigint])",
        [*lease, first[0]],
    )
    db.execute("select pgqueue.run_now(%s)", lease[:1])
    db.execute(SUSPEND, [*again(db), "f"])
    db.execute("select pgqueue.complete(%s, %s)", first)
    db.execute(EMIT, ["e"])
    db.execute(LOOK)
    assert state(db, lease[0]) == "blocked"
    db.execute(EMIT, ["f"])
    assert state(db, lease[0]) == "ready"


FOR_ENDS = "select pgqueue.suspend(%s, %s, %s, %s, %s)"


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("verb", ["suspend", "finish"])
def test_a_job_suspended_for_the_same_beside_its_open_end_waits_for_what_is_left(
    db, connect, verb, commits
):
    first, second = claimed(db, "first"), claimed(db, "first")
    ids = [first[0], second[0]]
    lease = claimed(db)
    db.execute(FOR_ENDS, [*lease, None, None, ids])
    db.execute("set lock_timeout = '5 s'")
    end = connect(autocommit=False)
    end.execute("select pgqueue.complete(%s, %s)", first)
    db.execute("select pgqueue.run_now(%s)", lease[:1])
    lease = again(db)
    if verb == "suspend":
        db.execute(FOR_ENDS, [*lease, None, "2999-01-01 00:00 UTC", ids])
    else:
        finish = "select status from pgqueue.finish(array[%s], array[%s], '{suspend}', array[%s])"
        assert one(db, finish, *lease, f'{{"after": {ids}}}') == "suspended"
    if commits:
        end.commit()
    else:
        end.rollback()
        db.execute("select pgqueue.complete(%s, %s)", first)
    db.execute(LOOK)
    assert state(db, lease[0]) in ("blocked", "scheduled")
    db.execute("select pgqueue.complete(%s, %s)", second)
    assert soon(lambda: db.execute(LOOK) and state(db, lease[0]) == "ready")


@pytest.mark.needs_hints  # an end that does not look cuts nothing
@pytest.mark.parametrize("commits", [True, False])
def test_a_job_suspended_for_the_same_whose_end_is_open_waits_for_that(
    db, connect, blocked, commits
):
    first, second = claimed(db, "first"), claimed(db, "first")
    lease = claimed(db)
    db.execute(FOR_ENDS, [*lease, None, None, [first[0], second[0]]])
    end = connect(autocommit=False)
    end.execute("select pgqueue.complete(%s, %s)", first)
    db.execute("select pgqueue.run_now(%s)", lease[:1])
    lease = again(db)
    suspend = connect()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(suspend.execute, FOR_ENDS, [*lease, None, None, [first[0]]])
        blocked(suspend)
        end.commit() if commits else end.rollback()
        call.result(5)
    if not commits:
        db.execute(LOOK)
        assert state(db, lease[0]) == "blocked"
        db.execute("select pgqueue.complete(%s, %s)", first)
    assert soon(lambda: db.execute(LOOK) and state(db, lease[0]) == "ready")


@pytest.mark.parametrize(
    "terms", ["'e'", "run_at => '2999-01-01 00:00 UTC'", "after => array[%s::bigint]"]
)
def test_a_tie_that_was_being_cut_when_its_job_became_due_ends_no_later_wait(
    db, connect, terms
):
    first, second, third = (claimed(db, "first") for _ in range(3))
    lease = claimed(db)
    db.execute(FOR_ENDS, [*lease, None, None, [first[0], second[0]]])
    end = connect(autocommit=False)
    end.execute("select pgqueue.complete(%s, %s)", first)
    db.execute("select pgqueue.run_now(%s)", lease[:1])
    end.rollback()
    values = [*again(db), third[0]][: 2 + terms.count("%s")]
    db.execute(f"select pgqueue.suspend(%s, %s, {terms})", values)
    before = state(db, lease[0])
    db.execute("select pgqueue.complete(%s, %s)", first)
    db.execute(LOOK)
    assert state(db, lease[0]) == before != "ready"
    assert one(db, "select count(*) from pgqueue.wait") == 1


# Steps


def test_a_step_of_a_transaction_that_is_rolled_back_was_never_saved(db, connect):
    lease = claimed(db)
    other = connect(autocommit=False)
    other.execute(SAVE, [*lease, "a", "1"])
    other.rollback()
    other.execute(SAVE, [*lease, "kept", "1"])
    other.execute("savepoint s")
    other.execute(SAVE, [*lease, "b", "1"])
    other.execute("rollback to s")
    assert one(other, SAVE, *lease, "b", "2") == 2
    other.commit()
    rows = db.execute("select name, value from pgqueue.steps(%s)", lease[:1])
    assert rows.fetchall() == [("kept", 1), ("b", 2)]


@pytest.mark.parametrize("end", ["commit", "rollback", "complete"])
def test_of_two_that_save_one_step_at_once_the_first_wins(db, connect, blocked, end):
    lease = claimed(db)
    first, second = connect(autocommit=False), connect()
    assert one(first, SAVE, *lease, "a", "1") == 1
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(one, second, SAVE, *lease, "a", "2")
        blocked(second)
        if end == "complete":
            first.execute("select pgqueue.complete(%s, %s)", lease)
        first.rollback() if end == "rollback" else first.commit()
        if end == "complete":
            with pytest.raises(psycopg.Error) as refused:
                told.result(20)
            assert refused.value.sqlstate == "PQ002"
        else:
            assert told.result(20) == (2 if end == "rollback" else 1)
    if end == "complete":
        assert one(db, "select count(*) from pgqueue.step") == 0


@pytest.mark.parametrize("loser", ["stale", "holder"])
def test_a_stale_save_and_one_of_a_transaction_that_claims_end_by_one_error(
    db, connect, blocked, loser
):
    """The first has written the step and waits for the job, the other the other way round."""
    stale, holder = connect(), connect(autocommit=False)
    lease = claimed(db)
    db.execute("update pgqueue.job set lease_expires_at = now() - interval '1 s'")
    stale.execute(f"set deadlock_timeout = {500 if loser == 'stale' else 60_000}")
    holder.execute(f"set deadlock_timeout = {500 if loser == 'holder' else 60_000}")
    held = again(holder)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one, stale, SAVE, *lease, "a", "1")
        blocked(stale)
        second = pool.submit(one, holder, SAVE, *held, "a", "2")
        with pytest.raises(psycopg.errors.DeadlockDetected):
            (first if loser == "stale" else second).result(20)
        if loser == "stale":
            assert second.result(20) == 2
            holder.commit()
        else:
            holder.rollback()
            # The claim has not happened, and nobody has recovered the job yet.
            assert first.result(20) == 1
    saved = column(db, "select value from pgqueue.steps(%s)", lease[0])
    assert saved == [2 if loser == "stale" else 1]


def test_nobody_else_gets_a_job_whose_step_is_not_committed_and_heartbeats_go_on(
    db, connect
):
    db.execute("set lock_timeout = '2 s'")
    lease = claimed(db)
    other = connect(autocommit=False)
    other.execute(SAVE, [*lease, "a", "1"])
    extend = "select status from pgqueue.extend(array[%s], array[%s], '1 hour')"
    assert one(db, extend, *lease) == "held"
    left = "select lease_left > '50 minutes' from pgqueue.running"
    assert one(db, left)
    db.execute("update pgqueue.job set lease_expires_at = now() - interval '1 hour'")
    assert again(db) is None
    assert one(db, "select pgqueue.reap()") == 0
    other.commit()
    id, token = soon(lambda: again(db))
    assert (id, token > lease[1]) == (lease[0], True)
    assert column(db, "select name from pgqueue.steps(%s)", id) == ["a"]


def test_a_save_waits_for_who_is_just_recovering_the_job_and_is_then_refused(
    db, connect, blocked
):
    lease = claimed(db)
    db.execute("update pgqueue.job set lease_expires_at = now() - interval '1 hour'")
    other = connect()
    with ThreadPoolExecutor(1) as pool:
        with db.transaction():
            assert one(db, "select pgqueue.reap()") == 1
            told = pool.submit(one, other, SAVE, *lease, "a", "1")
            blocked(other)
        with pytest.raises(psycopg.Error) as refused:
            told.result(20)
    assert refused.value.sqlstate == "PQ002"
    assert column(db, "select name from pgqueue.steps(%s)", lease[0]) == []


def test_run_now_that_waits_for_an_open_suspend_ends_it(db, connect, blocked):
    lease = claimed(db)
    operator = connect()
    with db.transaction():
        db.execute(
            "select pgqueue.suspend(%s, %s, run_at => now() + '1 hour', step => 'nap')",
            lease,
        )
        hurrying = threading.Thread(
            target=operator.execute, args=("select pgqueue.run_now(%s)", lease[:1])
        )
        hurrying.start()
        blocked(operator)
    hurrying.join()
    assert one(db, "select count(*) from pgqueue.wait") == 0
    (saved,) = db.execute("select name, value from pgqueue.steps(%s)", lease[:1])
    assert saved == ("nap", "run_now")
    assert again(db)[0] == lease[0]


def test_steps_and_the_completion_of_a_transaction_are_one(db, connect):
    lease = claimed(db)
    other = connect(autocommit=False)
    other.execute(SAVE, [*lease, "a", "1"])
    other.execute("select pgqueue.complete(%s, %s)", lease)
    other.rollback()
    assert column(db, "select name from pgqueue.steps(%s)", lease[0]) == []
    assert state(db, lease[0]) == "running"


# Results


def test_the_callback_of_a_batch_gets_the_results_of_its_jobs_page_by_page(db):
    batch = one(db, "select pgqueue.create_batch('done')")
    ids = []
    for jobs in 1500, 1000:
        ids += column(
            db,
            "select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[%s]), batch_id => %s)",
            jobs,
            batch,
        )
        # As if other jobs had been enqueued in between.
        db.execute("select setval('pgqueue.job_id_seq', %s)", [ids[-1] + 50_000])
    db.execute("select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[500]))")
    db.execute("select pgqueue.close_batch(%s)", [batch])
    db.execute(
        "select count(*) from ("
        " select array_agg(id) as ids, array_agg(token) as tokens, array_agg(to_jsonb(id)) as results"
        " from pgqueue.claim('q', 'w', 3000)) as c,"
        " lateral pgqueue.complete_many(c.ids, c.tokens, c.results)"
    )
    db.execute(LOOK)
    lease, found = again(db, "done"), []
    while page := db.execute(
        "select id, outcome, result from pgqueue.results_of(%s, %s, %s)",
        [*lease, found[-1][0] if found else None],
    ).fetchall():
        found += page
    assert found == [(id, "completed", id) for id in ids]


def test_a_payload_that_names_a_batch_is_no_callback(db):
    batch = one(db, "select pgqueue.create_batch('done')")
    db.execute("select pgqueue.enqueue('q', batch_id => %s)", [batch])
    db.execute("select pgqueue.close_batch(%s)", [batch])
    db.execute("select pgqueue.complete(%s, %s, '7')", again(db))
    db.execute(LOOK)
    db.execute(
        "select pgqueue.enqueue('spy', jsonb_build_object('batch', jsonb_build_object('id', %s::bigint)))",
        [batch],
    )
    results = "select result from pgqueue.results_of(%s, %s)"
    assert column(db, results, *again(db, "spy")) == []
    assert column(db, results, *again(db, "done")) == [7]


def test_results_may_be_read_as_often_as_the_job_runs_and_after_a_redrive(db):
    first = claimed(db, "first")
    db.execute(
        "select pgqueue.enqueue('q', after => array[%s::bigint], unique_key => 'k')",
        first[:1],
    )
    db.execute("select pgqueue.complete(%s, %s, '7')", first)
    results = "select result from pgqueue.results_of(%s, %s)"
    for end in ("fail(%s, %s, 'e', '0')", "fail(%s, %s, 'e', permanent => true)"):
        lease = soon(lambda: again(db))
        assert column(db, results, *lease) == [7]
        db.execute(f"select pgqueue.{end}", lease)
        with pytest.raises(psycopg.Error) as refused:
            db.execute(results, lease)
        assert refused.value.sqlstate == "PQ002"
    db.execute("select pgqueue.redrive_job(%s)", lease[:1])
    assert column(db, results, *again(db)) == [7]


# A million


@pytest.mark.needs_hints
def test_very_many_jobs_that_wait_make_nothing_slower(db):
    """But for a few levels of the indexes."""
    calls = {
        "claim": "select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')",
        "emit": "select pgqueue.emit('e' || nextval('n'))",
        "meet": "select pgqueue.suspend(id, token, 'm' || nextval('n')) from pgqueue.claim('q', 'w')",
        "save": "select pgqueue.save_step(id, token, 's') from pgqueue.claim('q', 'w')",
        "enqueue": "select pgqueue.enqueue('q')",
        "rest": "select pgqueue.rest('{q}', park => false)",
        "look": "select pgqueue._tie_loose_ends(1000)",
        "later": "select pgqueue.suspend(id, token, run_at => now() + interval '1 day') from pgqueue.claim('q', 'w')",
    }

    def costs() -> dict[str, int]:
        db.execute(LOOK)
        db.execute(
            "select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[500]))"
        )
        return {
            name: sorted(pages(db, call) for _ in range(7))[3]
            for name, call in calls.items()
        }

    db.execute("create sequence n")
    db.execute("select pgqueue._use_lanes('q')")
    db.execute(SUSPEND, [*claimed(db), "first"])
    costs()
    few = costs()
    db.execute(f"""
        insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)
        select case when n % 2 = 0 then 'infinity'::timestamptz else now() + interval '1 day' end, now(), 0, 20, 'q', 'k', '{{}}'
        from generate_series(1, {1_000_000 if LONG else 200_000}) as n
    """)
    db.execute("""
        insert into pgqueue.wait (job_id, since, event)
        select id, now(), 'w' || id from pgqueue.job where kind = 'k'
    """)
    db.execute("""
        insert into pgqueue.step (job_id, saved_at, place, name, value)
        select id, now(), 1, 's', '1' from pgqueue.job where kind = 'k'
    """)
    db.execute("vacuum analyze pgqueue.job, pgqueue.wait, pgqueue.step")
    costs()
    many = costs()
    assert {n: (few[n], many[n]) for n in few if many[n] > few[n] * 1.5 + 20} == {}


def test_a_repeated_save_or_emit_reads_no_more_of_many(db):
    lease = claimed(db)
    save = f"select pgqueue.save_step({lease[0]}, {lease[1]}, 'n' || nextval('n'))"
    db.execute("create sequence n")
    for _ in range(7):
        db.execute(save)
    few = pages(db, save)
    db.execute(
        "insert into pgqueue.step select %s, now(), n, 'old ' || n, '1' from generate_series(9, 9000) as n",
        lease[:1],
    )
    assert pages(db, save) <= few + 10
    with pytest.raises(errors.ProgramLimitExceeded):
        for _ in range(1010):
            db.execute(save)
