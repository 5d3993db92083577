-- Suspended jobs, and the events that they wait for. test_steps.py has the races.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(128);

create function pg_temp.state(id bigint)
    returns text
    language sql
as $$ select s.state from pgqueue.status(id) as s $$;
-- A job of queue q that was suspended on these terms.
create function pg_temp.suspended(event text, run_at timestamptz, after bigint[])
    returns bigint
    language plpgsql
as $$
declare
    job pgqueue.job;
begin
    perform pgqueue.enqueue('q');
    select c.* into strict job from pgqueue.claim('q', 'w') as c;
    perform pgqueue.suspend(job.id, job.token, event, run_at, after);
    return job.id;
end;
$$;
-- What is left of waits: rows of wait, and ties.
create function pg_temp.waits(id bigint)
    returns text
    language sql
as $$
    select format('%s %s',
        (select count(*) from pgqueue.wait as w where w.job_id = $1),
        (select count(*) from pgqueue.dependency as d where d.waiter_id = $1)
    )
$$;
-- Ends one job of a queue.
create function pg_temp.end_one(queue text, how text default 'complete')
    returns bigint
    language sql
as $$
    select c.id from pgqueue.claim(queue, 'w') as c
    cross join lateral (
        select case how
            when 'complete' then pgqueue.complete(c.id, c.token, '{"of": 1}')::text
            else pgqueue.fail(c.id, c.token, 'e', permanent => true)
        end
    ) as e
$$;

-- An event

select pg_temp.suspended('paid', null, null) as id \gset
select is(pg_temp.state(:id), 'blocked', 'a job that waits for an event is blocked');
select results_eq(
    format('select run_at, attempt, event, worker from pgqueue.jobs where id = %s', :id),
    $$ values (null::timestamptz, 0, 'paid', null::text) $$, 'its attempt does not count'
);
select is((select suspended_at from pgqueue.status(:id)) between now() and clock_timestamp(), true, 'status says since when');
select matches(pgqueue.why(:id), '^suspended since [^;]*: waits for event "paid"$', 'and why says for what');
select is_empty($$ select pgqueue.claim('q', 'w') $$, 'no claim gets it');
select is(
    pgqueue.rest(array['q']) between '0.1 second' and '1 second', true, 'rest only looks again once this has committed'
);
select is(pgqueue.emit('other'), true, 'emit is true for the first');
select pgqueue.maintain();
select is(pg_temp.state(:id), 'blocked', 'another event is none of its business');
select is(pgqueue.emit('paid', '{"by": "card"}'), true, 'and true for the first of another event');
select is(pg_temp.state(:id), 'ready', 'the job is due');
select matches(pgqueue.why(:id), 'event "paid" has happened', 'and why says so');
select is(pgqueue.emit('paid', '{"by": "cash"}'), false, 'an event happens once');
select results_eq(
    'select name, payload from pgqueue.events order by emitted_at',
    $$ values ('other', 'null'::jsonb), ('paid', '{"by": "card"}') $$, 'and events has what the first one said'
);
select id as got, token, attempt from pgqueue.claim('q', 'w') \gset
select is(:got, :id, 'the next claim gets it, in the same transaction, too');
select is(:attempt, 1, 'as the same attempt');
select is(pg_temp.waits(:id), '0 0', 'and nothing is left of the wait');
select pgqueue.suspend(:id, :token, 'paid');
select is(pg_temp.state(:id), 'ready', 'who suspends for an event that has happened goes on at once');
select is(pg_temp.waits(:id), '0 0', 'and waits for nothing');
select is(pg_temp.end_one('q'), :id::bigint, 'it completes');
select is(pgqueue.emit('nobody waits', null), true, 'an event without a payload that nobody waits for');
select is((select payload from pgqueue.events where name = 'nobody waits'), 'null', 'has the payload null');

-- Many, a claim's share at a time

