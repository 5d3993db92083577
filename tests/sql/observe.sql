-- The views, and the version: what an operator sees of jobs, queues, running jobs and kinds.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(17);

-- Pages that other test files have rolled back would count.
truncate pgqueue.run;

select is(
    pgqueue.version(), (select extversion from pg_extension where extname = 'pgqueue'),
    'version returns the version of the extension'
);

select pgqueue.enqueue('v', priority => 1) as ready \gset
select pgqueue.enqueue('v', run_at => now() + interval '1 hour') as scheduled \gset
select pgqueue.enqueue('v', priority => 9, kind => 'long') as running \gset
select token from pgqueue.claim('v', 'w-1') \gset
select pgqueue.enqueue('v', priority => 8) as expired \gset
select pgqueue.claim('v', 'w-2');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :expired;
select pgqueue.enqueue('v') as blocked \gset
update pgqueue.job set run_at = 'infinity' where id = :blocked;
select pgqueue.enqueue('v', run_at => now() - interval '100 hours') as old \gset

select results_eq(
    'select id, state, run_at is null from pgqueue.jobs where queue = ''v'' order by id',
    format(
        $$ values (%s::bigint, 'ready', false), (%s, 'scheduled', false), (%s, 'running', false),
            (%s, 'expired', false), (%s, 'blocked', true), (%s, 'ready', false) $$,
        :ready, :scheduled, :running, :expired, :blocked, :old
    ),
    'jobs shows the state of every job, and no run_at for a blocked one'
);
select hasnt_column('pgqueue'::name, v.name, 'payload'::name, format('the view %s shows no payload', v.name))
from unnest(array['jobs', 'queues', 'running', 'kinds']::name[]) as v (name);

select results_eq(
    $$ select ready, scheduled, running, expired, blocked, dead, paused,
           oldest_wait between '100 hours' and '101 hours', p99_wait between '100 hours' and '101 hours',
           finished_last_hour, failed_last_hour
       from pgqueue.queues where queue = 'v' $$,
    $$ values (2::bigint, 1::bigint, 1::bigint, 1::bigint, 1::bigint, 0::bigint, false, true, true, 0::bigint, 0::bigint) $$,
    'queues counts the jobs of each state, and how long the ready ones have waited'
);
select results_eq(
    $$ select id, worker, lease_left > '0', kind from pgqueue.running where queue = 'v' $$,
    format($$ values (%s::bigint, 'w-1', true, 'long'), (%s, 'w-2', false, 'v') $$, :running, :expired),
    'running shows the job that has run longest first, with its worker and what is left of its lease'
);

select pgqueue.complete(:running, :token);
select id, token from pgqueue.claim('v', 'w', 1) \gset
select pgqueue.fail(:id, :token, 'boom', permanent => true);
select results_eq(
    $$ select dead, finished_last_hour, failed_last_hour from pgqueue.queues where queue = 'v' $$,
    $$ values (1::bigint, 1::bigint, 2::bigint) $$,
    'queues counts the dead jobs and the runs of the last hour'
);
select results_eq(
    $$ select kind, runs, failures, p50_taken <= p99_taken from pgqueue.kinds where queue = 'v' order by kind $$,
    $$ values ('long', 1::bigint, 0::bigint, true), ('v', 2::bigint, 2::bigint, true) $$,
    'kinds counts runs and failures, and shows how long the runs took'
);
select pgqueue.configure('quiet', keep_runs => 1);
select results_eq(
    $$ select ready, dead, oldest_wait from pgqueue.queues where queue = 'quiet' $$,
    $$ values (0::bigint, 0::bigint, null::interval) $$,
    'queues shows a queue that has only settings'
);
-- Retention

select pgqueue.enqueue('x') as id \gset
select token from pgqueue.claim('x', 'w3') \gset
select pgqueue.fail(:id, :token, 'e', '0');
select token from pgqueue.claim('x', 'w3') \gset
select pgqueue.complete(:id, :token);
delete from pgqueue.dead_job;
delete from pgqueue.run where job_id <> :id;
delete from pgqueue.recent_key;
insert into pgqueue.dead_job (
    id, died_at, enqueued_at, run_at, priority, attempt, max_attempts, queue, kind, error, payload, errors
)
select 1000000 + n, now() - n % 5 * interval '1 day', now(), now(), 0, 1, 1, 'q' || n, 'k' || n % 3, 'e', '{}', '[]'
from generate_series(1, 20) as n;
insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
select n % 16, 1, 1, now() - n * interval '1 hour', '0', '0', 'q', 'k', 'completed' from generate_series(1, 40) as n;
select pgqueue.enqueue('kept', unique_key => 'k', unique_for => '1 hour');
truncate pgqueue.queue;
select pgqueue.configure(null, keep_dead => '1 year');
select results_eq(
    $$ select what, rows, now() - oldest, kept_for from pgqueue.retention where what <> 'jobs' order by what $$,
    $$ values ('dead jobs', 20::bigint, interval '4 days', interval '1 year'),
        ('runs', 42, '40 hours', '7 days'), ('windows', 1, null, null) $$,
    'retention says what is kept: how many, since when, and for how long'
);
select is(
    (select bytes from pgqueue.retention where what = 'runs'),
    (select sum(pg_total_relation_size(i.inhrelid)) from pg_inherits as i where i.inhparent = 'pgqueue.run'::regclass)::bigint,
    'retention shows the log with all its parts'
);
insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
select n % 2, 1, n, now(), '0', '0', 'q', 'k', 'completed' from generate_series(1, 100000) as n;
analyze pgqueue.run_0;
select ok(
    (select rows between 90000 and 110000 from pgqueue.retention where what = 'runs'),
    'retention estimates the parts of the log that nobody has analyzed yet by those that somebody has'
);

set transaction_read_only = on;
select lives_ok('select * from pgqueue.' || v.name, format('the view %s can be read in a read-only transaction', v.name))
from unnest(array['queues', 'kinds', 'retention']) as v (name);

select * from finish();
rollback;
