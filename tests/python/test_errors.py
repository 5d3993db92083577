"""What somebody at psql reads when a call is refused."""

import re
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest
from conftest import database

LONG = "repeat('x', 201)"
LEVEL = "set transaction isolation level repeatable read"
READ_ONLY = "set transaction read only"
SMALL = "select pgqueue.configure('q', max_payload_bytes => 20)"
TAKEN = "select pgqueue.enqueue('q', unique_key => 'k')"
WINDOW = "unique_key => 'k', unique_for => '1 hour'"
RECENT = f"select pgqueue.enqueue('q', {WINDOW})"
FAT = """'{"text": "far too much for this"}'"""
ESCAPE = (r"error_like => 'e\\\'",)
ONLY = "(select id from pgqueue.job)"
DEAD_ONE = "(select id from pgqueue.dead_job)"
DIE = "select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('q', 'w')"
KEEP = "select pgqueue.configure('q', keep_payloads => true)"
BIG = f"select pgqueue.enqueue('q', {FAT})"
CLAIM = "select from pgqueue.claim('q', 'w')"
HELD = f"{ONLY}, (select token from pgqueue.job)"
MANY_STEPS = (
    f"{HELD}, 's'",
    TAKEN,
    CLAIM,
    "insert into pgqueue.step select id, now(), n, n, '1' from pgqueue.job, generate_series(1, 10000) as n",
)
END = "select pgqueue.complete(id, token) from pgqueue.claim('q', 'w')"
CHANGED = "create table changed (id int)"
STRANGER = """
create role pgqueue_no_producer; grant insert on changed to pgqueue_no_producer;
set local role pgqueue_no_producer
"""
LIMITED = """
create role pgqueue_limited;
select pgqueue.grant_access('pgqueue_limited', k.kind, queue => 'own')
from unnest(array['producer', 'worker', 'scheduler']) as k (kind);
set local role pgqueue_limited
"""
HANDLED = """
create function handle(job pgqueue.job) returns void language plpgsql
    as $$ begin perform pg_sleep(60); end $$;
select pgqueue.configure('q', handler => 'handle(pgqueue.job)');
"""
LATER = (LEVEL, "select setval('pgqueue._cell_set_by', 1000000000000000)")
SCHEDULED = "select pgqueue.schedule('s', 'own', '@daily')"

BATCH = "create temporary table made as select pgqueue.create_batch('q') as id"
CLOSE = "select pgqueue.close_batch(id) from made"
MADE = "batch_id => (select id from made)"

