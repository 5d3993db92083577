-- Caps: how many jobs of a queue or a kind run at once (max_running), and how many of a queue, a kind
-- or a group begin in any period (rate_limit).
--
-- A cap has as many permits, rows that persist. A claim under caps looks first how many are free, and
-- passes over the kinds that have none; picks; locks a permit for each job, and asks only then whether
-- it is free: so it sees what others did with it before. What is locked is passed over: no claim waits,
-- and a job that finds no permit goes back. Nothing ever gives a permit back: that its job's token is
-- another, or that the period has passed, makes it free. Two sessions that do not see each other may
-- make a permit twice; who takes one has all its copies locked, and takes all.
--
-- A place may be taken while it and those held above it are together no more than the cap: so a cap
-- that was lowered holds while what runs beyond it ends, in whatever order.
--
-- A group that has used up its rate must not be walked by every claim: its jobs are delayed, by a turn
-- in the time to come, as many in each period as may begin.

create or replace function pgqueue._has_caps(queue text)
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
begin
    -- Its first row brings a second page.
    return pg_relation_size('pgqueue.queue_cap_idx') > 8192 and exists (
        select from pgqueue.queue as q
        where q.name in (_has_caps.queue, '') and (q.max_running is not null or q.rate_limit is not null)
    );
end;
$$;

comment on function pgqueue._has_caps(text) is 'Whether a queue, or a kind or group in it, has a cap.';

create or replace function pgqueue._caps(queue text, kinds text[], group_keys text[])
    returns table (kind text, group_key text, is_rate boolean, most int, period interval)
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    -- Groups may be many, and few have settings of their own.
    each_group pgqueue.queue := case when group_keys is not null then pgqueue._in_force(queue, '', '*') end;
begin
    return query
    with own as (
        select distinct q.kind, q.group_key
        from pgqueue.queue as q
        where q.name in (_caps.queue, '') and (q.max_running is not null or q.rate_limit is not null)
    )
    select s.kind, s.group_key, c.is_rate, c.most, c.period
    from (
        select '', g.key, 1, o.group_key is not null
        from (select distinct u.key from unnest(group_keys) as u (key)) as g
        left join own as o on o.group_key = g.key
        where g.key is not null and (o.group_key is not null or each_group.rate_limit is not null)
        union all
        select o.kind, '', 2, true from own as o where o.kind <> '' and (kinds is null or o.kind = any (kinds))
        union all
        select '', '', 3, true from own as o where o.kind = '' and o.group_key = ''
    ) as s (kind, group_key, width, has_own)
    cross join lateral (
        select f.max_running, f.rate_limit, f.rate_period
        from pgqueue._in_force(_caps.queue, s.kind, s.group_key) as f
        where s.has_own
        union all
        select null, each_group.rate_limit, each_group.rate_period where not s.has_own
    ) as f (max_running, rate_limit, period)
    cross join lateral (
        values (false, f.max_running, f.period), (true, f.rate_limit, f.period)
    ) as c (is_rate, most, period)
    where c.most is not null
    order by s.width, s.kind, s.group_key, c.is_rate;
end;
$$;

comment on function pgqueue._caps(text, text[], text[]) is
'The caps in force for some groups, some kinds (null: all) and the queue itself,
the narrowest first.';

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
                    then coalesce(s.taken_at > moment - period and s.taken_at <= moment + period, false)
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
                and (p.is_rate and p.taken_at > moment - period and p.taken_at <= moment + period) is not true
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
        select p.ctid as tid
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_lock_permits.queue) and hashtext(p.kind) = hashtext(c.kind)
            and hashtext(p.group_key) = hashtext(c.group_key) and p.is_rate = c.is_rate
            and p.place <= pgqueue._last_place(
                _lock_permits.queue, c.kind, c.group_key, c.is_rate, c.most, c.period, moment
            )
            and p.queue = _lock_permits.queue and p.kind = c.kind and p.group_key = c.group_key
            and (p.is_rate and p.taken_at > moment - c.period and p.taken_at <= moment + c.period) is not true
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
    where (p.is_rate and p.taken_at > moment - periods[l.cap] and p.taken_at <= moment + periods[l.cap]) is not true
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

