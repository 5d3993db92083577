\echo Use "CREATE EXTENSION pgqueue" to load this file. \quit

-- The life of a job.
--
-- A producer calls enqueue() in its own transaction and a row appears in job. From run_at on the job is ready. A
-- worker calls claim(): the row gets a token, a lease and one more attempt, and runs. While it works it calls
-- extend(), its heartbeat. It ends the attempt with one of four functions: complete() removes the row, fail() sends it
-- back with a later run_at or, when its attempts are used up, to dead_job, release() gives it back uncounted, and so
-- does suspend(), which makes it wait for an event, a moment or other jobs. finish() does any of these for many jobs.
-- A worker that dies calls nothing: its lease expires, and the next claim() or reap() ends the attempt in its place.
--
-- Only (id, token) can end or extend an attempt. The token comes from a sequence, so
-- a worker that slept past its lease holds a number that will never be right again.
--
-- There is no state column. A job is scheduled, ready, running, expired or blocked according to run_at and
-- lease_expires_at and the clock; the view jobs says which. No index contains what claim() and extend() change, so
-- both are HOT updates: they leave nothing behind in the index that every claim walks.
--
-- Every finished attempt is a row in run, for the metrics.
--
-- The layers, a folder for each, from the bottom up. A function calls its own module and those before it:
--
--   tables    schema: this one
--   base      match (finding rows by an index), check (arguments), resolve (settings in force), lane (what claims
--             remember for each other), wake (sleeping workers), ticket (which groups have something to do)
--   attempts  lease (which worker holds a job), attempt (how attempts end, and what follows)
--   limits    age, permit, visit, group, cap: which of the jobs that are due may run
--   core      enqueue, pick, rest, claim, finish: what producers and workers call
--   flow      depend and batch (what waits for ends), step and event (jobs that take days), sweep, cron and
--             schedule (recurring jobs), trigger
--   operate   settings, manage, dead, maintain, work (handlers in SQL), shard and move (several databases)
--   observe   measure, observe, status (one job), metrics, why, health
--   roles     access: who may call what
--
-- The path of a job: enqueue inserts it, and wakes a worker if one sleeps. claim finds it and leases it: in a
-- plain lane with _pick; in a group by its ticket, with _pick_plain_groups, or _pick_groups if anything is
-- unusual; under caps with _pick_capped, which takes permits. complete deletes it and logs the run; any other end
-- is written by _end. Then _after_end returns its permits and tells the layers above that it has ended. Only three
-- other functions call upwards, to announce something: enqueue, a job that waits for others; finish, one that is
-- suspended; and _look_around, for a claim or rest, that schedules may be due.
--
-- A public function pins the search path for itself and the private functions that it calls. Each function pins
-- the planner settings that its plans need (module claim says why), so the same lines stand above many bodies.

-- CREATE EXTENSION has already set this, the plain install has not.
set local search_path = pg_catalog, pg_temp;

-- Without "if not exists": if anybody else has created this schema, the install must stop.
create schema pgqueue;
comment on schema pgqueue is
'A job queue. Producers call enqueue, workers claim and complete, operators
read the views.';

-- One type, because each column of job costs an enqueue 0.7 %, even when it is null.
create type pgqueue._progress as (told_at timestamptz, done numeric, total numeric, message text);
comment on type pgqueue._progress is
'The progress of an attempt, and when it was reported: how much is done of a
total, in units of its own, and what it is doing.';

-- Whoever adds an attribute: a dump of an older version can then no longer be restored into this one, see docs/upgrading.md.
create type pgqueue._terms as (expires_at timestamptz, run_at timestamptz, batch_id bigint, after bigint[]);
comment on type pgqueue._terms is
'The terms on which a job runs, if there are any: not begun after expires_at;
run_at, once nothing blocks it any more (null: at once); part of a batch; and
the jobs that it has waited for, whose results it may read.';

