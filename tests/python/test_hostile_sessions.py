"""Whatever a session has set, each function gives the same answer at the same cost.

All sessions start with the same deep queue and roll back what they did to it.
"""

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import psycopg
import pytest
from conftest import column, one, some
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

DEEP = "pgqueue_deep"
NUMBERS = itertools.count()

# 60,000 jobs in the lane, the first 6,000 of them running and some of those expired; others
# scheduled at a higher priority; other queues, kinds, priorities, keys and dead jobs.
FILL = [
    """
    insert into pgqueue.job (
        run_at, enqueued_at, priority, max_attempts, queue, kind, unique_key, payload, terms
    )
    select now() - interval '1 hour' + n * interval '1 us', now(), 0, 20, 'deep',
        case when n % 10 = 0 then 'rare' else 'deep' end,
        case when n > 55000 then 'key ' || n - 55000 end, jsonb_build_object('n', n),
        -- Those that will run have waited for another.
        case when n <= 6000 then row(null, null, null, '{1}')::pgqueue._terms end
    from generate_series(1, 60000) as n
    """,
    # Apart from others: chance decides whether a lane comes before its round.
    # Before the sessions, because nobody takes a permit that his own transaction has made.
    "select pgqueue.configure(name, group_limit => 9) from unnest(array['limited', 'capped']) as n (name)",
    "select pgqueue.configure('capped', max_running => 900, rate_limit => 900, rate_period => '1 day')",
    "select pgqueue.configure('rated', group_key => 'a', rate_limit => 1, rate_period => '1 day')",
    """
    select pgqueue.enqueue_many(
        name, array_fill('{}'::jsonb, array[3000]),
        group_keys => array(select 'group ' || n % 70 from generate_series(1, 3000) as n)
    )
    from unnest(array['groups', 'limited', 'capped']) as n (name)
    """,
    """
    select count(*) from pgqueue.enqueue_many(
        'rated', array_fill('{}'::jsonb, array[30]), group_keys => array_fill('a'::text, array[30])
    )
    """,
    """
    insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)
    select now() + interval '30 days', now(), 50, 20, 'deep', 'deep', '{}'::jsonb from generate_series(1, 3000)
    union all
    select now() + interval '30 days', now(), 0, 20, 'later', 'k', '{}' from generate_series(1, 100)
    union all
    select now() - interval '1 hour', now(), 0, 20, 'second', 'k', '{}' from generate_series(1, 1000)
    union all
    select now() - interval '1 hour' + n * interval '1 us', now(), n % 7 - 3, 20, 'mixed', 'k', '{}'
    from generate_series(1, 1000) as n
    union all
    select now() - interval '1 hour', now(), 0, n / 2 % 2 + 1, 'lapsed ' || n % 2, 'k', '{}'
    from generate_series(0, 599) as n
    union all
    select now() - interval '1 hour', now(), 0, 1, 'grave ' || n / 300, 'k', '{}'
    from generate_series(0, 1199) as n
    union all
    select now() - interval '1 hour', now(), 0, 20, 'bin ' || n % 4, 'k', '{}'
    from generate_series(1, 2000) as n
    """,
    # As enqueue does for priorities.
    "select pgqueue._use_lanes(q) from unnest(array['deep', 'mixed']) as q",
    "select count(*) from pgqueue.claim('deep', 'elsewhere', 6000, '30 days')",
    "select count(*) from generate_series(0, 1) as n cross join pgqueue.claim('lapsed ' || n, 'gone', 300)",
    """
    update pgqueue.job set lease_expires_at = now() - interval '1 hour'
    where worker = 'gone' or queue = 'deep' and token is not null and id % 100 = 0
    """,
    """
    select pgqueue.fail(id, token, case when id % 2 = 0 then 'TimeoutError: slow' else 'E' end, permanent => true)
    from generate_series(0, 3) as n cross join pgqueue.claim('grave ' || n, 'w', 1000)
    """,
    "insert into pgqueue.recent_key values (0, '2999-01-01', 'deep', 'once')",
    # What the running ones have done.
    """
    insert into pgqueue.step (job_id, saved_at, place, name, value)
    select id, now(), 1, 'done', '1' from pgqueue.job where worker = 'elsewhere'
    """,
    # Due long ago: health must not begin to miss them while this runs.
    """
    select pgqueue.enqueue('late bin ' || n % 4, unique_key => 'k' || n / 4, expires_at => '2020-01-01 00:00 UTC',
        run_at => now() - interval '2 hours')
    from generate_series(0, 199) as n
    """,
    "select pgqueue.enqueue('late bin ' || n, run_at => now() - interval '1 hour') from generate_series(0, 3) as n",
    # Or their worker would be forgotten after 5 minutes, while this runs.
    "update pgqueue.run set finished_at = finished_at - interval '10 minutes'",
    # Runs that have been kept long enough: maintain forgets them.
    """
    update pgqueue.run set finished_at = finished_at - interval '10 days',
        slot = (extract(epoch from finished_at)::int / 86400 - 3) % 16
    where queue = 'grave 0'
    """,
    # Names and operators that win over those of pg_catalog wherever a search_path lets them.
    """
    do $$
    declare
        f record;
        o record;
    begin
        create schema evil;
        for f in
            select distinct on (p.proname, p.proargtypes) p.proname,
                pg_get_function_identity_arguments(p.oid) as args, p.prorettype::regtype as result
            from pg_proc as p
            where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f'
                and p.provariadic = 0 and not p.proretset
                and p.prorettype not in ('internal'::regtype, 'trigger'::regtype, 'cstring'::regtype)
                and not 'internal'::regtype = any (p.proargtypes::oid[])
                and not 'cstring'::regtype = any (p.proargtypes::oid[])
                and p.proname = any (array[
                    'array_fill', 'array_length', 'array_ndims', 'cardinality', 'clock_timestamp',
                    'current_setting', 'date_part', 'extract', 'floor', 'greatest', 'hashtext',
                    'hashtextextended', 'jsonb_array_length', 'jsonb_typeof', 'left', 'ltrim',
                    'make_interval', 'nextval', 'now', 'octet_length', 'pg_advisory_unlock',
                    'pg_notify', 'pg_relation_size', 'pg_sequence_last_value',
                    'pg_try_advisory_lock', 'power', 'random', 'set_config', 'setval',
                    'split_part', 'to_char', 'to_jsonb', 'to_timestamp'
                ])
        loop
            execute format(
                'create function evil.%I(%s) returns %s language plpgsql as %L',
                f.proname, f.args, f.result, 'begin raise exception ''evil''; end'
            );
        end loop;
        for o in
            select p.oprname, p.oprleft::regtype as l, p.oprright::regtype as r,
                p.oprresult::regtype as result, 'op_' || p.oid as fn
            from pg_operator as p
            where p.oprnamespace = 'pg_catalog'::regnamespace and p.oprkind = 'b'
                and p.oprleft in ('text'::regtype, 'int4'::regtype, 'int8'::regtype,
                    'timestamptz'::regtype, 'interval'::regtype, 'tid'::regtype, 'jsonb'::regtype)
                and p.oprname in ('=', '<>', '<', '<=', '>', '>=', '||', '+', '-', '*', '->', '#')
        loop
            execute format(
                'create function evil.%I(%s, %s) returns %s language plpgsql as %L',
                o.fn, o.l, o.r, o.result, 'begin raise exception ''evil''; end'
            );
            execute format(
                'create operator evil.%s (leftarg = %s, rightarg = %s, procedure = evil.%I)',
                o.oprname, o.l, o.r, o.fn
            );
        end loop;
        create table evil.job as select from pgqueue.job;
        create table evil.queue as select from pgqueue.queue;
        create table evil.run as select from pgqueue.run;
        create table evil.dead_job as select from pgqueue.dead_job;
    end;
    $$
    """,
    "vacuum analyze",
]

