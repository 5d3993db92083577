-- Schedules: created, changed, paused, and fired by claims, rests and maintain; test_schedules.py has the races.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(62);

-- Makes a schedule due, this long ago.
create function pg_temp.late(name text, by interval)
    returns void
    language sql
as $$
    update pgqueue.schedule as s
    set next_slot = pgqueue._next_slot(s, clock_timestamp() - by),
        due_at = pgqueue._next_slot(s, clock_timestamp() - by) + pgqueue._share_of_jitter(s.name, s.jitter)
    where s.name = $1
$$;
create function pg_temp.fired()
    returns bigint
    language sql
as $$ select m.done from pgqueue.maintain() as m where m.task = 'fire schedules' $$;

-- A slot makes a job

select pgqueue.schedule(
    'report', 'reports', '0 * * * *', payload => '{"for": "board"}', kind => 'monthly', priority => 7, max_attempts => 3
);
select results_eq(
    $$ select name, queue, kind, cron, every, timezone, catch_up, paused, last_slot, last_job_id, last_state, problem from pgqueue.schedules $$,
    $$ values (
        'report', 'reports', 'monthly', '0 * * * *', null::interval, 'UTC', 'one', false, null::timestamptz, null::bigint, null, null
    ) $$,
    'schedule makes what the view schedules shows'
);
select is(
    (select next_slot from pgqueue.schedules), date_trunc('hour', now()) + interval '1 hour', 'its first slot is the next'
);
select is(pg_temp.fired(), 0::bigint, 'a slot is not fired before it is due');
select pg_temp.late('report', '1 hour');
select next_slot as slot from pgqueue.schedules \gset
select is(pg_temp.fired(), 1::bigint, 'one that is due is fired');
select is(pg_temp.fired(), 0::bigint, 'and only once');
select results_eq(
    $$ select queue, kind, priority, max_attempts, payload, headers ->> 'schedule' from pgqueue.job $$,
    $$ values ('reports', 'monthly', 7, 3, '{"for": "board"}'::jsonb, 'report') $$,
    'its job is as schedule said'
);
select is(
    (select (headers ->> 'slot')::timestamptz from pgqueue.job), :'slot'::timestamptz, 'and has the slot in its headers'
);
select results_eq(
    $$ select last_slot, last_job_id, last_state, next_slot > now() from pgqueue.schedules $$,
    format($$ select %L::timestamptz, id, 'ready', true from pgqueue.job $$, :'slot'),
    'the view shows the last slot, its job, and the next slot'
);
select id, token from pgqueue.claim('reports', 'w') \gset
select is((select last_state from pgqueue.schedules), 'running', 'the view follows the job: running');
select pgqueue.complete(:id, :token);
select is((select last_state from pgqueue.schedules), 'completed', 'completed');
select pg_temp.late('report', '1 hour');
select pg_temp.fired();
select id, token from pgqueue.claim('reports', 'w') \gset
select pgqueue.fail(:id, :token, 'no paper', permanent => true);
select is((select last_state from pgqueue.schedules), 'dead', 'dead');

-- Called again

select next_slot as slot from pgqueue.schedules \gset
select pg_temp.late('report', '1 hour');
select next_slot as slot from pgqueue.schedule \gset
select pgqueue.schedule('report', 'other', '0 * * * *', payload => '{"for": "us"}');
select results_eq(
    $$ select queue, kind, priority, payload, next_slot from pgqueue.schedule $$,
    format($$ values ('other', null, null::int, '{"for": "us"}'::jsonb, %L::timestamptz) $$, :'slot'),
    'schedule with the same name changes what differs, and a slot that is due stays due'
);
select xmin as version from pgqueue.schedule \gset
select pgqueue.schedule('report', 'other', '0 * * * *', payload => '{"for": "us"}');
select is((select count(*) from pgqueue.schedule), 1::bigint, 'called again there is one schedule');
update pgqueue.schedule set last_slot = now() + interval '1 day';
select pgqueue.schedule('report', 'other', '30 * * * *');
select ok(
    (select next_slot > last_slot from pgqueue.schedule), 'with other slots it begins after the last slot that has a job'
);
select pgqueue.unschedule('report');
select is_empty('select from pgqueue.schedule', 'unschedule ends it');
select is((select count(*) from pgqueue.job), 0::bigint, 'a schedule that has ended makes no job');

-- Group and headers

