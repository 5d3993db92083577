-- The visit of a claim to some groups: which jobs they give, how many, and with which permits.
--
-- If a group has a limit or a rate (group_limit, rate_limit), its jobs are taken with a permit for each, which
-- is locked before the job. With a limit of 1 no job overtakes another; with a limit of n, at most n - 1 do.

-- The weight, limit and rate in force for each of some groups, like _in_force for many; null for limits or rates
-- if none is set. may_keep: whether any job may keep its permit for its retry.
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
        array_agg(coalesce(s.weight, 1) order by g.nth),
        case when count(s.group_limit) > 0 then array_agg(s.group_limit order by g.nth) end,
        case when count(s.rate_limit) > 0 then array_agg(s.rate_limit order by g.nth) end,
        array_agg(coalesce(s.rate_period, '1 second') order by g.nth), coalesce(bool_or(s.may_keep), false)
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
                -- A rate of the queue does not apply to each of its groups.
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
end;
$$;

-- How many jobs each of some groups may give, by its weight (null: 1 each), to a claim that wants this many and may
-- visit so many other groups later.
create or replace function pgqueue._gives(weights int[], limits int[], served int[], others int, wanted int)
    returns int[]
    language plpgsql
    immutable
as $$
declare
    each int := ceil(
        wanted::float8
        / (others + coalesce((select sum(coalesce(w.weight, 1)) from unnest(weights) as w (weight)), cardinality(served)))
    );
begin
    return array(
        select least(g.most, greatest(1, each * coalesce(g.weight, 1) - greatest(g.served, 0)))
        from unnest(served, weights, limits) with ordinality as g (served, weight, most, nth)
        order by g.nth
    );
end;
$$;

-- The caps of some groups, and for each cap the number of its group and how many permits are wanted.
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

-- Creates permits for groups that have a limit or a rate, unless they have enough: as many as the group is
-- listed, but at least four.
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

-- Locks due jobs of groups without caps: at most gives[i] of each group, and wanted in all. Returns to which
-- group each job belongs, and in over_at the first run_at of one that has expired. Relies on the planner settings
-- of _pick_groups.
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
                -- If a group is paused as a whole, its jobs are not even read.
                and not pgqueue._is_group_paused(g.key, _take_free.paused)
                and (taken is null or j.ctid <> all (taken))
            order by j.run_at, j.id
            limit g.give
            for update skip locked
        ) as h
        -- Groups are read in order, and those after the last job wanted are not touched.
        limit wanted
    ) as v;
end;
$$;

-- Whether a group has a due job of a higher priority. Relies on the planner settings of _pick_groups.
create or replace function pgqueue._has_higher(queue text, group_key text, priority int, moment timestamptz)
    returns boolean
    language plpgsql
as $$
begin
    return (
        select true
        from pgqueue.job as h
        where pgqueue._is_in_group(h, _has_higher.queue, _has_higher.group_key)
            and -h.priority < -_has_higher.priority and pgqueue._is_ready(h, '-infinity', moment, true)
        -- In this order, so that the index of groups is used.
        order by -h.priority, h.run_at
        limit 1
    ) is not null;
end;
$$;

-- Whether a job whose retry is due has kept a permit of its group, within its limit. Then it may be taken only
-- with that permit, even if another claim has it locked. Relies on the planner settings of _pick_groups.
create or replace function pgqueue._keeps_permit(job pgqueue.job, most int, moment timestamptz)
    returns boolean
    language plpgsql
as $$
begin
    -- A job past its expires_at must be found, so that it is cancelled.
    return ((job.terms).expires_at <= moment) is not true and exists (
        select from pgqueue.permit as p
        where pgqueue._is_permit_of(p, job.queue, '', job.group_key) and pgqueue._is_kept(p, job, moment)
            and p.job_id = job.id and p.place <= most
    ) and (pgqueue._in_force(job.queue, job.kind, job.group_key)).group_on_retry = 'block';
end;
$$;

