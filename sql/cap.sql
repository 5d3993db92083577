-- Caps of queues and kinds: how many of their jobs run at once (max_running), and how many begin in any
-- period (rate_limit). Those of groups are in module group.
--
-- A claim under caps looks first how many permits are free, and passes over the kinds that have none. It
-- picks, takes the permits, and puts back the jobs that got not all of theirs, of which it then passes
-- over the kind, until it has what it wants.

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
        where q.name in (_has_caps.queue, '') and left(q.group_key, 1) = ''
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
    );
end;
$$;

comment on function pgqueue._has_caps(text) is 'Whether a queue, or a kind in it, has a cap.';

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

create or replace function pgqueue._make_permits_for(queue text, kinds text[], of_all boolean)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    caps pgqueue._cap[];
begin
    -- Those of the queue were made when they were set.
    if of_all and not exists (
        select
        from pgqueue.queue as q
        where q.name = '' and left(q.group_key, 1) = ''
            and num_nonnulls(q.max_running, q.rate_limit, q.rate_period) > 0
    ) then
        return;
    end if;
    caps := pgqueue._caps(queue, kinds);
    perform pgqueue._make_permits(queue, caps, array(select c.most from unnest(caps) as c));
end;
$$;

comment on function pgqueue._make_permits_for(text, text[], boolean) is
'Makes the permits that a queue and some of its kinds (null: all) lack; with
of_all, only where settings of all queues may ask for any.';

create or replace function pgqueue._room(
    queue text, caps pgqueue._cap[], wanted int, moment timestamptz, out jobs int, out full_kinds text[],
    out free_at timestamptz, out is_complete boolean
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
        coalesce(bool_and(f.is_complete), true),
        array_agg(f.nth) filter (where f.free = 0)
    into jobs, full_kinds, is_complete, full_caps
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
say; which of its kinds are full; when the first one of a full cap is free at
the latest; and whether all permits are there.';

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

create or replace function pgqueue._without(paused jsonb, kinds text[])
    returns jsonb
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    if kinds = '{}' then
        return paused;
    end if;
    return (
        select jsonb_object_agg(
            e.key, e.value || (select jsonb_object_agg(k.name, true) from unnest(kinds) as k (name))
        )
        from jsonb_each(coalesce(paused, '{"": {"": false}}')) as e
    );
end;
$$;

comment on function pgqueue._without(jsonb, text[]) is
'What a claim passes over: what is paused, and some kinds.';

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
    cross join lateral (values (j.kind), ('')) as s (kind)
    join unnest(caps) with ordinality as c (kind, group_key, is_rate, most, period, nth) on c.kind = s.kind
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
        select j.id
        from pgqueue.job as j
        where j.ctid = any (picks)
        order by pgqueue._aged(j.priority, j.run_at, moment, age_after) desc, j.run_at, j.id
    );
end;
$$;

comment on function pgqueue._in_order(tid[], timestamptz, interval) is
'The ids of picked jobs in the order in which they are to run.';

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

create or replace function pgqueue._behind(ids bigint[], refused bigint[], new_token bigint)
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
            where j.group_key is not null and exists (
                select
                from pgqueue.permit as p
                where hashtext(p.queue) = hashtext(j.queue) and hashtext(p.kind) = hashtext('')
                    and hashtext(p.group_key) = hashtext(j.group_key) and not p.is_rate
                    and p.queue = j.queue and p.kind = '' and p.group_key = j.group_key
                    and p.job_id = j.id and p.token = new_token
            )
        ) as b
        where b.is_behind and b.id <> all (refused)
    );
end;
$$;

comment on function pgqueue._behind(bigint[], bigint[], bigint) is
'Of some jobs, in their order, those that stand behind refused ones of their
groups, if these have a limit: none may overtake another.';

