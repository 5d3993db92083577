-- Health: what is wrong or will be soon, and the SQL that fixes it.
--
-- All checks only read, and work on a standby. They look at catalogs, at the first jobs of each lane and at the
-- view queues, never at all jobs.

-- For which roles or databases a setting was set (role 0: not for one role), and the statement that undoes it.
create or replace function pgqueue._set_for(setting text)
    returns table (role oid, whom text, value text, remedy text)
    language sql
    stable
as $$
    select s.setrole, w.whom, substr(o.option, length(_set_for.setting) + 2), format('alter %s reset %s', w.whom, _set_for.setting)
    from pg_db_role_setting as s
    cross join lateral unnest(s.setconfig) as o (option)
    cross join lateral (
        select concat_ws(
            ' in ',
            'role ' || case when s.setrole <> 0 then s.setrole::regrole::text when s.setdatabase = 0 then 'all' end,
            'database ' || case when s.setdatabase <> 0 then quote_ident(current_database()) end
        ) as whom
    ) as w
    where s.setdatabase in (0, (select d.oid from pg_database as d where d.datname = current_database()))
        and starts_with(o.option, _set_for.setting || '=')
    union all
    -- RESET would leave what the main configuration file says.
    select 0, 'this server', s.setting, format('alter system set %s = %s; select pg_reload_conf()', s.name, s.boot_val)
    from pg_settings as s
    where s.name = _set_for.setting and s.source = 'configuration file'
$$;

-- Every check, with all its facts: the view checks, the functions _found and _reads, and so health, follow from this
-- list; docs/reference/health.md says what each finds. The query returns a row for each finding: whether it is critical
-- (four times beyond the thresholds patience and most), the detail, and the hint. In a query, moment is the clock, seen
-- the rows of the view queues, and held the leased jobs. The queries are stored once, in _found, without comments and
-- indentation.
do $do$
declare
    known text;
    branches text;
    read_seen text[];
    read_held text[];