-- _take_free for groups that may have a limit: locks permits, then as many due jobs, in order. It passes over at
-- most extra jobs that other sessions have locked. is_top: no group has anything of a higher priority. Relies
-- on the planner settings of _pick_groups.
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
        -- Candidates in order, up to the first job that this claim may not take.
        cross join lateral (
            select c.tids[:coalesce(array_position(c.tids, null) - 1, cardinality(c.tids))] as tids
            from (
                -- Asked once for all jobs: the answer could change between two of them, which would
                -- leave out only the first ones.
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
                        -- Only where a limit requires order does an unwanted job hold up the next one.
                        and (g.most is not null or w.is_wanted)
                        and (taken is null or j.ctid <> all (taken))
                        and (j.permits is null or not pgqueue._keeps_permit(j, g.most, _take_limited.moment))
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
                        and (k.permits is null or not pgqueue._keeps_permit(k, g.most, _take_limited.moment))
                    for update skip locked
                ) as k
                limit least(g.give, cardinality(p.permits))
            ) as l
        ) as h
        -- Groups are read in order, and those after the last job wanted are not touched.
        limit wanted
    ) as v;
end;
$$;

-- Locks jobs whose retries are due and that have kept the permits of their groups. left_over: how many jobs
-- each group may give in addition. Relies on the planner settings of _pick_groups.
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
                -- Checked again on the locked row: the permit may have been given to another job meanwhile.
                and not p.is_rate and p.free_at = 'infinity' and p.job_id = j.id
                -- A claim may visit a group twice.
                and p.taken_at is distinct from _take_kept.moment
                -- Nor has the job taken another permit since, while group_on_retry was set differently.
                and not exists (
                    select from pgqueue.permit as o
                    where pgqueue._is_permit_of(o, _take_kept.queue, '', g.key) and not o.is_rate
                        and o.free_at = 'infinity' and o.job_id = p.job_id and (o.token, o.ctid) > (p.token, p.ctid)
                )
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

-- How many jobs some groups may give under their rates. Relies on the planner settings of _pick_groups.
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

-- Locks a rate's permit for each picked job whose group (by its number) has a rate; refused: the jobs that
-- get none. Relies on the planner settings of _pick_groups.
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

-- Takes jobs of some groups: at most gives[i] of each, and wanted in all. Returns where they are, and the number
-- of each one's group. If they need permits, gives them to the claim with this token (drawn here if null): the
-- job job_of[i] has the permit permits[i]. believed_until is set after a long walk: until then, claims need not
-- look before these jobs. over_at is set if any has expired: then recover those, and visit the groups again.
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
    -- A long walk: an old snapshot keeps index entries of finished jobs and taken permits in its way.
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
        -- A retry is served out of turn, so its run_at says nothing about where to start next time.
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

-- Which of the groups that gave fewer jobs than asked for are short of permits, and which of these are lacking
-- permits that will exist soon. again: how many jobs to ask for once more, from groups that are not full after
-- all. Relies on the planner settings of _pick_groups.
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
        -- Not short of permits: other sessions may have locked its first jobs, so ask again.
        again := array(
            select greatest(g.give - (select count(*) from unnest(groups) as f (of) where f.of = g.nth), 0)::int
            from unnest(gives) with ordinality as g (give, nth) order by g.nth
        );
        return;
    end if;
    -- Groups that are full and gave nothing: are the holders of their permits all still running?
    if vain_keys is not null and pgqueue._review_permits(queue, '', vain_keys, vain_limits, moment, new_token)
        + pgqueue._forget_future(queue, '', case when rates is not null then vain_keys end, moment) > 0
    then
        again := array(
            select case when g.key = any (vain_keys) then g.give else 0 end
            from unnest(group_keys, gives) with ordinality as g (key, give, nth) order by g.nth
        );
    end if;
    -- For the next claim: this one may not take permits that it has created.
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

-- _visit_groups, repeated after a recovery if anything has expired, and once more for groups that turn out not to
-- be full. short, lacking: see _look_for_permits. Relies on the planner settings of _pick_groups.
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