# What a client may have set, one session a line; settings that a version does not have are skipped.
SETTINGS = [
    "datestyle = 'SQL, DMY'",
    "datestyle = 'German'",
    "datestyle = 'Postgres, MDY'",
    "datestyle = 'ISO, YMD'",
    "datestyle = 'SQL, MDY'; timezone = 'Asia/Jakarta'",
    "timezone = 'America/St_Johns'",
    "timezone = '<+1245>-12:45'",
    "intervalstyle = 'sql_standard'",
    "intervalstyle = 'iso_8601'",
    "intervalstyle = 'postgres_verbose'",
    "search_path = ''",
    "search_path = evil, pg_catalog",
    "search_path = evil, pg_temp, pg_catalog, pgqueue",
    "plan_cache_mode = force_custom_plan",
    "plan_cache_mode = force_generic_plan",
    "jit = on; jit_above_cost = 0; jit_tuple_deforming = off",
    "random_page_cost = 1000",
    "random_page_cost = 0",
    "seq_page_cost = 0",
    "seq_page_cost = 1000",
    # Costs so high that every statement would be compiled, which another session tries.
    "cpu_index_tuple_cost = 1000; jit = off",
    "cpu_tuple_cost = 1000; jit = off",
    "cpu_operator_cost = 1000; jit = off",
    "effective_cache_size = '8kB'",
    "effective_cache_size = '100GB'",
    "work_mem = '64kB'",
    "work_mem = '10GB'",
    "hash_mem_multiplier = 1000",
    "from_collapse_limit = 1",
    "join_collapse_limit = 1",
    "geqo_threshold = 2; geqo_effort = 1",
    "cursor_tuple_fraction = 0.0000001",
    "cursor_tuple_fraction = 1",
    "recursive_worktable_factor = 1000000",
    "recursive_worktable_factor = 0.001",
    "constraint_exclusion = on",
    "constraint_exclusion = off",
    "parallel_setup_cost = 0; parallel_tuple_cost = 0; min_parallel_table_scan_size = 0; "
    "min_parallel_index_scan_size = 0; max_parallel_workers_per_gather = 4",
    "force_parallel_mode = on",
    "debug_parallel_query = on",
    "client_encoding = 'LATIN1'",
    "client_encoding = 'SQL_ASCII'",
    "standard_conforming_strings = off; escape_string_warning = off",
    "backslash_quote = off",
    "array_nulls = off",
    "transform_null_equals = on",
    "quote_all_identifiers = on",
    "extra_float_digits = -15; bytea_output = 'escape'; xmloption = 'document'",
    "synchronous_commit = off; commit_delay = 1000; commit_siblings = 0",
    "check_function_bodies = off; default_transaction_deferrable = on; row_security = off",
    "session_replication_role = 'replica'",
    "lock_timeout = '1ms'; deadlock_timeout = '1ms'",
    "client_min_messages = 'error'",
    "client_min_messages = 'debug5'",
    "stats_fetch_consistency = 'snapshot'; track_functions = 'all'",
    "temp_buffers = 100; maintenance_work_mem = '1MB'; default_statistics_target = 1",
    "plpgsql.extra_errors = 'all'; plpgsql.extra_warnings = 'all'",
    "plpgsql.variable_conflict = 'use_column'",
    "plpgsql.variable_conflict = 'use_variable'",
    "plpgsql.check_asserts = off; plpgsql.print_strict_params = on",
    "pgqueue.parked = 'x'",
    "pgqueue.parked = '1'",
    "pgqueue.notify = 'nonsense'",
    "pgqueue.notify = 'off'",
    "pgqueue.mark_1 = 'x'",
]


