-- Permits: a job needs one permit of each of its caps, to run (max_running, group_limit) or to begin (a rate).
--
-- They are persistent rows, created as needed, at most as many as the cap allows. free_at says when one may be
-- taken: for a rate when its period is over, otherwise not while it is held. A claim takes a permit by locking it;
-- the locked row is current, whatever the snapshot. So an index look-up is enough: it tries the permit that was
-- returned last first, and skips those that other sessions have locked. No claim waits.
--
-- The end of an attempt returns its permits, unless another session has them locked: no end waits either. Such a
-- permit is then still held by a job that is gone. A claim that finds a cap full checks whether the holders of
-- some of its permits still run; the sweep, which goes through the pages of the table, finds the others.
--
-- Two sessions that do not see each other may create the same permit twice. So no transaction takes a permit that
-- it created itself, which nobody else can see, and copies of a permit that was never taken are merged first.
--
-- When a cap is lowered, the held permits move to the lowest places. Those still held beyond the cap are a
-- surplus; while there is any, no permit of that cap is taken.
--
-- When a cap is set, the running jobs get permits. So do the jobs that other sessions have locked at that
-- moment, with the token -1: they may be claiming them. Such a job keeps its permit if it turns out to run.

-- Creates permits for each cap, as many as wanted, unless it has enough already (enough null: as many as wanted),
-- but never more than the cap allows. Returns the groups that got any. They can be taken once this has committed.
create or replace function pgqueue._make_permits(queue text, caps pgqueue._cap[], wanted int[], enough int default null)
    returns text[]
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
as $$
declare
    lacking text[];
begin
    with made as (
        insert into pgqueue.permit (free_at, token, place, is_rate, queue, kind, group_key)
        select
            '-infinity', -pg_current_xact_id()::text::bigint, p.place, c.is_rate,
            _make_permits.queue, c.kind, c.group_key
        from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
        cross join lateral (
            select count(*) as permits, coalesce(max(o.place), 0) as last_place
            from (
                select p.place
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _make_permits.queue, c.kind, c.group_key) and p.is_rate = c.is_rate
                limit coalesce(enough, wanted[c.nth])
            ) as o
        ) as made
        -- There are gaps if the cap was raised while maintain dropped the permits.
        cross join lateral generate_series(
            case when made.permits < made.last_place then 1 else made.last_place + 1 end,
            least(c.most, made.last_place + wanted[c.nth])
        ) as p (place)
        -- Otherwise the count stopped early, and the last place may be higher.
        where made.permits < coalesce(enough, wanted[c.nth]) and (made.permits >= made.last_place or not exists (
            select
            from pgqueue.permit as o
            where pgqueue._is_permit_of(o, _make_permits.queue, c.kind, c.group_key)
                and o.is_rate = c.is_rate and o.place = p.place
        ))
        returning permit.group_key
    )
    select array_agg(distinct m.group_key) into lacking from made as m;
    return lacking;
end;
$$;

-- Whether a permit was created twice. Relies on the planner settings of its callers.
create or replace function pgqueue._is_double(permit pgqueue.permit)
    returns boolean
    language plpgsql
as $$
begin
    return 1 < (
        select count(*)
        from pgqueue.permit as o
        where pgqueue._is_permit_of(o, permit.queue, permit.kind, permit.group_key)
            and o.is_rate = permit.is_rate and o.place = permit.place
    );
end;
$$;

-- Whether any cap of a queue has a surplus. Hot paths first check whether there has ever been one.
create or replace function pgqueue._any_surplus(queue text)
    returns boolean
    language plpgsql
as $$
begin
    return exists (
        select
        from pgqueue.permit as s
        where hashtext(s.queue) = hashtext(_any_surplus.queue collate "default")
            and s.queue = _any_surplus.queue and s.is_surplus
    );
end;
$$;

