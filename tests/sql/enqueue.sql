-- enqueue and enqueue_many: the job they make, the payloads they refuse, and unique keys.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(30);

-- Defaults

select pgqueue.enqueue('emails') as id \gset
select results_eq(
    format(
        $$ select queue, kind, payload, priority, attempt, max_attempts, unique_key, group_key,
               headers, errors, run_at = enqueued_at from pgqueue.job where id = %s $$, :id
    ),
    $$ values ('emails', 'emails', '{}'::jsonb, 0, 0, 20, null::text, null::text,
               null::jsonb, '[]'::jsonb, true) $$,
    'enqueue needs only a queue'
);
select is(
    (select state from pgqueue.jobs where id = :id), 'ready',
    'a job is ready in the transaction that enqueued it'
);
select pgqueue.enqueue(
    'emails', '{"to": "ada"}', kind => 'welcome', priority => 7,
    run_at => '2100-01-01 00:00+00', max_attempts => 3, unique_key => 'u', group_key => 'g',
    headers => '{"trace": 1}'
) as id \gset
select results_eq(
    format(
        $$ select kind, payload, priority, run_at, max_attempts, unique_key, group_key, headers
           from pgqueue.job where id = %s $$, :id
    ),
    $$ values ('welcome', '{"to": "ada"}'::jsonb, 7, '2100-01-01 00:00+00'::timestamptz, 3, 'u', 'g',
               '{"trace": 1}'::jsonb) $$,
    'enqueue stores every option'
);
select is(
    (select state from pgqueue.jobs where id = :id), 'scheduled',
    'a job whose run_at lies ahead is scheduled'
);
select pgqueue.enqueue(
    'nulls', null, null, null, null, null, null, null, null, null
) as id \gset
select is(
    (select payload from pgqueue.job where id = :id), '{}'::jsonb,
    'a null option means its default'
);
select pgqueue.configure('modest', max_attempts => 2);
select pgqueue.enqueue('modest');
select is(
    (select max_attempts from pgqueue.job where queue = 'modest'), 2,
    'a job has the max_attempts setting of its queue'
);

-- Any JSON

create temporary table example as
select * from unnest(array[
    'null', 'true', '"text"', '[]', '1180591620717411303424', '1e-300',
    '{"a": {"b": [1, null, "\u00e9\ud83d\ude00"]}}', repeat('[', 5000) || repeat(']', 5000),
    to_json(repeat('x', 2000000))
]::jsonb[]) with ordinality as e (payload, place);
select pgqueue.enqueue('json', e.payload) from example as e order by e.place;
select is(
    (select array_agg(md5(j.payload::text) order by j.id) from pgqueue.job as j where j.queue = 'json'),
    (select array_agg(md5(e.payload::text) order by e.place) from example as e),
    'a payload can be any JSON and is stored unchanged'
);

-- Payloads that are refused

select throws_ok(
    format('select pgqueue.enqueue(''q'', %L)', b.payload), b.code, null,
    format('a payload that Postgres cannot store is refused: %s', b.payload)
)
from (values
    ('{"a": "\u0000"}', '22P05'), ('{"a": "\ud800"}', '22P02'), ('{"a": NaN}', '22P02')
) as b (payload, code);
select pgqueue.configure('small', max_payload_bytes => 100);
select throws_ok(
    $$ select pgqueue.enqueue('small', to_jsonb(repeat('x', 200))) $$, '54000', null,
    'a payload above max_payload_bytes is refused'
);
select throws_ok(
    $$ select pgqueue.enqueue_many('small', array['1', to_jsonb(repeat('x', 200))]) $$, '54000', null,
    'enqueue_many refuses the call when one payload is above max_payload_bytes'
);
select lives_ok(
    $$ select pgqueue.enqueue('small', to_jsonb(repeat('x', 50))) $$,
    'a payload within max_payload_bytes is accepted'
);

-- Unique keys

