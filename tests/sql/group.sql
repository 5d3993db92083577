-- Whose jobs a claim takes: groups are served round-robin, whatever waits in each, and each runs at most
-- as many at once as it may. What two sessions do at once is in test_races.py, what it costs in test_plans.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(112);

-- What a commit would do: nobody takes a permit that his own transaction has made.
create function pg_temp.commit() returns void
    language sql
as $$ update pgqueue.permit set token = -1 where token < 0 $$;
-- Lets time pass for the tickets of a queue, and the next claim sweep.
create function pg_temp.pass(queue text, period interval) returns void
    language sql
as $$
    update pgqueue.ticket as t set at = at - $2 where t.queue = $1;
    select setval('pgqueue._cell_groups_due', 1);
$$;
-- The payloads of the claimed jobs, in the order of the claim.
create function pg_temp.claimed(queue text, jobs int) returns text
    language sql
as $$
    select pg_temp.commit();
    select coalesce(string_agg(c.payload #>> '{}', ' '), '') from pgqueue.claim($1, 'w', $2) as c
$$;
create function pg_temp.complete(queue text, payload text) returns void
    language sql
as $$
    select pgqueue.complete(j.id, j.token) from pgqueue.job as j
    where j.queue = $1 and j.payload #>> '{}' = $2 and j.token is not null
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
create function pg_temp.expire(queue text) returns void
    language sql
as $$
    update pgqueue.job as j set lease_expires_at = now() - interval '1 second'
    where j.queue = $1 and j.lease_expires_at is not null;
    select pg_temp.pass($1, '10 seconds');
$$;

-- One job for each letter, in the group of that name; a dot is a job without a group.
create function pg_temp.letters(queue text, groups text, priority int default null, run_at timestamptz default null)
    returns bigint
    language sql
as $$
    select count(*) from pgqueue.enqueue_many(
        $1, array_fill('{}'::jsonb, array[length($2)]), priority => $3, run_at => $4,
        group_keys => (select array_agg(nullif(g, '.') order by n)
                       from regexp_split_to_table($2, '') with ordinality as l (g, n))
    )
$$;
-- The groups of the claimed jobs, in alphabetical order.
create function pg_temp.given(queue text, jobs int) returns text
    language sql
as $$
    select pg_temp.commit();
    select coalesce(string_agg(coalesce(c.group_key, '.'), '' order by c.group_key nulls last), '')
    from pgqueue.claim($1, 'w', $2) as c
$$;
-- In turn

select pg_temp.letters('fair', repeat('a', 1000) || repeat('b', 3) || repeat('c', 2) || 'd');
select is(pg_temp.given('fair', 4), 'abcd', 'a claim takes one job of each group before a second of any');
select is(pg_temp.given('fair', 3), 'abc', 'the next claim takes the next of each group that has one');
select is(pg_temp.given('fair', 1) || pg_temp.given('fair', 1), 'ab', 'claims of one go round as well');
select is(pg_temp.given('fair', 100), repeat('a', 100), 'the last group that has jobs is given all that a claim wants');

select pg_temp.letters('pairs', repeat('a', 5) || repeat('b', 5) || repeat('c', 2));
select is(pg_temp.given('pairs', 6), 'aabbcc', 'a claim of more jobs than groups takes as many of each');
select is(pg_temp.given('pairs', 100), 'aaabbb', 'and a claim of more than there are takes them all');
select is(pg_temp.given('pairs', 1), '', 'a claim from a queue whose groups are served finds none');

select pg_temp.letters('idle', repeat('a', 1000));
select pg_temp.given('idle', 500);
select pg_temp.letters('idle', 'bb');
select is(pg_temp.given('idle', 5), 'aaabb', 'a group that comes later has a turn after every one of the others');
select pg_temp.letters('trickle', repeat('a', 100) || 'b');
select is(
    (select string_agg(pg_temp.given('trickle', 1) || left(pg_temp.letters('trickle', 'b')::text, 0), '') from generate_series(1, 10)),
    'ababababab', 'a group that adds a job whenever one is served has no more turns than the others'
);

-- Weights
select pgqueue.configure('weights', group_key => 'b', weight => 3);
select pg_temp.letters('weights', repeat('a', 20) || repeat('b', 20));
select is(pg_temp.given('weights', 8), 'aabbbbbb', 'a claim takes three jobs of a group of weight 3 for each one of the others');
select pg_temp.letters('weights of three', repeat('a', 20) || repeat('b', 20));
select pgqueue.configure('weights of three', group_key => 'b', weight => 3);
select is(
    (select length(replace(string_agg(pg_temp.given('weights of three', 3 + 0 * n), ''), 'b', '')) from generate_series(1, 4) as n), 3,
    'also over claims that are smaller than a round: of 12 jobs 3 are of the other'
);
select pg_temp.letters('weights of one', repeat('a', 20) || repeat('b', 20));
select pgqueue.configure('weights of one', group_key => 'b', weight => 3);
select is(
    (select length(replace(string_agg(pg_temp.given('weights of one', 1 + 0 * n), ''), 'b', '')) from generate_series(1, 8) as n), 2,
    'and over claims of one: of 8 jobs 2 are'
);
select pgqueue.configure('weights', group_key => 'b', reset => true);
select is(length(replace(pg_temp.given('weights', 6), 'a', '')), 3, 'without weights all have as many');

-- Beside jobs without a group
select pg_temp.letters('mixed', repeat('a', 200) || repeat('.', 200));
select ok(
    (select count(*) filter (where c.group_key is null) between 20 and 80
     from generate_series(1, 100) as n, pgqueue.claim('mixed', 'w', 1 + 0 * n) as c),
    'of 100 claims about half are given jobs without a group'
);
select pg_temp.letters('mixed few', 'ab..');
select is(pg_temp.given('mixed few', 10), 'ab..', 'a claim that wants all takes jobs with and without a group');

-- Priorities
select pg_temp.letters('urgent', 'aaab');
select pg_temp.letters('urgent', 'bc', 5);
select is(pg_temp.given('urgent', 2), 'bc', 'groups with jobs of a higher priority come first');
select is(pg_temp.given('urgent', 2), 'ab', 'and go on with the others after them');

-- Whatever makes a job claimable
select pgqueue.enqueue('later', group_key => 'g', run_at => now() + interval '1 hour') as id \gset
select is(pg_temp.given('later', 1), '', 'a group whose job is scheduled is not served');
select pgqueue.run_now(:id);
select is(pg_temp.given('later', 1), 'g', 'run_now lets the group be served at once');
select token from pgqueue.job where id = :id \gset
select pgqueue.release(array[:id], array[:token]);
select is(pg_temp.given('later', 1), 'g', 'a released job is served again');
select token from pgqueue.job where id = :id \gset
select is(pgqueue.fail(:id, :token, 'e', retry_in => '0'), 'retry', 'the job of a group fails');
select is(pg_temp.given('later', 1), 'g', 'a retry is served');
select token from pgqueue.job where id = :id \gset
select is(pgqueue.fail(:id, :token, 'e', permanent => true), 'dead', 'the job of a group dies');
select is(pgqueue.redrive_job(:id), :id::bigint, 'and is redriven');
select is(pg_temp.given('later', 1), 'g', 'a redriven job is served');
select pg_temp.expire('later');
select is(pg_temp.given('later', 1), 'g', 'a job whose lease expired is served again');

select pgqueue.enqueue('changed', group_key => 'g', unique_key => 'k', run_at => now() + interval '1 hour') as id \gset
select pgqueue.reprioritize(:id, 7);
select pgqueue.run_now(:id);
select is(
    (select priority from pgqueue.claim('changed', 'w')), 7, 'a job of a group is served at its new priority'
);
select pgqueue.enqueue('replaced', group_key => 'g', unique_key => 'k', run_at => now() + interval '1 hour');
select pgqueue.enqueue('replaced', group_key => 'g', unique_key => 'k', on_duplicate => 'replace', priority => 3);
select is(pg_temp.given('replaced', 1), 'g', 'a replaced job is served at once');

select pg_temp.letters('cancelled', 'ab');
select pgqueue.cancel(id) from pgqueue.job where queue = 'cancelled' and group_key = 'a';
select is(pg_temp.given('cancelled', 2), 'b', 'a group whose only job was cancelled is passed over');

-- Scheduled jobs that come due
select pg_temp.letters('due', repeat('a', 200), run_at => now() + interval '1 hour');
select pg_temp.letters('due', 'bbb', run_at => now() + interval '1 hour');
update pgqueue.job set run_at = run_at - interval '1 hour' where queue = 'due';
select pg_temp.pass('due', '1 hour');
select is(pg_temp.given('due', 50), repeat('a', 47) || 'bbb', 'jobs that have come due together are served round-robin');

-- Tables that were changed by hand
insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload, group_key)
select now() - interval '1 minute', now(), 0, 20, 'by hand', 'k', '{}', g
from unnest(array['a', 'b', 'b']) as g;
select pg_temp.pass('by hand', '100 ms');
select is(pg_temp.given('by hand', 10), 'abb', 'a claim finds groups whose jobs were inserted by hand');
select is(pg_temp.given('by hand', 10), '', 'and takes all of them');

-- What else reads the lanes
select pg_temp.letters('rest', 'ab', run_at => now() + interval '1 hour');
select ok(
    pgqueue.rest(array['rest']) between interval '59 minutes' and interval '1 hour',
    'rest says when the first job of a group is due'
);
select pg_temp.letters('rest', 'c');
select ok(pgqueue.rest(array['rest']) < interval '100 ms', 'rest says soon when the job of a group is due');
select count(*) from pgqueue.claim('rest', 'w', lease => '1 minute');
select count(*) from pgqueue.claim('rest', 'w');
select ok(
    pgqueue.rest(array['rest']) between interval '50 seconds' and interval '1 minute',
    'rest says when the lease of a job of a group ends'
);
select pg_temp.letters('purged', 'ab.');
select is(pgqueue.purge('purged'), 3::bigint, 'purge drops jobs with and without a group');

-- Jobs that may not begin any more
select pg_temp.letters('late', 'aaabb.');
update pgqueue.job set terms.expires_at = now() where queue = 'late' and group_key = 'a';
select is(pg_temp.given('late', 5), 'bb.', 'a claim passes the late jobs of a round');
select pg_temp.letters('late newcomers', 'aaaaabb..', run_at => now() + interval '1 hour');
update pgqueue.job as j set run_at = now(), terms.expires_at = case when n.nth not in (5, 7, 9) then now() end
from (select id, row_number() over (order by id) as nth from pgqueue.job where queue = 'late newcomers') as n
where n.id = j.id;
select pg_temp.pass('late newcomers', '1 hour');
select is(pg_temp.given('late newcomers', 9), 'ab.', 'and those that were for later');
select is(
    (select count(*) from pgqueue.run where queue like 'late%' and outcome = 'cancelled'), 9::bigint,
    'all of them are cancelled'
);

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
select pg_temp.letters('halt free', 'aab');
select pgqueue.enqueue('halt free', kind => 'x', group_key => 'a', priority => 1);
select pgqueue.pause('halt free', kind => 'x');
select is(pg_temp.given('halt free', 5), 'aab', 'without a limit a paused kind holds up no other');

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

select pgqueue._sweep_groups_if_due(clock_timestamp() - interval '1 minute', null);
select ok(
    pg_sequence_last_value('pgqueue._cell_groups_due') <= pgqueue._since_2020(clock_timestamp() + interval '1 second'),
    'a sweep that has waited for the machine does not put off the next one for long'
);

select * from finish();
rollback;
