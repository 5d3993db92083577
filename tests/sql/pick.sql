-- The pick: lanes, and the cells that keep a claim flat. Plans and buffers: test_plans.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(28);

-- The record of a lane or a queue, as long as it is the only one in its place.
create function pg_temp.cell(queue text, seed bigint, place int) returns bigint
    language sql
as $$ select pg_sequence_last_value(pgqueue._cell((hashtextextended($1, $2) & 127)::int, $3)) $$;
create function pg_temp.is_positioned(queue text, lane int) returns boolean
    language sql
as $$
    select coalesce(
        (pg_temp.cell($1, $2, 0) & (1::bigint << 51) - 1) > pgqueue._since_2020(clock_timestamp()), false
    )
$$;
create function pg_temp.forget() returns void
    language sql
as $$
    select setval(c.oid, 0) from pg_class as c
    where c.relnamespace = 'pgqueue'::regnamespace and c.relname like '\_cell\_%'
$$;
create function pg_temp.numbers(queue text, jobs int) returns text
    language sql
as $$ select string_agg(c.payload #>> '{}', ' ') from pgqueue.claim($1, 'w', $2) as c $$;
create function pg_temp.fill(queue text, jobs int, run_at timestamptz default null) returns void
    language sql
as $$ select pgqueue.enqueue_many($1, (select array_agg(to_jsonb(n)) from generate_series(1, $2) as n), run_at => $3) $$;

select pg_temp.forget();
select pg_temp.fill('small', 200);
select count(*) from pgqueue.claim('small', 'w', 50);
select ok(not pg_temp.is_positioned('small', 0), 'a lane that is cheap to walk gets no position');
select is(pg_temp.numbers('small', 3), '51 52 53', 'and is walked from its beginning each time');

-- 2,000 running jobs in front of those that wait
select pg_temp.fill('deep', 2020);
update pgqueue.job set run_at = run_at - interval '1 minute' where queue = 'deep';
select count(*) from pgqueue.claim('deep', 'w', 2000);
select pg_temp.forget();
select is(pg_temp.numbers('deep', 1), '2001', 'a long walk ends at the right job');
select ok(pg_temp.is_positioned('deep', 0), 'and leaves a position');
select is(pg_temp.numbers('deep', 2), '2002 2003', 'from which the next claim goes on');
select pgqueue.enqueue('deep', '"urgent"', priority => 5);
select pgqueue.enqueue('deep', '"lesser"', priority => -5);
select is(pg_temp.numbers('deep', 1), 'urgent', 'a job of higher priority goes first');
select is(pg_temp.numbers('deep', 5), '2004 2005 2006 2007 2008', 'one of lower priority last');
-- As if a walk from the beginning had taken no time, or long: until then none is made.
create function pg_temp.last_walk_until(moment timestamptz) returns bigint
    language sql
as $$
    select setval(
        pgqueue._cell((hashtextextended('deep', 0) & 127)::int, 0),
        ((hashtextextended('deep', 0) >> 20 & 4095) << 51) | pgqueue._since_2020($1)
    )
$$;
select pg_temp.last_walk_until(clock_timestamp() + interval '80 ms');
select pgqueue.enqueue('deep', '"past"', run_at => clock_timestamp() - interval '1 hour');
select is(pg_temp.numbers('deep', 1), 'past', 'what appears behind the position is found at once where a walk is cheap');
select id, token from pgqueue.job where payload = '7' and queue = 'deep' \gset
select pg_temp.last_walk_until(clock_timestamp() + interval '80 ms');
select pgqueue.release(array[:id], array[:token]);
select is(pg_temp.numbers('deep', 1), '7', 'so is what is given back');

select is(pg_temp.numbers('deep', 1), '2009', 'the position moves on');
select pg_temp.last_walk_until(clock_timestamp() + interval '30 s');
select pgqueue.enqueue('deep', '"late"', run_at => clock_timestamp() - interval '1 hour');
select is(pg_temp.numbers('deep', 1), '2010', 'where a walk is dear, what appears behind the position comes later');
select is(
    pg_temp.numbers('deep', 99), '2011 2012 2013 2014 2015 2016 2017 2018 2019 2020 lesser',
    'a claim takes what there is'
);
select is(pg_temp.numbers('deep', 99), 'late', 'but never says that there is nothing without a walk');
select is(pg_temp.numbers('deep', 99), null, 'and then there is nothing');
select ok(pg_temp.cell('deep', 0, 1) is not null, 'a position remains');
select pg_temp.forget();
select pgqueue.enqueue('deep', '"after"');
select is(pg_temp.numbers('deep', 1), 'after', 'it can be lost');

-- A clock that was a day ahead
select setval(
    pgqueue._cell((hashtextextended('deep', 0) & 127)::int, 1),
    pgqueue._since_2020(clock_timestamp() + interval '1 day') << 12
);
select pg_temp.last_walk_until(clock_timestamp() + interval '30 s');
select pgqueue.enqueue('deep', '"today"');
select is(pg_temp.numbers('deep', 1), 'today', 'a position in the future is none');
select pg_temp.last_walk_until(clock_timestamp() + interval '1 day');
select pgqueue.enqueue('deep', '"behind"', run_at => clock_timestamp() - interval '1 day');
select is(pg_temp.numbers('deep', 1), 'behind', 'nor is one valid for longer than a minute');

-- 3,000 jobs at one moment
select pg_temp.fill('tied', 3000, clock_timestamp() - interval '1 minute');
select count(*) from pgqueue.claim('tied', 'w', 1000);
select pg_temp.forget();
select is(pg_temp.numbers('tied', 2), '1001 1002', 'jobs of one moment run in the order of their ids');
select is(pg_temp.numbers('tied', 2), '1003 1004', 'and the position can lie between two of them');
select is((pg_temp.cell('tied', 0, 1) & 4095) > 0, true, 'by their ids');
select is(pg_temp.numbers('tied', 2), '1005 1006', 'so that none is passed over');

-- Two names with one hash share the index entries of a lane, and nothing else.
select is(hashtext('15601'), hashtext('180514'), 'two queues may have one hash');
select pgqueue.enqueue('15601', '1', priority => 3);
select pgqueue.enqueue('180514', '2', run_at => clock_timestamp() + interval '1 hour');
select is(
    (select array_agg(c.queue) from pgqueue.claim('180514', 'w', 5) as c), null,
    'a claim takes no job of the other'
);
select is(
    (select pgqueue.rest(array['15601'], park => false)), interval '0', 'nor is one waited for'
);
select is(
    array[pgqueue.purge('180514'), (select count(*) from pgqueue.claim('15601', 'w', 5))],
    array[1, 1]::bigint[], 'nor purged'
);
select throws_ok($$ select pgqueue.enqueue('q', priority => 101) $$, '22023', null, 'a priority above 100 is refused');
select throws_ok($$ select pgqueue.reprioritize(1, -101) $$, '22023', null, 'and one below -100');

select * from finish();
rollback;
