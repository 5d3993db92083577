-- The views, and why(): what dashboards and people on call read. No payload is in them, they take no
-- locks and work on a standby. The clock is clock_timestamp(), read once for a query:
-- now() stands still in a long transaction, and its own jobs would look scheduled.

create or replace view pgqueue.jobs as
select
    j.id,
    j.queue,
    j.kind,
    case
        when j.lease_expires_at > c.moment then 'running'
        when j.lease_expires_at is not null or (j.terms).expires_at <= c.moment then 'expired'
        when j.run_at = 'infinity' or j.turn > c.moment then 'blocked'
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
    j.errors -> -1 ->> 'error' as last_error,
    (j.progress).done,
    (j.progress).total,
    (j.progress).message,
    round((j.progress).done / nullif(extract(epoch from (j.progress).told_at - j.claimed_at), 0), 3) as rate,
    -- Before a hundred thousandth is done nobody knows.
    case when (j.progress).total < (j.progress).done * 100000 then greatest(
        ((j.progress).told_at - j.claimed_at) * ((j.progress).total / (j.progress).done - 1)::float8
            - (c.moment - (j.progress).told_at),
        interval '0'
    ) end as time_left,
    (j.terms).expires_at
from (select clock_timestamp() as moment) as c
cross join pgqueue.job as j;

comment on view pgqueue.jobs is
'Every job that waits or runs, without its payload: state is scheduled, ready,
running, expired (its worker let the lease run out, or nobody began it by its
expires_at; a claim or maintain ends that) or blocked.';
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
comment on column pgqueue.jobs.done is
'How much the present attempt says it has done; null if it says nothing.';
comment on column pgqueue.jobs.total is 'How much it says there is to do.';
comment on column pgqueue.jobs.message is 'What it says it is doing.';
comment on column pgqueue.jobs.rate is
'How much it has done in a second, from its claim to its last word.';
comment on column pgqueue.jobs.time_left is 'How long it takes from now on at that rate.';
comment on column pgqueue.jobs.expires_at is
'From then on no attempt begins; null for no such end.';

-- Whether a queue is paused is found by a join: a reader of the view may not call _in_force().
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
'Jobs whose worker let the lease run out, or that were not begun in time. Alert
when this stays above 0.';
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
    j.cancelled_at,
    j.done,
    j.total,
    j.message,
    j.rate,
    j.time_left
from pgqueue.jobs as j
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
comment on column pgqueue.running.done is 'How much it says it has done; null if it says nothing.';
comment on column pgqueue.running.total is 'How much it says there is to do.';
comment on column pgqueue.running.message is 'What it says it is doing.';
comment on column pgqueue.running.rate is
'How much it has done in a second, from its claim to its last word.';
comment on column pgqueue.running.time_left is 'How long it takes from now on at that rate.';

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

