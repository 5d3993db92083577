-- Permits: to run, or to begin, is what a job needs one for of each of its caps.
--
-- They are rows that persist, as many as the cap says. One to run is held while its job has the token of
-- the claim that took it, one to begin for the period after that: so nothing must be given back, whoever
-- ends an attempt and how. A claim locks a permit first, and asks only then whether it is free: so it
-- sees what others did with it before. What is locked is passed over: no claim waits. Two sessions that
-- do not see each other may make a permit twice; such copies are merged before one is taken.
--
-- A place may be taken while it and those held above it are together no more than the cap: so a cap
-- that was lowered holds while what runs beyond it ends, in whatever order.

create or replace function pgqueue._has_permit(
    queue text, kind text, group_key text, is_rate boolean, place int
)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
begin
    return exists (
        select
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_has_permit.queue)
            and hashtext(p.kind) = hashtext(_has_permit.kind)
            and hashtext(p.group_key) = hashtext(_has_permit.group_key)
            and p.is_rate = _has_permit.is_rate and p.place = _has_permit.place
            and p.queue = _has_permit.queue and p.kind = _has_permit.kind
            and p.group_key = _has_permit.group_key
    );
end;
$$;

comment on function pgqueue._has_permit(text, text, text, boolean, int) is
'Whether a cap has a permit of this place.';

create or replace function pgqueue._make_permits(queue text, kinds text[], group_keys text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = on
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    insert into pgqueue.permit (place, is_rate, queue, kind, group_key)
    select p.place, c.is_rate, _make_permits.queue, c.kind, c.group_key
    from pgqueue._caps(queue, kinds, group_keys) as c
    left join (select g.key, count(*) as jobs from unnest(group_keys) as g (key) group by g.key) as n
        on n.key = c.group_key
    cross join lateral (
        select coalesce(max(m.place), 0)
        from pgqueue.permit as m
        where hashtext(m.queue) = hashtext(_make_permits.queue) and hashtext(m.kind) = hashtext(c.kind)
            and hashtext(m.group_key) = hashtext(c.group_key) and m.is_rate = c.is_rate
            and m.queue = _make_permits.queue and m.kind = c.kind and m.group_key = c.group_key
    ) as made (places)
    -- For a group no more than it has jobs, because groups may be many.
    cross join lateral generate_series(
        made.places + 1, least(c.most, made.places + coalesce(n.jobs, c.most))
    ) as p (place);
end;
$$;

comment on function pgqueue._make_permits(text, text[], text[]) is
'Makes the permits that a queue and some of its kinds lack, and for some groups
one more for each time that one is named, up to their rates. Other sessions see
them from the commit on.';

create or replace function pgqueue._permits(
    queue text, kind text, group_key text, is_rate boolean, most int, period interval, moment timestamptz
)
    returns table (place int, copies tid[], is_held boolean, free_at timestamptz, is_usable boolean)
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
    select
        p.*,
        not p.is_held and p.place + count(*) filter (where p.is_held) over (order by p.place desc) <= most
    from (
        select
            s.place, array_agg(s.ctid), bool_or(h.is_held), max(h.free_at) filter (where h.is_held)
        from pgqueue.permit as s
        left join pgqueue.job as j on j.id = s.job_id and j.token = s.token and not s.is_rate
        cross join lateral (
            select
                -- A time of another clock is none.
                case when s.is_rate
                    then coalesce(s.taken_at > moment - period and s.taken_at <= clock_timestamp() + period, false)
                    else j.id is not null
                end,
                case when s.is_rate then s.taken_at + period else j.lease_expires_at end
        ) as h (is_held, free_at)
        where hashtext(s.queue) = hashtext(_permits.queue) and hashtext(s.kind) = hashtext(_permits.kind)
            and hashtext(s.group_key) = hashtext(_permits.group_key) and s.is_rate = _permits.is_rate
            and s.queue = _permits.queue and s.kind = _permits.kind and s.group_key = _permits.group_key
        group by s.place
    ) as p (place, copies, is_held, free_at);
end;
$$;

comment on function pgqueue._permits(text, text, text, boolean, int, interval, timestamptz) is
'The permits of a cap, with all their copies: which are held, until when at the
latest (the end of the lease, or of the period), and which may be taken.';

create or replace function pgqueue._last_place(
    queue text, kind text, group_key text, is_rate boolean, most int, period interval, moment timestamptz
)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
begin
    if not exists (
        select
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_last_place.queue)
            and hashtext(p.kind) = hashtext(_last_place.kind)
            and hashtext(p.group_key) = hashtext(_last_place.group_key)
            and p.is_rate = _last_place.is_rate and p.place > most
            and p.queue = _last_place.queue and p.kind = _last_place.kind
            and p.group_key = _last_place.group_key
    ) then
        return most;
    end if;
    return coalesce(
        (
            select max(p.place)
            from pgqueue._permits(queue, kind, group_key, is_rate, most, period, moment) as p
            where p.is_usable
        ),
        0
    );
