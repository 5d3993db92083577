-- The room between producer and worker: who waits, and who wakes them.
--
-- NOTIFY takes a lock of the whole cluster at commit, so a producer sends it only when
-- somebody waits for it. Two families of advisory locks tell, each folded to 256 keys so
-- that one transaction over many queues cannot fill the lock table:
--
--   "in flight"  held shared by every enqueue until its transaction ends
--   "parked"     held shared by the session of every worker that waits (see park)
--
-- A producer first takes "in flight", then looks whether anybody is parked. A worker
-- first parks, then looks whether anything is in flight. So either the producer sees
-- the worker and notifies, or the worker sees the producer and asks again soon.

create or replace function pgqueue._wake(queue text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- The classes 7366513 and 7366514 are "pgq" in ASCII and the number after it.
    fold int := hashtext(_wake.queue) & 255;
begin
    if current_setting('pgqueue.notify', true) = 'off' then
        return;
    end if;

    perform pg_advisory_xact_lock_shared(7366513, fold);

    -- A probe: whoever gets this lock exclusively knows that nobody is parked.
    if pg_try_advisory_lock(7366514, fold) then
        perform pg_advisory_unlock(7366514, fold);
    -- A full queue of notifications makes COMMIT fail, and a hint is not worth that.
    elsif pg_notification_queue_usage() < 0.5 then
        perform pg_notify('pgqueue', '');
    end if;
end;
$$;

comment on function pgqueue._wake(text) is
'Notifies the workers parked on a queue, if any, when this transaction commits. SET pgqueue.notify = off switches it off, as PREPARE TRANSACTION needs.';

create or replace function pgqueue._reopened(queues text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- Others find a reopened job behind their mark with their next full walk.
    perform set_config('pgqueue.mark_' || (hashtext(q.name) & 63), '', false), pgqueue._wake(q.name)
    from unnest(_reopened.queues) as q (name);
end;
$$;

comment on function pgqueue._reopened(text[]) is
'For jobs that come back to their old place in a lane: forgets this session''s marks, so that it finds them at once, and wakes the parked.';

create or replace function pgqueue.park(queues text[])
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    fold int;
    is_quiet boolean := true;
begin
    perform pgqueue.unpark(queues);
    for fold in
        select distinct hashtext(q.name) & 255 from unnest(park.queues) as q (name) order by 1
    loop
        perform pg_advisory_lock_shared(7366514, fold);
        if pg_try_advisory_lock(7366513, fold) then
            perform pg_advisory_unlock(7366513, fold);
        else
            is_quiet := false;
        end if;
    end loop;
    return is_quiet;
end;
$$;

comment on function pgqueue.park(text[]) is
'For a session that has said LISTEN pgqueue: from now on enqueues into these queues notify it. True: claim once more, and if that finds nothing, sleep until a notification, next_due or the poll interval. False: an enqueue is still open, so claim again after a short pause. Parked until unpark or the end of the session. Not behind a transaction pooler: poll there.';

create or replace function pgqueue.unpark(queues text[])
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- Only what this session holds: to unlock anything else raises a warning.
    perform pg_advisory_unlock_shared(7366514, l.objid::int)
    from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid()
        and l.database = (select d.oid from pg_database as d where d.datname = current_database())
        and l.classid = 7366514 and l.objsubid = 2 and l.mode = 'ShareLock'
        and l.objid::int in (
            select hashtext(q.name) & 255 from unnest(unpark.queues) as q (name)
        );
end;
$$;

comment on function pgqueue.unpark(text[]) is
'Ends what park began, so that enqueues into these queues cost no NOTIFY while the worker works. Harmless when not parked.';

create or replace function pgqueue.next_due(queues text[])
    returns interval
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
as $$
declare
    moment timestamptz := clock_timestamp();
begin
    return (
        with recursive lane (queue, priority) as (
            select
                q.name,
                (
                    select j.priority from pgqueue.job as j
                    where hashtext(j.queue) = hashtext(q.name)
                    order by j.priority desc limit 1
                )
            from unnest(next_due.queues) as q (name)
            where not (pgqueue._settings(q.name)).paused
            union all
            select
                l.queue,
                (
                    select j.priority from pgqueue.job as j
                    where hashtext(j.queue) = hashtext(l.queue) and j.priority < l.priority
                    order by j.priority desc limit 1
                )
            from lane as l
            where l.priority is not null
        )
        select min(due.run_at) - moment
        from lane as l
        cross join lateral (
            select j.run_at from pgqueue.job as j
            where hashtext(j.queue) = hashtext(l.queue) and j.queue = l.queue
                and j.priority = l.priority
                and j.run_at > moment and j.run_at < 'infinity'
                and j.lease_expires_at is null
            order by j.run_at, j.id limit 1
        ) as due
    );
end;
$$;

comment on function pgqueue.next_due(text[]) is
'How long until the next scheduled job of these queues is due; null when none is scheduled. Ask before the last claim, so that what falls due in between is claimed. Jobs that are due already, and paused queues, do not count.';
