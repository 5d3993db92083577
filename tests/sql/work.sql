-- Handlers in SQL: which functions configure takes, and what work asks about them. work itself commits: test_work.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(17);

create function handle(payload jsonb) returns void language sql as '';
create function handle(job pgqueue.job) returns jsonb language sql as 'select job.payload';
create schema "Other Place";
create function "Other Place"."it's" (jsonb) returns jsonb language sql as 'select $1';
create function many(jsonb) returns setof jsonb language sql as 'select $1';
create function two(jsonb, int default 1) returns void language sql as '';
create procedure proc(jsonb) language sql as '';
create aggregate all_of(jsonb) (sfunc = jsonb_concat, stype = jsonb);

select lives_ok(format('select pgqueue.configure(''wh'', handler => %L)', h.handler), 'a handler may be ' || h.handler)
from (values ('handle(jsonb)'), ('handle(pgqueue.job)'), ('"Other Place"."it''s"(jsonb)')) as h (handler);
select throws_ok(
    format('select pgqueue.configure(''wh'', handler => %L)', h.handler), h.state, null, 'a handler is not ' || h.handler
)
from (
    values
        ('many(jsonb)', '22023'), ('two(jsonb, int)', '22023'), ('proc(jsonb)', '22023'), ('all_of(jsonb)', '22023'),
        ('jsonb_pretty(jsonb)', '22023'), ('handle(int)', '42883'), ('1', '22023')
) as h (handler, state);
select throws_ok(
    $$ select pgqueue.configure('wh', handler => 'handle(jsonb)', group_key => 'g') $$, '22023', null,
    'a group has no handler of its own'
);

-- Which kinds, and how each is called.

select is(
    (select array[h.problem[1], h.kinds::text] from pgqueue._handled('wn', null) as h),
    array['queue "wn" has no handler', null], 'a queue without handlers gives work nothing to do'
);
select pgqueue.configure('wn', kind => 'a', handler => 'handle(jsonb)');
select pgqueue.configure(null, kind => 'b', handler => 'handle(pgqueue.job)');
select pgqueue.configure('else', kind => 'c', handler => 'handle(jsonb)');
select set_eq(
    $$ select unnest(h.kinds) from pgqueue._handled('wn', null) as h $$, array['a', 'b'],
    'work claims the kinds of a queue that have handlers, also those set for all queues'
);
select is(
    (select h.kinds from pgqueue._handled('wh', null) as h), null, 'with a handler of the queue it claims all kinds'
);
create temporary table called as
select k.kind, h.*
from (values ('wn', 'a'), ('wn', 'b'), ('wh', 'c')) as k (queue, kind)
cross join lateral (select pgqueue.enqueue(k.queue, kind => k.kind) offset 0) as e
cross join lateral (select c.* from pgqueue.claim(k.queue, 'w', kinds => array[k.kind]) as c offset 0) as c
cross join lateral pgqueue._hold(c.id, c.token) as h;
select results_eq(
    $$ select c.kind, c.is_held, c.call from called as c order by c.kind $$,
    $$ values ('a', true, 'select null::pg_catalog.jsonb from public.handle(($1).payload)'),
           ('b', true, 'select * from public.handle($1)'),
           ('c', true, 'select * from "Other Place"."it''s"(($1).payload)') $$,
    'each kind has its handler, or that of the queue, called by its whole name'
);
select is((pgqueue._hold(0, 0)).is_held, false, 'a lease that is lost is not held');
drop function "Other Place"."it's";
select results_eq(
    $$ select h.handler, h.call from pgqueue.job as j cross join lateral pgqueue._hold(j.id, j.token) as h
       where j.queue = 'wh' $$,
    $$ values ('"Other Place"."it''s"(jsonb)', null::text) $$, 'a handler that was dropped is known by its name'
);

select * from finish();
rollback;
