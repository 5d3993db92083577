-- What an argument must be: which names are accepted, and what is refused with 22023.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(92);

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

select throws_ok('select pgqueue.' || b.call, '22023', null, format('a bad argument is refused: %s', b.call))
from (values
    ($$configure('')$$),
    ($$configure('s', lease => '0')$$),
    ($$configure('s', lease => '1 year')$$),
    ($$configure('s', max_attempts => 0)$$),
    ($$configure('s', retry_base => '-1 s')$$),
    ($$configure('s', retry_cap => '2 years')$$),
    ($$configure('s', keep_runs => 15)$$),
    ($$configure('s', keep_runs => -1)$$),
    ($$configure('s', max_payload_bytes => 0)$$),
    ($$enqueue(null)$$),
    ($$enqueue('')$$),
    ($$enqueue(repeat('x', 201))$$),
    ($$enqueue(repeat('é', 101))$$),
    ($$enqueue('q', kind => '')$$),
    ($$enqueue('q', kind => repeat('x', 201))$$),
    ($$enqueue('q', unique_key => '')$$),
    ($$enqueue('q', unique_key => repeat('x', 201))$$),
    ($$enqueue('q', group_key => '')$$),
    ($$enqueue('q', run_at => 'infinity')$$),
    ($$enqueue('q', run_at => '-infinity')$$),
    ($$enqueue('q', run_at => '10000-01-01')$$),
    ($$enqueue('q', run_at => '0044-03-15 BC')$$),
    ($$enqueue('q', max_attempts => 0)$$),
    ($$enqueue('q', max_attempts => -1)$$),
    ($$enqueue('q', on_duplicate => 'ignore')$$),
    ($$enqueue('q', headers => '[]')$$),
    ($$enqueue('q', headers => 'null')$$),
    ($$enqueue('q', priority => 101)$$),
    ($$enqueue('q', priority => -101)$$),
    ($$enqueue_many(null, array['1'::jsonb])$$),
    ($$enqueue_many('q', null)$$),
    ($$enqueue_many('q', array[array['1'::jsonb]])$$),
    ($$enqueue_many('q', array['1'::jsonb], unique_keys => array['a', 'b'])$$),
    ($$enqueue_many('q', array['1'::jsonb], group_keys => array[]::text[])$$),
    ($$enqueue_many('q', array['1'::jsonb], unique_keys => array[''])$$),
    ($$enqueue_many('q', array['1'::jsonb], group_keys => array[repeat('x', 201)])$$),
    ($$enqueue_many('q', array['1'::jsonb], max_attempts => 0)$$),
    ($$rest(null)$$),
    ($$rest('{}')$$),
    ($$rest(array['a', null])$$),
    ($$claim(null, 'w')$$),
    ($$claim('', 'w')$$),
    ($$claim('q', null)$$),
    ($$claim('q', '')$$),
    ($$claim('q', repeat('w', 201))$$),
    ($$claim('q', 'w', 0)$$),
    ($$claim('q', 'w', -1)$$),
    ($$claim('q', 'w', 10001)$$),
    ($$claim('q', 'w', lease => '0')$$),
    ($$claim('q', 'w', lease => '-1 second')$$),
    ($$claim('q', 'w', lease => '31 days')$$),
    ($$claim_from(null, 'w')$$),
    ($$claim_from('{}', 'w')$$),
    ($$claim_from(array['q'], 'w', 0)$$),
    ($$claim_from(array['q'], 'w', weights => array[0])$$),
    ($$claim_from(array['q'], 'w', limits => array[1, 2])$$),
    ($$extend(array[1], array[1, 2])$$),
    ($$extend(array[1], null)$$),
    ($$extend(array[1], array[1], '-1 second')$$),
    ($$complete_many(array[1, 2], array[1])$$),
    ($$complete_many(array[1], array[1], array['1', '2']::jsonb[])$$),
    ($$fail(1, 1, 'e', retry_in => '-1 second')$$),
    ($$release(array[1], array[1, 2])$$),
    ($$release(array[1], array[1], 'infinity')$$),
    ($$finish(array[1], array[1], array['done'])$$),
    ($$finish(array[1], array[1], array[null])$$),
    ($$finish(array[1], array[1], null)$$),
    ($$finish(array[1], array[1, 2], array['fail'])$$),
    ($$finish(array[1], array[1], array['fail'], array['a', 'b'])$$),
    ($$finish(array[1], array[1], array['fail'], null, array[interval '-1 s'])$$),
    ($$reprioritize(1, -101)$$),
    ($$cancel_many(max_jobs => 0)$$),
    ($$redrive(max_jobs => 0)$$),
    ($$discard_many(max_jobs => 0)$$),
    ($$reap(0)$$)
) as b (call);
-- What no client could read, since Postgres makes no text of 1 GB: few bytes, but many digits
create temp table long as
select to_jsonb(array_fill(1e131071, array[4200])) as value, jsonb_build_object('h', array_fill(1e131071, array[4200])) as object;
select throws_like(f.call, '%is too long as text', 'too long as text: ' || f.call)
from (
    values
        ($$select pgqueue.enqueue('q', value) from long$$),
        ($$select pgqueue.enqueue('q', headers => object) from long$$),
        ($$select pgqueue.enqueue_many('q', array['1', value, '{}']) from long$$)
) as f (call);
select lives_ok(
    $$select pgqueue.enqueue_many('long', array[to_jsonb(repeat('x', 100000))])$$,
    'a large one that is not too long is accepted'
);
select is(
    (select count(*) from pgqueue.job where queue = 'q'), 0::bigint, 'a call with a bad argument stores no job'
);

select * from finish();
rollback;
