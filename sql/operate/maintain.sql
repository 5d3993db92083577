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
    ahead timestamptz := moment + interval '1 minute';
    picks tid[];
begin
    -- Reads the whole table: an index on the lease would have to be written by every claim
    -- and every heartbeat, and claims find most expired jobs without one.
    picks := array(
        select j.ctid
        from pgqueue.job as j
        where coalesce(j.lease_expires_at, (j.terms).expires_at) <= moment
            or j.claimed_at > ahead and j.lease_expires_at > j.claimed_at
        limit coalesce(reap.max_jobs, 1000)
        for update skip locked
    );
    -- Again, because we may have waited for the table.
    moment := clock_timestamp();
    ahead := moment + interval '1 minute';
    -- Claimed before the clock was set back: the lease begins anew, or that of a dead worker would last as long as it
    -- takes the clock to get there again.
    update pgqueue.job as j
    set lease_expires_at = moment + (j.lease_expires_at - j.claimed_at), claimed_at = moment
    where j.ctid = any (picks) and j.claimed_at > ahead and j.lease_expires_at > j.claimed_at;
    return pgqueue._expire(picks, moment);
end;
$$;

comment on function pgqueue.reap(int) is
'Ends what has expired, at most max_jobs jobs, and returns how many. A job whose
lease expired goes back to its place in its lane, or to dead_job if its attempts
are used up; a job that has not begun by its expires_at is cancelled. Claims do
this for what they come across in their own queue; any number of reaps may run
at once. If the clock has been set back by more than a minute, leases from
before that begin anew.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';

-- Empties a table of the ring run, unless it is in use or holds runs that ended after its day; returns whether it
-- did. (A run that ended in the future ended before the clock was set back.) Nobody can read run until the
-- transaction ends. With nowait, because otherwise we might queue behind a long SELECT, and everybody else behind
-- us. It has statements for each table, since naming one at run time would take dynamic SQL.
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
                        -- Other sessions may have written to it since.
                        if exists (
                            select from pgqueue.run_%1$s as r
                            where r.finished_at between day_ends_at and clock_timestamp()
                        ) then
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

-- Whether the table of the ring run that is to be emptied after this day holds runs, and none that ended
-- after that day.
create or replace function pgqueue._is_over(day int)
    returns boolean
    language sql
as $$
    select exists (select from pgqueue.run as r where r.slot = _is_over.day % 16)
        and not exists (
            select from pgqueue.run as r
            where r.slot = _is_over.day % 16
                and r.finished_at between to_timestamp((_is_over.day + 1) * 86400::float8) and clock_timestamp()
        )
$$;

-- Whether the transaction is certain to end with the call of the function whose PG_CONTEXT this is. Postgres
-- does not say so, but a transaction begun by BEGIN, or by another statement, is older than our message.
-- A statement that is parsed and executed in one go looks as if it were not alone.
create or replace function pgqueue._is_alone(callers text)
    returns boolean
    language plpgsql
    stable
as $$
begin
    -- If another function called us, it may continue for as long as it likes.
    return strpos(callers, E'\n') = 0 and (
        -- Our message began the transaction, and nothing follows us in it.
        now() = statement_timestamp() and strpos(rtrim(current_query(), E'; \t\r\n'), ';') = 0
        -- Or, for a prepared statement, the transaction began when our portal was bound.
        or exists (
            select from pg_cursors as c
            where c.name = '' and c.statement = current_query() and c.creation_time = now()
        )
    );
end;
$$;

-- Empties the tables of the ring run whose day is over, except those in use, and returns how many. In a
-- transaction that may continue, it deletes at most 100,000 of their rows instead, and returns how many: that
-- blocks nobody, but leaves work to VACUUM.
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
            begin
                delete from pgqueue.run as r
                where r.slot = day % 16 and r.ctid = any (array(
                    select o.ctid
                    from pgqueue.run as o
                    where o.slot = day % 16 and o.finished_at < day_ends_at
                    limit 100000 - forgotten
                    for update skip locked
                ));
                get diagnostics deleted = row_count;
            exception
                -- A publication has the table, as one for all tables: it takes a TRUNCATE, and no DELETE without a key.
                when object_not_in_prerequisite_state then deleted := 0;
            end;
        end if;
        forgotten := forgotten + deleted;
    end loop;
    return forgotten;
