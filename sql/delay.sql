-- Delays: what waits for the rate of its group stands in no claim's way.
--
-- The jobs of a group that has used up its rate get turns in the time to come, when permits will be free,
-- so that rest knows when the next is due. The claim that meets one then gives it a turn in the round.

create or replace function pgqueue._delays(
    free_ats timestamptz[], period interval, last timestamptz, wanted int
)
    returns timestamptz[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
declare
    most int := cardinality(free_ats);
    periods int := coalesce(floor(
        extract(epoch from last - free_ats[1]) / extract(epoch from period)
    ), 0);
    taken int := most * periods + (
        select count(*) from unnest(free_ats) as f (at) where f.at <= last - periods * period
    );
begin
    return array(
        select free_ats[n % most + 1] + n / most * period
        from generate_series(taken, taken + wanted - 1) as n
        order by n
    );
end;
$$;

comment on function pgqueue._delays(timestamptz[], interval, timestamptz, int) is
'So many times, after the last that has been given, at which permits will be
free, if from these times on each is taken again at once whenever its period is
over.';

create or replace function pgqueue._delay_group(
    queue text, cap pgqueue._cap, job_ids bigint[], moment timestamptz
)
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
    free_ats timestamptz[];
    lane record;
    first timestamptz[];
    last timestamptz;
    next tid[];
begin
    -- Where one is free, others have just locked it. No two at the same time: so the last that was
    -- given says how many were.
    free_ats := array(
        select f.at + row_number() over (order by f.at) * interval '1 microsecond'
        from (
            select greatest(p.free_at, moment + interval '10 milliseconds') as at
            from pgqueue._permits(queue, cap, moment) as p
            order by 1 desc
            limit cap.most
        ) as f
        order by f.at
    );
    if cardinality(free_ats) < cap.most then
        -- Those that it lacks are for the next claim.
        perform pgqueue._make_permits(
            queue, '{}'::text[], array_fill(cap.group_key, array[cardinality(job_ids)])
        );
        return;
    end if;
    for lane in
        select j.priority, array_agg(j.id order by j.run_at, j.id) as ids
        from pgqueue.job as j
        where j.id = any (job_ids) and j.group_key = cap.group_key
        group by j.priority
        order by j.priority desc
    loop
        first := pgqueue._delays(free_ats, cap.period, null, cardinality(lane.ids));
        last := (
            select d.turn
            from pgqueue.job as d
            where hashtext(d.queue) = hashtext(_delay_group.queue) and isfinite(d.turn)
                and hashtext(d.group_key) = hashtext(cap.group_key)
                and d.priority = lane.priority and d.turn between moment and '9998-12-31 00:00 UTC'
                and d.queue = _delay_group.queue and d.group_key = cap.group_key
            order by d.turn desc
            limit 1
        );
        next := array(
            select j.ctid
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_delay_group.queue) and isfinite(j.turn)
                and hashtext(j.group_key) = hashtext(cap.group_key)
                and j.priority = lane.priority and j.turn < '1900-01-01 00:00 UTC'
                and j.queue = _delay_group.queue and j.group_key = cap.group_key
                and j.lease_expires_at is null and j.id <> all (lane.ids)
            order by j.turn
            limit 100
            for update skip locked
        );
        update pgqueue.job as j
        set turn = d.at
        from unnest(
            array(
                select t.ctid from pgqueue.job as t
                where t.id = any (lane.ids) and t.lease_expires_at is null
                order by t.run_at, t.id
            ),
            first
        ) as d (tid, at)
        where j.ctid = d.tid;
        -- Those that come next stand behind all that wait already.
        update pgqueue.job as j
        set turn = d.at
        from unnest(next, pgqueue._delays(
            free_ats, cap.period, greatest(last, first[cardinality(first)]), cardinality(next)
        )) as d (tid, at)
        where j.ctid = d.tid;
    end loop;
end;
$$;

comment on function pgqueue._delay_group(text, pgqueue._cap, bigint[], timestamptz) is
'For a group that has used up its rate: gives its refused jobs, and up to a
hundred more of each of their lanes, turns in the time to come.';

create or replace function pgqueue._hasten(queue text, moment timestamptz)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    delayed record;
    early text[];
begin
    if not pgqueue._has_group_rates(queue) then
        return false;
    end if;
    select array_agg(d.tid) as tids, array_agg(d.group_key) as group_keys into delayed
    from pgqueue._live_lanes(queue) as l
    cross join lateral (
        select j.ctid as tid, j.group_key, j.turn
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(_hasten.queue) and j.queue = _hasten.queue
            and j.priority = l.priority and coalesce(j.turn, j.run_at) > moment
            and j.lease_expires_at is null
        order by coalesce(j.turn, j.run_at), j.id
        limit 100
    ) as d
    where d.turn < 'infinity';
    early := array(
        select f.group_key
        from pgqueue._free_permits(queue, pgqueue._group_rates(queue, delayed.group_keys), 1, moment) as f
        where f.free > 0
    );
    update pgqueue.job as j
    set turn = null
    where j.ctid = any (array(
        select t.ctid
        from pgqueue.job as t
        where t.ctid = any (delayed.tids) and t.group_key = any (early) and t.lease_expires_at is null
        for update skip locked
    ));
    return found;
end;
$$;

comment on function pgqueue._hasten(text, timestamptz) is
'Before a claim says that there is nothing: looks at the next hundred delayed
jobs of each lane, whether their groups may begin one after all, as when those
before them were cancelled; says whether it was so.';