-- Whether more jobs of a queue, kind or group run than its cap allows. Relies on its callers' planner settings.
create or replace function pgqueue._has_surplus(queue text, kind text, group_key text)
    returns boolean
    language plpgsql
as $$
begin
    return exists (
        select
        from pgqueue.permit as s
        where hashtext(s.queue) = hashtext(_has_surplus.queue collate "default")
            and pgqueue._is_permit_of(s, _has_surplus.queue, _has_surplus.kind, _has_surplus.group_key)
            and s.is_surplus
    );
end;
$$;

-- Drops all copies but one of permits that two sessions have both created; returns how many.
create or replace function pgqueue._merge_permits(queue text, kind text, group_keys text[])
    returns int
    language plpgsql
as $$
declare
    locked tid[] := array(
        select p.tid
        from unnest(group_keys) as g (key)
        cross join lateral (
            select p.ctid as tid
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, _merge_permits.queue, _merge_permits.kind, g.key)
            for update skip locked
        ) as p
    );
    merged int;
begin
    -- A copy that is held stays, or else the one taken last; if another session has any locked, all stay.
    delete from pgqueue.permit as p
    where p.ctid = any (array(
        select c.tid
        from (
            select
                o.tid,
                o.free_at = 'infinity' as is_held, o.job_id, first_value(o.job_id) over copies as first_id,
                row_number() over copies as nth,
                bool_and(o.tid = any (locked)) over (partition by o.group_key, o.is_rate, o.place) as is_locked
            from unnest(group_keys) as g (key)
            cross join lateral (
                select p.ctid as tid, p.*
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _merge_permits.queue, _merge_permits.kind, g.key)
                offset 0
            ) as o
            window copies as (
                partition by o.group_key, o.is_rate, o.place
                order by o.free_at = 'infinity' desc, o.taken_at desc nulls last, o.tid
            )
        ) as c
        where c.is_locked and c.nth > 1 and not (c.is_held and c.job_id is distinct from c.first_id)
    ));
    get diagnostics merged = row_count;
    return merged;
end;
$$;

-- How many permits of each cap look free, at most as many as wanted; hence how many more jobs may begin under the caps
-- of the queue itself, and which kinds and caps are full. Relies on the planner settings of its callers.
create or replace function pgqueue._room(
    queue text, caps pgqueue._cap[], wanted int, moment timestamptz, out free int[], out jobs int, out full_kinds text[],
    out full_caps int[]
)
    language plpgsql
as $$
declare
    has_surplus boolean := pg_relation_size('pgqueue.permit_surplus_idx') > 8192 and pgqueue._any_surplus(queue);
begin
    select
        array_agg(f.free), least(wanted, min(f.free) filter (where f.kind = '')),
        coalesce(array_agg(f.kind) filter (where f.kind <> '' and f.free = 0), '{}'),
        array_agg(f.nth::int) filter (where f.free = 0)
    into free, jobs, full_kinds, full_caps
    from (
        select c.kind, c.nth, (
            select count(*)
            from (
                select
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _room.queue, c.kind, c.group_key)
                    and pgqueue._is_free(p, c.is_rate, c.most, moment)
                    and not (has_surplus and not c.is_rate and pgqueue._has_surplus(_room.queue, c.kind, c.group_key))
                -- The last returned first: an old snapshot may keep dead index entries behind them.
                order by p.free_at desc
                limit wanted
            ) as free
        )::int as free
        from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
        offset 0
    ) as f;
end;
$$;

-- Locks free permits, for each cap at most as many as wanted, and returns them in the order of
-- the caps. Relies on the planner settings of its callers.
create or replace function pgqueue._lock_free(
    queue text, caps pgqueue._cap[], wanted int[], moment timestamptz, out caps_of int[], out permits tid[]
)
    language plpgsql
as $$
declare
    has_surplus boolean := pg_relation_size('pgqueue.permit_surplus_idx') > 8192 and pgqueue._any_surplus(queue);
