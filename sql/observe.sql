-- The views: what dashboards and people on call read. No payload is in them, they take no
-- locks and work on a standby. The clock is clock_timestamp(), read once for a query:
-- now() stands still in a long transaction, and its own jobs would look scheduled.

create or replace view pgqueue.jobs as
select
    j.id,
    j.queue,
    j.kind,
    case
        when j.lease_expires_at > c.moment then 'running'
        when j.lease_expires_at is not null then 'expired'
        when j.run_at = 'infinity' then 'blocked'
        when j.run_at > c.moment then 'scheduled'
        else 'ready'
    end as state,
    j.priority,
    nullif(j.run_at, 'infinity') as run_at,
    j.enqueued_at,
    j.attempt,
    j.max_attempts,
    j.worker,
    j.claimed_at,
    j.lease_expires_at,
    j.cancelled_at,
    j.unique_key,
    j.group_key,
    j.errors -> -1 ->> 'error' as last_error
from (select clock_timestamp() as moment) as c
cross join pgqueue.job as j;

comment on view pgqueue.jobs is
'Every job that waits or runs, without its payload: state is scheduled, ready,
running, expired (its worker let the lease run out; anyone may recover it) or
blocked.';
comment on column pgqueue.jobs.id is 'The job''s id.';
comment on column pgqueue.jobs.queue is 'The queue it waits in.';
comment on column pgqueue.jobs.kind is 'Which handler runs it.';
comment on column pgqueue.jobs.state is
'scheduled, ready, running, expired or blocked, by the clock of this query.';
comment on column pgqueue.jobs.priority is 'Larger runs first.';
comment on column pgqueue.jobs.run_at is 'Not before this moment; null when blocked.';
comment on column pgqueue.jobs.enqueued_at is 'When enqueue was called.';
comment on column pgqueue.jobs.attempt is 'Attempts begun.';
comment on column pgqueue.jobs.max_attempts is 'With this many attempts used up the job is dead.';
comment on column pgqueue.jobs.worker is 'Who runs it; null when it waits.';
comment on column pgqueue.jobs.claimed_at is 'When the present attempt began; null when it waits.';
comment on column pgqueue.jobs.lease_expires_at is
'Until when its worker must extend or end it; null when it waits.';
comment on column pgqueue.jobs.cancelled_at is 'When an operator asked it to stop.';
comment on column pgqueue.jobs.unique_key is 'At most one job of the queue with this key waits or runs.';
comment on column pgqueue.jobs.group_key is 'The entity or tenant it belongs to.';
comment on column pgqueue.jobs.last_error is 'Why the last attempt failed; null if none did.';

-- Whether a queue is paused is found by a join: a reader of the view may not call _settings().
create or replace view pgqueue.queues as
with waiting as (
    select
        j.queue,
        count(*) filter (where j.state = 'ready') as ready,
        count(*) filter (where j.state = 'scheduled') as scheduled,
        count(*) filter (where j.state = 'running') as running,
        count(*) filter (where j.state = 'expired') as expired,
        count(*) filter (where j.state = 'blocked') as blocked,
        clock_timestamp() - min(j.run_at) filter (where j.state = 'ready') as oldest_wait,
        clock_timestamp() - percentile_disc(0.01) within group (order by j.run_at)
            filter (where j.state = 'ready') as p99_wait
    from pgqueue.jobs as j
    group by j.queue
), buried as (
    select d.queue, count(*) as dead
    from pgqueue.dead_job as d
    group by d.queue
), recent as (
    select
        r.queue,
        count(*) filter (where r.outcome = 'completed') as finished,
        count(*) filter (where r.outcome in ('retry', 'expired', 'dead')) as failed
    from pgqueue.run as r
    where r.finished_at > clock_timestamp() - interval '1 hour'
    group by r.queue
), known as (
    select w.queue from waiting as w
    union
    select b.queue from buried as b
    union
    select r.queue from recent as r
    union
    select q.name from pgqueue.queue as q where q.name <> ''
)
select
    k.queue,
    coalesce(w.ready, 0) as ready,
    coalesce(w.scheduled, 0) as scheduled,
    coalesce(w.running, 0) as running,
    coalesce(w.expired, 0) as expired,
    coalesce(w.blocked, 0) as blocked,
    coalesce(b.dead, 0) as dead,
    w.oldest_wait,
    w.p99_wait,
    coalesce(own.paused, shared.paused, false) as paused,
    coalesce(r.finished, 0) as finished_last_hour,
    coalesce(r.failed, 0) as failed_last_hour
from known as k
left join waiting as w on w.queue = k.queue
left join buried as b on b.queue = k.queue
left join recent as r on r.queue = k.queue
left join pgqueue.queue as own on own.name = k.queue and own.kind = '' and own.group_key = ''
left join pgqueue.queue as shared on shared.name = '' and shared.kind = '' and shared.group_key = '';

comment on view pgqueue.queues is
'One row for each queue that has jobs, dead jobs, settings, or runs in the last
hour. Counts every job: some tenths of a second for a million.';
comment on column pgqueue.queues.queue is 'The queue.';
comment on column pgqueue.queues.ready is 'Jobs that could run now.';
comment on column pgqueue.queues.scheduled is 'Jobs whose time has not come, retries among them.';
comment on column pgqueue.queues.running is 'Jobs under a valid lease.';
comment on column pgqueue.queues.expired is
'Jobs whose worker let the lease run out. Alert when this stays above 0.';
comment on column pgqueue.queues.blocked is 'Jobs that wait for something other than time.';
comment on column pgqueue.queues.dead is 'Dead jobs. Alert when this grows.';
comment on column pgqueue.queues.oldest_wait is
'How long the oldest ready job has been due; null when none is. Alert on this.';
comment on column pgqueue.queues.p99_wait is 'The wait that 1 % of the ready jobs exceed.';
comment on column pgqueue.queues.paused is
'Whether claims are given nothing; what is paused by kind or group is in the
view settings.';
comment on column pgqueue.queues.finished_last_hour is 'Attempts completed in the last hour.';
comment on column pgqueue.queues.failed_last_hour is 'Attempts failed or expired in the last hour.';

