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
    for cap in select c.* from pgqueue._caps(queue, kinds, null) as c loop
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
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
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
            pgqueue._aged(j.priority, j.run_at, moment, age_after) as priority,
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
