-- Priorities that rise with the wait. What a claim costs with them is in test_plans.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select no_plan();

\ir limits.psql

create function pg_temp.add(
    queue text, name text, priority int, waits interval, kind text default 'k', group_key text default null
)
    returns bigint
    language sql
as $$
    select pgqueue.enqueue($1, to_jsonb($2), $5, $3, clock_timestamp() - $4, group_key => $6)
$$;
-- The names of the jobs that so many claims of so many jobs return.
create function pg_temp.names(queue text, jobs int, claims int default 1, kinds text[] default null) returns text
    language sql
as $$
    select pg_temp.commit();
    select string_agg(c.payload #>> '{}', ' ')
    from generate_series(1, $3) as n
    cross join lateral pgqueue.claim($1, 'w', jobs + 0 * n, kinds => $4) as c
$$;
create function pg_temp.add_some(queue text) returns bigint
    language sql
as $$
    select count(*)
    from (values
        ('low', -5, interval '10 minutes 10 seconds'), ('younger', 0, '1 minute 10 seconds'),
        ('older', -1, '2 minutes 20 seconds'), ('high', 2, '10 seconds'), ('lowest', -5, '10 seconds')
    ) as j (name, priority, waits)
    cross join lateral pg_temp.add($1, j.name, j.priority, j.waits)
$$;

-- Order
select pg_temp.add_some('plain');
select is(
    pg_temp.names('plain', 10), 'high younger older low lowest',
    'without age_after a claim serves by priority alone'
);
select pgqueue.configure('aged', age_after => '1 minute');
select pg_temp.add_some('aged');
select is(
    pg_temp.names('aged', 1, 5), 'low high older younger lowest',
    'with it a job counts as one priority higher for each such time, and of equal ones the longest waiting comes first'
);
select pg_temp.add_some('aged');
select is(
    pg_temp.names('aged', 10), 'low high older younger lowest',
    'a claim that takes all returns them in this order'
);
select pg_temp.add_some('aged');
select is(pg_temp.names('aged', 2, 2), 'low high older younger', 'claims of some take the first of it');
select pgqueue.configure(null, age_after => '1 minute');
select pg_temp.add_some('of all');
select is(
    pg_temp.names('of all', 1, 5), 'low high older younger lowest', 'age_after can be set for all queues'
);
select pgqueue.configure(null, reset => true);

-- Nobody starves.
create function pg_temp.starve(queue text) returns text
    language sql
as $$
    select pg_temp.add($1, 'low', -3, interval '4 minutes 30 seconds');
    select string_agg(c.names, ' ')
    from generate_series(1, 4) as n
    cross join lateral pg_temp.add($1, 'high', 0 * n, interval '30 seconds') as added
    cross join lateral pg_temp.names($1, 1 + 0 * added::int) as c (names);
$$;
select is(pg_temp.starve('starving'), 'high high high high', 'without age_after a job of low priority starves');
select pgqueue.configure('fed', age_after => '1 minute');
select is(pg_temp.starve('fed'), 'low high high high', 'with it its turn comes');

-- Which jobs count
select pgqueue.configure('some', age_after => '1 minute');
select pgqueue.enqueue('some', '"later"', priority => 50, run_at => clock_timestamp() + interval '1 hour');
select pg_temp.add('some', 'low', -5, '1 second');
select pg_temp.add('some', 'high', 5, '1 second');
select is(pg_temp.names('some', 1, 3), 'high low', 'no job runs before its time');

select pg_temp.add('some', 'old', -5, '1 hour', 'k');
select pg_temp.add('some', 'new', -5, '1 second', 'k');
select pg_temp.add('some', 'held', -5, '2 hours', 'held');
select pg_temp.add('some', 'high', 5, '1 second', 'k');
select is(pg_temp.names('some', 1, 2, '{k}'), 'old high', 'jobs of other kinds than those asked for do not count');
select pgqueue.pause('some', kind => 'held');
select pg_temp.add('some', 'high', 5, '1 second', 'k');
select is(pg_temp.names('some', 1, 3), 'high new', 'nor do paused ones');
select pgqueue.resume('some', kind => 'held');
select pg_temp.add('some', 'high', 5, '1 second', 'k');
select is(pg_temp.names('some', 1, 2), 'held high', 'a kind that is resumed has aged meanwhile');
select pg_temp.add('some', 'new', -5, '1 second', 'k');
select pg_temp.add('some', 'high', 5, '1 second', 'k');
select is(pg_temp.names('some', 1, 2), 'high new', 'what runs in a lane does not count');

select pgqueue.configure('expired', age_after => '1 minute');
select pg_temp.add('expired', 'high', 5, '30 seconds');
select pg_temp.names('expired', 1);
select pg_temp.add('expired', 'low ' || n, -5, '1 minute 30 seconds') from generate_series(1, 10) as n;
select is(pg_temp.names('expired', 1), 'low 1', 'a job that runs is not claimed');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'expired' and priority = 5;
select is(pg_temp.names('expired', 1, 2), 'high low 2', 'one whose lease has expired counts, and is recovered');

-- Groups
select pgqueue.configure('groups', age_after => '1 minute');
select pg_temp.add('groups', 'a' || n, -2, '5 minutes 30 seconds', group_key => 'a') from generate_series(1, 3) as n;
select pg_temp.add('groups', 'b', -2, '10 seconds', group_key => 'b');
select pg_temp.add('groups', 'c', 2, '30 seconds', group_key => 'c');
select pg_temp.add('groups', 'none', 2, '20 seconds');
select is(
    pg_temp.names('groups', 1, 6), 'a1 c none b a2 a3',
    'the jobs of groups age, and each counts as waiting since the last of those before it in the round'
);
select pg_temp.add('groups', 'a' || n, -2, '5 minutes 30 seconds', group_key => 'a') from generate_series(1, 5) as n;
select pg_temp.add('groups', 'c', 2, '30 seconds', group_key => 'c');
select pg_temp.add('groups', 'none', 2, '30 seconds');
select is(pg_temp.names('groups', 3), 'a1 a2 a3', 'a claim of some takes those of a round that have aged');
select is(pg_temp.names('groups', 10), 'a4 a5 c none', 'a claim of more takes all');

select pgqueue.configure('limited', age_after => '1 minute', group_limit => 1);
select pg_temp.add('limited', 'a' || n, -2, '5 minutes 30 seconds', group_key => 'a') from generate_series(1, 50) as n;
select pg_temp.add('limited', 'none', 2, '20 seconds') from generate_series(1, 5) as n;
select is(pg_temp.names('limited', 4), 'a1 none none none', 'what aged in a group that is full leaves its share to others');
select is(pg_temp.names('limited', 4), 'none none', 'and does not run');

select pgqueue.configure('newcomers', age_after => '1 minute');
select pg_temp.add('newcomers', 'low ' || n, -2, '-1 minute', group_key => 'g' || n) from generate_series(1, 3) as n;
update pgqueue.job set run_at = run_at - interval '7 minutes' where queue = 'newcomers';
update pgqueue.ticket set at = at - interval '7 minutes' where queue = 'newcomers';
select pg_temp.add('newcomers', 'high', 2, '10 seconds') from generate_series(1, 5) as n;
select is(
    pg_temp.names('newcomers', 3, 2), 'low 1 low 2 low 3 high high high', 'jobs of groups that were for later age as well'
);

-- Against the definition: jobs by chance, claims of several sizes
select pgqueue.configure('any', age_after => '1 hour');
select setseed(0.5);
insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)
select
    now() - trunc(random() * 8) * interval '1 hour' - (5 + random() * 50) * interval '1 minute',
    now(), trunc(random() * 5) - 2, 20, 'any', 'k' || n % 2, to_jsonb(n)