-- Fixed-width columns first, so that the ones every claim compares are found without
-- walking over text; the wide ones that only a handler reads come last.
--
-- job, recent_key and run have no CHECK: Postgres parses each one again for every statement, and three
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
    -- More than half of each page stays free for the new, slightly longer version that a
    -- claim, a heartbeat or a release writes: an update is HOT only within the page.
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
comment on column pgqueue.job.lease_expires_at is 'From then on anyone may recover the job; null when not leased.';
comment on column pgqueue.job.cancelled_at is 'When an operator asked the running attempt to stop; null if none did.';
comment on column pgqueue.job.priority is 'Larger runs first; -100 to 100.';
comment on column pgqueue.job.attempt is 'Attempts begun since the job was enqueued or redriven; counted at claim.';
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

-- A lane is one queue at one priority, in the order in which its jobs run. claim() walks one lane at a time, so that
-- run_at is a bound of the scan: with a range over all priorities, jobs scheduled at a high priority would be walked
-- by every claim. Jobs of groups have lanes of their own, 1000 above: no claim walks these, see ticket. It begins with
-- the hash of the queue, because a page of numbers takes half the time to read and to search that a page of texts
-- does; queries compare the name as well. Half full, because a claim of one job reads a whole page. The predicate is
-- true for every row, but the planner can prove it only for a query that names a queue. Without it, a session that
-- plans after an idle hour, when job looks empty, reads this whole index to find jobs by id.
create index job_lane_idx on pgqueue.job
(hashtext(queue), (priority + 1000 * num_nonnulls(group_key)), run_at, id)
with (fillfactor = 50, deduplicate_items = off)
where queue is not null;
comment on index pgqueue.job_lane_idx is 'Which jobs of a lane are due, in order?';

-- A hash of 64 bits, because the sweep goes from hash to hash, and never meets a second group with the same one.
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
-- The latest first: an old snapshot may keep dead entries behind it.
create index ticket_group_idx on pgqueue.ticket (hashtextextended(group_key, hashtext(queue)), priority, at desc)
with (deduplicate_items = off);
comment on index pgqueue.ticket_group_idx is 'Which tickets does a group have?';

-- A permit to run is held until the attempt of its job ends, a permit to begin (a rate) until its period is over.
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
-- The predicate is true for every row, but proved only by a query that names a queue: see job_lane_idx.
create index permit_scope_idx on pgqueue.permit
(hashtextextended(group_key, hashtextextended(kind, hashtext(queue))), is_rate, free_at)
with (deduplicate_items = off)
where queue is not null;
comment on index pgqueue.permit_scope_idx is 'Which permits of a queue, kind or group are free?';
-- With its first row it has a second page, so hot paths check its size before they look.
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
comment on column pgqueue.dead_job.errors is 'The last 10 failures, oldest first: attempt, at, worker, error.';

create index dead_job_kind_idx on pgqueue.dead_job (queue, kind, died_at);
comment on index pgqueue.dead_job_kind_idx is 'Which jobs of this queue and kind died, and when?';

create index dead_job_group_idx on pgqueue.dead_job (group_key, queue, kind, died_at)
where group_key is not null;
comment on index pgqueue.dead_job_group_idx is 'Which jobs of this group died, and when?';

create index dead_job_died_idx on pgqueue.dead_job (died_at);
comment on index pgqueue.dead_job_died_idx is 'Which jobs died in some time? Which last?';

-- The windows of unique_for. A row may outlive its job, so it is not in job; only an
-- enqueue with unique_for writes one.
create table pgqueue.recent_key (
    job_id bigint not null,
    expires_at timestamptz not null,
    queue text not null,
    unique_key text not null,
    constraint recent_key_pkey primary key (queue, unique_key)
);
comment on table pgqueue.recent_key is 'Keys that were enqueued with unique_for, until their windows end.';
comment on column pgqueue.recent_key.job_id is 'The job that was enqueued; it may have ended.';
comment on column pgqueue.recent_key.expires_at is 'When the window ends: unique_for after the job was enqueued.';
comment on column pgqueue.recent_key.queue is 'The job''s queue.';
comment on column pgqueue.recent_key.unique_key is 'The job''s unique_key.';

create index recent_key_expires_idx on pgqueue.recent_key (expires_at);
comment on index pgqueue.recent_key_expires_idx is 'Which windows have ended?';

