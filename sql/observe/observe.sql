-- The views: what dashboards and people on call read. They show no payloads, take no locks and work on a
-- standby. Counts and estimates are in module measure. The clock is clock_timestamp(), read once for each query:
-- now() stands still in a long transaction, whose own jobs would look scheduled.

create or replace view pgqueue.jobs as
select
    j.id, j.queue, j.kind,
    case
        when j.lease_expires_at > c.moment then 'running'
        when j.lease_expires_at is not null or (j.terms).expires_at <= c.moment then 'expired'
        when j.run_at > c.moment and exists (
            select from pgqueue.wait as w
            where w.job_id = j.id and exists (select from pgqueue.event as e where e.name = w.event offset 0)
        ) then 'ready'
        when j.run_at = 'infinity' then 'blocked'
        when j.run_at > c.moment then 'scheduled'
        when j.group_key is not null and exists (
            select
            from pgqueue.ticket as t
            where hashtextextended(t.group_key, hashtext(t.queue)) = hashtextextended(j.group_key, hashtext(j.queue))
                and t.priority + 0 = j.priority and t.queue = j.queue and t.group_key = j.group_key
                -- As in _counts_as, but with statement_timestamp(), so that the ticket is not read for every job.
                and t.is_full and (t.at > statement_timestamp() or t.served < 0 and (
                    t.at > statement_timestamp() - interval '1 minute' or exists (
                        select
                        from pgqueue.permit as p
                        where hashtextextended(p.group_key, hashtextextended(p.kind, hashtext(p.queue)))
                                = hashtextextended(t.group_key, hashtextextended('', hashtext(t.queue)))
                            and p.queue = t.queue and p.kind = '' and p.group_key = t.group_key
                            and not p.is_rate and p.free_at = 'infinity' and exists (
                                select from pgqueue.job as h
                                where h.id = p.job_id and (h.token is not null or h.run_at > statement_timestamp())
                                offset 0
                            )
                    )
                ))
        ) then 'blocked'
        else 'ready'
    end as state,
    j.priority,
    nullif(j.run_at, 'infinity') as run_at,
    j.enqueued_at, j.attempt, j.max_attempts, j.worker, j.claimed_at, j.lease_expires_at,
    j.cancelled_at, j.unique_key, j.group_key,
    -- As _summary, which a reader may not call.
    case when c.reads_jobs then j.errors -> -1 ->> 'error'
        else left(split_part(ltrim(j.errors -> -1 ->> 'error', E' \t\r\n'), E'\n', 1), 500)
    end as last_error,
    (j.progress).done, (j.progress).total, (j.progress).message,
    round((j.progress).done / nullif(extract(epoch from (j.progress).told_at - j.claimed_at), 0), 3) as rate,
    -- Unknown until a hundred-thousandth is done.
    case when (j.progress).total < (j.progress).done * 100000 then greatest(
        ((j.progress).told_at - j.claimed_at) * ((j.progress).total / (j.progress).done - 1)::float8
            - (c.moment - (j.progress).told_at),
        interval '0'
    ) end as time_left,
    (j.terms).expires_at, (j.terms).batch_id,
    (
        select s.name from pgqueue.step as s where s.job_id = j.id order by s.place desc, s.saved_at desc limit 1
    ) as last_step,
    case when j.token is null and j.run_at > c.moment then (
        select w.event from pgqueue.wait as w where w.job_id = j.id
    ) end as event,
    case when j.token is null and j.run_at > c.moment then (
        select w.since from pgqueue.wait as w where w.job_id = j.id
    ) end as suspended_at,
    (select s.number from pgqueue.shard as s) as shard
from (select clock_timestamp() as moment, has_table_privilege('pgqueue.job', 'select') as reads_jobs) as c
cross join pgqueue.job as j;

