-- How many jobs of a queue or kind run at once, and how many of a queue, kind or group begin in a
-- period. What two sessions do at once is in test_caps.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select no_plan();

\ir limits.psql

create function pg_temp.fill(queue text, kind text, jobs int, group_key text default null) returns void
    language sql
as $$
    select count(pgqueue.enqueue($1, kind => $2, group_key => $4)) from generate_series(1, $3)
$$;
-- How many jobs of each kind a claim gets, as "a2 b8".
create function pg_temp.claimed(queue text, jobs int, kinds text[] default null) returns text
    language sql
as $$
    select pg_temp.commit();
    select coalesce(string_agg(k.kind || k.jobs, ' ' order by k.kind), '')
    from (
        select c.kind || coalesce(c.group_key, '') as kind, count(*) as jobs
        from pgqueue.claim($1, 'w', $2, kinds => $3) as c group by 1
    ) as k
$$;
create function pg_temp.complete(queue text, jobs int default 1, kind text default null) returns void
    language sql
as $$
    select pgqueue.complete(j.id, j.token)
    from pgqueue.job as j
    where j.queue = $1 and j.token is not null and j.kind = coalesce($3, j.kind)
    order by j.id
    limit $2
$$;

-- max_running of a queue
select pg_temp.fill('q', 'a', 20);
select pgqueue.configure('q', max_running => 3);
select is(pg_temp.claimed('q', 2), 'a2', 'a claim below the cap of its queue gets what it wants');
select is(pg_temp.claimed('q', 10), 'a1', 'a claim gets no more than the cap of its queue leaves');
select is(pg_temp.claimed('q', 10), '', 'a claim from a queue at its cap gets nothing');
select ok(
    pg_temp.rests_until('q', pg_temp.first_lease('q')), 'rest waits until the first lease of a queue at its cap ends'
);
select pg_temp.complete('q');
select is(pgqueue.rest(array['q'], park => false), interval '0', 'rest knows when a queue is below its cap again');
select is(pg_temp.claimed('q', 10), 'a1', 'what has completed makes room');
select pgqueue.fail(id, token, 'e', '1 hour') from pgqueue.job where queue = 'q' and token is not null;
select is(pg_temp.claimed('q', 10), 'a3', 'what failed makes room');
select pgqueue.release(array[id], array[token]) from pgqueue.job where queue = 'q' and token is not null;
select is(pg_temp.claimed('q', 10), 'a3', 'what was released makes room');
select pgqueue.extend(array[id], array[token], '1 hour') from pgqueue.job where queue = 'q' and token is not null;
select is(pg_temp.claimed('q', 10), '', 'what was extended does not');
update pgqueue.job set lease_expires_at = now() - interval '1 s' where queue = 'q' and token is not null;
select is(pg_temp.claimed('q', 10), 'a3', 'a claim from a queue at its cap ends expired leases');
delete from pgqueue.job where queue = 'q' and token is not null;
select is(pg_temp.claimed('q', 10), 'a3', 'a job that was deleted by hand holds no permit');
select pgqueue.configure('q', max_running => 1);
select pg_temp.complete('q', 2);
select is(pg_temp.claimed('q', 10), '', 'a cap that was lowered holds for what ran before');
select pg_temp.complete('q');
select is(pg_temp.claimed('q', 10), 'a1', 'and for what runs after');
select pgqueue.configure('q', max_running => 4);
select is(pg_temp.claimed('q', 10), 'a3', 'a cap that was raised counts what runs');
select pgqueue.configure('q', max_running => 2);
select pg_temp.complete('q', 2);
select pgqueue.configure('q', max_running => 3);
select is(pg_temp.claimed('q', 10), 'a1', 'and one that was lowered before');
select pgqueue.configure('q', reset => true);
select is(pg_temp.claimed('q', 2), 'a2', 'without a cap a claim gets what it wants');
select pgqueue.configure('q', max_running => 6);
select is(pg_temp.claimed('q', 10), 'a1', 'a cap counts what ran before it was set');

-- with ageing
select pgqueue.configure('old', max_running => 1, age_after => '1 minute');
select pgqueue.enqueue('old', kind => 'low', run_at => now() - interval '10 minutes');
select pgqueue.enqueue('old', kind => 'high', priority => 5);
select is(pg_temp.claimed('old', 5), 'low1', 'of the jobs that a cap leaves room for, the one that has aged most is taken');
select pgqueue.configure('old group', group_limit => 5, age_after => '1 minute');
select pgqueue.configure('old group', kind => 'k', max_running => 1);
select pgqueue.enqueue('old group', '"low"', 'k', group_key => 'g', priority => -1, run_at => now() - interval '10 minutes');
select pgqueue.enqueue('old group', '"high"', 'k', group_key => 'g');
select is(pg_temp.claimed('old group', 5), 'kg1', 'also of those of a group with a limit one is taken');
select is((select j.payload from pgqueue.job as j where j.queue = 'old group' and j.token is not null), '"high"', 'the first one');

