-- enqueue and enqueue_many: the job they make, the payloads they refuse, and unique keys.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(59);

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
    'nulls', null, null, null, null, null, null, null, null, null, null
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
create temporary table compressed as select to_jsonb(repeat('x', 100000)) as payload;
select pgqueue.configure('small', max_payload_bytes => 50000);
select throws_ok(
    $$ select pgqueue.enqueue('small', c.payload) from compressed as c where pg_column_size(c.payload) < 50000 $$, '54000', null,
    'also one that is compressed in the table from which it comes'
);
select pgqueue.configure('small', max_payload_bytes => 100);
select lives_ok(
    $$ select pgqueue.enqueue('small', headers => jsonb_build_object('text', repeat('x', 200))) $$,
    'headers may be larger'
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
select pgqueue.enqueue('lost', unique_key => 'k', max_attempts => 1);
select count(*) from pgqueue.claim('lost', 'w');
update pgqueue.job set lease_expires_at = now() where queue = 'lost';
select lives_ok(
    $$ select pgqueue.enqueue('lost', unique_key => 'k', on_duplicate => 'error') $$,
    'a job whose last attempt has expired is dead, and has no key'
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

-- Keys with a window

create temporary table first_job (how text primary key, id bigint);
insert into first_job
select w.how, pgqueue.enqueue('window ' || w.how, unique_key => 'k', unique_for => '1 hour')
from unnest(array['waits', 'completed', 'dead', 'cancelled', 'purged', 'expired', 'bare']) as w (how);
select id, token from pgqueue.claim('window completed', 'w') \gset
select pgqueue.complete(:id, :token);
select id, token from pgqueue.claim('window dead', 'w') \gset
select pgqueue.fail(:id, :token, 'e', permanent => true);
select pgqueue.cancel(f.id) from first_job as f where f.how in ('cancelled', 'expired', 'bare');
select pgqueue.purge('window purged');
select results_eq(
    $$ select k.expires_at - j.enqueued_at from pgqueue.recent_key as k join pgqueue.job as j on j.id = k.job_id $$,
    $$ values ('1 hour'::interval) $$, 'the window of a key begins when its job is enqueued'
);
select is(
    pgqueue.enqueue('window ' || f.how, '"new"', unique_key => 'k', unique_for => '1 second', on_duplicate => d.how),
    f.id, format('%s: within the window of a job that %s, enqueue returns its id', d.how, f.verb)
)
from (
    select f.*, case when f.how = 'purged' then 'was purged' when f.how = 'dead' then 'is dead' else 'was ' || f.how end as verb
    from first_job as f where f.how in ('completed', 'dead', 'cancelled', 'purged')
) as f
cross join unnest(array['skip', 'replace', 'postpone']) as d (how)
where d.how = 'skip' or f.how = 'completed'
order by f.id, d.how;
select is_empty(
    $$ select from pgqueue.job where queue in ('window completed', 'window dead', 'window cancelled', 'window purged') $$,
    'within its window a key makes no second job'
);
select throws_ok(
    $$ select pgqueue.enqueue('window completed', unique_key => 'k', unique_for => '1 s', on_duplicate => 'error') $$,
    '23505', 'a job with this unique_key was enqueued within its unique_for',
    'on_duplicate error raises 23505 within the window of a job that has ended'
);
select throws_ok(
    $$ select pgqueue.enqueue('window waits', unique_key => 'k', unique_for => '1 s', on_duplicate => 'error') $$,
    '23505', null, 'on_duplicate error raises 23505 within the window of a job that waits'
);
select pgqueue.enqueue(
    'window waits', '"new"', unique_key => 'k', unique_for => '1 day', on_duplicate => 'replace',
    run_at => '2099-01-01'
);
select results_eq(
    $$ select j.id = f.id, j.payload, j.run_at, k.expires_at - j.enqueued_at
       from first_job as f, pgqueue.job as j, pgqueue.recent_key as k
       where f.how = 'waits' and j.queue = 'window waits' and k.queue = j.queue $$,
    $$ values (true, '"new"'::jsonb, '2099-01-01'::timestamptz, '1 hour'::interval) $$,
    'within its window a job that waits is replaced, and the window stays as it is'
);
update pgqueue.recent_key set expires_at = clock_timestamp() where queue = 'window expired';
select pgqueue.enqueue('window expired', unique_key => 'k', unique_for => '1 minute') as id \gset
select results_eq(
    $$ select j.id > f.id, k.job_id = j.id, k.expires_at - j.enqueued_at
       from first_job as f, pgqueue.job as j, pgqueue.recent_key as k
       where f.how = 'expired' and j.queue = 'window expired' and k.queue = j.queue $$,
    $$ values (true, true, '1 minute'::interval) $$,
    'after its window a key makes a job again, and begins another window'
);
update pgqueue.recent_key set expires_at = clock_timestamp() where queue = 'window expired';
select is(
    pgqueue.enqueue('window expired', unique_key => 'k', unique_for => '1 minute'), :id::bigint,
    'a job that waits longer than its window still has its key'
);
select is(
    (select expires_at < clock_timestamp() from pgqueue.recent_key where queue = 'window expired'), true,
    'an enqueue that adds no job begins no window'
);
select pgqueue.enqueue('window bare', unique_key => 'k') as id \gset
select isnt(
    :id::bigint, (select f.id from first_job as f where f.how = 'bare'),
    'an enqueue without unique_for asks only for jobs that wait or run, and not for windows'
);
select is(
    pgqueue.enqueue('window bare', '"new"', unique_key => 'k', unique_for => '1 s', on_duplicate => 'replace'),
    (select f.id from first_job as f where f.how = 'bare'),
    'within a window an enqueue returns the job that began it, also beside one that was enqueued without unique_for'
);
select results_eq(
    $$ select payload, unique_key from pgqueue.job where queue = 'window bare' $$, $$ values ('{}'::jsonb, 'k') $$,
    'and leaves the other one as it is'
);
select isnt(
    pgqueue.enqueue('window waits', unique_key => 'other', unique_for => '1 s'),
    pgqueue.enqueue('window other', unique_key => 'other', unique_for => '1 s'),
    'two queues can have windows of the same unique key'
);
select lives_ok(
    $$ select pgqueue.enqueue('q', unique_key => span, unique_for => span::interval) from unnest('{1 year,365 days}'::text[]) as span $$,
    'a window can last a year, also one given in days'
);
select id, token from pgqueue.claim('window expired', 'w') \gset
update pgqueue.recent_key set expires_at = 'infinity' where queue = 'window expired';
update pgqueue.job set lease_expires_at = clock_timestamp(), max_attempts = 1 where queue = 'window expired';
select is(
    pgqueue.enqueue('window expired', unique_key => 'k', unique_for => '1 minute'), :id::bigint,
    'a job that a dead worker held for its last attempt is recovered, and keeps its window'
);
select is(
    (select array_agg(id) from pgqueue.dead_job where queue = 'window expired'), array[:id::bigint],
    'and it is dead'
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

-- Keys of jobs that may not begin any more

select pgqueue.enqueue('ends', unique_key => 'k ' || h.how, expires_at => now())
from unnest('{skip,error,replace,postpone}'::text[]) as h (how);
select pgqueue.enqueue('ends', '"new"', unique_key => 'k ' || h.how, on_duplicate => h.how)
from unnest('{skip,error,replace,postpone}'::text[]) as h (how);
select results_eq(
    $$ select payload, expires_at, count(*) from pgqueue.jobs join pgqueue.job using (id) where jobs.queue = 'ends'
       group by 1, 2 $$,
    $$ values ('"new"'::jsonb, null::timestamptz, 4::bigint) $$, 'its key is free, whatever on_duplicate says'
);
create function pg_temp.ends(old timestamptz, how text, new timestamptz) returns text
    language sql
as $$
    select pgqueue.enqueue('renewed', unique_key => concat_ws(' ', $1, $2, $3), expires_at => $1);
    select pgqueue.enqueue('renewed', unique_key => concat_ws(' ', $1, $2, $3), on_duplicate => $2, expires_at => $3);
    select date_part('year', j.expires_at)::text from pgqueue.jobs as j
    where j.queue = 'renewed' and j.unique_key = concat_ws(' ', $1, $2, $3)
$$;
select results_eq(
    $$ select how, old, new, pg_temp.ends(make_date(old, 1, 1), how, make_date(new, 1, 1))
       from unnest('{skip,replace,postpone}'::text[]) as h (how)
       cross join (values (2198, 2199), (2199, 2198), (2199, null), (null, 2199)) as e (old, new)
       where how <> 'skip' or old = 2198 $$,
    $$ values ('skip', 2198, 2199, '2198'),
        ('replace', 2198, 2199, '2199'), ('replace', 2199, 2198, '2198'), ('replace', 2199, null, null),
        ('replace', null, 2199, '2199'),
        ('postpone', 2198, 2199, '2199'), ('postpone', 2199, 2198, '2199'), ('postpone', 2199, null, null),
        ('postpone', null, 2199, null) $$,
    'replace takes over expires_at, postpone takes the later one'
);
select pgqueue.enqueue(
    'renewed', unique_key => 'b', after => array[pgqueue.enqueue('first')], expires_at => '2198-01-01'
);
select pgqueue.enqueue(
    'renewed', unique_key => 'b', run_at => '2197-01-01', expires_at => '2199-01-01', on_duplicate => 'replace'
);
select results_eq(
    $$ select j.run_at, (j.terms).run_at, (j.terms).expires_at
       from pgqueue.job as j where queue = 'renewed' and unique_key = 'b' $$,
    $$ values ('infinity'::timestamptz, '2197-01-01'::timestamptz, '2199-01-01'::timestamptz) $$,
    'a blocked job that is replaced stays blocked, on the new terms'
);

-- Order

select count(*) from pgqueue.enqueue_many('order', array_fill('"before"'::jsonb, array[1000]));
select pgqueue.enqueue('order', '"one"');
select count(*) from pgqueue.enqueue_many('order', array_fill('"after"'::jsonb, array[1000]));
select is(
    (select array_agg(c.payload #>> '{}') from (select c.* from pgqueue.claim('order', 'w', 1002) as c) as c),
    array_fill('before'::text, array[1000]) || '{one,after}'::text[],
    'many jobs at once come before none that was there, and after none that came later'
);
select is((select count(*) from pgqueue.claim('order', 'w', 1000)), 999::bigint, 'and all are due');

select * from finish();
rollback;
