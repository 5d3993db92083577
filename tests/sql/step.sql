-- Steps: saved once, kept for the next attempt, gone with the job. test_steps.py has the races.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select setval('pgqueue.awaited_seq', 0);
select plan(37);

create function pg_temp.kept(id bigint)
    returns bigint
    language sql
as $$ select count(*) from pgqueue.step as s where s.job_id = $1 $$;

-- Saved once

select pgqueue.enqueue('q', group_key => 'g') as id \gset
select token from pgqueue.claim('q', 'w') \gset
select is(pgqueue.save_step(:id, :token, 'charge', '{"paid": 7}'), '{"paid": 7}', 'save_step returns the value');
select is(pgqueue.save_step(:id, :token, 'charge', '{"paid": 8}'), '{"paid": 7}', 'the first value of a step wins');
select is(pgqueue.save_step(:id, :token, 'mail'), 'null', 'a step need not have a value');
select is(pgqueue.save_step(:id, :token, 'ship', null), 'null', 'null counts as none');
select results_eq(
    format('select name, value from pgqueue.steps(%s)', :id),
    $$ values ('charge', '{"paid": 7}'::jsonb), ('mail', 'null'), ('ship', 'null') $$, 'steps returns them, oldest first'
);
select ok(bool_and(saved_at between now() and clock_timestamp()), 'with the time of each') from pgqueue.steps(:id);
select is((select last_step from pgqueue.jobs where id = :id), 'ship', 'jobs shows the last one');
select is((select last_step from pgqueue.status(:id)), 'ship', 'and so does status');
select matches(pgqueue.why(:id), '^runs: .*; its last step: ship, at ', 'and why');
select is(
    pg_sequence_last_value('pgqueue.awaited_seq'), pgqueue._settings_bits('q'), 'completions of its queue look for steps'
);

-- Whose lease is lost

select throws_ok(
    format('select pgqueue.save_step(%s, %s, %L)', :id, :token + 1, 'x'), 'PQ002', null,
    'save_step refuses a lease that is lost'
);
select throws_ok('select pgqueue.save_step(-1, 1, ''x'')', 'PQ002', null, 'or a job that does not exist');
select throws_ok('select pgqueue.save_step(null, null, ''x'')', 'PQ002', null, 'or null');
select is(pg_temp.kept(-1), 0::bigint, 'and keeps nothing of that');
select throws_ok(
    format('select pgqueue.save_step(%s, %s, %s)', :id, :token, n.name), '22023', null, 'a name has 1 to 200 bytes: ' || n.name
)
from (values ('null'), (''''''), ('repeat(''x'', 201)')) as n (name);

-- As long as there is something to go on with

select pgqueue.fail(:id, :token, 'e', retry_in => '0');
select token from pgqueue.claim('q', 'w') \gset
select is((select array_agg(name) from pgqueue.steps(:id)), '{charge,mail,ship}', 'the next attempt finds them');
select is(pgqueue.save_step(:id, :token, 'charge', '9'), '{"paid": 7}', 'and does not do it again');
select pgqueue.release(array[:id], array[:token]);
select token from pgqueue.claim('q', 'w') \gset
select is(pg_temp.kept(:id), 3::bigint, 'also after a release');
select pgqueue.fail(:id, :token, 'e', permanent => true);
select is((select array_agg(name) from pgqueue.steps(:id)), '{charge,mail,ship}', 'a dead job keeps its steps');
select is((select last_step from pgqueue.status(:id)), 'ship', 'status shows the last one of a dead job, too');
select pgqueue.redrive_job(:id);
select token from pgqueue.claim('q', 'w') \gset
select is(pgqueue.save_step(:id, :token, 'mail', '1'), 'null', 'a redriven one goes on where it stopped');
select pgqueue.complete(:id, :token);
select is(pg_temp.kept(:id), 0::bigint, 'complete deletes them');

-- Every other end. How: a statement about the job id, in which HELD stands for its token.
create function pg_temp.left_after(how text)
    returns bigint
    language plpgsql
as $$
declare
    job pgqueue.job;
begin
    perform pgqueue.enqueue('q');
    select c.* into job from pgqueue.claim('q', 'w') as c;
    perform pgqueue.save_step(job.id, job.token, n.name) from (values ('a'), ('b')) as n (name);
    execute replace(replace(how, 'HELD', job.token::text), 'id', job.id::text);
    return pg_temp.kept(job.id);
end;
$$;
select is(pg_temp.left_after(h.how), 0::bigint, 'no step is left after ' || h.how)
from (
    values
        ('select pgqueue.complete_many(array[id], array[HELD])'),
        ('select pgqueue.finish(array[id], array[HELD], ''{complete}'', ''{1}'')'),
        ('select pgqueue.cancel(id); select pgqueue.fail(id, HELD, ''e'')'),
        ('select pgqueue.release(array[id], array[HELD]); select pgqueue.cancel(id)'),
        ('select pgqueue.release(array[id], array[HELD]); select pgqueue.purge(''q'')'),
        ('select pgqueue.fail(id, HELD, ''e'', permanent => true); select pgqueue.discard(id)'),
        ('select pgqueue.fail(id, HELD, ''e'', permanent => true); select pgqueue.discard_many()')
) as h (how);
select pgqueue.configure('q', keep_dead => '1 second');
select is(
    pg_temp.left_after($$
        select pgqueue.fail(id, HELD, 'e', permanent => true);
        update pgqueue.dead_job set died_at = died_at - interval '1 hour';
        select pgqueue.maintain();
    $$),
    0::bigint, 'maintain deletes them with a dead job that has been kept for keep_dead'
);

-- Quotas

select pgqueue.enqueue('quota') as id \gset
select token from pgqueue.claim('quota', 'w') \gset
insert into pgqueue.step (job_id, saved_at, place, name, value)
select :id, now(), n, 'n' || n, '1' from generate_series(1, 9999) as n;
select is(pgqueue.save_step(:id, :token, 'n10000', '1'), '1', 'a job may have 10000 steps');
select throws_ok(
    format('select pgqueue.save_step(%s, %s, %L)', :id, :token, 'one more'), '54000', 'a job has at most 10000 steps', 'and no more'
);
select is(pgqueue.save_step(:id, :token, 'n7', '2'), '1', 'which does not keep it from looking one up');
select pgqueue.configure('quota', max_payload_bytes => 100);
delete from pgqueue.step where job_id = :id;
select throws_ok(
    format('select pgqueue.save_step(%s, %s, %L, to_jsonb(repeat(%L, 200)))', :id, :token, 'long', 'x'),
    '54000', 'the value of the step is too large for this queue', 'max_payload_bytes limits each value'
);
select is_empty('select from pgqueue.steps(null)', 'a job that is unknown has no steps');

select * from finish();
rollback;
