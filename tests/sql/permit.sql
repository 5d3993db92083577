-- Permits of groups: which are created, who holds them, and when they are free again. Those of queues and kinds are
-- in cap.sql; what two sessions do at once is in test_races.py and test_caps.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(62);

\ir limits.psql

-- The payloads of the claimed jobs, in the order of the claim.
create function pg_temp.claimed(queue text, jobs int) returns text
    language sql
as $$ select coalesce(string_agg(c.payload #>> '{}', ' '), '') from pgqueue.claim($1, 'w', $2) as c $$;
create function pg_temp.fill(queue text, names text) returns void
    language sql
as $$
    select count(pgqueue.enqueue($1, to_jsonb(n.name), group_key => left(n.name, 1), kind => 'k'))
    from string_to_table($2, ' ') as n (name)
$$;
-- The permits to run of group a: who has them.
create function pg_temp.holders(queue text, most int) returns text
    language sql
as $$
    select string_agg(coalesce(j.payload #>> '{}', '-'), ' ' order by j.payload #>> '{}')
    from pgqueue._permits($1, ('', 'a', false, $2, '1 second')::pgqueue._cap, clock_timestamp()) as p
    left join pgqueue.job as j on j.id = p.holder and p.is_held
$$;

-- Made as they are needed
select pgqueue.configure('made', group_limit => 6);
select pg_temp.fill('made', 'a1');
select is(pg_temp.holders('made', 6), '- - - -', 'the first enqueue into a group makes four permits');
select pg_temp.fill('made', 'a2 a3 a4 a5');
select is(pg_temp.holders('made', 6), '- - - -', 'others make none');
select pgqueue.enqueue_many(
    'made', array_fill('{}'::jsonb, array[9]), group_keys => array_fill('b'::text, array[7]) || '{c,null}'::text[]
);
select results_eq(
    $$ select group_key, count(*) from pgqueue.permit where queue = 'made' group by 1 order by 1 $$,
    $$ values ('a', 4::bigint), ('b', 6), ('c', 4) $$,
    'enqueue_many makes one for each job of a group, up to the limit, and at least four'
);
delete from pgqueue.job where queue = 'made' and group_key = 'b';
select pgqueue.enqueue_many('made', array_fill('{}'::jsonb, array[2]), group_keys => '{b,b}');
update pgqueue.queue set group_limit = 3 where name = 'made';
select pgqueue._resolve('made');
select pg_temp.commit();
select is(pg_temp.claimed('made', 9), 'a1 a2 a3 {} {} {} {}', 'from the commit on they can be taken');
select is(
    (select count(*) from pgqueue.permit as p join pgqueue.job as j on j.id = p.job_id and j.token = p.token where p.queue = 'made'),
    6::bigint, 'each job of a group has one'
);
select pgqueue.configure('own', group_limit => 3);
select pg_temp.fill('own', 'a1');
select is(pg_temp.claimed('own', 9), '', 'nobody takes one that his own transaction has made');

-- Held
select pgqueue.configure('held', group_limit => 2);
select pg_temp.fill('held', 'a1 a2 a3');
select pg_temp.commit();
select is(pg_temp.claimed('held', 5), 'a1 a2', 'two of a group run');
select is(pg_temp.holders('held', 2), 'a1 a2', 'they hold its permits');
select is(
    (
        select array_agg(p.free_at = j.lease_expires_at)
        from pgqueue._permits('held', ('', 'a', false, 2, '1 second')::pgqueue._cap, clock_timestamp()) as p
        join pgqueue.job as j on j.id = p.holder
    ), '{t,t}', 'until their leases end at the latest'
);
select pg_temp.complete('held', 'a1');
select is(pg_temp.holders('held', 2), 'a2 -', 'a job that has completed holds none');
select is(pg_temp.claimed('held', 5), 'a3', 'another takes it');

-- Given back
create function pg_temp.held(queue text) returns bigint
    language sql
as $$ select count(*) from pgqueue.permit where permit.queue = $1 and free_at = 'infinity' $$;
select pgqueue.configure('back', group_limit => 2);
select pgqueue.configure('back', max_running => 5);
select pg_temp.fill('back', 'a1 b1 c1 d1 e1');
select pg_temp.commit();
select is(length(pg_temp.claimed('back', 5)), 14, 'five jobs run');
select is(pg_temp.held('back'), 10::bigint, 'each holds a permit of its group, and one of its queue');
select pg_temp.complete('back', 'a1');
select pgqueue.complete_many(array_agg(id), array_agg(token)) from pgqueue.job where queue = 'back' and payload = '"b1"';
select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.job where queue = 'back' and payload = '"c1"';
select pgqueue.release(array[id], array[token]) from pgqueue.job where queue = 'back' and payload = '"d1"';
select pgqueue.fail(id, token, 'e', '1 hour') from pgqueue.job where queue = 'back' and payload = '"e1"';
select is(pg_temp.held('back'), 0::bigint, 'whatever ends an attempt gives them back');
select is(pg_temp.claimed('back', 5), 'd1', 'what was released runs again');
select pgqueue.cancel(id) from pgqueue.job where queue = 'back' and token is not null;
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'back' and token is not null;
select is(pgqueue.reap(), 1, 'a lease expires');
select is(pg_temp.held('back'), 0::bigint, 'then, too');

-- And where that is lost
select pgqueue.configure('unsaid', max_running => 1);
select pg_temp.fill('unsaid', 'a1 a2 a3');
select pg_temp.commit();
select pg_temp.claimed('unsaid', 1);
set local pgqueue.lose_hints = '1';
select pg_temp.complete('unsaid', 'a1');
reset pgqueue.lose_hints;
select is(pg_temp.held('unsaid'), 1::bigint, 'a permit may stay with a job that is gone');
select is(pg_temp.claimed('unsaid', 1), 'a2', 'a claim that finds the queue full looks for it');
set local pgqueue.lose_hints = '1';
select pg_temp.complete('unsaid', 'a2');
reset pgqueue.lose_hints;
select cmp_ok(
    (select sum(pgqueue._sweep_permits()) from generate_series(0, pg_relation_size('pgqueue.permit') / 16384)), '>=', 1::bigint,
    'and so does the sweep'
);
select is(pg_temp.held('unsaid'), 0::bigint, 'page by page');

-- Kept for a retry
create function pg_temp.keeps(queue text) returns text
    language sql
as $$
    select string_agg(concat(j.payload #>> '{}', case when j.token is null and j.permits is not null then ' keeps' end), ', ' order by j.id)
    from pgqueue.job as j where j.queue = $1
$$;
create function pg_temp.fail(queue text, retry_in interval) returns text
    language sql
as $$ select pgqueue.fail(j.id, j.token, 'e', retry_in => $2) from pgqueue.job as j where j.queue = $1 and j.token is not null $$;
select pgqueue.configure('kept', group_limit => 1, group_on_retry => 'block');
select pg_temp.fill('kept', 'a1 a2');
select pg_temp.commit();
select pg_temp.claimed('kept', 5);
select is(pg_temp.keeps('kept'), 'a1, a2', 'a job that runs has its token');
select is(pg_temp.fail('kept', '1 hour'), 'retry', 'it fails');
select is(pg_temp.keeps('kept'), 'a1 keeps, a2', 'it keeps its permit, where nothing of its group may overtake it');
select is(pg_temp.holders('kept', 1), 'a1', 'so others find it held');
select is(
    (
        select p.free_at = j.run_at
        from pgqueue._permits('kept', ('', 'a', false, 1, '1 second')::pgqueue._cap, clock_timestamp()) as p
        join pgqueue.job as j on j.id = p.holder
    ), true, 'until the retry'
);
select pgqueue.run_now(id) from pgqueue.job where payload = '"a1"' and queue = 'kept';
select is(pg_temp.holders('kept', 1), '-', 'from then on it may be taken');
select is(pg_temp.claimed('kept', 5), 'a1', 'first by the retry');
select pgqueue.release(array[id], array[token], '2100-01-01') from pgqueue.job where queue = 'kept' and token is not null;
select is(pg_temp.keeps('kept'), 'a1, a2', 'a job that is released keeps no permit');
select is(pg_temp.claimed('kept', 5), 'a2', 'the next of its group runs');
select pgqueue.configure('kept', group_on_retry => 'skip');
select is(pg_temp.fail('kept', '1 hour'), 'retry', 'it fails');
select is(pg_temp.keeps('kept'), 'a1, a2', 'and keeps none, where others may overtake it');
select pgqueue.configure('kept', group_on_retry => 'block');
select pgqueue.run_now(id) from pgqueue.job where payload = '"a2"' and queue = 'kept';
select is(pg_temp.claimed('kept', 5), 'a2', 'its retry runs');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'kept' and token is not null;
select is(pgqueue.reap(), 1, 'its lease expires');
select is(pg_temp.keeps('kept'), 'a1, a2 keeps', 'then it keeps its permit, as after a failure');
select is(pg_temp.claimed('kept', 5), 'a2', 'and is claimed again');
select is(
    (select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.job where queue = 'kept' and token is not null), 'dead', 'it dies'
);
select is(pg_temp.holders('kept', 1), '-', 'a dead job holds no permit');
select pgqueue.run_now(id) from pgqueue.job where payload = '"a1"' and queue = 'kept';
select is(pg_temp.claimed('kept', 5), 'a1', 'and the last one runs');

-- Only the permit of the group is kept
select pgqueue.configure('kept', kind => 'k', max_running => 1);
select pg_temp.fill('kept', 'b1');
select pg_temp.commit();
select pgqueue.complete(id, token) from pgqueue.job where queue = 'kept' and token is not null;
select is(pg_temp.claimed('kept', 5), 'b1', 'a job of a kind with a cap runs');
set local pgqueue.lose_hints = '1';
select pg_temp.fail('kept', '0');
reset pgqueue.lose_hints;
select setval('pgqueue._cell_groups_swept', -9223372036854775808), pgqueue._sweep_groups(1000);
select is(pg_temp.claimed('kept', 5), 'b1', 'and its retry finds the permit of its kind, also where giving it back was lost');

-- A limit that was lowered: while what runs beyond it ends, in whatever order
select pgqueue.configure('lower', group_limit => 4);
select pg_temp.fill('lower', 'a1 a2 a3 a4 a5 a6 a7');
select pg_temp.commit();
select is(pg_temp.claimed('lower', 9), 'a1 a2 a3 a4', 'four of a group run');
update pgqueue.permit as p set place = right(j.payload #>> '{}', 1)::int
from pgqueue.job as j where j.id = p.job_id and p.queue = 'lower';
select pgqueue.configure('lower', group_limit => 2);
select is(
    (select count(*) from pgqueue.permit where queue = 'lower' and is_surplus), 2::bigint,
    'where a limit is lowered to two, two of four that run are surplus'
);
select pg_temp.complete('lower', 'a1'), pg_temp.complete('lower', 'a2');
select is(pg_temp.claimed('lower', 9), '', 'with a limit of two, and two that run above it, no place is free');
select is(
    (select count(*) from pgqueue.permit where queue = 'lower' and is_surplus), 0::bigint,
    'those that run have the existing places'
);
select pg_temp.complete('lower', 'a4');
select is(pg_temp.claimed('lower', 9), 'a5', 'with one that runs above it, one is');
select pgqueue.configure('lower', group_limit => 3);
select is(pg_temp.claimed('lower', 9), 'a6', 'a limit that is raised again counts all of them');
select is(pg_temp.claimed('lower', 9), '', 'and no more run');

-- What has been lowered once costs others nothing
select pgqueue.configure('quick', group_limit => 1);
select pgqueue.enqueue('quick', group_key => 'g' || n) from generate_series(1, 60) as n;
select pg_temp.commit();
-- A slow walk of another test file would rule that way out for a while.
select setval('pgqueue._cell_groups_slow', 0);
set local track_functions = 'pl';
select count(*) from generate_series(1, 10) as n cross join lateral pgqueue.claim('quick', 'w' || n, 5);
select cmp_ok(
    pg_stat_get_xact_function_calls('pgqueue._pick_plain_groups'::regproc), '>',
    coalesce(pg_stat_get_xact_function_calls('pgqueue._pick_groups'::regproc), 0),
    'where a limit was lowered, the claims of other queues go on by the shorter way'
);

-- Copies, as two sessions make them that do not see each other
select pgqueue.configure('copies', group_limit => 2);
select pg_temp.fill('copies', 'a1 a2 a3 a4 a5');
select pg_temp.commit();
insert into pgqueue.permit (free_at, token, place, is_rate, queue, kind, group_key)
select free_at, token, place, is_rate, queue, kind, group_key from pgqueue.permit where queue = 'copies';
select is(pg_temp.claimed('copies', 9), 'a1 a2', 'where each permit was made twice, a claim takes as many as the limit says');
select is(
    (select count(*) from pgqueue.permit where queue = 'copies'), 2::bigint, 'and drops the copies'
);
select pg_temp.complete('copies', 'a1'), pg_temp.complete('copies', 'a2');
select is(pg_temp.claimed('copies', 9), 'a3 a4', 'the next takes what there is');

-- Limit and rate together, and the cap of the queue
select pgqueue.configure('both', group_limit => 3);
select pgqueue.configure('both', group_key => '*', rate_limit => 2, rate_period => '1 hour');
select pg_temp.fill('both', 'a1 a2 a3 a4');
select pg_temp.commit();
select is(pg_temp.claimed('both', 9), 'a1 a2', 'a group with a limit of three and a rate of two gives two');
select is(pg_temp.holders('both', 3), 'a1 a2 -', 'and a job that its rate refuses holds no permit to run');
select pgqueue.configure('refused', group_limit => 1);
select pgqueue.configure('refused', kind => 'k', max_running => 1);
select pg_temp.fill('refused', 'a1 b1 c1');
select pg_temp.commit();
select is(length(pg_temp.claimed('refused', 3)), 2, 'where the cap of a kind refuses jobs of groups');
select is(
    (select count(*) from pgqueue.permit where queue = 'refused' and free_at = 'infinity' and group_key <> ''), 1::bigint,
    'these hold no permit of their groups'
);
select pgqueue.configure('refused', kind => 'k', reset => true);
select is(length(pg_temp.claimed('refused', 3)), 5, 'and find them when the kind has no cap any more');

-- Rates
select pgqueue.configure('rate', group_key => 'a', rate_limit => 2, rate_period => '1 hour');
select pg_temp.fill('rate', 'a1 a2 a3 a4');
select pg_temp.commit();
select is(pg_temp.claimed('rate', 9), 'a1 a2', 'a group with a rate of two gives two');
select pgqueue.configure('rate', group_key => 'a', rate_limit => 4);
select pg_temp.commit();
select pg_temp.claimed('rate', 9), pg_temp.commit();
select pg_temp.claimed('rate', 9), pg_temp.commit();
select is(
    (select count(*) from pgqueue.job where queue = 'rate' and token is not null), 4::bigint,
    'when it is raised to four, two more begin within the next claims'
);

-- A limit for groups that have waited without one
select pg_temp.fill('waited', 'a1 a2 b1 b2');
select pgqueue.configure('waited', group_limit => 1);
select pg_temp.commit();
select is(pg_temp.claimed('waited', 9), 'a1 b1', 'a group that gets a limit while it waits has a permit from the commit on');

-- Dropped
select pgqueue.configure('idle', group_limit => 1);
select pg_temp.fill('idle', 'a1 b1 c1');
select pg_temp.commit();
select is(pg_temp.claimed('idle', 9), 'a1 b1 c1', 'jobs of three groups run');
select pg_temp.complete('idle', 'a1'), pg_temp.complete('idle', 'b1');
update pgqueue.permit set taken_at = taken_at - interval '25 hours' where queue = 'idle' and group_key in ('b', 'c');
select pgqueue._drop_permits();
select results_eq(
    $$ select group_key from pgqueue.permit where queue = 'idle' order by 1 $$, $$ values ('a'), ('c') $$,
    'the permits of a group are dropped when it has had no job for a day'
);

select * from finish();
rollback;
