"""What happens between two sessions, tried with two sessions."""

import itertools
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

import psycopg
import pytest
from conftest import LONG, column, one, soon
from psycopg import IsolationLevel, errors

CLAIM = "select id, token from pgqueue.claim('q', 'w')"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(20) as pool:
        yield pool


def claimed(db: psycopg.Connection, **options) -> tuple[int, int]:
    """Enqueue a job and claim it; return its id and token."""
    one(
        db,
        "select pgqueue.enqueue('q', max_attempts => %s)",
        options.get("max_attempts", 20),
    )
    return db.execute(CLAIM).fetchone()


def expire(db: psycopg.Connection) -> None:
    """Let every lease expire at once."""
    db.execute(
        "update pgqueue.job set lease_expires_at = now() - interval '1 second' "
        "where lease_expires_at is not null"
    )


# Transactions


def test_a_job_can_be_claimed_when_its_enqueue_commits_and_not_before(db, connect):
    other = connect()
    with db.transaction():
        db.execute("select pgqueue.enqueue('q')")
        assert other.execute(CLAIM).fetchall() == []
    assert len(other.execute(CLAIM).fetchall()) == 1


@pytest.mark.parametrize("savepoint", [False, True])
def test_a_job_whose_enqueue_is_rolled_back_never_exists(db, savepoint):
    with db.transaction():
        with db.transaction(force_rollback=True):
            db.execute("select pgqueue.enqueue('q')")
        if not savepoint:
            raise psycopg.Rollback
        assert db.execute(CLAIM).fetchall() == []
    assert one(db, "select count(*) from pgqueue.job") == 0


def test_a_claim_that_is_rolled_back_never_happened(db):
    db.execute("select pgqueue.enqueue('q')")
    with db.transaction(force_rollback=True):
        id, token = db.execute(CLAIM).fetchone()
    assert db.execute("select attempt, token from pgqueue.job").fetchall() == [
        (0, None)
    ]
    again = db.execute(CLAIM).fetchone()
    assert again[0] == id and again[1] > token


def test_the_writes_of_a_handler_that_lost_its_lease_roll_back(db, connect):
    db.execute("create table effect (job_id bigint)")
    id, token = claimed(db)
    expire(db)
    assert one(connect(), "select id from pgqueue.claim('q', 'other')") == id
    with pytest.raises(psycopg.Error) as lost, db.transaction():
        db.execute("insert into effect values (%s)", (id,))
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert lost.value.sqlstate == "PQ002"
    assert one(db, "select count(*) from effect") == 0


# One lease, two sessions

ENDS = {
    "complete": "select pgqueue.complete(%(id)s, %(token)s)",
    "complete_many": "select pgqueue.complete_many(array[%(id)s], array[%(token)s])",
    "fail": "select pgqueue.fail(%(id)s, %(token)s, 'boom')",
    "fail for good": "select pgqueue.fail(%(id)s, %(token)s, 'boom', permanent => true)",
    "release": "select pgqueue.release(array[%(id)s], array[%(token)s])",
    "reap": "select nullif(pgqueue.reap(), 0)",
    "recover": "select id from pgqueue.claim('q', 'other')",
}


def attempt(conn: psycopg.Connection, verb: str, lease: dict) -> bool:
    """Try to end an attempt, and return whether this call did. It may raise nothing but PQ002."""
    try:
        # complete returns void, which psycopg shows as an empty text.
        return one(conn, ENDS[verb], lease) is not None
    except psycopg.Error as error:
        assert error.sqlstate == "PQ002", error
        return False


@pytest.mark.sample(24)
@pytest.mark.parametrize("first, second", list(itertools.product(ENDS, repeat=2)))
@pytest.mark.parametrize("commits", [True, False])
def test_an_attempt_ends_once(db, connect, pool, blocked, first, second, commits):
    id, token = claimed(db)
    expire(db)
    lease = {"id": id, "token": token}
    a, b = connect(), connect()
    a.execute("begin")
    attempt(a, first, lease)
    later: Future[bool] = pool.submit(attempt, b, second, lease)
    if second in ("reap", "recover"):
        later.result(20)  # these skip locked jobs
    else:
        blocked(b)
    a.execute("commit" if commits else "rollback")
    won = later.result(20)
    runs = column(db, "select outcome from pgqueue.run where job_id = %s", id)
    living = one(db, "select count(*) from pgqueue.job where id = %s", id)
    dead = one(db, "select count(*) from pgqueue.dead_job where id = %s", id)
    completed = runs.count("completed")
    assert living + dead + completed == 1, "the job is in one place"
    if commits:
        assert len(runs) == (0 if first == "release" else 1), (
            "only the first ended the attempt"
        )
        assert not (won and second not in ("reap", "recover")), "the second was told"
    elif second not in ("reap", "recover"):
        assert len(runs) == (0 if second == "release" else 1), (
            "only the second ended it"
        )


# Jobs that may not begin any more