-- [Upgrades repeat this:
-- Every way in which an attempt can end. No column has a CHECK for this, see job; instead a test compares
-- what functions write and expect with this list.
create or replace view pgqueue._outcome as
select * from (
    values
        ('completed', 'complete', false, false, 'completed'),
        ('retry', 'fail', true, true, 'failed, runs again'),
        ('dead', 'reject', false, true, 'failed for good'),
        ('cancelled', null, false, false, 'an operator or a dependency ended it'),
        ('expired', null, true, true, 'the worker let the lease expire, runs again'),
        (null, 'release', true, false, 'given back, uncounted'),
        (null, 'suspend', true, false, 'waits, uncounted')
) as o (name, asked_by, runs_again, is_failure, meaning);
comment on view pgqueue._outcome is 'How attempts end.';
comment on column pgqueue._outcome.name is 'As in run; null if it is not logged.';
comment on column pgqueue._outcome.asked_by is 'The outcome passed to finish for it; null for none.';
comment on column pgqueue._outcome.runs_again is 'Whether the job then waits again.';
comment on column pgqueue._outcome.is_failure is 'Whether it counts as a failed attempt.';
comment on column pgqueue._outcome.meaning is 'What happened.';
-- so far.]

-- A ring of sixteen tables. A row goes to the table of the day on which it may be deleted, so that one TRUNCATE
-- deletes a day: no mass DELETE, no new tables, and nothing left for VACUUM. Two weeks at most are kept, so there is
-- always a table whose rows may all go. maintain() empties it. In a transaction that may continue, and so would keep
-- the lock of a TRUNCATE, it deletes the rows instead. Only after that are pages filled a second time, and no longer
-- in the order of time, on which the index below relies.
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
    -- Few columns, because each one slows completions a little, even when it is null.
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
comment on column pgqueue.run.options is 'Its priority, max_attempts and group_key, likewise; and its
batch_id, if it has one.';

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

-- Rows arrive in the order of their time, and nearly in that of their jobs, so a few bytes for each megabyte are
-- enough to find an hour. Two indexes would cost a completion twice as much as one with two columns.
create index run_finished_idx on pgqueue.run using brin (finished_at, job_id) with (autosummarize);
comment on index pgqueue.run_finished_idx is 'What has finished since then? What happened to this job?';
-- The index of an empty table has a summary of the first megabyte, which all completions would take
-- turns to update. A range without a summary is read whole, and gets one when it is full.
do $$
begin
    perform brin_desummarize_range(i.inhrelid, 0)
    from pg_inherits as i
    where i.inhparent = 'pgqueue.run_finished_idx'::regclass;
end;
$$;

