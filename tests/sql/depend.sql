-- Jobs that wait for others: blocked, freed, cancelled. test_waits.py has the races.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select setval('pgqueue.awaited_seq', 0);
select plan(53);

create function pg_temp.state(id bigint)
    returns text
    language sql
as $$ select s.state from pgqueue.status(id) as s $$;
-- Claims one job of a queue and ends it.
create function pg_temp.end_one(queue text, how text)
    returns bigint
    language sql
as $$
    select c.id from pgqueue.claim(queue, 'w') as c
    cross join lateral (
        select case how
            when 'complete' then pgqueue.complete(c.id, c.token)::text
            when 'fail' then pgqueue.fail(c.id, c.token, 'e', retry_in => '0')
            else pgqueue.fail(c.id, c.token, 'e', permanent => true)
        end
    ) as e
$$;

-- Free when all have completed

select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('b') as b \gset
select pgqueue.enqueue('c', after => array[:a, :b, :a], priority => 3) as c \gset
select is(pg_temp.state(:c), 'blocked', 'a job that waits for others is blocked');
select is(
    pg_sequence_last_value('pgqueue.awaited_seq'), pgqueue._settings_bits('a') | pgqueue._settings_bits('b'),
    'completions look for it in the queues of those others'
);
select is_empty($$ select pgqueue.claim('c', 'w') $$, 'no claim gets it');
select is((select run_at from pgqueue.jobs where id = :c), null, 'it has no run_at');
select is(pgqueue.why(:c), format('blocked: waits for job %s and 1 more', :a), 'why says for which');
select results_eq(
    format('select job_id, runs_if_dead from pgqueue.dependencies where waiter_id = %s order by job_id', :c),
    format('values (%s::bigint, false), (%s, false)', :a, :b), 'dependencies shows for which'
);
select is(pgqueue.rest(array['c']), null, 'rest does not wait for it');
select pgqueue.run_now(:c);
select is(pg_temp.state(:c), 'blocked', 'run_now leaves it blocked');
select pg_temp.end_one('a', 'complete');
select is(pg_temp.state(:c), 'blocked', 'it waits for all of them');
select pg_temp.end_one('b', 'fail');
select is(pg_temp.state(:c), 'blocked', 'a retry is no end');
select pg_temp.end_one('b', 'complete');
select is(pg_temp.state(:c), 'ready', 'when the last has completed it is ready');
select is((select priority from pgqueue.jobs where id = :c), 3, 'with its priority');
select is(pg_temp.end_one('c', 'complete'), :c::bigint, 'a claim gets it');
select is_empty('select from pgqueue.dependency', 'and nothing is left of the wait');

-- What has ended already

select pgqueue.enqueue('c', after => array[:a]) as d \gset
select is(pg_temp.state(:d), 'ready', 'a job that completed before counts');
select pgqueue.enqueue('c', after => '{}') as d \gset
select is(pg_temp.state(:d), 'ready', 'to wait for nothing is not to wait');
select throws_ok($$ select pgqueue.enqueue('c', after => array[1000000000000]) $$, 'PQ001', null, 'an id that never was is refused');
select throws_ok($$ select pgqueue.enqueue('c', after => array[0]) $$, 'PQ001', null, 'so is 0');
select throws_ok($$ select pgqueue.enqueue('c', after => array[null::bigint]) $$, '22023', null, 'and null');
select throws_ok($$ select pgqueue.enqueue('c', if_dead => 'x') $$, '22023', null, 'and an unknown if_dead');
select pgqueue.purge('c');

-- Later than the wait

select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('c', after => array[:a], run_at => '2990-01-01') as c \gset
select pg_temp.end_one('a', 'complete');
select results_eq(
    format('select state, run_at from pgqueue.jobs where id = %s', :c), $$ values ('scheduled', '2990-01-01'::timestamptz) $$,
    'a job is not run before its run_at when its wait is over'
);

-- Those that do not complete

select pgqueue.enqueue('a', max_attempts => 1) as a \gset
select pgqueue.enqueue('c', after => array[:a]) as b \gset
select pgqueue.enqueue('c', after => array[:b]) as c \gset
select pgqueue.enqueue('c', after => array[:a], if_dead => 'run') as d \gset
select pg_temp.end_one('a', 'die');
select is(pg_temp.state(:b), 'cancelled', 'a job is cancelled when one that it waits for dies');
select is(
    (select last_error from pgqueue.status(:b)), format('job %s, which it waited for, is dead', :a), 'the reason says so'
);
select is(pg_temp.state(:c), 'cancelled', 'so is one that waits for that one');
select is(pg_temp.state(:d), 'ready', 'with if_dead run it runs');
select pgqueue.enqueue('c', after => array[:a]) as e \gset
select is(pg_temp.state(:e), 'cancelled', 'one that waits for a job that is dead already is cancelled at once');
select pgqueue.enqueue('c', after => array[:b], if_dead => 'run') as e \gset
select is(pg_temp.state(:e), 'ready', 'unless it runs anyway');
select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('c', after => array[:a]) as b \gset
select pgqueue.cancel(:a);
select is(pg_temp.state(:b), 'cancelled', 'cancel cancels what waits for a job');
select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('c', after => array[:a]) as b \gset
select pgqueue.purge('a');
select is(pg_temp.state(:b), 'cancelled', 'so does purge');
select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('c', after => array[:a]) as b \gset
select pgqueue.cancel(:b);
select is_empty('select from pgqueue.dependency', 'a job that is cancelled itself waits for nothing any more');
select lives_ok($$ select pg_temp.end_one('a', 'complete') $$, 'a job whose waiter was cancelled can complete');
select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('d') as d \gset
select pgqueue.enqueue('c', after => array[:a, :d]) as b \gset
select pgqueue.cancel(:a);
select is_empty('select from pgqueue.dependency', 'nor does one that is cancelled with the first of two');
select pgqueue.purge('d');

