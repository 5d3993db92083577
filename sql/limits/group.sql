-- Groups: whose jobs a claim takes, and how many of each.
--
-- A claim takes the due tickets, the earliest first, and each group gives as many jobs as its weight
-- says, or a multiple of that if there are fewer groups than jobs wanted. Its ticket then goes to the
-- end. The ticket of a group that gave fewer is settled by what the group still has: nothing, and the
-- ticket is dropped; something for later, and it is set to that time; something due that it cannot give,
-- because it is full, at its rate or paused, and the ticket is blocked: the end of an attempt or a change
-- of settings makes it due, and so does time, first after 100 ms, in the end after 10 s.
--
-- A job of a group with a limit or a rate (group_limit, rate_limit) is taken with a permit of each, which
-- is locked before the job. If the limit is 1 no job overtakes another; if it is n, at most n - 1 do.
--
-- While another session holds a ticket, its group is served without it: an open transaction holds up nobody.
--
-- A claim that leaves jobs out, by their kinds or because they are paused or at a cap, may have to pass over any number
-- of groups. It goes on where the one before it was cut off. When the end is reached, the others look only at tickets
-- that have moved since then and at new jobs, for 20 times as long as all that took, at most a minute (_leave_vain).

-- The weight, limit and rate in force for each of some groups; null for limits or rates if none is set.
-- Like _in_force, for many. may_keep: whether any job may keep its permit for its retry.
create or replace function pgqueue._group_settings(
    queue text, group_keys text[], shared pgqueue.queue_in_force, out weights int[], out limits int[], out rates int[],
    out periods interval[], out may_keep boolean
)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    may_keep := shared.group_on_retry = 'block';
    if shared.has_groups is not true then
        if shared.group_limit is not null then
            limits := array_fill(shared.group_limit, array[cardinality(group_keys)]);
        end if;
        return;
    end if;
    select
        array_agg(coalesce(s.weight, 1) order by g.nth), array_agg(s.group_limit order by g.nth),
        array_agg(s.rate_limit order by g.nth), array_agg(coalesce(s.rate_period, '1 second') order by g.nth),
        coalesce(bool_or(s.may_keep), false)
    into weights, limits, rates, periods, may_keep
    from unnest(group_keys) with ordinality as g (key, nth)
    cross join lateral (
        select
            (array_agg(q.weight order by q.nth) filter (where q.weight is not null))[1] as weight,
            (array_agg(q.group_limit order by q.nth) filter (where q.group_limit is not null))[1] as group_limit,
            (array_agg(q.rate_limit order by q.nth) filter (where q.rate_limit is not null))[1] as rate_limit,
            (array_agg(q.rate_period order by q.nth) filter (where q.rate_period is not null))[1] as rate_period,
            bool_or(q.group_on_retry = 'block') as may_keep
        from (
            select
                n.nth, q.weight, q.group_limit, q.group_on_retry,
                -- Rates of the queue are not rates of its groups.
                case when n.key <> '' then q.rate_limit end as rate_limit,
                case when n.key <> '' then q.rate_period end as rate_period
            from (
                values
                    (1, _group_settings.queue, g.key), (2, '', g.key), (3, _group_settings.queue, '*'), (4, '', '*'),
                    (5, _group_settings.queue, ''), (6, '', '')
            ) as n (nth, name, key)
            join pgqueue.queue as q on q.name = n.name and q.kind = '' and q.group_key = n.key
        ) as q
    ) as s;
    if num_nonnulls(variadic limits) = 0 then
        limits := null;
    end if;
    if num_nonnulls(variadic rates) = 0 then
        rates := null;
    end if;
end;
$$;

-- The caps of some groups, the group's number for each, and how many of its permits are wanted.
create or replace function pgqueue._group_caps(
    group_keys text[], limits int[], rates int[], periods interval[], wanted int[],
    out caps pgqueue._cap[], out groups int[], out wants int[]
)
    language plpgsql
    immutable
as $$
begin
    caps := array(
        select row('', g.key, c.is_rate, c.most, c.period)::pgqueue._cap
        from unnest(group_keys, limits, rates, periods) with ordinality as g (key, most, rate, period, nth)
        cross join lateral (values (false, g.most, interval '1 second'), (true, g.rate, g.period))
            as c (is_rate, most, period)
        where c.most is not null
        order by g.nth, c.is_rate
    );
    select array_agg(g.nth::int order by g.nth, c.is_rate), array_agg(g.wanted order by g.nth, c.is_rate)
    into groups, wants
    from unnest(group_keys, limits, rates, _group_caps.wanted) with ordinality as g (key, most, rate, wanted, nth)
    cross join lateral (values (false, g.most), (true, g.rate)) as c (is_rate, most)
    where c.most is not null;
end;
$$;

-- Creates permits for groups that have a limit or a rate: one for each time that a group is listed, and
-- at least four, unless they already have as many.
create or replace function pgqueue._make_group_permits(queue text, group_keys text[], shared pgqueue.queue_in_force)
    returns void
    language plpgsql
as $$
declare
    keys text[];
    jobs int[];
    settings record;
    of_groups record;
begin
    select array_agg(g.key), array_agg(g.jobs) into keys, jobs
    from (
        select u.key, greatest(count(*), 4)::int as jobs
        from unnest(group_keys) as u (key)
        where u.key is not null
        group by u.key
    ) as g;
    if keys is null then
        return;
    end if;
    settings := pgqueue._group_settings(queue, keys, shared);
    if num_nonnulls(settings.limits, settings.rates) > 0 then
        of_groups := pgqueue._group_caps(keys, settings.limits, settings.rates, settings.periods, jobs);
        perform pgqueue._make_permits(queue, of_groups.caps, of_groups.wants);
    end if;
end;
$$;

-- Locks due jobs of groups without caps, of each at most as many as it gives, and in all as many as
-- wanted; says to which group each belongs, and since when any is over. Plans as _pick_groups sets it.
create or replace function pgqueue._take_free(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], starts timestamptz[],
    wanted int, moment timestamptz, taken tid[], has_recovered boolean,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz
)
    language plpgsql
as $$
begin
    select
        array_agg(v.tid), array_agg(v.nth::int), array_agg(v.run_at), min(v.run_at) filter (where v.is_over)
    into picks, groups, run_ats, over_at
    from (
        select h.*, g.nth
        from unnest(group_keys, gives, starts) with ordinality as g (key, give, start, nth)
        cross join lateral (
            select
                j.ctid as tid, j.run_at,
                coalesce(j.lease_expires_at, (j.terms).expires_at) <= _take_free.moment as is_over
            from pgqueue.job as j
            where pgqueue._is_in_group(j, _take_free.queue, g.key)
                and -j.priority = -_take_free.priority
                and pgqueue._is_ready(j, g.start, _take_free.moment, has_recovered)
                and pgqueue._is_wanted(j.kind, j.group_key, _take_free.kinds, _take_free.paused)
                -- Of a group that is paused as a whole none is read.
                and (_take_free.paused -> g.key = '{"": true}') is not true
                and (taken is null or j.ctid <> all (taken))
            order by j.run_at, j.id
            limit g.give
            for update skip locked
        ) as h
        -- In the order of the groups: what comes after the last is not touched.
        limit wanted
    ) as v;
