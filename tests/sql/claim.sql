-- claim and claim_from: which jobs a worker gets, in which order, and what a claim does with expired leases.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(28);

-- Order

select is_empty($$ select pgqueue.claim('empty', 'w') $$, 'a claim of an empty queue returns no job');
select pgqueue.enqueue('order', to_jsonb(p.name), priority => p.priority, run_at => now() - p.age)
from (values
    ('third', 0, interval '2 hours'), ('fourth', 0, interval '1 hour'),
    ('second', 5, interval '0'), ('last', -5, interval '9 hours'), ('first', 5, interval '1 minute')
) as p (name, priority, age);
select pgqueue.enqueue('order', '"later"', priority => 9, run_at => now() + interval '1 hour');
select results_eq(
    $$ select payload #>> '{}' from pgqueue.claim('order', 'w', 10) $$,
    $$ values ('first'), ('second'), ('third'), ('fourth'), ('last') $$,
    'due jobs are claimed by priority, highest first, then by run_at'
);
select is_empty($$ select pgqueue.claim('order', 'w', 10) $$, 'a leased job is not claimed again');
select pgqueue.enqueue_many('ties', (select array_agg(to_jsonb(i)) from generate_series(1, 20) as i));
select is(
    (select array_agg(c.payload::int) from pgqueue.claim('ties', 'w', 20) as c),
    (select array_agg(i) from generate_series(1, 20) as i),
    'jobs enqueued in one call are claimed in the order of their ids'
);

-- What a claim sets

select pgqueue.enqueue('one', kind => 'a') as id \gset
select * from pgqueue.claim('one', 'w-1') \gset job_
select is(:job_id::bigint, :id::bigint, 'a claim returns the job');
select is(:job_attempt::int, 1, 'an attempt is counted when it is claimed');
select is(:'job_worker'::text, 'w-1', 'a claim stores the name of the worker');
select is(
    :'job_lease_expires_at'::timestamptz - :'job_claimed_at'::timestamptz, interval '30 seconds',
    'a lease lasts 30 seconds by default'
);
select pgqueue.configure('long', lease => '5 minutes');
select pgqueue.enqueue('long');
select pgqueue.enqueue('long');
select is(
    (select lease_expires_at - claimed_at from pgqueue.claim('long', 'w')), interval '5 minutes',
    'the lease setting of a queue replaces the default'
);
select is(
    (select lease_expires_at - claimed_at from pgqueue.claim('long', 'w', lease => '7 seconds')),
    interval '7 seconds',
    'the lease given to claim overrides the setting of the queue'
);
select pgqueue.enqueue('clock');
select cmp_ok(
    (select claimed_at from pgqueue.claim('clock', 'w')), '>', now(),
    'a lease begins when it is claimed, not when the transaction began'
);
select pgqueue.enqueue('kinds', kind => k.kind)
from unnest(array['a', 'b', 'c', 'a']) as k (kind);
select is(
    (select array_agg(kind) from pgqueue.claim('kinds', 'w', 10, kinds => array['b', 'a'])),
    array['a', 'b', 'a'],
    'a claim takes only the kinds it names'
);
select is_empty(
    $$ select pgqueue.claim('kinds', 'w', 10, kinds => '{}') $$, 'a claim of no kinds returns no job'
);
select is(
    (select array_agg(kind) from pgqueue.claim('kinds', 'w', 10, kinds => '{null,c}')), '{c}', 'a null is no kind'
);
select pgqueue.enqueue_many('tokens', (select array_agg('1'::jsonb) from generate_series(1, 50)));
select is(
    (select count(distinct token) from (
        select token from pgqueue.claim('tokens', 'w', 25)
        union all
        select token from pgqueue.claim('tokens', 'w', 25)
    ) as claimed),
    2::bigint,
    'every claim has a token of its own'
);

-- Expired leases

select pgqueue.enqueue('poison', max_attempts => 2) as id \gset
select pgqueue.claim('poison', 'w');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select pgqueue.claim('poison', 'w');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is_empty(
    $$ select pgqueue.claim('poison', 'w') $$, 'a job that kills its workers is claimed max_attempts times at most'
);
select is(
    (select attempt from pgqueue.dead_job where id = :id), 2,
    'a claim moves a job whose last lease expired to dead_job'
);
select pgqueue.enqueue_many('storm', (select array_agg('1'::jsonb) from generate_series(1, 30)));
select pgqueue.claim('storm', 'w', 30);
update pgqueue.job set lease_expires_at = now() - interval '1 second',
    max_attempts = case when id % 2 = 0 then 1 else 20 end where queue = 'storm';
