-- Settings as they are read: which calls look at them at all, and what is in force.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(16);

-- What has been used

create function pg_temp.marks(call text) returns text language plpgsql as $$
declare
    before bigint := setval('pgqueue.used_seq', 0) + setval('pgqueue.awaited_seq', 0);
    marks text;
begin
    execute call;
    select concat_ws(
        ', ',
        case when u.used < 0 then 'claims look around' end,
        case when u.used >> (hashtext('u') & 255) % 63 & 1 = 1 then 'calls read settings' end,
        case when u.used = -1 or u.used = 9223372036854775807 then 'of all queues' end,
        case when u.awaited = pgqueue._settings_bits('u') then 'completions look for who waits' end
    )
    into marks
    from (
        select pg_sequence_last_value('pgqueue.used_seq'::regclass), pg_sequence_last_value('pgqueue.awaited_seq'::regclass)
    ) as u (used, awaited);
    raise exception using errcode = 'PQ999', message = 'undone';
exception when sqlstate 'PQ999' then
    return marks;
end;
$$;
select is(
    pg_temp.marks(c.call), c.feature,
    format('what is looked for from then on: %s: %s', coalesce(nullif(c.feature, ''), 'nothing'), c.call)
)
from (values
    ('', 'select pgqueue.complete(c.id, c.token) from pgqueue.enqueue(''u'') as e, pgqueue.claim(''u'', ''w'') as c'),
    ('claims look around', 'select pgqueue.schedule(''u'', ''u'', every => ''1 hour'')'),
    ('claims look around', 'select pgqueue.create_batch(''u'')'),
    ('calls read settings', 'select pgqueue.configure(''u'', max_attempts => 3)'),
    ('calls read settings', 'select pgqueue.configure(''u'', keep_runs => 3)'),
    ('calls read settings', 'select pgqueue.configure(''u'', kind => ''k'', max_running => 3)'),
    ('calls read settings, of all queues', 'select pgqueue.configure(null, max_attempts => 3)'),
    ('calls read settings', 'select pgqueue.pause(''u'')'),
    ('claims look around, completions look for who waits', 'select pgqueue.enqueue(''u'', after => array[pgqueue.enqueue(''u'')])'),
    ('completions look for who waits', 'select pgqueue._await(pgqueue.enqueue(''u''))')
) as c (feature, call);
select setval('pgqueue.used_seq', 0);
select pgqueue._mark(4), pgqueue._mark(1), pgqueue._mark(4);
select is(
    pg_sequence_last_value('pgqueue.used_seq'::regclass), 5::bigint, 'bits are set beside those that are'
);

-- What is in force

select pgqueue.configure(null, max_attempts => 7);
select pgqueue.configure('own', lease => '1 minute');
select results_eq(
    $$ select n.name, s.max_attempts, s.lease, s.has_narrow
       from (values ('own'), ('other')) as n (name) cross join lateral pgqueue._in_force(n.name) as s $$,
    $$ values ('own', 7, interval '1 minute', false), ('other', 7, '30 seconds', false) $$,
    'a queue has its own settings and, beside them, those of all queues'
);
select pgqueue.configure('own', kind => 'k', max_attempts => 2);
select is((pgqueue._in_force('own', 'k')).max_attempts, 2, 'those of a kind come first');
select ok((pgqueue._in_force('own')).has_narrow, 'a queue knows that one of its kinds has its own');

-- What is paused: the same by one list of all groups as by looking up each

create function pg_temp.verdicts(is_paused boolean) returns text language sql as $$
    select string_agg(
        format(
            '%s%s', pgqueue._is_wanted(j.kind, j.key, null, pgqueue._without(p.paused, '{f}'))::int,
            pgqueue._is_group_paused(j.key, p.paused)::int
        ), ' '
    )
    from (values ('a', null), ('b', null), ('a', 'g'), ('b', 'g'), ('a', 'h'), ('f', 'g')) as j (kind, key)
    -- A kind that is at its cap is left out, whatever is said of the group.
    cross join lateral (
        select pgqueue._paused('q', is_paused) as paused offset 0
    ) as p
$$;
-- Each scope of a kind, a group or both, in the queue or in all, says: paused, not paused, or nothing.
create function pg_temp.all_verdicts() returns setof text language plpgsql as $$
begin
    for n in 0 .. 3 ^ 6 - 1 by 5 loop
        insert into pgqueue.queue (name, kind, group_key, paused)
        select s.name, s.kind, s.key, n / (3 ^ s.place)::int % 3 = 1
        from (values
            (0, '', 'a', ''), (1, '', '', 'g'), (2, '', 'a', 'g'), (3, 'q', 'a', ''), (4, 'q', '', 'g'), (5, 'q', 'a', 'g')
        ) as s (place, name, kind, key)
        where n / (3 ^ s.place)::int % 3 < 2;
        return next pg_temp.verdicts(n % 2 = 1);
        delete from pgqueue.queue where 'g' = group_key or 'a' = kind;
    end loop;
end;
$$;
-- If nothing differs from the queue, no claim goes on to ask.
insert into pgqueue.queue (name, kind, group_key, paused) values ('q', '', 'differs', true), ('q', '', 'differs too', false);
create temp table verdict as select v.said, row_number() over () as place from pg_temp.all_verdicts() as v (said);
select is(
    pg_temp.verdicts(false), '10 10 10 10 10 00', 'nothing is paused; one kind is at its cap'
);
insert into pgqueue.queue (name, kind, group_key, paused)
select 'q', '', 'many ' || n, n % 2 = 0 from generate_series(1, 101) as n;
select results_eq(
    'select v.said from pg_temp.all_verdicts() as v (said)', 'select v.said from verdict as v order by v.place',
    'the same is wanted if too many groups are paused for one list'
);

select * from finish();
rollback;
