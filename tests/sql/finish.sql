-- How an attempt ends: complete, complete_many, fail, release and finish.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(32);

-- Complete

select pgqueue.enqueue('done', kind => 'mail') as id \gset
select pgqueue.fail(c.id, c.token, 'busy', '0') from pgqueue.claim('done', 'w-1') as c;
select token from pgqueue.claim('done', 'w-2') \gset
select lives_ok(
    format('select pgqueue.complete(%s, %s, ''{"sent": 1}'')', :id, :token),
    'the worker that holds the lease can complete the job'
);
select results_eq(
    format('select attempt, queue, kind, worker, result, waited >= ''0'', taken >= ''0''
            from pgqueue.run where job_id = %s and outcome = ''completed''', :id),
    $$ values (2, 'done', 'mail', 'w-2', '{"sent": 1}'::jsonb, true, true) $$,
    'a completed attempt is a run, with its result'
);
select is_empty(
    format('select from pgqueue.job where id = %s', :id), 'a completed job is no longer in job'
);
select throws_ok(
    format('select pgqueue.complete(%s, %s)', :id, :token), 'PQ002', null, 'a job cannot be completed twice'
);
select pgqueue.configure('silent', keep_runs => 0);
select pgqueue.enqueue('silent') as id \gset
select token from pgqueue.claim('silent', 'w') \gset
select lives_ok(
    format('select pgqueue.complete(%s, %s)', :id, :token), 'a job completes in a queue that keeps no runs'
);
select is_empty(
    format('select from pgqueue.run where job_id = %s', :id), 'a queue with keep_runs 0 has no runs'
);

-- Complete many

select pgqueue.enqueue_many('batch', array['1', '2', '3']::jsonb[]);
select array_agg(id) as ids, array_agg(token) as tokens from pgqueue.claim('batch', 'w', 3) \gset
select is(
    (select array_agg(c.id order by c.id) from pgqueue.complete_many(
        :'ids'::bigint[] || 0::bigint, (:'tokens'::bigint[])[1:2] || array[0, 0]::bigint[]
    ) as c (id)),
    (:'ids'::bigint[])[1:2],
    'complete_many completes the jobs whose lease is held and returns their ids'
);
select pgqueue.enqueue_many('results', array['1', '2']::jsonb[]);
select array_agg(c.id) as ids, array_agg(c.token) as tokens from pgqueue.claim('results', 'w', 2) as c \gset
select is(
    (select count(*) from pgqueue.complete_many(:'ids', :'tokens', array['{"r": 1}', null]::jsonb[])), 2::bigint,
    'complete_many accepts a result for each job'
);
select is(
    (select array_agg(result order by job_id) from pgqueue.run where queue = 'results'),
    array['{"r": 1}', null]::jsonb[], 'complete_many stores each result in the run of its job'
);

-- Fail

select pgqueue.enqueue('flaky', '{"n": 1}', max_attempts => 3, headers => '{"trace": 1}') as id \gset
select token from pgqueue.claim('flaky', 'w') \gset
select clock_timestamp() as moment \gset
select is(pgqueue.fail(:id, :token, 'boom'), 'retry', 'fail answers retry while attempts are left');
select results_eq(
    format('select state, run_at - %L > ''2.4 s'' and run_at - clock_timestamp() < ''6 s'', attempt, worker, last_error
            from pgqueue.jobs where id = %s', :'moment', :id),
    $$ values ('scheduled', true, 1, null::text, 'boom') $$,
    'a job that failed once is scheduled after half to all of retry_base'
);
update pgqueue.job set run_at = now() where id = :id;
select token from pgqueue.claim('flaky', 'w') \gset
select is(pgqueue.fail(:id, :token, null, '3 hours'), 'retry', 'fail accepts a null error');
select is(
    (select date_trunc('minute', run_at - now()) from pgqueue.job where id = :id), interval '3 hours',
    'retry_in replaces the backoff'
);
select throws_ok(
    $$select pgqueue.fail(1, 1, 'e', retry_in => '1001 years')$$,
    '22023', 'retry_in must be from 0 to 1000 years', 'a delay that is refused is told the range'
);
update pgqueue.job set run_at = now() where id = :id;
select token from pgqueue.claim('flaky', 'w') \gset
select is(
    pgqueue.fail(:id, :token, repeat('é', 10000)), 'dead',
    'fail answers dead when the last attempt fails'
);
select results_eq(
    format('select queue, kind, payload, headers, attempt, max_attempts, worker, length(error),
                jsonb_array_length(errors), errors -> 0 ->> ''error'', errors -> 1 ->> ''attempt''
            from pgqueue.dead_job where id = %s', :id),
    $$ values ('flaky', 'flaky', '{"n": 1}'::jsonb, '{"trace": 1}'::jsonb, 3, 3, 'w', 8000, 3, 'boom', '2') $$,
    'a dead job keeps its payload, headers and errors, cut to 8,000 characters'
);
select is_empty(format('select from pgqueue.job where id = %s', :id), 'a dead job is no longer in job');
select pgqueue.enqueue('flaky') as id \gset
select token from pgqueue.claim('flaky', 'w') \gset
select is(
    pgqueue.fail(:id, :token, 'no such address', permanent => true), 'dead',
    'a permanent failure makes a job dead with attempts left'
);

-- Release

select pgqueue.enqueue('back') as id \gset
select token, run_at from pgqueue.claim('back', 'w') \gset
select is(
    (select pgqueue.release(array[:id], array[:token])), :id::bigint, 'release returns the ids it gave back'
);
select results_eq(
    format('select state, attempt, run_at from pgqueue.jobs where id = %s', :id),
    format('values (''ready'', 0, %L::timestamptz)', :'run_at'),
    'a released job is ready at its old run_at, its attempt not counted'
);
select token from pgqueue.claim('back', 'w') \gset
select pgqueue.release(array[:id], array[:token], now() + interval '1 hour');
select is(
    (select state from pgqueue.jobs where id = :id), 'scheduled', 'release with a later run_at schedules the job'
);

-- Finish

select pgqueue.enqueue_many('ends', (select array_agg(to_jsonb(n)) from generate_series(1, 9) as n));
select array_agg(c.id order by c.id) as ids, array_agg(c.token order by c.id) as tokens
from pgqueue.claim('ends', 'w', 9) as c \gset
select pgqueue.cancel((:'ids'::bigint[])[7]), pgqueue.cancel((:'ids'::bigint[])[8]);
select pgqueue.complete((:'ids'::bigint[])[9], (:'tokens'::bigint[])[9]);
create temporary table ended as
select f.status, j.place from pgqueue.finish(
    :'ids'::bigint[], :'tokens'::bigint[],
    array['complete', 'complete', 'fail', 'reject', 'release', 'complete', 'fail', 'release', 'complete'],
    array['{"ok": 1}', null, E'TimeoutError: slow\nat line 7', 'no', null, '{"half": ', 'x', null, null],
    array[null, null, '1 hour', null, '2 hours', null, null, null, null]::interval[]
) with ordinality as f (job_id, status, place)
join unnest(:'ids'::bigint[]) with ordinality as j (id, place) on j.id = f.job_id and j.place = f.place;
select results_eq(
    'select status from ended order by place',
    $$ values ('completed'), ('completed'), ('retry'), ('dead'), ('released'), ('retry'), ('cancelled'),
       ('cancelled'), ('lost') $$,
    'finish ends each attempt by its own outcome and answers in the order given'
);
select results_eq(
    format('select outcome, result, error from pgqueue.run where job_id = any (%L) and job_id <= %s order by job_id',
        :'ids', (:'ids'::bigint[])[6]),
    $$ values ('completed', '{"ok": 1}'::jsonb, null), ('completed', null, null),
       ('retry', null, 'TimeoutError: slow'), ('dead', null, 'no'),
       ('retry', null, 'the result cannot be stored: invalid input syntax for type json') $$,
    'a run has the result or the first line of the error, and a result that is no JSON fails its own attempt'
);
select ok(
    (select run_at between now() + interval '59 minutes' and now() + interval '61 minutes'
     from pgqueue.job where id = (:'ids'::bigint[])[3]),
    'the delay of a failed attempt replaces the backoff'
);
select ok(
    (select run_at > now() + interval '119 minutes' and attempt = 0
     from pgqueue.job where id = (:'ids'::bigint[])[5]),
    'the delay of a released attempt schedules the job, its attempt not counted'
);
select is_empty($$ select pgqueue.finish('{}', '{}', '{}') $$, 'finish of no attempt returns no row');
select results_eq(
    $$ select * from pgqueue.finish(array[0, 0], array[1, 1], array['complete', 'fail']) $$,
    $$ values (0::bigint, 'lost'), (0, 'lost') $$, 'finish answers lost for a job whose lease is not held'
);
select pgqueue.enqueue('twice') as id \gset
select token from pgqueue.claim('twice', 'w') \gset
select results_eq(
    format('select status from pgqueue.finish(array[%1$s, %1$s], array[%2$s, %2$s], array[''complete'', ''fail''])', :id, :token),
    $$ values ('completed'), ('lost') $$, 'an attempt given twice to finish ends by its first outcome'
);
select pgqueue.enqueue('twice') as id \gset
select token as lost from pgqueue.claim('twice', 'w') \gset
select pgqueue.release(array[:id], array[:lost]);
select token from pgqueue.claim('twice', 'w') \gset
select results_eq(
    format('select status from pgqueue.finish(array[%1$s, %1$s], array[%2$s, %3$s], array[''fail'', ''release''])', :id, :lost, :token),
    $$ values ('lost'), ('released') $$, 'of a job under two tokens, finish ends the attempt whose lease is held'
);
select token as held from pgqueue.claim('twice', 'w') \gset
select results_eq(
    format('select status from pgqueue.finish(array[%1$s, %1$s], array[%3$s, %2$s], array[''complete'', ''complete''])', :id, :token, :held),
    $$ values ('completed'), ('lost') $$, 'and completes only that one'
);

-- What summarizes the log

create function pg_temp.summarize() returns bigint language sql as $$
    select sum(brin_summarize_new_values(i.inhrelid))
    from pg_inherits as i
    where i.inhparent = 'pgqueue.run_finished_idx'::regclass
$$;
select cmp_ok(pg_temp.summarize(), '>', 0::bigint, 'no completion has to write a summary of the log''s first range');
select pgqueue._empty_run(slot, 'infinity') from generate_series(0, 15) as s (slot);
select pgqueue.enqueue('again');
select pgqueue.complete(c.id, c.token) from pgqueue.claim('again', 'w') as c;
select is(pg_temp.summarize(), 1::bigint, 'nor when it has been emptied');

select * from finish();
rollback;
