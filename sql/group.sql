-- Groups: whose jobs a claim takes, and how many of each.
--
-- A claim takes the tickets that are due, the earliest first, and each group gives as many jobs as its
-- weight says; where there are fewer groups than jobs wanted, so many times as many. Its ticket then goes
-- to the end. That of a group that gave fewer is settled by what the group still has: nothing, and the
-- ticket is gone; something for later, and it stands there until then; something due that it cannot give,
-- because it is full, at its rate or paused, and the ticket is blocked: whoever ends an attempt or changes
-- a setting makes it due, and so does time, first after 100 ms, in the end after 10 s.
--
-- A job of a group with a limit or a rate (group_limit, rate_limit) is taken with a permit of each, which
-- is locked first. Where the limit is 1 no job overtakes another; where it is n, at most n - 1 do.
--
-- While somebody else holds a ticket, its group is served without it: an open transaction holds up nobody.

create or replace function pgqueue._group_settings(
    queue text, group_keys text[], out weights int[], out limits int[], out rates int[], out periods interval[]
)
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
    shared pgqueue.queue;
begin
    if pg_relation_size('pgqueue.queue') = 0 then
        return;
    end if;
    shared := pgqueue._in_force(queue);
    if pg_relation_size('pgqueue.queue_narrow_idx') <= 8192 or not exists (
        select from pgqueue.queue as q where q.name in (_group_settings.queue, '') and q.group_key > ''
    ) then
        weights := array_fill(shared.weight, array[cardinality(group_keys)]);
        if shared.group_limit is not null then
            limits := array_fill(shared.group_limit, array[cardinality(group_keys)]);
        end if;
        return;
    end if;
    select
        array_agg(coalesce(s.weight, shared.weight) order by g.nth),
        array_agg(coalesce(s.group_limit, shared.group_limit) order by g.nth),
        array_agg(s.rate_limit order by g.nth),
        array_agg(coalesce(s.rate_period, '1 second') order by g.nth)
    into weights, limits, rates, periods
    from unnest(group_keys) with ordinality as g (key, nth)
    cross join lateral (
        select
            (array_agg(q.weight order by q.nth) filter (where q.weight is not null))[1] as weight,
            (array_agg(q.group_limit order by q.nth) filter (where q.group_limit is not null))[1] as group_limit,
            (array_agg(q.rate_limit order by q.nth) filter (where q.rate_limit is not null))[1] as rate_limit,
            (array_agg(q.rate_period order by q.nth) filter (where q.rate_period is not null))[1] as rate_period
        from (
            select n.nth, q.weight, q.group_limit, q.rate_limit, q.rate_period
            from (
                values (1, _group_settings.queue, g.key), (2, '', g.key), (3, _group_settings.queue, '*'), (4, '', '*')
            ) as n (nth, name, key)
            join pgqueue.queue as q on q.name = n.name and q.kind = '' and q.group_key = n.key
        ) as q
    ) as s;
end;
$$;

comment on function pgqueue._group_settings(text, text[]) is
'The weight, limit and rate in force for each of some groups; null instead of an
array where none is set. As _in_force, for many.';

create or replace function pgqueue._common_limit(queue text, out is_plain boolean, out most int)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    is_plain := true;
    if pg_relation_size('pgqueue.queue') > 0 then
        select
            count(q.weight) = 0 and coalesce(max(q.group_key), '') = '',
            coalesce(max(q.group_limit) filter (where q.name <> ''), max(q.group_limit))
        into is_plain, most
        from pgqueue.queue as q
        where q.name in (_common_limit.queue, '') and (num_nonnulls(q.weight, q.group_limit) > 0 or q.group_key > '');
    end if;
end;
$$;

comment on function pgqueue._common_limit(text) is
'The limit of all groups of a queue, null for none, if that is all that is set
for them (is_plain).';

create or replace function pgqueue._group_caps(
    group_keys text[], limits int[], rates int[], periods interval[], wanted int[],
    out caps pgqueue._cap[], out groups int[], out wants int[]
)
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
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

comment on function pgqueue._group_caps(text[], int[], int[], interval[], int[]) is
'The caps of some groups, the number of the group for each, and how many permits
of it are wanted.';

