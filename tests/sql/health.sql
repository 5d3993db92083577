-- Health: each check is caused, and gone once its hint has been run. What needs a second session, or a
-- setting of the server, is in test_health.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(111);

-- Pages that other test files have rolled back would count.
truncate pgqueue.run;

create function pg_temp.found(name text)
    returns text
    language sql
as $$
    select string_agg(concat_ws(': ', h.status, h.detail), E'\n') from pgqueue.health() as h where h.check = name
$$;
create function pg_temp.hint(name text)
    returns text
    language sql
as $$ select min(h.hint) from pgqueue.health() as h where h.check = name $$;
-- Moves what has happened so far into the past.
create function pg_temp.pass(span interval)
    returns void
    language sql
as $$
    update pgqueue.job
    set run_at = run_at - span, claimed_at = claimed_at - span, lease_expires_at = lease_expires_at - span;
    update pgqueue.ticket set at = at - span;
    update pgqueue.schedule set due_at = due_at - span, next_slot = next_slot - span
$$;

select is_empty(
    $$ select * from pgqueue.health() as h where h.status <> 'ok' or h.detail is null or h.hint is not null $$,
    'all is well at first, and each check says so'
);
select is(
    (select array_agg(h.check collate "default" order by h.check collate "C") from pgqueue.health() as h),
    array[
        'autovacuum', 'backlog', 'batches', 'bloat', 'crashes', 'dead', 'failures', 'handlers', 'horizon', 'hung', 'indexes', 'kinds', 'leases',
        'locks', 'moves', 'notifications', 'notify',
        'runs', 'schedules', 'sequences', 'suspensions', 'vacuum', 'version', 'waits', 'wal', 'workers', 'wraparound', 'writes'
    ],
    'health returns a row for each check'
);

-- How work goes

select pgqueue.enqueue_many('h q', array_fill('{}'::jsonb, array[70]), max_attempts => 1);
select pg_temp.pass('110 seconds');
select alike(pg_temp.found('workers'), 'ok: %', 'a job may be due for two minutes while nobody works its queue');
select pg_temp.pass('20 seconds');
select matches(
    pg_temp.found('workers'), '^warning: queue h q has 70 ready jobs, the oldest due for 00:02:1\d, and no worker serves it$',
    'then a worker is missing'
);
select pg_temp.pass('7 minutes');
select alike(pg_temp.found('workers'), 'critical: %', 'and it is critical after eight');
select pgqueue.pause('h q');
select alike(pg_temp.found('workers'), 'ok: %', 'but not of a paused queue');
select pgqueue.resume('h q');
select pgqueue.rest(array['h q']);
select alike(pg_temp.found('workers'), 'ok: %', 'nor while a session is parked for it');
select pgqueue._unpark();
-- As if its session had ended.
delete from pgqueue.service;
select pgqueue.pause('h q', 'h q');
select alike(pg_temp.found('workers'), 'ok: %', 'nor when all that waits may be paused');
select pgqueue.resume('h q', 'h q');
select pgqueue.configure('h q', rate_limit => 1, rate_period => '1 hour');
select alike(pg_temp.found('workers'), 'ok: %', 'nor when its jobs may begin that rarely');
select pgqueue.configure('h q', rate_limit => 1, rate_period => '1 minute');
select alike(pg_temp.found('workers'), 'critical: %', 'but when one could have begun each minute');
select pgqueue.configure('h q', reset => true);
select pgqueue.configure('h q', keep_runs => 0);
select alike(pg_temp.found('workers'), 'ok: %', 'nor when nobody remembers who worked it');
select pgqueue.configure('h q', reset => true);
select count(pgqueue.complete(c.id, c.token)) from pgqueue.claim('h q', 'w') as c;
select alike(pg_temp.found('workers'), 'ok: %', 'nor when somebody has just ended a job of it');

