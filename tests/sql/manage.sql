-- The operator: cancel, redrive, pause, settings, and what must happen now and then.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(75);

-- A dead job, for the tests below.
create function pg_temp.dead(queue text, payload jsonb, kind text, error text, unique_key text)
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

-- Cancel

select pgqueue.enqueue('c', unique_key => 'k') as id \gset
select is(pgqueue.cancel(:id, 'typo'), 'cancelled', 'a waiting job is cancelled at once');
select is_empty(format('select from pgqueue.job where id = %s', :id), 'and gone');
select results_eq(
    format('select outcome, attempt, result from pgqueue.run where job_id = %s', :id),
    $$ values ('cancelled', 0, '"typo"'::jsonb) $$, 'run keeps the reason'
);
select isnt(pgqueue.enqueue('c', unique_key => 'k'), :id::bigint, 'the key is free again');
select throws_ok(format('select pgqueue.cancel(%s)', :id), 'PQ001', null, 'it cannot be cancelled twice');
select throws_ok('select pgqueue.cancel(null)', 'PQ001', null, 'no id, no job');
select id, token from pgqueue.claim('c', 'w') \gset
select is(pgqueue.cancel(:id, 'stop'), 'cancelling', 'a running job is asked to stop');
select is(
    (select status from pgqueue.extend(array[:id], array[:token])), 'cancelled',
    'its worker hears of it at the next heartbeat'
);
select is(pgqueue.fail(:id, :token, 'stopped'), 'cancelled', 'and ends it with fail');
select is_empty(format('select from pgqueue.job where id = %s', :id), 'without another attempt');
select pgqueue.enqueue('c') as id \gset
select token from pgqueue.claim('c', 'w') \gset
select pgqueue.cancel(:id);
select is((select pgqueue.release(array[:id], array[:token])), :id::bigint, 'or with release');
select is_empty(format('select from pgqueue.job where id = %s', :id), 'which does not give it back');
select pgqueue.enqueue('c') as id \gset
select token from pgqueue.claim('c', 'w') \gset
select pgqueue.cancel(:id);
select lives_ok(
    format('select pgqueue.complete(%s, %s)', :id, :token), 'a job that was done before it heard is done'
);
select pgqueue.enqueue('c') as id \gset
select pgqueue.claim('c', 'w');
select pgqueue.cancel(:id, 'worker died');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is_empty($$ select pgqueue.claim('c', 'w') $$, 'a cancelled job whose worker died does not run again');
select is(
    (select result from pgqueue.run where job_id = :id), '"worker died"'::jsonb, 'it ends as cancelled'
);

-- Redrive

select pg_temp.dead('r', '1', 'mail', 'timeout of smtp', null) as a \gset
select pg_temp.dead('r', '2', 'mail', 'bad address', 'k') as b \gset
select pg_temp.dead('r', '3', 'sms', 'timeout of sms', null) as c \gset
select pg_temp.dead('s', '4', 'sms', 'timeout of sms', null) as d \gset
select is(
    (select array_agg(r) from pgqueue.redrive(dry_run => true) as r), array[:a, :b, :c, :d]::bigint[],
    'a dry run says which jobs would go back'
);
select is((select count(*) from pgqueue.dead_job), 4::bigint, 'and moves none');
select is((select array_agg(r) from pgqueue.redrive('r', dry_run => true) as r), array[:a, :b, :c]::bigint[], 'by queue');
select is((select array_agg(r) from pgqueue.redrive(kind => 'sms', dry_run => true) as r), array[:c, :d]::bigint[], 'by kind');
select is((select array_agg(r) from pgqueue.redrive(error_like => 'timeout%', max_jobs => 2, dry_run => true) as r), array[:a, :c]::bigint[], 'by error, so many at most');
select is_empty($$ select pgqueue.redrive(died_before => now() - interval '1 hour') $$, 'not those that died later');
select is_empty($$ select pgqueue.redrive(died_after => now() + interval '1 hour') $$, 'nor those that died before');
select throws_ok($$ select pgqueue.redrive(max_jobs => 0) $$, '22023', null, 'none at most is a mistake');
select is((select array_agg(r) from pgqueue.redrive('r', 'mail', 'timeout%') as r), array[:a]::bigint[], 'a dead job goes back to work');
select results_eq(
    format('select j.state, j.attempt, j.last_error from pgqueue.jobs as j where j.id = %s', :a),
    $$ values ('ready', 0, 'timeout of smtp') $$, 'under its id, with a fresh budget and its errors'
);
select is_empty(format('select from pgqueue.dead_job where id = %s', :a), 'and is dead no more');
select pgqueue.enqueue('r', unique_key => 'k') as living \gset
select is(
    (select array_agg(r) from pgqueue.redrive('r') as r), array[:c]::bigint[],
    'a job whose key is taken stays dead and does not stop the others'
);
select is(pgqueue.redrive_job(:b, '"edited"'), null, 'also when it is redriven alone');
select pgqueue.cancel(:living);
select is(pgqueue.redrive_job(:b), :b::bigint, 'until the key is free');
select is((select payload from pgqueue.job where id = :b), '"edited"'::jsonb, 'its payload may be mended on the way');
select throws_ok(format('select pgqueue.redrive_job(%s)', :b), 'PQ001', null, 'it cannot be redriven twice');
select lives_ok(format('select pgqueue.discard(%s)', :d), 'a dead job can be dropped');
select throws_ok(format('select pgqueue.discard(%s)', :d), 'PQ001', null, 'once');
select pg_temp.dead('twins', '1', 'x', 'e', 'k') is null;
select pg_temp.dead('twins', '2', 'x', 'e', 'k') is null;
select is((select count(*) from pgqueue.redrive('twins')), 1::bigint, 'of two dead jobs with one key one comes back');