JOBS = "id, token, queue, kind, priority, attempt, worker, payload from pgqueue"
HELD = "%(ids)s::bigint[], %(tokens)s::bigint[]"

# Claims come before the calls that give jobs back to a place before a position, because when
# those are found again depends on the clock.
CALLS = {
    "enqueue": "pgqueue.enqueue('deep', '{\"n\": 1}')",
    "enqueue with options": "pgqueue.enqueue('deep', '1', 'rare', 5, null, 3, %(name)s, null, null, '{}')",
    "enqueue for later": "pgqueue.enqueue('deep', run_at => '2999-01-01 00:00 UTC')",
    "enqueue a duplicate": "pgqueue.enqueue('deep', '2', unique_key => %(key)s, on_duplicate => 'replace')",
    "enqueue with a window": "pgqueue.enqueue('windows', unique_key => %(name)s, unique_for => '1 hour')",
    "enqueue within a window": "pgqueue.enqueue('deep', unique_key => 'once', unique_for => '1 hour')",
    "enqueue in place of a late job": "pgqueue.enqueue(%(late)s, unique_key => 'k7')",
    "enqueue_many": "pgqueue.enqueue_many('deep', %(payloads)s)",
    "enqueue_many with keys": "pgqueue.enqueue_many('deep', %(payloads)s, "
    "unique_keys => %(keys)s, on_duplicate => 'postpone')",
    "claim of one": f"{JOBS}.claim('deep', 'w')",
    "claim of 50": f"{JOBS}.claim('deep', 'w', 50)",
    "claim of a kind": f"{JOBS}.claim('deep', 'w', 50, kinds => array['rare'])",
    "claim of priorities": f"{JOBS}.claim('mixed', 'w', 150, '1 minute')",
    "claim of the expired": f"{JOBS}.claim('lapsed 0', 'w', 50)",
    "claim of the late": f"{JOBS}.claim(%(late)s, 'w')",
    "claim of nothing": f"{JOBS}.claim('empty', 'w', 50)",
    "enqueue into a group": "pgqueue.enqueue('groups', group_key => 'group 7')",
    "claim of groups": f"{JOBS}.claim('groups', 'w', 50)",
    "claim_from": "id, queue from "
    "pgqueue.claim_from(array['deep', 'second'], 'w', 50, weights => array[3, 2])",
    "extend": f"* from pgqueue.extend({HELD}, '1 hour')",
    "complete": "pgqueue.complete(%(id)s, %(token)s, '\"done\"')",
    "complete_many": f"pgqueue.complete_many({HELD}, %(results)s)",
    "configure": "pgqueue.configure('deep', '1 minute', 9, '1 hour', '30 days', 3)",
    "claim with settings": f"{JOBS}.claim('deep', 'w', 50)",
    "limit": "pgqueue.configure('limited', group_limit => 9)",
    "claim of groups with a limit": f"{JOBS}.claim('limited', 'w', 50)",
    "pause of a group": "pgqueue.pause('groups', group_key => 'group 9')",
    "claim of other groups": f"{JOBS}.claim('groups', 'w', 50)",
    "cap": "pgqueue.configure('capped', max_running => 900, rate_limit => 900, rate_period => '1 day')",
    "claim under caps": f"{JOBS}.claim('capped', 'w', 50)",
    "rate": "pgqueue.configure('rated', group_key => 'a', rate_limit => 1, rate_period => '1 day')",
    "claim of a used up group": f"{JOBS}.claim('rated', 'w', 5)",
    "age": "pgqueue.configure('mixed', age_after => '25 minutes')",
    "claim of one that aged": f"{JOBS}.claim('mixed', 'w')",
    "claim of aged jobs": f"{JOBS}.claim('mixed', 'w', 200)",
    "fail": "pgqueue.fail(%(id)s, %(token)s, E'TimeoutError: a\\nb')",
    "fail for good": "pgqueue.fail(%(id)s, %(token)s, 'e', permanent => true)",
    "finish": f"* from pgqueue.finish({HELD}, %(outcomes)s, %(texts)s, %(delays)s)",
    "release": f"pgqueue.release({HELD})",
    "release for later": f"pgqueue.release({HELD}, '2999-01-01 00:00 UTC')",
    "save_step": "pgqueue.save_step(%(id)s, %(token)s, %(name)s, '[1]')",
    "steps": "name, value from pgqueue.steps(%(id)s)",
    "results_of": "* from pgqueue.results_of(%(id)s, %(token)s)",
    # Before this transaction leaves events to look at in a moment.
    "rest until later": "(extract(epoch from pgqueue.rest(array['later'])) / 86400)::int",
    "suspend": "pgqueue.suspend(%(id)s, %(token)s, %(name)s, '2999-01-01 00:00 UTC')",
    "emit": "pgqueue.emit(%(name)s, '[1]')",
    "events": "name, payload from pgqueue.events order by name",
    "rest": "extract(epoch from pgqueue.rest(array['deep', 'empty']))::int",
    "reap": "pgqueue.reap(100)",
    "maintain": "* from pgqueue.maintain()",
    "cancel": "pgqueue.cancel(%(ready)s, 'reason')",
    "cancel of a running job": "pgqueue.cancel(%(id)s)",
    "cancel_many": "pgqueue.cancel_many('deep', 'rare', enqueued_before => '2999-01-01', max_jobs => 20)",
    "run_now": "pgqueue.run_now(%(scheduled)s)",
    "reprioritize": "pgqueue.reprioritize(%(ready)s, 7)",
    "redrive": "pgqueue.redrive('grave 1', error_like => 'e', max_jobs => 20)",
    "redrive_job": "pgqueue.redrive_job(%(dead)s, '[]')",
    "discard": "pgqueue.discard(%(dead)s)",
    "discard_many": "pgqueue.discard_many('grave 2', max_jobs => 20)",
    "purge": "pgqueue.purge(%(bin)s)",
    "enqueue after another": "pgqueue.enqueue('deep', after => array[%(scheduled)s::bigint])",
    "shard_of": "pgqueue.shard_of(pg_catalog.concat('zo', pg_catalog.chr(235)), 7)",
    "after_failover": "pgqueue.after_failover()",
    "pause": "pgqueue.pause('deep')",
    "claim of a paused queue": f"{JOBS}.claim('deep', 'w')",
    "resume": "pgqueue.resume('deep')",
    "pause all": "pgqueue.pause()",
    "resume all": "pgqueue.resume()",
    "next_slots": "extract(epoch from s)::int "
    "from pgqueue.next_slots('30 2 * * *', 'Europe/Berlin', '2026-03-28 12:00 UTC', 3) as s",
    "schedule": "pgqueue.schedule('nightly', 'deep', '30 2 * * *', timezone => 'Europe/Berlin')",
    "schedule for days": "pgqueue.schedule('daily', 'deep', every => '3 days')",
    "pause_schedule": "pgqueue.pause_schedule('daily')",
    "resume_schedule": "pgqueue.resume_schedule('daily')",
    "run_schedule": "pgqueue.run_schedule('daily')",
    "progress": "pgqueue.progress(%(id)s, %(token)s, 0.5, 1.5, 'half')",
    "status": "state, done, total, message from pgqueue.status(%(id)s)",
    "result": "pgqueue.result(%(ready)s)",
    "await": "pgqueue.await(%(ready)s) is not null",
    "why": "pgqueue.why(%(ready)s)",
    # The others look at the last five minutes.
    "health": "h.check, h.hint from pgqueue.health() as h"
    " where h.check operator(pg_catalog.<>) all (array['backlog', 'failures', 'workers'])",
    "queues": "queue, ready, scheduled, running, expired, blocked, dead, paused, finished_last_hour, "
    "failed_last_hour, workers from pgqueue.queues where not is_estimate order by queue",
    "jobs": "state, count(*), sum(id), sum(attempt) from pgqueue.jobs group by 1 order by 1",
    "running": "id, queue, kind, worker, attempt from pgqueue.running order by id limit 300",
    # Not the numbers: what was rolled back makes files longer, and a sample of them another.
    "workers": "worker, array_to_string(queues, ',') from pgqueue.workers",
    "kinds": "queue, kind from pgqueue.kinds order by 1, 2",
    "throughput": "distinct queue from pgqueue.throughput order by 1",
    "failures": "distinct error_like from pgqueue.failures order by 1",
    "dead": "distinct error_like from pgqueue.dead order by 1",
    "stuck": "id, queue, problem, attempt from pgqueue.stuck order by id",
    "metrics": "* from string_to_table(pgqueue.metrics(true), E'\\n') as line"
    " where line !~ '_total' and line ~ '^#|_(dead_jobs|is_estimate|last_hour|schedule_late_seconds|workers)[{]'",
}
# These read a whole table each time, or are rare: to measure them once is enough.
CALLED = {
    "reap": 2,
    "maintain": 2,
    "enqueue in place of a late job": 1,
    "claim of the late": 2,
    "limit": 1,
    "cap": 1,
    "rate": 1,
    "next_slots": 1,
    "shard_of": 1,
    "after_failover": 1,
    "progress": 2,
    "events": 1,
    "status": 1,
    "result": 1,
    "await": 1,
    "health": 2,
    "schedule": 1,
    "schedule for days": 1,
    "pause_schedule": 1,
    "resume_schedule": 1,
    "run_schedule": 1,
    "queues": 2,
    "jobs": 1,
    "running": 1,
    "workers": 1,
    "kinds": 1,
    "throughput": 1,
    "failures": 1,
    "dead": 1,
    "stuck": 1,
    "metrics": 1,
}
VIEWS = {
    "queues", "jobs", "running", "workers", "kinds", "throughput", "failures", "dead", "stuck", "metrics",
}  # fmt: skip
# These deal with leases.
LEASING = {
    "claim", "claim_from", "extend", "complete", "complete_many",
    "fail", "finish", "release", "reap", "maintain", "rest", "progress", "await", "save_step", "suspend",
}  # fmt: skip

