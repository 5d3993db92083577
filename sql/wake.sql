-- The module between producer and worker: which sessions wait, and what wakes them.
--
-- NOTIFY takes a cluster-wide lock at commit, so a producer sends it only when
-- somebody waits for it. Two families of advisory locks show that, each folded to 256 keys
-- so that one transaction over many queues cannot fill the lock table:
--
--   7366513 "in flight"  held shared by every enqueue until its transaction ends
--   7366514 "parked"     held shared by the session of every worker that waits (see rest)
--
-- A producer first takes "in flight", then looks whether anybody is parked. A worker
-- first parks, then looks whether anything is in flight. So either the producer sees
-- the worker and notifies, or the worker sees the producer and asks again soon.
--
-- (7366516 is held by sessions that wait for a job to end: see module status.)
--
-- A notification says in one word what it is for, and nothing about a job: empty means that there may be
-- something to claim, "cancel" that a running job was cancelled, "end" that a job has ended that somebody
-- waits for.
--
-- Any role may take any advisory lock, so nothing here waits for one: a lock that is not free
-- counts as "somebody is there", which costs a needless NOTIFY or another look. And a mere look
-- takes and releases the lock in one expression: no interrupt falls in between.

create or replace function pgqueue._wake(queue text)
    returns void
    language plpgsql
as $$
declare
    fold int := hashtext(_wake.queue) & 255;
begin
    if current_setting('pgqueue.notify', true) = 'off'
        or not (pgqueue._in_force(queue)).notify
    then
        return;
    end if;
    if (
        pg_try_advisory_xact_lock_shared(7366513, fold)
        and pg_try_advisory_lock(7366514, fold)
        and pg_advisory_unlock(7366514, fold)
    ) is not true
        -- A full notification queue makes COMMIT fail, and a hint is not worth that.
        and pg_notification_queue_usage() < 0.5
    then
        perform pg_notify('pgqueue', '');
    end if;
end;
$$;

comment on function pgqueue._wake(text) is
'Notifies the workers parked on a queue, if any, when this transaction commits.
SET pgqueue.notify = off, or configure(notify => false), switches it off, as
PREPARE TRANSACTION needs.';

create or replace function pgqueue._notify(queue text, news text)
    returns void
    language plpgsql
as $$
begin
    if current_setting('pgqueue.notify', true) = 'off'
        or not (pgqueue._in_force(queue)).notify
    then
        return;
    end if;
    -- A full notification queue makes COMMIT fail, and a hint is not worth that.
    if pg_notification_queue_usage() < 0.5 then
        perform pg_notify('pgqueue', news);
    end if;
end;
$$;

comment on function pgqueue._notify(text, text) is
'Sends a notification about a queue when this transaction commits, if it may:
see _wake.';

create or replace function pgqueue._unpark()
    returns void
    language plpgsql
as $$
begin
    -- Only what this session holds: unlocking anything else raises a warning.
    perform pg_advisory_unlock_shared(7366514, l.objid::int)
    from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid()
        and l.database = (select d.oid from pg_database as d where d.datname = current_database())
        and l.classid = 7366514 and l.objsubid = 2 and l.mode = 'ShareLock';
    perform set_config('pgqueue.parked', '', false);
end;
$$;

comment on function pgqueue._unpark() is 'Ends what _park began. Harmless when not parked.';

create or replace function pgqueue._unpark_if_busy(moment timestamptz)
    returns void
    language plpgsql
as $$
begin
    -- As texts of equal length, so that no setting can be unreadable.
    if current_setting('pgqueue.parked') = 'resting' then
        perform set_config('pgqueue.parked', pgqueue._since_2020(moment)::text, false);
    elsif current_setting('pgqueue.parked')
        < pgqueue._since_2020(moment - interval '100 milliseconds')::text
    then
        perform pgqueue._unpark();
    end if;
end;
$$;

comment on function pgqueue._unpark_if_busy(timestamptz) is
'For a claim that found work: a session that has worked for 100 ms without a
rest needs no notifications.';

create or replace function pgqueue._park(queues text[])
    returns boolean
    language plpgsql
as $$
declare
    fold int;
    is_quiet boolean := true;
begin
    perform pgqueue._unpark();
    perform set_config('pgqueue.parked', 'resting', false);
    for fold in
        select distinct hashtext(q.name) & 255 from unnest(queues) as q (name) order by 1
    loop
        is_quiet := pg_try_advisory_lock_shared(7366514, fold)
            and pg_try_advisory_lock(7366513, fold)
            and pg_advisory_unlock(7366513, fold)
            and is_quiet;
    end loop;
    return is_quiet;