select pgqueue.schedule(
    'report', 'reports', '0 * * * *', headers => '{"trace": 1, "schedule": "mine"}', group_key => 'acme'
);
select results_eq(
    'select group_key, headers from pgqueue.schedules',
    $$ values ('acme', '{"trace": 1, "schedule": "mine"}'::jsonb) $$, 'the view shows group and headers'
);
select pg_temp.late('report', '1 hour');
select pg_temp.fired();
select results_eq(
    $$ select group_key, headers - 'slot' from pgqueue.job $$,
    $$ values ('acme', '{"trace": 1, "schedule": "report"}'::jsonb) $$,
    'its jobs have both, and their headers the name of the schedule, whatever was given'
);
select xmin as version from pgqueue.schedule \gset
select pgqueue.schedule(
    'report', 'reports', '0 * * * *', headers => '{"schedule": "mine", "trace": 1}', group_key => 'acme'
);
select is((select xmin from pgqueue.schedule), :'version'::xid, 'the same arguments write nothing');
select pgqueue.schedule('report', 'reports', '0 * * * *');
select results_eq(
    'select group_key, headers from pgqueue.schedules', 'values (null, null::jsonb)', 'left out, they are gone'
);
select pgqueue.unschedule('report');
delete from pgqueue.job;

-- Another rule, while slots of the old one are due

select pgqueue.schedule('hourly', 'old', '0 * * * *', payload => '"old"', jitter => '1 day');
select pg_temp.late('hourly', '1 hour');
select next_slot as slot from pgqueue.schedule \gset
select pgqueue.schedule('hourly', 'new', '30 * * * *', payload => '"new"', jitter => '1 day');
select results_eq(
    $$ select queue, payload, (headers ->> 'slot')::timestamptz from pgqueue.job $$,
    format($$ values ('new', '"new"'::jsonb, %L::timestamptz) $$, :'slot'),
    'a deploy at the full hour does not lose the job of that hour, and makes it as it is now to be'
);
select results_eq(
    'select last_slot, last_job_id, next_slot from pgqueue.schedules',
    format(
        $$ select %L::timestamptz, id, date_trunc('hour', now() - interval '30 minutes') + interval '90 minutes'
            from pgqueue.job $$,
        :'slot'
    ),
    'the schedule knows it, and goes on with the new slots'
);
select pgqueue.schedule('hourly', 'new', every => '1 hour');
select is((select count(*) from pgqueue.job), 1::bigint, 'another change makes no other job of it');
select pgqueue.unschedule('hourly');
select pgqueue.schedule('hourly', 'all', every => '10 minutes', catch_up => 'all');
select pg_temp.late('hourly', '1 day');
select pgqueue.schedule('hourly', 'all', '0 3 * * *', catch_up => 'all');
select is(
    (select count(distinct headers ->> 'slot') from pgqueue.job where queue = 'all'), 144::bigint,
    'with catch_up all, each slot that was due by the old rule has a job'
);
select pgqueue.schedule('hourly', 'skip', every => '1000 days', catch_up => 'skip');
select pg_temp.late('hourly', '1000 days');
select pgqueue.schedule('hourly', 'skip', every => '1 day', catch_up => 'skip');
select is((select count(*) from pgqueue.job where queue = 'skip'), 0::bigint, 'with catch_up skip, an old one has none');
select pgqueue.schedule('hourly', 'paused', every => '1 hour');
select pg_temp.late('hourly', '1 hour');
select pgqueue.pause_schedule('hourly');
select pgqueue.schedule('hourly', 'paused', every => '30 minutes');
select is((select count(*) from pgqueue.job where queue = 'paused'), 0::bigint, 'nor has one of a schedule that is paused');
select pgqueue.unschedule('hourly');
select pgqueue.schedule('hourly', 'mars', '0 * * * *');
select pg_temp.late('hourly', '1 hour');
update pgqueue.schedule set timezone = 'Mars/Base';
select pgqueue.schedule('hourly', 'earth', '@daily', timezone => 'Europe/Berlin');
select is(
    (select count(*) from pgqueue.job where queue = 'earth'), 1::bigint,
    'a time zone that the server does not know loses no slot when it is replaced'
);
select is((select problem from pgqueue.schedules), null, 'and the schedule is well');
select pgqueue.unschedule('hourly');
delete from pgqueue.job;

-- Every

select pgqueue.schedule('weekly', 'q', every => '7 days');
select is(
    (select to_char(next_slot at time zone 'UTC', 'Dy HH24:MI') from pgqueue.schedule), 'Mon 00:00',
    'slots of an interval count from a Monday'
);
set local timezone = 'Europe/Berlin';
select pgqueue.schedule('weekly', 'q', every => '1 day');
select pg_temp.late('weekly', '400 days');
select pg_temp.fired();
select is(
    (select to_char(next_slot at time zone 'UTC', 'HH24:MI') from pgqueue.schedule), '00:00',
    'a day has 24 hours, whatever the clocks of the caller do'
);
set local timezone = 'UTC';
delete from pgqueue.job;

-- What was missed