-- The defaults once more, because a reader of the view may not call _in_force().
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
            to_jsonb(q) - '{name,kind,group_key}'::text[]
                - case when q.kind || q.group_key = '' and c.kind || c.group_key <> ''
                    -- What a queue has beside those of its kinds and groups.
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
            jsonb_build_object(
                'paused', false, 'notify', true, 'max_attempts', 20, 'keep_runs', 7,
                'keep_payloads', false, 'keep_dead', null,
                'max_payload_bytes', null, 'weight', 1, 'group_limit', null,
                'max_running', null, 'rate_limit', null, 'rate_period', interval '1 second',
                'age_after', null,
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

create or replace view pgqueue.batches as
select
    b.id,
    b.queue,
    coalesce(b.kind, b.queue) as kind,
    case when b.finished_at is not null then 'finished' when b.closed_at is not null then 'closed' else 'open' end
        as state,
    b.created_at,
    b.closed_at,
    b.finished_at,
    coalesce(b.finished_at, clock_timestamp()) - b.created_at as age,
    coalesce(w.waiting, 0) as waiting,
    coalesce(w.running, 0) as running,
    coalesce(b.completed, t.jobs - t.dead - t.cancelled - w.waiting - w.running, 0) as completed,
    coalesce(b.dead, t.dead, 0) as dead,
    coalesce(b.cancelled, t.cancelled, 0) as cancelled,
    b.callback_id
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
'The batches, for 14 days after they have finished, and how their jobs stand.';
comment on column pgqueue.batches.id is 'What create_batch returned.';
comment on column pgqueue.batches.queue is 'The queue of its callback.';
comment on column pgqueue.batches.kind is 'The kind of its callback.';
comment on column pgqueue.batches.state is
'open; closed: it finishes when its jobs have ended; finished: its callback has
been enqueued.';
comment on column pgqueue.batches.created_at is 'When create_batch was called.';
comment on column pgqueue.batches.closed_at is 'When close_batch was called.';
comment on column pgqueue.batches.finished_at is 'When its callback was enqueued.';
comment on column pgqueue.batches.age is 'How long ago it was created; of a finished one how long it took.';
comment on column pgqueue.batches.waiting is 'Jobs that wait.';
comment on column pgqueue.batches.running is 'Jobs that are leased.';
comment on column pgqueue.batches.completed is 'Jobs that completed.';
comment on column pgqueue.batches.dead is 'Jobs that died, and were not redriven before it finished.';
comment on column pgqueue.batches.cancelled is 'Jobs that were cancelled, or purged.';
comment on column pgqueue.batches.callback_id is 'Its callback, once it has finished.';

create or replace view pgqueue.schedules as
select
    s.name,
    s.queue,
    coalesce(s.kind, s.queue) as kind,
    s.cron,
    s.every,
    s.timezone,
    s.catch_up,
    s.jitter,
    s.is_paused as paused,
    nullif(case when not s.is_paused then s.next_slot end, 'infinity') as next_slot,
    s.last_slot,
    s.last_job_id,
    coalesce(
        (select j.state from pgqueue.jobs as j where j.id = s.last_job_id),
        (select 'dead' from pgqueue.dead_job as d where d.id = s.last_job_id),
        (
            select r.outcome
            from pgqueue.run as r
            where r.job_id = s.last_job_id
            order by r.finished_at desc, r.attempt desc
            limit 1
        )
    ) as last_state,
    s.problem
from pgqueue.schedule as s
order by s.name;

comment on view pgqueue.schedules is
'The recurring jobs, with the last and the next slot of each.';
comment on column pgqueue.schedules.name is 'Names the schedule.';
comment on column pgqueue.schedules.queue is 'The queue of its jobs.';
comment on column pgqueue.schedules.kind is 'The kind of its jobs.';
comment on column pgqueue.schedules.cron is 'The slots, as a cron text; null with every.';
comment on column pgqueue.schedules.every is 'Slots lie so far apart; null with cron.';
comment on column pgqueue.schedules.timezone is 'By which clocks cron is read.';
comment on column pgqueue.schedules.catch_up is
'What becomes of slots that nobody could fire in time: skip, one or all.';
comment on column pgqueue.schedules.jitter is
'Over how long schedules with the same slots are spread; null for not at all.';
comment on column pgqueue.schedules.paused is 'Whether it makes no jobs.';
comment on column pgqueue.schedules.next_slot is
'The next slot; null when it is paused. In the past for long: nobody is awake,
neither a worker nor maintain.';
comment on column pgqueue.schedules.last_slot is 'The last slot that has a job; null for none.';
comment on column pgqueue.schedules.last_job_id is 'The job of last_slot.';
comment on column pgqueue.schedules.last_state is
'What became of that job: its state in jobs while it waits or runs, dead, or its
outcome in run; null if nobody remembers it.';
comment on column pgqueue.schedules.problem is
'Why the next slot could not be fired; it is tried again each minute.';

-- A table of more than 8 MB is not counted. The log is not read to find its beginning: rows come in
-- the order of their time, so the first pages of its parts have the oldest.
create or replace view pgqueue.retention as
with recursive dead as (
    (
        select d.queue, d.kind, d.died_at
        from pgqueue.dead_job as d
        order by d.queue, d.kind, d.died_at
        limit 1
    )
    union all
    select n.*
    from dead as s
    cross join lateral (
        select d.queue, d.kind, d.died_at
        from pgqueue.dead_job as d
        where (d.queue, d.kind) > (s.queue, s.kind)
        order by d.queue, d.kind, d.died_at
        limit 1
    ) as n
), size as (
    select
        t.what,
        sum(pg_total_relation_size(c.oid)) as bytes,
        sum(pg_relation_size(c.oid)) > 8388608 as is_large,
        -- As the planner does it: as many rows in a page as at the last ANALYZE.
        sum(c.reltuples / nullif(c.relpages, 0) * pg_relation_size(c.oid) / 8192)::bigint as estimate
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
        when s.what = 'jobs' then (select count(*) from pgqueue.job)
        when s.what = 'dead jobs' then (select count(*) from pgqueue.dead_job)
        when s.what = 'runs' then (select count(*) from pgqueue.run)
        else (select count(*) from pgqueue.recent_key)
    end as rows,
    s.bytes::bigint as bytes,
    case s.what
        when 'jobs' then (select j.enqueued_at from pgqueue.job as j order by j.id limit 1)
        when 'dead jobs' then (select min(d.died_at) from dead as d)
        when 'runs' then (select min(r.finished_at) from pgqueue.run as r where r.ctid < '(4,0)')
    end as oldest,
    case s.what
        when 'dead jobs' then shared.keep_dead
        when 'runs' then make_interval(days => coalesce(shared.keep_runs, 7))
    end as kept_for
from size as s
left join pgqueue.queue as shared on shared.name = '' and shared.kind = '' and shared.group_key = ''
order by s.bytes desc;

comment on view pgqueue.retention is
'What is kept, how large it is, and for how long: jobs, dead jobs, runs, and the
windows of unique_for. The largest first.';
comment on column pgqueue.retention.what is 'jobs, dead jobs, runs or windows.';
comment on column pgqueue.retention.rows is
'How many; above 8 MB an estimate by the last ANALYZE, null without one.';
comment on column pgqueue.retention.bytes is 'On disk, with indexes.';
comment on column pgqueue.retention.oldest is
'When the oldest job was enqueued, dead job died, or run finished; null for
windows.';
comment on column pgqueue.retention.kept_for is
'keep_dead or keep_runs of all queues; those of a queue, kind or group are in
the view settings. null: for ever, or while it is needed.';

-- Why a job is not running. There is a function for each place where it may be, and why() asks the
-- right one; a further reason is a further line in one of them. All read only, and lock nothing.

create or replace function pgqueue._written(moment timestamptz)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return to_char(moment, 'YYYY-MM-DD HH24:MI:SSOF');
end;
$$;

comment on function pgqueue._written(timestamptz) is
'A moment as a sentence has it: in the time zone of the session, whatever its
DateStyle.';

create or replace function pgqueue._why_paused(job pgqueue.job)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
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

comment on function pgqueue._why_paused(pgqueue.job) is
'What of a job is paused: its queue, kind or group; null for nothing.';

create or replace function pgqueue._why_full(job pgqueue.job)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    group_limit int := (pgqueue._in_force(job.queue, '', job.group_key)).group_limit;
    held bigint;
    holder_id bigint;
    holder pgqueue.job;
begin
    if job.group_key is null or group_limit is null then
        return null;
    end if;
    select count(*), min(s.holder) into held, holder_id
    from pgqueue._slots(job.queue, job.group_key) as s
    where s.holder is not null and s.holder <> job.id;
    if held < group_limit then
        return null;
    end if;
    select j.* into holder from pgqueue.job as j where j.id = holder_id;
    return format('its group %s ', job.group_key)
        || case
            when holder.lease_expires_at is null then
                format('waits for the retry of job %s at %s', holder.id, pgqueue._written(holder.run_at))
            else format(
                'is busy with job %s, leased to %s until %s',
                holder.id, holder.worker, pgqueue._written(holder.lease_expires_at)
            )
        end
        || case when held > 1 then format(', and %s more', held - 1) else '' end;
end;
$$;

comment on function pgqueue._why_full(pgqueue.job) is
'By what the group of a job is kept busy, if it has a limit and is full.';

create or replace function pgqueue._why_capped(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    cap pgqueue._cap;
    free_at timestamptz;
    whose text;
begin
    foreach cap in array
        pgqueue._group_rates(job.queue, array[job.group_key]) || pgqueue._caps(job.queue, array[job.kind])
    loop
        select min(p.free_at) into free_at
        from pgqueue._permits(job.queue, cap, moment) as p
        having count(*) filter (where p.is_usable) = 0 and count(*) > 0;
        if cap.group_key <> '' and job.turn between moment and '9998-12-31 00:00 UTC' then
            free_at := job.turn;
        end if;
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

comment on function pgqueue._why_capped(pgqueue.job, timestamptz) is
'Which cap of its queue, kind or group a job waits for, if any.';

create or replace function pgqueue._why_leased(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case
        when job.lease_expires_at <= moment then format(
            'its lease expired at %s: the next %s %s (worker %s)',
            pgqueue._written(job.lease_expires_at),
            case when pgqueue._why_paused(job) is not null then 'maintain()' else 'claim' end,
            case
                when job.cancelled_at is not null then 'cancels it'
                when job.attempt >= job.max_attempts then 'moves it to dead_job'
                else 'recovers it'
            end,
            job.worker
        )
        when job.cancelled_at is not null then format(
            'its worker %s was asked to stop at %s: cancelling',
            job.worker, pgqueue._written(job.cancelled_at)
        )
        else format(
            'runs: attempt %s of %s, leased to %s until %s',
            job.attempt, job.max_attempts, job.worker, pgqueue._written(job.lease_expires_at)
        )
    end;
end;
$$;

comment on function pgqueue._why_leased(pgqueue.job, timestamptz) is
'why, of a job that a worker holds, or held until its lease expired.';

create or replace function pgqueue._why_blocked(job_id bigint)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select case
            when count(*) = 0 then 'blocked: its wait is over, and the next claim or maintain will see it'
            else format('blocked: waits for job %s', min(d.job_id))
                || case when count(*) > 1 then format(' and %s more', count(*) - 1) else '' end
        end
        from pgqueue.dependency as d
        join pgqueue.job as j on j.id = d.job_id
        where d.waiter_id = _why_blocked.job_id
    );
end;
$$;

comment on function pgqueue._why_blocked(bigint) is 'why, of a job that waits for others.';

create or replace function pgqueue._why_later(job pgqueue.job)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case
        when job.run_at = 'infinity' then pgqueue._why_blocked(job.id)
        when (job.errors -> -1 ->> 'attempt')::int = job.attempt then format(
            'waits for its retry at %s after attempt %s of %s: %s',
            pgqueue._written(job.run_at), job.attempt, job.max_attempts,
            pgqueue._summary(job.errors -> -1 ->> 'error')
        )
        else 'scheduled for ' || pgqueue._written(job.run_at)
    end || coalesce('; ' || pgqueue._why_paused(job), '');
end;
$$;

comment on function pgqueue._why_later(pgqueue.job) is 'why, of a job that is not due yet.';

create or replace function pgqueue._count_ahead(job pgqueue.job, moment timestamptz)
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_sort = off
    set enable_nestloop = on
as $$
declare
    age_after interval := (pgqueue._in_force(job.queue)).age_after;
begin
    return (
        select count(*)
        from (
            select
            from pgqueue._live_lanes(job.queue) as l
            cross join lateral (
                select pgqueue._due_by(l.priority, job.priority, job.run_at, moment, age_after) as due_by
            ) as b
            cross join lateral (
                select
                from pgqueue.job as j
                where hashtext(j.queue) = hashtext(job.queue) and j.queue = job.queue
                    and j.priority = l.priority
                    and (coalesce(j.turn, j.run_at), j.id) < (
                        case when l.priority <> job.priority then b.due_by else coalesce(job.turn, job.run_at) end,
                        case when l.priority <> job.priority then 9223372036854775807 else job.id end
                    )
                    and (l.priority = job.priority or j.run_at <= b.due_by)
                    and j.lease_expires_at is null
                order by coalesce(j.turn, j.run_at), j.id
                limit 10001
            ) as ahead
            where l.priority >= job.priority or age_after is not null
            limit 10001
        ) as a
    );
end;
$$;

comment on function pgqueue._count_ahead(pgqueue.job, timestamptz) is
'How many ready jobs claims meet before this one; beyond 10,000 it stops
counting.';

create or replace function pgqueue._unclaimed(queue text, moment timestamptz)
    returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_sort = off
    set enable_nestloop = on
    set enable_bitmapscan = on
as $$
declare
    lately timestamptz := moment - interval '10 minutes';
    last_claim timestamptz := (
        select max(f.claimed_at)
        from pgqueue._live_lanes(queue) as l
        cross join lateral (
            -- What runs stands where it stood, near the beginning.
            select j.claimed_at
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_unclaimed.queue) and j.queue = _unclaimed.queue
                and j.priority = l.priority
            order by coalesce(j.turn, j.run_at), j.id
            limit 1000
        ) as f
    );
begin
    return case
        -- Without runs nobody knows.
        when (pgqueue._in_force(queue)).keep_runs = 0 or last_claim > lately or exists (
            select from pgqueue.run as r
            where r.finished_at > lately and r.queue = _unclaimed.queue and r.worker is not null
        ) then null
        when last_claim is not null or exists (
            select from pgqueue.run as r where r.queue = _unclaimed.queue and r.worker is not null
        ) then 'no worker has claimed from it for 10 minutes'
        else 'no worker has claimed from it that it remembers'
    end;
end;
$$;

comment on function pgqueue._unclaimed(text, timestamptz) is
'Tells that nobody has claimed from a queue for a while, by the jobs that run
and the runs of the last ten minutes; null if somebody has.';

create or replace function pgqueue._why_ready(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    held_up text := coalesce(
        pgqueue._why_paused(job), pgqueue._why_full(job), pgqueue._why_capped(job, moment)
    );
    ahead bigint;
begin
    if held_up is not null then
        return held_up;
    end if;
    ahead := pgqueue._count_ahead(job, moment);
    return concat_ws('; ',
        case ahead
            when 0 then 'ready: next in its queue'
            else format(
                'ready: waits behind %s %s of higher priority or earlier turn in its queue',
                case when ahead > 10000 then 'more than 10,000' else to_char(ahead, 'FM999,999,999') end,
                case ahead when 1 then 'job' else 'jobs' end
            )
        end,
        pgqueue._unclaimed(job.queue, moment)
    );
end;
$$;

comment on function pgqueue._why_ready(pgqueue.job, timestamptz) is 'why, of a job that is due.';

create or replace function pgqueue._why_waits(job pgqueue.job, moment timestamptz)
    returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
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
        case when job.run_at > moment then pgqueue._why_later(job) else pgqueue._why_ready(job, moment) end,
        'expires at ' || pgqueue._written(expires_at) || format(' if it is not %s by then', begun)
    );
end;
$$;

comment on function pgqueue._why_waits(pgqueue.job, timestamptz) is
'why, of a job that nobody holds, and until when it may begin.';

create or replace function pgqueue._why_dead(dead pgqueue.dead_job)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return format(
        'dead since %s: %s; redrive_job(%s) sends it back',
        pgqueue._written(dead.died_at), pgqueue._summary(dead.error), dead.id
    );
end;
$$;

comment on function pgqueue._why_dead(pgqueue.dead_job) is 'why, of a dead job.';

create or replace function pgqueue._why_gone(job_id bigint)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    last pgqueue.run := pgqueue._last_run(job_id);
begin
    return case
        when last.job_id is null then null
        when last.outcome = 'completed' then
            format('completed at %s on attempt %s', pgqueue._written(last.finished_at), last.attempt)
        when last.outcome = 'cancelled' then concat_ws(
            ': ', 'cancelled at ' || pgqueue._written(last.finished_at), pgqueue._summary(last.result #>> '{}')
        )
        -- It was discarded or purged, which leaves no run.
        else format(
            'gone; its attempt %s failed at %s: %s',
            last.attempt, pgqueue._written(last.finished_at), last.error
        )
    end;
end;
$$;

comment on function pgqueue._why_gone(bigint) is
'why, of a job that is neither in job nor in dead_job, as far as run remembers;
null if it does not.';

create or replace function pgqueue.why(job_id bigint)
    returns text
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    present record;
    reason text;
    refused boolean;
begin
    -- In one statement, because it may just be moving from one to the other.
    select j as job, d as dead into present
    from (values (why.job_id)) as asked (id)
    left join pgqueue.job as j on j.id = asked.id
    left join pgqueue.dead_job as d on d.id = asked.id;

    reason := case
        when (present.job).lease_expires_at is not null then pgqueue._why_leased(present.job, moment)
        when (present.job).id is not null then pgqueue._why_waits(present.job, moment)
        when (present.dead).id is not null then pgqueue._why_dead(present.dead)
        else pgqueue._why_gone(job_id)
    end;
    refused := pgqueue._refuse(case when reason is null then pgqueue._unknown(job_id) end);
    return reason;
end;
$$;

comment on function pgqueue.why(bigint) is
'Says in one sentence why a job is not running, or what became of it. Reads
only; for a job that has ended it looks through run.
Raises PQ001 (no such job).';

create or replace function pgqueue.version()
    returns text
    language sql
    immutable
    parallel safe
    set search_path = pg_catalog, pg_temp
as $$ select '@VERSION@' $$;

comment on function pgqueue.version() is 'The version of the installed functions.';