# The calls that are refused, by function and SQLSTATE; what is run first in their transaction.
REFUSED: dict[str, dict[str, list[tuple[str, ...]]]] = {
    "enqueue": {
        "22023": [
            ("''",),
            ("null",),
            ("'q', kind => ''",),
            (f"'q', unique_key => {LONG}",),
            ("'q', group_key => ''",),
            ("'q', priority => 101",),
            ("'q', run_at => 'infinity'",),
            ("'q', max_attempts => 0",),
            ("'q', on_duplicate => 'merge'",),
            ("'q', headers => '[]'",),
            ("'q', unique_for => '1 hour'",),
            ("'q', unique_key => 'k', unique_for => '0'",),
            ("'q', unique_key => 'k', unique_for => '-1 s'",),
            ("'q', unique_key => 'k', unique_for => '367 days'",),
            ("'q', after => '{null}'",),
            ("'q', if_dead => 'wait'",),
            ("'q', after => array[(select id from made)]", BATCH),
        ],
        "PQ001": [("'q', after => '{7}'",), ("'q', batch_id => 7",)],
        "55000": [(f"'q', {MADE}", BATCH, CLOSE)],
        "42501": [("'q'", LIMITED), ("'q', unique_key => 'k'", LIMITED)],
        "54000": [(f"'q', {FAT}", SMALL)],
        "23505": [
            ("'q', unique_key => 'k', on_duplicate => 'error'", TAKEN),
            (
                f"'q', {WINDOW}, on_duplicate => 'error'",
                RECENT,
                "select pgqueue.purge('q')",
            ),
        ],
    },
    "enqueue_many": {
        "42501": [("'q', '{1}'", LIMITED)],
        "22023": [
            ("'', '{}'",),
            ("'q', null",),
            ("'q', '{{1}}'",),
            ("'q', '{1}', unique_keys => '{a,b}'",),
            ("'q', '{1}', group_keys => array['']",),
            ("'q', '{1}', priority => -101",),
        ],
        "PQ001": [("'q', '{1}', batch_id => 7",)],
        "55000": [(f"'q', '{{1}}', {MADE}", BATCH, CLOSE)],
        "54000": [(f"'q', array[{FAT}]::jsonb[]", SMALL)],
        "23505": [
            ("'q', '{1,2}', unique_keys => '{a,k}', on_duplicate => 'error'", TAKEN),
        ],
    },
    "enqueue_row": {
        "22023": [("",), ("'queue=q', 'columns=no'",), ("'queue=q', 'run_in=soon'",)],
        "42501": [("'queue=q'", STRANGER)],
    },
    "claim": {
        "42501": [("'q', 'w'", LIMITED)],
        "25001": [("'q', 'w'", LEVEL)],
        "25006": [("'q', 'w'", READ_ONLY), ("'q', 'w'", TAKEN, READ_ONLY)],
        "22023": [
            ("'', 'w'",),
            ("'q', ''",),
            ("'q', 'w', 0",),
            ("'q', 'w', lease => '0'",),
        ],
    },
    "claim_from": {
        "42501": [("array['q'], 'w'", LIMITED)],
        "25001": [("array['q'], 'w'", LEVEL)],
        "25006": [
            ("array['q'], 'w'", READ_ONLY),
            ("array['q'], 'w'", TAKEN, READ_ONLY),
        ],
        "22023": [
            ("'{}', 'w'",),
            ("array[''], 'w'",),
            ("array['q'], 'w', 10001",),
            ("array['q'], 'w', weights => '{0}'",),
            ("array['q'], 'w', limits => '{1,2}'",),
        ],
    },
    "extend": {
        "25001": [("'{1}', '{1}'", LEVEL)],
        "22023": [("'{1}', '{}'",), ("'{1}', '{1}', '31 days'",)],
    },
    "complete": {
        "25001": [("1, 1", LEVEL)],
        "PQ002": [("1, 1",), ("null, null",)],
    },
    "complete_many": {
        "25001": [("'{1}', '{1}'", LEVEL)],
        "22023": [("'{1}', '{}'",), ("'{1}', '{1}', '{}'",)],
    },
    "fail": {
        "25001": [("1, 1, 'why'", LEVEL)],
        "22023": [("1, 1, 'why', retry_in => '-1 s'",)],
        "PQ002": [("1, 1, 'why'",)],
    },
    "release": {
        "25001": [("'{1}', '{1}'", LEVEL)],
        "22023": [("'{1}', '{}'",), ("'{1}', '{1}', '-infinity'",)],
    },
    "finish": {
        "25001": [("'{1}', '{1}', '{fail}'", LEVEL)],
        "22023": [
            ("'{1}', '{}', '{fail}'",),
            ("'{1}', '{1}', '{}'",),
            ("'{1}', '{1}', '{end}'",),
            ("'{1}', '{1}', '{null}'",),
            ("'{1}', '{1}', '{fail}', delays => '{-1 s}'",),
        ],
    },
    "save_step": {
        "25001": [("1, 1, 's'", LEVEL)],
        "PQ002": [("1, 1, 's'",), ("null, null, 's'",)],
        "22023": [("1, 1, ''",), ("1, 1, null",), (f"1, 1, {LONG}",)],
        "54000": [(f"{HELD}, 's', {FAT}", SMALL, TAKEN, CLAIM), MANY_STEPS],
    },
    "suspend": {
        "25001": [("1, 1, 'e'", LEVEL)],
        "PQ002": [("1, 1, 'e'",)],
        "22023": [
            ("1, 1",),
            ("1, 1, ''",),
            (f"1, 1, {LONG}",),
            ("1, 1, run_at => 'infinity'",),
            ("1, 1, after => '{null}'",),
            ("1, 1, after => '{1}'",),
        ],
        "PQ001": [("1, 1, after => '{999999}'",)],
    },
    "emit": {
        "22023": [("''",), ("null",), (f"{LONG}",)],
        "54000": [(f"'e', {FAT}", SMALL.replace("'q'", "null"))],
    },
    "results_of": {
        "PQ002": [("1, 1",)],
        "22023": [("1, 1, max_rows => 0",), ("1, 1, max_rows => 10001",)],
    },
    "rest": {
        "25001": [("array['q']", LEVEL)],
        "22023": [("'{}'",)],
        "42501": [("array['own', 'q']", LIMITED)],
    },
    "reap": {"25001": [("", LEVEL)], "22023": [("0",)]},
    "maintain": {"25001": [("", LEVEL)]},
    "cancel": {"PQ001": [("1",), ("null",)]},
    "cancel_many": {"22023": [("max_jobs => 0",), ESCAPE]},
    "run_now": {"PQ001": [("1",)]},
    "reprioritize": {"PQ001": [("1, 1",)], "22023": [("1, 101",), ("1, null",)]},
    "rerun": {
        "PQ001": [("1",), ("null",)],
        "22023": [(ONLY, TAKEN), (DEAD_ONE, TAKEN, DIE)],
        "54000": [("(select max(job_id) from pgqueue.run)", KEEP, BIG, END, SMALL)],
    },
    "redrive": {"22023": [("max_jobs => 0",), ESCAPE]},
    "redrive_job": {
        "PQ001": [("1",)],
        "54000": [(f"{DEAD_ONE}, {FAT}", TAKEN, DIE, SMALL)],
    },
    "discard": {"PQ001": [("1",)]},
    "discard_many": {"22023": [("max_jobs => -1",), ESCAPE]},
    "pause": {
        "22023": [
            ("''",),
            ("'q', ''",),
            (f"'q', group_key => {LONG}",),
            ("'q', group_key => '*'",),
        ],
        "40001": [("", *LATER)],
    },
    "resume": {
        "22023": [("''",), ("'q', ''",), ("group_key => ''",), ("group_key => '*'",)],
        "40001": [("", *LATER)],
    },
    "configure": {
        "40001": [("null, max_attempts => 3", *LATER)],
        "22023": [
            ("''",),
            ("'q', lease => '0'",),
            ("'q', max_attempts => 0",),
            ("'q', retry_base => '-1 s'",),
            ("'q', retry_cap => '2 years'",),
            ("'q', keep_runs => 15",),
            ("'q', max_payload_bytes => 0",),
            ("'q', kind => ''",),
            (f"'q', group_key => {LONG}",),
            ("'q', weight => 0",),
            ("'q', weight => 101",),
            ("'q', group_limit => 0",),
            ("'q', group_limit => 1001",),
            ("'q', group_on_retry => 'wait'",),
            ("'q', notify => false, kind => 'k'",),
            ("'q', notify => true, group_key => 'g'",),
            ("'q', weight => 2, kind => 'k'",),
            ("'q', group_limit => 2, kind => 'k', group_key => 'g'",),
            ("'q', group_limit => 2, group_key => '*'",),
            ("'q', max_running => 0",),
            ("'q', max_running => 1001",),
            ("'q', max_running => 2, group_key => 'g'",),
            ("'q', rate_limit => 0",),
            ("'q', rate_limit => 2, rate_period => '0'",),
            ("'q', rate_limit => 2, kind => 'k', group_key => 'g'",),
            ("'q', rate_period => '2 days'",),
            ("'q', age_after => '0'",),
            ("'q', age_after => '1 minute', kind => 'k'",),
            ("'q', wait_target => '0'",),
            ("'q', wait_target => '1 minute', group_key => 'g'",),
            ("'q', keep_dead => '0'",),
            ("'q', keep_dead => '11 years'",),
            ("'q', keep_dead => '1 day', group_key => '*'",),
            ("null, keep_events => '0'",),
            ("'q', keep_events => '1 day'",),
            ("null, keep_events => '1 day', kind => 'k'",),
            ("'q', suspend_target => '2 years'",),
            ("'q', suspend_target => '1 day', kind => 'k'",),
        ],
    },
    "shard": {
        "22023": [("0",), ("5, 4",), ("null",), ("1, 4, -1",), ("1, 4, 0", TAKEN)],
        "55000": [("1", TAKEN), ("2, 4", "select pgqueue.shard(1, 4)", TAKEN)],
    },
    "shard_of": {"22023": [("null, 4",), ("'k', 0",), ("'k', null",)]},
    "after_failover": {"42501": [("always => true", LIMITED)]},
    "create_batch": {
        "42501": [("'q'", LIMITED)],
        "22023": [
            ("''",),
            ("'q', '[]'",),
            ("'q', kind => ''",),
            ("'q', headers => '1'",),
            ("'q', group_key => ''",),
        ],
        "54000": [(f"'q', jsonb_build_object('fat', {FAT})", SMALL)],
    },
    "close_batch": {"PQ001": [("7",), ("-1",), ("null",)]},
    "schedule": {
        "42501": [
            ("'s', 'q', '@daily'", LIMITED),
            ("'s', 'own', '@daily'", SCHEDULED, LIMITED),
        ],
        "22023": [
            ("'', 'q', '@daily'",),
            ("'s', '', '@daily'",),
            ("'s', 'q'",),
            ("'s', 'q', '@daily', '1 hour'",),
            ("'s', 'q', '* * * *'",),
            ("'s', 'q', '60 * * * *'",),
            ("'s', 'q', '0 0 30 2 *'",),
            ("'s', 'q', every => '1 month'",),
            ("'s', 'q', '@daily', timezone => 'CEST'",),
            ("'s', 'q', '@daily', catch_up => 'some'",),
            ("'s', 'q', '@daily', jitter => '-1 s'",),
            ("'s', 'q', '@daily', priority => 101",),
            ("'s', 'q', '@daily', headers => '1'",),
            ("'s', 'q', '@daily', group_key => ''",),
        ],
        "54000": [(f"'s', 'q', '@daily', payload => {FAT}", SMALL)],
    },
    "unschedule": {"PQ001": [("'s'",), ("null",)]},
    "pause_schedule": {"PQ001": [("'s'",)]},
    "resume_schedule": {"PQ001": [("'s'",)]},
    "run_schedule": {
        "PQ001": [("'s'",), ("null",)],
        "54000": [
            (
                "'s'",
                f"select pgqueue.schedule('s', 'q', '@daily', payload => {FAT})",
                SMALL,
            )
        ],
    },
    "next_slots": {
        "22023": [
            ("'x'",),
            ("null",),
            ("'@daily', 'CEST'",),
            ("'@daily', after => 'infinity'",),
            ("'@daily', slots => 0",),
        ],
    },
    "why": {"PQ001": [("1",), ("null",)]},
    "work": {
        "22023": [
            ("'q'",),
            ("''", HANDLED),
            ("null", HANDLED),
            ("'q', '0'", HANDLED),
            ("'q', '2 years'", HANDLED),
            ("'q', '1 minute'", HANDLED, "set statement_timeout = '1min'"),
        ],
        "25001": [
            ("'q'", HANDLED, "begin"),
            ("'q'", HANDLED, "set default_transaction_isolation = serializable"),
        ],
        "25006": [("'q'", HANDLED, "set default_transaction_read_only = on")],
        "42501": [("'q'", HANDLED, LIMITED.replace("local role", "role"))],
        "57014": [("'q'", HANDLED, TAKEN, "set statement_timeout = '90 ms'")],
    },
    "progress": {
        "25001": [("1, 1, 1", LEVEL)],
        "22023": [("1, 1, null",), ("1, 1, 'NaN'",), ("1, 1, 1, 0",)],
        "PQ002": [("1, 1, 1",), ("null, null, 1",)],
    },
    "status": {"PQ001": [("1",), ("null",)]},
    "result": {"PQ001": [("1",), ("null",)]},
    "await": {"PQ001": [("1",)], "25001": [("1", LEVEL)]},
    "grant_access": {
        "22023": [("'postgres', 'boss'",), ("'postgres', null",)],
        "42704": [("'nobody at all', 'reader'",), ("null, 'reader'",)],
        "40001": [("'postgres', 'reader'", *LATER)],
    },
    "revoke_access": {
        "22023": [("'postgres', 'boss'",)],
        "42704": [("'nobody at all', 'reader'",)],
        "40001": [("'postgres', 'reader'", *LATER)],
    },
}
CASES = [
    (function, sqlstate, *case)
    for function, by_sqlstate in REFUSED.items()
    for sqlstate, cases in by_sqlstate.items()
    for case in cases
]


