-- progress, status, result, await: one job, as one session sees it. What two do is in test_status.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(55);

create temporary view awaiting as
select l.objid::int as key, l.mode from pg_locks as l
where l.locktype = 'advisory' and l.classid = 7366516 and l.pid = pg_backend_pid();

-- Progress

select pgqueue.enqueue('p') as id \gset
select token from pgqueue.claim('p', 'w', lease => '1 hour') \gset
update pgqueue.job set claimed_at = clock_timestamp() - interval '100 s' where id = :id;
select pg_stat_get_xact_tuples_updated('pgqueue.job'::regclass) - pg_stat_get_xact_tuples_hot_updated('pgqueue.job'::regclass) as cold \gset
select lives_ok(format('select pgqueue.progress(%s, %s, 20, 100, %L)', :id, :token, E'reads\npages'), 'progress of a job that is held');
select is(
    pg_stat_get_xact_tuples_updated('pgqueue.job'::regclass) - pg_stat_get_xact_tuples_hot_updated('pgqueue.job'::regclass),
    :cold::bigint, 'progress is a HOT update'
);
select results_eq(
    $$ select done, total, message, round(rate, 1), time_left between '390 s' and '420 s'
       from pgqueue.running where queue = 'p' $$,
    $$ values (20::numeric, 100::numeric, 'reads', 0.2, true) $$,
    'running shows how much is done, the first line of the message, the rate, and the time left'
);
select pgqueue.progress(:id, :token, 40.5);
select results_eq(
    $$ select done, total, message, time_left from pgqueue.jobs where queue = 'p' $$,
    $$ values (40.5, null::numeric, null::text, null::interval) $$,
    'progress replaces all that was said before; without a total no time is left to tell'
);
select pgqueue.progress(:id, :token, 120, 100);
select is((select time_left from pgqueue.jobs where id = :id), interval '0', 'what has exceeded its total has no time left');
select pgqueue.progress(:id, :token, 0, 100);
select results_eq(
    $$ select rate, time_left from pgqueue.jobs where queue = 'p' $$, $$ values (0::numeric, null::interval) $$,
    'an attempt that has done nothing has no time left to show'
);
select pgqueue.progress(:id, :token, 1e-6, 1e18, repeat('long ', 1000));
select is((select length(message) from pgqueue.running where id = :id), 500, 'of a long message 500 characters are kept');
select lives_ok(
    format($$ select pgqueue.progress(%s, %s, 1, 1e18, repeat('long ', 30000000)) $$, :id, :token), 'even of one of 150 MB'
);
select is((select time_left from pgqueue.running where id = :id), null, 'an absurd total breaks no view');
select pgqueue.progress(:id, :token, 1, 1e-9);
select is((select total from pgqueue.running where id = :id), null, 'nobody has to divide by a total of zero');
update pgqueue.job set claimed_at = now() + interval '1 day' where id = :id;
select pgqueue.progress(:id, :token, 1, 2);
select is((select rate from pgqueue.running where id = :id), null, 'where the clock went back there is no rate');

select throws_ok(
    format('select pgqueue.progress(%s, %s, %s)', :id, :token, bad), '22023', null, format('progress refuses %s', bad)
)
from unnest(array['null', '-1', '''NaN''', '''infinity''', '1e19', '1, 0', '1, -1', '1, ''NaN''']) as b (bad);
select throws_ok(format('select pgqueue.progress(%s, %s, 1)', :id, :token + 1), 'PQ002', null, 'progress under another token raises PQ002');
update pgqueue.job set lease_expires_at = now() - interval '1 s' where id = :id;
select lives_ok(
    format('select pgqueue.progress(%s, %s, 1)', :id, :token), 'a lease that expired and that nobody recovered is still held'
);

select pgqueue.fail(:id, :token, 'e', retry_in => '0');
select is((select done from pgqueue.jobs where id = :id), null, 'a job that waits for its retry shows no progress');
select token from pgqueue.claim('p', 'w') \gset
select pgqueue.progress(:id, :token, 1);
select pgqueue.release(array[:id], array[:token]);
select is((select done from pgqueue.jobs where id = :id), null, 'nor does one that was released');
select token from pgqueue.claim('p', 'w') \gset
select pgqueue.progress(:id, :token, 1);
update pgqueue.job set lease_expires_at = now() - interval '1 s' where id = :id;
select is((select progress from pgqueue.claim('p', 'w')), null, 'nor one that was recovered');
select token from pgqueue.job where id = :id \gset
select pgqueue.complete(:id, :token);