end;
$$;

-- Whether a group has a due job of a higher priority. Plans as _pick_groups sets it.
create or replace function pgqueue._has_higher(
    queue text, group_key text, priority int, moment timestamptz
)
    returns boolean
    language plpgsql
as $$
begin
    return (
        select true
        from pgqueue.job as h
        where pgqueue._is_in_group(h, _has_higher.queue, _has_higher.group_key)
            and -h.priority < -_has_higher.priority
            and h.run_at <= moment and h.lease_expires_at is null
            and ((h.terms).expires_at <= moment) is not true
        -- By the index of the groups.
        order by -h.priority, h.run_at
        limit 1
    ) is not null;
end;
$$;

-- _take_free for groups that may have a limit: locks permits, and as many due jobs, in order; of those
-- that others have locked it passes over at most extra. is_top: none of these groups has anything of a
-- higher priority. Plans as _pick_groups sets it.
create or replace function pgqueue._take_limited(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[],
    starts timestamptz[], wanted int, extra int, moment timestamptz, taken tid[], has_recovered boolean, is_top boolean,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz, out ids bigint[],
    out permits tid[]
)
    language plpgsql
as $$
declare
    has_surplus boolean := pg_relation_size('pgqueue.permit_surplus_idx') > 8192 and pgqueue._any_surplus(queue);
begin
    select
        array_agg(v.tid), array_agg(v.nth::int), array_agg(v.run_at), min(v.run_at) filter (where v.is_over),
        array_agg(v.id), array_agg(v.permit)
    into picks, groups, run_ats, over_at, ids, permits
    from (
        select g.nth, h.*, p.permits[h.place] as permit
        from unnest(group_keys, gives, limits, starts) with ordinality as g (key, give, most, start, nth)
        -- In order, up to the first that this claim may not take.
        cross join lateral (
            select c.tids[:coalesce(array_position(c.tids, null) - 1, cardinality(c.tids))] as tids
            from (
                -- Asked once: for each job it could change in between, and leave out those before.
                select case when is_top or g.most is distinct from 1
                    or not pgqueue._has_higher(_take_limited.queue, g.key, _take_limited.priority, moment)
                then array(
                    select case when w.is_wanted then j.ctid end
                    from pgqueue.job as j
                    cross join lateral (
                        select pgqueue._is_wanted(j.kind, j.group_key, _take_limited.kinds, _take_limited.paused) as is_wanted
                    ) as w
                    where pgqueue._is_in_group(j, _take_limited.queue, g.key)
                        and -j.priority = -_take_limited.priority
                        and pgqueue._is_ready(j, g.start, _take_limited.moment, has_recovered)
                        -- Only if a limit requires order does a job that is left out hold up the next.
                        and (g.most is not null or w.is_wanted)
                        and (taken is null or j.ctid <> all (taken))
                    order by j.run_at, j.id
                    limit g.give + least(coalesce(g.most - 1, extra), extra)
                ) else '{}'::tid[] end as tids
                offset 0
            ) as c
            offset 0
        ) as c
        cross join lateral (
            select
                case when g.most is not null then array(
                    select p.ctid
                    from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, _take_limited.queue, '', g.key)
                        and pgqueue._is_free(p, false, g.most, moment)
                        and (p.taken_at is not null or not pgqueue._is_double(p))
                        and not (has_surplus and pgqueue._has_surplus(_take_limited.queue, '', g.key))
                    order by p.free_at desc
                    limit least(g.give, cardinality(c.tids))
                    for update skip locked
                ) end as permits
            offset 0
        ) as p
        cross join lateral (
            select l.*, row_number() over () as place
            from (
                select k.*
                from unnest(c.tids) as u (tid)
                cross join lateral (
                    select
                        k.ctid as tid, k.id, k.run_at,
                        coalesce(k.lease_expires_at, (k.terms).expires_at) <= _take_limited.moment as is_over
                    from pgqueue.job as k
                    where k.ctid = u.tid and pgqueue._is_ready(k, '-infinity', _take_limited.moment, has_recovered)
                    for update skip locked
                ) as k
                limit least(g.give, cardinality(p.permits))
            ) as l
        ) as h
        -- In the order of the groups: what comes after the last is not touched.
        limit wanted
    ) as v;
end;
$$;

-- Locks jobs whose retries are due and that have kept the permits of their groups; left_over: what their
-- groups may give in addition. Plans as _pick_groups sets it.
create or replace function pgqueue._take_kept(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[], wanted int,
    moment timestamptz,
    out picks tid[], out ids bigint[], out groups int[], out permits tid[], out left_over int[]
)
    language plpgsql
as $$
begin
    select array_agg(k.tid), array_agg(k.id), array_agg(k.nth::int), array_agg(k.permit)
    into picks, ids, groups, permits
    from (
        select g.nth, h.*
        from unnest(group_keys, gives, limits) with ordinality as g (key, give, most, nth)
        cross join lateral (
            select j.ctid as tid, j.id, p.ctid as permit
            from pgqueue.permit as p
            -- As a join it might read all jobs.
            cross join lateral (
                select j.ctid, j.id
                from pgqueue.job as j
                where j.id = p.job_id and pgqueue._is_kept(p, j, _take_kept.moment)
                    and ((j.terms).expires_at <= _take_kept.moment) is not true
                    and j.priority = _take_kept.priority
                    and pgqueue._is_wanted(j.kind, j.group_key, _take_kept.kinds, _take_kept.paused)
                offset 0
            ) as j
            where pgqueue._is_permit_of(p, _take_kept.queue, '', g.key) and p.place <= g.most
                -- A claim may come to a group twice.
                and p.taken_at is distinct from _take_kept.moment
            limit g.give
            for update skip locked
        ) as h
        limit wanted
    ) as k;
    left_over := array(
        select g.give - (select count(*) from unnest(groups) as k (nth) where k.nth = g.nth)::int
        from unnest(gives) with ordinality as g (give, nth) order by g.nth
    );
end;
$$;

-- How many jobs some groups may give according to their rates. Plans as _pick_groups sets it.
create or replace function pgqueue._rate_gives(
    queue text, group_keys text[], gives int[], rates int[], periods interval[], moment timestamptz
)
    returns int[]
    language plpgsql
as $$
declare
    of_groups record := pgqueue._group_caps(group_keys, null, rates, periods, null);
    room record := pgqueue._room(queue, of_groups.caps, (select max(u.give) from unnest(gives) as u (give)), moment);
