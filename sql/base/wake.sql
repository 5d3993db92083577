-- Between producers and workers: which sessions wait, and what wakes them.
--
-- NOTIFY takes a cluster-wide lock at commit, so a producer sends it only when
-- somebody waits for it. Two families of advisory locks show that, each folded to 256 keys
-- so that one transaction over many queues cannot fill the lock table:
--
--   7366513 "in flight"  held shared by every enqueue until its transaction ends, also by every end that frees a
--                        permit (256: by every emit)
--   7366514 "parked"     held shared by the session of every worker that waits (see rest)
--
-- A producer first takes "in flight", then looks whether anybody is parked. A worker
-- first parks, then looks whether anything is in flight. So either the producer sees
-- the worker and notifies, or the worker sees the producer and asks again soon.
--
-- (7366515 is held by a session that has set a limit, until it commits: see module cap.
-- 7366516 is held by a session that waits for the end of a job: see module status, and _tell_end.)
--
-- A notification says in one word what it is for, and nothing about a job: empty means that there may be something to
-- claim, "cancel" that a running job was cancelled, "end" that a job has ended for which a session waits.
--
-- Any role may take any advisory lock, so nothing here waits for one: a lock that is not free
-- counts as "somebody is there", which costs a needless NOTIFY or another look. A mere check
-- takes and releases the lock in one expression, so that no interrupt falls in between.

-- Sends a notification about a queue (null: about all of them) when this transaction commits, unless that is
-- switched off: by SET pgqueue.notify = off, as PREPARE TRANSACTION needs, or by configure(notify => false).
create or replace function pgqueue._notify(queue text, news text)
    returns void
    language plpgsql
as $$
begin
    if current_setting('pgqueue.notify', true) is distinct from 'off'
        and (
            (pgqueue._in_force(coalesce(queue, ''))).notify
            or queue is null and exists (select from pgqueue.queue_in_force as f where f.notify)
        )
        -- A full notification queue makes COMMIT fail, which a hint is not worth.
        and pg_notification_queue_usage() < 0.5
    then
        perform pg_notify('pgqueue', news);
    end if;
end;
$$;

-- Notifies the workers parked on a queue (null: on any), if there are some, when this transaction commits.
create or replace function pgqueue._wake(queue text)
    returns void
    language plpgsql
as $$
declare
    fold int := hashtext(_wake.queue collate "default") & 255;
begin
    if current_setting('pgqueue.notify', true) = 'off' then
        return;
    end if;
    if (
        pg_try_advisory_xact_lock_shared(7366513, fold)
        and pg_try_advisory_lock(7366514, fold)
        and pg_advisory_unlock(7366514, fold)
    ) is not true then
        perform pgqueue._notify(queue, '');
    end if;
end;
$$;

-- Lets no worker of these queues rest for long before this transaction ends: where the lock is not free, notifies them
-- when it commits.
create or replace function pgqueue._let_none_sleep(queues text[])
    returns void
    language plpgsql
as $$
begin
    if not pg_try_advisory_xact_lock_shared(7366513, hashtext(queues[1] collate "default") & 255)
        or queues[1] <> any (queues)
    then
        perform pgqueue._notify(u.name, '')
        from (select distinct q.name from unnest(queues) as q (name)) as u
        where not pg_try_advisory_xact_lock_shared(7366513, hashtext(u.name collate "default") & 255);
    end if;
end;
$$;

-- The keys of the shared advisory locks of this class that this session holds: unlocking others raises a warning.
create or replace function pgqueue._own_locks(class int)
    returns setof int
    language sql
    stable
as $$
    select l.objid::int
    from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid()
        and l.database = (select d.oid from pg_database as d where d.datname = current_database())
        and l.classid = _own_locks.class and l.objsubid = 2 and l.mode = 'ShareLock'
$$;

-- Ends what _park began. Harmless when not parked.
create or replace function pgqueue._unpark()
    returns void
    language plpgsql
