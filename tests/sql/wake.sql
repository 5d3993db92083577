-- Parking: which locks a resting session holds, and until when. Waking one takes two sessions: test_races.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(14);

create temporary view parked as
select l.objid, l.mode from pg_locks as l
where l.locktype = 'advisory' and l.classid = 7366514 and l.pid = pg_backend_pid();
select is(
    pgqueue.rest(array['a', 'b', 'a']), null,
    'rest on queues without jobs returns null: sleep until notified'
);
select is((select count(*) from parked), 2::bigint, 'a parked session holds one lock for each queue');
select is(pgqueue.rest(array['a', 'b']), null, 'a parked session can rest again');
select is(
    (select count(*) from parked), 2::bigint,
    'a session that rests again holds no more locks than before'
);
select is(
    pgqueue.rest(array['c'], park => false), null,
    'a session that cannot be notified can rest without parking'
);
select is(
    (select count(*) from parked where mode <> 'ShareLock'), 0::bigint, 'rest holds no exclusive lock'
);
select is(pgqueue.rest(array['c']), null, 'a parked session can rest on another queue');
select is(
    (select count(*) from parked), 1::bigint,
    'a session that rests on another queue is no longer parked on those before'
);
select lives_ok(
    $$ select pgqueue.rest((select array_agg('queue ' || n) from generate_series(1, 3000) as n)) $$,
    'a session can rest on 3,000 queues without filling the lock table'
);

-- A busy session is not notified: after 100 ms of work without a rest it is no longer parked.
select pgqueue.enqueue_many('busy', array['1', '2', '3']::jsonb[]);
select pgqueue.rest(array['busy']);
select count(*) from pgqueue.claim('busy', 'w');
select is((select count(*) from parked), 1::bigint, 'a parked session that claims one job stays parked');
select is(
    (select count(*) from pgqueue.claim('busy', 'w')), 1::bigint, 'a parked session that is busy can claim'
) from (select set_config('pgqueue.parked', '1', false)) as worked_for_a_while;
select is(
    (select count(*) from parked), 0::bigint,
    'a session that has been busy for a while is no longer parked'
);
select set_config('pgqueue.parked', 'garbage', false);
select lives_ok(
    $$ select pgqueue.claim('busy', 'w') $$,
    'a claim succeeds when the caller has set pgqueue.parked to garbage'
);
select set_config('pgqueue.parked', '', false);
select lives_ok(
    $$ select pgqueue.claim('busy', 'w') $$,
    'a claim succeeds when the caller has set pgqueue.parked to an empty text'
);

select * from finish();
rollback;
