-- Parked jobs: what waits while its group is full stands in no claim's way.
--
-- A claim that meets a job of a full group parks it, out of the lane, and the end of an attempt puts a
-- parked one back. Both have the gate of the group locked, the row of slot with place 0, and look after
-- that: so either the claim sees that the attempt has ended, or the end sees the parked job. An end
-- that cannot have the lock at once leaves a note, a row in recall, for the next claim. So no job stays
-- parked while its group is free, and nobody waits.

create or replace function pgqueue._park_jobs(
    queue text, group_key text, group_limit int, priority int, ids bigint[]
)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_tidscan = on
as $$
begin
    if pgqueue._lock_slot(queue, group_key, 0) is not true or group_limit > (
        select count(*) from pgqueue._slots(queue, group_key) as s where s.holder is not null
    ) then
        return false;
    end if;
    -- With those that would be met next.
    update pgqueue.job as j
    set turn = 'infinity'
    where j.ctid = any (
        array(select t.ctid from pgqueue.job as t where t.id = any (ids) and t.lease_expires_at is null)
        || array(
            select t.ctid
            from pgqueue.job as t
            where hashtext(t.queue) = hashtext(_park_jobs.queue) and isfinite(t.turn)
                and hashtext(t.group_key) = hashtext(_park_jobs.group_key)
                and t.priority = _park_jobs.priority and t.turn < '1900-01-01 00:00 UTC'
                -- Not past what this claim has parked before.
                and t.turn >= (select min(m.turn) from pgqueue.job as m where m.id = any (ids))
                and t.queue = _park_jobs.queue and t.group_key = _park_jobs.group_key
                and t.lease_expires_at is null and t.slot is null
            order by t.turn
            limit 20
            for update skip locked
        )
    );
    return true;
end;
$$;

comment on function pgqueue._park_jobs(text, text, int, int, bigint[]) is
'Takes locked jobs of a full group, and some more, out of their lane; false
where it is not certain that the group is full.';

create or replace function pgqueue._recall(queues text[], group_keys text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    locked record;
    looked record;
    back record;
    moment timestamptz := clock_timestamp();
begin
    select array_agg(g.queue) as queues, array_agg(g.key) as keys into locked
    from (select distinct u.* from unnest(queues, group_keys) as u (queue, key)) as g
    cross join lateral (
        select
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(g.queue) and hashtext(s.group_key) = hashtext(g.key)
            and s.queue = g.queue and s.group_key = g.key and s.place = 0
        for update skip locked
    ) as s;
    with freed as materialized (
        select
            e.queue, e.key, sum(e.ends)::int as ends,
            sum(e.locked) = nullif((
                select count(*)
                from pgqueue.slot as s
                where hashtext(s.queue) = hashtext(e.queue) and hashtext(s.group_key) = hashtext(e.key)
                    and s.queue = e.queue and s.group_key = e.key and s.place = 0
            ), 0) as is_locked
        from (
            select u.queue, u.key, 1 as ends, 0 as locked from unnest(queues, group_keys) as u (queue, key)
            union all
            select l.queue, l.key, 0, 1 from unnest(locked.queues, locked.keys) as l (queue, key)
        ) as e
        group by e.queue, e.key
    ), noted as (
        insert into pgqueue.recall (queue, group_key)
        select f.queue, f.key
        from freed as f
        cross join lateral generate_series(1, f.ends)
        where not f.is_locked
    )
    select array_agg(p.tid) as tids, array_agg(f.queue) as queues, array_agg(p.priority) as priorities
    into looked
    from freed as f
    cross join lateral (
        select j.ctid as tid, j.priority
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(f.queue) and j.turn is not null and not isfinite(j.turn)
            and hashtext(j.group_key) = hashtext(f.key)
            and j.queue = f.queue and j.group_key = f.key and j.lease_expires_at is null
            and ((j.terms).expires_at <= moment) is not true
        order by j.priority desc, j.turn desc, j.run_at, j.id
        limit f.ends
        for update skip locked
    ) as p
    where f.is_locked;
    for back in
        select u.queue, u.priority, array_agg(u.tid) as tids
        from unnest(looked.queues, looked.priorities, looked.tids) as u (queue, priority, tid)
        group by u.queue, u.priority
    loop
        update pgqueue.job as j
        set turn = pgqueue._turn(back.queue, back.priority + 1000) + interval '100 microseconds'
        where j.ctid = any (back.tids);
        perform pgqueue._list_lane(back.queue, 1000 + back.priority);
        perform pgqueue._wake(back.queue);
    end loop;
end;
$$;

comment on function pgqueue._recall(text[], text[]) is
'For attempts that have ended, as many as a group is named: puts the first parked
jobs of their groups back into their lanes.';

create or replace function pgqueue._heed_recalls(queue text)
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

comment on function pgqueue._heed_recalls(text) is
'Does what ends of attempts could not do at once.';

create or replace function pgqueue._parked_groups(queue text, start int)
    returns setof text
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return query
    with recursive parked (hash, key) as (
        values (start - 1::bigint, null::text)
        union all
        select n.*
        from parked as p
        cross join lateral (
            select hashtext(j.group_key)::bigint, j.group_key
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_parked_groups.queue) and j.queue = _parked_groups.queue
                and j.turn is not null and not isfinite(j.turn)
                and hashtext(j.group_key) > greatest(p.hash, -2147483648)::int
            order by hashtext(j.group_key), j.priority desc, j.turn desc, j.run_at, j.id
            limit 1
        ) as n
    )
    select p.key from parked as p limit 101;
end;
$$;

comment on function pgqueue._parked_groups(text, int) is
'A hundred groups in which jobs are parked, from one of this hash on; first null.';

create or replace function pgqueue._mend_groups(queue text)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    keys text[] := array(
        select g.key from pgqueue._parked_groups(queue, -2147483648) as g (key) where g.key is not null
        union
        select g.key
        from pgqueue._parked_groups(queue, ((random() - 0.5) * 4294967295)::int) as g (key)
        where g.key is not null
    );
    free text[] := array(
        select g.key
        from unnest(keys, pgqueue._limits(queue, keys)) as g (key, most)
        where (
            select count(*)
            from pgqueue._slots(_mend_groups.queue, g.key) as s
            where s.is_running or s.holder_run_at > clock_timestamp()
        ) < coalesce(g.most, 1)
    );
begin
    if free = '{}' then
        return false;
    end if;
    perform pgqueue._recall(array_fill(queue, array[cardinality(free)]), free);
    return true;
end;
$$;

comment on function pgqueue._mend_groups(text) is
'Before a claim says that there is nothing: looks at a hundred or two of the
groups in which jobs are parked, whether one is not full, as when rows were
changed by hand; says whether it was so.';

create or replace function pgqueue._drop_slots()
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    dropped bigint;
begin
    delete from pgqueue.slot as s
    where s.ctid = any (array(
        select i.ctid
        from pgqueue.slot as i
        where not exists (
            select
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(i.queue) and hashtext(j.group_key) = hashtext(i.group_key)
                and j.queue = i.queue and j.group_key = i.group_key
        )
        limit 10000
        for update skip locked
    ));
    get diagnostics dropped = row_count;
    return dropped;
end;
$$;

comment on function pgqueue._drop_slots() is
'Drops up to 10,000 slots of groups that have no job any more; returns how many.';