-- of a kind
select pgqueue.configure('k', kind => 'a', max_running => 2);
select pg_temp.fill('k', 'a', 300);
select pg_temp.fill('k', 'b', 300);
select is(pg_temp.claimed('k', 10), 'a2 b8', 'a claim gets other kinds when one is at its cap');
select is(pg_temp.claimed('k', 10), 'b10', 'a kind at its cap is passed over');
select is(pg_temp.claimed('k', 10, '{a}'), '', 'a worker for that kind alone gets nothing');
select ok(pg_temp.rests_until('k', pg_temp.first_lease('k'), '{a}'), 'and rests until a lease ends');
select is(pgqueue.rest(array['k'], park => false), interval '0', 'others do not');
select pg_temp.complete('k', 1, 'a');
select is(pg_temp.claimed('k', 10), 'a1 b9', 'the kind comes first again when there is room');
select pgqueue.configure('k', max_running => 31);
select is(pg_temp.claimed('k', 10), 'b2', 'the caps of a queue and of its kinds hold beside each other');
select pgqueue.pause('k', kind => 'b');
select pg_temp.complete('k', 10);
select is(pg_temp.claimed('k', 10), 'a2', 'what is paused is passed over beside what is full');

-- A claim that has walked far leaves no position behind what it puts back.
select pgqueue.configure('far', kind => 'x', max_running => 1);
select pg_temp.fill('far', 'y', 300);
select is(pg_temp.claimed('far', 300), 'y300', 'three hundred jobs run');
select pg_temp.fill('far', 'x', 3);
select pg_temp.fill('far', 'y', 300);
select is(pg_temp.claimed('far', 5), 'x1 y4', 'of three jobs of a kind one is taken, and two are put back');
select pg_temp.complete('far', 1, 'x');
select is(pg_temp.claimed('far', 1), 'x1', 'the next claim finds those at once');

-- of all
select pgqueue.configure(null, max_running => 2);
select pgqueue.configure(null, kind => 'rare', max_running => 1);
select pg_temp.fill('some', 'rare', 5);
select is(pg_temp.claimed('some', 10), 'rare1', 'a cap of a kind in all queues holds in each');
select pg_temp.fill('some', 'often', 5);
select is(pg_temp.claimed('some', 10), 'often1', 'and so does one of all queues');
select pgqueue.configure('some', max_running => 4);
select is(pg_temp.claimed('some', 10), 'often2', 'a cap of a queue comes before that of all queues');
select pgqueue.configure(null, reset => true);
select pgqueue.configure(null, kind => 'rare', reset => true);
select pgqueue.configure('some', reset => true);
select is(pg_temp.claimed('some', 10), 'often2 rare4', 'without caps all are there');

-- rate_limit of a queue
select pgqueue.configure('r', rate_limit => 5, rate_period => '1 minute');
select pg_temp.fill('r', 'a', 20);
select is(pg_temp.claimed('r', 3), 'a3', 'a claim below the rate of its queue gets what it wants');
select pg_temp.pass('r', '30 s');
select is(pg_temp.claimed('r', 10), 'a2', 'no more jobs of a queue begin in a period than its rate says');
select pg_temp.complete('r', 5);
select is(pg_temp.claimed('r', 10), '', 'also when they have completed');
select ok(
    pg_temp.rests_until('r', (select min(p.free_at) from pgqueue.permit as p where p.queue = 'r')),
    'rest waits until the next may begin'
);
select pg_temp.pass('r', '31 s');
select is(pg_temp.claimed('r', 10), 'a3', 'as many begin as began a period ago');
select pgqueue.release(array[id], array[token]) from pgqueue.job where queue = 'r' and token is not null;
select is(pg_temp.claimed('r', 10), '', 'a released job still counts as begun');
select pgqueue.configure('r', rate_limit => 6);
select is(pg_temp.claimed('r', 10), 'a1', 'a higher rate counts what began before');
select pgqueue.configure('r', rate_limit => 2);
select pg_temp.pass('r', '30 s');
select is(pg_temp.claimed('r', 10), '', 'and so does a lower one');
select pg_temp.pass('r', '1 minute');
select is(pg_temp.claimed('r', 10), 'a2', 'until the period is over');
update pgqueue.permit set taken_at = now() + interval '1 year', free_at = now() + interval '1 year' where queue = 'r';
select is(pg_temp.claimed('r', 10), 'a2', 'a clock that was set back stops nothing');
select is(
    (
        select r.jobs
        from pgqueue._room(
            'r', array[('', '', true, 2, '1 s')::pgqueue._cap], 2, clock_timestamp() - interval '10 s'
        ) as r
    ), 0,
    'a claim that was held up for longer than the period sees what others took meanwhile'
);