begin
    return array(
        select least(f.free, g.give)
        from unnest(gives) with ordinality as g (give, nth)
        left join unnest(of_groups.groups, room.free) as f (of, free) on f.of = g.nth
        order by g.nth
    );
end;
$$;

-- Locks a permit to begin for each picked job whose group has a rate, the groups given by their numbers;
-- returns which jobs get none. Plans as _pick_groups sets it.
create or replace function pgqueue._take_rates(
    queue text, group_keys text[], rates int[], periods interval[], groups int[], moment timestamptz,
    out permits tid[], out free_ats timestamptz[], out refused int[]
)
    language plpgsql
as $$
declare
    of_groups record := pgqueue._group_caps(
        group_keys, null, rates, periods,
        array(
            select (select count(*) from unnest(groups) as u (of) where u.of = g.nth)::int
            from generate_series(1, cardinality(group_keys)) as g (nth) order by g.nth
        )
    );
    locked record := pgqueue._lock_free(queue, of_groups.caps, of_groups.wants, moment);
begin
    select
        array_agg(l.tid order by u.place), array_agg(moment + periods[u.of] order by u.place),
        array_agg(u.place::int) filter (where l.tid is null and rates[u.of] is not null)
    into permits, free_ats, refused
    from (
        select u.of, u.place, row_number() over (partition by u.of order by u.place) as nth
        from unnest(groups) with ordinality as u (of, place)
    ) as u
    left join (
        select of_groups.groups[l.cap] as of, l.tid, row_number() over (partition by l.cap) as nth
        from unnest(locked.caps_of, locked.permits) as l (cap, tid)
    ) as l on l.of = u.of and l.nth = u.nth;
end;
$$;

-- Takes jobs of some groups, of each at most as many as it gives, and in all as many as wanted: which,
-- and of which group; with permits if they need any, for the claim of this token, drawn here if null:
-- which job has which. How long it stays valid that nothing is before them, if the walk was long; or
-- since when anything there is over: then all has to be done again.
create or replace function pgqueue._visit_groups(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[], rates int[],
    periods interval[], may_keep boolean, starts timestamptz[], wanted int, extra int, moment timestamptz, taken tid[],
    has_recovered boolean, is_top boolean, inout new_token bigint,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz,
    out job_of bigint[], out permits tid[], out believed_until timestamptz
)
    language plpgsql
as $$
declare
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass)
        + pg_stat_get_xact_tuples_returned('pgqueue.permit_scope_idx'::regclass);
    kept record;
    visit record;
    of_rates record;
    given record;
begin
    if rates is not null then
        gives := pgqueue._rate_gives(queue, group_keys, gives, rates, periods, moment);
    end if;
    if limits is null then
        visit := pgqueue._take_free(
            queue, kinds, paused, priority, group_keys, gives, starts, wanted, moment, taken, has_recovered
        );
    else
        if may_keep then
            kept := pgqueue._take_kept(queue, kinds, paused, priority, group_keys, gives, limits, wanted, moment);
            taken := taken || kept.picks;
            wanted := wanted - coalesce(cardinality(kept.picks), 0);
            gives := kept.left_over;
        end if;
        visit := pgqueue._take_limited(
            queue, kinds, paused, priority, group_keys, gives, limits, starts, wanted, extra, moment, taken,
            has_recovered, is_top
        );
        job_of := visit.ids;
        permits := visit.permits;
    end if;
    picks := visit.picks;
    groups := visit.groups;
    run_ats := visit.run_ats;
    over_at := visit.over_at;
    -- Finished jobs and taken permits, kept by some old snapshot, are in the way.
    if pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass)
        + pg_stat_get_xact_tuples_returned('pgqueue.permit_scope_idx'::regclass) - walked
        > (25 + extra) * cardinality(group_keys) + 6 * coalesce(cardinality(picks), 0)
    then
        believed_until := pgqueue._believed_until(began, '1 second');
        perform setval('pgqueue._cell_groups_slow', pgqueue._since_2020(clock_timestamp() + interval '10 seconds'));
    end if;
    if over_at is not null then
        return;
    end if;
    if limits is not null and may_keep then
        picks := kept.picks || picks;
        groups := kept.groups || groups;
        -- A retry that comes first says nothing about those behind it.
        run_ats := array_fill('-infinity'::timestamptz, array[coalesce(cardinality(kept.picks), 0)]) || run_ats;
        job_of := kept.ids || job_of;
        permits := kept.permits || permits;
    end if;
    if picks is null or num_nonnulls(limits, rates) = 0 then
        return;
    end if;
    new_token := coalesce(new_token, nextval('pgqueue.token_seq'));
    if rates is not null then
        of_rates := pgqueue._take_rates(queue, group_keys, rates, periods, groups, moment);
        select
            array_agg(u.tid) as picks, array_agg(u.of) as groups, array_agg(u.run_at) as run_ats,
            array_agg(j.id) filter (where u.permit is not null) as ids,
            array_agg(u.permit) filter (where u.permit is not null) as permits,
            array_agg(j.id) filter (where u.rate_permit is not null) as rate_ids,
            array_agg(u.rate_permit) filter (where u.rate_permit is not null) as rate_permits,
            array_agg(u.free_at) filter (where u.rate_permit is not null) as free_ats
        into given
        from unnest(picks, groups, run_ats, permits, of_rates.permits, of_rates.free_ats) with ordinality
            as u (tid, of, run_at, permit, rate_permit, free_at, place)
        cross join lateral (select j.id from pgqueue.job as j where j.ctid = u.tid offset 0) as j
        where (u.place = any (of_rates.refused)) is not true;
        picks := given.picks;
        groups := given.groups;
        run_ats := given.run_ats;
        job_of := given.ids || given.rate_ids;
        permits := given.permits || given.rate_permits;
        permits := pgqueue._give_permits(
            permits, job_of, new_token, moment,
            array_fill(null::timestamptz, array[coalesce(cardinality(given.ids), 0)]) || given.free_ats
        );
    else
        if array_position(permits, null) > 0 then
            -- Some of these groups have no limit.
            select array_agg(u.id), array_agg(u.permit) into job_of, permits
            from unnest(job_of, permits) as u (id, permit) where u.permit is not null;
        end if;
        permits := pgqueue._give_permits(permits, job_of, new_token, moment);
    end if;
end;
$$;

-- Of some groups that gave fewer jobs than asked for: which are short of permits, and which of these will
-- have more. again: what to ask once more of those that are no longer full. Plans as _pick_groups sets
-- it.
create or replace function pgqueue._look_for_permits(
    queue text, group_keys text[], gives int[], limits int[], rates int[], periods interval[], groups int[],
    moment timestamptz, new_token bigint, out short int[], out lacking int[], out again int[]
)
    language plpgsql