@pytest.fixture(scope="module")
def db(template) -> Iterator[psycopg.Connection]:
    """One database for all: what is refused rolls back."""
    with database(template) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def test_the_cases_are_those_that_the_comments_name(db) -> None:
    query = """
        select proname, obj_description(oid, 'pg_proc') from pg_proc
        where pronamespace = 'pgqueue'::regnamespace and proname not like '\\_%'
    """
    named = {name: raised(comment) for name, comment in db.execute(query)}
    cases = {name: set(cases) for name, cases in REFUSED.items()}
    assert {name: states for name, states in named.items() if states} == cases


def raised(comment: str) -> set[str]:
    """Return the SQLSTATEs that the comment of a function names."""
    errors = comment.partition("\nRaises ")[2]
    return set(re.findall(r"\b(?:PQ\d{3}|\d{5})\b", errors))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_refused_call_says_what_is_wrong_and_where_in_two_lines(
    db, template, case
) -> None:
    function, sqlstate, arguments, *before = case
    with pytest.raises(psycopg.Error) as refused, ExitStack() as stack:
        if function == "work":  # which commits
            dsn = stack.enter_context(database(template))
            db = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        else:
            stack.enter_context(db.transaction())
        call = f"select pgqueue.{function}({arguments})"
        if function == "enqueue_row":
            trigger = f"execute function pgqueue.{function}({arguments})"
            fires = f"create trigger t after insert on changed for each row {trigger}"
            before = [CHANGED, fires, *before]
            call = "insert into changed values (1)"
        elif function == "work":
            call = f"call pgqueue.work({arguments})"
        for statement in before:
            db.execute(statement)
        db.execute(call)
    said = refused.value.diag
    assert said.sqlstate == sqlstate
    assert said.message_primary
    assert said.message_detail
    assert said.message_hint
    context = (said.context or "").splitlines()
    assert len(context) <= 2, said.context
    assert context[-1].startswith(f"PL/pgSQL function pgqueue.{function}(")


def test_a_session_that_is_serializable_by_default_is_told_what_to_set(db) -> None:
    db.execute("set default_transaction_isolation = serializable")
    with pytest.raises(psycopg.Error) as refused:
        db.execute(CLAIM)
    (remedy,) = re.findall(r"set default.*'", refused.value.diag.message_hint)
    db.execute(remedy)
    db.execute(CLAIM)