create or replace view pgqueue.running as
select
    j.id,
    j.queue,
    j.kind,
    j.worker,
    clock_timestamp() - j.claimed_at as running_for,
    j.lease_expires_at - clock_timestamp() as lease_left,
    j.attempt,
    j.max_attempts,
    j.cancelled_at
from pgqueue.job as j
where j.lease_expires_at is not null
order by j.claimed_at;

comment on view pgqueue.running is
'Every leased job, the longest-running first.';
comment on column pgqueue.running.id is 'The job''s id.';
comment on column pgqueue.running.queue is 'The job''s queue.';
comment on column pgqueue.running.kind is 'The job''s kind.';
comment on column pgqueue.running.worker is 'Who runs it.';
comment on column pgqueue.running.running_for is 'Time since it was claimed.';
comment on column pgqueue.running.lease_left is
'Time until the lease expires; negative once it has, and the worker is probably
dead.';
comment on column pgqueue.running.attempt is 'Which attempt this is.';
comment on column pgqueue.running.max_attempts is 'How many there may be.';
comment on column pgqueue.running.cancelled_at is 'When an operator asked it to stop.';

create or replace view pgqueue.kinds as
select
    r.queue,
    r.kind,
    count(*) as runs,
    count(*) filter (where r.outcome in ('retry', 'expired', 'dead')) as failures,
    percentile_disc(0.5) within group (order by r.taken) as p50_taken,
    percentile_disc(0.99) within group (order by r.taken) as p99_taken,
    max(r.finished_at) as last_finished_at
from pgqueue.run as r
where r.outcome <> 'cancelled'
group by r.queue, r.kind;

comment on view pgqueue.kinds is
'What each kind of job did in each queue, over all the days that run remembers.';
comment on column pgqueue.kinds.queue is 'The queue.';
comment on column pgqueue.kinds.kind is 'The kind.';
comment on column pgqueue.kinds.runs is 'Finished attempts.';
comment on column pgqueue.kinds.failures is 'Those that failed or whose lease expired.';
comment on column pgqueue.kinds.p50_taken is 'Half of the attempts took at most this long.';
comment on column pgqueue.kinds.p99_taken is '99 % of the attempts took at most this long.';
comment on column pgqueue.kinds.last_finished_at is 'When one last finished.';

-- The defaults once more, because a reader of the view may not call _settings().
create or replace view pgqueue.settings as
select
    nullif(c.name, '') as queue,
    nullif(c.kind, '') as kind,
    nullif(c.group_key, '') as group_key,
    s.setting,
    s.value,
    s.set_for
from (
    select q.name, q.kind, q.group_key from pgqueue.queue as q
    union
    select '', '', ''
) as c
cross join lateral (
    select distinct on (e.key) e.key as setting, e.value, r.set_for
    from (
        select
            to_jsonb(q) - '{name,kind,group_key}'::text[],
            case
                when q.kind <> '' and q.group_key <> '' then 'kind and group'
                when q.kind <> '' then 'kind'
                when q.group_key <> '' then 'group'
                when q.name <> '' then 'queue'
                else 'all queues'
            end || case when q.name = '' and q.kind || q.group_key <> '' then ' in all queues' else '' end,
            array[q.group_key <> '', q.kind <> '', q.name <> '']
        from pgqueue.queue as q
        where q.name in ('', c.name) and q.kind in ('', c.kind) and q.group_key in ('', c.group_key)
        union all
        select
            jsonb_build_object(
                'paused', false, 'notify', true, 'max_attempts', 20, 'keep_runs', 7,
                'max_payload_bytes', null, 'weight', 1, 'group_limit', null,
                'lease', interval '30 seconds', 'retry_base', interval '5 seconds',
                'retry_cap', interval '1 hour', 'group_on_retry', 'skip'
            ),
            'default',
            '{}'
    ) as r (settings, set_for, narrowness)
    cross join lateral jsonb_each_text(r.settings) as e
    where e.value is not null or r.set_for = 'default'
    order by e.key, r.narrowness desc
) as s
order by c.name, c.group_key, c.kind, s.setting;

comment on view pgqueue.settings is
'Every setting in force for all queues (the first rows, where queue is null) and
for each queue, kind or group of which anything was said, and where it was
said. Of what is not here the wider holds.';
comment on column pgqueue.settings.queue is 'The queue; null for all.';
comment on column pgqueue.settings.kind is 'The kind; null for all.';
comment on column pgqueue.settings.group_key is 'The group; null for all.';
comment on column pgqueue.settings.setting is
'The setting, as an argument of configure, or paused.';
comment on column pgqueue.settings.value is 'What is in force; null for no limit.';
comment on column pgqueue.settings.set_for is
'The narrowest for which it was set: kind and group, group, kind (each of this
queue, or followed by "in all queues"), queue, all queues or default.';

create or replace function pgqueue.version()
    returns text
    language sql
    immutable
    parallel safe
    set search_path = pg_catalog, pg_temp
as $$ select '@VERSION@' $$;

comment on function pgqueue.version() is 'The version of the installed functions.';
