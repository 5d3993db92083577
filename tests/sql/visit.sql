-- What groups give: each runs at most as many jobs at once as it may. What two sessions do at once is in
-- test_races.py, what it costs in test_plans.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(82);

\ir limits.psql

-- The payloads of the claimed jobs, in the order of the claim.
create function pg_temp.claimed(queue text, jobs int) returns text
    language sql
as $$
    select pg_temp.commit();
    select coalesce(string_agg(c.payload #>> '{}', ' '), '') from pgqueue.claim($1, 'w', $2) as c
$$;
create function pg_temp.fail(queue text, payload text, retry_in interval) returns text
    language sql
as $$
    select pgqueue.fail(j.id, j.token, 'e', retry_in => $3) from pgqueue.job as j
    where j.queue = $1 and j.payload #>> '{}' = $2 and j.token is not null
$$;
create function pg_temp.fill(queue text, groups text[]) returns void
    language sql
as $$
    select count(*) from pgqueue.enqueue_many(
        $1, (select array_agg(to_jsonb(g || n) order by n) from unnest($2) with ordinality as l (g, n)),
        group_keys => $2
    )
$$;

-- With a limit

select pgqueue.configure('one', group_limit => 1);
select pg_temp.fill('one', array['a', 'a', 'a', 'b', 'b']);
select is(pg_temp.claimed('one', 10), 'a1 b4', 'with a limit of 1 a claim takes one job of each group');
select is(pg_temp.claimed('one', 10), '', 'a claim takes none of a group whose job runs');
select pg_temp.complete('one', 'a1');
select is(pg_temp.claimed('one', 10), 'a2', 'when it has completed the next one can be claimed');
select pgqueue.enqueue('one', '"a6"', group_key => 'a');
select is(pg_temp.claimed('one', 10), '', 'a job enqueued into a full group waits');
select pgqueue.enqueue('one', '"urgent"', group_key => 'a', priority => 5);
select is(pg_temp.claimed('one', 10), '', 'and so does one of a higher priority');
select pg_temp.complete('one', 'a2');
select is(pg_temp.claimed('one', 10), 'urgent', 'which comes first when the group is free');
select pgqueue.release(array[id], array[token]) from pgqueue.job where payload = '"urgent"';
select is(pg_temp.claimed('one', 10), 'urgent', 'a released job can be claimed again');
select pgqueue.cancel(id) from pgqueue.job where payload = '"urgent"';
select is(pg_temp.fail('one', 'urgent', null), 'cancelled', 'a running job of the group is cancelled');
select is(pg_temp.claimed('one', 10), 'a3', 'and the next can be claimed');
select pg_temp.expire('one');
select is(pg_temp.claimed('one', 10), 'a3 b4', 'jobs whose lease expired are claimed again, no others of their groups');
select pg_temp.complete('one', 'a3');
select is(pg_temp.claimed('one', 10), 'a6', 'in the order in which they were enqueued');
delete from pgqueue.job where payload = '"b4"';
select pg_temp.pass('one', '10 seconds');
select is(pg_temp.claimed('one', 10), 'b5', 'a job that was deleted by hand holds no place');

-- A list of priorities that was made while the job of a higher one was not there yet, or not committed
select pg_temp.fill('listed', array['a', 'b', 'b']);
select pgqueue.configure('listed', group_limit => 1);
select pgqueue.enqueue('listed', '"urgent"', group_key => 'a', priority => 5);
select pgqueue._note_lanes('listed', array[1000], clock_timestamp() - interval '1 second');
select is(pg_temp.claimed('listed', 1), 'b2', 'no job overtakes one of a higher priority that claims do not know of yet');
select pg_temp.complete('listed', 'b2');
select is(pg_temp.claimed('listed', 10), 'b3', 'nor in a larger claim');
select pgqueue._note_lanes('listed', array[1000, 1005], clock_timestamp());
select is(pg_temp.claimed('listed', 10), 'urgent', 'which is claimed as soon as they do');

select pgqueue.configure('two', group_limit => 2);
select pg_temp.fill('two', array['a', 'a', 'a', 'a', 'a', 'b']);
select is(pg_temp.claimed('two', 10), 'a1 a2 b6', 'with a limit of 2 a claim takes two of a group');
select pg_temp.complete('two', 'a1');
select is(pg_temp.claimed('two', 10), 'a3', 'and one more for one that has completed');
select pg_temp.complete('two', 'a2'), pg_temp.complete('two', 'a3');
select is(pg_temp.claimed('two', 1) || ' ' || pg_temp.claimed('two', 1), 'a4 a5', 'claims of one fill a group up to its limit');

-- Kinds and pauses
select pgqueue.configure('kinds', group_limit => 1);
select pgqueue.enqueue('kinds', to_jsonb(g || n), kind => k, group_key => g)
from (values ('a', 1, 'x'), ('a', 2, 'y'), ('b', 3, 'y')) as j (g, n, k);
select pg_temp.commit();
select is(
    (select string_agg(c.payload #>> '{}', ' ') from pgqueue.claim('kinds', 'w', 5, kinds => '{y}') as c), 'b3',
    'a job of another kind than those asked for holds up its group, where its limit is 1'
);
select is(pg_temp.claimed('kinds', 5), 'a1', 'and runs first');
select pg_temp.complete('kinds', 'a1');
select is(
    (select string_agg(c.payload #>> '{}', ' ') from pgqueue.claim('kinds', 'w', 5, kinds => '{y}') as c), 'a2',
    'then comes the next'
);
select pgqueue.configure('halt', group_limit => 1);
select pgqueue.enqueue('halt', to_jsonb(g || n), kind => k, group_key => g)
from (values ('a', 1, 'x'), ('a', 2, 'y'), ('b', 3, 'y'), ('c', 4, 'y')) as j (g, n, k);
select pgqueue.pause('halt', kind => 'x'), pgqueue.pause('halt', group_key => 'b');
select is(pg_temp.claimed('halt', 5), 'c4', 'a paused kind holds up the groups in which it comes first, and a paused group itself');
select pgqueue.resume('halt', group_key => 'b');
select is(pg_temp.claimed('halt', 5), 'b3', 'a group that is resumed is served at once');
select pgqueue.resume('halt', kind => 'x');
select is(pg_temp.claimed('halt', 5), 'a1', 'and so is one whose kind is resumed');
-- Retries
select pgqueue.configure('skip', group_limit => 1);
select pg_temp.fill('skip', array['a', 'a']);
select is(pg_temp.claimed('skip', 10), 'a1', 'the first job of a group is claimed');
select is(pg_temp.fail('skip', 'a1', '1 hour'), 'retry', 'and fails');
select is(pg_temp.claimed('skip', 10), 'a2', 'while it waits for its retry the next one runs');

select pgqueue.configure('block', group_limit => 1, group_on_retry => 'block');
select pg_temp.fill('block', array['a', 'a', 'b']);
select is(pg_temp.claimed('block', 10), 'a1 b3', 'the first job of each group is claimed');
select is(pg_temp.fail('block', 'a1', '1 hour'), 'retry', 'and one fails');
select is(pg_temp.claimed('block', 10), '', 'in strict order no other of its group runs before its retry');
select pgqueue.run_now(id) from pgqueue.job where queue = 'block' and payload = '"a1"';
select is(pg_temp.claimed('block', 10), 'a1', 'the retry runs');
select is(
    (select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.job
     where queue = 'block' and payload = '"a1"' and token is not null),
    'dead', 'and dies'
);
select is(pg_temp.claimed('block', 10), 'a2', 'a dead head does not jam its group');
select is(pg_temp.fail('block', 'a2', '1 hour'), 'retry', 'the next one fails');
select pgqueue.enqueue('block', '"a4"', group_key => 'a');
select is(pg_temp.claimed('block', 10), '', 'and blocks its group');
select pgqueue.cancel(id) from pgqueue.job where queue = 'block' and payload = '"a2"';
select is(pg_temp.claimed('block', 10), 'a4', 'until it is cancelled');
select pgqueue.configure('kept', group_limit => 1, group_on_retry => 'block');
select pg_temp.fill('kept', array['a', 'a']);
select is(pg_temp.claimed('kept', 10), 'a1', 'one of a group runs');
select is(pg_temp.fail('kept', 'a1', '5 seconds'), 'retry', 'and fails');
update pgqueue.ticket set served = -9 where queue = 'kept';
select is(pg_temp.claimed('kept', 10), '', 'and its group waits');
select results_eq(
    $$ select t.at from pgqueue.ticket as t where t.queue = 'kept' $$,
    $$ select j.run_at from pgqueue.job as j where j.queue = 'kept' and j.payload = '"a1"' $$,
    'no longer than until the retry is due, even if that has long been so'
);

-- Settings
select pgqueue.configure('own', group_limit => 1);
select pgqueue.configure('own', group_key => 'big', group_limit => 3);
select pg_temp.fill('own', array['a', 'a', 'big', 'big', 'big', 'big']);
select is(pg_temp.claimed('own', 10), 'a1 big3 big4 big5', 'a limit of one group overrules that of the queue');
select pgqueue.configure('own', group_key => 'big', group_limit => 4);
select is(pg_temp.claimed('own', 10), 'big6', 'a limit that is raised holds at once');

select pg_temp.fill('late', array['a', 'a', 'a', 'a']);
select is(pg_temp.claimed('late', 2), 'a1 a2', 'without a limit two of a group run');
select pgqueue.configure('late', group_limit => 1);
select is(pg_temp.claimed('late', 10), '', 'a limit counts the jobs that run already');
select pg_temp.complete('late', 'a1');
select is(pg_temp.claimed('late', 10), '', 'and all of them');
select pg_temp.complete('late', 'a2');
-- In one transaction with the limit, these ends make no ticket due: test_caps.py has them in others.
select pg_temp.pass('late', '1 second');
select is(pg_temp.claimed('late', 10), 'a3', 'until they have ended');

select pgqueue.configure('again', group_limit => 1);
select pg_temp.fill('again', array['a', 'a', 'a', 'a']);
select is(pg_temp.claimed('again', 10), 'a1', 'with a limit one of a group runs');
select pgqueue.configure('again', reset => true);
select is(pg_temp.claimed('again', 2), 'a2 a3', 'without it others run beside it');
select pgqueue.configure('again', group_limit => 1);
select pg_temp.complete('again', 'a1');
select is(pg_temp.claimed('again', 10), '', 'a limit that is set again counts those that ran without one');

select pgqueue.configure('order', group_limit => 1, group_on_retry => 'block');
select pg_temp.fill('order', array['a', 'a']);
select is(pg_temp.claimed('order', 5), 'a1', 'the first of two runs');
select is(pg_temp.fail('order', 'a1', '0'), 'retry', 'and fails, for a retry at once');
select is(pg_temp.claimed('order', 5), 'a1', 'which comes before what waits');
select pg_temp.complete('order', 'a1');
select is(pg_temp.claimed('order', 5), 'a2', 'and when it has completed the other runs');

select pgqueue.configure('lower', group_limit => 2, group_on_retry => 'block');
select pg_temp.fill('lower', array['a', 'a', 'a']);
select is(pg_temp.claimed('lower', 2), 'a1 a2', 'two of a group run');
-- Whichever of the two permits each has got.
update pgqueue.permit as p set place = case j.payload #>> '{}' when 'a1' then 1 else 2 end
from pgqueue.job as j where j.id = p.job_id and j.queue = 'lower';
select is(pg_temp.fail('lower', 'a2', '0'), 'retry', 'one fails, and keeps its permit');
select pgqueue.configure('lower', group_limit => 1);
select is(pg_temp.claimed('lower', 10), '', 'where the limit is lowered meanwhile, the other one counts');
select pg_temp.complete('lower', 'a1');
select is(pg_temp.claimed('lower', 10), 'a2', 'and when that has ended, the retry runs before all that wait');
select pg_temp.complete('lower', 'a2');
select is(pg_temp.claimed('lower', 10), 'a3', 'and then they');

select pgqueue.configure('behind', group_limit => 1);
select pg_temp.fill('behind', array['a'] || array_fill('a'::text, array[50]));
select is(pg_temp.claimed('behind', 1), 'a1', 'one of a long group runs');
select count(pgqueue.reprioritize(id, 0)) from pgqueue.job where queue = 'behind' and token is null;
select pgqueue.enqueue('behind', '"free"');
select is(
    pg_temp.claimed('behind', 1), 'free',
    'a claim finds what is behind many jobs of a full group'
);

select pgqueue.configure('back', group_limit => 3);
select pg_temp.fill('back', array['a', 'a', 'a', 'a', 'b', 'b', 'b', 'b']);
select pgqueue.configure('back', group_limit => 1);
select is(pg_temp.claimed('back', 10), 'a1 b5', 'with a lowered limit one of each group runs');
select pgqueue.configure('back', group_limit => 3);
select pgqueue.enqueue('back', '"free"');
select is(pg_temp.claimed('back', 10), 'a2 a3 b6 b7 free', 'a limit that is raised again holds at once');

select pgqueue.enqueue('revived', '"a"', group_key => 'a');
select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('revived', 'w');
select pgqueue.configure('revived', group_limit => 1);
select pgqueue.redrive('revived');
select pgqueue.enqueue('revived', '"free"');
select is(
    pg_temp.claimed('revived', 10), 'a free',
    'a job that was dead when its group got a limit is claimed with others when it is back'
);

select pgqueue.configure('left', group_limit => 1);
select pg_temp.fill('left', array_fill('a'::text, array[4]));
select is(pg_temp.claimed('left', 5), 'a1', 'one of a group runs');
select pgqueue.cancel(id) from pgqueue.job where queue = 'left' and payload = '"a2"';
select is(pg_temp.claimed('left', 5), '', 'one that is cancelled while it waits lets no other run');
select is(
    (select array_agg(state order by id) from pgqueue.jobs where queue = 'left'), '{running,blocked,blocked}',
    'and a claim that has looked says that the others are blocked'
);

-- Jobs that may not begin any more
create function pg_temp.make_late(queue text, payloads text) returns void
    language sql
as $$
    update pgqueue.job as j set terms.expires_at = now()
    where j.queue = $1 and j.payload #>> '{}' = any (string_to_array($2, ' '))
$$;
select pgqueue.configure('over', group_limit => 1);
select pg_temp.fill('over', array['a', 'a', 'a', 'b', 'b']);
select pg_temp.make_late('over', 'a1 b5');
select is(pg_temp.claimed('over', 5), 'a2 b4', 'a claim passes the late jobs of groups with a limit');
select pg_temp.make_late('over', 'a3');
select pg_temp.complete('over', 'a2'), pg_temp.complete('over', 'b4');
select is(pg_temp.claimed('over', 5), '', 'also those that wait for a place');
select pgqueue.reap();
select is(
    (select array[count(*) filter (where outcome = 'cancelled'), count(*)] from pgqueue.run where queue = 'over'),
    '{3,5}', 'all of them are cancelled'
);

select pgqueue.configure('over long', group_limit => 2);
select pg_temp.fill('over long', array_fill('a'::text, array[1500]));
select is(pg_temp.claimed('over long', 2), 'a1 a2', 'two of a long group run, the others wait');
select pg_temp.make_late('over long', (select string_agg('a' || n, ' ') from generate_series(3, 1498) as n));
select pg_temp.complete('over long', 'a1');
select is(pg_temp.claimed('over long', 2), 'a1499', 'a claim finds the one behind 1,496 late ones');
select is(
    (select count(*) from pgqueue.run where queue = 'over long' and outcome = 'cancelled'), 1000::bigint,
    'and cancels a thousand of them'
);
select pg_temp.complete('over long', 'a2');
select is(pg_temp.claimed('over long', 2), 'a1500', 'the next claim goes on');
select pgqueue.reap();
select is(
    (select count(*) from pgqueue.job where queue = 'over long'), 2::bigint, 'and reap ends the rest'
);

select pgqueue.configure('over retry', group_limit => 1, group_on_retry => 'block');
select pg_temp.fill('over retry', array['a', 'a']);
select is(pg_temp.claimed('over retry', 5), 'a1', 'a job with a strict group runs');
select pg_temp.fail('over retry', 'a1', '0');
select pg_temp.make_late('over retry', 'a1');
select is(pg_temp.claimed('over retry', 5), 'a2', 'a retry that comes too late does not hold up its group');

select pgqueue.configure('no longer', group_key => 'a', group_limit => 1, group_on_retry => 'block');
select pg_temp.fill('no longer', array['a', 'a']);
select is(pg_temp.claimed('no longer', 5), 'a1', 'a job of another strict group runs');
select pg_temp.fail('no longer', 'a1', '1 hour');
select pgqueue.configure('no longer', group_key => 'a', group_limit => 1, reset => true);
select is(pg_temp.claimed('no longer', 5), 'a2', 'a group that is strict no longer does not wait for the retry');

-- As where a setting that did not wait for retries left one that had kept its permit with another.
select pgqueue.configure('both', group_limit => 4, group_on_retry => 'block', max_running => 10);
select pg_temp.fill('both', array['a', 'a', 'b']);
select is(pg_temp.claimed('both', 1), 'a1', 'a job runs');
select is(pg_temp.fail('both', 'a1', '0'), 'retry', 'it fails, and keeps its permit');
update pgqueue.permit as p set free_at = 'infinity', job_id = j.id, token = 0, taken_at = now() - interval '1 minute'
from pgqueue.job as j
where j.queue = 'both' and j.payload = '"a1"' and p.queue = 'both' and p.group_key = 'a'
    and p.place = (select max(o.place) from pgqueue.permit as o where o.queue = 'both' and o.group_key = 'a' and o.job_id is null);
select is(pg_temp.claimed('both', 10), 'a2 b3 a1', 'a retry that has two permits is claimed once');
select is(
    (select array_agg(distinct cardinality(permits)) from pgqueue.job where queue = 'both' and token is not null), '{2}',
    'with one of its group, as the others'
);

select * from finish();
rollback;