create or replace function pgqueue._take_permits(
    queue text, picks tid[], caps pgqueue._cap[], new_token bigint, moment timestamptz, age_after interval,
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
    demand record;
    locked record;
    supply record;
    ids bigint[];
begin
    demand := pgqueue._demand(picks, caps);
    locked := pgqueue._lock_permits(
        queue, caps,
        array(
            select (select count(*) from unnest(demand.demanded) as d (cap) where d.cap = n)::int
            from generate_series(1, cardinality(caps)) as n
        ),
        new_token, moment
    );
    taken := picks;
    refused := '{}';
    if cardinality(demand.job_ids) > coalesce(cardinality(locked.permits), 0) then
        ids := pgqueue._in_order(picks, moment, age_after);
        supply := pgqueue._supply(
            ids, '{}', demand.demanded, demand.job_ids, locked.caps_of, locked.permits
        );
        refusing := array(select caps[r.cap] from unnest(supply.refusing) as r (cap));
        refused := supply.refused_ids || pgqueue._behind(ids, supply.refused_ids, new_token);
        supply := pgqueue._supply(
            ids, refused, demand.demanded, demand.job_ids, locked.caps_of, locked.permits
        );
        locked.permits := supply.taken;
        demand.job_ids := supply.holders;
    end if;
    perform pgqueue._give_permits(locked.permits, demand.job_ids, new_token, moment);
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

comment on function pgqueue._take_permits(text, tid[], pgqueue._cap[], bigint, timestamptz, interval) is
'Takes a permit of each of its caps for every picked job, and returns those that
got all; if some are refused, it marks the others as taken. Names the caps that
refused.';

create or replace function pgqueue._put_back(
    queue text, kinds text[], paused jsonb, job_ids bigint[], new_token bigint, moment timestamptz
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    back record;
begin
    perform pgqueue._return_position(queue, kinds, paused, l.priority, l.at)
    from (
        select j.priority, min(j.run_at) as at
        from pgqueue.job as j
        where j.id = any (job_ids) and j.group_key is null
        group by j.priority
    ) as l;
    select
        array_agg(j.id) as ids, array_agg(j.group_key) as keys, array_agg(j.priority) as priorities,
        array_agg(j.queue) as queues, array_agg(j.run_at) as ats
    into back
    from pgqueue.job as j
    where j.id = any (job_ids) and j.group_key is not null;
    if back.ids is null then
        return;
    end if;
    -- As if this claim had not taken them.
    update pgqueue.permit as p
    set token = null, taken_at = null, second = null
    from unnest(back.ids, back.keys) as b (id, key)
    where hashtext(p.queue) = hashtext(_put_back.queue) and hashtext(p.kind) = hashtext('')
        and hashtext(p.group_key) = hashtext(b.key)
        and p.queue = _put_back.queue and p.kind = '' and p.group_key = b.key
        and p.job_id = b.id and p.token = new_token;
    -- The turn of their groups comes next.
    update pgqueue.ticket as t
    set at = _put_back.moment - interval '1 minute', served = 0, is_blocked = false, is_full = false
    where t.ctid = any (array(
        select t.ctid
        from unnest(back.keys, back.priorities) as b (key, priority)
        join pgqueue.ticket as t
            on hashtextextended(t.group_key, hashtext(t.queue)) = hashtextextended(b.key, hashtext(_put_back.queue))
            and t.priority = b.priority and t.queue = _put_back.queue and t.group_key = b.key
        for update of t skip locked
    ));
    perform pgqueue._insert_tickets(back.queues, back.keys, back.priorities, back.ats);
end;
$$;

comment on function pgqueue._put_back(text, text[], jsonb, bigint[], bigint, timestamptz) is
'Leaves jobs that were picked, and found no permit, to the next claim, with the
permits of their groups.';

create or replace function pgqueue._pick_with_permits(
    queue text, kinds text[], paused jsonb, caps pgqueue._cap[], max_jobs int, moment timestamptz, age_after interval,
    new_token bigint
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    locked record := pgqueue._lock_permits(
        queue, caps, array_fill(max_jobs, array[cardinality(caps)]), new_token, moment
    );
    jobs int := (
        select min((select count(*) from unnest(locked.caps_of) as u (cap) where u.cap = n))
        from generate_series(1, cardinality(caps)) as n
    );
    found_jobs record;
    given record;
begin
    if jobs = 0 then
        return null;
    end if;
    found_jobs := pgqueue._pick_lanes(
        queue, kinds, paused, jobs, moment, pgqueue._noted_lanes(queue, moment), age_after, new_token
    );
    if found_jobs.picks <> '{}' then
        select array_agg(p.permit) as permits, array_agg(j.id) as ids into given
        from (
            select u.permit, row_number() over (partition by u.cap) as nth
            from unnest(locked.permits, locked.caps_of) as u (permit, cap)
        ) as p
        join unnest(found_jobs.picks) with ordinality as k (tid, nth) on k.nth = p.nth
        join pgqueue.job as j on j.ctid = k.tid;
        perform pgqueue._give_permits(given.permits, given.ids, new_token, moment);
    end if;
    return found_jobs.picks;
end;
$$;

comment on function pgqueue._pick_with_permits(
    text, text[], jsonb, pgqueue._cap[], int, timestamptz, interval, bigint
) is
'_pick_capped where only the queue itself has caps: locks the permits first, and
then picks as many jobs; null where it gets none. Plans as _pick_capped sets it.';

create or replace function pgqueue._pick_capped(
    queue text, kinds text[], paused jsonb, max_jobs int, moment timestamptz, age_after interval,
    new_token bigint
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    caps pgqueue._cap[] := pgqueue._caps(queue, kinds);
    picks tid[] := '{}'::tid[];
    room record;
    passed jsonb;
    found_jobs record;
    next record;
    full_kinds text[] := '{}'::text[];
begin
    if not exists (select from unnest(caps) as c where c.kind <> '') then
        picks := pgqueue._pick_with_permits(queue, kinds, paused, caps, max_jobs, moment, age_after, new_token);
        if picks is not null then
            return picks;
        end if;
        picks := '{}';
    end if;
    loop
        room := pgqueue._room(queue, caps, max_jobs - cardinality(picks), moment);
        if room.free_at <= moment then
            perform pgqueue._end_expired(queue, moment);
            room := pgqueue._room(queue, caps, max_jobs - cardinality(picks), moment);
        end if;
        if not room.is_complete then
            perform pgqueue._make_permits_for(queue, kinds, false);
        end if;
        exit when room.jobs <= 0;
        passed := pgqueue._without(paused, room.full_kinds || full_kinds);
        found_jobs := pgqueue._pick_lanes(
            queue, kinds, passed, room.jobs, moment, pgqueue._noted_lanes(queue, moment), age_after, new_token
        );
        exit when found_jobs.picks = '{}';
        next := pgqueue._take_permits(queue, found_jobs.picks, caps, new_token, moment, age_after);
        picks := picks || next.taken;
        exit when next.refused = '{}';
        perform pgqueue._put_back(queue, kinds, passed, next.refused, new_token, moment);
        full_kinds := full_kinds || array(select r.kind from unnest(next.refusing) as r where r.kind <> '');
        exit when exists (select from unnest(next.refusing) as r where r.kind = '')
            -- This claim may not use what it has made.
            or not room.is_complete
            -- The next claim goes on.
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
            until, pgqueue._until_due(queue, kinds, pgqueue._without(paused, room.full_kinds), moment)
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

create or replace function pgqueue._apply_limits(queue text, group_key text)
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
    group_limit int;
begin
    for known in
        select distinct j.queue, j.group_key
        from pgqueue.job as j
        where j.group_key is not null and j.lease_expires_at is not null
            and j.queue = coalesce(_apply_limits.queue, j.queue)
            and coalesce(_apply_limits.group_key, '*') in ('*', j.group_key)
    loop
        group_limit := (pgqueue._in_force(known.queue, '', known.group_key)).group_limit;
        if group_limit is not null then
            perform pgqueue._count_running(
                known.queue, row('', known.group_key, false, group_limit, '1 second')::pgqueue._cap
            );
        end if;
    end loop;
    -- Or the first claim would find none.
    perform pgqueue._make_group_permits(t.queue, array_agg(distinct t.group_key))
    from pgqueue.ticket as t
    where t.queue = coalesce(_apply_limits.queue, t.queue)
        and coalesce(_apply_limits.group_key, '*') in ('*', t.group_key)
    group by t.queue;
    perform pgqueue._unblock_groups(queue, group_key);
end;
$$;

comment on function pgqueue._apply_limits(text, text) is
'After a change of limits or rates of groups: counts what runs, and lets claims
look again at groups that could give no more.';

create or replace function pgqueue._apply_caps(queue text, kind text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = on
    set enable_hashagg = on
as $$
declare
    known_queue text;
    settings pgqueue.queue;
    moment timestamptz := clock_timestamp();
begin
    for known_queue in
        select distinct j.queue from pgqueue.job as j where j.queue = coalesce(_apply_caps.queue, j.queue)
        union
        -- A queue gets its permits before it has jobs.
        select _apply_caps.queue where _apply_caps.queue is not null
    loop
        settings := pgqueue._in_force(known_queue, kind);
        -- No gaps: what is still held keeps all before it, and what a claim is just taking stays.
        delete from pgqueue.permit as d
        where d.ctid = any (array(
            select p.ctid
            from (values (false), (true)) as s (is_rate)
            cross join lateral (
                select coalesce(max(u.place) filter (where u.is_held), 0)
                from pgqueue._permits(
                    known_queue, (coalesce(_apply_caps.kind, ''), '', s.is_rate, 0, settings.rate_period), moment
                ) as u
                offset 0
            ) as held (last_place)
            join pgqueue.permit as p on hashtext(p.queue) = hashtext(known_queue) and p.queue = known_queue
                and p.kind = coalesce(_apply_caps.kind, '') and p.group_key = '' and p.is_rate = s.is_rate
                and p.place > greatest(
                    held.last_place, case when s.is_rate then settings.rate_limit else settings.max_running end
                )
                and (p.taken_at <= moment) is not false
            for update of p skip locked
        ));
        perform pgqueue._make_permits_for(known_queue, array[kind], false);
        if settings.max_running is not null then
            perform pgqueue._count_running(
                known_queue, row(coalesce(kind, ''), '', false, settings.max_running, '1 second')::pgqueue._cap
            );
        end if;
        perform pgqueue._wake(known_queue);
    end loop;
end;
$$;

comment on function pgqueue._apply_caps(text, text) is
'After a change of the caps of a queue or kind, or of all queues: makes or drops
permits, and counts what runs.';
