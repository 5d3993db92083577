-- Health: what is wrong or will be soon, and the SQL that fixes it.
--
-- There is a function for each check, which returns a row for each finding and takes its thresholds as
-- arguments; what is four times beyond one is critical. All of them only read, work on a standby,
-- and look at catalogs, at the fronts of lanes and at the view queues, never at all jobs.

-- What waits

-- Every lane of any queue in which a job is due or runs, with its bounds.
create or replace function pgqueue._fronts(moment timestamptz)
    returns table (queue text, lane int, since timestamptz, until timestamptz)
    language plpgsql
as $$
begin
    return query
    select l.queue, l.lane, l.first, moment from pgqueue._lanes(0) as l where l.first <= moment;
end;
$$;

-- Each queue whose oldest ready job waits beyond its wait_target, by the first of each lane. Paused jobs
-- are reported separately, and never critical.
create or replace function pgqueue._health_waits()
    returns table (status text, detail text, hint text)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
    oldest record;
    target interval;
    job pgqueue.job;
    reason text;
begin
    for oldest in
        -- Paused jobs separately, or they would come before what should run.
        select distinct on (w.queue, p.is_paused) w.queue, w.id, moment - w.run_at as wait, p.is_paused
        from pgqueue._fronts(moment) as f
        cross join lateral (select s.paused as is_paused, s.has_pauses from pgqueue._in_force(f.queue) as s offset 0) as q
        cross join lateral (
            select case when q.has_pauses then pgqueue._paused(f.queue, q.is_paused) end as paused offset 0
        ) as n
        cross join lateral (
            select v.is_paused
            from (values (false), (true)) as v (is_paused)
            where v.is_paused = q.is_paused or n.paused is not null
            offset 0
        ) as p
        cross join lateral (
            select r.*
            from (
                select j.queue, j.id, j.run_at
                from (
                    select j.*
                    from pgqueue.job as j
                    where pgqueue._is_in_lane(j, f.queue, f.lane)
                        and j.run_at >= f.since and j.run_at < f.until
                    order by j.run_at, j.id
                    limit 10000
                ) as j
                where j.lease_expires_at is null and ((j.terms).expires_at <= moment) is not true
                    and (j.group_key is null or not exists (
                        select
                        from pgqueue.ticket as t
                        where pgqueue._is_ticket_of(t, j.queue, j.group_key)
                            and t.priority = j.priority and t.is_full
                    ))
                    and coalesce(
                        n.paused -> j.group_key -> j.kind, n.paused -> j.group_key -> '',
                        n.paused -> '' -> j.kind, n.paused -> '' -> '', to_jsonb(q.is_paused)
                    ) = to_jsonb(p.is_paused)
                limit 1
            ) as r
            order by r.run_at
            limit 1
        ) as w
        order by w.queue, p.is_paused, w.run_at
    loop
        target := (pgqueue._in_force(oldest.queue)).wait_target;
        continue when oldest.wait <= target;
        select j.* into job from pgqueue.job as j where j.id = oldest.id;
        continue when not found;
        reason := case when oldest.is_paused then pgqueue._why_paused(job) end;
        status := case when not oldest.is_paused and oldest.wait > 4 * target then 'critical' else 'warning' end;
        detail := format(
            'queue %s: job %s has been due for %s, the wait_target is %s', oldest.queue, oldest.id,
            date_trunc('second', oldest.wait), target
        ) || coalesce('; ' || coalesce(reason, pgqueue._why_full(job), pgqueue._why_capped(job, moment)), '');
        hint := case reason
            when 'its queue is paused' then format('select pgqueue.resume(%L)', job.queue)
            when 'its kind is paused' then format('select pgqueue.resume(%L, %L)', job.queue, job.kind)
            when 'its group is paused' then
                format('select pgqueue.resume(%L, group_key => %L)', job.queue, job.group_key)
            else format('select pgqueue.why(%s)', job.id)
        end;
        return next;
    end loop;
end;
$$;

-- Each queue in which leases expired that long ago and nobody has recovered the jobs, among the first
-- hundred of each lane, where such jobs end up.
create or replace function pgqueue._health_leases(patience interval default '3 minutes')
    returns table (status text, detail text, hint text)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