-- Status and result

create function pg_temp.known(id bigint) returns text
    language sql as $$
    select concat_ws(' ', s.state, s.queue, s.kind, s.attempt, coalesce(s.max_attempts::text, '-'),
        coalesce(s.worker, '-'), s.done, s.result, split_part(s.last_error, E'\n', 1),
        case when s.finished_at is not null then 'finished' end)
    from pgqueue.status(id) as s
$$;

select pgqueue.enqueue('s', kind => 'k', max_attempts => 2) as id \gset
select is(pg_temp.known(:id), 'ready s k 0 2 -', 'status of a job that waits');
select token from pgqueue.claim('s', 'w') \gset
select pgqueue.progress(:id, :token, 3);
select is(pg_temp.known(:id), 'running s k 1 2 w 3', 'status of a job that runs');
select is(pgqueue.result(:id), null, 'a job that runs has no result');
select pgqueue.fail(:id, :token, E'Error: e\nat line 1', retry_in => '1 hour');
select is(pg_temp.known(:id), 'scheduled s k 1 2 - Error: e', 'status of a job that waits for its retry');
select pgqueue.run_now(:id);
select token from pgqueue.claim('s', 'w') \gset
select pgqueue.fail(:id, :token, 'Error: last');
select is(pg_temp.known(:id), 'dead s k 2 2 w Error: last finished', 'status of a dead job');
select is(pgqueue.result(:id), null, 'a dead job has no result');
select pgqueue.discard(:id);
select is(pg_temp.known(:id), 'gone s k 2 - w Error: last finished', 'status of a dead job that was discarded');

select pgqueue.enqueue('s') as id \gset
select token from pgqueue.claim('s', 'w') \gset
select pgqueue.complete(:id, :token, '{"sum": 7}');
select is(pg_temp.known(:id), 'completed s s 1 - w {"sum": 7} finished', 'status of a job that has completed');
select is(pgqueue.result(:id), '{"sum": 7}', 'result of a job that has completed');
select pgqueue.enqueue('s') as id \gset
select pgqueue.cancel(:id, 'a typo');
select is(pg_temp.known(:id), 'cancelled s s 0 - - a typo finished', 'status of a cancelled job tells the reason');
select is(pgqueue.result(:id), null, 'a cancelled job has no result');

-- Payload and errors

create function pg_temp.told(id bigint) returns text
    language sql as $$
    select concat_ws(' ', s.state, coalesce(s.payload::text, '-'), (
        select string_agg(concat_ws(':', e ->> 'attempt', e ->> 'worker', replace(e ->> 'error', E'\n', '/')), ' ' order by place)
        from jsonb_array_elements(s.errors) with ordinality as u (e, place)
        where (e ->> 'at')::timestamptz between now() and clock_timestamp()
    ))
    from pgqueue.status(id) as s
$$;

select pgqueue.enqueue('e', '{"a": 1}', max_attempts => 3) as id \gset
select is(pg_temp.told(:id), 'ready {"a": 1}', 'status shows the payload of a job');
select is((select errors from pgqueue.status(:id)), '[]', 'and that it has not failed');
select token from pgqueue.claim('e', 'v') \gset
select pgqueue.fail(:id, :token, E'Error: one\nline 1', retry_in => '0');
select token from pgqueue.claim('e', 'w') \gset
select pgqueue.fail(:id, :token, E'Error: two\nline 2', retry_in => '0');
select is(
    pg_temp.told(:id), 'ready {"a": 1} 1:v:Error: one/line 1 2:w:Error: two/line 2',
    'all errors of a job that goes on, oldest first'
);
savepoint ends;
select token from pgqueue.claim('e', 'w') \gset
select pgqueue.complete(:id, :token);
select is(pg_temp.told(:id), 'completed - 1:v:Error: one 2:w:Error: two', 'of one that has ended run keeps the first lines');
rollback to ends;
select pgqueue.configure('e', keep_payloads => true);
select token from pgqueue.claim('e', 'w') \gset
select pgqueue.complete(:id, :token);
select is(
    pg_temp.told(:id), 'completed {"a": 1} 1:v:Error: one 2:w:Error: two', 'and the payload, if that is to be kept'
);
rollback to ends;
select token from pgqueue.claim('e', 'w') \gset
select pgqueue.fail(:id, :token, E'Error: last\nline 3');
select is(
    pg_temp.told(:id), 'dead {"a": 1} 1:v:Error: one/line 1 2:w:Error: two/line 2 3:w:Error: last/line 3',
    'all errors of a dead job'
);