select pgqueue.enqueue('keys', '1', run_at => '2100-01-01', unique_key => 'k') as id \gset
select is(
    pgqueue.enqueue('keys', '2', unique_key => 'k'), :id::bigint,
    'a duplicate is skipped by default, and the id is that of the job that exists'
);
select is(
    pgqueue.enqueue('keys', '3', priority => 9, run_at => '2099-01-01', unique_key => 'k', on_duplicate => 'replace'),
    :id::bigint, 'replace returns the id of the job that exists'
);
select results_eq(
    format('select payload, priority, run_at from pgqueue.job where id = %s', :id),
    $$ values ('3'::jsonb, 9, '2099-01-01'::timestamptz) $$,
    'replace sets payload, priority and run_at of the job that exists'
);
select pgqueue.enqueue('keys', '4', run_at => '2098-01-01', unique_key => 'k', on_duplicate => 'postpone');
select is(
    (select run_at from pgqueue.job where id = :id), '2099-01-01'::timestamptz,
    'postpone does not make a job due earlier'
);
select pgqueue.enqueue('keys', '4', run_at => '2101-01-01', unique_key => 'k', on_duplicate => 'postpone');
select results_eq(
    format('select payload, priority, run_at from pgqueue.job where id = %s', :id),
    $$ values ('3'::jsonb, 9, '2101-01-01'::timestamptz) $$,
    'postpone sets the later run_at and nothing else'
);
select throws_ok(
    $$ select pgqueue.enqueue('keys', unique_key => 'k', on_duplicate => 'error') $$, '23505', null,
    'on_duplicate error raises 23505 for a duplicate'
);
select isnt(
    pgqueue.enqueue('other', unique_key => 'k'), :id::bigint,
    'two queues can have jobs with the same unique key'
);
select pgqueue.enqueue('busy', '"old"', unique_key => 'k') as id \gset
select pgqueue.claim('busy', 'w');
select is(
    pgqueue.enqueue('busy', '"new"', unique_key => 'k', on_duplicate => 'replace'), :id::bigint,
    'a running job keeps its unique key'
);
select is(
    (select payload from pgqueue.job where id = :id), '"old"'::jsonb,
    'replace does not change the payload of a running job'
);

-- Many

select results_eq(
    $$ select p.payload from pgqueue.enqueue_many('many', array['1', '2', null, '4']::jsonb[])
           with ordinality as m (id, place)
       join unnest(array['1', '2', '{}', '4']::jsonb[]) with ordinality as p (payload, place) using (place)
       order by m.id $$,
    $$ values ('1'::jsonb), ('2'), ('{}'), ('4') $$,
    'enqueue_many returns the ids in the order of the payloads'
);
select is(
    (select array_agg(payload order by id) from pgqueue.job where queue = 'many'),
    array['1', '2', '{}', '4']::jsonb[],
    'enqueue_many stores one job for each payload'
);
select is_empty(
    $$ select pgqueue.enqueue_many('many', '{}') $$,
    'enqueue_many of no payloads returns no id'
);
select array_agg(m.id) as ids from pgqueue.enqueue_many(
    'twice', array['1', '2', '3', '4']::jsonb[],
    unique_keys => array['b', 'a', 'b', null], group_keys => array['g', null, 'g', 'h']
) as m (id) \gset
select is(
    (:'ids'::bigint[])[3], (:'ids'::bigint[])[1],
    'two payloads with the same unique key in one call make one job'
);
select is(
    (select array_agg(row(payload, unique_key, group_key)::text order by id) from pgqueue.job where queue = 'twice'),
    array['(1,b,g)', '(2,a,)', '(4,,h)'],
    'enqueue_many gives each job its own unique key and group key'
);
select array_agg(m.id) as again from pgqueue.enqueue_many(
    'twice', array['9', '8']::jsonb[], unique_keys => array['a', 'c'], on_duplicate => 'replace'
) as m (id) \gset
select is(
    (:'again'::bigint[])[1], (:'ids'::bigint[])[2],
    'enqueue_many returns the id of the job that has the unique key already'
);
select is(
    (select payload from pgqueue.job where queue = 'twice' and unique_key = 'a'), '9'::jsonb,
    'enqueue_many replaces a duplicate where on_duplicate says so'
);
select throws_ok(
    $$ select pgqueue.enqueue_many(
           'twice', array['9', '8']::jsonb[], unique_keys => array['d', 'a'], on_duplicate => 'error'
       ) $$, '23505', null,
    'enqueue_many with on_duplicate error refuses the call for one duplicate'
);

select * from finish();
rollback;