select is(
    pg_temp.found('backlog'),
    'critical: queue h q has 69 ready jobs, which take 05:45:00 at the rate of the last five minutes, 0.003 jobs a '
    'second by 1 workers',
    'jobs that take 48 times the wait_target are a backlog'
);
select pgqueue.configure('h q', wait_target => '10 minutes');
select alike(pg_temp.found('backlog'), 'warning: %', 'of more than 12 times, a warning');
select pgqueue.configure('h q', wait_target => '30 minutes');
select alike(pg_temp.found('backlog'), 'ok: %', 'of less, none');
select pgqueue.configure('h q', reset => true);
select pgqueue.pause('h q', group_key => 'g');
select alike(pg_temp.found('backlog'), 'ok: %', 'nor of a queue of which a part is paused');
select pgqueue.resume('h q', group_key => 'g');
update pgqueue.job set run_at = now() - interval '100 seconds';
select alike(pg_temp.found('backlog'), 'ok: %', 'nor of a burst that has just begun');

select count(pgqueue.fail(c.id, c.token, 'E')) from pgqueue.claim('h q', 'w', 9) as c;
select alike(
    pg_temp.found('failures') || pg_temp.found('dead'), 'ok: %ok: %', 'nine failures and dead jobs are not many'
);
select count(pgqueue.fail(c.id, c.token, 'E')) from pgqueue.claim('h q', 'w', 1) as c;
select is(
    pg_temp.found('failures') || '; ' || pg_temp.found('dead'),
    'warning: queue h q: 91 % of the attempts of the last five minutes failed or expired, and 10 in the last hour; '
    'warning: queue h q: 10 jobs died in the last hour',
    'ten are'
);
select count(pgqueue.fail(c.id, c.token, 'E')) from pgqueue.claim('h q', 'w', 31) as c;
select alike(
    pg_temp.found('failures') || pg_temp.found('dead'), 'critical: %: 98 \% of %critical: %: 41 jobs died%',
    'critical is four times as many'
);
update pgqueue.run set finished_at = finished_at + interval '1 year';
update pgqueue.dead_job set died_at = died_at + interval '1 year';
select alike(
    pg_temp.found('failures') || pg_temp.found('dead'), 'ok: %ok: %', 'not where the clock has been set back since'
);
update pgqueue.run set finished_at = finished_at - interval '1 year';
update pgqueue.dead_job set died_at = died_at - interval '1 year';
select count(pgqueue.complete(c.id, c.token)) from pgqueue.claim('h q', 'w', 20) as c;
select alike(pg_temp.found('failures'), 'warning: %: 66 \% of %', 'and of failures four times the share');
update pgqueue.dead_job set died_at = died_at - interval '1 hour';
select alike(pg_temp.found('dead'), 'ok: %', 'what died an hour ago is known');
update pgqueue.dead_job set died_at = died_at - interval '9 hours' where id % 10 <> 0;
insert into pgqueue.dead_job
select (jsonb_populate_record(d, jsonb_build_object('id', d.id + 1000000, 'died_at', now() - interval '2 hours'))).*
from pgqueue.dead_job as d limit 9;
select is(
    pg_temp.found('dead'), 'warning: queue h q: 50 jobs died in the last day', 'unless nearly as many have died each hour'
);
insert into pgqueue.dead_job
select dead.*
from (select d as d from pgqueue.dead_job as d limit 1) as one cross join generate_series(1, 9950) as n
cross join jsonb_populate_record(d, jsonb_build_object('id', 2000000 + n, 'died_at', now() - interval '1 year')) as dead;
update pgqueue.dead_job set died_at = now() - interval '1 year';
select is(
    pg_temp.found('dead') || '; ' || pg_temp.hint('dead'),
    'warning: queue h q keeps 10,000 dead jobs; select * from pgqueue.dead where queue = ''h q''',
    'ten thousand old ones are many'
);
delete from pgqueue.dead_job where id = 2000001;
select alike(pg_temp.found('dead'), 'ok: %', 'one less is few');
select pgqueue.configure('h q', reset => true);
truncate pgqueue.job, pgqueue.dead_job, pgqueue.run;

-- Waits