begin
    return query
    select
        case when moment - min(j.lease_expires_at) > 4 * patience then 'critical' else 'warning' end,
        format(
            'queue %s: the lease of job %s expired %s ago (worker %s), and neither a claim nor maintain() '
            'has recovered it',
            j.queue, (array_agg(j.id order by j.lease_expires_at))[1],
            date_trunc('second', moment - min(j.lease_expires_at)),
            (array_agg(j.worker order by j.lease_expires_at))[1]
        ) || case when count(*) > 1 then format('; %s more expired, too', count(*) - 1) else '' end,
        'select pgqueue.reap()'
    from pgqueue._fronts(moment) as f
    cross join lateral (
        select j.*
        from pgqueue.job as j
        where pgqueue._is_in_lane(j, f.queue, f.lane)
            and j.run_at >= f.since and j.run_at < f.until
        order by j.run_at, j.id
        limit 100
    ) as j
    where j.lease_expires_at < moment - patience
    group by j.queue;
end;
$$;

-- Schedules that nobody has fired for that long, and those that cannot be fired.
create or replace function pgqueue._health_schedules(patience interval default '2 minutes')
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
begin
    return query
    select
        case when moment - min(s.due_at) > 4 * patience then 'critical' else 'warning' end,
        format(
            'schedule %s has been due for %s, and neither a worker nor maintain() has fired it',
            (array_agg(s.name order by s.due_at))[1], date_trunc('second', moment - min(s.due_at))
        ) || case when count(*) > 1 then format('; %s more are late', count(*) - 1) else '' end,
        'select from pgqueue.maintain()'
    from pgqueue.schedule as s
    where s.due_at < moment - patience
    having count(*) > 0
    union all
    select
        'warning', format('schedule %s cannot be fired: %s', s.name, s.problem),
        format('select pgqueue.pause_schedule(%L)', s.name)
    from pgqueue.schedule as s
    where s.problem is not null and not s.is_paused;
end;
$$;

-- Batches whose callback could not be enqueued, and, of the first 1000 that have not finished, those that
-- nobody has closed for that long.
create or replace function pgqueue._health_batches(patience interval default '1 day')
    returns table (status text, detail text, hint text)
    language plpgsql
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
begin
    return query
    select
        'critical', format('the callback of batch %s is dead job %s, because it could not be enqueued: %s',
            b.id, b.callback_id, b.problem
        ),
        format('select pgqueue.redrive_job(%s)', b.callback_id)
    from pgqueue.batch as b
    join pgqueue.dead_job as d on d.id = b.callback_id
    where b.problem is not null
    order by b.id
    limit 10;
    return query
    select
        case when moment - min(o.created_at) > 4 * patience then 'critical' else 'warning' end,
        format(
            'batch %s of queue %s has been open for %s, and has no job that waits or runs',
            (array_agg(o.id order by o.id))[1], (array_agg(o.queue order by o.id))[1],
            date_trunc('second', moment - min(o.created_at))
        ) || case when count(*) > 1 then format('; so have %s more', count(*) - 1) else '' end,
        format('select pgqueue.close_batch(%s)', min(o.id))
    from (
        select b.*
        from pgqueue.batch as b
        where b.finished_at is null
        order by b.id
        limit 1000
    ) as o
    cross join lateral pgqueue._last_job(o.id, 9223372036854775807) as l
    where o.closed_at is null and o.created_at < moment - patience and num_nonnulls(l.id, l.touched) = 0
    having count(*) > 0;
end;
$$;

-- How work goes