begin
    select array_agg(c.nth::int), array_agg(l.tid) into caps_of, permits
    from unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
    cross join lateral (
        select p.ctid as tid
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _lock_free.queue, c.kind, c.group_key)
            and pgqueue._is_free(p, c.is_rate, c.most, moment)
            and (p.taken_at is not null or not pgqueue._is_double(p))
            and not (has_surplus and not c.is_rate and pgqueue._has_surplus(_lock_free.queue, c.kind, c.group_key))
        order by p.free_at desc
        limit wanted[c.nth]
        for update skip locked
    ) as l;
end;
$$;

-- Gives locked permits to the jobs that a claim takes, those of rates until free_at; returns where the permits are
-- now. Relies on the planner settings of its callers.
create or replace function pgqueue._give_permits(
    permits tid[], job_ids bigint[], new_token bigint, moment timestamptz, free_ats timestamptz[] default null
)
    returns tid[]
    language plpgsql
as $$
declare
    given tid[];
begin
    with given as (
        update pgqueue.permit as p
        set free_at = coalesce(g.free_at, 'infinity'), job_id = g.job_id, token = new_token, taken_at = moment
        from unnest(permits, job_ids, free_ats) with ordinality as g (tid, job_id, free_at, nth)
        where p.ctid = g.tid
        returning g.nth, p.ctid as tid
    )
    select array_agg(g.tid order by g.nth) into given from given as g;
    return given;
end;
$$;

-- For full caps, of a kind or of groups: checks whether the jobs that hold their permits still run
-- (not those taken under this claim's token), ends those whose leases have expired, and merges
-- copies. Returns 0 if nothing has changed.
create or replace function pgqueue._review_permits(
    queue text, kind text, group_keys text[], mosts int[], moment timestamptz, new_token bigint
)
    returns int
    language plpgsql
as $$
declare
    -- If there are many only some of them, but always a surplus permit that nobody holds: see _fit_permits.
    locked tid[] := array(
        select h.tid
        from unnest(group_keys, mosts) as g (key, most)
        cross join lateral (
            select p.ctid as tid
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, _review_permits.queue, _review_permits.kind, g.key)
                and not p.is_rate and p.free_at = 'infinity' and p.token is distinct from new_token
                and (g.most is null or g.most <= 32 or p.is_surplus and p.job_id is null
                    or p.place % (g.most / 16) = date_part('microseconds', moment)::int % (g.most / 16))
            for update skip locked
        ) as h
    );
    surplus text[] := array(
        select distinct p.group_key from pgqueue.permit as p where p.ctid = any (locked) and p.is_surplus
    );
    freed int := pgqueue._free_lost_permits(locked, moment);
    cap pgqueue._cap;
begin
    for cap in
        select _review_permits.kind, g.key, false, g.most, interval '1 second'
        from unnest(group_keys, mosts) as g (key, most)
        where g.key = any (surplus) and g.most is not null
    loop
        perform pgqueue._fit_permits(queue, cap, moment, new_token);
        freed := freed + 1;
    end loop;
    return freed + pgqueue._merge_permits(queue, kind, group_keys);
end;
$$;

-- Frees permits of rates that were taken before the clock was set back; returns how many.
create or replace function pgqueue._forget_future(queue text, kind text, group_keys text[], moment timestamptz)
    returns int
    language plpgsql
as $$
declare
    freed int;
begin
    update pgqueue.permit as p
    set free_at = moment, taken_at = null
    where p.ctid = any (array(
        select r.tid
        from unnest(group_keys) as g (key)
        cross join lateral (
            select r.ctid as tid
            from pgqueue.permit as r
            where pgqueue._is_permit_of(r, _forget_future.queue, _forget_future.kind, g.key)
                -- Compared with the clock, not with moment, which a claim may have read long before.
                and r.is_rate and r.free_at > moment and r.taken_at > clock_timestamp() + interval '1 second'
            for update skip locked
        ) as r
    ));
    get diagnostics freed = row_count;
    return freed;