# Undoes what no rollback undoes: numbers that were drawn, positions, dead rows.
RESET = [
    "select setval('pgqueue.job_id_seq', (select max(id) from pgqueue.job))",
    "select setval('pgqueue.token_seq', (select max(token) from pgqueue.job))",
    "select setval(c.oid::regclass, 0) from pg_class as c where starts_with(c.relname, '_cell_')",
    # Rows that a claim had locked that was rolled back are not as before: an enqueue gives a group
    # whose ticket it is another one.
    "truncate pgqueue.ticket",
    "insert into pgqueue.ticket select * from tickets order by at",
    "vacuum pgqueue.job, pgqueue.dead_job, pgqueue.run, pgqueue.queue, pgqueue.permit",
]
# What a session left behind, except what is random or depends on the clock.
LEFT = """
select array[
    (
        select count(*) || ' ' || sum(hashtextextended(concat_ws(
            '|', j.id, j.queue, j.kind, j.state, j.priority, j.attempt, j.max_attempts, j.worker,
            j.cancelled_at is null, j.unique_key, j.group_key, j.last_error
        ), 0)) from pgqueue.jobs as j
    ),
    (
        select count(*) || ' ' || sum(hashtextextended(concat_ws(
            '|', r.slot, r.attempt, r.job_id, r.queue, r.kind, r.outcome, r.worker, r.result, r.error
        ), 0)) from pgqueue.run as r
    ),
    (
        select count(*) || ' ' || sum(hashtextextended(concat_ws(
            '|', d.id, d.queue, d.attempt, d.worker, d.error, d.payload, jsonb_array_length(d.errors)
        ), 0)) from pgqueue.dead_job as d
    ),
    (select string_agg(q::text, ' ' order by q.name) from pgqueue.queue as q),
    (
        select string_agg(concat_ws('|', k.queue, k.unique_key, k.job_id), ' ' order by k.unique_key)
        from pgqueue.recent_key as k
    ),
    (
        select string_agg(concat_ws(
            '|', s.name, extract(epoch from s.next_slot), extract(epoch from s.due_at), s.is_paused
        ), ' ' order by s.name)
        from pgqueue.schedule as s
    )
]
"""