as $$
declare
    own_token bigint := -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0);
    vain_keys text[];
    vain_limits int[];
    wanting record;
    of_groups record;
    made text[];
begin
    select
        array_agg(g.nth::int), array_agg(g.nth::int) filter (where g.has_own),
        array_agg(g.key) filter (where g.gave = 0), array_agg(g.most) filter (where g.gave = 0)
    into short, lacking, vain_keys, vain_limits
    from (
        select
            g.*, coalesce(f.jobs, 0) as gave,
            coalesce(p.has_own, false) as has_own,
            g.most is not null and (p.may_run is not true or p.has_surplus) or p.has_copies
                or g.rate is not null and p.may_begin is not true as is_short
        from unnest(group_keys, gives, limits, rates) with ordinality as g (key, give, most, rate, nth)
        left join (select f.of, count(*) as jobs from unnest(groups) as f (of) group by f.of) as f on f.of = g.nth
        cross join lateral (
            select
                bool_or(p.token = own_token) as has_own, bool_or(p.is_surplus) as has_surplus,
                count(*) > count(distinct case when p.is_rate then -p.place else p.place end) as has_copies,
                bool_or(not p.is_rate and p.free_at < 'infinity' and p.place <= g.most and p.token is distinct from own_token)
                    as may_run,
                bool_or(p.is_rate and p.free_at <= moment and p.place <= g.rate and p.token is distinct from own_token)
                    as may_begin
            from pgqueue.permit as p
            where pgqueue._is_permit_of(p, _look_for_permits.queue, '', g.key)
        ) as p
        where num_nonnulls(g.most, g.rate) > 0 and coalesce(f.jobs, 0) < g.give
    ) as g
    where g.is_short;
    if short is null then
        -- Others may have locked what came first.
        again := array(
            select greatest(g.give - (select count(*) from unnest(groups) as f (of) where f.of = g.nth), 0)::int
            from unnest(gives) with ordinality as g (give, nth) order by g.nth
        );
        return;
    end if;
    -- Full, and it gives nothing: are all holders of the permits still running?
    if vain_keys is not null and pgqueue._review_permits(queue, '', vain_keys, vain_limits, moment, new_token)
        + pgqueue._forget_future(queue, '', case when rates is not null then vain_keys end, moment) > 0
    then
        again := array(
            select case when g.key = any (vain_keys) then g.give else 0 end
            from unnest(group_keys, gives) with ordinality as g (key, give, nth) order by g.nth
        );
    end if;
    -- For the next claim: this one may not take what it creates.
    select
        array_agg(g.key) as keys, array_agg(g.most) as limits, array_agg(g.rate) as rates,
        array_agg(g.period) as periods, array_agg(g.give) as gives
    into wanting
    from unnest(group_keys, limits, rates, periods, gives) with ordinality as g (key, most, rate, period, give, nth)
    where g.nth = any (short);
    of_groups := pgqueue._group_caps(wanting.keys, wanting.limits, wanting.rates, wanting.periods, wanting.gives);
    made := pgqueue._make_permits(queue, of_groups.caps, of_groups.wants, 1000);
    lacking := lacking || array(
        select g.nth::int from unnest(group_keys) with ordinality as g (key, nth) where g.key = any (made)
    );
end;
$$;

-- How long not to look at a group that can give no more jobs, unless a hint says that it can: longer each
-- time, from 100 ms to 10 s.
create or replace function pgqueue._pause_of_group(served int, gave int)
    returns interval
    language sql
    immutable
as $$
    select least(
        interval '10 seconds',
        interval '100 milliseconds' * power(4, case when gave > 0 then 0 else least(greatest(-served, 0), 4) end)
    )
$$;

-- Sets when to look next at each of the groups that a claim came to: see above. has_enough: the claim has
-- enough, perhaps before the last turn was over. Plans as _pick_groups sets it.
create or replace function pgqueue._settle_tickets(
    queue text, priority int, tickets tid[], group_keys text[], gives int[], limits int[], has_enough boolean,
    groups int[], run_ats timestamptz[], short int[], lacking int[], starts timestamptz[], start_until timestamptz,
    paused jsonb, is_filtered boolean, taken tid[], moment timestamptz
)
    returns void
    language plpgsql
as $$
declare
    -- Read once, because their order counts.
    last timestamptz := clock_timestamp();
    -- Then looking at a full one is expensive.
    is_slow boolean := coalesce(
        pg_sequence_last_value('pgqueue._cell_groups_slow') > pgqueue._since_2020(moment), false
    );
    rates int[] := case when short is not null
        then (pgqueue._group_settings(queue, group_keys, pgqueue._in_force(queue))).rates
    end;
