\echo Use "CREATE EXTENSION pgqueue" to load this file. \quit

-- The life of a job.
--
-- A producer calls enqueue() in its own transaction and a row appears in job. From
-- run_at on the job is ready. A worker calls claim(): the row gets a token, a lease
-- and one more attempt, and runs. While it works it calls extend(), its heartbeat.
-- It ends the attempt with one of three functions: complete() removes the row, fail()
-- sends it back with a later run_at or, when its attempts are used up, to dead_job,
-- and release() gives it back uncounted. A worker that dies calls nothing: its lease
-- expires, and the next claim() or reap() ends the attempt in its place.
--
-- Only (id, token) can end or extend an attempt. The token comes from a sequence, so
-- a worker that slept past its lease holds a number that will never be right again.
--
-- There is no state column. A job is scheduled, ready, running, expired or blocked
-- according to run_at and lease_expires_at and the clock; the view jobs says which.
-- Whatever claim() and extend() change is in no index, so both are HOT updates: they
-- leave nothing behind in the index that every claim walks.
--
-- Every finished attempt is a row in run, for the metrics.
--
-- The house, a folder for each layer, from the ground up. A function calls its own module and those before it:
--
--   tables    schema: this one
--   base      match (which rows an index holds), check (arguments), resolve (settings in force), lane (what
--             claims leave for each other), wake (who sleeps), ticket (which groups have something to do)
--   attempts  lease (who holds a job), attempt (how that ends, and what follows)
--   limits    age, permit, group, cap: which of the jobs that are due may run
--   core      enqueue, pick, rest, claim, finish: what producers and workers call
--   flow      depend and batch (what waits for ends), sweep, cron and schedule (recurring jobs), trigger
--   operate   settings, manage, dead, maintain
--   observe   measure, observe, status (one job), metrics, why, health
--   roles     access: who may call what
--
-- The path of one job: enqueue inserts it, and wakes a worker if one sleeps. claim has it found in its lane by
-- _pick, in a group by _pick_plain_groups with the tickets (by _pick_groups where anything is unusual), under
-- caps by _pick_capped with permits, and leases it.
-- complete deletes it and logs the run; any other end is written by _end. Then _after_end gives its permits
-- back and says upwards that it has ended. Only two others call upwards, to announce something: enqueue a
-- job that waits for others, and _look_around, for a claim or rest, that schedules may be due.
--
-- A public function pins the search path, with which the private ones that it calls run as well. Each pins the
-- planner settings that its plans need (claim says why), so the same lines are above many bodies.

-- CREATE EXTENSION has already set this; the plain install has not.
set local search_path = pg_catalog, pg_temp;

-- Without "if not exists": a schema that somebody else created must stop the install.
create schema pgqueue;
comment on schema pgqueue is
'A job queue. Producers call enqueue, workers claim and complete, operators
read the views.';

-- One type, because each column of job costs an enqueue 0.7 %, even when it is null.
create type pgqueue._progress as (told_at timestamptz, done numeric, total numeric, message text);
comment on type pgqueue._progress is
'The progress of an attempt, and when it was reported: how much is done of a
total, in units of its own, and what it is doing.';

create type pgqueue._terms as (expires_at timestamptz, run_at timestamptz, batch_id bigint);
comment on type pgqueue._terms is
'The terms on which a job runs, if there are any: not begun after expires_at;
run_at, once nothing blocks it any more (null: at once); part of a batch.';

-- Fixed-width columns first, so that the ones every claim compares are found without
-- walking over text; the wide ones that only a handler reads come last.
--
-- job, recent_key and run have no CHECK: Postgres parses each one anew for every statement, and three
-- of them were a sixth of the cost of an enqueue. The functions, the only way in, check instead.
create table pgqueue.job (
    id bigint generated always as identity,
    run_at timestamptz not null,
    enqueued_at timestamptz not null,
    token bigint,
    claimed_at timestamptz,
    lease_expires_at timestamptz,
    cancelled_at timestamptz,
    priority int not null,
    attempt int not null default 0,
    max_attempts int not null,
    queue text not null,
    kind text not null,
    unique_key text,
    group_key text,
    worker text,
    cancel_reason text,
    permits tid[],
    progress pgqueue._progress,
    terms pgqueue._terms,
    payload jsonb not null,
    headers jsonb,
    errors jsonb not null default '[]',
    constraint job_pkey primary key (id)
) with (
    -- More than half of each page stays free for the new version that a claim, a heartbeat
    -- or a release writes, a little longer than the old: only in the same page is the
    -- update HOT.
    fillfactor = 45
);

comment on table pgqueue.job is
'Every waiting or running job. Read it through the view jobs; change it through
the functions.';
comment on column pgqueue.job.id is 'Identifies the job for ever, also as a dead job and after a redrive.';
comment on column pgqueue.job.run_at is
'The job runs no earlier; infinity while it waits for something other than time.';
comment on column pgqueue.job.enqueued_at is 'When enqueue was called.';
comment on column pgqueue.job.token is
'Proof, with the id, of the current lease: the number of its claim, from a
sequence that never repeats what was committed; null when not leased.';
comment on column pgqueue.job.claimed_at is 'When the current attempt began; null when not leased.';
comment on column pgqueue.job.lease_expires_at is
'From then on anyone may recover the job; null when not leased.';
comment on column pgqueue.job.cancelled_at is
'When an operator asked the running attempt to stop; null if none did.';
comment on column pgqueue.job.priority is 'Larger runs first; -100 to 100.';
comment on column pgqueue.job.attempt is
'Attempts begun since the job was enqueued or redriven; counted at claim.';
comment on column pgqueue.job.max_attempts is 'After this many attempts the job is dead.';
comment on column pgqueue.job.queue is 'The queue it waits in.';
comment on column pgqueue.job.kind is 'Which handler runs it.';
comment on column pgqueue.job.unique_key is
'At most one job of a queue with this key waits or runs; null for no such rule.';
comment on column pgqueue.job.group_key is 'The entity or tenant it belongs to; null for none.';
comment on column pgqueue.job.worker is 'The name given by the claiming worker; null when not leased.';
comment on column pgqueue.job.cancel_reason is 'The reason that the operator gave when cancelling.';
comment on column pgqueue.job.permits is
'A hint: where the permits to run are that it holds; while it waits, that it
keeps its group''s permit for its retry. Null for none.';
comment on column pgqueue.job.progress is 'The reported progress of the current attempt; null if none was reported.';
comment on column pgqueue.job.terms is 'Its batch, its expiry, and what it waits for, if there are any.';
comment on column pgqueue.job.payload is 'The content, for the handler.';
comment on column pgqueue.job.headers is 'An object of metadata, such as a trace id; null for none.';
comment on column pgqueue.job.errors is
'The last 10 failures, oldest first: attempt, at, worker, error. If a worker has
put the job off since, the last one says why, without an attempt.';

-- A lane is one queue at one priority, in the order in which its jobs run. claim()
-- walks one lane at a time, so that run_at is a bound of the scan: with a range over
-- all priorities, jobs scheduled at a high priority would be walked by every claim.
-- Jobs of groups have lanes of their own, 1000 above: no claim walks these, see ticket.
-- By the hash of the queue, because reading a page of numbers, and finding the place of an
-- entry, takes half the time of a page that begins with texts; queries ask for both.
-- Half full, because a claim of one job reads a whole page. The predicate is true for every
-- row, but only a query that names a queue can know it: without it, a session that plans
-- after an idle hour, when job looks empty, reads this whole index to find jobs by id.
create index job_lane_idx on pgqueue.job
(hashtext(queue), (priority + 1000 * num_nonnulls(group_key)), run_at, id)
with (fillfactor = 50, deduplicate_items = off)
where queue is not null;
comment on index pgqueue.job_lane_idx is 'Which jobs of a lane are due, in order?';

-- By 64 bits, because a sweep that goes from group to group would never meet the second of two with one hash.
create index job_group_idx
on pgqueue.job (hashtextextended(group_key, hashtext(queue)), (-priority), run_at, id)
with (deduplicate_items = off)
where group_key is not null;
comment on index pgqueue.job_group_idx is 'Which is the first job of a group? Which groups have any?';

create unique index job_unique_key_idx on pgqueue.job (queue, unique_key)
where unique_key is not null;
comment on index pgqueue.job_unique_key_idx is 'Is a job with this key waiting or running?';

create sequence pgqueue.token_seq;
comment on sequence pgqueue.token_seq is
'Lease tokens. Never set it back: a repeated token would let a lost worker in.';

create table pgqueue.ticket (
    at timestamptz not null,
    start_at timestamptz,
    start_until timestamptz,
    priority int not null,
    served int not null default 0,
    is_blocked boolean not null default false,
    is_full boolean not null default false,
    queue text not null,
    group_key text not null
) with (fillfactor = 50);
comment on table pgqueue.ticket is
'Which groups have jobs that may run: from at on, a claim looks at the jobs of
this group. Hints, safe to lose.';
comment on column pgqueue.ticket.at is 'When to look at the group next; the earliest comes first.';
comment on column pgqueue.ticket.start_at is
'Until start_until, its first job is due no earlier: this saves a long walk over
finished jobs.';
comment on column pgqueue.ticket.start_until is 'How long start_at stays valid; null for never.';
comment on column pgqueue.ticket.priority is 'For its jobs of this priority.';
comment on column pgqueue.ticket.served is
'How many jobs it has given in this turn, where its weight allows more than one;
below 0: how many times in a row it could give none, for an unknown time.';
comment on column pgqueue.ticket.is_blocked is
'Whether it could give no more jobs: it is full, at its rate, or paused.';
comment on column pgqueue.ticket.is_full is 'Whether that is because the group is full, or at its rate.';
comment on column pgqueue.ticket.queue is 'The queue.';
comment on column pgqueue.ticket.group_key is 'The group.';
create index ticket_lane_idx on pgqueue.ticket (hashtext(queue), priority, at);
comment on index pgqueue.ticket_lane_idx is 'Which groups come next?';
-- The latest first: what is behind it is dead, and kept by some old snapshot.
create index ticket_group_idx on pgqueue.ticket (hashtextextended(group_key, hashtext(queue)), priority, at desc)
with (deduplicate_items = off);
comment on index pgqueue.ticket_group_idx is 'Which tickets does a group have?';

-- A permit to run is held until the attempt of its job ends; one to begin, for the period after that.
create table pgqueue.permit (
    free_at timestamptz not null,
    taken_at timestamptz,
    job_id bigint,
    token bigint,
    place int not null,
    is_rate boolean not null,
    is_surplus boolean not null default false,
    queue text not null,
    kind text not null,
    group_key text not null
) with (fillfactor = 50);
comment on table pgqueue.permit is
'How many jobs of a queue, kind or group may run at once, or begin in a period:
one row for each.';
comment on column pgqueue.permit.free_at is
'When it may be taken; infinity while it is held by a job that runs, or waits
for its retry.';
comment on column pgqueue.permit.taken_at is 'When it was last taken; null for never, or before there was a cap.';
comment on column pgqueue.permit.job_id is 'The job that holds it or, for a rate, last took it; null for none.';
comment on column pgqueue.permit.token is
'The token of the claim that last took it; before that, below 0, the transaction
that created it, which must not take it; -1 where a job holds it that was just
being claimed when the cap was set.';
comment on column pgqueue.permit.place is 'Its number among the permits of its cap, from 1.';
comment on column pgqueue.permit.is_rate is 'Whether it is a permit to begin, not to run.';
comment on column pgqueue.permit.is_surplus is
'Whether it is held beyond a lowered cap: until that ends, no other is taken.';
comment on column pgqueue.permit.queue is 'The queue.';
comment on column pgqueue.permit.kind is 'The kind; empty for all.';
comment on column pgqueue.permit.group_key is 'The group; empty for all.';
-- The predicate is true for every row, but only a query that names a queue can know it: see job_lane_idx.
create index permit_scope_idx on pgqueue.permit
(hashtextextended(group_key, hashtextextended(kind, hashtext(queue))), is_rate, free_at)
with (deduplicate_items = off)
where queue is not null;
comment on index pgqueue.permit_scope_idx is 'Which permits of a queue, kind or group are free?';
-- Its first row brings a second page: hot paths check the size before they look.
create index permit_surplus_idx
on pgqueue.permit (hashtext(queue), hashtextextended(group_key, hashtextextended(kind, hashtext(queue))))
where is_surplus;
comment on index pgqueue.permit_surplus_idx is 'Are more jobs running than a cap allows?';

create type pgqueue._cap as (kind text, group_key text, is_rate boolean, most int, period interval);
comment on type pgqueue._cap is
'A cap of a queue, of a kind or of a group: at most this many jobs run at once
or, for a rate, begin in any period.';

create type pgqueue._ended as (
    id bigint, outcome text, queue text, group_key text, batch_id bigint, permits tid[],
    priority int, back_at timestamptz, keeps_permit boolean
);
comment on type pgqueue._ended is
'A job whose attempt, or wait, has ended: how; whether it goes back to its lane,
and from when on it runs there (null: it is gone); and the permits it had, of
which it keeps those of its group for its retry, or not.';

create table pgqueue.dead_job (
    id bigint not null,
    died_at timestamptz not null,
    enqueued_at timestamptz not null,
    run_at timestamptz not null,
    claimed_at timestamptz,
    priority int not null,
    attempt int not null,
    max_attempts int not null,
    queue text not null,
    kind text not null,
    unique_key text,
    group_key text,
    worker text,
    terms pgqueue._terms,
    error text not null,
    payload jsonb not null,
    headers jsonb,
    errors jsonb not null,
    constraint dead_job_pkey primary key (id),
    constraint dead_job_attempts_in_range check (attempt >= 0 and max_attempts >= 1)
);
comment on table pgqueue.dead_job is
'Dead letters: jobs whose attempts are used up, or that failed for good.
redrive sends them back, discard deletes them.';
comment on column pgqueue.dead_job.id is 'The id it had as a job.';
comment on column pgqueue.dead_job.died_at is 'When the last attempt ended.';
comment on column pgqueue.dead_job.enqueued_at is 'When enqueue was called.';
comment on column pgqueue.dead_job.run_at is 'When the last attempt was due.';
comment on column pgqueue.dead_job.claimed_at is 'When the last attempt began.';
comment on column pgqueue.dead_job.priority is 'Larger runs first.';
comment on column pgqueue.dead_job.attempt is 'Attempts used.';
comment on column pgqueue.dead_job.max_attempts is 'Attempts allowed.';
comment on column pgqueue.dead_job.queue is 'The queue it waited in.';
comment on column pgqueue.dead_job.kind is 'Which handler ran it.';
comment on column pgqueue.dead_job.unique_key is 'Its key; free for other jobs while this one is dead.';
comment on column pgqueue.dead_job.group_key is 'The entity or tenant it belongs to; null for none.';
comment on column pgqueue.dead_job.worker is 'The worker of the last attempt.';
comment on column pgqueue.dead_job.terms is 'Its batch, and its expiry, if there are any.';
comment on column pgqueue.dead_job.error is 'The last error.';
comment on column pgqueue.dead_job.payload is 'The content, for the handler.';
comment on column pgqueue.dead_job.headers is 'An object of metadata; null for none.';
comment on column pgqueue.dead_job.errors is
'The last 10 failures, oldest first: attempt, at, worker, error.';

create index dead_job_kind_idx on pgqueue.dead_job (queue, kind, died_at);
comment on index pgqueue.dead_job_kind_idx is 'Which jobs of this queue and kind died, and when?';

create index dead_job_group_idx on pgqueue.dead_job (group_key, queue, kind, died_at)
where group_key is not null;
comment on index pgqueue.dead_job_group_idx is 'Which jobs of this group died, and when?';

-- The windows of unique_for. A row outlives its job, so it is not in job; it is written by no
-- enqueue without unique_for.
create table pgqueue.recent_key (
    job_id bigint not null,
    expires_at timestamptz not null,
    queue text not null,
    unique_key text not null,
    constraint recent_key_pkey primary key (queue, unique_key)
);
comment on table pgqueue.recent_key is 'Keys that were enqueued with unique_for, until their windows end.';
comment on column pgqueue.recent_key.job_id is 'The job that was enqueued; it may have ended.';
comment on column pgqueue.recent_key.expires_at is
'When the window ends: unique_for after the job was enqueued.';
comment on column pgqueue.recent_key.queue is 'The job''s queue.';
comment on column pgqueue.recent_key.unique_key is 'The job''s unique_key.';

create index recent_key_expires_idx on pgqueue.recent_key (expires_at);
comment on index pgqueue.recent_key_expires_idx is 'Which windows have ended?';

-- [Upgrades repeat this:
-- Every way in which an attempt can end. No column has a CHECK for them, see job; a test compares
-- what functions write and expect with this list.
create or replace view pgqueue._outcome as
select * from (
    values
        ('completed', 'complete', false, false, 'completed'),
        ('retry', 'fail', true, true, 'failed, runs again'),
        ('dead', 'reject', false, true, 'failed for good'),
        ('cancelled', null, false, false, 'an operator or a dependency ended it'),
        ('expired', null, true, true, 'the worker let the lease expire, runs again'),
        (null, 'release', true, false, 'given back, uncounted')
) as o (name, asked_by, runs_again, is_failure, meaning);
comment on view pgqueue._outcome is 'How attempts end.';
comment on column pgqueue._outcome.name is 'As in run; null if it is not logged.';
comment on column pgqueue._outcome.asked_by is 'The outcome passed to finish for it; null for none.';
comment on column pgqueue._outcome.runs_again is 'Whether the job then waits again.';
comment on column pgqueue._outcome.is_failure is 'Whether it counts as a failed attempt.';
comment on column pgqueue._outcome.meaning is 'What happened.';
-- so far.]

-- A ring of sixteen tables. A row goes to the table of the day on which it may be
-- deleted, so that one TRUNCATE deletes a day: no mass DELETE, no new tables, and
-- nothing left for VACUUM. Two weeks at most are kept, which leaves a table that is
-- certainly over. maintain() empties it; in a transaction that may continue, where the lock
-- of a TRUNCATE would stay, it deletes the rows. Only then pages are filled for a second
-- time, no longer in the order of time, which the index below counts on.
create table pgqueue.run (
    slot smallint not null,
    attempt int not null,
    job_id bigint not null,
    finished_at timestamptz not null,
    waited interval not null,
    taken interval not null,
    queue text not null,
    kind text not null,
    outcome text not null,
    worker text,
    result jsonb,
    error text,
    -- Few, because each column slows completions a little, even when it is null.
    payload jsonb,
    headers jsonb,
    options jsonb
) partition by list (slot);
comment on table pgqueue.run is
'One row for each finished attempt, kept as many days as the queue''s keep_runs
says.';
comment on column pgqueue.run.slot is 'The table of the ring: the day of forgetting modulo 16, in UTC.';
comment on column pgqueue.run.attempt is 'Which attempt it was; 0 when the job was cancelled before any.';
comment on column pgqueue.run.job_id is 'The job''s id.';
comment on column pgqueue.run.finished_at is 'When the attempt ended.';
comment on column pgqueue.run.waited is 'From run_at to the claim.';
comment on column pgqueue.run.taken is 'From the claim to the end.';
comment on column pgqueue.run.queue is 'The job''s queue.';
comment on column pgqueue.run.kind is 'The job''s kind.';
-- [Upgrades repeat this:
do $$
begin
    execute format(
        'comment on column pgqueue.run.outcome is %L',
        (select string_agg(o.name || ': ' || o.meaning || '.', E'\n') from pgqueue._outcome as o)
    );
end;
$$;
-- so far.]
comment on column pgqueue.run.worker is 'The worker that ran it.';
comment on column pgqueue.run.result is 'The result given to complete; the reason of a cancelled job.';
comment on column pgqueue.run.error is 'The first line of the error of an attempt that failed or expired.';
comment on column pgqueue.run.payload is
'The content of a job that completed or was cancelled; null without
keep_payloads.';
comment on column pgqueue.run.headers is 'The job''s headers, likewise.';
comment on column pgqueue.run.options is 'Its priority, max_attempts and group_key, likewise.';

do $$
begin
    for slot in 0 .. 15 loop
        execute format('create table pgqueue.run_%s partition of pgqueue.run for values in (%1$s)', slot);
        execute format(
            'comment on table pgqueue.run_%s is ''Runs to delete on the days that are %1$s modulo 16.''', slot
        );
    end loop;
end;
$$;

-- Rows arrive in the order of their time, so a few bytes a megabyte find an hour, and nearly in that
-- of their jobs. Two such indexes would cost a completion twice as much as one of two columns.
create index run_finished_idx on pgqueue.run using brin (finished_at, job_id) with (autosummarize);
comment on index pgqueue.run_finished_idx is 'What has finished since then? What happened to this job?';
-- The index of an empty table has a summary of the first megabyte, which all completions would take
-- turns to write. A range without one is read whole, and gets it when it is full.
do $$
begin
    perform brin_desummarize_range(i.inhrelid, 0)
    from pg_inherits as i
    where i.inhparent = 'pgqueue.run_finished_idx'::regclass;
end;
$$;

-- [Upgrades repeat this:
-- Every setting, with all its facts: its column in the two tables below, with comment and check, its
-- default, what configure refuses, and the view settings follow from this list. A new one comes last, where an
-- upgrade adds its columns.
-- A range is the lowest and the highest value or, for a text, all values; null for any. not_for: where it
-- cannot be set.
create or replace view pgqueue._setting as
select
    row_number() over () as place, s.name, s.type, s.fallback, r.range, n.not_for, s.meaning, r.said,
    concat_ws(
        '; ', r.said, 'default ' || coalesce(s.fallback, 'none'), 'not for ' || array_to_string(n.not_for, ' or ')
    ) as facts
from (
    values
        ('paused', 'boolean', 'false', null, null, 'Accepts jobs and hands none out'),
        (
            'notify', 'boolean', 'true', null, '{a kind,a group}',
            'Whether enqueue may send NOTIFY to parked workers'
        ),
        (
            'keep_payloads', 'boolean', 'false', null, null,
            'Whether run keeps the payloads of jobs that are gone'
        ),
        ('max_attempts', 'int', '20', '{1}', null, 'Attempts of a job that gives no number'),
        (
            'keep_runs', 'int', '7', '{0,14}', null,
            'Days to keep finished attempts in run; with 0 none are recorded'
        ),
        ('max_payload_bytes', 'int', null, '{1}', null, 'Largest payload, as Postgres holds it uncompressed'),
        (
            'weight', 'int', '1', '{1,100}', '{a kind,each group}',
            'How many jobs of a group are served for each one of a group of weight 1'
        ),
        (
            'group_limit', 'int', null, '{1,1000}', '{a kind,each group}',
            'How many jobs of a group may run at once'
        ),
        (
            'max_running', 'int', null, '{1,1000}', '{a group}',
            'How many jobs of a queue or kind may run at once; for groups: group_limit'
        ),
        (
            'rate_limit', 'int', null, '{1,1000}', '{a kind and a group together}',
            'How many jobs of a queue, kind or group may begin in any rate_period'
        ),
        (
            'lease', 'interval', '30 seconds', '{1 microsecond,30 days}', null,
            'Lease of a claim that gives none'
        ),
        (
            'retry_base', 'interval', '5 seconds', '{0,1 year}', null,
            'Delay before the second attempt, doubled each time'
        ),
        ('retry_cap', 'interval', '1 hour', '{0,1 year}', null, 'Longest delay between attempts'),
        ('rate_period', 'interval', '1 second', '{1 millisecond,1 day}', null, 'The period of rate_limit'),
        (
            'age_after', 'interval', null, '{1 second,1 year}', '{a kind,a group}',
            'For each such interval a waiting job counts as one priority higher'
        ),
        ('keep_dead', 'interval', null, '{1 second,10 years}', '{each group}', 'How long a dead job is kept'),
        (
            'wait_target', 'interval', '5 minutes', '{1 second,1 year}', '{a kind,a group}',
            'How long a job should wait at most, or health warns'
        ),
        (
            'group_on_retry', 'text', 'skip', '{skip,block}', '{a kind,each group}',
            'Whether a job that waits for its retry blocks its group'
        )
) as s (name, type, fallback, range, not_for, meaning)
cross join lateral (select s.not_for::text[]) as n (not_for)
cross join lateral (
    select s.range::text[], case
        when s.type <> 'text' and s.range !~ ',' then 'at least ' || (s.range::text[])[1]
        else array_to_string(s.range::text[], case s.type when 'text' then ' or ' else ' to ' end)
    end
) as r (range, said);
comment on view pgqueue._setting is 'The settings: what configure can set, and paused.';
comment on column pgqueue._setting.place is 'Its place among the columns.';
comment on column pgqueue._setting.name is 'The argument of configure.';
comment on column pgqueue._setting.type is 'Its type.';
comment on column pgqueue._setting.fallback is 'What applies if nothing was set; null for no limit.';
comment on column pgqueue._setting.range is
'The lowest and the highest value, if there is one; for a text, every value.
null for any.';
comment on column pgqueue._setting.not_for is 'What it cannot be set for; null for nothing.';
comment on column pgqueue._setting.meaning is 'What it does.';
comment on column pgqueue._setting.said is 'The range in words.';
comment on column pgqueue._setting.facts is 'Range, default and what it cannot be set for, in words.';
-- so far.]

-- A queue needs no row here. An empty name, kind or group_key stands for every one, and a null
-- sets nothing; _in_force() says which row wins. Hot calls read the table queue_in_force instead.
create table pgqueue.queue (
    name text,
    kind text not null default '',
    group_key text not null default '',
    -- Groups may be many, and what decides most comes first.
    constraint queue_pkey primary key (group_key, kind, name),
    constraint queue_name_length check (
        octet_length(name) <= 200 and octet_length(kind) <= 200 and octet_length(group_key) <= 200
    )
);
comment on table pgqueue.queue is
'Settings made by configure and pause. An empty name, kind or group_key means
every one; the most specific row wins. The view settings shows what is in force.';
comment on column pgqueue.queue.name is 'The queue; empty for all.';
comment on column pgqueue.queue.kind is 'The kind for which this is set; empty for all.';
comment on column pgqueue.queue.group_key is 'The group for which this is set; empty for all.';

-- Derived from the table queue whenever that changes, so that a call finds what applies in one row, or
-- learns from used_seq that there is none.
create table pgqueue.queue_in_force (
    queue text not null,
    has_narrow boolean not null,
    has_pauses boolean not null,
    has_groups boolean not null,
    has_access boolean,
    caps pgqueue._cap[],
    constraint queue_in_force_pkey primary key (queue)
);
comment on table pgqueue.queue_in_force is
'What applies to each queue for which anything was set, and (an empty name) to
all others, if anything was set for all.';
comment on column pgqueue.queue_in_force.queue is 'The queue; empty for those without a row.';
comment on column pgqueue.queue_in_force.has_narrow is 'Whether anything is set for kinds or groups.';
comment on column pgqueue.queue_in_force.has_pauses is 'Whether pauses, resumes or leases are set for kinds or groups.';
comment on column pgqueue.queue_in_force.has_groups is 'Whether groups have weights, limits or rates of their own.';
comment on column pgqueue.queue_in_force.has_access is
'Whether the access of any role is limited to some queues; null for no.';
comment on column pgqueue.queue_in_force.caps is 'The caps of its kinds, and then its own; null for none.';

-- [Upgrades repeat this:
-- The columns of the settings that are new, or whose comment says something new. In queue_in_force a new one has
-- its default in every row, because nobody has set it yet; also in those of a dump of an older version.
do $$
declare
    setting record;
    is_new boolean;
begin
    for setting in
        select s.*, s.meaning || E'.\n' || s.facts || '.' as comment, concat_ws(
            ' and ',
            case when s.type <> 'text' then quote_ident(s.name) || ' >= ' || quote_literal(s.range[1]) end,
            case when s.type <> 'text' then quote_ident(s.name) || ' <= ' || quote_literal(s.range[2]) end,
            case when s.type = 'text' then format('%I = any (%L)', s.name, s.range) end,
            case when 'a kind' = any (s.not_for) then 'kind = ''''' end,
            case when 'a group' = any (s.not_for) then 'group_key = ''''' end,
            case when 'each group' = any (s.not_for) then 'group_key <> ''*''' end,
            case when 'a kind and a group together' = any (s.not_for) then ''''' in (kind, group_key)' end
        ) as is_sane
        from pgqueue._setting as s
        order by s.place
    loop
        select count(a) = 0 into is_new
        from pg_attribute as a where a.attrelid = 'pgqueue.queue'::regclass and a.attname = setting.name;
        continue when setting.comment = (
            select col_description(a.attrelid, a.attnum)
            from pg_attribute as a where a.attrelid = 'pgqueue.queue'::regclass and a.attname = setting.name
        );
        if is_new then
            execute format('alter table pgqueue.queue add %I %s', setting.name, setting.type);
            execute format(
                'alter table pgqueue.queue_in_force add %I %s %s', setting.name, setting.type,
                'not null default ' || quote_literal(setting.fallback)
            );
        else
            execute format('alter table pgqueue.queue drop constraint if exists queue_%s_is_sane', setting.name);
        end if;
        if setting.is_sane <> '' then
            execute format(
                'alter table pgqueue.queue add constraint queue_%1$s_is_sane check (%1$I is null or %2$s)',
                setting.name, setting.is_sane
            );
        end if;
        execute format('comment on column pgqueue.queue.%I is %L', setting.name, setting.comment);
        execute format('comment on column pgqueue.queue_in_force.%I is %L', setting.name, setting.comment);
    end loop;
end;
$$;
-- so far.]

-- By whether it is of a group: these may be many.
create index queue_cap_idx on pgqueue.queue (name, left(group_key, 1))
where num_nonnulls(max_running, rate_limit, rate_period) > 0;
comment on index pgqueue.queue_cap_idx is 'Which caps are set for a queue, its kinds and groups?';

create index queue_keep_idx on pgqueue.queue (name) where num_nonnulls(keep_runs, keep_payloads) > 0;
comment on index pgqueue.queue_keep_idx is 'Which settings say what the log keeps, and how long?';

create index queue_dead_idx on pgqueue.queue (name, left(group_key, 1)) where keep_dead is not null;
comment on index pgqueue.queue_dead_idx is 'How long are the dead jobs of a queue kept?';

create index queue_narrow_idx on pgqueue.queue (name, (num_nonnulls(paused, lease) > 0))
where kind <> '' or group_key <> '';
comment on index pgqueue.queue_narrow_idx is 'Which settings of kinds or groups must a claim know?';

create index queue_group_idx on pgqueue.queue (name)
where group_key <> '' and num_nonnulls(weight, group_limit, group_on_retry, rate_limit, rate_period) > 0;
comment on index pgqueue.queue_group_idx is 'Which settings of the groups of a queue must a claim know?';

create table pgqueue.service (
    until timestamptz not null,
    started timestamptz,
    pid int not null,
    queue text not null,
    kinds text[]
);
comment on table pgqueue.service is
'Which sessions serve which queues, as they said in rest: for health and why.
Rows of sessions that have ended are deleted by the next that says something.';
comment on column pgqueue.service.until is
'How long this holds, if the session lives so long.';
comment on column pgqueue.service.started is
'When the session began; null if the owner of pgqueue may not see that.';
comment on column pgqueue.service.pid is 'The process of the session.';
comment on column pgqueue.service.queue is 'The queue.';
comment on column pgqueue.service.kinds is 'The kinds that it takes; null for all.';
create index service_session_idx on pgqueue.service (pid, queue);
comment on index pgqueue.service_session_idx is 'Has this session said that it serves a queue?';

-- What is used, so that nobody pays for what others use. Bits are only ever set, at once, whatever happens to
-- the transaction: they may say too much, never too little.
create sequence pgqueue.used_seq minvalue -9223372036854775808 start 0;
comment on sequence pgqueue.used_seq is
'Bits: in which of 63 folds of queues something is set; below 0 if a schedule,
a batch or a dependency was ever created, so that claims have to look around.';

create sequence pgqueue.lanes_seq minvalue -9223372036854775808 start 0;
comment on sequence pgqueue.lanes_seq is
'Which folds of queues may have jobs with a priority, or in a group: a bit for
each, 1 << (hashtext(queue) & 63).';

create sequence pgqueue.awaited_seq minvalue -9223372036854775808 start 0;
comment on sequence pgqueue.awaited_seq is
'Bits: in which of 63 folds of queues there may be jobs that others were enqueued
after, or that sessions wait for; below 0 if access was ever limited to queues.';

-- Without printing anything.
do $$
begin
    perform setval('pgqueue.used_seq', 0), setval('pgqueue.lanes_seq', 0), setval('pgqueue.awaited_seq', 0);
end;
$$;

-- By name, because a restored database may have other roles, and its own rights.
create table pgqueue.access (
    role text not null,
    kind text not null,
    queue text not null,
    constraint access_pkey primary key (role, kind, queue)
);
comment on table pgqueue.access is
'Who has been granted which access. Rights on the functions come with it.';
comment on column pgqueue.access.role is 'The role.';
comment on column pgqueue.access.kind is 'The kind of access.';
comment on column pgqueue.access.queue is 'The queue to which it is limited; empty for all.';
create index access_queue_idx on pgqueue.access (queue) where queue <> '';
comment on index pgqueue.access_queue_idx is 'Is the access of any role limited to some queues?';

create table pgqueue.schedule (
    due_at timestamptz not null,
    next_slot timestamptz not null,
    last_slot timestamptz,
    last_job_id bigint,
    every interval,
    jitter interval,
    priority int,
    max_attempts int,
    is_paused boolean not null default false,
    name text not null,
    queue text not null,
    kind text,
    group_key text,
    cron text,
    timezone text not null,
    catch_up text not null,
    owner text,
    problem text,
    payload jsonb not null,
    headers jsonb,
    constraint schedule_pkey primary key (name),
    constraint schedule_has_one_rule check (num_nonnulls(cron, every) = 1),
    constraint schedule_catch_up_is_known check (catch_up in ('skip', 'one', 'all'))
) with (
    -- Each firing leaves a dead row, however few rows there are.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);
comment on table pgqueue.schedule is
'Recurring jobs. A slot is a moment at which one is due by its rule. schedule
creates a row; read it through the view schedules.';
comment on column pgqueue.schedule.due_at is
'When next_slot is fired: later than it by this schedule''s share of jitter;
infinity while it is paused.';
comment on column pgqueue.schedule.next_slot is 'The first slot that has no job yet.';
comment on column pgqueue.schedule.last_slot is 'The last slot that has a job; null for none.';
comment on column pgqueue.schedule.last_job_id is 'The job of last_slot.';
comment on column pgqueue.schedule.every is 'The interval between slots; null with cron.';
comment on column pgqueue.schedule.jitter is
'The time over which schedules with the same slots are spread; null for none.';
comment on column pgqueue.schedule.priority is 'The priority of its jobs; null for the default.';
comment on column pgqueue.schedule.max_attempts is 'The max_attempts of its jobs; null for the default.';
comment on column pgqueue.schedule.is_paused is 'Whether it enqueues no jobs until it is resumed.';
comment on column pgqueue.schedule.name is 'The name of the schedule.';
comment on column pgqueue.schedule.queue is 'The queue of its jobs.';
comment on column pgqueue.schedule.kind is 'The kind of its jobs; null for the default.';
comment on column pgqueue.schedule.group_key is 'The group of its jobs; null for none.';
comment on column pgqueue.schedule.cron is 'The slots, as a cron expression; null with every.';
comment on column pgqueue.schedule.timezone is 'The time zone of the cron expression.';
comment on column pgqueue.schedule.catch_up is 'What happens to missed slots: skip, one or all.';
comment on column pgqueue.schedule.owner is 'The role that created it; nobody else may change it by schedule.';
comment on column pgqueue.schedule.problem is
'Why next_slot could not be fired; it is retried every minute. null: no problem.';
comment on column pgqueue.schedule.payload is 'The payload of its jobs.';
comment on column pgqueue.schedule.headers is
'The headers of its jobs, to which schedule and slot are added; null for none.';

create index schedule_due_idx on pgqueue.schedule (due_at);
comment on index pgqueue.schedule_due_idx is 'Which schedules are due?';
create index schedule_queue_idx on pgqueue.schedule (queue, due_at);
comment on index pgqueue.schedule_queue_idx is 'When is the next schedule of a queue due?';

create type pgqueue._cron as (
    seconds int[],
    minutes int[],
    hours int[],
    days int[],
    months int[],
    weekdays int[],
    is_either boolean
);
comment on type pgqueue._cron is
'What a cron expression lists, each in order, and whether either of the two days
is enough.';

-- What waits for the end of jobs. No row is ever updated: module depend says who deletes it.
create table pgqueue.dependency (
    job_id bigint not null,
    waiter_id bigint not null,
    runs_if_dead boolean not null,
    constraint dependency_pkey primary key (job_id, waiter_id)
);
comment on table pgqueue.dependency is
'Which jobs wait for which. A job is blocked as long as it has a row here; a row
of a job that has ended is work left to do.';
comment on column pgqueue.dependency.job_id is 'The job that has to end.';
comment on column pgqueue.dependency.waiter_id is 'The job that waits for it.';
comment on column pgqueue.dependency.runs_if_dead is
'Whether any end will do; otherwise the waiting job is cancelled unless this one
completes.';
-- By a hash, so that looking for any of them may begin anywhere.
create index dependency_waiter_idx on pgqueue.dependency (waiter_id, hashint8(job_id));
comment on index pgqueue.dependency_waiter_idx is 'Does it still wait for anything?';

-- A tie, as seen by whoever cuts it.
create type pgqueue._tie as (place tid, job_id bigint, waiter_id bigint, is_doomed boolean, is_first boolean);
comment on type pgqueue._tie is
'A row of dependency: where it is; whether the waiting job is to be cancelled;
and whether the one that it waits for has ended, or is to be cancelled as well.';

-- By 64 ids, so that a purge leaves few rows. A part may have several: no row is ever updated.
create table pgqueue.gone (
    part bigint not null,
    ids bigint not null,
    ended_at timestamptz not null
);
comment on table pgqueue.gone is
'The ids of jobs that were cancelled, purged or discarded: jobs enqueued after
one of them must not run. Kept for 14 days.';
comment on column pgqueue.gone.part is 'Which 64 ids they are among: id >> 6.';
comment on column pgqueue.gone.ids is 'Which of these they are: a bit for each, 1 << (id & 63).';
comment on column pgqueue.gone.ended_at is 'When they ended.';
create index gone_part_idx on pgqueue.gone (part);
comment on index pgqueue.gone_part_idx is 'Is it gone?';
create index gone_ended_idx on pgqueue.gone (ended_at);
comment on index pgqueue.gone_ended_idx is 'Which can be forgotten?';

create table pgqueue.loose_end (
    look_at timestamptz not null,
    id bigint not null,
    what varchar(6) not null
);
comment on table pgqueue.loose_end is
'Which ties or batches to look at before the sweep gets there: hints, safe to
lose.';
comment on column pgqueue.loose_end.look_at is 'Not before this moment.';
comment on column pgqueue.loose_end.id is 'A job, or a batch.';
comment on column pgqueue.loose_end.what is
'ended: a job that others may still wait for; new: one that may have ended while
another was enqueued after it, to look at after all others; batch: a batch that
may be over.';
create index loose_end_look_idx on pgqueue.loose_end ((what = 'new'), look_at);
comment on index pgqueue.loose_end_look_idx is 'Where to look next?';

create table pgqueue.batch (
    id bigint not null,
    created_at timestamptz not null,
    closed_at timestamptz,
    finished_at timestamptz,
    callback_id bigint,
    completed bigint,
    dead bigint,
    cancelled bigint,
    priority int,
    max_attempts int,
    queue text not null,
    kind text,
    group_key text,
    payload jsonb not null,
    headers jsonb,
    problem text,
    constraint batch_pkey primary key (id)
);
comment on table pgqueue.batch is
'Batches, and the callback that each enqueues when its jobs have ended. Read them
through the view batches.';
comment on column pgqueue.batch.id is 'Identifies the batch; no job has the same id.';
comment on column pgqueue.batch.created_at is 'When create_batch was called.';
comment on column pgqueue.batch.closed_at is 'When close_batch was called; null if not yet.';
comment on column pgqueue.batch.finished_at is 'When its callback was enqueued; null if not yet.';
comment on column pgqueue.batch.callback_id is 'Its callback; with a problem, its id as a dead job.';
comment on column pgqueue.batch.completed is 'How many of its jobs completed, once it has finished.';
comment on column pgqueue.batch.dead is 'How many died.';
comment on column pgqueue.batch.cancelled is 'How many were cancelled.';
comment on column pgqueue.batch.priority is 'The priority of the callback; null for the default.';
comment on column pgqueue.batch.max_attempts is 'The max_attempts of the callback; null for the default.';
comment on column pgqueue.batch.queue is 'The queue of the callback.';
comment on column pgqueue.batch.kind is 'The kind of the callback; null for the default.';
comment on column pgqueue.batch.group_key is 'The group of the callback; null for none.';
comment on column pgqueue.batch.payload is 'The payload of the callback, to which the counts are added.';
comment on column pgqueue.batch.headers is 'The headers of the callback.';
comment on column pgqueue.batch.problem is 'Why its callback could not be enqueued; null: no problem.';
-- Unique, which makes finished_at a key: otherwise a session that locks the row to add a job (for key share)
-- while another finishes the batch might get the version before.
create unique index batch_finished_idx on pgqueue.batch (finished_at, id);
comment on index pgqueue.batch_finished_idx is 'Which batches can be forgotten?';
create index batch_open_idx on pgqueue.batch (id) where finished_at is null;
comment on index pgqueue.batch_open_idx is 'Which batches have not finished?';
create index batch_problem_idx on pgqueue.batch (id) where problem is not null;
comment on index pgqueue.batch_problem_idx is 'Which callbacks could not be enqueued?';

create table pgqueue.tally (
    batch_id bigint not null,
    part bigint,
    jobs int not null default 0,
    dead int not null default 0,
    cancelled int not null default 0
);
comment on table pgqueue.tally is
'How many jobs were added to unfinished batches, and how they ended: a row for
each call that enqueued jobs of one, or ended some other than by completing
them. The others completed.';
comment on column pgqueue.tally.batch_id is 'The batch.';
comment on column pgqueue.tally.part is 'Which 1,024 ids the added jobs are among: id >> 10.';
comment on column pgqueue.tally.jobs is 'How many were added.';
comment on column pgqueue.tally.dead is 'How many died; negative if some were redriven.';
comment on column pgqueue.tally.cancelled is 'How many were cancelled.';
create index tally_batch_idx on pgqueue.tally (batch_id, part);
comment on index pgqueue.tally_batch_idx is 'Where are the jobs of a batch, and how have they ended?';

-- What metrics() counts. No job passes through these two: maintain() adds up the log.
create table pgqueue.counter (
    queue text not null,
    counted_at timestamptz not null,
    enqueued bigint not null,
    completed bigint not null,
    failed bigint not null,
    dead bigint not null,
    constraint counter_pkey primary key (queue)
);
comment on table pgqueue.counter is
'What has happened in each queue since maintain first counted: numbers that only
grow. A queue in which nothing happens for 14 days is forgotten.';
comment on column pgqueue.counter.queue is 'The queue.';
comment on column pgqueue.counter.counted_at is 'When any of them last grew.';
comment on column pgqueue.counter.enqueued is 'Jobs enqueued.';
comment on column pgqueue.counter.completed is 'Attempts that completed their jobs.';
comment on column pgqueue.counter.failed is 'Attempts that failed or expired, also those after which the job was dead.';
comment on column pgqueue.counter.dead is 'Jobs that died.';

create table pgqueue.cut (
    at timestamptz not null,
    last_id bigint not null,
    xid xid8 not null,
    constraint cut_pkey primary key (at)
);
comment on table pgqueue.cut is
'Moments up to which counter counts: the first, how far it has; the others, how
far it will, once all that wrote before them have committed.';
comment on column pgqueue.cut.at is 'Attempts that ended until then are before the cut.';
comment on column pgqueue.cut.last_id is 'The last id of the jobs that are before it.';
comment on column pgqueue.cut.xid is 'Transactions that wrote before it have lower numbers.';

-- A queue makes garbage at the rate of its work whatever its length, so vacuum by count, at full speed, and
-- before the planner's statistics are far off. Dead index entries slow every claim, and returning the empty
-- end of a file to the system would lock everybody out for space that the next burst needs; only where a
-- call sees by the size of a table that nothing is used, it shall become empty. The last ones have no key.
do $$
declare
    change record;
begin
    for change in
        select c.what, r.name
        from (
            values
                (
                    '{job,ticket,permit,recent_key,dependency,loose_end}',
                    'set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, '
                    'autovacuum_vacuum_cost_delay = 0, vacuum_index_cleanup = on)'
                ),
                ('{job,ticket,permit,recent_key}', 'set (vacuum_truncate = off)'),
                (
                    '{job,recent_key}',
                    'set (autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000)'
                ),
                ('{ticket,permit,gone,loose_end,tally,service}', 'replica identity full')
        ) as c (names, what)
        cross join unnest(c.names::text[]) as r (name)
    loop
        execute format('alter table pgqueue.%I %s', change.name, change.what);
    end loop;
end;
$$;

-- What claims and enqueues remember for each other; module lane says what is in them. Sequences,
-- because these can be shared and written without creating row versions. Each takes 11 kB of every database,
-- and a comment on it would be another lock that CREATE EXTENSION takes.
do $$
declare
    cell text;
begin
    foreach cell in array
        array(select n::text from generate_series(0, 31) as n) || '{tie_0,tie_1,tie_2,tie_3}'::text[]
        || '{batch_0,batch_1,batch_2,batch_3,batch_4}'::text[]
    loop
        execute format('create sequence pgqueue._cell_%s minvalue 0', cell);
    end loop;
end;
$$;

-- And for themselves, times in us since 2020. Until when a completion looks whether anybody waits for it.
create sequence pgqueue._cell_awaited minvalue 0;
-- Up to which id the sweep has looked at ties and batches.
create sequence pgqueue._cell_swept minvalue 0;
-- Up to which group, by its hash, the sweep has looked.
create sequence pgqueue._cell_groups_swept minvalue -9223372036854775808;
-- Up to which page of permits the sweep has looked.
create sequence pgqueue._cell_permits_swept minvalue 0;
-- When a claim has to look for groups without a ticket.
create sequence pgqueue._cell_groups_due minvalue 0;
-- Until when enqueues tell claims where a group begins, because many finished jobs were in their way.
create sequence pgqueue._cell_groups_slow minvalue 0;
-- When a claim has to look for due schedules, for ties and for batches.
create sequence pgqueue._cell_due minvalue 0;

-- [Upgrades repeat this:
-- Marks for pg_dump: all rows of all tables, and the counting sequences, or a restored
-- queue would hand out ids and tokens a second time. The plain install needs no marks.
do $$
declare
    relation regclass;
begin
    if exists (select from pg_catalog.pg_extension where extname = 'pgqueue') then
        for relation in
            select c.oid from pg_catalog.pg_class as c
            where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S')
                and c.relname not like '\_cell\_%'
        loop
            perform pg_catalog.pg_extension_config_dump(relation, '');
        end loop;
    end if;
end;
$$;
-- so far.]
-- Matches: conditions that find rows by an index.
--
-- Indexes begin with a hash, because names may be long; the names are compared as well, because hashes
-- may be equal. These functions check both. The planner inlines them, so they cost nothing and find the
-- index (test_plans): they must stay one expression each, without `set`, that uses columns as they are.

-- Whether a job is in this lane of a queue: its priority, or 1000 more with a group.
create or replace function pgqueue._is_in_lane(job pgqueue.job, queue text, lane int)
    returns boolean
    language sql
    immutable
as $$
    select hashtext((job).queue) = hashtext(_is_in_lane.queue) and (job).queue = _is_in_lane.queue
        and ((job).priority + 1000 * num_nonnulls((job).group_key)) = lane
$$;

-- Whether a job belongs to this group.
create or replace function pgqueue._is_in_group(job pgqueue.job, queue text, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select hashtextextended((job).group_key, hashtext((job).queue))
            = hashtextextended(_is_in_group.group_key, hashtext(_is_in_group.queue))
        and (job).queue = _is_in_group.queue and (job).group_key = _is_in_group.group_key
$$;

-- Whether a claim of these kinds, with these pauses, may take a job.
create or replace function pgqueue._is_wanted(kind text, group_key text, kinds text[], paused jsonb)
    returns boolean
    language sql
    immutable
as $$
    select (kinds is null or kind = any (kinds)) and (
        paused is null or coalesce(
            paused -> group_key -> kind, paused -> group_key -> '', paused -> '' -> kind, paused -> '' -> ''
        ) = 'false'
    )
$$;

-- Whether a job is due, from start on, and does not run, or no longer; has_recovered: what was over has
-- been ended.
create or replace function pgqueue._is_ready(
    job pgqueue.job, start timestamptz, moment timestamptz, has_recovered boolean
)
    returns boolean
    language sql
    immutable
as $$
    select (job).run_at between start and moment and case
        when has_recovered then (job).lease_expires_at is null and (((job).terms).expires_at <= moment) is not true
        else ((job).lease_expires_at <= moment) is not false
    end
$$;

-- Whether a ticket is in the lane of groups of this priority.
create or replace function pgqueue._is_ticket_in(ticket pgqueue.ticket, queue text, priority int)
    returns boolean
    language sql
    immutable
as $$
    select hashtext((ticket).queue) = hashtext(_is_ticket_in.queue) and (ticket).priority = _is_ticket_in.priority
        and (ticket).queue = _is_ticket_in.queue
$$;

-- Whether a ticket belongs to this group.
create or replace function pgqueue._is_ticket_of(ticket pgqueue.ticket, queue text, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select hashtextextended((ticket).group_key, hashtext((ticket).queue))
            = hashtextextended(_is_ticket_of.group_key, hashtext(_is_ticket_of.queue))
        and (ticket).queue = _is_ticket_of.queue and (ticket).group_key = _is_ticket_of.group_key
$$;

-- Whether a permit belongs to this kind, or group, of a queue; empty: to all.
create or replace function pgqueue._is_permit_of(permit pgqueue.permit, queue text, kind text, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select hashtextextended((permit).group_key, hashtextextended((permit).kind, hashtext((permit).queue)))
            = hashtextextended(
                _is_permit_of.group_key, hashtextextended(_is_permit_of.kind, hashtext(_is_permit_of.queue))
            )
        and (permit).queue = _is_permit_of.queue and (permit).kind = _is_permit_of.kind
        and (permit).group_key = _is_permit_of.group_key
$$;

-- Whether a permit of a cap looks free.
create or replace function pgqueue._is_free(permit pgqueue.permit, is_rate boolean, most int, moment timestamptz)
    returns boolean
    language sql
    immutable
as $$
    select (permit).is_rate = _is_free.is_rate and (permit).place <= most
        -- For a permit to run the clock means nothing.
        and (permit).free_at <= case when _is_free.is_rate then moment else 'infinity' end
        and (permit).free_at < 'infinity'
$$;

-- Whether a permit of a group is kept for the retry of a job, and that retry is due.
create or replace function pgqueue._is_kept(permit pgqueue.permit, job pgqueue.job, moment timestamptz)
    returns boolean
    language sql
    immutable
as $$
    select not (permit).is_rate and (permit).free_at = 'infinity' and (permit).token <> -1
        and (job).token is null and (job).permits is not null and (job).run_at <= moment
$$;
-- Checks of arguments, and how a call is refused.
--
-- A check returns what is wrong (message, detail, hint, and the SQLSTATE if it is not 22023),
-- or null. _refuse() raises it. Public functions call that in an assignment, which adds no line of
-- its own to the CONTEXT of the error: psql shows two, "_refuse" and the function that was
-- called. So a list of checks reads
--
--     refused boolean := pgqueue._refuse(coalesce(pgqueue._check_this(...), pgqueue._check_that(...)));
--
-- Only what checks access, batches and the ids of jobs reads a table.

-- Raises the error that a check has found; null raises nothing.
create or replace function pgqueue._refuse(problem text[])
    returns boolean
    language plpgsql
as $$
begin
    if problem is not null then
        raise exception using
            errcode = coalesce(problem[4], '22023'),
            message = problem[1],
            detail = problem[2],
            hint = problem[3];
    end if;
    return false;
end;
$$;

-- What is wrong with the name of a queue, kind, key or worker that is empty, too long or null.
create or replace function pgqueue._bad_name(what text, name text)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return array[
        format('%s must be a text of 1 to 200 bytes', what),
        coalesce('It has ' || octet_length(name) || ' bytes.', 'It is null.'),
        'Use a short name; content belongs in the payload.'
    ];
end;
$$;

-- Refuses an array that does not name queues.
create or replace function pgqueue._check_queues(queues text[])
    returns text[]
    language plpgsql
    immutable
as $$
begin
    if coalesce(cardinality(queues), 0) = 0 or array_ndims(queues) > 1 then
        return array[
            'queues must be an array of one or more names',
            coalesce('It has ' || array_ndims(queues) || ' dimensions.', 'It is null or empty.'),
            'Write array[''emails''].'
        ];
    end if;
    return (
        select pgqueue._bad_name('every queue', q.name)
        from unnest(queues) as q (name)
        where (octet_length(q.name) between 1 and 200) is not true
        limit 1
    );
end;
$$;

-- Refuses a number or a time that is out of range, or half of a pattern; null passes.
create or replace function pgqueue._check_ranges(
    priority int default null, run_at timestamptz default null, lease interval default null, max_jobs int default null,
    error_like text default null
)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case
        when priority not between -100 and 100 then array[
            'priority must be -100 to 100', format('It is %s.', priority),
            'Larger runs first; the default is 0. Use run_at or another queue for finer ordering.'
        ]
        when run_at not between '1970-01-01' and '9998-12-31' then array[
            'run_at must be between the years 1970 and 9998', format('It is %s.', run_at),
            'Omit run_at for a job that is due at once.'
        ]
        when lease <= '0' or lease > '30 days' then array[
            'lease must be more than 0 and at most 30 days', format('It is %s.', lease),
            'Use a short lease and extend it while the job runs.'
        ]
        when max_jobs < 1 then array[
            'max_jobs must be at least 1', format('It is %s.', max_jobs), 'Omit it for 1000.'
        ]
        when (length(error_like) - length(rtrim(error_like, chr(92)))) % 2 = 1 then array[
            'error_like must not end with the escape character', format('It is "%s".', error_like),
            'For a backslash, write two of them.'
        ]
    end;
end;
$$;

-- Refuses arguments that enqueue cannot take; null passes, except for the queue.
create or replace function pgqueue._check_job(
    queue text,
    kind text,
    priority int,
    run_at timestamptz,
    max_attempts int,
    unique_key text,
    on_duplicate text,
    group_key text,
    headers jsonb,
    unique_for interval default null,
    expires_at timestamptz default null
)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case
        when (octet_length(queue) between 1 and 200) is not true then pgqueue._bad_name('queue', queue)
        when octet_length(kind) not between 1 and 200 then pgqueue._bad_name('kind', kind)
        when octet_length(unique_key) not between 1 and 200
            then pgqueue._bad_name('unique_key', unique_key)
        when octet_length(group_key) not between 1 and 200 then pgqueue._bad_name('group_key', group_key)
        when max_attempts < 1 then array[
            'max_attempts must be at least 1', format('It is %s.', max_attempts),
            'Use 1 for a job that must not be tried again.'
        ]
        when on_duplicate not in ('skip', 'replace', 'postpone', 'error') then array[
            'on_duplicate must be skip, replace, postpone or error', format('It is "%s".', on_duplicate),
            'Omit it to skip: the id of the existing job is returned.'
        ]
        when jsonb_typeof(headers) <> 'object' then array[
            'headers must be a JSON object', format('It is a JSON %s.', jsonb_typeof(headers)),
            'Put other content in the payload.'
        ]
        when unique_for <= '0' or unique_for > '1 year' then array[
            'unique_for must be more than 0 and at most 1 year', format('It is %s.', unique_for),
            'Omit it if the unique_key is to hold only while its job waits or runs.'
        ]
        when unique_for is not null and unique_key is null then array[
            'unique_for needs a unique_key',
            'unique_key is null.',
            'Give a key for what may be enqueued only once in that time.'
        ]
        when expires_at not between '1970-01-01' and '9998-12-31' then array[
            'expires_at must be between the years 1970 and 9998', format('It is %s.', expires_at),
            'Omit it for a job that may begin at any time.'
        ]
        when num_nonnulls(priority, run_at) > 0 then pgqueue._check_ranges(priority, run_at)
    end;
end;
$$;

-- Refuses a payload above the queue's max_payload_bytes (54000); a null limit is none.
create or replace function pgqueue._check_payload(payload jsonb, max_bytes int)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case when pg_column_size(payload) > max_bytes then array[
        'payload is too large for this queue',
        format('It has %s bytes of at most %s.', pg_column_size(payload), max_bytes),
        'Store large content elsewhere and enqueue its location, or configure max_payload_bytes.',
        '54000'
    ] end;
end;
$$;

-- Refuses arrays that enqueue_many cannot take.
create or replace function pgqueue._check_many(
    payloads jsonb[], unique_keys text[], group_keys text[], max_bytes int[]
)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    if payloads is null or array_ndims(payloads) > 1 then
        return array[
            'payloads must be an array of one dimension',
            coalesce('It has ' || array_ndims(payloads) || ' dimensions.', 'It is null.'),
            'Pass one payload for each job.'
        ];
    elsif cardinality(unique_keys) <> cardinality(payloads)
        or cardinality(group_keys) <> cardinality(payloads)
    then
        return array[
            'unique_keys and group_keys must be as long as payloads',
            format(
                'There are %s payloads, %s unique keys and %s group keys.',
                cardinality(payloads),
                coalesce(cardinality(unique_keys), 0), coalesce(cardinality(group_keys), 0)
            ),
            'Use null for a job without a key.'
        ];
    end if;
    return coalesce(
        (
            select pgqueue._bad_name('every unique_key and group_key', k.name)
            from (select unnest(unique_keys) union all select unnest(group_keys)) as k (name)
            where octet_length(k.name) not between 1 and 200
            limit 1
        ),
        case when num_nonnulls(variadic max_bytes) > 0 then (
            select pgqueue._check_payload(given.payload, given.max_bytes)
            from unnest(payloads, max_bytes) as given (payload, max_bytes)
            where pg_column_size(given.payload) > given.max_bytes
            limit 1
        ) end
    );
end;
$$;

-- Refuses a level other than READ COMMITTED (25001). Some callers look first: a call costs more.
create or replace function pgqueue._check_isolation()
    returns text[]
    language plpgsql
    stable
as $$
begin
    return case when current_setting('transaction_isolation') <> 'read committed' then array[
        'leases need the isolation level READ COMMITTED',
        format('This transaction is %s.', upper(current_setting('transaction_isolation'))),
        'An older snapshot cannot see who holds a lease now. Use BEGIN ISOLATION LEVEL READ COMMITTED.',
        '25001'
    ] end;
end;
$$;

-- Refuses arguments that claim cannot take, a level other than READ COMMITTED (25001), and a transaction
-- that may not write (25006).
create or replace function pgqueue._check_claim(queue text, worker text, max_jobs int, lease interval)
    returns text[]
    language plpgsql
as $$
begin
    return case
        when current_setting('transaction_isolation') <> 'read committed' then pgqueue._check_isolation()
        -- An empty answer would hide it.
        when current_setting('transaction_read_only') = 'on' then array[
            'cannot claim in a read-only transaction',
            case when pg_is_in_recovery()
                then 'This server is a standby.'
                else 'This transaction is READ ONLY, or this session or server is by default.'
            end,
            'Work on the primary, in a transaction that may write.',
            '25006'
        ]
        when (octet_length(queue) between 1 and 200) is not true then pgqueue._bad_name('queue', queue)
        when (octet_length(worker) between 1 and 200) is not true then pgqueue._bad_name('worker', worker)
        when max_jobs not between 1 and 10000 then array[
            'max_jobs must be 1 to 10000', format('It is %s.', max_jobs),
            'Claim what you can begin within one lease.'
        ]
        when lease is not null then pgqueue._check_ranges(lease => lease)
    end;
end;
$$;

-- Refuses arrays of unequal length, and a level other than READ COMMITTED (25001).
create or replace function pgqueue._check_leases(job_ids bigint[], tokens bigint[])
    returns text[]
    language plpgsql
    stable
as $$
begin
    return case
        when current_setting('transaction_isolation') <> 'read committed' then pgqueue._check_isolation()
        when cardinality(job_ids) is distinct from cardinality(tokens) then array[
            'job_ids and tokens must be equally long',
            format(
                'There are %s ids and %s tokens.',
                coalesce(cardinality(job_ids), 0), coalesce(cardinality(tokens), 0)
            ),
            'Pass the token that claim returned for each job.'
        ]
    end;
end;
$$;

-- What is wrong if nobody holds this lease (PQ002).
create or replace function pgqueue._lost(job_id bigint, token bigint)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return array[
        format('the lease on job %s is lost', coalesce(job_id::text, 'null')),
        format('It is not held under token %s.', coalesce(token::text, 'null')),
        'The lease expired, or the attempt has already ended. Discard the result: the job may be running elsewhere.',
        'PQ002'
    ];
end;
$$;

-- Refuses an absurd delay; null passes.
create or replace function pgqueue._check_delay(what text, delay interval)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case when delay < '0' or delay > '1000 years' then array[
        format('%s must be finite and not negative', what), format('It is %s.', delay),
        'Omit it for the delay that the queue''s settings give.'
    ] end;
end;
$$;

-- Refuses arguments that finish cannot take.
create or replace function pgqueue._check_outcomes(
    job_ids bigint[], outcomes text[], texts text[], delays interval[]
)
    returns text[]
    language plpgsql
    immutable
as $$
declare
    known constant text[] := array['complete', 'fail', 'reject', 'release'];
begin
    if cardinality(outcomes) is distinct from cardinality(job_ids)
        or cardinality(texts) <> cardinality(job_ids) or cardinality(delays) <> cardinality(job_ids)
    then
        return array[
            'outcomes, texts and delays must be as long as job_ids',
            format(
                'There are %s ids, %s outcomes, %s texts and %s delays.',
                coalesce(cardinality(job_ids), 0), coalesce(cardinality(outcomes), 0),
                coalesce(cardinality(texts), 0), coalesce(cardinality(delays), 0)
            ),
            'Omit texts or delays if there are none.'
        ];
    elsif (outcomes <@ known) is not true then
        return (
            select array[
                'every outcome must be complete, fail, reject or release',
                coalesce('One is "' || o.outcome || '".', 'One is null.'),
                'reject is for permanent errors.'
            ]
            from unnest(outcomes) as o (outcome)
            where (o.outcome = any (known)) is not true
            limit 1
        );
    end if;
    return (
        select pgqueue._check_delay('every delay', d.delay)
        from unnest(delays) as d (delay)
        where d.delay < '0' or d.delay > '1000 years'
        limit 1
    );
end;
$$;

-- What is wrong with an id that does not exist (PQ001), or no longer.
create or replace function pgqueue._not_found(what text, id bigint, hint text default null)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return array[
        format('%s %s not found', what, coalesce(id::text, 'null')), format('No %s has this id.', what),
        coalesce(hint, case what
            when 'batch' then 'create_batch returns its id; a finished batch is forgotten after 14 days.'
            when 'dead job' then 'It may have been redriven or discarded.'
            else 'Only jobs that wait, run or are dead are known, and those that are still in run.'
        end),
        'PQ001'
    ];
end;
$$;

-- Refuses a bad name of a queue, kind or group, and the group * where that cannot stand for each; null, which
-- means all, passes.
create or replace function pgqueue._check_scope(queue text, kind text, group_key text, takes_each boolean)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return case
        when octet_length(queue) not between 1 and 200 then pgqueue._bad_name('queue', queue)
        when octet_length(kind) not between 1 and 200 then pgqueue._bad_name('kind', kind)
        when octet_length(group_key) not between 1 and 200 then pgqueue._bad_name('group_key', group_key)
        when group_key = '*' and not takes_each then array[
            'group_key * cannot be paused or resumed apart from its queue',
            'The group_key is *.',
            'Omit group_key, or name one group.'
        ]
    end;
end;
$$;

-- Refuses an unknown kind, one that is for all queues, and a role that does not exist (42704); with is_over, only if
-- nothing is left of its access.
create or replace function pgqueue._check_grant(role text, kind text, queue text, is_over boolean)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return case
        when (kind in ('producer', 'worker', 'scheduler', 'operator', 'reader')) is not true then array[
            'kind must be producer, worker, scheduler, operator or reader',
            coalesce('It is "' || kind || '".', 'It is null.'),
            'A role may have several kinds of access: call once for each.'
        ]
        when octet_length(queue) not between 1 and 200 then pgqueue._bad_name('queue', queue)
        when queue is not null and kind in ('operator', 'reader') then array[
            format('the access of a role that is %s cannot be limited to a queue', kind),
            format('The queue is "%s".', queue),
            'Omit queue. Only producers, workers and schedulers may be limited.'
        ]
        when not exists (select from pg_roles as r where r.rolname = role)
            and not (is_over and exists (select from pgqueue.access as a where a.role = _check_grant.role)) then array[
            format('role "%s" does not exist', role),
            'Roles belong to the whole cluster, and pgqueue creates none.',
            'CREATE ROLE makes one.',
            '42704'
        ]
    end;
end;
$$;

-- Who calls. The public functions run as their owner, so it is the role that the session has logged in as, or
-- has taken on. Refuses (42501) where that is somebody else: ANALYZE and its like run functions as the owner of
-- the table, in the session of whoever maintains it, and there even this statement, which changes nothing, fails.
create or replace function pgqueue._caller()
    returns text
    language plpgsql
as $$
begin
    unlisten pgqueue_nobody;
    return coalesce(nullif(current_setting('role'), 'none'), session_user);
end;
$$;

-- The queues for which the caller has any of these kinds of access; null if it is not limited. This, and nothing
-- else, decides about queues.
create or replace function pgqueue._own_queues(variadic kinds text[])
    returns text[]
    language plpgsql
as $$
declare
    caller name;
    queues text[];
begin
    -- One page as long as nobody's access is limited.
    if pg_relation_size('pgqueue.access_queue_idx') <= 8192
        or not exists (select from pgqueue.access as a where a.queue <> '')
    then
        return null;
    end if;
    caller := pgqueue._caller();
    queues := array(
        select a.queue
        from pgqueue.access as a
        join pg_roles as r on r.rolname = a.role
        where a.kind = any (kinds) and pg_has_role(caller, r.oid, 'usage')
    );
    return case when not ('' = any (queues) or pg_has_role(caller, current_user, 'usage')) then queues end;
end;
$$;

-- Whether a queue is one of _own_queues. By bytes, because to a collation of the caller others may look the same.
create or replace function pgqueue._is_own(queue text, own text[])
    returns boolean
    language sql
    immutable
as $$
    select own is null or queue collate "C" = any (own)
$$;

-- Refuses a caller whose access is limited to other queues (42501).
create or replace function pgqueue._check_access(kind text, queues text[])
    returns text[]
    language plpgsql
as $$
declare
    own text[] := pgqueue._own_queues(kind, case when kind = 'scheduler' then 'operator' end);
begin
    return case when own is not null then (
        select array[
            format('role %I is no %s of queue "%s"', c.caller, kind, q.name),
            case when own = '{}' then format('It is a %s of no queue.', kind)
                else format('It is a %s of %s only.', kind, array_to_string(own, ', '))
            end,
            format('select pgqueue.grant_access(%L, %L, queue => %L) makes it one. ', c.caller, kind, q.name)
                || 'Within a security definer function, too, the role of the session counts.',
            '42501'
        ]
        from pgqueue._caller() as c (caller)
        cross join unnest(queues) as q (name)
        where not pgqueue._is_own(q.name, own)
        limit 1
    ) end;
end;
$$;

-- Keeps a batch from finishing before this transaction ends. Refuses one that does not exist (PQ001), or
-- has finished (55000).
create or replace function pgqueue._lock_batch(batch_id bigint)
    returns text[]
    language plpgsql
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    own text[] := pgqueue._own_queues('producer');
    batch pgqueue.batch;
begin
    select b.* into batch
    from pgqueue.batch as b
    where b.id = _lock_batch.batch_id and pgqueue._is_own(b.queue, own)
    for key share;
    return case
        when batch.id is null then pgqueue._not_found('batch', batch_id)
        when batch.finished_at is not null then array[
            format('batch %s has finished', batch_id), 'Its callback has been enqueued.',
            'Add jobs before close_batch, or from a running job of the batch.',
            '55000'
        ]
    end;
end;
$$;

-- Refuses ids of jobs that never existed (PQ001), batches, too many, and an unknown if_dead; null passes.
create or replace function pgqueue._check_after(after bigint[], if_dead text)
    returns text[]
    language plpgsql
as $$
declare
    last_id bigint := coalesce(pg_sequence_last_value('pgqueue.job_id_seq'::regclass), 0);
    unknown bigint := (select max(a.id) from unnest(after) as a (id) where a.id not between 1 and last_id);
    batch_id bigint := case when cardinality(after) > 0 and pg_relation_size('pgqueue.batch') > 0
        then (select min(b.id) from pgqueue.batch as b where b.id = any (after)) end;
begin
    return case
        when if_dead not in ('cancel', 'run') then array[
            'if_dead must be cancel or run', format('It is "%s".', if_dead),
            'Omit it to have the job cancelled when one that it waits for dies.'
        ]
        when cardinality(after) > 10000 or num_nulls(variadic after) > 0 then array[
            'after must be up to 10000 ids of jobs',
            case when cardinality(after) > 10000
                then format('It has %s.', cardinality(after))
                else 'One of them is null.'
            end,
            'To wait for many jobs, use a batch.'
        ]
        when unknown is not null
            then pgqueue._not_found('job', unknown, 'after takes ids that enqueue has returned.')
        when batch_id is not null then array[
            'after takes jobs, not batches', format('%s is a batch.', batch_id),
            'The callback of the batch can enqueue what comes after it.'
        ]
    end;
end;
$$;
-- Settings: which are in force for a queue, a kind or a group, and what is paused. A setting of a
-- group comes before one of a kind, that before one of the queue, and that before one of all. What applies to
-- a queue is derived when anything is set, so that a call reads one row. Also which features have ever been
-- used at all, so that plain queues pay for no others.

-- Sets bits of used_seq, or of another mask, at once.
create or replace function pgqueue._mark(bits bigint, mask regclass default 'pgqueue.used_seq')
    returns void
    language plpgsql
as $$
begin
    if pg_sequence_last_value(mask) & bits = bits then
        return;
    end if;
    -- One at a time; a rollback releases the lock.
    lock table pgqueue.queue_in_force in share update exclusive mode;
    perform setval(mask, pg_sequence_last_value(mask) | bits);
    raise sqlstate 'PQ003';
exception when sqlstate 'PQ003' then
    null;
end;
$$;

-- The bit of used_seq that says that something is set for a queue; all of them for an empty name. Hot
-- paths inline the check.
create or replace function pgqueue._settings_bits(queue text)
    returns bigint
    language sql
    immutable
as $$
    select case when queue = '' then 9223372036854775807 else 1::bigint << (hashtext(queue) & 255) % 63 end
$$;

-- Lets claims look for schedules, batches and ties from now on.
create or replace function pgqueue._look_from_now_on()
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._mark(1::bigint << 63);
end;
$$;

-- What applies where nothing was set.
create or replace function pgqueue._defaults()
    returns pgqueue.queue_in_force
    language plpgsql
    immutable
as $$
begin
    return jsonb_populate_record(
        null::pgqueue.queue_in_force,
        (select jsonb_object_agg(s.name, s.fallback) from pgqueue._setting as s)
            || '{"queue": "", "has_narrow": false, "has_pauses": false, "has_groups": false}'
    );
end;
$$;

-- These settings, overridden by what a more specific row sets: one expression, which a hot call can afford.
do $do$
begin
    execute format(
        $$
            create or replace function pgqueue._overlaid(settings pgqueue.queue_in_force, said pgqueue.queue)
                returns pgqueue.queue_in_force
                language sql
                immutable
            as 'select row(
                settings.queue, settings.has_narrow, settings.has_pauses, settings.has_groups, settings.has_access,
                settings.caps, %s
            )::pgqueue.queue_in_force'
        $$,
        (
            select string_agg(format('coalesce(said.%1$I, settings.%1$I)', s.name), ', ' order by s.place)
            from pgqueue._setting as s
        )
    );
end;
$do$;

-- What is in force for a queue for which anything was set, or (an empty name) for all others, by the
-- table queue.
create or replace function pgqueue._resolved(name text)
    returns pgqueue.queue_in_force
    language plpgsql
    stable
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    merged pgqueue.queue_in_force := pgqueue._defaults();
    said pgqueue.queue;
    settings record;
begin
    for said in
        select q.*
        from pgqueue.queue as q
        where q.name in (_resolved.name, '') and q.kind = '' and q.group_key = ''
        order by q.name <> ''
    loop
        merged := pgqueue._overlaid(merged, said);
    end loop;
    settings := merged;
    settings.queue := name;
    settings.has_narrow := exists (
        select from pgqueue.queue as q
        where q.name in (_resolved.name, '') and (q.kind <> '' or q.group_key <> '')
    );
    settings.has_pauses := exists (
        select from pgqueue.queue as q
        where q.name in (_resolved.name, '') and num_nonnulls(q.paused, q.lease) > 0
            and (q.kind <> '' or q.group_key <> '')
    );
    settings.has_groups := exists (
        select from pgqueue.queue as q
        where q.name in (_resolved.name, '') and q.group_key <> ''
            and num_nonnulls(q.weight, q.group_limit, q.group_on_retry, q.rate_limit, q.rate_period) > 0
    );
    settings.has_access := nullif(exists (select from pgqueue.access as a where a.queue <> ''), false);
    settings.caps := (
        select array_agg(
            row(s.kind, '', c.is_rate, c.most, coalesce(s.period, '1 second'))::pgqueue._cap
            order by s.kind = '', s.kind, c.is_rate
        )
        from (
            select
                q.kind,
                coalesce(max(q.max_running) filter (where q.name <> ''), max(q.max_running)) as max_running,
                coalesce(max(q.rate_limit) filter (where q.name <> ''), max(q.rate_limit)) as rate_limit,
                coalesce(max(q.rate_period) filter (where q.name <> ''), max(q.rate_period)) as period
            from pgqueue.queue as q
            where q.name in (_resolved.name, '') and left(q.group_key, 1) = ''
                and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
            group by q.kind
        ) as s
        cross join lateral (values (false, s.max_running), (true, s.rate_limit)) as c (is_rate, most)
        where c.most is not null
    );
    return settings;
end;
$$;

-- The queue, or (an empty name) those queues, for which anything is set; an empty name among them if that is for
-- all, or if any access is limited.
create or replace function pgqueue._named_queues(queue text default '')
    returns table (name text)
    language plpgsql
    stable
as $$
begin
    return query
    select q.name from pgqueue.queue as q where _named_queues.queue in ('', q.name)
    union
    select '' from pgqueue.access as a where _named_queues.queue = '' and a.queue <> '';
end;
$$;

-- After a change of what was set for a queue, or (an empty name) for all: derives what is in force.
create or replace function pgqueue._resolve(queue text)
    returns void
    language plpgsql
    set enable_seqscan = off
as $$
begin
    delete from pgqueue.queue_in_force as f
    where _resolve.queue in ('', f.queue) and (
        f is distinct from pgqueue._resolved(f.queue)
        or f.queue not in (select n.name from pgqueue._named_queues(_resolve.queue) as n)
    );
    insert into pgqueue.queue_in_force
    select r.*
    from pgqueue._named_queues(_resolve.queue) as n
    cross join lateral pgqueue._resolved(n.name) as r
    where not exists (select from pgqueue.queue_in_force as f where f.queue = n.name);
    perform pgqueue._mark(pgqueue._settings_bits(f.queue))
    from pgqueue.queue_in_force as f
    where _resolve.queue in ('', f.queue);
end;
$$;

-- The settings in force for a queue, or for a kind or group in it (empty or null: none), each from the
-- narrowest row that says it: of the group, of the kind, of the queue, of all; else the defaults.
create or replace function pgqueue._in_force(queue text, kind text default '', group_key text default '')
    returns pgqueue.queue_in_force
    language plpgsql
    stable
    set jit = off
as $$
declare
    settings record;
    merged pgqueue.queue_in_force;
    other pgqueue.queue;
begin
    if pg_sequence_last_value('pgqueue.used_seq'::regclass) >> (hashtext(_in_force.queue) & 255) % 63 & 1 = 0 then
        return pgqueue._defaults();
    end if;
    select f.* into settings from pgqueue.queue_in_force as f where f.queue = _in_force.queue collate "default";
    if not found then
        select f.* into settings from pgqueue.queue_in_force as f where f.queue = '';
        if not found then
            return pgqueue._defaults();
        end if;
    end if;
    if kind <> '' or group_key <> '' then
        -- These are not inherited: a queue may have its own, beside those of its kinds and groups.
        settings.max_running := null;
        settings.rate_limit := null;
        settings.rate_period := '1 second';
    end if;
    if (kind <> '' or group_key <> '') and settings.has_narrow then
        merged := settings;
        for other in
            select q.*
            from pgqueue.queue as q
            where q.name in ('', _in_force.queue) and q.kind in ('', _in_force.kind)
                and q.group_key in ('', case when _in_force.group_key <> '' then '*' end, _in_force.group_key)
                and (q.kind <> '' or q.group_key <> '')
            order by q.group_key <> '', q.group_key <> '*', q.kind <> '', q.name <> ''
        loop
            merged := pgqueue._overlaid(merged, other);
        end loop;
        return merged;
    end if;
    return settings;
end;
$$;

-- What is paused in a queue, which may itself be paused: by group, then kind, where an empty one means
-- any; null if no kind or group differs from the queue.
create or replace function pgqueue._paused(queue text, is_paused boolean)
    returns jsonb
    language plpgsql
    stable
as $$
begin
    return (
        select case when bool_or(g.has_others) then
            jsonb_object_agg(g.group_key, g.kinds) || case when bool_and(g.group_key <> '')
                then jsonb_build_object('', jsonb_build_object('', is_paused))
                else '{}'
            end
        end
        from (
            select
                s.group_key,
                jsonb_object_agg(s.kind, s.paused) || case when s.group_key = ''
                    then jsonb_build_object('', is_paused)
                    else '{}'
                end as kinds,
                bool_or(s.paused <> is_paused) as has_others
            from (
                select distinct on (q.group_key, q.kind) q.group_key, q.kind, q.paused
                from pgqueue.queue as q
                where q.name in ('', _paused.queue) and num_nonnulls(q.paused, q.lease) > 0
                    and (q.kind <> '' or q.group_key <> '') and q.paused is not null
                order by q.group_key, q.kind, q.name <> '' desc
            ) as s
            group by s.group_key
        ) as g
    );
end;
$$;
-- What claims remember for each other, and which lanes of a queue have jobs to run.
--
-- It only saves work. It is kept in cells, sequences that are never incremented: 64 bits
-- that all sessions share, neither transactional nor versioned, so that no snapshot can bloat
-- them, read with pg_sequence_last_value() and written with setval(). Two make a record:
--
--            of a lane                          of a queue
--   first    tag, valid until (us since 2020)   tag, valid until; how its lanes are listed
--   second   position (us since 2020), check    its highest seven lanes, in nine bits each
--
-- Where times tie, a position needs the id of the last pick as well: in a cell that lanes share, and
-- for which it has a check.
--
-- Most queues have one lane, 0, and no record: a bit of lanes_seq, for each fold of their names, says
-- that others have been used. The jobs of groups have lanes of their own, 1000 + priority, and the
-- position of such a lane is one among its tickets. A queue is hashed with 9999, which is not a lane.
--
-- The tag says whose record it is; zero means unused. There are 16, of which each lane and queue has two
-- to choose from, by its hash, and takes the one that expired first; while others have both, it is walked
-- from the beginning. A value from another clock (set back, restored) is ignored.

-- The record of a lane or of a queue, by its hash: the number of its first cell, the tag, and until when
-- it is valid; null where it has none, and that is the one to take. Hot paths inline the look-up.
create or replace function pgqueue._record(
    key bigint, out record int, out tag bigint, out valid_until bigint
)
    language plpgsql
as $$
declare
    cell int;
    held bigint;
    first_end bigint;
begin
    tag := (key >> 20 & 4095) << 51;
    foreach cell in array array[(key & 15) * 2, (key >> 4 & 15) * 2]::int[] loop
        held := coalesce(pg_sequence_last_value(('pgqueue._cell_' || cell)::regclass), 0);
        if held > 0 and (held # tag) >> 51 = 0 then
            record := cell;
            valid_until := held # tag;
            return;
        elsif (held & 2251799813685247 >= first_end) is not true then
            record := cell;
            first_end := held & 2251799813685247;
        end if;
    end loop;
end;
$$;

-- Microseconds since 2020: 51 bits hold them until 2091. Hot paths inline this.
create or replace function pgqueue._since_2020(moment timestamptz)
    returns bigint
    language plpgsql
    immutable
as $$
begin
    return (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
end;
$$;

-- How long the result of a walk that began then stays valid: so that walks take a twentieth of the time.
create or replace function pgqueue._believed_until(began timestamptz, at_least interval)
    returns timestamptz
    language plpgsql
as $$
begin
    return clock_timestamp() + least(
        greatest(at_least, 20 * (clock_timestamp() - began)), interval '1 minute'
    );
end;
$$;

-- The lanes in which a queue has any job, lowest first, and the first run_at of each: one index descent
-- per lane.
create or replace function pgqueue._live_lanes(queue text)
    returns table (lane int, first timestamptz)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return query
    with recursive live (lane, first) as (
        values (-2147483648, null::timestamptz)
        union all
        select f.*
        from live as l
        cross join lateral (
            select j.priority + 1000 * num_nonnulls(j.group_key), j.run_at
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_live_lanes.queue) and j.queue = _live_lanes.queue
                and (j.priority + 1000 * num_nonnulls(j.group_key)) > l.lane
            order by (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            limit 1
        ) as f
    )
    select l.lane, l.first from live as l where l.first is not null;
end;
$$;

-- The lanes that have any job, where each begins, and how many of its jobs to read: 100, or its share of
-- a budget among those with more. Two index descents per lane.
create or replace function pgqueue._lanes(budget int)
    returns table (hash int, queue text, lane int, first timestamptz, first_id bigint, most bigint)
    language plpgsql
    stable
    set enable_sort = off
    set enable_bitmapscan = off
as $$
begin
    return query
    with recursive lanes (hash, queue, lane, first, first_id) as (
        values (-2147483648, '', -2147483648, null::timestamptz, null::bigint)
        union all
        select n.*
        from lanes as l
        cross join lateral (
            select hashtext(j.queue), j.queue, j.priority + 1000 * num_nonnulls(j.group_key), j.run_at, j.id
            from pgqueue.job as j
            -- A condition on the queue that cannot be left out, for the predicate of the index.
            where (hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key))) > (l.hash, l.lane) and j.queue >= ''
            order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            limit 1
        ) as n
    ), long as materialized (
        select l.hash, l.lane
        from lanes as l
        where l.first is not null and exists (
            select from pgqueue.job as j
            where hashtext(j.queue) = l.hash and (j.priority + 1000 * num_nonnulls(j.group_key)) = l.lane and j.queue >= ''
                and (j.run_at, j.id) >= (l.first, l.first_id)
            order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            offset 100
        )
        -- Of more, each has a hundred.
        limit budget / 100
    )
    select
        l.*, case when (l.hash, l.lane) in (select g.hash, g.lane from long as g)
            then greatest(budget / (select count(*) from long), 100) else 100
        end
    from lanes as l
    where l.first is not null;
end;
$$;

-- The lanes of a queue in which any job is due or runs, highest priority first; two of one priority in
-- random order: so that jobs of groups, and others, get half of the claims each.
create or replace function pgqueue._due_lanes(queue text, moment timestamptz)
    returns int[]
    language plpgsql
as $$
begin
    return array(
        select l.lane
        from pgqueue._live_lanes(_due_lanes.queue) as l
        where l.first <= _due_lanes.moment
        order by case when l.lane > 500 then l.lane - 1000 else l.lane end desc, random()
    );
end;
$$;

-- Makes claims look, from now on, for lanes of a queue other than 0.
create or replace function pgqueue._use_lanes(queue text)
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._mark(1::bigint << (hashtext(queue) & 63), 'pgqueue.lanes_seq');
end;
$$;

-- Lists, for all sessions, the lanes of a queue that have jobs to run: valid for 20 times as long as it
-- took, since moment, to find out. A lane stands there as priority + 101, and 256 more where it is of
-- groups.
create or replace function pgqueue._note_lanes(queue text, lanes int[], moment timestamptz)
    returns void
    language plpgsql
as $$
declare
    own record;
    codes bigint[] := array(
        select distinct (l.lane + 101) % 744 as code
        from unnest(lanes || 0) as l (lane) where l.lane >= -100 order by code
    );
    -- Only lane 0; a list; 0 and 1000; a list, and more; 1000, and 0 was empty.
    how int := case
        when codes = '{101}' then 0
        when codes = '{101,357}' then case when 0 = any (lanes) then 2 else 4 end
        when cardinality(codes) <= 7 then 1
        else 3
    end;
    valid_until bigint := pgqueue._since_2020(pgqueue._believed_until(moment, '100 milliseconds'));
begin
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue) & 63) & 1 = 0 then
        if how = 0 then
            return;
        end if;
        perform pgqueue._use_lanes(queue);
    end if;
    own := pgqueue._record(hashtextextended(queue, 9999));
    if how in (1, 3) then
        perform setval(('pgqueue._cell_' || own.record + 1)::regclass, bit_or(c.code << 9 * (c.nth - 1)::int))
        from (
            select u.code, row_number() over (order by u.code & 255 desc) as nth from unnest(codes) as u (code)
        ) as c
        where c.nth <= 7;
    end if;
    perform setval(
        ('pgqueue._cell_' || own.record)::regclass, own.tag | (valid_until & -8) | how
    );
end;
$$;

-- The listed lanes of a queue, always with lane 0, in the order of _due_lanes (lane 0 comes after 1000 if it
-- was empty), and -1000 at the end where it has more than there is room for; null where no list is valid.
create or replace function pgqueue._noted_lanes(queue text, moment timestamptz)
    returns int[]
    language plpgsql
as $$
declare
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
    key bigint;
    record int;
    valid_until bigint;
    own record;
    list bigint;
begin
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue) & 63) & 1 = 0 then
        return array[0];
    end if;
    -- As in _record, for the first one.
    key := hashtextextended(queue, 9999);
    record := (key & 15) * 2;
    valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0)
        # (key >> 20 & 4095) << 51;
    if (valid_until between 0 and 2251799813685247) is not true then
        own := pgqueue._record(key);
        record := own.record;
        valid_until := own.valid_until;
    end if;
    if (valid_until between now_us and now_us + 60000000) is not true then
        return null;
    elsif valid_until & 7 = 4 then
        return array[1000, 0];
    elsif valid_until & 7 = 0 then
        return array[0];
    elsif valid_until & 7 = 2 then
        return case when random() < 0.5 then array[0, 1000] else array[1000, 0] end;
    end if;
    list := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
    return array(
        select (c.code - 101 + case when c.code > 256 then 744 else 0 end)::int
        from (select list >> 9 * n & 511 as code from generate_series(0, 6) as n) as c
        where c.code > 0
        order by c.code & 255 desc, random()
    ) || case when valid_until & 7 = 3 then array[-1000] end;
end;
$$;

-- For a job that appears in a lane: makes claims look there at once. A hint, given before the commit;
-- without it they look within 100 ms.
create or replace function pgqueue._list_lane(queue text, lane int)
    returns void
    language plpgsql
as $$
declare
    own record;
    now_us bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint - 1577836800000000;
    list bigint := 357;
    code int := (lane + 101) % 744;
begin
    if lane = 0 then
        return;
    elsif pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue) & 63) & 1 = 0 then
        perform pgqueue._use_lanes(queue);
    end if;
    own := pgqueue._record(hashtextextended(queue, 9999));
    -- If no list is valid, the next claim looks for itself.
    if (own.valid_until between now_us and now_us + 60000000) is not true then
        return;
    elsif own.valid_until & 7 = 0 then
        list := 0;
    elsif own.valid_until & 7 in (1, 3) then
        list := pg_sequence_last_value(('pgqueue._cell_' || own.record + 1)::regclass);
    end if;
    if code in (
            list & 511, list >> 9 & 511, list >> 18 & 511, list >> 27 & 511,
            list >> 36 & 511, list >> 45 & 511, list >> 54
        )
        -- Below those that there is room for.
        or own.valid_until & 7 = 3 and code & 255 <= list >> 54 & 255
    then
        return;
    end if;
    perform pgqueue._note_lanes(
        queue, pgqueue._noted_lanes(queue, clock_timestamp()) || lane, clock_timestamp()
    );
end;
$$;

-- For a job that a claim picked and did not take: moves the position of its lane back before it.
create or replace function pgqueue._return_position(
    queue text, kinds text[], paused jsonb, lane int, at timestamptz
)
    returns void
    language plpgsql
as $$
declare
    own record := pgqueue._record(hashtextextended(concat(queue, kinds, paused), lane));
    cell regclass := ('pgqueue._cell_' || own.record + 1)::regclass;
    -- A little before, whatever the id.
    reached bigint := pgqueue._since_2020(at) - 1;
begin
    if own.valid_until > 0 and pg_sequence_last_value(cell) >> 12 > reached then
        perform setval(cell, greatest(reached, 0) << 12);
    end if;
end;
$$;

-- For a job that appears behind the position of its lane: makes the next claim walk from the beginning,
-- unless that is expensive. A hint, given before the commit.
create or replace function pgqueue._reopen_lane(queue text, lane int)
    returns void
    language plpgsql
as $$
declare
    own record := pgqueue._record(hashtextextended(queue, lane));
    now_us bigint := pgqueue._since_2020(clock_timestamp());
begin
    perform pgqueue._list_lane(queue, lane);
    if own.valid_until between now_us and now_us + 100000 then
        perform setval(('pgqueue._cell_' || own.record)::regclass, own.tag);
    end if;
end;
$$;

-- The record of a lane, by its hash, and the position in it: null if none is valid.
create or replace function pgqueue._position(
    key bigint, moment timestamptz,
    out record int, out reached bigint, out last_id bigint, out has_expired boolean
)
    language plpgsql
as $$
declare
    own record := pgqueue._record(key);
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
begin
    record := own.record;
    has_expired := false;
    if own.valid_until between now_us and now_us + 60000000 then
        reached := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
        last_id := pg_sequence_last_value(('pgqueue._cell_tie_' || (key & 3))::regclass);
        if (last_id % 4095 + 1 = reached & 4095) is not true then
            last_id := 0;
        end if;
    elsif own.valid_until between now_us - 1000000 and now_us then
        -- This claim walks from the beginning, the others go on.
        perform setval(('pgqueue._cell_' || record)::regclass, own.tag | now_us + 100000);
        has_expired := true;
    end if;
end;
$$;

-- Moves the position of a lane, known so far, to what has been reached; with an id where times tie.
-- valid_until where the walk began at the beginning of the lane; null where it began at the position.
create or replace function pgqueue._leave_position(
    key bigint, record int, known bigint, reached bigint, last_id bigint, valid_until bigint
)
    returns void
    language plpgsql
as $$
begin
    record := coalesce(record, (pgqueue._record(key)).record);
    if reached < 0 then
        -- A cell holds nothing before 2020: the next claim walks from the beginning.
        perform setval(('pgqueue._cell_' || record)::regclass, 0);
        return;
    end if;
    if last_id > 0 then
        perform setval(('pgqueue._cell_tie_' || (key & 3))::regclass, last_id);
    end if;
    -- Back only if something was behind: others may have come further meanwhile.
    known := case
        when valid_until is null or reached >= known >> 12
            then pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass)
    end;
    if (reached < known >> 12) is not true then
        perform setval(
            ('pgqueue._cell_' || record + 1)::regclass,
            reached << 12 | case when last_id > 0 then last_id % 4095 + 1 else 0 end
        );
    end if;
    if valid_until is not null then
        perform setval(('pgqueue._cell_' || record)::regclass, (key >> 20 & 4095) << 51 | valid_until);
    end if;
end;
$$;

-- Lets claims know of a new job where they would not look at once: outside lane 0, or in the past.
create or replace function pgqueue._announce(queue text, priority int, run_at timestamptz)
    returns void
    language plpgsql
as $$
begin
    if run_at <= clock_timestamp() then
        perform pgqueue._reopen_lane(queue, coalesce(priority, 0));
    elsif priority <> 0 then
        perform pgqueue._list_lane(queue, priority);
    end if;
end;
$$;
-- The module between producer and worker: which sessions wait, and what wakes them.
--
-- NOTIFY takes a cluster-wide lock at commit, so a producer sends it only when
-- somebody waits for it. Two families of advisory locks show that, each folded to 256 keys
-- so that one transaction over many queues cannot fill the lock table:
--
--   7366513 "in flight"  held shared by every enqueue until its transaction ends
--   7366514 "parked"     held shared by the session of every worker that waits (see rest)
--
-- A producer first takes "in flight", then looks whether anybody is parked. A worker
-- first parks, then looks whether anything is in flight. So either the producer sees
-- the worker and notifies, or the worker sees the producer and asks again soon.
--
-- (7366516 is held by who waits for the end of a job: see module status, and _tell_end.)
--
-- A notification says in one word what it is for, and nothing about a job: empty means that there may be
-- something to claim, "cancel" that a running job was cancelled, "end" that a job has ended that somebody
-- waits for.
--
-- Any role may take any advisory lock, so nothing here waits for one: a lock that is not free
-- counts as "somebody is there", which costs a needless NOTIFY or another look. And a mere look
-- takes and releases the lock in one expression: no interrupt falls in between.

-- Notifies the workers parked on a queue, if any, when this transaction commits. SET pgqueue.notify =
-- off, or configure(notify => false), switches it off, as PREPARE TRANSACTION needs.
create or replace function pgqueue._wake(queue text)
    returns void
    language plpgsql
as $$
declare
    fold int := hashtext(_wake.queue) & 255;
begin
    if current_setting('pgqueue.notify', true) = 'off'
        or not (pgqueue._in_force(queue)).notify
    then
        return;
    end if;
    if (
        pg_try_advisory_xact_lock_shared(7366513, fold)
        and pg_try_advisory_lock(7366514, fold)
        and pg_advisory_unlock(7366514, fold)
    ) is not true
        -- A full notification queue makes COMMIT fail, and a hint is not worth that.
        and pg_notification_queue_usage() < 0.5
    then
        perform pg_notify('pgqueue', '');
    end if;
end;
$$;

-- Sends a notification about a queue when this transaction commits, if it may: see _wake.
create or replace function pgqueue._notify(queue text, news text)
    returns void
    language plpgsql
as $$
begin
    if current_setting('pgqueue.notify', true) = 'off'
        or not (pgqueue._in_force(queue)).notify
    then
        return;
    end if;
    -- A full notification queue makes COMMIT fail, and a hint is not worth that.
    if pg_notification_queue_usage() < 0.5 then
        perform pg_notify('pgqueue', news);
    end if;
end;
$$;

-- Ends what _park began. Harmless when not parked.
create or replace function pgqueue._unpark()
    returns void
    language plpgsql
as $$
begin
    -- Only what this session holds: unlocking anything else raises a warning.
    perform pg_advisory_unlock_shared(7366514, l.objid::int)
    from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid()
        and l.database = (select d.oid from pg_database as d where d.datname = current_database())
        and l.classid = 7366514 and l.objsubid = 2 and l.mode = 'ShareLock';
    perform set_config('pgqueue.parked', '', false);
end;
$$;

-- For a claim that found work: a session that has worked for 100 ms without a rest needs no
-- notifications.
create or replace function pgqueue._unpark_if_busy(moment timestamptz)
    returns void
    language plpgsql
as $$
begin
    -- As texts of equal length, so that no setting can be unreadable.
    if current_setting('pgqueue.parked') = 'resting' then
        perform set_config('pgqueue.parked', pgqueue._since_2020(moment)::text, false);
    elsif current_setting('pgqueue.parked')
        < pgqueue._since_2020(moment - interval '100 milliseconds')::text
    then
        perform pgqueue._unpark();
    end if;
end;
$$;

-- From now on enqueues into these queues notify this session. False if one is still open, or may be.
create or replace function pgqueue._park(queues text[])
    returns boolean
    language plpgsql
as $$
declare
    fold int;
    is_quiet boolean := true;
begin
    perform pgqueue._unpark();
    perform set_config('pgqueue.parked', 'resting', false);
    for fold in
        select distinct hashtext(q.name) & 255 from unnest(queues) as q (name) order by 1
    loop
        is_quiet := pg_try_advisory_lock_shared(7366514, fold)
            and pg_try_advisory_lock(7366513, fold)
            and pg_advisory_unlock(7366513, fold)
            and is_quiet;
    end loop;
    return is_quiet;
end;
$$;

-- Notes that this session serves these queues, or these kinds of them: for as long as it lives, or for ten minutes if
-- many may use it, as behind a pooler. Locks need no looking after, but any role could take them, and they know no kinds.
create or replace function pgqueue._serve(queues text[], kinds text[], is_shared boolean)
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    said text := current_setting('pgqueue.serves', true);
    news text := concat(
        hashtextextended(queues::text, 0), ' ', hashtextextended(kinds::text, 0), ' ',
        -- Once a minute it looks whether what it said still holds for a while.
        case when is_shared then floor(date_part('epoch', moment) / 60) end
    );
begin
    if said = news or current_setting('transaction_read_only') = 'on' then
        return;
    end if;
    -- What a session of the same number has left does not hold for this one.
    delete from pgqueue.service as s
    where s.ctid = any (array(
        select s.ctid
        from pgqueue.service as s
        left join pg_stat_activity as a on a.pid = s.pid and (a.backend_start = s.started) is not false
        where a.pid is null or s.until < moment or s.pid = pg_backend_pid() and coalesce(said, '') = ''
        for update of s skip locked
    ));
    insert into pgqueue.service (until, started, pid, queue, kinds)
    select
        case when is_shared then moment + interval '10 minutes' else 'infinity' end,
        (select a.backend_start from pg_stat_activity as a where a.pid = pg_backend_pid()),
        pg_backend_pid(), q.name, _serve.kinds
    from (select distinct unnest(queues)) as q (name)
    where not exists (
        select
        from pgqueue.service as s
        where s.pid = pg_backend_pid() and s.queue = q.name and s.until > moment + interval '5 minutes'
            and (s.kinds is null or s.kinds @> _serve.kinds)
    );
    perform set_config('pgqueue.serves', news, false);
end;
$$;

-- Notifies sessions that wait for one of these jobs, which this transaction has deleted, when it commits.
create or replace function pgqueue._tell_end(ended pgqueue._ended[])
    returns void
    language plpgsql
as $$
declare
    of_jobs record;
begin
    if pg_try_advisory_lock(7366516, 256) and pg_advisory_unlock(7366516, 256) then
        return;
    end if;
    for of_jobs in
        select distinct (e.id & 255)::int as fold, e.queue from unnest(ended) as e where e.back_at is null
    loop
        if (
            pg_try_advisory_lock(7366516, of_jobs.fold)
            and pg_advisory_unlock(7366516, of_jobs.fold)
        ) is not true then
            perform pgqueue._notify(of_jobs.queue, 'end');
        end if;
    end loop;
end;
$$;
-- Tickets: which groups have jobs to run.
--
-- Jobs of groups are in lanes of their own, which no claim walks. A group that has something to run at
-- some priority has a ticket, a small row that says when to look at it next. A claim takes the due tickets,
-- the earliest first, each group gives a job and its ticket goes to the end: so groups are served
-- round-robin, whatever waits in each, and an enqueue has nothing to compute.
--
-- Tickets are hints. An enqueue inserts one if it sees none, and changes none, so that an open
-- transaction holds up nobody; the end of an attempt makes the ticket of a full group due; nothing waits
-- for a lock. Two tickets of one group do no harm. The sweep, which goes from group to group, 50 in 50 ms,
-- finds what is missing: nothing depends on a ticket that may get lost. The setting pgqueue.lose_hints, a
-- fraction from 0 to 1, loses them at random, for tests.

-- Whether to lose a hint, for a test.
create or replace function pgqueue._is_lost()
    returns boolean
    language plpgsql
as $$
declare
    part text := current_setting('pgqueue.lose_hints', true);
begin
    return coalesce(part <> '' and random() < part::float8, false);
end;
$$;

-- Makes claims look at a group from this moment on, unless they do so anyway; returns whether it had no
-- ticket. in_order: whether a job must not overtake another.
create or replace function pgqueue._insert_ticket(
    queue text, group_key text, priority int, at timestamptz, in_order boolean
)
    returns boolean
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    moment timestamptz := greatest(at, clock_timestamp());
begin
    if at = 'infinity' then
        return false;
    elsif coalesce(current_setting('pgqueue.lose_hints', true), '') <> '' and pgqueue._is_lost() then
        return true;
    end if;
    perform
    from pgqueue.ticket as t
    where pgqueue._is_ticket_of(t, _insert_ticket.queue, _insert_ticket.group_key)
        and t.priority = _insert_ticket.priority
        and (t.at <= moment or t.is_blocked)
        -- A session that has this one locked may be deleting it; one that has changed it has left its own lock.
        and t.xmax in ('0'::xid, t.xmin)
    limit 1;
    if found then
        return false;
    end if;
    insert into pgqueue.ticket (at, start_at, start_until, priority, queue, group_key)
    -- If it has none, nothing waits before this job, or else its ticket was lost.
    values (
        moment, _insert_ticket.at,
        case when pg_sequence_last_value('pgqueue._cell_groups_slow')
            > (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000
            and in_order is not true
        then moment + interval '1 second' end,
        _insert_ticket.priority, _insert_ticket.queue, _insert_ticket.group_key
    );
    perform pgqueue._list_lane(queue, 1000 + priority);
    return true;
end;
$$;

-- _insert_ticket for many; null among the groups means none.
create or replace function pgqueue._insert_tickets(
    queues text[], group_keys text[], priorities int[], ats timestamptz[], in_order boolean default true
)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    moment timestamptz := clock_timestamp();
    is_slow boolean := pg_sequence_last_value('pgqueue._cell_groups_slow') > pgqueue._since_2020(moment);
begin
    if pgqueue._is_lost() then
        return;
    end if;
    insert into pgqueue.ticket (at, start_at, start_until, priority, queue, group_key)
    -- A microsecond apart, so that a walk can go on between any two.
    select
        n.at + (n.place - count(*) over ()) * interval '1 microsecond', n.first_at,
        case when is_slow and in_order is not true then n.at + interval '1 second' end,
        n.priority, n.queue, n.key
    from (
        select
            u.queue, u.key, u.priority, greatest(min(u.at), moment) as at,
            min(u.at) - interval '1 second' as first_at,
            row_number() over (order by min(u.place)) as place
        from unnest(queues, group_keys, priorities, ats) with ordinality as u (queue, key, priority, at, place)
        where u.key is not null and u.at < 'infinity'
        group by u.queue, u.key, u.priority
        offset 0
    ) as n
    where not exists (
        select
        from pgqueue.ticket as t
        where pgqueue._is_ticket_of(t, n.queue, n.key)
            and t.priority = n.priority
            and (t.at <= n.at or t.is_blocked) and t.xmax in ('0'::xid, t.xmin)
    )
    order by n.place;
end;
$$;

-- For groups in which an attempt has ended: if they could give no more jobs, makes claims look at them
-- again at once.
create or replace function pgqueue._wake_groups(queues text[], group_keys text[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    moment timestamptz := clock_timestamp();
    blocked record;
    locked tid[];
begin
    if pgqueue._is_lost() then
        return;
    end if;
    select
        array_agg(t.tid) as tids, array_agg(distinct g.queue) as queues,
        array_agg(t.priority) as priorities, array_agg(g.queue) as all_queues, array_agg(g.key) as keys
    into blocked
    from (
        select distinct u.queue, u.key from unnest(queues, group_keys) as u (queue, key) where u.key is not null
    ) as g
    cross join lateral (
        select t.ctid as tid, t.priority
        from pgqueue.ticket as t
        where pgqueue._is_ticket_of(t, g.queue, g.key) and t.is_blocked
    ) as t;
    if blocked.tids is null then
        return;
    end if;
    locked := array(
        select t.ctid from pgqueue.ticket as t where t.ctid = any (blocked.tids) and t.is_blocked
        for update skip locked
    );
    update pgqueue.ticket as t set at = moment, served = 0, is_blocked = false, is_full = false where t.ctid = any (locked);
    if cardinality(locked) < cardinality(blocked.tids) then
        -- Another session is just looking at these, and may see the group as it was.
        insert into pgqueue.ticket (at, priority, queue, group_key)
        select moment, b.priority, b.queue, b.key
        from unnest(blocked.tids, blocked.priorities, blocked.all_queues, blocked.keys)
            as b (tid, priority, queue, key)
        where b.tid <> all (locked);
    end if;
    perform pgqueue._wake(q.name) from unnest(blocked.queues) as q (name);
end;
$$;

-- After a change of settings: makes claims look again at the groups (of all queues if it is null) that
-- could give no more jobs.
create or replace function pgqueue._unblock_groups(queue text, group_key text)
    returns void
    language plpgsql
    set enable_tidscan = on
as $$
begin
    update pgqueue.ticket as t
    set at = clock_timestamp(), served = 0, is_blocked = false, is_full = false
    where t.ctid = any (array(
        select b.ctid
        from pgqueue.ticket as b
        where b.is_blocked and b.queue = coalesce(_unblock_groups.queue, b.queue)
            and b.group_key = coalesce(nullif(_unblock_groups.group_key, '*'), b.group_key)
        for update skip locked
    ));
end;
$$;

-- For jobs that come back to their old place in a lane, or to a new one in its middle: makes claims find
-- them at once, and wakes waiting workers.
create or replace function pgqueue._reopened(
    queues text[], priorities int[], group_keys text[], run_ats timestamptz[]
)
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._announce(o.queue, o.lane, o.run_at)
    from (
        select u.queue, u.priority + 1000 * num_nonnulls(u.key) as lane, min(u.run_at) as run_at
        from unnest(_reopened.queues, _reopened.priorities, _reopened.group_keys, _reopened.run_ats)
            as u (queue, priority, key, run_at)
        group by 1, 2
    ) as o;
    if num_nonnulls(variadic group_keys) > 0 then
        perform pgqueue._wake_groups(queues, group_keys);
        perform pgqueue._insert_tickets(queues, group_keys, priorities, run_ats);
    end if;
    perform pgqueue._wake(o.queue)
    from (select distinct u.queue from unnest(_reopened.queues) as u (queue)) as o;
end;
$$;

-- When a claim should look at a lane of groups again: at its next ticket, or when one of its first leases
-- expires; null for never. is_strict: the first job of a group holds up the others.
create or replace function pgqueue._until_ticket(
    queue text, kinds text[], paused jsonb, lane int, is_strict boolean, moment timestamptz
)
    returns timestamptz
    language plpgsql
    set enable_bitmapscan = off
as $$
declare
    -- A due ticket that a claim has left is for jobs that it may not take.
    first_at timestamptz := (
        select min(greatest(t.at, j.run_at))
        from (
            select t.at, t.priority, t.group_key
            from pgqueue.ticket as t
            where pgqueue._is_ticket_in(t, _until_ticket.queue, lane - 1000)
                -- The end of an attempt or a pause announces itself, if it knew of this one.
                and (not t.is_blocked or t.served > -3)
            order by t.at
            limit case when num_nonnulls(kinds, paused) = 0 then 1 else 1000 end
        ) as t
        left join lateral (
            select f.run_at
            from (
                select j.run_at, j.kind, j.group_key
                from pgqueue.job as j
                where pgqueue._is_in_group(j, _until_ticket.queue, t.group_key)
                    and -j.priority = -t.priority
                    and j.lease_expires_at is null and num_nonnulls(kinds, paused) > 0
                order by j.run_at, j.id
                limit case when is_strict then 1 end
            ) as f
            where pgqueue._is_wanted(f.kind, f.group_key, _until_ticket.kinds, _until_ticket.paused)
            limit 1
        ) as j on true
        where num_nonnulls(kinds, paused) = 0 or j.run_at is not null
    );
begin
    first_at := least(first_at, (
        select min(j.lease_expires_at)
        from (
            select j.lease_expires_at
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_ticket.queue, lane) and j.run_at <= moment
            order by j.run_at, j.id
            limit 1000
        ) as j
    ));
    return case when first_at is not null then greatest(first_at, moment + interval '50 milliseconds') end;
end;
$$;

-- The next groups, from this hash on, and the priorities at which they have any job: one index descent
-- for each.
create or replace function pgqueue._group_lanes(start bigint, most int)
    returns table (hash bigint, queue text, group_key text, priority int)
    language plpgsql
as $$
begin
    return query
    with recursive lane (hash, below, queue, group_key) as (
        values (start, -1000, null::text, null::text)
        union all
        select n.*
        from lane as l
        cross join lateral (
            select hashtextextended(j.group_key, hashtext(j.queue)), -j.priority, j.queue, j.group_key
            from pgqueue.job as j
            where j.group_key is not null
                and (hashtextextended(j.group_key, hashtext(j.queue)), -j.priority) > (l.hash, l.below)
            order by hashtextextended(j.group_key, hashtext(j.queue)), -j.priority, j.run_at, j.id
            limit 1
        ) as n
    )
    select l.hash, l.queue, l.group_key, -l.below from lane as l where l.group_key is not null limit most;
end;
$$;

-- Continues through the groups, at most this many, at each of their priorities: gives a ticket to those
-- that have jobs to run but no ticket, and drops copies. Returns how many it looked at, and how many it
-- gave.
create or replace function pgqueue._sweep_some(most int)
    returns int[]
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_bitmapscan = off
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    moment timestamptz := clock_timestamp();
    start bigint := coalesce(
        pg_sequence_last_value('pgqueue._cell_groups_swept'::regclass), -9223372036854775808
    );
    lanes record;
    missed record;
    doubted tid[];
    locked tid[];
begin
    select
        array_agg(l.hash) as hashes, array_agg(l.queue) as queues, array_agg(l.group_key) as keys,
        array_agg(l.priority) as priorities, array_agg(f.at) as ats
    into lanes
    from pgqueue._group_lanes(start, most) as l
    left join lateral (
        select greatest(j.run_at, moment) as at
        from pgqueue.job as j
        where hashtextextended(j.group_key, hashtext(j.queue)) = l.hash and -j.priority = -l.priority
            and j.queue = l.queue and j.group_key = l.group_key and j.run_at < 'infinity'
            and (j.lease_expires_at is null or j.lease_expires_at <= moment)
        order by j.run_at, j.id
        limit 1
    ) as f on true;
    -- From the last group again, of which it may have seen only a part.
    if cardinality(lanes.hashes) = most then
        perform setval('pgqueue._cell_groups_swept', lanes.hashes[most]);
    elsif start > -9223372036854775808 then
        perform setval('pgqueue._cell_groups_swept', -9223372036854775808);
    end if;
    select
        array_agg(l.queue) filter (where not t.is_known) as queues,
        array_agg(l.key) filter (where not t.is_known) as keys,
        array_agg(l.priority) filter (where not t.is_known) as priorities,
        array_agg(l.at) filter (where not t.is_known) as ats,
        array_agg(t.tids) filter (where t.is_doubtful) as doubted
    into missed
    from unnest(lanes.hashes, lanes.queues, lanes.keys, lanes.priorities, lanes.ats)
        as l (hash, queue, key, priority, at)
    cross join lateral (
        select
            coalesce(bool_or(t.at <= l.at or t.is_blocked and not exists (
                select
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, l.queue, '', l.key) and p.free_at <= moment
            )), false) as is_known,
            -- Or another session keeps it locked.
            count(*) > 1 or min(t.at) < moment - interval '1 second' as is_doubtful,
            array_to_string(array_agg(t.ctid), ' ') as tids
        from pgqueue.ticket as t
        where hashtextextended(t.group_key, hashtext(t.queue)) = l.hash and t.priority = l.priority
            and t.queue = l.queue and t.group_key = l.key
    ) as t
    where l.at is not null;
    if missed.queues is not null then
        insert into pgqueue.ticket (at, priority, queue, group_key)
        select m.at, m.priority, m.queue, m.key
        from unnest(missed.queues, missed.keys, missed.priorities, missed.ats) as m (queue, key, priority, at);
    end if;
    if missed.doubted is not null then
        doubted := string_to_array(array_to_string(missed.doubted, ' '), ' ')::tid[];
        locked := array(
            select t.ctid from pgqueue.ticket as t where t.ctid = any (doubted) for update skip locked
        );
        insert into pgqueue.ticket (at, priority, queue, group_key)
        select moment, t.priority, t.queue, t.group_key
        from pgqueue.ticket as t
        where t.ctid = any (doubted)
        group by t.priority, t.queue, t.group_key
        having bool_and(t.ctid <> all (locked));
        delete from pgqueue.ticket as t
        where t.ctid = any (array(
            select c.tid
            from (
                select
                    t.ctid as tid,
                    row_number() over (partition by t.queue, t.group_key, t.priority order by t.at) as nth
                from pgqueue.ticket as t
                where t.ctid = any (locked)
            ) as c
            where c.nth > 1
        ));
    end if;
    return array[coalesce(cardinality(lanes.hashes), 0), coalesce(cardinality(missed.queues), 0)];
end;
$$;

-- _sweep_some for at most this many, or fewer if that would take long; returns how many tickets it gave.
create or replace function pgqueue._sweep_groups(most int default 50)
    returns int
    language plpgsql
as $$
declare
    walked bigint := pgqueue._group_tuples();
    swept int[];
    looked int := 0;
    given int := 0;
begin
    loop
        swept := pgqueue._sweep_some(25);
        looked := looked + swept[1];
        given := given + swept[2];
        -- Or it wraps around, or many finished jobs are in its way that some old snapshot keeps.
        exit when looked >= most or swept[1] < 25 or pgqueue._group_tuples() > walked + 5000 + 10 * most;
    end loop;
    return given;
end;
$$;

-- How many index entries of groups this transaction has read.
create or replace function pgqueue._group_tuples()
    returns bigint
    language plpgsql
as $$
begin
    return pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass)
        + pg_stat_get_xact_tuples_returned('pgqueue.ticket_group_idx'::regclass);
end;
$$;
-- Leases: who holds a job, and for how long. A lease is held by (id, token), and no function
-- but claim touches a job that is not leased under the token it is given. To a worker that may work on some
-- queues only, a job of another is lost whatever its token, which could be guessed.
--
-- Locks: claim, reap and extend skip what is locked and never wait. The functions that end
-- attempts lock jobs in the order of their ids. So no two of them wait for each other.

-- Locks those jobs that are leased under these tokens, in the order of their ids, and returns where they
-- are.
create or replace function pgqueue._lock_held(job_ids bigint[], tokens bigint[])
    returns tid[]
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    own text[] := pgqueue._own_queues('worker');
begin
    return array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (_lock_held.job_ids)
            and ((j.id, j.token) in (
                select h.id, h.token from unnest(_lock_held.job_ids, _lock_held.tokens) as h (id, token)
            )) is true
            and pgqueue._is_own(j.queue, own)
        order by j.id
        for update
    );
end;
$$;

-- Whether a job waits or runs, and nobody is just writing or ending it. Its row alone does not tell: a
-- transaction that wrote it may have rolled back.
create or replace function pgqueue._is_left_alone(job_id bigint)
    returns boolean
    language plpgsql
as $$
begin
    -- For key share it would wait for a session that is just updating it, despite skip locked.
    perform from pgqueue.job as j where j.id = _is_left_alone.job_id for update skip locked;
    if found then
        -- Releases the lock.
        raise sqlstate 'PQ000';
    end if;
    return false;
exception when sqlstate 'PQ000' then
    return true;
end;
$$;

create or replace function pgqueue.extend(
    job_ids bigint[],
    tokens bigint[],
    lease interval default null
)
    returns table (job_id bigint, status text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(job_ids, tokens),
        case when lease is not null then pgqueue._check_ranges(lease => lease) end
    ));
    moment timestamptz := clock_timestamp();
    own text[] := pgqueue._own_queues('worker');
    picks tid[];
begin
    -- A heartbeat never waits: a handler that has completed its job and not yet committed
    -- holds the row, and the leases of all the other jobs would expire behind it.
    picks := array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (extend.job_ids)
            and ((j.id, j.token) in (
                select h.id, h.token from unnest(extend.job_ids, extend.tokens) as h (id, token)
            )) is true
            and pgqueue._is_own(j.queue, own)
        order by j.id
        for update skip locked
    );
    update pgqueue.job as j
    set lease_expires_at = case
            when extend.lease is not null then moment + extend.lease
            -- A claim may have asked for longer than the default.
            else greatest(j.lease_expires_at, moment + (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease)
        end
    where j.ctid = any (picks);

    -- What another session has locked is held for as long as its previous lease.
    return query
    select
        h.id,
        coalesce(
            (
                select case
                    when j.cancelled_at is not null then 'cancelled'
                    when j.lease_expires_at > moment then 'held'
                end
                from pgqueue.job as j
                where j.id = h.id and j.token = h.token and pgqueue._is_own(j.queue, own)
            ),
            'lost'
        )
    from unnest(extend.job_ids, extend.tokens) with ordinality as h (id, token, place)
    order by h.place;
end;
$$;

comment on function pgqueue.extend(bigint[], bigint[], interval) is
'The heartbeat: extends leases for another lease from now (without one: for the
default, but never shorter than before), and says for each job whether it is
held, cancelled (stop working, then call fail or release) or lost (stop
working, report nothing). A lease that has expired but that nobody has
recovered is held again. This never waits: a job that an open transaction has
locked keeps its present lease, held while that lasts and lost after it.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';
-- The ends of attempts that did not complete: how long to wait, what is kept of the error, and
-- where the job goes. Only this module moves a job to dead_job or sends it back. Its callers have
-- locked the jobs. What follows any end, of a job that completed as well, is _after_end.

-- How long to wait after a failed attempt: least(cap, base * 2^(attempt - 1)) times a random 0.5 to 1.
create or replace function pgqueue._retry_delay(attempt int, retry_base interval, retry_cap interval)
    returns interval
    language plpgsql
    volatile
as $$
begin
    -- The exponent is capped before the power, or high attempts would overflow. Between
    -- half and all of it: jobs that failed together must not come back together.
    return make_interval(secs => (0.5 + random() / 2) * least(
        extract(epoch from retry_cap)::float8,
        extract(epoch from retry_base)::float8
            * power(2::float8, least(greatest(attempt, 1) - 1, 60))
    ));
end;
$$;

-- The first line of an error, used to find, count and log it.
create or replace function pgqueue._summary(error text)
    returns text
    language plpgsql
    immutable
as $$
begin
    return left(split_part(ltrim(error, E' \t\r\n'), E'\n', 1), 500);
end;
$$;

-- Why a job was put off last, as an error without an attempt; null if it was not.
create or replace function pgqueue._put_off(job pgqueue.job)
    returns jsonb
    language plpgsql
    immutable
as $$
begin
    return case when jsonb_typeof(job.errors -> -1 -> 'attempt') = 'null' then job.errors -> -1 end;
end;
$$;

-- A job's errors and a new one (null for none), the last 10, without why it was put off before.
create or replace function pgqueue._add_error(
    job pgqueue.job, error text, moment timestamptz, is_counted boolean default true
)
    returns jsonb
    language plpgsql
    immutable
as $$
declare
    errors jsonb := case when pgqueue._put_off(job) is null then job.errors else job.errors - -1 end;
begin
    return case
        when error is null then errors
        else case when jsonb_array_length(errors) >= 10 then errors - 0 else errors end
            || jsonb_build_array(jsonb_build_object(
                'attempt', case when is_counted then job.attempt end,
                'at', moment, 'worker', job.worker, 'error', error
            ))
    end;
end;
$$;

-- Writes the current attempts of some locked jobs into run.
create or replace function pgqueue._log(
    picks tid[], outcomes text[], errors text[], moment timestamptz, results jsonb[] default null
)
    returns void
    language plpgsql
as $$
declare
    today int := floor(date_part('epoch', moment) / 86400)::int;
begin
    insert into pgqueue.run (
        slot, attempt, job_id, finished_at, waited, taken,
        queue, kind, outcome, worker, result, error,
        payload, headers, options
    )
    select
        (today + settings.keep_runs) % 16,
        j.attempt, j.id, _log.moment,
        coalesce(j.claimed_at, _log.moment) - least(j.run_at, j.claimed_at, _log.moment),
        _log.moment - coalesce(j.claimed_at, _log.moment),
        j.queue, j.kind, e.outcome, j.worker,
        case when e.outcome = 'cancelled' then to_jsonb(coalesce(j.cancel_reason, e.error)) else e.result end,
        case when e.outcome <> 'cancelled' then pgqueue._summary(e.error) end,
        kept.*
    from unnest(picks, outcomes, errors, results) as e (place, outcome, error, result)
    join pgqueue.job as j on j.ctid = e.place
    cross join lateral pgqueue._in_force(j.queue, j.kind, j.group_key) as settings
    -- One that is dead is kept in dead_job; the others go on.
    left join lateral (
        select j.payload, j.headers, jsonb_build_object(
            'priority', j.priority, 'max_attempts', j.max_attempts, 'group_key', j.group_key
        )
    ) as kept on settings.keep_payloads and e.outcome in ('completed', 'cancelled')
    where settings.keep_runs > 0 and e.outcome <> 'released';
end;
$$;

-- Locks jobs that are about to complete and writes them into run, if anything sets keep_payloads; else
-- leaves that to the caller, which is faster.
create or replace function pgqueue._log_kept(
    job_ids bigint[], tokens bigint[], results jsonb[], moment timestamptz
)
    returns boolean
    language plpgsql
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    held tid[];
    done record;
begin
    if not exists (
        select from pgqueue.queue as q
        where num_nonnulls(q.keep_runs, q.keep_payloads) > 0 and q.keep_payloads
    ) then
        return false;
    end if;
    -- In a statement of its own: the next one sees what this one may have waited for.
    held := pgqueue._lock_held(job_ids, tokens);
    select
        array_agg(j.ctid) as picks, array_agg('completed'::text) as outcomes,
        array_agg(given.result) as results
    into done
    from unnest(held) as h (place)
    join pgqueue.job as j on j.ctid = h.place
    left join (
        select distinct on (u.id, u.token) u.*
        from unnest(job_ids, tokens, results) as u (id, token, result)
    ) as given on given.id = j.id and given.token = j.token;
    perform pgqueue._log(done.picks, done.outcomes, null, moment, done.results);
    return true;
end;
$$;

-- For jobs whose attempts end: gives their permits back, if nobody has them locked, but for those of
-- their groups that some keep for their retry, and lets claims look again at the queues and groups that
-- may have been full. Plans as _after_end sets it.
create or replace function pgqueue._return_permits(ended pgqueue._ended[])
    returns void
    language plpgsql
as $$
declare
    is_lost boolean := coalesce(current_setting('pgqueue.lose_hints', true), '') <> '' and pgqueue._is_lost();
    given record;
begin
    with held as (
        select e.id, e.queue, e.group_key, e.permits, e.back_at, e.keeps_permit
        from unnest(ended) as e
        where e.permits is not null
    ), back as (
        update pgqueue.permit as p
        set free_at = clock_timestamp(), job_id = null, is_surplus = false
        where not is_lost and p.ctid = any (array(
            select k.ctid
            from held as h
            cross join lateral unnest(h.permits) as u (tid)
            join pgqueue.permit as k on k.ctid = u.tid
            where k.job_id = h.id and not k.is_rate and (k.group_key = '' or h.keeps_permit is not true)
            for update of k skip locked
        ))
        returning p.group_key
    )
    -- _reopened announces those that go back.
    select
        array_agg(h.queue) as queues,
        array_agg(h.queue) filter (where h.is_blocked) as blocked_queues,
        array_agg(h.group_key) filter (where h.is_blocked) as blocked_keys,
        (select bool_and(b.group_key <> '') from back as b) as are_of_groups
    into given
    from (
        select h.queue, h.group_key, h.group_key is not null and (
            select true from pgqueue.ticket as t
            where pgqueue._is_ticket_of(t, h.queue, h.group_key) and t.is_blocked
            limit 1
        ) as is_blocked
        from held as h
        where h.back_at is null
    ) as h;
    if given.blocked_keys is not null then
        perform pgqueue._wake_groups(given.blocked_queues, given.blocked_keys);
    end if;
    if given.are_of_groups is not true then
        perform pgqueue._wake(q.name) from (select distinct u.name from unnest(given.queues) as u (name)) as q;
    end if;
end;
$$;

-- Records that jobs, which this transaction has just deleted, did not complete. Otherwise what is
-- enqueued after them would run.
create or replace function pgqueue._note_gone(job_ids bigint[])
    returns void
    language plpgsql
as $$
begin
    insert into pgqueue.gone (part, ids, ended_at)
    select u.id >> 6, bit_or(1::bigint << (u.id & 63)::int), clock_timestamp()
    from unnest(job_ids) as u (id)
    group by u.id >> 6;
end;
$$;

-- What follows the ends of attempts and jobs, whoever ended them, in this order: their permits are free,
-- those that go back are found, it is remembered which were cancelled, their batches count them, the jobs
-- that wait for them go on or are cancelled (unless is_in_chain: by who ends a chain of them), batches
-- that are over finish, and who waits for them is told. Only this function does any of it; call it when
-- the rows are written.
create or replace function pgqueue._after_end(ended pgqueue._ended[], is_in_chain boolean default false)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    has record;
begin
    select
        bool_or(e.permits is not null) as permits, bool_or(e.back_at is not null) as back,
        bool_or(e.back_at is null) as gone, bool_or(e.outcome = 'cancelled') as cancelled,
        bool_or(e.back_at is null and e.batch_id is not null) as batches
    into has
    from unnest(ended) as e;
    if has.permits then
        perform pgqueue._return_permits(ended);
    end if;
    if has.back then
        perform pgqueue._reopened(
            array_agg(e.queue), array_agg(e.priority), array_agg(e.group_key), array_agg(e.back_at)
        )
        from unnest(ended) as e
        where e.back_at is not null;
    end if;
    if has.cancelled then
        perform pgqueue._note_gone(array(select e.id from unnest(ended) as e where e.outcome = 'cancelled'));
    end if;
    -- Counted first, because together with those that wait for them their batch may be over.
    if has.batches then
        perform pgqueue._count_ends(ended);
    end if;
    if has.gone and not is_in_chain and pg_relation_size('pgqueue.dependency') > 0 then
        perform pgqueue._cut_ties(array(select e.id from unnest(ended) as e where e.back_at is null));
    end if;
    if has.batches and not pgqueue._is_lost() then
        perform pgqueue._look_at_batches(array(
            select e.batch_id from unnest(ended) as e where e.back_at is null and e.batch_id is not null
        ));
    end if;
    if pg_sequence_last_value('pgqueue._cell_awaited')
        > (date_part('epoch', clock_timestamp()) * 1000000)::bigint - 1577836800000000
    then
        perform pgqueue._tell_end(ended);
    end if;
end;
$$;

-- Ends the attempts of some locked jobs that did not complete, each by its outcome: retry, expired and
-- released (whose attempt does not count) go back to work at run_at (null: at their place), dead to
-- dead_job, cancelled is gone.
create or replace function pgqueue._end(
    picks tid[], outcomes text[], errors text[], run_ats timestamptz[], moment timestamptz,
    is_in_chain boolean default false
)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    ended pgqueue._ended[] := array(
        select row(
            j.id, e.outcome, j.queue, j.group_key, (j.terms).batch_id, j.permits, j.priority,
            case when e.outcome in ('retry', 'expired', 'released') then coalesce(e.run_at, j.run_at) end,
            case when e.outcome in ('retry', 'expired') and num_nonnulls(j.permits, j.group_key) = 2
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).group_on_retry = 'block'
            end
        )::pgqueue._ended
        from unnest(picks, outcomes, run_ats) as e (place, outcome, run_at)
        join pgqueue.job as j on j.ctid = e.place
    );
begin
    if ended = '{}' then
        return;
    end if;
    perform pgqueue._log(picks, outcomes, errors, moment);

    insert into pgqueue.dead_job (
        id, died_at, enqueued_at, run_at, claimed_at, priority, attempt, max_attempts,
        queue, kind, unique_key, group_key, worker, terms, error, payload, headers, errors
    )
    select
        j.id, _end.moment, j.enqueued_at, j.run_at, j.claimed_at,
        j.priority, j.attempt, j.max_attempts, j.queue, j.kind,
        j.unique_key, j.group_key, j.worker, j.terms, e.error, j.payload,
        j.headers, pgqueue._add_error(j, e.error, _end.moment)
    from unnest(picks, outcomes, errors) as e (place, outcome, error)
    join pgqueue.job as j on j.ctid = e.place
    where e.outcome = 'dead';

    delete from pgqueue.job as j
    where j.ctid = any (array(
        select e.place
        from unnest(picks, outcomes) as e (place, outcome)
        where e.outcome in ('dead', 'cancelled')
    ));

    update pgqueue.job as j
    set run_at = coalesce(e.run_at, j.run_at),
        permits = case when j.id = any (array(select k.id from unnest(ended) as k where k.keeps_permit)) then j.permits end,
        attempt = j.attempt - (e.outcome = 'released')::int,
        token = null,
        claimed_at = null,
        lease_expires_at = null,
        worker = null,
        progress = null,
        errors = pgqueue._add_error(j, e.error, _end.moment, e.outcome <> 'released')
    from unnest(_end.picks, _end.outcomes, _end.errors, _end.run_ats)
        as e (place, outcome, error, run_at)
    where j.ctid = e.place and e.outcome in ('retry', 'expired', 'released');
    perform pgqueue._after_end(ended, is_in_chain);
end;
$$;

-- Ends what is over among some locked jobs, and returns how many. Attempts whose leases expired: back to
-- their place, dead if exhausted, gone if cancelled. Waiting jobs that may not begin any more: cancelled.
create or replace function pgqueue._expire(picks tid[], moment timestamptz)
    returns int
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    ended record;
begin
    select
        array_agg(e.place) as picks,
        array_agg(e.outcome) as outcomes,
        array_agg(case
            when e.late_since is not null
                then format('expired at %s UTC', to_char(e.late_since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS'))
            -- A worker that held many did not fail because of each of them; one that held one, perhaps.
            else format(
                'the lease expired: worker %s stopped extending it (%s)',
                e.worker,
                case e.held
                    when 1 then 'its only expired lease'
                    else format('one of its %s leases that expired together', e.held)
                end
            )
        end) as errors
    into ended
    from (
        select
            j.ctid as place,
            j.worker,
            case when j.lease_expires_at is null then (j.terms).expires_at end as late_since,
            count(*) over (partition by j.worker) as held,
            case
                when j.lease_expires_at is null or j.cancelled_at is not null then 'cancelled'
                when j.attempt >= j.max_attempts then 'dead'
                else 'expired'
            end as outcome
        from pgqueue.job as j
        where j.ctid = any (_expire.picks)
            and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _expire.moment
    ) as e;
    perform pgqueue._end(ended.picks, ended.outcomes, ended.errors, null, moment);
    return coalesce(cardinality(ended.picks), 0);
end;
$$;

-- Ends the attempts of some locked jobs by fail, reject or release; retry (at run_at; null: after the
-- backoff), dead, released (null: where it stands) or cancelled for each.
create or replace function pgqueue._end_attempts(
    picks tid[], verbs text[], errors text[], run_ats timestamptz[], moment timestamptz
)
    returns table (job_id bigint, status text)
    language plpgsql
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    given record;
begin
    select
        array_agg(o.id) as ids,
        array_agg(o.place) as picks,
        array_agg(o.outcome) as outcomes,
        -- Recording a failure never fails: any text is kept, or its beginning.
        array_agg(coalesce(left(o.error, 8000), case when o.verb <> 'release' then 'no error text' end)) as errors,
        array_agg(case when o.outcome <> 'retry' or o.run_at is not null then o.run_at else (
            select _end_attempts.moment + pgqueue._retry_delay(o.attempt, s.retry_base, s.retry_cap)
            from pgqueue._in_force(o.queue, o.kind, o.group_key) as s
        ) end) as run_ats
    into given
    from (
        select
            j.id, j.attempt, j.queue, j.kind, j.group_key, e.*,
            case
                when j.cancelled_at is not null then 'cancelled'
                when e.verb = 'release' then 'released'
                when e.verb = 'reject' or j.attempt >= j.max_attempts then 'dead'
                else 'retry'
            end as outcome
        from unnest(picks, verbs, errors, run_ats) as e (place, verb, error, run_at)
        join pgqueue.job as j on j.ctid = e.place
    ) as o;
    perform pgqueue._end(given.picks, given.outcomes, given.errors, given.run_ats, moment);
    return query select u.id, u.outcome from unnest(given.ids, given.outcomes) as u (id, outcome);
end;
$$;

-- Ends expired leases and jobs among some picked jobs and the next thousand of their lane, from the first
-- on: so that one claim finds all that a dead worker held, and no claim has to end ten thousand.
create or replace function pgqueue._recover(
    queue text, lane int, picks tid[], first timestamptz, moment timestamptz
)
    returns void
    language plpgsql
as $$
declare
    near tid[] := array(
        select j.ctid
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _recover.queue, _recover.lane)
            and j.run_at between _recover.first and _recover.moment
        order by j.run_at, j.id
        limit 1000
    );
begin
    perform pgqueue._expire(
        array(
            select j.ctid
            from pgqueue.job as j
            where j.ctid = any (_recover.picks || near)
                and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _recover.moment
            for update skip locked
        ),
        moment
    );
end;
$$;
-- Ageing: for each age_after a waiting job counts as one priority higher, so that none starves.
--
-- Nothing is written for it: within a lane the order stays, so only the lanes have to be compared. A
-- claim looks, without a lock, at the first jobs of each, from the position that module pick has left;
-- at lower lanes only as far as a job must have waited to come before those of the lanes above. Then
-- each lane has its share of the claim, and _pick takes it. If others took some of them meanwhile, it
-- takes the next of the same lane, and the rest by priority.
--
-- In a lane of groups a job is served when it is the turn of its group: it counts as waiting since the
-- last of those before it.

-- The effective priority of a job that has been due since run_at; its own if nothing ages.
create or replace function pgqueue._aged(
    priority int, run_at timestamptz, moment timestamptz, age_after interval
)
    returns float8
    language plpgsql
    immutable
as $$
begin
    return priority + coalesce(
        floor(date_part('epoch', moment - run_at) / date_part('epoch', age_after)), 0
    );
end;
$$;

-- By when a job of a priority must have been due to be served before, or with, one of another priority
-- that has been due since run_at.
create or replace function pgqueue._due_by(
    priority int, other int, run_at timestamptz, moment timestamptz, age_after interval
)
    returns timestamptz
    language plpgsql
    immutable
as $$
declare
    age float8 := date_part('epoch', age_after);
    steps float8 := other - priority + floor(date_part('epoch', moment - run_at) / age);
begin
    if age_after is null then
        return case when priority > other then moment else '-infinity' end;
    end if;
    return least(moment, greatest(
        moment - make_interval(secs => (steps + 1) * age),
        least(run_at, moment - make_interval(secs => steps * age))
    ));
end;
$$;

-- Since when the first jobs of a lane that a claim may take, at most the wanted number, have been
-- waiting, without those after a bound; null for none. Locks nothing. Plans as claim sets it.
create or replace function pgqueue._look(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, bound timestamptz
)
    returns timestamptz[]
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    key bigint := hashtextextended(concat(queue, kinds, paused), lane);
    known record := pgqueue._position(key, moment);
    first timestamptz := '-infinity'::timestamptz;
    start timestamptz := timestamptz '2020-01-01 00:00 UTC' + (known.reached >> 12) * interval '1 microsecond';
    start_id bigint := known.last_id;
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass);
    seen record;
begin
    if (start < moment) is not true then
        start := first;
        start_id := 0;
    elsif start >= bound then
        return null;
    end if;
    select
        array_agg(w.run_at) filter (where w.run_at <= bound) as since,
        min(w.run_at) as at, (array_agg(w.id))[1] as id, count(*) as jobs
    into seen
    from (
        select j.id, j.run_at
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _look.queue, lane)
            and j.run_at <= bound
            and (j.run_at, j.id) > (start, start_id)
            and case
                when j.lease_expires_at is null then ((j.terms).expires_at <= _look.moment) is not true
                else j.lease_expires_at <= _look.moment
            end
            and pgqueue._is_wanted(j.kind, j.group_key, _look.kinds, _look.paused)
        order by j.run_at, j.id
        limit wanted
    ) as w;
    walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass) - walked - 3 * seen.jobs;
    if known.has_expired or start = first and walked > 200 or start > first and walked > 60 then
        bound := least(bound, moment - interval '10 milliseconds');
        perform pgqueue._leave_position(
            key, known.record, known.reached, pgqueue._since_2020(least(seen.at, bound)),
            case when (seen.at > bound) is not true then seen.id - 1 end,
            case when start = first
                then pgqueue._since_2020(pgqueue._believed_until(began, interval '100 milliseconds'))
            end
        );
    end if;
    return seen.since;
end;
$$;

-- _look for a lane of groups, in the order of their turns. Plans as claim sets it, and as it sets them
-- itself.
create or replace function pgqueue._look_at_groups(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, bound timestamptz
)
    returns timestamptz[]
    language plpgsql
    set enable_sort = on
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    return (
        select array_agg(s.since order by s.since) filter (where s.since <= bound)
        from (
            select max(h.run_at) over (order by h.nth, t.at) as since
            from (
                select n.*, ceil(wanted::float8 / count(*) over ())::int as each
                from (
                    select
                        t.at, t.group_key,
                        coalesce(
                            case when t.start_until between moment and moment + interval '1 minute' then t.start_at end,
                            '-infinity'
                        ) as start
                    from pgqueue.ticket as t
                    where pgqueue._is_ticket_in(t, _look_at_groups.queue, lane - 1000) and t.at <= moment
                    order by t.at
                    limit wanted
                ) as n
            ) as t
            cross join lateral (
                select o.run_at, row_number() over (order by o.run_at, o.id) as nth
                from (
                    select j.run_at, j.id
                    from pgqueue.job as j
                    where pgqueue._is_in_group(j, _look_at_groups.queue, t.group_key)
                        and -j.priority = 1000 - lane
                        and j.run_at between t.start and moment
                        and case
                            when j.lease_expires_at is null
                                then ((j.terms).expires_at <= _look_at_groups.moment) is not true
                            else j.lease_expires_at <= _look_at_groups.moment
                        end
                        and pgqueue._is_wanted(j.kind, j.group_key, _look_at_groups.kinds, _look_at_groups.paused)
                    order by j.run_at, j.id
                    limit t.each
                ) as o
            ) as h
            order by h.nth, t.at
            limit wanted
        ) as s
    );
end;
$$;

-- How many of its jobs a claim has to take from each lane, by age, and in which order; null if that makes
-- no difference.
create or replace function pgqueue._share_by_age(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, age_after interval,
    lanes int[], out served int[], out shares int[]
)
    language plpgsql
as $$
declare
    lane int;
    priority int;
    bound timestamptz;
    seen timestamptz[];
    last_priority int;
    last_since timestamptz;
    seen_in int[] := '{}'::int[];
    seen_since timestamptz[] := '{}'::timestamptz[];
begin
    foreach lane in array lanes loop
        priority := case when lane > 500 then lane - 1000 else lane end;
        bound := case when last_since is null then moment
            else pgqueue._due_by(priority, last_priority, last_since, moment, age_after)
        end;
        seen := case when lane > 500
            then pgqueue._look_at_groups(queue, kinds, paused, lane, max_jobs, moment, bound)
            else pgqueue._look(queue, kinds, paused, lane, max_jobs, moment, bound)
        end;
        continue when seen is null;
        seen_in := seen_in || array_fill(lane, array[cardinality(seen)]);
        seen_since := seen_since || seen;
        if cardinality(seen) = max_jobs then
            last_priority := priority;
            last_since := seen[max_jobs];
        end if;
    end loop;
    -- All of them, or those of one lane: there is nothing to share.
    if cardinality(seen_in) < max_jobs or seen_in[1] = seen_in[cardinality(seen_in)] then
        return;
    end if;
    select array_agg(s.lane order by s.first), array_agg(s.jobs order by s.first) into served, shares
    from (
        select r.lane, min(r.rank) as first, count(*)::int as jobs
        from (
            select
                w.lane,
                row_number() over (
                    order by
                        pgqueue._aged(
                            w.lane - case when w.lane > 500 then 1000 else 0 end, w.since, moment, age_after
                        ) desc,
                        w.since, w.place
                ) as rank
            from unnest(seen_in, seen_since) with ordinality as w (lane, since, place)
        ) as r
        where r.rank <= max_jobs
        group by r.lane
    ) as s;
end;
$$;
-- Permits: to run, or to begin, a job needs one permit of each of its caps.
--
-- They are persistent rows, created as needed, at most as many as the cap says; each says when it may be
-- taken: never while it is held or, for a rate, when its period is over. To take one is to lock it, and what
-- the locked row says holds, whatever the snapshot: so an index look-up is enough, the last one given back
-- comes first, and what others have locked is passed over: no claim waits.
--
-- The end of an attempt gives its permits back, unless somebody has them locked: no end waits either. Such a
-- permit is then held by a job that is gone. A claim that finds a cap full checks whether the holders of some
-- of its permits still run; the sweep, which goes through the pages of the table, finds the others.
--
-- Two sessions that do not see each other may create a permit twice. So no transaction takes a permit that it
-- created, which nobody else can see, and copies of one that was never taken are merged first.
--
-- When a cap is lowered, the held permits move to the lowest places, and those held beyond it are surplus:
-- while there is any, no other is taken.
--
-- When a cap is set, the running jobs get permits. So do, with the token -1, the jobs that others have locked at that
-- moment, because they may be claiming them: such a job keeps its permit if it turns out to run.

-- Creates more permits of each cap, as many as are wanted, unless there are enough (null: as many as are
-- wanted), or all; returns for which groups. They can be taken once this has committed.
create or replace function pgqueue._make_permits(
    queue text, caps pgqueue._cap[], wanted int[], enough int default null
)
    returns text[]
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    lacking text[];
begin
    with made as (
        insert into pgqueue.permit (free_at, token, place, is_rate, queue, kind, group_key)
        select
            '-infinity', -pg_current_xact_id()::text::bigint, p.place, c.is_rate,
            _make_permits.queue, c.kind, c.group_key
        from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
        cross join lateral (
            select count(*) as permits, coalesce(max(o.place), 0) as last_place
            from (
                select p.place
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _make_permits.queue, c.kind, c.group_key)
                    and p.is_rate = c.is_rate
                limit coalesce(enough, wanted[c.nth])
            ) as o
        ) as made
        cross join lateral generate_series(
            made.last_place + 1, least(c.most, made.last_place + wanted[c.nth])
        ) as p (place)
        -- Or there may be more than were counted.
        where made.permits < coalesce(enough, wanted[c.nth])
        returning permit.group_key
    )
    select array_agg(distinct m.group_key) into lacking from made as m;
    return lacking;
end;
$$;

-- Whether a permit was created twice. Plans as its callers set it.
create or replace function pgqueue._is_double(permit pgqueue.permit)
    returns boolean
    language plpgsql
as $$
begin
    return 1 < (
        select count(*)
        from pgqueue.permit as o
        where pgqueue._is_permit_of(o, permit.queue, permit.kind, permit.group_key)
            and o.is_rate = permit.is_rate and o.place = permit.place
    );
end;
$$;

-- Whether any cap of a queue has a surplus. Hot paths first look whether there has ever been one.
create or replace function pgqueue._any_surplus(queue text)
    returns boolean
    language plpgsql
as $$
begin
    return exists (
        select
        from pgqueue.permit as s
        where hashtext(s.queue) = hashtext(_any_surplus.queue) and s.queue = _any_surplus.queue and s.is_surplus
    );
end;
$$;

-- Whether more jobs of a queue, kind or group run than its cap allows. Plans as its callers set it.
create or replace function pgqueue._has_surplus(queue text, kind text, group_key text)
    returns boolean
    language plpgsql
as $$
begin
    return exists (
        select
        from pgqueue.permit as s
        where hashtext(s.queue) = hashtext(_has_surplus.queue)
            and pgqueue._is_permit_of(s, _has_surplus.queue, _has_surplus.kind, _has_surplus.group_key)
            and s.is_surplus
    );
end;
$$;

-- If two sessions have created permits twice: drops all copies but one; returns how many.
create or replace function pgqueue._merge_permits(queue text, kind text, group_keys text[])
    returns int
    language plpgsql
as $$
declare
    locked tid[] := array(
        select p.ctid
        from unnest(group_keys) as g (key)
        join pgqueue.permit as p
            on pgqueue._is_permit_of(p, _merge_permits.queue, _merge_permits.kind, g.key)
        for update of p skip locked
    );
    merged int;
begin
    -- One that is held, or was taken last, stays; if others have a copy locked, all stay.
    delete from pgqueue.permit as p
    where p.ctid = any (array(
        select c.ctid
        from (
            select
                o.ctid,
                o.free_at = 'infinity' as is_held, o.job_id, first_value(o.job_id) over copies as first_id,
                row_number() over copies as nth,
                bool_and(o.ctid = any (locked)) over (partition by o.group_key, o.is_rate, o.place) as is_locked
            from unnest(group_keys) as g (key)
            join pgqueue.permit as o
                on pgqueue._is_permit_of(o, _merge_permits.queue, _merge_permits.kind, g.key)
            window copies as (
                partition by o.group_key, o.is_rate, o.place
                order by o.free_at = 'infinity' desc, o.taken_at desc nulls last, o.ctid
            )
        ) as c
        where c.is_locked and c.nth > 1 and not (c.is_held and c.job_id is distinct from c.first_id)
    ));
    get diagnostics merged = row_count;
    return merged;
end;
$$;

-- How many permits of each cap look free, at most as many as wanted; how many more jobs may therefore begin
-- according to the caps of the queue itself, and which kinds and caps are full. Plans as its callers set it.
create or replace function pgqueue._room(
    queue text, caps pgqueue._cap[], wanted int, moment timestamptz, out free int[], out jobs int, out full_kinds text[],
    out full_caps int[]
)
    language plpgsql
as $$
declare
    own_token bigint := -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0);
    has_surplus boolean := pg_relation_size('pgqueue.permit_surplus_idx') > 8192 and pgqueue._any_surplus(queue);
begin
    select
        array_agg(f.free), least(wanted, min(f.free) filter (where f.kind = '')),
        coalesce(array_agg(f.kind) filter (where f.kind <> '' and f.free = 0), '{}'),
        array_agg(f.nth::int) filter (where f.free = 0)
    into free, jobs, full_kinds, full_caps
    from (
        select c.kind, c.nth, (
            select count(*)
            from (
                select
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _room.queue, c.kind, c.group_key)
                    and pgqueue._is_free(p, c.is_rate, c.most, moment)
                    and (p.taken_at is not null or p.token is distinct from own_token)
                    and not (has_surplus and not c.is_rate and pgqueue._has_surplus(_room.queue, c.kind, c.group_key))
                -- The last ones given back, behind which some old snapshot may keep others.
                order by p.free_at desc
                limit wanted
            ) as free
        )::int as free
        from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
        offset 0
    ) as f;
end;
$$;

-- Locks free permits of some caps, of each at most as many as wanted, and returns them in the order of
-- the caps. Plans as its callers set it.
create or replace function pgqueue._lock_free(
    queue text, caps pgqueue._cap[], wanted int[], moment timestamptz, out caps_of int[], out permits tid[]
)
    language plpgsql
as $$
declare
    own_token bigint := -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0);
    has_surplus boolean := pg_relation_size('pgqueue.permit_surplus_idx') > 8192 and pgqueue._any_surplus(queue);
begin
    select array_agg(c.nth::int), array_agg(l.tid) into caps_of, permits
    from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
    cross join lateral (
        select p.ctid as tid
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _lock_free.queue, c.kind, c.group_key)
            and pgqueue._is_free(p, c.is_rate, c.most, moment)
            and (p.taken_at is not null or p.token is distinct from own_token and not pgqueue._is_double(p))
            and not (has_surplus and not c.is_rate and pgqueue._has_surplus(_lock_free.queue, c.kind, c.group_key))
        order by p.free_at desc
        limit wanted[c.nth]
        for update skip locked
    ) as l;
end;
$$;

-- Gives locked permits to jobs that a claim takes, those of rates until free_at; returns where they are
-- now. Plans as its callers set it.
create or replace function pgqueue._give_permits(
    permits tid[], job_ids bigint[], new_token bigint, moment timestamptz, free_ats timestamptz[] default null
)
    returns tid[]
    language plpgsql
as $$
declare
    given tid[];
begin
    with given as (
        update pgqueue.permit as p
        set free_at = coalesce(g.free_at, 'infinity'), job_id = g.job_id, token = new_token, taken_at = moment
        from unnest(permits, job_ids, free_ats) with ordinality as g (tid, job_id, free_at, nth)
        where p.ctid = g.tid
        returning g.nth, p.ctid as tid
    )
    select array_agg(g.tid order by g.nth) into given from given as g;
    return given;
end;
$$;

-- For full caps, of a kind or of groups: checks whether the jobs that hold their permits still run,
-- except those that the claim of this token took, ends those whose leases have expired, and merges
-- copies. Returns 0 if nothing has changed.
create or replace function pgqueue._review_permits(
    queue text, kind text, group_keys text[], mosts int[], moment timestamptz, new_token bigint
)
    returns int
    language plpgsql
as $$
declare
    -- Some, where there are many, but always the one that nobody holds: see _fit_permits.
    locked tid[] := array(
        select h.tid
        from unnest(group_keys, mosts) as g (key, most)
        cross join lateral (
            select p.ctid as tid
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, _review_permits.queue, _review_permits.kind, g.key)
                and not p.is_rate and p.free_at = 'infinity' and p.token is distinct from new_token
                and (g.most is null or g.most <= 32 or p.is_surplus and p.job_id is null
                    or p.place % (g.most / 16) = date_part('microseconds', moment)::int % (g.most / 16))
            for update skip locked
        ) as h
    );
    surplus text[] := array(
        select distinct p.group_key from pgqueue.permit as p where p.ctid = any (locked) and p.is_surplus
    );
    freed int := pgqueue._free_lost_permits(locked, moment);
    cap pgqueue._cap;
begin
    for cap in
        select _review_permits.kind, g.key, false, g.most, interval '1 second'
        from unnest(group_keys, mosts) as g (key, most)
        where g.key = any (surplus) and g.most is not null
    loop
        perform pgqueue._fit_permits(queue, cap, moment, new_token);
        freed := freed + 1;
    end loop;
    return freed + pgqueue._merge_permits(queue, kind, group_keys);
end;
$$;

-- Frees permits of rates that were taken by a clock that has been set back since; returns how many.
create or replace function pgqueue._forget_future(
    queue text, kind text, group_keys text[], moment timestamptz
)
    returns int
    language plpgsql
as $$
declare
    freed int;
begin
    update pgqueue.permit as p
    set free_at = moment, taken_at = null
    where p.ctid = any (array(
        select r.ctid
        from unnest(group_keys) as g (key)
        join pgqueue.permit as r on pgqueue._is_permit_of(r, _forget_future.queue, _forget_future.kind, g.key)
        -- A claim reads the clock before it takes one, perhaps long before.
        where r.is_rate and r.free_at > moment and r.taken_at > clock_timestamp() + interval '1 second'
        for update of r skip locked
    ));
    get diagnostics freed = row_count;
    return freed;
end;
$$;

-- Whether a job, by its token and permits, holds a permit that it took last, by the permit's token and
-- group: it runs, or keeps its group's for its retry.
create or replace function pgqueue._holds(token bigint, permits tid[], permit_token bigint, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select token = permit_token or token is null and permits is not null and group_key <> '' and permit_token <> -1
$$;

-- Frees those of some locked permits whose jobs no longer run, and ends the attempts whose leases have
-- expired; returns how many.
create or replace function pgqueue._free_lost_permits(locked tid[], moment timestamptz)
    returns int
    language plpgsql
as $$
declare
    expired bigint[];
    in_doubt bigint[] := pgqueue._in_doubt(locked);
    ended int := 0;
    freed int;
begin
    expired := array(
        select p.job_id
        from pgqueue.permit as p
        join pgqueue.job as j on j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
        where p.ctid = any (locked) and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _free_lost_permits.moment
    );
    if expired <> '{}' then
        ended := pgqueue._expire(
            array(select j.ctid from pgqueue.job as j where j.id = any (expired) for update skip locked), moment
        );
    end if;
    -- Also those that could not announce it, or whose hint was lost.
    update pgqueue.permit as p
    set free_at = _free_lost_permits.moment, job_id = null, is_surplus = false
    where p.ctid = any (locked) and (p.job_id = any (in_doubt)) is not true and not exists (
        select from pgqueue.job as j
        where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
            -- A retry keeps it only as long as its group is set to wait for it.
            and (j.token is not null or (pgqueue._in_force(j.queue, j.kind, j.group_key)).group_on_retry = 'block')
        offset 0
    );
    get diagnostics freed = row_count;
    return ended + freed;
end;
$$;

-- Moves the held permits of a cap (for a rate, the last ones taken) to the lowest places, and marks as
-- surplus those held beyond it; as long as that is not known, also one that nobody holds. Leaves alone those that the
-- claim of this token took.
create or replace function pgqueue._fit_permits(
    queue text, cap pgqueue._cap, moment timestamptz, new_token bigint default null
)
    returns void
    language plpgsql
    set enable_tidscan = on
as $$
declare
    locked tid[] := array(
        select p.ctid
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key)
            and p.is_rate = cap.is_rate and (new_token is null or p.token is distinct from new_token)
        for update skip locked
    );
    in_doubt bigint[] := pgqueue._in_doubt(locked);
    -- An attempt that is just beginning or ending holds one beyond the cap, and may go on: until that is known,
    -- none is taken.
    is_unsure boolean := not cap.is_rate and exists (
        select
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key)
            and not p.is_rate and p.place > cap.most and p.ctid <> all (locked)
            and (new_token is null or p.token is distinct from new_token)
    );
begin
    with known as (
        select
            p.ctid as tid, p.place, p.free_at,
            case when cap.is_rate then coalesce(p.taken_at + cap.period > _fit_permits.moment, false)
                else coalesce(p.job_id = any (in_doubt), false) or exists (
                    select from pgqueue.job as j
                    where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
                )
            end as is_held,
            case when cap.is_rate then p.taken_at + cap.period end as ends_at
        from pgqueue.permit as p
        where p.ctid = any (locked)
    ), fitted as (
        select k.*, l.place as new_place
        from (
            select k.*, row_number() over (order by k.is_held desc, k.ends_at desc nulls last, k.place) as nth
            from known as k
        ) as k
        join (select k.place, row_number() over (order by k.place) as nth from known as k) as l using (nth)
    )
    update pgqueue.permit as p
    set place = f.new_place,
        free_at = case
            when f.is_held then coalesce(f.ends_at, 'infinity')
            when is_unsure then 'infinity'
            else least(p.free_at, _fit_permits.moment)
        end,
        job_id = case when f.is_held then p.job_id end,
        is_surplus = is_unsure or not cap.is_rate and f.is_held and f.new_place > cap.most
    from fitted as f
    -- An unchanged permit stays where it is, or its job would not find it.
    where p.ctid = f.tid and (
        p.place <> f.new_place or p.is_surplus or is_unsure or not cap.is_rate and f.is_held and f.new_place > cap.most
        or f.is_held is distinct from (p.free_at > _fit_permits.moment) or f.ends_at <> p.free_at
    );
    if is_unsure and not exists (
        select
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key)
            and p.is_surplus and p.job_id is null
    ) then
        insert into pgqueue.permit (free_at, token, place, is_rate, is_surplus, queue, kind, group_key)
        select 'infinity', -1, max(p.place) + 1, false, true, _fit_permits.queue, cap.kind, cap.group_key
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key) and not p.is_rate;
    end if;
end;
$$;

-- Which of these jobs others have locked.
create or replace function pgqueue._locked_jobs(ids bigint[])
    returns bigint[]
    language plpgsql
    set enable_seqscan = off
as $$
begin
    return array(
        select j.id
        from pgqueue.job as j
        where j.id = any (ids) and j.xmax <> 0 and not pgqueue._is_left_alone(j.id)
    );
end;
$$;

-- Which jobs that others had locked when they were counted, and that hold some of these permits, run without having
-- any other of the cap, or may do so.
create or replace function pgqueue._in_doubt(locked tid[])
    returns bigint[]
    language plpgsql
as $$
declare
    ids bigint[] := array(
        select p.job_id from pgqueue.permit as p
        where p.ctid = any (locked) and p.token = -1 and p.job_id is not null
    );
begin
    if ids = '{}' then
        return ids;
    end if;
    return pgqueue._locked_jobs(ids) || array(
        select j.id
        from pgqueue.permit as p
        join pgqueue.job as j on j.id = p.job_id
        where p.ctid = any (locked) and p.token = -1 and j.lease_expires_at > clock_timestamp() and not exists (
            select from pgqueue.permit as o
            where pgqueue._is_permit_of(o, p.queue, p.kind, p.group_key) and o.job_id = j.id and o.token = j.token
        )
    );
end;
$$;

-- Gives permits of a cap to the running jobs that have none, whatever their places; with the token -1 to those that
-- others have locked, since they may be claiming them.
create or replace function pgqueue._count_running(queue text, cap pgqueue._cap)
    returns void
    language plpgsql
as $$
declare
    ids bigint[] := array(
        select j.id
        from pgqueue.job as j
        where cap.group_key = '' and hashtext(j.queue) = hashtext(_count_running.queue)
            and j.queue = _count_running.queue and cap.kind in ('', j.kind)
            and (j.lease_expires_at is not null or j.xmax <> 0)
        union all
        select j.id
        from pgqueue.job as j
        where hashtextextended(j.group_key, hashtext(j.queue))
            = hashtextextended(nullif(cap.group_key, ''), hashtext(_count_running.queue))
            and j.queue = _count_running.queue and j.group_key = cap.group_key
            and (j.lease_expires_at is not null or j.xmax <> 0)
    );
    in_doubt bigint[] := pgqueue._locked_jobs(ids);
begin
    with known as (
        select p.place, p.job_id, p.token
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _count_running.queue, cap.kind, cap.group_key)
            and not p.is_rate
    ), lacks as (
        select l.*, row_number() over (order by l.id) as nth
        from (
            select j.id, case when j.id = any (in_doubt) then -1 else j.token end as token
            from pgqueue.job as j
            where j.id = any (ids) and (j.lease_expires_at is not null or j.id = any (in_doubt))
        ) as l
        where not exists (select from known as k where k.job_id = l.id and k.token = l.token)
    ), free as (
        select f.tid, row_number() over () as nth
        from (
            select p.ctid as tid
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, _count_running.queue, cap.kind, cap.group_key)
                and not p.is_rate and p.free_at < 'infinity'
            limit (select count(*) from lacks)
            for update skip locked
        ) as f
    ), given as (
        update pgqueue.permit as p
        set free_at = 'infinity', job_id = l.id, token = l.token
        from free as f
        join lacks as l using (nth)
        where p.ctid = f.tid
        returning p.job_id, p.ctid as tid
    ), made as (
        insert into pgqueue.permit (free_at, place, is_rate, job_id, token, queue, kind, group_key)
        select
            'infinity', (select coalesce(max(k.place), 0) from known as k) + l.nth - f.permits, false, l.id, l.token,
            _count_running.queue, cap.kind, cap.group_key
        from lacks as l
        cross join (select count(*) as permits from free) as f
        where l.nth > f.permits
        returning permit.job_id, permit.ctid as tid
    ), has as (
        select g.* from given as g union all select m.* from made as m
    )
    -- A job that is just ending need not know.
    update pgqueue.job as j
    set permits = j.permits || h.tid
    from has as h
    where j.ctid = any (array(
        select k.ctid from has as o join pgqueue.job as k on k.id = o.job_id
        where k.lease_expires_at is not null
        for update of k skip locked
    )) and j.id = h.job_id;
end;
$$;

-- The permits of a cap: which are held, until when at the latest (the end of the lease, or of the
-- period), which may be taken, and which job holds them.
create or replace function pgqueue._permits(queue text, cap pgqueue._cap, moment timestamptz)
    returns table (place int, is_held boolean, free_at timestamptz, is_usable boolean, holder bigint)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    return query
    select
        p.place, p.is_held, case when p.is_held then p.free_at end,
        not p.is_held and p.place <= cap.most and not bool_or(p.is_surplus) over (),
        p.holder
    from (
        select
            p.place, p.is_surplus,
            case when cap.is_rate then p.free_at > _permits.moment else j.id is not null end as is_held,
            case when cap.is_rate then p.free_at else coalesce(j.lease_expires_at, j.run_at) end as free_at,
            j.id as holder
        from pgqueue.permit as p
        left join pgqueue.job as j on j.id = p.job_id
            and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
            -- A permit kept for a retry that is due may be taken.
            and (j.token is not null or j.run_at > _permits.moment)
        where pgqueue._is_permit_of(p, _permits.queue, cap.kind, cap.group_key)
            and p.is_rate = cap.is_rate
    ) as p;
end;
$$;

-- Looks at the next two pages of permits for those held by jobs that no longer run, except those that the
-- claim of this token took; returns how many it freed.
create or replace function pgqueue._sweep_permits(new_token bigint default null)
    returns int
    language plpgsql
as $$
declare
    pages bigint := pg_relation_size('pgqueue.permit') / current_setting('block_size')::int;
    page bigint;
    moment timestamptz := clock_timestamp();
begin
    if pages = 0 then
        return 0;
    end if;
    page := coalesce(pg_sequence_last_value('pgqueue._cell_permits_swept'::regclass), 0) % pages;
    perform setval('pgqueue._cell_permits_swept', page + 2);
    return pgqueue._free_lost_permits(
        array(
            select p.ctid from pgqueue.permit as p
            where p.ctid >= format('(%s,0)', page)::tid and p.ctid < format('(%s,0)', page + 2)::tid
                and not p.is_rate and p.free_at = 'infinity' and p.token is distinct from new_token
                -- Or it waits for another: see _fit_permits.
                and not (p.is_surplus and p.job_id is null) and not exists (
                    select from pgqueue.job as j
                    where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
                        and (coalesce(j.lease_expires_at, (j.terms).expires_at) <= moment) is not true
                    offset 0
                )
            for update skip locked
        ),
        moment
    );
end;
$$;

-- Drops the permits of at most 1000 groups that have had no job for a day; returns how many.
create or replace function pgqueue._drop_permits()
    returns bigint
    language plpgsql
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    idle record;
    locked tid[];
    dropped bigint;
begin
    select array_agg(i.queue) as queues, array_agg(i.group_key) as keys into idle
    from (
        select p.queue, p.group_key
        from pgqueue.permit as p
        where p.group_key <> ''
        group by p.queue, p.group_key
        having (max(p.taken_at) > clock_timestamp() - interval '1 day') is not true
            and not exists (
                select
                from pgqueue.job as j
                where pgqueue._is_in_group(j, p.queue, p.group_key)
            )
        limit 1000
    ) as i;
    locked := array(
        select p.tid
        from unnest(idle.queues, idle.keys) as i (queue, key)
        cross join lateral (
            select p.ctid as tid from pgqueue.permit as p where pgqueue._is_permit_of(p, i.queue, '', i.key)
            for update skip locked
        ) as p
    );
    -- All of a group or none: new ones are added after places without gaps.
    delete from pgqueue.permit as p
    where p.ctid = any (array(
        select unnest(g.tids)
        from unnest(idle.queues, idle.keys) as i (queue, key)
        cross join lateral (
            select array_agg(p.ctid) as tids
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, i.queue, '', i.key)
            having bool_and(p.ctid = any (locked) and (p.taken_at > clock_timestamp() - interval '1 day') is not true)
        ) as g
    ));
    get diagnostics dropped = row_count;
    return dropped;
end;
$$;
-- Groups: whose jobs a claim takes, and how many of each.
--
-- A claim takes the due tickets, the earliest first, and each group gives as many jobs as its weight
-- says, or a multiple of that if there are fewer groups than jobs wanted. Its ticket then goes to the
-- end. The ticket of a group that gave fewer is settled by what the group still has: nothing, and the
-- ticket is dropped; something for later, and it is set to that time; something due that it cannot give,
-- because it is full, at its rate or paused, and the ticket is blocked: the end of an attempt or a change
-- of settings makes it due, and so does time, first after 100 ms, in the end after 10 s.
--
-- A job of a group with a limit or a rate (group_limit, rate_limit) is taken with a permit of each, which
-- is locked before the job. If the limit is 1 no job overtakes another; if it is n, at most n - 1 do.
--
-- While another session holds a ticket, its group is served without it: an open transaction holds up nobody.

-- The weight, limit and rate in force for each of some groups; null for limits or rates if none is set.
-- Like _in_force, for many. may_keep: whether any job may keep its permit for its retry.
create or replace function pgqueue._group_settings(
    queue text, group_keys text[], shared pgqueue.queue_in_force, out weights int[], out limits int[], out rates int[],
    out periods interval[], out may_keep boolean
)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    may_keep := shared.group_on_retry = 'block';
    if shared.has_groups is not true then
        if shared.group_limit is not null then
            limits := array_fill(shared.group_limit, array[cardinality(group_keys)]);
        end if;
        return;
    end if;
    select
        array_agg(coalesce(s.weight, 1) order by g.nth), array_agg(s.group_limit order by g.nth),
        array_agg(s.rate_limit order by g.nth), array_agg(coalesce(s.rate_period, '1 second') order by g.nth),
        coalesce(bool_or(s.may_keep), false)
    into weights, limits, rates, periods, may_keep
    from unnest(group_keys) with ordinality as g (key, nth)
    cross join lateral (
        select
            (array_agg(q.weight order by q.nth) filter (where q.weight is not null))[1] as weight,
            (array_agg(q.group_limit order by q.nth) filter (where q.group_limit is not null))[1] as group_limit,
            (array_agg(q.rate_limit order by q.nth) filter (where q.rate_limit is not null))[1] as rate_limit,
            (array_agg(q.rate_period order by q.nth) filter (where q.rate_period is not null))[1] as rate_period,
            bool_or(q.group_on_retry = 'block') as may_keep
        from (
            select
                n.nth, q.weight, q.group_limit, q.group_on_retry,
                -- Rates of the queue are not rates of its groups.
                case when n.key <> '' then q.rate_limit end as rate_limit,
                case when n.key <> '' then q.rate_period end as rate_period
            from (
                values
                    (1, _group_settings.queue, g.key), (2, '', g.key), (3, _group_settings.queue, '*'), (4, '', '*'),
                    (5, _group_settings.queue, ''), (6, '', '')
            ) as n (nth, name, key)
            join pgqueue.queue as q on q.name = n.name and q.kind = '' and q.group_key = n.key
        ) as q
    ) as s;
    if num_nonnulls(variadic limits) = 0 then
        limits := null;
    end if;
    if num_nonnulls(variadic rates) = 0 then
        rates := null;
    end if;
end;
$$;

-- The caps of some groups, the group's number for each, and how many of its permits are wanted.
create or replace function pgqueue._group_caps(
    group_keys text[], limits int[], rates int[], periods interval[], wanted int[],
    out caps pgqueue._cap[], out groups int[], out wants int[]
)
    language plpgsql
    immutable
as $$
begin
    caps := array(
        select row('', g.key, c.is_rate, c.most, c.period)::pgqueue._cap
        from unnest(group_keys, limits, rates, periods) with ordinality as g (key, most, rate, period, nth)
        cross join lateral (values (false, g.most, interval '1 second'), (true, g.rate, g.period))
            as c (is_rate, most, period)
        where c.most is not null
        order by g.nth, c.is_rate
    );
    select array_agg(g.nth::int order by g.nth, c.is_rate), array_agg(g.wanted order by g.nth, c.is_rate)
    into groups, wants
    from unnest(group_keys, limits, rates, _group_caps.wanted) with ordinality as g (key, most, rate, wanted, nth)
    cross join lateral (values (false, g.most), (true, g.rate)) as c (is_rate, most)
    where c.most is not null;
end;
$$;

-- Creates permits for groups that have a limit or a rate: one for each time that a group is listed, and
-- at least four, unless they already have as many.
create or replace function pgqueue._make_group_permits(queue text, group_keys text[], shared pgqueue.queue_in_force)
    returns void
    language plpgsql
as $$
declare
    keys text[];
    jobs int[];
    settings record;
    of_groups record;
begin
    select array_agg(g.key), array_agg(g.jobs) into keys, jobs
    from (
        select u.key, greatest(count(*), 4)::int as jobs
        from unnest(group_keys) as u (key)
        where u.key is not null
        group by u.key
    ) as g;
    if keys is null then
        return;
    end if;
    settings := pgqueue._group_settings(queue, keys, shared);
    if num_nonnulls(settings.limits, settings.rates) > 0 then
        of_groups := pgqueue._group_caps(keys, settings.limits, settings.rates, settings.periods, jobs);
        perform pgqueue._make_permits(queue, of_groups.caps, of_groups.wants);
    end if;
end;
$$;

-- Locks due jobs of groups without caps, of each at most as many as it gives, and in all as many as
-- wanted; says to which group each belongs, and since when any is over. Plans as _pick_groups sets it.
create or replace function pgqueue._take_free(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], starts timestamptz[],
    wanted int, moment timestamptz, taken tid[], has_recovered boolean,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz
)
    language plpgsql
as $$
begin
    select
        array_agg(v.tid), array_agg(v.nth::int), array_agg(v.run_at), min(v.run_at) filter (where v.is_over)
    into picks, groups, run_ats, over_at
    from (
        select h.*, g.nth
        from unnest(group_keys, gives, starts) with ordinality as g (key, give, start, nth)
        cross join lateral (
            select
                j.ctid as tid, j.run_at,
                coalesce(j.lease_expires_at, (j.terms).expires_at) <= _take_free.moment as is_over
            from pgqueue.job as j
            where pgqueue._is_in_group(j, _take_free.queue, g.key)
                and -j.priority = -_take_free.priority
                and pgqueue._is_ready(j, g.start, _take_free.moment, has_recovered)
                and pgqueue._is_wanted(j.kind, j.group_key, _take_free.kinds, _take_free.paused)
                -- Of a group that is paused as a whole none is read.
                and (_take_free.paused -> g.key = '{"": true}') is not true
                and (taken is null or j.ctid <> all (taken))
            order by j.run_at, j.id
            limit g.give
            for update skip locked
        ) as h
        -- In the order of the groups: what comes after the last is not touched.
        limit wanted
    ) as v;
end;
$$;

-- Whether a group has a due job of a higher priority. Plans as _pick_groups sets it.
create or replace function pgqueue._has_higher(
    queue text, group_key text, priority int, moment timestamptz
)
    returns boolean
    language plpgsql
as $$
begin
    return exists (
        select
        from pgqueue.job as h
        where pgqueue._is_in_group(h, _has_higher.queue, _has_higher.group_key)
            and -h.priority < -_has_higher.priority
            and h.run_at <= moment and h.lease_expires_at is null
            and ((h.terms).expires_at <= moment) is not true
    );
end;
$$;

-- _take_free for groups that may have a limit: locks permits, and as many due jobs, in order; of those
-- that others have locked it passes over at most extra. is_top: none of these groups has anything of a
-- higher priority. Plans as _pick_groups sets it.
create or replace function pgqueue._take_limited(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[],
    starts timestamptz[], wanted int, extra int, moment timestamptz, taken tid[], has_recovered boolean, is_top boolean,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz, out ids bigint[],
    out permits tid[]
)
    language plpgsql
as $$
declare
    own_token bigint := -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0);
    has_surplus boolean := pg_relation_size('pgqueue.permit_surplus_idx') > 8192 and pgqueue._any_surplus(queue);
begin
    select
        array_agg(v.tid), array_agg(v.nth::int), array_agg(v.run_at), min(v.run_at) filter (where v.is_over),
        array_agg(v.id), array_agg(v.permit)
    into picks, groups, run_ats, over_at, ids, permits
    from (
        select g.nth, h.*, p.permits[h.place] as permit
        from unnest(group_keys, gives, limits, starts) with ordinality as g (key, give, most, start, nth)
        -- In order, up to the first that this claim may not take.
        cross join lateral (
            select c.tids[:coalesce(array_position(c.tids, null) - 1, cardinality(c.tids))] as tids
            from (
                -- Asked once: for each job it could change in between, and leave out those before.
                select case when is_top or g.most is distinct from 1
                    or not pgqueue._has_higher(_take_limited.queue, g.key, _take_limited.priority, moment)
                then array(
                    select case when w.is_wanted then j.ctid end
                    from pgqueue.job as j
                    cross join lateral (
                        select pgqueue._is_wanted(j.kind, j.group_key, _take_limited.kinds, _take_limited.paused) as is_wanted
                    ) as w
                    where pgqueue._is_in_group(j, _take_limited.queue, g.key)
                        and -j.priority = -_take_limited.priority
                        and pgqueue._is_ready(j, g.start, _take_limited.moment, has_recovered)
                        -- Only if a limit requires order does a job that is left out hold up the next.
                        and (g.most is not null or w.is_wanted)
                        and (taken is null or j.ctid <> all (taken))
                    order by j.run_at, j.id
                    limit g.give + least(coalesce(g.most - 1, extra), extra)
                ) else '{}'::tid[] end as tids
                offset 0
            ) as c
            offset 0
        ) as c
        cross join lateral (
            select
                case when g.most is not null then array(
                    select p.ctid
                    from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, _take_limited.queue, '', g.key)
                        and pgqueue._is_free(p, false, g.most, moment)
                        and (p.taken_at is not null or p.token is distinct from own_token and not pgqueue._is_double(p))
                        and not (has_surplus and pgqueue._has_surplus(_take_limited.queue, '', g.key))
                    order by p.free_at desc
                    limit least(g.give, cardinality(c.tids))
                    for update skip locked
                ) end as permits
            offset 0
        ) as p
        cross join lateral (
            select l.*, row_number() over () as place
            from (
                select k.*
                from unnest(c.tids) as u (tid)
                cross join lateral (
                    select
                        k.ctid as tid, k.id, k.run_at,
                        coalesce(k.lease_expires_at, (k.terms).expires_at) <= _take_limited.moment as is_over
                    from pgqueue.job as k
                    where k.ctid = u.tid and pgqueue._is_ready(k, '-infinity', _take_limited.moment, has_recovered)
                    for update skip locked
                ) as k
                limit least(g.give, cardinality(p.permits))
            ) as l
        ) as h
        -- In the order of the groups: what comes after the last is not touched.
        limit wanted
    ) as v;
end;
$$;

-- Locks jobs whose retries are due and that have kept the permits of their groups; left_over: what their
-- groups may give in addition. Plans as _pick_groups sets it.
create or replace function pgqueue._take_kept(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[], wanted int,
    moment timestamptz,
    out picks tid[], out ids bigint[], out groups int[], out permits tid[], out left_over int[]
)
    language plpgsql
as $$
begin
    select array_agg(k.tid), array_agg(k.id), array_agg(k.nth::int), array_agg(k.permit)
    into picks, ids, groups, permits
    from (
        select g.nth, h.*
        from unnest(group_keys, gives, limits) with ordinality as g (key, give, most, nth)
        cross join lateral (
            select j.ctid as tid, j.id, p.ctid as permit
            from pgqueue.permit as p
            join pgqueue.job as j on j.id = p.job_id
            where pgqueue._is_permit_of(p, _take_kept.queue, '', g.key)
                and pgqueue._is_kept(p, j, _take_kept.moment) and p.place <= g.most
                and ((j.terms).expires_at <= _take_kept.moment) is not true
                and j.priority = _take_kept.priority
                and pgqueue._is_wanted(j.kind, j.group_key, _take_kept.kinds, _take_kept.paused)
            limit g.give
            for update skip locked
        ) as h
        limit wanted
    ) as k;
    left_over := array(
        select g.give - (select count(*) from unnest(groups) as k (nth) where k.nth = g.nth)::int
        from unnest(gives) with ordinality as g (give, nth) order by g.nth
    );
end;
$$;

-- How many jobs some groups may give according to their rates. Plans as _pick_groups sets it.
create or replace function pgqueue._rate_gives(
    queue text, group_keys text[], gives int[], rates int[], periods interval[], moment timestamptz
)
    returns int[]
    language plpgsql
as $$
declare
    of_groups record := pgqueue._group_caps(group_keys, null, rates, periods, null);
    room record := pgqueue._room(queue, of_groups.caps, (select max(u.give) from unnest(gives) as u (give)), moment);
begin
    return array(
        select least(f.free, g.give)
        from unnest(gives) with ordinality as g (give, nth)
        left join unnest(of_groups.groups, room.free) as f (of, free) on f.of = g.nth
        order by g.nth
    );
end;
$$;

-- Locks a permit to begin for each picked job whose group has a rate, the groups given by their numbers;
-- returns which jobs get none. Plans as _pick_groups sets it.
create or replace function pgqueue._take_rates(
    queue text, group_keys text[], rates int[], periods interval[], groups int[], moment timestamptz,
    out permits tid[], out free_ats timestamptz[], out refused int[]
)
    language plpgsql
as $$
declare
    of_groups record := pgqueue._group_caps(
        group_keys, null, rates, periods,
        array(
            select (select count(*) from unnest(groups) as u (of) where u.of = g.nth)::int
            from generate_series(1, cardinality(group_keys)) as g (nth) order by g.nth
        )
    );
    locked record := pgqueue._lock_free(queue, of_groups.caps, of_groups.wants, moment);
begin
    select
        array_agg(l.tid order by u.place), array_agg(moment + periods[u.of] order by u.place),
        array_agg(u.place::int) filter (where l.tid is null and rates[u.of] is not null)
    into permits, free_ats, refused
    from (
        select u.of, u.place, row_number() over (partition by u.of order by u.place) as nth
        from unnest(groups) with ordinality as u (of, place)
    ) as u
    left join (
        select of_groups.groups[l.cap] as of, l.tid, row_number() over (partition by l.cap) as nth
        from unnest(locked.caps_of, locked.permits) as l (cap, tid)
    ) as l on l.of = u.of and l.nth = u.nth;
end;
$$;

-- Takes jobs of some groups, of each at most as many as it gives, and in all as many as wanted: which,
-- and of which group; with permits if they need any, for the claim of this token, drawn here if null:
-- which job has which. How long it stays valid that nothing is before them, if the walk was long; or
-- since when anything there is over: then all has to be done again.
create or replace function pgqueue._visit_groups(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[], rates int[],
    periods interval[], may_keep boolean, starts timestamptz[], wanted int, extra int, moment timestamptz, taken tid[],
    has_recovered boolean, is_top boolean, inout new_token bigint,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz,
    out job_of bigint[], out permits tid[], out believed_until timestamptz
)
    language plpgsql
as $$
declare
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass)
        + pg_stat_get_xact_tuples_returned('pgqueue.permit_scope_idx'::regclass);
    kept record;
    visit record;
    of_rates record;
    given record;
begin
    if rates is not null then
        gives := pgqueue._rate_gives(queue, group_keys, gives, rates, periods, moment);
    end if;
    if limits is null then
        visit := pgqueue._take_free(
            queue, kinds, paused, priority, group_keys, gives, starts, wanted, moment, taken, has_recovered
        );
    else
        if may_keep then
            kept := pgqueue._take_kept(queue, kinds, paused, priority, group_keys, gives, limits, wanted, moment);
            taken := taken || kept.picks;
            wanted := wanted - coalesce(cardinality(kept.picks), 0);
            gives := kept.left_over;
        end if;
        visit := pgqueue._take_limited(
            queue, kinds, paused, priority, group_keys, gives, limits, starts, wanted, extra, moment, taken,
            has_recovered, is_top
        );
        job_of := visit.ids;
        permits := visit.permits;
    end if;
    picks := visit.picks;
    groups := visit.groups;
    run_ats := visit.run_ats;
    over_at := visit.over_at;
    -- Finished jobs and taken permits, kept by some old snapshot, are in the way.
    if pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass)
        + pg_stat_get_xact_tuples_returned('pgqueue.permit_scope_idx'::regclass) - walked
        > (25 + extra) * cardinality(group_keys) + 6 * coalesce(cardinality(picks), 0)
    then
        believed_until := pgqueue._believed_until(began, '1 second');
        perform setval('pgqueue._cell_groups_slow', pgqueue._since_2020(clock_timestamp() + interval '10 seconds'));
    end if;
    if over_at is not null then
        return;
    end if;
    if limits is not null and may_keep then
        picks := kept.picks || picks;
        groups := kept.groups || groups;
        -- A retry that comes first says nothing about those behind it.
        run_ats := array_fill('-infinity'::timestamptz, array[coalesce(cardinality(kept.picks), 0)]) || run_ats;
        job_of := kept.ids || job_of;
        permits := kept.permits || permits;
    end if;
    if picks is null or num_nonnulls(limits, rates) = 0 then
        return;
    end if;
    new_token := coalesce(new_token, nextval('pgqueue.token_seq'));
    if rates is not null then
        of_rates := pgqueue._take_rates(queue, group_keys, rates, periods, groups, moment);
        select
            array_agg(u.tid) as picks, array_agg(u.of) as groups, array_agg(u.run_at) as run_ats,
            array_agg(j.id) filter (where u.permit is not null) as ids,
            array_agg(u.permit) filter (where u.permit is not null) as permits,
            array_agg(j.id) filter (where u.rate_permit is not null) as rate_ids,
            array_agg(u.rate_permit) filter (where u.rate_permit is not null) as rate_permits,
            array_agg(u.free_at) filter (where u.rate_permit is not null) as free_ats
        into given
        from unnest(picks, groups, run_ats, permits, of_rates.permits, of_rates.free_ats) with ordinality
            as u (tid, of, run_at, permit, rate_permit, free_at, place)
        cross join lateral (select j.id from pgqueue.job as j where j.ctid = u.tid offset 0) as j
        where (u.place = any (of_rates.refused)) is not true;
        picks := given.picks;
        groups := given.groups;
        run_ats := given.run_ats;
        job_of := given.ids || given.rate_ids;
        permits := given.permits || given.rate_permits;
        permits := pgqueue._give_permits(
            permits, job_of, new_token, moment,
            array_fill(null::timestamptz, array[coalesce(cardinality(given.ids), 0)]) || given.free_ats
        );
    else
        permits := pgqueue._give_permits(permits, job_of, new_token, moment);
    end if;
end;
$$;

-- Of some groups that gave fewer jobs than asked for: which are short of permits, and which of these will
-- have more. again: what to ask once more of those that are no longer full. Plans as _pick_groups sets
-- it.
create or replace function pgqueue._look_for_permits(
    queue text, group_keys text[], gives int[], limits int[], rates int[], periods interval[], groups int[],
    moment timestamptz, new_token bigint, out short int[], out lacking int[], out again int[]
)
    language plpgsql
as $$
declare
    own_token bigint := -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0);
    vain_keys text[];
    vain_limits int[];
    wanting record;
    of_groups record;
    made text[];
begin
    select
        array_agg(g.nth::int), array_agg(g.nth::int) filter (where g.has_own),
        array_agg(g.key) filter (where g.gave = 0), array_agg(g.most) filter (where g.gave = 0)
    into short, lacking, vain_keys, vain_limits
    from (
        select
            g.*, coalesce(f.jobs, 0) as gave,
            coalesce(p.has_own, false) as has_own,
            g.most is not null and (p.may_run is not true or p.has_surplus) or p.has_copies
                or g.rate is not null and p.may_begin is not true as is_short
        from unnest(group_keys, gives, limits, rates) with ordinality as g (key, give, most, rate, nth)
        left join (select f.of, count(*) as jobs from unnest(groups) as f (of) group by f.of) as f on f.of = g.nth
        cross join lateral (
            select
                bool_or(p.token = own_token) as has_own, bool_or(p.is_surplus) as has_surplus,
                count(*) > count(distinct case when p.is_rate then -p.place else p.place end) as has_copies,
                bool_or(not p.is_rate and p.free_at < 'infinity' and p.place <= g.most and p.token is distinct from own_token)
                    as may_run,
                bool_or(p.is_rate and p.free_at <= moment and p.place <= g.rate and p.token is distinct from own_token)
                    as may_begin
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, _look_for_permits.queue, '', g.key)
        ) as p
        where num_nonnulls(g.most, g.rate) > 0 and coalesce(f.jobs, 0) < g.give
    ) as g
    where g.is_short;
    if short is null then
        -- Others may have locked what came first.
        again := array(
            select greatest(g.give - (select count(*) from unnest(groups) as f (of) where f.of = g.nth), 0)::int
            from unnest(gives) with ordinality as g (give, nth) order by g.nth
        );
        return;
    end if;
    -- Full, and it gives nothing: are all holders of the permits still running?
    if vain_keys is not null and pgqueue._review_permits(queue, '', vain_keys, vain_limits, moment, new_token)
        + pgqueue._forget_future(queue, '', case when rates is not null then vain_keys end, moment) > 0
    then
        again := array(
            select case when g.key = any (vain_keys) then g.give else 0 end
            from unnest(group_keys, gives) with ordinality as g (key, give, nth) order by g.nth
        );
        return;
    end if;
    -- For the next claim: this one may not take what it creates.
    select
        array_agg(g.key) as keys, array_agg(g.most) as limits, array_agg(g.rate) as rates,
        array_agg(g.period) as periods, array_agg(g.give) as gives
    into wanting
    from unnest(group_keys, limits, rates, periods, gives) with ordinality as g (key, most, rate, period, give, nth)
    where g.nth = any (short);
    of_groups := pgqueue._group_caps(wanting.keys, wanting.limits, wanting.rates, wanting.periods, wanting.gives);
    made := pgqueue._make_permits(queue, of_groups.caps, of_groups.wants, 1000);
    lacking := lacking || array(
        select g.nth::int from unnest(group_keys) with ordinality as g (key, nth) where g.key = any (made)
    );
end;
$$;

-- How long not to look at a group that can give no more jobs, unless a hint says that it can: longer each
-- time, from 100 ms to 10 s.
create or replace function pgqueue._pause_of_group(served int, gave int)
    returns interval
    language sql
    immutable
as $$
    select least(
        interval '10 seconds',
        interval '100 milliseconds' * power(4, case when gave > 0 then 0 else least(greatest(-served, 0), 4) end)
    )
$$;

-- Sets when to look next at each of the groups that a claim came to: see above. has_enough: the claim has
-- enough, perhaps before the last turn was over. Plans as _pick_groups sets it.
create or replace function pgqueue._settle_tickets(
    queue text, priority int, tickets tid[], group_keys text[], gives int[], limits int[], has_enough boolean,
    groups int[], run_ats timestamptz[], short int[], lacking int[], starts timestamptz[], start_until timestamptz,
    paused jsonb, is_filtered boolean, taken tid[], moment timestamptz
)
    returns void
    language plpgsql
as $$
declare
    -- Read once, because their order counts.
    last timestamptz := clock_timestamp();
    -- Then looking at a full one is expensive.
    is_slow boolean := coalesce(
        pg_sequence_last_value('pgqueue._cell_groups_slow') > pgqueue._since_2020(moment), false
    );
begin
    if start_until is null and (limits is null or not is_slow)
        and gives[1] = all (gives) and cardinality(groups) = cardinality(tickets) * gives[1]
    then
        -- Deep queues: all go to the end.
        update pgqueue.ticket as t
        set at = last + g.nth * interval '1 microsecond', served = 0, is_blocked = false, is_full = false
        from unnest(tickets) with ordinality as g (tid, nth)
        where t.ctid = g.tid;
        return;
    end if;
    with verdict as (
        select
            g.*,
            case
                -- The claim had enough before this one's turn was over.
                when g.is_cut and g.gave < g.give then 'same'
                when g.gave = g.give and (g.gave = g.most and is_slow) is not true then 'tail'
                when left_job.run_at is null then 'gone'
                when left_job.run_at > moment then 'later'
                when g.gave = g.most and is_slow then 'full'
                when g.is_lacking then 'tail'
                -- Or its place is kept for a retry that is due, and that this claim may not take.
                when g.is_short and not (is_filtered and exists (
                    select from pgqueue.permit as p
                    join pgqueue.job as j on j.id = p.job_id
                    where pgqueue._is_permit_of(p, _settle_tickets.queue, '', g.key)
                        and pgqueue._is_kept(p, j, _settle_tickets.moment)
                )) then 'blocked'
                -- A group that is not paused as a whole, and needs no order, may have another job.
                when is_filtered or paused is not null and g.most is null and paused -> g.key <> '{"": true}' is not false
                    then 'same'
                else 'blocked'
            end as state,
            left_job.run_at as next_at,
            -- A rate tells when.
            case when g.is_short then (
                select min(p.free_at)
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _settle_tickets.queue, '', g.key)
                    and p.is_rate and p.free_at > moment
            ) end as free_at
        from (
            select
                u.*, has_enough and u.nth = cardinality(tickets) as is_cut, coalesce(f.jobs, 0)::int as gave, f.last_at,
                coalesce(u.nth = any (short), false) as is_short, coalesce(u.nth = any (lacking), false) as is_lacking
            from unnest(tickets, group_keys, gives, limits, starts) with ordinality
                as u (tid, key, give, most, start, nth)
            left join (
                select f.of, count(*) as jobs, max(f.run_at) as last_at
                from unnest(groups, run_ats) as f (of, run_at)
                group by f.of
            ) as f on f.of = u.nth
        ) as g
        left join lateral (
            select j.run_at
            from pgqueue.job as j
            where pgqueue._is_in_group(j, _settle_tickets.queue, g.key)
                and -j.priority = -_settle_tickets.priority
                and j.run_at >= g.start and j.run_at < 'infinity'
                and j.lease_expires_at is null
                and (taken is null or j.ctid <> all (taken))
                and (g.gave < g.give or g.gave = g.most and is_slow)
            order by j.run_at, j.id
            limit 1
        ) as left_job on true
    ), gone as (
        delete from pgqueue.ticket as t
        where t.ctid = any (array(select v.tid from verdict as v where v.state = 'gone'))
    )
    update pgqueue.ticket as t
    set at = case v.state
            when 'same' then t.at
            when 'later' then v.next_at
            when 'full' then moment + interval '1 second' + v.nth * interval '1 microsecond'
            when 'blocked' then greatest(moment + interval '10 milliseconds', case
                when v.free_at is not null then v.free_at else moment + pgqueue._pause_of_group(t.served, v.gave)
            end)
            else last + v.nth * interval '1 microsecond'
        end,
        served = case v.state
            when 'same' then greatest(t.served, 0) + v.gave
            when 'full' then -3
            when 'blocked' then case when v.free_at is not null then 0 when v.gave > 0 then -1 else least(t.served, 0) - 1 end
            else 0
        end,
        is_blocked = v.state in ('full', 'blocked'),
        is_full = v.state = 'full' or v.state = 'blocked' and coalesce(v.is_short, false),
        start_at = case when _settle_tickets.start_until is not null then v.last_at else t.start_at end,
        start_until = coalesce(_settle_tickets.start_until, t.start_until)
    from verdict as v
    where t.ctid = v.tid and v.state <> 'gone' and (v.state <> 'same' or v.gave > 0);
end;
$$;

-- Locks the next due tickets of a lane, and drops copies; if these are few, says how many others have
-- locked. Or, if it may hold none, returns those. Plans as _pick_groups sets it.
create or replace function pgqueue._next_tickets(
    queue text, priority int, start timestamptz, upto timestamptz, most int, may_hold boolean, moment timestamptz,
    out tids tid[], out keys text[], out served int[], out starts timestamptz[],
    out ats timestamptz[], out others int
)
    language plpgsql
as $$
declare
    free tid[];
    copies tid[];
begin
    others := 0;
    if not may_hold then
        tids := array(
            select t.ctid
            from pgqueue.ticket as t
            where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority) and t.at > start and t.at <= upto
            order by t.at
            limit most
        );
        free := array(
            select t.ctid from pgqueue.ticket as t where t.ctid = any (tids) for update skip locked
        );
        select
            array_agg(t.tid order by t.at), array_agg(t.group_key order by t.at), array_agg(0),
            array_agg('-infinity'::timestamptz), array_agg(t.at order by t.at)
        into tids, keys, served, starts, ats
        from (
            select distinct on (t.group_key) t.ctid as tid, t.group_key, t.at
            from pgqueue.ticket as t
            where t.ctid = any (tids) and t.ctid <> all (free)
            order by t.group_key, t.at
        ) as t;
        return;
    end if;
    select array_agg(l.tid), array_agg(l.group_key), array_agg(l.served), array_agg(l.start), array_agg(l.at)
    into tids, keys, served, starts, ats
    from (
        select
            t.ctid as tid, t.group_key, t.served, t.at,
            -- A time from another clock is ignored.
            coalesce(
                case when t.start_until between moment and moment + interval '1 minute' then t.start_at end,
                '-infinity'
            ) as start
        from pgqueue.ticket as t
        where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority) and t.at > start and t.at <= upto
        order by t.at
        limit most
        for update skip locked
    ) as l;
    if cardinality(keys) > 1 and cardinality(keys) > (select count(distinct u.key) from unnest(keys) as u (key)) then
        select
            array_agg(n.tid order by n.place) filter (where n.nth = 1),
            array_agg(n.key order by n.place) filter (where n.nth = 1),
            array_agg(n.served order by n.place) filter (where n.nth = 1),
            array_agg(n.start order by n.place) filter (where n.nth = 1),
            array_agg(n.at order by n.place) filter (where n.nth = 1),
            array_agg(n.tid) filter (where n.nth > 1)
        into tids, keys, served, starts, ats, copies
        from (
            select u.*, row_number() over (partition by u.key order by u.place) as nth
            from unnest(tids, keys, served, starts, ats) with ordinality as u (tid, key, served, start, at, place)
        ) as n;
        delete from pgqueue.ticket as t where t.ctid = any (copies);
    end if;
    if (cardinality(keys) < most) is not false then
        others := (
            select greatest(count(*) - coalesce(cardinality(keys), 0), 0)
            from (
                select
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority)
                    and t.at > start and t.at <= upto
                limit most
            ) as t
        );
    end if;
end;
$$;

-- How many jobs each of some groups may give, by its weight, to a claim that wants this many, and has not
-- come to this many others.
create or replace function pgqueue._gives(weights int[], limits int[], served int[], others int, wanted int)
    returns int[]
    language plpgsql
    immutable
as $$
declare
    each int := ceil(wanted::float8 / (others + (select sum(coalesce(w.weight, 1)) from unnest(weights) as w (weight))));
begin
    return array(
        select least(g.most, greatest(1, each * coalesce(g.weight, 1) - greatest(g.served, 0)))
        from unnest(served, weights, limits) with ordinality as g (served, weight, most, nth)
        order by g.nth
    );
end;
$$;

-- _pick_groups in its usual case, in two or three statements: groups without settings of their own, of which
-- the next few give all that is wanted, none of it over; with a permit for each job if the queue sets a limit
-- (most). Or none: then all has to be done again, by _pick_groups.
create or replace function pgqueue._pick_plain_groups(
    queue text, kinds text[], lane int, wanted int, moment timestamptz, most int,
    out picks tid[], out new_token bigint, out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
declare
    key bigint := hashtextextended(concat(queue, kinds), lane);
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
    tag bigint := (key >> 20 & 4095) << 51;
    record int := (key & 15) * 2;
    valid_until bigint := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    begin_at timestamptz := '-infinity'::timestamptz;
    batch int := greatest(least(wanted, 10), ceil(wanted::float8 / least(ceil(sqrt(wanted)), most)));
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass);
    walked_jobs bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    tickets tid[];
    is_over boolean;
    is_enough boolean;
begin
    if (pg_sequence_last_value('pgqueue._cell_groups_due'::regclass) between now_us and now_us + 60000000) is not true then
        perform pgqueue._sweep_groups_if_due(moment, null);
    end if;
    if valid_until >> 51 > 0 then
        -- The second record, when the first is somebody else's.
        record := (key >> 4 & 15) * 2;
        valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    end if;
    if valid_until between now_us and now_us + 60000000 then
        begin_at := timestamptz '2020-01-01 00:00 UTC'
            + interval '1 microsecond' * (pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass) >> 12);
    elsif valid_until between now_us - 1000000 and now_us then
        -- A walk from the beginning is due.
        picks := '{}';
        return;
    end if;
    if most is null then
        select array_agg(v.tid), array_agg(v.ticket), bool_or(v.is_over) into picks, tickets, is_over
        from (
            select h.tid, t.tid as ticket, h.is_over
            from (
                select
                    t.ctid as tid, t.group_key,
                    coalesce(
                        case when t.start_until between _pick_plain_groups.moment and _pick_plain_groups.moment + interval '1 minute'
                            then t.start_at end,
                        '-infinity'
                    ) as start
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _pick_plain_groups.queue, lane - 1000)
                    and t.at > begin_at and t.at <= _pick_plain_groups.moment
                order by t.at
                limit batch
                for update skip locked
            ) as t
            cross join lateral (
                select j.ctid as tid, num_nonnulls(j.lease_expires_at, (j.terms).expires_at) > 0 as is_over
                from pgqueue.job as j
                where pgqueue._is_in_group(j, _pick_plain_groups.queue, t.group_key)
                    and -j.priority = 1000 - lane
                    and j.run_at between t.start and _pick_plain_groups.moment
                    and (j.lease_expires_at <= _pick_plain_groups.moment) is not false
                    and (_pick_plain_groups.kinds is null or j.kind = any (_pick_plain_groups.kinds))
                order by j.run_at, j.id
                limit ceil(wanted::float8 / batch)
                for update skip locked
            ) as h
            limit wanted
        ) as v;
    elsif kinds is null and pg_sequence_last_value('pgqueue._cell_groups_slow') > now_us is not true
        and (pg_relation_size('pgqueue.permit_surplus_idx') <= 8192 or not pgqueue._any_surplus(queue))
    then
        select
            array_agg(v.tid), array_agg(v.ticket), bool_or(v.is_over), array_agg(v.id), array_agg(v.permit)
        into picks, tickets, is_over, job_of, permits
        from (
            select h.*, t.tid as ticket, u.permit
            from (
                select t.ctid as tid, t.group_key
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _pick_plain_groups.queue, lane - 1000)
                    and t.at > begin_at and t.at <= _pick_plain_groups.moment
                order by t.at
                limit batch
                for update skip locked
            ) as t
            -- In order, and none in place of one that another has locked.
            cross join lateral (
                select array(
                    select j.ctid
                    from pgqueue.job as j
                    where pgqueue._is_in_group(j, _pick_plain_groups.queue, t.group_key)
                        and -j.priority = 1000 - lane
                        and j.run_at <= _pick_plain_groups.moment
                        and (j.lease_expires_at <= _pick_plain_groups.moment) is not false
                    order by j.run_at, j.id
                    limit ceil(wanted::float8 / batch)
                ) as tids
                offset 0
            ) as c
            cross join lateral (
                select array(
                    select p.ctid
                    from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, _pick_plain_groups.queue, '', t.group_key)
                        and not p.is_rate and p.free_at < 'infinity' and p.place <= most
                    order by p.free_at desc
                    limit cardinality(c.tids)
                    for update skip locked
                ) as tids
                offset 0
            ) as p
            cross join lateral unnest(c.tids[:cardinality(p.tids)], p.tids) as u (tid, permit)
            cross join lateral (
                select k.ctid as tid, k.id, num_nonnulls(k.lease_expires_at, (k.terms).expires_at) > 0 as is_over
                from pgqueue.job as k
                where k.ctid = u.tid and k.run_at <= _pick_plain_groups.moment
                    and (k.lease_expires_at <= _pick_plain_groups.moment) is not false
                for update skip locked
            ) as h
            limit wanted
        ) as v;
    end if;
    is_enough := cardinality(picks) = wanted and not is_over
        -- Or _pick_groups has to remember where to start.
        and pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass) - walked <= 200 + 3 * (batch + wanted)
        and pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked_jobs < 60 * batch + 3 * wanted;
    if is_enough and most is not null then
        -- Of a permit that nobody has taken yet there may be a copy, or nobody else sees it.
        is_enough := not exists (
            select
            from pgqueue.permit as p
            where p.ctid = any (_pick_plain_groups.permits) and p.taken_at is null and (
                p.token = -pg_current_xact_id_if_assigned()::text::bigint or 1 < (
                    select count(*) from pgqueue.permit as o
                    where pgqueue._is_permit_of(o, p.queue, '', p.group_key) and not o.is_rate and o.place = p.place
                )
            )
        );
    end if;
    if is_enough and wanted > 1 then
        -- A group that has two tickets may come twice.
        is_enough := wanted = (select count(distinct u.tid) from unnest(picks) as u (tid));
    end if;
    if is_enough then
        update pgqueue.ticket as t
        set at = greatest(clock_timestamp(), _pick_plain_groups.moment) + array_position(tickets, t.ctid) * interval '1 microsecond',
            served = 0, is_blocked = false, is_full = false
        where t.ctid = any (tickets);
        if most is not null then
            new_token := nextval('pgqueue.token_seq');
            permits := pgqueue._give_permits(permits, job_of, new_token, moment);
        end if;
        return;
    end if;
    picks := '{}';
    job_of := null;
    permits := null;
end;
$$;

-- _sweep_permits and _sweep_groups each 50 ms, or a twentieth of the time.
create or replace function pgqueue._sweep_groups_if_due(moment timestamptz, new_token bigint)
    returns void
    language plpgsql
as $$
declare
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
    due_us bigint := pg_sequence_last_value('pgqueue._cell_groups_due'::regclass);
begin
    -- Or it is from another clock.
    if (due_us between now_us and now_us + 60000000) is not true then
        perform setval('pgqueue._cell_groups_due', now_us + 50000);
        perform pgqueue._sweep_permits(new_token), pgqueue._sweep_groups();
        now_us := pgqueue._since_2020(pgqueue._believed_until(moment, '50 milliseconds'));
        perform setval('pgqueue._cell_groups_due', now_us);
    end if;
end;
$$;

-- Sweeps the next 500 groups and 40 pages of permits, or fewer if that takes more than 20 ms from this
-- moment; returns whether these are all.
create or replace function pgqueue._sweep_all(moment timestamptz)
    returns boolean
    language plpgsql
as $$
declare
    -- It continues where the last one stopped, to the end, and from the beginning to the end.
    ends int := 1 + coalesce(pg_sequence_last_value('pgqueue._cell_groups_swept') > -9223372036854775808, false)::int;
    pages int := pg_relation_size('pgqueue.permit') / current_setting('block_size')::int;
begin
    for step in 1 .. 20 loop
        if pages > 0 then
            perform pgqueue._sweep_permits();
            pages := pages - 2;
        end if;
        if ends > 0 then
            ends := ends - ((pgqueue._sweep_some(25))[1] < 25)::int;
        end if;
        if ends = 0 and pages <= 0 then
            return true;
        end if;
        exit when clock_timestamp() > moment + interval '20 milliseconds';
    end loop;
    return false;
end;
$$;

-- _pick for the lanes of groups: locks at most the wanted number of due jobs, of the groups whose turn it
-- is, with permits if they need any: which job has which.
create or replace function pgqueue._pick_groups(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, is_whole boolean, is_top boolean,
    shared pgqueue.queue_in_force, taken tid[], inout new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_bitmapscan = off
    set enable_sort = on
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    own_priority int := lane - 1000;
    key bigint := hashtextextended(concat(queue, kinds, paused), lane);
    known record := pgqueue._position(key, moment);
    -- What a claim may take with other kinds, or when a cap is not full.
    is_filtered boolean := kinds is not null or paused is not null and new_token is not null;
    start timestamptz := '-infinity'::timestamptz;
    -- Under caps this may be a second pick, and the turns of the first are over.
    upto timestamptz := clock_timestamp();
    is_from_start boolean := true;
    known_at timestamptz := timestamptz '2020-01-01 00:00 UTC' + (known.reached >> 12) * interval '1 microsecond';
    -- Some jobs of each of some groups are cheaper than one of each of as many.
    batch int := least(wanted, greatest(10, ceil(sqrt(wanted)), ceil(wanted::float8 / shared.group_limit)));
    looked int := 0;
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass);
    may_give_more boolean := false;
    -- Whether it serves the groups whose tickets others have locked.
    is_guest boolean := false;
    are_locked boolean := false;
    passed_at timestamptz;
    vain int := 0;
    met record;
    settings record;
    limits int[];
    rates int[];
    periods interval[];
    may_keep boolean := shared.group_on_retry = 'block';
    short int[];
    lacking int[];
    gives int[];
    asked int;
    visit record;
    more record;
    look record;
    came int;
begin
    picks := '{}';
    perform pgqueue._sweep_groups_if_due(moment, new_token);
    if known.reached is not null and not is_whole then
        is_from_start := false;
        start := known_at;
    end if;
    while cardinality(picks) < wanted loop
        met := pgqueue._next_tickets(queue, own_priority, start, upto, batch, not is_guest, moment);
        are_locked := are_locked or met.others > 0;
        if met.keys is null and are_locked and picks <> '{}' then
            -- Those that others are just serving have their share as well.
            are_locked := false;
            is_guest := true;
            start := '-infinity'::timestamptz;
            continue;
        elsif met.keys is null and may_give_more then
            -- All have been looked at: look again at those that gave what was asked.
            may_give_more := false;
            is_guest := false;
            start := upto;
            upto := clock_timestamp() + interval '1 millisecond';
            continue;
        elsif met.keys is null then
            -- From the position; from the beginning; as a guest.
            exit when picks <> '{}' or is_guest;
            is_guest := is_from_start;
            is_from_start := true;
            start := '-infinity'::timestamptz;
            began := clock_timestamp();
            continue;
        end if;
        asked := wanted - cardinality(picks);
        if shared.has_groups then
            settings := pgqueue._group_settings(queue, met.keys, shared);
            limits := settings.limits;
            rates := settings.rates;
            periods := settings.periods;
            may_keep := settings.may_keep;
            gives := pgqueue._gives(settings.weights, limits, met.served, met.others, asked);
        else
            gives := array_fill(
                least(ceil(asked::float8 / (cardinality(met.keys) + met.others)), shared.group_limit)::int,
                array[cardinality(met.keys)]
            );
            limits := case when shared.group_limit is not null
                then array_fill(shared.group_limit, array[cardinality(met.keys)]) end;
        end if;
        for turn in 1 .. 2 loop
            visit := pgqueue._visit_groups(
                queue, kinds, paused, own_priority, met.keys, gives, limits, rates, periods,
                may_keep, met.starts, asked, 0, moment, nullif(taken || picks, '{}'), turn = 2, is_top, new_token
            );
            exit when visit.over_at is null;
            perform pgqueue._recover(queue, lane, coalesce(visit.picks, '{}'), visit.over_at, moment);
        end loop;
        new_token := visit.new_token;
        picks := picks || coalesce(visit.picks, '{}');
        job_of := job_of || visit.job_of;
        permits := permits || visit.permits;
        short := null;
        lacking := null;
        if cardinality(picks) < wanted and num_nonnulls(limits, rates) > 0 then
            look := pgqueue._look_for_permits(
                queue, met.keys, gives, limits, rates, periods, visit.groups, moment, new_token
            );
            short := look.short;
            lacking := look.lacking;
            if look.again is not null then
                more := pgqueue._visit_groups(
                    queue, kinds, paused, own_priority, met.keys, look.again, limits, rates, periods,
                    may_keep, met.starts, wanted - cardinality(picks), 100, moment, nullif(taken || picks, '{}'), true, is_top,
                    new_token
                );
                new_token := more.new_token;
                picks := picks || coalesce(more.picks, '{}');
                job_of := job_of || more.job_of;
                permits := permits || more.permits;
                visit.groups := visit.groups || more.groups;
                visit.run_ats := visit.run_ats || more.run_ats;
            end if;
        end if;
        -- What the claim did not come to stays as it is.
        came := case when cardinality(picks) >= wanted then visit.groups[cardinality(visit.groups)]
            else cardinality(met.keys)
        end;
        if not is_guest then
            vain := vain + greatest(came - coalesce(cardinality(visit.groups), 0), 0);
            -- The last one may have more to give.
            passed_at := coalesce(met.ats[came - (cardinality(picks) >= wanted)::int], passed_at);
            perform pgqueue._settle_tickets(
                queue, own_priority, met.tids[:came], met.keys[:came], gives, limits,
                cardinality(picks) >= wanted, visit.groups, visit.run_ats, short, lacking, met.starts,
                case when not is_filtered and paused is null then visit.believed_until end,
                paused, is_filtered, nullif(taken || picks, '{}'), moment
            );
        end if;
        exit when cardinality(picks) >= wanted;
        looked := looked + cardinality(met.keys);
        exit when looked > 1000 and clock_timestamp() > moment + interval '100 milliseconds';
        start := met.ats[cardinality(met.ats)];
        may_give_more := may_give_more or visit.picks is not null;
        -- As many as will give the rest, if they are like these.
        batch := least(300, greatest(wanted - cardinality(picks), 20)
            * batch / greatest(coalesce(cardinality(visit.picks), 0), batch / 4, 1));
    end loop;
    if pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass) - walked
        > 200 + 3 * (looked + cardinality(picks)) or vain > 60
    then
        -- Others continue from a position that a whole walk has not reached yet.
        perform pgqueue._leave_position(
            key, known.record, known.reached,
            pgqueue._since_2020(least(greatest(passed_at, known_at), moment - interval '10 milliseconds')), null,
            case when known_at is null or is_from_start and not is_whole
                then pgqueue._since_2020(pgqueue._believed_until(began, interval '100 milliseconds'))
            end
        );
    end if;
end;
$$;
-- Caps of queues and kinds: how many of their jobs run at once (max_running), and how many begin in any
-- period (rate_limit). Those of groups are in module group.
--
-- A claim under caps (_pick_capped) looks first how many permits are free, and passes over the kinds that have none. It
-- picks, takes the permits, and puts back the jobs that got not all of theirs, of which it then passes
-- over the kind, until it has what it wants.

-- Of the caps of a queue, those for some kinds (null: all), and then those of the queue itself.
create or replace function pgqueue._caps_of(caps pgqueue._cap[], kinds text[])
    returns pgqueue._cap[]
    language plpgsql
    immutable
as $$
begin
    if kinds is null then
        return coalesce(caps, '{}');
    end if;
    return array(
        select row(c.*)::pgqueue._cap from unnest(caps) as c where c.kind = '' or c.kind = any (kinds)
    );
end;
$$;

-- Of these caps of a queue, creates the permits of some kinds (null: all) if settings of all queues require
-- any, and there are none.
create or replace function pgqueue._make_permits_for(queue text, caps pgqueue._cap[], kinds text[])
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    -- Those of the queue were made when they were set.
    if exists (
        select
        from pgqueue.queue as q
        where q.name = '' and left(q.group_key, 1) = ''
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
    ) then
        caps := pgqueue._caps_of(caps, kinds);
        perform pgqueue._make_permits(queue, caps, array(select c.most from unnest(caps) as c), 1);
    end if;
end;
$$;

-- What a claim passes over: what is paused, and some kinds.
create or replace function pgqueue._without(paused jsonb, kinds text[])
    returns jsonb
    language plpgsql
    immutable
as $$
begin
    if kinds = '{}' then
        return paused;
    end if;
    return (
        select jsonb_object_agg(
            e.key, e.value || (select jsonb_object_agg(k.name, true) from unnest(kinds) as k (name))
        )
        from jsonb_each(coalesce(paused, '{"": {"": false}}')) as e
    );
end;
$$;

-- Takes a permit of each of its caps for every picked job: which job has which. Names the jobs that did
-- not get all of theirs, and have none, with those behind them in limited groups, and the caps that
-- refused them.
create or replace function pgqueue._take_permits(
    queue text, picks tid[], limited bigint[], caps pgqueue._cap[], new_token bigint, moment timestamptz,
    age_after interval, out job_of bigint[], out permits tid[], out refused bigint[], out refusing pgqueue._cap[]
)
    language plpgsql
    set enable_hashjoin = on
    set enable_sort = on
as $$
declare
    -- Caps of kinds come first.
    are_of_queue boolean := (caps[1]).kind = '';
    wanted int[];
    locked record;
    given record;
    cap pgqueue._cap;
    ids bigint[];
    free_ats timestamptz[];
begin
    if are_of_queue then
        wanted := array_fill(cardinality(picks), array[cardinality(caps)]);
    else
        wanted := array(
            select (select count(*) from pgqueue.job as j where j.ctid = any (picks) and c.kind in ('', j.kind))::int
            from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
            order by c.nth
        );
    end if;
    locked := pgqueue._lock_free(queue, caps, wanted, moment);
    if are_of_queue and cardinality(locked.permits) = cardinality(caps) * cardinality(picks) then
        -- Enough for all, and all need the same.
        ids := array(select j.id from pgqueue.job as j where j.ctid = any (picks));
        foreach cap in array caps loop
            job_of := job_of || ids;
            free_ats := free_ats || array_fill(
                case when cap.is_rate then moment + cap.period end, array[cardinality(ids)]
            );
        end loop;
        permits := pgqueue._give_permits(locked.permits, job_of, new_token, moment, free_ats);
        refused := '{}';
        return;
    end if;
    with wants as (
        select
            j.id, c.nth as cap,
            row_number() over (
                partition by c.nth order by pgqueue._aged(j.priority, j.run_at, moment, age_after) desc, j.run_at, j.id
            ) as nth
        from pgqueue.job as j
        join unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth) on c.kind in ('', j.kind)
        where j.ctid = any (picks)
    ), has as (
        select l.cap, l.tid, row_number() over (partition by l.cap) as nth
        from unnest(locked.caps_of, locked.permits) as l (cap, tid)
    ), lacks as (
        select w.id, w.cap from wants as w left join has as h on h.cap = w.cap and h.nth = w.nth where h.tid is null
    ), passed as (
        select l.id from lacks as l
        union
        -- If a group has a limit, none may overtake another.
        select o.id
        from (
            select
                j.id,
                bool_or(exists (select from lacks as l where l.id = j.id))
                    over (partition by j.group_key order by j.priority desc, j.run_at, j.id) as is_behind
            from pgqueue.job as j
            where j.ctid = any (picks) and j.id = any (limited)
        ) as o
        where o.is_behind
    ), gets as (
        select w.id, w.cap, row_number() over (partition by w.cap order by w.nth) as nth
        from wants as w
        where not exists (select from passed as o where o.id = w.id)
    )
    select
        (select coalesce(array_agg(distinct o.id), '{}') from passed as o) as refused,
        (select array_agg(distinct l.cap) from lacks as l) as refusing,
        array_agg(g.id) as job_ids, array_agg(h.tid) as permits,
        array_agg(case when (caps[g.cap]).is_rate then moment + (caps[g.cap]).period end) as free_ats
    into given
    from gets as g
    join has as h on h.cap = g.cap and h.nth = g.nth;
    refused := given.refused;
    refusing := array(select caps[r.cap] from unnest(given.refusing) as r (cap));
    permits := pgqueue._give_permits(given.permits, given.job_ids, new_token, moment, given.free_ats);
    job_of := given.job_ids;
end;
$$;

-- Leaves picked jobs that got no permit to the next claim, with the permits of their groups.
create or replace function pgqueue._put_back(
    queue text, kinds text[], paused jsonb, job_ids bigint[], group_permits tid[]
)
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    back record;
begin
    perform pgqueue._return_position(queue, kinds, paused, l.priority, l.at)
    from (
        select j.priority, min(j.run_at) as at
        from pgqueue.job as j
        where j.id = any (job_ids) and j.group_key is null
        group by j.priority
    ) as l;
    select
        array_agg(j.id) as ids, array_agg(j.group_key) as keys, array_agg(j.priority) as priorities,
        array_agg(j.queue) as queues, array_agg(j.run_at) as ats
    into back
    from pgqueue.job as j
    where j.id = any (job_ids) and j.group_key is not null;
    if back.ids is null then
        return;
    end if;
    -- As if this claim had not taken them: it may look at them again, and its clock stands at its beginning.
    update pgqueue.permit as p
    set free_at = p.taken_at, job_id = null
    where p.ctid = any (group_permits) and p.job_id = any (back.ids) and not exists (
        select from pgqueue.job as j where j.id = p.job_id and j.permits is not null
    );
    -- Their groups' turn comes next.
    update pgqueue.ticket as t
    set at = moment - interval '1 minute', served = 0, is_blocked = false, is_full = false
    where t.ctid = any (array(
        select t.ctid
        from unnest(back.keys, back.priorities) as b (key, priority)
        join pgqueue.ticket as t
            on pgqueue._is_ticket_of(t, _put_back.queue, b.key)
            and t.priority = b.priority
        for update of t skip locked
    ));
    perform pgqueue._insert_tickets(back.queues, back.keys, back.priorities, back.ats);
end;
$$;

-- Checks whether some caps that look full are full, and have all their permits; returns whether any
-- permit was freed. Plans as _pick_capped sets it.
create or replace function pgqueue._review_caps(
    queue text, caps pgqueue._cap[], full_caps int[], moment timestamptz, new_token bigint
)
    returns boolean
    language plpgsql
as $$
declare
    freed bigint := (
        select sum(case when c.is_rate then pgqueue._forget_future(queue, c.kind, array['']::text[], moment)
            else pgqueue._review_permits(queue, c.kind, array['']::text[], array[c.most], moment, new_token)
        end)
        from unnest(full_caps) as f (cap)
        cross join lateral (select (caps[f.cap]).*) as c
    );
begin
    if freed > 0 then
        return true;
    end if;
    -- For the next claim: this one may not take what it creates.
    perform pgqueue._make_permits(
        queue, array_agg(caps[f.cap]), array_agg((caps[f.cap]).most), 1000
    )
    from unnest(full_caps) as f (cap);
    return false;
end;
$$;

-- After a change of limits or rates of groups: counts what runs, and makes claims look again at groups
-- that could give no more jobs.
create or replace function pgqueue._apply_limits(queue text, group_key text)
    returns void
    language plpgsql
    set enable_indexscan = on
    set enable_seqscan = on
    set enable_hashagg = on
as $$
declare
    moment timestamptz := clock_timestamp();
    known record;
    settings pgqueue.queue_in_force;
    cap pgqueue._cap;
begin
    for known in
        select distinct j.queue, j.group_key
        from pgqueue.job as j
        where j.group_key is not null and (j.lease_expires_at is not null or j.xmax <> 0)
            and j.queue = coalesce(_apply_limits.queue, j.queue)
            and coalesce(_apply_limits.group_key, '*') in ('*', j.group_key)
        union
        select distinct p.queue, p.group_key
        from pgqueue.permit as p
        where p.group_key <> '' and p.free_at > moment and p.queue = coalesce(_apply_limits.queue, p.queue)
            and coalesce(_apply_limits.group_key, '*') in ('*', p.group_key)
    loop
        settings := pgqueue._in_force(known.queue, '', known.group_key);
        if settings.group_limit is not null then
            cap := row('', known.group_key, false, settings.group_limit, '1 second');
            perform pgqueue._count_running(known.queue, cap), pgqueue._fit_permits(known.queue, cap, moment);
        end if;
        if settings.rate_limit is not null then
            perform pgqueue._fit_permits(
                known.queue,
                row('', known.group_key, true, settings.rate_limit, settings.rate_period)::pgqueue._cap, moment
            );
        end if;
    end loop;
    -- Or the first claim would find none.
    perform pgqueue._make_group_permits(t.queue, array_agg(distinct t.group_key), pgqueue._in_force(t.queue))
    from pgqueue.ticket as t
    where t.queue = coalesce(_apply_limits.queue, t.queue)
        and coalesce(_apply_limits.group_key, '*') in ('*', t.group_key)
    group by t.queue;
    perform pgqueue._unblock_groups(queue, group_key);
end;
$$;

-- After a change of the caps of a queue or kind, or of all queues: creates or drops permits, and counts
-- what runs.
create or replace function pgqueue._apply_caps(queue text, kind text)
    returns void
    language plpgsql
    set enable_indexscan = on
    set enable_seqscan = on
    set enable_hashagg = on
as $$
declare
    moment timestamptz := clock_timestamp();
    known_queue text;
    cap pgqueue._cap;
begin
    for known_queue in
        select distinct j.queue from pgqueue.job as j where j.queue = coalesce(_apply_caps.queue, j.queue)
        union
        select distinct p.queue from pgqueue.permit as p
        where p.group_key = '' and p.queue = coalesce(_apply_caps.queue, p.queue)
        union
        -- A queue gets its permits before it has jobs.
        select _apply_caps.queue where _apply_caps.queue is not null
    loop
        foreach cap in array pgqueue._caps_of((pgqueue._in_force(known_queue)).caps, array[kind]) loop
            continue when cap.kind <> coalesce(kind, '');
            if not cap.is_rate then
                perform pgqueue._count_running(known_queue, cap);
            end if;
            perform pgqueue._fit_permits(known_queue, cap, moment);
            perform pgqueue._make_permits(known_queue, array[cap], array[cap.most], 1000);
        end loop;
        perform pgqueue._wake(known_queue);
    end loop;
end;
$$;
-- The producer's module.
--
-- enqueue() is part of the caller's transaction: workers see the job when it commits,
-- and it never existed if it rolls back. Whom to wake is in module wake.
--
-- The arguments of a function have the collation of what the caller passes, such as a column of names. An index
-- has the default one, and so must what is looked for in it, and the order in which keys are taken: one
-- explicit collation in a call applies to all arguments.

-- Handles an enqueue whose key is taken as on_duplicate says; returns the id of the job that has the key,
-- null if the caller must look again.
create or replace function pgqueue._on_duplicate(
    queue text,
    unique_key text,
    on_duplicate text,
    payload jsonb,
    priority int,
    run_at timestamptz,
    expires_at timestamptz
)
    returns bigint
    language plpgsql
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    present record;
    picks tid[];
    changed record;
begin
    select j.id, j.lease_expires_at, (j.terms).expires_at <= moment as is_late into present
    from pgqueue.job as j
    where j.queue = _on_duplicate.queue and j.unique_key = _on_duplicate.unique_key;
    if not found then
        return null;
    end if;

    if present.lease_expires_at is null and present.is_late then
        -- It will never run, and must not replace one that may.
        picks := array(select j.ctid from pgqueue.job as j where j.id = present.id for update);
        perform pgqueue._expire(picks, moment);
        return null;
    elsif on_duplicate = 'error' then
        return present.id;
    elsif present.lease_expires_at <= moment then
        -- Its worker is dead, and perhaps so is the job: end that attempt, and look again.
        picks := array(
            select j.ctid from pgqueue.job as j where j.id = present.id for update skip locked
        );
        if pgqueue._expire(picks, moment) > 0 then
            return null;
        end if;
    elsif present.lease_expires_at is null and on_duplicate <> 'skip' then
        update pgqueue.job as j
        set payload = case when on_duplicate = 'replace' then _on_duplicate.payload else j.payload end,
            priority = case when on_duplicate = 'replace' then _on_duplicate.priority else j.priority end,
            run_at = case
                when j.run_at = 'infinity' then j.run_at
                when on_duplicate = 'replace' then _on_duplicate.run_at
                else greatest(j.run_at, _on_duplicate.run_at)
            end,
            terms = case
                when j.run_at < 'infinity' and num_nonnulls((j.terms).expires_at, _on_duplicate.expires_at) = 0
                    then j.terms
                else row(
                    case
                        when on_duplicate = 'replace' then _on_duplicate.expires_at
                        else nullif(greatest(
                            coalesce((j.terms).expires_at, 'infinity'), coalesce(_on_duplicate.expires_at, 'infinity')
                        ), 'infinity')
                    end,
                    case
                        when j.run_at < 'infinity' then null
                        when on_duplicate = 'replace' then _on_duplicate.run_at
                        else greatest((j.terms).run_at, _on_duplicate.run_at)
                    end,
                    (j.terms).batch_id
                )::pgqueue._terms
            end
        where j.id = present.id and j.lease_expires_at is null
        returning j.id, j.priority, j.group_key, j.run_at into changed;
        if found then
            perform pgqueue._reopened(
                array[queue], array[changed.priority], array[changed.group_key], array[changed.run_at]
            );
        end if;
        -- Null if the job was claimed, or ended, while the update waited for it.
        return changed.id;
    end if;

    -- A running job keeps what its worker has read.
    if present.lease_expires_at is not null then
        raise notice using
            message = format('job %s with this unique_key is running and stays as it is', present.id),
            detail = 'Nothing was enqueued or replaced.',
            hint = 'To run again after it, enqueue without a unique_key, or with a different one.';
    end if;
    return present.id;
end;
$$;

-- The window of a key, its unique_for, begins with a job and outlives it. While that job waits or
-- runs its key is taken like any other: only when it has ended does the table recent_key decide.
-- The job that has ended, but whose window has not; null if there is none. Raises 23505 if there is one,
-- with on_duplicate error.
create or replace function pgqueue._recent_job(queue text, unique_key text, on_duplicate text)
    returns bigint
    language plpgsql
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    job_id bigint := (
        select k.job_id
        from pgqueue.recent_key as k
        where k.queue = _recent_job.queue and k.unique_key = _recent_job.unique_key
            and k.expires_at > clock_timestamp()
            and not exists (select from pgqueue.job as j where j.id = k.job_id)
    );
begin
    if on_duplicate = 'error' and job_id is not null then
        raise exception using
            errcode = 'unique_violation',
            message = 'a job with this unique_key was enqueued within its unique_for',
            detail = format('It was job %s.', job_id),
            hint = 'Enqueue without unique_for to add another one, or with another on_duplicate to get this id.';
    end if;
    return job_id;
end;
$$;

-- Begins the window of a new job and returns its id. If another job with the key has begun one and ended
-- since we looked, undoes the new one, and returns the id of the other.
create or replace function pgqueue._begin_window(
    queue text, unique_key text, on_duplicate text, job_id bigint, expires_at timestamptz
)
    returns bigint
    language plpgsql
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_indexscan = on
    set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    recent_id bigint;
begin
    loop
        insert into pgqueue.recent_key as k (job_id, expires_at, queue, unique_key)
        values (
            _begin_window.job_id, _begin_window.expires_at,
            _begin_window.queue, _begin_window.unique_key
        )
        on conflict (queue, unique_key) do update
        set job_id = excluded.job_id, expires_at = excluded.expires_at
        where k.expires_at <= clock_timestamp();
        exit when found;
        recent_id := pgqueue._recent_job(queue, unique_key, on_duplicate);
        if recent_id is not null then
            delete from pgqueue.job as j where j.id = _begin_window.job_id;
            exit;
        end if;
    end loop;
    return coalesce(recent_id, job_id);
end;
$$;

-- Makes new jobs part of a batch that _lock_batch has locked.
create or replace function pgqueue._join_batch(job_ids bigint[], batch_id bigint)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
begin
    insert into pgqueue.tally (batch_id, part, jobs)
    select _join_batch.batch_id, j.id >> 10, count(*) from unnest(job_ids) as j (id) group by j.id >> 10;
end;
$$;

create or replace function pgqueue.enqueue(
    queue text,
    payload jsonb default '{}',
    kind text default null,
    priority int default null,
    run_at timestamptz default null,
    max_attempts int default null,
    unique_key text default null,
    on_duplicate text default null,
    group_key text default null,
    headers jsonb default null,
    unique_for interval default null,
    expires_at timestamptz default null,
    batch_id bigint default null,
    after bigint[] default null,
    if_dead text default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    settings pgqueue.queue_in_force;
    -- Apart, because a record costs even when it is null.
    notify boolean;
    moment timestamptz := clock_timestamp();
    fold int := hashtext(enqueue.queue) & 255;
    has_options boolean;
    terms pgqueue._terms;
    new_id bigint;
    refused boolean;
    job_id bigint;
begin
    -- Four shortcuts for the plain call, which may name a kind or a group; each saves up to a tenth: options
    -- are checked only where there are any, settings are read only where there are any,
    -- the INSERT has no conflicts and no defaults to handle, and _wake() is written out.
    if num_nonnulls(
            priority, run_at, max_attempts, unique_key, on_duplicate, headers, unique_for,
            expires_at, batch_id, after, if_dead
        ) > 0
        or (octet_length(queue) <@ int4range '[1,200]') is not true
    then
        has_options := true;
        refused := pgqueue._refuse(pgqueue._check_job(
            queue, kind, priority, run_at, max_attempts, unique_key, on_duplicate, group_key, headers,
            unique_for, expires_at
        ));
        if num_nonnulls(expires_at, batch_id, after, if_dead) > 0 then
            refused := pgqueue._refuse(pgqueue._check_after(after, if_dead));
            if batch_id is not null then
                refused := pgqueue._refuse(pgqueue._lock_batch(batch_id));
            end if;
            after := nullif(after, '{}');
            terms := row(expires_at, case when after is not null then run_at end, batch_id);
            run_at := case when after is null then run_at else 'infinity' end;
        end if;
    elsif kind is not null then
        if octet_length(kind) not between 1 and 200 then
            refused := pgqueue._refuse(pgqueue._bad_name('kind', kind));
        end if;
    end if;
    if pg_sequence_last_value('pgqueue.used_seq'::regclass) >> fold % 63 & 1 = 1 then
        select f.* into settings from pgqueue.queue_in_force as f where f.queue = enqueue.queue collate "default";
        if not found then
            select f.* into settings from pgqueue.queue_in_force as f where f.queue = '';
        end if;
        if settings.has_narrow or num_nonnulls(settings.caps, settings.max_payload_bytes, settings.has_access) > 0 then
            if settings.has_access then
                refused := pgqueue._refuse(pgqueue._check_access('producer', array[queue]));
            end if;
            if settings.has_narrow then
                settings := pgqueue._in_force(queue, coalesce(kind, queue), group_key);
            end if;
            if settings.max_payload_bytes is not null then
                refused := pgqueue._refuse(pgqueue._check_payload(payload, settings.max_payload_bytes));
            end if;
            if settings.caps is not null then
                perform pgqueue._make_permits_for(queue, settings.caps, array[coalesce(kind, queue)]);
            end if;
        end if;
        max_attempts := coalesce(max_attempts, settings.max_attempts);
        notify := settings.notify;
    end if;

    if has_options is not true then
        insert into pgqueue.job as j (run_at, enqueued_at, priority, max_attempts, queue, kind, group_key, payload)
        values (
            moment, moment, 0, coalesce(enqueue.max_attempts, 20),
            enqueue.queue, coalesce(enqueue.kind, enqueue.queue), enqueue.group_key, coalesce(enqueue.payload, '{}')
        )
        returning j.id into job_id;
    else
        if unique_for is not null then
            job_id := pgqueue._recent_job(queue collate "default", unique_key, on_duplicate);
            if job_id is not null then
                return job_id;
            end if;
        end if;
        loop
            insert into pgqueue.job as j (
                run_at, enqueued_at, priority, max_attempts,
                queue, kind, unique_key, group_key, terms, payload, headers
            )
            values (
                coalesce(enqueue.run_at, moment), moment, coalesce(enqueue.priority, 0),
                coalesce(enqueue.max_attempts, 20),
                enqueue.queue, coalesce(enqueue.kind, enqueue.queue),
                enqueue.unique_key, enqueue.group_key, terms,
                coalesce(enqueue.payload, '{}'), enqueue.headers
            )
            -- Waits for a transaction that is just enqueuing, completing or claiming a
            -- job with this key.
            on conflict (queue, unique_key) where j.unique_key is not null do nothing
            returning j.id into job_id;
            exit when found;

            job_id := pgqueue._on_duplicate(
                queue collate "default", unique_key, coalesce(on_duplicate, 'skip'),
                coalesce(payload, '{}'), coalesce(priority, 0),
                coalesce(case when after is null then run_at else (terms).run_at end, moment), expires_at
            );
            -- Here, and not by _refuse(): enqueue_many() adds a line of CONTEXT.
            if on_duplicate = 'error' and job_id is not null then
                raise exception using
                    errcode = 'unique_violation',
                    message = 'a job with this unique_key is already waiting or running',
                    detail = format('It is job %s.', job_id),
                    hint = 'Choose another on_duplicate to get its id instead of this error.';
            end if;
            exit when job_id is not null;
        end loop;

        if found then
            new_id := job_id;
            if unique_for is not null then
                job_id := pgqueue._begin_window(
                    queue collate "default", unique_key, on_duplicate, job_id, moment + unique_for
                );
            end if;
            if batch_id is not null and job_id = new_id then
                perform pgqueue._join_batch(array[job_id], batch_id);
            end if;
            if after is not null and job_id = new_id then
                perform pgqueue._wait_for(job_id, after, if_dead);
            end if;
        end if;
        if group_key is null then
            perform pgqueue._announce(queue, priority, run_at);
        end if;
    end if;
    if group_key is not null then
        if octet_length(group_key) not between 1 and 200 then
            refused := pgqueue._refuse(pgqueue._bad_name('group_key', group_key));
        end if;
        if (has_options is not true or new_id is not null)
            and pgqueue._insert_ticket(
                queue, group_key, coalesce(priority, 0), coalesce(run_at, moment),
                settings.has_groups or settings.group_limit is not null
            )
            and (settings.has_groups or settings.group_limit is not null)
        then
            perform pgqueue._make_group_permits(queue, array[group_key], settings);
        end if;
    end if;

    -- Whoever can get the second lock exclusively knows that nobody is parked.
    if notify is not false
        and current_setting('pgqueue.notify', true) is distinct from 'off'
        and (
            pg_try_advisory_xact_lock_shared(7366513, fold)
            and pg_try_advisory_lock(7366514, fold)
            and pg_advisory_unlock(7366514, fold)
        ) is not true
    then
        perform pgqueue._wake(queue);
    end if;
    return job_id;
end;
$$;

comment on function pgqueue.enqueue(
    text, jsonb, text, int, timestamptz, int, text, text, text, jsonb, interval, timestamptz, bigint, bigint[],
    text
) is
'Adds a job in the caller''s transaction and returns its id; for a duplicate,
the id of the job that has the unique_key. Larger priority (-100 to 100) runs
first; kind defaults to the queue''s name. An enqueue whose key is taken by an
open transaction waits for its end, then does as on_duplicate says: skip
(default), replace or postpone a job that is not running, or error; a running
job stays as it is, and a NOTICE says so. With unique_for the key is taken for
that long, up to 1 year, whatever happens to the job: at most one in that time.
From expires_at on no attempt begins, and a job still waiting is cancelled.
batch_id makes the job part of a batch.
With after it is blocked until these jobs have completed; if one of them dies
or is cancelled it is cancelled, or with if_dead run it need not wait for it.
An enqueue that adds no job joins no batch and waits for nothing.
Raises 22023 (bad argument), 54000 (payload too large), 23505 (duplicate with
on_duplicate error), PQ001 (no such batch, or an unknown job in after), 55000
(the batch has finished), 42501 (the caller is a producer of other queues only).';

-- Adds the jobs whose keys are free and returns their ids, null for the others, whose jobs it locks if
-- they are to be replaced or postponed.
create or replace function pgqueue._insert_keyed(
    queue text, payloads jsonb[], kind text, priority int, run_at timestamptz,
    max_attempts int[], unique_keys text[], on_duplicate text, group_keys text[], headers jsonb,
    moment timestamptz, terms pgqueue._terms
)
    returns bigint[]
    language plpgsql
    set enable_sort = on
    set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    is_locking boolean := coalesce(on_duplicate in ('replace', 'postpone'), false);
    -- Ids are drawn in the order of the input, rows are written in the order of the keys:
    -- two calls with the same keys then wait for each other, but never in a circle.
    ids bigint[] := array(
        select nextval('pgqueue.job_id_seq') from generate_series(1, cardinality(payloads))
    );
    added bigint[];
begin
    -- A session that holds several jobs may wait only in the order of their ids. So lock the existing
    -- ones first; what appears meanwhile must be locked without waiting, or all begins again.
    loop
        begin
            perform from pgqueue.job as j
            where is_locking and j.queue = _insert_keyed.queue
                and j.unique_key = any (_insert_keyed.unique_keys)
            order by j.id
            for update;

            with inserted as (
                insert into pgqueue.job as j (
                    id, run_at, enqueued_at, priority, max_attempts,
                    queue, kind, unique_key, group_key, terms, payload, headers
                )
                overriding system value
                select
                    g.id,
                    coalesce(
                        _insert_keyed.run_at,
                        moment - (cardinality(payloads) - g.place) * interval '1 microsecond'
                    ),
                    moment, coalesce(_insert_keyed.priority, 0), g.max_attempts,
                    _insert_keyed.queue, coalesce(_insert_keyed.kind, _insert_keyed.queue),
                    g.unique_key, g.group_key, _insert_keyed.terms, coalesce(g.payload, '{}'),
                    _insert_keyed.headers
                from unnest(ids, payloads, unique_keys, group_keys, max_attempts) with ordinality
                    as g (id, payload, unique_key, group_key, max_attempts, place)
                order by g.unique_key, g.id
                on conflict (queue, unique_key) where j.unique_key is not null do nothing
                returning j.id
            )
            select array_agg(i.id) into added from inserted as i;

            exit when not is_locking or not exists (
                select p.id from pgqueue.job as p
                where p.queue = _insert_keyed.queue
                    and p.unique_key = any (_insert_keyed.unique_keys)
                except
                select l.id from (
                    select j.id from pgqueue.job as j
                    where j.queue = _insert_keyed.queue
                        and j.unique_key = any (_insert_keyed.unique_keys)
                    for update skip locked
                ) as l
            );
            raise sqlstate 'PQ003';
        exception when sqlstate 'PQ003' then
            null;
        end;
    end loop;
    return array(
        select a.id
        from unnest(ids) with ordinality as i (id, place)
        left join unnest(added) as a (id) on a.id = i.id
        order by i.place
    );
end;
$$;

-- max_attempts and max_payload_bytes for each of some jobs of one kind.
create or replace function pgqueue._settings_of_groups(
    queue text, kind text, group_keys text[], out max_attempts int[], out max_bytes int[]
)
    language plpgsql
    stable
    set enable_hashjoin = on
    set enable_nestloop = off
as $$
begin
    with own as materialized (
        select u.group_key, s.max_attempts, s.max_payload_bytes
        from (select distinct coalesce(g.group_key, '') as group_key from unnest(group_keys) as g (group_key)) as u
        cross join lateral pgqueue._in_force(queue, kind, u.group_key) as s
    )
    select
        array_agg(o.max_attempts order by g.place), array_agg(o.max_payload_bytes order by g.place)
    into max_attempts, max_bytes
    from unnest(group_keys) with ordinality as g (group_key, place)
    join own as o on o.group_key = coalesce(g.group_key, '');
end;
$$;

-- What comes before the jobs of an enqueue_many: wakes workers, and gives claims what they look for.
create or replace function pgqueue._prepare(
    settings pgqueue.queue_in_force, queue text, kind text, priority int, run_at timestamptz, group_keys text[],
    jobs int
)
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._wake(queue);
    if settings.caps is not null then
        perform pgqueue._make_permits_for(queue, settings.caps, array[coalesce(kind, queue)]);
    end if;
    if num_nonnulls(variadic group_keys) > 0 then
        if settings.has_groups or settings.group_limit is not null then
            perform pgqueue._make_group_permits(queue, group_keys, settings);
        end if;
        perform pgqueue._insert_tickets(
            array_fill(queue, array[cardinality(group_keys)]), group_keys,
            array_fill(coalesce(priority, 0), array[cardinality(group_keys)]),
            array_fill(coalesce(run_at, clock_timestamp()), array[cardinality(group_keys)]),
            settings.has_groups or settings.group_limit is not null
        );
        perform pgqueue._list_lane(queue, 1000 + coalesce(priority, 0));
    end if;
    if num_nonnulls(variadic group_keys) < jobs or group_keys is null then
        perform pgqueue._announce(queue, priority, run_at);
    end if;
end;
$$;

-- Enqueues the job of a schedule or a batch, or one once more, whoever calls. Refuses a payload that is too large.
create or replace function pgqueue._enqueue_again(
    queue text, payload jsonb, kind text, priority int, max_attempts int, group_key text, headers jsonb
)
    returns bigint
    language plpgsql
as $$
declare
    settings pgqueue.queue_in_force := pgqueue._in_force(queue, coalesce(kind, queue), group_key);
    refused boolean := pgqueue._refuse(pgqueue._check_payload(payload, settings.max_payload_bytes));
    moment timestamptz := clock_timestamp();
    job_id bigint;
begin
    perform pgqueue._prepare(
        settings, queue, kind, priority, null, case when group_key is not null then array[group_key] end, 1
    );
    insert into pgqueue.job as j (run_at, enqueued_at, priority, max_attempts, queue, kind, group_key, payload, headers)
    values (
        moment, moment, coalesce(_enqueue_again.priority, 0),
        coalesce(_enqueue_again.max_attempts, settings.max_attempts), _enqueue_again.queue,
        coalesce(_enqueue_again.kind, _enqueue_again.queue), _enqueue_again.group_key, _enqueue_again.payload,
        _enqueue_again.headers
    )
    returning j.id into job_id;
    return job_id;
end;
$$;

create or replace function pgqueue.enqueue_many(
    queue text,
    payloads jsonb[],
    kind text default null,
    priority int default null,
    run_at timestamptz default null,
    max_attempts int default null,
    unique_keys text[] default null,
    on_duplicate text default null,
    group_keys text[] default null,
    headers jsonb default null,
    expires_at timestamptz default null,
    batch_id bigint default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    settings pgqueue.queue_in_force;
    own_attempts int[];
    own_bytes int[];
    refused boolean;
    moment timestamptz := clock_timestamp();
    terms pgqueue._terms := case when num_nonnulls(expires_at, batch_id) > 0
        then row(expires_at, null, batch_id)
    end;
    ids bigint[];
    given record;
    job_id bigint;
begin
    if pg_sequence_last_value('pgqueue.used_seq'::regclass) >> (hashtext(queue) & 255) % 63 & 1 = 1 then
        settings := pgqueue._in_force(queue, coalesce(kind, queue));
        if settings.has_narrow and num_nonnulls(variadic group_keys) > 0 then
            select s.max_attempts, s.max_bytes into own_attempts, own_bytes
            from pgqueue._settings_of_groups(queue, coalesce(kind, queue), group_keys) as s;
        end if;
    end if;
    refused := pgqueue._refuse(coalesce(
        case when settings.has_access then pgqueue._check_access('producer', array[queue]) end,
        pgqueue._check_job(
            queue, kind, priority, run_at, max_attempts, null, on_duplicate, null, headers, null, expires_at
        ),
        pgqueue._check_many(payloads, unique_keys, group_keys, coalesce(
            own_bytes, case when settings.max_payload_bytes is not null
                then array_fill(settings.max_payload_bytes, array[coalesce(cardinality(payloads), 0)])
            end
        ))
    ));
    if batch_id is not null then
        refused := pgqueue._refuse(pgqueue._lock_batch(batch_id));
    end if;
    perform pgqueue._prepare(settings, queue, kind, priority, run_at, group_keys, cardinality(payloads));
    if unique_keys is null and batch_id is null then
        return query
        insert into pgqueue.job as j (
            run_at, enqueued_at, priority, max_attempts,
            queue, kind, group_key, terms, payload, headers
        )
        -- A microsecond apart, so that the position of a claim can lie between any two.
        select
            coalesce(
                enqueue_many.run_at,
                moment - (cardinality(payloads) - g.place) * interval '1 microsecond'
            ),
            moment, coalesce(enqueue_many.priority, 0),
            coalesce(enqueue_many.max_attempts, g.max_attempts, settings.max_attempts, 20),
            enqueue_many.queue, coalesce(enqueue_many.kind, enqueue_many.queue),
            g.group_key, terms, coalesce(g.payload, '{}'), enqueue_many.headers
        from unnest(payloads, group_keys, own_attempts) with ordinality
            as g (payload, group_key, max_attempts, place)
        returning j.id;
        return;
    end if;
    ids := pgqueue._insert_keyed(
        queue collate "default", payloads, kind, priority, run_at,
        coalesce(
            case when max_attempts is null then own_attempts end,
            array_fill(coalesce(max_attempts, settings.max_attempts, 20), array[cardinality(payloads)])
        ),
        unique_keys, on_duplicate, group_keys, headers, moment, terms
    );
    if batch_id is not null then
        perform pgqueue._join_batch(array_remove(ids, null), batch_id);
    end if;
    for given in
        select g.*
        from unnest(ids, payloads, unique_keys, group_keys) with ordinality
            as g (id, payload, unique_key, group_key, place)
        where g.id is null
        order by g.unique_key collate "default", g.place
    loop
        job_id := pgqueue.enqueue(
            queue, given.payload, kind, priority, run_at, max_attempts,
            given.unique_key, on_duplicate, given.group_key, headers,
            expires_at => expires_at, batch_id => batch_id
        );
        ids[given.place] := job_id;
    end loop;
    return query select i.id from unnest(ids) with ordinality as i (id, place) order by i.place;
end;
$$;

comment on function pgqueue.enqueue_many(
    text, jsonb[], text, int, timestamptz, int, text[], text, text[], jsonb, timestamptz, bigint
) is
'Adds one job for each payload, all or none, and returns their ids in the order
of the input. unique_keys and group_keys, if given, are as long as payloads; a
null in them means none. on_duplicate treats a key that occurs twice, or is
taken, as in enqueue; expires_at and batch_id are as in enqueue.
Raises 22023 (bad argument), 54000 (payload too large), 23505 (duplicate with
on_duplicate error), PQ001 (no such batch), 55000 (the batch has finished),
42501 (the caller is a producer of other queues only).';
-- The pick: which jobs are due, in order, locked, however deep the queue, for claim().
--
-- A lane is walked from its beginning. In front of the ready jobs are those that are running,
-- those that others are just claiming, and index entries of finished jobs that some old
-- snapshot keeps from being removed. While these are few nothing else happens. A walk that has
-- crossed many of them leaves a position for all sessions: the run_at up to which the jobs of the
-- lane have been taken. From then on claims start there and move it to their last pick at once,
-- before they commit, so that the next crosses none of their rows; a claim of one only if its
-- walk was longer than usual. After 100 ms, or 20 times the duration of that walk, one claim
-- walks from the beginning again and finds what is behind: late commits, releases, expired
-- leases, claims that were rolled back. A claim that finds nothing behind the position walks from
-- the beginning before it says so. Positions are kept in the cells of module lane.

-- The walk of _pick again, for when it has to leave something out. Separate, because its conditions,
-- prepared for each call, cost a plain claim a tenth.
create or replace function pgqueue._filtered_walk(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz,
    start timestamptz, start_id bigint, taken tid[], has_recovered boolean,
    out picks tid[], out last timestamptz, out may_be_over boolean
)
    language plpgsql
as $$
begin
    select
        array_agg(due.tid), max(due.run_at), bool_or(due.may_be_over)
    into picks, last, may_be_over
    from (
        select
            j.ctid as tid,
            j.run_at,
            j.lease_expires_at is not null or (j.terms).expires_at is not null as may_be_over
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, _filtered_walk.queue, _filtered_walk.lane)
            and j.run_at <= _filtered_walk.moment
            and (j.run_at, j.id) > (start, start_id)
            -- Once what is over was ended: no leases that just expired, since their jobs come back.
            and case
                when coalesce(j.lease_expires_at, (j.terms).expires_at) <= _filtered_walk.moment
                    then has_recovered is not true or j.lease_expires_at is not null
                        and j.attempt < j.max_attempts and j.cancelled_at is null
                else j.lease_expires_at is null
            end
            and pgqueue._is_wanted(j.kind, j.group_key, _filtered_walk.kinds, _filtered_walk.paused)
            and (taken is null or j.ctid <> all (taken))
        order by j.run_at, j.id
        limit wanted
        for update skip locked
    ) as due;
end;
$$;

-- Locks at most the wanted number of due jobs of one lane and returns where they are, in the order in
-- which they run, without those taken before; as a side effect ends what is over. Only from the beginning
-- (is_whole) does "none" mean that there is none. Plans as claim sets it.
create or replace function pgqueue._pick(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, is_whole boolean,
    taken tid[] default null
)
    returns tid[]
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    -- What others may take must not end up behind a position left by claims that pass it over.
    key bigint := hashtextextended(concat(queue, kinds, paused), lane);
    tag bigint := (key >> 20 & 4095) << 51;
    record int := (key & 15) * 2;
    valid_until bigint := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    now_us bigint;
    position bigint;
    first timestamptz := '-infinity'::timestamptz;
    start timestamptz := first;
    start_id bigint := 0;
    began timestamptz;
    walked bigint;
    reached bigint;
    picks tid[];
    last timestamptz;
    may_be_over boolean;
    over_at timestamptz;
    has_recovered boolean;
begin
    if valid_until is not null then
        -- The second record, when the first is somebody else's; none, when both are.
        if valid_until >> 51 > 0 then
            record := (key >> 4 & 15) * 2;
            valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
            if valid_until >> 51 > 0 then
                valid_until := 0;
                record := null;
            end if;
        end if;
        if valid_until > 0 then
            position := pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass);
        end if;
        if valid_until > 0 and not is_whole then
            now_us := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
            if valid_until between now_us and now_us + 60000000 then
                start := timestamptz '2020-01-01 00:00 UTC' + (position >> 12) * interval '1 microsecond';
                if position & 4095 > 0 then
                    start_id := pg_sequence_last_value(('pgqueue._cell_tie_' || (key & 3))::regclass);
                end if;
                if (start < moment) is not true then
                    start := first;
                    position := null;
                end if;
                if (start_id % 4095 + 1 = position & 4095) is not true then
                    start_id := 0;
                end if;
            elsif valid_until between now_us - 1000000 and now_us then
                -- This claim walks from the beginning, the others go on.
                perform setval(('pgqueue._cell_' || record)::regclass, tag | now_us + 100000);
            end if;
        end if;
    end if;

    loop
        began := clock_timestamp();
        walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
            + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass);
        -- The same walk twice, only the second one plain: see _filtered_walk.
        if has_recovered or num_nonnulls(paused, taken) > 0 then
            select w.* into picks, last, may_be_over
            from pgqueue._filtered_walk(
                queue, kinds, paused, lane, wanted, moment, start, start_id, taken, has_recovered
            ) as w;
        else
            select
                array_agg(due.tid), max(due.run_at), bool_or(due.may_be_over)
            into picks, last, may_be_over
            from (
                select
                    j.ctid as tid,
                    j.run_at,
                    -- A comparison would cost each claim of one job half a percent.
                    j.lease_expires_at is not null or (j.terms).expires_at is not null as may_be_over
                from pgqueue.job as j
                where pgqueue._is_in_lane(j, _pick.queue, lane)
                    and j.run_at <= _pick.moment
                    and (j.run_at, j.id) > (start, start_id)
                    and (j.lease_expires_at <= _pick.moment) is not false
                    and (_pick.kinds is null or j.kind = any (_pick.kinds))
                order by j.run_at, j.id
                limit wanted
                for update skip locked
            ) as due;
        end if;
        if may_be_over then
            select min(j.run_at) into over_at
            from pgqueue.job as j
            where j.ctid = any (picks)
                and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _pick.moment;
            if over_at is not null then
                -- Those that come back are found where they were.
                perform pgqueue._recover(queue, lane, picks, over_at, moment);
                has_recovered := true;
                continue;
            end if;
        end if;
        exit when start = first or cardinality(picks) = wanted or picks is null
            -- Short if a walk from the beginning is expensive.
            or valid_until > now_us + 100000;
        start := first;
        start_id := 0;
    end loop;

    -- Entries that it crossed, and pages: a measure that depends neither on the machine nor on the
    -- moment.
    walked := pg_stat_get_xact_tuples_returned('pgqueue.job_lane_idx'::regclass)
        + 10 * pg_stat_get_xact_blocks_fetched('pgqueue.job_lane_idx'::regclass) - walked;
    -- A short walk for one job leaves nothing.
    if wanted = 1 and walked <= 63 then
        return coalesce(picks, '{}'::tid[]);
    end if;
    walked := walked - 3 * coalesce(cardinality(picks), 0);
    if start = first and walked > 200
            and (picks is not null or clock_timestamp() > began + interval '5 milliseconds')
        or start > first and picks is not null and (wanted > 1 or walked > 60)
    then
        -- An enqueue that commits within 10 ms is never behind the position.
        last := least(case when cardinality(picks) = wanted then last end, moment - interval '10 milliseconds');
        reached := (date_part('epoch', last) * 1000000)::bigint - 1577836800000000;
        perform pgqueue._leave_position(
            key, record, position, reached,
            case when reached = position >> 12 then (select j.id from pgqueue.job as j where j.ctid = picks[wanted]) end,
            case when start = first
                then pgqueue._since_2020(pgqueue._believed_until(began, interval '100 milliseconds'))
            end
        );
    end if;
    return coalesce(picks, '{}'::tid[]);
end;
$$;

-- _pick, or _pick_groups, in the listed lanes of a queue, by age and highest first, then, if nothing was
-- found or no list is valid, from the beginning of all that have a job due.
create or replace function pgqueue._pick_lanes(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, noted int[],
    settings pgqueue.queue_in_force, inout new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
as $$
declare
    live int[];
    served int[];
    shares int[];
    lanes int[];
    lane int;
    wanted int;
    is_whole boolean := false;
    taken tid[];
    of_groups record;
begin
    picks := '{}';
    if settings.age_after is not null and -1000 = any (noted) then
        -- All are to be compared.
        noted := null;
    end if;
    if noted is null then
        live := pgqueue._due_lanes(queue, moment);
    end if;
    if settings.age_after is not null then
        select s.served, s.shares into served, shares
        from pgqueue._share_by_age(
            queue, kinds, paused, max_jobs, moment, settings.age_after, coalesce(noted, live)
        ) as s;
    end if;
    loop
        lanes := served || coalesce(noted, live);
        for place in 1 .. cardinality(lanes) loop
            lane := lanes[place];
            exit when lane = -1000;
            wanted := least(shares[place], max_jobs - cardinality(picks));
            -- A lane may have two turns.
            taken := case when served is not null then nullif(picks, '{}') end;
            if lane > 500 then
                of_groups := pgqueue._pick_groups(
                    queue, kinds, paused, lane, wanted, moment, is_whole,
                    lane >= all (coalesce(noted, live)), settings, taken, new_token
                );
                new_token := of_groups.new_token;
                picks := picks || of_groups.picks;
                job_of := job_of || of_groups.job_of;
                permits := permits || of_groups.permits;
            else
                picks := picks || pgqueue._pick(
                    queue, kinds, paused, lane, wanted, moment, is_whole, taken
                );
            end if;
            exit when cardinality(picks) = max_jobs;
        end loop;
        exit when is_whole or cardinality(picks) = max_jobs or picks <> '{}' and (-1000 = any (noted)) is not true;
        live := coalesce(live, pgqueue._due_lanes(queue, moment));
        if -1000 = any (noted) then
            -- Those that the list had no room for.
            noted := array(
                select l.lane from unnest(live) with ordinality as l (lane, place)
                where l.lane <> all (noted) order by l.place
            );
            continue;
        end if;
        noted := null;
        served := null;
        shares := null;
        is_whole := true;
    end loop;
    if live is not null
        and (picks <> '{}' or clock_timestamp() > moment + interval '5 milliseconds')
    then
        perform pgqueue._note_lanes(queue, live, moment);
    end if;
end;
$$;

-- _pick_lanes under the caps of a queue: as many jobs as there are permits for, by the claim with this
-- token; returns which job has which permit.
create or replace function pgqueue._pick_capped(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, settings pgqueue.queue_in_force,
    new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    caps pgqueue._cap[] := pgqueue._caps_of(settings.caps, kinds);
    wanted int := max_jobs;
    room record;
    passed jsonb;
    found_jobs record;
    next record;
    full_kinds text[] := '{}'::text[];
begin
    picks := '{}';
    perform pgqueue._sweep_groups_if_due(moment, new_token);
    loop
        room := pgqueue._room(queue, caps, wanted, moment);
        if room.full_caps is not null and pgqueue._review_caps(queue, caps, room.full_caps, moment, new_token) then
            room := pgqueue._room(queue, caps, wanted, moment);
        end if;
        exit when room.jobs <= 0;
        passed := pgqueue._without(paused, room.full_kinds || full_kinds);
        found_jobs := pgqueue._pick_lanes(
            queue, kinds, passed, coalesce(room.jobs, wanted), moment, pgqueue._noted_lanes(queue, moment), settings,
            new_token
        );
        exit when found_jobs.picks = '{}';
        next := pgqueue._take_permits(
            queue, found_jobs.picks, found_jobs.job_of, caps, new_token, moment, settings.age_after
        );
        if next.refused = '{}' then
            picks := picks || found_jobs.picks;
        else
            perform pgqueue._put_back(queue, kinds, passed, next.refused, found_jobs.permits);
            perform pgqueue._merge_permits(queue, r.kind, array['']::text[]) from unnest(next.refusing) as r;
        end if;
        job_of := job_of || found_jobs.job_of || next.job_of;
        permits := permits || found_jobs.permits || next.permits;
        exit when next.refused = '{}';
        with leased as (
            update pgqueue.job as j
            -- Until claim() gives it its lease.
            set token = new_token, lease_expires_at = 'infinity'
            where j.ctid = any (found_jobs.picks) and j.id <> all (next.refused)
            returning j.ctid as tid
        )
        select _pick_capped.picks || coalesce(array_agg(l.tid), '{}'::tid[]) into picks from leased as l;
        full_kinds := full_kinds || array(select r.kind from unnest(next.refusing) as r where r.kind <> '');
        wanted := max_jobs - cardinality(picks);
        exit when exists (select from unnest(next.refusing) as r where r.kind = '')
            -- The next claim continues.
            or clock_timestamp() > moment + interval '100 milliseconds';
    end loop;
end;
$$;
-- Rest: how long a worker that found nothing may sleep. And what is done beside claims and rests, so that no
-- daemon is needed. How sleepers are woken is in module wake.

-- How long until a queue has something to claim: zero if it has, else until a job is due or a lease
-- expires; null if there is nothing.
create or replace function pgqueue._until_due(queue text, kinds text[], paused jsonb, moment timestamptz)
    returns interval
    language plpgsql
    set enable_sort = off
as $$
declare
    live record;
    lease_ends_at timestamptz;
    unlocked_at timestamptz;
    until timestamptz;
begin
    for live in select * from pgqueue._live_lanes(queue) loop
        if live.first <= moment and live.lane > 500 then
            until := least(until, pgqueue._until_ticket(
                queue, kinds, paused, live.lane, (pgqueue._in_force(queue)).group_limit is not null, moment
            ));
        elsif live.first <= moment then
            perform from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_due.queue, live.lane) and j.run_at <= moment
                and (j.lease_expires_at is null or j.lease_expires_at <= moment)
                and pgqueue._is_wanted(j.kind, j.group_key, _until_due.kinds, _until_due.paused)
            limit 1
            for update skip locked;
            if found then
                return interval '0';
            end if;
            select
                min(j.lease_expires_at) filter (where j.lease_expires_at > moment),
                -- Locked just now. If it is not claimed after all, nothing will tell.
                case when bool_or((j.lease_expires_at > moment) is not true)
                    then moment + interval '1 second'
                end
            into lease_ends_at, unlocked_at
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_due.queue, live.lane) and j.run_at <= moment
                and pgqueue._is_wanted(j.kind, j.group_key, _until_due.kinds, _until_due.paused);
            until := least(until, lease_ends_at, unlocked_at);
        end if;
        until := least(until, (
            select j.run_at
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_due.queue, live.lane)
                and j.run_at > moment and j.run_at < 'infinity'
                and j.lease_expires_at is null
                and pgqueue._is_wanted(j.kind, j.group_key, _until_due.kinds, _until_due.paused)
            order by j.run_at, j.id
            limit 1
        ));
    end loop;
    return until - moment;
end;
$$;

-- _until_due under the caps of a queue: also until a full one has a permit again.
create or replace function pgqueue._until_room(
    queue text, kinds text[], paused jsonb, moment timestamptz
)
    returns interval
    language plpgsql
as $$
declare
    caps pgqueue._cap[] := (pgqueue._in_force(queue)).caps;
    room record;
    until interval;
begin
    if caps is null then
        return pgqueue._until_due(queue, kinds, paused, moment);
    end if;
    caps := pgqueue._caps_of(caps, kinds);
    room := pgqueue._room(queue, caps, 1, moment);
    if room.full_caps is not null then
        until := (
            -- The next claim creates permits that do not exist yet.
            select min(f.at) from (
                select case when count(*) < (caps[f.cap]).most then moment
                    else min(case
                        when p.is_held then p.free_at
                        -- The next claim finds out that a job beyond the cap is gone.
                        when p.place <= (caps[f.cap]).most then moment + interval '100 milliseconds'
                    end)
                end as at
                from unnest(room.full_caps) as f (cap)
                left join lateral pgqueue._permits(queue, caps[f.cap], moment) as p on true
                group by f.cap
            ) as f
        ) - moment;
    end if;
    if (room.jobs = 0) is not true then
        until := least(
            until, pgqueue._until_due(queue, kinds, pgqueue._without(paused, room.full_kinds), moment)
        );
    end if;
    return case when until < '0' then '0' else until end;
end;
$$;

-- How long until the next loose end is due; null for never.
create or replace function pgqueue._until_loose_end(moment timestamptz)
    returns interval
    language plpgsql
as $$
begin
    if pg_relation_size('pgqueue.loose_end') = 0 then
        return null;
    end if;
    -- A due one that is locked is just being looked at.
    if current_setting('transaction_read_only') = 'off' then
        perform from pgqueue.loose_end as l where l.look_at <= moment limit 1 for update skip locked;
        if found then
            return interval '0';
        end if;
    end if;
    return (
        select greatest(min(first.look_at) - moment, interval '200 milliseconds')
        from (values (false), (true)) as n (is_new)
        cross join lateral (
            select l.look_at
            from pgqueue.loose_end as l
            where (l.what = 'new') = n.is_new
            order by l.look_at
            limit 1
        ) as first
        having count(*) > 0
    );
end;
$$;

-- How long until a schedule of one of these queues, or a loose end, is due; null for never.
create or replace function pgqueue._until_slot(queues text[], moment timestamptz)
    returns interval
    language plpgsql
    set enable_sort = off
as $$
begin
    return least(pgqueue._until_loose_end(moment), (
        -- One that is due and was not fired is just being fired.
        select case when min(d.due_at) <= moment then interval '50 milliseconds' else min(d.due_at) - moment end
        from unnest(queues) as q (name)
        cross join lateral (
            select s.due_at
            from pgqueue.schedule as s
            where s.queue = q.name and s.due_at < 'infinity'
            order by s.due_at
            limit 1
        ) as d
    ));
end;
$$;

-- Does due work other than claims: at most this many schedules, and ten times as many loose ends, or a
-- part of the sweep. Records in the cell when to look again.
create or replace function pgqueue._look_around(moment timestamptz, most int)
    returns void
    language plpgsql
as $$
declare
    is_all boolean;
    is_used boolean := greatest(
        pg_relation_size('pgqueue.dependency'), pg_relation_size('pgqueue.batch')
    ) > 0;
begin
    -- rest() may be called in a read-only transaction, too.
    if current_setting('transaction_read_only') = 'on' then
        return;
    end if;
    perform pgqueue._fire_due(moment, most);
    if is_used then
        is_all := pgqueue._tie_loose_ends(10 * most, clock_timestamp()) < 10 * most;
        perform setval('pgqueue._cell_due', least(
            pgqueue._since_2020(pgqueue._believed_until(
                moment, case when is_all then interval '200 milliseconds' else interval '0' end
            )),
            case when pg_relation_size('pgqueue.schedule') > 0
                then pg_sequence_last_value('pgqueue._cell_due'::regclass)
            end
        ));
    elsif pg_relation_size('pgqueue.schedule') = 0 then
        perform setval('pgqueue._cell_due', pgqueue._since_2020(moment + interval '1 second'));
    end if;
end;
$$;

-- _look_around for a claim, if it is time; returns the moment as of which to claim, so that the claim
-- gets what has become due.
create or replace function pgqueue._look_around_if_due(moment timestamptz)
    returns timestamptz
    language plpgsql
as $$
begin
    -- A statement that begins its transaction starts within the time of its planning.
    if pg_sequence_last_value('pgqueue._cell_due'::regclass) > pgqueue._since_2020(
        moment - case when statement_timestamp() > now() + interval '200 microseconds'
            then interval '1 second' else interval '0'
        end
    ) then
        return moment;
    end if;
    -- Few, or a claim under a short timeout is cut off each time, and nothing is ever fired.
    perform pgqueue._look_around(moment, 10);
    return clock_timestamp();
end;
$$;

create or replace function pgqueue.rest(
    queues text[], kinds text[] default null, park boolean default true
)
    returns interval
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_queues(queues), pgqueue._check_isolation(), pgqueue._check_access('worker', queues)
    ));
    moment timestamptz := clock_timestamp();
    is_swept boolean := true;
    is_quiet boolean := true;
    pause interval;
begin
    perform pgqueue._look_around(moment, 100);
    perform pgqueue._serve(queues, kinds, park is false);
    if park is not false then
        is_quiet := pgqueue._park(queues);
    end if;
    moment := clock_timestamp();
    -- It may be alone, and its claim has looked at only a few of the groups that have lost their tickets.
    if pg_sequence_last_value('pgqueue.lanes_seq'::regclass) <> 0
        and current_setting('transaction_read_only') = 'off' and exists (
            select
            from unnest(queues) as q (name)
            cross join lateral pgqueue._live_lanes(q.name) as l
            where l.lane > 500 and l.first <= moment
        )
    then
        is_swept := pgqueue._sweep_all(moment);
        moment := clock_timestamp();
    end if;
    select min(least(
        pgqueue._until_room(q.name, rest.kinds, p.paused, moment),
        case when not s.notify then interval '5 seconds' end
    ))
    into pause
    from unnest(queues) as q (name)
    cross join lateral pgqueue._in_force(q.name) as s
    cross join lateral pgqueue._paused(q.name, s.paused) as p (paused)
    where not s.paused or p.paused is not null;
    pause := least(
        pause, pgqueue._until_slot(queues, moment), case when not is_swept then interval '1 second' end
    );
    if not is_quiet then
        -- Not before 40 times as long as the look took: a twentieth of the time, with a claim.
        pause := least(pause, interval '5 seconds', greatest(
            interval '20 milliseconds', 40 * (clock_timestamp() - moment)
        ));
    end if;
    return pause;
-- An interrupted rest() leaves the session unparked.
exception when query_canceled or lock_not_available or deadlock_detected
    or insufficient_resources or program_limit_exceeded or read_only_sql_transaction
then
    perform pgqueue._unpark();
    raise;
end;
$$;

comment on function pgqueue.rest(text[], text[], boolean) is
'For a session that has run LISTEN pgqueue and whose claim found nothing in
these queues (of these kinds): returns how long it may sleep, unless a
notification comes first. Zero: claim again at once. Null: until notified.
Fires due schedules. From now on enqueues into these queues notify it; 100 ms
of work without a rest end that. NOTIFY is a hint, so look every few seconds
anyway.
Behind a transaction pooler none arrive: park => false only looks.
Also notes, for health and why, that this session serves these queues and kinds:
while it lives, or for ten minutes with park => false.
Raises 25001 outside READ COMMITTED, 22023 (bad argument), 42501 (the caller is
a worker of other queues only).';
-- Claims: which jobs a worker gets, under which lease. Module pick finds and locks them.
--
-- Running jobs stay in their lane, leased, so claim() finds expired leases where it looks for
-- work and ends those attempts itself: recovery needs no daemon.
--
-- Plans, here and in the modules around: a statement is planned once for a session, with the
-- statistics of that moment, and a plan made while job is small would go on reading all of it.
-- Hence the settings on the functions: jobs are found by ctid or by primary key, never by a scan,
-- whatever the caller has switched off. JIT is off because a path that is disabled but taken
-- anyway looks expensive enough to compile, which takes longer than the rest of the call.
--
-- claim, _pick, _pick_plain_groups and enqueue are longer than a screen: every function that one of them
-- calls costs 2 % of a claim (6 us of 240, 20,000 claims of one job).

create or replace function pgqueue.claim(
    queue text,
    worker text,
    max_jobs int default 1,
    lease interval default null,
    kinds text[] default null
)
    returns setof pgqueue.job
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    used bigint := pg_sequence_last_value('pgqueue.used_seq'::regclass);
    settings pgqueue.queue_in_force;
    paused jsonb;
    moment timestamptz := clock_timestamp();
    noted int[];
    new_token bigint;
    picks tid[];
    of_lanes record;
    job_of bigint[];
    own_permits tid[];
    permits_of jsonb;
    has_leases boolean;
    is_capped boolean;
    has_one_each boolean;
    refused boolean;
begin
    -- Three shortcuts for the plain call: its arguments are checked in one expression,
    -- settings are read only if there are any, and so are lanes.
    if (
        octet_length(queue) between 1 and 200 and octet_length(worker) between 1 and 200
        and max_jobs between 1 and 10000 and lease is null
        and current_setting('transaction_isolation') = 'read committed'
        and current_setting('transaction_read_only') = 'off'
    ) is not true then
        refused := pgqueue._refuse(pgqueue._check_claim(queue, worker, max_jobs, lease));
        max_jobs := coalesce(max_jobs, 1);
    end if;
    if used <> 0 then
        if used < 0 and pg_sequence_last_value('pgqueue._cell_due'::regclass)
            <= (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000
        then
            moment := pgqueue._look_around_if_due(moment);
        end if;
        if used >> (hashtext(queue) & 255) % 63 & 1 = 1 then
            select f.* into settings from pgqueue.queue_in_force as f where f.queue = claim.queue collate "default";
            if not found then
                select f.* into settings from pgqueue.queue_in_force as f where f.queue = '';
            end if;
            if settings.has_pauses or settings.has_access then
                if settings.has_access then
                    refused := pgqueue._refuse(pgqueue._check_access('worker', array[queue]));
                end if;
                paused := pgqueue._paused(queue, settings.paused);
                has_leases := lease is null and exists (
                    select from pgqueue.queue as q
                    where q.name in ('', claim.queue) and num_nonnulls(q.paused, q.lease) > 0
                        and (q.kind <> '' or q.group_key <> '') and q.lease is not null
                );
            end if;
            if settings.paused and paused is null then
                return;
            end if;
            lease := coalesce(lease, settings.lease);
            is_capped := settings.caps is not null;
        end if;
    end if;

    if is_capped then
        new_token := nextval('pgqueue.token_seq');
        of_lanes := pgqueue._pick_capped(
            queue, kinds, paused, max_jobs, moment, settings, new_token
        );
        picks := of_lanes.picks;
        if picks = '{}' then
            return;
        end if;
        job_of := of_lanes.job_of;
        own_permits := of_lanes.permits;
    elsif pg_sequence_last_value('pgqueue.lanes_seq'::regclass) >> (hashtext(queue) & 63) & 1 = 0 then
        picks := pgqueue._pick(queue, kinds, paused, 0, max_jobs, moment, false);
    else
        noted := pgqueue._noted_lanes(queue, moment);
        if noted[1] > 500 and num_nonnulls(paused, settings.age_after, nullif(settings.has_groups, false)) = 0
            and settings.group_on_retry is distinct from 'block'
            -- With a limit it looks for tickets and permits one by one.
            and (settings.group_limit is null or max_jobs <= 300)
        then
            of_lanes := pgqueue._pick_plain_groups(queue, kinds, noted[1], max_jobs, moment, settings.group_limit);
            new_token := of_lanes.new_token;
            picks := of_lanes.picks;
            job_of := of_lanes.job_of;
            own_permits := of_lanes.permits;
            has_one_each := own_permits is not null;
        end if;
    end if;
    if (picks = '{}') is not false then
        of_lanes := pgqueue._pick_lanes(queue, kinds, paused, max_jobs, moment, noted, settings, new_token);
        new_token := of_lanes.new_token;
        picks := of_lanes.picks;
        if picks = '{}' then
            return;
        end if;
        job_of := of_lanes.job_of;
        own_permits := of_lanes.permits;
    end if;
    if current_setting('pgqueue.parked', true) <> '' then
        perform pgqueue._unpark_if_busy(moment);
    end if;

    -- A rate counts from when its permit was taken.
    moment := case when new_token is not null then moment else clock_timestamp() end;
    new_token := coalesce(new_token, nextval('pgqueue.token_seq'));
    -- One job has no order, and a sort would cost it a tenth of its claim: with it the heap grows
    -- past what glibc keeps, and is given back and asked for again at each call.
    if cardinality(picks) = 1 then
        return query
        update pgqueue.job as j
        set permits = own_permits,
            token = new_token,
            attempt = j.attempt + 1,
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + case when has_leases
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                else coalesce(claim.lease, '30 seconds')
            end
        where j.ctid = any (picks)
        returning j.*;
        return;
    end if;
    if settings.age_after is null and (own_permits is null or has_one_each) then
        return query
        with leased as (
            update pgqueue.job as j
            set permits = case when has_one_each then array[own_permits[array_position(job_of, j.id)]] end,
                token = new_token,
                attempt = j.attempt + 1,
                worker = claim.worker,
                claimed_at = moment,
                lease_expires_at = moment + case when has_leases
                    then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                    else coalesce(claim.lease, '30 seconds')
                end
            where j.ctid = any (picks)
            returning j.*
        )
        -- No plan decides the order.
        select l.* from leased as l order by l.priority desc, l.run_at, l.id;
        return;
    end if;
    -- As a join it might read all jobs.
    permits_of := (
        select jsonb_object_agg(h.id, h.permits::text)
        from (
            select u.id, array_agg(u.permit) as permits from unnest(job_of, own_permits) as u (id, permit) group by u.id
        ) as h
    );
    -- Apart, because a sort by more than columns copies each job twice.
    return query
    with leased as (
        update pgqueue.job as j
        set permits = (permits_of ->> j.id::text)::tid[],
            token = new_token,
            attempt = j.attempt + 1,
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + case when has_leases
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                else coalesce(claim.lease, '30 seconds')
            end
        where j.ctid = any (picks)
        returning j.*
    )
    select l.*
    from leased as l
    order by
        case when settings.age_after is null then l.priority
            else pgqueue._aged(l.priority, l.run_at, moment, settings.age_after)
        end desc,
        l.run_at, l.id;
end;
$$;

comment on function pgqueue.claim(text, text, int, interval, text[]) is
'Takes at most max_jobs due jobs of a queue (only of these kinds, if given) and
returns them in the order in which to run them: highest priority, which rises
with the wait if age_after is set, then run_at, then id. Each counts one
attempt and is leased under its token until lease_expires_at. As a side effect
recovers expired leases. Never waits. A claim counts from its commit: one that
is rolled back, or cut off by a crash, never happened.
Raises 25001 outside READ COMMITTED, 25006 (the transaction is read-only, or
the server a standby), 22023 (bad argument), 42501 (the caller is a worker of
other queues only).';

-- How many of the wanted jobs each queue may have, by its weight and its limit, in the order in which to
-- ask them.
create or replace function pgqueue._shares(queues text[], weights int[], limits int[], wanted int)
    returns table (queue text, most int, share int)
    language plpgsql
as $$
declare
    start float8 := random();
begin
    -- Rounded up or down at random, so that shares are right on average even if each is less
    -- than one job (systematic sampling, Madow 1949); the order is drawn by weight (Efraimidis
    -- and Spirakis 2006).
    return query
    select
        q.queue,
        least(q.most, wanted),
        (floor(q.upto + start) - floor(q.upto - q.part + start))::int
    from (
        select p.*, sum(p.part) over (order by p.place) as upto
        from (
            select
                u.*,
                wanted * coalesce(u.weight, 1)::float8 / sum(coalesce(u.weight, 1)) over () as part
            from unnest(queues, weights, limits) with ordinality as u (queue, weight, most, place)
        ) as p
    ) as q
    order by -ln(1 - random()) / coalesce(q.weight, 1);
end;
$$;

create or replace function pgqueue.claim_from(
    queues text[],
    worker text,
    max_jobs int default 1,
    lease interval default null,
    kinds text[] default null,
    weights int[] default null,
    limits int[] default null
)
    returns setof pgqueue.job
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_queues(queues),
        case
            when cardinality(weights) <> cardinality(queues) or cardinality(limits) <> cardinality(queues)
                then array[
                    'weights and limits must be as long as queues',
                    format(
                        'There are %s queues, %s weights and %s limits.', cardinality(queues),
                        coalesce(cardinality(weights), 0), coalesce(cardinality(limits), 0)
                    ),
                    'Omit them for equal shares without limits; a null in them is the default.'
                ]
            when 1 > any (weights) or 0 > any (limits) then array[
                'every weight must be at least 1, every limit at least 0',
                format('Weights are %s, limits %s.', weights, limits),
                'A queue with twice the weight gets twice the share.'
            ]
        end,
        pgqueue._check_claim(queues[1], worker, max_jobs, lease),
        -- One page as long as nobody's access is limited.
        case when pg_relation_size('pgqueue.access_queue_idx') > 8192
            then pgqueue._check_access('worker', queues)
        end
    ));
    wanted int := coalesce(max_jobs, 1);
    turn record;
    share int;
    found_jobs int;
    rest_of text[] := '{}'::text[];
    rest_limits int[] := '{}'::int[];
begin
    -- Two rounds: first each queue up to its share, then those that had more.
    for turn in select s.* from pgqueue._shares(queues, weights, limits, wanted) as s loop
        share := least(turn.share, turn.most, wanted);
        found_jobs := 0;
        if share > 0 then
            return query select * from pgqueue.claim(turn.queue, worker, share, lease, kinds);
            get diagnostics found_jobs = row_count;
            wanted := wanted - found_jobs;
        end if;
        if found_jobs = share then
            rest_of := rest_of || turn.queue;
            rest_limits := rest_limits || turn.most - share;
        end if;
    end loop;
    for turn in select r.queue, r.most from unnest(rest_of, rest_limits) as r (queue, most) loop
        share := least(turn.most, wanted);
        continue when share = 0;
        return query select * from pgqueue.claim(turn.queue, worker, share, lease, kinds);
        get diagnostics found_jobs = row_count;
        wanted := wanted - found_jobs;
    end loop;
end;
$$;

comment on function pgqueue.claim_from(text[], text, int, interval, text[], int[], int[]) is
'claim over several queues in one call: at most max_jobs in all, shared by weight
(default 1 each), at most limits[i] of queues[i] (null: no limit). What a
queue leaves of its share goes to those that have more, so a full queue
starves no other and an empty one costs nothing. Returns the jobs queue by
queue, each in the order of claim.
Raises 25001 outside READ COMMITTED, 25006 (read-only), 22023 (bad argument),
42501 (the caller is a worker of other queues only).';
-- How a worker ends attempts: complete, fail and release, and finish for many, each by its own
-- outcome. What happens to a job that did not complete is in module attempt.

-- The columns of _log() once more, here and in complete_many: this is the hottest path of
-- all, and locking the jobs first, as the other functions do, costs half as much again. For one
-- job two plain statements are cheapest, for many one with two parts.
create or replace function pgqueue.complete(job_id bigint, token bigint, result jsonb default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    awaited bigint := pg_sequence_last_value('pgqueue.awaited_seq');
    keep_runs int;
    -- Whether anything is set of what the log keeps; null for no.
    is_configured boolean;
    is_logged boolean;
    done record;
    found_before bigint;
    is_followed boolean;
    refused boolean;
begin
    -- Few conditions and variables, because each that a plain job meets costs it half a hundredth.
    if current_setting('transaction_isolation') <> 'read committed'
        or pg_relation_size('pgqueue.queue_keep_idx') > 8192
    then
        if current_setting('transaction_isolation') <> 'read committed' then
            refused := pgqueue._refuse(pgqueue._check_isolation());
        end if;
        is_configured := true;
        is_logged := pgqueue._log_kept(array[job_id], array[token], array[result], moment);
    end if;

    delete from pgqueue.job as j
    where j.id = complete.job_id and j.token = complete.token
    returning j.attempt, j.run_at, j.claimed_at, j.queue, j.kind, j.worker, j.group_key, j.permits, (j.terms).batch_id
    into done;
    if not found or is_configured or done.batch_id is not null or done.permits is not null
        or awaited >> (hashtext(done.queue) & 255) % 63 & 1 = 1
    then
        if not found then
            refused := pgqueue._refuse(pgqueue._lost(job_id, token));
        end if;
        if awaited < 0 and not pgqueue._is_own(done.queue, pgqueue._own_queues('worker')) then
            refused := pgqueue._refuse(pgqueue._lost(job_id, token));
        end if;
        if is_configured then
            keep_runs := case when is_logged then 0
                else (pgqueue._in_force(done.queue, done.kind, done.group_key)).keep_runs
            end;
        end if;
        is_followed := done.permits is not null or pg_sequence_last_value('pgqueue._cell_awaited')
            > (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
        if is_followed is not true and done.batch_id is not null then
            -- As in _is_batch_over, written out.
            found_before := pg_sequence_last_value(('pgqueue._cell_batch_' || done.batch_id % 5)::regclass);
            perform from pgqueue.job as j
            where j.id = found_before and (j.terms).batch_id = done.batch_id and j.xmax in ('0'::xid, j.xmin);
            is_followed := not found;
        end if;
        if is_followed is not true and awaited >> (hashtext(done.queue) & 255) % 63 & 1 = 1 then
            perform from pgqueue.dependency as d where d.job_id = complete.job_id limit 1;
            is_followed := found;
        end if;
        if is_followed then
            perform pgqueue._after_end(array[row(
                job_id, 'completed', done.queue, done.group_key, done.batch_id, done.permits, null, null, null
            )::pgqueue._ended]);
        end if;
    end if;
    insert into pgqueue.run (
        slot, attempt, job_id, finished_at, waited, taken,
        queue, kind, outcome, worker, result
    )
    select
        (floor(date_part('epoch', moment) / 86400)::int + coalesce(keep_runs, 7)) % 16,
        done.attempt, complete.job_id, moment,
        done.claimed_at - least(done.run_at, done.claimed_at), moment - done.claimed_at,
        done.queue, done.kind, 'completed', done.worker, complete.result
    where keep_runs is distinct from 0;
end;
$$;

comment on function pgqueue.complete(bigint, bigint, jsonb) is
'Completes a job. Call it in the transaction of the handler''s own writes, and
they commit together; without the lease both roll back.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED.';

create or replace function pgqueue.complete_many(
    job_ids bigint[],
    tokens bigint[],
    results jsonb[] default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    -- An index scan meets the jobs, and locks them, in the order of their ids.
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_nestloop = off
    set enable_mergejoin = off
    set enable_hashjoin = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(job_ids, tokens),
        case when cardinality(results) <> cardinality(job_ids) then array[
            'results must be as long as job_ids',
            format('There are %s ids and %s results.', cardinality(job_ids), cardinality(results)),
            'Use null for a job without a result.'
        ] end
    ));
    moment timestamptz := clock_timestamp();
    today int := floor(date_part('epoch', moment) / 86400)::int;
    is_configured boolean;
    is_logged boolean;
    is_awaited boolean := false;
    awaited bigint := pg_sequence_last_value('pgqueue.awaited_seq');
    own text[] := case when awaited < 0 then pgqueue._own_queues('worker') end;
    done_ids bigint[];
    followed pgqueue._ended[];
begin
    if awaited <> 0 then
        is_awaited := pg_sequence_last_value('pgqueue._cell_awaited') > pgqueue._since_2020(moment);
    end if;
    is_configured := pg_relation_size('pgqueue.queue_keep_idx') > 8192;
    if is_configured then
        is_logged := pgqueue._log_kept(job_ids, tokens, results, moment);
    end if;
    with done as (
        delete from pgqueue.job as j
        where j.id = any (complete_many.job_ids)
            -- "Is true" keeps this a filter: as a join it might come first.
            and ((j.id, j.token) in (
                select h.id, h.token
                from unnest(complete_many.job_ids, complete_many.tokens) as h (id, token)
            )) is true
            and pgqueue._is_own(j.queue, own)
        returning
            j.id, j.token, j.attempt, j.run_at, j.claimed_at, j.queue, j.kind, j.worker, j.group_key, j.permits,
            (j.terms).batch_id,
            case
                when is_logged then 0
                when is_configured then (pgqueue._in_force(j.queue, j.kind, j.group_key)).keep_runs
                else 7
            end as keep_runs
    ), logged as (
        insert into pgqueue.run (
            slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker, result
        )
        select
            (today + d.keep_runs) % 16, d.attempt, d.id, moment,
            d.claimed_at - least(d.run_at, d.claimed_at), moment - d.claimed_at,
            d.queue, d.kind, 'completed', d.worker,
            given.result
        from done as d
        left join (
            select distinct on (h.id, h.token) h.*
            from unnest(
                case when complete_many.results is not null then complete_many.job_ids end,
                case when complete_many.results is not null then complete_many.tokens end,
                complete_many.results
            ) as h (id, token, result)
        ) as given on given.id = d.id and given.token = d.token
        where d.keep_runs > 0
    )
    select
        array_agg(d.id),
        array_agg(row(
            d.id, 'completed', d.queue, d.group_key, d.batch_id, d.permits, null, null, null
        )::pgqueue._ended) filter (
            where is_awaited or num_nonnulls(d.batch_id, d.permits) > 0
                -- A job that begins to wait for one just now leaves a loose end.
                or awaited >> (hashtext(d.queue) & 255) % 63 & 1 = 1
                    and (select true from pgqueue.dependency as t where t.job_id = d.id limit 1)
        )
    into done_ids, followed
    from done as d;
    if followed is not null then
        perform pgqueue._after_end(followed);
    end if;
    return query select unnest(done_ids);
end;
$$;

comment on function pgqueue.complete_many(bigint[], bigint[], jsonb[]) is
'Completes many jobs, with their results if there are any, and returns the ids
of those whose lease was held; the others were lost, and stay as they are.
Raises 25001 outside READ COMMITTED, 22023 (arrays of unequal length).';

create or replace function pgqueue.fail(
    job_id bigint,
    token bigint,
    error text,
    retry_in interval default null,
    permanent boolean default false
)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_isolation(), pgqueue._check_delay('retry_in', retry_in)
    ));
    moment timestamptz := clock_timestamp();
    picks tid[] := pgqueue._lock_held(array[job_id], array[token]);
begin
    if picks = '{}' then
        refused := pgqueue._refuse(pgqueue._lost(job_id, token));
    end if;
    return (
        select e.status
        from pgqueue._end_attempts(
            picks, array[case when permanent then 'reject' else 'fail' end], array[error],
            array[moment + retry_in], moment
        ) as e
    );
end;
$$;

comment on function pgqueue.fail(bigint, bigint, text, interval, boolean) is
'Ends an attempt that went wrong. Returns retry (the job runs again after
retry_in, or after the queue''s backoff: least(retry_cap, retry_base *
2^(attempt - 1)) times a random 0.5 to 1), dead (attempts used up, or
permanent) or cancelled (an operator cancelled it). Keeps the first 8000
characters of the error; its first line is its summary ("TimeoutError: ..."),
used to find and log it.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad
argument).';

create or replace function pgqueue.release(
    job_ids bigint[],
    tokens bigint[],
    run_at timestamptz default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(job_ids, tokens),
        case when run_at is not null then pgqueue._check_ranges(run_at => run_at) end
    ));
    picks tid[];
begin
    picks := pgqueue._lock_held(job_ids, tokens);
    return query
    select e.job_id
    from pgqueue._end_attempts(
        picks, array_fill('release'::text, array[cardinality(picks)]), null,
        array_fill(release.run_at, array[cardinality(picks)]), clock_timestamp()
    ) as e;
end;
$$;

comment on function pgqueue.release(bigint[], bigint[], timestamptz) is
'Gives jobs back: the attempt is not counted, and each keeps its place in its
lane, or runs again at run_at (a snooze). A cancelled job is gone. Returns the
ids whose lease was held.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

-- Parses results in JSON, and says for each that Postgres cannot store what is wrong with it.
create or replace function pgqueue._to_results(texts text[], out results jsonb[], out problems text[])
    language plpgsql
as $$
begin
    -- Postgres cannot hold much more than this in one jsonb, and several of them not in one array.
    problems := array(
        select case when octet_length(t.result) > 64000000
            then format('the result has %s bytes of at most 64000000', octet_length(t.result))
        end
        from unnest(texts) with ordinality as t (result, place)
        order by t.place
    );
    begin
        results := array(
            select case when t.problem is null then t.result::jsonb end
            from unnest(texts, problems) with ordinality as t (result, problem, place)
            order by t.place
        );
    exception when data_exception or program_limit_exceeded then
        -- One by one, so that a bad one does not affect the others.
        results := array_fill(null::jsonb, array[cardinality(texts)]);
        for place in 1 .. cardinality(texts) loop
            begin
                if problems[place] is null then
                    results[place] := texts[place]::jsonb;
                end if;
            exception when data_exception or program_limit_exceeded then
                problems[place] := 'the result cannot be stored: ' || sqlerrm;
            end;
        end loop;
    end;
end;
$$;

-- finish, for those whose lease is held, in any order.
create or replace function pgqueue._finish_each(
    job_ids bigint[], tokens bigint[], outcomes text[], texts text[], delays interval[]
)
    returns table (job_id bigint, token bigint, status text)
    language plpgsql
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    picks tid[] := pgqueue._lock_held(job_ids, tokens);
    results jsonb[];
    problems text[];
    given record;
begin
    select r.results, r.problems into results, problems
    from pgqueue._to_results(array(
        select case when e.outcome = 'complete' then e.said end
        from unnest(outcomes, texts) with ordinality as e (outcome, said, place)
        order by e.place
    )) as r;

    for given in
        select
            e.outcome = 'complete' as is_done,
            array_agg(h.id) as ids,
            array_agg(e.token) as tokens,
            array_agg(h.place) as picks,
            array_agg(e.outcome) as outcomes,
            array_agg(e.said) as texts,
            array_agg(moment + e.delay) as run_ats,
            array_agg(e.result) as results
        from (
            select distinct on (u.id, u.token)
                u.id, u.token, u.delay, u.result, coalesce(u.problem, u.said) as said,
                case when u.problem is null then u.outcome else 'fail' end as outcome
            from unnest(job_ids, tokens, outcomes, texts, delays, results, problems) with ordinality
                as u (id, token, outcome, said, delay, result, problem, place)
            order by u.id, u.token, u.place
        ) as e
        join (
            select j.id, j.token, j.ctid as place from pgqueue.job as j where j.ctid = any (picks)
        ) as h on h.id = e.id and h.token = e.token
        group by 1
    loop
        if given.is_done then
            return query
            select c.id, given.tokens[array_position(given.ids, c.id)], 'completed'
            from pgqueue.complete_many(given.ids, given.tokens, given.results) as c (id);
        else
            return query
            select e.job_id, given.tokens[array_position(given.ids, e.job_id)], e.status
            from pgqueue._end_attempts(given.picks, given.outcomes, given.texts, given.run_ats, moment) as e;
        end if;
    end loop;
end;
$$;

create or replace function pgqueue.finish(
    job_ids bigint[],
    tokens bigint[],
    outcomes text[],
    texts text[] default null,
    delays interval[] default null
)
    returns table (job_id bigint, status text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(finish.job_ids, tokens),
        pgqueue._check_outcomes(finish.job_ids, outcomes, texts, delays)
    ));
    ended bigint[];
    held bigint[];
    statuses text[];
begin
    if 'complete' = all (outcomes) and coalesce(num_nonnulls(variadic texts), 0) = 0
        -- Of a job under two tokens one is lost, and complete_many does not say which.
        and cardinality(finish.job_ids) = (select count(distinct u.id) from unnest(finish.job_ids) as u (id))
    then
        ended := array(select pgqueue.complete_many(finish.job_ids, finish.tokens));
        statuses := array_fill('completed'::text, array[cardinality(ended)]);
    else
        select array_agg(f.job_id), array_agg(f.token), array_agg(f.status) into ended, held, statuses
        from pgqueue._finish_each(finish.job_ids, finish.tokens, outcomes, texts, delays) as f;
    end if;
    return query
    select g.id, case when g.nth = 1 then coalesce(e.status, 'lost') else 'lost' end
    from (
        select u.id, u.token, u.place, row_number() over (partition by u.id, u.token order by u.place) as nth
        from unnest(finish.job_ids, finish.tokens) with ordinality as u (id, token, place)
    ) as g
    left join unnest(ended, held, statuses) as e (id, token, status) on e.id = g.id and coalesce(e.token, g.token) = g.token
    order by g.place;
end;
$$;

comment on function pgqueue.finish(bigint[], bigint[], text[], text[], interval[]) is
'Ends many attempts in one call, each by its own outcome: complete (text: the
result in JSON), fail (text: the error; delay: instead of the queue''s
backoff), reject (a permanent error: dead at once) or release (given back
uncounted; text: the reason, for why(); delay: not before then). Returns in
the order of the input completed, retry, dead, cancelled, released or lost. A
result that is not JSON, or above 64 MB, fails the attempt of that job alone.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';
-- Jobs that wait for others to end: those that were enqueued with "after".
--
-- Each wait is a row in dependency, a tie, and the ties are the whole truth: a job is blocked as long as it
-- has one, and a tie to a job that has ended is work left to do. How that job ended is seen from where it
-- is: in dead_job, in gone, or nowhere, which means that it completed.
--
-- The end of a job cuts its ties, up to a few hundred, and there is no counter that all write: for each waiting
-- job it checks whether another one holds that up.
--   - One that nobody has touched since it was written (xmax): it ends later, and its end will check. So this
--     tie is cut.
--   - None: the wait is over. Whoever gets a lock on the job's row frees it, with its last ties.
--   - Only ones that others are just deleting, or writing: perhaps those have checked before, and have seen
--     ours. So this tie stays.
-- A tie also stays if there are too many for one call, if another session has locked the job, if the end has an
-- old snapshot (REPEATABLE READ), or if it did not see a job that was just being enqueued after it. Nothing
-- here waits for anything: a later look finds such ties.
--
-- Claims, rests and maintain look, a bounded number at a time. A row in loose_end says where to look first;
-- it is a hint, and may be lost: the sweep finds all ties and batches in the order of the ids, from where the
-- last one stopped. The check at the end of a job is a hint, too: it saves the time until the sweep gets there.
-- (See pgqueue.lose_hints in module ticket.)
--
-- A claim locks a job first, and leaves the new version with an xmax that equals its xmin.

-- Makes others look soon, once this has committed, at the ties of jobs that have ended (ended), or may have
-- ended while another was enqueued after them (new, less urgent), or at batches (batch). A hint: the sweep gets
-- there as well.
create or replace function pgqueue._leave_loose_ends(ids bigint[], what text, delay interval default '0')
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp() + delay;
begin
    if pgqueue._is_lost() then
        return;
    end if;
    insert into pgqueue.loose_end (look_at, id, what)
    select moment, i.id, _leave_loose_ends.what from unnest(ids) as i (id);
    perform setval('pgqueue._cell_due', least(
        pg_sequence_last_value('pgqueue._cell_due'), pgqueue._since_2020(moment)
    ));
end;
$$;

-- Whether waiting jobs have one left to wait for that nobody is just writing or deleting; null if only one that
-- somebody is. Those that were seen to have ended do not count: they may have come back since.
create or replace function pgqueue._held_up(waiter_ids bigint[], ended bigint[])
    returns table (waiter_id bigint, is_held_up boolean)
    language plpgsql
    set enable_sort = off
as $$
declare
    -- From any place: at one end of the index there may be only dead entries.
    start int := ((random() - 0.5) * 4294967294)::int;
begin
    return query
    select w.id, case
        when (
            select true
            from (values (start, 2147483647), (-2147483648, start - 1)) as half (low, high)
            cross join lateral (
                select true
                from pgqueue.dependency as d
                join pgqueue.job as j on j.id = d.job_id
                where d.waiter_id = w.id and hashint8(d.job_id) between half.low and half.high
                    and j.xmax in ('0'::xid, j.xmin) and j.id <> all (ended)
                limit 1
            ) as held
            limit 1
        ) then true
        when l.id is null then false
        when pgqueue._is_left_alone(l.id) then true
    end
    -- "exists" would hash all of them.
    from unnest(waiter_ids) as w (id)
    left join lateral (
        select j.id
        from pgqueue.dependency as d
        join pgqueue.job as j on j.id = d.job_id
        where d.waiter_id = w.id and j.id <> all (ended)
        limit 1
    ) as l on true;
end;
$$;

-- Frees locked jobs whose wait is over: they may run from their run_at on.
create or replace function pgqueue._free(job_ids bigint[])
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    freed record;
begin
    with back as (
        update pgqueue.job as j
        set run_at = coalesce(
                (j.terms).run_at,
                moment - (cardinality(job_ids) - array_position(job_ids, j.id)) * interval '1 microsecond'
            ),
            terms = row((j.terms).expires_at, null, (j.terms).batch_id)
        where j.id = any (job_ids)
        returning j.queue, j.priority, j.group_key, j.run_at
    )
    select
        array_agg(b.queue) as queues, array_agg(b.priority) as priorities, array_agg(b.group_key) as keys,
        array_agg(b.run_at) as run_ats
    into freed
    from back as b;
    perform pgqueue._reopened(freed.queues, freed.priorities, freed.keys, freed.run_ats);
end;
$$;

-- How jobs have ended: completed, dead or cancelled (or purged, or discarded); null for one that waits or
-- runs. If nothing is known, it has completed.
create or replace function pgqueue._outcomes_of(job_ids bigint[])
    returns table (id bigint, outcome text)
    language plpgsql
as $$
begin
    -- In one statement, or a job redriven meanwhile would be nowhere.
    return query
    select u.id, case
        when (select true from pgqueue.job as j where j.id = u.id) then null
        when (select true from pgqueue.dead_job as d where d.id = u.id) then 'dead'
        when (
            select true
            from pgqueue.gone as g
            where g.part = u.id >> 6 and g.ids >> (u.id & 63)::int & 1 = 1
            limit 1
        ) then 'cancelled'
        else 'completed'
    end
    from unnest(job_ids) as u (id);
end;
$$;

-- Cancels the jobs that wait, by these ties, for a job that did not complete, unless another session has
-- them locked, and returns their ids.
create or replace function pgqueue._doom(hand pgqueue._tie[], is_all boolean, ended bigint[], outcomes text[])
    returns bigint[]
    language plpgsql
    -- An index scan locks them in the order of their ids.
    set enable_sort = off
as $$
declare
    doomed bigint[] := array(select distinct h.waiter_id from unnest(hand) as h where h.is_doomed);
    locked bigint[];
    given record;
begin
    if doomed = '{}' then
        return doomed;
    end if;
    locked := array(
        select j.id
        from pgqueue.job as j
        where j.id = any (doomed) and j.run_at = 'infinity'
        order by j.id
        for update skip locked
    );
    is_all := is_all and cardinality(locked) = cardinality(doomed);
    select
        array_agg(j.id) as ids, array_agg(j.ctid) as picks, array_agg(w.reason) as reasons,
        array_agg('cancelled'::text) as outcomes
    into given
    from (
        select h.waiter_id, min(format(
            'job %s, which it waited for, %s', h.job_id,
            case e.outcome when 'dead' then 'is dead' else 'was cancelled' end
        )) as reason
        from unnest(hand) as h
        left join unnest(ended, outcomes) as e (id, outcome) on e.id = h.job_id
        -- A job further down the chain may have lost its reason.
        where h.is_doomed and h.waiter_id = any (locked) and (is_all or h.is_first)
        group by h.waiter_id
    ) as w
    join pgqueue.job as j on j.id = w.waiter_id;
    if given.picks is null then
        return '{}'::bigint[];
    end if;
    perform pgqueue._end(given.picks, given.outcomes, given.reasons, null, clock_timestamp(), true);
    return given.ids;
end;
$$;

-- Cuts at most this many ties of jobs that have ended: frees those whose wait is over, and cancels those
-- that will not run without them, a chain at once. Returns how many. is_choosy passes over those that
-- others may have locked. The end of a job gives no number: 200, and only as a hint.
create or replace function pgqueue._cut_ties(job_ids bigint[], most int default null, is_choosy boolean default false)
    returns int
    language plpgsql
    set jit = off
    set enable_bitmapscan = off
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    tied bigint[];
    ended bigint[];
    outcomes text[];
    found pgqueue._tie[];
    hand pgqueue._tie[];
    doomed bigint[];
    cancelled bigint[];
    held bigint[];
    alone bigint[];
    others bigint[];
    cut int;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        -- An old snapshot does not show who waits.
        perform pgqueue._leave_loose_ends(job_ids, 'ended');
        return 0;
    end if;
    tied := array(
        select distinct u.id
        from unnest(job_ids) as u (id)
        where (select true from pgqueue.dependency as d where d.job_id = u.id limit 1)
    );
    if tied = '{}' or most is null and pgqueue._is_lost() then
        return 0;
    end if;
    most := coalesce(most, 200);
    select array_agg(o.id), array_agg(o.outcome)
    into ended, outcomes
    from pgqueue._outcomes_of(tied[:most]) as o
    where o.outcome is not null;
    if cardinality(tied) > most then
        perform pgqueue._leave_loose_ends(tied[most + 1 :], 'ended');
    end if;
    if ended is null then
        return 0;
    end if;

    -- Jobs that wait for one to be cancelled here are cancelled, too: a whole chain in one go.
    found := array(
        with recursive chain (job_id, waiter_id, is_doomed, is_first) as (
            select d.job_id, d.waiter_id, e.outcome <> 'completed' and not d.runs_if_dead, true
            from unnest(ended, outcomes) as e (id, outcome)
            join pgqueue.dependency as d on d.job_id = e.id
            where not is_choosy or (
                select j.xmax in ('0'::xid, j.xmin) from pgqueue.job as j where j.id = d.waiter_id
            ) is not false
            union
            select d.job_id, d.waiter_id, not d.runs_if_dead, false
            from chain as t
            join pgqueue.dependency as d on d.job_id = t.waiter_id
            where t.is_doomed
        )
        select row(null, t.*)::pgqueue._tie from chain as t limit most
    );
    hand := array(
        select row(d.ctid, f.job_id, f.waiter_id, f.is_doomed, f.is_first)::pgqueue._tie
        from unnest(found) as f
        join pgqueue.dependency as d on d.job_id = f.job_id and d.waiter_id = f.waiter_id
        for update of d skip locked
    );
    doomed := array(select h.waiter_id from unnest(hand) as h where h.is_doomed);
    cancelled := pgqueue._doom(hand, cardinality(hand) = cardinality(found), ended, outcomes);
    hand := array(select h from unnest(hand) as h where h.is_first or h.job_id = any (cancelled));

    select array_agg(w.waiter_id) filter (where w.is_held_up), array_agg(w.waiter_id) filter (where not w.is_held_up)
    into held, alone
    from pgqueue._held_up(array(
        select distinct h.waiter_id from unnest(hand) as h where h.waiter_id <> all (doomed)
    ), ended) as w;
    if alone is not null then
        alone := array(
            select j.id
            from pgqueue.job as j
            where j.id = any (alone) and j.run_at = 'infinity'
            order by j.id
            for update skip locked
        );
        -- The last tie stays for another look, if it is not ours.
        select
            array_agg(w.id order by w.id) filter (where w.is_free),
            held || array_agg(w.id) filter (where w.other is not null),
            array_agg(w.other) filter (where w.other is not null)
        into alone, held, others
        from (
            select u.id, n.other, (
                select true
                from pgqueue.dependency as d
                where d.waiter_id = u.id and d.ctid <> all (array(select h.place from unnest(hand) as h))
                limit 1
            ) is not true as is_free
            from unnest(alone) as u (id)
            left join lateral (
                select d.job_id as other
                from pgqueue.dependency as d
                where d.waiter_id = u.id and d.ctid <> all (array(select h.place from unnest(hand) as h))
                limit 1
                for update skip locked
            ) as n on true
        ) as w;
        if alone is not null then
            perform pgqueue._free(alone);
        end if;
    end if;

    delete from pgqueue.dependency as d
    where d.ctid = any (array(
        select h.place
        from unnest(hand) as h
        where h.waiter_id = any (held)
            or (select j.run_at = 'infinity' from pgqueue.job as j where j.id = h.waiter_id) is not true
    ));
    get diagnostics cut = row_count;
    -- Another session has locked most of those that came first.
    if cardinality(found) = most and cut < most / 2 and not is_choosy then
        return cut + pgqueue._cut_ties(ended, most, true);
    end if;
    perform pgqueue._leave_loose_ends(array_agg(r.id), 'ended', case
        when cut > 0 and cardinality(found) = most or others is not null then interval '0'
        else interval '200 milliseconds'
    end)
    from (select distinct u.id from unnest(ended || cancelled || others) as u (id)) as r
    where (select true from pgqueue.dependency as d where d.job_id = r.id limit 1)
    having count(*) > 0;
    return cut;
end;
$$;

-- Makes a new job wait for others. One that has already ended counts as it ended.
create or replace function pgqueue._wait_for(job_id bigint, after bigint[], if_dead text)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    is_current boolean := current_setting('transaction_isolation') = 'read committed';
    living bigint[];
    reason text;
begin
    perform pgqueue._look_from_now_on();
    -- An old snapshot does not show what has ended.
    select
        array_agg(distinct o.id) filter (where o.outcome is null or not is_current),
        min(format(
            'job %s, which it waited for, %s', o.id,
            case o.outcome when 'dead' then 'is dead' else 'was cancelled' end
        )) filter (where o.outcome <> 'completed' and is_current)
    into living, reason
    from pgqueue._outcomes_of(after) as o;
    if reason is not null and if_dead is distinct from 'run' then
        perform pgqueue._end(
            array(select j.ctid from pgqueue.job as j where j.id = job_id), array['cancelled'], array[reason], null,
            clock_timestamp()
        );
    elsif living is null then
        perform pgqueue._free(array[job_id]);
    else
        -- One that is not visible may be of any queue.
        perform pgqueue._mark(bit_or(coalesce((
            select pgqueue._settings_bits(j.queue) from pgqueue.job as j where j.id = l.id
        ), pgqueue._settings_bits(''))), 'pgqueue.awaited_seq')
        from unnest(living) as l (id);
        insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
        select l.id, _wait_for.job_id, coalesce(if_dead = 'run', false)
        from unnest(living) as l (id);
        -- If one of them ends meanwhile, its end does not see this. Nobody can end those of this transaction.
        perform pgqueue._leave_loose_ends(array_agg(l.id), 'new', interval '1 second')
        from unnest(living) as l (id)
        where (
            select j.xmin = pg_current_xact_id()::xid from pgqueue.job as j where j.id = l.id
        ) is not true
        having count(*) > 0;
    end if;
end;
$$;
-- Batches: a callback job once all jobs of a batch have ended.
--
-- A job knows its batch (terms), and a row in tally says among which ids a batch has jobs. No row is
-- written when a job completes: its end only checks whether the batch has another.
--   - One that nobody has touched since it was written (xmax): it ends later, and its end will check.
--   - None: the batch is over.
--   - Only ones that others are just deleting, or writing: perhaps those have checked before, and have seen
--     ours. Then nobody would notice, so it leaves a loose end, as in module depend.
-- So the end that checks last either finishes the batch or leaves a loose end. The end of a job of a batch
-- that it sees open need not check: close_batch leaves a loose end, which is visible once it commits.
-- As in module depend these are hints, and the sweep looks at every batch that is closed but not finished.
--
-- A batch is closed when nobody will add jobs from outside; its jobs may add others while they run. Adding
-- one takes a shared lock on the row of the batch, and finishing it an exclusive one, or else leaves a loose
-- end: so no job is added to a finished batch.

-- The last job of a batch below an id that nobody is just writing or deleting; null if there is none, and
-- another, if there is one, is in touched.
create or replace function pgqueue._last_job(batch_id bigint, below bigint, out id bigint, out touched bigint)
    language plpgsql
    set enable_sort = off
    set enable_bitmapscan = off
as $$
declare
    next_part bigint := (below - 1) >> 10;
    first_id bigint;
    last_id bigint;
begin
    loop
        next_part := (
            select max(t.part)
            from pgqueue.tally as t
            where t.batch_id = _last_job.batch_id and t.part <= next_part
        );
        exit when next_part is null;
        first_id := next_part << 10;
        last_id := least(first_id + 1023, below - 1);
        select j.id into id
        from pgqueue.job as j
        where j.id between first_id and last_id and (j.terms).batch_id = _last_job.batch_id
            and j.xmax in ('0'::xid, j.xmin)
        order by j.id desc
        limit 1;
        exit when found;
        touched := coalesce(touched, (
            select j.id
            from pgqueue.job as j
            where j.id between first_id and last_id and (j.terms).batch_id = _last_job.batch_id
            limit 1
        ));
        next_part := next_part - 1;
    end loop;
end;
$$;

-- Whether a batch has no waiting or running job left; null if only some that others are perhaps just
-- ending.
create or replace function pgqueue._is_batch_over(batch_id bigint)
    returns boolean
    language plpgsql
as $$
declare
    cell regclass := ('pgqueue._cell_batch_' || abs(batch_id % 5))::regclass;
    found_before bigint := pg_sequence_last_value(cell);
    is_untouched boolean;
    last record;
begin
    -- Most still have the job that the last look found.
    select j.xmax in ('0'::xid, j.xmin) into is_untouched
    from pgqueue.job as j
    where j.id = found_before and (j.terms).batch_id = _is_batch_over.batch_id;
    if is_untouched or found and pgqueue._is_left_alone(found_before) then
        return false;
    end if;
    -- On from there, because above it there may be only dead entries of the index.
    select l.* into last from pgqueue._last_job(batch_id, found_before) as l;
    if last.id is null then
        select l.* into last from pgqueue._last_job(batch_id, 9223372036854775807) as l;
    end if;
    if last.id is null and pgqueue._is_left_alone(last.touched) then
        last.id := last.touched;
    end if;
    if last.id is not null then
        perform setval(cell, last.id);
        return false;
    end if;
    return case when last.touched is null then true end;
end;
$$;

-- Looks at batches, and finishes those that are closed and over.
create or replace function pgqueue._look_at_batches(batch_ids bigint[])
    returns void
    language plpgsql
    set jit = off
as $$
declare
    looked_at bigint[] := array(
        select distinct b.id from unnest(batch_ids) as b (id) where b.id is not null order by b.id
    );
    batch_id bigint;
    is_over boolean;
begin
    -- An old snapshot does not show whether they have been closed.
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._leave_loose_ends(looked_at, 'batch');
        return;
    end if;
    foreach batch_id in array looked_at loop
        continue when (
            select b.closed_at is null or b.finished_at is not null from pgqueue.batch as b where b.id = batch_id
        ) is not false;
        is_over := pgqueue._is_batch_over(batch_id);
        if is_over then
            is_over := pgqueue._finish_batch(batch_id);
        end if;
        if is_over is null then
            perform pgqueue._leave_loose_ends(array[batch_id], 'batch', interval '200 milliseconds');
        end if;
    end loop;
end;
$$;

-- Counts, for their batches, the jobs that died or were cancelled and that this transaction has deleted.
-- Plans as _after_end sets it.
create or replace function pgqueue._count_ends(ended pgqueue._ended[])
    returns void
    language plpgsql
as $$
begin
    insert into pgqueue.tally (batch_id, dead, cancelled)
    select
        e.batch_id, count(*) filter (where e.outcome = 'dead'), count(*) filter (where e.outcome = 'cancelled')
    from unnest(ended) as e
    where e.outcome in ('dead', 'cancelled') and e.batch_id is not null
        and (select true from pgqueue.batch as b where b.id = e.batch_id and b.finished_at is null)
    group by e.batch_id;
end;
$$;

create or replace function pgqueue.create_batch(
    queue text,
    payload jsonb default '{}',
    kind text default null,
    priority int default null,
    max_attempts int default null,
    headers jsonb default null,
    group_key text default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_job(queue, kind, priority, null, max_attempts, null, null, group_key, headers),
        pgqueue._check_access('producer', array[queue]),
        case when jsonb_typeof(payload) <> 'object' then array[
            'the payload of a batch must be a JSON object', format('It is a JSON %s.', jsonb_typeof(payload)),
            'The callback gets it with the counts of the batch added, under the key batch.'
        ] end,
        -- With the longest possible counts.
        pgqueue._check_payload(
            coalesce(payload, '{}') || '{"batch": {
                "id": 9223372036854775807, "completed": 9223372036854775807, "dead": 9223372036854775807,
                "cancelled": 9223372036854775807
            }}',
            (pgqueue._in_force(queue, coalesce(kind, queue), group_key)).max_payload_bytes
        )
    ));
    batch_id bigint := nextval('pgqueue.job_id_seq');
begin
    perform pgqueue._look_from_now_on();
    insert into pgqueue.batch as b (
        id, created_at, priority, max_attempts, queue, kind, group_key, payload, headers
    )
    values (
        batch_id, clock_timestamp(), create_batch.priority, create_batch.max_attempts,
        create_batch.queue, create_batch.kind, create_batch.group_key,
        coalesce(create_batch.payload, '{}'), create_batch.headers
    );
    return batch_id;
end;
$$;

comment on function pgqueue.create_batch(text, jsonb, text, int, int, jsonb, text) is
'Creates a batch and returns its id, for enqueue(..., batch_id => ...). Once
close_batch has been called, and all jobs of the batch have completed, died or
been cancelled, its callback is enqueued, once: a job with this queue, payload,
kind, priority, max_attempts, headers and group_key. Its payload has one more
key, batch:
{"id", "completed", "dead", "cancelled"}. A callback that cannot be enqueued
then becomes a dead job.
Raises 22023 (bad argument), 54000 (payload too large, with that key),
42501 (the caller is a producer of other queues only).';

create or replace function pgqueue.close_batch(batch_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    own text[] := pgqueue._own_queues('producer');
    is_alone boolean := false;
    refused boolean;
begin
    if current_setting('transaction_isolation') = 'read committed' and pgqueue._is_batch_over(batch_id) then
        -- From the version that all see: otherwise a session that joins might wait for the next one and, if that
        -- is rolled back, and made anew, get this one.
        perform from pgqueue.batch as b where b.id = close_batch.batch_id for update skip locked;
        is_alone := found;
    end if;
    update pgqueue.batch as b
    set closed_at = coalesce(b.closed_at, clock_timestamp())
    where b.id = close_batch.batch_id and pgqueue._is_own(b.queue, own);
    refused := pgqueue._refuse(case when not found then pgqueue._not_found('batch', batch_id) end);
    perform pgqueue._leave_loose_ends(array[batch_id], 'batch');
    if is_alone and not pgqueue._is_lost() then
        perform pgqueue._finish_batch(batch_id);
    end if;
end;
$$;

comment on function pgqueue.close_batch(bigint) is
'Declares that all jobs of a batch have been enqueued, except those that its own
jobs add: once they have ended, at once if there are none, its callback is
enqueued. Closing it again changes nothing.
Raises PQ001 (no such batch).';

-- Enqueues the callback of a closed batch, once, and returns whether it has no jobs left; null: it may have.
create or replace function pgqueue._finish_batch(batch_id bigint)
    returns boolean
    language plpgsql
as $$
declare
    batch pgqueue.batch;
    is_over boolean;
    counts record;
    payload jsonb;
    callback bigint;
    failure text;
    error text;
    moment timestamptz := clock_timestamp();
begin
    select b.* into batch from pgqueue.batch as b where b.id = _finish_batch.batch_id for update skip locked;
    -- Otherwise a job is just being added. Now none can be.
    is_over := case when batch.id is not null then pgqueue._is_batch_over(batch_id) end;
    if is_over is not true or batch.finished_at is not null then
        return is_over;
    end if;
    select
        coalesce(sum(t.jobs - t.dead - t.cancelled), 0) as completed,
        coalesce(sum(t.dead), 0) as dead, coalesce(sum(t.cancelled), 0) as cancelled
    into counts
    from pgqueue.tally as t
    where t.batch_id = batch.id;
    payload := batch.payload || jsonb_build_object('batch', jsonb_build_object(
        'id', batch.id, 'completed', counts.completed, 'dead', counts.dead, 'cancelled', counts.cancelled
    ));
    -- The end of a job must not fail because of it.
    begin
        callback := pgqueue._enqueue_again(
            batch.queue, payload, batch.kind, batch.priority, batch.max_attempts, batch.group_key, batch.headers
        );
    exception when program_limit_exceeded or data_exception or integrity_constraint_violation then
        get stacked diagnostics failure = message_text;
        error := 'the callback could not be enqueued: ' || failure;
        -- A dead job, then.
        insert into pgqueue.dead_job as d (
            id, died_at, enqueued_at, run_at, priority, attempt, max_attempts,
            queue, kind, group_key, error, payload, headers, errors
        )
        values (
            nextval('pgqueue.job_id_seq'), moment, moment, moment, coalesce(batch.priority, 0), 0,
            coalesce(
                batch.max_attempts, (pgqueue._in_force(batch.queue, coalesce(batch.kind, batch.queue))).max_attempts
            ),
            batch.queue, coalesce(batch.kind, batch.queue), batch.group_key, error, payload, batch.headers,
            jsonb_build_array(jsonb_build_object('attempt', 0, 'at', moment, 'worker', null, 'error', error))
        )
        returning d.id into callback;
    end;
    update pgqueue.batch as b
    set finished_at = clock_timestamp(), callback_id = callback, problem = failure,
        completed = counts.completed, dead = counts.dead, cancelled = counts.cancelled
    where b.id = batch.id;
    delete from pgqueue.tally as t where t.batch_id = batch.id;
    return true;
end;
$$;

-- For each redriven job, its batch, if it has one: it is part of that again, if that has not finished, and no
-- longer counts as dead.
create or replace function pgqueue._rejoin_batches(batch_ids bigint[])
    returns void
    language plpgsql
as $$
begin
    -- Now none of them finishes.
    perform from pgqueue.batch as b where b.id = any (batch_ids) order by b.id for key share;
    insert into pgqueue.tally (batch_id, dead)
    select u.id, -count(*)
    from unnest(batch_ids) as u (id)
    where (select b.finished_at is null from pgqueue.batch as b where b.id = u.id)
    group by u.id;
end;
$$;
-- The sweep: looks again at jobs that wait for others, and at batches, first where a loose end says that there
-- is something to do. Modules depend and batch say what leaves one.

-- Continues through the ids of jobs that have ties and of batches, at most this many: finds whatever no
-- loose end pointed to.
create or replace function pgqueue._sweep(most int)
    returns int
    language plpgsql
as $$
declare
    start bigint := coalesce(pg_sequence_last_value('pgqueue._cell_swept'), 0);
    ids bigint[];
begin
    ids := array(
        with recursive swept (id) as (
            values (start)
            union all
            select least((
                select d.job_id from pgqueue.dependency as d where d.job_id > s.id order by d.job_id limit 1
            ), (
                select b.id
                from pgqueue.batch as b
                where b.finished_at is null and b.id > s.id
                order by b.id
                limit 1
            ))
            from swept as s
            where s.id is not null
        )
        select s.id from swept as s where s.id > start limit most
    );
    if start > 0 or ids <> '{}' then
        perform setval('pgqueue._cell_swept', case when cardinality(ids) = most then ids[most] else 0 end);
    end if;
    perform pgqueue._look_at_batches(array(
        select u.id from unnest(ids) as u (id)
        where (select b.closed_at is not null from pgqueue.batch as b where b.id = u.id)
    ));
    return pgqueue._cut_ties(ids, most);
end;
$$;

-- Looks at the loose ends that are due by then, the urgent ones first, and cuts ties, at most this many
-- of each; with less to do it continues the sweep. Returns how many looks and ties.
create or replace function pgqueue._tie_loose_ends(most int, until timestamptz default 'infinity')
    returns bigint
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_indexscan = on
    set enable_bitmapscan = off
    set enable_tidscan = on
    set enable_seqscan = off
    set enable_sort = off
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    picked record;
    done bigint := 0;
begin
    if pg_relation_size('pgqueue.loose_end') > 0 then
        with dropped as (
            delete from pgqueue.loose_end as l
            where l.ctid = any (array(
                select p.ctid
                from pgqueue.loose_end as p
                where p.look_at <= until
                order by p.what = 'new', p.look_at
                limit most
                for update skip locked
            ))
            returning l.id, l.what
        )
        select
            array_agg(distinct d.id) filter (where d.what <> 'batch') as jobs,
            array_agg(distinct d.id) filter (where d.what = 'new') as recent,
            array_agg(distinct d.id) filter (where d.what = 'batch') as batches,
            count(*) as ends
        into picked
        from dropped as d;
        done := picked.ends;
        -- Whoever is perhaps just ending one may not see who waits for it.
        perform pgqueue._leave_loose_ends(array_agg(u.id), 'new', interval '200 milliseconds')
        from unnest(picked.recent) as u (id)
        where case when (
            select j.xmax not in ('0'::xid, j.xmin) from pgqueue.job as j where j.id = u.id
        ) then not pgqueue._is_left_alone(u.id) end
        having count(*) > 0;
        if picked.jobs is not null then
            done := done + pgqueue._cut_ties(picked.jobs, most);
        end if;
        if picked.batches is not null then
            perform pgqueue._look_at_batches(picked.batches);
        end if;
    end if;
    if done < most then
        done := done + pgqueue._sweep(most);
    end if;
    return done;
end;
$$;
-- Cron: what an expression such as "30 2 * * mon-fri" means, and when it is due next.
--
-- The fields are those of Debian's cron, and a sixth for seconds may follow: minute, hour, day of the month,
-- month, weekday, second. Where both days are restricted either is enough; a field that begins with *
-- restricts nothing, also with a step.
--
-- A slot is a local time. When the clocks go forward, the slots that they skip are due at the
-- moment of the change, as one. When they go back, a slot that occurs twice is due the first time. But
-- if every hour is listed the hours that really pass count: none is skipped or made up for, and
-- one that occurs twice counts twice.
--
-- No walk over minutes: the day is looked for in 41 years (a 29 February that must be a Sunday comes that
-- rarely), and the time of day only among those that can be the next.

-- What a field of a cron expression lists: *, numbers or names, ranges, steps, separated by commas; null
-- if it cannot be parsed.
create or replace function pgqueue._cron_values(field text, low int, high int, names text[])
    returns int[]
    language plpgsql
    immutable
as $$
declare
    listed int[] := '{}'::int[];
    part text[];
    first int;
    last int;
begin
    for part in
        select regexp_match(
            p.part, '^(?:([*])|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,3}))?$'
        )
        from regexp_split_to_table(lower(field collate "C"), ',') as p (part)
    loop
        -- The first name stands for low.
        first := case when part[2] ~ '[0-9]' then part[2]::int else array_position(names, part[2]) + low - 1 end;
        last := case when part[3] ~ '[0-9]' then part[3]::int else array_position(names, part[3]) + low - 1 end;
        if part[1] is not null then
            first := low;
            last := high;
        elsif part[3] is null then
            last := case when part[4] is null then first else high end;
        elsif part[3] = 'sun' and first > 0 then
            last := 7;
        end if;
        if (first between low and last and last <= high and coalesce(part[4]::int, 1) > 0) is not true then
            return null;
        end if;
        listed := listed || array(select generate_series(first, last, coalesce(part[4]::int, 1)));
    end loop;
    return array(select distinct v.value from unnest(listed) as v (value) order by 1);
end;
$$;

-- The fields of a cron expression, or of what @daily and the like stand for.
create or replace function pgqueue._cron_fields(cron text)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return string_to_array(
        coalesce(
            '{
                "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
                "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *"
            }'::jsonb ->> lower(btrim(cron, E' \t') collate "C"),
            regexp_replace(btrim(cron, E' \t'), '[ \t]+', ' ', 'g')
        ),
        ' '
    );
end;
$$;

-- What a cron expression lists, field by field; null if one cannot be parsed.
create or replace function pgqueue._read_cron(cron text)
    returns pgqueue._cron
    language plpgsql
    immutable
as $$
declare
    fields text[] := pgqueue._cron_fields(cron);
begin
    return row(
        pgqueue._cron_values(coalesce(fields[6], '0'), 0, 59, null),
        pgqueue._cron_values(fields[1], 0, 59, null),
        pgqueue._cron_values(fields[2], 0, 23, null),
        pgqueue._cron_values(fields[3], 1, 31, null),
        pgqueue._cron_values(
            fields[4], 1, 12, '{jan,feb,mar,apr,may,jun,jul,aug,sep,oct,nov,dec}'
        ),
        pgqueue._cron_values(fields[5], 0, 7, '{sun,mon,tue,wed,thu,fri,sat}'),
        fields[3] not like '*%' and fields[5] not like '*%'
    )::pgqueue._cron;
end;
$$;

-- Refuses a cron expression that cannot be parsed, or names only days such as 30 February.
create or replace function pgqueue._check_cron(cron text)
    returns text[]
    language plpgsql
    immutable
as $$
declare
    fields text[] := pgqueue._cron_fields(cron);
    listed pgqueue._cron := pgqueue._read_cron(cron);
    how_many int := coalesce(cardinality(fields), 0);
begin
    if how_many not between 5 and 6 or octet_length(cron) > 1000 then
        return array[
            'cron must have five fields, or six with the seconds',
            case
                when cron is null then 'It is null.'
                when octet_length(cron) > 1000 then format('It has %s bytes of at most 1000.', octet_length(cron))
                else format('"%s" has %s.', cron, how_many)
            end,
            'They are minute, hour, day of the month, month, weekday and second, as in ''30 2 * * mon-fri''; or write @daily.'
        ];
    end if;
    return coalesce((
        select array[
            format('the %s of cron cannot be read', f.name),
            format('"%s" is not made of %s.', f.field, f.range),
            'Write *, or numbers, ranges such as 1-5 and steps such as */10, separated by commas.'
        ]
        from (
            values
                ('minute', fields[1], '0 to 59', listed.minutes),
                ('hour', fields[2], '0 to 23', listed.hours),
                ('day of the month', fields[3], '1 to 31', listed.days),
                ('month', fields[4], '1 to 12 or jan to dec', listed.months),
                ('weekday', fields[5], '0 to 7 or sun to sat', listed.weekdays),
                ('second', fields[6], '0 to 59', listed.seconds)
        ) as f (name, field, range, listed)
        where f.listed is null
        limit 1
    ), case when pgqueue._local_slot_after(listed, '2000-01-01') is null then array[
        'cron names a day that never comes',
        format('"%s" asks for day %s of a month that has fewer.', cron, listed.days[1]),
        'The longest February has 29 days; April, June, September and November have 30.'
    ] end);
end;
$$;

-- Refuses what is not the full name of a time zone, since an offset or an abbreviation knows no clock
-- changes; null passes.
create or replace function pgqueue._check_timezone(timezone text)
    returns text[]
    language plpgsql
    stable
as $$
begin
    -- The view reads all zones from the disk, which takes a tenth of a second.
    return case when timezone <> 'UTC'
        and not exists (select from pgqueue.schedule as s where s.timezone = _check_timezone.timezone)
        and not exists (select from pg_timezone_names as z where z.name = _check_timezone.timezone)
    then array[
        'timezone must be the name of a time zone', format('"%s" is none.', timezone),
        'Write a name such as Europe/Berlin: select name from pg_timezone_names lists them.'
    ] end;
end;
$$;

-- The first slot of a cron expression after a local time, as local time; null after the year 9998.
create or replace function pgqueue._local_slot_after(cron pgqueue._cron, here timestamp)
    returns timestamp
    language plpgsql
    immutable
as $$
begin
    return (
        select d.day + t.time
        -- Made one by one, in order, until one is found.
        from (select here::date + generate_series(0, 14975) as day) as d
        cross join lateral (
            select date_part('day', d.day) = any (cron.days),
                -- Sunday is 0 and 7.
                array[date_part('dow', d.day), date_part('isodow', d.day)]::int[] && cron.weekdays
        ) as n (is_day, is_weekday)
        cross join lateral (
            -- Only in this hour any minute but the first can be the next, and only in this minute any second.
            select min(make_time(h.hour, m.minute, s.second))
            from unnest(cron.hours) as h (hour)
            cross join unnest(
                cron.minutes[: case when h.hour = date_part('hour', here) then 60 else 1 end]
            ) as m (minute)
            cross join unnest(
                cron.seconds[: case when m.minute = date_part('minute', here) then 60 else 1 end]
            ) as s (second)
            where d.day + make_time(h.hour, m.minute, s.second) > here
        ) as t (time)
        where t.time is not null and d.day < '9999-01-01' and date_part('month', d.day) = any (cron.months)
            and (n.is_day and n.is_weekday or cron.is_either and (n.is_day or n.is_weekday))
        limit 1
    );
end;
$$;

-- How far the clocks of a time zone are ahead of UTC at a moment.
create or replace function pgqueue._ahead_of_utc(moment timestamptz, timezone text)
    returns interval
    language plpgsql
    stable
as $$
begin
    return (moment at time zone timezone) - (moment at time zone 'UTC');
end;
$$;

-- When the clocks of a time zone change between two moments, at most a day apart; null if the offset is the
-- same at both.
create or replace function pgqueue._clock_change(timezone text, low timestamptz, high timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
declare
    before interval := pgqueue._ahead_of_utc(low, timezone);
    middle timestamptz;
begin
    if pgqueue._ahead_of_utc(high, timezone) = before then
        return null;
    end if;
    high := date_trunc('second', high);
    while low + interval '1 second' < high loop
        middle := date_trunc('second', low + (high - low) / 2);
        if pgqueue._ahead_of_utc(middle, timezone) = before then
            low := middle;
        else
            high := middle;
        end if;
    end loop;
    return high;
end;
$$;

-- The first slot of a cron expression after a moment; null after the year 9998.
create or replace function pgqueue._slot_after(cron pgqueue._cron, timezone text, after timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
declare
    is_hourly boolean := cardinality(cron.hours) = 24;
    start timestamptz := after;
    here timestamp := after at time zone timezone;
    local timestamp;
    change timestamptz;
    slot timestamptz;
begin
    if not is_hourly then
        -- What the clocks showed before they went back does not count again.
        change := pgqueue._clock_change(timezone, after - interval '24 hours', after);
        here := greatest(here, (change - interval '1 microsecond') at time zone timezone);
    end if;
    loop
        local := pgqueue._local_slot_after(cron, here);
        -- If the clocks do not change before.
        slot := (local - pgqueue._ahead_of_utc(start, timezone)) at time zone 'UTC';
        change := pgqueue._clock_change(timezone, start, start + interval '24 hours');
        if slot >= change then
            if is_hourly then
                here := (change at time zone timezone) - interval '1 microsecond';
            elsif local <= change at time zone timezone then
                -- They skip it.
                return change;
            end if;
            start := change;
        elsif slot > start + interval '24 hours' then
            -- Near it the offset may be another one.
            start := (local - interval '24 hours') at time zone timezone;
        else
            exit;
        end if;
    end loop;
    return slot;
end;
$$;

create or replace function pgqueue.next_slots(
    cron text, timezone text default 'UTC', after timestamptz default null, slots int default 1
)
    returns setof timestamptz
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_cron(cron), pgqueue._check_timezone(timezone),
        case
            when after not between '1970-01-01' and '9998-12-31' then array[
                'after must be between the years 1970 and 9998', format('It is %s.', after),
                'Omit it for the current time.'
            ]
            when slots not between 1 and 10000 then array[
                'slots must be 1 to 10000', format('It is %s.', slots),
                'Ask again after the last one.'
            ]
        end
    ));
    listed pgqueue._cron := pgqueue._read_cron(cron);
    slot timestamptz := coalesce(after, clock_timestamp());
begin
    for place in 1 .. coalesce(slots, 1) loop
        slot := pgqueue._slot_after(listed, coalesce(timezone, 'UTC'), slot);
        exit when slot is null;
        return next slot;
    end loop;
end;
$$;

comment on function pgqueue.next_slots(text, text, timestamptz, int) is
'The next slots of a cron expression after a moment (default: now), 1 to 10,000
of them: minute, hour, day of the month, month, weekday and, if there is a
sixth field, second, in a time zone. Numbers, names, *, ranges, steps and
lists; if both days are restricted either is enough; @yearly, @monthly,
@weekly, @daily, @hourly. A local time that the clocks skip is due when they
change, one that occurs twice the first time; if every hour is listed, every
hour that passes counts.
Raises 22023 (bad argument).';
-- Recurring jobs: a schedule has slots, by a cron expression or an interval, and each slot makes one job.
--
-- A slot is fired in one transaction: the job is enqueued, and the row of the schedule, locked, advances to
-- the next slot. So there is one job for it, whoever fires, and if that transaction rolls back the
-- slot is still due. No slot comes back when the clock is set back, because the row never goes back.
--
-- Slots are fired by maintain(), by rest() before it returns how long to sleep, and by claims. In the middle
-- of a longer transaction a claim leaves it to others for a second, because nobody could see the job
-- before that transaction ends. A claim pays for a look at one cell, which says when the next schedule
-- is due, but never more than a second ahead: whoever writes it cannot see a schedule that has not
-- been committed.

-- The first slot of a schedule after a moment; infinity after the year 9998.
create or replace function pgqueue._next_slot(schedule pgqueue.schedule, after timestamptz)
    returns timestamptz
    language plpgsql
    stable
as $$
begin
    return case when schedule.every is null
        then coalesce(
            pgqueue._slot_after(pgqueue._read_cron(schedule.cron), schedule.timezone, after), 'infinity'
        )
        -- From a Monday, so that weeks begin on Mondays.
        else date_bin(schedule.every, after, '1970-01-05 00:00 UTC') + schedule.every
    end;
end;
$$;

-- How late a schedule fires its slots: always the same for its name.
create or replace function pgqueue._share_of_jitter(name text, jitter interval)
    returns interval
    language plpgsql
    immutable
as $$
begin
    return coalesce(jitter, '0') * ((hashtext(name)::float8 + 2147483648) / 4294967296);
end;
$$;

-- The slots of a due schedule, from next_slot on, for which to make a job, as catch_up says: the last one,
-- unless (skip) it is more than two minutes late; or all, at most 1000.
create or replace function pgqueue._slots_to_fire(schedule pgqueue.schedule, upto timestamptz)
    returns timestamptz[]
    language plpgsql
    stable
as $$
declare
    slots timestamptz[] := '{}'::timestamptz[];
    last timestamptz := schedule.next_slot;
    high timestamptz := upto;
    middle timestamptz := schedule.next_slot;
    slot timestamptz;
begin
    if schedule.catch_up = 'all' then
        while last <= upto and cardinality(slots) < 1000 loop
            slots := slots || last;
            last := pgqueue._next_slot(schedule, last);
        end loop;
        return slots;
    end if;
    -- By bisection: is there another slot, and is there one in the later half?
    while high - last >= interval '1 second' loop
        slot := pgqueue._next_slot(schedule, middle);
        if slot <= upto then
            last := slot;
        else
            high := middle;
        end if;
        middle := last + (high - last) / 2;
    end loop;
    return case when schedule.catch_up = 'one' or last >= upto - interval '2 minutes' then array[last] else slots end;
end;
$$;

-- Enqueues the job of a slot.
create or replace function pgqueue._enqueue_slot(schedule pgqueue.schedule, slot timestamptz)
    returns bigint
    language plpgsql
as $$
begin
    return pgqueue._enqueue_again(
        schedule.queue, schedule.payload, schedule.kind, schedule.priority, schedule.max_attempts,
        schedule.group_key, coalesce(schedule.headers, '{}') || jsonb_build_object(
            'schedule', schedule.name,
            'slot', to_char(slot at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
        )
    );
end;
$$;

-- Enqueues the jobs of a locked, due schedule, and advances it to its next slot. Returns how many. If
-- enqueue refuses (the payload is now too large), that is recorded as its problem.
create or replace function pgqueue._fire(schedule pgqueue.schedule, moment timestamptz)
    returns int
    language plpgsql
as $$
declare
    delay interval := pgqueue._share_of_jitter(schedule.name, schedule.jitter);
    slots timestamptz[];
    slot timestamptz;
    following timestamptz;
    job_id bigint := schedule.last_job_id;
begin
    slots := pgqueue._slots_to_fire(schedule, moment - delay);
    foreach slot in array slots loop
        job_id := pgqueue._enqueue_slot(schedule, slot);
    end loop;
    following := pgqueue._next_slot(schedule, greatest(schedule.next_slot, moment - delay));
    update pgqueue.schedule as s
    set next_slot = following,
        due_at = following + delay,
        last_slot = coalesce(slots[cardinality(slots)], s.last_slot),
        last_job_id = job_id,
        problem = null
    where s.name = schedule.name;
    return cardinality(slots);
-- A schedule that cannot be fired must block neither the others nor the claim.
exception when data_exception or program_limit_exceeded then
    update pgqueue.schedule as s
    set due_at = moment + interval '1 minute', problem = sqlerrm
    where s.name = schedule.name;
    return 0;
end;
$$;

-- Fires at most this many due schedules, the longest due first, and records in the cell when to look
-- again. Returns how many jobs that made.
create or replace function pgqueue._fire_due(moment timestamptz, most int)
    returns int
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    picks pgqueue.schedule[];
    due pgqueue.schedule;
    fired int := 0;
    look_again_at timestamptz;
begin
    if pg_relation_size('pgqueue.schedule') = 0 then
        return 0;
    end if;
    -- Others continue meanwhile.
    perform setval('pgqueue._cell_due', pgqueue._since_2020(moment + interval '1 second'));
    picks := array(
        select s
        from pgqueue.schedule as s
        where s.due_at <= moment
        order by s.due_at
        limit most
        for update skip locked
    );
    look_again_at := pgqueue._believed_until(moment, '0');
    foreach due in array picks loop
        fired := fired + pgqueue._fire(due, moment);
        exit when fired >= 1000;
    end loop;
    perform setval('pgqueue._cell_due', pgqueue._since_2020(case
        when cardinality(picks) = most or fired >= 1000 then moment
        else greatest(look_again_at, least(
            moment + interval '1 second', (select min(s.due_at) from pgqueue.schedule as s where s.due_at > moment)
        ))
    end));
    return fired;
end;
$$;

create or replace function pgqueue.schedule(
    name text,
    queue text,
    cron text default null,
    every interval default null,
    payload jsonb default '{}',
    kind text default null,
    priority int default null,
    timezone text default 'UTC',
    catch_up text default 'one',
    jitter interval default null,
    max_attempts int default null,
    headers jsonb default null,
    group_key text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    refused boolean := pgqueue._refuse(coalesce(
        case
            when (octet_length(name) between 1 and 200) is not true then pgqueue._bad_name('name', name)
            when num_nonnulls(cron, every) <> 1 then array[
                'a schedule needs either cron or every',
                case when cron is null then 'Both are null.' else 'Both are given.' end,
                'Write cron => ''30 2 * * *'', or every => ''10 minutes''.'
            ]
            when every < '1 second' or every > '3650 days' or extract(year from every) <> 0
                or extract(month from every) <> 0
                then array[
                    'every must be 1 second to 3650 days, in days and smaller units',
                    format('It is %s.', every),
                    'For months and years, whose lengths differ, use cron, such as @monthly.'
                ]
            when catch_up not in ('skip', 'one', 'all') then array[
                'catch_up must be skip, one or all', format('It is "%s".', catch_up),
                'one, the default, makes one job for all missed slots.'
            ]
            when jitter < '0' or jitter > '1 day' then array[
                'jitter must be 0 to 1 day', format('It is %s.', jitter),
                'It spreads out the jobs of schedules that have the same slots.'
            ]
        end,
        pgqueue._check_job(queue, kind, priority, null, max_attempts, null, null, group_key, headers),
        pgqueue._check_access('scheduler', array[queue]),
        case when cron is not null then pgqueue._check_cron(cron) end,
        pgqueue._check_timezone(timezone),
        pgqueue._check_payload(
            payload, (pgqueue._in_force(queue, coalesce(kind, queue), group_key)).max_payload_bytes
        )
    ));
    moment timestamptz := clock_timestamp();
    caller text := pgqueue._caller();
    old pgqueue.schedule;
    given record;
    due record;
begin
    perform pgqueue._look_from_now_on();
    loop
        select s.* into old from pgqueue.schedule as s where s.name = schedule.name for update;
        -- A role that is gone owns nothing.
        if exists (
            select from pg_roles as r where r.rolname = old.owner and not pg_has_role(caller::name, r.oid, 'usage')
        ) then
            refused := pgqueue._refuse(array[
                format('schedule "%s" belongs to role %I', name, old.owner),
                format('Role %I is not a member of it.', caller),
                format('Choose another name, or let an operator call unschedule(%L) first.', name),
                '42501'
            ]);
        end if;
        -- In a record, because pgspot knows the fields of no other type.
        given := row(
            old.due_at, old.next_slot, old.last_slot, old.last_job_id,
            -- In hours: the clocks of the caller may give a day 23.
            make_interval(secs => extract(epoch from every)::float8),
            jitter, priority, max_attempts, coalesce(old.is_paused, false), name, queue, kind, group_key, cron,
            coalesce(timezone, 'UTC'), coalesce(catch_up, 'one'),
            coalesce((select r.rolname from pg_roles as r where r.rolname = old.owner), caller), old.problem,
            coalesce(payload, '{}'), headers
        )::pgqueue.schedule;
        if row(old.cron, old.every, old.timezone) is distinct from row(given.cron, given.every, given.timezone) then
            moment := clock_timestamp();
            -- With another rule it first fires what is due by the old one, without its jitter.
            if not old.is_paused and old.next_slot <= moment and (old.last_slot < old.next_slot) is not false then
                due := given;
                due.cron := old.cron;
                due.every := old.every;
                due.jitter := null;
                -- The second if the server no longer knows the first.
                foreach due.timezone in array array[old.timezone, given.timezone] loop
                    perform pgqueue._fire(due, moment);
                    exit when (select s.problem is null from pgqueue.schedule as s where s.name = old.name);
                end loop;
            end if;
            given.next_slot := pgqueue._next_slot(given, greatest(moment, given.last_slot));
        end if;
        if given is distinct from old then
            given.problem := null;
        end if;
        given.due_at := case when given.is_paused then 'infinity'
            else given.next_slot + pgqueue._share_of_jitter(given.name, given.jitter)
        end;
        insert into pgqueue.schedule as s values (given.*)
        on conflict on constraint schedule_pkey do update
        set due_at = given.due_at, next_slot = given.next_slot, problem = given.problem,
            every = given.every, jitter = given.jitter, priority = given.priority,
            max_attempts = given.max_attempts, queue = given.queue, kind = given.kind,
            group_key = given.group_key, cron = given.cron, timezone = given.timezone,
            catch_up = given.catch_up, owner = given.owner, payload = given.payload, headers = given.headers
        where old.name is not null and given is distinct from old;
        -- Otherwise somebody has just created it.
        exit when found or old.name is not null;
    end loop;
    perform setval('pgqueue._cell_due', pgqueue._since_2020(moment));
    perform pgqueue._wake(queue);
end;
$$;

comment on function pgqueue.schedule(
    text, text, text, interval, jsonb, text, int, text, text, interval, int, jsonb, text
) is
'Creates or changes the recurring job of this name: at each slot a job with
this queue, payload, kind, priority, max_attempts, group_key and headers (to
which the name, schedule, and the slot are added) is enqueued, once. Slots
are those of cron (see next_slots) in the time zone timezone, or come at the
interval every, 1 second to 3650 days, from Monday, 1970-01-05 00:00 UTC.
jitter, up to 1 day: later by a fraction of it, always the same for a name.
catch_up, for missed slots: skip (those that are more than two minutes late),
one (default: one job, for the last of them) or all (the first 1000). Calling
it again changes only what differs, and fires no slot twice; a paused schedule
stays paused. With a new rule it first enqueues the jobs of those old slots
that are due, with the new arguments. It belongs to the role that created it;
nobody else may change it but by unschedule, pause_schedule, resume_schedule.
Raises 22023 (bad argument), 54000 (payload too large), 42501 (it belongs to
another role, or the caller is a scheduler of other queues only).';

-- What is wrong with the name of a schedule that does not exist (PQ001).
create or replace function pgqueue._no_schedule(name text)
    returns text[]
    language plpgsql
    immutable
as $$
begin
    return array[
        format('schedule "%s" not found', name), 'No schedule has this name.',
        'select name from pgqueue.schedules lists existing schedules.',
        'PQ001'
    ];
end;
$$;

create or replace function pgqueue.unschedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean;
begin
    delete from pgqueue.schedule as s where s.name = unschedule.name;
    refused := pgqueue._refuse(case when not found then pgqueue._no_schedule(name) end);
end;
$$;

comment on function pgqueue.unschedule(text) is
'Ends a recurring job; the jobs that it has enqueued stay.
Raises PQ001 (no such schedule).';

create or replace function pgqueue.pause_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean;
begin
    update pgqueue.schedule as s
    set is_paused = true, due_at = 'infinity'
    where s.name = pause_schedule.name;
    refused := pgqueue._refuse(case when not found then pgqueue._no_schedule(name) end);
end;
$$;

comment on function pgqueue.pause_schedule(text) is
'Stops a recurring job from enqueuing jobs until resume_schedule; its slots until
then are not made up for.
Raises PQ001 (no such schedule).';

create or replace function pgqueue.resume_schedule(name text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    old pgqueue.schedule;
    refused boolean;
    moment timestamptz;
    slot timestamptz;
begin
    select s.* into old from pgqueue.schedule as s where s.name = resume_schedule.name for update;
    refused := pgqueue._refuse(case when not found then pgqueue._no_schedule(name) end);
    if old.is_paused then
        -- Not earlier: whoever had it locked may have given it another rule.
        moment := clock_timestamp();
        slot := pgqueue._next_slot(old, greatest(moment, old.last_slot));
        update pgqueue.schedule as s
        set is_paused = false, next_slot = slot, due_at = slot + pgqueue._share_of_jitter(s.name, s.jitter),
            problem = null
        where s.name = old.name;
        perform setval('pgqueue._cell_due', pgqueue._since_2020(moment));
        perform pgqueue._wake(old.queue);
    end if;
end;
$$;

comment on function pgqueue.resume_schedule(text) is
'Undoes pause_schedule, from the next slot on.
Raises PQ001 (no such schedule).';

create or replace function pgqueue.run_schedule(name text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    asked pgqueue.schedule;
    refused boolean;
begin
    select s.* into asked from pgqueue.schedule as s where s.name = run_schedule.name;
    refused := pgqueue._refuse(case when not found
        then pgqueue._no_schedule(name)
        else pgqueue._check_payload(
            asked.payload,
            (pgqueue._in_force(asked.queue, coalesce(asked.kind, asked.queue), asked.group_key)).max_payload_bytes
        )
    end);
    return pgqueue._enqueue_slot(asked, clock_timestamp());
end;
$$;

comment on function pgqueue.run_schedule(text) is
'Enqueues a job of a schedule at once, also while it is paused, and returns its
id: as at a slot, with this moment as the header slot. The slots stay as they
are.
Raises PQ001 (no such schedule), 54000 (its payload is too large by now).';
-- A job for each change of a table: enqueue_row() is a trigger function, and the trigger's arguments say what to
-- enqueue. It has the rights of the role that writes the row, which may call enqueue but nothing private: so it is
-- all one function. Where the table's columns are in scope no variable is named, because they may have any name.

create or replace function pgqueue.enqueue_row()
    returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
    -- What is in a payload or a key does not depend on the session that writes the row.
    set timezone = 'UTC'
    set datestyle = 'ISO, YMD'
    set intervalstyle = 'postgres'
    set bytea_output = 'hex'
    set extra_float_digits = 1
    set lc_monetary = 'C'
    set quote_all_identifiers = off
as $$
declare
    relation text := coalesce(pg_partition_root(tg_relid), tg_relid::regclass)::text;
    options jsonb := jsonb_build_object();
    argument text;
    name text;
    run_in interval;
    problem text[];
    columns text[];
    watched text[];
    key text[];
    is_changed boolean;
    changes refcursor;
    place bigint := 0;
    last_place bigint;
    old_row jsonb := to_jsonb(old);
    new_row jsonb := to_jsonb(new);
    this_row jsonb;
    old_part jsonb;
    new_part jsonb;
    payload jsonb;
    payloads jsonb[];
    unique_keys text[];
    group_keys text[];
    bytes bigint := 0;
    enqueued bigint;
begin
    foreach argument in array coalesce(tg_argv, '{}') loop
        name := split_part(argument, '=', 1);
        -- What comes twice, or is not a name and a value, has the name ''.
        name := case when strpos(argument, '=') in (0, length(argument)) or options ? name then '' else name end;
        options[name] := to_jsonb(substr(argument, strpos(argument, '=') + 1));
    end loop;
    columns := regexp_split_to_array(options ->> 'columns', ' ?, ?');
    watched := regexp_split_to_array(options ->> 'when_changed', ' ?, ?');
    key := regexp_split_to_array(options ->> 'key', ' ?, ?');
    if options ? 'run_in' then
        begin
            run_in := (options ->> 'run_in')::interval;
        exception when data_exception then run_in := '-1 day';
        end;
    end if;
    problem := case
        when tg_when <> 'AFTER' or tg_op = 'TRUNCATE' then array[
            'enqueue_row needs a trigger AFTER INSERT, UPDATE or DELETE', format('This one fires %s %s.', tg_when, tg_op),
            'Before it, the change may still be altered or skipped; TRUNCATE does not say which rows go.'
        ]
        when not options ? 'queue' or options - '{queue,kind,columns,when_changed,key,unique_key,on_duplicate}'::text[]
            - '{group_key,priority,run_in}'::text[] <> '{}' then array[
            'enqueue_row needs a queue, and every argument must be a known name, once, with a value',
            format('They are %s.', coalesce(array_to_string(tg_argv, ', '), 'missing')),
            'The names are queue, kind, priority, run_in, on_duplicate, columns, when_changed, unique_key, group_key and key.'
        ]
        when options ->> 'priority' !~ '^-?[0-9]{1,3}$' then array[
            'priority must be -100 to 100', format('It is "%s".', options ->> 'priority'), 'The default is 0.'
        ]
        when run_in not between '0' and '1000 years' then array[
            'run_in must be an interval from 0 to 1000 years', format('It is "%s".', options ->> 'run_in'),
            'Write ''run_in=5 minutes'', or omit it for a job that is due at once.'
        ]
        when tg_level = 'STATEMENT' and tg_op = 'UPDATE' and watched is not null and key is null then array[
            'when_changed needs a key in a statement trigger',
            'Such a trigger does not know which old row has become which new one.',
            'Add ''key=id'', with the columns of the primary key.'
        ]
        when not has_schema_privilege('pgqueue', 'usage')
            or not has_function_privilege(to_regproc('pgqueue.enqueue'), 'execute') then array[
                format('role %I may not enqueue, and so may not change %s', current_user, relation),
                format('Trigger %I of the table enqueues with the rights of the role that changes a row.', tg_name),
                format('Make the role a producer: select pgqueue.grant_access(%L, ''producer'').', current_user),
                '42501'
            ]
    end;
    if tg_level = 'STATEMENT' and problem is null then
        select array[
            'enqueue_row cannot find the rows of the statement',
            format('Its tables are %s.', coalesce(nullif(concat_ws(', ', t.tgoldtable, t.tgnewtable), ''), 'missing')),
            'Write "referencing old table as old_rows new table as new_rows", or "for each row".'
        ]
        into problem
        from pg_trigger as t
        where t.tgrelid = tg_relid and t.tgname = tg_name and (
            tg_op <> 'DELETE' and t.tgnewtable is distinct from 'new_rows'
            or (tg_op = 'DELETE' or tg_op = 'UPDATE' and key is not null) and t.tgoldtable is distinct from 'old_rows'
        );
    end if;

    if tg_level = 'ROW' or problem is not null then
        null;
    elsif tg_op = 'DELETE' then
        open changes for select to_jsonb(r.*), null::jsonb, row_number() over () from old_rows as r;
    elsif tg_op = 'UPDATE' and key is not null then
        open changes for
        select o.row, n.row, n.place
        from (select to_jsonb(r.*) as row, row_number() over () as place from new_rows as r) as n
        -- A full join is never a nested loop, which a plan made for few rows might have.
        full join (select to_jsonb(r.*) as row from old_rows as r) as o
            on array(select o.row -> k from unnest(key) as k) = array(select n.row -> k from unnest(key) as k)
        where coalesce(n.place, 0) > 0 order by n.place;
    else
        open changes for select null::jsonb, to_jsonb(r.*), row_number() over () from new_rows as r;
    end if;

    loop
        if changes is not null then
            last_place := place;
            fetch changes into old_row, new_row, place;
            -- In batches of at most 10,000, because an array has at most 1 GB.
            if bytes >= 16000000 or place is null and bytes > 0 then
                perform pgqueue.enqueue_many(
                    options ->> 'queue', payloads, options ->> 'kind', (options ->> 'priority')::int,
                    clock_timestamp() + run_in, null, case when options ? 'unique_key' then unique_keys end,
                    options ->> 'on_duplicate', case when options ? 'group_key' then group_keys end
                );
                payloads := null;
                unique_keys := null;
                group_keys := null;
                bytes := 0;
            end if;
            exit when place is null;
        end if;
        this_row := coalesce(new_row, old_row);
        problem := case
            when problem is not null then problem
            when not this_row ?& (columns || watched || key || array[options ->> 'unique_key', options ->> 'group_key'])
                then array[
                    'the table lacks a column that an argument of enqueue_row names',
                    format('It has %s.', jsonb_path_query_array(this_row, '$.keyvalue().key')),
                    'Write names as the catalog has them, without quotes, separated by commas.'
                ]
            when place = last_place then array[
                'the key of a trigger must identify its rows',
                format('Two rows of %s have the same %s.', relation, options ->> 'key'),
                'Name the columns of the primary key.'
            ]
        end;
        if problem is not null then
            raise exception using
                errcode = coalesce(problem[4], '22023'), message = problem[1], detail = problem[2], hint = problem[3];
        end if;

        is_changed := watched is null;
        foreach name in array coalesce(watched, '{}') loop
            is_changed := is_changed or old_row -> name is distinct from new_row -> name;
        end loop;
        if is_changed then
            old_part := case when columns is null then old_row when old_row is not null then '{}' end;
            new_part := case when columns is null then new_row when new_row is not null then '{}' end;
            foreach name in array coalesce(columns, '{}') loop
                old_part := jsonb_set(old_part, array[name], old_row -> name);
                new_part := jsonb_set(new_part, array[name], new_row -> name);
            end loop;
            payload := jsonb_build_object('table', relation, 'op', tg_op, 'old', old_part, 'new', new_part);
        end if;
        if changes is null then
            if is_changed then
                enqueued := pgqueue.enqueue(
                    options ->> 'queue', payload, options ->> 'kind', (options ->> 'priority')::int,
                    clock_timestamp() + run_in, null, nullif(this_row ->> (options ->> 'unique_key'), ''),
                    options ->> 'on_duplicate', nullif(this_row ->> (options ->> 'group_key'), '')
                );
            end if;
            return null;
        elsif is_changed then
            payloads := array_append(payloads, payload);
            unique_keys := array_append(unique_keys, nullif(this_row ->> (options ->> 'unique_key'), ''));
            group_keys := array_append(group_keys, nullif(this_row ->> (options ->> 'group_key'), ''));
            bytes := bytes + 1600 + pg_column_size(payload);
        end if;
    end loop;
    close changes;
    return null;
end;
$$;

comment on function pgqueue.enqueue_row() is
'For a trigger AFTER INSERT, UPDATE or DELETE: a job for each changed row, in its
transaction, with the rights of the changing role. Arguments: queue=, optionally
kind=, priority=, run_in=, on_duplicate=, columns= (those in the payload, else
all), when_changed= (an UPDATE counts only if one of these changes), unique_key=
and group_key= (a column each). Payload: table, op, new and old, null for none.
A statement trigger needs the tables old_rows and new_rows, and for old rows of
an UPDATE key= (its primary key). If enqueue refuses, the change fails.
Raises 22023 (bad argument or trigger), 42501 (the role is not a producer).';
-- What an operator sets: settings of all queues, of one, of a kind or a group, and pauses. How they are read is
-- in module resolve.

-- Sets for a queue, kind and group (null for all) what is given, by name, in addition to what was set
-- before, or instead of it, except paused. Waits for others that change settings.
create or replace function pgqueue._set(queue text, kind text, group_key text, given jsonb, reset boolean)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    scope jsonb := jsonb_build_object(
        'name', coalesce(queue, ''), 'kind', coalesce(kind, ''), 'group_key', coalesce(group_key, '')
    );
    before jsonb;
begin
    -- What is in force for a queue also depends on what was set for all.
    lock table pgqueue.queue in share row exclusive mode;
    delete from pgqueue.queue as q
    where q.name = coalesce(_set.queue, '') and q.kind = coalesce(_set.kind, '')
        and q.group_key = coalesce(_set.group_key, '')
    returning to_jsonb(q) into before;
    given := jsonb_strip_nulls(
        case when reset then jsonb_build_object('paused', before -> 'paused') else coalesce(before, '{}') end
            || scope || given
    );
    -- A row that sets nothing is dropped. Only what an old snapshot cannot see conflicts, and that raises.
    if given <> scope then
        insert into pgqueue.queue
        select q.* from jsonb_populate_record(null::pgqueue.queue, given) as q
        on conflict do nothing;
    end if;
end;
$$;

-- Refuses a setting outside its range, or for a kind or group that cannot have it.
create or replace function pgqueue._check_settings(given jsonb, kind text, group_key text)
    returns text[]
    language plpgsql
    stable
as $$
begin
    return (
        select case when w.place is null
            then array[
                format('%s must be %s', s.name, s.said),
                format('It is %s.', case when s.type = 'text' then to_json(g.value)::text else g.value end),
                s.meaning || '. Omit a setting to keep it as it is.'
            ]
            else array[
                format('%s cannot be set for %s', s.name, w.place),
                format('It is %s, for %s.', g.value, concat_ws(
                    ' and ', 'kind "' || _check_settings.kind || '"', 'group "' || _check_settings.group_key || '"'
                )),
                format('%s. Set it in a call without %s.', s.meaning, case w.place
                    when 'a kind' then 'kind'
                    when 'a kind and a group together' then 'one of the two'
                    else 'group_key'
                end)
            ]
        end
        from jsonb_each_text(given) as g
        join pgqueue._setting as s on s.name = g.key
        cross join lateral (
            select null where not case s.type
                when 'int' then g.value::int between s.range[1]::int and coalesce(s.range[2], g.value)::int
                when 'interval' then g.value::interval between s.range[1]::interval and s.range[2]::interval
                when 'text' then g.value = any (s.range)
                else true
            end
            union all
            select n.place from unnest(s.not_for) as n (place) where case n.place
                when 'a kind' then _check_settings.kind is not null
                when 'a group' then _check_settings.group_key is not null
                when 'each group' then _check_settings.group_key = '*'
                else num_nonnulls(_check_settings.kind, _check_settings.group_key) = 2
            end
        ) as w (place)
        order by num_nonnulls(w.place), s.place
        limit 1
    );
end;
$$;

create or replace function pgqueue.configure(
    queue text,
    lease interval default null,
    max_attempts int default null,
    retry_base interval default null,
    retry_cap interval default null,
    keep_runs int default null,
    max_payload_bytes int default null,
    notify boolean default null,
    reset boolean default false,
    kind text default null,
    group_key text default null,
    weight int default null,
    group_limit int default null,
    group_on_retry text default null,
    max_running int default null,
    rate_limit int default null,
    rate_period interval default null,
    age_after interval default null,
    keep_dead interval default null,
    keep_payloads boolean default null,
    wait_target interval default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    given jsonb := jsonb_strip_nulls(jsonb_build_object(
        'lease', configure.lease, 'max_attempts', configure.max_attempts, 'retry_base', configure.retry_base,
        'retry_cap', configure.retry_cap, 'keep_runs', configure.keep_runs,
        'max_payload_bytes', configure.max_payload_bytes, 'notify', configure.notify, 'weight', configure.weight,
        'group_limit', configure.group_limit, 'group_on_retry', configure.group_on_retry,
        'max_running', configure.max_running, 'rate_limit', configure.rate_limit,
        'rate_period', configure.rate_period, 'age_after', configure.age_after, 'keep_dead', configure.keep_dead,
        'keep_payloads', configure.keep_payloads, 'wait_target', configure.wait_target
    ));
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_scope(configure.queue, configure.kind, configure.group_key, true),
        pgqueue._check_ranges(lease => configure.lease),
        pgqueue._check_settings(given, configure.kind, configure.group_key)
    ));
begin
    perform pgqueue._set(configure.queue, configure.kind, configure.group_key, given, configure.reset);
    perform pgqueue._resolve(coalesce(configure.queue, ''));
    if given ?| '{group_limit,max_running,rate_limit,rate_period}'
        or configure.reset and pg_relation_size('pgqueue.permit') > 0
    then
        if configure.kind is null and (configure.group_key is not null or configure.group_limit is not null or configure.reset)
        then
            perform pgqueue._apply_limits(configure.queue, configure.group_key);
        end if;
        if configure.group_key is null then
            perform pgqueue._apply_caps(configure.queue, configure.kind);
        end if;
        if configure.queue is not null then
            perform pgqueue._wake(configure.queue);
        elsif current_setting('pgqueue.notify', true) is distinct from 'off' then
            perform pg_notify('pgqueue', '');
        end if;
    end if;
end;
$$;

do $do$
begin
    execute format(
        'comment on function %s is %L',
        'pgqueue.configure'::regproc::regprocedure,
        $$Changes the given settings and leaves the rest; reset first clears all that was
set. A null queue sets them for every queue without its own; with kind or
group_key, for that kind or group (* for each group). The most specific wins:
group, kind, queue, all; but all max_running and rate_limit apply together.
Settings of groups, set for a queue, apply to each of its groups.
$$ || (
            select string_agg(format(E'%s (%s):\n  %s.', s.name, s.facts, s.meaning), E'\n' order by s.place)
            from pgqueue._setting as s
            where s.name <> 'paused'
        ) || E'\nRaises 22023 (bad argument).'
    );
end;
$do$;

-- Pauses or resumes a queue, kind or group, where null means all, and overrides earlier calls for
-- anything within.
create or replace function pgqueue._set_paused(queue text, kind text, group_key text, paused boolean)
    returns void
    language plpgsql
as $$
#variable_conflict use_column
declare
    scope text[] := array[coalesce(queue, ''), coalesce(kind, ''), coalesce(group_key, '')];
    written tid[];
begin
    if _set_paused.queue is not null
        and not exists (select from pgqueue.queue as q where q.name = _set_paused.queue)
        and not exists (
            select from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_set_paused.queue) and j.queue = _set_paused.queue
        )
    then
        raise notice using
            message = format('queue "%s" has neither jobs nor settings', _set_paused.queue),
            hint = 'Is the name right? select queue from pgqueue.queues lists existing queues.';
    end if;
    perform pgqueue._set(queue, kind, group_key, jsonb_build_object('paused', _set_paused.paused), false);
    with cleared as (
        update pgqueue.queue as q
        set paused = null
        where q.paused is not null and (
            scope[1] in ('', q.name) and scope[2] in ('', q.kind) and scope[3] in ('', q.group_key)
                and scope <> array[q.name, q.kind, q.group_key]
            -- "Not paused" matters only while something wider is paused.
            or not q.paused and not exists (
                select from pgqueue.queue as wider
                where wider.paused and wider.name in ('', q.name) and wider.kind in ('', q.kind)
                    and wider.group_key in ('', q.group_key)
            )
        )
        returning q.ctid
    )
    select array_agg(c.ctid) into written from cleared as c;
    delete from pgqueue.queue as q
    where q.ctid = any (written) and jsonb_strip_nulls(to_jsonb(q) - '{name,kind,group_key}'::text[]) = '{}';
    perform pgqueue._resolve(scope[1]);
end;
$$;

create or replace function pgqueue.pause(
    queue text default null, kind text default null, group_key text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_scope(queue, kind, group_key, false));
begin
    perform pgqueue._set_paused(queue, kind, group_key, true);
end;
$$;

comment on function pgqueue.pause(text, text, text) is
'Lets a queue, or all queues, accept jobs but hand none out; with kind or
group_key, only jobs of that kind or group. Running jobs go on. Overrides
earlier calls for anything within; after that the most specific call wins.
Raises 22023 (bad argument).';

create or replace function pgqueue.resume(
    queue text default null, kind text default null, group_key text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_scope(queue, kind, group_key, false));
begin
    perform pgqueue._set_paused(queue, kind, group_key, false);
    perform pgqueue._unblock_groups(queue, group_key);
    if queue is not null then
        perform pgqueue._wake(queue);
    elsif current_setting('pgqueue.notify', true) is distinct from 'off' then
        perform pg_notify('pgqueue', '');
    end if;
end;
$$;

comment on function pgqueue.resume(text, text, text) is
'Undoes pause, for a queue, for all queues, or for a kind or group, which then
runs even if something wider is still paused.
Raises 22023 (bad argument).';

-- Derives again what is in force, and what is used, if a copy or restore has left that out.
create or replace function pgqueue._repair_settings()
    returns void
    language plpgsql
as $$
begin
    -- A replica that was made by copying rows has no sequences.
    if exists (
        select from pgqueue._named_queues() as n
        where not exists (select from pgqueue.queue_in_force as f where f.queue = n.name)
            or ~pg_sequence_last_value('pgqueue.used_seq'::regclass) & pgqueue._settings_bits(n.name) <> 0
    ) then
        lock table pgqueue.queue in share row exclusive mode;
        perform pgqueue._resolve('');
    end if;
    if exists (select from pgqueue.schedule) or exists (select from pgqueue.batch)
        or exists (select from pgqueue.dependency)
    then
        perform pgqueue._look_from_now_on();
    end if;
    if exists (select from pgqueue.dependency) then
        perform pgqueue._mark(pgqueue._settings_bits(''), 'pgqueue.awaited_seq');
    end if;
    if exists (select from pgqueue.access as a where a.queue <> '') then
        perform pgqueue._mark(-1, 'pgqueue.awaited_seq');
    end if;
end;
$$;
-- What an operator does to waiting, running or ended jobs, from psql. No worker needs to be running.

-- Asks jobs to stop, and ends those that do not run. All at once, because a job that waits for another of them
-- is cancelled with that one. Returns how many there are, and how many of them run.
create or replace function pgqueue._cancel(job_ids bigint[], reason text, out jobs int, out running int)
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    asked record;
begin
    with asked as (
        update pgqueue.job as j
        set cancelled_at = coalesce(j.cancelled_at, moment),
            cancel_reason = coalesce(left(_cancel.reason, 8000), j.cancel_reason)
        where j.id = any (job_ids)
        returning j.ctid, j.queue, coalesce(j.lease_expires_at > moment, false) as is_running
    )
    select
        count(*) as jobs,
        coalesce(array_agg(a.ctid) filter (where not a.is_running), '{}') as picks,
        array_agg(distinct a.queue) filter (where a.is_running) as queues
    into asked
    from asked as a;
    jobs := asked.jobs;
    running := jobs - cardinality(asked.picks);
    perform pgqueue._notify(q.name, 'cancel') from unnest(asked.queues) as q (name);
    perform pgqueue._end(asked.picks, array_fill('cancelled'::text, array[jobs - running]), null, null, moment);
end;
$$;

create or replace function pgqueue.cancel(job_id bigint, reason text default null)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    asked record := pgqueue._cancel(array[job_id], reason);
    refused boolean := pgqueue._refuse(case when asked.jobs = 0 then pgqueue._not_found(
        'job', job_id, 'It may have finished, or be dead: look in pgqueue.run and pgqueue.dead_job.'
    ) end);
begin
    return case asked.running when 0 then 'cancelled' else 'cancelling' end;
end;
$$;

comment on function pgqueue.cancel(bigint, text) is
'Stops a job. A waiting job is gone at once: cancelled. The worker of a running
one learns of it by a notification, or at its next heartbeat: cancelling; if
that worker is dead the job ends with its lease. It never runs again.
Raises PQ001 (no such job).';

-- For a dry run: reports how often each error occurs, in NOTICEs, the 20 most frequent.
create or replace function pgqueue._tell_counts(what text, summaries text[])
    returns void
    language plpgsql
as $$
declare
    counted record;
begin
    for counted in
        select s.summary, count(*) as jobs
        from unnest(summaries) as s (summary)
        group by s.summary
        order by count(*) desc, s.summary
        limit 20
    loop
        raise notice '% of %: %', counted.jobs, what, coalesce(counted.summary, 'no error');
    end loop;
end;
$$;

create or replace function pgqueue.cancel_many(
    queue text default null,
    kind text default null,
    error_like text default null,
    enqueued_after timestamptz default null,
    enqueued_before timestamptz default null,
    max_jobs int default 1000,
    dry_run boolean default false,
    reason text default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_ranges(max_jobs => max_jobs, error_like => error_like));
    -- What is just being claimed or ended is left alone.
    job_ids bigint[] := array(
        select j.id
        from pgqueue.job as j
        where (cancel_many.queue is null or j.queue = cancel_many.queue)
            and (cancel_many.kind is null or j.kind = cancel_many.kind)
            and (
                cancel_many.error_like is null
                or pgqueue._summary(j.errors -> -1 ->> 'error') ilike cancel_many.error_like
            )
            and (cancel_many.enqueued_after is null or j.enqueued_at >= cancel_many.enqueued_after)
            and (cancel_many.enqueued_before is null or j.enqueued_at < cancel_many.enqueued_before)
            and j.cancelled_at is null
        order by j.id
        limit coalesce(cancel_many.max_jobs, 1000)
        for update skip locked
    );
begin
    if dry_run then
        perform pgqueue._tell_counts('the jobs to cancel', array(
            select pgqueue._summary(j.errors -> -1 ->> 'error')
            from pgqueue.job as j where j.id = any (job_ids)
        ));
    else
        perform pgqueue._cancel(job_ids, reason);
    end if;
    return query select c.id from unnest(job_ids) as c (id);
end;
$$;

comment on function pgqueue.cancel_many(
    text, text, text, timestamptz, timestamptz, int, boolean, text
) is
'Cancels waiting or running jobs, lowest id first, and returns their ids. Filters
by queue, kind, pattern of the first line of the last error (ILIKE) and time
of enqueue (from enqueued_after, before enqueued_before); null does not
filter. dry_run only returns the ids, and reports in NOTICEs how often each
error occurs.
Raises 22023 (bad argument).';

create or replace function pgqueue.run_now(job_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    moved record;
    refused boolean;
begin
    update pgqueue.job as j
    set run_at = case
            when j.lease_expires_at is null and j.run_at < 'infinity' then least(j.run_at, moment)
            else j.run_at
        end
    where j.id = run_now.job_id
    returning j.queue, j.priority, j.group_key, j.run_at into moved;
    if not found then
        refused := pgqueue._refuse(pgqueue._not_found('job', job_id, 'A dead job goes back to work with redrive_job.'));
    end if;
    perform pgqueue._reopened(array[moved.queue], array[moved.priority], array[moved.group_key], array[moved.run_at]);
end;
$$;

comment on function pgqueue.run_now(bigint) is
'Makes a scheduled job, or one that waits for its retry, due at once; a running
or blocked job is left alone.
Raises PQ001 (no such job).';

create or replace function pgqueue.reprioritize(job_id bigint, priority int)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    refused boolean := pgqueue._refuse(case when priority is null
        then array['priority must not be null', 'It is null.', 'The default is 0.']
        else pgqueue._check_ranges(priority)
    end);
    moved record;
begin
    update pgqueue.job as j
    set priority = reprioritize.priority
    where j.id = reprioritize.job_id
    returning j.queue, j.group_key, j.run_at into moved;
    if not found then
        refused := pgqueue._refuse(pgqueue._not_found('job', job_id, 'Only a waiting or running job has a priority.'));
    end if;
    perform pgqueue._reopened(array[moved.queue], array[priority], array[moved.group_key], array[moved.run_at]);
end;
$$;

comment on function pgqueue.reprioritize(bigint, int) is
'Gives a job another priority, -100 to 100; larger runs first. For a running job
it takes effect at the next attempt.
Raises PQ001 (no such job), 22023 (bad argument).';

create or replace function pgqueue.rerun(job_id bigint)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    present record;
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because it may just be moving from one to the other.
    select j.id as living, d.id as dead into present
    from (values (rerun.job_id)) as asked (id)
    left join pgqueue.job as j on j.id = asked.id
    left join pgqueue.dead_job as d on d.id = asked.id;
    select r.* into last
    from pgqueue.run as r
    where r.job_id = rerun.job_id and r.payload is not null
    order by r.finished_at desc
    limit 1;
    refused := pgqueue._refuse(coalesce(
        case
            when present.living is not null then array[
                format('job %s has not ended', job_id),
                'It is waiting or running.',
                format('why(%s) says what it waits for, run_now(%1$s) makes it due.', job_id)
            ]
            when present.dead is not null then array[
                format('job %s is dead', job_id),
                'It is in dead_job, with its payload.',
                format('redrive_job(%s) sends it back to work.', job_id)
            ]
            when last.job_id is null then array[
                format('job %s cannot be run again', coalesce(job_id::text, 'null')),
                'The log has no payload of a job with this id.',
                'If keep_payloads is set for its queue, the log keeps the payloads of jobs that end from then on.',
                'PQ001'
            ]
        end,
        pgqueue._check_payload(
            last.payload, (pgqueue._in_force(last.queue, last.kind, last.options ->> 'group_key')).max_payload_bytes
        )
    ));
    return pgqueue._enqueue_again(
        last.queue, last.payload, last.kind, (last.options ->> 'priority')::int,
        (last.options ->> 'max_attempts')::int, last.options ->> 'group_key',
        coalesce(last.headers, '{}') || jsonb_build_object('rerun_of', job_id)
    );
end;
$$;

comment on function pgqueue.rerun(bigint) is
'Enqueues once more a job that completed or was cancelled, due now, and returns
the new id: queue, kind, payload, priority, max_attempts, group and headers are
the old ones, with the old id as the header rerun_of; a unique_key is not
copied. The log must have kept the payload: see keep_payloads.
Raises PQ001 (no such job, or no payload of it), 22023 (it has not ended, or is
dead), 54000 (payload too large).';

create or replace function pgqueue.purge(queue text)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_hashagg = off
as $$
declare
    purged record;
    jobs bigint := 0;
begin
    for purged in
        with doomed as (
            select j.id
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(purge.queue) and j.queue = purge.queue
                and j.lease_expires_at is null
            order by j.id
            for update
        ), deleted as (
            delete from pgqueue.job as j
            using doomed
            where j.id = doomed.id
            returning j.id, j.group_key, j.permits, (j.terms).batch_id
        )
        -- Some thousands at a time, because an array holds no more than a gigabyte.
        select
            array_agg(row(
                d.id, 'cancelled', purge.queue, d.group_key, d.batch_id, d.permits, null, null, null
            )::pgqueue._ended) as ended
        from (select n.*, row_number() over (order by n.id) / 10000 as part from deleted as n) as d
        group by d.part
    loop
        perform pgqueue._after_end(purged.ended);
        jobs := jobs + cardinality(purged.ended);
    end loop;
    return jobs;
end;
$$;

comment on function pgqueue.purge(text) is
'Deletes all waiting jobs of a queue, without a trace in run; running and dead
jobs stay. Returns how many.';
-- Dead jobs: sent back to work, or deleted. Rows leave dead_job only here.

-- Sends locked dead jobs back to work and returns their ids; one whose unique_key is taken stays dead.
create or replace function pgqueue._redrive(dead_ids bigint[])
    returns bigint[]
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    revived record;
begin
    with back as (
        insert into pgqueue.job as j (
            id, run_at, enqueued_at, priority, max_attempts,
            queue, kind, unique_key, group_key, terms, payload, headers, errors
        )
        overriding system value
        select
            d.id, moment - (count(*) over () - row_number() over (order by d.id)) * interval '1 microsecond',
            d.enqueued_at, d.priority, d.max_attempts,
            d.queue, d.kind, d.unique_key, d.group_key,
            case when (d.terms).batch_id is not null then row(null, null, (d.terms).batch_id)::pgqueue._terms end,
            d.payload, d.headers, d.errors
        from pgqueue.dead_job as d
        where d.id = any (_redrive.dead_ids)
        order by d.unique_key, d.id
        on conflict do nothing
        returning j.id, j.queue, j.priority, j.group_key, j.run_at, (j.terms).batch_id
    )
    select
        array_agg(b.id order by b.id) as ids, array_agg(b.queue) as queues, array_agg(b.priority) as priorities,
        array_agg(b.group_key) as keys, array_agg(b.run_at) as run_ats, array_agg(b.batch_id) as batch_ids
    into revived
    from back as b;
    perform
        pgqueue._make_group_permits(u.queue, array_agg(u.group_key), pgqueue._in_force(u.queue)),
        pgqueue._make_permits_for(u.queue, (pgqueue._in_force(u.queue)).caps, null)
    from unnest(revived.queues, revived.keys) as u (queue, group_key)
    group by u.queue;
    perform pgqueue._rejoin_batches(revived.batch_ids);
    delete from pgqueue.dead_job as d where d.id = any (revived.ids);
    perform pgqueue._reopened(revived.queues, revived.priorities, revived.keys, revived.run_ats);
    return revived.ids;
end;
$$;

-- redrive and discard_many: finds the dead jobs that match these filters, lowest id first, to redrive only those
-- whose unique_key no living job has. For a dry run it reports what they are.
create or replace function pgqueue._end_death(
    verb text, queue text, kind text, error_like text, died_after timestamptz, died_before timestamptz,
    max_jobs int, dry_run boolean
)
    returns bigint[]
    language plpgsql
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    ids bigint[];
    summaries text[];
begin
    select array_agg(f.id order by f.id), array_agg(f.summary) into ids, summaries
    from (
        select d.id, pgqueue._summary(d.error) as summary
        from pgqueue.dead_job as d
        where (_end_death.queue is null or d.queue = _end_death.queue)
            and (_end_death.kind is null or d.kind = _end_death.kind)
            and (_end_death.error_like is null or pgqueue._summary(d.error) ilike _end_death.error_like)
            and (_end_death.died_after is null or d.died_at >= _end_death.died_after)
            and (_end_death.died_before is null or d.died_at < _end_death.died_before)
            and not (_end_death.verb = 'redrive' and exists (
                select from pgqueue.job as j
                where j.queue = d.queue and j.unique_key = d.unique_key
                offset 0  -- by the key's index, not by a hash of all jobs
            ))
        order by d.id
        limit coalesce(_end_death.max_jobs, 1000)
        for update of d skip locked
    ) as f;
    if dry_run then
        perform pgqueue._tell_counts('the dead jobs to ' || verb, summaries);
    elsif verb = 'redrive' then
        ids := pgqueue._redrive(ids);
    else
        delete from pgqueue.dead_job as d where d.id = any (ids);
        perform pgqueue._note_gone(ids);
    end if;
    return ids;
end;
$$;

create or replace function pgqueue.redrive(
    queue text default null,
    kind text default null,
    error_like text default null,
    died_after timestamptz default null,
    died_before timestamptz default null,
    max_jobs int default 1000,
    dry_run boolean default false
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_ranges(max_jobs => max_jobs, error_like => error_like));
begin
    return query
    select unnest(pgqueue._end_death(
        'redrive', queue, kind, error_like, died_after, died_before, max_jobs, dry_run
    ));
end;
$$;

comment on function pgqueue.redrive(
    text, text, text, timestamptz, timestamptz, int, boolean
) is
'Sends dead jobs back to work, lowest id first, and returns their ids: same id,
errors kept, due now, attempts counted from 0 again, without an expires_at. A
job of an unfinished batch belongs to it again. Filters by queue, kind,
pattern of the first line of the last error (ILIKE), and time of death (from
died_after, before died_before); null does not filter. A job whose unique_key
is taken by a living one stays dead. dry_run only returns the ids, and reports
in NOTICEs how often each error occurs.
Raises 22023 (bad argument).';

create or replace function pgqueue.redrive_job(dead_id bigint, payload jsonb default null)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    dead pgqueue.dead_job;
    refused boolean;
begin
    select d.* into dead from pgqueue.dead_job as d where d.id = redrive_job.dead_id for update;
    refused := pgqueue._refuse(case when found
        then pgqueue._check_payload(
            payload, (pgqueue._in_force(dead.queue, dead.kind, dead.group_key)).max_payload_bytes
        )
        else pgqueue._not_found('dead job', dead_id)
    end);
    if payload is not null then
        update pgqueue.dead_job as d set payload = redrive_job.payload where d.id = dead.id;
    end if;
    return (pgqueue._redrive(array[dead_id]))[1];
end;
$$;

comment on function pgqueue.redrive_job(bigint, jsonb) is
'Sends one dead job back to work as redrive does, with another payload if one
is given. Returns its id, or null if its unique_key is taken by a living job:
then it stays dead (with the new payload).
Raises PQ001 (no such dead job), 54000 (the new payload is too large).';

create or replace function pgqueue.discard_many(
    queue text default null,
    kind text default null,
    error_like text default null,
    died_after timestamptz default null,
    died_before timestamptz default null,
    max_jobs int default 1000,
    dry_run boolean default false
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_ranges(max_jobs => max_jobs, error_like => error_like));
begin
    return query
    select unnest(pgqueue._end_death(
        'discard', queue, kind, error_like, died_after, died_before, max_jobs, dry_run
    ));
end;
$$;

comment on function pgqueue.discard_many(
    text, text, text, timestamptz, timestamptz, int, boolean
) is
'Deletes dead jobs for good, lowest id first, and returns their ids; filters and
dry_run are those of redrive.
Raises 22023 (bad argument).';

create or replace function pgqueue.discard(dead_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    refused boolean;
begin
    delete from pgqueue.dead_job as d where d.id = discard.dead_id;
    if not found then
        refused := pgqueue._refuse(pgqueue._not_found('dead job', dead_id));
    end if;
    perform pgqueue._note_gone(array[dead_id]);
end;
$$;

comment on function pgqueue.discard(bigint) is
'Deletes a dead job for good.
Raises PQ001 (no such dead job).';

-- keep_dead. The kinds of each queue, and of each group with a setting of its own, are looked up one by
-- one in an index, and of each only what is over is read: dead jobs that stay cost nothing, except
-- those of a group that keeps them for longer than their kind does.
-- Each kind of each queue that has dead jobs, and when the oldest died.
create or replace function pgqueue._dead_kinds()
    returns table (queue text, kind text, oldest timestamptz)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_sort = off
    set enable_bitmapscan = off
as $$
begin
    return query
    with recursive step (queue, kind, oldest) as (
        values ('', '', null::timestamptz)
        union all
        select n.*
        from step as s
        cross join lateral (
            select d.queue, d.kind, d.died_at
            from pgqueue.dead_job as d
            where (d.queue, d.kind) > (s.queue, s.kind)
            order by d.queue, d.kind, d.died_at
            limit 1
        ) as n
    )
    select s.* from step as s where s.oldest is not null;
end;
$$;

-- The same for the groups with a setting of how long their dead jobs are kept.
create or replace function pgqueue._dead_kinds_of_groups()
    returns table (queue text, kind text, oldest timestamptz, group_key text)
    language plpgsql
    stable
    set enable_sort = off
    set enable_bitmapscan = off
as $$
begin
    return query
    with recursive step (queue, kind, oldest, group_key) as (
        select distinct '', '', null::timestamptz, q.group_key
        from pgqueue.queue as q
        where q.keep_dead is not null and q.group_key <> ''
        union all
        select n.*
        from step as s
        cross join lateral (
            select d.queue, d.kind, d.died_at, d.group_key
            from pgqueue.dead_job as d
            where d.group_key = s.group_key and (d.queue, d.kind) > (s.queue, s.kind)
            order by d.queue, d.kind, d.died_at
            limit 1
        ) as n
    )
    select s.* from step as s where s.oldest is not null;
end;
$$;

-- Deletes at most 10,000 dead jobs that have been kept for keep_dead, of each kind the oldest first;
-- returns how many. A locked one is put off.
create or replace function pgqueue._forget_dead()
    returns bigint
    language plpgsql
    set enable_sort = off
    set enable_bitmapscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    latest timestamptz := (select max(moment - q.keep_dead) from pgqueue.queue as q where q.keep_dead is not null);
    dropped bigint[] := '{}'::bigint[];
    picks tid[];
    given record;
begin
    if latest is null then
        return 0;
    end if;
    for given in
        select u.*, moment - (pgqueue._in_force(u.queue, u.kind, u.group_key)).keep_dead as died_by
        from (
            select k.*, null as group_key from pgqueue._dead_kinds() as k
            union all
            select g.* from pgqueue._dead_kinds_of_groups() as g
        ) as u
        -- The settings are read only if something may be over.
        where u.oldest <= latest
        order by u.oldest
    loop
        continue when (given.oldest <= given.died_by) is not true;
        picks := case when given.group_key is null
            then array(
                select d.ctid
                from pgqueue.dead_job as d
                where d.queue = given.queue and d.kind = given.kind and d.died_at <= given.died_by
                    -- Those of a group with its own setting do not count for the kind.
                    and not exists (
                        select from pgqueue.queue as q
                        where q.group_key = d.group_key and q.keep_dead is not null
                        offset 0
                    )
                order by d.died_at
                limit 10000 - cardinality(dropped)
                for update skip locked
            )
            else array(
                select d.ctid
                from pgqueue.dead_job as d
                where d.group_key = given.group_key and d.queue = given.queue and d.kind = given.kind
                    and d.died_at <= given.died_by
                order by d.died_at
                limit 10000 - cardinality(dropped)
                for update skip locked
            )
        end;
        with deleted as (
            delete from pgqueue.dead_job as d where d.ctid = any (picks) returning d.id
        )
        select dropped || array_agg(d.id) into dropped from deleted as d;
        exit when cardinality(dropped) = 10000;
    end loop;
    perform pgqueue._note_gone(dropped);
    return cardinality(dropped);
end;
$$;
-- Maintenance: periodic work that holds up nobody.

create or replace function pgqueue.reap(max_jobs int default 1000)
    returns int
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_tidscan = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_isolation(), pgqueue._check_ranges(max_jobs => max_jobs)
    ));
    moment timestamptz := clock_timestamp();
    picks tid[];
begin
    -- A walk over the whole table: an index on the lease would be written by every claim
    -- and every heartbeat, and claims find most of what is over without one.
    picks := array(
        select j.ctid
        from pgqueue.job as j
        where coalesce(j.lease_expires_at, (j.terms).expires_at) <= moment
        limit coalesce(reap.max_jobs, 1000)
        for update skip locked
    );
    return pgqueue._expire(picks, moment);
end;
$$;

comment on function pgqueue.reap(int) is
'Ends what is over, at most max_jobs jobs, and returns how many. A job whose
lease expired goes back to its place in its lane, or to dead_job if its attempts
are used up; a waiting one that nobody began by its expires_at is cancelled.
Claims do this for what they come across in their own queue; any number of
reaps may run at once.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

-- Empties a table of the ring run, unless it is in use, or holds runs that ended after its day; returns whether it
-- did. Nobody can read run until the transaction ends; and without nowait all would queue up behind us, and we
-- behind a long SELECT. With statements for each table, because a name put together at run time is dynamic SQL.
do $do$
begin
    execute format(
        'create or replace function pgqueue._empty_run(slot int, day_ends_at timestamptz)
            returns boolean
            language plpgsql
        as %L',
        E'begin\ncase slot\n' || (
            select string_agg(format(
                $case$
                    when %1$s then
                        lock table pgqueue.run_%1$s in access exclusive mode nowait;
                        -- Others may have written to it since.
                        if exists (select from pgqueue.run_%1$s as r where r.finished_at >= day_ends_at) then
                            return false;
                        end if;
                        truncate pgqueue.run_%1$s;
                        -- See module schema.
                        perform brin_desummarize_range('pgqueue.run_%1$s_finished_at_job_id_idx', 0);
                $case$, n.slot
            ), '' order by n.slot)
            from generate_series(0, 15) as n (slot)
        ) || $end$
            end case;
            return true;
            exception
                -- Another session, or an open cursor of this one, is reading it.
                when lock_not_available or object_in_use then return false;
            end;
        $end$
    );
end;
$do$;

-- Whether the table of the ring run that is due for deletion on a day holds runs, and none that ended
-- after that day.
create or replace function pgqueue._is_over(day int)
    returns boolean
    language sql
    volatile
as $$
    select exists (select from pgqueue.run as r where r.slot = _is_over.day % 16)
        and not exists (
            select from pgqueue.run as r
            where r.slot = _is_over.day % 16
                and r.finished_at >= to_timestamp((_is_over.day + 1) * 86400::float8)
        )
$$;

-- Whether the transaction is certain to end with the call of the function whose PG_CONTEXT this is. There
-- is no way to ask, but a transaction begun by BEGIN, or by another statement, is older than our message.
-- A statement that is parsed and executed in one go looks as if it were not alone.
create or replace function pgqueue._is_alone(callers text)
    returns boolean
    language plpgsql
    stable
as $$
begin
    -- A function that called us may continue for as long as it likes.
    return strpos(callers, E'\n') = 0 and (
        -- The message began the transaction, and has nothing after us.
        now() = statement_timestamp() and strpos(rtrim(current_query(), E'; \t\r\n'), ';') = 0
        -- Or binding the portal in which we run did, where the statement had been prepared.
        or exists (
            select from pg_cursors as c
            where c.name = '' and c.statement = current_query() and c.creation_time = now()
        )
    );
end;
$$;

-- Empties the tables of the ring run whose day is over, except those in use, and returns how many; or, in a
-- transaction that may continue, deletes at most 100,000 of their rows, and returns how many: nobody waits for
-- that, but VACUUM has to follow.
create or replace function pgqueue._forget_runs(is_alone boolean)
    returns bigint
    language plpgsql
    set enable_bitmapscan = on
    set enable_partition_pruning = on
as $$
declare
    today int := floor(date_part('epoch', clock_timestamp()) / 86400)::int;
    day_ends_at timestamptz;
    deleted int;
    forgotten bigint := 0;
begin
    -- The last deletion day of each table is one of the 16 days before today. A row written
    -- after that day is kept until the next one, 16 days later.
    for day in today - 16 .. today - 1 loop
        continue when not pgqueue._is_over(day);
        day_ends_at := to_timestamp((day + 1) * 86400::float8);
        if is_alone then
            deleted := pgqueue._empty_run(day % 16, day_ends_at)::int;
        else
            delete from pgqueue.run as r
            where r.slot = day % 16 and r.ctid = any (array(
                select o.ctid
                from pgqueue.run as o
                where o.slot = day % 16 and o.finished_at < day_ends_at
                limit 100000 - forgotten
                for update skip locked
            ));
            get diagnostics deleted = row_count;
        end if;
        forgotten := forgotten + deleted;
    end loop;
    return forgotten;
end;
$$;

-- Deletes what nobody will look for any more: at most 100,000 unique_for windows that have ended and, of ends
-- more than 14 days ago, 100,000 rows of gone and 10,000 batches. Returns how many windows and batches.
create or replace function pgqueue._forget_ends(out windows bigint, out batches bigint)
    language plpgsql
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
begin
    delete from pgqueue.recent_key as k
    where k.ctid = any (array(
        select f.ctid
        from pgqueue.recent_key as f
        where f.expires_at <= moment
        order by f.expires_at
        limit 100000
        for update skip locked
    ));
    get diagnostics windows = row_count;
    delete from pgqueue.gone as g
    where g.ctid = any (array(
        select f.ctid
        from pgqueue.gone as f
        where f.ended_at < moment - interval '14 days'
        order by f.ended_at
        limit 100000
        for update skip locked
    ));
    delete from pgqueue.batch as b
    where b.ctid = any (array(
        select f.ctid
        from pgqueue.batch as f
        where f.finished_at < moment - interval '14 days'
        order by f.finished_at
        limit 10000
        for update skip locked
    ));
    get diagnostics batches = row_count;
end;
$$;

-- Adds to the counters of the queues what happened between two cuts, and makes another cut, unless there is a new
-- one. A cut can be counted to when every transaction that wrote before it has ended, or after five minutes: what
-- is open for longer may be missed. Ten seconds, because a call that waits may write later than it began.
create or replace function pgqueue._count()
    returns void
    language plpgsql
    set enable_bitmapscan = on
    set enable_sort = on
as $$
#variable_conflict use_column
declare
    moment timestamptz := clock_timestamp();
    first pgqueue.cut;
    next pgqueue.cut;
begin
    -- The clock was set back.
    delete from pgqueue.cut as c where c.at > moment;
    if exists (select from pgqueue.cut as c where c.at > moment - interval '30 seconds') then
        return;
    end if;
    -- One session at a time.
    select c.* into first
    from pgqueue.cut as c
    where c.at = (select min(f.at) from pgqueue.cut as f)
    for update skip locked;
    if not found and exists (select from pgqueue.cut) then
        return;
    end if;
    select c.* into next
    from pgqueue.cut as c
    where c.at > first.at
        and (c.xid <= pg_snapshot_xmin(pg_current_snapshot()) or c.at < moment - interval '5 minutes')
    order by c.at desc
    limit 1;
    if found then
        insert into pgqueue.counter as c (queue, counted_at, enqueued, completed, failed, dead)
        select
            e.queue, moment, sum(e.enqueued), sum(e.completed), sum(e.failed), sum(e.dead)
        from (
            select
                r.queue,
                count(*) filter (
                    where r.job_id > first.last_id and r.job_id <= next.last_id
                        and r.outcome in ('completed', 'dead', 'cancelled')
                ) as enqueued,
                count(*) filter (where r.outcome = 'completed' and r.finished_at <= next.at) as completed,
                count(*) filter (
                    where r.finished_at <= next.at
                        and r.outcome in (select o.name from pgqueue._outcome as o where o.is_failure)
                ) as failed,
                count(*) filter (where r.outcome = 'dead' and r.finished_at <= next.at) as dead
            from pgqueue.run as r
            where r.finished_at > first.at
            group by r.queue
            union all
            select j.queue, count(*), 0, 0, 0
            from pgqueue.job as j
            where j.id > first.last_id and j.id <= next.last_id
            group by j.queue
        ) as e
        group by e.queue
        having sum(e.enqueued + e.completed + e.failed + e.dead) > 0
        on conflict (queue) do update
        set counted_at = excluded.counted_at,
            enqueued = c.enqueued + excluded.enqueued,
            completed = c.completed + excluded.completed,
            failed = c.failed + excluded.failed,
            dead = c.dead + excluded.dead;
        delete from pgqueue.cut as c where c.at < next.at;
        delete from pgqueue.counter as c where c.counted_at < moment - interval '14 days';
    end if;
    insert into pgqueue.cut (at, last_id, xid)
    values (
        moment - interval '10 seconds', coalesce(pg_sequence_last_value('pgqueue.job_id_seq'), 0),
        pg_snapshot_xmax(pg_current_snapshot())
    )
    on conflict do nothing;
end;
$$;

create or replace function pgqueue.maintain()
    returns table (task text, done bigint)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_isolation());
    callers text;
    ends record;
begin
    get diagnostics callers = pg_context;
    return query
    values
        ('reap', pgqueue.reap()::bigint),
        ('fire schedules', pgqueue._fire_due(clock_timestamp(), 100)),
        ('tie loose ends', pgqueue._tie_loose_ends(1000)),
        ('sweep groups', pgqueue._sweep_groups(1000)),
        ('drop permits', pgqueue._drop_permits());
    ends := pgqueue._forget_ends();
    return query
    values
        ('forget keys', ends.windows),
        ('forget dead jobs', pgqueue._forget_dead());
    perform pgqueue._count();
    perform pgqueue._repair_settings();
    -- As there: for copies of the rows alone.
    perform pgqueue._use_lanes(l.queue) from pgqueue._lanes(0) as l where l.lane <> 0;
    return query
    values
        ('forget batches', ends.batches),
        -- Last, because nobody can read run from here on.
        ('forget runs', pgqueue._forget_runs(pgqueue._is_alone(callers)));
end;
$$;

comment on function pgqueue.maintain() is
'Does all periodic work: recovers expired leases and cancels jobs that may not
begin any more, at most 1000 in all (done: jobs); fires at most 100 schedules
that are due (done: jobs); looks again at jobs and batches that may not have to
wait any more, 1000 of each (done: looks); looks for groups that have jobs to
run but no ticket, among the next 1000 (done: groups); drops the permits of
groups that have had no job for a day (done: permits); deletes at most 100,000
unique_for windows that have ended (done: windows), and at most 10,000 dead jobs
that have been kept for keep_dead (done: jobs) and batches that finished 14 days
ago (done: batches); adds up for metrics what has happened, at most twice a
minute; forgets the ids of jobs that were cancelled, purged or discarded 14 days
ago; empties the tables of run whose days are over (done: tables). Call it every
minute or so, from a worker, cron or psql, as a statement of its own: in a
transaction that may continue it deletes old runs instead, at most 100,000
(done: runs), which locks nobody out but leaves work to VACUUM. Any number may
run at once.
Raises 25001 outside READ COMMITTED.';
-- How much there is, for the views: counted if that is cheap, else estimated.
--
-- A table of up to 16 MB is read whole. In a larger one the jobs are counted along their lanes, so that a file
-- left large by a burst costs nothing; what a lane has beyond some thousands is estimated from a sample of
-- pages. Running jobs are at the beginning of their lanes, and are counted there.
--
-- The log is read in the order of its pages, which is nearly that of time: the first page of a period is found
-- by bisection, and if there are many pages, only every nth is read.

-- The jobs of each queue by state; since when the first, and the first hundredth, of the ready ones have
-- been due; and which workers hold the running ones. Above 16 MB an estimate for a queue with a lane of
-- more than 4,000 jobs, divided by the number of lanes with more than 100.
create or replace function pgqueue._count_jobs()
    returns table (
        queue text, ready bigint, scheduled bigint, running bigint, expired bigint, blocked bigint,
        oldest timestamptz, p99 timestamptz, workers text[], is_estimate boolean
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashagg = on
as $$
#variable_conflict use_column
declare
    moment timestamptz := clock_timestamp();
    pages bigint := pg_relation_size('pgqueue.job') / 8192;
    step int := case when pages > 2048 then pages / 150 else 1 end;
    has_full boolean := exists (select from pgqueue.ticket as t where t.is_full);
begin
    return query
    with walked as materialized (
        select l.hash, l.lane, l.most, w.*
        from pgqueue._lanes(4000) as l
        cross join lateral (
            select j.queue, j.run_at, j.priority, j.group_key, j.worker, j.lease_expires_at, (j.terms).expires_at
            from pgqueue.job as j
            where hashtext(j.queue) = l.hash and (j.priority + 1000 * num_nonnulls(j.group_key)) = l.lane and j.queue >= ''
                and (j.run_at, j.id) >= (l.first, l.first_id)
            order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
            limit l.most + 1
        ) as w
        where step > 1
    ), long as materialized (
        select l.hash, bool_or(l.leased * 10 > l.most * 9) as is_busy
        from (
            select w.hash, w.most, count(w.lease_expires_at) as leased
            from walked as w
            group by w.hash, w.lane, w.most
            having count(*) > w.most
        ) as l
        group by l.hash
    ), met as (
        select w.queue, w.run_at, w.priority, w.group_key, w.worker, w.lease_expires_at, w.expires_at, false as is_sample
        from walked as w
        union all
        select s.*, true
        from (
            -- Not TABLESAMPLE, by which so many pages come only on average; nor at equal distances, which what
            -- comes regularly may have, too.
            select ('(' || h.page || ',0)')::tid as first, ('(' || h.page + 1 || ',0)')::tid as next
            from generate_series(0, pages - 1, step) as n (page)
            cross join lateral (select n.page + (hashint8(n.page) & 2147483647) % step) as h (page)
            where step = 1 or exists (select from long)
        ) as p
        cross join lateral (
            select j.queue, j.run_at, j.priority, j.group_key, j.worker, j.lease_expires_at, (j.terms).expires_at
            from pgqueue.job as j
            where j.ctid >= p.first and j.ctid < p.next
            offset 0
        ) as s
        where step = 1 or hashtext(s.queue) in (select t.hash from long as t)
    ), counted as (
        select
            m.queue collate "C" as queue,
            m.is_sample,
            case when m.is_sample then step else 1 end as weight,
            count(*) filter (where m.state = 'r') as ready,
            count(*) filter (where m.state = 's') as scheduled,
            count(*) filter (where m.state = 'l') as running,
            count(*) filter (where m.state = 'e') as expired,
            count(*) filter (where m.state = 'x') as overdue,
            count(*) filter (where m.state = 'b') as blocked,
            min(m.run_at) filter (where m.state = 'r') as oldest,
            percentile_disc(0.01) within group (order by m.run_at) filter (where m.state = 'r') as p99,
            array_agg(distinct m.worker) filter (where m.state = 'l') as workers
        from (
            select
                a.queue, a.run_at, a.worker, a.is_sample,
                case
                    when a.lease_expires_at > moment then 'l'
                    when a.lease_expires_at is not null then 'e'
                    when a.expires_at <= moment then 'x'
                    when a.run_at = 'infinity' then 'b'
                    when a.run_at > moment then 's'
                    when has_full and a.group_key is not null and exists (
                        select
                        from pgqueue.ticket as t
                        where pgqueue._is_ticket_of(t, a.queue, a.group_key) and t.priority = a.priority and t.is_full
                    ) then 'b'
                    else 'r'
                end::"char" as state
            from met as a
        ) as m
        group by 1, 2
    )
    -- The larger of the two: a sample misses what is rare, and a walk ends before what is far behind.
    select
        c.queue,
        max(c.ready * c.weight), max(c.scheduled * c.weight),
        -- Leased jobs are in front, and close together: a page of the sample would count for too many.
        coalesce(max(c.running) filter (where not c.is_sample and not c.is_busy), max(c.running * c.weight)),
        coalesce(max(c.expired) filter (where not c.is_sample and not c.is_busy), max(c.expired * c.weight))
            + max(c.overdue * c.weight),
        max(c.blocked * c.weight),
        min(c.oldest),
        coalesce(min(c.p99) filter (where c.is_sample), min(c.p99)),
        coalesce(min(c.workers) filter (where not c.is_sample), min(c.workers)),
        c.is_long
    from (
        -- Not joined, which would compare each with each.
        select
            c.*, hashtext(c.queue) in (select t.hash from long as t) as is_long,
            hashtext(c.queue) in (select t.hash from long as t where t.is_busy) as is_busy
        from counted as c
    ) as c
    group by c.queue, c.is_long;
end;
$$;

-- The dead jobs of each queue. An estimate for one with more than 20,000, divided by the number of
-- queues.
create or replace function pgqueue._count_dead()
    returns table (queue text, dead bigint, is_estimate boolean)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_indexonlyscan = on
    set enable_nestloop = on
as $$
#variable_conflict use_column
declare
    pages float8 := pg_relation_size('pgqueue.dead_job') / 8192;
    queues text[];
    most int;
begin
    queues := array(select distinct k.queue from pgqueue._dead_kinds() as k);
    most := greatest(20000 / greatest(cardinality(queues), 1), 100);
    return query
    with counted as materialized (
        select q.name, c.dead
        from unnest(queues) as q (name)
        cross join lateral (
            select count(*) as dead
            from (select from pgqueue.dead_job as d where d.queue = q.name limit most + 1) as d
        ) as c
    ), sample as (
        select d.queue, count(*) * pages / 320 as dead
        from pgqueue.dead_job as d tablesample system (least(100, 32000 / greatest(pages, 1))) repeatable (0)
        where (select max(c.dead) from counted as c) > most
        group by d.queue
    )
    select
        c.name,
        case when c.dead > most then greatest(c.dead, s.dead) else c.dead end::bigint,
        c.dead > most
    from counted as c
    left join sample as s on s.queue = c.name;
end;
$$;

-- The dead jobs by the first line of their error. Beyond 20,000, above 16 MB, an estimate from a sample
-- of 512 pages.
create or replace function pgqueue._dead_errors()
    returns table (
        queue text, kind text, error text, jobs bigint, first_died_at timestamptz, last_died_at timestamptz,
        job_id bigint, is_estimate boolean
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
as $$
declare
    pages float8 := pg_relation_size('pgqueue.dead_job') / 8192;
    -- A few on many pages are all read: a sample would have none of them.
    are_many boolean := (select count(*) > 20000 from (select from pgqueue.dead_job limit 20001) as d);
    sampled float8 := case when pages > 2048 and are_many then 512 / pages else 1 end;
begin
    return query
    select
        d.queue, d.kind, pgqueue._summary(d.error), (count(*) / sampled)::bigint, min(d.died_at), max(d.died_at),
        max(d.id), sampled < 1
    from pgqueue.dead_job as d tablesample system (100 * sampled) repeatable (0)
    group by 1, 2, 3;
end;
$$;

-- The leased jobs. Above 16 MB only those among the first 50,000 of each lane, divided by the number of
-- lanes with more than 100: there are others only if claims by kind have passed over as many.
create or replace function pgqueue._leased()
    returns setof bigint
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    if pg_relation_size('pgqueue.job') <= 16777216 then
        return query select j.id from pgqueue.job as j where j.lease_expires_at is not null;
        return;
    end if;
    return query
    select w.id
    from pgqueue._lanes(50000) as l
    cross join lateral (
        select j.id, j.lease_expires_at
        from pgqueue.job as j
        where hashtext(j.queue) = l.hash and (j.priority + 1000 * num_nonnulls(j.group_key)) = l.lane and j.queue >= ''
            and (j.run_at, j.id) >= (l.first, l.first_id)
        order by hashtext(j.queue), (j.priority + 1000 * num_nonnulls(j.group_key)), j.run_at, j.id
        limit l.most
    ) as w
    where w.lease_expires_at is not null;
end;
$$;

-- The first page of a part of the log with an attempt that finished since then.
create or replace function pgqueue._page_since(part int, since timestamptz)
    returns bigint
    language plpgsql
    stable
as $$
declare
    first bigint := 0;
    last bigint := pg_relation_size(('pgqueue.run_' || part)::regclass) / 8192;
    middle bigint;
begin
    while first < last loop
        middle := (first + last) / 2;
        if (
            select max(r.finished_at)
            from pgqueue.run as r
            where r.slot = part
                and r.ctid >= ('(' || middle || ',0)')::tid and r.ctid < ('(' || middle + 1 || ',0)')::tid
        ) < since then
            first := middle + 1;
        else
            last := middle;
        end if;
    end loop;
    return first;
end;
$$;

-- The attempts that have finished since then; if they fill more than this many pages, those on a quarter
-- to half as many, every weight-th page, and, up to twice as many pages, all those of the queues that
-- have none there. done and failed are the weight of one that completed, or that failed or expired, else
-- 0.
create or replace function pgqueue._recent_runs(since timestamptz, most int default 400)
    returns table (
        queue text, kind text, worker text, job_id bigint, finished_at timestamptz, waited interval,
        taken interval, error text, weight int, done int, failed int
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    parts int[];
    firsts bigint[];
    lasts bigint[];
    pages bigint;
    step int;
    failures text[] := array(select o.name from pgqueue._outcome as o where o.is_failure);
begin
    select array_agg(p.part), array_agg(p.first), array_agg(p.last), coalesce(sum(p.last - p.first + 1), 0)
    into parts, firsts, lasts, pages
    from (
        select
            s.part,
            pgqueue._page_since(s.part, since) as first,
            pg_relation_size(('pgqueue.run_' || s.part)::regclass) / 8192 - 1 as last
        from generate_series(0, 15) as s (part)
    ) as p
    where p.first <= p.last;
    -- A power of two: a page that one query reads is read by the next one, too.
    step := case when pages > most then 2 ^ ceil(log(2, pages * 2.0 / most)) else 1 end;
    return query
    with sampled as materialized (
        select r.*
        from unnest(parts, firsts, lasts) as p (part, first, last)
        cross join lateral generate_series((p.first + step - 1) / step * step, p.last, step) as n (page)
        cross join lateral (
            select
                r.queue, r.kind, r.worker, r.job_id, r.finished_at, r.waited, r.taken, r.error, r.outcome,
                step as weight
            from pgqueue.run as r
            where r.slot = p.part and r.ctid >= ('(' || n.page || ',0)')::tid
                and r.ctid < ('(' || n.page + 1 || ',0)')::tid and r.finished_at >= since
            offset 0
        ) as r
        where step > 1
    )
    select
        a.queue, a.kind, a.worker, a.job_id, a.finished_at, a.waited, a.taken, a.error, a.weight,
        (a.outcome = 'completed')::int * a.weight, (a.outcome = any (failures))::int * a.weight
    from (
        select s.* from sampled as s
        union all
        -- By the index, for vacuum may have made room for some on pages before.
        select r.queue, r.kind, r.worker, r.job_id, r.finished_at, r.waited, r.taken, r.error, r.outcome, 1
        from pgqueue.run as r
        left join (select distinct s.queue from sampled as s) as met on met.queue = r.queue
        where r.finished_at >= since and pages <= 2 * most and met.queue is null
    ) as a (queue, kind, worker, job_id, finished_at, waited, taken, error, outcome, weight);
end;
$$;

-- The first line of an error with % for quoted text, addresses, paths and anything with a digit: the same
-- for errors of one cause, and an argument for redrive.
create or replace function pgqueue._error_like(error text)
    returns text
    language plpgsql
    immutable
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Until what it says for itself is escaped. No backslash but in E'': else the session's
    -- standard_conforming_strings would decide what it means.
    mask text := chr(1);
    pattern text := pgqueue._summary(error);
begin
    -- Quoted text, but not what an apostrophe and the next one enclose.
    pattern := regexp_replace(
        pattern, '(?<![[:alnum:]_])(''[^'']*''|"[^"]*"|`[^`]*`)(?![[:alnum:]_])', mask, 'g'
    );
    -- E-mail addresses, URLs, paths; then whatever has a digit: 42, job42, 0xff, 10.0.0.1:5432, a UUID.
    pattern := regexp_replace(
        pattern,
        '[[:alnum:]_.+-]+@[[:alnum:]_-]+[.[:alnum:]_-]*|[[:alnum:]_]+://[^[:space:]]+|(?<![[:alnum:]_])/[^[:space:]]+',
        mask, 'g'
    );
    pattern := regexp_replace(pattern, '[[:alnum:]_:.-]*[[:digit:]][[:alnum:]_:.-]*', mask, 'g');
    pattern := regexp_replace(pattern, E'([\\\\%_])', E'\\\\\\1', 'g');
    return regexp_replace(pattern, mask || '([[:space:]]*' || mask || ')*', '%', 'g');
end;
$$;

-- The last finished attempt of a job, as far as run remembers; else nulls.
create or replace function pgqueue._last_run(job_id bigint)
    returns pgqueue.run
    language plpgsql
    stable
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = on
as $$
begin
    return (
        select r
        from pgqueue.run as r
        where r.job_id = _last_run.job_id
        -- A claim may end the lease and, past expires_at, the job at the same moment.
        order by r.finished_at desc, r.attempt desc, r.outcome = 'expired'
        limit 1
    );
end;
$$;
-- The views: what dashboards and people on call read. They have no payloads, take no locks and work on a
-- standby. Counts and estimates are in module measure. The clock is clock_timestamp(), read once for a query:
-- now() stands still in a long transaction, and its own jobs would look scheduled.

create or replace view pgqueue.jobs as
select
    j.id, j.queue, j.kind,
    case
        when j.lease_expires_at > c.moment then 'running'
        when j.lease_expires_at is not null or (j.terms).expires_at <= c.moment then 'expired'
        when j.run_at = 'infinity' then 'blocked'
        when j.run_at > c.moment then 'scheduled'
        when j.group_key is not null and exists (
            select
            from pgqueue.ticket as t
            where hashtextextended(t.group_key, hashtext(t.queue)) = hashtextextended(j.group_key, hashtext(j.queue))
                and t.priority = j.priority and t.queue = j.queue and t.group_key = j.group_key and t.is_full
        ) then 'blocked'
        else 'ready'
    end as state,
    j.priority,
    nullif(j.run_at, 'infinity') as run_at,
    j.enqueued_at, j.attempt, j.max_attempts, j.worker, j.claimed_at, j.lease_expires_at,
    j.cancelled_at, j.unique_key, j.group_key,
    j.errors -> -1 ->> 'error' as last_error,
    (j.progress).done, (j.progress).total, (j.progress).message,
    round((j.progress).done / nullif(extract(epoch from (j.progress).told_at - j.claimed_at), 0), 3) as rate,
    -- Unknown before a hundred thousandth is done.
    case when (j.progress).total < (j.progress).done * 100000 then greatest(
        ((j.progress).told_at - j.claimed_at) * ((j.progress).total / (j.progress).done - 1)::float8
            - (c.moment - (j.progress).told_at),
        interval '0'
    ) end as time_left,
    (j.terms).expires_at, (j.terms).batch_id
from (select clock_timestamp() as moment) as c
cross join pgqueue.job as j;

comment on view pgqueue.jobs is
'Every waiting or running job, without its payload: state is scheduled, ready
(due, paused or not), running, expired (its lease has expired, or nobody began
it by its expires_at; a claim or maintain ends that) or blocked (it waits for
other jobs, or its group is full or at its rate). One id is found by an index;
without it the whole table is read.
state: scheduled, ready, running, expired or blocked, by the clock of this
query.
run_at: The job runs no earlier; null while it waits for other jobs.
last_error: Why the last failed attempt failed, or a worker has put the job off
since; null for neither.
done: How much the current attempt has reported as done; null if nothing.
total: How much there is to do, as reported.
message: What it is doing, as reported.
rate: How much it has done per second, from its claim to its last report.
time_left: How much longer it takes at that rate.
expires_at: From then on no attempt begins; null for never.
batch_id: The batch it belongs to; null for none.';

-- Whether a queue is paused is found by a join: a reader of the view may not call _in_force().
create or replace view pgqueue.queues as
with counted as materialized (
    select * from pgqueue._count_jobs()
), buried as materialized (
    select * from pgqueue._count_dead()
), recent as materialized (
    select
        r.queue collate "C" as queue,
        max(r.weight) > 1 as is_estimate,
        -- Of more than twice as many pages as are read, it reads each eighth or fewer, and may miss a queue.
        max(r.weight) >= 8 as misses_some,
        sum(r.done) as done,
        coalesce(sum(r.done) filter (where r.finished_at >= s.minutes), 0) as done_5m,
        coalesce(sum(r.done) filter (where r.finished_at >= s.minute), 0) as done_1m,
        sum(r.failed) as failed,
        coalesce(sum(r.failed) filter (where r.finished_at >= s.minutes), 0) as failed_5m,
        coalesce(sum(r.failed) filter (where r.finished_at >= s.minute), 0) as failed_1m,
        -- Intervals take three times as long to sort.
        percentile_disc(array[0.5, 0.99]) within group (order by date_part('epoch', r.waited))
            filter (where r.worker is not null) as waited,
        array_agg(distinct r.worker) filter (where r.finished_at >= s.minutes and r.worker is not null) as workers
    from (
        select
            clock_timestamp() - interval '1 hour', clock_timestamp() - interval '5 minutes',
            clock_timestamp() - interval '1 minute'
        offset 0
    ) as s (hour, minutes, minute)
    cross join lateral pgqueue._recent_runs(s.hour) as r
    group by 1
), parked as (
    -- Queues may share a lock, and anybody could hold it: only who has said so serves the queue.
    select s.queue, count(distinct l.pid) as sessions
    from pg_locks as l
    join pgqueue.service as s on s.pid = l.pid and hashtext(s.queue) & 255 = l.objid::int
    where l.locktype = 'advisory' and l.classid = 7366514 and l.objsubid = 2 and l.mode = 'ShareLock' and l.granted
        and l.database = (select d.oid from pg_database as d where d.datname = current_database())
    group by s.queue
)
select
    k.queue,
    coalesce(c.ready, 0) as ready,
    coalesce(c.scheduled, 0) as scheduled,
    coalesce(c.running, 0) as running,
    coalesce(c.expired, 0) as expired,
    coalesce(c.blocked, 0) as blocked,
    coalesce(d.dead, 0) as dead,
    coalesce(c.is_estimate or d.is_estimate or r.is_estimate, false) or r.queue is null and e.misses_some as is_estimate,
    clock_timestamp() - c.oldest as oldest_wait,
    clock_timestamp() - c.p99 as p99_wait,
    coalesce(own.paused, shared.paused, false) as paused,
    case when num_nonnulls(c.workers, r.workers) > 0
        then (select count(distinct n.name) from unnest(c.workers || r.workers) as n (name)) else 0
    end as workers,
    coalesce(p.sessions, 0) as parked,
    case
        when coalesce(c.ready, 0) = 0 then interval '0'
        when r.done_5m > 0 then interval '1 second' * (300.0 * c.ready / r.done_5m)::float8
    end as time_to_empty,
    justify_hours(make_interval(secs => r.waited[1])) as p50_wait_last_hour,
    justify_hours(make_interval(secs => r.waited[2])) as p99_wait_last_hour,
    coalesce(r.done, 0) as finished_last_hour,
    coalesce(r.failed, 0) as failed_last_hour,
    round(coalesce(r.done_1m, 0) / 60.0, 3) as rate_1m,
    round(coalesce(r.done_5m, 0) / 300.0, 3) as rate_5m,
    round(coalesce(r.done, 0) / 3600.0, 3) as rate_1h,
    round(r.failed_1m::numeric / nullif(r.done_1m + r.failed_1m, 0), 3) as failure_rate_1m,
    round(r.failed_5m::numeric / nullif(r.done_5m + r.failed_5m, 0), 3) as failure_rate_5m,
    round(r.failed::numeric / nullif(r.done + r.failed, 0), 3) as failure_rate_1h
from (
    select c.queue from counted as c
    union
    select d.queue from buried as d
    union
    select r.queue from recent as r
    union
    select q.name from pgqueue.queue as q where q.name <> ''
    union
    select s.queue from pgqueue.schedule as s
) as k
left join counted as c on c.queue = k.queue
left join buried as d on d.queue = k.queue
left join recent as r on r.queue = k.queue
cross join (select coalesce(bool_or(r.misses_some), false) as misses_some from recent as r) as e
left join parked as p on p.queue = k.queue
left join pgqueue.queue as own on own.name = k.queue and own.kind = '' and own.group_key = ''
left join pgqueue.queue as shared on shared.name = '' and shared.kind = '' and shared.group_key = '';

comment on view pgqueue.queues is
'One row for each queue that has jobs, dead jobs, settings, schedules, or runs in
the last hour. Counts while the table of jobs is small (16 MB), else reads an
index and estimates (see is_estimate); beyond 400 pages of runs, some 26,000,
only a sample is read, and beyond 800 pages a queue that has few of them may be
missing. Takes a few tens of milliseconds, however many jobs there are; with
30,000 queues, or 1,000 of hundreds of jobs each, some tenths of a second.
queue: The queue.
ready: Jobs that are due, paused or not.
scheduled: Jobs that are not due yet, including retries.
running: Jobs under a valid lease.
expired: Jobs whose lease has expired, or that were not begun in time. Alert if
this stays above 0.
blocked: Jobs that wait for something other than time.
dead: Dead jobs. Alert if this grows.
is_estimate: Whether any number of this row is an estimate.
oldest_wait: How long the oldest ready job has been due; null if none is. Alert
on this.
p99_wait: The wait that 1 % of the ready jobs exceed.
paused: Whether claims get nothing, except kinds or groups that were resumed;
what is paused by kind or group is in the view settings.
workers: Workers that hold one of its jobs, or held one that ended in the last 5
minutes.
parked: Sessions that sleep until notified of its jobs.
time_to_empty: How long the ready jobs take at the rate of the last five
minutes, if none are added; null if none completed.
p50_wait_last_hour: Half of the attempts of the last hour began at most this
long after being due.
p99_wait_last_hour: 99 % of them did. Alert on this.
finished_last_hour: Attempts completed in the last hour.
failed_last_hour: Attempts failed or expired in the last hour.
rate_1m: Jobs completed per second, over the last minute.
rate_5m: The same over five minutes.
rate_1h: The same over an hour.
failure_rate_1m: The fraction of attempts of the last minute that failed or
expired, 0 to 1; null if none ended.
failure_rate_5m: The same over five minutes.
failure_rate_1h: The same over an hour.';

create or replace view pgqueue.running as
select
    j.id, j.queue, j.kind, j.worker,
    clock_timestamp() - j.claimed_at as running_for,
    j.lease_expires_at - clock_timestamp() as lease_left,
    j.attempt, j.max_attempts, j.cancelled_at, j.done, j.total, j.message, j.rate, j.time_left
from pgqueue._leased() as l (id)
join pgqueue.jobs as j on j.id = l.id
where j.lease_expires_at is not null
order by j.claimed_at;

comment on view pgqueue.running is
'The leased jobs, the longest-running first. Reads them all while the table of
jobs is small (16 MB), else the first 50,000 jobs of each lane, divided by the
number of lanes with more than 100: all are there, unless claims by kind have
passed over more.
running_for: Time since it was claimed.
lease_left: Time until the lease expires; negative once it has, and the worker
is probably dead.';

create or replace view pgqueue.workers as
with known as (
    select
        w.worker, array_agg(distinct w.queue order by w.queue) as queues, count(w.held_since) as held,
        min(w.held_since) as held_since, max(w.claimed_at) as claimed_at, max(w.finished_at) as finished_at,
        sum(w.done) as done, sum(w.failed) as failed
    from (
        select
            j.worker, j.queue, j.claimed_at, j.claimed_at as held_since, null::timestamptz as finished_at,
            0 as done, 0 as failed
        from pgqueue._leased() as l (id)
        join pgqueue.job as j on j.id = l.id
        where j.lease_expires_at > clock_timestamp()
        union all
        select r.worker, r.queue, r.finished_at - r.taken, null, r.finished_at, r.done, r.failed
        from pgqueue._recent_runs(clock_timestamp() - interval '1 hour') as r
        where r.worker is not null
    ) as w
    group by w.worker
), session as (
    select
        substr(a.application_name, 9) as name, count(*) as sessions,
        bool_or(exists (
            select from pg_locks as l
            where l.pid = a.pid and l.locktype = 'advisory' and l.classid = 7366514 and l.mode = 'ShareLock'
        )) as is_parked
    from pg_stat_activity as a
    where a.datname = current_database() and a.application_name like 'pgqueue %'
    group by a.application_name
)
select
    coalesce(k.worker, s.name) as worker,
    coalesce(k.queues, '{}') as queues,
    coalesce(k.held, 0) as held,
    clock_timestamp() - k.held_since as longest,
    k.claimed_at as last_claimed_at,
    k.finished_at as last_finished_at,
    coalesce(k.done, 0) as finished_last_hour,
    coalesce(k.failed, 0) as failed_last_hour,
    coalesce(s.sessions, 0) as sessions,
    coalesce(s.is_parked, false) as parked
from known as k
full join session as s on s.name = regexp_replace(right(k.worker, 55), '[^ -~]', '?', 'g')
order by 1;

comment on view pgqueue.workers is
'The workers that hold jobs, held one that ended in the last hour, or are
connected. Reads what running reads, and as many runs as queues.
worker: The name it claims with. Python workers connect under it: their
application_name is pgqueue and its last 55 characters, with ? for what is not
ASCII.
queues: The queues of these jobs.
held: How many jobs it holds, under a valid lease.
longest: How long it has held the first of them.
last_claimed_at: When it last claimed one of them.
last_finished_at: When the last one ended, in the last hour; including by an
expired lease.
finished_last_hour: Attempts completed in the last hour.
failed_last_hour: Attempts failed or expired in the last hour.
sessions: Connections to this database under its name; on a standby, those to
the standby.
parked: Whether one of them sleeps until it is notified of jobs.';

create or replace view pgqueue.kinds as
select
    r.queue, r.kind,
    sum(r.weight) as runs,
    sum(r.failed) as failures,
    -- As in queues.
    justify_hours(make_interval(secs => percentile_disc(0.5) within group (order by date_part('epoch', r.taken))))
        as p50_taken,
    justify_hours(make_interval(secs => percentile_disc(0.99) within group (order by date_part('epoch', r.taken))))
        as p99_taken,
    max(r.finished_at) as last_finished_at
from pgqueue._recent_runs('-infinity', 2000) as r
where r.done + r.failed > 0
group by r.queue, r.kind;

comment on view pgqueue.kinds is
'What each kind of job did in each queue, over all the days that run covers.
Beyond 2,000 pages of runs, some 130,000, only a sample is read: a kind that
rarely ran may be missing.
queue: The queue.
kind: The kind.
runs: Attempts that completed, failed or expired.
failures: Those that failed or whose lease expired.
p50_taken: Half of the attempts took at most this long.
p99_taken: 99 % of the attempts took at most this long.
last_finished_at: When one last finished, of those that were read.';

create or replace view pgqueue.throughput as
select
    date_trunc('minute', r.finished_at) as minute,
    r.queue,
    sum(r.done) as finished,
    sum(r.failed) as failed,
    percentile_disc(0.5) within group (order by r.waited) as p50_waited,
    percentile_disc(0.99) within group (order by r.waited) as p99_waited,
    percentile_disc(0.5) within group (order by r.taken) as p50_taken,
    percentile_disc(0.99) within group (order by r.taken) as p99_taken
from pgqueue._recent_runs(date_trunc('minute', clock_timestamp()) - interval '59 minutes', 2000) as r
where r.worker is not null
group by 1, 2
order by 1, 2;

comment on view pgqueue.throughput is
'What each queue did in each of the last 60 minutes in which it did anything; the
current minute is not over. Beyond 2,000 pages of runs, some 130,000, only a
sample is read.
minute: When the minute began.
queue: The queue.
finished: Attempts completed.
failed: Attempts failed or expired.
p50_waited: Half of them began at most this long after they were due.
p99_waited: 99 % of them did.
p50_taken: Half of them took at most this long.
p99_taken: 99 % of them did.';

create or replace view pgqueue.hours as
select
    date_trunc('hour', r.finished_at) as hour,
    r.queue,
    sum(r.done) as finished,
    sum(r.failed) as failed,
    percentile_disc(0.99) within group (order by r.waited) as p99_waited,
    percentile_disc(0.99) within group (order by r.taken) as p99_taken,
    bool_or(r.weight > 1) as is_estimate
from pgqueue._recent_runs(date_trunc('hour', clock_timestamp()) - interval '167 hours', 1000) as r
where r.worker is not null
group by 1, 2
order by 1, 2;

comment on view pgqueue.hours is
'What each queue did in each hour of the last week in which it did anything, as
far back as run goes; the current hour is not over. Beyond 1,000 pages of runs,
some 65,000, only a sample is read: of a queue that did little, hours may be
missing.
hour: When the hour began.
queue: The queue.
finished: Attempts completed.
failed: Attempts failed or expired.
p99_waited: 99 % of them began at most this long after they were due.
p99_taken: 99 % of them took at most this long.
is_estimate: Whether only a sample was read.';

create or replace view pgqueue.failures as
select
    f.queue, f.kind, f.error_like,
    sum(f.failures)::bigint as failures,
    min(f.first_at) as first_at,
    max(f.last_at) as last_at,
    (array_agg(f.job_id order by f.last_at desc, f.job_id desc))[1] as sample_id,
    (array_agg(f.error order by f.last_at desc, f.job_id desc))[1] as sample_error
from (
    select
        r.queue, r.kind, r.error, pgqueue._error_like(r.error) as error_like,
        sum(r.failed) as failures, min(r.finished_at) as first_at, max(r.finished_at) as last_at,
        max(r.job_id) as job_id
    from pgqueue._recent_runs(clock_timestamp() - interval '1 day', 1000) as r
    where r.failed > 0
    group by r.queue, r.kind, r.error
) as f
group by f.queue, f.kind, f.error_like
order by failures desc, f.queue, f.kind, f.error_like;

comment on view pgqueue.failures is
'The attempts that failed or expired in the last day, by kind and error, the most
frequent first. Beyond 1,000 pages of runs, some 65,000, only a sample is read:
rare errors may be missing.
queue: The queue.
kind: The kind.
error_like: The first line of the errors, with % where they differ: numbers,
ids, quoted text, addresses and paths.
failures: How many attempts ended like this.
first_at: When the first did, in the last day.
last_at: When the last did.
sample_id: One of these jobs.
sample_error: The first line of such an error.';

create or replace view pgqueue.dead as
select
    e.queue, e.kind, e.error_like,
    sum(e.jobs)::bigint as jobs,
    bool_or(e.is_estimate) as is_estimate,
    min(e.first_died_at) as first_died_at,
    max(e.last_died_at) as last_died_at,
    (array_agg(e.job_id order by e.last_died_at desc, e.job_id desc))[1] as sample_id,
    (array_agg(e.error order by e.last_died_at desc, e.job_id desc))[1] as sample_error
from (select d.*, pgqueue._error_like(d.error) as error_like from pgqueue._dead_errors() as d) as e
group by e.queue, e.kind, e.error_like
order by jobs desc, e.queue, e.kind, e.error_like;

comment on view pgqueue.dead is
'The dead jobs by kind and error, the most frequent first. Beyond 20,000, above
16 MB, only a sample of 512 pages is read.
queue: The queue.
kind: The kind.
error_like: The first line of the errors, with % where they differ: an argument
for redrive and discard_many.
jobs: How many died like this.
is_estimate: Whether only a sample was read: jobs is an estimate, rare errors
are missing.
first_died_at: When the first did.
last_died_at: When the last did.
sample_id: One of them.
sample_error: The first line of such an error.';

create or replace view pgqueue.stuck as
select
    j.id, j.queue, j.kind, j.worker, p.problem,
    clock_timestamp() - p.since as stuck_for,
    j.attempt, j.max_attempts, j.last_error
from (
    select j.*
    from pgqueue._leased() as l (id)
    join pgqueue.jobs as j on j.id = l.id
    -- What is usual is dear to know, and needed for few.
    where least(j.lease_expires_at, j.cancelled_at, j.claimed_at + interval '9 minutes')
        < clock_timestamp() - interval '1 minute'
    offset 0
) as j
left join pgqueue.kinds as k on k.queue = j.queue and k.kind = j.kind
cross join lateral (
    -- The first that applies.
    select c.problem, c.since
    from (
        values
            (1, 'expired', j.lease_expires_at, interval '1 minute'),
            (2, 'cancelling', j.cancelled_at, interval '1 minute'),
            (3, 'slow', j.claimed_at, greatest(interval '10 minutes', 10 * k.p99_taken))
    ) as c (place, problem, since, patience)
    where c.since < clock_timestamp() - c.patience
    order by c.place
    limit 1
) as p
order by stuck_for desc;

comment on view pgqueue.stuck is
'The leased jobs that need a look, the longest first. Reads what running reads,
and as many runs as kinds. For waiting jobs, why() says why they do not run.
problem: expired: its lease expired more than a minute ago, and nobody has
claimed or called maintain since. cancelling: it was asked to stop more than a
minute ago. slow: it has run for ten minutes, and ten times as long as 99 % of
its kind.
stuck_for: Time since its lease expired, it was asked to stop, or it was
claimed.';

-- The defaults by the list of settings, because a reader of the view may not call _defaults().
create or replace view pgqueue.settings as
select
    nullif(c.name, '') as queue,
    nullif(c.kind, '') as kind,
    nullif(c.group_key, '') as group_key,
    s.setting, s.value, s.set_for
from (
    select q.name, q.kind, q.group_key from pgqueue.queue as q
    union
    select '', '', ''
) as c
cross join lateral (
    select distinct on (e.key) e.key as setting, e.value, r.set_for
    from (
        select
            to_jsonb(q) - '{name,kind,group_key}'::text[]
                - case when q.kind || q.group_key = '' and c.kind || c.group_key <> ''
                    -- What a queue has besides those of its kinds and groups.
                    then '{max_running,rate_limit,rate_period}'::text[]
                    else '{}'
                end,
            case
                when q.kind <> '' and q.group_key <> '' then 'kind and group'
                when q.kind <> '' then 'kind'
                when q.group_key <> '' then 'group'
                when q.name <> '' then 'queue'
                else 'all queues'
            end || case when q.name = '' and q.kind || q.group_key <> '' then ' in all queues' else '' end,
            array[q.group_key <> '', q.group_key <> '*', q.kind <> '', q.name <> '']
        from pgqueue.queue as q
        where q.name in ('', c.name) and q.kind in ('', c.kind)
            and q.group_key in ('', case when c.group_key <> '' then '*' end, c.group_key)
        union all
        select
            to_jsonb(d) - '{name,kind,group_key}'::text[],
            'default',
            '{}'
        from jsonb_populate_record(
            null::pgqueue.queue, (select jsonb_object_agg(s.name, s.fallback) from pgqueue._setting as s)
        ) as d
    ) as r (settings, set_for, narrowness)
    cross join lateral jsonb_each_text(r.settings) as e
    where e.value is not null or r.set_for = 'default'
    order by e.key, r.narrowness desc
) as s
order by c.name, c.group_key, c.kind, s.setting;

comment on view pgqueue.settings is
'Every setting in force for all queues (the first rows, where queue is null) and
for each queue, kind or group with settings of its own, and where it was set.
For what is not listed the wider level applies. Reads a small table.
queue: The queue; null for all.
kind: The kind; null for all.
group_key: The group; null for all.
setting: The setting, as an argument of configure, or paused.
value: What is in force; null for no limit.
set_for: The most specific level at which it was set: kind and group, group,
kind (each of this queue, or followed by "in all queues"), queue, all queues or
default.';

create or replace view pgqueue.batches as
select
    b.id, b.queue,
    coalesce(b.kind, b.queue) as kind,
    case when b.finished_at is not null then 'finished' when b.closed_at is not null then 'closed' else 'open' end
        as state,
    b.created_at, b.closed_at, b.finished_at,
    coalesce(b.finished_at, clock_timestamp()) - b.created_at as age,
    coalesce(w.waiting, 0) as waiting,
    coalesce(w.running, 0) as running,
    coalesce(b.completed, t.jobs - t.dead - t.cancelled - w.waiting - w.running, 0) as completed,
    coalesce(b.dead, t.dead, 0) as dead,
    coalesce(b.cancelled, t.cancelled, 0) as cancelled,
    b.callback_id, b.group_key, b.headers
from pgqueue.batch as b
left join lateral (
    select sum(n.jobs) as jobs, sum(n.dead) as dead, sum(n.cancelled) as cancelled, array_agg(distinct n.part) as parts
    from pgqueue.tally as n
    where n.batch_id = b.id
) as t on b.finished_at is null
left join lateral (
    select
        count(*) filter (where j.lease_expires_at is null) as waiting,
        count(*) filter (where j.lease_expires_at is not null) as running
    from unnest(t.parts) as p (part)
    join pgqueue.job as j on j.id between p.part << 10 and (p.part << 10) + 1023 and (j.terms).batch_id = b.id
) as w on b.finished_at is null
order by b.id;

comment on view pgqueue.batches is
'The batches, for 14 days after they have finished, and the states of their jobs:
those of an unfinished batch are counted.
id: What create_batch returned.
kind: The kind of its callback.
state: open; closed: it finishes when its jobs have ended; finished: its
callback has been enqueued.
age: How long ago it was created; for a finished one, how long it took.
waiting: Jobs that wait.
running: Jobs that are leased.
completed: Jobs that completed.
dead: Jobs that died, and were not redriven before it finished.
cancelled: Jobs that were cancelled, or purged.';

-- Jobs have ids between that of their batch and that of its callback: all three come from one sequence.
create or replace view pgqueue.batch_jobs as
with part as not materialized (
    select n.batch_id, n.part << 10 as first, (n.part << 10) + 1023 as last
    from pgqueue.tally as n
    group by n.batch_id, n.part
)
select p.batch_id, j.id, j.queue, j.kind, j.state, j.attempt
from part as p
-- A part at a time: the planner may take the part for large, and then reads the whole table.
cross join lateral (select * from pgqueue.jobs as j where j.id between p.first and p.last offset 0) as j
where j.batch_id = p.batch_id
union all
select r.batch_id, d.id, d.queue, d.kind, 'dead', d.attempt
from (
    select p.* from part as p
    union all
    select b.id, b.id, b.callback_id from pgqueue.batch as b where b.finished_at is not null
) as r
cross join lateral (
    select d.*, (d.terms).batch_id
    from pgqueue.dead_job as d
    where d.id between r.first and r.last
    offset 0
) as d
where d.batch_id = r.batch_id;

comment on view pgqueue.batch_jobs is
'The jobs of batches, but for those that completed or were cancelled. Ask for
those of one batch_id: they are found by their ids.
batch_id: The batch.
state: As in jobs, or dead.';

create or replace view pgqueue.dependencies as
select d.job_id, d.waiter_id, d.runs_if_dead
from pgqueue.dependency as d;

comment on view pgqueue.dependencies is
'Which jobs wait for which others to end. Found by either id.';

-- A function, because it is stable: a query without last_state does not look for it.
-- The state of a waiting or running job, dead, or its outcome in run; null if it is no longer known.
create or replace function pgqueue._last_state(job_id bigint)
    returns text
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return coalesce(
        (select j.state from pgqueue.jobs as j where j.id = _last_state.job_id),
        (select 'dead' from pgqueue.dead_job as d where d.id = _last_state.job_id),
        (pgqueue._last_run(job_id)).outcome
    );
end;
$$;

create or replace view pgqueue.schedules as
select
    s.name, s.queue,
    coalesce(s.kind, s.queue) as kind,
    s.cron, s.every, s.timezone, s.catch_up, s.jitter,
    s.is_paused as paused,
    nullif(case when not s.is_paused then s.next_slot end, 'infinity') as next_slot,
    s.last_slot, s.last_job_id,
    case when s.last_job_id is not null then pgqueue._last_state(s.last_job_id) end as last_state,
    s.problem, s.group_key, s.headers
from pgqueue.schedule as s
order by s.name;

comment on view pgqueue.schedules is
'The recurring jobs, with the last and the next slot of each. last_state costs an
index look-up, in run if the job has ended; omit it for thousands.
kind: The kind of its jobs.
paused: Whether it enqueues no jobs.
next_slot: The next slot; null when it is paused. If it is in the past by more
than jitter, there is a problem, or neither a worker nor maintain is running.
last_state: What happened to that job: its state in jobs while it waits or runs,
dead, or its outcome in run; null if it is no longer known.';

-- A table of more than 8 MB is not counted. The log is not read to find its beginning: rows come in
-- the order of their time, so the first pages of its parts have the oldest.
create or replace view pgqueue.retention as
with size as (
    select
        t.what,
        sum(pg_total_relation_size(c.oid)) as bytes,
        sum(pg_relation_size(c.oid)) > 8388608 as is_large,
        -- As the planner does it: as many rows per page as at the last ANALYZE, of any part.
        (sum(pg_relation_size(c.oid)) / 8192
            * sum(c.reltuples) filter (where c.relpages > 0) / nullif(sum(c.relpages), 0))::bigint as estimate
    from (
        values ('jobs', 'pgqueue.job'::regclass), ('dead jobs', 'pgqueue.dead_job'),
            ('runs', 'pgqueue.run'), ('windows', 'pgqueue.recent_key')
    ) as t (what, root)
    join pg_class as c
        on c.oid = t.root or c.oid in (select i.inhrelid from pg_inherits as i where i.inhparent = t.root)
    group by t.what
)
select
    s.what,
    case
        when s.is_large then s.estimate
        -- More rows than 8 MB have room for: without a limit the planner would compile what never runs.
        when s.what = 'jobs' then (select count(*) from (select from pgqueue.job limit 300000) as j)
        when s.what = 'dead jobs' then (select count(*) from (select from pgqueue.dead_job limit 300000) as d)
        when s.what = 'runs' then (select count(*) from (select from pgqueue.run limit 300000) as r)
        else (select count(*) from (select from pgqueue.recent_key limit 300000) as k)
    end as rows,
    s.bytes::bigint as bytes,
    case s.what
        when 'jobs' then (select j.enqueued_at from pgqueue.job as j order by j.id limit 1)
        when 'dead jobs' then (select min(d.oldest) from pgqueue._dead_kinds() as d)
        -- Rollbacks leave pages without rows.
        when 'runs' then case when s.is_large
            then (select min(r.finished_at) from pgqueue.run as r where r.ctid < '(64,0)')
            else (select min(r.finished_at) from (select r.finished_at from pgqueue.run as r limit 300000) as r)
        end
    end as oldest,
    case s.what
        when 'dead jobs' then shared.keep_dead
        when 'runs' then make_interval(days => coalesce(
            shared.keep_runs, (select s.fallback::int from pgqueue._setting as s where s.name = 'keep_runs')
        ))
    end as kept_for
from size as s
left join pgqueue.queue as shared on shared.name = '' and shared.kind = '' and shared.group_key = ''
order by s.bytes desc;

comment on view pgqueue.retention is
'What is kept, how large it is, and for how long: jobs, dead jobs, runs, and the
windows of unique_for. The largest first.
what: jobs, dead jobs, runs or windows.
rows: How many; above 8 MB an estimate by the last ANALYZE, null without one.
bytes: On disk, with indexes.
oldest: When the oldest job was enqueued, dead job died, or run finished; null
for windows.
kept_for: keep_dead or keep_runs of all queues; those of a queue, kind or group
are in the view settings. null: for ever, or while it is needed.';

create or replace function pgqueue.version()
    returns text
    language sql
    immutable
    parallel safe
    set search_path = pg_catalog, pg_temp
as $$ select '0.2.0' $$;

comment on function pgqueue.version() is 'The version of the installed functions.';

-- The comment of a view ends with a line "column: ..." for each column of its own. A column that it does not
-- name has the comment of that of the same name which it shows.
do $do$
declare
    the_view record;
    the_column record;
begin
    for the_view in
        select c.oid, c.oid::regclass as name, obj_description(c.oid, 'pg_class') as text
        from pg_class as c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v'
        order by c.oid
    loop
        for the_column in
            select a.attname as name, coalesce(
                (regexp_match(the_view.text, E'\n' || a.attname || E': (.*?)(?=\n[a-z0-9_]+: |$)'))[1],
                col_description(a.attrelid, a.attnum),
                (
                    select col_description(s.attrelid, s.attnum)
                    from pg_rewrite as r
                    join pg_depend as d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid
                    join pg_attribute as s on s.attrelid = d.refobjid and s.attnum = d.refobjsubid
                    where r.ev_class = a.attrelid and d.refclassid = 'pg_class'::regclass and s.attname = a.attname
                    order by s.attrelid
                    limit 1
                )
            ) as text
            from pg_attribute as a
            where a.attrelid = the_view.oid
        loop
            execute format('comment on column %s.%I is %L', the_view.name, the_column.name, the_column.text);
        end loop;
        execute format(
            'comment on view %s is %L', the_view.name, regexp_replace(the_view.text, E'\n[a-z0-9_]+: .*', '')
        );
    end loop;
end;
$do$;
-- One job: its progress, what happened to it, and waiting for its end.
--
-- A waiting session listens on the channel pgqueue, and holds shared session locks of the class 7366516:
-- (7366516, 256) for any job, and (7366516, the job's id modulo 256). The end of jobs first deletes
-- them, then checks whether these locks are free (the first of them, and only if that is taken the
-- others), and sends a notification only if not. It checks only while a cell says that somebody has waited
-- within the last minute: await() writes it first of all. So nobody pays for it while nobody waits.
--
-- await() takes the locks first, then looks for the job, with a new snapshot. No end is missed:
--   - An end that checks the locks after that finds them, and its notification comes with its commit.
--   - One that checked before had deleted before. If that has committed, the job is gone. If not, the
--     version still visible has been deleted, or updated before the last one was deleted: its xmax
--     is set, by a transaction other than the one that made it. (A claim locks what it updates, and
--     leaves the new version with an xmax equal to its xmin.) Then await() says to look again soon.
--     It also does so after a mere lock, or a rollback, which costs some looks.
-- What remains is a hint that got lost, because notifications are off or too many: hence two seconds.
--
-- As in module wake nothing waits for a lock, and a stranger who holds one causes needless notifications,
-- or looks. A session that ends leaves none behind.

create or replace function pgqueue.progress(
    job_id bigint,
    token bigint,
    done numeric,
    total numeric default null,
    message text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_isolation(),
        case when (done between 0 and 1e18) is not true or total <= 0 or total > 1e18 then array[
            'done must be 0 to 1e18, and total more than 0',
            format('done is %s, total is %s.', coalesce(done::text, 'null'), coalesce(total::text, 'null')),
            'Omit total if it is not known.'
        ] end
    ));
    moment timestamptz := clock_timestamp();
    own text[] := pgqueue._own_queues('worker');
begin
    update pgqueue.job as j
    set progress = row(
        greatest(moment, j.claimed_at),
        trim_scale(round(progress.done, 6)),
        nullif(trim_scale(round(progress.total, 6)), 0),
        nullif(pgqueue._summary(progress.message), '')
    )
    where j.ctid = any (array(
        select l.ctid
        from pgqueue.job as l
        where l.id = progress.job_id and l.token = progress.token and pgqueue._is_own(l.queue, own)
        for update skip locked
    ));
    -- A job whose end has not committed yet is locked, and still held.
    if not found and not exists (
        select from pgqueue.job as j
        where j.id = progress.job_id and j.token = progress.token and pgqueue._is_own(j.queue, own)
    ) then
        refused := pgqueue._refuse(pgqueue._lost(job_id, token));
    end if;
end;
$$;

comment on function pgqueue.progress(bigint, bigint, numeric, numeric, text) is
'Reports the progress of an attempt: how much is done (0 to 1e18, in units of
your own), of how much in total, and in a line what it is doing. Each call
replaces the previous report; the end of the attempt discards it. The views jobs
and running show it, with the rate and the time left. This never waits: while
an open transaction has locked the job it does nothing.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad
argument).';

-- The failures of a job that has ended, oldest first, as run has them: in the form of job.errors.
create or replace function pgqueue._past_errors(job_id bigint)
    returns jsonb
    language plpgsql
    set enable_bitmapscan = on
as $$
begin
    return coalesce((
        select jsonb_agg(
            jsonb_build_object('attempt', r.attempt, 'at', r.finished_at, 'worker', r.worker, 'error', r.error)
            order by r.finished_at, r.attempt
        )
        from pgqueue.run as r
        where r.job_id = _past_errors.job_id and r.error is not null
    ), '[]');
end;
$$;

create or replace function pgqueue.status(job_id bigint)
    returns table (
        id bigint, queue text, kind text, state text,
        attempt int, max_attempts int, priority int,
        enqueued_at timestamptz, run_at timestamptz, expires_at timestamptz, claimed_at timestamptz,
        finished_at timestamptz, worker text, done numeric, total numeric, message text, rate numeric,
        time_left interval, result jsonb, last_error text,
        payload jsonb, errors jsonb
    )
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    reads_jobs boolean := has_table_privilege(pgqueue._caller(), 'pgqueue.job', 'select');
    own text[] := pgqueue._own_queues('producer', 'operator');
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because it may just be moving from one to the other.
    return query
    select
        asked.id, coalesce(j.queue, d.queue), coalesce(j.kind, d.kind), coalesce(j.state, 'dead'),
        coalesce(j.attempt, d.attempt), coalesce(j.max_attempts, d.max_attempts),
        coalesce(j.priority, d.priority), coalesce(j.enqueued_at, d.enqueued_at),
        case when d.id is null then j.run_at else d.run_at end, j.expires_at,
        coalesce(j.claimed_at, d.claimed_at), d.died_at, coalesce(j.worker, d.worker),
        j.done, j.total, j.message, j.rate, j.time_left, null::jsonb,
        case when reads_jobs then coalesce(j.last_error, d.error)
            else pgqueue._summary(coalesce(j.last_error, d.error))
        end,
        case when reads_jobs then coalesce(w.payload, d.payload) end,
        case when reads_jobs then coalesce(w.errors, d.errors) end
    from (values (status.job_id)) as asked (id)
    left join pgqueue.jobs as j on j.id = asked.id
    left join pgqueue.job as w on w.id = j.id
    left join pgqueue.dead_job as d on d.id = asked.id
    where num_nonnulls(j.id, d.id) > 0 and pgqueue._is_own(coalesce(j.queue, d.queue), own);
    if found then
        return;
    end if;

    last := pgqueue._last_run(job_id);
    refused := pgqueue._refuse(case when last.job_id is null or not pgqueue._is_own(last.queue, own)
        then pgqueue._not_found('job', job_id)
    end);
    id := job_id;
    queue := last.queue;
    kind := last.kind;
    -- After any other end there was a job, which was discarded or purged.
    state := case when last.outcome in ('completed', 'cancelled') then last.outcome else 'gone' end;
    attempt := last.attempt;
    finished_at := last.finished_at;
    worker := last.worker;
    if last.worker is not null then
        claimed_at := last.finished_at - last.taken;
        run_at := claimed_at - last.waited;
    end if;
    result := case when state = 'completed' then last.result end;
    last_error := case when state <> 'completed' then coalesce(last.error, last.result #>> '{}') end;
    if reads_jobs then
        payload := last.payload;
        errors := pgqueue._past_errors(job_id);
    end if;
    return next;
end;
$$;

comment on function pgqueue.status(bigint) is
'What is known about a job, in one row. Its state is that of the view jobs while
it waits or runs, then dead, completed, cancelled, or gone (discarded or
purged: the row is that of its last attempt). A job that has ended is looked
up in run, which knows neither its priority, when it was enqueued nor its
expires_at: these are null. last_error of a cancelled job is the reason.
Who may not read the table job, as operators may, gets of last_error the first
line, and no payload or errors; a producer of some queues, no jobs of others.
payload and errors (the failures, oldest first: attempt, at, worker, error) are
of a job that has ended what run has: the first line of each error, and the
payload with keep_payloads. Only reads.
Raises PQ001 (nothing is known about it).';

create or replace function pgqueue.result(job_id bigint)
    returns jsonb
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    own text[] := pgqueue._own_queues('producer', 'operator');
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because it may just be moving from one to the other.
    perform from pgqueue.job as j where j.id = result.job_id and pgqueue._is_own(j.queue, own)
    union all
    select from pgqueue.dead_job as d where d.id = result.job_id and pgqueue._is_own(d.queue, own);
    if found then
        return null;
    end if;
    last := pgqueue._last_run(job_id);
    refused := pgqueue._refuse(case when last.job_id is null or not pgqueue._is_own(last.queue, own)
        then pgqueue._not_found('job', job_id)
    end);
    return case when last.outcome = 'completed' then last.result end;
end;
$$;

comment on function pgqueue.result(bigint) is
'The result given to complete for a job, which every producer of its queue may
read. Null if there was none, while the job waits or runs, and if it is dead,
cancelled or gone: ask status.
Raises PQ001 (nothing is known about it).';

-- Which locks a session that waits for jobs holds.
create or replace function pgqueue._awaited()
    returns setof int
    language plpgsql
as $$
begin
    return query
    select l.objid::int
    from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid()
        and l.database = (select d.oid from pg_database as d where d.datname = current_database())
        and l.classid = 7366516 and l.objsubid = 2 and l.mode = 'ShareLock';
end;
$$;

-- From now on the end of this job notifies this session. False if another session holds the locks
-- exclusively.
create or replace function pgqueue._await(job_id bigint)
    returns boolean
    language plpgsql
as $$
declare
    noted text := coalesce(current_setting('pgqueue.awaited', true), '');
    note text := format(' %s ', job_id & 255);
    bit bigint := (select pgqueue._settings_bits(j.queue) from pgqueue.job as j where j.id = job_id);
    is_heard boolean;
begin
    if (
        pg_sequence_last_value('pgqueue._cell_awaited')
            > pgqueue._since_2020(clock_timestamp() + interval '30 seconds')
        and (pg_sequence_last_value('pgqueue.awaited_seq') & bit <> 0) is not false
    ) is not true then
        if current_setting('transaction_read_only') = 'on' then
            return false;
        end if;
        perform pgqueue._mark(coalesce(bit, 0), 'pgqueue.awaited_seq');
        perform setval('pgqueue._cell_awaited', pgqueue._since_2020(clock_timestamp() + interval '1 minute'));
    end if;
    -- Saves a look into pg_locks, most of the cost. A rollback may bring back the note of locks that were
    -- released since: then no notification comes, and a look every two seconds finds the end.
    if position(note in noted) > 0 then
        return true;
    end if;
    -- Each once, because each has to be released as often as it was taken.
    select bool_and(case when a.key is null then pg_try_advisory_lock_shared(7366516, k.key) else true end)
    into is_heard
    from unnest(array[256, (job_id & 255)::int]) as k (key)
    left join pgqueue._awaited() as a (key) on a.key = k.key;
    if is_heard then
        perform set_config('pgqueue.awaited', noted || note, false);
    end if;
    return is_heard;
end;
$$;

-- Ends what _await began, for all jobs.
create or replace function pgqueue._stop_awaiting()
    returns void
    language plpgsql
as $$
begin
    perform pg_advisory_unlock_shared(7366516, a.key) from pgqueue._awaited() as a (key);
    perform set_config('pgqueue.awaited', '', false);
end;
$$;

create or replace function pgqueue.await(job_id bigint)
    returns interval
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    refused boolean := pgqueue._refuse(case when job_id is not null then pgqueue._check_isolation() end);
    own text[];
    last pgqueue.run;
    is_heard boolean;
    is_changing boolean;
begin
    if job_id is null then
        perform pgqueue._stop_awaiting();
        return null;
    end if;
    own := pgqueue._own_queues('producer', 'operator');
    is_heard := pgqueue._await(job_id);
    select j.xmax <> '0'::xid and j.xmax <> j.xmin into is_changing
    from pgqueue.job as j
    where j.id = await.job_id and pgqueue._is_own(j.queue, own);
    if found then
        return case when is_heard and not is_changing then interval '2 seconds' else interval '50 milliseconds' end;
    end if;
    perform from pgqueue.dead_job as d where d.id = await.job_id and pgqueue._is_own(d.queue, own);
    if not found then
        last := pgqueue._last_run(job_id);
        if last.job_id is null or not pgqueue._is_own(last.queue, own) then
            perform pgqueue._stop_awaiting();
            refused := pgqueue._refuse(pgqueue._not_found('job', job_id));
        end if;
    end if;
    return interval '0';
-- An interrupted await() leaves the session not waiting.
exception when query_canceled or lock_not_available or insufficient_resources
    or program_limit_exceeded
then
    perform pgqueue._stop_awaiting();
    raise;
end;
$$;

comment on function pgqueue.await(bigint) is
'For a session that has run LISTEN pgqueue and waits for a job to end: returns
how long it may sleep, unless the notification "end" comes first; then call it
again. Zero: the job has completed, died, been cancelled or removed. From now
on the ends of such jobs notify this session, until it calls await(null); it
may await several jobs. NOTIFY is a hint, so look again when the time is over.
Behind a transaction pooler no notification arrives, and the locks that this
takes would be left behind: poll status instead.
Raises PQ001 (nothing is known about it), 25001 outside READ COMMITTED.';
-- The metrics: what the views say, in the text format of Prometheus (version 0.0.4). Nothing is counted here.
--
-- Gauges are of the moment, or of the window in their name; that the log forgets, and may be sampled, does not harm
-- them. Counters, which only grow, are what maintain() has added up. What is not known has no sample. Names follow
-- the columns, and end in their unit.
--
-- Queues may be many: without by_queue only the four counters are by queue, and of the gauges those that have a sum
-- or a largest value are that of all queues.

-- A label of a sample, its value escaped.
create or replace function pgqueue._label(name text, value text)
    returns text
    language sql
    immutable
as $$
    select name || '="' || replace(replace(replace(value, E'\\', E'\\\\'), '"', E'\\"'), E'\n', E'\\n') || '"'
$$;

create or replace function pgqueue.metrics(by_queue boolean default false)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    exposition text;
begin
    with queue as materialized (
        select q.*, pgqueue._label('queue', q.queue) as label from pgqueue.queues as q
    ), sample (name, help, total, queue, label, value) as (
        select 'jobs', 'Waiting and running jobs.', 'sum', q.label, pgqueue._label('state', s.state), s.jobs::numeric
        from queue as q
        cross join lateral (
            values ('ready', q.ready), ('scheduled', q.scheduled), ('running', q.running), ('expired', q.expired),
                ('blocked', q.blocked)
        ) as s (state, jobs)
        union all
        select s.name, s.help, s.total, q.label, null, s.value
        from queue as q
        cross join lateral (
            values
                ('dead_jobs', 'Dead jobs.', 'sum', q.dead::numeric),
                ('is_estimate', '1 if any of these numbers is an estimate.', 'max', q.is_estimate::int),
                ('paused', '1 if claims get nothing.', 'none', q.paused::int),
                ('workers', 'Workers that hold a job, or ended one in 5 minutes.', 'none', q.workers),
                ('parked', 'Sessions that sleep until notified of a job.', 'none', q.parked),
                ('oldest_wait_seconds', 'How long the oldest ready job has been due.', 'max',
                    extract(epoch from q.oldest_wait)),
                ('p99_wait_seconds', '1 % of the ready jobs have been due for longer.', 'max',
                    extract(epoch from q.p99_wait)),
                ('p50_wait_last_hour_seconds', 'Half of the attempts of the last hour waited at most this long.',
                    'max', extract(epoch from q.p50_wait_last_hour)),
                ('p99_wait_last_hour_seconds', '99 % of the attempts of the last hour waited at most this long.',
                    'max', extract(epoch from q.p99_wait_last_hour)),
                ('time_to_empty_seconds', 'How long the ready jobs take at the rate of the last 5 minutes.', 'max',
                    extract(epoch from q.time_to_empty)),
                ('finished_last_hour', 'Attempts completed in the last hour.', 'sum', q.finished_last_hour),
                ('failed_last_hour', 'Attempts failed or expired in the last hour.', 'sum', q.failed_last_hour),
                ('rate_1m_per_second', 'Jobs completed per second, over 1 minute.', 'sum', q.rate_1m),
                ('rate_5m_per_second', 'Jobs completed per second, over 5 minutes.', 'sum', q.rate_5m),
                ('rate_1h_per_second', 'Jobs completed per second, over 1 hour.', 'sum', q.rate_1h),
                ('failure_rate_1m_ratio', 'Share of failed or expired attempts, over 1 minute.', 'max',
                    q.failure_rate_1m),
                ('failure_rate_5m_ratio', 'Share of failed or expired attempts, over 5 minutes.', 'max',
                    q.failure_rate_5m),
                ('failure_rate_1h_ratio', 'Share of failed or expired attempts, over 1 hour.', 'max',
                    q.failure_rate_1h)
        ) as s (name, help, total, value)
        union all
        select s.name, s.help, 'each', pgqueue._label('queue', c.queue), null, s.value
        from pgqueue.counter as c
        cross join lateral (
            values
                ('enqueued_total', 'Jobs enqueued.', c.enqueued),
                ('completed_total', 'Attempts completed.', c.completed),
                ('failed_total', 'Attempts failed or expired.', c.failed),
                ('dead_total', 'Jobs that died.', c.dead)
        ) as s (name, help, value)
        union all
        select
            'schedule_late_seconds', 'How long the next slot, plus jitter, has been due.', 'max',
            pgqueue._label('queue', c.queue) || ',' || pgqueue._label('schedule', c.name), null,
            greatest(extract(epoch from clock_timestamp() - c.next_slot - coalesce(c.jitter, '0')), 0)
        from pgqueue.schedules as c
        where c.next_slot is not null
        union all
        select v.name, v.help, 'each', null, pgqueue._label('what', k.what), v.value
        from pgqueue.retention as k
        cross join lateral (
            values
                ('retention_rows', 'How many rows are kept.', k.rows),
                ('retention_bytes', 'How large they are on disk, with indexes.', k.bytes)
        ) as v (name, help, value)
        union all
        select 'info', 'The version of pgqueue; always 1.', 'each', null, pgqueue._label('version', pgqueue.version()), 1
    ), shown as (
        select
            s.name, s.help, s.labels, case s.total when 'sum' then sum(s.value) else max(s.value) end as value
        from (
            select t.*, concat_ws(',', case when by_queue or t.total = 'each' then t.queue end, t.label) as labels
            from sample as t
            where t.value is not null and (by_queue or t.total <> 'none')
        ) as s
        group by s.name, s.help, s.total, s.labels
    ), family as (
        select
            s.name collate "C" as name,
            format(
                E'# HELP pgqueue_%1$s %2$s\n# TYPE pgqueue_%1$s %3$s\n', s.name, s.help,
                case when s.name like '%\_total' then 'counter' else 'gauge' end
            ) || string_agg(
                format(E'pgqueue_%s%s %s\n', s.name, '{' || nullif(s.labels, '') || '}', trim_scale(s.value)), ''
                order by s.labels collate "C"
            ) as text
        from shown as s
        group by s.name, s.help
    )
    select string_agg(f.text, '' order by f.name) into exposition from family as f;
    return exposition;
end;
$$;

comment on function pgqueue.metrics(boolean) is
'The numbers of the views queues, schedules and retention, in the text format of
Prometheus, and what maintain has counted of each queue: jobs enqueued,
completed, failed and dead. by_queue: all numbers for each queue and schedule;
otherwise, for those that are not counters, the sum or the largest of all, so
that a queue takes some 200 bytes. Costs what these views cost: a few tens of
milliseconds.';
-- Why a job is not running. A further reason is a further line in the function for where it is. All of them
-- only read, and lock nothing.

-- A moment as text for a sentence: in the time zone of the session, whatever its DateStyle.
create or replace function pgqueue._written(moment timestamptz)
    returns text
    language plpgsql
    stable
as $$
begin
    return to_char(moment, 'YYYY-MM-DD HH24:MI:SSOF');
end;
$$;

-- What keeps a job paused: its queue, kind or group; null for nothing.
create or replace function pgqueue._why_paused(job pgqueue.job)
    returns text
    language plpgsql
    stable
as $$
begin
    return case
        when not (pgqueue._in_force(job.queue, job.kind, job.group_key)).paused then null
        when (pgqueue._in_force(job.queue)).paused then 'its queue is paused'
        when (pgqueue._in_force(job.queue, job.kind)).paused then 'its kind is paused'
        else 'its group is paused'
    end;
end;
$$;

-- What keeps the group of a job busy, if it has a limit and is full.
create or replace function pgqueue._why_full(job pgqueue.job)
    returns text
    language plpgsql
    stable
as $$
declare
    group_limit int := case when job.group_key is not null
        then (pgqueue._in_force(job.queue, '', job.group_key)).group_limit end;
    held bigint;
    holder_id bigint;
    holder pgqueue.job;
begin
    if group_limit is null then
        return null;
    end if;
    select count(*), min(p.holder) into held, holder_id
    from pgqueue._permits(
        job.queue, row('', job.group_key, false, group_limit, '1 second')::pgqueue._cap, clock_timestamp()
    ) as p
    where p.is_held and p.holder <> job.id;
    if held < group_limit then
        return null;
    end if;
    select j.* into holder from pgqueue.job as j where j.id = holder_id;
    return concat(
        'its group ', job.group_key,
        case when holder.lease_expires_at is null
            then format(' waits for the retry of job %s at %s', holder.id, pgqueue._written(holder.run_at))
            else format(
                ' is busy with job %s, leased to %s until %s',
                holder.id, holder.worker, pgqueue._written(holder.lease_expires_at)
            )
        end,
        ', and ' || nullif(held - 1, 0) || ' more'
    );
end;
$$;

-- Which cap of its queue, kind or group a job waits for, if any.
create or replace function pgqueue._why_capped(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    keys text[] := array_remove(array[job.group_key], null);
    settings record := pgqueue._group_settings(job.queue, keys, pgqueue._in_force(job.queue));
    caps pgqueue._cap[] := (pgqueue._group_caps(keys, null, settings.rates, settings.periods, null)).caps
        || pgqueue._caps_of((pgqueue._in_force(job.queue)).caps, array[job.kind]);
    cap pgqueue._cap;
    free_at timestamptz;
    whose text;
begin
    foreach cap in array caps loop
        select min(p.free_at) into free_at
        from pgqueue._permits(job.queue, cap, moment) as p
        having count(*) filter (where p.is_usable) = 0 and count(*) > 0;
        if free_at is not null then
            whose := case
                when cap.group_key <> '' then 'its group ' || cap.group_key
                when cap.kind <> '' then 'its kind ' || cap.kind
                else 'its queue'
            end;
            return case when cap.is_rate
                then format(
                    'rate limited until %s: %s begins at most %s in %s', pgqueue._written(free_at), whose,
                    case cap.most when 1 then '1 job' else cap.most || ' jobs' end, cap.period
                )
                else format('%s runs as many jobs as it may, %s', whose, cap.most)
            end;
        end if;
    end loop;
    return null;
end;
$$;

-- Who else holds or awaits locks of tables and rows in this database, and what ends them. A row is locked by the id
-- of a transaction, its xmax. bars_writers: whether a lock of a table in this mode keeps others from writing to it.
create or replace function pgqueue._lock_holders()
    returns table (
        what text, relation oid, xid xid, mode text, is_held boolean, pid int, since timestamptz,
        waits_since timestamptz, holder text, hint text, bars_writers boolean
    )
    language plpgsql
as $$
begin
    return query
    select
        l.locktype, l.relation, l.transactionid, l.mode, l.granted, l.pid, coalesce(a.xact_start, p.prepared),
        l.waitstart,
        case when p.gid is null
            then concat(
                'session ', l.pid, case when l.granted then ' has used it' else ' has waited for it' end,
                ' since ' || pgqueue._written(a.xact_start),
                ' (' || nullif(concat_ws(', ', a.usename, nullif(a.application_name, ''), a.state), '') || ')'
            )
            else format('prepared transaction %s has used it', p.gid)
        end,
        case when p.gid is null
            then format('select pg_terminate_backend(%s)', l.pid) else format('rollback prepared %L', p.gid)
        end,
        l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
    from pg_locks as l
    left join pg_stat_activity as a on a.pid = l.pid
    -- Only the lock on its own id says which prepared transaction it is.
    left join (
        pg_locks as own
        join pg_prepared_xacts as p on p.transaction = own.transactionid
    ) on own.virtualtransaction = l.virtualtransaction and l.pid is null and own.pid is null
    where (
            l.database = (select d.oid from pg_database as d where d.datname = current_database())
            or l.locktype = 'transactionid'
        )
        and l.pid is distinct from pg_backend_pid();
end;
$$;

-- Who has locked the row of a job, or its table, if anybody has, so that no claim can take it.
create or replace function pgqueue._why_locked(job_id bigint)
    returns text
    language plpgsql
as $$
begin
    return (
        select format('its %s is locked: %s', case l.what when 'relation' then 'table' else 'row' end, l.holder)
        from pgqueue.job as j
        join pgqueue._lock_holders() as l on l.xid = j.xmax and l.what = 'transactionid'
            or l.relation = 'pgqueue.job'::regclass and l.what = 'relation' and l.bars_writers
        where j.id = _why_locked.job_id and l.is_held
        order by l.since
        limit 1
    );
end;
$$;

-- How many ready jobs are ahead of this one; beyond 10,000 it stops counting.
create or replace function pgqueue._count_ahead(job pgqueue.job, moment timestamptz)
    returns bigint
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_sort = off
as $$
declare
    age_after interval := (pgqueue._in_force(job.queue)).age_after;
begin
    return (
        select count(*)
        from (
            select
            from (
                select v.lane, v.lane - case when v.lane > 500 then 1000 else 0 end as priority
                from pgqueue._live_lanes(job.queue) as v
            ) as l
            cross join lateral (
                select case
                    when l.priority = job.priority then job.run_at
                    else pgqueue._due_by(l.priority, job.priority, job.run_at, moment, age_after)
                end as due_by
            ) as b
            cross join lateral (
                select
                from pgqueue.job as j
                where pgqueue._is_in_lane(j, job.queue, l.lane)
                    and (j.run_at, j.id) < (
                        b.due_by, case when l.priority <> job.priority then 9223372036854775807 else job.id end
                    )
                    and j.lease_expires_at is null
                order by j.run_at, j.id
                limit 10001
            ) as ahead
            where l.priority >= job.priority or age_after is not null
            limit 10001
        ) as a
    );
end;
$$;

-- Which kinds of which queues live sessions have said that they serve; null kinds are all. A standby does not know
-- which sessions live.
create or replace function pgqueue._served()
    returns table (queue text, kinds text[])
    language plpgsql
as $$
begin
    return query
    select s.queue, case when bool_and(s.kinds is not null) then array_agg(distinct k.kind) end
    from pgqueue.service as s
    left join pg_stat_activity as a on a.pid = s.pid and (a.backend_start = s.started) is not false
    left join lateral unnest(s.kinds) as k (kind) on true
    where s.until > clock_timestamp() and (a.pid is not null or pg_is_in_recovery())
    group by s.queue;
end;
$$;

-- Says that nobody has claimed from a queue, or a kind of it, for a while, judging by the running jobs and the runs
-- of the last ten minutes; null if somebody has. Whether anybody ever has is known of a log of 100,000 runs.
create or replace function pgqueue._unclaimed(queue text, moment timestamptz, kind text default null)
    returns text
    language plpgsql
    set enable_sort = off
    set enable_bitmapscan = on
as $$
declare
    lately timestamptz := moment - interval '10 minutes';
    whose text := case when kind is null then 'from it' else 'its kind' end;
    last_claim timestamptz := (
        select max(f.claimed_at)
        from pgqueue._live_lanes(queue) as l
        cross join lateral (
            -- Running jobs keep their places, near the beginning.
            select j.claimed_at, j.kind
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _unclaimed.queue, l.lane)
            order by j.run_at, j.id
            limit 1000
        ) as f
        where f.kind = _unclaimed.kind or _unclaimed.kind is null
    );
begin
    return case
        -- Without runs this is unknown.
        when (pgqueue._in_force(queue)).keep_runs = 0 or last_claim > lately or exists (
            select from pgqueue.run as r
            where r.finished_at > lately and r.queue = _unclaimed.queue and r.worker is not null
                and (r.kind = _unclaimed.kind or _unclaimed.kind is null)
        ) then null
        when last_claim is not null or (
            select count(*) = 100000 or bool_or(
                r.queue = _unclaimed.queue and r.worker is not null
                and (r.kind = _unclaimed.kind or _unclaimed.kind is null)
            )
            from (select r.queue, r.kind, r.worker from pgqueue.run as r limit 100000) as r
        ) then format('no worker has claimed %s for 10 minutes', whose)
        else format('no worker has claimed %s that it remembers', whose)
    end;
end;
$$;

-- Says that nobody takes the kind of a ready job, or anything of its queue; null if somebody does, or has put it off.
create or replace function pgqueue._why_unclaimed(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    takes_others boolean := exists (
        select from pgqueue._served() as s where s.queue = job.queue and job.kind <> all (s.kinds)
    );
begin
    if (pgqueue._put_off(job) ->> 'at')::timestamptz > moment - interval '10 minutes' then
        return null;
    end if;
    return coalesce(
        case when takes_others and pgqueue._unclaimed(job.queue, moment, job.kind) is not null
            then 'no worker takes its kind: those of its queue take others'
        end,
        pgqueue._unclaimed(job.queue, moment),
        case when not takes_others and job.run_at < moment - interval '10 minutes'
            then pgqueue._unclaimed(job.queue, moment, job.kind)
        end
    );
end;
$$;

-- why, for a job that nobody holds, and until when it may begin.
create or replace function pgqueue._why_waits(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
as $$
declare
    expires_at timestamptz := (job.terms).expires_at;
    begun text := case when job.attempt > 0 then 'begun again' else 'begun' end;
begin
    if expires_at <= moment then
        return format(
            'expired at %s, not %s by then: the next claim or maintain() cancels it',
            pgqueue._written(expires_at), begun
        );
    end if;
    return concat_ws('; ',
        case
            when job.run_at = 'infinity' then (
                select case
                    when count(*) = 0 then 'blocked: its wait is over, and the next claim or maintain will see it'
                    else concat('blocked: waits for job ', min(d.job_id), ' and ' || nullif(count(*) - 1, 0) || ' more')
                end
                from pgqueue.dependency as d
                join pgqueue.job as j on j.id = d.job_id
                where d.waiter_id = job.id
            )
            when job.run_at <= moment then coalesce(
                pgqueue._why_paused(job), pgqueue._why_full(job), pgqueue._why_capped(job, moment),
                pgqueue._why_locked(job.id),
                (
                    select case
                        when a.jobs = 0 then 'ready: next in its queue'
                        else format(
                            'ready: waits behind %s %s of higher priority or earlier turn in its queue',
                            case when a.jobs > 10000 then 'more than 10,000' else to_char(a.jobs, 'FM999,999,999') end,
                            case when a.jobs = 1 then 'job' else 'jobs' end
                        )
                    end || coalesce('; ' || pgqueue._why_unclaimed(job, moment), '')
                    from pgqueue._count_ahead(job, moment) as a (jobs)
                )
            )
            when (job.errors -> -1 ->> 'attempt')::int = job.attempt then format(
                'waits for its retry at %s after attempt %s of %s: %s',
                pgqueue._written(job.run_at), job.attempt, job.max_attempts,
                pgqueue._summary(job.errors -> -1 ->> 'error')
            )
            else 'scheduled for ' || pgqueue._written(job.run_at)
        end,
        case when job.run_at > moment then pgqueue._why_paused(job) end,
        'put off by ' || (pgqueue._put_off(job) ->> 'worker') || ': '
            || pgqueue._summary(pgqueue._put_off(job) ->> 'error'),
        'expires at ' || pgqueue._written(expires_at) || format(' if it is not %s by then', begun)
    );
end;
$$;

create or replace function pgqueue.why(job_id bigint)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
    set enable_nestloop = on
as $$
declare
    moment timestamptz := clock_timestamp();
    present record;
    job pgqueue.job;
    last pgqueue.run;
    refused boolean;
begin
    -- In one statement, because it may just be moving from one to the other.
    select j as job, d as dead into present
    from (values (why.job_id)) as asked (id)
    left join pgqueue.job as j on j.id = asked.id
    left join pgqueue.dead_job as d on d.id = asked.id;
    job := present.job;
    if job.lease_expires_at <= moment then
        return format(
            'its lease expired at %s: the next %s %s (worker %s)',
            pgqueue._written(job.lease_expires_at),
            case when pgqueue._why_paused(job) is not null then 'maintain()' else 'claim' end,
            case
                when job.cancelled_at is not null then 'cancels it'
                when job.attempt >= job.max_attempts then 'moves it to dead_job'
                else 'recovers it'
            end,
            job.worker
        );
    elsif job.lease_expires_at is not null then
        return case when job.cancelled_at is not null
            then format(
                'its worker %s was asked to stop at %s: cancelling', job.worker, pgqueue._written(job.cancelled_at)
            )
            else format(
                'runs: attempt %s of %s, leased to %s until %s',
                job.attempt, job.max_attempts, job.worker, pgqueue._written(job.lease_expires_at)
            )
        end;
    elsif job.id is not null then
        return pgqueue._why_waits(job, moment);
    elsif (present.dead).id is not null then
        return format(
            'dead since %s: %s; redrive_job(%s) sends it back',
            pgqueue._written((present.dead).died_at), pgqueue._summary((present.dead).error), job_id
        );
    end if;

    last := pgqueue._last_run(job_id);
    refused := pgqueue._refuse(case when last.job_id is null then pgqueue._not_found('job', job_id) end);
    return case last.outcome
        when 'completed' then
            format('completed at %s on attempt %s', pgqueue._written(last.finished_at), last.attempt)
        when 'cancelled' then concat_ws(
            ': ', 'cancelled at ' || pgqueue._written(last.finished_at), pgqueue._summary(last.result #>> '{}')
        )
        -- It was discarded or purged, which leaves no run.
        else format(
            'gone; its attempt %s failed at %s: %s', last.attempt, pgqueue._written(last.finished_at), last.error
        )
    end;
end;
$$;

comment on function pgqueue.why(bigint) is
'Says in one sentence why a job is not running, or what happened to it. Only
reads; for a job that has ended it looks through run.
Raises PQ001 (no such job).';
-- Health: what is wrong or will be soon, and the SQL that fixes it.
--
-- All checks only read, work on a standby, and look at catalogs, at the fronts of lanes and at the view queues, never
-- at all jobs.

-- The first jobs of each lane that are due or run, at most this many, of many lanes a hundred: what has run for long, or
-- has lost its lease, is in front.
create or replace function pgqueue._fronts(most int, moment timestamptz)
    returns setof pgqueue.job
    language sql
    stable
as $$
    select w.*
    from (select l.*, greatest(20000 / count(*) over (), 100) as share from pgqueue._lanes(0) as l) as f
    cross join lateral (
        select j.*
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, f.queue, f.lane) and j.run_at >= f.first and j.run_at < _fronts.moment
        order by j.run_at, j.id
        limit least(_fronts.most, f.share)
    ) as w
    where f.first <= _fronts.moment
$$;

-- Every check, with all its facts: the function _found, and so health, follow from this list. The query returns a
-- row for each finding: whether it is critical, which is four times beyond the thresholds patience and most, the
-- detail, and the hint. In it, moment is the clock, and seen the rows of the view queues.
create or replace view pgqueue._check (name, patience, most, few, fine, query) as
values
    -- Each queue whose oldest ready job waits beyond its wait_target, by the first of each lane. Paused jobs
    -- are reported separately, and never critical.
    ('waits', null::interval, null::float8, null::float8, 'no queue keeps a job waiting beyond its wait_target', $$
        select
            not o.is_paused and o.wait > 4 * o.target,
            format(
                'queue %s: job %s has been due for %s, the wait_target is %s', o.queue, o.id,
                date_trunc('second', o.wait), o.target
            ) || coalesce('; ' || case when o.place <= 5 then coalesce(
                r.reason, pgqueue._why_full(s.job), pgqueue._why_capped(s.job, moment), pgqueue._why_locked(o.id)
            ) end, ''),
            case r.reason
                when 'its queue is paused' then format('select pgqueue.resume(%L)', o.queue)
                when 'its kind is paused' then format('select pgqueue.resume(%L, %L)', o.queue, (s.job).kind)
                when 'its group is paused' then
                    format('select pgqueue.resume(%L, group_key => %L)', o.queue, (s.job).group_key)
                else format('select pgqueue.why(%s)', o.id)
            end
        from (
            -- Why is dear to say.
            select e.*, row_number() over (
                order by not e.is_paused and e.wait > 4 * e.target desc, e.wait desc, e.id
            ) as place
            from (
                -- Paused jobs separately, or they would come before what should run.
                select distinct on (f.queue, p.is_paused)
                    f.queue, w.id, moment - w.run_at as wait, q.target, p.is_paused
                from pgqueue._lanes(0) as f
                cross join lateral (
                    select
                        s.wait_target as target, s.paused as is_paused,
                        case when s.has_pauses then pgqueue._paused(f.queue, s.paused) end as others
                    from pgqueue._in_force(f.queue) as s
                    offset 0
                ) as q
                join (values (false), (true)) as p (is_paused) on p.is_paused = q.is_paused or q.others is not null
                cross join lateral (
                    select j.id, j.run_at
                    from (
                        select j.*
                        from pgqueue.job as j
                        where pgqueue._is_in_lane(j, f.queue, f.lane) and j.run_at >= f.first and j.run_at < moment
                        order by j.run_at, j.id
                        limit 10000
                    ) as j
                    where j.lease_expires_at is null and ((j.terms).expires_at <= moment) is not true
                        and (j.group_key is null or not exists (
                            select
                            from pgqueue.ticket as t
                            where pgqueue._is_ticket_of(t, j.queue, j.group_key) and t.priority = j.priority and t.is_full
                        ))
                        and (q.others is null or p.is_paused <> pgqueue._is_wanted(j.kind, j.group_key, null, q.others))
                    limit 1
                ) as w
                where f.first <= moment and moment - w.run_at > q.target
                order by f.queue, p.is_paused, w.run_at
            ) as e
        ) as o
        cross join lateral (select j as job from pgqueue.job as j where j.id = o.id offset 0) as s
        cross join lateral (
            select case when o.is_paused and o.place <= 5 then pgqueue._why_paused(s.job) end as reason offset 0
        ) as r
        order by o.place
    $$),
    -- Who has locked for that long what enqueue, claim or complete need: a table, or the row of a job that is among
    -- the first to run in its lane; or has kept a session waiting for one for a fifth of that.
    ('locks', '5 seconds', null, null, 'nobody locks what enqueue, claim and complete need', $$
        with lock as materialized (
            select * from pgqueue._lock_holders()
        ), ours as materialized (
            select c.oid, c.relname
            from pg_class as c
            where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p')
                -- Nobody needs old runs: see the check of this name.
                and (c.relname !~ '^run_' or c.relname = 'run_' || floor(date_part('epoch', moment) / 86400)::int % 16)
        ), waiter as materialized (
            select
                w.relation, w.xid, min(w.waits_since) as since,
                format('; %s for it', case count(*) when 1 then 'a session waits' else count(*) || ' sessions wait' end)
                    as said
            from lock as w
            where not w.is_held and case w.what
                when 'relation' then w.relation in (select o.oid from ours as o)
                -- Who waits for a row has locked its place.
                when 'transactionid' then exists (
                    select
                    from lock as t
                    where t.what = 'tuple' and t.pid = w.pid and t.relation in (select o.oid from ours as o)
                )
            end
            group by w.relation, w.xid
        ), found as (
            select
                l.pid, l.holder, l.hint, l.since, w.since as waits_since, w.said,
                format('table %s is locked in %s mode', o.relname, regexp_replace(l.mode, 'Lock$', '')) as what
            from lock as l
            join ours as o on o.oid = l.relation
            left join waiter as w on w.relation = l.relation
            where l.what = 'relation' and l.bars_writers
                -- VACUUM cuts off the end of a file in a moment.
                and (l.pid in (select v.pid from pg_stat_progress_vacuum as v)) is not true
            union all
            select
                l.pid, l.holder, l.hint, case when j.id is not null then l.since end, w.since, w.said,
                coalesce('the row of job ' || j.id || ' of queue ' || j.queue, 'a row') || ' is locked'
            from lock as l
            left join waiter as w on w.xid = l.xid
            left join (
                select j.queue, j.id, j.xmax as xid
                from pgqueue._lanes(0) as f
                cross join lateral (
                    select j.queue, j.id, j.xmax
                    from pgqueue.job as j
                    where pgqueue._is_in_lane(j, f.queue, f.lane) and j.run_at >= f.first and j.run_at < moment - patience
                        -- One that runs is locked while it completes.
                        and j.lease_expires_at is null
                    order by j.run_at, j.id
                    limit 20
                ) as j
                where f.first < moment - patience
            ) as j on j.xid = l.xid
            where l.what = 'transactionid' and l.is_held and (w.xid is not null or j.id is not null)
        )
        select
            coalesce(moment - least(min(f.since), min(f.waits_since)) > 4 * patience, false),
            concat(min(f.what), ', and ' || nullif(count(distinct f.what) - 1, 0) || ' more', ': ', f.holder, max(f.said)),
            f.hint
        from found as f
        group by f.pid, f.holder, f.hint
        having min(f.since) < moment - patience or min(f.waits_since) < moment - patience / 5
        order by min(f.since)
    $$),
    -- Each queue with jobs that have run for that long, and that many times as long as 99 % of their kind; or six times
    -- that long where none is known; or that were asked to stop that long ago.
    ('hung', '10 minutes', 10, null, 'no job runs for much too long', $$
        with old as materialized (
            select j.*
            from pgqueue._fronts(1000, moment) as j
            where j.claimed_at < moment - patience and j.lease_expires_at > moment
        ), usual as materialized (
            select k.queue, k.kind, k.p99_taken from pgqueue.kinds as k where exists (select from old)
        )
        select
            h.lasts > 4 * h.limit,
            format(
                'queue %s: job %s of kind %s has run for %s in worker %s%s%s', h.queue, h.id, h.kind,
                date_trunc('second', moment - h.claimed_at), h.worker,
                ', and was asked to stop at ' || pgqueue._written(h.cancelled_at),
                '; ' || nullif(h.jobs - 1, 0) || ' more hang, too'
            ),
            case when h.cancelled_at is null
                then format('select pgqueue.cancel(%s, %L)', h.id, 'hangs')
                else 'end its worker: when the lease has expired, the next claim cancels the job'
            end
        from (
            select distinct on (o.queue)
                o.*, t.limit, t.lasts, count(*) over (partition by o.queue) as jobs
            from old as o
            left join usual as u on u.queue = o.queue collate "C" and u.kind = o.kind collate "C"
            cross join lateral (
                select
                    case
                        when o.cancelled_at is not null then patience
                        when u.p99_taken is null then 6 * patience
                        else greatest(patience, most * u.p99_taken)
                    end as limit,
                    moment - coalesce(o.cancelled_at, o.claimed_at) as lasts
            ) as t
            where t.lasts > t.limit
            order by o.queue, t.lasts desc
        ) as h
        order by h.lasts desc
    $$),
    -- Each queue in which leases expired that long ago and nobody has recovered the jobs, among the first
    -- hundred of each lane, where such jobs end up.
    ('leases', '3 minutes', null, null, 'jobs whose lease expired are recovered', $$
        select
            e.late > 4 * patience,
            format(
                'queue %s: the lease of job %s expired %s ago (worker %s), and neither a claim nor maintain() '
                'has recovered it%s',
                e.queue, e.id, date_trunc('second', e.late), e.worker,
                '; ' || nullif(e.all_late - 1, 0) || ' more expired, too'
            ),
            'select pgqueue.reap()'
        from (
            select distinct on (j.queue)
                j.queue, j.id, j.worker, moment - j.lease_expires_at as late,
                count(*) over (partition by j.queue) as all_late
            from pgqueue._fronts(100, moment) as j
            where j.lease_expires_at < moment - patience
            order by j.queue, j.lease_expires_at
        ) as e
        order by e.late desc
    $$),
    -- Schedules that nobody has fired for that long, and those that cannot be fired.
    ('schedules', '2 minutes', null, null, 'schedules are fired in time', $$
        (
            select
                moment - s.due_at > 4 * patience,
                format(
                    'schedule %s has been due for %s, and neither a worker nor maintain() has fired it%s', s.name,
                    date_trunc('second', moment - s.due_at), '; ' || nullif(count(*) over () - 1, 0) || ' more are late'
                ),
                'select from pgqueue.maintain()'
            from pgqueue.schedule as s
            where s.due_at < moment - patience
            order by s.due_at
            limit 1
        )
        union all
        select
            false, format('schedule %s cannot be fired: %s', s.name, s.problem),
            format('select pgqueue.pause_schedule(%L)', s.name)
        from pgqueue.schedule as s
        where s.problem is not null and not s.is_paused
    $$),
    -- Batches whose callback could not be enqueued; and, of the first 1000 that have not finished for that long, those
    -- without jobs, which nobody closes or sees, and those that have jobs a week of that later.
    ('batches', '1 day', null, null, 'batches are closed, and their callbacks enqueued', $$
        with open as (
            select o.*, l.id as job_id, l.touched
            from (
                select b.* from pgqueue.batch as b where b.finished_at is null order by b.id limit 1000
            ) as o
            cross join lateral pgqueue._last_job(o.id, 9223372036854775807) as l
            where coalesce(o.closed_at, o.created_at) < moment - patience
        )
        (
            select
                true, format('the callback of batch %s is dead job %s, because it could not be enqueued: %s',
                    b.id, b.callback_id, b.problem
                ),
                format('select pgqueue.redrive_job(%s)', b.callback_id)
            from pgqueue.batch as b
            join pgqueue.dead_job as d on d.id = b.callback_id
            where b.problem is not null
            order by b.id
            limit 10
        )
        union all
        (
            select
                moment - min(coalesce(o.closed_at, o.created_at)) over () > 4 * patience,
                format(
                    'batch %s of queue %s has been %s for %s, and has no job that waits or runs%s', o.id, o.queue,
                    case when o.closed_at is null then 'open' else 'closed' end,
                    date_trunc('second', moment - min(coalesce(o.closed_at, o.created_at)) over ()),
                    '; so have ' || nullif(count(*) over () - 1, 0) || ' more'
                ),
                case when o.closed_at is null
                    then format('select pgqueue.close_batch(%s)', o.id) else 'select from pgqueue.maintain()'
                end
            from open as o
            where num_nonnulls(o.job_id, o.touched) = 0
            order by o.id
            limit 1
        )
        union all
        (
            select
                false,
                format(
                    'batch %s of queue %s has not finished for %s, and waits for job %s, and perhaps for more%s', o.id,
                    o.queue, date_trunc('second', moment - o.created_at), coalesce(o.job_id, o.touched),
                    '; so do ' || nullif(count(*) over () - 1, 0) || ' more batches'
                ),
                format('select pgqueue.why(%s)', coalesce(o.job_id, o.touched))
            from open as o
            where o.created_at < moment - 7 * patience and num_nonnulls(o.job_id, o.touched) > 0
            order by o.id
            limit 1
        )
    $$),
    -- Each queue whose jobs have waited that long, and nearly as long as they may, while no session serves it.
    ('workers', '2 minutes', null, null, 'somebody works each queue that has jobs', $$
        select
            q.oldest_wait > 4 * t.allowed,
            format(
                'queue %s has %s ready jobs, the oldest due for %s, and no worker serves it', q.queue,
                to_char(q.ready, 'FM999,999,999,999'), date_trunc('second', q.oldest_wait)
            ),
            'select * from pgqueue.workers'
        from unnest(seen) as q
        -- The view has another collation, which no index of names has.
        cross join lateral (values (q.queue collate "default")) as n (name)
        cross join lateral pgqueue._in_force(n.name) as s
        -- A queue that is worked once a day has a wait_target of a day.
        cross join lateral (select greatest(patience, s.wait_target - interval '3 minutes') as allowed) as t
        where not q.paused and q.oldest_wait > t.allowed and q.workers = 0
            and n.name not in (select v.queue from pgqueue._served() as v)
            -- Perhaps all waiting jobs are paused.
            and pgqueue._paused(n.name, false) is null
            -- Without runs this is unknown, and jobs may begin rarely.
            and s.keep_runs > 0
            and not exists (
                select from pgqueue.queue as o
                where o.name in ('', n.name) and num_nonnulls(o.max_running, o.rate_limit, o.rate_period) > 0
                    and o.rate_period > patience
            )
        order by q.oldest_wait desc
    $$),
    -- Each kind whose jobs have waited that long while those who serve its queue take others, or have no handler for
    -- it and put its jobs off; among some 20,000 jobs.
    ('kinds', '2 minutes', null, null, 'somebody takes each kind that has jobs', $$
        with serving as materialized (
            select * from pgqueue._served()
        ), taken as materialized (
            select r.queue, r.kind
            from pgqueue._recent_runs(moment - interval '10 minutes') as r
            where r.worker is not null
            union
            select j.queue, j.kind from pgqueue._leased() as l (id) join pgqueue.job as j on j.id = l.id
        ), waiting as (
            select
                w.queue, w.kind, count(*) as jobs, min(w.id) as id,
                moment - min(case when w.worker is null then w.run_at else w.enqueued_at end) as wait,
                max(w.worker) as worker
            from (select l.*, greatest(20000 / count(*) over (), 20) as share from pgqueue._lanes(0) as l) as f
            cross join lateral (
                select
                    j.id, j.queue, j.kind, j.run_at, j.enqueued_at,
                    case when p.news ->> 'error' = 'no handler for its kind' then p.news ->> 'worker' end as worker
                from (
                    select j.*
                    from pgqueue.job as j
                    where pgqueue._is_in_lane(j, f.queue, f.lane) and j.run_at >= f.first
                        and j.run_at < moment + interval '1 minute'
                    order by j.run_at, j.id
                    limit 10000
                ) as j
                cross join lateral (select case when j.errors is not null then pgqueue._put_off(j) end as news) as p
                where j.lease_expires_at is null and (j.run_at < moment or p.news is not null)
                limit least(200, f.share)
            ) as w
            group by w.queue, w.kind
        )
        select
            w.wait > 4 * t.allowed,
            format(
                'queue %s: nobody has taken job %s of kind %s%s for %s; %s', w.queue, w.id, w.kind,
                ', and ' || nullif(w.jobs - 1, 0) || ' more,', date_trunc('second', w.wait),
                coalesce(
                    'worker ' || w.worker || ' puts them off: no handler for its kind',
                    'those that serve the queue take other kinds'
                )
            ),
            format('select pgqueue.cancel_many(%L, kind => %L, dry_run => true)', w.queue, w.kind)
        from waiting as w
        cross join lateral pgqueue._in_force(w.queue, w.kind) as s
        cross join lateral (select greatest(patience, s.wait_target - interval '3 minutes') as allowed) as t
        where w.wait > t.allowed and not s.paused and s.keep_runs > 0
            -- What was taken is dear to know.
            and case
                when w.worker is not null
                    or exists (select from serving as v where v.queue = w.queue and w.kind <> all (v.kinds))
                then (w.queue, w.kind) not in (select t.queue, t.kind from taken as t)
            end
        order by w.wait desc
    $$),
    -- Each queue whose jobs have waited that long and will take that many times its wait_target at the current
    -- rate.
    ('backlog', '2 minutes', 12, null, 'no queue has more jobs than are soon done', $$
        select
            q.time_to_empty > 4 * t.most,
            format(
                'queue %s has %s ready jobs, which take %s at the rate of the last five minutes, %s jobs a second by '
                '%s workers', q.queue, to_char(q.ready, 'FM999,999,999,999'), date_trunc('second', q.time_to_empty),
                q.rate_5m, q.workers
            ),
            format('select * from pgqueue.kinds where queue = %L', q.queue)
        from unnest(seen) as q
        cross join lateral (values (q.queue collate "default")) as n (name)
        cross join lateral (select most * (pgqueue._in_force(n.name)).wait_target as most) as t
        -- The rate of a burst that has just begun is not known yet; nor how many of the jobs are paused.
        where not q.paused and q.oldest_wait > patience and q.time_to_empty > t.most
            and pgqueue._paused(n.name, false) is null
        order by q.time_to_empty desc
    $$),
    -- Each queue that share of whose attempts failed, and ten in an hour.
    ('failures', null, 0.2, 10, 'no queue fails much', $$
        select
            q.failure_rate_5m > 4 * most and q.failed_last_hour >= 4 * few,
            format(
                'queue %s: %s %% of the attempts of the last five minutes failed or expired, and %s in the last hour',
                q.queue, round(100 * q.failure_rate_5m), to_char(q.failed_last_hour, 'FM999,999,999,999')
            ),
            format('select * from pgqueue.failures where queue = %L', q.queue)
        from unnest(seen) as q
        where not q.paused and q.failure_rate_5m > most and q.failed_last_hour >= few
        order by q.failed_last_hour desc
    $$),
    -- Each queue of which this many jobs died in the last hour, or five times as many in the last day, counted up to
    -- 1,000 of a kind; or which keeps a thousand times as many.
    ('dead', null, 10, null, 'few jobs died, and few are kept', $$
        (
            select
                sum(c.hour) > 4 * most,
                format(
                    case when sum(c.hour) < most
                        then 'queue %1$s: %3$s jobs died in the last day'
                        else 'queue %1$s: %2$s jobs died in the last hour'
                    end, k.queue,
                    case when max(c.hour) > 1000 then 'more than 1,000' else to_char(sum(c.hour), 'FM999,999,999,999') end,
                    case when max(c.day) > 1000 then 'more than 1,000' else to_char(sum(c.day), 'FM999,999,999,999') end
                ),
                format('select * from pgqueue.dead where queue = %L', k.queue)
            from pgqueue._dead_kinds() as k
            cross join lateral (
                select count(*) as day, count(*) filter (where d.died_at > moment - interval '1 hour') as hour
                from (
                    select d.died_at
                    from pgqueue.dead_job as d
                    where d.queue = k.queue and d.kind = k.kind and d.died_at > moment - interval '1 day'
                    order by d.queue desc, d.kind desc, d.died_at desc
                    limit 1001
                ) as d
            ) as c
            group by k.queue
            having sum(c.hour) >= most or sum(c.day) >= 5 * most
            order by sum(c.hour) desc, sum(c.day) desc, k.queue
        )
        union all
        (
            select
                false, format('queue %s keeps %s dead jobs', q.queue, to_char(q.dead, 'FM999,999,999,999')),
                format('select * from pgqueue.dead where queue = %L', q.queue)
            from unnest(seen) as q
            where q.dead >= 1000 * most
            order by q.dead desc, q.queue
        )
    $$),
    -- Who has held a snapshot for that long, while the tables of pgqueue have that many dead rows: sessions,
    -- standbys, prepared transactions, replication slots. If the time is unknown, who has held it for that
    -- many transactions.
    ('horizon', '15 minutes', 100000, 20000, 'nobody keeps VACUUM from removing dead rows', $$
        select
            coalesce(moment - h.since > 4 * patience, h.age > 4 * most),
            format('%s keeps VACUUM from removing what was deleted in the last %s', h.holder, concat_ws(
                ', ', date_trunc('second', moment - h.since), to_char(h.age, 'FM9,999,999,999') || ' transactions'
            )) || coalesce(': ' || h.query, ''),
            h.hint
        from (
            select
                a.xact_start,
                -- The snapshots of this database have to see what writes in any.
                greatest(age(a.backend_xid), case when a.datname = current_database() then age(a.backend_xmin) end),
                format('session %s (%s)', a.pid, concat_ws(
                    ', ', a.usename, nullif(a.application_name, ''), a.state,
                    'in database ' || nullif(a.datname, current_database())
                )),
                case
                    -- The functions have their owner's rights, and a query may hold what its caller must not see.
                    when not pg_has_role(session_user, 'pg_read_all_stats', 'usage')
                        then 'its query is shown to members of pg_read_all_stats'
                    when a.query = '<insufficient privilege>'
                        then 'its query would be shown if the owner of pgqueue were a member of pg_read_all_stats'
                    else regexp_replace(left(a.query, 100), '[[:space:]]+', ' ', 'g')
                end,
                format('select pg_terminate_backend(%s)', a.pid)
            from pg_stat_activity as a
            where a.datname is not null and a.leader_pid is null and a.pid not in (
                select r.pid from pg_stat_replication as r union all select v.pid from pg_stat_progress_vacuum as v
            )
            union all
            select
                a.xact_start, case when (a.datname <> current_database()) is not true then age(a.backend_xmin) end,
                format('standby %s', a.application_name), null, 'there: select * from pgqueue.health()'
            from pg_stat_replication as r
            join pg_stat_activity as a on a.pid = r.pid
            union all
            select
                p.prepared, age(p.transaction), format('prepared transaction %s (%s)', p.gid, p.owner), null,
                concat(
                    'in database ' || nullif(p.database, current_database()) || ': ',
                    format('rollback prepared %L', p.gid)
                )
            from pg_prepared_xacts as p
            union all
            select
                null, age(s.xmin),
                format('replication slot %s (%s)', s.slot_name, case when s.active then 'active' else 'inactive' end),
                null,
                case when s.active
                    then 'there: select * from pgqueue.health()'
                    else format('select pg_drop_replication_slot(%L)', s.slot_name)
                end
            from pg_replication_slots as s
        ) as h (since, age, holder, query, hint)
        where coalesce(moment - h.since > patience, h.age > most) and h.age > 0
            -- The dead rows that a standby keeps are counted on the primary.
            and (pg_is_in_recovery() and current_setting('hot_standby_feedback')::boolean or (
                select sum(pg_stat_get_dead_tuples(c.oid)) >= few
                from pg_class as c
                where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
            ))
    $$),
    -- Unused replication slots that keep that much WAL.
    ('wal', null, 1073741824, null, 'no unused replication slot keeps much WAL', $$
        select
            k.bytes > 4 * most,
            format('the unused replication slot %s keeps %s of WAL on the disk', s.slot_name, pg_size_pretty(k.bytes)),
            format('select pg_drop_replication_slot(%L)', s.slot_name)
        from pg_replication_slots as s
        cross join lateral (
            select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end
                - s.restart_lsn as bytes
        ) as k
        where not s.active and k.bytes > most
    $$),
    -- Tables with that many times the dead rows at which autovacuum should start, for which no VACUUM has
    -- ended for that long.
    ('vacuum', '10 minutes', 10, null, 'VACUUM keeps up with the dead rows', $$
        select
            moment - v.since > 4 * patience and v.dead > 4 * most * v.threshold,
            format(
                'table %s has %s dead rows, and no VACUUM has ended for %s%s', c.relname,
                to_char(v.dead, 'FM999,999,999,999'), date_trunc('second', moment - v.since),
                '; ' || (select 'one is running' from pg_stat_progress_vacuum as p where p.relid = c.oid)
            ),
            format('vacuum pgqueue.%s', c.relname)
        from pg_class as c
        cross join lateral (
            select jsonb_object_agg(o.option_name, o.option_value) as own from pg_options_to_table(c.reloptions) as o
        ) as o
        cross join lateral (
            select
                pg_stat_get_dead_tuples(c.oid) as dead,
                greatest(
                    pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid),
                    -- Before that, no VACUUM is on record.
                    pg_postmaster_start_time(),
                    (select d.stats_reset from pg_stat_database as d where d.datname = current_database())
                ) as since,
                coalesce(
                    o.own ->> 'autovacuum_vacuum_threshold', current_setting('autovacuum_vacuum_threshold')
                )::bigint + coalesce(
                    o.own ->> 'autovacuum_vacuum_scale_factor', current_setting('autovacuum_vacuum_scale_factor')
                )::float8 * greatest(c.reltuples, 0) as threshold
        ) as v
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
            -- After an hour with nothing to do, as many come before autovacuum can.
            and v.dead > most * v.threshold and moment - v.since > patience
    $$),
    -- Whether autovacuum is off, for all or for a table of pgqueue.
    ('autovacuum', null, null, null, 'autovacuum is on', $$
        select
            true, format('%s is off on this server: dead rows pile up', s.name),
            format('alter system set %s = on; select pg_reload_conf() -- or in your provider''s settings', s.name)
        from unnest('{autovacuum,track_counts}'::text[]) as s (name)
        where not current_setting(s.name)::boolean
        union all
        select
            false, format('autovacuum is off for the table %s: dead rows pile up', c.relname),
            format('alter table pgqueue.%s reset (autovacuum_enabled)', c.relname)
        from pg_class as c
        cross join lateral pg_options_to_table(c.reloptions) as o
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
            and o.option_name = 'autovacuum_enabled' and not o.option_value::boolean
    $$),
    -- Indexes that are invalid, as an interrupted REINDEX CONCURRENTLY leaves them; and those on what claims change.
    ('indexes', null, null, null, 'all indexes are valid, and let claims be HOT updates', $$
        select
            false,
            format('index %s of table %s is invalid: each write keeps it, and no query uses it', c.relname, t.relname),
            format(
                case when o.is_ours then 'reindex index concurrently' else 'drop index concurrently' end || ' pgqueue.%I',
                c.relname
            )
        from pg_index as i
        join pg_class as c on c.oid = i.indexrelid
        join pg_class as t on t.oid = i.indrelid
        cross join lateral (
            select obj_description(c.oid, 'pg_class') is not null or c.relispartition
                or exists (select from pg_constraint as k where k.conindid = c.oid) as is_ours
        ) as o
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'i' and not i.indisvalid
            and i.indrelid not in (select p.relid from pg_stat_progress_create_index as p)
        union all
        select
            false,
            format('index %s has column %s of table job, which each claim changes: it has to write to all indexes of job',
                c.relname, string_agg(a.attname, ', ')
            ),
            format('drop index concurrently pgqueue.%I', c.relname)
        from pg_index as i
        join pg_class as c on c.oid = i.indexrelid
        join pg_depend as d on d.classid = 'pg_class'::regclass and d.objid = c.oid
            and d.refclassid = 'pg_class'::regclass and d.refobjid = i.indrelid
        join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = d.refobjsubid
        where i.indrelid = 'pgqueue.job'::regclass
            and a.attname in ('token', 'attempt', 'worker', 'claimed_at', 'lease_expires_at')
        group by c.relname
    $$),
    -- Whether enqueues are kept from waking workers by a setting of this database, of a role, or of the server.
    ('notify', null, null, null, 'enqueues may wake workers', $$
        select
            false, format('pgqueue.notify is off for %s: enqueues wake no worker, and jobs wait for the next poll', w.whom),
            format('alter %s reset pgqueue.notify', w.whom)
        from pg_db_role_setting as s
        cross join lateral (
            select concat_ws(
                ' in ',
                'role ' || case when s.setrole <> 0 then s.setrole::regrole::text when s.setdatabase = 0 then 'all' end,
                'database ' || case when s.setdatabase <> 0 then quote_ident(current_database()) end
            ) as whom
        ) as w
        where s.setdatabase in (0, (select d.oid from pg_database as d where d.datname = current_database()))
            and 'pgqueue.notify=off' = any (s.setconfig)
        union all
        select
            false, 'pgqueue.notify is off for this server: enqueues wake no worker, and jobs wait for the next poll',
            'alter system reset pgqueue.notify; select pg_reload_conf()'
        from pg_settings as s
        where s.name = 'pgqueue.notify' and s.source = 'configuration file' and s.setting = 'off'
    $$),
    -- Tables and indexes that are larger, and have more than 20 pages per row: a row needs one at most. reap
    -- reads all of the table job.
    ('bloat', null, 1073741824, null, 'no table or index is much too large', $$
        -- relpages, because asking for the size waits for whoever has locked the table.
        select
            false,
            format(
                '%s %s takes %s for %s rows', case c.relkind when 'r' then 'table' else 'index' end, c.relname,
                pg_size_pretty(c.relpages * 8192::bigint), to_char(r.live, 'FM999,999,999,990')
            ),
            format(
                case c.relkind when 'r' then 'vacuum (full, analyze)' else 'reindex index concurrently' end
                    || ' pgqueue.%s', c.relname
            )
        from pg_class as c
        left join pg_index as i on i.indexrelid = c.oid
        join pg_class as t on t.oid = coalesce(i.indrelid, c.oid)
        cross join lateral (
            select greatest(pg_stat_get_live_tuples(t.oid), t.reltuples::bigint, 0) as live
        ) as r
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'i')
            and c.relpages * 8192::bigint > most and c.relpages > 20 * r.live
    $$),
    -- Whether ids of transactions or multixacts are older than that, or than autovacuum should let them become,
    -- in any database: one stops the whole server.
    ('wraparound', null, null, null, 'old transaction ids are frozen in time', $$
        select
            a.age > least(4 * a.most, 1600000000),
            format(
                'the oldest %s in database %s is %s old; at 2,147,483,648 Postgres stops writing', a.what, d.datname,
                to_char(a.age, 'FM9,999,999,999')
            ),
            concat('in database ' || nullif(d.datname, current_database()) || ': ', 'vacuum (freeze)')
        from pg_database as d
        cross join lateral (
            select
                o.what, o.age,
                least(most, greatest(400000000, current_setting(o.setting)::bigint * 11 / 10)) as most
            from (
                values ('transaction id', age(d.datfrozenxid), 'autovacuum_freeze_max_age'),
                    ('multixact id', mxid_age(d.datminmxid), 'autovacuum_multixact_freeze_max_age')
            ) as o (what, age, setting)
        ) as a
        where a.age > a.most
    $$),
    -- Whether the notification queue is full to that share, and which session has been in a transaction for
    -- longest.
    ('notifications', null, 0.1, null, 'the notification queue is nearly empty', $$
        select
            q.used > 4 * most,
            format(
                'the notification queue of the server is %s %% full: a listening session is in a transaction%s; once '
                'it is full, NOTIFY fails', (100 * q.used)::numeric(9, 5),
                concat(
                    ', perhaps ' || a.pid, ' in database ' || a.datname, ', since ' || pgqueue._written(a.xact_start)
                )
            ),
            -- Without pg_read_all_stats the owner of pgqueue does not see who.
            coalesce(
                'select pg_terminate_backend(' || a.pid || ')',
                'select a.pid, a.xact_start from pg_stat_activity as a order by a.xact_start'
            )
        from pg_notification_queue_usage() as q (used)
        left join (
            select a.pid, a.datname, a.xact_start
            from pg_stat_activity as a
            where a.pid <> pg_backend_pid() and a.xact_start is not null
            order by a.xact_start
            limit 1
        ) as a on true
        where q.used > most
    $$),
    -- Whether a sequence was set back, as by a careless restore, or has used up that share of its numbers.
    ('sequences', null, 0.2, null, 'sequences are ahead of what they have handed out', $$
        select
            s.last < t.highest or s.last > 4 * most * 9223372036854775807,
            case when s.last < t.highest
                then format('sequence %s is at %s, and %s is in use: %s', t.name, s.last, t.highest, t.danger)
                else format(
                    'sequence %s is at %s, and ends at 9223372036854775807: somebody has set it; set it back while '
                    'no worker runs', t.name, s.last
                )
            end,
            -- Well ahead, as some in use may not have been seen.
            format('select setval(%L, %s)', 'pgqueue.' || t.name, coalesce(t.highest, 0) + 1000000)
        from (
            values
                ('job_id_seq', 'enqueues will fail', greatest(
                    (select max(j.id) from pgqueue.job as j), (select max(d.id) from pgqueue.dead_job as d),
                    (select max(b.id) from pgqueue.batch as b)
                )),
                ('token_seq', 'a lost worker might end the attempt of another', (
                    select max(j.token) from pgqueue._fronts(10, moment) as j
                ))
        ) as t (name, danger, highest)
        -- The snapshot is older: what is added in between has numbers above.
        cross join lateral (select coalesce(pg_sequence_last_value(('pgqueue.' || t.name)::regclass), 0) as last) as s
        where s.last < t.highest or s.last > most * 9223372036854775807
    $$),
    -- Tables of the ring run that should have been emptied a day ago, and what keeps maintain from doing it.
    ('runs', null, null, null, 'old runs are deleted', $$
        select
            t.today - o.day > 4,
            format(
                'table run_%s holds runs that were due for deletion on %s: %s', o.day % 16,
                to_char(date '1970-01-01' + o.day + 1, 'YYYY-MM-DD'),
                coalesce(h.holder, 'nobody uses it, and nobody has called maintain()')
            ),
            coalesce(h.hint, 'select from pgqueue.maintain()')
        from (select floor(date_part('epoch', moment) / 86400)::int as today) as t
        -- As in _forget_runs, one day later.
        cross join lateral generate_series(t.today - 16, t.today - 2) as o (day)
        left join lateral (
            select l.holder, l.hint
            from pgqueue._lock_holders() as l
            where l.relation = ('pgqueue.run_' || o.day % 16)::regclass
            order by l.since
            limit 1
        ) as h on true
        where pgqueue._is_over(o.day)
    $$),
    -- Whether what is installed differs from itself, or from the files on the server. The plain install has
    -- neither, and pg_tle, in its schema pgtle, no files.
    ('version', null, null, null, 'all parts are of version ' || pgqueue.version(), $$
        select
            e.extversion <> pgqueue.version(),
            format(
                'the extension is of version %s, its functions of %s, the files on the server of %s',
                e.extversion, pgqueue.version(), coalesce(a.default_version, 'none')
            ),
            'alter extension pgqueue update'
        from pg_extension as e
        left join pg_available_extensions as a on a.name = e.extname
        where e.extname = 'pgqueue'
            and (e.extversion <> pgqueue.version() or a.default_version <> e.extversion
                or a.name is null and to_regnamespace('pgtle') is null)
    $$);

comment on view pgqueue._check is 'What health looks at.';
comment on column pgqueue._check.name is 'As health names it.';
comment on column pgqueue._check.patience is 'How long something may last.';
comment on column pgqueue._check.most is 'How much of something there may be.';
comment on column pgqueue._check.few is 'Of how little of it nothing is said.';
comment on column pgqueue._check.fine is 'What health says if all is well.';
comment on column pgqueue._check.query is 'What finds what is wrong.';

-- What a check finds: the query of each in a branch of its own.
do $do$
begin
    execute format(
        $$
            create or replace function pgqueue._found(
                name text, patience interval default null, most float8 default null,
                seen pgqueue.queues[] default null, few float8 default null
            )
                returns table (is_critical boolean, detail text, hint text)
                language plpgsql
                set plan_cache_mode = force_generic_plan
                set enable_seqscan = off
                set enable_bitmapscan = off
                set enable_sort = off
                set enable_partition_pruning = on
            as %L
        $$,
        (
            select format(
                'declare moment timestamptz := clock_timestamp(); begin case name %s end case; end',
                string_agg(format('when %L then return query %s;', c.name, c.query), ' ')
            )
            from pgqueue._check as c
        )
    );
end;
$do$;

create or replace view pgqueue.checks as
select
    c.name,
    coalesce((g.given ->> 'patience')::interval, c.patience) as patience,
    coalesce((g.given ->> 'most')::float8, c.most) as most,
    coalesce((g.given ->> 'few')::float8, c.few) as few,
    c.fine
from pgqueue._check as c
cross join lateral (select nullif(current_setting('pgqueue.thresholds', true), '')::jsonb -> c.name as given) as g;

comment on view pgqueue.checks is
'What health looks at, and from where on it warns; critical is four times as
much. The setting pgqueue.thresholds changes that, for a session or a database:
alter database app set pgqueue.thresholds = ''{"dead": {"most": 100}}''.';
comment on column pgqueue.checks.name is 'The check.';
comment on column pgqueue.checks.patience is 'How long something may last; null if that does not matter.';
comment on column pgqueue.checks.most is 'How much of something there may be.';
comment on column pgqueue.checks.few is 'Of less than that it says nothing.';
comment on column pgqueue.checks.fine is 'What health says if it finds nothing.';

-- What the checks find, the worst five of each first, or that it is nothing. One that fails says so, and stops no
-- other.
create or replace function pgqueue._findings()
    returns table (name text, status text, detail text, hint text, place bigint)
    language plpgsql
as $$
declare
    known pgqueue.checks[];
    one record;
    seen pgqueue.queues[];
begin
    begin
        known := array(select c from pgqueue.checks as c);
    exception when data_exception then
        known := array(select row(c.name, c.patience, c.most, c.few, c.fine)::pgqueue.checks from pgqueue._check as c);
        return query
        select
            'thresholds', 'critical', 'the setting pgqueue.thresholds is not in force: ' || sqlerrm,
            'alter database ' || quote_ident(current_database()) || ' reset pgqueue.thresholds', 1::bigint;
    end;
    for one in select k.*, c.query from unnest(known) as k join pgqueue._check as c on c.name = k.name loop
        begin
            if seen is null and strpos(one.query, 'unnest(seen)') > 0 then
                seen := array(select q from pgqueue.queues as q);
            end if;
            return query
            select
                one.name, case when w.is_critical then 'critical' when w.detail <> '' then 'warning' else 'ok' end,
                coalesce(w.detail || case when w.place = 5 and w.all_found > 5 then concat(
                    '; and ', to_char(w.all_found - 5, 'FM999,999,999'), ' more',
                    ', ' || to_char(nullif(greatest(w.all_critical - 5, 0), 0), 'FM999,999,999') || ' of them critical'
                ) else '' end, one.fine),
                w.hint, w.place
            from (select) as always
            left join (
                select
                    f.*, count(*) over () as all_found, count(*) filter (where f.is_critical) over () as all_critical,
                    row_number() over (order by f.is_critical desc, f.n) as place
                from pgqueue._found(one.name, one.patience, one.most, seen, one.few)
                    with ordinality as f (is_critical, detail, hint, n)
            ) as w on w.place <= 5;
        exception
            -- health says who holds the lock.
            when lock_not_available then
                raise;
            when syntax_error_or_access_rule_violation or data_exception or object_not_in_prerequisite_state
                or feature_not_supported or cardinality_violation or insufficient_resources
                or program_limit_exceeded or system_error or internal_error
            then
                return query
                select one.name, 'critical', format('health could not look: %s (SQLSTATE %s)', sqlerrm, sqlstate), null, 1::bigint;
        end;
    end loop;
end;
$$;

create or replace function pgqueue.health()
    returns table ("check" text, status text, detail text, hint text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set intervalstyle = postgres
    set lock_timeout = '1 s'
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return query
    select f.name, f.status, f.detail, f.hint
    from pgqueue._findings() as f
    -- What locks hold up, other checks find as well.
    order by array_position('{critical,warning}', f.status), f.name <> 'locks', f.name collate "C", f.place;
exception when lock_not_available then
    return query
    select
        'waits', case when l.holder is null then 'warning' else 'critical' end,
        coalesce(
            'health could not look, because ' || l.relation::regclass::text || ' is locked: ' || l.holder,
            'health could not look, because a table was locked for a moment'
        ),
        coalesce(l.hint, 'select * from pgqueue.health()')
    from (select) as always
    left join pgqueue._lock_holders() as l on l.what = 'relation' and l.mode = 'AccessExclusiveLock' and l.relation in (
        select c.oid from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
    )
    order by l.is_held desc, l.since
    limit 1;
end;
$$;

comment on function pgqueue.health() is
'Checks what is wrong or soon will be. A row for each finding, the worst first:
the check, its status (warning, critical), what was found, and as hint the SQL
that fixes it; of many findings of a check the worst five. A row with the status
ok for each check that found nothing; one that fails says so, with the SQLSTATE,
and stops no other. The view checks lists the thresholds. Only reads, works on
a standby, and counts nothing in full. The query of a session is shown to
members of pg_read_all_stats.';
-- Which role may do what. PUBLIC may do nothing. Only the owner touches tables: the
-- functions are security definer, so a role only needs the right to call them. Roles
-- belong to the cluster, so the extension creates none; it grants to yours. For which queues is a row in access,
-- which _own_queues reads in every function that is about a queue or a job.

-- What a kind of role may do: one row for each grant; none for an unknown kind.
create or replace function pgqueue._grants(kind text)
    returns table (is_function boolean, object text)
    language sql
    immutable
as $$
    select g.is_function, unnest(g.objects::text[])
    from (
        values
            ('{producer}', true, '{enqueue,enqueue_many,enqueue_row,create_batch,close_batch}'),
            ('{producer}', true, '{status,result,await,version}'),
            ('{worker}', true, '{claim,claim_from,extend,progress,complete,complete_many,fail,release,finish}'),
            ('{worker}', true, '{reap,maintain,rest,next_slots,version}'),
            ('{scheduler}', true, '{schedule,next_slots,version}'),
            ('{operator}', true, '{cancel,cancel_many,redrive,redrive_job,discard,discard_many,purge,pause,resume}'),
            ('{operator}', true, '{rerun,run_now,reprioritize,configure,reap,maintain,status,result,await}'),
            ('{operator}', true, '{schedule,unschedule,pause_schedule,resume_schedule,run_schedule}'),
            ('{operator,reader}', true, '{next_slots,why,health,metrics,version}'),
            -- The views call these as their reader.
            ('{operator,reader}', true, '{_count_jobs,_count_dead,_dead_kinds,_leased,_recent_runs}'),
            ('{operator,reader}', true, '{_dead_errors,_error_like,_last_state}'),
            ('{operator,reader}', false, '{jobs,queues,running,workers,kinds,throughput,failures,dead,stuck}'),
            ('{operator,reader}', false, '{settings,schedules,batches,batch_jobs,dependencies,hours,retention,checks,counter}'),
            ('{operator}', false, '{queue,job,dead_job,run,schedule}')
    ) as g (kinds, is_function, objects)
    where _grants.kind = any (g.kinds::text[])
$$;

-- Grants or revokes what _grants lists: the only dynamic SQL, because GRANT takes no parameters.
create or replace function pgqueue._change_access(role text, kind text, is_granted boolean)
    returns void
    language plpgsql
as $$
declare
    change record;
begin
    if is_granted then
        execute format('grant usage on schema pgqueue to %I', role);
    end if;
    for change in
        select g.is_function, g.object from pgqueue._grants(kind) as g
        except
        -- What it also has by another kind stays.
        select o.is_function, o.object
        from pgqueue.access as a
        cross join lateral pgqueue._grants(a.kind) as o
        where not is_granted and a.role = _change_access.role and a.kind <> _change_access.kind
    loop
        execute case
            when is_granted and change.is_function
                then format('grant execute on function pgqueue.%I to %I', change.object, role)
            when is_granted then format('grant select on pgqueue.%I to %I', change.object, role)
            when change.is_function
                then format('revoke execute on function pgqueue.%I from %I', change.object, role)
            else format('revoke select on pgqueue.%I from %I', change.object, role)
        end;
    end loop;
    -- A role that may no longer do anything does not see the schema either.
    if not is_granted and pgqueue._rights(role) = '{}' then
        execute format('revoke usage on schema pgqueue from %I', role);
    end if;
end;
$$;

-- Which functions, tables and views have been granted to a role itself.
create or replace function pgqueue._rights(role text)
    returns name[]
    language plpgsql
    stable
as $$
begin
    return array(
        select o.name
        from (
            select p.proname, p.proacl from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace
            union all
            select c.relname, c.relacl from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
        ) as o (name, acl)
        cross join lateral aclexplode(o.acl) as a
        where a.grantee = (select r.oid from pg_roles as r where r.rolname = _rights.role)
    );
end;
$$;

-- After a change of access: derives again whether that of any role is limited to queues.
create or replace function pgqueue._resolve_access()
    returns void
    language plpgsql
as $$
begin
    if exists (select from pgqueue.access as a where a.queue <> '') then
        perform pgqueue._mark(-1, 'pgqueue.awaited_seq');
    end if;
    -- Sets nothing, but waits for others that set anything: each has to see what the other did.
    perform pgqueue._set(null, null, null, '{}', false);
    perform pgqueue._resolve('');
end;
$$;

create or replace function pgqueue.grant_access(role text, kind text, queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_grant(role, kind, queue, false));
begin
    -- What is left of a role that had this name, and was dropped.
    delete from pgqueue.access as a
    where a.role = grant_access.role and a.kind = grant_access.kind
        and (select g.object from pgqueue._grants(grant_access.kind) as g limit 1) <> all (pgqueue._rights(grant_access.role));
    insert into pgqueue.access (role, kind, queue)
    values (grant_access.role, grant_access.kind, coalesce(grant_access.queue, ''))
    on conflict do nothing;
    perform pgqueue._change_access(role, kind, true);
    if queue is not null then
        if exists (
            select from pgqueue.access as a
            where a.role = grant_access.role and a.kind = grant_access.kind and a.queue = ''
        ) then
            raise notice using
                message = format('role %I still is a %s of all queues', role, kind),
                hint = 'To limit it, revoke_access without a queue, then grant_access with one.';
        end if;
        perform pgqueue._resolve_access();
    end if;
end;
$$;

comment on function pgqueue.grant_access(text, text, text) is
'Lets a role be a producer (enqueue, and ask status and result),
worker (claim and end attempts), scheduler (own recurring jobs), operator
(manage, and read all) or reader (why, health, metrics and the views, which
hold no payload). Kinds include no other kind.
queue limits the access of a producer, worker or scheduler to that queue, and
others for which it is called; without it, the access is to all queues, and a
later call with queue does not limit it: only revoke_access does.
Raises 22023 (unknown kind, or one that is not limited), 42704 (no such role).';

create or replace function pgqueue.revoke_access(role text, kind text, queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_grant(role, kind, queue, true));
begin
    delete from pgqueue.access as a
    where a.role = revoke_access.role and a.kind = revoke_access.kind
        and a.queue = coalesce(revoke_access.queue, a.queue);
    if not exists (
        select from pgqueue.access as a where a.role = revoke_access.role and a.kind = revoke_access.kind
    ) and exists (select from pg_roles as r where r.rolname = role) then
        perform pgqueue._change_access(role, kind, false);
    end if;
    perform pgqueue._resolve_access();
end;
$$;

comment on function pgqueue.revoke_access(text, text, text) is
'Undoes grant_access: for a queue, or for all of them. What the role may do by
another kind of access stays. The role may have been dropped.
Raises 22023 (unknown kind, or one that is not limited), 42704 (no such role).';

-- The rows that an upgrade touches are of roles that had all that their kind of access includes: now they get what is
-- new to it. When the transaction ends, because a script of an extension would make all that has been granted on
-- these objects a part of the extension, and pg_dump would leave it out. Nothing else updates access, nor does a restore.
create or replace function pgqueue._grant_again()
    returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._change_access(new.role, new.kind, true);
    return null;
end;
$$;

-- What is new belongs to nobody but the owner; what an upgrade repeats keeps its rights. Not all at once, because a
-- REVOKE does what a GRANT does there.
do $$
declare
    -- Of an upgrade: what was there before it, see module begin.
    kept text[] := coalesce(nullif(current_setting('pgqueue.kept', true), ''), '{}');
    object text;
begin
    for object in
        select format('schema %s', n.nspname) from pg_namespace as n where n.nspname = 'pgqueue' and kept = '{}'
        union all
        select format('%s %s', case c.relkind when 'S' then 'sequence' else 'table' end, c.oid::regclass)
        from pg_class as c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
            and 'relation ' || c.oid <> all (kept)
        union all
        select format('routine %s', p.oid::regprocedure)
        from pg_proc as p
        where p.pronamespace = 'pgqueue'::regnamespace and 'routine ' || p.oid <> all (kept)
    loop
        execute format('revoke all on %s from public', object);
    end loop;
    if kept = '{}' then
        create constraint trigger access_grant_again after update on pgqueue.access
        deferrable initially deferred for each row execute function pgqueue._grant_again();
    end if;
end;
$$;