-- Each queue whose jobs have waited that long while no worker serves it, or will take target_times its
-- wait_target at the current rate; or that share of whose attempts failed, and that many in an hour. If a
-- kind or group is paused only failures are checked; if the queue is, nothing.
create or replace function pgqueue._health_queues(
    patience interval default '2 minutes', target_times int default 12, share numeric default 0.2,
    failures int default 10
)
    returns table (name text, status text, detail text, hint text)
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
begin
    return query
    select f.*
    from pgqueue.queues as q
    -- The view has another collation, which no index of names has.
    cross join lateral (values (q.queue collate "default")) as n (name)
    cross join lateral (select pgqueue._in_force(n.name) as settings offset 0) as t
    -- Perhaps all waiting jobs are paused.
    cross join lateral (
        select q.oldest_wait > patience and not exists (
            select from pgqueue.queue as s
            where s.name in ('', n.name) and (s.kind <> '' or s.group_key <> '')
                and num_nonnulls(s.paused, s.lease) > 0 and s.paused
        ) as is_late
    ) as l
    cross join lateral (
        select
            'workers', case when q.oldest_wait > 4 * patience then 'critical' else 'warning' end,
            format(
                'queue %s has %s ready jobs, the oldest due for %s, and no worker serves it', q.queue,
                to_char(q.ready, 'FM999,999,999,999'), date_trunc('second', q.oldest_wait)
            ),
            'select * from pgqueue.workers'
        -- Without runs this is unknown, and jobs may begin rarely.
        where l.is_late and q.workers = 0 and q.parked = 0 and (t.settings).keep_runs > 0 and not exists (
            select from pgqueue.queue as s
            where s.name in ('', n.name) and num_nonnulls(s.max_running, s.rate_limit, s.rate_period) > 0
                and s.rate_period > patience
        )
        union all
        select
            'backlog',
            case when q.time_to_empty > 4 * target_times * (t.settings).wait_target
                then 'critical' else 'warning' end,
            format(
                'queue %s has %s ready jobs, which take %s at the rate of the last five minutes, %s jobs a second by '
                '%s workers', q.queue, to_char(q.ready, 'FM999,999,999,999'), date_trunc('second', q.time_to_empty),
                q.rate_5m, q.workers
            ),
            format('select * from pgqueue.kinds where queue = %L', q.queue)
        -- The rate of a burst that has just begun is not known yet.
        where l.is_late and q.time_to_empty > target_times * (t.settings).wait_target
        union all
        select
            'failures',
            case when q.failure_rate_5m > 4 * share and q.failed_last_hour >= 4 * failures
                then 'critical' else 'warning' end,
            format(
                'queue %s: %s %% of the attempts of the last five minutes failed or expired, and %s in the last hour',
                q.queue, round(100 * q.failure_rate_5m), to_char(q.failed_last_hour, 'FM999,999,999,999')
            ),
            format('select * from pgqueue.failures where queue = %L', q.queue)
        where q.failure_rate_5m > share and q.failed_last_hour >= failures
    ) as f
    where not q.paused;
end;
$$;

-- Each queue of which this many jobs died in the last hour, counted up to 1,000 of a kind.
create or replace function pgqueue._health_dead(deaths int default 10)
    returns table (status text, detail text, hint text)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
begin
    return query
    select
        case when sum(c.jobs) > 4 * deaths then 'critical' else 'warning' end,
        format(
            'queue %s: %s jobs died in the last hour', k.queue,
            case when max(c.jobs) > 1000 then 'more than 1,000' else to_char(sum(c.jobs), 'FM999,999,999,999') end
        ),
        format('select * from pgqueue.dead where queue = %L', k.queue)
    from pgqueue._dead_kinds() as k
    cross join lateral (
        select count(*) as jobs
        from (
            select
            from pgqueue.dead_job as d
            where d.queue = k.queue and d.kind = k.kind and d.died_at > moment - interval '1 hour'
            limit 1001
        ) as d
    ) as c
    group by k.queue
    having sum(c.jobs) >= deaths;
end;
$$;

-- What VACUUM needs

-- The beginning of a hint that has to be run in another database.
create or replace function pgqueue._in_database(database name)
    returns text
    language plpgsql
    stable
as $$
begin
    return case when database <> current_database() then format('in database %s: ', database) else '' end;
end;
$$;

-- Who has held a snapshot for that long, while the tables of pgqueue have that many dead rows: sessions,
-- prepared transactions, replication slots, standbys. If the time is unknown, who has held it for that
-- many transactions.
create or replace function pgqueue._health_horizon(
    patience interval default '15 minutes', transactions bigint default 100000, dead_rows bigint default 20000
)
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    dead bigint := (
        select sum(pg_stat_get_dead_tuples(c.oid))
        from pg_class as c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
    );
    -- The functions have their owner's rights, and a query may hold what its caller must not see.
    sees_queries boolean := pg_has_role(session_user, 'pg_read_all_stats', 'usage');