end;
$$;

-- Deletes what nobody needs any more: at most 100,000 unique_for windows that have ended, 100,000 rows of gone and
-- 10,000 batches that ended more than 14 days ago, and 100,000 events. Returns how many of each, except gone.
create or replace function pgqueue._forget_ends(out windows bigint, out batches bigint, out events bigint)
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
    delete from pgqueue.event as e
    where e.ctid = any (array(
        select f.ctid
        from pgqueue.event as f
        where f.emitted_at < moment - pgqueue._seldom('', 'keep_events')::interval
            -- Or those that still wait for it would do so for ever.
            and not exists (
                select from pgqueue.wait as w
                where hashtextextended(w.event, 0) = hashtextextended(f.name, 0) and w.event = f.name
                offset 0
            )
        order by f.emitted_at
        limit 100000
        for update skip locked
    ));
    get diagnostics events = row_count;
end;
$$;

-- Adds to the counters of the queues what happened between two cuts, and makes a new cut unless the last one is
-- recent. It counts up to a cut once every transaction that wrote before it has ended, or after five minutes: what
-- a transaction that is open for longer wrote may be missed. A cut is ten seconds old when it is made, because a
-- call that had to wait writes later than the time it notes.
create or replace function pgqueue._count()
    returns void
    language plpgsql
    set enable_bitmapscan = on
    set enable_sort = on
as $$
declare
    moment timestamptz := clock_timestamp();
    first pgqueue.cut;
    next pgqueue.cut;
begin
    -- Cuts in the future: the clock was set back.
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
    where c.at > first.at and (c.xid <= pg_snapshot_xmin(pg_current_snapshot()) or c.at < moment - interval '5 minutes')
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
    -- It reads all jobs. If there are many, it is enough that one of the sessions that call this does so: the one that
    -- makes the next cut.
    is_reaped boolean := pg_relation_size('pgqueue.job') > 16777216 and exists (
        select from pgqueue.cut as c where c.at between clock_timestamp() - interval '30 seconds' and clock_timestamp()
    );
    ends record;
begin
    get diagnostics callers = pg_context;
    return query
    values
        ('reap', case when is_reaped then 0 else pgqueue.reap()::bigint end),
        ('fire schedules', pgqueue._fire_due(clock_timestamp(), 100)),
        ('tie loose ends', pgqueue._tie_loose_ends(1000)),
        ('sweep groups', pgqueue._sweep_groups(1000)),
        ('drop permits', pgqueue._drop_permits()),
        ('drop tickets', pgqueue._drop_tickets());
    ends := pgqueue._forget_ends();
    return query
    values ('forget keys', ends.windows), ('forget dead jobs', pgqueue._forget_dead());
    perform pgqueue._count();
    perform pgqueue._repair_settings();
    return query
    values
        ('forget batches', ends.batches),
        ('forget events', ends.events),
        -- Last, because until the commit nobody can read run.
        ('forget runs', pgqueue._forget_runs(pgqueue._is_alone(callers)));
end;
$$;

comment on function pgqueue.maintain() is
'Does all periodic work, at most this much in each call: recovers expired leases
and cancels jobs past their expires_at, 1000 in all (above 16 MB of jobs, not in
the 20 seconds after another call did); fires 100 schedules; looks again at 1000
jobs, batches and groups that may no longer have to wait; drops permits and
tickets that nobody needs; deletes 100,000 unique_for windows that have ended,
10,000 dead jobs kept for keep_dead, 10,000 batches that finished 14 days ago,
and 100,000 events older than keep_events; forgets the ids of jobs that were
removed 14 days ago; counts for metrics; and empties the tables of run whose
days are over. done is the number of jobs, looks, groups, permits, tickets,
windows, batches, events or tables. Call it every minute or so, from a worker,
cron or psql, as a statement of its own: in a transaction that may continue it
deletes 100,000 old runs instead, which locks nobody out but leaves work to
VACUUM; none where a publication has these tables. Any number may run at once.
Raises 25001 outside READ COMMITTED.';
