-- Batches: their jobs, their counts, and the one callback. test_waits.py has the races.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(50);

create function pg_temp.end_all(queue text, outcome text)
    returns bigint
    language sql
as $$
    select count(*)
    from (select array_agg(c.id) as ids, array_agg(c.token) as tokens from pgqueue.claim(queue, 'w', 1000) as c) as c
    cross join lateral pgqueue.finish(c.ids, c.tokens, array_fill(outcome, array[cardinality(c.ids)])) as f
$$;

select pgqueue.create_batch('done', '{"report": 7}', 'all done', 5, 3, '{"trace": 1}', 'acme') as id \gset
select results_eq(
    'select id, queue, kind, state, waiting, running, completed, dead, cancelled from pgqueue.batches',
    format($$ values (%s::bigint, 'done', 'all done', 'open', 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint) $$, :id),
    'a new batch is open and has no jobs'
);
select results_eq(
    'select group_key, headers from pgqueue.batches', $$ values ('acme', '{"trace": 1}'::jsonb) $$,
    'the view shows group and headers of its callback'
);
select pgqueue.enqueue('m', batch_id => :id) as a \gset
select pgqueue.enqueue_many('m', array_fill('{}'::jsonb, array[5]), batch_id => :id);
select pgqueue.enqueue_many('m', array_fill('{}'::jsonb, array[3]), unique_keys => '{a,b,a}', batch_id => :id);
select is((select waiting from pgqueue.batches), 8::bigint, 'it counts the jobs that enqueue and enqueue_many add, duplicates once');
select is((select (terms).batch_id from pgqueue.job where id = :a), :id::bigint, 'a job knows its batch');
select id, token from pgqueue.claim('m', 'w') \gset one_
select is((select running from pgqueue.batches), 1::bigint, 'it counts the jobs that run');
select pgqueue.complete(:one_id, :one_token);
select is((select completed from pgqueue.batches), 1::bigint, 'and those that completed');
select pgqueue.enqueue('m2', batch_id => :id);
select pg_temp.end_all('m2', 'reject');
select pgqueue.enqueue('m2', batch_id => :id) as c \gset
select pgqueue.cancel(:c);
select results_eq(
    'select completed, dead, cancelled from pgqueue.batches', 'values (1::bigint, 1::bigint, 1::bigint)', 'those that died, or were cancelled'
);
select is_empty($$ select from pgqueue.job where queue = 'done' $$, 'there is no callback before the end');
select pgqueue.close_batch(:id);
select is((select state from pgqueue.batches), 'closed', 'close_batch closes it');
select pg_temp.end_all('m', 'fail');
select is_empty($$ select from pgqueue.job where queue = 'done' $$, 'a job that waits for its retry has not ended');
select pgqueue.run_now(id) from pgqueue.job where queue = 'm';
select id, token from pgqueue.claim('m', 'w') \gset one_
select is(
    pgqueue.enqueue('m', batch_id => :id) > 0, true, 'a job of a batch that is closed may add others'
);
select pgqueue.release(array[:one_id], array[:one_token]);
select pg_temp.end_all('m', 'complete');
select is_empty('select from pgqueue.dependency', 'now all its jobs have ended');
select results_eq(
    $$ select kind, priority, max_attempts, group_key, headers, payload from pgqueue.job where queue = 'done' $$,
    format($$ values ('all done', 5, 3, 'acme', '{"trace": 1}'::jsonb,
        '{"report": 7, "batch": {"id": %s, "completed": 9, "dead": 1, "cancelled": 1}}'::jsonb) $$, :id),
    'the callback has been enqueued, with the counts in its payload'
);
select results_eq(
    'select state, completed, dead, cancelled, callback_id from pgqueue.batches',
    $$ select 'finished', 9::bigint, 1::bigint, 1::bigint, id from pgqueue.job where queue = 'done' $$, 'the view shows how it ended'
);
select is_empty('select from pgqueue.tally', 'the tally is summed up');
select pgqueue.close_batch(:id);
select is((select count(*) from pgqueue.job where queue = 'done'), 1::bigint, 'closing it again changes nothing');
select throws_ok(
    format($$ select pgqueue.enqueue('m', batch_id => %s) $$, :id), '55000', null, 'a finished batch accepts no more jobs'
);
select throws_ok(
    format($$ select pgqueue.enqueue_many('m', '{1}', batch_id => %s) $$, :id), '55000', null, 'nor from enqueue_many'
);

-- An empty one

