-- Caps: how many jobs of a queue or a kind run at once (max_running), and how many of a queue, a kind
-- or a group begin in any period (rate_limit).
--
-- A claim under caps looks first how many permits are free, and passes over the kinds that have none. It
-- picks, takes the permits, and puts back the jobs that got not all of theirs, of which it then passes
-- over the kind or the group, until it has what it wants.

create or replace function pgqueue._has_caps(queue text)
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    -- Its first row brings a second page.
    return pg_relation_size('pgqueue.queue_cap_idx') > 8192 and exists (
        select from pgqueue.queue as q
        where q.name in (_has_caps.queue, '') and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
    );
end;
$$;

comment on function pgqueue._has_caps(text) is 'Whether a queue, or a kind or group in it, has a cap.';

create or replace function pgqueue._has_running_caps(queue text)
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    return pg_relation_size('pgqueue.queue_cap_idx') > 8192 and exists (
        select from pgqueue.queue as q
        where q.name in (_has_running_caps.queue, '')
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0 and left(q.group_key, 1) = ''
            and q.max_running is not null
    );
end;
$$;

comment on function pgqueue._has_running_caps(text) is
'Whether a queue, or a kind in it, has a max_running: then the end of a job lets
another begin.';

create or replace function pgqueue._has_group_rates(queue text)
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    return exists (
        select from pgqueue.queue as q
        where q.name in (_has_group_rates.queue, '') and left(q.group_key, 1) > ''
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
    );
end;
$$;

comment on function pgqueue._has_group_rates(text) is 'Whether any group of a queue has a rate.';

create or replace function pgqueue._caps(queue text, kinds text[])
    returns pgqueue._cap[]
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
as $$
begin
    return array(
        select row(s.kind, '', c.is_rate, c.most, coalesce(s.period, '1 second'))::pgqueue._cap
        from (
            select
                q.kind,
                coalesce(max(q.max_running) filter (where q.name <> ''), max(q.max_running)) as max_running,
                coalesce(max(q.rate_limit) filter (where q.name <> ''), max(q.rate_limit)) as rate_limit,
                coalesce(max(q.rate_period) filter (where q.name <> ''), max(q.rate_period)) as period
            from pgqueue.queue as q
            where q.name in (_caps.queue, '') and left(q.group_key, 1) = ''
                and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
                and (kinds is null or q.kind = '' or q.kind = any (kinds))
            group by q.kind
        ) as s
        cross join lateral (values (false, s.max_running), (true, s.rate_limit)) as c (is_rate, most)
        where c.most is not null
        order by s.kind = '', s.kind, c.is_rate
    );
end;
$$;

comment on function pgqueue._caps(text, text[]) is
'The caps in force for some kinds (null: all) and then for the queue itself. A
rate_period that nobody says is a second, as in _in_force().';

create or replace function pgqueue._group_rates(queue text, group_keys text[])
    returns pgqueue._cap[]
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_hashjoin = on
    set enable_nestloop = off
    set enable_mergejoin = off
as $$
begin
    if not pgqueue._has_group_rates(queue) then
        return '{}'::pgqueue._cap[];
    end if;
    return array(
        with own as materialized (
            select
                q.group_key as key,
                coalesce(max(q.rate_limit) filter (where q.name <> ''), max(q.rate_limit)) as rate_limit,
                coalesce(max(q.rate_period) filter (where q.name <> ''), max(q.rate_period)) as period
            from pgqueue.queue as q
            where q.group_key = any (group_keys || '*'::text) and q.kind = ''
                and q.name in (_group_rates.queue, '')
            group by q.group_key
        )
        select row(
            '', g.key, true, coalesce(o.rate_limit, e.rate_limit), coalesce(o.period, e.period, '1 second')
        )::pgqueue._cap
        from (select distinct u.key from unnest(group_keys) as u (key) where u.key is not null) as g
        left join own as o on o.key = g.key
        left join own as e on e.key = '*'
        where coalesce(o.rate_limit, e.rate_limit) is not null
        order by g.key
    );
end;
$$;

comment on function pgqueue._group_rates(text, text[]) is 'The rates in force for some groups of a queue.';