-- of a kind
select pgqueue.configure('rk', kind => 'a', rate_limit => 2, rate_period => '1 minute');
select pg_temp.fill('rk', 'a', 300);
select pg_temp.fill('rk', 'b', 300);
select is(pg_temp.claimed('rk', 10), 'a2 b8', 'other kinds begin when the rate of one is used up');
select pg_temp.complete('rk', 10);
select is(pg_temp.claimed('rk', 10), 'b10', 'and it is passed over');
select pg_temp.pass('rk', '1 minute');
select is(pg_temp.claimed('rk', 10), 'a2 b8', 'until the period is over');

-- of a group whose jobs began while the clock was ahead
select pgqueue.configure('ahead', group_key => '*', rate_limit => 2, rate_period => '1 second');
select pg_temp.fill('ahead', 'k', 9, 'a');
select is(pg_temp.claimed('ahead', 10), 'ka2', 'as many begin as its rate allows');
select pg_temp.claimed('ahead', 10);
select pg_temp.pass('ahead', '-1 year');
select is(pg_temp.claimed('ahead', 10), 'ka2', 'and as many when the clock is right again');

-- of each group, and of one
select pgqueue.configure('g', group_key => '*', rate_limit => 2, rate_period => '1 minute');
select pgqueue.configure('g', group_key => 'big', rate_limit => 3);
select pg_temp.fill('g', 'k', 150, 'a');
select pg_temp.fill('g', 'k', 5, 'b');
select pg_temp.fill('g', 'k', 150, 'big');
select pg_temp.fill('g', 'k', 2);
select is(
    pg_temp.claimed('g', 20), 'k2 ka2 kb2 kbig3',
    'a rate for each group holds for each, and one for a group comes before it'
);
select is(pg_temp.claimed('g', 20), '', 'groups whose rates are used up are passed over');
select is(pg_temp.claimed('g', 20) || pg_temp.claimed('g', 20), '', 'however many jobs they have');
select ok(pg_temp.rests_until('g', pg_temp.first_lease('g')), 'rest waits until a lease ends, or the next may begin');
select pg_temp.fill('g', 'k', 1, 'c');
select is(pg_temp.claimed('g', 20), 'kc1', 'and hold up no other group');
select pg_temp.pass('g', '61 s');
select is(pg_temp.claimed('g', 20), 'ka2 kb2 kbig3', 'as many begin as began a period ago');
select pgqueue.configure('g', group_key => '*', rate_limit => 4);
-- The first makes what permits there lack.
select pg_temp.claimed('g', 20), pg_temp.claimed('g', 20);
select is(
    (
        select string_agg(g.group_key || g.jobs, ' ' order by g.group_key)
        from (
            select j.group_key, count(*) as jobs from pgqueue.job as j
            where j.queue = 'g' and j.lease_expires_at is not null and j.group_key is not null group by 1
        ) as g
    ), 'a6 b5 big6 c1',
    'a higher rate of each group holds at once'
);
select pgqueue.configure('g', group_key => '*', reset => true);
select pgqueue.configure('g', group_key => 'big', reset => true);
select is(pg_temp.claimed('g', 1000), 'ka144 kbig144', 'without rates all are there');

-- Delayed jobs that are gone leave their place to others.
select pgqueue.configure('gap', group_key => 'a', rate_limit => 1, rate_period => '1 minute');
select pg_temp.fill('gap', 'k', 50, 'a');
select is(pg_temp.claimed('gap', 5), 'ka1', 'one of fifty jobs of a group begins');
select pgqueue.cancel(id) from pgqueue.job where queue = 'gap' and token is null order by id limit 48;
select pg_temp.pass('gap', '61 s');
select is(pg_temp.claimed('gap', 5), 'ka1', 'the last one begins after a period when all between were cancelled');