begin
    if dead < dead_rows and not (pg_is_in_recovery() and current_setting('hot_standby_feedback')::boolean) then
        return;
    end if;
    return query
    select
        case when coalesce(moment - h.since > 4 * patience, h.age > 4 * transactions)
            then 'critical' else 'warning' end,
        format('%s keeps VACUUM from removing what was deleted in the last %s', h.holder, concat_ws(
            ', ', date_trunc('second', moment - h.since),
            to_char(h.age, 'FM9,999,999,999') || ' transactions'
        )) || coalesce(': ' || h.query, ''),
        h.hint
    from (
        select
            a.xact_start,
            -- The snapshots of this database have to see what writes in any.
            case when a.datname <> current_database() then age(a.backend_xid)
                else greatest(age(a.backend_xid), age(a.backend_xmin)) end as age,
            case when r.pid is null
                then format('session %s (%s)', a.pid, concat_ws(
                    ', ', a.usename, nullif(a.application_name, ''), a.state,
                    'in database ' || nullif(a.datname, current_database())
                ))
                else format('standby %s', a.application_name)
            end,
            case
                when r.pid is not null then null
                when not sees_queries then 'its query is shown to members of pg_read_all_stats'
                when a.query = '<insufficient privilege>' then
                    'its query would be shown if the owner of pgqueue were a member of pg_read_all_stats'
                else regexp_replace(left(a.query, 100), '[[:space:]]+', ' ', 'g')
            end,
            case when r.pid is null
                then format('select pg_terminate_backend(%s)', a.pid)
                else 'there: select * from pgqueue.health()'
            end
        from pg_stat_activity as a
        left join pg_stat_replication as r on r.pid = a.pid
        where (a.datname is not null or r.pid is not null) and a.leader_pid is null
            and not exists (select from pg_stat_progress_vacuum as v where v.pid = a.pid)
        union all
        select
            p.prepared, age(p.transaction), format('prepared transaction %s (%s)', p.gid, p.owner), null,
            pgqueue._in_database(p.database) || format('rollback prepared %L', p.gid)
        from pg_prepared_xacts as p
        union all
        select
            null, age(s.xmin),
            format(
                'replication slot %s (%s)', s.slot_name, case when s.active then 'active' else 'inactive' end
            ),
            null,
            case when s.active
                then 'there: select * from pgqueue.health()'
                else format('select pg_drop_replication_slot(%L)', s.slot_name)
            end
        from pg_replication_slots as s
    ) as h (since, age, holder, query, hint)
    where coalesce(moment - h.since > patience, h.age > transactions) and h.age > 0;
end;
$$;

-- Unused replication slots that keep that much WAL.
create or replace function pgqueue._health_wal(bytes bigint default 1073741824)
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
declare
    reached pg_lsn := case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end;
begin
    return query
    select
        case when reached - s.restart_lsn > 4 * bytes then 'critical' else 'warning' end,
        format(
            'the unused replication slot %s keeps %s of WAL on the disk', s.slot_name,
            pg_size_pretty(reached - s.restart_lsn)
        ),
        format('select pg_drop_replication_slot(%L)', s.slot_name)
    from pg_replication_slots as s
    where not s.active and reached - s.restart_lsn > bytes;
end;
$$;

-- Tables with that many times the dead rows at which autovacuum should start, for which no VACUUM has
-- ended for that long.
create or replace function pgqueue._health_vacuum(patience interval default '10 minutes', times int default 10)
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    -- Before that, no VACUUM is on record.
    counted_since timestamptz := greatest(
        pg_postmaster_start_time(),
        (select pg_stat_get_db_stat_reset_time(d.oid) from pg_database as d where d.datname = current_database())
    );
begin
    return query
    select
        case when moment - v.since > 4 * patience and v.dead > 4 * times * v.threshold
            then 'critical' else 'warning' end,
        format(
            'table %s has %s dead rows, and no VACUUM has ended for %s', c.relname,
            to_char(v.dead, 'FM999,999,999,999'), date_trunc('second', moment - v.since)
        ) || case when exists (select from pg_stat_progress_vacuum as p where p.relid = c.oid)
            then '; one is running' else '' end,
        format('vacuum pgqueue.%s', c.relname)
    from pg_class as c
    cross join lateral (
        select
            pg_stat_get_dead_tuples(c.oid) as dead,
            greatest(
                pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid), counted_since
            ) as since,
            coalesce(
                max(o.option_value) filter (where o.option_name = 'autovacuum_vacuum_threshold'),
                current_setting('autovacuum_vacuum_threshold')
            )::bigint
            + coalesce(
                max(o.option_value) filter (where o.option_name = 'autovacuum_vacuum_scale_factor'),
                current_setting('autovacuum_vacuum_scale_factor')
            )::float8 * greatest(c.reltuples, 0) as threshold
        from pg_options_to_table(c.reloptions) as o
    ) as v
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
        -- After an hour with nothing to do, as many come before autovacuum can.
        and v.dead > times * v.threshold and moment - v.since > patience;
