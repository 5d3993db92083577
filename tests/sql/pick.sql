-- The pick: lanes, and the mark that keeps a claim flat. Plans and buffers: test_plans.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(17);

create function pg_temp.mark(queue text) returns pgqueue._mark
    language sql
as $$ select nullif(current_setting('pgqueue.mark_' || (hashtext($1) & 63), true), '')::pgqueue._mark $$;

select pgqueue.enqueue_many('small', (select array_agg(to_jsonb(n)) from generate_series(1, 200) as n));
select count(*) from pgqueue.claim('small', 'w', 50);
select is(pg_temp.mark('small'), null, 'a queue that is cheap to walk gets no mark');

-- 20,000 running jobs in front of ten that wait
select pgqueue.enqueue_many('deep', (select array_agg(to_jsonb(n)) from generate_series(1, 20010) as n));
select count(*) from pgqueue.claim('deep', 'w', 10000);
select count(*) from pgqueue.claim('deep', 'w', 10000);
select is((select c.payload::int from pgqueue.claim('deep', 'w') as c), 20001, 'a long walk ends at the right job');
select is((pg_temp.mark('deep')).lanes, array[0], 'and leaves a mark');
select cmp_ok((pg_temp.mark('deep')).valid_until, '<', clock_timestamp() + interval '1 minute', 'which is not valid for long');
select is((select c.payload::int from pgqueue.claim('deep', 'w') as c), 20002, 'from which the next claim goes on');
select pgqueue.enqueue('deep', '"urgent"', priority => 5);
select is(
    (select array_agg(c.payload #>> '{}') from pgqueue.claim('deep', 'w', 20) as c),
    array['20003', '20004', '20005', '20006', '20007', '20008', '20009', '20010'],
    'while it is valid, a lane that it does not know is not looked for'
) from (select set_config(
    'pgqueue.mark_' || (hashtext('deep') & 63),
    (select row(m.queue, m.kinds, clock_timestamp() + interval '59 seconds', true, m.lanes, m.run_ats, m.ids)::pgqueue._mark::text
     from pg_temp.mark('deep') as m), false
)) as still_valid;
select set_config(
    'pgqueue.mark_' || (hashtext('deep') & 63),
    (select row(m.queue, m.kinds, clock_timestamp(), true, m.lanes, m.run_ats, m.ids)::pgqueue._mark::text
     from pg_temp.mark('deep') as m), false
);
select is(
    (select c.payload #>> '{}' from pgqueue.claim('deep', 'w') as c), 'urgent',
    'the next full walk finds it'
);
select pgqueue.enqueue('deep', '"next"', priority => 5);
select is(
    (select c.payload #>> '{}' from pgqueue.claim('deep', 'w') as c), 'next',
    'and others of that lane'
);
select count(*) from pgqueue.claim('deep', 'w');
select is((pg_temp.mark('deep')).lanes, array[5, 0], 'a mark remembers lanes that are empty');
select id, token from pgqueue.job where payload = '7' and queue = 'deep' \gset
select pgqueue.release(array[:id], array[:token]);
select is(
    (select c.payload::int from pgqueue.claim('deep', 'w') as c), 7,
    'what a session itself reopens behind its mark it finds at once'
);
select set_config('pgqueue.mark_' || (hashtext('deep') & 63), '', false);
select is(pg_temp.mark('deep'), null, 'a mark can be lost');
select pgqueue.enqueue('deep', '"after"');
select is(
    (select c.payload #>> '{}' from pgqueue.claim('deep', 'w') as c), 'after',
    'and nothing is lost with it'
);
select set_config('pgqueue.mark_' || (hashtext('other') & 63), (select pg_temp.mark('deep')::text), false);
select pgqueue.enqueue('other', '1');
select isnt_empty($$ select pgqueue.claim('other', 'w') $$, 'a mark of another queue is no mark');

-- Two names with one hash share the index entries of a lane, and nothing else.
select is(hashtext('15601'), hashtext('180514'), 'two queues may have one hash');
select pgqueue.enqueue('15601', '1', priority => 3);
select pgqueue.enqueue('180514', '2', run_at => clock_timestamp() + interval '1 hour');
select is(
    (select array_agg(c.queue) from pgqueue.claim('180514', 'w', 5) as c), null,
    'a claim takes no job of the other'
);
select is(pgqueue.next_due(array['15601']), null, 'nor is one waited for');
select is(
    array[pgqueue.purge('180514'), (select count(*) from pgqueue.claim('15601', 'w', 5))],
    array[1, 1]::bigint[], 'nor purged'
);

select * from finish();
rollback;
