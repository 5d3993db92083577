-- Permits: to run, or to begin, is what a job needs one for of each of its caps.
--
-- They are rows that persist, made as they are needed, up to as many as the cap says. One to run is held
-- while its job has the token of the claim that took it, or keeps it for its retry; one to begin, for the
-- period after that: so nothing must be given back, whoever ends an attempt and how. A claim locks a
-- permit first, and asks only then whether it is free: so it sees what others did with it before. What is
-- locked is passed over: no claim waits. Two sessions that do not see each other may make a permit twice;
-- such copies are merged before one is taken, and nobody takes one that his own transaction made, because
-- no one else could see that.
--
-- A place may be taken while it and those held above it are together no more than the cap: so a cap
-- that was lowered holds while what runs beyond it ends, in whatever order.

create or replace function pgqueue._make_permits(queue text, caps pgqueue._cap[], wanted int[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    insert into pgqueue.permit (token, place, is_rate, queue, kind, group_key)
    select -pg_current_xact_id()::text::bigint, p.place, c.is_rate, _make_permits.queue, c.kind, c.group_key
    from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
    cross join lateral (
        select coalesce(max(m.place), 0)
        from pgqueue.permit as m
        where hashtext(m.queue) = hashtext(_make_permits.queue) and hashtext(m.kind) = hashtext(c.kind)
            and hashtext(m.group_key) = hashtext(c.group_key) and m.is_rate = c.is_rate
            and m.queue = _make_permits.queue and m.kind = c.kind and m.group_key = c.group_key
    ) as made (places)
    cross join lateral generate_series(
        made.places + 1, least(c.most, made.places + wanted[c.nth])
    ) as p (place);
end;
$$;

comment on function pgqueue._make_permits(text, pgqueue._cap[], int[]) is
'Makes more permits of each cap, as many as are wanted and it lacks. They can be
taken from the commit on.';

create or replace function pgqueue._permits(queue text, cap pgqueue._cap, moment timestamptz)
    returns table (place int, is_held boolean, free_at timestamptz, is_usable boolean, holder bigint)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
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
            and p.place + count(*) filter (where p.is_held) over (order by p.place desc) <= cap.most,
        p.holder
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
            case when cap.is_rate then l.taken_at + cap.period else coalesce(j.lease_expires_at, j.run_at) end,
            j.id
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
        left join pgqueue.job as j on j.id = l.job_id
            and case when cap.group_key = '' then j.token = l.token
                -- Kept for a retry that is due, it may be taken: see _lock_permits.
                else coalesce(j.token, j.kept_token) = l.token and (j.token is not null or j.run_at > moment)
            end
    ) as p (place, is_held, free_at, holder);
end;
$$;

comment on function pgqueue._permits(text, pgqueue._cap, timestamptz) is
'The permits of a cap: which are held, until when at the latest (the end of the
lease, or of the period), which may be taken, and which job has them.';