begin
    if start_until is null and (limits is null or not is_slow)
        and gives[1] = all (gives) and cardinality(groups) = cardinality(tickets) * gives[1]
    then
        -- Deep queues: all go to the end.
        update pgqueue.ticket as t
        set at = last + g.nth * interval '1 microsecond', served = 0, is_blocked = false, is_full = false
        from unnest(tickets) with ordinality as g (tid, nth)
        where t.ctid = g.tid;
        return;
    end if;
    with verdict as (
        select
            g.*,
            case
                -- The claim had enough before this one's turn was over.
                when g.is_cut and g.gave < g.give then 'same'
                when g.gave = g.give and (g.gave = g.most and is_slow) is not true then 'tail'
                when left_job.run_at is null then 'gone'
                when left_job.run_at > moment then 'later'
                when g.gave = g.most and is_slow then 'full'
                when g.is_lacking then 'tail'
                -- Or its place is kept for a retry that is due, and that this claim may not take.
                when g.is_short and not (is_filtered and exists (
                    select from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, _settle_tickets.queue, '', g.key) and exists (
                        select from pgqueue.job as j
                        where j.id = p.job_id and pgqueue._is_kept(p, j, _settle_tickets.moment)
                        -- As a join it might read all jobs.
                        offset 0
                    )
                )) then 'blocked'
                -- A group that is not paused as a whole, and needs no order, may have another job.
                when is_filtered or paused is not null and g.most is null and paused -> g.key <> '{"": true}' is not false
                    then 'same'
                else 'blocked'
            end as state,
            left_job.run_at as next_at,
            -- A rate that is used up tells when.
            case when g.is_short and g.rate is not null then (
                select case when count(distinct p.place) = g.rate then min(p.free_at) end
                from pgqueue.permit as p
                where pgqueue._is_permit_of(p, _settle_tickets.queue, '', g.key)
                    and p.is_rate and p.place <= g.rate and p.free_at > moment
            ) end as free_at
        from (
            select
                u.*, has_enough and u.nth = cardinality(tickets) as is_cut, coalesce(f.jobs, 0)::int as gave, f.last_at,
                coalesce(u.nth = any (short), false) as is_short, coalesce(u.nth = any (lacking), false) as is_lacking
            from unnest(tickets, group_keys, gives, limits, rates, starts) with ordinality
                as u (tid, key, give, most, rate, start, nth)
            left join (
                select f.of, count(*) as jobs, max(f.run_at) as last_at
                from unnest(groups, run_ats) as f (of, run_at)
                group by f.of
            ) as f on f.of = u.nth
        ) as g
        left join lateral (
            select j.run_at
            from pgqueue.job as j
            where pgqueue._is_in_group(j, _settle_tickets.queue, g.key)
                and -j.priority = -_settle_tickets.priority
                and j.run_at >= g.start and j.run_at < 'infinity'
                and j.lease_expires_at is null
                and (taken is null or j.ctid <> all (taken))
                and (g.gave < g.give or g.gave = g.most and is_slow)
            order by j.run_at, j.id
            limit 1
        ) as left_job on true
    ), gone as (
        delete from pgqueue.ticket as t
        where t.ctid = any (array(select v.tid from verdict as v where v.state = 'gone'))
    )
    update pgqueue.ticket as t
    set at = case v.state
            when 'same' then t.at
            when 'later' then v.next_at
            when 'full' then moment + interval '1 second' + v.nth * interval '1 microsecond'
            when 'blocked' then greatest(moment + interval '10 milliseconds', case
                when v.free_at is not null then v.free_at else moment + pgqueue._pause_of_group(t.served, v.gave)
            end)
            else last + v.nth * interval '1 microsecond'
        end,
        served = case v.state
            when 'same' then greatest(t.served, 0) + v.gave
            when 'full' then -3
            when 'blocked' then case when v.free_at is not null then 0 when v.gave > 0 then -1 else least(t.served, 0) - 1 end
            else 0
        end,
        is_blocked = v.state in ('full', 'blocked'),
        is_full = v.state = 'full' or v.state = 'blocked' and coalesce(v.is_short, false),
        start_at = case when _settle_tickets.start_until is not null then v.last_at else t.start_at end,
        start_until = coalesce(_settle_tickets.start_until, t.start_until)
    from verdict as v
    where t.ctid = v.tid and v.state <> 'gone' and (v.state <> 'same' or v.gave > 0);
end;
$$;

-- Locks the next due tickets of a lane, and drops copies; if these are few, says how many others have
-- locked. Or, if it may hold none, returns those. Plans as _pick_groups sets it.
create or replace function pgqueue._next_tickets(
    queue text, priority int, start timestamptz, upto timestamptz, most int, may_hold boolean, moment timestamptz,
    out tids tid[], out keys text[], out served int[], out starts timestamptz[],
    out ats timestamptz[], out others int
)
    language plpgsql
as $$
declare
    free tid[];
    copies tid[];
begin
    others := 0;
    if not may_hold then
        tids := array(
            select t.ctid
            from pgqueue.ticket as t
            where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority) and t.at > start and t.at <= upto
            order by t.at
            limit most
        );
        free := array(
            select t.ctid from pgqueue.ticket as t where t.ctid = any (tids) for update skip locked
        );
        select
            array_agg(t.tid order by t.at), array_agg(t.group_key order by t.at), array_agg(0),
            array_agg('-infinity'::timestamptz), array_agg(t.at order by t.at)
        into tids, keys, served, starts, ats
        from (
            select distinct on (t.group_key) t.ctid as tid, t.group_key, t.at
            from pgqueue.ticket as t
            where t.ctid = any (tids) and t.ctid <> all (free)
            order by t.group_key, t.at
        ) as t;
        return;
    end if;
    select array_agg(l.tid), array_agg(l.group_key), array_agg(l.served), array_agg(l.start), array_agg(l.at)
    into tids, keys, served, starts, ats
    from (
        select
            t.ctid as tid, t.group_key, t.served, t.at,
            -- A time from another clock is ignored.
            coalesce(
                case when t.start_until between moment and moment + interval '1 minute' then t.start_at end,
                '-infinity'
            ) as start
        from pgqueue.ticket as t
        where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority) and t.at > start and t.at <= upto
        order by t.at
        limit most
        for update skip locked
    ) as l;
    if cardinality(keys) > 1 and cardinality(keys) > (select count(distinct u.key) from unnest(keys) as u (key)) then
        select
            array_agg(n.tid order by n.place) filter (where n.nth = 1),
            array_agg(n.key order by n.place) filter (where n.nth = 1),
            array_agg(n.served order by n.place) filter (where n.nth = 1),
            array_agg(n.start order by n.place) filter (where n.nth = 1),
            array_agg(n.at order by n.place) filter (where n.nth = 1),
            array_agg(n.tid) filter (where n.nth > 1)
        into tids, keys, served, starts, ats, copies
        from (
            select u.*, row_number() over (partition by u.key order by u.place) as nth
            from unnest(tids, keys, served, starts, ats) with ordinality as u (tid, key, served, start, at, place)
        ) as n;
        delete from pgqueue.ticket as t where t.ctid = any (copies);
    end if;
    if (cardinality(keys) < most) is not false then
        others := (
            select greatest(count(*) - coalesce(cardinality(keys), 0), 0)
            from (
                select
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _next_tickets.queue, _next_tickets.priority)
                    and t.at > start and t.at <= upto
                limit most
            ) as t
        );
    end if;
end;
$$;

-- How many jobs each of some groups may give, by its weight, to a claim that wants this many, and has not
-- come to this many others.
create or replace function pgqueue._gives(weights int[], limits int[], served int[], others int, wanted int)
    returns int[]
    language plpgsql
    immutable
as $$
declare
    each int := ceil(wanted::float8 / (others + (select sum(coalesce(w.weight, 1)) from unnest(weights) as w (weight))));
begin
    return array(
        select least(g.most, greatest(1, each * coalesce(g.weight, 1) - greatest(g.served, 0)))
        from unnest(served, weights, limits) with ordinality as g (served, weight, most, nth)
        order by g.nth
    );
end;
$$;

-- On what terms some groups give jobs to a claim that wants this many, and has not come to this many others: their limits
-- and rates, null if none is set, and how many each may give, by its weight.
create or replace function pgqueue._terms_of_groups(
    queue text, group_keys text[], served int[], others int, wanted int, shared pgqueue.queue_in_force,
    out limits int[], out rates int[], out periods interval[], out may_keep boolean, out gives int[]
)
    language plpgsql
as $$
declare
    settings record;