select pgqueue.enqueue('slow') as job \gset
select pg_temp.pass('4 minutes');
select alike(pg_temp.found('waits'), 'ok: %', 'a job may wait for less than 5 minutes');
select pg_temp.pass('2 minutes');
select matches(
    pg_temp.found('waits'),
    format('^warning: queue slow: job %s has been due for 00:06:\d\d, the wait_target is 00:05:00$', :job),
    'a job that waits for more than that is told of'
);
select is(pg_temp.hint('waits'), format('select pgqueue.why(%s)', :job), 'with how to learn more');
select pg_temp.pass('15 minutes');
select alike(pg_temp.found('waits'), 'critical: %', 'four times the wait_target is critical');
select pgqueue.configure('slow', wait_target => '1 hour');
select alike(pg_temp.found('waits'), 'ok: %', 'a queue may have a wait_target of its own');
select pgqueue.configure('slow', reset => true);
select pgqueue.configure(null, wait_target => '10 minutes');
select alike(pg_temp.found('waits'), 'warning: %00:10:00', 'or all queues');
select pgqueue.configure(null, reset => true);
select pgqueue.pause('slow');
select is(
    regexp_replace(pg_temp.found('waits'), '.*; ', '') || ' ' || pg_temp.hint('waits'),
    'its queue is paused select pgqueue.resume(''slow'')', 'what is paused is never critical, and can be resumed'
);
select pgqueue.resume('slow');
select pgqueue.pause('slow', 'k');
insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload)
select now() - interval '1 day', now(), 0, 1, 'slow', 'k', '{}';
select is(
    (select array_agg(h.status || ' ' || h.hint order by h.status) from pgqueue.health() as h where h.check = 'waits'),
    array[
        format('critical select pgqueue.why(%s)', :job), 'warning select pgqueue.resume(''slow'', ''k'')'
    ],
    'and does not hide what waits behind it'
);
select pgqueue.resume('slow', 'k');
update pgqueue.job set group_key = 'g' where kind = 'k';
select pgqueue.pause('slow', 'k', 'g');
select alike(pg_temp.found('waits'), '%; its kind and group are paused together%', 'a kind may be paused in a group');
select h.hint from pgqueue.health() as h where h.check = 'waits' and h.hint like '%resume%' \gexec
select is((pgqueue._in_force('slow', 'k', 'g')).paused, false, 'which its hint resumes');
delete from pgqueue.job where kind = 'k';

-- The front of the lane is leased, the next are of a full group, and another lane has nothing that is late.
select count(*) from pgqueue.claim('slow', 'w');
select pgqueue.extend(array_agg(j.id), array_agg(j.token)) from pgqueue.job as j;
select pgqueue.enqueue('slow', priority => 5);
select alike(pg_temp.found('waits'), 'ok: %', 'what runs does not wait');
select pgqueue.configure('full', group_limit => 1);
select pgqueue.enqueue_many('full', array_fill('{}'::jsonb, array[3]), group_keys => '{a,a,a}');
-- As if it had committed: nobody takes a permit that his own transaction has made.
update pgqueue.permit set token = -1 where token < 0;
select count(*) from pgqueue.claim('full', 'w', 3);
update pgqueue.job set run_at = now() - interval '1 day' where queue = 'full' and lease_expires_at is null;
select alike(pg_temp.found('waits'), 'ok: %', 'nor what is behind others because its group is full');
select pgqueue.enqueue_many('tenants', array_fill('{}'::jsonb, array[50]), group_keys => array(
    select 'g ' || n % 10 from generate_series(1, 50) as n
));
update pgqueue.job set run_at = now() - interval '7 minutes'
where id = (select max(id) from pgqueue.job where queue = 'tenants');
select alike(pg_temp.found('waits'), 'warning: queue tenants: %00:07:%', 'a job of a group waits as others do');
update pgqueue.job set terms.expires_at = now() where queue = 'tenants' and run_at < now() - interval '5 minutes';
select alike(pg_temp.found('waits'), 'ok: %', 'what has expired waits no more');
truncate pgqueue.job, pgqueue.ticket, pgqueue.permit;

-- Leases

select pgqueue.enqueue_many('left', array_fill('{}'::jsonb, array[2]));
select min(c.id) as job from pgqueue.claim('left', 'me', 2) as c \gset
select pg_temp.pass('2 minutes');
select alike(pg_temp.found('leases'), 'ok: %', 'a lease that has just expired will be recovered');
select pg_temp.pass('2 minutes');
update pgqueue.job set lease_expires_at = now() - interval '10 minutes' where id = :job;
select matches(
    pg_temp.found('leases'),
    format(
        '^warning: queue left: the lease of job %s expired 00:10:\d\d ago \(worker me\), '
        'and neither a claim nor maintain\(\) has recovered it; 1 more expired, too$', :job
    ),
    'one that nobody recovers is told of'
);
select pg_temp.hint('leases') \gexec
select alike(pg_temp.found('leases'), 'ok: %', 'reap fixes it');
truncate pgqueue.job;