LATE_ENDS = {
    "claim": "select nullif(count(*), 0) from pgqueue.claim('q', 'w')",
    "reap": "select nullif(pgqueue.reap(), 0)",
    "cancel": "select pgqueue.cancel(min(id)) from pgqueue.job",
    "enqueue": "select pgqueue.enqueue('q', '\"new\"', unique_key => 'k')",
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("first, second", list(itertools.product(LATE_ENDS, repeat=2)))
@pytest.mark.parametrize("commits", [True, False])
def test_a_late_job_is_cancelled_once_and_its_key_is_free(
    db, connect, pool, blocked, first, second, commits
):
    late = one(
        db, "select pgqueue.enqueue('q', unique_key => 'k', expires_at => now())"
    )
    a, b = connect(), connect()
    a.execute("begin")
    one(a, LATE_ENDS[first])
    later = pool.submit(one, b, LATE_ENDS[second])
    if second in ("claim", "reap"):
        assert later.result(20) is None, (
            "these skip locked jobs, and have none to begin"
        )
    else:
        blocked(b)
    a.execute("commit" if commits else "rollback")
    gone = commits and second == "cancel"
    refused = getattr(later.exception(20), "sqlstate", None)
    assert refused == ("PQ001" if gone else None)
    ends = 1 if commits or second in ("cancel", "enqueue") else 0
    assert column(db, "select job_id from pgqueue.run") == [late] * ends
    new = second == "enqueue" or (first == "enqueue" and commits)
    left = ['"new"'] * new + ["{}"] * (1 - ends)
    assert column(db, "select payload::text from pgqueue.job") == left


def test_a_late_job_that_is_replaced_may_begin_again(db, connect, pool, blocked):
    """Whoever had seen that it is late looks again when he has locked it."""
    id = one(db, "select pgqueue.enqueue('q', unique_key => 'k', expires_at => now())")
    clerk, producer = connect(), connect()
    clerk.execute("begin")
    clerk.execute("update pgqueue.job set terms = null")
    later = pool.submit(one, producer, LATE_ENDS["enqueue"])
    blocked(producer)
    clerk.execute("commit")
    assert later.result(20) == id
    assert column(db, "select id from pgqueue.claim('q', 'w')") == [id]


def test_a_job_can_be_completed_after_its_lease_expired_until_it_is_recovered(db):
    id, token = claimed(db)
    expire(db)
    db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert column(db, "select outcome from pgqueue.run") == ["completed"]


def test_a_call_repeated_after_its_answer_was_lost_is_harmless(db, connect):
    """The connection is cut after the query was sent: the client cannot know whether it ran."""
    for n in range(60):
        key = f"order-{n}"
        enqueue = "select pgqueue.enqueue('q', unique_key => %s)"
        lost = connect()
        pid = lost.info.backend_pid
        cut(lost, f"select pgqueue.enqueue('q', unique_key => '{key}')")
        # A unique key stops duplicates only while its job exists: wait for the first enqueue.
        while one(db, "select count(*) from pg_stat_activity where pid = %s", pid):
            pass
        id = one(db, enqueue, key)
        assert (
            one(db, "select count(*) from pgqueue.job where unique_key = %s", key) == 1
        )
        token = one(db, "select token from pgqueue.claim('q', 'w') where id = %s", id)
        cut(connect(), f"select pgqueue.complete({id}, {token})")
        try:
            db.execute("select pgqueue.complete(%s, %s)", (id, token))
        except psycopg.Error as error:
            assert error.sqlstate == "PQ002"
        assert column(db, "select outcome from pgqueue.run where job_id = %s", id) == [
            "completed"
        ]


def cut(conn: psycopg.Connection, query: str) -> None:
    """Send a query, and close the connection before the answer."""
    conn.pgconn.send_query(query.encode())
    conn.pgconn.flush()
    conn.pgconn.finish()


def test_extend_does_not_wait_for_a_handler_that_is_about_to_commit(db, connect):
    id, token = claimed(db)
    other_id, other_token = claimed(db)
    handler = connect()
    with handler.transaction():
        handler.execute("select pgqueue.complete(%s, %s)", (id, token))
        answer = db.execute(
            "select * from pgqueue.extend(array[%s, %s], array[%s, %s], '1 hour')",
            (id, other_id, token, other_token),
        ).fetchall()
        assert answer == [(id, "held"), (other_id, "held")]
    assert one(
        db,
        "select lease_left > interval '59 minutes' from pgqueue.running where id = %s",
        other_id,
    )


def test_a_token_is_not_valid_again_after_a_redrive(db):
    id, token = claimed(db, max_attempts=1)
    expire(db)
    db.execute("select pgqueue.reap()")
    assert column(db, "select pgqueue.redrive()") == [id]
    assert db.execute("select id, attempt from pgqueue.claim('q', 'w')").fetchone() == (
        id,
        1,
    )
    with pytest.raises(psycopg.Error) as lost:
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert lost.value.sqlstate == "PQ002"


@pytest.mark.parametrize(
    "level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
)
@pytest.mark.parametrize(
    "call",
    [
        "claim('q', 'w')",
        "reap()",
        "complete(1, 1)",
        "complete_many(array[1], array[1])",
        "fail(1, 1, 'e')",
        "release(array[1], array[1])",
        "extend(array[1], array[1])",
        "maintain()",
    ],
)
def test_functions_that_deal_with_leases_are_refused_outside_read_committed(
    db, level, call
):
    db.isolation_level = level
    with pytest.raises(errors.ActiveSqlTransaction) as refused:
        with db.transaction():
            db.execute(f"select pgqueue.{call}")
    assert (
        refused.value.diag.message_hint
        and "READ COMMITTED" in refused.value.diag.message_hint
    )


def test_a_claim_does_not_wait_for_row_locks(db, connect):
    ids = column(
        db, "select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[10]))"
    )
    clerk = connect()
    with clerk.transaction():
        clerk.execute(
            "select from pgqueue.job where id = any (%s) for update", (ids[:5],)
        )
        assert column(db, "select id from pgqueue.claim('q', 'w', 10)") == ids[5:]


SCANS = [
    f"enable_{scan}"
    for scan in (
        "indexscan",
        "indexonlyscan",
        "bitmapscan",
        "seqscan",
        "tidscan",
        "sort",
    )
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "off",
    [c for n in (1, 2, 6) for c in itertools.combinations(SCANS, n)],
    ids=lambda c: "-".join(c),
)
def test_a_claim_never_takes_more_than_asked_under_any_plan(db, off):
    db.execute("select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[20]))")
    for setting in off:
        db.execute(f"set {setting} = off")
    assert one(db, "select count(*) from pgqueue.claim('q', 'w', 3)") == 3
    assert one(db, "select count(*) from pgqueue.job where token is not null") == 3


# Keys


@pytest.mark.parametrize("commits", [True, False])
def test_a_duplicate_waits_until_the_first_enqueue_commits_or_rolls_back(
    db, connect, pool, blocked, commits
):
    first, second = connect(), connect()
    first.execute("begin")
    id = one(first, "select pgqueue.enqueue('q', '1', unique_key => 'k')")
    later = pool.submit(
        one, second, "select pgqueue.enqueue('q', '2', unique_key => 'k')"
    )
    blocked(second)
    first.execute("commit" if commits else "rollback")
    assert (later.result(20) == id) is commits
    assert column(db, "select payload from pgqueue.job") == ([1] if commits else [2])


def test_a_duplicate_that_waits_for_a_completion_is_a_new_job(
    db, connect, pool, blocked
):
    db.execute("select pgqueue.enqueue('q', unique_key => 'k')")
    id, token = db.execute(CLAIM).fetchone()
    handler, producer = connect(), connect()
    handler.execute("begin")
    handler.execute("select pgqueue.complete(%s, %s)", (id, token))
    later = pool.submit(one, producer, "select pgqueue.enqueue('q', unique_key => 'k')")
    blocked(producer)
    handler.execute("commit")
    assert later.result(20) > id


@pytest.mark.parametrize(
    "end",
    [
        "select pgqueue.cancel(%(id)s)",
        "select pgqueue.complete(%(id)s, (select token from pgqueue.claim('q', 'w')))",
        "select pgqueue.fail(%(id)s, (select token from pgqueue.claim('q', 'w')), 'e', permanent => true)",
    ],
)
def test_a_unique_key_is_free_when_its_job_has_ended(db, end):
    id = one(db, "select pgqueue.enqueue('q', unique_key => 'k')")
    db.execute(end, {"id": id})
    assert one(db, "select pgqueue.enqueue('q', unique_key => 'k')") > id


ONCE = "select pgqueue.enqueue('q', %s, unique_key => 'k', unique_for => '1 hour')"
END = "select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')"


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("window", ["none", "has ended"])
def test_of_two_enqueues_with_one_window_the_second_waits_and_one_makes_a_job(
    db, connect, pool, blocked, commits, window
):
    if window == "has ended":
        db.execute(ONCE, ("0",))
        db.execute(END)
        db.execute("update pgqueue.recent_key set expires_at = now()")
    first, second = connect(), connect()
    first.execute("begin")
    id = one(first, ONCE, "1")
    later = pool.submit(one, second, ONCE, "2")
    blocked(second)
    first.execute("commit" if commits else "rollback")
    assert (later.result(20) == id) is commits
    assert column(db, "select payload from pgqueue.job") == ([1] if commits else [2])
    kept = "select job_id = id and expires_at > now() from pgqueue.recent_key cross join pgqueue.job"
    assert column(db, kept) == [True]


@pytest.mark.parametrize("commits", [True, False])
def test_an_enqueue_with_a_window_that_waits_for_a_completion_adds_no_job(
    db, connect, pool, blocked, commits
):
    """It found the job alive, and adds its own when that has ended: it must take it back."""
    db.execute(ONCE, ("1",))
    handler, producer = connect(), connect()
    id, token = db.execute(CLAIM).fetchone()
    handler.execute("begin")
    handler.execute("select pgqueue.complete(%s, %s)", (id, token))
    later = pool.submit(one, producer, ONCE, "2")
    blocked(producer)
    handler.execute("commit" if commits else "rollback")
    assert later.result(20) == id
    assert column(db, "select id from pgqueue.job") == ([] if commits else [id])
    assert column(db, "select job_id from pgqueue.recent_key") == [id]


def test_an_enqueue_and_the_upkeep_of_windows_do_not_disturb_each_other(
    db, connect, pool, blocked
):
    db.execute(ONCE, ("0",))
    db.execute(END)
    db.execute("update pgqueue.recent_key set expires_at = now()")
    forgotten = "select done from pgqueue.maintain() where task = 'forget keys'"
    producer, upkeep = connect(), connect()
    with producer.transaction(force_rollback=True):
        producer.execute(ONCE, ("1",))
        assert one(upkeep, forgotten) == 0, "it does not wait"
    upkeep.execute("begin")
    assert one(upkeep, forgotten) == 1
    later = pool.submit(one, producer, ONCE, "2")
    blocked(producer)
    upkeep.execute("commit")
    assert later.result(20) == one(db, "select job_id from pgqueue.recent_key")


@pytest.mark.parametrize(
    "level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
)
def test_an_older_snapshot_does_not_see_a_window_and_is_told_so(db, connect, level):
    producer = connect()
    producer.isolation_level = level
    with pytest.raises(errors.SerializationFailure), producer.transaction():
        producer.execute("select 1")
        db.execute(ONCE, ("1",))
        db.execute(END)
        producer.execute(ONCE, ("2",))
    with producer.transaction():
        assert one(producer, ONCE, "3") == one(db, "select job_id from pgqueue.run")


def test_eight_sessions_make_one_job_for_each_window(db, connect, pool):
    """Their jobs end at once, and windows begin again and again."""
    db.execute("create table first (key text, id bigint, unique (key, id))")

    def hammer(conn):
        rng = random.Random(conn.info.backend_pid)
        for n in range(150):
            key = f"k{n // 3}"
            id = one(
                conn,
                "select pgqueue.enqueue('q', unique_key => %s, unique_for => '1 hour')",
                key,
            )
            conn.execute(
                "insert into first values (%s, %s) on conflict do nothing", (key, id)
            )
            conn.execute(rng.choice([END, "select pgqueue.purge('q')", "select 1"]))

    list(pool.map(hammer, [connect() for _ in range(8)]))
    assert column(db, "select count(*) from first group by key") == [1] * 50
    assert one(db, "select count(*) from pgqueue.recent_key") == 50


def test_eight_sessions_with_the_same_keys_make_one_job_for_each_key(db, connect, pool):
    def hammer(conn):
        return [
            one(
                conn,
                "select pgqueue.enqueue('q', unique_key => %s, on_duplicate => %s)",
                f"k{n % 5}",
                how,
            )
            for n, how in zip(
                range(100), itertools.cycle(["skip", "replace", "postpone"])
            )
        ]

    answers = pool.map(hammer, [connect() for _ in range(8)])
    ids = {id for answer in answers for id in answer}
    assert ids == set(column(db, "select id from pgqueue.job")) and len(ids) == 5


def test_bulk_enqueues_of_the_same_keys_never_deadlock(connect, pool, db):
    def hammer(conn):
        rng = random.Random(conn.info.backend_pid)
        for n in range(40):
            keys = [f"{n}-{k}" for k in range(30)]
            rng.shuffle(keys)
            conn.execute(
                "select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[30]), unique_keys => %s, "
                "on_duplicate => %s)",
                (keys, rng.choice(["skip", "replace"])),
            )

    list(pool.map(hammer, [connect() for _ in range(6)]))
    assert one(db, "select count(*) from pgqueue.job") == 40 * 30


def test_a_failed_job_keeps_its_unique_key_while_it_waits_for_its_retry(db):
    db.execute("select pgqueue.enqueue('q', unique_key => 'k')")
    id, token = db.execute(CLAIM).fetchone()
    assert one(db, "select pgqueue.enqueue('q', unique_key => 'k')") == id
    assert one(db, "select pgqueue.fail(%s, %s, 'e')", id, token) == "retry"
    assert one(db, "select pgqueue.enqueue('q', unique_key => 'k')") == id


# Waking


@pytest.fixture
def listener(connect):
    conn = connect()
    conn.execute("listen pgqueue")
    return conn


def heard(listener) -> int:
    """Count the notifications that came before one that this session sends to itself."""
    listener.execute("listen pgqueue")
    listener.execute("notify pgqueue, 'end'")
    count = 0
    for notify in listener.notifies(timeout=20):
        if notify.payload == "end":
            return count
        assert notify.payload == "", "a notification says nothing of the job"
        count += 1
    raise AssertionError("the notification never came")


def test_an_enqueue_notifies_only_when_a_session_is_parked_on_its_queue(
    db, connect, listener
):
    db.execute("select pgqueue.enqueue('q')")
    assert heard(listener) == 0
    assert one(listener, "select pgqueue.rest(array['q', 'r'])") == timedelta(0)
    db.execute("select pgqueue.enqueue('other')")
    assert heard(listener) == 0
    db.execute("select pgqueue.enqueue('q')")
    db.execute("select pgqueue.enqueue_many('r', array_fill('1'::jsonb, array[100]))")
    assert heard(listener) == 2
    db.execute("select pgqueue.configure('q', notify => false)")
    assert heard(listener) == 1, "from now on it has to look for itself"
    db.execute("select pgqueue.enqueue('q')")
    listener.close()
    db.execute("select pgqueue.enqueue('r')")
    assert heard(connect()) == 0


def test_a_session_that_parks_beside_an_open_enqueue_looks_again_soon(db, listener):
    with db.transaction():
        db.execute("select pgqueue.enqueue('q')")
        pause = one(listener, "select pgqueue.rest(array['q'])")
        assert timedelta(0) < pause <= timedelta(seconds=5), "look again soon"
    assert one(listener, "select pgqueue.rest(array['q'])") == timedelta(0)


def test_a_parked_session_that_dies_leaves_no_lock_behind(db, connect, listener):
    worker = connect()
    worker.execute("select pgqueue.rest(array['q'])")
    db.execute("select pg_terminate_backend(%s, 20000)", (worker.info.backend_pid,))
    db.execute("select pgqueue.enqueue('q')")
    assert heard(listener) == 0


@pytest.mark.parametrize(
    "verb",
    [
        "select pgqueue.fail(%(id)s, %(token)s, 'e')",
        "select pgqueue.release(array[%(id)s], array[%(token)s])",
        "select pgqueue.run_now(%(id)s)",
        "select pgqueue.resume('q')",
        "select pgqueue.resume()",
        "select pgqueue.redrive()",
        "select pgqueue.reap()",
    ],
)
def test_every_function_that_makes_a_job_ready_notifies_a_parked_session(
    db, listener, verb
):
    dead_id, dead_token = claimed(db)
    db.execute(
        "select pgqueue.fail(%s, %s, 'e', permanent => true)", (dead_id, dead_token)
    )
    id, token = claimed(db)
    if "reap" in verb:
        expire(db)
    listener.execute("select pgqueue.rest(array['q'])")
    db.execute(verb, {"id": id, "token": token})
    assert heard(listener) == 1


@pytest.mark.parametrize(
    "verb",
    [
        "select pgqueue.cancel(%(id)s)",
        "select count(*) from pgqueue.cancel_many('q', kind => 'x')",
        "select count(*) from pgqueue.maintain()",
    ],
)
@pytest.mark.parametrize("is_paused", [False, True])
def test_the_cancel_of_a_job_that_held_up_its_group_wakes_who_takes_the_next(
    db, listener, verb, is_paused
):
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    enqueue = "select pgqueue.enqueue('q', kind => %s, group_key => 'g', expires_at => now() + interval '1 h')"
    first, second = (one(db, enqueue, kind) for kind in "xy")
    kinds = None if is_paused else ["y"]
    if is_paused:
        db.execute("select pgqueue.pause('q', kind => 'x')")
    claim = "select id from pgqueue.claim('q', 'w', kinds => %s)"
    for _ in range(9):
        assert column(listener, claim, kinds) == []
        listener.execute("select pgqueue.rest(array['q'], %s)", (kinds,))
    if "maintain" in verb:
        db.execute(
            "update pgqueue.job set terms.expires_at = now() where id = %s", (first,)
        )
    db.execute(verb, {"id": first})
    assert heard(listener) == 1
    assert column(listener, claim, kinds) == [second]


@pytest.mark.parametrize("limit", [1, 2])
def test_whoever_may_take_only_the_next_job_of_a_group_sleeps_a_second_at_most(
    db, listener, limit
):
    """Nobody is told when the first one begins or expires, which may free the next."""
    db.execute("select pgqueue.configure('q', group_limit => %s)", (limit,))
    enqueue = "select pgqueue.enqueue('q', kind => %s, group_key => 'g')"
    *_, last = (one(db, enqueue, kind) for kind in "xxy")
    claim = "select id from pgqueue.claim('q', 'w', kinds => '{y}')"
    for _ in range(9):
        assert column(listener, claim) == []
        db.execute("update pgqueue.ticket set at = now() - interval '1 s'")
    rest = "select pgqueue.rest(array['q'], '{y}') between '0.5 s' and '1 s'"
    assert one(listener, rest)
    terms = "row(now(), null, null, null)::pgqueue._terms"
    db.execute(f"update pgqueue.job set terms = {terms} where kind = 'x'")
    assert soon(lambda: column(listener, claim)) == [last]


@pytest.mark.parametrize("too", ["", ", max_running => 5"])
def test_a_group_that_need_no_longer_wait_for_a_retry_wakes_who_rests(
    db, listener, too
):
    db.execute(
        "select pgqueue.configure('q', group_limit => 1, group_on_retry => 'block')"
    )
    _, second = (one(db, "select pgqueue.enqueue('q', group_key => 'g')") for _ in "ab")
    db.execute("select pgqueue.fail(%s, %s, 'e', '1 h')", db.execute(CLAIM).fetchone())
    claim = "select id from pgqueue.claim('q', 'w')"
    for _ in range(9):
        assert column(listener, claim) == []
        listener.execute("select pgqueue.rest(array['q'])")
    db.execute(f"select pgqueue.configure('q', group_on_retry => 'skip'{too})")
    assert heard(listener) == 1
    assert column(listener, claim) == [second]


def commit_in_two_phases(db: psycopg.Connection, query: str, args=None) -> None:
    if one(db, "show max_prepared_transactions") == "0":
        pytest.skip("the server allows no prepared transactions")
    db.execute("begin")
    db.execute(query, args)
    db.execute("prepare transaction 'p'")
    db.execute("commit prepared 'p'")


def test_two_phase_commit_works_with_pgqueue_notify_off(dsn, db, listener):
    listener.execute("select pgqueue.rest(array['q'])")
    db.execute("set pgqueue.notify = off")
    commit_in_two_phases(
        db, "select pgqueue.enqueue('q'), pgqueue.enqueue('q', group_key => 'a')"
    )
    assert heard(listener) == 0
    assert one(db, "select count(*) from pgqueue.job") == 2


# A position saves work and never hides a job


@pytest.fixture
def long_walk(db, held_snapshot) -> None:
    """A queue whose walk takes long: 100,000 finished jobs that an old snapshot still sees."""
    fill = "select count(*) from pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[100000]))"
    db.execute(fill)
    db.execute("delete from pgqueue.job")
    db.execute("select pgqueue.enqueue('q')")
    id, token = db.execute(CLAIM).fetchone()
    db.execute("select pgqueue.complete(%s, %s)", (id, token))


def looks(conn: psycopg.Connection) -> list[int] | timedelta | None:
    """What a worker does: claim, and when there is no job, ask how long to sleep."""
    return (
        column(conn, "select id from pgqueue.claim('q', 'w')")
        or one(conn, "select pgqueue.rest(array['q'])")
    )  # fmt: skip


@pytest.mark.parametrize("priority", [0, 7, -7])
def test_no_session_sleeps_on_a_job_that_commits_late_where_a_walk_is_expensive(
    long_walk, db, connect, listener, priority
):
    producer = connect(autocommit=False)
    producer.execute("select pgqueue.enqueue('q', priority => %s)", (priority,))
    assert looks(db) != [], "a worker beside looks, and finds nothing"
    pause = looks(listener)
    assert isinstance(pause, timedelta) and pause <= timedelta(seconds=5), "for a while"
    producer.commit()
    assert len(looks(listener)) == 1


def test_a_job_released_elsewhere_is_found_at_once_where_a_walk_is_expensive(
    long_walk, db, connect, listener
):
    db.execute("select pgqueue.enqueue('q')")
    id, token = db.execute(CLAIM).fetchone()
    assert looks(listener) > timedelta(seconds=20), "until the lease ends"
    connect().execute("select pgqueue.release(array[%s], array[%s])", (id, token))
    assert heard(listener) == 1
    assert looks(listener) == [id]


def test_the_jobs_of_a_rolled_back_claim_are_found_where_a_walk_is_expensive(
    long_walk, db, connect
):
    ids = column(
        db, "select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[30]))"
    )
    other = connect()
    with other.transaction(force_rollback=True):
        assert len(column(other, "select id from pgqueue.claim('q', 'w', 10)")) == 10
    taken: list[int] = []
    while len(taken) < 30:
        found = column(db, "select id from pgqueue.claim('q', 'w', 7)")
        assert found, "never empty while jobs are due"
        taken += found
    assert sorted(taken) == ids


def test_a_job_behind_the_position_of_a_busy_lane_is_claimed_before_the_lane_ends(
    long_walk, db, connect
):
    late = connect(autocommit=False)
    enqueue = "select pgqueue.enqueue('q', run_at => now() - interval '1 hour')"
    id = one(late, enqueue)
    fill = "select count(*) from pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[20000]))"
    db.execute(fill)
    claim = "select id from pgqueue.claim('q', 'w', 5)"
    for _ in range(10):
        assert len(column(db, claim)) == 5
    late.commit()
    claims = 0
    while id not in (found := column(db, claim)):
        assert len(found) == 5, "the lane is busy all the time"
        claims += 1
    assert claims < 3900


# What extend answers


def test_extend_of_a_locked_job_answers_held_until_its_lease_expires_and_then_lost(
    db, connect
):
    id, token = claimed(db)
    extend = "select status from pgqueue.extend(array[%s], array[%s], '1 hour')"
    clerk = connect(autocommit=False)
    clerk.execute("select pgqueue.reprioritize(%s, 3)", (id,))
    assert one(db, extend, id, token) == "held", "the lease it has goes on"
    clerk.rollback()
    expire(db)
    clerk.execute("select pgqueue.reprioritize(%s, 3)", (id,))
    assert one(db, extend, id, token) == "lost"
    clerk.commit()
    assert one(connect(), "select id from pgqueue.claim('q', 'other')") == id


def test_extend_beside_an_open_claim_of_its_expired_job_answers_lost(db, connect):
    id, token = claimed(db)
    expire(db)
    thief = connect(autocommit=False)
    assert one(thief, "select id from pgqueue.claim('q', 'other')") == id
    extend = "select status from pgqueue.extend(array[%s], array[%s], '1 hour')"
    assert one(db, extend, id, token) == "lost"
    thief.rollback()
    assert one(db, extend, id, token) == "held", "nobody has taken it after all"


# Duplicates are locked in one order

REPLACE = (
    "select pgqueue.enqueue_many('q', %s::jsonb[], unique_keys => %s, "
    "on_duplicate => 'replace')"
)


def keyed(db: psycopg.Connection, *keys: str) -> dict[str, int]:
    return {
        key: one(db, "select pgqueue.enqueue('q', unique_key => %s)", key)
        for key in keys
    }


def many(conn: psycopg.Connection, *keys: str) -> list[int]:
    return column(conn, REPLACE, ["{}"] * len(keys), list(keys))


def test_a_purge_and_a_bulk_replace_do_not_deadlock(db, connect, pool, blocked):
    """Both lock rows by id; one of them by key would be enough for a deadlock."""
    ids = keyed(db, "b", "a")
    clerk, bulk, operator = connect(autocommit=False), connect(), connect()
    clerk.execute("select from pgqueue.job where id = %s for update", (ids["b"],))
    replaced = pool.submit(many, bulk, "a", "b")
    blocked(bulk)
    purged = pool.submit(one, operator, "select pgqueue.purge('q')")
    blocked(operator)
    clerk.commit()
    assert len(replaced.result(20)) == 2 and purged.result(20) in (0, 2)


def test_two_bulk_replaces_beside_a_cancel_do_not_deadlock(db, connect, pool, blocked):
    ids = keyed(db, "b", "d")
    clerk, first, second = connect(autocommit=False), connect(), connect()
    clerk.execute("select from pgqueue.job where id = %s for update", (ids["b"],))
    a = pool.submit(many, first, "b", "d")
    blocked(first)
    db.execute("select pgqueue.cancel(%s)", (ids["d"],))
    b = pool.submit(many, second, "b", "d")
    blocked(second)
    clerk.commit()
    assert a.result(20) == b.result(20)


def test_two_bulk_replaces_beside_a_completion_do_not_deadlock(
    db, connect, pool, blocked
):
    low = one(db, "select pgqueue.enqueue('q', unique_key => 'a0', priority => -1)")
    keyed(db, "a1")
    id, token = db.execute(CLAIM).fetchone()
    clerk, first, second = connect(autocommit=False), connect(), connect()
    clerk.execute("select from pgqueue.job where id = %s for update", (low,))
    a = pool.submit(many, first, "a0", "a1", "b")
    blocked(first)
    db.execute("select pgqueue.complete(%s, %s)", (id, token))
    b = pool.submit(many, second, "a1", "b")
    b.result(20)
    clerk.commit()
    assert a.result(20)[1:] == b.result(20)


def skip(conn: psycopg.Connection, *keys: str) -> list[int]:
    query = "select pgqueue.enqueue_many('q', %s::jsonb[], unique_keys => %s)"
    return column(conn, query, ["{}"] * len(keys), list(keys))


def test_two_bulk_enqueues_beside_a_completion_do_not_deadlock(
    db, connect, pool, blocked
):
    """A job that is over when its turn comes is added before those behind it, or not at all."""
    late = "now() + interval '10 ms'"
    db.execute(
        f"select pgqueue.enqueue('q', unique_key => 'a', priority => -1, expires_at => {late})"
    )
    (lease,) = keyed(db, "b") and db.execute(CLAIM).fetchall()
    clerk, first, second = connect(autocommit=False), connect(), connect()
    clerk.execute("select from pgqueue.job where unique_key = 'a' for update")
    assert soon(lambda: one(db, "select expires_at < now() from pgqueue.jobs limit 1"))
    a = pool.submit(skip, first, "a", "b", "c")
    blocked(first)
    db.execute("select pgqueue.complete(%s, %s)", lease)
    b = pool.submit(skip, second, "b", "c")
    wait([b], 2)
    clerk.commit()
    assert a.result(20)[1:] == b.result(20)


def test_a_bulk_enqueue_whose_duplicates_complete_meanwhile_does_not_deadlock(
    db, connect, pool
):
    """While it inserts, the last one of very many is free, and somebody adds that before what is new."""
    keys = [f"k{n:05}" for n in range(3000)]
    db.execute("set client_min_messages = error")
    skip(db, *keys)
    jobs = dict(
        db.execute(
            "select unique_key, array[id, token] from pgqueue.claim('q', 'w', 3000)"
        ).fetchall()
    )
    sessions = [connect() for _ in range(2)]
    for session in sessions:
        session.execute("set client_min_messages = error")
    for last in reversed(keys[-6:]):
        a = pool.submit(skip, sessions[0], *keys, "new")
        time.sleep(random.random() / 10)
        db.execute("select pgqueue.complete(%s, %s)", jobs[last])
        b = pool.submit(skip, sessions[1], last, "new")
        assert len(a.result(60)) == 3001 and len(b.result(60)) == 2
        db.execute("delete from pgqueue.job where unique_key = 'new'")


def test_two_redrives_of_several_queues_do_not_deadlock(db, connect, pool, blocked):
    """Both insert by queue and key; one of them by key and id would be enough."""
    for queue in ("q1", "q0", "q2", "q2", "q1"):
        db.execute("select pgqueue.enqueue(%s, unique_key => 'k')", (queue,))
        db.execute(
            "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim(%s, 'w')",
            (queue,),
        )
    clerk, first, second = connect(autocommit=False), connect(), connect()
    clerk.execute("select pgqueue.enqueue('q0', unique_key => 'k')")
    a = pool.submit(column, first, "select pgqueue.redrive(max_jobs => 3)")
    blocked(first)
    b = pool.submit(column, second, "select pgqueue.redrive()")
    wait([b], 2)
    clerk.rollback()
    assert len(a.result(20) + b.result(20)) == 3


def test_a_bulk_replace_starts_again_when_a_locked_duplicate_has_appeared(
    db, connect, pool, blocked
):
    ids = keyed(db, "a")
    clerk, other, bulk = connect(autocommit=False), connect(autocommit=False), connect()
    clerk.execute("select from pgqueue.job where id = %s for update", (ids["a"],))
    replaced = pool.submit(many, bulk, "a", "b")
    blocked(bulk)
    id = keyed(db, "b")["b"]
    other.execute("select from pgqueue.job where id = %s for update", (id,))
    clerk.commit()
    blocked(bulk)
    purged = pool.submit(one, connect(), "select pgqueue.purge('q')")
    other.rollback()
    assert replaced.result(20)[1] >= id and purged.result(20) >= 0


@pytest.mark.parametrize("how", ["skip", "replace", "postpone"])
@pytest.mark.parametrize("attempts", [1, 20])
def test_a_duplicate_of_a_job_whose_lease_expired_recovers_that_job_first(
    db, how, attempts
):
    enqueue = "select pgqueue.enqueue('q', %s, unique_key => 'k', on_duplicate => %s, max_attempts => %s)"
    id = one(db, enqueue, '"old"', how, attempts)
    token = one(db, "select token from pgqueue.claim('q', 'w')")
    expire(db)
    second = one(db, enqueue, '"new"', how, attempts)
    assert (second == id) is (attempts > 1), (
        "an exhausted job is dead, and its key free"
    )
    with pytest.raises(psycopg.Error) as lost:
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    assert lost.value.sqlstate == "PQ002"
    payload = one(db, "select payload from pgqueue.job")
    assert payload == ("old" if attempts > 1 and how != "replace" else "new")


@pytest.mark.parametrize("how", ["skip", "replace", "postpone"])
def test_a_duplicate_of_a_running_job_raises_a_notice(db, how):
    notices: list[str] = []
    db.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    enqueue = "select pgqueue.enqueue('q', %s, unique_key => 'k', on_duplicate => %s)"
    id = one(db, enqueue, "1", how)
    assert one(db, enqueue, "2", how) == id and notices == []
    db.execute(CLAIM)
    assert one(db, enqueue, "3", how) == id
    (notice,) = notices
    assert f"job {id}" in notice and "running" in notice


# Notifications can be switched off

NOISY = {
    "enqueue": "select pgqueue.enqueue('q')",
    "enqueue_many": "select pgqueue.enqueue_many('q', array['1']::jsonb[])",
    "fail": "select pgqueue.fail(%(id)s, %(token)s, 'e')",
    "finish": "select pgqueue.finish(array[%(id)s], array[%(token)s], array['fail'])",
    "release": "select pgqueue.release(array[%(id)s], array[%(token)s])",
    "run_now": "select pgqueue.run_now(%(id)s)",
    "reprioritize": "select pgqueue.reprioritize(%(id)s, 4)",
    "redrive": "select pgqueue.redrive()",
    "reap": "select pgqueue.reap()",
    "claim": "select id from pgqueue.claim('q', 'w')",
    "resume": "select pgqueue.resume('q')",
}


@pytest.mark.parametrize("verb", NOISY)
def test_two_phase_commit_works_in_a_queue_with_notify_false(db, listener, verb):
    dead_id, dead_token = claimed(db)
    db.execute(
        "select pgqueue.fail(%s, %s, 'e', permanent => true)", (dead_id, dead_token)
    )
    id, token = claimed(db)
    if verb in ("reap", "claim"):
        expire(db)
    db.execute("select pgqueue.configure('q', notify => false)")
    listener.execute("select pgqueue.rest(array['q'])")
    commit_in_two_phases(db, NOISY[verb], {"id": id, "token": token})
    assert heard(listener) == 0


@pytest.mark.parametrize("verb", ["resume()", "configure(null, max_running => 9)"])
def test_two_phase_commit_works_with_notify_false_for_all(db, listener, verb):
    db.execute("select pgqueue.configure(null, notify => false)")
    assert heard(listener) == 1, "the last one"
    listener.execute("select pgqueue.rest(array['q'])")
    commit_in_two_phases(db, f"select pgqueue.{verb}")
    assert heard(listener) == 0
    db.execute("select pgqueue.configure('q', notify => true)")
    db.execute(f"select pgqueue.{verb}")
    assert heard(listener) == 1


# Retention


def test_a_run_that_commits_while_its_table_is_emptied_is_kept(db, connect):
    insert = (
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome) "
        "select floor(extract(epoch from at) / 86400 + 7)::int %% 16, 1, %s, at, '0', '0', 'q', 'k', 'completed' "
        "from (values (now() - %s::interval)) as v (at)"
    )
    db.execute(insert, (1, "20 days"))
    writer = connect(autocommit=False)
    writer.execute(insert, (2, "4 days"))
    assert (
        one(db, "select done from pgqueue.maintain() where task = 'forget runs'") == 0
    )
    writer.commit()
    assert column(db, "select job_id from pgqueue.run order by 1") == [1, 2]