end;
$$;

comment on function pgqueue._park(text[]) is
'From now on enqueues into these queues notify this session. False if one is
still open, or may be.';

create or replace function pgqueue._until_due(queue text, kinds text[], paused jsonb, moment timestamptz)
    returns interval
    language plpgsql
    set enable_sort = off
as $$
declare
    live record;
    lease_ends_at timestamptz;
    unlocked_at timestamptz;
    has_swept boolean := false;
    until timestamptz;
begin
    for live in select * from pgqueue._live_lanes(queue) loop
        if live.first <= moment and live.lane > 500 then
            -- It may be alone, and its claim has looked at only a few of the groups that have lost their tickets.
            if not has_swept and not (current_setting('transaction_read_only') = 'on'
                or pgqueue._sweep_all(clock_timestamp()))
            then
                until := moment + interval '1 second';
            end if;
            has_swept := true;
            until := least(until, pgqueue._until_ticket(
                queue, kinds, paused, live.lane, (pgqueue._in_force(queue)).group_limit is not null, moment
            ));
        elsif live.first <= moment then
            perform from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_due.queue, live.lane) and j.run_at <= moment
                and (j.lease_expires_at is null or j.lease_expires_at <= moment)
                and pgqueue._is_wanted(j.kind, j.group_key, _until_due.kinds, _until_due.paused)
            limit 1
            for update skip locked;
            if found then
                return interval '0';
            end if;
            select
                min(j.lease_expires_at) filter (where j.lease_expires_at > moment),
                -- Locked just now. If it is not claimed after all, nothing will tell.
                case when bool_or((j.lease_expires_at > moment) is not true)
                    then moment + interval '1 second'
                end
            into lease_ends_at, unlocked_at
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_due.queue, live.lane) and j.run_at <= moment
                and pgqueue._is_wanted(j.kind, j.group_key, _until_due.kinds, _until_due.paused);
            until := least(until, lease_ends_at, unlocked_at);
        end if;
        until := least(until, (
            select j.run_at
            from pgqueue.job as j
            where pgqueue._is_in_lane(j, _until_due.queue, live.lane)
                and j.run_at > moment and j.run_at < 'infinity'
                and j.lease_expires_at is null
                and pgqueue._is_wanted(j.kind, j.group_key, _until_due.kinds, _until_due.paused)
            order by j.run_at, j.id
            limit 1
        ));
    end loop;
    return until - moment;
end;
$$;

comment on function pgqueue._until_due(text, text[], jsonb, timestamptz) is
'How long until a queue has something to claim: zero if it has, else until a job
is due or a lease expires; null if there is nothing.';

create or replace function pgqueue.rest(
    queues text[], kinds text[] default null, park boolean default true
)
    returns interval
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_queues(queues), pgqueue._check_isolation()
    ));
    moment timestamptz := clock_timestamp();
    is_quiet boolean := true;
    pause interval;
begin
    perform pgqueue._look_around(moment, 100);
    if park is not false then
        is_quiet := pgqueue._park(queues);
    end if;
    moment := clock_timestamp();
    select min(least(
        pgqueue._until_room(q.name, rest.kinds, p.paused, moment),
        case when not s.notify then interval '5 seconds' end
    ))
    into pause
    from unnest(queues) as q (name)
    cross join lateral pgqueue._in_force(q.name) as s
    cross join lateral pgqueue._paused(q.name, s.paused) as p (paused)
    where not s.paused or p.paused is not null;
    pause := least(pause, pgqueue._until_slot(queues, moment));
    if not is_quiet then
        -- Not before 40 times as long as the look took: a twentieth of the time, with a claim.
        pause := least(pause, interval '5 seconds', greatest(
            interval '20 milliseconds', 40 * (clock_timestamp() - moment)
        ));
    end if;
    return pause;
-- An interrupted rest() leaves the session unparked.
exception when query_canceled or lock_not_available or deadlock_detected
    or insufficient_resources or program_limit_exceeded or read_only_sql_transaction
then
    perform pgqueue._unpark();
    raise;
end;
$$;

comment on function pgqueue.rest(text[], text[], boolean) is
'For a session that has run LISTEN pgqueue and whose claim found nothing in
these queues (of these kinds): returns how long it may sleep, unless a
notification comes first. Zero: claim again at once. Null: until notified.
Fires due schedules. From now on enqueues into these queues notify it; 100 ms
of work without a rest end that. NOTIFY is a hint, so look every few seconds
anyway.
Behind a transaction pooler none arrive: park => false only looks.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';