select pgqueue.enqueue('bad') as job \gset
create function pg_temp.crash() returns void language plpgsql as $do$
begin
    update pgqueue.job set run_at = now();
    perform pgqueue.claim('bad', 'w');
    update pgqueue.job set lease_expires_at = now() - interval '1 s';
    perform pgqueue.reap();
end;
$do$;
select pg_temp.crash() from generate_series(1, 2);
select alike(pg_temp.found('crashes'), 'ok: %', 'a lease may expire twice');
select pg_temp.crash();
select is(
    pg_temp.found('crashes'),
    format(
        'warning: queue bad: in the last hour 3 attempts of job %s of kind bad ended by an expired lease; '
        'perhaps it crashes its workers', :job
    ),
    'a job whose lease expires again and again is told of'
);
select pg_temp.hint('crashes') \gexec
select alike(pg_temp.found('crashes'), 'ok: %', 'cancelling it fixes it');
truncate pgqueue.job, pgqueue.run;

-- Jobs that hang

select pgqueue.configure('long', lease => '30 days');
select pgqueue.enqueue_many('long', array_fill('{}'::jsonb, array[3]));
select min(c.id) as job from pgqueue.claim('long', 'me', 3) as c \gset
update pgqueue.job set claimed_at = now() - interval '59 minutes';
select alike(pg_temp.found('hung'), 'ok: %', 'a job may run for an hour when nothing is known of its kind');
update pgqueue.job set claimed_at = now() - interval '61 minutes' where id > :job;
update pgqueue.job set claimed_at = now() - interval '2 hours' where id = :job;
select matches(
    pg_temp.found('hung'),
    format('^warning: queue long: job %s of kind long has run for 02:00:\d\d in worker me; 2 more hang, too$', :job),
    'jobs that run for longer hang'
);
update pgqueue.job set claimed_at = now() - interval '3 days' where id = :job;
select alike(pg_temp.found('hung'), 'critical: %3 days%', 'and critically after four hours');
insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
select 0, 1, 1, now() - interval '1 hour', '0', '8 hours', 'long', 'long', 'completed' from generate_series(1, 3);
select alike(pg_temp.found('hung'), 'ok: %', 'unless its kind is known to take long');
update pgqueue.run set taken = '2 minutes';
select alike(pg_temp.found('hung'), 'critical: %', 'which is ten times as long as nearly all of its kind');
select pg_temp.hint('hung') \gexec
select alike(
    pg_temp.found('hung'), 'warning: queue long: job %; 1 more hang, too', 'once it has been asked to stop, it has time'
);
update pgqueue.job set cancelled_at = now() - interval '11 minutes' where id = :job;
update pgqueue.job set claimed_at = now() where id <> :job;
select is(
    regexp_replace(pg_temp.found('hung'), '^(.*) for .* (in .* stop) at .*$', '\1 \2') || ', ' || pg_temp.hint('hung'),
    format('warning: queue long: job %s of kind long has run in worker me, and was asked to stop, ', :job)
        || 'end its worker: when the lease has expired, the next claim cancels the job',
    'but not for ever'
);
select pgqueue.configure('long', reset => true);
truncate pgqueue.job, pgqueue.run;

-- Suspended jobs