end;
$$;

-- Whether a job with this token and these permits still holds a permit with this token and group: the job
-- runs, or it keeps the permit of its group for its retry.
create or replace function pgqueue._holds(token bigint, permits tid[], permit_token bigint, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select token = permit_token or token is null and permits is not null and group_key <> '' and permit_token <> -1
$$;

-- Of some locked permits, frees those whose jobs no longer run, and ends attempts whose leases have expired;
-- returns how many of both.
create or replace function pgqueue._free_lost_permits(locked tid[], moment timestamptz)
    returns int
    language plpgsql
as $$
declare
    expired bigint[];
    in_doubt bigint[];
    ended int := 0;
    freed int;
begin
    if locked = '{}' then
        return 0;
    end if;
    in_doubt := pgqueue._in_doubt(locked);
    expired := array(
        select p.job_id
        from pgqueue.permit as p
        where p.ctid = any (locked) and exists (
            select from pgqueue.job as j
            where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
                and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _free_lost_permits.moment
            offset 0
        )
    );
    if expired <> '{}' then
        ended := pgqueue._expire(
            array(select j.ctid from pgqueue.job as j where j.id = any (expired) for update skip locked), moment
        );
    end if;
    -- This includes jobs whose end could not return the permit because it was locked, or lost the hint.
    update pgqueue.permit as p
    set free_at = _free_lost_permits.moment, job_id = null, is_surplus = false
    where p.ctid = any (locked) and (p.job_id = any (in_doubt)) is not true and not exists (
        select from pgqueue.job as j
        where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
            -- A retry keeps it only as long as its group is set to wait for it.
            and (j.token is not null or (pgqueue._in_force(j.queue, j.kind, j.group_key)).group_on_retry = 'block')
        offset 0
    );
    get diagnostics freed = row_count;
    return ended + freed;
end;
$$;

-- Moves the held permits of a cap (for a rate, the last ones taken) to the lowest places, and marks those held
-- beyond the cap as surplus. While it is unsure whether there are any, it marks one that nobody holds, too. Leaves
-- permits alone that were taken under this claim's token.
create or replace function pgqueue._fit_permits(
    queue text, cap pgqueue._cap, moment timestamptz, new_token bigint default null
)
    returns void
    language plpgsql
    set enable_tidscan = on
as $$
declare
    locked tid[] := array(
        select p.ctid
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key)
            and p.is_rate = cap.is_rate and (new_token is null or p.token is distinct from new_token)
        for update skip locked
    );
    -- Read after the lock: a claim may still know the limit from before a change, and would remove the marks
    -- of that change.
    settings pgqueue.queue_in_force := pgqueue._in_force(queue, cap.kind, cap.group_key);
    most int := case
        when cap.is_rate then null
        when cap.group_key <> '' then settings.group_limit
        else settings.max_running
    end;
    in_doubt bigint[] := pgqueue._in_doubt(locked);
    -- A locked permit beyond the cap: an attempt is just beginning or ending, and may go on. Until that is known,
    -- no permit is taken.
    is_unsure boolean := exists (
        select
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key)
            and not p.is_rate and p.place > most and p.ctid <> all (locked)
            and (new_token is null or p.token is distinct from new_token)
    );