from generate_series(1, 3000) as n;
select pgqueue._use_lanes('any');
create function pg_temp.expected(jobs int, kinds text[]) returns bigint[]
    language sql
as $$
    select array_agg(e.id)
    from (
        select j.id
        from pgqueue.job as j
        where j.queue = 'any' and j.lease_expires_at is null and (kinds is null or j.kind = any (kinds))
        order by j.priority + floor(extract(epoch from clock_timestamp() - j.run_at) / 3600) desc, j.run_at
        limit jobs
    ) as e
$$;
create function pg_temp.differ() returns text
    language plpgsql
as $$
declare
    jobs int;
    expected bigint[];
    found bigint[];
begin
    for n in 1 .. 200 loop
        jobs := (array[1, 1, 1, 7, 50])[1 + n % 5];
        expected := pg_temp.expected(jobs, case n % 3 when 0 then '{k1}'::text[] end);
        found := array(
            select c.id from pgqueue.claim('any', 'w', jobs, kinds => case n % 3 when 0 then '{k1}'::text[] end) as c
        );
        if found <> expected then
            return format('claim %s: %s, not %s', n, found, expected);
        end if;
    end loop;
    return (select count(*) from pgqueue.job where queue = 'any' and lease_expires_at is not null);
end;
$$;
select is(pg_temp.differ(), '2400', 'claims of any size take what the definition says, in its order');