# Everything at once


def test_no_two_functions_deadlock(db, connect, pool):
    db.execute(
        "select pgqueue.configure('q', max_attempts => 1000, retry_base => '0', lease => '50 ms')"
    )
    db.execute("select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[60]))")
    tried: list[str] = []

    def work(conn):
        rng = random.Random(conn.info.backend_pid)
        for _ in range(150):
            rows = conn.execute(
                "select id, token from pgqueue.job where token is not null"
            ).fetchall()
            rows += conn.execute(
                "select id, token from pgqueue.claim('q', 'w', 20)"
            ).fetchall()
            rng.shuffle(rows)
            ids, tokens = ([r[0] for r in rows], [r[1] for r in rows])
            verb, args = rng.choice(
                [
                    ("extend(%s::bigint[], %s::bigint[])", (ids, tokens)),
                    ("release(%s::bigint[], %s::bigint[])", (ids, tokens)),
                    (
                        "complete_many(%s::bigint[], %s::bigint[])",
                        (ids[:3], tokens[:3]),
                    ),
                    ("reap()", ()),
                    ("cancel(%s)", (rng.choice(ids or [0]),)),
                    ("purge('r')", ()),
                    ("enqueue_many('q', array_fill('1'::jsonb, array[4]))", ()),
                ]
            )
            tried.append(verb)
            try:
                conn.execute(f"select pgqueue.{verb}", args)
            except psycopg.Error as error:
                assert error.sqlstate in ("PQ001", "PQ002"), error

    list(pool.map(work, [connect() for _ in range(8)]))
    assert len(set(tried)) == 7
    assert one(db, "select count(*) from pgqueue.job") == one(
        db,
        "select count(*) filter (where state in ('ready', 'running', 'expired', 'scheduled')) from pgqueue.jobs",
    )