select pgqueue.create_batch('empty') as id \gset
select pgqueue.close_batch(:id);
select is(
    (select payload from pgqueue.job where queue = 'empty'),
    jsonb_build_object('batch', jsonb_build_object('id', :id, 'completed', 0, 'dead', 0, 'cancelled', 0)),
    'an empty batch finishes when it is closed'
);

-- Redriven

select pgqueue.create_batch('again') as id \gset
select pgqueue.enqueue('r', batch_id => :id) as a \gset
select pgqueue.enqueue('r2', batch_id => :id) as b \gset
select pgqueue.close_batch(:id);
select pg_temp.end_all('r', 'reject');
select pgqueue.redrive_job(:a);
select results_eq(
    format('select waiting, dead from pgqueue.batches where id = %s', :id), 'values (2::bigint, 0::bigint)',
    'a job that is redriven before its batch finishes belongs to it again'
);
select is((select batch_id from pgqueue.jobs where id = :b), :id::bigint, 'the view jobs says to which batch a job belongs');
select pg_temp.end_all('r', 'reject');
select results_eq(
    format('select id, queue, kind, state, attempt from pgqueue.batch_jobs where batch_id = %s order by id', :id),
    format($$ values (%s::bigint, 'r', 'r', 'dead', 1), (%s, 'r2', 'r2', 'ready', 0) $$, :a, :b),
    'batch_jobs has the jobs of a batch that wait, run or are dead'
);
select pgqueue.redrive_job(:a);
select pg_temp.end_all('r2', 'complete');
select is_empty($$ select from pgqueue.job where queue = 'again' $$, 'which waits for it');
select pg_temp.end_all('r', 'reject');
select is(
    (select payload -> 'batch' ->> 'dead' from pgqueue.job where queue = 'again'), '1', 'and counts how it ends then'
);
select results_eq(
    format('select id, state from pgqueue.batch_jobs where batch_id = %s', :id), format($$ values (%s::bigint, 'dead') $$, :a),
    'and the dead ones of a batch that has finished'
);
select pgqueue.redrive_job(:a);
select pg_temp.end_all('r', 'complete');
select is((select count(*) from pgqueue.job where queue = 'again'), 1::bigint, 'redriven later it runs outside the batch');

-- A job of a batch may wait for others of it

select pgqueue.create_batch('chain') as id \gset
select pgqueue.enqueue('s', batch_id => :id) as a \gset
select pgqueue.enqueue('s', batch_id => :id, after => array[:a]) as b \gset
select pgqueue.close_batch(:id);
select pg_temp.end_all('s', 'reject');
select is(
    (select payload -> 'batch' from pgqueue.job where queue = 'chain'),
    jsonb_build_object('id', :id, 'completed', 0, 'dead', 1, 'cancelled', 1), 'a job that is cancelled because another died counts as cancelled'
);

-- What is refused

select throws_ok($$ select pgqueue.enqueue('m', batch_id => 0) $$, 'PQ001', null, 'a batch that does not exist is refused');
select throws_ok(
    format($$ select pgqueue.enqueue('m', after => array[%s]) $$, :id), '22023', 'after takes jobs, not batches', 'a batch is no job to wait for'
);
select throws_ok($$ select pgqueue.close_batch(null) $$, 'PQ001', null, 'close_batch refuses it, too');
select throws_ok($$ select pgqueue.create_batch('') $$, '22023', null, 'create_batch refuses a bad queue');
select throws_ok($$ select pgqueue.create_batch('q', '[]') $$, '22023', null, 'and a payload that is no object');
select throws_ok($$ select pgqueue.create_batch('q', headers => '[]') $$, '22023', null, 'and such headers');

-- A callback that cannot be enqueued