select is(
    (select count(*) from pgqueue.claim('storm', 'w2', 30)), 15::bigint,
    'a claim takes jobs whose lease expired, and skips those that are out of attempts'
);
select is(
    (select count(*) from pgqueue.dead_job where queue = 'storm'), 15::bigint,
    'every job that a claim finds out of attempts is in dead_job'
);
select pgqueue.enqueue_many('exhausted', (select array_agg(to_jsonb(n)) from generate_series(1, 2500) as n), max_attempts => 1);
select count(*) from pgqueue.claim('exhausted', 'w', 2500);
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'exhausted';
select pgqueue.enqueue('exhausted', '"behind"');
select is(
    (select c.payload #>> '{}' from pgqueue.claim('exhausted', 'w') as c), 'behind',
    'a claim finds the job behind 2,500 that are out of attempts'
);
select is(
    (select count(*) from pgqueue.dead_job where queue = 'exhausted'), 1000::bigint,
    'one claim moves at most 1,000 jobs to dead_job'
);

-- Several queues

select pgqueue.enqueue_many(v.queue, (select array_agg('1'::jsonb) from generate_series(1, v.jobs)))
from (values ('full', 100), ('half', 100), ('few', 5)) as v (queue, jobs);
create temporary table taken as
select c.queue, count(*) as jobs
from pgqueue.claim_from(
    array['full', 'half', 'few', 'none'], 'w', 60,
    weights => array[2, 1, 1, 1], limits => array[null, 15, null, 5]
) as c
group by 1;
select is(
    (select sum(jobs) from taken), 60::numeric, 'claim_from takes as many jobs as it was asked for'
);
select cmp_ok(
    (select jobs from taken where queue = 'half'), '<=', 15::bigint,
    'claim_from takes no more of a queue than its limit'
);
select is(
    (select jobs from taken where queue = 'few'), 5::bigint,
    'claim_from takes all of a queue that has fewer jobs than its share'
);
select cmp_ok(
    (select jobs from taken where queue = 'full'), '>', 24::bigint,
    'what a queue leaves of its share goes to a queue that has more'
);
select pgqueue.enqueue_many(v.queue, (select array_agg('1'::jsonb) from generate_series(1, v.jobs)))
from (values ('rich', 20), ('poor', 2)) as v (queue, jobs);
select matches(
    (select string_agg(left(c.queue, 1), '') from pgqueue.claim_from(array['rich', 'poor'], 'w', 10) as c),
    '^(rrrrrpp|pprrrrr)rrr$',
    'claim_from returns the shares queue by queue, and then what others have left'
);
-- Among many queues, only those with jobs are asked.
select pgqueue.enqueue_many(q.name, (select array_agg('1'::jsonb) from generate_series(1, 10)))
from (values ('many'), ('limited')) as q (name);
select pgqueue.enqueue('in a group', group_key => 'g'), pgqueue.enqueue('later', run_at => now() + interval '1 hour');
select pgqueue.enqueue('crashed');
select pgqueue.claim('crashed', 'w');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'crashed';
select results_eq(
    $$
        select c.queue, count(*)
        from pgqueue.claim_from(
            array['none 1', 'limited', 'none 2', 'many', 'later', 'in a group', 'crashed'], 'w', 100,
            weights => array[9, 1, 9, 1, 9, 1, 1], limits => array[1, 4, 0, null, null, null, null]
        ) as c
        group by 1
        order by 1
    $$,
    $$ values ('crashed', 1::bigint), ('in a group', 1), ('limited', 4), ('many', 10) $$,
    'claim_from takes what is due in many queues, up to the limit of each'
);
select is_empty(
    $$ select pgqueue.claim_from(array['none 1', 'none 2', 'none 3', 'none 4', 'none 5'], 'w', weights => array[1, 2, 3, 4, 5]) $$,
    'claim_from returns nothing if none of many queues has a job'
);

select * from finish();
rollback;