select pgqueue.schedule('weekly', 'one', every => '10 minutes');
select pg_temp.late('weekly', '1 day');
select is(pg_temp.fired(), 1::bigint, 'of many slots that were missed one is made up for');
select is(
    (select (headers ->> 'slot')::timestamptz from pgqueue.job where queue = 'one'),
    date_bin('10 minutes', now(), '2024-01-01'), 'it is the last'
);
select pgqueue.schedule('weekly', 'all', every => '10 minutes', catch_up => 'all');
select pg_temp.late('weekly', '1 day');
select is(pg_temp.fired(), 144::bigint, 'with catch_up all, all are');
select is(
    (select count(distinct headers ->> 'slot') from pgqueue.job where queue = 'all'), 144::bigint, 'each has its own slot'
);
select pgqueue.schedule('weekly', 'all', every => '1 second', catch_up => 'all');
select pg_temp.late('weekly', '1 day');
select is(pg_temp.fired(), 1000::bigint, 'but at most a thousand');
select ok((select next_slot > now() from pgqueue.schedule), 'those that are left are given up');
select pgqueue.schedule('weekly', 'skip', every => '1 hour', catch_up => 'skip');
update pgqueue.schedule set every = '2 hours';
update pgqueue.schedule set next_slot = date_bin('2 hours', now(), '1970-01-05') - interval '10 hours',
    due_at = now() - interval '9 hours';
select pg_temp.fired() as made \gset
select is(
    :made::bigint, (now() - date_bin('2 hours', now(), '1970-01-05') <= interval '2 minutes')::int::bigint,
    'with catch_up skip none is made up for that is more than two minutes late'
);
select ok((select next_slot > now() from pgqueue.schedule), 'and the next one is to come');
select pgqueue.schedule('weekly', 'skip', '* * * * * *', catch_up => 'skip');
select pg_temp.late('weekly', '30 seconds');
select is(pg_temp.fired(), 1::bigint, 'one that is a little late is fired');
select pgqueue.unschedule('weekly');

-- Pause

select pgqueue.schedule('nightly', 'q', '* * * * *', catch_up => 'all');
select pg_temp.late('nightly', '1 hour');
select pgqueue.pause_schedule('nightly');
select is(pg_temp.fired(), 0::bigint, 'a schedule that is paused is not fired');
select results_eq(
    'select paused, next_slot from pgqueue.schedules', 'values (true, null::timestamptz)', 'the view says that it is paused'
);
select pgqueue.schedule('nightly', 'q', '*/5 * * * *');
select ok((select paused from pgqueue.schedules), 'schedule does not resume it');
select pgqueue.resume_schedule('nightly');
select ok((select next_slot > now() and not paused from pgqueue.schedules), 'resume goes on with the next slot');
select pgqueue.resume_schedule('nightly');
select throws_ok($$ select pgqueue.pause_schedule('x') $$, 'PQ001', null, 'pause_schedule of an unknown name raises PQ001');
select throws_ok($$ select pgqueue.resume_schedule('x') $$, 'PQ001', null, 'so does resume_schedule');

-- One slot came an hour ago, but waits for its jitter.
select pgqueue.schedule('waits', 'waits', every => '7 days', catch_up => 'skip', jitter => '1 day');
update pgqueue.schedule set next_slot = now() - interval '1 hour', due_at = now() + interval '1 hour', jitter = '365 days'
where name = 'waits';
select pgqueue.pause_schedule('waits'), pgqueue.resume_schedule('waits');
select ok(
    (select next_slot < now() and due_at > now() from pgqueue.schedule where name = 'waits'),
    'a slot that still waits for its jitter survives a pause'
);
update pgqueue.schedule set due_at = now() + interval '1 hour' where name = 'waits';
select pgqueue.schedule('waits', 'waits', every => '7 days', catch_up => 'skip');
select results_eq(
    $$ select count(*), (select next_slot > now() from pgqueue.schedule where name = 'waits') from pgqueue.job where queue = 'waits' $$,
    $$ values (1::bigint, true) $$, 'without a jitter it is not late, but has come'
);
select throws_ok($$ select pgqueue.unschedule(null) $$, 'PQ001', null, 'so does unschedule');

-- At once