@dataclass
class Session:
    """The answers that a session got, what it left behind, and the pages its calls touched."""

    answers: dict[str, list | str] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def deep(template: str) -> Iterator[str]:
    """Name a database with a deep queue in it."""
    dsn = make_conninfo(dbname=DEEP)
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"drop database if exists {DEEP} with (force)")
        admin.execute(f"create database {DEEP} template {template}")
        with psycopg.connect(dsn, autocommit=True) as db:
            for step in FILL:
                db.execute(step)
            db.execute("create table tickets as table pgqueue.ticket")
        yield dsn
        admin.execute(f"drop database {DEEP} with (force)")


def run(
    deep: str,
    *settings: str,
    prepare: Callable[[psycopg.Connection], object] = lambda db: None,
    changing: Iterable[str] = (),
    spelled: Callable[[str], str] = str,
) -> Session:
    """Call each function in a fresh session, with these settings, and roll back."""
    session, changes = Session(), iter(changing)
    with (
        psycopg.connect(deep, autocommit=True) as other,
        psycopg.connect(deep, autocommit=True) as db,
    ):
        for step in RESET:
            other.execute(step)
        given = arguments(other)
        prepare(db)
        for setting in settings:
            db.execute(f"set {setting}")
        with db.transaction(force_rollback=True):
            for name, call in CALLS.items():
                call = spelled(call)
                for setting in itertools.islice(changes, 1):
                    db.execute(f"set {setting}")
                first, *others = itertools.islice(given, CALLED.get(name, 4))
                session.answers[name] = answer(db, f"select {call}", first)
                if others and isinstance(session.answers[name], list):
                    # The plans are made now. The median of three, because now and then a
                    # claim walks from the beginning.
                    session.buffers[name] = statistics.median(
                        buffers(db, f"select {call}", each) for each in others
                    )
            db.execute("reset all")
            session.left = one(db, LEFT)
    return session