select count(pg_temp.suspended('many', null, null)) from generate_series(1, 250);
select pgqueue.maintain();
select pgqueue.emit('many');
select is(
    (select count(*) from pgqueue.claim('q', 'w', 1000)), 100::bigint, 'a claim makes a hundred of them due'
);
select pgqueue.maintain();
select is(
    (select count(*) from pgqueue.claim('q', 'w', 1000)), 150::bigint, 'maintain does a thousand'
);
select is_empty('select from pgqueue.wait', 'and nothing is left to do');
select pgqueue.maintain();
select results_eq(
    'select distinct what::text, look_at > clock_timestamp() from pgqueue.loose_end', $$ values ('event', true) $$,
    'nor to look at, but for who has not seen these events before this commits'
);

-- A moment

select pg_temp.suspended(null, now() + interval '3 days', null) as id \gset
select is(pg_temp.state(:id), 'scheduled', 'a job that waits for a moment is scheduled');
select matches(pgqueue.why(:id), '^suspended since [^;]*: waits until ', 'why says until when');
select pg_temp.suspended('late', now() + interval '3 days', null) as late \gset
select is(pg_temp.state(:late), 'scheduled', 'so is one that waits for an event as well');
select matches(pgqueue.why(:late), 'waits for event "late" or until ', 'and why says both');
update pgqueue.job set run_at = clock_timestamp() where id in (:id, :late);
select is(
    (select array_agg(id order by id) from pgqueue.claim('q', 'w', 2)), array[:id, :late]::bigint[], 'at that moment a claim gets it'
);
select is(pgqueue.emit('late'), true, 'an event that comes while it runs');
select pgqueue.maintain();
select is(pg_temp.state(:late), 'running', 'changes nothing');
select pgqueue.complete(id, token) from pgqueue.job where id in (:id, :late);
select is(pg_temp.waits(:id) || pg_temp.waits(:late), '0 00 0', 'and the end deletes both waits');
select pg_temp.suspended('soon', now() + interval '3 days', null) as id \gset
select pgqueue.emit('soon');
select is((select id from pgqueue.claim('q', 'w')), :id::bigint, 'the event comes first');
select pg_temp.suspended(null, now() - interval '3 days', null) as id \gset
select is((select id from pgqueue.claim('q', 'w')), :id::bigint, 'a moment that is over makes it due at once');

-- The ends of jobs

select pgqueue.enqueue('p') as a \gset
select pgqueue.enqueue('p') as b \gset
select pg_temp.suspended(null, null, array[:a, :b]) as id \gset
select is(pg_temp.state(:id), 'blocked', 'a job that waits for others is blocked');
select matches(pgqueue.why(:id), format('waits for job %s and 1 more$', :a), 'why says for which');
select pg_temp.end_one('p');
select is(pg_temp.state(:id), 'blocked', 'it waits for all of them');
select pg_temp.end_one('p', 'die');
select is(pg_temp.state(:id), 'ready', 'one that dies has ended, too');
select is(pg_temp.waits(:id), '0 0', 'nothing is left of the wait');
select token from pgqueue.claim('q', 'w') \gset
select results_eq(
    format('select * from pgqueue.results_of(%s, %s)', :id, :token),
    format($$ values (%s::bigint, 'p', 'completed', '{"of": 1}'::jsonb), (%s, 'p', 'dead', null) $$, :a, :b),
    'results_of says how they have ended, and the results'
);
select pgqueue.suspend(:id, :token, after => array[:a, :b]);
select is(pg_temp.state(:id), 'ready', 'jobs that have all ended make it due at once');
select pg_temp.end_one('q');
select pgqueue.enqueue('p') as a \gset
select pg_temp.suspended(null, null, array[:a]) as id \gset
select pgqueue.cancel(:a);
select is(pg_temp.state(:id), 'ready', 'one that is cancelled has ended, too');
select pg_temp.end_one('q');
select pgqueue.enqueue('p') as a \gset
select pg_temp.suspended(null, null, array[:a]) as id \gset
select pgqueue.purge('p');
select is(pg_temp.state(:id), 'ready', 'and one that is purged');
select pg_temp.end_one('q');
select pgqueue.enqueue('p') as a \gset
select pg_temp.suspended('any', now() + interval '3 days', array[:a]) as id \gset
select is(pg_temp.state(:id), 'scheduled', 'all three at once');
select matches(
    pgqueue.why(:id), format('waits for event "any" or for job %s or until', :a), 'why says all three'
);
select pg_temp.end_one('p');
select is(pg_temp.state(:id), 'ready', 'the jobs come first');
select is(pg_temp.waits(:id), '0 0', 'and nothing is left of the wait');
select pgqueue.emit('any');
select pg_temp.end_one('q');
select pgqueue.enqueue('p') as a \gset
select pg_temp.suspended('first', null, array[:a]) as id \gset
select pgqueue.emit('first');
select pgqueue.maintain();
select is(pg_temp.waits(:id), '0 0', 'an event that comes first ends the wait for the jobs');
select token from pgqueue.claim('q', 'w') \gset
select results_eq(
    format('select * from pgqueue.results_of(%s, %s)', :id, :token),
    format($$ values (%s::bigint, 'p', null, null::jsonb) $$, :a), 'of which results_of knows no outcome yet'
);
select pgqueue.complete(:id, :token);
select pgqueue.purge('p');
select is(pg_temp.state(pg_temp.suspended('x', null, '{}')), 'ready', 'no jobs have all ended');
select pg_temp.end_one('q');

