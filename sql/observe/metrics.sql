-- The metrics: what the views say, in the text format of Prometheus (version 0.0.4). Nothing is counted here.
--
-- All are gauges: the log forgets, and may be sampled, so no number here only grows. What is not known
-- has no sample. Names follow the columns, and end in their unit.

-- A label of a sample, its value escaped.
create or replace function pgqueue._label(name text, value text)
    returns text
    language sql
    immutable
as $$
    select name || '="' || replace(replace(replace(value, E'\\', E'\\\\'), '"', E'\\"'), E'\n', E'\\n') || '"'
$$;

create or replace function pgqueue.metrics()
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
    ), sample (name, help, labels, value) as (
        select 'jobs', 'Waiting and running jobs.', concat(q.label, ',state="', s.state, '"'), s.jobs::numeric
        from queue as q
        cross join lateral (
            values ('ready', q.ready), ('scheduled', q.scheduled), ('running', q.running), ('expired', q.expired),
                ('blocked', q.blocked)
        ) as s (state, jobs)
        union all
        select s.name, s.help, q.label, s.value
        from queue as q
        cross join lateral (
            values
                ('dead_jobs', 'Dead jobs.', q.dead::numeric),
                ('is_estimate', '1 if a job count is an estimate.', q.is_estimate::int),
                ('paused', '1 if claims get nothing.', q.paused::int),
                ('workers', 'Workers that hold a job, or ended one in 5 minutes.', q.workers),
                ('parked', 'Sessions that sleep until notified of a job.', q.parked),
                ('oldest_wait_seconds', 'How long the oldest ready job has been due.',
                    extract(epoch from q.oldest_wait)),
                ('p99_wait_seconds', '1 % of the ready jobs have been due for longer.',
                    extract(epoch from q.p99_wait)),
                ('p50_wait_last_hour_seconds', 'Half of the attempts of the last hour waited at most this long.',
                    extract(epoch from q.p50_wait_last_hour)),
                ('p99_wait_last_hour_seconds', '99 % of the attempts of the last hour waited at most this long.',
                    extract(epoch from q.p99_wait_last_hour)),
                ('time_to_empty_seconds', 'How long the ready jobs take at the rate of the last 5 minutes.',
                    extract(epoch from q.time_to_empty)),
                ('finished_last_hour', 'Attempts completed in the last hour.', q.finished_last_hour),
                ('failed_last_hour', 'Attempts failed or expired in the last hour.', q.failed_last_hour),
                ('rate_1m_per_second', 'Jobs completed per second, over 1 minute.', q.rate_1m),
                ('rate_5m_per_second', 'Jobs completed per second, over 5 minutes.', q.rate_5m),
                ('rate_1h_per_second', 'Jobs completed per second, over 1 hour.', q.rate_1h),
                ('failure_rate_1m_ratio', 'Share of failed or expired attempts, over 1 minute.', q.failure_rate_1m),
                ('failure_rate_5m_ratio', 'Share of failed or expired attempts, over 5 minutes.', q.failure_rate_5m),
                ('failure_rate_1h_ratio', 'Share of failed or expired attempts, over 1 hour.', q.failure_rate_1h)
        ) as s (name, help, value)
        union all
        select
            'schedule_late_seconds', 'How long the next slot, plus jitter, has been due.',
            pgqueue._label('queue', c.queue) || ',' || pgqueue._label('schedule', c.name),
            greatest(extract(epoch from clock_timestamp() - c.next_slot - coalesce(c.jitter, '0')), 0)
        from pgqueue.schedules as c
        where c.next_slot is not null
        union all
        select v.name, v.help, pgqueue._label('what', k.what), v.value
        from pgqueue.retention as k
        cross join lateral (
            values
                ('retention_rows', 'How many rows are kept.', k.rows),
                ('retention_bytes', 'How large they are on disk, with indexes.', k.bytes)
        ) as v (name, help, value)
        union all
        select 'info', 'The version of pgqueue; always 1.', pgqueue._label('version', pgqueue.version()), 1
    ), family as (
        select
            s.name collate "C" as name,
            format(E'# HELP pgqueue_%s %s\n# TYPE pgqueue_%s gauge\n', s.name, s.help, s.name) || string_agg(
                format(E'pgqueue_%s{%s} %s\n', s.name, s.labels, trim_scale(s.value)), ''
                order by s.labels collate "C"
            ) as text
        from sample as s
        where s.value is not null
        group by s.name, s.help
    )
    select string_agg(f.text, '' order by f.name) into exposition from family as f;
    return exposition;
end;
$$;

comment on function pgqueue.metrics() is
'The numbers of the views queues, schedules and retention, in the text format of
Prometheus. Costs what these cost: a few tens of milliseconds.';
