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
    from unnest(pgqueue._caps(queue, kinds) || pgqueue._group_rates(queue, group_keys)) as c
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
'Makes the permits that a queue and some of its kinds (null: all) lack, and for
some groups one more for each time that one is named, up to their rates. Other
sessions see them from the commit on.';

create or replace function pgqueue._make_permits_for(queue text, kinds text[], group_keys text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    if exists (
        select
        from pgqueue.queue as q
        where q.name in (_make_permits_for.queue, '')
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
            -- The others were made when they were set.
            and (q.name = '' or left(q.group_key, 1) > '')
    ) then
        perform pgqueue._make_permits(queue, kinds, group_keys);
    end if;
end;
$$;

comment on function pgqueue._make_permits_for(text, text[], text[]) is
'_make_permits for new jobs, where settings of all queues or of groups may ask
for it.';

create or replace function pgqueue._permits(queue text, cap pgqueue._cap, moment timestamptz)
    returns table (place int, is_held boolean, free_at timestamptz, is_usable boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    return query
    select
        p.place, p.is_held, case when p.is_held then p.free_at end,
        not p.is_held
            and p.place + count(*) filter (where p.is_held) over (order by p.place desc) <= cap.most
    from (
        select
            n.place,
            -- A time of another clock is none.
            case when cap.is_rate
                then coalesce(
                    l.taken_at > moment - cap.period and l.taken_at <= clock_timestamp() + cap.period, false
                )
                else j.id is not null
            end,
            case when cap.is_rate then l.taken_at + cap.period else j.lease_expires_at end
        from generate_series(1, (
            select max(p.place)
            from pgqueue.permit as p
            where hashtext(p.queue) = hashtext(_permits.queue) and hashtext(p.kind) = hashtext(cap.kind)
                and hashtext(p.group_key) = hashtext(cap.group_key) and p.is_rate = cap.is_rate
                and p.queue = _permits.queue and p.kind = cap.kind and p.group_key = cap.group_key
        )) as n (place)
        cross join lateral (
            select p.job_id, p.token, p.taken_at
            from pgqueue.permit as p
            where hashtext(p.queue) = hashtext(_permits.queue) and hashtext(p.kind) = hashtext(cap.kind)
                and hashtext(p.group_key) = hashtext(cap.group_key) and p.is_rate = cap.is_rate
                and p.place = n.place
                and p.queue = _permits.queue and p.kind = cap.kind and p.group_key = cap.group_key
            order by p.second desc nulls last
            limit 1
        ) as l
        left join pgqueue.job as j on j.id = l.job_id and j.token = l.token
    ) as p (place, is_held, free_at);
end;
$$;

comment on function pgqueue._permits(text, pgqueue._cap, timestamptz) is
'The permits of a cap: which are held, until when at the latest (the end of the
lease, or of the period), and which may be taken.';

create or replace function pgqueue._free_permits(
    queue text, caps pgqueue._cap[], wanted int, moment timestamptz
)
    returns table (nth int, kind text, group_key text, free int, last_place int, is_complete boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    return query
    select c.nth::int, c.kind, c.group_key, f.free::int, u.place, m.place >= c.most
    from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
    cross join lateral (
        select coalesce(max(p.place), 0)
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_free_permits.queue) and hashtext(p.kind) = hashtext(c.kind)
            and hashtext(p.group_key) = hashtext(c.group_key) and p.is_rate = c.is_rate
            and p.queue = _free_permits.queue and p.kind = c.kind and p.group_key = c.group_key
    ) as m (place)
    cross join lateral (
        -- All, unless the cap was lowered.
        select case when m.place <= c.most then m.place else coalesce(
            (
                select max(p.place)
                from pgqueue._permits(_free_permits.queue, caps[c.nth], moment) as p
                where p.is_usable
            ),
            0
        ) end
        offset 0
    ) as u (place)
    cross join lateral (
        select count(*)
        from (
            select
            from generate_series(1, u.place) as n (place)
            cross join lateral (
                select p.job_id, p.token, p.taken_at
                from pgqueue.permit as p
                where hashtext(p.queue) = hashtext(_free_permits.queue)
                    and hashtext(p.kind) = hashtext(c.kind) and hashtext(p.group_key) = hashtext(c.group_key)
                    and p.is_rate = c.is_rate and p.place = n.place
                    and p.queue = _free_permits.queue and p.kind = c.kind and p.group_key = c.group_key
                order by p.second desc nulls last
                limit 1
            ) as p
            -- A time of another clock is none. And offset 0, or Postgres 18 reads all jobs into a hash, by a plan
            -- from when they were few.
            where case when c.is_rate
                    then (p.taken_at > moment - c.period and p.taken_at <= clock_timestamp() + c.period) is not true
                    else not exists (select from pgqueue.job as j where j.id = p.job_id and j.token = p.token offset 0)
                end
            limit wanted
        ) as free
    ) as f (free);
end;
$$;

comment on function pgqueue._free_permits(text, pgqueue._cap[], int, timestamptz) is
'How many permits of each cap look free, no more than wanted; up to which place
they may be taken; and whether all that the cap allows are there.';

create or replace function pgqueue._lock_permits(
    queue text, caps pgqueue._cap[], last_places int[], demanded int[], moment timestamptz,
    out supplied int[], out permits tid[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_tidscan = on
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    doubles int[];
begin
    select array_agg(d.cap), array_agg(l.tid) into supplied, permits
    from (select u.cap, count(*) as wanted from unnest(demanded) as u (cap) group by u.cap) as d
    cross join lateral (select (caps[d.cap]).* offset 0) as c
    cross join lateral (
        select k.tid
        from generate_series(1, last_places[d.cap]) as n (place)
        cross join lateral (
            select p.ctid as tid, p.job_id, p.token, p.taken_at
            from pgqueue.permit as p
            where hashtext(p.queue) = hashtext(_lock_permits.queue) and hashtext(p.kind) = hashtext(c.kind)
                and hashtext(p.group_key) = hashtext(c.group_key) and p.is_rate = c.is_rate
                and p.place = n.place
                and p.queue = _lock_permits.queue and p.kind = c.kind and p.group_key = c.group_key
            order by p.second desc nulls last
            limit 1
        ) as p
        cross join lateral (
            select k.ctid as tid from pgqueue.permit as k where k.ctid = p.tid for update skip locked
        ) as k
        where case when c.is_rate
                then (p.taken_at > moment - c.period and p.taken_at <= clock_timestamp() + c.period) is not true
                else not exists (select from pgqueue.job as j where j.id = p.job_id and j.token = p.token offset 0)
            end
        limit d.wanted
    ) as l;
    -- Now that nobody else can take them.
    select
        array_agg(l.cap order by l.cap) filter (where not d.is_double),
        array_agg(l.tid order by l.cap) filter (where not d.is_double),
        array_agg(distinct l.cap) filter (where d.is_double)
    into supplied, permits, doubles
    from unnest(supplied, permits) as l (cap, tid)
    join pgqueue.permit as p on p.ctid = l.tid
    cross join lateral (
        -- One that a claim took was single then, and who makes another now finds it.
        select p.taken_at is null and exists (
            select
            from pgqueue.permit as o
            where hashtext(o.queue) = hashtext(p.queue) and hashtext(o.kind) = hashtext(p.kind)
                and hashtext(o.group_key) = hashtext(p.group_key)
                and o.is_rate = p.is_rate and o.place = p.place
                and o.queue = p.queue and o.kind = p.kind and o.group_key = p.group_key
                and o.ctid <> p.ctid
        )
        offset 0
    ) as d (is_double)
    where case when p.is_rate
            then (
                p.taken_at > moment - (caps[l.cap]).period
                and p.taken_at <= clock_timestamp() + (caps[l.cap]).period
            ) is not true
            else not exists (select from pgqueue.job as j where j.id = p.job_id and j.token = p.token offset 0)
        end;
    perform pgqueue._merge_permits(queue, caps[d.cap]) from unnest(doubles) as d (cap);
end;
$$;

comment on function pgqueue._lock_permits(text, pgqueue._cap[], int[], int[], timestamptz) is
'Locks free permits of some caps, of each as many as it is demanded, up to the
last place that may be taken; returns where they are, with the numbers of their
caps, in their order.';

create or replace function pgqueue._merge_permits(queue text, cap pgqueue._cap)
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
            and p.queue = _merge_permits.queue and p.kind = cap.kind
            and p.group_key = cap.group_key and p.is_rate = cap.is_rate
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
                and o.queue = _merge_permits.queue and o.kind = cap.kind
                and o.group_key = cap.group_key and o.is_rate = cap.is_rate
        ) as c
        where c.is_locked and c.nth > 1
    ));
end;
$$;

comment on function pgqueue._merge_permits(text, pgqueue._cap) is
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