-- What an operator does

select pg_temp.suspended('never', null, null) as id \gset
select pgqueue.reprioritize(:id, 7);
select is((select priority from pgqueue.jobs where id = :id and state = 'blocked'), 7, 'reprioritize leaves it suspended');
select pgqueue.run_now(:id);
select is(pg_temp.state(:id), 'ready', 'run_now ends the wait');
select is(pg_temp.waits(:id), '0 0', 'and leaves nothing of it');
select pg_temp.end_one('q');
select pgqueue.enqueue('p') as a \gset
select pg_temp.suspended('never', now() + interval '3 days', array[:a]) as id \gset
select pgqueue.run_now(:id);
select is(pg_temp.waits(:id) || pg_temp.state(:id), '0 0ready', 'of all that it waited for');
select is((select count(*) from pgqueue.steps(:id)), 0::bigint, 'and saves no step that suspend was not given');
select pg_temp.end_one('q');
select pgqueue.enqueue('q') as id \gset
select token from pgqueue.claim('q', 'w') \gset
select pgqueue.save_step(:id, :token, 'one');
select pgqueue.suspend(:id, :token, run_at => now() + interval '3 days', step => 'night');
select pgqueue.run_now(:id) from generate_series(1, 2);
select results_eq(
    format('select name, value from pgqueue.steps(%s)', :id), $$values ('one', 'null'::jsonb), ('night', '"run_now"')$$,
    'run_now saves the step that it was given, once, after the others'
);
select token from pgqueue.claim('q', 'w') \gset
select pgqueue.suspend(:id, :token, 'never', step => 'day');
select pgqueue.reprioritize(:id, 5);
select is((select max(name) from pgqueue.steps(:id)), 'one', 'nothing else saves it');
select pgqueue.run_now(:id);
select token from pgqueue.claim('q', 'w') \gset
select pgqueue.run_now(:id);
select pgqueue.suspend(:id, :token, run_at => now(), step => 'past');
select token from pgqueue.claim('q', 'w') \gset
select pgqueue.run_now(:id);
select is(
    (select array_agg(name order by saved_at) from pgqueue.steps(:id)), '{one,night,day}',
    'run_now of a job that runs saves none'
);
select * from pgqueue.finish(
    array[:id], array[:token], '{suspend}',
    array[json_build_object('after', array[:a], 'run_at', now() + interval '1 day', 'step', 'both')::text]
);
select pgqueue.run_now(:id);
select is((select max(name) filter (where name = 'both') from pgqueue.steps(:id)), 'both', 'finish and jobs in after: likewise');
select pg_temp.end_one('q');
select pg_temp.suspended('never', null, array[:a]) as id \gset
select is(pgqueue.cancel(:id), 'cancelled', 'cancel ends a suspended job');
select is(pg_temp.waits(:id), '0 0', 'and its wait');
select pg_temp.suspended('never', null, array[:a]) as id \gset
select is(pgqueue.purge('q'), 1::bigint, 'purge deletes it');
select is(pg_temp.waits(:id), '0 0', 'with its wait');
select pg_temp.suspended('never', null, array[:a]) as id \gset
update pgqueue.job as j set terms = row(now(), null, null, null) where j.id = :id;
select pgqueue.reap();
select is(pg_temp.state(:id), 'cancelled', 'one that may not begin any more is cancelled');
select is(pg_temp.waits(:id), '0 0', 'with its wait');
select pgqueue.enqueue('q', unique_key => 'k') as id \gset
select token from pgqueue.claim('q', 'w') \gset
select pgqueue.suspend(:id, :token, 'never');
select is(
    pgqueue.enqueue('q', '1', unique_key => 'k', on_duplicate => 'replace', run_at => '2990-01-01'), :id::bigint,
    'its key stays taken'
);
select is(pg_temp.state(:id), 'blocked', 'and it is still suspended when replaced');
select is((select (j.terms).run_at from pgqueue.job as j where j.id = :id), null, 'until the event, and no longer');
select pgqueue.cancel(:id);
select pgqueue.enqueue('q', unique_key => 'k') as id \gset
select token from pgqueue.claim('q', 'w') \gset
select pgqueue.suspend(:id, :token, 'never', '2990-01-01');
select pgqueue.enqueue('q', '1', unique_key => 'k', on_duplicate => 'replace');
select pgqueue.enqueue('q', unique_key => 'k', on_duplicate => 'postpone', run_at => '2991-01-01');
select results_eq(
    format('select run_at, payload, event from pgqueue.status(%s)', :id), $$ values ('2990-01-01'::timestamptz, '1'::jsonb, 'never') $$,
    'also when it has a time'
);
select pgqueue.cancel(:id);
select pgqueue.enqueue('q') as id \gset
select token from pgqueue.claim('q', 'w') \gset
select pgqueue.cancel(:id);
select pgqueue.suspend(:id, :token, 'never');
select is(pg_temp.state(:id), 'cancelled', 'one that was asked to stop is cancelled instead');
select is(pg_temp.waits(:id), '0 0', 'and does not wait');
-- With a time, it runs, fails and dies.
select pg_temp.suspended('never', now(), null) as id \gset
select is(pg_temp.end_one('q', 'die'), :id::bigint, 'one whose time has come may die');
select is(pg_temp.waits(:id), '0 0', 'and waits no longer');
select pgqueue.redrive_job(:id);
select is((select id from pgqueue.claim('q', 'w')), :id::bigint, 'redriven it runs at once');
select pgqueue.purge('p');

