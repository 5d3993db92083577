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
        pgqueue._check_isolation(), pgqueue._check_max_jobs(max_jobs)
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

-- One statement for each table, because a name put together at run time is dynamic SQL.
-- Locks one table of the ring run, or raises 55P03 if it is in use: so nobody queues up behind us behind
-- a long SELECT.
create or replace function pgqueue._lock_run(slot int)
    returns void
    language plpgsql
as $$
begin
    case slot
        when 0 then lock table pgqueue.run_0 in access exclusive mode nowait;
        when 1 then lock table pgqueue.run_1 in access exclusive mode nowait;
        when 2 then lock table pgqueue.run_2 in access exclusive mode nowait;
        when 3 then lock table pgqueue.run_3 in access exclusive mode nowait;
        when 4 then lock table pgqueue.run_4 in access exclusive mode nowait;
        when 5 then lock table pgqueue.run_5 in access exclusive mode nowait;
        when 6 then lock table pgqueue.run_6 in access exclusive mode nowait;
        when 7 then lock table pgqueue.run_7 in access exclusive mode nowait;
        when 8 then lock table pgqueue.run_8 in access exclusive mode nowait;
        when 9 then lock table pgqueue.run_9 in access exclusive mode nowait;
        when 10 then lock table pgqueue.run_10 in access exclusive mode nowait;
        when 11 then lock table pgqueue.run_11 in access exclusive mode nowait;
        when 12 then lock table pgqueue.run_12 in access exclusive mode nowait;
        when 13 then lock table pgqueue.run_13 in access exclusive mode nowait;
        when 14 then lock table pgqueue.run_14 in access exclusive mode nowait;
        when 15 then lock table pgqueue.run_15 in access exclusive mode nowait;
    end case;
end;
$$;

-- Empties one table of the ring run, or raises 55006 if a cursor of this session is reading it.
create or replace function pgqueue._empty_run(slot int)
    returns void
    language plpgsql
as $$
begin
    case slot
        when 0 then truncate pgqueue.run_0;
        when 1 then truncate pgqueue.run_1;
        when 2 then truncate pgqueue.run_2;
        when 3 then truncate pgqueue.run_3;
        when 4 then truncate pgqueue.run_4;
        when 5 then truncate pgqueue.run_5;
        when 6 then truncate pgqueue.run_6;
        when 7 then truncate pgqueue.run_7;
        when 8 then truncate pgqueue.run_8;
        when 9 then truncate pgqueue.run_9;
        when 10 then truncate pgqueue.run_10;
        when 11 then truncate pgqueue.run_11;
        when 12 then truncate pgqueue.run_12;
        when 13 then truncate pgqueue.run_13;
        when 14 then truncate pgqueue.run_14;
        when 15 then truncate pgqueue.run_15;
    end case;
    -- See module schema.
    perform brin_desummarize_range(i.indexrelid, 0)
    from pg_index as i
    where i.indrelid = ('pgqueue.run_' || slot)::regclass;
end;
$$;

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

-- Empties the table of the ring run of a day that is over, unless it is in use; returns whether it did.
-- Nobody can read run until the transaction ends.
create or replace function pgqueue._empty_runs(day int)
    returns boolean
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = on
as $$
begin
    perform pgqueue._lock_run(day % 16);
    -- Others may have written to it since. By the index: now others wait.
    if exists (
        select from pgqueue.run as r
        where r.slot = day % 16 and r.finished_at >= to_timestamp((day + 1) * 86400::float8)
    ) then
        return false;
    end if;
    perform pgqueue._empty_run(day % 16);
    return true;
exception
    -- Another session, or an open cursor of this one, is reading it.
    when lock_not_available or object_in_use then return false;
end;
$$;

-- Deletes runs of a day that is over, at most this many, and returns how many. Nobody waits for it, but
-- VACUUM has to follow.
create or replace function pgqueue._delete_runs(day int, most int)
    returns int
    language plpgsql
    set enable_seqscan = off
    set enable_bitmapscan = on
as $$
declare
    picks tid[] := array(
        select r.ctid
        from pgqueue.run as r
        where r.slot = _delete_runs.day % 16 and r.finished_at < to_timestamp((_delete_runs.day + 1) * 86400::float8)
        limit most
        for update skip locked
    );
    deleted int;
begin
    delete from pgqueue.run as r where r.slot = _delete_runs.day % 16 and r.ctid = any (picks);
    get diagnostics deleted = row_count;
    return deleted;
end;
$$;

-- Empties the tables of the ring run whose day is over, except those in use, and returns how many; or, in
-- a transaction that may continue, deletes at most 100,000 of their rows, and returns how many.
create or replace function pgqueue._forget_runs(is_alone boolean)
    returns int
    language plpgsql
    set enable_partition_pruning = on
as $$
declare
    today int := floor(date_part('epoch', clock_timestamp()) / 86400)::int;
    forgotten int := 0;
begin
    -- The last deletion day of each table is one of the 16 days before today. A row written
    -- after that day is kept until the next one, 16 days later.
    for day in today - 16 .. today - 1 loop
        continue when not pgqueue._is_over(day);
        forgotten := forgotten + case when is_alone
            then pgqueue._empty_runs(day)::int else pgqueue._delete_runs(day, 100000 - forgotten) end;
    end loop;
    return forgotten;
end;
$$;

-- Deletes at most 100,000 unique_for windows that have ended; returns how many.
create or replace function pgqueue._forget_keys()
    returns int
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
    forgotten int;
begin
    delete from pgqueue.recent_key as k
    where k.ctid = any (array(
        select e.ctid
        from pgqueue.recent_key as e
        where e.expires_at <= moment
        order by e.expires_at
        limit 100000
        for update skip locked
    ));
    get diagnostics forgotten = row_count;
    return forgotten;
end;
$$;

create or replace function pgqueue.maintain()
    returns table (task text, done bigint)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_isolation());
    callers text;
begin
    get diagnostics callers = pg_context;
    task := 'reap';
    done := pgqueue.reap();
    return next;
    task := 'fire schedules';
    done := pgqueue._fire_due(clock_timestamp(), 100);
    return next;
    task := 'tie loose ends';
    done := pgqueue._tie_loose_ends(1000);
    return next;
    task := 'sweep groups';
    done := pgqueue._sweep_groups(1000);
    return next;
    task := 'drop permits';
    done := pgqueue._drop_permits();
    return next;
    task := 'forget keys';
    done := pgqueue._forget_keys();
    return next;
    task := 'forget dead jobs';
    done := pgqueue._forget_dead();
    return next;
    perform pgqueue._repair_settings();
    -- As there: for copies of the rows alone.
    perform pgqueue._use_lanes(l.queue) from pgqueue._lanes(0) as l where l.lane <> 0;
    task := 'forget batches';
    done := pgqueue._forget_ends();
    return next;
    -- Last, because nobody can read run from here on.
    task := 'forget runs';
    done := pgqueue._forget_runs(pgqueue._is_alone(callers));
    return next;
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
ago (done: batches); forgets the ids of jobs that were cancelled, purged or
discarded 14 days ago; empties the tables of run whose days are over (done:
tables). Call it every minute or so, from a worker, cron or psql, as a statement
of its own: in a transaction that may continue it deletes old runs instead, at
most 100,000 (done: runs), which locks nobody out but leaves work to VACUUM. Any
number may run at once.
Raises 25001 outside READ COMMITTED.';