select pgqueue.enqueue_many('days', array_fill('{}'::jsonb, array[3]));
select pgqueue.suspend(id, token, 'day ' || id) from pgqueue.claim('days', 'w', 2);
select pgqueue.suspend(id, token, 'day ' || id, now() + interval '90 days') as none, id as timed from pgqueue.claim('days', 'w') \gset
update pgqueue.wait set since = since - interval '6 days';
select alike(pg_temp.found('suspensions'), 'ok: %', 'a job may be suspended for some days');
select max(id) as job from pgqueue.jobs where queue = 'days' and id <> :timed \gset
update pgqueue.wait set since = since - interval '2 days' - (job_id = :job)::int * interval '1 minute';
select matches(
    pg_temp.found('suspensions'),
    format(
        '^warning: queue days: job %s has been suspended for 8 days 00:\d\d:\d\d and waits for event day %1$s, the suspend_target '
        || 'is 7 days; so have been 1 more$', :job
    ),
    'one that has waited for longer, and has no run_at, is named'
);
select is(pg_temp.hint('suspensions'), format('select pgqueue.why(%s)', :job), 'and the hint says to ask why');
select pgqueue.configure('days', suspend_target => '1 day');
select alike(pg_temp.found('suspensions'), 'critical: %the suspend_target is 1 day%', 'four times as long is critical');
select pgqueue.configure(null, suspend_target => '1 hour');
select pgqueue.configure('days', suspend_target => '10 days');
select alike(pg_temp.found('suspensions'), 'ok: %', 'a queue may have a suspend_target of its own');
select pgqueue.configure(null, reset => true);
select pgqueue.configure('days', reset => true);
truncate pgqueue.job, pgqueue.wait;

-- Kinds that nobody takes

select pgqueue.rest(array['some'], array['a', 'b']);
select pgqueue.enqueue('some', kind => 'a');
select max(j.id) as job from pgqueue.enqueue_many('some', array_fill('{}'::jsonb, array[3]), kind => 'new') as j (id) \gset
select pg_temp.pass('110 seconds');
select alike(pg_temp.found('kinds'), 'ok: %', 'a kind may be new');
select pg_temp.pass('20 seconds');
select is(
    regexp_replace(pg_temp.found('kinds'), '00:02:1\d', '00:02:10'),
    format(
        'warning: queue some: nobody has taken job %s of kind new, and 2 more, for 00:02:10; those that serve the '
        'queue take other kinds', :job - 2
    ),
    'but not for longer than two minutes'
);
select is(
    (select pgqueue.why(:job)), 'ready: waits behind 3 jobs of higher priority or earlier turn in its queue; '
    'no worker takes its kind: the workers of its queue take others', 'why says so, too'
);
select alike(pg_temp.found('workers'), 'ok: %', 'while its queue is served');
select pgqueue.pause('some', 'new');
select alike(pg_temp.found('kinds'), 'ok: %', 'a kind that is paused is not wanted');
select pgqueue.resume('some', 'new');
select pgqueue.configure('some', wait_target => '1 day');
select alike(pg_temp.found('kinds'), 'ok: %', 'one that may wait for a day has time');
select pgqueue.configure('some', wait_target => '3 minutes');
select pg_temp.pass('7 minutes');
select alike(pg_temp.found('kinds'), 'critical: %', 'after eight minutes it is critical');
select pgqueue.rest(array['some'], array['new']);
select alike(pg_temp.found('kinds'), 'ok: %', 'until a session serves it');
truncate pgqueue.service;
update pgqueue.job set enqueued_at = clock_timestamp() - interval '3 minutes';
select pgqueue.finish(
    array_agg(c.id), array_agg(c.token), array_agg('release'::text), array_agg(t.text), array_agg(interval '1 minute')
)
from pgqueue.claim('some', 'w 1', 4, kinds => '{new}') as c
cross join (values ('no handler for its kind')) as t (text);
select matches(
    pg_temp.found('kinds'),
    '^warning: queue some: nobody has taken job \d+ of kind new, and 2 more, for 00:03:0\d; worker w 1 puts them off: '
    'no handler for its kind$',
    'nobody takes what is put off for want of a handler'
);
update pgqueue.job set run_at = now() where kind = 'new' and run_at > now();
select count(pgqueue.complete(c.id, c.token)) from pgqueue.claim('some', 'w 2', 1, kinds => '{new}') as c;
select alike(pg_temp.found('kinds'), 'ok: %', 'unless another worker has just run some of it');
truncate pgqueue.job, pgqueue.service;
select set_config('pgqueue.serves', '', false);

-- Schedules

