-- Who rests, and who wakes them: what one session can show. The rest takes two: test_races.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(24);

create temporary view parked as
select l.objid, l.mode from pg_locks as l
where l.locktype = 'advisory' and l.classid = 7366514 and l.pid = pg_backend_pid();
create function pg_temp.is_near(rest interval, target interval) returns boolean
    language sql as $$ select $1 between $2 - interval '10 s' and $2 $$;

select is(pgqueue.rest(array['a', 'b', 'a']), null, 'queues without jobs can be slept on until notified');
select is((select count(*) from parked), 2::bigint, 'whoever rests holds one lock for each queue');
select is(pgqueue.rest(array['a', 'b']), null, 'to rest twice is harmless');
select is((select count(*) from parked), 2::bigint, 'and holds no more');
select is(pgqueue.rest(array['c'], park => false), null, 'who cannot be notified only looks');
select is((select count(*) from parked where mode <> 'ShareLock'), 0::bigint, 'nothing is held that keeps others out');
select is(pgqueue.rest(array['c']), null, 'to rest on others');
select is((select count(*) from parked), 1::bigint, 'ends the rest on those before');
select lives_ok(
    $$ select pgqueue.rest((select array_agg('queue ' || n) from generate_series(1, 3000) as n)) $$,
    'any number of queues fits the lock table'
);
select throws_ok($$ select pgqueue.rest(null) $$, '22023', null, 'no queues are refused');
select throws_ok($$ select pgqueue.rest('{}') $$, '22023', null, 'an empty array too');
select throws_ok($$ select pgqueue.rest(array['a', null]) $$, '22023', null, 'and a null among them');

select pgqueue.enqueue('a', run_at => now() + interval '3 hours', priority => 3);
select pgqueue.enqueue('a', run_at => now() + interval '2 hours', priority => -3);
select pgqueue.enqueue('b', run_at => now() + interval '1 hour', kind => 'k');
select ok(pg_temp.is_near(pgqueue.rest(array['a'], park => false), '2 hours'), 'the next job of any priority is what counts');
select ok(pg_temp.is_near(pgqueue.rest(array['a', 'b', 'c'], park => false), '1 hour'), 'of any of the queues');
select ok(pg_temp.is_near(pgqueue.rest(array['a', 'b'], array['a'], false), '2 hours'), 'and of these kinds');
select pgqueue.pause('b');
select ok(pg_temp.is_near(pgqueue.rest(array['a', 'b'], park => false), '2 hours'), 'but of no paused one');
select pgqueue.enqueue('a');
select is(pgqueue.rest(array['a'], park => false), interval '0', 'when a job is due, claim at once');
select count(*) from pgqueue.claim('a', 'w', 10, '30 minutes');
select ok(pg_temp.is_near(pgqueue.rest(array['a'], park => false), '30 minutes'), 'a lease that ends is work to come');
update pgqueue.job set lease_expires_at = now() - interval '1 s' where token is not null;
select is(pgqueue.rest(array['a'], park => false), interval '0', 'one that has ended is work');

-- A busy session is not notified.
select pgqueue.enqueue_many('busy', array['1', '2', '3']::jsonb[]);
select pgqueue.rest(array['busy']);
select count(*) from pgqueue.claim('busy', 'w');
select is((select count(*) from parked), 1::bigint, 'one job does not end the rest');
select is(
    (select count(*) from pgqueue.claim('busy', 'w')), 1::bigint, 'nor does the next'
) from (select set_config('pgqueue.parked', '1', false)) as worked_for_a_while;
select is((select count(*) from parked), 0::bigint, 'but a while of work does');
select set_config('pgqueue.parked', 'garbage', false);
select lives_ok($$ select pgqueue.claim('busy', 'w') $$, 'a setting of the caller''s changes nothing');
select set_config('pgqueue.parked', '', false);
select lives_ok($$ select pgqueue.claim('busy', 'w') $$, 'nor does an empty one');

select * from finish();
rollback;