def arguments(db: psycopg.Connection) -> Iterator[dict]:
    """Give each call names, keys, leases and ids of its own."""
    leases = db.execute(
        "select id, token from pgqueue.job where worker = 'elsewhere' and id %% 100 > 0 order by id desc",
        [],
    ).fetchall()
    found = {
        state: column(
            db,
            "select id from pgqueue.jobs where queue = 'deep' and state = %s order by id desc limit 300",
            state,
        )
        for state in ("ready", "scheduled")
    }
    dead = column(
        db, "select id from pgqueue.dead_job where queue = 'grave 3' order by id"
    )
    for n in range(len(dead)):
        held = leases[n * 20 : n * 20 + 20]
        yield {
            "name": f"name {n}",
            "key": f"key {n + 1}",
            "keys": [f"key {4985 + n - k}" for k in range(30)],
            "payloads": [Jsonb(n)] * 30,
            "results": [Jsonb(n)] * 20,
            "delays": [timedelta(hours=1)] * 20,
            "bin": f"bin {n % 4}",
            "late": f"late bin {n % 4}",
            "id": held[0][0],
            "token": held[0][1],
            "ids": [id for id, _ in held],
            "tokens": [token for _, token in held],
            "outcomes": ["complete", "fail", "reject", "release"] * 5,
            # No null: under array_nulls = off the caller would pass the word.
            "texts": ["1", "e", "e", "why"] * 4 + ["{"] * 4,
            "ready": found["ready"][n],
            "scheduled": found["scheduled"][n],
            "dead": dead[n],
        }