create or replace function pgqueue._room(
    queue text, caps pgqueue._cap[], wanted int, moment timestamptz, out jobs int, out full_kinds text[],
    out last_places int[], out free_at timestamptz, out is_complete boolean
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    full_caps int[];
begin
    select
        least(wanted, min(f.free) filter (where f.kind = '')),
        coalesce(array_agg(f.kind) filter (where f.kind <> '' and f.free = 0), '{}'),
        array_agg(f.last_place order by f.nth),
        coalesce(bool_and(f.is_complete), true),
        array_agg(f.nth) filter (where f.free = 0)
    into jobs, full_kinds, last_places, is_complete, full_caps
    from pgqueue._free_permits(queue, caps, wanted, moment) as f;
    if full_caps is not null then
        free_at := (
            select min(p.free_at)
            from unnest(full_caps) as f (cap)
            cross join lateral pgqueue._permits(queue, caps[f.cap], moment) as p
        );
    end if;
end;
$$;

comment on function pgqueue._room(text, pgqueue._cap[], int, timestamptz) is
'How many more jobs of a queue, up to so many, may begin as far as its own caps
say; which of its kinds are full; up to which place the permits of each cap may
be taken; when the first one of a full cap is free at the latest; and whether
all permits are there.';

create or replace function pgqueue._end_expired(queue text, moment timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    perform pgqueue._expire(
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
a queue full does not meet them in their lanes.';

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
    picks tid[], caps pgqueue._cap[], out demanded int[], out job_ids bigint[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_hashjoin = on
    set enable_nestloop = off
    set enable_mergejoin = off
as $$
begin
    select array_agg(c.nth order by c.nth), array_agg(j.id order by c.nth) into demanded, job_ids
    from pgqueue.job as j
    cross join lateral (values ('', j.group_key), (j.kind, ''), ('', '')) as s (kind, group_key)
    join unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth)
        on c.kind = s.kind and c.group_key = s.group_key
    where j.ctid = any (picks);
end;
$$;

comment on function pgqueue._demand(tid[], pgqueue._cap[]) is
'In pairs, which of some caps hold for which of the picked jobs, in the order of
the caps.';

create or replace function pgqueue._in_order(picks tid[], moment timestamptz, age_after interval)
    returns bigint[]
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
    return array(
        with picked as materialized (
            select
                j.id, coalesce(j.group_key, '') as group_key, coalesce(j.turn, j.run_at) as at,
                pgqueue._aged(j.priority, j.run_at, moment, age_after) as priority,
                row_number() over (partition by j.group_key order by j.priority desc, j.run_at, j.id) as place,
                row_number() over (
                    partition by j.group_key order by j.priority desc, coalesce(j.turn, j.run_at), j.id
                ) as turn
            from pgqueue.job as j
            where j.ctid = any (picks)
        )
        select p.id
        from picked as p
        join picked as t on t.group_key = p.group_key and t.turn = p.place
        order by t.priority desc, t.at, t.id
    );
end;
$$;

comment on function pgqueue._in_order(tid[], timestamptz, interval) is
'The ids of picked jobs in the order in which they are to run: by the turns of
their groups, and within a group by run_at and id.';

create or replace function pgqueue._supply(
    ids bigint[], refused bigint[], demanded int[], job_ids bigint[], supplied int[], permits tid[],
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
        select u.cap, u.id, row_number() over (partition by u.cap order by o.place) as nth
        from unnest(demanded, job_ids) as u (cap, id)
        join unnest(ids) with ordinality as o (id, place) on o.id = u.id
        left join unnest(refused) as r (id) on r.id = u.id
        where r.id is null
    ), has as (
        select u.cap, u.permit, row_number() over (partition by u.cap) as nth
        from unnest(supplied, permits) as u (cap, permit)
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

comment on function pgqueue._supply(bigint[], bigint[], int[], bigint[], int[], tid[]) is
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
    set enable_hashjoin = off
    set enable_mergejoin = off
    set enable_sort = on
as $$
begin
    return array(
        select b.id
        from (
            select
                j.id,
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
    queue text, picks tid[], caps pgqueue._cap[], last_places int[], new_token bigint,
    moment timestamptz, age_after interval,
    out taken tid[], out refused bigint[], out refusing pgqueue._cap[]
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
    rates pgqueue._cap[] := pgqueue._group_rates(
        queue, array(select j.group_key from pgqueue.job as j where j.ctid = any (picks))
    );
    demand record;
    locked record;
    supply record;
    ids bigint[];
begin
    if rates <> '{}' then
        caps := rates || caps;
        last_places := array(
            select f.last_place from pgqueue._free_permits(queue, rates, 0, moment) as f order by f.nth
        ) || last_places;
    end if;
    demand := pgqueue._demand(picks, caps);
    locked := pgqueue._lock_permits(queue, caps, last_places, demand.demanded, moment);
    taken := picks;
    refused := '{}';
    if cardinality(demand.job_ids) > coalesce(cardinality(locked.permits), 0) then
        ids := pgqueue._in_order(picks, moment, age_after);
        supply := pgqueue._supply(
            ids, '{}', demand.demanded, demand.job_ids, locked.supplied, locked.permits
        );
        refusing := array(select caps[r.cap] from unnest(supply.refusing) as r (cap));
        refused := supply.refused_ids || pgqueue._behind(ids, supply.refused_ids);
        supply := pgqueue._supply(
            ids, refused, demand.demanded, demand.job_ids, locked.supplied, locked.permits
        );
        locked.permits := supply.taken;
        demand.job_ids := supply.holders;
    end if;
    update pgqueue.permit as p
    set job_id = t.job_id, token = new_token, taken_at = moment,
        second = extract(epoch from moment - timestamptz '2020-01-01 00:00 UTC')::int
    from unnest(locked.permits, demand.job_ids) as t (tid, job_id)
    where p.ctid = t.tid;
    if refused <> '{}' then
        with leased as (
            update pgqueue.job as j
            -- Until claim() gives it its lease.
            set token = new_token, lease_expires_at = 'infinity'
            where j.ctid = any (picks) and j.id <> all (refused)
            returning j.ctid as tid
        )
        select coalesce(array_agg(l.tid), '{}'::tid[]) into taken from leased as l;
    end if;
end;
$$;

comment on function pgqueue._take_permits(
    text, tid[], pgqueue._cap[], int[], bigint, timestamptz, interval
) is
'Takes a permit of each of its caps for every picked job, and returns those that
got all; if some are refused, it marks the others as taken. Names the caps that
refused.';

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

create or replace function pgqueue._pick_capped(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, age_after interval,
    new_token bigint
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    caps pgqueue._cap[] := pgqueue._caps(queue, kinds);
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
        room := pgqueue._room(queue, caps, max_jobs - cardinality(picks), moment);
        if room.free_at <= moment then
            perform pgqueue._end_expired(queue, moment);
            room := pgqueue._room(queue, caps, max_jobs - cardinality(picks), moment);
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
        next := pgqueue._take_permits(
            queue, found_jobs, caps, room.last_places, new_token, moment, age_after
        );
        picks := picks || next.taken;
        exit when next.refused = '{}';
        perform pgqueue._put_back(queue, kinds, passed, next.refused);
        perform pgqueue._delay_group(queue, r, next.refused, moment)
        from unnest(next.refusing) as r
        where r.group_key <> '';
        full_kinds := full_kinds || array(select r.kind from unnest(next.refusing) as r where r.kind <> '');
        full_groups := full_groups || array(
            select r.group_key from unnest(next.refusing) as r where r.group_key <> ''
        );
        exit when exists (select from unnest(next.refusing) as r where r.kind = '' and r.group_key = '')
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
    room := pgqueue._room(queue, pgqueue._caps(queue, kinds), 1, moment);
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
        -- Not for each job.
        from (select distinct j.queue from pgqueue.job as j where j.ctid = any (picks) offset 0) as e
        where pgqueue._has_running_caps(e.queue);
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
        -- Without a time, because no claim has looked whether it is single.
        false, j.id, j.token, null, j.queue, _count_running_jobs.kind, ''
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
        using (values (false), (true)) as s (is_rate)
        cross join lateral pgqueue._in_force(known.queue, _apply_caps.kind, known.group_key) as settings
        cross join lateral (
            select coalesce(max(u.place) filter (where u.is_held), 0)
            from pgqueue._permits(
                known.queue,
                (coalesce(_apply_caps.kind, ''), coalesce(known.group_key, ''), s.is_rate, 0, settings.rate_period),
                clock_timestamp()
            ) as u
        ) as held (last_place)
        where hashtext(p.queue) = hashtext(known.queue) and p.queue = known.queue
            and p.kind = coalesce(_apply_caps.kind, '') and p.group_key = coalesce(known.group_key, '')
            and p.is_rate = s.is_rate and p.place > greatest(
                held.last_place, case when s.is_rate then settings.rate_limit else settings.max_running end
            );
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