-- Beside a limit of the group
select pgqueue.configure('both', group_limit => 1);
select pgqueue.configure('both', group_key => '*', rate_limit => 2, rate_period => '1 minute');
select pg_temp.fill('both', 'k', 5, 'a');
select is(pg_temp.claimed('both', 5), 'ka1', 'a group of one runs one job');
select pg_temp.complete('both');
select is(pg_temp.claimed('both', 5), 'ka1', 'and then the next');
select pg_temp.complete('both');
select is(pg_temp.claimed('both', 5), '', 'as many as its rate allows');
select is(
    (
        select count(*)
        from pgqueue._permits('both', ('', 'a', false, 1, '1 second')::pgqueue._cap, clock_timestamp()) as p
        where p.is_held
    ), 0::bigint,
    'a job that its rate refuses holds no permit to run'
);
select pg_temp.pass('both', '61 s');
select is(pg_temp.claimed('both', 5), 'ka1', 'one after the other, also after a period');
select pgqueue.configure('cap and limit', group_limit => 1, max_running => 1);
select pg_temp.fill('cap and limit', 'k', 2, 'a');
select pg_temp.fill('cap and limit', 'k', 2, 'b');
select is(length(pg_temp.claimed('cap and limit', 5)), 3, 'the cap of a queue holds for its groups together');
select pg_temp.complete('cap and limit');
select is(length(pg_temp.claimed('cap and limit', 5)), 3, 'and leaves none of them behind');

-- When the clocks go forward: in twelve hours
select set_config('timezone', format(
    'AAA0BBB-1,%s/%s,%s', to_char(t.at, 'DDD')::int - 1, to_char(t.at, 'HH24'), (to_char(t.at, 'DDD')::int + 30) % 365
), true)
from (select now() at time zone 'UTC' + interval '12 hours') as t (at);
select is(now() + interval '1 day', now() + interval '23 hours', 'a day has 23 hours');
select pgqueue.configure('day', rate_limit => 1, rate_period => '1 day');
select pg_temp.fill('day', 'k', 2);
select is(pg_temp.claimed('day', 2), 'k1', 'a job begins');
select is(
    (select p.free_at - p.taken_at from pgqueue.permit as p where p.queue = 'day'), interval '24 hours',
    'and the next one after 24 hours'
);
reset timezone;

-- What is dropped
update pgqueue.permit set taken_at = taken_at - interval '2 days' where queue in ('both', 'g');
delete from pgqueue.job where queue = 'both';
select is(
    (select m.done from pgqueue.maintain() as m where m.task = 'drop permits'), 3::bigint,
    'maintain drops the permits of groups that have no job'
);
select pgqueue.configure(null, max_running => 4);
select pgqueue.configure('own', kind => 'k', max_running => 2);
select pg_temp.fill(queue, 'k', 2) from unnest('{own,idle,fresh}'::text[]) as queue;
select pg_temp.claimed(queue, 5), pg_temp.complete(queue, 9) from unnest('{own,idle,fresh}'::text[]) as queue;
update pgqueue.permit set taken_at = taken_at - interval '2 days' where queue in ('own', 'idle');
select pgqueue.maintain();
select results_eq(
    $$ select queue, kind, count(*) from pgqueue.permit where queue in ('own', 'idle', 'fresh') group by 1, 2 order by 1, 2 $$,
    $$ values ('fresh', '', 4::bigint), ('own', 'k', 2) $$,
    'and of queues that have had no job for a day, but not those of their own caps'
);
select pg_temp.fill('idle', 'k', 5);
select is(pg_temp.claimed('idle', 5), 'k4', 'the next enqueue creates them again');
select pgqueue.configure(null, reset => true);
select pgqueue.configure('gaps', max_running => 4);
delete from pgqueue.permit where queue = 'gaps' and place < 4;
select pg_temp.fill('gaps', 'k', 5);
select is(
    array[pg_temp.claimed('gaps', 5), pg_temp.claimed('gaps', 5), pg_temp.claimed('gaps', 5), pg_temp.claimed('gaps', 5)],
    array['k1', '', 'k3', ''], 'what was dropped while others were created is created again'
);

