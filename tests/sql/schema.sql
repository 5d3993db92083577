-- The tables: their ring, their room for HOT updates, and what they refuse without a function's help.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(11);

select has_table('pgqueue'::name, t.name, format('the table %s exists', t.name))
from unnest(array['job', 'dead_job', 'run', 'queue', 'recent_key']::name[]) as t (name);

select is(
    (select count(*) from pg_inherits as i where i.inhparent = 'pgqueue.run'::regclass),
    16::bigint,
    'run is a ring of 16 tables'
);
select ok(
    (select c.reloptions @> array['fillfactor=45'] from pg_class as c where c.oid = 'pgqueue.job'::regclass),
    'more than half of each page of job is free for HOT updates'
);
select is_empty(
    $$ select a.attname
       from pg_index as i
       join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = any (i.indkey)
       where i.indrelid = 'pgqueue.job'::regclass and a.attname in (
           'token', 'attempt', 'worker', 'claimed_at', 'lease_expires_at',
           'cancelled_at', 'cancel_reason', 'progress'
       ) $$,
    'no column that claim, extend, cancel or progress changes is in an index of job'
);
select throws_ok(
    'insert into pgqueue.job (id) values (1)', '428C9', null,
    'an insert into job cannot choose the id'
);
select throws_ok(
    $$ insert into pgqueue.queue (name, lease) values ('q', '-1 s') $$, '23514', null,
    'the table queue refuses a negative lease'
);
select throws_ok(
    $$ insert into pgqueue.queue (name, keep_runs) values ('q', 15) $$, '23514', null,
    'the table queue refuses to keep runs for more days than the ring has tables'
);

select * from finish();
rollback;
