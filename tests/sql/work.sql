-- The worker: claim, extend, and the ways an attempt ends.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(105);

-- Claim

select is_empty($$ select pgqueue.claim('empty', 'w') $$, 'an empty queue gives nothing');
select pgqueue.enqueue('order', to_jsonb(p.name), priority => p.priority, run_at => now() - p.age)
from (values
    ('third', 0, interval '2 hours'), ('fourth', 0, interval '1 hour'),
    ('second', 5, interval '0'), ('last', -5, interval '9 hours'), ('first', 5, interval '1 minute')
) as p (name, priority, age);
select pgqueue.enqueue('order', '"later"', priority => 9, run_at => now() + interval '1 hour');
select results_eq(
    $$ select payload #>> '{}' from pgqueue.claim('order', 'w', 10) $$,
    $$ values ('first'), ('second'), ('third'), ('fourth'), ('last') $$,
    'due jobs come highest priority first, then by run_at'
);
select is_empty($$ select pgqueue.claim('order', 'w', 10) $$, 'what is leased is not given out again');
select pgqueue.enqueue_many('ties', (select array_agg(to_jsonb(i)) from generate_series(1, 20) as i));
select is(
    (select array_agg(c.payload::int) from pgqueue.claim('ties', 'w', 20) as c),
    (select array_agg(i) from generate_series(1, 20) as i),
    'jobs of one run_at come in the order of their ids'
);

select pgqueue.enqueue('one', kind => 'a') as id \gset
select * from pgqueue.claim('one', 'w-1') \gset job_
select is(:job_id::bigint, :id::bigint, 'claim returns the job');
select is(:job_attempt::int, 1, 'the attempt is counted at claim');
select is(:'job_worker'::text, 'w-1', 'under the worker''s name');
select is(
    :'job_lease_expires_at'::timestamptz - :'job_claimed_at'::timestamptz, interval '30 seconds',
    'for 30 seconds unless the queue or the worker says otherwise'
);
select pgqueue.configure('long', lease => '5 minutes');
select pgqueue.enqueue('long');
select pgqueue.enqueue('long');
select is(
    (select lease_expires_at - claimed_at from pgqueue.claim('long', 'w')), interval '5 minutes',
    'the queue says how long'
);
select is(
    (select lease_expires_at - claimed_at from pgqueue.claim('long', 'w', lease => '7 seconds')),
    interval '7 seconds',
    'the worker overrules it'
);
select pg_sleep(0.05);
select pgqueue.enqueue('clock');
select cmp_ok(
    (select claimed_at from pgqueue.claim('clock', 'w')), '>', now() + interval '50 milliseconds',
    'a lease begins when it is claimed, not when the transaction began'
);