def test_every_job_of_eight_producers_is_completed_exactly_once(db, connect, pool):
    db.execute("create table effect (job_id bigint primary key)")
    each = 2500 if LONG else 800
    total = 8 * each

    def produce(conn):
        conn.execute(
            f"do $$ begin for n in 1..{each} loop perform pgqueue.enqueue('q'); commit; end loop; end $$"
        )

    def consume(conn):
        done = 0
        while one(conn, "select count(*) from effect") < total:
            with conn.transaction():
                for id, token in conn.execute(
                    "select id, token from pgqueue.claim('q', 'w', 25)"
                ).fetchall():
                    conn.execute("insert into effect values (%s)", (id,))
                    conn.execute("select pgqueue.complete(%s, %s)", (id, token))
                    done += 1
        return done

    consumers = [pool.submit(consume, connect()) for _ in range(4)]
    list(pool.map(produce, [connect() for _ in range(8)]))
    assert sum(c.result(240) for c in consumers) == total
    assert one(db, "select count(*) from pgqueue.job") == 0
    assert (
        one(
            db,
            "select count(*) from pgqueue.run where outcome = 'completed' and attempt = 1",
        )
        == total
    )


# Pause of a kind or a group

SCOPES = {"kind": "kind => 'a'", "group": "group_key => 'a'"}


