-- Which jobs are due, in which order, and the positions that save claims from walking a lane again. What
-- a claim costs is in test_plans.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(43);

-- A cell of a lane or a queue.
create function pg_temp.place(queue text, seed bigint, place int) returns regclass
    language sql
as $$ select ('pgqueue._cell_' || (pgqueue._record(hashtextextended($1, $2))).record + $3)::regclass $$;
create function pg_temp.cell(queue text, seed bigint, place int) returns bigint
    language sql
as $$ select pg_sequence_last_value(pg_temp.place($1, $2, $3)) $$;
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
select ok(not pg_temp.is_positioned('small', 0), 'a lane that is cheap to walk has no position');
select is(
    pg_temp.numbers('small', 3), '51 52 53', 'a lane without a position is walked from its beginning'
);

-- 2,000 running jobs in front of the ready ones
select pg_temp.fill('deep', 2020);
update pgqueue.job set run_at = run_at - interval '1 minute' where queue = 'deep';
select count(*) from pgqueue.claim('deep', 'w', 2000);
select pg_temp.forget();
select is(
    pg_temp.numbers('deep', 1), '2001', 'a claim finds the first ready job behind 2,000 running ones'
);
select ok(pg_temp.is_positioned('deep', 0), 'a claim that walked far stores a position');
select is(
    pg_temp.numbers('deep', 2), '2002 2003', 'the next claim takes the jobs that follow the position'
);
select pgqueue.enqueue('deep', '"urgent"', priority => 5);
select pgqueue.enqueue('deep', '"lesser"', priority => -5);
select is(
    pg_temp.numbers('deep', 1), 'urgent',
    'a job of a higher priority is claimed before the jobs of a lane with a position'
);
select is(
    pg_temp.numbers('deep', 5), '2004 2005 2006 2007 2008',
    'a job of a lower priority is not claimed before a lane with a position is empty'
);
-- Sets the moment before which no claim walks the lane from its beginning: soon after a walk that was
-- quick, late after one that was slow.
create function pg_temp.no_walk_before(moment timestamptz) returns bigint
    language sql
as $$
    select setval(
        pg_temp.place('deep', 0, 0),
        ((hashtextextended('deep', 0) >> 20 & 4095) << 51) | pgqueue._since_2020($1)
    )
$$;
select pg_temp.no_walk_before(clock_timestamp() + interval '80 ms');
select pgqueue.enqueue('deep', '"past"', run_at => clock_timestamp() - interval '1 hour');
select is(
    pg_temp.numbers('deep', 1), 'past',
    'a job that appears behind the position is claimed next where a walk is cheap'
);
select id, token from pgqueue.job where payload = '7' and queue = 'deep' \gset
select pg_temp.no_walk_before(clock_timestamp() + interval '80 ms');
select pgqueue.release(array[:id], array[:token]);
select is(
    pg_temp.numbers('deep', 1), '7',
    'a job released behind the position is claimed next where a walk is cheap'
);

select is(
    pg_temp.numbers('deep', 1), '2009',
    'a claim after a walk from the beginning takes the next ready job'
);
select pg_temp.no_walk_before(clock_timestamp() + interval '30 s');
select pgqueue.enqueue('deep', '"late"', run_at => clock_timestamp() - interval '1 hour');
select is(
    pg_temp.numbers('deep', 1), '2010',
    'a job that appears behind the position waits where a walk is expensive'
);
select is(
    pg_temp.numbers('deep', 99), '2011 2012 2013 2014 2015 2016 2017 2018 2019 2020 lesser',
    'a claim of more jobs than follow the position takes all that follow it'
);
select is(
    pg_temp.numbers('deep', 99), 'late',
    'a claim that finds no job after the position walks the lane from its beginning'
);
select is(
    pg_temp.numbers('deep', 99), null, 'a claim returns no job when a walk from the beginning finds none'
);
select ok(pg_temp.cell('deep', 0, 1) is not null, 'an empty lane keeps its position');
select pg_temp.forget();
select pgqueue.enqueue('deep', '"after"');
select is(
    pg_temp.numbers('deep', 1), 'after', 'a claim finds the jobs of a lane whose position was lost'
);