as $$
begin
    perform pg_advisory_unlock_shared(7366514, l.key) from pgqueue._own_locks(7366514) as l (key);
    perform set_config('pgqueue.parked', '', false);
end;
$$;

-- For a claim that found work: a session that has worked for 100 ms without a rest needs no notifications.
create or replace function pgqueue._unpark_if_busy(moment timestamptz)
    returns void
    language plpgsql
as $$
begin
    -- Compared as texts of equal length: a cast might fail on a value that the user has set.
    if current_setting('pgqueue.parked') = 'resting' then
        perform set_config('pgqueue.parked', pgqueue._since_2020(moment)::text, false);
    elsif current_setting('pgqueue.parked') < pgqueue._since_2020(moment - interval '100 milliseconds')::text then
        perform pgqueue._unpark();
    end if;
end;
$$;

-- From now on enqueues into these queues notify this session. Returns false if any may still be uncommitted, which
-- will not notify it.
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
        select distinct hashtext(q.name collate "default") & 255 from unnest(queues) as q (name) order by 1
    loop
        is_quiet := pg_try_advisory_lock_shared(7366514, fold)
            and pg_try_advisory_lock(7366513, fold)
            and pg_advisory_unlock(7366513, fold)
            and is_quiet;
    end loop;
    if pg_relation_size('pgqueue.wait') > 0 then
        is_quiet := pg_try_advisory_lock(7366513, 256) and pg_advisory_unlock(7366513, 256) and is_quiet;
    end if;
    return is_quiet;
end;
$$;

-- Notes that this session serves these queues (only these kinds, if given): for as long as it lives, or for ten
-- minutes if it may be shared, as behind a pooler. A table, although advisory locks would need no cleaning up: any
-- role could take those, and they cannot name kinds.
create or replace function pgqueue._serve(queues text[], kinds text[], is_shared boolean)
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    said text := current_setting('pgqueue.serves', true);
    news text := concat(
        hashtextextended(queues::text, 0), ' ', hashtextextended(kinds::text, 0), ' ',
        -- Once a minute, check whether the note still holds for a while.
        case when is_shared then floor(date_part('epoch', moment) / 60) end
    );
begin
    if said = news or current_setting('transaction_read_only') = 'on' then
        return;
    end if;
    -- Also what an earlier session with the same pid has left.
    delete from pgqueue.service as s
    where s.ctid = any (array(
        select s.ctid
        from pgqueue.service as s
        left join pg_stat_activity as a on a.pid = s.pid and (a.backend_start = s.started) is not false
        where a.pid is null or s.until < moment or s.pid = pg_backend_pid() and coalesce(said, '') = ''
        for update of s skip locked
    ));
    insert into pgqueue.service (until, started, pid, queue, kinds)
    select
        case when is_shared then moment + interval '10 minutes' else 'infinity' end,
        (select a.backend_start from pg_stat_activity as a where a.pid = pg_backend_pid()),
        pg_backend_pid(), q.name, _serve.kinds
    from (select distinct unnest(queues)) as q (name)
    where not exists (
        select
        from pgqueue.service as s
        where s.pid = pg_backend_pid() and s.queue = q.name and s.until > moment + interval '5 minutes'
            and (s.kinds is null or s.kinds @> _serve.kinds)
    );
    perform set_config('pgqueue.serves', news, false);
end;
$$;

-- When this transaction commits, notifies sessions that wait for one of these jobs, which it has deleted.
create or replace function pgqueue._tell_end(ended pgqueue._ended[])
    returns void
    language plpgsql
as $$
declare
    of_jobs record;
begin
    if pg_try_advisory_lock(7366516, 256) and pg_advisory_unlock(7366516, 256) then
        return;
    end if;
    for of_jobs in
        select distinct (e.id & 255)::int as fold, e.queue from unnest(ended) as e where e.back_at is null
    loop
        if (pg_try_advisory_lock(7366516, of_jobs.fold) and pg_advisory_unlock(7366516, of_jobs.fold)) is not true then
            perform pgqueue._notify(of_jobs.queue, 'end');
        end if;
    end loop;
end;
$$;
