-- How attempts that did not complete end: the delay before the next, and the errors a job keeps.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(9);

select is_empty(
    $$ select a.attempt, d.delay
       from unnest(array[1, 2, 3, 10, 11, 31, 100, 2147483647]) as a (attempt),
           lateral (select least(3600, 5 * 2.0 ^ least(a.attempt - 1, 40)) as full_delay) as f,
           lateral (select extract(epoch from pgqueue._retry_delay(a.attempt, '5 s', '1 hour')) as delay
                    from generate_series(1, 50)) as d
       where d.delay not between f.full_delay / 2 - 0.001 and f.full_delay + 0.001 $$,
    'the delay doubles with each attempt up to retry_cap, and lies between half and all of that'
);
select is(
    (select count(distinct pgqueue._retry_delay(1, '5 s', '1 hour')) > 40 from generate_series(1, 50)),
    true, 'the delay is random, so that jobs that failed together do not come back together'
);

select pgqueue.enqueue('errors', max_attempts => 100) as id \gset
do $$
declare
    j pgqueue.job;
begin
    for n in 1..15 loop
        j := pgqueue.claim('errors', 'w');
        perform pgqueue.fail(j.id, j.token, 'error ' || n, '0');
    end loop;
end;
$$;
select is(
    (select array_agg(e ->> 'error') from pgqueue.job as j, jsonb_array_elements(j.errors) as e where j.id = :id),
    (select array_agg('error ' || n) from generate_series(6, 15) as n),
    'a job keeps its last ten errors'
);

-- A reason to put a job off is one of the ten; the next one, or an error, replaces it.
select errors from pgqueue.job where id = :id \gset
select id, token from pgqueue.claim('errors', 'w') \gset
select pgqueue.finish(array[:id], array[:token], '{release}', '{no handler}');
select id, token from pgqueue.claim('errors', 'w') \gset
select pgqueue.finish(array[:id], array[:token], '{release}', '{no connection}');
select results_eq(
    format($$ select errors - -1 = %L, errors -> -1 ->> 'error', errors -> -1 -> 'attempt' from pgqueue.job where id = %s $$,
        (:'errors'::jsonb - 0)::text, :id),
    $$ values (true, 'no connection', 'null'::jsonb) $$,
    'a job keeps why it was put off last'
);
select id, token from pgqueue.claim('errors', 'w') \gset
select pgqueue.release(array[:id], array[:token]);
select is(
    (select errors from pgqueue.job where id = :id), :'errors'::jsonb - 0,
    'a job that was released without a reason has none'
);

-- Expired leases

select pgqueue.enqueue('alone') as id \gset
select pgqueue.claim('alone', 'slow');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select pgqueue.claim('alone', 'quick');
select is(
    (select last_error from pgqueue.jobs where id = :id),
    'the lease expired: worker slow stopped extending it (its only expired lease)',
    'an expired lease is an error of the job and names the worker'
);
select pgqueue.enqueue_many('victims', array['1', '2', '3', '4']::jsonb[]);
select pgqueue.claim('victims', 'many', 3), pgqueue.claim('victims', 'single');
update pgqueue.job set lease_expires_at = now() - interval '1 second' where queue = 'victims';
select count(*) from pgqueue.claim('victims', 'w');
select results_eq(
    $$ select error, count(*) from pgqueue.run where queue = 'victims' group by 1 order by 1 $$,
    $$ values
        ('the lease expired: worker many stopped extending it (one of its 3 leases that expired together)', 3::bigint),
        ('the lease expired: worker single stopped extending it (its only expired lease)', 1) $$,
    'the error of an expired lease says how many leases of that worker expired with it'
);
select is(
    (select count(*) from pgqueue.jobs where queue = 'victims' and state = 'ready'), 3::bigint,
    'a claim makes every job with an expired lease ready, also those it does not take'
);

-- What follows an end

create temporary table ended (how text, job_id bigint, batch_id bigint, waiter_id bigint);
create function pg_temp.end_by(how text, is_running boolean, call text)
    returns void
    language plpgsql
as $$
declare
    batch_id bigint := pgqueue.create_batch('done');
    predecessor bigint := pgqueue.enqueue('before');
    job pgqueue.job;