-- finish

create function pg_temp.finished(text text, delay interval default null)
    returns text
    language plpgsql
as $$
declare
    job pgqueue.job;
    told text;
begin
    perform pgqueue.enqueue('f', max_attempts => 2);
    select c.* into strict job from pgqueue.claim('f', 'w') as c;
    select f.status into told
    from pgqueue.finish(array[job.id], array[job.token], '{suspend}', array[text], array[delay]) as f;
    return concat_ws(
        ', ', told, (select concat_ws(', ', j.state, j.event, j.last_error) from pgqueue.jobs as j where j.id = job.id)
    );
end;
$$;
select is(pg_temp.finished('{"event": "f"}'), 'suspended, blocked, f', 'finish suspends, too');
select is(pg_temp.finished('{"event": "f", "run_at": "2999-01-01T00:00:00Z"}'), 'suspended, scheduled, f', 'until a moment');
select is(pg_temp.finished(null, '1 hour'), 'suspended, scheduled', 'or for a time');
select is(pg_temp.finished('{"event": "paid"}'), 'suspended, ready', 'and knows what has happened');
select pg_temp.end_one('f');
select pgqueue.enqueue('p') as a \gset
select is(pg_temp.finished(format('{"after": [%s]}', :a)), 'suspended, blocked', 'or until other jobs have ended');
select pgqueue.enqueue_many('from 0', '{1,2}');
select array_agg(c.id order by c.id) as ids, min(c.token) as token from pgqueue.claim('from 0', 'w', 2) as c \gset
select * from pgqueue.finish(
    ('[0:1]=' || :'ids')::bigint[], array_fill(:token::bigint, array[2], array[0]),
    '[0:1]={release,suspend}', '[0:1]={why,"{\"event\": \"e\"}"}'
);
select results_eq(
    $$ select j.state, j.event, j.last_error from pgqueue.jobs as j where j.queue = 'from 0' order by j.id $$,
    $$ values ('ready', null::text, 'why'), ('blocked', 'e', null) $$,
    'each goes by its own terms, wherever the subscripts of the arrays begin'
);
select is(pg_temp.finished(t.text), 'retry, scheduled, ' || t.error, 'bad terms fail the attempt: ' || coalesce(t.text, 'null'))
from (
    values
        ('{}', 'a suspended job needs something to wait for'),
        (null, 'a suspended job needs something to wait for'),
        ('{"evnt": "x"}', 'a suspended job needs something to wait for'),
        ('{"event": "x", "runAt": "2030-01-01"}', 'the terms of a suspension are event, run_at, after and step'),
        ('{"event": ""}', 'event must be a text of 1 to 200 bytes'),
        ('{"after": [-1]}', 'job -1 not found')
) as t (text, error);
select matches(pg_temp.finished(t.text), '^retry, .*cannot be suspended on these terms: ', 'so does what is no JSON of terms: ' || t.text)
from (values ('x'), ('[]'), ('{"run_at": "soon"}'), ('{"after": "x"}'), ('{"after": [1e30]}')) as t (text);
select pgqueue.enqueue_many('g', array_fill('{}'::jsonb, array[3]));
select results_eq(
    $$ select f.status from (
           select array_agg(c.id order by c.id) as ids, array_agg(c.token order by c.id) as tokens
           from pgqueue.claim('g', 'w', 3) as c
       ) as c
       cross join lateral pgqueue.finish(
           c.ids, c.tokens, '{release,suspend,complete}', array[null, '{"event": "g"}', '1']
       ) as f $$,
    $$ values ('released'), ('suspended'), ('completed') $$, 'finish does it among others'
);

