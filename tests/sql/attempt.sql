-- How attempts that did not complete end: the delay before the next, and the errors a job keeps.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(6);

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

select * from finish();
rollback;
