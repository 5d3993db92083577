-- Which lanes claims look at, and where they keep what they know of them. Positions are in pick.sql.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(24);

-- Which queues have other lanes than 0

create function pg_temp.marks(call text) returns boolean
    language plpgsql
as $$
declare
    before bigint := setval('pgqueue.lanes_seq', 0);
begin
    execute 'select pgqueue.' || call;
    return pg_sequence_last_value('pgqueue.lanes_seq') = 1::bigint << (hashtext('q') & 63);
end;
$$;
select is(pg_temp.marks(c.call), c.is_marked, format('%s: claims look at %s', c.call, c.lanes))
from (
    select c.*, case when c.is_marked then 'other lanes' else 'lane 0' end as lanes
    from (values
        (false, 'enqueue(''q'')'),
        (false, 'enqueue(''q'', priority => 0, run_at => now() - interval ''1 hour'')'),
        (false, 'enqueue_many(''q'', ''{1,2}''::jsonb[])'),
        (true, 'enqueue(''q'', priority => 1)'),
        (true, 'enqueue(''q'', priority => -1, run_at => now() + interval ''1 hour'')'),
        (true, 'enqueue(''q'', group_key => ''g'')'),
        (true, 'enqueue_many(''q'', ''{1,2}''::jsonb[], priority => 1)'),
        (true, 'enqueue_many(''q'', ''{1,2}''::jsonb[], group_keys => ''{a,null}'')'),
        (true, 'reprioritize(pgqueue.enqueue(''q''), 1)'),
        (true, 'close_batch(pgqueue.create_batch(''q'', priority => 1))')
    ) as c (is_marked, call)
) as c;
select setval('pgqueue.lanes_seq', 0);

-- Rows that were copied without the sequences

insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)
select now() - interval '1 minute', now(), p, 20, 'copied', 'k', '{}' from unnest(array[0, 0, 5]) as p;
select is((select c.priority from pgqueue.claim('copied', 'w') as c), 0, 'what claims do not know of waits');
select pgqueue.maintain();
select is((select c.priority from pgqueue.claim('copied', 'w') as c), 5, 'until maintain has seen it');
insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)
select now() - interval '1 minute', now(), p, 20, 'copied', 'k', '{}' from unnest(array[-5, 5]) as p;
select setval('pgqueue.lanes_seq', 0);
select is(
    (select array_agg(c.priority) from pgqueue.claim('copied', 'w', 9) as c), '{0}', 'or until lane 0 is empty'
);
select is(
    (select array_agg(c.priority) from pgqueue.claim('copied', 'w', 9) as c), '{5,-5}', 'when the next claim sees it'
);

-- The list of a queue

create function pg_temp.noted(queue text) returns int[]
    language sql
as $$
    select array_agg(l.lane order by l.lane)
    from unnest(pgqueue._noted_lanes($1, clock_timestamp())) as l (lane)
$$;
select pgqueue._use_lanes('listed');
select is(pg_temp.noted('listed'), null, 'a queue may have no list');
select pgqueue._list_lane('listed', 5);
select is(pg_temp.noted('listed'), null, 'and does not get one by a hint');
create function pg_temp.lists(lanes int[]) returns int[]
    language sql
as $$
    -- A list that is valid for a while.
    select pgqueue._note_lanes('listed', lanes, clock_timestamp() - interval '3 seconds');
    select pg_temp.noted('listed');
$$;
select is(
    array[pg_temp.lists('{}')::text, pg_temp.lists('{0}')::text, pg_temp.lists('{0,1000}')::text, pg_temp.lists('{0,-100,1100}')::text],
    '{"{0}","{0}","{0,1000}","{-100,0,1100}"}', 'a list has lane 0, and others, of groups as well'
);
select is(pg_temp.lists('{1,2,3,4,5,1006}'), '{0,1,2,3,4,5,1006}', 'it has room for seven lanes');
select is(pg_temp.lists('{1,2,3,4,5,1006,7,-1}'), '{-1000,1,2,3,4,5,7,1006}', 'of more it has the highest');
select pgqueue._list_lane('listed', -2), pgqueue._list_lane('listed', 4);
select is(pg_temp.noted('listed'), '{-1000,1,2,3,4,5,7,1006}', 'a lower lane that appears is among the others');
select pgqueue._list_lane('listed', 1002);
select is(pg_temp.noted('listed'), '{-1000,2,3,4,5,7,1002,1006}', 'a higher one takes the place of the lowest');

-- Against the definition: more lanes than a list has room for, which come and go

create function pg_temp.differ() returns text
    language plpgsql
as $$
declare
    most int;
    expected int[];
    found int[];
    job pgqueue.job;
begin
    perform setseed(0.5);
    for n in 1 .. 300 loop
        for m in 1 .. 1 + random() * 3 loop
            perform pgqueue.enqueue(
                'any', priority => (random() * 24 - 12)::int,
                group_key => case when random() < 0.3 then 'g' || (random() * 3)::int end
            );
        end loop;
        most := (array[1, 1, 2, 7])[1 + n % 4];
        expected := array(
            select j.priority from pgqueue.job as j
            where j.queue = 'any' and j.lease_expires_at is null order by j.priority desc limit most
        );
        found := array(select c.priority from pgqueue.claim('any', 'w', most) as c);
        if found <> expected then
            return format('claim %s: %s, not %s', n, found, expected);
        end if;
        delete from pgqueue.job as j where j.lease_expires_at is not null and random() < 0.5;
    end loop;
    return null;
end;
$$;
select is(pg_temp.differ(), null, 'claims take the highest priorities, however many there are');

-- Records

select setval(c.oid, 0) from pg_class as c
where c.relnamespace = 'pgqueue'::regnamespace and c.relname like '\_cell\_%';
create function pg_temp.take(tag bigint, seconds int) returns int
    language plpgsql
as $$
declare
    own record := pgqueue._record(tag << 20 | 50);
begin
    perform setval(
        ('pgqueue._cell_' || own.record)::regclass,
        own.tag | pgqueue._since_2020(now() + seconds * interval '1 second')
    );
    return own.record;
end;
$$;
select is(
    array[pg_temp.take(1, 30), pg_temp.take(2, 20), pg_temp.take(1, 30), pg_temp.take(2, 20)], '{4,6,4,6}',
    'two lanes of one hash have a record each'
);
select is(
    array[pg_temp.take(3, 40), pg_temp.take(2, 50), pg_temp.take(3, 40)], '{6,4,6}',
    'another takes the one that runs out first'
);

select * from finish();
rollback;