select pgqueue.schedule(name, 'q', every => '1 day') from unnest('{first,second}'::text[]) as s (name);
update pgqueue.schedule set due_at = now() - interval '1 minute', next_slot = now() - interval '1 minute';
select alike(pg_temp.found('schedules'), 'ok: %', 'a schedule that is just due will be fired');
update pgqueue.schedule set due_at = now() - case name when 'first' then interval '3 minutes' else interval '150 s' end;
select matches(
    pg_temp.found('schedules'),
    '^warning: schedule first has been due for 00:03:\d\d, and neither a worker nor maintain\(\) has fired it; '
    '1 more are late$',
    'one that nobody fires is told of'
);
select pg_temp.hint('schedules') \gexec
select is(
    (select count(*) from pgqueue.job) || pg_temp.found('schedules'), '2ok: schedules are fired in time',
    'maintain fixes it'
);
select pgqueue.configure('q', max_payload_bytes => 10);
update pgqueue.schedule
set due_at = now(), next_slot = now(), payload = '"far too long a text"' where name = 'first';
select pgqueue.maintain();
select alike(
    pg_temp.found('schedules'), 'warning: schedule first cannot be fired: payload%', 'one that cannot be fired is told of'
);
select pg_temp.hint('schedules') \gexec
select alike(pg_temp.found('schedules'), 'ok: %', 'until it is paused');

-- Sequences

truncate pgqueue.job;
select max(j.id) as job from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[12])) as j (id) \gset
select pgqueue.claim('q', 'w') from generate_series(1, 11);
select max(j.token) as token from pgqueue.job as j \gset
select setval('pgqueue.job_id_seq', 1);
select setval('pgqueue.token_seq', 1, false);
select is(
    pg_temp.found('sequences'),
    format(
        'critical: sequence job_id_seq is at 1, and %s is in use: enqueues will fail' || E'\n'
        'critical: sequence token_seq is at 0, and %s is in use: a lost worker might end the attempt of another',
        :job, :token
    ),
    'a sequence that was set back is told of'
);
select h.hint from pgqueue.health() as h where h.check = 'sequences' \gexec
select alike(pg_temp.found('sequences'), 'ok: %', 'setting it forward fixes it');
select cmp_ok(
    (select max(j.token) from pgqueue.job as j), '<', nextval('pgqueue.token_seq'), 'beyond all that are in use'
);
select setval('pgqueue.token_seq', 9223372036854775807 / 2);
select alike(pg_temp.found('sequences'), 'warning: sequence token_seq is at 4611686018427387903%', 'one that somebody set far ahead, too');
select setval('pgqueue.token_seq', :token);

-- Runs

select alike(pg_temp.found('runs'), 'ok: %', 'runs are forgotten in time');
insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
select (floor(extract(epoch from now()) / 86400)::int - 2) % 16, 1, 1, now() - interval '9 days', '0', '0', 'q', 'k', 'completed';
select matches(
    pg_temp.found('runs'),
    '^warning: table run_\d+ holds runs that were due for deletion on [-\d]+: nobody uses it, and nobody has called maintain',
    'those that nobody forgets are told of'
);
select pg_temp.hint('runs') \gexec
select alike(pg_temp.found('runs'), 'ok: %', 'maintain fixes it');

-- Moves that were cut off

select alike(pg_temp.found('moves'), 'ok: %', 'nothing moves');
insert into pgqueue.moving (what, key, content)
values ('shards', '2', null), ('job', '1', '{}'), ('paused', '["q", "g", null]', null);
select is(
    pg_temp.found('moves'),
    'critical: a move-groups was cut off: 1 jobs or schedules are between two shards, and 1 groups paused',
    'what is between two shards, and in no view, is told of'
);
select pg_advisory_lock(7366517);
select alike(pg_temp.found('moves'), 'ok: %', 'but not while the command runs');
select pg_advisory_unlock(7366517);
delete from pgqueue.moving;

-- Autovacuum of a table

alter table pgqueue.job set (autovacuum_enabled = off);
select is(
    pg_temp.found('autovacuum'), 'warning: autovacuum is off for the table job: dead rows pile up',
    'a table without autovacuum is told of'
);
select pg_temp.hint('autovacuum') \gexec
select alike(pg_temp.found('autovacuum'), 'ok: %', 'resetting the option fixes it');

-- Batches