begin
    with known as (
        select
            p.ctid as tid, p.place, p.free_at,
            case when cap.is_rate then coalesce(p.taken_at + cap.period > _fit_permits.moment, false)
                else coalesce(p.job_id = any (in_doubt), false) or exists (
                    select from pgqueue.job as j
                    where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
                    offset 0
                )
            end as is_held,
            case when cap.is_rate then p.taken_at + cap.period end as ends_at
        from pgqueue.permit as p
        where p.ctid = any (locked)
    ), fitted as (
        select k.*, l.place as new_place, k.is_held and coalesce(l.place > most, false) as is_beyond
        from (
            select k.*, row_number() over (order by k.is_held desc, k.ends_at desc nulls last, k.place) as nth
            from known as k
        ) as k
        join (select k.place, row_number() over (order by k.place) as nth from known as k) as l using (nth)
    )
    update pgqueue.permit as p
    set place = f.new_place,
        free_at = case
            when f.is_held then coalesce(f.ends_at, 'infinity')
            when is_unsure then 'infinity'
            else least(p.free_at, _fit_permits.moment)
        end,
        job_id = case when f.is_held then p.job_id end,
        is_surplus = is_unsure or f.is_beyond
    from fitted as f
    -- Rows that need no change must not move: their jobs find them by ctid.
    where p.ctid = f.tid and (
        p.place <> f.new_place or p.is_surplus or is_unsure or f.is_beyond
        or f.is_held is distinct from (p.free_at > _fit_permits.moment) or f.ends_at <> p.free_at
    );
    if is_unsure and not exists (
        select
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key)
            and p.is_surplus and p.job_id is null
    ) then
        insert into pgqueue.permit (free_at, token, place, is_rate, is_surplus, queue, kind, group_key)
        select 'infinity', -1, max(p.place) + 1, false, true, _fit_permits.queue, cap.kind, cap.group_key
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _fit_permits.queue, cap.kind, cap.group_key) and not p.is_rate;
    end if;
end;
$$;

-- Which of these jobs other sessions have locked.
create or replace function pgqueue._locked_jobs(ids bigint[])
    returns bigint[]
    language plpgsql
    set enable_seqscan = off
as $$
begin
    return array(
        select j.id
        from pgqueue.job as j
        where j.id = any (ids) and j.xmax <> 0 and not pgqueue._is_left_alone(j.id)
    );
end;
$$;

-- For permits with the token -1, given to jobs that were locked when running jobs were counted: which of these
-- are still locked, or run without another permit of the same cap. They keep their permits.
create or replace function pgqueue._in_doubt(locked tid[])
    returns bigint[]
    language plpgsql
as $$
declare
    ids bigint[] := array(
        select p.job_id from pgqueue.permit as p
        where p.ctid = any (locked) and p.token = -1 and p.job_id is not null
    );
    still_locked bigint[];
begin
    if ids = '{}' then
        return ids;
    end if;
    -- In a statement of its own: the next one has to see the lease of a job whose claim has committed meanwhile.
    still_locked := pgqueue._locked_jobs(ids);
    return still_locked || array(
        select p.job_id
        from pgqueue.permit as p
        cross join lateral (
            select j.token from pgqueue.job as j where j.id = p.job_id and j.lease_expires_at > clock_timestamp() offset 0
        ) as j
        -- A list, read once: there may be thousands.
        where p.ctid = any (locked) and p.token = -1 and (p.job_id, j.token, p.queue, p.kind, p.group_key) not in (
            select o.job_id, o.token, c.queue, c.kind, c.group_key
            from (select distinct l.queue, l.kind, l.group_key from pgqueue.permit as l where l.ctid = any (locked)) as c
            cross join lateral (
                select o.job_id, o.token
                from pgqueue.permit as o
                where pgqueue._is_permit_of(o, c.queue, c.kind, c.group_key) and o.token > 0 and o.job_id is not null
                offset 0
            ) as o
        )
    );
end;
$$;

-- Gives permits of a cap to the running jobs that have none, even beyond the cap; with the token -1 to those that
-- other sessions have locked, since they may be claiming them.
create or replace function pgqueue._count_running(queue text, cap pgqueue._cap)
    returns void
    language plpgsql
    set enable_seqscan = off