def fill_ab(db: psycopg.Connection, scope: str, jobs: int) -> None:
    """Enqueue jobs of two kinds or groups, alternately."""
    for n in range(jobs):
        named = SCOPES[scope].replace("'a'", f"'{'ab'[n % 2]}'")
        db.execute(f"select pgqueue.enqueue('q', {named})")


def given_out(db: psycopg.Connection, scope: str) -> str:
    """Claim ten jobs, release them, and say of which kinds or groups they were."""
    with db.transaction(force_rollback=True):
        key = "kind" if scope == "kind" else "group_key"
        return "".join(
            column(
                db,
                f"select distinct {key} from pgqueue.claim('q', 'w', 10) order by 1",
            )
        )


@pytest.mark.parametrize("scope", SCOPES)
def test_a_pause_and_a_resume_hold_from_their_commit_on(db, connect, scope):
    operator = connect()
    fill_ab(db, scope, 10)
    assert given_out(db, scope) == "ab"
    with operator.transaction():
        operator.execute(f"select pgqueue.pause('q', {SCOPES[scope]})")
        assert given_out(db, scope) == "ab"
        assert given_out(operator, scope) == "b"
    assert given_out(db, scope) == "b"
    with operator.transaction():
        operator.execute(f"select pgqueue.resume('q', {SCOPES[scope]})")
        assert given_out(db, scope) == "b"
    assert given_out(db, scope) == "ab"