end;
$$;

comment on function pgqueue._last_place(
    text, text, text, boolean, int, interval, timestamptz
) is
'Up to which place the free permits of a cap may be taken: all, unless it was
lowered.';

create or replace function pgqueue._count_free(
    queue text, kind text, group_key text, is_rate boolean, most int, period interval,
    moment timestamptz, wanted int
)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    last_place int := pgqueue._last_place(queue, kind, group_key, is_rate, most, period, moment);
begin
    return (
        select count(*)
        from (
            select
            from pgqueue.permit as p
            where hashtext(p.queue) = hashtext(_count_free.queue)
                and hashtext(p.kind) = hashtext(_count_free.kind)
                and hashtext(p.group_key) = hashtext(_count_free.group_key)
                and p.is_rate = _count_free.is_rate and p.place <= last_place
                and p.queue = _count_free.queue and p.kind = _count_free.kind
                and p.group_key = _count_free.group_key
                -- A time of another clock is none.
                and (p.is_rate and p.taken_at > moment - period and p.taken_at <= clock_timestamp() + period) is not true
                and (p.is_rate or not exists (
                    select from pgqueue.job as j where j.id = p.job_id and j.token = p.token
                ))
            limit wanted
        ) as free
    );
end;
$$;

comment on function pgqueue._count_free(
    text, text, text, boolean, int, interval, timestamptz, int
) is
'How many permits of a cap look free; no more than wanted.';