begin
    if shared.has_groups is not true then
        may_keep := shared.group_on_retry = 'block';
        gives := array_fill(
            least(ceil(wanted::float8 / (cardinality(group_keys) + others)), shared.group_limit)::int,
            array[cardinality(group_keys)]
        );
        if shared.group_limit is not null then
            limits := array_fill(shared.group_limit, array[cardinality(group_keys)]);
        end if;
        return;
    end if;
    settings := pgqueue._group_settings(queue, group_keys, shared);
    limits := settings.limits;
    rates := settings.rates;
    periods := settings.periods;
    may_keep := settings.may_keep;
    gives := pgqueue._gives(settings.weights, limits, served, others, wanted);
end;
$$;

-- _pick_groups in its usual case, in two or three statements: groups without settings of their own, of which
-- the next few give all that is wanted, none of it over; with a permit for each job if the queue sets a limit
-- (most). Or none: then all has to be done again, by _pick_groups.
create or replace function pgqueue._pick_plain_groups(
    queue text, kinds text[], lane int, wanted int, moment timestamptz, most int,
    out picks tid[], out new_token bigint, out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
declare
    key bigint := hashtextextended(concat(queue, kinds), lane);
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
    tag bigint := (key >> 20 & 4095) << 51;
    record int := (key & 15) * 2;
    valid_until bigint := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    begin_at timestamptz := '-infinity'::timestamptz;
    batch int := greatest(least(wanted, 10), ceil(wanted::float8 / least(ceil(sqrt(wanted)), most)));
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass);
    walked_jobs bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    tickets tid[];
    is_over boolean;
    is_enough boolean;
begin
    if (pg_sequence_last_value('pgqueue._cell_groups_due'::regclass) between now_us and now_us + 60000000) is not true then
        perform pgqueue._sweep_groups_if_due(moment, null);
    end if;
    if valid_until >> 51 > 0 then
        -- The second record, when the first is somebody else's.
        record := (key >> 4 & 15) * 2;
        valid_until := nullif(pg_sequence_last_value(('pgqueue._cell_' || record)::regclass), 0) # tag;
    end if;
    if valid_until between now_us and now_us + 60000000 then
        begin_at := timestamptz '2020-01-01 00:00 UTC'
            + interval '1 microsecond' * (pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass) >> 12);
        if pg_sequence_last_value(('pgqueue._cell_' || record + 1)::regclass) & 4095 = 4095 then
            -- There may be none.
            picks := '{}';
            return;
        end if;
    elsif valid_until between now_us - 1000000 and now_us then
        -- A walk from the beginning is due.
        picks := '{}';
        return;
    end if;
    if most is null then
        select array_agg(v.tid), array_agg(v.ticket), bool_or(v.is_over) into picks, tickets, is_over
        from (
            select h.tid, t.tid as ticket, h.is_over
            from (
                select
                    t.ctid as tid, t.group_key,
                    coalesce(
                        case when t.start_until between _pick_plain_groups.moment and _pick_plain_groups.moment + interval '1 minute'
                            then t.start_at end,
                        '-infinity'
                    ) as start
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _pick_plain_groups.queue, lane - 1000)
                    and t.at > begin_at and t.at <= _pick_plain_groups.moment
                order by t.at
                limit batch
                for update skip locked
            ) as t
            cross join lateral (
                select j.ctid as tid, num_nonnulls(j.lease_expires_at, (j.terms).expires_at) > 0 as is_over
                from pgqueue.job as j
                where pgqueue._is_in_group(j, _pick_plain_groups.queue, t.group_key)
                    and -j.priority = 1000 - lane
                    and j.run_at between t.start and _pick_plain_groups.moment
                    and (j.lease_expires_at <= _pick_plain_groups.moment) is not false
                    and (_pick_plain_groups.kinds is null or j.kind = any (_pick_plain_groups.kinds))
                order by j.run_at, j.id
                limit ceil(wanted::float8 / batch)
                for update skip locked
            ) as h
            limit wanted
        ) as v;
    elsif kinds is null and pg_sequence_last_value('pgqueue._cell_groups_slow') > now_us is not true
        and (pg_relation_size('pgqueue.permit_surplus_idx') <= 8192 or not pgqueue._any_surplus(queue))
    then
        select
            array_agg(v.tid), array_agg(v.ticket), bool_or(v.is_over), array_agg(v.id), array_agg(v.permit)
        into picks, tickets, is_over, job_of, permits
        from (
            select h.*, t.tid as ticket, u.permit
            from (
                select t.ctid as tid, t.group_key
                from pgqueue.ticket as t
                where pgqueue._is_ticket_in(t, _pick_plain_groups.queue, lane - 1000)
                    and t.at > begin_at and t.at <= _pick_plain_groups.moment
                order by t.at
                limit batch
                for update skip locked
            ) as t
            -- In order, and none in place of one that another has locked.
            cross join lateral (
                select array(
                    select j.ctid
                    from pgqueue.job as j
                    where pgqueue._is_in_group(j, _pick_plain_groups.queue, t.group_key)
                        and -j.priority = 1000 - lane
                        and j.run_at <= _pick_plain_groups.moment
                        and (j.lease_expires_at <= _pick_plain_groups.moment) is not false
                    order by j.run_at, j.id
                    limit ceil(wanted::float8 / batch)
                ) as tids
                offset 0
            ) as c
            cross join lateral (
                select array(
                    select p.ctid
                    from pgqueue.permit as p
                    where pgqueue._is_permit_of(p, _pick_plain_groups.queue, '', t.group_key)
                        and pgqueue._is_free(p, false, most, _pick_plain_groups.moment)
                        and (p.taken_at is not null or not pgqueue._is_double(p))
                    order by p.free_at desc
                    limit cardinality(c.tids)
                    for update skip locked
                ) as tids
                offset 0
            ) as p
            cross join lateral unnest(c.tids[:cardinality(p.tids)], p.tids) as u (tid, permit)
            cross join lateral (
                select k.ctid as tid, k.id, num_nonnulls(k.lease_expires_at, (k.terms).expires_at) > 0 as is_over
                from pgqueue.job as k
                where k.ctid = u.tid and k.run_at <= _pick_plain_groups.moment
                    and (k.lease_expires_at <= _pick_plain_groups.moment) is not false
                for update skip locked
            ) as h
            limit wanted
        ) as v;
    end if;
    is_enough := cardinality(picks) = wanted and not is_over
        -- Or _pick_groups has to remember where to start.
        and pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass) - walked <= 200 + 3 * (batch + wanted)
        and pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked_jobs < 60 * batch + 3 * wanted;
    if is_enough and wanted > 1 then
        -- A group that has two tickets may come twice.
        is_enough := wanted = (select count(distinct u.tid) from unnest(picks) as u (tid));
    end if;
    if is_enough then
        update pgqueue.ticket as t
        set at = greatest(clock_timestamp(), _pick_plain_groups.moment) + array_position(tickets, t.ctid) * interval '1 microsecond',
            served = 0, is_blocked = false, is_full = false
        where t.ctid = any (tickets);
        if most is not null then
            new_token := nextval('pgqueue.token_seq');
            permits := pgqueue._give_permits(permits, job_of, new_token, moment);
        end if;
        return;
    end if;
    picks := '{}';
    job_of := null;
    permits := null;