-- Cells written while the clock was a day ahead
select setval(
    pg_temp.place('deep', 0, 1),
    pgqueue._since_2020(clock_timestamp() + interval '1 day') << 12
);
select pg_temp.no_walk_before(clock_timestamp() + interval '30 s');
select pgqueue.enqueue('deep', '"today"');
select is(pg_temp.numbers('deep', 1), 'today', 'a position in the future is ignored');
select pg_temp.no_walk_before(clock_timestamp() + interval '1 day');
select pgqueue.enqueue('deep', '"behind"', run_at => clock_timestamp() - interval '1 day');
select is(
    pg_temp.numbers('deep', 1), 'behind',
    'a position that claims to be valid for more than a minute is ignored'
);

-- 3,000 jobs with one run_at
select pg_temp.fill('tied', 3000, clock_timestamp() - interval '1 minute');
select count(*) from pgqueue.claim('tied', 'w', 1000);
select pg_temp.forget();
select is(
    pg_temp.numbers('tied', 2), '1001 1002', 'jobs with one run_at are claimed in the order of their ids'
);
select is(
    pg_temp.numbers('tied', 2), '1003 1004', 'a position can lie between two jobs with one run_at'
);
select is(
    (pg_temp.cell('tied', 0, 1) & 4095) > 0, true,
    'a position between jobs with one run_at has the id of the last pick'
);
select is(
    pg_temp.numbers('tied', 2), '1005 1006',
    'a position between jobs with one run_at passes over none of them'
);

-- A list of lanes that was valid until a second ago
select count(*) from pgqueue.enqueue('stale', '"high"', priority => 2);
select pgqueue._note_lanes('stale', array[2], clock_timestamp());
select setval(
    pg_temp.place('stale', 9999, 0),
    pg_temp.cell('stale', 9999, 0) - 4 * 300000
);
select pgqueue.enqueue('stale', '"low"', priority => -1, group_key => 'a');
select is(
    pg_temp.numbers('stale', 5), 'high low',
    'a list of lanes that is no longer valid does not become so when a lane is added'
);

select pgqueue.enqueue('both', '"high"', priority => 50);
select pgqueue.enqueue('both', '"high"', priority => 50);
select pgqueue.enqueue('both', '"low"', group_key => 'a');
select is(
    pg_temp.numbers('both', 1) || ' ' || pg_temp.numbers('both', 5), 'high high low',
    'the list of lanes of a queue is no position of its round'
);

-- A job of a group that comes back to another priority, beside one that stands there
select pgqueue.enqueue('newcomer', '"first"', group_key => 'a');
select pgqueue.enqueue('newcomer', '"second"', group_key => 'b');
select pgqueue.enqueue('newcomer', '"third"', priority => -1);
select pgqueue.reprioritize(id, 0) from pgqueue.job where payload = '"first"';
select is(
    pg_temp.numbers('newcomer', 3), 'first second third',
    'a claim that meets a group for the first time at a priority picks no job twice'
);

-- Jobs that are older than any position can say
select pgqueue.enqueue_many('old', array_fill('{}'::jsonb, array[1000]), run_at => '1999-01-01');
select is(
    (select array_agg((select count(*) from pgqueue.claim('old', 'w', 150 + 0 * n))) from generate_series(1, 6) as n),
    array_fill(150::bigint, array[6]), 'jobs that were due before 2020 are claimed like others'
);