def answer(db: psycopg.Connection, query: str, given: dict) -> list | str:
    """The rows, or the SQLSTATE."""
    try:
        with db.transaction():
            rows = db.execute(query, given).fetchall()
    except psycopg.Error as error:
        return error.sqlstate or str(error)
    # psycopg does not guess what SQL_ASCII means.
    rows = [
        tuple(cell.decode() if isinstance(cell, bytes) else cell for cell in row)
        for row in rows
    ]
    # claim_from draws at random which queue comes first.
    return sorted(rows) if "claim_from" in query else rows


def buffers(db: psycopg.Connection, query: str, given: dict) -> int:
    """The pages that a call touches."""
    (plan,) = one(db, f"explain (analyze, buffers, format json) {query}", given)
    return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]


@pytest.fixture(scope="module")
def usual(deep: str) -> Session:
    """What a session without settings gets, leaves behind, and costs at most."""
    first, second = run(deep), run(deep)
    assert differences(first, second) == {}, "nothing that is random is compared"
    assert all(isinstance(rows, list) for rows in first.answers.values())
    idle = {name for name, rows in first.answers.items() if not rows}
    assert idle == {"claim of nothing", "claim of a paused queue", "stuck"}
    for name in first.buffers:
        first.buffers[name] = max(first.buffers[name], second.buffers[name])
    return first


def differences(session: Session, usual: Session) -> dict[str, object]:
    """Find the answers that differ from the usual, what was left, and calls of more than three times its pages."""
    found: dict[str, object] = {
        name: (rows, usual.answers[name])
        for name, rows in session.answers.items()
        if rows != usual.answers[name]
    }
    found |= {
        f"{name}: pages": (pages, usual.buffers[name])
        for name, pages in session.buffers.items()
        if pages > max(20, 3 * usual.buffers[name])
    }
    if session.left != usual.left:
        found["left"] = (session.left, usual.left)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_no_setting_of_a_session_changes_an_answer_or_its_cost(deep, usual, settings):
    each = settings.split("; ")
    with psycopg.connect(dbname="postgres") as db:
        known = column(db, "select lower(name) from pg_settings")
    names = [setting.split(" = ")[0] for setting in each]
    if any(name not in known and "." not in name for name in names):
        pytest.skip("a setting of another version")
    assert differences(run(deep, *each), usual) == {}


def test_no_change_of_settings_between_calls_changes_an_answer_or_its_cost(deep, usual):
    styles = [
        "datestyle = 'SQL, DMY'",
        "timezone = 'Asia/Jakarta'",
        "datestyle = 'ISO, MDY'",
        "intervalstyle = 'sql_standard'",
        "datestyle = 'German'",
        "timezone = 'UTC'",
        "intervalstyle = 'postgres'",
    ]
    session = run(deep, changing=itertools.cycle(styles))
    assert differences(session, usual) == {}


# It ignores case, as columns of names and addresses may.
BLIND = """
create collation blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false)
"""
# The first text that a call is given.
TEXT = re.compile(
    r"(pgqueue\.\w+\((?:[^')]|%\(\w+\)s)*?)"
    r"(E?'(?:[a-zT]|30 2)[^']*'|%\((?:name|late|bin|key)\)s)"
)


def blind(call: str) -> str:
    """Give one text a collation, which Postgres then gives to all texts of the call."""
    return TEXT.sub(r"\1\2 collate blind", call, count=1)


def test_no_collation_of_an_argument_changes_an_answer_or_its_cost(deep, usual):
    with psycopg.connect(deep, autocommit=True) as db:
        db.execute(BLIND)
    assert sum(blind(call) != call for call in CALLS.values()) > 50
    assert differences(run(deep, spelled=blind), usual) == {}