comment on view pgqueue.jobs is
'Every waiting or running job, without its payload: state is scheduled, ready
(due, paused or not), running, expired (its lease has expired, or nobody began
it by its expires_at; a claim or maintain ends that) or blocked (it waits for
other jobs or an event, or its group is full or at its rate). One id is found by
an index; without it the whole table is read.
state: scheduled, ready, running, expired or blocked, by the clock of this
query.
run_at: The job runs no earlier; null while it waits for something other than
time.
last_error: Why the last failed attempt failed, or a worker has put the job off
since; null for neither. Only the first line for who may not read the table job.
done: How much the current attempt has reported as done; null if nothing.
total: How much there is to do, as reported.
message: What it is doing, as reported.
rate: How much it has done per second, from its claim to its last report.
time_left: How much longer it takes at that rate.
expires_at: From then on no attempt begins; null for never.
batch_id: The batch it belongs to; null for none.
last_step: The last step that it has saved; null for none.
event: The event that it was suspended for, if it still waits; null for none.
suspended_at: When it was suspended; null if it was not.
shard: Which shard this database is; null for none.';

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
        -- If it reads only every eighth page, or fewer, it may miss a queue.
        max(r.weight) >= 8 as misses_some,
        sum(r.done) as done,
        coalesce(sum(r.done) filter (where r.finished_at >= s.minutes), 0) as done_5m,
        coalesce(sum(r.done) filter (where r.finished_at >= s.minute), 0) as done_1m,
        sum(r.failed) as failed,
        coalesce(sum(r.failed) filter (where r.finished_at >= s.minutes), 0) as failed_5m,
        coalesce(sum(r.failed) filter (where r.finished_at >= s.minute), 0) as failed_1m,
        percentile_disc(array[0.5, 0.99]) within group (order by r.waited) filter (where r.worker is not null) as waited,
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
    -- Queues may share a lock, and any session could hold it: count only those that have said they serve the queue.
    select s.queue, count(distinct l.pid) as sessions
    from pg_locks as l
    join pgqueue.service as s on s.pid = l.pid and hashtext(s.queue) & 255 = l.objid::int
    where l.locktype = 'advisory' and l.classid = 7366514 and l.objsubid = 2 and l.mode = 'ShareLock' and l.granted
        and l.database = (select d.oid from pg_database as d where d.datname = current_database())
    group by s.queue
), narrower as (
    -- A pause or resume in a queue takes the place of a pause in all queues.
    select q.name as queue, count(*) filter (where q.paused) - count(a.name) as pauses
    from pgqueue.queue as q
    left join pgqueue.queue as a
        on a.name = '' and a.kind = q.kind and a.group_key = q.group_key and a.paused and q.name <> ''
    where q.paused is not null and (q.kind <> '' or q.group_key <> '')
    group by q.name
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
    (select count(distinct n.name) from unnest(c.workers || r.workers) as n (name)) as workers,
    coalesce(p.sessions, 0) as parked,
    case
        when coalesce(c.ready, 0) = 0 then interval '0'
        when r.done_5m > 0 then interval '1 second' * (300.0 * c.ready / r.done_5m)::float8
    end as time_to_empty,
    r.waited[1] as p50_wait_last_hour,
    r.waited[2] as p99_wait_last_hour,
    coalesce(r.done, 0) as finished_last_hour,
    coalesce(r.failed, 0) as failed_last_hour,
    round(coalesce(r.done_1m, 0) / 60.0, 3) as rate_1m,
    round(coalesce(r.done_5m, 0) / 300.0, 3) as rate_5m,
    round(coalesce(r.done, 0) / 3600.0, 3) as rate_1h,
    round(r.failed_1m::numeric / nullif(r.done_1m + r.failed_1m, 0), 3) as failure_rate_1m,
    round(r.failed_5m::numeric / nullif(r.done_5m + r.failed_5m, 0), 3) as failure_rate_5m,
    round(r.failed::numeric / nullif(r.done + r.failed, 0), 3) as failure_rate_1h,
    coalesce(n.pauses, 0) + coalesce(a.pauses, 0) as pauses
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
left join narrower as n on n.queue = k.queue
left join narrower as a on a.queue = ''
left join pgqueue.queue as own on own.name = k.queue and own.kind = '' and own.group_key = ''
left join pgqueue.queue as shared on shared.name = '' and shared.kind = '' and shared.group_key = '';

comment on view pgqueue.queues is
'One row for each queue that has jobs, dead jobs, settings, schedules, or runs in
the last hour. Counts while the table of jobs is small (16 MB), else reads an
index and estimates (see is_estimate); beyond 400 pages of runs, some 26,000,
only a sample is read, and beyond 800 pages a queue that has few of them may be
missing. Takes a few tens of milliseconds, however many jobs there are, also in
a thousand queues; with 30,000 queues some tenths of a second.
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
paused: Whether claims get nothing, except kinds or groups that were resumed.
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
failure_rate_1h: The same over an hour.
pauses: How many of its kinds and groups are paused; the view settings says
which.';

create or replace view pgqueue.running as
select
    j.id, j.queue, j.kind, j.worker,
    clock_timestamp() - j.claimed_at as running_for,
    j.lease_expires_at - clock_timestamp() as lease_left,
    j.attempt, j.max_attempts, j.cancelled_at, j.done, j.total, j.message, j.rate, j.time_left
from pgqueue._leased() as l (id)
join pgqueue.jobs as j on j.id = l.id
order by j.claimed_at;

comment on view pgqueue.running is
'The leased jobs, the longest-running first. Reads them all while the table of
jobs is small (16 MB), else the first 20,000 jobs, of which each lane has its
share, and ten at least, 10,000 more of lanes where most of the first ten run,
and the first of up to 1000 groups: all are there, unless claims have passed
over more (of other kinds, paused, at a cap), or more groups have jobs.
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
        cross join lateral (select j.* from pgqueue.job as j where j.id = l.id offset 0) as j
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
    percentile_disc(0.5) within group (order by r.taken) as p50_taken,
    percentile_disc(0.99) within group (order by r.taken) as p99_taken,
    max(r.finished_at) as last_finished_at
from pgqueue._recent_runs('-infinity', 500) as r
where r.done + r.failed > 0
group by r.queue, r.kind;

comment on view pgqueue.kinds is
'What each kind of job did in each queue, over all the days that run covers.
Beyond 500 pages of runs, some 30,000, only a sample is read: a kind that rarely
ran may be missing.
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
from pgqueue._recent_runs(date_trunc('minute', clock_timestamp()) - interval '59 minutes', 500) as r
where r.worker is not null
group by 1, 2
order by 1, 2;

comment on view pgqueue.throughput is
'What each queue did in each of the last 60 minutes in which it did anything; the
current minute is not over. Beyond 500 pages of runs, some 30,000, only a sample
is read.
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
    -- Only these need to know what is usual, which is expensive to find out.
    where least(j.lease_expires_at, j.cancelled_at, j.claimed_at + interval '9 minutes')
        < clock_timestamp() - interval '1 minute'
    offset 0
) as j
left join pgqueue.kinds as k on k.queue = j.queue and k.kind = j.kind
cross join lateral (
    -- The first problem that applies.
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

-- The defaults come from the list of settings, because a reader of the view may not call _defaults().
create or replace view pgqueue.settings as
select
    nullif(c.name, '') as queue,
    nullif(c.kind, '') as kind,
    nullif(c.group_key, '') as group_key,
    s.setting, s.value, s.set_for
from (select q.name, q.kind, q.group_key from pgqueue.queue as q union select '', '', '') as c
cross join lateral (
    select distinct on (e.key) e.key as setting, e.value, r.set_for
    from (
        select
            to_jsonb(q) - '{name,kind,group_key}'::text[]
                - case when q.kind || q.group_key = '' and c.kind || c.group_key <> ''
                    -- A queue's own do not apply to its kinds and groups.
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
    b.callback_id, b.group_key,
    case when has_table_privilege('pgqueue.job', 'select') then b.headers end as headers
from pgqueue.batch as b
left join lateral (
    select sum(n.jobs) as jobs, sum(n.dead) as dead, sum(n.cancelled) as cancelled
    from pgqueue.tally as n
    where n.batch_id = b.id
) as t on b.finished_at is null
left join lateral (
    select
        count(*) filter (where j.lease_expires_at is null) as waiting,
        count(*) filter (where j.lease_expires_at is not null) as running
    from (select distinct n.part, n.parts from pgqueue.tally as n where n.batch_id = b.id) as p
    join pgqueue.job as j on j.id between p.part << 10 and (p.part + p.parts << 10) - 1 and (j.terms).batch_id = b.id
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
cancelled: Jobs that were cancelled, or purged.
headers: Of its callback; null for who may not read the table job.';

-- Jobs have ids between that of their batch and that of its callback: all three come from one sequence.
create or replace view pgqueue.batch_jobs as
with part as not materialized (
    select n.batch_id, n.part << 10 as first, (n.part + n.parts << 10) - 1 as last
    from pgqueue.tally as n
    group by n.batch_id, n.part, n.parts
)
select p.batch_id, j.id, j.queue, j.kind, j.state, j.attempt
from part as p
-- One part at a time: otherwise the planner may think the parts are large, and read the whole table.
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
id: The job.
queue: The queue of the job.
kind: The kind of the job.
state: As in jobs, or dead.
attempt: Attempts begun.';

create or replace view pgqueue.dependencies as
select d.job_id, d.waiter_id, d.runs_if_dead
from pgqueue.dependency as d;

comment on view pgqueue.dependencies is
'Which jobs wait for which others to end. Found by either id.';

create or replace view pgqueue.events as
select e.name, e.payload, e.emitted_at
from pgqueue.event as e;

comment on view pgqueue.events is
'What has happened, as emit said, for as long as keep_events says. One event is
found by its name.
name: The event.
payload: What the first emit gave.
emitted_at: When that was.';

-- The state of a waiting or running job, or dead, or its outcome in run; null if nothing is known any more. A
-- stable function, so that a query without last_state does not call it.
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
    s.problem, s.group_key,
    case when has_table_privilege('pgqueue.job', 'select') then s.headers end as headers
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
dead, or its outcome in run; null if it is no longer known.
headers: Of its jobs; null for who may not read the table job.';

-- A table of more than 8 MB is not counted. Nor is the log read to find its beginning: rows come in
-- the order of their time, so the oldest are on the first pages of its parts.
create or replace view pgqueue.retention as
with size as (
    select
        t.what,
        sum(pg_total_relation_size(c.oid)) as bytes,
        sum(pg_relation_size(c.oid)) > 8388608 as is_large,
        -- Estimated like the planner does: as many rows per page as the last ANALYZE found, over all parts.
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
        -- More rows than fit into 8 MB: without a limit the planner would JIT-compile what never runs.
        when s.what = 'jobs' then (select count(*) from (select from pgqueue.job limit 300000) as j)
        when s.what = 'dead jobs' then (select count(*) from (select from pgqueue.dead_job limit 300000) as d)
        when s.what = 'runs' then (select count(*) from (select from pgqueue.run limit 300000) as r)
        else (select count(*) from (select from pgqueue.recent_key limit 300000) as k)
    end as rows,
    s.bytes::bigint as bytes,
    case s.what
        when 'jobs' then (select j.enqueued_at from pgqueue.job as j order by j.id limit 1)
        when 'dead jobs' then (select min(d.oldest) from pgqueue._dead_kinds() as d)
        -- The first 64 pages, because rollbacks leave pages without rows.
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
as $$ select '@VERSION@' $$;

comment on function pgqueue.version() is 'The version of the installed functions.';

-- The comment of a view ends with a line "column: ..." for each column of its own. Any other column gets the
-- comment of the table column of the same name that it shows.
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
                (
                    select col_description(s.attrelid, s.attnum)
                    from pg_rewrite as r
                    join pg_depend as d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid
                    join pg_attribute as s on s.attrelid = d.refobjid and s.attnum = d.refobjsubid
                    where r.ev_class = a.attrelid and d.refclassid = 'pg_class'::regclass and s.attname = a.attname
                    order by s.attrelid
                    limit 1
                ),
                col_description(a.attrelid, a.attnum)
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