select pgqueue.configure('small', max_payload_bytes => 200);
select throws_ok(
    $$ select pgqueue.create_batch('small', jsonb_build_object('text', repeat('x', 100))) $$, '54000', null,
    'a payload that is too large with the counts is refused'
);
select pgqueue.configure('small', max_payload_bytes => 300);
select pgqueue.create_batch('small', jsonb_build_object('text', repeat('x', 100)), group_key => 'g') as id \gset
select pgqueue.enqueue('last', batch_id => :id);
select pgqueue.close_batch(:id);
select pgqueue.configure('small', max_payload_bytes => 100);
select pg_temp.end_all('last', 'complete');
select results_eq(
    'select state, completed, problem from pgqueue.batches join pgqueue.batch using (id, completed) where id = ' || :id,
    $$ values ('finished', 1::bigint, 'payload is too large for this queue') $$,
    'if the limit is lowered later, the batch still finishes'
);
select results_eq(
    format('select d.queue, d.group_key, d.error, d.attempt, d.payload -> %L ->> %L from pgqueue.dead_job as d
        join pgqueue.batch as b on b.callback_id = d.id where b.id = %s', 'batch', 'completed', :id),
    $$ values ('small', 'g', 'the callback could not be enqueued: payload is too large for this queue', 0, '1') $$,
    'and its callback is a dead job that says why'
);
select pgqueue._tie_loose_ends(1000);
select is_empty('select from pgqueue.loose_end', 'which nobody tries again and again');
select pgqueue.redrive_job(callback_id) from pgqueue.batch where id = :id;
select is(
    (select payload -> 'batch' ->> 'completed' from pgqueue.job where queue = 'small'), '1', 'until it is redriven'
);

-- Forgotten

update pgqueue.batch set finished_at = finished_at - interval '15 days' where queue = 'done';
select is((select done from pgqueue.maintain() where task = 'forget batches'), 1::bigint, 'maintain forgets a batch after 14 days');
select is_empty('select from pgqueue.loose_end', 'a single session leaves no loose ends');

-- All hints lost

set local pgqueue.lose_hints = '1';
select pgqueue.create_batch('lost') as id \gset
select pgqueue.enqueue_many('m', array_fill('{}'::jsonb, array[4]), batch_id => :id);
select pgqueue.close_batch(:id);
select id, token from pgqueue.claim('m', 'w') \gset one_
select pgqueue.complete(:one_id, :one_token);
select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('m', 'w');
select pg_temp.end_all('m', 'complete');
select is((select state from pgqueue.batches where id = :id), 'closed', 'with lose_hints the last end of a batch does not tell');
select pgqueue.create_batch('no jobs') as empty \gset
select pgqueue.close_batch(:empty);
select is((select state from pgqueue.batches where id = :empty), 'closed', 'nor does who closes one without jobs');
select is_empty('select from pgqueue.loose_end', 'and none of them leaves a loose end');
select pgqueue._tie_loose_ends(1000);
select results_eq(
    format('select state, completed, dead from pgqueue.batches where id in (%s, %s) order by id', :id, :empty),
    $$ values ('finished', 3::bigint, 1::bigint), ('finished', 0, 0) $$,
    'the sweep finds both, and counts what died'
);
select is(
    (select count(*) from pgqueue.job where queue in ('lost', 'no jobs')), 2::bigint, 'each has its callback'
);
set local pgqueue.lose_hints = '';

-- Purged in several parts

select pgqueue.create_batch('purged', kind => 'first') as first \gset
select pgqueue.create_batch('purged', kind => 'second') as second \gset
select pgqueue.enqueue_many('large', array_fill('{}'::jsonb, array[12000]), batch_id => :first);
select pgqueue.enqueue_many('large', array_fill('{}'::jsonb, array[3]), batch_id => :second);
select pgqueue.close_batch(b.id) from unnest(array[:first, :second]) as b (id);
select is(pgqueue.purge('large'), 12003::bigint, 'purge deletes more jobs than it handles at once');
select results_eq(
    $$ select kind, state, completed, dead, cancelled from pgqueue.batches where queue = 'purged' order by id $$,
    $$ values ('first', 'finished', 0::bigint, 0::bigint, 12000::bigint), ('second', 'finished', 0, 0, 3) $$,
    'and all of a batch count as cancelled'
);

-- Purged when the batch has finished

select pgqueue.create_batch('late') as id \gset
select pgqueue.enqueue('redriven', batch_id => :id);
select pgqueue.close_batch(:id);
select pgqueue.fail(c.id, c.token, 'e', permanent => true) from pgqueue.claim('redriven', 'w') as c;
select pgqueue.redrive('redriven');
select pgqueue.purge('redriven');
select is_empty('select from pgqueue.tally', 'a purged job of a batch that has finished is not counted');

-- Whose last job has the key of the next, and will not run

select pgqueue.create_batch('over') as id \gset
select pgqueue.enqueue('keyed', unique_key => 'k', batch_id => :id, expires_at => now() + interval '1 day');
select pgqueue.close_batch(:id);
update pgqueue.job set terms.expires_at = now() - interval '1 second' where queue = 'keyed';
select throws_ok(
    format('select pgqueue.enqueue(''keyed'', unique_key => ''k'', batch_id => %s)', :id), '55000', null,
    'an enqueue joins no batch that it has finished itself'
);

select throws_ok('select pgqueue.close_batch(-3)', 'PQ001', null, 'no batch has an id below 0');

select * from finish();
rollback;