begin
    select
        string_agg(format('(%L, %L::interval, %L::float8, %L::float8, %L)', c.name, c.patience, c.most, c.few, c.fine), ', '),
        string_agg(
            format('when %L then return query %s;', c.name, regexp_replace(c.query, '(\n +--[^\n]*)*\n +', E'\n', 'g')), ' '
        ),
        array_agg(c.name) filter (where strpos(c.query, 'unnest(seen)') > 0),
        array_agg(c.name) filter (where strpos(c.query, 'unnest(held)') > 0)
    into known, branches, read_seen, read_held
    from (values
    ('waits', null::interval, null::numeric, null::numeric, 'no queue keeps a job waiting beyond its wait_target', $$
        select
            not o.is_paused and o.wait > 4 * o.target,
            format(
                'queue %s: job %s has been due for %s, the wait_target is %s', o.queue, o.id,
                date_trunc('second', o.wait), o.target
            ) || coalesce('; ' || case when o.place <= 5 then coalesce(
                r.reason, pgqueue._why_capped(s.job, moment), pgqueue._why_locked(o.id),
                pgqueue._why_behind(s.job, moment)
            ) end, ''),
            case r.reason
                when 'its queue is paused' then format('select pgqueue.resume(%L)', o.queue)
                when 'its kind is paused' then format('select pgqueue.resume(%L, %L)', o.queue, (s.job).kind)
                when 'its group is paused' then
                    format('select pgqueue.resume(%L, group_key => %L)', o.queue, (s.job).group_key)
                when 'its kind and group are paused together' then
                    format('select pgqueue.resume(%L, %L, %L)', o.queue, (s.job).kind, (s.job).group_key)
                else format('select pgqueue.why(%s)', o.id)
            end
        from (
            -- Only for the first five, because the reason is expensive to find.
            select e.*, row_number() over (
                order by not e.is_paused and e.wait > 4 * e.target desc, e.wait desc, e.id
            ) as place
            from (
                -- Paused jobs separately, or they might hide one that should run.
                select distinct on (f.queue, p.is_paused)
                    f.queue, w.id, moment - w.run_at as wait, q.target, p.is_paused
                from pgqueue._lanes() as f
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
                    cross join lateral pgqueue._counts_as(
                        j.queue, j.group_key, j.priority, j.run_at, j.lease_expires_at, (j.terms).expires_at, moment,
                        true
                    ) as c
                    where c.state = 'r'
                        and (q.others is null or p.is_paused <> pgqueue._is_wanted(j.kind, j.group_key, null, q.others))
                    limit 1
                ) as w
                where f.first < moment - q.target and w.run_at < moment - q.target
                order by f.queue, p.is_paused, w.run_at
            ) as e
        ) as o
        left join lateral (
            select j as job from pgqueue.job as j where j.id = o.id and o.place <= 5 offset 0
        ) as s on true
        cross join lateral (
            select case when o.is_paused and o.place <= 5 then pgqueue._why_paused(s.job) end as reason offset 0
        ) as r
        order by o.place
    $$),
    ('locks', '5 seconds', null, null, 'nobody locks what enqueue, claim and complete need', $$
        with lock as materialized (
            select * from pgqueue._lock_holders()
        ), ours as materialized (
            select c.oid, c.relname, case c.relkind when 'S' then 'sequence' else 'table' end as kind
            from pg_class as c
            where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S')
                -- Not those of old runs, which nobody needs: see the check runs.
                and (c.relname !~ '^run_' or c.relname = 'run_' || floor(date_part('epoch', moment) / 86400)::int % 16)
        ), waiter as materialized (
            select
                w.relation, w.xid, min(w.waits_since) as since,
                format('; %s for it', case count(*) when 1 then 'a session waits' else count(*) || ' sessions wait' end)
                    as said
            from lock as w
            where not w.is_held and case w.what
                when 'relation' then w.relation in (select o.oid from ours as o)
                -- A session that waits for a row has locked the tuple. One that waits for a unique key has not,
                -- but it has locked the index, and the session that has the key has written to job.
                when 'transactionid' then exists (
                    select
                    from lock as t
                    where t.what = 'tuple' and t.pid = w.pid and t.relation in (select o.oid from ours as o)
                ) or exists (
                    select
                    from lock as i
                    where i.pid = w.pid and i.mode = 'RowExclusiveLock' and i.relation in (
                        'pgqueue.job_unique_key_idx'::regclass, 'pgqueue.recent_key_pkey'::regclass
                    )
                ) and not exists (select from lock as t where t.what = 'tuple' and t.pid = w.pid) and exists (
                    select
                    from lock as h
                    join lock as o on o.hint = h.hint
                    where h.xid = w.xid and h.is_held and o.mode = 'RowExclusiveLock'
                        and o.relation = 'pgqueue.job'::regclass
                )
            end
            group by w.relation, w.xid
        ), found as (
            select
                l.pid, l.holder, l.hint, l.since, w.since as waits_since, w.said,
                format('%s %s is locked in %s mode', o.kind, o.relname, regexp_replace(l.mode, 'Lock$', '')) as what
            from lock as l
            join ours as o on o.oid = l.relation
            left join waiter as w on w.relation = l.relation
            where l.what = 'relation' and (l.bars_writers or l.is_held and l.mode = 'ShareUpdateExclusiveLock' and w.said <> '')
                -- One that only waits bars others, unless it waits for one that does so itself. Changes of settings
                -- also wait for one that bars no writers, such as REINDEX CONCURRENTLY.
                and (l.is_held or not exists (
                    select from lock as h
                    where h.what = 'relation' and h.relation = l.relation and h.is_held
                        and (h.bars_writers or h.mode = 'ShareUpdateExclusiveLock')
                ))
                -- VACUUM needs its lock only for a moment, to cut off the end of a file.
                and (l.pid in (select v.pid from pg_stat_progress_vacuum as v)) is not true
            union all
            select
                l.pid, l.holder, l.hint, case when j.id is not null then l.since end, w.since, w.said,
                coalesce('the row of job ' || j.id || ' of queue ' || j.queue, 'a row') || ' is locked'
            from lock as l
            left join waiter as w on w.xid = l.xid
            left join (
                select j.queue, j.id, j.xmax as xid
                from pgqueue._lanes() as f
                cross join lateral (
                    select j.queue, j.id, j.xmax
                    from pgqueue.job as j
                    where pgqueue._is_in_lane(j, f.queue, f.lane) and j.run_at >= f.first and j.run_at < moment - patience
                        -- A running job is locked while it completes.
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
    ('hung', '10 minutes', 10, null, 'no job runs for much too long', $$
        with old as materialized (
            select j.*
            from unnest(held) as l (id)
            cross join lateral (select j.* from pgqueue.job as j where j.id = l.id offset 0) as j
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
    ('leases', '3 minutes', null, null, 'jobs whose lease expired are recovered', $$
        with lock as materialized (
            select * from pgqueue._lock_holders()
        )
        select
            e.late > 4 * patience,
            format(
                'queue %s: the lease of job %s expired %s ago (worker %s), and neither a claim nor maintain() '
                'has recovered it%s%s',
                e.queue, e.id, date_trunc('second', e.late), e.worker, '; its row is locked: ' || l.holder,
                '; ' || nullif(e.all_late - 1, 0) || ' more expired, too'
            ),
            coalesce(l.hint, 'select pgqueue.reap()')
        from (
            select distinct on (j.queue)
                j.queue, j.id, j.xid, j.worker, moment - j.lease_expires_at as late,
                count(*) over (partition by j.queue) as all_late
            from unnest(held) as l (id)
            cross join lateral (select j.*, j.xmax as xid from pgqueue.job as j where j.id = l.id offset 0) as j
            where j.lease_expires_at < moment - patience
            order by j.queue, j.lease_expires_at
        ) as e
        left join lock as l on l.xid = e.xid and l.what = 'transactionid' and l.is_held
        order by e.late desc
    $$),
    ('crashes', null, 3, null, 'no job keeps crashing its workers', $$
        select
            c.attempts > 4 * most,
            format(
                'queue %s: in the last hour %s attempts of job %s of kind %s ended by an expired lease; perhaps it '
                'crashes its workers', j.queue, c.attempts, j.id, j.kind
            ),
            format('select pgqueue.cancel(%s, %L)', j.id, 'crashes its workers')
        from (
            select r.job_id, count(*) as attempts
            from pgqueue._recent_runs(moment - interval '1 hour') as r
            where r.error like 'the lease expired%'
            group by r.job_id
            having count(*) >= most
        ) as c
        cross join lateral (select j.* from pgqueue.job as j where j.id = c.job_id offset 0) as j
        order by c.attempts desc, j.id
    $$),
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
    ('batches', '1 day', null, null, 'batches are closed, and their callbacks enqueued', $$
        with open as (
            select o.*, l.id as job_id, l.touched
            from (select b.* from pgqueue.batch as b where b.finished_at is null order by b.id limit 1000) as o
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
            -- Once it was redriven it dies like any job.
            where b.problem is not null and d.attempt = 0
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
    ('suspensions', null, 10000, null, 'no suspended job waits beyond its suspend_target', $$
        with old as materialized (
            select j.queue, j.id, w.event, moment - w.since as age
            from (select w.* from pgqueue.wait as w order by w.job_id limit most) as w
            cross join lateral (select j.* from pgqueue.job as j where j.id = w.job_id offset 0) as j
            where j.run_at = 'infinity' and j.token is null
        )
        select
            o.age > 4 * o.target,
            format(
                'queue %s: job %s has been suspended for %s%s, the suspend_target is %s%s', o.queue, o.id,
                date_trunc('second', o.age), ' and waits for event ' || o.event, o.target,
                '; so have been ' || nullif(o.jobs - 1, 0) || ' more'
            ),
            format('select pgqueue.why(%s)', o.id)
        from (
            select distinct on (o.queue) o.*, t.target, count(*) over (partition by o.queue) as jobs
            from (
                select q.queue, pgqueue._seldom(q.queue, 'suspend_target')::interval as target
                from (select distinct o.queue from old as o) as q
                offset 0
            ) as t
            join old as o on o.queue = t.queue
            where o.age > t.target
            order by o.queue, o.age desc
        ) as o
        order by o.age desc
    $$),
    ('workers', '2 minutes', null, null, 'each queue that has jobs has a worker', $$
        select
            q.oldest_wait > 4 * t.allowed,
            format(
                'queue %s has %s%s ready jobs, the oldest due for %s, and no worker serves it', q.queue,
                case when q.is_estimate then 'about ' end, to_char(q.ready, 'FM999,999,999,999'),
                date_trunc('second', q.oldest_wait)
            ),
            'select * from pgqueue.workers'
        from unnest(seen) as q
        -- The view has a different collation from the indexes of names.
        cross join lateral (values (q.queue collate "default")) as n (name)
        cross join lateral pgqueue._in_force(n.name) as s
        -- A queue that is served once a day has a wait_target of a day.
        cross join lateral (select greatest(patience, s.wait_target - interval '3 minutes') as allowed) as t
        where not q.paused and q.oldest_wait > t.allowed and q.workers = 0
            and n.name not in (select v.queue from pgqueue._served() as v)
            -- Not if kinds or groups are paused: perhaps that is all of its waiting jobs.
            and case when s.has_pauses then pgqueue._paused(n.name, false) end is null
            -- Without runs it is unknown whether any worker claims, and with a slow rate claims may be rare.
            and s.keep_runs > 0
            and not exists (
                select from pgqueue.queue as o
                where o.name in ('', n.name) and o.rate_period > patience and num_nonnulls(
                    o.max_running, o.rate_limit, o.rate_period, o.weight, o.group_limit, o.group_on_retry
                ) > 0
            )
        order by q.oldest_wait desc
    $$),
    ('kinds', '2 minutes', null, null, 'each kind that has jobs is taken by a worker', $$
        with serving as materialized (
            select * from pgqueue._served()
        ), taken as materialized (
            select r.queue, r.kind
            from pgqueue._recent_runs(moment - interval '10 minutes') as r
            where r.worker is not null
            union
            select j.queue, j.kind
            from unnest(held) as l (id)
            cross join lateral (select j.queue, j.kind from pgqueue.job as j where j.id = l.id offset 0) as j
        ), waiting as (
            select
                w.queue, w.kind, count(*) as jobs, min(w.id) as id,
                moment - min(case when w.worker is null then w.run_at else w.enqueued_at end) as wait,
                max(w.worker) as worker
            from (select l.*, greatest(20000 / count(*) over (), 20) as share from pgqueue._lanes() as l) as f
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
                cross join lateral (select case when j.errors <> '[]' then pgqueue._put_off(j) end as news) as p
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
            -- Checked last, because what was taken is expensive to find.
            and case
                when w.worker is not null
                    or exists (select from serving as v where v.queue = w.queue and w.kind <> all (v.kinds))
                then (w.queue, w.kind) not in (select t.queue, t.kind from taken as t)
            end
        order by w.wait desc
    $$),
    ('handlers', null, null, null, 'all handlers in SQL exist', $$
        select
            true,
            format('handler %s of %s does not exist', q.handler, concat_ws(
                ', ', coalesce('queue ' || nullif(q.name, ''), 'all queues'), 'kind ' || nullif(q.kind, '')
            )),
            format(
                'create it, or set another: select pgqueue.configure(%L%s, handler => %L)', nullif(q.name, ''),
                ', kind => ' || quote_literal(nullif(q.kind, '')), 'schema.function(jsonb)'
            )
        from pgqueue.queue as q
        where q.handler is not null and q.group_key = '' and to_regprocedure(q.handler) is null
        order by q.name, q.kind
    $$),
    ('backlog', '2 minutes', 12, null, 'no queue has a backlog that takes long', $$
        select
            q.time_to_empty > 4 * t.most,
            format(
                'queue %s has %s%s ready jobs, which take %s at the rate of the last five minutes, %s jobs a second by '
                '%s workers', q.queue, case when q.is_estimate then 'about ' end, to_char(q.ready, 'FM999,999,999,999'),
                date_trunc('second', q.time_to_empty), q.rate_5m, q.workers
            ),
            format('select * from pgqueue.kinds where queue = %L', q.queue)
        from unnest(seen) as q
        cross join lateral (values (q.queue collate "default")) as n (name)
        cross join lateral (select most * (pgqueue._in_force(n.name)).wait_target as most) as t
        -- Not for a burst that has just begun, whose rate is not known yet, nor if some of the jobs are paused.
        where not q.paused and q.oldest_wait > patience and q.time_to_empty is not null and q.time_to_empty > t.most
            and pgqueue._paused(n.name, false) is null
        order by q.time_to_empty desc
    $$),
    ('failures', null, 0.2, 10, 'no queue has many failed attempts', $$
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
                    where d.queue = k.queue and d.kind = k.kind
                        and d.died_at between moment - interval '1 day' and clock_timestamp()
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
                false,
                format(
                    'queue %s keeps %s%s dead jobs', q.queue, case when q.is_estimate then 'about ' end,
                    to_char(q.dead, 'FM999,999,999,999')
                ),
                format('select * from pgqueue.dead where queue = %L', q.queue)
            from unnest(seen) as q
            where q.dead >= 1000 * most
            order by q.dead desc, q.queue
        )
    $$),
    -- If the time is unknown, as of a replication slot, it goes by the number of transactions.
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
                -- A transaction that writes, in any database, holds back the snapshots of this one.
                greatest(age(a.backend_xid), case when a.datname = current_database() then age(a.backend_xmin) end),
                format('session %s (%s)', a.pid, concat_ws(
                    ', ', a.usename, nullif(a.application_name, ''), a.state,
                    'in database ' || nullif(a.datname, current_database())
                )),
                case
                    -- health has its owner's rights, and a query may contain what its caller must not see.
                    when not pg_has_role(pgqueue._caller()::name, 'pg_read_all_stats', 'usage')
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
    ('wal', null, 1073741824, null, 'no replication slot keeps much WAL, and no standby stands still', $$
        select
            true,
            concat(
                'this standby stands still, because its replay was paused: all that is shown is old',
                ', of ' || pgqueue._written(pg_last_xact_replay_timestamp())
            ),
            'select pg_wal_replay_resume()'
        where case when pg_is_in_recovery() then pg_is_wal_replay_paused() end
        union all
        select
            k.bytes > 4 * most,
            format(
                'the %s replication slot %s keeps %s of WAL on the disk', case when s.active then 'slow' else 'unused' end,
                s.slot_name, pg_size_pretty(k.bytes)
            ),
            case when s.active
                then 'there: select * from pgqueue.health()'
                else format('select pg_drop_replication_slot(%L)', s.slot_name)
            end
        from pg_replication_slots as s
        cross join lateral (
            select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end
                - s.restart_lsn as bytes
        ) as k
        where k.bytes > case when s.active then 4 * most else most end
    $$),
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
                    -- No VACUUM is on record from before these.
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
            -- Both, because after an idle hour that many dead rows may come before autovacuum can run.
            and v.dead > most * v.threshold and moment - v.since > patience
    $$),
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
    ('indexes', null, null, null, 'all indexes are there and valid, and let claims be HOT updates', $$
        with ours as materialized (
            select m[2] as name, regexp_replace(m[1], '[[:space:]]+', ' ', 'g') as made
            from regexp_matches($made$
@INDEXES@
            $made$, '(create (?:unique )?index ([a-z_]+)[^;]+)', 'g') as m
        )
        select
            true, format('index %s is missing, as if somebody had dropped it: calls that need it fail or are slow', o.name),
            o.made
        from ours as o
        where to_regclass('pgqueue.' || o.name) is null
        union all
        select
            false,
            format('index %s of table %s is invalid: every write maintains it, but no query uses it', c.relname, t.relname),
            format(
                case when o.is_ours then 'reindex index concurrently' else 'drop index concurrently' end || ' pgqueue.%I',
                c.relname
            )
        from pg_index as i
        join pg_class as c on c.oid = i.indexrelid
        join pg_class as t on t.oid = i.indrelid
        cross join lateral (
            select c.relispartition or exists (select from ours as o where o.name = c.relname)
                or exists (select from pg_constraint as k where k.conindid = c.oid) as is_ours
        ) as o
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'i' and not i.indisvalid
            and i.indrelid not in (select p.relid from pg_stat_progress_create_index as p)
        union all
        select
            false,
            format('index %s has column %s of table job, which each claim changes: it has to write to all indexes of job',
                c.relname, string_agg(a.attname, ', ' order by a.attnum)
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
    -- No catalog shows such a setting of the server.
    ('notify', null, null, null, 'enqueues may wake workers', $$
        select
            false, format('pgqueue.notify is off for %s: enqueues wake no worker, and jobs wait for the next poll', s.whom),
            s.remedy
        from pgqueue._set_for('pgqueue.notify') as s
        where s.value = 'off'
    $$),
    -- Of a single role it is taken to be intended.
    ('writes', null, null, null, 'new transactions can write', $$
        select
            true,
            format(
                'default_transaction_read_only is on for %s, as providers set it when a disk is full: nobody can '
                'enqueue, claim or complete', s.whom
            ),
            -- The other statements need a transaction that can write; ALTER SYSTEM does not, and must not be in one.
            case when s.whom = 'this server' then s.remedy else 'begin read write; ' || s.remedy || '; commit' end
        from pgqueue._set_for('default_transaction_read_only') as s
        where lower(s.value) in ('on', 'true', 'yes', '1') and s.role = 0 and not pg_is_in_recovery()
    $$),
    -- It matters because reap reads the whole table job.
    ('bloat', null, 1073741824, null, 'no table or index is much too large', $$
        -- relpages, because asking for the size would wait for a session that has locked the table.
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
        cross join lateral (select greatest(pg_stat_get_live_tuples(t.oid), t.reltuples::bigint, 0) as live) as r
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'i')
            and c.relpages * 8192::bigint > most and c.relpages > 20 * r.live
    $$),
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
            -- Without pg_read_all_stats the owner of pgqueue cannot see which session.
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
    -- It passes over at most a thousand jobs from other shards.
    ('sequences', null, 0.2, null, 'sequences are ahead of what they have handed out', $$
        select
            s.last < t.highest or s.last > 4 * most * 9223372036854775807 or s.is_astray,
            case
                when s.last < t.highest
                    then format('sequence %s is at %s, and %s is in use: %s', t.name, s.last, t.highest, t.danger)
                when s.is_astray then format(
                    'sequence %s is at %s and steps by %s, and this is shard %s of %s: others give out the same',
                    t.name, s.last, s.step, o.number, o.of
                )
                else format(
                    'sequence %s is at %s, and ends at 9223372036854775807: somebody has set it; set it back while '
                    'no worker runs', t.name, s.last
                )
            end,
            case
                when s.is_astray and (s.last < t.highest) is not true then 'update pgqueue.shard set number = number'
                -- Well ahead, because some numbers in use may not have been seen.
                else format(
                    'select setval(%L, %s)', 'pgqueue.' || t.name, coalesce(t.highest, o.number, 0) + 1000000 * coalesce(o.of, 1)
                )
            end
        from (select) as here
        left join pgqueue.shard as o on true
        cross join lateral (
            select
                'job_id_seq' as name, 'enqueues will fail' as danger, max(n.id) as highest
            from (
                (select j.id from pgqueue.job as j order by j.id desc limit 1000)
                union all
                (select d.id from pgqueue.dead_job as d order by d.id desc limit 1000)
                union all
                (select b.id from pgqueue.batch as b order by b.id desc limit 1000)
            ) as n (id)
            where o.of is null or (n.id - o.number) % o.of = 0
            union all
            select 'token_seq', 'a lost worker might end the attempt of another', max(j.token)
            from unnest(held) as l (id)
            cross join lateral (select j.token from pgqueue.job as j where j.id = l.id offset 0) as j
        ) as t
        -- Read after the snapshot was taken, so rows added in between do not matter: their numbers are not in it.
        cross join lateral (
            select
                v.last, q.seqincrement as step,
                -- At 0 it has not given out any number.
                q.seqincrement <> o.of or v.last > 0 and (v.last - o.number) % o.of <> 0 as is_astray
            from pg_sequence as q
            cross join lateral (select coalesce(pg_sequence_last_value(q.seqrelid::regclass), 0) as last) as v
            where q.seqrelid = ('pgqueue.' || t.name)::regclass
        ) as s
        where s.last < t.highest or s.last > most * 9223372036854775807 or s.is_astray
    $$),
    -- The command holds its lock while it runs, which a standby does not see.
    ('moves', null, null, null, 'no move-groups was cut off', $$
        select
            true,
            format(
                'a move-groups was cut off: %s jobs or schedules are between two shards, and %s groups paused',
                m.parts, m.groups
            ),
            'python -m pgqueue move-groups, with --dsn for each shard in order, finishes it'
        from (
            select
                count(*) as rows, count(*) filter (where m.what = 'paused') as groups,
                count(*) filter (where m.what not in ('paused', 'shards')) as parts
            from pgqueue.moving as m
        ) as m
        where m.rows > 0 and not pg_is_in_recovery() and not exists (
            select from pg_locks as l
            where l.locktype = 'advisory' and (l.classid, l.objid, l.objsubid) = (0, 7366517, 1)
                and l.database = (select d.oid from pg_database as d where d.datname = current_database())
        )
    $$),
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
    -- The plain install has no extension and no files; pg_tle, in its schema pgtle, has no files.
    ('version', null, null, null, 'all parts are of version ' || pgqueue.version(), $$
        select
            e.extversion <> pgqueue.version(),
            format(
                'the extension is of version %s, its functions of %s, the files on the server of %s',
                e.extversion, pgqueue.version(), coalesce(a.default_version, 'none')
            ),
            case
                -- Without its files, or with older ones, there is no way; as after a failover to a server without them.
                when a.default_version is distinct from e.extversion and not exists (
                    select from pg_extension_update_paths(a.name) as u
                    where u.source = e.extversion and u.target = a.default_version and u.path <> ''
                ) then format('put the files of version %s on this server', e.extversion)
                else 'alter extension pgqueue update'
            end
        from pg_extension as e
        left join pg_available_extensions as a on a.name = e.extname
        where e.extname = 'pgqueue'
            and (e.extversion <> pgqueue.version() or a.default_version <> e.extversion
                or a.name is null and to_regnamespace('pgtle') is null)
    $$)
    ) as c (name, patience, most, few, fine, query);
    execute format(
        $$
            create or replace view pgqueue.checks as
            select
                c.name,
                coalesce((g.given ->> 'patience')::interval, c.patience) as patience,
                coalesce((g.given ->> 'most')::float8, c.most) as most,
                coalesce((g.given ->> 'few')::float8, c.few) as few,
                c.fine
            from (values %s) as c (name, patience, most, few, fine)
            cross join lateral (
                select nullif(current_setting('pgqueue.thresholds', true), '')::jsonb -> c.name as given
            ) as g
        $$,
        known
    );
    execute format(
        $$
            create or replace function pgqueue._reads(name text, what text)
                returns boolean
                language sql
                immutable
            as %L
        $$,
        format('select name = any (case what when ''seen'' then %L::text[] else %L end)', read_seen, read_held)
    );
    execute format(
        $$
            create or replace function pgqueue._found(
                name text, patience interval default null, most float8 default null,
                seen pgqueue.queues[] default null, held bigint[] default null, few float8 default null
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
        format('declare moment timestamptz := clock_timestamp(); begin case name %s end case; end', branches)
    );
end;
$do$;

comment on view pgqueue.checks is
'What health looks at, and from where on it warns; critical is four times as
much. The setting pgqueue.thresholds changes that, for a session or a database:
alter database app set pgqueue.thresholds = ''{"dead": {"most": 100}}''.';
comment on column pgqueue.checks.name is 'The check.';
comment on column pgqueue.checks.patience is 'How long something may last; null if that does not matter.';
comment on column pgqueue.checks.most is 'How much of something there may be.';
comment on column pgqueue.checks.few is 'Of less than that it says nothing.';
comment on column pgqueue.checks.fine is 'What health says if it finds nothing.';

-- What the checks find: the worst five findings of each, or that all is well. A check that fails says so, and
-- stops no other. Checks that a lock stops share a row, and so do those that a statement_timeout or a cancelled
-- query stops: that ends the search, but keeps what has been found.
create or replace function pgqueue._findings()
    returns table (name text, status text, detail text, hint text, place bigint)
    language plpgsql
as $$
declare
    known pgqueue.checks[];
    one record;
    seen pgqueue.queues[];
    held bigint[];
    blocked text[] := '{}'::text[];
    stopped text;
    given text := nullif(current_setting('pgqueue.thresholds', true), '');
    -- If no role or database sets it, the session itself has.
    remedy text := coalesce((
        select string_agg(s.remedy, '; ') from pgqueue._set_for('pgqueue.thresholds') as s where s.value = given
    ), 'reset pgqueue.thresholds');
begin
    begin
        known := array(select c from pgqueue.checks as c);
        return query
        select
            'thresholds', 'warning', 'the setting pgqueue.thresholds names what no check has: ' || string_agg(
                concat_ws('.', c.key, o.key), ', ' order by c.key, o.key
            ), remedy, 1::bigint
        from jsonb_each(given::jsonb) as c
        cross join lateral jsonb_object_keys(c.value) as o (key)
        where o.key <> all ('{patience,most,few}') or c.key not in (select k.name from pgqueue.checks as k)
        having count(*) > 0;
    exception when data_exception then
        perform set_config('pgqueue.thresholds', '', true);
        known := array(select c from pgqueue.checks as c);
        perform set_config('pgqueue.thresholds', given, true);
        return query
        select
            'thresholds', 'critical', 'the setting pgqueue.thresholds is not in force: ' || sqlerrm, remedy, 1::bigint;
    end;
    for one in
        select k.*
        from unnest(known) with ordinality as k
        order by k.ordinality
    loop
        begin
            if seen is null and pgqueue._reads(one.name, 'seen') then
                seen := array(select q from pgqueue.queues as q);
            end if;
            if held is null and pgqueue._reads(one.name, 'held') then
                held := array(select l.id from pgqueue._leased() as l (id));
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
                from pgqueue._found(one.name, one.patience, one.most, seen, held, one.few)
                    with ordinality as f (is_critical, detail, hint, n)
            ) as w on w.place <= 5;
        exception
            when lock_not_available then
                blocked := blocked || one.name;
                -- The other checks must not wait that long for the same lock.
                perform set_config('lock_timeout', '10 ms', true);
            when query_canceled then
                blocked := blocked || array(
                    select k.name from unnest(known) with ordinality as k where k.ordinality >= one.ordinality
                );
                stopped := sqlerrm;
                exit;
            when syntax_error_or_access_rule_violation or data_exception or object_not_in_prerequisite_state
                or feature_not_supported or cardinality_violation or insufficient_resources
                or program_limit_exceeded or system_error or internal_error
            then
                return query
                select one.name, 'critical', format('health could not look: %s (SQLSTATE %s)', sqlerrm, sqlstate), null, 1::bigint;
        end;
    end loop;
    return query
    select
        blocked[1], case when num_nonnulls(l.holder, stopped) = 0 then 'warning' else 'critical' end,
        coalesce(
            'health could not look, because ' || l.relation::regclass::text || ' is locked: ' || l.holder,
            'health could not look: ' || stopped || ' (SQLSTATE 57014)',
            'health could not look, because a table was locked for a moment'
        ) || '; this stops ' || array_to_string(blocked, ', '),
        coalesce(l.hint, concat(
            case when stopped <> '' then 'set statement_timeout = ''1 min''; ' end, 'select * from pgqueue.health()'
        )),
        0::bigint
    from (select) as always
    left join pgqueue._lock_holders() as l on l.what = 'relation' and l.relation in (
        select c.oid from pg_class as c
        where c.relnamespace = 'pgqueue'::regnamespace
            -- Whoever reads a sequence takes the lock of a writer.
            and (l.mode = 'AccessExclusiveLock' or c.relkind = 'S' and l.bars_writers)
    )
    where blocked <> '{}'
    order by l.is_held desc, l.since
    limit 1;
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
    -- Locks first: other checks may report what they cause, or could not look because of them.
    order by
        array_position('{critical,warning}', f.status), f.place > 0 and f.name <> 'locks', f.name collate "C", f.place;
end;
$$;

comment on function pgqueue.health() is
'Checks what is wrong or soon will be. A row for each finding, the worst first:
the check, its status (warning, critical), what was found, and as hint the SQL
that fixes it; of many findings of a check the worst five. A row with the status
ok for each check that found nothing; one that fails says so, with the SQLSTATE,
and stops no other; a timeout stops those not yet done but keeps what was found.
The view checks lists the thresholds. Only reads, works on a standby, and reads
no large table whole. The query of a session is shown to members of
pg_read_all_stats.';