@pytest.mark.parametrize("scope", SCOPES)
def test_what_is_claimed_beside_a_pause_goes_on(db, connect, scope):
    worker = connect()
    fill_ab(db, scope, 1)
    with worker.transaction():
        id, token = worker.execute(CLAIM).fetchone()
        db.execute(f"select pgqueue.pause('q', {SCOPES[scope]})")
    extended = db.execute(
        "select status from pgqueue.extend(array[%s], array[%s])", (id, token)
    )
    assert extended.fetchone() == ("held",)
    db.execute("select pgqueue.complete(%s, %s)", (id, token))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_resume_wakes_who_waits_and_does_not_wait_for_a_claim(
    db, connect, listener, scope
):
    fill_ab(db, scope, 4)
    db.execute(f"select pgqueue.pause('q', {SCOPES[scope]})")
    worker = connect()
    with worker.transaction():
        worker.execute("select pgqueue.claim('q', 'w')")
        # What is left of a group whose ticket is locked is claimable all the same.
        pause = one(listener, "select pgqueue.rest(array['q'])")
        assert pause <= timedelta(seconds=0.1 if scope == "group" else 0)
        listener.execute("select pgqueue.claim('q', 'w', 10)")
        assert heard(listener) == 0
        one(listener, "select pgqueue.rest(array['q'])")
        db.execute(f"select pgqueue.resume('q', {SCOPES[scope]})")
        assert heard(listener) == 1
    claimed = "select count(*) from pgqueue.claim('q', 'w', 10)"
    assert soon(lambda: one(listener, claimed)) == 2