end;
$$;

-- Whether autovacuum is off, for all or for a table of pgqueue.
create or replace function pgqueue._health_autovacuum()
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
begin
    return query
    select
        'critical', format('%s is off on this server: dead rows pile up', s.name),
        format('alter system set %s = on; select pg_reload_conf()', s.name)
    from unnest('{autovacuum,track_counts}'::text[]) as s (name)
    where not current_setting(s.name)::boolean
    union all
    select
        'warning', format('autovacuum is off for the table %s: dead rows pile up', c.relname),
        format('alter table pgqueue.%s reset (autovacuum_enabled)', c.relname)
    from pg_class as c
    cross join lateral pg_options_to_table(c.reloptions) as o
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'
        and o.option_name = 'autovacuum_enabled' and not o.option_value::boolean;
end;
$$;

-- Tables and indexes that are larger, and have more than 20 pages per row: a row needs one at most. reap
-- reads all of the table job.
create or replace function pgqueue._health_bloat(bytes bigint default 1073741824)
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
begin
    return query
    -- relpages, because asking for the size waits for whoever has locked the table.
    select
        'warning',
        format(
            '%s %s takes %s for %s rows', case when i.indexrelid is null then 'table' else 'index' end, c.relname,
            pg_size_pretty(c.relpages * 8192::bigint), to_char(r.live, 'FM999,999,999,990')
        ),
        format(
            case when i.indexrelid is null then 'vacuum (full, analyze) pgqueue.%s'
                else 'reindex index concurrently pgqueue.%s' end,
            c.relname
        )
    from pg_class as c
    left join pg_index as i on i.indexrelid = c.oid
    join pg_class as t on t.oid = coalesce(i.indrelid, c.oid)
    cross join lateral (
        select greatest(pg_stat_get_live_tuples(t.oid), t.reltuples::bigint, 0) as live
    ) as r
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'i')
        and c.relpages * 8192::bigint > bytes and c.relpages > 20 * r.live;
end;
$$;

-- Whether ids of transactions or multixacts are older than autovacuum should let them become, in any
-- database: one stops the whole server.
create or replace function pgqueue._health_wraparound(
    ids bigint default greatest(400000000, current_setting('autovacuum_freeze_max_age')::bigint * 11 / 10),
    multixacts bigint default greatest(
        400000000, current_setting('autovacuum_multixact_freeze_max_age')::bigint * 11 / 10
    )
)
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
begin
    return query
    select
        case when a.age > least(4 * a.most, 1600000000) then 'critical' else 'warning' end,
        format(
            'the oldest %s in database %s is %s old; at 2,147,483,648 Postgres stops writing', a.what, d.datname,
            to_char(a.age, 'FM9,999,999,999')
        ),
        pgqueue._in_database(d.datname) || 'vacuum (freeze)'
    from pg_database as d
    cross join lateral (
        values ('transaction id', age(d.datfrozenxid)::bigint, ids),
            ('multixact id', mxid_age(d.datminmxid)::bigint, multixacts)
    ) as a (what, age, most)
    where a.age > a.most;
end;
$$;

-- What must not run out, and not go back

-- Whether the notification queue is full to that share, and which session has been in a transaction for
-- longest.
create or replace function pgqueue._health_notifications(share float8 default 0.1)
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
declare
    used float8 := pg_notification_queue_usage();
    holder record;
begin
    if used <= share then
        return;
    end if;
    select a.pid, a.datname, a.xact_start into holder
    from pg_stat_activity as a
    where a.pid <> pg_backend_pid() and a.xact_start is not null
    order by a.xact_start
    limit 1;
    status := case when used > 4 * share then 'critical' else 'warning' end;
    detail := format(
        'the notification queue of the server is %s %% full: a listening session is in a transaction%s; once it is '
        'full, NOTIFY fails', (100 * used)::numeric(9, 5),
        concat(
            ', perhaps ' || holder.pid, ' in database ' || holder.datname,
            ', since ' || pgqueue._written(holder.xact_start)
        )
    );
    -- Without pg_read_all_stats the owner of pgqueue does not see who.
    hint := case when holder.pid is null
        then 'select a.pid, a.xact_start from pg_stat_activity as a order by a.xact_start'
        else format('select pg_terminate_backend(%s)', holder.pid)
    end;
    return next;
