-- Limits: how many jobs of a group run at once.
--
-- A group with a limit has as many slots, rows that persist. A claim takes a job of the group only
-- together with a free slot, which it locks first, and asks only then whether it is free: so it sees
-- what others did with it before. A slot is free when its job does not hold it any more (job.slot), so
-- nothing must be given back, whoever ends an attempt and how. What others have locked is passed
-- over: no claim waits. Two sessions that do not see each other may make a slot twice; who takes one
-- has all its copies locked, and finds no new one after that.
--
-- The job that a claim meets in the round is a ticket: the first job of its group, by priority, run_at
-- and id, gets the slot. Where the group is full the ticket is parked, out of the lane, and the end of
-- an attempt puts a parked one back. Both have the first slot of the group locked, and look after
-- that: so either the claim sees that the attempt has ended, or the end sees the parked job. An end
-- that cannot have the lock at once leaves a note, a row in recall, for the next claim.

create or replace function pgqueue._has_limits(queue text)
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
begin
    return pg_relation_size('pgqueue.queue') > 0 and exists (
        select from pgqueue.queue as q
        where q.name in (_has_limits.queue, '') and q.group_limit is not null
    );
end;
$$;

comment on function pgqueue._has_limits(text) is 'Whether any group of a queue has a limit.';

create or replace function pgqueue._make_slots(queue text, group_keys text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    insert into pgqueue.slot (place, queue, group_key)
    select p.place, _make_slots.queue, g.key
    from (select distinct u.key from unnest(group_keys) as u (key) where u.key is not null) as g
    cross join lateral pgqueue._settings(_make_slots.queue, '', g.key) as settings
    cross join lateral (
        select coalesce(max(s.place), 0) as places
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(_make_slots.queue)
            and hashtext(s.group_key) = hashtext(g.key)
            and s.queue = _make_slots.queue and s.group_key = g.key
    ) as made
    cross join lateral generate_series(made.places + 1, settings.group_limit) as p (place);
end;
$$;

comment on function pgqueue._make_slots(text, text[]) is
'Makes the slots that those of some groups lack that have a limit. Other
sessions see them from the commit on.';

create or replace function pgqueue._apply_limit(queue text, group_key text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
as $$
declare
    known record;
    group_limit int;
    places int;
begin
    for known in
        select distinct j.queue, j.group_key
        from pgqueue.job as j
        where j.group_key is not null
            and (_apply_limit.queue is null or j.queue = _apply_limit.queue)
            and (_apply_limit.group_key is null or j.group_key = _apply_limit.group_key)
    loop
        group_limit := (pgqueue._settings(known.queue, '', known.group_key)).group_limit;
        if group_limit is null then
            update pgqueue.job as j
            set turn = null
            where hashtext(j.queue) = hashtext(known.queue) and hashtext(j.group_key) = hashtext(known.group_key)
                and j.queue = known.queue and j.group_key = known.group_key and j.turn = 'infinity';
            continue;
        end if;
        select coalesce(max(s.place), 0) into places
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(known.queue) and hashtext(s.group_key) = hashtext(known.group_key)
            and s.queue = known.queue and s.group_key = known.group_key;
        if places = 0 then
            perform pgqueue._count_running(known.queue, known.group_key);
        end if;
        perform pgqueue._make_slots(known.queue, array[known.group_key]);
        insert into pgqueue.recall (queue, group_key)
        select known.queue, known.group_key from generate_series(places + 1, group_limit);
    end loop;
end;
$$;

comment on function pgqueue._apply_limit(text, text) is
'After a change of limits: gives groups the slots that they lack, and lets
claims look at what is parked.';

create or replace function pgqueue._count_running(queue text, group_key text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_indexscan = on
as $$
begin
    with running as (
        select j.id, row_number() over (order by j.id) as place
        from (
            select j.id
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_count_running.queue)
                and hashtext(j.group_key) = hashtext(_count_running.group_key)
                and j.queue = _count_running.queue and j.group_key = _count_running.group_key
                and j.lease_expires_at is not null
            order by j.id
            for update
        ) as j
    ), counted as (
        update pgqueue.job as j set slot = r.place from running as r where j.id = r.id
    )
    insert into pgqueue.slot (place, job_id, queue, group_key)
    select r.place, r.id, _count_running.queue, _count_running.group_key from running as r;
end;
$$;

comment on function pgqueue._count_running(text, text) is
'Gives slots to the jobs of a group that run from before it had a limit, also
beyond it.';

create or replace function pgqueue._slots(queue text, group_key text)
    returns table (place int, copies bigint, holder bigint, holder_run_at timestamptz, is_running boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return query
    select s.place, count(*), max(j.id), max(j.run_at), coalesce(bool_or(j.lease_expires_at is not null), false)
    from pgqueue.slot as s
    left join pgqueue.job as j on j.id = s.job_id and j.slot = s.place
    where hashtext(s.queue) = hashtext(_slots.queue)
        and hashtext(s.group_key) = hashtext(_slots.group_key)
        and s.queue = _slots.queue and s.group_key = _slots.group_key
    group by s.place;
end;
$$;

comment on function pgqueue._slots(text, text) is
'The slots of a group: how many copies there are of each, and which job holds it.';

create or replace function pgqueue._lock_slot(queue text, group_key text, place int)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    seen bigint;
    locked bigint;
begin
    select count(*) into locked
    from (
        select
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(_lock_slot.queue)
            and hashtext(s.group_key) = hashtext(_lock_slot.group_key)
            and s.queue = _lock_slot.queue and s.group_key = _lock_slot.group_key
            and s.place = _lock_slot.place
        for update skip locked
    ) as l;
    select count(*) into seen
    from pgqueue.slot as s
    where hashtext(s.queue) = hashtext(_lock_slot.queue)
        and hashtext(s.group_key) = hashtext(_lock_slot.group_key)
        and s.queue = _lock_slot.queue and s.group_key = _lock_slot.group_key
        and s.place = _lock_slot.place;
    return case when seen > 0 then locked = seen end;
end;
$$;

comment on function pgqueue._lock_slot(text, text, int) is
'Locks a slot, all copies of it; false where somebody else has one of them, null
where there is none.';

create or replace function pgqueue._first_job(queue text, group_key text, moment timestamptz, is_parked boolean)
    returns pgqueue.job
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    job pgqueue.job;
    lowest int := 2147483647;
begin
    loop
        select j.* into job
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(_first_job.queue)
            and hashtext(j.group_key) = hashtext(_first_job.group_key)
            and j.priority < lowest
            and j.queue = _first_job.queue and j.group_key = _first_job.group_key
            and j.lease_expires_at is null and j.slot is null
            and (not is_parked or j.turn = 'infinity')
        order by j.priority desc, j.run_at, j.id
        limit 1
        for update skip locked;
        exit when (job.run_at > moment) is not true;
        -- All of this priority are for later.
        lowest := job.priority;
    end loop;
    return job;
end;
$$;

comment on function pgqueue._first_job(text, text, timestamptz, boolean) is
'Locks the first due job of a group that waits, by priority, run_at and id, or
the first that is parked.';

create or replace function pgqueue._job_to_run(
    queue text, group_key text, group_limit int, moment timestamptz, out place int, out job pgqueue.job
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    free record;
begin
    for free in
        select s.place, s.holder
        from (
            select u.*, sum((u.is_running or (u.holder_run_at > moment) is true)::int) over () as held
            from pgqueue._slots(queue, group_key) as u
        ) as s
        where s.held < group_limit and s.place <= group_limit
            and not s.is_running and (s.holder_run_at > moment) is not true
        order by s.place
    loop
        continue when pgqueue._lock_slot(queue, group_key, free.place) is not true;
        -- Now that nobody else can take it.
        select s.place, s.holder into place, free.holder
        from pgqueue._slots(queue, group_key) as s
        where s.place = free.place and not s.is_running and (s.holder_run_at > moment) is not true;
        continue when not found;
        if free.holder is null then
            job := pgqueue._first_job(queue, group_key, moment, false);
        else
            -- It waited for its retry, and kept its slot.
            select j.* into job
            from pgqueue.job as j where j.id = free.holder and j.lease_expires_at is null
            for update skip locked;
        end if;
        return;
    end loop;
    place := null;
end;
$$;

comment on function pgqueue._job_to_run(text, text, int, timestamptz) is
'Locks a free slot of a group, if there is one, and the job that is to run in it.';

create or replace function pgqueue._park_job(queue text, group_key text, group_limit int, job_id bigint)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
as $$
begin
    if pgqueue._lock_slot(queue, group_key, 1) is not true
        or (select count(*) from pgqueue._slots(queue, group_key) as s where s.holder is not null) < group_limit
    then
        return false;
    end if;
    update pgqueue.job as j set turn = 'infinity' where j.id = job_id and j.lease_expires_at is null;
    return true;
end;
$$;

comment on function pgqueue._park_job(text, text, int, bigint) is
'Takes a locked job of a full group out of its lane; false where it is not
certain that the group is full.';

create or replace function pgqueue._admit(
    queue text, kinds text[], picks tid[], moment timestamptz, inout barred text[], out jobs tid[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    ticket record;
    next record;
    admitted tid;
begin
    jobs := '{}';
    for ticket in
        select j.id, j.turn, j.group_key, j.kind, s.group_limit
        from unnest(picks) with ordinality as p (tid, nth)
        join pgqueue.job as j on j.ctid = p.tid
        cross join lateral pgqueue._settings(_admit.queue, j.kind, j.group_key) as s
        order by p.nth
    loop
        continue when ticket.group_key = any (barred);
        next := null;
        if ticket.group_limit is not null then
            next := pgqueue._job_to_run(queue, ticket.group_key, ticket.group_limit, moment);
            if next.place is null then
                if not pgqueue._park_job(queue, ticket.group_key, ticket.group_limit, ticket.id) then
                    perform pgqueue._make_slots(queue, array[ticket.group_key]);
                    barred := barred || ticket.group_key;
                end if;
                continue;
            elsif (next.job).id is null or (next.job).kind <> all (kinds) then
                barred := barred || ticket.group_key;
                continue;
            end if;
            update pgqueue.slot as s
            set job_id = (next.job).id
            where hashtext(s.queue) = hashtext(_admit.queue)
                and hashtext(s.group_key) = hashtext(ticket.group_key)
                and s.queue = _admit.queue and s.group_key = ticket.group_key and s.place = next.place;
        end if;
        update pgqueue.job as j
        set lease_expires_at = 'infinity',
            slot = next.place,
            turn = case when j.turn = 'infinity' then ticket.turn else j.turn end
        where j.id = coalesce((next.job).id, ticket.id) and j.lease_expires_at is null
        returning j.ctid into admitted;
        jobs := jobs || admitted;
    end loop;
end;
$$;

comment on function pgqueue._admit(text, text[], tid[], timestamptz, text[]) is
'Of the jobs that were picked, each in the name of its group: those that may
run, with their slots. Parks where a group is full, and returns, as barred, the
groups that this claim can serve no more.';

create or replace function pgqueue._pick_round(
    queue text, kinds text[], lane int, wanted int, moment timestamptz, is_whole boolean
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    picks tid[];
    next record;
    barred text[];
    jobs tid[] := '{}';
begin
    if not pgqueue._has_limits(queue) then
        return pgqueue._pick(queue, kinds, lane, wanted, moment, is_whole);
    end if;
    perform pgqueue._heed_recalls(queue, moment);
    loop
        picks := pgqueue._pick(queue, kinds, lane, wanted - cardinality(jobs), moment, is_whole, barred);
        exit when picks = '{}';
        next := pgqueue._admit(queue, kinds, picks, moment, barred);
        barred := next.barred;
        jobs := jobs || next.jobs;
        exit when cardinality(jobs) = wanted;
    end loop;
    return jobs;
end;
$$;

comment on function pgqueue._pick_round(text, text[], int, int, timestamptz, boolean) is
'_pick in the round of a lane, for as many jobs as the limits of their groups
allow.';

create or replace function pgqueue._recall(queues text[], group_keys text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    freed record;
    is_locked boolean;
    job pgqueue.job;
begin
    for freed in
        select distinct u.queue, u.group_key
        from unnest(queues, group_keys) as u (queue, group_key)
        where u.group_key is not null
    loop
        is_locked := pgqueue._lock_slot(freed.queue, freed.group_key, 1);
        if not is_locked then
            insert into pgqueue.recall (queue, group_key) values (freed.queue, freed.group_key);
        end if;
        continue when is_locked is not true;
        job := pgqueue._first_job(freed.queue, freed.group_key, clock_timestamp(), true);
        continue when job.id is null;
        update pgqueue.job as j
        set turn = pgqueue._turn(freed.queue, job.priority + 1000) + interval '100 microseconds'
        where j.id = job.id;
        perform pgqueue._list_lane(freed.queue, job.priority, true);
        perform pgqueue._wake(freed.queue);
    end loop;
end;
$$;

comment on function pgqueue._recall(text[], text[]) is
'For attempts that have ended: puts the first parked job of each of their groups
back into its lane.';

create or replace function pgqueue._heed_recalls(queue text, moment timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
as $$
declare
    notes record;
begin
    if pg_relation_size('pgqueue.recall') = 0 then
        return;
    end if;
    with noted as (
        delete from pgqueue.recall as r
        where r.ctid = any (array(
            select n.ctid
            from pgqueue.recall as n
            where hashtext(n.queue) = hashtext(_heed_recalls.queue) and n.queue = _heed_recalls.queue
            limit 100
            for update skip locked
        ))
        returning r.queue, r.group_key
    )
    select array_agg(n.queue) as queues, array_agg(n.group_key) as group_keys into notes from noted as n;
    if notes.queues is not null then
        perform pgqueue._recall(notes.queues, notes.group_keys);
    end if;
end;
$$;

comment on function pgqueue._heed_recalls(text, timestamptz) is
'Does what ends of attempts could not do at once.';

create or replace function pgqueue._recall_for(picks tid[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_tidscan = on
as $$
begin
    perform pgqueue._recall(g.queues, g.group_keys)
    from (
        select array_agg(j.queue) as queues, array_agg(j.group_key) as group_keys
        from pgqueue.job as j
        where j.ctid = any (picks) and j.group_key is not null
    ) as g
    where g.queues is not null;
end;
$$;

comment on function pgqueue._recall_for(tid[]) is '_recall, for some locked jobs.';
