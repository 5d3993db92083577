-- Who waits, and who wakes them: what one session can show. The rest takes two: test_races.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(15);

create temporary view parked as
select l.objid from pg_locks as l
where l.locktype = 'advisory' and l.classid = 7366514 and l.pid = pg_backend_pid();

select ok(pgqueue.park(array['a', 'b', 'a']), 'a quiet queue can be slept on');
select is((select count(*) from parked), 2::bigint, 'park holds one lock for each queue');
select ok(pgqueue.park(array['a', 'b']), 'to park twice is harmless');
select is((select count(*) from parked), 2::bigint, 'and holds no more');
select lives_ok($$ select pgqueue.unpark(array['a']) $$, 'unpark ends it');
select is((select count(*) from parked), 1::bigint, 'for the queues it names');
select lives_ok($$ select pgqueue.unpark(array['a', 'b', 'c']) $$, 'to unpark what is not parked is harmless');
select is((select count(*) from parked), 0::bigint, 'and the rest is let go');
select lives_ok(
    $$ select pgqueue.park((select array_agg('queue ' || n) from generate_series(1, 3000) as n)) $$,
    'any number of queues fits the lock table'
);
select pgqueue.unpark((select array_agg('queue ' || n) from generate_series(1, 3000) as n));

select is(pgqueue.next_due(array['a']), null, 'nothing is due where nothing is scheduled');
select pgqueue.enqueue('a', run_at => now() + interval '3 hours', priority => 3);
select pgqueue.enqueue('a', run_at => now() + interval '2 hours', priority => -3);
select pgqueue.enqueue('a');
select pgqueue.enqueue('b', run_at => now() + interval '1 hour');
select cmp_ok(pgqueue.next_due(array['a']), '<', interval '2 hours', 'the next job of any priority is what counts');
select cmp_ok(pgqueue.next_due(array['a']), '>', interval '1 hour 59 minutes', 'not those that are due already');
select cmp_ok(pgqueue.next_due(array['a', 'b', 'c']), '<', interval '1 hour', 'of any of the queues');
select pgqueue.pause('b');
select cmp_ok(pgqueue.next_due(array['a', 'b']), '>', interval '1 hour 59 minutes', 'but a paused one');
select is(pgqueue.next_due('{}'), null, 'no queues, no next');

select * from finish();
rollback;