end;
$$;

-- Whether a sequence was set back, as by a careless restore, or has used up that share of its numbers.
create or replace function pgqueue._health_sequences(share float8 default 0.2)
    returns table (status text, detail text, hint text)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
    -- Before the sequences are read: what is added in between is above.
    last_id bigint := greatest(
        (select j.id from pgqueue.job as j order by j.id desc limit 1),
        (select d.id from pgqueue.dead_job as d order by d.id desc limit 1),
        (select b.id from pgqueue.batch as b order by b.id desc limit 1)
    );
    last_token bigint := (
        select max(j.token)
        from pgqueue._fronts(moment) as f
        cross join lateral (
            select j.token
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, f.queue, f.lane)
                and j.run_at >= f.since and j.run_at < f.until
            order by j.run_at, j.id
            limit 10
        ) as j
    );
begin
    return query
    select
        case when s.last < s.highest or s.last > 4 * share * 9223372036854775807
            then 'critical' else 'warning' end,
        case when s.last < s.highest
            then format('sequence %s is at %s, and %s is in use: %s', s.name, s.last, s.highest, s.danger)
            else format(
                'sequence %s is at %s, and ends at 9223372036854775807: somebody has set it; set it back while '
                'no worker runs', s.name, s.last
            )
        end,
        -- Well ahead, as some in use may not have been seen.
        format('select setval(%L, %s)', 'pgqueue.' || s.name, coalesce(s.highest, 0) + 1000000)
    from (
        values
            (
                'job_id_seq', coalesce(pg_sequence_last_value('pgqueue.job_id_seq'), 0), last_id,
                'enqueues will fail'
            ),
            (
                'token_seq', coalesce(pg_sequence_last_value('pgqueue.token_seq'), 0), last_token,
                'a lost worker might end the attempt of another'
            )
    ) as s (name, last, highest, danger)
    where s.last < s.highest or s.last > share * 9223372036854775807;
end;
$$;

-- Who else holds or awaits table locks in this database, and what ends them.
create or replace function pgqueue._lock_holders()
    returns table (relation oid, mode text, is_held boolean, since timestamptz, holder text, hint text)
    language plpgsql
as $$
begin
    return query
    select
        l.relation, l.mode, l.granted, coalesce(a.xact_start, p.prepared),
        case when p.gid is null
            then concat(
                'session ', l.pid, case when l.granted then ' has used it' else ' has waited for it' end,
                ' since ' || pgqueue._written(a.xact_start)
            )
            else format('prepared transaction %s has used it', p.gid)
        end,
        case when p.gid is null
            then format('select pg_terminate_backend(%s)', l.pid) else format('rollback prepared %L', p.gid)
        end
    from pg_locks as l
    left join pg_stat_activity as a on a.pid = l.pid
    -- Only the lock on its own id says which prepared transaction it is.
    left join (
        pg_locks as own
        join pg_prepared_xacts as p on p.transaction = own.transactionid
    ) on own.virtualtransaction = l.virtualtransaction and l.pid is null and own.pid is null
    where l.database = (select d.oid from pg_database as d where d.datname = current_database())
        and l.pid is distinct from pg_backend_pid();
end;
$$;

-- Tables of the ring run that should have been emptied a day ago, and what keeps maintain from doing it.
create or replace function pgqueue._health_runs()
    returns table (status text, detail text, hint text)
    language plpgsql
    set enable_partition_pruning = on
as $$
declare
    today int := floor(date_part('epoch', clock_timestamp()) / 86400)::int;
begin
    -- As in _forget_runs, one day later.
    return query
    select
        case when today - o.day > 4 then 'critical' else 'warning' end,
        format(
            'table run_%s holds runs that were due for deletion on %s: %s', o.day % 16,
            to_char(date '1970-01-01' + o.day + 1, 'YYYY-MM-DD'),
            coalesce(h.holder, 'nobody uses it, and nobody has called maintain()')
        ),
        coalesce(h.hint, 'select from pgqueue.maintain()')
    from generate_series(today - 16, today - 2) as o (day)
    left join lateral (
        select l.holder, l.hint
        from pgqueue._lock_holders() as l
        where l.relation = ('pgqueue.run_' || o.day % 16)::regclass
        order by l.since
        limit 1
    ) as h on true
    where pgqueue._is_over(o.day);