-- Run now, reprioritize, purge

select pgqueue.enqueue('o', run_at => now() + interval '1 day') as id \gset
select lives_ok(format('select pgqueue.run_now(%s)', :id), 'a scheduled job can be made due');
select is((select state from pgqueue.jobs where id = :id), 'ready', 'and is ready');
select throws_ok('select pgqueue.run_now(0)', 'PQ001', null, 'an unknown job cannot');
select lives_ok(format('select pgqueue.reprioritize(%s, 50)', :id), 'a job can be given another priority');
select is((select priority from pgqueue.jobs where id = :id), 50, 'which it keeps');
select throws_ok('select pgqueue.reprioritize(0, 1)', 'PQ001', null, 'an unknown job cannot');
select throws_ok(format('select pgqueue.reprioritize(%s, null)', :id), '22023', null, 'null is no priority');
select pgqueue.enqueue_many('p', (select array_agg('1'::jsonb) from generate_series(1, 10)));
select pgqueue.enqueue('p', run_at => now() + interval '1 day');
select pgqueue.claim('p', 'w', 3);
select is(pgqueue.purge('p'), 8::bigint, 'purge drops what waits');
select is((select count(*) from pgqueue.jobs where queue = 'p' and state = 'running'), 3::bigint, 'and leaves what runs');

-- Pause and settings

select pgqueue.enqueue('pa'), pgqueue.enqueue('pb');
select pgqueue.pause('pa');
select is_empty($$ select pgqueue.claim('pa', 'w') $$, 'a paused queue gives nothing out');
select lives_ok($$ select pgqueue.enqueue('pa') $$, 'and takes jobs in');
select is((select paused from pgqueue.queues where queue = 'pa'), true, 'the view says so');
select isnt_empty($$ select pgqueue.claim('pb', 'w') $$, 'other queues go on');
select pgqueue.pause();
select is_empty($$ select pgqueue.claim('pb', 'w') $$, 'pause without a name stops every queue');
select pgqueue.resume('pa');
select isnt_empty($$ select pgqueue.claim('pa', 'w') $$, 'one can be resumed');
select pgqueue.pause('pb');
select pgqueue.resume();
select pgqueue.enqueue('pb');
select isnt_empty($$ select pgqueue.claim('pb', 'w') $$, 'resume without a name starts every queue');
select throws_ok($$ select pgqueue.pause('') $$, '22023', null, 'an empty name is a mistake, not all queues');

