-- Whose turn it is: groups are served round-robin, whatever waits in each. What two sessions do at once is in
-- test_races.py, what it costs in test_plans.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(44);

\ir limits.psql

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
select ok(pg_temp.rests_until('rest', now() + interval '1 hour'), 'rest says when the first job of a group is due');
select pg_temp.letters('rest', 'c');
select ok(pgqueue.rest(array['rest']) < interval '100 ms', 'rest says soon when the job of a group is due');
select count(*) from pgqueue.claim('rest', 'w', lease => '1 minute');
select count(*) from pgqueue.claim('rest', 'w');
select ok(
    pg_temp.rests_until('rest', pg_temp.first_lease('rest')), 'rest says when the lease of a job of a group ends'
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

-- Pauses
select pg_temp.letters('halt free', 'aab');
select pgqueue.enqueue('halt free', kind => 'x', group_key => 'a', priority => 1);
select pgqueue.pause('halt free', kind => 'x');
select is(pg_temp.given('halt free', 5), 'aab', 'without a limit a paused kind holds up no other');

select pgqueue._sweep_groups_if_due(clock_timestamp() - interval '1 minute', null);
select ok(
    pg_sequence_last_value('pgqueue._cell_groups_due') <= pgqueue._since_2020(clock_timestamp() + interval '1 second'),
    'a sweep that has waited for the machine does not put off the next one for long'
);

select pgqueue.configure('once', group_limit => 1);
select pg_temp.letters('once', 'aabb');
select is(pg_temp.given('once', 9), 'ab', 'a group with a limit of one gives one job');
set local track_functions = 'pl';
select is_empty($$ select from pgqueue.claim('once', 'w', 9) $$, 'and then none');
select is(
    pg_stat_get_xact_function_calls('pgqueue._pick_groups'::regproc), 1::bigint,
    'a claim that finds nothing walks the groups of a lane once'
);

select * from finish();
rollback;