-- why
select pg_temp.fill('doubt', 'a', 3);
select pgqueue.configure('doubt', max_running => 2);
select is(pg_temp.claimed('doubt', 3), 'a2', 'two jobs run');
-- As if the claim of one of them had not committed yet when the cap was set.
update pgqueue.job set permits = null where id = (select min(id) from pgqueue.job where queue = 'doubt');
update pgqueue.permit set token = -1 where job_id = (select min(id) from pgqueue.job where queue = 'doubt');
select is(pg_temp.claimed('doubt', 3), '', 'both count');
select is(
    (select pgqueue.why(max(id)) from pgqueue.job where queue = 'doubt'), 'its queue runs as many jobs as it may, 2',
    'why counts them as well'
);
select is(
    pgqueue.rest(array['doubt'], park => false), interval '100 ms',
    'and rest does not rely on the end of the one that has no permit'
);
select pg_temp.fill('why', 'a', 2);
select pgqueue.configure('why', max_running => 1);
select is(pg_temp.claimed('why', 1), 'a1', 'one of two jobs runs');
select id as waits from pgqueue.job where queue = 'why' and token is null \gset
select is(
    pgqueue.why(:waits), 'its queue runs as many jobs as it may, 1', 'why says that a queue is at its cap'
);
select pgqueue.configure('why', kind => 'a', max_running => 1);
select is(
    pgqueue.why(:waits), 'its kind a runs as many jobs as it may, 1', 'why says that a kind is at its cap'
);
update pgqueue.job set lease_expires_at = clock_timestamp() where queue = 'why' and token is not null;
select matches(
    pgqueue.why(:waits), '^its kind a runs as many jobs as it may, 1, but a lease expired at .*: a claim or maintain.. ends it$',
    'and if one of these was lost'
);
select pgqueue.configure('why', kind => 'a', rate_limit => 1, rate_period => '1 minute', reset => true);
select pgqueue.configure('why', reset => true);
select is(pg_temp.claimed('why', 1), 'a1', 'the other runs');
select pgqueue.release(array[id], array[token]) from pgqueue.job where id = :waits;
select matches(
    pgqueue.why(:waits), '^rate limited until 2.*: its kind a begins at most 1 job in 00:01:00$',
    'why says that the rate of a kind is used up, and until when'
);
select pgqueue.enqueue('gap', group_key => 'a') as id \gset
select is((select state from pgqueue.jobs where id = :id), 'ready', 'a job of a group is ready');
select is(pg_temp.claimed('gap', 5), '', 'until a claim finds that the rate of the group is used up');
select is(
    (select array_agg(state) from pgqueue.jobs where queue = 'gap' and worker is null), '{blocked}', 'then it is blocked'
);
select matches(
    (select pgqueue.why(id) from pgqueue.job where queue = 'gap' and worker is null),
    '^rate limited until 2.*: its group a begins at most 1 job in 00:01:00$',
    'why says that the rate of a group is used up, and until when'
);

select pgqueue.configure('lower', max_running => 3);
select pg_temp.fill('lower', 'a', 4);
select pg_temp.claimed('lower', 3);
select pgqueue.configure('lower', max_running => 2);
-- The permit beyond the lowered cap is still there, and its job is not.
select pgqueue.complete(j.id, j.token)
from pgqueue.job as j
where j.id in (select p.job_id from pgqueue.permit as p where p.queue = 'lower' and p.place <> 1);
select is(
    (select pgqueue.why(id) from pgqueue.job where queue = 'lower' and token is null), 'ready: next in its queue',
    'why does not say that a queue is at its cap that was lowered, and has room again'
);
select is(pg_temp.claimed('lower', 1), 'a1', 'which a claim takes');

-- A retry that keeps its place in its group, and whose kind is at its cap
select pgqueue.configure('kept', group_limit => 1, group_on_retry => 'block');
select pgqueue.configure('kept', kind => 'a', max_running => 1);
select pg_temp.fill('kept', 'a', 1, 'x');
select is(pg_temp.claimed('kept', 9), 'ax1', 'a job of a strict group runs');
select pgqueue.fail(id, token, 'e', '0') from pgqueue.job where queue = 'kept';
select pg_temp.fill('kept', 'a', 1, 'y');
update pgqueue.job set run_at = now() - interval '1 hour' where queue = 'kept';
update pgqueue.ticket set at = now() - interval '1 hour' where queue = 'kept' and group_key = 'y';
select is(pg_temp.claimed('kept', 1), 'ay1', 'while it waits for its retry, another has the place of their kind');
select pg_temp.claimed('kept', 9) from generate_series(1, 5);
select pg_temp.complete('kept');
select is(pg_temp.claimed('kept', 9), 'ax1', 'whoever has looked in vain, it runs as soon as its kind is free');

-- Jobs that may not begin any more
select pgqueue.configure('late', max_running => 2);
select pgqueue.configure('late', group_key => '*', rate_limit => 1, rate_period => '1 hour');
select pg_temp.fill('late', 'a', 2, 'x'), pg_temp.fill('late', 'b', 1, 'x'), pg_temp.fill('late', 'c', 1, 'y');
update pgqueue.job set terms.expires_at = now() where queue = 'late' and kind = 'a';
select is(pg_temp.claimed('late', 9), 'bx1 cy1', 'a late job takes no permit');
select is(
    (select count(*) from pgqueue.run where queue = 'late' and outcome = 'cancelled'), 2::bigint,
    'a claim under caps cancels it'
);

select * from finish();
rollback;