as $$
declare
    ids bigint[] := array(
        select j.id
        from pgqueue.job as j
        where cap.group_key = '' and hashtext(j.queue) = hashtext(_count_running.queue collate "default")
            and j.queue = _count_running.queue and cap.kind in ('', j.kind)
            and (j.lease_expires_at is not null or j.xmax <> 0)
        union all
        select j.id
        from pgqueue.job as j
        where pgqueue._is_in_group(j, _count_running.queue, nullif(cap.group_key, ''))
            and (j.lease_expires_at is not null or j.xmax <> 0)
    );
    in_doubt bigint[] := pgqueue._locked_jobs(ids);
begin
    with known as (
        select p.place, p.job_id, p.token
        from pgqueue.permit as p
        where pgqueue._is_permit_of(p, _count_running.queue, cap.kind, cap.group_key) and not p.is_rate
    ), lacks as (
        select l.*, row_number() over (order by l.id) as nth
        from (
            select j.id, case when j.id = any (in_doubt) then -1 else j.token end as token
            from pgqueue.job as j
            where j.id = any (ids) and (j.lease_expires_at is not null or j.id = any (in_doubt))
        ) as l
        where not exists (select from known as k where k.job_id = l.id and k.token = l.token)
    ), free as (
        select f.tid, row_number() over () as nth
        from (
            select p.ctid as tid
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, _count_running.queue, cap.kind, cap.group_key)
                and not p.is_rate and p.free_at < 'infinity'
            limit (select count(*) from lacks)
            for update skip locked
        ) as f
    ), given as (
        update pgqueue.permit as p
        set free_at = 'infinity', job_id = l.id, token = l.token
        from free as f
        join lacks as l using (nth)
        where p.ctid = f.tid
        returning p.job_id, p.ctid as tid
    ), made as (
        insert into pgqueue.permit (free_at, place, is_rate, job_id, token, queue, kind, group_key)
        select
            'infinity', (select coalesce(max(k.place), 0) from known as k) + l.nth - f.permits, false, l.id, l.token,
            _count_running.queue, cap.kind, cap.group_key
        from lacks as l
        cross join (select count(*) as permits from free) as f
        where l.nth > f.permits
        returning permit.job_id, permit.ctid as tid
    ), has as (
        select g.* from given as g union all select m.* from made as m
    )
    -- A job that is locked, and so probably ending, need not know of its permit. In a transaction block, which may stay
    -- open and would hold up the ends of these jobs, none is told: then claims find out, and rests look every second.
    update pgqueue.job as j
    set permits = j.permits || h.tid
    from has as h
    where now() = statement_timestamp() and j.ctid = any (array(
        select k.tid
        from has as o
        cross join lateral (
            select k.ctid as tid from pgqueue.job as k
            where k.id = o.job_id and k.lease_expires_at is not null
            for update skip locked
        ) as k
    )) and j.id = h.job_id;
end;
$$;

-- The permits of a cap: whether each is held, until when it need not be looked at again (the end of the lease or of
-- the period), and which job holds it. A running job of _in_doubt holds its permit, but is_held is false: its end does
-- not return the permit, so a claim has to find out.
create or replace function pgqueue._permits(queue text, cap pgqueue._cap, moment timestamptz)
    returns table (place int, is_held boolean, free_at timestamptz, holder bigint)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_bitmapscan = off
as $$
begin
    return query
    select p.place, p.is_held, case when p.is_held then p.free_at end, p.holder
    from (
        select
            p.place,
            case when cap.is_rate then p.free_at > _permits.moment
                -- A retry that is due may take the permit that it has kept.
                else coalesce(j.token = p.token or j.token is null and j.run_at > _permits.moment, false)
            end as is_held,
            case
                when cap.is_rate then p.free_at
                -- Its end will not return it: see _count_running.
                when j.token = p.token and (p.ctid = any (j.permits)) is not true
                    then least(j.lease_expires_at, _permits.moment + interval '1 second')
                else coalesce(j.lease_expires_at, j.run_at)
            end as free_at,
            j.id as holder
        from pgqueue.permit as p
        left join lateral (
            select j.id, j.token, j.lease_expires_at, j.run_at, j.permits
            from pgqueue.job as j
            where j.id = p.job_id and (
                pgqueue._holds(j.token, j.permits, p.token, p.group_key)
                or p.token = -1 and j.token is not null and (j.id, j.token) not in (
                    select o.job_id, o.token
                    from pgqueue.permit as o
                    where pgqueue._is_permit_of(o, _permits.queue, cap.kind, cap.group_key)
                        and o.token > 0 and o.job_id is not null
                )
            )
            offset 0
        ) as j on true
        where pgqueue._is_permit_of(p, _permits.queue, cap.kind, cap.group_key) and p.is_rate = cap.is_rate
    ) as p;