create or replace function pgqueue._make_group_permits(queue text, group_keys text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    keys text[];
    jobs int[];
    settings record;
    of_groups record;
begin
    select array_agg(g.key), array_agg(g.jobs) into keys, jobs
    from (
        select u.key, count(*)::int as jobs from unnest(group_keys) as u (key) where u.key is not null group by u.key
    ) as g;
    if keys is null then
        return;
    end if;
    settings := pgqueue._group_settings(queue, keys);
    if num_nonnulls(settings.limits, settings.rates) > 0 then
        of_groups := pgqueue._group_caps(keys, settings.limits, settings.rates, settings.periods, jobs);
        perform pgqueue._make_permits(queue, of_groups.caps, of_groups.wants);
    end if;
end;
$$;

comment on function pgqueue._make_group_permits(text, text[]) is
'Makes more permits for groups that have a limit or a rate, one for each time
that one is named, as far as they lack any.';

create or replace function pgqueue._take_free(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], starts timestamptz[],
    wanted int, moment timestamptz, taken tid[], has_recovered boolean,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
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
            where hashtextextended(j.group_key, hashtext(j.queue)) = hashtextextended(g.key, hashtext(_take_free.queue))
                and -j.priority = -_take_free.priority and j.queue = _take_free.queue and j.group_key = g.key
                and j.run_at between g.start and _take_free.moment
                and case when has_recovered
                    then j.lease_expires_at is null and ((j.terms).expires_at <= _take_free.moment) is not true
                    else (j.lease_expires_at <= _take_free.moment) is not false
                end
                and (_take_free.kinds is null or j.kind = any (_take_free.kinds))
                and (_take_free.paused is null or coalesce(
                    _take_free.paused -> j.group_key -> j.kind, _take_free.paused -> j.group_key -> '',
                    _take_free.paused -> '' -> j.kind, _take_free.paused -> '' -> ''
                ) = 'false')
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

comment on function pgqueue._take_free(
    text, text[], jsonb, int, text[], int[], timestamptz[], int, timestamptz, tid[], boolean
) is
'Locks due jobs of groups that have no cap, of each up to so many, and in all;
says of which group each is, and since when any is over. Plans as _pick_groups
sets it.';

create or replace function pgqueue._take_capped(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], frees int[], limits int[],
    starts timestamptz[], kept bigint[], kept_of int[], wanted int, moment timestamptz, taken tid[],
    has_recovered boolean,
    out picks tid[], out ids bigint[], out groups int[], out run_ats timestamptz[], out over_at timestamptz
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    select
        array_agg(v.tid), array_agg(v.id), array_agg(v.nth::int), array_agg(v.run_at),
        min(v.run_at) filter (where v.is_over)
    into picks, ids, groups, run_ats, over_at
    from (
        select l.*, g.nth
        from unnest(group_keys, frees, limits, starts) with ordinality as g (key, free, most, start, nth)
        cross join lateral (
            select l.*
            from (
                select c.tid, bool_and(c.is_wanted) over (rows unbounded preceding) as is_open
                from (
                    select
                        j.ctid as tid,
                        (_take_capped.kinds is null or j.kind = any (_take_capped.kinds))
                        and (_take_capped.paused is null or coalesce(
                            _take_capped.paused -> j.group_key -> j.kind, _take_capped.paused -> j.group_key -> '',
                            _take_capped.paused -> '' -> j.kind, _take_capped.paused -> '' -> ''
                        ) = 'false') as is_wanted
                    from (
                        -- What waited for its retry with a permit comes first.
                        select k.ctid as tid
                        from unnest(kept, kept_of) as u (id, nth)
                        join pgqueue.job as k on k.id = u.id
                        where kept is not null and u.nth = g.nth
                        union all
                        select o.tid
                        from (
                            select j.ctid as tid
                            from pgqueue.job as j
                            where hashtextextended(j.group_key, hashtext(j.queue))
                                = hashtextextended(g.key, hashtext(_take_capped.queue))
                                and -j.priority = -_take_capped.priority
                                and j.queue = _take_capped.queue and j.group_key = g.key
                                and j.run_at between g.start and _take_capped.moment
                                and case when has_recovered
                                    then j.lease_expires_at is null
                                        and ((j.terms).expires_at <= _take_capped.moment) is not true
                                    else (j.lease_expires_at <= _take_capped.moment) is not false
                                end
                                and (kept is null or j.id <> all (kept))
                                and (g.most is distinct from 1
                                    or not pgqueue._has_higher(_take_capped.queue, g.key, _take_capped.priority, moment))
                                -- Only where a limit asks for order does a job that is left out hold up the next.
                                and (g.most is not null or (
                                    (_take_capped.kinds is null or j.kind = any (_take_capped.kinds))
                                    and (_take_capped.paused is null or coalesce(
                                        _take_capped.paused -> j.group_key -> j.kind,
                                        _take_capped.paused -> j.group_key -> '',
                                        _take_capped.paused -> '' -> j.kind, _take_capped.paused -> '' -> ''
                                    ) = 'false')
                                ))
                                and (taken is null or j.ctid <> all (taken))
                            order by j.run_at, j.id
                            limit g.free + coalesce(g.most - 1, 100)
                        ) as o
                        limit g.free + coalesce(g.most - 1, 100)
                    ) as o
                    join pgqueue.job as j on j.ctid = o.tid
                    offset 0
                ) as c
            ) as c
            cross join lateral (
                select
                    k.ctid as tid, k.id,
                    -- A retry that comes first says nothing of those behind it.
                    case when k.id = any (kept) then '-infinity' else k.run_at end as run_at,
                    coalesce(k.lease_expires_at, (k.terms).expires_at) <= _take_capped.moment as is_over
                from pgqueue.job as k
                where k.ctid = c.tid and k.run_at <= _take_capped.moment and case when has_recovered
                    then k.lease_expires_at is null and ((k.terms).expires_at <= _take_capped.moment) is not true
                    else (k.lease_expires_at <= _take_capped.moment) is not false
                end
                for update skip locked
            ) as l
            where c.is_open
            limit g.free
        ) as l
        where g.free > 0
        limit wanted
    ) as v;
end;
$$;

comment on function pgqueue._take_capped(
    text, text[], jsonb, int, text[], int[], int[], timestamptz[], bigint[], int[], int, timestamptz, tid[],
    boolean
) is
'_take_free for groups that have a limit or a rate, of each as many as permits of
it are locked: first those that kept one, then in order.';

create or replace function pgqueue._has_higher(
    queue text, group_key text, priority int, moment timestamptz
)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select
        from pgqueue.job as h
        where hashtextextended(h.group_key, hashtext(h.queue))
            = hashtextextended(_has_higher.group_key, hashtext(_has_higher.queue))
            and -h.priority < -_has_higher.priority
            and h.queue = _has_higher.queue and h.group_key = _has_higher.group_key
            and h.run_at <= moment and h.lease_expires_at is null
            and ((h.terms).expires_at <= moment) is not true
    );
end;
$$;

comment on function pgqueue._has_higher(text, text, int, timestamptz) is
'Whether a job of a group waits that is due and has a higher priority. Plans as
_pick_groups sets it.';