-- Positions: running jobs in front, at one run_at, and jobs behind
select pgqueue.configure('deep', age_after => '1 minute');
insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)
select now() - interval '5 minutes 30 seconds', now(), p, 20, 'deep', 'k', to_jsonb(n)
from generate_series(1, 3000) as n
cross join (values (0), (-4)) as l (p);
select count(*) from pgqueue.claim('deep', 'w', 3000);
select count(*) from pgqueue.claim('deep', 'w', 2000);
select is(pg_temp.names('deep', 2, 2), '2001 2002 2003 2004', 'a claim finds the first behind 2,000 running ones');
select is(
    (select array_agg(c.priority || ' ' || (c.payload #>> '{}')) from pgqueue.claim('deep', 'w', 2) as c),
    array['-4 2005', '-4 2006'], 'and goes on behind its position'
);
select pg_temp.add('deep', 'high', 2, '30 seconds') from generate_series(1, 3);
select is(pg_temp.names('deep', 1, 4), 'high high high 2007', 'a lane above is served first as long as it has more');
select id, token from pgqueue.job where queue = 'deep' and priority = -4 and payload = '7' \gset
-- As where a walk is cheap.
select setval(
    ('pgqueue._cell_' || r.record)::regclass, r.tag | pgqueue._since_2020(clock_timestamp() + interval '80 ms')
)
from pgqueue._record(hashtextextended('deep', -4)) as r;
select pgqueue.release(array[:id], array[:token]);
select is(pg_temp.names('deep', 1, 2), '7 2008', 'a job released behind the position is found');

-- What people are told
select pgqueue.configure('why', age_after => '1 minute');
select pg_temp.add_some('why');
select is(
    (select string_agg(j.payload #>> '{}' || ' ' || substr(pgqueue.why(j.id), 1, 28), ', ' order by j.id)
     from pgqueue.job as j where j.queue = 'why'),
    'low ready: next in its queue; no, younger ready: waits behind 3 jobs o, older ready: waits behind 2 jobs o, high ready: waits behind 1 job of, lowest ready: waits behind 4 jobs o',
    'why counts those that come before a job by age'
);

-- Jobs that may not begin any more
select pgqueue.configure('late', age_after => '1 minute');
select pg_temp.add('late', 'late', -5, '1 hour'), pg_temp.add('late', 'aged', -1, '5 minutes'),
    pg_temp.add('late', 'high', 3, '1 second');
update pgqueue.job set terms.expires_at = now() where payload = '"late"';
select is(pg_temp.names('late', 1, 3), 'aged high', 'a late job counts for no age');

select * from finish();
rollback;