select pgqueue.schedule(
    'nightly', 'by hand', '@daily', payload => '{"of": 1}', kind => 'k', priority => 7, group_key => 'g', headers => '{"trace": 1}'
);
select pgqueue.pause_schedule('nightly');
select s::text as before from pgqueue.schedule as s where s.name = 'nightly' \gset
select pgqueue.run_schedule('nightly') as id \gset
select results_eq(
    format('select queue, kind, priority, group_key, payload from pgqueue.job where id = %s', :id),
    $$ values ('by hand', 'k', 7, 'g', '{"of": 1}'::jsonb) $$, 'run_schedule enqueues a job of a schedule, also of a paused one'
);
select ok(
    (select headers @> '{"trace": 1, "schedule": "nightly"}' from pgqueue.job where id = :id), 'its headers say of which'
);
select ok(
    (
        select clock_timestamp() - (headers ->> 'slot')::timestamptz between '0' and interval '1 minute'
        from pgqueue.job where id = :id
    ),
    'and the moment, as the slot'
);
select is((select s::text from pgqueue.schedule as s where s.name = 'nightly'), :'before', 'the schedule itself stays as it is');
select throws_ok($$ select pgqueue.run_schedule('x') $$, 'PQ001', null, 'run_schedule of an unknown name raises PQ001');
select pgqueue.unschedule('nightly');

-- Jitter

select pgqueue.schedule('j' || n, 'jitter', every => '1 hour', jitter => '10 minutes') from generate_series(1, 100) as n;
select ok(
    (
        select count(distinct width_bucket(extract(epoch from due_at - next_slot)::float8, 0, 600, 10)) = 10
            and min(due_at - next_slot) >= '0' and max(due_at - next_slot) < '10 minutes'
        from pgqueue.schedule where queue = 'jitter'
    ),
    'jitter spreads schedules with the same slots over all of it'
);
select pgqueue.unschedule(name) from pgqueue.schedules;

-- A schedule that cannot be fired

select pgqueue.schedule('large', 'small', '* * * * * *', payload => jsonb_build_object('x', repeat('x', 1000)));
select pgqueue.schedule('fine', 'fine', '* * * * * *');
select pgqueue.configure('small', max_payload_bytes => 100);
select pg_temp.late('large', '5 seconds'), pg_temp.late('fine', '5 seconds');
select is(pg_temp.fired(), 1::bigint, 'a payload that became too large does not hold up the others');
select matches(
    (select problem from pgqueue.schedules where name = 'large'), 'payload is too large', 'the view says what is wrong'
);
-- The next second begins when it will.
select pgqueue.unschedule('fine');
select pgqueue.pause_schedule('large'), pgqueue.resume_schedule('large');
select is(
    (select problem from pgqueue.schedules where name = 'large'), null, 'a schedule that is resumed has no problem yet'
);
select pg_temp.late('large', '5 seconds');
select pg_temp.fired();
select pgqueue.configure('small', reset => true);
update pgqueue.schedule set due_at = now() - interval '1 second' where name = 'large';
select is(pg_temp.fired(), 1::bigint, 'its slot is fired once that is fixed');
select is((select count(*) from pgqueue.schedules where problem is not null), 0::bigint, 'and the problem is gone');
select throws_ok(
    $$ select pgqueue.configure('q', max_payload_bytes => 1), pgqueue.schedule('s', 'q', '@daily', payload => '{"a": 1}') $$,
    '54000', null, 'schedule refuses a payload that is too large'
);

-- What is refused

create function pg_temp.refused(call text)
    returns boolean
    language plpgsql
as $$
begin
    execute 'select pgqueue.schedule(' || call || ')';
    return false;
exception when invalid_parameter_value then
    return true;
end;
$$;
select is(
    (
        select string_agg(c.call, ' | ')
        from unnest(array[
            $$ null, 'q', '@daily' $$, $$ '', 'q', '@daily' $$, $$ 's', null, '@daily' $$, $$ 's', 'q' $$,
            $$ 's', 'q', '@daily', '1 hour' $$, $$ 's', 'q', '0 0 30 2 *' $$, $$ 's', 'q', 'x' $$,
            $$ 's', 'q', every => '1 month' $$, $$ 's', 'q', every => '0' $$, $$ 's', 'q', every => '-1 hour' $$,
            $$ 's', 'q', every => '4000 days' $$, $$ 's', 'q', '@daily', timezone => 'CEST' $$,
            $$ 's', 'q', '@daily', catch_up => 'some' $$, $$ 's', 'q', '@daily', jitter => '-1 s' $$,
            $$ 's', 'q', '@daily', jitter => '2 days' $$, $$ 's', 'q', '@daily', priority => 101 $$,
            $$ 's', 'q', '@daily', kind => '' $$, $$ 's', 'q', '@daily', max_attempts => 0 $$,
            $$ 's', 'q', '@daily', headers => '[]' $$, $$ 's', 'q', '@daily', group_key => '' $$
        ]) as c (call)
        where not pg_temp.refused(c.call)
    ),
    null, 'schedule refuses bad arguments'
);
select ok(
    not pg_temp.refused($$ 's', 'p', '@daily', null, null, null, null, null, null, null, null $$),
    'a null is the default'
);

select * from finish();
rollback;