select pgqueue.configure('s', lease => '1 minute', max_attempts => 7);
select pgqueue.configure('s', retry_base => '2 s');
select pgqueue.configure(null, retry_cap => '10 s', lease => '9 s');
select results_eq(
    $$ select s.lease, s.max_attempts, s.retry_base, s.retry_cap, s.keep_runs, s.notify, s.paused
       from pgqueue._settings('s') as s $$,
    $$ values (interval '1 minute', 7, interval '2 s', interval '10 s', 7, true, false) $$,
    'a setting stays until it is named again; all queues share what they do not say'
);
select pgqueue.configure('s', max_attempts => 3, reset => true);
select results_eq(
    $$ select s.lease, s.max_attempts, s.retry_base from pgqueue._settings('s') as s $$,
    $$ values (interval '9 s', 3, interval '5 s') $$, 'reset forgets what was set before'
);
select throws_ok(b.call, '22023', null, format('refused: %s', b.call))
from (values
    ('select pgqueue.configure('''')'),
    ('select pgqueue.configure(''s'', lease => ''0'')'),
    ('select pgqueue.configure(''s'', lease => ''1 year'')'),
    ('select pgqueue.configure(''s'', max_attempts => 0)'),
    ('select pgqueue.configure(''s'', retry_base => ''-1 s'')'),
    ('select pgqueue.configure(''s'', retry_cap => ''2 years'')'),
    ('select pgqueue.configure(''s'', keep_runs => 15)'),
    ('select pgqueue.configure(''s'', keep_runs => -1)'),
    ('select pgqueue.configure(''s'', max_payload_bytes => 0)')
) as b (call);

-- Maintain: the ring of run

select results_eq(
    'select task from pgqueue.maintain()', $$ values ('reap'), ('forget runs') $$,
    'maintain says what it did'
);
truncate pgqueue.run;
create function pg_temp.ran(finished_at timestamptz, keep_runs int)
    returns void
    language sql
as $$
    insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
    values ((floor(extract(epoch from $1) / 86400)::int + $2) % 16, 1, 1, $1, '0', '0', 'q', 'k', 'completed')
$$;
select pg_temp.ran(now() - interval '8 days', 7), pg_temp.ran(now() - interval '7 days', 7),
    pg_temp.ran(now() - interval '1 day', 1), pg_temp.ran(now() - interval '2 days', 1), pg_temp.ran(now(), 14),
    pg_temp.ran(now() - interval '40 days', 7);
select pgqueue.maintain();
select is(
    (select array_agg(date_trunc('hour', now() - finished_at) order by finished_at) from pgqueue.run),
    array['7 days', '1 day', '0']::interval[],
    'a run is forgotten when its days are over, and not before'
);

-- Many at once

select pgqueue.enqueue('bulk', max_attempts => 1) from generate_series(1, 6);
select pgqueue.fail(c.id, c.token, case when c.id % 2 = 0 then E'TimeoutError: slow\n  timeout=5' else E'ValueError: 404\n  timeout=5' end)
from pgqueue.claim('bulk', 'w', 6) as c;
select is(
    (select count(*) from pgqueue.redrive('bulk', error_like => '%timeout%', dry_run => true)), 3::bigint,
    'a filter matches the first line of an error, without case'
);
select is(
    (select count(*) from pgqueue.discard_many('bulk', error_like => 'valueerror%', dry_run => true)), 3::bigint,
    'so it does for many that are to be dropped'
);
select is((select count(*) from pgqueue.dead_job where queue = 'bulk'), 6::bigint, 'a dry run changes nothing');
select is((select count(*) from pgqueue.discard_many('bulk', error_like => 'valueerror%')), 3::bigint, 'dead jobs can be dropped by filter');
select is((select count(*) from pgqueue.redrive('bulk')), 3::bigint, 'and the others go on');
select pgqueue.enqueue('bulk', kind => 'other', run_at => now() + interval '1 day');
select count(*) from pgqueue.claim('bulk', 'w');
select is(
    (select count(*) from pgqueue.cancel_many('bulk', kind => 'bulk', dry_run => true)), 3::bigint, 'what would be cancelled'
);
select is((select count(*) from pgqueue.cancel_many('bulk', kind => 'bulk', max_jobs => 2)), 2::bigint, 'many can be cancelled');
select is((select count(*) from pgqueue.cancel_many('bulk', kind => 'bulk', reason => 'why')), 1::bigint, 'the rest later');
select results_eq(
    $$ select kind, state from pgqueue.jobs where queue = 'bulk' order by 1 $$,
    $$ values ('bulk', 'running'), ('other', 'scheduled') $$, 'what waits is gone, what runs hears of it'
);

-- No phantoms

select pgqueue.pause('no such queue');
select pgqueue.resume('no such queue');
select is_empty($$ select * from pgqueue.queues where queue = 'no such queue' $$, 'a pause that is over leaves no queue behind');
select throws_ok($$ select pgqueue.discard_many(max_jobs => 0) $$, '22023', null, 'less than one job is refused');

select * from finish();
rollback;