begin
    perform pgqueue.configure(how, group_limit => 1, max_running => 1);
    job.id := pgqueue.enqueue(
        how, group_key => 'g', batch_id => batch_id, max_attempts => 1, expires_at => now() + interval '1 hour',
        after => case when how = 'chain' then array[predecessor] end
    );
    insert into ended
    select how, job.id, batch_id, pgqueue.enqueue('after', after => array[job.id]);
    perform pgqueue.close_batch(batch_id);
    -- Nobody takes a permit that his own transaction has made.
    update pgqueue.permit set token = -1 where token < 0;
    if is_running then
        job := pgqueue.claim(how, 'w');
        if not exists (select from pgqueue.permit as p where p.job_id = job.id having count(*) = 2) then
            raise 'a job that runs holds two permits';
        end if;
    end if;
    execute call using job.id, job.token, how, predecessor;
end;
$$;
create function pg_temp.expire(job_id bigint)
    returns void
    language sql
as $$
    update pgqueue.job as j
    set lease_expires_at = j.lease_expires_at - interval '1 day',
        terms = row(now() - interval '1 minute', (j.terms).run_at, (j.terms).batch_id, null)
    where j.id = $1
$$;
select pg_temp.end_by(e.how, e.is_running, e.call) from (values
    ('complete', true, 'select pgqueue.complete($1, $2)'),
    ('complete_many', true, 'select pgqueue.complete_many(array[$1], array[$2])'),
    ('finish', true, $$select pgqueue.finish(array[$1], array[$2], '{complete}', '{1}')$$),
    ('fail', true, $$select pgqueue.fail($1, $2, 'e', permanent => true)$$),
    ('reject', true, $$select pgqueue.finish(array[$1], array[$2], '{reject}', '{e}')$$),
    ('reap', true, 'select pgqueue.reap() from pg_temp.expire($1)'),
    ('claim', true, $$select pgqueue.claim($3, 'w') from pg_temp.expire($1)$$),
    ('sweep', true, $$select pgqueue._sweep_permits() from pg_temp.expire($1), generate_series(1, 20)$$),
    ('release', true, 'select pgqueue.release(array[$1], array[$2]) from pgqueue.cancel($1)'),
    ('cancel', false, 'select pgqueue.cancel($1)'),
    ('cancel_many', false, 'select pgqueue.cancel_many($3)'),
    ('late', false, 'select pgqueue.reap() from pg_temp.expire($1)'),
    ('purge', false, 'select pgqueue.purge($3)'),
    ('chain', false, 'select pgqueue.cancel($4)')
) as e (how, is_running, call);
select results_eq(
    $$ select
           e.how, (select count(*) from pgqueue.permit as p where p.job_id is not null and p.queue = e.how),
           b.completed, b.dead, b.cancelled, (select state from pgqueue.status(e.waiter_id)),
           b.callback_id is not null
       from ended as e join pgqueue.batch as b on b.id = e.batch_id $$,
    $$ select v.how, 0::bigint, v.completed::bigint, v.dead::bigint, v.cancelled::bigint, v.waiter, true
       from (values
           ('complete', 1, 0, 0, 'ready'), ('complete_many', 1, 0, 0, 'ready'), ('finish', 1, 0, 0, 'ready'),
           ('fail', 0, 1, 0, 'cancelled'), ('reject', 0, 1, 0, 'cancelled'), ('reap', 0, 1, 0, 'cancelled'),
           ('claim', 0, 1, 0, 'cancelled'), ('sweep', 0, 1, 0, 'cancelled'),
           ('release', 0, 0, 1, 'cancelled'), ('cancel', 0, 0, 1, 'cancelled'), ('cancel_many', 0, 0, 1, 'cancelled'),
           ('late', 0, 0, 1, 'cancelled'), ('purge', 0, 0, 1, 'cancelled'), ('chain', 0, 0, 1, 'cancelled')
       ) as v (how, completed, dead, cancelled, waiter) $$,
    'whatever ends a job, its permits are free, its batch finishes, and what waits for it goes on or is cancelled'
);

select * from finish();
rollback;