create or replace function pgqueue._free_permits(
    queue text, caps pgqueue._cap[], wanted int, moment timestamptz
)
    returns table (nth int, kind text, free int, is_complete boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    return query
    select c.nth::int, c.kind, f.free::int, m.place >= c.most
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
'How many permits of each cap of a queue or kind look free, no more than wanted;
and whether all that the cap allows are there.';

create or replace function pgqueue._is_double(permit pgqueue.permit)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    return 1 < (
        select count(*)
        from pgqueue.permit as o
        where hashtext(o.queue) = hashtext(permit.queue) and hashtext(o.kind) = hashtext(permit.kind)
            and hashtext(o.group_key) = hashtext(permit.group_key)
            and o.is_rate = permit.is_rate and o.place = permit.place
            and o.queue = permit.queue and o.kind = permit.kind and o.group_key = permit.group_key
    );
end;
$$;

comment on function pgqueue._is_double(pgqueue.permit) is 'Whether a permit was made twice.';

create or replace function pgqueue._lock_permits(
    queue text, caps pgqueue._cap[], wanted int[], new_token bigint, moment timestamptz, is_again boolean default false,
    out caps_of int[], out permits tid[], out are_made boolean[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    own_token bigint := -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0);
    doubles int[];
begin
    select
        array_agg(u.cap) filter (where l.tid is not null),
        array_agg(l.tid) filter (where l.tid is not null),
        array_agg(distinct u.cap) filter (where u.is_made)
    into caps_of, permits, doubles
    from (
        select c.*, m.place >= c.most as is_made, w.jobs, s.place, date_part('microseconds', clock_timestamp())::int % nullif(s.place, 0) as start
        from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, cap)
        join unnest(wanted) with ordinality as w (jobs, cap) on w.cap = c.cap
        cross join lateral (
            select coalesce(
                (
                    select p.place
                    from pgqueue.permit as p
                    where hashtext(p.queue) = hashtext(_lock_permits.queue) and hashtext(p.kind) = hashtext(c.kind)
                        and hashtext(p.group_key) = hashtext(c.group_key) and p.is_rate = c.is_rate
                        and p.queue = _lock_permits.queue and p.kind = c.kind and p.group_key = c.group_key
                        and p.token is distinct from own_token
                    order by p.place desc
                    limit 1
                ),
                0
            )
        ) as m (place)
        cross join lateral (
            -- All, unless the cap was lowered.
            select case when m.place <= c.most then m.place else coalesce(
                (
                    select max(p.place)
                    from pgqueue._permits(_lock_permits.queue, caps[c.cap], moment) as p
                    where p.is_usable
                ),
                0
            ) end
            offset 0
        ) as s (place)
        offset 0
    ) as u
    left join lateral (
        select k.tid
        from generate_series(u.start, u.start + u.place - 1) as n (nth)
        cross join lateral (
            select p.ctid as tid, p.job_id, p.token, p.taken_at
            from pgqueue.permit as p
            where hashtext(p.queue) = hashtext(_lock_permits.queue) and hashtext(p.kind) = hashtext(u.kind)
                and hashtext(p.group_key) = hashtext(u.group_key) and p.is_rate = u.is_rate
                and p.place = n.nth % u.place + 1
                and p.queue = _lock_permits.queue and p.kind = u.kind and p.group_key = u.group_key
            order by p.second desc nulls last
            limit 1
        ) as p
        cross join lateral (
            select k.ctid as tid from pgqueue.permit as k where k.ctid = p.tid for update skip locked
        ) as k
        -- A time of another clock is none. And offset 0, or Postgres 18 reads all jobs into a hash, by a plan
        -- from when they were few.
        where case when u.is_rate
                then (p.taken_at > moment - u.period and p.taken_at <= clock_timestamp() + u.period) is not true
                else (new_token is null or p.token is distinct from new_token) and not exists (
                    select from pgqueue.job as j
                    where j.id = p.job_id and case when u.group_key = '' then j.token = p.token
                        -- Kept for a retry that is due, it is that job's.
                        else coalesce(j.token, j.kept_token) = p.token and (j.token is not null or j.run_at > moment)
                    end
                    offset 0
                )
            end
        limit u.jobs
    ) as l on u.jobs > 0;
    are_made := array(
        select coalesce(u.cap = any (doubles), false) from generate_series(1, cardinality(caps)) as u (cap)
        order by u.cap
    );
    -- Now that nobody else can take them.
    select
        array_agg(l.cap order by l.cap) filter (where not d.is_double),
        array_agg(l.tid order by l.cap) filter (where not d.is_double),
        array_agg(distinct l.cap) filter (where d.is_double)
    into caps_of, permits, doubles
    from unnest(caps_of, permits) as l (cap, tid)
    join pgqueue.permit as p on p.ctid = l.tid
    cross join lateral (
        select
            -- One that a claim took was single then, and who makes another now finds it.
            p.taken_at is null and pgqueue._is_double(p) as is_double
        offset 0
    ) as d
    where p.token is distinct from own_token and case when p.is_rate
            then (
                p.taken_at > moment - (caps[l.cap]).period
                and p.taken_at <= clock_timestamp() + (caps[l.cap]).period
            ) is not true
            else not exists (
                select from pgqueue.job as j
                where j.id = p.job_id and case when p.group_key = '' then j.token = p.token
                    else coalesce(j.token, j.kept_token) = p.token and (j.token is not null or j.run_at > moment)
                end
                offset 0
            )
        end;
    if doubles is not null and not is_again then
        perform pgqueue._merge_permits(queue, caps[d.cap]) from unnest(doubles) as d (cap);
        select l.* into caps_of, permits, are_made
        from pgqueue._lock_permits(queue, caps, wanted, new_token, moment, true) as l;
    end if;
end;
$$;

comment on function pgqueue._lock_permits(text, pgqueue._cap[], int[], bigint, timestamptz, boolean) is
'Locks free permits of some caps, of each as many as are wanted, without those
that the claim of this token took; returns where they are, in the order of the
caps; and of which caps all that it allows are there. Plans as _pick_groups and
_pick_capped set it.';

create or replace function pgqueue._merge_permits(queue text, cap pgqueue._cap)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    locked tid[] := array(
        select p.ctid
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_merge_permits.queue) and hashtext(p.kind) = hashtext(cap.kind)
            and hashtext(p.group_key) = hashtext(cap.group_key) and p.is_rate = cap.is_rate
            and p.queue = _merge_permits.queue and p.kind = cap.kind and p.group_key = cap.group_key
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
                row_number() over (partition by o.place order by o.taken_at desc nulls last, o.ctid) as nth,
                bool_and(o.ctid = any (locked)) over (partition by o.place) as is_locked
            from pgqueue.permit as o
            where hashtext(o.queue) = hashtext(_merge_permits.queue) and hashtext(o.kind) = hashtext(cap.kind)
                and hashtext(o.group_key) = hashtext(cap.group_key) and o.is_rate = cap.is_rate
                and o.queue = _merge_permits.queue and o.kind = cap.kind and o.group_key = cap.group_key
        ) as c
        where c.is_locked and c.nth > 1
    ));
