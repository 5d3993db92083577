-- The sweep: what waits for others, or counts them, is found though nobody told of it.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(7);

create function pg_temp.complete(id bigint) returns void language sql as $$
    select pgqueue.complete(c.id, c.token) from pgqueue.claim('q', 'w') as c where c.id = $1
$$;
create function pg_temp.waits() returns bigint language sql as $$
    select count(*) from pgqueue.jobs where queue = 'waits' and state = 'blocked'
$$;

set local pgqueue.lose_hints = 1;
select pgqueue.enqueue('q') as first \gset
select pgqueue.enqueue('waits', after => array[:first]) from generate_series(1, 30);
-- As what another transaction does while the job ends: the tie is there, the end has not seen it.
create temporary table ties as select * from pgqueue.dependency;
delete from pgqueue.dependency;
select pg_temp.complete(:first);
insert into pgqueue.dependency select * from ties;
delete from pgqueue.loose_end;
select is(pg_temp.waits(), 30::bigint, 'jobs may wait for one that has ended, and nothing tells of it');
select is(pgqueue._sweep(10), 10, 'a sweep looks at no more than it is asked to');
select is(pg_temp.waits(), 20::bigint, 'and lets those go on that wait for nothing');
select is(pgqueue._sweep(10), 10, 'the next one continues behind it');
select pgqueue._sweep(100);
select is(pg_temp.waits(), 0::bigint, 'until all have been looked at');

select pgqueue.create_batch('callback') as batch \gset
select pgqueue.enqueue('q', batch_id => :batch) as member \gset
select pgqueue.close_batch(:batch);
select pg_temp.complete(:member);
delete from pgqueue.loose_end;
update pgqueue.batch set finished_at = null, callback_id = null where id = :batch;
select pgqueue._sweep(100) + pgqueue._sweep(100);
select isnt(
    (select finished_at from pgqueue.batch where id = :batch), null, 'a batch whose last end nobody saw finishes'
);

select ok(
    not pgqueue._is_unseen((pg_current_xact_id()::text::bigint + 1000000000)::text::xid),
    'a row of an earlier round of transaction ids, whose xmin lies in the future, is one that others see'
);

select * from finish();
rollback;