create or replace function pgqueue._end_holders(queue text, group_keys text[], moment timestamptz)
    returns int
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    expired tid[] := array(
        select j.tid
        from unnest(group_keys) as g (key)
        join pgqueue.permit as p on hashtext(p.queue) = hashtext(_end_holders.queue) and hashtext(p.kind) = hashtext('')
            and hashtext(p.group_key) = hashtext(g.key) and not p.is_rate
            and p.queue = _end_holders.queue and p.kind = '' and p.group_key = g.key
        cross join lateral (
            select j.ctid as tid
            from pgqueue.job as j
            where j.id = p.job_id and j.token = p.token and j.lease_expires_at <= moment
            for update skip locked
        ) as j
    );
begin
    return case when expired = '{}' then 0 else pgqueue._expire(expired, moment) end;
end;
$$;

comment on function pgqueue._end_holders(text, text[], timestamptz) is
'Ends the attempts that hold permits of full groups under an expired lease;
returns how many. Plans as _pick_groups sets it.';

create or replace function pgqueue._visit_capped(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[],
    rates int[], periods interval[], starts timestamptz[], wanted int, moment timestamptz, taken tid[],
    has_recovered boolean, inout new_token bigint,
    out picks tid[], out groups int[], out run_ats timestamptz[], out over_at timestamptz,
    out is_short boolean[], out is_lacking boolean[], out free_ats timestamptz[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    of_groups record := pgqueue._group_caps(group_keys, limits, rates, periods, gives);
    locked record;
    frees int[];
    kept bigint[];
    kept_of int[];
    full_keys text[];
    found_jobs record;
    given record;
begin
    locked := pgqueue._lock_permits(queue, of_groups.caps, of_groups.wants, new_token, moment);
    select
        array_agg(coalesce(f.free, 0) order by g.nth),
        array_agg(coalesce(f.is_short, false) order by g.nth),
        array_agg(coalesce(f.is_lacking, false) order by g.nth)
    into frees, is_short, is_lacking
    from unnest(group_keys) with ordinality as g (key, nth)
    left join (
        select
            c.nth, min(c.permits)::int as free, bool_or(c.permits < c.jobs and c.is_made) as is_short,
            bool_or(c.permits < c.jobs and not c.is_made) as is_lacking
        from (
            select c.nth, c.jobs, c.is_made, (select count(*) from unnest(locked.caps_of) as u (cap) where u.cap = c.cap) as permits
            from unnest(of_groups.groups, of_groups.wants, locked.are_made) with ordinality as c (nth, jobs, is_made, cap)
        ) as c
        group by c.nth
    ) as f on f.nth = g.nth;
    if true = any (is_lacking) then
        -- For the next claim.
        perform pgqueue._make_permits(queue, array_agg(of_groups.caps[c.cap]), array_agg(c.jobs))
        from unnest(of_groups.groups, of_groups.wants, locked.are_made) with ordinality as c (nth, jobs, is_made, cap)
        where is_lacking[c.nth] and not c.is_made;
    end if;

    if limits is not null and exists (select from pgqueue.queue as q where q.group_on_retry = 'block') then
        select array_agg(j.id), array_agg(g.nth::int) into kept, kept_of
        from unnest(group_keys) with ordinality as g (key, nth)
        join pgqueue.permit as p on hashtext(p.queue) = hashtext(_visit_capped.queue) and hashtext(p.kind) = hashtext('')
            and hashtext(p.group_key) = hashtext(g.key) and not p.is_rate
            and p.queue = _visit_capped.queue and p.kind = '' and p.group_key = g.key
        join pgqueue.job as j on j.id = p.job_id and j.kept_token = p.token and j.token is null
            and j.run_at <= moment;
    end if;
    found_jobs := pgqueue._take_capped(
        queue, kinds, paused, priority, group_keys, frees, limits, starts, kept, kept_of,
        wanted, moment, taken, has_recovered
    );
    picks := found_jobs.picks;
    groups := found_jobs.groups;
    run_ats := found_jobs.run_ats;
    over_at := found_jobs.over_at;
    if over_at is not null then
        return;
    end if;
    -- Full, and it gives nothing: do all that hold the permits still run?
    full_keys := array(
        select g.key
        from unnest(group_keys, is_short, limits) with ordinality as g (key, is_short, most, nth)
        where g.is_short and g.most is not null and (g.nth = any (groups)) is not true
    );
    if full_keys <> '{}' and has_recovered is not true
        and pgqueue._end_holders(queue, full_keys, moment) > 0
    then
        over_at := moment;
        return;
    end if;
    -- A group that has permits left is short of jobs.
    select
        array_agg(g.is_short and g.free <= g.jobs order by g.nth),
        array_agg(g.is_lacking and g.free <= g.jobs order by g.nth)
    into is_short, is_lacking
    from (
        select u.*, (select count(*) from unnest(found_jobs.groups) as f (nth) where f.nth = u.nth) as jobs
        from unnest(is_short, is_lacking, frees) with ordinality as u (is_short, is_lacking, free, nth)
    ) as g;
    if true = any (is_short) then
        free_ats := array(
            select case when g.is_short then (
                select min(p.free_at)
                from unnest(of_groups.groups) with ordinality as c (nth, cap)
                cross join lateral (
                    -- Those that are not held this claim takes, or others have them locked: then nobody knows.
                    select case when count(*) filter (where not u.is_held) <= frees[g.nth] then min(coalesce(
                        u.free_at,
                        case when (of_groups.caps[c.cap]).is_rate then moment + (of_groups.caps[c.cap]).period end
                    )) end as free_at
                    from pgqueue._permits(queue, of_groups.caps[c.cap], moment) as u
                ) as p
                where c.nth = g.nth
            ) end
            from unnest(is_short) with ordinality as g (is_short, nth)
            order by g.nth
        );
    end if;
    if picks is null then
        return;
    end if;
    new_token := coalesce(new_token, nextval('pgqueue.token_seq'));
    select array_agg(p.permit) as permits, array_agg(j.id) as ids into given
    from (
        select u.permit, u.cap, row_number() over (partition by u.cap order by u.place) as nth
        from unnest(locked.permits, locked.caps_of) with ordinality as u (permit, cap, place)
    ) as p
    join (
        select u.id, u.of, row_number() over (partition by u.of order by u.place) as nth
        from unnest(found_jobs.ids, found_jobs.groups) with ordinality as u (id, of, place)
    ) as j on j.of = of_groups.groups[p.cap] and j.nth = p.nth;
    perform pgqueue._give_permits(given.permits, given.ids, new_token, moment);
end;
$$;

comment on function pgqueue._visit_capped(
    text, text[], jsonb, int, text[], int[], int[], int[], interval[], timestamptz[], int, timestamptz, tid[],
    boolean, bigint
) is
'_take_free for groups that have a limit or a rate, with permits, given to the
claim of this token, which it draws if it is null; which groups are short of
permits, and until when at the latest, and which lack some that are still to be
made.';

create or replace function pgqueue._visit_groups(
    queue text, kinds text[], paused jsonb, priority int, group_keys text[], gives int[], limits int[],
    rates int[], periods interval[], starts timestamptz[], wanted int, moment timestamptz, taken tid[],
    has_recovered boolean, inout new_token bigint,
    out picks tid[], out over_at timestamptz, out gaves int[], out last_ats timestamptz[], out reached boolean[],
    out is_short boolean[], out is_lacking boolean[], out free_ats timestamptz[], out believed_until timestamptz
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    free record;
    capped record;
    is_capped boolean := num_nonnulls(limits, rates) > 0;
    own_gives int[] := gives;
    capped_gives int[];
    groups int[];
    run_ats timestamptz[];
begin
    if is_capped then
        select
            array_agg(case when num_nonnulls(g.most, g.rate) = 0 then g.give else 0 end order by g.nth),
            array_agg(case when num_nonnulls(g.most, g.rate) > 0 then g.give else 0 end order by g.nth)
        into own_gives, capped_gives
        from unnest(gives, limits, rates) with ordinality as g (give, most, rate, nth);
    end if;
    if not is_capped or 0 < any (own_gives) then
        free := pgqueue._take_free(
            queue, kinds, paused, priority, group_keys, own_gives, starts, wanted, moment, taken, has_recovered
        );
        picks := free.picks;
        over_at := free.over_at;
        groups := free.groups;
        run_ats := free.run_ats;
    end if;
    reached := array(
        select g.give > 0 and (cardinality(picks) = wanted and g.nth > groups[wanted]) is not true
        from unnest(own_gives) with ordinality as g (give, nth)
        order by g.nth
    );
    if is_capped and over_at is null and 0 < any (capped_gives) and (cardinality(picks) = wanted) is not true then
        wanted := wanted - coalesce(cardinality(picks), 0);
        capped := pgqueue._visit_capped(
            queue, kinds, paused, priority, group_keys, capped_gives, limits, rates, periods, starts, wanted,
            moment, taken, has_recovered, new_token
        );
        over_at := capped.over_at;
        new_token := capped.new_token;
        is_short := capped.is_short;
        is_lacking := capped.is_lacking;
        free_ats := capped.free_ats;
        reached := array(
            select g.is_reached or g.give > 0
                and (cardinality(capped.picks) = wanted and g.nth > capped.groups[wanted]) is not true
            from unnest(reached, capped_gives) with ordinality as g (is_reached, give, nth)
            order by g.nth
        );
        picks := picks || capped.picks;
        groups := groups || capped.groups;
        run_ats := run_ats || capped.run_ats;
    end if;
    select array_agg(v.jobs order by v.nth), array_agg(v.last_at order by v.nth)
    into gaves, last_ats
    from (
        select u.nth, count(u.run_at)::int as jobs, max(u.run_at) as last_at
        from (
            select n.nth, null::timestamptz as run_at from generate_series(1, cardinality(group_keys)) as n (nth)
            union all
            select g.nth, g.run_at from unnest(groups, run_ats) as g (nth, run_at)
        ) as u
        group by u.nth
    ) as v;
    -- Finished jobs that some old snapshot keeps stand in the way.
    if pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked
        > 60 * cardinality(group_keys) + 3 * coalesce(cardinality(picks), 0)
    then
        believed_until := pgqueue._believed_until(began, '1 second');
        perform setval('pgqueue._cell_groups_slow', pgqueue._since_2020(clock_timestamp() + interval '10 seconds'));
    end if;
end;
$$;

comment on function pgqueue._visit_groups(
    text, text[], jsonb, int, text[], int[], int[], int[], interval[], timestamptz[], int, timestamptz, tid[],
    boolean, bigint
) is
'Takes jobs of some groups, of each up to so many and in all: how many of each,
and the last of its run_ats; which groups it came to at all; until when to
believe that nothing stands before those, where the walk was long; or since when
anything there is over, and then it has taken nothing.';

create or replace function pgqueue._pause_of_group(served int, gave int)
    returns interval
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return least(
        interval '10 seconds',
        interval '100 milliseconds' * power(4, case when gave > 0 then 0 else least(greatest(-served, 0), 4) end)
    );
end;
$$;

comment on function pgqueue._pause_of_group(int, int) is
'For how long nobody looks at a group that can give no more, if nobody says that
it can: longer each time, from 100 ms to 10 s.';

create or replace function pgqueue._settle_tickets(
    queue text, priority int, tickets tid[], group_keys text[], gaves int[], gives int[], limits int[],
    is_short boolean[], is_lacking boolean[], free_ats timestamptz[], starts timestamptz[],
    last_ats timestamptz[], start_until timestamptz, paused jsonb, is_filtered boolean, is_cut boolean, taken tid[],
    moment timestamptz
)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Read once, because their order counts.
    last timestamptz := clock_timestamp();
begin
    if gaves = gives and coalesce(num_nonnulls(variadic limits), 0) = 0 and start_until is null then
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
                when g.is_cut then 'same'
                when g.gave = g.give and g.gave is distinct from g.most then 'tail'
                when left_job.run_at is null then 'gone'
                when left_job.run_at > moment then 'later'
                when g.gave = g.most then 'full'
                when g.is_lacking then 'tail'
                when g.is_short then 'blocked'
                -- Of a group that is not paused as a whole, and asks for no order, another job may come.
                when is_filtered or paused is not null and g.most is null and paused -> g.key <> '{"": true}' is not false
                    then 'same'
                else 'blocked'
            end as state,
            -- A rate says exactly when, and a lease or a retry at the latest.
            g.free_at <= moment + interval '10 seconds' or g.most is null and g.free_at is not null as is_until,
            left_job.run_at as next_at
        from (
            select u.*, is_cut and u.nth = cardinality(tickets) and u.gave < u.give as is_cut
            from unnest(tickets, group_keys, gaves, gives, limits, is_short, is_lacking, free_ats, starts, last_ats)
                with ordinality
                as u (tid, key, gave, give, most, is_short, is_lacking, free_at, start, last_at, nth)
        ) as g
        left join lateral (
            select j.run_at
            from pgqueue.job as j
            where hashtextextended(j.group_key, hashtext(j.queue))
                = hashtextextended(g.key, hashtext(_settle_tickets.queue))
                and -j.priority = -_settle_tickets.priority
                and j.queue = _settle_tickets.queue and j.group_key = g.key
                and j.run_at >= g.start and j.run_at < 'infinity'
                and j.lease_expires_at is null
                and (taken is null or j.ctid <> all (taken))
                and not g.is_cut and (g.gave < g.give or g.gave = g.most)
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
                when v.is_until then v.free_at else moment + pgqueue._pause_of_group(t.served, v.gave)
            end)
            else last + v.nth * interval '1 microsecond'
        end,
        served = case v.state
            when 'same' then greatest(t.served, 0) + v.gave
            when 'full' then -3
            when 'blocked' then case when v.is_until then 0 when v.gave > 0 then -1 else least(t.served, 0) - 1 end
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

comment on function pgqueue._settle_tickets(
    text, int, tid[], text[], int[], int[], int[], boolean[], boolean[], timestamptz[], timestamptz[],
    timestamptz[], timestamptz, jsonb, boolean, boolean, tid[], timestamptz
) is
'Says of the groups that a claim came to when each is looked at next: see above.
Plans as _pick_groups sets it.';

create or replace function pgqueue._next_tickets(
    queue text, priority int, start timestamptz, upto timestamptz, most int, may_hold boolean, moment timestamptz,
    out tids tid[], out keys text[], out served int[], out starts timestamptz[], out ats timestamptz[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    free tid[];
    copies tid[];
begin
    if not may_hold then
        tids := array(
            select t.ctid
            from pgqueue.ticket as t
            where hashtext(t.queue) = hashtext(_next_tickets.queue) and t.priority = _next_tickets.priority
                and t.queue = _next_tickets.queue and t.at > start and t.at <= upto
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
    select
        array_agg(n.tid order by n.at) filter (where n.nth = 1),
        array_agg(n.group_key order by n.at) filter (where n.nth = 1),
        array_agg(n.served order by n.at) filter (where n.nth = 1),
        array_agg(n.start order by n.at) filter (where n.nth = 1),
        array_agg(n.at order by n.at) filter (where n.nth = 1),
        array_agg(n.tid) filter (where n.nth > 1)
    into tids, keys, served, starts, ats, copies
    from (
        select l.*, row_number() over (partition by l.group_key order by l.at) as nth
        from (
            select
                t.ctid as tid, t.group_key, t.served, t.at,
                -- A time of another clock is none.
                coalesce(
                    case when t.start_until between moment and moment + interval '1 minute' then t.start_at end,
                    '-infinity'
                ) as start
            from pgqueue.ticket as t
            where hashtext(t.queue) = hashtext(_next_tickets.queue) and t.priority = _next_tickets.priority
                and t.queue = _next_tickets.queue and t.at > start and t.at <= upto
            order by t.at
            limit most
            for update skip locked
        ) as l
    ) as n;
    if copies is not null then
        delete from pgqueue.ticket as t where t.ctid = any (copies);
    end if;
end;
$$;

comment on function pgqueue._next_tickets(text, int, timestamptz, timestamptz, int, boolean, timestamptz) is
'Locks the next tickets of a lane that are due, and drops copies; or, where it
may hold none, returns those that others have locked. Plans as _pick_groups sets
it.';

create or replace function pgqueue._gives(weights int[], limits int[], served int[], wanted int)
    returns int[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
declare
    each int := ceil(wanted::float8 / coalesce((select sum(w.weight) from unnest(weights) as w (weight)), cardinality(served)));
begin
    return array(
        select least(g.most, greatest(1, each * coalesce(g.weight, 1) - greatest(g.served, 0)))
        from unnest(served, weights, limits) with ordinality as g (served, weight, most, nth)
        order by g.nth
    );
end;
$$;

comment on function pgqueue._gives(int[], int[], int[], int) is
'How many jobs each of some groups may give, by its weight, to a claim that wants
so many.';

create or replace function pgqueue._pick_plain_groups(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, start timestamptz,
    out picks tid[], out first_at timestamptz, out is_done boolean
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    batch int := least(wanted, greatest(10, ceil(sqrt(wanted))));
    each int := ceil(wanted::float8 / batch);
    tickets tid[];
    is_over boolean;
    last timestamptz;
begin
    -- Distinct, because a group may have two tickets.
    select array_agg(distinct v.tid), array_agg(v.ticket order by v.at), min(v.at), bool_or(v.is_over)
    into picks, tickets, first_at, is_over
    from (
        select h.tid, t.tid as ticket, t.at, h.is_over
        from (
            select
                t.ctid as tid, t.group_key, t.at,
                coalesce(
                    case when t.start_until between moment and moment + interval '1 minute' then t.start_at end,
                    '-infinity'
                ) as start
            from pgqueue.ticket as t
            where hashtext(t.queue) = hashtext(_pick_plain_groups.queue) and t.priority = lane - 1000
                and t.queue = _pick_plain_groups.queue and t.at > start and t.at <= _pick_plain_groups.moment
            order by t.at
            limit batch
            for update skip locked
        ) as t
        cross join lateral (
            select j.ctid as tid, num_nonnulls(j.lease_expires_at, (j.terms).expires_at) > 0 as is_over
            from pgqueue.job as j
            where hashtextextended(j.group_key, hashtext(j.queue))
                = hashtextextended(t.group_key, hashtext(_pick_plain_groups.queue))
                and -j.priority = 1000 - lane
                and j.queue = _pick_plain_groups.queue and j.group_key = t.group_key
                and j.run_at between t.start and _pick_plain_groups.moment
                and (j.lease_expires_at <= _pick_plain_groups.moment) is not false
                and (_pick_plain_groups.kinds is null or j.kind = any (_pick_plain_groups.kinds))
                and (_pick_plain_groups.paused is null or coalesce(
                    _pick_plain_groups.paused -> j.group_key -> j.kind, _pick_plain_groups.paused -> j.group_key -> '',
                    _pick_plain_groups.paused -> '' -> j.kind, _pick_plain_groups.paused -> '' -> ''
                ) = 'false')
            order by j.run_at, j.id
            limit each
            for update skip locked
        ) as h
        limit wanted
    ) as v;
    first_at := first_at - interval '1 microsecond';
    is_done := cardinality(picks) = wanted and not is_over
        and pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked < 60 * batch + 3 * wanted;
    if is_done then
        last := clock_timestamp();
        update pgqueue.ticket as t
        set at = last + g.nth * interval '1 microsecond', served = 0, is_blocked = false, is_full = false
        from (select u.tid, min(u.nth) as nth from unnest(tickets) with ordinality as u (tid, nth) group by u.tid) as g
        where t.ctid = g.tid;
    end if;
end;
$$;

comment on function pgqueue._pick_plain_groups(text, text[], jsonb, int, int, timestamptz, timestamptz) is
'_pick_groups where groups have neither weights nor caps and hold as many jobs as
are wanted of each, and none is over, in two statements; says whether that was
so, or else all is to be done again. Plans as _pick_groups sets it.';

create or replace function pgqueue._pick_limited_groups(
    queue text, kinds text[], paused jsonb, lane int, most int, wanted int, moment timestamptz, start timestamptz,
    inout new_token bigint, out picks tid[], out first_at timestamptz
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    own_token bigint := -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0);
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    held record;
    taken record;
    is_long boolean;
    last timestamptz;
begin
    select
        array_agg(h.ticket order by h.at) as tickets, array_agg(h.permit order by h.at) as permits,
        min(h.at) as first_at
    into held
    from (
        -- A group may have two tickets.
        select distinct on (t.group_key) t.tid as ticket, p.tid as permit, t.at
        from (
            select t.ctid as tid, t.group_key, t.at
            from pgqueue.ticket as t
            where hashtext(t.queue) = hashtext(_pick_limited_groups.queue) and t.priority = lane - 1000
                and t.queue = _pick_limited_groups.queue and t.at > start and t.at <= _pick_limited_groups.moment
            order by t.at
            limit wanted
            for update skip locked
        ) as t
        cross join lateral (
            select k.tid
            from (
                select m.places, date_part('microseconds', clock_timestamp())::int % m.places as first
                from (
                    select case when most = 1 then 1 else least(most, (
                        select max(p.place)
                        from pgqueue.permit as p
                        where hashtext(p.queue) = hashtext(_pick_limited_groups.queue) and hashtext(p.kind) = hashtext('')
                            and hashtext(p.group_key) = hashtext(t.group_key) and not p.is_rate
                            and p.queue = _pick_limited_groups.queue and p.kind = '' and p.group_key = t.group_key
                    )) end as places
                    offset 0
                ) as m
                offset 0
            ) as r
            cross join lateral generate_series(r.first, r.first + r.places - 1) as n (nth)
            cross join lateral (
                select p.ctid as tid, p.job_id, p.token
                from pgqueue.permit as p
                where hashtext(p.queue) = hashtext(_pick_limited_groups.queue) and hashtext(p.kind) = hashtext('')
                    and hashtext(p.group_key) = hashtext(t.group_key) and not p.is_rate and p.place = n.nth % r.places + 1
                    and p.queue = _pick_limited_groups.queue and p.kind = '' and p.group_key = t.group_key
                order by p.second desc nulls last
                limit 1
            ) as p
            cross join lateral (
                select k.ctid as tid from pgqueue.permit as k where k.ctid = p.tid for update skip locked
            ) as k
            where (new_token is null or p.token is distinct from new_token) and not exists (
                select from pgqueue.job as j
                where j.id = p.job_id and coalesce(j.token, j.kept_token) = p.token
                offset 0
            )
            limit 1
        ) as p
        order by t.group_key, t.at
    ) as h;
    -- Those before it have been passed.
    first_at := held.first_at - interval '1 microsecond';
    if held.tickets is null then
        return;
    end if;
    -- Now that nobody else can take them.
    select
        array_agg(g.ticket) as tickets, array_agg(g.permit) as permits, array_agg(j.tid) as picks,
        array_agg(j.id) as ids, array_agg(h.run_at) as run_ats, array_agg(h.next_at) as next_ats
    into taken
    from unnest(held.tickets, held.permits) as g (ticket, permit)
    join pgqueue.ticket as t on t.ctid = g.ticket
    join pgqueue.permit as p on p.ctid = g.permit
    cross join lateral (
        select o.tid, o.run_at, lead(o.run_at) over () as next_at
        from (
            select j.ctid as tid, j.run_at
            from pgqueue.job as j
            where hashtextextended(j.group_key, hashtext(j.queue))
                = hashtextextended(t.group_key, hashtext(_pick_limited_groups.queue))
                and -j.priority = 1000 - lane
                and j.queue = _pick_limited_groups.queue and j.group_key = t.group_key
                and j.run_at >= coalesce(
                    case when t.start_until between moment and moment + interval '1 minute' then t.start_at end,
                    '-infinity'
                )
                and j.run_at < 'infinity' and (j.lease_expires_at <= _pick_limited_groups.moment) is not false
            order by j.run_at, j.id
            limit 2
        ) as o
        limit 1
    ) as h
    cross join lateral (
        select k.ctid as tid, k.id
        from pgqueue.job as k
        where k.ctid = h.tid and k.lease_expires_at is null and k.run_at <= _pick_limited_groups.moment
            and ((k.terms).expires_at <= _pick_limited_groups.moment) is not true
            and (_pick_limited_groups.kinds is null or k.kind = any (_pick_limited_groups.kinds))
            and (_pick_limited_groups.paused is null or coalesce(
                _pick_limited_groups.paused -> k.group_key -> k.kind, _pick_limited_groups.paused -> k.group_key -> '',
                _pick_limited_groups.paused -> '' -> k.kind, _pick_limited_groups.paused -> '' -> ''
            ) = 'false')
        for update skip locked
    ) as j
    where p.token is distinct from own_token
        and not exists (
            select from pgqueue.job as k
            where k.id = p.job_id and coalesce(k.token, k.kept_token) = p.token
            offset 0
        )
        and not (p.taken_at is null and pgqueue._is_double(p))
        -- Where a limit was lowered, those that run beyond it count.
        and not exists (
            select
            from pgqueue.permit as o
            join pgqueue.job as k on k.id = o.job_id and coalesce(k.token, k.kept_token) = o.token
            where hashtext(o.queue) = hashtext(_pick_limited_groups.queue) and hashtext(o.kind) = hashtext('')
                and hashtext(o.group_key) = hashtext(t.group_key) and not o.is_rate and o.place > most
                and o.queue = _pick_limited_groups.queue and o.kind = '' and o.group_key = t.group_key
        )
        and (most > 1 or not exists (
            select
            from pgqueue.job as o
            where hashtextextended(o.group_key, hashtext(o.queue))
                = hashtextextended(t.group_key, hashtext(_pick_limited_groups.queue))
                and -o.priority < 1000 - lane
                and o.queue = _pick_limited_groups.queue and o.group_key = t.group_key
                and o.run_at <= moment and o.lease_expires_at is null
                and ((o.terms).expires_at <= moment) is not true
        ));
    picks := taken.picks;
    if picks is null then
        return;
    end if;
    new_token := coalesce(new_token, nextval('pgqueue.token_seq'));
    perform pgqueue._give_permits(taken.permits, taken.ids, new_token, moment);
    is_long := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked
        > 60 * cardinality(picks);
    if most = 1 and array_position(taken.next_ats, null) is not null then
        delete from pgqueue.ticket as t
        using unnest(taken.tickets, taken.next_ats) as g (ticket, next_at)
        where t.ctid = g.ticket and g.next_at is null;
    end if;
    last := clock_timestamp();
    update pgqueue.ticket as t
    set at = case
            when most > 1 then last + g.nth * interval '1 microsecond'
            when g.next_at > moment then g.next_at
            else moment + interval '1 second' + g.nth * interval '1 microsecond'
        end,
        served = case when most = 1 and g.next_at <= moment then -3 else 0 end,
        is_blocked = most = 1 and g.next_at <= moment,
        is_full = most = 1 and g.next_at <= moment,
        start_at = case when is_long then g.run_at else t.start_at end,
        start_until = case when is_long then pgqueue._believed_until(began, '1 second') else t.start_until end
    from unnest(taken.tickets, taken.run_ats, taken.next_ats) with ordinality as g (ticket, run_at, next_at, nth)
    where t.ctid = g.ticket and (most > 1 or g.next_at is not null);
end;
$$;

comment on function pgqueue._pick_limited_groups(
    text, text[], jsonb, int, int, int, timestamptz, timestamptz, bigint
) is
'_pick_groups where all groups have the same limit, and neither weights nor
rates: one job of each whose first job and one permit can be had at once. The
others are left as they are, for the general way. Plans as _pick_groups sets it.';

create or replace function pgqueue._pick_groups(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, is_whole boolean,
    taken tid[], inout new_token bigint, out picks tid[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_sort = on
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    own_priority int := lane - 1000;
    key bigint := hashtextextended(concat(queue, kinds, paused), lane);
    known record := pgqueue._position(key, moment);
    -- What a claim with other kinds, or when a cap is not full, may take.
    is_filtered boolean := kinds is not null or paused is not null and new_token is not null;
    start timestamptz := '-infinity'::timestamptz;
    -- Under caps this may be a second pick, and the turns of the first are over.
    upto timestamptz := clock_timestamp();
    -- From the position; from the beginning; those that others hold.
    stage int := 2;
    known_at timestamptz := timestamptz '2020-01-01 00:00 UTC' + (known.reached >> 12) * interval '1 microsecond';
    -- Some jobs of each of some groups are cheaper than one of each of as many.
    batch int := least(wanted, greatest(10, ceil(sqrt(wanted))));
    looked int := 0;
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass);
    may_give_more boolean := false;
    passed_at timestamptz;
    vain int := 0;
    met record;
    settings record;
    gives int[];
    excluded tid[];
    visit record;
    reached record;
    common record;
    plain record;
    limited record;
begin
    picks := '{}';
    perform pgqueue._sweep_groups_if_due(moment);
    if known.reached is not null and not is_whole then
        stage := 1;
        start := known_at;
    end if;
    if taken is null and not is_whole then
        common := pgqueue._common_limit(queue);
        if common.is_plain and common.most is null then
            plain := pgqueue._pick_plain_groups(queue, kinds, paused, lane, wanted, moment, start);
            if plain.is_done then
                picks := plain.picks;
                passed_at := plain.first_at;
            end if;
        elsif common.is_plain then
            limited := pgqueue._pick_limited_groups(
                queue, kinds, paused, lane, common.most, wanted, moment, start, new_token
            );
            picks := coalesce(limited.picks, '{}');
            passed_at := limited.first_at;
            new_token := limited.new_token;
            -- Each may give more than one.
            may_give_more := picks <> '{}' and common.most > 1;
        end if;
    end if;
    while cardinality(picks) < wanted loop
        met := pgqueue._next_tickets(queue, own_priority, start, upto, batch, stage < 3, moment);
        if met.keys is null and may_give_more then
            -- All have been looked at: once more at those that gave what was asked.
            may_give_more := false;
            upto := clock_timestamp() + interval '1 millisecond';
            continue;
        elsif met.keys is null then
            exit when picks <> '{}' or stage = 3;
            stage := stage + 1;
            start := '-infinity'::timestamptz;
            began := clock_timestamp();
            continue;
        end if;
        settings := pgqueue._group_settings(queue, met.keys);
        gives := pgqueue._gives(settings.weights, settings.limits, met.served, wanted - cardinality(picks));
        excluded := nullif(taken || picks, '{}');
        visit := pgqueue._visit_groups(
            queue, kinds, paused, own_priority, met.keys, gives, settings.limits, settings.rates,
            settings.periods, met.starts, wanted - cardinality(picks), moment, excluded, false, new_token
        );
        if visit.over_at is not null then
            perform pgqueue._recover(queue, lane, coalesce(visit.picks, '{}'), visit.over_at, moment);
            visit := pgqueue._visit_groups(
                queue, kinds, paused, own_priority, met.keys, gives, settings.limits, settings.rates,
                settings.periods, met.starts, wanted - cardinality(picks), moment, excluded, true, new_token
            );
        end if;
        new_token := visit.new_token;
        picks := picks || coalesce(visit.picks, '{}');
        if stage < 3 then
            -- What the claim did not come to stays as it is.
            select
                array_agg(g.tid) as tids, array_agg(g.key) as keys, array_agg(g.gave) as gaves,
                array_agg(g.give) as gives, array_agg(g.most) as limits, array_agg(g.is_short) as is_short,
                array_agg(g.is_lacking) as is_lacking, array_agg(g.free_at) as free_ats,
                array_agg(g.start) as starts, array_agg(g.last_at) as last_ats, array_agg(g.at) as ats,
                count(*) filter (where g.gave = 0) as vain
            into reached
            from unnest(
                met.tids, met.keys, visit.gaves, gives, settings.limits, visit.is_short, visit.is_lacking,
                visit.free_ats, met.starts, visit.last_ats, met.ats, visit.reached
            ) as g (tid, key, gave, give, most, is_short, is_lacking, free_at, start, last_at, at, is_reached)
            where g.is_reached;
            vain := vain + reached.vain;
            -- The last one may have more to give.
            passed_at := coalesce(
                reached.ats[cardinality(reached.ats) - (cardinality(picks) = wanted)::int], passed_at
            );
            perform pgqueue._settle_tickets(
                queue, own_priority, reached.tids, reached.keys, reached.gaves, reached.gives, reached.limits,
                reached.is_short, reached.is_lacking, reached.free_ats, reached.starts, reached.last_ats,
                case when not is_filtered and paused is null then visit.believed_until end,
                paused, is_filtered, cardinality(picks) = wanted, nullif(taken || picks, '{}'), moment
            );
        end if;
        exit when cardinality(picks) = wanted;
        looked := looked + cardinality(met.keys);
        exit when looked > 1000 and clock_timestamp() > moment + interval '100 milliseconds';
        start := met.ats[cardinality(met.ats)];
        may_give_more := may_give_more or visit.picks is not null;
        -- As many as will give the rest, if they are as these.
        batch := least(300, greatest(wanted - cardinality(picks), 20)
            * batch / greatest(coalesce(cardinality(visit.picks), 0), batch / 4, 1));
    end loop;
    if pg_stat_get_xact_tuples_returned('pgqueue.ticket_lane_idx'::regclass) - walked
        > 200 + 3 * (looked + cardinality(picks)) or vain > 60
    then
        -- Others go on from a position that a whole walk has not reached yet.
        perform pgqueue._leave_place(
            key, known.record,
            least(greatest(passed_at, known_at), moment - interval '10 milliseconds'), null,
            case when known_at is null or stage > 1 and not is_whole then began end
        );
    end if;
end;
$$;

comment on function pgqueue._pick_groups(text, text[], jsonb, int, int, timestamptz, boolean, tid[], bigint) is
'_pick for the lanes of groups: locks up to so many due jobs, of the groups whose
turn it is, with permits where they need any.';