-- What is refused

select pgqueue.enqueue('q') as id \gset
select id, token from pgqueue.claim('q', 'w') \gset
select throws_ok(format('select pgqueue.suspend(%s, %s, %s)', :id, t.token, t.terms), t.code, null, 'suspend refuses ' || t.terms)
from (
    values
        (:token, 'null', '22023'), (:token, '''''', '22023'), (:token, 'repeat(''x'', 201)', '22023'),
        (:token, 'run_at => ''infinity''', '22023'), (:token, format('after => array[%s]', :id), '22023'),
        (:token, 'after => array[null::bigint]', '22023'), (:token, 'after => array[-1]', 'PQ001'),
        (:token, '''x'', step => ''''', '22023'), (:token, '''x'', step => repeat(''x'', 201)', '22023'),
        (:token + 1, '''x''', 'PQ002')
) as t (token, terms, code);
select throws_ok('select pgqueue.emit(' || e.name || ')', '22023', null, 'emit refuses ' || e.name)
from (values ('null'), (''''''), ('repeat(''x'', 201)')) as e (name);
select pgqueue.configure(null, max_payload_bytes => 100);
select throws_ok(
    $$ select pgqueue.emit('large', to_jsonb(repeat('x', 200))) $$, '54000', null, 'max_payload_bytes of all queues limits the payload'
);

-- How long events are kept

update pgqueue.event set emitted_at = emitted_at - interval '29 days' where name = 'paid';
update pgqueue.event set emitted_at = emitted_at - interval '31 days' where name in ('other', 'late');
select is((select done from pgqueue.maintain() where task = 'forget events'), 2::bigint, 'maintain forgets events after 30 days');
select pgqueue.configure(null, keep_events => '1 day');
select is((select done from pgqueue.maintain() where task = 'forget events'), 1::bigint, 'or after keep_events');
select is(pgqueue.emit('paid'), true, 'and then it may happen again');
select pg_temp.suspended('slow', null, null) as id \gset
select pgqueue.emit('slow');
update pgqueue.event set emitted_at = emitted_at - interval '2 days' where name = 'slow';
-- More than maintain looks at in one go.
insert into pgqueue.loose_end (look_at, id, what) select now() - interval '1 day', 0, 'event' from generate_series(1, 1000);
select is(
    (select done from pgqueue.maintain() where task = 'forget events'), 0::bigint,
    'but not while a job that waits for it has yet to be made due'
);
select is((select done from pgqueue.maintain() where task = 'forget events'), 1::bigint, 'as one of the next calls does');
select is(pg_temp.state(:id) || ' ' || pg_temp.waits(:id), 'ready 0 0', 'and then it is forgotten');
select throws_ok(
    format('select pgqueue.configure(%s, keep_events => %L)', s.scope, '1 day'), '22023', 'keep_events cannot be set for less than all',
    'keep_events is one setting for all: ' || s.scope
)
from (values ('''q'''), ('null, kind => ''k'''), ('null, group_key => ''g''')) as s (scope);

