-- What holds for every room: the version, the names and the priorities that are accepted.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(15);

select is(
    pgqueue.version(), (select extversion from pg_extension where extname = 'pgqueue'),
    'version returns the version of the extension'
);
select lives_ok(
    format(
        'select pgqueue.enqueue(%1$L, kind => %1$L, unique_key => %1$L, group_key => %1$L);
         select pgqueue.claim(%1$L, %1$L)',
        n.name
    ),
    format('%s can name a queue, a kind, a key, a group and a worker', to_json(left(n.name, 20)))
)
from (values
    ('x'), (' leading'), ('Camel "Quoted"'), ('%s %I'), ('; drop table job;'), ('été 😀'),
    (e'tab\tnewline\n'), ('*'), ('null'), (repeat('y', 200)), (repeat('é', 100))
) as n (name);
select is(
    (select count(*) from pgqueue.jobs as j
     where j.queue = j.kind and j.queue = j.unique_key and j.queue = j.group_key and j.queue = j.worker),
    11::bigint,
    'the views show every name unchanged'
);
select throws_ok(
    format('select pgqueue.enqueue(''q'', priority => %s)', p.priority), '22023', null,
    format('a priority of %s is refused', p.priority)
)
from (values (101), (-101)) as p (priority);

select * from finish();
rollback;