end;
$$;

comment on function pgqueue._merge_permits(text, pgqueue._cap) is
'Where two sessions have made the permits of a cap twice: drops all copies but
one.';

create or replace function pgqueue._give_permits(permits tid[], job_ids bigint[], new_token bigint, moment timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    update pgqueue.permit as p
    set job_id = g.job_id, token = new_token, taken_at = moment,
        second = extract(epoch from moment - timestamptz '2020-01-01 00:00 UTC')::int
    from unnest(permits, job_ids) as g (tid, job_id)
    where p.ctid = g.tid;
end;
$$;

comment on function pgqueue._give_permits(tid[], bigint[], bigint, timestamptz) is
'Hands locked permits to jobs that a claim takes. Plans as its callers set it.';

create or replace function pgqueue._count_running(queue text, cap pgqueue._cap)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_indexscan = on
as $$
begin
    with known as (
        select p.place, p.job_id, p.token
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_count_running.queue) and hashtext(p.kind) = hashtext(cap.kind)
            and hashtext(p.group_key) = hashtext(cap.group_key) and not p.is_rate
            and p.queue = _count_running.queue and p.kind = cap.kind and p.group_key = cap.group_key
    )
    insert into pgqueue.permit (place, is_rate, job_id, token, taken_at, queue, kind, group_key)
    select
        (select coalesce(max(k.place), 0) from known as k) + row_number() over (order by j.id),
        -- Without a time, because no claim has looked whether it is single.
        false, j.id, j.token, null, j.queue, cap.kind, cap.group_key
    from pgqueue.job as j
    where hashtext(j.queue) = hashtext(_count_running.queue) and j.queue = _count_running.queue
        and cap.kind in ('', j.kind) and (cap.group_key = '' or j.group_key = cap.group_key)
        and j.lease_expires_at is not null
        and not exists (select from known as k where k.job_id = j.id and k.token = j.token);
end;
$$;

comment on function pgqueue._count_running(text, pgqueue._cap) is
'Gives permits, behind those that there are, to the jobs of a queue, kind or
group that run from a time when it had no such cap, also beyond the cap.';

create or replace function pgqueue._drop_permits()
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    idle record;
    locked tid[];
    dropped bigint;
begin
    select array_agg(i.queue) as queues, array_agg(i.group_key) as keys into idle
    from (
        select p.queue, p.group_key
        from pgqueue.permit as p
        where p.group_key <> ''
        group by p.queue, p.group_key
        having (max(p.taken_at) > clock_timestamp() - interval '1 day') is not true
            and not exists (
                select
                from pgqueue.job as j
                where hashtextextended(j.group_key, hashtext(j.queue)) = hashtextextended(p.group_key, hashtext(p.queue))
                    and j.queue = p.queue and j.group_key = p.group_key
            )
        limit 1000
    ) as i;
    locked := array(
        select p.ctid
        from unnest(idle.queues, idle.keys) as i (queue, key)
        join pgqueue.permit as p on hashtext(p.queue) = hashtext(i.queue) and hashtext(p.kind) = hashtext('')
            and hashtext(p.group_key) = hashtext(i.key) and p.queue = i.queue and p.group_key = i.key
        for update of p skip locked
    );
    -- All of a group or none: places without gaps are what more are made behind.
    delete from pgqueue.permit as p
    where p.ctid = any (array(
        select c.tid
        from (
            select
                p.ctid as tid,
                bool_and(p.ctid = any (locked) and (p.taken_at > clock_timestamp() - interval '1 day') is not true)
                    over (partition by p.queue, p.group_key) as is_idle
            from unnest(idle.queues, idle.keys) as i (queue, key)
            join pgqueue.permit as p on hashtext(p.queue) = hashtext(i.queue) and hashtext(p.kind) = hashtext('')
                and hashtext(p.group_key) = hashtext(i.key) and p.queue = i.queue and p.group_key = i.key
        ) as c
        where c.is_idle
    ));
    get diagnostics dropped = row_count;
    return dropped;
end;
$$;

comment on function pgqueue._drop_permits() is
'Drops the permits of up to 1000 groups that have had no job for a day; returns
how many.';
