"""Handlers in SQL: work() is a whole worker, and the work and its completion are one transaction."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from conftest import Connect, column, one, soon
from psycopg import errors

HANDLERS = """
create table done (n int, by name default current_user);
create table late (n int primary key deferrable initially deferred);
create function note(payload jsonb) returns void language plpgsql as $$
begin
    insert into done values ((payload ->> 'n')::int);
    if payload ? 'lock' then
        -- Until the test lets it go on.
        perform pg_advisory_xact_lock((payload ->> 'lock')::int);
    end if;
    case payload ->> 'then'
        when 'raise' then raise exception 'no such person' using detail = 'ada', hint = 'eve', errcode = 'XY123';
        when 'assert' then assert false, 'never';
        when 'late' then insert into late values (1), (1);
        when 'loop' then perform pg_sleep(60);
        else null;
    end case;
end $$;
create function answer(job pgqueue.job) returns jsonb language plpgsql as $$
begin
    insert into done values (job.attempt);
    case job.payload ->> 'then'
        when 'complete' then perform pgqueue.complete(job.id, job.token, '"own"');
        when 'fail' then perform pgqueue.fail(job.id, job.token, 'for good', permanent => true);
        when 'release' then perform pgqueue.release(array[job.id], array[job.token], '2999-01-01');
        else null;
    end case;
    return jsonb_build_object('kind', job.kind);
