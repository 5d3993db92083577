-- Leases: which worker holds a job, and for how long. A lease is held by (id, token): of the functions that
-- workers call, only claim and reap touch a job without being given the token under which it is leased. To a
-- worker that may use only some queues, a job of another queue is lost whatever the token, which could be guessed.
--
-- Locks: claim, reap and extend skip what is locked and never wait. The functions that end
-- attempts lock jobs in the order of their ids. So no two of them wait for each other.

-- Locks those of these jobs that are leased under their tokens, in the order of their ids, and returns where they are.
create or replace function pgqueue._lock_held(job_ids bigint[], tokens bigint[])
    returns tid[]
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    own text[] := pgqueue._own_queues('worker');
begin
    return array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (_lock_held.job_ids)
            and ((j.id, j.token) in (
                select h.id, h.token from unnest(_lock_held.job_ids, _lock_held.tokens) as h (id, token)
            )) is true
            and pgqueue._is_own(j.queue, own)
        order by j.id
        for update
    );
end;
$$;

-- Whether a job waits or runs, and no session is writing or ending it. xmax alone does not tell: the transaction
-- that set it may have rolled back.
create or replace function pgqueue._is_left_alone(job_id bigint)
    returns boolean
    language plpgsql
as $$
begin
    -- Not "for key share": that would wait for a session that is updating the row, despite skip locked.
    perform from pgqueue.job as j where j.id = _is_left_alone.job_id for update skip locked;
    if found then
        -- To release the lock.
        raise sqlstate 'PQ000';
    end if;
    return false;
exception when sqlstate 'PQ000' then
    return true;
end;
$$;

create or replace function pgqueue.extend(job_ids bigint[], tokens bigint[], lease interval default null)
    returns table (job_id bigint, status text)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_leases(job_ids, tokens),
        case when lease is not null then pgqueue._check_ranges(lease => lease) end
    ));
    moment timestamptz := clock_timestamp();
    own text[] := pgqueue._own_queues('worker');
    picks tid[];
begin
    -- A heartbeat never waits: a handler that has completed its job but not yet committed
    -- holds the row, and behind it the leases of all the other jobs would expire.
    picks := array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (extend.job_ids)
            and ((j.id, j.token) in (
                select h.id, h.token from unnest(extend.job_ids, extend.tokens) as h (id, token)
            )) is true
            and pgqueue._is_own(j.queue, own)
        order by j.id
        -- This lock does not conflict with that of a step that has not been committed yet.
        for no key update skip locked
    );
    update pgqueue.job as j
    set lease_expires_at = case
            when extend.lease is not null then moment + extend.lease
            -- A claim may have asked for longer than the default.
            else greatest(j.lease_expires_at, moment + (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease)
        end
    where j.ctid = any (picks);

    -- A job that another session has locked counts as held until its present lease expires.
    return query
    select
        h.id,
        coalesce(
            (
                select case
                    when j.cancelled_at is not null then 'cancelled'
                    when j.lease_expires_at > moment then 'held'
                end
                from pgqueue.job as j
                where j.id = h.id and j.token = h.token and pgqueue._is_own(j.queue, own)
            ),
            'lost'
        )
    from unnest(extend.job_ids, extend.tokens) with ordinality as h (id, token, place)
    order by h.place;
end;
$$;

comment on function pgqueue.extend(bigint[], bigint[], interval) is
'The heartbeat: from now on the leases last for lease or, if that is null, for
that of the queue, which never shortens them. Says for each job whether it is
held, cancelled (stop working, then call fail or release) or lost (stop
working, report nothing). A lease that has expired but that nobody has
recovered is held again. This never waits: a job that an open transaction has
locked keeps its present lease, and counts as held until that expires.
Raises 25001 outside READ COMMITTED, 22023 (bad argument).';
