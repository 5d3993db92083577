-- Settings as they are read: which calls look at them at all, and what is in force.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(14);

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

select * from finish();
rollback;
