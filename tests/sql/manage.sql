-- What an operator does with jobs that are not dead: cancel, cancel_many, run_now, reprioritize, purge.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(38);

-- Cancel

select pgqueue.enqueue('c', unique_key => 'k') as id \gset
select is(pgqueue.cancel(:id, 'typo'), 'cancelled', 'cancel answers cancelled for a job that waits');
select is_empty(
    format('select from pgqueue.job where id = %s', :id), 'a cancelled job is no longer in job'
);
select results_eq(
    format('select outcome, attempt, result from pgqueue.run where job_id = %s', :id),
    $$ values ('cancelled', 0, '"typo"'::jsonb) $$, 'the run of a cancelled job has the reason'
);
select isnt(
    pgqueue.enqueue('c', unique_key => 'k'), :id::bigint, 'the unique key of a cancelled job is free again'
);
select throws_ok(
    format('select pgqueue.cancel(%s)', :id), 'PQ001', null, 'a job cannot be cancelled twice'
);
select throws_ok('select pgqueue.cancel(null)', 'PQ001', null, 'cancel of a null id raises PQ001');
select id, token from pgqueue.claim('c', 'w') \gset
select is(pgqueue.cancel(:id, 'stop'), 'cancelling', 'cancel answers cancelling for a job that runs');
select is(
    (select status from pgqueue.extend(array[:id], array[:token])), 'cancelled',
    'extend tells the worker that its job was cancelled'
);
select is(
    pgqueue.fail(:id, :token, 'stopped'), 'cancelled', 'fail answers cancelled for a cancelled job'
);
select is_empty(
    format('select from pgqueue.job where id = %s', :id), 'a cancelled job that fails is not retried'
);
select pgqueue.enqueue('c') as id \gset
select token from pgqueue.claim('c', 'w') \gset
select pgqueue.cancel(:id);
select is(
    (select pgqueue.release(array[:id], array[:token])), :id::bigint, 'a cancelled job can be released'
);
select is_empty(
    format('select from pgqueue.job where id = %s', :id), 'a cancelled job that is released does not go back to its queue'
);
select pgqueue.enqueue('c') as id \gset
select token from pgqueue.claim('c', 'w') \gset
select pgqueue.cancel(:id);
select lives_ok(
    format('select pgqueue.complete(%s, %s)', :id, :token),
    'a cancelled job can be completed by a worker that has not heard of it'
);
select pgqueue.enqueue('c') as id \gset
select pgqueue.claim('c', 'w');
select pgqueue.cancel(:id, 'worker died');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is_empty(
    $$ select pgqueue.claim('c', 'w') $$, 'a cancelled job whose lease expired is not claimed again'
);
select results_eq(
    format('select outcome, result from pgqueue.run where job_id = %s', :id),
    $$ values ('cancelled', '"worker died"'::jsonb) $$, 'a cancelled job whose lease expired ends as cancelled'
);

-- Cancel many

select pgqueue.enqueue('bulk', kind => 'mail') from generate_series(1, 3);
select pgqueue.enqueue('bulk', kind => 'other', run_at => now() + interval '1 day');
select count(*) from pgqueue.claim('bulk', 'w');
select is(
    (select count(*) from pgqueue.cancel_many('bulk', kind => 'mail', dry_run => true)), 3::bigint,
    'a dry run of cancel_many returns the ids it would cancel'
);
select is(
    (select count(*) from pgqueue.cancel_many('bulk', kind => 'mail', max_jobs => 2)), 2::bigint,
    'cancel_many cancels max_jobs at most, and a dry run has cancelled none'
);
select is(
    (select count(*) from pgqueue.cancel_many('bulk', kind => 'mail', reason => 'why')), 1::bigint,
    'a second cancel_many cancels those that the first one left'
);
select results_eq(
    $$ select kind, state from pgqueue.jobs where queue = 'bulk' order by 1 $$,
    $$ values ('mail', 'running'), ('other', 'scheduled') $$,
    'cancel_many removes what waits, leaves what runs to its worker, and does not touch other kinds'
);

select pgqueue.enqueue('pipe') as first \gset
select pgqueue.enqueue('pipe', after => array[:first]) as second \gset
select pgqueue.enqueue('later', after => array[:second]);
select is(
    (select count(*) from pgqueue.cancel_many('pipe', reason => 'why')), 2::bigint,
    'cancel_many cancels a job and another that waits for it'
);
select results_eq(
    $$ select result #>> '{}' from pgqueue.run where queue in ('pipe', 'later') order by job_id $$,
    format($$ values ('why'), ('why'), ('job %s, which it waited for, was cancelled or removed') $$, :second),
    'each for its own reason, and what waits for them as well'
);

-- Run now, reprioritize, purge

