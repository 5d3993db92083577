-- Dead jobs: redrive sends them back to work, discard deletes them, one by one or by filter.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(36);

create function pg_temp.dead(queue text, payload jsonb, kind text, error text, unique_key text default null)
    returns bigint
    language plpgsql
as $$
declare
    j pgqueue.job;
    id bigint := pgqueue.enqueue(queue, payload, kind, unique_key => unique_key);
begin
    j := pgqueue.claim(queue, 'w');
    perform pgqueue.fail(j.id, j.token, error, permanent => true);
    return id;
end;
$$;

-- Redrive

select pg_temp.dead('r', '1', 'mail', 'timeout of smtp') as a \gset
select pg_temp.dead('r', '2', 'mail', 'bad address', 'k') as b \gset
select pg_temp.dead('r', '3', 'sms', 'timeout of sms') as c \gset
select pg_temp.dead('s', '4', 'sms', 'timeout of sms') as d \gset
select is(
    (select array_agg(r) from pgqueue.redrive(dry_run => true) as r), array[:a, :b, :c, :d]::bigint[],
    'a dry run of redrive returns the ids that would go back to work'
);
select is((select count(*) from pgqueue.dead_job), 4::bigint, 'a dry run of redrive moves no job');
select is(
    (select array_agg(r) from pgqueue.redrive(f.queue, f.kind, f.error_like, max_jobs => f.max_jobs, dry_run => true) as r),
    f.ids, format('redrive filters by %s', f.name)
)
from (values
    ('queue', 'r', null, null, null::int, array[:a, :b, :c]::bigint[]),
    ('kind', null, 'sms', null, null, array[:c, :d]),
    ('error, and stops at max_jobs', null, null, 'timeout%', 2, array[:a, :c])
) as f (name, queue, kind, error_like, max_jobs, ids);
select is_empty(
    $$ select pgqueue.redrive(died_before => now() - interval '1 hour') $$,
    'redrive leaves jobs that died after died_before'
);
select is_empty(
    $$ select pgqueue.redrive(died_after => now() + interval '1 hour') $$,
    'redrive leaves jobs that died before died_after'
);
select is(
    (select array_agg(r) from pgqueue.redrive('r', 'mail', 'timeout%') as r), array[:a]::bigint[],
    'redrive returns the ids of the jobs that match every filter'
);
select results_eq(
    format('select j.state, j.attempt, j.last_error from pgqueue.jobs as j where j.id = %s', :a),
    $$ values ('ready', 0, 'timeout of smtp') $$,
    'a redriven job has its old id and errors, and all its attempts again'
);
select is_empty(
    format('select from pgqueue.dead_job where id = %s', :a), 'a redriven job is no longer in dead_job'
);
select pgqueue.enqueue('r', unique_key => 'k') as living \gset
select is(
    (select array_agg(r) from pgqueue.redrive('r') as r), array[:c]::bigint[],
    'a dead job whose unique key is taken stays dead and does not stop the others'
);
select pg_temp.dead('twins', '1', 'x', 'e', 'k') is null;
select pg_temp.dead('twins', '2', 'x', 'e', 'k') is null;
select is(
    (select count(*) from pgqueue.redrive('twins', dry_run => true)), 1::bigint, 'a dry run knows that only one can come back'
);
select is(
    (select count(*) from pgqueue.redrive('twins')), 1::bigint,
    'redrive sends back one of two dead jobs with the same unique key'
);

-- One dead job