create or replace function pgqueue._room(
    queue text, kinds text[], max_jobs int, moment timestamptz, out jobs int, out full_kinds text[],
    out free_at timestamptz, out is_complete boolean
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    cap record;
    usable int;
begin
    jobs := max_jobs;
    full_kinds := '{}';
    is_complete := true;
    for cap in
        select c.*
        from pgqueue._caps(queue, kinds, null) as c
    loop
        usable := pgqueue._count_free(
            queue, cap.kind, cap.group_key, cap.is_rate, cap.most, cap.period, moment,
            case when cap.kind = '' then jobs else 1 end
        );
        is_complete := is_complete
            and pgqueue._has_permit(queue, cap.kind, cap.group_key, cap.is_rate, cap.most);
        if cap.kind = '' then
            jobs := usable;
        elsif usable = 0 then
            full_kinds := full_kinds || cap.kind;
        end if;
        if usable = 0 then
            free_at := least(free_at, (
                select min(p.free_at)
                from pgqueue._permits(
                    queue, cap.kind, cap.group_key, cap.is_rate, cap.most, cap.period, moment
                ) as p
            ));
        end if;
    end loop;
end;
$$;

comment on function pgqueue._room(text, text[], int, timestamptz) is
'How many more jobs of a queue, up to max_jobs, may begin as far as its own caps
say; which of its kinds (of these, if given) are full; when the first permit of
a full cap is free at the latest; and whether all permits are there.';

create or replace function pgqueue._end_expired(queue text, moment timestamptz)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return pgqueue._expire(
        array(
            select j.ctid
            from pgqueue.permit as p
            join pgqueue.job as j on j.id = p.job_id and j.token = p.token
            where hashtext(p.queue) = hashtext(_end_expired.queue) and p.queue = _end_expired.queue
                and not p.is_rate and j.lease_expires_at <= moment
            for update of j skip locked
        ),
        moment
    );
end;
$$;

comment on function pgqueue._end_expired(text, timestamptz) is
'Ends the attempts that hold permits under an expired lease: a claim that finds
a queue full does not meet them in their lanes. Returns how many.';

create or replace function pgqueue._without(paused jsonb, kinds text[], group_keys text[])
    returns jsonb
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if kinds = '{}' and group_keys = '{}' then
        return paused;
    end if;
    return (
        select jsonb_object_agg(
            e.key,
            e.value || coalesce((select jsonb_object_agg(k.name, true) from unnest(kinds) as k (name)), '{}')
        )
        from jsonb_each(coalesce(paused, '{"": {"": false}}')) as e
    ) || coalesce(
        (select jsonb_object_agg(g.key, '{"": true}'::jsonb) from unnest(group_keys) as g (key)), '{}'
    );
end;
$$;

comment on function pgqueue._without(jsonb, text[], text[]) is
'What a claim passes over: what is paused, some kinds, and some groups.';

create or replace function pgqueue._demand(
    picks tid[], kinds text[], group_keys text[], moment timestamptz, age_after interval,
    out ids bigint[], out caps int[], out job_ids bigint[], out wanted int[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_hashjoin = on
    set enable_nestloop = off
    set enable_mergejoin = off
    set enable_sort = on
as $$
begin
    with picked as materialized (
        select
            j.id, j.kind, coalesce(j.group_key, '') as group_key, coalesce(j.turn, j.run_at) as at,
            j.priority + coalesce(floor(
                date_part('epoch', moment - j.run_at) / date_part('epoch', age_after)
            ), 0) as priority,
            row_number() over (partition by j.group_key order by j.priority desc, j.run_at, j.id) as place,
            row_number() over (
                partition by j.group_key order by j.priority desc, coalesce(j.turn, j.run_at), j.id
            ) as turn
        from pgqueue.job as j
        where j.ctid = any (picks)
    ), ordered as materialized (
        -- By the turns of the groups, and within a group by run_at and id.
        select
            p.id, p.kind, p.group_key,
            row_number() over (order by t.priority desc, t.at, t.id) as place
        from picked as p
        join picked as t on t.group_key = p.group_key and t.turn = p.place
    ), cap as materialized (
        select c.* from unnest(kinds, group_keys) with ordinality as c (kind, group_key, nth)
    ), whole as materialized (
        select c.nth from cap as c where c.kind = '' and c.group_key = ''
    ), met as materialized (
        select c.nth, o.id, o.place from ordered as o join cap as c on c.group_key = o.group_key
        where c.group_key <> ''
        union all
        select c.nth, o.id, o.place from ordered as o join cap as c on c.kind = o.kind and c.group_key = ''
        union all
        select w.nth, o.id, o.place from ordered as o cross join whole as w
    )
    select
        (select array_agg(o.id order by o.place) from ordered as o),
        array_agg(m.nth order by m.nth, m.place),
        array_agg(m.id order by m.nth, m.place),
        (
            select array_agg(n.jobs order by n.nth)
            from (
                select c.nth, count(m.id)::int as jobs
                from cap as c left join met as m on m.nth = c.nth
                group by c.nth
            ) as n
        )
    into ids, caps, job_ids, wanted
    from met as m;
end;
$$;

comment on function pgqueue._demand(tid[], text[], text[], timestamptz, interval) is
'The ids of picked jobs in the order in which they are to run, and in pairs
which of some caps hold for which of them; and how many of them are wanted.';

create or replace function pgqueue._supply(
    demanded int[], job_ids bigint[], locked int[], permits tid[], refused bigint[],
    out refusing int[], out refused_ids bigint[], out taken tid[], out holders bigint[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_hashjoin = on
    set enable_nestloop = off
    set enable_mergejoin = off
    set enable_sort = on
as $$
begin
    with wants as (
        select u.cap, u.id, row_number() over (partition by u.cap order by u.place) as nth
        from unnest(demanded, job_ids) with ordinality as u (cap, id, place)
        left join unnest(refused) as r (id) on r.id = u.id
        where r.id is null
    ), has as (
        select u.cap, u.permit, row_number() over (partition by u.cap) as nth
        from unnest(locked, permits) as u (cap, permit)
    )
    select
        array_agg(distinct w.cap) filter (where h.cap is null),
        array_agg(distinct w.id) filter (where h.cap is null),
        array_agg(h.permit) filter (where h.cap is not null),
        array_agg(w.id) filter (where h.cap is not null)
    into refusing, refused_ids, taken, holders
    from wants as w
    left join has as h on h.cap = w.cap and h.nth = w.nth;
end;
$$;

comment on function pgqueue._supply(int[], bigint[], int[], tid[], bigint[]) is
'Hands the locked permits of each cap to the jobs that demand one, in their order
and without those that were refused; which get none, and of which caps.';

create or replace function pgqueue._behind(ids bigint[], refused bigint[])
    returns bigint[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_sort = on
as $$
begin
    return array(
        select b.id
        from (
            select
                j.id, j.slot,
                bool_or(j.id = any (refused)) over (partition by j.group_key order by o.place) as is_behind
            from unnest(ids) with ordinality as o (id, place)
            join pgqueue.job as j on j.id = o.id
            where j.slot is not null
        ) as b
        where b.is_behind and b.id <> all (refused)
    );
end;
$$;

comment on function pgqueue._behind(bigint[], bigint[]) is
'Of some jobs, in their order, those that stand behind refused ones of their
groups, if these have a limit: none may overtake another.';

create or replace function pgqueue._take_permits(
    queue text, picks tid[], new_token bigint, moment timestamptz, age_after interval,
    out taken tid[], out refused bigint[], out full_kinds text[], out full_groups text[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    met record;
    caps record;
    demand record;
    locked record;
    supply record;
begin
    select array_agg(distinct j.kind) as kinds, array_agg(distinct j.group_key) as group_keys
    into met
    from pgqueue.job as j
    where j.ctid = any (picks);
    select
        array_agg(c.kind) as kinds, array_agg(c.group_key) as group_keys, array_agg(c.is_rate) as are_rates,
        array_agg(c.most) as mosts, array_agg(c.period) as periods
    into caps
    from pgqueue._caps(queue, met.kinds, met.group_keys) as c;
    demand := pgqueue._demand(picks, caps.kinds, caps.group_keys, moment, age_after);
    locked := pgqueue._lock_permits(
        queue, caps.kinds, caps.group_keys, caps.are_rates, caps.mosts, caps.periods,
        demand.wanted, moment
    );
    supply := pgqueue._supply(demand.caps, demand.job_ids, locked.caps, locked.permits, '{}');
    refused := coalesce(supply.refused_ids, '{}');
    select array_agg(caps.kinds[r.cap]), array_agg(caps.group_keys[r.cap]) into full_kinds, full_groups
    from unnest(supply.refusing) as r (cap);
    if refused <> '{}' then
        refused := refused || pgqueue._behind(demand.ids, refused);
        supply := pgqueue._supply(demand.caps, demand.job_ids, locked.caps, locked.permits, refused);
    end if;
    update pgqueue.permit as p
    set job_id = t.job_id, token = new_token, taken_at = moment
    from unnest(supply.taken, supply.holders) as t (tid, job_id)
    where p.ctid = t.tid;
    with leased as (
        update pgqueue.job as j
        -- Until claim() gives it its lease.
        set token = new_token, lease_expires_at = 'infinity'
        where j.ctid = any (picks) and j.id <> all (refused)
        returning j.ctid as tid
    )
    select array_agg(l.tid) into taken from leased as l;
end;
$$;

comment on function pgqueue._take_permits(text, tid[], bigint, timestamptz, interval) is
'Takes a permit of each of its caps for every picked job, and marks as taken
those that got all. The others are refused; the caps that refused are named by
kind and group_key, in pairs, empty ones for the queue itself.';

create or replace function pgqueue._put_back(queue text, kinds text[], paused jsonb, job_ids bigint[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    freed record;
begin
    with back as (
        update pgqueue.job as j
        set lease_expires_at = null,
            -- What waited for its retry in a slot goes on to do so.
            slot = case when jsonb_array_length(j.errors) > 0
                and (pgqueue._in_force(j.queue, j.kind, j.group_key)).group_on_retry = 'block' then j.slot end
        where j.id = any (job_ids) and j.lease_expires_at = 'infinity'
        returning j.queue, j.group_key
    )
    select array_agg(b.queue) as queues, array_agg(b.group_key) as group_keys into freed from back as b;
    if freed.queues is not null and pg_relation_size('pgqueue.slot') > 0 then
        perform pgqueue._recall(freed.queues, freed.group_keys);
    end if;
    perform pgqueue._return_position(queue, kinds, paused, l.lane, l.at)
    from (
        select
            j.priority + case when j.turn < '1900-01-01 00:00 UTC' then 1000 else 0 end as lane,
            min(coalesce(j.turn, j.run_at)) as at
        from pgqueue.job as j
        where j.id = any (job_ids)
        group by 1
    ) as l;
end;
$$;

comment on function pgqueue._put_back(text, text[], jsonb, bigint[]) is
'Leaves jobs that were picked, and found no permit, to the next claim.';

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
    queue text, group_key text, job_ids bigint[], moment timestamptz
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = on
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    cap record;
    free_ats timestamptz[];
    lane record;
    last timestamptz;
    next tid[];
begin
    select c.* into cap
    from pgqueue._caps(queue, '{}', array[group_key]) as c
    where c.group_key = _delay_group.group_key;
    -- Where one is free, others have just locked it. No two at the same time: so the last that was
    -- given says how many were.
    free_ats := array(
        select f.at + row_number() over (order by f.at) * interval '1 microsecond'
        from (
            select greatest(p.free_at, moment + interval '10 milliseconds') as at
            from pgqueue._permits(queue, '', group_key, true, cap.most, cap.period, moment) as p
            order by 1 desc
            limit cap.most
        ) as f
        order by f.at
    );
    if cardinality(free_ats) < cap.most then
        -- Those that it lacks are for the next claim.
        perform pgqueue._make_permits(
            queue, '{}'::text[], array_fill(group_key, array[cardinality(job_ids)])
        );
        return;
    end if;
    for lane in
        select j.priority, array_agg(j.id order by j.run_at, j.id) as ids
        from pgqueue.job as j
        where j.id = any (job_ids) and j.group_key = _delay_group.group_key
        group by j.priority
        order by j.priority desc
    loop
        last := (
            select d.turn
            from pgqueue.job as d
            where hashtext(d.queue) = hashtext(_delay_group.queue) and isfinite(d.turn)
                and hashtext(d.group_key) = hashtext(_delay_group.group_key)
                and d.priority = lane.priority and d.turn between moment and '9998-12-31 00:00 UTC'
                and d.queue = _delay_group.queue and d.group_key = _delay_group.group_key
            order by d.turn desc
            limit 1
        );
        next := array(
            select j.ctid
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_delay_group.queue) and isfinite(j.turn)
                and hashtext(j.group_key) = hashtext(_delay_group.group_key)
                and j.priority = lane.priority and j.turn < '1900-01-01 00:00 UTC'
                and j.queue = _delay_group.queue and j.group_key = _delay_group.group_key
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
            pgqueue._delays(free_ats, cap.period, null, cardinality(lane.ids))
        ) as d (tid, at)
        where j.ctid = d.tid;
        -- Those that come next stand behind all that wait already.
        update pgqueue.job as j
        set turn = d.at
        from unnest(next, pgqueue._delays(
            free_ats, cap.period,
            greatest(last, (pgqueue._delays(free_ats, cap.period, null, cardinality(lane.ids)))[cardinality(lane.ids)]),
            cardinality(next)
        )) as d (tid, at)
        where j.ctid = d.tid;
    end loop;
end;
$$;

comment on function pgqueue._delay_group(text, text, bigint[], timestamptz) is
'For a group that has used up its rate: gives its refused jobs, and up to a
hundred more of each of their lanes, turns in the time to come.';

create or replace function pgqueue._hasten(queue text, moment timestamptz)
    returns boolean
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
    delayed record;
    early text[];
begin
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
        select c.group_key
        from pgqueue._caps(queue, '{}', delayed.group_keys) as c
        where c.group_key <> '' and pgqueue._count_free(
            _hasten.queue, '', c.group_key, true, c.most, c.period, moment, 1
        ) > 0
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

create or replace function pgqueue._pick_capped(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, age_after interval,
    new_token bigint
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    picks tid[] := '{}'::tid[];
    room record;
    passed jsonb;
    found_jobs tid[];
    next record;
    full_kinds text[] := '{}'::text[];
    full_groups text[] := '{}'::text[];
    is_hastened boolean := false;
begin
    loop
        room := pgqueue._room(queue, kinds, max_jobs - cardinality(picks), moment);
        if room.free_at <= moment then
            perform pgqueue._end_expired(queue, moment);
            room := pgqueue._room(queue, kinds, max_jobs - cardinality(picks), moment);
        end if;
        if not room.is_complete then
            perform pgqueue._make_permits(queue, kinds, null);
        end if;
        exit when room.jobs <= 0;
        passed := pgqueue._without(paused, room.full_kinds || full_kinds, full_groups);
        found_jobs := pgqueue._pick_lanes(
            queue, kinds, passed, room.jobs, moment, pgqueue._noted_lanes(queue, moment), age_after
        );
        if found_jobs = '{}' then
            exit when picks <> '{}' or is_hastened or not pgqueue._hasten(queue, moment);
            is_hastened := true;
            continue;
        end if;
        next := pgqueue._take_permits(queue, found_jobs, new_token, moment, age_after);
        picks := picks || coalesce(next.taken, '{}'::tid[]);
        exit when next.refused = '{}';
        perform pgqueue._put_back(queue, kinds, passed, next.refused);
        perform pgqueue._delay_group(queue, g.key, next.refused, moment)
        from unnest(next.full_groups) as g (key)
        where g.key <> '';
        full_kinds := full_kinds || array_remove(next.full_kinds, '');
        full_groups := full_groups || array_remove(next.full_groups, '');
        exit when ('', '') in (select * from unnest(next.full_kinds, next.full_groups))
            -- This claim may not use what it has made.
            or not room.is_complete
            -- The next claim goes on; what this one has put off stays so.
            or clock_timestamp() > moment + interval '100 milliseconds';
    end loop;
    return picks;
end;
$$;

comment on function pgqueue._pick_capped(
    text, text[], jsonb, int, timestamptz, interval, bigint
) is
'_pick_lanes under the caps of a queue: as many jobs as there are permits for,
which count as taken at this moment, by the claim that has this token.';

create or replace function pgqueue._until_room(
    queue text, kinds text[], paused jsonb, moment timestamptz
)
    returns interval
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    room record;
    until interval;
begin
    if not pgqueue._has_caps(queue) then
        return pgqueue._until_due(queue, kinds, paused, moment);
    end if;
    room := pgqueue._room(queue, kinds, 1, moment);
    until := room.free_at - moment;
    -- Permits that are not there are made by the next claim.
    if room.jobs > 0 or not room.is_complete then
        until := least(
            until, pgqueue._until_due(queue, kinds, pgqueue._without(paused, room.full_kinds, '{}'), moment)
        );
    end if;
    return case when until < '0' then '0' else until end;
end;
$$;

comment on function pgqueue._until_room(text, text[], jsonb, timestamptz) is
'_until_due under the caps of a queue: also until a full one has a permit again.';

create or replace function pgqueue._wake_capped(picks tid[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
as $$
begin
    if pg_relation_size('pgqueue.permit') > 0 then
        perform pgqueue._wake(e.queue)
        from (select distinct j.queue from pgqueue.job as j where j.ctid = any (picks)) as e
        where pgqueue._has_caps(e.queue);
    end if;
end;
$$;

comment on function pgqueue._wake_capped(tid[]) is
'For locked jobs whose attempts end: wakes who may wait for their permits.';

create or replace function pgqueue._count_running_jobs(queue text, kind text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_indexscan = on
as $$
begin
    with known as (
        select p.place, p.job_id, p.token
        from pgqueue.permit as p
        where hashtext(p.queue) = hashtext(_count_running_jobs.queue)
            and p.queue = _count_running_jobs.queue and p.kind = _count_running_jobs.kind
            and p.group_key = '' and not p.is_rate
    )
    insert into pgqueue.permit (place, is_rate, job_id, token, taken_at, queue, kind, group_key)
    select
        (select coalesce(max(k.place), 0) from known as k) + row_number() over (order by j.id),
        false, j.id, j.token, j.claimed_at, j.queue, _count_running_jobs.kind, ''
    from pgqueue.job as j
    where hashtext(j.queue) = hashtext(_count_running_jobs.queue) and j.queue = _count_running_jobs.queue
        and _count_running_jobs.kind in ('', j.kind) and j.lease_expires_at is not null
        and not exists (select from known as k where k.job_id = j.id and k.token = j.token);
end;
$$;

comment on function pgqueue._count_running_jobs(text, text) is
'Gives permits, behind those that there are, to the jobs of a queue or kind that
run from a time when it had no cap, also beyond the cap.';

create or replace function pgqueue._apply_caps(queue text, kind text, group_key text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = on
    set enable_hashagg = on
as $$
declare
    known record;
    lanes int[];
begin
    for known in
        select
            j.queue, case when _apply_caps.group_key is not null then j.group_key end as group_key,
            count(*) as jobs
        from pgqueue.job as j
        where j.queue = coalesce(_apply_caps.queue, j.queue)
            and (
                _apply_caps.group_key is null
                or j.group_key is not null and _apply_caps.group_key in ('*', j.group_key)
            )
        group by 1, 2
        union all
        -- A queue gets its permits before it has jobs, a group with them.
        select _apply_caps.queue, null, 0
        where _apply_caps.queue is not null and _apply_caps.group_key is null
            and not exists (
                select from pgqueue.job as j
                where hashtext(j.queue) = hashtext(_apply_caps.queue) and j.queue = _apply_caps.queue
            )
    loop
        -- No gaps: what is still held keeps all before it.
        delete from pgqueue.permit as p
        where p.ctid = any (array(
            select unnest(f.copies)
            from (values (false), (true)) as s (is_rate)
            cross join lateral pgqueue._in_force(known.queue, _apply_caps.kind, known.group_key) as settings
            cross join lateral (
                select u.place, u.copies, coalesce(max(u.place) filter (where u.is_held) over (), 0) as last_held
                from pgqueue._permits(
                    known.queue, coalesce(_apply_caps.kind, ''), coalesce(known.group_key, ''), s.is_rate, 0,
                    settings.rate_period, clock_timestamp()
                ) as u
            ) as f
            where f.place > greatest(
                f.last_held,
                case when s.is_rate then settings.rate_limit else settings.max_running end
            )
        ));
        perform pgqueue._make_permits(
            known.queue, array[kind],
            case when known.group_key is not null
                then array_fill(known.group_key, array[least(known.jobs, 1000)::int])
            end
        );
        if known.group_key is not null then
            with back as (
                update pgqueue.job as j
                set turn = null
                where hashtext(j.queue) = hashtext(known.queue) and isfinite(j.turn)
                    and hashtext(j.group_key) = hashtext(known.group_key)
                    and j.queue = known.queue and j.group_key = known.group_key
                    and j.turn between '1900-01-01 00:00 UTC' and '9998-12-31 00:00 UTC'
                returning j.priority
            )
            select array_agg(b.priority) into lanes from back as b;
            perform pgqueue._reopened(array_fill(known.queue, array[coalesce(cardinality(lanes), 0)]), lanes);
        elsif (pgqueue._in_force(known.queue, kind)).max_running is not null then
            perform pgqueue._count_running_jobs(known.queue, coalesce(kind, ''));
        end if;
        perform pgqueue._wake(known.queue);
    end loop;
end;
$$;

comment on function pgqueue._apply_caps(text, text, text) is
'After a change of caps: makes or drops permits, counts what runs, and lets
claims look again at what was delayed.';

create or replace function pgqueue._drop_permits()
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