end $$;
select pgqueue.configure('q', handler => 'note(jsonb)');
select pgqueue.configure('q', kind => 'answer', handler => 'answer(pgqueue.job)');
"""


@pytest.fixture
def db(db: psycopg.Connection) -> psycopg.Connection:
    db.execute(HANDLERS)
    return db


def enqueue(db: psycopg.Connection, payload: str = "{}", kind: str = "note") -> int:
    return one(db, "select pgqueue.enqueue('q', %s, %s)", payload, kind)


def outcomes(db: psycopg.Connection) -> list[tuple]:
    query = "select job_id, outcome, result, error from pgqueue.run order by 1"
    return db.execute(query).fetchall()


@contextmanager
def at_work(
    conn: psycopg.Connection, how: str = "'q'"
) -> Iterator[list[psycopg.Error]]:
    """Call work in a thread; what it raises is in the list when the block has ended."""
    raised: list[psycopg.Error] = []

    def work() -> None:
        try:
            conn.execute(f"call pgqueue.work({how})")
        except psycopg.Error as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield raised
    thread.join()


def test_work_calls_the_handler_of_each_kind_and_keeps_what_it_returns(db):
    ids = [enqueue(db, '{"n": 7}'), enqueue(db, kind="answer")]
    db.execute("call pgqueue.work('q')")
    assert column(db, "select n from done") == [7, 1]
    assert outcomes(db) == [
        (ids[0], "completed", None, None),
        (ids[1], "completed", {"kind": "answer"}, None),
    ]


def test_jobs_of_kinds_without_a_handler_are_left_to_others(db):
    db.execute(
        "select pgqueue.configure('p', kind => 'answer', handler => 'answer(pgqueue.job)')"
    )
    db.execute("select pgqueue.enqueue('p'), pgqueue.enqueue('p', kind => 'answer')")
    db.execute("call pgqueue.work('p')")
    assert column(db, "select kind from pgqueue.run") == ["answer"]
    assert column(db, "select attempt from pgqueue.job") == [0]


def test_an_error_rolls_back_the_work_and_fails_the_attempt_with_all_it_says(db):
    id = enqueue(db, '{"n": 1, "then": "raise"}')
    db.execute("call pgqueue.work('q')")
    assert outcomes(db) == [(id, "retry", None, "no such person")]
    assert column(db, "select n from done") == []
    said = one(db, "select errors -> -1 ->> 'error' from pgqueue.job").splitlines()
    assert said[:4] == [
        "no such person",
        "SQLSTATE: XY123",
        "DETAIL: ada",
        "HINT: eve",
    ]
    assert said[4].startswith("CONTEXT: PL/pgSQL function note(jsonb) line ")


@pytest.mark.parametrize(
    ("how", "error"),
    [("assert", "never"), ("late", "duplicate key value violates unique constraint")],
)
def test_a_failed_assertion_and_a_deferred_constraint_fail_one_job_and_stop_nobody(
    db, how, error
):
    enqueue(db, f'{{"n": 1, "then": "{how}"}}')
    enqueue(db, '{"n": 2}')
    db.execute("call pgqueue.work('q')")
    (_, outcome, _, said), (*_,) = outcomes(db)
    assert outcome == "retry" and said.startswith(error)
    assert column(db, "select n from done") == [2]


@pytest.mark.parametrize("how", ["complete", "fail", "release"])
def test_a_handler_may_end_its_attempt_in_its_own_way(db, how):
    enqueue(db, f'{{"then": "{how}"}}', "answer")
    db.execute("call pgqueue.work('q')")
    assert column(db, "select n from done") == [1]
    ended = {
        "complete": [("completed", "own", None)],
        "fail": [("dead", None, "for good")],
        "release": [],
    }
    assert [row[1:] for row in outcomes(db)] == ended[how]
    waiting = column(db, "select attempt from pgqueue.job where run_at > '2998-01-01'")
    assert waiting == [0] * (how == "release")


def test_a_handler_that_was_dropped_fails_its_jobs_and_works_when_it_is_back(db):
    id = enqueue(db, kind="answer")
    db.execute("drop function answer")
    db.execute("call pgqueue.work('q')")
    gone = "handler public.answer(pgqueue.job) does not exist"
    assert outcomes(db) == [(id, "retry", None, gone)]
    db.execute(
        "create function answer(job pgqueue.job) returns jsonb language sql as 'select ''1''::jsonb'"
    )
    db.execute("select pgqueue.run_now(%s)", (id,))
    db.execute("call pgqueue.work('q')")
    assert outcomes(db)[-1] == (id, "completed", 1, None)


def test_run_now_ends_the_wait_of_a_handler_that_names_a_step_for_it(db):
    db.execute("""
        create function nap(job pgqueue.job) returns jsonb language plpgsql as $$
        declare
            steps jsonb := (select coalesce(jsonb_object_agg(s.name, s.value), '{}') from pgqueue.steps(job.id) as s);
        begin
            if not steps ? 'slept' then
                perform pgqueue.suspend(job.id, job.token, run_at => '2999-01-01', step => 'slept');
            end if;
            return steps;
        end $$
    """)
    db.execute(
        "select pgqueue.configure('q', kind => 'nap', handler => 'nap(pgqueue.job)')"
    )
    id = enqueue(db, kind="nap")
    for _ in range(2):
        db.execute("call pgqueue.work('q')")
        assert outcomes(db) == []
        db.execute("update pgqueue.job set run_at = now()")  # without an operator
    db.execute("call pgqueue.work('q')")
    db.execute("select pgqueue.run_now(%s)", (id,))
    db.execute("call pgqueue.work('q')")
    assert outcomes(db) == [(id, "completed", {"slept": "run_now"}, None)]


def test_with_run_for_it_waits_for_jobs_until_its_time_is_up_and_maintains(db, connect):
    db.execute(
        "insert into pgqueue.recent_key (job_id, expires_at, queue, unique_key)"
        " values (0, now() - interval '1 day', 'q', 'k')"
    )
    with at_work(connect(), "'q', '3 s'") as raised:
        assert soon(lambda: one(db, "select true from pgqueue.service"))
        id = enqueue(db, '{"n": 1}')
        assert soon(lambda: outcomes(db) == [(id, "completed", None, None)])
    assert raised == []
    assert column(db, "select 1 from pgqueue.recent_key") == []


def held(db: psycopg.Connection, lock: int) -> Callable[[], object]:
    """Whether somebody waits for the lock that the test has."""
    return lambda: one(
        db,
        "select true from pg_locks where locktype = 'advisory' and objid = %s and not granted",
        lock,
    )


def test_while_the_handler_runs_others_see_the_job_and_nobody_recovers_it(db, connect):
    db.execute("select pgqueue.configure('q', lease => '10 ms')")
    id = enqueue(db, '{"n": 1, "lock": 7}')
    db.execute("select pg_advisory_lock(7)")
    with at_work(connect()) as raised:
        assert soon(held(db, 7))
        assert one(db, "select attempt from pgqueue.job") == 1
        assert soon(lambda: one(db, "select state = 'expired' from pgqueue.jobs"))
        db.execute("set lock_timeout = '1 s'")  # none of these waits for the handler
        assert one(db, "select pgqueue.reap()") == 0
        assert column(db, "select id from pgqueue.claim('q', 'another')") == []
        assert column(db, "select pgqueue.cancel_many('q')") == [id]
        assert one(db, "select pgqueue.cancel(%s)", id) == "cancelling"
        assert one(db, "select pgqueue.cancel(%s)", id) == "cancelling"
        db.execute("select pg_advisory_unlock(7)")
    assert raised == []
    assert outcomes(db) == [(id, "completed", None, None)]


def test_a_job_that_is_cancelled_before_its_handler_begins_does_not_run(db):
    """As soon as it is claimed: here by a trigger, as no operator is so quick."""
    db.execute("""
        create function stop() returns trigger language plpgsql
            as 'begin new.cancelled_at := now(); return new; end';
        create trigger stop before update on pgqueue.job for each row
            when (old.token is null and new.token is not null) execute function stop();
    """)
    id = enqueue(db, '{"n": 1}')
    db.execute("call pgqueue.work('q')")
    assert [row[:2] for row in outcomes(db)] == [(id, "cancelled")]
    assert column(db, "select n from done") == []


def test_who_is_killed_leaves_the_job_to_the_next_when_its_lease_expires(db, connect):
    db.execute("select pgqueue.configure('q', lease => '300 ms')")
    id = enqueue(db, '{"n": 1, "lock": 7}')
    worker = connect()
    db.execute("select pg_advisory_lock(7)")
    with at_work(worker):
        assert soon(held(db, 7))
        db.execute("select pg_terminate_backend(%s)", (worker.info.backend_pid,))
    db.execute("select pg_advisory_unlock(7)")
    db.execute("call pgqueue.work('q', '2 s')")
    assert [row[1] for row in outcomes(db)] == ["expired", "completed"]
    assert column(db, "select n from done") == [1]
    assert one(db, "select max(attempt) from pgqueue.run where job_id = %s", id) == 2


def test_a_statement_timeout_fails_the_attempt_it_meets_and_ends_the_call(db, connect):
    id = enqueue(db, '{"n": 1, "then": "loop"}')
    worker = connect()
    worker.execute("set statement_timeout = '300 ms'")
    with pytest.raises(errors.QueryCanceled) as raised:
        worker.execute("call pgqueue.work('q')")
    said = "canceling statement due to statement timeout"
    assert outcomes(db) == [(id, "retry", None, said)]
    detail = f"Job {id} was running. Its attempt has failed: retry."
    assert raised.value.diag.message_detail == detail
    assert "shorter than statement_timeout" in raised.value.diag.message_hint
    assert column(db, "select n from done") == []


@pytest.mark.parametrize("limit", ["0", "1h"])
def test_who_is_cancelled_gives_its_job_back_and_stops(db, connect, limit):
    ids = [enqueue(db, '{"n": 1, "lock": 7}'), enqueue(db, '{"n": 2}')]
    worker = connect()
    worker.execute(f"set statement_timeout = '{limit}'")
    db.execute("select pg_advisory_lock(7)")
    with at_work(worker) as raised:
        assert soon(held(db, 7))
        db.execute("select pg_cancel_backend(%s)", (worker.info.backend_pid,))
    (error,) = raised
    assert isinstance(error, errors.QueryCanceled)
    assert error.diag.message_detail == f"Job {ids[0]} was running. It is given back."
    assert error.diag.message_hint == "Call work again to go on."
    assert outcomes(db) == []
    assert column(db, "select attempt from pgqueue.job where token is null") == [0, 0]
    db.execute("select pg_advisory_unlock(7)")
    worker.execute("call pgqueue.work('q')")
    assert column(db, "select n from done") == [1, 2]


def test_two_at_work_share_the_jobs_and_do_each_once(db, connect):
    db.execute(
        "select pgqueue.enqueue_many('q', array(select jsonb_build_object('n', n) from generate_series(1, 300) as n))"
    )
    with at_work(connect()), at_work(connect()):
        db.execute("call pgqueue.work('q')")
    assert sorted(column(db, "select n from done")) == list(range(1, 301))
    assert one(db, "select count(distinct worker) from pgqueue.run") > 1
    assert one(db, "select count(*) from pgqueue.run") == 300


def test_handlers_have_the_rights_of_who_calls_work_and_no_others(
    db, connect: Connect, role
):
    db.execute("select pgqueue.grant_access(%s, 'worker', 'q')", (role,))
    db.execute("revoke execute on function answer from public")
    db.execute(f"grant insert on done to {role}")
    ids = [enqueue(db, '{"n": 1}'), enqueue(db, kind="answer")]
    worker = connect(user=role)
    worker.execute("call pgqueue.work('q')")
    assert outcomes(db) == [
        (ids[0], "completed", None, None),
        (ids[1], "retry", None, "permission denied for function answer"),
    ]
    assert column(db, "select by from done") == [role]
    with pytest.raises(errors.InsufficientPrivilege, match="no worker of queue"):
        worker.execute("call pgqueue.work('other')")
    assert not one(worker, "select kinds from pgqueue._handled('other', null)")


@pytest.mark.parametrize(
    "statement",
    ["do $$ begin call pgqueue.work('q'); end $$", "call nested()", "select wraps()"],
)
def test_inside_another_procedure_it_works_and_inside_a_function_nothing_happens(
    db, statement
):
    db.execute("""
        create procedure nested() language plpgsql as 'begin commit; call pgqueue.work(''q''); end';
        create function wraps() returns void language plpgsql as 'begin call pgqueue.work(''q''); end';
    """)
    enqueue(db, '{"n": 1}')
    if "wraps" in statement:
        with pytest.raises(errors.InvalidTransactionTermination):
            db.execute(statement)
    else:
        db.execute(statement)
    assert column(db, "select n from done") == [1] * ("wraps" not in statement)
    assert one(db, "select coalesce(sum(attempt), 0) from pgqueue.job") == 0


@pytest.mark.parametrize("query", ["call pgqueue.work('q')", "call pgqueue.work(%s)"])
def test_in_a_transaction_block_it_is_refused_before_anything_happens(
    db, connect, query
):
    """Where the protocol hides the block, by Postgres."""
    enqueue(db)
    caller = connect(autocommit=False)
    caller.execute("select 1")
    expected = (
        errors.InvalidTransactionTermination
        if "%s" in query
        else errors.ActiveSqlTransaction
    )
    with pytest.raises(expected):
        caller.execute(query, ("q",) if "%s" in query else None)
    assert one(db, "select attempt from pgqueue.job") == 0


def test_where_another_isolation_level_is_the_default_the_hint_helps(db):
    enqueue(db)
    db.execute("set default_transaction_isolation = serializable")
    with pytest.raises(errors.ActiveSqlTransaction) as refused:
        db.execute("call pgqueue.work('q')")
    (hint,) = re.findall("set .*'", refused.value.diag.message_hint)
    db.execute(hint)
    db.execute("call pgqueue.work('q')")
    assert [outcome for _, outcome, _, _ in outcomes(db)] == ["completed"]


@pytest.mark.parametrize("prepare", [False, True])
def test_it_may_be_called_with_parameters_and_prepared(db, prepare):
    for n in range(3):
        enqueue(db, f'{{"n": {n}}}')
        db.execute("call pgqueue.work(%s)", ("q",), prepare=prepare)
    assert column(db, "select n from done") == [0, 1, 2]


def test_a_handler_is_kept_by_name_and_found_by_its_schema_alone(db, connect):
    db.execute("create schema app")
    db.execute("set search_path = app, public")
    db.execute(
        "create function app.note(payload jsonb) returns void language sql as 'select 1 / 0'"
    )
    db.execute("select pgqueue.configure('q', handler => 'public.note(jsonb)')")
    enqueue(db, '{"n": 1}')
    db.execute("call pgqueue.work('q')")
    assert column(db, "select n from done") == [1]
    stored = one(db, "select handler from pgqueue.queue where name = 'q' and kind = ''")
    assert stored == "public.note(jsonb)"


def test_after_a_failover_it_skips_tokens_before_it_claims(db):
    job = enqueue(db)
    db.execute("select setval('pgqueue._cell_timeline', 7)")
    db.execute("call pgqueue.work('q')")
    assert outcomes(db) == [(job, "completed", None, None)]
    assert one(db, "select last_value from pgqueue.token_seq") > 1_000_000
    assert one(db, "select pgqueue.after_failover()") is False
