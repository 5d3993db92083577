-- Trigger: enqueue_row makes a job from each change of a table.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(43);

create table shop (
    "id" int primary key, customer text, status text default 'new', gone int, "Odd name" int,
    twice int generated always as ("id" * 2) stored
);
alter table shop drop column gone;
-- The arguments of a trigger, and what it then enqueues: each payload, and the options of the job.
create function pg_temp.fire(arguments text, change text, how text default 'insert or update or delete on shop for each row')
    returns setof text
    language plpgsql
as $$
begin
    truncate shop, pgqueue.job;
    insert into shop (id, customer) values (1, 'ann'), (2, 'bob');
    execute format('create trigger changed after %s execute function pgqueue.enqueue_row(%s)', how, arguments);
    execute change;
    drop trigger changed on shop;
    return query select j.payload::text from pgqueue.job as j order by j.id;
end;
$$;

-- For each row

select results_eq(
    $$ select pg_temp.fire('''queue=q''', 'insert into shop (id) values (3)')::jsonb $$,
    $$ values ('{"table": "public.shop", "op": "INSERT", "old": null, "new":
        {"id": 3, "customer": null, "status": "new", "Odd name": null, "twice": 6}}'::jsonb) $$,
    'an insert enqueues the new row, generated columns included'
);
select results_eq(
    $$ select j ->> 'op', j -> 'old' ->> 'customer', j -> 'new' ->> 'customer'
       from pg_temp.fire('''queue=q''', 'update shop set customer = id; delete from shop where id = 1') as f,
           lateral (select f::jsonb) as x (j) $$,
    $$ values ('UPDATE', 'ann', '1'), ('UPDATE', 'bob', '2'), ('DELETE', '1', null) $$,
    'an update enqueues the old and the new row, a delete the old one'
);
select results_eq(
    $$ select pg_temp.fire('''queue=q'', ''columns=id, Odd name''', 'update shop set "Odd name" = 1 where id = 1')::jsonb -> 'new' $$,
    $$ values ('{"id": 1, "Odd name": 1}'::jsonb) $$, 'a payload has only the columns that are named'
);
select is(
    (select array_agg(f::jsonb -> 'new' -> 'id') from pg_temp.fire(
        '''queue=q'', ''when_changed=status,Odd name''',
        'update shop set customer = ''cid''; update shop set status = null where id = 2; update shop set "Odd name" = 3'
    ) as f),
    '{2,1,2}'::jsonb[], 'an update that changes no column of when_changed enqueues nothing'
);
select pg_temp.fire(
    '''queue=mails'', ''kind=changed'', ''unique_key=id'', ''group_key=customer'', ''on_duplicate=replace'', '
    || '''priority=-5'', ''run_in=5 minutes''',
    'update shop set status = 1; update shop set status = 2 where id = 1; update shop set customer = '''' where id = 2'
);
select results_eq(
    $$ select j.queue, j.kind, j.unique_key, j.group_key, j.priority, j.run_at > clock_timestamp() + interval '4 minutes',
           j.payload -> 'new' ->> 'status'
       from pgqueue.job as j order by j.id $$,
    $$ values ('mails', 'changed', '1', 'ann', -5, true, '2'), ('mails', 'changed', '2', 'bob', -5, true, '1') $$,
    'the options of the job are arguments, its keys columns'
);
select pg_temp.fire(
    '''queue=q'', ''unique_key=customer'', ''group_key=customer''',
    'insert into shop (id, customer) values (7, ''''), (8, null)'
);
select results_eq(
    $$ select count(*), count(j.unique_key), count(j.group_key) from pgqueue.job as j $$,
    $$ values (2::bigint, 0::bigint, 0::bigint) $$, 'a column that is empty or null is no key'
);
select is(
    (select count(*) from pg_temp.fire(
        '''queue=q''', 'insert into shop (id) values (1), (9) on conflict (id) do update set customer = null'
    )), 2::bigint, 'an upsert enqueues what it does to each row'
);
savepoint before;
select pg_temp.fire('''queue=undone''', 'delete from shop');
rollback to before;
select is_empty($$ select from pgqueue.job where queue = 'undone' $$, 'a job is rolled back with the change');

-- For each statement

select results_eq(
    $$ select f::jsonb -> 'new' ->> 'id' from pg_temp.fire('''queue=q''',
           'insert into shop (id) select generate_series(3, 20004)',
           'insert on shop referencing new table as new_rows for each statement') as f $$,
    $$ select n::text from generate_series(3, 20004) as n $$, 'a statement enqueues all its rows, in their order'
);
select results_eq(
    $$ select f::jsonb from pg_temp.fire('''queue=q'', ''columns=id,status'', ''key=id'', ''when_changed=status''',
           'update shop set customer = 1, status = case id when 2 then ''paid'' else status end',
           'update on shop referencing old table as old_rows new table as new_rows for each statement') as f $$,
    $$ values ('{"table": "public.shop", "op": "UPDATE", "old": {"id": 2, "status": "new"}, "new": {"id": 2, "status": "paid"}}'::jsonb) $$,
    'with a key the old and the new row of an update are told together'
);
select results_eq(
    $$ select f::jsonb -> 'old', f::jsonb -> 'new' -> 'id' from pg_temp.fire('''queue=q''', 'update shop set customer = 1',
           'update on shop referencing new table as new_rows for each statement') as f $$,
    $$ values ('null'::jsonb, '1'::jsonb), ('null', '2') $$, 'without a key only the new row of an update is told'
);
select results_eq(
    $$ select f::jsonb -> 'old' -> 'id', f::jsonb -> 'new' from pg_temp.fire('''queue=q'', ''unique_key=id''', 'delete from shop',
           'delete on shop referencing old table as old_rows for each statement') as f $$,
    $$ values ('1'::jsonb, 'null'::jsonb), ('2', 'null') $$, 'a delete tells the old rows'
);
select is_empty(
    $$ select pg_temp.fire('''queue=q''', 'delete from shop where false',
           'delete on shop referencing old table as old_rows for each statement') $$,
    'a statement that changes no row enqueues nothing'
);
truncate shop, pgqueue.job;
create trigger large after insert on shop referencing new table as new_rows
    for each statement execute function pgqueue.enqueue_row('queue=large');
insert into shop (id, customer) select n, repeat('x', 2000000) from generate_series(1, 20) as n;
drop trigger large on shop;
select results_eq(
    $$ select count(*), count(distinct enqueued_at) from pgqueue.job $$, $$ values (20::bigint, 3::bigint) $$,
    'large rows are enqueued in small batches, for no array has more than 1 GB'
);
create table other (id text, note text);
create trigger changed after insert on other referencing new table as new_rows
    for each statement execute function pgqueue.enqueue_row('queue=other');
create trigger changed after insert on shop referencing new table as new_rows
    for each statement execute function pgqueue.enqueue_row('queue=shop');
insert into shop (id) values (70);
insert into other values ('x', 'y');
alter table other drop column note, add column added int default 5;
insert into other values ('z');
select results_eq(
    $$ select payload -> 'new' from pgqueue.job where queue = 'other' order by id $$,
    $$ values ('{"id": "x", "note": "y"}'::jsonb), ('{"id": "z", "added": 5}') $$,
    'one session may fire for tables of different columns, also when these change'
);
drop trigger changed on shop;

-- Partitions

create table part (id int, day int) partition by list (day);
create table part_1 partition of part for values in (1);
create table part_2 partition of part for values in (2);
create trigger changed after insert on part for each row execute function pgqueue.enqueue_row('queue=part');
insert into part values (1, 1), (2, 2);
select is(
    (select array_agg(distinct payload ->> 'table') from pgqueue.job where queue = 'part'), '{public.part}',
    'a row of a partition is one of its table'
);

-- Types and names of any kind: the payload is what to_jsonb makes of the row.

create type mood as enum ('fine', 'so so', 'a,b', '"', '\', '(")\"",', '', 'null', '{x}', E'two\nlines');
create type span as range (subtype = float8, multirange_type_name = spans);
create domain address as text check (value <> '');
create domain ages as int[];
create type place as (lat int, name text);
-- With names that stand in the queries of enqueue_row, too.
create table odd (
    id int primary key, gone int, mood mood, r address, prepared mood[], texts text, addresses address[],
    "new,x" span, options spans, spans span[], "row" place, ages ages, change mood generated always as (mood) stored
);
alter table odd drop column gone;
create table odd_1 () inherits (odd);
create function pg_temp.fill()
    returns void
    language sql
as $$
    insert into odd
    select row_number() over (), m.mood, '(",\' || m.mood, array[m.mood, null, 'null', ''], '("",)' || m.mood,
        array['"', '\'], span(1, 0.1 + 2), spans(span(1, 2), span(3, 4)), array[span(1, 2), 'empty'], row(1, m.mood)::place,
        array[1, 2]
    from unnest(enum_range(null::mood)) as m (mood);
    insert into odd (id) values (90);
    insert into odd (id, prepared, spans) values (91, '[0:1][2:3]={{fine,"so so"},{"\"",NULL}}', '{}');
$$;
create trigger each after insert or update or delete on odd
    for each row execute function pgqueue.enqueue_row('queue=odd', 'unique_key=id', 'group_key=mood', 'on_duplicate=replace');
select pg_temp.fill();
select set_eq(
    $$ select j.unique_key, j.group_key, j.payload -> 'new' from pgqueue.job as j where j.queue = 'odd' $$,
    $$ select o.id::text, nullif(o.mood::text, ''), to_jsonb(o.*) from odd as o $$,
    'a payload has what to_jsonb makes of a row of any types and names, and a key too'
);
drop trigger each on odd;
truncate odd;
delete from pgqueue.job;
create trigger all_new after insert on odd referencing new table as new_rows
    for each statement execute function pgqueue.enqueue_row('queue=odd');
create trigger all_changed after update on odd referencing old table as old_rows new table as new_rows
    for each statement execute function pgqueue.enqueue_row('queue=changed', 'key=id', 'when_changed=mood,prepared', 'columns=id,mood');
create trigger all_gone after delete on odd referencing old table as old_rows
    for each statement execute function pgqueue.enqueue_row('queue=gone');
select pg_temp.fill();
update odd set mood = 'fine', texts = 'x';
create temporary table kept as select o.id, to_jsonb(o.*) as row from odd as o;
delete from odd;
select set_eq(
    $$ select j.payload from pgqueue.job as j where j.queue = 'gone' $$,
    $$ select jsonb_build_object('table', 'public.odd', 'op', 'DELETE', 'old', k.row, 'new', null) from kept as k $$,
    'so it is for each statement'
);
select set_eq(
    $$ select j.payload -> 'new' -> 'prepared' from pgqueue.job as j where j.queue = 'odd' $$,
    $$ select k.row -> 'prepared' from kept as k $$,
    'for inserted rows too'
);
select results_eq(
    $$ select (j.payload -> 'old' ->> 'id')::int, j.payload -> 'old' ->> 'mood', j.payload -> 'new' ->> 'mood'
       from pgqueue.job as j where j.queue = 'changed' order by 1 $$,
    $$ select n.place::int, n.mood::text, 'fine' from unnest(enum_range(null::mood)) with ordinality as n (mood, place) where n.mood <> 'fine'
       union all select 90, null, 'fine' union all select 91, null, 'fine' order by 1 $$,
    'when_changed tells one value of an enum from another'
);

-- The session of the writer

create table kinds (at timestamptz, day date, span interval, bytes bytea, price money, ratio float8, during tstzrange);
create trigger changed after insert on kinds for each row
    execute function pgqueue.enqueue_row('queue=kinds', 'unique_key=at', 'on_duplicate=error');
create function pg_temp.write()
    returns void
    language sql
as $$
    insert into kinds values (
        '2026-02-03 04:05+00', '2026-02-03', '1 day -00:00:01', 'x', 1.5, 1::float8 / 3,
        '[2026-02-03 00:00+00,)'
    )
$$;
select pg_temp.write();
set local timezone = 'Asia/Tokyo';
set local datestyle = 'German, DMY';
set local intervalstyle = 'sql_standard';
set local bytea_output = 'escape';
set local extra_float_digits = -5;
set local quote_all_identifiers = on;
select throws_ok('select pg_temp.write()', '23505', null, 'a unique_key does not depend on the settings of the writer');
alter table kinds disable trigger changed;
create trigger again after insert on kinds for each row execute function pgqueue.enqueue_row('queue=kinds');
select pg_temp.write();
select is(
    (select count(distinct payload) from pgqueue.job where queue = 'kinds'), 1::bigint,
    'nor does a payload'
);
set local timezone = 'UTC';
select is(
    array[current_setting('datestyle'), current_setting('intervalstyle'), current_setting('quote_all_identifiers')],
    array['German, DMY', 'sql_standard', 'on'], 'and the writer keeps them'
);

-- Refused

select throws_ok(format('select pg_temp.fire(%L, %L, %L)', c.arguments, 'insert into shop (id) values (9)', coalesce(
    c.how, 'insert on shop for each row'
)), '22023', c.message, 'refused: ' || c.arguments || coalesce(' ' || c.how, ''))
from (values
    ('', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''queue=''', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''kind=k''', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''queue=q'', ''columns=''', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''queue=q'', ''when_changed=''', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''queue=q'', ''colour=red''', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''emails''', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''queue=q'', ''queue=r''', null, 'enqueue_row needs a queue, and every argument must be a known name, once, with a value'),
    ('''queue=q'', ''columns=id,nothing''', null, 'the table lacks a column that an argument of enqueue_row names'),
    ('''queue=q'', ''unique_key=nothing''', null, 'the table lacks a column that an argument of enqueue_row names'),
    ('''queue=q'', ''priority=high''', null, 'priority must be -100 to 100'),
    ('''queue=q'', ''priority=101''', null, 'priority must be -100 to 100'),
    ('''queue=q'', ''run_in=soon''', null, 'run_in must be an interval from 0 to 1000 years'),
    ('''queue=q'', ''run_in=-1 s''', null, 'run_in must be an interval from 0 to 1000 years'),
    ('''queue=q'', ''on_duplicate=merge''', null, 'on_duplicate must be skip, replace, postpone or error'),
    ('''queue=q''', 'insert on shop for each statement', 'enqueue_row cannot find the rows of the statement'),
    ('''queue=q''', 'insert on shop referencing new table as fresh for each statement',
        'enqueue_row cannot find the rows of the statement')
) as c (arguments, how, message);
select throws_ok(
    $$ select pg_temp.fire('''queue=q'', ''key=customer''', 'update shop set customer = ''same''; update shop set status = 1',
        'update on shop referencing old table as old_rows new table as new_rows for each statement') $$,
    '22023', 'the key of a trigger must identify its rows', 'refused: a key that is not one'
);
select throws_ok(
    $$ select pg_temp.fire('''queue=q''', 'truncate shop', 'truncate on shop') $$,
    '22023', 'enqueue_row needs a trigger AFTER INSERT, UPDATE or DELETE', 'refused: a trigger for TRUNCATE'
);
create trigger early before insert on other for each row execute function pgqueue.enqueue_row('queue=q');
select throws_ok(
    $$ insert into other values ('a') $$, '22023', 'enqueue_row needs a trigger AFTER INSERT, UPDATE or DELETE',
    'refused: a trigger before the change'
);

select * from finish();
rollback;