@pytest.mark.parametrize("scope", SCOPES)
def test_claims_beside_pauses_take_each_job_once_and_none_that_is_paused(
    db, connect, pool, scope
):
    fill_ab(db, scope, 600)
    key = "kind" if scope == "kind" else "group_key"
    changes = [0]  # 2 modulo 4: paused; odd: perhaps; -1: no more

    def work(conn: psycopg.Connection) -> list[int]:
        done: list[int] = []
        while True:
            before = changes[0]
            jobs = conn.execute(
                f"select id, token, {key} from pgqueue.claim('q', 'w', 3)"
            ).fetchall()
            if before == changes[0] and before % 4 == 2:
                assert "a" not in {job[2] for job in jobs}
            for id, token, _ in jobs:
                conn.execute("select pgqueue.complete(%s, %s)", (id, token))
                done.append(id)
            if before == changes[0] == -1 and not jobs:
                # A claim that still saw the pause may have put the group off.
                pause = one(conn, "select pgqueue.rest(array['q'], park => false)")
                if pause is None or pause > timedelta(seconds=1):
                    return done

    workers = [pool.submit(work, connect()) for _ in range(4)]
    for n in range(12):
        verb = ("pause", "resume")[n % 2]
        changes[0] += 1
        db.execute(f"select pgqueue.{verb}('q', {SCOPES[scope]})")
        changes[0] += 1
        db.execute("select pg_sleep(0.02)")
    changes[0] = -1
    ids = [id for worker in workers for id in worker.result(60)]
    assert len(ids) == len(set(ids)) == 600