-- Beside other options

select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('k', unique_key => 'k', after => array[:a]) as k \gset
select pgqueue.enqueue('k', '{"n": 2}', unique_key => 'k', on_duplicate => 'replace') as same \gset
select results_eq(
    format('select state from pgqueue.jobs where id = %s', :k), $$ values ('blocked') $$, 'replace leaves a blocked job blocked'
);
select is((select payload from pgqueue.job where id = :k), '{"n": 2}', 'and gives it its payload');
select pgqueue.enqueue('k', unique_key => 'k', run_at => '2990-01-01', on_duplicate => 'postpone');
select pg_temp.end_one('a', 'complete');
select is((select run_at from pgqueue.jobs where id = :k), '2990-01-01'::timestamptz, 'postpone counts when its wait is over');
select pgqueue.enqueue('k', unique_key => 'k', after => array[:a, :k], on_duplicate => 'replace');
select is(pg_temp.state(:k), 'ready', 'a duplicate waits for nothing');
select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('g', group_key => 'g', after => array[:a]) as g \gset
select pg_temp.end_one('a', 'complete');
select is((select id from pgqueue.claim('g', 'w')), :g::bigint, 'a job of a group can wait, too');

-- In one transaction, in one call

select pgqueue.enqueue('m', kind => 'first') as a \gset
select pgqueue.enqueue('m', kind => 'second') as b \gset
select pgqueue.enqueue('n', after => array[:a, :b]) as c \gset
select pgqueue.complete_many(array_agg(id), array_agg(token)) from pgqueue.claim('m', 'w', 10);
select is(pg_temp.state(:c), 'ready', 'complete_many may end all that a job waits for');
select pgqueue.enqueue('m') as a \gset
select pgqueue.enqueue('m') as b \gset
select pgqueue.enqueue('n', after => array[:a, :b], if_dead => 'run') as c \gset
select pgqueue.finish(array_agg(id), array_agg(token), '{complete,reject}') from pgqueue.claim('m', 'w', 10);
select is(pg_temp.state(:c), 'ready', 'finish may end them each in its way');
select pgqueue.enqueue('m') as a \gset
select pgqueue.enqueue('n', after => array[:a], if_dead => 'run') as c \gset
select pgqueue.claim('m', 'w');
update pgqueue.job set lease_expires_at = now() - interval '1 second', max_attempts = 1 where id = :a;
select pgqueue.reap();
select is(pg_temp.state(:c), 'ready', 'so may the end of a lease');
select pgqueue._tie_loose_ends(1000);
select is_empty('select from pgqueue.loose_end', 'one look is enough');
select is_empty('select from pgqueue.dependency as d where d.job_id not in (select id from pgqueue.job)', 'and no ended job has ties');

-- All hints lost

select pgqueue._tie_loose_ends(1000);
set local pgqueue.lose_hints = '1';
select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('b', after => array[:a]) as b \gset
select pgqueue.enqueue('c', after => array[:b]) as c \gset
select pgqueue.enqueue('c', after => array[:b], if_dead => 'run') as d \gset
select pg_temp.end_one('a', 'complete');
select is(pg_temp.state(:b), 'blocked', 'with lose_hints an end does not tell the waiting jobs');
select pgqueue._tie_loose_ends(1000);
select is(pg_temp.state(:b), 'ready', 'the sweep finds that it is over');
select pg_temp.end_one('b', 'dead');
select pgqueue.enqueue('c', after => array[:b]) as e \gset
select is(pg_temp.state(:e), 'cancelled', 'a job enqueued after it knows, because that is not a hint');
select is(pg_temp.state(:c), 'blocked', 'nor does one that is dead');
select pgqueue._tie_loose_ends(1000);
select is(pg_temp.state(:c) || ', ' || pg_temp.state(:d), 'cancelled, ready', 'the sweep finds that, too');
select pgqueue.enqueue('a') as a \gset
select pgqueue.enqueue('b', after => array[:a]) as b \gset
select pgqueue.purge('a');
select is(pg_temp.state(:b), 'blocked', 'nor does a purge');
select is_empty('select from pgqueue.loose_end', 'and none of them leaves a loose end');
select pgqueue._tie_loose_ends(1000);
select is(pg_temp.state(:b), 'cancelled', 'the sweep finds what was purged');
set local pgqueue.lose_hints = '';

-- Where completions look

select pgqueue.enqueue('d') as d \gset
select pgqueue.enqueue('e', after => array[:d]) as e \gset
select setval('pgqueue.awaited_seq', 0);
select pg_temp.end_one('d', 'complete');
select pgqueue._tie_loose_ends(1000);
select is(pg_temp.state(:e), 'ready', 'if a copy has lost that, the sweep finds the end');
select pgqueue.enqueue('e', after => array[pgqueue.enqueue('d')]);
select setval('pgqueue.awaited_seq', 0);
select pgqueue._repair_settings();
select is(pg_sequence_last_value('pgqueue.awaited_seq'), pgqueue._settings_bits(''), 'and maintain repairs it');

-- One that comes back to life

select pgqueue.enqueue('f') as f \gset
select pgqueue.enqueue('g', after => array[:f], if_dead => 'run') as g \gset
-- As if it had been dead when its outcome was read, and redriven right after that.
create or replace function pgqueue._outcomes_of(job_ids bigint[])
    returns table (id bigint, outcome text)
    language sql
as $$ select u.id, 'dead' from unnest(job_ids) as u (id) $$;
select pgqueue._cut_ties(array[:f], 10);
select is(pg_temp.state(:g), 'ready', 'who waits for a job that is redriven just as it was seen to be dead is not lost');
select * from finish();
rollback;