-- [Upgrades repeat this:
-- Every setting, with all its facts. From this list follow its column in the two tables below, with comment and
-- check, its default, what configure refuses, and the view settings. A new setting comes last, where an
-- upgrade adds its columns.
-- range: the lowest and the highest value or, for a text, all values; null for any. not_for: where the setting
-- cannot be made.
create or replace view pgqueue._setting as
select
    row_number() over () as place, s.name, s.type, s.fallback, r.range, n.not_for, s.meaning, r.said,
    concat_ws(
        '; ', r.said, 'default ' || coalesce(s.fallback, 'none'), 'not for ' || array_to_string(n.not_for, ' or ')
    ) as facts,
    s.name in ('keep_events', 'suspend_target', 'handler') as is_seldom
from (
    values
        ('paused', 'boolean', 'false', null, null, 'Accepts jobs and hands none out'),
        ('notify', 'boolean', 'true', null, '{a kind,a group}', 'Whether enqueue may send NOTIFY to parked workers'),
        ('keep_payloads', 'boolean', 'false', null, null, 'Whether run keeps the payloads of jobs that are gone'),
        ('max_attempts', 'int', '20', '{1}', null, 'Attempts of a job that gives no number'),
        ('keep_runs', 'int', '7', '{0,14}', null, 'Days to keep finished attempts in run; with 0 none are recorded'),
        ('max_payload_bytes', 'int', null, '{1}', null, 'Largest payload, as Postgres holds it uncompressed'),
        (
            'weight', 'int', '1', '{1,100}', '{a kind,each group}',
            'How many jobs of a group are served for each one of a group of weight 1'
        ),
        ('group_limit', 'int', null, '{1,1000}', '{a kind,each group}', 'How many jobs of a group may run at once'),
        (
            'max_running', 'int', null, '{1,1000}', '{a group}',
            'How many jobs of a queue or kind may run at once; for groups: group_limit'
        ),
        (
            'rate_limit', 'int', null, '{1,1000}', '{a kind and a group together}',
            'How many jobs of a queue, kind or group may begin in any rate_period'
        ),
        ('lease', 'interval', '30 seconds', '{1 microsecond,30 days}', null, 'Lease of a claim that gives none'),
        (
            'retry_base', 'interval', '5 seconds', '{0,366 days}', null,
            'Delay before the second attempt, doubled each time'
        ),
        ('retry_cap', 'interval', '1 hour', '{0,366 days}', null, 'Longest delay between attempts'),
        ('rate_period', 'interval', '1 second', '{1 millisecond,1 day}', null, 'The period of rate_limit'),
        (
            'age_after', 'interval', null, '{1 second,366 days}', '{a kind,a group}',
            'For each such interval a waiting job counts as one priority higher'
        ),
        ('keep_dead', 'interval', null, '{1 second,3660 days}', '{each group}', 'How long a dead job is kept'),
        (
            'wait_target', 'interval', '5 minutes', '{1 second,366 days}', '{a kind,a group}',
            'How long a job should wait at most, or health warns'
        ),
        (
            'group_on_retry', 'text', 'skip', '{skip,block}', '{a kind,each group}',
            'Whether a job that waits for its retry blocks its group'
        ),
        ('keep_events', 'interval', '30 days', '{1 second,3660 days}', '{less than all}', 'How long an event is kept'),
        (
            'suspend_target', 'interval', '7 days', '{1 second,366 days}', '{a kind,a group}',
            'How long a suspended job without a run_at should wait, or health warns'
        ),
        ('handler', 'text', null, null, '{a group}', 'The function that work calls for a job')
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
comment on column pgqueue._setting.is_seldom is
'Whether only maintain, health or work need it: it is not in queue_in_force.';
-- so far.]

-- A queue needs no row here. An empty name, kind or group_key stands for every one, and a null
-- sets nothing; _in_force() says which row wins. Hot calls read the table queue_in_force instead.
create table pgqueue.queue (
    name text,
    kind text not null default '',
    group_key text not null default '',
    -- group_key first: there may be many groups, so it narrows a search most.
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

-- Worked out from the table queue whenever that changes, so that a call finds what applies in one row, or
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
-- Adds or changes the columns of settings that are new or have a new comment. In queue_in_force a new column has
-- its default in every row, because nobody has set it yet, even in rows from the dump of an older version.
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
            case when s.type = 'text' and s.range <> '{}' then format('%I = any (%L)', s.name, s.range) end,
            case when 'less than all' = any (s.not_for) then 'name || kind || group_key = ''''' end,
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
            if not setting.is_seldom then
                execute format(
                    'alter table pgqueue.queue_in_force add %I %s %s', setting.name, setting.type,
                    'not null default ' || quote_literal(setting.fallback)
                );
            end if;
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
        continue when setting.is_seldom;
        execute format('comment on column pgqueue.queue_in_force.%I is %L', setting.name, setting.comment);
    end loop;
end;
$$;
-- so far.]

create index queue_keep_idx on pgqueue.queue (name) where num_nonnulls(keep_runs, keep_payloads) > 0;
comment on index pgqueue.queue_keep_idx is 'Which settings say what the log keeps, and how long?';

-- left(group_key, 1) sets apart the rows of groups, which may be many.
create index queue_limit_idx on pgqueue.queue (name, left(group_key, 1))
where num_nonnulls(max_running, rate_limit, rate_period, weight, group_limit, group_on_retry) > 0;
comment on index pgqueue.queue_limit_idx is 'Which caps has a queue, or limits its groups?';

create index queue_narrow_idx on pgqueue.queue (name, num_nonnulls(paused), left(group_key, 1))
where kind <> '' or group_key <> '';
comment on index pgqueue.queue_narrow_idx is 'What is set, or paused, for kinds and groups?';

create index queue_lease_idx on pgqueue.queue (name)
where lease is not null and (kind <> '' or group_key <> '');
comment on index pgqueue.queue_lease_idx is 'Do kinds or groups of a queue have leases of their own?';

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
comment on column pgqueue.service.until is 'How long this holds, if the session lives so long.';
comment on column pgqueue.service.started is 'When the session began; null if the owner of pgqueue may not see that.';
comment on column pgqueue.service.pid is 'The process of the session.';
comment on column pgqueue.service.queue is 'The queue.';
comment on column pgqueue.service.kinds is 'The kinds that it takes; null for all.';
create index service_session_idx on pgqueue.service (pid, queue);
comment on index pgqueue.service_session_idx is 'Has this session said that it serves a queue?';

-- Which features are used, so that nobody pays for what others use. Bits are only ever set, and at once, even if
-- the transaction rolls back: they may say too much, never too little.
create sequence pgqueue.used_seq minvalue -9223372036854775808 start 0;
comment on sequence pgqueue.used_seq is
'Bits: in which of 63 folds of queues something is set; below 0 if a schedule,
a batch, a dependency or an event ever was there, so that claims look around.';

create sequence pgqueue.lanes_seq minvalue -9223372036854775808 start 0;
comment on sequence pgqueue.lanes_seq is
'Which folds of queues may have jobs with a priority, or in a group: a bit for
each, 1 << (hashtext(queue) & 63).';

create sequence pgqueue.awaited_seq minvalue -9223372036854775808 start 0;
comment on sequence pgqueue.awaited_seq is
'Bits: in which of 63 folds of queues there may be jobs that others were enqueued
after, that sessions wait for, that have saved steps or were suspended; below 0
if access was ever limited to queues.';

-- In a DO, so that nothing is printed.
do $$
begin
    perform setval('pgqueue.used_seq', 0), setval('pgqueue.lanes_seq', 0), setval('pgqueue.awaited_seq', 0);
end;
$$;

-- Roles by name, because where a database is restored they have other oids, or may be missing.
create table pgqueue.access (
    role text not null,
    kind text not null,
    queue text not null,
    constraint access_pkey primary key (role, kind, queue)
);
comment on table pgqueue.access is 'Who has been granted which access. Rights on the functions come with it.';
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
    -- Each firing leaves a dead row, so vacuum by count, however few rows there are.
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

-- Which jobs wait for the end of others. No row is ever updated; module depend says who deletes it.
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
-- By a hash, so that a search for any of them can start at a random place.
create index dependency_waiter_idx on pgqueue.dependency (waiter_id, hashint8(job_id));
comment on index pgqueue.dependency_waiter_idx is 'Does it still wait for anything?';

-- A tie, for the functions that cut it.
create type pgqueue._tie as (place tid, job_id bigint, waiter_id bigint, is_doomed boolean, is_first boolean);
comment on type pgqueue._tie is
'A row of dependency: where it is; whether the waiting job is to be cancelled;
and whether the one that it waits for has ended, or is to be cancelled as well.';

-- 64 ids to a row, so that a purge writes few rows. A part may have several, because none is ever updated.
create table pgqueue.gone (
    part bigint not null,
    ids bigint not null,
    ended_at timestamptz not null
);
comment on table pgqueue.gone is
'The ids of jobs that were cancelled, purged or discarded: jobs enqueued after
one of them must not run. Kept for 14 days.';
comment on column pgqueue.gone.part is 'Which 64 ids they are among: id >> 6; below 0: which 64 of those of one shard.';
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
lose. And which events and waits have not been looked at since they were
committed: of these none may get lost.';
comment on column pgqueue.loose_end.look_at is 'Not before this moment.';
comment on column pgqueue.loose_end.id is 'A job, a batch, or the hash of an event.';
comment on column pgqueue.loose_end.what is
'ended: a job that others may still wait for; new: one that may have ended while
another was enqueued after it, to look at after all others; batch: a batch that
may be over; event: an event that was emitted; wait: a job that waits for one.';
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
-- Unique, so that finished_at counts as a key: otherwise a session that locks the row to add a job (for key share)
-- while another finishes the batch might get the old version.
create unique index batch_finished_idx on pgqueue.batch (finished_at, id);
comment on index pgqueue.batch_finished_idx is 'Which batches can be forgotten?';
create index batch_open_idx on pgqueue.batch (id) where finished_at is null;
comment on index pgqueue.batch_open_idx is 'Which batches have not finished?';
create index batch_problem_idx on pgqueue.batch (id) where problem is not null;
comment on index pgqueue.batch_problem_idx is 'Which callbacks could not be enqueued?';
create index batch_callback_idx on pgqueue.batch (callback_id) where callback_id is not null;
comment on index pgqueue.batch_callback_idx is 'Whose callback is this?';

create table pgqueue.tally (
    batch_id bigint not null,
    part bigint,
    jobs int not null default 0,
    dead int not null default 0,
    cancelled int not null default 0,
    parts int not null default 1
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
comment on column pgqueue.tally.parts is 'How many times 1,024 ids: on a shard, those among which 1,024 are its own.';
create index tally_batch_idx on pgqueue.tally (batch_id, part);
comment on index pgqueue.tally_batch_idx is 'Where are the jobs of a batch, and how have they ended?';

-- step and wait: kept in rows of their own, so that no claim has to copy them; see modules step and event. The end
-- of the job deletes both, but steps stay with a dead job.
create table pgqueue.step (
    job_id bigint not null,
    saved_at timestamptz not null,
    place int not null,
    name text not null,
    value jsonb not null,
    constraint step_pkey primary key (job_id, name)
);
comment on table pgqueue.step is 'What jobs have done, so that no retry does it again. Read it through steps.';
comment on column pgqueue.step.job_id is 'The job, which may be dead.';
comment on column pgqueue.step.saved_at is 'When it was saved.';
comment on column pgqueue.step.place is 'How many the job had, with this one.';
comment on column pgqueue.step.name is 'The name of the step.';
comment on column pgqueue.step.value is 'What it has given.';
create index step_place_idx on pgqueue.step (job_id, place);
comment on index pgqueue.step_place_idx is 'What has the job done last?';

create table pgqueue.wait (
    job_id bigint not null,
    since timestamptz not null,
    event text,
    step text,
    constraint wait_pkey primary key (job_id)
);
comment on table pgqueue.wait is
'Which jobs were suspended, from then until something else happens to them. One
whose event has happened is work left to do.';
comment on column pgqueue.wait.job_id is 'The job.';
comment on column pgqueue.wait.since is 'When it was suspended.';
comment on column pgqueue.wait.event is 'The event that it waits for; null for none.';
comment on column pgqueue.wait.step is 'The step to save if an operator ends the wait; null for none.';
create index wait_event_idx on pgqueue.wait (hashtextextended(event, 0)) where event is not null;
comment on index pgqueue.wait_event_idx is 'Who waits for an event?';

-- No row is ever updated, because an emit would have to wait for that.
create table pgqueue.event (
    emitted_at timestamptz not null,
    name text not null,
    payload jsonb not null,
    constraint event_pkey primary key (name)
);
comment on table pgqueue.event is
'What has happened, for as long as keep_events says. Read it through the view
events.';
comment on column pgqueue.event.emitted_at is 'When emit was called.';
comment on column pgqueue.event.name is 'The name of the event.';
comment on column pgqueue.event.payload is 'What the first emit said about it.';
create index event_emitted_idx on pgqueue.event (emitted_at);
comment on index pgqueue.event_emitted_idx is 'Which events can be forgotten?';

create type pgqueue._suspension as (event text, run_at timestamptz, after bigint[], step text);
comment on type pgqueue._suspension is
'What a suspended job waits for: an event, a moment or the ends of jobs,
whichever comes first; null for not. And the step that run_now saves.';

-- What metrics() counts. No job writes to these two tables: maintain() adds up the log.
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

-- A queue makes garbage as fast as it works, whatever its length, so vacuum by count and at full speed, and
-- analyze before the planner's statistics are far off. Dead index entries slow every claim. Returning the empty
-- end of a file to the system would lock everybody out, for space that the next burst needs; only tables whose
-- size tells a call whether a feature is used may be truncated. The last tables have no key.
do $$
declare
    change record;
begin
    for change in
        select c.what, r.name
        from (
            values
                (
                    '{job,ticket,permit,recent_key,dependency,loose_end,step,wait}',
                    'set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, '
                    'autovacuum_vacuum_cost_delay = 0, vacuum_index_cleanup = on)'
                ),
                ('{job,ticket,permit,recent_key}', 'set (vacuum_truncate = off)'),
                ('{job,recent_key}', 'set (autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000)'),
                ('{ticket,permit,gone,loose_end,tally,service}', 'replica identity full')
        ) as c (names, what)
        cross join unnest(c.names::text[]) as r (name)
    loop
        execute format('alter table pgqueue.%I %s', change.name, change.what);
    end loop;
end;
$$;

-- What claims and enqueues remember for each other; module lane says what the cells hold. They are sequences,
-- because all sessions can read and write these without creating row versions. Each takes 11 kB of every database,
-- and a comment on it would be another lock for CREATE EXTENSION to take.
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

-- Single cells; times are in us since 2020. Until when a completion checks whether a session waits for it.
create sequence pgqueue._cell_awaited minvalue 0;
-- The id up to which the sweep has looked at ties and batches.
create sequence pgqueue._cell_swept minvalue 0;
-- The group, by its hash, up to which the sweep has looked.
create sequence pgqueue._cell_groups_swept minvalue -9223372036854775808;
-- The page of permits up to which the sweep has looked.
create sequence pgqueue._cell_permits_swept minvalue 0;
-- When a claim has to sweep groups and permits.
create sequence pgqueue._cell_groups_due minvalue 0;
-- Until when enqueues note in a ticket where its group begins, because claims met many finished jobs.
create sequence pgqueue._cell_groups_slow minvalue 0;
-- Until when filtered claims (see pick) may pass over groups because a walk found nothing in them.
create sequence pgqueue._cell_groups_vain minvalue 0;
-- Until when claims check whether a limit of their queue is being set.
create sequence pgqueue._cell_held_off minvalue 0;
-- When a claim has to look for due schedules, ties and batches.
create sequence pgqueue._cell_due minvalue 0;
-- The timeline of the server when ids and tokens were last skipped.
create sequence pgqueue._cell_timeline minvalue 0;
-- Which transaction was the last to change settings.
create sequence pgqueue._cell_set_by minvalue 0;

-- One row if this database is a shard. pg_dump keeps the last value of an extension's sequence, but not its
-- increment: a trigger (module shard) sets that whenever the row is written, also during a restore.
create table pgqueue.shard (
    number int not null,
    of int not null,
    above bigint not null default 0,
    constraint shard_is_sane check (number >= 1 and number <= of and of <= 65536 and above >= 0)
);
alter table pgqueue.shard replica identity full;
comment on table pgqueue.shard is 'Which shard this database is, as told by the function shard; no row: none.';
comment on column pgqueue.shard.number is
'Its number: that of its ids and tokens, which are number, number + of,
number + 2 of ...';
comment on column pgqueue.shard.of is 'How many shards there can be.';
comment on column pgqueue.shard.above is 'Ids and tokens up to this are older than the shards: they may be of any.';

create table pgqueue.moving (
    what text not null,
    key text not null,
    content jsonb,
    constraint moving_pkey primary key (what, key)
);
comment on table pgqueue.moving is
'What move-groups is just moving between shards: on its way here, with its
content; or gone from here, without.';
comment on column pgqueue.moving.what is
'The table: job, dead_job or schedule; or paused: a group that is, meanwhile;
or shards: how many there are, for as long as move-groups is at work.';
comment on column pgqueue.moving.key is 'The id, the name, or the number.';
comment on column pgqueue.moving.content is 'The row that arrives; null if it has left.';

-- [Upgrades repeat this:
-- Marks for pg_dump: all rows of all tables, and the sequences that count; otherwise a restored
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