end;
$$;

-- Whether what is installed differs from itself, or from the files on the server. The plain install has
-- neither.
create or replace function pgqueue._health_version()
    returns table (status text, detail text, hint text)
    language plpgsql
as $$
begin
    return query
    select
        case when e.extversion <> pgqueue.version() then 'critical' else 'warning' end,
        format(
            'the extension is of version %s, its functions of %s, the files on the server of %s',
            e.extversion, pgqueue.version(), coalesce(a.default_version, 'none')
        ),
        'alter extension pgqueue update'
    from pg_extension as e
    left join pg_available_extensions as a on a.name = e.extname
    where e.extname = 'pgqueue'
        and (e.extversion <> pgqueue.version() or a.default_version is distinct from e.extversion);
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
    with found (name, status, detail, hint) as materialized (
        select 'waits', h.* from pgqueue._health_waits() as h
        union all
        select 'leases', h.* from pgqueue._health_leases() as h
        union all
        select 'schedules', h.* from pgqueue._health_schedules() as h
        union all
        select 'batches', h.* from pgqueue._health_batches() as h
        union all
        select h.* from pgqueue._health_queues() as h
        union all
        select 'dead', h.* from pgqueue._health_dead() as h
        union all
        select 'horizon', h.* from pgqueue._health_horizon() as h
        union all
        select 'wal', h.* from pgqueue._health_wal() as h
        union all
        select 'vacuum', h.* from pgqueue._health_vacuum() as h
        union all
        select 'autovacuum', h.* from pgqueue._health_autovacuum() as h
        union all
        select 'bloat', h.* from pgqueue._health_bloat() as h
        union all
        select 'wraparound', h.* from pgqueue._health_wraparound() as h
        union all
        select 'notifications', h.* from pgqueue._health_notifications() as h
        union all
        select 'sequences', h.* from pgqueue._health_sequences() as h
        union all
        select 'runs', h.* from pgqueue._health_runs() as h
        union all
        select 'version', h.* from pgqueue._health_version() as h
    )
    select c.name, coalesce(f.status, 'ok'), coalesce(f.detail, c.fine), f.hint
    from (
        values
            ('waits', 'no queue keeps a job waiting beyond its wait_target'),
            ('leases', 'jobs whose lease expired are recovered'),
            ('schedules', 'schedules are fired in time'),
            ('batches', 'batches are closed, and their callbacks enqueued'),
            ('workers', 'somebody works each queue that has jobs'),
            ('backlog', 'no queue has more jobs than are soon done'),
            ('failures', 'no queue fails much'),
            ('dead', 'few jobs died in the last hour'),
            ('horizon', 'nobody keeps VACUUM from removing dead rows'),
            ('wal', 'no unused replication slot keeps much WAL'),
            ('vacuum', 'VACUUM keeps up with the dead rows'),
            ('autovacuum', 'autovacuum is on'),
            ('bloat', 'no table or index is much too large'),
            ('wraparound', 'old transaction ids are frozen in time'),
            ('notifications', 'the notification queue is nearly empty'),
            ('sequences', 'sequences are ahead of what they have handed out'),
            ('runs', 'old runs are deleted'),
            ('version', 'all parts are of version ' || pgqueue.version())
    ) as c (name, fine)
    left join found as f on f.name = c.name
    order by array_position('{critical,warning}', f.status), c.name collate "C", f.detail collate "C";
exception when lock_not_available then
    return query
    select
        'waits', case when l.holder is null then 'warning' else 'critical' end,
        coalesce(
            'health could not look, because ' || l.relation::regclass::text || ' is locked: ' || l.holder,
            'health could not look, because a table was locked for a moment'
        ),
        coalesce(l.hint, 'select * from pgqueue.health()')
    from (
        values ('AccessExclusiveLock')
    ) as e (mode)
    left join pgqueue._lock_holders() as l on l.mode = e.mode and l.relation in (
        select c.oid from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
    )
    order by l.is_held desc, l.since
    limit 1;
end;
$$;

comment on function pgqueue.health() is
'Checks what is wrong or soon will be. A row for each finding, the worst first:
the check, its status (warning, critical), what was found, and as hint the SQL
that fixes it. A row with the status ok for each check that found nothing. Only
reads, works on a standby, and counts nothing in full. The query of a session
is shown to members of pg_read_all_stats.';
