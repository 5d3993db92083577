-- Maintenance: reap ends attempts whose lease expired, maintain does that and deletes old runs.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(20);

-- Reap

select pgqueue.enqueue('q') as id \gset
select pgqueue.claim('q', 'w');
select is(pgqueue.reap(), 0, 'reap leaves a lease that has not expired');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is(
    (select state from pgqueue.jobs where id = :id), 'expired', 'a job whose lease ran out is expired'
);
select is(pgqueue.reap(), 1, 'reap ends the attempt of a job whose lease expired');
select results_eq(
    format('select state, attempt from pgqueue.jobs where id = %s', :id),
    $$ values ('ready', 1) $$, 'reap makes the job ready again and counts the attempt'
);
select pgqueue.enqueue_many('storm', (select array_agg('1'::jsonb) from generate_series(1, 30)));
select pgqueue.claim('storm', 'w', 30);
update pgqueue.job set lease_expires_at = now() - interval '1 second',
    max_attempts = case when id % 2 = 0 then 1 else 20 end where queue = 'storm';
select is(pgqueue.reap(10), 10, 'reap ends at most max_jobs attempts');
select is(pgqueue.reap(), 20, 'a second reap ends the attempts that the first one left');
select is(
    (select count(*) from pgqueue.dead_job where queue = 'storm'), 15::bigint,
    'reap moves the jobs that are out of attempts to dead_job'
);
select is(
    (select count(*) from pgqueue.jobs where queue = 'storm' and state = 'ready'), 15::bigint,
    'reap makes the jobs that have attempts left ready'
);

-- The clock is set back: of one of two workers that claimed before, nobody has heard since

select pgqueue.enqueue('ahead', kind => k) from unnest(array['held', 'lost']) as k;
select count(*) from pgqueue.claim('ahead', 'w', 2, '10 minutes');
update pgqueue.job set claimed_at = claimed_at + interval '40 days',
    lease_expires_at = lease_expires_at + case kind when 'lost' then interval '40 days' else '0' end where queue = 'ahead';
select is(pgqueue.reap(), 0, 'a lease from before the clock was set back is not ended at once');
select results_eq(
    $$ select kind, claimed_at < clock_timestamp(), lease_expires_at - claimed_at from pgqueue.job where queue = 'ahead' order by 1 $$,
    $$ values ('held', false, '-39 days -23:50'::interval), ('lost', true, '10 minutes') $$,
    'but begins anew, unless it was extended since'
);

-- The ring of runs

select results_eq(
    'select task from pgqueue.maintain()', $$ values ('reap'), ('fire schedules'), ('tie loose ends'), ('sweep groups'), ('drop permits'),
        ('drop tickets'), ('forget keys'), ('forget dead jobs'), ('forget batches'), ('forget events'), ('forget runs') $$,
    'maintain returns a row for each of its tasks'
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
    'maintain forgets a run when the days it is kept are over, and not before'
);

insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
select (floor(extract(epoch from now()) / 86400)::int - 1) % 16, 1, n, now() - interval '8 days', '0', '0', 'q', 'k', 'completed'
from generate_series(1, 100010) as n;
select is(
    (select done from pgqueue.maintain() where task = 'forget runs'), 100000::bigint,
    'in a longer transaction, as here, maintain deletes at most 100,000 runs'
);
select is(
    (select done from pgqueue.maintain() where task = 'forget runs'), 10::bigint,
    'a second maintain deletes those that the first one left'
);

-- The windows of unique_for

select pgqueue.enqueue('q', unique_key => 'open', unique_for => '1 hour');
insert into pgqueue.recent_key (job_id, expires_at, queue, unique_key)
select 1, clock_timestamp() - n * interval '1 us', 'q', 'k' || n from generate_series(1, 100010) as n;
select is(
    (select done from pgqueue.maintain() where task = 'forget keys'), 100000::bigint,
    'maintain drops at most 100,000 windows that have ended'
);
select is(
    (select done from pgqueue.maintain() where task = 'forget keys'), 10::bigint,
    'a second maintain drops those that the first one left'
);
select is(
    (select array_agg(unique_key) from pgqueue.recent_key), array['open'], 'maintain keeps a window that has not ended'
);

-- Jobs that may not begin any more, and that no claim meets

select pgqueue.enqueue('held up', run_at => now() + interval '1 hour', expires_at => now());
select pgqueue.enqueue('held up', after => array[:id], expires_at => now());
select pgqueue.pause('halted');
select pgqueue.enqueue('halted', expires_at => now());
select pgqueue.configure('full', group_limit => 1);
select pgqueue.enqueue_many('full', array_fill('{}'::jsonb, array[3]), group_keys => '{a,a,a}');
-- As if it had committed: nobody takes a permit that his own transaction has made.
update pgqueue.permit set token = -1 where token < 0;
select count(*) from pgqueue.claim('full', 'w', 3);
update pgqueue.job set terms.expires_at = now() where queue = 'full';
select pgqueue.enqueue('held up', '"in time"', run_at => now() + interval '1 hour', expires_at => now() + interval '1 hour');
select results_eq(
    'select queue, state, count(*) from pgqueue.jobs where expires_at is not null group by 1, 2 order by 1, 2',
    $$ values ('full', 'expired', 2::bigint), ('full', 'running', 1), ('halted', 'expired', 1),
        ('held up', 'expired', 2), ('held up', 'scheduled', 1) $$,
    'a job that waits is expired after its expires_at'
);
select is(
    (select done from pgqueue.maintain() where task = 'reap'), 5::bigint,
    'maintain cancels jobs that were scheduled, blocked, paused or behind a full group beyond their expires_at'
);
select results_eq(
    'select queue, state from pgqueue.jobs where expires_at is not null order by 1',
    $$ values ('full', 'running'), ('held up', 'scheduled') $$,
    'and leaves what runs, and what may still begin'
);

select * from finish();
rollback;