select pgqueue.enqueue('kinds', kind => k.kind)
from unnest(array['a', 'b', 'c', 'a']) as k (kind);
select is(
    (select array_agg(kind) from pgqueue.claim('kinds', 'w', 10, kinds => array['b', 'a'])),
    array['a', 'b', 'a'],
    'a worker takes only the kinds it names'
);
select is_empty(
    $$ select pgqueue.claim('kinds', 'w', 10, kinds => '{}') $$, 'no kinds, no jobs'
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

select throws_ok(b.call, '22023', null, format('refused: %s', b.call))
from (values
    ('select pgqueue.claim(null, ''w'')'),
    ('select pgqueue.claim('''', ''w'')'),
    ('select pgqueue.claim(''q'', null)'),
    ('select pgqueue.claim(''q'', '''')'),
    ('select pgqueue.claim(''q'', repeat(''w'', 201))'),
    ('select pgqueue.claim(''q'', ''w'', 0)'),
    ('select pgqueue.claim(''q'', ''w'', -1)'),
    ('select pgqueue.claim(''q'', ''w'', 10001)'),
    ('select pgqueue.claim(''q'', ''w'', lease => ''0'')'),
    ('select pgqueue.claim(''q'', ''w'', lease => ''-1 second'')'),
    ('select pgqueue.claim(''q'', ''w'', lease => ''31 days'')'),
    ('select pgqueue.extend(array[1], array[1, 2])'),
    ('select pgqueue.extend(array[1], null)'),
    ('select pgqueue.extend(array[1], array[1], ''-1 second'')'),
    ('select pgqueue.complete_many(array[1, 2], array[1])'),
    ('select pgqueue.fail(1, 1, ''e'', retry_in => ''-1 second'')'),
    ('select pgqueue.release(array[1], array[1], ''infinity'')'),
    ('select pgqueue.reap(0)')
) as b (call);
select is_empty(
    $$ select pgqueue.extend('{}', '{}') $$, 'nothing to extend, nothing returned'
);

-- Leases and tokens

select pgqueue.enqueue('fence') as id \gset
select token from pgqueue.claim('fence', 'slow') \gset
select results_eq(
    format('select * from pgqueue.extend(array[%s, %s, 0], array[0, %s, 0], ''1 hour'')', :id, :id, :token),
    format('values (%s::bigint, ''lost''), (%s, ''held''), (0, ''lost'')', :id, :id),
    'extend answers for each id in turn'
);
select is(
    (select lease_left > interval '59 minutes' from pgqueue.running where id = :id), true,
    'and moves the end of the lease'
);
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is(
    (select status from pgqueue.extend(array[:id], array[:token])), 'held',
    'a lease that expired unnoticed can still be extended'
);
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select token as new_token from pgqueue.claim('fence', 'quick') \gset
select isnt(:new_token::bigint, :token::bigint, 'an expired lease is given to the next worker under a new token');
select is(
    (select attempt from pgqueue.job where id = :id), 2, 'and the lost attempt counts'
);
select throws_ok(format(b.call, :id, :token), 'PQ002', null, format('the loser cannot: %s', b.call))
from (values
    ('select pgqueue.complete(%s, %s)'), ('select pgqueue.fail(%s, %s, ''late'')'),
    ('select pgqueue.complete(%s, null)'), ('select pgqueue.complete(null, %2$s)')
) as b (call);
select is_empty(
    format(b.call, :id, :token), format('the loser gets nothing from: %s', b.call)
)
from (values
    ('select pgqueue.complete_many(array[%s]::bigint[], array[%s]::bigint[])'),
    ('select pgqueue.release(array[%s]::bigint[], array[%s]::bigint[])')
) as b (call);
select results_eq(
    format('select attempt, worker, outcome from pgqueue.run where job_id = %s', :id),
    $$ values (1, 'slow', 'expired') $$,
    'the lost attempt is in the log'
);
select results_eq(
    format('select last_error from pgqueue.jobs where id = %s', :id),
    $$ values ('the lease expired: worker slow stopped extending it (the only lease of it that was found expired)') $$,
    'and among the errors of the job'
);

-- Complete

select lives_ok(
    format('select pgqueue.complete(%s, %s, ''{"sent": 1}'')', :id, :new_token),
    'the holder completes the job'
);
select results_eq(
    format('select attempt, queue, kind, worker, result, waited >= ''0'', taken >= ''0''
            from pgqueue.run where job_id = %s and outcome = ''completed''', :id),
    $$ values (2, 'fence', 'fence', 'quick', '{"sent": 1}'::jsonb, true, true) $$,
    'and run says so, with the result'
);
select is_empty(format('select from pgqueue.job where id = %s', :id), 'a completed job is gone');
select throws_ok(
    format('select pgqueue.complete(%s, %s)', :id, :new_token), 'PQ002', null,
    'a job is completed once'
);
select pgqueue.enqueue_many('batch', array['1', '2', '3']::jsonb[]);
select array_agg(id) as ids, array_agg(token) as tokens from pgqueue.claim('batch', 'w', 3) \gset
select is(
    (select array_agg(c.id order by c.id) from pgqueue.complete_many(
        :'ids'::bigint[] || 0::bigint, (:'tokens'::bigint[])[1:2] || array[0, 0]::bigint[]
    ) as c (id)),
    (:'ids'::bigint[])[1:2],
    'complete_many completes what is held and returns it'
);
select pgqueue.configure('silent', keep_runs => 0);
select pgqueue.enqueue('silent') as id \gset
select token from pgqueue.claim('silent', 'w') \gset
select lives_ok(format('select pgqueue.complete(%s, %s)', :id, :token), 'a queue may keep no runs');
select is_empty(
    format('select from pgqueue.run where job_id = %s', :id), 'and then run has none'
);

-- Fail

select pgqueue.enqueue('flaky', '{"n": 1}', max_attempts => 3, headers => '{"trace": 1}') as id \gset
select token from pgqueue.claim('flaky', 'w') \gset
select is(pgqueue.fail(:id, :token, 'boom'), 'retry', 'a failed job is tried again');
select results_eq(
    format('select state, run_at - now() > ''2.4 s'' and run_at - now() < ''6 s'', attempt, worker, last_error
            from pgqueue.jobs where id = %s', :id),
    $$ values ('scheduled', true, 1, null::text, 'boom') $$,
    'after half to all of retry_base'
);
update pgqueue.job set run_at = now() where id = :id;
select token from pgqueue.claim('flaky', 'w') \gset
select is(pgqueue.fail(:id, :token, null, '3 hours'), 'retry', 'a null error is an error too');
select is(
    (select date_trunc('minute', run_at - now()) from pgqueue.job where id = :id), interval '3 hours',
    'the worker may say when'
);
update pgqueue.job set run_at = now() where id = :id;
select token from pgqueue.claim('flaky', 'w') \gset
select is(pgqueue.fail(:id, :token, repeat('é', 10000)), 'dead', 'the last attempt ends it');
select results_eq(
    format('select queue, kind, payload, headers, attempt, max_attempts, worker, length(error),
                jsonb_array_length(errors), errors -> 0 ->> ''error'', errors -> 1 ->> ''attempt''
            from pgqueue.dead_job where id = %s', :id),
    $$ values ('flaky', 'flaky', '{"n": 1}'::jsonb, '{"trace": 1}'::jsonb, 3, 3, 'w', 8000, 3, 'boom', '2') $$,
    'a dead job keeps payload, headers and errors'
);
select is_empty(format('select from pgqueue.job where id = %s', :id), 'and is no job any more');
select pgqueue.enqueue('flaky') as id \gset
select token from pgqueue.claim('flaky', 'w') \gset
select is(
    pgqueue.fail(:id, :token, 'no such address', permanent => true), 'dead',
    'a permanent failure ends it at once'
);
select pgqueue.enqueue('errors', max_attempts => 100) as id \gset
do $$
declare
    j pgqueue.job;
begin
    for n in 1..15 loop
        j := pgqueue.claim('errors', 'w');
        perform pgqueue.fail(j.id, j.token, 'error ' || n, '0');
    end loop;
end;
$$;
select is(
    (select array_agg(e ->> 'error') from pgqueue.job as j, jsonb_array_elements(j.errors) as e where j.id = :id),
    (select array_agg('error ' || n) from generate_series(6, 15) as n),
    'the last ten errors are kept'
);
select is_empty(
    $$ select a.attempt, d.delay
       from unnest(array[1, 2, 3, 10, 11, 31, 100, 2147483647]) as a (attempt),
           lateral (select least(3600, 5 * 2.0 ^ least(a.attempt - 1, 40)) as full_delay) as f,
           lateral (select extract(epoch from pgqueue._retry_delay(a.attempt, '5 s', '1 hour')) as delay
                    from generate_series(1, 50)) as d
       where d.delay not between f.full_delay / 2 - 0.001 and f.full_delay + 0.001 $$,
    'the delay doubles up to the cap, between half and all of it, for any attempt'
);
select is(
    (select count(distinct pgqueue._retry_delay(1, '5 s', '1 hour')) > 40 from generate_series(1, 50)),
    true, 'and is random'
);

-- Release

select pgqueue.enqueue('back') as id \gset
select token, run_at from pgqueue.claim('back', 'w') \gset
select is(
    (select pgqueue.release(array[:id], array[:token])), :id::bigint, 'a job can be given back'
);
select results_eq(
    format('select state, attempt, run_at from pgqueue.jobs where id = %s', :id),
    format('values (''ready'', 0, %L::timestamptz)', :'run_at'),
    'unharmed, and in its old place'
);
select token from pgqueue.claim('back', 'w') \gset
select pgqueue.release(array[:id], array[:token], now() + interval '1 hour');
select is(
    (select state from pgqueue.jobs where id = :id), 'scheduled', 'or be put off'
);

-- Reap and poison

select pgqueue.enqueue('poison', max_attempts => 2) as id \gset
select pgqueue.claim('poison', 'w');
select is(pgqueue.reap(), 0, 'a valid lease is not reaped');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is(
    (select state from pgqueue.jobs where id = :id), 'expired', 'a lease that ran out is expired'
);
select is(pgqueue.reap(), 1, 'an expired lease is reaped');
select results_eq(
    format('select state, attempt from pgqueue.jobs where id = %s', :id),
    $$ values ('ready', 1) $$, 'the job is ready again and the attempt counts'
);
select pgqueue.claim('poison', 'w');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is_empty(
    $$ select pgqueue.claim('poison', 'w') $$, 'a job that kills its workers is not given out for ever'
);
select is(
    (select attempt from pgqueue.dead_job where id = :id), 2, 'it ends dead when a claim meets it'
);
select pgqueue.enqueue_many('storm', (select array_agg('1'::jsonb) from generate_series(1, 30)));
select pgqueue.claim('storm', 'w', 30);
update pgqueue.job set lease_expires_at = now() - interval '1 second',
    max_attempts = case when id % 2 = 0 then 1 else 20 end where queue = 'storm';
select is(pgqueue.reap(10), 10, 'reap takes as many as it is told');
select is(
    (select count(*) from pgqueue.claim('storm', 'w2', 30)), 15::bigint,
    'a claim recovers the rest, and buries the exhausted on the way'
);
select is(
    (select count(*) from pgqueue.dead_job where queue = 'storm'), 15::bigint, 'none is lost'
);

-- Who killed whom

select pgqueue.enqueue_many('victims', array['1', '2', '3', '4']::jsonb[]);
select pgqueue.claim('victims', 'many', 3), pgqueue.claim('victims', 'single');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'victims';
select count(*) from pgqueue.claim('victims', 'w');
select results_eq(
    $$ select error, count(*) from pgqueue.run where queue = 'victims' group by 1 order by 1 $$,
    $$ values
        ('the lease expired: worker many stopped extending it (one of 3 leases of it that were found expired together)', 3::bigint),
        ('the lease expired: worker single stopped extending it (the only lease of it that was found expired)', 1) $$,
    'an expiry names the worker, and how many jobs it held; one claim ends them all'
);
select is(
    (select count(*) from pgqueue.jobs where queue = 'victims' and state = 'ready'), 3::bigint,
    'those that it does not take are ready for others'
);
select pgqueue.enqueue_many('exhausted', (select array_agg(to_jsonb(n)) from generate_series(1, 2500) as n), max_attempts => 1);
select count(*) from pgqueue.claim('exhausted', 'w', 2500);
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'exhausted';
select pgqueue.enqueue('exhausted', '"behind"');
select is(
    (select c.payload #>> '{}' from pgqueue.claim('exhausted', 'w') as c), 'behind',
    'a claim finds what stands behind exhausted jobs'
);
select is(
    (select count(*) from pgqueue.dead_job where queue = 'exhausted'), 1000::bigint,
    'and buries at most a thousand of them, so that it always gets somewhere'
);

-- What extend promises

select pgqueue.enqueue('beat') as id \gset
select token, lease_expires_at from pgqueue.claim('beat', 'w', lease => '10 minutes') \gset
select is(
    (select status from pgqueue.extend(array[:id], array[:token])), 'held', 'a heartbeat without a lease'
);
select is(
    (select lease_expires_at from pgqueue.job where id = :id), :'lease_expires_at'::timestamptz,
    'does not shorten what the claim asked for'
);

-- Many outcomes in one call

select pgqueue.enqueue_many('ends', (select array_agg(to_jsonb(n)) from generate_series(1, 9) as n));
select array_agg(c.id order by c.id) as ids, array_agg(c.token order by c.id) as tokens
from pgqueue.claim('ends', 'w', 9) as c \gset
select pgqueue.cancel((:'ids'::bigint[])[7]), pgqueue.cancel((:'ids'::bigint[])[8]);
select pgqueue.complete((:'ids'::bigint[])[9], (:'tokens'::bigint[])[9]);
create temporary table ended as
select f.status, j.place from pgqueue.finish(
    :'ids'::bigint[], :'tokens'::bigint[],
    array['complete', 'complete', 'fail', 'reject', 'release', 'complete', 'fail', 'release', 'complete'],
    array['{"ok": 1}', null, E'TimeoutError: slow\nat line 7', 'no', null, '{"half": ', 'x', null, null],
    array[null, null, '1 hour', null, '2 hours', null, null, null, null]::interval[]
) with ordinality as f (job_id, status, place)
join unnest(:'ids'::bigint[]) with ordinality as j (id, place) on j.id = f.job_id and j.place = f.place;
select results_eq(
    'select status from ended order by place',
    $$ values ('completed'), ('completed'), ('retry'), ('dead'), ('released'), ('retry'), ('cancelled'),
       ('cancelled'), ('lost') $$,
    'each attempt ends by its own outcome, and the answers come in the order of the question'
);
select results_eq(
    format('select outcome, result, error from pgqueue.run where job_id = any (%L) and job_id <= %s order by job_id',
        :'ids', (:'ids'::bigint[])[6]),
    $$ values ('completed', '{"ok": 1}'::jsonb, null), ('completed', null, null),
       ('retry', null, 'TimeoutError: slow'), ('dead', null, 'no'),
       ('retry', null, 'the result cannot be stored: invalid input syntax for type json') $$,
    'a result is stored, the log keeps the first line of an error, and a bad result fails its own job'
);
select ok(
    (select run_at between now() + interval '59 minutes' and now() + interval '61 minutes'
     from pgqueue.job where id = (:'ids'::bigint[])[3]),
    'a delay takes the place of the backoff'
);
select ok(
    (select run_at > now() + interval '119 minutes' and attempt = 0
     from pgqueue.job where id = (:'ids'::bigint[])[5]),
    'and puts a released job off, its attempt not counted'
);
select is_empty($$ select pgqueue.finish('{}', '{}', '{}') $$, 'nothing to finish is nothing');
select results_eq(
    $$ select * from pgqueue.finish(array[0, 0], array[1, 1], array['complete', 'fail']) $$,
    $$ values (0::bigint, 'lost'), (0, 'lost') $$, 'what is not held is lost'
);
select pgqueue.enqueue('twice') as id \gset
select token from pgqueue.claim('twice', 'w') \gset
select results_eq(
    format('select status from pgqueue.finish(array[%1$s, %1$s], array[%2$s, %2$s], array[''complete'', ''fail''])', :id, :token),
    $$ values ('completed'), ('lost') $$, 'a job ends once, by what was said first'
);
select throws_ok(b.call, '22023', null, format('refused: %s', b.call))
from (values
    ('select pgqueue.finish(array[1], array[1], array[''done''])'),
    ('select pgqueue.finish(array[1], array[1], array[null])'),
    ('select pgqueue.finish(array[1], array[1], null)'),
    ('select pgqueue.finish(array[1], array[1, 2], array[''fail''])'),
    ('select pgqueue.finish(array[1], array[1], array[''fail''], array[''a'', ''b''])'),
    ('select pgqueue.finish(array[1], array[1], array[''fail''], null, array[interval ''-1 s''])'),
    ('select pgqueue.complete_many(array[1], array[1], array[''1'', ''2'']::jsonb[])'),
    ('select pgqueue.claim_from(array[''q''], ''w'', 0)'),
    ('select pgqueue.claim_from(array[''q''], ''w'', weights => array[0])'),
    ('select pgqueue.claim_from(array[''q''], ''w'', limits => array[1, 2])')
) as b (call);
select pgqueue.enqueue_many('res', array['1', '2']::jsonb[]);
select array_agg(c.id) as ids, array_agg(c.token) as tokens from pgqueue.claim('res', 'w', 2) as c \gset
select is(
    (select count(*) from pgqueue.complete_many(:'ids', :'tokens', array['{"r": 1}', null]::jsonb[])), 2::bigint,
    'many complete with their results'
);
select is(
    (select array_agg(result order by job_id) from pgqueue.run where queue = 'res'),
    array['{"r": 1}', null]::jsonb[], 'which the log keeps'
);

-- Several queues

select pgqueue.enqueue_many(q, (select array_agg('1'::jsonb) from generate_series(1, 100)))
from (values ('full'), ('half'), ('few')) as v (q);
select count(pgqueue.cancel(id)) from pgqueue.job where queue = 'few' and id % 100 > 4;
create temporary table taken as
select c.queue, count(*) as jobs
from pgqueue.claim_from(array['full', 'half', 'few', 'none'], 'w', 60, weights => array[2, 1, 1, 1], limits => array[null, 15, null, 5]) as c
group by 1;
select is((select sum(jobs) from taken), 60::numeric, 'a claim over several queues takes as many as it was asked to');
select cmp_ok((select jobs from taken where queue = 'half'), '<=', 15::bigint, 'no more of a queue than its limit');
select cmp_ok((select jobs from taken where queue = 'few'), '<', 10::bigint, 'what a queue leaves of its share');
select cmp_ok((select jobs from taken where queue = 'full'), '>', 30::bigint, 'goes to those that have more');

select * from finish();
rollback;