end;
$$;

-- _sweep_permits and _sweep_groups each 50 ms, or as _swept_until says.
create or replace function pgqueue._sweep_groups_if_due(moment timestamptz, new_token bigint)
    returns void
    language plpgsql
as $$
declare
    now_us bigint := (date_part('epoch', moment) * 1000000)::bigint - 1577836800000000;
    due_us bigint := pg_sequence_last_value('pgqueue._cell_groups_due'::regclass);
begin
    -- Or it is from another clock.
    if (due_us between now_us and now_us + 60000000) is not true then
        perform setval('pgqueue._cell_groups_due', now_us + 50000);
        perform pgqueue._sweep_permits(new_token), pgqueue._sweep_groups();
        perform setval('pgqueue._cell_groups_due', pgqueue._swept_until(moment, '50 milliseconds'));
    end if;
end;
$$;

-- Sweeps the next 500 groups and 40 pages of permits, or fewer if that takes more than 20 ms from this
-- moment; returns whether these are all.
create or replace function pgqueue._sweep_all(moment timestamptz)
    returns boolean
    language plpgsql
as $$
declare
    -- It continues where the last one stopped, to the end, and from the beginning to the end.
    ends int := 1 + coalesce(pg_sequence_last_value('pgqueue._cell_groups_swept') > -9223372036854775808, false)::int;
    pages int := pg_relation_size('pgqueue.permit') / current_setting('block_size')::int;
begin
    for step in 1 .. 20 loop
        if pages > 0 then
            perform pgqueue._sweep_permits();
            pages := pages - 2;
        end if;
        if ends > 0 then
            ends := ends - ((pgqueue._sweep_some(25))[1] < 25)::int;
        end if;
        if ends = 0 and pages <= 0 then
            return true;
        end if;
        exit when clock_timestamp() > moment + interval '20 milliseconds';
    end loop;
    return false;
end;
$$;

-- _visit_groups, again if anything there is over, and then once more those that turn out not to be full; which groups are
-- short of permits, and which of these will have more. Plans as _pick_groups sets it.
create or replace function pgqueue._serve_groups(
    queue text, kinds text[], paused jsonb, lane int, group_keys text[], gives int[], limits int[], rates int[],
    periods interval[], may_keep boolean, starts timestamptz[], wanted int, moment timestamptz, taken tid[],
    is_top boolean, inout new_token bigint,
    out picks tid[], out groups int[], out run_ats timestamptz[], out job_of bigint[], out permits tid[],
    out believed_until timestamptz, out short int[], out lacking int[]
)
    language plpgsql
as $$
declare
    visit record;
    look record;
begin
    for turn in 1 .. 2 loop
        visit := pgqueue._visit_groups(
            queue, kinds, paused, lane - 1000, group_keys, gives, limits, rates, periods,
            may_keep, starts, wanted, 0, moment, taken, turn = 2, is_top, new_token
        );
        exit when visit.over_at is null;
        perform pgqueue._recover(queue, lane, coalesce(visit.picks, '{}'), visit.over_at, moment);
    end loop;
    new_token := visit.new_token;
    picks := visit.picks;
    groups := visit.groups;
    run_ats := visit.run_ats;
    job_of := visit.job_of;
    permits := visit.permits;
    believed_until := visit.believed_until;
    if num_nonnulls(limits, rates) = 0 or cardinality(picks) >= wanted then
        return;
    end if;
    look := pgqueue._look_for_permits(queue, group_keys, gives, limits, rates, periods, groups, moment, new_token);
    short := look.short;
    lacking := look.lacking;
    if look.again is not null then
        visit := pgqueue._visit_groups(
            queue, kinds, paused, lane - 1000, group_keys, look.again, limits, rates, periods, may_keep, starts,
            wanted - coalesce(cardinality(picks), 0), 100, moment, nullif(taken || picks, '{}'), true, is_top, new_token
        );
        new_token := visit.new_token;
        picks := picks || visit.picks;
        groups := groups || visit.groups;
        run_ats := run_ats || visit.run_ats;
        job_of := job_of || visit.job_of;
        permits := permits || visit.permits;
    end if;
end;
$$;

-- _pick for the lanes of groups: locks at most the wanted number of due jobs, of the groups whose turn it
-- is, with permits if they need any: which job has which. It looks, stage by stage, until it has enough, at
--   new    groups of new jobs, where it believes that the tickets before a position give nothing
--   ahead  tickets from the position on
--   all    all tickets, or those behind the ones that it believes to give nothing
--   guest  groups whose tickets others have locked, without them
--   more   groups that gave all that was asked of them, again
--   last   groups of any job that it may take, of which there may be few, or none, among many others
create or replace function pgqueue._pick_groups(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, is_whole boolean, is_top boolean,
    shared pgqueue.queue_in_force, taken tid[], inout new_token bigint, out picks tid[], out job_of bigint[], out permits tid[]
)
    language plpgsql
    set enable_bitmapscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    own_priority int := lane - 1000;
    key bigint := hashtextextended(concat(queue, kinds, paused), lane);
    known record := pgqueue._position(key, moment);
    known_at timestamptz := timestamptz '2020-01-01 00:00 UTC' + (known.reached >> 12) * interval '1 microsecond';
    -- What a claim may take with other kinds, or when a cap is not full.
    is_filtered boolean := kinds is not null or paused is not null and new_token is not null;
    leaves_out boolean := num_nonnulls(kinds, paused) > 0;
    believed record;
    -- Behind what it believes to give nothing.
    front timestamptz := '-infinity'::timestamptz;
    was_none boolean := false;
    new_since timestamptz;
    new_until timestamptz;
    is_none boolean := false;
    first_stage text := case when known.reached is null or is_whole then 'all' else 'ahead' end;
    stage text := first_stage;
    start timestamptz;
    -- Under caps this may be a second pick, and the turns of the first are over.
    upto timestamptz := clock_timestamp();
    -- Some jobs of each of some groups are cheaper than one of each of as many.
    batch int := least(wanted, greatest(10, ceil(sqrt(wanted)), ceil(wanted::float8 / shared.group_limit)));
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass);
    walked_jobs bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    looked int := 0;
    vain int := 0;
    passed_at timestamptz;
    are_locked boolean := false;
    are_taken boolean := false;
    may_give_more boolean := false;
    is_whole_walk boolean := known.reached is null;
    is_done boolean := false;
    is_cut boolean := false;
    is_long boolean := false;
    is_far boolean;
    met record;
    terms record;
    starts timestamptz[];
    visit record;
    asked int;
    came int;
