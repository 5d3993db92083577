-- The metrics: what the views say, in the text format of Prometheus (version 0.0.4). Nothing is counted here.
--
-- Gauges are of the moment, or of the window in their name; it does them no harm that the log is pruned and may be
-- sampled. Counters, which only grow, are what maintain() has added up. An unknown value has no sample. Names
-- follow the columns, and end in their unit.
--
-- There may be many queues: without by_queue only the four counters are by queue, and gauges are the sum or the
-- maximum of all queues, if either makes sense.

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
    -- Whoever asks once a minute must not leave a session for each minute that a table is locked.
    set lock_timeout = '1 s'
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
                ('pauses', 'Kinds and groups that are paused.', 'none', q.pauses),
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
                case when right(s.name, 6) = '_total' then 'counter' else 'gauge' end
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
milliseconds.
Fails with 55P03 if a table that it reads stays locked for a second.';