create or replace function pgqueue._lock_permits(
    queue text, kinds text[], group_keys text[], are_rates boolean[], mosts int[], periods interval[],
    wanted int[], moment timestamptz, out caps int[], out permits tid[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    doubles int[];
begin
    select array_agg(c.nth), array_agg(l.tid) into caps, permits
    from unnest(kinds, group_keys, are_rates, mosts, periods, wanted) with ordinality
        as c (kind, group_key, is_rate, most, period, wanted, nth)
    cross join lateral (
        select pgqueue._last_place(
            _lock_permits.queue, c.kind, c.group_key, c.is_rate, c.most, c.period, moment
        )
        offset 0
    ) as u (last_place)
    cross join lateral (
        select p.ctid as tid
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_lock_permits.queue) and hashtext(p.kind) = hashtext(c.kind)
            and hashtext(p.group_key) = hashtext(c.group_key) and p.is_rate = c.is_rate
            and p.place <= u.last_place
            and p.queue = _lock_permits.queue and p.kind = c.kind and p.group_key = c.group_key
            and (p.is_rate and p.taken_at > moment - c.period and p.taken_at <= clock_timestamp() + c.period) is not true
            and (p.is_rate or not exists (
                select from pgqueue.job as j where j.id = p.job_id and j.token = p.token
            ))
        limit c.wanted
        for update of p skip locked
    ) as l;
    -- Now that nobody else can take them.
    select
        array_agg(l.cap) filter (where not d.is_double),
        array_agg(l.tid) filter (where not d.is_double),
        array_agg(distinct l.cap) filter (where d.is_double)
    into caps, permits, doubles
    from unnest(caps, permits) as l (cap, tid)
    join pgqueue.permit as p on p.ctid = l.tid
    cross join lateral (
        select exists (
            select
            from pgqueue.permit as o
            where hashtext(o.queue) = hashtext(p.queue) and hashtext(o.kind) = hashtext(p.kind)
                and hashtext(o.group_key) = hashtext(p.group_key)
                and o.is_rate = p.is_rate and o.place = p.place
                and o.queue = p.queue and o.kind = p.kind and o.group_key = p.group_key
                and o.ctid <> p.ctid
        )
    ) as d (is_double)
    where (p.is_rate and p.taken_at > moment - periods[l.cap] and p.taken_at <= clock_timestamp() + periods[l.cap]) is not true
        and (p.is_rate or not exists (
            select from pgqueue.job as j where j.id = p.job_id and j.token = p.token
        ));
    perform pgqueue._merge_permits(queue, kinds[d.cap], group_keys[d.cap], are_rates[d.cap])
    from unnest(doubles) as d (cap);
end;
$$;

comment on function pgqueue._lock_permits(
    text, text[], text[], boolean[], int[], interval[], int[], timestamptz
) is
'Locks free permits of some caps, up to so many of each; returns where they are,
each with the number of its cap.';

create or replace function pgqueue._merge_permits(
    queue text, kind text, group_key text, is_rate boolean
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_indexscan = on
    set enable_tidscan = on
as $$
declare
    locked tid[] := array(
        select p.ctid
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_merge_permits.queue)
            and p.queue = _merge_permits.queue and p.kind = _merge_permits.kind
            and p.group_key = _merge_permits.group_key and p.is_rate = _merge_permits.is_rate
        for update skip locked
    );
begin
    -- The last that was taken stays; where others have a copy locked, all stay.
    delete from pgqueue.permit as p
    where p.ctid = any (array(
        select c.ctid
        from (
            select
                o.ctid,
                row_number() over (partition by o.place order by o.token desc nulls last, o.ctid) as nth,
                bool_and(o.ctid = any (locked)) over (partition by o.place) as is_locked
            from pgqueue.permit as o
            where hashtext(o.queue) = hashtext(_merge_permits.queue)
                and o.queue = _merge_permits.queue and o.kind = _merge_permits.kind
                and o.group_key = _merge_permits.group_key and o.is_rate = _merge_permits.is_rate
        ) as c
        where c.is_locked and c.nth > 1
    ));
end;
$$;

comment on function pgqueue._merge_permits(text, text, text, boolean) is
'Where two sessions have made the permits of a cap twice: drops all copies but
one, for the next claim.';

create or replace function pgqueue._drop_permits()
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    dropped bigint;
begin
    delete from pgqueue.permit as p
    where p.ctid = any (array(
        select i.ctid
        from pgqueue.permit as i
        where i.group_key <> '' and not exists (
                select
                from pgqueue.permit as o
                where hashtext(o.queue) = hashtext(i.queue) and hashtext(o.kind) = hashtext(i.kind)
                    and hashtext(o.group_key) = hashtext(i.group_key)
                    and o.queue = i.queue and o.kind = i.kind and o.group_key = i.group_key
                    and o.taken_at > clock_timestamp() - interval '1 day'
            )
            and not exists (
                select
                from pgqueue.job as j
                where hashtext(j.queue) = hashtext(i.queue) and hashtext(j.group_key) = hashtext(i.group_key)
                    and j.queue = i.queue and j.group_key = i.group_key
            )
        order by i.place desc
        limit 10000
        for update skip locked
    ));
    get diagnostics dropped = row_count;
    return dropped;
end;
$$;

comment on function pgqueue._drop_permits() is
'Drops up to 10,000 permits of groups that have had no job for a day; returns how
many.';
