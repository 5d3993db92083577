-- Leases: extend prolongs them, and only the claim that holds one, by job id and token, can end the attempt.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(17);

-- A lease that was lost

select pgqueue.enqueue('fence') as id \gset
select token from pgqueue.claim('fence', 'slow') \gset
select results_eq(
    format('select * from pgqueue.extend(array[%s, %s, 0], array[0, %s, 0], ''1 hour'')', :id, :id, :token),
    format('values (%s::bigint, ''lost''), (%s, ''held''), (0, ''lost'')', :id, :id),
    'extend returns a status for each id, in the order given'
);
select is(
    (select lease_left > interval '59 minutes' from pgqueue.running where id = :id), true,
    'extend moves the end of the lease'
);
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select is(
    (select status from pgqueue.extend(array[:id], array[:token])), 'held',
    'an expired lease can be extended until another claim takes the job'
);
update pgqueue.job set lease_expires_at = now() - interval '1 second' where id = :id;
select token as new_token from pgqueue.claim('fence', 'quick') \gset
select isnt(
    :new_token::bigint, :token::bigint, 'a job whose lease expired is claimed under a new token'
);
select is(
    (select attempt from pgqueue.job where id = :id), 2, 'an attempt whose lease expired is counted'
);
select throws_ok(
    format(b.call, :id, :token), 'PQ002', null, format('a worker that lost its lease gets PQ002 from: %s', b.call)
)
from (values
    ('select pgqueue.complete(%s, %s)'), ('select pgqueue.fail(%s, %s, ''late'')'),
    ('select pgqueue.complete(%s, null)'), ('select pgqueue.complete(null, %2$s)')
) as b (call);
select is_empty(
    format(b.call, :id, :token), format('a worker that lost its lease gets no id from: %s', b.call)
)
from (values
    ('select pgqueue.complete_many(array[%s]::bigint[], array[%s]::bigint[])'),
    ('select pgqueue.release(array[%s]::bigint[], array[%s]::bigint[])')
) as b (call);
select is(
    (select token from pgqueue.job where id = :id), :new_token::bigint,
    'a worker that lost its lease cannot end the attempt of the worker that has the job now'
);
select results_eq(
    format('select attempt, worker, outcome from pgqueue.run where job_id = %s', :id),
    $$ values (1, 'slow', 'expired') $$,
    'an attempt whose lease expired is a run'
);

-- A lease that is extended

select pgqueue.enqueue('beat') as id \gset
select token, lease_expires_at from pgqueue.claim('beat', 'w', lease => '10 minutes') \gset
select is(
    (select status from pgqueue.extend(array[:id], array[:token])), 'held', 'extend works without a lease length'
);
select is(
    (select lease_expires_at from pgqueue.job where id = :id), :'lease_expires_at'::timestamptz,
    'extend without a lease length does not shorten a longer lease'
);
select pgqueue.extend(array[:id], array[:token], '1 minute');
select cmp_ok(
    (select lease_expires_at from pgqueue.job where id = :id), '<', :'lease_expires_at'::timestamptz,
    'extend with a lease length sets it, even when that is shorter'
);
select is_empty($$ select pgqueue.extend('{}', '{}') $$, 'extend of no job returns no row');

select * from finish();
rollback;