create role status_asks;
select pgqueue.grant_access('status_asks', 'producer');
set local role status_asks;
select s.last_error, num_nonnulls(s.payload, s.errors) as seen from pgqueue.status(:id) as s \gset producer_
reset role;
select is(
    concat_ws(' ', :'producer_seen', split_part(:'producer_last_error', E'\n', 1)), '0 Error: last',
    'a role that may not read the table sees neither payload nor errors'
);
select pgqueue.grant_access('status_asks', 'operator');
set local role status_asks;
select num_nonnulls(s.payload, s.errors) as seen from pgqueue.status(:id) as s \gset operator_
reset role;
select is(:operator_seen, 2, 'an operator sees both');

select pgqueue.configure('none', keep_runs => 0);
select pgqueue.enqueue('none') as id \gset
select token from pgqueue.claim('none', 'w') \gset
select pgqueue.complete(:id, :token);
select throws_ok(format('select pgqueue.%s(%s)', f.name, :id), 'PQ001', null, format('%s knows nothing of a job without a run', f.name))
from unnest(array['status', 'result', 'await']) as f (name);
select is((select count(*) from awaiting), 0::bigint, 'who awaits an unknown job holds no lock');

-- Await

select pgqueue.enqueue('a') as id \gset
select is(pgqueue.await(:id), interval '2 seconds', 'who awaits a job that waits may sleep');
select pgqueue.enqueue('a') as other \gset
select pgqueue.await(j.id) from pgqueue.job as j where j.queue = 'a';
select results_eq(
    'select count(*), max(key), min(mode) from awaiting', $$ values (3::bigint, 256, 'ShareLock') $$,
    'who awaits two jobs holds a lock for each, and one for all'
);
select is(pgqueue.await(null), null, 'await of null is no wait');
select is((select count(*) from awaiting), 0::bigint, 'and gives all locks back, however often each was asked for');

-- The clock is set back, or another server takes over, whose clock is behind

select pgqueue.enqueue('back', max_attempts => 2) as id \gset
select pgqueue.fail(id, token, 'E', '0') from pgqueue.claim('back', 'w');
select pgqueue.fail(id, token, 'E') from pgqueue.claim('back', 'w');
select pgqueue.redrive('back');
update pgqueue.run set finished_at = finished_at + interval '1 hour' where job_id = :id;
select pgqueue.create_batch('back batch') as batch \gset
update pgqueue.batch set created_at = created_at + interval '1 hour' where id = :batch;
select pgqueue.enqueue('back', after => array[:id], kind => 'after') as waiter \gset
select pgqueue.enqueue('back', batch_id => :batch, kind => 'batch') as part \gset
select pgqueue.close_batch(:batch);
select pgqueue.complete(id, token, to_jsonb(kind)) from pgqueue.claim('back', 'w', 2);
select pgqueue.maintain();
select is(pgqueue.result(:id), '"back"', 'a completed job keeps its result where an earlier attempt seems to end later');
select is((select state from pgqueue.status(:id)), 'completed', 'and its state');
select id, token from pgqueue.claim('back', 'w') \gset
select is(
    (select result from pgqueue.results_of(:id, :token)), '"back"', 'a job that was enqueued after it gets the result'
);
select id, token from pgqueue.claim('back batch', 'w') \gset
select is(
    (select result from pgqueue.results_of(:id, :token)), '"batch"',
    'and a callback those of jobs that seem to end before their batch began'
);

select * from finish();
rollback;