end;
$$;

-- Searches the next two pages of permits for those held by jobs that no longer run (not those taken under
-- this claim's token), and frees them; returns how many.
create or replace function pgqueue._sweep_permits(new_token bigint default null)
    returns int
    language plpgsql
as $$
declare
    pages bigint := pg_relation_size('pgqueue.permit') / current_setting('block_size')::int;
    page bigint;
    moment timestamptz := clock_timestamp();
begin
    if pages = 0 then
        return 0;
    end if;
    page := coalesce(pg_sequence_last_value('pgqueue._cell_permits_swept'::regclass), 0) % pages;
    perform setval('pgqueue._cell_permits_swept', page + 2);
    return pgqueue._free_lost_permits(
        array(
            select p.ctid from pgqueue.permit as p
            where p.ctid >= format('(%s,0)', page)::tid and p.ctid < format('(%s,0)', page + 2)::tid
                and not p.is_rate and p.free_at = 'infinity' and p.token is distinct from new_token
                -- A surplus permit that nobody holds is kept until _fit_permits is sure.
                and not (p.is_surplus and p.job_id is null) and not exists (
                    select from pgqueue.job as j
                    where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)
                        and (coalesce(j.lease_expires_at, (j.terms).expires_at) <= moment) is not true
                    offset 0
                )
            for update skip locked
        ),
        moment
    );
end;
$$;

-- Drops the permits of at most 1000 groups, queues and kinds that have had no job for a day; returns how many. Those of
-- a queue's own caps, which were created when these were set, stay. Relies on the planner settings of maintain as well.
create or replace function pgqueue._drop_permits()
    returns bigint
    language plpgsql
    set enable_bitmapscan = off
as $$
declare
    idle record;
    locked tid[];
    dropped bigint := 0;
    more bigint;
begin
    for idle in
        select p.queue, p.kind, p.group_key
        from pgqueue.permit as p
        group by p.queue, p.kind, p.group_key
        having (max(p.taken_at) > clock_timestamp() - interval '1 day') is not true and case p.group_key
            when '' then not exists (
                select from pgqueue.job as j where hashtext(j.queue) = hashtext(p.queue) and j.queue = p.queue
            ) and not exists (
                select from pgqueue.queue as q
                where q.name = p.queue and q.kind = p.kind and q.group_key = ''
                    and num_nonnulls(q.max_running, q.rate_limit) > 0
            )
            else not exists (select from pgqueue.job as j where pgqueue._is_in_group(j, p.queue, p.group_key))
        end
        limit 1000
    loop
        locked := array(
            select p.ctid from pgqueue.permit as p where pgqueue._is_permit_of(p, idle.queue, idle.kind, idle.group_key)
            for update skip locked
        );
        -- All permits of each or none, since a cap with gaps lacks permits until a claim finds it full.
        delete from pgqueue.permit as p
        where p.ctid = any (locked) and (
            select bool_and(o.ctid = any (locked) and (o.taken_at > clock_timestamp() - interval '1 day') is not true)
            from pgqueue.permit as o
            where pgqueue._is_permit_of(o, idle.queue, idle.kind, idle.group_key)
        );
        get diagnostics more = row_count;
        dropped := dropped + more;
    end loop;
    return dropped;
end;
$$;
