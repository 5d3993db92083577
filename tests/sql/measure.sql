-- Measuring: what the views count, beside a plain count, and how errors are compared.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(10);

select pgqueue.enqueue_many('m', array_fill('1'::jsonb, array[30]), group_keys => array(
    select case when n % 3 = 0 then 'g' || n end from generate_series(1, 30) as n
));
select pgqueue.enqueue('m', priority => 5, run_at => now() + interval '1 hour');
select pgqueue.enqueue('n', after => array[pgqueue.enqueue('n')]);
select count(*) from pgqueue.claim('m', 'w-1', 3);
select count(*) from pgqueue.claim('m', 'w-2', 2);
update pgqueue.job set lease_expires_at = now() - interval '1 s' where worker = 'w-2';
select results_eq(
    $$ select c.queue, c.ready, c.scheduled, c.running, c.expired, c.blocked, c.is_estimate
       from pgqueue._count_jobs() as c order by c.queue $$,
    $$ values ('m', 25::bigint, 1::bigint, 3::bigint, 2::bigint, 0::bigint, false), ('n', 1, 0, 0, 0, 1, false) $$,
    'the jobs of a small table are counted, by state'
);
select is(
    (select c.workers from pgqueue._count_jobs() as c where c.queue = 'm'), '{w-1}', 'and so are the workers whose leases go on'
);
select id, token from pgqueue.job where worker = 'w-1' order by id limit 1 \gset
select pgqueue.fail(:id, :token, 'e', '0');
select token from pgqueue.claim('m', 'w-1', 100) as c where c.id = :id \gset
select pgqueue.complete(:id, :token);
select is((pgqueue._last_run(:id)).outcome, 'completed', 'the last run of a job is how it ended');
select is((pgqueue._last_run(:id)).attempt, 2, 'whatever came before');
select is(
    pgqueue._error_like(e.one), pgqueue._error_like(e.other), format('the same error: %s', e.one)
)
from (values
    ('ValueError: no user 4711', 'ValueError: no user 12'),
    ('KeyError: ''ada''', 'KeyError: ''bob'''),
    ('HTTPError: 500 for https://example.org/a?b=1', 'HTTPError: 503 for https://example.com/'),
    ('Timeout of 10.0.0.1:5432', 'Timeout of 10.0.0.27:6432')
) as e (one, other);
select isnt(
    pgqueue._error_like('ValueError: no user'), pgqueue._error_like('ValueError: no order'), 'another error is another'
);
select is(pgqueue._error_like('ORA_00060'), E'ORA\\_00060', 'a code alone fits no other error');

select * from finish();
rollback;