begin
    picks := '{}';
    perform pgqueue._sweep_groups_if_due(moment, new_token);
    if leaves_out and known.reached is not null then
        believed := pgqueue._believed(key, moment);
        if believed.until is not null then
            front := believed.since;
            new_since := believed.new_since;
            was_none := believed.is_none;
        end if;
        if front > '-infinity' then
            if is_whole and known_at > moment - interval '11 milliseconds' then
                -- It has just looked itself.
                return;
            end if;
            stage := 'new';
        end if;
    end if;
    start := case when first_stage = 'ahead' then known_at else front end;
    while cardinality(picks) < wanted loop
        if stage in ('new', 'last') then
            met := pgqueue._groups_of_new(
                queue, kinds, paused, lane, case when stage = 'new' then new_since else '-infinity' end,
                case when stage = 'new' then known_at end, moment,
                num_nonnulls(nullif(shared.has_groups, false), shared.group_limit) > 0
            );
            new_until := case when stage = 'new' then met.upto else new_until end;
            is_none := not met.are_any and (stage = 'last' or was_none);
            is_done := is_done or is_none;
            is_cut := is_cut and not is_none;
            exit when is_none;
        else
            met := pgqueue._next_tickets(queue, own_priority, start, upto, batch, stage <> 'guest', moment);
            are_locked := are_locked or met.others > 0;
        end if;
        if met.keys is null and stage = 'new' then
            stage := first_stage;
            continue;
        elsif met.keys is null then
            if are_locked and picks <> '{}' then
                -- Those that others are just serving have their share as well.
                are_locked := false;
                stage := 'guest';
                start := front;
            elsif may_give_more then
                may_give_more := false;
                stage := 'more';
                start := upto;
                upto := clock_timestamp() + interval '1 millisecond';
            else
                is_done := true;
                is_long := vain > 60
                    -- What is paused as a whole costs nothing to pass over.
                    or pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked_jobs > 200;
                exit when picks <> '{}' or stage = 'guest' and not (leaves_out and is_long and front = '-infinity');
                if stage = 'ahead' then
                    began := clock_timestamp();
                    is_whole_walk := front = '-infinity';
                end if;
                stage := case stage when 'ahead' then 'all' when 'all' then 'guest' else 'last' end;
                start := front;
            end if;
            continue;
        end if;
        asked := wanted - cardinality(picks);
        terms := pgqueue._terms_of_groups(queue, met.keys, met.served, met.others, asked, shared);
        starts := met.starts;
        if was_none and stage not in ('new', 'last') then
            -- Where nothing holds up a job, only new ones can be there.
            starts := array(
                select case when num_nonnulls(g.most, g.rate) = 0 then greatest(g.start, new_since) else g.start end
                from unnest(met.starts, terms.limits, terms.rates) with ordinality as g (start, most, rate, nth)
                order by g.nth
            );
        end if;
        visit := pgqueue._serve_groups(
            queue, kinds, paused, lane, met.keys, terms.gives, terms.limits, terms.rates, terms.periods, terms.may_keep,
            starts, asked, moment, nullif(taken || picks, '{}'), is_top, new_token
        );
        new_token := visit.new_token;
        picks := picks || coalesce(visit.picks, '{}');
        job_of := job_of || visit.job_of;
        permits := permits || visit.permits;
        -- What the claim did not come to stays as it is.
        came := case when cardinality(picks) >= wanted then visit.groups[cardinality(visit.groups)]
            else cardinality(met.keys)
        end;
        if stage in ('new', 'last') then
            -- As if they had been served by their tickets.
            perform pgqueue._move_tickets(queue, array_agg(s.key), array_agg(own_priority), clock_timestamp())
            from (select distinct met.keys[f.of] as key from unnest(visit.groups) as f (of)) as s
            having count(*) > 0;
            -- Nothing holds them up: others have them locked.
            are_taken := picks = '{}' and num_nonnulls(terms.limits, terms.rates) = 0;
            exit when stage = 'last';
            stage := first_stage;
            continue;
        elsif stage <> 'guest' then
            if leaves_out and vain <= 60 and vain + came - coalesce(cardinality(visit.groups), 0) > 60 then
                -- What ends while it walks, it may have passed over.
                perform pgqueue._ask_for_turns(clock_timestamp() + interval '2 seconds');
            end if;
            vain := vain + greatest(came - coalesce(cardinality(visit.groups), 0), 0);
            -- The last one may have more to give.
            passed_at := coalesce(met.ats[came - (cardinality(picks) >= wanted)::int], passed_at);
            perform pgqueue._settle_tickets(
                queue, own_priority, met.tids[:came], met.keys[:came], terms.gives, terms.limits,
                cardinality(picks) >= wanted, visit.groups, visit.run_ats, visit.short, visit.lacking, met.starts,
                case when not is_filtered and paused is null then visit.believed_until end,
                paused, is_filtered, nullif(taken || picks, '{}'), moment
            );
        end if;
        exit when cardinality(picks) >= wanted;
        looked := looked + cardinality(met.keys);
        if looked > 1000 and clock_timestamp() > moment + interval '100 milliseconds' then
            is_cut := stage <> 'guest';
            exit when picks <> '{}' or not leaves_out;
            -- Perhaps there is none, or few.
            stage := 'last';
            continue;
        end if;
        start := met.ats[cardinality(met.ats)];
        may_give_more := may_give_more or visit.picks is not null;
        -- As many as will give the rest, if they are like these.
        batch := least(300, greatest(wanted - cardinality(picks), 20)
            * batch / greatest(coalesce(cardinality(visit.picks), 0), batch / 4, 1));
    end loop;
    is_far := vain > 60 or pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass) - walked
        > 200 + 3 * (looked + cardinality(picks));
    if leaves_out and (is_cut or is_done and not are_taken and (picks = '{}' or front > '-infinity')) then
        perform pgqueue._leave_vain(
            key, known.record, known.reached,
            least(case when is_cut then passed_at end, new_until, moment - interval '10 milliseconds'),
            is_cut, is_none, case when front = '-infinity' then moment end, is_long or is_far
        );
    elsif are_taken or leaves_out and pgqueue._is_walked_again(known.record, known.reached) then
        null;
    elsif is_far then
        -- Others continue from a position that a whole walk has not reached yet.
        perform pgqueue._leave_position(
            key, known.record, known.reached,
            pgqueue._since_2020(least(greatest(passed_at, known_at), moment - interval '10 milliseconds')), null,
            case when is_whole_walk
                then pgqueue._since_2020(pgqueue._believed_until(began, interval '100 milliseconds'))
            end
        );
    end if;
    if known.has_expired and picks <> '{}' and not (is_cut or is_far) then
        -- It found some at once: the others begin there as well.
        perform pgqueue._leave_position(key, known.record, null, -1, null, null);
    end if;
end;
$$;