-- Jobs that wait for each other

-- The terms on which the first job is suspended, and those on which others wait for it: the next for the first, and so
-- on; the first waits for the last.
create function pg_temp.wait_in_circle(first text, others text[])
    returns void
    language plpgsql
as $$
declare
    job pgqueue.job;
    last bigint;
begin
    last := pgqueue.enqueue('c');
    select c.* into strict job from pgqueue.claim('c', 'w') as c;
    for n in 1 .. cardinality(others) loop
        if others[n] like 'suspend %' then
            perform pgqueue.enqueue('d');
            execute format(
                'select c.id from pgqueue.claim(''d'', ''w'') as c, pgqueue.suspend(c.id, c.token, after => array[%s] %s)',
                last, substr(others[n], 9)
            ) into strict last;
        else
            execute format('select pgqueue.enqueue(''d'', after => array[%s] %s)', last, others[n]) into strict last;
        end if;
    end loop;
    execute format('select pgqueue.suspend(%s, %s, after => array[%s] %s)', job.id, job.token, last, first);
end;
$$;
select throws_matching(
    format('select pg_temp.wait_in_circle('''', %L)', c.others), '^job \d+ already waits for job \d+$', c.others::text
)
from (values
    (array['']), (array['suspend ']), (array['', 'suspend ', '']), (array['suspend ', 'suspend '])
) as c (others);
select lives_ok(format('select pg_temp.wait_in_circle(%L, %L)', c.first, c.others), format('%s %s', c.first, c.others))
from (values
    (', event => ''e''', array['']), (', run_at => now() + interval ''1 hour''', array['suspend ']),
    ('', array['suspend , event => ''e''']), ('', array['', 'suspend , run_at => now() + interval ''1 hour''', '']),
    ('', array[', expires_at => now() + interval ''1 hour'''])
) as c (first, others);
select pgqueue.enqueue('f') as id, pgqueue.enqueue('f') as other \gset
select pgqueue.enqueue('g', after => array[:id]) as waiter \gset
select results_eq(
    format(
        $$ select f.status from pgqueue.claim('f', 'w') as c
           cross join lateral pgqueue.finish(array[c.id], array[c.token], '{suspend}', array['{"after": [%s]}']) as f $$,
        :waiter
    ),
    $$ values ('retry') $$, 'finish fails an attempt that would wait for who waits for it'
);

-- As a restore of the schema alone leaves it
select setval('pgqueue.awaited_seq', 0, false);
select pg_temp.suspended('e', null, null);
select is(
    pg_sequence_last_value('pgqueue.awaited_seq') & pgqueue._settings_bits('q'), pgqueue._settings_bits('q'),
    'a suspend marks its queue also where no mark is known'
);

-- It ran because its run_at had come, and is suspended again, for something else.
select pgqueue.enqueue('tie') as tied \gset
select pgqueue.enqueue('twice') as twice \gset
select token from pgqueue.claim('twice', 'w') \gset
select pgqueue.suspend(:twice, :token, run_at => clock_timestamp() + interval '1 hour', after => array[:tied]::bigint[]);
update pgqueue.job set run_at = now() where id = :twice;
select token from pgqueue.claim('twice', 'w') \gset
select pgqueue.suspend(:twice, :token, event => 'twice');
select token from pgqueue.claim('tie', 'w') \gset
select pgqueue.complete(:tied, :token);
select is_empty($$ select id from pgqueue.claim('twice', 'w') $$, 'the end of a job that it no longer waits for frees no suspended job');

select * from finish();
rollback;