select is(
    pgqueue.redrive_job(:b, '"edited"'), null, 'redrive_job returns null while the unique key is taken'
);
select pgqueue.cancel(:living);
select is(
    pgqueue.redrive_job(:b), :b::bigint, 'redrive_job sends the job back when the unique key is free again'
);
select is(
    (select payload from pgqueue.job where id = :b), '"edited"'::jsonb,
    'a payload given to redrive_job is kept even when the job had to stay dead'
);
select throws_ok(
    format('select pgqueue.redrive_job(%s)', :b), 'PQ001', null, 'a job cannot be redriven twice'
);
select pg_temp.dead('small', to_jsonb(repeat('x', 100)), 'tiny', 'e') as fat \gset
select pg_temp.dead('small', to_jsonb(repeat('x', 100)), 'tiny', 'e') as other \gset
select pgqueue.configure('small', kind => 'tiny', max_payload_bytes => pg_column_size('"123"'::jsonb));
select throws_ok(
    format($$ select pgqueue.redrive_job(%s, '"1234"') $$, :fat), '54000', null,
    'redrive_job refuses a payload above max_payload_bytes, as enqueue does'
);
select is(
    (select length(payload #>> '{}') from pgqueue.dead_job where id = :fat), 100, 'and the dead job keeps its own'
);
select is(pgqueue.redrive_job(:fat, '"123"'), :fat::bigint, 'one of just that size is taken');
select is(pgqueue.redrive_job(:other), :other::bigint, 'a job goes back with the payload that it has, however large');
select lives_ok(format('select pgqueue.discard(%s)', :d), 'a dead job can be discarded');
select is_empty(
    format('select from pgqueue.dead_job where id = %s', :d), 'a discarded job is no longer in dead_job'
);
select throws_ok(
    format('select pgqueue.discard(%s)', :d), 'PQ001', null, 'a dead job cannot be discarded twice'
);

-- Many by filter

select pg_temp.dead('bulk', to_jsonb(n), 'k', e.error)
from generate_series(1, 3) as n,
    (values (E'TimeoutError: slow\n  timeout=5'), (E'ValueError: 404\n  timeout=5')) as e (error);
select is(
    (select count(*) from pgqueue.redrive('bulk', error_like => '%timeout%', dry_run => true)), 3::bigint,
    'redrive matches the first line of an error, ignoring case'
);
select is(
    (select count(*) from pgqueue.discard_many('bulk', error_like => 'valueerror%', dry_run => true)), 3::bigint,
    'discard_many matches the first line of an error, ignoring case'
);
select is(
    (select count(*) from pgqueue.dead_job where queue = 'bulk'), 6::bigint,
    'a dry run of discard_many drops no job'
);
select is(
    (select count(*) from pgqueue.discard_many('bulk', error_like => 'valueerror%')), 3::bigint,
    'discard_many returns the ids of the dead jobs it dropped'
);
select is(
    (select count(*) from pgqueue.redrive('bulk')), 3::bigint,
    'discard_many leaves the dead jobs that do not match its filter'
);

-- keep_dead

delete from pgqueue.dead_job;
create function pg_temp.died(days int, queue text, kind text, group_key text default null)
    returns void
    language sql
as $$
    insert into pgqueue.dead_job (
        id, died_at, enqueued_at, run_at, priority, attempt, max_attempts, queue, kind, group_key, error, payload, errors
    )
    select (random() * 1e15)::bigint, now() - $1 * interval '1 day', now(), now(), 0, 1, 1, $2, $3, $4, 'e', '{}', '[]'
$$;
create function pg_temp.left_over()
    returns text
    language sql
as $$
    select string_agg(format('%s/%s/%s %s', queue, kind, group_key, (now() - died_at)::text), ', '
        order by queue, kind, group_key nulls first, died_at desc)
    from pgqueue.dead_job
$$;
select pg_temp.died(d.days, s.queue, s.kind, s.group_key)
from (values (1), (20)) as d (days), (values ('a', 'k', null), ('a', 'l', 'g'), ('b', 'k', 'g'), ('b', 'k', 'h')) as s (queue, kind, group_key);
select is(pgqueue._forget_dead(), 0::bigint, 'without keep_dead no dead job is dropped');
select pgqueue.configure('b', group_key => 'g', keep_dead => '2 days');
select is(
    (select done from pgqueue.maintain() where task = 'forget dead jobs'), 1::bigint,
    'maintain drops what a group has kept for its keep_dead, and nothing else'
);
select pgqueue.configure('a', kind => 'k', keep_dead => '2 days');
select pgqueue.configure(null, keep_dead => '30 days');
select is(pgqueue._forget_dead(), 1::bigint, 'a kind may keep its dead jobs for less than the others');
select is(
    pg_temp.left_over(),
    'a/k/ 1 day, a/l/g 1 day, a/l/g 20 days, b/k/g 1 day, b/k/h 1 day, b/k/h 20 days',
    'a dead job is kept while the keep_dead in force for its queue, kind and group says so'
);
select pgqueue.configure(null, keep_dead => '1 hour');
select pgqueue.configure(null, group_key => 'g', keep_dead => '10 years');
select pgqueue._forget_dead();
select is(
    pg_temp.left_over(), 'a/k/ 1 day, a/l/g 1 day, a/l/g 20 days, b/k/g 1 day',
    'a group or a kind may keep its dead jobs for longer than the others'
);
select pgqueue.configure(null, keep_dead => '1 second');
select pg_temp.died(2 + n % 3, 'many ' || n % 7, 'k' || n % 2) from generate_series(1, 10004) as n;
select is(pgqueue._forget_dead(), 10000::bigint, 'maintain drops at most 10,000 dead jobs');
select is(pgqueue._forget_dead(), 4::bigint, 'a second maintain drops the dead jobs that the first one left');

select * from finish();
rollback;