# Ageing


def fill_ages(db: psycopg.Connection, jobs: int) -> None:
    """Jobs of five priorities and all ages, some of groups."""
    db.execute("select pgqueue.configure('q', age_after => '1 second')")
    db.execute(
        "select pgqueue.enqueue('q', priority => n %% 5, group_key => case when n %% 3 = 0 then 'g' || n %% 7 end, "
        "run_at => clock_timestamp() - random() * interval '10 seconds') from generate_series(1, %s) as n",
        (jobs,),
    )


def test_claims_beside_an_open_one_take_what_has_aged_next(db, connect):
    db.execute("select pgqueue.configure('q', age_after => '1 minute')")
    db.execute(
        "select pgqueue.enqueue('q', priority => p, run_at => now() - waits * interval '1 minute') "
        "from unnest(array[5, 5, 0, 0], array[0.5, 0.4, 9.5, 2.5]) as j (p, waits)"
    )
    other = connect()
    with db.transaction():
        assert db.execute(CLAIM).fetchone()[0] == 3
        with other.transaction(force_rollback=True):
            rest = column(other, "select id from pgqueue.claim('q', 'w', 4)")
            assert rest == [1, 2, 4]
    assert column(other, "select id from pgqueue.claim('q', 'w', 4)") == [1, 2, 4]


def test_claims_with_ageing_take_each_job_once(db, connect, pool):
    fill_ages(db, 2000)

    def drain(size: int) -> list[int]:
        session, taken = connect(), []
        claim = f"select id from pgqueue.claim('q', 'w', {size})"
        while ids := column(session, claim):
            taken += ids
        return taken

    drains = [pool.submit(drain, size) for size in (1, 1, 1, 3, 3, 10, 10, 50)]
    taken = [job for each in drains for job in each.result()]
    taken += column(db, "select id from pgqueue.claim('q', 'w', 10000)")
    assert len(taken) == len(set(taken)) == 2000


def test_maintain_puts_off_a_dead_job_that_is_being_redriven(db, connect):
    db.execute("select pgqueue.configure('q', keep_dead => '1 second')")
    db.execute("select count(*) from pgqueue.enqueue_many('q', '{1,2}')")
    db.execute(
        "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('q', 'w', 2)"
    )
    db.execute("update pgqueue.dead_job set died_at = now() - interval '1 minute'")
    operator = connect(autocommit=False)
    first = one(operator, "select min(id) from pgqueue.dead_job")
    operator.execute("select pgqueue.redrive_job(%s)", (first,))
    forget = "select done from pgqueue.maintain() where task = 'forget dead jobs'"
    assert one(db, forget) == 1
    operator.rollback()
    assert column(db, "select id from pgqueue.dead_job") == [first]
    assert one(db, forget) == 1