def test_what_is_named_in_a_collation_that_ignores_case_is_found(db):
    db.execute(BLIND)
    db.execute("create table person (email text collate blind)")
    db.execute("insert into person values ('Ann@x.org')")
    db.execute("select pgqueue.configure('mail', max_attempts => 3)")
    db.execute(
        "select pgqueue.enqueue('mail', group_key => email, priority => 5) from person"
    )
    db.execute(
        "select pgqueue.enqueue_many('mail', '{1}'::jsonb[], group_keys => array[email]) from person"
    )
    assert column(db, "select max_attempts from pgqueue.job") == [3, 3]
    held = "select id, token from pgqueue.claim('mail', 'w')"
    id, token = db.execute(held).fetchone()
    db.execute("select pgqueue.suspend(%s, %s, 'seen Ann@x.org')", (id, token))
    # So that nothing but the emit tells of it.
    db.execute("select pgqueue.maintain()")
    assert one(db, "select count(*) from pgqueue.loose_end") == 0
    db.execute("select pgqueue.emit('seen ' || email) from person")
    db.execute("select pgqueue.maintain()")
    assert one(db, "select state from pgqueue.status(%s)", id) == "ready"
    assert id in column(db, "select id from pgqueue.claim('mail', 'w', 2)")


def test_no_planner_switch_changes_an_answer_or_its_cost(deep, usual):
    """Every switch that this version has, in the short form some, each turned the other way."""
    with psycopg.connect(dbname="postgres") as db:
        switches = column(
            db,
            "select name || ' = ' || case setting when 'on' then 'off' else 'on' end "
            "from pg_settings where starts_with(name, 'enable_')",
        )
    assert len(switches) > 15
    switches = some(switches, 2, "switches")
    found = {switch: differences(run(deep, switch), usual) for switch in switches}
    assert {switch: wrong for switch, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_only_functions_that_deal_with_leases_refuse_an_older_snapshot(
    deep, usual, level
):
    session = run(deep, f"default_transaction_isolation = '{level}'")
    refused = {name for name, rows in session.answers.items() if rows == "25001"}
    assert refused == {name for name in CALLS if name.split()[0] in LEASING}
    # The views differ, and why and health, because they show the claims that were refused here.
    others = CALLS.keys() - refused - VIEWS - {"why", "health"}
    for name in others:
        assert session.answers[name] == usual.answers[name], name


def test_a_read_only_session_can_read_views_and_rest_and_nothing_else(deep, usual):
    session = run(deep, "default_transaction_read_only = on")
    allowed = {name for name, rows in session.answers.items() if rows != "25006"}
    # An enqueue within a window has nothing to write.
    allowed.remove("enqueue within a window")
    # Nor has this one, without the schedule.
    assert session.answers["run_schedule"] == "PQ001"
    allowed.remove("run_schedule")
    readers = {"why", "health", "status", "result", "await", "next_slots", *VIEWS}
    readers |= {"steps", "events", "results_of", "shard_of"}
    assert allowed == {"rest until later", *readers}
    assert session.answers["rest until later"] == usual.answers["rest until later"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "setting",
    ["jit_above_cost = 100000"]
    + [
        f"enable_{way} = off"
        for way in ("indexscan", "nestloop", "seqscan", "sort", "tidscan")
    ],
)
def test_no_statement_is_compiled_by_jit(deep, setting):
    """A plan that must use a method that is switched off looks so expensive that Postgres compiles
    the statement, which takes longer each time than all the rest."""
    plans: list[str] = []

    def listen(db: psycopg.Connection) -> None:
        db.execute("set jit = on")  # cluster.py --fast has switched it off
        if not one(db, "select pg_jit_available()"):
            pytest.skip("a server that cannot compile")
        db.execute("load 'auto_explain'")
        db.add_notice_handler(
            lambda notice: (
                plans.append(notice.message_primary or "")
                if "pgqueue." in (notice.context or "")
                else None
            )
        )

    run(
        deep,
        setting,
        "auto_explain.log_min_duration = 0",
        "auto_explain.log_nested_statements = on",
        "client_min_messages = log",
        prepare=listen,
    )
    assert len(plans) > 1000, "auto_explain has shown the plans inside the functions"
    compiled = [plan for plan in plans if "JIT:" in plan]
    assert not compiled, (len(compiled), compiled[0])