select pgqueue.create_batch('h b') as open_batch \gset
select pgqueue.enqueue('h b', batch_id => :open_batch) as member \gset
update pgqueue.batch set created_at = created_at - interval '25 hours';
select alike(pg_temp.found('batches'), 'ok: %', 'a batch may be open as long as it has jobs');
select pgqueue.cancel(:member);
select is(
    regexp_replace(pg_temp.found('batches'), '01:00:0\d', '01:00:00'),
    format('warning: batch %s of queue h b has been open for 1 day 01:00:00, and has no job that waits or runs', :open_batch),
    'one without jobs that nobody closes for a day is named'
);
select pgqueue.create_batch('h b');
update pgqueue.batch set created_at = created_at - interval '4 days';
select alike(pg_temp.found('batches'), 'critical: %; so have 1 more', 'after four days it is critical');
select pgqueue.close_batch(id) from pgqueue.batch;
select alike(pg_temp.found('batches'), 'ok: %', 'closing them fixes it');
select pgqueue.create_batch('h b', jsonb_build_object('text', repeat('x', 1000))) as large \gset
select pgqueue.configure('h b', max_payload_bytes => 500);
select pgqueue.close_batch(:large);
select is(
    pg_temp.found('batches'),
    format(
        'critical: the callback of batch %s is dead job %s, because it could not be enqueued: payload is too large '
        'for this queue', :large, (select callback_id from pgqueue.batch where id = :large)
    ),
    'a callback that could not be enqueued is named'
);
select pgqueue.configure('h b', reset => true);
select h.hint from pgqueue.health() as h where h.check = 'batches' \gexec
select alike(pg_temp.found('batches'), 'ok: %', 'sending it back to work fixes it');
select is(
    (select j.payload -> 'batch' ->> 'id' from pgqueue.job as j where j.queue = 'h b' and j.payload ? 'text'), :'large',
    'and it has the counts'
);
select pgqueue.fail(c.id, c.token, 'e', permanent => c.payload ? 'text') from pgqueue.claim('h b', 'w', 100) as c;
select is((select count(*) from pgqueue.dead_job where queue = 'h b'), 1::bigint, 'like any job it may die');
select alike(pg_temp.found('batches'), 'ok: %', 'which is not about its batch');
select pgqueue.discard_many('h b');

select pgqueue.create_batch('h b') as batch \gset
select pgqueue.enqueue('h b', batch_id => :batch) as member \gset
update pgqueue.batch set created_at = created_at - interval '8 days' where id = :batch;
select is(
    regexp_replace(pg_temp.found('batches'), '8 days 0\d:00:0\d', '8 days') || ', ' || pg_temp.hint('batches'),
    format(
        'warning: batch %s of queue h b has not finished for 8 days, and waits for job %2$s, and perhaps for more, '
        'select pgqueue.why(%2$s)', :batch, :member
    ),
    'a batch that has jobs for more than a week is named'
);
update pgqueue.batch set closed_at = clock_timestamp() - interval '25 hours' where id = :batch;
delete from pgqueue.job where id = :member;
select is(
    regexp_replace(pg_temp.found('batches'), '01:00:0\d', '01:00:00') || ', ' || pg_temp.hint('batches'),
    format(
        'warning: batch %s of queue h b has been closed for 1 day 01:00:00, and has no job that waits or runs, '
        'select from pgqueue.maintain()', :batch
    ),
    'one that has been closed and does not finish, too'
);
truncate pgqueue.batch, pgqueue.tally, pgqueue.job;

-- Indexes, and what keeps enqueues from waking workers

create index busy_idx on pgqueue.job (queue, (worker || 'x')) where claimed_at is not null;
select is(
    pg_temp.found('indexes'),
    'warning: index busy_idx has column claimed_at, worker of table job, which each claim changes: it has to write to '
    'all indexes of job', 'an index that keeps claims from being HOT updates is told of'
);
select replace(pg_temp.hint('indexes'), 'concurrently', '') \gexec
select alike(pg_temp.found('indexes'), 'ok: %', 'dropping it fixes it');
select format('alter database %I set pgqueue.notify = off', current_database()) \gexec
select format('alter role %I in database %I set pgqueue.notify = off', current_user, current_database()) \gexec
select is(
    regexp_replace(pg_temp.found('notify'), 'database [^:]*', 'database db', 'g'),
    'warning: pgqueue.notify is off for database db: enqueues wake no worker, and jobs wait for the next poll' || E'\n'
    || format(
        'warning: pgqueue.notify is off for role %s in database db: enqueues wake no worker, and jobs wait for the next '
        'poll', quote_ident(current_user)
    ),
    'a database or role for which notifications are off is told of'
);
select h.hint from pgqueue.health() as h where h.check = 'notify' \gexec
select alike(pg_temp.found('notify'), 'ok: %', 'resetting it fixes it');