-- Two queues whose names have the same hash share the index entries of a lane and nothing else.
select is(hashtext('15601'), hashtext('180514'), 'the two names of this test have the same hash');
select pgqueue.enqueue('15601', '1', priority => 3);
select pgqueue.enqueue('180514', '2', run_at => clock_timestamp() + interval '1 hour');
select is(
    (select array_agg(c.queue) from pgqueue.claim('180514', 'w', 5) as c), null,
    'a claim takes no job of another queue with the same hash'
);
select is(
    (select pgqueue.rest(array['180514'], park => false) > interval '50 minutes'), true,
    'rest does not count the due jobs of another queue with the same hash'
);
select is(
    array[pgqueue.purge('180514'), (select count(*) from pgqueue.claim('15601', 'w', 5))],
    array[1, 1]::bigint[], 'purge drops no job of another queue with the same hash'
);

-- Jobs that may not begin any more
create function pg_temp.ends(queue text) returns text
    language sql
as $$
    select string_agg(concat_ws(' ', r.attempt, r.outcome, r.result #>> '{}'), ', ' order by r.finished_at, r.attempt)
    from pgqueue.run as r where r.queue = $1
$$;
set local timezone = 'Asia/Kolkata';
set local datestyle = 'German';
select pgqueue.enqueue('late', '"late"', expires_at => '2020-01-02 03:04:05 UTC');
select pgqueue.enqueue('late', '"in time"', expires_at => now() + interval '1 hour');
select is(pg_temp.numbers('late', 2), 'in time', 'a claim does not begin a job after its expires_at');
reset timezone;
reset datestyle;
select is(
    pg_temp.ends('late'), '0 cancelled expired at 2020-01-02 03:04:05 UTC',
    'a job that nobody began in time is cancelled by the claim that meets it, which says why'
);
update pgqueue.job set terms.expires_at = now() where queue = 'late';
select is(
    (select status from pgqueue.extend(
        array(select id from pgqueue.job where queue = 'late'), array(select token from pgqueue.job where queue = 'late')
    )), 'held', 'an attempt goes on after the expires_at of its job'
);
select is(
    (select pgqueue.fail(id, token, 'e', '0') from pgqueue.job where queue = 'late'), 'retry', 'and may fail'
);
select is(pg_temp.numbers('late', 2), null, 'but no other one begins');
select is(
    pg_temp.ends('late') ~ '^0 cancelled [^,]*, 1 retry, 1 cancelled expired at [0-9: -]* UTC$', true,
    'what waited for its retry is cancelled'
);

select pgqueue.enqueue('died late', expires_at => clock_timestamp() + interval '1 minute');
select count(*) from pgqueue.claim('died late', 'w');
update pgqueue.job set lease_expires_at = now(), terms.expires_at = now() where queue = 'died late';
select is(
    array[pg_temp.numbers('died late', 1), pg_temp.numbers('died late', 1)], array[null, null]::text[],
    'a job whose lease expires after its expires_at does not begin again'
);
select is(
    pg_temp.ends('died late') ~ '^1 expired, 1 cancelled expired at', true,
    'the lost attempt is in run, and then why there is no other one'
);

select count(*) from pgqueue.enqueue_many('many late', array_fill('"late"'::jsonb, array[2500]), expires_at => now());
select pgqueue.enqueue('many late', '"ready"');
select is(pg_temp.numbers('many late', 1), 'ready', 'a claim finds the ready job behind 2,500 late ones');
select is(
    (select count(*) from pgqueue.run where queue = 'many late'), 1000::bigint, 'and cancels a thousand of them'
);
select is(
    array[pgqueue.rest(array['many late'], park => false)::text, pg_temp.numbers('many late', 9), pg_temp.numbers('many late', 9)],
    array['00:00:00', null, null], 'while there are late ones rest lets claims go on'
);
select is(
    (select count(*) from pgqueue.job where queue = 'many late' and token is null), 0::bigint,
    'until they have cancelled all'
);
select ok(
    pgqueue.rest(array['many late'], park => false) > interval '20 seconds', 'then it lets them sleep'
);

select * from finish();
rollback;