select pgqueue.enqueue('o', run_at => now() + interval '1 day') as id \gset
select lives_ok(format('select pgqueue.run_now(%s)', :id), 'run_now accepts a scheduled job');
select is(
    (select state from pgqueue.jobs where id = :id), 'ready', 'run_now makes a scheduled job ready'
);
select throws_ok('select pgqueue.run_now(0)', 'PQ001', null, 'run_now of an unknown job raises PQ001');
select lives_ok(
    format('select pgqueue.reprioritize(%s, 50)', :id), 'reprioritize accepts a job that waits'
);
select is(
    (select priority from pgqueue.jobs where id = :id), 50, 'reprioritize sets the priority of the job'
);
select throws_ok(
    'select pgqueue.reprioritize(0, 1)', 'PQ001', null, 'reprioritize of an unknown job raises PQ001'
);
select throws_ok(
    format('select pgqueue.reprioritize(%s, null)', :id), '22023', null, 'reprioritize to null is refused'
);
select pgqueue.enqueue_many('p', (select array_agg('1'::jsonb) from generate_series(1, 10)));
select pgqueue.enqueue('p', run_at => now() + interval '1 day');
select pgqueue.claim('p', 'w', 3);
select is(
    pgqueue.purge('p'), 8::bigint,
    'purge drops the ready and the scheduled jobs and returns their number'
);
select is(
    (select count(*) from pgqueue.jobs where queue = 'p' and state = 'running'), 3::bigint,
    'purge leaves the jobs that run'
);

-- Rerun

select pgqueue.configure('kept', kind => 'k', keep_payloads => true);
create temporary table ended (how text, id bigint);
create function pg_temp.end_job(how text, kind text)
    returns void
    language plpgsql
as $$
declare
    added bigint := pgqueue.enqueue(
        'kept', jsonb_build_object('big', repeat(how, 5000)), kind, 7, max_attempts => 3, unique_key => 'u',
        group_key => 'g', headers => '{"trace": 1}'
    );
    job pgqueue.job := pgqueue.claim('kept', 'w');
begin
    case how
        when 'complete' then perform pgqueue.complete(job.id, job.token);
        when 'complete_many' then perform pgqueue.complete_many(array[job.id], array[job.token]);
        when 'cancel' then
            perform pgqueue.fail(job.id, job.token, 'e', retry_in => '0');
            perform pgqueue.cancel(job.id);
        else perform pgqueue.fail(job.id, job.token, 'e', permanent => true);
    end case;
    insert into ended values (how, added);
end;
$$;
select pg_temp.end_job(how, 'k') from unnest(array['complete', 'complete_many', 'cancel', 'fail']) as how;
select results_eq(
    $$ select how, outcome, payload = jsonb_build_object('big', repeat(how, 5000)), r.headers
       from ended as e join pgqueue.run as r on r.job_id = e.id order by how, finished_at $$,
    $$ values
        ('cancel', 'retry', null::boolean, null::jsonb), ('cancel', 'cancelled', true, '{"trace": 1}'),
        ('complete', 'completed', true, '{"trace": 1}'), ('complete_many', 'completed', true, '{"trace": 1}'),
        ('fail', 'dead', null, null) $$,
    'with keep_payloads the log keeps payload and headers of a job that is gone'
);
create temporary table again as
select e.*, pgqueue.rerun(e.id) as again from ended as e where e.how <> 'fail';
select is(
    (
        select (
            j.queue, j.kind, j.priority, j.max_attempts, j.group_key, j.unique_key, j.headers, j.attempt,
            j.payload = jsonb_build_object('big', repeat(e.how, 5000)), j.run_at <= clock_timestamp()
        )::text
        from pgqueue.job as j where j.id = e.again and j.id <> e.id
    ),
    format('(kept,k,7,3,g,,"{""trace"": 1, ""rerun_of"": %s}",0,t,t)', e.id),
    'rerun enqueues the same job anew, due now and without its unique_key: ' || e.how
)
from again as e;
select throws_like(
    format('select pgqueue.rerun(%s)', (select e.id from ended as e where e.how = 'fail')), '% is dead',
    'rerun leaves a dead job to redrive'
);
select throws_like(
    format('select pgqueue.rerun(%s)', pgqueue.enqueue('kept')), '% has not ended', 'rerun refuses a job that still waits'
);
select pgqueue.purge('kept');
truncate ended;
select pg_temp.end_job(how, 'another kind') from unnest(array['complete', 'complete_many', 'cancel']) as how;
select is_empty(
    'select from pgqueue.run as r join ended as e on e.id = r.job_id where num_nonnulls(payload, headers, options) > 0',
    'the log keeps nothing of a kind without keep_payloads'
);
select throws_ok(
    format('select pgqueue.rerun(%s)', (select min(id) from ended)), 'PQ001', null,
    'a job whose payload the log did not keep cannot be run again'
);

select * from finish();
rollback;