-- Handlers in SQL

create function handle_me(jsonb) returns void language sql as '';
select pgqueue.configure('h', kind => 'k', handler => 'handle_me(jsonb)');
select alike(pg_temp.found('handlers'), 'ok: %', 'a handler that exists is well');
drop function handle_me;
select is(
    (select h.status || h.detail from pgqueue.health() as h where h.check = 'handlers'),
    'criticalhandler public.handle_me(jsonb) of queue h, kind k does not exist', 'a handler that does not is told of'
);
select pgqueue.configure('h', kind => 'k', reset => true);

-- Many findings, and other thresholds

select pgqueue.enqueue('many ' || n, run_at => now() - interval '6 minutes') from generate_series(1, 1002) as n;
select pgqueue.enqueue('late ' || n, run_at => now() - n * interval '1 hour') from generate_series(1, 6) as n;
select results_eq(
    $$ select h.check, h.status, substring(h.detail, 'queue (.*?)(?: has|:)'), substring(h.detail, '; and .*')
       from pgqueue.health() as h where h.status <> 'ok' $$,
    $$ select c.name, 'critical', 'late ' || 7 - n, case when n = 5 then '; and 1,003 more, 1 of them critical' end
       from (values ('waits'), ('workers')) as c (name) cross join generate_series(1, 5) as n
       order by c.name, n $$,
    'of many findings of a check the worst five are told of, and how many there are'
);
select pg_temp.found('vacuum') as before \gset
set pgqueue.thresholds = '{"workers": {"patience": "7 minutes"}, "backlog": {"most": 3}, "failures": {"few": 1e6}}';
select alike(pg_temp.found('workers'), 'critical: queue late 6%; and 1 more, 1 of them critical', 'a threshold can be set');
select results_eq(
    $$ select c.name, c.patience, c.most, c.few from pgqueue.checks as c
       where c.name in ('workers', 'backlog', 'failures', 'leases') order by 1 $$,
    $$ values ('backlog', interval '2 minutes', 3::float8, null::float8), ('failures', null, 0.2, 1e6),
           ('leases', '3 minutes', null, null), ('workers', '7 minutes', null, null) $$,
    'checks lists those in force'
);
set pgqueue.thresholds = '{"workers": {"patience": "much"}}';
select is(
    (select h.detail || h.hint from pgqueue.health() as h limit 1),
    'the setting pgqueue.thresholds is not in force: invalid input syntax for type interval: "much"'
    || 'reset pgqueue.thresholds',
    'a setting that nobody can read is told of'
);
select is(pg_temp.found('workers') like '%; and 1,003 more, 1 of them critical', true, 'and stops no check');
set pgqueue.thresholds = '{"dead": 5}';
select alike(pg_temp.found('thresholds'), 'critical: the setting pgqueue.thresholds is not in force: %', 'also a number for a check');
set pgqueue.thresholds = '{"deaad": {"most": 1}, "dead": {"most": 1, "mist": 2}}';
select is(
    pg_temp.found('thresholds'),
    'warning: the setting pgqueue.thresholds names what no check has: deaad.most, dead.mist', 'so is what no check has'
);
select format('alter role %I in database %I set pgqueue.thresholds = %L', current_user, current_database(), c.given)
from (select current_setting('pgqueue.thresholds')) as c (given) \gexec
select is(
    pg_temp.hint('thresholds'),
    format('alter role %I in database %I reset pgqueue.thresholds', current_user, current_database()),
    'with what undoes it, for whom it was set'
);
set pgqueue.thresholds = '';
select is((select count(*) from pgqueue.checks as c where c.patience is not null), 10::bigint, 'an empty one is none');

select * from finish();
rollback;
